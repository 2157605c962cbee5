//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"image/png"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// inBubble makes pause a wait that synctest knows.
func inBubble(t *testing.T, f func(t *testing.T)) {
	was := pause
	pause = time.Sleep
	defer func() { pause = was }()
	synctest.Test(t, f)
}

func TestArrivalsDoNotWaitForAnswers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		l := load{rate: 1000, length: time.Second, seed: 1}
		start := time.Now()
		release := make(chan struct{})
		var arrived atomic.Int64
		go func() {
			time.Sleep(2 * time.Second) // long after the last arrival
			close(release)
		}()
		var mu sync.Mutex
		var late time.Duration
		u := l.run(func(_ context.Context, a arrival) (time.Time, ending, error) {
			arrived.Add(1)
			mu.Lock()
			late = max(late, time.Since(start)-a.at)
			mu.Unlock()
			begun := time.Now()
			<-release // nobody gets an answer meanwhile
			return begun, done, nil
		})
		if n := int(arrived.Load()); n != len(l.arrivals()) || n < 850 || n > 1150 || u.ok != n {
			t.Errorf("%d arrivals, %d done, want all %d of them, some 1000", n, u.ok, len(l.arrivals()))
		}
		if late != 0 {
			t.Errorf("an arrival was %v late though no answer should matter to it", late)
		}
	})
}

// A server that stands still for a second under load makes everybody who arrives meanwhile wait, half of them for half of
// it. A generator that waits for its answers would see one slow call.
func TestLatencyCountsFromTheIntendedArrival(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		start := time.Now()
		u := load{rate: 500, length: 2 * time.Second, seed: 7}.run(func(context.Context, arrival) (time.Time, ending, error) {
			time.Sleep(time.Second - time.Since(start))
			return time.Now(), done, nil
		})
		if got := ms(u.latency, 40); got > 1 {
			t.Errorf("the 40th percentile is %.1f ms, though the half that came after the stall did not wait", got)
		}
		if got := ms(u.latency, 75); got < 400 || got > 600 {
			t.Errorf("the 75th percentile is %.0f ms, want about half a second", got)
		}
		if got := ms(u.latency, 100); got < 900 || got > 1010 {
			t.Errorf("the longest is %.0f ms, want about a second", got)
		}
	})
}

// The generator's own lateness is part of the latency, not hidden.
func TestLatenessOfTheGeneratorCounts(t *testing.T) {
	was := pause
	pause = func(d time.Duration) { time.Sleep(d + 50*time.Millisecond) }
	defer func() { pause = was }()
	synctest.Test(t, func(t *testing.T) {
		u := load{rate: 10, length: 2 * time.Second, seed: 3}.run(func(context.Context, arrival) (time.Time, ending, error) {
			return time.Now(), done, nil
		})
		if got := ms(u.latency, 100); got < 49 || got > 51 {
			t.Errorf("the longest latency is %.1f ms, want the 50 ms that the generator was late", got)
		}
		if latency, lag := ms(u.latency, 50), ms(u.lag, 50); lag == 0 || latency != lag {
			t.Errorf("median latency %.1f ms and lag %.1f ms, want the same: the answers took no time", latency, lag)
		}
	})
}

func TestArrivalsArePoissonAndTheSameForTheSameSeed(t *testing.T) {
	l := load{rate: 2000, length: 10 * time.Second, seed: 11, deadline: uniform(20*time.Millisecond, 200*time.Millisecond)}
	as := l.arrivals()
	if !slices.Equal(as, l.arrivals()) {
		t.Error("the same seed gave other arrivals")
	}
	var sum, squares float64
	for i := 1; i < len(as); i++ {
		gap := (as[i].at - as[i-1].at).Seconds()
		sum, squares = sum+gap, squares+gap*gap
		if as[i].deadline < 20*time.Millisecond || as[i].deadline >= 200*time.Millisecond {
			t.Fatalf("deadline %v", as[i].deadline)
		}
	}
	n := float64(len(as) - 1)
	mean := sum / n
	if spread := math.Sqrt(squares/n-mean*mean) / mean; math.Abs(spread-1) > 0.05 || math.Abs(mean*2000-1) > 0.05 {
		t.Errorf("gaps of %.3f ms with a spread of %.3f of that, want 0.5 ms and 1: exponential", 1000*mean, spread)
	}
}

func TestTallyTellsTheEndingsApart(t *testing.T) {
	u := newTally(time.Second)
	at := time.Now()
	a := arrival{deadline: 100 * time.Millisecond}
	in, out := at.Add(50*time.Millisecond), at.Add(150*time.Millisecond)
	u.add(a, at, 0, at, in, done, nil)
	u.add(a, at, 0, at, out, done, nil) // committed, but too late
	u.add(a, at, 0, at, out, gaveUp, context.DeadlineExceeded)
	u.add(a, at, 0, time.Time{}, out, gaveUp, context.DeadlineExceeded)
	u.add(a, at, 0, time.Time{}, in, refused, errFull)
	u.add(a, at, 0, time.Time{}, in, timedOut, errWaited)
	u.add(a, at, 0, time.Time{}, in, failed, errors.New("too many clients"))
	if u.ok != 1 || u.late != 2 || u.expired != 1 || u.refused != 1 || u.timedOut != 1 || u.failed != 1 || u.arrivals != 7 {
		t.Errorf("%+v", u)
	}
	if got := float64(u.used.ValueAtQuantile(100)) / 1000; got < 1.49 || got > 1.51 {
		t.Errorf("the slowest admitted one took %.2f of its deadline, want 1.5", got)
	}
	both := newTally(0)
	both.merge(u)
	both.merge(u)
	if both.ok != 2 || both.arrivals != 14 || both.latency.TotalCount() != 2 || both.commonest() != "too many clients" || both.goodput() != 1 {
		t.Errorf("merged: %+v", both)
	}
}

func TestRecoveryIsWhenItStaysAsBefore(t *testing.T) {
	shares := []float64{100, 100, 0, 0, 95, 10, 92, 95, 99, 100}
	if got := recoveredAfter(shares, 100, 4); got != 0.5 {
		t.Errorf("recovered after %v s, want 0.5: one good bucket in between is not it", got)
	}
	if got := recoveredAfter(shares[:8], 100, 4); got != -1 {
		t.Errorf("recovered after %v s, want -1: not seen", got)
	}
}

// sample writes a CSV file of every kind, as an experiment would.
func sample(t *testing.T, dir string) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	write := func(tb *table) {
		if err := tb.write(dir); err != nil {
			t.Fatal(err)
		}
	}
	row := func(tb *table, leading ...any) {
		for len(leading) < len(tb.columns) {
			leading = append(leading, 1+99*r.Float64())
		}
		tb.add(leading...)
	}
	m := newTable("machine", "what", "is")
	m.add("processors", 2)
	m.add("short", true)
	write(m)
	tables := map[string]*table{}
	for name, columns := range columnsOf {
		tables[name] = newTable(name, columns...)
	}
	for _, p := range peerOrder {
		for _, x := range []any{0.25, 0.5, 1.0, 3.0, 10.0} {
			row(tables["overload"], p, x, 250.0)
		}
		row(tables["storm"], p, 4)
		row(tables["isolation"], p, false)
		row(tables["isolation"], p, true)
		row(tables["tail"], p)
		row(tables["recovery"], p, 5.0)
		for q := 0.0; q <= 100; q += 10 {
			row(tables["tail_waits"], p, q)
			row(tables["recovery_timeline"], p, q/10-2)
		}
		for _, network := range []string{"loopback", "0.5 ms each way"} {
			for _, n := range []int{1, 8, 64} {
				row(tables["steady"], network, n, p)
			}
		}
		row(tables["waiters"], p, 10_000)
		for _, op := range []string{"acquire and release", "refuse", "hand over"} {
			for _, n := range []int{1, 2, 8, 64} {
				row(tables["gate"], op, n, p)
			}
		}
	}
	for _, tb := range tables {
		write(tb)
	}
}

// Plots, ratios and README are made of the CSV files alone: no server runs here.
func TestPlotsAndReadmeAreMadeOfCSVAlone(t *testing.T) {
	defer func(was int) { dpi = was }(dpi)
	dpi = 48
	dir := t.TempDir()
	sample(t, dir)
	if err := drawAll(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"overload", "overload_latency", "overload_fate", "storm", "isolation", "tail", "recovery", "recovery_timeline", "steady", "waiters", "gate"} {
		f, err := os.Open(filepath.Join(dir, name+".png"))
		if err != nil {
			t.Error(err)
			continue
		}
		img, err := png.Decode(f)
		_ = f.Close()
		if err != nil {
			t.Errorf("%s.png: %v", name, err)
			continue
		}
		colors := make(map[any]bool)
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x += 3 {
			for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y += 3 {
				colors[img.At(x, y)] = true
			}
		}
		if w := img.Bounds().Dx(); w != 400 || len(colors) < 5 {
			t.Errorf("%s.png is %d wide with %d colours, want 400 and something on it", name, w, len(colors))
		}
		svg, err := os.ReadFile(filepath.Join(dir, name+".svg"))
		if err != nil || !bytes.Contains(svg, []byte(gated)) {
			t.Errorf("%s.svg does not name %s: %v", name, gated, err)
		}
	}

	ratios, err := ratioTable(dir)
	if err != nil || len(ratios.where("peer", plain)) < 20 {
		t.Errorf("%d ratios to %s: %v", len(ratios.where("peer", plain)), plain, err)
	}

	readme := filepath.Join(dir, "README.md")
	if err := os.WriteFile(readme, []byte("before\n"+beginCost+"old\n"+endCost+"after\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time finds the first one's text
		if err := writeReadme(readme, dir); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	s := string(text)
	if !strings.HasPrefix(s, "before\n"+beginCost+"## Cost\n") || !strings.HasSuffix(s, endCost+"after\n") || strings.Contains(s, "old\n") {
		t.Errorf("the rest of the README is not as it was, or the section is not there:\n%s", s)
	}
	want, ok := mustRead(t, dir, "storm").value("goodput_per_s", "peer", gated)
	if !ok || !strings.Contains(s, "| "+short(want)+" |") || strings.Count(s, "**"+gated+"**") != 8 {
		t.Errorf("the figures of the CSV files are not in the README:\n%s", s)
	}
	if !strings.Contains(s, "a short run") || !strings.Contains(s, "Why: ") {
		t.Error("the README keeps silent on what is short or lost")
	}
}

func mustRead(t *testing.T, dir, name string) *table {
	t.Helper()
	tb, err := readTable(dir, name)
	if err != nil || tb == nil {
		t.Fatal(name, err)
	}
	return tb
}

func TestCSVHasItsShape(t *testing.T) {
	dir := t.TempDir()
	tb := newTable("shape", "peer", "load", "failure")
	tb.add(plain, 0.25, `FATAL: "sorry", too many clients`)
	tb.add(gated, 10.0, "")
	if err := tb.write(dir); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "shape.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := csv.NewReader(f).ReadAll() // an error if a row has another number of fields
	if err != nil || len(all) != 3 || all[0][0] != "peer" || all[1][2] != `FATAL: "sorry", too many clients` || all[2][1] != "10" {
		t.Errorf("%q %v", all, err)
	}
	back := mustRead(t, dir, "shape")
	if v, ok := back.value("load", "peer", gated); !ok || v != 10 {
		t.Errorf("read back: %v %v", v, ok)
	}
	if rest, err := filepath.Glob(filepath.Join(dir, "*.tmp")); err != nil || len(rest) > 0 {
		t.Errorf("left behind: %v %v", rest, err)
	}
	if none, err := readTable(dir, "absent"); none != nil || err != nil {
		t.Errorf("what was not measured is %v, %v, want nothing", none, err)
	}
	defer func() {
		if recover() == nil {
			t.Error("a row that does not fit was taken")
		}
	}()
	tb.add("too few")
}

func TestAnExperimentThatFailsLeavesTheOthersAlone(t *testing.T) {
	_, err := attempt(t.Context(), experiment{id: "x", run: func(context.Context, *bench, bool) ([]*table, error) {
		panic("as a bug would")
	}}, nil, true)
	if err == nil || !strings.Contains(err.Error(), "as a bug would") {
		t.Errorf("err = %v, want the panic's text", err)
	}
}
