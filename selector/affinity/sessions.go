package affinity

import "sync"

// sessions remembers which replica a client-named session or a response is at,
// in two generations of maps without pointers: when the young one is full it
// becomes the old one, and what nobody asked for since goes.
type sessions struct {
	mu         sync.Mutex
	young, old map[uint64]uint32 // to Replica.serial
}

// sessionsKept is how many are remembered at least; a map of that size takes
// about 2 MB.
const sessionsKept = 1 << 16

func (s *sessions) get(id uint64) uint32 {
	if id == 0 {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if serial, ok := s.young[id]; ok {
		return serial
	}
	serial, ok := s.old[id]
	if ok {
		s.put(id, serial)
	}
	return serial
}

func (s *sessions) set(id uint64, serial uint32) {
	if id == 0 {
		return
	}
	s.mu.Lock()
	s.put(id, serial)
	s.mu.Unlock()
}

func (s *sessions) put(id uint64, serial uint32) {
	if s.young == nil {
		s.young = make(map[uint64]uint32)
	}
	s.young[id] = serial
	if len(s.young) >= sessionsKept {
		s.young, s.old = nil, s.young
	}
}
