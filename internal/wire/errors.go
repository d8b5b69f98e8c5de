package wire

// Error is a protocol error. Its text is what the client gets to see in
// "-ERR 'text'"; the texts of nats-server are kept because clients look for
// them.
type Error struct{ text string }

// Error returns the text on the wire, without quotes.
func (e *Error) Error() string { return e.text }

// Protocol errors. After those marked fatal the connection is closed.
var (
	ErrUnknownOp      = &Error{"Unknown Protocol Operation"}                               // fatal: not a verb of the protocol
	ErrParser         = &Error{"Parser Error"}                                             // fatal: arguments are malformed
	ErrMaxControlLine = &Error{"maximum control line exceeded"}                            // fatal: no line end within the limit
	ErrMaxPayload     = &Error{"Maximum Payload Violation"}                                // fatal: message is larger than permitted
	ErrHeaders        = &Error{"message headers not supported"}                            // fatal: HPUB without "headers" in CONNECT
	ErrPublishSubject = &Error{"Invalid Publish Subject"}                                  // subject is malformed and the message dropped; or, to pedantic clients only, it has a wildcard
	ErrSubject        = &Error{"Invalid Subject"}                                          // subscription subject is malformed
	ErrAuthorization  = &Error{"Authorization Violation"}                                  // fatal: credentials missing or wrong
	ErrAuthTimeout    = &Error{"Authentication Timeout"}                                   // fatal: no CONNECT in time
	ErrStale          = &Error{"Stale Connection"}                                         // fatal: PINGs were not answered
	ErrSlowConsumer   = &Error{"Slow Consumer"}                                            // fatal: client does not keep up
	ErrMaxConn        = &Error{"maximum connections exceeded"}                             // fatal
	ErrMaxSubs        = &Error{"maximum subscriptions exceeded"}                           // the subscription is not made
	ErrThrottled      = &Error{"Connection throttling is active. Please try again later."} // fatal: too many TLS handshakes for the moment
	ErrProtocol       = &Error{"invalid client protocol"}                                  // fatal: CONNECT asks for a protocol unknown
	ErrNoResponders   = &Error{"no responders requires headers support"}                   // fatal: CONNECT contradicts itself
)
