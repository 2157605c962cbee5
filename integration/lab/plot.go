//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// drawings are the plots of each experiment, made of its CSV files alone.
var drawings = map[string]func(dir string) error{
	"a": drawOverload, "b": drawStorm, "c": drawIsolation, "d": drawTail, "e": drawRecovery, "f": drawSteady, "g": drawWaiters, "h": drawGate,
}

func drawAll(dir string) (err error) {
	for _, id := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		if e := drawOne(dir, id); e != nil {
			err = errors.Join(err, fmt.Errorf("plots of %s: %w", id, e))
		}
	}
	return err
}

// drawOne draws an experiment. A CSV file of another version, whose columns are not those expected, is an error.
func drawOne(dir, id string) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	return drawings[id](dir)
}

// A README shows pictures at some 800 px: this wide at 96 dpi.
const (
	width  = 800 * vg.Inch / 96
	height = 430 * vg.Inch / 96
)

// dpi are twice as many, for sharp screens. Tests draw with fewer.
var dpi = 192

type look struct {
	color  color.Color
	width  vg.Length
	dashes []vg.Length
	glyph  draw.GlyphDrawer
}

// looks tell the peers apart without colour, too. Colours are Okabe and Ito's, for all kinds of colour vision.
var looks = map[string]look{
	plain:      {rgb(0xD5, 0x5E, 0x00), 1.6, nil, draw.CircleGlyph{}},
	twoPools:   {rgb(0xA0, 0x40, 0x00), 1.4, dashes(5, 3), draw.CircleGlyph{}},
	unlimited:  {rgb(0x8A, 0x8A, 0x8A), 1.4, dashes(2, 2), draw.CrossGlyph{}},
	pool:       {rgb(0xE6, 0x9F, 0x00), 1.4, dashes(6, 3), draw.SquareGlyph{}},
	semaphores: {rgb(0x00, 0x9E, 0x73), 1.6, nil, draw.TriangleGlyph{}},
	bulkheads:  {rgb(0xCC, 0x79, 0xA7), 1.4, dashes(6, 2, 1, 2), draw.PyramidGlyph{}},
	adaptive:   {rgb(0x7B, 0x4F, 0xA3), 1.4, dashes(3, 2), draw.RingGlyph{}},
	bouncer:    {rgb(0x56, 0xB4, 0xE9), 1.4, dashes(8, 3), draw.BoxGlyph{}},
	gated:      {rgb(0x00, 0x4D, 0x99), 3, nil, draw.CircleGlyph{}},
}

func rgb(r, g, b uint8) color.Color { return color.RGBA{r, g, b, 255} }

func dashes(lengths ...vg.Length) []vg.Length { return lengths }

func init() { plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"} }

var (
	ink   = rgb(0x22, 0x22, 0x22)
	faint = rgb(0xDD, 0xDD, 0xDD)
	grey  = rgb(0x88, 0x88, 0x88)
)

func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.TextStyle.Font.Size = 13
	p.Title.Padding = 8
	p.Title.TextStyle.Color = ink
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Label.TextStyle.Font.Size = 11
		a.Tick.Label.Font.Size = 10
		a.Label.TextStyle.Color, a.Tick.Label.Color, a.Color, a.Tick.Color = ink, ink, grey, grey
		a.Label.Padding = 4
	}
	return p
}

func grid(p *plot.Plot) {
	g := plotter.NewGrid()
	g.Horizontal.Color, g.Vertical.Color = faint, faint
	p.Add(g)
}

// lines adds a line for each peer, pgx-gated last and so on top, and returns the legend.
func lines(p *plot.Plot, peers []string, points func(peer string) plotter.XYs, glyphs bool) (*legend, error) {
	l := new(legend)
	for _, name := range peers {
		xy := points(name)
		if len(xy) == 0 {
			continue
		}
		k := looks[name]
		line, err := plotter.NewLine(xy)
		if err != nil {
			return nil, err
		}
		line.LineStyle = draw.LineStyle{Color: k.color, Width: k.width, Dashes: k.dashes}
		p.Add(line)
		if glyphs {
			s, err := plotter.NewScatter(xy)
			if err != nil {
				return nil, err
			}
			s.GlyphStyle = draw.GlyphStyle{Color: k.color, Radius: 3, Shape: k.glyph}
			p.Add(s)
			l.entries = append(l.entries, entry{name, xy[len(xy)-1].Y, []plot.Thumbnailer{line, s}})
			continue
		}
		l.entries = append(l.entries, entry{name, xy[len(xy)-1].Y, []plot.Thumbnailer{line}})
	}
	return l, nil
}

// legend stands beside the plot, never over it, the highest line first.
type legend struct{ entries []entry }

type entry struct {
	name  string
	end   float64 // where its line ends
	thumb []plot.Thumbnailer
}

func (l *legend) plot() plot.Legend {
	slices.SortStableFunc(l.entries, func(a, b entry) int {
		switch {
		case a.end > b.end:
			return -1
		case a.end < b.end:
			return 1
		}
		return 0
	})
	out := plot.NewLegend()
	out.Top, out.Left = true, true
	out.TextStyle.Font.Size = 11
	out.TextStyle.Color = ink
	out.Padding = 5
	out.ThumbnailWidth = 26
	for _, e := range l.entries {
		out.Add(e.name, e.thumb...)
	}
	return out
}

// save draws with f to NAME.png and NAME.svg.
func save(dir, name string, w, h vg.Length, f func(draw.Canvas)) error {
	img := vgimg.NewWith(vgimg.UseWH(w, h), vgimg.UseDPI(dpi), vgimg.UseBackgroundColor(color.White))
	f(draw.New(img))
	var png bytes.Buffer
	if _, err := (vgimg.PngCanvas{Canvas: img}).WriteTo(&png); err != nil {
		return err
	}
	svg := vgsvg.NewWith(vgsvg.UseWH(w, h))
	c := draw.New(svg)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	f(c)
	var vector bytes.Buffer
	if _, err := svg.WriteTo(&vector); err != nil {
		return err
	}
	// The font's nearest relatives, for readers who do not have it.
	plain := bytes.ReplaceAll(vector.Bytes(), []byte("font-family:Liberation Sans"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif"))
	return errors.Join(
		os.WriteFile(filepath.Join(dir, name+".png"), png.Bytes(), 0o644),
		os.WriteFile(filepath.Join(dir, name+".svg"), plain, 0o644))
}

// saveLines draws a plot with its legend beside it.
func saveLines(dir, name string, p *plot.Plot, l *legend) error {
	return save(dir, name, width, height, func(c draw.Canvas) {
		const beside = 150
		p.Draw(draw.Crop(c, 6, -beside-6, 6, -6))
		lc := draw.Crop(c, width-beside, -4, 0, -34)
		leg := l.plot()
		leg.Draw(lc)
	})
}

func drawOverload(dir string) error {
	t, err := readTable(dir, "overload")
	if t == nil || err != nil {
		return err
	}
	peers := t.distinct("peer")
	column := func(name string) func(peer string) plotter.XYs {
		return func(peer string) (xy plotter.XYs) {
			for _, r := range t.where("peer", peer) {
				if v := t.float(r, name); !(t.float(r, "goodput_per_s") == 0 && name != "goodput_of_capacity") {
					xy = append(xy, plotter.XY{X: t.float(r, "load"), Y: v})
				}
			}
			return xy
		}
	}
	axis := func(p *plot.Plot) {
		p.X.Scale = plot.LogScale{}
		var ticks []plot.Tick
		for _, x := range t.distinct("load") {
			v, _ := strconv.ParseFloat(x, 64)
			ticks = append(ticks, plot.Tick{Value: v, Label: x + "×"})
		}
		p.X.Tick.Marker = plot.ConstantTicks(ticks)
	}

	p := newPlot("Transactions finished within their callers' deadlines", "offered load, as a multiple of capacity", "goodput, as a share of capacity")
	axis(p)
	grid(p)
	bound, err := plotter.NewLine(plotter.XYs{{X: t.float(t.rows[0], "load"), Y: 1}, {X: t.float(t.rows[len(t.rows)-1], "load"), Y: 1}})
	if err != nil {
		return err
	}
	bound.LineStyle = draw.LineStyle{Color: grey, Width: 0.8}
	p.Add(bound)
	l, err := lines(p, peers, column("goodput_of_capacity"), true)
	if err != nil {
		return err
	}
	l.entries = append(l.entries, entry{"capacity", 1, []plot.Thumbnailer{bound}})
	p.Y.Min = 0
	p.Y.Max = max(p.Y.Max, 1) * 1.05
	if err := saveLines(dir, "overload", p, l); err != nil {
		return err
	}

	p = newPlot("Latency of what was finished in time, 99th percentile", "offered load, as a multiple of capacity", "p99 from the intended arrival, ms")
	axis(p)
	grid(p)
	if l, err = lines(p, peers, column("p99_ms"), true); err != nil {
		return err
	}
	p.Y.Min = 0
	p.Y.Max *= 1.05
	if err := saveLines(dir, "overload_latency", p, l); err != nil {
		return err
	}

	at := "3"
	share := func(title, column string) panel {
		v := panel{title: title, values: make(map[string]float64), full: 100}
		for _, r := range t.where("load", at) {
			v.values[t.text(r, "peer")] = 100 * t.float(r, column)
		}
		return v
	}
	return savePanels(dir, "overload_fate", "What became of 100 callers at "+at+"× capacity", peers, 6, []panel{
		share("in time", "ok_share"), share("refused at once", "refused_share"), share("after a wait", "timed_out_share"), share("gave up waiting", "expired_share"), share("begun, late", "late_share"), share("failed", "failed_share"),
	})
}

// panel is one bar chart among several that share their peers.
type panel struct {
	title  string
	values map[string]float64
	mark   float64 // a thin line there, 0: none
	full   float64 // what the whole width stands for, 0: the largest value
}

// savePanels draws bar charts beside and below each other, peers downwards, values written at the bars.
func savePanels(dir, name, title string, peers []string, columns int, panels []panel) error {
	const heading, names, bar, head, gap = 36, 118, 16, 22, 10
	rows := (len(panels) + columns - 1) / columns
	each := head + vg.Length(len(peers))*bar + gap
	column := (width - names - gap) / vg.Length(columns)
	h := heading + vg.Length(rows)*each
	return save(dir, name, width, h, func(c draw.Canvas) {
		write := func(size vg.Length, x text.XAlignment, y text.YAlignment, at vg.Point, s string) {
			c.FillText(text.Style{Color: ink, Font: font.From(plot.DefaultFont, size), Handler: plot.DefaultTextHandler, XAlign: x, YAlign: y}, at, s)
		}
		fill := func(col color.Color, x, y, w, h vg.Length) {
			c.FillPolygon(col, []vg.Point{{X: x, Y: y}, {X: x + w, Y: y}, {X: x + w, Y: y + h}, {X: x, Y: y + h}})
		}
		write(13, text.XCenter, text.YTop, vg.Point{X: width / 2, Y: h - 8}, title)
		for n, pn := range panels {
			left, top := names+vg.Length(n%columns)*column, h-heading-vg.Length(n/columns)*each
			write(10.5, text.XLeft, text.YTop, vg.Point{X: left, Y: top - 2}, pn.title)
			most := max(pn.mark, pn.full)
			for _, v := range pn.values {
				most = max(most, v)
			}
			scale := (column - 48) / vg.Length(max(most, 1e-9)) // room for the values
			if pn.mark > 0 {
				fill(grey, left+scale*vg.Length(pn.mark), top-head-vg.Length(len(peers))*bar, 0.7, vg.Length(len(peers))*bar)
			}
			for i, peer := range peers {
				y := top - head - vg.Length(i+1)*bar
				middle := y + bar/2
				if n%columns == 0 {
					write(10.5, text.XRight, text.YCenter, vg.Point{X: left - 6, Y: middle}, peer)
				}
				label, long := "–", vg.Length(0)
				if v, ok := pn.values[peer]; ok {
					label, long = short(v), max(scale*vg.Length(v), 0.7)
					col := rgb(0xB4, 0xB4, 0xB4)
					if peer == gated {
						col = looks[gated].color
					}
					fill(col, left, y+2, long, bar-4)
				}
				write(10, text.XLeft, text.YCenter, vg.Point{X: left + long + 4, Y: middle}, label)
			}
		}
	})
}

// short is a number with about three digits.
func short(v float64) string {
	a := math.Abs(v)
	switch {
	case a >= 99.5 || v == math.Trunc(v):
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.095:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}

// panelOf is one column of the rows that where finds, by peer, times scale.
func panelOf(t *table, title, column string, scale float64, pairs ...string) panel {
	p := panel{title: title, values: make(map[string]float64)}
	for _, r := range t.where(pairs...) {
		p.values[t.text(r, "peer")] = scale * t.float(r, column)
	}
	return p
}

func drawStorm(dir string) error {
	t, err := readTable(dir, "storm")
	if t == nil || err != nil {
		return err
	}
	return savePanels(dir, "storm", "Cancel storm: callers with 0–120 ms, transactions of 20 ms, 3.5 × capacity", t.distinct("peer"), 3, []panel{
		panelOf(t, "goodput, transactions/s", "goodput_per_s", 1),
		panelOf(t, "over-limits seen by the server", "over_limits", 1),
		panelOf(t, "connections made", "connections_made", 1),
		panelOf(t, "server ms per transaction", "server_cpu_ms_per_commit", 1),
		panelOf(t, "started into it, transactions/s", "goodput_cold_per_s", 1),
		panelOf(t, "client, CPU ms per second", "client_cpu_ms_per_s", 1),
	})
}

func drawIsolation(dir string) error {
	t, err := readTable(dir, "isolation")
	if t == nil || err != nil {
		return err
	}
	return savePanels(dir, "isolation", "Short transactions, alone and beside a flood of long ones", t.distinct("peer"), 3, []panel{
		panelOf(t, "alone: in time, %", "ok_percent", 1, "flood", "false"),
		panelOf(t, "beside a flood: in time, %", "ok_percent", 1, "flood", "true"),
		panelOf(t, "long ones done per second", "batch_goodput_per_s", 1, "flood", "true"),
		panelOf(t, "alone: p99, ms", "p99_ms", 1, "flood", "false"),
		panelOf(t, "beside a flood: p99, ms", "p99_ms", 1, "flood", "true"),
	})
}

func drawTail(dir string) error {
	t, err := readTable(dir, "tail_waits")
	if t == nil || err != nil {
		return err
	}
	p := newPlot("Waits after a burst of 320 callers, at 0.9 × capacity", "share of callers who waited no longer, %", "wait from the intended arrival, ms")
	grid(p)
	// 0, 90, 99, 99.9 % at equal distances.
	nines := func(percent float64) float64 { return -math.Log10(max(1-percent/100, 0.0003)) }
	var ticks []plot.Tick
	for _, v := range []float64{0, 50, 90, 99, 99.9} {
		ticks = append(ticks, plot.Tick{Value: nines(v), Label: strconv.FormatFloat(v, 'f', -1, 64)})
	}
	ticks = append(ticks, plot.Tick{Value: nines(100), Label: "all"})
	p.X.Tick.Marker = plot.ConstantTicks(ticks)
	l, err := lines(p, t.distinct("peer"), func(peer string) (xy plotter.XYs) {
		for _, r := range t.where("peer", peer) {
			xy = append(xy, plotter.XY{X: nines(t.float(r, "percent")), Y: t.float(r, "wait_ms")})
		}
		return xy
	}, false)
	if err != nil {
		return err
	}
	p.X.Min, p.Y.Min = 0, 0
	return saveLines(dir, "tail", p, l)
}

func drawRecovery(dir string) error {
	t, err := readTable(dir, "recovery_timeline")
	if t == nil || err != nil {
		return err
	}
	s, err := readTable(dir, "recovery")
	if s == nil || err != nil {
		return err
	}
	stall := s.float(s.rows[0], "stall_s")
	p := newPlot(fmt.Sprintf("The server stalls for %g s under 0.7 × capacity", stall), "seconds since the stall began", "callers served in time, %")
	shade, err := plotter.NewPolygon(plotter.XYs{{X: 0, Y: 0}, {X: stall, Y: 0}, {X: stall, Y: 100}, {X: 0, Y: 100}})
	if err != nil {
		return err
	}
	shade.Color, shade.LineStyle.Width = rgb(0xF0, 0xF0, 0xF0), 0
	p.Add(shade)
	l, err := lines(p, t.distinct("peer"), func(peer string) (xy plotter.XYs) {
		for _, r := range t.where("peer", peer) {
			xy = append(xy, plotter.XY{X: t.float(r, "t_s"), Y: t.float(r, "ok_percent")})
		}
		return xy
	}, false)
	if err != nil {
		return err
	}
	p.Y.Min, p.Y.Max = 0, 102
	if err := saveLines(dir, "recovery_timeline", p, l); err != nil {
		return err
	}
	back := panel{title: "as before after, seconds", values: make(map[string]float64)}
	for _, r := range s.rows {
		if v := s.float(r, "recovered_after_s"); v >= 0 {
			back.values[s.text(r, "peer")] = v
		}
	}
	return savePanels(dir, "recovery", fmt.Sprintf("After a stall of the server of %g s (–: not within the time watched)", stall), s.distinct("peer"), 2, []panel{
		back, panelOf(s, "connections made", "connections_made", 1),
	})
}

func drawSteady(dir string) error {
	t, err := readTable(dir, "steady")
	if t == nil || err != nil {
		return err
	}
	var panels []panel
	for _, network := range t.distinct("network") {
		for _, callers := range t.distinct("callers") {
			p := panelOf(t, network+", callers: "+callers, "ratio_to_plain", 1, "network", network, "callers", callers)
			p.mark = 1
			panels = append(panels, p)
		}
	}
	return savePanels(dir, "steady", "Throughput of BEGIN, SELECT 1, COMMIT, as a ratio to plain pgx", t.distinct("peer"), 3, panels)
}

func drawWaiters(dir string) error {
	t, err := readTable(dir, "waiters")
	if t == nil || err != nil {
		return err
	}
	return savePanels(dir, "waiters", t.text(t.rows[0], "waiters")+" callers who wait", t.distinct("peer"), 4, []panel{
		panelOf(t, "memory, kB each", "bytes_per_waiter", 0.001),
		panelOf(t, "to arrive, µs each", "arrive_us_per_waiter", 1),
		panelOf(t, "to wait, ms/s in all", "waiting_cpu_ms_per_s", 1),
		panelOf(t, "to give up, µs each", "cancel_us_per_waiter", 1),
	})
}

func drawGate(dir string) error {
	t, err := readTable(dir, "gate")
	if t == nil || err != nil {
		return err
	}
	var panels []panel
	for _, op := range t.distinct("operation") {
		for _, n := range []string{"2", "8", "64"} {
			panels = append(panels, panelOf(t, op+", "+n, "ns_per_op", 1, "operation", op, "goroutines", n))
		}
	}
	alone := []panel{panelOf(t, "acquire and release, 1", "ns_per_op", 1, "operation", "acquire and release", "goroutines", "1"),
		panelOf(t, "refuse, 1", "ns_per_op", 1, "operation", "refuse", "goroutines", "1"),
		panelOf(t, "allocations to acquire, release", "allocs_per_op", 1, "operation", "acquire and release", "goroutines", "1")}
	return savePanels(dir, "gate", "The gate alone: ns per operation, by number of goroutines", t.distinct("peer"), 3, append(alone, panels...))
}
