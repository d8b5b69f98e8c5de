package config

import (
	"path/filepath"
	"reflect"
	"testing"
)

// TestSampleFiles loads the configurations that are shipped as examples.
func TestSampleFiles(t *testing.T) {
	dir := filepath.Join("..", "..", "configs")
	edge, err := Load(filepath.Join(dir, "edge.conf"), Edge)
	if err != nil {
		t.Fatal(err)
	}
	want := []Export{{"READINGS", "PLANT_7_READINGS"}, {"SALES", "SALES"}}
	if !edge.JetStream.Enabled || edge.Uplink == nil || !reflect.DeepEqual(edge.Exports, want) {
		t.Errorf("edge.conf: %+v", edge)
	}
	hub, err := Load(filepath.Join(dir, "hub.conf"), Hub)
	if err != nil {
		t.Fatal(err)
	}
	if !hub.JetStream.Enabled || hub.Edges == nil || len(hub.Edges.Users) != 1 {
		t.Errorf("hub.conf: %+v", hub)
	}
	// The two work together as they are, on one machine.
	if hub.Port == edge.Port || hub.Edges.Users[0].User != edge.Uplink.User || hub.Edges.Users[0].Password != edge.Uplink.Password {
		t.Error("the samples do not fit together")
	}
}
