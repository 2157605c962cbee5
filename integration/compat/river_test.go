package compat

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverdatabasesql"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libRiver = "river, `riverdatabasesql`"

type riverArgs struct {
	N int `json:"n"`
}

func (riverArgs) Kind() string { return "compat" }

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	done chan int
}

func (w *riverWorker) Work(_ context.Context, job *river.Job[riverArgs]) error {
	w.done <- job.Args.N
	return nil
}

// C10: migrations, inserts inside a caller's transaction, and fifty jobs on two permits; polling, and with a listener on a
// pool of its own.
func TestC10River(t *testing.T) {
	for name, listens := range map[string]bool{"polling": false, "with a listener pool": true} {
		t.Run(name, func(t *testing.T) {
			works(t, libRiver, "50 jobs by 10 workers on two permits, "+name, "")
			cell(t, libRiver, colGateOf)
			cell(t, libRiver, colClose)
			cell(t, libRiver, colPermits)
			ctx := t.Context()
			dsn := pgtest.Shared(t).Database(t)
			db := must(sql.Open(pgxgated.DriverName, set(dsn, "pool_max_conns", "3", "gate_running", "2", "gate_waiting", "40", "gate_max_wait", "10s")))(t)
			defer db.Close()
			g := pgxgated.GateOf(db)
			o := observe(t, dsn)
			driver := riverdatabasesql.New(db)
			if listens {
				pool := must(pgxpool.New(ctx, dsn))(t)
				defer pool.Close()
				driver = riverdatabasesql.NewWithPgxListener(db, pool)
			}
			if driver.SupportsListener() != listens {
				t.Error("polling is not detected")
			}
			m := must(rivermigrate.New(driver, &rivermigrate.Config{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}))(t)
			if _, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
				t.Fatal(err)
			}
			idle(t, g)

			w := &riverWorker{done: make(chan int, 50)}
			workers := river.NewWorkers()
			river.AddWorker(workers, w)
			c := must(river.NewClient(driver, &river.Config{
				Logger:            slog.New(slog.NewTextHandler(io.Discard, nil)),
				Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}},
				Workers:           workers,
				FetchPollInterval: 100 * time.Millisecond,
			}))(t)

			// Before it starts nothing else takes permits: fifty inserts in one transaction are one.
			before := g.Stats().Acquired
			tx := must(db.BeginTx(ctx, nil))(t)
			for i := range 50 {
				if _, err := c.InsertTx(ctx, tx, riverArgs{i}, nil); err != nil {
					t.Fatal(err)
				}
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			if n := g.Stats().Acquired - before; n != 1 {
				t.Errorf("%d permits for a transaction with 50 inserts", n)
			}
			if err := c.Start(ctx); err != nil {
				t.Fatal(err)
			}
			seen := make(map[int]bool)
			for range 50 {
				select {
				case n := <-w.done:
					seen[n] = true
				case <-time.After(patience):
					t.Fatalf("%d of 50 jobs done", len(seen))
				}
			}
			if len(seen) != 50 {
				t.Errorf("%d different jobs", len(seen))
			}
			await(t, "a leader", func() bool { return ask[int](t, dsn, "select count(*) from river_leader") == 1 })
			await(t, "all completed", func() bool {
				return ask[int](t, dsn, "select count(*) from river_job where state = 'completed'") == 50
			})
			if err := c.Stop(ctx); err != nil {
				t.Error(err)
			}
			idle(t, g)
			if s := g.Stats(); s.AdmissionFull+s.WaitTimeout+s.DeadlineShort != 0 {
				t.Errorf("refused: %+v", s)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			if !listens {
				o.until("sessions after Close", func() bool { return o.sessions("") == 0 })
			}
		})
	}
}

func TestRiverRefusalAndCancel(t *testing.T) {
	cell(t, libRiver, colRefusal)
	cell(t, libRiver, colCancel)
	dsn := pgtest.Shared(t).Database(t)
	db := must(sql.Open(pgxgated.DriverName, set(dsn, tight...)))(t)
	defer db.Close()
	g := pgxgated.GateOf(db)
	driver := riverdatabasesql.New(db)
	if _, err := must(rivermigrate.New(driver, nil))(t).Migrate(t.Context(), rivermigrate.DirectionUp, nil); err != nil {
		t.Fatal(err)
	}
	c := must(river.NewClient(driver, &river.Config{}))(t)
	p := must(g.Acquire(t.Context()))(t)
	if _, err := c.Insert(t.Context(), riverArgs{1}, nil); !errors.Is(err, pgxgated.ErrRejected) {
		t.Errorf("%v (%T)", err, err)
	}
	p.Release()

	// An insert that waits for a lock until its caller gives up.
	blocker := must(db.Conn(pgxgated.Bypass(t.Context())))(t)
	defer blocker.Close()
	if _, err := blocker.ExecContext(pgxgated.Bypass(t.Context()), "begin; lock table river_job"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := c.Insert(ctx, riverArgs{2}, nil); done <- err }()
	o := observe(t, dsn)
	o.until("the insert waits", func() bool { return o.sessions("wait_event_type = 'Lock'") == 1 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v (%T)", err, err)
	}
	idle(t, g)
	if _, err := blocker.ExecContext(pgxgated.Bypass(t.Context()), "rollback"); err != nil {
		t.Error(err)
	}
	blocker.Close()
	if n := ask[int](t, dsn, "select count(*) from river_job"); n != 0 {
		t.Errorf("%d jobs", n)
	}
	o.quiet()
}
