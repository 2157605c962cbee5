//go:build linux

package observability

import (
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
	"github.com/pgxgated/pgxgated/metrics"
)

const leakThreshold = 200 * time.Millisecond

func leaky(t *testing.T) (*sql.DB, *pgxgated.Gate, *records) {
	t.Helper()
	log := &records{}
	c, err := pgxgated.NewConnector(pgtest.With(pgtest.Shared(t).DSN(), "pool_max_conns", "4"), pgxgated.WithGateName(t.Name()),
		pgxgated.WithLeakThreshold(leakThreshold), pgxgated.WithLogger(slog.New(log)))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	t.Cleanup(func() {
		eventually(t, "everything is given back", func() bool { return c.Gate().Stats().Running == 0 })
		db.Close()
	})
	return db, c.Gate(), log
}

// forget begins a transaction, and is what a report must name.
func forget(ctx context.Context, db *sql.DB) (*sql.Tx, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err == nil {
		_, err = tx.ExecContext(ctx, "/* app */ select 'secret text', $1::text", "secret argument")
	}
	return tx, err
}

const (
	overdue  = "held longer than gate_leak_threshold"
	returned = "overdue lease returned after"
)

func TestA05AnAbandonedTransactionIsReportedOnceAndStaysHeld(t *testing.T) {
	db, g, log := leaky(t)
	r := prometheus.NewRegistry()
	if err := r.Register(metrics.NewCollector(g)); err != nil {
		t.Fatal(err)
	}
	tx, err := forget(context.Background(), db)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "reported", func() bool { return len(log.with(overdue)) == 1 })
	said := log.with(overdue)[0]
	for _, want := range []string{"observability.forget", "leak_test.go", "last_statement=select", "kind=tx", "draining=false"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in the report: %s", want, said)
		}
	}
	if strings.Contains(said, "secret") {
		t.Errorf("text or argument of the statement in the report: %s", said)
	}
	if s := gather(t, r, g.Name()); s["leases_overdue"] != 1 || s["running"] != 1 {
		t.Errorf("leases_overdue %v, running %v", s["leases_overdue"], s["running"])
	}
	st := g.Stats()
	if !strings.Contains(st.OldestHoldSite, "observability.forget (") || st.OldestHold < leakThreshold || st.LeasesOverdue != 1 {
		t.Errorf("oldest hold %v at %q, overdue %d", st.OldestHold, st.OldestHoldSite, st.LeasesOverdue)
	}
	eventually(t, "three times the threshold", func() bool { return g.Stats().OldestHold > 3*leakThreshold })
	if n := len(log.with(overdue)); n != 1 {
		t.Errorf("reported %d times", n)
	}
	// Nothing was killed: it is still a transaction that can commit.
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	eventually(t, "its return is told", func() bool { return len(log.with(returned)) == 1 })
	if s := gather(t, r, g.Name()); s["leases_overdue"] != 0 {
		t.Errorf("leases_overdue %v", s["leases_overdue"])
	}
}

func TestA05ALongTransactionIsReportedAndItsReturnToo(t *testing.T) {
	db, g, log := leaky(t)
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("select pg_sleep(0.4)"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its return is told", func() bool { return len(log.with(returned)) == 1 })
	if n := len(log.with(overdue)); n != 1 {
		t.Errorf("reported %d times", n)
	}
	// Short ones after it, and idle logical connections, are not reported.
	for start := time.Now(); time.Since(start) < 2*leakThreshold; {
		if _, err := db.Exec("select 1"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "idle", func() bool { return g.Stats().Running == 0 })
	if a, b := len(log.with(overdue)), len(log.with(returned)); a != 1 || b != 1 {
		t.Errorf("reported %d and %d times", a, b)
	}
}

func TestA05AnAbandonedTransactionWhoseContextIsCancelledComesBack(t *testing.T) {
	db, g, log := leaky(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if _, err := forget(ctx, db); err != nil {
		t.Fatal(err)
	}
	eventually(t, "reported", func() bool { return len(log.with(overdue)) == 1 })
	cancel()
	eventually(t, "the permit is back", func() bool { return g.Stats().Running == 0 && len(log.with(returned)) == 1 })
}
