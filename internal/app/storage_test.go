package app

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"petiole/internal/storagetool"
	"petiole/storage"
	"petiole/storage/msgstore"
)

func contains(t *testing.T, got string, want, not []string) {
	t.Helper()
	for _, s := range want {
		if !strings.Contains(got, s) {
			t.Errorf("%q is missing in:\n%s", s, got)
		}
	}
	for _, s := range not {
		if strings.Contains(got, s) {
			t.Errorf("%q is in:\n%s", s, got)
		}
	}
}

func TestWriteStat(t *testing.T) {
	var b bytes.Buffer
	st := &storagetool.Stat{Damage: []string{"msgs.db: bad"}, Streams: []storagetool.StreamStat{
		{Name: "BAD", Group: 2, Damaged: true, File: 1 << 20},
		{Name: "NEW", Group: 3, Pending: true, LogRecords: 4},
		{Name: "BIG", Group: 4, Messages: 1, First: 9, Last: 9, Bytes: 10, File: 100 << 20, Space: 3, Compact: true, CompactNeeds: 70 << 20, DiskFree: 5 << 20},
		{Name: "DUE", Group: 5, Compact: true, CompactNeeds: 70 << 20, DiskFree: 71 << 20},
	}}
	if err := writeStat(&b, st, "hub"); err != nil {
		t.Fatal(err)
	}
	contains(t, b.String(), []string{
		"cannot be read, see damage", "no file yet", "the file is 3.00 times the size of the messages", "allocated ahead",
		"`hub storage verify` says all that is damaged, and what to do about it",
		"postponed: it needs 70.0 MiB beside the file, the file system has 5.0 MiB; make room",
	}, []string{"has 71.0 MiB"})
}

func TestWriteSalvaged(t *testing.T) {
	var b bytes.Buffer
	span := []storage.Span{{First: 1, Last: 5}}
	err := writeSalvaged(&b, []storagetool.Salvaged{
		{Stream: "WELL", Report: &msgstore.RepairReport{Kept: 53, Parked: "a"}},
		{Stream: "GONE", Found: 1, Report: &msgstore.RepairReport{Lost: span, Doubtful: span, Parked: "b"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	contains(t, b.String(), []string{
		"stream WELL: made anew, 53 messages kept\n", "the former file is a;", "stream GONE: repaired, 0 messages kept, 5 messages lost\n", "the damaged file is b;",
	}, []string{"may be back"})
}

// Where the log holds nothing there stands a dash.
func TestWritePositions(t *testing.T) {
	var b bytes.Buffer
	p := &storagetool.Positions{Durable: 58, End: "clean", Groups: []storagetool.GroupPosition{{Group: 2, Stream: "S", Applied: 58, Floor: 58}}}
	if err := writePositions(&b, p, 0); err != nil {
		t.Fatal(err)
	}
	contains(t, b.String(), []string{"from LSN -", "written -", "durable 58", "durable -", "applied 58"}, []string{"written 0"})
	b.Reset()
	if err := writePositions(&b, p, 7); err != nil {
		t.Fatal(err)
	}
	contains(t, b.String(), []string{"nothing of group 7 is in the log"}, []string{"group 2 S"})
}

func TestNewerStore(t *testing.T) {
	err := fmt.Errorf("store/meta.db: it has version 2: %w", storage.ErrFormat)
	for _, err := range []error{storeError("store", err), storageError(err)} {
		var coded *Error
		if !errors.As(err, &coded) || coded.Code != ExitCannotStore {
			t.Errorf("exit code of %v", err)
		}
		contains(t, err.Error(), []string{"version 2", "start the version that wrote it"}, []string{"corrupt"})
	}
}
