package gateways

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prefix-affinity/caddy/integration/harness"
)

// TestReach: however a Redis is to be reached, gateways meet there.
func TestReach(t *testing.T) {
	certificate, key := newCertificate(t)
	t.Setenv("SSL_CERT_FILE", certificate) // the system's roots, for the gateways
	t.Setenv("SYNC_PASSWORD", "pass:word")
	secret := newRedis(t)
	if answer := secret.say("ACL SETUSER caddy on >pass:word ~other:* +xadd +xread"); !strings.HasPrefix(answer, "+OK") {
		t.Fatal(answer)
	}
	if answer := secret.say("ACL SETUSER writer on >pass:word ~* +xadd"); !strings.HasPrefix(answer, "+OK") {
		t.Fatal(answer)
	}
	if answer := secret.say("CONFIG SET requirepass another"); !strings.HasPrefix(answer, "+OK") {
		t.Fatal(answer)
	}
	cluster := newRedis(t, "--cluster-enabled", "yes")
	if answer := cluster.say("ACL SETUSER caddy on >pass:word ~* +xadd +xread"); !strings.HasPrefix(answer, "+OK") {
		t.Fatal(answer)
	}
	if answer := cluster.say("CLUSTER ADDSLOTSRANGE 0 16383"); !strings.HasPrefix(answer, "+OK") {
		t.Fatal(answer)
	}
	eventually(t, "the cluster to be one", func() bool { return strings.Contains(cluster.say("CLUSTER INFO"), "cluster_state:ok") })
	encrypted, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(encrypted)
	if err != nil {
		t.Fatal(err)
	}
	newRedis(t, "--tls-port", port, "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate, "--tls-auth-clients", "no")
	nobody, err := harness.FreeAddr()
	if err != nil {
		t.Fatal(err)
	}

	fleet := harness.TestFleet(t, 4, quick)
	for _, test := range []struct{ name, sync string }{
		{"account/user of the fewest rights", secret.addr + " {\nusername caddy\npassword {env.SYNC_PASSWORD}\nstream_prefix other\n}"},
		{"account/password alone", secret.addr + " {\npassword another\n}"},
		{"database/other", newRedis(t).addr + " {\ndb 7\n}"},
		{"cluster/a node that is there and one that is not", nobody + " " + cluster.addr},
		{"tls/verified", encrypted + " {\ntls\n}"},
	} {
		t.Run(test.name, func(t *testing.T) {
			options := []string{"seed secret", "sync redis " + test.sync}
			gates := []*gateway{newGateway(t, fleet.Upstreams(), options...), newGateway(t, fleet.Upstreams(), options...)}
			meet(t, gates)
			where := make(map[int]string)
			for i := range 20 {
				where[i] = ask(t, gates[0], i, 2)
			}
			eventually(t, "the other to hear of it", func() bool { return gates[1].figure(t, "sync_events_received_total") >= 40 })
			if same := agree(t, where, 3, gates[1]); same < 0.9 {
				t.Errorf("%.0f %% of the conversations stay where they were", 100*same)
			}
			for i, g := range gates {
				if n := g.logged(t, away); n > 0 {
					t.Errorf("gateway %d warned %d times", i, n)
				}
			}
		})
	}

	// One that answers, and refuses, is not away. It is warned of once.
	for _, test := range []struct{ name, sync, want string }{
		{"login/no password", secret.addr, login},
		{"login/wrong password", secret.addr + " {\npassword wrong\n}", login},
		{"login/wrong username", secret.addr + " {\nusername nobody\npassword {env.SYNC_PASSWORD}\n}", login},
		{"login/username where there are none", newRedis(t).addr + " {\nusername nobody\npassword wrong\n}", login},
		{"rights/another stream's", secret.addr + " {\nusername caddy\npassword {env.SYNC_PASSWORD}\n}", rights},
		{"rights/writes only", secret.addr + " {\nusername writer\npassword {env.SYNC_PASSWORD}\n}", rights},
		{"rights/none on a cluster", cluster.addr + " " + cluster.addr + " {\nusername caddy\npassword {env.SYNC_PASSWORD}\n}", rights},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := newGateway(t, fleet.Upstreams(), "seed secret", "sync redis "+test.sync)
			eventually(t, "a warning", func() bool { return g.logged(t, test.want) > 0 })
			time.Sleep(time.Second) // for more tries
			if n, others := g.logged(t, test.want), g.logged(t, "goes on alone"); n != 1 || others != 1 {
				t.Errorf("%d warnings, of which %d are right", others, n)
			}
			if g.logged(t, "pass:word") > 0 {
				t.Error("the log has the password")
			}
		})
	}

	t.Run("tls/unknown authority", func(t *testing.T) {
		t.Setenv("SSL_CERT_FILE", os.DevNull)
		t.Setenv("SSL_CERT_DIR", t.TempDir())
		g := newGateway(t, fleet.Upstreams(), "seed secret", "sync redis "+encrypted+" {\ntls\n}")
		eventually(t, "a warning", func() bool { return g.logged(t, away) == 1 })
		if g.logged(t, "certificate signed by unknown authority") == 0 {
			t.Error("does not say why")
		}
	})
}

// newCertificate makes files of a certificate for this machine and of its key.
func newCertificate(t *testing.T) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	bytes, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certificate, key = filepath.Join(dir, "certificate.pem"), filepath.Join(dir, "key.pem")
	for name, block := range map[string]*pem.Block{certificate: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: bytes}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certificate, key
}
