//! What the server does once, before it serves: the split from init, its signals, its listening socket.

pub mod init;
pub mod listen;
pub mod signals;
