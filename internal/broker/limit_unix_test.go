//go:build unix

package broker

import (
	"syscall"
	"testing"
)

// halfOpenConns is how many connections a test may have open: 3,000 if this
// process may have two descriptors for each.
func halfOpenConns(t *testing.T) int {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	n := 3000
	if most := (int(min(lim.Cur, 1<<20)) - 200) / 2; most < n {
		n = most
		t.Logf("only %d connections: the limit is %d files", n, lim.Cur)
	}
	return n
}
