package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"petiole/cmd/edge/demo"
)

// demoCommand shows the product.
func demoCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "demo",
		Short: "See it work: edge and hub on this machine, a hub that is killed, and nothing lost",
		Long: `See it work, in less than half a minute. The demonstration runs a hub and an
edge as processes of their own on this machine, publishes readings and receipts
to the edge, kills the hub in the middle, publishes on, starts the hub again,
and compares what both hold at the end. It ends with 0 only if both hold
exactly what was published, in order.

The hub program is taken from beside the edge program, or built with the go
command from the source.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the edge program: %w", err)
			}
			o.Edge, o.Out, o.Bar = exe, cmd.OutOrStdout(), term.IsTerminal(int(os.Stdout.Fd()))
			err = demo.Run(ctx, o)
			if errors.Is(err, context.Canceled) {
				return errors.New("interrupted")
			}
			return err
		},
	}
	c.Flags().BoolVar(&o.Keep, "keep", false, "leave edge and hub running at the end, until Ctrl-C")
	c.Flags().StringVar(&o.Hub, "hub", "", "the hub `program`")
	// The program's other flags mean nothing here. (Not by a template: those call
	// methods by name, so that the linker has to keep all there are, and the
	// program is a fifth larger, in memory too.)
	c.SetUsageFunc(func(cmd *cobra.Command) error {
		_, err := fmt.Fprintf(cmd.OutOrStderr(), "Usage:\n  %s\n\nFlags:\n%s", cmd.UseLine(), cmd.LocalFlags().FlagUsages())
		return err
	})
	return c
}
