package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/testscript"

	"petiole/internal/app"
	"petiole/internal/apptest"
	"petiole/internal/config"
)

func TestMain(m *testing.M) {
	// The test binary is the program when a script runs it as hub, and also the
	// edge, as far as it serves, and a client of either.
	testscript.Main(m, map[string]func(){
		"hub":    main,
		"edge":   func() { app.Main(app.Program{Program: config.Edge, Link: app.Uplink}) },
		"client": client,
	})
}

func TestScripts(t *testing.T) { apptest.Run(t, "testdata/script") }

// client is the command
//
//	client URL stream NAME SUBJECT     make a stream
//	client URL publish SUBJECT DATA... publish messages, each acknowledged
//	client URL await NAME DATA...      wait until the stream holds exactly these messages
func client() {
	err := fmt.Errorf("client: wrong arguments %q", os.Args[1:])
	if len(os.Args) > 4 {
		err = clientDo(os.Args[1], os.Args[2], os.Args[3], os.Args[4:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func clientDo(url, verb, name string, args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nc, err := nats.Connect(url, nats.Timeout(time.Minute))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	switch verb {
	case "stream":
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: args})
		return err
	case "publish":
		for _, data := range args {
			if _, err := js.Publish(ctx, name, []byte(data)); err != nil {
				return err
			}
		}
		return nil
	case "await":
		// The link tells nobody here when a message is there.
		for {
			got, err := messages(ctx, js, name)
			if err == nil && slices.Equal(got, args) {
				return nil
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("stream %s holds %q, want %q (%v)", name, got, args, err)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	return fmt.Errorf("client: unknown verb %q", verb)
}

// messages returns what the stream holds.
func messages(ctx context.Context, js jetstream.JetStream, name string) ([]string, error) {
	s, err := js.Stream(ctx, name)
	if err != nil {
		return nil, err
	}
	var got []string
	for seq := s.CachedInfo().State.FirstSeq; seq <= s.CachedInfo().State.LastSeq && seq > 0; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			return nil, err
		}
		got = append(got, string(m.Data))
	}
	return got, nil
}
