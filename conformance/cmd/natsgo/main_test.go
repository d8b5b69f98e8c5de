package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"petiole/conformance/sandbox"
	"petiole/conformance/suite"
	"petiole/conformance/tester"
)

func TestMain(m *testing.M) {
	sandbox.Main(suite.Inside)
	os.Exit(m.Run())
}

// sample is the short form of the suites: some tests of each area, none of
// which measures how fast the machine is.
var sample = map[string]string{
	"connection":   "ConnectedServer ConnectVerbose GetClientIP ErrOnMaxPayloadLimit NoEcho GetRTT ServersOption MaxControlLineExceededErrorHandler MaxSubscriptionsExceeded NoHeaderSupport",
	"reconnect":    "BasicReconnectFunctionality ExtendedReconnectFunctionality QueueSubsOnReconnect ForceReconnect AutoUnsubAndReconnect BasicClusterReconnect",
	"auth":         "Auth AuthServers TokenAuth NkeyAuth PermViolation SubscribeSyncPermissionError AuthFailNoDisconnectErrCB",
	"TLS":          "ServerSecureConnections ClientCertificate ServerTLSHintConnections TLSHandshakeFirst TLSHandshakeFirstMTLSReject ClientCertificateReloadOnServerRestart",
	"subscription": "ServerAutoUnsub ClientSyncAutoUnsub AsyncSubscribe QueueSubscriber Unsubscribe BadSubjectsAndQueueNames SlowSubscriber",
	"request":      "Request SimultaneousRequests BasicNoRespondersSupport RequestMsg OldRequest RequestMultipleReplies",
	"drain":        "Drain DrainConnection DrainQueueSub",
	"headers":      "BasicHeaders MsgHeadersCasePreserving Msg_RespondMsg",
	"micro":        "ServiceBasics Groups MonitoringHandlers CustomQueueGroup",
}

// TestEdge runs the sample against edge; all of it has to pass.
func TestEdge(t *testing.T) {
	var names []string
	for _, area := range sample {
		names = append(names, strings.Fields(area)...)
	}
	verdicts, err := suite.RunAndJudge(t.Context(), suite.Options{
		Kind: tester.Edge, Suites: []string{"core", "micro"}, Parallel: 4, Out: os.Stdout,
		Run: regexp.MustCompile(`/Test(` + strings.Join(names, "|") + `)$`),
	})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, v := range verdicts {
		v.Print(os.Stdout, true)
		if err := v.Check(100); err != nil {
			t.Error(err)
		}
		n += v.Counts
	}
	if n != len(names) {
		t.Errorf("%d tests counted, the sample has %d", n, len(names))
	}
}
