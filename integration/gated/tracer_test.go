package gated

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// panickyTracer panics when a query that the test names ends.
type panickyTracer struct{}

type panicKey struct{}

func (panickyTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, panicKey{}, d.SQL)
}

func (panickyTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(panicKey{}) == "select 'panic'" {
		panic("tracer")
	}
}

// A tracer that panics while rows are closed reaches neither IsValid nor Close (F17): the permit comes back all the same.
func TestTracerThatPanicsAtTheEndOfRowsCostsNoPermit(t *testing.T) {
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "2"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.Tracer = panickyTracer{}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 1, MaxWait: 5e9}))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec("select 1"); err != nil { // from here on hooks tell of returns
		t.Fatal(err)
	}
	for range 5 {
		func() {
			defer func() {
				if recover() != "tracer" {
					t.Error("the panic did not reach the caller unchanged")
				}
			}()
			var s string
			_ = db.QueryRow("select 'panic'").Scan(&s)
		}()
		if _, err := db.Exec("select 1"); errors.Is(err, pgxgated.ErrRejected) {
			t.Fatal("the permit was lost: ", err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "everything is back", func() error {
		if s := pgxgated.GateOf(db).Stats(); s.Running != 0 || s.Draining != 0 || pool.Stat().AcquiredConns() != 0 {
			return fmt.Errorf("running %d, draining %d, connections out %d", s.Running, s.Draining, pool.Stat().AcquiredConns())
		}
		return nil
	})
}
