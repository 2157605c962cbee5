package gated

import (
	"context"
	"database/sql"
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

type named string

// C03: pgx's special arguments and types on all four paths, as on plain pgx, on a database that has no connection yet.
func TestC03ArgumentsAreThoseOfPlainPgx(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	ctx := context.Background()
	paths := map[string]func(db *sql.DB, query string, args ...any) (string, error){
		"Query": func(db *sql.DB, query string, args ...any) (s string, err error) {
			return s, db.QueryRow(query, args...).Scan(&s)
		},
		"Exec": func(db *sql.DB, query string, args ...any) (string, error) {
			res, err := db.Exec(query, args...)
			if err != nil {
				return "", err
			}
			n, err := res.RowsAffected()
			return fmt.Sprint(n), err
		},
		"Stmt": func(db *sql.DB, query string, args ...any) (s string, err error) {
			st, err := db.Prepare(query)
			if err != nil {
				return "", err
			}
			defer st.Close()
			return s, st.QueryRow(args...).Scan(&s)
		},
		"Tx Stmt": func(db *sql.DB, query string, args ...any) (s string, err error) {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return "", err
			}
			defer tx.Rollback()
			st, err := tx.Prepare(query)
			if err != nil {
				return "", err
			}
			return s, st.QueryRow(args...).Scan(&s)
		},
	}
	cases := []struct {
		query string
		args  []any
	}{
		{"select (1 = any($1::bigint[]))::text", []any{[]int64{1, 2}}},
		{"select array_to_string($1::text[], '-')", []any{[]string{"a", "b"}}},
		{"select $1::inet::text", []any{netip.MustParseAddr("10.0.0.1")}},
		{"select coalesce($1::timestamptz::text, 'null')", []any{(*time.Time)(nil)}},
		{"select $1::text", []any{named("x")}},
		{"select $1::text", []any{pgx.QueryExecModeSimpleProtocol, "x"}},
		{"select $1::text", []any{pgx.QueryExecModeExec, "x"}},
		{"select ($1::jsonb)::text", []any{map[string]int{"a": 1}}},
		{"select $1::text", []any{struct{}{}}},
		{"select $1::int::text", []any{"not a number"}},
		{"select @name::text", []any{pgx.NamedArgs{"name": "x"}}},
		{"select $1::text", []any{sql.Named("name", "x")}},
		{"select $1::text", nil},
	}
	for name, do := range paths {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, setup{})
			plain, err := sql.Open("pgx", dsn)
			must(t, err)
			defer plain.Close()
			agreed := 0
			for _, c := range cases {
				want, wantErr := do(plain, c.query, c.args...)
				got, gotErr := do(r.DB, c.query, c.args...)
				if got != want || fmt.Sprint(gotErr) != fmt.Sprint(wantErr) {
					t.Errorf("%s %v:\n got %q, %v\nwant %q, %v", c.query, c.args, got, gotErr, want, wantErr)
				}
				if wantErr == nil {
					agreed++
				}
			}
			if agreed < 6 {
				t.Errorf("only %d cases gave a result", agreed)
			}
			// The Exec path must not have bound anything merely for the check.
			r.running(0)
		})
	}
}

// C06: all that database/sql tells of columns is as on plain pgx, whatever stands in between.
func TestC06ColumnTypesAreThoseOfPlainPgx(t *testing.T) {
	const query = `select 1::int2 a, 2::int4 b, 3::int8 c, 1.5::float4 d, 2.5::float8 e, 1.23::numeric(10,2) f, 'x'::text g,
		'y'::varchar(7) h, 'z'::char(3) i, true j, now() k, current_date l, '\x00'::bytea m, '{}'::jsonb n,
		gen_random_uuid() o, array[1,2]::bigint[] p, '10.0.0.1'::inet q, interval '1 s' r, null::xml s, row(1,2) u`
	describe := func(db *sql.DB) (all []string) {
		t.Helper()
		rows, err := db.Query(query)
		must(t, err)
		defer rows.Close()
		types, err := rows.ColumnTypes()
		must(t, err)
		for _, c := range types {
			length, hasLength := c.Length()
			precision, scale, decimal := c.DecimalSize()
			nullable, known := c.Nullable()
			all = append(all, fmt.Sprintf("%s %s %v length %d %v decimal %d %d %v nullable %v %v", c.Name(), c.DatabaseTypeName(), c.ScanType(),
				length, hasLength, precision, scale, decimal, nullable, known))
		}
		return all
	}
	r := newRig(t, setup{})
	plain, err := sql.Open("pgx", r.dsn)
	must(t, err)
	defer plain.Close()
	want, got := describe(plain), describe(r.DB)
	if len(want) != 20 || !reflect.DeepEqual(got, want) {
		t.Errorf("\n got %q\nwant %q", got, want)
	}
	hooked := newRig(t, setup{opts: withSpy(&spy{})})
	if got := describe(hooked.DB); !reflect.DeepEqual(got, want) {
		t.Errorf("with an interceptor\n got %q\nwant %q", got, want)
	}
}

// Values arrive as they do on plain pgx, several result sets of the simple protocol included.
func TestValuesAreThoseOfPlainPgx(t *testing.T) {
	r := newRig(t, setup{})
	plain, err := sql.Open("pgx", r.dsn)
	must(t, err)
	defer plain.Close()
	read := func(db *sql.DB) (all []string) {
		t.Helper()
		rows, err := db.Query("select 1::int2, 1.23::numeric, 'x'::text, null::text, true, '2020-01-02'::date, '\\x01'::bytea, array[1,2], '{\"a\":1}'::jsonb")
		must(t, err)
		defer rows.Close()
		cols, err := rows.Columns()
		must(t, err)
		for rows.Next() {
			v := make([]any, len(cols))
			p := make([]any, len(cols))
			for i := range v {
				p[i] = &v[i]
			}
			must(t, rows.Scan(p...))
			for i := range v {
				all = append(all, fmt.Sprintf("%s %T %v", cols[i], v[i], v[i]))
			}
		}
		must(t, rows.Err())
		if rows.NextResultSet() {
			all = append(all, "another result set")
		}
		return all
	}
	if want, got := read(plain), read(r.DB); len(want) != 9 || !reflect.DeepEqual(got, want) {
		t.Errorf("\n got %q\nwant %q", got, want)
	}
}
