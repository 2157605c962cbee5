package compat

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/XSAM/otelsql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jmoiron/sqlx"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// A pool that exists, with its hooks, tracers and types.
func ExampleOpenDBFromPool() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, pgtest.With(exampleDSN(), "pool_max_conns", "10"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	db, err := pgxgated.OpenDBFromPool(pool, pgxgated.WithGateName("example pool"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	var n int
	fmt.Println(db.QueryRowContext(ctx, "select 6 * 7").Scan(&n), n)
	fmt.Println(pgxgated.GateOf(db).Stats().Limits)
	// Output:
	// <nil> 42
	// running 8, waiting 80, max wait 100ms
}

// What only pgx can do, inside an open transaction.
func ExamplePgxConn() {
	ctx := context.Background()
	db, err := sql.Open("pgx-gated", pgtest.With(exampleDSN(), "pool_max_conns", "4"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "create temporary table copied (n int) on commit drop"); err != nil {
		fmt.Println(err)
		return
	}
	err = conn.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(ctx, dc)
		if err != nil {
			return err
		}
		n, err := pc.CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}, {3}}))
		fmt.Println(n, "rows")
		return err
	})
	fmt.Println(err, tx.Commit())
	// Output:
	// 3 rows
	// <nil> <nil>
}

// Once at start: do the limits fit the server?
func ExampleCheck() {
	db, err := sql.Open("pgx-gated", pgtest.With(exampleDSN(), "pool_max_conns", "20"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	err = pgxgated.Check(context.Background(), db, pgxgated.Budget{PeakInstances: 1000})
	var broken *pgxgated.CheckError
	fmt.Println(errors.As(err, &broken))
	// Output: true
}

// A COMMIT without an answer can be asked for, where outcomes are tracked.
func ExampleResolveOutcome() {
	ctx := context.Background()
	c, err := pgxgated.NewConnector(pgtest.With(exampleDSN(), "pool_max_conns", "4"), pgxgated.WithOutcomeTracking())
	if err != nil {
		fmt.Println(err)
		return
	}
	db := sql.OpenDB(c)
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tx.Commit() // errors.Is(err, pgxgated.ErrOutcomeUnknown) if its answer never came
	fmt.Println(pgxgated.ResolveOutcome(ctx, db, err))
	// Output: committed <nil>
}

// sqlx must be told once which placeholders the driver takes, if it opens the database itself.
func Example_sqlx() {
	sqlx.BindDriver("pgx-gated", sqlx.DOLLAR)
	defer sqlx.BindDriver("pgx-gated", sqlx.UNKNOWN) // for this package's other tests only
	db, err := sqlx.Open("pgx-gated", pgtest.With(exampleDSN(), "pool_max_conns", "4"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	rows, err := db.NamedQuery("select :word || '!'", map[string]any{"word": "named"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		fmt.Println(rows.Scan(&s), s)
	}
	// Output: <nil> named!
}

// GORM is given the gated *sql.DB.
func Example_gorm() {
	std, err := sql.Open("pgx-gated", pgtest.With(exampleDSN(), "pool_max_conns", "4"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer std.Close()
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: std}))
	if err != nil {
		fmt.Println(err)
		return
	}
	var n int
	fmt.Println(db.Raw("select ?::int + 1", 1).Scan(&n).Error, n)
	// Output: <nil> 2
}

// otelsql on top: the span of BeginTx has the wait for a permit in it.
func Example_otelsql() {
	ctx := context.Background()
	spans := tracetest.NewSpanRecorder() // an exporter, in a service
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	defer provider.Shutdown(ctx)

	c, err := pgxgated.NewConnector(pgtest.With(exampleDSN(), "pool_max_conns", "4"))
	if err != nil {
		fmt.Println(err)
		return
	}
	db := otelsql.OpenDB(c, otelsql.WithTracerProvider(provider))
	defer c.Close()
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(tx.Commit())
	for _, s := range spans.Ended() {
		if s.Name() == "sql.conn.begin_tx" || s.Name() == "sql.tx.commit" {
			fmt.Println(s.Name())
		}
	}
	// Output:
	// <nil>
	// sql.conn.begin_tx
	// sql.tx.commit
}
