package pgxgated

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var mu sync.Mutex // guards rung
		var rung []time.Duration
		a := &alarm{ring: func() {
			mu.Lock()
			defer mu.Unlock()
			rung = append(rung, time.Since(start))
		}}
		at := func(d time.Duration) time.Time { return start.Add(d) }
		wait := func(d time.Duration) { time.Sleep(time.Until(at(d))); synctest.Wait() }
		want := func(rings ...time.Duration) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if len(rung) != len(rings) {
				t.Fatalf("rung at %v, want %v", rung, rings)
			}
			for i := range rings {
				if rung[i] != rings[i] {
					t.Fatalf("rung at %v, want %v", rung, rings)
				}
			}
			rung = nil
		}

		a.set(at(1 * time.Second))
		wait(1 * time.Second)
		want(1 * time.Second)
		if !a.off() {
			t.Error("off does not tell that it has rung")
		}

		// The timer of a use that ended in time serves the next one, which is due later.
		a.set(at(2 * time.Second))
		if a.off() {
			t.Error("off tells that it has rung")
		}
		a.set(at(3 * time.Second))
		wait(2500 * time.Millisecond)
		want()
		wait(4 * time.Second)
		want(3 * time.Second)
		a.off()

		// One that is due earlier sets it anew.
		a.set(at(10 * time.Second))
		a.off()
		a.set(at(5 * time.Second))
		wait(6 * time.Second)
		want(5 * time.Second)
		a.off()
		wait(11 * time.Second)
		want()

		// Longer than a timer runs.
		a.set(at(300 * time.Second))
		wait(400 * time.Second)
		want(300 * time.Second)
		a.off()

		// A timer whose end comes late, when the next use goes on, rings nothing.
		a.set(at(500 * time.Second))
		a.over(a.rings)
		want()
		a.off()
		a.over(a.rings)
		want()
		a.over(time.Time{})
		a.set(at(490 * time.Second))
		a.off()
		a.set(at(480 * time.Second)) // two timers, of which the first to be over is the one that counts
		wait(505 * time.Second)
		want(480 * time.Second)
		a.off()
		a.set(at(510 * time.Second))
		a.stop()
		wait(600 * time.Second)
		want()
	})
}
