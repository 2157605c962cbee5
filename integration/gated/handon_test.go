package gated

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// While there is a queue a connection goes from one transaction to the next without its pool. The pool must still see it often
// enough to do what it is for, and one with hooks sees each transaction.
func TestConnectionsAreHandedOn(t *testing.T) {
	for _, c := range []struct {
		name   string
		hooked bool
	}{{"plain", false}, {"with hooks", true}} {
		t.Run(c.name, func(t *testing.T) {
			leakFree(t)
			cfg, err := pgxpool.ParseConfig(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "2"))
			if err != nil {
				t.Fatal(err)
			}
			cfg.MaxConnLifetime = 50 * time.Millisecond
			cfg.MaxConnLifetimeJitter = 0
			var prepared atomic.Int64
			if c.hooked {
				cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					prepared.Add(1)
					return true, nil
				}
			}
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithLimits(pgxgated.Limits{Running: 2, Waiting: 100, MaxWait: time.Minute}))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()

			stop := make(chan struct{})
			var done atomic.Int64
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						tx, err := db.BeginTx(t.Context(), nil)
						if err != nil {
							t.Error(err)
							return
						}
						// One that the transaction before has left something in would tell it here.
						var clean bool
						if err := tx.QueryRow("select pg_catalog.current_setting('my.mark', true) is not distinct from ''" +
							" or pg_catalog.current_setting('my.mark', true) is null").Scan(&clean); err != nil || !clean {
							t.Error("a transaction began on a connection that is in use", err)
						}
						if _, err := tx.Exec("set local my.mark = 'taken'"); err != nil {
							t.Error(err)
						}
						if err := tx.Commit(); err != nil {
							t.Error(err)
						}
						done.Add(1)
					}
				})
			}
			eventually(t, "transactions", func() error { return atLeast(done.Load(), 500) })
			// Both connections are out all the time, and a ping goes past the gate: it gets one.
			for range 10 {
				if err := db.PingContext(t.Context()); err != nil {
					t.Error(err)
				}
			}
			eventually(t, "connections that are too old to be replaced", func() error { return atLeast(pool.Stat().MaxLifetimeDestroyCount(), 4) })
			close(stop)
			wg.Wait()
			acquires, n := pool.Stat().AcquireCount(), done.Load()
			switch {
			case c.hooked && prepared.Load() < n:
				t.Errorf("%d transactions, and the hook was called %d times", n, prepared.Load())
			case !c.hooked && acquires >= n: // how many fewer is a matter of how many fit into the time for which one is handed on
				t.Errorf("%d transactions acquired %d times: connections were not handed on", n, acquires)
			}
			t.Logf("%d transactions, %d acquisitions, %d connections", n, acquires, pool.Stat().NewConnsCount())
			idle(t, pgxgated.GateOf(db), pool)
		})
	}
}

func atLeast(got, want int64) error {
	if got < want {
		return fmt.Errorf("%d, want %d", got, want)
	}
	return nil
}
