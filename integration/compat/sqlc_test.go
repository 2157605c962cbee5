package compat

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/compat/sqlcgen/plainq"
	"github.com/pgxgated/pgxgated/integration/compat/sqlcgen/preparedq"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

//go:generate sh -c "cd sqlcgen && go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate"

const (
	libSqlc         = "sqlc"
	libSqlcPrepared = "sqlc, `emit_prepared_queries`"
)

func authorsTable(t *testing.T, dsn string) {
	schema, err := os.ReadFile("sqlcgen/schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	exec(t, plain(dsn), string(schema))
}

func inTx(db *sql.DB, f func(ctx context.Context, tx *sql.Tx) error) func(context.Context) error {
	return func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := f(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	}
}

func TestSqlc(t *testing.T) {
	suite(t, libSqlc, func(t *testing.T, dsn string) *client {
		authorsTable(t, dsn)
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		q, n := plainq.New(db), counter()
		return &client{db: db, close: db.Close, actions: []action{
			{":one", 1, 0, func(ctx context.Context) error { _, err := q.CreateAuthor(ctx, n()); return err }},
			{":many", 1, 0, func(ctx context.Context) error { _, err := q.ListAuthors(ctx, []int64{1, 2}); return err }},
			{"WithTx with two queries", 1, 1, inTx(db, func(ctx context.Context, tx *sql.Tx) error {
				a, err := q.WithTx(tx).CreateAuthor(ctx, n())
				if err != nil {
					return err
				}
				return q.WithTx(tx).RenameAuthor(ctx, plainq.RenameAuthorParams{ID: a.ID, Name: n()})
			})},
		}, slow: []action{
			{name: ":one", run: func(ctx context.Context) error { _, err := q.SlowAuthor(ctx); return err }},
			{name: "WithTx", run: inTx(db, func(ctx context.Context, tx *sql.Tx) error {
				_, err := q.WithTx(tx).SlowAuthor(ctx)
				return err
			})},
		}}
	})
}

func TestSqlcPrepared(t *testing.T) {
	suite(t, libSqlcPrepared, func(t *testing.T, dsn string) *client {
		authorsTable(t, dsn)
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		q := must(preparedq.Prepare(t.Context(), db))(t)
		n := counter()
		return &client{db: db, close: func() error { return errors.Join(q.Close(), db.Close()) }, actions: []action{
			{":one", 1, 0, func(ctx context.Context) error { _, err := q.CreateAuthor(ctx, n()); return err }},
			{":many", 1, 0, func(ctx context.Context) error { _, err := q.ListAuthors(ctx, []int64{1, 2}); return err }},
			{"WithTx with two queries", 1, 1, inTx(db, func(ctx context.Context, tx *sql.Tx) error {
				a, err := q.WithTx(tx).CreateAuthor(ctx, n())
				if err != nil {
					return err
				}
				return q.WithTx(tx).RenameAuthor(ctx, preparedq.RenameAuthorParams{ID: a.ID, Name: n()})
			})},
		}, slow: []action{
			{name: ":one", run: func(ctx context.Context) error { _, err := q.SlowAuthor(ctx); return err }},
			{name: "WithTx", run: inTx(db, func(ctx context.Context, tx *sql.Tx) error {
				_, err := q.WithTx(tx).SlowAuthor(ctx)
				return err
			})},
		}}
	})
}

// D06: statements prepared on the database and used in fifty transactions, with one permit and one connection: nobody
// waits for himself, each runs where its transaction runs, and the server keeps a bounded number of statements.
func TestD06SqlcPreparedInFiftyTransactions(t *testing.T) {
	works(t, libSqlcPrepared, "`WithTx` in 50 goroutines, one permit, one connection", "")
	dsn := set(pgtest.Shared(t).Database(t), "pool_max_conns", "1", "gate_running", "1", "gate_waiting", "50", "gate_max_wait", "20s")
	authorsTable(t, dsn)
	db := must(sql.Open(pgxgated.DriverName, dsn))(t)
	defer db.Close()
	q := must(preparedq.Prepare(t.Context(), db))(t)
	var wg sync.WaitGroup
	errs := make([]error, 50)
	for i := range errs {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			errs[i] = inTx(db, func(ctx context.Context, tx *sql.Tx) error {
				q := q.WithTx(tx)
				var pid int32
				if err := tx.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
					return err
				}
				a, err := q.CreateAuthor(ctx, fmt.Sprint("author", i))
				if err != nil {
					return err
				}
				if a.Backend != pid {
					return fmt.Errorf("ran on backend %d, its transaction on %d", a.Backend, pid)
				}
				return q.RenameAuthor(ctx, preparedq.RenameAuthorParams{ID: a.ID, Name: fmt.Sprint("renamed", i)})
			})(ctx)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	var prepared int
	if err := db.QueryRow("select count(*) from pg_prepared_statements").Scan(&prepared); err != nil || prepared > 10 {
		t.Errorf("%d statements are prepared, %v", prepared, err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	idle(t, pgxgated.GateOf(db))
}
