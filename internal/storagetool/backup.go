package storagetool

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"petiole/storage/vfs"
	"petiole/sync/link"
)

// A backup is all files of a store directory, with a manifest of their lengths
// and hashes at the end, in one of two forms:
//
//	file       tar, compressed by zstd:  backup.json  store/meta.db  store/wal/…  …  manifest.json
//	directory  DIR/                      backup.json  store/meta.db  store/wal/…  …  manifest.json
//
// backup.json says the version of the format, with a checksum over it, so that a
// program that does not know it says so at once, and takes no damage for another.
// A backup without manifest.json is not complete.
const (
	backupFormat = 1
	headName     = "backup.json"
	manifestName = "manifest.json"
	storePrefix  = "store/"
	// maxDocument bounds the two documents: 8 million files would fit.
	maxDocument = 1 << 30
	// maxWindow is the most that a compressed backup may want a reader to
	// remember; ours want 8 MiB.
	maxWindow = 64 << 20
)

// Errors of backups; they are wrapped with what was being done to what.
var (
	// ErrExists says that where something is to go there is something already.
	ErrExists = errors.New("there is something already")
	// ErrNotBackup says that a file or directory is no backup that this
	// program version can read.
	ErrNotBackup = errors.New("not a backup made by `storage backup`")
	// ErrNoBackup says that there is nothing under the name of a backup.
	ErrNoBackup = errors.New("there is no backup")
	// ErrOtherProgram says that a backup is of a store of the other program.
	ErrOtherProgram = errors.New("the backup is of another program's store")
	// ErrBadBackup says that a backup is not what was written: damaged, cut
	// short, or changed.
	ErrBadBackup = errors.New("the backup is damaged")
	// ErrDamaged says that the store, or the one in a backup, is damaged.
	ErrDamaged = errors.New("the store is damaged")
)

type backupHead struct {
	Petiole string `json:"petiole"` // "store backup"
	Format  int    `json:"format"`
	CRC32C  string `json:"crc32c"` // see sum; these three stay the same in all formats
}

const headText = "store backup"

// sum returns the checksum of the other fields.
func (h *backupHead) sum() string {
	text := fmt.Sprintf("%s %d", h.Petiole, h.Format)
	return fmt.Sprintf("%08x", crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli)))
}

// Manifest says what a backup holds.
type Manifest struct {
	Format   int          `json:"format"`
	Created  time.Time    `json:"created"`
	Program  string       `json:"program"`   // version that made it
	Owner    string       `json:"owner"`     // program whose store it is: "edge" or "hub"
	StoreDir string       `json:"store_dir"` // where the store was
	Damaged  bool         `json:"damaged"`   // the store was, and was copied all the same
	Files    []BackupFile `json:"files"`
}

// BackupFile is one file of a store.
type BackupFile struct {
	Name   string `json:"name"` // within the store directory, with slashes
	Size   int64  `json:"size"`
	Mode   uint32 `json:"mode"` // permission bits
	SHA256 string `json:"sha256"`
}

// Bytes sums up the files.
func (m *Manifest) Bytes() (n int64) {
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

// BackupOptions tune Backup.
type BackupOptions struct {
	// Directory makes the backup a directory instead of one file.
	Directory bool
	// Damaged copies a damaged store too, as it is; it is refused otherwise.
	Damaged bool
	// Program is the version of the program, for the manifest.
	Program string
	// Owner is the program whose store it is, edge or hub, as far as the store
	// does not tell by itself.
	Owner string
}

// Backup copies the store to the path to, where nothing may be yet. It appears
// there only when it is complete and on disk. All of the store is verified
// first: a damaged one is refused with ErrDamaged, unless o says otherwise.
// What belongs to no one (spare segments of the log, files parked by repairs)
// is not part of it. The device key is: whoever has the backup can be the edge.
func (s *Store) Backup(ctx context.Context, to string, o BackupOptions) (*Manifest, error) {
	fail := func(err error) (*Manifest, error) { return nil, fmt.Errorf("back up %s to %s: %w", s.dir, to, err) }
	if _, err := os.Lstat(to); err == nil {
		return fail(fmt.Errorf("%w; choose another name, or move it away", ErrExists))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fail(err)
	}
	if parent := filepath.Dir(to); !isDir(parent) {
		return fail(&noDirError{parent})
	}
	if rel, err := filepath.Rel(abs(s.dir), abs(to)); err == nil && filepath.IsLocal(rel) {
		return fail(errors.New("it would be within the store itself"))
	}
	r, err := s.Verify()
	if err != nil {
		return fail(err)
	}
	if len(r.Damage) > 0 && !o.Damaged {
		d, more := r.Damage[0], ""
		if n := len(r.Damage) - 1; n > 0 {
			more = fmt.Sprintf(" (and %d more: %s tells of all)", n, s.command("verify"))
		}
		return fail(fmt.Errorf("%w: %s: %s%s; %s", ErrDamaged, d.File, d.Problem, more, d.Remedy))
	}
	files, err := s.backupFiles()
	if err != nil {
		return fail(err)
	}
	m := &Manifest{
		Format: backupFormat, Created: time.Now().UTC().Truncate(time.Second), Program: o.Program,
		StoreDir: abs(s.dir), Damaged: len(r.Damage) > 0, Files: []BackupFile{},
	}
	if m.Owner = o.Owner; slices.Contains(files, deviceKey) {
		m.Owner = "edge" // no other program makes one
	}
	tmp := to + partialMark + random()
	var w backupWriter
	if o.Directory {
		w, err = newDirWriter(tmp)
	} else {
		w, err = newTarWriter(tmp)
	}
	if err != nil {
		return fail(err)
	}
	err = s.backup(ctx, w, m, files)
	if err = errors.Join(err, w.close()); err == nil {
		err = os.Rename(tmp, to)
	}
	if err != nil {
		return fail(errors.Join(err, os.RemoveAll(tmp)))
	}
	if err := vfs.OS.SyncDir(filepath.Dir(to)); err != nil {
		return fail(err)
	}
	return m, nil
}

// deviceKey is the name of the file with an edge's key.
const deviceKey = link.DeviceFile

// noDirError says that the directory a backup is to go to does not exist;
// errors.Is(err, fs.ErrNotExist) holds.
type noDirError struct{ dir string }

func (e *noDirError) Error() string {
	return fmt.Sprintf("the directory %s does not exist; make it, or choose another place", e.dir)
}

func (e *noDirError) Unwrap() error { return fs.ErrNotExist }

// isDir reports whether dir is a directory, or may be one: only what is known
// not to exist is none.
func isDir(dir string) bool {
	_, err := os.Stat(dir)
	return !errors.Is(err, fs.ErrNotExist)
}

func (s *Store) backup(ctx context.Context, w backupWriter, m *Manifest, files []string) error {
	head := backupHead{Petiole: headText, Format: backupFormat}
	head.CRC32C = head.sum()
	if err := addDocument(w, headName, head, m.Created); err != nil {
		return err
	}
	for _, name := range files {
		if err := ctx.Err(); err != nil {
			return err
		}
		f, err := os.Open(filepath.Join(s.dir, filepath.FromSlash(name)))
		if err != nil {
			return err
		}
		entry, err := addFile(w, name, f)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("copy %s: %w", name, err)
		}
		m.Files = append(m.Files, entry)
	}
	return addDocument(w, manifestName, m, m.Created)
}

func addFile(w backupWriter, name string, f *os.File) (BackupFile, error) {
	fi, err := f.Stat()
	if err != nil {
		return BackupFile{}, err
	}
	h := sha256.New()
	// The store is locked: its files do not grow.
	err = w.add(storePrefix+name, fi.Size(), fi.Mode().Perm(), fi.ModTime(), io.TeeReader(io.LimitReader(f, fi.Size()), h))
	return BackupFile{Name: name, Size: fi.Size(), Mode: uint32(fi.Mode().Perm()), SHA256: hex.EncodeToString(h.Sum(nil))}, err
}

func addDocument(w backupWriter, name string, v any, at time.Time) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	return w.add(name, int64(len(b)), 0o600, at, bytes.NewReader(b))
}

// backupFiles returns the names of the files that a store is made of, sorted.
func (s *Store) backupFiles() ([]string, error) {
	var files []string
	err := s.walk(func(name string, fi fs.FileInfo) error {
		switch {
		case (name == "parked" || name == "streams/parked") && fi.IsDir():
			return fs.SkipDir
		case !fi.Mode().IsRegular():
			// Sockets come back with the program.
		case leftOut(name):
		default:
			files = append(files, name)
		}
		return nil
	})
	slices.Sort(files)
	return files, err
}

// leftOut reports whether a file holds nothing that a store is made of.
func leftOut(name string) bool {
	base := path.Base(name)
	switch path.Ext(base) {
	case ".spare", ".new":
		return true
	}
	return base == "LOCK" || base == "ballast" || strings.Contains(base, ".damaged-") || slices.Contains([]string{".compact", ".repair", ".fresh", ".salvaged"}, path.Ext(base))
}

func random() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func abs(p string) string {
	if a, err := filepath.Abs(p); err == nil {
		p = a
	}
	return p
}

// backupWriter is one form of a backup being written. close makes what has
// been added durable.
type backupWriter interface {
	add(name string, size int64, mode fs.FileMode, at time.Time, r io.Reader) error
	close() error
}

type tarWriter struct {
	f  *os.File
	b  *bufio.Writer
	z  *zstd.Encoder
	tw *tar.Writer
}

func newTarWriter(name string) (*tarWriter, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	b := bufio.NewWriterSize(f, 1<<20)
	z, err := zstd.NewWriter(b, zstd.WithEncoderCRC(true))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &tarWriter{f, b, z, tar.NewWriter(z)}, nil
}

func (w *tarWriter) add(name string, size int64, mode fs.FileMode, at time.Time, r io.Reader) error {
	err := w.tw.WriteHeader(&tar.Header{
		Name: name, Size: size, Mode: int64(mode), ModTime: at, Typeflag: tar.TypeReg, Format: tar.FormatPAX,
	})
	if err != nil {
		return err
	}
	_, err = io.Copy(w.tw, r)
	return err
}

func (w *tarWriter) close() error {
	return errors.Join(w.tw.Close(), w.z.Close(), w.b.Flush(), w.f.Sync(), w.f.Close())
}

type dirWriter struct {
	root string
	dirs map[string]bool // that files have been made in
}

func newDirWriter(root string) (*dirWriter, error) {
	if err := os.Mkdir(root, 0o700); err != nil {
		return nil, err
	}
	return &dirWriter{root, map[string]bool{root: true}}, nil
}

func (w *dirWriter) add(name string, size int64, mode fs.FileMode, _ time.Time, r io.Reader) error {
	p := filepath.Join(w.root, filepath.FromSlash(name))
	for dir := filepath.Dir(p); !w.dirs[dir]; dir = filepath.Dir(dir) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		w.dirs[dir] = true
	}
	f, err := os.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, r)
	if err == nil && n != size {
		err = io.ErrUnexpectedEOF
	}
	return errors.Join(err, f.Sync(), f.Close())
}

func (w *dirWriter) close() error {
	var errs []error
	for dir := range w.dirs {
		errs = append(errs, vfs.OS.SyncDir(dir))
	}
	return errors.Join(errs...)
}

// RestoreOptions tune Restore.
type RestoreOptions struct {
	// Program is the program whose store it is to be, edge or hub: a backup of
	// the other's is refused with ErrOtherProgram. Empty: either.
	Program string
}

// Restore puts the store in a backup at the path from, of either form, into the
// directory dir, which must be empty or not exist. Everything is unpacked beside
// it, compared with the manifest, and verified as Verify does, and only then put
// in place: after an error dir is as it was.
//
// An edge whose store is older than what its hub has got from it finds that out
// by itself when it connects, and goes on from the last point that both agree
// on (see sync/export).
func Restore(ctx context.Context, from, dir string, o RestoreOptions) (*Manifest, error) {
	fail := func(err error) (*Manifest, error) { return nil, fmt.Errorf("restore %s to %s: %w", from, dir, err) }
	dir = abs(dir)
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real // a link stays, and what it leads to is filled
	} else if fi, lerr := os.Lstat(dir); lerr == nil && fi.Mode()&fs.ModeSymlink != 0 {
		return fail(fmt.Errorf("the link leads nowhere, make the directory first: %w", err))
	}
	entries, err := os.ReadDir(dir)
	switch {
	case err == nil && len(entries) > 0:
		return fail(fmt.Errorf("%w: %s is not empty, move it away first", ErrExists, dir))
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fail(err)
	}
	exists := err == nil
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return fail(err)
	}
	tmp := dir + restoringMark + random()
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fail(err)
	}
	m, err := restoreTo(ctx, from, tmp)
	if err == nil && m.Owner != "" && o.Program != "" && m.Owner != o.Program {
		err = fmt.Errorf("%w: it was made of the store of %s; restore it with `%s storage restore`", ErrOtherProgram, m.Owner, m.Owner)
	}
	if errors.Is(err, ErrBadBackup) {
		err = fmt.Errorf("%w; take another copy; nothing has been put in place", err)
	}
	if err != nil {
		return fail(errors.Join(err, os.RemoveAll(tmp)))
	}
	if err := putInPlace(tmp, dir, exists); err != nil {
		return fail(errors.Join(err, os.RemoveAll(tmp)))
	}
	return m, nil
}

// putInPlace makes tmp the directory dir, which is empty if it exists.
func putInPlace(tmp, dir string, exists bool) error {
	if exists {
		if fi, err := os.Stat(dir); err == nil {
			if err := os.Chmod(tmp, fi.Mode().Perm()); err != nil {
				return err
			}
		}
		if err := os.Remove(dir); err != nil {
			return fmt.Errorf("replace the empty directory (if a file system is mounted there, name a directory in it): %w", err)
		}
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	return vfs.OS.SyncDir(filepath.Dir(dir))
}

func restoreTo(ctx context.Context, from, tmp string) (*Manifest, error) {
	fi, err := os.Stat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w %s; check its name", ErrNoBackup, from)
	}
	if err != nil {
		return nil, err
	}
	var r backupReader
	if fi.IsDir() {
		r, err = newDirReader(from)
	} else {
		r, err = newTarReader(from)
	}
	if err != nil {
		return nil, err
	}
	m, err := unpack(ctx, r, tmp)
	err = errors.Join(err, r.close())
	if errors.Is(err, ErrNotBackup) {
		return nil, fmt.Errorf("%s is %w", from, err)
	}
	if err != nil {
		return nil, err
	}
	s, err := Open(tmp)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadBackup, err)
	}
	report, err := s.Verify()
	if err = errors.Join(err, s.Close()); err != nil {
		return nil, err
	}
	if len(report.Damage) > 0 && !m.Damaged {
		return nil, fmt.Errorf("%w: the store in it is damaged: %s", ErrBadBackup, report.Damage[0].Problem)
	}
	return m, nil
}

// unpack writes the files into tmp and compares them with the manifest.
func unpack(ctx context.Context, r backupReader, tmp string) (*Manifest, error) {
	w := &dirWriter{tmp, map[string]bool{tmp: true}}
	found := map[string]BackupFile{}
	var m *Manifest
	for first := true; ; first = false {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		name, size, mode, data, err := r.next()
		if first {
			if err := isHead(name, size, data, err); err != nil {
				// Damage may make it look like something else.
				if bad := r.rest(); damaged(bad) {
					if early(bad) {
						return nil, fmt.Errorf("%w: %w", ErrBadBackup, errEarly)
					}
					return nil, fmt.Errorf("%w: its beginning cannot be read: %w", ErrBadBackup, bad)
				}
				var version *versionError
				switch {
				case errors.Is(err, ErrBadBackup):
					return nil, err
				case errors.As(err, &version):
					return nil, fmt.Errorf("%w that this program knows: %w", ErrNotBackup, err)
				}
				return nil, ErrNotBackup
			}
			continue
		}
		switch {
		case errors.Is(err, io.EOF) && m == nil:
			return nil, fmt.Errorf("%w: it ends before its manifest", ErrBadBackup)
		case early(err):
			return nil, fmt.Errorf("%w: %w", ErrBadBackup, errEarly)
		case errors.Is(err, io.EOF):
			return m, compare(m, found, w)
		case err != nil:
			return nil, fmt.Errorf("%w: %w", ErrBadBackup, err)
		case m != nil:
			return nil, fmt.Errorf("%w: there is something behind its manifest", ErrBadBackup)
		case name == manifestName:
			m = &Manifest{}
			if size > maxDocument {
				return nil, fmt.Errorf("%w: its manifest is too large", ErrBadBackup)
			}
			if err := json.NewDecoder(data).Decode(m); early(err) {
				return nil, fmt.Errorf("%w: %w", ErrBadBackup, errEarly)
			} else if err != nil {
				return nil, fmt.Errorf("%w: its manifest makes no sense: %w", ErrBadBackup, err)
			}
		default:
			rel, ok := strings.CutPrefix(name, storePrefix)
			if !ok || !filepath.IsLocal(filepath.FromSlash(rel)) || rel != path.Clean(rel) || leftOut(rel) {
				return nil, fmt.Errorf("%w: it holds a file %q", ErrBadBackup, name)
			}
			if _, twice := found[rel]; twice {
				return nil, fmt.Errorf("%w: it holds %q twice", ErrBadBackup, name)
			}
			h := sha256.New()
			in := &noting{r: data}
			if err := w.add(rel, size, mode.Perm()|0o600, time.Time{}, io.TeeReader(in, h)); early(in.err) {
				return nil, fmt.Errorf("%w: %w", ErrBadBackup, errEarly)
			} else if in.err != nil {
				return nil, fmt.Errorf("%w: %s: %w", ErrBadBackup, rel, in.err)
			} else if err != nil {
				return nil, fmt.Errorf("unpack %s: %w", rel, err)
			}
			found[rel] = BackupFile{Name: rel, Size: size, Mode: uint32(mode.Perm()), SHA256: hex.EncodeToString(h.Sum(nil))}
		}
	}
}

// isHead says why the first entry of what should be a backup, or the error in
// its place, is not that of one.
func isHead(name string, size int64, data io.Reader, err error) error {
	if err != nil || name != headName || size > maxDocument {
		return fmt.Errorf("it does not begin with %s: %w", headName, errOr(err))
	}
	var h backupHead
	if err := json.NewDecoder(data).Decode(&h); err != nil || h.Petiole != headText {
		return fmt.Errorf("%s makes no sense: %w", headName, errOr(err))
	}
	if h.CRC32C != h.sum() {
		return fmt.Errorf("%w: %s fails its checksum", ErrBadBackup, headName)
	}
	if h.Format != backupFormat {
		return &versionError{h.Format}
	}
	return nil
}

// versionError says that a backup is of a format that this program version does
// not know.
type versionError struct{ format int }

func (e *versionError) Error() string {
	return fmt.Sprintf("it is of format %d, this program version knows format %d", e.format, backupFormat)
}

var errEarly = errors.New("the file ends early")

// early reports whether err, of reading a compressed file, says that it has been
// cut short.
func early(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }

// noting keeps the error that a reader returns, to be told from one of whoever
// writes elsewhere what it reads.
type noting struct {
	r   io.Reader
	err error
}

func (n *noting) Read(b []byte) (int, error) {
	k, err := n.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		n.err = err
	}
	return k, err
}

func errOr(err error) error {
	if err == nil {
		return errors.New("it is something else")
	}
	return err
}

// compare compares what has been unpacked with the manifest.
func compare(m *Manifest, found map[string]BackupFile, w *dirWriter) error {
	if m.Format != backupFormat {
		return fmt.Errorf("%w: its manifest is of format %d", ErrBadBackup, m.Format)
	}
	if len(m.Files) != len(found) {
		return fmt.Errorf("%w: it holds %d files, its manifest names %d", ErrBadBackup, len(found), len(m.Files))
	}
	for _, f := range m.Files {
		if g := found[f.Name]; g.Size != f.Size || g.SHA256 != f.SHA256 || g.Name != f.Name {
			return fmt.Errorf("%w: %s is not what its manifest says", ErrBadBackup, f.Name)
		}
	}
	return w.close()
}

// backupReader is one form of a backup being read; next returns io.EOF at the
// end. data ends after size octets, or with an error. rest reads to the end,
// whatever is there, and returns an error if it is damaged as far as it can be
// told without understanding it; there is no next after that.
type backupReader interface {
	next() (name string, size int64, mode fs.FileMode, data io.Reader, err error)
	rest() error
	close() error
}

type tarReader struct {
	f  *os.File
	z  *zstd.Decoder
	tr *tar.Reader
}

func newTarReader(name string) (*tarReader, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	z, err := zstd.NewReader(bufio.NewReaderSize(f, 1<<20), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &tarReader{f, z, tar.NewReader(z)}, nil
}

func (r *tarReader) next() (string, int64, fs.FileMode, io.Reader, error) {
	h, err := r.tr.Next()
	if errors.Is(err, io.EOF) {
		// To the end, for the checksum there.
		if n, zerr := io.Copy(io.Discard, r.z); zerr != nil || n > 1<<20 {
			err = errors.Join(errors.New("behind its end"), zerr)
		}
	}
	if err != nil {
		return "", 0, 0, nil, err
	}
	if h.Typeflag != tar.TypeReg {
		return "", 0, 0, nil, fmt.Errorf("%q is not a file", h.Name)
	}
	return h.Name, h.Size, fs.FileMode(h.Mode).Perm(), r.tr, nil
}

func (r *tarReader) rest() error {
	_, err := io.Copy(io.Discard, r.z) // its checksum is at the end
	return err
}

func (r *tarReader) close() error {
	r.z.Close()
	return r.f.Close()
}

// dirReader reads the form of a directory in the order of that of a file.
type dirReader struct {
	root  string
	names []string
	cur   *os.File
}

// damaged reports whether err, of reading a compressed file to its end, is of
// one that began as such.
func damaged(err error) bool { return err != nil && !errors.Is(err, zstd.ErrMagicMismatch) }

func newDirReader(root string) (*dirReader, error) {
	r := &dirReader{root: root, names: []string{headName}}
	err := filepath.WalkDir(filepath.Join(root, "store"), func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, p)
		r.names = append(r.names, filepath.ToSlash(rel))
		return err
	})
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%s is %w", root, ErrNotBackup)
		}
		return nil, fmt.Errorf("read %s: %w", root, err)
	}
	if _, err := os.Lstat(filepath.Join(root, manifestName)); err == nil {
		r.names = append(r.names, manifestName)
	}
	return r, nil
}

func (r *dirReader) next() (string, int64, fs.FileMode, io.Reader, error) {
	if err := r.close(); err != nil {
		return "", 0, 0, nil, err
	}
	if len(r.names) == 0 {
		return "", 0, 0, nil, io.EOF
	}
	name := r.names[0]
	r.names = r.names[1:]
	p := filepath.Join(r.root, filepath.FromSlash(name))
	fi, err := os.Lstat(p)
	if err != nil {
		return "", 0, 0, nil, err
	}
	if !fi.Mode().IsRegular() {
		return "", 0, 0, nil, fmt.Errorf("%q is not a file", name)
	}
	if r.cur, err = os.Open(p); err != nil {
		return "", 0, 0, nil, err
	}
	return name, fi.Size(), fi.Mode().Perm(), io.LimitReader(r.cur, fi.Size()), nil
}

func (r *dirReader) rest() error { return nil }

func (r *dirReader) close() error {
	f := r.cur
	if r.cur = nil; f == nil {
		return nil
	}
	return f.Close()
}
