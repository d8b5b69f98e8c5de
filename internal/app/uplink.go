package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"petiole/internal/admin"
	"petiole/internal/config"
	"petiole/storage"
	"petiole/sync/export"
	"petiole/sync/link"
)

// uplink is the edge's link to its hub.
type uplink struct{ *link.Edge }

// Uplink is the edge's [Program.Link]: it connects to the hub in the background;
// the edge is ready without.
func Uplink(n *Node) (Link, error) {
	c := n.Config()
	if c.Uplink == nil {
		return nil, nil
	}
	if n.Engine == nil {
		n.Log.Warn("JetStream is off: there is nothing to export, the hub is not connected to")
		return nil, nil
	}
	states := export.Meta(n.Engine.Meta())
	device, err := link.LoadDevice(c.JetStream.StoreDir, states, n.Log)
	if errors.Is(err, link.ErrDeviceKey) {
		n.Log.Error("the hub is not connected to; clients of this edge are served all the same", "err", err)
		return noUplink{err, time.Now(), c.Exports}, nil
	}
	if errors.Is(err, storage.ErrFailed) || errors.Is(err, syscall.EIO) {
		return nil, Exit(ExitStorage, fmt.Errorf("device key: %w", err))
	}
	if err != nil {
		return nil, Exit(ExitCannotStore, fmt.Errorf("device key: %w", err))
	}
	lc := link.EdgeConfig{
		URLs: c.Uplink.URLs,
		Name: n.Broker.Name(),
		Auth: link.Auth{User: c.Uplink.User, Password: c.Uplink.Password, NKeyFile: c.Uplink.NkeySeedFile},
		TLS:  link.ClientTLS{CAFile: c.Uplink.CAFile, Pinned: c.Uplink.Pinned, ServerName: c.Uplink.ServerName},
	}
	for _, e := range c.Exports {
		lc.Exports = append(lc.Exports, link.Export{Stream: e.Stream, To: e.To})
	}
	edge, err := link.NewEdge(link.EdgeOptions{
		Config:   lc,
		Device:   device,
		Sources:  export.Engine(n.Engine),
		States:   states,
		Software: Version,
		Log:      n.Log,
	})
	if err != nil {
		return nil, Exit(ExitConfig, fmt.Errorf("hub: %w", err))
	}
	edge.Start()
	return uplink{edge}, nil
}

// noUplink stands for the link of an edge whose device key is lost: it says so,
// and does nothing.
type noUplink struct {
	err     error
	since   time.Time
	exports []config.Export
}

// Describe implements Link.
func (u noUplink) Describe(st *admin.Status) {
	s := link.EdgeStatus{LastError: u.err.Error(), LastErrorTime: u.since, Exports: []link.ExportStatus{}}
	for _, e := range u.exports {
		s.Exports = append(s.Exports, link.ExportStatus{Stream: e.Stream, To: cmp.Or(e.To, e.Stream), Failing: true, LastError: s.LastError, LastErrorTime: u.since})
	}
	st.Hub = &s
}

// Close implements Link.
func (u noUplink) Close(context.Context) error { return nil }

// Describe implements Link.
func (u uplink) Describe(st *admin.Status) {
	s := u.Status()
	st.Hub = &s
}

// Close implements Link.
func (u uplink) Close(ctx context.Context) error {
	return CloseWithin(ctx, "link to the hub", u.Edge.Close)
}
