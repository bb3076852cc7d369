//! HTTP/1.1 (RFC 9110, RFC 9112), written by hand: blocking, one thread per connection.
//!
//! This folder knows nothing about sandboxes: what is served stands behind [`Handler`]. Each file uses
//! only those before it: [`parse`] and [`chunked`] are pure functions of bytes; [`reader`] receives,
//! [`body`] finds the end of a body, and [`stream`] sends without blocking, [`late`] when its time has come; [`request`] and
//! [`response`] are what a handler sees; [`connection`] owns the socket and alone frames responses, so
//! no handler can break the framing; [`handshake`] and [`websocket`] are the way to another protocol
//! and its frames, again pure functions, and [`channel`] is a connection that speaks them; [`slots`] counts who holds how
//! many connections, [`rush`] how fast they come, and [`server`] accepts.

pub mod body;
pub mod channel;
pub mod chunked;
pub mod connection;
#[cfg(test)]
mod fuzz;
pub mod handshake;
mod kept;
pub mod late;
pub mod parse;
pub mod range;
pub mod reader;
pub mod request;
pub mod response;
mod rush;
pub mod server;
pub mod slots;
pub mod stream;
pub mod websocket;

pub use connection::Handler;
pub use kept::KeptSlot;
pub use request::{Request, Sender};
pub use response::{Body, Refusal, Response};
