package storage

// Proposer hands commands to the log that orders them. Locally it is a thin
// layer over the write-ahead log; in a cluster it is the consensus protocol.
// Every record handed in without an error either comes back, in order and
// durable, at the group's Apply, or the storage fails for good and nothing is
// acknowledged after it.
type Proposer interface {
	// Propose hands in one record, the concatenation of parts, which are copied
	// before it returns. The tag comes back with the record at Apply on this
	// node (and only there: a replayed record has no tag). It does not by
	// itself start a commit; see Kick.
	Propose(g GroupID, tag any, parts ...[]byte) error
	// ProposeUrgent is Propose for records that must get through when the log
	// has no room for others, such as those that make room.
	ProposeUrgent(g GroupID, tag any, parts ...[]byte) error
	// ProposeLazy hands in a record that is in no hurry: it travels with the
	// next commit, or within a bounded time. It never blocks, so that it may
	// be called under locks that Apply takes. The tag may be nil.
	ProposeLazy(g GroupID, tag any, parts ...[]byte) error
	// Kick starts committing what was handed in. It is called after everything
	// at hand has been handed in, and is cheap if a commit is under way.
	Kick()
}
