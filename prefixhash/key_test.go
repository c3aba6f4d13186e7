package prefixhash

import "testing"

func TestSmoke(t *testing.T) {
	h := New(Config{Seed: 1})
	var k Key
	for _, b := range []string{
		`{"model":"m","messages":[{"role":"system","content":"hello"},{"role":"user","content":[{"type":"text","text":"x"}]}]}`,
		`{"messages":[{"content":"hello","role":"system"},{"role":"user","content":"x"}],"model":"m"}`,
		`{"model":"m","system":"hello","messages":[{"role":"user","content":"x"}]}`,
		`{"model":"m","instructions":"hello","input":"x"}`,
		`{"model":"m","prompt":[1,2,3]}`,
		`{"model":"m","prompt":"abc"}`,
	} {
		c := h.Sum(&k, "/v1/chat/completions", []byte(b), true, "")
		t.Logf("%v %+v", c, k)
		parts, _ := h.Explain("/", []byte(b), true, "")
		t.Logf("   %+v", parts)
	}
	b := []byte(`{"model":"m","messages":[{"role":"system","content":"hello"},{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[{"type":"function","function":{"name":"f","parameters":{"a":1,"b":[1,2,3]}}}]}`)
	t.Log(testing.AllocsPerRun(100, func() { h.Sum(&k, "/v1/chat/completions", b, true, "") }))
}
