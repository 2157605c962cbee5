// Package admission tests on a real PostgreSQL what decides who gets in and what callers may rely on afterwards: InTx,
// unknown outcomes, the server-side deadline, Check, workloads, and goodput under deadlines.
package admission

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.M{M: m}) }

// bound is how long a condition may take that is bound to come. Nothing is measured with it.
const bound = 30 * time.Second

// long tells that there is time for figures that mean something.
func long() bool { return os.Getenv("PGXGATED_LONG") == "1" }

// rig is a gated database over a pool of its own.
type rig struct {
	*sql.DB
	t    *testing.T
	gate *pgxgated.Gate
	pool *pgxpool.Pool
}

// newRig gates a pool of p connections at dsn with limits l. The test ends with everything back and no goroutine left.
func newRig(t *testing.T, dsn string, p int, l pgxgated.Limits, opts ...pgxgated.Option) *rig {
	t.Helper()
	leakFree(t)
	cfg, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	cfg.MaxConns = int32(p)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	db, err := pgxgated.OpenDBFromPool(pool, append([]pgxgated.Option{pgxgated.WithLimits(l)}, opts...)...)
	must(t, err)
	r := &rig{DB: db, t: t, gate: pgxgated.GateOf(db), pool: pool}
	t.Cleanup(func() {
		r.idle()
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		pool.Close()
	})
	return r
}

// one is a gate of one permit and a pool with one connection to spare.
func one(t *testing.T, dsn string, opts ...pgxgated.Option) *rig {
	t.Helper()
	return newRig(t, dsn, 2, pgxgated.Limits{Running: 1, Waiting: 10, MaxWait: bound}, opts...)
}

// busy tells what is not back, nil if everything is.
func (r *rig) busy() error {
	s, out := r.gate.Stats(), r.pool.Stat().AcquiredConns()
	if s.Running != 0 || s.Waiting != 0 || s.Draining != 0 || out != 0 {
		return fmt.Errorf("running %d, waiting %d, draining %d, %d connections out", s.Running, s.Waiting, s.Draining, out)
	}
	return nil
}

// idle waits until everything is back.
func (r *rig) idle() {
	r.t.Helper()
	eventually(r.t, "everything is 0", r.busy)
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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
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

// becomes waits until the query counts want.
func (s *truth) becomes(what string, want int, query string, args ...any) {
	s.t.Helper()
	eventually(s.t, what, func() error {
		if n := s.Int(query, args...); n != want {
			return fmt.Errorf("%d, want %d", n, want)
		}
		return nil
	})
}

type queryer interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func pidOf(t *testing.T, q queryer) (pid int) {
	t.Helper()
	must(t, q.QueryRowContext(context.Background(), "select pg_backend_pid()").Scan(&pid))
	return pid
}

// bare fails the test unless err is the server's own error with the code, not wrapped (I9).
func bare(t *testing.T, err error, code string) {
	t.Helper()
	if e, ok := err.(*pgconn.PgError); !ok || e.Code != code { //nolint:errorlint // that is the point
		t.Errorf("error is %T %v, want a bare *pgconn.PgError %s", err, err, code)
	}
}

// expiring has a deadline, which code may ask for, that never comes.
type expiring struct {
	context.Context
	at time.Time
}

func (e expiring) Deadline() (time.Time, bool) { return e.at, true }

// deadlineIn is a context whose caller has a deadline but never goes away, as if its clock stood still.
func deadlineIn(d time.Duration) context.Context {
	return expiring{context.Background(), time.Now().Add(d)}
}

// proxy stands between the driver and the server. It counts what passes, and fails in the ways of a network.
type proxy struct {
	l      net.Listener
	target string

	mu     sync.Mutex // guards what follows
	conns  map[net.Conn]bool
	sent   []string // what clients asked: the texts of Query and Parse messages
	trips  int      // answers that were complete: one for each round trip
	fail   failure
	on     string        // what it happens to
	frozen chan struct{} // open while nothing is forwarded
	wg     sync.WaitGroup
}

// failure is what happens to the next COMMIT, or another statement.
type failure int

const (
	none      failure = iota
	cutBefore         // the connection breaks before the server has it
	cutAfter          // the server has answered, and the connection breaks
	swallow           // the server has answered, and nobody hears of it
)

func newProxy(t *testing.T, dsn string) *proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	must(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{l: l, target: u.Host, conns: make(map[net.Conn]bool)}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.thaw()
		p.breakAll()
		p.wg.Wait()
	})
	return p
}

// through is dsn by way of the proxy.
func (p *proxy) through(dsn string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	u.Host = p.l.Addr().String()
	return u.String()
}

// next says what becomes of the next COMMIT.
func (p *proxy) next(f failure) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail, p.on = f, "commit"
}

// nextOn is next for what begins with text.
func (p *proxy) nextOn(text string, f failure) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail, p.on = f, text
}

// reset forgets what was counted.
func (p *proxy) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent, p.trips = nil, 0
}

func (p *proxy) roundTrips() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.trips
}

// count is how often clients asked something that begins with text.
func (p *proxy) count(text string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sent {
		if strings.HasPrefix(s, text) {
			n++
		}
	}
	return n
}

// freeze stops forwarding, as if the client's machine stood still; thaw goes on.
func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen = make(chan struct{})
}

func (p *proxy) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.frozen != nil {
		close(p.frozen)
		p.frozen = nil
	}
}

func (p *proxy) pass() {
	p.mu.Lock()
	frozen := p.frozen
	p.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
}

// breakAll cuts every connection.
func (p *proxy) breakAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) keep(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = true
}

func (p *proxy) drop(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

func (p *proxy) serve(client net.Conn) {
	p.keep(client)
	defer p.drop(client)
	head, err := packet(client, 0)
	if err != nil {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.keep(server)
	defer p.drop(server)
	if _, err := server.Write(head); err != nil {
		return
	}
	var mu sync.Mutex
	doom := none
	p.wg.Go(func() {
		defer server.Close()
		defer client.Close()
		for {
			m, err := packet(client, 1)
			if err != nil {
				return
			}
			p.pass()
			f := p.saw(m)
			mu.Lock()
			doom = f
			mu.Unlock()
			if f == cutBefore {
				return
			}
			if _, err := server.Write(m); err != nil {
				return
			}
		}
	})
	for {
		m, err := packet(server, 1)
		if err != nil {
			return
		}
		p.pass()
		mu.Lock()
		f := doom
		mu.Unlock()
		switch {
		case f == cutAfter && m[0] == 'Z':
			return
		case f == cutAfter || f == swallow:
			continue
		}
		if m[0] == 'Z' {
			p.mu.Lock()
			p.trips++
			p.mu.Unlock()
		}
		if _, err := client.Write(m); err != nil {
			return
		}
	}
}

// saw notes a client's message and tells what becomes of it.
func (p *proxy) saw(m []byte) failure {
	p.mu.Lock()
	defer p.mu.Unlock()
	var text string
	switch m[0] {
	case 'Q':
		text = string(m[5 : len(m)-1])
	case 'P': // name, text, …
		parts := strings.SplitN(string(m[5:]), "\x00", 3)
		text = parts[1]
	default:
		return none
	}
	text = strings.TrimSpace(strings.ToLower(text))
	p.sent = append(p.sent, text)
	if !strings.HasPrefix(text, p.on) {
		return none
	}
	f := p.fail
	p.fail = none
	return f
}

// packet reads one message: skip bytes of type, then its length, which counts itself, and the rest.
func packet(r io.Reader, skip int) ([]byte, error) {
	head := make([]byte, skip+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	n := skip + int(binary.BigEndian.Uint32(head[skip:]))
	if n < len(head) {
		return nil, errors.New("a message shorter than its head")
	}
	m := make([]byte, n)
	copy(m, head)
	_, err := io.ReadFull(r, m[len(head):])
	return m, err
}
