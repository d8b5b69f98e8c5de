// Command gen writes the sample messages in testdata. From the repository's
// root:
//
//	go run ./testdata/gen
//
// It is deterministic: the same source writes the same octets, on every
// machine. -o names another directory.
//
// readings.jsonl has 3000 rows, one JSON object a line: "subject"
// (plant.HALL.MACHINE.QUANTITY), "header" if there is one (name to list of
// values, some with control characters and letters outside ASCII), and the
// contents as one of "data" (a JSON document), "text" or "base64". Most are
// measurements of 80 to 250 octets with decimals and umlauts; one in 40 is a
// vibration spectrum of about 3 KiB, one in 60 a CSV block of a shift log, one
// in 90 a camera thumbnail of 2 to 16 KiB of noise, one in 150 is empty (a
// heartbeat).
//
// sales.csv has 1500 rows under a line of column names: subject
// (till.SHOP.REGISTER.KIND), the receipt's number, and the receipt as JSON with
// one to thirty items, prices in cents and decimals.
package main

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Rows per file.
const (
	readingRows = 3000
	saleRows    = 1500
)

// start is the time of the first record, chosen once.
var start = time.Date(2026, 3, 2, 5, 58, 0, 0, time.UTC)

func main() {
	dir := flag.String("o", "testdata", "`directory` to write to")
	flag.Parse()
	for name, write := range map[string]func(*rand.Rand, *bufio.Writer) error{"readings.jsonl": readings, "sales.csv": sales} {
		if err := file(filepath.Join(*dir, name), write); err != nil {
			fmt.Fprintln(os.Stderr, "gen:", err)
			os.Exit(1)
		}
	}
}

// file writes one file with a random source of its own, so that a change to
// one leaves the other as it is.
func file(path string, write func(*rand.Rand, *bufio.Writer) error) error {
	var buf bytes.Buffer
	w := bufio.NewWriter(&buf)
	if err := write(rand.New(rand.NewPCG(20260302, 7)), w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return os.WriteFile(path, buf.Bytes(), 0o644)
}

// pick returns one of the choices.
func pick[T any](r *rand.Rand, choices ...T) T { return choices[r.IntN(len(choices))] }

// number is a decimal with a fixed number of places, so that 21.50 stays
// 21.50.
func number(v float64, places int) json.Number {
	return json.Number(fmt.Sprintf("%.*f", places, v))
}

// quantity is something that a machine measures.
type quantity struct {
	name, unit   string
	mean, spread float64
	places       int
}

var quantities = []quantity{
	{"temperatur", "°C", 74, 9, 2},
	{"druck", "bar", 6.2, 0.4, 3},
	{"drehzahl", "min⁻¹", 1480, 35, 0},
	{"durchfluss", "m³/h", 12.5, 2, 3},
	{"leistung", "kW", 37, 11, 2},
	{"feuchte", "%", 46, 6, 1},
	{"schwingung", "mm/s", 1.8, 0.7, 4},
}

var (
	halls    = []string{"halle-1", "halle-2", "lackiererei", "haerterei"}
	machines = []string{"presse-03", "presse-07", "fraese-12", "ofen-2", "roboter-21", "foerderband-5"}
	people   = []string{"Jürgen Großmann", "Zoë Bäcker", "Łukasz Nowak", "Håkon Østby", "Ana Peña"}
	notes    = []string{"Werkzeug gewechselt", "Öl nachgefüllt", "Störung quittiert: Überdruck", "Übergabe ohne Befund", "Maßprüfung außer Toleranz (+0,07 mm)"}
)

func readings(r *rand.Rand, w *bufio.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	at := start
	for i := range readingRows {
		at = at.Add(time.Duration(20+r.IntN(900)) * time.Millisecond)
		hall, machine, q := pick(r, halls...), pick(r, machines...), pick(r, quantities...)
		row := struct {
			Subject string              `json:"subject"`
			Header  map[string][]string `json:"header,omitempty"`
			Data    any                 `json:"data,omitempty"`
			Text    *string             `json:"text,omitempty"`
			Base64  *string             `json:"base64,omitempty"`
		}{Subject: strings.Join([]string{"plant", hall, machine, q.name}, ".")}
		if r.IntN(5) == 0 {
			row.Header = map[string][]string{"Quelle": {fmt.Sprintf("sps-%02d", r.IntN(24))}}
			if r.IntN(4) == 0 {
				// A raw sensor frame as some gateways pass it on: control
				// characters, but neither CR nor LF, which end a header.
				raw := []rune{0x01, rune(0x80 + r.IntN(0x80)), '\t', rune(0x20 + r.IntN(0x5e)), 0x7f, 'ÿ'}
				row.Header["X-Rohwert"] = []string{"~" + string(raw) + "~", fmt.Sprintf("%016x", r.Uint64())}
			}
		}
		switch {
		case i%150 == 149:
			row.Subject = "plant." + hall + "." + machine + ".herzschlag"
			row.Text = new(string)
		case i%90 == 89:
			data := make([]byte, 2048+r.IntN(14*1024))
			for j := range data {
				data[j] = byte(r.Uint32())
			}
			text := base64.StdEncoding.EncodeToString(data)
			row.Subject, row.Base64 = "plant."+hall+".kamera-1.bild", &text
		case i%60 == 59:
			text := shiftLog(r, at)
			row.Subject, row.Text = "plant."+hall+".schicht.protokoll", &text
		case i%40 == 39:
			bins := make([]json.Number, 256)
			for j := range bins {
				bins[j] = number(math.Abs(r.NormFloat64())/float64(1+j), 6)
			}
			row.Subject = "plant." + hall + "." + machine + ".spektrum"
			row.Data = struct {
				Time string        `json:"zeit"`
				Rate int           `json:"abtastrate_hz"`
				Bins []json.Number `json:"betraege"`
			}{stamp(at), 12800, bins}
		default:
			row.Data = struct {
				Time    string      `json:"zeit"`
				Machine string      `json:"maschine"`
				Value   json.Number `json:"wert"`
				Unit    string      `json:"einheit"`
				State   string      `json:"zustand"`
				Counter uint32      `json:"takt"`
			}{stamp(at), machine, number(q.mean+float64(q.spread*r.NormFloat64()), q.places), q.unit, pick(r, "läuft", "läuft", "läuft", "rüstet", "gestört"), r.Uint32N(4_000_000)}
		}
		if err := enc.Encode(row); err != nil {
			return err
		}
	}
	return nil
}

func stamp(t time.Time) string { return t.Format("2006-01-02T15:04:05.000Z07:00") }

// shiftLog is a block of CSV as a terminal on the shop floor exports it, with
// semicolons and decimal commas.
func shiftLog(r *rand.Rand, at time.Time) string {
	var b strings.Builder
	b.WriteString("Zeit;Person;Maschine;Bemerkung;Stück;Ausschuss\r\n")
	for range 3 + r.IntN(22) {
		at = at.Add(time.Duration(r.IntN(1500)) * time.Second)
		fmt.Fprintf(&b, "%s;%s;%s;%s;%d;%s\r\n", at.Format("02.01.2006 15:04"), pick(r, people...), pick(r, machines...), pick(r, notes...), r.IntN(900), strings.Replace(fmt.Sprintf("%.1f", r.Float64()*4), ".", ",", 1))
	}
	return b.String()
}

// article is something that a shop sells.
type article struct {
	gtin  string
	name  string
	cents int
	vat   int // percent
}

var articles = []article{
	{"4012345000016", "Brötchen, Weizen", 45, 7},
	{"4012345000023", "Käse, jung, gerieben 200 g", 249, 7},
	{"4012345000030", "Müsli »Früh & fein« 750 g", 399, 7},
	{"4012345000047", "Crème fraîche 30 %", 119, 7},
	{"4012345000054", "Jalapeños, eingelegt", 199, 7},
	{"4012345000061", "Spülmittel Zitrone 500 ml", 135, 19},
	{"4012345000078", "Batterien AA, 8 Stück", 749, 19},
	{"4012345000085", "Pfand Kasten", 150, 19},
	{"4012345000092", "Smörrebröd-Aufstrich", 279, 7},
	{"4012345000108", "Tragetasche, groß", 25, 19},
}

func sales(r *rand.Rand, w *bufio.Writer) error {
	cw := csv.NewWriter(w)
	if err := cw.Write([]string{"subject", "receipt", "data"}); err != nil {
		return err
	}
	at := start
	for i := range saleRows {
		at = at.Add(time.Duration(1+r.IntN(40)) * time.Second)
		shop, register := pick(r, "koeln-03", "muenchen-11", "zuerich-02"), 1+r.IntN(6)
		kind := pick(r, "bon", "bon", "bon", "bon", "bon", "bon", "storno", "retoure")
		type item struct {
			GTIN  string      `json:"gtin"`
			Name  string      `json:"artikel"`
			Count int         `json:"menge"`
			Price json.Number `json:"preis"`
			VAT   int         `json:"mwst"`
		}
		items := make([]item, 1+min(r.IntN(12), r.IntN(30)))
		total := 0
		for j := range items {
			a := pick(r, articles...)
			n := 1 + r.IntN(4)
			total += n * a.cents
			items[j] = item{a.gtin, a.name, n, number(float64(a.cents)/100, 2), a.vat}
		}
		if kind != "bon" {
			total = -total
		}
		var data bytes.Buffer
		enc := json.NewEncoder(&data)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(struct {
			Time  string      `json:"zeit"`
			Staff string      `json:"kasse_von"`
			Items []item      `json:"positionen"`
			Total json.Number `json:"summe"`
			Paid  string      `json:"bezahlt"`
		}{stamp(at), pick(r, people...), items, number(float64(total)/100, 2), pick(r, "bar", "karte", "karte", "gutschein")}); err != nil {
			return err
		}
		receipt := fmt.Sprintf("%s/%d/%06d", shop, register, i+1)
		if err := cw.Write([]string{fmt.Sprintf("till.%s.kasse-%d.%s", shop, register, kind), receipt, strings.TrimSpace(data.String())}); err != nil {
			return err
		}
	}
	cw.Flush()
	return cw.Error()
}
