//go:build unix

package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// TestMain is also the program that the tests run as another process: it starts a server, prints its DSN and its
// directory, and closes it when its input ends.
func TestMain(m *testing.M) {
	if what := os.Getenv("PGTEST_HELPER"); what != "" {
		if err := helper(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(M{m})
}

func helper(what string) error {
	s, err := Start(context.Background())
	if err != nil {
		return err
	}
	if err := s.exec(context.Background(), "SELECT 1"); err != nil {
		return err
	}
	if what == "freeze" || what == "headless" {
		if err := s.Freeze(); err != nil {
			return err
		}
	}
	if p := s.live(); what == "headless" { // leaves the sleeping children without a postmaster
		syscall.Kill(p.pid, syscall.SIGKILL)
		<-p.done
	}
	fmt.Println(s.DSN())
	fmt.Println(s.dir)
	io.Copy(io.Discard, os.Stdin)
	return s.Close()
}

type child struct {
	*exec.Cmd
	dsn, dir string // known after await
	stdout   io.Reader
	stdin    io.Closer
	stderr   *bytes.Buffer
}

// startChild runs helper in another process, with the environment changed, and waits for its server.
func startChild(t *testing.T, what string, cred *syscall.Credential, env ...string) *child {
	t.Helper()
	c := launchChild(t, what, cred, env...)
	c.await(t)
	return c
}

func launchChild(t *testing.T, what string, cred *syscall.Credential, env ...string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if cred != nil {
		// go test builds into a directory closed to others.
		dir, lock, err := newOwnedDir(cred)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir); lock.Close() })
		text, err := os.ReadFile(exe)
		if err != nil {
			t.Fatal(err)
		}
		exe = filepath.Join(dir, "pgtest.test")
		if err := errors.Join(os.WriteFile(exe, text, 0o755), os.Chmod(exe, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	c := &child{Cmd: exec.Command(exe), stderr: new(bytes.Buffer)}
	c.Dir = "/"
	c.Env = append(os.Environ(), "PGTEST_HELPER="+what, "GOCOVERDIR=")
	for _, kv := range env {
		if name, _, set := strings.Cut(kv, "="); !set { // a name alone is unset
			c.Env = deletePrefix(c.Env, name+"=")
		} else {
			c.Env = append(c.Env, kv)
		}
	}
	c.Stderr = c.stderr
	c.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	if c.stdout, err = c.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if c.stdin, err = c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	return c
}

func (c *child) await(t *testing.T) {
	t.Helper()
	lines := bufio.NewScanner(c.stdout)
	if lines.Scan() {
		c.dsn = lines.Text()
	}
	if lines.Scan() {
		c.dir = lines.Text()
	}
	if c.dir == "" {
		c.Wait()
		t.Fatalf("no server: %s", c.stderr)
	}
}

func deletePrefix(env []string, prefix string) (kept []string) {
	for _, kv := range env {
		if !strings.HasPrefix(kv, prefix) {
			kept = append(kept, kv)
		}
	}
	return kept
}

func (c *child) finish(t *testing.T) {
	t.Helper()
	c.stdin.Close()
	if err := c.Wait(); err != nil {
		t.Errorf("%v: %s", err, c.stderr)
	}
	if _, err := os.Stat(c.dir); !os.IsNotExist(err) {
		t.Errorf("the directory is left: %v", err)
	}
	if pids := processes(filepath.Join(c.dir, "data")); len(pids) > 0 {
		t.Errorf("processes are left: %v", pids)
	}
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func query[T any](t *testing.T, dsn, sql string) (v T) {
	t.Helper()
	conn := connect(t, dsn)
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	conn.Close(t.Context())
	return v
}

func private(t *testing.T) {
	t.Helper()
	if os.Getenv("PGXGATED_DSN") != "" {
		t.Skip("needs a private server, and PGXGATED_DSN gives another")
	}
}

func TestDatabase(t *testing.T) {
	s := Shared(t)
	var name string
	t.Run("use", func(t *testing.T) {
		a, b := s.Database(t), s.Database(t)
		if a == b {
			t.Fatalf("the same database twice: %s", a)
		}
		name = query[string](t, a, "SELECT current_database()")
		connect(t, a) // a session left behind does not keep the database
	})
	if query[bool](t, s.DSN(), "SELECT EXISTS (SELECT FROM pg_database WHERE datname = '"+name+"')") {
		t.Errorf("%s is not dropped", name)
	}
	if got := query[string](t, s.DSN(), "SHOW server_version"); !strings.HasPrefix(got, s.VersionString()) ||
		!strings.HasPrefix(s.VersionString(), strconv.Itoa(s.Version())) {
		t.Errorf("version %q, %d; the server says %q", s.VersionString(), s.Version(), got)
	}
}

func TestI01Root(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not run by root")
	}
	s := New(t)
	fi, err := os.Stat(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	if uid := fi.Sys().(*syscall.Stat_t).Uid; uid == 0 {
		t.Error("the server runs as root")
	}
}

// A home that cannot be written is what containers give a user without a name.
func TestI01Unprivileged(t *testing.T) {
	private(t)
	var cred *syscall.Credential
	if os.Geteuid() == 0 {
		cred = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	tmp, home := publicCache(t), t.TempDir()
	if err := errors.Join(os.Chmod(tmp, 0o777|os.ModeSticky), os.Chmod(home, 0o555)); err != nil {
		t.Fatal(err)
	}
	for name, env := range map[string][]string{
		"HOME unset":     {"TMPDIR=" + tmp, "HOME", "XDG_CACHE_HOME"},
		"HOME read-only": {"TMPDIR=" + tmp, "HOME=" + home, "XDG_CACHE_HOME"},
	} {
		t.Run(name, func(t *testing.T) {
			startChild(t, "run", cred, env...).finish(t)
		})
		for _, v := range wantedVersions(t) {
			t.Run(name+"/"+v, func(t *testing.T) {
				startChild(t, "run", cred, append(env, "PGXGATED_PGVERSION="+v)...).finish(t)
			})
		}
	}
}

// wantedVersions are those of PGXGATED_PGVERSIONS, such as 15,17,18; they may be downloaded.
func wantedVersions(t *testing.T) []string {
	t.Helper()
	list := os.Getenv("PGXGATED_PGVERSIONS")
	if list == "" {
		t.Log("PGXGATED_PGVERSIONS is not set: no version is fetched")
		return nil
	}
	return strings.Split(list, ",")
}

func TestI02TwoProcesses(t *testing.T) {
	private(t)
	a, b := launchChild(t, "run", nil), launchChild(t, "run", nil)
	a.await(t)
	b.await(t)
	if a.dsn == b.dsn || a.dir == b.dir {
		t.Errorf("both have %s, %s", a.dsn, a.dir)
	}
	a.finish(t)
	if query[int](t, b.dsn, "SELECT 1") != 1 {
		t.Error("the other server is gone")
	}
	b.finish(t)
}

func TestI02KilledOwner(t *testing.T) {
	private(t)
	for _, what := range []string{"run", "freeze", "headless"} {
		t.Run(what, func(t *testing.T) {
			c := startChild(t, what, nil)
			data := filepath.Join(c.dir, "data")
			if len(processes(data)) < 2 {
				t.Fatalf("processes: %v", processes(data))
			}
			sweep(filepath.Dir(c.dir))
			if _, err := os.Stat(data); err != nil {
				t.Fatalf("a living owner's directory was swept: %v", err)
			}
			c.Process.Kill()
			c.Wait()
			// Linux wakes a sleeping postmaster whose owner died, to be told so. Without one, no one tells its children.
			if what == "headless" && len(processes(data)) == 0 {
				t.Error("there is nothing to sweep")
			}
			if what != "headless" && runtime.GOOS == "linux" && !waitGone(data, stopLimit) {
				t.Errorf("processes %v outlive their owner", processes(data))
			}
			sweep(filepath.Dir(c.dir))
			if pids := processes(data); len(pids) > 0 {
				t.Errorf("processes %v outlive the next run", pids)
			}
			if _, err := os.Stat(c.dir); !os.IsNotExist(err) {
				t.Errorf("the directory is left: %v", err)
			}
		})
	}
}

// The two ways of finding the server's processes agree.
func TestProcesses(t *testing.T) {
	if _, err := exec.LookPath("ps"); err != nil {
		t.Skip("no ps")
	}
	s := New(t)
	connect(t, s.DSN())
	if err := s.Freeze(); err != nil { // now their number stands still
		t.Fatal(err)
	}
	a, b := processes(s.data()), psProcesses(s.data())
	slices.Sort(a)
	slices.Sort(b)
	if len(a) < 3 || !slices.Equal(a, b) {
		t.Errorf("processes %v, by ps %v", a, b)
	}
}

func TestI02PortTaken(t *testing.T) {
	private(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port
	real, asked := freePort, 0
	defer func() { freePort = real }()
	freePort = func() (int, error) {
		if asked++; asked == 1 {
			return taken, nil
		}
		return real()
	}
	s := New(t)
	if asked != 2 || s.port == taken {
		t.Errorf("port %d after %d tries, %d was taken", s.port, asked, taken)
	}
	query[int](t, s.DSN(), "SELECT 1")
}

// Two servers that both believe a port is theirs: the second must not take the first one's answers for its own.
func TestPortTakenByServer(t *testing.T) {
	s := New(t)
	real, asked := freePort, 0
	defer func() { freePort = real }()
	freePort = func() (int, error) {
		if asked++; asked == 1 {
			return s.port, nil
		}
		return real()
	}
	other := New(t)
	if got := query[string](t, other.DSN(), "SHOW data_directory"); got != other.data() {
		t.Errorf("data directory %s, want %s", got, other.data())
	}
}

func TestEnds(t *testing.T) {
	ctx := t.Context()
	s := New(t)
	if err := s.exec(ctx, "CREATE TABLE kept (n int)"); err != nil {
		t.Fatal(err)
	}
	end := map[string]func() error{
		"Smart":     func() error { return s.Stop(ctx, Smart) },
		"Fast":      func() error { return s.Stop(ctx, Fast) },
		"Immediate": func() error { return s.Stop(ctx, Immediate) },
		"Kill":      s.Kill,
		"Freeze+Kill": func() error {
			return errors.Join(s.Freeze(), s.Kill())
		},
	}
	for name, f := range end {
		t.Run(name, func(t *testing.T) {
			if name != "Smart" {
				connect(t, s.DSN())
			}
			if err := s.exec(ctx, "INSERT INTO kept VALUES (1)"); err != nil {
				t.Fatal(err)
			}
			n := query[int](t, s.DSN(), "SELECT count(*) FROM kept")
			if err := f(); err != nil {
				t.Fatal(err)
			}
			if pids := processes(s.data()); name != "Smart" && name != "Fast" && !waitGone(s.data(), stopLimit) {
				t.Errorf("processes %v are left", pids)
			}
			if err := s.exec(ctx, "SELECT 1"); err == nil {
				t.Error("it still answers")
			}
			dsn := s.DSN()
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			if s.DSN() != dsn {
				t.Errorf("DSN %s, was %s", s.DSN(), dsn)
			}
			if got := query[int](t, s.DSN(), "SELECT count(*) FROM kept"); got != n {
				t.Errorf("%d rows, were %d", got, n)
			}
		})
	}
	t.Run("Restart of a running server", func(t *testing.T) {
		before := query[time.Time](t, s.DSN(), "SELECT pg_postmaster_start_time()")
		if err := s.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		if after := query[time.Time](t, s.DSN(), "SELECT pg_postmaster_start_time()"); !after.After(before) {
			t.Errorf("started %v, before that %v", after, before)
		}
	})
	t.Run("Stop bounded by its context", func(t *testing.T) {
		conn := connect(t, s.DSN())
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		if err := s.Stop(short, Smart); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a smart stop did not wait for a client: %v", err)
		}
		conn.Close(ctx)
		if err := s.Stop(ctx, Smart); err != nil {
			t.Error(err)
		}
		if err := s.Restart(ctx); err != nil {
			t.Error(err)
		}
	})
	if !strings.Contains(s.Log(), "automatic recovery") && !strings.Contains(s.Log(), "not properly shut down") {
		t.Errorf("no recovery in the log:\n%s", s.Log())
	}
}

func TestFreeze(t *testing.T) {
	s := New(t)
	conn := connect(t, s.DSN())
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := pgx.Connect(short, s.DSN()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a frozen server let someone in: %v", err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), "SELECT 1")
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Errorf("a frozen server answered: %v", err)
	case <-short.Done():
	}
	if err := s.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("after Thaw: %v", err)
	}
	if err := errors.Join(s.Freeze(), s.Close(), s.Close()); err != nil {
		t.Errorf("close of a frozen server: %v", err)
	}
	if err := s.Restart(t.Context()); err == nil {
		t.Error("a closed server started")
	}
}

// A killed server that never starts again must not use up the system's segments.
func TestCloseAfterKill(t *testing.T) {
	if _, err := exec.LookPath("ipcs"); err != nil {
		t.Skip("no ipcs")
	}
	s := New(t)
	id := strings.Fields(s.pidFile()[6])[1]
	listed := func() bool {
		out, err := exec.Command("ipcs", "-m").Output()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) > 1 && f[1] == id {
				return true
			}
		}
		return false
	}
	if !listed() {
		t.Skip("ipcs does not list the server's segment")
	}
	if err := errors.Join(s.Kill(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if listed() {
		t.Errorf("segment %s is left", id)
	}
}

func TestAuthentication(t *testing.T) {
	s := New(t)
	if err := s.exec(t.Context(), "CREATE ROLE alice LOGIN PASSWORD 'right'"); err != nil {
		t.Fatal(err)
	}
	as := func(password string) error {
		c, err := pgx.ParseConfig(s.DSN())
		if err != nil {
			t.Fatal(err)
		}
		c.User, c.Password = "alice", password
		conn, err := pgx.ConnectConfig(t.Context(), c)
		if err == nil {
			conn.Close(t.Context())
		}
		return err
	}
	if err := as("right"); err != nil {
		t.Error(err)
	}
	if err := as("wrong"); err == nil || !strings.Contains(err.Error(), "28P01") {
		t.Errorf("wrong password: %v", err)
	}
}

func TestSetting(t *testing.T) {
	s := New(t, Setting("max_connections", "20"), Setting("application_name", "it's"))
	if got := query[string](t, s.DSN(), "SHOW max_connections"); got != "20" {
		t.Errorf("max_connections %s", got)
	}
	if got := query[string](t, s.DSN(), "SHOW application_name"); got != "it's" {
		t.Errorf("application_name %s", got)
	}
	if got := query[string](t, s.DSN(), "SHOW listen_addresses"); got != "127.0.0.1" {
		t.Errorf("listen_addresses %s", got)
	}
}

func TestStartFails(t *testing.T) {
	private(t)
	before, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	_, err := Start(t.Context(), Setting("no_such_setting", "1"))
	if err == nil || !strings.Contains(err.Error(), "unrecognized configuration parameter") {
		t.Errorf("the error has no log: %v", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(done); !errors.Is(err, context.Canceled) {
		t.Errorf("start with a cancelled context: %v", err)
	}
	if after, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*")); len(after) > len(before) {
		t.Errorf("directories are left: %v", after)
	}
}

func TestExternal(t *testing.T) {
	own := New(t)
	for _, dsn := range []string{own.DSN(), fmt.Sprintf("host=127.0.0.1 port=%d user=postgres sslmode=disable", own.port)} {
		t.Setenv("PGXGATED_DSN", dsn)
		s, err := Start(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !s.External() || s.Version() != own.Version() || s.DSN() != dsn {
			t.Errorf("%+v", s)
		}
		if got := query[string](t, s.Database(t), "SELECT current_database()"); !strings.HasPrefix(got, "pgtest_") {
			t.Errorf("database %s", got)
		}
		for _, err := range []error{s.Stop(t.Context(), Fast), s.Restart(t.Context()), s.Kill(), s.Freeze(), s.Thaw()} {
			if !errors.Is(err, ErrExternal) {
				t.Errorf("%v, want ErrExternal", err)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		query[int](t, own.DSN(), "SELECT 1") // it lives
	}
	if _, err := Start(t.Context(), Version(99)); !errors.Is(err, ErrUnavailable) {
		t.Errorf("version 99: %v", err)
	}
	tb := &recorder{TB: t}
	tb.run(func() { New(tb) })
	if !strings.Contains(tb.skipped, "PGXGATED_DSN") {
		t.Errorf("New with PGXGATED_DSN: %+v", tb)
	}
}

// recorder is a testing.TB that notes how it was ended.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Skip(args ...any)  { r.skipped = fmt.Sprint(args...); runtime.Goexit() }
func (r *recorder) Fatal(args ...any) { r.failed = fmt.Sprint(args...); runtime.Goexit() }

func (r *recorder) run(f func()) {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	<-done
}

func TestUnavailable(t *testing.T) {
	private(t)
	for name, env := range map[string][2]string{
		"skips":            {"", ""},
		"fails when asked": {"", "1"},
		"fails in CI":      {"true", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CI", env[0])
			t.Setenv("PGXGATED_REQUIRE", env[1])
			tb := &recorder{TB: t}
			tb.run(func() { New(tb, Version(99)) })
			text := tb.skipped
			if env != [2]string{} {
				text = tb.failed
			}
			if !strings.Contains(text, "PostgreSQL unavailable: version 99") || strings.Contains(text, "\n") {
				t.Errorf("skipped %q, failed %q", tb.skipped, tb.failed)
			}
		})
	}
	t.Setenv("PGXGATED_PGBIN", "/nowhere")
	if _, err := Start(t.Context()); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("PGXGATED_PGBIN=/nowhere: %v", err)
	}
	t.Setenv("PGXGATED_PGVERSION", "new")
	if _, err := Start(t.Context()); err == nil || !strings.Contains(err.Error(), "PGXGATED_PGVERSION") {
		t.Errorf("PGXGATED_PGVERSION=new: %v", err)
	}
}

func TestGoroutines(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	s := New(t)
	if goleak.Find(ignore, goleak.IgnoreAnyFunction(HoldThread)) != nil {
		t.Errorf("more than HoldThread runs: %v", goleak.Find(ignore))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := goleak.Find(ignore); err != nil {
		t.Error(err)
	}
}

func TestWith(t *testing.T) {
	for _, c := range []struct{ dsn, key, value, want string }{
		{"postgres://u:p@h:1/d", "a", "b c", "postgres://u:p@h:1/d?a=b+c"},
		{"postgres://h/d?a=1&z=2", "a", "3", "postgres://h/d?a=3&z=2"},
		{"host=h", "a", `it's \`, `host=h a='it\'s \\'`},
	} {
		if got := With(c.dsn, c.key, c.value); got != c.want {
			t.Errorf("With(%q, %q, %q) = %q, want %q", c.dsn, c.key, c.value, got, c.want)
		}
	}
	if got := withDatabase("postgres://h/d?dbname=e&a=1", "f"); got != "postgres://h/f?a=1" {
		t.Errorf("withDatabase: %s", got)
	}
}
