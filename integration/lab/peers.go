//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/adaptivelimiter"
	"github.com/failsafe-go/failsafe-go/bulkhead"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"golang.org/x/sync/semaphore"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// statement returns one row of one integer.
type statement struct {
	sql  string
	args []any
}

// shape is what a transaction does: BEGIN, each statement, COMMIT.
type shape []statement

// limits are what the peers are told, each in its own words.
type limits struct {
	running int           // B: operations at work
	waiting int           // Q: waiting for one of them
	conns   int           // P: connections
	maxWait time.Duration // for one of them
	batch   int           // 0: one workload. Else the batch workload gets this many of running, and batchWaiting
}

const batchWaiting = 4

// peer is a way to put a bound on what reaches the server.
type peer struct {
	name     string
	database string
	// tx carries out a transaction for a workload (0, or 1 for batch), and says when it was let in.
	tx    func(ctx context.Context, workload int, s shape) (begun time.Time, err error)
	limit int // operations at work that it was told to keep to
	pid   int // of a process of its own, 0 without one
	close func()
}

// call is what a load does with a peer.
func (p *peer) call(workload int, s shape) func(context.Context, arrival) (time.Time, ending, error) {
	return func(ctx context.Context, _ arrival) (time.Time, ending, error) {
		asked := time.Now()
		begun, err := p.tx(ctx, workload, s)
		how, isRefusal := refusal(err, time.Since(asked))
		switch {
		case err == nil:
			return begun, done, nil
		case isRefusal:
			return time.Time{}, how, err
		case ctx.Err() != nil:
			return begun, gaveUp, err
		default:
			return begun, failed, err
		}
	}
}

// The peers' names, as they stand in CSV files, plots and tables.
const (
	plain      = "pgx, MaxOpenConns"
	unlimited  = "pgx, unlimited"
	twoPools   = "pgx, a pool each"
	pool       = "pgxpool"
	semaphores = "two semaphores"
	bulkheads  = "failsafe bulkhead"
	adaptive   = "failsafe adaptive"
	bouncer    = "PgBouncer"
	gated      = "pgx-gated"
)

// peerOrder is their order in tables and plots.
var peerOrder = []string{plain, twoPools, unlimited, pool, semaphores, bulkheads, adaptive, bouncer, gated}

// allPeers are those that bound one workload.
var allPeers = []string{plain, unlimited, pool, semaphores, bulkheads, adaptive, bouncer, gated}

// openers set each peer up as its users would. dsn is the peer's own database.
var openers = map[string]func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error{
	plain: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.conns
		return p.overSQL(dsn, "", l.conns, nil)
	},
	unlimited: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.conns // nobody told it; this is what the others have
		return p.overSQL(dsn, "", 0, nil)
	},
	twoPools: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.conns
		return p.overSQL(dsn, dsn, l.conns-l.batch, nil, l.batch)
	},
	pool: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.conns
		pool, err := pgxpool.New(ctx, pgtest.With(dsn, "pool_max_conns", fmt.Sprint(l.conns)))
		if err != nil {
			return err
		}
		p.close = pool.Close
		p.tx = func(ctx context.Context, _ int, s shape) (begun time.Time, err error) {
			tx, err := pool.Begin(ctx)
			if err != nil {
				return begun, err
			}
			begun = time.Now()
			defer tx.Rollback(ctx) // nothing after Commit
			for _, st := range s {
				var n int64
				if err := tx.QueryRow(ctx, st.sql, st.args...).Scan(&n); err != nil {
					return begun, err
				}
			}
			return begun, tx.Commit(ctx)
		}
		return nil
	},
	semaphores: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.running
		guards := []func(context.Context, func() error) error{pair(l.running, l.waiting, l.maxWait)}
		if l.batch > 0 {
			guards = append(guards, pair(l.batch, batchWaiting, l.maxWait))
		}
		return p.overSQL(dsn, "", l.conns, guards)
	},
	bulkheads: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.running
		guard := func(n int) func(context.Context, func() error) error {
			e := failsafe.With(bulkhead.NewBuilder[any](uint(n)).WithMaxWaitTime(l.maxWait).Build())
			return func(ctx context.Context, f func() error) error { return e.WithContext(ctx).Run(f) }
		}
		guards := []func(context.Context, func() error) error{guard(l.running)}
		if l.batch > 0 {
			guards = append(guards, guard(l.batch))
		}
		return p.overSQL(dsn, "", l.conns, guards)
	},
	adaptive: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.conns
		e := failsafe.With(adaptivelimiter.NewBuilder[any]().WithLimits(1, uint(l.conns), uint(l.running)).
			WithQueueing(2, 3).WithMaxWaitTime(l.maxWait).Build())
		return p.overSQL(dsn, "", l.conns, []func(context.Context, func() error) error{
			func(ctx context.Context, f func() error) error { return e.WithContext(ctx).Run(f) },
		})
	},
	bouncer: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.running
		pools := map[string]int{"lab": l.running}
		if l.batch > 0 {
			pools["batch"] = l.batch
		}
		// Clients outnumber the server's connections; that is what a pooler is for.
		conns := l.running + l.waiting
		addr, pid, stop, err := b.pooler(p.database, pools, 4*conns+20, l.maxWait)
		if err != nil {
			return err
		}
		through := func(name string) string {
			return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable&default_query_exec_mode=exec", addr, name)
		}
		batch := ""
		if l.batch > 0 {
			batch = through("batch")
		}
		if err := p.overSQL(through("lab"), batch, conns, nil); err != nil {
			stop()
			return err
		}
		p.pid = pid
		closeDBs := p.close
		p.close = func() { closeDBs(); stop() }
		return nil
	},
	gated: func(ctx context.Context, b *bench, p *peer, dsn string, l limits) error {
		p.limit = l.running
		dsn = pgtest.With(dsn, "pool_max_conns", fmt.Sprint(l.conns))
		dsn = pgtest.With(dsn, "gate_running", fmt.Sprint(l.running))
		dsn = pgtest.With(dsn, "gate_waiting", fmt.Sprint(l.waiting))
		dsn = pgtest.With(dsn, "gate_max_wait", l.maxWait.String())
		if l.batch > 0 {
			dsn = pgtest.With(dsn, "gate_workloads", fmt.Sprintf("batch:%d+%d", l.batch, batchWaiting))
		}
		db, err := sql.Open(pgxgated.DriverName, dsn)
		if err != nil {
			return err
		}
		db.SetMaxIdleConns(l.running + l.waiting) // as the README says
		p.close = func() { _ = db.Close() }
		p.tx = func(ctx context.Context, workload int, s shape) (begun time.Time, err error) {
			if workload == 1 {
				ctx = pgxgated.WithWorkload(ctx, "batch")
			}
			err = transact(ctx, db, s, &begun)
			return begun, err
		}
		return db.PingContext(ctx)
	},
}

// pair is what people write by hand instead of a gate: a semaphore for admission, refused at once, one for running, waited
// for, both released when the call returns.
func pair(running, waiting int, maxWait time.Duration) func(context.Context, func() error) error {
	admission, run := semaphorePair(running, waiting)
	return func(ctx context.Context, f func() error) error {
		if !admission.TryAcquire(1) {
			return errFull
		}
		defer admission.Release(1)
		bounded, cancel := context.WithTimeout(ctx, maxWait)
		defer cancel()
		if err := run.Acquire(bounded, 1); err != nil {
			if ctx.Err() == nil {
				return errWaited
			}
			return err
		}
		defer run.Release(1)
		return f()
	}
}

func semaphorePair(running, waiting int) (admission, run *semaphore.Weighted) {
	return semaphore.NewWeighted(int64(running + waiting)), semaphore.NewWeighted(int64(running))
}

var errFull, errWaited = errors.New("semaphores: full"), errors.New("semaphores: waited too long")

// overSQL makes a peer of plain pgx under database/sql, behind a guard for each workload where there is one. batch is the
// DSN of the batch workload where that has a pool of its own.
func (p *peer) overSQL(dsn, batch string, conns int, guards []func(context.Context, func() error) error, batchConns ...int) error {
	var dbs []*sql.DB
	p.close = func() {
		for _, db := range dbs {
			_ = db.Close()
		}
	}
	for i, d := range []string{dsn, batch} {
		if d == "" {
			break
		}
		db, err := sql.Open("pgx", d)
		if err != nil {
			p.close()
			return err
		}
		dbs = append(dbs, db)
		n := conns
		if i == 1 && len(batchConns) > 0 {
			n = batchConns[0]
		}
		if n > 0 { // else as database/sql has it: no bound, two idle ones kept
			db.SetMaxOpenConns(n)
			db.SetMaxIdleConns(n)
		}
		if err := db.Ping(); err != nil {
			p.close()
			return err
		}
	}
	p.tx = func(ctx context.Context, workload int, s shape) (begun time.Time, err error) {
		db := dbs[min(workload, len(dbs)-1)]
		if guards == nil {
			err = transact(ctx, db, s, &begun)
			return begun, err
		}
		err = guards[min(workload, len(guards)-1)](ctx, func() error { return transact(ctx, db, s, &begun) })
		return begun, err
	}
	return nil
}

// transact is the transaction of everybody who uses database/sql.
func transact(ctx context.Context, db *sql.DB, s shape, begun *time.Time) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	*begun = time.Now()
	defer tx.Rollback() // nothing after Commit
	for _, st := range s {
		var n int64
		if err := tx.QueryRowContext(ctx, st.sql, st.args...).Scan(&n); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// refusal tells whether err is that of a limiter, and whether the caller had been waiting.
func refusal(err error, took time.Duration) (ending, bool) {
	var ours *pgxgated.RejectedError
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &ours):
		if ours.Waited > 0 {
			return timedOut, true
		}
		return refused, true
	case errors.Is(err, errFull):
		return refused, true
	case errors.Is(err, errWaited), errors.Is(err, bulkhead.ErrFull), errors.As(err, &pgErr) && strings.Contains(pgErr.Message, "query_wait_timeout"):
		return timedOut, true
	case errors.Is(err, adaptivelimiter.ErrExceeded): // for both
		if took >= standard.maxWait {
			return timedOut, true
		}
		return refused, true
	}
	return 0, false
}

// open opens peers, each on a database of its own. One that cannot run is left out, by name.
func (b *bench) open(ctx context.Context, names []string, l limits) []*peer {
	var peers []*peer
	for _, name := range names {
		if !b.runs(name) {
			continue
		}
		p, err := b.openOne(ctx, name, l)
		if err != nil {
			say("  SKIPPED %s: %v", name, err)
			continue
		}
		peers = append(peers, p)
	}
	return peers
}

// runs tells whether a peer was asked for.
func (b *bench) runs(name string) bool {
	return len(b.only) == 0 || name == plain || name == gated || slices.ContainsFunc(b.only, func(s string) bool { return strings.Contains(name, s) })
}

func (b *bench) openOne(ctx context.Context, name string, l limits) (*peer, error) {
	p := &peer{name: name, database: "lab_" + strings.NewReplacer(" ", "_", ",", "", "-", "_").Replace(strings.ToLower(name))}
	if err := b.database(ctx, p.database); err != nil {
		return nil, err
	}
	if err := openers[name](ctx, b, p, b.dsn(p.database), l); err != nil {
		return nil, err
	}
	// The first transaction is not the experiment's: connections, statement descriptions.
	if _, err := p.tx(ctx, 0, shape{b.burn(time.Millisecond)}); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func closeAll(peers []*peer) {
	for _, p := range peers {
		p.close()
	}
}
