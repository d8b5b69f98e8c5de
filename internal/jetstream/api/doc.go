// Package api holds the JSON documents of the JetStream API and its errors as
// they travel on $JS.API.> subjects. Names, error codes and error texts are
// those that NATS clients know (ADR-1, ADR-28, ADR-31, ADR-43 and the API
// schema "io.nats.jetstream.api.v1"); this package decides nothing.
package api
