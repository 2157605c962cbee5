package telemetry

import (
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"
)

// Histogram counts durations in bins that can be read as a classic histogram (Buckets) and as a native one, both exact:
// its bounds are those of both, merged. The zero value is ready. Safe for concurrent use.
//
// Tried and rejected: prometheus.Histogram with both kinds of buckets, which costs about four times as much an observation
// and would link the library.
type Histogram struct {
	sum  atomic.Int64 // ns
	bins [maxBins]atomic.Uint64
}

// Schema is the resolution of the native buckets: 2^(2^-Schema), 9 % wide.
const Schema = 3

// Native buckets begin at 2^nativeFirst s (about 1 µs; what is less is their zero) and end at 2^nativeLast s (9 h).
const (
	nativeFirst = -20
	nativeLast  = 15
	perOctave   = 1 << Schema
	maxBins     = (nativeLast-nativeFirst)*perOctave + 20
)

// ZeroThreshold is up to where the native histogram counts as zero, in seconds.
var ZeroThreshold = math.Ldexp(1, nativeFirst)

// Buckets are the upper bounds of the classic buckets, in seconds: 100 µs to 30 s.
var Buckets = []float64{
	.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30,
}

// bounds are the upper bounds of the bins, inclusive, in ns; the last bin has none. first has the first bin for durations
// with the same leading bits (see leading).
var bounds, first = func() (bounds []time.Duration, first [64 * 8]uint16) {
	for i := range (nativeLast-nativeFirst)*perOctave + 1 {
		bounds = append(bounds, nanoseconds(nativeBound(i)))
	}
	for _, s := range Buckets {
		bounds = append(bounds, nanoseconds(s))
	}
	slices.Sort(bounds)
	bounds = slices.Compact(bounds)
	if len(bounds) >= maxBins {
		panic("bug: maxBins is too small")
	}
	for n := range 60 {
		for i := range uint64(8) {
			least := 1<<n | i<<n>>3
			bin, _ := slices.BinarySearch(bounds, time.Duration(least))
			first[leading(least)] = uint16(bin)
		}
	}
	return bounds, first
}()

// leading is the position of the highest bit that is set, and the three bits below it. d is positive and far from overflow.
func leading(d uint64) int {
	n := bits.Len64(d) - 1
	return n<<3 | int(d<<3>>n)&7
}

// nativeBound is the upper bound of the i-th native bucket, in seconds; that of the 0th is ZeroThreshold.
func nativeBound(i int) float64 { return math.Exp2(float64(i)/perOctave + nativeFirst) }

func nanoseconds(s float64) time.Duration { return time.Duration(math.Floor(s*1e9 + 1e-6)) }

// Observe counts d.
func (h *Histogram) Observe(d time.Duration) {
	if d <= 0 {
		h.bins[0].Add(1)
		return
	}
	i := len(bounds)
	if d <= bounds[i-1] {
		for i = int(first[leading(uint64(d))]); d > bounds[i]; i++ {
		}
	}
	h.bins[i].Add(1)
	h.sum.Add(int64(d))
}

// Counts is a reading of a histogram.
type Counts struct {
	Count  uint64
	Sum    time.Duration
	Upto   []uint64 // observations up to each of Buckets
	Zero   uint64   // native: up to ZeroThreshold
	Native []uint64 // native: the buckets above it; what is longer than all is in the last
	Offset int      // native: the index of the first of them
}

// Read returns what has been observed. Observations made meanwhile may be in Sum and not in Count; Count always fits the
// buckets.
func (h *Histogram) Read() Counts {
	c := Counts{
		Sum:    time.Duration(h.sum.Load()),
		Upto:   make([]uint64, len(Buckets)),
		Native: make([]uint64, (nativeLast-nativeFirst)*perOctave),
		Offset: nativeFirst*perOctave + 1,
	}
	native, classic := 0, 0
	for i := range len(bounds) + 1 {
		n := h.bins[i].Load()
		if i < len(bounds) {
			for native < len(c.Native) && bounds[i] > nanoseconds(nativeBound(native)) {
				native++
			}
			for classic < len(Buckets) && bounds[i] > nanoseconds(Buckets[classic]) {
				classic++
			}
		} else {
			native, classic = len(c.Native), len(Buckets)
		}
		c.Count += n
		if classic < len(Buckets) {
			c.Upto[classic] += n
		}
		if native == 0 {
			c.Zero += n
		} else {
			c.Native[native-1] += n
		}
	}
	for i := range len(c.Upto) - 1 {
		c.Upto[i+1] += c.Upto[i]
	}
	return c
}
