package gated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func (r *rig) running(n int) {
	r.t.Helper()
	if s := r.gate.Stats(); s.Running != n {
		r.t.Errorf("running %d, want %d", s.Running, n)
	}
}

func TestAutocommitHoldsItsPermitUntilItsRowsAreClosed(t *testing.T) {
	r := newRig(t, setup{})
	r.running(0)
	rows, err := r.Query("select generate_series(1, 3)")
	must(t, err)
	r.running(1)
	if !rows.Next() {
		t.Fatal(rows.Err())
	}
	r.running(1)
	must(t, rows.Close())
	r.running(0)

	rows, err = r.Query("select generate_series(1, 3)")
	must(t, err)
	n := 0
	for rows.Next() {
		n++
	}
	r.running(0) // the end of the rows closes them
	if must(t, rows.Err()); n != 3 {
		t.Errorf("%d rows, want 3", n)
	}
	var v int
	must(t, r.QueryRow("select 42").Scan(&v))
	r.running(0)
	if v != 42 {
		t.Errorf("%d, want 42", v)
	}
	_, err = r.Exec("select 1/0")
	bare(t, err, "22012")
	err = r.QueryRow("select 1/0").Scan(&v)
	bare(t, err, "22012")
	r.running(0)
	if n := r.pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d physical connections were made for work done one after another, want 1", n)
	}
}

func TestRowsAffected(t *testing.T) {
	r := newRig(t, setup{dsn: pgtest.Shared(t).Database(t)})
	affected := func(want int64) func(sql.Result, error) {
		return func(res sql.Result, err error) {
			t.Helper()
			must(t, err)
			if n, err := res.RowsAffected(); err != nil || n != want {
				t.Errorf("RowsAffected %d, %v; want %d", n, err, want)
			}
			if _, err := res.LastInsertId(); err == nil {
				t.Error("LastInsertId gave no error")
			}
		}
	}
	affected(0)(r.Exec("create table t (n int)"))
	affected(3)(r.Exec("insert into t select generate_series(1, 3)"))
	affected(2)(r.Exec("update t set n = n + 1 where n > $1", 1))
	tx, err := r.Begin()
	must(t, err)
	affected(1)(tx.Exec("delete from t where n = 1"))
	st, err := tx.Prepare("delete from t where n = $1")
	must(t, err)
	affected(1)(st.Exec(3))
	must(t, tx.Commit())
	affected(1)(r.Exec("delete from t"))
}

// F18: the Result of one caller must not wait for the place in the queue of whoever has its logical connection now.
func TestRowsAffectedNeverWaitsForAnothersPlaceInTheQueue(t *testing.T) {
	r := newRig(t, setup{})
	res, err := r.Exec("select 1")
	must(t, err)
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	waiter := later(func() error { _, err := r.ExecContext(ctx, "select 1"); return err })
	eventually(t, "somebody waits", func() error {
		if r.gate.Stats().Waiting != 1 {
			return errors.New("nobody")
		}
		return nil
	})
	asked := later(func() error { _, err := res.RowsAffected(); return err })
	// With the gate never opening, an answer can only come from a Result that does not wait for it.
	select {
	case err := <-asked:
		must(t, err)
		r.holds(1, 1)
		cancel()
		<-waiter
	case err := <-waiter:
		t.Fatalf("the waiter came back: %v", err)
	case <-time.After(bound):
		cancel()
		t.Error("RowsAffected waited for the gate")
		<-waiter
		<-asked
	}
	p.Release()
}

func (r *rig) holds(running, waiting int) {
	r.t.Helper()
	if s := r.gate.Stats(); s.Running != running || s.Waiting != waiting {
		r.t.Errorf("running %d, waiting %d; want %d, %d", s.Running, s.Waiting, running, waiting)
	}
}

func TestPreparedOnDB(t *testing.T) {
	r := newRig(t, setup{b: 4, p: 4})
	st, err := r.Prepare("select $1::int + 1")
	must(t, err)
	defer st.Close()
	r.running(0)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 20 {
				var n int
				if err := st.QueryRow(i).Scan(&n); err != nil || n != i+1 {
					t.Errorf("%d, %v; want %d", n, err, i+1)
				}
			}
		})
	}
	wg.Wait()
	if _, err := st.Query(); err == nil || !strings.Contains(err.Error(), "expected 1 arguments, got 0") {
		t.Errorf("a missing argument: %v", err)
	}
	// pgx itself wraps what it gets when it prepares.
	if _, err = r.Prepare("select nonsense"); !isPrepareError(err) {
		t.Errorf("error %T %v, want a bare *pgconn.PrepareError as of plain pgx", err, err)
	}
	must(t, st.Close())
	// What stays prepared is pgx's own cache: one per connection and text.
	for range 4 {
		var n int
		must(t, r.QueryRow("select count(*) from pg_prepared_statements where statement = 'select $1::int + 1'").Scan(&n))
		if n > 1 {
			t.Errorf("the text is prepared %d times on one connection", n)
		}
	}
}

func isPrepareError(err error) bool {
	_, ok := err.(*pgconn.PrepareError) //nolint:errorlint // unwrapped is the point (I9)
	return ok
}

func TestPreparedOnTxAndConnRunOnTheirBackend(t *testing.T) {
	r := newRig(t, setup{b: 2, p: 4})
	st, err := r.Prepare("select pg_backend_pid() + 0 * $1::int")
	must(t, err)
	defer st.Close()
	pid := func(s *sql.Stmt) (n int) {
		t.Helper()
		must(t, s.QueryRow(1).Scan(&n))
		return n
	}
	other, err := r.Begin() // takes the connection that the statement was prepared on
	must(t, err)
	tx, err := r.Begin()
	must(t, err)
	mine := backendOf(t, tx).pid
	own, err := tx.Prepare("select pg_backend_pid() + $1::int * 0")
	must(t, err)
	if pid(tx.Stmt(st)) != mine || pid(own) != mine {
		t.Error("a statement of a transaction ran on another backend")
	}
	must(t, tx.Rollback())
	must(t, other.Rollback())

	c, err := r.Conn(t.Context())
	must(t, err)
	cs, err := c.PrepareContext(t.Context(), "select pg_backend_pid() - $1::int * 0")
	must(t, err)
	mine = backendOf(t, c).pid
	for range 3 {
		if pid(cs) != mine {
			t.Error("a statement of a connection ran on another backend")
		}
	}
	must(t, cs.Close())
	must(t, c.Close())
	r.running(0)
}

// sqlc with prepared queries (D06): each statement runs on its transaction's backend, and preparing never needs a second
// connection.
func TestD06TxStmtWithOnePermitAndOneConnection(t *testing.T) {
	r := newRig(t, setup{b: 1, p: 1})
	const text = "select pg_backend_pid() + 0 * $1::int"
	st, err := r.Prepare(text)
	must(t, err)
	defer st.Close()
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), bound)
			defer cancel()
			tx, err := r.BeginTx(ctx, nil)
			if err != nil {
				t.Errorf("BeginTx: %v", err)
				return
			}
			defer tx.Rollback()
			b := backendOf(t, tx)
			var n int
			if err := tx.StmtContext(ctx, st).QueryRowContext(ctx, i).Scan(&n); err != nil || n != b.pid {
				t.Errorf("ran on %d, %v; want %d", n, err, b.pid)
			}
			if err := tx.Commit(); err != nil {
				t.Errorf("Commit: %v", err)
			}
		})
	}
	wg.Wait()
	var n int
	must(t, r.QueryRow("select count(*) from pg_prepared_statements where statement = $1", text).Scan(&n))
	if n > 1 {
		t.Errorf("the text is prepared %d times", n)
	}
}

// D03: session state stays with a pinned connection, which holds one permit from its first statement to its Close.
func TestD03PinnedConnHasOnePermitAndOneBackend(t *testing.T) {
	for _, scope := range []pgxgated.Scope{pgxgated.ScopeAll, pgxgated.ScopeTx} {
		t.Run(string(scope), func(t *testing.T) {
			r := newRig(t, setup{b: 1, p: 2, opts: []pgxgated.Option{pgxgated.WithScope(scope)}})
			all := map[bool]int{true: 1, false: 0}[scope == pgxgated.ScopeAll]
			c, err := r.Conn(t.Context())
			must(t, err)
			r.running(0)
			b := backendOf(t, c)
			r.running(all)
			do := func(q queryExecer, query string) {
				t.Helper()
				_, err := q.ExecContext(t.Context(), query)
				must(t, err)
				if got := backendOf(t, q); got != b {
					t.Errorf("%s ran on another backend", query)
				}
			}
			do(c, "select pg_advisory_lock(7)")
			do(c, "create temp table kept (n int)")
			for range 10 {
				do(c, "insert into kept values (1)")
			}
			r.running(all)
			for range 2 { // the second one uses the lease that the first one took
				tx, err := c.BeginTx(t.Context(), nil)
				must(t, err)
				r.running(1)
				do(tx, "insert into kept values (2)")
				must(t, tx.Commit())
				r.running(1)
			}
			if got := r.pool.Stat().AcquiredConns(); got != 1 {
				t.Errorf("%d physical connections out, want 1", got)
			}
			var unlocked bool
			var n int
			must(t, c.QueryRowContext(t.Context(), "select pg_advisory_unlock(7), (select count(*) from kept)").Scan(&unlocked, &n))
			if !unlocked || n != 12 {
				t.Errorf("unlocked %v, %d rows; want true, 12", unlocked, n)
			}
			_, err = c.ExecContext(t.Context(), "drop table kept")
			must(t, err)
			must(t, c.Close())
			r.running(0)
			if !r.see.there(b) {
				t.Error("a connection that came back healthy was destroyed")
			}
			want := uint64(1)
			if got := r.gate.Stats().Acquired; got != want {
				t.Errorf("%d permits were taken, want %d", got, want)
			}
		})
	}
}

type queryExecer interface {
	queryer
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

func TestScopeTxLeavesAutocommitStatementsUngated(t *testing.T) {
	r := newRig(t, setup{b: 1, p: 4, limits: &pgxgated.Limits{Running: 1}, opts: []pgxgated.Option{pgxgated.WithScope(pgxgated.ScopeTx)}})
	tx, err := r.Begin()
	must(t, err)
	var n int
	must(t, r.QueryRow("select 1").Scan(&n))
	if _, err := r.Begin(); !errors.Is(err, pgxgated.ErrAdmissionFull) {
		t.Errorf("second transaction: %v, want ErrAdmissionFull", err)
	}
	must(t, tx.Commit())
}

func TestRawAndPgxConn(t *testing.T) {
	r := newRig(t, setup{dsn: pgtest.Shared(t).Database(t)})
	c, err := r.Conn(t.Context())
	must(t, err)
	must(t, c.Raw(func(dc any) error {
		r.running(0) // Raw alone takes nothing (F12)
		pc, err := pgxgated.PgxConn(t.Context(), dc)
		if err != nil {
			return err
		}
		r.running(1)
		if _, err := pc.Exec(t.Context(), "create table t (n int)"); err != nil {
			return err
		}
		n, err := pc.CopyFrom(t.Context(), pgx.Identifier{"t"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}}))
		if err == nil && n != 2 {
			t.Errorf("%d rows copied, want 2", n)
		}
		return err
	}))
	var n int
	must(t, c.QueryRowContext(t.Context(), "select count(*) from t").Scan(&n))
	r.running(1)
	must(t, c.Close())
	r.running(0)
	if n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
	if made := r.pool.Stat().NewConnsCount(); made != 1 {
		t.Errorf("%d physical connections made, want 1: a healthy one was destroyed", made)
	}

	if _, err := pgxgated.PgxConn(t.Context(), struct{}{}); err == nil || !strings.Contains(err.Error(), "struct {}") {
		t.Errorf("PgxConn of something else: %v", err)
	}
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	c, err = r.Conn(t.Context())
	must(t, err)
	err = c.Raw(func(dc any) error {
		_, err := pgxgated.PgxConn(pgxgated.WithMaxWait(t.Context(), 0), dc)
		return err
	})
	if !errors.Is(err, pgxgated.ErrWaitTimeout) {
		t.Errorf("PgxConn under a full gate: %v, want ErrWaitTimeout", err)
	}
	must(t, c.Close())
	p.Release()
}

// A callback of Raw that panics, or says that the connection is bad, loses the connection and nothing else.
func TestRawThatPanicsOrSaysBadConnection(t *testing.T) {
	for _, how := range []string{"panic", "bad connection"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t, setup{})
			c, err := r.Conn(t.Context())
			must(t, err)
			b := backendOf(t, c)
			func() {
				defer func() { _ = recover() }()
				err = c.Raw(func(dc any) error {
					if _, err := pgxgated.PgxConn(t.Context(), dc); err != nil {
						return err
					}
					if how == "panic" {
						panic("user code")
					}
					return driver.ErrBadConn
				})
			}()
			_ = c.Close() // sql.ErrConnDone, or nil
			r.released(func() {
				if r.see.there(b) {
					t.Error("I6: the permit came back while the backend was there")
				}
			})
		})
	}
}

func TestPingNeedsNoPermit(t *testing.T) {
	r := newRig(t, setup{limits: &pgxgated.Limits{Running: 1}})
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	if _, err := r.Exec("select 1"); !errors.Is(err, pgxgated.ErrAdmissionFull) {
		t.Errorf("the gate is not full: %v", err)
	}
	must(t, r.Ping())
	p.Release()
	if got := r.gate.Stats().Acquired; got != 1 {
		t.Errorf("%d permits taken, want 1: Ping took one", got)
	}

	// On connections that died while idle.
	tx, err := r.Begin()
	must(t, err)
	b := backendOf(t, tx)
	must(t, tx.Commit())
	r.see.terminate(b)
	must(t, r.Ping())

	// On a pinned connection: its own.
	c, err := r.Conn(t.Context())
	must(t, err)
	must(t, c.PingContext(t.Context()))
	r.running(0)
	b = backendOf(t, c)
	must(t, c.PingContext(t.Context()))
	if backendOf(t, c) != b {
		t.Error("another backend after Ping")
	}
	r.see.terminate(b)
	if err := c.PingContext(t.Context()); err == nil {
		t.Error("Ping on a session that is gone gave no error")
	} else {
		public(t, err)
	}
	_ = c.Close()
}

// idleBackends makes n idle connections in the pool and returns them.
func (r *rig) idleBackends(n int) (bs []backend) {
	r.t.Helper()
	var txs []*sql.Tx
	for range n {
		tx, err := r.Begin()
		must(r.t, err)
		bs = append(bs, backendOf(r.t, tx))
		txs = append(txs, tx)
	}
	for _, tx := range txs {
		must(r.t, tx.Rollback())
	}
	r.idle()
	return bs
}

// A connection that died while idle costs the user nothing, at BEGIN and in front of a statement, with or without
// pgxpool's own liveness check, which only looks at connections that were idle for a second.
func TestConnectionsThatDiedWhileIdleCostNothing(t *testing.T) {
	r := newRig(t, setup{b: 4, p: 4})
	for round := range 10 {
		for _, b := range r.idleBackends(4) {
			r.see.terminate(b)
		}
		before := r.gate.Stats().Acquired
		tx, err := r.Begin()
		if err != nil {
			t.Fatalf("round %d: BEGIN on a connection that died while idle: %v", round, err)
		}
		var n int
		must(t, tx.QueryRow("select 1").Scan(&n))
		must(t, tx.Commit())
		if got := r.gate.Stats().Acquired - before; got != 1 {
			t.Errorf("%d permits taken, want 1: through the gate again", got)
		}
	}
}

func TestServerRestartBetweenUsesCostsNothing(t *testing.T) {
	s := pgtest.New(t)
	r := newRig(t, setup{dsn: s.DSN(), b: 4, p: 4})
	r.idleBackends(4)
	must(t, s.Restart(t.Context()))
	tx, err := r.Begin()
	must(t, err)
	must(t, tx.Commit())

	// While it is down: an error, not a hang, and nothing is kept.
	r.idleBackends(2)
	must(t, s.Stop(t.Context(), pgtest.Fast))
	_, err = r.Begin()
	if err == nil {
		t.Error("BEGIN without a server gave no error")
	}
	public(t, err)
	_, err = r.Exec("select 1")
	if err == nil {
		t.Error("a statement without a server gave no error")
	}
	public(t, err)
	r.idle()
	must(t, s.Restart(t.Context()))
	var n int
	must(t, r.QueryRow("select 1").Scan(&n))
}

// A server that stops under work: the permits of what it did come back.
func TestServerStopsUnderWork(t *testing.T) {
	for _, how := range []string{"fast", "kill"} {
		t.Run(how, func(t *testing.T) {
			s := pgtest.New(t)
			r := newRig(t, setup{dsn: s.DSN(), b: 2, p: 3})
			p := r.begin(t.Context())
			err := later(func() error { _, err := p.tx.Exec("select pg_sleep(60)"); return err })
			r.see.working(p.b, "pg_sleep(60)")
			if how == "fast" {
				must(t, s.Stop(t.Context(), pgtest.Fast))
			} else {
				must(t, s.Kill())
			}
			if e := <-err; e == nil {
				t.Error("no error")
			} else {
				public(t, e)
			}
			public(t, p.tx.Rollback())
			must(t, s.Restart(t.Context()))
			r.idle() // proven gone, once the server answers
			if n := r.gate.Stats().DrainsUnproven; n != 0 {
				t.Errorf("%d unproven", n)
			}
		})
	}
}

func TestCloseWithWorkOut(t *testing.T) {
	r := newRig(t, setup{opts: []pgxgated.Option{}})
	tx, err := r.Begin()
	must(t, err)
	waiter := later(func() error { _, err := r.Exec("select 1"); return err })
	eventually(t, "somebody waits", func() error {
		if r.gate.Stats().Waiting != 1 {
			return errors.New("nobody")
		}
		return nil
	})
	must(t, r.Close())
	if err := <-waiter; !errors.Is(err, pgxgated.ErrClosed) {
		t.Errorf("the waiter got %v, want ErrClosed", err)
	}
	r.running(1)
	var n int
	must(t, tx.QueryRow("select 1").Scan(&n))
	must(t, tx.Commit())
	r.running(0)
	if _, err := r.Begin(); err == nil {
		t.Error("BEGIN on a closed database gave no error")
	}
	// The pool was handed in and stays open.
	must(t, r.pool.Ping(t.Context()))
}

// open opens by DSN, with the pool that follows from it.
func open(t *testing.T, dsn string) (*sql.DB, *pgxgated.Gate) {
	t.Helper()
	db, err := sql.Open(pgxgated.DriverName, dsn)
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	return db, pgxgated.GateOf(db)
}

// Close of a database that owns its pool closes every session, also that of work which was out (goleak sees the rest).
func TestCloseWithWorkOutOfOwnPool(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	see := newTruth(t, dsn)
	db, g := open(t, pgtest.With(pgtest.With(pgtest.With(dsn, "application_name", "own pool"), "pool_max_conns", "3"), "gate_running", "2"))
	tx, err := db.Begin()
	must(t, err)
	must(t, db.Close())
	var n int
	must(t, tx.QueryRow("select 1").Scan(&n))
	must(t, tx.Rollback())
	idle(t, g, nil)
	eventually(t, "all sessions are closed", func() error {
		if n := see.Int("select count(*) from pg_stat_activity where application_name = 'own pool'"); n != 0 {
			return fmt.Errorf("%d sessions", n)
		}
		return nil
	})
}

// A04: logical connections that database/sql keeps idle hold nothing of the pool.
func TestA04IdleLogicalConnectionsHoldNoPhysicalOne(t *testing.T) {
	r := newRig(t, setup{b: 4, p: 4})
	r.SetMaxIdleConns(50)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			tx, err := r.Begin()
			if err == nil {
				err = tx.Commit()
			}
			if err == nil {
				_, err = r.Exec("select 1")
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.idle()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	for range 4 {
		c, err := r.pool.Acquire(ctx)
		must(t, err)
		defer c.Release()
	}
	// All are out: whatever a logical connection did on the network now could only wait.
	var conns []*sql.Conn
	for range 10 {
		c, err := r.Conn(ctx)
		must(t, err)
		conns = append(conns, c)
	}
	for _, c := range conns {
		must(t, c.Close())
	}
}

// A10: rows that nobody reads or closes keep their permit, visibly, until their context ends.
func TestA10UnreadRows(t *testing.T) {
	r := newRig(t, setup{b: 2, p: 2, limits: &pgxgated.Limits{Running: 2, Waiting: 10, MaxWait: 20 * time.Millisecond}})
	ctx, cancel := context.WithCancel(t.Context())
	for range 2 {
		_ = r.QueryRowContext(ctx, "select generate_series(1, 100000)") // and no Scan
	}
	r.running(2)
	late, stop := context.WithTimeout(t.Context(), bound)
	defer stop()
	if _, err := r.ExecContext(late, "select 1"); !errors.Is(err, pgxgated.ErrWaitTimeout) {
		t.Errorf("third query: %v, want ErrWaitTimeout", err)
	}
	if r.gate.Stats().OldestHold == 0 {
		t.Error("the statistics do not show the hold")
	}
	cancel()
	r.idle()

	tx, err := r.Begin()
	must(t, err)
	rows, err := tx.Query("select generate_series(1, 100000)")
	must(t, err)
	must(t, tx.Rollback())
	r.idle()
	if rows.Next() {
		t.Error("rows outlived their transaction")
	}
	must(t, rows.Close())
}

func TestA10UnreadRowsUnderScopeTxEndInThePoolsWait(t *testing.T) {
	r := newRig(t, setup{b: 2, p: 2, opts: []pgxgated.Option{pgxgated.WithScope(pgxgated.ScopeTx), pgxgated.WithPoolWait(time.Second)}})
	r.idleBackends(2) // connecting may take longer than the pool's wait
	ctx, cancel := context.WithCancel(t.Context())
	for range 2 {
		_ = r.QueryRowContext(ctx, "select generate_series(1, 100000)")
	}
	r.running(0)
	if _, err := r.Exec("select 1"); !errors.Is(err, pgxgated.ErrPoolTimeout) {
		t.Errorf("third query: %v, want ErrPoolTimeout", err)
	}
	cancel()
}

// A08: work that needs a second permit while it holds one is refused within MaxWait, also without a deadline.
func TestA08NestedTransactionIsRefusedInBoundedTime(t *testing.T) {
	r := newRig(t, setup{b: 2, p: 4, limits: &pgxgated.Limits{Running: 2, Waiting: 10, MaxWait: 20 * time.Millisecond}})
	var open, tried, refused sync.WaitGroup
	open.Add(2)
	tried.Add(2)
	for range 2 {
		refused.Go(func() {
			tx, err := r.Begin()
			open.Done()
			open.Wait()
			nested, nestedErr := r.BeginTx(context.Background(), nil)
			tried.Done()
			tried.Wait() // the permit of who was refused first is not for the other
			if !errors.Is(nestedErr, pgxgated.ErrWaitTimeout) {
				t.Errorf("nested: %v, want ErrWaitTimeout", nestedErr)
			}
			if nested != nil {
				_ = nested.Rollback()
			}
			if err != nil {
				t.Error(err)
				return
			}
			if err := tx.Rollback(); err != nil {
				t.Error(err)
			}
		})
	}
	refused.Wait()
}

// Wherever a caller's deadline ends its work, the estimate says that it would have taken longer. Where it did not, a line of
// those that hardly ever succeed was served without an estimate for ever.
func TestWorkThatItsDeadlineEndedTeachesTheEstimate(t *testing.T) {
	const deadline = 200 * time.Millisecond
	const sleep = "select pg_sleep(10)"
	tests := []struct {
		name, kind string
		work       func(ctx context.Context, r *rig) error
	}{
		{"statement", "autocommit", func(ctx context.Context, r *rig) error {
			_, err := r.ExecContext(ctx, sleep)
			return err
		}},
		{"rows", "autocommit", func(ctx context.Context, r *rig) error {
			rows, err := r.QueryContext(ctx, "select repeat('x', 10000), pg_sleep(0.01) from generate_series(1, 1000)")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		}},
		{"transaction", "tx", func(ctx context.Context, r *rig) error {
			_, err := pgxgated.InTx(ctx, r.DB, nil, func(ctx context.Context, tx *sql.Tx) (sql.Result, error) { return tx.ExecContext(ctx, sleep) })
			return err
		}},
		{"statement's own deadline", "tx", func(ctx context.Context, r *rig) error {
			_, err := pgxgated.InTx(context.Background(), r.DB, nil, func(_ context.Context, tx *sql.Tx) (sql.Result, error) { return tx.ExecContext(ctx, sleep) })
			return err
		}},
		{"transaction that is idle", "tx", func(ctx context.Context, r *rig) error {
			_, err := pgxgated.InTx(ctx, r.DB, nil, func(ctx context.Context, _ *sql.Tx) (any, error) { <-ctx.Done(); return nil, ctx.Err() })
			return err
		}},
		{"inside Raw", "tx", func(ctx context.Context, r *rig) error {
			return inTxOnConn(ctx, r.DB, func(c *sql.Conn, _ *sql.Tx) error {
				return c.Raw(func(dc any) error {
					pc, err := pgxgated.PgxConn(ctx, dc)
					if err != nil {
						return err
					}
					_, err = pc.Exec(ctx, sleep)
					return err
				})
			})
		}},
		{"wait for a connection", "tx", func(ctx context.Context, r *rig) error {
			for range r.pool.Config().MaxConns {
				c, err := r.pool.Acquire(context.Background())
				if err != nil {
					return err
				}
				defer c.Release()
			}
			_, err := r.BeginTx(ctx, nil)
			return err
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, setup{opts: []pgxgated.Option{pgxgated.WithDeadlineAdmission(true)}})
			must(t, r.Ping()) // there is a connection
			for range 5 {
				ctx, cancel := context.WithTimeout(context.Background(), deadline)
				if err := test.work(ctx, r); !errors.Is(ctx.Err(), context.DeadlineExceeded) {
					t.Fatalf("before its deadline: %v", err)
				}
				cancel()
				r.idle()
			}
			if got := r.gate.Stats().Estimates[test.kind]; got < deadline/2 || got > 2*deadline {
				t.Errorf("estimates %v, want %s of some %v", r.gate.Stats().Estimates, test.kind, deadline)
			}
		})
	}
}

// Refusals open no connection and are never ErrBadConn (I8).
func TestRefusalOpensNoConnection(t *testing.T) {
	r := newRig(t, setup{limits: &pgxgated.Limits{Running: 1}})
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	before := r.gate.Stats().AdmissionFull
	_, err = r.Begin()
	var e *pgxgated.RejectedError
	if !errors.As(err, &e) || !errors.Is(err, pgxgated.ErrAdmissionFull) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %T %v", err, err)
	}
	public(t, err)
	if got := r.gate.Stats().AdmissionFull - before; got != 1 {
		t.Errorf("asked the gate %d times, want once", got)
	}
	p.Release()
	if n := r.pool.Stat().TotalConns(); n != 0 {
		t.Errorf("%d connections opened by a refusal", n)
	}
}

// hiding is a wrapper that passes on what sqlmw does, and hides the rest: Validator, SessionResetter.
type hiding struct {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.NamedValueChecker
}

func hide(c driver.Conn) driver.Conn {
	return &hiding{c, c.(driver.ConnBeginTx), c.(driver.ConnPrepareContext), c.(driver.ExecerContext), c.(driver.QueryerContext),
		c.(driver.Pinger), c.(driver.NamedValueChecker)}
}

// hidingConnector also hides io.Closer; hidingDriver also DriverContext.
type hidingConnector struct{ driver.Connector }

func (c hidingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	dc, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hide(dc), nil
}

type hidingDriver struct{ d driver.Driver }

func (d hidingDriver) Open(dsn string) (driver.Conn, error) {
	dc, err := d.d.Open(dsn)
	if err != nil {
		return nil, err
	}
	return hide(dc), nil
}

func init() {
	for _, name := range sql.Drivers() {
		if name == pgxgated.DriverName {
			db, _ := sql.Open(name, "")
			sql.Register("hiding", hidingDriver{db.Driver()})
			_ = db.Close()
		}
	}
}

// F6: a wrapper hides when connections come back. Permits must come back all the same.
func TestWrapperThatHidesTheReturn(t *testing.T) {
	for _, by := range []string{"connector", "driver.Open", "connector, no idle connections"} {
		t.Run(by, func(t *testing.T) {
			leakFree(t)
			dsn := pgtest.Shared(t).Database(t)
			see := newTruth(t, dsn)
			dsn = pgtest.With(pgtest.With(pgtest.With(dsn, "pool_max_conns", "3"), "gate_running", "2"), "gate_max_wait", "10s")
			var db *sql.DB
			var g *pgxgated.Gate
			if by == "driver.Open" {
				var err error
				db, err = sql.Open("hiding", dsn)
				must(t, err)
				g = pgxgated.GateOf(db)
			} else {
				c, err := pgxgated.NewConnector(dsn)
				must(t, err)
				db, g = sql.OpenDB(hidingConnector{c}), c.Gate()
			}
			defer db.Close()
			if g == nil {
				t.Fatal("GateOf does not find the gate below the wrapper")
			}
			if strings.Contains(by, "no idle") {
				db.SetMaxIdleConns(0)
			}
			zero := func(what string) {
				t.Helper()
				if s := g.Stats(); s.Running != 0 || s.Waiting != 0 {
					t.Errorf("after %s: running %d, waiting %d", what, s.Running, s.Waiting)
				}
			}
			see.Exec("create table t (n int)")
			_, err := db.Exec("insert into t values (1)")
			must(t, err)
			zero("Exec")
			var n int
			must(t, db.QueryRow("select n from t").Scan(&n))
			zero("QueryRow")
			rows, err := db.Query("select generate_series(1, 3)")
			must(t, err)
			if g.Stats().Running != 1 {
				t.Error("open rows hold no permit")
			}
			types, err := rows.ColumnTypes()
			must(t, err)
			if types[0].DatabaseTypeName() != "INT4" || types[0].ScanType().String() != "int32" {
				t.Errorf("column type %s %v", types[0].DatabaseTypeName(), types[0].ScanType())
			}
			must(t, rows.Close())
			zero("rows")
			tx, err := db.Begin()
			must(t, err)
			if g.Stats().Running != 1 {
				t.Error("a transaction holds no permit")
			}
			_, err = tx.Exec("insert into t values (2)")
			must(t, err)
			must(t, tx.Commit())
			zero("Commit")
			tx, err = db.Begin()
			must(t, err)
			must(t, tx.Rollback())
			zero("Rollback")
			st, err := db.Prepare("select $1::int")
			must(t, err)
			must(t, st.QueryRow(5).Scan(&n))
			must(t, st.Close())
			zero("a statement")
			_, err = db.Exec("select 1/0")
			bare(t, err, "22012")
			zero("an error")
			ctx, cancel := context.WithCancel(t.Context())
			tx, err = db.BeginTx(ctx, nil)
			must(t, err)
			cancel()
			eventually(t, "a cancelled transaction gives its permit back", func() error {
				if s := g.Stats(); s.Running != 0 {
					return fmt.Errorf("running %d", s.Running)
				}
				return nil
			})
			_ = tx.Rollback() // ErrTxDone

			c, err := db.Conn(t.Context())
			must(t, err)
			b := backendOf(t, c)
			_, err = c.ExecContext(t.Context(), "create temp table kept (n int)")
			must(t, err)
			tx, err = c.BeginTx(t.Context(), nil)
			must(t, err)
			_, err = tx.Exec("insert into kept values (1)")
			must(t, err)
			must(t, tx.Commit())
			if got := backendOf(t, c); got != b {
				t.Error("a pinned connection changed its backend")
			}
			_, err = c.ExecContext(t.Context(), "drop table kept")
			must(t, err)
			must(t, c.Close())
			zero("a pinned connection")

			// More goroutines than connections, all the ways at once.
			var wg sync.WaitGroup
			for i := range 12 {
				wg.Go(func() {
					for range 20 {
						var err error
						switch i % 3 {
						case 0:
							_, err = db.Exec("select 1")
						case 1:
							var n int
							err = db.QueryRow("select 1").Scan(&n)
						case 2:
							var tx *sql.Tx
							if tx, err = db.Begin(); err == nil {
								err = tx.Commit()
							}
						}
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			zero("all at once")
			must(t, db.Close())
			eventually(t, "the pool is closed", func() error {
				if n := see.Int("select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"); n != 0 {
					return fmt.Errorf("%d sessions", n)
				}
				return nil
			})
		})
	}
}
