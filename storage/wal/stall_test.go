package wal_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"petiole/storage"
	"petiole/storage/vfs/simfs"
	"petiole/storage/wal"
)

// TestFailedWriteWakesAll fails a write while callers wait for that very batch
// and others for the next one, which has been appended: all of them must hear.
func TestFailedWriteWakesAll(t *testing.T) {
	for _, op := range []simfs.Op{simfs.OpWrite, simfs.OpSync} {
		synctest.Test(t, func(t *testing.T) {
			disk := simfs.New(1)
			l := open(t, disk, nil)
			synctest.Wait()
			gate := make(chan struct{})
			disk.SetHook(func(o simfs.Op, _ string) error {
				if o != op {
					return nil
				}
				<-gate
				return syscall.EIO
			})
			errs := make(chan error, 10)
			callers := 0
			commit := func() {
				callers++
				go func() { errs <- l.Commit() }()
				synctest.Wait()
			}
			l.Append(1, nil, []byte("in the batch that fails"))
			commit() // leads
			commit() // waits for the batch being written
			l.Append(1, nil, []byte("in the next one"))
			commit()
			commit()
			close(gate)
			synctest.Wait()
			if len(errs) != callers {
				t.Fatalf("%d of %d calls of Commit have returned", len(errs), callers)
			}
			for range callers {
				if err := <-errs; !errors.Is(err, storage.ErrFailed) || !errors.Is(err, syscall.EIO) {
					t.Errorf("got %v, want ErrFailed", err)
				}
			}
			if l.Applied() != 0 || l.Durable() != 0 {
				t.Errorf("applied %d, durable %d", l.Applied(), l.Durable())
			}
			l.Close()
		})
	}
}

// lockedBuffer is what a logger may write to beside a reader.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestStall holds a sync for 12 seconds: it is reported once while it lasts, and
// once when it is over, and shows in Stats.
func TestStall(t *testing.T) {
	for _, op := range []simfs.Op{simfs.OpSync, simfs.OpWrite} {
		synctest.Test(t, func(t *testing.T) {
			disk := simfs.New(1)
			var log lockedBuffer
			l := open(t, disk, func(o *wal.Options) {
				o.Reserve = -1
				o.Log = slog.New(slog.NewTextHandler(&log, nil))
			})
			put(t, l, "quick")
			disk.Inject(simfs.Fault{Op: op, Suffix: ".wal", Delay: 12 * time.Second})
			l.Append(1, nil, []byte("slow"))
			l.Kick()
			time.Sleep(4900 * time.Millisecond)
			synctest.Wait()
			if s := l.Stats().Stall; s != (wal.Stall{}) || log.String() != "" {
				t.Fatalf("too early: %+v, %s", s, log.String())
			}
			time.Sleep(200 * time.Millisecond)
			synctest.Wait()
			s := l.Stats().Stall
			if s.Count != 1 || s.Current != 5100*time.Millisecond || s.Longest != s.Current || !strings.Contains(s.Op, ".wal") {
				t.Fatalf("stats %+v", s)
			}
			if n := strings.Count(log.String(), "does not answer"); n != 1 || !strings.Contains(log.String(), "since=5s") {
				t.Fatalf("log: %s", log.String())
			}
			time.Sleep(6 * time.Second)
			synctest.Wait()
			if n := strings.Count(log.String(), "does not answer"); n != 1 {
				t.Fatalf("reported %d times", n)
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if s := l.Stats().Stall; s.Current != 0 || s.Op != "" || s.Longest != 12*time.Second || s.Count != 1 || l.Durable() != 2 {
				t.Fatalf("afterwards: %+v", s)
			}
			if n := strings.Count(log.String(), "answers again"); n != 1 || !strings.Contains(log.String(), "took=12s") {
				t.Fatalf("log: %s", log.String())
			}
			// Many quick ones are no stall.
			for range 20 {
				put(t, l, "quick")
				time.Sleep(time.Second)
			}
			if s := l.Stats().Stall; s.Count != 1 {
				t.Fatalf("in the end: %+v", s)
			}
			l.Close()
		})
	}
}
