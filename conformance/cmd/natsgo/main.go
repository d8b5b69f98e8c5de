// Command natsgo runs the test suites of nats.go, unchanged, against edge, hub
// or nats-server, and says how much of what nats-server passes the server
// passes. README.md has examples.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"petiole/conformance/sandbox"
	"petiole/conformance/suite"
	"petiole/conformance/tester"
)

func main() {
	sandbox.Main(suite.Inside)
	server := flag.String("server", "edge", "edge, hub or nats-server")
	names := flag.String("suite", "core,micro", "suites, with commas between them: "+strings.Join(suite.Names(), ", "))
	run := flag.String("run", "", "only tests whose name (test/TestName) matches this expression")
	parallel := flag.Int("parallel", 8, "tests at a time; what fails then is tried again alone")
	least := flag.Float64("least", 98, "exit with 1 if less percent pass in core or micro")
	write := flag.Int("write", 0, "run so many times and write the baseline (with -server nats-server)")
	bin := flag.String("bin", "", "`directory` to keep built suites in, and to find them; it must be readable by everybody")
	verbose := flag.Bool("v", false, "print what failing tests print")
	keep := flag.Bool("keep", false, "leave the working directory")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o := suite.Options{
		Kind: tester.Kind(*server), Suites: strings.Split(*names, ","),
		Parallel: *parallel, Bin: *bin, Verbose: *verbose, Keep: *keep, Out: os.Stdout,
	}
	if err := do(ctx, o, *run, *least, *write); err != nil {
		fmt.Fprintln(os.Stderr, "natsgo:", err)
		os.Exit(1)
	}
}

func do(ctx context.Context, o suite.Options, run string, least float64, write int) error {
	switch o.Kind {
	case tester.Edge, tester.Hub, tester.NATSServer:
	default:
		return fmt.Errorf("unknown server %q; accepted: edge, hub, nats-server", o.Kind)
	}
	for _, name := range o.Suites {
		if !suite.Known(name) {
			return fmt.Errorf("unknown suite %q; accepted: %s", name, strings.Join(suite.Names(), ", "))
		}
	}
	if run != "" {
		re, err := regexp.Compile(run)
		if err != nil {
			return fmt.Errorf("-run: %w", err)
		}
		o.Run = re
	}
	if write > 0 {
		if o.Kind != tester.NATSServer || o.Run != nil {
			return errors.New("a baseline is whole suites on nats-server")
		}
		return suite.WriteBaseline(ctx, o, write)
	}
	verdicts, err := suite.RunAndJudge(ctx, o)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range verdicts {
		v.Print(os.Stdout, o.Verbose)
		want := least
		if v.Suite == "jetstream" || o.Run != nil {
			want = 0
		}
		errs = append(errs, v.Check(want))
	}
	return errors.Join(errs...)
}
