package demo

import (
	"context"
	"fmt"
	"maps"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/testdata"
)

// maxUnacked bounds the publishes that wait for their acknowledgement.
const maxUnacked = 512

// publisher publishes the samples in order and remembers what the edge has
// acknowledged. It is used by one goroutine at a time.
type publisher struct {
	js   jetstream.JetStream
	msgs []outgoing
	next int
	// sent lists, per stream, what was published, by its number from 1.
	sent [][]*nats.Msg
}

// outgoing is one message to publish.
type outgoing struct {
	stream int // index into exports
	msg    *nats.Msg
}

func newPublisher(ctx context.Context, nc *nats.Conn) (*publisher, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(maxUnacked))
	if err != nil {
		return nil, err
	}
	for _, e := range exports {
		if err := createStream(ctx, js, e.stream, e.subjects); err != nil {
			return nil, err
		}
	}
	kinds, err := samples()
	if err != nil {
		return nil, err
	}
	p := &publisher{js: js, sent: make([][]*nats.Msg, len(exports))}
	for pass := range passes {
		// Two readings, one receipt, as long as there are both.
		for i, k := 0, 0; i < len(kinds[0]) || k < len(kinds[1]); {
			for range 2 {
				if i < len(kinds[0]) {
					p.add(0, pass, kinds[0][i])
					i++
				}
			}
			if k < len(kinds[1]) {
				p.add(1, pass, kinds[1][k])
				k++
			}
		}
	}
	return p, nil
}

// add appends one sample to what will be published.
func (p *publisher) add(stream, pass int, r testdata.Record) {
	h := nats.Header(maps.Clone(r.Header))
	if h == nil {
		h = nats.Header{}
	}
	if id := h.Get(nats.MsgIdHdr); id != "" && pass > 0 {
		// A receipt of the next pass is another one, not the same again.
		h[nats.MsgIdHdr] = []string{id + "/" + strconv.Itoa(pass)}
	}
	h.Set(numberHeader, strconv.Itoa(len(p.sent[stream])+1))
	msg := &nats.Msg{Subject: r.Subject, Header: h, Data: r.Data}
	p.msgs = append(p.msgs, outgoing{stream, msg})
	p.sent[stream] = append(p.sent[stream], msg)
}

// total is how many messages there are.
func (p *publisher) total() int { return len(p.msgs) }

// acked is how many messages the edge has acknowledged.
func (p *publisher) acked() int { return p.next }

// until publishes up to the n-th message and returns when the edge has
// acknowledged each of them.
func (p *publisher) until(ctx context.Context, n int) error {
	futures := make([]jetstream.PubAckFuture, 0, n-p.next)
	for _, m := range p.msgs[p.next:n] {
		// The client sets reply and headers of its own on what it is given. It
		// waits for acknowledgements while too many are outstanding.
		f, err := p.js.PublishMsgAsync(&nats.Msg{Subject: m.msg.Subject, Header: maps.Clone(m.msg.Header), Data: m.msg.Data},
			jetstream.WithStallWait(Limit))
		if err != nil {
			return fmt.Errorf("publish to %s: %w", m.msg.Subject, err)
		}
		futures = append(futures, f)
	}
	for i, f := range futures {
		m := p.msgs[p.next+i]
		select {
		case ack := <-f.Ok():
			if ack.Stream != exports[m.stream].stream || ack.Duplicate {
				return fmt.Errorf("publish to %s: acknowledged by %s, duplicate %v", m.msg.Subject, ack.Stream, ack.Duplicate)
			}
		case err := <-f.Err():
			return fmt.Errorf("publish to %s: %w", m.msg.Subject, err)
		case <-ctx.Done():
			return fmt.Errorf("publish to %s: not acknowledged: %w", m.msg.Subject, context.Cause(ctx))
		}
	}
	p.next = n
	return nil
}
