package admission

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// The storm: 40 callers want transactions of 20 ms, four of which may be at work, each with a deadline of up to 120 ms. Who
// is refused comes back 10 ms later.
const (
	stormRunning  = 4
	stormCallers  = 40
	stormWork     = "select pg_sleep(0.02)"
	stormDeadline = 120 * time.Millisecond
	stormPause    = 10 * time.Millisecond
)

// The server counts over-limits itself, so that those of callers who are gone count too: each transaction takes one of four
// advisory locks that PostgreSQL holds until its end, and who finds none is the fifth. Looking for one is serialised, else
// locks that change hands during the look could hide a free one.
const stormSchema = `
create sequence over_limits;
create function enter() returns void language plpgsql as $$
begin
	perform pg_advisory_lock(0);
	for i in 1..4 loop
		if pg_try_advisory_xact_lock(i) then
			perform pg_advisory_unlock(0);
			return;
		end if;
	end loop;
	perform nextval('over_limits');
	perform pg_advisory_unlock(0);
end $$;`

type stormResult struct {
	done, refused, late atomic.Int64
	length              time.Duration
	overLimits          int
}

func (s *stormResult) goodput() float64 { return float64(s.done.Load()) / s.length.Seconds() }

func (s *stormResult) String() string {
	return fmt.Sprintf("goodput %.0f/s (committed %d, refused %d, cancelled on the way %d), %d over-limits",
		s.goodput(), s.done.Load(), s.refused.Load(), s.late.Load(), s.overLimits)
}

// stormOn has the callers work on db for that long.
func stormOn(t testing.TB, db *sql.DB, length time.Duration) *stormResult {
	plain := pgxgated.GateOf(db) == nil // pgx's own driver may say this of a connection that a cancelled call has closed
	s := &stormResult{length: length}
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for range stormCallers {
		wg.Go(func() {
			for time.Now().Before(end) {
				ctx, cancel := context.WithTimeout(context.Background(), rand.N(stormDeadline))
				_, err := pgxgated.InTx(ctx, db, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
					if _, err := tx.ExecContext(ctx, "select enter()"); err != nil {
						return 0, err
					}
					_, err := tx.ExecContext(ctx, stormWork)
					return 0, err
				})
				switch {
				case err == nil:
					s.done.Add(1)
				case errors.Is(err, pgxgated.ErrRejected):
					s.refused.Add(1)
					time.Sleep(stormPause) // the caller's own
				case ctx.Err() != nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sql.ErrTxDone)), plain && errors.Is(err, driver.ErrBadConn):
					s.late.Add(1)
				default:
					t.Errorf("unexpected error: %T %v", err, err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	return s
}

// TestStorm: under deadlines the gate lets more work finish than database/sql with as many connections, and never lets more
// than Running be at work on the server (I6). The figures are logged; with PGXGATED_LONG=1 they are asserted, too.
func TestStorm(t *testing.T) {
	leakFree(t)
	length := 1500 * time.Millisecond
	if long() {
		length = 6 * time.Second
	}
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec(stormSchema)
	over := func() int { return see.Int("select case when is_called then last_value else 0 end from over_limits") }

	var plain *stormResult
	t.Run("database-sql", func(t *testing.T) {
		leakFree(t)
		db, err := sql.Open("pgx", dsn)
		must(t, err)
		defer db.Close()
		db.SetMaxOpenConns(stormRunning)
		plain = stormOn(t, db, length)
		plain.overLimits = over()
		t.Logf("MaxOpenConns %d: %v", stormRunning, plain)
	})
	see.becomes("the server is done with it", 1, "select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend'")
	t.Run("pgx-gated", func(t *testing.T) {
		before := over()
		r := newRig(t, dsn, 2*stormRunning, pgxgated.Limits{Running: stormRunning, Waiting: 10 * stormRunning, MaxWait: 100 * time.Millisecond})
		// As in service, not as in the first instants: the estimate needs some successful holds.
		_ = stormOn(t, r.DB, 300*time.Millisecond)
		r.idle()
		from := r.gate.Stats()
		gated := stormOn(t, r.DB, length)
		r.idle()
		gated.overLimits = over() - before
		s := r.gate.Stats()
		hold := (s.HoldTime - from.HoldTime) / time.Duration(s.Acquired-from.Acquired)
		limit := stormRunning / hold.Seconds()
		t.Logf("running %d: %v; mean hold %v, of the limit %.0f/s %.3f; of database/sql %.2f; deadline short %d, full %d, wait timeout %d; %d connections made",
			stormRunning, gated, hold.Round(10*time.Microsecond), limit, gated.goodput()/limit, gated.goodput()/plain.goodput(),
			s.DeadlineShort-from.DeadlineShort, s.AdmissionFull-from.AdmissionFull, s.WaitTimeout-from.WaitTimeout, r.pool.Stat().NewConnsCount())
		if gated.overLimits != 0 {
			t.Errorf("%d times more than %d were at work on the server", gated.overLimits, stormRunning)
		}
		if s.DrainsUnproven != 0 {
			t.Errorf("%d permits came back without proof", s.DrainsUnproven)
		}
		if s.DeadlineShort == from.DeadlineShort {
			t.Error("nobody was refused for his deadline")
		}
		if gated.goodput() < 0.9*plain.goodput() { // a tenth is for the noise of a short run
			t.Errorf("goodput %.0f/s, less than database/sql's %.0f/s", gated.goodput(), plain.goodput())
		}
		if long() {
			if gated.goodput() < 0.95*limit {
				t.Errorf("goodput %.0f/s, want 0.95 of %.0f/s", gated.goodput(), limit)
			}
			if gated.goodput() < 1.25*plain.goodput() {
				t.Errorf("goodput %.0f/s, want 1.25 of database/sql's %.0f/s", gated.goodput(), plain.goodput())
			}
		}
	})
}
