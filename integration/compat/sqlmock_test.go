package compat

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/pgxgated/pgxgated"
)

const libMock = "go-sqlmock, below"

// accounts is a user's repository.
type accounts struct{ db *sql.DB }

func (a accounts) transfer(ctx context.Context, from, to, amount int) error {
	tx, err := a.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = balance - $1 WHERE id = $2", amount, from); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = balance + $1 WHERE id = $2", amount, to); err != nil {
		return err
	}
	return tx.Commit()
}

func (a accounts) balance(ctx context.Context, id int) (n int, err error) {
	err = a.db.QueryRowContext(ctx, "SELECT balance FROM accounts WHERE id = $1", id).Scan(&n)
	return n, err
}

var mockLimits = pgxgated.WithLimits(pgxgated.Limits{Running: 1})

// mocks are a mock as it is, and one gated by the line that changes in a user's test.
func mocks(limits pgxgated.Option) map[string]func() (*sql.DB, sqlmock.Sqlmock, error) {
	return map[string]func() (*sql.DB, sqlmock.Sqlmock, error){
		"plain": func() (*sql.DB, sqlmock.Sqlmock, error) { return sqlmock.New() },
		"gated": func() (*sql.DB, sqlmock.Sqlmock, error) {
			db, mock, err := sqlmock.New()
			if err != nil {
				return nil, nil, err
			}
			db, err = pgxgated.OpenDB(db, limits, pgxgated.WithOwnPool())
			return db, mock, err
		},
	}
}

// The same test of the same repository, on the mock as it is and gated.
func TestMockRepositoryPortedByOneLine(t *testing.T) {
	works(t, libMock, "a repository's test", "one line more: `db, err = pgxgated.OpenDB(db, pgxgated.WithLimits(…), pgxgated.WithOwnPool())`")
	for name, newMock := range mocks(mockLimits) {
		t.Run(name, func(t *testing.T) {
			db, mock, err := newMock()
			if err != nil {
				t.Fatal(err)
			}
			mock.ExpectBegin()
			mock.ExpectExec("UPDATE accounts SET balance = balance -").WithArgs(5, 1).WillReturnResult(sqlmock.NewResult(0, 1))
			mock.ExpectExec("UPDATE accounts SET balance = balance \\+").WithArgs(5, 2).WillReturnResult(sqlmock.NewResult(0, 1))
			mock.ExpectCommit()
			mock.ExpectQuery("SELECT balance").WithArgs(2).WillReturnRows(sqlmock.NewRows([]string{"balance"}).AddRow(15))
			mock.ExpectBegin()
			mock.ExpectExec("UPDATE").WillReturnError(errors.New("no money"))
			mock.ExpectRollback()
			mock.ExpectClose()

			a := accounts{db}
			if err := a.transfer(t.Context(), 1, 2, 5); err != nil {
				t.Error(err)
			}
			if n, err := a.balance(t.Context(), 2); err != nil || n != 15 {
				t.Error(n, err)
			}
			if err := a.transfer(t.Context(), 1, 2, 5000); err == nil || err.Error() != "no money" {
				t.Error(err)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			if err := mock.ExpectationsWereMet(); err != nil {
				t.Error(err)
			}
		})
	}
}

// openMock gates a mock and checks at the end that nothing is left.
func openMock(t *testing.T, monitorPings bool) (*sql.DB, sqlmock.Sqlmock, *pgxgated.Gate) {
	t.Helper()
	inner, mock, err := sqlmock.New(sqlmock.MonitorPingsOption(monitorPings))
	if err != nil {
		t.Fatal(err)
	}
	db, err := pgxgated.OpenDB(inner, mockLimits, pgxgated.WithOwnPool())
	if err != nil {
		t.Fatal(err)
	}
	g := pgxgated.GateOf(db)
	if g == nil {
		t.Fatal("GateOf is nil")
	}
	t.Cleanup(func() {
		idle(t, g)
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
		mock.ExpectClose()
		db.Close()
	})
	return db, mock, g
}

// F02: no DSN, no registration; mocks in parallel do not meet.
func TestF02MocksInParallel(t *testing.T) {
	cell(t, libMock, colGateOf)
	for _, name := range []string{"a", "b"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, mock, _ := openMock(t, false)
			for range 100 {
				mock.ExpectQuery("SELECT").WillReturnRows(sqlmock.NewRows([]string{"name"}).AddRow(name))
				var got string
				if err := db.QueryRow("SELECT name").Scan(&got); err != nil || got != name {
					t.Fatal(got, err)
				}
			}
		})
	}
}

// F02: a mock that is opened by its DSN is gated as well.
func TestF02MockByDSN(t *testing.T) {
	inner, mock, err := sqlmock.NewWithDSN("compat-F02")
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	byDSN, err := sql.Open("sqlmock", "compat-F02")
	if err != nil {
		t.Fatal(err)
	}
	defer byDSN.Close()
	db, err := pgxgated.OpenDB(byDSN, mockLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	mock.ExpectExec("DELETE").WillReturnResult(sqlmock.NewResult(0, 3))
	if r, err := db.Exec("DELETE FROM x"); err != nil {
		t.Error(err)
	} else if n, err := r.RowsAffected(); err != nil || n != 3 {
		t.Error(n, err)
	}
	if err := mock.ExpectationsWereMet(); err != nil {
		t.Error(err)
	}
	mock.ExpectClose()
}

// F02: what needs a pgx connection says that there is none.
func TestF02MockHasNoPgxConn(t *testing.T) {
	db, _, g := openMock(t, false)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = conn.Raw(func(dc any) error {
		_, err := pgxgated.PgxConn(t.Context(), dc)
		return err
	})
	if cerr := conn.Close(); cerr != nil {
		t.Error(cerr)
	}
	idle(t, g)
	worksNot(t, libMock, "`PgxConn`", "a mock has no pgx connection", err)
}

// F03: one ping of the mock for each of the user's, none besides; GORM's at open is one of those.
func TestF03MockPings(t *testing.T) {
	works(t, libMock, "MonitorPings, `ExpectPing`", "one each")
	db, mock, g := openMock(t, true)
	mock.ExpectPing()
	if err := db.Ping(); err != nil {
		t.Error(err)
	}
	fails := errors.New("down")
	mock.ExpectPing().WillReturnError(fails)
	if err := db.Ping(); err != fails {
		t.Error(err)
	}
	mock.ExpectPing()
	orm, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{})
	if err != nil {
		t.Fatal(err)
	}
	mock.ExpectBegin()
	mock.ExpectQuery(`INSERT INTO "gorm_items"`).WithArgs("a").WillReturnRows(sqlmock.NewRows([]string{"id"}).AddRow(7))
	mock.ExpectCommit()
	it := gormItem{Name: "a"}
	if err := orm.Create(&it).Error; err != nil || it.ID != 7 {
		t.Error(it.ID, err)
	}
	if n := g.Stats().Acquired; n != 1 {
		t.Errorf("%d permits", n)
	}
}

// F03: the mock is closed once, by whoever owns it, and its error arrives.
func TestF03MockClose(t *testing.T) {
	cell(t, libMock, colClose)
	fails := errors.New("close fails")
	for _, own := range []bool{true, false} {
		inner, mock, err := sqlmock.New()
		if err != nil {
			t.Fatal(err)
		}
		opts := []pgxgated.Option{mockLimits}
		if own {
			opts = append(opts, pgxgated.WithOwnPool())
		}
		db, err := pgxgated.OpenDB(inner, opts...)
		if err != nil {
			t.Fatal(err)
		}
		mock.ExpectQuery("SELECT").WillReturnRows(sqlmock.NewRows([]string{"n"}).AddRow(1))
		mock.ExpectClose().WillReturnError(fails)
		if err := db.QueryRow("SELECT 1").Scan(new(int)); err != nil {
			t.Error(err)
		}
		err = db.Close()
		if !own {
			if err != nil {
				t.Error(err)
			}
			if mock.ExpectationsWereMet() == nil {
				t.Error("the mock was closed by who does not own it")
			}
			err = inner.Close()
		}
		if !errors.Is(err, fails) {
			t.Errorf("own pool %v: %v", own, err)
		}
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
	}
}

// F04: exactly the calls that the user made reach the mock, in their order; a refusal reaches it with none.
func TestF04MockSeesNoTrafficOfTheGate(t *testing.T) {
	cell(t, libMock, colPermits)
	cell(t, libMock, colRefusal)
	db, mock, g := openMock(t, false)
	a := accounts{db}
	ctx := t.Context()

	p, err := g.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.transfer(ctx, 1, 2, 5); !errors.Is(err, pgxgated.ErrRejected) {
		t.Error(err)
	}
	if _, err := a.balance(ctx, 1); !errors.Is(err, pgxgated.ErrRejected) {
		t.Error(err)
	}
	p.Release()

	fails := errors.New("fails")
	before := g.Stats().Acquired
	mock.ExpectBegin().WillReturnError(fails)
	if _, err := db.BeginTx(ctx, nil); err != fails {
		t.Error(err)
	}
	idle(t, g)
	mock.ExpectBegin()
	mock.ExpectRollback().WillReturnError(fails)
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != fails {
		t.Error(err)
	}
	idle(t, g)
	mock.ExpectBegin()
	mock.ExpectCommit().WillReturnError(fails)
	if tx, err = db.BeginTx(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != fails {
		t.Error(err)
	}
	if n := g.Stats().Acquired - before; n != 3 {
		t.Errorf("%d permits for three transactions", n)
	}
}

// A wait in the mock ends with the caller's context, and nothing is left.
func TestMockCancel(t *testing.T) {
	cell(t, libMock, colCancel)
	db, mock, g := openMock(t, false)
	mock.ExpectQuery("SELECT").WillDelayFor(time.Hour).WillReturnRows(sqlmock.NewRows([]string{"n"}))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		await(t, "the query runs", func() bool { return g.Stats().Running == 1 })
		cancel()
	}()
	if _, err := db.QueryContext(ctx, "SELECT 1"); !errors.Is(err, sqlmock.ErrCancelled) && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	idle(t, g)
	mock.ExpectExec("DELETE").WillReturnResult(sqlmock.NewResult(0, 0))
	if _, err := db.Exec("DELETE FROM x"); err != nil {
		t.Error(err)
	}
}

// F05: a statement is prepared once where the mock expects it once, and closed once.
func TestF05MockPrepare(t *testing.T) {
	works(t, libMock, "`ExpectPrepare`, `WillBeClosed`", "")
	rows := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"n"}).AddRow(1) }
	t.Run("in turn", func(t *testing.T) {
		db, mock, _ := openMock(t, false)
		prepared := mock.ExpectPrepare("SELECT n").WillBeClosed()
		st, err := db.Prepare("SELECT n WHERE x = $1")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			prepared.ExpectQuery().WithArgs(i).WillReturnRows(rows())
			if err := st.QueryRow(i).Scan(new(int)); err != nil {
				t.Fatal(i, err)
			}
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	// With its rows open the connection is busy, so database/sql prepares on another one, gated or not.
	for name, newMock := range mocks(pgxgated.WithLimits(pgxgated.Limits{Running: 2})) {
		t.Run(name, func(t *testing.T) {
			db, mock, err := newMock()
			if err != nil {
				t.Fatal(err)
			}
			prepared := mock.ExpectPrepare("SELECT n")
			st, err := db.Prepare("SELECT n")
			if err != nil {
				t.Fatal(err)
			}
			prepared.ExpectQuery().WillReturnRows(rows())
			open, err := st.Query()
			if err != nil {
				t.Fatal(err)
			}
			again := mock.ExpectPrepare("SELECT n")
			again.ExpectQuery().WillReturnRows(rows())
			if err := st.QueryRow().Scan(new(int)); err != nil {
				t.Error(err)
			}
			open.Close()
			st.Close()
			if err := mock.ExpectationsWereMet(); err != nil {
				t.Error(err)
			}
			mock.ExpectClose()
			db.Close()
		})
	}
}
