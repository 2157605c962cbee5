// Package telemetry is the seam between the gate and package metrics: what the former measures and only the latter turns
// into series, so that nobody links a metrics library who does not want one.
package telemetry

import (
	"sync/atomic"
	"time"
)

// Recorder holds the measurements of one gate. They are made on hot paths: a few atomic additions each, no lock, no
// allocation. Methods on a nil Recorder do nothing, which is the state of a gate without metrics.
type Recorder struct {
	workloads    []byWorkload // [0] is for calls without one
	sql          [ops]Histogram
	errors       [classes]atomic.Uint64
	transactions [outcomes]atomic.Uint64
	poolErrors   [poolErrors]atomic.Uint64
}

type byWorkload struct{ gateWait, poolWait, hold Histogram }

// NewRecorder returns a recorder for a gate with so many workloads, the calls without one included.
func NewRecorder(workloads int) *Recorder {
	return &Recorder{workloads: make([]byWorkload, workloads)}
}

// GateWait notes how long an admitted call waited for its running permit, whether it got one or not.
func (r *Recorder) GateWait(workload int, d time.Duration) {
	if r != nil {
		r.workloads[workload].gateWait.Observe(d)
	}
}

// PoolWait notes how long an operation waited for a physical connection, whether it got one or not.
func (r *Recorder) PoolWait(workload int, d time.Duration) {
	if r != nil {
		r.workloads[workload].poolWait.Observe(d)
	}
}

// PoolError counts an operation that got no physical connection.
func (r *Recorder) PoolError(e PoolError) {
	if r != nil {
		r.poolErrors[e].Add(1)
	}
}

// Hold notes how long a running permit was out.
func (r *Recorder) Hold(workload int, d time.Duration) {
	if r != nil {
		r.workloads[workload].hold.Observe(d)
	}
}

// SQL notes how long the server took to answer, and with what class of error.
func (r *Recorder) SQL(op Op, d time.Duration, class Class) {
	if r == nil {
		return
	}
	r.sql[op].Observe(d)
	if class != ClassNone {
		r.errors[class].Add(1)
	}
}

// Transaction counts a transaction that has ended.
func (r *Recorder) Transaction(o Outcome) {
	if r != nil {
		r.transactions[o].Add(1)
	}
}

// What follows is for the reader.

func (r *Recorder) GateWaits(workload int) *Histogram { return &r.workloads[workload].gateWait }
func (r *Recorder) PoolWaits(workload int) *Histogram { return &r.workloads[workload].poolWait }
func (r *Recorder) Holds(workload int) *Histogram     { return &r.workloads[workload].hold }
func (r *Recorder) SQLs(op Op) *Histogram             { return &r.sql[op] }
func (r *Recorder) Errors(c Class) uint64             { return r.errors[c].Load() }
func (r *Recorder) Transactions(o Outcome) uint64     { return r.transactions[o].Load() }
func (r *Recorder) PoolErrors(e PoolError) uint64     { return r.poolErrors[e].Load() }

// Op is what the server was asked.
type Op uint8

const (
	OpBegin Op = iota
	OpPrepare
	OpExec
	OpQuery
	OpCommit
	OpRollback
	ops
)

// Ops are the names of the ops, in order.
var Ops = [ops]string{"begin", "prepare", "exec", "query", "commit", "rollback"}

// Class is what an error of the server's was.
type Class uint8

const (
	ClassCanceled      Class = iota // 57014
	ClassLockTimeout                // 55P03
	ClassSerialization              // 40001
	ClassDeadlock                   // 40P01
	ClassConnections                // 53300
	ClassOther
	ClassNoAnswer // the connection was lost, or the caller's context cut the call off
	classes
	ClassNone // no error
)

// Classes are the names of the classes, in order.
var Classes = [classes]string{"57014", "55P03", "40001", "40P01", "53300", "other", "no_answer"}

// Outcome is how a transaction ended.
type Outcome uint8

const (
	Committed Outcome = iota
	RolledBack
	Unknown
	outcomes
)

// Outcomes are the names of the outcomes, in order.
var Outcomes = [outcomes]string{"committed", "rolled_back", "unknown"}

// PoolError is why an operation got no physical connection.
type PoolError uint8

const (
	PoolTimeout  PoolError = iota // none within gate_pool_wait
	PoolCanceled                  // the caller's context ended the wait
	PoolFailed                    // connecting failed, or a hook did
	poolErrors
)

// PoolErrorNames are the names of the pool errors, in order.
var PoolErrorNames = [poolErrors]string{"timeout", "canceled", "failed"}

// Pool is what the pools behind a gate say of themselves, added up. A *sql.DB does not count Acquires, AcquireTime,
// CanceledAcquires, Constructing and NewConnections.
type Pool struct {
	Max, Acquired, Idle, Constructing                         int // connections; Max is 0 for a *sql.DB without a bound
	Acquires, EmptyAcquires, CanceledAcquires, NewConnections uint64
	LifetimeDestroys, IdleDestroys                            uint64
	AcquireTime, EmptyAcquireTime                             time.Duration
}

// Add adds what another pool says.
func (p *Pool) Add(o Pool) {
	p.Max += o.Max
	p.Acquired += o.Acquired
	p.Idle += o.Idle
	p.Constructing += o.Constructing
	p.Acquires += o.Acquires
	p.EmptyAcquires += o.EmptyAcquires
	p.CanceledAcquires += o.CanceledAcquires
	p.NewConnections += o.NewConnections
	p.LifetimeDestroys += o.LifetimeDestroys
	p.IdleDestroys += o.IdleDestroys
	p.AcquireTime += o.AcquireTime
	p.EmptyAcquireTime += o.EmptyAcquireTime
}

// Locks is what pg_stat_activity said of the backends behind a gate.
type Locks struct {
	Known   bool // it could be asked, for all of them
	Waiting int  // that were waiting for a lock
	// WaitTime is an estimate that only ever grows: each time, those that wait times the time since the last look.
	WaitTime time.Duration
}

// What package metrics may ask of a gate, which is a *pgxgated.Gate. Set by pgxgated. Safe for concurrent use.
var (
	// Attach returns the gate's recorder, and gives it one if it has none. From then on the gate records.
	Attach func(gate any) *Recorder

	// Snapshot returns two pgxgated.Stats, of the gate and of the calls without a workload, taken at one instant; and whether
	// the gate is closed.
	Snapshot func(gate any) (whole, without any, closed bool)

	// Workloads returns the names of the workloads in the recorder's order; the first is "".
	Workloads func(gate any) []string

	// Pools asks the pools behind the gate. It waits for nothing.
	Pools func(gate any) Pool

	// LockWaits samples pg_stat_activity, at most once a second for each pool, over a connection of its own. It waits for the
	// answer, a second at most.
	LockWaits func(gate any) Locks
)
