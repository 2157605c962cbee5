package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// database/sql's own, of a transaction in which a driver call panicked or ended its goroutine: it keeps a read lock of
		// the Tx for ever then (golang/go#76465), so the transaction can be neither ended nor waited for.
		goleak.IgnoreAnyFunction("database/sql.(*Tx).awaitDone"),
	)
}

// bareConnector and bareConn are a wrapper that knows the interfaces that a driver must have, the four that database/sql
// has had since Go 1.8, and nothing else.
type bareConnector struct{ c driver.Connector }

func (b bareConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := b.c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return bareConn{c}, nil
}
func (b bareConnector) Driver() driver.Driver { return bareDriver{b.c.Driver()} }

type bareDriver struct{ d driver.Driver }

func (b bareDriver) Open(name string) (driver.Conn, error) {
	c, err := b.d.Open(name)
	if err != nil {
		return nil, err
	}
	return bareConn{c}, nil
}

type bareConn struct{ driver.Conn }

func (b bareConn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	return b.Conn.(driver.ConnBeginTx).BeginTx(ctx, o)
}

func (b bareConn) PrepareContext(ctx context.Context, q string) (driver.Stmt, error) {
	return b.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, q)
}

func (b bareConn) ExecContext(ctx context.Context, q string, args []driver.NamedValue) (driver.Result, error) {
	return b.Conn.(driver.ExecerContext).ExecContext(ctx, q, args)
}

func (b bareConn) QueryContext(ctx context.Context, q string, args []driver.NamedValue) (driver.Rows, error) {
	return b.Conn.(driver.QueryerContext).QueryContext(ctx, q, args)
}

func (b bareConn) Ping(ctx context.Context) error { return b.Conn.(driver.Pinger).Ping(ctx) }
func (b bareConn) Raw() driver.Conn               { return b.Conn }

func hideAll(c driver.Connector) driver.Connector { return bareConnector{c} }

// connectorOfTest is the gated connector below db, wrapped or not.
func connectorOfTest(db *sql.DB) *Connector {
	switch d := db.Driver().(type) {
	case *Driver:
		return d.c
	case bareDriver:
		return d.d.(*Driver).c
	}
	panic("not gated")
}
