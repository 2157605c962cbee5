package contract

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgxgated/pgxgated"
)

const (
	whatHolds = "What holds a permit"
	overflow  = "Admission"
)

var admission = []condition{
	{17, overflow, "", "What finds running + waiting inside is refused at once: ErrAdmissionFull, ErrRejected, no context's error", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, waiting: 1})
		tx := g.begin()
		waiter := later(func() error { return commitOne(g) })
		g.gauges(1, 1)
		_, err := g.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull, pgxgated.ErrRejected)
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, pgxgated.ErrWaitTimeout) {
			e.Errorf("matches too much: %v", err)
		}
		e.must(tx.Rollback())
		e.must(soon(e, waiter))
		if n := g.gate.Stats().AdmissionFull; n != 1 {
			e.Errorf("counted %d times: database/sql tried it again", n)
		}
	}},
	{18, overflow, "F04", "A refusal takes no physical connection and sends nothing", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: -1})
		tx := g.begin()
		before := g.pool.Stat()
		for range 100 {
			_, err := g.BeginTx(e.Context(), nil)
			e.is(err, pgxgated.ErrRejected)
			_, err = g.ExecContext(e.Context(), "select 1")
			e.is(err, pgxgated.ErrRejected)
		}
		after := g.pool.Stat()
		if a, b := before.AcquireCount(), after.AcquireCount(); a != b {
			e.Errorf("%d acquisitions", b-a)
		}
		e.must(tx.Rollback())
	}},
	{19, overflow, "", "A refusal says in which gate and against which limits, and when to come again", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, waiting: -1, opts: []pgxgated.Option{pgxgated.WithGateName("contract " + e.see.name())}})
		tx := g.begin()
		_, err := g.BeginTx(e.Context(), nil)
		var r *pgxgated.RejectedError
		if !errors.As(err, &r) {
			e.Fatalf("%T %v", err, err)
		}
		if r.Gate != g.gate.Name() || r.Limits.Running != 1 || r.Running != 1 || r.Waiting != 0 || r.Reason != pgxgated.ErrAdmissionFull {
			e.Errorf("%+v", r)
		}
		if d := r.RetryAfter(); d < time.Millisecond || d > 30*time.Second {
			e.Errorf("RetryAfter %v", d)
		}
		e.must(tx.Rollback())
	}},
	{20, overflow, "", "With no place to wait nobody waits, and a free permit is still had", func(e *env) {
		g := e.openWith(setup{b: 2, p: 2, waiting: -1})
		txs := g.fill(2)
		_, err := g.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		e.must(txs[0].Rollback())
		txs[0] = g.begin()
		for _, tx := range txs {
			e.must(tx.Rollback())
		}
	}},
	{21, overflow, "", "Permits are granted first come, first served", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		var mu sync.Mutex
		var order []int
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				tx, err := g.BeginTx(e.Context(), nil)
				if err != nil {
					e.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				if err := tx.Rollback(); err != nil {
					e.Error(err)
				}
			})
			g.gauges(1, i+1)
		}
		e.must(tx.Rollback())
		all.Wait()
		if !slices.IsSorted(order) || len(order) != 20 {
			e.Errorf("order %v", order)
		}
	}},
	{22, overflow, "", "Never more than the limit runs, whatever the callers do", func(e *env) {
		g := e.open(3, 8)
		e.see.Exec("create table most (n int); insert into most values (0)")
		var all sync.WaitGroup
		for range 24 {
			all.Go(func() {
				for range 10 {
					tx, err := g.BeginTx(e.Context(), nil)
					if err != nil {
						e.Error(err)
						return
					}
					var n int // transactions of this database that are open, this one included
					err = tx.QueryRow("select count(*) from pg_stat_activity where datname = current_database() and xact_start is not null and backend_type = 'client backend'").Scan(&n)
					if err != nil || n > 3 {
						e.Errorf("%d at work, %v", n, err)
					}
					if err := tx.Rollback(); err != nil {
						e.Error(err)
					}
				}
			})
		}
		all.Wait()
	}},
	{23, overflow, "B07", "A deadline that leaves less time than such work takes is ErrDeadlineShort, and not context.DeadlineExceeded", func(e *env) {
		g := e.open(1, 2, pgxgated.WithDeadlineAdmission(true))
		for range 16 {
			tx := g.begin()
			e.exec(tx, "select pg_sleep(0.05)")
			e.must(tx.Commit())
		}
		tx := g.begin()
		ctx, cancel := context.WithTimeout(e.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := g.BeginTx(ctx, nil)
		e.is(err, pgxgated.ErrDeadlineShort, pgxgated.ErrRejected)
		if errors.Is(err, context.DeadlineExceeded) {
			e.Error("nothing has run out yet")
		}
		e.must(tx.Rollback())
	}},
	{24, overflow, "", "A workload at its limit holds up nobody else, and an unknown one is an error", func(e *env) {
		g := e.open(2, 2, pgxgated.WithWorkloads(map[string]pgxgated.Limits{"batch": {Running: 1, Waiting: 1}}))
		batch := pgxgated.WithWorkload(e.Context(), "batch")
		one, err := g.BeginTx(batch, nil)
		e.must(err)
		ctx, cancel := context.WithCancel(batch)
		waiter := later(func() error { _, err := g.BeginTx(ctx, nil); return err })
		g.gauges(1, 1)
		other := g.begin() // a free permit, past who waits for the workload's
		_, err = g.BeginTx(batch, nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		_, err = g.BeginTx(pgxgated.WithWorkload(e.Context(), ""), nil)
		e.is(err, pgxgated.ErrUnknownWorkload)
		cancel()
		e.is(soon(e, waiter), context.Canceled)
		e.must(one.Rollback())
		e.must(other.Rollback())
	}},
	{25, whatHolds, "", "A statement outside a transaction holds a permit for the length of the call", func(e *env) {
		g := e.open(1, 1)
		got := later(func() error { _, err := g.ExecContext(e.Context(), "select pg_sleep(0.3)"); return err })
		g.gauges(1, 0)
		_, err := g.ExecContext(pgxgated.WithMaxWait(e.Context(), 0), "select 1")
		e.is(err, pgxgated.ErrWaitTimeout)
		e.must(soon(e, got))
		g.runs(0)
	}},
	{26, whatHolds, "", "A query holds a permit until its rows are closed or read to the end", func(e *env) {
		g := e.open(1, 1)
		rows, err := g.QueryContext(e.Context(), "select 1")
		e.must(err)
		g.runs(1)
		e.must(rows.Close())
		g.runs(0)
		rows, err = g.QueryContext(e.Context(), "select 1")
		e.must(err)
		for rows.Next() {
			g.runs(1)
		}
		g.runs(0)
		e.must(rows.Err())
	}},
	{27, whatHolds, "", "A *sql.Conn holds nothing until its first statement, and from then one permit until it is closed", func(e *env) {
		g := e.open(1, 1)
		c := g.conn()
		g.runs(0)
		e.exec(c, "select 1")
		g.runs(1)
		e.exec(c, "select 1")
		g.runs(1)
		e.must(c.Close())
		g.runs(0)
	}},
	{28, whatHolds, "", "Ping is answered while everything is taken, and takes no permit", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: -1})
		tx := g.begin()
		e.must(g.PingContext(e.Context()))
		if s := g.gate.Stats(); s.Acquired != 1 || s.AdmissionFull != 0 {
			e.Errorf("%+v", s)
		}
		e.must(tx.Rollback())
	}},
	{29, whatHolds, "", "Bypass goes past a full gate, is counted, and gives its connection back", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: -1})
		tx := g.begin()
		_, err := g.ExecContext(pgxgated.Bypass(e.Context()), "select 1")
		e.must(err)
		if s := g.gate.Stats(); s.Bypassed != 1 || s.Running != 1 || g.pool.Stat().AcquiredConns() != 1 {
			e.Errorf("%+v, %d connections out", s, g.pool.Stat().AcquiredConns())
		}
		e.must(tx.Rollback())
	}},
	{30, whatHolds, "", "With gate_scope=tx statements go straight to the pool and transactions hold permits", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: -1, opts: []pgxgated.Option{pgxgated.WithScope(pgxgated.ScopeTx)}})
		tx := g.begin()
		e.exec(g, "select 1")
		c := g.conn()
		e.exec(c, "select 1")
		_, err := c.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		e.must(tx.Rollback())
		inside, err := c.BeginTx(e.Context(), nil)
		e.must(err)
		g.runs(1)
		e.must(inside.Rollback())
		e.must(c.Close())
	}},
	{31, whatHolds, "", "Work outside database/sql shares the budget through Acquire, and a second Release does nothing", func(e *env) {
		g := e.open(2, 2)
		p, err := g.gate.Acquire(e.Context())
		e.must(err)
		tx := g.begin()
		_, err = g.gate.Acquire(pgxgated.WithMaxWait(e.Context(), 0))
		e.is(err, pgxgated.ErrWaitTimeout)
		p.Release()
		p.Release()
		g.runs(1)
		e.must(tx.Rollback())
		g.whole(2)
	}},
	{32, "Observe mode", "", "Observe mode refuses nothing and counts what would have been refused, by reason", func(e *env) {
		g := e.openWith(setup{b: 1, p: 4, waiting: 1, maxWait: 2 * time.Second, opts: []pgxgated.Option{pgxgated.WithMode(pgxgated.Observe)}})
		txs := g.fill(4) // one runs, one waits, two find it full
		e.eventually("the one that waits gives up", func() error {
			if r := g.gate.Stats().WouldReject; r["admission_full"] != 2 || r["wait_timeout"] != 1 {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
		if s := g.gate.Stats(); s.AdmissionFull+s.WaitTimeout != 0 || s.Acquired != 4 {
			e.Errorf("%+v", s)
		}
		for _, tx := range txs {
			e.must(tx.Rollback())
		}
	}},
}

func commitOne(g *gated) error {
	tx, err := g.BeginTx(context.Background(), nil)
	if err != nil {
		return err
	}
	return tx.Commit()
}

const waiting = "Waiting"

var waits = []condition{
	{33, waiting, "B07", "A wait that ends by MaxWait is ErrWaitTimeout, not the context's error, and leaves nothing behind", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, maxWait: 20 * time.Millisecond})
		tx := g.begin()
		_, err := g.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrWaitTimeout, pgxgated.ErrRejected)
		if errors.Is(err, context.DeadlineExceeded) {
			e.Errorf("matches the context's error: %v", err)
		}
		var r *pgxgated.RejectedError
		if !errors.As(err, &r) || r.Waited < 20*time.Millisecond {
			e.Errorf("%+v", r)
		}
		g.gauges(1, 0)
		e.must(tx.Rollback())
	}},
	{34, waiting, "B07", "A wait that ends by the caller's deadline is context.DeadlineExceeded, not a refusal", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		ctx, cancel := context.WithTimeout(e.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := g.BeginTx(ctx, nil)
		e.is(err, context.DeadlineExceeded)
		e.ended(err)
		g.gauges(1, 0)
		e.must(tx.Rollback())
	}},
	{35, waiting, "", "WithMaxWait bounds the wait of one call", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		_, err := g.BeginTx(pgxgated.WithMaxWait(e.Context(), 10*time.Millisecond), nil)
		e.is(err, pgxgated.ErrWaitTimeout)
		e.must(tx.Rollback())
	}},
	{36, waiting, "A02", "A context that was done before the call gets no permit though one is free", func(e *env) {
		g := e.open(1, 1)
		c := g.conn()
		ctx, cancel := context.WithCancel(e.Context())
		cancel()
		_, err := c.BeginTx(ctx, nil)
		e.is(err, context.Canceled)
		_, err = c.ExecContext(ctx, "select 1")
		e.is(err, context.Canceled)
		if s := g.gate.Stats(); s.Acquired != 0 || g.pool.Stat().AcquireCount() != 0 {
			e.Errorf("%d permits, %d connections were taken", s.Acquired, g.pool.Stat().AcquireCount())
		}
		e.must(c.Close())
	}},
	{37, waiting, "", "A waiter that is cancelled returns at once with its context's error and frees its place", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: 1})
		tx := g.begin()
		for range 20 {
			ctx, cancel := context.WithCancel(e.Context())
			waiter := later(func() error { _, err := g.BeginTx(ctx, nil); return err })
			g.gauges(1, 1)
			cancel()
			e.is(soon(e, waiter), context.Canceled)
			g.gauges(1, 0)
		}
		e.must(tx.Rollback())
	}},
	{38, waiting, "", "A caller that is cancelled after the grant, while it waits for a connection, gives its permit back", func(e *env) {
		g := e.open(1, 1)
		taken, err := g.pool.Acquire(e.Context())
		e.must(err)
		ctx, cancel := context.WithCancel(e.Context())
		got := later(func() error { _, err := g.BeginTx(ctx, nil); return err })
		g.gauges(1, 0)
		cancel()
		e.is(soon(e, got), context.Canceled)
		g.runs(0)
		taken.Release()
		g.whole(1)
	}},
	{39, waiting, "", "A grant that races with a cancellation is never lost", func(e *env) {
		g := e.open(1, 2)
		for i := range 300 {
			p, err := g.gate.Acquire(e.Context())
			e.must(err)
			ctx, cancel := context.WithCancel(e.Context())
			got := later(func() error {
				tx, err := g.BeginTx(ctx, nil)
				if err == nil {
					_ = tx.Rollback() // or database/sql has done so
				}
				return err
			})
			g.gauges(1, 1)
			go cancel()
			if i%2 == 0 {
				time.Sleep(time.Microsecond) // another order of the two
			}
			p.Release()
			if err := soon(e, got); err != nil {
				e.is(err, context.Canceled)
			}
		}
		g.whole(1)
	}},
	{40, waiting, "A02", "A hundred waiters that gave up get no permit, and who comes next is served at once", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(e.Context(), time.Duration(10+i/2)*time.Millisecond)
				defer cancel()
				if _, err := g.BeginTx(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
					e.Errorf("%v", err)
				}
			})
		}
		all.Wait()
		e.must(tx.Rollback())
		g.runs(0)
		next, err := g.BeginTx(pgxgated.WithMaxWait(e.Context(), 0), nil)
		e.must(err)
		e.must(next.Rollback())
	}},
	{41, waiting, "A02", "A dead head of the queue does not block who stands behind it", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		ctx, cancel := context.WithCancel(e.Context())
		head := later(func() error { _, err := g.BeginTx(ctx, nil); return err })
		g.gauges(1, 1)
		second := later(func() error { return commitOne(g) })
		g.gauges(1, 2)
		cancel()
		e.is(soon(e, head), context.Canceled)
		e.must(tx.Rollback())
		e.must(soon(e, second))
	}},
	{42, waiting, "B07", "Full, waited too long, dead on arrival, pool exhausted, and the server's own timeout are told apart", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, waiting: -1, opts: []pgxgated.Option{pgxgated.WithPoolWait(500 * time.Millisecond)}})
		all := []error{pgxgated.ErrAdmissionFull, pgxgated.ErrWaitTimeout, pgxgated.ErrPoolTimeout, context.Canceled, context.DeadlineExceeded}
		only := func(err, want error) {
			for _, other := range all {
				if errors.Is(err, other) != (other == want) {
					e.Errorf("%v, want only %v", err, want)
				}
			}
			e.public(err)
		}
		begin := func(ctx context.Context) error {
			tx, err := g.BeginTx(ctx, nil)
			if err == nil {
				_ = tx.Rollback()
			}
			return err
		}
		dead, cancel := context.WithCancel(e.Context())
		cancel()
		only(begin(dead), context.Canceled)
		tx := g.begin()
		only(begin(e.Context()), pgxgated.ErrAdmissionFull)
		e.must(g.gate.SetLimits(pgxgated.Limits{Running: 1, Waiting: 1, MaxWait: 10 * time.Millisecond}))
		only(begin(e.Context()), pgxgated.ErrWaitTimeout)
		e.must(tx.Rollback())
		taken, err := g.pool.Acquire(e.Context())
		e.must(err)
		only(begin(e.Context()), pgxgated.ErrPoolTimeout)
		taken.Release()
		_, err = g.ExecContext(e.Context(), "set statement_timeout = 20")
		e.must(err)
		_, err = g.ExecContext(e.Context(), "select pg_sleep(10)")
		e.bare(err, "57014")
		only(err, nil)
	}},
}
