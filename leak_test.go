package pgxgated

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// lockedBuffer is written by timers and read by the test.
type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) lines(text string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

func leakGate(t *testing.T, threshold time.Duration) (*Gate, *lockedBuffer) {
	t.Helper()
	log := &lockedBuffer{}
	g, err := NewGate("g", Limits{Running: 3, Waiting: 3, MaxWait: time.Hour}, WithLeakThreshold(threshold),
		WithWorkloads(map[string]Limits{"batch": {Running: 2, Waiting: 2}}), WithLogger(slog.New(slog.NewTextHandler(log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	return g, log
}

func TestLeasesAreReportedWhenTheyBecomeOverdueAndWhenTheyComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := leakGate(t, time.Second)
		ctx := context.Background()
		take := func(ctx context.Context) *Permit {
			p, err := g.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		a := take(WithWorkload(ctx, "batch"))
		time.Sleep(600 * time.Millisecond)
		b := take(ctx)
		short := take(ctx)
		time.Sleep(399 * time.Millisecond)
		synctest.Wait()
		if n := len(log.lines("held longer")); n != 0 {
			t.Errorf("%d reports before the threshold", n)
		}
		short.Release()
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if said := log.lines("held longer"); len(said) != 1 || !strings.Contains(said[0], "workload=batch") ||
			!strings.Contains(said[0], "held=1s") || !strings.Contains(said[0], "leak_test.go") {
			t.Errorf("at the threshold of the first: %q", said)
		}
		time.Sleep(600 * time.Millisecond)
		synctest.Wait()
		if n := len(log.lines("held longer")); n != 2 {
			t.Errorf("%d reports at the threshold of the second", n)
		}
		s := g.Stats()
		if s.LeasesOverdue != 2 || s.Running != 2 || s.OldestHoldWorkload != "batch" || !strings.Contains(s.OldestHoldSite, "leak_test.go") {
			t.Errorf("overdue %d, running %d, oldest of %q at %q", s.LeasesOverdue, s.Running, s.OldestHoldWorkload, s.OldestHoldSite)
		}
		time.Sleep(time.Hour)
		a.Release()
		a.Release()
		b.Release()
		if said := log.lines("returned after"); len(said) != 2 || !strings.Contains(said[0], "returned after 1h0m1.6s") {
			t.Errorf("when they came back: %q", said)
		}
		if n := len(log.lines("held longer")); n != 2 {
			t.Errorf("%d reports in the end", n)
		}
		if s := g.Stats(); s.LeasesOverdue != 0 || s.Running != 0 || s.OldestHoldSite != "" {
			t.Errorf("in the end: overdue %d, running %d, oldest at %q", s.LeasesOverdue, s.Running, s.OldestHoldSite)
		}
		// A slot that is used again has nothing of the lease before.
		take(ctx).Release()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if n := len(log.lines("held longer")); n != 2 {
			t.Errorf("%d reports after a short one", n)
		}
	})
}

func TestALeaseThatWaitedForItsPermitIsReportedFromTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := leakGate(t, time.Second)
		if err := g.SetLimits(Limits{Running: 2, Waiting: 2, MaxWait: time.Hour}); err != nil {
			t.Fatal(err)
		}
		a, _ := g.Acquire(context.Background())
		b, _ := g.Acquire(context.Background())
		got := make(chan *Permit)
		go func() {
			p, err := g.Acquire(context.Background())
			if err != nil {
				t.Error(err)
			}
			got <- p
		}()
		time.Sleep(900 * time.Millisecond)
		a.Release()
		c := <-got
		b.Release()
		time.Sleep(900 * time.Millisecond)
		synctest.Wait()
		if n := len(log.lines("held longer")); n != 0 {
			t.Errorf("%d reports: its wait was counted", n)
		}
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if n := len(log.lines("held longer")); n != 1 {
			t.Errorf("%d reports", n)
		}
		c.Release()
	})
}

func TestADrainingLeaseIsReportedAsSuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := leakGate(t, time.Second)
		h, err := g.acquire(context.Background(), kindTx, nil)
		if err != nil {
			t.Fatal(err)
		}
		g.leaks.ran(h, "-- name: Delete\nDELETE FROM t WHERE secret = 'x'")
		g.drain(h)
		time.Sleep(time.Second)
		synctest.Wait()
		said := log.lines("held longer")
		if len(said) != 1 || !strings.Contains(said[0], "draining=true") || !strings.Contains(said[0], "last_statement=delete") ||
			!strings.Contains(said[0], "kind=tx") || strings.Contains(said[0], "secret") {
			t.Errorf("%q", said)
		}
		g.release(h, false)
	})
}

func TestLeakWatchDoesNotAllocatePerLease(t *testing.T) {
	g, _ := leakGate(t, time.Hour)
	n := testing.AllocsPerRun(100, func() {
		h, err := g.acquire(context.Background(), kindTx, nil)
		if err != nil {
			t.Fatal(err)
		}
		g.leaks.ran(h, "select 1")
		g.release(h, true)
	})
	if n != 0 {
		t.Errorf("%v allocations a lease", n)
	}
	g.leaks.timer.Stop()
}

func TestWithoutAThresholdNothingWatches(t *testing.T) {
	g, _ := leakGate(t, 0)
	if g.leaks != nil {
		t.Fatal("a leak watch")
	}
	p, err := g.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if s := g.Stats(); s.OldestHoldSite != "" || g.slots[0].trace != nil {
		t.Error("a stack was kept")
	}
	p.Release()
}

func TestStatementKindIsTheFirstWord(t *testing.T) {
	for query, want := range map[string]string{
		"select 1":                               "select",
		"  \n(SELECT 1) union select 2":          "select",
		"/* a /* nested */ comment */ Insert t":  "insert",
		"-- one\n-- two\nWITH x AS (SELECT 1) …": "with",
		";;update t set a = 1":                   "update",
		"update":                                 "update",
		"selectivity":                            "other",
		"password='hunter2'":                     "other",
		"":                                       "other",
		"-- only a comment":                      "other",
		"/* unterminated":                        "other",
		"BEGIN":                                  "begin",
		"müll":                                   "other",
	} {
		if got := statementKindOf(query).String(); got != want {
			t.Errorf("%q: %s, want %s", query, got, want)
		}
	}
}

func FuzzStatementKind(f *testing.F) {
	f.Add("/*/* */ select")
	f.Add("--\n(")
	f.Fuzz(func(t *testing.T, query string) { _ = statementKindOf(query).String() })
}
