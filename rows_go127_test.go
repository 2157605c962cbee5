//go:build go1.27

package pgxgated

import (
	"database/sql/driver"
	"fmt"
	"io"
)

// scannerRows scan columns themselves: database/sql never calls their Next.
type scannerRows struct {
	plainRows
	at int
}

func (r *scannerRows) Next([]driver.Value) error { panic("Next of rows that scan columns themselves") }

func (r *scannerRows) NextRow() error {
	if r.at == r.left {
		return io.EOF
	}
	r.at++
	return nil
}

func (r *scannerRows) ScanColumn(_ driver.ScanContext, i int, dest any) error {
	*dest.(*any) = fmt.Sprintf("row %d column %d", r.at, i)
	return nil
}

func init() {
	rowShapes["ColumnScanner"] = func() driver.Rows { return &scannerRows{plainRows: plainRows{2}} }
}
