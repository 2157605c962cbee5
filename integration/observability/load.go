//go:build linux

package observability

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/metrics"
)

// Service is a service with a gated database, and what it reports to Prometheus. A second gate, in observe mode over the
// same server, sees some of the load too.
type Service struct {
	DB       *sql.DB
	Pool     *pgxpool.Pool
	Gate     *pgxgated.Gate
	Registry *prometheus.Registry
	Addr     string // where Prometheus finds /metrics

	observed *sql.DB
	server   *http.Server
	served   chan error
}

// The limits of a Service.
const (
	Connections = 8
	Running     = 6
	Waiting     = 24
	MaxWait     = 100 * time.Millisecond
)

// NewService opens the database of dsn, makes a table in it, and serves /metrics on a free port. The caller calls Close.
func NewService(ctx context.Context, dsn string) (_ *Service, err error) {
	s := &Service{Registry: prometheus.NewRegistry(), served: make(chan error, 1)}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = Connections
	if s.Pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	limits := pgxgated.Limits{Running: Running, Waiting: Waiting, MaxWait: MaxWait}
	if s.DB, err = pgxgated.OpenDBFromPool(s.Pool, pgxgated.WithLimits(limits), pgxgated.WithGateName("orders")); err != nil {
		return nil, err
	}
	observer, err := pgxgated.NewConnector(dsn, pgxgated.WithLimits(pgxgated.Limits{Running: 1, MaxWait: MaxWait}),
		pgxgated.WithGateName("observed"), pgxgated.WithMode(pgxgated.Observe))
	if err != nil {
		return nil, err
	}
	s.observed = sql.OpenDB(observer)
	s.Gate = pgxgated.GateOf(s.DB)
	if err := s.Registry.Register(metrics.NewCollector(s.Gate, observer.Gate())); err != nil {
		return nil, err
	}
	for _, q := range []string{
		"create table if not exists hot (id int primary key, n int not null)",
		"insert into hot select i, 0 from generate_series(1, 100) i on conflict do nothing",
	} {
		if _, err := s.DB.ExecContext(ctx, q); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s.Addr = l.Addr().String()
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(s.Registry, promhttp.HandlerOpts{}))
	s.server = &http.Server{Handler: mux}
	go func() { s.served <- s.server.Serve(l) }()
	return s, nil
}

// Close closes everything. Phases must have ended.
func (s *Service) Close() {
	if s.server != nil {
		s.server.Close()
		<-s.served
	}
	for _, db := range []*sql.DB{s.DB, s.observed} {
		if db != nil {
			db.Close()
		}
	}
	if s.Pool != nil {
		s.Pool.Close()
	}
}

// Phase is one kind of load, and the place where its operations then spend most of their time, as the dashboard's panel of
// the five waits names it.
type Phase struct {
	Name   string
	Widest string
	Run    func(s *Service, ctx context.Context) // until ctx is done
}

// Phases are the situations that the dashboard must tell apart.
var Phases = []Phase{
	{"nothing", "sql", func(s *Service, ctx context.Context) {
		s.callers(ctx, 3, func(tx *sql.Tx) error {
			_, err := tx.Exec("update hot set n = n + 1 where id = 1 + (random() * 99)::int")
			return err
		}, 10*time.Millisecond)
	}},
	{"permits", "gate", func(s *Service, ctx context.Context) {
		s.callers(ctx, 40, func(tx *sql.Tx) error {
			_, err := tx.Exec("select pg_sleep(0.02)")
			return err
		}, 20*time.Millisecond)
	}},
	{"pool", "pool", func(s *Service, ctx context.Context) {
		// Somebody uses the pool past the gate.
		for range Connections - 1 {
			c, err := s.Pool.Acquire(ctx)
			if err != nil {
				return
			}
			defer c.Release()
		}
		s.callers(ctx, Running, func(tx *sql.Tx) error {
			_, err := tx.Exec("select pg_sleep(0.02)")
			return err
		}, time.Millisecond)
	}},
	{"locks", "locks", func(s *Service, ctx context.Context) {
		s.callers(ctx, Running, func(tx *sql.Tx) error {
			if _, err := tx.Exec("update hot set n = n + 1 where id = 1"); err != nil {
				return err
			}
			_, err := tx.Exec("select pg_sleep(0.02)")
			return err
		}, time.Millisecond)
	}},
	{"client", "client", func(s *Service, ctx context.Context) {
		s.callers(ctx, Running, func(tx *sql.Tx) error {
			if _, err := tx.Exec("select 1"); err != nil {
				return err
			}
			pause(ctx, 20*time.Millisecond) // a network call inside a transaction
			return nil
		}, time.Millisecond)
	}},
}

// callers runs transactions, n at a time with a pause after each, until ctx is done, and waits for the last.
func (s *Service) callers(ctx context.Context, n int, work func(*sql.Tx) error, idle time.Duration) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = s.transaction(work) // a refusal is what the metrics are about
				if i == 0 {
					_, _ = s.observed.Exec("select 1")
				}
				pause(ctx, idle)
			}
		})
	}
	wg.Wait()
}

func (s *Service) transaction(work func(*sql.Tx) error) error {
	tx, err := s.DB.BeginTx(context.Background(), nil)
	if err != nil {
		return err
	}
	if err := work(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Waits returns the mean number of operations at each place, by the first word of the dashboard's legend.
func Waits(ctx context.Context, p *Prometheus, interval time.Duration) (map[string]float64, error) {
	panels, err := Dashboard(interval)
	if err != nil {
		return nil, err
	}
	at := make(map[string]float64)
	for _, panel := range panels {
		if panel.Title != WaitsPanel {
			continue
		}
		for _, t := range panel.Targets {
			series, err := p.Query(ctx, t.Expr)
			if err != nil {
				return nil, err
			}
			if len(series) != 1 {
				return nil, fmt.Errorf("%s: %d series", t.Expr, len(series))
			}
			at[Place(t.LegendFormat)] = series[0].Last()
		}
	}
	return at, nil
}

// Place is the first word of a legend of that panel: gate, pool, locks, sql, client.
func Place(legend string) string {
	place, _, _ := strings.Cut(legend, ":")
	return place
}

// WaitsPanel is the title of the panel of the five waits.
const WaitsPanel = "Where operations are: the five waits"
