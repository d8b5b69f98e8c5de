package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var lineInMessage = regexp.MustCompile(`(?i)^parse error on line (\d+): '(.*)'$|\((?:.*):(\d+):\d+\)$|on line (\d+)`)

// inInclude matches what the parser says of an included file: its name as it is
// written, and what is wrong with it.
var inInclude = regexp.MustCompile(`(?s)^error parsing include file '([^']*)', (.*)$`)

// missing matches what the parser says of an included file that cannot be
// opened.
var missing = regexp.MustCompile(`^open .*: ([^:]*?)\.?$`)

// syntax turns an error of the parser, or of opening the file, into a Problem.
func syntax(path string, err error) *Problem {
	p := &Problem{File: path}
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) && pathErr.Path == path {
		p.What = "cannot read the configuration file: " + pathErr.Err.Error()
		p.Remedy = "check the name given with -c"
		if errors.Is(err, fs.ErrPermission) {
			p.Remedy = "let the user that runs the program read it"
		}
		return p
	}
	// What is wrong with an included file stands there.
	for m := inInclude.FindStringSubmatch(err.Error()); m != nil; m = inInclude.FindStringSubmatch(err.Error()) {
		if why := missing.FindStringSubmatch(m[2]); why != nil {
			p.File, p.Line = path, includeLine(path, m[1])
			p.What = fmt.Sprintf("cannot read the included file %s: %s", m[1], why[1])
			p.Remedy = "check its name, which counts from the directory of the file that includes it, and who may read it"
			return p
		}
		path, err = includedPath(path, m[1]), errors.New(m[2])
	}
	p.File = path
	p.What = strings.ReplaceAll(err.Error(), "\n", " ")
	p.Remedy = "check braces, brackets and quotes there"
	if m := lineInMessage.FindStringSubmatch(err.Error()); m != nil {
		for _, i := range []int{1, 3, 4} {
			if m[i] != "" {
				p.Line, _ = strconv.Atoi(m[i])
			}
		}
		switch {
		case strings.HasPrefix(m[2], "Unexpected EOF"):
			p.What = "syntax error: the file ends within a block or a value"
		case m[2] != "":
			p.What = "syntax error: " + strings.TrimSuffix(m[2], ".")
		case m[3] != "":
			p.What = "syntax error: the file ends within a block or after a key without a value"
		case strings.Contains(err.Error(), "variable reference"):
			p.Remedy = "define the variable in the file, or in the environment"
		}
	} else if line := unclosedLine(path); line > 0 {
		p.Line = line
	}
	return p
}

// includedPath is where the parser looks for what the file at path includes as
// name.
func includedPath(path, name string) string { return filepath.Join(filepath.Dir(path), name) }

// included is an include directive of a file.
type included struct {
	name string
	line int
}

// directive matches an include directive; comment what may look like one and is
// none.
var (
	directive = regexp.MustCompile(`(?i)(?:^|[\s{,;])include[ \t]+(?:"([^"]*)"|'([^']*)'|([^"'\s;}]+))`)
	comment   = regexp.MustCompile(`(?:^|\s)(?:#|//).*`)
)

// includes lists what the file at path includes; nothing if it cannot be read.
func includes(path string) (list []included) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		for _, m := range directive.FindAllStringSubmatch(comment.ReplaceAllString(line, ""), -1) {
			list = append(list, included{m[1] + m[2] + m[3], n})
		}
	}
	return list
}

// includeLine returns the line of the file that includes name, or 0.
func includeLine(path, name string) int {
	for _, in := range includes(path) {
		if in.name == name {
			return in.line
		}
	}
	return 0
}

// circular finds a file that includes itself, directly or through others, as
// which the parser would never come to an end.
func circular(path string, from ...string) *Problem {
	from = append(from, filepath.Clean(path))
	for _, in := range includes(path) {
		next := includedPath(path, in.name)
		if i := slices.Index(from, next); i >= 0 {
			p := &Problem{File: path, Line: in.line, Key: "include", What: "the file includes itself", Remedy: "remove it"}
			if i < len(from)-1 {
				p.What, p.Remedy = in.name+" includes this file, directly or through others", "remove it here or there"
			}
			return p
		}
		if p := circular(next, from...); p != nil {
			return p
		}
	}
	return nil
}

// unclosedLine returns the last line of the file, where a parser that gives no
// position stopped, or 0.
func unclosedLine(path string) int {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	return bytes.Count(bytes.TrimRight(text, "\n"), []byte("\n")) + 1
}
