// Package telemetry is the seam between the gate and package metrics: what the former observes and only the latter turns
// into histograms, so that nobody links a metrics library who does not want one.
package telemetry

import "time"

// Sink receives observations. It is called on hot paths, concurrently, and must neither block nor allocate.
type Sink interface {
	SQL(op string, d time.Duration, class string) // class is "" without an error, else a fixed enum
	Transaction(outcome string)
}

// Attach makes a gate (a *pgxgated.Gate) report to s, instead of what it reported to before; nil ends it. Set by
// pgxgated.
var Attach func(gate any, s Sink)
