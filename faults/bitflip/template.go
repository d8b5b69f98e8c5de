//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/faults/rig"
)

// The streams of a template store.
const (
	packed   = "PACKED"   // small messages, some removed
	large    = "LARGE"    // messages of 5 to 150 KiB
	values   = "VALUES"   // a few keys, written over and over
	work     = "WORK"     // with consumers that have acknowledged half
	exported = "EXPORTED" // known to a hub
)

var streamNames = []string{packed, large, values, work, exported}

// expected is a message that was acknowledged and not removed.
type expected struct {
	stream  string
	seq     uint64
	subject string
	sum     rig.Sum
	size    int // of the data
}

// streamTemplate is what a stream holds.
type streamTemplate struct {
	name     string
	config   jetstream.StreamConfig
	messages map[uint64]*expected
	removed  map[uint64]bool
	last     uint64
	// Consumers by name: up to which stream sequence everything is acknowledged.
	consumers map[string]uint64
}

// template is a store as a stopped edge leaves it.
type template struct {
	name    string // "stopped" or "killed"
	dir     string
	older   string // a copy of meta.db from before there were streams but one
	streams map[string]*streamTemplate
	files   map[string]*file
	places  map[string][]place // by class
}

func (t *template) total() (n int) {
	for _, s := range t.streams {
		n += len(s.messages)
	}
	return n
}

// marker names a message inside its data, so that it is found again in files.
func marker(stream string, n int) string { return fmt.Sprintf("<<%s/%08d>>", stream, n) }

var markers = regexp.MustCompile(`<<([A-Z]+)/([0-9]{8})>>`)

// body makes the data of the n-th message of a stream.
func body(stream string, n, size int) []byte {
	b := make([]byte, 0, size+8)
	b = append(b, marker(stream, n)...)
	r := rand.New(rand.NewPCG(uint64(n), uint64(len(stream))*31+uint64(stream[0])))
	for len(b) < size {
		b = append(b, byte(r.Uint32()))
	}
	return b
}

// makeTemplates runs an edge with a hub, fills its streams, and copies its
// store as it is after a kill and after a stop. hub is the hub's store.
func makeTemplates(ctx context.Context, dir string, programs rig.Programs) (ts []*template, hub string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, "", err
	}
	site := &rig.Site{Dir: dir, Programs: programs, Exports: []rig.Export{{Stream: exported, To: exported}}}
	if err := site.Prepare(); err != nil {
		return nil, "", err
	}
	defer site.Close()
	if err := errors.Join(site.StartHub(), site.StartEdge()); err != nil {
		return nil, "", err
	}
	old := filepath.Join(dir, "older-meta.db")
	err = errors.Join(createStreams(ctx, site.EdgeURL(), packed), site.Edge.Stop(rig.StopTimeout), copyFile(filepath.Join(site.EdgeStore, "meta.db"), old), site.StartEdge())
	if err != nil {
		return nil, "", err
	}
	streams, err := fill(ctx, site.EdgeURL())
	if err != nil {
		return nil, "", err
	}
	if err := site.WaitHub(ctx, exported, uint64(len(streams[exported].messages))); err != nil {
		return nil, "", err
	}
	// The log notes that its end is safe, and positions are saved, after a
	// second without work. Damage before that cannot be told from a torn write.
	if err := idle(ctx, 2500*time.Millisecond); err != nil {
		return nil, "", err
	}
	site.Edge.Kill()
	add := func(name string) error {
		t := &template{name: name, dir: filepath.Join(dir, name), older: old, streams: streams}
		if err := copyTree(site.EdgeStore, t.dir); err != nil {
			return err
		}
		if err := t.survey(); err != nil {
			return err
		}
		ts = append(ts, t)
		return nil
	}
	if err := add("killed"); err != nil {
		return nil, "", err
	}
	if err := site.Hub.Stop(rig.StopTimeout); err != nil {
		return nil, "", err
	}
	if err := site.StartEdge(); err != nil {
		return nil, "", err
	}
	if err := site.Edge.Stop(rig.StopTimeout); err != nil {
		return nil, "", err
	}
	return ts, site.HubStore, add("stopped")
}

// idle lets time pass in which the programs have nothing to do.
func idle(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// configOf is a stream's configuration.
func configOf(name string) jetstream.StreamConfig {
	c := jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Storage: jetstream.FileStorage, AllowDirect: true}
	if name == values {
		c.MaxMsgsPerSubject = 1
	}
	return c
}

func createStreams(ctx context.Context, url string, names ...string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := js.CreateStream(ctx, configOf(name)); err != nil {
			return fmt.Errorf("create stream %s: %w", name, err)
		}
	}
	return nil
}

// fill makes the streams and publishes into them.
func fill(ctx context.Context, url string) (map[string]*streamTemplate, error) {
	nc, err := nats.Connect(url)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(512))
	if err != nil {
		return nil, err
	}
	if err := createStreams(ctx, url, streamNames...); err != nil {
		return nil, err
	}
	streams := map[string]*streamTemplate{}
	for _, name := range streamNames {
		s := &streamTemplate{
			name: name, messages: map[uint64]*expected{}, removed: map[uint64]bool{}, consumers: map[string]uint64{},
			config: configOf(name),
		}
		streams[name] = s
	}
	r := rand.New(rand.NewPCG(1, 2))
	counts := map[string]int{packed: 4000, large: 24, values: 1500, work: 1200, exported: 2500}
	// Taking turns, so that the log holds records of all streams everywhere.
	for n := 1; len(counts) > 0; n++ {
		for _, name := range streamNames {
			times := 1
			if name == packed {
				times = 2
			}
			for range times {
				if counts[name] == 0 {
					delete(counts, name)
					continue
				}
				s := streams[name]
				counts[name]--
				s.last++
				size := 40 + r.IntN(300)
				subject := fmt.Sprintf("%s.%d", name, r.IntN(50))
				switch name {
				case large:
					size = 5<<10 + r.IntN(145<<10)
				case values:
					subject = fmt.Sprintf("%s.%d", name, r.IntN(200))
				}
				m := &nats.Msg{Subject: subject, Header: nats.Header{}, Data: body(name, int(s.last), size)}
				if r.IntN(2) == 0 {
					m.Header.Set("Reading", strconv.Itoa(n))
				}
				e := &expected{stream: name, seq: s.last, subject: subject, sum: rig.SumOf(subject, m.Header, m.Data), size: len(m.Data)}
				if name == values {
					for seq, old := range s.messages {
						if old.subject == subject {
							delete(s.messages, seq)
							s.removed[seq] = true
						}
					}
				}
				s.messages[e.seq] = e
				if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(30*time.Second)); err != nil {
					return nil, err
				}
			}
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for _, name := range streamNames {
		st, err := js.Stream(ctx, name)
		if err != nil {
			return nil, err
		}
		s := streams[name]
		if info := st.CachedInfo().State; info.LastSeq != s.last || int(info.Msgs) != len(s.messages) {
			return nil, fmt.Errorf("stream %s holds %d messages up to %d, want %d up to %d", name, info.Msgs, info.LastSeq, len(s.messages), s.last)
		}
		switch name {
		case packed:
			for seq := uint64(7); seq < s.last; seq += 41 {
				if err := st.DeleteMsg(ctx, seq); err != nil {
					return nil, err
				}
				delete(s.messages, seq)
				s.removed[seq] = true
			}
		case work:
			for _, c := range []string{"half", "none"} {
				cons, err := st.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: c, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 5000, AckWait: time.Hour})
				if err != nil {
					return nil, err
				}
				s.consumers[c] = 0
				if c == "none" {
					continue
				}
				batch, err := cons.Fetch(int(s.last) / 2)
				if err != nil {
					return nil, err
				}
				for m := range batch.Messages() {
					if err := m.DoubleAck(ctx); err != nil {
						return nil, err
					}
					s.consumers[c]++
				}
				if err := batch.Error(); err != nil || s.consumers[c] != s.last/2 {
					return nil, fmt.Errorf("consumer %s: %d messages fetched: %w", c, s.consumers[c], err)
				}
			}
		}
	}
	return streams, nil
}

// copyTree makes to a copy of the directory from. Sockets are left out.
func copyTree(from, to string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(target, 0o700)
		case !d.Type().IsRegular():
			return nil
		}
		return copyFile(path, target)
	})
}

// copyFile keeps holes: preallocated space that nobody wrote to stays unwritten.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	buf, zero := make([]byte, 64<<10), make([]byte, 64<<10)
	size := int64(0)
	for err == nil {
		var n int
		n, err = io.ReadFull(in, buf)
		if n > 0 && !bytes.Equal(buf[:n], zero[:n]) {
			if _, werr := out.WriteAt(buf[:n], size); werr != nil {
				err = werr
			}
		}
		size += int64(n)
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		err = out.Truncate(size)
	}
	return errors.Join(err, out.Close())
}
