package jetstream

import (
	"sync/atomic"

	"petiole/storage/wal"
)

// DamageStats counts what damage has been met since the start.
type DamageStats struct {
	Repairs     uint64 // of streams' files
	LostMsgs    uint64 // messages that were lost in them
	Consumers   uint64 // consumers created anew, since their state was lost
	Quarantines uint64 // streams that could not be repaired
	LostRecords uint64 // records of the log
	Parked      uint64 // directories and files put aside
	Positions   uint64 // of exports, restored from their copies
}

type damageCounters struct {
	Repairs, LostMsgs, Consumers, Quarantines, LostRecords, Parked, Positions atomic.Uint64
}

// Stats describes the engine's use of resources. Sizes are in octets.
type Stats struct {
	OpenStores int   // streams whose files are open
	WALBytes   int64 // records in the log
	WALBudget  int64
	WAL        wal.Stats // what the log did since the start
}

// Stats describes the engine's use of resources.
func (e *Engine) Stats() Stats {
	return Stats{OpenStores: int(e.openStores.Load()), WALBytes: e.wal.Size(), WALBudget: e.o.WALBudget, WAL: e.wal.Stats()}
}

// Damage returns what damage has been met since the start.
func (e *Engine) Damage() DamageStats {
	d := &e.damage
	return DamageStats{
		d.Repairs.Load(), d.LostMsgs.Load(), d.Consumers.Load(), d.Quarantines.Load(), d.LostRecords.Load(), d.Parked.Load(), d.Positions.Load(),
	}
}
