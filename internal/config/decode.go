package config

import (
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nkeys"
)

// token is what the parser wraps every value in when it keeps positions.
type token interface {
	Value() any
	Line() int
	IsUsedVariable() bool
	SourceFile() string
}

// value is one configured value with where it stands.
type value struct {
	raw  any
	file string
	line int
	key  string // full path, as typed
	path string // the same with the first of each key's names
}

// key describes one key of a block: its names (the first is the one that
// messages use), what its values look like, and where the value goes. A key
// without set is known to nats-server but not supported here; then accepts is
// the remedy.
type key struct {
	names   []string
	accepts string
	ignored bool // known to nats-server, and of no consequence here; then accepts says why
	set     func(d *decoder, v value, accepts string)
	only    *Program // nil: both programs
}

// decoder collects problems, so that one run reports all of them.
type decoder struct {
	program  Program
	problems []*Problem
	warnings []*Problem
	where    map[string]position
}

func (d *decoder) fail(v value, what, accepts, remedy string) {
	d.problems = append(d.problems, &Problem{File: v.file, Line: v.line, Key: v.key, What: what, Accepts: accepts, Remedy: remedy})
}

// wrong reports a value of the wrong type or out of range.
func (d *decoder) wrong(v value, accepts string) {
	d.fail(v, "bad value "+show(v.raw), accepts, "")
}

// show renders a raw value for a message, never what could be a long block.
func show(raw any) string {
	switch raw := unwrap(raw).(type) {
	case string:
		return strconv.Quote(raw)
	case map[string]any:
		return "{...}"
	case []any:
		return "[...]"
	default:
		return fmt.Sprint(raw)
	}
}

func unwrap(raw any) any {
	for {
		t, ok := raw.(token)
		if !ok {
			return raw
		}
		raw = t.Value()
	}
}

// child places raw, found below v under name, or keeps v's place if the parser
// gave none.
func child(v value, name string, raw any) value {
	c := value{raw: raw, file: v.file, line: v.line, key: name, path: v.path}
	if v.key != "" && name != "" {
		c.key = v.key + "." + name
	} else if name == "" {
		c.key = v.key
	}
	if t, ok := raw.(token); ok {
		c.raw = unwrap(t)
		if t.SourceFile() != "" {
			c.file = t.SourceFile()
		}
		if t.Line() > 0 {
			c.line = t.Line()
		}
	}
	return c
}

// block decodes v, which has to be a map, by the table. It reports whether v
// was one.
func (d *decoder) block(v value, keys []key) bool {
	m, ok := v.raw.(map[string]any)
	if !ok {
		d.wrong(v, "a block { ... }")
		return false
	}
	seen := make(map[string]string)
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		raw := m[name]
		c := child(v, name, raw)
		k := find(keys, name)
		if k == nil {
			// A name of its own that a $reference used is a variable.
			if t, ok := raw.(token); ok && t.IsUsedVariable() {
				continue
			}
			remedy, accepts := "see the configuration table in README.md", ""
			if v.key != "" { // few enough to be listed
				remedy, accepts = "", strings.Join(d.primary(keys), ", ")
			}
			if near := nearest(name, d.known(keys)); near != "" {
				remedy, accepts = fmt.Sprintf("did you mean %q?", near), ""
			}
			d.fail(c, "unknown key", accepts, remedy)
			continue
		}
		c.path = k.names[0]
		if v.path != "" {
			c.path = v.path + "." + c.path
		}
		if d.where == nil {
			d.where = make(map[string]position)
		}
		d.where[c.path] = position{c.file, c.line}
		if k.ignored {
			d.warnings = append(d.warnings, &Problem{File: c.file, Line: c.line, Key: c.key, What: "has no effect", Remedy: k.accepts})
			continue
		}
		if k.only != nil && *k.only != d.program {
			d.fail(c, fmt.Sprintf("belongs to the configuration of the %s program", *k.only), "", "remove it here")
			continue
		}
		if k.set == nil {
			d.fail(c, "not supported yet", "", k.accepts)
			continue
		}
		if other, dup := seen[k.names[0]]; dup {
			d.fail(c, fmt.Sprintf("%q and %q are names of one setting", other, name), "", "keep one of them")
			continue
		}
		seen[k.names[0]] = name
		k.set(d, c, k.accepts)
	}
	return true
}

// find looks a key up; nats-server's keys are case-insensitive.
func find(keys []key, name string) *key {
	for i := range keys {
		for _, n := range keys[i].names {
			if strings.EqualFold(n, name) {
				return &keys[i]
			}
		}
	}
	return nil
}

// known lists the names that a suggestion may propose.
func (d *decoder) known(keys []key) []string {
	var names []string
	for _, k := range keys {
		if k.set != nil && (k.only == nil || *k.only == d.program) {
			names = append(names, k.names...)
		}
	}
	return names
}

// primary lists the keys that are accepted, each by its first name.
func (d *decoder) primary(keys []key) []string {
	var names []string
	for _, k := range keys {
		if k.set != nil && (k.only == nil || *k.only == d.program) {
			names = append(names, k.names[0])
		}
	}
	return names
}

// list calls fn for each element of an array; a single value counts as one.
func (d *decoder) list(v value, fn func(value)) {
	items, ok := v.raw.([]any)
	if !ok {
		fn(v)
		return
	}
	for i, raw := range items {
		c := child(v, "", raw)
		if _, isMap := c.raw.(map[string]any); isMap {
			c.key = fmt.Sprintf("%s[%d]", v.key, i)
		}
		fn(c)
	}
}

// The constructors below return set functions that store one type of value.

func stringKey(to *string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		switch raw := v.raw.(type) {
		case string:
			*to = raw
		case int64:
			// user: 4711 is a name that looks like a number.
			*to = strconv.FormatInt(raw, 10)
		default:
			d.wrong(v, accepts)
		}
	}
}

// nonEmpty is stringKey for values that mean nothing when empty.
func nonEmpty(to *string) func(*decoder, value, string) {
	set := stringKey(to)
	return func(d *decoder, v value, accepts string) {
		if v.raw == "" {
			d.wrong(v, accepts)
			return
		}
		set(d, v, accepts)
	}
}

func boolKey(to *bool) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		b, ok := v.raw.(bool)
		if !ok {
			d.wrong(v, accepts)
			return
		}
		*to = b
	}
}

func intKey[T int | int64](to *T, lo, hi int64) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		n, ok := integer(v.raw)
		if !ok || n < lo || n > hi {
			d.wrong(v, accepts)
			return
		}
		*to = T(n)
	}
}

// integer reads a number, or a string such as "64MB" as nats-server takes it.
func integer(raw any) (int64, bool) {
	switch raw := raw.(type) {
	case int64:
		return raw, true
	case string:
		return Size(raw)
	}
	return 0, false
}

// Size reads a count of octets with an optional suffix: K, M, G, T are powers
// of 1000 in a file's bare numbers but of 1024 in quoted ones and on the
// command line, which is what nats-server does.
func Size(s string) (int64, bool) {
	s = strings.ToUpper(strings.TrimSpace(s))
	shift := 0
	for i, unit := range []string{"K", "M", "G", "T"} {
		for _, suffix := range []string{unit + "IB", unit + "B", unit + "I", unit} {
			if rest, ok := strings.CutSuffix(s, suffix); ok {
				s, shift = rest, 10*(i+1)
				break
			}
		}
		if shift > 0 {
			break
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil || n > math.MaxInt64>>shift || n < 0 && shift > 0 {
		return 0, false
	}
	return n << shift, true
}

// durationKey stores a duration: "2m", or a number of seconds.
func durationKey(to *time.Duration, lo time.Duration) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		got, ok := duration(v.raw)
		if !ok || got < lo {
			d.wrong(v, accepts)
			return
		}
		*to = got
	}
}

func duration(raw any) (time.Duration, bool) {
	const most = math.MaxInt64 / int64(time.Second)
	switch raw := raw.(type) {
	case int64:
		if raw > most || raw < -most {
			return 0, false
		}
		return time.Duration(raw) * time.Second, true
	case float64:
		if math.Abs(raw) > float64(most) {
			return 0, false
		}
		return time.Duration(raw * float64(time.Second)), true
	case string:
		got, err := time.ParseDuration(raw)
		return got, err == nil
	}
	return 0, false
}

// listenKey stores host and port from "host:port", ":port" or a port alone.
func listenKey(host *string, port *int) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		switch raw := v.raw.(type) {
		case int64:
			if !validPort(raw) {
				d.wrong(v, accepts)
				return
			}
			*port = int(raw)
		case string:
			h, n, err := HostPort(raw)
			if err != nil {
				d.wrong(v, accepts)
				return
			}
			if h != "" {
				*host = h
			}
			*port = n
		default:
			d.wrong(v, accepts)
		}
	}
}

// HostPort takes "host:port" apart; the port is 1 to 65535, or -1 for one that
// the system chooses, and the host may be empty.
func HostPort(s string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseInt(p, 10, 32)
	if err != nil || !validPort(n) {
		return "", 0, fmt.Errorf("%q is no port; accepted: 1 to 65535, or -1 for one the system chooses", p)
	}
	return host, int(n), nil
}

func validPort(n int64) bool { return n == -1 || n >= 1 && n <= 65535 }

func portKey(to *int) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		n, ok := v.raw.(int64)
		if !ok || !validPort(n) {
			d.wrong(v, accepts)
			return
		}
		*to = int(n)
	}
}

// stringsKey stores one string or a list of strings that all pass check.
func stringsKey(to *[]string, check func(string) bool) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		d.list(v, func(item value) {
			s, ok := item.raw.(string)
			if !ok || s == "" || check != nil && !check(s) {
				d.wrong(item, accepts)
				return
			}
			*to = append(*to, s)
		})
	}
}

// enumKey stores one of the words.
func enumKey(to *string, words ...string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		s, ok := v.raw.(string)
		if !ok || !slices.Contains(words, s) {
			d.wrong(v, accepts)
			return
		}
		*to = s
	}
}

// nkeyKey stores a public user nkey.
func nkeyKey(to *string) func(*decoder, value, string) {
	return func(d *decoder, v value, accepts string) {
		s, ok := v.raw.(string)
		if !ok || !nkeys.IsValidPublicUserKey(s) {
			d.wrong(v, accepts)
			return
		}
		*to = s
	}
}
