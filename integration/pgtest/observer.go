package pgtest

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Observer asks a server on a connection of its own, past every gate and every proxy that a test puts before it. Safe for
// concurrent use.
type Observer struct {
	Conn *pgx.Conn // not to be used while a method may be

	tb testing.TB
	mu sync.Mutex // held while the server is asked
}

// Observe connects to dsn, and hangs up when the test ends.
func Observe(tb testing.TB, dsn string) *Observer {
	tb.Helper()
	conn, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = conn.Close(context.Background()) }) // the server may be gone
	return &Observer{Conn: conn, tb: tb}
}

// Exec runs a statement, and fails the test if it fails.
func (o *Observer) Exec(query string, args ...any) {
	o.tb.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, err := o.Conn.Exec(context.Background(), query, args...); err != nil {
		o.tb.Fatalf("%s: %v", query, err)
	}
}

// Scan runs a query and scans its first row into dest. The error is pgx's: pgx.ErrNoRows without a row.
func (o *Observer) Scan(dest []any, query string, args ...any) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.Conn.QueryRow(context.Background(), query, args...).Scan(dest...)
}

// Int runs a query for one number, and fails the test if it fails.
func (o *Observer) Int(query string, args ...any) (n int) {
	o.tb.Helper()
	if err := o.Scan([]any{&n}, query, args...); err != nil {
		o.tb.Fatalf("%s: %v", query, err)
	}
	return n
}

// Stubborn defines the function stubborn(seconds), which takes so many seconds and swallows every cancel meanwhile. One that
// arrives between two rounds of the inner loop, where nobody would catch it, ends in the outer one.
func (o *Observer) Stubborn() {
	o.tb.Helper()
	o.Exec(`create or replace function stubborn(seconds float) returns void language plpgsql as $$
declare until timestamptz := clock_timestamp() + make_interval(secs => seconds);
begin
	while clock_timestamp() < until loop
		begin
			while clock_timestamp() < until loop
				begin
					perform pg_sleep(extract(epoch from until - clock_timestamp()));
				exception when query_canceled then
				end;
			end loop;
		exception when query_canceled then
		end;
	end loop;
end $$`)
}
