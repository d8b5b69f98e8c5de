// Command hub is Petiole's server in the middle: it stores what edges export
// and serves it to NATS clients.
package main

import (
	"petiole/internal/app"
	"petiole/internal/config"
)

func main() {
	app.Main(program())
}

// program describes the hub.
func program() app.Program {
	return app.Program{
		Program: config.Hub,
		Short:   "NATS server that stores what edges export",
		Long: `hub serves NATS clients, and stores what edges export in JetStream streams:
each message once, in the edge's order, across outages of either side.

  hub -c hub.conf                         serve as configured
  hub status -c hub.conf                  ask the running server`,
		Link: startLink,
	}
}
