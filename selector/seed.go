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
	keep  func() error // sees to it that the next process has it, too
}

// seedOf turns a secret into a seed.
func seedOf(secret string, keep func() error) seed {
	sum := sha256.Sum256([]byte("prefix_affinity seed\x00" + secret))
	return seed{binary.BigEndian.Uint64(sum[:]), keep}
}

// configuredSeed is kept by whoever wrote it down.
func configuredSeed(secret string) seed { return seedOf(secret, func() error { return nil }) }

// ownSeed is the seed where none is configured: random, made once for this
// machine and kept in Caddy's data directory, so that hashes agree across
// restarts and can't be computed outside.
var ownSeed = sync.OnceValue(func() seed {
	path := filepath.Join(caddy.AppDataDir(), "prefix_affinity", "seed")
	secret, err := openSecret(path, rand.Text())
	if err != nil {
		caddy.Log().Named("prefix_affinity").Warn("seed can't be kept: as long as it can't, a restart forgets what is learned", zap.Error(err))
		secret = rand.Text()
	}
	return seedOf(secret, func() error { return keepSecret(path, secret) })
})

// keepSecret sees to it that a file holds the secret: it may have been deleted, or
// there was no room for it.
func keepSecret(path, secret string) error {
	kept, err := openSecret(path, secret)
	if err == nil && kept != secret {
		err = fmt.Errorf("seed file '%s' holds another seed than this process has", path)
	}
	return err
}

// openSecret reads the secret in a file, which it makes of fresh where there is none.
func openSecret(path, fresh string) (string, error) {
	secret, err := readSecret(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return secret, err
	}
	if err := makeSecret(path, fresh); err != nil {
		return "", err
	}
	return readSecret(path)
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

// makeSecret puts a secret into a file, unless another process does.
func makeSecret(path, secret string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".seed-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(secret + "\n")
	if err := errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	// A link appears complete or not at all, and only where there is none.
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}
