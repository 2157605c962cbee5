package admission

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

var handedOn = pgxgated.WithServerDeadline(true)

// hasTransactionTimeout tells whether the server knows that setting (PostgreSQL 17).
func hasTransactionTimeout(t *testing.T) bool { return pgtest.Shared(t).Version() >= 17 }

// millis is a setting in milliseconds; absent settings are -1.
const millis = "coalesce((select setting::int from pg_settings where name = '%s'), -1)"

type timeouts struct{ statement, transaction int }

func timeoutsOf(t *testing.T, q queryer) (s timeouts) {
	t.Helper()
	must(t, q.QueryRowContext(context.Background(),
		fmt.Sprintf("select "+millis+", "+millis, "statement_timeout", "transaction_timeout")).Scan(&s.statement, &s.transaction))
	return s
}

// TestServerDeadlineOnlyTightens: whatever the database or the role has set, in whatever unit, the transaction has the shorter
// of that and of what remains, and the session has its own again afterwards.
func TestServerDeadlineOnlyTightens(t *testing.T) {
	const remaining = 10 * time.Minute
	for _, c := range []struct {
		set     string
		ms      int
		tighter bool // what remains is
	}{
		{"", 0, true}, {"0", 0, true}, {"7000ms", 7000, false}, {"30s", 30_000, false}, {"9min", 540_000, false},
		{"11min", 660_000, true}, {"2h", 7_200_000, true}, {"1d", 86_400_000, true}, {"123456", 123_456, false},
	} {
		for _, who := range []string{"database", "role"} {
			if c.set == "" && who == "role" {
				continue
			}
			t.Run(fmt.Sprintf("%s %q", who, c.set), func(t *testing.T) {
				dsn := pgtest.Shared(t).Database(t)
				see := newTruth(t, dsn)
				names := []string{"statement_timeout"}
				if hasTransactionTimeout(t) {
					names = append(names, "transaction_timeout")
				}
				for _, name := range names {
					if c.set == "" {
						continue
					}
					alter := "alter database %I set " + name + " = %L"
					if who == "role" {
						alter = "alter role postgres in database %I set " + name + " = %L"
					}
					see.Exec("do $$ begin execute format('" + alter[:len(alter)-2] + "''" + c.set + "''', current_database()); end $$")
				}
				r := one(t, dsn, handedOn)
				before := timeoutsOf(t, r)
				want := timeouts{c.ms, -1}
				if hasTransactionTimeout(t) {
					want.transaction = c.ms
				}
				if before != want {
					t.Fatalf("the session has %+v, want %+v: the test is wrong", before, want)
				}
				tx, err := r.BeginTx(deadlineIn(remaining), nil)
				must(t, err)
				in := timeoutsOf(t, tx)
				pid := pidOf(t, tx)
				must(t, tx.Commit())
				check := func(name string, got, session int) {
					t.Helper()
					most := int(remaining.Milliseconds())
					switch {
					case session == -1 && got == -1: // not known to this server
					case c.tighter && (got < 1 || got > most || got < most/2):
						t.Errorf("%s is %d ms in the transaction, want what remains of %d", name, got, most)
					case !c.tighter && got != c.ms:
						t.Errorf("%s is %d ms in the transaction, want the session's %d", name, got, c.ms)
					}
				}
				check("statement_timeout", in.statement, want.statement)
				check("transaction_timeout", in.transaction, want.transaction)
				c2, err := r.Conn(t.Context())
				must(t, err)
				defer c2.Close()
				if after := timeoutsOf(t, c2); after != want || pidOf(t, c2) != pid {
					t.Errorf("afterwards the session has %+v, want %+v", after, want)
				}
			})
		}
	}
}

// TestServerDeadlineIsOffByDefault, and costs nothing where there is no deadline.
func TestServerDeadlineOnlyWhereWantedAndThere(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	for name, c := range map[string]struct {
		ctx  context.Context
		opts []pgxgated.Option
	}{
		"off":         {deadlineIn(time.Hour), nil},
		"no deadline": {context.Background(), []pgxgated.Option{handedOn}},
	} {
		t.Run(name, func(t *testing.T) {
			r := one(t, dsn, c.opts...)
			want := timeoutsOf(t, r)
			tx, err := r.BeginTx(c.ctx, nil)
			must(t, err)
			if got := timeoutsOf(t, tx); got != want {
				t.Errorf("%+v in the transaction, want the session's %+v", got, want)
			}
			must(t, tx.Rollback())
		})
	}
}

// A timeout has 31 bits of milliseconds on the server: 24.8 days. A deadline that is further away must not make BEGIN fail.
func TestServerDeadlineFarAway(t *testing.T) {
	r := one(t, pgtest.Shared(t).DSN(), handedOn)
	tx, err := r.BeginTx(deadlineIn(60*24*time.Hour), nil)
	must(t, err)
	_ = timeoutsOf(t, tx)
	must(t, tx.Commit())
}

// TestServerDeadlineTravelsWithBegin in its round trip, whatever way statements are sent, and leaves the transaction's
// options as they were asked for.
func TestServerDeadlineTravelsWithBegin(t *testing.T) {
	dsn := pgtest.Shared(t).DSN()
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		for _, o := range []struct {
			opts      sql.TxOptions
			isolation string
		}{
			{sql.TxOptions{}, "read committed"},
			{sql.TxOptions{Isolation: sql.LevelRepeatableRead}, "repeatable read"},
			{sql.TxOptions{Isolation: sql.LevelSerializable}, "serializable"},
			{sql.TxOptions{ReadOnly: true}, "read committed"},
			{sql.TxOptions{Isolation: sql.LevelSerializable, ReadOnly: true}, "serializable"},
		} {
			t.Run(fmt.Sprintf("%s/%s read only %v", mode, o.isolation, o.opts.ReadOnly), func(t *testing.T) {
				p := newProxy(t, dsn)
				r := one(t, pgtest.With(p.through(dsn), "default_query_exec_mode", mode), handedOn)
				_, err := r.Exec("select 1") // connected, and looked at
				must(t, err)
				p.reset()
				tx, err := r.BeginTx(deadlineIn(time.Hour), &o.opts)
				must(t, err)
				if n := p.roundTrips(); n != 1 {
					t.Errorf("%d round trips for BEGIN, want 1: %q", n, p.sent)
				}
				var isolation string
				var readOnly bool
				must(t, tx.QueryRowContext(t.Context(),
					"select current_setting('transaction_isolation'), current_setting('transaction_read_only')::bool").Scan(&isolation, &readOnly))
				if isolation != o.isolation || readOnly != o.opts.ReadOnly {
					t.Errorf("%s, read only %v; want %s, %v", isolation, readOnly, o.isolation, o.opts.ReadOnly)
				}
				if got := timeoutsOf(t, tx); got.statement < 1 || hasTransactionTimeout(t) && got.transaction < 1 {
					t.Errorf("%+v, want a deadline", got)
				}
				must(t, tx.Commit())
				if n := p.count("begin"); n != 1 {
					t.Errorf("%d BEGINs", n)
				}
			})
		}
	}
}

// TestServerStopsByItselfWhenTheClientFreezes: no packet passes any more, so nobody cancels. The statement ends by itself and
// lets its lock go; from PostgreSQL 17 on the session ends too, also if the client froze between two statements.
func TestServerStopsByItselfWhenTheClientFreezes(t *testing.T) {
	for _, session := range []string{"0", "1h"} { // what the database has set already
		t.Run("in a statement, session "+session, func(t *testing.T) {
			dsn, see := deadlineDatabase(t, session)
			p := newProxy(t, dsn)
			r := one(t, p.through(dsn), handedOn)
			tx, err := r.BeginTx(deadlineIn(time.Second), nil)
			must(t, err)
			pid := pidOf(t, tx)
			failed := make(chan error, 1)
			go func() {
				_, err := tx.Exec("select pg_advisory_xact_lock(7), pg_sleep(1000)")
				failed <- err
			}()
			see.becomes("it holds its lock", 1, "select count(*) from pg_locks where pid = $1 and locktype = 'advisory' and granted", pid)
			p.freeze()
			see.becomes("the statement stops by itself", 0, "select count(*) from pg_stat_activity where pid = $1 and state = 'active'", pid)
			see.becomes("its lock is free", 0, "select count(*) from pg_locks where pid = $1 and locktype = 'advisory'", pid)
			if hasTransactionTimeout(t) {
				see.becomes("the session ends", 0, "select count(*) from pg_stat_activity where pid = $1", pid)
			}
			p.thaw()
			if err := <-failed; err == nil {
				t.Error("the statement succeeded")
			}
			_ = tx.Rollback()
		})
		t.Run("between statements, session "+session, func(t *testing.T) {
			if !hasTransactionTimeout(t) {
				t.Skip("transaction_timeout needs PostgreSQL 17")
			}
			dsn, see := deadlineDatabase(t, session)
			p := newProxy(t, dsn)
			r := one(t, p.through(dsn), handedOn)
			tx, err := r.BeginTx(deadlineIn(time.Second), nil)
			must(t, err)
			pid := pidOf(t, tx)
			p.freeze()
			see.becomes("the session ends", 0, "select count(*) from pg_stat_activity where pid = $1", pid)
			p.thaw()
			if err := tx.Commit(); err == nil {
				t.Error("committed")
			}
		})
	}
}

// deadlineDatabase is a database whose sessions have the timeouts given.
func deadlineDatabase(t *testing.T, session string) (dsn string, see *truth) {
	t.Helper()
	dsn = pgtest.Shared(t).Database(t)
	see = newTruth(t, dsn)
	names := []string{"statement_timeout"}
	if hasTransactionTimeout(t) {
		names = append(names, "transaction_timeout")
	}
	for _, name := range names {
		see.Exec(fmt.Sprintf("do $$ begin execute format('alter database %%I set %s = ''%s''', current_database()); end $$", name, session))
	}
	return dsn, see
}
