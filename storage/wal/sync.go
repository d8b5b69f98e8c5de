package wal

import (
	"time"

	"petiole/storage"
)

// What makes the written durable, and tells of it.

// datasync makes what has been written to the active segment durable.
func (l *Log) datasync(w watched, s *segment) error {
	if noFsync {
		return nil
	}
	defer l.watch.end(l.watch.begin(w, "fdatasync", s.path))
	start := time.Now()
	if err := s.file.Datasync(); err != nil {
		return err
	}
	l.lastSync.Store(int64(time.Since(start)))
	l.syncs.Add(1)
	return nil
}

// Sync returns when all that was appended before the call is durable and
// OnCommit has run for it, whatever SyncInterval is.
func (l *Log) Sync() error {
	if err := l.Commit(); err != nil {
		return err
	}
	return l.SyncWritten()
}

// SyncWritten returns when everything that OnCommit has been given is durable.
// A checkpoint that goes beyond Durable would outlive the log; call SyncWritten
// before it. Unlike Sync it waits for no call of OnCommit, so that it may be
// called with locks held that OnCommit takes, but not those of OnDurable.
func (l *Log) SyncWritten() error {
	if l.o.SyncInterval == 0 {
		return nil
	}
	l.mu.Lock()
	err := l.err
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.syncWritten()
}

// syncer syncs what was written within SyncInterval.
func (l *Log) syncer() {
	timer := time.NewTimer(l.o.SyncInterval)
	timer.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-l.dirty:
		}
		timer.Reset(l.o.SyncInterval)
		select {
		case <-l.stop:
			return
		case <-timer.C:
		}
		if l.syncWritten() != nil {
			return
		}
	}
}

// syncWritten makes all that is written durable.
func (l *Log) syncWritten() error {
	if l.written.Load() <= l.durable.Load() {
		// Nor is fileMu waited for, which the writer holds for as long as there is no
		// room for the name of the next segment: a checkpoint may make it.
		l.tellDurable()
		return nil
	}
	l.fileMu.Lock()
	w := l.written.Load()
	err := l.syncErr
	if err == nil && w > l.durable.Load() {
		if l.active.file == nil {
			err = storage.ErrClosed
		} else if err = l.datasync(watchSync, l.active); err == nil {
			l.durable.Store(w)
		} else {
			l.syncErr = err
		}
	}
	l.fileMu.Unlock()
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fail(err)
		return l.err
	}
	l.tellDurable()
	return nil
}

// tellDurable calls OnDurable if there is something new.
func (l *Log) tellDurable() {
	if l.o.OnDurable == nil {
		return
	}
	l.durMu.Lock()
	defer l.durMu.Unlock()
	if d := l.Durable(); d > l.told {
		l.told = d
		l.o.OnDurable(d)
	}
}
