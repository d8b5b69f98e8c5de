package app

import (
	"context"
	"fmt"

	"petiole/internal/admin"
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
	device, err := link.LoadDevice(c.JetStream.StoreDir, n.Log)
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
		States:   export.Meta(n.Engine.Meta()),
		Software: Version,
		Log:      n.Log,
	})
	if err != nil {
		return nil, Exit(ExitConfig, fmt.Errorf("hub: %w", err))
	}
	edge.Start()
	return uplink{edge}, nil
}

// Describe implements Link.
func (u uplink) Describe(st *admin.Status) {
	s := u.Status()
	st.Hub = &s
}

// Close implements Link.
func (u uplink) Close(ctx context.Context) error {
	return CloseWithin(ctx, "link to the hub", u.Edge.Close)
}
