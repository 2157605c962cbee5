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

// Check compares the settings of a gated database with each other and with what the server allows, and returns one error,
// a *CheckError that lists every broken rule, or nil if there is none:
//
//   - running is at most the pool's size, and the pool has one;
//   - SetMaxOpenConns of db, if set, is not below running + waiting, since callers would then wait in database/sql, where no
//     limit of the gate counts;
//   - with PeakInstances × (the pool's size + 1 for the verifier's own connection), and OtherClients beside them, there are no
//     more connections than max_connections less those reserved for others than this role;
//   - PeakInstances × the same alone are not more than the role's CONNECTION LIMIT, nor than the database's. What
//     OtherClients take of these two is not known: leave room for those that share the role or the database.
//
// Where metrics are scraped one more connection may be open, for lock waits: count it as an OtherClients for each instance.
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
	var server, reserved, role, database int
	var roleName, databaseName string
	err := db.QueryRowContext(Bypass(ctx), `
		select pg_catalog.current_setting('max_connections')::int,
			case when r.rolsuper then 0 else
				pg_catalog.current_setting('superuser_reserved_connections')::int +
				case when exists (select from pg_catalog.pg_roles u where u.rolname = 'pg_use_reserved_connections'
					and pg_catalog.pg_has_role(r.oid, u.oid, 'usage')) then 0 else
					coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)
				end
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
	each, verifier := p, ""
	if provesEnds(src) {
		each, verifier = p+1, " + 1 of the verifier"
	}
	ours, of := b.PeakInstances*each, fmt.Sprintf("%d instances × (%d connections%s)", b.PeakInstances, p, verifier)
	if p == 0 {
		e.add("the pool has no bound, so no number of instances is safe: call SetMaxOpenConns on it")
		ours = 0
	}
	if n := ours + b.OtherClients; n > server-reserved {
		e.add("%s + %d other clients = %d, but the server allows %d (max_connections %d, of which %d are reserved)",
			of, b.OtherClients, n, server-reserved, server, reserved)
	}
	if role >= 0 && ours > role {
		e.add("%s = %d, but the role %q may have %d (CONNECTION LIMIT)", of, ours, roleName, role)
	}
	if database >= 0 && ours > database {
		e.add("%s = %d, but the database %q allows %d (CONNECTION LIMIT)", of, ours, databaseName, database)
	}
	if len(e.Broken) == 0 {
		return nil
	}
	return e
}

// provesEnds tells whether a connection of the verifier may come on top of the pool's.
func provesEnds(src source) bool {
	switch s := src.(type) {
	case *poolSource:
		return true
	case *dbSource:
		return s.side.Load() != nil
	}
	return false
}

// CheckError lists the rules that Check found broken.
type CheckError struct {
	Broken []string // a sentence each, with the values, the limit and what sets them
}

func (e *CheckError) add(format string, args ...any) {
	e.Broken = append(e.Broken, fmt.Sprintf(format, args...))
}

// Error has one rule to a line where several are broken.
func (e *CheckError) Error() string {
	if len(e.Broken) == 1 {
		return "pgxgated: check: " + e.Broken[0]
	}
	return fmt.Sprintf("pgxgated: check: %d rules are broken:\n\t%s", len(e.Broken), strings.Join(e.Broken, "\n\t"))
}
