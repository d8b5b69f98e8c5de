package leaf_test

import (
	"context"
	"fmt"
	"os"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"petiole/leaf"
)

// A program that keeps its receipts in a stream of its own, without a network.
func Example() {
	dir, err := os.MkdirTemp("", "leaf")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	l, err := leaf.New(leaf.Config{StoreDir: dir})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	select {
	case <-l.Ready():
	case err := <-done:
		fmt.Println(err)
		return
	}

	nc, err := nats.Connect("", nats.InProcessServer(l))
	if err != nil {
		fmt.Println(err)
		return
	}
	js, err := jetstream.New(nc)
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "RECEIPTS", Subjects: []string{"receipt.>"}}); err != nil {
		fmt.Println(err)
		return
	}
	ack, err := js.Publish(ctx, "receipt.till-7", []byte("1 coffee"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(ack.Stream, ack.Sequence, "is on disk")
	nc.Close()
	stop()
	fmt.Println("stopped:", <-done)
	// Output:
	// RECEIPTS 1 is on disk
	// stopped: <nil>
}
