package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"

	"github.com/pgxgated/pgxgated/internal/telemetry"
)

// histogram is a reading of a telemetry.Histogram, as a classic and a native one at once, which none of client_golang's
// constant metrics is. A server takes the kind that it can.
type histogram struct {
	desc   *prometheus.Desc
	labels []*dto.LabelPair
	counts telemetry.Counts
}

func newHistogram(desc *prometheus.Desc, h *telemetry.Histogram, label string) prometheus.Metric {
	return &histogram{desc: desc, labels: prometheus.MakeLabelPairs(desc, []string{label}), counts: h.Read()}
}

func (h *histogram) Desc() *prometheus.Desc { return h.desc }

func (h *histogram) Write(out *dto.Metric) error {
	c := &h.counts
	d := &dto.Histogram{
		SampleCount:   proto.Uint64(c.Count),
		SampleSum:     proto.Float64(c.Sum.Seconds()),
		Schema:        proto.Int32(telemetry.Schema),
		ZeroThreshold: proto.Float64(telemetry.ZeroThreshold),
		ZeroCount:     proto.Uint64(c.Zero),
	}
	for i, upper := range telemetry.Buckets {
		d.Bucket = append(d.Bucket, &dto.Bucket{UpperBound: proto.Float64(upper), CumulativeCount: proto.Uint64(c.Upto[i])})
	}
	// Buckets with something in them, in spans, each count as the difference to the one before. Up to two empty ones are
	// cheaper inside a span than a new span.
	last, before := -1, int64(0) // the bucket that was written last
	put := func(i int) {
		n := int64(c.Native[i])
		d.PositiveDelta = append(d.PositiveDelta, n-before)
		before = n
		d.PositiveSpan[len(d.PositiveSpan)-1].Length = proto.Uint32(d.PositiveSpan[len(d.PositiveSpan)-1].GetLength() + 1)
		last = i
	}
	for i, n := range c.Native {
		switch {
		case n == 0:
			continue
		case last < 0:
			d.PositiveSpan = append(d.PositiveSpan, &dto.BucketSpan{Offset: proto.Int32(int32(c.Offset + i)), Length: proto.Uint32(0)})
		case i-last > 3:
			d.PositiveSpan = append(d.PositiveSpan, &dto.BucketSpan{Offset: proto.Int32(int32(i - last - 1)), Length: proto.Uint32(0)})
		default:
			for last < i-1 {
				put(last + 1)
			}
		}
		put(i)
	}
	out.Histogram = d
	out.Label = h.labels
	return nil
}
