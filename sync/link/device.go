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
)

// DeviceFile is the name of the device key's file in a store directory.
const DeviceFile = "device.nk"

// LoadDevice returns the device key kept in dir, creating it at the first use:
// a user nkey seed in a file of mode 0600, durable before LoadDevice returns.
// Its public key is the edge id; copying the file clones the edge's identity.
func LoadDevice(dir string, log *slog.Logger) (nkeys.KeyPair, error) {
	name := filepath.Join(dir, DeviceFile)
	seed, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return createDevice(name)
	}
	if err != nil {
		return nil, fmt.Errorf("read device key: %w", err)
	}
	defer clear(seed)
	kp, err := nkeys.FromSeed(bytes.TrimSpace(seed))
	if err == nil {
		var pub string
		if pub, err = kp.PublicKey(); err == nil && !nkeys.IsValidPublicUserKey(pub) {
			err = errors.New("it is not a user key")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("device key %s cannot be used: %w (restore it from a backup, or move it away to have a new identity created)", name, err)
	}
	if st, err := os.Stat(name); err == nil && st.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(name, 0o600); err != nil {
			return nil, fmt.Errorf("device key %s is open to other users: %w", name, err)
		}
		if log != nil {
			log.Warn("device key was open to other users, its mode is 0600 now", "file", name)
		}
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
