package msgstore

import (
	"bytes"
	"fmt"

	"petiole/storage/internal/boltpages"
)

// What the tree says, step by step beneath its damage.

// root reads the names of the buckets of the state of a meta page.
func (s *salvage) root(m boltpages.Meta) (buckets map[string]boltpages.Bucket, damage []boltpages.Damage) {
	buckets = map[string]boltpages.Bucket{}
	w := s.f.NewWalker(func(d boltpages.Damage) { damage = append(damage, d) })
	// The callback never fails.
	_ = w.Walk(s.f.Root(m), func(e boltpages.Entry) error {
		b, err := s.f.Bucket(e)
		if err != nil {
			damage = append(damage, boltpages.Damage{Kind: boltpages.KindLeaf, Page: e.Page, Reason: fmt.Sprintf("bucket %q: %v", e.Key, err)})
			return nil
		}
		if _, twice := buckets[string(e.Key)]; !twice {
			buckets[string(e.Key)] = b
		}
		return nil
	})
	return buckets, damage
}

// each calls fn for the entries of a bucket of the tree, and notes what damage
// hides of it. fn reports whether it believes the entry; if not, the key may be
// another's, and all between its neighbours is hidden.
func (s *salvage) each(bucket []byte, fn func(key, value []byte, e boltpages.Entry) bool) {
	b, ok := s.buckets[string(bucket)]
	if !ok {
		if s.meta >= 0 {
			s.damaged("bucket %q is nowhere", bucket)
		}
		s.hidden[string(bucket)] = append(s.hidden[string(bucket)], boltpages.Damage{Kind: boltpages.KindPage, Reason: "the bucket is nowhere"})
		return
	}
	w := s.f.NewWalker(func(d boltpages.Damage) {
		s.damaged("bucket %q: %v", bucket, &d)
		if !d.Whole {
			s.hidden[string(bucket)] = append(s.hidden[string(bucket)], d)
		}
	})
	var buf, low []byte // low is what may be the next key
	doubt := false
	hide := func(high []byte) {
		if doubt {
			s.hidden[string(bucket)] = append(s.hidden[string(bucket)], boltpages.Damage{Kind: boltpages.KindLeaf, Low: low, High: high})
		}
		doubt = false
	}
	_ = w.Walk(b, func(e boltpages.Entry) error {
		v, err := e.Value(buf)
		if err != nil {
			s.damaged("bucket %q, page %d: value of key %x: %v", bucket, e.Page, e.Key, err)
			doubt = true
			return nil
		}
		buf = v
		if fn(e.Key, v, e) {
			key := bytes.Clone(e.Key)
			hide(key)
			low = append(key, 0)
		} else {
			doubt = true
		}
		return s.ctx.Err()
	})
	hide(nil)
}

// hides reports whether damage may hide a key.
func hides(damage []boltpages.Damage, key []byte) bool {
	for _, d := range damage {
		if bytes.Compare(d.Low, key) <= 0 && (d.High == nil || bytes.Compare(key, d.High) < 0) {
			return true
		}
	}
	return false
}

func (s *salvage) scan(fn func(e boltpages.Entry) error) error {
	err := s.f.Scan(s.ctx, nil, fn)
	if err != nil && s.ctx.Err() == nil {
		s.damaged("%v", err)
		return nil
	}
	return err
}
