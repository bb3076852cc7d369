//! The console: its files by raw requests, the tickets that open ports in a browser, and the page in a real browser.

mod browser;
mod serving;
mod tickets;
