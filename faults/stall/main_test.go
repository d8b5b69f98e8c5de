//go:build linux && (amd64 || arm64)

package main

import (
	"testing"
	"time"
)

func TestUndisturbed(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name          string
		edge, control delays
		hung          time.Duration
		want          bool
	}{
		{"idle machine", delays{2000, 1 * ms, 3 * ms}, delays{2000, 1 * ms, 3 * ms}, 6 * time.Second, true},
		{"busy machine", delays{60, 300 * ms, 900 * ms}, delays{50, 250 * ms, 400 * ms}, 6 * time.Second, true},
		{"delayed", delays{100, 60 * ms, 61 * ms}, delays{300, 1 * ms, 2 * ms}, 6 * time.Second, false},
		{"one waited for the disk", delays{1000, 1 * ms, 4 * time.Second}, delays{1000, 1 * ms, 2 * ms}, 6 * time.Second, false},
		{"none while it hung", delays{}, delays{1000, 1 * ms, 2 * ms}, 6 * time.Second, false},
		{"slow disk, few", delays{20, 1 * ms, 2 * ms}, delays{1000, 1 * ms, 2 * ms}, 0, false},
	} {
		if err := undisturbed(tt.edge, tt.control, tt.hung); (err == nil) != tt.want {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
