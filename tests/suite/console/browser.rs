//! The promise to people: the console works in a browser, even when the connection breaks or a sandbox is hostile; and no
//! page of a sandbox or of another site works with the server in their name.
//!
//! What is checked is in `tests/client/console_page.mjs` and `hostile_pages.mjs`; this file prepares Playwright, which
//! drives Debian's Chromium.

use std::process::Command;

use crate::client::{node_modules, run_checks};
use crate::examples::repository;
use crate::fixture::{BINARY, HostPlace, is_root};
use crate::skip;

/// Without browsers of its own.
const PLAYWRIGHT: &[&str] = &["playwright-core@1.65.1"];

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_page_works_in_chromium() {
    check("console_page.mjs");
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn hostile_pages_reach_nothing_in_chromium() {
    check("hostile_pages.mjs");
}

fn check(script: &str) {
    if !is_root() {
        skip!("host mode needs root");
    }
    let modules = match node_modules("playwright", PLAYWRIGHT) {
        Ok(modules) => modules,
        Err(reason) => skip!("Playwright: {reason}"),
    };
    let place = HostPlace::new();
    let mut command = Command::new("node");
    command
        .arg(repository(&format!("tests/client/{script}")))
        .arg(BINARY)
        .env("SBX_UID_RANGE", place.range())
        .env("CONSOLE_NODE_MODULES", modules);
    if let Err(reason) = run_checks(command) {
        skip!("{reason}");
    }
}
