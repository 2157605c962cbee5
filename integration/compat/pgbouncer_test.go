package compat

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	osexec "os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libPooler = "PgBouncer, transaction mode"

// pooler starts a PgBouncer in front of the server of dsn and returns the DSN through it. It gives each transaction the
// next one of three backends.
func pooler(t *testing.T, dsn string) string {
	t.Helper()
	path, err := osexec.LookPath("pgbouncer")
	if err != nil {
		if path = "/usr/sbin/pgbouncer"; !isFile(path) {
			if os.Getenv("CI") == "true" {
				t.Fatal("no pgbouncer: apt-get install pgbouncer")
			}
			t.Skip("no pgbouncer: apt-get install pgbouncer")
		}
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	dir, err := os.MkdirTemp("", "pgxgated-pgbouncer-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	var more string
	if out, err := osexec.Command(path, "--version").Output(); err == nil {
		if v := regexp.MustCompile(`1\.(\d+)`).FindSubmatch(out); v != nil {
			if minor, _ := strconv.Atoi(string(v[1])); minor >= 21 {
				more = "max_prepared_statements = 0\n" // which older ones do not know, and have not
			}
		}
	}
	ini := fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%s user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
admin_users = postgres
pool_mode = transaction
default_pool_size = 3
server_round_robin = 1
%s`, u.Port(), port, filepath.Join(dir, "users"), more)
	for name, text := range map[string]string{"ini": ini, "users": "\"postgres\" \"\"\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := osexec.Command(path, filepath.Join(dir, "ini"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: unprivileged(), Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // Pdeathsig follows the thread
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("pgbouncer:\n%s", log.Bytes())
		}
	})
	u.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	through := u.String()
	await(t, "pgbouncer answers", func() bool {
		select {
		case <-ended:
			t.Fatalf("pgbouncer has ended:\n%s", log.Bytes())
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		cfg, err := pgx.ParseConfig(through)
		if err != nil {
			t.Fatal(err)
		}
		cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err != nil {
			return false
		}
		defer conn.Close(ctx)
		return conn.Ping(ctx) == nil
	})
	return through
}

// warm makes a pooler have three backends, by three transactions at once.
func warm(t *testing.T, through string) {
	t.Helper()
	ctx := context.Background()
	for range 3 {
		cfg, err := pgx.ParseConfig(through)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(ctx)
		if _, err := conn.Exec(ctx, "begin").ReadAll(); err != nil {
			t.Fatal(err)
		}
		defer func() { _, _ = conn.Exec(ctx, "rollback").ReadAll() }()
	}
}

func isFile(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && !fi.IsDir()
}

// unprivileged is whom PgBouncer runs as where we are root, which it refuses to run as.
func unprivileged() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
			gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
			if uerr == nil && gerr == nil && uid != 0 {
				return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
			}
		}
	}
	return &syscall.Credential{Uid: 65534, Gid: 65534}
}

// lines is a slog handler's output.
type lines struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), s)
}

// H04: no named statement reaches a pooler that swaps backends, and the gate works in front of it.
func TestH04PgBouncer(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	through := pooler(t, dsn)
	exec(t, dsn, itemsTable)
	open := func(t *testing.T, settings ...string) (*sql.DB, *pgxgated.Gate, *lines) {
		warm(t, through)
		var log lines
		c, err := pgxgated.NewConnector(set(set(through, tight...), settings...), pgxgated.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		db := sql.OpenDB(c)
		t.Cleanup(func() { db.Close() })
		return db, c.Gate(), &log
	}
	// clients of the pooler that are ours, beside the admin's own session
	clients := func(t *testing.T) (n int) {
		t.Helper()
		u, _ := url.Parse(through)
		u.Path = "/pgbouncer"
		cfg, err := pgx.ParseConfig(u.String())
		if err != nil {
			t.Fatal(err)
		}
		conn, err := pgconn.ConnectConfig(context.Background(), &cfg.Config)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		r, err := conn.Exec(context.Background(), "SHOW CLIENTS").ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		return len(r[0].Rows) - 1
	}

	for _, mode := range []string{"exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			lib := libPooler + ", `" + mode + "`"
			for _, column := range []string{colGateOf, colClose, colPermits, colRefusal} {
				cell(t, lib, column)
			}
			db, g, log := open(t, "default_query_exec_mode", mode)
			if pgxgated.GateOf(db) != g {
				t.Error("GateOf")
			}
			c := sqlActions(db)
			pids := make(map[int]bool)
			for range 5 {
				for _, a := range c {
					before := g.Stats().Acquired
					if err := a.run(t.Context()); err != nil {
						t.Errorf("%s: %v", a.name, err)
					}
					if n := g.Stats().Acquired - before; n != a.all {
						t.Errorf("%s: %d permits", a.name, n)
					}
				}
				var pid int
				if err := db.QueryRow("select pg_backend_pid() where $1 = 1", 1).Scan(&pid); err != nil {
					t.Error(err)
				}
				pids[pid] = true
			}
			if len(pids) < 2 {
				t.Error("the pooler has not swapped backends, so nothing was shown")
			}
			st, err := db.Prepare("select $1::int + 1")
			if err != nil {
				t.Fatal(err)
			}
			for i := range 5 {
				var n int
				if err := st.QueryRow(i).Scan(&n); err != nil || n != i+1 {
					t.Error(n, err)
				}
			}
			st.Close()
			p := must(g.Acquire(t.Context()))(t)
			for _, a := range c {
				if err := a.run(t.Context()); !errors.Is(err, pgxgated.ErrRejected) {
					t.Errorf("%s: %v", a.name, err)
				}
			}
			p.Release()

			cellIs(t, lib, colCancel, "up to the pooler")
			works(t, lib, "cancel", "permits come back when the client's own clean-up has ended, counted in `DrainsUnproven`: limits (I6) hold up to the pooler, which invents pids, and that is logged once")
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { _, err := db.ExecContext(ctx, "select pg_sleep(60)"); done <- err }()
			o := observe(t, dsn)
			o.until("at work", func() bool { return o.sessions("state = 'active' and query like '%pg_sleep%'") == 1 })
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			idle(t, g)
			if s := g.Stats(); s.DrainsUnproven != 1 {
				t.Errorf("%d drains unproven", s.DrainsUnproven)
			}
			if n := log.count("behind a pooler"); n != 1 {
				t.Errorf("the pooler was said %d times", n)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			await(t, "clients of the pooler after Close", func() bool { return clients(t) == 0 })
		})
	}
	t.Run("cache_describe", func(t *testing.T) {
		works(t, libPooler, "`default_query_exec_mode=cache_describe`", "as long as no table changes")
		db, g, _ := open(t, "default_query_exec_mode", "cache_describe")
		for range 5 {
			for _, a := range sqlActions(db) {
				if err := a.run(t.Context()); err != nil {
					t.Errorf("%s: %v", a.name, err)
				}
			}
		}
		idle(t, g)
	})
	t.Run("cache_statement", func(t *testing.T) {
		db, g, _ := open(t)
		var err error
		for range 4 {
			if err = db.QueryRow("select count(*) from items where id > $1", 0).Scan(new(int)); err != nil {
				break
			}
		}
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "26000" {
			t.Fatalf("%v, want 26000", err)
		}
		idle(t, g)
		worksNot(t, libPooler, "pgx's default `cache_statement`", "a named statement stays on one backend (PgBouncer 1.21 and later can carry it along: `max_prepared_statements`)",
			errors.New(regexp.MustCompile(`stmtcache_\w+`).ReplaceAllString(err.Error(), "stmtcache_…")))
	})
	t.Run("session state", func(t *testing.T) {
		db, g, _ := open(t, "default_query_exec_mode", "exec")
		conn := must(db.Conn(t.Context()))(t)
		if _, err := conn.ExecContext(t.Context(), "select pg_advisory_lock(1)"); err != nil {
			t.Fatal(err)
		}
		var unlocked bool
		if err := conn.QueryRowContext(t.Context(), "select pg_advisory_unlock(1)").Scan(&unlocked); err != nil {
			t.Fatal(err)
		}
		if unlocked {
			t.Fatal("the lock was found again")
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		idle(t, g)
		worksNot(t, libPooler, "session locks (goose, golang-migrate), `LISTEN`, `SET`, temporary tables on a `*sql.Conn`", "each statement may have another backend; use a direct connection",
			fmt.Errorf("pg_advisory_unlock: %v", unlocked))
	})
}
