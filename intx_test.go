package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/ngrok/sqlmw"
)

// txDB is a gated database over go-sqlmock.
type txDB struct {
	*sql.DB
	t    *testing.T
	mock sqlmock.Sqlmock
	gate *Gate
}

// newTxDB makes one of running permits that lets ten wait for up to 20 s. above, if not nil, is a wrapper around the gated
// driver. The test ends with every expectation met and everything back.
func newTxDB(t *testing.T, running int, above func(driver.Connector) driver.Connector) *txDB {
	t.Helper()
	pool, mock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	db, err := OpenDB(pool, WithLimits(Limits{Running: running, Waiting: 10, MaxWait: 20 * time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	d := &txDB{DB: db, t: t, mock: mock, gate: GateOf(db)}
	if above != nil {
		d.DB = sql.OpenDB(above(db.Driver().(*Driver).c))
	}
	t.Cleanup(func() {
		waitFor(t, "everything is back", func() bool { return d.busy() == "" })
		for range pool.Stats().OpenConnections {
			mock.ExpectClose()
		}
		for _, err := range []error{d.Close(), db.Close(), pool.Close(), mock.ExpectationsWereMet()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
	return d
}

// busy tells what is not back, "" if everything is.
func (d *txDB) busy() string {
	if s := d.gate.Stats(); s.Running != 0 || s.Waiting != 0 || s.Draining != 0 {
		return fmt.Sprintf("running %d, waiting %d, draining %d", s.Running, s.Waiting, s.Draining)
	}
	return ""
}

// returned fails the test unless everything is back at this very moment.
func (d *txDB) returned() {
	d.t.Helper()
	if b := d.busy(); b != "" {
		d.t.Errorf("InTx has returned with %s", b)
	}
}

var errWork = errors.New("the work failed")

func TestInTxReturnsTheValueAfterCommitAndReturn(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectExec("insert").WillReturnResult(sqlmock.NewResult(0, 1))
	d.mock.ExpectCommit()
	got, err := InTx(t.Context(), d.DB, nil, func(ctx context.Context, tx *sql.Tx) (string, error) {
		if s := d.gate.Stats(); s.Running != 1 {
			t.Errorf("running %d inside, want 1", s.Running)
		}
		_, err := tx.ExecContext(ctx, "insert")
		return "value", err
	})
	d.returned()
	if got != "value" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestInTxRollsBackAndReturnsTheErrorItself(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectRollback()
	got, err := InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) { return 7, errWork })
	d.returned()
	if got != 0 || err != errWork { //nolint:errorlint // unwrapped (I9)
		t.Errorf("got %d, %v", got, err)
	}
}

func TestInTxJoinsAFailedRollback(t *testing.T) {
	d := newTxDB(t, 1, nil)
	lost := errors.New("rollback failed")
	d.mock.ExpectBegin()
	d.mock.ExpectRollback().WillReturnError(lost)
	_, err := InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) { return 7, errWork })
	d.returned()
	if !errors.Is(err, errWork) || !errors.Is(err, lost) || !strings.HasPrefix(err.Error(), errWork.Error()) {
		t.Errorf("error %q, want %q first and %q", err, errWork, lost)
	}
}

// A session that ended in the work has nothing left to roll back, so Rollback says once more what the work had said. Joined, it
// would hide a server's error from those who assert its type (I9).
func TestInTxDoesNotJoinTheSameErrorTwice(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectRollback().WillReturnError(errWork)
	_, err := InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) { return 7, errWork })
	d.returned()
	if err != errWork { //nolint:errorlint // unwrapped (I9)
		t.Errorf("error %q, want %q itself", err, errWork)
	}
}

func TestInTxReturnsTheErrorOfCommitAndNoValue(t *testing.T) {
	d := newTxDB(t, 1, nil)
	deferred := errors.New("a deferred constraint")
	d.mock.ExpectBegin()
	d.mock.ExpectCommit().WillReturnError(deferred)
	got, err := InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) { return 7, nil })
	d.returned()
	if got != 0 || err != deferred { //nolint:errorlint // unwrapped (I9)
		t.Errorf("got %d, %v", got, err)
	}
}

func TestInTxReturnsTheErrorOfBeginAndDoesNotRun(t *testing.T) {
	d := newTxDB(t, 1, nil)
	refused := errors.New("no transactions today")
	d.mock.ExpectBegin().WillReturnError(refused)
	_, err := InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) {
		t.Error("ran without a transaction")
		return 0, nil
	})
	d.returned()
	if err != refused { //nolint:errorlint // unwrapped (I9)
		t.Errorf("error %v", err)
	}
}

func TestInTxReturnsARefusalWithoutRunning(t *testing.T) {
	d := newTxDB(t, 1, nil)
	p := mustAcquire(t, d.gate, t.Context())
	_, err := InTx(WithMaxWait(t.Context(), 0), d.DB, nil, func(context.Context, *sql.Tx) (int, error) {
		t.Error("ran without a permit")
		return 0, nil
	})
	p.Release()
	d.returned()
	if !errors.Is(err, ErrWaitTimeout) {
		t.Errorf("error %v, want ErrWaitTimeout", err)
	}
}

// blowUp is where the panic happens, to be found in its stack.
//
//go:noinline
func blowUp(value any) { panic(value) }

func TestInTxPanicGoesOnUnchanged(t *testing.T) {
	for _, rollback := range []error{nil, errors.New("rollback failed")} {
		d := newTxDB(t, 1, nil)
		d.mock.ExpectBegin()
		d.mock.ExpectRollback().WillReturnError(rollback)
		value := &struct{ n int }{7}
		func() {
			defer func() {
				d.returned()
				var stack [64]uintptr
				frames := runtime.CallersFrames(stack[:runtime.Callers(0, stack[:])])
				names := ""
				for more := true; more; {
					var f runtime.Frame
					f, more = frames.Next()
					names += f.Function + "\n"
				}
				// A helper that recovers and panics anew shows its own line instead.
				if got := recover(); got != value || !strings.Contains(names, "blowUp") {
					t.Errorf("recovered %v, want %v, with the place of the panic in\n%s", got, value, names)
				}
			}()
			_, _ = InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) {
				blowUp(value)
				return 7, nil
			})
			t.Error("returned from a panic")
		}()
	}
}

func TestInTxRollsBackOnGoexit(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectRollback()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = InTx(t.Context(), d.DB, nil, func(context.Context, *sql.Tx) (int, error) {
			runtime.Goexit() // as t.FailNow does
			return 7, nil
		})
		t.Error("returned from Goexit")
	})
	wg.Wait()
	d.returned()
}

// Whoever ends the transaction by himself gets no value, and is told.
func TestInTxWhoseWorkEndedTheTransaction(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectCommit()
	got, err := InTx(t.Context(), d.DB, nil, func(_ context.Context, tx *sql.Tx) (int, error) { return 7, tx.Commit() })
	d.returned()
	if got != 0 || !errors.Is(err, sql.ErrTxDone) {
		t.Errorf("got %d, %v, want sql.ErrTxDone", got, err)
	}
	if o, err := ResolveOutcome(t.Context(), d.DB, err); o != OutcomeUnknown || err == nil {
		t.Errorf("outcome %q (%v): it was committed, which sql.ErrTxDone does not tell", o, err)
	}
}

// The context may end at any moment: before the work returns an error, before it returns none. Nothing is committed then.
func TestInTxCancelledInTheMiddle(t *testing.T) {
	for _, result := range []error{nil, errWork} {
		t.Run(fmt.Sprint(result), func(t *testing.T) {
			d := newTxDB(t, 1, nil)
			d.mock.ExpectBegin()
			d.mock.ExpectRollback()
			ctx, cancel := context.WithCancel(t.Context())
			got, err := InTx(ctx, d.DB, nil, func(context.Context, *sql.Tx) (int, error) {
				cancel()
				return 7, result
			})
			want := errWork
			if result == nil {
				if want = context.Canceled; errors.Is(err, sql.ErrTxDone) {
					want = sql.ErrTxDone
				}
			}
			if got != 0 || err != want { //nolint:errorlint // unwrapped
				t.Errorf("got %d, %v, want %v", got, err, want)
			}
		})
	}
}

// wrappers are what may stand between database/sql and the gated driver.
var wrappers = map[string]func(driver.Connector) driver.Connector{
	"bare":                  nil,
	"below one that hides":  hideAll,
	"below sqlmw":           throughSQLMW,
	"below two of the kind": func(c driver.Connector) driver.Connector { return hideAll(throughSQLMW(c)) },
}

// throughSQLMW wraps as sqlmw does, which knows drivers only.
func throughSQLMW(c driver.Connector) driver.Connector {
	wrapped, err := sqlmw.Driver(connectorDriver{c}, sqlmw.NullInterceptor{}).(driver.DriverContext).OpenConnector("")
	if err != nil {
		panic(err)
	}
	return wrapped
}

type connectorDriver struct{ c driver.Connector }

func (d connectorDriver) Open(string) (driver.Conn, error)               { return d.c.Connect(context.Background()) }
func (d connectorDriver) OpenConnector(string) (driver.Connector, error) { return d.c, nil }

// nested is what work inside a transaction must not do outside of it.
var nested = map[string]func(context.Context, *sql.DB) error{
	"InTx": func(ctx context.Context, db *sql.DB) error {
		_, err := InTx(ctx, db, nil, func(context.Context, *sql.Tx) (int, error) { return 0, nil })
		return err
	},
	"BeginTx": func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err == nil {
			_ = tx.Rollback()
		}
		return err
	},
	"ExecContext": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "nested")
		return err
	},
	"QueryContext": func(ctx context.Context, db *sql.DB) error {
		rows, err := db.QueryContext(ctx, "nested")
		if err == nil {
			_ = rows.Close()
		}
		return err
	},
	"PrepareContext": func(ctx context.Context, db *sql.DB) error {
		st, err := db.PrepareContext(ctx, "nested")
		if err == nil {
			_ = st.Close()
		}
		return err
	},
	"Conn": func(ctx context.Context, db *sql.DB) error {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.ExecContext(ctx, "nested")
		return err
	},
}

// TestInTxNestedIsRefusedAtOnce (A08): the one permit is held by the transaction, or others are free, or a queue stands
// before the gate: work that would need a second one never waits, whatever contexts its own is made of.
func TestInTxNestedIsRefusedAtOnce(t *testing.T) {
	for name, above := range wrappers {
		for what, do := range nested {
			for _, running := range []int{1, 5} {
				t.Run(fmt.Sprintf("%s/%s/Running=%d", name, what, running), func(t *testing.T) {
					d := newTxDB(t, running, above)
					d.mock.ExpectBegin()
					d.mock.ExpectCommit()
					_, err := InTx(t.Context(), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
						before := d.gate.Stats()
						// One that no cancellation of a caller reaches, one that has its own.
						child, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Hour)
						defer cancel()
						for _, ctx := range []context.Context{ctx, child, WithMaxWait(ctx, time.Hour)} {
							if err := do(ctx, d.DB); !errors.Is(err, ErrNested) || errors.Is(err, ErrRejected) {
								t.Errorf("nested %s: %v, want ErrNested and no refusal that invites a retry", what, err)
							}
						}
						if after := d.gate.Stats(); after.Acquired != before.Acquired || after.WaitTime != before.WaitTime {
							t.Errorf("a permit was asked for: %+v, then %+v", before, after)
						}
						return 0, nil
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}

// The gate of a transaction is learned from its BEGIN: no ping, which below a wrapper would need a connection of database/sql,
// or on an ungated database a round trip, while the transaction holds one.
func TestInTxNeedsOneConnectionOnly(t *testing.T) {
	d := newTxDB(t, 1, hideAll)
	d.SetMaxOpenConns(1)
	d.mock.ExpectBegin()
	d.mock.ExpectCommit()
	_, err := InTx(t.Context(), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		return 0, nil
	})
	if n := d.Stats().WaitCount; n != 0 || err != nil {
		t.Errorf("%d waits for a connection, %v", n, err)
	}
}

func TestInTxOnAnUngatedDatabase(t *testing.T) {
	pool, mock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	mock.ExpectBegin()
	mock.ExpectBegin()
	mock.ExpectCommit()
	mock.ExpectRollback()
	mock.ExpectClose()
	mock.ExpectClose()
	mock.MatchExpectationsInOrder(false)
	got, err := InTx(t.Context(), pool, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		_, err := InTx(ctx, pool, nil, func(context.Context, *sql.Tx) (int, error) { return 0, errWork })
		if !errors.Is(err, errWork) {
			t.Errorf("inner: %v", err)
		}
		return 7, nil
	})
	if got != 7 || err != nil {
		t.Errorf("got %d, %v", got, err)
	}
	if n := pool.Stats().WaitCount; n != 0 {
		t.Errorf("%d waits", n)
	}
	if err := errors.Join(pool.Close(), mock.ExpectationsWereMet()); err != nil {
		t.Error(err)
	}
}

func TestInTxAnotherGateIsFine(t *testing.T) {
	outer, inner := newTxDB(t, 1, nil), newTxDB(t, 1, nil)
	for _, d := range []*txDB{outer, inner} {
		d.mock.ExpectBegin()
		d.mock.ExpectCommit()
	}
	_, err := InTx(t.Context(), outer.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		return InTx(ctx, inner.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
			for _, d := range []*txDB{outer, inner} {
				if _, err := d.ExecContext(ctx, "nested"); !errors.Is(err, ErrNested) {
					t.Errorf("two levels down: %v, want ErrNested", err)
				}
			}
			return 0, nil
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// Two databases behind one gate share its permits, so between them it would be waiting for oneself as well.
func TestInTxTheSameGateThroughAnotherDatabase(t *testing.T) {
	d := newTxDB(t, 1, nil)
	pool, mock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	other, err := OpenDB(pool, WithGate(d.gate))
	if err != nil {
		t.Fatal(err)
	}
	d.mock.ExpectBegin()
	d.mock.ExpectCommit()
	_, err = InTx(t.Context(), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		if _, err := other.ExecContext(ctx, "nested"); !errors.Is(err, ErrNested) {
			t.Errorf("error %v, want ErrNested", err)
		}
		if _, err := d.gate.Acquire(ctx); !errors.Is(err, ErrNested) {
			t.Errorf("by hand: %v, want ErrNested", err)
		}
		return 0, nil
	})
	mock.ExpectClose()
	if err := errors.Join(err, other.Close(), pool.Close(), mock.ExpectationsWereMet()); err != nil {
		t.Error(err)
	}
}

func TestInTxBypassInside(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectExec("beside").WillReturnResult(sqlmock.NewResult(0, 1))
	d.mock.ExpectCommit()
	_, err := InTx(t.Context(), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		_, err := d.ExecContext(Bypass(ctx), "beside")
		return 0, err
	})
	if s := d.gate.Stats(); err != nil || s.Bypassed != 1 {
		t.Errorf("%v, bypassed %d, want 1", err, s.Bypassed)
	}
}

// A goroutine that was started inside may go on when the transaction has ended; until then it may not.
func TestInTxAGoroutineThatOutlivesIt(t *testing.T) {
	d := newTxDB(t, 1, nil)
	for _, how := range []string{"commit", "rollback", "panic"} {
		d.mock.ExpectBegin()
		if how == "commit" {
			d.mock.ExpectCommit()
		} else {
			d.mock.ExpectRollback()
		}
		ended, result := make(chan struct{}), make(chan error)
		func() {
			defer func() { _ = recover() }()
			_, _ = InTx(t.Context(), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
				go func() {
					_, err := d.ExecContext(ctx, "too early")
					result <- err
					<-ended
					_, err = d.ExecContext(ctx, "later")
					result <- err
				}()
				if err := <-result; !errors.Is(err, ErrNested) {
					t.Errorf("%s: inside: %v, want ErrNested", how, err)
				}
				switch how {
				case "rollback":
					return 0, errWork
				case "panic":
					panic(how)
				}
				return 0, nil
			})
		}()
		d.returned()
		d.mock.ExpectExec("later").WillReturnResult(sqlmock.NewResult(0, 1))
		close(ended)
		if err := <-result; err != nil {
			t.Fatalf("%s: afterwards: %v", how, err)
		}
	}
}

// In a transaction that takes no permit nothing can wait for itself.
func TestInTxWithBypassIsNotNested(t *testing.T) {
	d := newTxDB(t, 1, nil)
	d.mock.ExpectBegin()
	d.mock.ExpectExec("beside").WillReturnResult(sqlmock.NewResult(0, 1))
	d.mock.ExpectCommit()
	_, err := InTx(Bypass(t.Context()), d.DB, nil, func(ctx context.Context, _ *sql.Tx) (int, error) {
		_, err := d.ExecContext(ctx, "beside")
		return 0, err
	})
	if err != nil {
		t.Error(err)
	}
}

// What is not about a COMMIT whose answer never came needs no server to resolve.
func TestResolveOutcomeWithoutAQuestion(t *testing.T) {
	d := newTxDB(t, 1, nil) // a query would be an error
	for _, c := range []struct {
		err     error
		outcome Outcome
		known   bool
	}{
		{nil, OutcomeCommitted, true},
		{errWork, OutcomeRolledBack, true},
		{context.Canceled, OutcomeRolledBack, true},
		{&RejectedError{Reason: ErrAdmissionFull}, OutcomeRolledBack, true},
		{sql.ErrTxDone, OutcomeUnknown, false},
		{ErrOutcomeUnknown, OutcomeUnknown, false},
		{fmt.Errorf("order 7: %w", ErrOutcomeUnknown), OutcomeUnknown, false},
		{&outcomeError{err: errLost}, OutcomeUnknown, false},
		{fmt.Errorf("order 7: %w", &outcomeError{err: errLost, tracked: true}), OutcomeNoChange, true},
	} {
		o, err := ResolveOutcome(t.Context(), d.DB, c.err)
		if o != c.outcome || (err == nil) != c.known {
			t.Errorf("%v: outcome %q, %v, want %q", c.err, o, err, c.outcome)
		}
	}
}
