package metrics_test

import (
	"database/sql"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/metrics"
)

func ExampleNewCollector() {
	db, err := sql.Open(pgxgated.DriverName, "postgres://app@db/orders?pool_max_conns=20&gate_name=shop")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	registry := prometheus.NewRegistry() // or prometheus.DefaultRegisterer
	if err := registry.Register(metrics.NewCollector(pgxgated.GateOf(db))); err != nil {
		fmt.Println(err) // a gate that is registered already
		return
	}
	families, err := registry.Gather()
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, f := range families {
		if f.GetName() == "pgxgated_limit" {
			for _, m := range f.GetMetric() {
				fmt.Println(m.GetLabel()[1].GetValue(), m.GetGauge().GetValue())
			}
		}
	}
	// Unordered output:
	// running 16
	// admission 176
}
