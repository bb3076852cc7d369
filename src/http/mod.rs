//! HTTP/1.1 (RFC 9110, RFC 9112) by hand, blocking, one thread per connection.
//!
//! [`parse`] and [`chunked`] are pure functions of bytes; [`connection`] owns the socket and is the
//! only code that frames a response, so no handler can put a connection out of step; [`server`]
//! accepts. [`upstream`] is the other side, where this server is a client. What is served is behind [`Handler`]: nothing here knows what a sandbox is.

pub mod chunked;
pub mod connection;
#[cfg(test)]
mod fuzz;
mod input;
pub mod parse;
pub mod request;
pub mod response;
pub mod server;
pub mod stream;
pub mod upstream;

pub use request::Request;
pub use response::{Body, Refusal, Response};

/// What is served.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request. A body that is not read is dealt with by the connection.
    fn handle(&self, request: &mut Request<'_>) -> Response;
}

/// Most bytes of a request line and headers.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Most bytes of a request target.
pub const MAX_TARGET_BYTES: usize = 16 * 1024;
/// Most header fields.
pub const MAX_HEADERS: usize = 256;
/// Most bytes of a body that is read for nothing, to keep the connection.
pub const MAX_DRAINED_BYTES: u64 = 64 * 1024;
