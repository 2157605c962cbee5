package pgxgated

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	drainFirstCheck        = time.Millisecond      // after the check at once; each wait is as long as all before it,
	drainLastCheck         = 50 * time.Millisecond // up to this
	drainCancelEvery       = 50 * time.Millisecond // 2 s drains became 60 ms; more often only makes the server fork
	drainCancelActs        = 8 * time.Millisecond  // after a cancel, checks go on from this wait: 8, 16, 32 ms
	drainTerminateEvery    = time.Second
	verifierRetryAtMost    = 500 * time.Millisecond // between attempts to reach the server
	drainCancelTimeout     = 5 * time.Second        // one cancel request
	verifierConnectTimeout = 5 * time.Second        // the verifier's own connection
	verifierCheckTimeout   = 2 * time.Second        // one query on it: a half-open connection must not hang the verifier
	verifierLingers        = 10 * time.Second       // idle connection kept: a cancel storm comes in waves
)

// backend identifies one server process that a closed physical connection leaves behind.
type backend struct {
	pid      uint32
	addr     net.Addr  // RemoteAddr of the closed connection
	server   string    // which of several servers behind addr, as serverQuery tells it; "" if that is not known
	closedAt time.Time // by the client's clock, monotonic: the server's need not agree with it

	// cancel sends a cancel request (PgConn.CancelRequest), and again while the backend is still there. nil: none is sent.
	cancel func(context.Context) error

	// mayTerminate says whether the backend is ours to terminate. nil: it is. False as long as somebody may have hijacked
	// the connection: pgx reports one as closed too.
	mayTerminate func() bool

	// done is called exactly once, without locks held: with true when the server has said that the backend is gone, with
	// false when gate_drain_limit passed first.
	done func(gone bool)
}

// A verifier finds out when the backends of closed connections are gone, so that a permit comes back only then (I6). It
// belongs to one pool.
//
// A backend is gone when the server it was on no longer lists it in pg_stat_activity. A row with its pid is another
// process, to which the pid went on, if it started after the connection was closed; a row whose start is hidden from us
// (another role's) counts as still there. PostgreSQL takes the row out after it has rolled back and released the locks.
//
// There is no goroutine and no connection until something is to be watched. Then there is one of each per server, as
// another server's word is no proof: with one server, one. All backends are asked for in one query. Behind a load balancer
// several servers have one address, so the one that answered says which it is.
//
//	watch → check at once → gone: done(true)
//	          ↑   ↓ still there
//	          ↑   cancel again every 50 ms; terminate after grace, then every second
//	          └── wait 1, 1, 2, 4, … 50 ms (server out of reach: up to 500 ms)
//	limit after the close → done(false), logged
type verifier struct {
	connect     func(context.Context, net.Addr) (*pgconn.PgConn, error)
	grace       time.Duration
	limit       time.Duration
	onTerminate func(pid uint32)
	log         *slog.Logger
	label       string

	checkTimeout, linger time.Duration // constants, shorter in tests

	mu       sync.Mutex // guards what follows; no I/O and no callback under it
	servers  map[string]*drainServer
	watching int
	closed   bool
}

// drainServer is one server with backends to be verified, and the goroutine that does it.
type drainServer struct {
	key      string
	addr     net.Addr
	server   string
	wake     chan struct{} // holds one
	draining []*drain      // guarded by verifier.mu
	lastErr  error         // of the last check; guarded by verifier.mu

	conn    *pgconn.PgConn // this and what follows: the goroutine's own
	fails   int
	retryAt time.Time
}

// drain is one backend being verified.
type drain struct {
	backend
	expiry *time.Timer // gate_drain_limit
	ctx    context.Context
	stop   context.CancelFunc

	backoffFrom time.Time // the server goroutine's own, with what follows
	cancelAt    time.Time
	terminateAt time.Time
	start       int64 // of the process, by the server's clock in µs: 0 until it is certain which one it is
	refused     bool  // the server does not let us terminate it
	canceling   atomic.Bool
}

var (
	errServerSilent  = errors.New("no answer from the server")
	errAnotherServer = errors.New("another server answers at the address")
)

// newVerifier returns a verifier that does nothing yet. connect opens its own connection to the server at addr. grace and
// limit are gate_drain_grace and gate_drain_limit; onTerminate, if not nil, hears of each backend terminated.
func newVerifier(connect func(ctx context.Context, addr net.Addr) (*pgconn.PgConn, error), grace, limit time.Duration,
	onTerminate func(pid uint32), log *slog.Logger, label string,
) *verifier {
	return &verifier{
		connect: connect, grace: grace, limit: limit, onTerminate: onTerminate, log: log, label: label,
		checkTimeout: verifierCheckTimeout, linger: verifierLingers, servers: make(map[string]*drainServer),
	}
}

// watch takes over a backend and calls its done later. It never blocks. It works after close, too: an operation may end
// after its db was closed.
func (v *verifier) watch(b backend) {
	now := time.Now()
	if b.closedAt.IsZero() {
		b.closedAt = now // or every row would have started after it
	}
	d := &drain{backend: b, backoffFrom: now, cancelAt: now.Add(drainCancelEvery), terminateAt: b.closedAt.Add(v.grace)}
	d.ctx, d.stop = context.WithCancel(context.Background())
	key := ""
	if b.addr != nil {
		key = b.addr.Network() + " " + b.addr.String()
	}
	key += " " + b.server

	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.servers[key]
	if s == nil {
		s = &drainServer{key: key, addr: b.addr, server: b.server, wake: make(chan struct{}, 1), lastErr: errServerSilent}
		v.servers[key] = s
		go v.run(s)
	}
	s.draining = append(s.draining, d)
	v.watching++
	// A timer, not the goroutine: that may be waiting for a connection just then.
	d.expiry = time.AfterFunc(time.Until(b.closedAt.Add(v.limit)), func() { v.finish(s, d, false) })
	s.wakeUp()
}

// pending is the number of backends whose done has not returned.
func (v *verifier) pending() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.watching
}

// close lets the verifier end once nothing is pending: from then on no connection is kept idle. It does not block, and may
// be called again.
func (v *verifier) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	for _, s := range v.servers {
		s.wakeUp()
	}
}

// finish ends a drain, unless proof or limit has ended it already.
func (v *verifier) finish(s *drainServer, d *drain, gone bool) {
	v.mu.Lock()
	i := slices.Index(s.draining, d)
	if i < 0 {
		v.mu.Unlock()
		return
	}
	s.draining = slices.Delete(s.draining, i, i+1)
	reason := "still there"
	if s.lastErr != nil {
		reason = s.lastErr.Error()
	}
	v.mu.Unlock()

	d.expiry.Stop()
	d.stop()
	if !gone {
		v.log.Warn("pgxgated: gate_drain_limit passed, backend not proven gone; its permit comes back all the same",
			"gate", v.label, "pid", d.pid, "after", time.Since(d.closedAt), "reason", reason)
	}
	d.done(gone)
	v.mu.Lock()
	v.watching--
	v.mu.Unlock()
}

// run is the goroutine of s.
func (v *verifier) run(s *drainServer) {
	for {
		select {
		case <-s.wake: // what it announced is in the list by now
		default:
		}
		v.mu.Lock()
		drains, closed := slices.Clone(s.draining), v.closed
		v.mu.Unlock()
		if len(drains) > 0 {
			s.sleep(v.round(s, drains))
			continue
		}
		if s.conn != nil && !closed && s.sleep(v.linger) {
			continue
		}
		s.hangUp() // before leaving: who comes next opens the next one
		v.mu.Lock()
		if len(s.draining) == 0 {
			delete(v.servers, s.key)
			v.mu.Unlock()
			return
		}
		v.mu.Unlock()
	}
}

// round does what is due for drains and returns how long there is nothing to do.
func (v *verifier) round(s *drainServer, drains []*drain) time.Duration {
	if !time.Now().Before(s.retryAt) {
		err := v.check(s, drains)
		v.mu.Lock()
		s.lastErr = err
		v.mu.Unlock()
		s.fails++
		s.retryAt = time.Now().Add(min(drainFirstCheck<<min(s.fails, 10), verifierRetryAtMost))
		if err == nil {
			s.fails, s.retryAt = 0, time.Time{}
		} else if s.conn != nil {
			_ = s.conn.Conn().Close() // hard: pgx would be polite to a server that may be lost, for up to 15 s
			s.hangUp()
		}
	}
	now := time.Now()
	wait := drainLastCheck
	for _, d := range drains {
		if d.ctx.Err() != nil {
			continue
		}
		// Without a check as well: a server with no connection left for us still takes a cancel.
		if d.cancel != nil && !now.Before(d.cancelAt) {
			d.cancelAt, d.backoffFrom = now.Add(drainCancelEvery), now.Add(-drainCancelActs)
			d.cancelAgain()
		}
		if s.fails == 0 {
			wait = min(wait, max(drainFirstCheck, now.Sub(d.backoffFrom)))
		}
		if d.cancel != nil {
			wait = min(wait, d.cancelAt.Sub(now))
		}
	}
	if s.fails > 0 {
		wait = min(wait, s.retryAt.Sub(now))
	}
	return wait
}

// cancelAgain sends a cancel request unless the one before is still on its way. One that reached the server before its
// statement had begun was lost, and the drain would last as long as the statement.
func (d *drain) cancelAgain() {
	if !d.canceling.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer d.canceling.Store(false)
		ctx, stop := context.WithTimeout(d.ctx, drainCancelTimeout)
		defer stop()
		_ = d.cancel(ctx) // its effect is seen in pg_stat_activity, or not
	}()
}

// check asks the server for all drains, finishes those that are gone and terminates those that are overdue. After an error
// the connection is of no use.
func (v *verifier) check(s *drainServer, drains []*drain) (err error) {
	latest := slices.MaxFunc(drains, func(a, b *drain) int { return a.closedAt.Compare(b.closedAt) }).closedAt.Add(v.limit)
	// By then nobody is waiting any more. The limit comes first, so that it is not logged as an error of ours.
	ctx, stop := context.WithDeadline(context.Background(), latest.Add(drainLastCheck))
	defer stop()
	if s.conn == nil {
		dialing, stop := context.WithTimeout(ctx, verifierConnectTimeout)
		s.conn, err = v.connect(dialing, s.addr)
		stop()
		if err != nil {
			s.conn = nil
			return err
		}
		if err := v.identify(ctx, s); err != nil {
			return err
		}
	}

	rows, err := v.rows(ctx, s.conn, drains)
	if err != nil {
		return err
	}
	for _, d := range drains {
		if r, ok := rows[d.pid]; !ok || !d.mayBe(r) {
			v.finish(s, d, true)
		}
	}
	for _, d := range drains {
		if d.ctx.Err() == nil && !d.refused && !time.Now().Before(d.terminateAt) && (d.mayTerminate == nil || d.mayTerminate()) {
			if err := v.terminate(ctx, s.conn, d, rows[d.pid].hidden); err != nil {
				return err
			}
		}
	}
	return nil
}

// identify makes sure that a new connection leads to the server in question: behind a load balancer it may not.
func (v *verifier) identify(ctx context.Context, s *drainServer) error {
	if s.server == "" {
		return nil
	}
	ctx, stop := context.WithTimeout(ctx, v.checkTimeout)
	defer stop()
	r, err := s.conn.Exec(ctx, serverQuery).ReadAll()
	if err != nil {
		return err
	}
	if len(r) != 1 || len(r[0].Rows) != 1 || string(r[0].Rows[0][1]) != s.server {
		return errAnotherServer
	}
	return nil
}

// drainRow is what pg_stat_activity says of a pid.
type drainRow struct {
	hidden         bool      // another role's: it has no start for us
	start          int64     // by the server's clock, in µs
	after, noLater time.Time // the same by the client's clock, which was not read at the same instant as the server's
}

// mayBe says whether r can be the backend that d waits for, and remembers its start as soon as that is certain. In between,
// a process that started while the query was on its way counts as still there, but is not terminated.
func (d *drain) mayBe(r drainRow) bool {
	if r.hidden || d.start != 0 {
		return r.hidden || d.start == r.start
	}
	if !r.noLater.After(d.closedAt) {
		d.start = r.start
	}
	return !r.after.After(d.closedAt)
}

const drainStartMicros = "(extract(epoch FROM a.backend_start) * 1000000)::bigint"

// rows asks for the drains' pids.
func (v *verifier) rows(ctx context.Context, conn *pgconn.PgConn, drains []*drain) (map[uint32]drainRow, error) {
	var sql strings.Builder
	sql.WriteString("SELECT a.pid, " + drainStartMicros + ", (extract(epoch FROM clock_timestamp()) * 1000000)::bigint" +
		" FROM pg_catalog.pg_stat_activity a WHERE a.pid IN (")
	for i, d := range drains {
		if i > 0 {
			sql.WriteByte(',')
		}
		sql.WriteString(strconv.FormatUint(uint64(d.pid), 10))
	}
	sql.WriteByte(')')
	sent := time.Now()
	answer, err := v.query(ctx, conn, sql.String())
	if err != nil {
		return nil, err
	}
	answered := time.Now()
	rows := make(map[uint32]drainRow, len(answer))
	for _, columns := range answer {
		pid, err := strconv.ParseUint(string(columns[0]), 10, 32)
		r := drainRow{hidden: columns[1] == nil}
		if err == nil && !r.hidden {
			r.start, err = strconv.ParseInt(string(columns[1]), 10, 64)
			now, nowErr := strconv.ParseInt(string(columns[2]), 10, 64)
			age := time.Duration(now-r.start) * time.Microsecond
			r.after, r.noLater, err = sent.Add(-age), answered.Add(-age), errors.Join(err, nowErr)
		}
		if err != nil {
			return nil, fmt.Errorf("pgxgated: verifier: row %q: %w", columns, err)
		}
		rows[uint32(pid)] = r
	}
	return rows, nil
}

// terminate has the server end a backend. It is a query of its own, as a refusal is an error, which would leave the others
// unanswered. Where the start of the process may not be seen it might no longer be ours, and is left alone.
func (v *verifier) terminate(ctx context.Context, conn *pgconn.PgConn, d *drain, hidden bool) error {
	if d.start == 0 && !hidden {
		return nil // not certain yet
	}
	d.terminateAt = time.Now().Add(drainTerminateEvery)
	refusal := "its row in pg_stat_activity is hidden from our role"
	if d.start != 0 {
		answer, err := v.query(ctx, conn, fmt.Sprintf("SELECT pg_catalog.pg_terminate_backend(a.pid)"+
			" FROM pg_catalog.pg_stat_activity a WHERE a.pid = %d AND %s = %d", d.pid, drainStartMicros, d.start))
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" { // insufficient_privilege
			refusal = pgErr.Message
		} else if err != nil || len(answer) == 0 || string(answer[0][0]) != "t" {
			return err
		} else {
			d.backoffFrom = time.Now() // it will be gone in some 3 ms
			v.log.Warn("pgxgated: backend still there after gate_drain_grace terminated", "gate", v.label,
				"pid", d.pid, "after", time.Since(d.closedAt))
			if v.onTerminate != nil {
				v.onTerminate(d.pid)
			}
			return nil
		}
	}
	d.refused = true
	v.log.Warn("pgxgated: backend still there after gate_drain_grace may not be terminated", "gate", v.label,
		"pid", d.pid, "after", time.Since(d.closedAt), "reason", refusal)
	return nil
}

// query runs one SELECT. The simple protocol makes one transaction and one round trip of it and the settings before it,
// which end with it: behind a pooler they must not stay with the session. Under a role that was set for the pool's
// connections their rows would be hidden: these belong to the role that logged in.
func (v *verifier) query(ctx context.Context, conn *pgconn.PgConn, sql string) ([][][]byte, error) {
	ctx, stop := context.WithTimeout(ctx, v.checkTimeout)
	defer stop()
	results, err := conn.Exec(ctx, "SET LOCAL search_path = pg_catalog; SET LOCAL ROLE NONE; "+sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 3 { // never take half an answer for "gone"
		return nil, fmt.Errorf("pgxgated: verifier: %d results for 3 statements", len(results))
	}
	return results[2].Rows, nil
}

// sleep reports whether it was woken up before its time.
func (s *drainServer) sleep(d time.Duration) bool {
	select {
	case <-s.wake:
		return true
	case <-time.After(d):
		return false
	}
}

func (s *drainServer) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *drainServer) hangUp() {
	if s.conn != nil {
		ctx, stop := context.WithTimeout(context.Background(), time.Second)
		_ = s.conn.Close(ctx)
		stop()
		s.conn = nil
	}
}

// verifierConnect makes the connect function of a verifier from a pool's config and its BeforeConnect. The user's hooks
// and tracers, meant for the pool's connections, do not see this one, and any server will do, primary or not: it must be
// the very one at addr.
func verifierConnect(config func() *pgx.ConnConfig, beforeConnect func(context.Context, *pgx.ConnConfig) error,
) func(context.Context, net.Addr) (*pgconn.PgConn, error) {
	return func(ctx context.Context, addr net.Addr) (*pgconn.PgConn, error) {
		pool := config().Copy()
		if beforeConnect != nil {
			if err := beforeConnect(ctx, pool); err != nil {
				return nil, err
			}
		}
		c := &pool.Config
		c.ValidateConnect, c.AfterConnect, c.OnNotice, c.OnNotification = nil, nil, nil, nil
		c.OnPgError = func(_ *pgconn.PgConn, err *pgconn.PgError) bool { return !strings.EqualFold(err.Severity, "FATAL") }
		c.BuildFrontend = pgproto3.NewFrontend
		c.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn()}
		}
		if c.ConnectTimeout == 0 || c.ConnectTimeout > verifierConnectTimeout {
			c.ConnectTimeout = verifierConnectTimeout
		}

		var connected atomic.Bool
		dial, unix, tcp := c.DialFunc, false, false
		if addr != nil {
			unix, tcp = addr.Network() == "unix", strings.HasPrefix(addr.Network(), "tcp")
		}
		if tcp {
			c.LookupFunc = func(context.Context, string) ([]string, error) { return []string{addr.String()}, nil }
		}
		// The user's own dialer, as pgx does for a cancel request: it may be a tunnel. Host names stay, for TLS. A unix
		// socket is dialed as configured, since its RemoteAddr is relative to the server's directory.
		c.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			switch {
			case connected.Load(): // pgx, for a cancel request: it would go on for 15 s after we gave up
				return nil, errors.New("pgxgated: verifier: no cancel request for its own query")
			case (unix || tcp) && unix != (network == "unix"):
				return nil, errors.New("pgxgated: verifier: another server")
			case tcp:
				network, address = addr.Network(), addr.String()
			}
			return dial(ctx, network, address)
		}
		conn, err := pgconn.ConnectConfig(ctx, c)
		connected.Store(true)
		return conn, err
	}
}
