package app

import (
	"slices"
	"strings"
	"testing"
)

func TestArgs(t *testing.T) {
	for line, want := range map[string]string{
		"":                               "",
		"-js":                            "--jetstream",
		"--js":                           "--jetstream",
		"-jetstream":                     "--jetstream",
		"--jetstream":                    "--jetstream",
		"-js=false":                      "--jetstream=false",
		"-sd /data":                      "--store_dir=/data",
		"--sd=/data":                     "--store_dir=/data",
		"-store_dir /data":               "--store_dir=/data",
		"--store_dir /data -js":          "--store_dir=/data --jetstream",
		"-c edge.conf":                   "--config=edge.conf",
		"-config edge.conf":              "--config=edge.conf",
		"--config=edge.conf":             "--config=edge.conf",
		"-p 4333 -a 127.0.0.1":           "--port=4333 --addr=127.0.0.1",
		"-p -1":                          "--port=-1",
		"--net 0.0.0.0":                  "--addr=0.0.0.0",
		"-net 0.0.0.0":                   "--addr=0.0.0.0",
		"-D -V":                          "--debug --trace",
		"-DV":                            "--debug --trace",
		"-TDV":                           "--logtime --debug --trace",
		"-T --logtime_utc":               "--logtime --logtime_utc",
		"-n -js":                         "--name=-js",
		"-v":                             "--version",
		"-version":                       "--version",
		"--version":                      "--version",
		"-t -c x":                        "--test --config=x",
		"-l /log -P /pid":                "--log=/log --pid=/pid",
		"--user a --pass b --auth c":     "--user=a --pass=b --auth=c",
		"status --json -c x":             "status --json --config=x",
		"export ls -json -socket /s":     "export ls --json --socket=/s",
		"-sl reload":                     "--signal=reload",
		"--signal ldm=12":                "--signal=ldm=12",
		"-sl=quit=/run/edge.pid":         "--signal=quit=/run/edge.pid",
		"--tls --tlscert a -tlskey=b":    "--tls --tlscert=a --tlskey=b",
		"__complete --sig":               "__complete --sig",
		"-nonsense":                      "-nonsense",
		"--nonsense=3":                   "--nonsense=3",
		"-Dx":                            "-Dx",
		"- -- -js":                       "- -- -js",
		"-- -sd x":                       "-- -sd x",
		"-c":                             "--config",
		"---js":                          "---js",
		"demo -keep":                     "demo --keep",
		"-a=localhost -port=5 status -h": "--addr=localhost --port=5 status --help",
	} {
		got, err := Args(strings.Fields(line))
		if err != nil || !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%q: got %q, %v, want %q", line, got, err, want)
		}
	}
}

func TestArgsRefusesByName(t *testing.T) {
	for _, line := range []string{"-m 8222", "--http_port=8222", "-cluster nats://x", "--routes x", "-s", "-DVV"} {
		_, err := Args(strings.Fields(line))
		if err == nil || ExitCode(err) != ExitUsage || !strings.Contains(err.Error(), "is not supported yet; ") {
			t.Errorf("%q: got %v", line, err)
		}
	}
}

// TestEveryFlagOfNatsServer: each of nats-server's flags, in each spelling, is
// taken or refused by name, and takes a value if and only if it does there.
func TestEveryFlagOfNatsServer(t *testing.T) {
	const (
		yes = iota // taken
		no         // refused by name
	)
	for _, f := range []struct {
		spellings string
		value     bool
		want      int
	}{
		{"h help", false, yes},
		{"p port", true, yes},
		{"n name server_name", true, yes},
		{"a addr net", true, yes},
		{"client_advertise", true, yes},
		{"D debug", false, yes},
		{"V trace", false, yes},
		{"DV", false, yes},
		{"VV", false, no},
		{"DVV", false, no},
		{"T logtime", false, yes},
		{"logtime_utc", false, yes},
		{"user", true, yes},
		{"pass", true, yes},
		{"auth", true, yes},
		{"m http_port", true, no},
		{"ms https_port", true, no},
		{"c config", true, yes},
		{"t", false, yes},
		{"sl signal", true, yes},
		{"P pid", true, yes},
		{"ports_file_dir", true, yes},
		{"l log", true, yes},
		{"log_size_limit", true, yes},
		{"s syslog", false, no},
		{"r remote_syslog", true, no},
		{"v version", false, yes},
		{"profile", true, no},
		{"routes", true, no},
		{"cluster cluster_listen", true, no},
		{"cluster_advertise", true, no},
		{"no_advertise", false, no},
		{"connect_retries", true, no},
		{"cluster_name", true, no},
		{"help_tls", false, no},
		{"tls", false, yes},
		{"tlsverify", false, yes},
		{"tlscert", true, yes},
		{"tlskey", true, yes},
		{"tlscacert", true, yes},
		{"max_traced_msg_len", true, no},
		{"js jetstream", false, yes},
		{"sd store_dir", true, yes},
	} {
		for name := range strings.FieldsSeq(f.spellings) {
			for _, dash := range []string{"-", "--"} {
				if name == "DV" && dash == "--" {
					continue // no one writes that
				}
				got, err := Args([]string{dash + name, "X"})
				if f.want == no {
					if err == nil || ExitCode(err) != ExitUsage || !strings.HasPrefix(err.Error(), dash+name+" is not supported yet; ") {
						t.Errorf("%s%s: %q, %v; want it refused by name", dash, name, got, err)
					}
					continue
				}
				if err != nil || len(got) == 0 || !strings.HasPrefix(got[0], "--") {
					t.Errorf("%s%s: %q, %v", dash, name, got, err)
					continue
				}
				if took := strings.HasSuffix(got[0], "=X"); took != f.value {
					t.Errorf("%s%s: %q; takes a value: %t", dash, name, got, took)
				}
				// The program has a flag for it.
				long, _, _ := strings.Cut(strings.TrimPrefix(got[0], "--"), "=")
				if cmd := Command(Program{}); cmd.Flags().Lookup(long) == nil && cmd.PersistentFlags().Lookup(long) == nil {
					t.Errorf("%s%s becomes --%s, which is no flag", dash, name, long)
				}
			}
		}
	}
}

// TestFlagSpecsAreUnambiguous checks that no spelling is claimed twice.
func TestFlagSpecsAreUnambiguous(t *testing.T) {
	seen := make(map[string]string)
	for _, s := range flagSpecs {
		for _, name := range append([]string{s.long}, s.other...) {
			if other, dup := seen[name]; dup {
				t.Errorf("%s is a spelling of both %s and %s", name, other, s.long)
			}
			seen[name] = s.long
		}
	}
}
