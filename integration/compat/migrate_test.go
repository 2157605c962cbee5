package compat

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	migratepq "github.com/golang-migrate/migrate/v4/database/postgres"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const (
	libGoose   = "goose, session lock"
	libMigrate = "golang-migrate, `WithInstance`"
)

//go:embed testdata
var testdata embed.FS

func gooseOn(db *sql.DB, opts ...goose.ProviderOption) (*goose.Provider, error) {
	files, err := fs.Sub(testdata, "testdata/goose")
	if err != nil {
		return nil, err
	}
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 60))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, files, append(opts, goose.WithSessionLocker(locker))...)
}

// Each child of a race prints how many migrations it applied. It has one permit, a pool of two, and nobody may wait.
func init() {
	children["goose"] = func(dsn string) error {
		db, err := sql.Open(pgxgated.DriverName, set(dsn, tight...))
		if err != nil {
			return err
		}
		defer db.Close()
		p, err := gooseOn(db)
		if err != nil {
			return err
		}
		applied, err := p.Up(context.Background())
		fmt.Print(len(applied))
		return errors.Join(err, nothingOut(db))
	}
	children["migrate"] = func(dsn string) error {
		db, err := sql.Open(pgxgated.DriverName, set(dsn, tight...))
		if err != nil {
			return err
		}
		g := pgxgated.GateOf(db)
		m, err := migrateOn(db, "pgx5")
		if err != nil {
			return err
		}
		applied := 2
		err = m.Up()
		if errors.Is(err, migrate.ErrNoChange) {
			applied, err = 0, nil
		}
		fmt.Print(applied)
		serr, derr := m.Close()
		if s := g.Stats(); s.Running != 0 {
			err = errors.Join(err, fmt.Errorf("%d running after Close", s.Running))
		}
		return errors.Join(err, serr, derr)
	}
}

func nothingOut(db *sql.DB) error {
	if s := pgxgated.GateOf(db).Stats(); s.Running != 0 || s.Waiting != 0 {
		return fmt.Errorf("%d running, %d waiting", s.Running, s.Waiting)
	}
	return nil
}

func migrateOn(db *sql.DB, name string) (*migrate.Migrate, error) {
	files, err := iofs.New(testdata, "testdata/migrate")
	if err != nil {
		return nil, err
	}
	var driver database.Driver
	if name == "pgx5" {
		driver, err = migratepgx.WithInstance(db, &migratepgx.Config{MultiStatementEnabled: true})
	} else {
		driver, err = migratepq.WithInstance(db, &migratepq.Config{MultiStatementEnabled: true})
	}
	if err != nil {
		return nil, err
	}
	return migrate.NewWithInstance("iofs", files, name, driver)
}

// D03: two processes race; one migrates, the other waits for its lock and finds nothing to do. Lock, migrations and unlock
// run on one session, under one permit.
func TestD03TwoProcessesMigrate(t *testing.T) {
	for name, lib := range map[string]string{"goose": libGoose, "migrate": libMigrate} {
		t.Run(name, func(t *testing.T) {
			works(t, lib, "two processes race, `gate_running=1`", "one migrates, the other waits for its lock and does nothing")
			dsn := pgtest.Shared(t).Database(t)
			got := race(t, 2, name, dsn)
			slices.Sort(got)
			if !slices.Equal(got, []string{"0", "2"}) {
				t.Errorf("applied %v, want 0 and 2", got)
			}
			if n := ask[int](t, dsn, "select count(*) from races"); n != 1 {
				t.Errorf("%d rows of one migration", n)
			}
			if n := ask[int](t, dsn, "select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())"); n != 0 {
				t.Errorf("%d advisory locks are left", n)
			}
		})
	}
}

func TestGoose(t *testing.T) {
	suite(t, libGoose, func(t *testing.T, dsn string) *client {
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		// A Provider makes its version table once, so one whose first call was refused is of no more use.
		run := func(f func(p *goose.Provider) error) error {
			p, err := gooseOn(db)
			if err != nil {
				return err
			}
			return f(p)
		}
		return &client{db: db, close: db.Close, actions: []action{
			{"Up of two (a look, then one connection)", 2, 2, func(ctx context.Context) error {
				return run(func(p *goose.Provider) error { _, err := p.Up(ctx); return err })
			}},
			{"Status", 1, 0, func(ctx context.Context) error {
				return run(func(p *goose.Provider) error { _, err := p.Status(ctx); return err })
			}},
			{"DownTo 0", 1, 1, func(ctx context.Context) error {
				return run(func(p *goose.Provider) error { _, err := p.DownTo(ctx, 0); return err })
			}},
		}, slow: []action{{name: "Up", run: func(ctx context.Context) error {
			p, err := gooseOn(db, goose.WithGoMigrations(goose.NewGoMigration(4, &goose.GoFunc{RunTx: func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, "select pg_sleep(60)")
				return err
			}}, nil)))
			if err != nil {
				return err
			}
			_, err = p.Up(ctx)
			return err
		}}}}
	})
	t.Run("Go migration on the database", func(t *testing.T) {
		db := must(sql.Open(pgxgated.DriverName, set(pgtest.Shared(t).Database(t), tight...)))(t)
		defer db.Close()
		p := must(gooseOn(db, goose.WithGoMigrations(goose.NewGoMigration(3, &goose.GoFunc{RunDB: func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "select 1")
			return err
		}}, nil))))(t)
		_, err := p.Up(t.Context())
		if !errors.Is(err, pgxgated.ErrRejected) {
			t.Fatalf("%v, want a refusal", err)
		}
		idle(t, pgxgated.GateOf(db))
		worksNot(t, libGoose, "a Go migration with `RunDB`, `gate_running=1`", "the lock's connection holds the only permit; give it two, or use `RunTx`", pgxgatedErr(err))
	})
}

// pgxgatedErr is the refusal in err, without what differs from run to run.
func pgxgatedErr(err error) error {
	var r *pgxgated.RejectedError
	if !errors.As(err, &r) {
		return err
	}
	c := *r
	c.Gate, c.Waited = "…", 0
	return &c
}

func TestGolangMigrate(t *testing.T) {
	for _, name := range []string{"pgx5", "postgres"} {
		t.Run(name, func(t *testing.T) {
			works(t, libMigrate, "with the drivers `pgx/v5` and `postgres`", "it holds one permit from `WithInstance` to `Close`, which closes the database too: give it one of its own")
			cell(t, libMigrate, colGateOf)
			cell(t, libMigrate, colClose)
			cell(t, libMigrate, colPermits)
			dsn := set(pgtest.Shared(t).Database(t), tight...)
			db := must(sql.Open(pgxgated.DriverName, dsn))(t)
			defer db.Close()
			g := pgxgated.GateOf(db)
			if g == nil {
				t.Fatal("GateOf is nil")
			}
			m := must(migrateOn(db, name))(t)
			if s := g.Stats(); s.Running != 1 {
				t.Errorf("%d running", s.Running)
			}
			before := g.Stats().Acquired
			if err := m.Up(); err != nil {
				t.Error(err)
			}
			if v, dirty, err := m.Version(); err != nil || v != 2 || dirty {
				t.Error(v, dirty, err)
			}
			if err := m.Down(); err != nil {
				t.Error(err)
			}
			if n := g.Stats().Acquired - before; n != 0 {
				t.Errorf("%d permits beside the one it has", n)
			}
			// Somebody else is refused meanwhile, and gets in afterwards.
			if err := db.QueryRow("select 1").Scan(new(int)); !errors.Is(err, pgxgated.ErrRejected) {
				t.Error(err)
			}
			o := observe(t, dsn)
			if serr, derr := m.Close(); serr != nil || derr != nil {
				t.Error(serr, derr)
			}
			idle(t, g)
			o.until("sessions after Close", func() bool { return o.sessions("") == 0 })
		})
	}
	t.Run("refusal", func(t *testing.T) {
		cell(t, libMigrate, colRefusal)
		db := must(sql.Open(pgxgated.DriverName, set(pgtest.Shared(t).Database(t), tight...)))(t)
		defer db.Close()
		g := pgxgated.GateOf(db)
		p := must(g.Acquire(t.Context()))(t)
		_, err := migrateOn(db, "pgx5")
		var wrapped *database.Error
		if !errors.As(err, &wrapped) || !errors.Is(wrapped.OrigErr, pgxgated.ErrRejected) {
			t.Errorf("%v (%T)", err, err)
		}
		p.Release()
		idle(t, g)
	})
	t.Run("statement timeout", func(t *testing.T) {
		cell(t, libMigrate, colCancel)
		dsn := set(pgtest.Shared(t).Database(t), tight...)
		db := must(sql.Open(pgxgated.DriverName, dsn))(t)
		g := pgxgated.GateOf(db)
		driver := must(migratepgx.WithInstance(db, &migratepgx.Config{StatementTimeout: 50e6}))(t)
		files := must(iofs.New(testdata, "testdata/slow"))(t)
		m := must(migrate.NewWithInstance("iofs", files, "pgx5", driver))(t)
		if err := m.Up(); err == nil {
			t.Error("no timeout")
		}
		_, _ = m.Close()
		idle(t, g)
		o := observe(t, dsn)
		o.until("sessions after Close", func() bool { return o.sessions("") == 0 })
	})
}

// H01: the tools that open a DSN themselves open it past the driver, where the server refuses the gate's keys by name.
func TestH01ToolsGivenTheSameDSN(t *testing.T) {
	dsn := set(pgtest.Shared(t).Database(t), tight...)
	db := must(sql.Open("pgx", dsn))(t)
	defer db.Close()
	err := db.Ping()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42704" {
		t.Fatalf("%v, want 42704", err)
	}
	worksNot(t, libMigrate, "its own `Open` with the gated DSN", "it would be ungated: it opens the driver `pgx/v5` or `postgres`, and the server refuses the gate's keys; use `WithInstance`",
		errors.New(regexp.MustCompile(`"(gate|pool)_\w+"`).ReplaceAllString(pgErr.Message, `"…"`))) // whichever key came first
}
