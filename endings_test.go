package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"
)

// fakeDriver is a driver whose calls do what a script says. Each call on a connection writes an unsynchronised counter, so
// that -race convicts whoever shares one.
type fakeDriver struct {
	mu     sync.Mutex // guards what follows
	script func(ctx context.Context, op string) error
	calls  map[string]int
	args   [][]driver.NamedValue // of every exec and query
	opened int
	closed int
	last   *fakeConn // the connection of the last call
	wrong  []string  // what no correct user of a driver does
}

var errFake = errors.New("fake driver: scripted error")

func (d *fakeDriver) Connect(ctx context.Context) (driver.Conn, error) {
	if err := d.call(ctx, "connect"); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opened++
	return &fakeConn{d: d}, nil
}

func (d *fakeDriver) Driver() driver.Driver            { return d }
func (d *fakeDriver) Open(string) (driver.Conn, error) { return d.Connect(context.Background()) }
func (d *fakeDriver) do(f func(context.Context, string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.script = f
}

func (d *fakeDriver) call(ctx context.Context, op string) error {
	d.mu.Lock()
	if d.calls == nil {
		d.calls = make(map[string]int)
	}
	d.calls[op]++
	script := d.script
	d.mu.Unlock()
	if script == nil {
		return nil
	}
	return script(ctx, op)
}

func (d *fakeDriver) count(op string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[op]
}

func (d *fakeDriver) total() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.calls {
		n += c
	}
	return n
}

func (d *fakeDriver) fault(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wrong = append(d.wrong, what)
}

type fakeConn struct {
	d      *fakeDriver
	uses   int // not synchronised, on purpose
	inTx   bool
	rows   int
	closed bool
}

func (c *fakeConn) use(ctx context.Context, op string) error {
	c.uses++
	c.d.mu.Lock()
	c.d.last = c
	c.d.mu.Unlock()
	switch {
	case c.closed:
		c.d.fault(op + " after Close")
	case c.rows > 0 && ctx.Err() == nil && op != "next" && op != "rowsclose" && op != "close":
		c.d.fault(op + " with rows open")
	}
	if op == "begin" || op == "exec" || op == "query" || op == "prepare" {
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return c.d.call(ctx, op)
}

func (c *fakeConn) ResetSession(context.Context) error {
	c.uses++
	if c.inTx || c.rows > 0 {
		c.d.fault("a connection went back to its pool in a transaction or with rows open")
	}
	return nil
}

func (c *fakeConn) Ping(ctx context.Context) error { return c.use(ctx, "ping") }

func (c *fakeConn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	if err := c.use(ctx, "begin"); err != nil {
		return nil, err
	}
	if c.inTx {
		c.d.fault("BEGIN in a transaction")
	}
	c.inTx = true
	return &fakeTx{c, ctx}, nil
}

func (c *fakeConn) ExecContext(ctx context.Context, _ string, args []driver.NamedValue) (driver.Result, error) {
	c.d.mu.Lock()
	c.d.args = append(c.d.args, args)
	c.d.mu.Unlock()
	if err := c.use(ctx, "exec"); err != nil {
		return nil, err
	}
	return driver.RowsAffected(1), nil
}

func (c *fakeConn) QueryContext(ctx context.Context, _ string, args []driver.NamedValue) (driver.Rows, error) {
	c.d.mu.Lock()
	c.d.args = append(c.d.args, args)
	c.d.mu.Unlock()
	if err := c.use(ctx, "query"); err != nil {
		return nil, err
	}
	c.rows++
	return &fakeRows{c: c, ctx: ctx, left: 2}, nil
}

func (c *fakeConn) PrepareContext(ctx context.Context, _ string) (driver.Stmt, error) {
	if err := c.use(ctx, "prepare"); err != nil {
		return nil, err
	}
	return described(-1), nil
}

func (c *fakeConn) Begin() (driver.Tx, error)           { panic("not called") }
func (c *fakeConn) Prepare(string) (driver.Stmt, error) { panic("not called") }

func (c *fakeConn) Close() error {
	_ = c.use(context.Background(), "close")
	c.closed = true
	c.d.mu.Lock()
	c.d.closed++
	c.d.mu.Unlock()
	return nil
}

type fakeTx struct {
	c   *fakeConn
	ctx context.Context
}

func (t *fakeTx) Commit() error {
	if !t.c.inTx {
		t.c.d.fault("COMMIT outside a transaction")
	}
	err := t.c.use(t.ctx, "commit")
	t.c.inTx = false
	return err
}

func (t *fakeTx) Rollback() error {
	if !t.c.inTx {
		t.c.d.fault("ROLLBACK outside a transaction")
	}
	err := t.c.use(t.ctx, "rollback")
	t.c.inTx = false
	return err
}

type fakeRows struct {
	c      *fakeConn
	ctx    context.Context
	left   int
	closed bool
}

func (r *fakeRows) Columns() []string { return []string{"n"} }

func (r *fakeRows) Next(dest []driver.Value) error {
	if err := r.c.use(r.ctx, "next"); err != nil {
		return err
	}
	if r.left == 0 {
		return io.EOF
	}
	r.left--
	dest[0] = "text"
	return nil
}

func (r *fakeRows) Close() error {
	if !r.closed {
		r.closed = true
		r.c.rows--
	}
	return r.c.use(r.ctx, "rowsclose")
}

// logBook keeps log lines.
type logBook struct {
	mu    sync.Mutex
	lines []string
}

func (b *logBook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, string(p))
	return len(p), nil
}

func (b *logBook) count(part string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.lines {
		if strings.Contains(l, part) {
			n++
		}
	}
	return n
}

func (b *logBook) logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

// fakeSetup is a gated database over a pool of a fakeDriver. What is out when the test ends is a failure.
type fakeSetup struct {
	t     testing.TB
	f     *fakeDriver
	inner *sql.DB
	db    *sql.DB
	c     *Connector
	g     *Gate
	log   *logBook
	doing string // for messages
	// A *sql.Conn whose return is hidden keeps its physical connection, without a permit, until the next use or Close (F6).
	keeps      bool
	lostPlaces int  // of the inner pool
	shut       bool // the test closed db, and its gate with it
}

const fakeRunning = 2

func newFake(t testing.TB, opts ...Option) *fakeSetup { return newFakeBelow(t, nil, opts...) }

// newFakeBelow puts a wrapper between database/sql and the gated connector.
func newFakeBelow(t testing.TB, above func(driver.Connector) driver.Connector, opts ...Option) *fakeSetup {
	t.Helper()
	s := &fakeSetup{t: t, f: &fakeDriver{}, log: &logBook{}}
	s.inner = sql.OpenDB(s.f)
	s.inner.SetMaxOpenConns(4)
	s.inner.SetMaxIdleConns(4)
	opts = append([]Option{
		WithLimits(Limits{Running: fakeRunning, Waiting: 1000, MaxWait: time.Hour}),
		WithDrainLimit(time.Millisecond), WithDrainGrace(time.Millisecond), WithLogger(s.log.logger()),
	}, opts...)
	db, err := OpenDB(s.inner, opts...)
	if err != nil {
		t.Fatal(err)
	}
	s.db, s.c, s.g = db, db.Driver().(*Driver).c, GateOf(db)
	if above != nil {
		s.db = sql.OpenDB(above(s.c))
		t.Cleanup(func() { _ = db.Close() })
	}
	t.Cleanup(s.end)
	return s
}

// settle waits until nothing is out.
func (s *fakeSetup) settle() {
	s.t.Helper()
	waitFor(s.t, "running, waiting, draining and connections in use are 0 after "+s.doing, func() bool {
		st := s.g.Stats()
		return st.Running == 0 && st.Waiting == 0 && st.Draining == 0 && (s.keeps || s.inner.Stats().InUse == 0)
	})
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if len(s.f.wrong) > 0 {
		s.t.Errorf("after %s: the driver was misused: %q", s.doing, s.f.wrong)
		s.f.wrong = nil
	}
}

func (s *fakeSetup) end() {
	s.t.Helper()
	s.settle()
	if !s.shut {
		s.full()
	}
	if err := s.db.Close(); err != nil {
		s.t.Error(err)
	}
	if err := s.inner.Close(); err != nil {
		s.t.Error(err)
	}
	waitFor(s.t, "every connection of the driver is closed and none in use", func() bool {
		s.f.mu.Lock()
		defer s.f.mu.Unlock()
		return s.f.opened == s.f.closed && s.inner.Stats().InUse == s.lostPlaces
	})
}

// full checks that there are as many permits as there should be.
func (s *fakeSetup) full() {
	s.t.Helper()
	// I3: as many permits as there are, not one more and not one less.
	for i := range fakeRunning {
		p, err := s.g.Acquire(WithMaxWait(context.Background(), 0))
		if err != nil {
			s.t.Fatalf("permit %d of %d: %v", i+1, fakeRunning, err)
		}
		defer p.Release()
	}
	if _, err := s.g.Acquire(WithMaxWait(context.Background(), 0)); !errors.Is(err, ErrRejected) {
		s.t.Errorf("one permit too many: %v", err)
	}
}

// waitFor polls for a condition.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !cond(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not true within 20s: %s", what)
		}
	}
}

// recorder is a user's goroutine: it notes the errors that reach it and whether it panicked.
type recorder struct {
	errs     []error
	panicked any
	inStmt   bool // it is running a statement of a *sql.Stmt
	stuck    bool // database/sql itself hangs after such an ending, so the user cannot clean up
}

func (r *recorder) saw(err error) bool {
	if err != nil {
		r.errs = append(r.errs, err)
	}
	return err == nil
}

func (r *recorder) rows(rows *sql.Rows, err error) {
	if !r.saw(err) {
		return
	}
	defer func() { r.saw(rows.Close()) }()
	for rows.Next() {
		var s string
		r.saw(rows.Scan(&s))
	}
	r.saw(rows.Err())
}

func (r *recorder) stmt(ctx context.Context, st *sql.Stmt, err error) {
	if !r.saw(err) {
		return
	}
	defer func() {
		if !r.stuck {
			r.saw(st.Close())
		}
	}()
	r.inStmt = true
	_, err = st.ExecContext(ctx)
	r.inStmt = false
	r.saw(err)
	r.rows(st.QueryContext(ctx))
}

func (r *recorder) rollback(tx *sql.Tx) {
	if !r.stuck {
		if err := tx.Rollback(); err != sql.ErrTxDone {
			r.saw(err)
		}
	}
}

func (r *recorder) close(c *sql.Conn) {
	if !r.stuck {
		if err := c.Close(); err != sql.ErrConnDone {
			r.saw(err)
		}
	}
}

// fakeOps are the operations that hold permits.
var fakeOps = []struct {
	name string
	run  func(ctx context.Context, db *sql.DB, r *recorder)
}{
	{"Exec", func(ctx context.Context, db *sql.DB, r *recorder) {
		res, err := db.ExecContext(ctx, "x")
		if r.saw(err) {
			_, err = res.RowsAffected()
			r.saw(err)
		}
	}},
	{"Query", func(ctx context.Context, db *sql.DB, r *recorder) { r.rows(db.QueryContext(ctx, "x")) }},
	{"QueryRow", func(ctx context.Context, db *sql.DB, r *recorder) {
		var s string
		r.saw(db.QueryRowContext(ctx, "x").Scan(&s))
	}},
	{"Stmt", func(ctx context.Context, db *sql.DB, r *recorder) {
		st, err := db.PrepareContext(ctx, "x")
		r.stmt(ctx, st, err)
	}},
	{"Tx", func(ctx context.Context, db *sql.DB, r *recorder) {
		tx, err := db.BeginTx(ctx, nil)
		if !r.saw(err) {
			return
		}
		defer r.rollback(tx)
		_, err = tx.ExecContext(ctx, "x")
		r.saw(err)
		r.rows(tx.QueryContext(ctx, "x"))
		r.saw(tx.Commit())
	}},
	{"TxRolledBack", func(ctx context.Context, db *sql.DB, r *recorder) {
		tx, err := db.BeginTx(ctx, nil)
		if !r.saw(err) {
			return
		}
		_, err = tx.ExecContext(ctx, "x")
		r.saw(err)
		r.rollback(tx)
	}},
	{"TxStmt", func(ctx context.Context, db *sql.DB, r *recorder) {
		tx, err := db.BeginTx(ctx, nil)
		if !r.saw(err) {
			return
		}
		defer r.rollback(tx)
		st, err := tx.PrepareContext(ctx, "x")
		r.stmt(ctx, st, err)
		r.saw(tx.Commit())
	}},
	{"Conn", func(ctx context.Context, db *sql.DB, r *recorder) {
		c, err := db.Conn(ctx)
		if !r.saw(err) {
			return
		}
		defer r.close(c)
		_, err = c.ExecContext(ctx, "x")
		r.saw(err)
		r.rows(c.QueryContext(ctx, "x"))
		_, err = c.ExecContext(ctx, "x")
		r.saw(err)
	}},
	{"ConnStmt", func(ctx context.Context, db *sql.DB, r *recorder) {
		c, err := db.Conn(ctx)
		if !r.saw(err) {
			return
		}
		defer r.close(c)
		st, err := c.PrepareContext(ctx, "x")
		r.stmt(ctx, st, err)
	}},
	{"ConnTx", func(ctx context.Context, db *sql.DB, r *recorder) {
		c, err := db.Conn(ctx)
		if !r.saw(err) {
			return
		}
		defer r.close(c)
		_, err = c.ExecContext(ctx, "x")
		r.saw(err)
		for range 2 {
			tx, err := c.BeginTx(ctx, nil)
			if !r.saw(err) {
				return
			}
			defer r.rollback(tx)
			_, err = tx.ExecContext(ctx, "x")
			r.saw(err)
			r.saw(tx.Commit())
		}
		r.rows(c.QueryContext(ctx, "x"))
	}},
}

// fakeAction is what the driver does in the call in which an operation goes wrong.
type fakeAction struct {
	name string
	do   func(ctx context.Context, cancel func()) error
	hard bool // the call does not return
}

var fakeActions = []fakeAction{
	{"error", func(context.Context, func()) error { return errFake }, false},
	{"ErrBadConn", func(context.Context, func()) error { return driver.ErrBadConn }, false},
	{"wrapped ErrBadConn", func(context.Context, func()) error { return fmt.Errorf("lost: %w", driver.ErrBadConn) }, false},
	{"cancelled during", func(_ context.Context, cancel func()) error { cancel(); return context.Canceled }, false},
	{"cancelled during, ErrBadConn", func(_ context.Context, cancel func()) error { cancel(); return driver.ErrBadConn }, false},
	{"cancelled after", func(_ context.Context, cancel func()) error { cancel(); return nil }, false},
	{"panic", func(context.Context, func()) error { panic(errFake) }, true},
	{"Goexit", func(context.Context, func()) error { runtime.Goexit(); return nil }, true},
}

// sets are ways to set a gated database up that change which of database/sql's calls tell of a return.
var fakeSets = []struct {
	name string
	make func(t testing.TB) *fakeSetup
}{
	{"plain", func(t testing.TB) *fakeSetup { return newFake(t) }},
	{"SetMaxIdleConns(0)", func(t testing.TB) *fakeSetup { s := newFake(t); s.db.SetMaxIdleConns(-1); return s }},
	{"SetConnMaxLifetime(1ns)", func(t testing.TB) *fakeSetup { s := newFake(t); s.db.SetConnMaxLifetime(1); return s }},
	{"inner SetMaxIdleConns(0)", func(t testing.TB) *fakeSetup { s := newFake(t); s.inner.SetMaxIdleConns(-1); return s }},
	{"interceptor", func(t testing.TB) *fakeSetup { return newFake(t, WithInterceptors(sqlmw.NullInterceptor{})) }},
	{"gate_scope=tx", func(t testing.TB) *fakeSetup { return newFake(t, WithScope(ScopeTx)) }},
	{"hidden", func(t testing.TB) *fakeSetup { s := newFakeBelow(t, hideAll); s.keeps = true; return s }},
	{"Validator hidden", func(t testing.TB) *fakeSetup { s := newFakeBelow(t, hideValidator); s.keeps = true; return s }},
	{"SessionResetter hidden", func(t testing.TB) *fakeSetup { return newFakeBelow(t, hideResetter) }},
	{"sqlmw above", func(t testing.TB) *fakeSetup { return newFakeBelow(t, sqlmwAbove) }},
	{"hidden, SetMaxIdleConns(0)", func(t testing.TB) *fakeSetup {
		s := newFakeBelow(t, hideAll)
		s.db.SetMaxIdleConns(-1)
		return s
	}},
}

// run runs an operation as a user's goroutine would, to whatever end.
func (s *fakeSetup) run(op func(context.Context, *sql.DB, *recorder), action *fakeAction, call string, nth int) (r *recorder, fired bool) {
	r = &recorder{}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seen := 0
	s.f.do(func(ctx context.Context, c string) error {
		if action == nil || c != call {
			return nil
		}
		s.f.mu.Lock()
		seen++
		now := seen == nth
		s.f.mu.Unlock()
		if !now {
			return nil
		}
		fired = true
		r.stuck = action.hard && c != "next" && c != "prepare" && (c != "exec" || r.inStmt)
		return action.do(ctx, cancel)
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { r.panicked = recover() }()
		op(ctx, s.db, r)
	}()
	<-done
	s.f.do(nil)
	return r, fired
}

// However an operation ends, everything comes back exactly once (I3, F17), no error that leaves matches driver.ErrBadConn
// (I11), and the next operations find everything as it was.
func TestEveryEndingGivesEverythingBackOnce(t *testing.T) {
	for _, set := range fakeSets {
		for _, op := range fakeOps {
			t.Run(set.name+"/"+op.name, func(t *testing.T) {
				s := set.make(t)
				s.inner.SetMaxOpenConns(20)
				for _, call := range []string{"connect", "begin", "exec", "query", "prepare", "commit", "rollback", "next", "rowsclose"} {
					for _, action := range fakeActions {
						for nth := 1; nth <= 2; nth++ {
							if call == "rowsclose" && action.hard && set.name != "interceptor" {
								continue // database/sql calls the driver's own rows there
							}
							if call == "connect" && action.hard {
								continue // costs database/sql a place in the inner pool: TestPanicInConnectGivesThePermitBack
							}
							name := fmt.Sprintf("%s %d %s", call, nth, action.name)
							before := s.g.Stats()
							s.doing = name
							r, fired := s.run(op.run, &action, call, nth)
							if !fired {
								continue
							}
							s.settle()
							for _, err := range r.errs {
								if errors.Is(err, driver.ErrBadConn) && call != "next" && call != "rowsclose" {
									t.Errorf("%s: I11: %v", name, err)
								}
								if errors.Is(err, ErrRejected) {
									t.Errorf("%s: refused: %v", name, err)
								}
							}
							if action.name == "panic" && r.panicked != errFake {
								t.Errorf("%s: the caller saw the panic %v", name, r.panicked)
							}
							after := s.g.Stats()
							unproven := after.DrainsUnproven - before.DrainsUnproven
							if unproven > 1 {
								t.Errorf("%s: %d permits came back unproven, of one operation", name, unproven)
							}
							if action.hard && call != "connect" && call != "next" && s.gates(op.name) && unproven != 1 {
								t.Errorf("%s: %d permits came back unproven, want the one whose connection is in an unknown state", name, unproven)
							}
							if action.name == "error" && unproven != 0 {
								t.Errorf("%s: the permit waited for a proof after an ordinary error", name)
							}
							s.healthy(name)
						}
					}
				}
				if n, logged := s.g.Stats().DrainsUnproven, s.log.count("permit back without proof"); int(n) != logged {
					t.Errorf("%d permits came back unproven, %d of them logged", n, logged)
				}
			})
		}
	}
}

// gates tells whether all of the operation's statements hold a permit.
func (s *fakeSetup) gates(op string) bool {
	return s.c.cfg.scope == ScopeAll || op == "Tx" || op == "TxRolledBack" || op == "TxStmt"
}

// healthy runs one operation of each kind that nothing disturbs.
func (s *fakeSetup) healthy(after string) {
	s.t.Helper()
	for _, i := range []int{0, 1, 4, 7} {
		r, _ := s.run(fakeOps[i].run, nil, "", 0)
		if len(r.errs) > 0 || r.panicked != nil {
			s.t.Fatalf("after %s: an undisturbed %s: %v %v", after, fakeOps[i].name, r.errs, r.panicked)
		}
	}
	s.settle()
}

// hookInterceptor calls at, if set, before and after each hook goes on.
type hookInterceptor struct {
	sqlmw.NullInterceptor
	at func(hook string, after bool) error
}

func (i *hookInterceptor) around(hook string, f func() error) error {
	if i.at != nil {
		if err := i.at(hook, false); err != nil {
			return err
		}
	}
	if err := f(); err != nil {
		return err
	}
	if i.at != nil {
		return i.at(hook, true)
	}
	return nil
}

func (i *hookInterceptor) ConnectorConnect(ctx context.Context, c driver.Connector) (dc driver.Conn, err error) {
	err = i.around("connect", func() error { dc, err = c.Connect(ctx); return err })
	return dc, err
}

func (i *hookInterceptor) ConnBeginTx(ctx context.Context, c driver.ConnBeginTx, o driver.TxOptions) (_ context.Context, tx driver.Tx, err error) {
	err = i.around("begin", func() error { tx, err = c.BeginTx(ctx, o); return err })
	return ctx, tx, err
}

func (i *hookInterceptor) ConnPrepareContext(ctx context.Context, c driver.ConnPrepareContext, q string) (_ context.Context, st driver.Stmt, err error) {
	err = i.around("prepare", func() error { st, err = c.PrepareContext(ctx, q); return err })
	return ctx, st, err
}

func (i *hookInterceptor) ConnExecContext(ctx context.Context, c driver.ExecerContext, q string, args []driver.NamedValue) (res driver.Result, err error) {
	err = i.around("exec", func() error { res, err = c.ExecContext(ctx, q, args); return err })
	return res, err
}

func (i *hookInterceptor) ConnQueryContext(ctx context.Context, c driver.QueryerContext, q string, args []driver.NamedValue) (_ context.Context, rows driver.Rows, err error) {
	err = i.around("query", func() error { rows, err = c.QueryContext(ctx, q, args); return err })
	return ctx, rows, err
}

func (i *hookInterceptor) ConnPing(ctx context.Context, c driver.Pinger) error {
	return i.around("ping", func() error { return c.Ping(ctx) })
}

func (i *hookInterceptor) RowsNext(_ context.Context, r driver.Rows, dest []driver.Value) error {
	return i.around("next", func() error { return r.Next(dest) })
}

func (i *hookInterceptor) RowsClose(_ context.Context, r driver.Rows) error {
	return i.around("rowsclose", func() error { return r.Close() })
}

func (i *hookInterceptor) TxCommit(_ context.Context, tx driver.Tx) error {
	return i.around("commit", func() error { return tx.Commit() })
}

func (i *hookInterceptor) TxRollback(_ context.Context, tx driver.Tx) error {
	return i.around("rollback", func() error { return tx.Rollback() })
}

// An interceptor that panics, ends its goroutine or fails, before or after it has gone on, costs no permit and leaves no
// connection with a transaction or rows open in the pool.
func TestInterceptorFailingAtAnyHookCostsNoPermit(t *testing.T) {
	ping := struct {
		name string
		run  func(context.Context, *sql.DB, *recorder)
	}{"Ping", func(ctx context.Context, db *sql.DB, r *recorder) { r.saw(db.PingContext(ctx)) }}
	for _, op := range append(fakeOps[:len(fakeOps):len(fakeOps)], ping) {
		t.Run(op.name, func(t *testing.T) {
			hook := &hookInterceptor{}
			s := newFake(t, WithInterceptors(hook))
			s.inner.SetMaxOpenConns(20)
			for _, call := range []string{"connect", "begin", "exec", "query", "prepare", "ping", "commit", "rollback", "next", "rowsclose"} {
				for _, action := range fakeActions {
					for _, after := range []bool{false, true} {
						s.doing = fmt.Sprintf("%s, %s, after %v", call, action.name, after)
						fired := false
						var r *recorder
						// Under the fake's own lock, since a context's end may roll back in another goroutine.
						hook.at = func(h string, a bool) error {
							s.f.mu.Lock()
							first := h == call && a == after && !fired
							if first {
								fired = true
								r.stuck = action.hard && h != "next" && h != "prepare" && (h != "exec" || r.inStmt)
							}
							s.f.mu.Unlock()
							if !first {
								return nil
							}
							return action.do(context.Background(), func() {})
						}
						r = &recorder{}
						done := make(chan struct{})
						ctx, cancel := context.WithCancel(context.Background())
						go func() {
							defer close(done)
							defer func() { r.panicked = recover() }()
							op.run(ctx, s.db, r)
						}()
						<-done
						s.settleOrClosed(r)
						cancel()
						s.settle()
						hook.at = nil
						if !fired {
							continue
						}
						for _, err := range r.errs {
							if errors.Is(err, driver.ErrBadConn) && call != "next" && call != "rowsclose" {
								t.Errorf("%s: I11: %v", s.doing, err)
							}
						}
						if action.name == "panic" && r.panicked != errFake {
							t.Errorf("%s: the caller saw the panic %v", s.doing, r.panicked)
						}
						s.healthy(s.doing)
					}
				}
			}
		})
	}
}

// settleOrClosed waits until nothing is out, for a user who could clean up.
func (s *fakeSetup) settleOrClosed(r *recorder) {
	if !r.stuck {
		s.settle()
	}
}

// A caller's own panic, and rows that are closed early or cannot be scanned, are ends like any other.
func TestCallersOwnEndings(t *testing.T) {
	ctx := context.Background()
	boom := errors.New("the caller's own")
	for _, c := range []struct {
		name string
		run  func(db *sql.DB) error
	}{
		{"panic in a transaction", func(db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			panic(boom)
		}},
		{"panic between rows", func(db *sql.DB) error {
			rows, err := db.QueryContext(ctx, "x")
			if err != nil {
				return err
			}
			defer rows.Close()
			rows.Next()
			panic(boom)
		}},
		{"early Close", func(db *sql.DB) error {
			rows, err := db.QueryContext(ctx, "x")
			if err != nil {
				return err
			}
			rows.Next()
			return errors.Join(rows.Close(), boom)
		}},
		{"scan error", func(db *sql.DB) error {
			var n int
			if err := db.QueryRowContext(ctx, "x").Scan(&n); err == nil {
				return errors.New("text was scanned into an int")
			}
			return boom
		}},
		{"scan error, rows in a transaction left open", func(db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if _, err := tx.QueryContext(ctx, "x"); err != nil {
				return err
			}
			return errors.Join(tx.Rollback(), boom)
		}},
		{"Goexit in a transaction on a pinned connection", func(db *sql.DB) error {
			c, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			tx, err := c.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			runtime.Goexit()
			return nil
		}},
		{"panic in Raw", func(db *sql.DB) error {
			c, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := c.ExecContext(ctx, "x"); err != nil {
				return err
			}
			return c.Raw(func(any) error { panic(boom) })
		}},
		{"Raw returning ErrBadConn", func(db *sql.DB) error {
			c, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := c.ExecContext(ctx, "x"); err != nil {
				return err
			}
			if err := c.Raw(func(any) error { return driver.ErrBadConn }); err != driver.ErrBadConn {
				return err
			}
			return boom
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, set := range fakeSets {
				s := set.make(t)
				s.doing = set.name
				s.healthy("the start")
				closed := s.f.count("close")
				var err error
				done := make(chan struct{})
				go func() {
					defer close(done)
					defer func() {
						if r := recover(); r != nil {
							err = r.(error)
						}
					}()
					err = c.run(s.db)
				}()
				<-done
				if err != nil && !errors.Is(err, boom) {
					t.Errorf("%s: %v", set.name, err)
				}
				s.settle()
				if strings.Contains(c.name, "Raw") && !s.keeps && !strings.HasPrefix(set.name, "hidden") && s.f.count("close") == closed {
					t.Errorf("%s: who says inside Raw that the connection is bad gets it destroyed (F2)", set.name)
				}
				s.healthy(c.name)
			}
		})
	}
}

// Before anything ran, a connection that turns out dead is replaced under the same permit, and the caller never knows.
func TestDeadConnectionIsReplacedUnderTheSamePermit(t *testing.T) {
	for i, call := range map[int]string{0: "exec", 1: "query", 3: "prepare", 4: "begin", 7: "exec", 9: "exec"} {
		op := fakeOps[i]
		t.Run(op.name, func(t *testing.T) {
			s := newFake(t)
			s.healthy("the start")
			undisturbed := s.g.Stats().Acquired
			s.run(op.run, nil, "", 0)
			s.settle()
			undisturbed = s.g.Stats().Acquired - undisturbed
			opened, before := s.f.opened, s.g.Stats().Acquired
			r, fired := s.run(op.run, &fakeActions[1], call, 1)
			if !fired || len(r.errs) > 0 {
				t.Fatalf("fired %v, errors %v", fired, r.errs)
			}
			s.settle()
			if got := s.g.Stats(); got.Acquired-before != undisturbed || got.DrainsUnproven != 0 {
				t.Errorf("%d permits acquired, want %d; %d unproven", got.Acquired-before, undisturbed, got.DrainsUnproven)
			}
			if s.f.opened != opened+1 {
				t.Errorf("%d connections opened, want 1", s.f.opened-opened)
			}
		})
	}
}

// If all are dead the caller is told so, without driver.ErrBadConn, once: database/sql does not send it through the gate
// again. Nothing ran, so there is nothing whose end would have to be proven.
func TestAllConnectionsDead(t *testing.T) {
	for i, call := range map[int]string{0: "exec", 1: "query", 3: "prepare", 4: "begin"} {
		op := fakeOps[i]
		t.Run(op.name, func(t *testing.T) {
			s := newFake(t, WithDrainLimit(time.Hour))
			before := s.g.Stats().Acquired
			s.f.do(func(_ context.Context, c string) error {
				if c == call {
					return driver.ErrBadConn
				}
				return nil
			})
			r := &recorder{}
			op.run(context.Background(), s.db, r)
			s.f.do(nil)
			if len(r.errs) != 1 || errors.Is(r.errs[0], driver.ErrBadConn) || !errors.Is(r.errs[0], errLost) {
				t.Errorf("errors %v, want one that says that the connection was lost", r.errs)
			}
			s.settle() // the permit did not wait for gate_drain_limit
			if n := s.g.Stats().Acquired - before; n != 1 {
				t.Errorf("%d permits acquired, want 1", n)
			}
			if n := s.f.count(call); n > 10 {
				t.Errorf("%d tries", n)
			}
		})
	}
}

// A connection that breaks after something ran cannot be proven gone with another driver than pgx: its permit comes back
// after gate_drain_limit, not before.
func TestPermitOfABrokenConnectionWaitsForTheDrainLimit(t *testing.T) {
	s := newFake(t, WithDrainLimit(50*time.Millisecond))
	ctx := context.Background()
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.f.do(func(_ context.Context, c string) error {
		if c == "exec" {
			return driver.ErrBadConn
		}
		return nil
	})
	began := time.Now()
	if _, err := tx.ExecContext(ctx, "x"); !errors.Is(err, errLost) || errors.Is(err, driver.ErrBadConn) {
		t.Errorf("Exec: %v", err)
	}
	s.f.do(nil)
	if _, err := tx.ExecContext(ctx, "x"); !errors.Is(err, errLost) {
		t.Errorf("a second Exec on the lost transaction (I10): %v", err)
	}
	if n := s.f.count("exec"); n != 1 {
		t.Errorf("%d statements reached the driver, want 1", n)
	}
	if err := tx.Commit(); err == nil || errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("COMMIT was never sent, so its outcome is known: %v", err)
	}
	if st := s.g.Stats(); st.Draining != 1 || st.Running != 1 {
		t.Errorf("%+v, want one draining", st)
	}
	s.settle()
	if d := time.Since(began); d < 50*time.Millisecond {
		t.Errorf("the permit came back after %v", d)
	}
	if n := s.g.Stats().DrainsUnproven; n != 1 || s.log.count("permit back without proof") != 1 {
		t.Errorf("%d unproven, %d logged; want 1, 1", n, s.log.count("permit back without proof"))
	}
}

// COMMIT that answers driver.ErrBadConn: the outcome is unknown, and nobody may try again.
func TestCommitOnABrokenConnectionIsUnknown(t *testing.T) {
	s := newFake(t)
	r, _ := s.run(fakeOps[4].run, &fakeActions[1], "commit", 1)
	if len(r.errs) != 1 || !errors.Is(r.errs[0], ErrOutcomeUnknown) || errors.Is(r.errs[0], driver.ErrBadConn) {
		t.Errorf("%v", r.errs)
	}
	if n := s.f.count("commit"); n != 1 {
		t.Errorf("%d COMMITs", n)
	}
}

// After a panic in a statement the transaction, or the pinned session, is gone. Whoever recovers and goes on must not get
// another connection, where the statement would commit by itself (I10).
func TestNothingRunsElsewhereAfterAPanic(t *testing.T) {
	ctx := context.Background()
	for _, hidden := range []bool{false, true} {
		for _, pinned := range []bool{false, true} {
			t.Run(fmt.Sprintf("hidden=%v/pinned=%v", hidden, pinned), func(t *testing.T) {
				var s *fakeSetup
				if hidden {
					s = newFakeBelow(t, hideAll)
					s.keeps = true
				} else {
					s = newFake(t)
				}
				s.healthy("the start")
				var exec func() error
				var end func() error
				if pinned {
					c, err := s.db.Conn(ctx)
					if err != nil {
						t.Fatal(err)
					}
					exec, end = func() error { _, err := c.ExecContext(ctx, "x"); return err }, c.Close
				} else {
					tx, err := s.db.BeginTx(ctx, nil)
					if err != nil {
						t.Fatal(err)
					}
					exec, end = func() error { _, err := tx.ExecContext(ctx, "x"); return err }, tx.Rollback
				}
				if err := exec(); err != nil {
					t.Fatal(err)
				}
				s.f.do(func(_ context.Context, c string) error {
					if c == "exec" {
						panic(errFake)
					}
					return nil
				})
				func() {
					defer func() {
						if recover() != errFake {
							t.Error("no panic")
						}
					}()
					_ = exec()
				}()
				s.f.do(nil)
				n := s.f.count("exec")
				for range 2 {
					if err := exec(); !errors.Is(err, errLost) {
						t.Errorf("the next statement: %v, want %v", err, errLost)
					}
				}
				if s.f.count("exec") != n {
					t.Error("the next statement ran on another connection")
				}
				_ = end()
				s.settle()
				s.healthy("it")
			})
		}
	}
}

// BEGIN does not go out on a context that is done, nor does anything else that still needs a permit (I5).
func TestNothingIsSentOnADeadContext(t *testing.T) {
	s := newFake(t)
	ctx := context.Background()
	dead, cancel := context.WithCancel(ctx)
	cancel()
	c, err := s.db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.BeginTx(dead, nil); err != context.Canceled {
		t.Errorf("unbound: %v", err)
	}
	if n := s.g.Stats().Acquired; n != 0 {
		t.Errorf("%d permits were granted to a dead context", n)
	}
	if n := s.f.count("begin"); n != 0 {
		t.Errorf("%d BEGINs reached the driver", n)
	}
	if _, err := c.ExecContext(ctx, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.BeginTx(dead, nil); err != context.Canceled {
		t.Errorf("bound: %v", err)
	}
	if n := s.f.count("begin"); n != 0 {
		t.Errorf("%d BEGINs reached the server", n)
	}
}

// Cancelled while it waits, and cancelled at the moment of the grant.
func TestCancelAroundTheGrant(t *testing.T) {
	for _, op := range fakeOps {
		t.Run(op.name, func(t *testing.T) {
			s := newFake(t)
			for i := range 60 {
				var held []*Permit
				for range fakeRunning {
					held = append(held, mustAcquire(t, s.g, context.Background()))
				}
				sent := s.f.total()
				ctx, cancel := context.WithCancel(context.Background())
				r := &recorder{}
				done := make(chan struct{})
				go func() {
					defer close(done)
					op.run(ctx, s.db, r)
				}()
				waitFor(t, "it waits", func() bool { return s.g.Stats().Waiting == 1 })
				if i%2 == 0 {
					cancel()
					<-done
					if s.f.total() != sent {
						t.Error("a cancelled waiter reached the driver")
					}
					if len(r.errs) == 0 || r.errs[0] != context.Canceled {
						t.Errorf("%v", r.errs)
					}
				} else {
					go cancel() // races with the grant
				}
				for _, p := range held {
					p.Release()
				}
				<-done
				cancel()
				for _, err := range r.errs {
					if !errors.Is(err, context.Canceled) && err != sql.ErrTxDone {
						t.Errorf("%v", err)
					}
				}
				s.settle()
			}
			s.healthy("it")
		})
	}
}

// A panic while a connection is being opened gives the permit back. (The place in the inner pool is lost to database/sql.)
func TestPanicInConnectGivesThePermitBack(t *testing.T) {
	s := newFake(t)
	s.keeps = true
	for i := range 3 {
		s.inner.SetMaxIdleConns(-1) // each operation connects anew
		r, fired := s.run(fakeOps[i].run, &fakeAction{"panic", fakeActions[6].do, true}, "connect", 1)
		if !fired || r.panicked != errFake {
			t.Errorf("fired %v, panic %v", fired, r.panicked)
		}
		s.settle()
	}
	st := s.g.Stats()
	if st.Acquired != 3 || st.DrainsUnproven != 0 {
		t.Errorf("%+v", st)
	}
	// Past s.end, which would find those places missing.
	s.inner.SetMaxOpenConns(0)
	s.lostPlaces = 3
}

// Closing the database with work out lets the work finish, and gives everything back.
func TestCloseWithWorkOut(t *testing.T) {
	ctx := context.Background()
	s := newFake(t)
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := s.db.QueryContext(ctx, "x")
	if err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error)
	go func() { _, err := s.db.ExecContext(ctx, "x"); waiting <- err }()
	waitFor(t, "one waits", func() bool { return s.g.Stats().Waiting == 1 })
	if err := s.db.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waiting; !errors.Is(err, ErrClosed) {
		t.Errorf("the waiter got %v, want ErrClosed", err)
	}
	if _, err := tx.ExecContext(ctx, "x"); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	for rows.Next() {
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		t.Error(err)
	}
	s.settle()
	if _, err := s.db.ExecContext(ctx, "x"); err == nil {
		t.Error("the database still works")
	}
	s.shut = true
}
