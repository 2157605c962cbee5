//go:build linux

// Package observability has what an operator of pgxgated needs, and the proof that it works: a Grafana dashboard
// (dashboard.json) and Prometheus rules (rules.yml), tested against a real Prometheus that scrapes a service under load.
package observability

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// ErrNoPrometheus: the programs prometheus and promtool are not installed (Debian: apt-get install prometheus).
var ErrNoPrometheus = errors.New("no prometheus and promtool in PATH")

// Prometheus is a running server of our own.
type Prometheus struct {
	URL    string
	dir    string
	cmd    *exec.Cmd
	ended  chan error
	client http.Client
}

// StartPrometheus starts a server on a free port of 127.0.0.1 that scrapes target ("127.0.0.1:1234", path /metrics) twice a
// second and evaluates rules.yml, and waits until it is ready, at most 30 s. It ends with this process. The caller calls
// Close.
func StartPrometheus(ctx context.Context, target, rules string, flags ...string) (_ *Prometheus, err error) {
	program, err := exec.LookPath("prometheus")
	if err != nil {
		return nil, ErrNoPrometheus
	}
	if rules, err = filepath.Abs(rules); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgxgated-prometheus-")
	if err != nil {
		return nil, err
	}
	p := &Prometheus{dir: dir, ended: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	config := fmt.Sprintf("global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"+
		"rule_files: [%q]\nscrape_configs:\n  - {job_name: service, static_configs: [{targets: [%q]}]}\n", rules, target)
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p.URL = "http://127.0.0.1:" + strconv.Itoa(port)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(program, append([]string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"),
		"--web.listen-address=127.0.0.1:" + strconv.Itoa(port)}, flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the signal is sent when this thread ends
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		p.ended <- cmd.Wait()
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	p.cmd = cmd

	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		if _, err := p.get(ctx, "/-/ready", nil); err == nil {
			return p, nil
		}
		select {
		case err := <-p.ended:
			p.ended <- err
			said, _ := os.ReadFile(log.Name())
			return nil, fmt.Errorf("prometheus ended: %w: %s", err, said)
		case <-ctx.Done():
			return nil, fmt.Errorf("prometheus is not ready: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond): // it tells nobody
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Close ends the server and removes what it stored.
func (p *Prometheus) Close() error {
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(10 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
		p.cmd = nil
	}
	p.client.CloseIdleConnections()
	return os.RemoveAll(p.dir)
}

func (p *Prometheus) get(ctx context.Context, path string, query url.Values) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return body, err
}

// Series is one line of an answer.
type Series struct {
	Labels map[string]string
	Points []Point
}

// Point is a value at a time.
type Point struct {
	At    time.Time
	Value float64
}

// Last is the newest value, NaN without one.
func (s Series) Last() float64 {
	if len(s.Points) == 0 {
		return math.NaN()
	}
	return s.Points[len(s.Points)-1].Value
}

// Query evaluates expr for now.
func (p *Prometheus) Query(ctx context.Context, expr string) ([]Series, error) {
	return p.query(ctx, "/api/v1/query", url.Values{"query": {expr}})
}

// QueryRange evaluates expr from start to end.
func (p *Prometheus) QueryRange(ctx context.Context, expr string, start, end time.Time, step time.Duration) ([]Series, error) {
	return p.query(ctx, "/api/v1/query_range", url.Values{
		"query": {expr}, "start": {start.Format(time.RFC3339Nano)}, "end": {end.Format(time.RFC3339Nano)}, "step": {step.String()},
	})
}

func (p *Prometheus) query(ctx context.Context, path string, v url.Values) ([]Series, error) {
	body, err := p.get(ctx, path, v)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", v.Get("query"), err)
	}
	var answer struct {
		Data struct {
			Result []struct {
				Metric map[string]string
				Value  *sample
				Values []sample
			}
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("%s: %w", v.Get("query"), err)
	}
	var all []Series
	for _, r := range answer.Data.Result {
		s := Series{Labels: r.Metric}
		if r.Value != nil {
			r.Values = append(r.Values, *r.Value)
		}
		for _, v := range r.Values {
			s.Points = append(s.Points, Point(v))
		}
		all = append(all, s)
	}
	return all, nil
}

// sample is [seconds, "value"].
type sample Point

func (s *sample) UnmarshalJSON(b []byte) error {
	var text string
	var at float64
	if err := json.Unmarshal(b, &[]any{&at, &text}); err != nil {
		return err
	}
	v, err := strconv.ParseFloat(text, 64)
	s.At, s.Value = time.UnixMilli(int64(at*1000)), v
	return err
}
