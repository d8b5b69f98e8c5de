package wire

import (
	"bytes"
	"iter"
	"strconv"
)

// headerLine opens every header block.
const headerLine = "NATS/1.0"

// HeaderValue returns the first value of key in the raw header block hdr
// ("NATS/1.0...\r\nKey: value\r\n...\r\n\r\n"). Keys are compared exactly, as
// NATS clients do. Blanks around the value are not part of it. The value
// shares the memory of hdr. Nothing is allocated.
func HeaderValue(hdr []byte, key string) (value []byte, ok bool) {
	for k, v := range Headers(hdr) {
		if string(k) == key {
			return v, true
		}
	}
	return nil, false
}

// Headers walks the keys and values of the raw header block hdr in order.
// Lines that are not "key: value" are left out.
func Headers(hdr []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(k, v []byte) bool) {
		_, rest, ok := cutLine(hdr)
		for ok {
			var line []byte
			line, rest, ok = cutLine(rest)
			if len(line) == 0 {
				return
			}
			i := bytes.IndexByte(line, ':')
			if i <= 0 {
				continue
			}
			if !yield(line[:i], bytes.Trim(line[i+1:], " \t")) {
				return
			}
		}
	}
}

// cutLine cuts b after its first line end; ok is false at the last line.
func cutLine(b []byte) (line, rest []byte, ok bool) {
	i := bytes.IndexByte(b, '\n')
	if i < 0 {
		return bytes.TrimSuffix(b, []byte{'\r'}), nil, false
	}
	return bytes.TrimSuffix(b[:i], []byte{'\r'}), b[i+1:], true
}

// HeaderStatus returns code and description of the first line of a status
// block ("NATS/1.0 503 No Responders"); code is 0 if it has none.
func HeaderStatus(hdr []byte) (code int, description string) {
	line, _, _ := cutLine(hdr)
	line, ok := bytes.CutPrefix(line, []byte(headerLine+" "))
	if !ok {
		return 0, ""
	}
	num, text, _ := bytes.Cut(bytes.TrimSpace(line), []byte{' '})
	code, err := strconv.Atoi(string(num))
	if err != nil || code < 0 {
		return 0, ""
	}
	return code, string(bytes.TrimSpace(text))
}

// AppendStatus appends a complete status header block to dst: the status line
// with code and description (may be empty), then the key/value pairs kv.
func AppendStatus(dst []byte, code int, description string, kv ...string) []byte {
	dst = append(dst, headerLine+" "...)
	dst = strconv.AppendInt(dst, int64(code), 10)
	if description != "" {
		dst = append(dst, ' ')
		dst = append(dst, description...)
	}
	dst = append(dst, "\r\n"...)
	return appendPairs(dst, kv)
}

// AppendHeader appends a complete header block with the key/value pairs kv.
func AppendHeader(dst []byte, kv ...string) []byte {
	dst = append(dst, headerLine+"\r\n"...)
	return appendPairs(dst, kv)
}

func appendPairs(dst []byte, kv []string) []byte {
	for i := 0; i+1 < len(kv); i += 2 {
		dst = append(dst, kv[i]...)
		dst = append(dst, ": "...)
		dst = append(dst, kv[i+1]...)
		dst = append(dst, "\r\n"...)
	}
	return append(dst, "\r\n"...)
}

// WithHeader appends to dst the header block hdr (may be empty) with the
// key/value pairs kv added at its end.
func WithHeader(dst, hdr []byte, kv ...string) []byte {
	if len(hdr) == 0 {
		return AppendHeader(dst, kv...)
	}
	return appendPairs(append(dst, bytes.TrimSuffix(hdr, []byte("\r\n"))...), kv)
}

// WithoutHeader appends to dst the header block hdr less the lines of key. It
// appends nothing if no other line and no status remains.
func WithoutHeader(dst, hdr []byte, key string) []byte {
	start := len(dst)
	line, rest, ok := cutLine(hdr)
	dst = append(append(dst, line...), "\r\n"...)
	keep := len(line) > len(headerLine)
	for ok {
		line, rest, ok = cutLine(rest)
		if len(line) == 0 {
			break
		}
		if i := bytes.IndexByte(line, ':'); i > 0 && string(line[:i]) == key {
			continue
		}
		dst = append(append(dst, line...), "\r\n"...)
		keep = true
	}
	if !keep {
		return dst[:start]
	}
	return append(dst, "\r\n"...)
}
