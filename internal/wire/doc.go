// Package wire is the NATS client protocol on the byte level: a parser for
// what clients send, the errors that it knows and header blocks.
package wire
