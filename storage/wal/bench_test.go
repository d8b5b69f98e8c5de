package wal_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/storage/wal"
)

// BenchmarkCommit is publishers that each append a record of 128 bytes and wait
// until it is durable. Beside the time per record it reports how many records
// shared one fdatasync, and how many calls of fdatasync per second a bare loop
// managed on the same disk just before.
func BenchmarkCommit(b *testing.B) {
	for _, publishers := range []int{1, 4, 16, 64, 256} {
		b.Run(fmt.Sprintf("publishers=%d", publishers), func(b *testing.B) {
			l, err := wal.Open(wal.Options{FS: vfs.OS, Dir: filepath.Join(b.TempDir(), "wal")})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			payload := make([]byte, 128)
			bare := bareSyncs(b, 200*time.Millisecond)
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			var wg sync.WaitGroup
			for range publishers {
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						if _, err := l.Append(1, nil, payload); err != nil {
							b.Error(err)
							return
						}
						if err := l.Commit(); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			s := l.Stats()
			b.ReportMetric(float64(s.Records)/float64(max(s.Syncs, 1)), "records/sync")
			b.ReportMetric(float64(s.Syncs)/b.Elapsed().Seconds(), "syncs/s")
			b.ReportMetric(float64(s.Records)/b.Elapsed().Seconds(), "records/s")
			b.ReportMetric(bare, "bare-syncs/s")
		})
	}
}

// bareSyncs writes sectors of a preallocated file and syncs each, for as long as
// it is told to, and returns how many a second it managed.
func bareSyncs(b *testing.B, d time.Duration) float64 {
	f, err := vfs.OS.Open(filepath.Join(b.TempDir(), "bare"), true)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(f.Preallocate(16<<20), f.Sync()); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 512)
	start := time.Now()
	n := int64(0)
	for ; time.Since(start) < d; n++ {
		if _, err := f.WriteAt(buf, n*512%(16<<20)); err != nil {
			b.Fatal(err)
		}
		if err := f.Datasync(); err != nil {
			b.Fatal(err)
		}
	}
	return float64(n) / time.Since(start).Seconds()
}

// BenchmarkFdatasync is what the disk can do: one write of 512 bytes and one
// fdatasync at a time, into a file that was preallocated ("fresh") or written
// before ("recycled").
func BenchmarkFdatasync(b *testing.B) {
	for _, mode := range []string{"fresh", "recycled"} {
		b.Run(mode, func(b *testing.B) {
			f, err := vfs.OS.Open(filepath.Join(b.TempDir(), "file"), true)
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			const size = 64 << 20
			if err := f.Preallocate(size); err != nil {
				b.Fatal(err)
			}
			if mode == "recycled" {
				zeros := make([]byte, 1<<20)
				for off := int64(0); off < size; off += int64(len(zeros)) {
					if _, err := f.WriteAt(zeros, off); err != nil {
						b.Fatal(err)
					}
				}
			}
			if err := f.Sync(); err != nil {
				b.Fatal(err)
			}
			buf := make([]byte, 512)
			b.ResetTimer()
			for i := range b.N {
				if _, err := f.WriteAt(buf, int64(i)*512%size); err != nil {
					b.Fatal(err)
				}
				if err := f.Datasync(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkAppend is the hot path without the disk: records per second that
// one goroutine can append, with a commit after every 1000.
func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{16, 128, 1024, 16384} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			l, err := wal.Open(wal.Options{FS: discard{}, Dir: "wal"})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			payload := make([]byte, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := l.Append(1, nil, payload); err != nil {
					b.Fatal(err)
				}
				if i%1000 == 999 {
					if err := l.Commit(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkKick is publishers that do not wait: records are appended in bursts
// of 100, as from one network read, and committed by the log's own goroutines.
func BenchmarkKick(b *testing.B) {
	done := make(chan struct{})
	var last storage.LSN
	l, err := wal.Open(wal.Options{
		FS: vfs.OS, Dir: filepath.Join(b.TempDir(), "wal"),
		OnCommit: func(recs []wal.Record) {
			if last += storage.LSN(len(recs)); last == storage.LSN(b.N) {
				close(done)
			}
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	payload := make([]byte, 128)
	b.SetBytes(128)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if _, err := l.Append(1, nil, payload); err != nil {
			b.Fatal(err)
		}
		if i%100 == 99 {
			l.Kick()
		}
	}
	l.Kick()
	<-done
	b.StopTimer()
	s := l.Stats()
	b.ReportMetric(float64(s.Records)/float64(max(s.Syncs, 1)), "records/sync")
}

// BenchmarkLone is one publisher that waits for each record, which is committed
// by another goroutine ("kick") or its own ("commit"), on a disk that takes no
// time.
func BenchmarkLone(b *testing.B) {
	for _, how := range []string{"kick", "commit"} {
		b.Run(how, func(b *testing.B) {
			applied := make(chan struct{}, 1)
			l, err := wal.Open(wal.Options{
				FS: discard{}, Dir: "wal", OnCommit: func([]wal.Record) { applied <- struct{}{} },
			})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			payload := make([]byte, 128)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := l.Append(1, nil, payload); err != nil {
					b.Fatal(err)
				}
				if how == "kick" {
					l.Kick()
				} else {
					l.KickOrCommit()
				}
				<-applied
			}
		})
	}
}
