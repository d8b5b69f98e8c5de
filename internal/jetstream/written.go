package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"petiole/storage"
	"petiole/storage/metadb"
)

// Written is what a store has written in its life, in octets: flash wears by that.
// It is saved every 64 MiB of log and at a stop; what a process wrote between that
// and its being killed is not in it.
type Written struct {
	Since    time.Time `json:"since"`    // when counting began
	Messages uint64    `json:"messages"` // of messages stored in files, as limits count them
	Log      uint64    `json:"log"`      // of the write-ahead log, padding included
	// Files counts the pages that checkpoints and compactions of streams wrote.
	Files uint64 `json:"files"`
}

// Amplification is how many octets were written for one of messages; 0 without
// messages.
func (w Written) Amplification() float64 {
	if w.Messages == 0 {
		return 0
	}
	return float64(w.Log+w.Files) / float64(w.Messages)
}

const (
	// bucketWritten of the meta database has Written, as JSON under keyWritten.
	bucketWritten = "written"
	keyWritten    = "total"
	// writtenEvery is after how many octets of log what has been written is saved.
	writtenEvery = 64 << 20
)

// writes counts what is written.
type writes struct {
	counting        atomic.Bool // what recovery applies has been counted before
	messages, files atomic.Uint64

	base   Written    // of earlier processes
	saveMu sync.Mutex // one save at a time; whoever asks does not wait for it
	saved  Written    // guarded by saveMu
}

// message counts a message that is appended to a stream's store.
func (w *writes) message(m *storage.Message) {
	if w.counting.Load() {
		w.messages.Add(m.Size())
	}
}

func (w *writes) file(octets int64) { w.files.Add(uint64(octets)) }

// loadWritten reads what earlier processes wrote. Nothing depends on it: what
// cannot be read begins anew.
func (e *Engine) loadWritten() {
	w, err := ReadWritten(e.meta)
	if err != nil {
		e.log.Warn("how much the store has written is counted anew", "err", err)
	}
	if w.Since.IsZero() {
		w.Since = time.Now().UTC()
	}
	e.writes.base, e.writes.saved = w, w
}

// ReadWritten returns what the store of that meta database has written, as far as
// that was saved; the zero Written if nothing was.
func ReadWritten(meta *metadb.DB) (w Written, err error) {
	b, err := meta.Get(bucketWritten, keyWritten)
	if errors.Is(err, storage.ErrNotFound) {
		return w, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil {
		return Written{}, fmt.Errorf("what the store has written: %w", err)
	}
	return w, nil
}

// Written returns what the store has written in its life.
func (e *Engine) Written() Written {
	w := e.writes.base
	w.Messages += e.writes.messages.Load()
	w.Log += e.wal.Stats().Bytes
	w.Files += e.writes.files.Load()
	return w
}

// saveWritten saves what has been written, once it is that much more log than the
// last time. For want of room it is not saved.
func (e *Engine) saveWritten(every uint64) error {
	e.writes.saveMu.Lock()
	defer e.writes.saveMu.Unlock()
	w := e.Written()
	if w.Messages == e.writes.saved.Messages || w.Log < e.writes.saved.Log+every {
		return nil
	}
	b, err := json.Marshal(w)
	if err == nil {
		err = e.meta.Put(bucketWritten, metadb.KV{Key: keyWritten, Value: b})
	}
	if noSpace(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("saving what the store has written: %w", err)
	}
	e.writes.saved = w
	return nil
}
