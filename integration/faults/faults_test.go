package faults

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// lasts is how long a fault lasts.
func lasts() time.Duration { return longer(1500*time.Millisecond, 10*time.Second) }

// hold is lasts of something that goes on by itself.
func hold() { time.Sleep(lasts()) }

// repeat does f every so often while a fault lasts.
func repeat(every time.Duration, f func()) {
	for end := time.Now().Add(lasts()); time.Now().Before(end); time.Sleep(every) {
		f()
	}
}

// throughProxy is a load on a database of its own behind a toxiproxy.
func throughProxy(t *testing.T, change func(*pgxpool.Config)) (*load, *toxic) {
	t.Helper()
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	see := observe(t, dsn)
	x := newToxic(t, dsn)
	return start(t, withHost(dsn, x.addr()), see, change), x
}

func TestDelay(t *testing.T) {
	l, x := throughProxy(t, nil)
	l.survives(func() {
		x.add("latency", `"latency": 30, "jitter": 25`)
		hold()
		x.clear()
	})
}

func TestSlowAndSliced(t *testing.T) {
	l, x := throughProxy(t, nil)
	l.survives(func() {
		x.add("slicer", `"average_size": 16, "size_variation": 8, "delay": 300`)
		hold()
		x.clear()
	})
}

func TestCut(t *testing.T) {
	l, x := throughProxy(t, nil)
	l.survives(func() {
		repeat(300*time.Millisecond, func() {
			x.cut()
			time.Sleep(200 * time.Millisecond)
			x.restore()
		})
	})
}

func TestConnectionsReset(t *testing.T) {
	l, x := throughProxy(t, nil)
	l.survives(func() {
		x.add("reset_peer", `"timeout": 30`)
		hold()
		x.clear()
	})
}

// The server never answers, for longer than pgx cleans up after a connection: 15 s. No permit may come back by that clock.
func TestHalfOpen(t *testing.T) {
	l, x := throughProxy(t, nil)
	l.survives(func() {
		x.add("timeout", `"timeout": 0`)
		time.Sleep(longer(17*time.Second, 40*time.Second))
		if s := l.gate.Stats(); s.Running != loadRunning || s.Draining == 0 {
			t.Errorf("running %d, draining %d: permits came back without the server's word", s.Running, s.Draining)
		}
		x.clear()
	})
}

// Cancel requests, which are connections of their own, take a second and a half, while most callers give up early.
func TestSlowCancelConnections(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Shared(t).Database(t)
	see := observe(t, dsn)
	slow := newToxic(t, dsn)
	slow.add("latency", `"latency": 1500`)
	var sick atomic.Bool
	l := start(t, withHost(dsn, detour(t, hostOf(dsn), slow.addr(), &sick)), see, nil)
	l.survives(func() {
		sick.Store(true)
		l.hasty.Store(true)
		hold()
		l.hasty.Store(false)
		sick.Store(false)
	})
}

// detour listens, and forwards to the server; cancel requests take the other way while on says so.
func detour(t *testing.T, server, other string, on *atomic.Bool) (addr string) {
	t.Helper()
	const cancelRequest = 80877102
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer client.Close()
				head := make([]byte, 8)
				if _, err := io.ReadFull(client, head); err != nil {
					return
				}
				to := server
				if on.Load() && binary.BigEndian.Uint32(head[4:]) == cancelRequest {
					to = other
				}
				up, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer up.Close()
				all.Go(func() {
					defer up.Close()
					if _, err := up.Write(head); err == nil {
						_, _ = io.Copy(up, client) // until one of them has gone
					}
				})
				_, _ = io.Copy(client, up)
			})
		}
	})
	t.Cleanup(func() { // all clients have gone
		_ = listener.Close()
		all.Wait()
	})
	return listener.Addr().String()
}

func TestBackendsTerminatedInMidTransaction(t *testing.T) {
	l, _ := throughProxy(t, nil)
	l.survives(func() {
		repeat(20*time.Millisecond, func() {
			l.see.Int("select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null order by random() limit 1) s")
		})
	})
}

func TestIdleInTransactionSessionTimeout(t *testing.T) {
	l, _ := throughProxy(t, nil)
	l.survives(func() {
		l.dawdle.Store(true)
		hold()
		l.dawdle.Store(false)
	})
}

// All connections are lost at once, the verifier's own among them.
func TestFailoverOfAllConnections(t *testing.T) {
	l, _ := throughProxy(t, nil)
	l.survives(func() {
		l.hasty.Store(true)
		repeat(250*time.Millisecond, func() {
			l.see.Int("select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()")
		})
		l.hasty.Store(false)
	})
}

// privately is a load on a server of its own.
func privately(t *testing.T) (*load, *pgtest.Server) {
	t.Helper()
	t.Parallel()
	s := pgtest.New(t)
	return start(t, s.DSN(), observe(t, s.DSN()), nil), s
}

// again gives the load an observer on the server as it is now.
func (l *load) again(s *pgtest.Server) { l.see = observe(l.t, s.DSN()) }

func TestRestartDuringStorm(t *testing.T) {
	l, s := privately(t)
	l.survives(func() {
		l.hasty.Store(true)
		for range 2 {
			if err := s.Restart(context.Background()); err != nil {
				t.Error(err)
			}
			time.Sleep(200 * time.Millisecond)
		}
		l.hasty.Store(false)
		l.again(s)
	})
}

func TestServerKilledAndRecovered(t *testing.T) {
	l, s := privately(t)
	l.survives(func() {
		for range 2 {
			if err := s.Kill(); err != nil {
				t.Error(err)
			}
			time.Sleep(300 * time.Millisecond)
			if err := s.Restart(context.Background()); err != nil {
				t.Error(err)
			}
			time.Sleep(200 * time.Millisecond)
		}
		l.again(s)
	})
}

// The host is there, takes connections, and answers nothing.
func TestServerFrozen(t *testing.T) {
	l, s := privately(t)
	l.survives(func() {
		if err := s.Freeze(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(longer(4*time.Second, 25*time.Second))
		if st := l.gate.Stats(); st.Running != loadRunning {
			t.Errorf("running %d: permits came back without the server's word", st.Running)
		}
		if err := s.Thaw(); err != nil {
			t.Fatal(err)
		}
	})
}
