//go:build linux

package rig

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// published returns a ledger with n acknowledged publishes of one publisher and
// the stream that holds them.
func published(t *testing.T, n int) (*Ledger, []Held) {
	t.Helper()
	l := NewLedger()
	var held []Held
	for i := 1; i <= n; i++ {
		m := nats.NewMsg("s")
		m.Data = []byte{byte(i)}
		l.Sending(7, i, i, m)
		id := m.Header.Get(AttemptHeader)
		l.Acked(id, uint64(i), false)
		held = append(held, Held{Seq: uint64(i), Attempt: id, Sum: SumOf(m.Subject, m.Header, m.Data)})
	}
	return l, held
}

func TestVerdicts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func([]Held) []Held
		want   Verdict // of Check
		hub    Verdict // of Compare with the unchanged stream
	}{
		{"clean", func(h []Held) []Held { return h }, Verdict{Found: 5}, Verdict{Found: 5}},
		{"missing", func(h []Held) []Held { return append(h[:2:2], h[3:]...) }, Verdict{Found: 4, Missing: 1}, Verdict{Found: 4, Missing: 1}},
		{"lost tail", func(h []Held) []Held { return h[:3] }, Verdict{Found: 3, Missing: 2}, Verdict{Found: 3, Missing: 2}},
		{"duplicated", func(h []Held) []Held { return append(h[:5:5], Held{6, h[1].Attempt, h[1].Sum}) }, Verdict{Found: 5, Duplicated: 1}, Verdict{Found: 5, Duplicated: 1}},
		{"altered", func(h []Held) []Held { h[1].Sum[0]++; return h }, Verdict{Found: 5, Altered: 1}, Verdict{Found: 5, Altered: 1}},
		{"renumbered", func(h []Held) []Held { h[4].Seq = 9; return h }, Verdict{Found: 5, Altered: 1}, Verdict{Found: 5}},
		{"swapped", func(h []Held) []Held { h[1], h[2] = h[2], h[1]; return h }, Verdict{Found: 5, OutOfOrder: 1}, Verdict{Found: 5, OutOfOrder: 1}},
		{"foreign", func(h []Held) []Held { return append(h[:5:5], Held{6, "8-1", h[1].Sum}) }, Verdict{Found: 5, Foreign: 1}, Verdict{Found: 5, Foreign: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, edge := published(t, 5)
			held := tt.change(append([]Held(nil), edge...))
			for _, v := range []struct{ got, want Verdict }{{l.Check("edge", held), tt.want}, {Compare("hub", edge, held), tt.hub}} {
				got := v.got
				if got.Found != v.want.Found || got.Missing != v.want.Missing || got.Duplicated != v.want.Duplicated ||
					got.Altered != v.want.Altered || got.OutOfOrder != v.want.OutOfOrder || got.Foreign != v.want.Foreign {
					t.Errorf("got %v, want %+v", got, v.want)
				}
				if got.OK() != v.want.OK() {
					t.Errorf("OK() = %v for %v", got.OK(), got)
				}
			}
		})
	}
}

// TestReadyIsOnesOwn: a server that another process runs on the port is none
// that is ready.
func TestReadyIsOnesOwn(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answered := make(chan struct{}, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("INFO {}\r\nPONG\r\n"))
			defer c.Close()
			answered <- struct{}{}
		}
	}()
	addr := l.Addr().String()
	other, err := Start("other", filepath.Join(t.TempDir(), "log"), "sleep", "60")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Kill()
	if own, err := other.listensOn(addr); own || err != nil {
		t.Errorf("a process without sockets: %v, %v", own, err)
	}
	go func() {
		<-answered
		<-answered // it asks again
		other.Kill()
	}()
	if err := WaitReady(other, addr, time.Minute); !errors.Is(err, ErrEnded) {
		t.Errorf("ready: %v", err)
	}
	me, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self := &Process{name: "self", cmd: &exec.Cmd{Process: me}, done: make(chan struct{})}
	if err := WaitReady(self, addr, time.Minute); err != nil {
		t.Error(err)
	}
}

func TestUnacknowledgedMayBeThereOrNot(t *testing.T) {
	l, held := published(t, 2)
	m := nats.NewMsg("s")
	l.Sending(7, 3, 3, m)
	for _, h := range [][]Held{held, append(held, Held{3, "7-3", SumOf("s", m.Header, nil)})} {
		if v := l.Check("edge", h); !v.OK() {
			t.Error(v)
		}
	}
}

func TestAcknowledgedAsDuplicate(t *testing.T) {
	l := NewLedger()
	var held []Held
	for i := 1; i <= 2; i++ { // the same row twice
		m := nats.NewMsg("s")
		l.Sending(1, i, 0, m)
		held = append(held, Held{Seq: 1, Attempt: m.Header.Get(AttemptHeader), Sum: SumOf("s", m.Header, nil)})
	}
	l.Acked("1-2", 1, true)
	if v := l.Check("the first", held[:1]); !v.OK() || v.Found != 1 {
		t.Error(v)
	}
	if v := l.Check("none", nil); v.OK() || v.Missing != 1 {
		t.Error(v)
	}
	if v := l.Check("both", held); v.OK() || v.Duplicated != 1 {
		t.Error(v)
	}
}

func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		passed := make(chan int)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			n := 0
			for g.Pass(ctx) == nil {
				n++
			}
			passed <- n
		}()
		g.Open(3)
		synctest.Wait()
		g.Close()
		g.Open(5)
		synctest.Wait()
		cancel()
		if n := <-passed; n != 5 {
			t.Errorf("%d passed, want 5", n)
		}
	})
}

func TestRows(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadRows(dir); err == nil {
		t.Error("a directory without rows was accepted")
	}
	for name, text := range map[string]string{"b.csv": "three\n", "a.csv": "one\r\n\ntwo"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rows, err := ReadRows(dir)
	if err != nil || len(rows) != 3 || string(rows[1].Data) != "two" || string(rows[2].Data) != "three" || rows[2].Subject != "rows.b_csv" {
		t.Fatalf("%v, %v", rows, err)
	}
	f := NewFinite(rows)
	row, _, _ := f.Next()
	f.Again(row)
	var got []string
	for {
		_, row, ok := f.Next()
		if !ok {
			break
		}
		got = append(got, string(row.Data))
	}
	if len(got) != 3 || got[0] != "one" || f.Left() != 0 {
		t.Errorf("%q, %d left", got, f.Left())
	}
}

func TestSamplesRepeated(t *testing.T) {
	rows, err := Samples()
	if err != nil {
		t.Fatal(err)
	}
	twice := Repeat(rows, 2*len(rows)-1)
	ids := map[string]bool{}
	for _, r := range twice {
		if id := r.Header[nats.MsgIdHdr]; id != nil {
			if ids[id[0]] {
				t.Fatalf("message id %q twice", id[0])
			}
			ids[id[0]] = true
		}
	}
	if len(twice) != 2*len(rows)-1 || len(ids) == 0 {
		t.Errorf("%d rows of %d, %d message ids", len(twice), len(rows), len(ids))
	}
}
