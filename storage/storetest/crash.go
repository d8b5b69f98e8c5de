package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"

	"petiole/storage"
	"petiole/storage/simbolt"
)

// Crashes lets a durable store live through power cuts, kills and failing
// commits, for as many seeds as the environment's STORE_SEEDS says, else n. After
// each end the store has to be exactly as at one of its checkpoints, the last one
// that succeeded or a later one that did not come to its end, and as before when
// the log is replayed behind that. oldest is the first record that the log has.
func Crashes(t *testing.T, n int, open func(dir string, oldest storage.LSN) (storage.Store, error)) {
	if s, err := strconv.Atoi(os.Getenv("STORE_SEEDS")); err == nil {
		n = s
	}
	if testing.Short() {
		n /= 10
	}
	base := "/dev/shm" // a disk whose syncs cost nothing
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	ends := map[string]int{}
	for seed := range uint64(n) {
		dir, err := os.MkdirTemp(base, "petiole-store-")
		if err != nil {
			t.Fatal(err)
		}
		c := &crashing{seed: seed, dir: dir, open: open, ends: ends, rng: rand.New(rand.NewPCG(seed, 5))}
		ok := t.Run(strconv.FormatUint(seed, 10), c.run)
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
		if !ok {
			return
		}
	}
	if n >= 50 && (ends["cut"] < n || ends["failed"] < n/4 || ends["ahead"] == 0) {
		t.Errorf("too little happened: %v", ends)
	}
}

type crashing struct {
	t    *testing.T
	seed uint64
	dir  string
	open func(dir string, oldest storage.LSN) (storage.Store, error)
	ends map[string]int
	rng  *rand.Rand
	disk *simbolt.Disk

	cur    *naive
	log    []op
	images map[storage.LSN]*naive // what was frozen
	safe   storage.LSN            // last checkpoint that succeeded
	now    int64
	cut    bool
}

func (c *crashing) run(t *testing.T) {
	c.t = t
	c.disk = simbolt.New(c.dir, c.seed)
	defer c.disk.Close()
	c.cur = &naive{kvs: map[string][]byte{}}
	c.images = map[storage.LSN]*naive{0: c.cur.clone()}
	for range 6 {
		c.life()
	}
}

// life opens the store, checks it, uses it, and ends in one way or another.
func (c *crashing) life() {
	rng := c.rng
	c.cut = false
	faulty := false
	switch rng.IntN(4) {
	case 0, 1:
		c.disk.CutAtUpdate(1+rng.IntN(6), func() { c.cut = true })
	case 2:
		faulty = true
		c.disk.FailUpdate(1+rng.IntN(4), simbolt.Fault(rng.IntN(2)), syscall.EIO)
	}
	power := rng.IntN(4) > 0
	s, err := c.open(c.dir, 1)
	if err != nil {
		if !c.cut && !faulty {
			c.t.Fatalf("open: %v", err)
		}
		c.end(nil, power)
		return
	}
	at := s.Applied()
	image := c.images[at]
	switch {
	case image == nil || at < c.safe:
		c.t.Fatalf("the store is at record %d, want %d or a later checkpoint", at, c.safe)
	case at > c.safe:
		c.ends["ahead"]++
	}
	c.safe = at // the log is not needed for what is before that
	image.checkAll(c.t, s)
	image.checkKVs(c.t, s, "")
	c.cur = image.clone()
	for _, o := range c.log[at:] {
		c.perform(s, o)
	}
	c.cur.checkAll(c.t, s)
	for range rng.IntN(60) {
		if c.cut {
			break
		}
		if rng.IntN(8) > 0 {
			o := c.random()
			c.log = append(c.log, o)
			c.perform(s, o)
			continue
		}
		lsn := storage.LSN(len(c.log))
		if c.images[lsn] != nil {
			continue // one position, one image
		}
		kv := storage.KV{Key: "k" + strconv.Itoa(rng.IntN(3)), Value: fmt.Append(nil, "at ", lsn)}
		c.cur.kvs[kv.Key] = kv.Value
		c.images[lsn] = c.cur.clone()
		if !s.Freeze(lsn, []storage.KV{kv}) {
			c.t.Fatalf("freeze at %d is refused", lsn)
		}
		err := s.Checkpoint()
		if c.cut {
			break
		}
		if err != nil {
			if !faulty || !errors.Is(err, syscall.EIO) {
				c.t.Fatalf("checkpoint at %d: %v", lsn, err)
			}
			if err := s.Checkpoint(); err == nil {
				c.t.Fatalf("a checkpoint succeeded after one that failed")
			}
			c.ends["failed"]++
			break
		}
		c.safe = lsn
		c.cur.checkAll(c.t, s)
	}
	c.end(s, power)
}

func (c *crashing) end(s storage.Store, power bool) {
	c.disk.Off()
	if c.cut {
		c.ends["cut"]++
	}
	if s != nil {
		_ = s.Close() // after the power has failed: of no consequence
	}
	end := c.disk.Kill
	if power {
		end = c.disk.PowerCut
	}
	if err := end(); err != nil {
		c.t.Fatal(err)
	}
}

func (c *crashing) perform(s storage.Store, o op) {
	want, wantErr := c.cur.apply(o)
	got, err := perform(s, o)
	if got != want || !errors.Is(err, wantErr) || (err == nil) != (wantErr == nil) {
		c.t.Fatalf("%s = %d, %v, want %d, %v", o.kind, got, err, want, wantErr)
	}
}

func (c *crashing) random() op {
	rng := c.rng
	subject := []string{"a", "b", "p.l1.t", "p.l2.h", "x.y.z.w"}[rng.IntN(5)]
	seq := uint64(1)
	if n := len(c.cur.msgs); n > 0 {
		seq = c.cur.msgs[rng.IntN(n)].Seq
	}
	switch rng.IntN(12) {
	case 0:
		return op{kind: "skip", seq: c.cur.last + uint64(rng.IntN(300))}
	case 1, 2:
		return op{kind: "remove", seq: seq}
	case 3:
		return op{kind: "remove", seq: c.cur.state().First}
	case 4:
		return op{kind: "purge", pattern: subject, keep: uint64(rng.IntN(3))}
	case 5:
		o := op{kind: "purge", upto: seq}
		if rng.IntN(4) == 0 {
			o.upto = 0
		}
		return o
	}
	c.now += rng.Int64N(3)
	size := rng.IntN(1 << rng.IntN(13))
	if rng.IntN(40) == 0 {
		size = rng.IntN(200_000)
	}
	m := storage.Message{Subject: subject, Time: c.now, Data: make([]byte, size)}
	for i := range m.Data {
		m.Data[i] = byte(rng.Uint32())
	}
	if rng.IntN(3) == 0 {
		m.Header = []byte("NATS/1.0\r\nA: b\r\n\r\n")
	}
	return op{kind: "append", msg: m}
}
