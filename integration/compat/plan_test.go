package compat

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libSQL = "database/sql"

// A statement that is prepared anew after its table has changed works on plain pgx. Here, where a statement is its text
// and pgx keeps the plan, it must too; so must a text that is not prepared. In a transaction the server's error stays
// what it is.
func TestTableChangedUnderAKeptPlan(t *testing.T) {
	const query = "select * from grown where a = $1" // with an argument: pgx runs Exec without any as simple protocol
	ctx := context.Background()
	start := func(t *testing.T) (*sql.DB, *pgxgated.Gate) {
		dsn := set(pgtest.Shared(t).Database(t), tight...)
		exec(t, plain(dsn), "create table grown (a int)", "insert into grown values (1)")
		db, err := sql.Open(pgxgated.DriverName, dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		for range 2 { // the plan is kept
			if _, err := db.ExecContext(ctx, query, 1); err != nil {
				t.Fatal(err)
			}
		}
		return db, pgxgated.GateOf(db)
	}
	change := func(t *testing.T, on interface {
		ExecContext(context.Context, string, ...any) (sql.Result, error)
	}) {
		if _, err := on.ExecContext(ctx, "alter table grown add b int default 2"); err != nil {
			t.Fatal(err)
		}
	}
	var a, b int
	t.Run("query", func(t *testing.T) {
		works(t, libSQL, "a statement whose table has changed since it was last used, outside a transaction", "repeated once; plain pgx answers `cached plan must not change result type`")
		db, g := start(t)
		change(t, db)
		before := g.Stats().Acquired
		if err := db.QueryRowContext(ctx, query, 1).Scan(&a, &b); err != nil || b != 2 {
			t.Error(b, err)
		}
		if n := g.Stats().Acquired - before; n != 1 {
			t.Errorf("%d permits", n)
		}
		idle(t, g)
	})
	t.Run("exec", func(t *testing.T) {
		db, g := start(t)
		change(t, db)
		if _, err := db.ExecContext(ctx, query, 1); err != nil {
			t.Error(err)
		}
		idle(t, g)
	})
	t.Run("statement prepared anew", func(t *testing.T) {
		works(t, libSQL, "a statement prepared anew after its table has changed", "")
		db, g := start(t)
		for i := range 3 {
			st, err := db.PrepareContext(ctx, query)
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				err = st.QueryRowContext(ctx, 1).Scan(&a)
			} else {
				err = st.QueryRowContext(ctx, 1).Scan(&a, &b)
			}
			if err != nil {
				t.Error(i, err)
			}
			st.Close()
			if i == 0 {
				change(t, db)
			}
		}
		idle(t, g)
	})
	t.Run("pinned", func(t *testing.T) {
		db, g := start(t)
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var before, after int
		if err := conn.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&before); err != nil {
			t.Fatal(err)
		}
		change(t, conn)
		if err := conn.QueryRowContext(ctx, query, 1).Scan(&a, &b); err != nil || b != 2 {
			t.Error(b, err)
		}
		if err := conn.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&after); err != nil || before != after {
			t.Error(before, after, err) // I10
		}
		conn.Close()
		idle(t, g)
	})
	t.Run("transaction", func(t *testing.T) {
		db, g := start(t)
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		change(t, tx)
		err = tx.QueryRowContext(ctx, query, 1).Scan(&a, &b)
		if pgErr, ok := err.(*pgconn.PgError); !ok || pgErr.Code != "0A000" { // I9
			t.Errorf("%v (%T)", err, err)
		}
		if err := tx.Rollback(); err != nil {
			t.Error(err)
		}
		idle(t, g)
		worksNot(t, libSQL, "a statement whose table was changed in the same transaction", "as on plain pgx, but here also where it was prepared anew in between; `default_query_exec_mode=exec` has no plans to keep", err)
	})
	t.Run("BEGIN as text", func(t *testing.T) {
		db, g := start(t)
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.ExecContext(ctx, "begin"); err != nil {
			t.Fatal(err)
		}
		change(t, conn)
		var pgErr *pgconn.PgError
		if err := conn.QueryRowContext(ctx, query, 1).Scan(&a, &b); !errors.As(err, &pgErr) || pgErr.Code != "0A000" {
			t.Error(err)
		}
		if _, err := conn.ExecContext(ctx, "rollback"); err != nil {
			t.Error(err)
		}
		conn.Close()
		idle(t, g)
	})
}
