// Package metrics reports gates to Prometheus.
//
//	registry.MustRegister(metrics.NewCollector(pgxgated.GateOf(db)))
//
// It is a package of its own so that only who wants it links client_golang, whose import registers the Go and process
// collectors with the default registry. Nothing of this package is registered on import.
//
// Every series has the label gate, and where it depends on it the label workload, which is empty for calls without one.
// Their other labels are fixed enumerations; there is no SQL, no error text and no part of a DSN but what is in the gate's
// name. Counters add up over workloads. The Stats method of *sql.DB, and so client_golang's collector for it, shows the logical
// connections of a gated database: it sees neither the gate's queue nor the pool's.
package metrics

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/internal/telemetry"
)

// NewCollector reports the gates; nil ones, such as [pgxgated.GateOf] returns for a database without, are left out. From
// then on each gate measures its waits and the server's answers, which costs 0.02 µs a permit taken by
// hand, 0.12 to 0.17 µs a statement, 0.2 to 0.4 µs a transaction with one statement, and no allocation (BenchmarkCost); without a
// collector it measures nothing. Counters that [pgxgated.Stats] has count from the gate's creation, the others
// from here. A gate may be in several collectors.
//
// A gate that is given twice is reported once. Of several gates with one name the second is labelled name#2, and so on;
// where they are in different collectors, the registry refuses the second with an error. It refuses a gate that it has
// already in the same way: use Register, not MustRegister, where that can happen. When a gate is closed, its series
// are gone; unregister its collector before a new one for a gate of the same name.
//
// Each Collect takes one snapshot of each gate and, if operations are at work, asks their server for lock waits: at most
// once a second, over a connection of its own, kept while scrapes go on, for at most a second. Safe for concurrent use.
func NewCollector(gates ...*pgxgated.Gate) prometheus.Collector {
	c := &collector{}
	taken := make(map[string]bool)
	seen := make(map[*pgxgated.Gate]bool)
	for _, g := range gates {
		if g == nil || seen[g] {
			continue
		}
		seen[g] = true
		name := strings.ToValidUTF8(g.Name(), "\uFFFD")
		for n, base := 2, name; taken[name]; n++ {
			name = fmt.Sprintf("%s#%d", base, n)
		}
		taken[name] = true
		labels := prometheus.Labels{"gate": name}
		s := &series{gate: g, recorder: telemetry.Attach(g), workloads: telemetry.Workloads(g), descs: make(map[string]*prometheus.Desc)}
		for _, m := range catalogue {
			s.descs[m.name] = prometheus.NewDesc(namespace+m.name, m.help, m.labels, labels)
		}
		c.gates = append(c.gates, s)
	}
	return c
}

const namespace = "pgxgated_"

// collector is a list of gates. It does not change; a gate that is closed stays in it, as the registry knows a collector
// by what it describes.
type collector struct{ gates []*series }

// series are those of one gate.
type series struct {
	gate      *pgxgated.Gate
	recorder  *telemetry.Recorder
	workloads []string // the first is "", for calls without one
	descs     map[string]*prometheus.Desc
}

// catalogue has every metric, without the namespace. labels are those beside gate.
var catalogue = []struct {
	name   string
	help   string
	labels []string
}{
	{"limit", "Permits there are, by permit; without a workload: the gate's own.", []string{"permit", "workload"}},
	{"available_permits", "Permits that are free, by permit; without a workload: the gate's own.", []string{"permit", "workload"}},
	{"max_wait_seconds", "Longest wait for a running permit before a call is refused.", nil},
	{"running", "Operations at work: they hold a running permit. Includes those that are draining.", []string{"workload"}},
	{"waiting", "Admitted operations that wait for a running permit.", []string{"workload"}},
	{"draining", "Operations whose caller is gone while the server is not yet known to be done.", []string{"workload"}},
	{"oldest_wait_seconds", "How long the first in the queue has waited.", []string{"workload"}},
	{"oldest_hold_seconds", "How long the permit that is out longest has been out.", []string{"workload"}},
	{"deadline_estimate_seconds", "The p10 of holds that deadline-aware admission compares a deadline with, by kind; 0: none yet.", []string{"kind", "workload"}},
	{"deadline_worthwhile_seconds", "The time that must be left of a deadline where more wait than run, by kind; 0: not known.", []string{"kind", "workload"}},
	{"leases_overdue", "Permits that have been out for longer than gate_leak_threshold.", nil},
	{"acquires_total", "Calls, by what the gate answered.", []string{"outcome", "workload"}},
	{"bypassed_total", "Calls that went past the gate with Bypass.", nil},
	{"would_reject_total", "Calls that enforce mode would have refused, in observe mode, by reason.", []string{"reason", "workload"}},
	{"drains_unproven_total", "Permits that came back without proof that the server was done.", nil},
	{"terminated_backends_total", "Backends that had to be terminated.", nil},
	{"gate_wait_seconds", "Wait of admitted calls for a running permit, whether it came or not.", []string{"workload"}},
	{"pool_wait_seconds", "Wait for a physical connection, with permits held.", []string{"workload"}},
	{"hold_seconds", "How long running permits were out, pool wait and draining included.", []string{"workload"}},
	{"sql_seconds", "Time from asking the server to its answer, by what it was asked; for a query up to its first row.", []string{"op"}},
	{"sql_errors_total", "Errors of the server, by SQLSTATE; no_answer: lost or cut off by the caller's context.", []string{"class"}},
	{"transactions_total", "Transactions that have ended, by outcome.", []string{"outcome"}},
	{"lock_waiting", "Operations that wait for a lock on the server, sampled on a scrape.", nil},
	{"lock_wait_seconds_total", "Time spent waiting for locks on the server, estimated from the samples.", nil},
	{"pool_connections", "Physical connections, by state.", []string{"state"}},
	{"pool_max_connections", "Physical connections that there may be; 0: no bound.", nil},
	{"pool_acquires_total", "Acquisitions of physical connections from the pool.", nil},
	{"pool_acquire_seconds_total", "Time spent acquiring physical connections from the pool.", nil},
	{"pool_empty_acquires_total", "Acquisitions that had to wait since no connection was idle.", nil},
	{"pool_empty_acquire_wait_seconds_total", "Time spent in acquisitions that had to wait.", nil},
	{"pool_canceled_acquires_total", "Acquisitions that their context ended.", nil},
	{"pool_errors_total", "Operations that held permits and got no physical connection, by reason.", []string{"reason"}},
	{"pool_new_connections_total", "Physical connections that the pool began to open.", nil},
	{"pool_lifetime_destroys_total", "Physical connections closed for their age.", nil},
	{"pool_idle_destroys_total", "Physical connections closed for being idle.", nil},
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range c.gates {
		for _, m := range catalogue {
			ch <- s.descs[m.name]
		}
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	var wg sync.WaitGroup
	for _, s := range c.gates {
		wg.Go(func() { s.collect(ch) }) // side by side: each may ask a server
	}
	wg.Wait()
}

func (s *series) collect(ch chan<- prometheus.Metric) {
	gauge := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(s.descs[name], prometheus.GaugeValue, v, labels...)
	}
	counter := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(s.descs[name], prometheus.CounterValue, v, labels...)
	}
	w, o, closed := telemetry.Snapshot(s.gate)
	if closed {
		return
	}
	whole, without := w.(pgxgated.Stats), o.(pgxgated.Stats)

	gauge("max_wait_seconds", whole.Limits.MaxWait.Seconds())
	gauge("leases_overdue", float64(whole.LeasesOverdue))
	counter("bypassed_total", float64(whole.Bypassed))
	counter("drains_unproven_total", float64(whole.DrainsUnproven))
	counter("terminated_backends_total", float64(whole.TerminatedBackends))
	for i, name := range s.workloads {
		// The level's own limits count what is in it: at the gate's, everything.
		level, of := whole, without
		if i > 0 {
			of = whole.Workloads[name]
			level = of
		}
		admission := level.Limits.Running + level.Limits.Waiting
		gauge("limit", float64(level.Limits.Running), "running", name)
		gauge("limit", float64(admission), "admission", name)
		gauge("available_permits", float64(max(level.Limits.Running-level.Running, 0)), "running", name)
		gauge("available_permits", float64(max(admission-level.Running-level.Waiting, 0)), "admission", name)
		gauge("running", float64(of.Running), name)
		gauge("waiting", float64(of.Waiting), name)
		gauge("draining", float64(of.Draining), name)
		gauge("oldest_wait_seconds", of.OldestWait.Seconds(), name)
		gauge("oldest_hold_seconds", of.OldestHold.Seconds(), name)
		for _, kind := range []string{"autocommit", "read", "tx"} {
			gauge("deadline_estimate_seconds", level.Estimates[kind].Seconds(), kind, name)
			gauge("deadline_worthwhile_seconds", level.Worthwhile[kind].Seconds(), kind, name)
		}
		counter("acquires_total", float64(of.Acquired), "admitted", name)
		counter("acquires_total", float64(of.AdmissionFull), "admission_full", name)
		counter("acquires_total", float64(of.WaitTimeout), "wait_timeout", name)
		counter("acquires_total", float64(of.DeadlineShort), "deadline_short", name)
		counter("acquires_total", float64(of.Canceled), "canceled", name)
		counter("acquires_total", float64(of.Closed), "closed", name)
		for _, reason := range slices.Sorted(maps.Keys(of.WouldReject)) {
			counter("would_reject_total", float64(of.WouldReject[reason]), reason, name)
		}
		ch <- newHistogram(s.descs["gate_wait_seconds"], s.recorder.GateWaits(i), name)
		ch <- newHistogram(s.descs["pool_wait_seconds"], s.recorder.PoolWaits(i), name)
		ch <- newHistogram(s.descs["hold_seconds"], s.recorder.Holds(i), name)
	}
	for op, name := range telemetry.Ops {
		ch <- newHistogram(s.descs["sql_seconds"], s.recorder.SQLs(telemetry.Op(op)), name)
	}
	for class, name := range telemetry.Classes {
		counter("sql_errors_total", float64(s.recorder.Errors(telemetry.Class(class))), name)
	}
	for outcome, name := range telemetry.Outcomes {
		counter("transactions_total", float64(s.recorder.Transactions(telemetry.Outcome(outcome))), name)
	}

	for reason, name := range telemetry.PoolErrorNames {
		counter("pool_errors_total", float64(s.recorder.PoolErrors(telemetry.PoolError(reason))), name)
	}

	p := telemetry.Pools(s.gate)
	gauge("pool_connections", float64(p.Acquired), "acquired")
	gauge("pool_connections", float64(p.Idle), "idle")
	gauge("pool_connections", float64(p.Constructing), "constructing")
	gauge("pool_max_connections", float64(p.Max))
	counter("pool_acquires_total", float64(p.Acquires))
	counter("pool_acquire_seconds_total", p.AcquireTime.Seconds())
	counter("pool_empty_acquires_total", float64(p.EmptyAcquires))
	counter("pool_empty_acquire_wait_seconds_total", p.EmptyAcquireTime.Seconds())
	counter("pool_canceled_acquires_total", float64(p.CanceledAcquires))
	counter("pool_new_connections_total", float64(p.NewConnections))
	counter("pool_lifetime_destroys_total", float64(p.LifetimeDestroys))
	counter("pool_idle_destroys_total", float64(p.IdleDestroys))

	locks := telemetry.LockWaits(s.gate)
	if locks.Known {
		gauge("lock_waiting", float64(locks.Waiting))
	}
	if locks.Known || locks.WaitTime > 0 {
		counter("lock_wait_seconds_total", locks.WaitTime.Seconds())
	}
}
