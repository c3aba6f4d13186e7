package signal

import (
	"strings"
	"testing"
)

func TestParseORCA(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []string
		want   Load
	}{
		{"vllm/text", []string{"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0"}, Load{3, 0.4, -1}},
		{"vllm/json", []string{`JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}}`}, Load{3, 0.4, -1}},
		{"vllm/text, an entry per engine", []string{"TEXT named_metrics.num_requests_waiting=1.0, named_metrics.num_requests_waiting=5.0, named_metrics.num_requests_waiting=2.0"}, Load{5, -1, -1}},
		{"vllm/json, an entry per engine", []string{`JSON {"named_metrics":{"num_requests_waiting":1,"num_requests_waiting":5,"num_requests_waiting":2}}`}, Load{5, -1, -1}},
		{"vllm/idle", []string{"TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"}, Load{0, 0, -1}},
		{"vllm/text without statistics", []string{"TEXT "}, Load{-1, -1, -1}},
		{"vllm/json without statistics", []string{`JSON {"named_metrics": {}}`}, Load{-1, -1, -1}},
		{"triton/json", []string{`JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":131072}}`}, Load{-1, 0.25, 131072}},
		{"triton/text", []string{"TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=131072"}, Load{-1, 0.25, 131072}},
		{"names/without named_metrics, text", []string{"TEXT num_requests_waiting=2"}, Load{2, -1, -1}},
		{"names/without named_metrics, json", []string{`JSON {"num_requests_waiting":2}`}, Load{2, -1, -1}},
		{"names/dotted, json", []string{`JSON {"named_metrics.num_requests_waiting":2}`}, Load{2, -1, -1}},
		{"names/standard ones only", []string{`JSON {"cpu_utilization":0.3,"rps_fractional":2}`}, Load{-1, -1, -1}},
		{"values/two lines", []string{"TEXT named_metrics.num_requests_waiting=2", "JSON {\"kv_cache_usage_perc\":0.5}"}, Load{2, 0.5, -1}},
		{"values/lower case format", []string{"text num_requests_waiting=2"}, Load{2, -1, -1}},
		{"garbage/none", nil, Load{-1, -1, -1}},
		{"garbage/empty", []string{"", " ", "TEXT", "JSON"}, Load{-1, -1, -1}},
		{"garbage/unknown format", []string{"BIN CgA="}, Load{-1, -1, -1}},
		{"garbage/no numbers", []string{"TEXT num_requests_waiting=NaN, kv_cache_usage_perc=-1, kv_cache_usage_perc=40, max_token_capacity=0x1p4, num_requests_waiting=Inf, num_requests_waiting"}, Load{-1, -1, -1}},
		{"garbage/json", []string{`JSON {"named_metrics":[1,2]`, `JSON [1]`, `JSON {"named_metrics":"x","num_requests_waiting":"3"}`, `JSON {"num_requests_waiting":-3}`}, Load{-1, -1, -1}},
		{"garbage/too long", []string{"TEXT num_requests_waiting=4, " + strings.Repeat("x", maxReportBytes)}, Load{-1, -1, -1}},
		{"garbage/between figures", []string{"TEXT ,=,x=1,, num_requests_waiting = 4 ,=2"}, Load{4, -1, -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, ok := ParseORCA(c.values)
			if got != c.want || ok != (c.want != Load{-1, -1, -1}) {
				t.Errorf("ParseORCA(%q) = %+v, %v; want %+v", c.values, got, ok, c.want)
			}
		})
	}
}

func TestParseCount(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []string
		want   float64 // -1: none
	}{
		{"number/whole", []string{"64"}, 64},
		{"number/zero", []string{"0"}, 0},
		{"number/fraction", []string{" 3.0 "}, 3},
		{"number/several", []string{"3", "x", "5", "4"}, 5},
		{"none/missing", nil, -1},
		{"none/empty", []string{""}, -1},
		{"none/negative", []string{"-1"}, -1},
		{"none/words", []string{"NaN", "Inf", "infinity", "0x1p4", "1_000", "12ms", "3,5"}, -1},
		{"none/too large", []string{"1e999"}, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, ok := ParseCount(c.values)
			if got != c.want || ok != (c.want >= 0) {
				t.Errorf("ParseCount(%q) = %v, %v; want %v", c.values, got, ok, c.want)
			}
		})
	}
}
