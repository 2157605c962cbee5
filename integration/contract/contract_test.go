package contract

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// condition is one promise and its test. Its number is for good: a new one goes to the end of the list.
type condition struct {
	id   int
	area string
	ref  string // of ../CASES.md; "" for none
	says string
	test func(*env)
}

var conditions = slices.SortedFunc(slices.Values(slices.Concat(
	transactions, admission, waits, afterwards, serverSide, physicals, begins, commits, panics, rowsAndForgotten,
	pinned, statements, closing, limits, together,
)), func(a, b condition) int { return cmp.Compare(a.id, b.id) })

// atLeast is how many conditions the contract has to have.
const atLeast = 75

func TestContract(t *testing.T) {
	server := pgtest.Shared(t)
	var held atomic.Int64
	t.Run("conditions", func(t *testing.T) {
		for _, c := range conditions {
			t.Run(c.name(), func(t *testing.T) {
				t.Parallel()
				e := newEnv(t)
				c.test(e)
				e.done()
				if !t.Failed() && !t.Skipped() {
					held.Add(1)
				}
			})
		}
	})
	fmt.Printf("contract: %d of %d conditions hold on PostgreSQL %s\n", held.Load(), len(conditions), server.VersionString())
}

func (c condition) name() string {
	name := fmt.Sprintf("%03d_", c.id)
	if c.ref != "" {
		name += c.ref + "_"
	}
	words := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		case r == ' ':
			return '_'
		}
		return -1
	}, c.says)
	if len(words) > 60 {
		words = words[:60]
	}
	return name + words
}

func TestNumbersAreInOrder(t *testing.T) {
	if len(conditions) < atLeast {
		t.Errorf("%d conditions, want %d or more", len(conditions), atLeast)
	}
	seen := make(map[string]int)
	for i, c := range conditions {
		if c.id != i+1 {
			t.Errorf("condition %d stands where %d should", c.id, i+1)
		}
		if was := seen[c.says]; was != 0 || c.says == "" || c.area == "" || c.test == nil {
			t.Errorf("condition %d is incomplete, or says the same as %d", c.id, was)
		}
		seen[c.says] = c.id
	}
}

// TestReadme compares README.md with the list, byte by byte.
func TestReadme(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(readmeHead)
	fmt.Fprintf(&b, "There are %d conditions.\n", len(conditions))
	areas := make([]string, 0, 20)
	for _, c := range conditions {
		if !slices.Contains(areas, c.area) {
			areas = append(areas, c.area)
		}
	}
	for _, area := range areas {
		fmt.Fprintf(&b, "\n## %s\n\n| # | condition | case |\n| --- | --- | --- |\n", area)
		for _, c := range conditions {
			if c.area == area {
				fmt.Fprintf(&b, "| %d | %s | %s |\n", c.id, c.says, c.ref)
			}
		}
	}
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile("README.md", b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Error("README.md is not what the conditions say; UPDATE=1 go test ./contract -run TestReadme writes it")
	}
}

const readmeHead = `<!-- Made by TestReadme from the list of conditions. Do not edit. -->

# Contract

What the driver promises. Each condition is a test of this package on a real PostgreSQL, and its number is its name:

` + "```" + `
go -C integration test -race ./contract                                      # any PostgreSQL
PGXGATED_PGVERSION=17 go -C integration test -race ./contract                # this one: 15, 17, 18
go -C integration test -race ./contract -run 'TestContract/conditions/042'   # one condition
` + "```" + `

Each condition has a database of its own, and after each of them nothing runs, waits or drains, no physical connection is out,
and the server has no session left. *Case* is the kind of public report that taught the condition: see [CASES.md](../CASES.md).

`
