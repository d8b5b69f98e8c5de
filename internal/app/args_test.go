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
		"-n -js":                         "--name=-js",
		"-v":                             "--version",
		"-version":                       "--version",
		"--version":                      "--version",
		"-t -c x":                        "--test --config=x",
		"-l /log -P /pid":                "--log=/log --pid=/pid",
		"--user a --pass b --auth c":     "--user=a --pass=b --auth=c",
		"status --json -c x":             "status --json --config=x",
		"export ls -json -socket /s":     "export ls --json --socket=/s",
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
	for _, line := range []string{"-m 8222", "--http_port=8222", "-cluster nats://x", "--routes x", "-s", "-DVV", "--tls"} {
		_, err := Args(strings.Fields(line))
		if err == nil || ExitCode(err) != ExitUsage || !strings.Contains(err.Error(), "is not supported yet; ") {
			t.Errorf("%q: got %v", line, err)
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
