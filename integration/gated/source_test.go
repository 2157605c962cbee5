package gated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/ngrok/sqlmw"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// spy is an interceptor that notes what it saw, and panics where it is told to.
type spy struct {
	sqlmw.NullInterceptor
	mu     sync.Mutex
	saw    []string
	panics string
}

func withSpy(s *spy) []pgxgated.Option { return []pgxgated.Option{pgxgated.WithInterceptors(s)} }

func (s *spy) note(ctx context.Context, what string) {
	s.mu.Lock()
	alive := ""
	if ctx != nil && ctx.Err() != nil {
		alive = " on a dead context"
	}
	s.saw = append(s.saw, what+alive)
	must := s.panics == what
	s.mu.Unlock()
	if must {
		panic("interceptor: " + what)
	}
}

func (s *spy) take() (saw []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	saw, s.saw = s.saw, nil
	return saw
}

func (s *spy) set(panics string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.panics = panics
}

func (s *spy) ConnBeginTx(ctx context.Context, c driver.ConnBeginTx, o driver.TxOptions) (context.Context, driver.Tx, error) {
	s.note(ctx, "begin")
	tx, err := c.BeginTx(ctx, o)
	return ctx, tx, err
}

func (s *spy) ConnExecContext(ctx context.Context, c driver.ExecerContext, q string, args []driver.NamedValue) (driver.Result, error) {
	s.note(ctx, "exec")
	return c.ExecContext(ctx, q, args)
}

func (s *spy) ConnQueryContext(ctx context.Context, c driver.QueryerContext, q string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	s.note(ctx, "query")
	rows, err := c.QueryContext(ctx, q, args)
	return ctx, rows, err
}

func (s *spy) ConnPrepareContext(ctx context.Context, c driver.ConnPrepareContext, q string) (context.Context, driver.Stmt, error) {
	s.note(ctx, "prepare")
	st, err := c.PrepareContext(ctx, q)
	return ctx, st, err
}

func (s *spy) RowsClose(ctx context.Context, rows driver.Rows) error {
	s.note(ctx, "rows close")
	return rows.Close()
}

func (s *spy) TxCommit(ctx context.Context, tx driver.Tx) error {
	s.note(ctx, "commit")
	return tx.Commit()
}

func (s *spy) TxRollback(ctx context.Context, tx driver.Tx) error {
	s.note(ctx, "rollback")
	return tx.Rollback()
}

func TestInterceptorsSeeEverythingAndALiveContextAtTheEnd(t *testing.T) {
	s := &spy{}
	r := newRig(t, setup{opts: withSpy(s)})
	saw := func(want string) {
		t.Helper()
		if got := strings.Join(s.take(), ", "); got != want {
			t.Errorf("the interceptor saw %q, want %q", got, want)
		}
	}
	tx, err := r.Begin()
	must(t, err)
	_, err = tx.Exec("select 1")
	must(t, err)
	var n int
	must(t, tx.QueryRow("select 1").Scan(&n))
	must(t, tx.Commit())
	saw("begin, exec, query, rows close, commit")

	ctx, cancel := context.WithCancel(t.Context())
	tx, err = r.BeginTx(ctx, nil)
	must(t, err)
	cancel()
	r.idle()
	saw("begin, rollback")
	_ = tx.Rollback() // ErrTxDone

	st, err := r.Prepare("select 2")
	must(t, err)
	must(t, st.QueryRow().Scan(&n))
	must(t, st.Close())
	saw("prepare, query, rows close")
}

// A06: an interceptor that panics costs the connection, never a permit, and the caller gets its panic.
func TestA06InterceptorPanics(t *testing.T) {
	ops := map[string]func(r *rig) error{
		"begin": func(r *rig) error { _, err := r.Begin(); return err },
		"exec":  func(r *rig) error { _, err := r.Exec("select 1"); return err },
		"query": func(r *rig) error { return drain(r.Query("select 1")) },
		"prepare": func(r *rig) error {
			_, err := r.Prepare(fmt.Sprintf("select %d", time.Now().UnixNano()))
			return err
		},
		"rows close": func(r *rig) error { return drain(r.Query("select 1")) },
		"commit": func(r *rig) error {
			tx, err := r.Begin()
			if err != nil {
				return err
			}
			return tx.Commit()
		},
		"rollback": func(r *rig) error {
			tx, err := r.Begin()
			if err != nil {
				return err
			}
			return tx.Rollback()
		},
	}
	for at, do := range ops {
		t.Run(at, func(t *testing.T) {
			s := &spy{}
			r := newRig(t, setup{b: 2, p: 2, opts: withSpy(s)})
			first := r.idleBackends(1)[0]
			for range 3 {
				s.set(at)
				var got any
				func() {
					defer func() { got = recover() }()
					err := do(r)
					t.Errorf("no panic, error %v", err)
				}()
				if got != "interceptor: "+at {
					t.Errorf("the caller got %v", got)
				}
				s.set("")
				r.idle()
				if r.see.there(first) {
					t.Error("a connection in an unknown state was kept")
				}
				first = r.idleBackends(1)[0]
			}
			r.idleBackends(2) // the whole limit is to be had
		})
	}
}

// D05: as with plain pgxpool session state stays, and a hook of the pool can clear it: once per hand-back, not while the
// caller waits, and whoever fails it loses the connection.
func TestD05AfterReleaseRunsOncePerHandBack(t *testing.T) {
	var runs atomic.Int64
	var healthy atomic.Bool
	healthy.Store(true)
	r := newRig(t, setup{p: 1, pool: func(c *pgxpool.Config) {
		c.AfterRelease = func(conn *pgx.Conn) bool {
			runs.Add(1)
			// DISCARD ALL alone would leave pgx with a cache of statements that are no more.
			err := conn.DeallocateAll(context.Background())
			if err == nil {
				_, err = conn.PgConn().Exec(context.Background(), "discard all").ReadAll()
			}
			return err == nil && healthy.Load()
		}
	}})
	n := int64(0)
	handedBack := func(what string) {
		t.Helper()
		n++
		r.idle()
		eventually(t, "the hook has run after "+what, func() error {
			if got := runs.Load(); got != n {
				return fmt.Errorf("%d times, want %d", got, n)
			}
			return nil
		})
	}
	var v string
	for range 3 {
		must(t, r.QueryRow("select current_setting('statement_timeout')").Scan(&v))
		handedBack("QueryRow")
	}
	c, err := r.Conn(t.Context())
	must(t, err)
	b := backendOf(t, c)
	for _, q := range []string{"set statement_timeout = '77s'", "set search_path = pg_catalog", "listen something"} {
		_, err = c.ExecContext(t.Context(), q)
		must(t, err)
	}
	must(t, c.Close())
	handedBack("a pinned connection")
	tx, err := r.Begin()
	must(t, err)
	if got := backendOf(t, tx); got != b {
		t.Error("another backend: the hook has nothing to show")
	}
	must(t, tx.QueryRow("select current_setting('statement_timeout') || (select count(*) from pg_listening_channels())").Scan(&v))
	if v != "00" {
		t.Errorf("session state %q survived the hook", v)
	}
	must(t, tx.Commit())
	handedBack("a transaction")
	_, err = r.Exec("select 1/0")
	bare(t, err, "22012")
	handedBack("an error")

	healthy.Store(false)
	_, err = r.Exec("select 1")
	must(t, err)
	handedBack("the failing hook")
	eventually(t, "the connection is destroyed", func() error {
		if r.see.there(b) {
			return errors.New("still there")
		}
		return nil
	})
	healthy.Store(true)
}

// Without a hook session state stays with the session, as documented of pgxpool.
func TestD05SessionStateStaysWithTheSession(t *testing.T) {
	r := newRig(t, setup{p: 1})
	c, err := r.Conn(t.Context())
	must(t, err)
	_, err = c.ExecContext(t.Context(), "set statement_timeout = '77s'")
	must(t, err)
	must(t, c.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(t.Context(), dc)
		if err != nil {
			return err
		}
		if _, err := pc.Exec(t.Context(), "listen something"); err != nil {
			return err
		}
		return nil
	}))
	must(t, c.Close())
	var timeout string
	must(t, r.QueryRow("select current_setting('statement_timeout')").Scan(&timeout))
	if timeout != "77s" {
		t.Errorf("statement_timeout %s, want that of the session", timeout)
	}
}

// A wait for a notification that is cancelled inside Raw.
func TestD05CancelledWaitForNotification(t *testing.T) {
	r := newRig(t, setup{p: 1})
	c, err := r.Conn(t.Context())
	must(t, err)
	b := backendOf(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = c.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(t.Context(), dc)
		if err != nil {
			return err
		}
		if _, err := pc.Exec(t.Context(), "listen something"); err != nil {
			return err
		}
		_, err = pc.WaitForNotification(ctx)
		return err
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitForNotification: %v", err)
	}
	must(t, c.Close())
	r.idle()
	// pgx keeps that connection: it is idle, and so it is the next one's, as with plain pgxpool.
	tx, err := r.Begin()
	must(t, err)
	if got := backendOf(t, tx); got != b {
		t.Logf("destroyed: %v, then %v", b, got)
	}
	var n int
	must(t, tx.QueryRow("select 1").Scan(&n))
	must(t, tx.Commit())
}

func TestTwoGatesOverOnePool(t *testing.T) {
	r := newRig(t, setup{b: 2, p: 4, opts: []pgxgated.Option{pgxgated.WithGateName("first of two")}})
	second, err := pgxgated.OpenDBFromPool(r.pool, pgxgated.WithGateName("second of two"), pgxgated.WithLimits(pgxgated.Limits{Running: 1}))
	must(t, err)
	g := pgxgated.GateOf(second)
	var n int
	for range 3 {
		a, err := r.Begin()
		must(t, err)
		b, err := second.Begin()
		must(t, err)
		r.running(1)
		if s := g.Stats(); s.Running != 1 {
			t.Errorf("second gate: running %d, want 1", s.Running)
		}
		if _, err := second.Begin(); !errors.Is(err, pgxgated.ErrAdmissionFull) {
			t.Errorf("%v, want ErrAdmissionFull of the second gate", err)
		}
		must(t, b.QueryRow("select 1").Scan(&n))
		must(t, b.Commit())
		must(t, a.Commit())
	}
	idle(t, g, nil)
	must(t, second.Close())
	must(t, r.QueryRow("select 1").Scan(&n)) // the pool is not the second one's to close
	if made := r.pool.Stat().NewConnsCount(); made > 2 {
		t.Errorf("%d connections made for two at a time", made)
	}
}

func TestWithOwnPoolClosesWhatItWasHanded(t *testing.T) {
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprintf("pgxpool %v", own), func(t *testing.T) {
			leakFree(t)
			pool, err := pgxpool.New(t.Context(), pgtest.Shared(t).DSN())
			must(t, err)
			defer pool.Close()
			var opts []pgxgated.Option
			if own {
				opts = append(opts, pgxgated.WithOwnPool())
			}
			db, err := pgxgated.OpenDBFromPool(pool, opts...)
			must(t, err)
			must(t, db.Ping())
			must(t, db.Close())
			if !own {
				must(t, pool.Ping(t.Context()))
				return
			}
			eventually(t, "the pool is closed", func() error {
				ctx, cancel := context.WithTimeout(t.Context(), bound)
				defer cancel()
				if err := pool.Ping(ctx); err == nil {
					return errors.New("still open")
				}
				return nil
			})
		})
		t.Run(fmt.Sprintf("sql.DB %v", own), func(t *testing.T) {
			leakFree(t)
			inner, err := sql.Open("pgx", pgtest.Shared(t).DSN())
			must(t, err)
			defer inner.Close()
			inner.SetMaxOpenConns(2)
			var opts []pgxgated.Option
			if own {
				opts = append(opts, pgxgated.WithOwnPool())
			}
			db, err := pgxgated.OpenDB(inner, opts...)
			must(t, err)
			must(t, db.Ping())
			must(t, db.Close())
			if err := inner.Ping(); (err != nil) != own {
				t.Errorf("inner pool after Close: %v", err)
			}
		})
	}
}

func TestTwoDatabasesHaveTheirOwnGatesAndPools(t *testing.T) {
	leakFree(t)
	s := pgtest.Shared(t)
	limits := func(dsn string) string {
		return pgtest.With(pgtest.With(pgtest.With(dsn, "gate_running", "1"), "gate_waiting", "0"), "pool_max_conns", "2")
	}
	a, ga := open(t, limits(s.Database(t)))
	b, gb := open(t, limits(s.Database(t)))
	if ga == gb {
		t.Fatal("two databases share a gate")
	}
	txA, err := a.Begin()
	must(t, err)
	txB, err := b.Begin()
	must(t, err)
	var nameA, nameB string
	must(t, txA.QueryRow("select current_database()").Scan(&nameA))
	must(t, txB.QueryRow("select current_database()").Scan(&nameB))
	if nameA == nameB {
		t.Errorf("both are in %s", nameA)
	}
	must(t, txA.Commit())
	must(t, txB.Commit())
	idle(t, ga, nil)
	idle(t, gb, nil)
	must(t, a.Close())
	must(t, b.Close())
}

// The same DSN opened per request, as careless services do, shares one budget.
func TestTheSameDSNSharesOneGate(t *testing.T) {
	leakFree(t)
	dsn := pgtest.With(pgtest.With(pgtest.Shared(t).Database(t), "gate_running", "1"), "gate_waiting", "0")
	a, ga := open(t, dsn)
	b, gb := open(t, dsn)
	if ga != gb {
		t.Fatal("two gates for one DSN")
	}
	tx, err := a.Begin()
	must(t, err)
	if _, err := b.Begin(); !errors.Is(err, pgxgated.ErrAdmissionFull) {
		t.Errorf("second open of the DSN: %v, want ErrAdmissionFull", err)
	}
	must(t, tx.Commit())
	idle(t, ga, nil)
	must(t, a.Close())
	_, err = b.Exec("select 1") // the gate lives with its last user
	must(t, err)
	must(t, b.Close())
}
