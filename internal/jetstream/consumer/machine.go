package consumer

import (
	"time"

	"petiole/internal/jetstream/api"
)

// Machine is one consumer. All its methods are called under the stream's lock.
// A Machine is made by [New] when the command that creates the consumer is
// applied, or by [Restore] from a checkpoint; the log is replayed into it with
// [Machine.Apply] and the Message* methods; [Machine.Start] then makes it live.
// Before Start no effect but Sink.Acked is produced.
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
func Restore(snapshot []byte, env Env) (*Machine, error) { panic("not yet") }
