package selector

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/prefix-affinity/caddy/prefixhash"
	"github.com/prefix-affinity/caddy/selector/ui"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "prefix-affinity",
		Usage: "status|ui|lookup|drain|undrain|forget [--json] [--config <path> [--adapter <name>]] [--address <interface>]",
		Short: "Shows and changes what prefix_affinity knows of its upstreams",
		Long: `
Talks to the admin endpoint of a running Caddy. The endpoint's address is taken
from --address, else from the given --config, else it is the default.

status shows every upstream: how many requests it has, how much of the prompts
it found in its cache, how large that cache seems to be.

ui serves a page that shows the same, and more, live in a browser, until Ctrl-C.

lookup shows which upstreams are believed to hold the beginning of the prompt in
a request body, read from a file or, for -, from standard input. It fails where
the body has no prompt to go by.

drain keeps new conversations away from an upstream; conversations that it holds stay
until they end or the policy's drain_timeout has passed. undrain ends that.

forget drops everything that an upstream is believed to hold, as after a restart
of the engine. The size of its cache stays as it was learned, and its speed is
taken for that of the others: if they are not, its answers show it.`,
		CobraFunc: func(root *cobra.Command) {
			flags := root.PersistentFlags()
			flags.StringP("config", "c", "", "Configuration file to use to parse the admin address, if --address is not used")
			flags.StringP("adapter", "a", "", "Name of config adapter to apply (when --config is used)")
			flags.String("address", "", "The address to use to reach the admin API endpoint, if not the default")
			flags.Bool("json", false, "Print the answer as it came")
			root.Args = cobra.ArbitraryArgs
			root.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 {
					return fmt.Errorf("unknown subcommand '%s': see caddy prefix-affinity --help", args[0])
				}
				return cmd.Help()
			}
			root.AddCommand(
				subcommand("status", "Shows every upstream", cobra.NoArgs, func(c client, _ *cobra.Command, _ []string) error {
					return c.show(http.MethodGet, "upstreams", nil, nil, nil, printStatus)
				}),
				uiCommand(),
				lookupCommand(),
				upstreamCommand("drain", "Keeps new conversations away from an upstream", "draining '%s'\n"),
				upstreamCommand("undrain", "Ends the drain of an upstream", "'%s' is drained no more\n"),
				upstreamCommand("forget", "Forgets what an upstream is believed to hold", "forgot what '%s' holds\n"),
			)
		},
	})
}

func subcommand(use, short string, args cobra.PositionalArgs, run func(client, *cobra.Command, []string) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: args}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cmd.SilenceUsage = true // from here on it is not the usage that is wrong
		c, err := newClient(cmd)
		if err != nil {
			return err
		}
		return run(c, cmd, args)
	}
	return cmd
}

func uiCommand() *cobra.Command {
	var listen string
	cmd := subcommand("ui", "Serves a live page of all this", cobra.NoArgs, func(c client, cmd *cobra.Command, _ []string) error {
		admin, err := caddy.ParseNetworkAddress(c.address)
		if err != nil || admin.PortRangeSize() > 1 {
			return fmt.Errorf("invalid admin address '%s': %v", c.address, err)
		}
		address, _, _ := strings.Cut(admin.JoinHostPort(0), "|") // a socket's permissions follow
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		context.AfterFunc(ctx, stop) // a second Ctrl-C ends it at once
		return ui.Run(ctx, listen, ui.Admin{Network: admin.Network, Address: address}, func(url string) {
			fmt.Fprintf(c.out, "Open %s in a browser. Ctrl-C ends it.\n", url)
		})
	})
	cmd.Flags().StringVar(&listen, "listen", "localhost:2020", "The address to serve the page on; whoever reaches it can drain upstreams")
	return cmd
}

func lookupCommand() *cobra.Command {
	var path, scope string
	cmd := subcommand("lookup <file>", "Shows who holds the prompt of a request body", cobra.ExactArgs(1), func(c client, cmd *cobra.Command, args []string) error {
		body := cmd.InOrStdin()
		if args[0] != "-" {
			file, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer file.Close()
			body = file
		}
		header := make(http.Header)
		if scope != "" {
			header.Set("Authorization", scope) // a URL would be logged
		}
		return c.show(http.MethodPost, "lookup", url.Values{"path": {path}}, header, body, printLookup)
	})
	cmd.Flags().StringVar(&path, "path", "/v1/chat/completions", "The path that the request is sent to")
	cmd.Flags().StringVar(&scope, "scope", "", "The tenant, where the policy has a scope")
	return cmd
}

func upstreamCommand(name, short, done string) *cobra.Command {
	var force bool
	cmd := subcommand(name+" <upstream>", short, cobra.ExactArgs(1), func(c client, _ *cobra.Command, args []string) error {
		query := url.Values{"upstream": {args[0]}}
		if force {
			query.Set("force", "true")
		}
		return c.show(http.MethodPost, name, query, nil, nil, func(w io.Writer, _ []byte) error {
			_, err := fmt.Fprintf(w, done, args[0])
			return err
		})
	})
	if name == "drain" {
		cmd.Flags().BoolVar(&force, "force", false, "Drain the upstream even if it is the last one")
	}
	return cmd
}

// client talks to an admin endpoint.
type client struct {
	address string
	raw     bool
	out     io.Writer
}

func newClient(cmd *cobra.Command) (client, error) {
	text := func(name string) string { return cmd.Flag(name).Value.String() }
	address, err := caddycmd.DetermineAdminAPIAddress(text("address"), nil, text("config"), text("adapter"))
	if err != nil {
		return client{}, fmt.Errorf("couldn't determine admin API address: %v", err)
	}
	return client{address, text("json") == "true", cmd.OutOrStdout()}, nil
}

// show prints the answer to a request, as it came or in words.
func (c client) show(method, route string, query url.Values, header http.Header, body io.Reader, pretty func(io.Writer, []byte) error) error {
	uri := "/prefix_affinity/" + route
	if len(query) > 0 {
		uri += "?" + query.Encode()
	}
	res, err := caddycmd.AdminAPIRequest(c.address, method, uri, header, body)
	if err != nil {
		return inFlags(err)
	}
	answer, err := io.ReadAll(res.Body)
	if err := errors.Join(err, res.Body.Close()); err != nil {
		return fmt.Errorf("reading answer of %s: %v", c.address, err)
	}
	if c.raw {
		if _, err := c.out.Write(answer); err != nil {
			return err
		}
		return pretty(io.Discard, answer) // for what it says of the answer
	}
	return pretty(c.out, answer)
}

// flagFor has what a command line says instead of what the API says of its own
// requests.
var flagFor = strings.NewReplacer(
	useForce, "add --force",
	useList, "use an address of caddy prefix-affinity status",
	useQuery, "should be one address",
)

// inFlags returns the error of a request as a command line's. Where it is not the
// API's, it stays.
func inFlags(err error) error {
	var refusal struct {
		Error string `json:"error"`
	}
	at := strings.IndexByte(err.Error(), '{')
	if at < 0 || json.Unmarshal([]byte(err.Error()[at:]), &refusal) != nil || refusal.Error == "" {
		return err
	}
	return errors.New(flagFor.Replace(refusal.Error))
}

func printStatus(w io.Writer, answer []byte) error {
	var upstreams []upstreamState
	if err := json.Unmarshal(answer, &upstreams); err != nil {
		return err
	}
	if len(upstreams) == 0 {
		_, err := fmt.Fprintln(w, "no upstream has served a request yet")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "UPSTREAM\tREQUESTS\tHIT RATIO\tPENDING\tPREFILL QUEUE\tCACHE\tPREFILL SPEED\tRESTARTS\tDRAIN")
	for _, u := range upstreams {
		drain := "-"
		if u.Drain != nil {
			drain = fmt.Sprintf("by %s since %s", u.Drain.By, u.Drain.Since.Local().Format(time.TimeOnly))
			if len(u.Drain.Sites) > 0 {
				drain += " " + placed(u.Drain.Sites)
			}
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%.0f\t%s\t%s\t%d\t%s\n", u.Address, u.Requests, u.hitRatio(), u.PendingRequests, u.PendingPrefillTokens,
			known(u.CacheCapacityTokens, "%d"), u.prefillSpeed(), u.Generation, drain)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	since := slices.MinFunc(upstreams, func(a, b upstreamState) int { return a.CountedSince.Compare(b.CountedSince) }).CountedSince
	_, err := fmt.Fprintf(w, "Requests and hit ratios are counted since %s.\n", since.Local().Format(time.DateTime))
	return err
}

// prefillSpeed is marked where it is mostly what the others have.
func (u upstreamState) prefillSpeed() string {
	if !u.PrefillSpeedIsOwn {
		return known(u.PrefillTokensPerSecond, "~%.0f/s")
	}
	return known(u.PrefillTokensPerSecond, "%.0f/s")
}

// hitRatio is the share of the prompt tokens that the upstream found in its
// cache, by its own reports.
func (u upstreamState) hitRatio() string {
	switch {
	case u.Requests == 0:
		return "-"
	case u.ReportedPromptTokens == 0:
		return "not reported"
	}
	return fmt.Sprintf("%.1f %%", 100*u.CachedTokens/u.ReportedPromptTokens)
}

func known[T cmp.Ordered](value T, format string) string {
	var none T
	if value == none {
		return "not known"
	}
	return fmt.Sprintf(format, value)
}

// inWords says why a body has no key.
func inWords(unkeyed string) string {
	switch unkeyed {
	case prefixhash.Empty.String():
		return "the body is empty"
	case prefixhash.NotJSON.String():
		return "the body is not JSON"
	case prefixhash.NoPrompt.String():
		return "the body has no prompt in any shape that is known"
	case prefixhash.NotPrompt.String():
		return "it is for an API that generates nothing; --path says where it would be sent"
	}
	return unkeyed
}

// printLookup fails where no site would find a prompt: a script should notice.
func printLookup(w io.Writer, answer []byte) error {
	var lookups []lookupAnswer
	if err := json.Unmarshal(answer, &lookups); err != nil {
		return err
	}
	if len(lookups) == 0 {
		return errors.New("no prefix_affinity policy is configured")
	}
	if !slices.ContainsFunc(lookups, func(l lookupAnswer) bool { return l.Unkeyed == "" }) {
		return fmt.Errorf("no prompt to go by: %s", inWords(lookups[0].Unkeyed))
	}
	for _, l := range lookups {
		if len(lookups) > 1 && len(l.Sites) > 0 {
			fmt.Fprintf(w, "%s:\n", strings.Join(l.Sites, "; "))
		}
		if l.Unkeyed != "" {
			fmt.Fprintf(w, "no prompt to go by: %s\n", inWords(l.Unkeyed))
			continue
		}
		fmt.Fprintf(w, "%d prompt tokens in %d blocks of %d bytes\n", l.PromptTokens, l.Blocks, l.BlockSize)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "UPSTREAM\tMATCHED TOKENS\tWOULD BE CHOSEN")
		for _, u := range l.Upstreams {
			chosen := "-"
			if u.Address == l.Upstream {
				chosen = l.Reason
			}
			fmt.Fprintf(t, "%s\t%d\t%s\n", u.Address, u.MatchedTokens, chosen)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}
