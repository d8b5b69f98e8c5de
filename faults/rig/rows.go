//go:build linux

package rig

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"petiole/testdata"
)

// Row is one message to publish.
type Row struct {
	Subject string
	Header  map[string][]string // may be nil
	Data    []byte
}

// Endless makes rows of 64 to 512 bytes without end, each determined by seed
// and number.
type Endless struct {
	Seed uint64
	mu   sync.Mutex
	n    int
}

// Next returns the next row.
func (e *Endless) Next() (int, Row, bool) {
	e.mu.Lock()
	e.n++
	n := e.n
	e.mu.Unlock()
	r := rand.New(rand.NewPCG(e.Seed, uint64(n)))
	b := make([]byte, 64+r.IntN(449))
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return n, Row{Subject: "n", Data: b}, true
}

// Again does nothing: there are always more rows.
func (e *Endless) Again(int) {}

// Finite hands out given rows, each until it was acknowledged.
type Finite struct {
	mu    sync.Mutex
	rows  []Row
	next  int
	again []int
}

// NewFinite returns the rows to publish; it keeps the slices.
func NewFinite(rows []Row) *Finite { return &Finite{rows: rows} }

// Next returns a row that was given back, or the next one.
func (f *Finite) Next() (int, Row, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.again); n > 0 {
		row := f.again[n-1]
		f.again = f.again[:n-1]
		return row, f.rows[row], true
	}
	if f.next == len(f.rows) {
		return 0, Row{}, false
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

// maxRow is the longest row: with its header it has to fit into a message, whose
// limit is 1 MiB by default.
const maxRow = 1<<20 - 4<<10

// ReadRows returns every line of every regular file under dir, in the order of
// the file names, without the line ends; empty lines are left out. The subject
// of a row is "rows." and the file's name with what cannot be in a subject
// replaced.
func ReadRows(dir string) ([]Row, error) {
	var rows []Row
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		subject := "rows." + strings.Map(func(r rune) rune {
			if r <= ' ' || strings.ContainsRune(".*>", r) {
				return '_'
			}
			return r
		}, d.Name())
		s := bufio.NewScanner(f)
		s.Buffer(nil, maxRow)
		for s.Scan() {
			if len(s.Bytes()) > 0 {
				rows = append(rows, Row{Subject: subject, Data: append([]byte(nil), s.Bytes()...)})
			}
		}
		if err := s.Err(); err != nil {
			return fmt.Errorf("read rows of %s (a row may have %d bytes): %w", path, maxRow, err)
		}
		return nil
	})
	if err == nil && len(rows) == 0 {
		err = fmt.Errorf("no rows under %s", dir)
	}
	return rows, err
}

// Samples returns every row of the module's testdata.
func Samples() ([]Row, error) {
	readings, err := testdata.Readings()
	if err != nil {
		return nil, err
	}
	sales, err := testdata.Sales()
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, r := range append(readings, sales...) {
		rows = append(rows, Row(r))
	}
	return rows, nil
}

// Repeat returns rows over and over until there are n. A message id is made
// another one in each round, so that repeated rows are no duplicates.
func Repeat(rows []Row, n int) []Row {
	out := rows
	for round := 2; len(out) < n; round++ {
		for _, r := range rows[:min(len(rows), n-len(out))] {
			if id := r.Header[nats.MsgIdHdr]; id != nil {
				r.Header = maps.Clone(r.Header)
				r.Header[nats.MsgIdHdr] = []string{fmt.Sprintf("%s, round %d", id[0], round)}
			}
			out = append(out, r)
		}
	}
	return out
}
