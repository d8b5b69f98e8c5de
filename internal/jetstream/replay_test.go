package jetstream

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/nats-io/nats.go"

	"petiole/storage"
)

// picture is what a stream and its consumers look like.
func (s *Stream) picture(t *testing.T) string {
	t.Helper()
	st := s.store.State()
	st.LastTime, st.FirstTime = st.LastTime/1e9, st.FirstTime/1e9
	out := fmt.Sprintf("%+v\nretention %v, max msgs %d\n", st, s.Config().Retention, s.Config().MaxMsgs)
	err := s.store.Range(0, func(m storage.Message) bool {
		out += fmt.Sprintf("%d %s %q %q\n", m.Seq, m.Subject, m.Header, m.Data)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range s.ConsumerInfos() {
		out += fmt.Sprintf("consumer %s: delivered %d/%d floor %d/%d pending %d of ack, %d to deliver\n", c.Name,
			c.Delivered.Consumer, c.Delivered.Stream, c.AckFloor.Consumer, c.AckFloor.Stream, c.NumAckPending, c.NumPending)
	}
	return out
}

// TestReplayIsWhatHappened has a client do all kinds of things to a stream, ends
// the process, and wants what the log's replay makes to be what there was.
func TestReplayIsWhatHappened(t *testing.T) {
	for round := range uint64(4) {
		for _, retention := range []string{"limits", "interest", "workqueue"} {
			t.Run(fmt.Sprint(retention, round), func(t *testing.T) {
				t.Parallel()
				rnd := rand.New(rand.NewPCG(round, 7))
				dir := t.TempDir()
				n := startNode(t, dir)
				nc, _ := n.connect()
				discard := []string{"old", "new"}[round%2]
				config := func(max int) string {
					return fmt.Sprintf(`{"name":"S","subjects":["s.*"],"storage":"file","retention":"%s","discard":"%s","max_msgs":%d,"max_msgs_per_subject":9,"allow_rollup_hdrs":true,"allow_atomic":true}`,
						retention, discard, max)
				}
				ask(t, nc, "STREAM.CREATE.S", config(20))
				// Each consumer has its own subjects, which a work queue asks for.
				filters := map[string]string{"A": "s.a", "B": "s.b"}
				if retention != "workqueue" {
					filters["C"], filters["M"] = "s.*", "s.*"
				}
				names := []string{"A", "B", "C", "M"}[:len(filters)]
				create := func(name string) {
					ask(t, nc, "CONSUMER.CREATE.S."+name+"."+filters[name], fmt.Sprintf(
						`{"stream_name":"S","config":{"name":"%s","ack_policy":"explicit","deliver_policy":"all","filter_subject":"%s","mem_storage":%v,"inactive_threshold":3600000000000,"ack_wait":3600000000000}}`,
						name, filters[name], name == "M" && retention == "interest"))
				}
				for _, name := range names {
					create(name)
				}
				var unacked []string
				batch := 0
				for step := range 150 {
					switch k := rnd.IntN(20); {
					case k < 9:
						m := nats.NewMsg("s." + string("ab"[rnd.IntN(2)]))
						m.Data = fmt.Append(nil, step)
						switch rnd.IntN(8) {
						case 0:
							m.Header.Set("Nats-Msg-Id", fmt.Sprint(rnd.IntN(5)))
						case 1:
							m.Header.Set("Nats-Expected-Last-Sequence", fmt.Sprint(step))
						case 2:
							m.Header.Set("Nats-Rollup", "sub")
						}
						must(nc.RequestMsg(m, patience))
					case k < 10:
						batch++
						for i := 1; i <= 3; i++ {
							m := nats.NewMsg("s.a")
							m.Header.Set("Nats-Batch-Id", fmt.Sprint("b", batch))
							m.Header.Set("Nats-Batch-Sequence", fmt.Sprint(i))
							if i == 3 {
								m.Header.Set("Nats-Batch-Commit", "1")
							}
							must(nc.RequestMsg(m, patience))
						}
					case k < 13:
						name := names[rnd.IntN(len(names))]
						if m, err := nc.Request("$JS.API.CONSUMER.MSG.NEXT.S."+name, []byte(`{"batch":1,"no_wait":true}`), patience); err == nil && m.Reply != "" {
							unacked = append(unacked, m.Reply)
						}
					case k < 17:
						if len(unacked) == 0 {
							continue
						}
						i := rnd.IntN(len(unacked))
						how := []string{"", "", "", "+TERM", "-NAK"}[rnd.IntN(5)]
						if rnd.IntN(2) == 0 { // not waited for: what follows overtakes it
							if err := nc.Publish(unacked[i], []byte(how)); err != nil {
								t.Fatal(err)
							}
						} else {
							_, _ = nc.Request(unacked[i], []byte(how), patience) // none if the consumer is gone
						}
						unacked = slices.Delete(unacked, i, i+1)
					case k < 18:
						ask(t, nc, "STREAM.MSG.DELETE.S", fmt.Sprintf(`{"seq":%d}`, 1+rnd.IntN(step+1)))
					case k < 19:
						switch rnd.IntN(4) {
						case 0:
							ask(t, nc, "STREAM.PURGE.S", `{"filter":"s.a","keep":2}`)
						case 1:
							ask(t, nc, "STREAM.UPDATE.S", config(5+rnd.IntN(20)))
						default:
							if err := n.e.Checkpoint(); err != nil {
								t.Fatal(err)
							}
						}
					default:
						name := names[rnd.IntN(len(names))]
						ask(t, nc, "CONSUMER.DELETE.S."+name, "")
						unacked = slices.DeleteFunc(unacked, func(r string) bool { return r[len("$JS.ACK.S."):][:1] == name })
						create(name)
					}
				}
				ask(t, nc, "STREAM.CREATE.END", `{"name":"END","subjects":["end"],"storage":"file"}`) // the log has all before it
				want := must2(n.e.Stream("S")).picture(t)
				n.crash()
				n = startNode(t, dir)
				if got := must2(n.e.Stream("S")).picture(t); got != want {
					t.Errorf("after the restart\n%s\nthere was\n%s", got, want)
				}
			})
		}
	}
}
