package pgxgated

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"go.uber.org/goleak"
)

// drainPG is a server that knows the verifier's query and nothing else. What PostgreSQL makes of the query itself is
// tested on PostgreSQL.
type drainPG struct {
	t  *testing.T
	ln net.Listener

	mu         sync.Mutex
	alive      map[uint32]string // pid → "", "hidden", "protected", "immortal", "reused"
	conns      map[net.Conn]bool
	accepted   int
	checks     [][]uint32 // pids of each query that only asked
	terminated []uint32
	onCheck    func(n int) string // "cut", "silent", "fatal", "short" or "": answer
}

func newDrainPG(t *testing.T) *drainPG {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveDrainPG(t, ln)
}

func serveDrainPG(t *testing.T, ln net.Listener) *drainPG {
	p := &drainPG{t: t, ln: ln, alive: map[uint32]string{}, conns: map[net.Conn]bool{}}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.accepted++
			p.conns[c] = true
			p.mu.Unlock()
			serving.Go(func() {
				p.serve(c)
				_ = c.Close()
				p.mu.Lock()
				delete(p.conns, c)
				p.mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		p.mu.Lock()
		for c := range p.conns {
			_ = c.Close()
		}
		p.mu.Unlock()
		serving.Wait()
	})
	return p
}

var drainSQL = regexp.MustCompile(`^SET LOCAL search_path = pg_catalog; SET LOCAL ROLE NONE; SELECT (.*) FROM pg_catalog.pg_stat_activity a WHERE a.pid (?:IN|=) \(?([\d,]+)`)

func (p *drainPG) serve(c net.Conn) {
	b := pgproto3.NewBackend(c, c)
	if _, err := b.ReceiveStartupMessage(); err != nil {
		return
	}
	b.Send(&pgproto3.AuthenticationOk{})
	b.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for b.Flush() == nil {
		msg, err := b.Receive()
		if err != nil {
			return
		}
		q, ok := msg.(*pgproto3.Query)
		if !ok { // Terminate
			return
		}
		m := drainSQL.FindStringSubmatch(q.String)
		if m == nil {
			p.t.Errorf("unexpected query %q", q.String)
			return
		}
		switch p.answer(b, m[1], m[2]) {
		case "cut":
			_ = b.Flush()
			return
		case "silent":
			_, _ = b.Receive() // until the other side goes
			return
		}
	}
}

func (p *drainPG) answer(b *pgproto3.Backend, columns, values string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var pids []uint32
	for value := range strings.SplitSeq(values, ",") {
		pid, _ := strconv.ParseUint(value, 10, 32)
		pids = append(pids, uint32(pid))
	}
	terminate := strings.Contains(columns, "pg_terminate_backend")
	action := ""
	if !terminate {
		p.checks = append(p.checks, pids)
		if p.onCheck != nil {
			action = p.onCheck(len(p.checks))
		}
	}
	set := &pgproto3.CommandComplete{CommandTag: []byte("SET")}
	switch action {
	case "silent":
		return action
	case "short":
		b.Send(set)
		b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		return action
	case "fatal":
		b.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: "57P01", Message: "terminating connection due to administrator command"})
		return "cut"
	}
	b.Send(set)
	b.Send(set)
	b.Send(&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("a")}, {Name: []byte("b")}, {Name: []byte("c")}}})
	if action == "cut" {
		return action
	}
	for _, pid := range pids {
		state, ok := p.alive[pid]
		switch {
		case !ok:
		case !terminate:
			const now = 1_000_000_000_000_000 // nothing to do with the client's clock
			start := []byte(strconv.Itoa(now - 3_600_000_000))
			switch state {
			case "hidden":
				start = nil
			case "reused":
				start = []byte(strconv.Itoa(now))
			}
			b.Send(&pgproto3.DataRow{Values: [][]byte{[]byte(strconv.Itoa(int(pid))), start, []byte(strconv.Itoa(now))}})
		case state == "protected":
			b.Send(&pgproto3.ErrorResponse{Severity: "ERROR", Code: "42501", Message: "must be a superuser to terminate superuser process"})
			b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			return ""
		default:
			p.terminated = append(p.terminated, pid)
			b.Send(&pgproto3.DataRow{Values: [][]byte{[]byte("t")}})
			if state != "immortal" {
				delete(p.alive, pid)
			}
		}
	}
	b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT")})
	b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	return ""
}

func (p *drainPG) set(pid uint32, state string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.alive[pid] = state
}

func (p *drainPG) kill(pid uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.alive, pid)
}

func (p *drainPG) state() (accepted, open, checks int, terminated []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted, len(p.conns), len(p.checks), append(terminated, p.terminated...)
}

// drainLog is a logger whose lines can be counted.
type drainLog struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *drainLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *drainLog) lines(containing string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		if strings.Contains(line, containing) {
			n++
		}
	}
	return n
}

func drainConfig(t *testing.T, dsn string) func() *pgx.ConnConfig {
	t.Helper()
	c, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return func() *pgx.ConnConfig { return c }
}

const drainDSN = "postgres://u:secret-pw@db.invalid/d?sslmode=disable" // never resolved: the address says where

type drainFixture struct {
	*verifier
	log        *drainLog
	terminated atomic.Int64
}

// newDrainFixture returns a verifier, and checks at the end that it leaves no goroutine.
func newDrainFixture(t *testing.T, grace, limit time.Duration) *drainFixture {
	t.Helper()
	ignore := goleak.IgnoreCurrent()
	f := &drainFixture{log: &drainLog{}}
	f.verifier = newVerifier(verifierConnect(drainConfig(t, drainDSN), nil), grace, limit,
		func(uint32) { f.terminated.Add(1) }, slog.New(slog.NewTextHandler(f.log, nil)), "d@db")
	t.Cleanup(func() {
		f.close()
		f.close()
		drainUntil(t, "nothing pending", func() bool { return f.pending() == 0 })
		goleak.VerifyNone(t, ignore)
		if f.log.lines("secret-pw") > 0 {
			t.Error("password in the log")
		}
	})
	return f
}

// drainEnd counts the calls of done.
type drainEnd struct {
	calls atomic.Int64
	gone  chan bool
}

func (f *drainFixture) watchPID(addr net.Addr, pid uint32, change ...func(*backend)) *drainEnd {
	e := &drainEnd{gone: make(chan bool, 8)}
	b := backend{pid: pid, addr: addr, closedAt: time.Now(), done: func(gone bool) { e.calls.Add(1); e.gone <- gone }}
	for _, c := range change {
		c(&b)
	}
	f.watch(b)
	return e
}

func (e *drainEnd) want(t *testing.T, gone bool) {
	t.Helper()
	select {
	case got := <-e.gone:
		if got != gone {
			t.Fatalf("done(%v), want done(%v)", got, gone)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("done was never called")
	}
	if n := e.calls.Load(); n != 1 {
		t.Fatalf("done called %d times", n)
	}
}

func drainUntil(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestVerifierConnectsOnDemandAndKeepsItsConnection(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	p := newDrainPG(t)
	if accepted, _, _, _ := p.state(); accepted != 0 || f.pending() != 0 {
		t.Fatal("at work before the first watch")
	}
	for i := range uint32(10) {
		f.watchPID(p.ln.Addr(), i).want(t, true)
	}
	if accepted, _, _, _ := p.state(); accepted != 1 {
		t.Fatalf("%d connections for one storm, want 1", accepted)
	}
	f.close()
	drainUntil(t, "connection closed after close", func() bool { _, open, _, _ := p.state(); return open == 0 })

	f.watchPID(p.ln.Addr(), 77).want(t, true) // an operation that outlives its db
	drainUntil(t, "connection closed again", func() bool { accepted, open, _, _ := p.state(); return accepted == 2 && open == 0 })
}

func TestVerifierClosesItsIdleConnection(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	f.linger = 20 * time.Millisecond
	p := newDrainPG(t)
	f.watchPID(p.ln.Addr(), 1).want(t, true)
	drainUntil(t, "idle connection closed", func() bool { _, open, _, _ := p.state(); return open == 0 })
	f.watchPID(p.ln.Addr(), 2).want(t, true)
}

func TestVerifierHoldsUntilTheRowIsGone(t *testing.T) { // I6
	f := newDrainFixture(t, time.Minute, time.Minute)
	p := newDrainPG(t)
	p.set(5, "")
	p.set(6, "hidden") // backend_start is NULL: still there
	e5, e6 := f.watchPID(p.ln.Addr(), 5), f.watchPID(p.ln.Addr(), 6)
	drainUntil(t, "ten checks", func() bool { _, _, checks, _ := p.state(); return checks >= 10 })
	if e5.calls.Load()+e6.calls.Load() != 0 || f.pending() != 2 {
		t.Fatal("called gone while the backend is there")
	}
	p.kill(5)
	e5.want(t, true)
	if e6.calls.Load() != 0 {
		t.Fatal("one backend's end taken for the other's")
	}
	f.close() // does not give up
	p.kill(6)
	e6.want(t, true)
}

func TestVerifierKnowsAReusedPID(t *testing.T) {
	f := newDrainFixture(t, 0, time.Minute)
	p := newDrainPG(t)
	p.set(5, "reused")
	f.watchPID(p.ln.Addr(), 5).want(t, true) // started after the close

	var mine atomic.Bool
	p.set(6, "")
	e := f.watchPID(p.ln.Addr(), 6, func(b *backend) { b.mayTerminate = mine.Load })
	drainUntil(t, "seen", func() bool { _, _, n, _ := p.state(); return n >= 3 })
	p.set(6, "reused")
	e.want(t, true)

	if _, _, _, terminated := p.state(); len(terminated) != 0 {
		t.Fatalf("terminated %v, a stranger", terminated)
	}
}

// The two clocks are not read at the same instant: a process that started while the query was out may be either.
func TestDrainMayBe(t *testing.T) {
	closed := time.Now()
	at := func(ms int) time.Time { return closed.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct {
		name           string
		known          int64
		row            drainRow
		mayBe, certain bool
	}{
		{"started before", 0, drainRow{start: 7, after: at(-9), noLater: at(-2)}, true, true},
		{"started after", 0, drainRow{start: 7, after: at(1), noLater: at(5)}, false, false},
		{"started about then", 0, drainRow{start: 7, after: at(-1), noLater: at(5)}, true, false},
		{"hidden", 0, drainRow{hidden: true}, true, false},
		{"known", 7, drainRow{start: 7, after: at(1), noLater: at(5)}, true, true}, // the server's clock was set
		{"known, another", 7, drainRow{start: 8, after: at(-9), noLater: at(-2)}, false, true},
		{"known, hidden", 7, drainRow{hidden: true}, true, true},
	} {
		d := &drain{backend: backend{closedAt: closed}, start: c.known}
		if got := d.mayBe(c.row); got != c.mayBe || (d.start != 0) != c.certain {
			t.Errorf("%s: mayBe %v, certain %v, want %v, %v", c.name, got, d.start != 0, c.mayBe, c.certain)
		}
	}
}

func TestVerifierAsksForAllInOneQuery(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	p := newDrainPG(t)
	held, free := make(chan struct{}), make(chan struct{})
	p.onCheck = func(n int) string {
		if n == 1 {
			close(held)
			<-free
		}
		return ""
	}
	all := []*drainEnd{f.watchPID(p.ln.Addr(), 0)}
	<-held
	for i := range uint32(100) { // while a query is out
		all = append(all, f.watchPID(p.ln.Addr(), i+1))
	}
	close(free)
	for _, e := range all {
		e.want(t, true)
	}
	if accepted, _, checks, _ := p.state(); accepted != 1 || checks != 2 {
		t.Fatalf("%d connections, %d queries for 101 backends, want 1 and 2", accepted, checks)
	}
}

func TestVerifierTakesNoOtherServersWord(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	p, other := newDrainPG(t), newDrainPG(t)
	p.set(5, "")
	e := f.watchPID(p.ln.Addr(), 5)
	f.watchPID(other.ln.Addr(), 5).want(t, true)
	if e.calls.Load() != 0 {
		t.Fatal("gone on another server taken for gone")
	}
	p.kill(5)
	e.want(t, true)
}

func TestVerifierSurvivesItsOwnFailures(t *testing.T) {
	for _, action := range []string{"cut", "fatal", "silent", "short"} {
		t.Run(action, func(t *testing.T) {
			f := newDrainFixture(t, time.Minute, time.Minute)
			f.checkTimeout = 50 * time.Millisecond
			p := newDrainPG(t)
			p.set(5, "")
			failed := make(chan struct{})
			p.onCheck = func(n int) string {
				switch {
				case n <= 3:
					return action
				case n == 4:
					close(failed)
				}
				return ""
			}
			e := f.watchPID(p.ln.Addr(), 5)
			<-failed
			if e.calls.Load() != 0 {
				t.Fatal("a failed query taken for proof")
			}
			p.kill(5)
			e.want(t, true)
			if accepted, _, _, _ := p.state(); accepted != 4 {
				t.Fatalf("%d connections after 3 failures, want 4", accepted)
			}
		})
	}
	t.Run("refused, then up", func(t *testing.T) {
		f := newDrainFixture(t, time.Minute, time.Minute)
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := ln.Addr()
		_ = ln.Close()
		var cancels atomic.Int64
		e := f.watchPID(addr, 5, func(b *backend) {
			b.cancel = func(context.Context) error { cancels.Add(1); return nil }
		})
		drainUntil(t, "cancel sent without a check", func() bool { return cancels.Load() >= 2 })
		if e.calls.Load() != 0 {
			t.Fatal("a refused connection taken for proof")
		}
		if ln, err = net.Listen("tcp", addr.String()); err != nil {
			t.Skip(err) // somebody else took the port
		}
		serveDrainPG(t, ln)
		e.want(t, true)
	})
}

func TestVerifierGivesUpAtTheLimit(t *testing.T) {
	const limit = 150 * time.Millisecond
	for _, c := range []struct {
		name, reason string
		connect      func(context.Context, net.Addr) (*pgconn.PgConn, error)
	}{
		{"still there", "still there", nil},
		{"connect fails", "no route", func(context.Context, net.Addr) (*pgconn.PgConn, error) { return nil, errors.New("no route") }},
		{"connect hangs", "no answer", func(ctx context.Context, _ net.Addr) (*pgconn.PgConn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newDrainFixture(t, time.Minute, limit)
			if c.connect != nil {
				f.connect = c.connect
			}
			p := newDrainPG(t)
			p.set(5, "")
			start := time.Now()
			e := f.watchPID(p.ln.Addr(), 5, func(b *backend) { b.closedAt = start })
			e.want(t, false)
			if took := time.Since(start); took < limit {
				t.Fatalf("gave up after %v, limit %v", took, limit)
			}
			if f.log.lines("gate_drain_limit") != 1 || f.log.lines("pid=5") != 1 || f.log.lines("gate=d@db") != 1 || f.log.lines(c.reason) != 1 {
				t.Fatalf("log: %s", f.log.buf.String())
			}
		})
	}
}

func TestVerifierWatchNeverBlocks(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	p := newDrainPG(t)
	free := make(chan struct{})
	real := f.connect
	f.connect = func(ctx context.Context, addr net.Addr) (*pgconn.PgConn, error) { <-free; return real(ctx, addr) }
	var all []*drainEnd
	for i := range uint32(50) {
		all = append(all, f.watchPID(p.ln.Addr(), i)) // returns, though nothing gets on before free
	}
	f.close()
	close(free)
	for _, e := range all {
		e.want(t, true)
	}
}

func TestVerifierTerminatesAfterGrace(t *testing.T) {
	const grace = 60 * time.Millisecond
	f := newDrainFixture(t, grace, time.Minute)
	p := newDrainPG(t)
	p.set(5, "")
	p.set(6, "protected")
	p.set(7, "hidden")
	p.set(8, "")
	p.set(9, "")
	var mine atomic.Bool
	start := time.Now()
	refused, hidden := f.watchPID(p.ln.Addr(), 6), f.watchPID(p.ln.Addr(), 7)
	e5, e9 := f.watchPID(p.ln.Addr(), 5), f.watchPID(p.ln.Addr(), 9)
	hijacked := f.watchPID(p.ln.Addr(), 8, func(b *backend) { b.mayTerminate = mine.Load })
	e5.want(t, true)
	e9.want(t, true)
	if took := time.Since(start); took < grace {
		t.Fatalf("terminated after %v, grace %v", took, grace)
	}
	_, _, before, _ := p.state()
	drainUntil(t, "more checks", func() bool { _, _, n, _ := p.state(); return n > before+3 })
	if _, _, _, terminated := p.state(); len(terminated) != 2 || refused.calls.Load()+hidden.calls.Load()+hijacked.calls.Load() != 0 {
		t.Fatalf("terminated %v, want 5 and 9 only", terminated)
	}
	mine.Store(true)
	hijacked.want(t, true)
	p.kill(6)
	p.kill(7)
	refused.want(t, true)
	hidden.want(t, true)
	if accepted, _, _, _ := p.state(); accepted != 1 || f.terminated.Load() != 3 {
		t.Fatalf("%d connections, %d terminated, want 1 and 3", accepted, f.terminated.Load())
	}
	if f.log.lines("may not be terminated") != 2 || f.log.lines("gate_drain_grace terminated") != 3 {
		t.Fatalf("log: %s", f.log.buf.String())
	}
}

func TestVerifierTerminatesAgain(t *testing.T) {
	f := newDrainFixture(t, 0, time.Minute)
	p := newDrainPG(t)
	p.set(5, "immortal")
	e := f.watchPID(p.ln.Addr(), 5)
	drainUntil(t, "terminated twice", func() bool { _, _, _, terminated := p.state(); return len(terminated) == 2 })
	p.kill(5)
	e.want(t, true)
}

// A cancel that reaches the server before its statement has begun is lost.
func TestVerifierCancelsAgainOneAtATime(t *testing.T) {
	f := newDrainFixture(t, time.Minute, time.Minute)
	p := newDrainPG(t)
	p.set(5, "")
	var sent, out atomic.Int64
	ended := make(chan struct{})
	e := f.watchPID(p.ln.Addr(), 5, func(b *backend) {
		b.cancel = func(ctx context.Context) error {
			if out.Add(1) != 1 {
				t.Error("two cancel requests at once")
			}
			defer out.Add(-1)
			switch sent.Add(1) {
			case 3:
				_, _, n, _ := p.state() // slower than the interval
				drainUntil(t, "some checks", func() bool { _, _, m, _ := p.state(); return m > n+3 })
				p.kill(5)
				<-ctx.Done() // ends with the drain
				close(ended)
			}
			return nil
		}
	})
	e.want(t, true)
	<-ended
	if sent.Load() != 3 {
		t.Fatalf("%d cancel requests, want 3", sent.Load())
	}
}

func TestVerifierConnectDialsExactlyTheServer(t *testing.T) {
	p := newDrainPG(t)
	c := drainConfig(t, "postgres://u:secret-pw@a.invalid:1,b.invalid:2/d?sslmode=disable&target_session_attrs=read-write&application_name=app")()
	hook := func(what string) { t.Errorf("%s called", what) }
	c.AfterConnect = func(context.Context, *pgconn.PgConn) error { hook("AfterConnect"); return nil }
	c.OnNotice = func(*pgconn.PgConn, *pgconn.Notice) { hook("OnNotice") }
	var dialed []string
	dial := c.DialFunc
	c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialed = append(dialed, network+" "+addr)
		return dial(ctx, network, addr)
	}
	connect := verifierConnect(func() *pgx.ConnConfig { return c }, func(_ context.Context, c *pgx.ConnConfig) error {
		c.Password = "token"
		return nil
	})
	conn, err := connect(t.Context(), p.ln.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if len(dialed) != 1 || dialed[0] != "tcp "+p.ln.Addr().String() {
		t.Fatalf("dialed %q, want only %v", dialed, p.ln.Addr())
	}
	if c.Password != "secret-pw" || c.ValidateConnect == nil || c.LookupFunc == nil {
		t.Fatal("the pool's config was changed")
	}
	if err := conn.CancelRequest(t.Context()); err == nil {
		t.Fatal("pgx may dial again, for up to 15 s after the verifier gave up")
	}

	failing := verifierConnect(func() *pgx.ConnConfig { return c }, func(context.Context, *pgx.ConnConfig) error { return errors.New("no token") })
	if conn, err := failing(t.Context(), p.ln.Addr()); conn != nil || err == nil {
		t.Fatal("connected without a token")
	}
	unixOnly := verifierConnect(drainConfig(t, "host=/nowhere user=u"), nil)
	if conn, err := unixOnly(t.Context(), p.ln.Addr()); conn != nil || err == nil || !strings.Contains(err.Error(), "another server") {
		t.Fatalf("a socket stood in for %v: %v", p.ln.Addr(), err)
	}
}

// Backends come and go, the server fails now and then: each done is called once, and no proof is false.
func TestVerifierStress(t *testing.T) {
	f := newDrainFixture(t, 5*time.Millisecond, time.Minute)
	f.linger, f.checkTimeout = time.Millisecond, 20*time.Millisecond
	servers := []*drainPG{newDrainPG(t), newDrainPG(t)}
	for _, p := range servers {
		p.onCheck = func(n int) string {
			if n%7 == 0 {
				return []string{"cut", "fatal", "short", "silent"}[n/7%4]
			}
			return ""
		}
	}
	var pid, unproven atomic.Uint32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 40 {
				id, p := pid.Add(1), servers[rand.IntN(2)]
				state := []string{"", "", "protected", "hidden"}[rand.IntN(4)]
				p.set(id, state)
				e := f.watchPID(p.ln.Addr(), id, func(b *backend) {
					done := b.done
					b.done = func(gone bool) {
						p.mu.Lock()
						if _, alive := p.alive[id]; alive || !gone {
							unproven.Add(1)
						}
						p.mu.Unlock()
						done(gone)
					}
				})
				if state != "" || rand.IntN(2) == 0 { // else it takes a terminate
					p.kill(id)
				}
				if !<-e.gone {
					t.Error("limit passed")
				}
			}
		})
	}
	all.Wait()
	if unproven.Load() != 0 {
		t.Fatalf("%d called gone while alive", unproven.Load())
	}
}

func BenchmarkVerifierWatch(b *testing.B) {
	v := newVerifier(func(context.Context, net.Addr) (*pgconn.PgConn, error) { return nil, errors.New("none") },
		time.Minute, time.Minute, nil, slog.New(slog.DiscardHandler), "")
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}
	var s *drainServer
	b.ReportAllocs()
	for b.Loop() {
		v.watch(backend{pid: 1, addr: addr, done: func(bool) {}})
		v.mu.Lock()
		for _, s = range v.servers {
		}
		d := s.draining[0]
		v.mu.Unlock()
		v.finish(s, d, true)
	}
	v.close()
}
