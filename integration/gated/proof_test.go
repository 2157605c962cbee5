package gated

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// Each way in which a connection can end leaves another trace on the server. The permit must not come back before the
// server is done (I6). What the server says is asked at the moment the permit comes back, by whoever has waited for it in
// the queue.

// proof is a permit-holding transaction with the advisory lock 7.
type proof struct {
	*rig
	tx *sql.Tx
	b  backend
}

const rounds = 20 // of what shows in some endings only

func (r *rig) begin(ctx context.Context) *proof {
	r.t.Helper()
	tx, err := r.BeginTx(ctx, nil)
	must(r.t, err)
	b := backendOf(r.t, tx)
	_, err = tx.Exec("select pg_advisory_xact_lock(7)")
	must(r.t, err)
	return &proof{r, tx, b}
}

// isGone fails the test if the backend is there or its lock held when the permit comes back.
func (p *proof) isGone() {
	p.t.Helper()
	p.released(func() {
		if !p.see.free(7) {
			p.t.Error("I6: the permit came back while the lock was held")
		}
		if p.see.there(p.b) {
			p.t.Errorf("I6: the permit came back while the backend was there: %q", p.see.state(p.b))
		}
	})
}

// later runs f, and returns its error later.
func later(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- f() }()
	return c
}

func TestProofCancelInStatement(t *testing.T) {
	r := newRig(t, setup{})
	for range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		p := r.begin(ctx)
		err := later(func() error { _, err := p.tx.ExecContext(ctx, "select pg_sleep(60)"); return err })
		r.see.working(p.b, "pg_sleep(60)")
		cancel()
		if err := <-err; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want context.Canceled", err)
		}
		p.isGone()
		if err := p.tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) && !errors.Is(err, context.Canceled) {
			t.Errorf("Rollback: %v", err)
		}
	}
	if n := r.gate.Stats().TerminatedBackends; n != 0 {
		t.Errorf("%d backends terminated that had honoured the cancel", n)
	}
}

func TestProofNetworkResetInStatement(t *testing.T) {
	var net_ resets
	r := newRig(t, setup{pool: func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				net_.add(conn)
			}
			return conn, err
		}
	}})
	p := r.begin(t.Context())
	// Half a second of a statement that ignores cancels: the backend is busy long after its client was cut off.
	r.see.Stubborn()
	err := later(func() error { _, err := p.tx.Exec("select stubborn(0.5)"); return err })
	r.see.working(p.b, "stubborn")
	net_.cut(p.b, t)
	if err := <-err; err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the network's", err)
	} else {
		public(t, err)
	}
	if s := r.gate.Stats(); s.Running != 1 {
		t.Errorf("I6: running %d while the statement goes on", s.Running)
	}
	if err := p.tx.Rollback(); err == nil {
		t.Error("Rollback of a transaction whose connection is lost gave no error")
	} else {
		public(t, err)
	}
	p.isGone()
}

// cut resets the connection that belongs to the backend: all of them, since the one that is at work is the only one.
func (r *resets) cut(b backend, t *testing.T) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.SetLinger(0) // Close then sends RST
		_ = c.Close()
	}
	r.conns = nil
}

func TestProofCopyCancelledWhileSourceProduces(t *testing.T) {
	r := newRig(t, setup{dsn: pgtest.Shared(t).Database(t), opts: []pgxgated.Option{pgxgated.WithDrainGrace(100 * time.Millisecond)}})
	r.see.Exec("create table copied (line text)")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c, err := r.Conn(t.Context())
	must(t, err)
	b := backendOf(t, c)
	_, err = c.ExecContext(t.Context(), "select pg_advisory_lock(7)")
	must(t, err)
	src := &endlessReader{stop: make(chan struct{})}
	copied := later(func() error {
		return c.Raw(func(dc any) error {
			pc, err := pgxgated.PgxConn(ctx, dc)
			if err != nil {
				return err
			}
			_, err = pc.PgConn().CopyFrom(ctx, src, "copy copied from stdin")
			return err
		})
	})
	r.see.working(b, "copy copied")
	cancel()
	if err := <-copied; err == nil {
		t.Error("a cancelled COPY gave no error")
	}
	must(t, c.Close())
	(&proof{rig: r, b: b}).isGone()
	close(src.stop)
}

// endlessReader produces until it is stopped.
type endlessReader struct {
	stop chan struct{}
}

func (r *endlessReader) Read(p []byte) (int, error) {
	select {
	case <-r.stop:
		return 0, io.EOF
	case <-time.After(time.Millisecond):
		return copy(p, "line\n"), nil
	}
}

// A context that dies between statements costs neither connection nor time: ROLLBACK is sent all the same.
func TestProofRollbackOnDeadContextIsSent(t *testing.T) {
	r := newRig(t, setup{})
	var first backend
	for i := range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		p := r.begin(ctx)
		if i == 0 {
			first = p.b
		}
		if p.b != first {
			t.Fatalf("round %d: another backend: the connection was not kept", i)
		}
		cancel()
		r.released(func() {
			if !r.see.free(7) {
				t.Error("I6: the permit came back while the lock was held")
			}
			if s := r.see.state(first); s != "idle" {
				t.Errorf("the backend is %q, want idle: rolled back", s)
			}
		})
		if err := p.tx.Rollback(); !errors.Is(err, sql.ErrTxDone) && !errors.Is(err, context.Canceled) {
			t.Errorf("Rollback: %v", err)
		}
	}
	if n := r.pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d physical connections were made, want 1", n)
	}
}

// A BEGIN sent as text that is still open when the connection comes back.
func TestProofDestroyedInsideTransaction(t *testing.T) {
	r := newRig(t, setup{})
	for range rounds {
		c, err := r.Conn(t.Context())
		must(t, err)
		b := backendOf(t, c)
		for _, q := range []string{"begin", "select pg_advisory_xact_lock(7)"} {
			_, err := c.ExecContext(t.Context(), q)
			must(t, err)
		}
		must(t, c.Close())
		(&proof{rig: r, b: b}).isGone()
	}
}

func TestProofFatal(t *testing.T) {
	for _, where := range []string{"between statements", "in a statement"} {
		t.Run(where, func(t *testing.T) {
			r := newRig(t, setup{})
			for range rounds {
				p := r.begin(t.Context())
				var err error
				if where == "in a statement" {
					late := later(func() error { _, err := p.tx.Exec("select pg_sleep(60)"); return err })
					r.see.working(p.b, "pg_sleep(60)")
					r.see.Exec("select pg_terminate_backend($1)", p.b.pid)
					err = <-late
				} else {
					r.see.Exec("select pg_terminate_backend($1)", p.b.pid)
					_, err = p.tx.Exec("select 1")
				}
				bare(t, err, "57P01")
				public(t, p.tx.Rollback())
				p.isGone()
			}
		})
	}
}

func TestProofStatementThatSwallowsCancelIsTerminatedAfterGrace(t *testing.T) {
	r := newRig(t, setup{opts: []pgxgated.Option{pgxgated.WithDrainGrace(200 * time.Millisecond)}})
	r.see.Stubborn()
	ctx, cancel := context.WithCancel(t.Context())
	p := r.begin(ctx)
	err := later(func() error { _, err := p.tx.ExecContext(ctx, "select stubborn(300)"); return err })
	r.see.working(p.b, "stubborn")
	cancel()
	if err := <-err; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	p.isGone()
	s := r.gate.Stats()
	if s.TerminatedBackends != 1 || s.DrainsUnproven != 0 {
		t.Errorf("terminated %d, unproven %d; want 1, 0", s.TerminatedBackends, s.DrainsUnproven)
	}
	if r.log.count("terminated") != 1 {
		t.Error("the termination was not logged once")
	}
	_ = p.tx.Rollback() // ErrTxDone
}

// A connection that somebody took over is his: the permit comes back, its backend stays. Over a *sql.DB, since pgxpool holds
// the place of such a connection for 15 s.
func TestProofHijackedIsLeftAlone(t *testing.T) {
	r := newDBRig(t, pgxgated.WithDrainGrace(20*time.Millisecond), pgxgated.WithDrainLimit(400*time.Millisecond))
	c, err := r.Conn(t.Context())
	must(t, err)
	b := backendOf(t, c)
	var taken *pgconn.HijackedConn
	must(t, c.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(t.Context(), dc)
		if err != nil {
			return err
		}
		taken, err = pc.PgConn().Hijack()
		return err
	}))
	must(t, c.Close())
	r.released(func() {})
	s := r.gate.Stats()
	if s.DrainsUnproven != 1 || s.TerminatedBackends != 0 {
		t.Errorf("unproven %d, terminated %d; want 1, 0", s.DrainsUnproven, s.TerminatedBackends)
	}
	mine, err := pgconn.Construct(taken)
	must(t, err)
	defer mine.Close(context.Background())
	res := mine.ExecParams(t.Context(), "select pg_backend_pid()::text", nil, nil, nil, nil).Read()
	if res.Err != nil || len(res.Rows) != 1 || string(res.Rows[0][0]) != strconv.Itoa(b.pid) {
		t.Errorf("the hijacked connection answers %v, %v", res.Rows, res.Err)
	}
}

// A *stdlib.Conn below OpenDB is pgx too, and gets the same proof.
func TestProofOverSQLDB(t *testing.T) {
	r := newDBRig(t)
	for range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		p := r.begin(ctx)
		err := later(func() error { _, err := p.tx.ExecContext(ctx, "select pg_sleep(60)"); return err })
		r.see.working(p.b, "pg_sleep(60)")
		cancel()
		if err := <-err; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want context.Canceled", err)
		}
		p.isGone()
		_ = p.tx.Rollback() // ErrTxDone
	}
	var first backend
	for i := range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		p := r.begin(ctx)
		if i == 0 {
			first = p.b
		} else if p.b != first {
			t.Errorf("round %d: another backend: ROLLBACK on a dead context was not sent", i)
		}
		cancel()
		r.released(func() {
			if !r.see.free(7) {
				t.Error("I6: the permit came back while the lock was held")
			}
		})
	}
}

// Behind a pooler the pids are made up. A check by pid would say "gone" at once.
func TestProofPoolerIsSaidOnceAndNeverCountsAsProof(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	leakFree(t)
	pooler := newProxy(t, dsn)
	pooler.fakePID = true
	r := newRig(t, setup{dsn: pooler.through(dsn), b: 2, p: 3})
	r.see.Stubborn()
	const n = 4
	var wg sync.WaitGroup
	for range n {
		ctx, cancel := context.WithCancel(t.Context())
		tx, err := r.BeginTx(ctx, nil)
		must(t, err)
		b := backendOf(t, tx)
		wg.Go(func() {
			_, err := tx.ExecContext(ctx, "select stubborn(0.3)")
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want context.Canceled", err)
			}
		})
		r.see.working(b, "stubborn")
		cancel()
	}
	wg.Wait()
	r.idle()
	s := r.gate.Stats()
	if s.DrainsUnproven != n || s.TerminatedBackends != 0 {
		t.Errorf("%d unproven, %d terminated; want %d, 0", s.DrainsUnproven, s.TerminatedBackends, n)
	}
	if got := r.log.count("behind a pooler"); got != 1 {
		t.Errorf("the pooler was mentioned %d times, want once:\n%s", got, r.log)
	}
}

// Without privilege a row of another role shows neither start nor state. It must count as still there.
func TestProofUnprivilegedRole(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	leakFree(t)
	see := newTruth(t, dsn)
	see.Exec("create role plain login password 'plain'")
	t.Cleanup(func() { see.Exec("drop owned by plain; drop role plain") })
	r := newRig(t, setup{dsn: dsn, pool: func(c *pgxpool.Config) {
		c.ConnConfig.User, c.ConnConfig.Password = "plain", "plain"
	}, opts: []pgxgated.Option{pgxgated.WithDrainGrace(100 * time.Millisecond)}})
	r.see.Stubborn()
	ctx, cancel := context.WithCancel(t.Context())
	p := r.begin(ctx)
	err := later(func() error { _, err := p.tx.ExecContext(ctx, "select stubborn(300)"); return err })
	r.see.working(p.b, "stubborn")
	cancel()
	<-err
	p.isGone()
	if n := r.gate.Stats().TerminatedBackends; n != 1 {
		t.Errorf("terminated %d, want 1: a role may end its own backends", n)
	}
}
