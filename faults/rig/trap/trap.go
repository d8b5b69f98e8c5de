//go:build linux && (amd64 || arm64)

// Package trap runs a program so that its file-changing system calls stop
// before they are made and ask the rig what shall become of them: made, refused
// with an error, or the end of the whole program.
//
// It does so with seccomp's user notification (seccomp_unotify(2)) rather than
// with strace(1), which injects by the same rules: strace counts calls for each
// thread alone, and a Go program's goroutines move between threads, so that its
// "the 7th fdatasync" is another one each time. Here there is one count for the
// program.
package trap

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// trapped are the system calls that stop, by number.
var trapped = map[int32]string{
	unix.SYS_OPENAT: "openat", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_UNLINKAT: "unlinkat",
	unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_LINKAT: "linkat",
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FALLOCATE: "fallocate",
	unix.SYS_WRITE: "write", unix.SYS_PWRITE64: "pwrite64", unix.SYS_PWRITEV: "pwritev",
	unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_SYNC_FILE_RANGE: "sync_file_range", unix.SYS_MSYNC: "msync",
	unix.SYS_FLOCK: "flock", unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHMODAT: "fchmodat", unix.SYS_MMAP: "mmap",
}

// Names returns the names of the system calls that can stop.
func Names() []string {
	var names []string
	for _, n := range trapped {
		names = append(names, n)
	}
	return names
}

// Call is a system call that a program is about to make.
type Call struct {
	Name string
	// Path is the file that the call would change: the one behind the file
	// descriptor, or the one that is named (for renames, the old name).
	Path string
	Args [6]uint64
}

// Answer is what becomes of a call.
type Answer struct {
	// Errno, if not zero, is returned to the program instead of making the call.
	Errno syscall.Errno
	// Kill ends the program with SIGKILL before the call is made.
	Kill bool
	// Torn, with Kill, makes the first half of a pwrite64 before that.
	Torn bool
	// Before, if set, is waited for before the call goes on. Other threads of
	// the program run meanwhile.
	Before func()
}

// Handler decides about calls. It is called for one call at a time, in the
// order in which they arrive, and only for calls that would create, change,
// sync, lock, map or remove a file under the directory given to Start.
type Handler func(Call) Answer

const (
	childEnv = "PETIOLE_RIG_TRAP" // marks the process that becomes the program
	childFD  = 3                  // its end of the socket over which the listener is sent
)

// Child has to be the first call of a rig's main: in a process that Command has
// prepared it installs the filter and becomes the program. Otherwise it returns.
func Child() {
	if os.Getenv(childEnv) == "" {
		return
	}
	err := become()
	fmt.Fprintln(os.Stderr, "trap:", err)
	os.Exit(125)
}

func become() error {
	runtime.LockOSThread() // the filter is this thread's, and exec keeps this thread
	if err := os.Unsetenv(childEnv); err != nil {
		return err
	}
	path, args, env := os.Args[1], os.Args[1:], os.Environ()
	unix.CloseOnExec(childFD)
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	prog := filter()
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	// Without WAIT_KILLABLE_RECV the signals that Go's scheduler sends to its
	// own threads would interrupt and repeat calls that wait for an answer.
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return fmt.Errorf("install the seccomp filter (Linux 5.19 or later): %w", errno)
	}
	if err := unix.Sendmsg(childFD, []byte{0}, unix.UnixRights(int(fd)), nil, 0); err != nil {
		return fmt.Errorf("send the listener: %w", err)
	}
	return fmt.Errorf("run %s: %w", path, syscall.Exec(path, args, env))
}

// filter is a BPF program over struct seccomp_data {int nr; u32 arch; u64 ip;
// u64 args[6]}: trapped calls notify, all others pass.
func filter() []unix.SockFilter {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		fdArg = 16 + 8*4 // mmap's file descriptor, lower half (little endian)
	)
	prog := []unix.SockFilter{
		{Code: load, K: 0},
		// Memory without a file is the runtime's business, and it asks often.
		{Code: equal, Jf: 4, K: unix.SYS_MMAP},
		{Code: load, K: fdArg},
		{Code: equal, Jf: 1, K: 0xffffffff},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
		{Code: load, K: 0},
	}
	for nr := range trapped {
		prog = append(prog,
			unix.SockFilter{Code: equal, Jf: 1, K: uint32(nr)},
			unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_USER_NOTIF})
	}
	return append(prog, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})
}

// Trap answers the calls of one program.
type Trap struct {
	dir     string
	handler Handler
	peer    *os.File // the child's end
	sock    *os.File
	wg      sync.WaitGroup
	mu      sync.Mutex
	err     error
}

// Command prepares a process that becomes path with args, its calls on files
// under dir decided by h. Run Serve once the command was started.
func Command(dir string, h Handler, path string, args ...string) (*exec.Cmd, *Trap, error) {
	if resolved, err := filepath.EvalSymlinks(dir); err == nil {
		dir = resolved
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("trap: %w", err)
	}
	t := &Trap{dir: dir, handler: h, sock: os.NewFile(uintptr(pair[0]), "trap"), peer: os.NewFile(uintptr(pair[1]), "trap child")}
	cmd := exec.Command("/proc/self/exe", append([]string{path}, args...)...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.ExtraFiles = []*os.File{t.peer}
	return cmd, t, nil
}

// Serve answers calls in the background until the program has ended.
func (t *Trap) Serve() error {
	t.peer.Close()
	defer t.sock.Close()
	oob := make([]byte, unix.CmsgSpace(4))
	var n int
	var err error
	for {
		_, n, _, _, err = unix.Recvmsg(int(t.sock.Fd()), make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("trap: receive the listener: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return fmt.Errorf("trap: the program did not start under the filter; its log says why (%w)", err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return fmt.Errorf("trap: no listener: %w", err)
	}
	t.wg.Go(func() {
		if err := t.listen(fds[0]); err != nil {
			t.mu.Lock()
			t.err = err
			t.mu.Unlock()
		}
	})
	return nil
}

// Wait returns once the program has ended and every call was answered, with
// what went wrong in answering.
func (t *Trap) Wait() error {
	t.wg.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Of seccomp.h, struct seccomp_notif and struct seccomp_notif_resp.
type notification struct {
	id    uint64
	pid   uint32 // of the thread
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

type response struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

func ioctl(fd int, req uint, arg unsafe.Pointer) syscall.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg))
	return errno
}

func (t *Trap) listen(fd int) error {
	var answers sync.WaitGroup
	defer unix.Close(fd)
	defer answers.Wait()
	for {
		// A blocking receive would not return when the program has ended.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(p, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("trap: poll: %w", err)
		}
		if p[0].Revents&unix.POLLIN == 0 {
			if p[0].Revents&unix.POLLHUP != 0 {
				return nil
			}
			continue
		}
		var n notification
		switch errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); errno {
		case 0:
		case unix.EINTR, unix.ENOENT: // the caller was killed meanwhile
			continue
		default:
			return fmt.Errorf("trap: receive: %w", errno)
		}
		a := t.decide(&n)
		if a.Before == nil {
			if err := t.answer(fd, &n, a); err != nil {
				return err
			}
			continue
		}
		answers.Go(func() {
			a.Before()
			if err := t.answer(fd, &n, a); err != nil {
				t.mu.Lock()
				t.err = err
				t.mu.Unlock()
			}
		})
	}
}

func (t *Trap) answer(fd int, n *notification, a Answer) error {
	if a.Kill {
		if a.Torn {
			if err := half(n); err != nil {
				return err
			}
		}
		// n.pid is a thread's id; a signal to it with kill(2) is for the
		// whole process. The call never happens: its caller is dead.
		if err := unix.Kill(int(n.pid), unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("trap: kill: %w", err)
		}
		return nil
	}
	r := response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if a.Errno != 0 {
		r = response{id: n.id, err: -int32(a.Errno)}
	}
	if errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r)); errno != 0 && errno != unix.ENOENT {
		return fmt.Errorf("trap: answer: %w", errno)
	}
	return nil
}

// half makes the first half of a pwrite64 in the program's stead.
func half(n *notification) error {
	if n.nr != unix.SYS_PWRITE64 {
		return fmt.Errorf("trap: %s cannot be torn", trapped[n.nr])
	}
	buf := make([]byte, n.args[2]/2)
	if len(buf) == 0 {
		return nil
	}
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(len(buf))
	got, err := unix.ProcessVMReadv(int(n.pid), local, []unix.RemoteIovec{{Base: uintptr(n.args[1]), Len: len(buf)}}, 0)
	if err != nil {
		return fmt.Errorf("trap: read what is to be written: %w", err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", n.pid, int32(n.args[0])), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("trap: tear a write: %w", err)
	}
	_, err = f.WriteAt(buf[:got], int64(n.args[3]))
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("trap: tear a write: %w", err)
	}
	return nil
}

// decide asks the handler if the call is one for it.
func (t *Trap) decide(n *notification) Answer {
	c := Call{Name: trapped[n.nr], Args: n.args}
	pid := int(n.pid)
	switch n.nr {
	case unix.SYS_OPENAT:
		if n.args[2]&(unix.O_CREAT|unix.O_TRUNC) == 0 {
			return Answer{}
		}
		c.Path = named(pid, n.args[0], n.args[1])
	case unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_LINKAT, unix.SYS_FCHMODAT:
		c.Path = named(pid, n.args[0], n.args[1])
	case unix.SYS_MMAP:
		c.Path = opened(pid, n.args[4])
	case unix.SYS_MSYNC:
		c.Path = t.dir // which file it is would have to be looked up by address
	default:
		c.Path = opened(pid, n.args[0])
	}
	if c.Path != t.dir && !strings.HasPrefix(c.Path, t.dir+"/") {
		return Answer{}
	}
	return t.handler(c)
}

// opened is the file behind a file descriptor.
func opened(pid int, fd uint64) string {
	path, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/fd/" + strconv.Itoa(int(int32(fd))))
	if err != nil {
		return ""
	}
	return path
}

// named is the file that a directory and a name in the program's memory mean.
func named(pid int, dirfd, ptr uint64) string {
	buf := make([]byte, unix.PathMax)
	// A read may not cross into a page that is not mapped: up to the end of
	// the first page, then the rest.
	var name string
	for got := 0; got < len(buf); {
		want := min(len(buf)-got, 4096-int((ptr+uint64(got))%4096))
		remote := []unix.RemoteIovec{{Base: uintptr(ptr) + uintptr(got), Len: want}}
		local := []unix.Iovec{{Base: &buf[got]}}
		local[0].SetLen(want)
		n, err := unix.ProcessVMReadv(pid, local, remote, 0)
		if err != nil || n <= 0 {
			return ""
		}
		if i := strings.IndexByte(string(buf[:got+n]), 0); i >= 0 {
			name = string(buf[:i])
			break
		}
		got += n
	}
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	base := opened(pid, dirfd)
	if int32(dirfd) == unix.AT_FDCWD {
		base, _ = os.Readlink("/proc/" + strconv.Itoa(pid) + "/cwd")
	}
	return filepath.Join(base, name)
}
