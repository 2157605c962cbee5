package admission

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// clients are ways to send a statement with a context.
var clients = map[string]func(*testing.T, *sql.DB) func(context.Context, string) error{
	"database-sql": func(_ *testing.T, db *sql.DB) func(context.Context, string) error {
		return func(ctx context.Context, q string) error {
			_, err := db.ExecContext(ctx, q)
			return err
		}
	},
	"database-sql in a transaction": func(_ *testing.T, db *sql.DB) func(context.Context, string) error {
		return func(ctx context.Context, q string) error {
			_, err := pgxgated.InTx(ctx, db, nil, func(ctx context.Context, tx *sql.Tx) (sql.Result, error) { return tx.ExecContext(ctx, q) })
			return err
		}
	},
	"sqlx": func(_ *testing.T, db *sql.DB) func(context.Context, string) error {
		x := sqlx.NewDb(db, "pgx")
		return func(ctx context.Context, q string) error {
			var rows []struct {
				Done string
			}
			return x.SelectContext(ctx, &rows, "select ''::text as done from ("+q+") as q")
		}
	},
	"GORM": func(t *testing.T, db *sql.DB) func(context.Context, string) error {
		g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{Logger: logger.Discard})
		must(t, err)
		return func(ctx context.Context, q string) error { return g.WithContext(ctx).Exec(q).Error }
	},
}

// TestWorkloadBudget: five of workload b may be at work and none wait, so the sixth is refused at once, whatever library sends
// it; others have the rest of the gate.
func TestWorkloadBudget(t *testing.T) {
	const blocked = "select pg_advisory_xact_lock_shared(1)"
	for name, client := range clients {
		for _, by := range []string{"option", "DSN"} {
			t.Run(name+" by "+by, func(t *testing.T) {
				leakFree(t)
				dsn := pgtest.Shared(t).Database(t)
				see := newTruth(t, dsn)
				var db *sql.DB
				if by == "option" {
					db = newRig(t, dsn, 20, pgxgated.Limits{Running: 20, Waiting: 10, MaxWait: bound},
						pgxgated.WithWorkloads(map[string]pgxgated.Limits{"b": {Running: 5}})).DB
				} else {
					for _, kv := range [][2]string{{"pool_max_conns", "20"}, {"gate_running", "20"}, {"gate_max_wait", "30s"}, {"gate_workloads", "b:5+0"}} {
						dsn = pgtest.With(dsn, kv[0], kv[1])
					}
					var err error
					db, err = sql.Open(pgxgated.DriverName, dsn)
					must(t, err)
					defer db.Close()
				}
				send := client(t, db)
				gate := pgxgated.GateOf(db)
				b := pgxgated.WithWorkload(t.Context(), "b")

				see.Exec("select pg_advisory_lock(1)")
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						if err := send(b, blocked); err != nil {
							t.Error(err)
						}
					})
				}
				see.becomes("five of b are at work", 5, "select count(*) from pg_locks where locktype = 'advisory' and not granted")
				err := send(b, blocked)
				var e *pgxgated.RejectedError
				if !errors.As(err, &e) || !errors.Is(err, pgxgated.ErrAdmissionFull) || e.Workload != "b" || e.Limits.Running != 5 || e.Waited != 0 {
					t.Errorf("the sixth: %v (%+v), want it refused at once for the limits of b", err, e)
				}
				for range 15 { // one after the other: none is held up
					if err := send(t.Context(), "select 1"); err != nil {
						t.Errorf("another workload: %v", err)
					}
				}
				for _, unknown := range []string{"", "c", "B"} {
					if err := send(pgxgated.WithWorkload(t.Context(), unknown), "select 1"); !errors.Is(err, pgxgated.ErrUnknownWorkload) {
						t.Errorf("workload %q: %v, want ErrUnknownWorkload", unknown, err)
					}
				}
				if s := gate.Stats(); s.Workloads["b"].Running != 5 || s.Workloads["b"].AdmissionFull != 1 || s.AdmissionFull != 1 {
					t.Errorf("%+v", s)
				}
				see.Exec("select pg_advisory_unlock(1)")
				wg.Wait()
				if s := gate.Stats(); s.Running != 0 || s.Workloads["b"].Running != 0 {
					t.Errorf("%+v", s)
				}
			})
		}
	}
}

// isolation is what became of workload A.
type isolation struct {
	name     string
	sent, ok int
	times    []time.Duration // of those that succeeded
	refused  []time.Duration // of B's refusals
	waited   time.Duration   // the longest that a refused one of B had waited in the gate
}

func (i *isolation) success() float64 { return float64(i.ok) / float64(max(i.sent, 1)) }

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

func (i *isolation) String() string {
	s := fmt.Sprintf("%s: %d of %d of A within 1 s (%.1f %%)", i.name, i.ok, i.sent, 100*i.success())
	if i.ok > 0 {
		s += fmt.Sprintf(", median %v, p99 %v", quantile(i.times, 0.5).Round(time.Microsecond), quantile(i.times, 0.99).Round(time.Microsecond))
	}
	if len(i.refused) > 0 {
		s += fmt.Sprintf("; %d of B refused, median %v, p99 %v", len(i.refused), quantile(i.refused, 0.5).Round(100*time.Nanosecond), quantile(i.refused, 0.99).Round(100*time.Nanosecond))
	}
	return s
}

// TestIsolation: two workloads, 70 % of the requests fast, 30 % of two seconds, on one pool of 20. Without budgets the slow one takes all there
// is, and nothing of the fast one succeeds within a second; with five permits for the slow one the fast one goes on as if it
// were alone. The figures are logged; with PGXGATED_LONG=1 they are asserted, too.
func TestIsolation(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	length := 2 * time.Second
	if long() {
		length = 6 * time.Second
	}
	measure := func(name string, withB bool, opts ...pgxgated.Option) *isolation {
		i := &isolation{name: name}
		t.Run(name, func(t *testing.T) {
			r := newRig(t, dsn, 20, pgxgated.Limits{Running: 20, Waiting: 200, MaxWait: bound}, opts...)
			var mu sync.Mutex
			var as, bs sync.WaitGroup
			all, stop := context.WithCancel(t.Context()) // B's
			defer stop()
			budgets := r.gate.Stats().Workloads != nil
			b := func() {
				ctx := all
				if budgets {
					ctx = pgxgated.WithWorkload(ctx, "b")
				}
				start := time.Now()
				_, err := r.ExecContext(ctx, "select pg_sleep(2)")
				took := time.Since(start)
				var e *pgxgated.RejectedError
				switch {
				case errors.As(err, &e):
					mu.Lock()
					i.refused, i.waited = append(i.refused, took), max(i.waited, e.Waited)
					mu.Unlock()
				case err != nil && !errors.Is(err, context.Canceled):
					t.Errorf("B: %v", err)
				}
			}
			a := func(counted bool) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				start := time.Now()
				_, err := r.ExecContext(ctx, "select 1")
				took := time.Since(start)
				if err != nil && !errors.Is(err, pgxgated.ErrRejected) && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("A: %v", err)
				}
				mu.Lock()
				defer mu.Unlock()
				if counted {
					i.sent++
					if err == nil {
						i.ok++
						i.times = append(i.times, took)
					}
				}
			}
			// Requests come at a rate, not when the ones before are done. The first second fills the pool.
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for n, start := 0, time.Now(); time.Since(start) < time.Second+length; n++ {
				<-tick.C
				counted := time.Since(start) > time.Second
				switch {
				case n%10 < 7:
					as.Go(func() { a(counted) })
				case withB:
					bs.Go(b)
				}
			}
			// Those of A that were sent have their second; those of B are not waited for.
			as.Wait()
			stop()
			bs.Wait()
			t.Log(i)
		})
		return i
	}
	alone := measure("A alone", false)
	shared := measure("no budgets", true)
	budget := measure("b:5+0", true, pgxgated.WithWorkloads(map[string]pgxgated.Limits{"b": {Running: 5}}))
	t.Logf("\n%v\n%v\n%v", alone, shared, budget)
	if shared.success() > 0.5 || budget.success() < 0.9 {
		t.Errorf("A's success: %.2f without budgets, %.2f with", shared.success(), budget.success())
	}
	if len(budget.refused) == 0 || budget.waited != 0 {
		t.Errorf("%d of B refused, the longest wait %v, want refusals without any", len(budget.refused), budget.waited)
	}
	if long() {
		if budget.ok != budget.sent {
			t.Errorf("%d of %d of A succeeded beside a budget", budget.ok, budget.sent)
		}
		for _, q := range []float64{0.5, 0.99} {
			if with, without := quantile(budget.times, q), quantile(alone.times, q); with > without*3/2 {
				t.Errorf("quantile %v of A is %v, and %v alone: more than 1.5 times", q, with, without)
			}
		}
		if m := quantile(budget.refused, 0.5); m > time.Millisecond {
			t.Errorf("a refusal took %v", m)
		}
	}
}
