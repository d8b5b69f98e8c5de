package wal_test

import (
	"math"
	"slices"
	"testing"

	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// lastOf replays l and returns what its records carry in Last.
func lastOf(t *testing.T, l *wal.Log) (list []uint32) {
	t.Helper()
	if err := l.Replay(func(r wal.Record) error {
		list = append(list, r.Last)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

// Each record says which sequence its group has come to, as it was known.
func TestLastSequences(t *testing.T) {
	disk := simfs.New(1)
	var committed []wal.Record
	change := func(o *wal.Options) {
		o.Messages = func(head []byte) int { return int(head[0] - '0') }
		o.OnCommit = func(recs []wal.Record) { committed = append(committed, recs...) }
	}
	l := open(t, disk, change)
	put := func(data string) {
		t.Helper()
		if _, err := l.Append(1, nil, []byte(data), []byte("9")); err != nil {
			t.Fatal(err)
		}
	}
	commit := func() {
		t.Helper()
		if err := l.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	put("1") // nothing is known yet
	commit()
	l.SetLast(1, 1<<32+10)
	put("1")
	put("0") // no message
	put("3")
	put("2") // refused, say
	put("1") // under way by then
	commit()
	l.CorrectLast(&committed[4], 1<<32+14)
	l.CorrectLast(&committed[5], 1<<32+15) // appended before that was known
	put("1")
	commit()
	l.CorrectLast(&committed[6], 1<<32+16)
	put("1")
	l.ForgetLast(1)
	put("1")
	commit()
	want := []uint32{0, 11, 11, 14, 16, 17, 16, 17, 0}
	for i, r := range committed {
		if r.Last != want[i] {
			t.Errorf("record %d was committed with %d, want %d", i, r.Last, want[i])
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, disk, change)
	if got := lastOf(t, l); !slices.Equal(got, want) {
		t.Errorf("replayed %v, want %v", got, want)
	}
	if _, err := l.Append(math.MaxUint32+1, nil, []byte("1")); err == nil {
		t.Error("a group that a record has no room for was accepted")
	}
}
