//! The promise to people: the console works in a browser, also when the connection breaks or a sandbox is hostile.
//!
//! What is checked is in `tests/client/console_page.mjs`; this file prepares Playwright, which drives Debian's Chromium.

use std::process::Command;

use crate::client::{node_modules, run_checks};
use crate::examples::repository;
use crate::fixture::{BINARY, is_root};
use crate::skip;

/// Without browsers of its own.
const PLAYWRIGHT: &[&str] = &["playwright-core@1.65.1"];

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_page_works_in_chromium() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let modules = match node_modules("playwright", PLAYWRIGHT) {
        Ok(modules) => modules,
        Err(reason) => skip!("Playwright: {reason}"),
    };
    let mut command = Command::new("node");
    command
        .arg(repository("tests/client/console_page.mjs"))
        .arg(BINARY)
        .env("CONSOLE_NODE_MODULES", modules);
    if let Err(reason) = run_checks(command) {
        skip!("{reason}");
    }
}
