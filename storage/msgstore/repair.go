package msgstore

import (
	"context"
	"errors"
	"log/slog"

	"petiole/storage"
)

// RepairReport says what a repair found and did.
type RepairReport struct {
	File   string `json:"file"`             // msgs.db, which is intact now
	Parked string `json:"parked,omitempty"` // where the damaged file is now; empty if there was none
	// Applied is the LSN that the repaired file reflects: the log has to be
	// replayed from the record behind it, as after any other opening. After
	// Repair of an open store, the store as such reflects what it did before.
	Applied storage.LSN `json:"applied"`
	// State is that of the repaired file.
	State storage.State `json:"state"`
	// Kept counts the messages in the repaired file; it is State.Msgs.
	Kept uint64 `json:"kept"`
	// Lost are the sequences whose messages existed and are no more, ascending
	// and disjoint. They are gaps now: reading passes over them.
	Lost []storage.Span `json:"lost,omitempty"`
	// Doubtful are sequences for which the notes of deletions are lost: of
	// those that had been deleted, some may be back, the others are in Lost.
	Doubtful []storage.Span `json:"doubtful,omitempty"`
	// LostKeys are the keys of the machine's state that are lost, as far as
	// they are known, StaleKeys those of which only an older value was left,
	// which is in place. KeysDoubtful says that there may be more of both. In
	// either case the machine, if it has its state in memory, has to bring all
	// of it with the next Freeze.
	LostKeys     []string `json:"lost_keys,omitempty"`
	StaleKeys    []string `json:"stale_keys,omitempty"`
	KeysDoubtful bool     `json:"keys_doubtful,omitempty"`
	// Damage says, for the operator, what was found where.
	Damage []string `json:"damage,omitempty"`
}

// LostMsgs counts the sequences in Lost.
func (r *RepairReport) LostMsgs() (n uint64) {
	for _, s := range r.Lost {
		n += s.Len()
	}
	return n
}

// SalvageOptions tune Salvage. The zero value is ready for use.
type SalvageOptions struct {
	// Log receives what an operator should know (default: slog.Default()).
	Log *slog.Logger
}

// Salvage repairs the store in dir, which is not open: it reads whatever is
// intact in msgs.db, however damaged the file is, and puts it into a new one
// under the same name. The damaged one is parked beside it as
// msgs.db.damaged-TIME. If power fails on the way, either file is in place,
// and Salvage may be called again.
//
// It fails with storage.ErrCorrupt if there is nothing to begin with: neither
// the identity of the store nor a state at any LSN can be found, in msgs.db or
// the floor file. Then nothing has been changed.
func Salvage(dir string, o SalvageOptions) (RepairReport, error) {
	return RepairReport{}, errors.ErrUnsupported
}

// Repair is [Salvage] of an open store, beside readers and the writer, whose
// messages in memory are kept. Checkpoints wait for it. When it is done, the
// owner should checkpoint (Freeze and Checkpoint) at once, with all of the
// keyed state if the report names lost or stale keys.
//
// After an error the store is as damaged as before, and still open.
func (s *Store) Repair(ctx context.Context) (RepairReport, error) {
	return RepairReport{}, errors.ErrUnsupported
}
