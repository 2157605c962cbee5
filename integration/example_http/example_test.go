package main

import (
	"context"
	"database/sql"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.M{M: m}) }

// service is the example's server over a gate of two permits and two places in the queue.
type service struct {
	*server
	url      string
	gate     *pgxgated.Gate
	attempts atomic.Int64 // requests that reached the server
}

func newService(t *testing.T, dsn string, budget time.Duration, work func(context.Context, *sql.Tx) (string, error)) *service {
	t.Helper()
	for _, kv := range [][2]string{{"pool_max_conns", "3"}, {"gate_running", "2"}, {"gate_waiting", "2"}} {
		dsn = pgtest.With(dsn, kv[0], kv[1])
	}
	db, err := sql.Open(pgxgated.DriverName, dsn)
	if err != nil {
		t.Fatal(err)
	}
	s := &service{server: newServer(db, budget, work), gate: pgxgated.GateOf(db)}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.attempts.Add(1)
		s.ServeHTTP(w, r)
	}))
	s.url = h.URL
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		h.Close() // waits for the requests
		eventually(t, "everything is 0", func() bool {
			st := s.gate.Stats()
			return st.Running == 0 && st.Waiting == 0 && st.Draining == 0
		})
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// get returns status, Retry-After in seconds (0 without one) and body.
func get(t *testing.T, c *http.Client, url string) (status, after int, body string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Error(err)
		return 0, 0, ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	if h := resp.Header.Get("Retry-After"); h != "" {
		if after, err = strconv.Atoi(h); err != nil {
			t.Error(err)
		}
	}
	return resp.StatusCode, after, string(b)
}

func TestARequestIsServed(t *testing.T) {
	s := newService(t, pgtest.Shared(t).DSN(), time.Minute, order)
	if status, after, body := get(t, http.DefaultClient, s.url); status != 200 || after != 0 || !strings.HasPrefix(body, "served by ") {
		t.Errorf("%d, Retry-After %d, %q", status, after, body)
	}
}

// TestRefusalsAre503AndDoNotTripTheBreaker: full and too late are answers of their own, and a hundred of them leave the breaker closed.
func TestRefusalsAre503AndDoNotTripTheBreaker(t *testing.T) {
	s := newService(t, pgtest.Shared(t).DSN(), time.Minute, order)
	var held []*pgxgated.Permit
	for range 2 {
		p, err := s.gate.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, p)
	}
	// Two more wait for as long as the gate lets them, the rest finds it full.
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if status, after, _ := get(t, http.DefaultClient, s.url); status != 503 || after < 1 || after > 30 {
				t.Errorf("%d, Retry-After %d", status, after)
			}
		})
	}
	wg.Wait()
	st := s.gate.Stats()
	if st.AdmissionFull == 0 || st.WaitTimeout == 0 || st.AdmissionFull+st.WaitTimeout != 100 {
		t.Errorf("%d full, %d waited too long, want 100 of both kinds", st.AdmissionFull, st.WaitTimeout)
	}
	if !s.breaker.IsClosed() {
		t.Error("refusals have tripped the breaker")
	}
	for _, p := range held {
		p.Release()
	}
	if status, _, _ := get(t, http.DefaultClient, s.url); status != 200 {
		t.Errorf("%d when there is room again", status)
	}
}

func TestWhatIsTooSlowIs504(t *testing.T) {
	s := newService(t, pgtest.Shared(t).DSN(), 100*time.Millisecond, func(ctx context.Context, tx *sql.Tx) (string, error) {
		_, err := tx.ExecContext(ctx, "select pg_sleep(60)")
		return "", err
	})
	if status, after, _ := get(t, http.DefaultClient, s.url); status != 504 || after != 0 {
		t.Errorf("%d, Retry-After %d", status, after)
	}
}

func TestErrorsOfStatementsAre500AndDoNotTripTheBreaker(t *testing.T) {
	s := newService(t, pgtest.Shared(t).DSN(), time.Minute, func(ctx context.Context, tx *sql.Tx) (string, error) {
		_, err := tx.ExecContext(ctx, "select 1/0")
		return "", err
	})
	for range 20 {
		if status, after, body := get(t, http.DefaultClient, s.url); status != 500 || after != 0 || strings.Contains(body, "zero") {
			t.Errorf("%d, Retry-After %d, %q", status, after, body)
		}
	}
	if !s.breaker.IsClosed() {
		t.Error("tripped")
	}
}

// TestABrokenDatabaseTripsTheBreaker, which then answers for it, and closes when the database is back.
func TestABrokenDatabaseTripsTheBreaker(t *testing.T) {
	server := pgtest.New(t)
	s := newService(t, server.DSN(), time.Minute, order)
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if status, after, _ := get(t, http.DefaultClient, s.url); status != 500 || after != 0 {
			t.Errorf("%d, Retry-After %d", status, after)
		}
	}
	asked := s.gate.Stats().Acquired
	if !s.breaker.IsOpen() {
		t.Fatal("five failures have not tripped the breaker")
	}
	if status, after, _ := get(t, http.DefaultClient, s.url); s.breaker.IsOpen() && (status != 503 || after != 1 || s.gate.Stats().Acquired != asked) {
		t.Errorf("open: %d, Retry-After %d, asked %d times", status, after, s.gate.Stats().Acquired-asked)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it serves again", func() bool {
		status, _, _ := get(t, http.DefaultClient, s.url)
		return status == 200
	})
	if !s.breaker.IsClosed() {
		t.Error("it serves, with an open breaker")
	}
}

func TestUnknownOutcomesInviteNoRetry(t *testing.T) {
	w := httptest.NewRecorder()
	newServer(nil, time.Second, nil).fail(w, pgxgated.ErrOutcomeUnknown)
	if w.Code != 500 || w.Header().Get("Retry-After") != "" {
		t.Errorf("%d, Retry-After %q", w.Code, w.Header().Get("Retry-After"))
	}
}

// TestRetryBudgetKeepsRetriesFromMultiplyingTheLoad: forty callers want much more than the database can do. Each of their
// requests may be sent four times; whether it is, is what multiplies the load when there is least room for it.
func TestRetryBudgetKeepsRetriesFromMultiplyingTheLoad(t *testing.T) {
	const callers, requests, share, burst = 40, 400, 0.1, 10
	load := func(name string, budget *retryBudget) (factor, perSecond float64) {
		t.Run(name, func(t *testing.T) {
			s := newService(t, pgtest.Shared(t).DSN(), time.Minute, order)
			tr := &http.Transport{MaxIdleConnsPerHost: callers}
			defer tr.CloseIdleConnections()
			c := &http.Client{Transport: &retrier{next: tr, most: 3, budget: budget, sleep: func(ctx context.Context, d time.Duration) error {
				return sleep(ctx, d/50) // a second lasts 20 ms here
			}}}
			var ok atomic.Int64
			var wg sync.WaitGroup
			start := time.Now()
			for range callers {
				wg.Go(func() {
					for range requests / callers {
						switch status, _, _ := get(t, c, s.url); status {
						case 200:
							ok.Add(1)
						case 503:
						default:
							t.Errorf("status %d", status)
						}
					}
				})
			}
			wg.Wait()
			factor, perSecond = float64(s.attempts.Load())/requests, float64(ok.Load())/time.Since(start).Seconds()
		})
		return factor, perSecond
	}
	without, servedWithout := load("without a budget", nil)
	with, servedWith := load("with a budget", newRetryBudget(share, burst))
	t.Logf("%d callers, %d requests: without a retry budget the server got %.2f times as many and served %.0f/s, with one %.2f times and %.0f/s",
		callers, requests, without, servedWithout, with, servedWith)
	if most := 1 + share + float64(burst)/requests; with > most {
		t.Errorf("with a budget the load is multiplied by %.3f, want at most %.3f", with, most)
	}
	if without < 1.5*with {
		t.Errorf("without a budget the load is multiplied by %.2f only: it is not seen what the budget is for", without)
	}
	if servedWith == 0 {
		t.Error("nothing was served")
	}
}

// A body that cannot be sent twice is not sent twice, and one that can is whole each time.
func TestRetrierSendsBodiesAgain(t *testing.T) {
	var mu sync.Mutex
	var bodies []string
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		bodies = append(bodies, string(b))
		comeAgain(w, 0)
	}))
	defer h.Close()
	c := newClient()
	c.Transport.(*retrier).sleep = func(context.Context, time.Duration) error { return nil }
	defer http.DefaultClient.CloseIdleConnections()
	for body, want := range map[io.Reader]int{strings.NewReader("again"): 4, io.MultiReader(strings.NewReader("once")): 1} {
		mu.Lock()
		bodies = nil
		mu.Unlock()
		resp, err := c.Post(h.URL, "text/plain", body)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		mu.Lock()
		if resp.StatusCode != 503 || len(bodies) != want || bodies[0] != bodies[len(bodies)-1] || bodies[0] == "" {
			t.Errorf("status %d, bodies %q, want %d", resp.StatusCode, bodies, want)
		}
		mu.Unlock()
	}
}
