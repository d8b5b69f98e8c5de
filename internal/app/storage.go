package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"petiole/internal/storagetool"
	"petiole/storage"
)

// storageCommand looks after the store directory of a program that is stopped.
func storageCommand(f *Flags) *cobra.Command {
	c := &cobra.Command{
		Use:   "storage",
		Short: "Look after the store directory of a program that is stopped",
		Long: `Look after the store directory of a program that is stopped. Name the directory
as the program was told it: with -c or with -sd. stat, verify, dump and backup
change nothing.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return Exit(ExitUsage, fmt.Errorf("%s needs a command: stat, verify, dump, salvage, compact, backup or restore", cmd.CommandPath()))
		},
	}
	c.AddCommand(storageStat(f), storageVerify(f), storageDump(f),
		storageSalvage(f), storageCompact(f), storageBackup(f), storageRestore(f))
	return c
}

// storeDir returns the store directory that the flags point to.
func (f *Flags) storeDir(cmd *cobra.Command) (string, error) {
	cfg, err := f.Load(cmd)
	if err != nil {
		return "", err
	}
	dir := cfg.JetStream.StoreDir
	if dir == "" {
		if dir, err = defaultStoreDir(f.program.Program); err != nil {
			return "", Exit(ExitConfig, err)
		}
	}
	return dir, nil
}

// withStore runs fn on the store that the flags point to.
func (f *Flags) withStore(cmd *cobra.Command, fn func(*storagetool.Store) error) error {
	dir, err := f.storeDir(cmd)
	if err != nil {
		return err
	}
	s, err := storagetool.Open(dir)
	tellLeftovers(cmd, storagetool.Leftovers(dir))
	switch {
	case errors.Is(err, storage.ErrLocked):
		return Exit(ExitCannotStore, fmt.Errorf("store directory %s is %w: stop it first, or look at a copy; `%s status` asks a running one", dir, storage.ErrLocked, f.program.Program))
	case errors.Is(err, storagetool.ErrNoStore):
		return Exit(ExitCannotStore, fmt.Errorf("%w; say where the store is with -c or -sd", err))
	case err != nil:
		return Exit(ExitCannotStore, err)
	}
	defer s.Close() // only a lock
	s.Program = f.program.Program.String()
	return storageError(fn(s))
}

// tellLeftovers says what commands that were killed have left.
func tellLeftovers(cmd *cobra.Command, left []storagetool.Leftover) {
	for _, l := range left {
		fmt.Fprintln(cmd.ErrOrStderr(), "note:", l)
	}
}

// storageError gives err, of storagetool, its exit code.
func storageError(err error) error {
	var coded *Error
	switch {
	case err == nil || errors.As(err, &coded):
		return err
	case errors.Is(err, storagetool.ErrNotBackup), errors.Is(err, storagetool.ErrBadBackup), errors.Is(err, storagetool.ErrDamaged),
		errors.Is(err, storagetool.ErrNoBackup), errors.Is(err, storagetool.ErrOtherProgram), errors.Is(err, context.Canceled):
		return Exit(ExitFailure, err)
	case errors.Is(err, storagetool.ErrNoStream):
		return Exit(ExitUsage, err)
	case errors.Is(err, storage.ErrFormat), errors.Is(err, fs.ErrPermission), errors.Is(err, storage.ErrLocked), errors.Is(err, storagetool.ErrExists), errors.Is(err, fs.ErrNotExist):
		return Exit(ExitCannotStore, err)
	}
	return Exit(ExitStorage, err)
}

func storageStat(f *Flags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "stat",
		Short: "Show what is in the store, and what it takes",
		Long: `Show what is in the store, and what it takes. The exit code is 0 if all that is
looked at can be read, which is much less than verify reads, and 1 otherwise.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.withStore(cmd, func(s *storagetool.Store) error {
				st, err := s.Stat()
				if err != nil {
					return err
				}
				if asJSON {
					err = WriteJSON(cmd.OutOrStdout(), st)
				} else {
					err = writeStat(cmd.OutOrStdout(), st, f.program.Program.String())
				}
				if err == nil && len(st.Damage) > 0 {
					err = Exit(ExitFailure, fmt.Errorf("store directory %s is damaged: %s", st.StoreDir, count(uint64(len(st.Damage)), "finding")))
				}
				return err
			})
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// size is Bytes for sizes of files.
func size(n int64) string { return Bytes(uint64(max(n, 0))) }

func writeStat(out io.Writer, st *storagetool.Stat, program string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("store", "%s", st.StoreDir)
	for i := range st.Streams {
		s := &st.Streams[i]
		name := fmt.Sprintf("stream %s (group %d)", s.Name, s.Group)
		if s.Memory {
			row(name, "in memory")
			continue
		}
		switch {
		case s.Damaged:
			row(name, "cannot be read, see damage")
			row("", "file %s", size(s.File))
		case s.Pending:
			row(name, "no file yet, the next start makes it from the log")
		case s.Messages == 0:
			row(name, "empty, last was %d", s.Last)
		default:
			row(name, "%s (%s), %d to %d", count(s.Messages, "message"), Bytes(s.Bytes), s.First, s.Last)
		}
		if !s.Damaged && !s.Pending {
			text := fmt.Sprintf("file %s: %s used, %s free pages, %s allocated ahead", size(s.File), size(s.File-s.Free-s.Reserved), size(s.Free), size(s.Reserved))
			if s.Messages > 0 {
				text += fmt.Sprintf("; %.0f bytes per message, the file is %.2f times the size of the messages", s.PerMsg, s.Space)
			}
			row("", "%s", text)
		}
		if s.Compact && s.DiskFree < s.CompactNeeds {
			row("", "compaction is due and postponed: it needs %s beside the file, the file system has %s; make room", size(s.CompactNeeds), size(s.DiskFree))
		}
		if s.LogRecords > 0 && !s.Damaged {
			row("", "and %s in the log only, which the next start applies", count(s.LogRecords, "record"))
		}
	}
	l := &st.Log
	if l.Records > 0 {
		row("log", "%s (%s) in %s, LSN %d to %d", count(l.Records, "record"), size(l.Bytes), count(uint64(l.Segments), "segment"), l.Oldest, l.Newest)
	} else {
		row("log", "no records (%s) in %s", size(l.Bytes), count(uint64(l.Segments), "segment"))
	}
	row("", "%s preallocated, %s (%s)", size(l.Preallocated), count(uint64(l.Spares), "spare segment"), size(l.SpareBytes))
	row("meta.db", "%s", size(st.MetaBytes))
	if st.BallastBytes > 0 {
		row("ballast", "%s, given up when the disk is full", size(st.BallastBytes))
	}
	if st.ParkedBytes > 0 {
		row("parked", "%s (%s) that repairs have put aside; remove them when you do not need them",
			count(uint64(st.ParkedFiles), "damaged file"), size(st.ParkedBytes))
	}
	t := &st.Total
	row("total", "%s (%s) in files of %s: %s used, %s reserved", count(t.Messages, "message"), Bytes(t.Content), size(t.Disk), size(t.Used), size(t.Reserved))
	if t.PerContent > 0 {
		row("", "what is in use of the files is %.2f times the size of the messages", t.PerContent)
	}
	if wr := st.Written; st.Amplification > 0 {
		row("written", "%.2f times what came in, since %s: %s of messages, %s of log, %s of streams' files",
			st.Amplification, wr.Since.Format(time.DateOnly), Bytes(wr.Messages), Bytes(wr.Log), Bytes(wr.Files))
	}
	for _, d := range st.Damage {
		row("damage", "%s", d)
	}
	if len(st.Damage) > 0 {
		row("", "`%s storage verify` says all that is damaged, and what to do about it", program)
	}
	return w.Flush()
}

func storageVerify(f *Flags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Read all of the store and say what is damaged",
		Long: `Read all of the store and say what is damaged, where, and what can be done.
Nothing is changed. The exit code is 0 if nothing is damaged and 1 otherwise.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.withStore(cmd, func(s *storagetool.Store) error {
				r, err := s.Verify()
				if err != nil {
					return err
				}
				if asJSON {
					err = WriteJSON(cmd.OutOrStdout(), r)
				} else {
					err = writeReport(cmd.OutOrStdout(), r)
				}
				if err == nil && len(r.Damage) > 0 {
					err = Exit(ExitFailure, fmt.Errorf("store directory %s is damaged: %s", r.StoreDir, count(uint64(len(r.Damage)), "finding")))
				}
				return err
			})
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func writeReport(out io.Writer, r *storagetool.Report) error {
	for _, d := range r.Damage {
		where := d.File
		if d.Offset != nil {
			where += fmt.Sprintf(", offset %d", *d.Offset)
		}
		if d.Stream != "" {
			where += ", stream " + d.Stream
		}
		if d.Seq != 0 {
			where += fmt.Sprintf(", message %d", d.Seq)
		}
		if _, err := fmt.Fprintf(out, "damaged: %s: %s\n  remedy: %s\n", where, d.Problem, d.Remedy); err != nil {
			return err
		}
	}
	for _, n := range r.Notes {
		if _, err := fmt.Fprintf(out, "note: %s\n", n); err != nil {
			return err
		}
	}
	verdict := "intact"
	if len(r.Damage) > 0 {
		verdict = "damaged"
	}
	_, err := fmt.Fprintf(out, "%s: %s in %s of the log, %s in %s, %d values of meta.db\n", verdict,
		count(r.Records, "record"), count(uint64(r.Segments), "segment"),
		count(r.Messages, "message"), count(uint64(r.Streams), "stream"), r.MetaValues)
	return err
}

func storageDump(f *Flags) *cobra.Command {
	var o struct {
		from              uint64
		group             string
		limit             int
		positions, asJSON bool
	}
	c := &cobra.Command{
		Use:   "dump",
		Short: "Print the records of the log",
		Long: `Print the records of the log in order: LSN, group and stream, command, its size
in octets, its key fields. The log holds what has not been checkpointed, and some
of what has. Between them stands what its segments have noted: below which LSN all
was safe, and which sequence each group had come to.

With --positions, print instead how far the log and each stream have come: the
last record that is written, the last that the files say to be synced (later ones
may be, too), up to where the stream's file reflects the log as of its last
checkpoint (applied) and has done so (floor), and what the next start applies
again. What was only appended, in the memory of a process, no file tells. A dash
stands where the log holds no record, as after a clean stop, before which all is
checkpointed.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.limit < 0 {
				return Exit(ExitUsage, fmt.Errorf("--limit %d: accepted: 0 for no limit, or the number of records", o.limit))
			}
			if o.asJSON && !o.positions {
				return Exit(ExitUsage, errors.New("--json: records are printed as text; accepted: --positions --json"))
			}
			return f.withStore(cmd, func(s *storagetool.Store) error {
				group, err := groupOf(s, o.group)
				if err != nil {
					return err
				}
				if o.positions {
					p, err := s.Positions()
					if err != nil {
						return err
					}
					if o.asJSON {
						return WriteJSON(cmd.OutOrStdout(), p)
					}
					return writePositions(cmd.OutOrStdout(), p, group)
				}
				opts := storagetool.DumpOptions{From: storage.LSN(o.from), Limit: o.limit, Group: group}
				some := false
				err = s.Dump(opts, func(l storagetool.Line) error {
					some = true
					if l.Group == 0 {
						_, err := fmt.Fprintf(cmd.OutOrStdout(), "%d %s %s\n", l.LSN, l.Kind, l.Fields)
						return err
					}
					stream := l.Stream
					if stream == "" {
						stream = "(unknown)"
					}
					_, err := fmt.Fprintf(cmd.OutOrStdout(), "%d group %d %s %s %d %s\n", l.LSN, l.Group, stream, l.Kind, l.Size, l.Fields)
					return err
				})
				if err == nil && group != 0 && !some {
					_, err = fmt.Fprintf(cmd.ErrOrStderr(), "nothing of group %d is in the log%s\n", group, after(o.from))
				}
				return err
			})
		},
	}
	c.Flags().Uint64Var(&o.from, "from", 0, "first `LSN`")
	c.Flags().IntVar(&o.limit, "limit", 0, "print `n` records at most")
	c.Flags().StringVar(&o.group, "group", "", "only the records of a `group`: a stream's name, or a number as stat shows it; 1 is that of the streams' creation and deletion")
	c.Flags().BoolVar(&o.positions, "positions", false, "print how far everything has come instead")
	c.Flags().BoolVar(&o.asJSON, "json", false, "print JSON, with --positions")
	return c
}

// groupOf returns the group that --group names: by number, or by the name of its
// stream; 0 for none.
func groupOf(s *storagetool.Store, name string) (storage.GroupID, error) {
	if name == "" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(name, 10, 64); err == nil && n > 0 {
		return storage.GroupID(n), nil
	}
	g, err := s.Group(name)
	if err != nil {
		return 0, fmt.Errorf("--group %s: %w; accepted: a stream's name, or a number as `%s storage stat` shows it", name, err, s.Program)
	}
	return g, nil
}

// after says from where on, if not from the beginning.
func after(from uint64) string {
	if from == 0 {
		return ""
	}
	return fmt.Sprintf(" from LSN %d on", from)
}

// lsn is for what is 0 without any record.
func lsn(n storage.LSN) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatUint(uint64(n), 10)
}

// logEnds says what storagetool.Positions.End means.
var logEnds = map[string]string{
	"clean": "the mark of a clean stop",
	"open":  "no mark of a stop, as after a crash",
	"torn":  "a batch that is not complete, which nobody was told to be safe",
}

func writePositions(out io.Writer, p *storagetool.Positions, group storage.GroupID) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "log\tfrom LSN %s\twritten %s\tdurable %s\tends with %s\n", lsn(p.Oldest), lsn(p.Written), lsn(p.Durable), logEnds[p.End])
	some := false
	for i := range p.Groups {
		g := &p.Groups[i]
		if group != 0 && g.Group != group {
			continue
		}
		some = true
		name := g.Stream
		if name == "" {
			name = "(unknown)"
		}
		floor := fmt.Sprintf("floor %d", g.Floor)
		if g.Group == storage.MetaGroup {
			floor = ""
		}
		fmt.Fprintf(w, "group %d %s\t%s to apply\twritten %s\tdurable %s\tapplied %d\t%s\n",
			g.Group, name, count(g.Pending, "record"), lsn(g.Written), lsn(g.Durable), g.Applied, floor)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if !some && group != 0 {
		if _, err := fmt.Fprintf(out, "nothing of group %d is in the log, and no stream has it\n", group); err != nil {
			return err
		}
	}
	for _, d := range p.Damage {
		if _, err := fmt.Fprintf(out, "damage: %s\n", d); err != nil {
			return err
		}
	}
	return nil
}
