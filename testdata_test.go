package petiole_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unicode/utf8"

	"petiole/internal/subject"
	"petiole/testdata"
)

// The go tool's ./... leaves directories named testdata out, so that what is
// in this one is tested from here.

func TestSamplesAreWhatTheGeneratorWrites(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "run", "./testdata/gen", "-o", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"readings.jsonl", "sales.csv"} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("testdata/%s is not what the generator writes: run go run ./testdata/gen", name)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "go", "vet", "./testdata", "./testdata/gen").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestSamplesAreValidAndVaried(t *testing.T) {
	readings, err := testdata.Readings()
	if err != nil {
		t.Fatal(err)
	}
	sales, err := testdata.Sales()
	if err != nil {
		t.Fatal(err)
	}
	if len(readings) != 3000 || len(sales) != 1500 {
		t.Errorf("%d readings and %d sales", len(readings), len(sales))
	}
	var headers, empty, large, binary int
	for _, r := range append(readings, sales...) {
		if !subject.ValidLiteral(r.Subject) {
			t.Errorf("%q is no subject", r.Subject)
		}
		if len(r.Header) > 0 {
			headers++
		}
		switch n := len(r.Data); {
		case n == 0:
			empty++
		case n > 8192:
			large++
		}
		if !utf8.Valid(r.Data) {
			binary++
		}
	}
	if headers < 1500 || empty < 10 || large < 5 || binary < 10 {
		t.Errorf("too uniform: %d with headers, %d empty, %d large, %d binary", headers, empty, large, binary)
	}
}
