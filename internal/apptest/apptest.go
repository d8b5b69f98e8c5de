// Package apptest runs testscript files against the two programs: what their
// command lines print and how they exit.
package apptest

import (
	"fmt"
	"net"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// await bounds how long a script waits for a line in a log, however busy the
// machine is.
const await = time.Minute

// Run runs the scripts in dir. Beside testscript's own, they have the commands
//
//	await FILE REGEXP   wait until FILE holds a match, and set MATCH to it (to
//	                    the first group, if there is one)
//	busyport NAME       listen on a loopback port and set NAME to it
//	config FILE         replace ${NAME} in FILE by environment variables
func Run(t *testing.T, dir string) {
	t.Helper()
	testscript.Run(t, testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		Deadline:            time.Now().Add(6 * await), // of all scripts: a program that should have ended is ended then
		Setup: func(env *testscript.Env) error {
			env.Setenv("HOME", env.WorkDir)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"await":    cmdAwait,
			"busyport": cmdBusyPort,
			"config":   cmdConfig,
		},
	})
}

func cmdAwait(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: await FILE REGEXP")
	}
	re, err := regexp.Compile(args[1])
	ts.Check(err)
	var text []byte
	for deadline := time.Now().Add(await); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		// The file is written by another process, which tells no one when.
		text, err = os.ReadFile(ts.MkAbs(args[0]))
		if err != nil {
			continue
		}
		if m := re.FindSubmatch(text); m != nil {
			ts.Setenv("MATCH", string(m[len(m)-1]))
			return
		}
	}
	ts.Fatalf("no match for %s in %s within %s:\n%s", args[1], args[0], await, text)
}

func cmdBusyPort(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: busyport NAME")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { ln.Close() })
	ts.Setenv(args[0], strconv.Itoa(ln.Addr().(*net.TCPAddr).Port))
}

func cmdConfig(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: config FILE")
	}
	text := os.Expand(ts.ReadFile(args[0]), func(name string) string {
		if v := ts.Getenv(name); v != "" {
			return v
		}
		ts.Fatalf("config: %s is not set", name)
		return ""
	})
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
	ts.Logf("%s", fmt.Sprintf("%s:\n%s", args[0], text))
}
