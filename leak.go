package pgxgated

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"time"
)

// leakWatch reports leases that are held longer than gate_leak_threshold: one record when the threshold passes, with the
// stack that took the lease, and one more when it comes back, so that a long transaction can be told from a forgotten one.
// It ends nothing and releases nothing. A nil leakWatch, which is gate_leak_threshold 0, does nothing.
//
// It costs nothing while off. On, each lease costs 0.5 µs (a permit taken by hand) to 2 µs (below database/sql, by the depth of
// the stack) and no allocation, and each statement some 50 ns of that.
//
// There is one timer for the gate, armed while permits are out, for the moment at which the first of them may be overdue:
// one per lease would cost as much again as the stack.
type leakWatch struct {
	g         *Gate
	threshold time.Duration
	timer     *time.Timer // guarded by Gate.mu, with what follows
	armed     bool
	overdue   int
}

// trace is what a leak report says of a lease. It belongs to its slot, which uses it again.
type trace struct {
	pcs      [32]uintptr
	depth    int
	last     statementKind
	reported bool
}

// took keeps the stack that took a permit.
func (l *leakWatch) took(h handle) {
	if l == nil || h.gen == 0 {
		return
	}
	var pcs [32]uintptr
	depth := runtime.Callers(3, pcs[:]) // without Callers, this and Gate.acquire
	l.g.mu.Lock()
	defer l.g.mu.Unlock()
	s := l.g.slotLocked(h)
	if s == nil {
		return
	}
	if s.trace == nil {
		s.trace = new(trace)
	}
	s.trace.depth, s.trace.last, s.trace.reported = copy(s.trace.pcs[:], pcs[:depth]), 0, false
	if !l.armed {
		l.armLocked(l.threshold)
	}
}

func (l *leakWatch) armLocked(d time.Duration) {
	l.armed = true
	if l.timer == nil {
		l.timer = time.AfterFunc(d, l.look)
	} else {
		l.timer.Reset(d)
	}
}

// ran keeps what kind of statement a lease ran last.
func (l *leakWatch) ran(h handle, query string) {
	if l == nil || h.gen == 0 {
		return
	}
	k := statementKindOf(query)
	l.g.mu.Lock()
	if s := l.g.slotLocked(h); s != nil && s.trace != nil {
		s.trace.last = k
	}
	l.g.mu.Unlock()
}

// look reports what has become overdue and arms the timer for what may be next.
func (l *leakWatch) look() {
	g := l.g
	var reports []leakReport
	g.mu.Lock()
	now := g.now()
	l.armed = false
	next := l.threshold
	for i := range g.slots {
		s := &g.slots[i]
		if s.gen&1 == 0 || s.trace == nil || s.trace.depth == 0 || s.trace.reported {
			continue
		}
		l.armed = true
		if left := s.since + l.threshold - now; left > 0 {
			next = min(next, left)
			continue
		}
		s.trace.reported = true
		l.overdue++
		reports = append(reports, leakReport{
			log: g.log, gate: g.name, workload: s.b.name, kind: s.kind, held: now - s.since, threshold: l.threshold,
			draining: s.draining, trace: *s.trace,
		})
	}
	if l.armed {
		l.armLocked(next)
	}
	g.mu.Unlock()
	for i := range reports {
		reports[i].overdue()
	}
}

// returnedLocked forgets a lease that ends, and returns what is to be said of it: nil unless it was reported.
func (l *leakWatch) returnedLocked(s *slot, now time.Duration) *leakReport {
	if l == nil || s.trace == nil {
		return nil
	}
	var r *leakReport
	if s.trace.reported {
		l.overdue--
		r = &leakReport{log: l.g.log, gate: l.g.name, workload: s.b.name, kind: s.kind, held: now - s.since, trace: *s.trace}
	}
	s.trace.depth, s.trace.reported = 0, false
	return r
}

// leakReport is what is logged of an overdue lease.
type leakReport struct {
	log       *slog.Logger
	gate      string
	workload  string
	kind      kind
	held      time.Duration
	threshold time.Duration
	draining  bool
	trace     trace
}

func (r *leakReport) overdue() {
	r.log.Warn("pgxgated: lease held longer than gate_leak_threshold; it stays held",
		"gate", r.gate, "workload", r.workload, "kind", r.kind.String(), "held", r.held, "threshold", r.threshold,
		"last_statement", r.trace.last.String(), "draining", r.draining, "taken_at", r.trace.site(), "stack", r.trace.stack())
}

// logReturn tells that a lease that was reported has come back.
func (r *leakReport) logReturn() {
	if r == nil {
		return
	}
	r.log.Warn("pgxgated: overdue lease returned after "+r.held.Round(time.Millisecond).String(),
		"gate", r.gate, "workload", r.workload, "kind", r.kind.String(), "held", r.held,
		"last_statement", r.trace.last.String(), "taken_at", r.trace.site())
}

// frames yields the frames of the stack from the caller of this package on: what is ours and on top says nothing.
func (t *trace) frames(yield func(runtime.Frame) bool) {
	if t.depth == 0 {
		return
	}
	frames := runtime.CallersFrames(t.pcs[:t.depth])
	top := true
	for {
		f, more := frames.Next()
		if top = top && strings.HasPrefix(f.Function, "github.com/pgxgated/pgxgated.(*"); !top && !yield(f) {
			return
		}
		if !more {
			return
		}
	}
}

func (t *trace) stack() string {
	var b strings.Builder
	for f := range t.frames {
		fmt.Fprintf(&b, "%s\n\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// site is the first frame that is neither ours nor database/sql's.
func (t *trace) site() string {
	for f := range t.frames {
		if !strings.HasPrefix(f.Function, "database/sql.") && !strings.HasPrefix(f.Function, "github.com/pgxgated/pgxgated.InTx") {
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		}
	}
	return ""
}

// statementKind is what may be told of a statement: its first word, if that is one of these.
type statementKind uint8

var statementKinds = [...]string{
	"none", "other", "select", "insert", "update", "delete", "merge", "with", "values", "table", "copy", "call", "do",
	"begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release", "set", "reset", "show", "lock",
	"listen", "notify", "declare", "fetch", "close", "execute", "prepare", "deallocate", "discard", "explain", "analyze",
	"vacuum", "refresh", "create", "alter", "drop", "truncate", "comment", "grant", "revoke",
}

func (k statementKind) String() string { return statementKinds[k] }

var statementKindByWord = func() map[string]statementKind {
	m := make(map[string]statementKind)
	for i, w := range statementKinds[2:] {
		m[w] = statementKind(i + 2)
	}
	return m
}()

func statementKindOf(query string) statementKind {
	query = afterComments(query)
	var word [16]byte
	n := 0
	for n < len(query) && n < len(word) {
		c := query[n] | 0x20
		if c < 'a' || c > 'z' {
			break
		}
		word[n] = c
		n++
	}
	if k, ok := statementKindByWord[string(word[:n])]; ok {
		return k
	}
	return 1 // other
}

// afterComments is the query without the blanks, parentheses and comments that it begins with; tools put names there.
func afterComments(q string) string {
	for {
		q = strings.TrimLeft(q, " \t\n\r\f\v(;")
		switch {
		case strings.HasPrefix(q, "--"):
			_, q, _ = strings.Cut(q, "\n")
		case strings.HasPrefix(q, "/*"):
			depth, i := 1, 2
			for depth > 0 && i < len(q) {
				switch {
				case strings.HasPrefix(q[i:], "/*"):
					depth, i = depth+1, i+2
				case strings.HasPrefix(q[i:], "*/"):
					depth, i = depth-1, i+2
				default:
					i++
				}
			}
			q = q[i:]
		default:
			return q
		}
	}
}
