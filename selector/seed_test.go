package selector

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestKeptSecret(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "prefix_affinity")
	path := filepath.Join(dir, "seed")
	secret, err := keptSecret(path)
	if err != nil || len(secret) < 20 {
		t.Fatalf("made %q, %v", secret, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}

	// One that is there is only read: the disk may be full, or not for writing.
	long := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(dir, long, long); err != nil {
		t.Fatal(err)
	}
	if again, err := keptSecret(path); again != secret || err != nil {
		t.Errorf("then %q, %v", again, err)
	}
	if info, err := os.Stat(dir); err != nil || !info.ModTime().Equal(long) {
		t.Errorf("the directory was written to: %v", err)
	}

	// Of two processes that make one, both have what stays.
	if err := makeSecret(path); err != nil {
		t.Error(err)
	}
	if again, err := keptSecret(path); again != secret || err != nil {
		t.Errorf("after another one was made: %q, %v", again, err)
	}

	if err := os.WriteFile(path, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := keptSecret(path); err == nil || !strings.Contains(err.Error(), "is damaged: remove it") {
		t.Errorf("damaged: %v", err)
	}
	if _, err := keptSecret(filepath.Join(path, "seed")); err == nil {
		t.Error("made below a file")
	}
}
