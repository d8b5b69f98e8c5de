// Package natscli runs the nats CLI's single-node commands against a server and
// judges the outcome. Its test runs them against nats-server first, as the
// baseline, and then against edge.
package natscli

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/kballard/go-shellquote"
)

// command is one invocation of the CLI.
type command struct {
	args  []string
	stdin string
	tty   bool // standard input and output are a terminal
}

// background is a CLI invocation that runs beside a step.
type background struct {
	command
	on   string         // ready once this subject has interest, or
	when *regexp.Regexp // once the output matches
}

// step is one line of the script with its directives.
type step struct {
	name string
	command
	want   []*regexp.Regexp
	exit   int
	before []command
	beside *background
	self   *background // the step itself runs in the background
	then   []command
	until  *regexp.Regexp
	same   [2]string
	anyway bool
}

// parseFile reads a script; expand replaces $NAME.
func parseFile(path string, expand func(string) string) ([]step, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	steps, err := parse(f, expand)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return steps, nil
}

func parse(r io.Reader, expand func(string) string) ([]step, error) {
	var steps []step
	seen := map[string]bool{}
	scanner := bufio.NewScanner(r)
	for n := 1; scanner.Scan(); n++ {
		line := scanner.Text()
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var err error
		if directive, ok := strings.CutPrefix(line, "\t"); ok {
			if len(steps) == 0 {
				err = fmt.Errorf("directive before the first step")
			} else {
				err = steps[len(steps)-1].directive(directive, expand)
			}
		} else {
			name, args, ok := strings.Cut(line, ": ")
			if !ok || seen[name] {
				return nil, fmt.Errorf("line %d: want a new NAME: ARGUMENTS, got %q", n, line)
			}
			seen[name] = true
			s := step{name: name}
			s.command, err = parseCommand(args, expand)
			steps = append(steps, s)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	return steps, scanner.Err()
}

func parseCommand(text string, expand func(string) string) (command, error) {
	args, err := shellquote.Split(text)
	if err != nil {
		return command{}, fmt.Errorf("%q: %w", text, err)
	}
	for i, a := range args {
		if strings.HasPrefix(a, "$") {
			args[i] = os.Expand(a, expand)
		}
	}
	return command{args: args}, nil
}

func (s *step) directive(text string, expand func(string) string) (err error) {
	verb, rest, _ := strings.Cut(text, " ")
	switch verb {
	case "want":
		var re *regexp.Regexp
		re, err = regexp.Compile(rest)
		s.want = append(s.want, re)
	case "exit":
		s.exit, err = strconv.Atoi(rest)
	case "stdin":
		s.stdin = rest
	case "stdin-lines":
		s.stdin = strings.ReplaceAll(rest, " ", "\n") + "\n"
	case "tty":
		s.tty = true
	case "stdin-size":
		var n int
		n, err = strconv.Atoi(rest)
		s.stdin = strings.Repeat("x", n)
	case "ready-on":
		s.self = &background{on: rest}
	case "ready-when":
		s.self = &background{}
		s.self.when, err = regexp.Compile(rest)
	case "then", "before":
		var c command
		c, err = parseCommand(rest, expand)
		if verb == "then" {
			s.then = append(s.then, c)
		} else {
			s.before = append(s.before, c)
		}
	case "until":
		s.until, err = regexp.Compile(rest)
	case "background":
		s.beside = &background{}
		s.beside.command, err = parseCommand(rest, expand)
	case "background-on", "background-when":
		if s.beside == nil {
			return fmt.Errorf("%s without background", verb)
		}
		if verb == "background-on" {
			s.beside.on = rest
		} else {
			s.beside.when, err = regexp.Compile(rest)
		}
	case "same":
		var c command
		if c, err = parseCommand(rest, expand); err == nil && len(c.args) != 2 {
			err = fmt.Errorf("same needs two files")
		}
		if err == nil {
			s.same = [2]string(c.args)
		}
	case "anyway":
		s.anyway = true
	default:
		err = fmt.Errorf("unknown directive %q", verb)
	}
	return err
}
