package main

import (
	"testing"

	"petiole/internal/admin"
	"petiole/sync/link"
)

// TestExportNote: an export tells what holds it up now, not what did before.
func TestExportNote(t *testing.T) {
	js := &admin.JetStream{Streams: []admin.Stream{{Name: "READINGS"}}}
	for name, c := range map[string]struct {
		js        *admin.JetStream
		connected bool
		e         link.ExportStatus
		want      string
	}{
		"at work":       {js, true, link.ExportStatus{Active: true, LastError: "gone"}, "-"},
		"failing":       {js, true, link.ExportStatus{Failing: true, LastError: "gone"}, "gone"},
		"key is lost":   {js, false, link.ExportStatus{Failing: true, LastError: "key"}, "key"},
		"hub stopped":   {js, false, link.ExportStatus{LastError: "gone"}, "the hub is not connected, see edge status"},
		"no stream":     {nil, true, link.ExportStatus{}, "no such stream here yet"},
		"about to ask":  {js, true, link.ExportStatus{LastError: "gone"}, "-"},
		"never reached": {js, false, link.ExportStatus{}, "the hub is not connected, see edge status"},
	} {
		c.e.Stream = "READINGS"
		st := &admin.Status{JetStream: c.js, Hub: &link.EdgeStatus{Connected: c.connected}}
		if got := exportNote(st, &c.e); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
