package main

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// retrier sends a request again that was answered with 503 and Retry-After: then nothing was done, so every method may be
// repeated. It waits as long as it was told to, spread at random so that not all come back at once, and only while its
// budget lasts: retries of an overloaded server are more of what overloads it.
type retrier struct {
	next   http.RoundTripper
	most   int          // retries of one request
	budget *retryBudget // of all requests; nil: none (do not do this)
	sleep  func(context.Context, time.Duration) error
}

func (r *retrier) RoundTrip(req *http.Request) (*http.Response, error) {
	if r.budget != nil {
		r.budget.earn()
	}
	for tries := 0; ; tries++ {
		resp, err := r.next.RoundTrip(req)
		if err != nil || resp.StatusCode != http.StatusServiceUnavailable || tries == r.most {
			return resp, err
		}
		seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil || req.Body != nil && req.GetBody == nil || r.budget != nil && !r.budget.spend() {
			return resp, nil // the refusal is the answer
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // so that the connection can be used again
		_ = resp.Body.Close()
		after := time.Duration(seconds) * time.Second
		if err := r.sleep(req.Context(), after/2+rand.N(after+1)); err != nil {
			return nil, err
		}
		if req.GetBody != nil {
			req = req.Clone(req.Context())
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// sleep waits for d or until ctx is done.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// retryBudget allows a share of all requests to be retries, whatever happens: each request earns a part of a retry, and a
// retry spends a whole one. Counting those under way instead would not help: a refusal is answered in microseconds, so hardly any
// retry ever is under way, however many there are.
type retryBudget struct {
	share float64 // retries per request
	burst float64 // retries that may be saved up

	mu    sync.Mutex // guards saved
	saved float64
}

// newRetryBudget makes a budget that starts with a full burst.
func newRetryBudget(share float64, burst int) *retryBudget {
	return &retryBudget{share: share, burst: float64(burst), saved: float64(burst)}
}

func (b *retryBudget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.saved = min(b.saved+b.share, b.burst)
}

func (b *retryBudget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.saved < 1 {
		return false
	}
	b.saved--
	return true
}

// newClient makes a client whose retries are at most a tenth of its requests.
func newClient() *http.Client {
	return &http.Client{Transport: &retrier{next: http.DefaultTransport, most: 3, budget: newRetryBudget(0.1, 10), sleep: sleep}}
}
