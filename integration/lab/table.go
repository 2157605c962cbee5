//go:build unix

package main

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// table is one CSV file of results: what the plots, the README and the ratios are made of, and all that they are made of.
type table struct {
	name    string
	columns []string
	rows    [][]string
}

func newTable(name string, columns ...string) *table { return &table{name: name, columns: columns} }

// add adds a row. It panics if the row does not fit: a bug.
func (t *table) add(values ...any) {
	if len(values) != len(t.columns) {
		panic(fmt.Sprintf("bug: %s has %d columns, not %d", t.name, len(t.columns), len(values)))
	}
	row := make([]string, len(values))
	for i, v := range values {
		if f, ok := v.(float64); ok {
			row[i] = strconv.FormatFloat(f, 'g', 5, 64)
		} else {
			row[i] = fmt.Sprint(v)
		}
	}
	t.rows = append(t.rows, row)
}

// write puts the table where the next run, or nobody, finds half of it.
func (t *table) write(dir string) error {
	f, err := os.CreateTemp(dir, t.name+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	w := csv.NewWriter(f)
	if err := w.WriteAll(append([][]string{t.columns}, t.rows...)); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(dir, t.name+".csv"))
}

// readTable reads one back, and nil where it was not measured.
func readTable(dir, name string) (*table, error) {
	f, err := os.Open(filepath.Join(dir, name+".csv"))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	all, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s.csv is empty", name)
	}
	return &table{name: name, columns: all[0], rows: all[1:]}, nil
}

// text is a value by its column's name. It panics on a column that does not exist: a bug, or a file of another version.
func (t *table) text(row []string, column string) string {
	for i, c := range t.columns {
		if c == column {
			return row[i]
		}
	}
	panic(fmt.Sprintf("%s.csv has no column %q", t.name, column))
}

func (t *table) float(row []string, column string) float64 {
	f, err := strconv.ParseFloat(t.text(row, column), 64)
	if err != nil {
		panic(fmt.Sprintf("%s.csv: %s: %v", t.name, column, err))
	}
	return f
}

// where are the rows whose columns have these values: column, value, column, value…
func (t *table) where(pairs ...string) (rows [][]string) {
	if t == nil {
		return nil
	}
next:
	for _, r := range t.rows {
		for i := 0; i < len(pairs); i += 2 {
			if t.text(r, pairs[i]) != pairs[i+1] {
				continue next
			}
		}
		rows = append(rows, r)
	}
	return rows
}

// value is that of the one row that where finds, and false where there is none.
func (t *table) value(column string, pairs ...string) (float64, bool) {
	rows := t.where(pairs...)
	if len(rows) == 0 {
		return 0, false
	}
	return t.float(rows[0], column), true
}

// distinct are a column's values in the order of their first appearance.
func (t *table) distinct(column string) (values []string) {
	seen := make(map[string]bool)
	for _, r := range t.rows {
		if v := t.text(r, column); !seen[v] {
			seen[v] = true
			values = append(values, v)
		}
	}
	return values
}
