//go:build unix

// Lab measures pgx-gated against what people would use instead, and draws and tells the results.
//
//	go -C integration run ./lab            everything, about 14 minutes
//	go -C integration run ./lab -short     everything in small, under 2 minutes, for a look
//	go -C integration run ./lab -run a,f   some experiments
//	go -C integration run ./lab -plot      draw again what was measured
//	go -C integration run ./lab -readme    write the README's section "Cost" from what was measured
//
// It starts its own PostgreSQL. Load is open-loop: arrivals wait for nobody, and latencies count from the moment an arrival
// was meant for. Peers take turns within one run. Each experiment writes its CSV files when it ends; plots and texts are made of
// those alone. Where the machine lets it, experiments with a limited capacity give the server one processor and the
// clients another one, so that a client's work does not lower what it is measured by.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

func init() {
	runtime.LockOSThread() // main's thread lives as long as the lab does, and children are told when it ends
}

// say is progress.
var say = func(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	var (
		flags   = flag.NewFlagSet("lab", flag.ExitOnError)
		short   = flags.Bool("short", false, "small durations, under 2 minutes in all")
		only    = flags.String("run", "", "experiments to run, such as a,b,f; default: all")
		peers   = flags.String("peers", "", "parts of the names of peers to run beside plain pgx and pgx-gated, such as unlimited,PgBouncer, or none; default: all")
		profile = flags.String("cpuprofile", "", "write a CPU profile of the lab, its peers' client side included, to this `file`")
		out     = flags.String("out", "", "`directory` for CSV files and plots (default: lab/results)")
		plots   = flags.Bool("plot", false, "measure nothing, draw again")
		readme  = flags.Bool("readme", false, "measure nothing, write the README's section from lab/results")
	)
	if err := flags.Parse(args); err != nil {
		return err
	}
	root, err := projectRoot()
	if err != nil {
		return err
	}
	if *out == "" {
		*out = filepath.Join(root, "integration", "lab", "results")
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	if *plots || *readme {
		if *plots {
			err = errors.Join(err, drawAll(*out))
		}
		if *readme {
			err = errors.Join(err, writeReadme(filepath.Join(root, "README.md"), *out))
		}
		return err
	}

	var chosen []experiment
	for _, e := range experiments {
		if *only == "" || slices.Contains(strings.Split(*only, ","), e.id) {
			chosen = append(chosen, e)
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("-run %s names no experiment: there are a to h", *only)
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	// With as little on its heap as the lab has, the collector would run several times a second, each time for milliseconds on the
	// one processor that the clients have. A service has more there.
	debug.SetGCPercent(400)
	slog.SetDefault(slog.New(slog.DiscardHandler)) // warnings of unproven things and the like are counted, not shown

	began := time.Now()
	say("starting PostgreSQL")
	b, err := newBench(ctx)
	if err != nil {
		return err
	}
	defer b.close()
	if *peers != "" {
		b.only = strings.Split(*peers, ",")
	}
	var errs []error
	if err := machine(b, *short).write(*out); err != nil {
		return err
	}
	for _, e := range chosen {
		start := time.Now()
		say("(%s) %s", e.id, e.title)
		tables, err := attempt(ctx, e, b, *short)
		for _, t := range tables {
			err = errors.Join(err, t.write(*out))
		}
		if err == nil {
			err = drawOne(*out, e.id)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("experiment %s: %w", e.id, err))
			say("  FAILED: %v", err)
		}
		say("  %.0f s", time.Since(start).Seconds())
		if ctx.Err() != nil {
			break
		}
	}
	ratios, err := ratioTable(*out)
	if err == nil {
		err = ratios.write(*out)
		say("\n%s", ratios.aligned())
	}
	say("results in %s, %.0f s", *out, time.Since(began).Seconds())
	return errors.Join(append(errs, err)...)
}

// attempt keeps an experiment that panics from taking the others along.
func attempt(ctx context.Context, e experiment, b *bench, short bool) (tables []*table, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v\n%s", p, debug.Stack())
		}
	}()
	return e.run(ctx, b, short)
}

// projectRoot finds the repository: where the lab is, whatever directory it was called from.
func projectRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "integration", "lab")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("call it inside the project")
		}
	}
}

// machine says where the figures come from.
func machine(b *bench, short bool) *table {
	t := newTable("machine", "what", "is")
	t.add("processors", runtime.NumCPU())
	t.add("processor", lineOf("/proc/cpuinfo", "model name"))
	kernel, _ := exec.Command("uname", "-sr").Output()
	t.add("system", strings.TrimSpace(string(kernel)))
	t.add("go", runtime.Version())
	t.add("postgresql", b.server.VersionString())
	pooler, _ := exec.Command("/usr/sbin/pgbouncer", "--version").Output()
	first, _, _ := strings.Cut(string(pooler), "\n")
	t.add("pooler", strings.TrimSpace(first))
	for _, m := range []string{"github.com/jackc/pgx/v5", "github.com/failsafe-go/failsafe-go", "golang.org/x/sync"} {
		t.add(m, version(m))
	}
	t.add("short", short)
	t.add("date", time.Now().UTC().Format(time.DateOnly))
	return t
}

func lineOf(file, key string) string {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

func version(module string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == module {
				return d.Version
			}
		}
	}
	return "unknown"
}
