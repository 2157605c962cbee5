package compat

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	osexec "os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// patience bounds every wait of these tests for what must come. It is not a measure of anything.
const patience = 20 * time.Second

// tight are the settings of the shared properties: one operation at a time, and whoever would need a second one is refused
// at once instead of waiting for itself.
var tight = []string{"pool_max_conns", "2", "gate_running", "1", "gate_waiting", "0", "gate_max_wait", "0"}

// client is a database as a library has opened it.
type client struct {
	db      *sql.DB // what GateOf is asked with
	close   func() error
	actions []action
	slow    []action // run pg_sleep on the server until their context ends it

	// canceled tells whether an error is what the driver below answers when the context ends; nil: context.Canceled.
	canceled func(error) bool
}

// action is one thing that a user of the library does.
type action struct {
	name    string
	all, tx uint64 // operations it is: permits with gate_scope=all, and =tx
	run     func(ctx context.Context) error
}

// suite holds a library to what all are held to. open prepares what the actions need, schema included.
func suite(t *testing.T, lib string, open func(t *testing.T, dsn string) *client) {
	start := func(t *testing.T, settings ...string) (*client, *pgxgated.Gate, *observer) {
		t.Helper()
		dsn := pgtest.Shared(t).Database(t)
		c := open(t, set(set(dsn, tight...), settings...))
		t.Cleanup(func() { _ = c.close() })
		g := pgxgated.GateOf(c.db)
		if g == nil {
			t.Fatal("GateOf is nil")
		}
		return c, g, observe(t, dsn)
	}
	do := func(t *testing.T, a action) {
		t.Helper()
		if err := a.run(t.Context()); err != nil {
			t.Errorf("%s: %v", a.name, err)
		}
	}

	t.Run("GateOf", func(t *testing.T) {
		cell(t, lib, colGateOf)
		c, g, _ := start(t)
		before := g.Stats()
		if before.Limits.Running != 1 {
			t.Errorf("running %d", before.Limits.Running)
		}
		do(t, c.actions[0])
		if g.Stats().Acquired == before.Acquired {
			t.Error("the gate has not seen the operation")
		}
		idle(t, g)
	})
	t.Run("Close", func(t *testing.T) {
		cell(t, lib, colClose)
		c, g, o := start(t)
		for _, a := range c.actions {
			do(t, a)
		}
		idle(t, g)
		if o.sessions("") == 0 {
			t.Fatal("no session to be closed")
		}
		if err := c.close(); err != nil {
			t.Error(err)
		}
		o.until("sessions after Close", func() bool { return o.sessions("") == 0 })
	})
	t.Run("Permits", func(t *testing.T) {
		cell(t, lib, colPermits)
		var figures []string
		for _, scope := range []string{"all", "tx"} {
			c, g, o := start(t, "gate_scope", scope)
			for _, a := range c.actions {
				want := a.all
				if scope == "tx" {
					want = a.tx
				} else {
					figures = append(figures, fmt.Sprintf("%s %d/%d", a.name, a.all, a.tx))
				}
				before := g.Stats().Acquired
				do(t, a)
				if got := g.Stats().Acquired - before; got != want {
					t.Errorf("gate_scope=%s: %s took %d permits, want %d", scope, a.name, got, want)
				}
			}
			idle(t, g)
			o.quiet()
			_ = c.close()
		}
		show(t, lib, "permits, `gate_scope=all`/`tx`", strings.Join(figures, ", "))
	})
	t.Run("Refusal", func(t *testing.T) {
		cell(t, lib, colRefusal)
		c, g, o := start(t)
		for _, a := range c.actions {
			if a.all == 0 {
				continue
			}
			p, err := g.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			before := g.Stats()
			err = a.run(t.Context())
			if !errors.Is(err, pgxgated.ErrRejected) || !errors.Is(err, pgxgated.ErrAdmissionFull) {
				t.Errorf("%s: %v (%T)", a.name, err, err)
			}
			if now := g.Stats(); now.AdmissionFull == before.AdmissionFull || now.Acquired != before.Acquired {
				t.Errorf("%s: %+v", a.name, now)
			}
			p.Release()
			idle(t, g)
			o.quiet()
			do(t, a) // nothing of the library's is broken by it
		}
		idle(t, g)
	})
	t.Run("Cancel", func(t *testing.T) {
		cell(t, lib, colCancel)
		c, g, o := start(t)
		for _, a := range c.slow {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- a.run(ctx) }()
			o.until(a.name+" at work", func() bool { return o.sessions("state = 'active' and query like '%pg_sleep%'") == 1 })
			cancel()
			select {
			case err := <-done:
				if !errors.Is(err, context.Canceled) && (c.canceled == nil || !c.canceled(err)) {
					t.Errorf("%s: %v (%T)", a.name, err, err)
				}
			case <-time.After(patience):
				t.Fatalf("%s has not returned", a.name)
			}
			idle(t, g)
			if n := o.sessions("query like '%pg_sleep%' and state <> 'idle'"); n != 0 {
				t.Errorf("%s: its permit is back while the server is at work", a.name)
			}
			o.quiet()
			for _, a := range c.actions {
				do(t, a)
			}
		}
		idle(t, g)
	})
}

// set changes settings of a DSN, given as keys and values.
func set(dsn string, settings ...string) string {
	for i := 0; i < len(settings); i += 2 {
		dsn = pgtest.With(dsn, settings[i], settings[i+1])
	}
	return dsn
}

// await polls until the condition holds.
func await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: waited %v in vain", what, patience)
		}
	}
}

// idle waits until the gate has nothing out.
func idle(t testing.TB, g *pgxgated.Gate) {
	t.Helper()
	await(t, "idle gate", func() bool {
		s := g.Stats()
		return s.Running == 0 && s.Waiting == 0 && s.Draining == 0
	})
}

// observer looks at a database from the outside.
type observer struct {
	t    testing.TB
	conn *pgx.Conn
	name string
}

func observe(t testing.TB, dsn string) *observer {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	o := &observer{t: t, name: cfg.Database}
	if o.conn, err = pgx.Connect(context.Background(), pgtest.Shared(t).DSN()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.conn.Close(context.Background()) })
	return o
}

// sessions counts the sessions of the database of which the condition holds.
func (o *observer) sessions(cond string) (n int) {
	o.t.Helper()
	if cond == "" {
		cond = "true"
	}
	err := o.conn.QueryRow(context.Background(), "select count(*) from pg_stat_activity where datname = $1 and backend_type = 'client backend' and ("+cond+")", o.name).Scan(&n)
	if err != nil {
		o.t.Fatal(err)
	}
	return n
}

func (o *observer) until(what string, cond func() bool) {
	o.t.Helper()
	await(o.t, what, cond)
}

// quiet waits until no session is at work or in a transaction.
func (o *observer) quiet() {
	o.t.Helper()
	o.until("quiet sessions", func() bool { return o.sessions("state <> 'idle'") == 0 })
}

// exec runs statements on a database directly, past every gate.
func exec(t testing.TB, dsn string, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for _, s := range statements {
		if _, err := conn.Exec(context.Background(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// ask returns the one value of a query that runs directly, past every gate.
func ask[T any](t testing.TB, dsn, query string) (v T) {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if err := conn.QueryRow(context.Background(), query).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

// Children are this test binary run again, for what only a second process shows.
const (
	childEnv    = "PGXGATED_COMPAT_CHILD"
	childDSNEnv = "PGXGATED_COMPAT_DSN"
)

var children = map[string]func(dsn string) error{}

func runChild(name string) int {
	if err := children[name](os.Getenv(childDSNEnv)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// race runs a child n times at once and returns what each printed.
func race(t *testing.T, n int, name, dsn string) []string {
	t.Helper()
	out := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
			defer cancel()
			cmd := child(ctx, name, dsn)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			stdout, err := cmd.Output()
			if err != nil {
				t.Errorf("child %s: %v\n%s", name, err, stderr.Bytes())
			}
			out[i] = string(stdout)
		})
	}
	wg.Wait()
	return out
}

func child(ctx context.Context, name, dsn string) *osexec.Cmd {
	cmd := osexec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+name, childDSNEnv+"="+dsn)
	return cmd
}

// plain is a DSN without the driver's own keys, for connections past it.
func plain(dsn string) string {
	before, query, ok := strings.Cut(dsn, "?")
	if !ok {
		return dsn
	}
	var keep []string
	for pair := range strings.SplitSeq(query, "&") {
		if !strings.HasPrefix(pair, "gate_") && !strings.HasPrefix(pair, "pool_") {
			keep = append(keep, pair)
		}
	}
	return before + "?" + strings.Join(keep, "&")
}

// counter returns a maker of names that differ.
func counter() func() string {
	var n atomic.Int64
	return func() string { return fmt.Sprintf("n%d", n.Add(1)) }
}
