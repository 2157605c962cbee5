package gated

import (
	"context"
	"database/sql"
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
		"Exec":  func() error { _, err := r.Exec("select 1"); return err },
		"Begin": func() error { tx, err := r.Begin(); if err != nil { return err }; return tx.Rollback() },
		"Ping":  r.Ping,
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
		"Exec":    func(ctx context.Context, c *sql.Conn) error { _, err := c.ExecContext(ctx, "select 1"); return err },
		"Query":   func(ctx context.Context, c *sql.Conn) error { _, err := c.QueryContext(ctx, "select 1"); return err }, //nolint:rowserrcheck,sqlclosecheck // it fails
		"Prepare": func(ctx context.Context, c *sql.Conn) error { _, err := c.PrepareContext(ctx, "select 'new'"); return err }, //nolint:sqlclosecheck // it fails
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
	see.exec("create role role_a login password 'x'; create role role_b login password 'x'")
	t.Cleanup(func() { see.exec("drop role role_a; drop role role_b") })
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
	see.exec("alter role role_a nologin")

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
