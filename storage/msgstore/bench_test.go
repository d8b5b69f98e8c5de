package msgstore

import (
	"crypto/sha256"
	"fmt"
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"petiole/storage"
	"petiole/storage/storetest"
)

func BenchmarkAppend(b *testing.B) {
	// As in service: checkpoints are beside, whenever there is enough.
	s := mustOpen(b, b.TempDir())
	work := make(chan struct{}, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range work {
			if err := s.Checkpoint(); err != nil {
				b.Error(err)
			}
		}
	}()
	names := storetest.Names()
	data := make([]byte, storetest.PayloadSize)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if _, err := s.Append(storage.Message{Subject: names[i%len(names)], Time: int64(i + 1), Data: data}); err != nil {
			b.Fatal(err)
		}
		if i%1024 == 0 && s.TableBytes() > 32<<20 && s.Freeze(storage.LSN(i+1), nil) {
			work <- struct{}{}
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
	close(work)
	<-done
}

func fill(b *testing.B, n int) *Store {
	b.Helper()
	s := mustOpen(b, b.TempDir())
	names := storetest.Names()
	data := make([]byte, storetest.PayloadSize)
	for i := range n {
		if _, err := s.Append(storage.Message{Subject: names[i%len(names)], Time: int64(i + 1), Data: data}); err != nil {
			b.Fatal(err)
		}
		if s.TableBytes() > 32<<20 {
			checkpoint(b, s, storage.LSN(i+1))
		}
	}
	checkpoint(b, s, storage.LSN(n))
	return s
}

const benchMsgs = 300_000

// peak samples how much heap is in use, garbage included, until stopped; it
// returns by how much that has grown at most.
func peak() (stop func() uint64) {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	runtime.GC()
	from := read()
	quit, done := make(chan struct{}), make(chan uint64)
	go func() {
		most := from
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				done <- most - from
				return
			case <-tick.C:
				most = max(most, read())
			}
		}
	}()
	return func() uint64 {
		close(quit)
		return <-done
	}
}

func BenchmarkCheckpoint(b *testing.B) {
	names := storetest.Names()
	data := make([]byte, storetest.PayloadSize)
	s := mustOpen(b, b.TempDir())
	const batch = 150_000
	n := 0
	var cpu time.Duration
	var heap uint64
	for b.Loop() {
		b.StopTimer()
		for i := range batch {
			if _, err := s.Append(storage.Message{Subject: names[i%len(names)], Time: int64(n + 1), Data: data}); err != nil {
				b.Fatal(err)
			}
			n++
		}
		stop := peak()
		from := cpuTime()
		b.StartTimer()
		checkpoint(b, s, storage.LSN(n))
		cpu += cpuTime() - from
		heap = max(heap, stop())
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "msgs/s")
	b.ReportMetric(float64(cpu)/float64(n), "cpu-ns/msg")
	b.ReportMetric(float64(heap)/(1<<20), "heap-MiB")
	b.ReportMetric(float64(used(b, s))/float64(n), "disk-B/msg")
}

// BenchmarkCheckpointSubjects checkpoints messages of a subject each, in no
// order, as a bucket of keys has them.
func BenchmarkCheckpointSubjects(b *testing.B) {
	s := mustOpen(b, b.TempDir())
	data := make([]byte, storetest.PayloadSize)
	const batch = 50_000
	n := 0
	for b.Loop() {
		b.StopTimer()
		for range batch {
			m := storage.Message{Subject: fmt.Sprintf("kv.bucket.%x", sha256.Sum256([]byte{byte(n), byte(n >> 8), byte(n >> 16)})), Time: int64(n + 1), Data: data}
			if _, err := s.Append(m); err != nil {
				b.Fatal(err)
			}
			n++
		}
		b.StartTimer()
		checkpoint(b, s, storage.LSN(n))
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "msgs/s")
}

func BenchmarkRange(b *testing.B) {
	s := fill(b, benchMsgs)
	b.ReportAllocs()
	n := 0
	from := cpuTime()
	for b.Loop() {
		if err := s.Range(0, func(storage.Message) bool { n++; return true }); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpuTime()-from)/float64(n), "cpu-ns/msg")
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "msgs/s")
}

func benchNext(b *testing.B, f storage.Filter) {
	s := fill(b, benchMsgs)
	b.ReportAllocs()
	seq, n := uint64(0), 0
	from := cpuTime()
	for b.Loop() {
		m, err := s.LoadNext(f, seq)
		if err != nil {
			seq = 0
			continue
		}
		n++
		seq = m.Seq + 1
	}
	b.ReportMetric(float64(cpuTime()-from)/float64(n), "cpu-ns/msg")
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "msgs/s")
}

func BenchmarkLoadNext(b *testing.B) { benchNext(b, storage.Filter{}) }

func BenchmarkLoadNextOneSubject(b *testing.B) {
	benchNext(b, storage.Filter{Patterns: []string{storetest.Names()[7]}})
}

func BenchmarkLoadNextWildcard(b *testing.B) {
	benchNext(b, storage.Filter{Patterns: []string{"plant.line7.*"}})
}

func BenchmarkRolling(b *testing.B) { // a stream at its limit: one in, one out
	s := fill(b, benchMsgs)
	names := storetest.Names()
	data := make([]byte, storetest.PayloadSize)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if _, err := s.Append(storage.Message{Subject: names[i%len(names)], Time: int64(i + 1), Data: data}); err != nil {
			b.Fatal(err)
		}
		if _, err := s.Remove(s.State().First); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

func BenchmarkOpen(b *testing.B) {
	s := fill(b, benchMsgs)
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s, err := Open(s.dir(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
