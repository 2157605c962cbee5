// Package contract is what the driver promises, as a numbered list of conditions of which each is a test on a real
// PostgreSQL. README.md is made from it.
//
//	go test -race ./contract                           # any PostgreSQL
//	PGXGATED_PGVERSION=17 go test -race ./contract     # that one
//	UPDATE=1 go test ./contract -run TestReadme        # writes README.md
package contract

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Most conditions wait for the server or for a clock, so more of them than there are processors go on at a time.
	_ = flag.Set("test.parallel", "6")
	goleak.VerifyTestMain(pgtest.M{M: m})
}
