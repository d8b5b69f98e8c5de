package main

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"petiole/hub/ingest"
	"petiole/internal/admin"
	"petiole/internal/app"
	"petiole/sync/link"
)

// edges is the hub's end of all links.
type edges struct{ *link.Hub }

// startLink listens for edges.
func startLink(n *app.Node) (app.Link, error) {
	c := n.Config()
	if c.Edges == nil {
		return nil, nil
	}
	if n.Engine == nil {
		return nil, app.Exit(app.ExitConfig, fmt.Errorf("edges: a hub keeps what edges export in JetStream, which is off: leave jetstream on"))
	}
	port := c.Edges.Port
	if port < 0 {
		port = 0 // the system chooses
	}
	lc := link.HubConfig{
		Listen: net.JoinHostPort(c.Edges.Host, strconv.Itoa(port)),
		Name:   n.Broker.Name(),
		ID:     n.Broker.ID(),
		TLS:    link.ServerTLS{Dir: c.JetStream.StoreDir},
	}
	if t := c.Edges.TLS; t != nil {
		lc.TLS = link.ServerTLS{CertFile: t.CertFile, KeyFile: t.KeyFile}
	}
	for _, u := range c.Edges.Users {
		if u.Nkey != "" {
			lc.NKeys = append(lc.NKeys, link.NKey{Public: u.Nkey, Streams: u.Streams})
		} else {
			lc.Users = append(lc.Users, link.User{Name: u.User, Password: u.Password, Streams: u.Streams})
		}
	}
	hub, err := link.NewHub(link.HubOptions{
		Config:   lc,
		Sink:     ingest.New(ingest.Options{Engine: n.Engine, Log: n.Log}),
		Software: app.Version,
		Log:      n.Log,
	})
	if err != nil {
		return nil, app.Exit(app.ExitConfig, fmt.Errorf("edges: %w", err))
	}
	if err := hub.Start(); err != nil {
		return nil, app.ListenError(lc.Listen, "edges { listen }", err)
	}
	return edges{hub}, nil
}

// Describe implements app.Link.
func (e edges) Describe(st *admin.Status) {
	s := e.Status()
	st.Edges = &s
}

// Close implements app.Link.
func (e edges) Close(ctx context.Context) error {
	return app.CloseWithin(ctx, "link to the edges", e.Hub.Close)
}
