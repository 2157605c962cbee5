//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// schema is in every peer's database. burn works for about rows × 0.1 µs on a processor. enter counts over-limits at the
// server, so that those of callers who are gone count too: each transaction takes one of b locks that PostgreSQL holds
// until its end, and who finds none free is the operation b+1. Looking is serialised, else locks that change hands during
// the look could make it miss the free one.
const schema = `
create sequence over_limits;
create function burn(rows int) returns int language sql as $$ select count(*)::int from generate_series(1, rows) $$;
create function enter(b int) returns int language plpgsql as $$
begin
	perform pg_advisory_lock(0);
	for i in 1..b loop
		if pg_try_advisory_xact_lock(i) then
			perform pg_advisory_unlock(0);
			return i;
		end if;
	end loop;
	perform nextval('over_limits');
	perform pg_advisory_unlock(0);
	return 0;
end $$;`

// bench is the server and what the lab knows of it.
type bench struct {
	server     *pgtest.Server
	control    *pgx.Conn // the lab's own
	postmaster int       // 0: not ours to look at
	pinned     bool
	burnMs     float64  // rows of burn for a millisecond
	only       []string // peers to run besides plain and gated, empty: all
	via        string   // host:port by which peers reach the server, "" directly
	closers    []func()
	made       map[string]bool // databases
}

func newBench(ctx context.Context) (b *bench, err error) {
	b = &bench{made: make(map[string]bool)}
	if b.server, err = pgtest.Start(ctx, pgtest.Setting("max_connections", "200"), pgtest.Setting("jit", "off"), pgtest.Setting("max_parallel_workers_per_gather", "0")); err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() { _ = b.server.Close() })
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.control, err = pgx.Connect(ctx, b.server.DSN()); err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() { _ = b.control.Close(context.Background()) })
	if !b.server.External() {
		var pid int
		if err := b.control.QueryRow(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
			return nil, err
		}
		b.postmaster = parentOf(pid)
	}
	if err := b.database(ctx, "lab"); err != nil {
		return nil, err
	}
	return b, b.calibrate(ctx)
}

func (b *bench) close() {
	for i := len(b.closers) - 1; i >= 0; i-- {
		b.closers[i]()
	}
}

// database makes an empty database with the schema, once.
func (b *bench) database(ctx context.Context, name string) error {
	if b.made[name] {
		return nil
	}
	if _, err := b.control.Exec(ctx, "create database "+name); err != nil {
		return err
	}
	b.made[name] = true
	c, err := pgx.Connect(ctx, b.dsn(name))
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	_, err = c.Exec(ctx, schema)
	return err
}

func (b *bench) dsn(database string) string {
	u, err := url.Parse(b.server.DSN())
	if err != nil {
		panic(err) // pgtest's DSN is a URL; PGXGATED_DSN was checked in main
	}
	u.Path = "/" + database
	if b.via != "" {
		u.Host = b.via
	}
	return u.String()
}

// calibrate finds how many rows make burn a millisecond: the best of several, since others may be on the machine.
func (b *bench) calibrate(ctx context.Context) error {
	c, err := pgx.Connect(ctx, b.dsn("lab"))
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	const rows = 50_000
	best := time.Hour
	for range 20 {
		start := time.Now()
		if _, err := c.Exec(ctx, "select burn($1)", rows); err != nil {
			return err
		}
		best = min(best, time.Since(start))
	}
	b.burnMs = rows / (float64(best) / float64(time.Millisecond))
	return nil
}

// burn is a statement of d of processor time.
func (b *bench) burn(d time.Duration) statement {
	return statement{"select burn($1)", []any{int(b.burnMs * float64(d) / float64(time.Millisecond))}}
}

// settle waits until the server is done with what a peer has left there.
func (b *bench) settle(ctx context.Context, database string) error {
	end := time.Now().Add(20 * time.Second)
	for {
		var n int
		err := b.control.QueryRow(ctx, "select count(*) from pg_stat_activity where datname = $1 and backend_type = 'client backend' and state is distinct from 'idle'", database).Scan(&n)
		if err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the server still has %d operations of %s at work", n, database)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// seen is what the server has counted for a database.
type seen struct {
	sessions, overLimits int64
	client, server       time.Duration // processor time
}

func (b *bench) look(ctx context.Context, database string) (s seen, err error) {
	if err := b.control.QueryRow(ctx, "select sessions from pg_stat_database where datname = $1", database).Scan(&s.sessions); err != nil {
		return s, err
	}
	c, err := pgx.Connect(ctx, b.dsn(database))
	if err != nil {
		return s, err
	}
	defer c.Close(ctx)
	if err := c.QueryRow(ctx, "select case when is_called then last_value else 0 end from over_limits").Scan(&s.overLimits); err != nil {
		return s, err
	}
	s.client = ownCPU()
	s.server = b.serverCPU()
	return s, nil
}

// since is what has been added since an earlier look, whose own session is taken off.
func (s seen) since(before seen) seen {
	return seen{s.sessions - before.sessions - 1, s.overLimits - before.overLimits, s.client - before.client, s.server - before.server}
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// stat is a line of /proc/PID/stat after the command's name; nil where there is none.
func stat(pid int) []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.Fields(rest)
}

func parentOf(pid int) int {
	if f := stat(pid); len(f) > 1 {
		n, _ := strconv.Atoi(f[1])
		return n
	}
	return 0
}

func childrenOf(pid int) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		if n, err := strconv.Atoi(filepath.Base(d)); err == nil && parentOf(n) == pid {
			pids = append(pids, n)
		}
	}
	return pids
}

// serverCPU is the processor time of the server's processes, those that have ended included; 0 where it cannot be known.
func (b *bench) serverCPU() time.Duration {
	if b.postmaster == 0 {
		return 0
	}
	sum := processCPU(b.postmaster, 11, 12, 13, 14) // own, and children that were waited for
	for _, pid := range childrenOf(b.postmaster) {
		sum += processCPU(pid, 11, 12)
	}
	return sum
}

// processCPU adds up fields of a process's stat that are processor times; gone means 0.
func processCPU(pid int, fields ...int) (sum time.Duration) {
	const tick = 10 * time.Millisecond // USER_HZ is 100 wherever Go runs
	f := stat(pid)
	for _, i := range fields {
		if i < len(f) {
			v, _ := strconv.Atoi(f[i])
			sum += time.Duration(v) * tick
		}
	}
	return sum
}

// pin gives the server a processor of its own and the lab, with everything else it starts, another one, so that neither
// takes from the other what the experiment counts on. It says whether that could be done.
func (b *bench) pin() bool {
	b.pinned = false
	if b.postmaster == 0 {
		return false
	}
	server, client, ok := twoProcessors()
	if !ok {
		return false
	}
	for _, pid := range append(childrenOf(b.postmaster), b.postmaster) {
		if setAffinity(pid, server) != nil {
			return false
		}
	}
	b.pinned = pinSelf(client) == nil
	return b.pinned
}

// unpin undoes it.
func (b *bench) unpin() {
	if !b.pinned {
		return
	}
	for _, pid := range append(childrenOf(b.postmaster), b.postmaster) {
		_ = setAffinity(pid, allProcessors)
	}
	_ = pinSelf(allProcessors)
	b.pinned = false
}

// pooler starts a PgBouncer before the server, as a user without privileges. Its databases are name → pool size, all of
// them the server's database target.
func (b *bench) pooler(target string, pools map[string]int, clients int, queryWait time.Duration) (hostPort string, pid int, stop func(), err error) {
	bin, err := exec.LookPath("pgbouncer")
	if err != nil {
		if _, e := os.Stat("/usr/sbin/pgbouncer"); e != nil {
			return "", 0, nil, errors.New("pgbouncer is not installed (Debian: apt-get install pgbouncer)")
		}
		bin = "/usr/sbin/pgbouncer"
	}
	u, err := url.Parse(b.server.DSN())
	if err != nil {
		return "", 0, nil, err
	}
	dir, err := os.MkdirTemp("", "lab-pgbouncer-")
	if err != nil {
		return "", 0, nil, err
	}
	port, err := freePort()
	if err != nil {
		return "", 0, nil, err
	}
	password, _ := u.User.Password()
	var conf strings.Builder
	fmt.Fprintln(&conf, "[databases]")
	for name, size := range pools {
		fmt.Fprintf(&conf, "%s = host=%s port=%s dbname=%s user=%s password=%s pool_size=%d\n", name, u.Hostname(), u.Port(), target, u.User.Username(), password, size)
	}
	fmt.Fprintf(&conf, `[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = %d
query_wait_timeout = %g
ignore_startup_parameters = extra_float_digits
log_connections = 0
log_disconnections = 0
log_pooler_errors = 0
log_stats = 0
logfile = %s
`, port, clients, queryWait.Seconds(), filepath.Join(dir, "log"))
	file := filepath.Join(dir, "ini")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		return "", 0, nil, err
	}
	cmd := exec.Command(bin, "-q", file)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if os.Geteuid() == 0 { // PgBouncer refuses to be root
		const nobody = 65534
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
		for _, f := range []string{dir, file} {
			if err := os.Chown(f, nobody, nobody); err != nil {
				return "", 0, nil, err
			}
		}
	}
	dieWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return "", 0, nil, err
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
		_ = os.RemoveAll(dir)
	}
	hostPort = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("tcp", hostPort)
		if err == nil {
			_ = c.Close()
			return hostPort, cmd.Process.Pid, stop, nil
		}
		select {
		case <-ended:
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			_ = os.RemoveAll(dir)
			return "", 0, nil, fmt.Errorf("pgbouncer does not start: %s", log)
		default:
		}
		if time.Since(start) > 5*time.Second {
			stop()
			return "", 0, nil, errors.New("pgbouncer does not answer")
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// proxy puts a toxiproxy before the server that adds delay in each direction, and returns its address.
func (b *bench) proxy(delay time.Duration) (hostPort string, stop func(), err error) {
	u, err := url.Parse(b.server.DSN())
	if err != nil {
		return "", nil, err
	}
	toxics.Register("lab_delay", new(delayToxic))
	p := toxiproxy.NewProxy(toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop()), "lab", "127.0.0.1:0", u.Host)
	if err := p.Start(); err != nil {
		return "", nil, err
	}
	for _, stream := range []string{"upstream", "downstream"} {
		if _, err := p.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": "lab_delay", "stream": %q, "attributes": {"ns": %d}}`, stream, delay))); err != nil {
			p.Stop()
			return "", nil, err
		}
	}
	return p.Listen, p.Stop, nil
}

// delayToxic adds a delay below toxiproxy's own unit, the millisecond.
type delayToxic struct {
	NS time.Duration `json:"ns"`
}

func (t *delayToxic) Pipe(stub *toxics.ToxicStub) {
	for {
		select {
		case <-stub.Interrupt:
			return
		case c := <-stub.Input:
			if c == nil {
				stub.Close()
				return
			}
			if left := t.NS - time.Since(c.Timestamp); left > 0 {
				pause(left)
			}
			stub.Output <- c
		}
	}
}

func (t *delayToxic) GetBufferSize() int { return 1024 }
