package gated

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// The server counts over-limits itself, so that those of callers who are gone count too. Each transaction takes one of B
// advisory locks that PostgreSQL holds until its end. With B gated operations at work at most there is always one free;
// who finds none is the operation B+1. Looking for one is serialised: else locks that change hands during the look could
// make it miss the free one.
const truthSchema = `
create sequence over_limits;
create table copied (line text);
create function enter(b int) returns int language plpgsql as $$
begin
	perform pg_advisory_lock(0);
	for i in 1..b loop
		if pg_try_advisory_xact_lock(i) then
			perform pg_advisory_unlock(0);
			return i;
		end if;
	end loop;
	perform nextval('over_limits');
	perform pg_advisory_unlock(0);
	return 0;
end $$;

-- Sleeps a while. Once cancelled it takes half a second to give up, however often it is cancelled meanwhile.
create function stubborn(seconds float) returns void language plpgsql as $$
declare until timestamptz;
begin
	perform pg_sleep(seconds);
exception when query_canceled then
	until := clock_timestamp() + interval '0.5 s';
	while clock_timestamp() < until loop
		begin
			perform pg_sleep(extract(epoch from until - clock_timestamp()));
		exception when query_canceled then
		end;
	end loop;
	raise exception 'given up';
end $$;`

// truthLength is how long each storm lasts.
func truthLength() time.Duration {
	if os.Getenv("PGXGATED_LONG") == "1" {
		return 6 * time.Second
	}
	return time.Second
}

// TestServerTruth asks the server whether there were ever more than Running gated operations at work (I6), while callers
// give up at random moments. Beside it the same transactions on plain pgx.
func TestServerTruth(t *testing.T) {
	const b, p, callers = 4, 8, 40
	forms := []struct {
		name string
		work func(ctx context.Context, db *sql.DB) error
	}{
		{"sleep", inTx("select pg_sleep(0.02)")},
		{"slow to cancel", inTx("select stubborn(0.02)")},
		{"copy", copyIn},
	}
	// However slow the machine is, this shows that the server sees an over-limit. The storm on plain pgx shows hundreds
	// where connections are made fast, and hardly any where its callers give up before they have one.
	t.Run("measurement", func(t *testing.T) {
		leakFree(t)
		dsn := pgtest.Shared(t).Database(t)
		newTruth(t, dsn).Exec(truthSchema)
		db, err := sql.Open("pgx", dsn)
		must(t, err)
		defer db.Close()
		for range p {
			tx, err := db.BeginTx(t.Context(), nil)
			must(t, err)
			defer tx.Rollback()
			_, err = tx.ExecContext(t.Context(), "select enter($1)", b)
			must(t, err)
		}
		if n := overLimits(t, dsn); n != p-b {
			t.Errorf("%d transactions at work, %d over-limits, want %d", p, n, p-b)
		}
	})
	for _, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			leakFree(t)
			dsn := pgtest.Shared(t).Database(t)
			newTruth(t, dsn).Exec(truthSchema)

			var plain int64
			t.Run("plain pgx", func(t *testing.T) {
				db, err := sql.Open("pgx", dsn)
				must(t, err)
				defer db.Close()
				db.SetMaxOpenConns(p)
				s := storm(t, db, callers, f.work, func(error) bool { return true })
				n := overLimits(t, dsn)
				plain = s.done.Load()
				t.Logf("%d over-limits, goodput %.0f/s, %s", n, s.goodput(), s)
			})
			t.Run("pgx-gated", func(t *testing.T) {
				// What plain pgx left behind is still at work.
				see := newTruth(t, dsn)
				eventually(t, "the server is done with plain pgx", func() error {
					if n := see.Int("select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend'"); n > 2 {
						return fmt.Errorf("%d sessions", n)
					}
					return nil
				})
				before := overLimits(t, dsn)
				r := newRig(t, setup{dsn: dsn, b: b, p: p,
					limits: &pgxgated.Limits{Running: b, Waiting: 10 * b, MaxWait: 100 * time.Millisecond},
					opts:   []pgxgated.Option{pgxgated.WithDeadlineAdmission(true)}})
				s := storm(t, r.DB, callers, f.work, func(err error) bool { return errors.Is(err, pgxgated.ErrRejected) })
				r.idle()
				n := overLimits(t, dsn) - before
				t.Logf("%d over-limits, goodput %.0f/s, %s; %d physical connections made; %+v", n, s.goodput(), s, r.pool.Stat().NewConnsCount(), r.gate.Stats())
				if n != 0 {
					t.Errorf("%d times more than %d operations were at work on the server", n, b)
				}
				if done := s.done.Load(); done == 0 || 2*done < plain { // usually it is several times as much
					t.Errorf("%d committed, %d by plain pgx", done, plain)
				}
				if n := r.gate.Stats().DrainsUnproven; n != 0 {
					t.Errorf("%d permits came back without proof", n)
				}
			})
		})
	}
}

func overLimits(t *testing.T, dsn string) int {
	t.Helper()
	return newTruth(t, dsn).Int("select case when is_called then last_value else 0 end from over_limits")
}

type stormResult struct {
	done, late, refused atomic.Int64
	length              time.Duration
}

func (s *stormResult) goodput() float64 { return float64(s.done.Load()) / s.length.Seconds() }

func (s *stormResult) String() string {
	return strings.Join([]string{
		"committed", itoa(s.done.Load()), "refused", itoa(s.refused.Load()), "given up", itoa(s.late.Load()),
	}, " ")
}

// storm has callers do work for the length of the test, each time with a deadline of up to 120 ms. Errors other than
// refusals and the callers' own deadlines fail the test.
func storm(t *testing.T, db *sql.DB, callers int, work func(context.Context, *sql.DB) error, refusal func(error) bool) *stormResult {
	t.Helper()
	s := &stormResult{length: truthLength()}
	end := time.Now().Add(s.length)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for time.Now().Before(end) {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(120*time.Millisecond))))
				err := work(ctx, db)
				switch {
				case err == nil:
					s.done.Add(1)
				case ctx.Err() != nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sql.ErrTxDone)):
					s.late.Add(1)
				case refusal(err):
					s.refused.Add(1)
					<-ctx.Done() // as a caller that comes back with its next request
				default:
					t.Errorf("unexpected error: %T %v (context: %v)", err, err, ctx.Err())
				}
				cancel()
			}
		})
	}
	wg.Wait()
	return s
}

func inTx(statement string) func(context.Context, *sql.DB) error {
	return func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "select enter(4)"); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
		return tx.Commit()
	}
}

// copyIn copies 20 ms long, or until somebody has enough: pgx does not stop asking a source that has more.
func copyIn(ctx context.Context, db *sql.DB) error {
	return inTxOnConn(ctx, db, func(c *sql.Conn, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "select enter(4)"); err != nil {
			return err
		}
		return c.Raw(func(dc any) error {
			pc, err := pgxOf(ctx, dc)
			if err != nil {
				return err
			}
			_, err = pc.PgConn().CopyFrom(ctx, &slowReader{lines: 10, every: 2 * time.Millisecond}, "copy copied from stdin")
			if err != nil && ctx.Err() != nil {
				return ctx.Err() // pgx's own call may say that its connection was closed
			}
			return err
		})
	})
}

// inTxOnConn runs f in a transaction on a *sql.Conn.
func inTxOnConn(ctx context.Context, db *sql.DB, f func(*sql.Conn, *sql.Tx) error) error {
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	tx, err := c.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(c, tx); err != nil {
		return err
	}
	return tx.Commit()
}

func pgxOf(ctx context.Context, dc any) (*pgx.Conn, error) {
	if std, ok := dc.(*stdlib.Conn); ok {
		return std.Conn(), nil
	}
	return pgxgated.PgxConn(ctx, dc)
}

// slowReader yields a line every so often.
type slowReader struct {
	lines int
	every time.Duration
}

func (r *slowReader) Read(p []byte) (int, error) {
	if r.lines == 0 {
		return 0, io.EOF
	}
	r.lines--
	time.Sleep(r.every)
	return copy(p, "line\n"), nil
}
