package pgxgated

import (
	"sync"
	"time"
)

// alarm bounds how long something may take that nearly always ends in time, and costs no timer where it does. A timer that
// is set and stopped for each operation costs far more than itself: one that becomes the first of its processor's timers
// wakes an idle thread to wait for it, or makes one poll the network anew. On two processors BEGIN, a select and COMMIT ran
// a tenth to a quarter slower with two such timers. So the timer of an earlier use is left to run; when it is over,
// another one is made for what is due by then, if anything is.
//
// One use at a time, set to off. Safe for concurrent use otherwise.
type alarm struct {
	// ring is called when the time is over, once per set at most, never before it and never after off has returned. It must
	// not use the alarm.
	ring func()

	mu    sync.Mutex // guards what follows; held while ring is called, so nothing that is held there may be held around set or off
	until time.Time  // zero: off
	rings time.Time  // when the latest timer is over, zero: none is running
	timer *time.Timer
	rang  bool
}

// alarmMax is how long a timer runs at most, after which another one is made: one that an earlier one has replaced runs on, and
// any keeps in memory what it belongs to. So a long wait costs a timer in ten seconds.
const alarmMax = 10 * time.Second

// set makes ring be called at the given time.
func (a *alarm) set(until time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until, a.rang = until, false
	if !a.rings.IsZero() && !until.Before(a.rings) {
		return
	}
	a.runLocked()
}

func (a *alarm) runLocked() {
	now := time.Now()
	left := min(a.until.Sub(now), alarmMax)
	rings := now.Add(left)
	a.rings = rings
	a.timer = time.AfterFunc(left, func() { a.over(rings) })
}

// over is called when a timer is. It may come late, when what it was set for has ended and something else goes on, and may
// be one that an earlier one has replaced. A timer is never set again nor, but by stop, stopped, as it may belong to a
// testing/synctest bubble that is not the caller's.
func (a *alarm) over(rings time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if rings != a.rings {
		return
	}
	a.rings = time.Time{}
	switch {
	case a.until.IsZero():
	case time.Now().Before(a.until):
		a.runLocked()
	default:
		a.until, a.rang = time.Time{}, true
		a.ring()
	}
}

// off ends the use, and tells whether ring was called.
func (a *alarm) off() (rang bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = time.Time{}
	return a.rang
}

// stop gives the timer up, for an alarm that is not used any more.
func (a *alarm) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until, a.rings = time.Time{}, time.Time{}
	if a.timer != nil {
		a.timer.Stop()
	}
}
