package wire

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
)

var limits = Limits{ControlLine: 64, Payload: 256}

func describe(ev *Event) string {
	return fmt.Sprintf("%d arg=%q subj=%q reply=%q queue=%q sid=%q max=%d hdr=%v %q %q",
		ev.Op, ev.Arg, ev.Subject, ev.Reply, ev.Queue, ev.SID, ev.Max, ev.HasHdr, ev.Header, ev.Data)
}

// events parses input as a reader would that gets it in pieces of the sizes
// cuts (repeated), and lists what came out.
func events(tb testing.TB, input []byte, cuts []byte) (list []string) {
	var buf []byte
	need := 1
	i := 0
	for {
		for len(buf) >= need {
			var ev Event
			n, more, err := Next(buf, limits, &ev)
			if err != nil {
				var we *Error
				if !errors.As(err, &we) {
					tb.Fatalf("error of another type: %v", err)
				}
				return append(list, "error "+err.Error())
			}
			if n == 0 {
				if more <= len(buf) {
					tb.Fatalf("asks for %d octets with %d at hand", more, len(buf))
				}
				if most := limits.ControlLine + verbRoom + limits.Payload + 2; more > most {
					tb.Fatalf("asks for %d octets, more than any operation takes", more)
				}
				need = more
				break
			}
			if n > len(buf) {
				tb.Fatalf("consumed %d of %d", n, len(buf))
			}
			list = append(list, describe(&ev))
			buf = buf[n:]
			need = 1
		}
		if len(input) == 0 {
			return list
		}
		k := len(input)
		if len(cuts) > 0 {
			k = min(k, 1+int(cuts[i%len(cuts)]))
			i++
		}
		buf = append(buf[:len(buf):len(buf)], input[:k]...)
		input = input[k:]
	}
}

var seeds = []string{
	"CONNECT {\"verbose\":false}\r\nPING\r\nPONG\r\n",
	"PUB foo 5\r\nhello\r\nPUB foo bar 0\r\n\r\n",
	"HPUB foo 12 14\r\nNATS/1.0\r\n\r\nhi\r\nHPUB foo re 12 12\r\nNATS/1.0\r\n\r\n\r\n",
	"SUB foo 1\r\nSUB foo q 2\r\nUNSUB 1\r\nUNSUB 2 10\r\n+OK\r\n",
	"pub\tfoo  bar\t3 \nabc\r\nping\nsub a b\n",
	"PUB foo 3\r\nabcd\r\n", "PUB foo 3\r\nabc\n\n", "PUB foo -1\r\n", "PUB foo 999\r\n", "PUB foo 9999999999999999999999\r\n", "PUB foo\r\n",
	"PUB a b c d e\r\n", "PUB foo 1\rx\r\n", "PUB\r\n", "HPUB foo 9 3\r\nabc\r\n", "UNSUB\r\n", "UNSUB a b\r\n", "SUB a\r\n", "SUB a b c d\r\n",
	"GET / HTTP/1.1\r\n", "\r\n", "PINGX\r\n", "PXB", "CONNECTX", "SUB " + strings.Repeat("a", 70) + " 1\r\n", "PING" + strings.Repeat(" ", 100),
	"PUB a 256\r\n" + strings.Repeat("x", 256) + "\r\nPING\r\n", "-ERR 'x'\r\n", "INFO {}\r\n",
}

func FuzzSplits(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), []byte{0})
		f.Add([]byte(s+seeds[0]), []byte{2, 7, 0})
	}
	f.Fuzz(func(t *testing.T, input, cuts []byte) {
		whole := fmt.Sprint(events(t, input, nil))
		if got := fmt.Sprint(events(t, input, cuts)); got != whole {
			t.Errorf("%q in pieces %v:\n%s\nin one piece:\n%s", input, cuts, got, whole)
		}
	})
}

func TestEverySplit(t *testing.T) {
	all := []byte(strings.Join(seeds[:5], ""))
	want := fmt.Sprint(events(t, all, nil))
	if strings.Contains(want, "error") || strings.Count(want, "subj=") != 15 {
		t.Fatalf("events: %s", want)
	}
	for _, s := range append(seeds, string(all)) {
		want := fmt.Sprint(events(t, []byte(s), nil))
		for i := range len(s) {
			// Pieces of equal size, and two pieces.
			if got := fmt.Sprint(events(t, []byte(s), []byte{byte(i)})); got != want {
				t.Errorf("%q in pieces of %d: %s, want %s", s, i+1, got, want)
			}
			if got := fmt.Sprint(events(t, []byte(s), []byte{byte(i), 255, 255})); got != want {
				t.Errorf("%q cut at %d: %s, want %s", s, i+1, got, want)
			}
		}
	}
}

func TestNext(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want Event
		err  error
	}{
		{in: "CONNECT {}\r\n", want: Event{Op: OpConnect, Arg: []byte("{}")}},
		{in: "connect\t {} \n", want: Event{Op: OpConnect, Arg: []byte("{}")}},
		{in: "PuB a.b 2\r\nhi\r\n", want: Event{Op: OpPub, Subject: []byte("a.b"), Data: []byte("hi")}},
		{in: "PUB a r 002\r\nhi\r\n", want: Event{Op: OpPub, Subject: []byte("a"), Reply: []byte("r"), Data: []byte("hi")}},
		{in: "HPUB a r 2 3\r\nabc\r\n", want: Event{Op: OpPub, Subject: []byte("a"), Reply: []byte("r"), HasHdr: true, Header: []byte("ab"), Data: []byte("c")}},
		{in: "SUB a.> 1\r\n", want: Event{Op: OpSub, Subject: []byte("a.>"), SID: []byte("1")}},
		{in: "SUB a q 1\r\n", want: Event{Op: OpSub, Subject: []byte("a"), Queue: []byte("q"), SID: []byte("1")}},
		{in: "UNSUB 1\r\n", want: Event{Op: OpUnsub, SID: []byte("1")}},
		{in: "UNSUB 1 7\r\n", want: Event{Op: OpUnsub, SID: []byte("1"), Max: 7}},
		{in: "PING\r\n", want: Event{Op: OpPing}},
		{in: "PONG \r\n", want: Event{Op: OpPong}},
		{in: "+OK\r\n", want: Event{Op: OpOK}},
		{in: "CONNECT{}\r\n", want: Event{Op: OpConnect, Arg: []byte("{}")}},
		{in: "info {}\n", want: Event{Op: OpInfo, Arg: []byte("{}")}},
		{in: "-ERR 'x' \r\n", want: Event{Op: OpErr, Arg: []byte("'x'")}},
		{in: "UNSUB 1 x\r\n", want: Event{Op: OpUnsub, SID: []byte("1")}},
		{in: "-ERR\r\n", err: ErrUnknownOp},
		{in: "X", err: ErrUnknownOp},
		{in: "PU8", err: ErrUnknownOp},
		{in: "UNSUB\r\n", err: ErrUnknownOp},
		{in: "PUB a\r\n", err: ErrParser},
		{in: "PUB a 1 2 3\r\n", err: ErrParser},
		{in: "PUB a x\r\n", err: ErrParser},
		{in: "PUB a\x00b 1\r\n", err: ErrParser},
		{in: "PUB a 257\r\n", err: ErrMaxPayload},
		{in: "HPUB a 3 2\r\n", err: ErrParser},
		{in: "HPUB a 3\r\n", err: ErrParser},
		{in: "PUB a 1\r\nxyz", err: ErrUnknownOp},
		{in: "PUB a 1\r\nx\ry", err: ErrUnknownOp},
		{in: "SUB " + strings.Repeat("a", 90), err: ErrMaxControlLine},
	} {
		var ev Event
		n, _, err := Next([]byte(tc.in), limits, &ev)
		if !errors.Is(err, tc.err) {
			t.Errorf("%q: error %v, want %v", tc.in, err, tc.err)
			continue
		}
		if err == nil && (n != len(tc.in) || describe(&ev) != describe(&tc.want)) {
			t.Errorf("%q: %d, %s; want %s", tc.in, n, describe(&ev), describe(&tc.want))
		}
	}
}

func TestNextDoesNotAllocate(t *testing.T) {
	in := []byte("HPUB a.b.c reply.1 12 17\r\nNATS/1.0\r\n\r\nhello\r\nPUB a 3\r\nabc\r\n")
	var ev Event
	if n := testing.AllocsPerRun(100, func() {
		for b := in; len(b) > 0; {
			n, _, err := Next(b, limits, &ev)
			if err != nil || n == 0 {
				t.Fatal(n, err)
			}
			b = b[n:]
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestHeaders(t *testing.T) {
	hdr := []byte("NATS/1.0\r\nA: 1\r\nB:2 \r\nA: 3\r\nEmpty:\r\nbroken\r\n: x\r\n\r\nC: 4\r\n")
	for key, want := range map[string]string{"A": "1", "B": "2", "Empty": ""} {
		if v, ok := HeaderValue(hdr, key); !ok || string(v) != want {
			t.Errorf("%s = %q, %v", key, v, ok)
		}
	}
	for _, key := range []string{"a", "C", "broken", "", "NATS/1.0"} {
		if v, ok := HeaderValue(hdr, key); ok {
			t.Errorf("%s found: %q", key, v)
		}
	}
	if n := testing.AllocsPerRun(100, func() { HeaderValue(hdr, "Empty") }); n != 0 {
		t.Errorf("HeaderValue allocates %v times", n)
	}
	if got := string(AppendStatus(nil, 503, "", "Nats-Subject", "a")); got != "NATS/1.0 503\r\nNats-Subject: a\r\n\r\n" {
		t.Errorf("status %q", got)
	}
	st := AppendStatus([]byte("x"), 404, "No Messages")
	if string(st) != "xNATS/1.0 404 No Messages\r\n\r\n" {
		t.Errorf("status %q", st)
	}
	if code, text := HeaderStatus(st[1:]); code != 404 || text != "No Messages" {
		t.Errorf("status %d %q", code, text)
	}
	if code, _ := HeaderStatus(hdr); code != 0 {
		t.Errorf("status %d of a plain header", code)
	}
	one := AppendHeader(nil, "A", "1")
	if got := string(WithHeader(nil, one, "B", "2")); got != "NATS/1.0\r\nA: 1\r\nB: 2\r\n\r\n" {
		t.Errorf("with %q", got)
	}
	if got := string(WithHeader(nil, nil, "B", "2")); got != "NATS/1.0\r\nB: 2\r\n\r\n" {
		t.Errorf("with %q", got)
	}
	if got := string(WithoutHeader(nil, WithHeader(nil, one, "B", "2"), "A")); got != "NATS/1.0\r\nB: 2\r\n\r\n" {
		t.Errorf("without %q", got)
	}
	if got := WithoutHeader(nil, one, "A"); len(got) != 0 {
		t.Errorf("without the only line %q", got)
	}
}

func FuzzHeaders(f *testing.F) {
	f.Add([]byte("NATS/1.0\r\nA: 1\r\nB: 2\r\n\r\n"), "A")
	f.Add([]byte("NATS/1.0 503 No Responders\r\n\r\n"), "A")
	f.Add([]byte("NATS/1.0\n:\n\r\n"), "")
	f.Add([]byte("A: 1"), "A")
	f.Add([]byte{}, "A")
	f.Add([]byte("\nA:\n\r\n\r\n"), "A")
	f.Fuzz(func(t *testing.T, hdr []byte, key string) {
		before := bytes.Clone(hdr)
		want, found := HeaderValue(hdr, key)
		rest := WithoutHeader(nil, hdr, key)
		if v, ok := HeaderValue(rest, key); ok {
			t.Errorf("%q still has %q after removal: %q", rest, key, v)
		}
		HeaderStatus(hdr)
		if strings.ContainsAny(key, ":\r\n") || key == "" {
			return
		}
		if found && bytes.HasSuffix(hdr, []byte("\r\n\r\n")) && bytes.Index(hdr, []byte("\n\r\n")) == len(hdr)-3 && !bytes.Contains(hdr, []byte("\n\n")) {
			with := WithHeader(nil, hdr, "Other-"+key, "v")
			if v, ok := HeaderValue(with, key); !ok || !bytes.Equal(v, want) {
				t.Errorf("%q: %q of %q became %q", with, key, want, v)
			}
			if v, _ := HeaderValue(with, "Other-"+key); string(v) != "v" && !bytes.Contains(hdr, []byte("Other-")) {
				t.Errorf("%q lacks what was added", with)
			}
		}
		if !bytes.Equal(hdr, before) {
			t.Error("header block was changed")
		}
	})
}
