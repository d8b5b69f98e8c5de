package consumer

// fifo is a queue of sequences.
type fifo struct {
	q    []uint64
	head int
}

func (f *fifo) len() int     { return len(f.q) - f.head }
func (f *fifo) peek() uint64 { return f.q[f.head] }
func (f *fifo) reset()       { f.q, f.head = f.q[:0], 0 }

func (f *fifo) push(v uint64) {
	if f.head > 1024 && f.head > len(f.q)/2 {
		f.q = f.q[:copy(f.q, f.q[f.head:])]
		f.head = 0
	}
	f.q = append(f.q, v)
}

func (f *fifo) pop() {
	if f.head++; f.head == len(f.q) {
		f.reset()
	}
}

func (f *fifo) filter(keep func(uint64) bool) {
	out := f.q[:0]
	for _, v := range f.q[f.head:] {
		if keep(v) {
			out = append(out, v)
		}
	}
	f.q, f.head = out, 0
}

// rdqueue is a queue of distinct sequences from which any can be removed in
// constant time.
type rdqueue struct {
	q    []rdentry
	head int
	in   map[uint64]uint64 // sequence: number of its entry
	n    uint64
}

type rdentry struct{ seq, n uint64 }

func (r *rdqueue) len() int { return len(r.in) }

func (r *rdqueue) has(seq uint64) bool { _, ok := r.in[seq]; return ok }

func (r *rdqueue) push(seq uint64) {
	if r.has(seq) {
		return
	}
	if r.in == nil {
		r.in = map[uint64]uint64{}
	}
	r.n++
	r.in[seq] = r.n
	if len(r.q) > 2*len(r.in)+1024 {
		out := r.q[:0]
		for _, e := range r.q[r.head:] {
			if r.in[e.seq] == e.n {
				out = append(out, e)
			}
		}
		r.q, r.head = out, 0
	}
	r.q = append(r.q, rdentry{seq, r.n})
}

func (r *rdqueue) remove(seq uint64) { delete(r.in, seq) }

// peek returns the first sequence, or 0.
func (r *rdqueue) peek() uint64 {
	for r.head < len(r.q) {
		if e := r.q[r.head]; r.in[e.seq] == e.n {
			return e.seq
		}
		r.head++
	}
	r.q, r.head = r.q[:0], 0
	return 0
}

func (r *rdqueue) reset() { r.q, r.head = r.q[:0], 0; clear(r.in) }

// all returns the sequences in order.
func (r *rdqueue) all() []uint64 {
	var out []uint64
	for _, e := range r.q[r.head:] {
		if r.in[e.seq] == e.n {
			out = append(out, e.seq)
		}
	}
	return out
}

// due says when a message's wait is over.
type due struct {
	at  int64
	seq uint64
}

// dueHeap is a binary heap, the earliest first. Times mostly arrive in order,
// so that pushing rarely moves anything.
type dueHeap []due

func (h *dueHeap) push(d due) {
	q := append(*h, d)
	i := len(q) - 1
	for i > 0 {
		p := (i - 1) / 2
		if q[p].at <= q[i].at {
			break
		}
		q[p], q[i] = q[i], q[p]
		i = p
	}
	*h = q
}

func (h *dueHeap) pop() {
	q := *h
	n := len(q) - 1
	q[0] = q[n]
	*h = q[:n]
	h.down(0)
}

func (h dueHeap) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1].at < h[c].at {
			c++
		}
		if h[i].at <= h[c].at {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

func (h *dueHeap) filter(keep func(due) bool) {
	out := (*h)[:0]
	for _, d := range *h {
		if keep(d) {
			out = append(out, d)
		}
	}
	*h = out
	for i := len(out)/2 - 1; i >= 0; i-- {
		out.down(i)
	}
}

// limiter is a token bucket in octets. A message may overdraw it.
type limiter struct {
	rate   float64 // octets per nanosecond; 0: no limit
	burst  float64
	tokens float64
	last   int64
}

func (l *limiter) configure(bps uint64, burst int) {
	if r := float64(bps) / 8 / 1e9; r != l.rate || float64(burst) != l.burst {
		*l = limiter{rate: r, burst: float64(burst), tokens: float64(burst)}
	}
}

// allow returns 0 if n octets may go now, else the time at which they may.
func (l *limiter) allow(n int, now int64) int64 {
	if l.rate == 0 {
		return 0
	}
	if l.last != 0 {
		l.tokens = min(l.burst, l.tokens+float64(now-l.last)*l.rate)
	}
	l.last = now
	if need := min(float64(n), l.burst); l.tokens < need {
		return now + int64((need-l.tokens)/l.rate) + 1
	}
	return 0
}

func (l *limiter) take(n int) {
	if l.rate != 0 {
		l.tokens -= float64(n)
	}
}
