package contract

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
	"github.com/pgxgated/pgxgated/metrics"
)

// What must show nowhere: the password in a DSN, and in logs and metrics neither SQL nor arguments.
const (
	secretPassword = "pa55/word:with@marks"
	secretSQL      = "secret_in_sql"
	secretArgument = "secret-in-argument"
)

// seen is everything that came out, by where.
type seen struct {
	t     *testing.T
	texts map[string][]string
}

func (s *seen) add(where, text string) { s.texts[where] = append(s.texts[where], text) }

// value notes a value in the ways in which people print one.
func (s *seen) value(where string, v any) {
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		s.add(where, fmt.Sprintf(format, v))
	}
}

// err notes an error with its whole chain.
func (s *seen) err(where string, err error) {
	s.t.Helper()
	if err == nil {
		s.t.Errorf("%s: no error", where)
		return
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		s.add(where, e.Error())
		s.add(where, fmt.Sprintf("%+v", e))
	}
}

func (s *seen) has(where, secret string) {
	s.t.Helper()
	for _, text := range s.texts[where] {
		for _, form := range []string{secret, url.QueryEscape(secret), url.PathEscape(secret), url.UserPassword("", secret).String()[1:]} {
			if i := strings.Index(text, form); i >= 0 {
				s.t.Errorf("%s: %q shows in …%s", where, secret, text[max(0, i-60):i+len(form)])
			}
		}
	}
}

func TestNoSecretShows(t *testing.T) {
	e := newEnv(t)
	s := &seen{t: t, texts: make(map[string][]string)}
	dsn := strings.Replace(e.role("x", -1), ":x@", ":"+url.QueryEscape(secretPassword)+"@", 1)
	e.see.Exec("alter role role_" + e.see.name() + " password '" + secretPassword + "'")
	u, err := url.Parse(dsn)
	e.must(err)
	keywords := fmt.Sprintf("host=%s port=%s user=%s dbname=%s password='%s' sslmode=disable", u.Hostname(), u.Port(), u.User.Username(), e.see.name(), secretPassword)

	// DSNs that are wrong in all kinds of ways.
	for _, bad := range []string{
		pgtest.With(dsn, "gate_running", "0"), pgtest.With(dsn, "gate_runing", "1"), pgtest.With(dsn, "gate_running", "x"), pgtest.With(dsn, "gate_max_wait", "1"), pgtest.With(dsn, "pool_max_conns", "0"),
		pgtest.With(dsn, "pool_max_conns", "x"), dsn + "&gate_running=1&gate_running=2", dsn + "&sslmode=nonsense", dsn + "&connect_timeout=x", dsn + "&port=x", dsn + "%zz", strings.Replace(dsn, "%40", "@", 1) + "&port=x",
		strings.Replace(dsn, url.QueryEscape(secretPassword), secretPassword, 1), keywords + " gate_running=0", keywords + " port=x", keywords + " =x", keywords + " gate_running", keywords + " password='" + secretPassword, keywords + " target_session_attrs=x",
	} {
		if _, err := sql.Open(pgxgated.DriverName, bad); err != nil {
			s.err("errors", err)
		}
		if _, err := pgxgated.NewConnector(bad); err != nil {
			s.err("errors", err)
		}
	}
	if len(s.texts["errors"]) < 40 {
		t.Errorf("only %d texts of errors at open", len(s.texts["errors"]))
	}

	log := &logs{}
	opts := func(more ...pgxgated.Option) []pgxgated.Option {
		return append([]pgxgated.Option{pgxgated.WithLogger(log.logger())}, more...)
	}
	e.see.Stubborn()
	c, err := pgxgated.NewConnector(pgtest.With(pgtest.With(dsn, "pool_max_conns", "3"), "gate_running", "1"), opts(
		pgxgated.WithLeakThreshold(20*time.Millisecond), pgxgated.WithDrainGrace(100*time.Millisecond), pgxgated.WithWorkloads(map[string]pgxgated.Limits{"oltp": {Running: 1, Waiting: 1}}))...)
	e.must(err)
	_, err = pgxgated.NewConnector(dsn, opts()...) // warns that the size was not given
	e.must(err)
	db := sql.OpenDB(c)
	g := e.adopt(db, nil, log)
	registry := prometheus.NewRegistry()
	e.must(registry.Register(metrics.NewCollector(c.Gate())))

	// Work that fails and is cancelled, slowly enough to be reported; every record of the log is of interest.
	_, err = db.Exec("select $1::int as "+secretSQL, secretArgument)
	s.err("errors of statements", err)
	ctx, cancel := context.WithCancel(t.Context())
	conn := g.conn()
	pid := e.pid(conn)
	got := later(func() error {
		_, err := conn.ExecContext(ctx, "select stubborn(60) as "+secretSQL+", $1::text", secretArgument)
		return err
	})
	e.see.working(pid, "stubborn")
	_, err = db.ExecContext(pgxgated.WithMaxWait(t.Context(), time.Millisecond), "select 1")
	s.err("errors", err)
	e.eventually("the holder is reported", func() error {
		if log.count("gate_leak_threshold") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	cancel()
	s.err("errors", <-got)
	e.must(conn.Close())
	g.idle()
	if log.count("terminated") == 0 {
		t.Error("no backend was terminated")
	}
	conn = g.conn()
	e.must(conn.Raw(func(dc any) error {
		_, err := pgxgated.PgxConn(t.Context(), dc)
		s.value("values", dc)
		return err
	}))
	e.must(conn.Close())
	tx := g.begin()
	e.see.terminate(e.pid(tx))
	_, err = tx.Exec("select '" + secretSQL + "'")
	s.err("errors", err)
	s.err("errors", tx.Commit())

	// Connections that cannot be had.
	for _, unreachable := range []string{
		strings.Replace(dsn, url.QueryEscape(secretPassword), url.QueryEscape(secretPassword)+"x", 1), pgtest.With(dsn, "dbname", "nowhere"), strings.Replace(dsn, ":"+u.Port()+"/", ":1/", 1), strings.Replace(keywords, "port="+u.Port(), "port=1", 1),
	} {
		uc, err := pgxgated.NewConnector(pgtest.With(pgtest.With(unreachable, "pool_max_conns", "1"), "gate_pool_wait", "2s"), opts()...)
		e.must(err)
		udb := sql.OpenDB(uc)
		_, err = udb.Exec("select 1")
		s.err("errors", err)
		s.err("errors", udb.Ping())
		s.err("errors", pgxgated.Check(t.Context(), udb, pgxgated.Budget{PeakInstances: 1}))
		s.value("values", uc)
		e.must(udb.Close())
	}
	s.err("errors", pgxgated.Check(t.Context(), db, pgxgated.Budget{PeakInstances: 100_000}))

	// A driver that is opened per connection keeps its DSN.
	dc, err := (&pgxgated.Driver{}).Open(pgtest.With(dsn, "pool_max_conns", "1"))
	e.must(err)
	s.value("values", dc)
	e.must(dc.Close())

	s.value("values", c)
	s.value("values", *c.Gate())
	s.value("values", c.Gate().Stats())
	s.value("values", db.Driver())
	s.add("metrics", gather(t, registry))
	s.add("log", log.String())
	if len(s.texts["metrics"][0]) < 1000 || !strings.Contains(s.texts["metrics"][0], "pgxgated_running") {
		t.Errorf("these are not the metrics: %s", s.texts["metrics"][0])
	}
	for where := range s.texts {
		s.has(where, secretPassword)
	}
	for _, where := range []string{"log", "metrics"} {
		s.has(where, secretSQL)
		s.has(where, secretArgument)
	}
	e.done()
}

// gather is all metrics as text.
func gather(t *testing.T, r *prometheus.Registry) string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Error(err)
	}
	var b strings.Builder
	for _, f := range families {
		fmt.Fprintln(&b, f.String())
	}
	return b.String()
}
