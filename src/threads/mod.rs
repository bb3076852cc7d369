//! The threads of the server: how they start, what a panic does, their priority, how they wait for one another.

pub mod lock;
pub mod notify;
mod order;
pub mod panics;
pub mod places;
pub mod pool;
pub mod priority;
mod start;

pub use start::{SMALL_STACK_BYTES, Thread};
