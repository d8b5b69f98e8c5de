package subject

// Index finds the subscriptions that match a literal subject. V is what a
// subscription is to the owner, typically a pointer; the same value may be
// inserted once per subject and queue. An Index may be used concurrently.
type Index[V comparable] struct{}

// Result is the outcome of a lookup. Its slices are reused by the next lookup
// into the same Result.
type Result[V comparable] struct {
	Plain  []V        // subscriptions without queue group
	Queues []Group[V] // queue groups with at least one matching member
}

// Group is a queue group.
type Group[V comparable] struct {
	Name    string
	Members []V
}
