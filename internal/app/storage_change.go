package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"petiole/internal/storagetool"
	"petiole/storage"
)

// The commands that change a store, or copy it.

func storageSalvage(f *Flags) *cobra.Command {
	var o storagetool.SalvageOptions
	var asJSON bool
	c := &cobra.Command{
		Use:   "salvage",
		Short: "Repair damaged files of streams, keeping everything that is intact",
		Long: `Repair damaged files of streams, keeping everything that is intact. Streams
without damage are left alone. A damaged file stays beside the new one, as
msgs.db.damaged-TIME; there has to be room for both. Of a stream that has been
repaired before, the three newest of these are kept, and of those beyond the
newest no more than 1 GiB. Messages that are lost become gaps, and are named. The
program does the same by itself when it meets damage.

The exit code is 0 if nothing is lost, and 1 if messages are, or a file could
not be repaired.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilInterrupted(cmd)
			defer stop()
			return f.withStore(cmd, func(s *storagetool.Store) error {
				o.Log = slog.New(slog.DiscardHandler) // the report says it all
				done, err := s.Salvage(ctx, o)
				if err != nil {
					return err
				}
				if asJSON {
					err = WriteJSON(cmd.OutOrStdout(), done)
				} else {
					err = writeSalvaged(cmd.OutOrStdout(), done)
				}
				left, lerr := s.BeyondSalvage()
				for _, d := range left {
					fmt.Fprintf(cmd.ErrOrStderr(), "note: damaged, and not a file of a stream: %s: %s\n  remedy: %s\n", d.File, d.Problem, d.Remedy)
				}
				err = errors.Join(err, lerr)
				lost, failed := uint64(0), 0
				for _, v := range done {
					if v.Report == nil {
						failed++
						continue
					}
					lost += v.Report.LostMsgs()
				}
				if err == nil && (lost > 0 || failed > 0) {
					err = Exit(ExitFailure, fmt.Errorf("%s lost, %s not repaired", count(lost, "message"), count(uint64(failed), "file")))
				}
				return err
			})
		},
	}
	c.Flags().StringVar(&o.Stream, "stream", "", "only the `stream` of that name")
	c.Flags().BoolVar(&o.All, "all", false, "make the files of undamaged streams anew as well")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// streamName names a stream's file.
func streamName(name string, group uint64) string {
	if name == "" {
		return fmt.Sprintf("group %d, which the list of streams does not have", group)
	}
	return "stream " + name
}

// spanList renders spans for people, not all of many.
func spanList(spans []storage.Span) string {
	const most = 20
	var b strings.Builder
	for i, s := range spans {
		if i == most {
			fmt.Fprintf(&b, " and %d more ranges", len(spans)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		if s.First == s.Last {
			fmt.Fprint(&b, s.First)
		} else {
			fmt.Fprintf(&b, "%d to %d", s.First, s.Last)
		}
	}
	return b.String()
}

func writeSalvaged(out io.Writer, done []storagetool.Salvaged) error {
	p := &printer{out: out}
	for _, v := range done {
		name := streamName(v.Stream, v.Group)
		if v.Report == nil {
			p.line("%s: not repaired: %s", name, v.Problem)
			p.line("  remedy: restore the store from a backup; the file is as it was")
			continue
		}
		r := v.Report
		former := "damaged"
		if v.Found == 0 && len(r.Damage) == 0 && r.LostMsgs() == 0 {
			former = "former"
			p.line("%s: made anew, %s kept", name, count(r.Kept, "message"))
		} else {
			p.line("%s: repaired, %s kept, %s lost", name, count(r.Kept, "message"), count(r.LostMsgs(), "message"))
		}
		if len(r.Lost) > 0 {
			p.line("  lost: %s", spanList(r.Lost))
		}
		if len(r.Doubtful) > 0 && r.Kept > 0 {
			p.line("  some that had been deleted may be back among: %s", spanList(r.Doubtful))
		}
		if n := len(r.LostKeys); n > 0 {
			p.line("  lost state: %q", r.LostKeys)
		}
		if n := len(r.StaleKeys); n > 0 {
			p.line("  state of which an older copy is used: %q", r.StaleKeys)
		}
		for _, d := range r.Damage {
			p.line("  found: %s", d)
		}
		if r.Parked != "" {
			p.line("  the %s file is %s; remove it when you do not need it any more", former, r.Parked)
		}
	}
	if len(done) == 0 {
		p.line("no file of a stream is damaged, nothing has been changed")
	}
	return p.err
}

// printer writes lines until one cannot be written.
type printer struct {
	out io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.out, format+"\n", args...)
	}
}

func storageCompact(f *Flags) *cobra.Command {
	var o storagetool.CompactOptions
	var asJSON bool
	c := &cobra.Command{
		Use:   "compact",
		Short: "Make files of streams smaller that hold little for their size",
		Long: `Make files of streams smaller that hold little for their size. There has to be
room for a copy of what they hold. The program does the same by itself while it
runs.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilInterrupted(cmd)
			defer stop()
			return f.withStore(cmd, func(s *storagetool.Store) error {
				done, err := s.Compact(ctx, o)
				if err != nil {
					return err
				}
				if asJSON {
					err = WriteJSON(cmd.OutOrStdout(), done)
				} else {
					err = writeCompacted(cmd.OutOrStdout(), done)
				}
				failed := uint64(0)
				for _, c := range done {
					if c.Problem != "" {
						failed++
					}
				}
				if err == nil && failed > 0 {
					err = Exit(ExitFailure, fmt.Errorf("%s not compacted", count(failed, "file")))
				}
				return err
			})
		},
	}
	c.Flags().StringVar(&o.Stream, "stream", "", "only the `stream` of that name")
	c.Flags().BoolVar(&o.All, "all", false, "also where it is not worth it")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func writeCompacted(out io.Writer, done []storagetool.Compacted) error {
	p := &printer{out: out}
	for _, c := range done {
		name := streamName(c.Stream, c.Group)
		switch {
		case c.Problem != "":
			p.line("%s: not compacted: %s", name, c.Problem)
			p.line("  remedy: %s", c.Remedy)
		case c.Report == nil:
			p.line("%s: not worth it, %s with %s of messages in it", name, size(c.Waste.File), size(c.Waste.Live))
		default:
			p.line("%s: %s, was %s, in %s", name, size(c.Report.After), size(c.Report.Before), c.Report.Duration.Round(time.Millisecond))
		}
	}
	return p.err
}

func storageBackup(f *Flags) *cobra.Command {
	var o storagetool.BackupOptions
	c := &cobra.Command{
		Use:   "backup TO",
		Short: "Copy the store into a file, or a directory",
		Long: `Copy the store into a new file (tar, compressed by zstd), or with --directory
into a new directory. The store is verified first, and the copy has a manifest
with the SHA-256 of every file. TO appears only when it is complete and on disk.

A backup holds the device key: keep it as you keep the store.`,
		Args: exactArgs(1, "the name of a file that does not exist yet"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := untilInterrupted(cmd)
			defer stop()
			return f.withStore(cmd, func(s *storagetool.Store) error {
				o.Program, o.Owner = Version, f.program.Program.String()
				tellLeftovers(cmd, storagetool.Leftovers(args[0]))
				m, err := s.Backup(ctx, args[0], o)
				if errors.Is(err, storagetool.ErrDamaged) {
					err = fmt.Errorf("%w; or copy it as it is with --damaged", err)
				}
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s, %s\n", args[0], count(uint64(len(m.Files)), "file"), size(m.Bytes()))
				return err
			})
		},
	}
	c.Flags().BoolVar(&o.Directory, "directory", false, "make TO a directory with the files as they are")
	c.Flags().BoolVar(&o.Damaged, "damaged", false, "copy a damaged store too, as it is")
	return c
}

func storageRestore(f *Flags) *cobra.Command {
	return &cobra.Command{
		Use:   "restore FROM",
		Short: "Put a backup in place as the store",
		Long: `Put a backup, a file or a directory, in place as the store. The store directory
must be empty or not exist. All of the backup is verified before anything is put
in place. Never start the original and the restored store both.

An edge with a restored store finds by itself what its hub has got since the
backup was made, and goes on from the last point that both agree on.`,
		Args: exactArgs(1, "the name of a backup"),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := f.storeDir(cmd)
			if err != nil {
				return err
			}
			tellLeftovers(cmd, storagetool.Leftovers(dir))
			ctx, stop := untilInterrupted(cmd)
			defer stop()
			m, err := storagetool.Restore(ctx, args[0], dir, storagetool.RestoreOptions{Program: f.program.Program.String()})
			if err != nil {
				return storageError(err)
			}
			p := &printer{out: cmd.OutOrStdout()}
			p.line("%s: restored as of %s, %s, %s", dir, m.Created.Format(time.RFC3339), count(uint64(len(m.Files)), "file"), size(m.Bytes()))
			if m.Damaged {
				p.line("note: the store was damaged when it was copied; `%s storage verify` says where", f.program.Program)
			}
			return p.err
		},
	}
}

// untilInterrupted returns a context that a signal to stop ends, so that a
// command tidies up. A large file may take it long to come to that: a second
// signal ends the program as if there was no first, which harms no store.
func untilInterrupted(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// exactArgs wants n arguments, and says which.
func exactArgs(n int, which string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return Exit(ExitUsage, fmt.Errorf("%s needs %s", cmd.CommandPath(), which))
		}
		return nil
	}
}
