package pgxgated

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"
)

// dsnForms writes a DSN in each of its forms.
var dsnForms = map[string]func(pairs ...string) string{
	"URL": func(pairs ...string) string {
		var q []string
		for i := 0; i < len(pairs); i += 2 {
			q = append(q, url.PathEscape(pairs[i])+"="+strings.ReplaceAll(url.PathEscape(pairs[i+1]), "&", "%26"))
		}
		return "postgres://u:pw@127.0.0.1:1/orders?" + strings.Join(q, "&")
	},
	"keyword": func(pairs ...string) string {
		s := "user=u password=pw host=127.0.0.1 port=1 dbname=orders"
		for i := 0; i < len(pairs); i += 2 {
			v := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(pairs[i+1])
			s += fmt.Sprintf(" %s = '%s'", pairs[i], v)
		}
		return s
	},
}

// connect makes a connector and closes it.
func connect(t testing.TB, dsn string, opts ...Option) (*Connector, error) {
	t.Helper()
	c, err := NewConnector(dsn, append([]Option{WithLogger((&logBook{}).logger())}, opts...)...)
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// Every key has its option, and both set the same thing.
func TestEveryKeyAndItsOption(t *testing.T) {
	set := map[string]struct {
		value  string
		option Option
		get    func(c *config) any
		want   any
	}{
		"gate_name":               {"it's \\ a name", WithGateName("it's \\ a name"), func(c *config) any { return c.gateName }, "it's \\ a name"},
		"gate_running":            {"3", WithLimits(Limits{Running: 3}), func(c *config) any { return c.running }, 3},
		"gate_waiting":            {"7", WithLimits(Limits{Running: 1, Waiting: 7}), func(c *config) any { return c.waiting }, 7},
		"gate_max_wait":           {"250ms", WithLimits(Limits{Running: 1, MaxWait: 250 * time.Millisecond}), func(c *config) any { return c.maxWait }, 250 * time.Millisecond},
		"gate_scope":              {"tx", WithScope(ScopeTx), func(c *config) any { return c.scope }, ScopeTx},
		"gate_mode":               {"observe", WithMode(Observe), func(c *config) any { return c.gate.mode }, Observe},
		"gate_deadline_admission": {"off", WithDeadlineAdmission(false), func(c *config) any { return c.gate.deadlineAware }, false},
		"gate_pool_wait":          {"2s", WithPoolWait(2 * time.Second), func(c *config) any { return c.poolWait }, 2 * time.Second},
		"gate_rollback_timeout":   {"3s", WithRollbackTimeout(3 * time.Second), func(c *config) any { return c.rollbackTimeout }, 3 * time.Second},
		"gate_commit_timeout":     {"4s", WithCommitTimeout(4 * time.Second), func(c *config) any { return c.commitTimeout }, 4 * time.Second},
		"gate_drain_grace":        {"10ms", WithDrainGrace(10 * time.Millisecond), func(c *config) any { return c.drainGrace }, 10 * time.Millisecond},
		"gate_drain_limit":        {"5m", WithDrainLimit(5 * time.Minute), func(c *config) any { return c.drainLimit }, 5 * time.Minute},
		"gate_server_deadline":    {"on", WithServerDeadline(true), func(c *config) any { return c.serverDeadline }, true},
		"gate_leak_threshold":     {"6s", WithLeakThreshold(6 * time.Second), func(c *config) any { return c.gate.leakThreshold }, 6 * time.Second},
		"gate_workloads": {
			"b:1+2,a:1+0", WithWorkloads(map[string]Limits{"a": {Running: 1}, "b": {Running: 1, Waiting: 2}}),
			func(c *config) any { return fmt.Sprint(c.gate.workloads) }, fmt.Sprint([]workload{{"a", Limits{Running: 1}}, {"b", Limits{Running: 1, Waiting: 2}}}),
		},
	}
	for key := range dsnKeys {
		if _, ok := set[key]; !ok {
			t.Errorf("%s is not tested", key)
		}
	}
	for key, s := range set {
		for form, dsn := range dsnForms {
			t.Run(key+"/"+form, func(t *testing.T) {
				defaults := defaultConfig()
				if key != "gate_running" && s.get(&defaults) == s.want {
					t.Fatal("the test sets the default")
				}
				c, err := connect(t, dsn(key, s.value, "pool_max_conns", "5"))
				if err != nil {
					t.Fatal(err)
				}
				if got := s.get(&c.cfg); got != s.want {
					t.Errorf("by DSN: %v, want %v", got, s.want)
				}
			})
		}
		t.Run(key+"/option", func(t *testing.T) {
			c, err := connect(t, dsnForms["URL"]("pool_max_conns", "5"), s.option)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.get(&c.cfg); got != s.want {
				t.Errorf("by option: %v, want %v", got, s.want)
			}
		})
	}
}

// The gate has the limits that were asked for, and the defaults that follow from the pool otherwise.
func TestLimitsAndDefaults(t *testing.T) {
	for _, c := range []struct {
		pairs []string
		want  Limits
	}{
		{[]string{"pool_max_conns", "20"}, Limits{16, 160, 100 * time.Millisecond}},
		{[]string{"pool_max_conns", "1"}, Limits{1, 10, 100 * time.Millisecond}},
		{[]string{"pool_max_conns", "2"}, Limits{1, 10, 100 * time.Millisecond}},
		{[]string{"pool_max_conns", "20", "gate_running", "20"}, Limits{20, 200, 100 * time.Millisecond}},
		{[]string{"pool_max_conns", "20", "gate_waiting", "0", "gate_max_wait", "0s"}, Limits{16, 0, 0}},
		{[]string{"pool_max_conns", "2000000000"}, Limits{maxPermits, maxPermits, 100 * time.Millisecond}},
	} {
		for form, dsn := range dsnForms {
			t.Run(form+fmt.Sprint(c.pairs), func(t *testing.T) {
				conn, err := connect(t, dsn(c.pairs...))
				if err != nil {
					t.Fatal(err)
				}
				if got := conn.Gate().Stats().Limits; got != c.want {
					t.Errorf("%v, want %v", got, c.want)
				}
				if got := conn.Gate().Name(); got != "orders@127.0.0.1:1" {
					t.Errorf("name %q", got)
				}
			})
		}
	}
}

// H03, H01: what is wrong is an error at open that names the setting, the value and the range, and makes nothing.
func TestBadSettingsAreErrorsAtOpen(t *testing.T) {
	for _, c := range []struct {
		pairs []string
		want  []string
	}{
		{[]string{"gate_runing", "4"}, []string{"gate_runing", "gate_running"}},
		{[]string{"GATE_RUNNING", "4"}, []string{"GATE_RUNNING"}},
		{[]string{"gate_", "4"}, []string{"unknown key gate_"}},
		{[]string{"pool_max_con", "4"}, []string{"unknown key pool_max_con"}},
		{[]string{"pool_max_conns", "0"}, []string{"pool_max_conns"}},
		{[]string{"pool_max_conns", "many"}, []string{"pool_max_conns", "many"}},
		{[]string{"gate_running", "0"}, []string{"gate_running", "0", "1 to 1000000"}},
		{[]string{"gate_running", "-1"}, []string{"gate_running", "-1", "1 to 1000000"}},
		{[]string{"gate_running", "1000001"}, []string{"gate_running", "1000001", "1 to 1000000"}},
		{[]string{"gate_running", "99999999999999999999"}, []string{"gate_running", "99999999999999999999", "1 to 1000000"}},
		{[]string{"gate_running", "4.5"}, []string{"gate_running", "4.5", "whole number"}},
		{[]string{"gate_running", ""}, []string{"gate_running", "whole number"}},
		{[]string{"gate_waiting", "-1"}, []string{"gate_waiting", "-1", "0 to 1000000"}},
		{[]string{"gate_max_wait", "100"}, []string{"gate_max_wait", "100", "unit"}},
		{[]string{"gate_max_wait", "-1s"}, []string{"gate_max_wait", "-1s", "0s to 24h"}},
		{[]string{"gate_max_wait", "25h"}, []string{"gate_max_wait", "25h", "24h"}},
		{[]string{"gate_pool_wait", "0s"}, []string{"gate_pool_wait", "0s", "1ms to 24h"}},
		{[]string{"gate_rollback_timeout", "soon"}, []string{"gate_rollback_timeout", "soon", "1ms"}},
		{[]string{"gate_commit_timeout", "1us"}, []string{"gate_commit_timeout", "1µs", "1ms"}},
		{[]string{"gate_drain_grace", "48h"}, []string{"gate_drain_grace", "48h"}},
		{[]string{"gate_drain_limit", "1"}, []string{"gate_drain_limit", "unit"}},
		{[]string{"gate_drain_limit", "1s", "gate_drain_grace", "2s"}, []string{"gate_drain_limit", "gate_drain_grace", "1s", "2s"}},
		{[]string{"gate_leak_threshold", "1us"}, []string{"gate_leak_threshold", "1ms"}},
		{[]string{"gate_scope", "all "}, []string{"gate_scope", `"all "`, "all or tx"}},
		{[]string{"gate_mode", "off"}, []string{"gate_mode", "off", "enforce or observe"}},
		{[]string{"gate_deadline_admission", "true"}, []string{"gate_deadline_admission", "true", "on or off"}},
		{[]string{"gate_server_deadline", ""}, []string{"gate_server_deadline", "on or off"}},
		{[]string{"gate_name", ""}, []string{"gate_name", "1 to 100"}},
		{[]string{"gate_name", strings.Repeat("n", 101)}, []string{"gate_name", "101", "1 to 100"}},
		{[]string{"gate_running", "3", "gate_running", "3"}, []string{"gate_running is given twice"}},
		{[]string{"pool_max_conns", "4", "gate_running", "5"}, []string{"gate_running", "5", "pool_max_conns 4"}},
		{[]string{"gate_workloads", "a:9+1", "pool_max_conns", "4"}, []string{"workload", `"a"`, "9"}},
		{[]string{"gate_workloads", "a:1"}, []string{"gate_workloads", "name:running+waiting"}},
		{[]string{"gate_workloads", ":1+1"}, []string{"gate_workloads", `name ""`}},
		{[]string{"gate_workloads", "a:1+1,a:1+1"}, []string{"gate_workloads", "twice"}},
		{[]string{"gate_workloads", "a:0+1"}, []string{"gate_workloads", `"a"`, "is 0"}},
		{[]string{"gate_running", "x", "gate_waiting", "y"}, []string{"gate_running", "gate_waiting"}}, // all at once
		{[]string{"gate_name", "a\xffb"}, []string{"gate_name", "printable"}},
		{[]string{"gate_name", "a\vb"}, []string{"gate_name", "printable"}},
		{[]string{"gate_workloads", "\xff:1+1"}, []string{"gate_workloads", "printable"}},
		{[]string{"gate_workloads", "a\rb:1+1"}, []string{"gate_workloads", "printable"}},
		{[]string{"gate_running-", "1"}, []string{"unknown key"}},
		{[]string{"connect_timeout", "soon"}, []string{"connect_timeout"}},
		{[]string{"sslmode", "perhaps"}, []string{"sslmode"}},
	} {
		for form, dsn := range dsnForms {
			t.Run(form+fmt.Sprint(c.pairs), func(t *testing.T) {
				before := len(gates.labels)
				conn, err := connect(t, dsn(c.pairs...))
				if err == nil {
					t.Fatalf("no error, limits %v", conn.Gate().Stats().Limits)
				}
				for _, want := range c.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%q does not name %q", err, want)
					}
				}
				if strings.Count(err.Error(), "pgxgated") != 1 {
					t.Errorf("%q stutters", err)
				}
				if len(gates.labels) != before {
					t.Error("a gate was left behind")
				}
				if _, err := sql.Open(DriverName, dsn(c.pairs...)); err == nil {
					t.Error("sql.Open gave no error")
				}
			})
		}
	}
}

// A key that is percent-encoded is the same key.
func TestDuplicateKeyPercentEncoded(t *testing.T) {
	_, err := connect(t, "postgres://u@h/d?gate_running=1&gate%5Frunning=2")
	if err == nil || !strings.Contains(err.Error(), "gate_running is given twice") {
		t.Errorf("%v", err)
	}
	if _, err := connect(t, "host=h application_name='gate_running=1 gate_running=2' options='-c a=1 -c a=2'"); err != nil {
		t.Errorf("a value that only looks like keys: %v", err)
	}
}

// DSN and option that contradict each other are an error that names both; the same value twice is not.
func TestDSNAndOptionThatContradict(t *testing.T) {
	for _, c := range []struct {
		key, value string
		same       Option
		other      Option
	}{
		{"gate_name", "a", WithGateName("a"), WithGateName("b")},
		{"gate_running", "2", WithLimits(Limits{Running: 2}), WithLimits(Limits{Running: 3})},
		{"gate_waiting", "2", WithLimits(Limits{Running: 2, Waiting: 2}), WithLimits(Limits{Running: 2, Waiting: 0})},
		{"gate_max_wait", "1s", WithLimits(Limits{Running: 2, MaxWait: time.Second}), WithLimits(Limits{Running: 2})},
		{"gate_scope", "tx", WithScope(ScopeTx), WithScope(ScopeAll)},
		{"gate_mode", "enforce", WithMode(Enforce), WithMode(Observe)},
		{"gate_deadline_admission", "on", WithDeadlineAdmission(true), WithDeadlineAdmission(false)},
		{"gate_pool_wait", "1s", WithPoolWait(time.Second), WithPoolWait(2 * time.Second)},
		{"gate_drain_limit", "2s", WithDrainLimit(2 * time.Second), WithDrainLimit(3 * time.Second)},
		{"gate_server_deadline", "off", WithServerDeadline(false), WithServerDeadline(true)},
		{"gate_workloads", "a:1+1", WithWorkloads(map[string]Limits{"a": {Running: 1, Waiting: 1}}), WithWorkloads(map[string]Limits{"a": {Running: 1}})},
	} {
		t.Run(c.key, func(t *testing.T) {
			dsn := dsnForms["URL"](c.key, c.value, "pool_max_conns", "8")
			if _, err := connect(t, dsn, c.same); err != nil {
				t.Errorf("the same twice: %v", err)
			}
			_, err := connect(t, dsn, c.other)
			if err == nil || !strings.Contains(err.Error(), c.key) || !strings.Contains(err.Error(), "the DSN") || !strings.Contains(err.Error(), "With") {
				t.Errorf("%v", err)
			}
		})
	}
}

// One name is one gate, one DSN is one gate, and different DSNs never share one.
func TestSharing(t *testing.T) {
	dsn := func(pairs ...string) string { return dsnForms["URL"](append(pairs, "pool_max_conns", "8")...) }
	open := func(s string, opts ...Option) *Gate {
		t.Helper()
		c, err := connect(t, s, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return c.Gate()
	}
	a := open(dsn("gate_name", "shared", "gate_running", "4"))
	for _, same := range []*Gate{
		open(dsn("gate_name", "shared", "gate_running", "4")),
		open(dsn("gate_name", "shared")), // says nothing of limits
		open(dsnForms["keyword"]("gate_name", "shared", "pool_max_conns", "20")),
		open(dsn(), WithGateName("shared"), WithLimits(Limits{4, 40, 100 * time.Millisecond})),
	} {
		if same != a {
			t.Errorf("%q is another gate", same.Name())
		}
	}
	for _, s := range []string{"gate_running", "gate_waiting"} {
		_, err := connect(t, dsn("gate_name", "shared", s, "5"))
		if err == nil || !strings.Contains(err.Error(), "running 4, waiting 40") || !strings.Contains(err.Error(), "5") || !strings.Contains(err.Error(), `"shared"`) {
			t.Errorf("%s: %v, want both limits", s, err)
		}
	}
	if _, err := connect(t, dsn("gate_name", "shared", "gate_mode", "observe")); err == nil || !strings.Contains(err.Error(), "gate_mode") {
		t.Errorf("another mode: %v", err)
	}
	// Limits are compared with those at its making, so that a SetLimits does not lock anybody out.
	if err := a.SetLimits(Limits{Running: 2}); err != nil {
		t.Fatal(err)
	}
	if open(dsn("gate_name", "shared", "gate_running", "4")) != a {
		t.Error("another gate after SetLimits")
	}

	b := open(dsn("application_name", "b"))
	if b == a || open(dsn("application_name", "b")) != b {
		t.Error("the same DSN opened twice has two gates")
	}
	c := open(dsn("application_name", "c"))
	if c == b {
		t.Error("different DSNs share a gate")
	}
	if b.Name() != "orders@127.0.0.1:1" || c.Name() != "orders@127.0.0.1:1#2" {
		t.Errorf("names %q and %q", b.Name(), c.Name())
	}
	x, err := NewConnector(dsn("application_name", "d"))
	if err != nil {
		t.Fatal(err)
	}
	if x.Gate().Name() != "orders@127.0.0.1:1#3" {
		t.Errorf("name %q", x.Gate().Name())
	}
	_ = x.Close()
	if got := open(dsn("application_name", "e")).Name(); got != "orders@127.0.0.1:1#3" {
		t.Errorf("a label was not given back: %q", got)
	}
	// The last of those that share a gate closes it.
	var last []*Connector
	for range 2 {
		x, err := NewConnector(dsn("gate_name", "closing"))
		if err != nil {
			t.Fatal(err)
		}
		last = append(last, x)
	}
	_ = last[0].Close()
	_ = last[0].Close()
	if p, err := last[1].Gate().Acquire(ctxBG); err != nil {
		t.Errorf("one is still open: %v", err)
	} else {
		p.Release()
	}
	_ = last[1].Close()
	if _, err := last[1].Gate().Acquire(ctxBG); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}

// A gate that was closed by hand is not found again; given by hand it is an error at open.
func TestClosedGateIsNotShared(t *testing.T) {
	dsn := dsnForms["URL"]("gate_name", "closed by hand", "pool_max_conns", "8")
	first, err := connect(t, dsn)
	if err != nil {
		t.Fatal(err)
	}
	_ = first.Gate().Close()
	second, err := connect(t, dsn)
	if err != nil {
		t.Fatal(err)
	}
	if second.Gate() == first.Gate() {
		t.Error("opened behind a closed gate")
	}
	_ = first.Close()
	if third, err := connect(t, dsn); err != nil || third.Gate() != second.Gate() {
		t.Errorf("the closing of the first took the second out of the registry: %v", err)
	}
	if _, err := connect(t, dsnForms["URL"]("pool_max_conns", "8"), WithGate(first.Gate())); err == nil || !strings.Contains(err.Error(), "WithGate) is closed") {
		t.Errorf("%v", err)
	}
}

// What the environment names is one database, however often it is opened.
func TestDatabaseOfTheEnvironmentHasOneGate(t *testing.T) {
	t.Setenv("PGHOST", "somewhere")
	a, err := connect(t, "")
	if err != nil {
		t.Fatal(err)
	}
	b, err := connect(t, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGHOST", "elsewhere")
	c, err := connect(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if a.Gate() != b.Gate() || a.Gate() == c.Gate() {
		t.Errorf("gates %q, %q and, elsewhere, %q", a.Gate().Name(), b.Gate().Name(), c.Gate().Name())
	}
}

// WithGate: nothing beside it that is not the gate's own; it is not closed with the database.
func TestWithGate(t *testing.T) {
	g, err := NewGate("mine", Limits{2, 3, time.Second}, WithWorkloads(map[string]Limits{"w": {Running: 1}}))
	if err != nil {
		t.Fatal(err)
	}
	dsn := func(pairs ...string) string { return dsnForms["URL"](append(pairs, "pool_max_conns", "8")...) }
	for _, opts := range [][]Option{
		{}, {WithLimits(Limits{2, 3, time.Second})}, {WithGateName("mine")}, {WithMode(Enforce)}, {WithDeadlineAdmission(true)},
		{WithWorkloads(map[string]Limits{"w": {Running: 1}})}, {WithLeakThreshold(0)}, {WithScope(ScopeTx)},
	} {
		c, err := connect(t, dsn(), append(opts, WithGate(g))...)
		if err != nil {
			t.Fatal(err)
		}
		if c.Gate() != g {
			t.Error("another gate")
		}
	}
	if _, err := connect(t, dsn("gate_running", "2"), WithGate(g)); err != nil {
		t.Errorf("its own limit, and nothing said of the others: %v", err)
	}
	for key, o := range map[string]Option{
		"gate_running": WithLimits(Limits{3, 3, time.Second}), "gate_waiting": WithLimits(Limits{2, 4, time.Second}),
		"gate_max_wait": WithLimits(Limits{2, 3, 0}), "gate_name": WithGateName("other"), "gate_mode": WithMode(Observe),
		"gate_deadline_admission": WithDeadlineAdmission(false), "gate_workloads": WithWorkloads(map[string]Limits{"v": {Running: 1}}),
		"gate_leak_threshold": WithLeakThreshold(time.Second),
	} {
		if _, err := connect(t, dsn(), o, WithGate(g)); err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), `"mine"`) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if _, err := connect(t, dsn("gate_max_wait", "2s"), WithGate(g)); err == nil || !strings.Contains(err.Error(), "gate_max_wait") {
		t.Errorf("by DSN: %v", err)
	}
	if _, err := connect(t, dsnForms["URL"]("pool_max_conns", "1"), WithGate(g)); err == nil || !strings.Contains(err.Error(), "pool_max_conns 1") {
		t.Errorf("B > P: %v", err)
	}
	if _, err := connect(t, dsn("gate_drain_grace", "2s", "gate_drain_limit", "1s"), WithGate(g)); err == nil || !strings.Contains(err.Error(), "gate_drain_grace") {
		t.Errorf("settings of the database are checked beside WithGate, too: %v", err)
	}
	x, err := NewConnector(dsn(), WithGate(g))
	if err != nil {
		t.Fatal(err)
	}
	_ = x.Close()
	mustAcquire(t, g, context.Background()).Release()
}

// A short gate_drain_limit alone does not contradict the default of gate_drain_grace.
func TestDrainLimitAlone(t *testing.T) {
	c, err := connect(t, dsnForms["URL"]("gate_drain_limit", "200ms"))
	if err != nil {
		t.Fatal(err)
	}
	if c.cfg.drainGrace > c.cfg.drainLimit {
		t.Errorf("grace %v, limit %v", c.cfg.drainGrace, c.cfg.drainLimit)
	}
}

// Nil arguments, and a pool without a bound, are errors and not panics.
func TestNilArgumentsAndUnboundedPool(t *testing.T) {
	f := &fakeDriver{}
	unbounded := sql.OpenDB(f)
	defer unbounded.Close()
	bounded := sql.OpenDB(f)
	defer bounded.Close()
	bounded.SetMaxOpenConns(4)
	limits := WithLimits(Limits{Running: 4})
	closed := sql.OpenDB(f)
	_ = closed.Close()
	gated, err := OpenDB(bounded, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer gated.Close()
	for name, do := range map[string]func() error{
		"the pool is nil":               func() error { _, err := OpenDB(nil, limits); return err },
		"pool is nil":                   func() error { _, err := OpenDBFromPool(nil, limits); return err },
		"an Option is nil":              func() error { _, err := OpenDB(bounded, nil); return err },
		"WithGate: the gate is nil":     func() error { _, err := OpenDB(bounded, WithGate(nil)); return err },
		"WithLogger: the logger is nil": func() error { _, err := OpenDB(bounded, WithLogger(nil)); return err },
		"an interceptor is nil":         func() error { _, err := OpenDB(bounded, WithInterceptors(sqlmw.NullInterceptor{}, nil)); return err },
		"GateOption is nil":             func() error { _, err := NewGate("g", Limits{Running: 1}, nil); return err },
		"limits must be given":          func() error { _, err := OpenDB(unbounded); return err },
		"MaxOpenConns 4":                func() error { _, err := OpenDB(bounded, WithLimits(Limits{Running: 5})); return err },
		"database is closed":            func() error { _, err := OpenDB(closed, limits); return err },
		"behind gate":                   func() error { _, err := OpenDB(gated, WithGate(GateOf(gated))); return err },
	} {
		if err := do(); err == nil || !strings.Contains(err.Error(), name) || !strings.HasPrefix(err.Error(), "pgxgated: ") {
			t.Errorf("%q: %v", name, err)
		}
	}
	db, err := OpenDB(unbounded, limits)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if db, err = OpenDB(bounded); err != nil {
		t.Fatal(err)
	}
	if l := GateOf(db).Stats().Limits; l.Running != 3 {
		t.Errorf("%v, want 0.8 of 4", l)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
}

// One warning at open where the limits follow from pgxpool's default, and none otherwise.
func TestWarnsWhereThePoolHasItsDefaultSize(t *testing.T) {
	for _, c := range []struct {
		pairs []string
		want  int
	}{{nil, 1}, {[]string{"gate_waiting", "9"}, 1}, {[]string{"pool_max_conns", "4"}, 0}, {[]string{"gate_running", "2"}, 0}} {
		log := &logBook{}
		x, err := NewConnector(dsnForms["URL"](c.pairs...), WithLogger(log.logger()))
		if err != nil {
			t.Fatal(err)
		}
		_ = x.Close()
		if n := log.count("level=WARN"); n != c.want {
			t.Errorf("%v: %d warnings, want %d", c.pairs, n, c.want)
		}
		if c.want == 1 {
			p := max(4, runtime.NumCPU())
			for _, part := range []string{fmt.Sprintf("pool_max_conns=%d", p), fmt.Sprintf("gate_running=%d", max(1, p*8/10)), "gate_waiting="} {
				if log.count(part) != 1 {
					t.Errorf("the warning lacks %s", part)
				}
			}
		}
	}
}

// H01: our keys and the pool's never reach the server, pgx's own are honoured, and the server's stay.
func TestH01KeysThatReachTheServer(t *testing.T) {
	for form, dsn := range dsnForms {
		t.Run(form, func(t *testing.T) {
			d, err := parseDSN(dsn("gate_running", "2", "gate_name", "a b", "pool_max_conns", "9", "pool_min_conns", "1",
				"default_query_exec_mode", "simple_protocol", "statement_cache_capacity", "0", "application_name", "it's", "search_path", "x"))
			if err != nil {
				t.Fatal(err)
			}
			cc := d.pool.ConnConfig
			if got := fmt.Sprint(cc.RuntimeParams); got != "map[application_name:it's search_path:x]" {
				t.Errorf("sent to the server: %s", got)
			}
			if d.pool.MaxConns != 9 || d.pool.MinConns != 1 || cc.DefaultQueryExecMode.String() != "simple protocol" || cc.StatementCacheCapacity != 0 || cc.Password != "pw" {
				t.Errorf("%+v", cc)
			}
			if fmt.Sprint(d.keys) != "map[gate_name:a b gate_running:2]" {
				t.Errorf("%v", d.keys)
			}
		})
	}
}

// checkSecret looks for the secret in an error and in all that it wraps.
func checkSecret(t testing.TB, dsn string, err error, secrets ...string) {
	t.Helper()
	if err == nil {
		return
	}
	for _, s := range secrets {
		if strings.Contains(err.Error(), s) || strings.Contains(fmt.Sprintf("%+v %#v", err, err), s) {
			t.Errorf("DSN %q: %q shows %q", dsn, err, s)
		}
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		checkSecret(t, dsn, e.Unwrap(), secrets...)
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			checkSecret(t, dsn, err, secrets...)
		}
	}
}

// dsnsWith are DSNs with a password in many shapes, good and malformed.
func dsnsWith(password, tail string) []string {
	quoted := "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "'"
	return []string{
		"postgres://u:" + password + "@h/d?" + tail,
		"postgres://u:" + url.QueryEscape(password) + "@h/d?" + tail,
		"postgres://u:" + password + "@h:port/d?" + tail,
		"postgres://u:" + password + "@[::1/d?" + tail,
		"postgres://u:" + password + "@h/d?%zz&" + tail,
		"postgres://h/d?password=" + password + "&" + tail,
		"postgres://h/d?password=" + url.QueryEscape(password) + "&" + tail,
		"postgresql://u:" + password + " @h/d?" + tail,
		"postgres:u:" + password + "@h/d?" + tail,
		"Postgres://u:" + password + "@h/d?" + tail,
		"u:" + password + "@h/d?" + tail,
		" postgres://u:" + password + "@h/d?" + tail,
		"postgresql+psycopg://u:" + password + "@h/d?" + tail,
		"postgres://u:/" + password + "@h/d?" + tail,
		"postgres://u:9/" + password + "@h/d?" + tail,
		"application_name= password=" + password + " " + tail,
		"user=u password=" + password + " host=h " + tail,
		"user=u password=" + quoted + " host=h " + tail,
		"user=u password='" + password + " host=h " + tail,
		"user=u password = " + password + " host='h " + tail,
		"password=" + password,
		"host=h " + tail + " password=" + password,
		"gate_running= password=" + password + " " + tail,
		"gate_name= password=" + password + " " + tail,
		"gate_max_wait= password=" + password + " " + tail,
		"gate_scope= password=" + password + " " + tail,
		"gate_mode= password=" + password + " " + tail,
		"gate_server_deadline= password=" + password + " " + tail,
		"gate_workloads= password=" + password + " " + tail,
		"connect_timeout= password=" + password + " " + tail,
		"pool_max_conns= password=" + password + " " + tail,
		"target_session_attrs= password=" + password + " " + tail,
		"port= password=" + password + " " + tail,
		"min_protocol_version= password=" + password + " " + tail,
		"default_query_exec_mode= password=" + password + " " + tail,
		"sslmode= password=" + password + " " + tail,
		"require_auth= password=" + password + " " + tail,
		"dbname= password=" + password + " " + tail,
		"host= password=" + password + " " + tail,
		"user=u sslpassword=" + quoted + " sslmode=verify-full sslcert=/none sslkey=/none " + tail,
	}
}

// No error text shows a password, whatever is wrong with the DSN and whatever the password is made of.
func TestPasswordIsInNoErrorText(t *testing.T) {
	for _, middle := range []string{"", "@", ":", "/", "?", "#", "%", "%zz", "&", "=", " ", "'", `\`, "\"", "`: ", "[", "]", "://", "@h:1/", "\n", "é", "'x=", "x' y=", "+"} {
		password := "S3CRETA" + middle + "S3CRETB"
		for _, tail := range []string{"", "gate_running=x", "gate_runing=1", "gate_running=1 gate_running=1", "gate_running=1&gate_running=1",
			"pool_max_conns=x", "connect_timeout=x", "sslmode=x", "port=99999999", "pool_max_conns=1&gate_running=2", "target_session_attrs=x", "broken"} {
			for _, dsn := range dsnsWith(password, tail) {
				log := &logBook{}
				c, err := NewConnector(dsn, WithLogger(log.logger()))
				if err == nil {
					_ = c.Close()
					checkNotSent(t, dsn, "S3CRETA", "S3CRETB")
				}
				if log.count("S3CRET") > 0 {
					t.Errorf("DSN %q: %q", dsn, log.lines)
				}
				checkSecret(t, dsn, err, "S3CRETA", "S3CRETB")
			}
		}
	}
}

// checkNotSent looks for a password where it would be shown by the first connection's error, or be sent to some server in the clear:
// in what else the DSN was understood to say.
func checkNotSent(t *testing.T, s string, secrets ...string) {
	d, err := parseDSN(s)
	if err != nil {
		t.Fatal(err)
	}
	cc := d.pool.ConnConfig
	said := fmt.Sprintf("host %s, user %s, database %s, others %v", cc.Host, cc.User, cc.Database, slices.Sorted(maps.Keys(cc.RuntimeParams)))
	for _, secret := range secrets {
		if strings.Contains(said, secret) {
			t.Errorf("DSN %q opens with %s", s, said)
		}
	}
}

// FuzzDSN: no DSN makes the parser panic, no error shows the password, no gate_* or pool_* key stays for the server.
func FuzzDSN(f *testing.F) {
	for i := range dsnsWith("", "") {
		f.Add(uint8(i), "@", "gate_running=4&gate_max_wait=1s")
		f.Add(uint8(i), "' ", "gate_running=4 gate_name='a b'")
		f.Add(uint8(i), "%2", "gate_runing=4")
	}
	f.Fuzz(func(t *testing.T, form uint8, middle, tail string) {
		all := strings.ToLower(middle + tail)
		if strings.Contains(all, "service") || strings.Contains(all, "passfile") || strings.Contains(all, "ssl") {
			t.Skip("reads files")
		}
		if strings.Contains(strings.ToLower(middle), "gate_") || strings.Contains(strings.ToLower(middle), "pool_") {
			t.Skip("no parser could tell it from a key")
		}
		dsns := dsnsWith("S3CRETA"+middle+"S3CRETB", tail)
		s := dsns[int(form)%len(dsns)]
		d, err := parseDSN(s)
		if err != nil {
			checkSecret(t, s, err, "S3CRETA", "S3CRETB")
			return
		}
		for k := range d.pool.ConnConfig.RuntimeParams {
			if k := strings.ToLower(k); strings.HasPrefix(k, "gate_") || strings.HasPrefix(k, "pool_") {
				t.Errorf("DSN %q: %s stays for the server", s, k)
			}
		}
		cfg := defaultConfig()
		checkSecret(t, s, cfg.applyDSN(d.keys), "S3CRETA", "S3CRETB")
		_, err = cfg.resolve(int(d.pool.MaxConns), "")
		checkSecret(t, s, err, "S3CRETA", "S3CRETB")
	})
}
