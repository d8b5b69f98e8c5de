package config

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"petiole/internal/subject"
	"petiole/internal/subject/transform"
)

// mappings decodes the block of the same name: subjects, each with a
// destination or a list of weighted ones.
func (c *Config) mappings(d *decoder, v value, accepts string) {
	m, ok := v.raw.(map[string]any)
	if !ok {
		d.wrong(v, accepts)
		return
	}
	for source, raw := range m {
		item := child(v, source, raw)
		if !subject.Valid(source) {
			d.fail(item, "is not a valid subject", "a subject such as orders.* or orders.>", "")
			continue
		}
		mp := transform.Mapping{Source: source}
		before := len(d.problems)
		if to, ok := item.raw.(string); ok {
			mp.Destinations = []transform.Destination{{Subject: to, Weight: 100}}
		} else {
			d.list(item, func(v value) {
				if dest, ok := d.destination(v); ok {
					mp.Destinations = append(mp.Destinations, dest)
				}
			})
		}
		if len(d.problems) > before {
			continue
		}
		if err := mp.Check(); err != nil {
			accepts := ""
			if errors.Is(err, transform.ErrIndex) {
				accepts = references(source)
			}
			d.fail(item, err.Error(), accepts, "")
			continue
		}
		c.Mappings = append(c.Mappings, mp)
	}
	// The parser hands out maps, which have no order.
	slices.SortFunc(c.Mappings, func(a, b transform.Mapping) int { return strings.Compare(a.Source, b.Source) })
}

// references says which wildcards of a source a destination can refer to.
func references(source string) string {
	var refs []string
	for token := range strings.SplitSeq(source, ".") {
		if token == "*" {
			refs = append(refs, "$"+strconv.Itoa(len(refs)+1))
		}
	}
	switch len(refs) {
	case 0:
		return "no reference, for " + source + " has no wildcard *"
	case 1:
		return refs[0] + ", for " + source + " has one wildcard * only"
	}
	return refs[0] + " to " + refs[len(refs)-1] + ", one for each wildcard * of " + source
}

// destination decodes one entry of a list of weighted destinations.
func (d *decoder) destination(v value) (dest transform.Destination, ok bool) {
	dest.Weight = -1
	before := len(d.problems)
	d.block(v, []key{
		{names: []string{"destination", "dest"}, accepts: "a subject, with references to wildcards such as $1 or {{wildcard(1)}}", set: nonEmpty(&dest.Subject)},
		{names: []string{"weight"}, accepts: "percent of the messages, 0 to 100", set: func(d *decoder, v value, accepts string) {
			n, ok := v.raw.(int64)
			if s, isString := v.raw.(string); isString {
				var err error
				n, err = strconv.ParseInt(strings.TrimSuffix(s, "%"), 10, 32)
				ok = err == nil
			}
			if !ok || n < 0 || n > 100 {
				d.wrong(v, accepts)
				return
			}
			dest.Weight = int(n)
		}},
		{names: []string{"cluster"}, accepts: "the name of a cluster", set: nonEmpty(&dest.Cluster)},
	})
	if len(d.problems) > before {
		return dest, false
	}
	switch {
	case dest.Subject == "":
		d.fail(v, "destination is missing", "{ destination, weight }", "")
	case dest.Weight < 0:
		d.fail(v, "weight is missing", "{ destination, weight }", "say how many percent of the messages go there")
	default:
		return dest, true
	}
	return dest, false
}
