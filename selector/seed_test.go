package selector

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestKeepSecret(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "prefix_affinity")
	path := filepath.Join(dir, "seed")
	const secret, other = "abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba"
	holds := func(want string) {
		t.Helper()
		if got, err := readSecret(path); got != want || err != nil {
			t.Errorf("it holds %q, %v", got, err)
		}
	}
	if err := keepSecret(path, secret); err != nil { // makes the directory, too
		t.Fatal(err)
	}
	holds(secret)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}

	// One that is there is only read: the disk may be full, or not for writing.
	long := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(dir, long, long); err != nil {
		t.Fatal(err)
	}
	if err := keepSecret(path, secret); err != nil {
		t.Error(err)
	}
	holds(secret)
	if info, err := os.Stat(dir); err != nil || !info.ModTime().Equal(long) {
		t.Errorf("the directory was written to: %v", err)
	}

	// Of two processes that make one, both have what stays.
	if err := makeSecret(path, other); err != nil {
		t.Error(err)
	}
	holds(secret)
	if err := keepSecret(path, other); err == nil || !strings.Contains(err.Error(), "holds another seed") {
		t.Errorf("another one: %v", err)
	}
	holds(secret)

	if err := os.RemoveAll(dir); err != nil { // while Caddy runs
		t.Fatal(err)
	}
	if err := keepSecret(path, secret); err != nil {
		t.Error(err)
	}
	holds(secret)
	if err := os.WriteFile(path, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := keepSecret(path, secret); err == nil || !strings.Contains(err.Error(), "is damaged: remove it") {
		t.Errorf("damaged: %v", err)
	}
	if err := keepSecret(filepath.Join(path, "seed"), secret); err == nil {
		t.Error("made below a file")
	}
}
