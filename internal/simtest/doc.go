// Package simtest simulates a single node's storage path as a whole and breaks
// its disk. It has tests only.
//
// What runs is the real engine (internal/jetstream) with its log on a disk in
// memory (simfs) and its databases on files in a tmpfs whose power can be cut
// (simbolt), within testing/synctest: time is simulated, and a goroutine that
// waits for ever is found. A seed decides on a workload (publishing with
// message ids, expected sequences and limits, last-value subjects, consumers
// that fetch, acknowledge and reject, purges, deletions, streams that come,
// change and go, batches of an edge with their positions, checkpoints, waiting
// for hours, clocks set back) and on how each life of the node ends: a clean
// stop, a kill, a power cut between two operations, in the middle of a write, of
// a directory change or of a database commit, also during recovery, or while what
// no consumer needs any more is being removed in slices; or an error of a write or
// sync, after which the process must end.
//
// After each end the store is opened again and compared with a model (see
// model_test.go). All commands go through one log, so what is found must be
// what some prefix of all operations leaves, across all streams, and that prefix
// must include everything that was acknowledged: each message once, byte for
// byte, in order, with its time; nothing that was never published; deletions,
// purges, acknowledgements and configurations kept; positions with exactly
// the messages that they cover.
//
//	go test ./internal/simtest                      a quick run
//	go test ./internal/simtest -seeds 2000          so many seeds
//	go test ./internal/simtest -seed 17 -v          one seed, with what it did
//
// A seed decides on everything but the order in which the engine's goroutines
// run. A failure found in one run therefore needs a few tries sometimes:
// -tries 20 repeats a seed.
//
// TestBroken shows that it finds what it is for: with a disk whose fsync,
// directory fsync or bbolt's syncs do nothing, or whose failed fsync is tried
// again, within some tens of seeds. The build tags mutant_nofsync,
// mutant_ackearly and mutant_splitposition it finds within ten; those in
// storage/vfs are below the simulated disk, and those that have to do with
// damaged bytes need damage, which this simulation does not do.
package simtest
