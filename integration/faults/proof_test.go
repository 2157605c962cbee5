package faults

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// What is attacked here is the proof: a permit comes back when the server has said that it is done, and where
// that cannot be had after gate_drain_limit, counted and logged once. What the server says is asked at the moment the permit
// comes back, by who waited for it.

// place is a database of its own, with an observer and the function stubborn.
func place(t *testing.T) (dsn string, see *observer) {
	t.Helper()
	t.Parallel()
	dsn = pgtest.Shared(t).Database(t)
	see = observe(t, dsn)
	see.Stubborn()
	return dsn, see
}

var roles atomic.Int64

// role makes a login role that may have so many connections, and returns dsn for it.
func (o *observer) role(dsn string, connections int) string {
	o.t.Helper()
	name := fmt.Sprintf("role_%d_%d", os.Getpid(), roles.Add(1))
	o.Exec(fmt.Sprintf("create role %s login password 'x' connection limit %d", name, connections))
	o.t.Cleanup(func() { o.Exec("drop owned by " + name + "; drop role " + name) })
	u, err := url.Parse(dsn)
	must(o.t, err)
	u.User = url.UserPassword(name, "x")
	return u.String()
}

// abandon has a caller begin a transaction with the advisory lock 7, run a statement, and give up in it. Returned is the
// backend that is left behind.
func (g *gated) abandon(see *observer, statement string) (pid int) {
	g.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	tx, err := g.BeginTx(ctx, nil)
	must(g.t, err)
	pid = pidOf(g.t, tx)
	_, err = tx.Exec("select pg_advisory_xact_lock(7)")
	must(g.t, err)
	got := later(func() error { _, err := tx.ExecContext(ctx, statement); return err })
	see.working(pid, statement)
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		g.t.Errorf("error %v, want context.Canceled", err)
	}
	_ = tx.Rollback() // sql.ErrTxDone
	return pid
}

// proven: the permit comes back when backend and lock are gone, and is not counted as unproven.
func (g *gated) proven(see *observer, pid int) {
	g.t.Helper()
	g.released(func() {
		if see.there(pid) {
			g.t.Error("I6: the permit came back while the backend was there")
		}
		if see.Int("select count(*) from pg_locks l join pg_database d on d.oid = l.database where d.datname = current_database() and locktype = 'advisory' and objid = 7") != 0 {
			g.t.Error("I6: the permit came back while the lock was held")
		}
	})
	if n := g.gate.Stats().DrainsUnproven; n != 0 {
		g.t.Errorf("%d permits came back without proof", n)
	}
}

// unproven: n permits are back, counted, and each was logged once.
func (g *gated) unproven(n int) {
	g.t.Helper()
	g.idle()
	s := g.gate.Stats()
	if logged := g.log.count("gate_drain_limit passed"); int(s.DrainsUnproven) != n || logged != n {
		g.t.Errorf("%d permits without proof, logged %d times, want %d", s.DrainsUnproven, logged, n)
	}
}

// Twenty seconds are longer than pgx's own clean-up, by whose end the backend is still there.
const swallows = "select stubborn(20)"

func TestProofStatementThatSwallowsCancelIsTerminated(t *testing.T) {
	dsn, see := place(t)
	g := one(t, dsn, 3, nil, pgxgated.WithDrainGrace(300*time.Millisecond))
	g.proven(see, g.abandon(see, swallows))
	if n := g.gate.Stats().TerminatedBackends; n != 1 {
		t.Errorf("%d terminated, want 1", n)
	}
}

func TestProofStatementThatSwallowsCancelAndMayNotBeTerminated(t *testing.T) {
	dsn, see := place(t)
	role := see.role(dsn, -1)
	see.Exec("revoke execute on function pg_terminate_backend from public")
	g := one(t, role, 3, nil, pgxgated.WithDrainGrace(300*time.Millisecond))
	g.proven(see, g.abandon(see, swallows))
	if n := g.gate.Stats().TerminatedBackends; n != 0 {
		t.Errorf("%d terminated", n)
	}
	if n := g.log.count("may not be terminated"); n != 1 {
		t.Errorf("the refusal was logged %d times, want once", n)
	}
}

func TestProofThatCannotBeHadEndsAtTheDrainLimit(t *testing.T) {
	dsn, see := place(t)
	role := see.role(dsn, -1)
	see.Exec("revoke execute on function pg_terminate_backend from public")
	g := one(t, role, 3, nil, pgxgated.WithDrainGrace(100*time.Millisecond), pgxgated.WithDrainLimit(time.Second))
	pid := g.abandon(see, "select stubborn(30)")
	g.unproven(1)
	if !see.there(pid) {
		t.Error("the backend is gone: nothing was tried")
	}
	see.Exec("select pg_terminate_backend($1)", pid)
	see.gone(pid)
}

// The network goes silent in a statement, for longer than pgx cleans up. The permit has to wait for the network.
func TestProofHalfOpenConnection(t *testing.T) {
	dsn, see := place(t)
	x := newToxic(t, dsn)
	g := one(t, withHost(dsn, x.addr()), 3, nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c, err := g.Conn(ctx)
	must(t, err)
	pid := pidOf(t, c)
	got := later(func() error { _, err := c.ExecContext(ctx, "select stubborn(18)"); return err })
	see.working(pid, "stubborn(18)")
	x.add("timeout", `"timeout": 0`)
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	_ = c.Close()
	time.Sleep(16 * time.Second) // past pgx's clean-up
	if s := g.gate.Stats(); s.Running != 1 || s.Draining != 1 {
		t.Errorf("I6: running %d, draining %d while the server cannot be asked", s.Running, s.Draining)
	}
	x.clear()
	g.proven(see, pid)
}

// A COPY is cut in the middle by the network, while its source still produces.
func TestProofCopyCutInTheMiddle(t *testing.T) {
	dsn, see := place(t)
	see.Exec("create table copied (line text)")
	x := newToxic(t, dsn)
	g := one(t, withHost(dsn, x.addr()), 3, nil)
	for range 5 {
		c, err := g.Conn(context.Background())
		must(t, err)
		pid := pidOf(t, c)
		_, err = c.ExecContext(context.Background(), "select pg_advisory_lock(7)")
		must(t, err)
		src := &producer{}
		got := later(func() error {
			return c.Raw(func(dc any) error {
				pc, err := pgxgated.PgxConn(context.Background(), dc)
				if err != nil {
					return err
				}
				_, err = pc.PgConn().CopyFrom(context.Background(), src, "copy copied from stdin")
				return err
			})
		})
		see.working(pid, "copy copied")
		x.cut()
		if err := <-got; err == nil {
			t.Error("no error")
		}
		x.restore()
		_ = c.Close()
		g.proven(see, pid)
		src.stop.Store(true)
	}
	if n := see.Int("select count(*) from copied"); n != 0 {
		t.Errorf("%d rows of a COPY that was cut", n)
	}
}

// producer yields lines until it is stopped.
type producer struct{ stop atomic.Bool }

func (p *producer) Read(b []byte) (int, error) {
	if p.stop.Load() {
		return 0, io.EOF
	}
	time.Sleep(time.Millisecond)
	return copy(b, "line\n"), nil
}

// A connection that was hijacked inside Raw is somebody else's: its backend is left alone, and its permit comes back after
// gate_drain_limit.
func TestProofHijackInsideRaw(t *testing.T) {
	dsn, see := place(t)
	g := one(t, dsn, 3, nil, pgxgated.WithDrainGrace(50*time.Millisecond), pgxgated.WithDrainLimit(500*time.Millisecond))
	c, err := g.Conn(context.Background())
	must(t, err)
	pid := pidOf(t, c)
	var taken *pgconn.HijackedConn
	must(t, c.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(context.Background(), dc)
		if err != nil {
			return err
		}
		taken, err = pc.PgConn().Hijack()
		return err
	}))
	_ = c.Close()
	g.unproven(1) // and pgxpool gives its place back, after 15 s
	if !see.there(pid) || g.gate.Stats().TerminatedBackends != 0 {
		t.Error("the backend of a hijacked connection was ended")
	}
	_ = taken.Conn.Close()
	see.gone(pid)
}

// The verifier logs in as another role than the pool's connection did, as with passwords that are leased: it sees only that
// there is a backend with that pid, not whose it is or since when. That counts as still there.
func TestProofRoleWithoutPrivilege(t *testing.T) {
	dsn, see := place(t)
	first, second := see.role(dsn, -1), see.role(dsn, -1)
	a, err := url.Parse(first)
	must(t, err)
	b, err := url.Parse(second)
	must(t, err)
	var dialed atomic.Int64
	g := one(t, dsn, 3, func(c *pgxpool.Config) {
		c.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
			cc.User, cc.Password = a.User.Username(), "x"
			if dialed.Add(1) > 1 {
				cc.User = b.User.Username()
			}
			return nil
		}
	}, pgxgated.WithDrainGrace(100*time.Millisecond))
	g.proven(see, g.abandon(see, "select stubborn(3)"))
	if n := g.gate.Stats().TerminatedBackends; n != 0 {
		t.Errorf("%d terminated, blindly", n)
	}
}

func TestProofUnderSetRole(t *testing.T) {
	dsn, see := place(t)
	other := see.role(dsn, -1)
	u, err := url.Parse(other)
	must(t, err)
	for _, how := range []string{"by the pool", "in the session"} {
		change := func(c *pgxpool.Config) {
			if how == "by the pool" { // the verifier's connection would have it too
				c.ConnConfig.RuntimeParams["role"] = u.User.Username()
			}
		}
		g := one(t, dsn, 3, change, pgxgated.WithDrainGrace(200*time.Millisecond))
		statement := "select stubborn(10)"
		if how == "in the session" {
			statement = "set local role " + u.User.Username() + "; " + statement
		}
		g.proven(see, g.abandon(see, statement))
		if n := g.gate.Stats().TerminatedBackends; n != 1 {
			t.Errorf("%s: %d terminated, want 1", how, n)
		}
	}
}

// The server has no connection left for the verifier (53300). It asks again until there is one.
func TestProofVerifierRefused(t *testing.T) {
	dsn, see := place(t)
	role := see.role(dsn, 2)
	refused := func(t *testing.T, statement string, opts ...pgxgated.Option) (*gated, int) {
		g := one(t, role, 2, nil, opts...)
		pidOf(t, g) // the pool has its one
		var rest []*pgx.Conn
		for {
			conn, err := pgx.Connect(t.Context(), role)
			if err != nil {
				break
			}
			rest = append(rest, conn)
		}
		t.Cleanup(func() {
			for _, conn := range rest {
				_ = conn.Close(context.Background())
			}
		})
		if len(rest) == 0 {
			t.Error("no connection was to be had to begin with")
		}
		return g, g.abandon(see, statement)
	}
	t.Run("until there is one", func(t *testing.T) {
		g, pid := refused(t, "select stubborn(2)", pgxgated.WithDrainGrace(time.Minute))
		g.proven(see, pid)
	})
	t.Run("until the drain limit", func(t *testing.T) {
		g, pid := refused(t, "select stubborn(3)", pgxgated.WithDrainGrace(time.Second), pgxgated.WithDrainLimit(time.Second))
		g.unproven(1)
		if !strings.Contains(g.log.String(), "53300") {
			t.Error("the log does not say why")
		}
		see.gone(pid)
	})
}

// The verifier's own connection is cut again and again.
func TestProofVerifierCut(t *testing.T) {
	dsn, see := place(t)
	g := one(t, dsn, 3, nil, pgxgated.WithDrainGrace(time.Minute))
	pid := g.abandon(see, "select stubborn(2)")
	stop, cuts := make(chan struct{}), 0
	var all sync.WaitGroup
	all.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			cuts += see.Int("select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and query like 'SET LOCAL search_path%'")
		}
	})
	g.proven(see, pid)
	close(stop)
	all.Wait()
	if cuts == 0 {
		t.Error("nothing was cut")
	}
}

// While nobody can be asked, the backend goes and its pid passes on to another one. That is not the one that is waited for,
// and is left alone.
func TestProofPIDReused(t *testing.T) {
	dsn, see := place(t)
	x := newToxic(t, dsn)
	g := one(t, withHost(dsn, x.addr()), 3, nil, pgxgated.WithDrainGrace(50*time.Millisecond))
	tx, err := g.Begin()
	must(t, err)
	pid := pidOf(t, tx)
	x.cut()
	if err := tx.Rollback(); err == nil {
		t.Error("Rollback gave no error")
	}
	see.gone(pid)
	const next = "/proc/sys/kernel/ns_last_pid" // the kernel goes on from here
	var heir *pgx.Conn
	for range 100 {
		if err := os.WriteFile(next, []byte(strconv.Itoa(pid-1)), 0); err != nil {
			x.restore()
			t.Skipf("the kernel does not let us choose a pid: %v", err)
		}
		conn, err := pgx.Connect(t.Context(), dsn)
		must(t, err)
		if int(conn.PgConn().PID()) == pid {
			heir = conn
			break
		}
		must(t, conn.Close(t.Context()))
	}
	if heir == nil {
		x.restore()
		t.Skip("the pid was not to be had: others were faster")
	}
	defer heir.Close(context.Background())
	if s := g.gate.Stats(); s.Running != 1 {
		t.Errorf("running %d while nobody could be asked", s.Running)
	}
	x.restore()
	g.released(func() {})
	if s := g.gate.Stats(); s.DrainsUnproven != 0 || s.TerminatedBackends != 0 {
		t.Errorf("%d unproven, %d terminated, want 0, 0", s.DrainsUnproven, s.TerminatedBackends)
	}
	must(t, heir.Ping(t.Context()))
}

// The host is gone for good.
func TestProofHostGoneForGood(t *testing.T) {
	t.Parallel()
	s := pgtest.New(t)
	see := observe(t, s.DSN())
	const n = 3
	g := open(t, s.DSN(), pgxgated.Limits{Running: n, Waiting: 10, MaxWait: bound}, n, nil,
		pgxgated.WithDrainLimit(2*time.Second), pgxgated.WithDrainGrace(100*time.Millisecond), pgxgated.WithPoolWait(300*time.Millisecond))
	var got []<-chan error
	var txs []*sql.Tx
	for range n {
		tx, err := g.Begin()
		must(t, err)
		txs = append(txs, tx)
		pid := pidOf(t, tx)
		got = append(got, later(func() error { _, err := tx.Exec("select pg_sleep(60)"); return err }))
		see.working(pid, "pg_sleep(60)")
	}
	must(t, s.Kill())
	for i := range n {
		if err := <-got[i]; err == nil {
			t.Error("no error")
		}
		if err := txs[i].Rollback(); err == nil {
			t.Error("Rollback gave no error")
		}
	}
	if s := g.gate.Stats(); s.Running != n {
		t.Errorf("running %d, want %d: nobody has said that the server is done", s.Running, n)
	}
	g.unproven(n)
	// Who comes now is told of the network, and leaves nothing behind.
	if _, err := g.Exec("select 1"); err == nil {
		t.Error("no error")
	}
	g.unproven(n)
}

// Behind PgBouncer the pids are invented. That is said once, nothing counts as proof, and everything comes back.
func TestProofBehindPgBouncer(t *testing.T) {
	dsn, see := place(t)
	g := one(t, pgBouncer(t, dsn), 3, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	}, pgxgated.WithDrainLimit(5*time.Second))
	for range 3 {
		g.abandon(see, "select stubborn(1)")
		g.idle()
	}
	if s := g.gate.Stats(); s.DrainsUnproven != 3 || s.TerminatedBackends != 0 {
		t.Errorf("%d unproven, %d terminated, want 3, 0", s.DrainsUnproven, s.TerminatedBackends)
	}
	if n := g.log.count("behind a pooler"); n != 1 {
		t.Errorf("the pooler was mentioned %d times, want once", n)
	}
}

// pgBouncer puts one in front of the server of dsn and returns the DSN through it.
func pgBouncer(t *testing.T, dsn string) string {
	t.Helper()
	path := "/usr/sbin/pgbouncer"
	if found, err := exec.LookPath("pgbouncer"); err == nil {
		path = found
	} else if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("no pgbouncer: apt-get install pgbouncer")
		}
		t.Skip("no pgbouncer: apt-get install pgbouncer")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	must(t, l.Close())
	host, serverPort, _ := net.SplitHostPort(hostOf(dsn))
	dir, err := os.MkdirTemp("", "pgxgated-faults-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	users, ini := filepath.Join(dir, "users"), filepath.Join(dir, "ini")
	must(t, os.WriteFile(users, []byte("\"postgres\" \"\"\n"), 0o644))
	must(t, os.WriteFile(ini, fmt.Appendf(nil, "[databases]\n* = host=%s port=%s user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = %s\n"+
		"unix_socket_dir =\nauth_type = trust\nauth_file = %s\npool_mode = transaction\n", host, serverPort, port, users), 0o644))
	cmd := exec.Command(path, ini)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: nobody(t)}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig follows the thread
		defer runtime.UnlockOSThread()
		defer close(ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // killed
		}
	}()
	must(t, <-started)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	through := withHost(dsn, net.JoinHostPort("127.0.0.1", port))
	eventually(t, "PgBouncer answers", func() error {
		cfg, err := pgx.ParseConfig(through)
		must(t, err)
		cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if err != nil {
			return err
		}
		return errors.Join(conn.Ping(t.Context()), conn.Close(t.Context()))
	})
	return through
}

// nobody is whom PgBouncer, which refuses to run as root, runs as. nil: as us.
func nobody(t *testing.T) *syscall.Credential {
	t.Helper()
	if os.Getuid() != 0 {
		return nil
	}
	u, err := user.Lookup("nobody")
	must(t, err)
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	must(t, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	must(t, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}
