package app

import "petiole/internal/jetstream"

// keptFiles is how many descriptors are kept from clients where the system gives
// few: those of the store, without which nothing can be acknowledged any more, so
// that the program would have to end, and the rest.
const keptFiles = 2 * jetstream.DefaultMaxOpenStores

// fewClients is below how many clients that can connect the log says so.
const fewClients = 1000

// divideFiles says how many of the files that may be open are for clients, and
// how many for those of streams.
func divideFiles(limit int) (clients, stores int) {
	kept := min(keptFiles, limit/2)
	return limit - kept, max(kept/2, 1)
}
