package jetstream

import (
	"bytes"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// records returns how many records the log was given while fn ran.
func (n *node) records(fn func()) uint64 {
	before := n.e.wal.Written()
	fn()
	return uint64(n.e.wal.Written() - before)
}

// TestFarTimes asks for durations and times that end beyond what a clock of
// nanoseconds reaches: they are as good as never, and keep nobody busy.
func TestFarTimes(t *testing.T) {
	const forever = "9223372036854775807"
	n := startNode(t, t.TempDir())
	nc, _ := n.connect()
	ok := func(subject, body string) {
		t.Helper()
		if a, b := ask(t, nc, subject, body); a.Error != nil {
			t.Fatalf("%s: %s", subject, b)
		}
	}
	ok("STREAM.CREATE.S", `{"name":"S","subjects":["s"],"storage":"file","retention":"limits","allow_msg_ttl":true,"max_age":`+forever+`}`)
	pub := func(ttl string) {
		t.Helper()
		m := nats.NewMsg("s")
		if ttl != "" {
			m.Header.Set("Nats-TTL", ttl)
		}
		if r, err := nc.RequestMsg(m, patience); err != nil || bytes.Contains(r.Data, []byte(`"error"`)) {
			t.Fatalf("publish: %v %s", err, r.Data)
		}
	}
	ok("CONSUMER.CREATE.S.P", `{"stream_name":"S","config":{"name":"P","deliver_policy":"all","ack_policy":"explicit","ack_wait":`+forever+
		`,"inactive_threshold":9223372030000000000}}`)
	ok("CONSUMER.CREATE.S.Q", `{"stream_name":"S","config":{"durable_name":"Q","name":"Q","deliver_policy":"all","ack_policy":"explicit","pause_until":"9999-12-31T00:00:00Z"}}`)
	push := nats.NewInbox()
	beats, err := nc.SubscribeSync(push)
	if err != nil {
		t.Fatal(err)
	}
	ok("CONSUMER.CREATE.S.H", `{"stream_name":"S","config":{"name":"H","deliver_policy":"new","ack_policy":"none","deliver_subject":"`+push+
		`","idle_heartbeat":`+forever+`}}`)
	pub("")
	pub("2562047h")
	inbox := nats.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{
		`{"batch":2,"expires":` + forever + `,"idle_heartbeat":1000000000000000000}`,
		`{"batch":9223372036854775807,"expires":3600000000000,"idle_heartbeat":` + forever + `}`,
		`{"batch":-9223372036854775808,"expires":-9223372036854775808,"max_bytes":-9223372036854775808}`,
	} {
		if err := nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.S.P", inbox, []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	s, _ := n.e.Stream("S")
	logged := n.records(func() { time.Sleep(500 * time.Millisecond) })
	if logged > 20 {
		t.Errorf("%d records are logged while nothing happens", logged)
	}
	if st := s.State(); st.Msgs != 2 {
		t.Errorf("%d of 2 messages are left", st.Msgs)
	}
	if got, _, _ := sub.Pending(); got > 6 {
		t.Errorf("%d messages for three requests", got)
	}
	if got, _, _ := beats.Pending(); got > 4 {
		t.Errorf("%d messages for a push consumer of two", got)
	}
	if s.consumer("P") == nil {
		t.Error("the consumer is gone")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timerAt.IsZero() {
		return
	}
	for name, c := range s.consumers {
		if d := c.m.Deadline(); !d.IsZero() && time.Until(d) < 0 {
			t.Errorf("consumer %s is due at %v", name, d)
		}
	}
}

// TestFarSequences has clients ask for the last sequences there are: none of it
// may end the process, now or at the next start.
func TestFarSequences(t *testing.T) {
	const last = "18446744073709551615"
	for _, storage := range []string{"file", "memory"} {
		t.Run(storage, func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir)
			nc, _ := n.connect()
			for i, create := range []string{`,"first_seq":` + last, `,"first_seq":18446744073709551614`, ""} {
				name := fmt.Sprintf("S%d", i)
				ask(t, nc, "STREAM.CREATE."+name, `{"name":"`+name+`","subjects":["s`+fmt.Sprint(i)+`"],"retention":"limits","storage":"`+storage+`"`+create+`}`)
				for _, req := range []string{
					"STREAM.PURGE." + name + ` {"seq":` + last + `}`,
					"STREAM.PURGE." + name + ` {"seq":18446744073709551614}`,
					"STREAM.PURGE." + name + ` {"keep":` + last + `}`,
					"STREAM.MSG.DELETE." + name + ` {"seq":` + last + `}`,
					"STREAM.MSG.GET." + name + ` {"seq":` + last + `,"next_by_subj":"s"}`,
					"CONSUMER.CREATE." + name + `.C {"stream_name":"` + name + `","config":{"durable_name":"C","name":"C","ack_policy":"explicit","deliver_policy":"by_start_sequence","opt_start_seq":` + last + `}}`,
					"CONSUMER.RESET." + name + `.C {"seq":` + last + `}`,
					"STREAM.INFO." + name + ` {"deleted_details":true,"subjects_filter":">","offset":9223372036854775807}`,
					"STREAM.LIST " + `{"offset":-9223372036854775808}`,
				} {
					var subj, body string
					fmt.Sscanf(req, "%s", &subj)
					body = req[len(subj)+1:]
					ask(t, nc, subj, body)
					if _, err := nc.Request(fmt.Sprintf("s%d", i), []byte("x"), patience); err != nil && create == "" {
						t.Fatalf("publishing after %s: %v", req, err)
					}
				}
				for _, ack := range []string{last + "." + last, "0.0", "1." + last, last + ".1"} {
					for _, body := range []string{"", "-NAK {\"delay\":9223372036854775807}", "-NAK -9223372036854775808ns", "+NXT {\"batch\":-1}", "+WPI", "+TERM", "junk"} {
						if err := nc.PublishRequest("$JS.ACK."+name+".C.1."+ack+".1.1", "nobody", []byte(body)); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			if err := nc.FlushTimeout(patience); err != nil {
				t.Fatal(err)
			}
			if err := n.e.Checkpoint(); err != nil {
				t.Fatal(err)
			}
			n.crash()
			startNode(t, dir)
		})
	}
}

// A stream that keeps messages for a consumer without state of its own keeps
// them for the consumers that come later, too: a crash must not change what
// the log's records meant when they were acknowledged.
func TestInterestOfMemoryConsumers(t *testing.T) {
	dir := t.TempDir()
	n := startNode(t, dir)
	_, js := n.connect()
	ctx := testContext(t)
	s := createStream(t, js, jetstream.StreamConfig{
		Name: "S", Subjects: []string{"s"}, Retention: jetstream.InterestPolicy, MaxMsgs: 3, Discard: jetstream.DiscardNew,
	})
	must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Name: "M", AckPolicy: jetstream.AckExplicitPolicy, MemoryStorage: true, InactiveThreshold: time.Hour}))
	publishN(t, js, "s", 3)
	if _, err := js.Publish(ctx, "s", nil); err == nil {
		t.Fatal("a full stream takes a message")
	}
	must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "D", AckPolicy: jetstream.AckExplicitPolicy}))
	n.crash()
	n = startNode(t, dir)
	_, js = n.connect()
	s = must(js.Stream(ctx, "S"))
	if st := must(s.Info(ctx)).State; st.Msgs != 3 || st.LastSeq != 3 {
		t.Errorf("after the restart: %+v", st)
	}
	if info := must(must(s.Consumer(ctx, "D")).Info(ctx)); info.NumPending != 3 {
		t.Errorf("%d of 3 messages are left for the durable consumer", info.NumPending)
	}
}

// A batch that a client does not end does not stay in memory.
func TestBatchesGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Stream{e: new(Engine), batches: map[string]*stagedBatch{}}
		add := func(id, seq string) {
			t.Helper()
			h := []byte("NATS/1.0\r\nNats-Batch-Sequence: " + seq + "\r\n\r\n")
			if _, _, refused := s.stage(id, []byte("s"), h, make([]byte, 1000)); refused != nil {
				t.Fatal(refused)
			}
		}
		left := func() (batches, octets int, reaping bool) {
			s.batchMu.Lock()
			defer s.batchMu.Unlock()
			return len(s.batches), s.batched, s.reaping
		}
		add("left", "1")
		time.Sleep(batchTimeout / 2)
		add("goes-on", "1")
		time.Sleep(batchTimeout)
		synctest.Wait()
		add("goes-on", "2")
		if n, _, _ := left(); n != 1 {
			t.Errorf("%d batches, want the one that goes on", n)
		}
		time.Sleep(4 * batchTimeout)
		synctest.Wait()
		if n, octets, reaping := left(); n != 0 || octets != 0 || reaping {
			t.Errorf("%d batches of %d octets are left", n, octets)
		}
		add("again", "1")
		if _, _, reaping := left(); !reaping {
			t.Error("nobody looks after the next one")
		}
		time.Sleep(3 * batchTimeout)
	})
}

// Consumers follow when their stream's retention changes.
func TestRetentionChanges(t *testing.T) {
	for _, memory := range []bool{false, true} {
		t.Run(fmt.Sprint("memory consumer ", memory), func(t *testing.T) {
			dir := t.TempDir()
			n := startNode(t, dir)
			_, js := n.connect()
			ctx := testContext(t)
			cfg := jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}
			s := createStream(t, js, cfg)
			c := must(s.CreateConsumer(ctx, jetstream.ConsumerConfig{
				Name: "C", AckPolicy: jetstream.AckExplicitPolicy, MemoryStorage: memory, InactiveThreshold: time.Hour,
			}))
			fetch := func(k int) {
				t.Helper()
				for m := range must(c.Fetch(k)).Messages() {
					if err := m.DoubleAck(ctx); err != nil {
						t.Fatal(err)
					}
				}
			}
			publishN(t, js, "s", 5)
			fetch(2)
			cfg.Retention = jetstream.InterestPolicy
			must(js.UpdateStream(ctx, cfg))
			fetch(1)
			publishN(t, js, "s", 2)
			if st := must(s.Info(ctx)).State; st.Msgs != 4 {
				t.Errorf("with interest retention: %+v", st)
			}
			n.crash()
			n = startNode(t, dir)
			_, js = n.connect()
			s = must(js.Stream(ctx, "S"))
			if st := must(s.Info(ctx)).State; st.Msgs != 4 || st.FirstSeq != 4 || st.LastSeq != 7 {
				t.Errorf("after the restart: %+v", st)
			}
			c = must(s.Consumer(ctx, "C"))
			cfg.Retention = jetstream.LimitsPolicy
			must(js.UpdateStream(ctx, cfg))
			fetch(1)
			if st := must(s.Info(ctx)).State; st.Msgs != 4 {
				t.Errorf("with limits again: %+v", st)
			}
		})
	}
}
