//go:build unix

package app

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// A command that is in the middle of something that takes long ends at the second
// signal.
func TestSecondInterrupt(t *testing.T) {
	if os.Getenv("PETIOLE_INTERRUPTED") != "" {
		signal.Reset(os.Interrupt)
		cmd := &cobra.Command{}
		cmd.SetContext(t.Context())
		ctx, stop := untilInterrupted(cmd)
		defer stop()
		fmt.Println("begun")
		<-ctx.Done()
		fmt.Println("told")
		time.Sleep(time.Minute)
		return
	}
	c := exec.Command(os.Args[0], "-test.run=^TestSecondInterrupt$")
	c.Env = append(os.Environ(), "PETIOLE_INTERRUPTED=yes")
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for _, want := range []string{"begun", "told"} {
		for lines.Scan() && lines.Text() != want {
		}
		if err := c.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	for again := time.NewTicker(20 * time.Millisecond); ; { // the first may still count
		select {
		case <-ended:
			again.Stop()
			if ws, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGINT {
				t.Errorf("it ended with %v, not by the second signal", c.ProcessState)
			}
			return
		case <-again.C:
			_ = c.Process.Signal(os.Interrupt) // it may have ended meanwhile
		}
	}
}
