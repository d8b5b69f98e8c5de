package main

import (
	"fmt"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"petiole/internal/admin"
	"petiole/internal/app"
	"petiole/internal/config"
	"petiole/sync/link"
)

// exportCommand groups what concerns exports.
func exportCommand(f *app.Flags) *cobra.Command {
	c := &cobra.Command{
		Use:   "export",
		Short: "Look after the streams that go to the hub",
		RunE:  func(cmd *cobra.Command, _ []string) error { return app.NeedsCommand(cmd) },
	}
	c.AddCommand(exportList(f))
	return c
}

// hasStream reports whether the running edge has the stream.
func hasStream(js *admin.JetStream, name string) bool {
	return js != nil && slices.ContainsFunc(js.Streams, func(s admin.Stream) bool { return s.Name == name })
}

// exportNote says why an export does not proceed now, if it does not.
func exportNote(st *admin.Status, e *link.ExportStatus) string {
	switch {
	case e.Active: // what failed before does not matter any more
		return "-"
	case e.Failing:
		return e.LastError
	case !hasStream(st.JetStream, e.Stream):
		return "no such stream here yet"
	case !st.Hub.Connected:
		return "the hub is not connected, see edge status"
	}
	return "-"
}

// exportList shows each export of the running edge.
func exportList(f *app.Flags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the exported streams and how far the hub has them",
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := f.Ask(cmd)
			if err != nil {
				return err
			}
			if st.Program != config.Edge.String() {
				return app.Exit(app.ExitUnavailable, fmt.Errorf("no edge answers there but a %s, which has no exports: say where the edge runs with -c or -sd; `%s status` shows what the edges bring", st.Program, st.Program))
			}
			exports := []link.ExportStatus{}
			if st.Hub != nil {
				exports = append(exports, st.Hub.Exports...)
			}
			if asJSON {
				return app.WriteJSON(cmd.OutOrStdout(), exports)
			}
			if len(exports) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "no exports: add `hub` and `exports` to the configuration")
				return nil
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "STREAM\tAT THE HUB\tSTATE\tHERE\tTHERE\tBEHIND\tOLDEST\tLOST\tNOTE")
			for _, e := range exports {
				state := "waiting"
				switch {
				case e.Active && e.LagMsgs == 0:
					state = "in step"
				case e.Active:
					state = "replaying"
				}
				oldest := "-"
				if e.LagMsgs > 0 {
					oldest = e.LagAge.Round(time.Second).String()
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%s\t%d\t%s\n", e.Stream, e.To, state, e.Last, e.Through, e.LagMsgs, oldest, e.GapMsgs, exportNote(&st, &e))
			}
			return w.Flush()
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}
