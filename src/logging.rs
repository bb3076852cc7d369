//! The server's log on stderr: one line per event, written by one system call.
//!
//! Callers log ids, pids, statuses and causes, and never a token, a variable's value or a body.
//! Text from a client passes through [`quoted`], which bounds it. No text can begin another line. A
//! line that stderr does not take at once is dropped, so that a stuck reader cannot stall the server.
//!
//! Lines that a tenant can cause at will go through [`about`], which limits their number.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::sys::{Events, PollEntry, poll};

static DEBUG: AtomicBool = AtomicBool::new(false);

/// A writable pipe takes this many bytes without blocking (`PIPE_BUF`, pipe(7)).
const MAX_LINE_BYTES: usize = 4096;

/// Maximum length of quoted text, in characters.
const MAX_QUOTED: usize = 200;

/// The lines about one tenant and about all tenants are counted for this long.
const WINDOW: Duration = Duration::from_secs(5);

/// Most lines about one tenant in a window.
const TENANT_LINES: u32 = 20;

/// Most lines about all tenants in a window.
const ALL_LINES: u32 = 200;

/// Tenants that are counted one by one in a window. The rest count as [`OTHERS`].
const MAX_TENANTS: usize = 64;

const OTHERS: &str = "others";

/// Enables [`debug`].
pub fn enable_debug() {
    DEBUG.store(true, Ordering::Relaxed);
}

/// Writes one line.
pub fn info(line: fmt::Arguments<'_>) {
    whole_line(format_args!("sbx-server: {line}"));
}

/// Writes one line about a tenant, such as `sandbox 4f2a` or `client 10.0.0.1`, unless too many were
/// written about it or about all tenants. How many were left out follows with the next line about
/// any tenant, once the window has passed.
pub fn about(tenant: &str, line: fmt::Arguments<'_>) {
    static WRITTEN: Mutex<LineCounts> = Mutex::new(LineCounts::new());
    // Not `threads::lock`, whose panics are logged here.
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (left_out, is_written) = written.add(tenant, Instant::now());
    drop(written);
    for (tenant, lines) in left_out {
        info(format_args!("left out {lines} lines about {tenant}"));
    }
    if is_written {
        info(line);
    }
}

/// The lines about tenants in the current window.
struct LineCounts {
    began: Option<Instant>,
    all: u32,
    /// By tenant in the order of names, how many were written and how many left out.
    tenants: Vec<(String, (u32, u64))>,
}

impl LineCounts {
    const fn new() -> Self {
        Self {
            began: None,
            all: 0,
            tenants: Vec::new(),
        }
    }

    /// Counts a line. Returns the lines left out in a window that has passed, by tenant, and whether to
    /// write this one.
    fn add(&mut self, tenant: &str, now: Instant) -> (Vec<(String, u64)>, bool) {
        let mut left_out = Vec::new();
        if self.began.is_none_or(|began| now - began >= WINDOW) {
            let passed = std::mem::replace(self, Self::new());
            let tenants = passed.tenants.into_iter();
            left_out.extend(tenants.map(|(tenant, (_, lines))| (tenant, lines)));
            left_out.retain(|(_, lines)| *lines > 0);
            self.began = Some(now);
        }
        let place = |tenants: &[(String, _)], name: &str| {
            tenants.binary_search_by(|(other, _)| other.as_str().cmp(name))
        };
        let is_counted = self.tenants.len() < MAX_TENANTS || place(&self.tenants, tenant).is_ok();
        let name = if is_counted { tenant } else { OTHERS };
        let place = place(&self.tenants, name).unwrap_or_else(|place| {
            self.tenants.insert(place, (name.to_owned(), (0, 0)));
            place
        });
        let (written, omitted) = &mut self.tenants[place].1;
        let is_written = *written < TENANT_LINES && self.all < ALL_LINES;
        if is_written {
            *written += 1;
            self.all += 1;
        } else {
            *omitted += 1;
        }
        (left_out, is_written)
    }
}

/// Writes one line without the prefix `sbx-server: `.
pub fn whole_line(line: fmt::Arguments<'_>) {
    let line = one_line(&line.to_string());
    let mut stderr = std::io::stderr().lock();
    let mut writable = [PollEntry::new(stderr.as_fd(), Events::WRITABLE)];
    if poll(&mut writable, Some(Duration::ZERO)) {
        let _ = stderr.write_all(line.as_bytes());
    }
}

/// Escapes control characters and line separators, cuts the text so that the line has at most
/// [`MAX_LINE_BYTES`], and ends it with a newline.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        let before = line.len();
        if character.is_control() || matches!(character, '\u{2028}' | '\u{2029}') {
            let _ = write!(line, "{}", character.escape_default());
        } else {
            line.push(character);
        }
        if line.len() >= MAX_LINE_BYTES {
            line.truncate(before);
            break;
        }
    }
    line.push('\n');
    line
}

/// Writes one line if [`enable_debug`] was called (`SBX_LOG=debug`).
pub fn debug(line: fmt::Arguments<'_>) {
    if DEBUG.load(Ordering::Relaxed) {
        info(line);
    }
}

/// Text from a client, which is shown as printable ASCII and cut to [`MAX_QUOTED`] characters.
pub fn quoted(bytes: &[u8]) -> impl fmt::Display {
    Quoted(bytes)
}

/// The path of a request, as [`quoted`] shows it, without the secrets that stand in it: tickets, as tokens, are 64
/// hexadecimal digits.
pub fn quoted_path(path: &[u8]) -> impl fmt::Display {
    QuotedPath(path)
}

struct QuotedPath<'a>(&'a [u8]);

impl fmt::Display for QuotedPath<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let segments = self.0.split(|byte| *byte == b'/');
        let shown = segments.map(|segment| {
            let is_secret = segment.len() == 64 && segment.iter().all(u8::is_ascii_hexdigit);
            if is_secret { &b"<secret>"[..] } else { segment }
        });
        let shown: Vec<_> = shown.collect();
        fmt::Display::fmt(&Quoted(&shown.join(&b'/')), formatter)
    }
}

struct Quoted<'a>(&'a [u8]);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = String::from_utf8_lossy(&self.0[..self.0.len().min(4 * MAX_QUOTED)]);
        let mut escaped = text.chars().flat_map(char::escape_default).take(MAX_QUOTED);
        escaped.try_for_each(|character| formatter.write_char(character))?;
        if self.0.len() > MAX_QUOTED {
            formatter.write_str("...")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_wrote_stays_on_its_line() {
        let quoted = |bytes| super::quoted(bytes).to_string();
        let path = format!("/t/{}/a/{}", "0aF".repeat(21) + "1", "0".repeat(63));
        assert_eq!(
            super::quoted_path(path.as_bytes()).to_string(),
            format!("/t/<secret>/a/{}", "0".repeat(63))
        );
        let long = quoted(&[b'x'; 5000]);
        let quoted = quoted("/a\n\u{9b}2J\u{2028}\u{1b}é".as_bytes());
        assert!(
            quoted.bytes().all(|byte| byte.is_ascii_graphic()),
            "{quoted}"
        );
        assert_eq!(long.len(), MAX_QUOTED + 3);
    }

    #[test]
    fn lines_about_a_tenant_and_about_all_are_limited_and_the_rest_is_counted() {
        let mut counts = LineCounts::new();
        let begun = Instant::now();
        let mut written = |tenant: &str, lines: u32, now: Instant| {
            let added: Vec<_> = (0..lines).map(|_| counts.add(tenant, now)).collect();
            let left_out: Vec<_> = added
                .iter()
                .flat_map(|(left_out, _)| left_out)
                .cloned()
                .collect();
            (
                added.iter().filter(|(_, is_written)| *is_written).count(),
                left_out,
            )
        };
        assert_eq!(written("a", 900, begun), (20, vec![]));
        assert_eq!(written("b", 3, begun), (3, vec![]));
        let later = begun + WINDOW;
        assert_eq!(written("b", 1, later), (1, vec![("a".to_owned(), 880)]));
        assert_eq!(written("a", 1, later), (1, vec![]));
        // Many together have a limit too, and no more names are kept than that of the others.
        let many = (0..1000).map(|number| written(&number.to_string(), 1, later).0);
        assert_eq!(many.sum::<usize>(), 62 + 20);
        let (_, left_out) = written("a", 1, later + WINDOW);
        assert_eq!(left_out, [(OTHERS.to_owned(), 1000 - 62 - 20)]);
        let several = (0..60).map(|number| written(&number.to_string(), 20, later + WINDOW).0);
        assert_eq!(several.sum::<usize>(), 199);
    }

    #[test]
    fn a_line_is_one_line_whatever_is_in_it() {
        assert_eq!(
            one_line("a\nb\r\u{1b}[2J\u{85}\u{2028}é\t"),
            "a\\nb\\r\\u{1b}[2J\\u{85}\\u{2028}é\\t\n"
        );
        assert_eq!(one_line(""), "\n");
        // A character or its escape can cross the limit at each of these lengths.
        for at in MAX_LINE_BYTES - 12..=MAX_LINE_BYTES {
            for end in ["é", "\n", "\u{2028}", "x"] {
                let line = one_line(&("x".repeat(at) + end + "yyyy"));
                assert!(line.len() <= MAX_LINE_BYTES, "{}", line.len());
                assert!(line.len() >= MAX_LINE_BYTES - 8 || line.ends_with("yyyy\n"));
                assert_eq!(line.matches('\n').count(), 1);
            }
        }
    }
}
