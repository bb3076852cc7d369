//! A proxy of the client's own, which connections leave through.

use std::fmt;

use super::rules::{Host, host_and_port};

/// How a proxy is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 with `CONNECT` (RFC 9110 section 9.3.6).
    Http,
    /// SOCKS 5 with names (RFC 1928).
    Socks,
}

/// A proxy, and the credentials for it.
#[derive(Clone, PartialEq, Eq)]
pub struct Upstream {
    /// How it is spoken to.
    pub protocol: Protocol,
    /// Where it is.
    pub host: Host,
    pub port: u16,
    /// A user and a password.
    pub credentials: Option<(String, String)>,
}

impl Upstream {
    /// Reads the URL of a proxy: a scheme, perhaps `user:password@`, a host and perhaps a port. `None` if it is none.
    pub fn parse(protocol: Protocol, url: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let default_port = match protocol {
            Protocol::Http if scheme.eq_ignore_ascii_case("http") => 80,
            Protocol::Socks if ["socks5h", "socks5"].contains(&&*scheme.to_ascii_lowercase()) => {
                1080
            }
            _ => return None,
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (user, authority) = match rest.rsplit_once('@') {
            Some((user, authority)) => (Some(user), authority),
            None => (None, rest),
        };
        let (host, port) = host_and_port(authority)?;
        let credentials = match user {
            None => None,
            Some(user) => {
                let (user, password) = user.split_once(':').unwrap_or((user, ""));
                let (user, password) = (unescaped(user)?, unescaped(password)?);
                // SOCKS gives a length of one byte to each (RFC 1929); HTTP ends the user at a colon (RFC 7617).
                let fits = |text: &String| text.len() <= 255 && !text.contains(char::is_control);
                let is_plain = fits(&user) && fits(&password) && !user.contains(':');
                Some((user, password)).filter(|_| is_plain)
            }
        };
        if user.is_some() && credentials.is_none() {
            return None;
        }
        Some(Self {
            protocol,
            host,
            port: port.unwrap_or(default_port),
            credentials,
        })
    }

    /// The URL with its credentials, which [`Upstream::parse`] reads again.
    pub fn url(&self) -> String {
        let shown = self.to_string();
        match (&self.credentials, shown.split_once("://")) {
            (Some((user, password)), Some((scheme, rest))) => {
                let (user, password) = (escaped(user), escaped(password));
                format!("{scheme}://{user}:{password}@{rest}")
            }
            _ => shown,
        }
    }
}

/// The URL without its credentials, which are shown to nobody.
impl fmt::Display for Upstream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.protocol {
            Protocol::Http => "http",
            Protocol::Socks => "socks5h",
        };
        write!(formatter, "{scheme}://{}:{}", self.host, self.port)
    }
}

/// Without its credentials: they must not reach a log.
impl fmt::Debug for Upstream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

/// Percent-encodes all but letters and digits.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match char::from(byte) {
            plain if plain.is_ascii_alphanumeric() => escaped.push(plain),
            _ => {
                let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
                escaped.extend(['%', digit(byte >> 4), digit(byte & 15)]);
            }
        }
    }
    escaped
}

/// Undoes percent-encoding; `None` if it is malformed or not UTF-8.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                let (high, low) = (digit()?, digit()?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_proxies() {
        let proxy =
            Upstream::parse(Protocol::Http, "http://me:p%40ss@proxy.example:3128/").unwrap();
        assert_eq!(proxy.to_string(), "http://proxy.example:3128");
        assert_eq!(format!("{proxy:?}"), "http://proxy.example:3128");
        let credentials = Some(("me".to_owned(), "p@ss".to_owned()));
        assert_eq!(proxy.credentials, credentials);
        assert_eq!(proxy.url(), "http://me:p%40ss@proxy.example:3128");
        let again = Upstream::parse(Protocol::Http, &proxy.url()).unwrap();
        assert!(again == proxy);
        let socks = Upstream::parse(Protocol::Socks, "socks5h://[::1]").unwrap();
        assert_eq!(socks.to_string(), "socks5h://[::1]:1080");
        assert_eq!(socks.credentials, None);
        for (protocol, url) in [
            (Protocol::Http, "https://proxy:1"),
            (Protocol::Http, "socks5h://proxy:1"),
            (Protocol::Http, "proxy:1"),
            (Protocol::Http, "http://"),
            (Protocol::Http, "http://proxy/path"),
            (Protocol::Http, "http://a%zz@proxy"),
            (Protocol::Http, "http://a%0d%0a@proxy"),
            (Protocol::Http, "http://a%3ab:c@proxy"),
            (Protocol::Socks, "http://proxy:1"),
        ] {
            assert!(Upstream::parse(protocol, url).is_none(), "{url}");
        }
    }
}
