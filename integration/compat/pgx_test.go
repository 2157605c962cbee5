package compat

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libPgx = "pgx, through `Raw` and `PgxConn`"

// raw runs f with the pgx connection of a pinned connection.
func raw(ctx context.Context, conn *sql.Conn, f func(*pgx.Conn) error) error {
	return conn.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(ctx, dc)
		if err != nil {
			return err
		}
		return f(pc)
	})
}

func openTight(t *testing.T, statements ...string) (db *sql.DB, g *pgxgated.Gate, dsn string) {
	t.Helper()
	dsn = set(pgtest.Shared(t).Database(t), tight...)
	exec(t, plain(dsn), statements...)
	db = must(sql.Open(pgxgated.DriverName, dsn))(t)
	t.Cleanup(func() { db.Close() })
	return db, pgxgated.GateOf(db), dsn
}

func TestPgxCopyFromInATransaction(t *testing.T) {
	works(t, libPgx, "CopyFrom in an open transaction", "")
	db, g, dsn := openTight(t, itemsTable)
	ctx := t.Context()
	conn := must(db.Conn(ctx))(t)
	for _, commit := range []bool{false, true} {
		tx := must(conn.BeginTx(ctx, nil))(t)
		if err := raw(ctx, conn, func(pc *pgx.Conn) error {
			n, err := pc.CopyFrom(ctx, pgx.Identifier{"items"}, []string{"name"}, pgx.CopyFromRows([][]any{{"a"}, {"b"}, {"c"}}))
			if n != 3 {
				t.Errorf("%d rows copied", n)
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		end, want := tx.Rollback, 0
		if commit {
			end, want = tx.Commit, 3
		}
		if err := end(); err != nil {
			t.Error(err)
		}
		if n := ask[int](t, plain(dsn), "select count(*) from items"); n != want {
			t.Errorf("%d rows, want %d", n, want)
		}
	}
	if n := g.Stats().Acquired; n != 1 {
		t.Errorf("%d permits for one pinned connection", n)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	idle(t, g)
}

func TestPgxBatch(t *testing.T) {
	works(t, libPgx, "batch", "")
	db, g, _ := openTight(t, itemsTable)
	ctx := t.Context()
	conn := must(db.Conn(ctx))(t)
	var n int
	if err := raw(ctx, conn, func(pc *pgx.Conn) error {
		var b pgx.Batch
		b.Queue("insert into items (name) values ($1)", "a")
		b.Queue("insert into items (name) values ($1)", "b")
		b.Queue("select count(*) from items").QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
		return pc.SendBatch(ctx, &b).Close()
	}); err != nil || n != 2 {
		t.Error(n, err)
	}
	conn.Close()
	idle(t, g)
}

func TestPgxListenNotify(t *testing.T) {
	works(t, libPgx, "LISTEN and NOTIFY on a pinned connection", "with `Bypass`, as it would hold its permit for ever")
	db, g, _ := openTight(t)
	ctx := pgxgated.Bypass(t.Context())
	conn := must(db.Conn(ctx))(t)
	if _, err := conn.ExecContext(ctx, "listen news"); err != nil {
		t.Fatal(err)
	}
	if s := g.Stats(); s.Running != 0 {
		t.Errorf("%d running", s.Running)
	}
	if _, err := db.ExecContext(t.Context(), "select pg_notify('news', 'hello')"); err != nil {
		t.Error(err)
	}
	var got string
	if err := raw(ctx, conn, func(pc *pgx.Conn) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		n, err := pc.WaitForNotification(ctx)
		if err == nil {
			got = n.Payload
		}
		return err
	}); err != nil || got != "hello" {
		t.Error(got, err)
	}
	if _, err := conn.ExecContext(ctx, "unlisten *"); err != nil {
		t.Error(err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	idle(t, g)
}

// D05: what a session was told stays with it, as with pgxpool, unless AfterRelease resets it; that runs once for each
// return, off the caller's path. A wait for a notification that was cancelled costs the connection.
func TestD05SessionState(t *testing.T) {
	dirty := func(t *testing.T, db *sql.DB) {
		ctx := t.Context()
		conn := must(db.Conn(ctx))(t)
		for _, s := range []string{"set statement_timeout = '7s'", "create role plain_user", "set role plain_user", "listen news"} {
			if _, err := conn.ExecContext(ctx, s); err != nil {
				t.Fatalf("%s: %v", s, err)
			}
		}
		t.Cleanup(func() { exec(t, pgtest.Shared(t).DSN(), "drop role plain_user") })
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	state := func(t *testing.T, db *sql.DB) (timeout, role string, listening int) {
		if err := db.QueryRow("select current_setting('statement_timeout'), current_user, (select count(*) from pg_listening_channels())").Scan(&timeout, &role, &listening); err != nil {
			t.Fatal(err)
		}
		return timeout, role, listening
	}
	pool := func(t *testing.T, hook func(*pgx.Conn) bool) (*sql.DB, *pgxpool.Pool) {
		cfg := must(pgxpool.ParseConfig(pgtest.Shared(t).Database(t)))(t)
		cfg.MaxConns = 1
		cfg.AfterRelease = hook
		p := must(pgxpool.NewWithConfig(t.Context(), cfg))(t)
		db := must(pgxgated.OpenDBFromPool(p, pgxgated.WithOwnPool()))(t)
		t.Cleanup(func() { db.Close() })
		return db, p
	}
	t.Run("stays by default", func(t *testing.T) {
		works(t, libPgx, "session state (SET, SET ROLE, LISTEN)", "it stays with the connection, as with pgxpool")
		db, _ := pool(t, nil)
		dirty(t, db)
		if timeout, role, n := state(t, db); timeout != "7s" || role != "plain_user" || n != 1 {
			t.Error(timeout, role, n)
		}
		idle(t, pgxgated.GateOf(db))
	})
	t.Run("AfterRelease resets it", func(t *testing.T) {
		works(t, libPgx, "`AfterRelease` with `discard all`", "once for each return, pgx's statement cache included")
		var released atomic.Int32
		db, _ := pool(t, func(conn *pgx.Conn) bool {
			released.Add(1)
			// What pgx keeps must go with what the server keeps.
			return conn.DeallocateAll(context.Background()) == nil && exec1(conn, "discard all") == nil
		})
		dirty(t, db)
		await(t, "the hook", func() bool { return released.Load() == 1 })
		for range 3 {
			if timeout, role, n := state(t, db); timeout != "0" || role != "postgres" || n != 0 {
				t.Error(timeout, role, n)
			}
			if err := db.QueryRow("select $1::int", 1).Scan(new(int)); err != nil {
				t.Error(err)
			}
		}
		await(t, "the hook", func() bool { return released.Load() == 7 })
		idle(t, pgxgated.GateOf(db))
	})
	t.Run("AfterRelease that fails", func(t *testing.T) {
		db, _ := pool(t, func(*pgx.Conn) bool { return false })
		var pids [2]int
		for i := range pids {
			if err := db.QueryRow("select pg_backend_pid()").Scan(&pids[i]); err != nil {
				t.Fatal(err)
			}
		}
		if pids[0] == pids[1] {
			t.Error("the connection was used again")
		}
		idle(t, pgxgated.GateOf(db))
	})
	t.Run("cancelled wait for a notification", func(t *testing.T) {
		works(t, libPgx, "a wait for a notification that is cancelled", "the connection stays, subscribed, as with pgxpool: `unlisten *` before `Close`")
		db, p := pool(t, nil)
		ctx := pgxgated.Bypass(t.Context())
		conn := must(db.Conn(ctx))(t)
		if _, err := conn.ExecContext(ctx, "listen news"); err != nil {
			t.Fatal(err)
		}
		err := raw(ctx, conn, func(pc *pgx.Conn) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := pc.WaitForNotification(ctx)
			return err
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		await(t, "the connection is back", func() bool { return p.Stat().AcquiredConns() == 0 })
		if _, _, n := state(t, db); n != 1 {
			t.Errorf("%d subscriptions", n)
		}
		idle(t, pgxgated.GateOf(db))
	})
}

func exec1(conn *pgx.Conn, sql string) error {
	_, err := conn.Exec(context.Background(), sql)
	return err
}

// tracer is a user's.
type tracer struct {
	mu     sync.Mutex // guards starts
	starts []string
}

func (tr *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.starts = append(tr.starts, data.SQL)
	return ctx
}

func (tr *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

type mood string

// A pool's hooks work: types that AfterConnect registers, and tracers, which see the user's statements, each once.
func TestPgxPoolHooks(t *testing.T) {
	works(t, libPgx, "types registered by the pool's `AfterConnect`", "")
	works(t, libPgx, "tracers", "each statement once, BEGIN and COMMIT too")
	dsn := pgtest.Shared(t).Database(t)
	exec(t, dsn, "create type mood as enum ('sad', 'happy')", "create type pair as (a int, m mood)")
	cfg := must(pgxpool.ParseConfig(dsn))(t)
	cfg.MaxConns = 2
	var tr tracer
	cfg.ConnConfig.Tracer = &tr
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		types, err := conn.LoadTypes(ctx, []string{"mood", "_mood", "pair"})
		if err == nil {
			conn.TypeMap().RegisterTypes(types)
		}
		return err
	}
	p := must(pgxpool.NewWithConfig(t.Context(), cfg))(t)
	defer p.Close()
	db := must(pgxgated.OpenDBFromPool(p))(t)
	defer db.Close()
	ctx := t.Context()

	var moods string
	if err := db.QueryRowContext(ctx, "select $1::mood[]::text", []mood{"sad", "happy"}).Scan(&moods); err != nil || moods != "{sad,happy}" {
		t.Error(moods, err)
	}
	conn := must(db.Conn(ctx))(t)
	type pair struct {
		A int
		M mood
	}
	var got pair
	if err := raw(ctx, conn, func(pc *pgx.Conn) error {
		return pc.QueryRow(ctx, "select row(7, 'happy')::pair").Scan(&got)
	}); err != nil || got != (pair{7, "happy"}) {
		t.Error(got, err)
	}
	conn.Close()

	tr.mu.Lock()
	tr.starts = nil
	tr.mu.Unlock()
	tx := must(db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable, ReadOnly: true}))(t)
	if err := tx.QueryRowContext(ctx, "select 1").Scan(new(int)); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if want := []string{"begin isolation level serializable read only", "select 1", "commit"}; !slices.Equal(tr.starts, want) {
		t.Errorf("traced %q, want %q", tr.starts, want)
	}
	idle(t, pgxgated.GateOf(db))
	if n := p.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are out", n)
	}
}

// D03: lock, ten statements, two transactions and unlock on one pinned connection: one session, one permit.
func TestD03PinnedConnectionIsOneSession(t *testing.T) {
	works(t, libSQL, "session locks and temporary tables on a `*sql.Conn`", "one session and one permit from its first statement to `Close`")
	for scope, want := range map[string]uint64{"all": 1, "tx": 1} {
		dsn := set(set(pgtest.Shared(t).Database(t), tight...), "gate_scope", scope)
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		g := pgxgated.GateOf(db)
		ctx := t.Context()
		conn := must(db.Conn(ctx))(t)
		pids := make(map[int]bool)
		look := func(on interface {
			QueryRowContext(context.Context, string, ...any) *sql.Row
		}) {
			t.Helper()
			var pid int
			if err := on.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
				t.Fatal(err)
			}
			pids[pid] = true
		}
		if _, err := conn.ExecContext(ctx, "select pg_advisory_lock(5); create temporary table scratch (n int)"); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			look(conn)
		}
		if scope == "tx" && g.Stats().Running != 0 {
			t.Error("a permit before the first transaction")
		}
		for range 2 {
			tx := must(conn.BeginTx(ctx, nil))(t)
			look(tx)
			if _, err := tx.ExecContext(ctx, "insert into scratch values (1)"); err != nil {
				t.Error(err)
			}
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
		}
		var n int
		var unlocked bool
		if err := conn.QueryRowContext(ctx, "select count(*), pg_advisory_unlock(5) from scratch").Scan(&n, &unlocked); err != nil || n != 2 || !unlocked {
			t.Error(n, unlocked, err)
		}
		if len(pids) != 1 {
			t.Errorf("%d sessions", len(pids))
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if got := g.Stats().Acquired; got != want {
			t.Errorf("gate_scope=%s: %d permits, want %d", scope, got, want)
		}
		idle(t, g)
		db.Close()
	}
}
