// Package consumer is the state machine of one JetStream consumer: which
// message is delivered next and to whom, what awaits acknowledgement, what is
// delivered again and when. It follows ADR-4, ADR-9, ADR-13, ADR-15, ADR-37
// and ADR-42 of the NATS architecture and what clients observe of them.
//
// A [Machine] has no goroutines, no clock and does no I/O: whoever owns the
// stream calls it with the time, hands in what happens, and carries out the
// effects through [Sink]. Every method of a Machine is called with the
// stream's lock held, and so is every method of Sink, which the machine calls
// from within its own: a Sink must neither take the stream's lock nor call back
// into the machine. In particular a delivery may reach a subject that leads
// back into the same stream (a stream may capture a client's inbox), so
// publishing has to be postponed until the lock is released, or be free of
// handlers that take it.
//
// # Durability
//
// Live inputs change the machine at once and hand a record of the change to
// [Sink.Record], which appends it to the log without waiting. When the record
// has become durable it comes back through [Machine.Apply], as it does when
// the log is replayed at a restart. Records are numbered; Apply skips those
// whose effect the machine already has, so a snapshot may be ahead of the log
// position it is stored with. Only [Sink.Acked] is called from Apply for every
// record, live or replayed: what acknowledgements do to the stream (interest and
// work-queue retention) follows the log, never the moment.
//
// A consumer keeps durable state unless its configuration asks for memory
// storage or its stream is in memory (see [Logged]). Deliveries of one Pump are one record.
// Positions skipped because of filters are not recorded: they are found again.
// Pull requests, heartbeats, windows of flow control and pins are live only.
//
// # What is not as in nats-server
//
// The answers are those of nats-server 2.15, compared in the tests of package
// jetstream. These differ on purpose: a message's last attempt ends when its
// wait is over, whether or not a request is there to find out; what a consumer
// that starts with the last message of each subject has yet to send, and what
// was refused without delay, survive a restart; with policy "all" an
// acknowledgement counts by whichever delivery's subject it is sent. The policy
// "flow_control" and consumers for sourcing between servers are refused.
package consumer

import (
	"time"

	"petiole/internal/jetstream/api"
	"petiole/storage"
)

// Sink carries out a machine's effects. All methods are called with the
// stream's lock held (see the package comment) and must not block.
type Sink interface {
	// Deliver sends m to the subscribers of subject. The subject that the
	// client sees in the message is m.Subject; reply is the subject for its
	// acknowledgement, also for policy "none", where it tells the position.
	// reply and m are valid during the call only; m.Header and m.Data are
	// immutable and may be retained, except when headers-only is configured.
	Deliver(subject string, reply []byte, m *storage.Message)
	// Status sends an empty message with the header block to subject; reply
	// is set for flow control only. A nil header makes a plain empty message
	// (the answer to an acknowledgement that asks for one). header is valid
	// during the call only.
	Status(subject, reply string, header []byte)
	// Record appends cmd to the log without waiting. If ackReply is not
	// empty, an empty message is to be published to it when the record is
	// durable and applied. cmd is valid during the call only.
	Record(cmd []byte, ackReply string)
	// Interest reports whether anyone listens to the literal subject.
	Interest(subject string) bool
	// Congested reports whether a client that listens to the subject has much
	// pending already. The machine then waits a few milliseconds before it
	// delivers more there.
	Congested(subject string) bool
	// Advisory publishes an event on the subject, with ID and time filled in.
	// a may be retained.
	Advisory(subject string, a *api.ConsumerAdvisory)
	// Acked says that this consumer is done with the message. logged is true
	// when the call follows from a logged command (within Apply): removing
	// the message from the stream, if nobody needs it any more, then needs no
	// record of its own. It is false for consumers without durable state:
	// removal must be proposed. It is only called on streams whose retention
	// policy is not "limits", and never while the machine reads the store.
	Acked(seq uint64, logged bool)
}

// Messages is what a consumer reads of a [storage.Store].
type Messages interface {
	State() storage.State
	Load(seq uint64) (storage.Message, error)
	LoadNext(f storage.Filter, seq uint64) (storage.Message, error)
	LoadLast(pattern string, max uint64) (storage.Message, error)
	Range(seq uint64, fn func(storage.Message) bool) error
	Subjects(pattern string, fn func(subject string, s storage.SubjectState) bool)
	NumPending(f storage.Filter, seq uint64) uint64
	SeqAtTime(t int64) uint64
}

// Env is a machine's surroundings.
type Env struct {
	Sink     Sink
	Messages Messages
	// Stream is the configuration of the consumer's stream. The machine reads
	// Name, Subjects, Retention, Storage, MaxMsgsPer and MaxMsgSize.
	Stream *api.StreamConfig
	// MaxPayload bounds message sizes where the stream does not; it is the
	// burst of a rate limit. 0: 1 MiB.
	MaxPayload int
	// Skew returns how far the wall clock, by which pauses end and which Info
	// shows, is ahead of the clock that methods are told. nil: not at all.
	Skew func() time.Duration
}

// AckRef is what an acknowledgement's subject says about the message.
type AckRef struct {
	Deliveries  uint64 // how often it had been delivered
	Seq         uint64 // stream sequence
	ConsumerSeq uint64
	Time        int64 // when it was stored, Unix ns
	Pending     uint64
}
