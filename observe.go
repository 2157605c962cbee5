package pgxgated

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"
	"weak"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/ngrok/sqlmw"

	"github.com/pgxgated/pgxgated/internal/telemetry"
)

// observer is our own interceptor: it reports what the server was asked, how long it took, and what it answered.
// There is one for each physical connection.
type observer struct {
	sqlmw.NullInterceptor
	g    *Gate
	from time.Duration // when the first call of a lease begins, if that is known: a clock costs more than the rest
}

func (o *observer) ConnBeginTx(ctx context.Context, c driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	r, start := o.start()
	tx, err := c.BeginTx(ctx, opts)
	o.end(r, telemetry.OpBegin, start, err)
	return ctx, tx, err
}

func (o *observer) ConnPrepareContext(ctx context.Context, c driver.ConnPrepareContext, query string) (context.Context, driver.Stmt, error) {
	r, start := o.start()
	st, err := c.PrepareContext(ctx, query)
	o.end(r, telemetry.OpPrepare, start, err)
	return ctx, st, err
}

func (o *observer) ConnExecContext(ctx context.Context, c driver.ExecerContext, query string, args []driver.NamedValue) (driver.Result, error) {
	r, start := o.start()
	res, err := c.ExecContext(ctx, query, args)
	o.end(r, telemetry.OpExec, start, err)
	return res, err
}

func (o *observer) ConnQueryContext(ctx context.Context, c driver.QueryerContext, query string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	r, start := o.start()
	rows, err := c.QueryContext(ctx, query, args)
	o.end(r, telemetry.OpQuery, start, err)
	return ctx, rows, err
}

func (o *observer) TxCommit(_ context.Context, tx driver.Tx) error {
	r, start := o.start()
	err := tx.Commit()
	o.end(r, telemetry.OpCommit, start, err)
	return err
}

func (o *observer) TxRollback(_ context.Context, tx driver.Tx) error {
	r, start := o.start()
	err := tx.Rollback()
	o.end(r, telemetry.OpRollback, start, err)
	return err
}

// start reads the clock, if metrics are attached.
func (o *observer) start() (*telemetry.Recorder, time.Duration) {
	r := o.g.sink.Load()
	if r == nil {
		return nil, 0
	}
	at := o.from
	o.from = 0
	if at == 0 {
		at = o.g.now()
	}
	return r, at
}

func (o *observer) end(r *telemetry.Recorder, op telemetry.Op, start time.Duration, err error) {
	if r != nil {
		r.SQL(op, o.g.now()-start, errorClass(err))
	}
}

// errorClass puts what the server answered into one of a few classes.
func errorClass(err error) telemetry.Class {
	if err == nil {
		return telemetry.ClassNone
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return telemetry.ClassNoAnswer
	}
	switch pgErr.Code {
	case "57014":
		return telemetry.ClassCanceled
	case "55P03":
		return telemetry.ClassLockTimeout
	case "40001":
		return telemetry.ClassSerialization
	case "40P01":
		return telemetry.ClassDeadlock
	case "53300":
		return telemetry.ClassConnections
	}
	return telemetry.ClassOther
}

// lockSampler asks the server, when metrics are scraped, how many of a pool's backends wait for a lock. It has a
// connection of its own, which needs no permit, is made on demand, and is kept for a minute after the last scrape.
type lockSampler struct {
	v *verifier // for its way of connecting and asking

	asking sync.Mutex // held while the server is asked: who comes meanwhile takes that answer
	conn   *pgconn.PgConn
	idle   *time.Timer // closes conn
	last   time.Time   // of the last answer
	answer telemetry.Locks

	mu       sync.Mutex // guards what follows; no I/O under it
	backends []lockBackend
	purgeAt  int // how many backends there may be before those that are gone are looked for
	closed   bool
	said     bool
}

type lockBackend struct {
	pid  uint32
	addr net.Addr
	pg   weak.Pointer[pgconn.PgConn]
}

const (
	lockSampleEvery   = time.Second
	lockSampleTimeout = time.Second // connecting included: a scrape must not hang on a server that does
	lockSampleGap     = time.Minute // of a longer time without a scrape no more than this is counted as waited
	lockSampleLingers = time.Minute
)

// add notes a backend of the pool. pgx does not tell when it goes; that is found out later.
func (l *lockSampler) add(pg *pgconn.PgConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.backends = append(l.backends, lockBackend{pg.PID(), pg.Conn().RemoteAddr(), weak.Make(pg)})
	if len(l.backends) > l.purgeAt {
		l.purgeLocked()
		l.purgeAt = 2*len(l.backends) + 16
	}
}

func (l *lockSampler) purgeLocked() {
	l.backends = slices.DeleteFunc(l.backends, func(b lockBackend) bool {
		pg := b.pg.Value()
		if pg == nil {
			return true
		}
		select {
		case <-pg.CleanupDone():
			return true
		default:
			return false
		}
	})
}

// sample returns the last answer if it is fresh, and else asks. out tells whether any connection is at work: idle ones wait
// for nothing.
func (l *lockSampler) sample(out bool) telemetry.Locks {
	l.asking.Lock()
	now := time.Now()
	if since := now.Sub(l.last); l.last.IsZero() || since >= lockSampleEvery {
		waiting, err := 0, error(nil)
		if out {
			waiting, err = l.ask(now)
		}
		if !l.last.IsZero() {
			l.answer.WaitTime += time.Duration(waiting) * min(since, lockSampleGap)
		}
		l.last, l.answer.Waiting, l.answer.Known = now, waiting, err == nil
		if err != nil {
			l.say(err)
		}
	}
	answer := l.answer
	l.asking.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		l.hangUp() // it was closed meanwhile
	}
	return answer
}

// ask counts the backends that wait for a lock. It is called with asking held.
func (l *lockSampler) ask(now time.Time) (waiting int, err error) {
	l.mu.Lock()
	l.purgeLocked()
	var addr net.Addr
	var pids []byte
	for i := range slices.Backward(l.backends) {
		b := &l.backends[i]
		switch {
		case addr == nil:
			addr = b.addr
		case addr.String() != b.addr.String():
			continue // of a server that is not the pool's any more
		}
		if len(pids) > 0 {
			pids = append(pids, ',')
		}
		pids = strconv.AppendUint(pids, uint64(b.pid), 10)
	}
	l.mu.Unlock()
	if len(pids) == 0 {
		return 0, nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), now.Add(lockSampleTimeout))
	defer cancel()
	if l.conn == nil {
		if l.conn, err = l.v.connect(ctx, addr); err != nil {
			l.conn = nil
			return 0, err
		}
	}
	if l.idle == nil {
		l.idle = time.AfterFunc(lockSampleLingers, l.hangUp)
	} else {
		l.idle.Reset(lockSampleLingers)
	}
	rows, err := l.v.query(ctx, l.conn, "SELECT pg_catalog.count(*) FILTER (WHERE a.wait_event_type = 'Lock'),"+
		" pg_catalog.count(*) FILTER (WHERE a.backend_start IS NULL)"+
		" FROM pg_catalog.pg_stat_activity a WHERE a.pid IN ("+string(pids)+")")
	if err != nil {
		_ = l.conn.Conn().Close() // hard: pgx would be polite to a server that may be lost
		l.conn = nil
		return 0, err
	}
	if string(rows[0][1]) != "0" {
		return 0, errors.New("the rows of our backends are hidden from the role that the pool connects as")
	}
	return strconv.Atoi(string(rows[0][0]))
}

// say tells once that lock waits are not to be seen.
func (l *lockSampler) say(err error) {
	l.mu.Lock()
	said := l.said
	l.said = true
	l.mu.Unlock()
	if !said {
		l.v.log.Warn("pgxgated: lock waits cannot be sampled from pg_stat_activity; this is said once", "gate", l.v.label, "reason", err)
	}
}

// close closes the connection. It does not block.
func (l *lockSampler) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.hangUp()
}

// hangUp closes the connection, unless it is in use.
func (l *lockSampler) hangUp() {
	if !l.asking.TryLock() {
		return
	}
	defer l.asking.Unlock()
	if l.idle != nil {
		l.idle.Stop()
	}
	if conn := l.conn; conn != nil {
		l.conn = nil
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = conn.Close(ctx)
		}()
	}
}

// databases are the connectors that are open, by the pool that they were handed, or nil.
var databases databaseSet

type databaseSet struct {
	mu     sync.Mutex // guards what follows; a gate's lock may be taken under it
	open   map[*Connector]any
	warned map[any]bool // pools
}

// add notes a database. Where several gates have one pool it warns, once for that pool, if their running permits together
// are more than its p connections: the last to come then wait for a connection with a permit in hand.
func (d *databaseSet) add(c *Connector, pool any, p int) {
	if gates, running := d.crowded(c, pool, p); len(gates) > 0 {
		c.cfg.gate.log.Warn("pgxgated: the gates over one pool have more running permits together than it has connections, so operations will wait for a connection with a permit in hand: lower gate_running, or use one gate with workloads",
			"gates", gates, "running", running, "connections", p)
	}
}

// crowded does so, and returns what is to be said: the lock must not be held where a log goes to a gated database.
func (d *databaseSet) crowded(c *Connector, pool any, p int) (gates []string, running int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open == nil {
		d.open, d.warned = make(map[*Connector]any), make(map[any]bool)
	}
	defer func() { d.open[c] = pool }()
	if pool == nil {
		return nil, 0
	}
	for o, of := range d.open {
		if of == pool {
			c.asking = o.asking // c is not in use yet
		}
	}
	if p == 0 || d.warned[pool] {
		return nil, 0
	}
	seen := make(map[*Gate]bool)
	for o, of := range d.open {
		if of == pool && !seen[o.gate] {
			seen[o.gate] = true
			gates = append(gates, o.gate.name)
			running += o.gate.Stats().Limits.Running
		}
	}
	if len(gates) < 2 || running <= p {
		return nil, 0
	}
	d.warned[pool] = true
	slices.Sort(gates)
	return gates, running
}

func (d *databaseSet) remove(c *Connector) {
	d.mu.Lock()
	defer d.mu.Unlock()
	pool := d.open[c]
	delete(d.open, c)
	for _, of := range d.open {
		if of == pool {
			return
		}
	}
	delete(d.warned, pool)
}

// sources are the pools behind a gate, each once.
func (d *databaseSet) sources(g *Gate) []source {
	d.mu.Lock()
	defer d.mu.Unlock()
	var sources []source
	seen := make(map[any]bool)
	for c, pool := range d.open {
		s := c.source.Load()
		if c.gate != g || s == nil || pool != nil && seen[pool] {
			continue
		}
		seen[pool] = true
		sources = append(sources, *s)
	}
	return sources
}

func init() {
	telemetry.Attach = func(gate any) *telemetry.Recorder {
		g := gate.(*Gate)
		g.sink.CompareAndSwap(nil, telemetry.NewRecorder(len(g.budgets)))
		return g.sink.Load()
	}
	telemetry.Snapshot = func(gate any) (whole, without any, closed bool) { return gate.(*Gate).snapshot() }
	telemetry.Workloads = func(gate any) []string {
		var names []string
		for _, b := range gate.(*Gate).budgets {
			names = append(names, b.name)
		}
		return names
	}
	telemetry.Pools = func(gate any) telemetry.Pool {
		var sum telemetry.Pool
		for _, s := range databases.sources(gate.(*Gate)) {
			sum.Add(poolStats(s))
		}
		return sum
	}
	telemetry.LockWaits = func(gate any) telemetry.Locks {
		sum := telemetry.Locks{Known: true}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for _, s := range databases.sources(gate.(*Gate)) {
			wg.Go(func() {
				l := lockWaits(s)
				mu.Lock()
				defer mu.Unlock()
				sum.Known = sum.Known && l.Known
				sum.Waiting += l.Waiting
				sum.WaitTime += l.WaitTime
			})
		}
		wg.Wait()
		return sum
	}
}

// poolStats is what a pool says of itself.
func poolStats(s source) telemetry.Pool {
	switch s := s.(type) {
	case *poolSource:
		st := s.pool.Stat()
		return telemetry.Pool{
			Max: int(st.MaxConns()), Acquired: int(st.AcquiredConns()), Idle: int(st.IdleConns()), Constructing: int(st.ConstructingConns()),
			Acquires: uint64(st.AcquireCount()), EmptyAcquires: uint64(st.EmptyAcquireCount()),
			CanceledAcquires: uint64(st.CanceledAcquireCount()), NewConnections: uint64(st.NewConnsCount()),
			LifetimeDestroys: uint64(st.MaxLifetimeDestroyCount()), IdleDestroys: uint64(st.MaxIdleDestroyCount()),
			AcquireTime: st.AcquireDuration(), EmptyAcquireTime: st.EmptyAcquireWaitTime(),
		}
	case *dbSource:
		st := s.db.Stats()
		return telemetry.Pool{
			Max: st.MaxOpenConnections, Acquired: st.InUse, Idle: st.Idle,
			EmptyAcquires: uint64(st.WaitCount), EmptyAcquireTime: st.WaitDuration,
			LifetimeDestroys: uint64(st.MaxLifetimeClosed), IdleDestroys: uint64(st.MaxIdleClosed + st.MaxIdleTimeClosed),
		}
	}
	return telemetry.Pool{}
}

// lockWaits samples the pools whose server is PostgreSQL and can be seen.
func lockWaits(s source) telemetry.Locks {
	var side *pgxSide
	switch s := s.(type) {
	case *poolSource:
		side = s.pgxSide
	case *dbSource:
		side = s.side.Load()
	}
	if side == nil || side.pooler.Load() {
		return telemetry.Locks{}
	}
	_, out := s.size()
	return side.locks.sample(out > 0)
}
