package selector

import (
	"encoding/json"
	"strings"
	"testing"
)

// What only JSON can say; package integration has what a Caddyfile can.
func TestConfigInJSON(t *testing.T) {
	for _, test := range []struct{ name, config, want string }{
		{"snapshot/left out", `{}`, ""},
		{"snapshot/off", `{"snapshot": -1}`, ""},
		{"snapshot/interval", `{"snapshot": "10s"}`, ""},
		{"snapshot/negative", `{"snapshot": -2}`, "invalid snapshot '-2ns'"},
		{"snapshot/negative interval", `{"snapshot": "-10s"}`, "invalid snapshot '-10s'"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var c Config
			if err := json.Unmarshal([]byte(test.config), &c); err != nil {
				t.Fatal(err)
			}
			if err := c.Validate(); (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	t.Run("fallback/null", func(t *testing.T) { // is none
		newTestPolicy(t, Config{FallbackRaw: json.RawMessage("null")})
	})
}
