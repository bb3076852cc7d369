//! The server's log on stderr: one line per event, written by one system call.
//!
//! Callers log ids, pids, statuses and causes, and never a token, a variable's value or a body.
//! Text from a client passes through [`quoted`], which bounds it. No text can begin another line. A
//! line that stderr does not take at once is dropped, so that a stuck reader cannot stall the server.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::sys::{Events, PollEntry, poll};

static DEBUG: AtomicBool = AtomicBool::new(false);

/// A writable pipe takes this many bytes without blocking (`PIPE_BUF`, pipe(7)).
const MAX_LINE_BYTES: usize = 4096;

/// Maximum length of quoted text, in characters.
const MAX_QUOTED: usize = 200;

/// Enables [`debug`].
pub fn enable_debug() {
    DEBUG.store(true, Ordering::Relaxed);
}

/// Logs panics as one line with the source location. The panic's message is left out because it may
/// quote data of a client, as that of a failed string slice does.
pub fn describe_panics() {
    std::panic::set_hook(Box::new(|panic| match panic.location() {
        Some(place) => info(format_args!("panicked at {place}")),
        None => info(format_args!("panicked")),
    }));
}

/// Writes one line.
pub fn info(line: fmt::Arguments<'_>) {
    whole_line(format_args!("sbx-server: {line}"));
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

/// Escapes text from a client to printable ASCII and cuts it to [`MAX_QUOTED`] characters.
pub fn quoted(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MAX_QUOTED)]);
    let mut quoted: String = text
        .chars()
        .flat_map(char::escape_default)
        .take(MAX_QUOTED)
        .collect();
    if bytes.len() > MAX_QUOTED {
        quoted.push_str("...");
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_wrote_stays_on_its_line() {
        let quoted = quoted("/a\n\u{9b}2J\u{2028}\u{1b}é".as_bytes());
        assert!(
            quoted.bytes().all(|byte| byte.is_ascii_graphic()),
            "{quoted}"
        );
        assert_eq!(super::quoted(&[b'x'; 5000]).len(), MAX_QUOTED + 3);
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
