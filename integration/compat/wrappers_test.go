package compat

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/XSAM/otelsql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/ngrok/sqlmw"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

// sqlActions are what a user does with a plain *sql.DB, each on whichever connection.
func sqlActions(db *sql.DB) []action {
	n := counter()
	const insert = "insert into items (name) values ($1 || gen_random_uuid())"
	return []action{
		{"Exec", 1, 0, func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, insert, n())
			return err
		}},
		{"QueryRow", 1, 0, func(ctx context.Context) error {
			return db.QueryRowContext(ctx, "select count(*) from items").Scan(new(int))
		}},
		{"Query", 1, 0, func(ctx context.Context) error {
			rows, err := db.QueryContext(ctx, "select id, name from items")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				var it item
				if err := rows.Scan(&it.ID, &it.Name); err != nil {
					return err
				}
			}
			return rows.Err()
		}},
		{"BeginTx with two statements", 1, 1, func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			for range 2 {
				if _, err := tx.ExecContext(ctx, insert, n()); err != nil {
					return err
				}
			}
			return tx.Commit()
		}},
	}
}

// sqlClient does the same and pins a connection. pinned says how many permits two statements on one *sql.Conn are: one, or
// one each where a wrapper hides that the connection is returned.
func sqlClient(t *testing.T, dsn string, db *sql.DB, pinned uint64) *client {
	exec(t, plain(dsn), itemsTable)
	return &client{
		db: db, close: db.Close,
		actions: append(sqlActions(db), []action{
			{"Conn with two statements", pinned, 0, func(ctx context.Context) error {
				conn, err := db.Conn(ctx)
				if err != nil {
					return err
				}
				defer conn.Close()
				var pids [2]int
				for i := range pids {
					if err := conn.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pids[i]); err != nil {
						return err
					}
				}
				if pids[0] != pids[1] {
					return fmt.Errorf("backends %v", pids)
				}
				return nil
			}},
		}...),
		slow: []action{
			{name: "Exec", run: func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "select pg_sleep(60)")
				return err
			}},
			{name: "Exec in BeginTx", run: func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(ctx, "select pg_sleep(60)")
				return err
			}},
		},
	}
}

func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestDatabaseSQL(t *testing.T) {
	suite(t, libSQL, func(t *testing.T, dsn string) *client {
		return sqlClient(t, dsn, must(sql.Open(pgxgated.DriverName, dsn))(t), 1)
	})
}

// H02: Register opens the driver with an empty DSN to get at it.
func TestH02OtelsqlAbove(t *testing.T) {
	for name, open := range map[string]func(dsn string) (*sql.DB, error){
		"otelsql `Open`, above": func(dsn string) (*sql.DB, error) { return otelsql.Open(pgxgated.DriverName, dsn) },
		"otelsql `OpenDB`, above": func(dsn string) (*sql.DB, error) {
			c, err := pgxgated.NewConnector(dsn)
			if err != nil {
				return nil, err
			}
			return otelsql.OpenDB(c), nil
		},
		"otelsql `Register`, above": func(dsn string) (*sql.DB, error) {
			name, err := otelRegistered()
			if err != nil {
				return nil, err
			}
			return sql.Open(name, dsn)
		},
	} {
		t.Run(name, func(t *testing.T) {
			suite(t, name, func(t *testing.T, dsn string) *client { return sqlClient(t, dsn, must(open(dsn))(t), 1) })
		})
	}
}

var otelRegistered = sync.OnceValues(func() (string, error) { return otelsql.Register(pgxgated.DriverName) })

// PgxConn looks through a wrapper that has Raw.
func TestPgxConnBelowOtelsql(t *testing.T) {
	works(t, "otelsql `Open`, above", "`PgxConn` in `Raw`", "")
	dsn := set(pgtest.Shared(t).Database(t), tight...)
	db := must(otelsql.Open(pgxgated.DriverName, dsn))(t)
	defer db.Close()
	conn := must(db.Conn(t.Context()))(t)
	if err := conn.Raw(func(dc any) error {
		pc, err := pgxgated.PgxConn(t.Context(), dc)
		if err != nil {
			return err
		}
		return pc.QueryRow(t.Context(), "select 1").Scan(new(int))
	}); err != nil {
		t.Error(err)
	}
	conn.Close()
	idle(t, pgxgated.GateOf(db))
}

// sqlmw hides the connector's io.Closer, so the pool ends some seconds after the last connection.
func TestSqlmwAbove(t *testing.T) {
	const lib = "sqlmw, above"
	sqlmwAbove.Do(func() { sql.Register("compat-sqlmw", sqlmw.Driver(&pgxgated.Driver{}, &counting{})) })
	suite(t, lib, func(t *testing.T, dsn string) *client {
		return sqlClient(t, dsn, must(sql.Open("compat-sqlmw", dsn))(t), 1)
	})
	t.Run("Raw", func(t *testing.T) {
		db := must(sql.Open("compat-sqlmw", set(pgtest.Shared(t).Database(t), tight...)))(t)
		defer db.Close()
		conn := must(db.Conn(t.Context()))(t)
		err := conn.Raw(func(dc any) error {
			_, err := pgxgated.PgxConn(t.Context(), dc)
			return err
		})
		conn.Close()
		idle(t, pgxgated.GateOf(db))
		worksNot(t, lib, "`PgxConn` in `Raw`", "sqlmw does not let through what it wraps", err)
	})
}

var sqlmwAbove sync.Once

// counting is a user's interceptor.
type counting struct {
	sqlmw.NullInterceptor
	begins, commits, rollbacks, execs, queries, rowsClosed atomic.Int64
}

func (c *counting) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	c.begins.Add(1)
	return c.NullInterceptor.ConnBeginTx(ctx, conn, opts)
}

func (c *counting) ConnExecContext(ctx context.Context, conn driver.ExecerContext, query string, args []driver.NamedValue) (driver.Result, error) {
	c.execs.Add(1)
	return c.NullInterceptor.ConnExecContext(ctx, conn, query, args)
}

func (c *counting) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, query string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	c.queries.Add(1)
	return c.NullInterceptor.ConnQueryContext(ctx, conn, query, args)
}

func (c *counting) RowsClose(ctx context.Context, rows driver.Rows) error {
	c.rowsClosed.Add(1)
	return c.NullInterceptor.RowsClose(ctx, rows)
}

func (c *counting) TxCommit(ctx context.Context, tx driver.Tx) error {
	c.commits.Add(1)
	return c.NullInterceptor.TxCommit(ctx, tx)
}

func (c *counting) TxRollback(ctx context.Context, tx driver.Tx) error {
	c.rollbacks.Add(1)
	return c.NullInterceptor.TxRollback(ctx, tx)
}

func TestSqlmwBelow(t *testing.T) {
	const lib = "sqlmw, below (`WithInterceptors`)"
	suite(t, lib, func(t *testing.T, dsn string) *client {
		c := must(pgxgated.NewConnector(dsn, pgxgated.WithInterceptors(&counting{}, &counting{})))(t)
		return sqlClient(t, dsn, sql.OpenDB(c), 1)
	})
	t.Run("calls", func(t *testing.T) {
		works(t, lib, "an interceptor sees BEGIN, statements, rows and ends, and no refusal", "")
		var in counting
		dsn := set(pgtest.Shared(t).Database(t), tight...)
		db := sql.OpenDB(must(pgxgated.NewConnector(dsn, pgxgated.WithInterceptors(&in)))(t))
		g := pgxgated.GateOf(db)
		c := sqlClient(t, dsn, db, 1)
		defer db.Close()
		for _, a := range c.actions {
			if err := a.run(t.Context()); err != nil {
				t.Error(a.name, err)
			}
		}
		p := must(g.Acquire(t.Context()))(t)
		for _, a := range c.actions {
			if err := a.run(t.Context()); !errors.Is(err, pgxgated.ErrRejected) {
				t.Error(a.name, err)
			}
		}
		p.Release()
		idle(t, g)
		got := []int64{in.begins.Load(), in.execs.Load(), in.queries.Load(), in.rowsClosed.Load(), in.commits.Load(), in.rollbacks.Load()}
		if want := []int64{1, 3, 4, 4, 1, 0}; !slices.Equal(got, want) {
			t.Errorf("BEGIN, exec, query, rows closed, COMMIT, ROLLBACK: %v, want %v", got, want)
		}
	})
}

// bareDriver is a wrapper that hides all it can: driver.DriverContext, and of connections the hooks that tell of their return.
type bareDriver struct{ d *pgxgated.Driver }

func (b bareDriver) Open(dsn string) (driver.Conn, error) {
	c, err := b.d.Open(dsn)
	if err != nil {
		return nil, err
	}
	return bareConn{c.(bare)}, nil
}

type bare interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
}

type bareConn struct{ bare }

// bareConnector hides the connector's io.Closer and the same of its connections.
type bareConnector struct{ c *pgxgated.Connector }

func (b bareConnector) Driver() driver.Driver { return bareDriver{} }
func (b bareConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := b.c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return bareConn{c.(bare)}, nil
}

var registerBare = sync.OnceFunc(func() { sql.Register("compat-bare", bareDriver{&pgxgated.Driver{}}) })

func TestWrapperThatHidesEverything(t *testing.T) {
	registerBare()
	for name, open := range map[string]func(dsn string) (*sql.DB, error){
		"a driver wrapper that hides all it can": func(dsn string) (*sql.DB, error) { return sql.Open("compat-bare", dsn) },
		"a connector wrapper that hides all it can": func(dsn string) (*sql.DB, error) {
			c, err := pgxgated.NewConnector(dsn)
			if err != nil {
				return nil, err
			}
			return sql.OpenDB(bareConnector{c}), nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, ok := any(bareConnector{}).(io.Closer); ok {
				t.Fatal("not hidden")
			}
			suite(t, name, func(t *testing.T, dsn string) *client {
				// With its idle connections dropped each return is a Close, which nobody can hide.
				db := must(open(dsn))(t)
				return sqlClient(t, dsn, db, 2)
			})
		})
	}
}

// gateOptions are the options that say what the gate_* keys of the suite's DSN do.
func gateOptions(dsn string) []pgxgated.Option {
	opts := []pgxgated.Option{pgxgated.WithLimits(pgxgated.Limits{Running: 1}), pgxgated.WithOwnPool()}
	if strings.Contains(dsn, "gate_scope=tx") {
		opts = append(opts, pgxgated.WithScope(pgxgated.ScopeTx))
	}
	return opts
}

// Another *sql.DB below: pgx's own, and lib/pq's, of which nobody can say when the server is done.
func TestOpenDBOfAnotherDriver(t *testing.T) {
	for name, driverName := range map[string]string{"pgx stdlib, below (`OpenDB`)": "pgx", "lib/pq, below (`OpenDB`)": "postgres"} {
		t.Run(name, func(t *testing.T) {
			suite(t, name, func(t *testing.T, dsn string) *client {
				opts := gateOptions(dsn)
				if driverName == "postgres" {
					opts = append(opts, pgxgated.WithDrainGrace(100*time.Millisecond), pgxgated.WithDrainLimit(300*time.Millisecond)) // all that a permit can wait for
				}
				pool := must(sql.Open(driverName, plain(dsn)))(t)
				pool.SetMaxOpenConns(2)
				c := sqlClient(t, dsn, must(pgxgated.OpenDB(pool, opts...))(t), 1)
				c.canceled = func(err error) bool {
					var pqErr *pq.Error
					return errors.As(err, &pqErr) && pqErr.Code == "57014"
				}
				return c
			})
		})
	}
}

// I6 ends at a driver that tells nothing of its backends: that is counted, and the wait for it is bounded.
func TestLibPQCannotProve(t *testing.T) {
	dsn := pgtest.Shared(t).Database(t)
	pool := must(sql.Open("postgres", dsn))(t)
	pool.SetMaxOpenConns(1)
	var log lines
	db := must(pgxgated.OpenDB(pool, pgxgated.WithLimits(pgxgated.Limits{Running: 1}), pgxgated.WithOwnPool(),
		pgxgated.WithDrainGrace(10*time.Millisecond), pgxgated.WithDrainLimit(100*time.Millisecond),
		pgxgated.WithLogger(slog.New(slog.NewTextHandler(&log, nil)))))(t)
	defer db.Close()
	g := pgxgated.GateOf(db)
	ctx, cancel := context.WithCancel(t.Context())
	o := observe(t, dsn)
	defer cancel()
	done := make(chan error, 1)
	go func() { _, err := db.ExecContext(ctx, "select pg_sleep(60)"); done <- err }()
	o.until("at work", func() bool { return o.sessions("state = 'active' and query like '%pg_sleep%'") == 1 })
	cancel()
	if err := <-done; err == nil {
		t.Error("no error")
	}
	idle(t, g)
	if s := g.Stats(); s.DrainsUnproven != 1 {
		t.Errorf("%d drains unproven", s.DrainsUnproven)
	}
	worksNot(t, "lib/pq, below (`OpenDB`)", "proof that the server is done with what was cancelled (I6)", "only pgx tells its backend; the permit comes back after `gate_drain_limit`, counted in `DrainsUnproven` and logged",
		errors.New("permit back without proof that the server is done: the driver gives none"))
	if log.count("permit back without proof that the server is done: the driver gives none") != 1 {
		t.Error("not logged")
	}
}

// beginning is an interceptor that hands BEGIN a context of its own making.
type beginning struct {
	sqlmw.NullInterceptor
	derive   func(context.Context) (context.Context, context.CancelFunc)
	rollback atomic.Pointer[error] // what the context of ROLLBACK said
}

func (b *beginning) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	ctx, cancel := b.derive(ctx)
	if cancel != nil {
		defer cancel()
	}
	tx, err := conn.BeginTx(ctx, opts)
	return ctx, tx, err
}

func (b *beginning) TxRollback(ctx context.Context, tx driver.Tx) error {
	err := ctx.Err()
	b.rollback.Store(&err)
	return tx.Rollback()
}

// An interceptor may bound BEGIN by a context that ends with it, or derive one that lives on: COMMIT is sent all the same,
// and the caller's end reaches neither ROLLBACK nor what was derived.
func TestInterceptorDerivesTheContextOfBegin(t *testing.T) {
	dsn := set(pgtest.Shared(t).Database(t), tight...)
	exec(t, plain(dsn), itemsTable)
	open := func(t *testing.T, in *beginning) (*sql.DB, *pgxgated.Gate) {
		db := sql.OpenDB(must(pgxgated.NewConnector(dsn, pgxgated.WithInterceptors(in)))(t))
		t.Cleanup(func() { db.Close() })
		return db, pgxgated.GateOf(db)
	}
	t.Run("that ends with BEGIN", func(t *testing.T) {
		db, g := open(t, &beginning{derive: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, patience)
		}})
		tx := must(db.BeginTx(t.Context(), nil))(t)
		if _, err := tx.ExecContext(t.Context(), "insert into items (name) values ('bounded BEGIN')"); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
		idle(t, g)
	})
	t.Run("that lives on", func(t *testing.T) {
		in := &beginning{derive: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			t.Cleanup(cancel)
			return ctx, nil
		}}
		db, g := open(t, in)
		ctx, cancel := context.WithCancel(t.Context())
		must(db.BeginTx(ctx, nil))(t)
		cancel()
		idle(t, g)
		if err := in.rollback.Load(); err == nil {
			t.Error("no ROLLBACK")
		} else if *err != nil {
			t.Errorf("the context of ROLLBACK: %v", *err)
		}
	})
}
