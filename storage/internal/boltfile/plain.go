package boltfile

import (
	"fmt"
	"regexp"
	"strings"

	"petiole/storage"
)

// pageText finds the page that bbolt does not like: its assertions name it by
// the number in its header, or by where it should be.
var pageText = regexp.MustCompile(`^(?:Page expected to be: |page )(\d+)(?:,|: has) `)

// plain says what a panic of bbolt's, the runtime's on behalf of it, or an error
// of its check is about, in words for who has the file and not the program.
func plain(v any) string {
	text := strings.TrimPrefix(fmt.Sprint(v), "panic: ")
	text, assertion := strings.CutPrefix(text, "assertion failed: ")
	fault, runtime := strings.CutPrefix(text, "runtime error: ")
	switch m := pageText.FindStringSubmatch(text); {
	case m != nil && assertion:
		text = "page " + m[1] + " is not what it should be"
	case strings.Contains(text, "invalid memory address"), strings.Contains(text, "unexpected fault address"):
		text = "a page lies behind the end of the file, or the disk does not give it"
	case runtime && (strings.Contains(fault, "out of range") || strings.Contains(fault, "overflow")):
		text = "a page says that it holds more than there is room for"
	case runtime:
		text = "a page makes no sense"
	}
	return storage.StructurePrefix + text
}
