package pgxgated

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
)

// Budget is what Check needs to know of the world outside this process.
type Budget struct {
	// PeakInstances is how many instances of this service may run at once, rolling deployments included. 1 or more.
	PeakInstances int
	// OtherClients is how many connections everything else may open with the same server: other services, migrations, a
	// person with psql. 0 or more.
	OtherClients int
}

// Check compares the settings of a gated database with each other and with what the server allows, and returns one error
// that lists every broken rule, nil if there is none: running ≤ the pool's size; PeakInstances × (the pool's size + 1 for
// the verifier's own connection) + OtherClients ≤ what max_connections, the reserved connections, the role's and the
// database's limits allow; SetMaxOpenConns of db, if set, not below running + waiting, since callers would then wait in
// database/sql, where no limit of the gate counts.
//
// It asks the server with one query, past the gate (Bypass), and waits for it as long as ctx allows. Call it once at
// start-up, and treat the error as a warning or a failure as you like. An error that has not to do with a rule (not
// gated, not PostgreSQL, the query failed) is not a *CheckError.
func Check(ctx context.Context, db *sql.DB, b Budget) error {
	switch {
	case b.PeakInstances < 1 || b.PeakInstances > maxPermits:
		return fmt.Errorf("pgxgated: check: Budget.PeakInstances is %d, want 1 to %d", b.PeakInstances, maxPermits)
	case b.OtherClients < 0 || b.OtherClients > maxPermits:
		return fmt.Errorf("pgxgated: check: Budget.OtherClients is %d, want 0 to %d", b.OtherClients, maxPermits)
	}
	c := connectorOf(db)
	if c == nil {
		return errors.New("pgxgated: check: the database is not gated")
	}
	src := c.src()
	if src == nil {
		return c.errClosed()
	}
	// For whom connections are reserved is decided by the session's role: SET ROLE changes nothing.
	var server, role, database, reserved int
	var roleName, databaseName string
	err := db.QueryRowContext(Bypass(ctx), `
		select pg_catalog.current_setting('max_connections')::int,
			case when r.rolsuper then 0 else
				pg_catalog.current_setting('superuser_reserved_connections')::int +
				coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)
			end,
			r.rolname, case when r.rolsuper then -1 else r.rolconnlimit end,
			d.datname, case when r.rolsuper then -1 else d.datconnlimit end
		from pg_catalog.pg_roles r, pg_catalog.pg_database d
		where r.rolname = session_user and d.datname = pg_catalog.current_database()`).
		Scan(&server, &reserved, &roleName, &role, &databaseName, &database)
	if err != nil {
		return fmt.Errorf("pgxgated: check: asking the server: %w", err)
	}

	e := &CheckError{}
	p, _ := src.size()
	l := c.gate.Stats().Limits
	if p > 0 && l.Running > p {
		e.add("running (gate_running) is %d, more than the pool's %d connections (pool_max_conns)", l.Running, p)
	}
	if open := db.Stats().MaxOpenConnections; open > 0 && open < l.Running+l.Waiting {
		e.add("SetMaxOpenConns is %d, less than running + waiting = %d + %d: leave it unset, or callers wait in database/sql, where no limit counts",
			open, l.Running, l.Waiting)
	}
	allowed := []struct {
		n    int
		what string
	}{
		{server - reserved, fmt.Sprintf("the server allows %d (max_connections %d, %d of them reserved)", server-reserved, server, reserved)},
		{role, fmt.Sprintf("the role %q may have %d", roleName, role)},
		{database, fmt.Sprintf("the database %q allows %d", databaseName, database)},
	}
	if p == 0 {
		e.add("the pool has no bound, so no number of instances is safe: call SetMaxOpenConns on it")
	}
	need := b.PeakInstances*(p+1) + b.OtherClients
	for _, a := range allowed {
		if p > 0 && a.n >= 0 && need > a.n {
			e.add("%d instances × (%d connections + 1 of the verifier) + %d other clients = %d, but %s", b.PeakInstances, p, b.OtherClients, need, a.what)
		}
	}
	if len(e.Broken) == 0 {
		return nil
	}
	return e
}

// CheckError lists the rules that Check found broken.
type CheckError struct {
	Broken []string
}

func (e *CheckError) add(format string, args ...any) {
	e.Broken = append(e.Broken, fmt.Sprintf(format, args...))
}

func (e *CheckError) Error() string {
	return "pgxgated: check: " + strings.Join(e.Broken, "; ")
}
