package storagetool

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"petiole/internal/jetstream/command"
	"petiole/storage"
	"petiole/storage/wal"
)

// Line is a record of the log as Dump tells it, or a segment's note.
type Line struct {
	LSN    storage.LSN     // of a note: which follows the records that it tells of
	Group  storage.GroupID // 0: a note
	Stream string          // its name; "(meta)" for the meta group, "" if not known any more
	Kind   string          // of the command; "malformed" or "kind N" if it cannot be read; "note"
	Size   int             // of the record, octets
	Fields string          // the command's key fields, what is noted
}

// DumpOptions choose records.
type DumpOptions struct {
	From  storage.LSN     // the first; 0: the oldest
	Limit int             // how many at most; 0: all
	Group storage.GroupID // only its records; 0: of all groups
}

var errEnough = errors.New("enough records")

// Dump calls fn for the log's records in order, and for the notes of its segments
// between them unless those of one group are asked for, until it returns an error,
// which Dump returns. Damage is passed over and returned in the end, wrapping
// storage.ErrCorrupt.
func (s *Store) Dump(o DumpOptions, fn func(Line) error) error {
	known := map[storage.GroupID]string{}
	if records, err := s.streams(); err == nil {
		known = names(records) // else groups have to do: Verify tells why
	}
	n := 0
	info, err := wal.ScanNotes(s.path("wal"), func(r wal.Record) error {
		var c command.StreamCreate
		if r.Group == storage.MetaGroup && c.Decode(r.Data) == nil {
			known[storage.GroupID(c.Group)] = c.Name // of streams deleted since, too
		}
		if r.LSN < o.From || o.Group != 0 && r.Group != o.Group {
			return nil
		}
		if o.Limit > 0 && n == o.Limit {
			return errEnough
		}
		n++
		l := Line{LSN: r.LSN, Group: r.Group, Stream: known[r.Group], Size: len(r.Data)}
		l.Kind, l.Fields = describe(r.Data)
		return fn(l)
	}, func(note *wal.Note) error {
		if note.Next < o.From || o.Group != 0 || o.Limit > 0 && n == o.Limit {
			return nil
		}
		return fn(Line{LSN: note.Next, Kind: "note", Fields: note.String()})
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(info.Damage...)
}

// describe renders a command for people.
func describe(b []byte) (kind, fields string) {
	kind, fields, err := fieldsOf(b)
	if err != nil {
		return "malformed", err.Error()
	}
	return kind, fields
}

func stamp(ns int64) string { return time.Unix(0, ns).UTC().Format("2006-01-02T15:04:05.000000000Z") }

func publish(c *command.Publish) string {
	s := fmt.Sprintf("subject %q header %d data %d time %s", c.Subject, len(c.Header), len(c.Data), stamp(c.Time))
	if len(c.Header) > 0 && time.Duration(c.Steady-c.Time).Abs() > time.Second { // the clock has leapt
		s += " steady " + stamp(c.Steady)
	}
	return s
}

func fieldsOf(b []byte) (kind, fields string, err error) {
	switch k := command.KindOf(b); k {
	case command.KindPublish:
		var c command.Publish
		err = c.Decode(b)
		return "publish", publish(&c), err
	case command.KindBatch:
		var c command.Batch
		err = c.Decode(b)
		parts := []string{fmt.Sprintf("messages %d", len(c.Msgs))}
		for i := range c.Msgs {
			parts = append(parts, publish(&c.Msgs[i]))
		}
		return "batch", strings.Join(parts, "; "), err
	case command.KindDeleteMsg:
		var c command.DeleteMsg
		err = c.Decode(b)
		return "delete-msg", fmt.Sprintf("seq %d", c.Seq), err
	case command.KindPurge:
		var c command.Purge
		err = c.Decode(b)
		return "purge", fmt.Sprintf("subject %q below %d keep %d", c.Subject, c.Seq, c.Keep), err
	case command.KindSetConfig:
		var c command.SetConfig
		err = c.Decode(b)
		return "set-config", string(c.JSON), err
	case command.KindExpire:
		var c command.Expire
		err = c.Decode(b)
		return "expire", "now " + stamp(c.Now), err
	case command.KindLost:
		var c command.Lost
		err = c.Decode(b)
		return "lost", fmt.Sprintf("seq %d found %s", c.Seq, stamp(c.Time)), err
	case command.KindSkip:
		var c command.Skip
		err = c.Decode(b)
		return "skip", fmt.Sprintf("to seq %d and %d more decided %s", c.To, c.More, stamp(c.Time)), err
	case command.KindAcked:
		var c command.Acked
		err = c.Decode(b)
		return "acked", fmt.Sprintf("seq %d", c.Seq), err
	case command.KindSweep:
		var c command.Sweep
		err = c.Decode(b)
		return "sweep", fmt.Sprintf("messages %d", c.Max), err
	case command.KindIngest:
		var c command.Ingest
		err = c.Decode(b)
		return "ingest", fmt.Sprintf("edge %s incarnation %d seq %d to %d messages %d gaps %d", c.Edge, c.Incarnation, c.First, c.Through, len(c.Msgs), len(c.Gaps)), err
	case command.KindStreamCreate:
		var c command.StreamCreate
		err = c.Decode(b)
		return "stream-create", fmt.Sprintf("name %q group %d created %s config %s", c.Name, c.Group, stamp(c.Created), c.Config), err
	case command.KindStreamDelete:
		var c command.StreamDelete
		err = c.Decode(b)
		return "stream-delete", fmt.Sprintf("group %d", c.Group), err
	default:
		if command.IsConsumer(k) {
			return consumerFields(k, b)
		}
		return fmt.Sprintf("kind %d", k), "not known to this program version", nil
	}
}

// events names the kinds of command.ConsumerEvent.
var events = map[command.Kind]string{
	command.KindConsumerAck: "ack", command.KindConsumerNak: "nak", command.KindConsumerProgress: "progress",
	command.KindConsumerTerm: "term", command.KindConsumerExhausted: "exhausted", command.KindConsumerReset: "reset",
}

func consumerFields(k command.Kind, b []byte) (kind, fields string, err error) {
	switch k {
	case command.KindConsumerCreate:
		var c command.ConsumerCreate
		err = c.Decode(b)
		return "consumer-create", fmt.Sprintf("consumer %q config %s", c.Name, c.Config), err
	case command.KindConsumerDelete:
		var c command.ConsumerDelete
		err = c.Decode(b)
		return "consumer-delete", fmt.Sprintf("consumer %q", c.Name), err
	case command.KindConsumerDelivered:
		var c command.ConsumerDelivered
		err = c.Decode(b)
		fields = fmt.Sprintf("consumer %q from consumer seq %d:", c.Name, c.DSeq)
		for _, r := range c.Ranges {
			fields += fmt.Sprintf(" seq %d to %d attempt %d", r.First, r.First+r.Count-1, r.Attempt)
		}
		return "delivered", fields, err
	default:
		var c command.ConsumerEvent
		err = c.Decode(b)
		return events[k], fmt.Sprintf("consumer %q seq %d consumer seq %d time %s", c.Name, c.Seq, c.DSeq, stamp(c.Time)), err
	}
}
