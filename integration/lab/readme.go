//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"text/template"
)

const beginCost, endCost = "<!-- cost:begin -->\n", "<!-- cost:end -->"

// writeReadme puts the section "Cost" between its two marks, made of the CSV files, so that its text and the figures cannot
// drift apart. An experiment that was not measured is not mentioned.
func writeReadme(readme, dir string) error {
	old, err := os.ReadFile(readme)
	if err != nil {
		return err
	}
	head, rest, ok := bytes.Cut(old, []byte(beginCost))
	_, tail, ok2 := bytes.Cut(rest, []byte(endCost))
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", readme, strings.TrimSpace(beginCost), endCost)
	}
	text, err := costSection(dir)
	if err != nil {
		return err
	}
	return os.WriteFile(readme, bytes.Join([][]byte{head, []byte(beginCost), []byte(text), []byte(endCost), tail}, nil), 0o644)
}

func costSection(dir string) (text string, err error) {
	defer func() {
		if p := recover(); p != nil { // a CSV file of another version
			err = fmt.Errorf("%v", p)
		}
	}()
	r := results{}
	for _, name := range []string{"machine", "overload", "storm", "isolation", "tail", "recovery", "steady", "waiters", "gate"} {
		t, err := readTable(dir, name)
		if err != nil {
			return "", err
		}
		r[name] = t
	}
	if r["machine"] == nil {
		return "", errors.New("nothing was measured yet: run the lab")
	}
	var b strings.Builder
	err = costTemplate.Execute(&b, r)
	return b.String(), err
}

// results are the tables by name, nil where there is none.
type results map[string]*table

// Is is a line of machine.csv.
func (r results) Is(what string) string {
	for _, row := range r["machine"].where("what", what) {
		return r["machine"].text(row, "is")
	}
	return "unknown"
}

func (r results) Has(name string) bool { return r[name] != nil && len(r[name].rows) > 0 }

// Get is a value of pgx-gated, or of a peer where pairs name one, with about three digits.
func (r results) Get(name, column string, pairs ...string) string {
	named := false
	for i := 0; i < len(pairs); i += 2 {
		named = named || pairs[i] == "peer"
	}
	if !named && hasColumn(r[name], "peer") {
		pairs = append([]string{"peer", gated}, pairs...)
	}
	v, ok := r[name].value(column, pairs...)
	if !ok || v == 0 && strings.HasSuffix(column, "p99_ms") { // the latency of nothing
		return "–"
	}
	return short(v)
}

func hasColumn(t *table, column string) bool {
	for _, c := range t.columns {
		if c == column {
			return true
		}
	}
	return false
}

// Peers are those of a table, pgx-gated in bold.
func (r results) Peers(name string) (peers []string) { return r[name].distinct("peer") }

func (r results) Show(peer string) string {
	if peer == gated {
		return "**" + peer + "**"
	}
	return peer
}

// Percent is what a share is of a hundred.
func (r results) Percent(name, column string, pairs ...string) string {
	v, ok := r[name].value(column, pairs...)
	if !ok {
		return "–"
	}
	return fmt.Sprintf("%.3g %%", 100*v)
}

// OfBest is pgx-gated's goodput at a load as a share of the best that it showed at any load.
func (r results) OfBest(load string) string {
	t := r["overload"]
	best := 0.0
	for _, row := range t.where("peer", gated) {
		best = max(best, t.float(row, "goodput_of_capacity"))
	}
	v, ok := t.value("goodput_of_capacity", "peer", gated, "load", load)
	if !ok || best == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", v/best)
}

// win is a figure by which a peer does better than pgx-gated.
type win struct {
	Peer, What, Theirs, Ours, Why string
}

// why are the reasons, by experiment and peer ("" for every other one). A peer that wins by much for a reason that nobody
// has thought about is said to win without one.
var why = map[string]map[string]string{
	"overload": {
		plain:      "its random order serves some that have just come and so have most of their time left; and it has one operation more at the server",
		unlimited:  "it lets everything at the server, which pays as long as there is room",
		pool:       "no `database/sql` above it, and one operation more at the server",
		adaptive:   "it refuses most of a queue at once, so that those it lets in have most of their time left",
		semaphores: "it gives its permit to the next one before the server is done with the last",
		bulkheads:  "it gives its permit to the next one before the server is done with the last",
		bouncer:    "it keeps more callers waiting, which pays as long as they have the time",
	},
	"storm": {
		"":       "it counts an operation as ended when its caller has gone, and puts the next one beside it",
		plain:    "its random order serves some that have just come and so have most of their time left; and it has one operation more",
		adaptive: "it refuses most of a queue at once, so that those it lets in have most of their time left",
		bouncer:  "it keeps the server's connections when clients come and go",
	},
	"isolation": {
		twoPools:   "a pool each isolates as well, where it can be divided for good: what one does not use the other cannot have",
		bulkheads:  "a bulkhead each isolates as well, without a bound on both together",
		semaphores: "a pair each isolates as well, without a bound on both together",
		bouncer:    "a pool each isolates as well, where it can be divided for good",
	},
	"tail":     {"": "it serves in order of arrival, too", plain: "its order is random: the median gains what the tail loses"},
	"recovery": {"": "it does not wait for the proof that the server has done with what was cut off"},
	"steady": {
		plain:      "nothing between `database/sql` and pgx",
		pool:       "neither `database/sql` nor a gate above it",
		semaphores: "it counts nothing, reads no clock, and bounds a wait only by a context",
		bulkheads:  "a channel of permits: no bound on how many wait, nothing counted",
	},
	"waiters": {
		plain:      "a waiter has no timer: nothing bounds its wait but its context",
		semaphores: "a waiter has one context with a timer, and nobody counts it",
		bulkheads:  "a waiter is a goroutine at a channel: nobody counts it",
		pool:       "neither `database/sql` nor a gate above it",
	},
	"gate": {
		bulkheads:  "a channel of permits: no bound on how many wait, no deadlines, nothing counted, no reasons given",
		semaphores: "no clock is read, a wait has no timer, nothing is counted, no reasons are given",
		adaptive:   "it makes no error that says what was full",
	},
}

// Wins are the figures of the tables in which a peer does better by more than margin, the peers of one figure together.
func (r results) Wins() (wins []win) {
	const margin, noise = 0.03, 0.08
	add := func(name, what, column string, lower bool, pairs ...string) {
		t := r[name]
		ours, ok := t.value(column, append([]string{"peer", gated}, pairs...)...)
		if !ok {
			return
		}
		for _, p := range t.distinct("peer") {
			theirs, ok := t.value(column, append([]string{"peer", p}, pairs...)...)
			if !ok || p == gated || theirs < 0 {
				continue
			}
			if lower && theirs < ours*(1-margin) || !lower && theirs > ours*(1+margin) {
				reason := why[name][p]
				switch gap := math.Abs(theirs-ours) / max(math.Abs(theirs), math.Abs(ours)); {
				case gap < noise:
					reason = "within what runs differ by"
				case reason == "" && why[name][""] == "":
					reason = "not known"
				case reason == "":
					reason = why[name][""]
				}
				wins = append(wins, win{p, what, short(theirs), short(ours), reason})
			}
		}
	}
	if r.Has("overload") {
		for _, x := range r["overload"].distinct("load") {
			what, column := goodputAt(x)
			add("overload", what, column, false, "load", x)
		}
	}
	add("storm", "goodput/s in the storm", "goodput_per_s", false)
	add("storm", "goodput/s starting into the storm", "goodput_cold_per_s", false)
	add("storm", "connections made in the storm", "connections_made", true)
	add("isolation", "short ones in time beside a flood, %", "ok_percent", false, "flood", "true")
	add("isolation", "p99 of the short ones beside a flood, ms", "p99_ms", true, "flood", "true")
	add("tail", "wait p50, ms", "wait_p50_ms", true)
	add("tail", "wait p99, ms", "wait_p99_ms", true)
	add("recovery", "seconds to recover", "recovered_after_s", true)
	if r.Has("steady") {
		for _, network := range r["steady"].distinct("network") {
			for _, callers := range r["steady"].distinct("callers") {
				add("steady", "tx/s, callers: "+callers+", "+network, "tx_per_s", false, "network", network, "callers", callers)
			}
		}
	}
	add("waiters", "bytes per waiter", "bytes_per_waiter", true)
	add("waiters", "µs to give up", "cancel_us_per_waiter", true)
	add("waiters", "CPU ms a second of 10,000 that wait", "waiting_cpu_ms_per_s", true)
	if r.Has("gate") {
		for _, op := range r["gate"].distinct("operation") {
			add("gate", "ns, "+op+", 8 goroutines", "ns_per_op", true, "operation", op, "goroutines", "8")
		}
	}
	return wins
}

// Grouped are the wins by reason: fewer lines, and all that one peer wins for one reason in one of them.
func (r results) Grouped() (lines []string) {
	type key struct{ peer, why string }
	var order []key
	what := make(map[key][]string)
	for _, w := range r.Wins() {
		k := key{w.Peer, w.Why}
		if what[k] == nil {
			order = append(order, k)
		}
		what[k] = append(what[k], fmt.Sprintf("%s (%s against %s)", w.What, w.Theirs, w.Ours))
	}
	for _, k := range order {
		lines = append(lines, fmt.Sprintf("%s: %s. Why: %s.", k.peer, strings.Join(what[k], "; "), k.why))
	}
	return lines
}

var costTemplate = template.Must(template.New("cost").Parse(`## Cost
{{$r := .}}
Everything here was measured by ` + "`go -C integration run ./lab`" + ` on {{.Is "processors"}} processors ({{.Is "processor"}}, {{.Is "system"}}), {{.Is "go"}}, PostgreSQL {{.Is "postgresql"}}, {{.Is "pooler"}},
pgx {{.Is "github.com/jackc/pgx/v5"}}, failsafe-go {{.Is "github.com/failsafe-go/failsafe-go"}}, {{.Is "date"}}{{if eq (.Is "short") "true"}} (**a short run: orders of magnitude only**){{end}}; raw data, and every plot, in
[integration/lab/results](integration/lab/results). Peers take turns within one run; arrivals do not wait for answers, and latency counts from
the intended arrival. The collector runs at GOGC=400, as a service's heap is larger than the lab's. Absolute figures are the machine's, ratios carry over better.
{{if .Has "steady"}}
**Steady state**: BEGIN, SELECT 1, COMMIT as fast as it goes, 16 connections, as a ratio to plain pgx of the same moment (median of the rounds).

| | loopback, 1 caller | 8 | 64 | 0.5 ms each way, 1 caller | 8 | 64 |
| --- | --- | --- | --- | --- | --- | --- |
{{- range $p := .Peers "steady"}}
| {{$r.Show $p}} |{{range $net := $r.Networks}}{{range $n := $r.Callers}} {{$r.Get "steady" "ratio_to_plain" "peer" $p "network" $net "callers" $n}} |{{end}}{{end}}
{{- end}}

That is {{.Get "steady" "us_per_tx" "network" "loopback" "callers" "1"}} µs a transaction for one caller on loopback, and {{.Get "steady" "us_per_tx" "peer" "pgx, MaxOpenConns" "network" "loopback" "callers" "1"}} µs with plain pgx (medians of their own, so that their ratio is not quite the median of the ratios).
{{end -}}
{{if .Has "overload"}}
**Overload**: transactions of 4 ms of the server's processor, a pool of 5, the gate's defaults (4 running, 40 waiting, 100 ms), callers with 20 to 200 ms; what was finished in time,
as a share of what the machine could do at that moment. At 3× pgx-gated has {{.OfBest "3"}} of its best, at 10× {{.OfBest "10"}}. What it refuses at once is answered within {{.Get "overload" "refusal_p99_ms" "load" "10"}} ms (p99, at 10×), and what it lets in takes {{.Percent "overload" "admitted_p99_of_deadline" "peer" "pgx-gated" "load" "3"}} of its deadline
(p99, at 3×; {{.Percent "overload" "admitted_p99_of_deadline" "peer" "pgx-gated" "load" "10"}} at 10×).

| |{{range $x := .Loads}} {{$x}}× |{{end}} p99 at 1×, ms | at 10× |
| --- |{{range .Loads}} --- |{{end}} --- | --- |
{{- range $p := .Peers "overload"}}
| {{$r.Show $p}} |{{range $x := $r.Loads}} {{$r.Get "overload" "goodput_of_capacity" "peer" $p "load" $x}} |{{end}} {{$r.Get "overload" "p99_ms" "peer" $p "load" "1"}} | {{$r.Get "overload" "p99_ms" "peer" $p "load" "10"}} |
{{- end}}
{{end -}}
{{if .Has "storm"}}
**Cancel storm**: transactions of 20 ms, callers who give up after 0 to 120 ms, 3.5 × capacity. Over-limits are operations beyond the limit the peer was told, counted at the server.

| | limit | over-limits | connections made | goodput/s | of one that starts into the storm | server CPU a transaction, ms |
| --- | --- | --- | --- | --- | --- | --- |
{{- range $p := .Peers "storm"}}
| {{$r.Show $p}} | {{$r.Get "storm" "limit" "peer" $p}} | {{$r.Get "storm" "over_limits" "peer" $p}} | {{$r.Get "storm" "connections_made" "peer" $p}} | {{$r.Get "storm" "goodput_per_s" "peer" $p}} | {{$r.Get "storm" "goodput_cold_per_s" "peer" $p}} | {{$r.Get "storm" "server_cpu_ms_per_commit" "peer" $p}} |
{{- end}}
{{end -}}
{{if .Has "isolation"}}
**Isolation**: 150 short transactions per second, alone and beside three times as many long ones as fit; the long ones are a workload of their own (` + "`gate_workloads=batch:1+4`" + `) where the peer knows such a thing.

| | in time alone, % | beside a flood, % | p99 alone, ms | beside a flood |
| --- | --- | --- | --- | --- |
{{- range $p := .Peers "isolation"}}
| {{$r.Show $p}} | {{$r.Get "isolation" "ok_percent" "peer" $p "flood" "false"}} | {{$r.Get "isolation" "ok_percent" "peer" $p "flood" "true"}} | {{$r.Get "isolation" "p99_ms" "peer" $p "flood" "false"}} | {{$r.Get "isolation" "p99_ms" "peer" $p "flood" "true"}} |
{{- end}}
{{end -}}
{{if .Has "tail"}}
**Tail**: a burst of 320 callers on top of 0.9 × capacity, nobody refused: how long they wait for one of 16 connections.

| | p50, ms | p99 | longest |
| --- | --- | --- | --- |
{{- range $p := .Peers "tail"}}
| {{$r.Show $p}} | {{$r.Get "tail" "wait_p50_ms" "peer" $p}} | {{$r.Get "tail" "wait_p99_ms" "peer" $p}} | {{$r.Get "tail" "wait_max_ms" "peer" $p}} |
{{- end}}
{{end -}}
{{if .Has "recovery"}}
**Recovery**: the server stands still for a while under 0.7 × capacity; seconds until as many callers as before are served in time (-1: not within the time watched), in steps of 0.25 s.

| | seconds | connections made |
| --- | --- | --- |
{{- range $p := .Peers "recovery"}}
| {{$r.Show $p}} | {{$r.Get "recovery" "recovered_after_s" "peer" $p}} | {{$r.Get "recovery" "connections_made" "peer" $p}} |
{{- end}}
{{end -}}
{{if .Has "waiters"}}
**Waiting**: {{.Get "waiters" "waiters"}} callers who wait.

| | bytes each, goroutine included | µs to arrive | µs to give up | CPU ms a second while all wait |
| --- | --- | --- | --- | --- |
{{- range $p := .Peers "waiters"}}
| {{$r.Show $p}} | {{$r.Get "waiters" "bytes_per_waiter" "peer" $p}} | {{$r.Get "waiters" "arrive_us_per_waiter" "peer" $p}} | {{$r.Get "waiters" "cancel_us_per_waiter" "peer" $p}} | {{$r.Get "waiters" "waiting_cpu_ms_per_s" "peer" $p}} |
{{- end}}
{{end -}}
{{if .Has "gate"}}
**The gate alone**: ns per operation of all goroutines together.

| | acquire and release, 1 goroutine | 8 | refuse, 1 | 8 | hand over, 2 | 64 | allocations |
| --- | --- | --- | --- | --- | --- | --- | --- |
{{- range $p := .Peers "gate"}}
| {{$r.Show $p}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "acquire and release" "goroutines" "1"}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "acquire and release" "goroutines" "8"}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "refuse" "goroutines" "1"}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "refuse" "goroutines" "8"}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "hand over" "goroutines" "2"}} | {{$r.Get "gate" "ns_per_op" "peer" $p "operation" "hand over" "goroutines" "64"}} | {{$r.Get "gate" "allocs_per_op" "peer" $p "operation" "acquire and release" "goroutines" "1"}} |
{{- end}}
{{end}}
### Where something else does better

{{range .Grouped}}- {{.}}
{{else}}Nowhere in this run by more than 3 %.
{{end}}
`))

func (r results) Networks() []string { return r["steady"].distinct("network") }
func (r results) Callers() []string  { return r["steady"].distinct("callers") }
func (r results) Loads() []string    { return r["overload"].distinct("load") }
