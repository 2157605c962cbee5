package pgxgated

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// newTestGate makes a gate and checks, when the test ends, that everything came back (I7).
func newTestGate(t testing.TB, l Limits, opts ...GateOption) *Gate {
	t.Helper()
	g, err := NewGate("test", l, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { checkIdle(t, g) })
	return g
}

// newWorkloadGate makes a gate with workloads.
func newWorkloadGate(t testing.TB, l Limits, ws ...workload) *Gate {
	t.Helper()
	g, err := newGate("test", l, gateConfig{mode: Enforce, deadlineAware: true, workloads: ws})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { checkIdle(t, g) })
	return g
}

func checkIdle(t testing.TB, g *Gate) {
	t.Helper()
	if s := g.Stats(); s.Running != 0 || s.Waiting != 0 || s.Draining != 0 || s.OldestHold != 0 || s.OldestWait != 0 {
		t.Errorf("not idle: %+v", s)
	}
	checkLevels(t, g)
}

// checkLevels checks what must hold of the gate's own books at every instant, and I2.
func checkLevels(t testing.TB, g *Gate) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	running, waiting, draining, out := 0, 0, 0, 0
	for _, b := range g.budgets {
		queued := 0
		for w := b.queue.first; w != nil; w = w.next {
			queued++
		}
		if queued != b.waiting {
			t.Errorf("workload %q: %d in the queue, %d counted", b.name, queued, b.waiting)
		}
		if queued > 0 && g.running < g.limits.Running && b.running < b.limits.Running {
			t.Errorf("I2: workload %q: a running permit is free and %d wait", b.name, queued)
		}
		running, waiting, draining = running+b.running, waiting+b.waiting, draining+b.draining
	}
	for i := range g.slots {
		if g.slots[i].gen&1 == 1 {
			out++
		}
	}
	if running != g.running || waiting != g.waiting || draining != g.draining || out != g.running {
		t.Errorf("levels differ: running %d, %d by workload, %d out; waiting %d, %d; draining %d, %d",
			g.running, running, out, g.waiting, waiting, g.draining, draining)
	}
}

func mustAcquire(t testing.TB, g *Gate, ctx context.Context) *Permit {
	t.Helper()
	p, err := g.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// attempt is an acquisition that may wait. In a bubble, after synctest.Wait, it has either ended or is waiting.
type attempt struct {
	g     *Gate
	ended atomic.Pointer[ending]
}

type ending struct {
	h     handle
	err   error
	after time.Duration
}

func try(g *Gate, ctx context.Context, k kind) *attempt {
	a := &attempt{g: g}
	start := time.Now()
	go func() {
		h, err := g.acquire(ctx, k, nil)
		a.ended.Store(&ending{h, err, time.Since(start)})
	}()
	synctest.Wait()
	return a
}

func (a *attempt) end() ending {
	synctest.Wait()
	if e := a.ended.Load(); e != nil {
		return *e
	}
	return ending{err: errWaiting}
}

var errWaiting = errors.New("still waiting")

func (a *attempt) release() {
	a.g.release(a.end().h, false)
	synctest.Wait()
}

func (a *attempt) mustWait(t *testing.T) {
	t.Helper()
	if e := a.end(); e.err != errWaiting {
		t.Fatalf("does not wait: %v", e.err)
	}
}

func (a *attempt) mustRun(t *testing.T) {
	t.Helper()
	if e := a.end(); e.err != nil {
		t.Fatalf("does not run: %v", e.err)
	}
}

func (a *attempt) mustFail(t *testing.T, want error, after time.Duration) {
	t.Helper()
	if e := a.end(); !errors.Is(e.err, want) || e.after != after {
		t.Fatalf("after %v: %v, want %v after %v", e.after, e.err, want, after)
	}
}

// mustRefuse checks a refusal and the numbers in it.
func mustRefuse(t *testing.T, err, why error, workload string, running, waiting int, l Limits) *RejectedError {
	t.Helper()
	var e *RejectedError
	if !errors.As(err, &e) || !errors.Is(err, why) || !errors.Is(err, ErrRejected) {
		t.Fatalf("got %v, want %v", err, why)
	}
	for _, other := range []error{ErrAdmissionFull, ErrWaitTimeout, ErrDeadlineShort, context.Canceled, context.DeadlineExceeded, driver.ErrBadConn, ErrClosed} {
		if other != why && errors.Is(err, other) {
			t.Errorf("%v matches %v too", err, other)
		}
	}
	if e.Gate != "test" || e.Workload != workload || e.Running != running || e.Waiting != waiting || e.Limits != l {
		t.Errorf("got %+v, want workload %q, running %d, waiting %d, limits %v", *e, workload, running, waiting, l)
	}
	return e
}

// learn gives the gate an estimate for a kind: so many holds of one length.
func learn(t *testing.T, g *Gate, ctx context.Context, k kind, hold time.Duration) time.Duration {
	t.Helper()
	for range estimatorMin {
		h, err := g.acquire(ctx, k, nil)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(hold)
		g.release(h, true)
	}
	s := g.Stats()
	if name := callOf(ctx).workload; name != "" {
		s = s.Workloads[name]
	}
	p10 := s.Estimates[k.String()]
	if p10 > hold || p10 < hold*95/100 {
		t.Fatalf("estimate %v after holds of %v", p10, hold)
	}
	return p10
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestGrantsInOrderOfArrival(t *testing.T) { // I4
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Second})
		holder := try(g, context.Background(), kindHand)
		holder.mustRun(t)
		var as []*attempt
		for range 5 {
			as = append(as, try(g, context.Background(), kindHand))
			time.Sleep(time.Millisecond)
		}
		full := try(g, context.Background(), kindHand)
		full.mustFail(t, ErrAdmissionFull, 0)
		mustRefuse(t, full.end().err, ErrAdmissionFull, "", 1, 5, g.limits)
		if s := g.Stats(); s.OldestWait != 5*time.Millisecond || s.OldestHold != 5*time.Millisecond {
			t.Errorf("oldest wait %v, oldest hold %v, want 5ms", s.OldestWait, s.OldestHold)
		}
		holder.release()
		for i, a := range as {
			a.mustRun(t)
			if i+1 < len(as) {
				as[i+1].mustWait(t)
			}
			a.release()
		}
	})
}

func TestWaitEndsAtMaxWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Running: 1, Waiting: 3, MaxWait: 100 * time.Millisecond}
		g := newTestGate(t, l)
		p := mustAcquire(t, g, context.Background())
		usual := try(g, context.Background(), kindHand)
		short := try(g, WithMaxWait(context.Background(), 30*time.Millisecond), kindHand)
		long := try(g, WithMaxWait(context.Background(), 300*time.Millisecond), kindHand)
		time.Sleep(time.Second)
		short.mustFail(t, ErrWaitTimeout, 30*time.Millisecond)
		usual.mustFail(t, ErrWaitTimeout, 100*time.Millisecond)
		long.mustFail(t, ErrWaitTimeout, 300*time.Millisecond)
		e := mustRefuse(t, usual.end().err, ErrWaitTimeout, "", 1, 1, l)
		if e.Waited != 100*time.Millisecond {
			t.Errorf("waited %v", e.Waited)
		}
		mustRefuse(t, short.end().err, ErrWaitTimeout, "", 1, 2, Limits{1, 3, 30 * time.Millisecond})
		p.Release()
		if s := g.Stats(); s.WaitTimeout != 3 || s.Acquired != 1 || s.WaitTime != 430*time.Millisecond || s.HoldTime != time.Second {
			t.Errorf("%+v", s)
		}
	})
}

func TestMaxWaitZeroNeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Running: 1, Waiting: 3}
		g := newTestGate(t, l)
		p := mustAcquire(t, g, context.Background())
		a := try(g, context.Background(), kindHand)
		a.mustFail(t, ErrWaitTimeout, 0)
		mustRefuse(t, a.end().err, ErrWaitTimeout, "", 1, 0, l)
		try(g, WithMaxWait(context.Background(), -time.Second), kindHand).mustFail(t, ErrWaitTimeout, 0)
		// One call may wait although the others may not, and be it for ever.
		b := try(g, WithMaxWait(context.Background(), time.Second), kindHand)
		c := try(g, WithMaxWait(context.Background(), math.MaxInt64), kindHand)
		b.mustWait(t)
		c.mustWait(t)
		p.Release()
		b.mustRun(t)
		b.release()
		c.mustRun(t)
		c.release()
	})
}

func TestA02AbandonedWaitersAreNotGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 100, MaxWait: time.Minute})
		p := mustAcquire(t, g, context.Background())
		for i := range 100 {
			a := try(g, within(t, 10*time.Millisecond+time.Duration(i)*400*time.Microsecond), kindHand)
			a.mustWait(t)
		}
		time.Sleep(60 * time.Millisecond)
		if s := g.Stats(); s.Waiting != 0 || s.Canceled != 100 {
			t.Fatalf("waiting %d, canceled %d, want 0 and 100", s.Waiting, s.Canceled)
		}
		p.Release()
		next := try(g, context.Background(), kindHand)
		next.mustRun(t)
		if next.end().after != 0 {
			t.Errorf("waited %v", next.end().after)
		}
		next.release()
	})
}

func TestA02DeadHeadDoesNotBlock(t *testing.T) { // I4
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 2, MaxWait: time.Minute})
		p := mustAcquire(t, g, context.Background())
		ctx, cancel := context.WithCancel(context.Background())
		head := try(g, ctx, kindHand)
		second := try(g, context.Background(), kindHand)
		time.Sleep(time.Millisecond)
		cancel()
		head.mustFail(t, context.Canceled, time.Millisecond)
		second.mustWait(t)
		p.Release()
		second.mustRun(t)
		second.release()
	})
}

func TestA02DeadContextTakesNothing(t *testing.T) { // I5
	g := newTestGate(t, Limits{Running: 1, Waiting: 1, MaxWait: time.Minute})
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	expired, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	for ctx, want := range map[context.Context]error{canceled: context.Canceled, expired: context.DeadlineExceeded} {
		if _, err := g.Acquire(ctx); err != want {
			t.Errorf("free permit: %v, want %v itself", err, want)
		}
		p := mustAcquire(t, g, context.Background())
		if _, err := g.Acquire(ctx); err != want {
			t.Errorf("no permit free: %v, want %v itself", err, want)
		}
		if _, err := g.Acquire(Bypass(ctx)); err != want {
			t.Errorf("bypass: %v, want %v itself", err, want)
		}
		p.Release()
	}
	if s := g.Stats(); s.Canceled != 6 || s.Acquired != 2 || s.Bypassed != 0 {
		t.Errorf("%+v", s)
	}
}

// scripted is a context that is cancelled, and then runs a script, right after its nth Err said that it is alive.
type scripted struct {
	context.Context
	left int
	then func()
}

func (c *scripted) Err() error {
	err := c.Context.Err()
	if c.left--; c.left == 0 {
		c.then()
	}
	return err
}

func TestContextDoneBeforeTheGrantGetsNoPermit(t *testing.T) { // I5
	for _, waits := range []bool{false, true} {
		t.Run(fmt.Sprintf("waits=%v", waits), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newTestGate(t, Limits{Running: 1, Waiting: 1, MaxWait: 10 * time.Millisecond})
				p := mustAcquire(t, g, context.Background())
				parent, cancel := context.WithCancel(context.Background())
				ctx := &scripted{Context: parent, left: 1}
				if waits {
					ctx.left = 2 // when MaxWait has just ended
				}
				ctx.then = func() { cancel(); p.Release() }
				a := try(g, ctx, kindHand)
				time.Sleep(20 * time.Millisecond)
				if a.end().err == nil {
					t.Error("was cancelled before the permit was free, and got it")
					a.release()
				}
				b := try(g, context.Background(), kindHand)
				b.mustRun(t)
				b.release()
				if s := g.Stats(); s.Acquired != 2 || s.Acquired+s.Canceled+s.WaitTimeout != 3 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// A grant and the end of the wait come one right after the other, in either order, before the waiter may have run.
func TestGrantThatRacesIsHandedOn(t *testing.T) { // I5
	cancelled := 0
	for range 300 {
		synctest.Test(t, func(t *testing.T) {
			g := newTestGate(t, Limits{Running: 1, Waiting: 2, MaxWait: time.Minute})
			for _, cancelFirst := range []bool{true, false} {
				for _, how := range []string{"context", "closed", "timer"} {
					p := mustAcquire(t, g, context.Background())
					ctx, cancel := context.WithCancel(context.Background())
					m := &member{}
					var err error
					var h handle
					done := make(chan struct{})
					call := ctx
					if how == "timer" {
						call = WithMaxWait(ctx, time.Millisecond)
					}
					go func() { h, err = g.acquire(call, kindTx, m); close(done) }()
					synctest.Wait()
					second := try(g, context.Background(), kindHand)
					end := func() {
						switch how {
						case "context":
							cancel()
						case "closed":
							g.closeMember(m)
						case "timer":
							time.Sleep(time.Millisecond)
						}
					}
					if cancelFirst {
						end()
						p.Release()
					} else {
						p.Release()
						end()
					}
					<-done
					switch {
					case err == nil:
						if cancelFirst && how == "context" {
							t.Error("was cancelled before the grant and got the permit")
						}
						second.mustWait(t)
						g.release(h, true)
					case how == "context" && errors.Is(err, context.Canceled), how == "closed" && errors.Is(err, ErrClosed), how == "timer" && errors.Is(err, ErrWaitTimeout):
						cancelled++
					default:
						t.Errorf("%s: %v", how, err)
					}
					second.mustRun(t)
					second.release()
					cancel()
				}
			}
			s := g.Stats()
			if n := s.Acquired + s.Canceled + s.Closed + s.WaitTimeout; n != 18 {
				t.Errorf("%d calls counted, want 18: %+v", n, s)
			}
		})
	}
	if cancelled == 0 {
		t.Error("no wait ever ended by its cancellation")
	}
}

func TestA03SecondReleaseDoesNothing(t *testing.T) { // I3
	const limit = 3
	g := newTestGate(t, Limits{Running: limit, Waiting: 50, MaxWait: time.Minute})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 100 {
				p, err := g.Acquire(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				var twice sync.WaitGroup
				twice.Go(p.Release)
				p.Release()
				twice.Wait()
				g.drain(p.h) // and nothing else works on a permit that is back
				g.relabel(p.h, kindPinned)
			}
		})
	}
	wg.Wait()
	var ps []*Permit
	for range limit {
		ps = append(ps, mustAcquire(t, g, context.Background()))
	}
	if _, err := g.Acquire(WithMaxWait(context.Background(), 0)); !errors.Is(err, ErrWaitTimeout) {
		t.Errorf("one more than the limit: %v", err)
	}
	stale := ps[0].h
	ps[0].Release()
	again := mustAcquire(t, g, context.Background())
	if again.h.slot != stale.slot || again.h.gen == stale.gen {
		t.Errorf("the place of %v is used again as %v", stale, again.h)
	}
	ps[0].Release()
	if s := g.Stats(); s.Running != limit || s.Draining != 0 {
		t.Errorf("running %d, draining %d after a second release, want %d and 0", s.Running, s.Draining, limit)
	}
	again.Release()
	ps[1].Release()
	ps[2].Release()
}

func TestDrainingCountsAsRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 1, MaxWait: time.Minute})
		a := try(g, context.Background(), kindTx)
		g.drain(a.end().h)
		g.drain(a.end().h)
		b := try(g, context.Background(), kindTx)
		b.mustWait(t)
		if s := g.Stats(); s.Running != 1 || s.Draining != 1 || !g.contended() {
			t.Errorf("%+v", s)
		}
		a.release()
		b.mustRun(t)
		if s := g.Stats(); s.Running != 1 || s.Draining != 0 {
			t.Errorf("%+v", s)
		}
		b.release()
	})
}

func TestSetLimits(t *testing.T) { // I1, I2
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 3, Waiting: 3, MaxWait: time.Minute})
		var run, wait []*attempt
		for range 3 {
			run = append(run, try(g, context.Background(), kindHand))
		}
		for range 3 {
			wait = append(wait, try(g, context.Background(), kindHand))
		}
		set := func(running, waiting int) {
			if err := g.SetLimits(Limits{running, waiting, time.Minute}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			checkLevels(t, g)
		}
		set(1, 1)
		for i, a := range run { // 3 at work and one may be: holders finish, nobody enters until it fits
			try(g, context.Background(), kindHand).mustFail(t, ErrAdmissionFull, 0)
			wait[0].mustWait(t)
			a.release()
			if i < 2 {
				wait[0].mustWait(t)
			}
		}
		wait[0].mustRun(t)
		wait[1].mustWait(t)
		try(g, context.Background(), kindHand).mustFail(t, ErrAdmissionFull, 0)
		set(2, 0)
		wait[1].mustRun(t)
		wait[2].mustWait(t) // was admitted, so it stays
		try(g, context.Background(), kindHand).mustFail(t, ErrAdmissionFull, 0)
		set(4, 1)
		wait[2].mustRun(t)
		last := try(g, context.Background(), kindHand)
		last.mustRun(t)
		for _, a := range append(wait, last) {
			a.release()
		}
		// With more at work than may be, those count against the admission permits too.
		run = nil
		for range 4 {
			run = append(run, try(g, context.Background(), kindHand))
		}
		set(1, 3)
		try(g, context.Background(), kindHand).mustFail(t, ErrAdmissionFull, 0)
		run[0].release()
		next := try(g, context.Background(), kindHand)
		next.mustWait(t)
		try(g, context.Background(), kindHand).mustFail(t, ErrAdmissionFull, 0)
		for _, a := range append(run[1:], next) {
			a.release()
		}
		set(4, 1)
		for _, l := range []Limits{{0, 1, 0}, {1, -1, 0}, {1, 1, -1}, {maxPermits + 1, 1, 0}, {1, maxPermits + 1, 0}, {1, 1, maxMaxWait + 1}} {
			if err := g.SetLimits(l); err == nil || g.Stats().Limits != (Limits{4, 1, time.Minute}) {
				t.Errorf("limits %v: %v, now %v", l, err, g.Stats().Limits)
			}
			if _, err := NewGate("bad", l); err == nil {
				t.Errorf("a gate with limits %v", l)
			}
		}
	})
}

func TestCloseEndsEveryWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Minute})
		p := mustAcquire(t, g, context.Background())
		var as []*attempt
		for range 5 {
			as = append(as, try(g, context.Background(), kindHand))
		}
		time.Sleep(time.Millisecond)
		g.Close()
		for _, a := range as {
			a.mustFail(t, ErrClosed, time.Millisecond)
			if errors.Is(a.end().err, ErrRejected) {
				t.Errorf("%v is a refusal", a.end().err)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		try(g, context.Background(), kindHand).mustFail(t, ErrClosed, 0)
		if s := g.Stats(); s.Running != 1 || s.Waiting != 0 || s.Closed != 6 {
			t.Errorf("%+v", s)
		}
		p.Release()
		try(g, context.Background(), kindHand).mustFail(t, ErrClosed, 0)
	})
}

func TestWaitEndsWhenTheDatabaseIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Minute})
		p := mustAcquire(t, g, context.Background())
		m := &member{}
		other := try(g, context.Background(), kindTx)
		done := make(chan error)
		go func() { _, err := g.acquire(context.Background(), kindTx, m); done <- err }()
		synctest.Wait()
		g.closeMember(m)
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		other.mustWait(t) // another database of the same gate
		p.Release()
		other.mustRun(t)
		other.release()
	})
}

func TestBypassTakesNoPermit(t *testing.T) {
	g := newTestGate(t, Limits{Running: 1})
	p := mustAcquire(t, g, context.Background())
	q := mustAcquire(t, g, Bypass(context.Background()))
	if s := g.Stats(); s.Running != 1 || s.Bypassed != 1 || s.Acquired != 1 {
		t.Errorf("%+v", s)
	}
	q.Release()
	if s := g.Stats(); s.Running != 1 {
		t.Errorf("the release of a bypass gave a permit back: %+v", s)
	}
	p.Release()
}

func TestWaiterIsRefusedWhenItBecomesHopeless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Running: 1, Waiting: 5, MaxWait: time.Minute}
		g := newTestGate(t, l)
		p10 := learn(t, g, context.Background(), kindTx, 20*time.Millisecond)
		p := mustAcquire(t, g, context.Background())
		now := try(g, within(t, p10-1), kindTx)
		now.mustFail(t, ErrDeadlineShort, 0)
		mustRefuse(t, now.end().err, ErrDeadlineShort, "", 1, 0, l)
		later := try(g, within(t, 50*time.Millisecond), kindTx)
		other := try(g, within(t, 50*time.Millisecond), kindRead) // no estimate yet: waits to its deadline
		never := try(g, context.Background(), kindTx)
		time.Sleep(100 * time.Millisecond)
		later.mustFail(t, ErrDeadlineShort, 50*time.Millisecond-p10)
		mustRefuse(t, later.end().err, ErrDeadlineShort, "", 1, 2, l)
		other.mustFail(t, context.DeadlineExceeded, 50*time.Millisecond)
		never.mustWait(t)
		for _, k := range []kind{kindHand, kindPinned} { // neither asked nor sampled
			a := try(g, within(t, 100*time.Microsecond), k)
			time.Sleep(time.Millisecond)
			a.mustFail(t, context.DeadlineExceeded, 100*time.Microsecond)
		}
		p.Release()
		never.mustRun(t)
		never.release()
	})
}

func TestFreePermitIsNeverRefusedForItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 2, Waiting: 5, MaxWait: time.Minute})
		p10 := learn(t, g, context.Background(), kindTx, 20*time.Millisecond)
		a := try(g, within(t, time.Millisecond), kindTx)
		a.mustRun(t)
		p := mustAcquire(t, g, context.Background())

		// Nor one that waits alone when a permit becomes free, although by the newest estimate it is late already.
		alone := try(g, within(t, p10+time.Millisecond), kindTx)
		alone.mustWait(t)
		g.mu.Lock()
		for range 200 {
			g.budgets[0].estimates[kindTx].add(time.Second)
		}
		g.mu.Unlock()
		a.release()
		alone.mustRun(t)

		// But one that others stand behind is.
		p2 := g.Stats().Estimates["tx"]
		first := try(g, within(t, p2+time.Millisecond), kindTx)
		second := try(g, context.Background(), kindTx)
		first.mustWait(t)
		g.mu.Lock()
		for range 1000 {
			g.budgets[0].estimates[kindTx].add(10 * time.Second)
		}
		g.mu.Unlock()
		alone.release()
		first.mustFail(t, ErrDeadlineShort, 0)
		second.mustRun(t)
		second.release()
		p.Release()
	})
}

// A line that is longer than what runs is for those who have the time that makes good use of a permit.
func TestLongLineIsForThoseWithTimeLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{Running: 1, Waiting: 10, MaxWait: time.Minute}
		g := newTestGate(t, l)
		background := context.Background()
		for i := range estimatorMin { // p10 is 20 ms, and with 60 ms left a permit does nearly twice the good
			h, err := g.acquire(background, kindTx, nil)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
			if i > 0 {
				time.Sleep(40 * time.Millisecond)
			}
			g.release(h, true)
		}
		const little = 50 * time.Millisecond
		holder := try(g, background, kindTx)
		first, second := try(g, within(t, little), kindTx), try(g, within(t, little), kindTx)
		hand := try(g, within(t, little), kindHand) // asks no estimate
		endless := try(g, background, kindTx)
		enough := try(g, within(t, 70*time.Millisecond), kindTx)
		late := try(g, within(t, little), kindTx)
		late.mustFail(t, ErrDeadlineShort, 0)
		mustRefuse(t, late.end().err, ErrDeadlineShort, "", 1, 5, l)
		time.Sleep(time.Millisecond)
		holder.release()
		first.mustFail(t, ErrDeadlineShort, time.Millisecond)
		second.mustFail(t, ErrDeadlineShort, time.Millisecond)
		hand.mustRun(t)
		endless.mustWait(t)
		hand.release()
		endless.mustRun(t)

		// One in line, or as many as run: nothing is lost by letting them try.
		enough.mustWait(t)
		last := try(g, within(t, little), kindTx)
		time.Sleep(20 * time.Millisecond)
		endless.release()
		enough.mustFail(t, ErrDeadlineShort, 21*time.Millisecond)
		last.mustRun(t)
		last.release()
	})
}

func TestHopelessWaiterRunsIfNobodyElseMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newWorkloadGate(t, Limits{Running: 3, Waiting: 9, MaxWait: time.Minute}, workload{"a", Limits{Running: 1, Waiting: 5}}, workload{"b", Limits{Running: 3, Waiting: 5}})
		ca, cb := WithWorkload(context.Background(), "a"), WithWorkload(context.Background(), "b")
		learn(t, g, cb, kindTx, 20*time.Millisecond)
		holder := try(g, ca, kindTx)
		p, q := mustAcquire(t, g, context.Background()), mustAcquire(t, g, context.Background())
		blocked := try(g, ca, kindTx) // cannot use what b can
		late := try(g, WithWorkload(within(t, 25*time.Millisecond), "b"), kindTx)
		late.mustWait(t)
		g.mu.Lock()
		for range 200 {
			g.named["b"].estimates[kindTx].add(time.Second)
		}
		g.mu.Unlock()
		p.Release()
		late.mustRun(t)
		blocked.mustWait(t)
		holder.release()
		blocked.mustRun(t)
		blocked.release()
		late.release()
		q.Release()
	})
}

func TestWithoutDeadlineAdmissionNobodyIsRefusedForItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Minute}, WithDeadlineAdmission(false))
		learn(t, g, context.Background(), kindTx, 20*time.Millisecond)
		p := mustAcquire(t, g, context.Background())
		a := try(g, within(t, time.Millisecond), kindTx)
		time.Sleep(time.Second)
		a.mustFail(t, context.DeadlineExceeded, time.Millisecond)
		p.Release()
	})
}

func TestOnlySuccessfulHoldsOfOneThingAreSampled(t *testing.T) {
	g := newTestGate(t, Limits{Running: 1})
	for range 2 * estimatorMin {
		for _, k := range []kind{kindHand, kindPinned, kindTx} {
			h, err := g.acquire(context.Background(), k, nil)
			if err != nil {
				t.Fatal(err)
			}
			g.release(h, k != kindTx)
		}
		h, err := g.acquire(context.Background(), kindAutocommit, nil)
		if err != nil {
			t.Fatal(err)
		}
		g.relabel(h, kindPinned)
		g.release(h, true)
	}
	if s := g.Stats(); s.Estimates != nil {
		t.Errorf("estimates %v", s.Estimates)
	}
}

func TestWorkloadAtItsLimitNeverBlocksAnother(t *testing.T) { // I2 at every level
	synctest.Test(t, func(t *testing.T) {
		g := newWorkloadGate(t, Limits{Running: 3, Waiting: 6, MaxWait: time.Minute}, workload{"a", Limits{Running: 2, Waiting: 4}}, workload{"b", Limits{Running: 1, Waiting: 2}})
		ca, cb := WithWorkload(context.Background(), "a"), WithWorkload(context.Background(), "b")
		b1 := try(g, cb, kindTx)
		b2, b3 := try(g, cb, kindTx), try(g, cb, kindTx)
		b1.mustRun(t)
		b2.mustWait(t)
		full := try(g, cb, kindTx)
		mustRefuse(t, full.end().err, ErrAdmissionFull, "b", 1, 2, Limits{1, 2, time.Minute})
		a1, none := try(g, ca, kindTx), try(g, context.Background(), kindTx)
		a1.mustRun(t)
		none.mustRun(t)
		a2 := try(g, ca, kindTx) // the gate is full now
		a2.mustWait(t)
		b1.release()
		b2.mustRun(t) // came before a2
		a2.mustWait(t)
		none.release()
		a2.mustRun(t) // b3 came before, but b is at its limit
		b3.mustWait(t)
		s := g.Stats()
		if w := s.Workloads["b"]; w.Running != 1 || w.Waiting != 1 || w.AdmissionFull != 1 || w.Acquired != 2 || w.Limits != (Limits{1, 2, time.Minute}) {
			t.Errorf("b: %+v", w)
		}
		if s.Running != 3 || s.Waiting != 1 || s.AdmissionFull != 1 || s.Acquired != 5 {
			t.Errorf("gate: %+v", s)
		}
		for _, a := range []*attempt{b2, b3, a1, a2} {
			a.mustRun(t)
			a.release()
		}
	})
}

func TestRefusalHasTheNumbersOfTheLevelThatRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gl, bl := Limits{Running: 2, Waiting: 2, MaxWait: 10 * time.Millisecond}, Limits{Running: 1, Waiting: 9}
		g := newWorkloadGate(t, gl, workload{"b", bl})
		cb := WithWorkload(context.Background(), "b")
		b1, n1 := try(g, cb, kindTx), try(g, context.Background(), kindTx)
		n2, n3 := try(g, context.Background(), kindTx), try(g, context.Background(), kindTx)
		// b is at its running limit, but has room to wait: it is the gate that has not.
		a := try(g, cb, kindTx)
		mustRefuse(t, a.end().err, ErrAdmissionFull, "b", 2, 2, gl)
		time.Sleep(20 * time.Millisecond)
		n2.mustFail(t, ErrWaitTimeout, 10*time.Millisecond)
		n3.mustFail(t, ErrWaitTimeout, 10*time.Millisecond)
		n1.release()
		// A permit of the gate is free: it is the workload's limit that this one waits for.
		a = try(g, cb, kindTx)
		time.Sleep(20 * time.Millisecond)
		a.mustFail(t, ErrWaitTimeout, 10*time.Millisecond)
		mustRefuse(t, a.end().err, ErrWaitTimeout, "b", 1, 0, Limits{1, 9, 10 * time.Millisecond})
		b1.release()
		// And here the workload has room, and the gate has not.
		n1, n2 = try(g, context.Background(), kindTx), try(g, context.Background(), kindTx)
		a = try(g, cb, kindTx)
		time.Sleep(20 * time.Millisecond)
		mustRefuse(t, a.end().err, ErrWaitTimeout, "b", 2, 0, gl)
		n1.release()
		n2.release()
	})
}

func TestWorkloadLimitsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newWorkloadGate(t, Limits{Running: 4, Waiting: 4, MaxWait: time.Minute}, workload{"b", Limits{Running: 3, Waiting: 1}})
		cb := WithWorkload(context.Background(), "b")
		if err := g.SetLimits(Limits{2, 4, time.Minute}); err == nil || g.Stats().Limits.Running != 4 {
			t.Errorf("the gate got fewer permits than its workload: %v", err)
		}
		if err := g.SetWorkloadLimits("b", Limits{5, 1, 0}); err == nil {
			t.Error("the workload got more permits than its gate")
		}
		if err := g.SetWorkloadLimits("c", Limits{1, 1, 0}); !errors.Is(err, ErrUnknownWorkload) {
			t.Error(err)
		}
		if err := g.SetWorkloadLimits("b", Limits{1, 1, time.Second}); err == nil {
			t.Error("the workload got a MaxWait of its own")
		}
		var run []*attempt
		for range 3 {
			run = append(run, try(g, cb, kindTx))
		}
		wait := try(g, cb, kindTx)
		if err := g.SetWorkloadLimits("b", Limits{1, 1, time.Minute}); err != nil { // below what is at work
			t.Fatal(err)
		}
		for _, a := range run {
			a.mustRun(t)
			wait.mustWait(t)
			try(g, cb, kindTx).mustFail(t, ErrAdmissionFull, 0)
			other := try(g, context.Background(), kindTx)
			other.mustRun(t)
			other.release()
			a.release()
		}
		wait.mustRun(t)
		next := try(g, cb, kindTx)
		next.mustWait(t)
		if err := g.SetWorkloadLimits("b", Limits{2, 0, 0}); err != nil {
			t.Fatal(err)
		}
		next.mustRun(t)
		wait.release()
		next.release()
	})
}

func TestUnknownWorkloadIsNeverUngated(t *testing.T) {
	g := newWorkloadGate(t, Limits{Running: 2}, workload{"a", Limits{Running: 1}})
	plain := newTestGate(t, Limits{Running: 2})
	for _, name := range []string{"", "A", "b"} {
		for _, g := range []*Gate{g, plain} {
			if _, err := g.Acquire(WithWorkload(context.Background(), name)); !errors.Is(err, ErrUnknownWorkload) {
				t.Errorf("workload %q: %v", name, err)
			}
		}
	}
	for _, ws := range [][]workload{{{"", Limits{Running: 1}}}, {{"a", Limits{Running: 1}}, {"a", Limits{Running: 1}}}, {{"a", Limits{Running: 3}}}, {{"a", Limits{}}}} {
		if _, err := newGate("bad", Limits{Running: 2}, gateConfig{workloads: ws}); err == nil {
			t.Errorf("a gate with workloads %v", ws)
		}
	}
}

func TestRetryAfterFollowsTheLevelThatRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newWorkloadGate(t, Limits{Running: 4, Waiting: 3, MaxWait: time.Minute}, workload{"slow", Limits{Running: 1, Waiting: 1}})
		retryAfter := func(a *attempt) time.Duration {
			t.Helper()
			var e *RejectedError
			if !errors.As(a.end().err, &e) {
				t.Fatal(a.end().err)
			}
			return e.RetryAfter()
		}
		slow := WithWorkload(context.Background(), "slow")
		a := try(g, slow, kindTx)
		time.Sleep(10 * time.Second)
		a.release()
		for range 400 {
			a := try(g, context.Background(), kindTx)
			time.Sleep(100 * time.Millisecond)
			a.release()
		}
		s1, s2 := try(g, slow, kindTx), try(g, slow, kindTx)
		if d := retryAfter(try(g, slow, kindTx)); d != 20*time.Second { // those two at 10 s each
			t.Errorf("slow: retry after %v, want 20s", d)
		}
		var run []*attempt
		for range 5 {
			run = append(run, try(g, context.Background(), kindTx))
		}
		if d := retryAfter(try(g, context.Background(), kindTx)); d < 99*time.Millisecond || d > 101*time.Millisecond { // 4 to be served, 4 at a time, 100 ms each
			t.Errorf("gate: retry after %v, want 100ms", d)
		}
		for _, a := range append([]*attempt{s1, s2}, run...) {
			a.release()
		}
	})
	if d := (&RejectedError{}).RetryAfter(); d != time.Millisecond {
		t.Errorf("retry after %v without an estimate, want 1ms", d)
	}
	if d := (&RejectedError{meanHold: time.Hour}).RetryAfter(); d != 30*time.Second {
		t.Errorf("retry after %v, want 30s at most", d)
	}
}

// A gate may be used in several testing/synctest bubbles one after the other, say by the tests of a package that has one
// database in a variable.
func TestGateOutlivesABubble(t *testing.T) {
	g := newTestGate(t, Limits{Running: 1, Waiting: 1, MaxWait: time.Minute})
	for i := range 3 {
		synctest.Test(t, func(t *testing.T) {
			p := mustAcquire(t, g, context.Background())
			a := try(g, context.Background(), kindHand)
			a.mustWait(t)
			p.Release()
			a.mustRun(t)
			a.release()
		})
		if n := g.Stats().Acquired; n != uint64(2*i+2) {
			t.Fatalf("acquired %d", n)
		}
	}
}

func TestAllocations(t *testing.T) {
	ctx := context.Background()
	g := newTestGate(t, Limits{Running: 1, Waiting: 0, MaxWait: time.Minute})
	if n := testing.AllocsPerRun(1000, func() {
		p, err := g.Acquire(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		p.Release()
	}); n != 0 {
		t.Errorf("acquire and release: %v allocations, want 0", n)
	}
	deadline := within(t, time.Hour)
	if n := testing.AllocsPerRun(1000, func() {
		h, err := g.acquire(deadline, kindTx, nil)
		if err != nil {
			t.Error(err)
		}
		g.release(h, true)
	}); n != 0 {
		t.Errorf("an operation with a deadline and an estimate: %v allocations, want 0", n)
	}
	p := mustAcquire(t, g, ctx)
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := g.Acquire(ctx); err == nil {
			t.Error("not refused")
		}
	}); n > 1 {
		t.Errorf("a refusal: %v allocations, want at most 1", n)
	}
	p.Release()
}

func TestObserveCountsWhatEnforceRefuses(t *testing.T) {
	ms := time.Millisecond
	type step struct {
		at, hold time.Duration
		ctx      func(t *testing.T) context.Context
		workload string
		limits   Limits // set them instead of a call
	}
	with := func(maxWait, deadline time.Duration) func(t *testing.T) context.Context {
		return func(t *testing.T) context.Context {
			ctx := context.Background()
			if deadline > 0 {
				ctx = within(t, deadline)
			}
			if maxWait >= 0 {
				ctx = WithMaxWait(ctx, maxWait)
			}
			return ctx
		}
	}
	plain := with(-1, 0)
	// Holds are such that what is refused in enforce mode changes nothing for the rest.
	for name, c := range map[string]struct {
		steps                []step
		full, timeout, short uint64
	}{
		"nobody waits": {steps: []step{{0, 50 * ms, plain, "", Limits{}}, {60 * ms, 50 * ms, plain, "", Limits{}}}},
		"waits and gets a permit": {
			steps: []step{{0, 50 * ms, plain, "", Limits{}}, {10 * ms, 50 * ms, plain, "", Limits{}}},
		},
		"timed out, and nobody looks": {
			steps:   []step{{0, 500 * ms, plain, "", Limits{}}, {10 * ms, 300 * ms, plain, "", Limits{}}},
			timeout: 1,
		},
		"its own MaxWait": {
			steps:   []step{{0, 500 * ms, plain, "", Limits{}}, {10 * ms, 2 * time.Second, with(time.Second, 0), "", Limits{}}, {20 * ms, 100 * ms, with(5*ms, 0), "", Limits{}}, {40 * ms, ms, with(0, 0), "", Limits{}}},
			timeout: 2,
		},
		"admission full": {
			steps: []step{{0, 500 * ms, plain, "", Limits{}}, {ms, 90 * ms, plain, "", Limits{}}, {2 * ms, 90 * ms, plain, "", Limits{}}, {3 * ms, ms, plain, "", Limits{}}},
			full:  1, timeout: 0,
		},
		"deadline short at once": {
			steps: []step{{0, 500 * ms, plain, "", Limits{}}, {ms, ms, with(-1, 10*ms), "", Limits{}}},
			short: 1,
		},
		"deadline short while it waits": {
			steps: []step{{0, 500 * ms, plain, "", Limits{}}, {ms, 60 * ms, with(-1, 70*ms), "", Limits{}}},
			short: 1,
		},
		"too little time in a long line": {
			// When the permit comes back 20.5 ms are left to the first in line, as much as p10; somebody with more time waits, too.
			steps: []step{{0, 60 * ms, plain, "", Limits{}}, {ms, 60 * ms, with(-1, 79500*time.Microsecond), "", Limits{}}, {2 * ms, 90 * ms, plain, "", Limits{}}},
			short: 1,
		},
		"too little time when the line is long already": {
			steps: []step{{0, 0, nil, "", Limits{1, 4, 100 * ms}}, {0, 90 * ms, plain, "", Limits{}}, {ms, 90 * ms, plain, "", Limits{}}, {2 * ms, 90 * ms, plain, "", Limits{}}, {3 * ms, 10 * ms, with(-1, 20500*time.Microsecond), "", Limits{}}},
			short: 1,
		},
		"a workload at its limit blocks nobody": {
			steps: []step{{0, 90 * ms, plain, "w", Limits{}}, {ms, 80 * ms, plain, "w", Limits{}}, {2 * ms, 50 * ms, plain, "v", Limits{}}, {3 * ms, ms, plain, "w", Limits{}}},
			full:  1,
		},
		"a workload at its limit is not granted what another gives back": {
			steps:   []step{{0, 500 * ms, plain, "w", Limits{}}, {ms, 300 * ms, plain, "w", Limits{}}, {2 * ms, 10 * ms, plain, "v", Limits{}}},
			timeout: 1,
		},
		"limits grow": {
			steps: []step{{0, 500 * ms, plain, "", Limits{}}, {ms, 200 * ms, plain, "", Limits{}}, {2 * ms, 0, nil, "", Limits{2, 2, 100 * ms}}, {3 * ms, 150 * ms, plain, "", Limits{}}},
			// the second is at work from 2 ms on, the third times out at 103 ms
			timeout: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := gateConfig{mode: Observe, deadlineAware: true}
				if slices.ContainsFunc(c.steps, func(s step) bool { return s.workload != "" }) {
					cfg.workloads = []workload{{"w", Limits{Running: 1, Waiting: 1}}, {"v", Limits{Running: 2, Waiting: 1}}}
				}
				l := Limits{Running: 1, Waiting: 2, MaxWait: 100 * ms}
				if cfg.workloads != nil {
					l.Running = 2
				}
				g, err := newGate("test", l, cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer checkIdle(t, g)
				learn(t, g, context.Background(), kindTx, 20*ms)
				if err := g.SetLimits(Limits{9, 0, 0}); err != nil { // and back: nothing is at work
					t.Fatal(err)
				}
				if err := g.SetLimits(l); err != nil {
					t.Fatal(err)
				}
				calls := uint64(estimatorMin)
				start := time.Now()
				var wg sync.WaitGroup
				for _, s := range c.steps {
					time.Sleep(s.at - time.Since(start))
					if s.limits.Running != 0 {
						if err := g.SetLimits(s.limits); err != nil {
							t.Error(err)
						}
						continue
					}
					ctx := s.ctx(t)
					if s.workload != "" {
						ctx = WithWorkload(ctx, s.workload)
					}
					calls++
					h, err := g.acquire(ctx, kindTx, nil)
					if err != nil || g.contended() {
						t.Fatalf("contended %v, %v", g.contended(), err)
					}
					wg.Go(func() { time.Sleep(s.hold); g.release(h, false) })
				}
				wg.Wait()
				s := g.Stats()
				want := map[string]uint64{"admission_full": c.full, "wait_timeout": c.timeout, "deadline_short": c.short}
				if fmt.Sprint(s.WouldReject) != fmt.Sprint(want) || s.Acquired != calls || s.AdmissionFull+s.WaitTimeout+s.DeadlineShort != 0 {
					t.Errorf("would reject %v, want %v; %+v", s.WouldReject, want, s)
				}
				v := &g.virtual
				if v.running != 0 || len(v.waiting) != 0 {
					t.Errorf("virtually %d running, %d waiting when idle", v.running, len(v.waiting))
				}
				for _, b := range g.budgets {
					if b.virtualRunning != 0 || b.virtualWaiting != 0 {
						t.Errorf("workload %q: virtually %d running, %d waiting when idle", b.name, b.virtualRunning, b.virtualWaiting)
					}
				}
			})
		})
	}
}

type suitcase struct {
	g    *Gate
	back int
	held int // permits that were out when it was given back
}

func (s *suitcase) giveBack() {
	s.back++
	s.held = s.g.Stats().Running
}

// A connection goes with the permit only to the next in line, and only if that is of the same database.
func TestHandOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Minute}, WithWorkloads(map[string]Limits{"narrow": {Running: 1, Waiting: 5}}))
		ours, other := &member{}, &member{}
		first := func() handle {
			h, err := g.acquire(t.Context(), kindTx, ours)
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
		type got struct {
			h    handle
			with luggage
			err  error
		}
		wait := func(ctx context.Context, m *member) (<-chan got, *waiter) {
			c, w := make(chan got, 1), new(waiter)
			go func() {
				h, err := g.acquireAs(ctx, kindTx, m, w)
				c <- got{h, w.luggage(), err}
			}()
			synctest.Wait()
			return c, w
		}
		const soon = time.Hour

		h := first()
		bag := &suitcase{g: g}
		if g.handOn(h, true, ours, bag, soon) {
			t.Fatal("handed on to nobody")
		}
		if s := g.Stats(); s.Running != 1 {
			t.Fatalf("a hand-over that did not happen has changed %+v", s)
		}
		c, _ := wait(t.Context(), other)
		behind, _ := wait(t.Context(), ours)
		if g.handOn(h, true, ours, bag, soon) {
			t.Fatal("handed on to another database, or past it")
		}
		g.release(h, true)
		r := <-c
		if r.err != nil || r.with != nil {
			t.Fatalf("%+v", r)
		}
		if g.handOn(h, true, ours, bag, soon) {
			t.Fatal("a permit was handed on twice") // I3
		}
		if g.handOn(r.h, true, other, bag, soon) {
			t.Fatal("handed on to another database")
		}
		g.release(r.h, true)
		r = <-behind
		c, _ = wait(t.Context(), ours)
		if g.handOn(r.h, true, ours, bag, g.now()-1) {
			t.Fatal("handed on too late")
		}
		if !g.handOn(r.h, true, ours, bag, soon) {
			t.Fatal("not handed on")
		}
		if r = <-c; r.err != nil || r.with != bag || bag.back != 0 {
			t.Fatalf("%+v", r)
		}
		if s := g.Stats(); s.Running != 1 || s.Waiting != 0 || s.Acquired != 4 {
			t.Fatalf("%+v", s)
		}

		// I5: the context ends in the instant of the grant. The connection goes back, then the permit.
		for handed := false; !handed; {
			ctx, cancel := context.WithCancel(t.Context())
			c, _ = wait(ctx, ours)
			cancel()
			if handed = g.handOn(r.h, true, ours, bag, soon); !handed {
				<-c // it was quicker, and out of the line before
			}
		}
		if r = <-c; !errors.Is(r.err, context.Canceled) || r.with != nil || bag.back != 1 || bag.held != 1 {
			t.Fatalf("%+v, given back %d times, %d permits out", r, bag.back, bag.held)
		}

		// A workload at its limit is passed over: the permit goes to who may have it.
		hw, err := g.acquire(WithWorkload(t.Context(), "narrow"), kindTx, ours)
		if err != nil {
			t.Fatal(err)
		}
		c, _ = wait(WithWorkload(t.Context(), "narrow"), ours)
		if !g.handOn(hw, true, ours, bag, soon) {
			t.Fatal("its own workload's next in line may have it")
		}
		r = <-c
		if err := g.SetLimits(Limits{Running: 2, Waiting: 5, MaxWait: time.Minute}); err != nil {
			t.Fatal(err)
		}
		plain, err := g.acquire(t.Context(), kindTx, ours)
		if err != nil {
			t.Fatal(err)
		}
		c, _ = wait(WithWorkload(t.Context(), "narrow"), ours)
		if g.handOn(plain, true, ours, bag, soon) {
			t.Fatal("handed on to a workload that is at its limit")
		}
		g.release(plain, true)
		if !g.handOn(r.h, true, ours, bag, soon) {
			t.Fatal("not handed on")
		}
		r = <-c
		g.release(r.h, true)
		if s := g.Stats(); s.Running != 0 || s.Waiting != 0 {
			t.Fatalf("%+v", s)
		}
	})
}

// The hold that ends may be the one that makes the next in line hopeless: the connection goes to the one after it, or back.
func TestHandOnPastTheHopeless(t *testing.T) {
	for _, behind := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			g := newTestGate(t, Limits{Running: 1, Waiting: 5, MaxWait: time.Minute})
			ours, other := &member{}, &member{}
			bag := &suitcase{g: g}
			for range estimatorMin - 1 {
				h, err := g.acquire(t.Context(), kindTx, ours)
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(10 * time.Second)
				g.release(h, true)
			}
			h, err := g.acquire(t.Context(), kindTx, ours)
			if err != nil {
				t.Fatal(err)
			}
			type got struct {
				h    handle
				with luggage
				err  error
			}
			start := func(d time.Duration, m *member) <-chan got {
				ctx, c, w := within(t, d), make(chan got, 1), new(waiter)
				go func() {
					h, err := g.acquireAs(ctx, kindTx, m, w)
					c <- got{h, w.luggage(), err}
				}()
				synctest.Wait()
				return c
			}
			m := other
			if behind {
				m = ours
			}
			hopeless, next := start(12*time.Second, ours), start(40*time.Second, m)
			time.Sleep(10 * time.Second)
			if !g.handOn(h, true, ours, bag, g.now()+time.Hour) {
				t.Fatal("not handed on")
			}
			if r := <-hopeless; !errors.Is(r.err, ErrDeadlineShort) || r.with != nil {
				t.Errorf("the hopeless one: %+v", r)
			}
			r := <-next
			if r.err != nil || behind != (r.with != nil) || behind != (bag.back == 0) {
				t.Errorf("behind is ours: %v, got %+v, given back %d times", behind, r, bag.back)
			}
			g.release(r.h, false)
		})
	}
}
