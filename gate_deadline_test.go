package pgxgated

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// job is one request of a load: when it comes, how long it holds its permit if nothing stops it, and its deadline.
type job struct {
	at, service, deadline time.Duration
	kind                  kind
	sort                  int // of work: 0 or 1
}

// outcome is what became of a job, at times since the start.
type outcome struct {
	good, short       bool
	granted, answered time.Duration // granted is 0 without a permit
}

// served is what became of all jobs of one run.
type served struct {
	jobs    []job
	outcome []outcome
	idle    []time.Duration // when a permit came back that nobody waited for
}

const servePermits, serveMaxWait = 8, 100 * time.Millisecond

// serve runs jobs through a gate in virtual time. A job that is not done at its deadline holds its permit until then and
// 1 ms longer, which is what it takes to cancel it.
func serve(t *testing.T, aware, workloads bool, jobs []job) served {
	s := served{jobs: jobs, outcome: make([]outcome, len(jobs))}
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Running: servePermits, Waiting: 10 * servePermits, MaxWait: serveMaxWait}
		cfg := gateConfig{mode: Enforce, deadlineAware: aware}
		if workloads {
			cfg.workloads = []workload{{"0", l}, {"1", l}}
		}
		g, err := newGate("test", l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer checkIdle(t, g)
		full := func() bool {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.waiting == g.limits.Waiting
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		start := time.Now()
		for i, j := range jobs {
			time.Sleep(j.at - time.Since(start))
			end := start.Add(j.at + j.deadline)
			o := &s.outcome[i]
			ctx := context.Background()
			if workloads {
				ctx = WithWorkload(ctx, strconv.Itoa(j.sort))
			}
			if full() { // answered at once; most are, under high load, and need no goroutine and no timer for it
				if _, err := g.acquire(ctx, j.kind, nil); !errors.Is(err, ErrAdmissionFull) {
					t.Errorf("%v from a full gate", err)
				}
				continue
			}
			wg.Go(func() {
				ctx, cancel := context.WithDeadline(ctx, end)
				defer cancel()
				h, err := g.acquire(ctx, j.kind, nil)
				o.answered = time.Since(start)
				if err != nil {
					o.short = errors.Is(err, ErrDeadlineShort)
					return
				}
				o.granted = o.answered
				if left := time.Until(end); j.service <= left {
					time.Sleep(j.service)
					o.good = true
				} else {
					time.Sleep(left)
					g.cutOff(h)
					time.Sleep(time.Millisecond)
				}
				g.release(h, o.good)
				if !g.contended() {
					mu.Lock()
					s.idle = append(s.idle, time.Since(start))
					mu.Unlock()
				}
			})
		}
		wg.Wait()
	})
	return s
}

// falsely tells of a job that was refused for its deadline whether that was wrong: left in its place in the line, it would
// have been given a permit, at the latest when one that came after it was or when one became idle, early enough to finish.
func (s served) falsely(i int, grants []grant) bool {
	j, o := s.jobs[i], s.outcome[i]
	if !o.short || !s.mayFinish(i) {
		return false
	}
	at := time.Duration(math.MaxInt64)
	from, _ := slices.BinarySearchFunc(grants, o.answered, func(g grant, t time.Duration) int { return cmp.Compare(g.at, t) })
	for _, g := range grants[from:] {
		if g.job > i {
			at = g.at
			break
		}
	}
	return at <= j.at+serveMaxWait && at+j.service <= j.at+j.deadline
}

// mayFinish tells whether a job would have finished if it had been given a permit at the moment of its answer, which is
// what the simulation calls false. For those who wait until their last moment there was none, so it is only a bound.
func (s served) mayFinish(i int) bool {
	return s.outcome[i].answered+s.jobs[i].service <= s.jobs[i].at+s.jobs[i].deadline
}

type grant struct {
	at  time.Duration
	job int // the last one is nobody's
}

func (s served) grants() []grant {
	var gs []grant
	for i, o := range s.outcome {
		if o.granted > 0 {
			gs = append(gs, grant{o.granted, i})
		}
	}
	for _, at := range s.idle {
		gs = append(gs, grant{at, len(s.jobs)})
	}
	slices.SortFunc(gs, func(a, b grant) int { return cmp.Compare(a.at, b.at) })
	return gs
}

// random is a source of jobs; each of its functions gives milliseconds.
type random struct{ *rand.Rand }

func (r random) between(a, b float64) float64 { return a + r.Float64()*(b-a) }

// poisson makes a load: jobs that come independently of each other at so many times the capacity of 8 permits.
func poisson(load float64, length time.Duration, seed uint64, draw func(r random, ms float64) (service, deadline float64, k kind, sort int)) []job {
	r := random{rand.New(rand.NewPCG(seed, 7))}
	mean := 0.0
	for range 20000 {
		service, _, _, _ := draw(r, 0)
		mean += service / 20000
	}
	var jobs []job
	for ms := 0.0; ; {
		ms += r.ExpFloat64() * mean / (load * 8)
		if ms > length.Seconds()*1000 {
			return jobs
		}
		service, deadline, k, sort := draw(r, ms)
		jobs = append(jobs, job{duration(ms), duration(service), duration(deadline), k, sort})
	}
}

func duration(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

type loadCase struct {
	name      string
	length    time.Duration // at a load of up to 1.2; less above
	seeds     uint64        // how many loads are added up: where one long job more or less tells, one load says little
	mixed     bool          // one kind is two sorts of work, so that the rarer one may be refused wrongly: shown only
	steps     bool          // the work changes, so that it is more than fits for a while at any load
	workloads bool          // each sort is a workload
	draw      func(r random, ms float64) (service, deadline float64, k kind, sort int)
}

func twoSorts(r random, _ float64) (float64, float64, kind, int) {
	if r.Float64() < .95 {
		return r.between(45, 55), r.between(60, 300), kindTx, 0
	}
	return 2, 30, kindTx, 1
}

// loadCases are the distributions of the simulation that chose the estimate, and some more.
var loadCases = []loadCase{
	{"constant", 6 * time.Second, 1, false, false, false, func(r random, _ float64) (float64, float64, kind, int) { return 20, r.between(0, 120), kindTx, 0 }},
	{"exponential", 6 * time.Second, 1, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.ExpFloat64() * 20, r.between(0, 200), kindTx, 0
	}},
	{"90% of 1 ms, 10% of 200 ms", 6 * time.Second, 6, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		if r.Float64() < .9 {
			return 1, r.between(0, 400), kindTx, 0
		}
		return 200, r.between(0, 400), kindTx, 0
	}},
	{"97% of 1 ms, 3% of 1 s", 8 * time.Second, 1, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		if r.Float64() < .97 {
			return 1, 300, kindTx, 0
		}
		return 1000, 300, kindTx, 0
	}},
	{"storm", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.between(21, 45), r.between(0, 120), kindTx, 0
	}},
	{"all deadlines the same", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.between(13.5, 16.5), 50, kindTx, 0
	}},
	{"all deadlines the same, more spread", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.between(10, 30), 60, kindTx, 0
	}},
	{"exponential, all deadlines the same", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.ExpFloat64() * 20, 80, kindTx, 0
	}},
	{"spread", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return r.between(8, 30), r.between(20, 200), kindTx, 0
	}},
	{"narrow lognormal", 6 * time.Second, 2, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return math.Exp(2.8 + .5*r.NormFloat64()), r.between(20, 200), kindTx, 0
	}},
	{"lognormal", 6 * time.Second, 6, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return math.Exp(2 + 1.5*r.NormFloat64()), r.between(20, 500), kindTx, 0
	}},
	{"steps of 5, 60, 5 ms", 2 * time.Second, 1, false, true, false, func(r random, ms float64) (float64, float64, kind, int) {
		if ms > 300 && ms < 700 {
			return 60, r.between(0, 150), kindTx, 0
		}
		return 5, r.between(0, 150), kindTx, 0
	}},
	{"transactions and selects", 6 * time.Second, 1, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		if r.Float64() < .95 {
			return r.between(45, 55), r.between(60, 300), kindTx, 0
		}
		return .3, 20, kindAutocommit, 1
	}},
	{"two sorts under one kind", 6 * time.Second, 1, true, false, false, twoSorts},
	{"two sorts, each its workload", 6 * time.Second, 1, false, false, true, twoSorts},
	{"heavy tail", 2 * time.Second, 6, false, false, false, func(r random, _ float64) (float64, float64, kind, int) {
		return 2 * math.Pow(1-r.Float64(), -1/1.3), r.between(10, 400), kindTx, 0 // Pareto, no variance
	}},
}

// Goodput never falls below that of the gate without deadline-aware admission, for neither sort of work. Where more comes than
// fits, the permits do what they can; where less does, hardly anybody is refused wrongly. (Under overload that cannot be
// asked: most must be refused, and those who are had a permit to gain from somebody with more time left.)
func TestDeadlineAdmissionLosesNothing(t *testing.T) {
	loads := []float64{0.8, 1.2, 3, 10}
	if testing.Short() {
		loads = []float64{1.2}
	}
	for _, c := range loadCases {
		for _, load := range loads {
			t.Run(fmt.Sprintf("%s/load=%v", c.name, load), func(t *testing.T) {
				t.Parallel()
				length := c.length
				if load > 2 {
					length = length * 2 / 3
				}
				var offered, good, fifo, falsely, bound [2]float64
				var demand, capacity float64 // permit-seconds
				for seed := range c.seeds {
					jobs := poisson(load, length, seed, c.draw)
					without, with := serve(t, false, c.workloads, jobs), serve(t, true, c.workloads, jobs)
					grants := with.grants()
					capacity += servePermits * length.Seconds()
					for i, j := range jobs {
						demand += j.service.Seconds()
						offered[j.sort]++
						if without.outcome[i].good {
							fifo[j.sort]++
						}
						switch o := with.outcome[i]; {
						case o.good:
							good[j.sort]++
						case o.short && with.mayFinish(i):
							bound[j.sort]++
							if with.falsely(i, grants) {
								falsely[j.sort]++
							}
						}
					}
				}
				all := offered[0] + offered[1]
				ratio, fits := (good[0]+good[1])/(fifo[0]+fifo[1]), (good[0]+good[1])/(all*capacity/demand)
				t.Logf("%v jobs, finished %v, %.3f of those without, %.3f of what fits", all, good[0]+good[1], ratio, fits)
				if ratio < 0.97 {
					t.Errorf("goodput is %.3f of that without, want 0.97", ratio)
				}
				if load > 2 && fits < 0.95 && !c.steps {
					t.Errorf("goodput is %.3f of what the permits could do, want 0.95", fits)
				}
				for i, n := range offered {
					if n == 0 {
						continue
					}
					share := falsely[i] / n
					t.Logf("sort %d: finished %v of %v and %v without, refused wrongly %.2f %%, and at most %.2f %%", i, good[i], n, fifo[i], 100*share, 100*bound[i]/n)
					if c.mixed {
						continue
					}
					if least := 0.95*fifo[i] - 3*math.Sqrt(fifo[i]); good[i] < least { // three deviations: the rarer sort is some dozen
						t.Errorf("sort %d: %v finished, want %.0f", i, good[i], least)
					}
					if load < 1 && share > 0.005 && !c.steps {
						t.Errorf("sort %d: %.2f %% of %v refused wrongly, want 0.5 %% at most", i, 100*share, n)
					}
				}
			})
		}
	}
}

// Callers come back as soon as they have their answer, ten times as many as may run, with deadlines of up to six holds. What
// they leave cut off costs its connection, and whoever needs a new one waits for it under the permit: with one made after the
// other, four cut off make the next four hold for longer than most deadlines, and so on. The line has to get out of
// that, in the beginning, when no connection is there yet, too.
func TestStormInWhichWhatIsCutOffCostsItsConnection(t *testing.T) {
	const running, callers, service, length = 4, 40, 20 * time.Millisecond, 10 * time.Second
	for _, connect := range []time.Duration{5 * time.Millisecond, 25 * time.Millisecond, 60 * time.Millisecond} {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("%v to connect/seed=%d", connect, seed), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					g := newTestGate(t, Limits{Running: running, Waiting: 10 * running, MaxWait: serveMaxWait})
					places, idle, connecting := make(chan struct{}, 2*running), make(chan struct{}, 2*running), make(chan struct{}, 1)
					var made, good atomic.Int64
					take := func(ctx context.Context) error {
						select {
						case <-idle:
							return nil
						default:
						}
						select {
						case places <- struct{}{}:
							made.Add(1)
							go func() { // whoever wanted it may be gone by then
								connecting <- struct{}{}
								time.Sleep(connect)
								<-connecting
								idle <- struct{}{}
							}()
						default: // all are open
						}
						select {
						case <-idle:
							return nil
						case <-ctx.Done():
							return ctx.Err()
						}
					}
					call := func(ctx context.Context) {
						h, err := g.acquire(ctx, kindTx, nil)
						if err != nil {
							<-ctx.Done() // as a caller that comes back with its next request
							return
						}
						if take(ctx) != nil {
							g.release(h, false)
							return
						}
						select {
						case <-time.After(service):
							good.Add(1)
							idle <- struct{}{}
							g.release(h, true)
						case <-ctx.Done():
							g.drain(h)
							time.Sleep(5 * time.Millisecond)
							<-places
							g.release(h, false)
						}
					}
					start := time.Now()
					var wg sync.WaitGroup
					for i := range callers {
						r := rand.New(rand.NewPCG(seed, uint64(i)))
						wg.Go(func() {
							for time.Since(start) < length {
								ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.Int64N(int64(6*service))))
								call(ctx)
								cancel()
							}
						})
					}
					wg.Wait()
					share := float64(good.Load()) * service.Seconds() / (running * length.Seconds())
					t.Logf("%.2f of what the permits could do, %d connections made; %+v", share, made.Load(), g.Stats())
					if share < 0.8 {
						t.Errorf("%.2f of what the permits could do, want 0.8", share)
					}
				})
			})
		}
	}
}

// After work has become faster or slower all of a sudden, the gate is within 2 s as good as one that has seen nothing but
// the new work, and no worse than one without deadline-aware admission. Where it became faster, every deadline that comes
// later is shorter than the old estimate.
func TestDeadlineAdmissionRecoversFromAStep(t *testing.T) {
	work := func(least, most, from, to float64) func(r random, ms float64) (float64, float64, kind, int) {
		return func(r random, _ float64) (float64, float64, kind, int) {
			return r.between(least, most), r.between(from, to), kindTx, 0
		}
	}
	const before, settled, after = time.Second, 2 * time.Second, 5 * time.Second
	loads := []float64{0.8, 1.2, 3, 10}
	if testing.Short() {
		loads = []float64{3}
	}
	for _, c := range []struct {
		name     string
		old, new func(r random, ms float64) (float64, float64, kind, int)
	}{
		{"faster, all deadlines the same", work(60, 60, 400, 400), work(15, 15, 50, 50)},
		{"faster", work(54, 66, 200, 400), work(13, 17, 0, 50)},
		{"slower", work(13, 17, 0, 100), work(54, 66, 0, 400)},
	} {
		for _, load := range loads {
			t.Run(fmt.Sprintf("%s/load=%v", c.name, load), func(t *testing.T) {
				t.Parallel()
				later := poisson(load, after, 2, c.new)
				jobs := poisson(load, before, 1, c.old)
				for _, j := range later {
					j.at += before
					jobs = append(jobs, j)
				}
				finished := func(s served, from time.Duration) (n float64) {
					for i, o := range s.outcome {
						if o.good && s.jobs[i].at >= from {
							n++
						}
					}
					return n
				}
				with := serve(t, true, false, jobs)
				got := finished(with, before+settled)
				without := finished(serve(t, false, false, jobs), before+settled)
				steady := finished(serve(t, true, false, later), settled)
				t.Logf("finished %v, %v without, %v if there had been no step", got, without, steady)
				if got < 0.97*without || got < 0.97*steady {
					t.Errorf("finished %v, want 0.97 of %v without and of %v if there had been no step", got, without, steady)
				}
				grants := with.grants()
				falsely, offered := 0.0, 0.0
				for i, j := range jobs {
					if j.at >= before+settled {
						offered++
						if with.falsely(i, grants) {
							falsely++
						}
					}
				}
				if load < 1 && falsely > 0.005*offered {
					t.Errorf("%v of %v refused wrongly", falsely, offered)
				}
			})
		}
	}
}

// lateContext is one whose timer is late, as on a busy machine.
type lateContext struct {
	context.Context
	deadline time.Time
}

func (c lateContext) Deadline() (time.Time, bool) { return c.deadline, true }

// Without an estimate nobody is refused for a deadline: who stands in a long line past it hears of it from the context.
func TestDeadlinePassedWithoutAnEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 10, MaxWait: time.Hour})
		h, err := g.acquire(t.Context(), kindTx, nil)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // virtual; a deadline from before the gate counts as one that is still to come
		const callers = 5
		errs := make(chan error, callers)
		late := within(t, time.Second)
		for range callers {
			go func() {
				_, err := g.acquire(lateContext{late, time.Now().Add(-time.Millisecond)}, kindTx, nil)
				errs <- err
			}()
			synctest.Wait()
		}
		for range callers {
			if err := <-errs; err != context.DeadlineExceeded {
				t.Errorf("%v, want the context's", err)
			}
		}
		g.release(h, true)
	})
}

// Five selects are cut off by their deadline, so the estimate is a guess of as long as that. From then on selects take 0.3 ms, but
// each has to wait, as transactions keep a line: were all refused, the guess would never be put right.
func TestEstimateThatOnlyRefusesIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 2, Waiting: 50, MaxWait: 100 * time.Millisecond})
		const deadline = 20 * time.Millisecond
		selectFor := func(hold time.Duration) (err error) {
			ctx, cancel := context.WithTimeout(context.Background(), deadline)
			defer cancel()
			end := time.Now().Add(deadline)
			h, err := g.acquire(ctx, kindAutocommit, nil)
			if err != nil {
				return err
			}
			if hold <= time.Until(end) {
				time.Sleep(hold)
				g.release(h, true)
				return nil
			}
			time.Sleep(time.Until(end))
			g.cutOff(h)
			time.Sleep(time.Millisecond)
			g.release(h, false)
			return context.DeadlineExceeded
		}
		for range 5 {
			if err := selectFor(25 * time.Millisecond); err == nil {
				t.Fatal("not cut off")
			}
		}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					h, err := g.acquire(context.Background(), kindTx, nil)
					if err != nil {
						t.Error(err)
						return
					}
					time.Sleep(4 * time.Millisecond)
					g.release(h, true)
				}
			})
		}
		synctest.Wait()
		var good, short, other int
		for range 2000 {
			switch err := selectFor(300 * time.Microsecond); {
			case err == nil:
				good++
			case errors.Is(err, ErrDeadlineShort):
				short++
			default:
				other++
			}
			time.Sleep(3700 * time.Microsecond)
		}
		close(stop)
		wg.Wait()
		if good < 1500 || other > 0 {
			t.Errorf("of 2000 selects %d were done, %d refused for their deadline, %d failed otherwise; estimates %v", good, short, other, g.Stats().Estimates)
		}
	})
}
