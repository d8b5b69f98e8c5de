package storetest

import (
	"fmt"
	"testing"

	"petiole/storage"
)

// PayloadSize is the size of the messages benchmarks use.
const PayloadSize = 128

// Subjects is how many subjects benchmarks spread messages over.
const Subjects = 1000

// Names returns the subjects that benchmarks use.
func Names() []string {
	names := make([]string, Subjects)
	for i := range names {
		names[i] = fmt.Sprintf("plant.line%d.sensor%d", i%20, i)
	}
	return names
}

// BenchmarkAppend measures appending to s, with checkpoints by the caller.
func BenchmarkAppend(b *testing.B, s storage.Store) {
	names := Names()
	data := make([]byte, PayloadSize)
	b.ReportAllocs()
	b.SetBytes(PayloadSize)
	b.ResetTimer()
	for i := range b.N {
		if _, err := s.Append(storage.Message{Subject: names[i%Subjects], Time: int64(i + 1), Data: data}); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
}
