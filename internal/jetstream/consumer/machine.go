package consumer

import (
	"time"

	"petiole/internal/jetstream/api"
)

// Machine is one consumer. All its methods are called under the stream's lock.
// A Machine is made by [New] when the command that creates the consumer is
// applied, or by [Restore] from a checkpoint; the log is replayed into it with
// [Machine.Apply], [Machine.Update] and the Msg* methods; [Machine.Start] then
// makes it live. Before Start no effect but Sink.Acked is produced.
type Machine struct {
	name    string
	cfg     *api.ConsumerConfig
	created time.Time
	env     Env
}

// New makes the machine of a consumer that is being created. cfg is a valid
// configuration with defaults filled in (see [Defaults], [Validate]), owned by
// the machine from now on. Where the consumer begins is decided here, from the
// stream's state.
func New(name string, cfg *api.ConsumerConfig, created time.Time, env Env) *Machine {
	return &Machine{name: name, cfg: cfg, created: created, env: env}
}

// Restore makes a machine from what [Machine.Snapshot] returned. The snapshot
// carries name, configuration and time of creation with it. It fails with
// [storage.ErrCorrupt].
func Restore(snapshot []byte, env Env) (*Machine, error) { return nil, nil }

// Start makes the machine live: what replay may have left untrue about the
// stream's contents is put right, messages are counted, clocks are set. Call it
// once, after replay, or right after New for a consumer created live; then
// Pump, and Tick no later than Deadline.
func (m *Machine) Start(now time.Time) {}

// Name returns the consumer's name.
func (m *Machine) Name() string { return m.name }

// Created returns the consumer's time of creation.
func (m *Machine) Created() time.Time { return m.created }

// Config returns the current configuration, which must not be changed.
func (m *Machine) Config() *api.ConsumerConfig { return m.cfg }

// Durable reports whether the machine's state is logged and checkpointed. If
// not, Record is never called, Snapshot is of no use, and the consumer is gone
// after a restart; its creation need not be logged.
func (m *Machine) Durable() bool { return false }

// Apply carries out a logged command of the kinds Delivered, Ack, Nak,
// Progress, Term, Exhausted and Reset, when it becomes durable and when it is
// replayed. (Create and Delete are the owner's business: [New],
// [Machine.Update], [Machine.Deleted].) cmd is not retained. The error says
// that cmd is malformed.
func (m *Machine) Apply(cmd []byte) error { return nil }

// Update gives the consumer a new configuration, which [ValidateUpdate] let
// pass; owned by the machine from now on. Called when the command is applied,
// live or in replay.
func (m *Machine) Update(now time.Time, cfg *api.ConsumerConfig) {}

// MsgAppended says that a message was stored. Pump delivers it.
func (m *Machine) MsgAppended(seq uint64, subject string) {}

// MsgRemoved says that a message was removed from the stream, by a limit, by
// age, by a client, or because everybody acknowledged it. What awaited an
// acknowledgement of it counts as acknowledged.
func (m *Machine) MsgRemoved(seq uint64, subject string) {}

// MsgsPurged says that any number of messages were removed at once; it
// inspects the stream instead of being told which.
func (m *Machine) MsgsPurged() {}

// NeedsAck reports whether the message is still wanted by this consumer: not
// yet delivered, or delivered and not acknowledged. A stream with interest
// retention removes a message that no consumer needs.
func (m *Machine) NeedsAck(seq uint64, subject string) bool { return false }

// Wants reports whether the consumer's filter selects the subject.
func (m *Machine) Wants(subject string) bool { return true }

// Next takes in a pull request: req is the payload of a message to
// $JS.API.CONSUMER.MSG.NEXT.<stream>.<consumer>, whose reply subject is reply.
// Refusals go to reply as a status. Call Pump afterwards.
func (m *Machine) Next(now time.Time, reply string, req []byte) {}

// Ack takes in an acknowledgement: payload is that of a message to the subject
// that ref was parsed from (see [ParseAck]), replyTo its reply subject, if any,
// which is answered when the acknowledgement is durable. Call Pump afterwards.
func (m *Machine) Ack(now time.Time, ref AckRef, payload []byte, replyTo string) {}

// FlowReply takes in a message to a subject $JS.FC.<stream>.<consumer>.*: the
// client has processed what was sent before. Call Pump afterwards.
func (m *Machine) FlowReply(now time.Time, subject string) {}

// InterestChanged says whether anyone listens to the deliver subject of a push
// consumer. Call Pump afterwards.
func (m *Machine) InterestChanged(now time.Time, interest bool) {}

// Pump delivers what can be delivered now, up to a bound (about 1000 messages
// or 4 MiB), and reports whether there is more to do at once: call it again
// after letting others have the lock. It is cheap when there is nothing to do.
// Call it after messages were appended and after the inputs that say so.
func (m *Machine) Pump(now time.Time) (more bool) { return false }

// Deadline returns when Tick is to be called next; it may change with every
// call of another method, mostly to an earlier time. The zero time means never.
func (m *Machine) Deadline() time.Time { return time.Time{} }

// Tick does what has become due: redelivery, expiry of pull requests,
// heartbeats, end of a pause. It returns the new Deadline, and dead if the
// consumer was not used for its inactive threshold and is to be deleted (it
// says so again a little later, as long as it is not). Call Pump afterwards.
func (m *Machine) Tick(now time.Time) (next time.Time, dead bool) { return time.Time{}, false }

// Reset makes the command that moves the consumer to the sequence, or (0) back
// to its acknowledgement floor, for the owner to propose and wait for; Pump
// after it was applied. The error is the API's.
func (m *Machine) Reset(seq uint64) (cmd []byte, resetSeq uint64, err *api.Error) {
	return nil, 0, nil
}

// Unpin takes the pin of a priority group away from its client.
func (m *Machine) Unpin(now time.Time, group string) *api.Error { return nil }

// Deleted tells waiting clients that the consumer is gone. The machine must
// not be used afterwards.
func (m *Machine) Deleted() {}

// Info describes the consumer.
func (m *Machine) Info(now time.Time) *api.ConsumerInfo { return nil }

// Snapshot encodes the machine for a checkpoint and clears Dirty.
func (m *Machine) Snapshot() []byte { return nil }

// Dirty reports whether the state differs from the last Snapshot (or Restore).
func (m *Machine) Dirty() bool { return false }

// MarkDirty takes the clearing of Dirty by Snapshot back, if the checkpoint did
// not take place.
func (m *Machine) MarkDirty() {}

// ParseAck takes a subject $JS.ACK.<stream>.<consumer>.<deliveries>.<stream
// seq>.<consumer seq>.<ns>.<pending> apart, or the longer form with domain and
// account hash before the stream. The names alias subject.
func ParseAck(subject string) (stream, consumer string, ref AckRef, ok bool) {
	return "", "", AckRef{}, false
}
