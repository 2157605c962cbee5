package pgxgated_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/ngrok/sqlmw"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/metrics"
)

// What a service does: open with its limits in the DSN, and answer a refusal with 503.
func Example() {
	db, err := sql.Open("pgx-gated", "postgres://app@db/orders?pool_max_conns=20&gate_running=16&gate_waiting=160")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	http.HandleFunc("/hit", func(w http.ResponseWriter, r *http.Request) {
		_, err := db.ExecContext(r.Context(), "insert into hits (path) values ($1)", r.URL.Path)
		var refused *pgxgated.RejectedError
		if errors.As(err, &refused) {
			w.Header().Set("Retry-After", strconv.Itoa(int(refused.RetryAfter().Seconds())+1))
			http.Error(w, "busy", http.StatusServiceUnavailable)
		}
	})
	fmt.Println(pgxgated.GateOf(db).Stats().Limits)
	// Output: running 16, waiting 160, max wait 100ms
}

// A test of a user's on go-sqlmock, gated by one line.
func ExampleOpenDB() {
	db, mock, err := sqlmock.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	db, err = pgxgated.OpenDB(db, pgxgated.WithLimits(pgxgated.Limits{Running: 1}), pgxgated.WithOwnPool()) // this one
	if err != nil {
		fmt.Println(err)
		return
	}
	mock.ExpectQuery("select name").WillReturnRows(sqlmock.NewRows([]string{"name"}).AddRow("Ada"))
	mock.ExpectClose()

	var name string
	fmt.Println(db.QueryRow("select name from authors").Scan(&name), name)
	fmt.Println(db.Close(), mock.ExpectationsWereMet())
	// Output:
	// <nil> Ada
	// <nil> <nil>
}

// A connector is for what the DSN cannot say, and for wrappers such as otelsql.OpenDB.
func ExampleNewConnector() {
	c, err := pgxgated.NewConnector("postgres://app@db/orders?pool_max_conns=20",
		pgxgated.WithGateName("orders"),
		pgxgated.WithLimits(pgxgated.Limits{Running: 16, Waiting: 160, MaxWait: 200 * time.Millisecond}),
		pgxgated.WithScope(pgxgated.ScopeTx),
		pgxgated.WithServerDeadline(true),
		pgxgated.WithOutcomeTracking(),
		pgxgated.WithLeakThreshold(time.Minute),
		pgxgated.WithLogger(slog.New(slog.NewTextHandler(os.Stderr, nil))),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	db := sql.OpenDB(c)
	defer db.Close()
	fmt.Println(c.Gate().Name(), c.Gate() == pgxgated.GateOf(db))
	// Output: orders true
}

// A misspelt or contradictory setting is an error at open that names it.
func ExampleNewConnector_error() {
	_, err := pgxgated.NewConnector("postgres://app@db/orders?pool_max_conns=8&gate_running=16")
	fmt.Println(err)
	// Output: pgxgated: gate_running is 16, more than the 8 connections of the pool (pool_max_conns 8); want 1 to 8
}

func ExampleGateOf() {
	db, err := sql.Open(pgxgated.DriverName, "postgres://app@db/orders?pool_max_conns=20")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	s := pgxgated.GateOf(db).Stats()
	fmt.Println(s.Running, "running,", s.Waiting, "waiting,", s.Draining, "draining of", s.Limits)
	// Output: 0 running, 0 waiting, 0 draining of running 16, waiting 160, max wait 100ms
}

// Two databases and work outside database/sql on one budget.
func ExampleNewGate() {
	g, err := pgxgated.NewGate("reports", pgxgated.Limits{Running: 4, Waiting: 8, MaxWait: time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	for _, dsn := range []string{"postgres://app@db1/r?pool_max_conns=4", "postgres://app@db2/r?pool_max_conns=4"} {
		c, err := pgxgated.NewConnector(dsn, pgxgated.WithGate(g))
		if err != nil {
			fmt.Println(err)
			return
		}
		defer sql.OpenDB(c).Close()
		fmt.Println(c.Gate().Name())
	}
	// Output:
	// reports
	// reports
}

func ExampleGate_Acquire() {
	g, err := pgxgated.NewGate("exports", pgxgated.Limits{Running: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	p, err := g.Acquire(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = g.Acquire(context.Background())
	fmt.Println(errors.Is(err, pgxgated.ErrRejected), err)
	p.Release()
	fmt.Println(g.Stats().Running, "running")
	// Output:
	// true pgxgated: gate "exports": admission full (1 of 1 running, 0 of 0 waiting, max wait 0s)
	// 0 running
}

func ExampleGate_SetLimits() {
	g, err := pgxgated.NewGate("night", pgxgated.Limits{Running: 4, Waiting: 40, MaxWait: time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	fmt.Println(g.SetLimits(pgxgated.Limits{Running: 12, Waiting: 120, MaxWait: time.Second}))
	fmt.Println(g.Stats().Limits)
	// Output:
	// <nil>
	// running 12, waiting 120, max wait 1s
}

func ExampleRejectedError() {
	g, err := pgxgated.NewGate("orders", pgxgated.Limits{Running: 1, Waiting: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	p, err := g.Acquire(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer p.Release()
	_, err = g.Acquire(context.Background())
	var refused *pgxgated.RejectedError
	if errors.As(err, &refused) {
		fmt.Println(refused.Gate, refused.Running, "running,", refused.Reason)
	}
	switch { // they call for different answers
	case errors.Is(err, pgxgated.ErrAdmissionFull):
		fmt.Println("shed load")
	case errors.Is(err, pgxgated.ErrWaitTimeout):
		fmt.Println("look at hold times")
	case errors.Is(err, pgxgated.ErrDeadlineShort):
		fmt.Println("look at deadlines")
	}
	// Output:
	// orders 1 running, no running permit within the maximum wait
	// look at hold times
}

// A caller that can wait longer than most says so.
func ExampleWithMaxWait() {
	g, err := pgxgated.NewGate("orders", pgxgated.Limits{Running: 1, Waiting: 1, MaxWait: 50 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	p, err := g.Acquire(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	go p.Release()
	ctx := pgxgated.WithMaxWait(context.Background(), time.Minute)
	p, err = g.Acquire(ctx)
	fmt.Println(err)
	p.Release()
	// Output: <nil>
}

// Budgets inside a gate: what batch jobs may take of it.
func ExampleWithWorkload() {
	g, err := pgxgated.NewGate("orders", pgxgated.Limits{Running: 16, Waiting: 160},
		pgxgated.WithWorkloads(map[string]pgxgated.Limits{"oltp": {Running: 12, Waiting: 48}, "batch": {Running: 1}}))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	batch := pgxgated.WithWorkload(context.Background(), "batch")
	p, err := g.Acquire(batch)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer p.Release()
	_, err = g.Acquire(batch)
	fmt.Println(errors.Is(err, pgxgated.ErrAdmissionFull))
	fmt.Println(g.SetWorkloadLimits("batch", pgxgated.Limits{Running: 2}))
	p2, err := g.Acquire(batch)
	fmt.Println(err)
	p2.Release()
	_, err = g.Acquire(pgxgated.WithWorkload(context.Background(), "bacth"))
	fmt.Println(errors.Is(err, pgxgated.ErrUnknownWorkload))
	// Output:
	// true
	// <nil>
	// <nil>
	// true
}

// Observe mode counts what would have been refused, to find limits before they are enforced.
func ExampleWithMode() {
	g, err := pgxgated.NewGate("trial", pgxgated.Limits{Running: 1}, pgxgated.WithMode(pgxgated.Observe))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	for range 3 {
		p, err := g.Acquire(context.Background())
		if err != nil {
			fmt.Println(err)
			return
		}
		defer p.Release()
	}
	fmt.Println(g.Stats().WouldReject["admission_full"])
	// Output: 2
}

// Leader locks, LISTEN and an administrator's queries go past the gate, and are counted.
func ExampleBypass() {
	g, err := pgxgated.NewGate("orders", pgxgated.Limits{Running: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	ctx := pgxgated.Bypass(context.Background())
	for range 2 {
		p, err := g.Acquire(ctx)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer p.Release()
	}
	fmt.Println(g.Stats().Running, "running,", g.Stats().Bypassed, "bypassed")
	// Output: 0 running, 2 bypassed
}

func ExampleInTx() {
	inner, mock, err := sqlmock.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	db, err := pgxgated.OpenDB(inner, pgxgated.WithLimits(pgxgated.Limits{Running: 1}), pgxgated.WithOwnPool())
	if err != nil {
		fmt.Println(err)
		return
	}
	mock.ExpectBegin()
	mock.ExpectQuery("insert").WillReturnRows(sqlmock.NewRows([]string{"id"}).AddRow(7))
	mock.ExpectCommit()
	mock.ExpectClose()
	defer db.Close()

	id, err := pgxgated.InTx(context.Background(), db, nil, func(ctx context.Context, tx *sql.Tx) (id int, err error) {
		// Using db here would wait for a permit while holding one, and is refused with ErrNested.
		err = tx.QueryRowContext(ctx, "insert into orders default values returning id").Scan(&id)
		return id, err
	})
	fmt.Println(id, err)
	// Output: 7 <nil>
}

// slowStatements is an interceptor on physical connections.
type slowStatements struct{ sqlmw.NullInterceptor }

func (slowStatements) ConnExecContext(ctx context.Context, conn driver.ExecerContext, query string, args []driver.NamedValue) (driver.Result, error) {
	start := time.Now()
	r, err := conn.ExecContext(ctx, query, args)
	if took := time.Since(start); took > time.Second {
		slog.Warn("slow statement", "took", took)
	}
	return r, err
}

func ExampleWithInterceptors() {
	c, err := pgxgated.NewConnector("postgres://app@db/orders?pool_max_conns=20", pgxgated.WithInterceptors(slowStatements{}))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sql.OpenDB(c).Close()
	fmt.Println(c.Gate().Stats().Limits.Running)
	// Output: 16
}

func Example_metrics() {
	db, err := sql.Open("pgx-gated", "postgres://app@db/orders?pool_max_conns=20&gate_name=shop")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	collector := metrics.NewCollector(pgxgated.GateOf(db)) // prometheus.MustRegister(collector)
	fmt.Printf("%T\n", collector)
}
