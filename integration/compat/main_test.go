// Package compat runs other people's libraries on the driver. Each cell of the README's compatibility table is a test of
// this package, which renders the table when all its tests have passed and compares it with the README, byte by byte.
// UPDATE=1 writes it there.
package compat

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		os.Exit(runChild(name))
	}
	flag.Parse()
	skipExamplesWithoutServer()
	goleak.VerifyTestMain(tableAfter{pgtest.M{M: m}},
		// With PrepareStmt, GORM starts one goroutine per *gorm.DB and never ends it.
		goleak.IgnoreTopFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

// tableAfter is a testing.M that looks at the table when the tests have ended.
type tableAfter struct{ pgtest.M }

func (a tableAfter) Run() int {
	code := a.M.Run()
	if code != 0 {
		return code
	}
	if run := flag.Lookup("test.run").Value.String(); run != "" || flag.Lookup("test.skip").Value.String() != "" {
		return 0 // not all tests ran, so there is no whole table
	}
	if err := table.check("../../README.md", os.Getenv("UPDATE") == "1"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// exampleTB is for the Example functions, which have no testing.TB: it gives them the tests' server.
type exampleTB struct{ testing.TB }

type noServer struct{ reason any }

func (exampleTB) Helper()          {}
func (exampleTB) Skip(args ...any) { panic(noServer{args[0]}) }

func (exampleTB) Fatal(args ...any) { panic(args[0]) }

func exampleDSN() string { return pgtest.Shared(exampleTB{}).DSN() }

// skipExamplesWithoutServer leaves the examples out where no server is to be had and none is required; the tests say so.
func skipExamplesWithoutServer() {
	if flag.Lookup("test.list").Value.String() != "" {
		return
	}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case noServer:
			_ = flag.Set("test.skip", "^Example")
		default:
			panic(r)
		}
	}()
	exampleDSN()
}
