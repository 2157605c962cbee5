package gated

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestSmoke(t *testing.T) {
	s := pgtest.Shared(t)
	db, err := sql.Open("pgx-gated", pgtest.With(s.DSN(), "gate_running", "2"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ctx := context.Background()
	for range 3 {
	var n int
	if err := db.QueryRowContext(ctx, "select 42").Scan(&n); err != nil || n != 42 {
		t.Fatal(n, err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", pgxgated.GateOf(db).Stats())
	if _, err := tx.Exec("create temp table x(a int)"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	st, err := db.Prepare("select $1::int + 1")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.QueryRow(1).Scan(&n); err != nil || n != 2 {
		t.Fatal(n, err)
	}
	st.Close()
	}
	t.Logf("%+v", pgxgated.GateOf(db).Stats())
}
