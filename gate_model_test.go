package pgxgated

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

// The gate is compared with a model that is slow and obvious: one list of calls, searched from the front for everything.
// A script of operations runs on both, in a bubble, and after each operation every call must have ended in the same way
// at the same time, or not yet, with the same numbers in the refusal, and every gauge and counter must be the same.

type operation struct {
	Do       string // acquire, release, cancel, drain, advance, limits, workload, close
	Workload int    // acquire, workload: 0 none, 1 a, 2 b
	Kind     kind
	MaxWait  int // ms; -1 the gate's
	Deadline int // ms from now; -1 none
	Of       int // release, cancel, drain: which of those it could be done to; advance: ms
	OK       bool
	Limits   Limits
}

type script struct {
	Aware  bool
	Limits [3]Limits // the gate's and the workloads'
	Learn  int       // ms of the shortest hold with which the estimates start, 0 none; the others are three times as long
	Do     []operation
}

var workloadNames = [3]string{"", "a", "b"}

func anyLimits(maxRunning int) *rapid.Generator[Limits] {
	return rapid.Custom(func(t *rapid.T) Limits {
		return Limits{rapid.IntRange(1, maxRunning).Draw(t, "running"), rapid.IntRange(0, 4).Draw(t, "waiting"),
			time.Duration(rapid.SampledFrom([]int{20, 0, 5, 60}).Draw(t, "max wait")) * time.Millisecond}
	})
}

var anyOperation = rapid.Custom(func(t *rapid.T) operation {
	do := rapid.SampledFrom([]string{"acquire", "release", "advance", "acquire", "release", "acquire", "cancel", "drain", "limits", "workload", "acquire", "close"}).Draw(t, "do")
	op := operation{Do: do, MaxWait: -1, Deadline: -1}
	switch do {
	case "acquire":
		op.Workload = rapid.IntRange(0, 2).Draw(t, "workload")
		op.Kind = rapid.SampledFrom([]kind{kindTx, kindRead, kindHand}).Draw(t, "kind")
		op.MaxWait = rapid.SampledFrom([]int{-1, 0, 10, 40}).Draw(t, "max wait")
		op.Deadline = rapid.SampledFrom([]int{-1, 3, 12, 30, 0}).Draw(t, "deadline")
	case "release":
		op.OK = rapid.Bool().Draw(t, "ok")
		op.Of = rapid.IntRange(0, 5).Draw(t, "of")
	case "cancel", "drain":
		op.Of = rapid.IntRange(0, 5).Draw(t, "of")
	case "advance":
		op.Of = rapid.IntRange(1, 30).Draw(t, "ms")
	case "limits":
		op.Limits = anyLimits(6).Draw(t, "limits")
	case "workload":
		op.Workload = rapid.IntRange(1, 2).Draw(t, "workload")
		op.Limits = anyLimits(4).Draw(t, "limits")
		op.Limits.MaxWait = 0
	}
	return op
})

var anyScript = rapid.Custom(func(t *rapid.T) script {
	s := script{Aware: rapid.Bool().Draw(t, "aware"), Learn: rapid.SampledFrom([]int{0, 5, 20}).Draw(t, "learn")}
	s.Limits[0] = anyLimits(6).Draw(t, "gate")
	for i := 1; i < 3; i++ {
		s.Limits[i] = anyLimits(s.Limits[0].Running).Draw(t, "workload")
	}
	s.Do = rapid.SliceOfN(anyOperation, 20, 120).Draw(t, "do")
	return s
})

type state string

const (
	isWaiting       state = "waiting"
	isRunning       state = "running"
	isReleased      state = "released"
	isFull          state = "admission full"
	isTimedOut      state = "wait timeout"
	isShort         state = "deadline short"
	isCanceled      state = "canceled"
	isExpired       state = "deadline exceeded"
	isClosed        state = "closed"
	isNotComparable state = "?"
)

// modelCall is one call, in the model and in the gate.
type modelCall struct {
	id        int
	workload  int
	kind      kind
	state     state
	draining  bool
	arrived   time.Duration
	granted   time.Duration
	deadline  time.Duration // when the context ends, -1 never
	endOfWait time.Duration // when MaxWait ends
	hopeless  time.Duration // when the timer for the deadline runs out, -1 never
	waited    time.Duration
	numbers   string // of the refusal

	cancel context.CancelFunc
	real   atomic.Pointer[ending]
}

type model struct {
	script
	calls     []*modelCall // in order of arrival
	estimates [3][kinds]estimator
	now       time.Duration
	closed    bool
}

func (m *model) count(workload int, st state) int {
	n := 0
	for _, c := range m.calls {
		if c.state == st && (workload == 0 || c.workload == workload) {
			n++
		}
	}
	return n
}

// levels are those at which a call counts: the gate's, and its workload's.
func (c *modelCall) levels() []int {
	if c.workload == 0 {
		return []int{0}
	}
	return []int{0, c.workload}
}

func (m *model) mayRun(c *modelCall) bool {
	for _, i := range c.levels() {
		if m.count(i, isRunning) >= m.Limits[i].Running {
			return false
		}
	}
	return true
}

func (m *model) full(i int) bool {
	return m.count(i, isWaiting) >= m.Limits[i].Waiting ||
		m.count(i, isWaiting)+m.count(i, isRunning) >= m.Limits[i].Waiting+m.Limits[i].Running
}

func (m *model) hopelessAt(c *modelCall) time.Duration {
	if p10 := m.estimates[c.workload][c.kind].p10(); m.Aware && c.kind.estimated() && c.deadline >= 0 && p10 > 0 {
		return c.deadline - p10
	}
	return -1
}

// worthless tells that c has too little time left while the line that it is in is a long one.
func (m *model) worthless(c *modelCall) bool {
	line, long := 0, math.MaxInt
	for _, other := range m.calls {
		if other.state == isWaiting && other.workload == c.workload {
			line++
		}
	}
	for _, i := range c.levels() {
		long = min(long, m.Limits[i].Running, m.Limits[i].Waiting/2)
	}
	worth := m.estimates[c.workload][c.kind].worth()
	return m.Aware && c.kind.estimated() && c.deadline >= 0 && line > max(long, 1) && worth != 0 && c.deadline-m.now < worth
}

func (m *model) run(c *modelCall) {
	c.state, c.granted, c.waited = isRunning, m.now, m.now-c.arrived
}

func (m *model) end(c *modelCall, st state, maxWait time.Duration) {
	c.state, c.waited = st, m.now-c.arrived
	if st == isShort {
		m.estimates[c.workload][c.kind].refused(m.now)
	}
	level := 0
	for _, i := range c.levels() {
		if st == isFull && m.full(i) || st != isFull && i > 0 && m.count(i, isRunning) >= m.Limits[i].Running {
			level = i
		}
	}
	l := m.Limits[level]
	l.MaxWait = maxWait
	c.numbers = fmt.Sprint(workloadNames[c.workload], m.count(level, isRunning), m.count(level, isWaiting), l, c.waited)
}

// arrive decides what becomes of a new call.
func (m *model) arrive(c *modelCall, maxWait time.Duration, dead state) {
	c.arrived = m.now
	c.endOfWait, c.hopeless = m.now+maxWait, m.hopelessAt(c)
	switch {
	case dead != "":
		c.state = dead
	case m.closed:
		c.state = isClosed
	case m.mayRun(c):
		m.run(c)
	case slices.ContainsFunc(c.levels(), m.full):
		m.end(c, isFull, maxWait)
	case c.hopeless >= 0 && m.now > c.hopeless, m.worthless(c):
		m.end(c, isShort, maxWait)
	case maxWait <= 0:
		m.end(c, isTimedOut, maxWait)
	default:
		c.state = isWaiting
	}
	m.calls = append(m.calls, c)
}

// settle grants to the first that may run, again and again.
func (m *model) settle() {
	var refused []*modelCall
	for {
		var may []*modelCall
		for _, c := range m.calls {
			if c.state == isWaiting && m.mayRun(c) {
				may = append(may, c)
			}
		}
		if len(may) == 0 {
			break
		}
		if at := m.hopelessAt(may[0]); at >= 0 && m.now > at && len(may) > 1 || m.worthless(may[0]) {
			may[0].state = isShort
			refused = append(refused, may[0])
			continue
		}
		m.run(may[0])
	}
	for _, c := range refused { // their errors show the gate as it is when all is done
		m.end(c, isShort, c.endOfWait-c.arrived)
	}
}

// advance ends the waits that end by themselves, one after the other.
func (m *model) advance(to time.Duration) {
	for {
		var next *modelCall
		var at time.Duration
		var st state
		for _, c := range m.calls {
			if c.state != isWaiting {
				continue
			}
			for _, e := range []struct {
				at time.Duration
				st state
			}{{c.endOfWait, isTimedOut}, {c.hopeless, isShort}, {c.deadline, isExpired}} {
				if e.at >= 0 && e.at <= to && (next == nil || e.at < at) {
					next, at, st = c, e.at, e.st
				}
			}
		}
		if next == nil {
			m.now = to
			return
		}
		m.now = at
		next.state = "ending"
		m.end(next, st, next.endOfWait-next.arrived)
		m.settle()
	}
}

func (m *model) inState(sts ...state) []*modelCall {
	var in []*modelCall
	for _, c := range m.calls {
		if slices.Contains(sts, c.state) {
			in = append(in, c)
		}
	}
	return in
}

func stateOf(e *ending) (st state, numbers string) {
	var r *RejectedError
	errors.As(e.err, &r)
	switch {
	case e.err == nil:
		return isRunning, ""
	case errors.Is(e.err, ErrAdmissionFull):
		st = isFull
	case errors.Is(e.err, ErrWaitTimeout):
		st = isTimedOut
	case errors.Is(e.err, ErrDeadlineShort):
		st = isShort
	case e.err == context.Canceled:
		return isCanceled, ""
	case e.err == context.DeadlineExceeded:
		return isExpired, ""
	case errors.Is(e.err, ErrClosed):
		return isClosed, ""
	default:
		return isNotComparable, ""
	}
	return st, fmt.Sprint(r.Workload, r.Running, r.Waiting, r.Limits, r.Waited)
}

// play runs a script on the gate and on the model, in a bubble, and returns where they differ.
func play(t *testing.T, s script) error {
	g, err := newGate("test", s.Limits[0], gateConfig{mode: Enforce, deadlineAware: s.Aware, workloads: []workload{{"a", s.Limits[1]}, {"b", s.Limits[2]}}})
	if err != nil {
		return err
	}
	m := &model{script: s}
	for i := 1; i < 3; i++ {
		m.Limits[i].MaxWait = s.Limits[0].MaxWait
	}
	learned := uint64(0)
	for i, name := range workloadNames {
		for n := range estimatorMin * min(s.Learn, 1) {
			ctx := context.Background()
			if name != "" {
				ctx = WithWorkload(ctx, name)
			}
			h, err := g.acquire(ctx, kindTx, nil)
			if err != nil {
				return err
			}
			hold := time.Duration(s.Learn) * time.Millisecond
			if n > 0 {
				hold *= 3
			}
			time.Sleep(hold)
			g.release(h, true)
			m.estimates[i][kindTx].add(hold)
			learned++
		}
	}
	m.now = time.Hour // so that 0 is long ago
	start := time.Now().Add(-m.now)
	for i, op := range s.Do {
		if err := step(g, m, op, start); err != nil {
			return fmt.Errorf("operation %d, %+v: %w", i, op, err)
		}
		synctest.Wait()
		if err := compare(g, m, learned); err != nil {
			return fmt.Errorf("after operation %d, %+v: %w", i, op, err)
		}
	}
	for _, c := range m.calls {
		c.cancel()
	}
	synctest.Wait()
	for _, c := range m.inState(isRunning) {
		g.release(c.real.Load().h, false)
	}
	checkIdle(t, g)
	return nil
}

func step(g *Gate, m *model, op operation, start time.Time) error {
	pick := func(sts ...state) *modelCall {
		if in := m.inState(sts...); op.Of < len(in) {
			return in[op.Of]
		}
		return nil
	}
	switch op.Do {
	case "acquire":
		c := &modelCall{id: len(m.calls), workload: op.Workload, kind: op.Kind, deadline: -1}
		// Nanoseconds that are each call's own: no two waits end at the same instant.
		own := time.Duration(c.id+1) * 10
		ctx, dead := context.Background(), state("")
		ctx, c.cancel = context.WithCancel(ctx)
		switch {
		case op.Deadline == 0:
			c.cancel()
			dead = isCanceled
		case op.Deadline > 0:
			c.deadline = m.now + time.Duration(op.Deadline)*time.Millisecond + own + 5
			stop := c.cancel
			var stop2 context.CancelFunc
			ctx, stop2 = context.WithDeadline(ctx, start.Add(c.deadline))
			c.cancel = func() { stop(); stop2() }
		}
		maxWait := m.Limits[0].MaxWait
		if op.MaxWait >= 0 {
			maxWait = time.Duration(op.MaxWait) * time.Millisecond
		}
		if maxWait > 0 {
			maxWait += own
		}
		ctx = WithMaxWait(ctx, maxWait)
		if c.workload > 0 {
			ctx = WithWorkload(ctx, workloadNames[c.workload])
		}
		began := time.Now()
		go func() {
			h, err := g.acquire(ctx, c.kind, nil)
			c.real.Store(&ending{h, err, time.Since(began)})
		}()
		m.arrive(c, maxWait, dead)
	case "release":
		c := pick(isRunning)
		if c == nil {
			return nil
		}
		e := c.real.Load()
		g.release(e.h, op.OK)
		g.release(e.h, op.OK) // I3
		c.state = isReleased
		if op.OK && c.kind.estimated() {
			m.estimates[c.workload][c.kind].add(m.now - c.granted)
		}
		m.settle()
	case "cancel":
		c := pick(isWaiting, isRunning)
		if c == nil {
			return nil
		}
		c.cancel()
		if c.state == isWaiting {
			c.state = isCanceled
			c.waited = m.now - c.arrived
		}
	case "drain":
		if c := pick(isRunning); c != nil {
			g.drain(c.real.Load().h)
			c.draining = true
		}
	case "advance":
		m.advance(m.now + time.Duration(op.Of)*time.Millisecond)
		time.Sleep(time.Until(start.Add(m.now)))
	case "limits":
		err := g.SetLimits(op.Limits)
		if op.Limits.Running < m.Limits[1].Running || op.Limits.Running < m.Limits[2].Running {
			if err == nil {
				return errors.New("the gate got fewer permits than a workload")
			}
			return nil
		}
		if err != nil {
			return err
		}
		m.Limits[0] = op.Limits
		m.settle()
	case "workload":
		err := g.SetWorkloadLimits(workloadNames[op.Workload], op.Limits)
		if op.Limits.Running > m.Limits[0].Running {
			if err == nil {
				return errors.New("a workload got more permits than the gate")
			}
			return nil
		}
		if err != nil {
			return err
		}
		m.Limits[op.Workload] = op.Limits
		m.settle()
	case "close":
		if len(m.calls)%4 != 3 { // few scripts go on with a closed gate
			return nil
		}
		g.Close()
		m.closed = true
		for _, c := range m.inState(isWaiting) {
			c.state, c.waited = isClosed, m.now-c.arrived
		}
	}
	return nil
}

func compare(g *Gate, m *model, learned uint64) error {
	ended := map[state][3]uint64{}
	draining := [3]int{}
	var waitTime time.Duration
	for _, c := range m.calls {
		want, real := c.state, c.real.Load()
		if want == isReleased {
			want = isRunning
		}
		got, numbers := isWaiting, ""
		if real != nil {
			got, numbers = stateOf(real)
			if real.after != c.waited {
				return fmt.Errorf("call %d ended after %v, in the model after %v (%s)", c.id, real.after, c.waited, c.state)
			}
			waitTime += c.waited
		}
		if got != want {
			return fmt.Errorf("call %d is %s, in the model %s", c.id, got, want)
		}
		if numbers != "" && numbers != c.numbers {
			return fmt.Errorf("call %d, %s: numbers %s, in the model %s", c.id, got, numbers, c.numbers)
		}
		for _, i := range c.levels() {
			n := ended[want]
			n[i]++
			ended[want] = n
			if c.draining && c.state == isRunning {
				draining[i]++
			}
		}
	}
	all := g.Stats()
	for i, name := range workloadNames {
		s, more := all, uint64(0)
		if name != "" {
			s = all.Workloads[name]
		}
		if learned > 0 {
			more = learned
			if i > 0 {
				more = estimatorMin
			}
		}
		got := fmt.Sprint(s.Running, s.Waiting, s.Draining, s.Acquired-more, s.AdmissionFull, s.WaitTimeout, s.DeadlineShort, s.Canceled, s.Closed)
		want := fmt.Sprint(m.count(i, isRunning), m.count(i, isWaiting), draining[i], ended[isRunning][i], ended[isFull][i],
			ended[isTimedOut][i], ended[isShort][i], ended[isCanceled][i]+ended[isExpired][i], ended[isClosed][i])
		if got != want {
			return fmt.Errorf("workload %q: running, waiting, draining and counters are %s, in the model %s", name, got, want)
		}
	}
	if all.WaitTime != waitTime {
		return fmt.Errorf("wait time %v, in the model %v", all.WaitTime, waitTime)
	}
	return nil
}

func gateIsAsTheModel(t *testing.T, rt *rapid.T) {
	s := anyScript.Draw(rt, "script")
	var err error
	synctest.Test(t, func(t *testing.T) {
		err = play(t, s)
		if err != nil {
			return // what is left waits for its timers, which the bubble runs out
		}
	})
	if err != nil {
		rt.Fatal(err)
	}
}

func TestGateIsAsTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) { gateIsAsTheModel(t, rt) })
}

// FuzzGate searches for scripts by coverage. Which lines a script covers depends on how goroutines are scheduled, so
// run it with -fuzzminimizetime=10x: minimizing would not end before its minute is over.
func FuzzGate(f *testing.F) {
	f.Add([]byte("seed"))
	f.Fuzz(func(t *testing.T, input []byte) {
		rapid.MakeFuzz(func(rt *rapid.T) { gateIsAsTheModel(t, rt) })(t, input)
	})
}

// TestStress does everything at once for as long as STRESS_DURATION says (1s). What is at work is counted by the callers
// themselves and compared with the limits of the moment (I1), while those change.
func TestStress(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	length := time.Second
	if s := os.Getenv("STRESS_DURATION"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatalf("STRESS_DURATION: %v", err)
		}
	}
	const small, large, waiting, callers = 3, 6, 12, 32
	limits := func(running int) Limits { return Limits{running, waiting, 2 * time.Millisecond} }
	g, err := newGate("test", limits(large), gateConfig{mode: Enforce, deadlineAware: true,
		workloads: []workload{{"a", Limits{Running: 2, Waiting: 6}}, {"b", Limits{Running: 3, Waiting: 2}}}})
	if err != nil {
		t.Fatal(err)
	}
	stop := time.Now().Add(length)

	// bound is what may be at work now, in its low bits, and how often it has changed.
	var bound, work, workA, workB, calls, over atomic.Int64
	bound.Store(large)
	atWork := func(n *atomic.Int64, most func() int64) {
		before := most()
		now := n.Add(1)
		if after := most(); before == after && now > before&0xffff {
			over.Add(1)
			t.Errorf("I1: %d at work, %d may be", now, before&0xffff)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { // the limits change
		for i := int64(1); time.Now().Before(stop); i++ {
			bound.Store(i<<16 | large)
			if err := g.SetLimits(limits(large)); err != nil {
				t.Error(err)
			}
			time.Sleep(3 * time.Millisecond)
			if err := g.SetLimits(limits(small)); err != nil {
				t.Error(err)
			}
			for g.Stats().Running > small { // holders finish
				time.Sleep(50 * time.Microsecond)
			}
			i++
			bound.Store(i<<16 | small)
			time.Sleep(3 * time.Millisecond)
			if s := g.Stats(); s.Waiting > waiting || s.Running > small || s.Workloads["b"].Waiting > 2 {
				t.Errorf("I1: %+v", s)
			}
			checkLevels(t, g)
		}
	})
	for i := range callers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			for time.Now().Before(stop) {
				ctx, cancel := context.WithCancel(context.Background())
				switch rnd.IntN(6) {
				case 0:
					ctx, cancel = context.WithTimeout(context.Background(), time.Duration(rnd.IntN(2000))*time.Microsecond)
				case 1:
					time.AfterFunc(time.Duration(rnd.IntN(500))*time.Microsecond, cancel)
				case 2:
					if rnd.IntN(10) == 0 {
						cancel()
					}
				}
				if rnd.IntN(3) == 0 {
					ctx = WithMaxWait(ctx, time.Duration(rnd.IntN(1000))*time.Microsecond)
				}
				var own *atomic.Int64
				most := func() int64 { return 2 }
				switch rnd.IntN(4) {
				case 0:
					ctx, own = WithWorkload(ctx, "a"), &workA
				case 1:
					ctx, own, most = WithWorkload(ctx, "b"), &workB, func() int64 { return 3 }
				}
				calls.Add(1)
				h, err := g.acquire(ctx, []kind{kindHand, kindTx, kindRead}[rnd.IntN(3)], nil)
				if err == nil {
					atWork(&work, bound.Load)
					if own != nil {
						atWork(own, most)
					}
					if n := rnd.IntN(8); n < 4 {
						time.Sleep(time.Duration(n*50) * time.Microsecond)
					}
					if rnd.IntN(8) == 0 {
						g.drain(h)
					}
					if own != nil {
						own.Add(-1)
					}
					work.Add(-1)
					g.release(h, rnd.IntN(4) != 0)
					if rnd.IntN(4) == 0 {
						g.release(h, true)
					}
				} else if !errors.Is(err, ErrRejected) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				} else {
					time.Sleep(time.Duration(rnd.IntN(200)) * time.Microsecond) // else who is refused keeps the others from their work
				}
				cancel()
			}
		})
	}
	wg.Wait()
	checkIdle(t, g)
	s := g.Stats()
	if n := s.Acquired + s.AdmissionFull + s.WaitTimeout + s.DeadlineShort + s.Canceled + s.Closed + s.Bypassed; n != uint64(calls.Load()) {
		t.Errorf("%d calls, %d counted: %+v", calls.Load(), n, s)
	}
	if s.Acquired == 0 || s.AdmissionFull == 0 || s.WaitTimeout == 0 || s.Canceled == 0 {
		t.Errorf("the stress was none: %+v", s)
	}
	t.Logf("%d calls: acquired %d, full %d, timeout %d, short %d, canceled %d; %d over the limit",
		calls.Load(), s.Acquired, s.AdmissionFull, s.WaitTimeout, s.DeadlineShort, s.Canceled, over.Load())
}
