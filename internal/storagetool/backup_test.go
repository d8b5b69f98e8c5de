package storagetool

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"petiole/storage/vfs"
)

// kept is contents without what a backup leaves out, by names within the store.
func kept(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for name, b := range contents(t, dir) {
		rel := filepath.ToSlash(must(filepath.Rel(dir, name)))
		if !leftOut(rel) {
			files[rel] = b
		}
	}
	return files
}

// TestBackupAndRestore takes a store there and back, in both forms.
func TestBackupAndRestore(t *testing.T) {
	dir := fill(t, nil)
	for name, text := range map[string]string{
		"streams/0000000000000002/msgs.db.damaged-20260101T000000Z": "parked",
		"wal/0000000000000009.spare":                                "spare",
	} {
		if err := os.WriteFile(filepath.Join(dir, filepath.FromSlash(name)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := kept(t, dir)
	if len(want) < 3 || want["meta.db"] == nil || want["streams/0000000000000002/msgs.db"] == nil {
		t.Fatalf("the store has %v", slices.Sorted(maps.Keys(want)))
	}
	s := open(t, dir)
	for _, directory := range []bool{false, true} {
		to := filepath.Join(t.TempDir(), "copy")
		m, err := s.Backup(t.Context(), to, BackupOptions{Directory: directory, Program: "test"})
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Files) != len(want) || m.Damaged || m.Program != "test" {
			t.Errorf("manifest: %+v", m)
		}
		if left := must(filepath.Glob(to + ".*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		if _, err := s.Backup(t.Context(), to, BackupOptions{}); !errors.Is(err, ErrExists) {
			t.Errorf("over a backup: %v", err)
		}
		for _, target := range []string{filepath.Join(t.TempDir(), "new", "store"), t.TempDir()} {
			got, err := Restore(t.Context(), to, target, RestoreOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got.Files, m.Files) {
				t.Errorf("restored %+v of %+v", got.Files, m.Files)
			}
			if !maps.EqualFunc(want, kept(t, target), bytes.Equal) {
				t.Errorf("restored are %v", slices.Sorted(maps.Keys(kept(t, target))))
			}
			if r := must(open(t, target).Verify()); len(r.Damage) > 0 || r.Messages != perStream-1 {
				t.Errorf("verify: %+v", r)
			}
			if _, err := Restore(t.Context(), to, target, RestoreOptions{}); !errors.Is(err, ErrExists) {
				t.Errorf("over a store: %v", err)
			}
		}
	}
}

// repack changes the members of a backup file.
func repack(t *testing.T, from string, change func(h *tar.Header, b []byte) []byte) string {
	t.Helper()
	z := must(zstd.NewReader(bytes.NewReader(must(os.ReadFile(from)))))
	defer z.Close()
	var out bytes.Buffer
	w := must(zstd.NewWriter(&out))
	tr, tw := tar.NewReader(z), tar.NewWriter(w)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		b := change(h, must(io.ReadAll(tr)))
		if b == nil {
			continue
		}
		h.Size = int64(len(b))
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		must(tw.Write(b))
	}
	if err := errors.Join(tw.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "changed")
	if err := os.WriteFile(to, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestBadBackups puts nothing in place of a backup that is not what was
// written.
func TestBadBackups(t *testing.T) {
	s := open(t, fill(t, nil))
	good := filepath.Join(t.TempDir(), "good")
	must(s.Backup(t.Context(), good, BackupOptions{}))
	goodDir := filepath.Join(t.TempDir(), "dir")
	must(s.Backup(t.Context(), goodDir, BackupOptions{Directory: true}))
	b := must(os.ReadFile(good))
	write := func(b []byte) string {
		p := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(p, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	same := func(_ *tar.Header, b []byte) []byte { return b }
	edit := func(name string, fn func([]byte) []byte) string {
		return repack(t, good, func(h *tar.Header, b []byte) []byte {
			if h.Name == name {
				return fn(b)
			}
			return b
		})
	}
	if _, err := Restore(t.Context(), repack(t, good, same), filepath.Join(t.TempDir(), "s"), RestoreOptions{}); err != nil {
		t.Fatalf("packed anew: %v", err)
	}
	cut := func(dir, name string) string {
		p := filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(p, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(p, filepath.FromSlash(name))); err != nil {
			t.Fatal(err)
		}
		return p
	}
	inDir := func(name string, fn func([]byte) []byte) string {
		p := cut(goodDir, name)
		if err := os.WriteFile(filepath.Join(p, name), fn(must(os.ReadFile(filepath.Join(goodDir, name)))), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	type test struct {
		name, path string
		want       error
	}
	var cases []test
	// Of a small one not even the head may be readable, or it reads as something
	// else. The first octets say that it is compressed.
	const magic = 4
	for i := range 16 {
		flipped := bytes.Clone(b)
		at := magic + i*(len(b)-magic)/16
		flipped[at] ^= 1 << (i % 8)
		end := max(at, magic+2)
		cases = append(cases, test{fmt.Sprint("a flipped bit in octet ", at), write(flipped), ErrBadBackup},
			test{fmt.Sprint("cut short to ", end), write(b[:end]), ErrBadBackup})
	}
	for _, c := range append(cases, []test{
		{"cut at the end", write(b[:len(b)-1]), ErrBadBackup},
		{"empty", write(nil), ErrNotBackup},
		{"something else", write([]byte("#!/bin/sh\n")), ErrNotBackup},
		{"no manifest", edit("manifest.json", func([]byte) []byte { return nil }), ErrBadBackup},
		{"another version", edit("backup.json", func(b []byte) []byte {
			h := backupHead{Petiole: headText, Format: backupFormat + 1}
			h.CRC32C = h.sum()
			return must(json.Marshal(h))
		}), ErrNotBackup},
		{"a version that is damaged", inDir("backup.json", func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"format": 1`), []byte(`"format": 3`), 1)
		}), ErrBadBackup},
		{"another file", edit("store/meta.db", func(b []byte) []byte { b[len(b)/2] ^= 1; return b }), ErrBadBackup},
		{"a longer file", edit("store/meta.db", func(b []byte) []byte { return append(b, 0) }), ErrBadBackup},
		{"a file less", edit("store/meta.db", func([]byte) []byte { return nil }), ErrBadBackup},
		{"a file that leads outside", repack(t, good, func(h *tar.Header, b []byte) []byte {
			if h.Name == "store/meta.db" {
				h.Name = "store/../../meta.db"
			}
			return b
		}), ErrBadBackup},
		{"a link", repack(t, good, func(h *tar.Header, b []byte) []byte {
			if h.Name == "store/meta.db" {
				h.Typeflag, h.Linkname = tar.TypeSymlink, "/etc/passwd"
				return []byte{}
			}
			return b
		}), ErrBadBackup},
		{"a directory without manifest", cut(goodDir, "manifest.json"), ErrBadBackup},
		{"a directory without a file", cut(goodDir, "store/meta.db"), ErrBadBackup},
		{"a directory without head", cut(goodDir, "backup.json"), ErrNotBackup},
		{"nothing", filepath.Join(t.TempDir(), "missing"), ErrNoBackup},
	}...) {
		parent := t.TempDir()
		to := filepath.Join(parent, "store")
		_, err := Restore(t.Context(), c.path, to, RestoreOptions{})
		if err == nil && strings.HasPrefix(c.name, "a flipped bit") && maps.EqualFunc(kept(t, to), kept(t, s.dir), bytes.Equal) {
			continue // one that says nothing: there are such
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if left := must(os.ReadDir(parent)); len(left) > 0 {
			t.Errorf("%s: left behind is %v", c.name, left)
		}
	}
}

// TestBackupOfDamage copies a damaged store only when told to, and says so.
func TestBackupOfDamage(t *testing.T) {
	dir := fill(t, nil)
	meta := filepath.Join(dir, "meta.db")
	b := must(os.ReadFile(meta))
	for i := range b[:4096] {
		b[i] ^= 0x55
	}
	if err := os.WriteFile(meta, b, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	to := filepath.Join(t.TempDir(), "copy")
	if _, err := s.Backup(t.Context(), to, BackupOptions{}); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "meta.db") {
		t.Errorf("refused with %v", err)
	}
	if m := must(s.Backup(t.Context(), to, BackupOptions{Damaged: true})); !m.Damaged {
		t.Errorf("manifest: %+v", m)
	}
	if m := must(Restore(t.Context(), to, filepath.Join(t.TempDir(), "s"), RestoreOptions{})); !m.Damaged {
		t.Errorf("restored: %+v", m)
	}
}

func TestBackupInterrupted(t *testing.T) {
	dir := fill(t, nil)
	s := open(t, dir)
	if _, err := s.Backup(t.Context(), filepath.Join(dir, "wal", "copy"), BackupOptions{}); err == nil {
		t.Error("a backup within the store is accepted")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	parent := t.TempDir()
	if _, err := s.Backup(ctx, filepath.Join(parent, "copy"), BackupOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	if left := must(os.ReadDir(parent)); len(left) > 0 {
		t.Errorf("left behind is %v", left)
	}
}

// TestBackupOfLinks backs up a store of which parts lie elsewhere, behind
// symbolic links, as its directory does: all of it is in the backup.
func TestBackupOfLinks(t *testing.T) {
	dir := fill(t, nil)
	want := kept(t, dir)
	elsewhere := t.TempDir()
	link := filepath.Join(t.TempDir(), "store")
	if err := os.Symlink(dir, link); err != nil {
		t.Skip("no symbolic links here:", err)
	}
	for _, name := range []string{"wal", "streams"} {
		if err := os.Rename(filepath.Join(dir, name), filepath.Join(elsewhere, name)); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(elsewhere, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, link)
	for _, directory := range []bool{false, true} {
		to := filepath.Join(t.TempDir(), "copy")
		if _, err := s.Backup(t.Context(), to, BackupOptions{Directory: directory}); err != nil {
			t.Fatal(err)
		}
		// What is restored through a link is where it leads.
		target := t.TempDir()
		through := filepath.Join(t.TempDir(), "store")
		if err := os.Symlink(target, through); err != nil {
			t.Fatal(err)
		}
		if _, err := Restore(t.Context(), to, through, RestoreOptions{}); err != nil {
			t.Fatal(err)
		}
		if !maps.EqualFunc(want, kept(t, target), bytes.Equal) {
			t.Errorf("restored are %v", slices.Sorted(maps.Keys(kept(t, target))))
		}
	}
	if err := os.Symlink(elsewhere, filepath.Join(elsewhere, "wal", "again")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Backup(t.Context(), filepath.Join(t.TempDir(), "loop"), BackupOptions{}); err == nil {
		t.Error("a link in a circle: no error")
	}
}

// TestRestoreToDanglingLink restores to a link that leads nowhere.
func TestRestoreToDanglingLink(t *testing.T) {
	s := open(t, fill(t, nil))
	to := filepath.Join(t.TempDir(), "copy")
	if _, err := s.Backup(t.Context(), to, BackupOptions{}); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "store")
	if err := os.Symlink(filepath.Join(t.TempDir(), "nowhere"), link); err != nil {
		t.Skip("no symbolic links here:", err)
	}
	if _, err := Restore(t.Context(), to, link, RestoreOptions{}); err == nil || !strings.Contains(err.Error(), "leads nowhere") {
		t.Errorf("restored to a link that leads nowhere: %v", err)
	}
}

// TestChangeLocksCopy changes a store without a lock file: nobody may open it
// meanwhile.
func TestChangeLocksCopy(t *testing.T) {
	for name, change := range map[string]func(*Store) error{
		"compact": func(s *Store) error { _, err := s.Compact(t.Context(), CompactOptions{}); return err },
		"salvage": func(s *Store) error { _, err := s.Salvage(t.Context(), SalvageOptions{}); return err },
	} {
		dir := fill(t, nil)
		if err := os.Remove(filepath.Join(dir, "LOCK")); err != nil {
			t.Fatal(err)
		}
		s := open(t, dir)
		if err := change(s); err != nil {
			t.Fatal(name, err)
		}
		if l, err := vfs.OS.Lock(filepath.Join(dir, "LOCK")); !errors.Is(err, vfs.ErrLocked) {
			t.Errorf("%s: the store is not locked: %v", name, err)
			_ = l
		}
	}
}
