//go:build go1.27

package pgxgated

import "database/sql/driver"

// scanningRows are rows of a driver that scans columns itself. Next is then never called, and so neither is an
// interceptor's RowsNext (F22).
type scanningRows struct {
	*rows
	scanner driver.RowsColumnScanner
}

var _ driver.RowsColumnScanner = scanningRows{}

func init() {
	withScanner = func(r *rows) driver.Rows {
		if s, ok := r.raw.(driver.RowsColumnScanner); ok {
			return scanningRows{r, s}
		}
		return r
	}
}

func (r scanningRows) NextRow() error {
	if r.lost {
		return r.c.errLost()
	}
	returned := false
	defer r.guard(&returned)
	err := r.scanner.NextRow()
	returned = true
	return err
}

func (r scanningRows) ScanColumn(ctx driver.ScanContext, i int, dest any) error {
	return r.scanner.ScanColumn(ctx, i, dest)
}
