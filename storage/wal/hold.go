package wal

import "petiole/storage"

// Hold says that group g needs the log from record from on: neither TrimHeld
// nor a power cut after it takes that record or a later one. 0 says that it
// needs nothing (any more): all its records so far are checkpointed, or the
// group is deleted, or it begins empty after every start. Records that OnCommit
// has not returned for are always kept, whatever was said before.
func (l *Log) Hold(g storage.GroupID, from storage.LSN) {}

// Holders returns the groups that keep the oldest segment from being recycled,
// at most limit, those that hold the oldest records first. It takes time in
// proportion to what it returns, not to the number of groups or records. With
// none it is the newest record, or records not yet applied, that keep it.
func (l *Log) Holders(limit int) []storage.GroupID { return nil }

// TrimHeld is Trim below the oldest record that any group holds. It may be
// called after Replay has ended.
func (l *Log) TrimHeld() error { return nil }
