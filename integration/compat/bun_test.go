package compat

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libBun = "bun"

type bunItem struct {
	bun.BaseModel `bun:"table:bun_items"`

	ID   int64    `bun:",pk,autoincrement"`
	Name string   `bun:",notnull,unique"`
	Tags []string `bun:",array"`
}

// C08 too: nested transactions are savepoints under the same permit.
func TestC08Bun(t *testing.T) {
	suite(t, libBun, func(t *testing.T, dsn string) *client {
		std := must(sql.Open(pgxgated.DriverName, dsn))(t)
		db := bun.NewDB(std, pgdialect.New())
		if _, err := db.NewCreateTable().Model((*bunItem)(nil)).Exec(t.Context()); err != nil {
			t.Fatal(err)
		}
		n := counter()
		insert := func(ctx context.Context, on bun.IDB) error {
			_, err := on.NewInsert().Model(&bunItem{Name: n(), Tags: []string{"a", "b"}}).Exec(ctx)
			return err
		}
		return &client{db: std, close: db.Close, actions: []action{
			{"Insert", 1, 0, func(ctx context.Context) error { return insert(ctx, db) }},
			{"Select", 1, 0, func(ctx context.Context) error {
				var its []bunItem
				if err := db.NewSelect().Model(&its).Where("name <> ?", "x").Scan(ctx); err != nil {
					return err
				}
				if len(its) == 0 || len(its[0].Tags) != 2 {
					return errors.New("nothing found")
				}
				return nil
			}},
			{"RunInTx nested three deep", 1, 1, func(ctx context.Context) error {
				return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
					return errors.Join(insert(ctx, tx), tx.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
						return errors.Join(insert(ctx, tx), tx.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error { return insert(ctx, tx) }))
					}))
				})
			}},
			{"RunInTx whose nested one fails", 1, 1, func(ctx context.Context) error {
				fails := errors.New("fails")
				return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
					name := n()
					err := tx.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
						if _, err := tx.NewInsert().Model(&bunItem{Name: name}).Exec(ctx); err != nil {
							return err
						}
						return fails
					})
					if err != fails {
						return err
					}
					left, err := tx.NewSelect().Model((*bunItem)(nil)).Where("name = ?", name).Count(ctx)
					if err == nil && left != 0 {
						err = errors.New("the nested transaction has left a row")
					}
					return err
				})
			}},
		}, slow: []action{
			{name: "Select", run: func(ctx context.Context) error {
				return db.NewSelect().ColumnExpr("1").TableExpr("pg_sleep(60)").Scan(ctx, new(int))
			}},
			{name: "Exec in a nested RunInTx", run: func(ctx context.Context) error {
				return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
					return tx.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
						_, err := tx.ExecContext(ctx, "select pg_sleep(60)")
						return err
					})
				})
			}},
		}}
	})
}

// C08: the outer handle inside a transaction asks for a second permit, and is refused at once with one that is all.
func TestC08BunOuterHandleInsideTransaction(t *testing.T) {
	std := must(sql.Open(pgxgated.DriverName, set(pgtest.Shared(t).Database(t), tight...)))(t)
	db := bun.NewDB(std, pgdialect.New())
	defer db.Close()
	err := db.RunInTx(t.Context(), nil, func(ctx context.Context, _ bun.Tx) error {
		return db.RunInTx(ctx, nil, func(context.Context, bun.Tx) error { return nil })
	})
	if !errors.Is(err, pgxgated.ErrRejected) {
		t.Fatalf("%v, want a refusal", err)
	}
	idle(t, pgxgated.GateOf(std))
	worksNot(t, libBun, "the outer handle inside `RunInTx`, `gate_running=1`", "it is a second transaction, which on a full pool would wait for the first for ever; use the `tx` that is handed in", pgxgatedErr(err))
}

// I9: bun's errors are the server's.
func TestBunServerErrors(t *testing.T) {
	std := must(sql.Open(pgxgated.DriverName, set(pgtest.Shared(t).Database(t), tight...)))(t)
	db := bun.NewDB(std, pgdialect.New())
	defer db.Close()
	_, err := db.NewSelect().TableExpr("nowhere").Exec(t.Context())
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42P01" {
		t.Errorf("%v (%T)", err, err)
	}
	idle(t, pgxgated.GateOf(std))
}
