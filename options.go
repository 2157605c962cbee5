package pgxgated

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/ngrok/sqlmw"
)

// Option is a setting of a gated database. Most have a gate_* key of the DSN as their twin; a setting that is given both
// ways with different values is an error that names both.
type Option interface{ apply(*config) error }

// GateOption is an Option that belongs to the gate itself, so that [NewGate] takes it too.
type GateOption interface {
	Option
	applyGate(*gateConfig) error
}

type option func(*config) error

func (o option) apply(c *config) error { return o(c) }

type gateOption func(*gateConfig) error

func (o gateOption) apply(c *config) error         { return o(&c.gate) }
func (o gateOption) applyGate(c *gateConfig) error { return o(c) }

// Scope says which operations hold permits.
type Scope string

const (
	ScopeAll Scope = "all" // transactions, autocommit statements, pinned connections
	ScopeTx  Scope = "tx"  // only what begins a transaction with BeginTx
)

// config is everything that can be set for one gated database.
type config struct {
	gate            gateConfig
	gateName        string
	shared          *Gate
	running         int
	waiting         int
	maxWait         time.Duration
	scope           Scope
	poolWait        time.Duration
	rollbackTimeout time.Duration
	commitTimeout   time.Duration
	drainGrace      time.Duration
	drainLimit      time.Duration
	ownPool         bool
	track           bool
	serverDeadline  bool
	interceptors    []sqlmw.Interceptor
}

func defaultConfig() config {
	return config{
		gate:            gateConfig{mode: Enforce, deadlineAware: true, log: slog.Default()},
		maxWait:         100 * time.Millisecond,
		scope:           ScopeAll,
		poolWait:        5 * time.Second,
		rollbackTimeout: 5 * time.Second,
		commitTimeout:   30 * time.Second,
		drainGrace:      time.Second,
		drainLimit:      time.Minute,
	}
}

// gave tells whether a setting was given, by its DSN key.
func (c *config) gave(key string) bool { return c.gate.given[key] != "" }

// put stores a setting and who gave it.
func put[T comparable](c *gateConfig, key, by string, dst *T, v T) error {
	if was := c.given[key]; was != "" && was != by && *dst != v {
		return fmt.Errorf("%s is %v by %s and %v by %s; give it once", key, *dst, was, v, by)
	}
	if c.given == nil {
		c.given = make(map[string]string)
	}
	c.given[key] = by
	*dst = v
	return nil
}

// putIn is put for a value with a range.
func putIn[T int | time.Duration](c *gateConfig, key, by string, dst *T, v, low, high T) error {
	if v < low || v > high {
		return fmt.Errorf("%s (%s) is %v, want %v to %v", key, by, v, low, high)
	}
	return put(c, key, by, dst, v)
}

const byDSN = "the DSN"

// WithGate puts the database behind a gate that exists, to share one budget with other databases or with work outside
// database/sql. Limits and gate options may not be given beside it, unless they are the gate's own. It stays the caller's
// to close, after the databases.
func WithGate(g *Gate) Option {
	return option(func(c *config) error {
		if g == nil {
			return errors.New("WithGate: the gate is nil")
		}
		return put(&c.gate, "gate", "WithGate", &c.shared, g)
	})
}

// WithGateName names the gate (gate_name). Databases that are opened with the same name share one gate: one budget.
// Opening with other limits than those it was created with is an error that names both.
func WithGateName(name string) Option {
	return option(func(c *config) error { return c.setGateName("WithGateName", name) })
}

// printable tells that a name can stand in labels and log lines.
func printable(name string) bool {
	return utf8.ValidString(name) && !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

func (c *config) setGateName(by, name string) error {
	if name == "" || len(name) > 100 || !printable(name) || strings.Contains(name, "=") {
		return fmt.Errorf("gate_name (%s) has %d bytes, want 1 to 100 of printable UTF-8 without =", by, len(name))
	}
	return put(&c.gate, "gate_name", by, &c.gateName, name)
}

// WithLimits sets running (gate_running, default max(1, 0.8·P) for a pool of P connections), waiting (gate_waiting, default
// ten times running) and the maximum wait (gate_max_wait, default 100 ms; 0 = never wait). All three count, zeros included.
func WithLimits(l Limits) Option {
	return option(func(c *config) error {
		if err := l.validate(); err != nil {
			return err
		}
		return errors.Join(
			put(&c.gate, "gate_running", "WithLimits", &c.running, l.Running),
			put(&c.gate, "gate_waiting", "WithLimits", &c.waiting, l.Waiting),
			put(&c.gate, "gate_max_wait", "WithLimits", &c.maxWait, l.MaxWait),
		)
	})
}

// WithScope says which operations hold permits (gate_scope, default all). With ScopeTx only what begins a transaction
// with BeginTx does: autocommit statements go straight to the pool, as does a BEGIN that is sent as text.
func WithScope(s Scope) Option {
	return option(func(c *config) error { return c.setScope("WithScope", s) })
}

func (c *config) setScope(by string, s Scope) error {
	if s != ScopeAll && s != ScopeTx {
		return fmt.Errorf("gate_scope (%s) is %s, want all or tx", by, shown(string(s)))
	}
	return put(&c.gate, "gate_scope", by, &c.scope, s)
}

// WithMode chooses between enforce and observe (gate_mode, default enforce). Observe lets everything through to the pool at
// once, and counts in Stats.WouldReject what enforce would have refused. The pool's bound and gate_pool_wait remain, a
// workload that the gate does not have is an error, and a second permit inside InTx is neither refused nor counted.
func WithMode(m Mode) GateOption {
	return gateOption(func(c *gateConfig) error { return c.setMode("WithMode", m) })
}

func (c *gateConfig) setMode(by string, m Mode) error {
	if m != Enforce && m != Observe {
		return fmt.Errorf("gate_mode (%s) is %s, want enforce or observe", by, shown(string(m)))
	}
	return put(c, "gate_mode", by, &c.mode, m)
}

// WithDeadlineAdmission turns deadline-aware admission on or off (gate_deadline_admission, default on): on, a call whose
// deadline is shorter than such work takes, or where many wait than makes good use of a permit, is refused with
// ErrDeadlineShort instead of waiting for a permit that others can use better. See Stats.Estimates and Stats.Worthwhile.
func WithDeadlineAdmission(on bool) GateOption {
	return gateOption(func(c *gateConfig) error {
		return put(c, "gate_deadline_admission", "WithDeadlineAdmission", &c.deadlineAware, on)
	})
}

// WithPoolWait bounds the wait for a physical connection once permits are held (gate_pool_wait, default 5 s, 1 ms to
// 24 h). When it ends, the error matches ErrPoolTimeout.
func WithPoolWait(d time.Duration) Option {
	return durationOption("gate_pool_wait", "WithPoolWait", d, func(c *config) *time.Duration { return &c.poolWait })
}

// WithRollbackTimeout bounds ROLLBACK, which does not follow the caller's cancellation (gate_rollback_timeout, default
// 5 s, 1 ms to 24 h). When it ends, the connection is destroyed.
func WithRollbackTimeout(d time.Duration) Option {
	return durationOption("gate_rollback_timeout", "WithRollbackTimeout", d, func(c *config) *time.Duration { return &c.rollbackTimeout })
}

// WithCommitTimeout is how long COMMIT may at least take (gate_commit_timeout, default 30 s, 1 ms to 24 h). COMMIT is not
// interrupted by the caller's cancellation. Where BeginTx had a deadline, COMMIT gets what remains of it or this,
// whichever is more; without a deadline it has no bound. When it ends, the outcome is unknown: ErrOutcomeUnknown.
func WithCommitTimeout(d time.Duration) Option {
	return durationOption("gate_commit_timeout", "WithCommitTimeout", d, func(c *config) *time.Duration { return &c.commitTimeout })
}

// WithDrainGrace is how long a backend may stay after its connection was closed before it is terminated with
// pg_terminate_backend (gate_drain_grace, default 1 s, 1 ms to 24 h).
func WithDrainGrace(d time.Duration) Option {
	return durationOption("gate_drain_grace", "WithDrainGrace", d, func(c *config) *time.Duration { return &c.drainGrace })
}

// WithDrainLimit is after how long a permit comes back although its backend could not be proven gone: counted in
// Stats.DrainsUnproven and logged (gate_drain_limit, default 60 s, 1 ms to 24 h).
func WithDrainLimit(d time.Duration) Option {
	return durationOption("gate_drain_limit", "WithDrainLimit", d, func(c *config) *time.Duration { return &c.drainLimit })
}

// WithLeakThreshold reports a lease that is held longer than d, by one record with the stack that took it and the kind of its
// last statement, and by another when it comes back (gate_leak_threshold, default 0: off, else 1 ms to 24 h). Nothing is ended or
// released. Off it costs nothing; on, 0.5 to 2 µs a lease, by the depth of the stack, and no allocation.
func WithLeakThreshold(d time.Duration) GateOption {
	return gateOption(func(c *gateConfig) error { return c.setLeakThreshold("WithLeakThreshold", d) })
}

func (c *gateConfig) setLeakThreshold(by string, d time.Duration) error {
	if d == 0 {
		return put(c, "gate_leak_threshold", by, &c.leakThreshold, 0)
	}
	return putIn(c, "gate_leak_threshold", by, &c.leakThreshold, d, time.Millisecond, maxMaxWait)
}

func durationOption(key, by string, d time.Duration, dst func(*config) *time.Duration) Option {
	return option(func(c *config) error { return putIn(&c.gate, key, by, dst(c), d, time.Millisecond, maxMaxWait) })
}

// WithServerDeadline hands what remains of the caller's deadline at BeginTx to the server (gate_server_deadline, default
// off), with BEGIN and in its round trip: as statement_timeout of each statement in the transaction, and on PostgreSQL 17
// and later as transaction_timeout of the whole, whose end costs the connection. A server that outlives its client then
// stops by itself. Either is only ever shorter than what the role or the database has set.
//
// BEGIN then takes the transaction's snapshot. So give the isolation level in sql.TxOptions, as SET TRANSACTION comes too
// late, and at repeatable read and above a LOCK TABLE does not come before the snapshot.
func WithServerDeadline(on bool) Option {
	return option(func(c *config) error {
		return put(&c.gate, "gate_server_deadline", "WithServerDeadline", &c.serverDeadline, on)
	})
}

// WithOutcomeTracking reads the id of a read-write transaction before COMMIT, so that an unknown outcome can be asked for
// with [ResolveOutcome]. One more round trip in each such transaction; off without it. Needs PostgreSQL 13 or later.
func WithOutcomeTracking() Option {
	return option(func(c *config) error { c.track = true; return nil })
}

// WithWorkloads gives workloads of the gate budgets of their own inside it (gate_workloads, as in oltp:12+48,batch:4+8 for
// running and waiting). A call chooses with [WithWorkload]; without one only the gate's own limits apply. MaxWait is the
// gate's, and must be 0 here. No workload may have more running than the gate.
func WithWorkloads(workloads map[string]Limits) GateOption {
	return gateOption(func(c *gateConfig) error {
		var ws []workload
		for _, name := range slices.Sorted(maps.Keys(workloads)) {
			if workloads[name].MaxWait != 0 {
				return fmt.Errorf("gate_workloads (WithWorkloads): workload %q has max wait %v, want 0: it is the gate's", name, workloads[name].MaxWait)
			}
			ws = append(ws, workload{name, workloads[name]})
		}
		return c.setWorkloads("WithWorkloads", ws)
	})
}

func (c *gateConfig) setWorkloads(by string, ws []workload) error {
	for _, w := range ws {
		if w.name == "" || len(w.name) > 60 || !printable(w.name) || strings.ContainsAny(w.name, ":,+= ") {
			return fmt.Errorf("gate_workloads (%s): name %s, want 1 to 60 bytes of printable UTF-8 without : , + = and blanks", by, shown(w.name))
		}
		if err := w.limits.validate(); err != nil {
			return fmt.Errorf("gate_workloads (%s): workload %q: %w", by, w.name, err)
		}
	}
	if err := put(c, "gate_workloads", by, &c.workloadsText, workloadsText(ws)); err != nil {
		return err
	}
	c.workloads = ws
	return nil
}

func workloadsText(ws []workload) string {
	var text []string
	for _, w := range ws {
		text = append(text, fmt.Sprintf("%s:%d+%d", w.name, w.limits.Running, w.limits.Waiting))
	}
	return strings.Join(text, ",")
}

// parseWorkloads reads name:running+waiting, separated by commas.
func parseWorkloads(s string) ([]workload, error) {
	var ws []workload
	for item := range strings.SplitSeq(s, ",") {
		name, limits, _ := strings.Cut(strings.TrimSpace(item), ":")
		running, waiting, ok := strings.Cut(limits, "+")
		b, err1 := strconv.Atoi(running)
		q, err2 := strconv.Atoi(waiting)
		if !ok || err1 != nil || err2 != nil {
			return nil, fmt.Errorf("gate_workloads: %s, want name:running+waiting such as batch:4+8", shown(item))
		}
		if slices.ContainsFunc(ws, func(w workload) bool { return w.name == name }) {
			return nil, fmt.Errorf("gate_workloads: workload %q is given twice", name)
		}
		ws = append(ws, workload{name, Limits{Running: b, Waiting: q}})
	}
	slices.SortFunc(ws, func(a, b workload) int { return strings.Compare(a.name, b.name) })
	return ws, nil
}

// WithOwnPool makes the gated database close the pool it was handed when it is closed itself. Without it the pool stays
// open: whoever made it closes it.
func WithOwnPool() Option {
	return option(func(c *config) error { c.ownPool = true; return nil })
}

// WithInterceptors adds interceptors on physical connections, the first one outermost. They see BEGIN, statements, COMMIT
// and ROLLBACK, after the permits and the connection were acquired, and a context that is alive at ROLLBACK and COMMIT
// even if the caller's is not. They do not see connecting: use pgx's hooks for that.
//
// Rows keep every optional interface of the driver's rows; RowsNext is called on Go 1.26 only (Go 1.27's database/sql
// reads pgx's rows by column and never calls Next), RowsClose always. Prepared statements run as text on the connection,
// so Stmt interceptors are not called; ConnPrepareContext is, when a text is prepared for the first time. An interceptor
// that panics costs the connection, never a permit. About 1 µs and 6 allocations a transaction.
func WithInterceptors(is ...sqlmw.Interceptor) Option {
	return option(func(c *config) error {
		if slices.Contains(is, nil) {
			return errors.New("WithInterceptors: an interceptor is nil")
		}
		c.interceptors = append(c.interceptors, is...)
		return nil
	})
}

// WithLogger is where warnings and reports go. Default slog.Default(). No SQL, argument or password is logged.
func WithLogger(l *slog.Logger) GateOption {
	return gateOption(func(c *gateConfig) error {
		if l == nil {
			return errors.New("WithLogger: the logger is nil")
		}
		c.log = l
		return nil
	})
}

// dsnKeys are the gate_* keys of a DSN.
var dsnKeys = map[string]func(c *config, v string) error{
	"gate_name": func(c *config, v string) error { return c.setGateName(byDSN, v) },
	"gate_running": func(c *config, v string) error {
		return c.putInt("gate_running", &c.running, v, 1)
	},
	"gate_waiting": func(c *config, v string) error {
		return c.putInt("gate_waiting", &c.waiting, v, 0)
	},
	"gate_max_wait": func(c *config, v string) error {
		return c.putDuration("gate_max_wait", &c.maxWait, v, 0)
	},
	"gate_scope": func(c *config, v string) error { return c.setScope(byDSN, Scope(v)) },
	"gate_mode":  func(c *config, v string) error { return c.gate.setMode(byDSN, Mode(v)) },
	"gate_deadline_admission": func(c *config, v string) error {
		return c.putSwitch("gate_deadline_admission", &c.gate.deadlineAware, v)
	},
	"gate_server_deadline": func(c *config, v string) error {
		return c.putSwitch("gate_server_deadline", &c.serverDeadline, v)
	},
	"gate_workloads": func(c *config, v string) error {
		ws, err := parseWorkloads(v)
		if err != nil {
			return err
		}
		return c.gate.setWorkloads(byDSN, ws)
	},
	"gate_pool_wait": func(c *config, v string) error {
		return c.putDuration("gate_pool_wait", &c.poolWait, v, time.Millisecond)
	},
	"gate_rollback_timeout": func(c *config, v string) error {
		return c.putDuration("gate_rollback_timeout", &c.rollbackTimeout, v, time.Millisecond)
	},
	"gate_commit_timeout": func(c *config, v string) error {
		return c.putDuration("gate_commit_timeout", &c.commitTimeout, v, time.Millisecond)
	},
	"gate_drain_grace": func(c *config, v string) error {
		return c.putDuration("gate_drain_grace", &c.drainGrace, v, time.Millisecond)
	},
	"gate_leak_threshold": func(c *config, v string) error {
		d, err := parseDuration("gate_leak_threshold", v, 0)
		if err != nil {
			return err
		}
		return c.gate.setLeakThreshold(byDSN, d)
	},
	"gate_drain_limit": func(c *config, v string) error {
		return c.putDuration("gate_drain_limit", &c.drainLimit, v, time.Millisecond)
	},
}

func (c *config) putInt(key string, dst *int, v string, low int) error {
	n, err := strconv.Atoi(v)
	if err != nil {
		return fmt.Errorf("%s is %s, want a whole number from %d to %d", key, shown(v), low, maxPermits)
	}
	return putIn(&c.gate, key, byDSN, dst, n, low, maxPermits)
}

func (c *config) putDuration(key string, dst *time.Duration, v string, low time.Duration) error {
	d, err := parseDuration(key, v, low)
	if err != nil {
		return err
	}
	return putIn(&c.gate, key, byDSN, dst, d, low, maxMaxWait)
}

func parseDuration(key, v string, low time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0, fmt.Errorf("%s is %s, want a duration with its unit such as 250ms, from %v to %v", key, shown(v), low, maxMaxWait)
	}
	return d, nil
}

func (c *config) putSwitch(key string, dst *bool, v string) error {
	if v != "on" && v != "off" {
		return fmt.Errorf("%s is %s, want on or off", key, shown(v))
	}
	return put(&c.gate, key, byDSN, dst, v == "on")
}

// dsn is a parsed DSN: what pgxpool gets, and our own settings.
type dsn struct {
	pool     *pgxpool.Config
	keys     map[string]string // gate_*
	sizeGave bool              // pool_max_conns was given
}

// parseDSN splits a DSN in URL or keyword/value form. Neither gate_* nor pool_* keys stay in what is sent to the server.
// pgx parses it, service and password files included, so that there is no second idea of what a DSN is.
func parseDSN(s string) (dsn, error) {
	if err := checkKeys(s); err != nil {
		return dsn{}, err
	}
	plain, err := pgx.ParseConfig(s)
	if err != nil {
		return dsn{}, parseError(err)
	}
	if strings.ContainsAny(plain.Host, "@=") && !strings.HasPrefix(plain.Host, "/") {
		// The rest of a password, or all of it after an empty host=, on its way into labels and log lines.
		return dsn{}, errors.New("the host has an @ or = in it (percent-encode reserved characters in user and password; quote an empty value: host='')")
	}
	if isURL(s) && strings.Contains(plain.Database, "@") && atInPath(s) {
		// postgres://app:/secret@db/orders: the host is "app:", and the database what follows.
		return dsn{}, errors.New("the database has an @ in it (percent-encode reserved characters in user, password and database)")
	}
	for k := range plain.RuntimeParams {
		if !parameterName.MatchString(k) {
			// A whole URL with a blank before it or another scheme, or a part of a password.
			return dsn{}, fmt.Errorf("unknown key %s, want postgres://… or key=value pairs", keyText(k))
		}
	}
	d := dsn{keys: make(map[string]string)}
	_, d.sizeGave = plain.RuntimeParams["pool_max_conns"]
	if d.pool, err = pgxpool.ParseConfig(s); err != nil {
		return dsn{}, parseError(err)
	}
	for k, v := range d.pool.ConnConfig.RuntimeParams {
		switch lower := strings.ToLower(k); {
		case strings.HasPrefix(lower, "gate_"):
			d.keys[k] = v
			delete(d.pool.ConnConfig.RuntimeParams, k)
		case strings.HasPrefix(lower, "pool_"):
			// What pgxpool leaves it does not know, and the server would not either, with the first connection.
			return dsn{}, fmt.Errorf("unknown key %s: pgxpool has no such setting", keyText(k))
		}
	}
	return d, nil
}

// parameterName is what PostgreSQL takes for the name of a setting: everything else that pgx leaves for the server is a
// part of something else.
var parameterName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)*$`)

// swallowed is another pair where a value is to be.
var swallowed = regexp.MustCompile(`^[A-Za-z_]+=`)

func isURL(s string) bool {
	return strings.HasPrefix(s, "postgres://") || strings.HasPrefix(s, "postgresql://")
}

// atInPath tells that a URL has an @, as it is, behind its host.
func atInPath(s string) bool {
	s, _, _ = strings.Cut(s, "?")
	_, s, _ = strings.Cut(s, "://")
	_, path, _ := strings.Cut(s, "/")
	return strings.Contains(path, "@")
}

// parseError says what is wrong with a DSN without quoting it: what is malformed may hold a password anywhere.
func parseError(err error) error {
	var parse *pgconn.ParseConfigError
	if !errors.As(err, &parse) {
		return errors.New("cannot be parsed")
	}
	text := parse.Error()
	cause := parse.Unwrap()
	if cause != nil {
		text = strings.TrimSuffix(text, " ("+cause.Error()+")")
	}
	if i := strings.LastIndex(text, "`: "); i >= 0 {
		text = text[i+len("`: "):]
	}
	switch {
	case strings.HasPrefix(text, "failed to parse as URL"):
		text += " (percent-encode reserved characters: in user and password, and blanks, ; and % in a query of key=value pairs)"
	case strings.HasPrefix(text, "failed to parse as keyword/value"):
		text += " (want key=value pairs; quote values with blanks in '…')"
	case strings.Contains(text, "="):
		text, _, _ = strings.Cut(text, ":") // as in shown
	case cause != nil && !strings.Contains(cause.Error(), "="):
		text += ": " + cause.Error()
	}
	return errors.New(text)
}

// keyText is an unknown key as it may be shown. One with other characters is not a misspelt key but part of something
// else, of a password with an unescaped & for example.
func keyText(k string) string {
	if len(k) > 60 || strings.IndexFunc(k, func(r rune) bool {
		return r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) >= 0 {
		return "of other characters than letters, digits and _ (quote or percent-encode reserved characters)"
	}
	return k
}

// serverLabel is the name of a gate without one. A database that is named as none is, as the end of a password would be,
// is not shown.
func serverLabel(c *pgx.ConnConfig) string {
	database := c.Database
	if database == "" {
		database = c.User
	}
	if strings.ContainsAny(database, "@:/?#&=' \t\n") {
		database = "?"
	}
	return fmt.Sprintf("%s@%s:%d", database, c.Host, c.Port)
}

// shown is a bad value as it may be shown. In keyword/value form an empty value swallows the pair after it, which may be
// the password.
func shown(v string) string {
	if len(v) > 60 || strings.Contains(v, "=") {
		return fmt.Sprintf("a text of %d characters", len(v))
	}
	return strconv.Quote(v)
}

// checkKeys finds what pgx says nothing about: a gate_* key that stands in the DSN twice, of which it keeps one; a key without
// a value in a URL, which is rather a part of a password with an unescaped &; and an empty value in the other form, which
// takes the pair after it for the value, the password perhaps.
func checkKeys(s string) error {
	seen := make(map[string]bool)
	for key, p := range keysOf(s) {
		switch {
		case seen[key] && strings.HasPrefix(key, "gate_"):
			return fmt.Errorf("%s is given twice", key)
		case p == pairBare && key != "":
			return errors.New("a key without = in the query (percent-encode reserved characters)")
		case p == pairSwallowed:
			return fmt.Errorf("no value of key %s before the next key (write '' for an empty one)", keyText(key))
		}
		seen[key] = true
	}
	return nil
}

type pair uint8

const (
	pairFull      pair = iota
	pairBare           // a key without = in a URL
	pairSwallowed      // key= other=value
)

// keysOf yields the keys of a DSN in either form. It need not understand more: what is malformed, pgx refuses.
func keysOf(s string) func(yield func(string, pair) bool) {
	return func(yield func(string, pair) bool) {
		if isURL(s) {
			_, query, _ := strings.Cut(s, "?")
			for text := range strings.SplitSeq(query, "&") {
				key, _, full := strings.Cut(text, "=")
				if decoded, err := url.PathUnescape(key); err == nil {
					key = decoded
				}
				is := pairFull
				if !full {
					is = pairBare
				}
				if !yield(key, is) {
					return
				}
			}
			return
		}
		for s != "" {
			key, rest, ok := strings.Cut(s, "=")
			s = strings.TrimLeft(rest, " \t\n\r\v\f")
			is := pairFull
			if len(s) < len(rest) && swallowed.MatchString(s) {
				is = pairSwallowed
			}
			if !ok || !yield(strings.TrimSpace(key), is) {
				return
			}
			quoted := strings.HasPrefix(s, "'")
			i := 0
			if quoted {
				i = 1
			}
			for ; i < len(s); i++ {
				if s[i] == '\\' {
					i++
				} else if quoted && s[i] == '\'' || !quoted && strings.IndexByte(" \t\n\r\v\f", s[i]) >= 0 {
					break
				}
			}
			s = s[min(i+1, len(s)):]
		}
	}
}

// applyDSN applies the gate_* keys in a fixed order, so that the same DSN always gives the same error.
func (c *config) applyDSN(keys map[string]string) error {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		set := dsnKeys[key]
		if set == nil {
			errs = append(errs, fmt.Errorf("unknown key %s, want one of %s", keyText(key), strings.Join(slices.Sorted(maps.Keys(dsnKeys)), ", ")))
			continue
		}
		errs = append(errs, set(c, keys[key]))
	}
	return errors.Join(errs...)
}

func (c *config) applyOptions(opts []Option) error {
	var errs []error
	for _, o := range opts {
		if o == nil {
			errs = append(errs, errors.New("an Option is nil"))
			continue
		}
		errs = append(errs, o.apply(c))
	}
	return errors.Join(errs...)
}

// resolve fills in the defaults that follow from the size P of the pool (0: unbounded) and checks what depends on it.
// psetting names what sets P.
func (c *config) resolve(p int, psetting string) (Limits, error) {
	if !c.gave("gate_drain_grace") {
		c.drainGrace = min(c.drainGrace, c.drainLimit) // a default contradicts nobody
	}
	if c.drainGrace > c.drainLimit {
		return Limits{}, fmt.Errorf("gate_drain_grace is %v, more than gate_drain_limit %v", c.drainGrace, c.drainLimit)
	}
	if c.shared != nil {
		return c.resolveShared(p, psetting)
	}
	if !c.gave("gate_running") {
		if p == 0 {
			return Limits{}, errors.New("the pool has no bound (MaxOpenConns is 0), so limits must be given: WithLimits (gate_running), and best SetMaxOpenConns too")
		}
		c.running = min(max(1, p*8/10), maxPermits)
	}
	if !c.gave("gate_waiting") {
		c.waiting = min(10*c.running, maxPermits)
	}
	if p > 0 && c.running > p {
		return Limits{}, fmt.Errorf("gate_running is %d, more than the %d connections of the pool (%s); want 1 to %d", c.running, p, psetting, p)
	}
	l := c.limits()
	return l, l.validate()
}

// resolveShared checks what was given beside WithGate: nothing that is not the gate's own already.
func (c *config) resolveShared(p int, psetting string) (Limits, error) {
	g := c.shared
	if g.isClosed() {
		return Limits{}, fmt.Errorf("the gate %q (WithGate) is closed", g.name)
	}
	l := g.Stats().Limits
	mode := Enforce
	if g.observe {
		mode = Observe
	}
	var leak time.Duration
	if g.leaks != nil {
		leak = g.leaks.threshold
	}
	for _, s := range []struct {
		key       string
		have, was any
	}{
		{"gate_name", c.gateName, g.name},
		{"gate_running", c.running, l.Running},
		{"gate_waiting", c.waiting, l.Waiting},
		{"gate_max_wait", c.maxWait, l.MaxWait},
		{"gate_mode", c.gate.mode, mode},
		{"gate_deadline_admission", c.gate.deadlineAware, g.deadlineAware},
		{"gate_leak_threshold", c.gate.leakThreshold, leak},
		{"gate_workloads", c.gate.workloadsText, workloadsText(g.workloads())},
	} {
		if c.gave(s.key) && s.have != s.was {
			return Limits{}, fmt.Errorf("%s is %v beside WithGate, whose gate %q has %v", s.key, s.have, g.name, s.was)
		}
	}
	if p > 0 && l.Running > p {
		return Limits{}, fmt.Errorf("gate %q has running %d, more than the %d connections of the pool (%s)", g.name, l.Running, p, psetting)
	}
	return l, nil
}

// workloads are those of the gate, by name.
func (g *Gate) workloads() []workload {
	var ws []workload
	for name, s := range g.Stats().Workloads {
		ws = append(ws, workload{name, Limits{Running: s.Limits.Running, Waiting: s.Limits.Waiting}})
	}
	slices.SortFunc(ws, func(a, b workload) int { return strings.Compare(a.name, b.name) })
	return ws
}

func (c *config) limits() Limits {
	return Limits{Running: c.running, Waiting: c.waiting, MaxWait: c.maxWait}
}
