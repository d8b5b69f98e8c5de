package wal

import (
	"errors"
	"fmt"

	"petiole/storage"
)

// Close commits what is pending, marks the log as closed so that the next Open
// needs no recovery, and releases its files. The log is unusable afterwards; Close
// returns the log's error if it had failed.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		return storage.ErrClosed
	}
	l.closing = true
	l.space.Broadcast()
	err := l.commit()
	l.mu.Unlock()
	if err == nil {
		err = l.empty()
	}
	l.mu.Lock()
	failed := l.err
	if l.err == nil {
		l.err = storage.ErrClosed
	}
	l.wakeAll()
	l.lazy.Stop()
	l.idle.Stop()
	for l.writing || l.applying {
		l.work.Wait()
	}
	l.mu.Unlock()
	close(l.stop)
	l.workers.Wait()
	l.trimMu.Lock()
	defer l.trimMu.Unlock()
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	l.watch.stop()
	if failed == nil {
		failed = l.syncErr // by the syncer, meanwhile
	}
	if failed != nil || err != nil {
		return errors.Join(failed, l.active.closeFile())
	}
	if err := l.closeActive(); err != nil {
		return errors.Join(fmt.Errorf("close log: %w", err), l.active.closeFile())
	}
	return l.active.closeFile()
}

// empty begins a new segment if no record of the active one is needed, and trims
// that. Without a file for it it does nothing.
func (l *Log) empty() error {
	l.trimMu.Lock()
	defer l.trimMu.Unlock()
	l.mu.Lock()
	for l.writing || l.applying {
		l.work.Wait()
	}
	s := l.active
	if l.err != nil || l.needless < l.next || l.applied.Load()+1 < uint64(l.next) || l.next == s.hdr.first {
		l.mu.Unlock()
		return nil
	}
	f, ok := l.takeSpare(0)
	if !ok {
		l.mu.Unlock()
		return nil
	}
	l.plan.files = append(l.plan.files, f)
	l.writing = true
	l.mu.Unlock()
	err := l.rollover()
	l.mu.Lock()
	l.writing = false
	room := !errors.Is(err, errNoName)
	if err != nil && room {
		l.fail(err)
		err = l.err
	}
	l.mu.Unlock()
	switch {
	case !room:
		return nil // the next start reads what is not needed
	case err != nil:
		return err
	}
	return l.trim(l.needless)
}

// closeActive ends the active segment with a closing mark. Without room for it
// the next start does without.
func (l *Log) closeActive() error {
	s := l.active
	if s.sealed {
		return nil // there was no room for another
	}
	// The mark says that all before it is durable, so this has to be first.
	if l.durable.Load() < uint64(l.activeNext-1) {
		if err := l.datasync(watchWrite, s); err != nil {
			return err
		}
		l.durable.Store(uint64(l.activeNext - 1))
	}
	if !s.fitsMark(true) {
		return nil
	}
	if l.activeNext > s.hdr.first {
		if err := l.writeNote(); err != nil {
			return err
		}
	}
	if err := l.writeMark(l.durable.Load(), markClosing); err != nil {
		return err
	}
	return s.file.Datasync()
}
