//go:build linux

// Picture puts a service under one kind of load after another, has a Prometheus scrape it, and draws what the dashboard's
// panels show: the picture in the README.
//
//	go -C integration run ./observability/picture
//
// It needs the Debian package prometheus, finds or fetches a PostgreSQL as the tests do, and takes a minute and a half.
package main

import (
	"context"
	"flag"
	"fmt"
	"image/color"
	"log"
	"os"
	"os/signal"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/pgxgated/pgxgated/integration/observability"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

func main() {
	out := flag.String("o", "observability/under-load.png", "file to write")
	rules := flag.String("rules", "observability/rules.yml", "Prometheus rules")
	each := flag.Duration("each", 15*time.Second, "length of each phase")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out, *rules, *each); err != nil {
		log.Fatal(err)
	}
}

const (
	interval = 4 * time.Second // of rates
	step     = 500 * time.Millisecond
)

func run(ctx context.Context, out, rules string, each time.Duration) error {
	pg, err := pgtest.Start(ctx)
	if err != nil {
		return err
	}
	defer pg.Close()
	s, err := observability.NewService(ctx, pg.DSN())
	if err != nil {
		return err
	}
	defer s.Close()
	p, err := observability.StartPrometheus(ctx, s.Addr, rules)
	if err != nil {
		return err
	}
	defer p.Close()

	select { // some scrapes, for rates to begin with
	case <-time.After(interval):
	case <-ctx.Done():
		return ctx.Err()
	}
	start := time.Now()
	var names []string
	for _, phase := range observability.Phases {
		fmt.Println(phase.Name)
		names = append(names, phase.Name)
		loaded, cancel := context.WithTimeout(ctx, each)
		phase.Run(s, loaded)
		cancel()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f := figure{p: p, start: start, end: time.Now(), names: names}
	return f.draw(ctx, out, pg.VersionString())
}

// figure is the picture: four panels above each other, with the phases marked.
type figure struct {
	p          *observability.Prometheus
	start, end time.Time
	names      []string
}

var (
	red    = color.RGBA{R: 0xd4, G: 0x3a, B: 0x3a, A: 0xff}
	orange = color.RGBA{R: 0xf2, G: 0x95, B: 0x2b, A: 0xff}
	purple = color.RGBA{R: 0x8e, G: 0x5b, B: 0xb5, A: 0xff}
	blue   = color.RGBA{R: 0x3b, G: 0x78, B: 0xc4, A: 0xff}
	green  = color.RGBA{R: 0x4d, G: 0xa3, B: 0x4d, A: 0xff}
	grey   = color.RGBA{R: 0x77, G: 0x77, B: 0x77, A: 0xff}
)

const orders = `gate="orders"`

func (f *figure) draw(ctx context.Context, out, version string) error {
	rate := fmt.Sprintf("[%ds]", int(interval.Seconds()))
	waits, err := f.waits(ctx)
	if err != nil {
		return err
	}
	panels := []*plot.Plot{waits}
	for _, panel := range []struct {
		title string
		lines []line
	}{
		{"Running, waiting, draining (operations)", []line{
			{`sum(pgxgated_running{` + orders + `})`, "running", green},
			{`sum(pgxgated_waiting{` + orders + `})`, "waiting", orange},
			{`sum(pgxgated_draining{` + orders + `})`, "draining", purple},
			{`sum(pgxgated_limit{` + orders + `,permit="running"})`, "limit of running", grey},
		}},
		{"Calls per second, by answer", []line{
			{`sum(rate(pgxgated_acquires_total{` + orders + `,outcome="admitted"}` + rate + `))`, "admitted", green},
			{`sum(rate(pgxgated_acquires_total{` + orders + `,outcome="admission_full"}` + rate + `))`, "admission full", red},
			{`sum(rate(pgxgated_acquires_total{` + orders + `,outcome="wait_timeout"}` + rate + `))`, "waited too long", orange},
		}},
		{"99th percentiles (ms)", []line{
			{`1000 * histogram_quantile(0.99, sum by (le) (rate(pgxgated_gate_wait_seconds_bucket{` + orders + `}` + rate + `)))`, "gate wait", orange},
			{`1000 * histogram_quantile(0.99, sum by (le) (rate(pgxgated_pool_wait_seconds_bucket{` + orders + `}` + rate + `)))`, "pool wait", blue},
			{`1000 * histogram_quantile(0.99, sum by (le) (rate(pgxgated_sql_seconds_bucket{` + orders + `}` + rate + `)))`, "SQL", green},
		}},
	} {
		p := f.plot(panel.title)
		for _, l := range panel.lines {
			points, err := f.points(ctx, l.expr)
			if err != nil {
				return err
			}
			drawn, err := plotter.NewLine(points)
			if err != nil {
				return err
			}
			drawn.Color, drawn.Width = l.color, vg.Points(1.5)
			if l.color == grey {
				drawn.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
			}
			p.Add(drawn)
			p.Legend.Add(l.name, drawn)
			for _, pt := range points {
				p.Y.Max = max(p.Y.Max, pt.Y*1.25)
			}
		}
		panels = append(panels, p)
	}
	panels[0].Title.Text = fmt.Sprintf("Five kinds of load on a gate of %d running and %d waiting over %d connections, PostgreSQL %s\n%s",
		observability.Running, observability.Waiting, observability.Connections, version, panels[0].Title.Text)

	const width, height = 11 * vg.Inch, 12 * vg.Inch
	img := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(100))
	rows := make([][]*plot.Plot, len(panels))
	for i, p := range panels {
		rows[i] = []*plot.Plot{p}
	}
	tiles := draw.Tiles{Rows: len(panels), Cols: 1, PadY: vg.Points(14), PadTop: vg.Points(8), PadBottom: vg.Points(8), PadLeft: vg.Points(8), PadRight: vg.Points(12)}
	canvases := plot.Align(rows, tiles, draw.New(img))
	for i, p := range panels {
		p.Draw(canvases[i][0])
	}
	w, err := os.Create(out)
	if err != nil {
		return err
	}
	if _, err := (vgimg.PngCanvas{Canvas: img}).WriteTo(w); err != nil {
		w.Close()
		return err
	}
	return w.Close()
}

type line struct {
	expr, name string
	color      color.Color
}

// plot is an empty panel on the common time axis, with the phases named at the top.
func (f *figure) plot(title string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.TextStyle.Font = font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(12)}
	length := f.end.Sub(f.start).Seconds()
	p.X.Min, p.X.Max = 0, length*1.4 // to the right of the data is the legend
	p.Y.Min, p.Y.Max = 0, 1
	p.X.Tick.Marker = plot.TickerFunc(func(float64, float64) (ticks []plot.Tick) {
		for i := range len(f.names) + 1 {
			at := length * float64(i) / float64(len(f.names))
			ticks = append(ticks, plot.Tick{Value: at, Label: fmt.Sprintf("%.0f s", at)})
		}
		return ticks
	})
	p.Y.Tick.Marker = plot.TickerFunc(func(low, high float64) (ticks []plot.Tick) {
		for _, t := range (plot.DefaultTicks{}).Ticks(low, high) {
			if t.Label != "" {
				ticks = append(ticks, plot.Tick{Value: t.Value, Label: fmt.Sprintf("%g", t.Value)})
			}
		}
		return ticks
	})
	sans := font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(10)}
	p.Legend.TextStyle.Font, p.X.Tick.Label.Font, p.Y.Tick.Label.Font = sans, sans, sans
	p.Legend.Top = true
	p.Legend.Padding = vg.Points(3)
	p.Add(&phases{names: f.names, length: length})
	return p
}

// phases marks the phases on a panel.
type phases struct {
	names  []string
	length float64
}

func (ph *phases) Plot(c draw.Canvas, p *plot.Plot) {
	trX, _ := p.Transforms(&c)
	for i, name := range ph.names {
		at := ph.length * float64(i) / float64(len(ph.names))
		x := trX(at)
		if i > 0 {
			c.StrokeLine2(draw.LineStyle{Color: grey, Width: vg.Points(1)}, x, c.Min.Y, x, c.Max.Y)
		}
		style := text.Style{
			Color: color.Black, Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(11)},
			YAlign: text.YTop, Handler: plot.DefaultTextHandler,
		}
		c.FillText(style, vg.Point{X: x + vg.Points(5), Y: c.Max.Y - vg.Points(4)}, name)
	}
}

// points are the one series of expr; what is not a number is left out.
func (f *figure) points(ctx context.Context, expr string) (plotter.XYs, error) {
	series, err := f.p.QueryRange(ctx, expr, f.start, f.end, step)
	if err != nil {
		return nil, err
	}
	if len(series) != 1 {
		return nil, fmt.Errorf("%s: %d series", expr, len(series))
	}
	var points plotter.XYs
	for _, pt := range series[0].Points {
		if pt.Value == pt.Value {
			points = append(points, plotter.XY{X: pt.At.Sub(f.start).Seconds(), Y: pt.Value})
		}
	}
	if len(points) == 0 {
		return nil, fmt.Errorf("%s: no points", expr)
	}
	return points, nil
}

// waits is the panel of the five waits, stacked, with the dashboard's own queries.
func (f *figure) waits(ctx context.Context) (*plot.Plot, error) {
	panels, err := observability.Dashboard(interval)
	if err != nil {
		return nil, err
	}
	p := f.plot("Where operations are: the five waits, stacked (operations on average)")
	colors := map[string]color.Color{"gate": orange, "pool": blue, "locks": red, "sql": green, "client": purple}
	var below plotter.XYs
	for _, panel := range panels {
		if panel.Title != observability.WaitsPanel {
			continue
		}
		for _, t := range panel.Targets {
			points, err := f.points(ctx, strings.ReplaceAll(t.Expr, `gate=~".*"`, orders))
			if err != nil {
				return nil, err
			}
			top := make(plotter.XYs, len(points))
			for i, pt := range points {
				top[i] = plotter.XY{X: pt.X, Y: pt.Y + at(below, pt.X)}
				p.Y.Max = max(p.Y.Max, top[i].Y*1.25)
			}
			band := append(plotter.XYs{}, top...)
			for i := len(top) - 1; i >= 0; i-- {
				band = append(band, plotter.XY{X: top[i].X, Y: at(below, top[i].X)})
			}
			area, err := plotter.NewPolygon(band)
			if err != nil {
				return nil, err
			}
			area.Color, area.LineStyle.Width = colors[observability.Place(t.LegendFormat)], 0
			p.Add(area)
			p.Legend.Add(t.LegendFormat, area)
			below = top
		}
	}
	if below == nil {
		return nil, fmt.Errorf("the dashboard has no panel %q", observability.WaitsPanel)
	}
	p.Add(&phases{names: f.names, length: f.end.Sub(f.start).Seconds()}) // again, above the areas
	return p, nil
}

// at is the height of a line at x, 0 if it has no point there.
func at(line plotter.XYs, x float64) float64 {
	for _, pt := range line {
		if pt.X >= x-1e-3 && pt.X <= x+1e-3 {
			return pt.Y
		}
	}
	return 0
}
