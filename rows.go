package pgxgated

import (
	"database/sql/driver"
	"io"
	"reflect"
)

// rows are handed out instead of the driver's own where somebody must see them end: an interceptor's RowsClose, a user's
// tracer that may panic there (F17), or the operation itself where no hook tells of the connection's return. They have every optional interface; where the driver's
// rows lack one, they answer as database/sql does for rows without it, so that nobody can tell (F14).
type rows struct {
	driver.Rows             // as the interceptors wrap it
	raw         driver.Rows // as the driver made it
	c           *conn
	ended       bool
	lost        bool // a call panicked: the connection is being destroyed, and must not be touched any more
}

var (
	_ driver.RowsNextResultSet              = (*rows)(nil)
	_ driver.RowsColumnTypeDatabaseTypeName = (*rows)(nil)
	_ driver.RowsColumnTypeLength           = (*rows)(nil)
	_ driver.RowsColumnTypeNullable         = (*rows)(nil)
	_ driver.RowsColumnTypePrecisionScale   = (*rows)(nil)
	_ driver.RowsColumnTypeScanType         = (*rows)(nil)
)

func newRows(c *conn, raw, hooked driver.Rows) driver.Rows {
	return withScanner(&rows{Rows: hooked, raw: raw, c: c})
}

// withScanner adds what Go 1.27 knows (rows_go127.go).
var withScanner = func(r *rows) driver.Rows { return r }

func (r *rows) guard(returned *bool) {
	if !*returned {
		r.lost = true
		r.c.guard(returned)
	}
}

func (r *rows) Next(dest []driver.Value) error {
	if r.lost {
		return r.c.errLost()
	}
	returned := false
	defer r.guard(&returned)
	err := r.Rows.Next(dest)
	returned = true
	return err
}

func (r *rows) Close() error {
	if r.lost {
		return nil
	}
	returned := false
	defer r.guard(&returned)
	err := r.Rows.Close()
	if err != nil {
		_ = r.raw.Close() // an interceptor that returns an error may not have gone on
	}
	returned = true
	if !r.ended {
		r.ended = true
		r.c.endPooled()
	}
	return err
}

func (r *rows) HasNextResultSet() bool {
	n, ok := r.raw.(driver.RowsNextResultSet)
	return ok && n.HasNextResultSet()
}

func (r *rows) NextResultSet() error {
	if n, ok := r.raw.(driver.RowsNextResultSet); ok {
		return n.NextResultSet()
	}
	return io.EOF
}

func (r *rows) ColumnTypeDatabaseTypeName(i int) string {
	if t, ok := r.raw.(driver.RowsColumnTypeDatabaseTypeName); ok {
		return t.ColumnTypeDatabaseTypeName(i)
	}
	return ""
}

func (r *rows) ColumnTypeLength(i int) (int64, bool) {
	if t, ok := r.raw.(driver.RowsColumnTypeLength); ok {
		return t.ColumnTypeLength(i)
	}
	return 0, false
}

func (r *rows) ColumnTypeNullable(i int) (nullable, ok bool) {
	if t, ok := r.raw.(driver.RowsColumnTypeNullable); ok {
		return t.ColumnTypeNullable(i)
	}
	return false, false
}

func (r *rows) ColumnTypePrecisionScale(i int) (precision, scale int64, ok bool) {
	if t, ok := r.raw.(driver.RowsColumnTypePrecisionScale); ok {
		return t.ColumnTypePrecisionScale(i)
	}
	return 0, 0, false
}

func (r *rows) ColumnTypeScanType(i int) reflect.Type {
	if t, ok := r.raw.(driver.RowsColumnTypeScanType); ok {
		return t.ColumnTypeScanType(i)
	}
	return reflect.TypeFor[any]()
}
