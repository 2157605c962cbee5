package compat

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jmoiron/sqlx"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libSqlx = "sqlx"

type item struct {
	ID   int64  `db:"id"`
	Name string `db:"name"`
}

const itemsTable = "create table items (id bigint generated always as identity primary key, name text not null unique)"

// bindSqlx is the documented one-liner. What it sets is global to sqlx, so it is taken back after the test.
func bindSqlx(t *testing.T) {
	sqlx.BindDriver(pgxgated.DriverName, sqlx.DOLLAR)
	t.Cleanup(func() { sqlx.BindDriver(pgxgated.DriverName, sqlx.UNKNOWN) })
}

func TestSqlx(t *testing.T) {
	suite(t, libSqlx, func(t *testing.T, dsn string) *client {
		bindSqlx(t)
		exec(t, plain(dsn), itemsTable)
		db, err := sqlx.Open(pgxgated.DriverName, dsn)
		if err != nil {
			t.Fatal(err)
		}
		n := counter()
		inTx := func(f func(ctx context.Context, tx *sqlx.Tx) error) func(context.Context) error {
			return func(ctx context.Context) error {
				tx, err := db.BeginTxx(ctx, nil)
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
		return &client{
			db: db.DB, close: db.Close,
			actions: []action{
				{"NamedExec", 1, 0, func(ctx context.Context) error {
					_, err := db.NamedExecContext(ctx, "insert into items (name) values (:name)", item{Name: n()})
					return err
				}},
				{"Get", 1, 0, func(ctx context.Context) error {
					var it item
					return db.GetContext(ctx, &it, "select id, name from items limit 1")
				}},
				{"Select", 1, 0, func(ctx context.Context) error {
					var its []item
					return db.SelectContext(ctx, &its, "select id, name from items where id > $1", 0)
				}},
				{"Beginx with two statements", 1, 1, inTx(func(ctx context.Context, tx *sqlx.Tx) error {
					var it item
					if err := tx.GetContext(ctx, &it, "insert into items (name) values ($1) returning id, name", n()); err != nil {
						return err
					}
					_, err := tx.NamedExecContext(ctx, "update items set name = :name where id = :id", item{it.ID, n()})
					return err
				})},
			},
			slow: []action{
				{name: "Get", run: func(ctx context.Context) error {
					return db.GetContext(ctx, new(int), "select 1 from pg_sleep(60)")
				}},
				{name: "Get in Beginx", run: inTx(func(ctx context.Context, tx *sqlx.Tx) error {
					return tx.GetContext(ctx, new(int), "select 1 from pg_sleep(60)")
				})},
			},
		}
	})
}

// C05: sqlx guesses the placeholder from the driver's name, and must be told.
func TestC05SqlxPlaceholders(t *testing.T) {
	all := func(t *testing.T, db *sqlx.DB) error {
		ctx := t.Context()
		if _, err := db.NamedExecContext(ctx, "insert into items (name) values (:name)", []item{{Name: "a"}, {Name: "b"}}); err != nil {
			return err
		}
		rows, err := db.NamedQueryContext(ctx, "select id, name from items where name = :name", map[string]any{"name": "b"})
		if err != nil {
			return err
		}
		defer rows.Close()
		var it item
		if !rows.Next() {
			t.Error("NamedQuery found nothing")
		} else if err := rows.StructScan(&it); err != nil || it.Name != "b" {
			t.Error(it, err)
		}
		rows.Close()
		query, args, err := sqlx.In("select name from items where name in (?) order by name", []string{"a", "b"})
		if err != nil {
			return err
		}
		var names []string
		if err := db.SelectContext(ctx, &names, db.Rebind(query), args...); err != nil {
			return err
		} else if len(names) != 2 {
			t.Error(names)
		}
		st, err := db.PrepareNamedContext(ctx, "select name from items where name = :name")
		if err != nil {
			return err
		}
		defer st.Close()
		var name string
		if err := st.GetContext(ctx, &name, item{Name: "a"}); err != nil || name != "a" {
			t.Error(name, err)
		}
		return nil
	}
	open := func(t *testing.T) (*sqlx.DB, *pgxgated.Gate) {
		dsn := pgtest.Shared(t).Database(t)
		exec(t, dsn, itemsTable)
		db, err := sqlx.Open(pgxgated.DriverName, set(dsn, tight...))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db, pgxgated.GateOf(db.DB)
	}
	const what = "named queries, `In` and `Rebind`"

	t.Run("BindDriver", func(t *testing.T) {
		works(t, libSqlx, what+" after `sqlx.Open`", "with `sqlx.BindDriver(\"pgx-gated\", sqlx.DOLLAR)` once at start")
		bindSqlx(t)
		db, g := open(t)
		if err := all(t, db); err != nil {
			t.Error(err)
		}
		idle(t, g)
	})
	t.Run("NewDb", func(t *testing.T) {
		works(t, libSqlx, what+" after `sqlx.NewDb(db, \"pgx\")`", "")
		db, g := open(t)
		if err := all(t, sqlx.NewDb(db.DB, "pgx")); err != nil {
			t.Error(err)
		}
		idle(t, g)
	})
	t.Run("Unbound", func(t *testing.T) {
		db, g := open(t)
		err := all(t, db)
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "42601" {
			t.Errorf("%v, want 42601 of the server", err)
		}
		worksNot(t, libSqlx, what+" after `sqlx.Open` without `BindDriver`", "sqlx sends `?` for a driver that it does not know", err)
		idle(t, g)
	})
}
