package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"io"
	"reflect"
	"testing"
)

type plainRows struct{ left int }

func (r *plainRows) Columns() []string { return []string{"n"} }
func (r *plainRows) Close() error      { return nil }
func (r *plainRows) Next(dest []driver.Value) error {
	if r.left == 0 {
		return io.EOF
	}
	r.left--
	dest[0] = int64(r.left)
	return nil
}

type (
	hasName      struct{ driver.Rows }
	hasLength    struct{ driver.Rows }
	hasNullable  struct{ driver.Rows }
	hasPrecision struct{ driver.Rows }
	hasScanType  struct{ driver.Rows }
	hasNext      struct {
		driver.Rows
		sets int
	}
	hasAll struct {
		driver.Rows
		hasName
		hasLength
		hasNullable
		hasPrecision
		hasScanType
	}
)

func (hasName) ColumnTypeDatabaseTypeName(int) string                  { return "INT8" }
func (hasLength) ColumnTypeLength(int) (int64, bool)                   { return 17, true }
func (hasNullable) ColumnTypeNullable(int) (bool, bool)                { return true, true }
func (hasPrecision) ColumnTypePrecisionScale(int) (int64, int64, bool) { return 9, 2, true }
func (hasScanType) ColumnTypeScanType(int) reflect.Type                { return reflect.TypeFor[int64]() }
func (r *hasNext) HasNextResultSet() bool                              { return r.sets > 0 }
func (r *hasNext) NextResultSet() error {
	if r.sets == 0 {
		return io.EOF
	}
	r.sets--
	r.Rows = &plainRows{left: 1}
	return nil
}

func (r hasAll) Columns() []string              { return r.Rows.Columns() }
func (r hasAll) Close() error                   { return r.Rows.Close() }
func (r hasAll) Next(dest []driver.Value) error { return r.Rows.Next(dest) }

var rowShapes = map[string]func() driver.Rows{
	"none":           func() driver.Rows { return &plainRows{2} },
	"DatabaseName":   func() driver.Rows { return hasName{&plainRows{2}} },
	"Length":         func() driver.Rows { return hasLength{&plainRows{2}} },
	"Nullable":       func() driver.Rows { return hasNullable{&plainRows{2}} },
	"PrecisionScale": func() driver.Rows { return hasPrecision{&plainRows{2}} },
	"ScanType":       func() driver.Rows { return hasScanType{&plainRows{2}} },
	"NextResultSet":  func() driver.Rows { return &hasNext{&plainRows{2}, 2} },
	"all":            func() driver.Rows { return hasAll{Rows: &plainRows{2}} },
}

// rowsDriver is a fakeDriver whose queries return rows of a given shape.
type rowsDriver struct {
	fakeDriver
	make func() driver.Rows
}

func (d *rowsDriver) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := d.fakeDriver.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &rowsConn{c.(*fakeConn), d}, nil
}

type rowsConn struct {
	*fakeConn
	d *rowsDriver
}

func (c *rowsConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return c.d.make(), nil
}

// describeRows is all that a user can find out about rows.
func describeRows(rows *sql.Rows) string {
	var s string
	for {
		columns, err := rows.Columns()
		s += fmt.Sprintln(columns, err)
		types, err := rows.ColumnTypes()
		s += fmt.Sprintln(err)
		for _, c := range types {
			length, hasLength := c.Length()
			nullable, hasNullable := c.Nullable()
			precision, scale, hasScale := c.DecimalSize()
			s += fmt.Sprintln(c.Name(), c.DatabaseTypeName(), c.ScanType(), length, hasLength, nullable, hasNullable, precision, scale, hasScale)
		}
		for rows.Next() {
			var v any
			err := rows.Scan(&v)
			s += fmt.Sprintln(v, err)
		}
		s += fmt.Sprintln(rows.Err())
		if !rows.NextResultSet() {
			return s + fmt.Sprintln(rows.Err(), rows.Close(), rows.Err())
		}
	}
}

// F14: whatever optional interfaces the driver's rows have, nobody can tell whether they come through the gate: not on the
// plain path, not with an interceptor, and not below a wrapper that hides the return.
func TestF14RowsAnswerAsWithoutAGate(t *testing.T) {
	for name, shape := range rowShapes {
		t.Run(name, func(t *testing.T) {
			plain := sql.OpenDB(&rowsDriver{make: shape})
			defer plain.Close()
			rows, err := plain.Query("x")
			if err != nil {
				t.Fatal(err)
			}
			want := describeRows(rows)
			for _, way := range []string{"plain", "interceptor", "hidden"} {
				inner := sql.OpenDB(&rowsDriver{make: shape})
				defer inner.Close()
				opts := []Option{WithLimits(Limits{Running: 1})}
				if way == "interceptor" {
					opts = append(opts, WithInterceptors(&hookInterceptor{}))
				}
				db, err := OpenDB(inner, opts...)
				if err != nil {
					t.Fatal(err)
				}
				defer db.Close()
				g := GateOf(db)
				if way == "hidden" {
					db = sql.OpenDB(hideAll(db.Driver().(*Driver).c))
					defer db.Close()
				}
				rows, err := db.Query("x")
				if err != nil {
					t.Fatal(err)
				}
				if got := describeRows(rows); got != want {
					t.Errorf("%s:\n%s\nwithout a gate:\n%s", way, got, want)
				}
				if st := g.Stats(); st.Running != 0 {
					t.Errorf("%s: running %d", way, st.Running)
				}
			}
		})
	}
}

// The plain path hands out the driver's own value.
func TestF14PlainPathHandsOutTheDriversRows(t *testing.T) {
	for name, shape := range rowShapes {
		t.Run(name, func(t *testing.T) {
			made := shape()
			inner := sql.OpenDB(&rowsDriver{make: func() driver.Rows { return made }})
			defer inner.Close()
			db, err := OpenDB(inner, WithLimits(Limits{Running: 1}))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if _, err := db.Exec("x"); err != nil {
				t.Fatal(err)
			}
			c, err := db.Conn(ctxBG)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.Raw(func(dc any) error {
				got, err := dc.(driver.QueryerContext).QueryContext(ctxBG, "x", nil)
				if err != nil {
					return err
				}
				defer got.Close()
				if got != made {
					t.Errorf("a %T, want the driver's own %T", got, made)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
