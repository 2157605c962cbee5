package contract

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	_ "github.com/jackc/pgx/v5/stdlib" // the peer

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// TestEquivalence runs one table of operations through the driver pgx and through pgx-gated, and compares everything that
// a caller can see: values and their dynamic types, column metadata, rows affected, and errors with the dynamic types of
// their whole chain (I9). Each operation runs on a connection pool of one, in each of pgx's ways to run a statement.
func TestEquivalence(t *testing.T) {
	modes := []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}
	server := pgtest.Shared(t)
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			open := func(name string) *sql.DB {
				dsn := pgtest.With(server.Database(t), "default_query_exec_mode", mode)
				if name == pgxgated.DriverName {
					for key, value := range map[string]string{"pool_max_conns": "1", "gate_running": "1", "gate_max_wait": "30s", "gate_deadline_admission": "off"} {
						dsn = pgtest.With(dsn, key, value)
					}
				}
				db, err := sql.Open(name, dsn)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { db.Close() })
				db.SetMaxOpenConns(1)
				if _, err := db.Exec(equivalenceSchema); err != nil {
					t.Fatal(err)
				}
				return db
			}
			plain, gated := open("pgx"), open(pgxgated.DriverName)
			for _, o := range operations(mode) {
				t.Run(o.name, func(t *testing.T) {
					var a, b transcript
					o.run(&a, plain)
					o.run(&b, gated)
					switch same := a.String() == b.String(); {
					case len(a.lines) == 0:
						t.Error("nothing to compare")
					case !same && o.differs == "":
						t.Errorf("pgx:\n%s\npgx-gated:\n%s", &a, &b)
					case same && o.differs != "" && mode == "cache_statement":
						t.Errorf("no difference any more: %s", &a)
					}
				})
			}
			e := &env{T: t}
			e.adopt(gated, nil, &logs{}).idle()
		})
	}
}

const equivalenceSchema = `
create table parent (id int primary key, name text not null, n numeric(10,2), at timestamptz);
create table child (id serial primary key, parent int references parent deferrable initially deferred);
create type mood as enum ('sad', 'ok');
create domain positive as int check (value > 0);
create function raises(code text) returns int language plpgsql as $$ begin raise exception 'mine' using errcode = code, detail = 'd', hint = 'h'; end $$;
create procedure proc(inout x int) language plpgsql as $$ begin x := x + 1; end $$`

type operation struct {
	name    string
	run     func(*transcript, *sql.DB)
	differs string // why it must: a promise of ours that plain pgx does not make
}

// transcript is what a caller sees.
type transcript struct{ lines []string }

func (t *transcript) String() string { return strings.Join(t.lines, "\n") }

func (t *transcript) add(format string, args ...any) {
	t.lines = append(t.lines, fmt.Sprintf(format, args...))
}

// err notes an error: the dynamic types of its chain and its text.
func (t *transcript) err(err error) {
	if err == nil {
		t.add("no error")
		return
	}
	t.add("error %s: %v", chain(err), err)
}

func chain(err error) string {
	s := fmt.Sprintf("%T", err)
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if in := e.Unwrap(); in != nil {
			s += " > " + chain(in)
		}
	case interface{ Unwrap() []error }:
		for _, in := range e.Unwrap() {
			s += " > (" + chain(in) + ")"
		}
	}
	return s
}

func (t *transcript) result(r sql.Result, err error) {
	t.err(err)
	if err != nil {
		return
	}
	n, err := r.RowsAffected()
	t.add("%d rows", n)
	t.err(err)
	_, err = r.LastInsertId()
	t.err(err)
}

// rows notes columns, their types, and every value as it is scanned into an any.
func (t *transcript) rows(rows *sql.Rows, err error) {
	t.err(err)
	if err != nil {
		return
	}
	defer rows.Close()
	for {
		columns, err := rows.Columns()
		t.add("columns %q", columns)
		t.err(err)
		types, err := rows.ColumnTypes()
		t.err(err)
		for _, c := range types {
			length, hasLength := c.Length()
			nullable, hasNullable := c.Nullable()
			precision, scale, hasScale := c.DecimalSize()
			t.add("%s: %s, scan %v, length %d %t, nullable %t %t, decimal %d,%d %t", c.Name(), c.DatabaseTypeName(), c.ScanType(),
				length, hasLength, nullable, hasNullable, precision, scale, hasScale)
		}
		for rows.Next() {
			values := make([]any, len(columns))
			into := make([]any, len(columns))
			for i := range into {
				into[i] = &values[i]
			}
			t.err(rows.Scan(into...))
			for _, v := range values {
				t.add("%T %v", v, v)
			}
		}
		t.err(rows.Err())
		if !rows.NextResultSet() {
			break
		}
		t.add("next result set")
	}
	t.err(rows.Close())
}

// into notes a scan into a variable of type T.
func into[T any](t *transcript, db *sql.DB, query string) {
	var v T
	err := db.QueryRow(query).Scan(&v)
	t.add("%T %v", v, v)
	t.err(err)
}

type text string

var equivalentTypes = []string{
	"1::int2", "1::int4", "1::int8", "1.5::float4", "1.5::float8", "'NaN'::float8", "123.45::numeric(10,2)", "123::numeric", "'NaN'::numeric", "true", "null::int", "null",
	"'x'::text", "'x'::varchar(10)", "'x'::char(3)", "'x'::name", `'\x00ff'::bytea`, "'2020-01-02'::date", "'2020-01-02 03:04:05'::timestamp", "'2020-01-02 03:04:05Z'::timestamptz",
	"'infinity'::timestamptz", "'-infinity'::date", "'03:04:05'::time", "'03:04:05+01'::timetz", "'1 day 2 hours'::interval", `'{"a": 1}'::json`, `'{"a": [1, null]}'::jsonb`, "'null'::jsonb",
	"'00000000-0000-0000-0000-000000000001'::uuid", "'10.0.0.1'::inet", "'10.0.0.0/8'::cidr", "'08:00:2b:01:02:03'::macaddr", "array[1,2,3]::bigint[]", "array['a',null]::text[]", "'{}'::int[]",
	"'[1,5)'::int4range", "'(1,2)'::point", "'101'::bit(3)", "'1.20'::money", "1::oid", "1::positive", "row(1,'x')", "'<a/>'::xml", "pg_typeof(1)", "'a b'::tsvector", "''::text", "repeat('x', 10000)",
}

func operations(mode string) []operation {
	ctx := context.Background()
	// A prepared statement is its text here, run as the mode says. Plain pgx prepares it by name even where the mode wants no
	// named statements, and then knows the types of its arguments.
	prepares := mode != "exec" && mode != "simple_protocol"
	ops := []operation{}
	add := func(name string, run func(*transcript, *sql.DB)) { ops = append(ops, operation{name: name, run: run}) }

	for _, e := range equivalentTypes {
		add("type "+e, func(t *transcript, db *sql.DB) {
			t.rows(db.Query("select " + e + " as v"))
			t.rows(db.Query("select " + e + " as v where false"))
		})
	}

	add("scan into variables", func(t *transcript, db *sql.DB) {
		into[int](t, db, "select 7::int2")
		into[int64](t, db, "select 7::numeric")
		into[int8](t, db, "select 1000")
		into[string](t, db, "select 7")
		into[string](t, db, "select null::text")
		into[*string](t, db, "select null::text")
		into[text](t, db, "select 'x'")
		into[[]byte](t, db, "select 'x'::bytea")
		into[float64](t, db, "select 1.5::numeric")
		into[bool](t, db, "select true")
		into[time.Time](t, db, "select '2020-01-02'::date")
		into[time.Time](t, db, "select 'infinity'::timestamptz")
		into[sql.NullString](t, db, "select null::text")
		into[sql.Null[int32]](t, db, "select 4")
		into[netip.Addr](t, db, "select '10.0.0.1'::inet")
		into[[]int64](t, db, "select array[1,2]::bigint[]")
		into[[]string](t, db, "select array['a','b']")
		into[map[string]any](t, db, `select '{"a": 1}'::jsonb`)
		into[pgtype.Numeric](t, db, "select 1.25::numeric")
		into[pgtype.Range[pgtype.Int4]](t, db, "select '[1,5)'::int4range")
		into[any](t, db, "select array[1,2]::bigint[]")
		into[int](t, db, "select 1 where false")
		into[int](t, db, "select 'x'")
		into[[16]byte](t, db, "select '00000000-0000-0000-0000-000000000001'::uuid")
	})

	arguments := []struct {
		cast string
		v    any
	}{
		{"int", 7}, {"int", int8(7)}, {"bigint", int64(math.MaxInt64)}, {"bigint", uint64(math.MaxUint64)}, {"int", "7"}, {"int", "x"}, {"int", nil}, {"int", 1.5}, {"text", "x"}, {"text", text("x")}, {"text", []byte("x")},
		{"text", 7}, {"bool", true}, {"float8", 1.5}, {"float8", math.NaN()}, {"numeric", "1.25"}, {"numeric", 1.25}, {"bytea", []byte{0, 255}}, {"timestamptz", time.Date(2020, 1, 2, 3, 4, 5, 6000, time.UTC)}, {"date", time.Date(2020, 1, 2, 0, 0, 0, 0, time.UTC)},
		{"timestamptz", (*time.Time)(nil)}, {"interval", time.Hour}, {"bigint[]", []int64{1, 2}}, {"text[]", []string{"a", "b"}}, {"text[]", []string(nil)}, {"inet", netip.MustParseAddr("10.0.0.1")}, {"jsonb", map[string]any{"a": 1}}, {"jsonb", []byte(`{"a":1}`)}, {"json", `{"a":1}`},
		{"uuid", [16]byte{15: 1}}, {"text", sql.NullString{}}, {"text", sql.NullString{String: "x", Valid: true}}, {"int", sql.Null[int]{V: 3, Valid: true}}, {"int4range", pgtype.Range[pgtype.Int4]{}}, {"int", struct{}{}}, {"int", func() {}}, {"int", make(chan int)}, {"text", driver.Valuer(nil)}, {"text", failing{}}, {"mood", "ok"}, {"mood", "great"}, {"positive", -1},
	}
	for i, a := range arguments {
		add(fmt.Sprintf("argument %d %T as %s", i, a.v, a.cast), func(t *transcript, db *sql.DB) {
			if _, ok := a.v.(chan int); ok {
				t.add("its text is its address")
				_, err := db.Exec("select $1::int", a.v)
				t.add("%s", chain(err))
				return
			}
			if _, ok := a.v.(func()); ok {
				t.add("its text is its address")
				_, err := db.Exec("select $1::int", a.v)
				t.add("%s", chain(err))
				return
			}
			t.rows(db.Query("select $1::"+a.cast+"::text as v", a.v))
			t.result(db.Exec("select $1::"+a.cast, a.v))
			st, err := db.Prepare("select $1::" + a.cast + "::text as v")
			t.err(err)
			if err == nil && prepares {
				t.rows(st.Query(a.v))
			}
			if err == nil {
				t.err(st.Close())
			}
		})
	}

	add("arguments of pgx's own", func(t *transcript, db *sql.DB) {
		t.rows(db.Query("select $1::int as v", pgx.QueryExecModeSimpleProtocol, 7))
		t.rows(db.Query("select $1::int as v", pgx.QueryExecModeExec, 7))
		t.rows(db.Query("select @a::int as v", pgx.NamedArgs{"a": 7}))
		t.rows(db.Query("select $1::int as v", pgx.QueryResultFormats{pgx.TextFormatCode}, 7))
		t.result(db.Exec("select $1::int", pgx.QueryExecModeSimpleProtocol, 7))
		t.rows(db.Query("select $1::int as v", sql.Named("a", 7)))
		st, err := db.Prepare("select $1::int as v")
		t.err(err)
		t.rows(st.Query(pgx.QueryExecModeSimpleProtocol, 7))
		t.err(st.Close())
	})

	for _, q := range []string{
		"this is no SQL", "select nothing", "select * from nowhere", "select 1/0", "select 'x'::int", "insert into parent values (1, null)", "insert into parent values (1, 'a'), (1, 'b')", "insert into child (parent) values (99)",
		"select raises('P0001')", "select raises('40001')", "select raises('57014')", "select raises('0A000')", "select raises('53300')", "select 1/(3-i) from generate_series(1, 5) i", "select $1", "select $2::int", "select", "", "-- nothing", ";", "select 1; select 2", "select 1; select 1/0",
		"insert into parent values (2, 'b') returning id, name", "update parent set name = 'c' where id = 2", "delete from parent where id = 2 returning *", "create table made (a int)", "drop table made", "explain (costs off) select 1", "show search_path", "values (1, 'a'), (2, 'b')", "do $$ begin perform 1; end $$",
		"call proc(1)", "listen x", "unlisten *", "notify x", "set application_name = 'x'", "reset application_name", "table parent", "copy parent to stdout", "vacuum parent", "lock table parent", "discard plans", "prepare p as select 1", "execute p", "deallocate p", "checkpoint", "select pg_sleep(0)",
		"begin", "commit", "rollback", "truncate parent cascade", "select 1 as a, 2 as a, 3", "fetch 1 from nothing", "select * from parent", "with w as (select 1 as a) select * from w", "merge into parent p using (select 5 as id) s on p.id = s.id when not matched then insert values (5, 'x')",
	} {
		add("statement "+q, func(t *transcript, db *sql.DB) {
			if q == "begin" || strings.Contains(q, "raises('53300')") {
				return1(t, db, q)
				return
			}
			t.result(db.Exec(q))
			t.rows(db.Query(q))
		})
		add("in a transaction "+q, func(t *transcript, db *sql.DB) {
			tx, err := db.Begin()
			t.err(err)
			if err != nil {
				return
			}
			t.result(tx.Exec(q))
			t.rows(tx.Query("select 1 as after"))
			t.err(tx.Commit())
			t.err(tx.Rollback())
		})
		add("prepared "+q, func(t *transcript, db *sql.DB) {
			st, err := db.Prepare(q)
			t.err(err)
			if err != nil {
				return
			}
			if q != "begin" && q != "commit" && q != "rollback" {
				t.result(st.Exec())
				t.rows(st.Query())
			}
			_, err = st.Exec(1, 2, 3)
			t.err(err)
			t.err(st.Close())
			_, err = st.Exec()
			t.err(err)
		})
	}

	for level := sql.LevelDefault; level <= sql.LevelLinearizable+1; level++ {
		for _, readOnly := range []bool{false, true} {
			add(fmt.Sprintf("options %v %t", level, readOnly), func(t *transcript, db *sql.DB) {
				tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level, ReadOnly: readOnly})
				t.err(err)
				if err != nil {
					return
				}
				t.rows(tx.Query("select current_setting('transaction_isolation'), current_setting('transaction_read_only')"))
				t.result(tx.Exec("create table no (a int)"))
				t.err(tx.Rollback())
			})
		}
	}

	add("commit of an aborted transaction", func(t *transcript, db *sql.DB) {
		tx, err := db.Begin()
		t.err(err)
		t.result(tx.Exec("select 1/0"))
		t.result(tx.Exec("select 1"))
		t.err(tx.Commit())
		t.rows(db.Query("select 1 as after"))
	})
	add("deferred constraint in commit", func(t *transcript, db *sql.DB) {
		tx, err := db.Begin()
		t.err(err)
		t.result(tx.Exec("insert into child (id, parent) values (1000, 99)"))
		t.err(tx.Commit())
		t.rows(db.Query("select 1 as after"))
	})
	add("dead context", func(t *transcript, db *sql.DB) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		_, err := db.ExecContext(ctx, "select 1")
		t.err(err)
		_, err = db.BeginTx(ctx, nil)
		t.err(err)
		_, err = db.PrepareContext(ctx, "select 1")
		t.err(err)
		t.err(db.PingContext(ctx))
	})
	add("deadline in a statement", func(t *transcript, db *sql.DB) {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err := db.ExecContext(ctx, "select pg_sleep(10)")
		t.add("%t %t", errors.Is(err, context.DeadlineExceeded), errors.Is(err, driver.ErrBadConn))
		t.rows(db.Query("select 1 as after"))
	})
	add("cancelled transaction", func(t *transcript, db *sql.DB) {
		ctx, cancel := context.WithCancel(ctx)
		tx, err := db.BeginTx(ctx, nil)
		t.err(err)
		cancel()
		if err == nil {
			err = tx.Commit() // database/sql says it in one of two ways
			t.add("%t", errors.Is(err, context.Canceled) || errors.Is(err, sql.ErrTxDone))
		}
		t.rows(db.Query("select 1 as after"))
	})
	add("sessions", func(t *transcript, db *sql.DB) {
		c, err := db.Conn(ctx)
		t.err(err)
		t.result(c.ExecContext(ctx, "create temp table session (a int)"))
		tx, err := c.BeginTx(ctx, nil)
		t.err(err)
		t.result(tx.Exec("insert into session values (1)"))
		t.err(tx.Commit())
		st, err := c.PrepareContext(ctx, "select a from session where a = $1")
		t.err(err)
		t.rows(st.Query(1))
		t.err(st.Close())
		t.result(c.ExecContext(ctx, "drop table session"))
		t.err(c.Close())
		t.err(c.Close())
		_, err = c.ExecContext(ctx, "select 1")
		t.err(err)
	})
	add("statements of database and transaction", func(t *transcript, db *sql.DB) {
		st, err := db.Prepare("select $1::int as v")
		t.err(err)
		tx, err := db.Begin()
		t.err(err)
		in := tx.Stmt(st)
		t.rows(in.Query(1))
		t.err(tx.Commit())
		_, err = in.Exec(1)
		t.err(err)
		t.rows(st.Query(2))
		_, err = st.Exec()
		t.err(err)
		_, err = st.Exec("x")
		t.err(err)
		t.err(st.Close())
	})
	add("rows closed early and read too far", func(t *transcript, db *sql.DB) {
		rows, err := db.Query("select i from generate_series(1, 1000) i")
		t.err(err)
		t.add("%t", rows.Next())
		t.err(rows.Close())
		t.add("%t", rows.Next())
		var n int
		t.err(rows.Scan(&n))
		t.err(rows.Err())
		t.rows(db.Query("select 1 as after"))
	})
	ops = append(ops, operation{
		name: "a query while rows are open", differs: "plain pgx answers driver.ErrBadConn, which never reaches a caller here",
		run: func(t *transcript, db *sql.DB) {
			tx, err := db.Begin()
			t.err(err)
			rows, err := tx.Query("select i from generate_series(1, 1000) i")
			t.err(err)
			t.add("%t", rows.Next())
			_, err = tx.Query("select 1")
			t.err(err)
			t.err(rows.Close())
			_ = tx.Rollback()
		},
	})
	return ops
}

// return1 runs a statement that must not stay open, on a connection that is then told to roll back.
func return1(t *transcript, db *sql.DB, q string) {
	c, err := db.Conn(context.Background())
	t.err(err)
	t.result(c.ExecContext(context.Background(), q))
	t.result(c.ExecContext(context.Background(), "rollback"))
	t.err(c.Close())
}

// failing is an argument that cannot be had.
type failing struct{}

func (failing) Value() (driver.Value, error) { return nil, errors.New("no value") }
