package simtest

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"petiole/storage/simbolt"
	"petiole/storage/vfs"
	"petiole/storage/vfs/simfs"
)

// machine is a computer with one disk: what the log has is in wal, what bbolt
// has in bolt; both are on the same power.
type machine struct {
	dir      string
	rng      *rand.Rand
	spaceRNG *rand.Rand // of its own: a disk that fills up changes nothing else
	wal      *simfs.FS
	bolt     *simbolt.Disk

	broken string // see router

	off atomic.Bool // power cut, or process killed

	mu     sync.Mutex
	ops    int // of the log's disk, in this life
	cutAt  int // operation to cut at; 0: none
	failAt int // operation to fail
	failOp func(simfs.Op) bool
	err    error // what it fails with
	fault  bool  // has failed, or is going to
	lazy   int   // how many times an operation yields
	callAt int   // operation to call call at
	call   func()
	what   string // the last thing that was made to happen

	// The disk is full from operation fullAt of the workload until roomAt (0: it
	// is not in this life). wasFull stays until the next life.
	fullAt, roomAt int
	full, wasFull  atomic.Bool
	roomSince      time.Time
}

// fillUp decides whether, and when, the disk is full in this life.
func (m *machine) fillUp() {
	m.full.Store(false)
	m.wasFull.Store(false)
	m.wal.SetCapacity(0)
	m.bolt.SetFull(nil)
	m.fullAt, m.roomAt = 0, 0
	if *flagFull && m.spaceRNG.IntN(3) == 0 {
		m.fullAt = 1 + m.spaceRNG.IntN(40)
		m.roomAt = m.fullAt + 1 + m.spaceRNG.IntN(30)
	}
}

// space fills the disk, or makes room, when operation n of the workload begins.
func (m *machine) space(n int) {
	switch n {
	case m.fullAt:
		m.full.Store(true)
		m.wasFull.Store(true)
		m.wal.SetCapacity(max(m.wal.Used()+m.spaceRNG.Int64N(32<<10), 1))
		m.bolt.SetFull(&fs.PathError{Op: "write", Path: "file", Err: syscall.ENOSPC})
	case m.roomAt:
		m.makeRoom()
	}
}

func (m *machine) makeRoom() {
	m.wal.SetCapacity(0)
	m.bolt.SetFull(nil)
	m.full.Store(false)
	m.roomSince = time.Now()
}

func newMachine(t *testing.T, seed uint64) *machine {
	base := "/dev/shm" // bbolt's syncs cost nothing there
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "petiole-sim-")
	if err != nil {
		t.Fatal(err)
	}
	store := filepath.Join(dir, "store")
	if err := os.Mkdir(store, 0o700); err != nil {
		t.Fatal(err)
	}
	m := &machine{
		dir: store, rng: rand.New(rand.NewPCG(seed, 3)), spaceRNG: rand.New(rand.NewPCG(seed, 5)), wal: simfs.New(seed), bolt: simbolt.New(store, seed),
	}
	return m
}

// close removes what the machine has on the real disk, which is memory: that of
// thousands of seeds would not fit.
func (m *machine) close() {
	m.bolt.Close()
	_ = os.RemoveAll(filepath.Dir(m.dir))
}

func (m *machine) fs() vfs.FS {
	return &router{dir: m.dir, mem: m.wal, real: vfs.OS, bolt: m.bolt, broken: m.broken}
}

// boot begins a life.
func (m *machine) boot() {
	m.off.Store(false)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ops, m.cutAt, m.failAt, m.callAt, m.what, m.fault = 0, 0, 0, 0, "", false
	m.lazy = []int{0, 0, 3, 20}[m.rng.IntN(4)]
	m.wal.SetHook(m.hook)
	m.fillUp()
}

// hook sees every change of the log's disk.
func (m *machine) hook(op simfs.Op, name string) error {
	if m.off.Load() {
		return simfs.ErrPowerOff
	}
	for range m.lazy {
		runtime.Gosched() // a slow disk: others come in between
	}
	m.mu.Lock()
	m.ops++
	cut := m.cutAt > 0 && m.ops >= m.cutAt
	slow := m.callAt > 0 && m.ops >= m.callAt
	call := m.call
	if slow {
		m.call = nil
	}
	var err error
	if m.failAt > 0 && m.ops >= m.failAt && (m.failOp == nil || m.failOp(op)) {
		m.failAt, err, m.fault = 0, m.err, true
		m.what = fmt.Sprintf("%s %s: %v", opName(op), name, err)
	}
	if cut {
		m.what = fmt.Sprintf("cut at %s %s", opName(op), name)
	}
	m.mu.Unlock()
	if slow && call != nil {
		call()
	}
	if slow && op == simfs.OpWrite { // with others the log holds locks that are waited for
		time.Sleep(time.Millisecond) // what was called comes as far as it can without this disk
	}
	if cut {
		m.powerOff()
		return simfs.ErrPowerOff
	}
	return err
}

func opName(op simfs.Op) string {
	names := []string{"create", "write", "truncate", "preallocate", "sync", "rename", "remove", "syncdir"}
	if int(op) < len(names) {
		return names[op]
	}
	return fmt.Sprint("operation ", int(op))
}

// powerOff ends everything at once. It may be called from within an operation.
func (m *machine) powerOff() {
	if m.off.Swap(true) {
		return
	}
	m.bolt.Off()
}

// plan decides how this life ends, if not by its own end.
func (m *machine) plan(kind string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.ops + 1 + m.rng.IntN(1<<m.rng.IntN(9))
	switch kind {
	case "cut":
		m.cutAt = n
	case "bolt":
		m.bolt.CutAtUpdate(1+m.rng.IntN(1<<m.rng.IntN(6)), func() {
			m.mu.Lock()
			m.what = "cut within a commit of bbolt"
			m.mu.Unlock()
			m.powerOff()
		})
	case "eio":
		m.failAt, m.failOp, m.err = n, nil, syscall.EIO
	case "sync":
		m.failAt, m.err = m.ops+1+m.rng.IntN(40), syscall.EIO
		m.failOp = func(op simfs.Op) bool { return op == simfs.OpSync || op == simfs.OpSyncDir }
	case "bolteio":
		m.fault = true
		m.bolt.FailUpdate(1+m.rng.IntN(1<<m.rng.IntN(5)), simbolt.Fault(m.rng.IntN(2)), syscall.EIO)
	}
}

// cutWithin has the power fail at one of the next n operations.
func (m *machine) cutWithin(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cutAt = m.ops + 1 + m.rng.IntN(n)
}

// callWithin has f called at one of the next n operations; from then on others
// come as far as they can before each write, until stop is called. It is not for a
// log that is synced later: that one holds a lock when it does.
func (m *machine) callWithin(n int, f func()) (stop func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.callAt, m.call = m.ops+1+m.rng.IntN(n), f
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.callAt, m.call = 0, nil
	}
}

// next makes the disk what is found after the end of a life; nothing may use it
// any more.
func (m *machine) next(power bool) error {
	m.powerOff()
	m.wal.SetHook(nil)
	if power {
		m.wal = m.wal.PowerCut()
		return m.bolt.PowerCut()
	}
	m.wal = m.wal.Kill()
	return m.bolt.Kill()
}

// watchdog ends the test if a seed takes longer than anything but a deadlock of
// locks does, which synctest does not see. It runs outside of the bubble.
func watchdog(seed uint64, limit time.Duration) (stop func() bool) {
	return time.AfterFunc(limit, func() {
		panic(fmt.Sprintf("seed %d does not end", seed)) // with all stacks
	}).Stop
}
