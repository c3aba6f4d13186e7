package integration

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/prefix-affinity/caddy"
)

var update = flag.Bool("update", false, "write what the adapter gives into the fixtures of integration/adapt")

const divider = "----------\n"

// adapt turns a Caddyfile into indented JSON, as `caddy adapt --pretty` does,
// and fails where it is not formatted as `caddy fmt` would.
func adapt(t *testing.T, caddyfile string) (string, error) {
	t.Helper()
	result, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "", err
	}
	for _, warning := range warnings {
		t.Errorf("line %d: %s", warning.Line, warning.Message)
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, result, "", "\t"); err != nil {
		t.Fatal(err)
	}
	return pretty.String() + "\n", nil
}

// A fixture is a Caddyfile, a divider and the JSON that it must adapt to, or
// the error that it must give. They show every option at work.
func TestAdaptFixtures(t *testing.T) {
	fixtures, err := filepath.Glob("adapt/*.caddyfiletest")
	if err != nil || len(fixtures) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, path := range fixtures {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".caddyfiletest"), func(t *testing.T) {
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			caddyfile, want, _ := strings.Cut(string(content), divider)
			got, err := adapt(t, caddyfile)
			if err != nil {
				got = "error: " + err.Error() + "\n"
			}
			if *update {
				if err := os.WriteFile(path, []byte(caddyfile+divider+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != want {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// Each mistake must be told with the option's name and its line: the last one
// that does not close a block.
func TestAdaptErrors(t *testing.T) {
	for _, test := range []struct{ name, option, want string }{
		{"unknown/option", "bogus", "unrecognized option 'bogus': the options are affinity_weight, block_size, cached_tokens_header,"},
		{"unknown/misspelt", "sesion_header X-Id", "unrecognized option 'sesion_header': did you mean 'session_header'? the options are"},
		{"unknown/hyphen", "block-size 256", "did you mean 'block_size'?"},
		{"unknown/sync-misspelt", "seed s\nsync redis 10.0.0.9 {\n\tstream-prefix x\n}", "unrecognized option 'stream-prefix': did you mean 'stream_prefix'? the options are db, password, stream_prefix, tls, username"},
		{"unknown/fallback misspelt", "fallback least_con", "unrecognized fallback 'least_con': did you mean 'least_conn'? there is no module http.reverse_proxy.selection_policies.least_con"},
		{"unknown/fallback", "fallback nosuch", "unrecognized fallback 'nosuch': there is no module http.reverse_proxy.selection_policies.nosuch"},
		{"value/fallback-itself", "fallback prefix_affinity", "invalid fallback 'prefix_affinity'"},
		{"value/scope", "scope Authorization", "invalid scope 'Authorization'"},
		{"value/scope-of-nobody", "scope {env.TENANT}-{file./run/tenant}", "it is the same for every request"},
		{"value/scope-not-closed", "scope {http.request.header.X", "a brace has no counterpart"},
		{"value/seed-not-closed", "seed {env.SEED", "invalid seed: the brace of '{env.' is not closed"},
		{"value/seed-not-closed-first", "seed {env.A{env.B}", "invalid seed: the brace of '{env.' is not closed"},
		{"value/sync-not-closed", "seed s\nsync redis {file./run/redis", "invalid address of sync: the brace of '{file.' is not closed"},
		{"value/sync-colons", "seed s\nsync redis :::", "invalid address ':::' of sync"},
		{"value/sync-brackets", "seed s\nsync redis [a:b]", "invalid address '[a:b]' of sync"},
		{"block/fallback", "fallback least_conn {\n\tbogus\n}", "unexpected 'bogus': fallback least_conn has no more options"},
		{"extra/sync-option", "seed s\nsync redis 10.0.0.9 password x", "invalid address 'password' of sync: options belong in a block"},
		{"unknown/of reverse_proxy", "lb_retries 2", "unrecognized option 'lb_retries': it is one of reverse_proxy and belongs outside of this block"},
		{"unknown/of reverse_proxy, too", "fail_duration 10s", "it is one of reverse_proxy and belongs outside of this block"},
		{"value/sync-url", "seed s\nsync redis redis://10.0.0.9:6379", "should be host or host:port"},
		{"value/sync-port", "seed s\nsync redis 10.0.0.9:redis", "invalid address '10.0.0.9:redis' of sync"},
		{"empty/sync-address", "seed s\nsync redis \"\"", "invalid address '' of sync"},
		{"empty/sync-password", "seed s\nsync redis 10.0.0.9 {\n\tpassword \"\"\n}", "invalid password ''"},
		{"empty/sync-stream_prefix", "seed s\nsync redis 10.0.0.9 {\n\tstream_prefix \" \"\n}", "invalid stream_prefix ' '"},
		{"empty/session_header", `session_header X-Ok ""`, "invalid session_header ''"},
		{"empty/cached_tokens_header", `cached_tokens_header ""`, "invalid cached_tokens_header ''"},
		{"empty/queue_depth_header", `queue_depth_header ""`, "invalid queue_depth_header ''"},
		{"empty/scope", `scope ""`, "invalid scope ''"},
		{"empty/seed", `seed ""`, "invalid seed ''"},
		{"empty/seed-blank", `seed " "`, "invalid seed ' '"},
		{"empty/ignore", `ignore ""`, "invalid ignore ''"},
		{"empty/orca", `orca ""`, "invalid orca ''"},
		{"empty/poll-path", `poll 1s ""`, "invalid poll_path ''"},
		{"empty/block_size", `block_size ""`, "invalid block_size ''"},
		{"value/snapshot", "snapshot of", "invalid snapshot 'of': should be an interval such as 10m, or off"},
		{"empty/snapshot", `snapshot ""`, "invalid snapshot ''"},
		{"empty/drain", `drain a:1 ""`, "invalid drain ''"},
		{"value/drain-url", "drain http://a:1", "invalid drain 'http://a:1': should be the address of an upstream, as host:port"},
		{"value/drain-no-port", "drain a", "invalid drain 'a'"},
		{"value/drain-list", "drain a:1,b:1", "invalid drain 'a:1,b:1'"},
		{"value/drain-range", "drain a:1-2", "invalid drain 'a:1-2'"},
		{"repeated/fallback", "fallback random\nfallback first", "fallback already specified"},
		{"repeated/block_size", "block_size 256\nblock_size 256", "block_size already specified"},
		{"repeated/orca", "orca\norca", "orca already specified"},
		{"repeated/explain", "explain\nexplain", "explain already specified"},
		{"missing/fallback", "fallback", "wrong argument count of fallback: should be 'fallback "},
		{"missing/block_size", "block_size", "wrong argument count of block_size: should be 'block_size "},
		{"missing/max_body", "max_body", "wrong argument count of max_body: should be 'max_body "},
		{"missing/min_match", "min_match", "wrong argument count of min_match: should be 'min_match "},
		{"missing/affinity_weight", "affinity_weight", "wrong argument count of affinity_weight: should be 'affinity_weight "},
		{"missing/replica_cache", "replica_cache", "wrong argument count of replica_cache: should be 'replica_cache "},
		{"missing/cached_tokens_header", "cached_tokens_header", "wrong argument count of cached_tokens_header: should be 'cached_tokens_header "},
		{"missing/queue_depth_header", "queue_depth_header", "wrong argument count of queue_depth_header: should be 'queue_depth_header "},
		{"missing/session_header", "session_header", "wrong argument count of session_header: should be 'session_header "},
		{"missing/scope", "scope", "wrong argument count of scope: should be 'scope "},
		{"missing/ignore", "ignore", "wrong argument count of ignore: should be 'ignore "},
		{"missing/seed", "seed", "wrong argument count of seed: should be 'seed "},
		{"missing/drain", "drain", "wrong argument count of drain: should be 'drain "},
		{"value/drain_timeout", "drain_timeout soon", "invalid drain_timeout 'soon'"},
		{"missing/poll", "poll", "wrong argument count of poll: should be 'poll "},
		{"value/poll", "poll often", "invalid poll 'often'"},
		{"value/poll-range", "poll 1ms", "invalid poll '1ms'"},
		{"value/poll-path", "poll 1s metrics", "invalid poll_path 'metrics'"},
		{"missing/snapshot", "snapshot", "wrong argument count of snapshot: should be 'snapshot "},
		{"value/snapshot", "snapshot never", "invalid snapshot 'never'"},
		{"value/snapshot-range", "snapshot 1ms", "invalid snapshot '1ms'"},
		{"extra/snapshot", "snapshot off 1m", "wrong argument count of snapshot: should be 'snapshot "},
		{"missing/sync", "sync", "wrong argument count of sync: should be 'sync "},
		{"missing/sync-address", "sync redis", "wrong argument count of sync: should be 'sync "},
		{"unknown/sync", "sync gossip 10.0.0.9", "unrecognized sync 'gossip'"},
		{"missing/index_size", "index_size", "wrong argument count of index_size: should be 'index_size "},
		{"extra/block_size", "block_size 256 512", "wrong argument count of block_size: should be 'block_size "},
		{"extra/affinity_weight", "affinity_weight auto 2", "wrong argument count of affinity_weight: should be 'affinity_weight "},
		{"extra/replica_cache", "replica_cache auto 2", "wrong argument count of replica_cache: should be 'replica_cache "},
		{"extra/orca", "orca text json", "wrong argument count of orca: should be 'orca "},
		{"extra/scope", "scope a b", "wrong argument count of scope: should be 'scope "},
		{"extra/poll", "poll 1s /metrics /more", "wrong argument count of poll: should be 'poll <interval> [<path>]'"},
		{"extra/seed", "seed sesame open", "wrong argument count of seed: should be 'seed <secret>', at"},
		{"extra/shadow", "shadow off", "wrong argument count of shadow: should be 'shadow'"},
		{"extra/sync-tls", "seed s\nsync redis 10.0.0.9 {\n\ttls on\n}", "wrong argument count of tls: should be 'tls'"},
		{"block/explain", "explain {\n}", "explain has no block: should be 'explain'"},
		{"block/min_match", "min_match 64 {\n}", "min_match has no block: should be 'min_match <tokens>'"},
		{"block/min_match-alone", "min_match {\n}", "wrong argument count of min_match: should be 'min_match <tokens>'"},
		{"block/orca", "orca {\n}", "orca has no block: should be 'orca [text|json]'"},
		{"block/replica_cache", "replica_cache auto {\n}", "replica_cache has no block: should be 'replica_cache <tokens>|auto'"},
		{"block/drain", "drain a:1 {\n}", "drain has no block: should be 'drain <upstream...>'"},
		{"block/sync-tls", "seed s\nsync redis 10.0.0.9 {\n\ttls {\n\t}\n}", "tls has no block: should be 'tls'"},
		{"block/fallback-alone", "fallback {\n}", "wrong argument count of fallback: should be 'fallback <policy> [<args...>]'"},
		{"extra/explain", "explain yes", "wrong argument count of explain: should be 'explain'"},
		{"value/block_size", "block_size tiny", "invalid block_size 'tiny'"},
		{"value/block_size-range", "block_size 7", "invalid block_size '7'"},
		{"value/max_body", "max_body -1", "invalid max_body '-1'"},
		{"value/max_body-range", "max_body 4GB", "invalid max_body '4000000000'"},
		{"value/min_match", "min_match 0", "invalid min_match '0'"},
		{"value/min_match-range", "min_match 4000000000", "invalid min_match '4000000000': should be from 1 to 1048576 tokens"},
		{"value/replica_cache-little", "replica_cache 80", "invalid replica_cache '80': should be from 256 to 1073741824 tokens, or auto"},
		{"value/replica_cache-much", "replica_cache 80000000000", "invalid replica_cache '80000000000': should be from 256 to 1073741824 tokens, or auto"},
		{"value/poll-rare", "poll 1000h", "invalid poll '1000h0m0s': should be from 100ms to 1h0m0s"},
		{"value/snapshot-rare", "snapshot 30d", "invalid snapshot '720h0m0s': should be from 1s to 24h0m0s, or off"},
		{"value/index_size-much", "index_size 2000000000", "invalid index_size '2000000000': should be from 1024 to 1073741824 blocks"},
		{"value/sync-db", "seed s\nsync redis 10.0.0.9 {\n\tdb 70000\n}", "invalid db '70000': should be the number of a database, from 0 to 65535"},
		{"value/affinity_weight", "affinity_weight 0.5", "invalid affinity_weight '0.5'"},
		{"value/affinity_weight-nan", "affinity_weight NaN", "invalid affinity_weight 'NaN'"},
		{"value/replica_cache", "replica_cache lots", "invalid replica_cache 'lots'"},
		{"value/orca", "orca xml", "invalid orca 'xml'"},
		{"value/cached_tokens_header", `cached_tokens_header "not a name"`, "invalid cached_tokens_header 'not a name'"},
		{"value/queue_depth_header", `queue_depth_header "b:c"`, "invalid queue_depth_header 'b:c'"},
		{"value/session_header", `session_header X-Ok "not ok"`, "invalid session_header 'not ok'"},
		{"value/ignore", "ignore (", "invalid ignore '('"},
		{"value/ignore-empty", "ignore a*", "invalid ignore 'a*'"},
		{"value/index_size", "index_size 1.5", "invalid index_size '1.5'"},
		{"value/index_size-range", "index_size 3", "invalid index_size '3'"},
	} {
		t.Run(test.name, func(t *testing.T) {
			lines := strings.Split(test.option, "\n")
			caddyfile := ":80\nreverse_proxy a:1 b:1 {\n\tlb_policy prefix_affinity {\n\t\t" + strings.Join(lines, "\n\t\t") + "\n\t}\n}\n"
			_, err := adapt(t, caddyfile)
			if err == nil {
				t.Fatal("adapted without an error")
			}
			for strings.TrimSpace(lines[len(lines)-1]) == "}" {
				lines = lines[:len(lines)-1]
			}
			line := "Caddyfile:" + string(rune('0'+3+len(lines)))
			if !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), line) {
				t.Errorf("got %q, want it to name %q and %q", err, test.want, line)
			}
		})
	}
	t.Run("none/drain", func(t *testing.T) { // what an upstream can be called
		if _, err := adapt(t, ":80\nreverse_proxy a:1 unix//run/b {env.C} {\n\tlb_policy prefix_affinity {\n\t\tdrain a:1 [::1]:8000 :8000 unix//run/b {env.C}\n\t}\n}\n"); err != nil {
			t.Error(err)
		}
	})
	t.Run("line/sync-block", func(t *testing.T) { // of the option, not of the brace that ends it
		if _, err := adapt(t, ":80\nreverse_proxy a:1 {\n\tlb_policy prefix_affinity {\n\t\tsync redis b:redis {\n\t\t\ttls\n\t\t}\n\t}\n}\n"); err == nil || !strings.Contains(err.Error(), "Caddyfile:4") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("extra/policy", func(t *testing.T) {
		if _, err := adapt(t, ":80\nreverse_proxy a:1 {\n\tlb_policy prefix_affinity x\n}\n"); err == nil || !strings.Contains(err.Error(), "unexpected argument 'x' of prefix_affinity: should be options in a block, at Caddyfile:3") {
			t.Errorf("got %v", err)
		}
	})
}
