package admission

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

var tracking = pgxgated.WithOutcomeTracking()

// outcomeSchema has a table whose rows are checked at COMMIT, as a deferred constraint is.
const outcomeSchema = `
create table orders (id int primary key, what text);
create function at_commit() returns trigger language plpgsql as $$
begin
	case new.what
	when 'terminated' then
		perform pg_sleep(0.01);
		perform pg_terminate_backend(pg_backend_pid());
		perform pg_sleep(60); -- the signal comes when it comes
	when 'refused' then
		raise exception 'not like this' using errcode = '23514';
	when 'waits' then
		loop
			begin
				perform pg_advisory_xact_lock_shared(1);
				exit;
			exception when query_canceled then -- goes on, however often it is cancelled
			end;
		end loop;
	else
	end case;
	return null;
end $$;
create constraint trigger checked after insert on orders initially deferred for each row execute function at_commit();`

// outcomeRig is a tracked database behind a proxy.
type outcomeRig struct {
	*rig
	p   *proxy
	see *truth
	dsn string
}

func newOutcomeRig(t *testing.T, opts ...pgxgated.Option) *outcomeRig {
	t.Helper()
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec(outcomeSchema)
	p := newProxy(t, dsn)
	return &outcomeRig{rig: one(t, p.through(dsn), opts...), p: p, see: see, dsn: dsn}
}

func (r *outcomeRig) rows() int {
	r.t.Helper()
	return r.see.Int("select count(*) from orders")
}

// order inserts a row in a transaction and fails the test unless it ends with an unknown outcome.
func (r *outcomeRig) order(ctx context.Context, what string) error {
	r.t.Helper()
	got, err := pgxgated.InTx(ctx, r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, err := tx.ExecContext(ctx, "insert into orders values (1, $1)", what)
		return 7, err
	})
	r.unknown(err)
	if got != 0 {
		r.t.Errorf("value %d beside an unknown outcome", got)
	}
	return err
}

func (r *outcomeRig) unknown(err error) {
	r.t.Helper()
	if !errors.Is(err, pgxgated.ErrOutcomeUnknown) || errors.Is(err, context.DeadlineExceeded) {
		r.t.Errorf("error %v, want ErrOutcomeUnknown", err)
	}
}

// commits fails the test unless the server was sent COMMIT that often.
func (r *outcomeRig) commits(want int) {
	r.t.Helper()
	if n := r.p.count("commit"); n != want {
		r.t.Errorf("COMMIT was sent %d times, want %d", n, want)
	}
}

// resolves fails the test unless the outcome is known to be this one.
func (r *outcomeRig) resolves(err error, want pgxgated.Outcome) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), bound)
	defer cancel()
	o, err := pgxgated.ResolveOutcome(ctx, r.DB, err)
	if o != want || err != nil {
		r.t.Errorf("outcome %q, %v, want %q", o, err, want)
	}
	if want, committed := want == pgxgated.OutcomeCommitted, r.rows() > 0; want != committed {
		r.t.Errorf("committed: %v, resolved as %v", committed, want)
	}
}

// unresolved fails the test unless the outcome is said to be unknown, for a reason that has text in it.
func (r *outcomeRig) unresolved(ctx context.Context, err error, text string) error {
	r.t.Helper()
	o, why := pgxgated.ResolveOutcome(ctx, r.DB, err)
	if o != pgxgated.OutcomeUnknown || why == nil || !strings.Contains(why.Error(), text) {
		r.t.Errorf("outcome %q, %v, want unknown: %s", o, why, text)
	}
	return why
}

func TestOutcomeConnectionCutBeforeTheServerCommitted(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutBefore)
	err := r.order(t.Context(), "")
	r.commits(1)
	r.resolves(err, pgxgated.OutcomeRolledBack)
	r.commits(1)
}

func TestOutcomeConnectionCutAfterTheServerCommitted(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	err := r.order(t.Context(), "")
	r.commits(1)
	r.resolves(err, pgxgated.OutcomeCommitted)
	r.commits(1)
}

// The question needs no permit: it can be asked while the gate is full.
func TestOutcomeIsAskedPastTheGate(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	err := r.order(t.Context(), "")
	p, held := r.gate.Acquire(t.Context())
	must(t, held)
	defer p.Release()
	r.resolves(err, pgxgated.OutcomeCommitted)
}

// A session that is terminated in COMMIT says so, which is no word about the COMMIT.
func TestOutcomeSessionTerminatedInCommit(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	err := r.order(t.Context(), "terminated")
	r.commits(1)
	r.resolves(err, pgxgated.OutcomeRolledBack)
}

func TestOutcomeNoAnswerWithinCommitTimeout(t *testing.T) {
	r := newOutcomeRig(t, tracking, pgxgated.WithCommitTimeout(50*time.Millisecond))
	r.p.next(swallow)
	err := r.order(deadlineIn(0), "")
	if !strings.Contains(err.Error(), "no answer within 50ms") {
		t.Errorf("%v does not say what it waited for", err)
	}
	r.commits(1)
	r.resolves(err, pgxgated.OutcomeCommitted)
}

// The server is still at it, whoever asks waits until his context is done, and may ask again.
func TestOutcomeStillInProgress(t *testing.T) {
	r := newOutcomeRig(t, tracking, pgxgated.WithDrainGrace(time.Minute)) // let it work on
	r.see.Exec("select pg_advisory_lock(1)")
	ended := make(chan error, 1)
	go func() { ended <- r.order(t.Context(), "waits") }()
	r.see.becomes("COMMIT waits", 1, "select count(*) from pg_locks where locktype = 'advisory' and not granted")
	r.p.breakAll() // which the server does not notice while it is at work
	err := <-ended
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if why := r.unresolved(ctx, err, "in progress"); !errors.Is(why, context.DeadlineExceeded) {
		t.Errorf("%v does not match the context's error", why)
	}
	if n := r.p.count("select pg_catalog.pg_xact_status"); n == 0 {
		t.Error("was not asked through this proxy: the test is wrong")
	}
	if r.rows() != 0 {
		t.Error("committed already: the test is wrong")
	}
	r.see.Exec("select pg_advisory_unlock(1)")
	r.resolves(err, pgxgated.OutcomeCommitted)
	r.commits(1)
}

func TestOutcomeUntracked(t *testing.T) {
	r := newOutcomeRig(t)
	r.p.next(cutAfter)
	err := r.order(t.Context(), "")
	r.unresolved(t.Context(), err, "WithOutcomeTracking")
	r.commits(1)
	if n := r.p.count("select pg_catalog.pg_"); n != r.p.count("select pg_catalog.pg_backend_pid") {
		t.Errorf("untracked, the server was asked: %q", r.p.sent)
	}
}

func TestOutcomeOfAReadOnlyTransactionIsNotTracked(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	_, err := pgxgated.InTx(t.Context(), r.DB, &sql.TxOptions{ReadOnly: true}, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, err := tx.ExecContext(ctx, "select 1")
		return 0, err
	})
	r.unknown(err)
	r.unresolved(t.Context(), err, "not tracked")
	r.commits(1)
	if n := r.p.count("select pg_catalog.pg_current_xact_id"); n != 0 {
		t.Errorf("its id was asked for %d times", n)
	}
}

func TestOutcomeOfATransactionThatChangedNothing(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, err := tx.ExecContext(ctx, "select 1")
		return 0, err
	})
	r.unknown(err)
	r.resolves(err, pgxgated.OutcomeNoChange)
}

// What only a savepoint changed counts as well.
func TestOutcomeOfAChangeInASavepoint(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
		for _, q := range []string{"savepoint a", "insert into orders values (1, '')", "release savepoint a"} {
			if _, err := tx.ExecContext(ctx, q); err != nil {
				return 0, err
			}
		}
		return 0, nil
	})
	r.unknown(err)
	r.resolves(err, pgxgated.OutcomeCommitted)
}

// The server keeps what became of a transaction only until the rows of that time are frozen in all of its databases. It
// forgets by millions of transactions, or when it starts.
func TestOutcomeForgottenByTheServer(t *testing.T) {
	leakFree(t)
	server := pgtest.New(t)
	dsn := server.Database(t)
	see := newTruth(t, dsn)
	see.Exec(outcomeSchema)
	p := newProxy(t, dsn)
	r := &outcomeRig{rig: one(t, p.through(dsn), tracking), p: p, see: see, dsn: dsn}
	p.next(cutAfter)
	err := r.order(t.Context(), "")
	r.resolves(err, pgxgated.OutcomeCommitted)
	see.Exec("update pg_database set datallowconn = true where datname = 'template0'")
	for _, name := range []string{"template0", "template1", "postgres", ""} {
		at := dsn
		if name != "" {
			u, err := url.Parse(dsn)
			must(t, err)
			u.Path = "/" + name
			at = u.String()
		}
		newTruth(t, at).Exec("vacuum (freeze)")
	}
	must(t, server.Restart(t.Context()))
	r.unresolved(t.Context(), err, "forgotten")
}

func TestOutcomeQuestionFails(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.next(cutAfter)
	err := r.order(t.Context(), "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if why := r.unresolved(ctx, err, "asking for the outcome"); !errors.Is(why, context.Canceled) {
		t.Errorf("%v hides why", why)
	}
	r.resolves(err, pgxgated.OutcomeCommitted) // it may be asked again
}

// Where the server has answered, the outcome is known, and its answer arrives as it is (I9).
func TestOutcomeKnownFromTheServersAnswer(t *testing.T) {
	for name, opts := range map[string][]pgxgated.Option{"untracked": nil, "tracked": {tracking}} {
		t.Run(name+"/an ERROR in COMMIT", func(t *testing.T) {
			r := newOutcomeRig(t, opts...)
			_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
				_, err := tx.ExecContext(ctx, "insert into orders values (1, 'refused')")
				return 0, err
			})
			bare(t, err, "23514")
			r.resolves(err, pgxgated.OutcomeRolledBack)
			r.commits(1)
		})
		t.Run(name+"/COMMIT of an aborted transaction", func(t *testing.T) {
			r := newOutcomeRig(t, opts...)
			tx, err := r.BeginTx(t.Context(), nil)
			must(t, err)
			_, err = tx.Exec("insert into orders values (1, '')")
			must(t, err)
			if _, err := tx.Exec("select 1/0"); err == nil {
				t.Fatal("divided by zero")
			}
			err = tx.Commit()
			if !errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, pgxgated.ErrOutcomeUnknown) {
				t.Errorf("error %v, want pgx.ErrTxCommitRollback", err)
			}
			r.resolves(err, pgxgated.OutcomeRolledBack)
			r.commits(1)
			if n := r.p.count("select pg_catalog.pg_current_xact_id"); n != 0 {
				t.Errorf("an aborted transaction was asked for its id %d times", n)
			}
		})
		t.Run(name+"/a session that idled too long in its transaction", func(t *testing.T) {
			r := newOutcomeRig(t, opts...)
			tx, err := r.BeginTx(t.Context(), nil)
			must(t, err)
			pid := pidOf(t, tx)
			_, err = tx.Exec("insert into orders values (1, '')")
			must(t, err)
			_, err = tx.Exec("set local idle_in_transaction_session_timeout = '1ms'")
			must(t, err)
			r.see.becomes("the session is gone", 0, "select count(*) from pg_stat_activity where pid = $1", pid)
			err = tx.Commit()
			bare(t, err, "25P03")
			r.resolves(err, pgxgated.OutcomeRolledBack)
		})
	}
}

// The question for the id may fail. Then COMMIT was not sent, the transaction is rolled back, and the error is the server's.
func TestOutcomeTrackingFails(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	see := newTruth(t, dsn)
	see.Exec(outcomeSchema)
	role := appRole(t, see)
	see.Exec("revoke execute on function pg_current_xact_id_if_assigned() from public")
	see.Exec("grant all on orders to " + role)
	p := newProxy(t, dsn)
	r := &outcomeRig{rig: one(t, as(p.through(dsn), role), tracking), p: p, see: see, dsn: dsn}
	_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, err := tx.ExecContext(ctx, "insert into orders values (1, '')")
		return 7, err
	})
	bare(t, err, "42501")
	r.commits(0)
	r.resolves(err, pgxgated.OutcomeRolledBack)
}

// A connection that breaks before COMMIT was sent leaves nothing unknown.
func TestOutcomeConnectionCutInTracking(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.p.nextOn("select pg_catalog.pg_current_xact_id", cutBefore)
	_, err := pgxgated.InTx(t.Context(), r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
		_, err := tx.ExecContext(ctx, "insert into orders values (1, '')")
		return 7, err
	})
	if err == nil || errors.Is(err, pgxgated.ErrOutcomeUnknown) {
		t.Errorf("error %v, want one that is no ErrOutcomeUnknown", err)
	}
	r.commits(0)
	r.resolves(err, pgxgated.OutcomeRolledBack)
}

// COMMIT is not interrupted by the caller's cancellation: a late answer is better than an unknown outcome.
func TestOutcomeOfACommitWhoseCallerIsGone(t *testing.T) {
	r := newOutcomeRig(t, tracking)
	r.see.Exec("select pg_advisory_lock(1)")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := pgxgated.InTx(ctx, r.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			_, err := tx.ExecContext(ctx, "insert into orders values (1, 'waits')")
			return 0, err
		})
		ended <- err
	}()
	r.see.becomes("COMMIT waits", 1, "select count(*) from pg_locks where locktype = 'advisory' and not granted")
	cancel()
	r.see.Exec("select pg_advisory_unlock(1)")
	if err := <-ended; err != nil || r.rows() != 1 {
		t.Errorf("%v, %d rows", err, r.rows())
	}
}

// appRole makes a role without privileges that may log in, named after its database so that servers can be shared.
func appRole(t *testing.T, see *truth) string {
	t.Helper()
	role := "app_" + see.Conn.Config().Database
	see.Exec("create role " + role + " login password 'secret'")
	t.Cleanup(func() {
		see.Exec("drop owned by " + role)
		see.Exec("drop role " + role)
	})
	return role
}

// as is dsn for that role.
func as(dsn, role string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	u.User = url.UserPassword(role, "secret")
	return u.String()
}
