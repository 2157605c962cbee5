package gated

import (
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// BenchmarkTransaction is BEGIN; SELECT 1; COMMIT on plain pgx and on pgx-gated with the same number of connections, and
// with B = P, so that the gate costs without limiting. Both are timed in turn, in one process, since on a shared machine
// only a ratio means something: gated/plain is the median over the rounds of the throughput through the gate over that
// without.
func BenchmarkTransaction(b *testing.B) {
	const p = 16
	dsn := pgtest.Shared(b).DSN()
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("Running=%d/Callers=%d", p, callers), func(b *testing.B) {
			// Anew for each round: on which processors the server's processes come to lie stays with a connection, and is worth
			// more than what is measured.
			open := func(which int) *sql.DB {
				driver, own := "pgx", dsn
				if which == 1 {
					driver, own = pgxgated.DriverName, pgtest.With(pgtest.With(pgtest.With(pgtest.With(dsn,
						"pool_max_conns", fmt.Sprint(p)), "gate_running", fmt.Sprint(p)), "gate_waiting", "1000"), "gate_max_wait", "1m")
				}
				db, err := sql.Open(driver, own)
				if err != nil {
					b.Fatal(err)
				}
				if which == 0 {
					db.SetMaxOpenConns(p)
				}
				db.SetMaxIdleConns(max(callers, p))
				return db
			}

			const rounds = 40
			n := max(b.N/rounds, callers)
			ratios := make([]float64, rounds)
			var total [2]time.Duration
			for i := range ratios {
				var took [2]time.Duration
				for j := range 2 {
					which := (i + j) % 2 // who comes second finds a warmer machine, so they take turns
					db := open(which)
					transactions(b, db, callers, 20*callers) // connections and statements are made before the time is taken
					took[which] = transactions(b, db, callers, n)
					if err := db.Close(); err != nil {
						b.Error(err)
					}
				}
				ratios[i] = float64(took[0]) / float64(took[1])
				total[0] += took[0]
				total[1] += took[1]
			}
			slices.Sort(ratios)
			b.ReportMetric((ratios[rounds/2-1]+ratios[rounds/2])/2, "gated/plain")
			b.ReportMetric(float64(total[0].Nanoseconds())/float64(n*rounds), "plain-ns/tx")
			b.ReportMetric(float64(total[1].Nanoseconds())/float64(n*rounds), "gated-ns/tx")
			b.ReportMetric(0, "ns/op") // both together: means nothing
		})
	}
}

// transactions runs n of them and returns how long it took.
func transactions(b *testing.B, db *sql.DB, callers, n int) time.Duration {
	b.Helper()
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	start := time.Now()
	for range callers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				tx, err := db.BeginTx(b.Context(), nil)
				if err != nil {
					b.Error(err)
					return
				}
				var one int
				if err := tx.QueryRow("select 1").Scan(&one); err != nil {
					b.Error(err)
				}
				if err := tx.Commit(); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}
