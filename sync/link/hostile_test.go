package link

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	mrand "math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"petiole/sync/frame"
)

// hostile is an edge that says what it likes.
type hostile struct {
	t    *testing.T
	conn *quic.Conn
	ctl  *quic.Stream
	r    *frame.Reader
}

func (r *rig) dialRaw(t *testing.T) *hostile {
	t.Helper()
	tc, err := clientTLS(&ClientTLS{Pinned: r.hub.Fingerprint()}, r.url(), "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := quic.DialAddr(ctx, r.hub.Addr().String(), tc, &quic.Config{MaxIdleTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.CloseWithError(0, "") })
	ctl, err := conn.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	return &hostile{t: t, conn: conn, ctl: ctl, r: frame.NewReader(ctl, 0)}
}

// hello authenticates and offers a stream.
func (h *hostile) hello(r *rig) {
	h.t.Helper()
	cred, err := loadCredentials(r.device, Auth{User: "edge", Password: password})
	if err != nil {
		h.t.Fatal(err)
	}
	secret, err := tlsSecret(h.conn)
	if err != nil {
		h.t.Fatal(err)
	}
	hello, err := cred.hello(frame.Hello{MinVersion: 1, MaxVersion: 1, Features: frame.FeatureS2}, secret)
	if err != nil {
		h.t.Fatal(err)
	}
	h.ctl.Write(hello.Append(nil))
	h.offer(1)
}

func (h *hostile) offer(id uint32) {
	h.t.Helper()
	o := frame.Offer{ID: id, Stream: "S", To: "PLANT", UID: frame.UID{3}, Incarnation: 1, Base: 1}
	h.ctl.Write(o.Append(nil))
	for {
		typ, _, err := h.r.Next(nil)
		if err != nil {
			h.t.Fatal(err)
		}
		if typ == frame.TypeAccept {
			return
		}
	}
}

// export opens the export stream and writes to it, in the background.
func (h *hostile) export(wire ...[]byte) {
	h.t.Helper()
	s, err := h.conn.OpenUniStream()
	if err != nil {
		h.t.Fatal(err)
	}
	go func() {
		s.Write(frame.AppendOpen(nil, 1))
		for _, w := range wire {
			s.Write(w)
		}
	}()
}

// closed waits for the connection's end and returns the hub's code.
func (h *hostile) closed() frame.Code {
	h.t.Helper()
	select {
	case <-h.conn.Context().Done():
	case <-time.After(patience):
		h.t.Fatal("the hub keeps the connection")
	}
	var app *quic.ApplicationError
	if err := context.Cause(h.conn.Context()); !errors.As(err, &app) || !app.Remote {
		h.t.Fatalf("closed by %v", err)
	}
	return frame.Code(app.ErrorCode)
}

// raw makes a frame with a correct checksum, whatever it says.
func raw(n uint32, typ frame.Type, flags byte, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, n)
	b = append(b, byte(typ), flags)
	t := crc32.MakeTable(crc32.Castagnoli)
	b = binary.BigEndian.AppendUint32(b, crc32.Update(crc32.Checksum(b, t), t, payload))
	return append(b, payload...)
}

func goodBatch(first uint64) []byte {
	var b frame.Builder
	b.Reset(1, 1, 1, first, frame.Seed(frame.UID{3}, 1, 1))
	b.Msg(1, "s", nil, []byte("data"))
	return b.AppendFrames(nil, false)
}

func TestHostileEdges(t *testing.T) {
	r := newRig(t)
	r.hub.conf.MaxMessage = 1 << 20
	badCRC := goodBatch(1)
	badCRC[len(badCRC)-1] ^= 1
	var wrongChain frame.Builder
	wrongChain.Reset(1, 1, 1, 1, frame.Chain{})
	wrongChain.Msg(1, "s", nil, []byte("data"))
	chain := wrongChain.AppendFrames(nil, false)
	_, content, _ := frame.NewReader(bytes.NewReader(chain), 0).Next(nil)
	content[len(content)-1] ^= 1
	lied := frame.Append(nil, frame.TypeBatch, content, false)
	piece := make([]byte, frame.MaxPayload)
	endless := [][]byte{raw(uint32(len(piece)), frame.TypeBatch, frame.FlagMore, piece)}
	for range 40 {
		endless = append(endless, raw(uint32(len(piece)), frame.TypeContinue, frame.FlagMore, piece))
	}
	huge := raw(1<<31, frame.TypeBatch, 0, nil)

	for _, c := range []struct {
		name string
		do   func(h *hostile)
		want frame.Code
	}{
		{"garbage instead of a hello", func(h *hostile) { h.ctl.Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 50)) }, frame.CodeTooLarge},
		{"batch instead of a hello", func(h *hostile) { h.ctl.Write(goodBatch(1)) }, frame.CodeProtocol},
		{"hello of garbage", func(h *hostile) { h.ctl.Write(raw(4, frame.TypeHello, 0, []byte("abcd"))) }, frame.CodeProtocol},
		{"hello without end", func(h *hostile) { h.ctl.Write(bytes.Join(endless[:2], nil)) }, frame.CodeTooLarge},
		{"forged device", func(h *hostile) {
			pub, _ := r.device.PublicKey()
			hello := frame.Hello{MaxVersion: 1, EdgeID: pub, Auth: frame.AuthPassword, User: "edge", Password: password, DeviceSig: make([]byte, 64)}
			h.ctl.Write(hello.Append(nil))
		}, frame.CodeAuth},
		{"other version", func(h *hostile) {
			hello := frame.Hello{MinVersion: 7, MaxVersion: 9}
			h.ctl.Write(hello.Append(nil))
		}, frame.CodeVersion},
		{"batch on the control stream", func(h *hostile) { h.hello(r); h.ctl.Write(goodBatch(1)) }, frame.CodeProtocol},
		{"offer that goes back", func(h *hostile) {
			h.hello(r)
			h.ctl.Write((&frame.Offer{ID: 1, To: "PLANT"}).Append(nil))
		}, frame.CodeProtocol},
		{"wrong checksum", func(h *hostile) { h.hello(r); h.export(badCRC) }, frame.CodeProtocol},
		{"wrong chain", func(h *hostile) { h.hello(r); h.export(lied) }, frame.CodeProtocol},
		{"huge length", func(h *hostile) { h.hello(r); h.export(huge) }, frame.CodeTooLarge},
		{"fragments without end", func(h *hostile) { h.hello(r); h.export(endless...) }, frame.CodeTooLarge},
		{"hello on an export stream", func(h *hostile) { h.hello(r); h.export(raw(1, frame.TypeHello, 0, []byte{0})) }, frame.CodeProtocol},
		{"opened twice", func(h *hostile) { h.hello(r); h.export(); h.export() }, frame.CodeProtocol},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := r.dialRaw(t)
			h.t = t
			c.do(h)
			if got := h.closed(); got != c.want {
				t.Errorf("closed with %v, want %v", got, c.want)
			}
		})
	}
	if n := r.sink.count("PLANT"); n != 0 {
		t.Errorf("%d messages of hostile edges stored", n)
	}
	// An honest edge is served as if nothing had been.
	r.stream.addN(10, 10)
	r.edge(t, r.url(), nil)
	r.sink.waitCount(t, "PLANT", 10)
}

// A batch that does not follow stops the export, not the connection.
func TestOutOfOrderStopsExportOnly(t *testing.T) {
	r := newRig(t)
	h := r.dialRaw(t)
	h.hello(r)
	h.export(goodBatch(5))
	for {
		typ, content, err := h.r.Next(nil)
		if err != nil {
			t.Fatal(err)
		}
		if typ != frame.TypeError {
			continue
		}
		fe, err := frame.DecodeError(content)
		if err != nil || fe.Code != frame.CodeOrder || fe.Offer != 1 {
			t.Fatalf("%+v, %v", fe, err)
		}
		break
	}
	h.offer(2) // the connection is still good
}

// A large message takes as long as the line needs, if it goes on coming.
func TestLargeMessageOnSlowLine(t *testing.T) {
	t.Parallel()
	const part = 3 * time.Second
	r := newRig(t)
	r.hub.Close()
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) { c.Timing.Part, c.Timing.Idle = part, time.Minute })
	h := r.dialRaw(t)
	h.hello(r)
	s, err := h.conn.OpenUniStream()
	if err != nil {
		t.Fatal(err)
	}
	wire := largeBatch()
	s.Write(frame.AppendOpen(nil, 1))
	for _, n := range []int{3 * frame.MaxFrame, 2 * frame.MaxFrame, len(wire)} {
		n = min(n, len(wire))
		if _, err := s.Write(wire[:n]); err != nil {
			t.Fatal(err)
		}
		if wire = wire[n:]; len(wire) > 0 {
			time.Sleep(part * 6 / 10)
		}
	}
	r.sink.waitCount(t, "PLANT", 1)
}

// One that does not go on coming does not keep its place for ever.
func TestLargeMessageThatStops(t *testing.T) {
	r := newRig(t)
	r.hub.Close()
	r.hub = startHub(t, r.hubDir, "127.0.0.1:0", r.sink, func(c *HubConfig) { c.Timing.Part, c.Timing.Idle = 300*time.Millisecond, time.Minute })
	h := r.dialRaw(t)
	h.hello(r)
	h.export(largeBatch()[:5*frame.MaxFrame])
	if got := h.closed(); got != frame.CodeTimeout {
		t.Errorf("closed with %v", got)
	}
	if n := r.sink.count("PLANT"); n != 0 {
		t.Errorf("%d messages stored", n)
	}
}

// largeBatch is one message in ten frames.
func largeBatch() []byte {
	var b frame.Builder
	b.Reset(1, 1, 1, 1, frame.Seed(frame.UID{3}, 1, 1))
	data := make([]byte, 9*frame.MaxPayload)
	rand.Read(data)
	b.Msg(1, "s", nil, data)
	return b.AppendFrames(nil, false)
}

// Whoever takes nothing makes the hub hold no more than a bounded outbox.
func TestPingFloodIsBounded(t *testing.T) {
	r := newRig(t)
	h := r.dialRaw(t)
	h.hello(r)
	go func() {
		flood := bytes.Repeat(frame.AppendPing(nil, 1), 1000)
		for h.conn.Context().Err() == nil {
			h.ctl.Write(flood)
		}
	}()
	h.closed()
}

func TestGarbageOnThePort(t *testing.T) {
	r := newRig(t)
	e := r.edge(t, r.url(), nil)
	c, err := net.Dial("udp", r.hub.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	rnd := mrand.New(mrand.NewPCG(1, 2))
	for range 5000 {
		p := make([]byte, 1+rnd.IntN(1400))
		rand.Read(p)
		if rnd.IntN(2) == 0 { // looks like the start of a handshake
			copy(p, []byte{0xc3, 0, 0, 0, 1, 8})
		}
		c.Write(p)
	}
	r.stream.addN(1000, 100)
	r.sink.waitCount(t, "PLANT", 1000)
	if st := e.Status(); st.Connects != 1 {
		t.Errorf("edge had to connect %d times", st.Connects)
	}
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<20 {
		t.Errorf("heap grew by %d bytes", grown)
	}
}

// Random kills of connections, hub and packets: nothing missing, nothing
// twice, everything in order.
func TestRandomKills(t *testing.T) {
	rnd := mrand.New(mrand.NewPCG(1, 0))
	r := newRig(t)
	addr := r.hub.Addr().String()
	e := r.edge(t, r.url(), func(o *EdgeOptions) {
		o.Config.Window = 200_000
		o.Config.Exports = []Export{{Stream: "READINGS", To: "PLANT1"}, {Stream: "READINGS", To: "PLANT2"}}
	})
	total := 0
	end := time.Now().Add(3 * time.Second)
	for time.Now().Before(end) {
		n := rnd.IntN(3000)
		r.stream.addN(n, rnd.IntN(300))
		total += n
		r.sink.mu.Lock()
		r.sink.delay = time.Duration(rnd.IntN(2000)) * time.Microsecond
		r.sink.mu.Unlock()
		time.Sleep(time.Duration(rnd.IntN(100)) * time.Millisecond)
		switch rnd.IntN(5) {
		case 0: // the hub drops the connection
			r.hub.mu.Lock()
			for _, c := range r.hub.edges {
				c.cancel(io.ErrClosedPipe)
			}
			r.hub.mu.Unlock()
		case 1: // the edge does
			e.mu.Lock()
			if e.session != nil {
				e.session.d.conn.CloseWithError(7, "killed")
			}
			e.mu.Unlock()
		case 2: // the hub restarts
			r.hub.Close()
			r.hub = startHub(t, r.hubDir, addr, r.sink, nil)
		case 3: // the edge restarts
			e.Close()
			e = r.edge(t, "quic://"+addr, func(o *EdgeOptions) {
				o.Config.Window = 200_000
				o.Config.Exports = []Export{{Stream: "READINGS", To: "PLANT1"}, {Stream: "READINGS", To: "PLANT2"}}
			})
		}
	}
	r.sink.mu.Lock()
	r.sink.delay = 0
	r.sink.mu.Unlock()
	for _, name := range []string{"PLANT1", "PLANT2"} {
		r.sink.waitCount(t, name, total)
		inOrder(t, r.sink.seqs(name), 1, uint64(total))
	}
	for _, x := range e.Status().Exports {
		if x.Incarnation != 1 {
			t.Errorf("incarnation %d though nothing was lost", x.Incarnation)
		}
	}
}

// Peers that are refused over and over, each time for another reason of their own
// making, fill neither the log nor the memory.
func TestRefusalsAreBounded(t *testing.T) {
	var log lines
	h := &Hub{log: log.logger(), logged: map[string]*refusals{}}
	long := strings.Repeat("ü", 30<<10)
	for i := range 1000 {
		h.refuse("192.0.2.1", fmt.Sprint("unknown user ", i, long), "edge refused", "reason", fmt.Sprint("unknown user ", i, long), "n", i)
	}
	if n, size := log.count("edge refused"), len(log.all()); n != maxKinds || size > maxKinds*4*maxRefusedOf {
		t.Errorf("%d lines of %d octets", n, size)
	}
	if n := len(h.Status().LastError); n > 2*maxRefusedOf {
		t.Errorf("an error of %d octets in the status", n)
	}
	for range 3 {
		h.refuse("192.0.2.2", "wrong password", "edge refused", "reason", "another's wrong password")
	}
	if n := log.count("another's wrong password"); n != 1 {
		t.Errorf("another peer's refusal is logged %d times", n)
	}
	for i := range 3 * maxRefusers {
		h.refuse(fmt.Sprint("peer ", i), "hello", "refused")
	}
	if n := len(h.logged); n > maxRefusers {
		t.Errorf("%d peers are remembered", n)
	}
	if !h.mayLog("192.0.2.3", "hello", "", time.Now().Add(-repeatLog)) || !h.mayLog("192.0.2.3", "hello", "", time.Now()) {
		t.Error("not logged again after an hour")
	}
}

// Edges that come all at once are no more than there may be.
func TestMaxEdgesAtOnce(t *testing.T) {
	var log lines
	h := &Hub{conf: HubConfig{MaxEdges: 3}, log: log.logger(), edges: map[string]*edgeConn{}, logged: map[string]*refusals{}}
	var admitted atomic.Int64
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			_, refusal := h.register(&edgeConn{h: h, id: &Identity{EdgeID: fmt.Sprint("edge ", i)}})
			switch {
			case refusal == nil:
				admitted.Add(1)
			case refusal.Code != frame.CodeBusy:
				t.Error(refusal)
			}
		})
	}
	wg.Wait()
	if n := admitted.Load(); n != 3 || len(h.edges) != 3 {
		t.Errorf("%d edges are admitted, %d connected", n, len(h.edges))
	}
	for id, c := range h.edges { // a connection that takes over is not one more
		if older, refusal := h.register(&edgeConn{h: h, id: &Identity{EdgeID: id}}); older != c || refusal != nil {
			t.Errorf("%s: %v", id, refusal)
		}
	}
}
