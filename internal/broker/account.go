package broker

// Account is a subject space: its clients and handlers see each other's
// messages. A server has one, "$G".
type Account struct{}

// Name returns the account's name.
func (a *Account) Name() string { return "$G" }

// Subscription is the registration of an internal handler.
type Subscription struct{}

// Close ends the registration. Calls of the handler that are under way are
// not waited for. Further calls of Close do nothing.
func (s *Subscription) Close() {}

// Subject returns the subject subscribed to.
func (s *Subscription) Subject() string { return "" }

// Handle registers h for messages on subject, which may have wildcards. A
// handler counts as a responder. The error says that subject is not valid.
func (a *Account) Handle(subject string, h Handler) (*Subscription, error) {
	return &Subscription{}, nil
}

// HandleQueue is [Account.Handle] as a member of the queue group queue: of
// all members, client subscriptions included, one gets a message.
func (a *Account) HandleQueue(subject, queue string, h Handler) (*Subscription, error) {
	return &Subscription{}, nil
}

// Publish sends a message to the clients and handlers that subscribe to
// subject. reply may be empty; hdr is a raw header block or empty. All
// arguments are copied. The message is in the clients' outbound queues when
// Publish returns; they are flushed in the background, or at the end of a
// [Account.Batch] that is under way. It never blocks on a client.
func (a *Account) Publish(subject, reply string, hdr, data []byte) {}

// PublishBytes is [Account.Publish] without strings.
func (a *Account) PublishBytes(subject, reply, hdr, data []byte) {}

// HasInterest reports whether any subscription or handler matches the literal
// subject.
func (a *Account) HasInterest(subject string) bool { return false }

// WatchInterest calls fn whenever [Account.HasInterest] of the literal subject
// changes, from the time of the call on (ask HasInterest afterwards for the
// state at hand). Calls for one watch do not overlap and arrive in order, on
// the goroutine that (un)subscribed, with no lock of the broker held; fn must
// not block. After cancel has returned no new call starts.
func (a *Account) WatchInterest(subject string, fn func(has bool)) (cancel func()) {
	return func() {}
}

// Batch runs fn and then flushes the clients that were published to meanwhile,
// each once. Use it to deliver many messages from outside of a handler.
func (a *Account) Batch(fn func()) { fn() }

// Publisher publishes like [Account.Publish], but remembers which
// subscriptions match the subjects it publishes to and leaves flushing to its
// owner. It is the fastest way to deliver many messages. A Publisher must not
// be used by two goroutines at the same time.
type Publisher struct{}

// NewPublisher returns a new Publisher.
func (a *Account) NewPublisher() *Publisher { return &Publisher{} }

// Publish is [Account.Publish]; the message leaves with the next Flush.
func (p *Publisher) Publish(subject, reply string, hdr, data []byte) {}

// PublishBytes is [Account.PublishBytes]; the message leaves with the next
// Flush.
func (p *Publisher) PublishBytes(subject, reply, hdr, data []byte) {}

// Deliver sends to the subscribers of subject to a message that shows them
// another subject: JetStream delivers to an inbox what was published elsewhere.
// Who gets it is decided by to (queue groups included); the MSG or HMSG line
// has subject. The message leaves with the next Flush.
func (p *Publisher) Deliver(to, subject string, reply, hdr, data []byte) {}

// Flush sends what was published since the last Flush. It does not block on
// clients: what a socket does not take at once is left to the background.
func (p *Publisher) Flush() {}

// Respond publishes to the reply subject of m; it does nothing if m has none.
// The response leaves when the input at hand has been processed, together
// with others.
func (m *Msg) Respond(hdr, data []byte) {}

// Publish publishes from inside a handler. The message leaves when the input
// at hand has been processed, together with others. Valid during the handler
// call only; use [Account.Publish] later and from other goroutines.
func (m *Msg) Publish(subject, reply string, hdr, data []byte) {}

// Error sends the client a protocol error ("-ERR 'text'"); the connection
// stays. It may be called at any time.
func (c *ClientInfo) Error(text string) {}
