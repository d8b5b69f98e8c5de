package table

import (
	"errors"

	"petiole/storage"
)

// A table over an image of many subjects does not begin with all of them in
// memory. One that is not is in the image exactly as it is now: whatever changes
// one takes it into memory first, and lets go of it only when an image that has
// the change is in place, which counts in thaws. Patterns need all, and take
// them in.

// subjectsRead is how many summaries are read from the image at once.
const subjectsRead = 512

// adopt takes in a subject that the image has, and memory has not.
func (t *Table) adopt(v Subject) *subj {
	s := &subj{name: v.Name, id: v.ID, sums: sums{v.Msgs, v.Bytes, v.First, v.Last}}
	t.subjects[v.Name] = s
	t.list = append(t.list, s)
	return s
}

// lookup returns the subject of that name, nil if there is none. The caller
// holds the lock for writing.
func (t *Table) lookup(name string) (*subj, error) {
	if s := t.subjects[name]; s != nil || t.complete {
		return s, nil
	}
	v, ok, err := t.image.Subject(name)
	if err != nil {
		t.broke(err)
		return nil, err
	}
	if !ok {
		return nil, nil
	}
	return t.adopt(v), nil
}

// find is lookup that takes the lock itself.
func (t *Table) find(name string) (*subj, error) {
	for {
		t.mu.RLock()
		s, done, thaws := t.subjects[name], t.complete, t.thaws
		t.mu.RUnlock()
		if s != nil || done {
			return s, nil
		}
		v, ok, err := t.image.Subject(name)
		if err != nil {
			return nil, t.breaks(err)
		}
		if !ok {
			return nil, nil
		}
		t.mu.Lock()
		if s = t.subjects[name]; s == nil && !t.complete && t.thaws == thaws {
			s = t.adopt(v)
		}
		done = s != nil || t.complete
		t.mu.Unlock()
		if done {
			return s, nil
		}
	}
}

// all takes in all subjects. It takes the lock itself.
func (t *Table) all() error {
	t.mu.RLock()
	done := t.complete
	t.mu.RUnlock()
	if done {
		return nil
	}
	t.loading.Lock()
	defer t.loading.Unlock()
	buf := make([]Subject, 0, subjectsRead)
	for after := ""; ; {
		t.mu.RLock()
		done, thaws := t.complete, t.thaws
		t.mu.RUnlock()
		if done {
			return nil
		}
		subs, err := t.image.SubjectsAfter(after, subjectsRead, buf[:0])
		if err != nil {
			return t.breaks(err)
		}
		t.mu.Lock()
		if t.thaws == thaws && !t.complete {
			if err := t.take(subs); err != nil {
				t.mu.Unlock()
				return err
			}
			if len(subs) > 0 {
				after = subs[len(subs)-1].Name
			}
		}
		t.mu.Unlock()
	}
}

// allLocked is all for the writer, who holds the lock.
func (t *Table) allLocked() error {
	buf := make([]Subject, 0, subjectsRead)
	for after := ""; !t.complete; {
		subs, err := t.image.SubjectsAfter(after, subjectsRead, buf[:0])
		if err != nil {
			t.broke(err)
			return err
		}
		if err := t.take(subs); err != nil {
			return err
		}
		if len(subs) > 0 {
			after = subs[len(subs)-1].Name
		}
	}
	return nil
}

// take takes in those of subs, a part of all subjects of the image, that are not
// in memory; none are left if there are fewer than were asked for.
func (t *Table) take(subs []Subject) error {
	for _, v := range subs {
		if t.subjects[v.Name] == nil {
			t.adopt(v)
		}
	}
	if len(subs) == subjectsRead {
		return nil
	}
	if !t.addsUp() {
		err := &storage.CorruptError{File: t.path, Reason: "the summaries of the subjects do not add up"}
		t.broke(err)
		return err
	}
	t.complete = true
	return nil
}

// addsUp reports whether the subjects, all of which are in memory, have as many
// messages as there are.
func (t *Table) addsUp() bool {
	var msgs, bytes uint64
	for _, s := range t.list {
		if t.subjects[s.name] == s {
			msgs += s.msgs
			bytes += s.bytes
		}
	}
	return msgs == t.msgs && bytes == t.bytes
}

// broke notes damage to the image's summaries, which not every method can
// report: nothing is changed any more until the image has been repaired. The
// caller holds the lock.
func (t *Table) broke(err error) {
	if t.broken == nil && errors.Is(err, storage.ErrCorrupt) {
		t.broken = err
	}
}

// breaks is broke that takes the lock itself, and returns err.
func (t *Table) breaks(err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.broke(err)
	return err
}

// Break makes a table that has been restored refuse changes, as the image has
// been found damaged; Broken returns why it does.
func Break(t *Table, err error) { _ = t.breaks(err) }

// Broken returns the damage that keeps the table from being changed; nil if there
// is none.
func Broken(t *Table) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.broken
}

// InMemory returns how many subjects are in memory. It is for tests.
func InMemory(t *Table) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.subjects)
}

// writable returns why nothing may be changed. The caller holds the lock.
func (t *Table) writable() error {
	if t.closed {
		return storage.ErrClosed
	}
	return t.broken
}

// Complete takes in all subjects of a table that has been restored: their sums
// agree with what the image says.
func Complete(t *Table) error { return t.all() }
