// Package faults breaks the network, the server and its sessions under load, and asks the server afterwards whether the
// driver kept its promises: never more than Running operations at work (I6), every permit and connection back (I3, I7), no
// transaction applied by half or twice, every outcome as the caller was told, no caller that waits beyond its bounds, and
// the throughput of before.
//
// PGXGATED_LONG=1 makes the faults last longer.
package faults

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Most of the time is spent waiting for a server that does not answer.
	_ = flag.Set("test.parallel", "5")
	// Toxiproxy leaves the goroutine of a link behind that was cut while it had data to hand on: it sends on a channel from
	// which nobody takes any more.
	goleak.VerifyTestMain(pgtest.M{M: m}, goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"))
}

// bound is how long what is bound to come may take. Nothing is measured with it.
const bound = 90 * time.Second

// long tells whether the faults shall last longer.
func long() bool { return os.Getenv("PGXGATED_LONG") == "1" }

// longer is d, or l with PGXGATED_LONG=1.
func longer(d, l time.Duration) time.Duration {
	if long() {
		return l
	}
	return d
}

// gated is a gated database over a pool of its own.
type gated struct {
	*sql.DB
	t    *testing.T
	gate *pgxgated.Gate
	pool *pgxpool.Pool
	log  *logs
}

func open(t *testing.T, dsn string, l pgxgated.Limits, p int, change func(*pgxpool.Config), opts ...pgxgated.Option) *gated {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	cfg.MaxConns = int32(p)
	cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	if change != nil {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	g := &gated{t: t, pool: pool, log: &logs{}}
	g.DB, err = pgxgated.OpenDBFromPool(pool, append([]pgxgated.Option{
		pgxgated.WithLimits(l), pgxgated.WithLogger(slog.New(slog.NewTextHandler(g.log, nil))),
	}, opts...)...)
	if err != nil {
		pool.Close()
		t.Fatal(err)
	}
	g.gate = pgxgated.GateOf(g.DB)
	t.Cleanup(func() {
		g.idle()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		pool.Close()
		if t.Failed() {
			t.Logf("log:\n%s", g.log)
		}
	})
	return g
}

// one is open with a single running permit for which everybody waits as long as it takes.
func one(t *testing.T, dsn string, p int, change func(*pgxpool.Config), opts ...pgxgated.Option) *gated {
	t.Helper()
	return open(t, dsn, pgxgated.Limits{Running: 1, Waiting: 100, MaxWait: bound}, p, change, opts...)
}

// idle waits until nothing runs, waits or drains and no physical connection is out.
func (g *gated) idle() {
	g.t.Helper()
	eventually(g.t, "everything is 0", func() error {
		s := g.gate.Stats()
		if out := g.pool.Stat().AcquiredConns(); s.Running != 0 || s.Waiting != 0 || s.Draining != 0 || out != 0 {
			return fmt.Errorf("running %d, waiting %d, draining %d, %d connections out", s.Running, s.Waiting, s.Draining, out)
		}
		return nil
	})
}

// released waits for the only permit, and calls f at the moment it comes back.
func (g *gated) released(f func()) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	p, err := g.gate.Acquire(ctx)
	if err != nil {
		g.t.Fatalf("the permit never came back: %v", err)
	}
	defer p.Release()
	f()
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("not within %v: %s: %v", bound, what, err)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// later runs f, and returns its error later.
func later(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- f() }()
	return c
}

// observer asks the server past every gate and every proxy.
type observer struct {
	*pgtest.Observer
	t *testing.T
}

func observe(t *testing.T, dsn string) *observer {
	t.Helper()
	return &observer{pgtest.Observe(t, dsn), t}
}

func (o *observer) there(pid int) bool {
	o.t.Helper()
	return o.Int("select count(*) from pg_stat_activity where pid = $1", pid) > 0
}

func (o *observer) gone(pid int) {
	o.t.Helper()
	eventually(o.t, "the backend is gone", func() error {
		if o.there(pid) {
			return errors.New("it is there")
		}
		return nil
	})
}

// working waits until the backend is in a statement with this text, and sleeps in it: its text shows before it has begun.
func (o *observer) working(pid int, text string) {
	o.t.Helper()
	eventually(o.t, "the backend is at work", func() error {
		if o.Int("select count(*) from pg_stat_activity where pid = $1 and state = 'active' and query like '%' || $2 || '%' and wait_event in ('PgSleep', 'ClientRead')", pid, text) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
}

func pidOf(t *testing.T, q interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}) (pid int) {
	t.Helper()
	must(t, q.QueryRowContext(context.Background(), "select pg_backend_pid()").Scan(&pid))
	return pid
}

// withHost is dsn with another host and port.
func withHost(dsn, host string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	u.Host = host
	return u.String()
}

func hostOf(dsn string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	return u.Host
}

// toxic is a toxiproxy between the driver and a server.
type toxic struct {
	t     *testing.T
	proxy *toxiproxy.Proxy
	on    []string
}

func newToxic(t *testing.T, dsn string) *toxic {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop())
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that stays the same when the proxy is cut and restored
	must(t, err)
	addr := l.Addr().String()
	must(t, l.Close())
	x := &toxic{t: t, proxy: toxiproxy.NewProxy(server, t.Name(), addr, hostOf(dsn))}
	must(t, x.proxy.Start())
	t.Cleanup(func() {
		x.clear()
		x.proxy.Stop()
	})
	return x
}

func (x *toxic) addr() string { return x.proxy.Listen }

// add makes the network sick in both directions.
func (x *toxic) add(kind, attributes string) {
	x.t.Helper()
	for _, stream := range []string{"upstream", "downstream"} {
		w, err := x.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": {%s}}`, kind, stream, attributes)))
		must(x.t, err)
		x.on = append(x.on, w.Name)
	}
}

func (x *toxic) clear() {
	for _, name := range x.on {
		if err := x.proxy.Toxics.RemoveToxic(context.Background(), name); err != nil {
			x.t.Error(err)
		}
	}
	x.on = nil
}

// cut closes all connections and refuses new ones, until restore.
func (x *toxic) cut() { x.proxy.Stop() }

func (x *toxic) restore() {
	if err := x.proxy.Start(); err != nil {
		x.t.Errorf("the proxy does not start again: %v", err)
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
