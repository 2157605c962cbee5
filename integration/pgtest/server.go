//go:build unix

package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	startLimit = time.Minute
	stopLimit  = 10 * time.Second
	pollEvery  = 10 * time.Millisecond // PostgreSQL tells a process that is not its client nothing; files are looked at
)

// A Server is a running PostgreSQL. Its methods may be called concurrently; those that start and end it take turns.
type Server struct {
	dsn     string
	version string
	major   int

	// Of a private server only; dir is "" for an external one.
	dir   string   // holds owner.lock, log, data
	owner *os.File // its flock tells other processes that this one lives
	bin   string
	cred  *syscall.Credential
	port  int

	turn   sync.Mutex // held by the method that starts or ends the server, while it waits; guards closed and shm
	closed bool
	shm    string // the System V segment that a killed server left, until it starts again

	mu   sync.Mutex // guards proc
	proc *process   // nil: none was started, or the last one was seen to end
}

type process struct {
	pid  int
	done chan struct{} // closed when the postmaster has ended
}

// password is what the DSN says. No one checks it unless a test changes pg_hba.conf, but tests prove that it never shows.
const password = "not-a-secret"

// baseConf leaves synchronous_commit and full_page_writes on. Without fsync both cost little, and what was committed before
// Kill or an immediate Stop must be there after Restart: tests of a commit's outcome ask for it.
const baseConf = `
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
fsync = off
# A killed server must leave nothing outside its data directory.
dynamic_shared_memory_type = mmap
logging_collector = off
log_line_prefix = '%m [%p] '
`

const hbaConf = `
host all         postgres 127.0.0.1/32 trust
host all         all      127.0.0.1/32 scram-sha-256
host replication postgres 127.0.0.1/32 trust
`

func startPrivate(ctx context.Context, c config) (_ *Server, err error) {
	s := &Server{cred: serverUser()}
	b, err := findBinaries(ctx, c.major, s.cred)
	if err != nil {
		return nil, err
	}
	s.bin, s.version, s.major = b.dir, b.version, b.major
	if s.dir, s.owner, err = newOwnedDir(s.cred); err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.initdb(ctx, c.settings); err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		if s.port, err = freePort(); err != nil {
			return nil, fmt.Errorf("pgtest: %w", err)
		}
		s.dsn = fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/postgres?sslmode=disable", password, s.port)
		err = s.launch(ctx)
		if err == nil {
			return s, nil
		}
		if try == 10 || !errors.Is(err, errPortTaken) {
			return nil, err
		}
	}
}

// freePort picks below the ports that systems give to outgoing connections (from 32768 on Linux). Up there, while the
// server is stopped, a client's socket may get its port, or even connect to itself on it.
var freePort = func() (int, error) {
	for range 100 {
		port := 15000 + rand.IntN(17000)
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no free port found in 100 tries between 15000 and 32000")
}

func (s *Server) data() string    { return filepath.Join(s.dir, "data") }
func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

func (s *Server) initdb(ctx context.Context, settings []string) error {
	if err := os.Mkdir(s.data(), 0o700); err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	if s.cred != nil {
		if err := os.Chown(s.data(), int(s.cred.Uid), int(s.cred.Gid)); err != nil {
			return fmt.Errorf("pgtest: %w", err)
		}
	}
	pwfile := filepath.Join(s.dir, "pw")
	if err := writeFile(pwfile, password+"\n"); err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	cmd := command(ctx, s.cred, filepath.Join(s.bin, "initdb"), "-D", s.data(), "-U", "postgres", "--pwfile", pwfile,
		"-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.Dir = s.dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("pgtest: initdb %s as %s: %w\n%s", s.version, describe(s.cred), errors.Join(err, ctx.Err()), tail(out))
	}
	conf, err := os.OpenFile(filepath.Join(s.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	_, err = conf.WriteString(baseConf + strings.Join(settings, "\n") + "\n")
	if err := errors.Join(err, conf.Close()); err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	// Truncates what initdb wrote, and so keeps its owner.
	if err := os.WriteFile(filepath.Join(s.data(), "pg_hba.conf"), []byte(hbaConf), 0o600); err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	return nil
}

var errPortTaken = errors.New("port taken")

// launch starts the server on s.port and waits until it is ready. On an error no process is left.
func (s *Server) launch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	defer log.Close() // the server has its own descriptor
	begin, _ := log.Seek(0, io.SeekEnd)

	cmd := command(context.Background(), s.cred, filepath.Join(s.bin, "postgres"), "-D", s.data(), "-p", strconv.Itoa(s.port))
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, log, log
	dieWithOwner(cmd.SysProcAttr)
	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go holdThread(cmd, started, p.done)
	if err := <-started; err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	p.pid = cmd.Process.Pid
	s.setProc(p)
	if err := s.waitReady(ctx, p); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		s.killAll(p)
		text, _ := os.ReadFile(s.logFile())
		text = text[min(begin, int64(len(text))):]
		if bytes.Contains(text, []byte("could not create any TCP/IP sockets")) {
			err = errPortTaken
		}
		return fmt.Errorf("pgtest: PostgreSQL %s does not start on port %d: %w; its log ends:\n%s", s.version, s.port, err, tail(text))
	}
	s.shm = ""
	return nil
}

// holdThread is the server's parent, and lives as long as the server. The kernel signals a child when the thread that
// forked it ends, not the process, so this thread must serve nothing else and end no sooner.
func holdThread(cmd *exec.Cmd, started chan<- error, done chan<- struct{}) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	started <- err
	if err == nil {
		cmd.Wait() // how it ended stands in its log
		close(done)
	}
}

// waitReady looks at postmaster.pid, as pg_ctl does: line 8 says so, and it has our child's pid on line 1. To connect
// would prove less, for on a port that was taken another server may answer.
func (s *Server) waitReady(ctx context.Context, p *process) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if f := s.pidFile(); len(f) > 7 && f[0] == strconv.Itoa(p.pid) && strings.TrimSpace(f[7]) == "ready" {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.done:
			return errors.New("it ended")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Server) pidFile() []string {
	text, _ := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	return strings.Split(string(text), "\n")
}

func (s *Server) setProc(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc = p
}

// live returns the process if it has not ended, or nil.
func (s *Server) live() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil {
		select {
		case <-s.proc.done:
			s.proc = nil
		default:
		}
	}
	return s.proc
}

func (s *Server) running() bool { return s.External() || s.live() != nil }

// A Mode says what a stopping server does with its sessions.
type Mode syscall.Signal

const (
	Smart     = Mode(syscall.SIGTERM) // waits until the clients have left
	Fast      = Mode(syscall.SIGINT)  // rolls back and ends their sessions
	Immediate = Mode(syscall.SIGQUIT) // ends without a checkpoint; the next start recovers
)

// Stop ends the server and waits for it. When ctx ends first, so does the wait, and the server goes on stopping. Stopping
// a stopped server is no error. Restart starts it again, Close releases it.
func (s *Server) Stop(ctx context.Context, mode Mode) error {
	if s.External() {
		return ErrExternal
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.stop(ctx, mode)
}

func (s *Server) stop(ctx context.Context, mode Mode) error {
	p := s.live()
	if p == nil {
		return nil
	}
	syscall.Kill(p.pid, syscall.Signal(mode))
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgtest: server still stopping (%v): %w", syscall.Signal(mode), context.Cause(ctx))
	}
}

// Restart stops the server fast if it runs, and starts it on the same port and data, also after Kill. It returns when
// connections are accepted; the error has the end of the log, and then the server is stopped.
func (s *Server) Restart(ctx context.Context) error {
	if s.External() {
		return ErrExternal
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	if s.closed {
		return errors.New("pgtest: server is closed")
	}
	if err := s.stop(ctx, Fast); err != nil {
		return err
	}
	return s.launch(ctx)
}

// Kill ends every process of the server with SIGKILL, as a crash of its host would, and waits until they are gone. The
// kernel closes its connections. Restart recovers it, with everything that was committed.
func (s *Server) Kill() error {
	if s.External() {
		return ErrExternal
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	p := s.live()
	if p == nil {
		return nil
	}
	if f := s.pidFile(); len(f) > 6 { // line 7: key and id of the segment that guards the data directory
		if id := strings.Fields(f[6]); len(id) == 2 {
			s.shm = id[1]
		}
	}
	return s.killAll(p)
}

func (s *Server) killAll(p *process) error {
	syscall.Kill(p.pid, syscall.SIGSTOP) // so that it forks no more between the look and the kill
	pids := processes(s.data())
	syscall.Kill(p.pid, syscall.SIGKILL)
	signalAll(pids, syscall.SIGKILL)
	<-p.done
	if !waitGone(s.data(), stopLimit) {
		return fmt.Errorf("pgtest: processes %v outlived SIGKILL by %v", processes(s.data()), stopLimit)
	}
	return nil
}

// Freeze stops the server in its tracks: connections are accepted by the kernel, and nothing answers. Thaw wakes it.
func (s *Server) Freeze() error {
	if s.External() {
		return ErrExternal
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	p := s.live()
	if p == nil {
		return errors.New("pgtest: server is stopped")
	}
	// Once the postmaster sleeps there are no new backends.
	if err := syscall.Kill(p.pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("pgtest: freeze: %w", err)
	}
	signalAll(processes(s.data()), syscall.SIGSTOP)
	return nil
}

// Thaw undoes Freeze. Thawing a server that is not frozen does nothing.
func (s *Server) Thaw() error {
	if s.External() {
		return ErrExternal
	}
	signalAll(processes(s.data()), syscall.SIGCONT)
	return nil
}

// Log returns the last 64 KiB of the server's log, also after it was stopped; "" once closed, or if external.
func (s *Server) Log() string {
	text, _ := os.ReadFile(s.logFile())
	return string(text[max(0, len(text)-64<<10):])
}

// tail is what an error shows of an output.
func tail(text []byte) []byte { return bytes.TrimSpace(text[max(0, len(text)-4<<10):]) }

// Close ends the server, within about 30 seconds if it resists, and removes its directory. A second Close does nothing;
// nor does the Close of an external server.
func (s *Server) Close() error {
	if s.External() {
		return nil
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.Thaw()
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	var errs []error
	if err := s.stop(ctx, Fast); err != nil {
		errs = append(errs, err)
		if p := s.live(); p != nil {
			errs = append(errs, s.killAll(p))
		}
	}
	if s.shm != "" {
		// The next start would have removed it. Best effort: it is 56 bytes, but the system has a limited number.
		exec.Command("ipcrm", "-m", s.shm).Run()
	}
	if err := os.RemoveAll(s.dir); err != nil {
		errs = append(errs, err)
	}
	s.owner.Close()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("pgtest: close: %w", err)
	}
	return nil
}
