//! Interpreter contexts: interpreters that stay, so that variables, imports and the working directory of one
//! execution are there in the next.
//!
//! Each [`Context`] is one ordinary process of its workspace, with the same user, limits and walls as any command. A
//! bridge, a script that is embedded here, runs in it and speaks the protocol of `PROTOCOL.md` over a socket. One
//! thread drives a context: it alone reads the socket and the pipes, so the order of what the code does is the order
//! of the events, and signals and executions cannot overtake each other. Nothing here knows HTTP or JSON of clients;
//! `process/` starts, reaps and kills.
//!
//! From the bottom up: [`event`], `frame` (the codec of the protocol), `language`, `execution` (one execution and
//! who follows it), `context` (the state that requests and the driver share), `driver` (the thread), and `contexts`
//! (all of a workspace, and spares).

mod context;
mod contexts;
mod driver;
pub mod event;
mod execution;
mod frame;
#[cfg(test)]
mod fuzz;
mod language;

pub use context::{Asked, Context, ContextSpec, ContextState, interpreter_use};
pub use contexts::{Contexts, ContextsSettings, DEFAULT_PREFIX};
pub use execution::{
    Abandoned, Execution, ExecutionSpec, ExecutionState, ExecutionSubscriber, KILL_AFTER,
};
