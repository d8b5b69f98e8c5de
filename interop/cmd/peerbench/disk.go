package main

import (
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// disk writes 512 octets of a file and syncs them, one after the other, as a
// log does that has one record at a time to make durable. The file has all its
// blocks, so that only data is written: it is what the disk can do at best.
type disk struct {
	f   *os.File
	buf []byte
	at  int64
}

const diskFile = 4 << 20

func newDisk(dir string) (*disk, error) {
	f, err := os.Create(filepath.Join(dir, "fdatasync.probe"))
	if err != nil {
		return nil, err
	}
	d := &disk{f: f, buf: make([]byte, 512)}
	_, err = f.Write(make([]byte, diskFile))
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *disk) close() {
	name := d.f.Name()
	d.f.Close()
	os.Remove(name)
}

// sync writes and syncs once and returns how long that took.
func (d *disk) sync() (time.Duration, error) {
	start := time.Now()
	if _, err := d.f.WriteAt(d.buf, d.at); err != nil {
		return 0, err
	}
	d.at = (d.at + int64(len(d.buf))) % diskFile
	if err := syscall.Fdatasync(int(d.f.Fd())); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

// bareSyncs returns how many of them a second there are, one at a time.
func bareSyncs(dir string, during time.Duration) (float64, error) {
	d, err := newDisk(dir)
	if err != nil {
		return 0, err
	}
	defer d.close()
	n, start := 0, time.Now()
	for ; time.Since(start) < during; n++ {
		if _, err := d.sync(); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(start).Seconds(), nil
}

// probeDisk returns the median time in microseconds of one of them.
func probeDisk(dir string) (float64, error) {
	d, err := newDisk(dir)
	if err != nil {
		return 0, err
	}
	defer d.close()
	var took []float64
	for range 200 {
		t, err := d.sync()
		if err != nil {
			return 0, err
		}
		took = append(took, float64(t)/1e3)
	}
	return median(took), nil
}
