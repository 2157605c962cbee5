package pgxgated

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// slowEstimator does what estimator does with fractions, without a cursor, and with the samples of the row at hand.
type slowEstimator struct {
	bins  [estimatorBins]float64
	seen  int
	above []int // bins of the samples in a row beyond the estimate
}

func (e *slowEstimator) sum() (n float64) {
	for _, b := range e.bins {
		n += b
	}
	return n
}

func (e *slowEstimator) bin() int {
	n, below := e.sum(), 0.0
	for i, b := range e.bins {
		if below += b; below*10 >= n && below > 0 {
			return i
		}
	}
	return 0
}

func (e *slowEstimator) add(d time.Duration) {
	i := 0
	for i < estimatorBins-1 && d >= edge(i+1) {
		i++
	}
	if e.seen >= estimatorMin && i > e.bin() {
		e.above = append(e.above, i)
	} else {
		e.above = nil
	}
	if len(e.above) == estimatorAbove {
		i = slices.Min(e.above)
		e.bins = [estimatorBins]float64{}
		e.bins[i] = estimatorMin - 1
		e.above = nil
	}
	e.bins[i]++
	e.seen++
	if e.sum() >= estimatorMax {
		for i := range e.bins {
			e.bins[i] /= 2
		}
	}
}

// edge is the lower edge of a bin: a sixteenth of an octave each, straight within an octave.
func edge(i int) time.Duration {
	octave := math.Pow(2, float64(estimatorShift+i/16))
	return time.Duration(octave + octave*float64(i%16)/16)
}

func TestEstimateIsAsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var e estimator
		var slow slowEstimator
		spread := rapid.SampledFrom([]int64{1, 20, 400, 1e6}).Draw(t, "spread")
		base := time.Duration(rapid.Int64Range(1e3, 1e9).Draw(t, "base"))
		n := rapid.IntRange(1, 700).Draw(t, "samples")
		step := rapid.IntRange(0, 700).Draw(t, "step")
		by := rapid.SampledFrom([]time.Duration{1, 1, 10, 1000}).Draw(t, "by")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		for i := range n {
			d := base + time.Duration(r.Int64N(spread))*base/100
			if i >= step {
				d *= by
			}
			e.add(d)
			slow.add(d)
			if e.seen < estimatorMin {
				if e.p10() != 0 {
					t.Fatalf("an estimate after %d samples", i+1)
				}
				continue
			}
			if want := edge(slow.bin()); e.p10() != want {
				t.Fatalf("p10 is %v after %d samples, in the model %v", e.p10(), i+1, want)
			}
		}
	})
}

// A tenth of the samples lies below the estimate, give or take the noise of some 400 samples, for lengths with a long low
// tail too: whole samples halved would lose that tail, and the estimate would be too high.
func TestEstimateIsTheTenthPercentile(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() float64{
		"exponential": r.ExpFloat64,
		"lognormal":   func() float64 { return math.Exp(1.5 * r.NormFloat64()) },
		"uniform":     r.Float64,
	} {
		var e estimator
		below, n := 0.0, 0.0
		for i := range 100_000 {
			d := time.Duration(draw() * 2e7)
			if i > 1000 {
				n++
				if d < e.p10() {
					below++
				}
			}
			e.add(d)
		}
		if share := below / n; share < 0.08 || share > 0.105 {
			t.Errorf("%s: %.3f of the samples lie below the estimate, want 0.1 less half a bin", name, share)
		}
	}
}

func TestEstimateFollowsAStep(t *testing.T) {
	for _, c := range []struct{ from, to time.Duration }{
		{60 * time.Millisecond, 5 * time.Millisecond},
		{5 * time.Millisecond, 60 * time.Millisecond},
	} {
		var e estimator
		for range 2000 {
			e.add(c.from)
		}
		for n := 1; e.p10() > c.to || e.p10() < c.to*95/100; n++ {
			if e.add(c.to); n > estimatorAbove {
				t.Fatalf("%v to %v: %v after %d samples", c.from, c.to, e.p10(), n)
			}
		}
	}
}

func TestEstimateOfExtremes(t *testing.T) {
	for _, c := range []struct{ hold, want time.Duration }{
		{0, 8192}, {1, 8192}, {8191, 8192}, {8192, 8192},
		{24 * time.Hour, edge(estimatorBins - 1)},
	} {
		var e estimator
		for range 3 * estimatorMax {
			e.add(c.hold)
		}
		if e.p10() != c.want {
			t.Errorf("%v: %v, want %v", c.hold, e.p10(), c.want)
		}
	}
}

// Among those who have so much time left that a permit does the most good, nobody need have more: that is checked by giving one permit to
// 100,000 in turn who have all the same time left.
func TestWorthIsTheTimeThatMakesGoodUseOfAPermit(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct {
		name    string
		draw    func() float64 // ms
		overrun time.Duration
	}{
		{"constant", func() float64 { return 20 }, time.Millisecond},
		{"uniform", func() float64 { return 8 + 22*r.Float64() }, 0},
		{"uniform, with an overrun", func() float64 { return 8 + 22*r.Float64() }, 20 * time.Millisecond},
		{"exponential", func() float64 { return 20 * r.ExpFloat64() }, 5 * time.Millisecond},
		{"lognormal", func() float64 { return math.Exp(2 + 1.5*r.NormFloat64()) }, 5 * time.Millisecond},
		{"90% of 1 ms, 10% of 200 ms", func() float64 {
			if r.Float64() < .9 {
				return 1
			}
			return 200
		}, 5 * time.Millisecond},
		{"10% of 1 ms, 90% of 200 ms", func() float64 {
			if r.Float64() < .1 {
				return 1
			}
			return 200
		}, 5 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			var e estimator
			holds := make([]time.Duration, 100_000)
			for i := range holds {
				holds[i] = duration(c.draw())
				e.add(holds[i])
			}
			e.overran(c.overrun)
			good := func(left time.Duration) float64 {
				done, took := 0.0, time.Duration(0)
				for _, hold := range holds {
					if hold <= left {
						done++
						took += hold
					} else {
						took += left + c.overrun
					}
				}
				return done / took.Seconds()
			}
			var best float64
			for i := range estimatorBins - 1 {
				best = max(best, good(estimatorEdge(i+1)))
			}
			// The estimate rests on some 400 holds.
			worth := e.worth()
			if share := good(worth) / best; share < 0.9 {
				t.Errorf("%v makes %.3f of the best use, want 0.95", worth, share)
			}
			if share := good(worth*9/10) / best; share > 0.98 {
				t.Errorf("less than %v makes %.3f of the best use, too", worth, share)
			}
			t.Logf("p10 %v, worth %v", e.p10(), worth)
		})
	}
	var e estimator
	for range 2 * estimatorMin {
		e.addAtLeast(time.Second)
	}
	if e.p10() == 0 || e.worth() != 0 {
		t.Errorf("where nothing was successful p10 is %v and worth %v, want 0", e.p10(), e.worth())
	}
	e.add(20 * time.Millisecond)
	first := e.worth()
	for range 100 {
		e.add(60 * time.Millisecond)
	}
	if e.worth() < 60*time.Millisecond {
		t.Errorf("worth %v after the work has changed, %v before", e.worth(), first)
	}
}

// Work that was cut off raises the estimate, and never lowers it.
func TestEstimatorLearnsFromWhatWasCutOff(t *testing.T) {
	var e estimator
	// Before anything was successful the longest stands for all, and the first success for itself.
	for i := range estimatorMin {
		if got := e.p10(); got != 0 {
			t.Errorf("estimate %v after %d", got, i)
		}
		e.addAtLeast(time.Duration(30-i) * time.Millisecond)
	}
	if got := e.p10(); got <= 28*time.Millisecond || got > 30*time.Millisecond {
		t.Errorf("estimate %v, want 30 ms", got)
	}
	e.add(20 * time.Millisecond)
	if got := e.p10(); got <= 19*time.Millisecond || got > 20*time.Millisecond {
		t.Errorf("estimate %v after the first success, want 20 ms", got)
	}
	for range 2 * estimatorMin {
		e.add(20 * time.Millisecond)
	}
	first := e.p10()
	for range 100 {
		e.addAtLeast(time.Millisecond)
	}
	if got := e.p10(); got != first {
		t.Errorf("estimate %v after work that was cut off sooner, want %v", got, first)
	}
	for range 100 {
		e.addAtLeast(40 * time.Millisecond)
	}
	if got := e.p10(); got <= 38*time.Millisecond || got > 40*time.Millisecond {
		t.Errorf("estimate %v after work that was cut off after 40 ms, want just that", got)
	}
}

// The first were successful on connections that were still to be made, so that what comes after them is cut off sooner each time:
// before there is an estimate that counts, as nothing but its absence has let it in.
func TestEstimatorLearnsFromWhatIsCutOffSoonerInTheBeginning(t *testing.T) {
	var e estimator
	e.add(110 * time.Millisecond)
	e.add(100 * time.Millisecond)
	for i := 2; i < estimatorMin; i++ {
		if got := e.p10(); got != 0 {
			t.Errorf("estimate %v after %d", got, i)
		}
		e.addAtLeast(time.Duration(i) * time.Millisecond)
	}
	if got := e.p10(); got <= 96*time.Millisecond || got > 100*time.Millisecond {
		t.Errorf("estimate %v, want the shortest success of 100 ms", got)
	}
	e.add(20 * time.Millisecond)
	if got := e.p10(); got <= 19*time.Millisecond || got > 20*time.Millisecond {
		t.Errorf("estimate %v after one of 20 ms, want just that", got)
	}
}

// Where what comes is cut off time and again, how little was not enough says less than the shortest success, or than the longest that was cut off.
func TestEstimatorLearnsFromARowOfThoseCutOff(t *testing.T) {
	for _, c := range []struct {
		name        string
		longest     int // ms: cut off after 21 ms up to that, the longest first
		successes   int // of 27 ms among them
		least, most float64
	}{
		{"all cut off", 26, 0, 24.9, 26},
		{"some successful", 26, 4, 25.9, 27},
		{"far beyond", 200, 0, 27, 28.4}, // half an octave above 20 ms
	} {
		t.Run(c.name, func(t *testing.T) {
			var e estimator
			for range 600 {
				e.add(20 * time.Millisecond)
			}
			for i := range estimatorAbove - c.successes {
				e.addAtLeast(time.Duration(c.longest-i%(c.longest-20)) * time.Millisecond)
			}
			for range c.successes {
				e.add(27 * time.Millisecond)
			}
			if got := e.p10().Seconds() * 1000; got < c.least || got > c.most {
				t.Errorf("estimate %v ms, want %v to %v", got, c.least, c.most)
			}
			e.add(27 * time.Millisecond)
			if got := e.p10().Seconds() * 1000; got < 25.9 || got > 27 {
				t.Errorf("estimate %v ms after a success of 27 ms", got)
			}
		})
	}
}
