package link

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/nats-io/nkeys"

	"petiole/storage"
	"petiole/storage/vfs"
	"petiole/sync/export"
)

// DeviceFile is the name of the device key's file in a store directory.
const DeviceFile = "device.nk"

// ErrDeviceKey says that neither the device key's file nor its copy can be used.
var ErrDeviceKey = errors.New("the device key is damaged")

// copyKey is the place of the copy among the states of exports, whose keys begin
// with the name of a stream.
const copyKey = "/device key"

// LoadDevice returns the device key kept in dir, creating it at the first use:
// a user nkey seed in a file of mode 0600, durable before LoadDevice returns.
// Its public key is the edge id; copying the file clones the edge's identity.
//
// What the file says counts, and kept (nil: nothing) gets a copy of it. A file that is damaged
// is made anew from the copy; without one LoadDevice fails with ErrDeviceKey. A
// file that is missing has been moved away: the edge gets a new identity.
func LoadDevice(dir string, kept export.StateStore, log *slog.Logger) (nkeys.KeyPair, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	name := filepath.Join(dir, DeviceFile)
	seed, err := os.ReadFile(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		kp, err := createDevice(name)
		if err != nil {
			return nil, err
		}
		seed, err := kp.Seed()
		if err != nil {
			return nil, fmt.Errorf("create device key: %w", err)
		}
		return kp, keepCopy(kept, seed, log)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("read device key: %w", err)
	case err != nil:
		return repairDevice(name, kept, fmt.Errorf("read device key: %w", err), log)
	}
	defer clear(seed)
	kp, err := parseDevice(seed)
	if err != nil {
		return repairDevice(name, kept, err, log)
	}
	if st, err := os.Stat(name); err == nil && st.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(name, 0o600); err != nil {
			return nil, fmt.Errorf("device key %s is open to other users: %w", name, err)
		}
		log.Warn("device key was open to other users, its mode is 0600 now", "file", name)
	}
	return kp, keepCopy(kept, bytes.TrimSpace(seed), log)
}

func parseDevice(seed []byte) (nkeys.KeyPair, error) {
	kp, err := nkeys.FromSeed(bytes.TrimSpace(seed))
	if err != nil {
		return nil, err
	}
	pub, err := kp.PublicKey()
	if err == nil && !nkeys.IsValidPublicUserKey(pub) {
		err = errors.New("it is not a user key")
	}
	return kp, err
}

// keepCopy has kept hold the seed. A disk that is full, or a database that is
// damaged, does not keep an edge from its hub: the next start tries again.
func keepCopy(kept export.StateStore, seed []byte, log *slog.Logger) error {
	if kept == nil {
		return nil
	}
	old, err := kept.Get(copyKey)
	defer clear(old)
	if err == nil && bytes.Equal(old, seed) {
		return nil
	}
	if err != nil {
		log.Warn("the copy of the device key is damaged, it is made anew", "err", err)
	}
	if err := kept.Put(copyKey, bytes.Clone(seed)); err != nil {
		if errors.Is(err, storage.ErrFailed) {
			return fmt.Errorf("keep a copy of the device key: %w", err)
		}
		log.Warn("there is no copy of the device key", "err", err)
	}
	return nil
}

// repairDevice makes the file with a name anew from the copy; cause is what is
// wrong with it.
func repairDevice(name string, kept export.StateStore, cause error, log *slog.Logger) (nkeys.KeyPair, error) {
	cause = fmt.Errorf("%w: %s cannot be used: %w", ErrDeviceKey, name, cause)
	remedy := "restore the file from a backup, or move it away to have a new identity created, and start again"
	if kept == nil {
		return nil, fmt.Errorf("%w (%s)", cause, remedy)
	}
	seed, err := kept.Get(copyKey)
	if err != nil {
		return nil, fmt.Errorf("%w, nor can its copy: %w (%s)", cause, err, remedy)
	}
	if seed == nil {
		return nil, fmt.Errorf("%w, and there is no copy of it (%s)", cause, remedy)
	}
	defer clear(seed)
	kp, err := parseDevice(seed)
	if err != nil {
		return nil, fmt.Errorf("%w, nor can its copy: %w (%s)", cause, err, remedy)
	}
	content := append(bytes.Clone(seed), '\n')
	defer clear(content)
	switch err := writeFile(name, content); {
	case err == nil:
		log.Error("the device key's file was damaged and has been made anew from its copy; check the disk", "file", name, "err", cause)
	case vfs.IsNoSpace(err):
		log.Error("the device key's file is damaged, its copy is used; there is no room to make the file anew", "file", name, "err", cause)
	default:
		return nil, fmt.Errorf("make device key anew: %w", err)
	}
	return kp, nil
}

func createDevice(name string) (nkeys.KeyPair, error) {
	kp, err := nkeys.CreateUser()
	if err != nil {
		return nil, fmt.Errorf("create device key: %w", err)
	}
	seed, err := kp.Seed()
	if err != nil {
		return nil, fmt.Errorf("create device key: %w", err)
	}
	// The seed is the key pair's own copy: it must not be cleared, nor grown.
	content := append(append([]byte(nil), seed...), '\n')
	defer clear(content)
	if err := writeFile(name, content); err != nil {
		return nil, fmt.Errorf("create device key: %w", err)
	}
	return kp, nil
}

// writeFile creates name with the content and mode 0600, whole or not at all,
// and durably.
func writeFile(name string, content []byte) (err error) {
	dir := filepath.Dir(name)
	f, err := os.CreateTemp(dir, "."+filepath.Base(name)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if _, err = f.Write(content); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), name); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
