package faults

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxgated/pgxgated"
)

// Each transaction takes one of as many advisory locks as there are running permits; PostgreSQL holds them until its end.
// Who finds none free is one too many, whoever is still waiting for it (I6). Looking for one is serialised, or locks that
// change hands meanwhile could be missed.
//
// Then it writes its number into two tables.
const loadSchema = `
create table a (id int);
create table b (id int);
create sequence over_limits;
create function enter(n int) returns int language plpgsql as $$
begin
	perform pg_advisory_lock(0);
	for i in 1..n loop
		if pg_try_advisory_xact_lock(i) then
			perform pg_advisory_unlock(0);
			return i;
		end if;
	end loop;
	perform nextval('over_limits');
	perform pg_advisory_unlock(0);
	return 0;
end $$;`

const (
	loadRunning = 4
	loadCallers = 16

	maxWait         = 500 * time.Millisecond
	poolWait        = time.Second
	deadline        = time.Second // of most callers
	rollbackTimeout = time.Second
	commitTimeout   = 2 * time.Second

	// patience is what no call may exceed: its bounds, one after the other, and as much again for a busy machine.
	patience = 2 * (maxWait + poolWait + deadline + rollbackTimeout + commitTimeout + 2*time.Second)
)

type outcome uint8

const (
	rolledBack outcome = iota // or never begun
	committed
	unknown
)

// load is work that goes on while something breaks.
type load struct {
	*gated
	see *observer

	stop    chan struct{}
	all     sync.WaitGroup
	ids     atomic.Int64
	commits atomic.Int64
	refused atomic.Int64
	lost    atomic.Int64 // given up or failed
	over    atomic.Int64
	since   [loadCallers]atomic.Int64 // when the call that is under way began; 0: none is
	dawdle  atomic.Bool               // leave the server waiting for the next statement, longer than it likes
	hasty   atomic.Bool               // give up early

	mu       sync.Mutex
	outcomes map[int64]outcome
	unknowns map[int64]error
}

// start has callers at work through dsn; see asks the server directly.
func start(t *testing.T, dsn string, see *observer, change func(*pgxpool.Config)) *load {
	t.Helper()
	see.Exec(loadSchema)
	l := &load{
		see: see, stop: make(chan struct{}), outcomes: make(map[int64]outcome), unknowns: make(map[int64]error),
		gated: open(t, dsn, pgxgated.Limits{Running: loadRunning, Waiting: 2 * loadCallers, MaxWait: maxWait}, loadRunning+4, change,
			pgxgated.WithPoolWait(poolWait), pgxgated.WithRollbackTimeout(rollbackTimeout), pgxgated.WithCommitTimeout(commitTimeout),
			pgxgated.WithDrainGrace(500*time.Millisecond), pgxgated.WithOutcomeTracking(),
			pgxgated.WithDeadlineAdmission(false)), // or it would spare the server most of those who give up
	}
	for c := range loadCallers {
		l.all.Go(func() { l.caller(c) })
	}
	l.all.Go(l.watch)
	return l
}

func (l *load) running() bool {
	select {
	case <-l.stop:
		return false
	default:
		return true
	}
}

func (l *load) caller(c int) {
	for l.running() {
		l.since[c].Store(time.Now().UnixNano())
		id := l.ids.Add(1)
		o, err := l.call(id)
		l.since[c].Store(0)

		if errors.Is(err, driver.ErrBadConn) {
			l.t.Errorf("driver.ErrBadConn reached the caller: %v", err)
		}
		l.mu.Lock()
		l.outcomes[id] = o
		if o == unknown {
			l.unknowns[id] = err
		}
		l.mu.Unlock()
		switch {
		case o == committed:
			l.commits.Add(1)
		case errors.Is(err, pgxgated.ErrRejected):
			l.refused.Add(1)
			time.Sleep(10 * time.Millisecond) // as a client that comes back later
		case err != nil:
			l.lost.Add(1)
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// call is one transaction.
func (l *load) call(id int64) (outcome, error) {
	d := deadline
	if n := rand.IntN(10); n == 0 || l.hasty.Load() && n < 6 {
		d = time.Duration(rand.Int64N(int64(60 * time.Millisecond)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	tx, err := l.BeginTx(ctx, nil)
	if err != nil {
		return rolledBack, err
	}
	work := func() error {
		var lock int
		if err := tx.QueryRowContext(ctx, "select enter($1)", loadRunning).Scan(&lock); err != nil {
			return err
		}
		if lock == 0 {
			l.over.Add(1)
		}
		if _, err := tx.ExecContext(ctx, "insert into a values ($1)", id); err != nil {
			return err
		}
		if l.dawdle.Load() && id%2 == 0 {
			if _, err := tx.ExecContext(ctx, "set local idle_in_transaction_session_timeout = 30"); err != nil {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
		sleep := 0.03
		if id%16 == 5 {
			sleep = 0.4 // the server is still at it when its caller has long been cut off
		}
		if _, err := tx.ExecContext(ctx, "select pg_sleep($1)", sleep); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "insert into b values ($1)", id)
		return err
	}
	err = work()
	if err != nil || id%7 == 0 {
		_ = tx.Rollback() // whatever it says, nothing is committed
		return rolledBack, err
	}
	err = tx.Commit()
	switch {
	case err == nil:
		return committed, nil
	case errors.Is(err, pgxgated.ErrOutcomeUnknown):
		return unknown, err
	default:
		return rolledBack, err
	}
}

// watch looks for callers that wait beyond all their bounds.
func (l *load) watch() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for l.running() {
		<-tick.C
		for c := range l.since {
			if s := l.since[c].Load(); s != 0 && time.Since(time.Unix(0, s)) > patience {
				stacks := make([]byte, 1<<20)
				l.t.Errorf("caller %d hangs for %v\n%s", c, time.Since(time.Unix(0, s)), stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	}
}

// rate is how many commits there are per second, measured for d.
func (l *load) rate(d time.Duration) float64 {
	before, start := l.commits.Load(), time.Now()
	time.Sleep(d)
	return float64(l.commits.Load()-before) / time.Since(start).Seconds()
}

// survives lets something break under load, and sees to it that all is well afterwards. fault returns when it has passed.
func (l *load) survives(fault func()) {
	l.t.Helper()
	eventually(l.t, "the load is under way", func() error {
		if n := l.commits.Load(); n < 30 {
			return fmt.Errorf("%d commits", n)
		}
		return nil
	})
	before := l.rate(time.Second)
	lost, commits, refused := l.lost.Load(), l.commits.Load(), l.refused.Load()
	fault()
	passed := time.Now()
	lost, commits, refused = l.lost.Load()-lost, l.commits.Load()-commits, l.refused.Load()-refused
	// Eight tenths, since windows are short and the machine is shared; how long it took is said, not judged.
	eventually(l.t, "the throughput of before is reached again", func() error {
		if r := l.rate(500 * time.Millisecond); r < 0.8*before {
			return fmt.Errorf("%.0f of %.0f commits/s", r, before)
		}
		return nil
	})
	again := time.Since(passed)
	close(l.stop)
	l.all.Wait()
	l.idle()
	s := l.gate.Stats()
	l.t.Logf("before %.0f commits/s; during the fault %d commits, %d calls failed, %d refused; throughput of before after %v; %d outcomes unknown; %d unproven, %d terminated, %d connections made",
		before, commits, lost, refused, again.Round(10*time.Millisecond), len(l.unknowns), s.DrainsUnproven, s.TerminatedBackends, l.pool.Stat().NewConnsCount())
	l.check()
	if s.DrainsUnproven != 0 {
		l.t.Errorf("%d permits came back without proof", s.DrainsUnproven)
	}
	if lost == 0 && commits == 0 {
		l.t.Error("nothing happened during the fault")
	}
}

// check compares what the server has with what the callers were told.
func (l *load) check() {
	l.t.Helper()
	if n := l.see.Int("select case when is_called then last_value else 0 end from over_limits"); n != 0 || l.over.Load() != 0 {
		l.t.Errorf("I6: %d (server), %d (callers) times more than %d operations were at work", n, l.over.Load(), loadRunning)
	}
	if n := l.see.Int("select count(*) from a full join b using (id) where a.id is null or b.id is null"); n != 0 {
		l.t.Errorf("%d transactions are half applied", n)
	}
	if n := l.see.Int("select count(*) from (select id from a group by id having count(*) > 1) s"); n != 0 {
		l.t.Errorf("%d transactions are applied twice", n)
	}
	rows, err := l.see.Conn.Query(context.Background(), "select id from a")
	must(l.t, err)
	there := make(map[int64]bool)
	for rows.Next() {
		var id int64
		must(l.t, rows.Scan(&id))
		there[id] = true
	}
	must(l.t, rows.Err())
	if len(there) == 0 {
		l.t.Error("nothing was committed")
	}
	for id, o := range l.outcomes {
		if o == committed && !there[id] || o == rolledBack && there[id] {
			l.t.Errorf("transaction %d: the caller was told %v, in the table: %t", id, o, there[id])
		}
	}
	for id, lost := range l.unknowns {
		got, err := pgxgated.ResolveOutcome(context.Background(), l.DB, lost)
		if err != nil || got == pgxgated.OutcomeUnknown || (got == pgxgated.OutcomeCommitted) != there[id] {
			l.t.Errorf("transaction %d: resolved as %v (%v), in the table: %t; it was %v", id, got, err, there[id], lost)
		}
	}
	for id := range there {
		if _, known := l.outcomes[id]; !known {
			l.t.Errorf("transaction %d is in the table and nobody asked for it", id)
		}
	}
}
