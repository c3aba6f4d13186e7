package selector

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	zapobserver "go.uber.org/zap/zaptest/observer"
)

func observed() (*zap.Logger, *zapobserver.ObservedLogs) {
	core, logs := zapobserver.New(zapcore.DebugLevel)
	return zap.New(core), logs
}

func TestUnkeyedBodiesAreNoticedOnce(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	for _, test := range []struct {
		name   string
		causes []string // one a ten seconds
		want   int
	}{
		{"none/keyed", []string{keyed, keyed, keyed, keyed, keyed, keyed, keyed, keyed, keyed, keyed, keyed, keyed}, 0},
		{"some/keyed-between", []string{"not_json", "not_json", "not_json", "not_json", "not_json", "not_json", keyed, "not_json", "not_json", "not_json", "not_json", "not_json"}, 0},
		{"all/too-few", []string{"not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json"}, 0},
		{"all/without-body", []string{causeMethod, causeMethod, causeEmpty, causeUpgrade, causeMethod, causeMethod, causeMethod, causeMethod, causeUnreadable, causeMethod, causeMethod, causeMethod}, 0},
		{"all/unkeyed", []string{"not_json", causeEncoding, "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json", "not_json"}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			logger, logs := observed()
			var n notices
			for i, cause := range test.causes {
				n.body(logger, cause, func() time.Time { return start.Add(time.Duration(i) * 10 * time.Second) })
			}
			if logs.Len() != test.want {
				t.Errorf("%d warnings, want %d: %v", logs.Len(), test.want, logs.All())
			}
		})
	}
}

// A scope that nothing resolves is told once by each policy, so that another
// site, or a configuration that has the mistake again, is heard of too.
func TestUnknownScopeIsNoticedByEachPolicy(t *testing.T) {
	logger, logs := observed()
	for policies := range 2 {
		p := &Policy{config: Config{Scope: "{nosuch}"}, logger: logger}
		for range 3 {
			ctx := context.WithValue(t.Context(), caddy.ReplacerCtxKey, caddy.NewReplacer())
			q := &request{policy: p, content: new(content), r: httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil)}
			if q.resolveScope() {
				t.Fatal("resolved")
			}
		}
		if logs.Len() != policies+1 {
			t.Errorf("%d entries after %d policies: %v", logs.Len(), policies+1, logs.All())
		}
	}
}

func TestReportingIsNoticedOnce(t *testing.T) {
	for _, test := range []struct {
		name      string
		responses int
		reported  func(i int) bool
		want      string // the level of the only entry; "" for none
	}{
		{"silent/few", noticeAfter - 1, func(int) bool { return false }, ""},
		{"silent/many", 3 * noticeAfter, func(int) bool { return false }, "warn"},
		{"reports/always", 3 * noticeAfter, func(int) bool { return true }, "info"},
		{"reports/sometimes", 3 * noticeAfter, func(i int) bool { return i%10 == 3 }, "info"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for kind, note := range map[string]func(*reporting, *zap.Logger, bool){
				"cached": func(r *reporting, l *zap.Logger, reported bool) { r.cached(l, "a:1", reported) },
				"orca":   func(r *reporting, l *zap.Logger, reported bool) { r.orca(l, "a:1", reported) },
			} {
				logger, logs := observed()
				var r reporting
				for i := range test.responses {
					note(&r, logger, test.reported(i))
				}
				want := test.want
				if kind == "orca" && want == "info" {
					want = "" // that it answers is what was asked for
				}
				var got string
				for _, entry := range logs.All() {
					got += entry.Level.String()
				}
				if got != want {
					t.Errorf("%s: logged %q, want %q", kind, got, want)
				}
			}
		})
	}
}
