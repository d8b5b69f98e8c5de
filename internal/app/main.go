package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"petiole/internal/admin"
	"petiole/internal/config"
)

// Program describes what makes a program edge or hub.
type Program struct {
	Program config.Program
	Short   string // one line of help
	Long    string // the rest of it
	// Link starts the program's end of the link, or returns nil if none is
	// configured. Its error has an exit code.
	Link func(*Node) (Link, error)
	// Commands adds subcommands to the program's own.
	Commands func(root *cobra.Command, f *Flags)
}

// Flags are the flags of the bare command, as nats-server has them.
type Flags struct {
	program Program

	Config   string
	Addr     string
	Port     int
	Name     string
	JS       bool
	StoreDir string
	Debug    bool
	Trace    bool
	LogTime  bool
	LogUTC   bool
	Log      string
	PID      string
	User     string
	Pass     string
	Token    string
	Test     bool
	Socket   string
	Signal   string
	PortsDir string
	LogLimit int64
	Advert   string
	TLS      bool
	TLSFiles config.TLS // cert, key and ca file, verify
	version  bool
}

// Main runs the program with the process's arguments and ends the process.
func Main(p Program) {
	os.Exit(Run(p, os.Args[1:], os.Stdout, os.Stderr))
}

// Run runs the program with args and returns its exit code.
func Run(p Program, args []string, stdout, stderr io.Writer) int {
	name := p.Program.String()
	help := name // the command whose help may help
	args, err := Args(args)
	if err == nil {
		root := Command(p)
		root.SetArgs(args)
		root.SetOut(stdout)
		root.SetErr(stderr)
		var ran *cobra.Command
		if ran, err = root.ExecuteContextC(context.Background()); ran != nil {
			help = ran.CommandPath()
		}
	}
	if err == nil {
		return ExitOK
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintf(stderr, "%s: %s\n", name, line)
	}
	if ExitCode(err) == ExitUsage {
		fmt.Fprintf(stderr, "%s: see %s --help\n", name, help)
	}
	return ExitCode(err)
}

// Command returns the program's command: without a subcommand it serves.
func Command(p Program) *cobra.Command {
	f := &Flags{program: p}
	root := &cobra.Command{
		Use:           p.Program.String(),
		Short:         p.Short,
		Long:          p.Long,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return Exit(ExitUsage, fmt.Errorf("unknown command %q%s", args[0], suggest(cmd, args[0])))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.version {
				fmt.Fprintln(cmd.OutOrStdout(), VersionLine(p.Program.String()))
				return nil
			}
			if f.Signal != "" {
				return f.sendSignal(cmd)
			}
			return serve(cmd, f)
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return Exit(ExitUsage, flagError(err)) })

	shared := root.PersistentFlags()
	shared.StringVarP(&f.Config, "config", "c", "", "configuration `file`")
	shared.StringVar(&f.StoreDir, "store_dir", "", "store `directory` of JetStream (-sd)")
	shared.StringVar(&f.Socket, "socket", "", "`path` of the running program's admin socket, for status and the like (default: in the store directory)")
	shared.SortFlags = false

	own := root.Flags()
	own.SortFlags = false
	own.StringVarP(&f.Addr, "addr", "a", config.DefaultHost, "`address` to listen on (--net)")
	own.IntVarP(&f.Port, "port", "p", config.DefaultPort, "`port` to listen on, -1 for one the system chooses")
	own.StringVarP(&f.Name, "name", "n", "", "server `name`")
	own.BoolVar(&f.JS, "jetstream", false, "turn JetStream on (-js)")
	own.BoolVarP(&f.Debug, "debug", "D", false, "log more")
	own.BoolVarP(&f.Trace, "trace", "V", false, "log the protocol (-DV: both)")
	own.BoolVarP(&f.LogTime, "logtime", "T", true, "log lines start with the time")
	own.BoolVar(&f.LogUTC, "logtime_utc", false, "these times are UTC")
	own.StringVarP(&f.Log, "log", "l", "", "log `file`")
	own.StringVarP(&f.PID, "pid", "P", "", "`file` to write the process id to")
	own.StringVar(&f.PortsDir, "ports_file_dir", "", "`directory` for a file that lists the ports")
	own.Int64Var(&f.LogLimit, "log_size_limit", 0, "`octets` from which a new log file is begun")
	own.StringVar(&f.Signal, "signal", "", "send a running program a `signal` and exit (-sl): ldm, stop, quit, term, reopen, reload; =PID or =PIDFILE names the process")
	own.StringVar(&f.Advert, "client_advertise", "", "`host:port` that clients are told")
	own.BoolVar(&f.TLS, "tls", false, "clients use TLS")
	own.BoolVar(&f.TLSFiles.Verify, "tlsverify", false, "TLS, and clients show certificates")
	own.StringVar(&f.TLSFiles.CertFile, "tlscert", "", "PEM `file` with the certificate")
	own.StringVar(&f.TLSFiles.KeyFile, "tlskey", "", "PEM `file` with its key")
	own.StringVar(&f.TLSFiles.CAFile, "tlscacert", "", "PEM `file` of the authority for clients' certificates")
	own.StringVar(&f.User, "user", "", "`user` that clients log in as")
	own.StringVar(&f.Pass, "pass", "", "`password` of that user")
	own.StringVar(&f.Token, "auth", "", "`token` that clients log in with")
	own.BoolVarP(&f.Test, "test", "t", false, "check the configuration and exit")
	own.BoolVarP(&f.version, "version", "v", false, "print the version and exit")
	own.BoolP("help", "h", false, "print this help")

	for _, name := range []string{"log", "pid", "tlscert", "tlskey", "tlscacert"} {
		_ = own.SetAnnotation(name, cobra.BashCompFilenameExt, nil) // files, for the shell
	}
	_ = root.RegisterFlagCompletionFunc("signal", cobra.FixedCompletions([]string{"ldm", "quit", "reload", "reopen", "stop", "term"}, cobra.ShellCompDirectiveNoFileComp))
	_ = root.RegisterFlagCompletionFunc("store_dir", dirs)
	_ = root.RegisterFlagCompletionFunc("ports_file_dir", dirs)

	root.AddCommand(statusCommand(f), storageCommand(f), checkCommand(f))
	if p.Commands != nil {
		p.Commands(root, f)
	}
	root.InitDefaultCompletionCmd() // now, so that it is a command as all others
	for _, c := range allCommands(root) {
		if c.Name() == "completion" {
			c.RunE = func(cmd *cobra.Command, _ []string) error { return NeedsCommand(cmd) }
			c.Args = nil
		}
		c.SuggestionsMinimumDistance = 2
		if c != root && c.Args == nil {
			c.Args = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 {
					if cmd.HasSubCommands() {
						return Exit(ExitUsage, fmt.Errorf("unknown command %q of %s%s", args[0], cmd.CommandPath(), suggest(cmd, args[0])))
					}
					return Exit(ExitUsage, fmt.Errorf("%s takes no argument %q%s", cmd.CommandPath(), args[0], suggest(cmd, args[0])))
				}
				return nil
			}
		}
	}
	return root
}

// NeedsCommand is what a command answers that does nothing without one of its
// subcommands.
func NeedsCommand(c *cobra.Command) error {
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return Exit(ExitUsage, fmt.Errorf("%s needs a command: %s", c.CommandPath(), strings.Join(names, ", ")))
}

// dirs has the shell complete directories.
func dirs(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveFilterDirs
}

// flagError says what is accepted, where the flags' own words name the function
// that refused the value.
func flagError(err error) error {
	var num *strconv.NumError
	if !errors.As(err, &num) {
		return err
	}
	accepted := "a number"
	if num.Func == "ParseBool" {
		accepted = "true or false"
	}
	return fmt.Errorf("%s; accepted: %s", strings.TrimSuffix(err.Error(), ": "+num.Error()), accepted)
}

func allCommands(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		all = append(all, allCommands(sub)...)
	}
	return all
}

// suggest names the subcommand that was meant, if one is near.
func suggest(cmd *cobra.Command, typed string) string {
	if near := cmd.SuggestionsFor(typed); len(near) > 0 {
		return fmt.Sprintf("; did you mean %q?", near[0])
	}
	return ""
}

// Load reads the configuration file, if one is named, and lays the flags that
// were given over it: the command line wins, as with nats-server.
func (f *Flags) Load(cmd *cobra.Command) (*config.Config, error) {
	cfg := config.Default()
	if f.Config != "" {
		var err error
		if cfg, err = config.Load(f.Config, f.program.Program); err != nil {
			return nil, err
		}
	}
	given := cmd.Flags().Changed
	if given("store_dir") {
		if f.StoreDir == "" {
			return nil, Exit(ExitUsage, errors.New("-sd needs a directory"))
		}
		cfg.JetStream.StoreDir = f.StoreDir
	}
	if given("addr") {
		cfg.Host = f.Addr
	}
	if given("port") {
		if f.Port < -1 || f.Port == 0 || f.Port > 65535 {
			return nil, Exit(ExitUsage, fmt.Errorf("-p %d: accepted: 1 to 65535, or -1 for one the system chooses", f.Port))
		}
		cfg.Port = f.Port
	}
	if given("name") {
		if f.Name == "" || strings.ContainsAny(f.Name, " \t\r\n") {
			return nil, Exit(ExitUsage, fmt.Errorf("-n %q: accepted: a name without blanks", f.Name))
		}
		cfg.ServerName = f.Name
	}
	if given("jetstream") {
		cfg.JetStream.Enabled = f.JS
	}
	if given("debug") {
		cfg.Log.Debug = f.Debug
	}
	if given("trace") {
		cfg.Log.Trace = f.Trace
	}
	if given("logtime") {
		cfg.Log.Time = f.LogTime
	}
	if given("logtime_utc") {
		cfg.Log.UTC = f.LogUTC
	}
	if given("log") {
		cfg.Log.File = f.Log
	}
	if given("pid") {
		cfg.PIDFile = f.PID
	}
	if given("ports_file_dir") {
		cfg.PortsDir = f.PortsDir
	}
	if given("log_size_limit") {
		if f.LogLimit < 0 {
			return nil, Exit(ExitUsage, fmt.Errorf("--log_size_limit %d: accepted: octets, or 0 for no bound", f.LogLimit))
		}
		cfg.Log.SizeLimit = f.LogLimit
	}
	if given("client_advertise") {
		cfg.ClientAdvertise = f.Advert
	}
	if (f.TLS || f.TLSFiles.Verify) && (f.TLSFiles.CertFile == "" || f.TLSFiles.KeyFile == "") {
		return nil, Exit(ExitUsage, errors.New("--tls and --tlsverify need a certificate and its key: name two PEM files with --tlscert and --tlskey"))
	}
	if f.TLS || f.TLSFiles.Verify || given("tlscert") || given("tlskey") || given("tlscacert") {
		t := f.TLSFiles
		t.Timeout = config.DefaultTLSTimeout
		if err := config.LoadTLS(&t); err != nil {
			return nil, Exit(ExitUsage, fmt.Errorf("--tls: %w", err))
		}
		cfg.TLS = &t
	}
	if given("user") || given("pass") {
		if f.User == "" || f.Pass == "" {
			return nil, Exit(ExitUsage, errors.New("--user and --pass are needed together"))
		}
		cfg.Auth = config.Authorization{User: f.User, Password: f.Pass, Timeout: cfg.Auth.Timeout}
	}
	if given("auth") {
		if f.Token == "" { // a variable of a shell that is not set, which would let everybody in
			return nil, Exit(ExitUsage, errors.New("--auth needs a token; leave it out if nobody has to log in"))
		}
		cfg.Auth = config.Authorization{Token: f.Token, Timeout: cfg.Auth.Timeout}
	}
	if given("store_dir") && !cfg.JetStream.Enabled {
		cfg.Warnings = append(cfg.Warnings, &config.Problem{Key: "-sd", What: "has no effect, for JetStream is off", Remedy: "turn it on with -js"})
	}
	return cfg, nil
}

// SocketPath finds the admin socket of a running program from the same flags
// and files that the program was started with.
func (f *Flags) SocketPath(cmd *cobra.Command) (string, error) {
	if f.Socket != "" {
		return f.Socket, nil
	}
	cfg, err := f.Load(cmd)
	if err != nil {
		return "", err
	}
	if cfg.JetStream.StoreDir == "" {
		dir, err := defaultStoreDir(f.program.Program)
		if err != nil {
			return "", Exit(ExitConfig, err)
		}
		cfg.JetStream.StoreDir = dir
	}
	return SocketPath(cfg), nil
}

// serve is the bare command: it runs until a signal or a storage failure.
func serve(cmd *cobra.Command, f *Flags) error {
	if f.Test {
		return f.check(cmd)
	}
	cfg, err := f.Load(cmd)
	if err != nil {
		return err
	}
	log, err := newLogger(cfg.Log, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	for _, w := range cfg.Warnings {
		log.Warn("setting without effect", "at", w.String())
	}
	// For good: a signal that comes while the program ends, for a reason of its
	// own, must not take the place of the exit code.
	signals := incoming(slices.Concat([]os.Signal{os.Interrupt, syscall.SIGTERM}, reopenSignals, reloadSignals, lameDuckSignals)...)
	// A write that a limit on file sizes refuses is a write that failed, to be
	// reported as such.
	if len(ignoredSignals) > 0 { // without any, Ignore ignores all
		signal.Ignore(ignoredSignals...)
	}

	n, err := Start(f.program, cfg, log.Logger)
	if err != nil {
		if cfg.Log.File != "" {
			log.Error("not started", "error", err)
		}
		return err
	}
	n.log = log
	n.announce()
	return n.run(signals, func() (*config.Config, error) {
		if f.Config == "" {
			return nil, errNoFile
		}
		return f.Load(cmd)
	})
}

// incoming delivers the signals of these kinds from now on. Each kind waits in a
// place of its own, so that many of one kind, such as reloads while one is under
// way, cannot take the place of another, such as the stop behind them. One that
// comes while another of its kind waits is the same request.
func incoming(kinds ...os.Signal) <-chan os.Signal {
	all := make(chan os.Signal)
	for _, kind := range kinds {
		one := make(chan os.Signal, 1)
		signal.Notify(one, kind)
		go func() {
			for sig := range one {
				all <- sig
			}
		}()
	}
	return all
}

// run waits for what ends the program, and returns why, with an exit code. load
// reads the configuration anew.
func (n *Node) run(signals <-chan os.Signal, load func() (*config.Config, error)) error {
	log := n.Log
	var duck chan error // the end of lame duck mode
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for {
		select {
		case err := <-n.Failed():
			return n.storageFailed(err)
		case err := <-duck:
			if err != nil {
				log.Warn("lame duck: the clients that are left are cut off", "error", err)
			}
			return n.stop(signals, "clients are gone")
		case sig := <-signals:
			switch {
			case slices.Contains(reopenSignals, sig):
				if err := n.log.reopen(); err != nil {
					log.Error("log file not opened anew", "error", err)
				} else {
					log.Info("log file opened anew")
				}
			case slices.Contains(reloadSignals, sig):
				n.reload(load)
			case slices.Contains(lameDuckSignals, sig) && duck == nil:
				c := n.Config()
				log.Info("lame duck: no new clients are taken", "clients", n.Broker.Stats().Connections, "grace", c.LameDuckGrace, "duration", c.LameDuck)
				duck = make(chan error, 1)
				go func() { duck <- n.Broker.LameDuck(ctx, c.LameDuck, c.LameDuckGrace) }()
			case slices.Contains(lameDuckSignals, sig):
			case sig == syscall.SIGTERM && duck != nil:
				// Whoever supervises the program sends it after the hook that
				// began this; clients are to leave in their time.
				log.Info("lame duck: the stop that is asked for is under way", "signal", sig.String())
			default:
				return n.stop(signals, sig.String())
			}
		}
	}
}

// stop ends the program in order.
func (n *Node) stop(signals <-chan os.Signal, why string) error {
	n.Log.Info("stopping", "signal", why)
	began := time.Now()
	go func() {
		// A second request does not wait for anybody. One that comes along
		// with the first is the same request, sent twice by a shell or a
		// supervisor.
		for sig := range signals {
			if (sig == os.Interrupt || sig == syscall.SIGTERM) && time.Since(began) > time.Second {
				n.Log.Warn("stopped at once; what was acknowledged is on disk", "signal", sig.String())
				os.Exit(ExitFailure)
			}
		}
	}()
	stopped := make(chan error, 1)
	go func() { stopped <- n.Stop() }()
	var err error
	select {
	case err = <-stopped:
		select {
		case failure := <-n.Failed():
			return n.storageFailed(failure)
		default:
		}
	case failure := <-n.Failed():
		return n.storageFailed(failure)
	}
	if err == nil {
		n.Log.Info("stopped", "took", time.Since(began).Round(100*time.Microsecond))
	}
	return err
}

// storageFailed is the end after a failure of the storage. Nothing may be
// acknowledged any more, and nothing in memory is worth saving: what was
// acknowledged is on disk. The program leaves at once, even out of the middle of
// a stop, so that a service manager starts it anew.
func (n *Node) storageFailed(err error) error {
	err = fmt.Errorf("storage failed: %w; start again to recover from disk, and check the disk and the space on it (store directory %s)", err, n.Config().JetStream.StoreDir)
	if n.Config().Log.File != "" {
		n.Log.Error("stopping", "error", err)
	}
	return Exit(ExitStorage, err)
}

// reload reads the configuration anew and says what became of it.
func (n *Node) reload(load func() (*config.Config, error)) {
	next, err := load()
	var changed []string
	if err == nil {
		changed, err = n.Reload(next)
	}
	if err != nil {
		n.refused.Store(&admin.Refused{Time: time.Now(), Reasons: lines(err)})
		for _, line := range lines(err) {
			n.Log.Error("configuration not reloaded", "error", line)
		}
		return
	}
	n.refused.Store(nil)
	for _, w := range next.Warnings {
		n.Log.Warn("setting without effect", "at", w.String())
	}
	n.Log.Info("configuration reloaded", "changed", strings.Join(changed, " "))
}

// announce logs the line that says that clients can connect.
func (n *Node) announce() {
	attrs := []slog.Attr{
		slog.String("version", Version),
		slog.String("name", n.Broker.Name()),
		slog.String("clients", n.Broker.ClientURL()),
	}
	if n.Engine != nil {
		sync := "always"
		if d := n.Config().JetStream.SyncInterval; d > 0 {
			sync = d.String()
		}
		attrs = append(attrs, slog.String("store_dir", n.storeDir()), slog.String("sync_interval", sync), slog.Int("streams", len(n.Engine.Streams())))
	} else {
		attrs = append(attrs, slog.String("jetstream", "off"))
	}
	if link := n.currentLink(); link == nil {
		attrs = append(attrs, slog.String("link", "not configured"))
	} else {
		var st admin.Status
		link.Describe(&st)
		if st.Hub != nil {
			attrs = append(attrs, slog.String("edge_id", st.Hub.EdgeID), slog.Int("exports", len(n.Config().Exports)))
		}
		if st.Edges != nil {
			attrs = append(attrs, slog.String("edges", "quic://"+st.Edges.Addr), slog.String("certificate", st.Edges.Fingerprint))
		}
	}
	attrs = append(attrs, slog.String("ready", n.Ready().Round(100*time.Microsecond).String()))
	n.Log.LogAttrs(context.Background(), slog.LevelInfo, n.program.Program.String()+" is ready", attrs...)
}
