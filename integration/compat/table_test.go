package compat

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The columns of the table's main part: what every library is held to.
const (
	colGateOf  = "`GateOf`"
	colClose   = "`Close` ends all sessions"
	colPermits = "permits exact"
	colRefusal = "refusal is `ErrRejected`"
	colCancel  = "cancel leaves nothing"
)

var columns = []string{colGateOf, colClose, colPermits, colRefusal, colCancel}

// table is what the tests have found.
var table results

type results struct {
	mu       sync.Mutex // guards what follows
	cells    map[string]map[string]string
	features map[string]map[string]string
	skipped  []string
	versions string
}

func (r *results) put(t *testing.T, in *map[string]map[string]string, lib, what, result string) {
	t.Helper()
	t.Cleanup(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if t.Skipped() {
			r.skipped = append(r.skipped, lib+": "+what)
		}
		if t.Failed() || t.Skipped() {
			return
		}
		if *in == nil {
			*in = make(map[string]map[string]string)
		}
		if (*in)[lib] == nil {
			(*in)[lib] = make(map[string]string)
		}
		if was := (*in)[lib][what]; was != "" && was != result {
			t.Errorf("%s, %s: %q by one test and %q by another", lib, what, was, result)
		}
		(*in)[lib][what] = result
	})
}

// cell says that t tests a column of the main part for lib.
func cell(t *testing.T, lib, column string) { t.Helper(); cellIs(t, lib, column, "yes") }

// cellIs is cell where it takes other words than yes.
func cellIs(t *testing.T, lib, column, result string) {
	t.Helper()
	table.put(t, &table.cells, lib, column, result)
}

// works says that t tests something that works with lib, as it is or in the way that result says.
func works(t *testing.T, lib, what, result string) {
	t.Helper()
	if result != "" {
		result = "yes: " + result
	} else {
		result = "yes"
	}
	table.put(t, &table.features, lib, what, result)
}

// worksNot says that t has found something not to work with lib, for which reason, and the error that a user gets.
func worksNot(t *testing.T, lib, what, why string, err error) {
	t.Helper()
	if err == nil {
		t.Fatalf("%s, %s: no error", lib, what)
	}
	table.put(t, &table.features, lib, what, fmt.Sprintf("no: %s: `%v`", why, err))
}

// show is a feature whose result is a figure.
func show(t *testing.T, lib, what, figure string) {
	t.Helper()
	table.put(t, &table.features, lib, what, figure)
}

// modules are those whose versions the table names.
var modules = []string{
	"github.com/jackc/pgx/v5", "github.com/jmoiron/sqlx", "gorm.io/gorm", "gorm.io/driver/postgres", "github.com/uptrace/bun", "entgo.io/ent", "xorm.io/xorm",
	"github.com/pressly/goose/v3", "github.com/golang-migrate/migrate/v4", "github.com/riverqueue/river", "github.com/XSAM/otelsql", "github.com/DATA-DOG/go-sqlmock",
	"github.com/lib/pq",
}

// versions lists the modules as go.mod has them. The generated code says itself what generated it.
func versions(gomod []byte) (string, error) {
	var out []string
	for _, m := range modules {
		v := regexp.MustCompile(`(?m)^\s*(?:require )?` + regexp.QuoteMeta(m) + ` (v\S+)`).FindSubmatch(gomod)
		if v == nil {
			return "", fmt.Errorf("go.mod does not name %s", m)
		}
		out = append(out, fmt.Sprintf("%s %s", strings.TrimPrefix(m, "github.com/"), v[1]))
	}
	return strings.Join(out, ", "), nil
}

func (r *results) render() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b bytes.Buffer
	fmt.Fprintf(&b, "## Compatibility\n\nEach cell is a test of `integration/compat` on PostgreSQL 15, 17 and 18, with Go 1.26 and 1.27 and %s.\n\n", r.versions)
	libs := sortedKeys(r.cells)
	fmt.Fprintf(&b, "| | %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat(" --- |", len(columns)+1))
	for _, lib := range libs {
		fmt.Fprintf(&b, "| %s |", lib)
		for _, c := range columns {
			result := r.cells[lib][c]
			if result == "" {
				result = "–"
			}
			fmt.Fprintf(&b, " %s |", result)
		}
		b.WriteByte('\n')
	}
	b.WriteString("\n| | what | result |\n| --- | --- | --- |\n")
	for _, lib := range sortedKeys(r.features) {
		for _, what := range sortedKeys(r.features[lib]) {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", lib, what, r.features[lib][what])
		}
	}
	return b.Bytes()
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b string) int {
		return strings.Compare(strings.ToLower(a)+a, strings.ToLower(b)+b)
	})
	return keys
}

const (
	tableBegin = "<!-- compat:begin -->\n"
	tableEnd   = "<!-- compat:end -->\n"
)

// check compares the table with the README's, or writes it there.
func (r *results) check(path string, update bool) error {
	if len(r.skipped) > 0 {
		fmt.Printf("compatibility table not compared: skipped %s\n", strings.Join(r.skipped, "; "))
		return nil
	}
	if r.versions == "" {
		gomod, err := os.ReadFile("../go.mod")
		if err != nil {
			return err
		}
		if r.versions, err = versions(gomod); err != nil {
			return err
		}
	}
	readme, err := os.ReadFile(path)
	if err != nil && !(update && os.IsNotExist(err)) {
		return err
	}
	before, rest, ok1 := bytes.Cut(readme, []byte(tableBegin))
	was, after, ok2 := bytes.Cut(rest, []byte(tableEnd))
	if !ok1 || !ok2 {
		if !update {
			return fmt.Errorf("%s has no %s … %s; UPDATE=1 adds it", path, strings.TrimSpace(tableBegin), strings.TrimSpace(tableEnd))
		}
		before, was, after = append(bytes.TrimRight(readme, "\n"), "\n\n"...), nil, nil
	}
	now := r.render()
	if bytes.Equal(was, now) {
		return nil
	}
	if !update {
		return fmt.Errorf("the compatibility table of %s is not what the tests found (UPDATE=1 rewrites it); they found:\n%s", path, now)
	}
	return os.WriteFile(path, slices.Concat(before, []byte(tableBegin), now, []byte(tableEnd), after), 0o644)
}

// The table is the same bytes whatever the order in which the tests ran, a cell without a passed test is a dash, and a
// table that differs from the README's is an error.
func TestTableIsComparedByteByByte(t *testing.T) {
	r := results{versions: "x v1"}
	r.cells = map[string]map[string]string{"b": {colGateOf: "yes"}, "A": {colClose: "yes"}}
	r.features = map[string]map[string]string{"b": {"y": "yes", "x": "no: because"}}
	path := t.TempDir() + "/README.md"
	if err := os.WriteFile(path, []byte("# x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.check(path, false); err == nil {
		t.Error("a README without the table passed")
	}
	if err := r.check(path, true); err != nil {
		t.Fatal(err)
	}
	if err := r.check(path, false); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := "# x\n\n" + tableBegin + "## Compatibility\n\nEach cell is a test of `integration/compat` on PostgreSQL 15, 17 and 18, with Go 1.26 and 1.27 and x v1.\n\n| | `GateOf` | `Close` ends all sessions | permits exact | refusal is `ErrRejected` | cancel leaves nothing |\n" +
		"| --- | --- | --- | --- | --- | --- |\n| A | – | yes | – | – | – |\n| b | yes | – | – | – | – |\n\n" +
		"| | what | result |\n| --- | --- | --- |\n| b | x | no: because |\n| b | y | yes |\n" + tableEnd
	if string(text) != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	if err := os.WriteFile(path, bytes.Replace(text, []byte("because"), []byte("Because"), 1), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.check(path, false); err == nil {
		t.Error("one byte of difference passed")
	}
}
