//go:build unix

package main

import (
	"bytes"
	"fmt"
	"strconv"
	"text/tabwriter"
)

// ratioTable is the summary: pgx-gated against each peer, of what is on disk.
func ratioTable(dir string) (*table, error) {
	t := newTable("ratios", "experiment", "what", "peer", "peer_has", "pgx_gated_has", "ratio")
	var fault error
	compare := func(name, experiment, what, column string, pairs ...string) {
		src, err := readTable(dir, name)
		if err != nil {
			fault = err
			return
		}
		ours, ok := src.value(column, append([]string{"peer", gated}, pairs...)...)
		if !ok {
			return
		}
		for _, p := range src.distinct("peer") {
			theirs, ok := src.value(column, append([]string{"peer", p}, pairs...)...)
			if p == gated || !ok {
				continue
			}
			ratio := "-"
			if theirs != 0 {
				ratio = fmt.Sprintf("%.3f", ours/theirs)
			}
			t.add(experiment, what, p, theirs, ours, ratio)
		}
	}
	for _, x := range []string{"0.25", "0.5", "1", "3", "10"} {
		what, column := goodputAt(x)
		compare("overload", "a", what, column, "load", x)
	}
	for _, x := range []string{"1", "10"} {
		compare("overload", "a", "p99 ms at "+x+"×", "p99_ms", "load", x)
	}
	compare("storm", "b", "goodput/s", "goodput_per_s")
	compare("storm", "b", "goodput/s, cold", "goodput_cold_per_s")
	compare("storm", "b", "over-limits", "over_limits")
	compare("storm", "b", "connections made", "connections_made")
	compare("storm", "b", "server ms per commit", "server_cpu_ms_per_commit")
	compare("isolation", "c", "% in time beside a flood", "ok_percent", "flood", "true")
	compare("isolation", "c", "p99 ms beside a flood", "p99_ms", "flood", "true")
	compare("tail", "d", "wait p99 ms", "wait_p99_ms")
	compare("tail", "d", "wait max ms", "wait_max_ms")
	compare("recovery", "e", "recovered after s", "recovered_after_s")
	compare("recovery", "e", "connections made", "connections_made")
	for _, network := range []string{"loopback", "0.5 ms each way"} {
		for _, callers := range []string{"1", "8", "64"} {
			compare("steady", "f", "tx/s, "+callers+" callers, "+network, "tx_per_s", "network", network, "callers", callers)
		}
	}
	compare("waiters", "g", "bytes per waiter", "bytes_per_waiter")
	compare("waiters", "g", "ms/s while waiting", "waiting_cpu_ms_per_s")
	for _, op := range []string{"acquire and release", "refuse", "hand over"} {
		for _, n := range []string{"1", "2", "8", "64"} {
			compare("gate", "h", "ns, "+op+", "+n+" goroutines", "ns_per_op", "operation", op, "goroutines", n)
		}
	}
	return t, fault
}

// aligned is the table as text for a terminal.
func (t *table) aligned() string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{t.columns}, t.rows...) {
		for _, v := range row {
			fmt.Fprint(w, v, "\t")
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush()
	return b.String()
}

// goodputAt is by what peers are compared at a load: below capacity by how many of those that came were served in time, since
// how many came is chance.
func goodputAt(load string) (what, column string) {
	if x, err := strconv.ParseFloat(load, 64); err == nil && x < 1 {
		return "served in time at " + load + "×", "ok_share"
	}
	return "goodput at " + load + "×, of capacity", "goodput_of_capacity"
}
