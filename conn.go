package pgxgated

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated/internal/telemetry"
)

var (
	_ driver.Conn               = (*conn)(nil)
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.ExecerContext      = (*conn)(nil)
	_ driver.QueryerContext     = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.SessionResetter    = (*conn)(nil)
	_ driver.Validator          = (*conn)(nil)
	_ driver.Stmt               = (*stmt)(nil)
	_ driver.StmtExecContext    = (*stmt)(nil)
	_ driver.StmtQueryContext   = (*stmt)(nil)
)

// What the driver promises beside the gate's own I1 to I5 and I7 (see [Gate]); comments and tests cite the numbers:
//
//	I6   the server never has more than Running gated operations at work: a permit comes back when the server is known to be
//	     done, or after gate_drain_limit, which is counted. For pgx, in enforce mode, as far as the driver can see the server
//	I8   a refusal never matches driver.ErrBadConn, which database/sql would try again, and opens no connection
//	I9   errors of the server reach the caller unchanged, with the same dynamic type
//	I10  once something has run on an operation's physical connection, the operation is never moved to another one
//	I11  no error that leaves a logical connection matches driver.ErrBadConn
//
// What it rests on, of database/sql and pgx, cited as F and a number:
//
//	F1   database/sql calls IsValid when it takes a connection back
//	F2   … but not after ErrBadConn, when it calls Close, nor alone where it keeps no idle ones: then it calls both
//	F6   a wrapper above may hide Validator, SessionResetter, DriverContext and io.Closer, never Close
//	F7   (*sql.DB).Close does not wait for what is in use; pgxpool's does
//	F8   a *sql.Stmt of the database remembers logical connections, each of which may be on another backend by then
//	F9   pgx's stdlib runs COMMIT and ROLLBACK on the context of BeginTx
//	F11  database/sql asks CheckNamedValue before anything is bound
//	F12  (*sql.Conn).Raw has no context and no hook
//	F14  embedding driver.Rows, or sqlmw's wrapper of it, hides optional interfaces
//	F16  a dial inside a caller's context never succeeds under short deadlines
//	F17  after a panic or Goexit in a driver call neither IsValid nor Close need follow
//	F18  RowsAffected and Stmt.Close lock a connection that may meanwhile be somebody else's
//	F19  Stmt.Close may run with the lock of *sql.DB held
//	F20  through (*sql.Conn).Raw of an inner pool a panic discards the connection, and its driver's checker is asked there
//	F21  sqlmw wraps only connections that its own driver made, and hands interceptors the context of BeginTx at the end
//	F22  Go 1.27 reads rows by column (driver.RowsColumnScanner) where they can be, and then never calls Next

// conn is a logical connection: what database/sql holds. It has no socket. With the first operation it takes a permit and
// then a physical connection, and keeps both until database/sql returns it:
//
//	unbound → permit → physical connection → statements, transactions → IsValid or Close → unbound
//
// The physical connection comes from the pool, or with the permit from the operation before (Gate.handOn).
//
// How it learns of the return (F1, F2): database/sql calls IsValid when it takes a connection back, or Close where it
// drops it, or both, so whichever comes first ends the lease. Where a wrapper above hides both, see endPooled.
//
// It promises that no error of it matches driver.ErrBadConn (I11): database/sql would send the caller through the gate
// again, or leave it with a transaction that it cannot end. Before anything ran another physical connection is taken under
// the same permits; after that the operation stays where it is (I10) and gets the cause.
//
// All methods run under the lock that database/sql holds for the connection, so its state needs none. What outlives the
// lease (draining) works on what it was handed, never on the conn.
type conn struct {
	c      *Connector
	l      lease
	w      *waits // to wait with
	closed bool
	used   bool // an operation has ended on it
	stmts  int  // statements of it that are open
	result bool // a driver.Result of it is out, and whoever asks that one locks this connection (F18)
	broken bool // its session is gone, by a panic or unseen by database/sql, and whoever pinned it must not get another one unnoticed (I10)
	once   bool // broken is to be told once: nobody tells when the *sql.Conn is closed, and all who come later would hear it for ever
	lostTx *tx  // the transaction in which that was, until it is ended
}

// lease is what one operation holds.
type lease struct {
	permit   handle
	gated    bool // permit was asked for (it is the zero handle after Bypass)
	p        *physical
	tx       *tx
	things   int   // operations done under it: with the second it is a pinned connection
	fresh    bool  // nothing has run on p yet
	ok       bool  // so far what the estimator calls successful
	raw      bool  // p was handed out inside Raw, whose end nobody tells us
	ours     bool  // p was closed during a call of ours, so it was not hijacked inside Raw
	cause    error // why p is dead
	pooled   bool  // no hook tells of the return: give everything back when the operation ends
	pinned   bool  // no hook tells of the return, and it is a *sql.Conn: give the permit back when the operation ends
	closedAt time.Time
}

// errLost is the cause where there is no better one.
var errLost = errors.New("connection lost")

// begin makes sure that the operation of kind k holds what it needs. It waits for a running permit and then for a
// physical connection. What it returns an error for has been given back.
func (c *conn) begin(ctx context.Context, k kind, pinned bool) error {
	l := &c.l
	if c.closed {
		return c.errLost()
	}
	if l.tx == nil {
		hidden := !c.c.returns.Load()
		if hidden {
			pinned = pinned || pinnedCaller()
			if l.pinned && !pinned {
				c.end(false) // the *sql.Conn that left this here has been closed
			}
			if !pinned && c.lostTx == nil {
				c.broken = false // it is somebody else's now
			}
			if c.used && !pinned && l.p == nil {
				c.c.warnHidden()
			}
		}
		l.pooled, l.pinned = hidden && !pinned, hidden && pinned
	}
	if c.broken {
		if c.once && l.pinned {
			c.broken, c.once = false, false
			c.c.warnHidden()
		}
		return c.errLost()
	}
	if l.p != nil && l.p.closed() {
		err := c.public(ctx, l.deadErr(ctx))
		if l.tx == nil && l.pinned {
			c.end(true) // it was closed inside Raw
		}
		return err
	}
	var handed *physical
	var since time.Duration
	if l.tx == nil && !l.gated && (c.c.cfg.scope == ScopeAll || k == kindRead || k == kindTx) {
		h, err := c.c.gate.acquireAs(ctx, k, &c.c.member, &c.w.gate)
		if err != nil {
			return err
		}
		l.permit, l.gated, since = h, h != handle{}, h.at
		if with := c.w.gate.luggage(); with != nil {
			if l.p == nil {
				handed = with.(*physical)
			} else {
				with.giveBack()
			}
		}
	}
	if l.p == nil {
		l.fresh, l.ok, l.things = true, true, 0
		if err := c.take(ctx, since, handed); err != nil {
			c.c.gate.release(l.permit, false)
			*l = lease{}
			return err
		}
	}
	if l.tx == nil {
		if l.things++; l.things > 1 && l.gated {
			c.c.gate.relabel(l.permit, kindPinned)
		}
	}
	return nil
}

// take gets a physical connection for the lease, handed or from the pool. since is when the wait for it began, 0: now.
func (c *conn) take(ctx context.Context, since time.Duration, p *physical) (err error) {
	g := c.c.gate
	rec := g.sink.Load()
	if since == 0 {
		since = g.now()
	}
	if p == nil {
		returned := false
		defer c.guard(&returned) // hooks of the pool may panic
		p, err = c.c.physical(ctx, &c.w.pool, since)
		returned = true
	}
	var now time.Duration
	if rec != nil {
		now = g.now()
		rec.PoolWait(g.workloadOf(ctx), now-since)
	}
	if err != nil {
		switch {
		case errors.Is(err, ErrPoolTimeout):
			rec.PoolError(telemetry.PoolTimeout)
		case ctx.Err() != nil:
			rec.PoolError(telemetry.PoolCanceled)
		case !errors.Is(err, ErrClosed):
			rec.PoolError(telemetry.PoolFailed)
		}
		return err
	}
	if !p.hookedRows {
		p.observer.from = now // no interceptors in between: the first call follows at once
	}
	c.l.p, c.l.closedAt = p, time.Time{}
	return nil
}

// again takes another physical connection where the one at hand turned out dead before anything ran on it; then the call
// is to be repeated. begin says that the call was BEGIN, which may be repeated even if it was sent.
func (c *conn) again(ctx context.Context, err *error, tries *int, begin bool) bool {
	l := &c.l
	if *err == nil || !l.fresh || ctx.Err() != nil || l.gaveUp(tries, c.c.src()) {
		return false
	}
	var pgErr *pgconn.PgError
	switch {
	case l.p.conn == nil:
		if !errors.Is(*err, driver.ErrBadConn) {
			return false
		}
	case !l.p.closed():
		return false
	case errors.As(*err, &pgErr):
		// A session that was ended while it was idle answers its next statement with why.
		if !begin || !strings.HasPrefix(pgErr.Code, "57P") {
			return false
		}
	case !begin && !pgconn.SafeToRetry(*err):
		return false
	}
	p := l.p
	l.p = nil
	discard(p)
	if took := c.take(ctx, 0, nil); took != nil {
		*err = took // says more than what the dead connection said
		return false
	}
	return true
}

// outdatedPlan tells that the server refused to run a statement with the plan it had kept, since the table has changed; by
// then pgx has dropped that plan, so the call is to be repeated on the same connection. Plain pgx spares those this error who
// prepare a statement anew after the change, as GORM does; here a statement is its text (F8), so it must be spared
// everybody. In a transaction, which the error has aborted, and inside a function it cannot be.
func (c *conn) outdatedPlan(ctx context.Context, err error) bool {
	if err == nil || c.l.p.conn == nil || ctx.Err() != nil {
		return false
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return false
	}
	// By the routine, as the message is in the server's language.
	return pgErr.Code == "0A000" && pgErr.Routine == "RevalidateCachedQuery" && pgErr.Where == "" && c.l.p.raw.usable()
}

func (l *lease) gaveUp(tries *int, s source) bool {
	p, _ := s.size()
	*tries++
	return *tries > max(p, 4)+1
}

// note keeps what a call on the physical connection tells about it.
func (c *conn) note(ctx context.Context, err error) {
	l := &c.l
	// Another driver's ErrBadConn promises that nothing ran.
	l.fresh = l.fresh && l.p != nil && l.p.conn == nil && errors.Is(err, driver.ErrBadConn)
	if err != nil && l.tx != nil {
		l.ok = false
	}
	if l.p == nil || !l.p.closed() || l.ours {
		return
	}
	l.ours, l.closedAt, l.ok = true, time.Now(), false
	c.cutOff(ctx)
	switch {
	case ctx.Err() != nil:
		l.cause = ctx.Err()
	case err != nil && !errors.Is(err, driver.ErrBadConn): // I11: an interceptor may have said so
		l.cause = err
	default:
		l.cause = errLost
	}
}

// cutOff tells the gate if the caller's deadline has ended the work.
func (c *conn) cutOff(ctx context.Context) {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		c.c.gate.cutOff(c.l.permit)
	}
}

// deadErr is the answer to whoever uses a lease whose connection is gone.
func (l *lease) deadErr(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case l.cause != nil:
		return l.cause
	default:
		return errLost
	}
}

// public is err as it may leave the logical connection (I9, I11): the server's errors as they are, the context's own
// where the context ended the call, and never driver.ErrBadConn.
func (c *conn) public(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, driver.ErrBadConn) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return c.errLost()
	}
	if done := ctx.Err(); done != nil && !errors.Is(err, done) && (c.l.p == nil || c.l.p.closed()) {
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) && !errors.Is(err, ErrOutcomeUnknown) {
			return done // what the cut connection said is only the echo of it
		}
	}
	return err
}

func (c *conn) errLost() error {
	return fmt.Errorf("pgxgated: gate %q: %w", c.c.gate.name, errLost)
}

// guard is deferred around everything that may call a driver, a hook or an interceptor. One that panics, or ends its
// goroutine, leaves a connection in an unknown state and reaches neither IsValid nor, maybe, Close (F17): the lease is
// given up on the spot.
func (c *conn) guard(returned *bool) {
	if *returned {
		return
	}
	c.l.ok, c.l.fresh = false, false
	c.broken, c.once, c.lostTx = true, false, c.l.tx
	c.end(true)
}

// ExecContext runs a statement. It waits for a running permit and a physical connection where the operation has none yet.
func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return c.exec(ctx, query, args, false)
}

func (c *conn) exec(ctx context.Context, query string, args []driver.NamedValue, pinned bool) (res driver.Result, err error) {
	if err := c.begin(ctx, kindAutocommit, pinned); err != nil {
		return nil, err
	}
	c.c.gate.leaks.ran(c.l.permit, query)
	returned := false
	defer c.guard(&returned)
	for tries, replanned := 0, false; ; {
		res, err = c.l.p.ExecContext(ctx, query, args)
		if !replanned && c.outdatedPlan(ctx, err) {
			replanned = true
		} else if !c.again(ctx, &err, &tries, false) {
			break
		}
	}
	returned = true
	c.note(ctx, err)
	err = c.public(ctx, err)
	c.endPooled()
	if err != nil {
		return nil, err
	}
	c.result = true
	return res, nil
}

// QueryContext runs a query. It waits as ExecContext does. The rows hold the permit until they are closed.
func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return c.query(ctx, query, args, false)
}

func (c *conn) query(ctx context.Context, query string, args []driver.NamedValue, pinned bool) (driver.Rows, error) {
	if err := c.begin(ctx, kindAutocommit, pinned); err != nil {
		return nil, err
	}
	c.c.gate.leaks.ran(c.l.permit, query)
	returned := false
	defer c.guard(&returned)
	var rows driver.Rows
	var err error
	for tries, replanned := 0, false; ; {
		rows, err = c.l.p.QueryContext(ctx, query, args)
		if !replanned && c.outdatedPlan(ctx, err) {
			replanned = true
		} else if !c.again(ctx, &err, &tries, false) {
			break
		}
	}
	if err != nil && c.l.p != nil {
		if left := c.l.p.raw.takeRows(); left != nil {
			_ = left.Close() // of an interceptor that failed after the query had succeeded; its error is the answer
		}
	}
	returned = true
	c.note(ctx, err)
	if err != nil {
		err = c.public(ctx, err)
		c.endPooled()
		return nil, err
	}
	raw := c.l.p.raw.takeRows()
	hooked := rows
	switch {
	case raw == nil: // an interceptor answered by itself
		raw = rows
	case !c.l.p.hookedRows && !c.l.p.traced:
		hooked = nil
	}
	if hooked == nil && !c.l.pooled && !c.l.pinned {
		return raw, nil
	}
	if hooked == nil {
		hooked = raw
	}
	return newRows(c, raw, hooked), nil
}

// PrepareContext finds out how many parameters a text takes, with one round trip under a permit for the first statement of
// that text, and none after. The statement is its text, run on whichever connection is bound (F8).
func (c *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	pinned := !c.c.returns.Load() && pinnedCaller()
	if n, ok := c.c.texts.get(query); ok {
		return c.newStmt(query, n, pinned, nil), nil
	}
	if err := c.begin(ctx, kindAutocommit, pinned); err != nil {
		return nil, err
	}
	returned := false
	defer c.guard(&returned)
	var st driver.Stmt
	var err error
	for tries := 0; ; {
		st, err = c.l.p.PrepareContext(ctx, query)
		if !c.again(ctx, &err, &tries, false) {
			break
		}
	}
	isPgx := c.l.p != nil && c.l.p.conn != nil
	var closing error
	if err == nil && !isPgx {
		closing = c.public(ctx, st.Close())
	}
	returned = true
	c.note(ctx, err)
	err = c.public(ctx, err)
	c.endPooled()
	if err != nil {
		return nil, err
	}
	n := st.NumInput()
	if isPgx {
		c.c.texts.put(query, n) // another driver's Prepare is its own business each time: a mock counts them
	}
	return c.newStmt(query, n, pinned, closing), nil
}

// BeginTx begins a transaction. Options that the server could not take are refused before anything is taken. It waits for
// a running permit, for a physical connection, and for the answer to BEGIN, each with its own bound.
func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if c.c.pgx {
		if _, err := pgxTxOptions(opts); err != nil {
			return nil, err
		}
	}
	k := kindTx
	if opts.ReadOnly {
		k = kindRead
	}
	if err := c.begin(ctx, k, false); err != nil {
		return nil, err
	}
	c.c.gate.leaks.ran(c.l.permit, "begin")
	returned := false
	defer c.guard(&returned)
	var in driver.Tx
	var err error
	t := &tx{c: c, ctx: ctx}
	inner := &t.inner
	inner.start(ctx, c.l.p.conn == nil || c.l.p.hookedRows)
	for tries := 0; ; {
		in, err = c.l.p.BeginTx(inner, opts)
		if !c.again(ctx, &err, &tries, true) {
			break
		}
	}
	inner.begin()
	returned = true
	c.note(ctx, err)
	if err != nil {
		c.l.ok = false
		err = c.public(ctx, err)
		c.endPooled()
		return nil, err
	}
	if h := callIn(ctx).begins; h != nil {
		h.gate = c.c.gate
	}
	t.in = in
	c.l.tx = t
	return t, nil
}

// Ping asks the server without a permit: health checks must answer under overload. An unbound connection takes a physical
// one for the length of the call.
func (c *conn) Ping(ctx context.Context) (err error) {
	if found, ok := ctx.Value(connectorKey{}).(**Connector); ok {
		*found = c.c
		return nil
	}
	if c.l.p != nil {
		if c.l.p.closed() {
			return c.l.deadErr(ctx)
		}
		returned := false
		defer c.guard(&returned)
		err := c.l.p.Ping(ctx)
		returned = true
		c.note(ctx, err)
		return c.public(ctx, err)
	}
	if c.closed || c.broken && (c.c.returns.Load() || pinnedCaller()) {
		return c.errLost() // it is asked whether its session is still there
	}
	// A connection that died while idle says nothing about the server, so another one is asked. Any other answer is one: the
	// server's, or a mock's, which expects as many pings as were sent.
	for tries := 0; ; tries++ {
		p, err := c.c.physical(ctx, &c.w.pool, c.c.gate.now())
		if err != nil {
			return err
		}
		dead, err := pingOnce(ctx, p)
		n, _ := c.c.src().size()
		if err == nil || !dead {
			return err
		}
		if ctx.Err() != nil || tries > max(n, 4) {
			return c.public(ctx, err)
		}
	}
}

// pingOnce tells whether the connection was dead, too.
func pingOnce(ctx context.Context, p *physical) (dead bool, err error) {
	returned := false
	defer func() {
		dead = p.closed() || errors.Is(err, driver.ErrBadConn)
		if !returned || !p.raw.usable() {
			discard(p)
			return
		}
		p.giveBack()
	}()
	err = p.Ping(ctx)
	returned = true
	return false, err
}

// CheckNamedValue accepts everything: pgx converts by the types of the server, and another driver's checker is asked once
// its connection is known (F11). Nothing is bound for it.
func (c *conn) CheckNamedValue(*driver.NamedValue) error { return nil }

// ResetSession does nothing to an unbound connection, least of all network I/O. On one that still holds something it tells
// that database/sql had taken it back unnoticed.
func (c *conn) ResetSession(context.Context) error {
	c.end(false)
	c.broken = false
	return nil
}

// IsValid is how database/sql tells that it takes the connection back (F1). It ends the lease and waits for nothing.
//
// It answers false where a Result or a Stmt of it may still be used: either locks this connection, and would stand in the
// queue with whoever got it next (F18). Nobody tells when a Result is done with. Another driver's statements are prepared
// anew on each connection, so there a connection with a Stmt is kept, also with a Result, as long as nobody would have to
// wait. A logical connection made anew costs some microseconds in database/sql, so others are kept.
func (c *conn) IsValid() bool {
	if !c.c.returns.Load() {
		c.c.returns.Store(true)
	}
	c.end(false)
	if c.closed || c.broken {
		return false
	}
	if c.stmts > 0 && !c.c.pgx {
		return !c.c.contended()
	}
	return !c.result && c.stmts == 0
}

// Close ends the lease, if IsValid has not. It waits for nothing.
func (c *conn) Close() error {
	// Without an IsValid before it, where that is not hidden, somebody said that the connection is bad: in Raw, or the
	// driver's rows. One that was handed out inside Raw may be in any state (F2).
	c.end(c.l.raw || c.c.returns.Load())
	if !c.closed {
		c.closed = true
		c.c.connClosed(c.w)
		c.w = nil
	}
	return nil
}

// endPooled gives back at the operation's end where no hook tells of the return: everything for a pooled connection, the
// permit for a pinned one, whose session must stay.
func (c *conn) endPooled() {
	c.used = true
	l := &c.l
	switch {
	case l.tx != nil:
	case l.pooled:
		c.end(false)
	case l.pinned && (l.p == nil || l.p.closed()):
		c.broken, c.once = l.p != nil, true
		c.end(true)
	case l.pinned && l.p.conn != nil && l.p.conn.PgConn().IsBusy():
		// It was refused since the rows of another operation are open. The permit stays out until those are closed (I6).
	case l.pinned:
		c.c.gate.release(l.permit, l.ok)
		l.permit, l.gated = handle{}, false
	}
}

// end ends the lease: the physical connection first, then the permits. A connection that is idle, outside a transaction
// and unbroken goes back to its pool; any other is destroyed, and the permits stay out until its end is proven (I6).
func (c *conn) end(destroy bool) {
	l := c.l
	if l.p == nil && !l.gated {
		return
	}
	c.l = lease{}
	c.used = true
	g := c.c.gate
	switch {
	case l.p == nil:
		g.release(l.permit, false)
	case !destroy && l.p.raw.usable():
		if l.p.handOn && c.c.asking.Load() == 0 && g.handOn(l.permit, l.ok, &c.c.member, l.p, l.p.until) {
			break
		}
		l.p.giveBack()
		g.release(l.permit, l.ok)
	case l.permit == handle{}:
		discard(l.p)
	case l.fresh && l.p.conn == nil:
		discard(l.p) // it never worked, so there is nothing to prove
		g.release(l.permit, false)
	default:
		g.drain(l.permit)
		c.c.drain(l)
	}
}

func (c *conn) settle(o telemetry.Outcome) { c.c.gate.sink.Load().Transaction(o) }

// Format is what is printed for a connection that Raw hands out: its timers change it at any time.
func (c *conn) Format(s fmt.State, _ rune) {
	fmt.Fprintf(s, "pgxgated connection of gate %q", c.c.gate.name)
}

// Begin and Prepare are required of a driver.Conn and not called on one with the methods above.
func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }
func (c *conn) Prepare(q string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), q)
}

// discard destroys a connection for which no permit waits. It does not block.
func discard(p *physical) {
	if p.closed() {
		p.giveBack()
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		p.raw.discard(ctx)
	}()
}

// drain destroys the connection of a lease and releases its permit once the server is known to be done with it. It does
// not block.
func (c *Connector) drain(l lease) {
	p := l.p
	release := func(gone bool) {
		if !gone {
			c.gate.countUnproven()
		}
		c.gate.release(l.permit, false)
	}
	if p.conn == nil {
		// Another driver: closing is all that can be done, and nothing can be known.
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), c.cfg.rollbackTimeout)
			defer cancel()
			p.raw.discard(ctx)
		}()
		time.AfterFunc(c.cfg.drainLimit, func() {
			c.cfg.gate.log.Warn("pgxgated: permit back without proof that the server is done: the driver gives none", "gate", c.gate.name, "after", c.cfg.drainLimit)
			release(false)
		})
		return
	}
	pg := p.conn.PgConn()
	b := backend{pid: pg.PID(), addr: pg.Conn().RemoteAddr(), server: p.raw.(*pgxRaw).server, closedAt: l.closedAt, cancel: pg.CancelRequest, done: release}
	if !p.closed() {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), c.cfg.rollbackTimeout)
			defer cancel()
			p.raw.discard(ctx)
			b.closedAt = time.Now()
			p.side.prove(b, pg)
		}()
		return
	}
	if !l.ours {
		b.closedAt = time.Now() // while rows were read, or inside Raw
	}
	if !l.ours && l.raw {
		// Closed inside Raw: cancelled there, or hijacked. Then it is somebody else's now, and neither to be cancelled nor to
		// be terminated by us; pgx never calls it cleaned up.
		b.mayTerminate = func() bool {
			select {
			case <-pg.CleanupDone():
				return true
			default:
				return false
			}
		}
		b.cancel = func(ctx context.Context) error {
			if !b.mayTerminate() {
				return nil
			}
			return pg.CancelRequest(ctx)
		}
	}
	p.giveBack()
	p.side.prove(b, pg)
}

// prove calls b.done once the backend is gone. Behind a pooler that cannot be seen: there the client's own clean-up is all
// there is to wait for, and what comes back is counted as unproven.
func (s *pgxSide) prove(b backend, pg *pgconn.PgConn) {
	if !s.pooler.Load() {
		s.v.watch(b)
		return
	}
	go func() {
		limit := time.NewTimer(s.c.cfg.drainLimit)
		defer limit.Stop()
		select {
		case <-pg.CleanupDone():
		case <-limit.C:
		}
		b.done(false)
	}()
}

// stmt is a statement: its text (F8). It holds nothing, so closing it waits for nothing, which matters since
// database/sql closes statements with its own lock held (F19).
type stmt struct {
	c       *conn
	query   string
	inputs  int
	pinned  bool  // prepared on a *sql.Conn
	closing error // what closing it below said, right after it was prepared; for Close to tell
}

func (c *conn) newStmt(query string, inputs int, pinned bool, closing error) *stmt {
	c.stmts++
	return &stmt{c: c, query: query, inputs: inputs, pinned: pinned, closing: closing}
}

// Close is called once, with the connection locked.
func (s *stmt) Close() error {
	s.c.stmts--
	return s.closing
}

func (s *stmt) NumInput() int { return s.inputs }

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.c.exec(ctx, s.query, args, s.pinned)
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.c.query(ctx, s.query, args, s.pinned)
}

// database/sql prefers the methods above.
var errNoContext = errors.New("pgxgated: use ExecContext or QueryContext")

func (s *stmt) Exec([]driver.Value) (driver.Result, error) { return nil, errNoContext }
func (s *stmt) Query([]driver.Value) (driver.Rows, error)  { return nil, errNoContext }

// PgxConn returns the pgx connection of a pinned connection, to be called inside (*sql.Conn).Raw with what Raw hands out:
//
//	err := c.Raw(func(dc any) error {
//		pc, err := pgxgated.PgxConn(ctx, dc)
//		if err != nil {
//			return err
//		}
//		_, err = pc.CopyFrom(ctx, table, columns, source)
//		return err
//	})
//
// Where the connection has none yet it takes a permit and a physical connection, and waits for them as a statement would;
// both stay until the *sql.Conn is closed; below a wrapper that hides its return, until the logical connection is used again,
// which SetMaxIdleConns(0) makes its close. The *pgx.Conn must not be used after Raw's function has returned, and should
// not be closed. It follows the Raw() driver.Conn method of wrappers such as otelsql's. The error names what it found if
// that leads to no connection of this package, or to one of another driver than pgx.
func PgxConn(ctx context.Context, driverConn any) (*pgx.Conn, error) {
	for dc := driverConn; ; {
		switch v := dc.(type) {
		case *conn:
			return v.pgxConn(ctx)
		case interface{ Raw() driver.Conn }:
			dc = v.Raw()
		default:
			return nil, fmt.Errorf("pgxgated: PgxConn: a %T is no gated connection and has no Raw() driver.Conn to find one", driverConn)
		}
	}
}

func (c *conn) pgxConn(ctx context.Context) (*pgx.Conn, error) {
	if err := c.begin(ctx, kindPinned, true); err != nil {
		return nil, err
	}
	if c.l.p.conn == nil {
		return nil, fmt.Errorf("pgxgated: PgxConn: the pool's driver is not pgx")
	}
	c.l.raw, c.l.fresh, c.l.p.observer.from = true, false, 0
	return c.l.p.conn, nil
}

// pinnedCaller tells whether the call came through a *sql.Conn. It is asked only as long as no IsValid has told of a
// return: 4 µs.
func pinnedCaller() bool {
	var pcs [64]uintptr
	for skip := 3; ; skip += len(pcs) {
		n := runtime.Callers(skip, pcs[:])
		if n == 0 {
			return false
		}
		frames := runtime.CallersFrames(pcs[:n])
		for {
			f, more := frames.Next()
			switch {
			case strings.HasPrefix(f.Function, "database/sql.(*Conn)."):
				return true
			case strings.HasPrefix(f.Function, "database/sql.(*DB).retry"), strings.HasPrefix(f.Function, "database/sql.(*Stmt)."):
				return false
			}
			if !more {
				break
			}
		}
	}
}
