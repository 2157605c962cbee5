package contract

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxgated/pgxgated"
)

const commitAndRollback = "Commit and rollback"

var transactions = []condition{
	{1, commitAndRollback, "", "What was committed is there, and its permit is back when Commit has returned", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		tx := g.begin()
		e.exec(tx, "insert into t values (1)")
		g.runs(1)
		e.must(tx.Commit())
		g.runs(0)
		if n := e.see.Int("select count(*) from t"); n != 1 {
			e.Errorf("%d rows, want 1", n)
		}
	}},
	{2, commitAndRollback, "", "What was rolled back is not there, and its permit is back when Rollback has returned", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		tx := g.begin()
		e.exec(tx, "insert into t values (1)")
		e.must(tx.Rollback())
		g.runs(0)
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows, want 0", n)
		}
	}},
	{3, commitAndRollback, "", "Commit or Rollback of an ended transaction is sql.ErrTxDone and gives nothing back a second time", func(e *env) {
		g := e.open(1, 2)
		tx := g.begin()
		e.must(tx.Commit())
		other := g.begin()
		e.is(tx.Commit(), sql.ErrTxDone)
		e.is(tx.Rollback(), sql.ErrTxDone)
		g.runs(1)
		e.must(other.Rollback())
		g.whole(1)
	}},
	{4, commitAndRollback, "A03", "After 1,000 transactions that end in every way, over logical connections that are never kept, exactly the limit runs", func(e *env) {
		g := e.open(3, 4)
		g.SetMaxIdleConns(0)
		for i := range 1000 {
			ctx, cancel := context.WithCancel(e.Context())
			tx, err := g.BeginTx(ctx, nil)
			e.must(err)
			switch i % 5 {
			case 0:
				e.must(tx.Commit())
			case 1:
				e.must(tx.Rollback())
			case 2:
				e.must(tx.Commit())
				e.is(tx.Rollback(), sql.ErrTxDone)
			case 3:
				cancel()
				if err := tx.Rollback(); err != nil { // nil where it came before database/sql's own
					e.ended(err)
				}
			case 4:
				_, err := tx.Exec("select 1/0")
				e.bare(err, "22012")
				e.must(tx.Rollback())
			}
			cancel()
		}
		g.whole(3)
	}},
	{5, commitAndRollback, "E03", "Commit of an aborted transaction is pgx.ErrTxCommitRollback, not an unknown outcome, and costs no connection", func(e *env) {
		g := e.open(1, 1)
		tx := g.begin()
		pid := e.pid(tx)
		_, err := tx.Exec("select 1/0")
		e.bare(err, "22012")
		err = tx.Commit()
		e.is(err, pgx.ErrTxCommitRollback)
		if errors.Is(err, pgxgated.ErrOutcomeUnknown) {
			e.Error("the outcome is known")
		}
		if again := e.pid(g); again != pid {
			e.Error("the connection was not kept")
		}
	}},
	{6, commitAndRollback, "", "An error of the server in a transaction arrives as it is; rolled back, its connection is used again", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int primary key)")
		tx := g.begin()
		pid := e.pid(tx)
		e.exec(tx, "insert into t values (1)")
		_, err := tx.Exec("insert into t values (1)")
		e.bare(err, "23505")
		_, err = tx.Exec("select 1")
		e.bare(err, "25P02")
		e.must(tx.Rollback())
		if e.pid(g) != pid {
			e.Error("the connection was not kept")
		}
	}},
	{7, commitAndRollback, "C08", "Savepoints need no permit of their own", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		tx := g.begin()
		for _, q := range []string{"insert into t values (1)", "savepoint a", "insert into t values (2)", "savepoint b", "insert into t values (3)", "rollback to savepoint a"} {
			e.exec(tx, q)
			g.runs(1)
		}
		e.must(tx.Commit())
		if n := e.see.Int("select sum(id) from t"); n != 1 {
			e.Errorf("sum %d, want 1", n)
		}
	}},
	{8, commitAndRollback, "C09", "A write in a read-only transaction is the server's 25006", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		tx, err := g.BeginTx(e.Context(), &sql.TxOptions{ReadOnly: true})
		e.must(err)
		_, err = tx.Exec("insert into t values (1)")
		e.bare(err, "25006")
		e.must(tx.Rollback())
	}},
	{9, commitAndRollback, "C09", "An isolation level that PostgreSQL lacks is refused before anything is taken", func(e *env) {
		g := e.open(1, 1)
		_, err := g.BeginTx(e.Context(), &sql.TxOptions{Isolation: sql.LevelLinearizable})
		if err == nil || !strings.Contains(err.Error(), "isolation") {
			e.Errorf("error %v", err)
		}
		if s := g.gate.Stats(); s.Acquired != 0 || g.pool.Stat().NewConnsCount() != 0 {
			e.Errorf("%d permits and %d connections were taken", s.Acquired, g.pool.Stat().NewConnsCount())
		}
	}},
	{10, commitAndRollback, "", "InTx commits, and its value reaches the caller after the permit is back", func(e *env) {
		g := e.open(1, 1)
		n, err := pgxgated.InTx(e.Context(), g.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			g.runs(1)
			return scan[int](e, tx, "select 7"), nil
		})
		g.runs(0)
		if n != 7 || err != nil {
			e.Errorf("%d, %v", n, err)
		}
	}},
	{11, commitAndRollback, "", "InTx rolls back where its function returns an error, and returns that error", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		mine := errors.New("mine")
		_, err := pgxgated.InTx(e.Context(), g.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
			e.exec(tx, "insert into t values (1)")
			return 0, mine
		})
		if err != mine {
			e.Errorf("error %v", err)
		}
		g.runs(0)
		if n := e.see.Int("select count(*) from t"); n != 0 {
			e.Errorf("%d rows", n)
		}
	}},
}

const callerPanics = "Callers that panic"

// panics are about code that does not return, the caller's and an interceptor's.
var callersThatPanic = []condition{
	{12, callerPanics, "", "A panic between BeginTx and a deferred Rollback gives everything back and goes on", func(e *env) {
		g := e.open(1, 1)
		caught := func() (v any) {
			defer func() { v = recover() }()
			tx := g.begin()
			defer tx.Rollback()
			e.exec(tx, "select 1")
			panic("mine")
		}()
		if caught != "mine" {
			e.Errorf("panic %v", caught)
		}
		g.runs(0)
		g.whole(1)
	}},
	{13, callerPanics, "", "runtime.Goexit, as of t.FailNow, with a deferred Rollback gives everything back", func(e *env) {
		g := e.open(1, 1)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			tx, err := g.BeginTx(context.Background(), nil)
			if err != nil {
				e.Error(err)
				return
			}
			defer tx.Rollback()
			runtime.Goexit()
		}()
		soon(e, ended)
		g.whole(1)
	}},
	{14, callerPanics, "", "A panic in the function of InTx rolls back and goes on", func(e *env) {
		g := e.open(1, 1)
		e.see.Exec("create table t (id int)")
		caught := func() (v any) {
			defer func() { v = recover() }()
			_, _ = pgxgated.InTx(e.Context(), g.DB, nil, func(ctx context.Context, tx *sql.Tx) (int, error) {
				e.exec(tx, "insert into t values (1)")
				panic("mine")
			})
			return nil
		}()
		if n := e.see.Int("select count(*) from t"); caught != "mine" || n != 0 {
			e.Errorf("panic %v, %d rows", caught, n)
		}
		g.whole(1)
	}},
	{15, callerPanics, "", "A panic inside the function of Raw goes on, costs the connection, and gives the permit back", func(e *env) {
		g := e.open(1, 2)
		c := g.conn()
		pid := e.pid(c)
		caught := func() (v any) {
			defer func() { v = recover() }()
			_ = c.Raw(func(dc any) error {
				if _, err := pgxgated.PgxConn(e.Context(), dc); err != nil {
					e.Error(err)
				}
				panic("mine")
			})
			return nil
		}()
		_ = c.Close() // sql.ErrConnDone: database/sql has dropped it
		if caught != "mine" {
			e.Errorf("panic %v", caught)
		}
		g.whole(1)
		if e.pid(g) == pid {
			e.Error("the connection was used again")
		}
	}},
}

const endurance = "Endurance"

// together are about many operations, databases and gates at a time.
var mixedFailures = condition{16, endurance, "", "After 10,000 mixed failures every permit and every connection is back", func(e *env) {
	g := e.openWith(setup{b: 4, p: 6, waiting: 8, maxWait: 20 * time.Millisecond, opts: []pgxgated.Option{
		pgxgated.WithDeadlineAdmission(true), pgxgated.WithPoolWait(time.Second), pgxgated.WithLogger((&logs{}).logger()),
	}})
	e.see.Exec("create table t (id int primary key); insert into t values (1)")
	const callers, rounds = 16, 625
	var fails [callers]int
	ends := make(chan struct{}, callers)
	for c := range callers {
		go func() {
			defer func() { ends <- struct{}{} }()
			for range rounds {
				if err := mixedFailure(g); err != nil {
					fails[c]++
					e.public(err)
				}
			}
		}()
	}
	for range callers {
		<-ends
	}
	total := 0
	for _, n := range fails {
		total += n
	}
	s := g.gate.Stats()
	e.Logf("%d of %d failed; %+v", total, callers*rounds, s)
	if total < callers*rounds*9/10 {
		e.Errorf("only %d of %d failed", total, callers*rounds)
	}
	if sum := s.Acquired + s.AdmissionFull + s.WaitTimeout + s.DeadlineShort + s.Canceled + s.Closed; sum < callers*rounds/2 {
		e.Errorf("the counters add up to %d", sum)
	}
	g.whole(4)
	if n := g.gate.Stats().DrainsUnproven; n != 0 {
		e.Errorf("%d permits came back without proof", n)
	}
}}

// mixedFailure does something that fails.
func mixedFailure(g *gated) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	one := func(query string) error {
		_, err := g.ExecContext(ctx, query)
		return err
	}
	switch rand.IntN(10) {
	case 0:
		return one("select 1/0")
	case 1:
		return one("this is no SQL")
	case 2:
		return one("insert into t values (1)")
	case 3:
		ctx, cancel := context.WithTimeout(ctx, time.Duration(rand.Int64N(int64(3*time.Millisecond))))
		defer cancel()
		_, err := g.ExecContext(ctx, "select pg_sleep(0.003)")
		return err
	case 4: // the connection is lost
		if rand.IntN(10) > 0 {
			return one("select 1/0")
		}
		return one("select pg_terminate_backend(pg_backend_pid())")
	case 5:
		tx, err := g.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		_, err = tx.Exec("insert into t values (1)")
		if rand.IntN(2) == 0 {
			_ = tx.Commit()
		} else {
			_ = tx.Rollback()
		}
		return err
	case 6: // a forgotten Rollback
		tx, err := g.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		_, err = tx.Exec("select 1/0")
		return err
	case 7: // rows that fail on the way
		rows, err := g.QueryContext(ctx, "select 1/(3-i) from generate_series(1, 5) i")
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
		}
		return rows.Err()
	case 8:
		cancel()
		_, err := g.BeginTx(ctx, nil)
		return err
	default:
		var n int
		return g.QueryRowContext(ctx, "select 'x'").Scan(&n)
	}
}
