//go:build linux

package observability

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.M{M: m}) }

// need skips without a program of the Debian package prometheus; in CI it fails.
func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatalf("%s is not installed (Debian: apt-get install prometheus)", program)
	}
	if err != nil {
		t.Skipf("%s is not installed (Debian: apt-get install prometheus)", program)
	}
	return path
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func newService(t *testing.T) *Service {
	t.Helper()
	s, err := NewService(t.Context(), pgtest.Shared(t).Database(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, "everything is given back", func() bool {
			st := s.Gate.Stats()
			return st.Running == 0 && st.Waiting == 0 && st.Draining == 0 && s.Pool.Stat().AcquiredConns() == 0
		})
		s.Close()
	})
	return s
}

func TestRules(t *testing.T) {
	promtool := need(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "rules.yml"}, {"test", "rules", "rules_test.yml"}} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

func TestEveryAlertIsTestedAndSaysWhatToDo(t *testing.T) {
	rules, err := os.ReadFile("rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("rules_test.yml")
	if err != nil {
		t.Fatal(err)
	}
	alerts := strings.Split(string(rules), "- alert: ")[1:]
	if len(alerts) == 0 {
		t.Fatal("no alerts")
	}
	for _, a := range alerts {
		name, body, _ := strings.Cut(a, "\n")
		if !strings.Contains(body, "decision: ") {
			t.Errorf("%s asks for no decision", name)
		}
		if !strings.Contains(string(tests), "alertname: "+name+"\n") {
			t.Errorf("%s is not tested to fire", name)
		}
	}
}

// Under each kind of load the dashboard's own queries, on a real server that scrapes a service, point at the wait that
// hurts; and every query of the dashboard, and every recording rule, has series.
func TestTheDashboardPointsAtTheWaitThatHurts(t *testing.T) {
	need(t, "prometheus")
	ctx := t.Context()
	s := newService(t)
	p, err := StartPrometheus(ctx, s.Addr, "rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	const interval = 3 * time.Second
	for _, phase := range Phases {
		loaded, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			phase.Run(s, loaded)
		}()
		var at map[string]float64
		eventually(t, fmt.Sprintf("under %q the widest of the waits is %q", phase.Name, phase.Widest), func() bool {
			pause(ctx, interval/10) // a scrape every 500 ms: asking more often only costs
			if at, err = Waits(ctx, p, interval); err != nil {
				return false // too few scrapes yet
			}
			widest := phase.Widest
			for place, n := range at {
				if n > at[widest] {
					widest = place
				}
			}
			// With nothing the matter nobody waits, but for what the noise of a machine does to single calls.
			quiet := phase.Name != "nothing" || at["gate"]+at["pool"]+at["locks"] < at["sql"]/2
			return widest == phase.Widest && at[widest] > 0 && quiet
		})
		t.Logf("%s: %.2v", phase.Name, at)
		if phase.Name == "client" {
			everyQueryHasSeries(t, ctx, p, interval)
		}
		stop()
		<-done
	}
}

func everyQueryHasSeries(t *testing.T, ctx context.Context, p *Prometheus, interval time.Duration) {
	panels, err := Dashboard(interval)
	if err != nil {
		t.Fatal(err)
	}
	queries := 0
	for _, panel := range panels {
		for _, target := range panel.Targets {
			queries++
			var series []Series
			eventually(t, panel.Title+": series of "+target.Expr, func() bool {
				if series, err = p.Query(ctx, target.Expr); err != nil {
					t.Fatal(err)
				}
				return len(series) > 0
			})
		}
	}
	if queries < 20 {
		t.Errorf("the dashboard has %d queries", queries)
	}
	for _, record := range []string{
		"pgxgated:acquires:ratio5m", "pgxgated:sql_seconds:mean5m", "pgxgated:pool_wait_seconds:mean5m",
		`pgxgated:at:avg5m{at="gate"}`, `pgxgated:at:avg5m{at="pool"}`, `pgxgated:at:avg5m{at="locks"}`,
		`pgxgated:at:avg5m{at="sql"}`, `pgxgated:at:avg5m{at="client"}`,
	} {
		eventually(t, "series of "+record, func() bool {
			series, err := p.Query(ctx, record)
			if err != nil {
				t.Fatal(err)
			}
			return len(series) > 0
		})
	}
}

// A server that takes native histograms gets them: quantiles without buckets.
func TestNativeHistogramsAreScraped(t *testing.T) {
	need(t, "prometheus")
	ctx := t.Context()
	s := newService(t)
	p, err := StartPrometheus(ctx, s.Addr, "rules.yml", "--enable-feature=native-histograms")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range 20 {
		if _, err := s.DB.ExecContext(ctx, "select pg_sleep(0.02)"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "a quantile of a native histogram", func() bool {
		series, err := p.Query(ctx, `histogram_quantile(0.5, sum(pgxgated_sql_seconds{op="exec",gate="orders"}))`)
		if err != nil {
			t.Fatal(err)
		}
		return len(series) == 1 && !math.IsNaN(series[0].Last())
	})
	series, err := p.Query(ctx, `histogram_quantile(0.5, sum(pgxgated_sql_seconds{op="exec",gate="orders"}))`)
	if err != nil {
		t.Fatal(err)
	}
	if v := series[0].Last(); v < 0.02*0.91 { // a bucket is 9 % wide
		t.Errorf("the median of sleeps of 20 ms is %v s", v)
	}
}
