package wire

import "bytes"

// Op is the kind of an [Event].
type Op uint8

// Operations that a client may send.
const (
	OpConnect Op = iota + 1
	OpPub        // PUB and HPUB
	OpSub
	OpUnsub
	OpPing
	OpPong
	OpOK   // "+OK", which clients have no reason to send; to be ignored
	OpErr  // "-ERR", likewise, but the client takes the connection for lost
	OpInfo // "INFO", likewise; to be ignored if Arg is a JSON object
)

// Event is one operation. All slices share the memory of the input.
type Event struct {
	Op      Op
	Arg     []byte // OpConnect, OpInfo: the JSON document; OpErr: the error
	Subject []byte // OpPub, OpSub; not checked
	Reply   []byte // OpPub: reply subject, empty if none; not checked
	Queue   []byte // OpSub: queue group, empty if none
	SID     []byte // OpSub, OpUnsub: subscription id
	Max     int    // OpUnsub: messages after which to unsubscribe; 0 is at once, as is what is no number
	HasHdr  bool   // OpPub: sent as HPUB
	Header  []byte // OpPub: header block
	Data    []byte // OpPub: payload
}

// verbRoom is how much longer than its limit a control line may be: the limit
// is for the arguments, this for verb, blanks and line end.
const verbRoom = 10

// Limits bound what a client may send.
type Limits struct {
	ControlLine int // octets of the arguments of one control line
	Payload     int // octets of header and data of one message
}

// Next parses the first operation in buf into ev and returns the number of
// octets that it takes. When buf does not hold a complete operation, n is 0,
// and need is a number of octets, more than len(buf), below which calling
// again with more input is pointless; it never exceeds what the limits permit
// for one operation. Input that can not become an operation any more is an
// error (of type *[Error]).
//
// Next keeps no state: how the input was cut into reads can not matter. It
// does not allocate.
func Next(buf []byte, lim Limits, ev *Event) (n, need int, err error) {
	if len(buf) == 0 {
		return 0, 1, nil
	}
	var verb string
	var op Op
	switch buf[0] {
	case 'P', 'p':
		if len(buf) == 1 {
			return 0, 2, nil
		}
		switch buf[1] {
		case 'U', 'u':
			verb, op = "PUB ", OpPub
		case 'I', 'i':
			verb, op = "PING", OpPing
		case 'O', 'o':
			verb, op = "PONG", OpPong
		default:
			return 0, 0, ErrUnknownOp
		}
	case 'H', 'h':
		verb, op = "HPUB ", OpPub
	case 'S', 's':
		verb, op = "SUB ", OpSub
	case 'U', 'u':
		verb, op = "UNSUB ", OpUnsub
	case 'C', 'c':
		verb, op = "CONNECT", OpConnect
	case 'I', 'i':
		verb, op = "INFO", OpInfo
	case '+':
		verb, op = "+OK", OpOK
	case '-':
		verb, op = "-ERR ", OpErr
	default:
		return 0, 0, ErrUnknownOp
	}
	for i := range min(len(verb), len(buf)) {
		have, want := buf[i], verb[i]
		if have == want || have|0x20 == want|0x20 && want >= 'A' || want == ' ' && have == '\t' {
			continue
		}
		return 0, 0, ErrUnknownOp
	}
	if len(buf) < len(verb) {
		return 0, len(buf) + 1, nil
	}
	limit := lim.ControlLine + verbRoom
	line := buf[len(verb):min(len(buf), limit)]
	eol := bytes.IndexByte(line, '\n')
	if eol < 0 {
		if len(buf) >= limit {
			return 0, 0, ErrMaxControlLine
		}
		return 0, len(buf) + 1, nil
	}
	n = len(verb) + eol + 1
	line = line[:eol]
	if eol > 0 && line[eol-1] == '\r' {
		line = line[:eol-1]
	}
	if len(line) > lim.ControlLine && len(bytes.TrimLeft(line, " \t")) > lim.ControlLine {
		return 0, 0, ErrMaxControlLine
	}
	*ev = Event{Op: op}
	switch op {
	case OpConnect, OpInfo, OpErr:
		ev.Arg = bytes.Trim(line, " \t")
		return n, 0, nil
	case OpPub:
		return pub(buf, line, n, len(verb) == len("HPUB "), lim, ev)
	case OpSub:
		err = sub(line, ev)
	case OpUnsub:
		err = unsub(line, ev)
	}
	if err != nil {
		return 0, 0, err
	}
	return n, 0, nil
}

// maxArgs is the largest number of arguments of any verb.
const maxArgs = 4

// split cuts line at blanks; k is -1 if there are more than maxArgs arguments
// or a stray control character.
func split(line []byte, args *[maxArgs][]byte) (k int) {
	start := -1
	for i, b := range line {
		switch b {
		case ' ', '\t':
			if start >= 0 {
				args[k] = line[start:i]
				k++
				start = -1
			}
		case '\r', 0:
			return -1
		default:
			if start < 0 {
				if k == maxArgs {
					return -1
				}
				start = i
			}
		}
	}
	if start >= 0 {
		args[k] = line[start:]
		k++
	}
	return k
}

// beyond is larger than any limit, and small enough to multiply by ten: 1<<40,
// or 1<<27 where an int has 32 bits.
const beyond = 1 << (27 + 13*(^uint(0)>>63))

// number parses decimal digits. Numbers beyond any limit become beyond.
func number(b []byte) (v int, ok bool) {
	if len(b) == 0 {
		return 0, false
	}
	for _, d := range b {
		if d < '0' || d > '9' {
			return 0, false
		}
		v = min(v*10+int(d-'0'), beyond)
	}
	return v, true
}

// pub finishes PUB and HPUB, whose control line takes n octets of buf.
func pub(buf, line []byte, n int, headers bool, lim Limits, ev *Event) (int, int, error) {
	var args [maxArgs][]byte
	k := split(line, &args)
	sizes := 1
	if headers {
		sizes = 2
	}
	if k < sizes+1 || k > sizes+2 {
		return 0, 0, ErrParser
	}
	ev.Subject = args[0]
	if k == sizes+2 {
		ev.Reply = args[1]
	}
	size, ok := number(args[k-1])
	if !ok {
		return 0, 0, ErrParser
	}
	hdr := 0
	if headers {
		if hdr, ok = number(args[k-2]); !ok {
			return 0, 0, ErrParser
		}
	}
	if size > lim.Payload {
		return 0, 0, ErrMaxPayload
	}
	if hdr > size {
		return 0, 0, ErrParser
	}
	end := n + size
	if len(buf) < end+2 {
		return 0, end + 2, nil
	}
	if buf[end] != '\r' || buf[end+1] != '\n' {
		return 0, 0, ErrUnknownOp
	}
	ev.HasHdr = headers
	ev.Header = buf[n : n+hdr]
	ev.Data = buf[n+hdr : end]
	return end + 2, 0, nil
}

func sub(line []byte, ev *Event) error {
	var args [maxArgs][]byte
	switch split(line, &args) {
	case 2:
		ev.Subject, ev.SID = args[0], args[1]
	case 3:
		ev.Subject, ev.Queue, ev.SID = args[0], args[1], args[2]
	default:
		return ErrParser
	}
	return nil
}

func unsub(line []byte, ev *Event) error {
	var args [maxArgs][]byte
	k := split(line, &args)
	if k != 1 && k != 2 {
		return ErrParser
	}
	ev.SID = args[0]
	if k == 2 {
		ev.Max, _ = number(args[1])
	}
	return nil
}
