// Package testdata holds sample messages of a factory and of a shop, for the
// demonstration and for tests: readings.jsonl and sales.csv, embedded so that
// a program carries them along. They are invented; `go run ./testdata/gen`
// writes them anew, always the same (see its documentation for the shapes).
package testdata

import (
	"bytes"
	_ "embed" // the files below
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
)

//go:embed readings.jsonl
var readings []byte

//go:embed sales.csv
var sales []byte

// Record is one sample message.
type Record struct {
	Subject string
	Header  map[string][]string // nil if it has none
	Data    []byte
}

// Readings returns the messages of the factory: subjects plant.>, JSON, text
// and binary contents from none to some ten thousand octets.
func Readings() ([]Record, error) {
	var out []Record
	dec := json.NewDecoder(bytes.NewReader(readings))
	for n := 1; ; n++ {
		var row struct {
			Subject string
			Header  map[string][]string
			Data    json.RawMessage // a JSON document, sent as it stands
			Text    *string         // or text
			Base64  *string         // or octets
		}
		if err := dec.Decode(&row); err == io.EOF {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("readings.jsonl, row %d: %w", n, err)
		}
		r := Record{Subject: row.Subject, Header: row.Header, Data: []byte(row.Data)}
		switch {
		case row.Text != nil:
			r.Data = []byte(*row.Text)
		case row.Base64 != nil:
			data, err := base64.StdEncoding.DecodeString(*row.Base64)
			if err != nil {
				return nil, fmt.Errorf("readings.jsonl, row %d: %w", n, err)
			}
			r.Data = data
		}
		out = append(out, r)
	}
}

// Sales returns the messages of the shop's tills: subjects till.>, one header
// (Nats-Msg-Id, the receipt's number), and the receipt as JSON.
func Sales() ([]Record, error) {
	rows, err := csv.NewReader(bytes.NewReader(sales)).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("sales.csv: %w", err)
	}
	var out []Record
	for _, row := range rows[1:] { // the first names the columns
		out = append(out, Record{Subject: row[0], Header: map[string][]string{"Nats-Msg-Id": {row[1]}}, Data: []byte(row[2])})
	}
	return out, nil
}
