package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/ngrok/sqlmw"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// database/sql's own, of a transaction in which a driver call panicked or ended its goroutine: it keeps a read lock of
		// the Tx for ever then (golang/go#76465), so the transaction can be neither ended nor waited for.
		goleak.IgnoreAnyFunction("database/sql.(*Tx).awaitDone"),
	)
}

// bareConnector and bareConn are a wrapper that knows the interfaces that a driver must have, the four that database/sql
// has had since Go 1.8, and nothing else.
type bareConnector struct{ c driver.Connector }

func (b bareConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := b.c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return bareConn{c}, nil
}
func (b bareConnector) Driver() driver.Driver { return bareDriver{b.c.Driver()} }

type bareDriver struct{ d driver.Driver }

func (b bareDriver) Open(name string) (driver.Conn, error) {
	c, err := b.d.Open(name)
	if err != nil {
		return nil, err
	}
	return bareConn{c}, nil
}

type bareConn struct{ driver.Conn }

func (b bareConn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	return b.Conn.(driver.ConnBeginTx).BeginTx(ctx, o)
}

func (b bareConn) PrepareContext(ctx context.Context, q string) (driver.Stmt, error) {
	return b.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, q)
}

func (b bareConn) ExecContext(ctx context.Context, q string, args []driver.NamedValue) (driver.Result, error) {
	return b.Conn.(driver.ExecerContext).ExecContext(ctx, q, args)
}

func (b bareConn) QueryContext(ctx context.Context, q string, args []driver.NamedValue) (driver.Rows, error) {
	return b.Conn.(driver.QueryerContext).QueryContext(ctx, q, args)
}

func (b bareConn) Ping(ctx context.Context) error { return b.Conn.(driver.Pinger).Ping(ctx) }
func (b bareConn) Raw() driver.Conn               { return b.Conn }

func hideAll(c driver.Connector) driver.Connector { return bareConnector{c} }

// validConn and resettableConn hide one of the two hooks each.
type validConn struct{ bareConn }

func (c validConn) IsValid() bool { return c.Conn.(driver.Validator).IsValid() }

type resettableConn struct{ bareConn }

func (c resettableConn) ResetSession(ctx context.Context) error {
	return c.Conn.(driver.SessionResetter).ResetSession(ctx)
}

type wrappingConnector struct {
	bareConnector
	wrap func(bareConn) driver.Conn
}

func (w wrappingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := w.c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return w.wrap(bareConn{c}), nil
}

func hideResetter(c driver.Connector) driver.Connector {
	return wrappingConnector{bareConnector{c}, func(b bareConn) driver.Conn { return validConn{b} }}
}

func hideValidator(c driver.Connector) driver.Connector {
	return wrappingConnector{bareConnector{c}, func(b bareConn) driver.Conn { return resettableConn{b} }}
}

// sqlmwAbove puts ngrok/sqlmw between database/sql and us.
func sqlmwAbove(c driver.Connector) driver.Connector {
	w, err := sqlmw.Driver(fixedDriver{c}, sqlmw.NullInterceptor{}).(driver.DriverContext).OpenConnector("")
	if err != nil {
		panic(err)
	}
	return w
}

type fixedDriver struct{ c driver.Connector }

func (d fixedDriver) Open(string) (driver.Conn, error)               { return nil, errFake }
func (d fixedDriver) OpenConnector(string) (driver.Connector, error) { return d.c, nil }

var ctxBG = context.Background()

// gatedMock puts a go-sqlmock database behind a gate: the recipe of the documentation.
func gatedMock(t testing.TB, mock0 func() (*sql.DB, sqlmock.Sqlmock, error), opts ...Option) (db, mockDB *sql.DB, mock sqlmock.Sqlmock) {
	t.Helper()
	if mock0 == nil {
		mock0 = func() (*sql.DB, sqlmock.Sqlmock, error) { return sqlmock.New() }
	}
	mockDB, mock, err := mock0()
	if err != nil {
		t.Fatal(err)
	}
	db, err = OpenDB(mockDB, append([]Option{WithLimits(Limits{Running: 2, Waiting: 10, MaxWait: time.Hour})}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		t.Helper()
		if st := GateOf(db).Stats(); st.Running+st.Waiting+st.Draining != 0 || mockDB.Stats().InUse != 0 {
			t.Errorf("not everything came back: %+v, %d connections in use", st, mockDB.Stats().InUse)
		}
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
	})
	return db, mockDB, mock
}

// closeMock is what the owner of a mock does.
func closeMock(t testing.TB, db, mockDB *sql.DB, mock sqlmock.Sqlmock) {
	t.Helper()
	mock.ExpectClose()
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if err := mockDB.Close(); err != nil {
		t.Error(err)
	}
}

// F02, F04: the calls that the mock expects, in strict order, and no other.
func TestF04MockSeesExactlyTheUsersCalls(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	mock.ExpectBegin()
	mock.ExpectExec("insert").WithArgs(int64(7), "x").WillReturnResult(sqlmock.NewResult(3, 1))
	mock.ExpectQuery("select").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(42))
	mock.ExpectCommit()
	mock.ExpectQuery("select").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(43))
	mock.ExpectBegin()
	mock.ExpectRollback()

	tx, err := db.BeginTx(ctxBG, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := tx.ExecContext(ctxBG, "insert into t", 7, "x")
	if err != nil {
		t.Fatal(err)
	}
	if id, err := res.LastInsertId(); id != 3 || err != nil {
		t.Errorf("LastInsertId %d, %v", id, err)
	}
	if n, err := res.RowsAffected(); n != 1 || err != nil {
		t.Errorf("RowsAffected %d, %v", n, err)
	}
	var n int
	if err := tx.QueryRowContext(ctxBG, "select n").Scan(&n); err != nil || n != 42 {
		t.Errorf("%d, %v", n, err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	if err := db.QueryRow("select n").Scan(&n); err != nil || n != 43 {
		t.Errorf("%d, %v", n, err)
	}
	if tx, err = db.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Error(err)
	}
	closeMock(t, db, mockDB, mock)
}

// F04: a refused operation reaches nothing below.
func TestF04RefusedOperationMakesNoCall(t *testing.T) {
	t.Parallel()
	s := newFakeLimits(t, Limits{Running: fakeRunning})
	var held []*Permit
	for range fakeRunning {
		held = append(held, mustAcquire(t, s.g, ctxBG))
	}
	before, opened := s.f.total(), s.inner.Stats()
	for _, op := range fakeOps {
		r := &recorder{}
		op.run(ctxBG, s.db, r)
		var rejected *RejectedError
		if len(r.errs) == 0 || !errors.Is(r.errs[0], ErrRejected) || !errors.Is(r.errs[0], ErrAdmissionFull) || !errors.As(r.errs[0], &rejected) {
			t.Errorf("%s: %v, want a refusal", op.name, r.errs)
			continue
		}
		if rejected.Running != fakeRunning || rejected.Limits.Running != fakeRunning {
			t.Errorf("%s: %+v", op.name, rejected)
		}
		for _, err := range r.errs {
			if errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: I8: %v", op.name, err)
			}
		}
	}
	if n := s.f.total(); n != before {
		t.Errorf("%d calls on the driver below", n-before)
	}
	if now := s.inner.Stats(); now.OpenConnections != opened.OpenConnections || now.WaitCount != opened.WaitCount {
		t.Errorf("the pool was asked: %+v, before %+v", now, opened)
	}
	// One refusal a call, not three: database/sql did not try again.
	if st := s.g.Stats(); st.AdmissionFull < uint64(len(fakeOps)) || st.AdmissionFull > uint64(len(fakeOps))+4 {
		t.Errorf("%d refusals of %d operations", st.AdmissionFull, len(fakeOps))
	}
	for _, p := range held {
		p.Release()
	}
}

func newFakeLimits(t testing.TB, l Limits) *fakeSetup {
	s := newFake(t)
	if err := s.g.SetLimits(l); err != nil {
		t.Fatal(err)
	}
	return s
}

func BenchmarkRefusedBeginTx(b *testing.B) {
	s := newFakeLimits(b, Limits{Running: fakeRunning})
	for range fakeRunning {
		defer mustAcquire(b, s.g, ctxBG).Release()
	}
	before := s.f.total()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.db.BeginTx(ctxBG, nil); !errors.Is(err, ErrRejected) {
			b.Fatal(err)
		}
	}
	if s.f.total() != before {
		b.Fatal("the driver below was called")
	}
}

// F04: errors of BEGIN and ROLLBACK pass unchanged and free the permit.
func TestF04ErrorsPassUnchanged(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	begin, rollback, commit := errors.New("begin"), errors.New("rollback"), errors.New("commit")
	mock.ExpectBegin().WillReturnError(begin)
	mock.ExpectBegin()
	mock.ExpectRollback().WillReturnError(rollback)
	mock.ExpectBegin()
	mock.ExpectCommit().WillReturnError(commit)
	if _, err := db.BeginTx(ctxBG, nil); err != begin {
		t.Errorf("%v, want %v unchanged", err, begin)
	}
	if st := GateOf(db).Stats(); st.Running != 0 {
		t.Errorf("running %d after a BEGIN that failed", st.Running)
	}
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
		tx, err := db.BeginTx(ctxBG, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := end(tx); err != rollback && err != commit {
			t.Errorf("%v, want the mock's unchanged", err)
		}
		if st := GateOf(db).Stats(); st.Running != 0 {
			t.Errorf("running %d after the end", st.Running)
		}
	}
	closeMock(t, db, mockDB, mock)
}

// An error of COMMIT that is the network's does not say that nothing was committed; one that the driver made of the server's
// answer does.
func TestOutcomeOfCommitOnAnotherDriver(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	for _, c := range []struct {
		err     error
		unknown bool
	}{
		{&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}, true},
		{io.EOF, true},
		{fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF), true},
		{os.ErrDeadlineExceeded, true},
		{context.Canceled, true},
		{errors.New("serialization failure"), false},
	} {
		mock.ExpectBegin()
		mock.ExpectCommit().WillReturnError(c.err)
		tx, err := db.BeginTx(ctxBG, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = tx.Commit()
		if !errors.Is(err, c.err) || errors.Is(err, ErrOutcomeUnknown) != c.unknown {
			t.Errorf("%v: %v, unknown %v", c.err, err, errors.Is(err, ErrOutcomeUnknown))
		}
		outcome, why := ResolveOutcome(ctxBG, db, err)
		if c.unknown && (outcome != OutcomeUnknown || why == nil) || !c.unknown && (outcome != OutcomeRolledBack || why != nil) {
			t.Errorf("%v: resolved as %s, %v", c.err, outcome, why)
		}
	}
	closeMock(t, db, mockDB, mock)
}

// F03: Close is seen once, with the close that owns the pool, and its error reaches the caller.
func TestF03CloseIsSeenOnceByTheOwner(t *testing.T) {
	t.Parallel()
	boom := errors.New("close")
	t.Run("WithOwnPool", func(t *testing.T) {
		db, _, mock := gatedMock(t, nil, WithOwnPool())
		mock.ExpectQuery("select").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(1))
		mock.ExpectClose().WillReturnError(boom)
		var n int
		if err := db.QueryRow("select 1").Scan(&n); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != boom {
			t.Errorf("%v, want %v", err, boom)
		}
	})
	t.Run("closed by its owner", func(t *testing.T) {
		db, mockDB, mock := gatedMock(t, nil)
		mock.ExpectQuery("select").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(1))
		var n int
		if err := db.QueryRow("select 1").Scan(&n); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil { // an unexpected Close of the mock would be an error
			t.Error(err)
		}
		mock.ExpectQuery("select").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(1))
		if err := mockDB.QueryRow("select 1").Scan(&n); err != nil {
			t.Errorf("the pool that was handed in does not work any more: %v", err)
		}
		mock.ExpectClose().WillReturnError(boom)
		if err := mockDB.Close(); err != boom {
			t.Errorf("%v, want %v", err, boom)
		}
	})
}

// F03: one Ping below for each of the user's, whether it works or not, and none of our own.
func TestF03OnePingForEachPing(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, func() (*sql.DB, sqlmock.Sqlmock, error) { return sqlmock.New(sqlmock.MonitorPingsOption(true)) })
	boom := errors.New("ping")
	mock.ExpectPing()
	if err := db.Ping(); err != nil {
		t.Error(err)
	}
	mock.ExpectPing().WillReturnError(boom)
	if err := db.Ping(); err != boom {
		t.Errorf("%v, want %v: it was sent again", err, boom)
	}
	if GateOf(db) == nil { // asks through a ping of its own, which must not reach the mock
		t.Error("not gated")
	}
	// A pinned connection that is bound already.
	c, err := db.Conn(ctxBG)
	if err != nil {
		t.Fatal(err)
	}
	mock.ExpectExec("x").WillReturnResult(sqlmock.NewResult(0, 0))
	mock.ExpectPing()
	if _, err := c.ExecContext(ctxBG, "x"); err != nil {
		t.Error(err)
	}
	if err := c.PingContext(ctxBG); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	// Under overload a health check still answers.
	for range 2 {
		defer mustAcquire(t, GateOf(db), ctxBG).Release()
	}
	mock.ExpectPing()
	if err := db.Ping(); err != nil {
		t.Error(err)
	}
	closeMock(t, db, mockDB, mock)
}

// F05: prepared once, closed once, executed as often as one likes.
func TestF05PrepareIsSeenOnce(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	p := mock.ExpectPrepare("select n").WillBeClosed()
	for i := range 10 {
		p.ExpectQuery().WithArgs(i).WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(i))
	}
	for range 3 {
		mock.ExpectExec("select n").WillReturnResult(sqlmock.NewResult(0, 1))
	}
	st, err := db.Prepare("select n")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		rows, err := st.Query(i)
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	for range 3 {
		if _, err := db.Exec("select n"); err != nil {
			t.Error(err)
		}
	}
	closeMock(t, db, mockDB, mock)
}

// F05: with rows left open database/sql prepares on another connection: as on a mock without a gate.
func TestF05RowsLeftOpenAsOnAPlainMock(t *testing.T) {
	t.Parallel()
	use := func(t *testing.T, db *sql.DB, mock sqlmock.Sqlmock) (errs []error) {
		mock.MatchExpectationsInOrder(false)
		for range 2 {
			p := mock.ExpectPrepare("select n")
			p.ExpectQuery().WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(1))
		}
		st, err := db.Prepare("select n")
		if err != nil {
			t.Fatal(err)
		}
		var open []*sql.Rows
		for range 2 {
			rows, err := st.Query()
			errs = append(errs, err)
			if err == nil {
				open = append(open, rows)
			}
		}
		for _, rows := range open {
			errs = append(errs, rows.Close())
		}
		return append(errs, st.Close(), mock.ExpectationsWereMet())
	}
	plainDB, plainMock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	want := use(t, plainDB, plainMock)
	plainMock.ExpectClose()
	plainMock.ExpectClose()
	_ = plainDB.Close()
	db, mockDB, mock := gatedMock(t, nil)
	got := use(t, db, mock)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("gated %v, plain %v", got, want)
	}
	mock.ExpectClose()
	closeMock(t, db, mockDB, mock)
}

// The mock's own matcher, and its idea of argument conversion, count as without a gate.
func TestMockOptions(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, func() (*sql.DB, sqlmock.Sqlmock, error) {
		return sqlmock.New(sqlmock.QueryMatcherOption(sqlmock.QueryMatcherEqual), sqlmock.ValueConverterOption(shoutingConverter{}))
	})
	mock.ExpectExec("select 1 + (2)").WithArgs("X").WillReturnResult(sqlmock.NewResult(0, 1)) // converted by the mock, too
	if _, err := db.Exec("select 1 + (2)", "X"); err != nil {
		t.Error(err)
	}
	closeMock(t, db, mockDB, mock)
}

type shoutingConverter struct{}

func (shoutingConverter) ConvertValue(v any) (driver.Value, error) { return fmt.Sprint(v, "!"), nil }

// What the driver answered to a Ping is said, also where the caller's context ended meanwhile.
func TestPingTellsTheDriversAnswer(t *testing.T) {
	t.Parallel()
	s := newFake(t)
	ctx, cancel := context.WithCancel(t.Context())
	s.f.do(func(_ context.Context, op string) error {
		if op == "ping" {
			cancel()
			return errFake
		}
		return nil
	})
	if err := s.db.PingContext(ctx); err != errFake {
		t.Errorf("%v, want %v", err, errFake)
	}
}

// A prepared statement of the *sql.DB is prepared once on a connection, however often it is run.
func TestMockStatementIsPreparedOnce(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	mock.ExpectPrepare("insert")
	st, err := db.Prepare("insert")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		mock.ExpectExec("insert").WithArgs(i).WillReturnResult(sqlmock.NewResult(0, int64(i)))
		res, err := st.Exec(i)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := res.RowsAffected(); n != int64(i) || err != nil {
			t.Error(n, err)
		}
	}
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	closeMock(t, db, mockDB, mock)
}

// What a statement's close says is said by Close, where database/sql passes it on, and not by Prepare.
func TestMockStatementCloseError(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	boom := errors.New("close")
	mock.ExpectBegin()
	mock.ExpectPrepare("insert").WillReturnCloseError(boom)
	mock.ExpectCommit()
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	st, err := tx.Prepare("insert")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Close(); err != boom {
		t.Errorf("%v, want %v", err, boom)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	closeMock(t, db, mockDB, mock)
}

// Two mocks at once know nothing of each other (F02).
func TestF02MocksInParallel(t *testing.T) {
	for i := range 2 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			db, mockDB, mock := gatedMock(t, nil)
			for j := range 200 {
				mock.ExpectBegin()
				mock.ExpectExec("x").WithArgs(i, j).WillReturnResult(sqlmock.NewResult(0, 1))
				mock.ExpectCommit()
			}
			for j := range 200 {
				tx, err := db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec("x", i, j); err != nil {
					t.Fatal(err)
				}
				if err := tx.Commit(); err != nil {
					t.Fatal(err)
				}
			}
			if st := GateOf(db).Stats(); st.Acquired != 200 {
				t.Errorf("%d permits", st.Acquired)
			}
			closeMock(t, db, mockDB, mock)
		})
	}
}

// F02: what needs pgx says so on a mock.
func TestF02PgxConnOnAMockIsAClearError(t *testing.T) {
	t.Parallel()
	db, mockDB, mock := gatedMock(t, nil)
	c, err := db.Conn(ctxBG)
	if err != nil {
		t.Fatal(err)
	}
	err = c.Raw(func(dc any) error {
		_, err := PgxConn(ctxBG, dc)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "not pgx") {
		t.Errorf("%v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := PgxConn(ctxBG, 7); err == nil || !strings.Contains(err.Error(), "int") {
		t.Errorf("%v", err)
	}
	closeMock(t, db, mockDB, mock)
}

// F11, F20: the inner driver's checker converts, removes and skips as it would without a gate.
func TestArgumentsGoThroughTheInnerChecker(t *testing.T) {
	type named string
	var nilTime *time.Time
	use := func(t *testing.T, db *sql.DB, d *checkingDriver) (errs []string) {
		for _, args := range [][]any{
			{1, "a", []byte("b"), true, nil, 2.5},
			{named("n"), nilTime, int8(3)},
			{"remove", 5},
			{5, "remove", 6},
			{"skip", int32(4)},
			{"error"},
			{sql.Named("p", "error")},
			{sql.Named("p", 1)},
			{struct{}{}},
			{sql.NullInt64{Int64: 8, Valid: true}},
		} {
			_, err := db.Exec("x", args...)
			errs = append(errs, fmt.Sprint(err))
			rows, err := db.Query("x", args...)
			errs = append(errs, fmt.Sprint(err))
			if err == nil {
				_ = rows.Close()
			}
		}
		return errs
	}
	plain := &checkingDriver{}
	plainDB := sql.OpenDB(plain)
	defer plainDB.Close()
	want := use(t, plainDB, plain)
	below := &checkingDriver{}
	inner := sql.OpenDB(below)
	defer inner.Close()
	db, err := OpenDB(inner, WithLimits(Limits{Running: 1}))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	got := use(t, db, below)
	if !slices.Equal(got, want) {
		t.Errorf("errors\n%q, without a gate\n%q", got, want)
	}
	if g, w := fmt.Sprintf("%#v", below.args), fmt.Sprintf("%#v", plain.args); g != w {
		t.Errorf("arguments\n%s, without a gate\n%s", g, w)
	}
}

// checkingDriver is a fakeDriver whose connections check arguments.
type checkingDriver struct{ fakeDriver }

func (d *checkingDriver) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := d.fakeDriver.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &checkingConn{c.(*fakeConn)}, nil
}

type checkingConn struct{ *fakeConn }

func (*checkingConn) CheckNamedValue(nv *driver.NamedValue) error {
	switch nv.Value {
	case "remove":
		return driver.ErrRemoveArgument
	case "error":
		return errFake
	}
	if s, ok := nv.Value.(string); ok && s != "skip" {
		nv.Value = s + "?"
		return nil
	}
	return driver.ErrSkip
}

// OpenDB names the interface that a driver lacks, and takes nothing.
func TestOpenDBNamesTheMissingInterface(t *testing.T) {
	for want, dc := range map[string]driver.Conn{
		"driver.ConnBeginTx":        struct{ driver.Conn }{&fakeConn{d: &fakeDriver{}}},
		"driver.ExecerContext":      lacksExec{},
		"driver.QueryerContext":     lacksQuery{},
		"driver.ConnPrepareContext": lacksPrepare{},
	} {
		t.Run(want, func(t *testing.T) {
			pool := sql.OpenDB(oneConn{dc})
			defer pool.Close()
			db, err := OpenDB(pool, WithLimits(Limits{Running: 1}))
			if err == nil || !strings.Contains(err.Error(), "lacks "+want) || db != nil {
				t.Errorf("%v, %v", db, err)
			}
			if n := pool.Stats().InUse; n != 0 {
				t.Errorf("%d connections in use", n)
			}
		})
	}
}

type oneConn struct{ dc driver.Conn }

func (c oneConn) Connect(context.Context) (driver.Conn, error) { return c.dc, nil }
func (c oneConn) Driver() driver.Driver                        { return &fakeDriver{} }

type bareDC struct{}

func (bareDC) Prepare(string) (driver.Stmt, error) { return described(0), nil }
func (bareDC) Begin() (driver.Tx, error)           { return nil, errFake }
func (bareDC) Close() error                        { return nil }
func (bareDC) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return nil, errFake
}

type lacksExec struct{ bareDC }

type lacksQuery struct{ bareDC }

func (lacksQuery) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, errFake
}

type lacksPrepare struct{ lacksQuery }

func (lacksPrepare) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return nil, errFake
}

// hiding are wrappers below which nobody tells of a return. Of sqlmw's only the connector's io.Closer is hidden.
var hiding = map[string]func(driver.Connector) driver.Connector{"all": hideAll, "Validator": hideValidator}

// F6: where the return is hidden a pinned connection keeps its session, but no permit between its statements.
func TestF6PinnedKeepsItsSession(t *testing.T) {
	for name, hide := range hiding {
		t.Run(name, func(t *testing.T) {
			s := newFakeBelow(t, hide)
			s.keeps = true
			c, err := s.db.Conn(ctxBG)
			if err != nil {
				t.Fatal(err)
			}
			var session *fakeConn
			check := func(when string, running int) {
				t.Helper()
				s.f.mu.Lock()
				last := s.f.last
				s.f.mu.Unlock()
				if session == nil {
					session = last
				}
				if last != session {
					t.Errorf("%s: on another connection", when)
				}
				if n := s.g.Stats().Running; n != running {
					t.Errorf("%s: running %d, want %d", when, n, running)
				}
			}
			for range 2 {
				if _, err := c.ExecContext(ctxBG, "x"); err != nil {
					t.Fatal(err)
				}
				check("Exec", 0)
				other, err := s.db.ExecContext(ctxBG, "x") // on another logical connection
				if err != nil || other == nil {
					t.Fatal(err)
				}
				rows, err := c.QueryContext(ctxBG, "x")
				if err != nil {
					t.Fatal(err)
				}
				check("Query", 1)
				for rows.Next() {
				}
				if err := rows.Close(); err != nil {
					t.Error(err)
				}
				check("rows closed", 0)
				tx, err := c.BeginTx(ctxBG, nil)
				if err != nil {
					t.Fatal(err)
				}
				check("BEGIN", 1)
				if _, err := tx.ExecContext(ctxBG, "x"); err != nil {
					t.Error(err)
				}
				if err := tx.Commit(); err != nil {
					t.Error(err)
				}
				check("COMMIT", 0)
				st, err := c.PrepareContext(ctxBG, "x")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := st.ExecContext(ctxBG); err != nil {
					t.Error(err)
				}
				check("Stmt", 0)
				if err := st.Close(); err != nil {
					t.Error(err)
				}
			}
			if n := s.inner.Stats().InUse; n != 1 {
				t.Errorf("%d connections in use, want the pinned one", n)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			// The next use of that logical connection, which is the one that was used last, gives the session back.
			if _, err := s.db.ExecContext(ctxBG, "x"); err != nil {
				t.Error(err)
			}
			if n := s.inner.Stats().InUse; n != 0 {
				t.Errorf("%d connections in use after the next statement", n)
			}
		})
	}
}

// What comes later on a pinned connection says nothing about other work, be it cut off or successful, although below such a
// wrapper each has a permit of its own.
func TestF6PinnedTeachesNoEstimate(t *testing.T) {
	for name, hide := range hiding {
		t.Run(name, func(t *testing.T) {
			s := newFakeBelow(t, hide)
			s.keeps = true
			c, err := s.db.Conn(ctxBG)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s.f.do(func(ctx context.Context, op string) error {
				if op == "exec" {
					<-ctx.Done()
				}
				return nil
			})
			for range 2 * estimatorMin {
				if _, err := c.ExecContext(within(t, 10*time.Millisecond), "x"); err != nil {
					t.Fatal(err)
				}
			}
			if e := s.g.Stats().Estimates; len(e) != 0 {
				t.Errorf("estimates %v", e)
			}
		})
	}
}

// F6: one warning that names the remedy; and none where the remedy is in place, or nothing is hidden.
func TestF6WarnsOnceWithTheRemedy(t *testing.T) {
	for name, hide := range hiding {
		t.Run(name, func(t *testing.T) {
			s := newFakeBelow(t, hide)
			s.keeps = true
			for range 5 {
				s.healthy("x")
			}
			if n := s.log.count("SetMaxIdleConns(0)"); n != 1 {
				t.Errorf("%d warnings, want 1", n)
			}
			s = newFakeBelow(t, hide)
			s.db.SetMaxIdleConns(0)
			for range 5 {
				s.healthy("x")
			}
			if n := s.log.count("SetMaxIdleConns(0)"); n != 0 {
				t.Errorf("%d warnings where the remedy is in place", n)
			}
		})
	}
	for name, hide := range map[string]func(driver.Connector) driver.Connector{"none": nil, "SessionResetter": hideResetter, "sqlmw": sqlmwAbove} {
		s := newFakeBelow(t, hide)
		for range 5 {
			s.healthy("x")
		}
		if n := s.log.count("level=WARN"); n != 0 {
			t.Errorf("%s: %d warnings where IsValid is not hidden", name, n)
		}
	}
}

// GateOf works below wrappers, and asks no server for it.
func TestGateOfBelowWrappers(t *testing.T) {
	for name, hide := range map[string]func(driver.Connector) driver.Connector{"all": hideAll, "sqlmw": sqlmwAbove} {
		t.Run(name, func(t *testing.T) {
			s := newFakeBelow(t, hide)
			before := s.f.total()
			if g := GateOf(s.db); g != s.g {
				t.Errorf("%v, want %v", g, s.g)
			}
			if n := s.f.total(); n != before {
				t.Errorf("%d calls on the driver below", n-before)
			}
		})
	}
	f := &fakeDriver{}
	plain := sql.OpenDB(f)
	defer plain.Close()
	if g := GateOf(plain); g != nil {
		t.Errorf("%v, of a database that is not gated", g)
	}
	if g := GateOf(nil); g != nil {
		t.Errorf("%v of nil", g)
	}
}

// noServer is a DSN of a port on which nobody listens.
const noServer = "postgres://u:p@127.0.0.1:1/orders?pool_max_conns=4&gate_running=2"

// F6: a wrapper that knows no DriverContext opens connection by connection. All of one DSN share one pool and one gate,
// which end some time after the last connection, and come back with the next one.
func TestF6OnePoolPerDSNThroughDriverOpen(t *testing.T) {
	name := "bare-" + t.Name()
	if !slices.Contains(sql.Drivers(), name) { // under -count
		sql.Register(name, bareDriver{&Driver{}})
	}
	synctest.Test(t, func(t *testing.T) {
		var dbs [2]*sql.DB
		for i := range dbs {
			db, err := sql.Open(name, noServer)
			if err != nil {
				t.Fatal(err)
			}
			dbs[i] = db
		}
		var conns []*sql.Conn
		for i := range 20 {
			c, err := dbs[i%2].Conn(ctxBG)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		g := GateOf(dbs[0])
		if g == nil || GateOf(dbs[1]) != g {
			t.Fatalf("gates %p and %p, want one", g, GateOf(dbs[1]))
		}
		opened.mu.Lock()
		n, c := len(opened.byDSN), opened.byDSN[noServer]
		opened.mu.Unlock()
		if n != 1 {
			t.Fatalf("%d connectors", n)
		}
		if _, err := conns[0].ExecContext(ctxBG, "select 1"); err == nil {
			t.Error("there is a server")
		}
		first := c.source.Load()
		for _, c := range conns {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, err := dbs[1].ExecContext(ctxBG, "select 1"); err == nil {
			t.Error("there is a server")
		}
		if c.source.Load() != first {
			t.Error("another pool")
		}
		for _, db := range dbs {
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		}
		c.mu.Lock()
		left := c.conns
		c.mu.Unlock()
		if left != 0 {
			t.Errorf("%d logical connections after db.Close", left)
		}
		time.Sleep(lingerTime / 2)
		if connectorClosed(c) {
			t.Error("the pool did not linger")
		}
		// Somebody comes back in time.
		db, err := sql.Open(name, noServer)
		if err != nil {
			t.Fatal(err)
		}
		if GateOf(db) != g {
			t.Error("another gate")
		}
		time.Sleep(2 * lingerTime)
		if connectorClosed(c) {
			t.Error("closed under a connection")
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * lingerTime)
		if !connectorClosed(c) {
			t.Error("the pool outlives its connections")
		}
		if _, err := g.Acquire(ctxBG); !errors.Is(err, ErrClosed) {
			t.Errorf("the gate outlives its connections: %v", err)
		}
		opened.mu.Lock()
		defer opened.mu.Unlock()
		if len(opened.byDSN) != 0 {
			t.Errorf("%d connectors are kept", len(opened.byDSN))
		}
	})
}

// F6: where the connector's io.Closer is hidden the pool ends some time after the last connection, and is made again for
// the next one.
func TestF6PoolEndsWhereCloserIsHidden(t *testing.T) {
	for name, hide := range map[string]func(driver.Connector) driver.Connector{"all": hideAll, "sqlmw": sqlmwAbove} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, err := NewConnector(noServer)
				if err != nil {
					t.Fatal(err)
				}
				for range 2 {
					db := sql.OpenDB(hide(c))
					if _, err := db.ExecContext(ctxBG, "select 1"); err == nil {
						t.Error("there is a server")
					}
					if c.source.Load() == nil {
						t.Fatal("no pool")
					}
					if err := db.Close(); err != nil {
						t.Error(err)
					}
					time.Sleep(lingerTime / 2)
					if c.source.Load() == nil {
						t.Error("the pool did not linger")
					}
					time.Sleep(lingerTime)
					if c.source.Load() != nil {
						t.Error("the pool outlives its connections")
					}
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Where nothing is hidden the pool ends with db.Close, not before.
func TestPoolDoesNotLingerUnwrapped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, err := sql.Open(DriverName, noServer)
		if err != nil {
			t.Fatal(err)
		}
		db.SetMaxIdleConns(0)
		c := connectorOf(db)
		for range 2 {
			if _, err := db.ExecContext(ctxBG, "select 1"); err == nil {
				t.Error("there is a server")
			}
		}
		pool := c.source.Load()
		time.Sleep(2 * lingerTime)
		if pool == nil || c.source.Load() != pool {
			t.Error("the pool was torn down between two operations")
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		if !connectorClosed(c) {
			t.Error("db.Close did not close it")
		}
	})
}

// F18, F19: asking a Result, or closing a Stmt, never waits for another's place in the queue. The permits are held until
// everybody has answered: one that stalled would never answer.
func TestF18NobodyWaitsForAnothersPlace(t *testing.T) {
	for name, use := range map[string]func(db *sql.DB) (finish func() error, err error){
		"Result": func(db *sql.DB) (func() error, error) {
			res, err := db.ExecContext(ctxBG, "x")
			return func() error { _, err := res.RowsAffected(); return err }, err
		},
		"Stmt": func(db *sql.DB) (func() error, error) {
			st, err := db.PrepareContext(ctxBG, "x")
			if err != nil {
				return nil, err
			}
			rows, err := st.QueryContext(ctxBG)
			if err != nil {
				return nil, err
			}
			return st.Close, rows.Close()
		},
		"Result of a Stmt": func(db *sql.DB) (func() error, error) {
			st, err := db.PrepareContext(ctxBG, "x")
			if err != nil {
				return nil, err
			}
			res, err := st.ExecContext(ctxBG)
			return func() error { _, err := res.RowsAffected(); return errors.Join(err, st.Close()) }, err
		},
		"Result of a Tx": func(db *sql.DB) (func() error, error) {
			tx, err := db.BeginTx(ctxBG, nil)
			if err != nil {
				return nil, err
			}
			res, err := tx.ExecContext(ctxBG, "x")
			return func() error { _, err := res.RowsAffected(); return err }, errors.Join(err, tx.Commit())
		},
	} {
		for _, wrapped := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/wrapped=%v", name, wrapped), func(t *testing.T) {
				s := newFake(t)
				if wrapped {
					s = newFakeBelow(t, hideResetter)
				}
				s.c.pgx = true // with another driver a statement keeps its connection as long as nobody waits: a mock counts Prepares
				s.db.SetMaxIdleConns(1000)
				const callers = 200
				finish := make([]func() error, callers)
				var wg sync.WaitGroup
				for i := range callers {
					wg.Go(func() {
						var err error
						if finish[i], err = use(s.db); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				if t.Failed() {
					return
				}
				var held []*Permit
				for range fakeRunning {
					held = append(held, mustAcquire(t, s.g, ctxBG))
				}
				for range callers {
					wg.Go(func() {
						if _, err := s.db.ExecContext(ctxBG, "x"); err != nil {
							t.Error(err)
						}
					})
				}
				waitFor(t, "all wait", func() bool { return s.g.Stats().Waiting == callers })
				var answered atomic.Int32
				for _, f := range finish {
					go func() {
						if err := f(); err != nil {
							t.Error(err)
						}
						answered.Add(1)
					}()
				}
				waitFor(t, "everybody answers while all permits are held", func() bool { return answered.Load() == callers })
				if n := s.g.Stats().Waiting; n != callers {
					t.Errorf("%d wait, want %d", n, callers)
				}
				for _, p := range held {
					p.Release()
				}
				wg.Wait()
			})
		}
	}
}

// H02: the driver is registered, and fetching it with an empty DSN makes nothing.
func TestH02EmptyDSN(t *testing.T) {
	if !slices.Contains(sql.Drivers(), DriverName) {
		t.Fatal("not registered")
	}
	before := runtime.NumGoroutine()
	db, err := sql.Open(DriverName, "")
	if err != nil {
		t.Fatal(err)
	}
	d, ok := db.Driver().(*Driver)
	if !ok {
		t.Fatalf("Driver() is a %T", db.Driver())
	}
	if d.c.source.Load() != nil {
		t.Error("a pool was made")
	}
	if n := runtime.NumGoroutine(); n > before+1 { // database/sql's own connectionOpener
		t.Errorf("%d goroutines, %d before", n, before)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
}

// H02: what is opened and closed leaves nothing behind.
func TestH02OpenAndCloseLeaveNothing(t *testing.T) {
	sizes := func() [4]int {
		gates.mu.Lock()
		opened.mu.Lock()
		defer gates.mu.Unlock()
		defer opened.mu.Unlock()
		return [4]int{len(gates.shared), len(gates.labels), len(opened.byDSN)}
	}
	cycle := func(from, to int) {
		for i := from; i < to; i++ {
			dsn := fmt.Sprintf("host=127.0.0.1 port=1 dbname=d%d pool_max_conns=2", i)
			if i%2 == 0 {
				dsn += fmt.Sprintf(" gate_name=g%d", i)
			}
			db, err := sql.Open(DriverName, dsn)
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, goroutines := sizes(), runtime.NumGoroutine()
	cycle(0, 1000)
	start := heap()
	cycle(1000, 11000)
	if end := heap(); end > start+2<<20 { // 200 bytes a cycle would be seen; one gate alone is more
		t.Errorf("the heap grew from %d to %d bytes in 10,000 cycles", start, end)
	}
	if after := sizes(); after != before {
		t.Errorf("registries %v, before %v", after, before)
	}
	waitFor(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= goroutines })
}

// What a call says of itself in its context counts for statements as it does for Acquire.
func TestContextsOfStatements(t *testing.T) {
	s := newFake(t, WithWorkloads(map[string]Limits{"batch": {Running: 1, Waiting: 5}}))
	batch := mustAcquire(t, s.g, WithWorkload(ctxBG, "batch"))
	if _, err := s.db.ExecContext(WithMaxWait(WithWorkload(ctxBG, "batch"), 0), "x"); !errors.Is(err, ErrWaitTimeout) {
		t.Errorf("batch is full: %v", err)
	}
	if _, err := s.db.ExecContext(ctxBG, "x"); err != nil {
		t.Errorf("the gate is not: %v", err)
	}
	if _, err := s.db.ExecContext(WithWorkload(ctxBG, "none"), "x"); !errors.Is(err, ErrUnknownWorkload) {
		t.Errorf("unknown workload: %v", err)
	}
	other := mustAcquire(t, s.g, ctxBG)
	for _, op := range fakeOps {
		r := &recorder{}
		op.run(WithMaxWait(ctxBG, 0), s.db, r)
		if len(r.errs) == 0 || !errors.Is(r.errs[0], ErrWaitTimeout) {
			t.Errorf("%s with WithMaxWait(0): %v", op.name, r.errs)
		}
		// Bypass of a transaction covers its statements.
		r = &recorder{}
		before := s.g.Stats()
		op.run(Bypass(ctxBG), s.db, r)
		if len(r.errs) > 0 {
			t.Errorf("%s with Bypass: %v", op.name, r.errs)
		}
		if after := s.g.Stats(); after.Bypassed == before.Bypassed || after.Acquired != before.Acquired {
			t.Errorf("%s with Bypass: before %+v, after %+v", op.name, before, after)
		}
	}
	tx, err := s.db.BeginTx(Bypass(ctxBG), nil)
	if err != nil {
		t.Fatal(err)
	}
	before := s.g.Stats()
	if _, err := tx.ExecContext(ctxBG, "x"); err != nil {
		t.Errorf("a statement in a transaction that went past the gate: %v", err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	if after := s.g.Stats(); after.Bypassed != before.Bypassed || after.Acquired != before.Acquired {
		t.Errorf("before %+v, after %+v", before, after)
	}
	other.Release()
	batch.Release()
}

// gate_scope=tx: only what begins a transaction holds a permit.
func TestScopeTx(t *testing.T) {
	s := newFake(t, WithScope(ScopeTx))
	var held []*Permit
	for range fakeRunning {
		held = append(held, mustAcquire(t, s.g, ctxBG))
	}
	before := s.g.Stats().Acquired
	for _, op := range fakeOps {
		r := &recorder{}
		op.run(WithMaxWait(ctxBG, 0), s.db, r)
		wants := strings.Contains(op.name, "Tx")
		if refused := len(r.errs) > 0 && errors.Is(r.errs[0], ErrWaitTimeout); refused != wants || !wants && len(r.errs) > 0 {
			t.Errorf("%s: %v", op.name, r.errs)
		}
	}
	if n := s.g.Stats().Acquired - before; n != 0 {
		t.Errorf("%d permits", n)
	}
	for _, p := range held {
		p.Release()
	}
	r := &recorder{}
	fakeOps[4].run(ctxBG, s.db, r)
	if n := s.g.Stats().Acquired - before; n != 1 || len(r.errs) > 0 {
		t.Errorf("%d permits for a transaction, %v", n, r.errs)
	}
}

// gate_mode=observe: nothing is refused, and what would have been is counted by reason.
func TestObserveMode(t *testing.T) {
	f := &fakeDriver{}
	inner := sql.OpenDB(f)
	defer inner.Close()
	db, err := OpenDB(inner, WithLimits(Limits{Running: 1, Waiting: 1, MaxWait: 0}), WithMode(Observe))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var txs []*sql.Tx
	for range 3 {
		tx, err := db.BeginTx(ctxBG, nil)
		if err != nil {
			t.Fatal(err)
		}
		txs = append(txs, tx)
	}
	st := GateOf(db).Stats()
	if st.Running != 3 || st.Acquired != 3 || st.WouldReject["wait_timeout"] != 2 || st.AdmissionFull+st.WaitTimeout != 0 {
		t.Errorf("%+v", st)
	}
	for _, tx := range txs {
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
	}
	if st := GateOf(db).Stats(); st.Running != 0 {
		t.Errorf("running %d", st.Running)
	}
}

func connectorClosed(c *Connector) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// askingSource gives no connection, and asks the context as puddle and database/sql do: once before it waits, and again to
// wait; or never again, as some other pool may.
type askingSource struct{ twice bool }

func (s askingSource) acquire(ctx context.Context) (*physical, error) {
	done := ctx.Done()
	select {
	case <-done:
		return nil, ctx.Err()
	default:
	}
	if s.twice {
		done = ctx.Done()
	}
	<-done
	return nil, ctx.Err()
}

func (askingSource) size() (int, int) { return 4, 4 }
func (askingSource) close() error     { return nil }

// The wait for a physical connection ends with the caller's context or after gate_pool_wait, whichever comes first.
func TestPoolWaitEnds(t *testing.T) {
	for _, c := range []struct {
		name          string
		source        askingSource
		cancel, after time.Duration // 0: never
		deadline      time.Duration
		err           error
	}{
		{"cancelled", askingSource{true}, 20 * time.Millisecond, 20 * time.Millisecond, 0, context.Canceled},
		{"cancelled late", askingSource{true}, 3 * time.Second, 3 * time.Second, 0, context.Canceled},
		{"deadline", askingSource{true}, 0, 20 * time.Millisecond, 20 * time.Millisecond, context.DeadlineExceeded},
		{"pool wait", askingSource{true}, 0, 5 * time.Second, 0, ErrPoolTimeout},
		{"pool wait before the deadline", askingSource{true}, 0, 5 * time.Second, time.Minute, ErrPoolTimeout},
		{"asked once, cancelled", askingSource{}, 20 * time.Millisecond, poolWatchAfter, 0, context.Canceled},
		{"asked once, cancelled late", askingSource{}, 3 * time.Second, 3 * time.Second, 0, context.Canceled},
		{"asked once, pool wait", askingSource{}, 0, 5 * time.Second, 0, ErrPoolTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn, err := NewConnector("postgres://127.0.0.1:1/x?gate_running=1")
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				var s source = c.source
				conn.source.Store(&s)
				w := new(waits)
				for range 3 { // the wait before leaves nothing behind
					ctx, cancel := context.WithCancel(t.Context())
					if c.deadline > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), c.deadline)
					}
					if c.cancel > 0 {
						time.AfterFunc(c.cancel, cancel)
					}
					start := time.Now()
					_, err := conn.physical(ctx, &w.pool, conn.gate.now())
					if took := time.Since(start); !errors.Is(err, c.err) || took != c.after {
						t.Errorf("%v after %v, want %v after %v", err, took, c.err, c.after)
					}
					cancel()
					if _, err := conn.physical(ctx, &w.pool, conn.gate.now()); !errors.Is(err, ctx.Err()) {
						t.Errorf("with a context that is done: %v", err)
					}
				}
			})
		})
	}
}

// tagged is a context that cannot be compared.
type tagged struct {
	context.Context
	tags map[string]string
}

// A caller's context may be of any type, also where the pool fails before the bound on waiting for it has begun.
func TestPoolFailsForAContextThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	s := newFake(t)
	s.f.do(func(_ context.Context, op string) error {
		switch op {
		case "exec":
			return driver.ErrBadConn // the connection that is there already
		case "connect":
			return errFake
		}
		return nil
	})
	for _, ctx := range []context.Context{t.Context(), within(t, time.Second)} { // the second ends before gate_pool_wait does
		if _, err := s.db.ExecContext(tagged{ctx, map[string]string{"a": "b"}}, "x"); !errors.Is(err, errFake) {
			t.Errorf("%v, want %v", err, errFake)
		}
	}
}

// A statement on a *sql.Conn that lost its physical connection waits for another one as long as the first did.
func TestPoolWaitStartsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(t, WithPoolWait(100*time.Millisecond))
		time.Sleep(time.Second) // the gate's clock stands at 0 before, which is no time
		if _, err := s.db.Exec("x"); err != nil {
			t.Fatal(err)
		}
		sc, err := s.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer sc.Close()
		s.f.do(func(_ context.Context, op string) error {
			switch op {
			case "exec":
				return driver.ErrBadConn
			case "connect":
				return errFake
			}
			return nil
		})
		if _, err = sc.ExecContext(t.Context(), "x"); err == nil {
			t.Fatal("no error from a server that is down")
		}
		var late atomic.Int32
		s.f.do(func(ctx context.Context, op string) error {
			if d, ok := ctx.Deadline(); op == "connect" && ok && !time.Now().Before(d) {
				late.Add(1)
			}
			return nil
		})
		time.Sleep(time.Second) // far longer than the pool wait
		if _, err = sc.ExecContext(t.Context(), "x"); err != nil || late.Load() != 0 {
			t.Errorf("the server is up again: %v, %d attempts that were late before they began", err, late.Load())
		}
	})
}

// What was derived from the context of a wait ends with it, and no later wait reaches it.
func TestPoolWaitLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(t, WithPoolWait(100*time.Millisecond))
		s.inner.SetMaxOpenConns(1)
		s.inner.SetMaxIdleConns(-1)
		var ended atomic.Int32
		s.f.do(func(ctx context.Context, op string) error {
			if op == "connect" {
				child, cancel := context.WithCancel(ctx)
				go func() {
					defer cancel()
					<-child.Done()
					ended.Add(1)
				}()
			}
			return nil
		})
		if _, err := s.db.Exec("x"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := ended.Load(); n != 1 {
			t.Errorf("%d contexts ended with the acquisition, want 1", n)
		}
		hold, err := s.inner.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer hold.Close()
		if _, err := s.db.Exec("x"); !errors.Is(err, ErrPoolTimeout) {
			t.Error(err)
		}
	})
}

// A database that was opened outside of synctest bubbles works in one after the other.
func TestDatabaseGoesFromBubbleToBubble(t *testing.T) {
	s := newFake(t)
	for range 3 {
		synctest.Test(t, func(t *testing.T) {
			if _, err := s.db.ExecContext(t.Context(), "x"); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := s.db.Exec("x"); err != nil {
		t.Error(err)
	}
}

func TestConnectionUsedAfterItsEnd(t *testing.T) {
	s := newFake(t)
	s.db.SetMaxIdleConns(-1)
	sc, err := s.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var kept any
	if err := sc.Raw(func(dc any) error { kept = dc; return nil }); err != nil {
		t.Fatal(err)
	}
	if err := sc.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := PgxConn(t.Context(), kept); !errors.Is(err, errLost) {
		t.Errorf("PgxConn: %v", err)
	}
	if err := kept.(driver.Pinger).Ping(t.Context()); !errors.Is(err, errLost) {
		t.Errorf("Ping: %v", err)
	}
	if st := s.g.Stats(); st.Running != 0 {
		t.Errorf("%+v", st)
	}
}
