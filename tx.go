package pgxgated

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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
type txContext struct {
	context.Context
	begun atomic.Bool
}

func (c *txContext) Deadline() (time.Time, bool) {
	if c.begun.Load() {
		return time.Time{}, false
	}
	return c.Context.Deadline()
}

func (c *txContext) Done() <-chan struct{} {
	if c.begun.Load() {
		return nil
	}
	return c.Context.Done()
}

func (c *txContext) Err() error {
	if c.begun.Load() {
		return nil
	}
	return c.Context.Err()
}

// tx is the transaction that database/sql holds. It ends the operation's work; the connection and the permits go back
// when database/sql returns the logical connection.
type tx struct {
	c   *conn
	ctx context.Context // of BeginTx
	in  driver.Tx       // through the interceptors
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
		return fmt.Errorf("pgxgated: gate %q: %w", c.c.gate.name, errLost) // a call in it panicked
	}
	alive := t.ctx.Err() == nil
	if l.p.closed() {
		// Cut off before COMMIT or ROLLBACK was sent: nothing was committed.
		l.tx, l.ok = nil, false
		err = l.deadErr(t.ctx)
		c.settle("rolled_back")
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
	switch {
	case errors.Is(err, ErrOutcomeUnknown):
		l.ok = false
		c.settle("unknown")
	case commit && err == nil:
		l.ok = true
		c.settle("committed")
	default:
		l.ok = err == nil && alive && l.ok
		c.settle("rolled_back")
	}
	c.endPooled()
	return c.public(t.ctx, err)
}

// pgxTx is a transaction on a pgx connection.
type pgxTx struct {
	r        *pgxRaw
	tx       pgx.Tx
	ctx      context.Context
	deadline time.Time // of BeginTx, zero without one
}

func (t *pgxTx) Commit() error {
	var limit time.Duration
	if !t.deadline.IsZero() {
		limit = max(time.Until(t.deadline), t.r.commitTimeout)
	}
	err, over := t.r.within(limit, func() error { return t.tx.Commit(t.ctx) })
	if err == nil {
		return nil
	}
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback), pgconn.SafeToRetry(err):
		return err
	case errors.As(err, &pgErr) && !fatal(pgErr):
		return err // an ERROR in COMMIT aborts the transaction
	case over:
		return &outcomeError{fmt.Errorf("no answer within %v", limit)}
	default:
		return &outcomeError{err}
	}
}

func (t *pgxTx) Rollback() error {
	limit := t.r.rollbackTimeout
	err, over := t.r.within(limit, func() error { return t.tx.Rollback(t.ctx) })
	if over {
		return fmt.Errorf("pgxgated: no answer to ROLLBACK within %v: connection destroyed", limit)
	}
	return err
}

// within runs f, which uses the connection, for at most d (0: no bound).
func (r *pgxRaw) within(d time.Duration, f func() error) (err error, over bool) {
	if d == 0 {
		return f(), false
	}
	r.bound.arm(d)
	err = f()
	return err, r.bound.disarm() && err != nil
}

// fatal tells that the server ends the session with this error.
func fatal(e *pgconn.PgError) bool {
	s := e.SeverityUnlocalized
	if s == "" {
		s = e.Severity
	}
	return s == "FATAL" || s == "PANIC"
}

// outcomeError is the error of a COMMIT whose answer never came.
type outcomeError struct{ err error }

func (e *outcomeError) Error() string {
	return fmt.Sprintf("pgxgated: %v: %v", ErrOutcomeUnknown, e.err)
}

func (e *outcomeError) Unwrap() []error { return []error{ErrOutcomeUnknown, e.err} }

// dbTx is a transaction of another driver, which brings its own idea of contexts in COMMIT and ROLLBACK.
type dbTx struct {
	r *dbRaw
	t driver.Tx
}

func (t *dbTx) Commit() error {
	err := t.r.run(func(inner) error { t.r.inTx = false; return t.t.Commit() })
	if errors.Is(err, driver.ErrBadConn) {
		return &outcomeError{errLost}
	}
	return err
}

func (t *dbTx) Rollback() error {
	return t.r.run(func(inner) error { t.r.inTx = false; return t.t.Rollback() })
}
