//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/failsafe-go/failsafe-go/adaptivelimiter"
	"github.com/failsafe-go/failsafe-go/bulkhead"

	"github.com/pgxgated/pgxgated"
)

// experiment measures one thing and returns it as tables. Where peers are compared, they take turns within one run.
type experiment struct {
	id, title string
	run       func(ctx context.Context, b *bench, short bool) ([]*table, error)
}

var experiments = []experiment{
	{"a", "goodput and latency against offered load", overload},
	{"b", "cancel storm", storm},
	{"c", "isolation of two workloads", isolation},
	{"d", "tail of the wait at equal throughput", tail},
	{"e", "recovery after a stall of the server", recovery},
	{"f", "steady state", steady},
	{"g", "waiters", waiters},
	{"h", "the gate alone", alone},
}

// columnsOf are the CSV files of the experiments.
var columnsOf = map[string][]string{
	"overload": {
		"peer", "load", "capacity_per_s", "offered_per_s", "goodput_per_s", "goodput_of_capacity", "of_capacity_min", "of_capacity_max", "ok_share", "late_share", "expired_share",
		"refused_share", "timed_out_share", "failed_share", "p50_ms", "p99_ms", "max_ms", "refusal_p50_ms", "refusal_p99_ms", "admitted_p99_of_deadline", "generator_lag_p99_ms", "commonest_failure",
	},
	"storm": {
		"peer", "limit", "offered_per_s", "goodput_per_s", "goodput_cold_per_s", "over_limits", "connections_made", "late_share", "expired_share",
		"refused_share", "timed_out_share", "failed_share", "client_cpu_ms_per_s", "pooler_cpu_ms_per_s", "server_cpu_ms_per_s", "server_cpu_ms_per_commit", "commonest_failure",
	},
	"isolation": {
		"peer", "flood", "offered_per_s", "goodput_per_s", "ok_percent",
		"p50_ms", "p99_ms", "max_ms", "batch_offered_per_s", "batch_goodput_per_s", "commonest_failure",
	},
	"tail":              {"peer", "throughput_per_s", "wait_p50_ms", "wait_p99_ms", "wait_max_ms", "not_done"},
	"tail_waits":        {"peer", "percent", "wait_ms"},
	"recovery":          {"peer", "stall_s", "offered_per_s", "ok_percent_before", "recovered_after_s", "connections_made", "commonest_failure"},
	"recovery_timeline": {"peer", "t_s", "ok_percent"},
	"steady":            {"network", "callers", "peer", "tx_per_s", "us_per_tx", "client_cpu_us_per_tx", "ratio_to_plain", "ratio_q1", "ratio_q3"},
	"waiters":           {"peer", "waiters", "bytes_per_waiter", "arrive_us_per_waiter", "waiting_cpu_ms_per_s", "cancel_us_per_waiter"},
	"gate":              {"operation", "goroutines", "peer", "ns_per_op", "ns_q1", "ns_q3", "allocs_per_op"},
}

func tableOf(name string) *table { return newTable(name, columnsOf[name]...) }

// pick is the full or the short form of something.
func pick[T any](short bool, full, small T) T {
	if short {
		return small
	}
	return full
}

// inTurn calls f for each peer and round: A B C, then B C A, so that nobody always has the same neighbour.
func inTurn[P any](peers []P, rounds int, f func(round int, p P) error) error {
	for round := range rounds {
		for i := range peers {
			if err := f(round, peers[(i+round)%len(peers)]); err != nil {
				return err
			}
		}
	}
	return nil
}

// standard is the service of experiments a, c and e: all of the gate's defaults for a pool of five.
var standard = limits{running: 4, waiting: 40, conns: 5, maxWait: 100 * time.Millisecond}

// work is what one transaction of experiments a and e costs the server.
const work = 4 * time.Millisecond

var deadlines = uniform(20*time.Millisecond, 200*time.Millisecond)

// capacity is what plain pgx with a fitting pool gets done when its callers never stop.
func capacity(ctx context.Context, b *bench, s shape, running int) (float64, error) {
	p, err := b.openOne(ctx, plain, limits{conns: running})
	if err != nil {
		return 0, err
	}
	defer p.close()
	var found []float64
	for range 3 {
		c, err := p.most(running, s, 700*time.Millisecond)
		if err != nil {
			return 0, err
		}
		found = append(found, c)
	}
	return median(found), nil
}

// most is how many transactions a second so many callers get done who never stop.
func (p *peer) most(callers int, s shape, length time.Duration) (float64, error) {
	return closed(callers, length, func(ctx context.Context) error { _, err := p.tx(ctx, 0, s); return err })
}

func overload(ctx context.Context, b *bench, short bool) ([]*table, error) {
	pinned := b.pin()
	defer b.unpin()
	s := shape{b.burn(work)}
	// What the machine can do changes by half within a minute where others use it too, so it is measured again before each cell.
	probe, err := b.openOne(ctx, plain, limits{conns: standard.running})
	if err != nil {
		return nil, err
	}
	defer probe.close()
	probing := pick(short, 400*time.Millisecond, 200*time.Millisecond)
	say("  transactions of %v processor time each, server on a processor of its own: %v", work, pinned)
	loads := pick(short, []float64{0.25, 0.5, 0.8, 1, 1.5, 3, 10}, []float64{0.5, 1, 3, 10})
	rounds := pick(short, 3, 1)
	length, warm := pick(short, 1250*time.Millisecond, 700*time.Millisecond), pick(short, 250*time.Millisecond, 150*time.Millisecond)

	peers := b.open(ctx, allPeers, standard)
	defer closeAll(peers)
	type cell struct {
		peer string
		load float64
	}
	sums := make(map[cell]*tally)
	most, per := make(map[cell]float64), make(map[cell][]float64) // sum of capacities; shares of them by round
	for round := range rounds {
		for _, x := range loads {
			err := inTurn(peers, 1, func(_ int, p *peer) error {
				can, err := probe.most(standard.running, s, probing)
				if err != nil {
					return err
				}
				t := load{rate: x * can, length: length, warm: warm, deadline: deadlines, seed: uint64(round)<<8 | uint64(x*4)}.run(p.call(0, s))
				k := cell{p.name, x}
				if sums[k] == nil {
					sums[k] = newTally(0)
				}
				sums[k].merge(t)
				most[k] += can
				per[k] = append(per[k], t.goodput()/can)
				return b.settle(ctx, p.database)
			})
			if err != nil {
				return nil, err
			}
			peers = append(peers[1:], peers[0])
			say("  round %d of %d, %5.2f × capacity: pgx-gated %.2f of it, plain pgx %.2f", round+1, rounds, x, last(per[cell{gated, x}]), last(per[cell{plain, x}]))
		}
	}
	t := tableOf("overload")
	for _, name := range allPeers {
		for _, x := range loads {
			k := cell{name, x}
			u := sums[k]
			if u == nil {
				continue
			}
			n, mean := float64(max(u.arrivals, 1)), most[k]/float64(rounds)
			t.add(name, x, mean, float64(u.arrivals)/u.length.Seconds(), u.goodput(), u.goodput()/mean, slices.Min(per[k]), slices.Max(per[k]),
				float64(u.ok)/n, float64(u.late)/n, float64(u.expired)/n, float64(u.refused)/n, float64(u.timedOut)/n, float64(u.failed)/n,
				ms(u.latency, 50), ms(u.latency, 99), ms(u.latency, 100), ms(u.refusal, 50), ms(u.refusal, 99),
				float64(u.used.ValueAtQuantile(99))/1000, ms(u.lag, 99), u.commonest())
		}
	}
	return []*table{t}, nil
}

func last(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	return v[len(v)-1]
}

func storm(ctx context.Context, b *bench, short bool) ([]*table, error) {
	b.pin()
	defer b.unpin()
	const hold = 20 * time.Millisecond
	rate := 3.5 * float64(standard.running) / (hold + time.Millisecond).Seconds()
	rounds, length := pick(short, 3, 1), pick(short, 2*time.Second, 700*time.Millisecond)
	peers := b.open(ctx, allPeers, standard)
	defer closeAll(peers)
	sums, counts, pooler, cold := make(map[*peer]*tally), make(map[*peer]*seen), make(map[*peer]time.Duration), make(map[*peer]float64)
	err := inTurn(peers, 1+rounds, func(round int, p *peer) error {
		s := shape{{"select enter($1)", []any{p.limit}}, {"select 1 from pg_sleep($1)", []any{hold.Seconds()}}}
		before, err := b.look(ctx, p.database)
		if err != nil {
			return err
		}
		was := poolerCPU(p)
		t := load{rate: rate, length: length, deadline: uniform(0, 120*time.Millisecond), seed: uint64(round)}.run(p.call(0, s))
		if err := b.settle(ctx, p.database); err != nil {
			return err
		}
		after, err := b.look(ctx, p.database)
		if err != nil {
			return err
		}
		d := after.since(before)
		if sums[p] == nil {
			sums[p], counts[p] = newTally(0), new(seen)
		}
		c := counts[p]
		if round == 0 { // a service that starts into the storm, and has learned nothing yet, is told of by itself
			cold[p], c.overLimits = t.goodput(), d.overLimits
			say("  cold, %s: %d over-limits, goodput %.0f/s", p.name, d.overLimits, t.goodput())
			return nil
		}
		sums[p].merge(t)
		pooler[p] += poolerCPU(p) - was
		c.sessions, c.overLimits, c.client, c.server = c.sessions+d.sessions, c.overLimits+d.overLimits, c.client+d.client, c.server+d.server
		say("  round %d of %d, %s: %d over-limits, %d connections made, goodput %.0f/s", round, rounds, p.name, d.overLimits, d.sessions, t.goodput())
		return nil
	})
	if err != nil {
		return nil, err
	}
	t := tableOf("storm")
	for _, p := range inOrder(peers) {
		u, c := sums[p], counts[p]
		n, sec := float64(max(u.arrivals, 1)), u.length.Seconds()
		cpu := func(d time.Duration) float64 { return float64(d.Milliseconds()) / sec }
		t.add(p.name, p.limit, float64(u.arrivals)/sec, u.goodput(), cold[p], c.overLimits, c.sessions,
			float64(u.late)/n, float64(u.expired)/n, float64(u.refused)/n, float64(u.timedOut)/n, float64(u.failed)/n,
			cpu(c.client), cpu(pooler[p]), cpu(c.server), float64(c.server.Milliseconds())/float64(max(u.ok, 1)), u.commonest())
	}
	return []*table{t}, nil
}

func poolerCPU(p *peer) time.Duration {
	if p.pid == 0 {
		return 0
	}
	return processCPU(p.pid, 11, 12)
}

// inOrder are peers in the order in which tables and plots have them.
func inOrder(peers []*peer) []*peer {
	out := slices.Clone(peers)
	slices.SortFunc(out, func(x, y *peer) int { return slices.Index(peerOrder, x.name) - slices.Index(peerOrder, y.name) })
	return out
}

func isolation(ctx context.Context, b *bench, short bool) ([]*table, error) {
	b.pin()
	defer b.unpin()
	l := standard
	l.batch = 1
	oltp, batch := shape{b.burn(time.Millisecond)}, shape{{"select 1 from pg_sleep($1)", []any{0.2}}}
	const oltpRate, batchRate = 150, 60 // what fits: some 900 of the one alone, 20 of the other on four connections
	rounds, length := pick(short, 3, 1), pick(short, 1800*time.Millisecond, 700*time.Millisecond)
	peers := b.open(ctx, []string{plain, twoPools, unlimited, pool, semaphores, bulkheads, bouncer, gated}, l)
	defer closeAll(peers)
	type cell struct {
		p     *peer
		flood bool
	}
	sums, batches := make(map[cell]*tally), make(map[cell]*tally)
	err := inTurn(peers, rounds, func(round int, p *peer) error {
		for _, flood := range []bool{false, true} {
			k := cell{p, flood}
			if sums[k] == nil {
				sums[k], batches[k] = newTally(0), newTally(0)
			}
			main := load{rate: oltpRate, length: length, warm: 300 * time.Millisecond, deadline: uniform(50*time.Millisecond, 150*time.Millisecond), seed: uint64(round)}
			if flood {
				main.during = func(time.Time) {
					other := load{rate: batchRate, length: length, deadline: uniform(time.Second, 2*time.Second), seed: uint64(round) + 1000}
					batches[k].merge(other.run(p.call(1, batch)))
				}
			}
			sums[k].merge(main.run(p.call(0, oltp)))
			if err := b.settle(ctx, p.database); err != nil {
				return err
			}
		}
		say("  round %d of %d, %s: short transactions in time %.0f %% alone, %.0f %% beside a flood of long ones", round+1, rounds, p.name, share(sums[cell{p, false}]), share(sums[cell{p, true}]))
		return nil
	})
	if err != nil {
		return nil, err
	}
	t := tableOf("isolation")
	for _, p := range inOrder(peers) {
		for _, flood := range []bool{false, true} {
			u, o := sums[cell{p, flood}], batches[cell{p, flood}]
			offered, good := 0.0, 0.0
			if flood {
				offered, good = float64(o.arrivals)/o.length.Seconds(), o.goodput()
			}
			t.add(p.name, flood, float64(u.arrivals)/u.length.Seconds(), u.goodput(), share(u), ms(u.latency, 50), ms(u.latency, 99), ms(u.latency, 100), offered, good, u.commonest())
		}
	}
	return []*table{t}, nil
}

// share is how many of a hundred arrivals were done in time.
func share(t *tally) float64 { return 100 * float64(t.ok) / float64(max(t.arrivals, 1)) }

func tail(ctx context.Context, b *bench, short bool) ([]*table, error) {
	b.pin()
	defer b.unpin()
	const running, burst = 16, 320
	s := shape{{"select 1 from pg_sleep($1)", []any{0.01}}}
	most, err := capacity(ctx, b, s, running)
	if err != nil {
		return nil, err
	}
	rounds, length := pick(short, 3, 1), pick(short, 3*time.Second, 1500*time.Millisecond)
	l := limits{running: running, conns: running, waiting: 4000, maxWait: time.Minute}
	peers := b.open(ctx, []string{plain, pool, semaphores, bulkheads, gated}, l)
	defer closeAll(peers)
	sums := make(map[*peer]*tally)
	err = inTurn(peers, rounds, func(round int, p *peer) error {
		t := load{rate: 0.9 * most, burst: burst, length: length, seed: uint64(round)}.run(p.call(0, s))
		if sums[p] == nil {
			sums[p] = newTally(0)
		}
		sums[p].merge(t)
		say("  round %d of %d, %s: waited p50 %.0f ms, p99 %.0f ms, longest %.0f ms", round+1, rounds, p.name, ms(t.wait, 50), ms(t.wait, 99), ms(t.wait, 100))
		return b.settle(ctx, p.database)
	})
	if err != nil {
		return nil, err
	}
	t := tableOf("tail")
	d := tableOf("tail_waits")
	for _, p := range inOrder(peers) {
		u := sums[p]
		t.add(p.name, float64(u.ok)/u.length.Seconds(), ms(u.wait, 50), ms(u.wait, 99), ms(u.wait, 100), u.arrivals-u.ok)
		for _, q := range []float64{1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 93, 95, 97, 98, 99, 99.5, 99.8, 99.9, 99.95, 100} {
			d.add(p.name, q, ms(u.wait, q))
		}
	}
	return []*table{t, d}, nil
}

const (
	bucket     = 250 * time.Millisecond // of the time line of recovery
	bucketsFor = 3                      // so many in a row must be as before
)

func recovery(ctx context.Context, b *bench, short bool) ([]*table, error) {
	if b.server.External() {
		return nil, errors.New("the server of PGXGATED_DSN cannot be frozen")
	}
	b.pin()
	defer b.unpin()
	s := shape{b.burn(work)}
	most, err := capacity(ctx, b, s, standard.running)
	if err != nil {
		return nil, err
	}
	calm, stall, after := pick(short, 2*time.Second, time.Second), pick(short, 5*time.Second, time.Second), pick(short, 6*time.Second, 1250*time.Millisecond)
	t := tableOf("recovery")
	d := tableOf("recovery_timeline")
	for _, name := range allPeers {
		if !b.runs(name) {
			continue
		}
		// One after the other on a database that nobody else has left something on.
		p, err := b.openOne(ctx, name, standard)
		if err != nil {
			say("  SKIPPED %s: %v", name, err)
			continue
		}
		err = func() error {
			defer p.close()
			before, err := b.look(ctx, p.database)
			if err != nil {
				return err
			}
			var frozen error
			u := load{rate: 0.7 * most, length: calm + stall + after, deadline: deadlines, during: func(start time.Time) {
				pause(time.Until(start.Add(calm)))
				if frozen = b.server.Freeze(); frozen == nil {
					pause(time.Until(start.Add(calm + stall)))
					frozen = b.server.Thaw()
				}
			}}.run(p.call(0, s))
			if frozen != nil {
				return frozen
			}
			if err := b.settle(ctx, p.database); err != nil {
				return err
			}
			seen, err := b.look(ctx, p.database)
			if err != nil {
				return err
			}
			shares := inBuckets(u, calm+stall+after)
			was := 0.0
			n := int(calm / bucket)
			for _, v := range shares[1:n] {
				was += v / float64(n-1)
			}
			back := recoveredAfter(shares, was, int((calm+stall)/bucket))
			t.add(name, stall.Seconds(), 0.7*most, was, back, seen.since(before).sessions, u.commonest())
			for i, v := range shares {
				d.add(name, (time.Duration(i)*bucket - calm).Seconds(), v)
			}
			say("  %s: as before %.2f s after a stall of %v, %d connections made", name, back, stall, seen.since(before).sessions)
			return nil
		}()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return []*table{t, d}, nil
}

// inBuckets is how many of a hundred arrivals of each bucket were done in time.
func inBuckets(u *tally, length time.Duration) []float64 {
	n := int(length / bucket)
	all, good := make([]float64, n), make([]float64, n)
	for _, at := range u.all {
		all[min(int(at/bucket), n-1)]++
	}
	for _, at := range u.good {
		good[min(int(at/bucket), n-1)]++
	}
	for i := range good {
		good[i] *= 100 / max(all[i], 1)
	}
	return good
}

// recoveredAfter is how many seconds after bucket end the shares are at 0.9 of what they were, to stay; -1: not seen.
func recoveredAfter(shares []float64, was float64, end int) float64 {
	for i := end; i+bucketsFor <= len(shares); i++ {
		if slices.Min(shares[i:i+bucketsFor]) >= 0.9*was {
			return (time.Duration(i-end) * bucket).Seconds()
		}
	}
	return -1
}

func steady(ctx context.Context, b *bench, short bool) ([]*table, error) {
	s := shape{{"select 1", nil}}
	l := limits{running: 16, conns: 16, waiting: 1000, maxWait: time.Minute}
	settings, rounds, slice := pick(short, 7, 1), pick(short, 3, 2), pick(short, 150*time.Millisecond, 100*time.Millisecond)
	t := tableOf("steady")
	for _, network := range []string{"loopback", "0.5 ms each way"} {
		names := []string{plain, pool, semaphores, bulkheads, bouncer, gated}
		if network != "loopback" {
			addr, stop, err := b.proxy(500 * time.Microsecond)
			if err != nil {
				return nil, err
			}
			defer stop()
			b.via = addr
			defer func() { b.via = "" }()
			names = []string{plain, pool, semaphores, bulkheads, gated} // PgBouncer would be on either side of it
		}
		for _, callers := range []int{1, 8, 64} {
			rates, ratios, cpus := make(map[string][]float64), make(map[string][]float64), make(map[string]time.Duration)
			// With connections made anew now and then: on which processors the server's processes come to lie stays with a
			// connection, and is worth more than what is measured.
			for range settings {
				peers := b.open(ctx, names, l)
				if len(peers) == 0 || peers[0].name != plain {
					closeAll(peers)
					return nil, errors.New("plain pgx, to compare with, cannot run")
				}
				err := inTurn(peers, rounds+1, func(round int, p *peer) error {
					cpu := ownCPU()
					r, err := closed(callers, slice, func(ctx context.Context) error { _, err := p.tx(ctx, 0, s); return err })
					if err != nil {
						return fmt.Errorf("%s: %w", p.name, err)
					}
					if round > 0 { // the first one only opens connections
						rates[p.name] = append(rates[p.name], r)
						cpus[p.name] += ownCPU() - cpu
					}
					return nil
				})
				closeAll(peers)
				if err != nil {
					return nil, err
				}
			}
			for _, name := range names {
				done := 0.0
				for i, r := range rates[name] {
					ratios[name] = append(ratios[name], r/rates[plain][i])
					done += r * slice.Seconds()
				}
				if done == 0 {
					continue // it cannot run here, or was not asked for
				}
				r := median(rates[name])
				t.add(network, callers, name, r, 1e6/r, float64(cpus[name].Microseconds())/done, median(ratios[name]), quantileOf(ratios[name], 0.25), quantileOf(ratios[name], 0.75))
				if name == gated {
					say("  %s, %d callers: pgx-gated %.0f/s, %.3f of plain pgx", network, callers, r, median(ratios[name]))
				}
			}
		}
	}
	return []*table{t}, nil
}

func waiters(ctx context.Context, b *bench, short bool) ([]*table, error) {
	n := pick(short, 10_000, 2000)
	watch := pick(short, 2*time.Second, 500*time.Millisecond)
	l := standard
	l.waiting, l.maxWait = n, time.Minute
	t := tableOf("waiters")
	peers := b.open(ctx, []string{plain, pool, semaphores, bulkheads, gated}, l)
	defer closeAll(peers)
	for _, p := range peers {
		if err := waitersOf(ctx, b, p, l.conns, n, watch, t); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return []*table{t}, nil
}

// waitersOf has n callers wait for p, all of whose connections are busy, and adds what they cost.
func waitersOf(ctx context.Context, b *bench, p *peer, conns, n int, watch time.Duration, t *table) error {
	busy, free := context.WithCancel(ctx)
	defer free()
	waiting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var holders, callers sync.WaitGroup
	for range conns { // the gate lets fewer in; the others are among the waiters
		holders.Go(func() { _, _ = p.tx(busy, 0, shape{{"select 1 from pg_sleep(600)", nil}}) })
	}
	if err := quiet(ctx); err != nil {
		return err
	}
	memory, cpu := inUse(), ownCPU()
	var served atomic.Int64
	for range n {
		callers.Go(func() {
			if _, err := p.tx(waiting, 0, shape{{"select 1", nil}}); err == nil || waiting.Err() == nil {
				served.Add(1)
			}
		})
	}
	if err := quiet(ctx); err != nil {
		return err
	}
	arrive := ownCPU() - cpu
	bytes := inUse() - memory
	cpu = ownCPU()
	pause(watch)
	idle := ownCPU() - cpu
	cpu = ownCPU()
	giveUp()
	callers.Wait()
	cancel := ownCPU() - cpu
	free()
	holders.Wait()
	if k := served.Load(); k > int64(conns) {
		return fmt.Errorf("%d of %d did not wait", k, n)
	}
	each := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(n) }
	t.add(p.name, n, float64(bytes)/float64(n), each(arrive), 1000*idle.Seconds()/watch.Seconds(), each(cancel))
	say("  %s: %.1f kB a waiter, %.1f ms of processor time a second while they wait", p.name, float64(bytes)/float64(n)/1000, 1000*idle.Seconds()/watch.Seconds())
	return b.settle(ctx, p.database)
}

// quiet waits until the lab does nothing, which it does once everybody waits.
func quiet(ctx context.Context) error {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		cpu := ownCPU()
		pause(100 * time.Millisecond)
		if ownCPU()-cpu < 5*time.Millisecond {
			return ctx.Err()
		}
	}
	return errors.New("the waiters do not come to rest")
}

// inUse is the memory of heap and stacks after a collection.
func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

func alone(_ context.Context, _ *bench, short bool) ([]*table, error) {
	ctx := context.Background()
	rounds, slice := pick(short, 9, 3), pick(short, 50*time.Millisecond, 20*time.Millisecond)
	// A peer makes, for so many permits and so many that may wait, the call that takes a permit, works and gives it back, and
	// the one that keeps it.
	type maker struct {
		name string
		make func(running, waiting int, work func()) (pair, take func() error, err error)
	}
	makers := []maker{
		{gated, func(running, waiting int, work func()) (func() error, func() error, error) {
			g, err := pgxgated.NewGate("alone", pgxgated.Limits{Running: running, Waiting: waiting, MaxWait: time.Minute})
			if err != nil {
				return nil, nil, err
			}
			return func() error {
				p, err := g.Acquire(ctx)
				if err == nil {
					work()
					p.Release()
				}
				return err
			}, func() error { _, err := g.Acquire(ctx); return err }, nil
		}},
		{semaphores, func(running, waiting int, work func()) (func() error, func() error, error) {
			a, r := semaphorePair(running, waiting)
			take := func() error {
				if !a.TryAcquire(1) {
					return errFull
				}
				if err := r.Acquire(ctx, 1); err != nil {
					a.Release(1)
					return err
				}
				return nil
			}
			return func() error {
				err := take()
				if err == nil {
					work()
					r.Release(1)
					a.Release(1)
				}
				return err
			}, take, nil
		}},
		{bulkheads, func(running, waiting int, work func()) (func() error, func() error, error) {
			h := bulkhead.New[any](uint(running))
			take := func() error {
				if waiting > 0 {
					return h.AcquirePermit(ctx)
				}
				if !h.TryAcquirePermit() {
					return bulkhead.ErrFull
				}
				return nil
			}
			return func() error {
				err := take()
				if err == nil {
					work()
					h.ReleasePermit()
				}
				return err
			}, take, nil
		}},
		{adaptive, func(running, waiting int, work func()) (func() error, func() error, error) {
			h := adaptivelimiter.NewBuilder[any]().WithLimits(uint(running), uint(running), uint(running)).Build()
			take := func() (adaptivelimiter.Permit, error) {
				if waiting > 0 {
					return h.AcquirePermit(ctx)
				}
				p, ok := h.TryAcquirePermit()
				if !ok {
					return nil, adaptivelimiter.ErrExceeded
				}
				return p, nil
			}
			return func() error {
				p, err := take()
				if err == nil {
					work()
					p.Record()
				}
				return err
			}, func() error { _, err := take(); return err }, nil
		}},
	}
	type cell struct {
		operation  string
		goroutines int
		running    int
		waiting    int
	}
	var cells []cell
	for _, n := range []int{1, 2, 8, 64} {
		cells = append(cells, cell{"acquire and release", n, 64, 640})
	}
	for _, n := range []int{1, 2, 8, 64} {
		cells = append(cells, cell{"refuse", n, 1, 0})
	}
	for _, n := range []int{2, 8, 64} {
		cells = append(cells, cell{"hand over", n, 1, 640})
	}
	t := tableOf("gate")
	for _, c := range cells {
		times, allocs := make(map[string][]float64), make(map[string][]float64)
		calls := make(map[string]func() error)
		for _, m := range makers {
			work := func() {}
			if c.operation == "hand over" {
				work = runtime.Gosched // so that the others come to wait, and the permit goes round among them
			}
			pair, take, err := m.make(c.running, c.waiting, work)
			if err != nil {
				return nil, err
			}
			if c.operation == "refuse" {
				if err := take(); err != nil {
					return nil, fmt.Errorf("%s: the first was refused: %w", m.name, err)
				}
				refused := pair
				pair = func() error {
					if refused() == nil {
						return errors.New("not refused")
					}
					return nil
				}
			}
			calls[m.name] = pair
		}
		err := inTurn(makers, rounds+1, func(round int, m maker) error {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			ns, n, err := each(c.goroutines, slice, calls[m.name])
			runtime.ReadMemStats(&after)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.operation, m.name, err)
			}
			if round > 0 {
				times[m.name] = append(times[m.name], ns)
				allocs[m.name] = append(allocs[m.name], float64(after.Mallocs-before.Mallocs)/float64(n))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		for _, m := range makers {
			// Starting goroutines allocates too; spread over so many operations it is nothing.
			t.add(c.operation, c.goroutines, m.name, median(times[m.name]), quantileOf(times[m.name], 0.25), quantileOf(times[m.name], 0.75), float64(int(10*median(allocs[m.name])))/10)
		}
		say("  %s, %d goroutines: pgx-gated %.0f ns, two semaphores %.0f ns", c.operation, c.goroutines, median(times[gated]), median(times[semaphores]))
	}
	return []*table{t}, nil
}

// each has goroutines call f for as long as length, and returns the time per call of all of them together.
func each(goroutines int, length time.Duration, f func() error) (ns float64, calls int64, err error) {
	var stop atomic.Bool
	var sum atomic.Int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	for range goroutines {
		wg.Go(func() {
			var n int64
			for !stop.Load() {
				for range 64 {
					if e := f(); e != nil {
						mu.Lock()
						err = e
						mu.Unlock()
						return
					}
				}
				n += 64
			}
			sum.Add(n)
		})
	}
	pause(length)
	stop.Store(true)
	wg.Wait()
	return float64(time.Since(start)) / float64(max(sum.Load(), 1)), sum.Load(), err
}
