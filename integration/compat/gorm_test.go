package compat

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const (
	libGormConn   = "GORM, `Conn: db`"
	libGormDriver = "GORM, `DriverName: \"pgx-gated\"`"
)

type gormItem struct {
	ID    int64
	Name  string `gorm:"not null;unique"`
	Parts []gormPart
}

type gormPart struct {
	ID         int64
	GormItemID int64
	Name       string
}

// gormWays are the two ways to open GORM on the driver.
var gormWays = map[string]func(t *testing.T, dsn string) postgres.Config{
	libGormConn: func(t *testing.T, dsn string) postgres.Config {
		db, err := sql.Open(pgxgated.DriverName, dsn)
		if err != nil {
			t.Fatal(err)
		}
		return postgres.Config{Conn: db}
	},
	libGormDriver: func(_ *testing.T, dsn string) postgres.Config {
		return postgres.Config{DriverName: pgxgated.DriverName, DSN: dsn}
	},
}

func openGorm(t *testing.T, way, dsn string, cfg gorm.Config) (*gorm.DB, *sql.DB) {
	t.Helper()
	cfg.Logger = logger.Discard
	db, err := gorm.Open(postgres.New(gormWays[way](t, dsn)), &cfg)
	if err != nil {
		t.Fatal(err)
	}
	std, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { std.Close() })
	return db, std
}

// C08 too: what GORM makes a transaction of, and that nested ones are savepoints under the same permit.
func TestC08Gorm(t *testing.T) {
	for way := range gormWays {
		t.Run(way, func(t *testing.T) {
			suite(t, way, func(t *testing.T, dsn string) *client {
				db, std := openGorm(t, way, dsn, gorm.Config{})
				if err := db.AutoMigrate(&gormItem{}, &gormPart{}); err != nil {
					t.Fatal(err)
				}
				n := counter()
				return &client{db: std, close: std.Close, actions: []action{
					{"First", 1, 0, func(ctx context.Context) error {
						if err := db.WithContext(ctx).First(&gormItem{}).Error; !errors.Is(err, gorm.ErrRecordNotFound) {
							return err
						}
						return nil
					}},
					{"Create", 1, 1, func(ctx context.Context) error {
						return db.WithContext(ctx).Create(&gormItem{Name: n()}).Error
					}},
					{"Create with SkipDefaultTransaction", 1, 0, func(ctx context.Context) error {
						return db.Session(&gorm.Session{SkipDefaultTransaction: true, Context: ctx}).Create(&gormItem{Name: n()}).Error
					}},
					{"ToSQL", 0, 0, func(ctx context.Context) error {
						if s := db.ToSQL(func(tx *gorm.DB) *gorm.DB { return tx.Create(&gormItem{Name: "x"}) }); !strings.HasPrefix(s, "INSERT INTO") {
							return fmt.Errorf("SQL %q", s)
						}
						return nil
					}},
					{"Transaction nested three deep", 1, 1, func(ctx context.Context) error {
						one := func(tx *gorm.DB) error { return tx.Create(&gormItem{Name: n()}).Error }
						return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
							return errors.Join(one(tx), tx.Transaction(func(tx *gorm.DB) error {
								return errors.Join(one(tx), tx.Transaction(one))
							}))
						})
					}},
					{"Create with associations", 1, 1, func(ctx context.Context) error {
						return db.WithContext(ctx).Create(&gormItem{Name: n(), Parts: []gormPart{{Name: "a"}, {Name: "b"}}}).Error
					}},
					{"PrepareStmt in a Transaction that fails", 1, 1, func(ctx context.Context) error {
						name, fails := n(), errors.New("fails")
						err := db.Session(&gorm.Session{PrepareStmt: true, Context: ctx}).Transaction(func(tx *gorm.DB) error {
							if err := tx.Create(&gormItem{Name: name}).Error; err != nil {
								return err
							}
							return fails
						})
						if left := ask[int](t, plain(dsn), "select count(*) from gorm_items where name = '"+name+"'"); left != 0 {
							return fmt.Errorf("a failed transaction left %d rows", left)
						}
						if err == fails {
							return nil
						}
						return err
					}},
				}, slow: []action{
					{name: "Raw", run: func(ctx context.Context) error {
						return db.WithContext(ctx).Raw("select 1 from pg_sleep(60)").Scan(new(int)).Error
					}},
					{name: "Exec in a nested Transaction", run: func(ctx context.Context) error {
						return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
							return tx.Transaction(func(tx *gorm.DB) error { return tx.Exec("select pg_sleep(60)").Error })
						})
					}},
				}}
			})
		})
	}
}

// Three models of one table, each with a column more than the one before.
type gormV1 struct {
	ID   int64
	Name string
}
type gormV2 struct {
	ID   int64
	Name string
	Size int
}
type gormV3 struct {
	ID   int64
	Name string
	Size int
	Made time.Time
}

func (gormV1) TableName() string { return "grown" }
func (gormV2) TableName() string { return "grown" }
func (gormV3) TableName() string { return "grown" }

// grow migrates three times, and reads the columns after each.
func grow(db *gorm.DB) error {
	for i, model := range []any{&gormV1{}, &gormV2{}, &gormV3{}} {
		if err := db.AutoMigrate(model); err != nil {
			return fmt.Errorf("AutoMigrate %d: %w", i+1, err)
		}
		columns, err := db.Migrator().ColumnTypes(model)
		if err != nil {
			return fmt.Errorf("ColumnTypes %d: %w", i+1, err)
		}
		if len(columns) != i+2 {
			return fmt.Errorf("ColumnTypes %d: %d columns", i+1, len(columns))
		}
	}
	return nil
}

// C04: the migrator asks for the driver's name before it uses the simple protocol.
func TestC04GormAutoMigrate(t *testing.T) {
	const what = "AutoMigrate three times, a column more each time"
	run := func(t *testing.T, way, conns string, cfg gorm.Config, settings ...string) error {
		t.Helper()
		dsn := set(set(pgtest.Shared(t).Database(t), "pool_max_conns", conns, "gate_running", "1"), settings...)
		db, std := openGorm(t, way, dsn, cfg)
		err := grow(db)
		idle(t, pgxgated.GateOf(std))
		return err
	}
	for _, conns := range []string{"1", "4"} {
		for way := range gormWays {
			t.Run(way+"/pool "+conns, func(t *testing.T) {
				works(t, way, what, "")
				if err := run(t, way, conns, gorm.Config{}); err != nil {
					t.Error(err)
				}
			})
			t.Run(way+"/PrepareStmt/pool "+conns, func(t *testing.T) {
				works(t, way, what+", PrepareStmt", "")
				if err := run(t, way, conns, gorm.Config{PrepareStmt: true}); err != nil {
					t.Error(err)
				}
			})
		}
	}
	t.Run("in a Transaction", func(t *testing.T) {
		dsn := set(pgtest.Shared(t).Database(t), tight...)
		db, std := openGorm(t, libGormDriver, dsn, gorm.Config{})
		err := db.Transaction(grow)
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "0A000" {
			t.Fatalf("%v, want 0A000", err)
		}
		idle(t, pgxgated.GateOf(std))
		worksNot(t, libGormDriver, what+", in one Transaction",
			"GORM uses the simple protocol for the driver names `\"\"` and `pgx` only, and in a transaction the statement cannot be repeated; use `Conn: db` or `default_query_exec_mode=exec`", err)
	})
	t.Run("in a Transaction, remedies", func(t *testing.T) {
		for way, mode := range map[string]string{libGormConn: "cache_statement", libGormDriver: "exec"} {
			t.Run(way, func(t *testing.T) {
				note := ""
				if mode != "cache_statement" {
					note = ", `default_query_exec_mode=" + mode + "`"
				}
				works(t, way, what+", in one Transaction"+note, "")
				dsn := set(pgtest.Shared(t).Database(t), append([]string{"default_query_exec_mode", mode}, tight...)...)
				db, std := openGorm(t, way, dsn, gorm.Config{})
				if err := db.Transaction(grow); err != nil {
					t.Error(err)
				}
				idle(t, pgxgated.GateOf(std))
			})
		}
	})
}

// C04: the time zone of a DSN reaches the session; what GORM adds to it for timestamps without a zone is its own.
func TestC04GormTimeZone(t *testing.T) {
	for way := range gormWays {
		t.Run(way, func(t *testing.T) {
			works(t, way, "`TimeZone` in the DSN", "it sets the session's zone; `timestamp` columns without zone are read as UTC")
			dsn := set(pgtest.Shared(t).Database(t), append([]string{"TimeZone", "Asia/Tokyo"}, tight...)...)
			db, std := openGorm(t, way, dsn, gorm.Config{})
			var zone string
			var local time.Time
			if err := db.Raw("show timezone").Scan(&zone).Error; err != nil || zone != "Asia/Tokyo" {
				t.Error(zone, err)
			}
			if err := db.Raw("select timestamp '2001-02-03 04:05:06'").Scan(&local).Error; err != nil || !local.Equal(time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)) {
				t.Error(local, err)
			}
			idle(t, pgxgated.GateOf(std))
		})
	}
}

// I9: GORM translates errors by a type assertion, so the server's must arrive bare, and refusals must pass through it.
func TestGormTranslateError(t *testing.T) {
	for way := range gormWays {
		t.Run(way, func(t *testing.T) {
			works(t, way, "TranslateError", "also on COMMIT's error and beside a refusal")
			dsn := set(pgtest.Shared(t).Database(t), tight...)
			exec(t, plain(dsn), "create table parents (id bigint primary key)",
				"create table gorm_items (id bigserial primary key, name text not null unique, parent bigint references parents deferrable initially deferred)")
			db, std := openGorm(t, way, dsn, gorm.Config{TranslateError: true})
			g := pgxgated.GateOf(std)
			create := func() error { return db.Omit("Parts").Create(&gormItem{Name: "same"}).Error }
			if err := create(); err != nil {
				t.Fatal(err)
			}
			if err := create(); !errors.Is(err, gorm.ErrDuplicatedKey) {
				t.Errorf("%v (%T)", err, err)
			}
			err := db.Transaction(func(tx *gorm.DB) error {
				return tx.Exec("insert into gorm_items (name, parent) values ('other', 77)").Error
			})
			var pgErr *pgconn.PgError
			if !errors.Is(err, gorm.ErrForeignKeyViolated) || !errors.As(err, &pgErr) || pgErr.Code != "23503" {
				t.Errorf("COMMIT: %v (%T)", err, err)
			}
			p, err := g.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := create(); !errors.Is(err, pgxgated.ErrRejected) {
				t.Errorf("%v (%T)", err, err)
			}
			p.Release()
			idle(t, g)
		})
	}
}

// A08: with PrepareStmt, GORM prepares on the database what two open transactions then want too: they wait for who waits for
// their permits. Every wait is bounded, all end, and what was refused can be repeated.
func TestA08GormPrepareStmtAtFullLoad(t *testing.T) {
	works(t, libGormConn, "PrepareStmt while all permits are out", "each wait is bounded; GORM shares one Prepare among all who want that text, and so its refusal")
	dsn := set(pgtest.Shared(t).Database(t), "pool_max_conns", "2", "gate_running", "2", "gate_waiting", "4", "gate_max_wait", "50ms")
	exec(t, plain(dsn), "create table gorm_items (id bigserial primary key, name text not null unique)")
	db, std := openGorm(t, libGormConn, dsn, gorm.Config{PrepareStmt: true, SkipDefaultTransaction: true})
	g := pgxgated.GateOf(std)
	begun, ended := make(chan error), make(chan error)
	goOn := make(chan struct{})
	for i := range 2 {
		go func() {
			ended <- db.Transaction(func(tx *gorm.DB) error {
				begun <- tx.Exec("select 1").Error
				<-goOn
				return tx.Create(&gormItem{Name: fmt.Sprint("tx", i)}).Error
			})
		}()
	}
	for range 2 {
		if err := <-begun; err != nil {
			t.Fatal(err)
		}
	}
	third := make(chan error, 1)
	go func() { third <- db.Create(&gormItem{Name: "third"}).Error }()
	await(t, "the third caller waits", func() bool { return g.Stats().Waiting > 0 || len(third) > 0 })
	close(goOn)
	for range 2 {
		if err := <-ended; err != nil && !errors.Is(err, pgxgated.ErrRejected) {
			t.Error(err)
		}
	}
	if err := <-third; err != nil && !errors.Is(err, pgxgated.ErrRejected) {
		t.Error(err)
	}
	idle(t, g)
	if err := db.Transaction(func(tx *gorm.DB) error { return tx.Create(&gormItem{Name: "again"}).Error }); err != nil {
		t.Error(err)
	}
	idle(t, g)
}
