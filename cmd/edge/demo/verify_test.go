package demo

import (
	"bytes"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// numbered returns messages with the numbers given.
func numbered(numbers ...int) []*nats.Msg {
	var out []*nats.Msg
	for _, n := range numbers {
		out = append(out, &nats.Msg{Subject: "s", Header: nats.Header{numberHeader: {strconv.Itoa(n)}}, Data: []byte(strconv.Itoa(n))})
	}
	return out
}

func TestJudge(t *testing.T) {
	changed := numbered(1, 2, 3)
	changed[1].Data = []byte("x")
	subject := numbered(1, 2, 3)
	subject[0].Subject = "t"
	header := numbered(1, 2, 3)
	header[2].Header["More"] = []string{""}
	alien := numbered(1, 2, 3, 4)
	for name, tt := range map[string]struct {
		got  []*nats.Msg
		want verdict
	}{
		"equal":              {numbered(1, 2, 3), verdict{messages: 3}},
		"nothing":            {nil, verdict{missing: 3}},
		"one missing":        {numbered(1, 3), verdict{messages: 2, missing: 1}},
		"one twice":          {numbered(1, 2, 2, 3), verdict{messages: 4, duplicated: 1}},
		"replayed from back": {numbered(1, 2, 3, 1, 2), verdict{messages: 5, duplicated: 2}},
		"out of order":       {numbered(2, 1, 3), verdict{messages: 3, disordered: 1}},
		"other data":         {changed, verdict{messages: 3, different: 1}},
		"other subject":      {subject, verdict{messages: 3, different: 1}},
		"other header":       {header, verdict{messages: 3, different: 1}},
		"one never sent":     {alien, verdict{messages: 4, different: 1}},
	} {
		if v := judge(numbered(1, 2, 3), tt.got); v != tt.want || v.good(3) != (name == "equal") {
			t.Errorf("%s: %+v, want %+v", name, v, tt.want)
		}
	}
}

func TestGauge(t *testing.T) {
	var out bytes.Buffer
	start := time.Unix(100, 0)
	g := newGauge(&out, false)
	g.draw(start, 100, 0, 0)
	g.draw(start.Add(time.Millisecond), 90, 10, 10) // too soon
	g.draw(start.Add(lineEvery), 50, 50, 200)
	g.draw(start.Add(lineEvery+1), 0, 100, 300) // the end is never left out
	g.draw(start.Add(lineEvery+2), 0, 100, 300)
	g.end()
	want := "  backlog: 100 to go, 0 replayed (0 %), 0 a second\n" +
		"  backlog: 50 to go, 50 replayed (50 %), 200 a second\n" +
		"  backlog: 0 to go, 100 replayed (100 %), 300 a second\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	out.Reset()
	g = newGauge(&out, true)
	g.draw(start, 50, 50, 1)
	g.end()
	if got := out.String(); !strings.HasPrefix(got, "\r  backlog ["+strings.Repeat("█", 20)+strings.Repeat("·", 20)+"]  50 %") || !strings.HasSuffix(got, "\n") {
		t.Errorf("bar %q", got)
	}
}
