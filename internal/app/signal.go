package app

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"petiole/internal/admin"
)

// sendSignal does what --signal COMMAND or --signal COMMAND=PID says; PID may
// be a file that holds it, or end in "*" for all processes of the program's name
// whose number begins so. Without one, the process is the one that the pid
// file names which -P or the configuration has, or the one that answers at the
// admin socket, or else the only one of the program's name.
func (f *Flags) sendSignal(cmd *cobra.Command) error {
	name, which, given := strings.Cut(f.Signal, "=")
	sig, ok := signalNumbers[name]
	if !ok {
		return Exit(ExitUsage, fmt.Errorf("unknown signal %q; accepted: %s, each alone or with =PID, =PIDFILE or =*", name,
			strings.Join(slices.Sorted(maps.Keys(signalNumbers)), ", ")))
	}
	var pids []int
	pid, err := 0, error(nil)
	begins, all := strings.CutSuffix(which, "*")
	switch {
	case given && all:
		pids, err = processesLike(f.program.Program.String(), begins)
	case given:
		pid, err = readPID(which)
	default:
		pid, err = f.findProcess(cmd)
	}
	if err != nil {
		return err
	}
	if !all {
		pids = []int{pid}
	}
	var errs []error
	for _, pid := range pids {
		err := kill(pid, sig)
		switch {
		case errors.Is(err, syscall.ESRCH):
			errs = append(errs, Exit(ExitUnavailable, fmt.Errorf("signal %q %d: no such process; is %s running? find it with -c or -sd instead of a number", name, pid, f.program.Program)))
		case err != nil:
			errs = append(errs, Exit(ExitFailure, fmt.Errorf("signal %q %d: %w", name, pid, err)))
		}
	}
	return errors.Join(errs...)
}

// processesLike lists the running processes of that name whose numbers begin as
// given.
func processesLike(name, begins string) ([]int, error) {
	if _, err := strconv.ParseUint(begins, 10, 32); begins != "" && err != nil {
		return nil, Exit(ExitUsage, fmt.Errorf("%s* is no beginning of process ids; name one, a pid file, or * for all", begins))
	}
	pids, err := processes(name)
	if err != nil {
		return nil, Exit(ExitUnavailable, fmt.Errorf("running processes can not be listed: %w; name one with --signal COMMAND=PID", err))
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool { return !strings.HasPrefix(strconv.Itoa(pid), begins) })
	if len(pids) == 0 {
		return nil, Exit(ExitUnavailable, fmt.Errorf("no %s processes running whose id begins with %q", name, begins))
	}
	return pids, nil
}

// readPID takes a process id, or the name of a file that holds one.
func readPID(s string) (int, error) {
	if pid, err := strconv.Atoi(s); err == nil && pid > 0 {
		return pid, nil
	}
	text, err := os.ReadFile(s)
	if err != nil {
		var pathErr *fs.PathError
		if errors.As(err, &pathErr) {
			err = pathErr.Err
		}
		return 0, Exit(ExitUsage, fmt.Errorf("%s is neither a process id nor a pid file that can be read (%w)", cmp.Or(s, `""`), err))
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 0 {
		return 0, Exit(ExitUsage, fmt.Errorf("%s is not a pid file: it does not hold the number of a process", s))
	}
	return pid, nil
}

// findProcess finds the running program.
func (f *Flags) findProcess(cmd *cobra.Command) (int, error) {
	name := f.program.Program.String()
	given := cmd.Flags().Changed
	if given("config") || given("store_dir") || given("pid") {
		cfg, err := f.Load(cmd)
		if err != nil {
			return 0, err
		}
		if cfg.PIDFile != "" {
			if _, err := os.Stat(cfg.PIDFile); err == nil {
				return readPID(cfg.PIDFile)
			}
		}
		if path, err := f.SocketPath(cmd); err == nil && cfg.JetStream.Enabled || given("store_dir") {
			if st, err := admin.Ask(cmd.Context(), path); err == nil {
				return st.PID, nil
			}
		}
		return 0, Exit(ExitUnavailable, fmt.Errorf("no running %s is found by its pid file or admin socket; name the process with --signal COMMAND=PID", name))
	}
	pids, err := processes(name)
	switch {
	case err != nil:
		return 0, Exit(ExitUnavailable, fmt.Errorf("running processes can not be listed: %w; name one with --signal COMMAND=PID, or its configuration with -c", err))
	case len(pids) == 0:
		return 0, Exit(ExitUnavailable, fmt.Errorf("no %s processes running", name))
	case len(pids) > 1:
		text := fmt.Sprintf("multiple %s processes running:", name)
		for _, pid := range pids {
			text += "\n" + strconv.Itoa(pid)
		}
		return 0, Exit(ExitUsage, errors.New(text+"\nname one with --signal COMMAND=PID, or its configuration with -c"))
	}
	return pids[0], nil
}

// processes lists the other processes whose program has that name.
func processes(name string) ([]int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil || len(dirs) == 0 {
		return nil, errors.New("there is no /proc")
	}
	var pids []int
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err == nil && strings.TrimSpace(string(comm)) == name {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}
