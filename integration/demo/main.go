// Demo starts a private PostgreSQL, opens it through pgx-gated with one running permit and no waiting, and shows what
// happens to a second operation while a transaction holds the permit.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()

	fmt.Println("# starting a private PostgreSQL")
	server, err := pgtest.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	fmt.Println("# PostgreSQL", server.VersionString())

	dsn := server.DSN()
	for _, setting := range [][2]string{{"pool_max_conns", "2"}, {"gate_running", "1"}, {"gate_waiting", "0"}} {
		dsn = pgtest.With(dsn, setting[0], setting[1])
	}
	db, err := sql.Open(pgxgated.DriverName, dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	gate := pgxgated.GateOf(db)
	fmt.Printf("# pool of 2 connections, gate with %v\n", gate.Stats().Limits)

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing after Commit
	fmt.Printf("# a transaction holds the permit: running=%d\n", gate.Stats().Running)

	_, err = db.ExecContext(ctx, "select 1")
	if !errors.Is(err, pgxgated.ErrAdmissionFull) {
		return fmt.Errorf("the second operation was not refused: %v", err)
	}
	fmt.Println("# a second operation is refused at once:", err)
	fmt.Println("overload=rejected")

	var answer int
	if err := tx.QueryRowContext(ctx, "select 42").Scan(&answer); err != nil {
		return err
	}
	fmt.Printf("query=%d\n", answer)
	if err := tx.Commit(); err != nil {
		return err
	}

	stats := gate.Stats()
	fmt.Printf("available=%d\n", stats.Limits.Running-stats.Running)
	if _, err := db.ExecContext(ctx, "select 1"); err != nil {
		return err
	}
	fmt.Printf("# after Commit the permit is back and the next operation runs: acquired=%d refused=%d\n", gate.Stats().Acquired, gate.Stats().AdmissionFull)
	return nil
}
