package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/sync/frame"
)

// session is an edge's use of one connection.
type session struct {
	e        *Edge
	d        *dialed
	out      *outbox
	welcome  frame.Welcome
	welcomed bool // the hub took us; read after run has returned

	began    time.Time
	lastPong atomic.Int64 // ns after began: no leap of the wall clock makes the hub look dead

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	nextID uint32
	runs   map[uint32]*run
	ready  chan struct{} // closed at the welcome
}

func newSession(e *Edge, d *dialed) *session {
	return &session{e: e, d: d, began: time.Now(), runs: map[uint32]*run{}, ready: make(chan struct{})}
}

// run uses the connection until it ends and returns why it did.
func (s *session) run(ctx context.Context) error {
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.d.conn.Context(), func() {
		s.cancel(context.Cause(s.d.conn.Context()))
	})
	defer stop()
	err := s.start()
	if err == nil {
		s.ping()
	}
	if err != nil {
		s.cancel(err)
	}
	cause := context.Cause(s.ctx)
	bye := &frame.Error{Code: frame.CodeNone, Text: "link closed"}
	var fe *frame.Error
	switch {
	case ctx.Err() != nil:
		bye.Code, bye.Text = frame.CodeShutdown, "the edge is shutting down"
	case errors.As(cause, &fe):
		bye = fe
	case cause != nil && remote(cause) == nil:
		bye = asError(cause, frame.CodeInternal)
	}
	s.d.close(bye)
	s.wg.Wait()
	return explain(cause, s.d.t.url, s.e.conf.Timing.Idle)
}

// explain turns what ended a connection into what a user should read.
func explain(err error, url string, idle time.Duration) error {
	if fe := remote(err); fe != nil {
		return fe
	}
	var (
		it *quic.IdleTimeoutError
		sr *quic.StatelessResetError
	)
	switch {
	case errors.As(err, &it):
		return fmt.Errorf("nothing heard from %s for %v: the network or the hub is down", url, idle)
	case errors.As(err, &sr):
		return fmt.Errorf("the hub at %s was restarted", url)
	}
	return err
}

// start says hello and starts the goroutines.
func (s *session) start() error {
	ctl, err := s.d.conn.OpenStream()
	if err != nil {
		return fmt.Errorf("open control stream: %w", err)
	}
	ctl.SetPriority(0, true) // before any batch
	secret, err := tlsSecret(s.d.conn)
	if err != nil {
		return err
	}
	h := frame.Hello{
		MinVersion: frame.MinVersion, MaxVersion: frame.Version,
		Name: s.e.conf.Name, Software: s.e.software,
	}
	if !s.e.conf.NoCompression {
		h.Features |= frame.FeatureS2
	}
	h, err = s.e.cred.hello(h, secret)
	if err != nil {
		return err
	}
	s.out = newOutbox(ctl, s.cancel)
	s.out.add(h.Append)
	s.heard()
	for _, x := range s.e.exports {
		s.goDo(func() error { return x.drive(s) })
	}
	s.goDo(func() error { return s.out.run(s.ctx.Done()) })
	s.goDo(func() error { return s.read(ctl) })
	return nil
}

// goDo runs fn beside; its failure ends the session.
func (s *session) goDo(fn func() error) {
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		if err := fn(); err != nil {
			s.cancel(err)
		}
	}()
}

// heard notes that the hub has answered just now.
func (s *session) heard() { s.lastPong.Store(int64(time.Since(s.began))) }

// ping keeps the connection alive and watches the hub until the session ends.
// The pings are what a restarted hub answers with a reset, at once.
func (s *session) ping() {
	tick := time.NewTicker(s.e.conf.Timing.Ping)
	defer tick.Stop()
	welcome := time.NewTimer(helloTimeout)
	defer welcome.Stop()
	ready := s.ready
	for n := uint64(1); ; {
		select {
		case <-s.ctx.Done():
			return
		case <-ready:
			ready = nil
			welcome.Stop()
		case <-welcome.C:
			s.cancel(&frame.Error{Code: frame.CodeTimeout, Text: "the hub did not answer the hello"})
		case now := <-tick.C:
			if silent := now.Sub(s.began) - time.Duration(s.lastPong.Load()); silent > deadAfter {
				s.cancel(&frame.Error{Code: frame.CodeTimeout, Text: fmt.Sprintf("the hub has not answered a ping for %v", silent.Round(time.Second))})
				return
			}
			s.out.add(func(b []byte) []byte { return frame.AppendPing(b, n) })
			n++
		}
	}
}

// read takes the hub's control frames.
func (s *session) read(ctl io.Reader) error {
	r := frame.NewReader(ctl, controlLimit)
	var buf []byte
	for {
		t, content, err := r.Next(buf)
		if err != nil {
			if s.ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, io.EOF) {
				// A close with its reason follows; give it the time to arrive.
				select {
				case <-s.ctx.Done():
					return nil
				case <-time.After(time.Second):
				}
			}
			return fmt.Errorf("read control stream: %w", err)
		}
		buf = content
		if err := s.handle(t, content); err != nil {
			return err
		}
	}
}

func (s *session) handle(t frame.Type, content []byte) error {
	select {
	case <-s.ready:
	default:
		if t != frame.TypeWelcome && t != frame.TypeError {
			return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("the hub sent %v before its welcome", t)}
		}
	}
	switch t {
	case frame.TypeWelcome:
		w, err := frame.DecodeWelcome(content)
		if err != nil {
			return err
		}
		if w.Version < frame.MinVersion || w.Version > frame.Version {
			return &frame.Error{Code: frame.CodeVersion, Text: fmt.Sprintf("the hub chose protocol version %d, this edge speaks %d to %d", w.Version, frame.MinVersion, frame.Version)}
		}
		if s.welcomed {
			return &frame.Error{Code: frame.CodeProtocol, Text: "the hub sent a second welcome"}
		}
		s.welcome, s.welcomed = w, true
		now := time.Now()
		s.e.mu.Lock()
		st := &s.e.status
		st.Connected, st.Since, st.URL = true, now, s.d.t.url
		st.HubName, st.HubID, st.HubVersion = w.Name, w.HubID, w.Software
		st.Attempts, st.Connects = 0, st.Connects+1
		s.e.lastLog = ""
		s.e.mu.Unlock()
		s.e.log.Info("link to hub is up", "url", s.d.t.url, "hub", w.Name, "hub_id", w.HubID)
		close(s.ready)
	case frame.TypeAccept:
		a, err := frame.DecodeAccept(content)
		if err != nil {
			return err
		}
		if r := s.find(a.Offer); r != nil {
			select {
			case r.accept <- a:
			default:
				return &frame.Error{Code: frame.CodeProtocol, Text: "the hub accepted an offer twice"}
			}
		}
	case frame.TypePosition:
		id, p, err := frame.DecodePosition(content)
		if err != nil {
			return err
		}
		if r := s.find(id); r != nil {
			r.ack(p)
		}
	case frame.TypePing:
		s.out.add(func(b []byte) []byte { return frame.AppendPong(b, content) })
	case frame.TypePong:
		s.heard()
	case frame.TypeError:
		fe, err := frame.DecodeError(content)
		if err != nil {
			return err
		}
		if fe.Offer == 0 {
			return fe
		}
		if r := s.find(fe.Offer); r != nil {
			r.cancel(fe)
		}
	default:
		return &frame.Error{Code: frame.CodeProtocol, Text: fmt.Sprintf("the hub sent %v on the control stream", t)}
	}
	return nil
}

func (s *session) find(id uint32) *run {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runs[id]
}
