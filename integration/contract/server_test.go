package contract

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/ngrok/sqlmw"

	"github.com/pgxgated/pgxgated"
)

const callerGone = "When the caller is gone"

var afterwards = []condition{
	{43, callerGone, "", "A cancelled statement answers at once with the context's error, and its permit is back when its backend is gone", func(e *env) {
		g := e.open(1, 3)
		for range 10 {
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
		}
	}},
	{44, callerGone, "", "A statement that swallows cancels counts as running and draining until its backend is gone, terminated after gate_drain_grace", func(e *env) {
		e.see.Stubborn()
		g := e.open(1, 3, pgxgated.WithDrainGrace(200*time.Millisecond))
		ctx, cancel := context.WithCancel(e.Context())
		tx, err := g.BeginTx(ctx, nil)
		e.must(err)
		pid := e.pid(tx)
		e.exec(tx, "select pg_advisory_xact_lock(7)")
		got := later(func() error { _, err := tx.ExecContext(ctx, "select stubborn(60)"); return err })
		e.see.working(pid, "stubborn(60)")
		cancel()
		e.is(soon(e, got), context.Canceled)
		e.ended(tx.Rollback())
		e.eventually("it drains", func() error {
			if s := g.gate.Stats(); s.Running != 1 || s.Draining != 1 {
				return fmt.Errorf("running %d, draining %d", s.Running, s.Draining)
			}
			return nil
		})
		g.released(func() {
			if e.see.there(pid) || !e.see.free(7) {
				e.Error("its permit came back while its backend was there or its lock held")
			}
		})
		if s := g.gate.Stats(); s.TerminatedBackends != 1 || s.DrainsUnproven != 0 {
			e.Errorf("terminated %d, unproven %d, want 1, 0", s.TerminatedBackends, s.DrainsUnproven)
		}
	}},
	{45, callerGone, "", "A permit whose backend cannot be proven gone comes back after gate_drain_limit, counted and logged once", func(e *env) {
		e.see.Stubborn()
		e.dsn = e.role("x", -1)
		e.see.Exec("revoke execute on function pg_terminate_backend from public")
		g := e.open(1, 3, pgxgated.WithDrainGrace(100*time.Millisecond), pgxgated.WithDrainLimit(300*time.Millisecond))
		ctx, cancel := context.WithCancel(e.Context())
		c := g.conn()
		pid := e.pid(c)
		got := later(func() error { _, err := c.ExecContext(ctx, "select stubborn(60)"); return err })
		e.see.working(pid, "stubborn(60)")
		cancel()
		e.is(soon(e, got), context.Canceled)
		e.must(c.Close())
		g.released(func() {})
		if s := g.gate.Stats(); s.DrainsUnproven != 1 || s.TerminatedBackends != 0 || g.log.count("gate_drain_limit passed") != 1 {
			e.Errorf("unproven %d, terminated %d, logged %d times, want 1, 0, 1", s.DrainsUnproven, s.TerminatedBackends, g.log.count("gate_drain_limit passed"))
		}
		if e.see.there(pid) {
			e.see.terminate(pid)
		}
	}},
	{46, callerGone, "B03", "A context that dies between statements is rolled back at once, and costs no connection in 100 rounds", func(e *env) {
		g := e.open(1, 2)
		for range 100 {
			ctx, cancel := context.WithCancel(e.Context())
			tx, err := g.BeginTx(ctx, nil)
			e.must(err)
			e.exec(tx, "select pg_advisory_xact_lock(7)")
			cancel()
			g.released(func() {
				if !e.see.free(7) {
					e.Error("its permit came back while its lock was held")
				}
			})
			e.ended(tx.Commit())
		}
		if n := g.pool.Stat().NewConnsCount(); n > 1 {
			e.Errorf("%d connections were made", n)
		}
	}},
	{47, callerGone, "B05", "Commit and Rollback after a cancellation answer the context's error or sql.ErrTxDone, sooner or later", func(e *env) {
		g := e.open(1, 2)
		for i := range 60 {
			ctx, cancel := context.WithCancel(e.Context())
			tx, err := g.BeginTx(ctx, nil)
			e.must(err)
			pid := e.pid(tx)
			if i%6 == 5 {
				e.see.terminate(pid)
			}
			cancel()
			if i%2 == 0 {
				g.gauges(0, 0)
			}
			if i%4 < 2 {
				err = tx.Commit()
			} else if err = tx.Rollback(); err == nil {
				continue // it came before database/sql's own
			}
			if i%6 == 5 {
				e.public(err)
			} else {
				e.ended(err)
			}
		}
	}},
	{48, callerGone, "B04", "No statement of a cancelled transaction is ever seen, and no row lands in another's", func(e *env) {
		e.see.Exec("create table t (tx int, kept bool)")
		g := e.open(1, 1)
		var all sync.WaitGroup
		for c := range 4 {
			all.Go(func() {
				for i := range 60 {
					id := c*1000 + i
					ctx, cancel := context.WithCancel(e.Context())
					if c%2 == 0 {
						timer := time.AfterFunc(time.Duration(rand.Int64N(int64(4*time.Millisecond))), cancel)
						defer timer.Stop()
					}
					tx, err := g.BeginTx(ctx, nil)
					if err == nil {
						for range 3 {
							if _, err := tx.ExecContext(context.Background(), "insert into t values ($1, $2)", id, c%2 == 1); err != nil {
								e.public(err)
							}
						}
						if c%2 == 1 {
							err = tx.Commit()
						} else {
							<-ctx.Done()
							err = tx.Rollback()
						}
					}
					if err != nil && c%2 == 1 {
						e.Errorf("%v", err)
					}
					e.public(err)
					cancel()
				}
			})
		}
		all.Wait()
		g.idle()
		if n := e.see.Int("select count(*) from t where not kept"); n != 0 {
			e.Errorf("%d rows of cancelled transactions", n)
		}
		if n := e.see.Int("select count(*) from (select tx from t group by tx having count(*) = 3) s"); n != 120 {
			e.Errorf("%d whole transactions, want 120", n)
		}
	}},
	{49, callerGone, "B06", "A BEGIN that its caller gave up leaves no transaction open for who comes next", func(e *env) {
		g := e.open(1, 1)
		for range 200 {
			ctx, cancel := context.WithTimeout(e.Context(), time.Duration(rand.Int64N(int64(time.Millisecond))))
			tx, err := g.BeginTx(ctx, nil)
			if err == nil {
				err = tx.Rollback()
			}
			if err != nil {
				e.ended(err)
			}
			cancel()
			next := g.begin()
			if scan[bool](e, next, "select now() <> statement_timestamp() and pg_current_xact_id_if_assigned() is not null") {
				e.Error("began inside another transaction")
			}
			e.must(next.Rollback())
		}
	}},
	{50, callerGone, "B08", "Who gets the connection next is never hit by the cancel of who had it before", func(e *env) {
		g := e.open(1, 1)
		for range 100 {
			ctx, cancel := context.WithTimeout(e.Context(), time.Duration(500+rand.IntN(2000))*time.Microsecond)
			_, err := g.ExecContext(ctx, "select pg_sleep(0.002)")
			if err != nil {
				e.ended(err)
			}
			cancel()
			e.exec(g, "select pg_sleep(0.002)")
		}
	}},
	{51, callerGone, "", "COMMIT is not interrupted by the caller's cancellation: what was to be committed is", func(e *env) {
		e.see.slowCommit("0.3")
		g := e.open(1, 1)
		c := g.conn()
		pid := e.pid(c)
		e.must(c.Close())
		ctx, cancel := context.WithCancel(e.Context())
		tx, err := g.BeginTx(ctx, nil)
		e.must(err)
		e.exec(tx, "insert into slow values (1)")
		got := later(tx.Commit)
		e.see.working(pid, "commit")
		cancel()
		e.must(soon(e, got))
		if n := e.see.Int("select count(*) from slow"); n != 1 {
			e.Errorf("%d rows, want 1", n)
		}
	}},
	{52, callerGone, "", "Rows that are being read when their caller is cancelled end, and the permit is back when the backend is gone", func(e *env) {
		g := e.open(1, 3)
		ctx, cancel := context.WithCancel(e.Context())
		rows, err := g.QueryContext(ctx, "select pg_backend_pid(), pg_sleep(case when i < 4 then 0 else 60 end)::text, repeat('x', 100000) from generate_series(1, 10) i")
		e.must(err)
		var pid int
		var nothing sql.RawBytes
		if !rows.Next() {
			e.Fatalf("no row: %v", rows.Err())
		}
		e.must(rows.Scan(&pid, &nothing, &nothing))
		cancel()
		for rows.Next() {
		}
		e.is(rows.Err(), context.Canceled)
		if err := rows.Close(); err != nil { // on Go 1.27 it is this that ends them, if nothing has before
			e.is(err, context.Canceled)
		}
		g.released(func() {
			if e.see.there(pid) {
				e.Error("its permit came back while its backend was there")
			}
		})
	}},
}

const serverTimeouts = "The server's own limits"

var serverSide = []condition{
	{53, serverTimeouts, "", "statement_timeout (57014) arrives as it is, outside a transaction and in one, and costs no connection", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, pool: param("statement_timeout", "50")})
		pid := e.pid(g)
		_, err := g.ExecContext(e.Context(), "select pg_sleep(10)")
		e.bare(err, "57014")
		g.runs(0)
		tx := g.begin()
		_, err = tx.Exec("select pg_sleep(10)")
		e.bare(err, "57014")
		e.must(tx.Rollback())
		g.runs(0)
		if e.pid(g) != pid {
			e.Error("the connection was not kept")
		}
	}},
	{54, serverTimeouts, "", "lock_timeout (55P03) arrives as it is, and costs no connection", func(e *env) {
		e.see.Exec("create table t (id int); insert into t values (1)")
		g := e.openWith(setup{b: 2, p: 2, pool: param("lock_timeout", "50")})
		holder := g.begin()
		e.exec(holder, "update t set id = 2")
		tx := g.begin()
		pid := e.pid(tx)
		_, err := tx.Exec("update t set id = 3")
		e.bare(err, "55P03")
		e.must(tx.Rollback())
		g.runs(1)
		if e.pid(g) != pid {
			e.Error("the connection was not kept")
		}
		e.must(holder.Rollback())
	}},
	{55, serverTimeouts, "", "A deadlock (40P01) arrives as it is, and the other one goes on", func(e *env) {
		e.see.Exec("create table t (id int); insert into t values (1), (2)")
		g := e.openWith(setup{b: 2, p: 2, pool: param("deadlock_timeout", "50")})
		a, b := g.begin(), g.begin()
		e.exec(a, "update t set id = id where id = 1")
		e.exec(b, "update t set id = id where id = 2")
		other := later(func() error { _, err := a.Exec("update t set id = id where id = 2"); return err })
		_, err := b.Exec("update t set id = id where id = 1")
		if err == nil { // then the other one was chosen
			err = soon(e, other)
		} else {
			e.must(b.Rollback())
			e.must(soon(e, other))
		}
		e.bare(err, "40P01")
		_ = a.Rollback()
		_ = b.Rollback()
		g.whole(2)
	}},
	{56, serverTimeouts, "", "idle_in_transaction_session_timeout costs the connection, not a permit, and who went on hears the server's reason", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, pool: param("idle_in_transaction_session_timeout", "50")})
		tx := g.begin()
		pid := e.pid(tx)
		e.eventually("the session is ended", func() error {
			if e.see.there(pid) {
				return errors.New("still there")
			}
			return nil
		})
		_, err := tx.Exec("select 1")
		e.bare(err, "25P03")
		e.public(tx.Commit())
		g.whole(1)
	}},
	{57, serverTimeouts, "", "gate_server_deadline hands what remains of the deadline to the server, only ever tightening, and nothing stays with the session", func(e *env) {
		g := e.openWith(setup{b: 1, p: 1, pool: param("statement_timeout", "9000"), opts: []pgxgated.Option{pgxgated.WithServerDeadline(true)}})
		ms := func(r runner, name string) int {
			return scan[int](e, r, "select setting::int from pg_settings where name = $1", name)
		}
		for _, deadline := range []time.Duration{5 * time.Second, 30 * time.Second} {
			ctx, cancel := context.WithTimeout(e.Context(), deadline)
			tx, err := g.BeginTx(ctx, nil)
			e.must(err)
			if n := ms(tx, "statement_timeout"); n < 1 || n > min(int(deadline/time.Millisecond), 9000) {
				e.Errorf("statement_timeout %d with a deadline in %v", n, deadline)
			}
			if e.server.Version() >= 17 {
				if n := ms(tx, "transaction_timeout"); n < 1 || n > int(deadline/time.Millisecond) {
					e.Errorf("transaction_timeout %d with a deadline in %v", n, deadline)
				}
			}
			e.must(tx.Rollback())
			cancel()
		}
		if n := ms(g, "statement_timeout"); n != 9000 {
			e.Errorf("statement_timeout %d afterwards", n)
		}
	}},
}

func param(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

const gettingOne = "Physical connections"

var physicals = []condition{
	{58, gettingOne, "", "Permits held and no connection within gate_pool_wait is ErrPoolTimeout, and the permits are back", func(e *env) {
		g := e.open(1, 1, pgxgated.WithPoolWait(300*time.Millisecond)) // long enough for the first use of a connection, at the end
		taken, err := g.pool.Acquire(e.Context())
		e.must(err)
		for range 3 {
			_, err = g.BeginTx(e.Context(), nil)
			e.is(err, pgxgated.ErrPoolTimeout)
			if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pgxgated.ErrRejected) {
				e.Errorf("matches too much: %v", err)
			}
			g.runs(0)
		}
		taken.Release()
		g.whole(1)
	}},
	{59, gettingOne, "", "A caller's deadline that ends before gate_pool_wait is context.DeadlineExceeded", func(e *env) {
		g := e.open(1, 1)
		taken, err := g.pool.Acquire(e.Context())
		e.must(err)
		ctx, cancel := context.WithTimeout(e.Context(), 30*time.Millisecond)
		defer cancel()
		_, err = g.ExecContext(ctx, "select 1")
		e.is(err, context.DeadlineExceeded)
		if errors.Is(err, pgxgated.ErrPoolTimeout) {
			e.Errorf("%v", err)
		}
		g.runs(0)
		taken.Release()
	}},
	{60, gettingOne, "A04", "Idle logical connections hold no physical one, and make no round trip", func(e *env) {
		g := e.open(4, 4)
		g.SetMaxIdleConns(50)
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if err := commitOne(g); err != nil {
					e.Error(err)
				}
			})
		}
		all.Wait()
		g.idle()
		for range 4 { // all of them are to be had by a direct user
			c, err := g.pool.Acquire(e.Context())
			e.must(err)
			defer c.Release()
		}
	}},
	{61, gettingOne, "H03", "Logical connections that come and go make no physical ones", func(e *env) {
		g := e.open(2, 2)
		g.SetMaxIdleConns(0)
		g.SetConnMaxLifetime(time.Millisecond)
		for range 100 {
			e.exec(g, "select 1")
		}
		if n := g.pool.Stat().NewConnsCount(); n > 2 {
			e.Errorf("%d connections were made", n)
		}
	}},
	{62, gettingOne, "", "Where all connections died while idle, BeginTx and Ping get another one under the same permit, without an error", func(e *env) {
		g := e.open(4, 4)
		var pids []int
		txs := g.fill(4)
		for _, tx := range txs {
			pids = append(pids, e.pid(tx))
			e.must(tx.Rollback())
		}
		kill := func() {
			for _, pid := range pids {
				e.see.terminate(pid)
			}
		}
		kill()
		before := g.gate.Stats().Acquired
		tx := g.begin()
		pids = []int{e.pid(tx)}
		e.must(tx.Rollback())
		kill()
		e.must(g.PingContext(e.Context()))
		if n := g.gate.Stats().Acquired - before; n != 1 {
			e.Errorf("%d permits for 1 operation", n)
		}
	}},
	{63, gettingOne, "", "A server that is down is the network's error, and the permits are back", func(e *env) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		e.must(err)
		port := l.Addr().(*net.TCPAddr).Port
		e.must(l.Close())
		g := e.openDSN("pool_max_conns", "2", "gate_running", "1", "port", strconv.Itoa(port))
		for range 5 {
			_, err := g.BeginTx(e.Context(), nil)
			var connect *pgconn.ConnectError
			if !errors.As(err, &connect) {
				e.Errorf("%T %v", err, err)
			}
			e.public(err)
			g.runs(0)
		}
	}},
	{64, gettingOne, "", "A wrong password is the server's 28P01, the password stands in no error, and the permits are back", func(e *env) {
		dsn := e.role("right", -1)
		e.dsn = strings.Replace(dsn, ":right@", ":secret-and-wrong@", 1)
		g := e.open(1, 1)
		for range 3 {
			_, err := g.ExecContext(e.Context(), "select 1")
			e.code(err, "28P01")
			if strings.Contains(fmt.Sprintf("%v %+v", err, err), "secret-and-wrong") {
				e.Errorf("the password is in the error: %v", err)
			}
			g.runs(0)
		}
	}},
	{65, gettingOne, "", "Too many connections is the server's 53300, and the permits are back", func(e *env) {
		e.dsn = e.role("right", 1)
		g := e.open(2, 2)
		tx := g.begin()
		for range 5 {
			_, err := g.BeginTx(e.Context(), nil)
			e.code(err, "53300")
			g.runs(1)
		}
		e.must(tx.Rollback())
		e.exec(g, "select 1")
	}},
	{66, gettingOne, "H03", "More running permits than connections is an error at open that names both", func(e *env) {
		_, err := pgxgated.NewConnector(e.with("pool_max_conns", "2", "gate_running", "3"))
		if err == nil || !strings.Contains(err.Error(), "gate_running is 3") || !strings.Contains(err.Error(), "pool_max_conns 2") {
			e.Errorf("%v", err)
		}
	}},
	{67, gettingOne, "H01", "A misspelt gate_ key is an error at open that names it, and no gate_ or pool_ key reaches the server", func(e *env) {
		_, err := pgxgated.NewConnector(e.with("gate_runing", "3"))
		if err == nil || !strings.Contains(err.Error(), "gate_runing") {
			e.Errorf("%v", err)
		}
		g := e.openDSN("pool_max_conns", "2", "gate_running", "1", "gate_max_wait", "1s", "application_name", "mine")
		if n := scan[int](e, g, "select count(*) from pg_settings where name like 'gate%' or name like 'pool%'"); n != 0 {
			e.Errorf("%d settings", n)
		}
		if name := scan[string](e, g, "show application_name"); name != "mine" {
			e.Errorf("application_name %q", name)
		}
	}},
}

// code: the server's error with this code, whatever is around it.
func (e *env) code(err error, code string) {
	e.Helper()
	var p *pgconn.PgError
	if !errors.As(err, &p) || p.Code != code {
		e.Errorf("error is %T %v, want %s", err, err, code)
	}
	e.public(err)
}

// interceptor is a sqlmw.Interceptor made of functions.
type interceptor struct {
	sqlmw.NullInterceptor
	begin    func(context.Context, driver.ConnBeginTx) error
	exec     func(driver.ExecerContext) error
	query    func() error
	prepare  func() error
	commit   func(driver.Tx) error
	rollback func(driver.Tx) error
}

func (i *interceptor) ConnBeginTx(ctx context.Context, c driver.ConnBeginTx, o driver.TxOptions) (context.Context, driver.Tx, error) {
	if i.begin != nil {
		if err := i.begin(ctx, c); err != nil {
			return ctx, nil, err
		}
	}
	return i.NullInterceptor.ConnBeginTx(ctx, c, o)
}

func (i *interceptor) ConnExecContext(ctx context.Context, c driver.ExecerContext, q string, a []driver.NamedValue) (driver.Result, error) {
	r, err := i.NullInterceptor.ConnExecContext(ctx, c, q, a)
	if i.exec != nil {
		if own := i.exec(c); own != nil {
			return nil, own
		}
	}
	return r, err
}

func (i *interceptor) ConnQueryContext(ctx context.Context, c driver.QueryerContext, q string, a []driver.NamedValue) (context.Context, driver.Rows, error) {
	if i.query != nil {
		if err := i.query(); err != nil {
			return ctx, nil, err
		}
	}
	return i.NullInterceptor.ConnQueryContext(ctx, c, q, a)
}

func (i *interceptor) ConnPrepareContext(ctx context.Context, c driver.ConnPrepareContext, q string) (context.Context, driver.Stmt, error) {
	if i.prepare != nil {
		if err := i.prepare(); err != nil {
			return ctx, nil, err
		}
	}
	return i.NullInterceptor.ConnPrepareContext(ctx, c, q)
}

func (i *interceptor) TxCommit(ctx context.Context, tx driver.Tx) error {
	if i.commit != nil {
		return i.commit(tx)
	}
	return i.NullInterceptor.TxCommit(ctx, tx)
}

func (i *interceptor) TxRollback(ctx context.Context, tx driver.Tx) error {
	if i.rollback != nil {
		return i.rollback(tx)
	}
	return i.NullInterceptor.TxRollback(ctx, tx)
}

const beginRefused = "BEGIN refused"

// instead has the server answer another statement where BEGIN was to be sent.
func instead(query string) func(context.Context, driver.ConnBeginTx) error {
	return func(ctx context.Context, c driver.ConnBeginTx) error {
		_, err := c.(driver.ExecerContext).ExecContext(ctx, query, nil)
		return err
	}
}

var begins = []condition{
	{68, beginRefused, "E04", "BEGIN answered with an ERROR, 100 times, is that error each time, costs no connection, and gives the permit back", func(e *env) {
		i := &interceptor{begin: instead("do $$ begin raise exception 'shed' using errcode = '53300'; end $$")}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		for range 100 {
			_, err := g.BeginTx(e.Context(), nil)
			e.bare(err, "53300")
			g.runs(0)
		}
		if n := g.pool.Stat().NewConnsCount(); n != 1 {
			e.Errorf("%d connections were made", n)
		}
		i.begin = nil
		g.whole(1)
	}},
	{69, beginRefused, "E04", "BEGIN answered with a FATAL each time is that error after a bounded number of connections, and gives the permit back", func(e *env) {
		i := &interceptor{begin: instead("select pg_terminate_backend(pg_backend_pid())")}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		_, err := g.BeginTx(e.Context(), nil)
		e.bare(err, "57P01")
		if n := g.pool.Stat().NewConnsCount(); n < 1 || n > 10 {
			e.Errorf("%d connections were made", n)
		}
		i.begin = nil
		g.whole(1)
	}},
	{70, beginRefused, "", "BEGIN that the caller's deadline cuts off is the caller's DeadlineExceeded", func(e *env) {
		i := &interceptor{begin: instead("select pg_sleep(60)")}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		ctx, cancel := context.WithTimeout(e.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := g.BeginTx(ctx, nil)
		e.is(err, context.DeadlineExceeded)
		i.begin = nil
		g.whole(1)
	}},
}

const commitFails = "COMMIT that fails"

var commits = []condition{
	{71, commitFails, "", "A deferred constraint that fails in COMMIT is the server's error; rolled back, connection kept", func(e *env) {
		e.see.Exec("create table t (id int unique deferrable initially deferred)")
		g := e.open(1, 1)
		tx := g.begin()
		pid := e.pid(tx)
		e.exec(tx, "insert into t values (1), (1)")
		err := tx.Commit()
		e.bare(err, "23505")
		g.runs(0)
		if e.pid(g) != pid {
			e.Error("the connection was not kept")
		}
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows", n)
		}
	}},
	{72, commitFails, "", "A serialization failure (40001), also in COMMIT, is the server's error; one of two commits", func(e *env) {
		e.see.Exec("create table t (side int, n int); insert into t values (1, 1), (2, 1)")
		g := e.open(2, 2)
		o := &sql.TxOptions{Isolation: sql.LevelSerializable}
		a, err := g.BeginTx(e.Context(), o)
		e.must(err)
		b, err := g.BeginTx(e.Context(), o)
		e.must(err)
		_, _ = scan[int](e, a, "select sum(n) from t where side = 1"), scan[int](e, b, "select sum(n) from t where side = 2")
		e.exec(a, "update t set n = 2 where side = 2")
		e.exec(b, "update t set n = 2 where side = 1")
		e.must(a.Commit())
		e.bare(b.Commit(), "40001")
		g.whole(2)
	}},
	{73, commitFails, "E03", "COMMIT that runs into a limit of the server's is its error, nothing is committed, and who comes next starts clean", func(e *env) {
		e.see.Exec(`create table t (id int); create table locked ();
create function lock_it() returns trigger language plpgsql as $$ begin lock table locked; return null; end $$;
create constraint trigger late after insert on t deferrable initially deferred for each row execute function lock_it()`)
		g := e.open(2, 2)
		holder := g.begin()
		e.exec(holder, "lock table locked")
		tx := g.begin()
		pid := e.pid(tx)
		e.exec(tx, "insert into t values (1)")
		e.exec(tx, "set local lock_timeout = 50")
		e.bare(tx.Commit(), "55P03")
		next := g.begin()
		if n := scan[int](e, next, "select count(*) from t"); n != 0 || e.pid(next) != pid {
			e.Errorf("%d rows, or the connection was not kept", n)
		}
		e.must(next.Commit())
		e.must(holder.Rollback())
	}},
	{74, commitFails, "E03", "A backend killed during COMMIT is ErrOutcomeUnknown, never retried, and the permit is back once", func(e *env) {
		e.see.slowCommit("60")
		g := e.open(1, 2)
		tx := g.begin()
		pid := e.pid(tx)
		e.exec(tx, "insert into slow values (1)")
		got := later(tx.Commit)
		e.see.working(pid, "commit")
		e.see.terminate(pid)
		e.is(soon(e, got), pgxgated.ErrOutcomeUnknown)
		g.whole(1)
		if n := e.see.Int("select count(*) from slow"); n != 0 {
			e.Errorf("%d rows: it was sent again", n)
		}
	}},
	{75, commitFails, "", "Past gate_commit_timeout COMMIT is ErrOutcomeUnknown, and the permit is back when the backend is gone", func(e *env) {
		e.see.slowCommit("60")
		g := e.open(1, 2, pgxgated.WithCommitTimeout(100*time.Millisecond))
		ctx, cancel := context.WithTimeout(e.Context(), 3*time.Second)
		defer cancel()
		tx, err := g.BeginTx(ctx, nil)
		e.must(err)
		pid := e.pid(tx)
		e.exec(tx, "insert into slow values (1)")
		e.is(tx.Commit(), pgxgated.ErrOutcomeUnknown)
		g.released(func() {
			if e.see.there(pid) {
				e.Error("its permit came back while its backend was there")
			}
		})
	}},
	{76, commitFails, "", "ResolveOutcome says what became of an unknown outcome that was tracked", func(e *env) {
		e.see.slowCommit("60")
		g := e.open(1, 2, pgxgated.WithOutcomeTracking())
		tx := g.begin()
		pid := e.pid(tx)
		e.exec(tx, "insert into slow values (1)")
		got := later(tx.Commit)
		e.see.working(pid, "commit")
		e.see.terminate(pid)
		err := soon(e, got)
		e.is(err, pgxgated.ErrOutcomeUnknown)
		if o, err := pgxgated.ResolveOutcome(e.Context(), g.DB, err); o != pgxgated.OutcomeRolledBack || err != nil {
			e.Errorf("%v, %v", o, err)
		}
	}},
	{77, commitFails, "", "A backend killed before COMMIT: Commit fails, nothing is committed, and driver.ErrBadConn is not what the caller sees", func(e *env) {
		e.see.Exec("create table t (id int)")
		g := e.open(1, 2)
		for _, noticed := range []bool{false, true} {
			tx := g.begin()
			e.exec(tx, "insert into t values (1)")
			e.see.terminate(e.pid(tx))
			if noticed {
				_, err := tx.Exec("select 1")
				e.bare(err, "57P01")
			}
			err := tx.Commit()
			if err == nil {
				e.Error("Commit gave no error")
			}
			e.public(err)
			if noticed && errors.Is(err, pgxgated.ErrOutcomeUnknown) {
				e.Error("COMMIT was never sent, so the outcome is known")
			}
			g.whole(1)
		}
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows", n)
		}
	}},
}

const interceptorPanics = "Interceptors that misbehave"

var interceptorsThatPanic = []condition{
	{78, interceptorPanics, "A06", "A panic before BEGIN, ten times, reaches the caller unchanged, and the full limit is there again", func(e *env) {
		i := &interceptor{begin: func(context.Context, driver.ConnBeginTx) error { panic("mine") }}
		g := e.open(2, 3, pgxgated.WithInterceptors(i))
		for range 10 {
			e.panics(func() { _, _ = g.BeginTx(e.Context(), nil) })
			g.idle()
		}
		i.begin = nil
		g.whole(2)
	}},
	{79, interceptorPanics, "", "A panic in a statement, a query, a prepare, a COMMIT or a ROLLBACK costs the connection, never a permit", func(e *env) {
		boom := func() error { panic("mine") }
		end := func(driver.Tx) error { panic("mine") }
		i := &interceptor{}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		for what, c := range map[string]struct {
			set func()
			do  func()
		}{
			"exec":     {func() { i.exec = func(driver.ExecerContext) error { return boom() } }, func() { _, _ = g.Exec("select 1") }},
			"query":    {func() { i.query = boom }, func() { _, _ = g.Query("select 1") }},
			"prepare":  {func() { i.prepare = boom }, func() { _, _ = g.Prepare("select 77") }},
			"commit":   {func() { i.commit = end }, func() { _ = g.begin().Commit() }},
			"rollback": {func() { i.rollback = end }, func() { _ = g.begin().Rollback() }},
		} {
			pid := e.pid(g)
			c.set()
			e.panics(c.do)
			*i = interceptor{}
			g.whole(1)
			if e.see.there(pid) {
				e.Errorf("%s: the connection is still there", what)
			}
		}
	}},
	{80, interceptorPanics, "", "An interceptor that answers driver.ErrBadConn: the caller never sees it, not from Exec, Query, BeginTx, Commit or Rollback", func(e *env) {
		bad := func() error { return driver.ErrBadConn }
		i := &interceptor{}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		set := func(to interceptor, do func() error) {
			*i = to
			err := do()
			*i = interceptor{}
			if err == nil {
				e.Error("no error")
			}
			e.public(err)
			g.idle()
		}
		set(interceptor{exec: func(driver.ExecerContext) error { return bad() }}, func() error { _, err := g.Exec("select 1"); return err })
		set(interceptor{query: bad}, func() error { _, err := g.Query("select 1"); return err })
		set(interceptor{prepare: bad}, func() error { _, err := g.Prepare("select 78"); return err })
		set(interceptor{begin: func(context.Context, driver.ConnBeginTx) error { return bad() }}, func() error { _, err := g.Begin(); return err })
		set(interceptor{commit: func(driver.Tx) error { return bad() }}, func() error { return g.begin().Commit() })
		set(interceptor{rollback: func(driver.Tx) error { return bad() }}, func() error { return g.begin().Rollback() })
		g.whole(1)
	}},
	{81, interceptorPanics, "", "Where a connection is lost and an interceptor calls that driver.ErrBadConn, Ping, Commit and Rollback do not say so either", func(e *env) {
		i := &interceptor{}
		g := e.open(1, 2, pgxgated.WithInterceptors(i))
		lose := func(r runner, pid int) {
			e.see.terminate(pid)
			i.exec = func(driver.ExecerContext) error { return driver.ErrBadConn }
			_, err := r.ExecContext(e.Context(), "select 1")
			i.exec = nil
			if err == nil {
				e.Error("no error")
			}
			e.public(err)
		}
		for _, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
			tx := g.begin()
			lose(tx, e.pid(tx))
			err := end(tx)
			if err == nil {
				e.Error("no error")
			}
			e.public(err)
			g.whole(1)
		}
		c := g.conn()
		lose(c, e.pid(c))
		err := c.PingContext(e.Context())
		if err == nil {
			e.Error("no error")
		}
		e.public(err)
		e.must(c.Close())
		g.whole(1)
	}},
}

// panics runs f, which has to panic with "mine".
func (e *env) panics(f func()) {
	e.Helper()
	defer func() {
		if v := recover(); v != "mine" {
			e.Errorf("panic %v", v)
		}
	}()
	f()
}

var panics = append(callersThatPanic, interceptorsThatPanic...)
