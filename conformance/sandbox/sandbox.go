// Package sandbox runs a program that nobody trusts with the machine: the
// clean-up of test suites removes directories, and has been known to remove
// too many.
//
// Whoever starts it, the program is never root, and it runs in namespaces of
// its own: all file systems are read-only but for one directory, the only
// network is a loopback interface that nobody else sees, and no process outside
// can be signalled. Everything in there ends when the program does. Where the
// system does not allow that (it takes Linux and root, or user namespaces),
// nothing is run at all.
package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Nobody is the user and group that programs run as when root starts them.
const Nobody = 65534

// ErrUnsafe is the error of a machine on which a program cannot be confined.
var ErrUnsafe = errors.New("programs cannot be confined here: start as root, or allow user namespaces")

// Spec is what is to run.
type Spec struct {
	// Self is a copy of the executable that calls Main, readable by everybody.
	Self string
	// Dir is the directory that may be written, working directory and home at
	// once. It is given to the user that the program runs as.
	Dir string
	// Args are handed to the function that Main was given.
	Args []string
	// Env is added to an environment that holds HOME, TMPDIR and PATH only.
	Env []string
	// Stdout and Stderr may be nil.
	Stdout, Stderr io.Writer
}

// stageVar tells a new process of this executable what it is for.
const stageVar = "PETIOLE_SANDBOX_STAGE"

const (
	stageInit    = "init"    // in new namespaces, still with all rights
	stageProgram = "program" // the program itself
)

// order is what the stages tell each other, as JSON in an environment variable.
type order struct {
	Dir  string   `json:"dir"`
	Args []string `json:"args"`
	Env  []string `json:"env"`
	Root bool     `json:"root"`
}

const orderVar = "PETIOLE_SANDBOX_ORDER"

func (o *order) environ(stage string) ([]string, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("order for the sandbox: %w", err)
	}
	return append([]string{
		stageVar + "=" + stage, orderVar + "=" + string(text),
		"HOME=" + o.Dir, "TMPDIR=" + filepath.Join(o.Dir, "tmp"), "PATH=/usr/local/bin:/usr/bin:/bin",
	}, o.Env...), nil
}

// Main has to be the first thing that a program does whose executable is a
// Spec's Self. In the sandbox it calls program with the Spec's Args and exits
// with what that returns; elsewhere it does nothing.
func Main(program func(args []string) int) {
	stage := os.Getenv(stageVar)
	if stage == "" {
		return
	}
	var o order
	err := json.Unmarshal([]byte(os.Getenv(orderVar)), &o)
	for _, name := range []string{stageVar, orderVar} {
		err = errors.Join(err, os.Unsetenv(name))
	}
	code := 1
	if err == nil {
		switch stage {
		case stageInit:
			code, err = initStage(&o)
		case stageProgram:
			if err = check(&o); err == nil {
				code = program(o.Args)
			}
		default:
			err = fmt.Errorf("unknown stage %q", stage)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		code = 1
	}
	os.Exit(code)
}

// check makes sure that the program's process is as harmless as it should be.
func check(o *order) error {
	if os.Getuid() == 0 || os.Geteuid() == 0 {
		return errors.New("still root: refusing to go on")
	}
	for _, dir := range []string{"/", "/usr", "/etc", "/root", "/tmp", "/dev/shm", filepath.Dir(o.Dir)} {
		f, err := os.CreateTemp(dir, ".sandbox-*")
		if err != nil {
			continue
		}
		return errors.Join(fmt.Errorf("%s can be written: refusing to go on", dir), f.Close(), os.Remove(f.Name()))
	}
	f, err := os.CreateTemp(o.Dir, ".sandbox-*")
	if err != nil {
		return fmt.Errorf("the sandbox's own directory: %w", err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
