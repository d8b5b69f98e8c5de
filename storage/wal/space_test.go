package wal_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// told is what OnSpace was told.
type told struct {
	mu    sync.Mutex
	calls []bool
}

func (o *told) on(full bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls = append(o.calls, full)
}

func (o *told) get() []bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.calls)
}

// TestFullDisk fills a disk: plain records are refused before the reserve is
// touched, urgent ones go on in it, nothing that was accepted is lost, and the
// log goes on by itself when there is room.
func TestFullDisk(t *testing.T) {
	for _, how := range []string{"trim", "room"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				disk := simfs.New(1)
				disk.SetCapacity(12*smallSeg + 1000)
				var space told
				h := newHistory()
				opt := func(o *wal.Options) {
					o.Reserve, o.OnSpace, o.OnCommit = 2, space.on, h.onCommit(t)
				}
				l := open(t, disk, opt)
				rng := rand.New(rand.NewPCG(1, 1))
				write := func(app func(storage.GroupID, any, ...[]byte) (storage.LSN, error), size int) error {
					data := h.data(rng, size)
					lsn, err := app(1, nil, data)
					if err != nil {
						return err
					}
					h.add(t, lsn, 1, data)
					if err := l.Commit(); err != nil {
						t.Fatal(err) // it was accepted
					}
					return nil
				}
				var err error
				for err == nil {
					err = write(l.Append, 700)
				}
				if !errors.Is(err, wal.ErrNoSpace) || errors.Is(err, storage.ErrFailed) {
					t.Fatalf("the disk is full, but Append says %v", err)
				}
				synctest.Wait() // Append is told before OnSpace is
				s := l.Space()
				if !s.Full || !vfs.IsNoSpace(s.Err) || s.Reserve < 2*(smallSeg-8192) || s.Room > 2000 {
					t.Fatalf("state: %+v", s)
				}
				if got := space.get(); !slices.Equal(got, []bool{true}) {
					t.Fatalf("OnSpace was told %v", got)
				}
				if n := l.Stats().Segments; n != 10 {
					t.Fatalf("%d segments of a disk that has room for 12, of which 2 are kept", n)
				}
				// A smaller one may still fit, and then takes its room from nobody.
				for write(l.Append, 10) == nil {
				}
				urgent := 0
				for err = nil; err == nil; urgent++ {
					err = write(l.AppendUrgent, 50)
					if perr := write(l.Append, 50); !errors.Is(perr, wal.ErrNoSpace) {
						t.Fatalf("a plain record got into the reserve: %v", perr)
					}
				}
				if !errors.Is(err, wal.ErrNoSpace) || urgent < 2*16 {
					t.Fatalf("%d urgent records, %v", urgent, err)
				}
				if _, err := l.AppendLazy(1, []byte("x")); !errors.Is(err, wal.ErrNoSpace) {
					t.Fatalf("lazy: %v", err)
				}
				if l.Durable() != h.last || h.acked != h.last {
					t.Fatalf("durable %d, acknowledged %d, appended %d", l.Durable(), h.acked, h.last)
				}
				switch how {
				case "trim":
					h.trimmed = h.last / 2
					if err := l.Trim(h.trimmed); err != nil {
						t.Fatal(err)
					}
				case "room":
					time.Sleep(time.Minute)
					if got := space.get(); len(got) != 1 {
						t.Fatalf("OnSpace was told %v", got)
					}
					disk.SetCapacity(30 * smallSeg)
					time.Sleep(time.Second)
				}
				synctest.Wait()
				if got := space.get(); !slices.Equal(got, []bool{true, false}) || l.Space().Full {
					t.Fatalf("OnSpace was told %v, %+v", got, l.Space())
				}
				for range 20 {
					if err := write(l.Append, 700); err != nil {
						t.Fatal(err)
					}
				}
				disk = disk.PowerCut()
				l.Close()
				l = open(t, disk, opt)
				h.check(t, l, h.last)
				l.Close()
			})
		})
	}
}

// TestFullDiskRestart stops in several ways on a disk without any room: the log
// opens, has all its records, and takes urgent ones.
func TestFullDiskRestart(t *testing.T) {
	for _, reserve := range []int{-1, 1} {
		for _, stop := range []string{"close", "kill", "power cut"} {
			t.Run(fmt.Sprintf("reserve %d, %s", reserve, stop), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					disk := simfs.New(7)
					h := newHistory()
					opt := func(o *wal.Options) { o.Reserve, o.OnCommit = reserve, h.onCommit(t) }
					rng := rand.New(rand.NewPCG(1, 1))
					l := open(t, disk, opt)
					synctest.Wait()
					disk.SetCapacity(disk.Used())
					wrote := 0
					for round := range 6 {
						if round > 0 && round < 4 {
							h.check(t, l, h.last)
						}
						app := l.Append
						if round > 1 {
							app = l.AppendUrgent
						}
						for range 2 {
							data := h.data(rng, 900)
							lsn, err := app(1, nil, data)
							if errors.Is(err, wal.ErrNoSpace) {
								break
							}
							if err != nil {
								t.Fatal(err)
							}
							wrote++
							h.add(t, lsn, 1, data)
							if err := l.Commit(); err != nil {
								t.Fatal(err)
							}
						}
						dead := l
						switch stop {
						case "close":
							l.Close()
						case "kill":
							disk = disk.Kill()
						default:
							disk = disk.PowerCut()
						}
						dead.Close()
						if disk.Used() > 2*smallSeg {
							t.Fatalf("%d bytes used", disk.Used())
						}
						l = open(t, disk, opt)
						h.check(t, l, h.acked)
						synctest.Wait()
					}
					if wrote < 4 {
						t.Errorf("%d records could be written", wrote)
					}
					disk.SetCapacity(0)
					time.Sleep(time.Second)
					synctest.Wait()
					put(t, l, "room again")
					l.Close()
				})
			})
		}
	}
}

// TestLargeRecordFullDisk: a record for which no segment of the usual length is
// long enough is refused alone.
func TestLargeRecordFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		disk.SetCapacity(8 * smallSeg)
		l := open(t, disk, nil)
		if _, err := l.Append(1, nil, make([]byte, 9*smallSeg)); !errors.Is(err, wal.ErrNoSpace) {
			t.Fatalf("got %v", err)
		}
		if l.Space().Full {
			t.Error("the disk is taken for full")
		}
		if _, err := l.Append(1, nil, make([]byte, 3*smallSeg)); err != nil {
			t.Fatal(err)
		}
		put(t, l, "small")
		l.Close()
		if l = open(t, disk, nil); len(contents(t, l)) != 2 {
			t.Error("not all is there")
		}
		l.Close()
	})
}

// TestSmallDisk: segments take no more than a share of what is free.
func TestSmallDisk(t *testing.T) {
	for _, c := range []struct{ free, want int64 }{
		{10 << 30, 8 << 20}, {200 << 20, 4 << 20}, {100 << 20, 2 << 20}, {20 << 20, 1 << 20},
	} {
		disk := simfs.New(1)
		disk.SetCapacity(c.free)
		l := open(t, disk, func(o *wal.Options) { o.SegmentSize, o.Reserve = 8<<20, -1 })
		names := disk.Names(".wal")
		if n := int64(len(disk.Contents(names[0]))); n != c.want || l.Space().SegmentSize > n {
			t.Errorf("%d bytes free: a segment of %d, want %d; next %d", c.free, n, c.want, l.Space().SegmentSize)
		}
		l.Close()
	}
}

// TestAllocationFails: the file system refuses for want of space at any step.
func TestAllocationFails(t *testing.T) {
	for _, op := range []simfs.Op{simfs.OpCreate, simfs.OpPreallocate, simfs.OpSync} {
		synctest.Test(t, func(t *testing.T) {
			disk := simfs.New(1)
			var space told
			l := open(t, disk, func(o *wal.Options) { o.Reserve, o.OnSpace = 1, space.on })
			remove := disk.Inject(simfs.Fault{Op: op, Suffix: ".new", Times: -1, Err: syscall.ENOSPC})
			for i := range 60 {
				if _, err := l.Append(1, nil, []byte(record(i, 1900))); err != nil {
					break
				}
				l.Commit()
			}
			synctest.Wait() // Append is told before OnSpace is
			if got := space.get(); len(got) != 1 || !got[0] {
				t.Fatalf("operation %d: OnSpace was told %v", op, got)
			}
			if names := disk.Names(".new"); len(names) > 0 {
				t.Fatalf("operation %d: left %v", op, names)
			}
			remove()
			time.Sleep(time.Second)
			synctest.Wait()
			if got := space.get(); len(got) != 2 || got[1] {
				t.Fatalf("operation %d: OnSpace was told %v", op, got)
			}
			put(t, l, "again")
			l.Close()
		})
	}
}

// TestRealFullDisk does the same on a small ext4 file system. It needs root, and
// a kernel that mounts loop devices.
func TestRealFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to mount a file system")
	}
	base := t.TempDir()
	image, mnt := filepath.Join(base, "image"), filepath.Join(base, "mnt")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Truncate(image, 48<<20), os.Mkdir(mnt, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", image}, {"mount", "-o", "loop", image, mnt}} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%v: %v: %s", cmd, err, out)
		}
	}
	defer func() {
		if out, err := exec.Command("umount", mnt).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	}()
	changes := make(chan bool, 100)
	o := wal.Options{FS: vfs.OS, Dir: filepath.Join(mnt, "wal"), OnSpace: func(full bool) { changes <- full }}
	l, err := wal.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 60_000)
	n := 0
	for ; err == nil; n++ {
		if _, err = l.Append(1, nil, payload); err == nil {
			if cerr := l.Commit(); cerr != nil {
				t.Fatal(cerr)
			}
		}
	}
	if !errors.Is(err, wal.ErrNoSpace) || n < 300 || !<-changes {
		t.Fatalf("after %d records: %v", n, err)
	}
	// Not even a byte is left.
	ballast, err := os.Create(filepath.Join(mnt, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = ballast.Write(payload[:min(size, len(payload))])
		}
	}
	ballast.Close()
	urgent := 0
	for range 100 {
		if _, err := l.AppendUrgent(1, nil, []byte("urgent")); err != nil {
			t.Fatal(err)
		}
		urgent++
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	// A restart in this state.
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = wal.Open(o); err != nil {
		t.Fatal(err)
	}
	if !<-changes {
		t.Fatal("there is room")
	}
	last := storage.LSN(0)
	if err := l.Replay(func(r wal.Record) error { last = r.LSN; return nil }); err != nil || int(last) != n-1+urgent {
		t.Fatalf("%d records, want %d: %v", last, n-1+urgent, err)
	}
	if _, err := l.AppendUrgent(1, nil, []byte("urgent")); err != nil {
		t.Fatal(err)
	}
	if err := l.Commit(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	if err := l.Trim(last / 2); err != nil {
		t.Fatal(err)
	}
	select {
	case full := <-changes:
		t.Logf("%d records on 48 MiB; %d segments; room noticed after %v", n, l.Stats().Segments, time.Since(start))
		if full {
			t.Error("full again")
		}
	case <-time.After(time.Minute):
		t.Error("room was not noticed")
	}
	if _, err := l.Append(1, nil, payload); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestNoRoomForNames: a directory without room for another name keeps nothing
// from going on: what has been appended waits, what would be recycled is
// removed, and Close does without an empty segment.
func TestNoRoomForNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		h := newHistory()
		l := open(t, disk, func(o *wal.Options) { o.Reserve, o.OnCommit = 2, h.onCommit(t) })
		rng := rand.New(rand.NewPCG(1, 1))
		write := func() {
			t.Helper()
			data := h.data(rng, 1900)
			lsn, err := l.Append(1, nil, data)
			if err != nil {
				t.Fatal(err)
			}
			h.add(t, lsn, 1, data)
			if err := l.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		// The next segment's name is refused three times.
		disk.Inject(simfs.Fault{Op: simfs.OpRename, Suffix: ".wal", Times: 3, Err: syscall.ENOSPC})
		for range 40 {
			write()
		}
		if n := l.Stats().Segments; n < 5 {
			t.Fatalf("%d segments", n)
		}
		remove := disk.Inject(simfs.Fault{Op: simfs.OpRename, Suffix: ".spare", Times: -1, Err: syscall.ENOSPC})
		h.trimmed = h.last - 1
		if err := l.Trim(h.trimmed); err != nil {
			t.Fatal(err)
		}
		if n := l.Stats().Segments; n > 2 {
			t.Fatalf("%d segments after Trim", n)
		}
		remove()
		time.Sleep(2 * time.Second) // what had no room is tried again within one
		write()
		disk.Inject(simfs.Fault{Op: simfs.OpRename, Suffix: ".wal", Times: -1, Err: syscall.ENOSPC})
		if err := l.Trim(h.last + 1); err != nil {
			t.Fatal(err)
		}
		h.trimmed = h.last + 1
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		disk = disk.PowerCut()
		l = open(t, disk, nil)
		h.check(t, l, h.last)
	})
}

// signal closes ch when a line of the log contains text.
type signal struct {
	text string
	once sync.Once
	ch   chan struct{}
}

func (s *signal) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(s.text)) {
		s.once.Do(func() { close(s.ch) })
	}
	return len(p), nil
}

// TestSyncWithoutRoomForNames: while the next segment waits for its name, a
// checkpoint, which may make the room, does not wait for the log.
func TestSyncWithoutRoomForNames(t *testing.T) {
	disk := simfs.New(1)
	waits := &signal{text: "no room for the name", ch: make(chan struct{})}
	l := open(t, disk, func(o *wal.Options) {
		o.SyncInterval, o.Log = time.Hour, slog.New(slog.NewTextHandler(waits, nil))
	})
	remove := disk.Inject(simfs.Fault{Op: simfs.OpRename, Suffix: ".wal", Times: -1, Err: syscall.ENOSPC})
	written := make(chan error, 1)
	go func() {
		var err error
		for i := 0; i < 40 && err == nil; i++ {
			if _, err = l.AppendUrgent(1, nil, []byte(record(i, 1900))); err == nil {
				err = l.Commit()
			}
		}
		written <- err
	}()
	<-waits.ch
	synced := make(chan error, 1)
	go func() { synced <- l.SyncWritten() }()
	select {
	case err := <-synced:
		if err != nil || l.Durable() < l.Applied() || l.Applied() == 0 {
			t.Errorf("durable %d, applied %d, %v", l.Durable(), l.Applied(), err)
		}
	case <-time.After(20 * time.Second):
		t.Error("waits for the name, too")
	}
	remove()
	if err := <-written; err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestKeepFree: segments beyond the reserve leave room for others.
func TestKeepFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := simfs.New(1)
		disk.SetCapacity(12 * smallSeg)
		const keep = 3*smallSeg + 100
		l := open(t, disk, func(o *wal.Options) { o.Reserve, o.KeepFree = 2, keep })
		var err error
		for i := 0; err == nil; i++ {
			if _, err = l.Append(1, nil, []byte(record(i, 1900))); err == nil {
				err = l.Commit()
			}
		}
		if !errors.Is(err, wal.ErrNoSpace) {
			t.Fatal(err)
		}
		if free, err := disk.Free(dir); err != nil || free < keep || free > keep+smallSeg {
			t.Fatalf("%d bytes are free, %v, want %d or a little more", free, err, keep)
		}
		if s := l.Stats(); s.Spares != 2 {
			t.Fatalf("%d spares, want the reserve of 2", s.Spares)
		}
		disk.SetCapacity(16 * smallSeg)
		time.Sleep(time.Second)
		synctest.Wait()
		put(t, l, "again")
		l.Close()
	})
}
