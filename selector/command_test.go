package selector

import (
	"strings"
	"testing"
)

func TestPrintStatus(t *testing.T) {
	for _, test := range []struct{ name, upstream, want string }{
		{"hit ratio/no request", `{"address":"a:1"}`, "a:1  0  - "},
		{"hit ratio/not reported", `{"address":"a:1","requests":2}`, "a:1  2  not reported "},
		{"hit ratio/reported", `{"address":"a:1","requests":2,"cached_tokens":1,"reported_prompt_tokens":4}`, "a:1  2  25.0 % "},
		{"drain/everywhere", `{"address":"a:1","drain":{"by":"api","since":"2026-01-01T00:00:00Z"}}`, "by api since"},
		{"drain/in a site", `{"address":"a:1","drain":{"by":"config","since":"2026-01-01T00:00:00Z","sites":["llm.example on :443"]}}`, ":00 in llm.example on :443"},
		{"drain/in one without a name", `{"address":"a:1","drain":{"by":"config","since":"2026-01-01T00:00:00Z","sites":["on :443"]}}`, ":00 on :443"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out strings.Builder
			if err := printStatus(&out, []byte("["+test.upstream+"]")); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(got, strings.Join(strings.Fields(test.want), " ")) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
