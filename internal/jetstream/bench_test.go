package jetstream

import (
	"sync/atomic"
	"testing"
	"time"

	"petiole/internal/broker"
	"petiole/internal/jetstream/api"
)

// BenchmarkPublish takes messages from the handler through the log (without
// waiting for the disk) to the acknowledgement.
func BenchmarkPublish(b *testing.B) {
	srv, err := broker.New(broker.Options{Host: "127.0.0.1", Port: -1})
	if err != nil {
		b.Fatal(err)
	}
	e, err := Open(Options{Account: srv.Account(), Dir: b.TempDir(), SyncInterval: time.Minute})
	if err != nil {
		b.Fatal(err)
	}
	defer e.close(false)
	s, err := e.EnsureStream(api.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
	if err != nil {
		b.Fatal(err)
	}
	var acked atomic.Int64
	done := make(chan struct{})
	sub, err := srv.Account().Handle("_INBOX.>", func(*broker.Msg) {
		if acked.Add(1) == int64(b.N) {
			close(done)
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	defer sub.Close()
	subject, reply, data := []byte("s.a"), []byte("_INBOX.abcdef.1"), make([]byte, 128)
	b.ReportAllocs()
	b.SetBytes(128)
	b.ResetTimer()
	for i := range b.N {
		s.publish(subject, reply, nil, data)
		if i%64 == 63 {
			e.Kick()
		}
	}
	e.Kick()
	<-done
}
