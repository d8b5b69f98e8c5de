package app

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// flagSpec describes one flag as nats-server's users may write it. Go's flag
// package, which nats-server uses, takes one dash or two for every flag;
// cobra takes one dash for letters only.
type flagSpec struct {
	long  string   // cobra's name
	other []string // further spellings, one or two dashes
	value bool     // takes a value
	// remedy, if set, marks a flag of nats-server that is not supported: what
	// to do instead.
	remedy string
}

// flagSpecs lists every flag of the two programs, and nats-server's that are
// refused by name.
var flagSpecs = []flagSpec{
	{long: "config", other: []string{"c"}, value: true},
	{long: "addr", other: []string{"a", "net"}, value: true},
	{long: "port", other: []string{"p"}, value: true},
	{long: "name", other: []string{"n", "server_name"}, value: true},
	{long: "jetstream", other: []string{"js"}},
	{long: "store_dir", other: []string{"sd"}, value: true},
	{long: "debug", other: []string{"D"}},
	{long: "trace", other: []string{"V"}},
	{long: "logtime", other: []string{"T"}},
	{long: "logtime_utc"},
	{long: "log", other: []string{"l"}, value: true},
	{long: "pid", other: []string{"P"}, value: true},
	{long: "ports_file_dir", value: true},
	{long: "log_size_limit", value: true},
	{long: "signal", other: []string{"sl"}, value: true},
	{long: "client_advertise", value: true},
	{long: "tls"},
	{long: "tlsverify"},
	{long: "tlscert", value: true},
	{long: "tlskey", value: true},
	{long: "tlscacert", value: true},
	{long: "user", value: true},
	{long: "pass", value: true},
	{long: "auth", value: true},
	{long: "version", other: []string{"v"}},
	{long: "help", other: []string{"h"}},
	{long: "test", other: []string{"t"}},

	{long: "socket", value: true},
	{long: "json"},
	{long: "keep"},
	{long: "from", value: true},
	{long: "limit", value: true},
	{long: "group", value: true},

	{long: "http_port", other: []string{"m"}, value: true, remedy: "`edge status` asks a running server"},
	{long: "https_port", other: []string{"ms"}, value: true, remedy: "`edge status` asks a running server"},
	{long: "profile", value: true, remedy: "leave it out"},
	{long: "syslog", other: []string{"s"}, remedy: "use --log, or let the service manager collect standard error"},
	{long: "remote_syslog", other: []string{"r"}, value: true, remedy: "use --log, or let the service manager collect standard error"},
	{long: "max_traced_msg_len", value: true, remedy: "payloads are not traced"},
	{long: "help_tls", remedy: "see `tls` in README.md"},
	{long: "trace_verbose", other: []string{"VV"}, remedy: "use -V"},
	{long: "debug_trace_verbose", other: []string{"DVV"}, remedy: "use -DV"},
	{long: "cluster", value: true, remedy: "each program runs as one node"},
	{long: "cluster_listen", value: true, remedy: "each program runs as one node"},
	{long: "cluster_name", value: true, remedy: "each program runs as one node"},
	{long: "cluster_advertise", value: true, remedy: "each program runs as one node"},
	{long: "routes", value: true, remedy: "each program runs as one node"},
	{long: "no_advertise", remedy: "each program runs as one node"},
	{long: "connect_retries", value: true, remedy: "each program runs as one node"},
}

// lookupFlag finds the spec of a name without its dashes.
func lookupFlag(name string) *flagSpec {
	for i := range flagSpecs {
		s := &flagSpecs[i]
		if s.long == name {
			return s
		}
		for _, o := range s.other {
			if o == name {
				return s
			}
		}
	}
	return nil
}

// Args rewrites a command line from nats-server's ways of writing flags to the
// one cobra takes: every flag becomes --long or --long=value. What it does not
// know is passed on for cobra to complain about; flags of nats-server that are
// not supported are refused here, by name.
func Args(args []string) ([]string, error) {
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		return args, nil // a shell asks how to go on; half a flag is no flag yet
	}
	out := make([]string, 0, len(args))
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return append(out, args[i:]...), nil
		}
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		dashes := len(arg) - len(strings.TrimLeft(arg, "-"))
		if dashes < 1 || dashes > 2 || name == "" {
			out = append(out, arg)
			continue
		}
		spec := lookupFlag(name)
		if spec == nil && dashes == 1 && !hasValue && len(name) > 1 {
			// -DV: letters of flags without values, put together.
			if together := split(name); together != nil {
				out = append(out, together...)
				continue
			}
		}
		switch {
		case spec == nil:
			out = append(out, arg)
		case spec.remedy != "":
			return nil, Exit(ExitUsage, fmt.Errorf("%s is not supported yet; %s", arg, spec.remedy))
		case hasValue:
			out = append(out, "--"+spec.long+"="+value)
		case spec.value && i+1 < len(args):
			i++
			out = append(out, "--"+spec.long+"="+args[i])
		default:
			out = append(out, "--"+spec.long)
		}
	}
	return out, nil
}

// split takes apart letters put together; nil if any is not a flag without
// value.
func split(letters string) []string {
	var out []string
	for _, r := range letters {
		s := lookupFlag(string(r))
		if s == nil || s.value || s.remedy != "" {
			return nil
		}
		out = append(out, "--"+s.long)
	}
	return out
}
