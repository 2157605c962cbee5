package admission

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

var errWork = errors.New("the work failed")

// txRig is a gated database with a table in which a row tells what was committed.
type txRig struct {
	*rig
	see *truth
}

func newTxRig(t *testing.T) *txRig {
	t.Helper()
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec("create table done (id int primary key deferrable initially deferred)")
	return &txRig{rig: one(t, dsn), see: see}
}

// insert is work that writes a row and ends as end says.
func insert(end func() error) func(context.Context, *sql.Tx) (int, error) {
	return func(ctx context.Context, tx *sql.Tx) (int, error) {
		if _, err := tx.ExecContext(ctx, "insert into done values (1)"); err != nil {
			return 0, err
		}
		return 7, end()
	}
}

// ended fails the test unless everything is back at this very moment, and the server has committed that many rows.
func (r *txRig) ended(rows int) {
	r.t.Helper()
	if err := r.busy(); err != nil {
		r.t.Errorf("InTx has returned with %v", err)
	}
	if n := r.see.Int("select count(*) from done"); n != rows {
		r.t.Errorf("%d rows committed, want %d", n, rows)
	}
	if n := r.see.Int("select count(*) from pg_locks where locktype = 'transactionid' and database is null and pid in (select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid())"); n != 0 {
		r.t.Errorf("%d transactions open on the server", n)
	}
}

func TestInTxOnPostgreSQL(t *testing.T) {
	t.Run("commits, then returns the value", func(t *testing.T) {
		r := newTxRig(t)
		got, err := pgxgated.InTx(t.Context(), r.DB, nil, insert(func() error { return nil }))
		r.ended(1)
		if got != 7 || err != nil {
			t.Errorf("got %d, %v", got, err)
		}
	})
	t.Run("rolls back on an error", func(t *testing.T) {
		r := newTxRig(t)
		got, err := pgxgated.InTx(t.Context(), r.DB, nil, insert(func() error { return errWork }))
		r.ended(0)
		if got != 0 || err != errWork { //nolint:errorlint // unwrapped (I9)
			t.Errorf("got %d, %v", got, err)
		}
	})
	t.Run("rolls back on a panic", func(t *testing.T) {
		r := newTxRig(t)
		defer func() {
			r.ended(0)
			if v := recover(); v != errWork { //nolint:errorlint // unchanged
				t.Errorf("recovered %v", v)
			}
		}()
		_, _ = pgxgated.InTx(t.Context(), r.DB, nil, insert(func() error { panic(errWork) }))
	})
	t.Run("rolls back on Goexit", func(t *testing.T) {
		r := newTxRig(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = pgxgated.InTx(t.Context(), r.DB, nil, insert(func() error { runtime.Goexit(); return nil }))
		})
		wg.Wait()
		r.ended(0)
	})
	t.Run("returns the server's error in COMMIT as it is", func(t *testing.T) {
		r := newTxRig(t)
		r.see.Exec("insert into done values (1)")
		got, err := pgxgated.InTx(t.Context(), r.DB, nil, insert(func() error { return nil }))
		r.ended(1)
		bare(t, err, "23505")
		if got != 0 {
			t.Errorf("value %d beside an error", got)
		}
	})
	t.Run("returns a statement's error as it is", func(t *testing.T) {
		r := newTxRig(t)
		_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			_, err := tx.ExecContext(ctx, "select 1/0")
			return 0, err
		})
		r.ended(0)
		bare(t, err, "22012")
	})
	t.Run("returns the error of a killed session as it is", func(t *testing.T) {
		r := newTxRig(t)
		_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			_, err := tx.ExecContext(ctx, "select pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")
			return 0, err
		})
		bare(t, err, "57P01")
		r.idle()
		r.ended(0)
	})
	t.Run("cancelled in a statement", func(t *testing.T) {
		r := newTxRig(t)
		ctx, cancel := context.WithCancel(t.Context())
		_, err := pgxgated.InTx(ctx, r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			pid := pidOf(t, tx)
			go func() {
				r.see.becomes("it sleeps", 1, "select count(*) from pg_stat_activity where pid = $1 and wait_event = 'PgSleep'", pid)
				cancel()
			}()
			_, err := tx.ExecContext(ctx, "insert into done select 1 from pg_sleep(60)")
			return 0, err
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want context.Canceled", err)
		}
		r.idle()
		r.ended(0)
	})
	t.Run("cancelled between statements", func(t *testing.T) {
		r := newTxRig(t)
		ctx, cancel := context.WithCancel(t.Context())
		got, err := pgxgated.InTx(ctx, r.DB, nil, insert(func() error { cancel(); return nil }))
		if got != 0 || !errors.Is(err, context.Canceled) && !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("got %d, %v", got, err)
		}
		r.idle()
		r.ended(0)
	})
	t.Run("passes the options on", func(t *testing.T) {
		r := newTxRig(t)
		_, err := pgxgated.InTx(t.Context(), r.DB, &sql.TxOptions{ReadOnly: true}, insert(func() error { return nil }))
		r.ended(0)
		bare(t, err, "25006")
	})
}

// TestInTxHoldAndWait (A08, second half): every permit is held by a transaction whose work wants a second one. With InTx it is
// refused at once, all of the transactions finish, and nobody waited.
func TestInTxHoldAndWait(t *testing.T) {
	r := newRig(t, pgtest.Shared(t).DSN(), 2, pgxgated.Limits{Running: 2, Waiting: 10, MaxWait: bound})
	var inside, wg sync.WaitGroup
	inside.Add(2)
	for range 2 {
		wg.Go(func() {
			_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
				inside.Done()
				inside.Wait()
				for range 3 {
					if _, err := r.BeginTx(context.WithoutCancel(ctx), nil); !errors.Is(err, pgxgated.ErrNested) {
						t.Errorf("BeginTx: %v, want ErrNested", err)
					}
					if err := r.QueryRowContext(ctx, "select 1").Err(); !errors.Is(err, pgxgated.ErrNested) {
						t.Errorf("a query: %v, want ErrNested", err)
					}
				}
				return 0, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := r.gate.Stats(); s.WaitTime != 0 || s.Acquired != 2 {
		t.Errorf("somebody waited: %+v", s)
	}
}

// TestHoldAndWaitIsBounded (A08, second half): a context that does not come from InTx tells nothing, so the second operation
// waits; but only for MaxWait, and the transactions around it finish.
func TestHoldAndWaitIsBounded(t *testing.T) {
	r := newRig(t, pgtest.Shared(t).DSN(), 2, pgxgated.Limits{Running: 2, Waiting: 10, MaxWait: 1e6})
	var inside, wg sync.WaitGroup
	inside.Add(2)
	var refused sync.WaitGroup
	refused.Add(2)
	for range 2 {
		wg.Go(func() {
			_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(context.Context, *sql.Tx) (int, error) {
				inside.Done()
				inside.Wait()
				_, err := r.BeginTx(context.Background(), nil)
				refused.Done()
				refused.Wait() // or the other's permit would be free
				if !errors.Is(err, pgxgated.ErrWaitTimeout) {
					return 0, fmt.Errorf("BeginTx: %v, want ErrWaitTimeout", err)
				}
				return 0, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestInTxUngated: the helper is of use on any database.
func TestInTxUngated(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec("create table done (id int primary key)")
	db := stdlib.OpenDB(*see.Conn.Config())
	defer db.Close()
	db.SetMaxOpenConns(1) // a helper that asked the database in between would wait for itself
	got, err := pgxgated.InTx(t.Context(), db, nil, insert(func() error { return nil }))
	if got != 7 || err != nil || db.Stats().WaitCount != 0 {
		t.Errorf("got %d, %v, %d waits", got, err, db.Stats().WaitCount)
	}
	if _, err := pgxgated.InTx(t.Context(), db, nil, insert(func() error { return nil })); err == nil {
		t.Error("inserted twice")
	} else {
		bare(t, err, "23505")
	}
}
