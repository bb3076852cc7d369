//! A connection that has become another protocol (RFC 9110 section 7.8): bytes in both directions.
//!
//! The two directions do not wait for each other. Why neither can stall: a [`Flow`] either has bytes for
//! its target, and then the target is polled for room; or it has none, and then the source is polled
//! for bytes, unless poll has found some already, and then the loop reads them before it sleeps. The
//! source is marked as not ready only after a read that has emptied the buffer, and poll reports
//! bytes in the socket as long as there are any. Bytes that came with the heads are in the buffer from
//! the start, so both directions begin as ready. The end of a source is read when the target has taken
//! all before it, and is passed on by shutdown(2); the other direction continues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{Shutdown, shutdown};

use super::upstream::{Account, FieldChanges, ReadSize, Upstream, append_upgrade, poll_both};
use crate::http::body::BodyDecoder;
use crate::http::parse::{Framing, ResponseHead};
use crate::http::reader::SocketReader;
use crate::http::request::BodyReader;
use crate::http::response::{Takeover, append_status_line};
use crate::http::stream::{SEND_LIMIT, StreamWriter};
use crate::sys::Events;

/// The connection of a client to an upstream server that has agreed to change the protocol.
pub(super) struct Tunnel {
    pub(super) upstream: Upstream,
    pub(super) head: ResponseHead,
    pub(super) account: Account,
    pub(super) changes: FieldChanges,
}

impl Takeover for Tunnel {
    fn append_head(&self, out: &mut Vec<u8>) {
        append_status_line(out, self.head.status, &self.head.reason);
        self.changes.append(out, &self.head.fields);
        append_upgrade(out, &self.head.fields);
    }

    fn framing(&self) -> Framing {
        Framing::None
    }

    fn run(
        self: Box<Self>,
        to_client: &mut StreamWriter,
        request: &mut BodyReader<'_>,
    ) -> io::Result<()> {
        let Upstream { reader, writer, .. } = self.upstream;
        join(
            request.connection(),
            to_client,
            reader,
            writer,
            &self.account,
        )
    }
}

/// The connection of a client of a proxy that has asked for it (RFC 9110 section 9.3.6).
pub(super) struct Connected {
    pub(super) socket: OwnedFd,
    pub(super) account: Account,
}

impl Takeover for Connected {
    fn append_head(&self, out: &mut Vec<u8>) {
        append_status_line(out, 200, b"Connection established");
    }

    fn framing(&self) -> Framing {
        Framing::None
    }

    fn run(
        self: Box<Self>,
        to_client: &mut StreamWriter,
        request: &mut BodyReader<'_>,
    ) -> io::Result<()> {
        connect_through(request.connection(), to_client, self.socket, &self.account)
    }
}

/// Moves bytes between a client and a server that has sent nothing yet.
///
/// # Errors
/// As [`join`].
pub fn connect_through(
    from_client: &mut SocketReader,
    to_client: &mut StreamWriter,
    server: OwnedFd,
    account: &Account,
) -> io::Result<()> {
    let server = Arc::new(server);
    let reader = SocketReader::new(Arc::clone(&server));
    let writer = StreamWriter::new(server, Vec::new(), false);
    join(from_client, to_client, reader, writer, account)
}

/// Moves bytes until both directions have ended, or one side is gone.
fn join(
    from_client: &mut SocketReader,
    to_client: &mut StreamWriter,
    mut from_upstream: SocketReader<Arc<OwnedFd>>,
    mut to_upstream: StreamWriter<Arc<OwnedFd>>,
    account: &Account,
) -> io::Result<()> {
    let client = Arc::clone(to_client.socket());
    let upstream = Arc::clone(to_upstream.socket());
    let (mut up, mut down) = (Flow::new(account), Flow::new(account));
    let mut upstream_is_gone = false;
    loop {
        up.advance(from_client, &mut to_upstream);
        down.advance(&mut from_upstream, to_client);
        // The tunnel ends with its client. When the server is gone, the client first gets what the
        // server sent last.
        let client_is_gone = up.source.has_failed() || down.target_is_lost;
        if client_is_gone || (down.is_over() && (up.is_over() || upstream_is_gone)) {
            return Ok(());
        }
        let (up_reads, down_reads) = (
            up.is_open() && to_upstream.is_flushed(),
            down.is_open() && to_client.is_flushed(),
        );
        let client_events = Events::NONE
            .and_if(up_reads && !up.source_ready, Events::READABLE)
            .and_if(!to_client.is_flushed(), Events::WRITABLE);
        let upstream_events = Events::NONE
            .and_if(down_reads && !down.source_ready, Events::READABLE)
            .and_if(!to_upstream.is_flushed(), Events::WRITABLE);
        // Poll always reports a side that has hung up. It is left out once that is known and
        // nothing can be done about it, or the loop would spin.
        let polls_client = client_events.any() || !up.source_ready || !down.is_shut;
        let polls_upstream = upstream_events.any() || !down.source_ready;
        let limit = if (up_reads && up.source_ready) || (down_reads && down.source_ready) {
            Some(Duration::ZERO)
        } else {
            // A tunnel may be quiet without limit, but the client must take pending data in time.
            (!to_client.is_flushed()).then_some(SEND_LIMIT)
        };
        let [client_found, upstream_found] = poll_both(
            [
                polls_client.then(|| client.as_fd()),
                polls_upstream.then(|| upstream.as_fd()),
            ],
            [client_events, upstream_events],
            limit,
            || {
                to_client.trim();
                to_upstream.trim();
            },
        );
        if limit == Some(SEND_LIMIT) && !client_found.any() && !upstream_found.any() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let readable = Events::READABLE.and_if(true, Events::BROKEN);
        up.source_ready |= client_found.has(readable);
        down.source_ready |= upstream_found.has(readable);
        upstream_is_gone |= upstream_found.has(Events::BROKEN);
        // A client that closes both directions in order has hung up too, when its last bytes may
        // still be unread.
        if client_found.has(Events::BROKEN) && !(up.is_open() && down.is_shut) {
            return Ok(());
        }
    }
}

/// One direction of a tunnel.
struct Flow {
    source: BodyDecoder,
    /// Whether reading has something to report: bytes in the buffer, or what poll has found.
    source_ready: bool,
    size: ReadSize,
    /// Whether the end of the source was passed on to the target.
    is_shut: bool,
    /// Whether the target takes no more bytes.
    target_is_lost: bool,
}

impl Flow {
    fn new(account: &Account) -> Self {
        Self {
            source: BodyDecoder::UntilClose,
            source_ready: true,
            size: ReadSize::new(account),
            is_shut: false,
            target_is_lost: false,
        }
    }

    /// Whether more can come.
    fn is_open(&self) -> bool {
        matches!(self.source, BodyDecoder::UntilClose) && !self.target_is_lost
    }

    fn is_over(&self) -> bool {
        self.is_shut || self.target_is_lost
    }

    /// Moves what can be moved without blocking.
    fn advance<A: AsFd, B: AsFd>(&mut self, from: &mut SocketReader<A>, to: &mut StreamWriter<B>) {
        if to.flush().is_ok() && self.source_ready && self.is_open() && to.is_flushed() {
            let source = &mut self.source;
            // An error is kept in `source`.
            let _ = self
                .size
                .append(to, |out, most| source.append_available(from, out, most));
            self.source_ready = !from.unused().is_empty();
        }
        if to.flush().is_err() {
            to.discard();
            self.target_is_lost = true;
        }
        if !self.is_open() && to.is_flushed() && !self.is_over() {
            self.is_shut = true;
            let _ = shutdown(to.descriptor().as_raw_fd(), Shutdown::Write);
        }
    }
}
