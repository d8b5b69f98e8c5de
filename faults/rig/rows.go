//go:build linux

package rig

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Endless makes rows of 64 to 512 bytes without end, each determined by seed
// and number.
type Endless struct {
	Seed uint64
	mu   sync.Mutex
	n    int
}

// Next returns the next row.
func (e *Endless) Next() (int, []byte, bool) {
	e.mu.Lock()
	e.n++
	n := e.n
	e.mu.Unlock()
	r := rand.New(rand.NewPCG(e.Seed, uint64(n)))
	b := make([]byte, 64+r.IntN(449))
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return n, b, true
}

// Again does nothing: there are always more rows.
func (e *Endless) Again(int) {}

// Finite hands out given rows, each until it was acknowledged.
type Finite struct {
	mu    sync.Mutex
	rows  [][]byte
	next  int
	again []int
}

// NewFinite returns the rows to publish; it keeps the slices.
func NewFinite(rows [][]byte) *Finite { return &Finite{rows: rows} }

// Next returns a row that was given back, or the next one.
func (f *Finite) Next() (int, []byte, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.again); n > 0 {
		row := f.again[n-1]
		f.again = f.again[:n-1]
		return row, f.rows[row], true
	}
	if f.next == len(f.rows) {
		return 0, nil, false
	}
	f.next++
	return f.next - 1, f.rows[f.next-1], true
}

// Again takes a row back.
func (f *Finite) Again(row int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.again = append(f.again, row)
}

// Left returns how many rows have not been handed out.
func (f *Finite) Left() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.rows) - f.next + len(f.again)
}

// ReadRows returns every line of every regular file under dir, in the order of
// the file names, without the line ends; empty lines are left out.
func ReadRows(dir string) ([][]byte, error) {
	var rows [][]byte
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		s := bufio.NewScanner(f)
		s.Buffer(nil, 1<<20) // a row has to fit into a message
		for s.Scan() {
			if len(s.Bytes()) > 0 {
				rows = append(rows, append([]byte(nil), s.Bytes()...))
			}
		}
		if err := s.Err(); err != nil {
			return fmt.Errorf("read rows of %s: %w", path, err)
		}
		return nil
	})
	if err == nil && len(rows) == 0 {
		err = fmt.Errorf("no rows under %s", dir)
	}
	return rows, err
}

// Readings makes n rows as a plant's sensors write them: time, line, sensor,
// value, unit, state.
func Readings(n int) [][]byte {
	r := rand.New(rand.NewPCG(4, 0))
	kinds := [...]struct{ name, unit string }{{"temperature", "C"}, {"pressure", "kPa"}, {"vibration", "mm/s"}, {"current", "A"}, {"flow", "l/min"}}
	rows := make([][]byte, n)
	at := time.Date(2026, 3, 1, 6, 0, 0, 0, time.UTC)
	for i := range rows {
		at = at.Add(time.Duration(r.IntN(250)) * time.Millisecond)
		k := kinds[r.IntN(len(kinds))]
		state := "ok"
		if r.IntN(200) == 0 {
			state = "alarm: " + strings.Repeat("limit exceeded; ", 1+r.IntN(40))
		}
		rows[i] = fmt.Appendf(nil, "%s,line-%d,%s-%02d,%.4f,%s,%s",
			at.Format(time.RFC3339Nano), 1+r.IntN(8), k.name, r.IntN(40), r.NormFloat64()*12+70, k.unit, state)
	}
	return rows
}
