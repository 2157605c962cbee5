package telemetry

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestEachObservationIsInTheBucketsOfItsDuration(t *testing.T) {
	for range 3_000 {
		d := time.Duration(math.Exp(rand.Float64() * 33)) // up to 60 h
		if rand.IntN(4) == 0 {
			d = bounds[rand.IntN(len(bounds))] + time.Duration(rand.IntN(3)-1)
		}
		var h Histogram
		h.Observe(d)
		c := h.Read()
		if c.Count != 1 || c.Sum != d {
			t.Fatalf("%v: count %d, sum %v", d, c.Count, c.Sum)
		}
		for i, b := range Buckets {
			if want := d <= nanoseconds(b); (c.Upto[i] == 1) != want {
				t.Fatalf("%v: in the bucket up to %v: %d", d, b, c.Upto[i])
			}
		}
		if zero := d <= nanoseconds(ZeroThreshold); (c.Zero == 1) != zero {
			t.Fatalf("%v: in the zero bucket: %d", d, c.Zero)
		}
		for i, n := range c.Native {
			// The bucket with index i reaches from 2^((i-1)/8), exclusive, to 2^(i/8).
			index := float64(c.Offset + i)
			low, high := nanoseconds(math.Exp2((index-1)/perOctave)), nanoseconds(math.Exp2(index/perOctave))
			in := d > low && (d <= high || i == len(c.Native)-1)
			if (n == 1) != in {
				t.Fatalf("%v: in the native bucket %v (%v to %v): %d", d, index, low, high, n)
			}
		}
	}
}

func TestObserveDoesNotAllocate(t *testing.T) {
	var h Histogram
	d := time.Microsecond
	if n := testing.AllocsPerRun(100, func() { h.Observe(d); d += d / 3 }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestNothingHappensWithoutARecorder(t *testing.T) {
	var r *Recorder
	r.GateWait(0, 1)
	r.PoolWait(0, 1)
	r.Hold(0, 1)
	r.SQL(OpExec, 1, ClassOther)
	r.Transaction(Unknown)
}

func BenchmarkObserve(b *testing.B) {
	var h Histogram
	d := 300 * time.Microsecond
	for b.Loop() {
		h.Observe(d)
		d ^= 0x1000
	}
}
