package metrics_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/metrics"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newGate(t testing.TB, name string, l pgxgated.Limits, opts ...pgxgated.GateOption) *pgxgated.Gate {
	t.Helper()
	g, err := pgxgated.NewGate(name, l, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.Close()
		if s := g.Stats(); s.Running != 0 || s.Waiting != 0 || s.Draining != 0 {
			t.Errorf("at the end: running %d, waiting %d, draining %d", s.Running, s.Waiting, s.Draining)
		}
	})
	return g
}

// scrape is everything that a registry gathers, by name and labels: the value of a gauge or counter, the count of a
// histogram.
type scrape map[string]float64

func gather(t testing.TB, r prometheus.Gatherer) scrape {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	s := make(scrape)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				if l.GetName() != "gate" {
					labels = append(labels, l.GetName()+"="+l.GetValue())
				}
			}
			key := strings.TrimPrefix(f.GetName(), "pgxgated_") + "{" + strings.Join(labels, ",") + "}"
			switch {
			case m.Gauge != nil:
				s[key] = m.GetGauge().GetValue()
			case m.Counter != nil:
				s[key] = m.GetCounter().GetValue()
			default:
				s[key] = float64(m.GetHistogram().GetSampleCount())
				s[key+" sum"] = m.GetHistogram().GetSampleSum()
			}
		}
	}
	return s
}

func registry(t testing.TB, gates ...*pgxgated.Gate) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(metrics.NewCollector(gates...)); err != nil {
		t.Fatal(err)
	}
	return r
}

func (s scrape) want(t testing.TB, key string, v float64) {
	t.Helper()
	if got, ok := s[key]; !ok || got != v {
		t.Errorf("%s is %v (%v), want %v", key, got, ok, v)
	}
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func TestSeriesSayWhatStatsSays(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 2, Waiting: 3, MaxWait: time.Minute},
		pgxgated.WithWorkloads(map[string]pgxgated.Limits{"batch": {Running: 1, Waiting: 2}}))
	r := registry(t, g)
	ctx := context.Background()
	batch := pgxgated.WithWorkload(ctx, "batch")

	a, err := g.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	b, err := g.Acquire(batch)
	if err != nil {
		t.Fatal(err)
	}
	ends := make(chan error, 2)
	wait, cancel := context.WithCancel(batch)
	for range 2 {
		go func() {
			_, err := g.Acquire(wait)
			ends <- err
		}()
	}
	eventually(t, "two wait", func() bool { return g.Stats().Waiting == 2 })
	if _, err := g.Acquire(batch); !errors.Is(err, pgxgated.ErrAdmissionFull) {
		t.Fatal(err)
	}
	if _, err := g.Acquire(pgxgated.WithMaxWait(ctx, 0)); !errors.Is(err, pgxgated.ErrWaitTimeout) {
		t.Fatal(err)
	}
	if _, err := g.Acquire(pgxgated.Bypass(ctx)); err != nil {
		t.Fatal(err)
	}

	s := gather(t, r)
	for key, v := range map[string]float64{
		"limit{permit=running,workload=}": 2, "limit{permit=admission,workload=}": 5,
		"limit{permit=running,workload=batch}": 1, "limit{permit=admission,workload=batch}": 3,
		"available_permits{permit=running,workload=}": 0, "available_permits{permit=admission,workload=}": 1,
		"available_permits{permit=running,workload=batch}": 0, "available_permits{permit=admission,workload=batch}": 0,
		"max_wait_seconds{}": 60, "running{workload=}": 1, "running{workload=batch}": 1,
		"waiting{workload=}": 0, "waiting{workload=batch}": 2, "draining{workload=}": 0, "leases_overdue{}": 0,
		"acquires_total{outcome=admitted,workload=}": 1, "acquires_total{outcome=admitted,workload=batch}": 1,
		"acquires_total{outcome=admission_full,workload=}": 0, "acquires_total{outcome=admission_full,workload=batch}": 1,
		"acquires_total{outcome=wait_timeout,workload=}": 1, "acquires_total{outcome=canceled,workload=batch}": 0,
		"bypassed_total{}": 1, "gate_wait_seconds{workload=}": 1, "gate_wait_seconds{workload=batch}": 1,
		"hold_seconds{workload=}": 0, "oldest_wait_seconds{workload=}": 0,
	} {
		s.want(t, key, v)
	}
	if s["oldest_wait_seconds{workload=batch}"] <= 0 || s["oldest_hold_seconds{workload=}"] <= s["oldest_hold_seconds{workload=batch}"] {
		t.Errorf("oldest wait and hold: %v", s)
	}
	st := g.Stats()
	if st.OldestWaitWorkload != "batch" || st.OldestHoldWorkload != "" || st.OldestHoldSite != "" {
		t.Errorf("oldest wait in %q, hold in %q at %q", st.OldestWaitWorkload, st.OldestHoldWorkload, st.OldestHoldSite)
	}

	cancel()
	for range 2 {
		if err := <-ends; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	a.Release()
	b.Release()
	s = gather(t, r)
	for key, v := range map[string]float64{
		"acquires_total{outcome=canceled,workload=batch}": 2, "gate_wait_seconds{workload=batch}": 3,
		"hold_seconds{workload=}": 1, "hold_seconds{workload=batch}": 1, "oldest_hold_seconds{workload=batch}": 0,
		"running{workload=}": 0, "waiting{workload=batch}": 0, "available_permits{permit=admission,workload=}": 5,
	} {
		s.want(t, key, v)
	}
	st = g.Stats()
	for sum, want := range map[float64]time.Duration{
		s["gate_wait_seconds{workload=} sum"] + s["gate_wait_seconds{workload=batch} sum"]: st.WaitTime,
		s["hold_seconds{workload=} sum"] + s["hold_seconds{workload=batch} sum"]:           st.HoldTime,
	} {
		if got := time.Duration(sum * 1e9); (got - want).Abs() > time.Microsecond {
			t.Errorf("sum %v, Stats has %v", got, want)
		}
	}
}

func TestObserveModeReportsWhatWouldBeRefused(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 1}, pgxgated.WithMode(pgxgated.Observe))
	r := registry(t, g)
	var permits []*pgxgated.Permit
	for range 3 {
		p, err := g.Acquire(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		permits = append(permits, p)
	}
	s := gather(t, r)
	s.want(t, "would_reject_total{reason=admission_full,workload=}", 2)
	s.want(t, "would_reject_total{reason=wait_timeout,workload=}", 0)
	s.want(t, "acquires_total{outcome=admitted,workload=}", 3)
	for _, p := range permits {
		p.Release()
	}
}

// Counters are exact: 100,000 calls that end in every way, scraped meanwhile.
func TestSumOfOutcomesIsTheNumberOfCalls(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 4, Waiting: 8, MaxWait: 200 * time.Microsecond},
		pgxgated.WithWorkloads(map[string]pgxgated.Limits{"a": {Running: 3, Waiting: 4}, "b": {Running: 1, Waiting: 2}}))
	r := registry(t, g)
	const callers, calls = 50, 2000
	var answered [5]atomic.Int64 // admitted, full, timeout, canceled, bypassed
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range calls {
				ctx, cancel := context.WithCancel(context.Background())
				switch rand.IntN(4) {
				case 0:
					ctx = pgxgated.WithWorkload(ctx, "a")
				case 1:
					ctx = pgxgated.WithWorkload(ctx, "b")
				}
				bypass := false
				switch rand.IntN(10) {
				case 0:
					cancel()
				case 1:
					time.AfterFunc(time.Duration(rand.IntN(200))*time.Microsecond, cancel)
				case 2:
					ctx, bypass = pgxgated.Bypass(ctx), true
				case 3:
					ctx = pgxgated.WithMaxWait(ctx, 0)
				}
				p, err := g.Acquire(ctx)
				switch {
				case err == nil && bypass:
					answered[4].Add(1)
				case err == nil:
					answered[0].Add(1)
					p.Release()
				case errors.Is(err, pgxgated.ErrAdmissionFull):
					answered[1].Add(1)
				case errors.Is(err, pgxgated.ErrWaitTimeout):
					answered[2].Add(1)
				case errors.Is(err, context.Canceled):
					answered[3].Add(1)
				default:
					t.Error(err)
				}
				cancel()
			}
		})
	}
	stop := make(chan struct{})
	scraped := make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				scraped <- n
				return
			case <-time.After(5 * time.Millisecond):
				gather(t, r)
				n++
			}
		}
	}()
	wg.Wait()
	close(stop)
	if <-scraped == 0 {
		t.Error("never scraped under load")
	}

	s := gather(t, r)
	total := s["bypassed_total{}"]
	byOutcome := map[string]float64{"bypassed": total}
	var holds, waits float64
	for _, w := range []string{"", "a", "b"} {
		for _, o := range []string{"admitted", "admission_full", "wait_timeout", "deadline_short", "canceled", "closed"} {
			n := s["acquires_total{outcome="+o+",workload="+w+"}"]
			byOutcome[o] += n
			total += n
		}
		holds += s["hold_seconds{workload="+w+"}"]
		waits += s["gate_wait_seconds{workload="+w+"}"]
	}
	if total != callers*calls {
		t.Errorf("sum of outcomes %v, calls %v", total, callers*calls)
	}
	for i, o := range []string{"admitted", "admission_full", "wait_timeout", "canceled", "bypassed"} {
		if got := answered[i].Load(); float64(got) != byOutcome[o] {
			t.Errorf("%s: counted %v, answered %v", o, byOutcome[o], got)
		}
	}
	if holds != byOutcome["admitted"] {
		t.Errorf("hold_seconds has %v, admitted %v", holds, byOutcome["admitted"])
	}
	if waits < byOutcome["admitted"] || waits > total {
		t.Errorf("gate_wait_seconds has %v, admitted %v, calls %v", waits, byOutcome["admitted"], total)
	}
}

func TestG01RegisteringTwiceIsAnErrorAndNeverAPanic(t *testing.T) {
	a := newGate(t, "a", pgxgated.Limits{Running: 1})
	b := newGate(t, "b", pgxgated.Limits{Running: 1})
	r := registry(t, a, a, nil, a)
	if n, err := testutil.GatherAndCount(r, "pgxgated_max_wait_seconds"); n != 1 || err != nil {
		t.Errorf("a gate given twice is reported %d times (%v)", n, err)
	}
	if err := r.Register(metrics.NewCollector(a)); err == nil {
		t.Error("the same gate registered twice")
	}
	if err := r.Register(metrics.NewCollector(a, b)); err == nil {
		t.Error("a gate registered twice, the second time with another")
	}
	if err := r.Register(metrics.NewCollector(b)); err != nil {
		t.Errorf("another gate: %v", err)
	}
	if n, err := testutil.GatherAndCount(r, "pgxgated_max_wait_seconds"); n != 2 || err != nil {
		t.Errorf("two gates are reported as %d (%v)", n, err)
	}
	other := prometheus.NewRegistry()
	if err := other.Register(metrics.NewCollector(a)); err != nil {
		t.Errorf("another registry: %v", err)
	}
	p, err := a.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	p.Release()
	for _, r := range []*prometheus.Registry{r, other} {
		n := 0.0
		for k, v := range gather(t, r) {
			if k == "hold_seconds{workload=}" {
				n = max(n, v)
			}
		}
		if n > 1 {
			t.Errorf("one permit is %v holds", n)
		}
	}
	_ = metrics.NewCollector() // nothing to report is no error
}

func TestG01GatesWithOneNameAreNumbered(t *testing.T) {
	r := registry(t, newGate(t, "orders", pgxgated.Limits{Running: 1}), newGate(t, "orders", pgxgated.Limits{Running: 2}), newGate(t, "or\xffders", pgxgated.Limits{Running: 3}))
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "pgxgated_limit" && label(m, "permit") == "running" {
				got[label(m, "gate")] = m.GetGauge().GetValue()
			}
		}
	}
	if len(got) != 3 || got["orders"] != 1 || got["orders#2"] != 2 || got["or\uFFFDders"] != 3 {
		t.Fatal(got)
	}
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

func TestG01ClosingAGateTakesItsSeriesAway(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	for i := range 1000 {
		g, err := pgxgated.NewGate("g", pgxgated.Limits{Running: 1})
		if err != nil {
			t.Fatal(err)
		}
		c := metrics.NewCollector(g)
		if err := r.Register(c); err != nil {
			t.Fatal(err)
		}
		look := i%100 == 0 // gathering 1000 times takes seconds
		if look && len(gather(t, r)) == 0 {
			t.Fatal("no series while open")
		}
		g.Close()
		if look {
			if s := gather(t, r); len(s) != 0 {
				t.Fatal("series after Close: ", s)
			}
		}
		if !r.Unregister(c) {
			t.Fatal("not unregistered")
		}
	}
}

func TestG01NothingIsRegisteredOnImport(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 1})
	_ = metrics.NewCollector(g)
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "pgxgated_") {
			t.Errorf("%s is in the default registry", f.GetName())
		}
	}
}

func TestG02LabelsAreFixed(t *testing.T) {
	inner := sql.OpenDB(fakeConnector{})
	defer inner.Close()
	db, err := pgxgated.OpenDB(inner, pgxgated.WithLimits(pgxgated.Limits{Running: 4, Waiting: 4, MaxWait: time.Minute}), pgxgated.WithGateName("g02"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	r := registry(t, pgxgated.GateOf(db))
	before := gather(t, r)
	for i := range 10_000 {
		ctx, cancel := context.WithCancel(context.Background())
		if i%10 == 0 {
			cancel()
		}
		if _, err := db.ExecContext(ctx, fmt.Sprintf("fail with secret%d", i)); err == nil {
			t.Fatal("no error")
		}
		cancel()
	}
	after := gather(t, r)
	if len(before) != len(after) {
		t.Errorf("%d series became %d", len(before), len(after))
	}
	for k := range after {
		if strings.Contains(k, "secret") {
			t.Error(k)
		}
	}
	after.want(t, "sql_errors_total{class=no_answer}", 9000)
	after.want(t, "sql_seconds{op=exec}", 9000)
	after.want(t, "acquires_total{outcome=admitted,workload=}", 9000)
}

// With the server down the gate admits and the permits come back: that there are no connections must show.
func TestConnectionsThatCannotBeHadShow(t *testing.T) {
	inner := sql.OpenDB(fakeConnector{})
	defer inner.Close()
	inner.SetMaxOpenConns(1)
	db, err := pgxgated.OpenDB(inner, pgxgated.WithPoolWait(20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	taken, err := inner.Conn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	r := registry(t, pgxgated.GateOf(db))
	if _, err := db.Exec("x"); !errors.Is(err, pgxgated.ErrPoolTimeout) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if _, err := db.ExecContext(ctx, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if err := taken.Close(); err != nil {
		t.Error(err)
	}
	s := gather(t, r)
	s.want(t, "pool_errors_total{reason=timeout}", 1)
	s.want(t, "pool_errors_total{reason=canceled}", 1)
	s.want(t, "pool_errors_total{reason=failed}", 0)

	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that nobody listens on any more
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	down, err := sql.Open("pgx-gated", fmt.Sprintf("postgres://app@%s/orders?pool_max_conns=2&sslmode=disable", l.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	defer down.Close()
	r = registry(t, pgxgated.GateOf(down))
	if _, err := down.Exec("select 1"); err == nil {
		t.Error("a server that is not there answered")
	}
	s = gather(t, r)
	s.want(t, "pool_errors_total{reason=failed}", 1)
	s.want(t, "running{workload=}", 0)
}

func TestG02NoPasswordInTheLabelOfAGate(t *testing.T) {
	for _, dsn := range []string{
		"postgres://app:hunter2@h1:5432,h2:5433/orders?pool_max_conns=4",
		"host=/var/run/postgresql user=app password=hunter2 dbname='a b' pool_max_conns=4",
		"postgres://app:hunter2@[::1]:5432/orders?pool_max_conns=4&application_name=x%22y",
	} {
		c, err := pgxgated.NewConnector(dsn)
		if err != nil {
			t.Fatal(err)
		}
		families, err := registry(t, c.Gate()).Gather()
		if err != nil || len(families) == 0 {
			t.Fatal(len(families), err)
		}
		if text := fmt.Sprint(families); strings.Contains(text, "hunter2") {
			t.Errorf("password in the series of %s", dsn)
		}
		c.Close()
	}
}

func TestLint(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 1}, pgxgated.WithMode(pgxgated.Observe))
	problems, err := testutil.CollectAndLint(metrics.NewCollector(g))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The README has a row for each metric: | `name` | `label`, `label` | meaning |.
func TestEveryMetricIsInTheREADMEAndTheOtherWayRound(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(readme), "<!-- metrics:begin -->")
	table, _, ok2 := strings.Cut(table, "<!-- metrics:end -->")
	if !ok || !ok2 {
		t.Fatal("README.md has no metrics:begin and metrics:end")
	}
	documented := make(map[string]string)
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([^|]*)\\|").FindAllStringSubmatch(table, -1) {
		documented[row[1]] = strings.NewReplacer("`", "", " ", "").Replace(row[2])
	}
	g := newGate(t, "g", pgxgated.Limits{Running: 1})
	descs := make(chan *prometheus.Desc, 1000)
	metrics.NewCollector(g).Describe(descs)
	close(descs)
	inCode := regexp.MustCompile(`fqName: "pgxgated_(\w+)".*variableLabels: \{([^}]*)\}`)
	for d := range descs {
		m := inCode.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatal(d)
		}
		if labels, ok := documented[m[1]]; !ok {
			t.Errorf("%s is not in the README", m[1])
		} else if labels != m[2] {
			t.Errorf("%s has the labels %q, in the README %q", m[1], m[2], labels)
		}
		delete(documented, m[1])
	}
	for name := range documented {
		t.Errorf("%s is in the README only", name)
	}
}

// Both kinds of buckets tell the same.
func TestHistogramsAreClassicAndNative(t *testing.T) {
	g := newGate(t, "g", pgxgated.Limits{Running: 1, Waiting: 1, MaxWait: 30 * time.Millisecond})
	r := registry(t, g)
	p, err := g.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Acquire(context.Background()); !errors.Is(err, pgxgated.ErrWaitTimeout) {
		t.Fatal(err)
	}
	p.Release()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "pgxgated_gate_wait_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 2 || h.GetZeroCount() != 1 || h.GetSampleSum() < .03 {
			t.Errorf("count %d, zero %d, sum %v", h.GetSampleCount(), h.GetZeroCount(), h.GetSampleSum())
		}
		for _, b := range h.GetBucket() {
			want := uint64(1) // the one that did not wait
			if h.GetSampleSum() <= b.GetUpperBound() {
				want = 2
			}
			if b.GetCumulativeCount() != want {
				t.Errorf("up to %v: %d, want %d", b.GetUpperBound(), b.GetCumulativeCount(), want)
			}
		}
		if len(h.GetPositiveSpan()) != 1 || len(h.GetPositiveDelta()) != 1 || h.GetPositiveDelta()[0] != 1 {
			t.Errorf("native: %v %v", h.GetPositiveSpan(), h.GetPositiveDelta())
		}
		return
	}
	t.Error("no gate_wait_seconds")
}

// fakeConnector is of a driver that does nothing, and fails what begins with "fail".
type fakeConnector struct{}

func (fakeConnector) Connect(context.Context) (driver.Conn, error) { return fakeConn{}, nil }
func (fakeConnector) Driver() driver.Driver                        { return nil }

type fakeConn struct{}

func (fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("no") }
func (fakeConn) PrepareContext(context.Context, string) (driver.Stmt, error) {
	return nil, errors.New("no")
}
func (fakeConn) Close() error              { return nil }
func (fakeConn) Begin() (driver.Tx, error) { return fakeConn{}, nil }
func (fakeConn) Commit() error             { return nil }
func (fakeConn) Rollback() error           { return nil }
func (fakeConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return fakeConn{}, nil
}
func (fakeConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return nil, io.EOF
}
func (fakeConn) ExecContext(_ context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	if strings.HasPrefix(query, "fail") {
		return nil, errors.New(query)
	}
	return driver.RowsAffected(0), nil
}

// BenchmarkCost shows what metrics cost an operation. Batches with and without take turns, and the fastest of each count,
// so that a noisy machine disturbs both alike.
func BenchmarkCost(b *testing.B) {
	ctx := context.Background()
	type operation func(*sql.DB, *pgxgated.Gate) error
	permit := func(_ *sql.DB, g *pgxgated.Gate) error {
		p, err := g.Acquire(ctx)
		if err != nil {
			return err
		}
		p.Release()
		return nil
	}
	statement := func(db *sql.DB, _ *pgxgated.Gate) error {
		_, err := db.ExecContext(ctx, "update")
		return err
	}
	transaction := func(db *sql.DB, _ *pgxgated.Gate) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "update"); err != nil {
			return err
		}
		return tx.Commit()
	}
	var dbs [3]*sql.DB
	var gates [3]*pgxgated.Gate
	for i, opts := range [][]pgxgated.Option{nil, nil, {pgxgated.WithLeakThreshold(time.Hour)}} {
		inner := sql.OpenDB(fakeConnector{})
		defer inner.Close()
		db, err := pgxgated.OpenDB(inner, append(opts, pgxgated.WithLimits(pgxgated.Limits{Running: 64, Waiting: 64}))...)
		if err != nil {
			b.Fatal(err)
		}
		defer db.Close()
		dbs[i], gates[i] = db, pgxgated.GateOf(db)
	}
	metrics.NewCollector(gates[1])
	for _, bench := range []struct {
		name string
		op   operation
	}{{"Permit", permit}, {"Statement", statement}, {"Transaction", transaction}} {
		b.Run(bench.name, func(b *testing.B) {
			const batch = 200
			best := [3]time.Duration{time.Hour, time.Hour, time.Hour}
			n := 0
			for b.Loop() {
				if n++; n%batch != 0 {
					continue
				}
				for i := range best {
					start := time.Now()
					for range batch {
						if err := bench.op(dbs[i], gates[i]); err != nil {
							b.Fatal(err)
						}
					}
					best[i] = min(best[i], time.Since(start))
				}
			}
			b.ReportMetric(float64(best[0])/batch, "off-ns")
			b.ReportMetric(float64(best[1]-best[0])/batch, "metrics-ns")
			b.ReportMetric(float64(best[2]-best[0])/batch, "leak-threshold-ns")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func TestMetricsDoNotAllocateOnTheAdmittedPath(t *testing.T) {
	inner := sql.OpenDB(fakeConnector{})
	defer inner.Close()
	db, err := pgxgated.OpenDB(inner, pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 1}), pgxgated.WithGateName("allocs"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ctx := context.Background()
	statement := func() {
		if _, err := db.ExecContext(ctx, "update"); err != nil {
			t.Fatal(err)
		}
	}
	off := testing.AllocsPerRun(200, statement)
	metrics.NewCollector(pgxgated.GateOf(db))
	if on := testing.AllocsPerRun(200, statement); on > off {
		t.Errorf("a statement: %v allocations, %v without metrics", on, off)
	}
}
