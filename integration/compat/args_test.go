package compat

import (
	"context"
	"database/sql"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

type level string

// C03: pgx's own first argument and its Go types go through every path as they do on plain pgx.
func TestC03ArgumentsAsOnPlainPgx(t *testing.T) {
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	}
	type arguments struct {
		name, query string
		args        []any
		mode        bool // the first argument is a mode
	}
	cases := []arguments{
		{"ANY of []int64", "select (3 = any($1::bigint[]))::text", []any{[]int64{1, 2, 3}}, false},
		{"[]string", "select array_to_string($1::text[], ',')", []any{[]string{"a", "b"}}, false},
		{"netip.Addr", "select host($1::inet)", []any{netip.MustParseAddr("10.1.2.3")}, false},
		{"nil *time.Time", "select coalesce($1::timestamptz::text, 'null')", []any{(*time.Time)(nil)}, false},
		{"named string", "select $1::text", []any{level("high")}, false},
		{"map as jsonb", "select ($1::jsonb)->>'k'", []any{map[string]any{"k": "v"}}, false},
		{"too few", "select $1::text || $2::text", []any{"a"}, false},
	}
	for _, m := range modes {
		cases = append(cases, arguments{m.String(), "select $1::text", []any{m, "x"}, true})
	}

	scan := func(row *sql.Row) (s string, err error) { return s, row.Scan(&s) }
	paths := map[string]func(ctx context.Context, db *sql.DB, query string, args []any) (string, error){
		"Query": func(ctx context.Context, db *sql.DB, query string, args []any) (string, error) {
			return scan(db.QueryRowContext(ctx, query, args...))
		},
		"Exec": func(ctx context.Context, db *sql.DB, query string, args []any) (string, error) {
			r, err := db.ExecContext(ctx, query, args...)
			if err != nil {
				return "", err
			}
			n, err := r.RowsAffected()
			return fmt.Sprint(n), err
		},
		"Tx": func(ctx context.Context, db *sql.DB, query string, args []any) (string, error) {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return "", err
			}
			defer tx.Rollback()
			return scan(tx.QueryRowContext(ctx, query, args...))
		},
		"DB statement": func(ctx context.Context, db *sql.DB, query string, args []any) (string, error) {
			st, err := db.PrepareContext(ctx, query)
			if err != nil {
				return "", err
			}
			defer st.Close()
			return scan(st.QueryRowContext(ctx, args...))
		},
		"Tx statement": func(ctx context.Context, db *sql.DB, query string, args []any) (string, error) {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return "", err
			}
			defer tx.Rollback()
			st, err := tx.PrepareContext(ctx, query)
			if err != nil {
				return "", err
			}
			defer st.Close()
			return scan(st.QueryRowContext(ctx, args...))
		},
	}

	works(t, libSQL, "arguments: slices, `netip.Addr`, named types, nil pointers, maps", "as on plain pgx")
	works(t, libSQL, "arguments: `pgx.QueryExecMode…` as the first", "as on plain pgx: not of a prepared statement, which refuses it (`expected 1 arguments, got 2`)")
	dsn := set(pgtest.Shared(t).Database(t), tight...)
	gated, direct := must(sql.Open(pgxgated.DriverName, dsn))(t), must(sql.Open("pgx", plain(dsn)))(t)
	defer gated.Close()
	defer direct.Close()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for path, run := range paths {
				want, wantErr := run(t.Context(), direct, c.query, c.args)
				got, err := run(t.Context(), gated, c.query, c.args)
				if got != want || fmt.Sprint(err) != fmt.Sprint(wantErr) {
					t.Errorf("%s: %q, %v; plain pgx: %q, %v", path, got, err, want, wantErr)
				}
				statement := path == "DB statement" || path == "Tx statement"
				if fails := c.mode && statement || c.name == "too few"; fails != (err != nil) {
					t.Errorf("%s: %v", path, err)
				}
			}
			idle(t, pgxgated.GateOf(gated))
		})
	}
}
