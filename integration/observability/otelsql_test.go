//go:build linux

package observability

import (
	"context"
	"testing"
	"time"

	"github.com/XSAM/otelsql"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// otelsql on top of the gate: the span of BeginTx has the wait for a permit in it, and the spans of statements have not.
// This is all that it takes:
//
//	c, err := pgxgated.NewConnector(dsn)
//	db := otelsql.OpenDB(c)
func TestSpansOfOtelsqlHaveTheGateWaitInsideBeginTx(t *testing.T) {
	ctx := t.Context()
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	defer provider.Shutdown(context.Background())

	c, err := pgxgated.NewConnector(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "2"), pgxgated.WithGateName("traced"),
		pgxgated.WithLimits(pgxgated.Limits{Running: 1, Waiting: 1, MaxWait: time.Minute}))
	if err != nil {
		t.Fatal(err)
	}
	db := otelsql.OpenDB(c, otelsql.WithTracerProvider(provider))
	defer c.Close()
	defer db.Close()
	g := pgxgated.GateOf(db)
	if g != c.Gate() {
		t.Fatalf("GateOf below otelsql: %v", g)
	}

	permit, err := g.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ctx, parent := provider.Tracer("test").Start(ctx, "request")
	done := make(chan error, 1)
	go func() {
		tx, err := db.BeginTx(ctx, nil)
		if err == nil {
			_, err = tx.ExecContext(ctx, "select 1")
		}
		if err == nil {
			err = tx.Commit()
		}
		done <- err
	}()
	eventually(t, "the transaction waits for its permit", func() bool { return g.Stats().Waiting == 1 })
	waiting := time.Now()
	eventually(t, "it has waited for a while", func() bool { return g.Stats().OldestWait > 50*time.Millisecond })
	released := time.Now()
	permit.Release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	parent.End()

	found := 0
	for _, s := range spans.Ended() {
		switch s.Name() {
		case "sql.conn.begin_tx":
			found++
			if s.StartTime().After(waiting) || s.EndTime().Before(released) {
				t.Errorf("begin_tx from %v to %v, waited from %v to %v", s.StartTime(), s.EndTime(), waiting, released)
			}
			if s.Parent().TraceID() != parent.SpanContext().TraceID() {
				t.Error("begin_tx is in another trace")
			}
		case "sql.conn.exec", "sql.tx.commit":
			found++
			if s.StartTime().Before(released) {
				t.Errorf("%s began before the permit was there", s.Name())
			}
		}
	}
	if found != 3 {
		t.Errorf("%d of begin_tx, exec and commit among %d spans", found, len(spans.Ended()))
	}
	eventually(t, "everything is given back", func() bool { return g.Stats().Running == 0 })
}
