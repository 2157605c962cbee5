package contract

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
)

const (
	unread    = "Unread rows"
	forgotten = "Forgotten Rollback"
)

var rowsAndForgotten = []condition{
	{82, unread, "A10", "A QueryRow without Scan holds its permit, who comes next is refused in bounded time, and a cancellation gives it back", func(e *env) {
		g := e.openWith(setup{b: 2, p: 2, maxWait: 50 * time.Millisecond})
		var cancels []context.CancelFunc
		for range 2 {
			ctx, cancel := context.WithCancel(e.Context())
			cancels = append(cancels, cancel)
			_ = g.QueryRowContext(ctx, "select 1")
		}
		g.runs(2)
		_, err := g.ExecContext(e.Context(), "select 1")
		e.is(err, pgxgated.ErrWaitTimeout)
		for _, cancel := range cancels {
			cancel()
		}
		g.whole(2)
	}},
	{83, unread, "A10", "Rollback and Commit with rows open give connection and permit back", func(e *env) {
		g := e.open(1, 1)
		for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
			tx := g.begin()
			rows, err := tx.Query("select repeat('x', 1000) from generate_series(1, 5000)")
			e.must(err)
			defer rows.Close()
			if !rows.Next() {
				e.Errorf("no row: %v", rows.Err())
			}
			e.public(end(tx))
			g.idle()
		}
		g.whole(1)
	}},
	{84, unread, "", "Rows closed early leave the connection fit for use", func(e *env) {
		g := e.open(1, 1)
		pid := e.pid(g)
		for range 20 {
			rows, err := g.Query("select i from generate_series(1, 5000) i")
			e.must(err)
			rows.Next()
			e.must(rows.Close())
			g.runs(0)
		}
		if e.pid(g) != pid {
			e.Error("the connection was not kept")
		}
	}},
	{85, unread, "", "An error of the server in the middle of rows arrives as it is in Err, and the permit is back without Close", func(e *env) {
		g := e.open(1, 1)
		rows, err := g.Query("select 1/(3000-i) from generate_series(1, 5000) i")
		e.must(err)
		n := 0
		for rows.Next() {
			n++
		}
		e.bare(rows.Err(), "22012")
		g.runs(0)
		if n == 0 {
			e.Error("no row before it")
		}
		e.must(rows.Close())
		g.whole(1)
	}},
	{86, unread, "", "A Scan that fails gives everything back when the rows are closed", func(e *env) {
		g := e.open(1, 1)
		var n int
		if err := g.QueryRow("select 'x'").Scan(&n); err == nil {
			e.Error("no error")
		}
		if err := g.QueryRow("select 1 where false").Scan(&n); !errors.Is(err, sql.ErrNoRows) {
			e.Errorf("%v", err)
		}
		g.runs(0)
	}},
	{87, forgotten, "A05", "A forgotten Rollback is reported once with the stack that began it, stays held, and its return is told", func(e *env) {
		g := e.open(1, 1, pgxgated.WithLeakThreshold(50*time.Millisecond))
		ctx, cancel := context.WithCancel(e.Context())
		forget(g, ctx)
		const report, back = "held longer than gate_leak_threshold", "overdue lease returned"
		e.eventually("it is reported", func() error {
			if g.log.count(report) == 0 {
				return errors.New("it is not")
			}
			return nil
		})
		g.runs(1)
		if !strings.Contains(g.log.String(), "contract.forget") {
			e.Error("the stack does not show who began it")
		}
		cancel()
		g.idle()
		e.eventually("its return is told", func() error {
			if g.log.count(back) != 1 || g.log.count(report) != 1 {
				return fmt.Errorf("%d reports, %d returns", g.log.count(report), g.log.count(back))
			}
			return nil
		})
	}},
	{88, forgotten, "A05", "A forgotten Rollback with a context that can be cancelled gives everything back when it is", func(e *env) {
		g := e.open(2, 2)
		var cancels []context.CancelFunc
		for range 2 {
			ctx, cancel := context.WithCancel(e.Context())
			cancels = append(cancels, cancel)
			forget(g, ctx)
		}
		g.runs(2)
		for _, cancel := range cancels {
			cancel()
		}
		g.whole(2)
		if n := g.pool.Stat().NewConnsCount(); n > 2 {
			e.Errorf("%d connections were made", n)
		}
	}},
}

// forget begins a transaction and forgets it.
func forget(g *gated, ctx context.Context) {
	tx, err := g.BeginTx(ctx, nil)
	g.e.must(err)
	g.e.exec(tx, "select 1")
}

const pinnedConns = "Pinned connections and session state"

var pinned = []condition{
	{89, pinnedConns, "D03", "Ten statements and two transactions on a *sql.Conn run on one backend, under one permit", func(e *env) {
		g := e.open(1, 2)
		c := g.conn()
		pid := e.pid(c)
		for range 10 {
			if e.pid(c) != pid {
				e.Error("another backend")
			}
		}
		for range 2 {
			tx, err := c.BeginTx(e.Context(), nil)
			e.must(err)
			if e.pid(tx) != pid {
				e.Error("another backend")
			}
			g.runs(1)
			e.must(tx.Commit())
			g.runs(1)
		}
		e.must(c.Close())
		g.runs(0)
	}},
	{90, pinnedConns, "D03", "A session advisory lock is taken and released on the same backend", func(e *env) {
		g := e.open(2, 2)
		c := g.conn()
		e.exec(c, "select pg_advisory_lock(7)")
		other := g.conn()
		if scan[bool](e, other, "select pg_try_advisory_lock(7)") {
			e.Error("taken twice")
		}
		if !scan[bool](e, c, "select pg_advisory_unlock(7)") {
			e.Error("unlocked on another backend")
		}
		e.must(c.Close())
		e.must(other.Close())
	}},
	{91, pinnedConns, "D03", "A temporary table lives across two transactions of a *sql.Conn", func(e *env) {
		g := e.open(1, 2)
		c := g.conn()
		e.exec(c, "create temp table mine (id int)")
		for range 2 {
			tx, err := c.BeginTx(e.Context(), nil)
			e.must(err)
			e.exec(tx, "insert into mine values (1)")
			e.must(tx.Commit())
		}
		if n := scan[int](e, c, "select count(*) from mine"); n != 2 {
			e.Errorf("%d rows", n)
		}
		e.must(c.Close())
	}},
	{92, pinnedConns, "D05", "Session state stays on the physical connection, as with plain pgxpool, unless the pool's AfterRelease resets it, once per return", func(e *env) {
		g := e.open(1, 1)
		e.exec(g, "set search_path = mine")
		if s := scan[string](e, g, "show search_path"); s != "mine" {
			e.Errorf("search_path %q", s)
		}
		var runs atomic.Int64
		reset := e.openWith(setup{b: 1, p: 1, pool: func(c *pgxpool.Config) {
			c.AfterRelease = func(conn *pgx.Conn) bool {
				runs.Add(1)
				_, err := conn.Exec(context.Background(), "discard all")
				return err == nil
			}
		}})
		e.exec(reset, "set search_path = mine")
		if s := scan[string](e, reset, "show search_path"); s == "mine" {
			e.Error("the state was not reset")
		}
		reset.idle()
		e.eventually("the hook has run once per return", func() error {
			if n := runs.Load(); n != 2 {
				return fmt.Errorf("%d times for 2 operations", n)
			}
			return nil
		})
	}},
	{93, pinnedConns, "D05", "LISTEN in Raw with Bypass holds no permit, and its notification arrives", func(e *env) {
		g := e.openWith(setup{b: 1, p: 2, waiting: -1})
		tx := g.begin()
		c := g.conn()
		ctx := pgxgated.Bypass(e.Context())
		e.must(c.Raw(func(dc any) error {
			pc, err := pgxgated.PgxConn(ctx, dc)
			if err != nil {
				return err
			}
			if _, err := pc.Exec(ctx, "listen contract"); err != nil {
				return err
			}
			e.exec(tx, "notify contract, 'hello'")
			if err := tx.Commit(); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(ctx, bound)
			defer cancel()
			n, err := pc.WaitForNotification(ctx)
			if err == nil && n.Payload != "hello" {
				e.Errorf("%+v", n)
			}
			_, _ = pc.Exec(ctx, "unlisten *")
			return err
		}))
		g.runs(0)
		e.must(c.Close())
	}},
	{94, pinnedConns, "", "A *sql.Conn whose backend died says so from then on, and never goes on with another session", func(e *env) {
		g := e.open(1, 2)
		c := g.conn()
		e.exec(c, "create temp table mine (id int)")
		e.see.terminate(e.pid(c))
		for i := range 3 {
			_, err := c.ExecContext(e.Context(), "select 1")
			if err == nil {
				e.Error("went on with another session")
			}
			if i == 0 {
				e.bare(err, "57P01")
			}
			e.public(err)
		}
		_, err := c.BeginTx(e.Context(), nil)
		if err == nil {
			e.Error("began on another session")
		}
		e.public(err)
		e.must(c.Close())
		g.whole(1)
	}},
	{95, pinnedConns, "", "CopyFrom inside Raw works through PgxConn, in the transaction of the *sql.Conn", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 1)
		c := g.conn()
		tx, err := c.BeginTx(e.Context(), nil)
		e.must(err)
		e.must(c.Raw(func(dc any) error {
			pc, err := pgxgated.PgxConn(e.Context(), dc)
			if err != nil {
				return err
			}
			_, err = pc.CopyFrom(e.Context(), pgx.Identifier{"t"}, []string{"id"}, pgx.CopyFromRows([][]any{{1}, {2}, {3}}))
			return err
		}))
		g.runs(1)
		e.must(tx.Rollback())
		e.must(c.Close())
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows", n)
		}
	}},
}

const (
	preparedStatements = "Prepared statements"
	textBegin          = "BEGIN and COMMIT as text"
	nested             = "Work inside work"
)

var statements = []condition{
	{96, preparedStatements, "", "A prepared statement holds no permit while it is not run, and runs on whichever connection is there", func(e *env) {
		g := e.open(2, 2)
		st, err := g.Prepare("select $1::int + 1")
		e.must(err)
		defer st.Close()
		g.runs(0)
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				var n int
				if err := st.QueryRow(i).Scan(&n); err != nil || n != i+1 {
					e.Errorf("%d, %v", n, err)
				}
			})
		}
		all.Wait()
		if _, err := st.Exec(); err == nil || !strings.Contains(err.Error(), "expected 1 arguments, got 0") {
			e.Errorf("%v", err)
		}
		_, err = g.Prepare("select nothing from nowhere")
		e.code(err, "42P01")
	}},
	{97, preparedStatements, "D06", "Fifty transactions that use a statement of the database, with one permit and one connection, do not lock each other up", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 1)
		st, err := g.Prepare("insert into t values ($1)")
		e.must(err)
		defer st.Close()
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() {
				tx, err := g.BeginTx(e.Context(), nil)
				if err != nil {
					e.Error(err)
					return
				}
				defer tx.Rollback()
				s := tx.Stmt(st)
				defer s.Close()
				if _, err := s.Exec(i); err != nil {
					e.Error(err)
				}
				if err := tx.Commit(); err != nil {
					e.Error(err)
				}
			})
		}
		all.Wait()
		if n := e.see.Int("select count(*) from t"); n != 50 {
			e.Errorf("%d rows", n)
		}
		if n := scan[int](e, g, "select count(*) from pg_prepared_statements"); n > 4 {
			e.Errorf("%d statements are prepared on the backend", n)
		}
	}},
	{98, preparedStatements, "", "A statement whose table was changed is planned anew, without an error", func(e *env) {
		e.see.Exec("create table t (a int); insert into t values (1)")
		g := e.open(1, 1)
		st, err := g.Prepare("select * from t")
		e.must(err)
		defer st.Close()
		for i := range 3 {
			rows, err := st.Query()
			e.must(err)
			columns, err := rows.Columns()
			e.must(err)
			if len(columns) != i+1 {
				e.Errorf("columns %v, want %d", columns, i+1)
			}
			e.must(rows.Close())
			e.see.Exec(fmt.Sprintf("alter table t add b%d int", i))
		}
	}},
	{99, preparedStatements, "H04", "Without named statements (simple_protocol, exec) nothing stays prepared on the backend", func(e *env) {
		for _, mode := range []string{"simple_protocol", "exec", "cache_describe"} {
			g := e.openDSN("pool_max_conns", "1", "gate_running", "1", "default_query_exec_mode", mode)
			st, err := g.Prepare("select $1::int")
			e.must(err)
			for i := range 3 {
				var n int
				e.must(st.QueryRow(i).Scan(&n))
			}
			e.must(st.Close())
			if n := scan[int](e, g, "select count(*) from pg_prepared_statements"); n != 0 {
				e.Errorf("%s: %d statements stay", mode, n)
			}
		}
	}},
	{100, textBegin, "", "A transaction begun and ended as text on a *sql.Conn runs under that connection's permit", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 2)
		c := g.conn()
		for _, q := range []string{"begin", "insert into t values (1)", "commit"} {
			e.exec(c, q)
			g.runs(1)
		}
		e.must(c.Close())
		g.runs(0)
		if n := e.see.Int("select count(*) from t"); n != 1 {
			e.Errorf("%d rows", n)
		}
	}},
	{101, textBegin, "", "A BEGIN as text that is still open when its connection is closed is rolled back, and its locks are free when the permit is back", func(e *env) {
		g := e.open(1, 2)
		for range 10 {
			c := g.conn()
			e.exec(c, "begin")
			e.exec(c, "select pg_advisory_xact_lock(7)")
			e.must(c.Close())
			g.released(func() {
				if !e.see.free(7) {
					e.Error("its permit came back while its lock was held")
				}
			})
		}
	}},
	{102, textBegin, "", "A BEGIN as text outside a *sql.Conn is never handed on to who comes next", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 1)
		for range 10 {
			e.exec(g, "begin; insert into t values (1)")
			e.exec(g, "commit") // of nothing: a warning
		}
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows were committed by somebody else", n)
		}
	}},
	{103, nested, "A08", "Transactions that start another on the database while all permits are out fail in bounded time, and the outer ones go on", func(e *env) {
		g := e.openWith(setup{b: 2, p: 2, maxWait: 50 * time.Millisecond})
		var all sync.WaitGroup
		outer := g.fill(2)
		for _, tx := range outer {
			all.Go(func() {
				_, err := g.BeginTx(context.Background(), nil)
				e.is(err, pgxgated.ErrWaitTimeout)
				if _, err := tx.Exec("select 1"); err != nil {
					e.Error(err)
				}
			})
		}
		all.Wait()
		for _, tx := range outer { // not before both were refused: a permit that comes back is for who waits
			if err := tx.Commit(); err != nil {
				e.Error(err)
			}
		}
		g.whole(2)
	}},
	{104, nested, "A08", "Inside InTx a second start on the same gate is ErrNested at once, and one on another gate is fine", func(e *env) {
		g, other := e.open(2, 2), e.open(1, 1)
		_, err := pgxgated.InTx(e.Context(), g.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			_, err := g.BeginTx(ctx, nil)
			e.is(err, pgxgated.ErrNested)
			_, err = g.ExecContext(ctx, "select 1")
			e.is(err, pgxgated.ErrNested)
			_, err = other.ExecContext(ctx, "select 1")
			e.must(err)
			_, err = tx.ExecContext(ctx, "select 1")
			return 0, err
		})
		e.must(err)
	}},
}

const closes = "Close"

var closing = []condition{
	{105, closes, "", "Close with work out returns at once; the work finishes, who waits gets ErrClosed, and who comes is refused", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 1)
		tx := g.begin()
		waiter := later(func() error { _, err := g.BeginTx(e.Context(), nil); return err })
		g.gauges(1, 1)
		e.must(soon(e, later(g.Close)))
		e.is(soon(e, waiter), pgxgated.ErrClosed)
		e.exec(tx, "insert into t values (1)")
		e.must(tx.Commit())
		g.runs(0)
		if _, err := g.BeginTx(e.Context(), nil); err == nil {
			e.Error("began after Close")
		}
		if n := e.see.Int("select count(*) from t"); n != 1 {
			e.Errorf("%d rows", n)
		}
	}},
	{106, closes, "", "Close leaves a pool that was handed in open, and WithOwnPool closes it", func(e *env) {
		g := e.open(1, 1)
		e.must(g.Close())
		e.must(g.pool.Ping(e.Context()))
		own := e.open(1, 1, pgxgated.WithOwnPool())
		e.exec(own, "select 1")
		e.must(own.Close())
		e.eventually("the pool is closed", func() error {
			if own.pool.Ping(e.Context()) == nil {
				return errors.New("it answers")
			}
			return nil
		})
	}},
	{107, closes, "", "Close while a cancelled statement drains: the permit is back when the backend is gone, as ever", func(e *env) {
		e.see.Stubborn()
		g := e.open(1, 2, pgxgated.WithDrainGrace(100*time.Millisecond))
		ctx, cancel := context.WithCancel(e.Context())
		c := g.conn()
		pid := e.pid(c)
		got := later(func() error { _, err := c.ExecContext(ctx, "select stubborn(60)"); return err })
		e.see.working(pid, "stubborn(60)")
		cancel()
		e.is(soon(e, got), context.Canceled)
		e.must(c.Close())
		e.must(g.Close())
		g.runs(1)
		g.idle()
		if e.see.there(pid) {
			e.Error("its permit came back while its backend was there")
		}
	}},
}

const changingLimits = "Limits that change under load"

var limits = []condition{
	{108, changingLimits, "", "After the limit was lowered holders finish, and nobody enters until the new one is met", func(e *env) {
		g := e.open(4, 4)
		txs := g.fill(4)
		l := g.gate.Stats().Limits
		l.Running = 2
		e.must(g.gate.SetLimits(l))
		var entered atomic.Int64
		waiter := later(func() error {
			tx, err := g.BeginTx(e.Context(), nil)
			if err != nil {
				return err
			}
			entered.Add(1)
			return tx.Rollback()
		})
		g.gauges(4, 1)
		for i, want := range []int{3, 2} {
			e.must(txs[i].Rollback())
			g.gauges(want, 1)
			if entered.Load() != 0 {
				e.Error("entered above the new limit")
			}
		}
		e.must(txs[2].Rollback())
		e.must(soon(e, waiter))
		e.must(txs[3].Rollback())
		g.whole(2)
	}},
	{109, changingLimits, "", "A limit that is raised lets in at once who waits, and no more than it says", func(e *env) {
		g := e.open(1, 3)
		tx := g.begin()
		hold, started := make(chan struct{}), make(chan error, 3)
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				tx, err := g.BeginTx(e.Context(), nil)
				started <- err
				if err == nil {
					<-hold
					_ = tx.Rollback()
				}
			})
		}
		g.gauges(1, 3)
		l := g.gate.Stats().Limits
		l.Running = 3
		e.must(g.gate.SetLimits(l))
		g.gauges(3, 1)
		for range 2 {
			e.must(soon(e, started))
		}
		e.must(tx.Rollback())
		e.must(soon(e, started))
		close(hold)
		all.Wait()
		g.whole(3)
	}},
	{110, changingLimits, "", "Limits that go up and down under load never let more run at the server than the highest of them", func(e *env) {
		g := e.openWith(setup{b: 4, p: 8, waiting: 50})
		stop := make(chan struct{})
		var all sync.WaitGroup
		for range 12 {
			all.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					tx, err := g.BeginTx(e.Context(), nil)
					if err != nil {
						e.Error(err)
						return
					}
					var n int
					if err := tx.QueryRow("select count(*) from pg_stat_activity where datname = current_database() and xact_start is not null and backend_type = 'client backend'").Scan(&n); err != nil || n > 4 {
						e.Errorf("%d at work, %v", n, err)
					}
					_ = tx.Rollback()
				}
			})
		}
		l := g.gate.Stats().Limits
		for i := range 100 {
			l.Running = 1 + i%4
			e.must(g.gate.SetLimits(l))
			before := g.gate.Stats().Acquired
			e.eventually("something is let in", func() error {
				if g.gate.Stats().Acquired == before {
					return errors.New("nothing is")
				}
				return nil
			})
		}
		close(stop)
		all.Wait()
		g.whole(l.Running)
	}},
}

const sharing = "Several databases in one process"

var together = []condition{
	mixedFailures,
	{111, sharing, "", "Databases opened with the same gate_name share one budget, and other limits are an error that names both", func(e *env) {
		name := "shared-" + e.see.name()
		keys := []string{"pool_max_conns", "2", "gate_running", "1", "gate_waiting", "0", "gate_name", name}
		a := e.openDSN(append(keys, "application_name", "a")...)
		b := e.openDSN(append(keys, "application_name", "b")...)
		if a.gate != b.gate || a.gate.Name() != name {
			e.Errorf("two gates: %q, %q", a.gate.Name(), b.gate.Name())
		}
		tx := a.begin()
		_, err := b.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		e.must(tx.Rollback())
		e.exec(b, "select 1")
		_, err = pgxgated.NewConnector(e.with(append(keys, "gate_running", "2")...))
		if err == nil || !strings.Contains(err.Error(), "running 1") || !strings.Contains(err.Error(), "running 2") {
			e.Errorf("%v", err)
		}
	}},
	{112, sharing, "", "The same DSN opened twice shares one budget, other DSNs never do", func(e *env) {
		keys := []string{"pool_max_conns", "2", "gate_running", "1", "gate_waiting", "0"}
		a, b := e.openDSN(keys...), e.openDSN(keys...)
		other := e.openDSN(append(keys, "application_name", "other")...)
		tx := a.begin()
		_, err := b.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		e.exec(other, "select 1")
		e.must(tx.Rollback())
	}},
	{113, sharing, "", "A gate that is handed to two databases is one budget, and closing one leaves the other working", func(e *env) {
		gate, err := pgxgated.NewGate("handed", pgxgated.Limits{Running: 1, Waiting: 10, MaxWait: bound})
		e.must(err)
		defer gate.Close()
		open := func() *gated {
			pool, err := pgxpool.New(e.Context(), e.with("pool_max_conns", "2"))
			e.must(err)
			db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithGate(gate))
			e.must(err)
			return e.adopt(db, pool, &logs{})
		}
		a, b := open(), open()
		tx := a.begin()
		waiter := later(func() error { return commitOne(b) })
		a.gauges(1, 1)
		e.must(tx.Rollback())
		e.must(soon(e, waiter))
		e.must(a.Close())
		e.must(commitOne(b))
	}},
	{114, sharing, "", "Two databases in one process have a budget each: one that is full takes nothing from the other", func(e *env) {
		a := e.openWith(setup{b: 1, p: 1, waiting: -1})
		first := e.dsn
		e.dsn = e.server.Database(e.T)
		b := e.open(1, 1)
		e.dsn = first
		tx := a.begin()
		_, err := a.BeginTx(e.Context(), nil)
		e.is(err, pgxgated.ErrAdmissionFull)
		if da, db := scan[string](e, tx, "select current_database()"), scan[string](e, b, "select current_database()"); da == db {
			e.Errorf("the same database %q", da)
		}
		b.runs(0)
		b.whole(1)
		a.runs(1)
		e.must(tx.Rollback())
	}},
	{115, sharing, "", "A *sql.DB of plain pgx is gated by OpenDB with the same promises", func(e *env) {
		inner, err := sql.Open("pgx", e.dsn)
		e.must(err)
		defer inner.Close()
		inner.SetMaxOpenConns(3)
		db, err := pgxgated.OpenDB(inner, pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 10, MaxWait: bound}))
		e.must(err)
		g := e.adopt(db, nil, &logs{})
		c := g.conn()
		pid := e.pid(c)
		ctx, cancel := context.WithCancel(e.Context())
		got := later(func() error { _, err := c.ExecContext(ctx, "select pg_sleep(60)"); return err })
		e.see.working(pid, "pg_sleep(60)")
		cancel()
		e.is(soon(e, got), context.Canceled)
		e.must(c.Close())
		g.released(func() {
			if e.see.there(pid) {
				e.Error("its permit came back while its backend was there")
			}
		})
		_, err = g.Exec("select 1/0")
		e.bare(err, "22012")
		g.idle()
		e.must(g.Close())
		if n := inner.Stats().InUse; n != 0 {
			e.Errorf("%d connections are out", n)
		}
	}},
}
