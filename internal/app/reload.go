package app

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"petiole/internal/config"
)

// setting is a part of the configuration that a reload looks at: what the file
// calls it, and where it is.
type setting struct {
	key string
	how reloading
	of  func(*config.Config) any
}

// reloading is how a setting changes while the program runs.
type reloading int

const (
	applied  reloading = iota
	restarts           // not: only a new process can
	relinks            // the link ends and begins anew
)

// settings cover the whole configuration; a test holds them against it.
var settings = []setting{
	{"listen", restarts, func(c *config.Config) any { return [3]any{c.Host, c.Port, c.NoListen} }},
	{"server_name", restarts, func(c *config.Config) any { return c.ServerName }},
	{"jetstream", restarts, func(c *config.Config) any { return c.JetStream.Enabled }},
	{"jetstream.store_dir", restarts, func(c *config.Config) any { return c.JetStream.StoreDir }},
	{"jetstream.max_mem", applied, func(c *config.Config) any { return c.JetStream.MaxMemory }},
	{"jetstream.max_file", applied, func(c *config.Config) any { return c.JetStream.MaxStore }},
	{"jetstream.sync_interval", restarts, func(c *config.Config) any { return c.JetStream.SyncInterval }},
	{"log_format", applied, func(c *config.Config) any { return c.Log.Format }},
	{"log_file", restarts, func(c *config.Config) any { return c.Log.File == "" }}, // to or from standard error
	{"hub", relinks, func(c *config.Config) any { return c.Uplink }},
	{"exports", relinks, func(c *config.Config) any { return c.Exports }},
	{"edges", relinks, func(c *config.Config) any {
		if c.Edges == nil || c.Edges.TLS == nil {
			return c.Edges
		}
		e, t := *c.Edges, *c.Edges.TLS
		t.Config = nil // Digest has what is in it
		e.TLS = &t
		return &e
	}},

	{"max_payload", applied, func(c *config.Config) any { return c.MaxPayload }},
	{"max_control_line", applied, func(c *config.Config) any { return c.MaxControlLine }},
	{"max_connections", applied, func(c *config.Config) any { return c.MaxConnections }},
	{"max_subscriptions", applied, func(c *config.Config) any { return c.MaxSubs }},
	{"max_sub_tokens", applied, func(c *config.Config) any { return c.MaxSubTokens }},
	{"no_header_support", applied, func(c *config.Config) any { return c.NoHeaders }},
	{"no_fast_producer_stall", applied, func(c *config.Config) any { return c.NoStall }},
	{"proxy_protocol", applied, func(c *config.Config) any { return c.ProxyProtocol }},
	{"max_pending", applied, func(c *config.Config) any { return c.MaxPending }},
	{"ping_interval", applied, func(c *config.Config) any { return c.PingInterval }},
	{"ping_max", applied, func(c *config.Config) any { return c.PingMax }},
	{"write_deadline", applied, func(c *config.Config) any { return c.WriteDeadline }},
	{"mappings", applied, func(c *config.Config) any { return c.Mappings }},
	{"authorization", applied, func(c *config.Config) any {
		a := c.Auth
		a.NoAuthUser = ""
		return a
	}},
	{"no_auth_user", applied, func(c *config.Config) any { return c.Auth.NoAuthUser }},
	{"tls", applied, func(c *config.Config) any {
		if c.TLS == nil {
			return c.TLS
		}
		t := *c.TLS
		t.Config = nil
		return &t
	}},
	{"allow_non_tls", applied, func(c *config.Config) any { return c.AllowNonTLS }},
	{"client_advertise", applied, func(c *config.Config) any { return c.ClientAdvertise }},
	{"lame_duck_duration", applied, func(c *config.Config) any { return c.LameDuck }},
	{"lame_duck_grace_period", applied, func(c *config.Config) any { return c.LameDuckGrace }},
	{"debug", applied, func(c *config.Config) any { return c.Log.Debug }},
	{"trace", applied, func(c *config.Config) any { return c.Log.Trace }},
	{"logtime", applied, func(c *config.Config) any { return c.Log.Time }},
	{"logtime_utc", applied, func(c *config.Config) any { return c.Log.UTC }},
	{"log_file", applied, func(c *config.Config) any { return c.Log.File }},
	{"logfile_size_limit", applied, func(c *config.Config) any { return c.Log.SizeLimit }},
	{"logfile_max_num", applied, func(c *config.Config) any { return c.Log.MaxFiles }},
	{"pid_file", applied, func(c *config.Config) any { return c.PIDFile }},
	{"ports_file_dir", applied, func(c *config.Config) any { return c.PortsDir }},
}

// errNoFile says that there is nothing to reload.
var errNoFile = errors.New("there is no configuration file to reload; name one with -c at the start")

// Reload makes the node run with next, as far as that is possible without a
// restart, and returns the keys of what has changed. If something changed that
// needs a restart, the error names every such key with its place, and the node
// runs on as it was; likewise if anything of next cannot be had.
func (n *Node) Reload(next *config.Config) (changed []string, err error) {
	n.reloading.Lock()
	defer n.reloading.Unlock()
	cur := n.conf.Load()
	if next.JetStream.StoreDir == "" && next.JetStream.Enabled {
		if next.JetStream.StoreDir, err = defaultStoreDir(n.program.Program); err != nil {
			return nil, Exit(ExitConfig, err)
		}
	}
	var refused []*config.Problem
	relink := false
	for _, s := range settings {
		if reflect.DeepEqual(s.of(cur), s.of(next)) {
			continue
		}
		if s.how == restarts {
			p := next.At(s.key)
			if p.Line == 0 && slices.ContainsFunc(refused, func(o *config.Problem) bool { return strings.HasPrefix(p.Key, o.Key+".") }) {
				continue // a default, which follows what is refused already
			}
			p.What, p.Remedy = "can not change while the program runs", "restart it, or put back what was there; nothing is reloaded"
			refused = append(refused, p)
			continue
		}
		changed = append(changed, s.key)
		relink = relink || s.how == relinks
	}
	if len(refused) > 0 {
		return nil, &config.Error{Problems: refused}
	}

	// What may fail comes first, and is put back if something after it fails.
	if next.PIDFile != cur.PIDFile {
		if err := writePID(next.PIDFile); err != nil {
			return nil, err
		}
	}
	undo := func() {
		if next.PIDFile != cur.PIDFile {
			removePID(next.PIDFile)
		}
	}
	if relink {
		if err := n.relink(next); err != nil {
			undo()
			return nil, err
		}
		files := undo
		undo = func() {
			files()
			if err := n.relink(cur); err != nil {
				n.Log.Error("the link is not up again", "error", err)
			}
		}
	}
	opts := brokerOptions(next)
	opts.Host, opts.Port = "", 0 // as they are
	if n.log != nil {
		if err := n.log.set(next.Log); err != nil {
			undo()
			return nil, fileError("-l", "log_file", next.Log.File, err)
		}
	}
	if err := n.Broker.Reload(opts); err != nil {
		undo()
		if n.log != nil {
			_ = n.log.set(cur.Log) // it was there a moment ago
		}
		return nil, Exit(ExitConfig, err)
	}
	if n.Engine != nil {
		n.Engine.SetLimits(next.JetStream.MaxMemory, next.JetStream.MaxStore)
	}
	n.conf.Store(next)
	if next.PIDFile != cur.PIDFile {
		removePID(cur.PIDFile)
	}
	if next.PortsDir != cur.PortsDir || relink {
		if next.PortsDir != cur.PortsDir {
			n.removePorts(cur.PortsDir)
		}
		if err := n.writePorts(next.PortsDir); err != nil {
			n.Log.Error("ports file not written", "error", err)
		}
	}
	return changed, nil
}

// relink ends the link and begins it anew as next says, and has the node run
// with next. If that fails, the link is what it was.
func (n *Node) relink(next *config.Config) error {
	if n.program.Link == nil {
		return nil
	}
	cur := n.conf.Load()
	if old := n.setLink(nil); old != nil {
		ctx, cancel := context.WithTimeout(context.Background(), relinkTimeout)
		defer cancel()
		if err := old.Close(ctx); err != nil {
			// It may still be at work, and must not be beside another one.
			n.setLink(old)
			return fmt.Errorf("the link does not end: %w; restart the program", err)
		}
	}
	n.conf.Store(next)
	link, err := n.program.Link(n)
	if err != nil {
		n.conf.Store(cur)
		var back error
		if link, back = n.program.Link(n); back != nil {
			n.Log.Error("the link is down: what was there is not to be had any more; correct the configuration and reload it", "error", back)
		}
	}
	n.setLink(link)
	return err
}

// fullPath names a file in full: whoever reads it may be in another directory
// than the program.
func fullPath(path string) string {
	if path == "" {
		return ""
	}
	if full, err := filepath.Abs(path); err == nil {
		return full
	}
	return path
}

// lines are the lines of an error that may have several.
func lines(err error) []string { return strings.Split(err.Error(), "\n") }
