package memstore

import (
	"testing"

	"petiole/storage"
	"petiole/storage/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, storetest.Harness{
		Open: func(string) (storage.Store, error) { return New(), nil },
		Dir:  func() string { return "" },
	})
}

func BenchmarkAppend(b *testing.B) {
	storetest.BenchmarkAppend(b, New())
}
