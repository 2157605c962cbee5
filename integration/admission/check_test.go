package admission

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// checkServer has 30 connections: 3 for superusers, and 2 for pg_use_reserved_connections from PostgreSQL 16 on. Its role "app" may have
// connections like anybody.
func checkServer(t *testing.T) (see *truth, dsn string, allowed int) {
	t.Helper()
	leakFree(t)
	settings := []pgtest.Option{pgtest.Setting("max_connections", "30"), pgtest.Setting("superuser_reserved_connections", "3")}
	allowed = 27
	if pgtest.Shared(t).Version() >= 16 {
		settings = append(settings, pgtest.Setting("reserved_connections", "2"))
		allowed = 25
	}
	s := pgtest.New(t, settings...)
	see = newTruth(t, s.DSN())
	see.Exec("create role app login password 'secret'")
	return see, as(s.DSN(), "app"), allowed
}

// breaks fails the test unless exactly these rules are broken, each told by a part of its text.
func breaks(t *testing.T, err error, rules ...string) {
	t.Helper()
	if len(rules) == 0 {
		if err != nil {
			t.Errorf("broken: %v", err)
		}
		return
	}
	var e *pgxgated.CheckError
	if !errors.As(err, &e) || len(e.Broken) != len(rules) {
		t.Errorf("error %v, want %d broken rules", err, len(rules))
		return
	}
	for i, r := range rules {
		if !strings.Contains(e.Broken[i], r) {
			t.Errorf("rule %d is %q, want %q", i+1, e.Broken[i], r)
		}
	}
	if n := strings.Count(err.Error(), "\n"); len(rules) == 1 && n != 0 || len(rules) > 1 && n != len(rules) {
		t.Errorf("%d lines for %d rules:\n%v", n+1, len(rules), err)
	}
}

func TestCheckEachRule(t *testing.T) {
	see, dsn, allowed := checkServer(t)
	ctx := t.Context()
	limits := pgxgated.Limits{Running: 4, Waiting: 6, MaxWait: time.Second}
	open := func(t *testing.T, dsn string) *rig { return newRig(t, dsn, 5, limits) }

	t.Run("none is broken, to the last connection", func(t *testing.T) {
		r := open(t, dsn)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 4, OtherClients: allowed - 4*6}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 4, OtherClients: allowed - 4*6 + 1}),
			fmt.Sprintf("4 instances × (5 connections + 1 of the verifier) + %d other clients = %d, but the server allows %d (max_connections 30, of which %d are reserved)",
				allowed-4*6+1, allowed+1, allowed, 30-allowed))
	})
	t.Run("running above the pool", func(t *testing.T) {
		r := open(t, dsn)
		must(t, r.gate.SetLimits(pgxgated.Limits{Running: 6, Waiting: 6}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 1}), "running (gate_running) is 6, more than the pool's 5 connections")
	})
	t.Run("SetMaxOpenConns", func(t *testing.T) {
		r := open(t, dsn)
		r.SetMaxOpenConns(10)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 1}))
		r.SetMaxOpenConns(9)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 1}), "SetMaxOpenConns is 9, less than running + waiting = 4 + 6")
	})
	t.Run("the role's limit, of which others are not known to take", func(t *testing.T) {
		see.Exec("alter role app connection limit 12")
		defer see.Exec("alter role app connection limit -1")
		r := open(t, dsn)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 2, OtherClients: 1}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 3}),
			`3 instances × (5 connections + 1 of the verifier) = 18, but the role "app" may have 12`)
	})
	t.Run("the database's limit", func(t *testing.T) {
		see.Exec("alter database postgres connection limit 12")
		defer see.Exec("alter database postgres connection limit -1")
		r := open(t, dsn)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 2, OtherClients: 1}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 3}), `= 18, but the database "postgres" allows 12`)
	})
	t.Run("a superuser has the reserved ones, and no other limit", func(t *testing.T) {
		see.Exec("create role super superuser login connection limit 1 password 'secret'")
		defer see.Exec("drop role super")
		see.Exec("alter database postgres connection limit 1")
		defer see.Exec("alter database postgres connection limit -1")
		r := open(t, as(dsn, "super"))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 5}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 5, OtherClients: 1}),
			"the server allows 30 (max_connections 30, of which 0 are reserved)")
	})
	t.Run("a role that may use reserved connections", func(t *testing.T) {
		if pgtest.Shared(t).Version() < 16 {
			t.Skip("reserved_connections needs PostgreSQL 16")
		}
		see.Exec("grant pg_use_reserved_connections to app")
		defer see.Exec("revoke pg_use_reserved_connections from app")
		r := open(t, dsn)
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 4, OtherClients: 3}))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 4, OtherClients: 4}), "the server allows 27")
	})
	t.Run("SET ROLE changes nothing", func(t *testing.T) {
		see.Exec("create role plain connection limit 0")
		defer see.Exec("drop role plain")
		see.Exec("grant plain to app")
		r := open(t, pgtest.With(dsn, "role", "plain"))
		breaks(t, pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 4}))
	})
	t.Run("all of them in one error", func(t *testing.T) {
		see.Exec("alter role app connection limit 11")
		see.Exec("alter database postgres connection limit 12")
		defer see.Exec("alter role app connection limit -1")
		defer see.Exec("alter database postgres connection limit -1")
		r := open(t, dsn)
		must(t, r.gate.SetLimits(pgxgated.Limits{Running: 6, Waiting: 6}))
		r.SetMaxOpenConns(9)
		err := pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 5, OtherClients: 1})
		breaks(t, err, "gate_running", "SetMaxOpenConns", "the server allows", `the role "app"`, `the database "postgres"`)
		t.Logf("\n%v", err)
	})
}

// Check needs no permit: a service may ask while it is at its limit.
func TestCheckPastTheGate(t *testing.T) {
	r := one(t, pgtest.Shared(t).DSN())
	p, err := r.gate.Acquire(t.Context())
	must(t, err)
	defer p.Release()
	breaks(t, pgxgated.Check(t.Context(), r.DB, pgxgated.Budget{PeakInstances: 1}))
	if s := r.gate.Stats(); s.Bypassed != 1 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
}

// noRule fails the test unless err is an error that is about no rule.
func noRule(t *testing.T, err error, text string) {
	t.Helper()
	var e *pgxgated.CheckError
	if err == nil || errors.As(err, &e) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %T %v, want one with %q that is no *CheckError", err, err, text)
	}
}

func TestCheckErrorsThatAreNoRule(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	plain, err := sql.Open("pgx", dsn)
	must(t, err)
	defer plain.Close()
	noRule(t, pgxgated.Check(t.Context(), plain, pgxgated.Budget{PeakInstances: 1}), "not gated")
	noRule(t, pgxgated.Check(t.Context(), nil, pgxgated.Budget{PeakInstances: 1}), "not gated")

	r := one(t, dsn)
	noRule(t, pgxgated.Check(t.Context(), r.DB, pgxgated.Budget{}), "PeakInstances is 0, want 1")
	noRule(t, pgxgated.Check(t.Context(), r.DB, pgxgated.Budget{PeakInstances: 1, OtherClients: -1}), "OtherClients is -1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = pgxgated.Check(ctx, r.DB, pgxgated.Budget{PeakInstances: 1})
	noRule(t, err, "asking the server")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v hides why", err)
	}

	pool, mock, err := sqlmock.New()
	must(t, err)
	db, err := pgxgated.OpenDB(pool, pgxgated.WithLimits(pgxgated.Limits{Running: 1}))
	must(t, err)
	noRule(t, pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1}), "asking the server")
	mock.ExpectClose()
	must(t, errors.Join(db.Close(), pool.Close()))
	err = pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1})
	noRule(t, err, "closed")
}

// TestCheckOfOtherPools: a *sql.DB may have no bound, and only with pgx a verifier.
func TestCheckOfOtherPools(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	for name, c := range map[string]struct {
		open func() driver.Connector
		each string
	}{
		"pgx": {func() driver.Connector {
			c, err := stdlib.GetDefaultDriver().(driver.DriverContext).OpenConnector(dsn)
			must(t, err)
			return c
		}, "(7 connections + 1 of the verifier)"},
		"lib/pq": {func() driver.Connector {
			c, err := pq.NewConnector(pgtest.With(dsn, "sslmode", "disable"))
			must(t, err)
			return c
		}, "(7 connections)"},
	} {
		t.Run(name, func(t *testing.T) {
			pool := sql.OpenDB(c.open())
			defer pool.Close()
			db, err := pgxgated.OpenDB(pool, pgxgated.WithLimits(pgxgated.Limits{Running: 4, Waiting: 6}))
			must(t, err)
			defer db.Close()
			breaks(t, pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1}), "the pool has no bound")
			pool.SetMaxOpenConns(7)
			breaks(t, pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1}))
			breaks(t, pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1000}), "1000 instances × "+c.each+" ")
		})
	}
}

// plainConn hides everything but what a driver must have, as a wrapper of drivers may.
type plainConn struct {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
	driver.Pinger
}

type plainConnector struct{ c driver.Connector }

func (p plainConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := p.c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return plainConn{c, c.(driver.ConnBeginTx), c.(driver.ExecerContext), c.(driver.QueryerContext), c.(driver.ConnPrepareContext), c.(driver.Pinger)}, nil
}

func (p plainConnector) Driver() driver.Driver { return plainDriver{} }

type plainDriver struct{}

func (plainDriver) Open(string) (driver.Conn, error) { return nil, errors.New("not called") }

func TestCheckBelowAWrapper(t *testing.T) {
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	for _, kv := range [][2]string{{"pool_max_conns", "300"}, {"gate_running", "4"}, {"gate_waiting", "6"}} {
		dsn = pgtest.With(dsn, kv[0], kv[1])
	}
	c, err := pgxgated.NewConnector(dsn)
	must(t, err)
	defer c.Close()
	db := sql.OpenDB(plainConnector{c})
	defer db.Close()
	db.SetMaxOpenConns(9)
	err = pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 1})
	breaks(t, err, "SetMaxOpenConns is 9", "1 instances × (300 connections + 1 of the verifier)")
}
