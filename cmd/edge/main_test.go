package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"petiole/internal/apptest"
)

func TestMain(m *testing.M) {
	// The test binary is the program when a script runs it as edge.
	testscript.Main(m, map[string]func(){"edge": main})
}

func TestScripts(t *testing.T) { apptest.Run(t, "testdata/script") }
