package broker

// Congested reports whether a client that gets what is delivered to the
// subject has so much pending that publishers would be held back for it. Who
// has much to deliver should wait a few milliseconds and ask again. A client
// that takes nothing any more counts as well: it is disconnected in the end.
func (p *Publisher) Congested(to string) bool {
	e := p.cache.Lookup(bytesOf(to))
	for _, s := range e.Plain {
		if s.congested() {
			return true
		}
	}
	for i := range e.Queues {
		for _, s := range e.Queues[i].Members {
			if s.congested() {
				return true
			}
		}
	}
	return false
}

func (s *subscription) congested() bool {
	c := s.c
	if c == nil {
		return false
	}
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	return !c.out.closed && c.out.pending >= c.srv.stallFrom
}
