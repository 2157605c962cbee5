// Example_http is an HTTP server over a gated database, and a client for it: refusals become 503 with Retry-After, a circuit
// breaker and a timeout stand around the gate without counting its refusals, and the client's retries have a budget.
//
//	go run ./example_http                          # with a private PostgreSQL, on 127.0.0.1:8080
//	DATABASE_URL=postgres://… go run ./example_http
//
// Then, for load: for i in $(seq 200); do curl -s -o /dev/null -w '%{http_code}\n' 127.0.0.1:8080 & done | sort | uniq -c
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "example_http:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	dsn := os.Getenv("DATABASE_URL")
	if dsn == "" {
		server, err := pgtest.Start(ctx)
		if err != nil {
			return err
		}
		defer server.Close() // it is thrown away
		dsn = pgtest.With(server.DSN(), "pool_max_conns", "5")
	}
	db, err := sql.Open(pgxgated.DriverName, dsn)
	if err != nil {
		return err
	}
	defer db.Close()

	// Settings that cannot work are better found now than under load.
	if err := pgxgated.Check(ctx, db, pgxgated.Budget{PeakInstances: 1}); err != nil {
		fmt.Fprintln(os.Stderr, "warning:", err)
	}

	s := &http.Server{Addr: "127.0.0.1:8080", Handler: newServer(db, time.Second, order)}
	go func() {
		<-ctx.Done()
		shut, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = s.Shutdown(shut) // what is at work finishes
	}()
	fmt.Println("listening on", s.Addr)
	if err := s.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// order is what a request does: 20 ms of the database's time.
func order(ctx context.Context, tx *sql.Tx) (answer string, err error) {
	err = tx.QueryRowContext(ctx, "select 'served by '||pg_backend_pid() from pg_sleep(0.02)").Scan(&answer)
	return answer, err
}
