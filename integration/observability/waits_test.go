//go:build linux

package observability

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
	"github.com/pgxgated/pgxgated/metrics"
)

// scrape is what is reported of the gate "orders": values of gauges and counters, sums of histograms, and their counts
// under "… count", added up over the labels that are not named.
type scrape map[string]float64

func gather(t testing.TB, r prometheus.Gatherer, gate string) scrape {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	s := make(scrape)
	for _, f := range families {
		name := strings.TrimPrefix(f.GetName(), "pgxgated_")
		for _, m := range f.GetMetric() {
			label := ""
			of := ""
			for _, l := range m.GetLabel() {
				if l.GetName() == "gate" {
					of = l.GetValue()
				} else if l.GetName() != "workload" {
					label = " " + l.GetValue()
				}
			}
			if of != gate {
				continue
			}
			for _, key := range []string{name, name + label}[:1+min(len(label), 1)] {
				s[key] += m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetHistogram().GetSampleSum()
				if h := m.GetHistogram(); h != nil {
					s[key+" count"] += float64(h.GetSampleCount())
				}
			}
		}
	}
	return s
}

func (s scrape) minus(o scrape) scrape {
	d := make(scrape)
	for k, v := range s {
		d[k] = v - o[k]
	}
	return d
}

// waits are the seconds that were spent at each place.
func (d scrape) waits() map[string]float64 {
	return map[string]float64{
		"gate": d["gate_wait_seconds"], "pool": d["pool_wait_seconds"], "sql": d["sql_seconds"],
		"client": d["hold_seconds"] - d["pool_wait_seconds"] - d["sql_seconds"],
	}
}

const lockSampleEvery = time.Second

// G03: permits, then the pool, then locks, then nothing is what n operations wait for. Each time the series say so while it
// lasts, and afterwards the right one has at least the time that they were made to wait, by the test's own clock, and more
// than all others.
func TestG03TheSeriesPointAtWhatIsSaturated(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, pgtest.With(pgtest.Shared(t).Database(t), "pool_max_conns", "6"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	const n = 4
	db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithGateName("orders"),
		pgxgated.WithLimits(pgxgated.Limits{Running: n, Waiting: n, MaxWait: time.Minute}), pgxgated.WithPoolWait(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	g := pgxgated.GateOf(db)
	r := prometheus.NewRegistry()
	if err := r.Register(metrics.NewCollector(g)); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, "create table t (id int primary key); insert into t values (1)"); err != nil {
		t.Fatal(err)
	}
	const lock = "select id from t where id = 1 for update"

	transaction := func() error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, lock); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	}
	// load runs n transactions while hold is in place, says when they all wait for what they are made to wait for, and how
	// long they then did.
	load := func(waiting func(scrape) bool, release func()) (waited float64) {
		t.Helper()
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				if err := transaction(); err != nil {
					t.Error(err)
				}
			})
		}
		var s scrape
		eventually(t, "all wait", func() bool {
			s = gather(t, r, "orders")
			return waiting(s)
		})
		asked := make(map[float64]bool)
		for start := time.Now(); len(asked) < 20 && time.Since(start) < lockSampleEvery/2; {
			asked[gather(t, r, "orders")["lock_wait_seconds_total"]] = true
		}
		if len(asked) > 2 {
			t.Errorf("the server was asked %d times in half the time between two samples", len(asked))
		}
		start := time.Now()
		time.Sleep(300 * time.Millisecond) // the wait itself
		waited = n * time.Since(start).Seconds()
		release()
		wg.Wait()
		return waited
	}
	check := func(what string, before scrape, waited float64) {
		t.Helper()
		d := gather(t, r, "orders").minus(before)
		w := d.waits()
		t.Logf("%s: waited %.2f s, seconds at %.3v", what, waited, w)
		if w[what] < waited {
			t.Errorf("%s: %v s, made to wait %v s", what, w[what], waited)
		}
		for other, v := range w {
			if other != what && v > w[what]/2 {
				t.Errorf("%s was saturated, and %s has %v s of %v", what, other, v, w)
			}
		}
		if got := d["acquires_total admitted"]; got != n && what != "gate" {
			t.Errorf("%s: %v admitted, want %d", what, got, n)
		}
	}

	t.Run("permits", func(t *testing.T) {
		before := gather(t, r, "orders")
		var permits []*pgxgated.Permit
		for range n {
			p, err := g.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			permits = append(permits, p)
		}
		waited := load(func(s scrape) bool {
			return s["waiting"] == n && s["available_permits running"] == 0 && s["lock_waiting"] == 0 && s["oldest_wait_seconds"] > 0
		}, func() {
			for _, p := range permits {
				p.Release()
			}
		})
		d := gather(t, r, "orders").minus(before)
		w := d.waits()
		if w["gate"] < waited || w["pool"] > w["gate"]/2 || w["sql"] > w["gate"]/2 {
			t.Errorf("made to wait %v s for permits, seconds at %v", waited, w)
		}
		if d["gate_wait_seconds count"] != 2*n || d["hold_seconds count"] != 2*n || d["transactions_total committed"] != n {
			t.Errorf("%v", d)
		}
	})
	t.Run("pool", func(t *testing.T) {
		before := gather(t, r, "orders")
		var conns []*pgxpool.Conn
		for range 6 {
			c, err := pool.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		waited := load(func(s scrape) bool {
			return s["running"] == n && s["waiting"] == 0 && s["pool_connections acquired"] == 6 && s["pool_max_connections"] == 6
		}, func() {
			for _, c := range conns {
				c.Release()
			}
		})
		check("pool", before, waited)
	})
	t.Run("locks", func(t *testing.T) {
		before := gather(t, r, "orders")
		holder, err := pool.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer holder.Rollback(context.Background())
		if _, err := holder.Exec(ctx, lock); err != nil {
			t.Fatal(err)
		}
		// Somebody else's backend waits for the same lock: it is not ours, and is not counted.
		other, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close(ctx)
		others := make(chan error, 1)
		go func() {
			_, err := other.Exec(ctx, lock)
			others <- err
		}()
		eventually(t, "the other one waits", func() bool {
			var waits bool
			err := holder.QueryRow(ctx, "select wait_event_type = 'Lock' from pg_stat_activity where pid = $1", other.PgConn().PID()).Scan(&waits)
			return err == nil && waits
		})
		waited := load(func(s scrape) bool { return s["lock_waiting"] == n && s["running"] == n && s["waiting"] == 0 },
			func() {
				if err := holder.Rollback(ctx); err != nil {
					t.Error(err)
				}
			})
		if err := <-others; err != nil {
			t.Error(err)
		}
		check("sql", before, waited) // lock waits are a part of it
		eventually(t, "no lock is waited for", func() bool { return gather(t, r, "orders")["lock_waiting"] == 0 })
		if d := gather(t, r, "orders").minus(before); d["lock_wait_seconds_total"] <= 0 {
			t.Errorf("no lock waits counted: %v", d)
		}
	})
	t.Run("nothing", func(t *testing.T) {
		before := gather(t, r, "orders")
		for range 20 {
			if err := transaction(); err != nil {
				t.Fatal(err)
			}
		}
		d := gather(t, r, "orders").minus(before)
		if w := d.waits(); w["gate"] != 0 || w["sql"] <= 0 || w["pool"] > w["sql"] {
			t.Errorf("seconds at %v", w)
		}
		s := gather(t, r, "orders")
		if s["waiting"] != 0 || s["running"] != 0 || s["lock_waiting"] != 0 || s["pool_connections acquired"] != 0 {
			t.Errorf("%v", s)
		}
		if d["sql_seconds begin count"] != 20 || d["sql_seconds exec count"] != 20 || d["sql_seconds commit count"] != 20 ||
			d["transactions_total committed"] != 20 {
			t.Errorf("%v", d)
		}
	})
}

// G03: after a storm of cancellations, scraped all the time, the gauges are back at zero and the counters add up.
func TestG03GaugesReturnToZeroAfterAStormOfCancellations(t *testing.T) {
	s := newService(t)
	var calls atomic.Int64
	before := gather(t, s.Registry, "orders")
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				gather(t, s.Registry, "orders")
			}
		}
	})
	var callers sync.WaitGroup
	for i := range 30 {
		callers.Go(func() {
			for j := range 10 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+(i*7+j*3)%20)*time.Millisecond)
				calls.Add(1)
				tx, err := s.DB.BeginTx(ctx, nil)
				if err == nil {
					_, _ = tx.ExecContext(ctx, "select pg_sleep(0.01)")
					_ = tx.Rollback()
				}
				cancel()
			}
		})
	}
	callers.Wait()
	close(stop)
	wg.Wait()
	eventually(t, "drained", func() bool { return s.Gate.Stats().Running == 0 })
	d := gather(t, s.Registry, "orders")
	for _, gauge := range []string{"running", "waiting", "draining", "oldest_wait_seconds", "oldest_hold_seconds", "leases_overdue"} {
		if d[gauge] != 0 {
			t.Errorf("%s is %v", gauge, d[gauge])
		}
	}
	d = d.minus(before)
	// database/sql refuses by itself what is done before it has a connection.
	if got := d["acquires_total"] + d["bypassed_total"]; got > float64(calls.Load()) || got == 0 {
		t.Errorf("%v answers to %d calls", got, calls.Load())
	}
	if d["hold_seconds count"] != d["acquires_total admitted"] {
		t.Errorf("%v holds, %v admitted", d["hold_seconds count"], d["acquires_total admitted"])
	}
}

func TestErrorsOfTheServerAreCountedByClass(t *testing.T) {
	s := newService(t)
	ctx := t.Context()
	before := gather(t, s.Registry, "orders")
	raise := func(state string) {
		if _, err := s.DB.ExecContext(ctx, "do $$ begin raise exception sqlstate '"+state+"'; end $$"); err == nil {
			t.Error("no error")
		}
	}
	for _, state := range []string{"57014", "55P03", "40001", "40P01", "53300", "22012", "P0001", "23505"} {
		raise(state)
	}
	cut, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := s.DB.ExecContext(cut, "select pg_sleep(10)"); err == nil {
		t.Error("no error")
	}
	d := gather(t, s.Registry, "orders").minus(before)
	for class, n := range map[string]float64{"57014": 1, "55P03": 1, "40001": 1, "40P01": 1, "53300": 1, "other": 3, "no_answer": 1} {
		if got := d["sql_errors_total "+class]; got != n {
			t.Errorf("%s: %v, want %v", class, got, n)
		}
	}
}

type records struct {
	mu  sync.Mutex // guards all
	all []slog.Record
}

func (r *records) Enabled(context.Context, slog.Level) bool { return true }
func (r *records) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *records) WithGroup(string) slog.Handler            { return r }
func (r *records) Handle(_ context.Context, rec slog.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
	return nil
}

// with returns the records whose message contains text, as message and attributes.
func (r *records) with(text string) (found []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.all {
		if strings.Contains(rec.Message, text) {
			s := rec.Message
			rec.Attrs(func(a slog.Attr) bool { s += fmt.Sprintf("\n%s=%v", a.Key, a.Value); return true })
			found = append(found, s)
		}
	}
	return found
}

// A role that may not see the backends costs the lock series, is said once, and nothing else.
func TestLockWaitsThatMayNotBeSeenAreSaidOnce(t *testing.T) {
	server := pgtest.Shared(t)
	if server.External() {
		t.Skip("makes roles")
	}
	ctx := t.Context()
	dsn := server.Database(t)
	admin, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, "create role blind login password 'x'"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := admin.Exec(context.Background(), "drop role blind"); err != nil {
			t.Error(err)
		}
	}()
	cfg, err := pgxpool.ParseConfig(pgtest.With(dsn, "pool_max_conns", "2"))
	if err != nil {
		t.Fatal(err)
	}
	var blind atomic.Bool
	cfg.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		if blind.Load() {
			c.User, c.Password = "blind", "x"
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	log := &records{}
	db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithGateName("blind"), pgxgated.WithLogger(slog.New(log)))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	r := prometheus.NewRegistry()
	if err := r.Register(metrics.NewCollector(pgxgated.GateOf(db))); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	blind.Store(true)
	// For as long as it takes to be asked more than once.
	for start := time.Now(); time.Since(start) < 2500*time.Millisecond; {
		s := gather(t, r, "blind")
		if _, ok := s["lock_waiting"]; ok {
			t.Fatal("lock_waiting is reported")
		}
		if s["running"] != 1 {
			t.Fatalf("running %v", s["running"])
		}
	}
	if said := log.with("lock waits"); len(said) != 1 || !strings.Contains(said[0], "hidden") {
		t.Errorf("said %q", said)
	}
}

// A server that does not answer does not hang a scrape.
func TestAServerThatHangsDoesNotHangAScrape(t *testing.T) {
	server := pgtest.New(t)
	ctx := t.Context()
	db, err := sql.Open(pgxgated.DriverName, pgtest.With(pgtest.With(server.DSN(), "pool_max_conns", "2"), "gate_drain_limit", "1s"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	g := pgxgated.GateOf(db)
	r := prometheus.NewRegistry()
	if err := r.Register(metrics.NewCollector(g)); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Freeze(); err != nil {
		t.Fatal(err)
	}
	scraped := make(chan scrape)
	go func() { scraped <- gather(t, r, g.Name()) }()
	select {
	case s := <-scraped:
		if _, ok := s["lock_waiting"]; ok || s["running"] != 1 {
			t.Errorf("running %v, lock_waiting %v", s["running"], ok)
		}
	case <-time.After(20 * time.Second):
		t.Error("the scrape hangs")
	}
	if err := server.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Error(err)
	}
}

// Two gates over one pool that together let more in than it has connections are worth one warning.
func TestGatesThatOversubscribeAPoolAreWarnedOfOnce(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "4"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	log := &records{}
	open := func(running int) *sql.DB {
		db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithLimits(pgxgated.Limits{Running: running}), pgxgated.WithLogger(slog.New(log)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db
	}
	a := open(2)
	open(2)
	if said := log.with("running permits together"); len(said) != 0 {
		t.Errorf("2 + 2 on 4 connections: %q", said)
	}
	a.Close()
	open(2)
	if said := log.with("running permits together"); len(said) != 0 {
		t.Errorf("one of them was closed: %q", said)
	}
	open(1)
	open(1)
	if said := log.with("running permits together"); len(said) != 1 || !strings.Contains(said[0], "connections=4") {
		t.Errorf("2 + 2 + 1 + 1 on 4 connections: %q", said)
	}
}
