//! The server's own log: one line an event on stderr, written whole.
//!
//! Never a token, a value of an environment or a body: callers pass ids, pids, statuses, causes.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

static DEBUG: AtomicBool = AtomicBool::new(false);

/// Turns the lines of [`debug`] on.
pub fn enable_debug() {
    DEBUG.store(true, Ordering::Relaxed);
}

/// Writes one line. A log that cannot be written must not stop the server: errors are ignored.
pub fn info(line: fmt::Arguments<'_>) {
    whole_line(format_args!("sbx-server: {line}"));
}

/// Writes one line as it is, such as the one that says where the server listens.
pub fn whole_line(line: fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Writes one line if `SBX_LOG=debug`.
pub fn debug(line: fmt::Arguments<'_>) {
    if DEBUG.load(Ordering::Relaxed) {
        info(line);
    }
}
