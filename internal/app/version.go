package app

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Version is the release; the linker may set it.
var Version = "0.1.0-dev"

// Commit returns the revision that the program was built from, if known.
func Commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return s.Value[:12]
		}
	}
	return ""
}

// VersionLine is what --version prints.
func VersionLine(program string) string {
	line := fmt.Sprintf("%s: v%s (%s %s/%s", program, Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if c := Commit(); c != "" {
		line += ", " + c
	}
	return line + ")"
}
