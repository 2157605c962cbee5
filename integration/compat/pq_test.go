package compat

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"
)

// What the migration guide says of code that speaks to lib/pq itself.
func TestMovingFromLibPQ(t *testing.T) {
	const lib = "code written for lib/pq"
	db, g, _ := openTight(t, itemsTable)
	ctx := t.Context()

	works(t, lib, "`pq.Array`", "")
	var n int
	if err := db.QueryRowContext(ctx, "select count(*) from unnest($1::text[])", pq.Array([]string{"a", "b"})).Scan(&n); err != nil || n != 2 {
		t.Error(n, err)
	}
	var back []int64
	if err := db.QueryRowContext(ctx, "select array[1, 2, 3]::bigint[]").Scan(pq.Array(&back)); err != nil || len(back) != 3 {
		t.Error(back, err)
	}

	tx := must(db.BeginTx(ctx, nil))(t)
	//lint:ignore SA1019 deprecated, and still what services that came from lib/pq call
	st := must(tx.PrepareContext(ctx, pq.CopyIn("items", "name")))(t)
	_, err := st.ExecContext(ctx, "a")
	if err == nil {
		t.Error("pq.CopyIn took a row")
	}
	if err := tx.Rollback(); err != nil {
		t.Error(err)
	}
	idle(t, g)
	worksNot(t, lib, "`pq.CopyIn`", "use `CopyFrom` of `PgxConn`", err)

	_, err = db.ExecContext(ctx, "select * from nowhere")
	var asPq *pq.Error
	var asPgx *pgconn.PgError
	if !errors.As(err, &asPgx) || errors.As(err, &asPq) {
		t.Errorf("%v (%T)", err, err)
	}
	idle(t, g)
	worksNot(t, lib, "`errors.As` with `*pq.Error`", "use `*pgconn.PgError`", err)
}
