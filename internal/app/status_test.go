package app

import (
	"testing"
	"time"

	"petiole/sync/link"
)

func TestExportText(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		e    link.ExportStatus
		want string
	}{
		{link.ExportStatus{To: "PLANT", Active: true, Through: 7, Last: 7}, "to PLANT, hub has 7 of 7"},
		{link.ExportStatus{
			To: "PLANT", Active: true, Through: 7, Last: 17, LagMsgs: 10, LagBytes: 2048, LagAge: 90 * time.Second,
			MsgRate: 3.2, ByteRate: 512, Gaps: 2, GapMsgs: 5, DamagedMsgs: 1, Regressions: 1,
			LastError: "stream is full", LastErrorTime: now.Add(-time.Minute),
		}, "to PLANT, hub has 7 of 17, 10 behind (about 2.0 KiB, oldest 1m30s ago), 3.2 messages/s (512 B/s), " +
			"2 gaps of 5 messages lost before they were sent (1 damaged on disk), history cut 1 time, last error 1m0s ago: stream is full"},
		{link.ExportStatus{To: "PLANT", Failing: true, LastError: "stream is full"}, "to PLANT, hub has 0 of 0, stream is full"},
		// It went on after that, and the hub is not there now.
		{
			link.ExportStatus{To: "PLANT", LastError: "stream is full", LastErrorTime: now.Add(-time.Hour)},
			"to PLANT, hub has 0 of 0, last error 1h0m0s ago: stream is full",
		},
	} {
		if got := exportText(&c.e, now); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
