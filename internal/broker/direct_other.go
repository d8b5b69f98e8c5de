//go:build !unix

package broker

import "net"

// directWriter does not exist here: all writing is left to goroutines that may
// wait for the client.
type directWriter struct{}

func newDirectWriter(net.Conn) *directWriter { return nil }

func (c *client) writeNow(segs []seg) (n int, rest []seg, err error) { return 0, segs, nil }

func (c *client) reader(in *inbox) func() (int, error) { return c.waitingReader(in) }
