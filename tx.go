package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated/internal/telemetry"
)

var (
	_ driver.Tx       = (*tx)(nil)
	_ driver.Tx       = (*pgxTx)(nil)
	_ driver.Tx       = (*dbTx)(nil)
	_ context.Context = (*txContext)(nil)
)

// txContext is the context of a transaction below database/sql. Up to the answer to BEGIN it is the caller's. From then
// on it keeps the values, but neither cancellation nor deadline: COMMIT and ROLLBACK, and the interceptors that see
// them, do not follow the caller's.
//
// An interceptor, or another driver, may go on watching what it was given, or derive a context from it. For those the
// channel is one of its own, which the caller's end no longer closes: with the caller's, a watcher would find it closed and
// Err nil, upon which package context and lib/pq panic. pgx alone keeps nothing of it, and is spared the four allocations.
type txContext struct {
	context.Context
	begun atomic.Bool
	done  chan struct{} // nil: the caller's
	stop  func() bool
}

// start makes it the context of a transaction that begins with ctx. kept says that somebody may go on watching it.
func (c *txContext) start(ctx context.Context, kept bool) {
	c.Context = ctx
	if kept && ctx.Done() != nil {
		c.done = make(chan struct{})
		if ctx.Err() != nil {
			close(c.done) // at once: AfterFunc takes a goroutine, and until then BEGIN would go out on a dead context
			return
		}
		c.stop = context.AfterFunc(ctx, func() { close(c.done) })
	}
}

// begin says that BEGIN has been answered.
func (c *txContext) begin() {
	c.begun.Store(true)
	if c.stop != nil {
		c.stop()
	}
}

func (c *txContext) Deadline() (time.Time, bool) {
	if c.begun.Load() {
		return time.Time{}, false
	}
	return c.Context.Deadline()
}

func (c *txContext) Done() <-chan struct{} {
	switch {
	case c.done != nil:
		return c.done
	case c.begun.Load():
		return nil
	default:
		return c.Context.Done()
	}
}

func (c *txContext) Err() error {
	if c.done != nil {
		select {
		case <-c.done:
			return c.Context.Err()
		default:
			return nil
		}
	}
	if c.begun.Load() {
		return nil
	}
	return c.Context.Err()
}

// tx is the transaction that database/sql holds. It ends the operation's work; the connection and the permits go back
// when database/sql returns the logical connection.
type tx struct {
	c     *conn
	ctx   context.Context // of BeginTx
	inner txContext       // what the connection below got
	in    driver.Tx       // through the interceptors
}

// Commit commits. It is not interrupted by the caller's cancellation. See [ErrOutcomeUnknown].
func (t *tx) Commit() error {
	return t.end(true)
}

// Rollback rolls back, within gate_rollback_timeout, also where the caller's context is done.
func (t *tx) Rollback() error {
	return t.end(false)
}

func (t *tx) end(commit bool) (err error) {
	c := t.c
	l := &c.l
	if l.p == nil || l.tx != t {
		if c.lostTx == t {
			c.lostTx = nil
		}
		return c.errLost() // a call in it panicked
	}
	alive := t.ctx.Err() == nil
	if l.p.closed() {
		// Cut off before COMMIT or ROLLBACK was sent: nothing was committed.
		l.tx, l.ok = nil, false
		err = l.deadErr(t.ctx)
		c.settle(telemetry.RolledBack)
		c.endPooled()
		return err
	}
	returned := false
	defer c.guard(&returned)
	if commit {
		err = t.in.Commit()
	} else {
		err = t.in.Rollback()
	}
	returned = true
	l.tx = nil
	c.note(t.ctx, err)
	if !commit && !alive && l.p.closed() {
		err = t.ctx.Err() // the caller's end came first; why the session could not be kept is no answer to it
	}
	switch {
	case errors.Is(err, ErrOutcomeUnknown):
		l.ok = false
		c.settle(telemetry.Unknown)
	case commit && err == nil:
		l.ok = true
		c.settle(telemetry.Committed)
	default:
		l.ok = err == nil && alive && l.ok
		c.settle(telemetry.RolledBack)
	}
	if l.p.closed() || l.p.raw.usable() {
		c.endPooled()
	} else {
		// It is still in the transaction that database/sql takes for ended: an interceptor did not go on. On a *sql.Conn what
		// comes next would silently become part of it.
		c.broken = true
		c.end(true)
	}
	return c.public(t.ctx, err)
}

// pgxTx is a transaction on a pgx connection.
type pgxTx struct {
	r        *pgxRaw
	tx       pgx.Tx
	ctx      context.Context
	deadline time.Time // of BeginTx, zero without one
	readOnly bool
}

func (t *pgxTx) Commit() error {
	var limit time.Duration
	if !t.deadline.IsZero() {
		limit = max(time.Until(t.deadline), t.r.commitTimeout)
	}
	var xid string
	var tracked, sent bool
	err, over := t.r.within(limit, func() (err error) {
		if t.r.track && !t.readOnly && t.r.conn.PgConn().TxStatus() == 'T' {
			if xid, err = t.r.xid(t.ctx); err != nil {
				return err
			}
			tracked = true
		}
		sent = true
		return t.tx.Commit(t.ctx)
	})
	if err == nil {
		return nil
	}
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return err
	case !sent || pgconn.SafeToRetry(err):
		if over {
			return fmt.Errorf("pgxgated: no answer within %v before COMMIT was sent: connection destroyed", limit)
		}
		return err
	case errors.As(err, &pgErr) && !mayHaveCommitted(pgErr):
		return err
	case over:
		err = fmt.Errorf("no answer within %v", limit)
	}
	return &outcomeError{err: err, tracked: tracked, xid: xid}
}

func (t *pgxTx) Rollback() error {
	limit := t.r.rollbackTimeout
	err, over := t.r.within(limit, func() error { return t.tx.Rollback(t.ctx) })
	if over {
		return fmt.Errorf("pgxgated: no answer to ROLLBACK within %v: connection destroyed", limit)
	}
	return err
}

// within runs f, which uses the connection, for at most d (0: no bound). When the time is over the connection's deadline is
// set into the past, upon which pgx gives up and closes it: contexts with a deadline cost 16 allocations per transaction.
func (r *pgxRaw) within(d time.Duration, f func() error) (err error, over bool) {
	if d == 0 {
		return f(), false
	}
	r.limit.set(time.Now().Add(d))
	err = f()
	over = r.limit.off()
	if over && !r.conn.IsClosed() {
		_ = r.conn.PgConn().Conn().SetDeadline(time.Time{}) // it was done in the same instant
		return err, false
	}
	return err, over && err != nil
}

// mayHaveCommitted tells that COMMIT may have been carried out although it was answered with this error. An ERROR aborts
// the transaction. A session that the server ends may have committed first, unless it was ended since it idled in the
// transaction: then that was the answer before COMMIT was asked.
func mayHaveCommitted(e *pgconn.PgError) bool {
	s := e.SeverityUnlocalized
	if s == "" {
		s = e.Severity
	}
	return (s == "FATAL" || s == "PANIC") && e.Code != "25P03" // idle_in_transaction_session_timeout
}

// xid returns the transaction's id, "" if it has none since it changed nothing.
func (r *pgxRaw) xid(ctx context.Context) (string, error) {
	res, err := r.conn.PgConn().Exec(ctx, "select pg_catalog.pg_current_xact_id_if_assigned()").ReadAll()
	if err != nil {
		return "", err
	}
	if len(res) != 1 || len(res[0].Rows) != 1 { // never take half an answer for "changed nothing"
		return "", errors.New("pgxgated: the server does not tell the transaction's id (WithOutcomeTracking)")
	}
	return string(res[0].Rows[0][0]), nil
}

// outcomeError is the error of a COMMIT whose answer never came.
type outcomeError struct {
	err     error
	tracked bool   // xid was asked for before COMMIT
	xid     string // "" if the transaction had none
}

func (e *outcomeError) Error() string {
	return fmt.Sprintf("pgxgated: %v: %v", ErrOutcomeUnknown, e.err)
}

func (e *outcomeError) Unwrap() []error { return []error{ErrOutcomeUnknown, e.err} }

// Outcome is what became of a transaction.
type Outcome string

const (
	OutcomeUnknown    Outcome = "unknown"
	OutcomeCommitted  Outcome = "committed"
	OutcomeRolledBack Outcome = "rolled_back"
	OutcomeNoChange   Outcome = "no_change" // it had changed nothing, so that it does not matter
)

// ResolveOutcome asks the server what became of a transaction whose Commit, or whose [InTx], returned err. The question
// goes past the gate (Bypass) and waits for a connection and the answer as long as ctx allows. While the transaction is
// still in progress on the server, ResolveOutcome asks again until ctx is done.
//
// db must lead to the very server that err came from: a transaction id means nothing to another one, and after a failover
// to a standby that lacked the last transactions it may mean a different transaction.
//
// Where err does not match ErrOutcomeUnknown there is nothing to ask: OutcomeRolledBack, or OutcomeCommitted for nil. (With
// another driver than pgx, an error of Commit that is not the network's and not a context's is taken for the server's answer.) With
// an error the outcome is OutcomeUnknown: the transaction was not tracked (see [WithOutcomeTracking]; one that began as
// read-only never is), the server has forgotten it, the question itself failed, or err is sql.ErrTxDone, which says only
// that an earlier Commit or Rollback has ended the transaction. Nothing is ever retried.
func ResolveOutcome(ctx context.Context, db *sql.DB, err error) (Outcome, error) {
	var lost *outcomeError
	switch {
	case err == nil:
		return OutcomeCommitted, nil
	case errors.Is(err, sql.ErrTxDone):
		return OutcomeUnknown, fmt.Errorf("pgxgated: the outcome cannot be known from this error: %w", err)
	case !errors.Is(err, ErrOutcomeUnknown):
		return OutcomeRolledBack, nil
	case !errors.As(err, &lost) || !lost.tracked:
		return OutcomeUnknown, errors.New("pgxgated: the outcome cannot be known: the transaction was not tracked (WithOutcomeTracking)")
	case lost.xid == "":
		return OutcomeNoChange, nil
	}
	ctx = Bypass(ctx)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		status, err := xactStatus(ctx, db, lost.xid)
		switch {
		case err != nil:
			return OutcomeUnknown, fmt.Errorf("pgxgated: asking for the outcome: %w", err)
		case !status.Valid:
			return OutcomeUnknown, errors.New("pgxgated: the outcome cannot be known: the server has forgotten the transaction")
		case status.String == "committed":
			return OutcomeCommitted, nil
		case status.String == "aborted":
			return OutcomeRolledBack, nil
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return OutcomeUnknown, fmt.Errorf("pgxgated: the transaction is still in progress: %w", ctx.Err())
		}
	}
}

// xactStatus asks in a transaction, since what broke COMMIT may have broken every idle connection of the pool: BEGIN is
// repeated on another one, a query is not.
func xactStatus(ctx context.Context, db *sql.DB, xid string) (status sql.NullString, err error) {
	t, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return status, err
	}
	defer t.Rollback() // nothing depends on it
	err = t.QueryRowContext(ctx, "select pg_catalog.pg_xact_status($1::text::pg_catalog.xid8)", xid).Scan(&status)
	return status, err
}

// InTx runs fn in a transaction: it begins it, runs fn, and commits. It waits as BeginTx does.
//
// If fn returns an error, panics or ends its goroutine the transaction is rolled back; an error of the rollback that says
// something new is joined to fn's, and a panic goes on unchanged. fn's value reaches the caller only after COMMIT was
// answered and the connection and its permit are back. An error of Commit is returned as it is; see [ErrOutcomeUnknown].
//
// fn must do its work with the transaction and the context that it is given, and leave it to InTx to end the transaction.
// Work outside of that transaction on the same gate with that context (another InTx, BeginTx or statement on the *sql.DB)
// would wait for a permit while holding one, and is refused at once with ErrNested (not in observe mode, and not what takes no
// permit: with [Bypass], and statements with ScopeTx); another gate is fine, and so is a goroutine that outlives the transaction. On a database
// that is not gated all of this holds but the refusal. Safe for concurrent use.
func InTx[T any](ctx context.Context, db *sql.DB, opts *sql.TxOptions, fn func(context.Context, *sql.Tx) (T, error)) (value T, err error) {
	var none T
	c := callOf(ctx)
	h := &holder{outer: c.held}
	beginning := c
	beginning.begins = h
	t, err := db.BeginTx(beginning.in(ctx), opts)
	if err != nil {
		return none, err
	}
	defer h.done.Store(true)
	defer func() {
		rolled := t.Rollback() // also on a panic or Goexit
		switch {
		case err == nil || rolled == nil:
		case errors.Is(rolled, sql.ErrTxDone): // it had ended: in Commit, or since the context did
		case errors.Is(err, rolled), ctx.Err() != nil && errors.Is(rolled, ctx.Err()):
			// The session had ended before, and with it the transaction.
		default:
			err = errors.Join(err, rolled)
		}
	}()
	c.held = h
	if value, err = fn(c.in(ctx), t); err != nil {
		return none, err
	}
	if err = t.Commit(); err != nil {
		return none, err
	}
	return value, nil
}

// dbTx is a transaction of another driver, which brings its own idea of contexts in COMMIT and ROLLBACK.
type dbTx struct {
	r *dbRaw
	t driver.Tx
}

func (t *dbTx) Commit() error {
	err := t.r.run(func(inner) error { t.r.inTx = false; return t.t.Commit() })
	if errors.Is(err, driver.ErrBadConn) {
		return &outcomeError{err: errLost}
	}
	if noAnswer(err) {
		return &outcomeError{err: err}
	}
	return err
}

// noAnswer tells that an error of another driver's is not the server's: the connection broke, or its wait was cut off. Every
// driver has a type of its own for what the server says, which is not known here.
func noAnswer(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func (t *dbTx) Rollback() error {
	return t.r.run(func(inner) error { t.r.inTx = false; return t.t.Rollback() })
}
