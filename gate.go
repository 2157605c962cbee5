package pgxgated

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgxgated/pgxgated/internal/telemetry"
)

// Gate is the admission controller in front of a pool; elsewhere called a bulkhead.
//
// An operation first takes an admission permit (Running+Waiting of them, refused at once when none is left) and then a
// running permit (Running of them, granted first come, first served, after at most MaxWait). It holds both until it is
// released.
//
// What the gate promises, by number:
//
//	I1  running ≤ Running and waiting ≤ Waiting at every instant. After SetLimits has lowered a limit, holders finish
//	    and nobody enters until the limit is met again.
//	I2  while a running permit is free nobody waits who could use it, at the gate's level and at a workload's. Both
//	    levels are granted in one step under the lock: nobody holds one while waiting for the other.
//	I3  each permit is released exactly once, however the operation ends.
//	I4  first come, first served within a workload (and across workloads among those that may run); a dead head of the
//	    queue never blocks those behind it.
//	I5  a context that was done before the grant never gets a permit; a grant that races with a cancellation is handed on.
//	I7  admitted = running + waiting; everything is 0 when idle.
//
// I6 and I8 to I11 are what the driver promises on top: see conn.go.
//
// The flow, under one lock:
//
//	acquire: room and nobody ahead → running
//	         no admission permit   → ErrAdmissionFull
//	         cannot make deadline  → ErrDeadlineShort
//	         otherwise             → queue, until granted, MaxWait, hopeless, context done or closed
//	release: running-1, then hand over to the first in line that may run; in a long line, that has time enough
//
// Rejected: two counting semaphores, one per level, as this is usually written by hand. Between them a permit is free
// while its waiter has not woken yet (I2), a waiter that gives up must be told apart from one that was just granted in
// two places, and both bounds are only approximate. The measured cost is the same.
//
// A Gate is safe for concurrent use. It knows nothing of databases: work outside database/sql takes a permit of the same
// budget with [Gate.Acquire].
type Gate struct {
	name          string
	observe       bool
	deadlineAware bool
	log           *slog.Logger
	sink          atomic.Pointer[telemetry.Recorder] // nil without metrics
	leaks         *leakWatch                         // nil without gate_leak_threshold
	epoch         time.Time                          // the gate's clock is the time since then: one monotonic reading, no wall clock
	waitTime      atomic.Int64                       // nanoseconds; who was granted a permit adds without mu

	mu       sync.Mutex // guards what follows; no I/O, no callback, no pool call, no method of a context under it
	limits   Limits
	running  int
	waiting  int
	draining int
	closed   bool
	seq      uint64    // order of arrival across queues
	budgets  []*budget // [0] is the gate's own, for calls without a workload; then the workloads in order
	named    map[string]*budget
	slots    []slot // permits that are out, and free places
	free     int32  // first free place, -1 none
	bypassed uint64
	unproven uint64
	killed   uint64
	holdTime time.Duration
	meanHold mean // for RetryAfter
	virtual  virtualQueue
	with     luggage // for the next grant to an operation of withFor
	withFor  *member
}

// Limits are the bounds of a gate or of one of its workloads.
type Limits struct {
	// Running is B, the number of running permits: how many operations may be at work at once. 1 or more. It counts
	// operations, not requests per second.
	Running int

	// Waiting is Q, how many admitted operations may wait for a running permit. 0 means that nobody waits: what finds no
	// running permit is refused.
	Waiting int

	// MaxWait is the longest an admitted operation waits for a running permit. It is a clock of its own, not the
	// context's. 0 means never wait. [WithMaxWait] sets it for one call.
	MaxWait time.Duration
}

// The largest limits that make sense; they keep Running+Waiting far from overflow and catch a swapped argument.
const (
	maxPermits = 1_000_000
	maxMaxWait = 24 * time.Hour
)

func (l Limits) validate() error {
	switch {
	case l.Running < 1 || l.Running > maxPermits:
		return fmt.Errorf("running (gate_running, Limits.Running) is %d, want 1 to %d", l.Running, maxPermits)
	case l.Waiting < 0 || l.Waiting > maxPermits:
		return fmt.Errorf("waiting (gate_waiting, Limits.Waiting) is %d, want 0 to %d", l.Waiting, maxPermits)
	case l.MaxWait < 0 || l.MaxWait > maxMaxWait:
		return fmt.Errorf("max wait (gate_max_wait, Limits.MaxWait) is %v, want 0s to %v", l.MaxWait, maxMaxWait)
	}
	return nil
}

// String is the limits as they stand in log records.
func (l Limits) String() string {
	return fmt.Sprintf("running %d, waiting %d, max wait %v", l.Running, l.Waiting, l.MaxWait)
}

// The reasons of a refusal. The three are [ErrRejected] too, never match a context's error or driver.ErrBadConn, and
// call for different answers, so they are never added up into one number.
var (
	// ErrRejected is matched by every refusal of a gate.
	ErrRejected = errors.New("rejected by the gate")
	// ErrAdmissionFull: all Running+Waiting admission permits were out. Refused at once.
	ErrAdmissionFull error = reason("admission full")
	// ErrWaitTimeout: admitted, but no running permit came within MaxWait.
	ErrWaitTimeout error = reason("no running permit within the maximum wait")
	// ErrDeadlineShort: the caller's deadline leaves less time than such work takes, or in a long line than makes good use of a
	// permit (Stats.Estimates, Stats.Worthwhile). Nothing has run out yet, so it does not match context.DeadlineExceeded.
	ErrDeadlineShort error = reason("deadline too short for such work")
)

var (
	// ErrPoolTimeout: permits were held, but no physical connection came within gate_pool_wait.
	ErrPoolTimeout = errors.New("no physical connection within the pool wait")
	// ErrClosed: the gate was closed, or the gated database while the call waited. (A call that comes after (*sql.DB).Close never
	// reaches the driver: database/sql answers "sql: database is closed".)
	ErrClosed = errors.New("closed")
	// ErrNested: work inside InTx asked the same gate for a second permit, for which it might wait for itself.
	ErrNested = errors.New("already inside a transaction of this gate")
	// ErrUnknownWorkload: the call names a workload that the gate does not have.
	ErrUnknownWorkload = errors.New("unknown workload")
	// ErrOutcomeUnknown: COMMIT was sent and its answer never came; it may have been carried out.
	ErrOutcomeUnknown = errors.New("outcome of COMMIT unknown")
)

type reason string

func (r reason) Error() string        { return string(r) }
func (r reason) Is(target error) bool { return target == ErrRejected }

// RejectedError is the error of a refusal. It matches [ErrRejected] and its Reason with errors.Is.
type RejectedError struct {
	Gate     string
	Workload string        // "" without one
	Reason   error         // ErrAdmissionFull, ErrWaitTimeout or ErrDeadlineShort
	Limits   Limits        // those that refused: the workload's where it is the narrower one
	Running  int           // at work when it was refused, at the level of Limits
	Waiting  int           // in the queue when it was refused, at the level of Limits
	Waited   time.Duration // how long the call had waited

	meanHold time.Duration // of late, at the level of Limits
}

// Error names the gate, the reason and the numbers.
func (e *RejectedError) Error() string {
	of := ""
	if e.Workload != "" {
		of = fmt.Sprintf(" workload %q", e.Workload)
	}
	waited := ""
	if e.Waited > 0 {
		waited = fmt.Sprintf(" after %v", e.Waited.Round(time.Microsecond))
	}
	return fmt.Sprintf("pgxgated: gate %q%s: %v%s (%d of %d running, %d of %d waiting, max wait %v)",
		e.Gate, of, e.Reason, waited, e.Running, e.Limits.Running, e.Waiting, e.Limits.Waiting, e.Limits.MaxWait)
}

// Unwrap returns the Reason.
func (e *RejectedError) Unwrap() error { return e.Reason }

// RetryAfter estimates when a new attempt may find a free place: the time in which those that were ahead of this call
// are served at the mean hold of late. It is an estimate for a Retry-After header or a client's backoff, never a promise;
// add jitter, and a budget, before you retry at all. Between 1 ms and 30 s.
func (e *RejectedError) RetryAfter() time.Duration {
	const longest = 30 * time.Second
	served := float64(e.meanHold) * float64(e.Waiting+1) / float64(max(e.Limits.Running, 1))
	return max(time.Duration(min(served, float64(longest))), time.Millisecond)
}

// Stats is one consistent snapshot of a gate.
type Stats struct {
	Limits Limits

	// Gauges. Running includes Draining: operations whose caller is gone while the server is not yet known to be done.
	Running, Waiting, Draining int

	// Counters. Their sum is the number of calls that have been answered, except those that named an unknown workload or got
	// ErrNested (programming errors, refused before admission).
	Acquired, AdmissionFull, WaitTimeout, DeadlineShort, Canceled, Closed, Bypassed uint64

	// WouldReject counts, in observe mode, what enforce mode would have refused, by reason: "admission_full",
	// "wait_timeout", "deadline_short". Nil in enforce mode.
	WouldReject map[string]uint64

	// DrainsUnproven counts permits that came back without proof that the server was done. TerminatedBackends counts
	// those that had to be ended with pg_terminate_backend to get that proof.
	DrainsUnproven, TerminatedBackends uint64

	WaitTime, HoldTime     time.Duration // sums over all calls that waited, and over all permits that came back
	OldestWait, OldestHold time.Duration // 0 if nobody waits, nobody holds

	// OldestWaitWorkload and OldestHoldWorkload are the workloads of those two, "" without one. OldestHoldSite is where the
	// code is that took the permit, as "function (file:line)"; known only with gate_leak_threshold.
	OldestWaitWorkload, OldestHoldWorkload, OldestHoldSite string

	// LeasesOverdue is how many permits have been out for longer than gate_leak_threshold. 0 without one.
	LeasesOverdue int

	// Estimates are the p10 of holds by kind ("autocommit", "read", "tx") that deadline-aware admission compares
	// a deadline with. A kind without an estimate is absent.
	Estimates map[string]time.Duration

	// Worthwhile is, by the same kinds, the time that must be left of a deadline where the line is long: a permit that is given with
	// it finishes 95 % as many operations, for the time that permits are held, as it can. A line is long where more wait
	// than Running, or than half of Waiting if that is less. Absent where nothing was successful lately.
	Worthwhile map[string]time.Duration

	// Workloads has a snapshot for each workload, taken at the same instant: limits, gauges, outcomes, the two ages and
	// the two estimates. The rest is kept for the gate only. Nil without workloads.
	Workloads map[string]Stats
}

// Mode says what a gate does with what it would refuse.
type Mode string

const (
	Enforce Mode = "enforce" // refuse it
	Observe Mode = "observe" // let everything through at once, and count what enforce mode would have refused
)

// gateConfig is what belongs to a gate rather than to one database that is behind it.
type gateConfig struct {
	mode          Mode
	deadlineAware bool
	workloads     []workload
	workloadsText string // the same as a DSN has it, sorted
	leakThreshold time.Duration
	log           *slog.Logger
	given         map[string]string // DSN keys of the settings that were given, and by what
}

type workload struct {
	name   string
	limits Limits // MaxWait is the gate's
}

// NewGate makes a gate. Its name stands in errors and metrics and need not be unique; to share a gate between databases
// hand it to each of them with [WithGate]. The error names the limit that is out of range. Close it when it is no longer
// needed: that ends the waiting of whoever waits.
func NewGate(name string, l Limits, opts ...GateOption) (*Gate, error) {
	cfg := gateConfig{mode: Enforce, deadlineAware: true, log: slog.Default()}
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("pgxgated: gate %q: a GateOption is nil", name)
		}
		if err := o.applyGate(&cfg); err != nil {
			return nil, fmt.Errorf("pgxgated: gate %q: %w", name, err)
		}
	}
	return newGate(name, l, cfg)
}

func newGate(name string, l Limits, cfg gateConfig) (*Gate, error) {
	if err := l.validate(); err != nil {
		return nil, fmt.Errorf("pgxgated: gate %q: %w", name, err)
	}
	g := &Gate{
		name:          name,
		observe:       cfg.mode == Observe,
		deadlineAware: cfg.deadlineAware,
		log:           cfg.log,
		epoch:         time.Now(),
		limits:        l,
		budgets:       []*budget{{limits: Limits{Running: maxPermits + 1, Waiting: maxPermits + 1}}}, // never the narrower ones
		free:          -1,
	}
	for _, w := range cfg.workloads {
		if err := w.limits.validate(); err != nil {
			return nil, fmt.Errorf("pgxgated: gate %q workload %q: %w", name, w.name, err)
		}
		if w.limits.Running > l.Running {
			return nil, fmt.Errorf("pgxgated: gate %q workload %q: running is %d, more than the gate's own %d", name, w.name, w.limits.Running, l.Running)
		}
		b := &budget{name: w.name, index: len(g.budgets), limits: w.limits}
		if g.named == nil {
			g.named = make(map[string]*budget)
		}
		if w.name == "" || g.named[w.name] != nil {
			return nil, fmt.Errorf("pgxgated: gate %q: workload name %q is empty or given twice", name, w.name)
		}
		g.named[w.name] = b
		g.budgets = append(g.budgets, b)
	}
	if cfg.leakThreshold > 0 {
		g.leaks = &leakWatch{g: g, threshold: cfg.leakThreshold}
	}
	return g, nil
}

// Name is the gate's label in errors and metrics.
func (g *Gate) Name() string { return g.name }

// kind is what an operation is.
type kind uint8

const (
	kindHand       kind = iota // a permit taken with Acquire: asks no estimate and feeds none
	kindAutocommit             // a statement outside a transaction, with its rows
	kindRead                   // a read-only transaction
	kindTx                     // a transaction
	kindPinned                 // a *sql.Conn: as long as its user likes, so neither asked nor sampled
	kinds
)

var kindNames = [kinds]string{"hand", "autocommit", "read", "tx", "pinned"}

func (k kind) String() string { return kindNames[k] }

// estimated tells whether holds of this kind say something about the next one.
func (k kind) estimated() bool { return k == kindAutocommit || k == kindRead || k == kindTx }

// Acquire takes a permit for work outside database/sql that must share the budget. It waits for a running permit, at
// most MaxWait (or [WithMaxWait]), and honours [WithWorkload] and [Bypass].
//
// On success the caller must call Release when the work is done; the permit counts until then. On failure nothing is
// held, and the error is a *RejectedError (ErrAdmissionFull, ErrWaitTimeout), ErrClosed, ErrUnknownWorkload, ErrNested
// inside [InTx] on this gate, or the context's own error exactly when the context ended the wait. A context that is already
// done gets no permit.
//
// Uncontended, a pair of Acquire and Release costs some 120 ns, half of it two readings of the clock, and no allocation.
func (g *Gate) Acquire(ctx context.Context) (*Permit, error) {
	return (&Permit{g: g}).take(ctx) // inlined: a permit that does not escape its caller costs no allocation
}

// Permit is a running permit together with its admission permit.
type Permit struct {
	g *Gate
	h handle
}

//go:noinline
func (p *Permit) take(ctx context.Context) (*Permit, error) {
	h, err := p.g.acquire(ctx, kindHand, nil)
	if err != nil {
		return nil, err
	}
	p.h = h
	return p, nil
}

// Release gives the permit back and hands it to the first in line. It waits for nothing. Calls after the first do
// nothing. Safe for concurrent use.
func (p *Permit) Release() { p.g.release(p.h, false) }

// handle names a permit that is out: a slot and its generation, so that a second release finds that the slot has moved
// on. The zero handle names none.
type handle struct {
	slot int32
	gen  uint32
	at   time.Duration // when acquire returned it
}

// slot is the state of a permit that is out.
type slot struct {
	gen      uint32 // odd while out
	kind     kind
	draining bool
	virtual  virtualState
	next     int32 // free places
	b        *budget
	since    time.Duration
	deadline time.Duration // the caller's, 0: none
	cut      time.Duration // when the caller's deadline ended the operation, 0 if it did not
	trace    *trace        // nil without gate_leak_threshold
}

// member is one of several databases behind a gate.
type member struct {
	closed bool // guarded by the gate's mu
}

// closeMember ends the waiting of m's operations with ErrClosed, and refuses those that come later.
func (g *Gate) closeMember(m *member) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.closed = true
	for _, b := range g.budgets {
		for w, next := b.queue.first, (*waiter)(nil); w != nil; w = next {
			if next = w.next; w.m == m {
				g.wakeLocked(w, shut)
			}
		}
	}
}

// acquire takes a permit for an operation of kind k, of the database m if that is not nil.
func (g *Gate) acquire(ctx context.Context, k kind, m *member) (handle, error) {
	return g.acquireAs(ctx, k, m, nil)
}

// acquireAs is acquire for a caller that keeps a waiter to wait with, nil for one that does not. It may be used for one
// call at a time.
func (g *Gate) acquireAs(ctx context.Context, k kind, m *member, w *waiter) (handle, error) {
	c := callIn(ctx)
	if c.held != nil && !c.bypass && !g.observe && c.held.blocks(g) {
		return handle{}, fmt.Errorf("pgxgated: gate %q: %w", g.name, ErrNested)
	}
	err := ctx.Err()
	endless := ctx.Done() == nil
	var deadline time.Duration // 0: none
	if g.deadlineAware && k.estimated() {
		if d, ok := ctx.Deadline(); ok {
			deadline = max(d.Sub(g.epoch), 1)
		}
	}

	g.mu.Lock()
	b := g.budgets[0]
	if c.hasWorkload {
		if b = g.named[c.workload]; b == nil {
			g.mu.Unlock()
			return handle{}, fmt.Errorf("pgxgated: gate %q: %w: %q", g.name, ErrUnknownWorkload, c.workload)
		}
	}
	var h handle
	switch {
	case err != nil:
		b.canceled++
		g.mu.Unlock()
		return handle{}, err
	case g.closed || m != nil && m.closed:
		b.closed++
		g.mu.Unlock()
		return handle{}, g.errClosed()
	case c.bypass:
		g.bypassed++
		g.mu.Unlock()
		return handle{}, nil
	case g.observe:
		h = g.observeLocked(b, k, deadline, c, g.now())
	case b.queue.first == nil && g.running < g.limits.Running && b.running < b.limits.Running:
		h = g.grantLocked(b, k, deadline, g.now())
	default:
		h, err = g.wait(ctx, m, b, k, deadline, c, w)
		g.leaks.took(h)
		return h, err
	}
	if endless {
		b.acquiredEndless++
	}
	g.mu.Unlock()

	if !endless {
		if err = ctx.Err(); err != nil {
			// I5: the context ended while we came here, perhaps before the permit was even free.
			g.mu.Lock()
			b.canceled++
			g.freeLocked(h, g.now())
			g.mu.Unlock()
			return handle{}, err
		}
		b.acquired.Add(1)
	}
	g.sink.Load().GateWait(b.index, 0)
	g.leaks.took(h)
	return h, nil
}

// wait queues, or refuses. It is called with mu held and releases it.
func (g *Gate) wait(ctx context.Context, m *member, b *budget, k kind, deadline time.Duration, c *call, w *waiter) (handle, error) {
	maxWait := g.limits.MaxWait
	if c.hasMaxWait {
		maxWait = c.maxWait
	}
	if g.waiting >= g.limits.Waiting || g.running+g.waiting >= g.limits.Running+g.limits.Waiting || b.fullLocked() {
		// Before the clock is read: under overload most calls end here.
		b.admissionFull++
		e := g.rejectedLocked(b, ErrAdmissionFull, 0, maxWait)
		g.mu.Unlock()
		return handle{}, e
	}
	now := g.now()
	hopeless := b.hopelessAt(k, deadline)
	var why error
	switch {
	case hopeless != 0 && now > hopeless || g.worthlessLocked(b, k, deadline, now, b.waiting):
		why = ErrDeadlineShort
		b.tooShortLocked(k, now)
	case maxWait <= 0:
		why = ErrWaitTimeout
		b.waitTimeout++
	}
	if why != nil {
		e := g.rejectedLocked(b, why, 0, maxWait)
		g.mu.Unlock()
		return handle{}, e
	}

	g.seq++
	kept := w != nil
	if !kept {
		w = new(waiter)
	}
	if w.wake == nil {
		w.wake = make(chan struct{}, 1)
		w.alarm.ring = func() { g.expire(w) }
	}
	w.b, w.m, w.kind, w.seq, w.since, w.deadline, w.end = b, m, k, g.seq, now, deadline, waiting
	b.queue.push(w)
	b.waiting++
	g.waiting++
	g.mu.Unlock()

	// One alarm for whichever comes first: the end of MaxWait, or the moment at which the work could no longer be done in
	// time. The latter is where a refusal still helps the caller; at the deadline itself it would be too late.
	until, cause := now+maxWait, ErrWaitTimeout
	if hopeless != 0 && hopeless < until {
		until, cause = hopeless, ErrDeadlineShort
	}
	w.alarm.set(g.epoch.Add(until))
	woken := false
	select {
	case <-w.wake:
		woken = true
	case <-ctx.Done():
	}
	w.alarm.off()
	if !kept {
		w.alarm.stop()
	}
	if !woken {
		g.mu.Lock()
		if w.end == waiting {
			b.queue.remove(w)
			b.waiting--
			g.waiting--
		} else {
			<-w.wake // in the same instant: sent under mu, so it is there
		}
		g.mu.Unlock()
	}
	now = g.now()
	waited := now - w.since
	g.waitTime.Add(int64(waited))
	g.sink.Load().GateWait(b.index, waited)
	dead := ctx.Err() // asked after the grant: I5 holds for a context that ended while we came here, too
	if w.end == granted && dead == nil {
		b.acquired.Add(1)
		w.h.at = now
		return w.h, nil
	}

	if with := w.luggage(); with != nil {
		with.giveBack() // before the permit is
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch w.end {
	case granted:
		g.freeLocked(w.h, now) // I5: the grant raced with the end of the context, so it is handed on
	case refused:
		cause = ErrDeadlineShort
	case shut:
		b.closed++
		return handle{}, g.errClosed()
	}
	switch {
	case dead != nil:
		b.canceled++
		return handle{}, dead
	case cause == ErrDeadlineShort:
		b.tooShortLocked(k, now)
	default:
		b.waitTimeout++
	}
	return handle{}, g.rejectedLocked(b, cause, waited, maxWait)
}

// luggage takes what came with the grant, if anything did.
func (w *waiter) luggage() luggage {
	with := w.with
	w.with = nil
	return with
}

// expire ends the waiting of w, whose time is over.
func (g *Gate) expire(w *waiter) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.end == waiting {
		g.wakeLocked(w, expired)
	}
}

// workloadOf is the index of the workload that a call is charged to.
func (g *Gate) workloadOf(ctx context.Context) int {
	if g.named != nil {
		if b := g.named[callIn(ctx).workload]; b != nil {
			return b.index
		}
	}
	return 0
}

// release gives a permit back. ok tells that the operation was successful, so that its hold says how long such work takes:
// committed, or rolled back by the caller with a live context and no server error; an autocommit operation whose
// connection came back healthy.
func (g *Gate) release(h handle, ok bool) {
	if h.gen == 0 {
		return
	}
	now := g.now()
	g.mu.Lock()
	s := g.slotLocked(h)
	if s == nil {
		g.mu.Unlock()
		return
	}
	back := g.takeBackLocked(h, s, now, ok)
	g.mu.Unlock()
	g.tell(back)
}

// handOn gives a permit back like release, and with it what, to the next in line, if that is one of the same database and
// it is not yet later than until. Else it does nothing and returns false.
func (g *Gate) handOn(h handle, ok bool, m *member, what luggage, until time.Duration) bool {
	g.mu.Lock()
	s := g.slotLocked(h)
	if s == nil || g.waiting == 0 || g.observe {
		g.mu.Unlock()
		return false
	}
	now := g.now()
	var next *waiter
	if now+time.Duration(g.meanHold) <= until { // else it would probably be back too late
		g.running--
		s.b.running--
		next = g.nextLocked(now)
		g.running++
		s.b.running++
	}
	if next == nil || next.m != m {
		g.mu.Unlock()
		return false
	}
	g.with, g.withFor = what, m
	back := g.takeBackLocked(h, s, now, ok)
	left := g.with
	g.with, g.withFor = nil, nil
	g.mu.Unlock()
	if left != nil {
		left.giveBack() // this very hold has made next hopeless
	}
	g.tell(back)
	return true
}

// luggage is what is handed on with a permit.
type luggage interface{ giveBack() }

// relabel tells the gate that an operation has turned out to be of another kind: a connection that does a second thing
// before it is returned is pinned, which cannot be known when it does its first.
func (g *Gate) relabel(h handle, k kind) {
	g.mu.Lock()
	if s := g.slotLocked(h); s != nil {
		s.kind = k
	}
	g.mu.Unlock()
}

// drain marks a permit whose caller is gone while the server is not yet known to be done. It counts as running until it
// is released.
func (g *Gate) drain(h handle) {
	now := g.now()
	g.mu.Lock()
	if s := g.slotLocked(h); s != nil && !s.draining {
		s.unsuccessful(now)
		s.draining = true
		s.b.draining++
		g.draining++
	}
	g.mu.Unlock()
}

// cutOff tells that the deadline of one of the operation's own calls has ended it, which therefore would have taken longer
// than it has. That the deadline it came with has is seen by itself: it is drained, or comes back unsuccessful, after that.
func (g *Gate) cutOff(h handle) {
	now := g.now()
	g.mu.Lock()
	if s := g.slotLocked(h); s != nil {
		s.unsuccessful(now)
		s.cutOff(now)
	}
	g.mu.Unlock()
}

func (s *slot) cutOff(at time.Duration) {
	if s.cut == 0 && s.kind.estimated() {
		s.cut = at
		s.b.estimates[s.kind].addAtLeast(at - s.since)
	}
}

// unsuccessful is told once an operation's work has ended without success.
func (s *slot) unsuccessful(now time.Duration) {
	if s.deadline != 0 && now >= s.deadline {
		s.cutOff(s.deadline)
	}
}

// countUnproven counts a drain that ended without proof.
func (g *Gate) countUnproven() {
	g.mu.Lock()
	g.unproven++
	g.mu.Unlock()
}

// countTerminated counts a backend that had to be terminated.
func (g *Gate) countTerminated() {
	g.mu.Lock()
	g.killed++
	g.mu.Unlock()
}

// contended tells whether the next operation would have to wait. The logical connections ask it (F18).
func (g *Gate) contended() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.observe && (g.waiting > 0 || g.running >= g.limits.Running)
}

// SetLimits changes the limits from now on. Raising them grants to those who wait; lowering them takes nothing away:
// holders finish, waiters stay, and nobody enters until the new limits are met. All three count, zeros included, so start from
// Stats().Limits. A gate does not know the pools behind it: more running than they have connections only moves the waiting to
// gate_pool_wait. The error names the limit that is out of range or a workload that would exceed the gate; then nothing has
// changed. MaxWait counts for calls that come later.
func (g *Gate) SetLimits(l Limits) error {
	if err := l.validate(); err != nil {
		return fmt.Errorf("pgxgated: gate %q: %w", g.name, err)
	}
	now := g.now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, b := range g.budgets[1:] {
		if b.limits.Running > l.Running {
			return fmt.Errorf("pgxgated: gate %q: running %d is less than the %d of workload %q", g.name, l.Running, b.limits.Running, b.name)
		}
	}
	g.limits = l
	g.handOverLocked(now)
	return nil
}

// SetWorkloadLimits does for one workload what SetLimits does for the gate. MaxWait is the gate's and must be 0 or equal
// to it. ErrUnknownWorkload if the gate has no such workload.
func (g *Gate) SetWorkloadLimits(workload string, l Limits) error {
	if err := l.validate(); err != nil {
		return fmt.Errorf("pgxgated: gate %q workload %q: %w", g.name, workload, err)
	}
	now := g.now()
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.named[workload]
	switch {
	case b == nil:
		return fmt.Errorf("pgxgated: gate %q: %w: %q", g.name, ErrUnknownWorkload, workload)
	case l.MaxWait != 0 && l.MaxWait != g.limits.MaxWait:
		return fmt.Errorf("pgxgated: gate %q workload %q: max wait is %v, want 0s or the gate's %v", g.name, workload, l.MaxWait, g.limits.MaxWait)
	case l.Running > g.limits.Running:
		return fmt.Errorf("pgxgated: gate %q workload %q: running is %d, more than the gate's own %d", g.name, workload, l.Running, g.limits.Running)
	}
	b.limits = l
	g.handOverLocked(now)
	return nil
}

// Close ends every wait with ErrClosed and refuses what comes later. Permits that are out stay valid and are counted
// until they are released. It waits for nothing, and is idempotent; the error is always nil.
func (g *Gate) Close() error {
	g.mu.Lock()
	g.closed = true
	for _, b := range g.budgets {
		for w := b.queue.first; w != nil; w = b.queue.first {
			g.wakeLocked(w, shut)
		}
	}
	g.mu.Unlock()
	return nil
}

func (g *Gate) isClosed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// Stats returns a snapshot. It costs some hundred nanoseconds under the gate's lock, and one more per permit that is out.
func (g *Gate) Stats() Stats {
	s, _, _ := g.snapshot()
	return s
}

// snapshot returns the Stats of the gate, and those of the calls without a workload.
func (g *Gate) snapshot() (s, without Stats, closed bool) {
	var oldest trace
	g.mu.Lock()
	now := g.now()
	g.expireLocked(now)
	s = Stats{
		Limits: g.limits, Running: g.running, Waiting: g.waiting, Draining: g.draining,
		Bypassed: g.bypassed, DrainsUnproven: g.unproven, TerminatedBackends: g.killed, WaitTime: time.Duration(g.waitTime.Load()), HoldTime: g.holdTime,
	}
	if g.observe {
		s.WouldReject = map[string]uint64{"admission_full": 0, "wait_timeout": 0, "deadline_short": 0}
	}
	for i, b := range g.budgets {
		bs := b.statsLocked(g.observe, now)
		s.Acquired += bs.Acquired
		s.AdmissionFull += bs.AdmissionFull
		s.WaitTimeout += bs.WaitTimeout
		s.DeadlineShort += bs.DeadlineShort
		s.Canceled += bs.Canceled
		s.Closed += bs.Closed
		if bs.OldestWait > s.OldestWait {
			s.OldestWait, s.OldestWaitWorkload = bs.OldestWait, b.name
		}
		for r, n := range bs.WouldReject {
			s.WouldReject[r] += n
		}
		if i == 0 {
			s.Estimates, s.Worthwhile, without = bs.Estimates, bs.Worthwhile, bs
			continue
		}
		bs.Limits.MaxWait = g.limits.MaxWait
		if s.Workloads == nil {
			s.Workloads = make(map[string]Stats)
		}
		s.Workloads[b.name] = bs
	}
	for i := range g.slots {
		sl := &g.slots[i]
		if sl.gen&1 == 0 {
			continue
		}
		hold := now - sl.since
		if hold > s.OldestHold {
			s.OldestHold, s.OldestHoldWorkload = hold, sl.b.name
			if sl.trace != nil {
				oldest = *sl.trace
			}
		}
		if bs, ok := s.Workloads[sl.b.name]; ok && hold > bs.OldestHold {
			bs.OldestHold = hold
			s.Workloads[sl.b.name] = bs
		}
		if sl.b.name == "" {
			without.OldestHold = max(without.OldestHold, hold)
		}
	}
	if g.leaks != nil {
		s.LeasesOverdue = g.leaks.overdue
	}
	closed = g.closed
	g.mu.Unlock()
	s.OldestHoldSite = oldest.site()
	return s, without, closed
}

func (g *Gate) now() time.Duration { return time.Since(g.epoch) }

func (g *Gate) errClosed() error { return fmt.Errorf("pgxgated: gate %q: %w", g.name, ErrClosed) }

// rejectedLocked makes the error of a refusal, with the numbers of the level that refused: the workload's if it is at its
// limit, else the gate's.
func (g *Gate) rejectedLocked(b *budget, why error, waited, maxWait time.Duration) *RejectedError {
	e := &RejectedError{Gate: g.name, Workload: b.name, Reason: why, Waited: waited}
	own := b.running >= b.limits.Running
	if why == ErrAdmissionFull {
		own = b.fullLocked()
	}
	hold := &g.meanHold
	if own {
		e.Limits, e.Running, e.Waiting, hold = b.limits, b.running, b.waiting, &b.meanHold
	} else {
		e.Limits, e.Running, e.Waiting = g.limits, g.running, g.waiting
	}
	e.Limits.MaxWait = maxWait
	e.meanHold = time.Duration(*hold)
	return e
}

// mean is an exponentially weighted mean of holds.
type mean time.Duration

func (m *mean) add(hold time.Duration) {
	if *m == 0 {
		*m = mean(hold)
		return
	}
	*m += (mean(hold) - *m) / 16
}

// grantLocked takes a slot for an operation that may run.
func (g *Gate) grantLocked(b *budget, k kind, deadline, now time.Duration) handle {
	g.running++
	b.running++
	i := g.free
	if i < 0 {
		i = int32(len(g.slots))
		g.slots = append(g.slots, slot{})
	} else {
		g.free = g.slots[i].next
	}
	s := &g.slots[i]
	s.gen++
	s.kind, s.b, s.since, s.deadline, s.cut, s.draining, s.virtual = k, b, now, deadline, 0, false, virtualNone
	return handle{i, s.gen, now}
}

// slotLocked returns the slot of a permit that is out, or nil (I3).
func (g *Gate) slotLocked(h handle) *slot {
	if h.gen&1 == 0 || int(h.slot) >= len(g.slots) || g.slots[h.slot].gen != h.gen {
		return nil
	}
	return &g.slots[h.slot]
}

// takeBackLocked takes a permit that is out, in slot s, back after its hold, and hands over. What it returns is to be told
// without mu.
func (g *Gate) takeBackLocked(h handle, s *slot, now time.Duration, ok bool) returned {
	back := returned{s.b.index, now - s.since, g.leaks.returnedLocked(s, now)}
	g.holdTime += back.hold
	g.meanHold.add(back.hold)
	if s.b.index > 0 { // the calls without a workload are refused by the gate's limits only
		s.b.meanHold.add(back.hold)
	}
	if !ok {
		s.unsuccessful(now)
	}
	switch {
	case s.cut > 0:
		s.b.estimates[s.kind].overran(now - s.cut)
	case ok && s.kind.estimated():
		s.b.estimates[s.kind].add(back.hold)
	}
	g.freeLocked(h, now)
	return back
}

// returned is what is told of a permit that has come back.
type returned struct {
	workload int
	hold     time.Duration
	report   *leakReport
}

func (g *Gate) tell(r returned) {
	g.sink.Load().Hold(r.workload, r.hold)
	r.report.logReturn()
}

// freeLocked frees the slot of a permit that is out and hands over.
func (g *Gate) freeLocked(h handle, now time.Duration) {
	s := &g.slots[h.slot]
	g.running--
	s.b.running--
	if s.draining {
		s.b.draining--
		g.draining--
	}
	if g.observe {
		g.leaveLocked(h.slot, now)
	}
	s.gen++
	s.next = g.free
	g.free = h.slot
	if g.waiting > 0 || g.observe {
		g.handOverLocked(now)
	}
}

// handOverLocked grants to those in line as long as somebody may run (I2). The first to come among the heads of the
// queues that may run is next (I4). One that can no longer make its deadline is refused here if its timer has not done
// so yet, unless nobody else may run: then nothing is lost by letting it try. One that has too little time left for a
// long line is refused, too.
func (g *Gate) handOverLocked(now time.Duration) {
	if g.observe {
		g.virtualHandOverLocked(now)
		return
	}
	for w := g.nextLocked(now); w != nil; w = g.nextLocked(now) {
		w.h = g.grantLocked(w.b, w.kind, w.deadline, now)
		if g.with != nil && w.m == g.withFor {
			w.with, g.with = g.with, nil
		}
		g.wakeLocked(w, granted)
	}
}

// nextLocked returns who is to be granted a permit, nil if there is none or nobody may have it.
func (g *Gate) nextLocked(now time.Duration) *waiter {
	for g.running < g.limits.Running && g.waiting > 0 {
		var next *waiter
		alone := true
		for _, b := range g.budgets {
			w := b.queue.first
			if w == nil || b.running >= b.limits.Running {
				continue
			}
			alone = alone && next == nil && w.next == nil
			if next == nil || w.seq < next.seq {
				next = w
			}
		}
		if next == nil {
			return nil
		}
		hopeless := next.b.hopelessAt(next.kind, next.deadline)
		if hopeless != 0 && now > hopeless && !alone || g.worthlessLocked(next.b, next.kind, next.deadline, now, next.b.waiting) {
			g.wakeLocked(next, refused)
			continue
		}
		return next
	}
	return nil
}

// worthlessLocked tells that a permit does more good with one of those behind, as so little is left of the deadline of who
// is at the head of b's queue, which is waiting long. Only a queue that is longer than what runs says that work comes faster
// than it is done: in a shorter one whoever fails costs nobody anything.
func (g *Gate) worthlessLocked(b *budget, k kind, deadline, now time.Duration, waiting int) bool {
	if deadline == 0 || waiting <= max(1, min(b.limits.Running, g.limits.Running, b.limits.Waiting/2, g.limits.Waiting/2)) {
		return false
	}
	worth := b.estimates[k].worth()
	return worth != 0 && deadline-now < worth
}

// wakeLocked takes w out of its queue and tells it how its wait ended.
func (g *Gate) wakeLocked(w *waiter, end waitEnd) {
	w.b.queue.remove(w)
	w.b.waiting--
	g.waiting--
	w.end = end
	w.wake <- struct{}{} // never blocks: it is sent once per wait, and taken
}

// waiter is one operation in a queue. One that is used again saves five allocations and a timer a wait, and may not move
// between testing/synctest bubbles, to one of which its channel and its timer belong. So a gate keeps none, as it may
// outlive a bubble; a logical connection does, and having waited in one bubble cannot wait in another.
type waiter struct {
	prev, next *waiter
	b          *budget
	m          *member
	kind       kind
	seq        uint64
	since      time.Duration
	deadline   time.Duration // 0: none
	end        waitEnd       // guarded by the gate's mu until wake was received
	h          handle
	with       luggage       // comes with the grant
	wake       chan struct{} // holds one; sent when end is set
	alarm      alarm
}

type waitEnd uint8

const (
	waiting waitEnd = iota
	granted
	refused // hopeless at the hand-over
	expired
	shut
)

// queue is a list of waiters in order of arrival.
type queue struct{ first, last *waiter }

func (q *queue) push(w *waiter) {
	w.prev = q.last
	if q.last != nil {
		q.last.next = w
	} else {
		q.first = w
	}
	q.last = w
}

func (q *queue) remove(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		q.last = w.prev
	}
	w.prev, w.next = nil, nil
}

// budget is the state of one workload, or of the calls without one (whose limits are then only the gate's).
type budget struct {
	name                       string
	index                      int // in Gate.budgets
	limits                     Limits
	running, waiting, draining int
	queue                      queue
	meanHold                   mean
	estimates                  [kinds]estimator

	acquired                                                    atomic.Uint64 // counted once the context was looked at again, without mu
	acquiredEndless                                             uint64        // at once, by those whose context cannot end: no second look, and a tenth of the cost saved
	admissionFull, waitTimeout, deadlineShort, canceled, closed uint64
	wouldFull, wouldTimeout, wouldShort                         uint64

	virtualRunning, virtualWaiting int
}

// fullLocked tells that the workload has no admission permit left.
func (b *budget) fullLocked() bool {
	return b.waiting >= b.limits.Waiting || b.running+b.waiting >= b.limits.Running+b.limits.Waiting
}

// tooShortLocked counts a call that was refused for its deadline.
func (b *budget) tooShortLocked(k kind, now time.Duration) {
	b.deadlineShort++
	b.estimates[k].refused(now)
}

// hopelessAt is when work of kind k can no longer be done before deadline; 0 if that is not known or there is none.
func (b *budget) hopelessAt(k kind, deadline time.Duration) time.Duration {
	if deadline == 0 {
		return 0
	}
	p10 := b.estimates[k].p10()
	if p10 == 0 {
		return 0
	}
	return max(deadline-p10, 1)
}

func (b *budget) statsLocked(observe bool, now time.Duration) Stats {
	s := Stats{
		Limits: b.limits, Running: b.running, Waiting: b.waiting, Draining: b.draining,
		Acquired: b.acquired.Load() + b.acquiredEndless, AdmissionFull: b.admissionFull, WaitTimeout: b.waitTimeout,
		DeadlineShort: b.deadlineShort, Canceled: b.canceled, Closed: b.closed,
	}
	if b.queue.first != nil {
		s.OldestWait = now - b.queue.first.since
	}
	if observe {
		s.WouldReject = map[string]uint64{"admission_full": b.wouldFull, "wait_timeout": b.wouldTimeout, "deadline_short": b.wouldShort}
	}
	for k := range b.estimates {
		if p10 := b.estimates[k].p10(); p10 != 0 {
			if s.Estimates == nil {
				s.Estimates = make(map[string]time.Duration)
			}
			s.Estimates[kind(k).String()] = p10
		}
		if worth := b.estimates[k].worth(); worth != 0 {
			if s.Worthwhile == nil {
				s.Worthwhile = make(map[string]time.Duration)
			}
			s.Worthwhile[kind(k).String()] = worth
		}
	}
	return s
}

// virtualQueue is what the queue of enforce mode would look like in observe mode. Everybody is let through at once; an
// operation that enforce mode would have made wait is in this queue until enforce mode would have granted it a permit or
// refused it, and one that enforce mode would have refused at once takes no place at all.
type virtualQueue struct {
	running int             // those that enforce mode would have at work
	waiting []virtualWaiter // in order of arrival
}

type virtualWaiter struct {
	slot     int32
	until    time.Duration // when its wait would end without a permit
	short    bool          // by its deadline
	deadline time.Duration // 0: none
}

type virtualState uint8

const (
	virtualNone virtualState = iota // enforce mode, or refused by it
	virtualRunning
	virtualWaiting
)

// observeLocked lets an operation through and notes what enforce mode would have done, at both levels. Observe mode is no
// hot path: it looks at the whole virtual queue each time.
func (g *Gate) observeLocked(b *budget, k kind, deadline time.Duration, c *call, now time.Duration) handle {
	g.expireLocked(now)
	h := g.grantLocked(b, k, deadline, now)
	v, s := &g.virtual, &g.slots[h.slot]
	maxWait := g.limits.MaxWait
	if c.hasMaxWait {
		maxWait = c.maxWait
	}
	hopeless := b.hopelessAt(k, deadline)
	switch {
	case v.running < g.limits.Running && b.virtualRunning < b.limits.Running && b.virtualWaiting == 0:
		g.virtualGrantLocked(s)
	case len(v.waiting) >= g.limits.Waiting || v.running+len(v.waiting) >= g.limits.Running+g.limits.Waiting ||
		b.virtualWaiting >= b.limits.Waiting || b.virtualRunning+b.virtualWaiting >= b.limits.Running+b.limits.Waiting:
		b.wouldFull++
	case hopeless != 0 && now > hopeless || g.worthlessLocked(b, k, deadline, now, b.virtualWaiting):
		b.wouldShort++
	case maxWait <= 0:
		b.wouldTimeout++
	default:
		w := virtualWaiter{slot: h.slot, until: now + maxWait, deadline: deadline}
		if hopeless != 0 && hopeless < w.until {
			w.until, w.short = hopeless, true
		}
		s.virtual = virtualWaiting
		b.virtualWaiting++
		v.waiting = append(v.waiting, w)
	}
	return h
}

func (g *Gate) virtualGrantLocked(s *slot) {
	g.virtual.running++
	s.b.virtualRunning++
	s.virtual = virtualRunning
}

// leaveLocked takes an operation that ended out of the virtual queue.
func (g *Gate) leaveLocked(slot int32, now time.Duration) {
	g.expireLocked(now)
	s := &g.slots[slot]
	switch s.virtual {
	case virtualRunning:
		g.virtual.running--
		s.b.virtualRunning--
	case virtualWaiting:
		s.b.virtualWaiting--
		g.virtual.waiting = slices.DeleteFunc(g.virtual.waiting, func(w virtualWaiter) bool { return w.slot == slot })
	}
	s.virtual = virtualNone
}

// virtualHandOverLocked grants virtually to those that may run.
func (g *Gate) virtualHandOverLocked(now time.Duration) {
	g.expireLocked(now)
	g.virtual.waiting = slices.DeleteFunc(g.virtual.waiting, func(w virtualWaiter) bool {
		s := &g.slots[w.slot]
		if g.virtual.running >= g.limits.Running || s.b.virtualRunning >= s.b.limits.Running {
			return false
		}
		worthless := g.worthlessLocked(s.b, s.kind, w.deadline, now, s.b.virtualWaiting)
		s.b.virtualWaiting--
		if worthless {
			s.b.wouldShort++
			s.virtual = virtualNone
			return true
		}
		g.virtualGrantLocked(s)
		return true
	})
}

// expireLocked counts those whose virtual wait has ended without a permit.
func (g *Gate) expireLocked(now time.Duration) {
	if len(g.virtual.waiting) == 0 {
		return
	}
	g.virtual.waiting = slices.DeleteFunc(g.virtual.waiting, func(w virtualWaiter) bool {
		if now <= w.until {
			return false
		}
		s := &g.slots[w.slot]
		if w.short {
			s.b.wouldShort++
		} else {
			s.b.wouldTimeout++
		}
		s.b.virtualWaiting--
		s.virtual = virtualNone
		return true
	})
}

// estimator keeps how long operations of one workload and kind hold their permit, and says two things of a deadline.
//
// p10, a low quantile. A deadline that is shorter cannot be made by nine out of ten, so the call is refused while that still
// helps it. Tried and rejected, in simulation: the mean of holds plus a predicted wait (refuses up to 3 % that would have
// finished and loses up to 18 % of goodput on mixed work); newest first instead (as good, but starves whoever waits);
// bins an octave wide (cost 12 % of goodput on work of constant length); one estimate for all kinds (refuses every fast
// select beside slow transactions).
//
// worth, for a line that is longer than what runs, where most will not be served whatever is done: whom to serve. First come,
// first served with p10 alone serves those who have waited until they just fail. With three times the load that fits,
// in virtual time, finished of what the permits could do without deadline-aware admission, with p10, and with both:
//
//	holds 13.5 to 16.5 ms, all deadlines 50 ms        1 %, 32 %, 100 %
//	holds 10 to 30 ms, all deadlines 60 ms            2 %, 21 %, 100 %
//	holds 21 to 45 ms, deadlines 0 to 120 ms         61 %, 80 %, 100 %
//	holds 8 to 30 ms, deadlines 20 to 200 ms         91 %, 95 %, 102 %
//
// Below what fits nothing changes. It is not a fixed quantile, as what is good for holds of much the same length is bad for others:
// p90 loses 6 % where a tenth takes 200 ms and the rest 1 ms, and 5 % of exponential holds just above what fits. What an
// operation that fails costs beyond its deadline is measured, as it may be half a second or nothing. Only refusing it when
// one of the next few in line has more time was tried: as good as nothing where all deadlines are the same, as all of those have
// waited long.
//
// Bins are a sixteenth of an octave (about 4 % wide), their counts halve every 512 samples, and there is no estimate
// before 5; up to 10 p10 is the shortest hold seen. Waiting for 16 was tried: where cancelled work keeps its permit for long (a
// statement that takes 0.5 s to stop), a line served without an estimate let hardly anything succeed, so that there never
// were 16: 2 transactions a second instead of 68.
//
// After 64 samples in a row that all lie beyond p10, which in steady work happens to one sample in 8,000, the work has
// become slower and what was known is dropped: by halving alone the estimate would need some 800 samples to rise, six seconds
// of 8 permits held for 60 ms. It falls within 60 samples as it is. A memory of 64 samples would do both, but its quantile
// would rest on six of them.
//
// Work that its deadline cut off counts with the time it had, if that is more than p10: successful holds alone are those of the
// fast. (What was cut off sooner says nothing: it was let in because a permit was free. Before there is an estimate everything is
// let in, so there it is one of the 5: left out, two first successes on connections that were still to be made, 100 ms each, kept
// a line of deadlines of up to 120 ms from ever having an estimate, and it finished 2 transactions a second instead of 120.)
//
// But among 64 in a row beyond p10 it is no example of how long such work takes, only of how little is not enough. There the
// shortest success counts, or the longest that was cut off where nothing succeeded; then it is a guess, which the first success
// replaces. Taking the shortest of all instead was tried: it was always one that had had just more than p10, which so crept
// up by a bin a second while nearly everything was cut off, each time costing a connection that made the next one longer: 30
// to 100 transactions a second for up to 8 s, where the permits could do 190. Such a row raises p10 by half an octave at
// most, as who knows at once what is slow refuses wrongly when it becomes fast again (5, 60, 5 ms: 2.3 % instead of 0.1 %).
// In the beginning, when nothing was successful yet, the longest that was cut off stands for all in the same way.
//
// add moves a cursor by a few bins, p10 reads it; worth looks at all bins once in 16 samples, some 400 ns, and only where a line
// is long. None allocates. Holds below 8 µs count as 8 µs.
type estimator struct {
	bins  [estimatorBins]uint32
	n     uint32 // sum of bins
	seen  uint32 // samples so far, up to estimatorMin
	at    int    // the bin in which the quantile lies
	below uint32 // sum of the bins before it
	above uint32 // how many samples in a row lay beyond that bin
	low   int    // the lowest bin of those that were successful, estimatorBins without any
	high  int    // the highest bin of those that were cut off
	guess bool   // nothing was successful lately: the longest that was cut off stands for all

	overrun  mean          // how long a permit is held on after a deadline has ended the work
	refusing time.Duration // when the first call was refused for its deadline since the last sample, 0: none was
	worthIs  time.Duration // what worth was when it was last worked out, 0 if it was not
	stale    uint32        // samples since then
}

const (
	estimatorBins   = 26 * 16 // 8 µs to 9 min
	estimatorShift  = 13      // the first octave is from 1<<13 ns
	estimatorMin    = 5
	estimatorMax    = 512
	estimatorAbove  = 64
	estimatorStep   = 8 // bins
	estimatorStale  = 16
	estimatorForget = time.Second
	estimatorUnit   = 256 // what a sample counts: halving whole ones would lose those that are alone in their bin, below p10 most of them
)

// add counts a successful operation.
func (e *estimator) add(d time.Duration) {
	if e.guess {
		*e = estimator{seen: e.seen, overrun: e.overrun}
	}
	e.sample(estimatorBin(d), true)
}

func (e *estimator) sample(i int, successful bool) {
	if e.seen < estimatorMin || i <= e.at {
		e.above = 0
	} else {
		if e.above == 0 {
			e.low, e.high = estimatorBins, 0
		}
		if successful {
			e.low = min(e.low, i)
		} else {
			e.high = max(e.high, i)
		}
		if e.above++; e.above == estimatorAbove {
			most := estimatorBins
			if e.high > 0 {
				most = e.at + estimatorStep
			}
			if e.low == estimatorBins {
				e.guessed(min(e.high, most))
				return
			}
			i = min(e.low, most) // stands for them all, until there are more
			*e = estimator{seen: e.seen, at: i, n: (estimatorMin - 1) * estimatorUnit, overrun: e.overrun}
			e.bins[i] = e.n
		}
	}
	e.bins[i] += estimatorUnit
	e.n += estimatorUnit
	e.stale++
	e.refusing = 0
	if e.seen < estimatorMin {
		e.seen++
	}
	if i < e.at {
		e.below += estimatorUnit
	}
	if e.n >= estimatorMax*estimatorUnit {
		e.n, e.below = 0, 0
		for j := range e.bins {
			e.bins[j] /= 2
			e.n += e.bins[j]
			if j < e.at {
				e.below += e.bins[j]
			}
		}
	}
	// The quantile lies in the first bin with which a tenth of the samples is reached.
	for e.below*10 >= e.n && e.at > 0 {
		e.at--
		e.below -= e.bins[e.at]
	}
	for (e.below+e.bins[e.at])*10 < e.n {
		e.below += e.bins[e.at]
		e.at++
	}
}

// addAtLeast counts an operation that its deadline cut off after d: it would have held its permit for longer.
func (e *estimator) addAtLeast(d time.Duration) {
	i := estimatorBin(d)
	switch {
	case e.n == 0 || e.guess:
		e.guessed(max(i, e.at))
	case i > e.at:
		e.sample(i, false)
	case e.seen < estimatorMin:
		e.seen++ // nothing has let it in but that there is no estimate
	}
}

// refused counts a call that was refused for its deadline. Where for a second, and ten times what is estimated, nothing else
// happens, nothing can be learned either, so what is known is forgotten: a permit that is free while nobody waits would
// tell, but other work may keep the line from ever being empty.
func (e *estimator) refused(now time.Duration) {
	switch {
	case e.refusing == 0:
		e.refusing = now
	case now-e.refusing > max(estimatorForget, 10*estimatorEdge(e.at)):
		*e = estimator{overrun: e.overrun}
	}
}

// guessed makes bin i the estimate until there is a success.
func (e *estimator) guessed(i int) {
	*e = estimator{seen: min(e.seen+1, estimatorMin), n: estimatorUnit, at: i, guess: true, overrun: e.overrun}
	e.bins[i] = estimatorUnit
}

// p10 is the lower edge of the quantile's bin, or 0 before there are enough samples.
func (e *estimator) p10() time.Duration {
	if e.seen < estimatorMin {
		return 0
	}
	return estimatorEdge(e.at)
}

// overran counts how long the permit of an operation that its deadline cut off was held on.
func (e *estimator) overran(d time.Duration) {
	e.overrun.add(d)
	e.stale++
}

// worth is the shortest time left of a deadline with which a permit does 95 % of the good that it can: as many operations are
// successful for the time that permits are held. 0 where that is not known.
func (e *estimator) worth() time.Duration {
	if e.seen < estimatorMin || e.guess {
		return 0
	}
	if e.worthIs > 0 && e.stale < estimatorStale {
		return e.worthIs
	}
	var good [estimatorBins]float64
	var best, done, took float64
	for i, c := range e.bins {
		if c == 0 {
			continue
		}
		// With the time of this bin left, those of the bins up to it are successful, and all others are cut off.
		low, high := float64(estimatorEdge(i)), float64(estimatorEdge(i+1))
		done += float64(c)
		took += float64(c) * (low + high) / 2
		good[i] = done / (took + (float64(e.n)-done)*(high+float64(e.overrun)))
		best = max(best, good[i])
	}
	i := slices.IndexFunc(good[:], func(g float64) bool { return g >= 0.95*best })
	e.worthIs, e.stale = estimatorEdge(i+1), 0
	return e.worthIs
}

// estimatorEdge is the lower edge of a bin.
func estimatorEdge(i int) time.Duration {
	return time.Duration(16+i%16) << (i/16 + estimatorShift - 4)
}

func estimatorBin(d time.Duration) int {
	if d < 1<<estimatorShift {
		return 0
	}
	octave := bits.Len64(uint64(d)) - 1
	i := (octave-estimatorShift)*16 + int(d>>(octave-4))&15
	return min(i, estimatorBins-1)
}

// What a call says of itself travels in its context, under one key, so that an operation looks it up once.
type callKey struct{}

type call struct {
	maxWait     time.Duration
	workload    string
	held        *holder // the innermost InTx
	begins      *holder // the InTx whose transaction this BeginTx begins
	hasMaxWait  bool
	hasWorkload bool
	bypass      bool
}

// callIn is what the context says, not to be changed.
func callIn(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return &noCall
}

var noCall call

// callOf is a copy of it, to be changed and put in another context.
func callOf(ctx context.Context) call { return *callIn(ctx) }

func (c call) in(ctx context.Context) context.Context { return context.WithValue(ctx, callKey{}, &c) }

// WithMaxWait sets, for calls with the returned context, the longest wait for a running permit, 24 hours at most. 0, or less,
// means never wait: what finds no running permit free is refused at once, with ErrWaitTimeout where there would have been room to
// wait.
func WithMaxWait(ctx context.Context, d time.Duration) context.Context {
	c := callOf(ctx)
	c.maxWait, c.hasMaxWait = min(max(d, 0), maxMaxWait), true
	return c.in(ctx)
}

// WithWorkload charges calls with the returned context to the named workload of the gate as well. A name that the gate
// does not have, the empty one included, makes the call fail with ErrUnknownWorkload: it never means "ungated".
func WithWorkload(ctx context.Context, name string) context.Context {
	c := callOf(ctx)
	c.workload, c.hasWorkload = name, true
	return c.in(ctx)
}

// Bypass lets calls with the returned context past the gate: they take no permit, are counted in Stats.Bypassed, and go
// straight to the pool. It is for what must run when everything else is refused or would hold a permit for ever: LISTEN, a
// leader's lock, an administrator's query. A connection that is bypassed and then used without Bypass takes a permit
// from then on.
func Bypass(ctx context.Context) context.Context {
	c := callOf(ctx)
	c.bypass = true
	return c.in(ctx)
}

// holder is a running InTx; work with its context on the same gate would wait for itself.
type holder struct {
	gate  *Gate
	outer *holder
	done  atomic.Bool // the transaction has ended: a goroutine that outlives it may start anew
}

func (h *holder) blocks(g *Gate) bool {
	for ; h != nil; h = h.outer {
		if h.gate == g && !h.done.Load() {
			return true
		}
	}
	return false
}
