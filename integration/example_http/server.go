package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/timeout"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated"
)

// server answers each request with one transaction. Around it are three layers, each for a trouble of its own:
//
//	timeout  → the request takes too long: its caller has better things to do
//	breaker  → the database is broken: spare it, and the wait, until it is back
//	gate     → more work than the database can do: refuse the rest now, while an answer is still of use (in the driver)
type server struct {
	db      *sql.DB
	budget  time.Duration // for one request
	work    func(context.Context, *sql.Tx) (string, error)
	breaker circuitbreaker.CircuitBreaker[string]
	layers  failsafe.Executor[string]
}

func newServer(db *sql.DB, budget time.Duration, work func(context.Context, *sql.Tx) (string, error)) *server {
	s := &server{db: db, budget: budget, work: work}
	// It counts failures in a period. A rate would be diluted by refusals, which it takes for successes.
	s.breaker = circuitbreaker.NewBuilder[string]().
		HandleIf(func(_ string, err error) bool { return broken(err) }).
		WithFailureThresholdPeriod(5, 10*time.Second).
		WithDelay(time.Second).
		WithSuccessThreshold(1).
		Build()
	s.layers = failsafe.With[string](timeout.New[string](budget), s.breaker) // the first one is the outermost
	return s
}

// broken tells whether an error speaks of a database that is broken. Neither a refusal of the gate does, where the database
// was not even asked, nor what a statement did wrong.
func broken(err error) bool {
	var sqlErr *pgconn.PgError
	switch {
	case err == nil, errors.Is(err, pgxgated.ErrRejected), errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &sqlErr):
		class := sqlErr.Code[:2]
		return class == "53" || class == "57" || class == "58" || class == "XX" // resources, operator, system, internal
	}
	return true // no connection, no answer, too late
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The deadline tells the gate how much time there is: it refuses at once what cannot be done in it. The layer ends
	// the request in time whatever is inside it.
	ctx, cancel := context.WithTimeout(r.Context(), s.budget)
	defer cancel()
	answer, err := s.layers.WithContext(ctx).GetWithExecution(func(e failsafe.Execution[string]) (string, error) {
		return pgxgated.InTx(e.Context(), s.db, nil, s.work)
	})
	if err != nil {
		s.fail(w, err)
		return
	}
	fmt.Fprintln(w, answer)
}

// fail answers with what the client can do about it. 503 with Retry-After says: nothing was done, come again.
func (s *server) fail(w http.ResponseWriter, err error) {
	var refused *pgxgated.RejectedError
	switch {
	case errors.As(err, &refused):
		comeAgain(w, refused.RetryAfter())
	case errors.Is(err, circuitbreaker.ErrOpen):
		comeAgain(w, s.breaker.RemainingDelay())
	case errors.Is(err, pgxgated.ErrOutcomeUnknown):
		// Never a status that invites to do it again: it may have been done. See pgxgated.ResolveOutcome.
		http.Error(w, "it is not known whether this was done", http.StatusInternalServerError)
	case errors.Is(err, timeout.ErrExceeded), errors.Is(err, context.DeadlineExceeded):
		http.Error(w, "too slow", http.StatusGatewayTimeout)
	default:
		http.Error(w, "failed", http.StatusInternalServerError) // the error itself is for the log
	}
}

// comeAgain answers 503. Retry-After has whole seconds; spreading the callers over them is the client's part.
func comeAgain(w http.ResponseWriter, after time.Duration) {
	w.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(after.Seconds())))))
	http.Error(w, "overloaded", http.StatusServiceUnavailable)
}
