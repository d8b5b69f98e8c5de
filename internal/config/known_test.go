package config

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// natsServerKeys are the keys that nats-server v2.15.2 knows, by block; where
// the block stands, with %s for the key and a value.
var natsServerKeys = []struct{ where, keys string }{
	{"%s", `listen client_advertise port server_name host net debug trace trace_verbose trace_headers logtime logtime_utc
		mappings maps disable_sublist_cache no_sublist_cache accounts default_sentinel authorization http https http_port
		monitor_port https_port http_base_path cluster gateway leaf leafnodes store_dir storedir jetstream logfile log_file
		logfile_size_limit log_size_limit logfile_max_num log_max_num syslog remote_syslog pidfile pid_file ports_file_dir
		prof_port prof_block_rate max_control_line max_payload max_pending proxy_protocol max_connections max_conn
		max_traced_msg_len max_subscriptions max_subs max_sub_tokens max_subscription_tokens ping_interval ping_max tls ocsp
		allow_non_tls write_deadline write_timeout lame_duck_duration lame_duck_grace_period operator operators roots root
		root_operators root_operator resolver account_resolver accounts_resolver resolver_tls resolver_preload
		resolver_pinned_accounts no_auth_user system_account system no_system_account no_system no_sys_acc no_header_support
		trusted trusted_keys connect_error_reports reconnect_error_reports websocket ws mqtt server_tags server_metadata
		feature_flags default_js_domain ocsp_cache no_fast_producer_stall max_closed_clients proxies`},
	{"jetstream { %s }", `strict store store_dir storedir sync sync_interval max_memory_store max_mem_store max_mem max_file_store
		max_file domain enable enabled key ek encryption_key prev_key prev_ek prev_encryption_key cipher extension_hint limits tpm
		unique_tag max_outstanding_catchup max_buffered_size max_buffered_msgs request_queue_limit info_queue_limit meta_compact
		meta_compact_size meta_compact_sync max_concurrent_io`},
	{"authorization { %s }", `user username pass password token timeout users default_permission default_permissions permissions
		auth_callout auth_hook proxy_required`},
	{"authorization { users: [ { %s } ] }", `nkey user username pass password permission permissions authorization
		allowed_connection_types connection_types clients proxy_required`},
	{"authorization { default_permissions { %s } }", `pub publish import sub subscribe export publish_allow_responses allow_responses`},
	{"authorization { default_permissions { allow_responses { %s } } }", `max max_msgs max_messages max_responses expires expiration ttl`},
	{"tls { %s }", `cert_file key_file ca_file insecure verify verify_and_map verify_cert_and_check_known_urls
		allow_insecure_cipher_suites cipher_suites curve_preferences timeout connection_rate_limit pinned_certs cert_store
		cert_match_by cert_match ca_certs_match handshake_first first immediate cert_match_skip_invalid ocsp_peer certs certificates
		min_version`},
}

// TestEveryKeyOfNatsServer: each is taken, ignored with a warning or refused by
// name with a remedy; none is unknown, and none is ignored in silence.
func TestEveryKeyOfNatsServer(t *testing.T) {
	counts := make(map[string]int)
	for _, block := range natsServerKeys {
		for key := range strings.FieldsSeq(block.keys) {
			// No key takes this value, so that one that is taken complains too.
			path := write(t, "x.conf", fmt.Sprintf(block.where, key+": [ { not_a_value_of_any_key: [ 1 ] } ]"))
			cfg, err := Load(path, Edge)
			var e *Error
			switch {
			case err == nil && len(cfg.Warnings) == 1 && cfg.Warnings[0].Key == key && cfg.Warnings[0].Line == 1 && cfg.Warnings[0].Remedy != "":
				counts["ignored"]++
				continue
			case !errors.As(err, &e):
				t.Errorf("%s: %v is accepted without a word", fmt.Sprintf(block.where, key), err)
				continue
			}
			text := err.Error()
			switch {
			case strings.Contains(text, key+": unknown key"):
				t.Errorf("%s is not known", fmt.Sprintf(block.where, key))
			case strings.Contains(text, ": not supported yet; "):
				counts["refused"]++
			default:
				counts["taken"]++
			}
		}
	}
	t.Logf("%v", counts)
	for _, kind := range []string{"taken", "refused", "ignored"} {
		if counts[kind] < 10 {
			t.Errorf("%d keys are %s: the test is wrong", counts[kind], kind)
		}
	}
}
