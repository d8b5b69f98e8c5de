package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"petiole/internal/admin"
	"petiole/sync/link"
)

// askTimeout bounds a question to a running program.
const askTimeout = 5 * time.Second

// Ask returns the status of the running program that the flags point to.
func (f *Flags) Ask(cmd *cobra.Command) (admin.Status, error) {
	path, err := f.SocketPath(cmd)
	if err != nil {
		return admin.Status{}, err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), askTimeout)
	defer cancel()
	st, err := admin.Ask(ctx, path)
	if errors.Is(err, admin.ErrNotRunning) {
		// Why the socket does not answer says nothing more, and where it was
		// looked for counts from the directory at hand.
		err = fmt.Errorf("%w on %s: start %s with JetStream, or say where it runs with -c, -sd or --socket", admin.ErrNotRunning, fullPath(path), f.program.Program)
	}
	return st, Exit(ExitUnavailable, err)
}

// statusCommand shows what a running program does.
func statusCommand(f *Flags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what the running program does",
		Long: `Show what the running program does. It is asked over the admin socket in its
store directory; name that directory as the program was told it: with -c, with
-sd, or the socket itself with --socket.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := f.Ask(cmd)
			if err != nil {
				return err
			}
			if asJSON {
				return WriteJSON(cmd.OutOrStdout(), st)
			}
			return writeStatus(cmd.OutOrStdout(), &st)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// WriteJSON prints v for programs to read.
func WriteJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// writeStatus prints a status for people.
func writeStatus(out io.Writer, st *admin.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row(st.Program, "%s, version %s, process %d", st.ServerName, st.Version, st.PID)
	row("up", "%s, ready %s after its start", time.Since(st.Start).Round(time.Second), st.Ready.Round(100*time.Microsecond))
	if r := st.Refused; r != nil {
		for i, reason := range r.Reasons {
			if i == 0 {
				reason = fmt.Sprintf("not reloaded at %s: %s", r.Time.Format(time.DateTime), reason)
			}
			row([]string{"configuration", ""}[min(i, 1)], "%s", reason)
		}
	}
	row("clients", "%s, %d connected, %d subscriptions", st.ClientURL, st.Broker.Connections, st.Broker.Subscriptions)
	row("messages", "%d in (%s), %d out (%s)", st.Broker.InMsgs, Bytes(st.Broker.InBytes), st.Broker.OutMsgs, Bytes(st.Broker.OutBytes))
	if st.Broker.SlowConsumers > 0 {
		row("slow consumers", "%d disconnected", st.Broker.SlowConsumers)
	}
	if js := st.JetStream; js != nil {
		sync := "always"
		if js.SyncInterval > 0 {
			sync = js.SyncInterval.String()
		}
		row("store", "%s, sync %s", js.StoreDir, sync)
		row("log", "%s (budget %s), %s and %s since the start", Bytes(uint64(js.Log.Bytes)), Bytes(uint64(js.Log.Budget)),
			count(js.Log.Records, "record"), count(js.Log.Syncs, "sync"))
		if wr := js.Written; wr.Amplification > 0 {
			row("written", "%.2f times what came in, since %s: %s of messages, %s of log, %s of streams' files",
				wr.Amplification, wr.Since.Format(time.DateOnly), Bytes(wr.Messages), Bytes(wr.Log), Bytes(wr.Files))
		}
		if sp := js.Space; sp.Full {
			row("disk", "full for %s, messages are refused until there is room: %s", time.Since(sp.Since).Round(time.Second), sp.Reason)
		}
		if d := js.Damage; d != (admin.Damage{}) {
			row("damage", "%s repaired with %s lost, %s quarantined, %s of the log lost, %s put aside", count(d.Repairs, "stream"),
				count(d.LostMsgs, "message"), count(d.Quarantines, "stream"), count(d.LostRecords, "record"), count(d.Parked, "file"))
		}
		for _, s := range js.Streams {
			if s.State != "" {
				row("stream "+s.Name, "%s: %s", s.State, s.Reason)
				continue
			}
			if s.CompactionPostponed != "" {
				row("disk", "the files of stream %s cannot be made smaller yet: %s", s.Name, s.CompactionPostponed)
			}
			if s.Msgs == 0 { // its first is the one to come
				row("stream "+s.Name, "empty, last was %d", s.Last)
				continue
			}
			text := fmt.Sprintf("%s (%s), %d to %d", count(s.Msgs, "message"), Bytes(s.Bytes), s.First, s.Last)
			if s.LostMsgs > 0 {
				text += fmt.Sprintf(", %d lost to damage", s.LostMsgs)
			}
			row("stream "+s.Name, "%s", text)
		}
	} else {
		row("jetstream", "off")
	}
	if h := st.Hub; h != nil {
		switch {
		case h.Connected:
			row("hub", "%s at %s, connected for %s, round trip %s", h.HubName, h.URL, time.Since(h.Since).Round(time.Second), h.RTT.Round(10*time.Microsecond))
		case h.LastError != "":
			// The next attempt may take a while to fail, so say how old this is.
			row("hub", "not connected: %s, %s ago (%s)", h.LastError, time.Since(h.LastErrorTime).Round(time.Second), count(h.Attempts, "attempt"))
		default:
			row("hub", "not connected (%s)", count(h.Attempts, "attempt"))
		}
		for _, e := range h.Exports {
			row("export "+e.Stream, "%s", exportText(&e, time.Now()))
		}
	}
	if h := st.Edges; h != nil {
		row("edges", "%d connected at %s, certificate %s", len(h.Edges), h.Addr, h.Fingerprint)
		for _, e := range h.Edges {
			row("edge "+e.Name, "%s from %s for %s, round trip %s", e.EdgeID, e.Addr, time.Since(e.Since).Round(time.Second), e.RTT.Round(10*time.Microsecond))
			for _, x := range e.Exports {
				text := fmt.Sprintf("%s from %s, through %d", x.To, x.Stream, x.Through)
				if x.MsgRate >= 0.05 {
					text += fmt.Sprintf(", %s messages/s", rate(x.MsgRate))
				}
				if x.Error != "" {
					text += ", " + x.Error
				}
				row("", "%s", text)
			}
		}
	}
	return w.Flush()
}

// exportText says in a line how an export stands.
func exportText(e *link.ExportStatus, now time.Time) string {
	text := fmt.Sprintf("to %s, hub has %d of %d", e.To, e.Through, e.Last)
	if e.LagMsgs > 0 {
		text += fmt.Sprintf(", %d behind (about %s, oldest %s ago)", e.LagMsgs, Bytes(e.LagBytes), e.LagAge.Round(time.Second))
	}
	if e.MsgRate >= 0.05 {
		text += fmt.Sprintf(", %s messages/s (%s/s)", rate(e.MsgRate), Bytes(uint64(e.ByteRate)))
	}
	if e.Gaps > 0 {
		text += fmt.Sprintf(", %s of %s lost before they were sent", count(e.Gaps, "gap"), count(e.GapMsgs, "message"))
		if e.DamagedMsgs > 0 {
			text += fmt.Sprintf(" (%d damaged on disk)", e.DamagedMsgs)
		}
	}
	if e.Regressions > 0 {
		text += fmt.Sprintf(", history cut %s", count(e.Regressions, "time"))
	}
	switch {
	case e.LastError == "":
	case !e.Failing:
		text += fmt.Sprintf(", last error %s ago: %s", now.Sub(e.LastErrorTime).Round(time.Second), e.LastError)
	default:
		text += ", " + e.LastError
	}
	return text
}

// rate renders a number per second for people: slow ones are not nothing.
func rate(perSecond float64) string {
	if perSecond < 9.95 {
		return fmt.Sprintf("%.1f", perSecond)
	}
	return fmt.Sprintf("%.0f", perSecond)
}

// count renders a number of things for people.
func count(n uint64, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// Bytes renders a size for people.
func Bytes(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/1024, 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}
