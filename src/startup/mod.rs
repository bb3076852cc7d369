//! What the server does once, before it serves: the split from init, its signals.

pub mod init;
pub mod signals;
