//! Commands: starting them, moving their output, ending them, and keeping their logs.
//!
//! Uses go one way. From the bottom up: [`ring`], `logs`, `start`, `children`, `holds`, `tree`, `standstill`, `oom`, `pace`, `stdio` (the
//! descriptors of a command) and `terminal` (what a process with a terminal has besides) know no process. `process`
//! is what all others share: identity, life and log. `stdin` and `follow` serve a client of a process that
//! another thread drives, and `viewer` one that is attached to its terminal. A pump moves the bytes of a command,
//! the `driver` of a workspace drives the pumps that no client drives, the supervisor enforces deadlines, and the
//! [`registry`] starts, finds and lists.
//!
//! Nothing here knows HTTP or JSON: a client is a [`Subscriber`] with a connection to poll.

mod children;
mod driver;
mod follow;
#[cfg(test)]
mod fuzz;
mod holds;
mod logs;
mod oom;
mod pace;
#[expect(clippy::module_inception, reason = "it defines `Process`")]
mod process;
mod pump;
mod read_size;
pub mod registry;
pub mod ring;
mod shares;
mod standstill;
mod start;
mod stdin;
mod stdio;
mod supervisor;
mod terminal;
mod tree;
mod viewer;

pub use follow::Extent;
pub use process::{Exit, OnDisconnect, Process, Reason, Subscriber};
pub use pump::{Buffer, Pump};
pub use read_size::EVENT_BYTES;
pub use standstill::{Kept, Standstill, users_that_move};
pub use stdin::StdinWriter;
#[cfg(test)]
pub(crate) use stdin::tests as stdin_tests;
pub use terminal::{Terminal, terminal_use};
pub use tree::count_left_behind;
pub use viewer::{Start, View, Viewer};
