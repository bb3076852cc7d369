//! The door for browsers: the files of the console at `/console`, and servers behind ports at `/t` ([`tickets`]).
//!
//! The console is a page that uses the API as any other client does, so its files need no token and say nothing about
//! this machine. The program carries them together ([`carried`]). The first request for one compresses each by gzip, as
//! browsers take it; that is kept.
//!
//! What a sandbox prints must not become a part of the page. The page shows it as text only, and the policy that is
//! sent with each file ([`HEADERS`]) lets a browser run nothing but these files, and reach nothing but this server.

mod tickets;

use std::io;
use std::sync::OnceLock;

use crate::api::context::Context;
use crate::codec::carried::carried;
use crate::codec::gzip::{self, Encoder, Level};
use crate::error::Error;
use crate::http::{Body, Refusal, Request, Response};
use crate::limits::ledger::Item;

/// A file of the console.
struct File {
    name: String,
    /// The value of `Content-Type`.
    kind: String,
    /// The content as a member of gzip.
    gzip: Vec<u8>,
}

/// All files; empty until one is asked for.
static FILES: OnceLock<Vec<File>> = OnceLock::new();

/// All files.
///
/// # Errors
/// The system refuses a thread to compress them.
fn files() -> io::Result<&'static [File]> {
    if let Some(files) = FILES.get() {
        return Ok(files);
    }
    let files = compressed(&carried!("console"))?;
    Ok(FILES.get_or_init(|| files))
}

/// The files in a document: a line for each with its name, type and length, a NUL, and their contents.
fn compressed(document: &[u8]) -> io::Result<Vec<File>> {
    let mut files = Vec::new();
    let end = document.iter().position(|byte| *byte == 0);
    let (table, mut contents) = document.split_at(end.unwrap_or_default());
    contents = contents.get(1..).unwrap_or_default();
    for line in String::from_utf8_lossy(table).lines() {
        let mut fields = line.split('\t').map(str::to_owned);
        let mut field = || fields.next().unwrap_or_default();
        let (name, kind, length) = (field(), field(), field().parse().unwrap_or_default());
        let (content, rest) = contents.split_at_checked(length).unwrap_or_default();
        contents = rest;
        let mut gzip = Vec::new();
        Encoder::new(Level::Best)?.push(content, true, &mut gzip);
        gzip.shrink_to_fit();
        files.push(File { name, kind, gzip });
    }
    Ok(files)
}

/// The file that `/console` is.
const PAGE: &str = "index.html";

/// The methods of a file.
const ALLOW: &str = "GET, HEAD, OPTIONS";

/// Fields of every answer below `/console`. Styles may be inline because xterm.js sets some.
const HEADERS: [(&str, &str); 6] = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; \
         img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
];

/// What a request is about.
pub(super) enum Target<'a> {
    /// The file with this name.
    File(&'a [u8]),
    /// The server that a ticket leads to.
    Ticket {
        ticket: &'a [u8],
        /// Empty, or it begins with a slash.
        path: &'a [u8],
    },
}

impl<'a> Target<'a> {
    /// What a request with this path is about; `None` if it is another door's.
    pub(super) fn find(context: &Context, path: &'a [u8]) -> Option<Self> {
        if let Some(rest) = path.strip_prefix(b"/t/") {
            let end = rest.iter().position(|byte| *byte == b'/');
            let (ticket, path) = rest.split_at(end.unwrap_or(rest.len()));
            return Some(Self::Ticket { ticket, path });
        }
        let name = path
            .strip_prefix(b"/console")
            .filter(|_| context.doors.console)?;
        match name {
            b"" | b"/" => Some(Self::File(PAGE.as_bytes())),
            _ => name.strip_prefix(b"/").map(Self::File),
        }
    }
}

impl super::Target for Target<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "console",
            Self::Ticket { .. } => "ticket",
        }
    }

    fn allow(&self) -> String {
        ALLOW.to_owned()
    }

    fn is_proxied(&self) -> bool {
        matches!(self, Self::Ticket { .. })
    }

    fn admits_origins(&self) -> bool {
        true
    }

    /// The files are of no use elsewhere, and the server behind a ticket decides itself.
    fn has_cors(&self) -> bool {
        false
    }

    fn is_page(&self) -> bool {
        true
    }

    fn has_secret(&self) -> bool {
        matches!(self, Self::Ticket { .. })
    }

    fn fields(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::File(_) => &HEADERS,
            Self::Ticket { .. } => tickets::ADDED,
        }
    }

    /// No token is needed: the files are no secrets, and a ticket is one.
    fn answer(&self, context: &Context, request: &mut Request<'_>) -> Result<Response, Refusal> {
        match *self {
            Self::File(name) => serve(request, name),
            Self::Ticket { ticket, path } => tickets::answer(context, request, ticket, path),
        }
    }
}

fn serve(request: &Request<'_>, name: &[u8]) -> Result<Response, Refusal> {
    let files = files().map_err(|error| Error::io("cannot compress the console", &error))?;
    let Some(file) = files.iter().find(|file| file.name.as_bytes() == name) else {
        let text = "the console has no such file; it begins at /console";
        return Err(Refusal::new(404, "not_found", text));
    };
    match &*request.head.method {
        "GET" | "HEAD" => {}
        "OPTIONS" => return Ok(Response::new(204, Body::Empty).with_header("Allow", ALLOW)),
        method => {
            let text = format!("files of the console have no method {method}; they have {ALLOW}");
            let refusal = Refusal::new(405, "method_not_allowed", text);
            return Err(refusal.with_header("Allow", ALLOW));
        }
    }
    let takes_gzip = takes_gzip(request);
    let tag = entity_tag(file, takes_gzip);
    let is_known = request.head.values("if-none-match").any(|tags| {
        let mut tags = tags.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        // Compared weakly (RFC 9110 section 13.1.2).
        tags.any(|known| {
            known == b"*" || known.strip_prefix(b"W/").unwrap_or(known) == tag.as_bytes()
        })
    });
    let answer = match (is_known, takes_gzip) {
        (true, _) => Response::new(304, Body::Empty),
        (false, true) => Response::new(200, Body::Bytes(file.gzip.clone()))
            .with_header("Content-Encoding", "gzip"),
        (false, false) => {
            // A client may take minutes to read it.
            let charge = request
                .ledger
                .charge(Item::Responses, gzip::DECODER_BYTES)?;
            let source = Box::new(gzip::Decoder::new(&file.gzip[..]));
            Response::new(200, Body::Reader(source)).holding(charge)
        }
    };
    Ok(answer
        .with_header("Content-Type", &*file.kind)
        .with_header("Vary", "Accept-Encoding")
        .with_header("ETag", tag))
}

/// The entity tag of a content in one of its codings: the checksum and the length, which end a member of gzip.
fn entity_tag(file: &File, is_gzip: bool) -> String {
    let end = file.gzip.last_chunk::<8>().copied().unwrap_or_default();
    let coding = if is_gzip { "-gzip" } else { "" };
    format!("\"{:016x}{coding}\"", u64::from_le_bytes(end))
}

/// Whether a client accepts content that is coded by gzip (RFC 9110 section 12.5.3).
fn takes_gzip(request: &Request<'_>) -> bool {
    let mut accepted = None;
    for values in request.head.values("accept-encoding") {
        for item in String::from_utf8_lossy(values).split(',') {
            let mut parts = item.split(';').map(str::trim);
            let coding = parts.next().unwrap_or_default();
            let is_refused = parts.any(|part| {
                let weight = part.to_ascii_lowercase().replace(' ', "");
                // 0, or 0 with up to three decimals.
                let is_zero = |weight: &str| {
                    let rest = weight.strip_prefix('0');
                    rest.is_some_and(|rest| {
                        rest.trim_start_matches('.').trim_matches('0').is_empty()
                    })
                };
                weight.strip_prefix("q=").is_some_and(is_zero)
            });
            if coding.eq_ignore_ascii_case("gzip") || coding.eq_ignore_ascii_case("x-gzip") {
                return !is_refused;
            }
            if coding == "*" {
                accepted = Some(!is_refused);
            }
        }
    }
    accepted.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use sha2::{Digest, Sha256};

    use super::*;

    fn content(file: &File) -> Vec<u8> {
        let mut content = Vec::new();
        let mut decoder = gzip::Decoder::new(&file.gzip[..]);
        decoder.read_to_end(&mut content).unwrap();
        content
    }

    #[test]
    fn the_files_of_others_are_those_that_they_published() {
        let known = include_str!("xterm/README.md");
        let mut found = 0;
        for file in files()
            .unwrap()
            .iter()
            .filter(|file| file.name.starts_with("xterm"))
        {
            let digest = format!("{:x}", Sha256::digest(content(file)));
            let row = known
                .lines()
                .find(|line| line.starts_with(&format!("| `{}.gz` |", file.name)))
                .unwrap_or_else(|| panic!("README.md does not name {}", file.name));
            assert!(row.ends_with(&format!("`{digest}` |")), "{row}: {digest}");
            found += 1;
        }
        assert_eq!(found, 3);
    }

    #[test]
    fn the_files_of_the_page_are_sent_as_they_are_written_but_for_comments() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/api/console/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let file = files()
                .unwrap()
                .iter()
                .find(|file| file.name == name)
                .unwrap();
            let mut written = std::fs::read_to_string(&path).unwrap();
            if path.extension().is_some_and(|end| end == "js") {
                let is_code = |line: &&str| !line.trim_start().starts_with("//");
                let code: Vec<_> = written.lines().filter(is_code).collect();
                written = code.join("\n");
            }
            assert_eq!(content(file), written.as_bytes(), "{name}");
        }
    }

    #[test]
    fn the_files_fit_their_budget() {
        let sent: usize = files().unwrap().iter().map(|file| file.gzip.len()).sum();
        let of_others = files()
            .unwrap()
            .iter()
            .filter(|file| file.name.starts_with("xterm"));
        let of_others: usize = of_others.map(|file| file.gzip.len()).sum();
        assert!(sent < 180 * 1024, "{sent}");
        assert!(sent - of_others < 58 * 1024, "{}", sent - of_others);
    }

    /// What a file names among the others: by a path, or beside itself.
    #[test]
    fn the_page_needs_only_files_that_there_are() {
        let mut named = 0;
        for file in files()
            .unwrap()
            .iter()
            .filter(|file| !file.name.starts_with("xterm"))
        {
            let text = String::from_utf8(content(file)).unwrap();
            let own = text.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !own.contains("http://") && !own.contains("https://"),
                "{}",
                file.name
            );
            for start in ["\"/console/", "\"./"] {
                for name in text.split(start).skip(1) {
                    let name = name.split('"').next().unwrap();
                    assert!(
                        files().unwrap().iter().any(|file| file.name == name),
                        "{}: {name}",
                        file.name
                    );
                    named += 1;
                }
            }
        }
        assert!(named > 20, "{named}");
    }
}
