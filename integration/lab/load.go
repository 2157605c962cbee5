//go:build unix

package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// load is a stream of arrivals that waits for nobody: each has its moment, drawn in advance, and its own goroutine. An
// arrival's clock starts at that moment, also where the generator or the machine was late, so that nothing that is slow
// hides how slow it is (no coordinated omission).
type load struct {
	rate     float64 // arrivals per second, in a Poisson process
	burst    int     // arrivals at the first moment, on top
	length   time.Duration
	warm     time.Duration                  // arrivals before this are made but not counted
	deadline func(*rand.Rand) time.Duration // nil: none
	seed     uint64                         // peers that get the same seed get the same arrivals
	during   func(start time.Time)          // runs beside it
}

// arrival is one caller.
type arrival struct {
	at       time.Duration // from the start of the load
	deadline time.Duration // from at; 0: none
}

func (l load) arrivals() []arrival {
	r := rand.New(rand.NewPCG(l.seed, 0))
	var as []arrival
	add := func(at time.Duration) {
		a := arrival{at: at}
		if l.deadline != nil {
			a.deadline = l.deadline(r)
		}
		as = append(as, a)
	}
	for range l.burst {
		add(0)
	}
	for at := 0.0; l.rate > 0; {
		at += r.ExpFloat64() / l.rate
		if at >= l.length.Seconds() {
			break
		}
		add(time.Duration(at * float64(time.Second)))
	}
	return as
}

// pause sleeps; tests have another one.
var pause = sleep

// run makes the arrivals and waits until the last caller has its answer. call does one caller's work, and says when it
// was let in (zero: it was not) and how it ended.
func (l load) run(call func(ctx context.Context, a arrival) (begun time.Time, end ending, err error)) *tally {
	t := newTally(l.length - l.warm)
	as := l.arrivals()
	start := time.Now()
	var wg sync.WaitGroup
	if l.during != nil {
		wg.Go(func() { l.during(start) })
	}
	for _, a := range as {
		at := start.Add(a.at)
		if d := time.Until(at); d > 0 {
			pause(d)
		}
		launched := time.Since(at)
		wg.Go(func() {
			ctx := context.Background()
			if a.deadline > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithDeadline(ctx, at.Add(a.deadline))
				defer cancel()
			}
			begun, end, err := call(ctx, a)
			if a.at >= l.warm {
				t.add(a, at, launched, begun, time.Now(), end, err)
			}
		})
	}
	wg.Wait()
	return t
}

// ending is how one caller's work ended.
type ending int

const (
	done     ending = iota // committed
	refused                // by the limiter, at once
	timedOut               // by the limiter, after it had waited for as long as the limiter lets it
	gaveUp                 // its deadline ended it
	failed                 // anything else
)

// tally is what became of the arrivals of a load.
type tally struct {
	length time.Duration // of the counted part

	mu       sync.Mutex // guards what follows
	arrivals int
	ok       int // committed within the deadline
	late     int // begun, and then not committed within the deadline: work for nothing
	expired  int // gave up before it was let in
	refused  int // at once
	timedOut int // after a wait
	failed   int
	failures map[string]int

	latency *hdrhistogram.Histogram // of ok, in µs, from the intended arrival
	refusal *hdrhistogram.Histogram // the same of those refused at once
	wait    *hdrhistogram.Histogram // µs from the intended arrival until it was let in
	used    *hdrhistogram.Histogram // how much of its deadline an admitted one took, in 1/1000
	lag     *hdrhistogram.Histogram // µs by which the generator itself was late

	all, good []time.Duration // moments of arrival: of everybody, of ok
}

func newTally(length time.Duration) *tally {
	h := func() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(10*time.Minute/time.Microsecond), 3) }
	return &tally{length: length, failures: make(map[string]int), latency: h(), refusal: h(), wait: h(), used: h(), lag: h()}
}

func (t *tally) add(a arrival, at time.Time, launched time.Duration, begun, end time.Time, how ending, err error) {
	took := end.Sub(at)
	inTime := a.deadline == 0 || took <= a.deadline
	t.mu.Lock()
	defer t.mu.Unlock()
	record := func(h *hdrhistogram.Histogram, d time.Duration) { _ = h.RecordValue(max(d.Microseconds(), 1)) }
	t.arrivals++
	t.all = append(t.all, a.at)
	record(t.lag, launched)
	if !begun.IsZero() {
		record(t.wait, begun.Sub(at))
		if a.deadline > 0 {
			_ = t.used.RecordValue(max(int64(1000*float64(took)/float64(a.deadline)), 1))
		}
	}
	switch {
	case how == done && inTime:
		t.ok++
		record(t.latency, took)
		t.good = append(t.good, a.at)
	case how == refused:
		t.refused++
		record(t.refusal, took)
	case how == timedOut:
		t.timedOut++
	case how == failed:
		t.failed++
		t.failures[err.Error()]++
	case begun.IsZero():
		t.expired++
	default:
		t.late++
	}
}

// merge adds what u has counted to t.
func (t *tally) merge(u *tally) {
	t.length += u.length
	t.arrivals += u.arrivals
	t.ok += u.ok
	t.late += u.late
	t.expired += u.expired
	t.refused += u.refused
	t.timedOut += u.timedOut
	t.failed += u.failed
	for text, n := range u.failures {
		t.failures[text] += n
	}
	t.latency.Merge(u.latency)
	t.refusal.Merge(u.refusal)
	t.wait.Merge(u.wait)
	t.used.Merge(u.used)
	t.lag.Merge(u.lag)
}

// goodput is in transactions committed within their deadline, per second.
func (t *tally) goodput() float64 { return float64(t.ok) / t.length.Seconds() }

// commonest is the failure that came most often, "" without one.
func (t *tally) commonest() string {
	best := ""
	for text, n := range t.failures {
		if best == "" || n > t.failures[best] {
			best = text
		}
	}
	return best
}

// ms is a quantile in milliseconds, 0 of an empty histogram.
func ms(h *hdrhistogram.Histogram, quantile float64) float64 {
	return float64(h.ValueAtQuantile(quantile)) / 1000
}

// uniform draws deadlines.
func uniform(from, to time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return from + time.Duration(r.Int64N(int64(to-from))) }
}

// closed has callers who each begin again as soon as they have their answer, for as long as length, and returns how many
// transactions per second they got done. It measures what a system can do, never how long it takes.
func closed(callers int, length time.Duration, call func(context.Context) error) (float64, error) {
	var mu sync.Mutex
	var n int
	var first error
	start := time.Now()
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			mine := 0
			var err error
			for err == nil && time.Since(start) < length {
				if err = call(context.Background()); err == nil {
					mine++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			n += mine
			if first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return float64(n) / time.Since(start).Seconds(), first
}

// median of values, NaN without any. quartile 1 and 3 are beside it.
func median(values []float64) float64 { return quantileOf(values, 0.5) }

func quantileOf(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	at := q * float64(len(s)-1)
	i := int(at)
	if i+1 == len(s) {
		return s[i]
	}
	return s[i] + (at-float64(i))*(s[i+1]-s[i])
}
