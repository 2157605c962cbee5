//go:build linux

package observability

import (
	_ "embed"
	"encoding/json"
	"strings"
	"time"
)

//go:embed dashboard.json
var dashboardJSON []byte

// Panel is one panel of the dashboard.
type Panel struct {
	Title   string
	Targets []struct{ Expr, LegendFormat string }
}

// Dashboard returns the panels, with the variables in their queries filled in: all gates, and rates over interval.
func Dashboard(interval time.Duration) ([]Panel, error) {
	var d struct{ Panels []Panel }
	if err := json.Unmarshal(dashboardJSON, &d); err != nil {
		return nil, err
	}
	fill := strings.NewReplacer("$__rate_interval", interval.String(), "$gate", ".*")
	for _, p := range d.Panels {
		for i := range p.Targets {
			p.Targets[i].Expr = fill.Replace(p.Targets[i].Expr)
		}
	}
	return d.Panels, nil
}
