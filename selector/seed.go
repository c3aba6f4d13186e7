package selector

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// seed is the start of a policy's hash chains.
type seed struct {
	start uint64
	lasts bool // the next process has it, too
}

// seedOf turns a secret into a seed.
func seedOf(secret string, lasts bool) seed {
	sum := sha256.Sum256([]byte("prefix_affinity seed\x00" + secret))
	return seed{binary.BigEndian.Uint64(sum[:]), lasts}
}

// ownSeed is the seed where none is configured: random, made once for this
// machine and kept in Caddy's data directory, so that hashes agree across
// restarts and can't be computed outside.
var ownSeed = sync.OnceValue(func() seed {
	secret, err := keptSecret(filepath.Join(caddy.AppDataDir(), "prefix_affinity", "seed"))
	if err != nil {
		caddy.Log().Named("prefix_affinity").Warn("seed can't be kept: what is learned ends with this process, and goes into no snapshot",
			zap.Error(err))
		secret = rand.Text()
	}
	return seedOf(secret, err == nil)
})

// keptSecret reads the secret in a file, which it makes where there is none.
func keptSecret(path string) (string, error) {
	secret, err := readSecret(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeSecret(path); err != nil {
			return "", err
		}
		return readSecret(path)
	}
	return secret, err
}

func readSecret(path string) (string, error) {
	kept, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	secret := strings.TrimSpace(string(kept))
	if len(secret) < hex.EncodedLen(8) {
		return "", fmt.Errorf("seed file '%s' is damaged: remove it", path)
	}
	return secret, nil
}

// makeSecret puts a random secret into a file, unless another process does.
func makeSecret(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".seed-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(rand.Text() + "\n")
	if err := errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	// A link appears complete or not at all, and only where there is none.
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}
