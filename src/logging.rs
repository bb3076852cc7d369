//! The server's own log: one line an event on stderr, written whole.
//!
//! Never a token, a value of an environment or a body: callers pass ids, pids, statuses, causes.
//! What a client wrote goes through [`quoted`], which also bounds it; and whatever a caller passes,
//! nothing in it begins another line. The log is worth less than the service: a line that cannot be
//! written at once, because nobody reads the other end, is dropped.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::sys::{Events, PollEntry, poll};

static DEBUG: AtomicBool = AtomicBool::new(false);

/// A pipe that is ready takes so much without waiting (`PIPE_BUF`, pipe(7)).
const MAX_LINE_BYTES: usize = 4096;

/// Most characters of anything that a client wrote.
const MAX_QUOTED: usize = 200;

/// Turns the lines of [`debug`] on.
pub fn enable_debug() {
    DEBUG.store(true, Ordering::Relaxed);
}

/// Has a panic say where it is in one line of this log. What it says is left out: it may quote the
/// text that was worked on (as slicing a string does), which may be anybody's.
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

/// Writes one line as it is, such as the one that says where the server listens.
pub fn whole_line(line: fmt::Arguments<'_>) {
    let line = one_line(&line.to_string());
    let mut stderr = std::io::stderr().lock();
    let mut writable = [PollEntry::new(stderr.as_fd(), Events::WRITABLE)];
    if poll(&mut writable, Some(Duration::ZERO)) {
        let _ = stderr.write_all(line.as_bytes());
    }
}

/// The text as one line of at most [`MAX_LINE_BYTES`]; what would break it is escaped.
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

/// Writes one line if `SBX_LOG=debug`.
pub fn debug(line: fmt::Arguments<'_>) {
    if DEBUG.load(Ordering::Relaxed) {
        info(line);
    }
}

/// What a client wrote, so that it stays on its line and does nothing to a terminal.
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
        // At every place a character, or its escape, may reach over the end.
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
