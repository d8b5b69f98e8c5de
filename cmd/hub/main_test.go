package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"petiole/internal/apptest"
)

func TestMain(m *testing.M) {
	// The test binary is the program when a script runs it as hub.
	testscript.Main(m, map[string]func(){"hub": main})
}

func TestScripts(t *testing.T) { apptest.Run(t, "testdata/script") }
