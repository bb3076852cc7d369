//! Measures the server against floors: what the kernel alone, or a program that does nothing but
//! the work itself, needs for the same thing on the same machine in the same run.
//!
//! Run it by `scripts/bench`. It starts the real program, takes turns between it and the floor so
//! that a noisy moment hits both, checks every byte it is given, and prints a Markdown table.
//! A file here measures one group of rows; the floors' servers are this program again, started with
//! a mode as its first argument. The client is the same for both sides of a row, so what it costs
//! itself is in both.

// Sizes and counts become figures for people here.
#![allow(clippy::cast_precision_loss)]

mod archives;
mod bytes;
mod client;
mod commands;
mod confined;
mod contexts;
mod curves;
mod e2b;
mod files;
mod floors;
mod health;
mod host;
mod lasting;
mod load;
mod mcp;
mod memory;
mod mover;
mod network;
mod output;
mod plot;
mod processes;
mod program;
mod proxy;
mod recipe;
mod report;
mod roots;
mod sandboxes;
mod search;
mod soak;
mod start;
mod terminals;
mod watch;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use program::{SERVER, Scratch};
use report::{Figure, Limit, Table};

const MIB: usize = 1 << 20;

const USAGE: &str = "\
usage: scripts/bench [--quick] [--only NAME[,NAME...]]
           measure everything, or these groups of rows, about fifteen minutes; --quick does less, in about two
       scripts/bench --curves [--quick]
           how costs grow with what is there already; writes docs/curves.svg
       scripts/bench --soak [CYCLES]
           make and delete so many sandboxes (10,000) in one life of a server, every 100th with commands,
           and fail if anything is left of them";

fn main() {
    // cargo bench says --bench to whatever it runs.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["respond", port, reply] => floors::respond(number(port), &fs::read(reply).unwrap()),
        ["move", port] => mover::serve(number(port)),
        ["serve", port] => floors::serve_bytes(number(port)),
        ["feed", port, kind, size] => output::feed(number(port), kind, number(size)),
        ["print", kind, size] => output::print(kind, number(size)),
        ["stamp"] => output::stamp(),
        ["sockets", count] => network::make_sockets(number(count)),
        ["connections", count, target] => network::make_connections(number(count), target),
        ["--soak"] => soak::soak(10_000),
        ["--soak", cycles] if cycles.parse().is_ok_and(|cycles: usize| cycles > 0) => {
            soak::soak(number(cycles));
        }
        ["--curves"] => curves::measure(&Plan::FULL),
        ["--curves", "--quick"] | ["--quick", "--curves"] => curves::measure(&Plan::QUICK),
        [] => measure(&Plan::FULL, &[]),
        ["--quick"] => measure(&Plan::QUICK, &[]),
        ["--only", only] => measure(&Plan::FULL, &groups(only)),
        ["--quick", "--only", only] | ["--only", only, "--quick"] => {
            measure(&Plan::QUICK, &groups(only));
        }
        ["--help"] => println!("{}", usage()),
        _ => give_up(),
    }
}

/// Of an argument that this program gave itself.
fn number<N: std::str::FromStr>(word: &str) -> N {
    word.parse().ok().expect("a number")
}

fn usage() -> String {
    format!(
        "{USAGE}\ngroups: {}",
        GROUPS.map(|(name, _)| name).join(" ")
    )
}

fn give_up() -> ! {
    eprintln!("{}", usage());
    std::process::exit(2);
}

/// The groups that a list with commas names.
fn groups(list: &str) -> Vec<&str> {
    let names: Vec<_> = list.split(',').collect();
    let known = |name: &&str| GROUPS.iter().any(|(group, _)| group == name);
    if !names.iter().all(known) {
        give_up();
    }
    names
}

/// How much is measured.
struct Plan {
    /// Of what takes about a millisecond.
    samples: usize,
    /// Of everything else: how often each side has its turn.
    rounds: usize,
    /// How long a rate is taken for.
    window: Duration,
    output_bytes: usize,
    file_bytes: usize,
    terminal_bytes: usize,
    /// Files of a folder that is moved as one archive.
    archive_files: usize,
    /// Files of a tree that is searched.
    tree_files: usize,
}

impl Plan {
    const FULL: Self = Self {
        samples: 2000,
        rounds: 5,
        window: Duration::from_secs(1),
        output_bytes: 512 * MIB,
        file_bytes: 1024 * MIB,
        terminal_bytes: 256 * MIB,
        archive_files: 10_000,
        tree_files: 100_000,
    };
    const QUICK: Self = Self {
        samples: 200,
        rounds: 3,
        window: Duration::from_millis(200),
        output_bytes: 32 * MIB,
        file_bytes: 64 * MIB,
        terminal_bytes: 16 * MIB,
        archive_files: 2_000,
        tree_files: 10_000,
    };
}

type Group = fn(&Plan, &Scratch, &mut Table);

/// What can be measured by itself, in the order of the table.
const GROUPS: [(&str, Group); 20] = [
    ("start", start::measure),
    ("commands", commands::measure),
    ("processes", processes::measure),
    ("output", output::measure),
    ("terminals", terminals::measure),
    ("files", files::measure),
    ("archives", archives::measure),
    ("search", search::measure),
    ("watch", watch::measure),
    ("proxy", proxy::measure),
    ("network", network::measure),
    ("contexts", contexts::measure),
    ("e2b", e2b::measure),
    ("mcp", mcp::measure),
    ("health", health::measure),
    ("sandboxes", sandboxes::measure),
    ("roots", roots::measure),
    ("lasting", lasting::measure),
    ("memory", memory::measure),
    ("size", measure_size),
];

fn measure(plan: &Plan, only: &[&str]) {
    let scratch = Scratch::new();
    let mut table = Table::new();
    for (name, group) in GROUPS {
        if !only.is_empty() && !only.contains(&name) {
            continue;
        }
        // A byte that is wrong or missing panics: the group's figures are then worth nothing.
        let measured = catch_unwind(AssertUnwindSafe(|| group(plan, &scratch, &mut table)));
        if measured.is_err() {
            table.void(name);
        }
    }
    let valid = table.print(scratch.medium);
    drop(scratch);
    if !valid {
        std::process::exit(1);
    }
}

fn measure_size(_: &Plan, _: &Scratch, table: &mut Table) {
    let size = fs::metadata(SERVER).unwrap().len();
    let size = Figure::one(size as f64 / 1024.0);
    let limit = Limit::Below(3072.0);
    table.row("size of the program, KiB", size, None, limit, "");
}

/// Whether there can be sandboxes here; says so if not.
fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("note: not root: the rows about sandboxes are left out");
    }
    root
}
