//! Web origins, as `SBX_ALLOWED_ORIGINS` lists them and browsers send them in `Origin`.
//!
//! The server compares origins as bytes, so this parser accepts only the form that browsers send.

use std::net::Ipv6Addr;

use super::table::decimal;

/// Parses origins separated by commas. An origin that no browser would send as it stands, such as
/// one with a path or a default port, could never match, so it is refused.
pub(super) fn parse(text: &str) -> Option<Vec<String>> {
    let origin = |text: &str| is_origin(text).then(|| text.to_owned());
    text.split(',').map(origin).collect()
}

/// Whether `text` is an origin as browsers serialize it (RFC 6454, section 6.2): a scheme, a host,
/// and the port unless it is the scheme's default.
fn is_origin(text: &str) -> bool {
    let Some((scheme, authority)) = text.split_once("://") else {
        return false;
    };
    // A colon inside brackets belongs to an IPv6 address.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let consists_of = |text: &str, others: &str| {
        let is_right = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || others.contains(c);
        !text.is_empty() && text.chars().all(is_right)
    };
    let address = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let host_is_right = match address {
        Some(address) => address
            .parse::<Ipv6Addr>()
            .is_ok_and(|parsed| parsed.to_string() == address),
        None => consists_of(host, "-._"),
    };
    let default = match scheme {
        "http" => 80,
        "https" => 443,
        _ => 0,
    };
    let port_is_right = port.is_none_or(|text| {
        // No leading zeros.
        decimal::<u16>(text)
            .is_some_and(|port| port != 0 && port != default && port.to_string() == text)
    });
    scheme.starts_with(|c: char| c.is_ascii_lowercase())
        && consists_of(scheme, "+-.")
        && host_is_right
        && port_is_right
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        let good = "https://app.example.com,http://localhost:5173,http://[::1]:8080,\
            https://xn--bcher-kva.example,chrome-extension://abcdef,http://a:443,https://a:80";
        assert_eq!(parse(good).unwrap(), good.split(',').collect::<Vec<_>>());
        let other_forms = [
            "",
            "*",
            "null",
            "https://*",
            "https://*.example.com",
            "app.example.com",
            "https:a",
            "//a",
            "://a",
            "https://",
            "HTTPS://a",
            "https://A.example",
            "https://b\u{fc}cher.example",
            "https://a/",
            "https://a/path",
            "https://a?q",
            "https://a#f",
            "https://user@a",
            "file:///",
            "https://a b",
            " https://a",
            "https://a\n",
            "1http://a",
        ];
        let ports = [
            "https://a:",
            "https://a:0",
            "https://a:080",
            "https://a:443",
            "http://a:80",
            "https://a:x",
            "https://a:65536",
            "https://a:+1",
            "https://a:1:2",
        ];
        let addresses = [
            "http://[::1",
            "http://::1",
            "http://[0::1]",
            "http://[1]",
            "http://[]",
        ];
        let lists = [
            "https://a,",
            ",https://a",
            "https://a, https://b",
            "https://a;https://b",
        ];
        for bad in [&other_forms[..], &ports, &addresses, &lists].concat() {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
