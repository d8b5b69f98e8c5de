package app

import (
	"context"
	"errors"
	"fmt"
)

// CloseWithin calls closer, but waits for it only until ctx ends.
func CloseWithin(ctx context.Context, what string, closer func() error) error {
	done := make(chan error, 1)
	go func() { done <- closer() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("close %s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("close %s", what), ctx.Err())
	}
}

// ListenError explains why addr could not be listened on; setting is what
// changes it. It carries the exit code.
func ListenError(addr, setting string, err error) error { return listenError(addr, setting, err) }
