//go:build linux

package sandbox_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"petiole/conformance/sandbox"
)

func TestMain(m *testing.M) {
	sandbox.Main(hostile)
	os.Exit(m.Run())
}

// hostile tries to harm what belongs to others: victims that the test made for
// it, in places where nobody may write as far as permissions go. It says what
// it could do.
func hostile(args []string) int {
	victim, addr, pid, own := args[0], args[1], args[2], args[3]
	done := func(what string, err error) {
		if err == nil {
			fmt.Println("could", what)
		}
	}
	done("be root", map[bool]error{true: nil, false: os.ErrPermission}[os.Geteuid() == 0])
	done("become root", syscall.Setuid(0))
	done("remove a file", os.Remove(filepath.Join(victim, "file")))
	done("remove a tree", os.RemoveAll(filepath.Join(victim, "tree")))
	done("write a file", os.WriteFile(filepath.Join(victim, "new"), nil, 0o644))
	if c, err := net.Dial("tcp", addr); err == nil {
		done("reach the network outside", c.Close())
	}
	if n, err := strconv.Atoi(pid); err == nil {
		done("signal a process outside", syscall.Kill(n, 0))
	}
	if err := os.WriteFile(filepath.Join(own, "mine"), []byte("x"), 0o644); err != nil {
		fmt.Println("cannot write its own directory:", err)
	}
	return 7
}

func TestConfined(t *testing.T) {
	// Everybody may write the victim: only the sandbox stands in the way.
	dir, err := os.MkdirTemp("", "sandbox")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	victim, own, self := filepath.Join(dir, "victim"), filepath.Join(dir, "own"), filepath.Join(dir, "self")
	for _, d := range []string{dir, victim, own, filepath.Join(victim, "tree")} {
		if err := os.MkdirAll(d, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"file", "tree/file"} {
		if err := os.WriteFile(filepath.Join(victim, f), []byte("x"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	copyExecutable(t, self)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()

	var out bytes.Buffer
	err = sandbox.Run(t.Context(), sandbox.Spec{
		Self: self, Dir: own, Stdout: &out, Stderr: &out,
		Args: []string{victim, ln.Addr().String(), strconv.Itoa(os.Getpid()), own},
	})
	if err == nil || err.Error() != "exit status 7" {
		t.Fatalf("Run: %v, want exit status 7\n%s", err, out.Bytes())
	}
	if out.Len() > 0 {
		t.Errorf("in the sandbox one can do too much or too little:\n%s", out.Bytes())
	}
	for _, f := range []string{"victim/file", "victim/tree/file", "own/mine"} {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Errorf("%s is gone: %v", f, err)
		}
	}
}

func copyExecutable(t *testing.T, to string) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	src, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(dst, src); err != nil {
		t.Fatal(err)
	}
	if err := dst.Close(); err != nil {
		t.Fatal(err)
	}
}
