package gated

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// C09: every isolation level with and without ReadOnly, as plain pgx maps it; what pgx refuses is refused before a permit
// is taken.
func TestC09TxOptionsAreThoseOfPlainPgx(t *testing.T) {
	r := newRig(t, setup{dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec("create table t (n int)")
	plain, err := sql.Open("pgx", r.dsn)
	must(t, err)
	defer plain.Close()
	ask := func(db *sql.DB, o *sql.TxOptions) (settings, failure string) {
		t.Helper()
		tx, err := db.BeginTx(t.Context(), o)
		if err != nil {
			return "", err.Error()
		}
		defer tx.Rollback()
		must(t, tx.QueryRow("select current_setting('transaction_isolation') || ' ' || current_setting('transaction_read_only')").Scan(&settings))
		_, err = tx.Exec("insert into t values (1)")
		if o.ReadOnly {
			bare(t, err, "25006")
		} else if err != nil {
			t.Error(err)
		}
		return settings, ""
	}
	refused := 0
	for level := sql.LevelDefault; level <= sql.LevelLinearizable; level++ {
		for _, readOnly := range []bool{false, true} {
			o := &sql.TxOptions{Isolation: level, ReadOnly: readOnly}
			want, wantErr := ask(plain, o)
			before := r.gate.Stats().Acquired
			got, gotErr := ask(r.DB, o)
			if got != want || gotErr != wantErr {
				t.Errorf("%v, read-only %v: %q %q, plain pgx %q %q", level, readOnly, got, gotErr, want, wantErr)
			}
			if took := r.gate.Stats().Acquired - before; gotErr != "" && took != 0 {
				t.Errorf("%v: a permit was taken for what cannot be begun", level)
			}
			if gotErr != "" {
				refused++
			}
			r.running(0)
		}
	}
	if refused == 0 {
		t.Error("no level was refused")
	}
}

// E03 (1): COMMIT of a transaction that the server has aborted.
func TestE03CommitOfAnAbortedTransaction(t *testing.T) {
	r := newRig(t, setup{p: 1, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec("create table t (n int primary key)")
	tx, err := r.Begin()
	must(t, err)
	b := backendOf(t, tx)
	_, err = tx.Exec("insert into t values (1), (1)")
	bare(t, err, "23505")
	err = tx.Commit()
	if !errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, pgxgated.ErrOutcomeUnknown) {
		t.Errorf("Commit: %v, want ErrTxCommitRollback and a known outcome", err)
	}
	r.nextIsClean(b, true)
}

// nextIsClean checks the next transaction on a pool of one connection.
func (r *rig) nextIsClean(was backend, same bool) {
	r.t.Helper()
	tx, err := r.Begin()
	must(r.t, err)
	defer tx.Rollback()
	if got := backendOf(r.t, tx); (got == was) != same {
		r.t.Errorf("same backend %v, want %v", got == was, same)
	}
	var state string
	must(r.t, tx.QueryRow("select current_setting('transaction_isolation')").Scan(&state))
	if n := r.see.Int("select count(*) from pg_prepared_xacts"); n != 0 {
		r.t.Error("something is left prepared")
	}
}

const deferred = `
create table t (n int);
create function slowly() returns trigger language plpgsql as $$ begin perform pg_sleep(%s); return null; end $$;
create constraint trigger slowly after insert on t deferrable initially deferred for each row execute function slowly();`

// E03 (2): COMMIT that the server refuses, since what was deferred to it is ended.
func TestE03CommitRefusedByTheServer(t *testing.T) {
	r := newRig(t, setup{p: 1, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec(fmt.Sprintf(deferred, "60"))
	tx, err := r.Begin()
	must(t, err)
	b := backendOf(t, tx)
	_, err = tx.Exec("insert into t values (1)")
	must(t, err)
	done := later(tx.Commit)
	r.see.working(b, "commit")
	r.see.Exec("select pg_cancel_backend($1)", b.pid) // statement_timeout does not reach what COMMIT runs
	err = <-done
	bare(t, err, "57014")
	if errors.Is(err, pgxgated.ErrOutcomeUnknown) {
		t.Error("an ERROR in COMMIT is a known outcome: rolled back")
	}
	r.nextIsClean(b, true)
	if n := r.see.Int("select count(*) from t"); n != 0 {
		t.Errorf("%d rows, want 0", n)
	}
}

// E03 (3): the backend dies in COMMIT. The outcome is unknown, and nothing is tried again.
func TestE03BackendKilledInCommit(t *testing.T) {
	r := newRig(t, setup{p: 1, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec(fmt.Sprintf(deferred, "60"))
	tx, err := r.Begin()
	must(t, err)
	b := backendOf(t, tx)
	_, err = tx.Exec("insert into t values (1)")
	must(t, err)
	done := later(tx.Commit)
	r.see.working(b, "commit")
	r.see.Exec("select pg_terminate_backend($1)", b.pid)
	err = <-done
	public(t, err)
	var pgErr *pgconn.PgError
	if !errors.Is(err, pgxgated.ErrOutcomeUnknown) || !errors.As(err, &pgErr) || pgErr.Code != "57P01" {
		t.Errorf("Commit: %v, want ErrOutcomeUnknown and 57P01", err)
	}
	r.nextIsClean(b, false)
}

func TestCommitTimeoutLeavesTheOutcomeUnknown(t *testing.T) {
	r := newRig(t, setup{p: 1, dsn: pgtest.Shared(t).Database(t), opts: []pgxgated.Option{pgxgated.WithCommitTimeout(100 * time.Millisecond)}})
	r.see.Exec(fmt.Sprintf(deferred, "60"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // what is left of it is more than the timeout, and counts
	defer cancel()
	tx, err := r.BeginTx(ctx, nil)
	must(t, err)
	b := backendOf(t, tx)
	_, err = tx.Exec("insert into t values (1)")
	must(t, err)
	err = tx.Commit()
	public(t, err)
	if !errors.Is(err, pgxgated.ErrOutcomeUnknown) {
		t.Errorf("Commit: %v, want ErrOutcomeUnknown", err)
	}
	r.released(func() {
		if r.see.there(b) {
			t.Error("I6: the permit came back while COMMIT was under way")
		}
	})
}

// COMMIT outlives the caller's deadline and cancellation.
func TestCommitIsNotInterruptedByTheCaller(t *testing.T) {
	r := newRig(t, setup{p: 1, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec(fmt.Sprintf(deferred, "0.3"))
	ctx, cancel := context.WithCancel(t.Context())
	tx, err := r.BeginTx(ctx, nil)
	must(t, err)
	b := backendOf(t, tx)
	_, err = tx.Exec("insert into t values (1)")
	must(t, err)
	done := later(tx.Commit)
	r.see.working(b, "commit")
	cancel()
	must(t, <-done)
	if n := r.see.Int("select count(*) from t"); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
	r.nextIsClean(b, true)
}

// B03: deadlines that pass between statements. The lock is free at once, and connections are not used up.
func TestB03RollbackWithADeadContextKeepsTheConnection(t *testing.T) {
	r := newRig(t, setup{p: 2, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec("create table t (n int); insert into t values (0)")
	for range 200 {
		ctx, cancel := context.WithCancel(t.Context())
		tx, err := r.BeginTx(ctx, nil)
		must(t, err)
		_, err = tx.Exec("update t set n = n + 1")
		must(t, err)
		cancel()
		r.see.Exec("select from t for update") // waits for the row lock
		if err := tx.Commit(); !errors.Is(err, context.Canceled) && !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("Commit: %v", err)
		}
	}
	if n := r.see.Int("select n from t"); n != 0 {
		t.Errorf("%d transactions were committed", n)
	}
	if n := r.pool.Stat().NewConnsCount(); n > 2 {
		t.Errorf("%d physical connections were made, the pool has 2", n)
	}
}

// B04: no statement of a cancelled transaction runs outside it, and none in another's.
func TestB04NoStatementOutsideItsTransaction(t *testing.T) {
	r := newRig(t, setup{b: 1, p: 1, dsn: pgtest.Shared(t).Database(t)})
	r.see.Exec("create table t (tx bigint, mark int)")
	n := 300
	if os.Getenv("PGXGATED_LONG") == "1" {
		n = 10_000
	}
	var wg sync.WaitGroup
	var committed atomic.Int64
	for worker := range 4 {
		wg.Go(func() {
			for i := range n / 4 {
				id := worker*n + i
				if worker%2 == 1 { // transactions of its own that end well
					tx, err := r.Begin()
					if err != nil {
						t.Error(err)
						return
					}
					for range 2 {
						if _, err := tx.Exec("insert into t values ($1, 0)", id); err != nil {
							t.Errorf("a healthy transaction: %v", err)
						}
					}
					if err := tx.Commit(); err != nil {
						t.Errorf("a healthy transaction: %v", err)
					}
					committed.Add(1)
					continue
				}
				ctx, cancel := context.WithCancel(context.Background())
				tx, err := r.BeginTx(ctx, nil)
				if err != nil {
					cancel()
					t.Error(err)
					return
				}
				stop := time.AfterFunc(time.Duration(rand.IntN(2000))*time.Microsecond, cancel)
				for err == nil {
					_, err = tx.ExecContext(ctx, "insert into t values ($1, -1)", id)
				}
				if !errors.Is(err, context.Canceled) && !errors.Is(err, sql.ErrTxDone) {
					t.Errorf("a cancelled transaction: %v", err)
				}
				stop.Stop()
				cancel()
				_ = tx.Rollback() // ErrTxDone
			}
		})
	}
	wg.Wait()
	r.idle()
	if n := r.see.Int("select count(*) from t where mark = -1"); n != 0 {
		t.Errorf("%d rows of cancelled transactions", n)
	}
	if n := r.see.Int("select count(*) from (select tx from t group by tx having count(*) = 2)  x"); int64(n) != committed.Load() {
		t.Errorf("%d whole transactions, want %d", n, committed.Load())
	}
}

// B05: what Commit and Rollback answer after a cancellation, at once and later, on a living and on a dead connection.
func TestB05CommitAndRollbackAfterCancel(t *testing.T) {
	r := newRig(t, setup{})
	for _, end := range []string{"Commit", "Rollback"} {
		for _, when := range []string{"at once", "when the permit is back", "killed", "in a statement"} {
			for range 10 {
				ctx, cancel := context.WithCancel(t.Context())
				p := r.begin(ctx)
				switch when {
				case "killed":
					r.see.terminate(p.b)
				case "in a statement":
					time.AfterFunc(time.Millisecond, cancel)
					if _, err := p.tx.ExecContext(ctx, "select pg_sleep(60)"); !errors.Is(err, context.Canceled) && !errors.Is(err, sql.ErrTxDone) {
						t.Errorf("the statement: %v", err)
					}
				}
				cancel()
				if when == "when the permit is back" {
					r.idle()
				}
				f := p.tx.Commit
				if end == "Rollback" {
					f = p.tx.Rollback
				}
				err := f()
				public(t, err)
				if end == "Rollback" && when == "at once" && err == nil {
					continue // it was faster than database/sql's own, and sent
				}
				if !errors.Is(err, context.Canceled) && !errors.Is(err, sql.ErrTxDone) || errors.Is(err, pgxgated.ErrRejected) || errors.Is(err, pgxgated.ErrOutcomeUnknown) {
					t.Errorf("%s, %s: %T %v", end, when, err, err)
				}
				r.idle()
			}
		}
	}
}

// B06: cancelled while BEGIN is on its way. Whatever the answer was, nobody gets the open transaction.
func TestB06CancelledWhileBeginIsInFlight(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	leakFree(t)
	slow := newProxy(t, dsn)
	var on atomic.Bool
	slow.onReply = func(typ byte, body []byte) (bool, time.Duration) {
		if on.Load() && typ == 'C' && string(body) == "BEGIN\x00" {
			return false, time.Duration(rand.IntN(4000)) * time.Microsecond
		}
		return false, 0
	}
	var nested atomic.Int64
	r := newRig(t, setup{dsn: slow.through(dsn), p: 1, pool: func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
			if n.Code == "25001" { // there is already a transaction in progress
				nested.Add(1)
			}
		}
	}})
	canceled := 0
	for range 300 {
		on.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		stop := time.AfterFunc(time.Duration(rand.IntN(4000))*time.Microsecond, cancel)
		tx, err := r.BeginTx(ctx, nil)
		if err != nil {
			canceled++
			if !errors.Is(err, context.Canceled) {
				t.Errorf("BeginTx: %v", err)
			}
		}
		stop.Stop()
		cancel()
		if tx != nil {
			_ = tx.Rollback() // ErrTxDone where the cancellation was first
		}
		on.Store(false)
		clean, err := r.Begin()
		must(t, err)
		must(t, clean.Commit())
	}
	if n := nested.Load(); n != 0 {
		t.Errorf("%d transactions were begun inside another one", n)
	}
	if canceled == 0 {
		t.Error("not one BEGIN was cancelled on its way")
	}
}

// B08: the cancellation of one operation never hits the next.
func TestB08NextOperationIsNotCancelled(t *testing.T) {
	r := newRig(t, setup{p: 1})
	for range 150 {
		ctx, cancel := context.WithCancel(t.Context())
		stop := time.AfterFunc(time.Duration(rand.IntN(2000))*time.Microsecond, cancel)
		_, err := r.ExecContext(ctx, "select pg_sleep(1)")
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the cancelled one: %v", err)
		}
		stop.Stop()
		cancel()
		if _, err := r.Exec("select pg_sleep(0.005)"); err != nil {
			t.Errorf("the next one: %v", err)
		}
	}
}

// E04: BEGIN that is refused with an ERROR keeps the connection; one that is refused with a FATAL costs it.
func TestE04BeginRefusedByTheServer(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	for _, severity := range []string{"ERROR", "FATAL"} {
		t.Run(severity, func(t *testing.T) {
			leakFree(t)
			shed := newProxy(t, dsn)
			var refuse atomic.Bool
			shed.onQuery = func(typ byte, body []byte) []byte {
				if typ != 'Q' || string(body) != "begin\x00" || !refuse.Load() {
					return nil
				}
				return errorResponse(severity, "53300", "too many")
			}
			r := newRig(t, setup{dsn: shed.through(dsn), p: 2})
			r.idleBackends(1)
			refuse.Store(true)
			n := 100
			if severity == "FATAL" {
				n = 5
			}
			for range n {
				_, err := r.Begin()
				bare(t, err, "53300")
				r.idle()
			}
			refuse.Store(false)
			tx, err := r.Begin()
			must(t, err)
			must(t, tx.Commit())
			made := int(r.pool.Stat().NewConnsCount())
			if severity == "ERROR" && made != 1 || severity == "FATAL" && made != n+1 {
				t.Errorf("%d connections made for %d refusals", made, n)
			}
		})
	}
}

// errorResponse is what the server sends to refuse a simple query. After a FATAL there is nothing more.
func errorResponse(severity, code, text string) []byte {
	body := "S" + severity + "\x00V" + severity + "\x00C" + code + "\x00M" + text + "\x00\x00"
	m := append([]byte{'E', 0, 0, 0, byte(4 + len(body))}, body...)
	if severity == "FATAL" {
		return m
	}
	return append(m, 'Z', 0, 0, 0, 5, 'I')
}

// Errors of the server reach the caller as plain pgx has them: the same dynamic type and text, on every path.
func TestServerErrorsAreThoseOfPlainPgx(t *testing.T) {
	r := newRig(t, setup{})
	plain, err := sql.Open("pgx", r.dsn)
	must(t, err)
	defer plain.Close()
	type path func(db *sql.DB, q string) error
	paths := map[string]path{
		"Exec":  func(db *sql.DB, q string) error { _, err := db.Exec(q); return err },
		"Query": func(db *sql.DB, q string) error { rows, err := db.Query(q); return drain(rows, err) },
		"Tx.Exec": func(db *sql.DB, q string) error {
			tx, err := db.Begin()
			must(t, err)
			defer tx.Rollback()
			_, err = tx.Exec(q)
			return err
		},
		"Stmt.Exec": func(db *sql.DB, q string) error {
			st, err := db.Prepare(q)
			if err != nil {
				return err
			}
			defer st.Close()
			_, err = st.Exec()
			return err
		},
		"Conn.Query": func(db *sql.DB, q string) error {
			c, err := db.Conn(t.Context())
			must(t, err)
			defer c.Close()
			rows, err := c.QueryContext(t.Context(), q)
			return drain(rows, err)
		},
		"arguments": func(db *sql.DB, q string) error { _, err := db.Exec(q, 1, 2, 3); return err },
	}
	for name, do := range paths {
		for _, q := range []string{"select 1/0", "select nonsense", "syntax error", "select 1 from generate_series(1,3) n where 1/(2-n) > 0"} {
			want, got := do(plain, q), do(r.DB, q)
			if fmt.Sprintf("%T %v", want, want) != fmt.Sprintf("%T %v", got, got) {
				t.Errorf("%s %q: %T %v, plain pgx %T %v", name, q, got, got, want, want)
			}
		}
	}
}

func drain(rows *sql.Rows, err error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
	}
	return rows.Err()
}

// A context's own error is exactly that where it ended the call.
func TestContextErrorsAreExact(t *testing.T) {
	r := newRig(t, setup{})
	short := func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(t.Context(), 20*time.Millisecond)
	}
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.BeginTx(dead, nil); err != context.Canceled { //nolint:errorlint // exact is the point
		t.Errorf("dead on arrival: %T %v", err, err)
	}
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	ctx, cancel := short()
	if _, err := r.BeginTx(ctx, nil); err != context.DeadlineExceeded { //nolint:errorlint // exact is the point
		t.Errorf("in the queue: %T %v", err, err)
	}
	cancel()
	p.Release()
	ctx, cancel = short()
	_, err = r.ExecContext(ctx, "select pg_sleep(60)")
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pgxgated.ErrRejected) {
		t.Errorf("in a statement: %T %v", err, err)
	}
	cancel()
	r.idle()

	// The pool is dry while a permit is free.
	var out []interface{ Release() }
	for range 2 {
		c, err := r.pool.Acquire(t.Context())
		must(t, err)
		out = append(out, c)
	}
	ctx, cancel = short()
	if _, err := r.BeginTx(ctx, nil); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pgxgated.ErrPoolTimeout) {
		t.Errorf("waiting for a connection: %T %v", err, err)
	}
	cancel()
	for _, c := range out {
		c.Release()
	}
}
