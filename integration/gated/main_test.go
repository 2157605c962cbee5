// Package gated tests the driver on a real PostgreSQL.
//
// Each test has a rig: a gated database over a pool of its own, and a connection past the gate that asks the server what
// is true. When a test ends nothing runs, waits or drains, no physical connection is out, and no goroutine is left.
package gated

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"database/sql/driver"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.M{M: m}) }

// bound is how long a condition may take that is bound to come. Nothing is measured with it.
const bound = 30 * time.Second

// rig is a gated database over a pool of its own.
type rig struct {
	*sql.DB
	t    *testing.T
	dsn  string
	gate *pgxgated.Gate
	pool *pgxpool.Pool
	see  *truth
	log  *logs
}

// setup says what a rig is made of.
type setup struct {
	dsn    string                // default: the shared server's
	b, p   int                   // default 1 and 2
	limits *pgxgated.Limits      // default: b running, 100 waiting, for up to bound
	pool   func(*pgxpool.Config) // changes to the pool
	opts   []pgxgated.Option
}

var rigs atomic.Int64

func newRig(t *testing.T, s setup) *rig {
	t.Helper()
	leakFree(t)
	if s.dsn == "" {
		s.dsn = pgtest.Shared(t).DSN()
	}
	if s.b == 0 {
		s.b = 1
	}
	if s.p == 0 {
		s.p = s.b + 1
	}
	cfg, err := pgxpool.ParseConfig(s.dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = int32(s.p)
	cfg.ConnConfig.RuntimeParams["application_name"] = fmt.Sprintf("rig %d", rigs.Add(1))
	if s.pool != nil {
		s.pool(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dsn: s.dsn, pool: pool, see: newTruth(t, s.dsn), log: &logs{}}
	limits := pgxgated.Limits{Running: s.b, Waiting: 100, MaxWait: bound}
	if s.limits != nil {
		limits = *s.limits
	}
	opts := append([]pgxgated.Option{
		pgxgated.WithLimits(limits), pgxgated.WithLogger(slog.New(slog.NewTextHandler(r.log, nil))),
	}, s.opts...)
	r.DB, err = pgxgated.OpenDBFromPool(pool, opts...)
	if err != nil {
		pool.Close()
		t.Fatal(err)
	}
	r.gate = pgxgated.GateOf(r.DB)
	t.Cleanup(func() {
		r.idle()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		pool.Close()
		if t.Failed() {
			t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// newDBRig is a rig with B=1 over a *sql.DB of pgx's own driver instead of a pgxpool.
func newDBRig(t *testing.T, opts ...pgxgated.Option) *rig {
	t.Helper()
	leakFree(t)
	dsn := pgtest.Shared(t).DSN()
	inner, err := sql.Open("pgx", dsn)
	must(t, err)
	inner.SetMaxOpenConns(2)
	r := &rig{t: t, dsn: dsn, see: newTruth(t, dsn), log: &logs{}}
	r.DB, err = pgxgated.OpenDB(inner, append([]pgxgated.Option{
		pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 100, MaxWait: bound}),
		pgxgated.WithLogger(slog.New(slog.NewTextHandler(r.log, nil))),
	}, opts...)...)
	must(t, err)
	r.gate = pgxgated.GateOf(r.DB)
	t.Cleanup(func() {
		r.idle()
		eventually(t, "all connections are back", func() error {
			if n := inner.Stats().InUse; n != 0 {
				return fmt.Errorf("%d are out", n)
			}
			return nil
		})
		if err := errors.Join(r.Close(), inner.Close()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// idle waits until nothing runs, waits or drains and no physical connection is out, and fails the test if it never comes.
func (r *rig) idle() {
	r.t.Helper()
	idle(r.t, r.gate, r.pool)
}

func idle(t *testing.T, g *pgxgated.Gate, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, "everything is 0", func() error {
		s := g.Stats()
		out := int32(0)
		if pool != nil {
			out = pool.Stat().AcquiredConns()
		}
		if s.Running != 0 || s.Waiting != 0 || s.Draining != 0 || out != 0 {
			return fmt.Errorf("running %d, waiting %d, draining %d, %d connections out", s.Running, s.Waiting, s.Draining, out)
		}
		return nil
	})
}

// eventually polls until f returns nil.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("not within %v: %s: %v", bound, what, err)
}

// leakFree fails the test if it leaves a goroutine. Call it first: it looks when all other clean-ups are done.
func leakFree(t *testing.T) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction(pgtest.HoldThread)) })
}

// truth asks the server past every gate.
type truth struct {
	*pgtest.Observer
	t *testing.T
}

func newTruth(t *testing.T, dsn string) *truth {
	t.Helper()
	return &truth{pgtest.Observe(t, dsn), t}
}

// backend is one server process.
type backend struct {
	pid   int
	start time.Time
}

const whoami = "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"

type queryer interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// backendOf is the server process behind q.
func backendOf(t *testing.T, q queryer) (b backend) {
	t.Helper()
	if err := q.QueryRowContext(context.Background(), whoami).Scan(&b.pid, &b.start); err != nil {
		t.Fatal(err)
	}
	return b
}

// there tells whether the backend still exists.
func (s *truth) there(b backend) bool {
	s.t.Helper()
	return s.Int("select count(*) from pg_stat_activity where pid = $1 and backend_start = $2", b.pid, b.start) > 0
}

// state is what pg_stat_activity says of the backend: "active", "idle in transaction", "" if it is gone.
func (s *truth) state(b backend) (state string) {
	s.t.Helper()
	err := s.Scan([]any{&state}, "select coalesce(state, '') from pg_stat_activity where pid = $1 and backend_start = $2", b.pid, b.start)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		s.t.Fatal(err)
	}
	return state
}

// working waits until the backend sleeps in the statement, or in COPY waits for its client: one that has only just begun would
// honour a cancel that it swallows later.
func (s *truth) working(b backend, statement string) {
	s.t.Helper()
	eventually(s.t, "the backend is at work", func() error {
		if s.Int("select count(*) from pg_stat_activity where pid = $1 and state = 'active' and query like $2 and wait_event in ('PgSleep', 'ClientRead')",
			b.pid, "%"+statement+"%") == 1 {
			return nil
		}
		return errors.New(s.state(b))
	})
}

// free tells whether nobody holds the advisory lock.
func (s *truth) free(key int) bool {
	s.t.Helper()
	return s.Int("select count(*) from pg_locks where locktype = 'advisory' and objid = $1 and granted", key) == 0
}

// terminate ends a backend from outside and waits until it is gone.
func (s *truth) terminate(b backend) {
	s.t.Helper()
	s.Exec("select pg_terminate_backend($1)", b.pid)
	eventually(s.t, "the terminated backend is gone", func() error {
		if s.there(b) {
			return errors.New("still there")
		}
		return nil
	})
}

// released waits for the permit of whatever holds the gate of one permit, and calls f at the very moment it comes back.
func (r *rig) released(f func()) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	p, err := r.gate.Acquire(ctx)
	if err != nil {
		r.t.Fatalf("the permit never came back: %v", err)
	}
	defer p.Release()
	f()
}

// public fails the test if err is one that no caller may ever see (I11).
func public(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, driver.ErrBadConn) {
		t.Errorf("driver.ErrBadConn reached the caller: %v", err)
	}
}

// bare fails the test unless err is the server's own error, not wrapped (I9), with the code.
func bare(t *testing.T, err error, code string) {
	t.Helper()
	e, ok := err.(*pgconn.PgError) //nolint:errorlint // that is the point
	if !ok || e.Code != code {
		t.Errorf("error is %T %v, want a bare *pgconn.PgError %s", err, err, code)
	}
}

// logs keeps what was logged.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
