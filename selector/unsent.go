package selector

import (
	"sync"
	"time"
)

// sendingTime is more than passes between the choice of an upstream and the sending.
const sendingTime = 10 * time.Millisecond

// unsent are the requests for which an upstream was chosen, oldest first, until they
// are sent. Caddy may still give one up, and tells nobody; its attempt would stay in
// the accounts for good. To watch every request's context for that would be a tenth of
// what a short prompt costs, so only those get a watch that are not sent in time.
var unsent sendQueue

type sendQueue struct {
	mu          sync.Mutex
	first, last *request
}

// add takes in a request, and has those watched that should have been sent by now.
// The locks of requests must not be held.
func (u *sendQueue) add(q *request, now time.Time) {
	u.mu.Lock()
	q.chosen, q.unsent = now, true
	q.earlier = u.last
	if u.last == nil {
		u.first = q
	} else {
		u.last.later = q
	}
	u.last = q
	due := now.Add(-sendingTime)
	late := u.first.chosen.Before(due)
	u.mu.Unlock()
	if late {
		u.watch(due)
	}
}

// watch has the requests watched that came before a time. Whoever shows accounts calls
// it first.
func (u *sendQueue) watch(before time.Time) {
	for {
		u.mu.Lock()
		q := u.first
		if q == nil || !q.chosen.Before(before) {
			u.mu.Unlock()
			return
		}
		u.drop(q)
		u.mu.Unlock()
		q.watchEnd()
	}
}

// remove takes out a request, if it is there.
func (u *sendQueue) remove(q *request) {
	u.mu.Lock()
	if q.unsent {
		u.drop(q)
	}
	u.mu.Unlock()
}

func (u *sendQueue) drop(q *request) {
	if q.earlier == nil {
		u.first = q.later
	} else {
		q.earlier.later = q.later
	}
	if q.later == nil {
		u.last = q.earlier
	} else {
		q.later.earlier = q.earlier
	}
	q.earlier, q.later, q.unsent = nil, nil, false
}
