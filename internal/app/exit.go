// Package app is what the two programs share: the command line as nats-server
// users type it, logging, start and stop of broker and JetStream engine, the
// admin socket, signals and exit codes. It knows nothing of the hub's own
// packages, so that the edge can link it.
package app

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"petiole/internal/config"
	"petiole/storage"
)

// Exit codes, after sysexits.h where it has one. They are documented in
// README.md and do not change.
const (
	ExitOK          = 0
	ExitFailure     = 1  // anything that has no code of its own
	ExitUsage       = 64 // wrong command line
	ExitUnavailable = 69 // the address or port cannot be listened on; no running server answers
	ExitCannotStore = 73 // the store directory cannot be created, opened or locked
	ExitStorage     = 74 // reading, writing or syncing the store failed; restart recovers
	ExitConfig      = 78 // wrong configuration
)

// Error is an error with the exit code the program ends with because of it.
type Error struct {
	Code int
	Err  error
}

// Error renders the cause.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Exit gives err an exit code. It returns nil for a nil err.
func Exit(code int, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Code: code, Err: err}
}

// ExitCode returns the exit code of a program that ends with err.
func ExitCode(err error) int {
	var e *Error
	var c *config.Error
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &e):
		return e.Code
	case errors.As(err, &c):
		return ExitConfig
	}
	return ExitFailure
}

// storeError explains why the store directory dir could not be opened.
func storeError(dir string, err error) error {
	switch {
	case errors.Is(err, storage.ErrLocked):
		return Exit(ExitCannotStore, fmt.Errorf("store directory %s is %w: stop it, or choose another directory with -sd", dir, storage.ErrLocked))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return Exit(ExitCannotStore, fmt.Errorf("cannot write to store directory %s: let this user write there, or choose another directory with -sd (%w)", dir, err))
	case errors.Is(err, fs.ErrNotExist):
		return Exit(ExitCannotStore, fmt.Errorf("store directory %s can not be made there: choose another one with -sd (%w)", dir, err))
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, fs.ErrExist):
		return Exit(ExitCannotStore, fmt.Errorf("store directory %s is not a directory: choose another one with -sd (%w)", dir, err))
	case errors.Is(err, storage.ErrFormat):
		return Exit(ExitCannotStore, fmt.Errorf("store directory %s has been used by another version of the program, and is left as it is (%w), or choose another directory with -sd", dir, err))
	case errors.Is(err, storage.ErrCorrupt):
		return Exit(ExitStorage, fmt.Errorf("store directory %s holds corrupt data: keep a copy of it, and start with an empty directory or a backup (%w)", dir, err))
	}
	return Exit(ExitStorage, fmt.Errorf("cannot open store directory %s: %w", dir, err))
}

// fileError explains why the file or directory that a setting names cannot be
// written; flag is the setting's on the command line, key that in a file.
func fileError(flag, key, path string, err error) error {
	var pathErr *fs.PathError
	var linkErr *os.LinkError
	switch {
	case errors.As(err, &pathErr):
		err = pathErr.Err
	case errors.As(err, &linkErr):
		err = linkErr.Err
	}
	remedy := "choose another one"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		remedy = "the directory must exist"
	case errors.Is(err, fs.ErrPermission):
		remedy = "let this user write there, or choose another one"
	}
	return Exit(ExitConfig, fmt.Errorf("%s (%s): cannot write %s: %w; %s", flag, key, path, err, remedy))
}

// listenError explains why addr could not be listened on; setting is what
// changes it.
func listenError(addr, setting string, err error) error {
	remedy := "choose another one with " + setting
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		remedy = "another program listens there: stop it, or choose another port with " + setting
	case errors.Is(err, syscall.EACCES):
		remedy = "this user may not listen there: choose a port above 1023 with " + setting
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		remedy = "this machine has no such address: choose another one with -a"
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = errno // the layers above only repeat the address
	}
	return Exit(ExitUnavailable, fmt.Errorf("cannot listen on %s: %w; %s", addr, err, remedy))
}
