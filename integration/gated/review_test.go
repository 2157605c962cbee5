package gated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// overStdlib is a gated database with B=1 over a *sql.DB of pgx's own driver, and that.
func overStdlib(t *testing.T, dsn string, inner *sql.DB, opts ...pgxgated.Option) *rig {
	t.Helper()
	r := &rig{t: t, dsn: dsn, see: newTruth(t, dsn), log: &logs{}}
	var err error
	r.DB, err = pgxgated.OpenDB(inner, append([]pgxgated.Option{
		pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 100, MaxWait: bound}),
		pgxgated.WithLogger(slog.New(slog.NewTextHandler(r.log, nil))),
	}, opts...)...)
	must(t, err)
	r.gate = pgxgated.GateOf(r.DB)
	t.Cleanup(func() {
		r.idle()
		if n := inner.Stats().InUse; n != 0 {
			t.Errorf("%d connections are out", n)
		}
		if err := errors.Join(r.Close(), inner.Close()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// A connection that the *sql.DB made earlier, and that died before it was first used through the gate, costs nothing: over a
// pgxpool it never did.
func TestConnectionThatDiedBeforeItsFirstUseCostsNothingOverSQLDB(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	inner, err := sql.Open("pgx", dsn)
	must(t, err)
	inner.SetMaxOpenConns(3)
	inner.SetMaxIdleConns(3)
	r := overStdlib(t, dsn, inner)
	for name, use := range map[string]func() error{
		"Exec": func() error { _, err := r.Exec("select 1"); return err },
		"Begin": func() error {
			tx, err := r.Begin()
			if err != nil {
				return err
			}
			return tx.Rollback()
		},
		"Ping": r.Ping,
	} {
		inner.SetMaxIdleConns(-1) // none that the gate knows
		inner.SetMaxIdleConns(3)
		var conns []*sql.Conn
		var backends []backend
		for range 3 {
			c, err := inner.Conn(t.Context())
			must(t, err)
			conns, backends = append(conns, c), append(backends, backendOf(t, c))
		}
		for _, b := range backends {
			r.see.terminate(b)
		}
		for _, c := range conns {
			must(t, c.Close())
		}
		if err := use(); err != nil {
			t.Errorf("%s: %T %v", name, err, err)
		}
	}
}

// I6: where a wrapper hides the return, a pinned connection gives its permit back at the end of each operation. One that is
// refused since the rows of another are still open does not end that.
func TestHiddenPinnedKeepsItsPermitWhileItsRowsAreOpen(t *testing.T) {
	leakFree(t)
	dsn := pgtest.With(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "2"), "gate_running", "2")
	for name, other := range map[string]func(context.Context, *sql.Conn) error{
		"Exec":  func(ctx context.Context, c *sql.Conn) error { _, err := c.ExecContext(ctx, "select 1"); return err },
		"Query": func(ctx context.Context, c *sql.Conn) error { _, err := c.QueryContext(ctx, "select 1"); return err }, //nolint:rowserrcheck,sqlclosecheck // it fails
		"Prepare": func(ctx context.Context, c *sql.Conn) error {
			_, err := c.PrepareContext(ctx, "select 'new'")
			return err
		}, //nolint:sqlclosecheck // it fails
	} {
		t.Run(name, func(t *testing.T) {
			c, err := pgxgated.NewConnector(dsn)
			must(t, err)
			db := sql.OpenDB(hidingConnector{c})
			defer c.Close()
			defer db.Close()
			sc, err := db.Conn(t.Context())
			must(t, err)
			defer sc.Close()
			rows, err := sc.QueryContext(t.Context(), "select repeat('x', 1000) from generate_series(1, 100000)")
			must(t, err)
			if err := other(t.Context(), sc); err == nil {
				t.Fatal("two at once on one connection")
			}
			if n := c.Gate().Stats().Running; n != 1 {
				t.Errorf("running %d while rows are open, want 1", n)
			}
			must(t, rows.Close())
			if n := c.Gate().Stats().Running; n != 0 {
				t.Errorf("running %d after the rows, want 0", n)
			}
		})
	}
}

// What the pool's BeforeConnect gives out may change, as passwords do that are tokens. The verifier must follow.
func TestProofOverSQLDBWithChangingCredentials(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec("create role role_a login password 'x'; create role role_b login password 'x'")
	t.Cleanup(func() { see.Exec("drop role role_a; drop role role_b") })
	var user atomic.Value
	user.Store("role_a")
	cfg, err := pgx.ParseConfig(dsn)
	must(t, err)
	inner := stdlib.OpenDB(*cfg, stdlib.OptionBeforeConnect(func(_ context.Context, c *pgx.ConnConfig) error {
		c.User, c.Password = user.Load().(string), "x"
		return nil
	}))
	inner.SetMaxOpenConns(2)
	r := overStdlib(t, dsn, inner, pgxgated.WithDrainLimit(5*time.Second))
	_, err = r.Exec("select 1")
	must(t, err)
	user.Store("role_b")
	inner.SetMaxIdleConns(-1) // the next connection is another one
	inner.SetMaxIdleConns(2)
	see.Exec("alter role role_a nologin")

	ctx, cancel := context.WithCancel(t.Context())
	p := r.begin(ctx)
	sleeping := later(func() error { _, err := p.tx.ExecContext(ctx, "select pg_sleep(60)"); return err })
	r.see.working(p.b, "pg_sleep(60)")
	cancel()
	if err := <-sleeping; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	p.isGone()
	if n := r.gate.Stats().DrainsUnproven; n != 0 {
		t.Errorf("%d drains unproven", n)
	}
}

// I10: whoever pinned a connection may ask by a ping whether its session, with its locks, is still there. Once it is lost no
// other session may answer.
func TestPingOnAPinnedConnectionThatLostItsSession(t *testing.T) {
	leakFree(t)
	dsn := pgtest.With(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "3"), "gate_running", "2")
	see := newTruth(t, pgtest.Shared(t).DSN())
	for name, wrap := range map[string]func(driver.Connector) driver.Connector{
		"plain":           func(c driver.Connector) driver.Connector { return c },
		"below a wrapper": func(c driver.Connector) driver.Connector { return hidingConnector{c} },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := pgxgated.NewConnector(dsn)
			must(t, err)
			db := sql.OpenDB(wrap(c))
			defer c.Close()
			defer db.Close()
			sc, err := db.Conn(t.Context())
			must(t, err)
			defer sc.Close()
			see.terminate(backendOf(t, sc))
			if _, err := sc.ExecContext(t.Context(), "select 1"); err == nil {
				t.Fatal("the session was not lost")
			}
			err = sc.PingContext(t.Context())
			if err == nil {
				t.Error("another session answered the ping")
			}
			public(t, err)
			must(t, db.PingContext(t.Context()))
		})
	}
}

// A log that goes to the database it is about must not make the driver wait for itself.
func TestLogThatGoesToTheSameDatabase(t *testing.T) {
	leakFree(t)
	dsn := pgtest.With(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "4"), "gate_running", "4")
	var db *sql.DB
	var said atomic.Int64
	log := slog.New(handlerFunc(func(r slog.Record) {
		if db != nil {
			said.Add(1)
			if _, err := db.Exec("select 'logged'"); err != nil {
				t.Error(err)
			}
		}
	}))
	c, err := pgxgated.NewConnector(dsn, pgxgated.WithLogger(log))
	must(t, err)
	db = sql.OpenDB(hidingConnector{c})
	defer c.Close()
	defer db.Close()
	// Two idle logical connections that were used: the second is taken for the log.
	a, err := db.Query("select 1")
	must(t, err)
	b, err := db.Query("select 1")
	must(t, err)
	must(t, errors.Join(a.Err(), a.Close(), b.Err(), b.Close()))
	_, err = db.Exec("select 1")
	must(t, err)
	if n := said.Load(); n != 1 {
		t.Errorf("logged %d times, want the one warning", n)
	}
}

type handlerFunc func(slog.Record)

func (handlerFunc) Enabled(context.Context, slog.Level) bool        { return true }
func (h handlerFunc) Handle(_ context.Context, r slog.Record) error { h(r); return nil }
func (h handlerFunc) WithAttrs([]slog.Attr) slog.Handler            { return h }
func (h handlerFunc) WithGroup(string) slog.Handler                 { return h }

// F6: where a wrapper hides the return, one *sql.Conn that lost its session must not spoil its logical connection for all who
// get it later, nor keep a permit.
func TestHiddenPinnedThatLostItsSessionIsUsableByOthersLater(t *testing.T) {
	leakFree(t)
	dsn := pgtest.With(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "2"), "gate_running", "2")
	see := newTruth(t, pgtest.Shared(t).DSN())
	for name, lose := range map[string]func(context.Context, *sql.Conn) error{
		"in a statement": func(ctx context.Context, sc *sql.Conn) error {
			_, err := sc.ExecContext(ctx, "select pg_sleep(60)")
			return err
		},
		"inside Raw": func(ctx context.Context, sc *sql.Conn) error {
			return sc.Raw(func(dc any) error {
				pc, err := pgxgated.PgxConn(ctx, dc)
				if err != nil {
					return err
				}
				_, err = pc.Exec(ctx, "select pg_sleep(60)")
				return err
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := pgxgated.NewConnector(dsn)
			must(t, err)
			db := sql.OpenDB(unwrappingConnector{c})
			defer c.Close()
			defer db.Close()
			sc, err := db.Conn(t.Context())
			must(t, err)
			b := backendOf(t, sc)
			ctx, cancel := context.WithCancel(t.Context())
			err2 := later(func() error { return lose(ctx, sc) })
			see.working(b, "pg_sleep(60)")
			cancel()
			if err := <-err2; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			eventually(t, "the server is done with it", func() error {
				if see.there(b) {
					return errors.New("still there")
				}
				return nil
			})
			must(t, sc.Close())
			told := 0
			for range 10 {
				sc, err := db.Conn(t.Context())
				must(t, err)
				if _, err := sc.ExecContext(t.Context(), "select 1"); err != nil {
					told++
				}
				must(t, sc.Close())
			}
			if told > 1 {
				t.Errorf("%d others were told that the connection is lost, want at most 1", told)
			}
			eventually(t, "the permit is back", func() error {
				if s := c.Gate().Stats(); s.Running != 0 {
					return errors.New("running")
				}
				return nil
			})
		})
	}
}

// unwrappingConnector hides what hidingConnector does, but lets PgxConn through.
type unwrappingConnector struct{ driver.Connector }

func (c unwrappingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	dc, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &unwrapping{hide(dc).(*hiding), dc}, nil
}

type unwrapping struct {
	*hiding
	inner driver.Conn
}

func (u *unwrapping) Raw() driver.Conn { return u.inner }
