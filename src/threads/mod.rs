//! The threads of the server: how they start, what a panic does, who comes first, how they wait for one another.

pub mod lock;
pub mod notify;
mod order;
pub mod panics;
pub mod pool;
pub mod priority;
mod start;

pub use start::Thread;
