//! The integration suite: starts the real binary on a free loopback port and speaks raw HTTP to it.
//!
//! One crate, one file per promise. [`fixture`] is the only code the files share: it starts
//! servers, speaks HTTP without a client library (so that malformed requests can be sent), and
//! waits for conditions. Nothing here sleeps and hopes.

// Nothing here is a library; `pub` says which helpers are for the other files.
#![allow(unreachable_pub)]

mod api;
mod archives;
mod attach;
mod auth;
mod bootstrap;
mod bridges;
mod client;
mod config;
mod console;
mod contexts;
mod contract;
#[cfg(not(any(
    feature = "attach",
    feature = "console",
    feature = "e2b",
    feature = "file-tools",
    feature = "interpreter",
    feature = "mcp"
)))]
mod core;
mod docker;
mod docs;
mod e2b;
mod examples;
mod exec;
mod faults;
mod files;
mod fixture;
mod host;
mod hostile;
mod http;
mod jobs;
mod lifecycle;
mod logging;
mod mcp;
mod mutation;
mod namespaces;
mod network;
mod notices;
mod processes;
mod programs;
mod proxy;
mod regression;
mod release;
mod roots;
mod runs;
mod snapshots;
mod tenants;
mod terminals;
mod walls;
