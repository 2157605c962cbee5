package compat

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/compat/ent"
	"github.com/pgxgated/pgxgated/integration/compat/ent/pet"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libEnt = "ent"

func openEnt(db *sql.DB) *ent.Client {
	return ent.NewClient(ent.Driver(entsql.OpenDB(dialect.Postgres, db)))
}

// C05 too: ent takes a *sql.DB with the dialect named.
func TestC05Ent(t *testing.T) {
	suite(t, libEnt, func(t *testing.T, dsn string) *client {
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		c := openEnt(db)
		for range 2 { // migrating again changes nothing
			if err := c.Schema.Create(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		n := counter()
		inTx := func(f func(ctx context.Context, tx *ent.Tx) error) func(context.Context) error {
			return func(ctx context.Context) error {
				tx, err := c.Tx(ctx)
				if err != nil {
					return err
				}
				if err := f(ctx, tx); err != nil {
					return errors.Join(err, tx.Rollback())
				}
				return tx.Commit()
			}
		}
		return &client{db: db, close: c.Close, actions: []action{
			{"Create", 1, 0, func(ctx context.Context) error { return c.Pet.Create().SetName(n()).Exec(ctx) }},
			{"Query", 1, 0, func(ctx context.Context) error {
				_, err := c.Pet.Query().Where(pet.NameNEQ("x")).All(ctx)
				return err
			}},
			{"CreateBulk", 1, 0, func(ctx context.Context) error {
				return c.Pet.CreateBulk(c.Pet.Create().SetName(n()), c.Pet.Create().SetName(n())).Exec(ctx)
			}},
			{"Tx with two statements", 1, 1, inTx(func(ctx context.Context, tx *ent.Tx) error {
				p, err := tx.Pet.Create().SetName(n()).Save(ctx)
				if err != nil {
					return err
				}
				return tx.Pet.UpdateOne(p).SetName(n()).Exec(ctx)
			})},
		}, slow: []action{
			{name: "Query", run: func(ctx context.Context) error {
				_, err := c.Pet.Query().Where(func(s *entsql.Selector) { s.Where(entsql.ExprP("1 = (select 1 from pg_sleep(60))")) }).Count(ctx)
				return err
			}},
			{name: "Query in Tx", run: inTx(func(ctx context.Context, tx *ent.Tx) error {
				_, err := tx.Pet.Query().Where(func(s *entsql.Selector) { s.Where(entsql.ExprP("1 = (select 1 from pg_sleep(60))")) }).Count(ctx)
				return err
			})},
		}}
	})
	t.Run("by name", func(t *testing.T) {
		_, err := ent.Open(pgxgated.DriverName, pgtest.Shared(t).DSN())
		worksNot(t, libEnt, "`ent.Open(\"pgx-gated\", …)`", "ent takes the driver's name for the dialect's; use `entsql.OpenDB(dialect.Postgres, db)`", err)
	})
	t.Run("constraint error", func(t *testing.T) {
		works(t, libEnt, "`IsConstraintError`", "")
		db := must(sql.Open(pgxgated.DriverName, set(pgtest.Shared(t).Database(t), tight...)))(t)
		c := openEnt(db)
		defer c.Close()
		if err := c.Schema.Create(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Pet.Create().SetName("same").Exec(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Pet.Create().SetName("same").Exec(t.Context()); !ent.IsConstraintError(err) {
			t.Errorf("%v (%T)", err, err)
		}
		idle(t, pgxgated.GateOf(db))
	})
}
