package contract

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// bound is how long what is bound to come may take. Nothing is measured with it.
const bound = 30 * time.Second

// env is what a condition has: a database of its own, an observer past every gate, and the gated databases it opens.
type env struct {
	*testing.T
	server *pgtest.Server
	dsn    string
	see    *observer
	opened []*gated
}

func newEnv(t *testing.T) *env {
	t.Helper()
	server := pgtest.Shared(t)
	e := &env{T: t, server: server, dsn: server.Database(t)}
	e.see = &observer{pgtest.Observe(t, e.dsn), e}
	t.Cleanup(e.close) // where the condition failed before done
	return e
}

// gated is a gated database that a condition opened.
type gated struct {
	*sql.DB
	e      *env
	gate   *pgxgated.Gate
	pool   *pgxpool.Pool // nil: the driver's own
	log    *logs
	closed bool
}

// setup says what is opened.
type setup struct {
	b, p    int // running permits and physical connections
	waiting int // 0: 100; negative: 0
	maxWait time.Duration
	pool    func(*pgxpool.Config)
	opts    []pgxgated.Option
}

// open opens a gated database with b running permits over p physical connections. Nobody waits in vain: MaxWait is bound.
func (e *env) open(b, p int, opts ...pgxgated.Option) *gated {
	e.Helper()
	return e.openWith(setup{b: b, p: p, opts: opts})
}

func (e *env) openWith(s setup) *gated {
	e.Helper()
	cfg, err := pgxpool.ParseConfig(e.dsn)
	e.must(err)
	cfg.MaxConns = int32(s.p)
	if s.pool != nil {
		s.pool(cfg)
	}
	pool, err := pgxpool.NewWithConfig(e.Context(), cfg)
	e.must(err)
	l := pgxgated.Limits{Running: s.b, Waiting: 100, MaxWait: bound}
	if s.waiting != 0 {
		l.Waiting = max(s.waiting, 0)
	}
	if s.maxWait != 0 {
		l.MaxWait = s.maxWait
	}
	log := &logs{}
	opts := append([]pgxgated.Option{pgxgated.WithLimits(l), pgxgated.WithLogger(log.logger())}, s.opts...)
	db, err := pgxgated.OpenDBFromPool(pool, opts...)
	if err != nil {
		pool.Close()
		e.Fatal(err)
	}
	return e.adopt(db, pool, log)
}

// openDSN opens one by its DSN, with these keys and values added.
func (e *env) openDSN(keysAndValues ...string) *gated {
	e.Helper()
	db, err := sql.Open(pgxgated.DriverName, e.with(keysAndValues...))
	e.must(err)
	return e.adopt(db, nil, &logs{})
}

func (e *env) with(keysAndValues ...string) string {
	dsn := e.dsn
	for i := 0; i < len(keysAndValues); i += 2 {
		dsn = pgtest.With(dsn, keysAndValues[i], keysAndValues[i+1])
	}
	return dsn
}

func (e *env) adopt(db *sql.DB, pool *pgxpool.Pool, log *logs) *gated {
	g := &gated{DB: db, e: e, gate: pgxgated.GateOf(db), pool: pool, log: log}
	e.opened = append(e.opened, g)
	return g
}

// done is the end of every condition: everything is 0, and once it is closed the server has no session left.
func (e *env) done() {
	e.Helper()
	for _, g := range e.opened {
		g.idle()
	}
	e.close()
	e.eventually("no session is left on the server", func() error {
		if n := e.see.Int("select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"); n != 0 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
}

func (e *env) close() {
	for _, g := range e.opened {
		g.close()
		if e.Failed() && g.log.String() != "" {
			e.Logf("log:\n%s", g.log)
		}
	}
	e.opened = nil
}

func (g *gated) close() {
	if g.closed {
		return
	}
	g.closed = true
	if err := g.Close(); err != nil {
		g.e.Error(err)
	}
	if g.pool != nil {
		g.pool.Close()
	}
}

// idle waits until nothing runs, waits or drains and no physical connection is out.
func (g *gated) idle() {
	g.e.Helper()
	g.e.eventually("everything is 0", func() error {
		s := g.gate.Stats()
		out := int32(0)
		if g.pool != nil {
			out = g.pool.Stat().AcquiredConns()
		}
		if s.Running != 0 || s.Waiting != 0 || s.Draining != 0 || out != 0 {
			return fmt.Errorf("running %d, waiting %d, draining %d, %d connections out", s.Running, s.Waiting, s.Draining, out)
		}
		return nil
	})
}

func (e *env) eventually(what string, f func() error) {
	e.Helper()
	var err error
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	e.Fatalf("not within %v: %s: %v", bound, what, err)
}

// gauges waits until as many run and wait.
func (g *gated) gauges(running, waiting int) {
	g.e.Helper()
	g.e.eventually(fmt.Sprintf("%d running, %d waiting", running, waiting), func() error {
		if s := g.gate.Stats(); s.Running != running || s.Waiting != waiting {
			return fmt.Errorf("%d running, %d waiting", s.Running, s.Waiting)
		}
		return nil
	})
}

// runs fails the condition unless exactly n run at this moment.
func (g *gated) runs(n int) {
	g.e.Helper()
	if s := g.gate.Stats(); s.Running != n {
		g.e.Errorf("running %d, want %d", s.Running, n)
	}
}

func (g *gated) begin() *sql.Tx {
	g.e.Helper()
	tx, err := g.BeginTx(g.e.Context(), nil)
	g.e.must(err)
	return tx
}

func (g *gated) conn() *sql.Conn {
	g.e.Helper()
	c, err := g.Conn(g.e.Context())
	g.e.must(err)
	return c
}

// fill is begin for as many as may run, one more than which would wait.
func (g *gated) fill(n int) []*sql.Tx {
	g.e.Helper()
	txs := make([]*sql.Tx, n)
	for i := range txs {
		txs[i] = g.begin()
	}
	g.runs(n)
	return txs
}

// whole proves that the whole limit of n is to be had again, and not one more.
func (g *gated) whole(n int) {
	g.e.Helper()
	g.idle()
	txs := g.fill(n)
	_, err := g.BeginTx(pgxgated.WithMaxWait(g.e.Context(), 0), nil)
	g.e.is(err, pgxgated.ErrRejected)
	for _, tx := range txs {
		g.e.must(tx.Rollback())
	}
	g.idle()
}

type runner interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func (e *env) exec(r runner, query string, args ...any) {
	e.Helper()
	_, err := r.ExecContext(e.Context(), query, args...)
	e.must(err)
}

func scan[T any](e *env, r runner, query string, args ...any) (v T) {
	e.Helper()
	e.must(r.QueryRowContext(e.Context(), query, args...).Scan(&v))
	return v
}

// pid is the backend behind r.
func (e *env) pid(r runner) int {
	e.Helper()
	return scan[int](e, r, "select pg_backend_pid()")
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("%T %v", err, err)
	}
}

// is fails the condition unless err matches all of these, and nothing that must never reach a caller.
func (e *env) is(err error, want ...error) {
	e.Helper()
	for _, w := range want {
		if !errors.Is(err, w) {
			e.Errorf("error is %T %v, want %v", err, err, w)
		}
	}
	e.public(err)
}

// public: driver.ErrBadConn reaches nobody.
func (e *env) public(err error) {
	e.Helper()
	if errors.Is(err, driver.ErrBadConn) {
		e.Errorf("driver.ErrBadConn reached the caller: %v", err)
	}
}

// bare fails the condition unless err is the server's own error, not wrapped.
func (e *env) bare(err error, code string) {
	e.Helper()
	if p, ok := err.(*pgconn.PgError); !ok || p.Code != code { //nolint:errorlint // that is the point
		e.Errorf("error is %T %v, want a bare *pgconn.PgError %s", err, err, code)
	}
}

// ended: the caller's context ended it, in one of the two ways that database/sql has of saying so.
func (e *env) ended(err error) {
	e.Helper()
	if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, sql.ErrTxDone) {
		e.Errorf("error is %T %v, want the context's or sql.ErrTxDone", err, err)
	}
	if errors.Is(err, pgxgated.ErrRejected) {
		e.Errorf("a refusal: %v", err)
	}
	e.public(err)
}

// later runs f, and returns its error later.
func later(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- f() }()
	return c
}

// soon waits for what is bound to come.
func soon[T any](e *env, c <-chan T) (v T) {
	e.Helper()
	select {
	case v = <-c:
	case <-time.After(bound):
		e.Fatalf("nothing within %v", bound)
	}
	return v
}

// released waits for the permit of whoever holds the only one, and runs f at the moment it comes back.
func (g *gated) released(f func()) {
	g.e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	p, err := g.gate.Acquire(ctx)
	if err != nil {
		g.e.Fatalf("the permit never came back: %v", err)
	}
	defer p.Release()
	f()
}

// observer asks the server past every gate.
type observer struct {
	*pgtest.Observer
	e *env
}

// working waits until the backend is in a statement with this text, and sleeps in it: its text shows before it has begun.
func (o *observer) working(pid int, text string) {
	o.e.Helper()
	o.e.eventually("the backend is at work", func() error {
		if o.Int("select count(*) from pg_stat_activity where pid = $1 and state = 'active' and query like '%' || $2 || '%' and wait_event in ('PgSleep', 'ClientRead')", pid, text) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
}

func (o *observer) there(pid int) bool {
	o.e.Helper()
	return o.Int("select count(*) from pg_stat_activity where pid = $1", pid) > 0
}

// terminate ends a backend from outside and waits until it is gone.
func (o *observer) terminate(pid int) {
	o.e.Helper()
	o.Exec("select pg_terminate_backend($1)", pid)
	o.e.eventually("the terminated backend is gone", func() error {
		if o.there(pid) {
			return errors.New("still there")
		}
		return nil
	})
}

// free tells whether nobody holds the advisory lock.
func (o *observer) free(key int) bool {
	o.e.Helper()
	return o.Int(`select count(*) from pg_locks l join pg_database d on d.oid = l.database
		where d.datname = current_database() and locktype = 'advisory' and objid = $1 and granted`, key) == 0
}

// slowCommit makes a table whose inserts make COMMIT take so many seconds.
func (o *observer) slowCommit(seconds string) {
	o.Exec(`create table slow (id int);
create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(` + seconds + `); return null; end $$;
create constraint trigger slow after insert on slow deferrable initially deferred for each row execute function slow()`)
}

// role makes a login role for this condition, whose connections may be limited, and returns the condition's DSN for it.
func (e *env) role(password string, connections int) string {
	e.Helper()
	name := "role_" + e.see.name()
	e.see.Exec(fmt.Sprintf("create role %s login password '%s' connection limit %d", name, password, connections))
	e.Cleanup(func() { e.see.Exec("drop owned by " + name + "; drop role " + name) })
	u, err := url.Parse(e.dsn)
	e.must(err)
	u.User = url.UserPassword(name, password)
	return u.String()
}

func (o *observer) name() string { return o.Conn.Config().Database }

// logs keeps what was logged.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logs) count(text string) int { return strings.Count(l.String(), text) }
