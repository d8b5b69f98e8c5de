// Command tester serves servers to test suites until it is interrupted, and
// prints the address that goes into TESTER_NATS_URL:
//
//	go build -o /tmp/edge petiole/cmd/edge   # in the repository's root
//	go run ./cmd/tester -kind edge -binary /tmp/edge
//
// Suites that are not known to be harmless belong into the sandbox of
// cmd/natsgo.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"petiole/conformance/tester"
)

func main() {
	kind := flag.String("kind", "edge", "what the binary is: edge, hub or nats-server")
	binary := flag.String("binary", "", "the program that servers run")
	flag.Parse()
	if err := run(tester.Kind(*kind), *binary); err != nil {
		fmt.Fprintln(os.Stderr, "tester:", err)
		os.Exit(1)
	}
}

func run(kind tester.Kind, binary string) (err error) {
	if binary == "" {
		return errors.New("-binary is missing: the path of the program that servers run")
	}
	dir, err := os.MkdirTemp("", "petiole-tester-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	t, err := tester.Start(tester.Options{Kind: kind, Binary: binary, Dir: dir, Log: slog.Default()})
	if err != nil {
		return err
	}
	fmt.Println("TESTER_NATS_URL=" + t.URL())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
	return t.Close()
}
