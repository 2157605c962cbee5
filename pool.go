package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jackc/puddle/v2"
	"github.com/ngrok/sqlmw"
)

// source is where physical connections come from: a pgxpool or a *sql.DB.
type source interface {
	// acquire waits for a physical connection until ctx is done. The lease that gets it owns it exclusively until it
	// calls giveBack or discard, once.
	acquire(ctx context.Context) (*physical, error)
	// size is P, 0 without a bound; out is how many are taken.
	size() (p, out int)
	// close closes the pool if it is ours. It does not wait for connections that are out.
	close() error
}

// operations is what a lease runs on a physical connection, through the interceptors.
type operations interface {
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
	driver.Pinger
}

// physical is a real connection while a lease owns it. Like the driver.Conn it stands for, it is used by one goroutine
// at a time.
type physical struct {
	operations               // through the interceptors
	observer   *observer     // the innermost of them
	raw        rawConn       // below them
	conn       *pgx.Conn     // nil: another driver
	side       *pgxSide      // nil: another driver
	hookedRows bool          // rows must go through an interceptor's RowsNext and RowsClose
	handOn     bool          // it may go to the next in line without going through its pool
	until      time.Duration // … before then on the gate's clock, so that the pool sees it now and then
	traced     bool          // a tracer of the user's hears when rows are closed, and may panic
}

// rawConn is the innermost connection.
type rawConn interface {
	driver.Conn
	operations
	// takeRows returns the rows of the last QueryContext as the driver made them: with every optional interface (F14).
	takeRows() driver.Rows
	// usable tells that the connection is open, idle and outside a transaction.
	usable() bool
	// giveBack returns it to its pool, which destroys it if it is closed.
	giveBack()
	// discard closes it and gives its place back. ctx bounds what is sent.
	discard(ctx context.Context)
}

// handOnFor is how long a connection is handed on, as far as the mean hold foretells it, before its pool gets it back: that
// ends connections by age, and others may wait for one there. While the gate has a queue, that saves most of the way through
// the pool, and the server's process mostly stays on the processor that it is on.
const handOnFor = 10 * time.Millisecond

func (p *physical) giveBack() { p.raw.giveBack() }

// closed tells that the connection is known to be gone.
func (p *physical) closed() bool {
	if p.conn != nil {
		return p.conn.IsClosed()
	}
	r, ok := p.raw.(*dbRaw)
	return ok && r.bad
}

// wrap puts the interceptors around a raw connection: ours innermost, so that it sees what the server did, then the
// user's. It is done once per physical connection (F21). Ours alone is called without sqlmw in between, whose wrappers cost
// 1 µs and 6 allocations a transaction.
func wrap(raw rawConn, o *observer, user []sqlmw.Interceptor) (operations, error) {
	if len(user) == 0 {
		return &observed{raw: raw, o: o}, nil
	}
	var d driver.Driver = sqlmw.Driver(openedDriver{raw}, o)
	for i := len(user) - 1; i >= 0; i-- {
		d = sqlmw.Driver(d, user[i])
	}
	c, err := d.(driver.DriverContext).OpenConnector("")
	if err != nil {
		return nil, err
	}
	dc, err := c.Connect(context.Background())
	if err != nil {
		return nil, err
	}
	ops, ok := dc.(operations)
	if !ok {
		return nil, fmt.Errorf("pgxgated: an interceptor's ConnectorConnect returned a %T, which lacks methods of the connection it was given", dc)
	}
	return ops, nil
}

// observed is a raw connection with our own interceptor only.
type observed struct {
	raw rawConn
	o   *observer
	tx  observedTx // the last; nothing keeps one that has ended
}

func (c *observed) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	_, tx, err := c.o.ConnBeginTx(ctx, c.raw, opts)
	if err != nil {
		return nil, err
	}
	c.tx = observedTx{tx, c.o}
	return &c.tx, nil
}

func (c *observed) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return c.o.ConnExecContext(ctx, c.raw, query, args)
}

func (c *observed) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	_, rows, err := c.o.ConnQueryContext(ctx, c.raw, query, args)
	return rows, err
}

func (c *observed) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	_, st, err := c.o.ConnPrepareContext(ctx, c.raw, query)
	return st, err
}

func (c *observed) Ping(ctx context.Context) error { return c.raw.Ping(ctx) }

type observedTx struct {
	tx driver.Tx
	o  *observer
}

func (t *observedTx) Commit() error   { return t.o.TxCommit(context.Background(), t.tx) }
func (t *observedTx) Rollback() error { return t.o.TxRollback(context.Background(), t.tx) }

// openedDriver is the driver of one connection that exists already, for sqlmw, which wraps only what it connects.
type openedDriver struct{ c rawConn }

func (d openedDriver) Open(string) (driver.Conn, error)               { return d.c, nil }
func (d openedDriver) OpenConnector(string) (driver.Connector, error) { return d, nil }
func (d openedDriver) Connect(context.Context) (driver.Conn, error)   { return d.c, nil }
func (d openedDriver) Driver() driver.Driver                          { return d }

// releaser is what gives a connection back: a *pgxpool.Conn, or a function.
type releaser interface{ Release() }

type releaseFunc func()

func (f releaseFunc) Release() { f() }

// pgxSide is what two kinds of source share for connections that are pgx's: the state kept with each connection, and the
// proof that a backend is gone.
type pgxSide struct {
	c      *Connector
	key    string // of our state in a connection's CustomData
	v      *verifier
	locks  lockSampler
	pooler atomic.Bool // the pids that connections report are not backends'
	said   sync.Once
}

var pgxSides atomic.Uint64

func newPgxSide(c *Connector, config func() *pgx.ConnConfig, before func(context.Context, *pgx.ConnConfig) error) *pgxSide {
	s := &pgxSide{
		c:   c,
		key: "pgxgated." + strconv.FormatUint(pgxSides.Add(1), 10),
		v: newVerifier(verifierConnect(config, before), c.cfg.drainGrace, c.cfg.drainLimit,
			func(uint32) { c.gate.countTerminated() }, c.cfg.gate.log, c.gate.name),
	}
	s.locks.v = s.v
	return s
}

// known returns the state of a connection that was used before, or nil.
func (s *pgxSide) known(conn *pgx.Conn, back releaser) *physical {
	p, _ := conn.PgConn().CustomData()[s.key].(*physical)
	if p != nil {
		p.raw.(*pgxRaw).back = back
	}
	return p
}

// first makes the state of a connection that is used for the first time. Where it fails, or an interceptor panics, the
// connection has been given back.
func (s *pgxSide) first(ctx context.Context, std *stdlib.Conn, back releaser) (*physical, error) {
	conn := std.Conn()
	// The caller may be about to give up, which must not cost the new connection (F16): the question goes on without it.
	var server string
	answer := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		var err error
		server, err = s.checkPID(ctx, conn.PgConn())
		answer <- err
	}()
	select {
	case err := <-answer:
		if err != nil {
			back.Release()
			return nil, err
		}
	case <-ctx.Done():
		go func() {
			<-answer
			back.Release()
		}()
		return nil, ctx.Err()
	}
	kept := false
	defer func() {
		if !kept {
			back.Release()
		}
	}()
	raw := &pgxRaw{
		std: std, conn: conn, back: back, server: server,
		rollbackTimeout: s.c.cfg.rollbackTimeout, commitTimeout: s.c.cfg.commitTimeout,
		track: s.c.cfg.track, serverDeadline: s.c.cfg.serverDeadline,
	}
	raw.limit.ring = func() { _ = conn.PgConn().Conn().SetDeadline(time.Unix(1, 0)) } // does not block
	o := &observer{g: s.c.gate}
	ops, err := wrap(raw, o, s.c.cfg.interceptors)
	if err != nil {
		return nil, err
	}
	p := &physical{operations: ops, observer: o, raw: raw, conn: conn, side: s, hookedRows: len(s.c.cfg.interceptors) > 0, traced: conn.Config().Tracer != nil}
	conn.PgConn().CustomData()[s.key] = p
	kept = true
	s.locks.add(conn.PgConn())
	return p, nil
}

// serverQuery tells a backend's own pid, and which server it belongs to where several share an address that is a load
// balancer's.
const serverQuery = "select pg_catalog.pg_backend_pid(), pg_catalog.concat(pg_catalog.inet_server_addr(), ' '," +
	" pg_catalog.inet_server_port(), ' ', pg_catalog.current_setting('port'))" // over a unix socket only the last is known

// checkPID finds out which server a connection leads to, and whether that is a pooler, which invents the pids it reports:
// then a backend cannot be proven gone by its pid, and I6 ends at the pooler. One round trip per physical connection.
func (s *pgxSide) checkPID(ctx context.Context, pg *pgconn.PgConn) (server string, err error) {
	if s.pooler.Load() {
		return "", nil
	}
	r, err := pg.Exec(ctx, serverQuery).ReadAll()
	if err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && !pg.IsClosed() {
			return "", nil // not PostgreSQL after all, or no such function: the verifier will say what it cannot see
		}
		return "", &staleError{err}
	}
	if len(r) != 1 || len(r[0].Rows) != 1 {
		return "", nil
	}
	row := r[0].Rows[0]
	if string(row[0]) != strconv.FormatUint(uint64(pg.PID()), 10) {
		s.pooler.Store(true)
		s.said.Do(func() {
			s.c.cfg.gate.log.Warn("pgxgated: the server is behind a pooler: what it still does after a cancelled operation cannot be seen, so limits hold up to the pooler only",
				"gate", s.c.gate.name)
		})
	}
	return string(row[1]), nil
}

// waits are what a logical connection waits with. They are handed on, as many logical connections do not live long (F18).
type waits struct {
	gate waiter
	pool poolWait
	next *waits // of those that are free
}

// poolWait bounds the wait for a physical connection. One wait at a time.
type poolWait struct {
	alarm alarm
	ctx   *poolContext // of the wait that goes on
}

// begin returns the context of a wait of at most d from a time on: ctx, until then. watch makes it look at ctx from the
// start. end must be called after it, and ends what was derived from it.
func (w *poolWait) begin(ctx context.Context, from time.Time, d time.Duration, watch bool) context.Context {
	if w.alarm.ring == nil {
		w.alarm.ring = func() { w.ctx.watch() }
	}
	w.ctx = &poolContext{Context: ctx, until: from.Add(d), done: make(chan struct{})}
	if watch {
		w.ctx.watch()
	}
	w.alarm.set(from.Add(min(d, poolWatchAfter)))
	return w.ctx
}

func (w *poolWait) end() {
	w.alarm.off()
	w.ctx.leave()
	w.ctx = nil
}

// poolContext is the context of a wait for a physical connection, which is nearly always there already. A context that is
// derived from the caller's costs more then than all the rest, so the caller's is not watched from the beginning, but once Done is
// asked a second time: puddle and database/sql both look at it once, take what is there, and ask again to wait for it.
// Should one of them cease to, it is watched after poolWatchAfter.
type poolContext struct {
	context.Context // the caller's
	until           time.Time
	done            chan struct{}
	asked           atomic.Bool

	mu      sync.Mutex // guards what follows
	watched bool
	stop    func() bool // ends the watch
	timer   *time.Timer // goes with it
	err     error       // why done is closed
}

const poolWatchAfter = 100 * time.Millisecond

// Deadline is for other drivers, which look at it when they connect.
func (c *poolContext) Deadline() (time.Time, bool) { return c.until, true }

func (c *poolContext) Done() <-chan struct{} {
	if c.asked.Swap(true) {
		c.watch()
	}
	return c.done
}

func (c *poolContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *poolContext) watch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.watched {
		c.watched = true
		c.stop = context.AfterFunc(c.Context, func() { c.end(c.Context.Err()) })
		c.timer = time.AfterFunc(time.Until(c.until), func() { c.end(context.DeadlineExceeded) })
	}
}

func (c *poolContext) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(why)
}

func (c *poolContext) endLocked(why error) {
	if c.err == nil {
		c.err = why
		close(c.done)
	}
}

// leave ends the watch and the context.
func (c *poolContext) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watched = true // from now on it is not to be
	if c.stop != nil {
		c.stop()
		c.timer.Stop()
	}
	c.endLocked(context.Canceled)
}

// poolSource takes physical connections from a pgxpool.
type poolSource struct {
	*pgxSide
	pool   *pgxpool.Pool
	std    driver.Connector // stdlib's view of the pool: the only maker of stdlib.Conn, and so of its Rows
	exact  bool
	handOn bool // of its connections
	own    bool
}

func newPoolSource(c *Connector, pool *pgxpool.Pool, own bool) *poolSource {
	cfg := pool.Config()
	_, acquireTracer := cfg.ConnConfig.Tracer.(pgxpool.AcquireTracer)
	_, releaseTracer := cfg.ConnConfig.Tracer.(pgxpool.ReleaseTracer)
	s := &poolSource{
		pgxSide: newPgxSide(c, cfg.ConnConfig.Copy, cfg.BeforeConnect),
		pool:    pool,
		std:     stdlib.GetPoolConnector(pool),
		// A stdlib.Conn can only be had by acquiring through stdlib, so the first use of a connection acquires it twice.
		// A pool with hooks would see that, so there every acquisition goes through stdlib: 1.9 µs instead of 0.4.
		//lint:ignore SA1019 a pool that was handed in may still have a BeforeAcquire
		exact: cfg.AfterRelease != nil || cfg.PrepareConn != nil || cfg.BeforeAcquire != nil ||
			acquireTracer || releaseTracer,
		own: own,
	}
	s.handOn = !s.exact && cfg.ShouldPing == nil // which is asked at each acquisition
	return s
}

func (s *poolSource) size() (p, out int) {
	st := s.pool.Stat()
	return int(st.MaxConns()), int(st.AcquiredConns())
}

func (s *poolSource) close() error {
	if s.own {
		go s.pool.Close() // waits for the connections that are out, which db.Close must not (F7)
	}
	s.v.close()
	s.locks.close()
	return nil
}

func (s *poolSource) acquire(ctx context.Context) (*physical, error) {
	return alive(ctx, s, s.acquireOnce)
}

// alive repeats acquire where it came upon a connection that the pool made long ago and that died since, which fails our first
// look at it.
func alive(ctx context.Context, s source, acquire func(context.Context) (*physical, error)) (*physical, error) {
	for tries := 0; ; tries++ {
		p, err := acquire(ctx)
		if err == nil {
			return p, nil
		}
		stale, ok := errors.AsType[*staleError](err)
		if !ok {
			return nil, err
		}
		if size, _ := s.size(); ctx.Err() != nil || tries > max(size, 4) {
			return nil, stale.err
		}
	}
}

func (s *poolSource) acquireOnce(ctx context.Context) (*physical, error) {
	if !s.exact {
		pc, err := s.pool.Acquire(ctx)
		if err != nil {
			return nil, poolError(err)
		}
		if p := s.known(pc.Conn(), pc); p != nil {
			return p, nil
		}
		pc.Release()
	}
	dc, err := s.std.Connect(ctx)
	if err != nil {
		return nil, poolError(err)
	}
	std := dc.(*stdlib.Conn)
	back := releaseFunc(func() { _ = std.Close() }) // Release of the pool's connection, which has no error
	if p := s.known(std.Conn(), back); p != nil {
		return p, nil
	}
	p, err := s.first(ctx, std, back)
	if err == nil {
		p.handOn = s.handOn
	}
	return p, err
}

// staleError says that a connection was dead when it was first looked at.
type staleError struct{ err error }

func (e *staleError) Error() string { return e.err.Error() }
func (e *staleError) Unwrap() error { return e.err }

// poolError is the error of an acquisition: of the pool's own kinds only what a caller can use.
func poolError(err error) error {
	if errors.Is(err, puddle.ErrClosedPool) {
		return ErrClosed
	}
	return err
}

// pgxTxOptions maps as stdlib does, unsupported levels included.
func pgxTxOptions(opts driver.TxOptions) (pgx.TxOptions, error) {
	var o pgx.TxOptions
	switch sql.IsolationLevel(opts.Isolation) {
	case sql.LevelDefault:
	case sql.LevelReadUncommitted:
		o.IsoLevel = pgx.ReadUncommitted
	case sql.LevelReadCommitted:
		o.IsoLevel = pgx.ReadCommitted
	case sql.LevelRepeatableRead, sql.LevelSnapshot:
		o.IsoLevel = pgx.RepeatableRead
	case sql.LevelSerializable:
		o.IsoLevel = pgx.Serializable
	default:
		return o, fmt.Errorf("unsupported isolation: %v", opts.Isolation)
	}
	if opts.ReadOnly {
		o.AccessMode = pgx.ReadOnly
	}
	return o, nil
}

var (
	_ rawConn = (*pgxRaw)(nil)
	_ rawConn = (*dbRaw)(nil)
)

// pgxRaw runs operations on a pgx connection. Queries go through stdlib, whose Rows database/sql shall see; the rest is on
// the *pgx.Conn, since stdlib turns errors into driver.ErrBadConn (I11) and ends transactions on the context of BeginTx (F9).
type pgxRaw struct {
	std                            *stdlib.Conn
	conn                           *pgx.Conn
	back                           releaser
	server                         string // to which it leads, as serverQuery tells it
	rows                           driver.Rows
	rollbackTimeout, commitTimeout time.Duration
	track                          bool // read the xid before COMMIT
	serverDeadline                 bool
	limit                          alarm
}

func (r *pgxRaw) takeRows() driver.Rows {
	rows := r.rows
	r.rows = nil
	return rows
}

func (r *pgxRaw) usable() bool {
	pg := r.conn.PgConn()
	return !pg.IsClosed() && !pg.IsBusy() && pg.TxStatus() == 'I'
}

func (r *pgxRaw) giveBack() {
	back := r.back
	r.back = nil
	back.Release()
}

// discard ends the session: what runs is cancelled, an open transaction is rolled back so that its locks go at once, and
// the connection is closed.
func (r *pgxRaw) discard(ctx context.Context) {
	pg := r.conn.PgConn()
	switch {
	case pg.IsClosed():
	case pg.IsBusy():
		_ = pg.CancelRequest(ctx) // best effort: the verifier sends it again
	case pg.TxStatus() != 'I':
		_, _ = r.conn.Exec(ctx, "rollback") // best effort: closing rolls back too, only later
	}
	_ = r.conn.Close(ctx)
	r.giveBack()
}

func (r *pgxRaw) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	values := make([]any, len(args))
	for i := range args {
		values[i] = args[i].Value
	}
	tag, err := r.conn.Exec(ctx, query, values...)
	if err != nil {
		return nil, err
	}
	return driver.RowsAffected(tag.RowsAffected()), nil
}

func (r *pgxRaw) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := r.std.QueryContext(ctx, query, args)
	if err == driver.ErrBadConn {
		return nil, r.unsent(ctx)
	}
	r.rows = rows
	return rows, err
}

// unsent is the cause that stdlib hides behind driver.ErrBadConn: nothing was sent.
func (r *pgxRaw) unsent(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case r.conn.IsClosed():
		return &notSentError{pgconn.ErrConnClosed}
	default:
		return &notSentError{errors.New("conn busy")}
	}
}

// notSentError is an error that occurred before anything was sent.
type notSentError struct{ err error }

func (e *notSentError) Error() string     { return e.err.Error() }
func (e *notSentError) Unwrap() error     { return e.err }
func (e *notSentError) SafeToRetry() bool { return true }

// PrepareContext asks the server whether the text is valid and how many parameters it takes. It leaves no statement behind:
// a statement is run as its text, which pgx's own cache makes a prepared one (F8).
func (r *pgxRaw) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	sd, err := r.conn.PgConn().Prepare(ctx, "", query, nil)
	if err != nil {
		return nil, err
	}
	return described(len(sd.ParamOIDs)), nil
}

func (r *pgxRaw) Ping(ctx context.Context) error { return r.conn.Ping(ctx) }

func (r *pgxRaw) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	o, err := pgxTxOptions(opts)
	if err != nil {
		return nil, err
	}
	deadline, ok := ctx.Deadline()
	if ok && r.serverDeadline {
		o.BeginQuery = beginWithDeadline(o, time.Until(deadline), r.conn.PgConn().ParameterStatus("server_version"))
	}
	tx, err := r.conn.BeginTx(ctx, o)
	if err != nil {
		return nil, err
	}
	if _, ours := ctx.(*txContext); !ours {
		ctx = context.WithoutCancel(ctx) // an interceptor's own, which it may end with BEGIN
	}
	return &pgxTx{r: r, tx: tx, ctx: ctx, deadline: deadline, readOnly: opts.ReadOnly}, nil
}

// beginWithDeadline is BEGIN and, in the same round trip, the time that remains as the transaction's own
// statement_timeout, and on PostgreSQL 17 and later as its transaction_timeout. Both are only ever made shorter than what
// the role or the database has set, and end with the transaction. What the server could not count is no deadline.
func beginWithDeadline(o pgx.TxOptions, remaining time.Duration, version string) string {
	var q strings.Builder
	q.WriteString("begin")
	if o.IsoLevel != "" {
		q.WriteString(" isolation level " + string(o.IsoLevel))
	}
	if o.AccessMode != "" {
		q.WriteString(" " + string(o.AccessMode))
	}
	ms := max(remaining.Milliseconds(), 1)
	if ms > math.MaxInt32 {
		return q.String()
	}
	// The setting is made 0 first: a transaction_timeout that BEGIN has started runs on when another one is set.
	tighten := func(setting string) {
		fmt.Fprintf(&q, "; select pg_catalog.set_config('%[1]s', pg_catalog.substr(pg_catalog.set_config('%[1]s', '0', true), 2) || '%[2]dms', true)"+
			" from (select 1000 * extract(epoch from pg_catalog.current_setting('%[1]s')::pg_catalog.interval) as t) s where t = 0 or t > %[2]d", setting, ms)
	}
	tighten("statement_timeout")
	end := strings.IndexFunc(version+".", func(r rune) bool { return r < '0' || r > '9' }) // 17.5, 18beta1
	if n, err := strconv.Atoi(version[:end]); err == nil && n >= 17 {
		tighten("transaction_timeout")
	}
	return q.String()
}

// What database/sql never calls on a connection with the methods above.
func (r *pgxRaw) Begin() (driver.Tx, error) {
	return r.BeginTx(context.Background(), driver.TxOptions{})
}
func (r *pgxRaw) Prepare(q string) (driver.Stmt, error) {
	return r.PrepareContext(context.Background(), q)
}
func (r *pgxRaw) Close() error { return nil }

// described is a statement of which only the number of parameters is known.
type described int

var errDescribed = errors.New("pgxgated: bug: a described statement was run")

func (d described) Close() error                               { return nil }
func (d described) NumInput() int                              { return int(d) }
func (d described) Exec([]driver.Value) (driver.Result, error) { return nil, errDescribed }
func (d described) Query([]driver.Value) (driver.Rows, error)  { return nil, errDescribed }

// dbSource takes physical connections from a *sql.DB of any driver. Where that driver is pgx's own, a connection is
// treated as one of a pgxpool is.
type dbSource struct {
	db  *sql.DB
	c   *Connector
	own bool

	once   sync.Once
	side   atomic.Pointer[pgxSide]  // made with the first connection that is pgx's
	latest atomic.Pointer[pgx.Conn] // connected as the verifier is to: passwords that are tokens change
}

func (s *dbSource) size() (p, out int) {
	st := s.db.Stats()
	return st.MaxOpenConnections, st.InUse
}

func (s *dbSource) close() error {
	if side := s.side.Load(); side != nil {
		side.v.close()
		side.locks.close()
	}
	if s.own {
		return s.db.Close() // does not wait for the connections that are out
	}
	return nil
}

// check finds out whether the driver can be gated, which only a connection tells. A server that does not answer within
// two seconds is left for the first use to report.
func (s *dbSource) check() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	sc, err := s.db.Conn(ctx)
	if err != nil {
		if err.Error() == "sql: database is closed" { // database/sql has no name for it
			return fmt.Errorf("pgxgated: the pool: %w", err)
		}
		return nil
	}
	defer sc.Close()
	return sc.Raw(func(dc any) error {
		_, err := checkInner(dc)
		return err
	})
}

func (s *dbSource) acquire(ctx context.Context) (*physical, error) {
	return alive(ctx, s, s.acquireOnce)
}

func (s *dbSource) acquireOnce(ctx context.Context) (*physical, error) {
	sc, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	raw := &dbRaw{sc: sc}
	var std *stdlib.Conn
	err = sc.Raw(func(dc any) error {
		std, _ = dc.(*stdlib.Conn)
		raw.valid, _ = dc.(driver.Validator)
		_, err := checkInner(dc)
		return err
	})
	if err == nil && std != nil {
		return s.pgx(ctx, sc, std)
	}
	kept := false
	defer func() {
		if !kept {
			_ = sc.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	o := &observer{g: s.c.gate}
	ops, err := wrap(raw, o, s.c.cfg.interceptors)
	if err != nil {
		return nil, err
	}
	kept = true
	return &physical{operations: ops, observer: o, raw: raw, hookedRows: len(s.c.cfg.interceptors) > 0}, nil
}

func (s *dbSource) pgx(ctx context.Context, sc *sql.Conn, std *stdlib.Conn) (*physical, error) {
	s.once.Do(func() {
		s.latest.Store(std.Conn())
		s.side.Store(newPgxSide(s.c, func() *pgx.ConnConfig { return s.latest.Load().Config() }, nil))
	})
	side := s.side.Load()
	back := releaseFunc(func() {
		if std.Conn().IsClosed() {
			_ = sc.Raw(func(any) error { return driver.ErrBadConn })
		}
		_ = sc.Close() // an error here is sql.ErrConnDone: the pool has it already
	})
	if p := side.known(std.Conn(), back); p != nil {
		return p, nil
	}
	s.latest.Store(std.Conn())
	return side.first(ctx, std, back)
}

// dbRaw runs operations on a connection of another *sql.DB. Each call goes through (*sql.Conn).Raw, which costs 48 ns and
// discards the connection when a call panics (F20).
type dbRaw struct {
	sc    *sql.Conn
	valid driver.Validator // nil if the driver has none
	rows  driver.Rows
	stmts []driver.Stmt // of rows that depend on them; closed when the connection goes back
	bad   bool          // the driver said so, or a call did not return
	inTx  bool
}

// inner is what a driver's connection must have.
type inner interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
}

// checkInner names what a driver's connection lacks.
func checkInner(dc any) (inner, error) {
	var lacks string
	if _, ok := dc.(driver.ConnBeginTx); !ok {
		lacks = "driver.ConnBeginTx"
	} else if _, ok := dc.(driver.ExecerContext); !ok {
		lacks = "driver.ExecerContext"
	} else if _, ok := dc.(driver.QueryerContext); !ok {
		lacks = "driver.QueryerContext"
	} else if _, ok := dc.(driver.ConnPrepareContext); !ok {
		lacks = "driver.ConnPrepareContext"
	}
	c, ok := dc.(inner)
	if !ok {
		return nil, fmt.Errorf("pgxgated: the pool's driver cannot be gated: its connection (%T) lacks %s", dc, lacks)
	}
	return c, nil
}

// run calls f with the driver's connection. A driver that says driver.ErrBadConn, or panics, loses it.
func (r *dbRaw) run(f func(inner) error) error {
	var lacking error
	err := r.sc.Raw(func(dc any) error {
		c, err := checkInner(dc)
		if err != nil {
			lacking = err
			return nil
		}
		r.bad = true // until f returns
		err = f(c)
		r.bad = errors.Is(err, driver.ErrBadConn)
		return err
	})
	if lacking != nil {
		return lacking
	}
	return err
}

func (r *dbRaw) takeRows() driver.Rows {
	rows := r.rows
	r.rows = nil
	return rows
}

func (r *dbRaw) usable() bool { return !r.bad && !r.inTx && (r.valid == nil || r.valid.IsValid()) }

func (r *dbRaw) giveBack() {
	if len(r.stmts) > 0 {
		_ = r.run(func(inner) error {
			for _, st := range r.stmts {
				_ = st.Close() // as database/sql does
			}
			return nil
		})
	}
	_ = r.sc.Close() // an error here is sql.ErrConnDone: the pool has it already
}

func (r *dbRaw) discard(context.Context) {
	_ = r.sc.Raw(func(any) error { return driver.ErrBadConn })
	_ = r.sc.Close()
}

func (r *dbRaw) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (res driver.Result, err error) {
	err = r.run(func(c inner) error {
		values, err := innerArgs(c, args)
		if err != nil {
			return err
		}
		res, err = c.ExecContext(ctx, query, values)
		if err != driver.ErrSkip {
			return err
		}
		st, err := c.PrepareContext(ctx, query)
		if err != nil {
			return err
		}
		defer st.Close()
		s, ok := st.(driver.StmtExecContext)
		if !ok {
			return fmt.Errorf("pgxgated: the pool's driver cannot be gated: its statement (%T) lacks driver.StmtExecContext", st)
		}
		res, err = s.ExecContext(ctx, values)
		return err
	})
	return res, err
}

func (r *dbRaw) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	err := r.run(func(c inner) error {
		values, err := innerArgs(c, args)
		if err != nil {
			return err
		}
		r.rows, err = c.QueryContext(ctx, query, values)
		if err != driver.ErrSkip {
			return err
		}
		st, err := c.PrepareContext(ctx, query)
		if err != nil {
			return err
		}
		r.stmts = append(r.stmts, st)
		s, ok := st.(driver.StmtQueryContext)
		if !ok {
			return fmt.Errorf("pgxgated: the pool's driver cannot be gated: its statement (%T) lacks driver.StmtQueryContext", st)
		}
		r.rows, err = s.QueryContext(ctx, values)
		return err
	})
	if err != nil {
		r.rows = nil
		return nil, err
	}
	return r.rows, nil
}

// PrepareContext gives a statement that is only to be closed: it is run as its text (F20).
func (r *dbRaw) PrepareContext(ctx context.Context, query string) (st driver.Stmt, err error) {
	err = r.run(func(c inner) error {
		inner, err := c.PrepareContext(ctx, query)
		if err != nil {
			return err
		}
		st = &dbStmt{described(inner.NumInput()), r, inner}
		return nil
	})
	return st, err
}

// dbStmt is a statement of another *sql.DB.
type dbStmt struct {
	described
	r     *dbRaw
	inner driver.Stmt
}

func (s *dbStmt) Close() error { return s.r.run(func(inner) error { return s.inner.Close() }) }

func (r *dbRaw) Ping(ctx context.Context) error {
	return r.run(func(c inner) error {
		if p, ok := c.(driver.Pinger); ok {
			return p.Ping(ctx)
		}
		return nil
	})
}

func (r *dbRaw) BeginTx(ctx context.Context, opts driver.TxOptions) (tx driver.Tx, err error) {
	err = r.run(func(c inner) error {
		t, err := c.BeginTx(ctx, opts)
		if err == nil {
			r.inTx = true
			tx = &dbTx{r, t}
		}
		return err
	})
	return tx, err
}

func (r *dbRaw) Begin() (driver.Tx, error) {
	return r.BeginTx(context.Background(), driver.TxOptions{})
}
func (r *dbRaw) Prepare(q string) (driver.Stmt, error) {
	return r.PrepareContext(context.Background(), q)
}
func (r *dbRaw) Close() error { return nil }

// innerArgs does what database/sql would have done for this driver, which it could not since the connection was not
// known when it asked (F11): the checker's conversions, driver.ErrSkip and driver.ErrRemoveArgument included.
func innerArgs(c inner, args []driver.NamedValue) ([]driver.NamedValue, error) {
	checker, _ := c.(driver.NamedValueChecker)
	out := make([]driver.NamedValue, 0, len(args))
	for _, nv := range args {
		nv.Ordinal = len(out) + 1
		err := driver.ErrSkip
		if checker != nil {
			err = checker.CheckNamedValue(&nv)
		}
		if err == driver.ErrSkip {
			nv.Value, err = driver.DefaultParameterConverter.ConvertValue(nv.Value)
		}
		switch {
		case err == driver.ErrRemoveArgument:
			continue
		case err != nil && nv.Name != "":
			return nil, fmt.Errorf("sql: converting argument with name %q type: %w", nv.Name, err)
		case err != nil:
			return nil, fmt.Errorf("sql: converting argument $%d type: %w", nv.Ordinal, err)
		}
		out = append(out, nv)
	}
	return out, nil
}
