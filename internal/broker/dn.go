package broker

import (
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// dn is a distinguished name (RFC 4514): the subject of a certificate, or a
// user name that is written like one. Each part is an attribute "type=value",
// or several joined by "+" in sorted order; types are in lower case. Parts
// stand in the order of the text form, which is the reverse of that in a
// certificate.
type dn []string

// attributeNames are the short names of RFC 4514 and those that certificates
// commonly have beyond it.
var attributeNames = map[string]string{
	"2.5.4.3": "cn", "2.5.4.5": "serialnumber", "2.5.4.6": "c", "2.5.4.7": "l", "2.5.4.8": "st", "2.5.4.9": "street",
	"2.5.4.10": "o", "2.5.4.11": "ou", "2.5.4.17": "postalcode",
	"0.9.2342.19200300.100.1.1": "uid", "0.9.2342.19200300.100.1.25": "dc",
}

// dnOf reads the subject of a certificate.
func dnOf(raw []byte) (dn, bool) {
	var seq pkix.RDNSequence
	if rest, err := asn1.Unmarshal(raw, &seq); err != nil || len(rest) > 0 || len(seq) == 0 {
		return nil, false
	}
	name := make(dn, 0, len(seq))
	for _, rdn := range seq {
		var parts []string
		for _, atv := range rdn {
			oid := atv.Type.String()
			short, ok := attributeNames[oid]
			if !ok {
				short = oid
			}
			parts = append(parts, short+"="+fmt.Sprint(atv.Value))
		}
		slices.Sort(parts)
		name = append(name, strings.Join(parts, "+"))
	}
	slices.Reverse(name)
	return name, true
}

// parseDN reads the text form; false if s is not a distinguished name.
func parseDN(s string) (dn, bool) {
	var name dn
	var parts []string // of the RDN being read
	var attr, val strings.Builder
	inValue, keep := false, 0 // keep: length of val up to its last octet that is not a blank to be dropped
	end := func() bool {
		typ := strings.ToLower(strings.TrimSpace(attr.String()))
		if !inValue || typ == "" {
			return false
		}
		parts = append(parts, typ+"="+val.String()[:keep])
		attr.Reset()
		val.Reset()
		inValue, keep = false, 0
		return true
	}
	rdn := func() bool {
		if !end() {
			return false
		}
		slices.Sort(parts)
		name = append(name, strings.Join(parts, "+"))
		parts = nil
		return true
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '=' && !inValue:
			inValue = true
		case !inValue && (c == ',' || c == '+' || c == ';'):
			return nil, false
		case !inValue:
			attr.WriteByte(c)
		case c == '\\':
			if i+1 == len(s) {
				return nil, false
			}
			i++
			if i+1 < len(s) {
				if b, err := hex.DecodeString(s[i : i+2]); err == nil {
					val.Write(b)
					i++
					keep = val.Len()
					continue
				}
			}
			val.WriteByte(s[i])
			keep = val.Len()
		case c == '+':
			if !end() {
				return nil, false
			}
		case c == ',' || c == ';':
			if !rdn() {
				return nil, false
			}
		case c == ' ' && val.Len() == 0: // leading
		default:
			val.WriteByte(c)
			if c != ' ' {
				keep = val.Len()
			}
		}
	}
	if !rdn() {
		return nil, false
	}
	return name, true
}

// equal reports whether both have the same parts in the same order.
func (d dn) equal(o dn) bool { return slices.Equal(d, o) }

// sameParts reports whether both have the same parts in any order.
func (d dn) sameParts(o dn) bool {
	return slices.Equal(slices.Sorted(slices.Values(d)), slices.Sorted(slices.Values(o)))
}
