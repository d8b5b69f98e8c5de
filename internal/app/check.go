package app

import (
	"fmt"

	"github.com/spf13/cobra"

	"petiole/internal/broker"
)

// checkCommand looks at a configuration without using it.
func checkCommand(f *Flags) *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Check a configuration file",
		Long: `Check the configuration file named with -c: every mistake is shown with file,
line, key, what is accepted and what to do. Nothing is started, opened or
written beside reading the file and those that it names. It ends with 0 if the
program would accept the file, with 78 if not.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.Config == "" {
				return Exit(ExitUsage, fmt.Errorf("%s needs -c FILE", cmd.CommandPath()))
			}
			return f.check(cmd)
		},
	}
}

// check loads the configuration and says that it is valid, with what it has
// that is without effect.
func (f *Flags) check(cmd *cobra.Command) error {
	cfg, err := f.Load(cmd)
	if err != nil {
		return err
	}
	if _, err := broker.New(brokerOptions(cfg)); err != nil { // nothing of it starts
		return Exit(ExitConfig, err)
	}
	for _, w := range cfg.Warnings {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", f.program.Program, w)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "configuration of %s is valid\n", f.program.Program)
	return nil
}
