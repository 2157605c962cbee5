package pgxgated

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"
)

// semaphores are what people write by hand instead of a gate: one semaphore for admission, refused at once, and one for
// running, waited for. They bound no wait, tell no refusal from another, count nothing, and know nothing of deadlines.
type semaphores struct{ admission, running *semaphore.Weighted }

var errFull = errors.New("full")

func newSemaphores(running, waiting int64) *semaphores {
	return &semaphores{semaphore.NewWeighted(running + waiting), semaphore.NewWeighted(running)}
}

func (s *semaphores) acquire(ctx context.Context) error {
	if !s.admission.TryAcquire(1) {
		return errFull
	}
	if err := s.running.Acquire(ctx, 1); err != nil {
		s.admission.Release(1)
		return err
	}
	return nil
}

func (s *semaphores) release() {
	s.running.Release(1)
	s.admission.Release(1)
}

// peers runs a benchmark for the gate and for the two semaphores, in one table.
func peers(b *testing.B, name string, l Limits, run func(b *testing.B, pair func() error)) {
	ctx := context.Background()
	b.Run("gate/"+name, func(b *testing.B) {
		g := newTestGate(b, l)
		run(b, func() error {
			p, err := g.Acquire(ctx)
			if err != nil {
				return err
			}
			p.Release()
			return nil
		})
	})
	b.Run("semaphores/"+name, func(b *testing.B) {
		s := newSemaphores(int64(l.Running), int64(l.Waiting))
		run(b, func() error {
			if err := s.acquire(ctx); err != nil {
				return err
			}
			s.release()
			return nil
		})
	})
}

// BenchmarkAcquireRelease is one pair of acquire and release, from several callers at once. Above 8 callers some of them
// wait, so that part of the pairs are hand-overs.
func BenchmarkAcquireRelease(b *testing.B) {
	for _, callers := range []int{1, 2, 8, 64} {
		peers(b, fmt.Sprintf("Running=8/Callers=%d", callers), Limits{Running: 8, Waiting: 80, MaxWait: time.Minute}, func(b *testing.B, pair func() error) {
			b.ReportAllocs()
			if callers == 1 {
				for b.Loop() {
					if err := pair(); err != nil {
						b.Fatal(err)
					}
				}
				return
			}
			inParallel(b, callers, pair)
		})
	}
}

// inParallel divides b.N calls among callers.
func inParallel(b *testing.B, callers int, call func() error) {
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for range (b.N + i) / callers {
				if err := call(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkRefusal is a call that finds no admission permit.
func BenchmarkRefusal(b *testing.B) {
	ctx := context.Background()
	b.Run("gate", func(b *testing.B) {
		b.ReportAllocs()
		g := newTestGate(b, Limits{Running: 1})
		p := mustAcquire(b, g, ctx)
		defer p.Release()
		for b.Loop() {
			if _, err := g.Acquire(ctx); err == nil {
				b.Fatal("not refused")
			}
		}
	})
	b.Run("semaphores", func(b *testing.B) {
		b.ReportAllocs()
		s := newSemaphores(1, 0)
		if err := s.acquire(ctx); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if err := s.acquire(ctx); err == nil {
				b.Fatal("not refused")
			}
		}
	})
}

// BenchmarkHandOver is a permit that goes round among callers of whom all but one wait.
func BenchmarkHandOver(b *testing.B) {
	for _, callers := range []int{2, 16} {
		peers(b, fmt.Sprintf("Running=1/Callers=%d", callers), Limits{Running: 1, Waiting: 80, MaxWait: time.Minute}, func(b *testing.B, pair func() error) {
			b.ReportAllocs()
			inParallel(b, callers, pair)
		})
	}
}

// BenchmarkWaitOfManyCallers is the wait of 320 callers for 16 permits held for 10 ms each: the gate's line against
// database/sql's MaxOpenConns, which wakes whom it happens to find. Metrics: the 99th percentile of each, and their ratio.
func BenchmarkWaitOfManyCallers(b *testing.B) {
	const callers, permits, hold, length = 320, 16, 10 * time.Millisecond, 3 * time.Second
	storm := func(pair func(hold func()) error) time.Duration {
		var mu sync.Mutex
		var waits []time.Duration
		var wg sync.WaitGroup
		start := time.Now()
		for range callers {
			wg.Go(func() {
				for time.Since(start) < length {
					asked := time.Now()
					err := pair(func() {
						waited := time.Since(asked)
						mu.Lock()
						waits = append(waits, waited)
						mu.Unlock()
						time.Sleep(hold)
					})
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		slices.Sort(waits)
		return waits[len(waits)*99/100]
	}
	ctx := context.Background()
	for b.Loop() {
		g := newTestGate(b, Limits{Running: permits, Waiting: callers, MaxWait: time.Minute})
		gate := storm(func(hold func()) error {
			p, err := g.Acquire(ctx)
			if err != nil {
				return err
			}
			hold()
			p.Release()
			return nil
		})
		db := sql.OpenDB(trivialConnector{})
		db.SetMaxOpenConns(permits)
		db.SetMaxIdleConns(permits)
		pool := storm(func(hold func()) error {
			c, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			hold()
			return c.Close()
		})
		db.Close()
		b.ReportMetric(float64(gate)/1e6, "gate-p99-ms")
		b.ReportMetric(float64(pool)/1e6, "sql-p99-ms")
		b.ReportMetric(float64(gate)/float64(pool), "ratio")
	}
}

// trivialConnector opens connections that do nothing.
type trivialConnector struct{}

func (trivialConnector) Connect(context.Context) (driver.Conn, error) { return trivialConn{}, nil }
func (trivialConnector) Driver() driver.Driver                        { return nil }

type trivialConn struct{}

func (trivialConn) Prepare(string) (driver.Stmt, error) { return nil, driver.ErrSkip }
func (trivialConn) Close() error                        { return nil }
func (trivialConn) Begin() (driver.Tx, error)           { return nil, driver.ErrSkip }

func BenchmarkWorth(b *testing.B) {
	var e estimator
	for i := range 500 {
		e.add(time.Duration(5+i%40) * time.Millisecond)
	}
	b.ReportAllocs()
	for range b.N {
		e.worthIs = 0
		e.worth()
	}
}
