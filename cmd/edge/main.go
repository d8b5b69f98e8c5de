// Command edge is Petiole's server for a place that loses power and network: a
// NATS server with durable JetStream that sends the streams it exports to a
// hub as soon as there is a way.
package main

import (
	"github.com/spf13/cobra"

	"petiole/internal/app"
	"petiole/internal/config"
)

func main() {
	app.Main(program())
}

// program describes the edge.
func program() app.Program {
	return app.Program{
		Program: config.Edge,
		Short:   "NATS server that keeps working, and keeps what it acknowledged, without network and after power cuts",
		Long: `edge serves NATS clients, keeps JetStream streams on disk, and sends the streams
it exports to a hub, in order and exactly once, as soon as there is a way.

  edge -js -sd /var/lib/petiole           serve with JetStream
  edge -c edge.conf                       serve as configured
  edge status -c edge.conf                ask the running server
  edge demo                               see it work, with a hub that is killed`,
		Link: app.Uplink,
		Commands: func(root *cobra.Command, f *app.Flags) {
			root.AddCommand(exportCommand(f), demoCommand())
		},
	}
}
