// Package pgxgated is a database/sql driver that puts admission control in front of a pgx connection pool.
//
// A goroutine per request is nearly free, so an overloaded service piles thousands of callers onto a few dozen
// connections. With this driver each operation first takes a permit: at most Running operations are at work on the
// server, at most Waiting wait for their turn, first come first served and for a bounded time, and the rest is refused at
// once with an error that says so.
//
//	db, err := sql.Open("pgx-gated", "postgres://app@db/orders?pool_max_conns=20&gate_running=16&gate_waiting=160")
//
// The DSN is pgx's, with pgxpool's pool_* keys and the gate_* keys of this package. [NewConnector] is for sql.OpenDB,
// [OpenDBFromPool] gates a pgxpool that exists, and [OpenDB] any *sql.DB, a go-sqlmock one included. Nothing else in code
// that uses database/sql changes. Leave SetMaxOpenConns alone: the connections that database/sql counts are logical ones,
// which weigh nothing; the real ones are in the pool.
//
// A refusal matches [ErrRejected]. What it was is told apart by [ErrAdmissionFull], [ErrWaitTimeout] and
// [ErrDeadlineShort]; [RejectedError] has the numbers.
//
// What an operation is, and how long it holds its permit: a transaction, from BeginTx until its connection is back after
// Commit or Rollback; an autocommit statement, with its rows until they are closed; a *sql.Conn, from its first statement
// until it is closed. Where the caller's context ends an operation, its permit stays out until the server is known to be
// done with it, however long the caller has been gone.
package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// DriverName is the name under which the driver is registered with database/sql.
const DriverName = "pgx-gated"

var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.DriverContext = (*Driver)(nil)
	_ driver.Connector     = (*Connector)(nil)
	_ io.Closer            = (*Connector)(nil)
)

func init() {
	// A second copy of this package in one binary (vendored, or another major version) must not panic at import.
	if !slices.Contains(sql.Drivers(), DriverName) {
		sql.Register(DriverName, &Driver{})
	}
}

// Driver is the database/sql driver. Safe for concurrent use.
type Driver struct {
	c *Connector // of the *sql.DB whose Driver method returned this; nil for the registered one
}

// OpenConnector is what sql.Open calls. It checks the DSN and connects to nothing.
func (d *Driver) OpenConnector(dsn string) (driver.Connector, error) { return NewConnector(dsn) }

// Open returns one logical connection. It is called, once per connection, only by wrappers that know no
// driver.DriverContext: all connections of one DSN then share one pool and one gate, which are closed some seconds after
// the last of them.
func (d *Driver) Open(dsn string) (driver.Conn, error) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	c := opened.byDSN[dsn]
	if c == nil {
		var err error
		if c, err = NewConnector(dsn); err != nil {
			return nil, err
		}
		c.lingers.Store(true)
		c.forget = func() { delete(opened.byDSN, dsn) }
		if opened.byDSN == nil {
			opened.byDSN = make(map[string]*Connector)
		}
		opened.byDSN[dsn] = c
	}
	return c.newConn()
}

var opened struct {
	mu    sync.Mutex // guards byDSN; a connector's lock may be taken under it, not the other way round
	byDSN map[string]*Connector
}

// Connector makes logical connections to one database behind one gate. Safe for concurrent use.
type Connector struct {
	cfg     config
	gate    *Gate
	release func() // gives the share in the gate back
	member  member // of the gate
	texts   textCache
	pgx     bool   // the pool is pgx's
	forget  func() // takes it out of opened, if Driver.Open made it; not the DSN itself, which would show where this is printed

	returns atomic.Bool // an IsValid has told of a return: no wrapper hides it
	hidden  atomic.Bool // said that a wrapper does
	checked atomic.Bool // who calls Connect
	lingers atomic.Bool // a wrapper above may hide Close
	source  atomic.Pointer[source]
	asking  *atomic.Int32 // calls that ask the pool for a connection, of all that were handed the same

	mu     sync.Mutex // guards what follows; no I/O under it
	make   func() (source, error)
	conns  int         // logical connections
	waits  *waits      // of those that were closed
	linger *time.Timer // set while conns is 0 and lingers
	closed bool
}

// NewConnector makes a connector for sql.OpenDB and for wrappers that take one, such as otelsql.OpenDB. It checks the DSN
// and the options, and connects to nothing: the pool is made with the first operation. An error names the setting, the
// value and the range, and never quotes the DSN.
//
// The *sql.DB that is made of it closes it. Call Close where there is none, or where a struct that embeds it as a
// driver.Connector is between them: that hides Close from database/sql, and looks to us as if nothing were between.
func NewConnector(dsn string, opts ...Option) (*Connector, error) {
	d, err := parseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("pgxgated: dsn: %w", err)
	}
	c := &Connector{cfg: defaultConfig(), pgx: true, asking: new(atomic.Int32)}
	if err := errors.Join(c.cfg.applyDSN(d.keys), c.cfg.applyOptions(opts)); err != nil {
		return nil, fmt.Errorf("pgxgated: %w", err)
	}
	p := int(d.pool.MaxConns)
	setting := fmt.Sprintf("pool_max_conns %d", p)
	if !d.sizeGave {
		setting = fmt.Sprintf("pgxpool's default, as pool_max_conns is not given: %d", p)
	}
	cc := d.pool.ConnConfig
	if err := c.enter("dsn "+dsn, serverLabel(cc), p, setting); err != nil {
		return nil, err
	}
	if !d.sizeGave && dsn != "" && c.cfg.shared == nil && !c.cfg.gave("gate_running") {
		l := c.gate.Stats().Limits
		c.cfg.gate.log.Warn("pgxgated: pool_max_conns is not given, so the limits follow from pgxpool's default",
			"gate", c.gate.name, "pool_max_conns", p, "gate_running", l.Running, "gate_waiting", l.Waiting)
	}
	c.make = func() (source, error) {
		pool, err := pgxpool.NewWithConfig(context.Background(), d.pool)
		if err != nil {
			return nil, err
		}
		return newPoolSource(c, pool, true), nil
	}
	databases.add(c, nil, p)
	return c, nil
}

// OpenDBFromPool gates a pgxpool that exists; its hooks, tracers and types keep working. Limits default to those that
// follow from its MaxConns. The pool stays the caller's to close, after the *sql.DB, unless WithOwnPool says otherwise.
// Direct users of the pool are not gated.
func OpenDBFromPool(pool *pgxpool.Pool, opts ...Option) (*sql.DB, error) {
	if pool == nil {
		return nil, errors.New("pgxgated: the pool is nil")
	}
	cfg := pool.Config()
	p := int(cfg.MaxConns)
	cc := cfg.ConnConfig
	return open(pool, serverLabel(cc), p, fmt.Sprintf("the pool's MaxConns %d", p), opts,
		func(c *Connector) (source, error) {
			c.pgx = true
			return newPoolSource(c, pool, c.cfg.ownPool), nil
		})
}

// OpenDB gates any *sql.DB: one of go-sqlmock in a unit test, or of another driver. Limits must be given if the pool is
// not bounded by SetMaxOpenConns. It opens one connection, if the server answers within two seconds, to see whether the
// driver has what is needed: driver.ExecerContext, QueryerContext, ConnBeginTx and ConnPrepareContext; the error names
// what is missing.
//
// The pool stays the caller's to close, after the *sql.DB that is returned, unless WithOwnPool says otherwise.
//
// With another driver than pgx COMMIT and ROLLBACK follow that driver's idea of contexts, and nothing can be known of what
// the server still does on a connection that broke: such a permit comes back after gate_drain_limit.
func OpenDB(pool *sql.DB, opts ...Option) (*sql.DB, error) {
	if pool == nil {
		return nil, errors.New("pgxgated: the pool is nil")
	}
	p := pool.Stats().MaxOpenConnections
	return open(pool, fmt.Sprintf("%T", pool.Driver()), p, fmt.Sprintf("the pool's MaxOpenConns %d", p), opts,
		func(c *Connector) (source, error) {
			if d, ok := pool.Driver().(*Driver); ok && d.c != nil && d.c.gate == c.gate {
				return nil, fmt.Errorf("pgxgated: the pool is behind gate %q already: each operation would need a second permit of it", c.gate.name)
			}
			s := &dbSource{db: pool, c: c, own: c.cfg.ownPool}
			return s, s.check()
		})
}

// open makes a gated *sql.DB of a pool that exists.
func open(pool any, label string, p int, setting string, opts []Option, make_ func(*Connector) (source, error)) (*sql.DB, error) {
	c := &Connector{cfg: defaultConfig(), asking: new(atomic.Int32)}
	if err := c.cfg.applyOptions(opts); err != nil {
		return nil, fmt.Errorf("pgxgated: %w", err)
	}
	if err := c.enter("", label, p, setting); err != nil {
		return nil, err
	}
	s, err := make_(c)
	if err != nil {
		c.release()
		return nil, err
	}
	c.source.Store(&s)
	databases.add(c, pool, p)
	return sql.OpenDB(c), nil
}

// enter finds or makes the gate.
func (c *Connector) enter(key, label string, p int, setting string) error {
	limits, err := c.cfg.resolve(p, setting)
	if err != nil {
		return fmt.Errorf("pgxgated: %w", err)
	}
	if c.cfg.shared != nil {
		c.gate, c.release = c.cfg.shared, func() {}
		return nil
	}
	c.gate, c.release, err = gates.enter(&c.cfg, key, label, limits)
	if err != nil {
		return err
	}
	if running := c.gate.Stats().Limits.Running; p > 0 && running > p {
		c.release()
		return fmt.Errorf("pgxgated: gate %q has running %d, more than the %d connections of this pool (%s)", c.gate.name, running, p, setting)
	}
	return nil
}

// Connect returns a logical connection. It waits for nothing.
func (c *Connector) Connect(context.Context) (driver.Conn, error) {
	if c.checked.CompareAndSwap(false, true) {
		// database/sql itself closes a connector that is an io.Closer. A wrapper in between may not pass that on.
		var pc [1]uintptr
		if runtime.Callers(2, pc[:]) == 1 {
			f, _ := runtime.CallersFrames(pc[:]).Next()
			direct := strings.HasPrefix(f.Function, "database/sql.")
			c.lingers.Store(!direct)
			if direct {
				c.returns.Store(true) // nothing in between hides IsValid, so the first pinned connection is one already
			}
		}
	}
	return c.newConn()
}

// Driver returns a driver that knows this connector's gate, for GateOf.
func (c *Connector) Driver() driver.Driver { return &Driver{c: c} }

// Gate returns the gate that the connector's operations go through.
func (c *Connector) Gate() *Gate { return c.gate }

// Close ends the waiting of whoever waits with ErrClosed, lets operations that are at work finish, and closes the pool if
// it is the connector's own. It waits for nothing. database/sql calls it from (*sql.DB).Close. Calls after the first do
// nothing.
func (c *Connector) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.make = nil
	if c.linger != nil {
		c.linger.Stop()
	}
	c.mu.Unlock()
	databases.remove(c)
	c.gate.closeMember(&c.member)
	c.release()
	if s := c.source.Load(); s != nil {
		return (*s).close()
	}
	return nil
}

func (c *Connector) errClosed() error {
	return fmt.Errorf("pgxgated: gate %q: database: %w", c.gate.name, ErrClosed)
}

// lingerTime is how long a pool outlives its last logical connection where nobody may tell that the database was closed.
const lingerTime = 2 * time.Second

func (c *Connector) newConn() (driver.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, c.errClosed()
	}
	c.conns++
	if c.linger != nil {
		c.linger.Stop()
		c.linger = nil
	}
	w := c.waits
	if w == nil {
		w = new(waits)
	} else {
		c.waits, w.next = w.next, nil
	}
	return &conn{c: c, w: w}, nil
}

func (c *Connector) connClosed(w *waits) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w.next = c.waits
	c.waits = w
	c.conns--
	if c.conns == 0 && !c.closed && c.lingers.Load() {
		c.linger = time.AfterFunc(lingerTime, c.stopIdle)
	}
}

// stopIdle closes the pool of a connector without logical connections. The next operation makes another one.
func (c *Connector) stopIdle() {
	opened.mu.Lock()
	c.mu.Lock()
	idle := c.conns == 0 && !c.closed
	s := c.source.Load()
	again := c.make != nil && c.forget == nil
	if idle && c.forget != nil {
		c.forget()
	}
	if idle && again {
		c.source.Store(nil)
	}
	c.mu.Unlock()
	opened.mu.Unlock()
	switch {
	case !idle:
	case c.forget != nil:
		_ = c.Close()
	case again && s != nil:
		_ = (*s).close()
	}
}

// contended tells whether the next operation would have to wait.
func (c *Connector) contended() bool {
	if c.gate.contended() {
		return true
	}
	s := c.source.Load()
	if c.cfg.scope == ScopeAll || s == nil {
		return false
	}
	p, out := (*s).size() // where statements without a permit wait
	return p > 0 && out >= p
}

// src returns the pool, nil if the connector is closed and had none.
func (c *Connector) src() source {
	if s := c.source.Load(); s != nil {
		return *s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.source.Load(); s != nil {
		return *s
	}
	if c.make == nil {
		return nil
	}
	s, err := c.make()
	if err != nil {
		s = brokenSource{err}
	}
	c.source.Store(&s)
	return s
}

// physical takes a physical connection, waiting at most gate_pool_wait since a time of the gate's clock.
func (c *Connector) physical(ctx context.Context, w *poolWait, since time.Duration) (*physical, error) {
	s := c.src()
	if s == nil {
		return nil, c.errClosed()
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	bounded, wait, ours := ctx, c.cfg.poolWait, false
	from := c.gate.epoch.Add(since)
	if d, ok := ctx.Deadline(); !ok || d.Sub(from) > wait {
		pool, _ := s.(*poolSource)
		bounded = w.begin(ctx, from, wait, pool != nil && pool.exact) // a hook may derive from it what is waited for
		defer w.end()
		ours = true
	}
	c.asking.Add(1)
	defer c.asking.Add(-1)
	p, err := s.acquire(bounded)
	switch {
	case err == nil:
		p.until = since + handOnFor
		return p, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case ours && (bounded.Err() != nil || !time.Now().Before(from.Add(wait))): // a driver may go by its deadline
		size, out := s.size()
		return nil, fmt.Errorf("pgxgated: gate %q: %w of %v (gate_pool_wait): %d of %d connections are out", c.gate.name, ErrPoolTimeout, wait, out, size)
	case errors.Is(err, ErrClosed):
		return nil, c.errClosed()
	case errors.Is(err, driver.ErrBadConn):
		return nil, fmt.Errorf("pgxgated: gate %q: the pool has no working connection: %w", c.gate.name, errLost)
	default:
		return nil, err
	}
}

// warnHidden says once that a wrapper hides the return of connections.
func (c *Connector) warnHidden() {
	if !c.hidden.Swap(true) { // a sync.Once would wait for itself where the log goes to this database
		c.cfg.gate.log.Warn("pgxgated: a wrapper above hides when database/sql takes a connection back, so a *sql.Conn keeps its physical connection until it is used again: call SetMaxIdleConns(0)",
			"gate", c.gate.name)
	}
}

// brokenSource is a pool that could not be made.
type brokenSource struct{ err error }

func (s brokenSource) acquire(context.Context) (*physical, error) { return nil, s.err }
func (s brokenSource) size() (int, int)                           { return 0, 0 }
func (s brokenSource) close() error                               { return nil }

// connectorKey carries a **Connector through Ping.
type connectorKey struct{}

// GateOf returns the gate of a gated *sql.DB, also below wrappers of the driver such as otelsql's, or nil if it is not
// gated. It asks the database's driver, then a ping that carries a key: a gated connection answers that without a
// server, an ungated one may ping its server, for at most a second.
func GateOf(db *sql.DB) *Gate {
	if c := connectorOf(db); c != nil {
		return c.gate
	}
	return nil
}

func connectorOf(db *sql.DB) *Connector {
	if db == nil {
		return nil
	}
	if d, ok := db.Driver().(*Driver); ok && d.c != nil {
		return d.c
	}
	var c *Connector
	ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), connectorKey{}, &c), time.Second)
	defer cancel()
	_ = db.PingContext(ctx)
	return c
}

// gates are those that were opened by name or DSN, so that what is opened again finds its budget.
var gates registry

type registry struct {
	mu     sync.Mutex // guards what follows; a gate's lock may be taken under it
	shared map[string]*sharedGate
	labels map[string]bool
}

type sharedGate struct {
	gate   *Gate
	limits Limits // it was created with
	cfg    gateConfig
	users  int
}

// enter returns the gate of a name, or of what is opened in the same way where key is not "", and the function that gives the
// share in it back; the last one closes it.
func (r *registry) enter(cfg *config, key, label string, limits Limits) (*Gate, func(), error) {
	switch {
	case cfg.gateName != "":
		key, label = "name "+cfg.gateName, cfg.gateName
	case key != "":
		// The same DSN opened twice, in the same way, is one service that must not get its budget twice. What it leaves open
		// comes from the environment, which may have changed; the label has that.
		key = fmt.Sprintf("%s\x00%s\x00%v\x00%v\x00%v\x00%s\x00%v", key, label, limits, cfg.gate.mode, cfg.gate.deadlineAware, cfg.gate.workloadsText, cfg.gate.leakThreshold)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.shared[key]; s != nil && key != "" && !s.gate.isClosed() { // by hand: then it is of no use to anybody
		if cfg.gave("gate_running") && limits.Running != s.limits.Running ||
			cfg.gave("gate_waiting") && limits.Waiting != s.limits.Waiting ||
			cfg.gave("gate_max_wait") && limits.MaxWait != s.limits.MaxWait {
			return nil, nil, fmt.Errorf("pgxgated: gate %q exists with other limits: it has (%v), this has (%v)", cfg.gateName, s.limits, limits)
		}
		for k, differs := range map[string][2]any{
			"gate_mode":               {s.cfg.mode, cfg.gate.mode},
			"gate_deadline_admission": {s.cfg.deadlineAware, cfg.gate.deadlineAware},
			"gate_workloads":          {s.cfg.workloadsText, cfg.gate.workloadsText},
			"gate_leak_threshold":     {s.cfg.leakThreshold, cfg.gate.leakThreshold},
		} {
			if cfg.gave(k) && differs[0] != differs[1] {
				return nil, nil, fmt.Errorf("pgxgated: gate %q exists with another %s: it has %v, this has %v", cfg.gateName, k, differs[0], differs[1])
			}
		}
		s.users++
		return s.gate, r.leaver(key, s), nil
	}
	for n, base := 2, label; r.labels[label]; n++ {
		label = fmt.Sprintf("%s#%d", base, n)
	}
	g, err := newGate(label, limits, cfg.gate)
	if err != nil {
		return nil, nil, err
	}
	if r.labels == nil {
		r.labels, r.shared = make(map[string]bool), make(map[string]*sharedGate)
	}
	r.labels[label] = true
	s := &sharedGate{gate: g, limits: limits, cfg: cfg.gate, users: 1}
	if key != "" {
		r.shared[key] = s
	}
	return g, r.leaver(key, s), nil
}

func (r *registry) leaver(key string, s *sharedGate) func() {
	return sync.OnceFunc(func() {
		r.mu.Lock()
		s.users--
		last := s.users == 0
		if last {
			delete(r.labels, s.gate.name)
			if r.shared[key] == s {
				delete(r.shared, key)
			}
		}
		r.mu.Unlock()
		if last {
			_ = s.gate.Close()
		}
	})
}

// textCache remembers how many parameters a statement's text takes. That follows from the text alone, so it never
// becomes wrong; it is bounded by forgetting any when full.
type textCache struct {
	mu     sync.Mutex // guards inputs
	inputs map[string]int
}

const maxTexts = 1024

func (t *textCache) get(text string) (int, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, ok := t.inputs[text]
	return n, ok
}

func (t *textCache) put(text string, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.inputs == nil {
		t.inputs = make(map[string]int)
	}
	if len(t.inputs) >= maxTexts {
		for any := range t.inputs {
			delete(t.inputs, any)
			break
		}
	}
	t.inputs[text] = n
}
