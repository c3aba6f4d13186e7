package selector

import (
	"testing"
	"time"
)

// A configuration that is only tried, or fails to load, doesn't have the running
// one write sooner.
func TestSnapshotInterval(t *testing.T) {
	running, tried, off := new(Policy), new(Policy), new(Policy)
	k := &keeper{users: map[*Policy]keeperUser{
		running: {interval: time.Hour}, tried: {interval: time.Second}, off: {interval: -1},
	}}
	if got := k.interval(); got != time.Second {
		t.Errorf("before any request: %v", got)
	}
	running.serves.Store(true)
	off.serves.Store(true)
	if got := k.interval(); got != time.Hour {
		t.Errorf("while one serves: %v", got)
	}
	leftOut := new(Policy)
	k.users[leftOut] = keeperUser{}
	leftOut.serves.Store(true)
	if got := k.interval(); got != time.Hour {
		t.Errorf("while another that leaves it out serves, too: %v", got)
	}
	delete(k.users, running)
	if got := k.interval(); got != time.Duration(DefaultSnapshot) {
		t.Errorf("while only one that leaves it out serves: %v", got)
	}
	tried.serves.Store(true)
	if got := k.interval(); got != time.Second {
		t.Errorf("when both serve: %v", got)
	}
}
