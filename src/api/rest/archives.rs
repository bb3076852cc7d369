//! Archives: queries to typed operations, reports to documents.

use super::call::{Answer, Call};
use super::files::path;
use crate::api::json::file::ArchiveDocument;
use crate::api::json::list::to_json;
use crate::client::{Client, Disconnected, check_peer, send_all_within};
use crate::codec::query::Query;
use crate::error::Result;
use crate::files::search::{Filter, Matcher};
use crate::files::{
    BrokenOff, Extent, Kept, Overwrite, Packed, Packing, SENT_BYTES, Sink, Unpacking,
};
use crate::http::stream::{SEND_LIMIT, StreamClient, StreamWriter};
use crate::http::{Body, Response};
use crate::logging;
use crate::workspace::{Archive, MAX_ARCHIVE_FILES, Workspace};

/// The values of `overwrite`.
const OVERWRITES: [(&str, Overwrite); 3] = [
    ("replace", Overwrite::Replace),
    ("keep", Overwrite::Keep),
    ("fail", Overwrite::Fail),
];

/// `GET files/archive`.
pub(super) fn pack(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let path = path(query, "path")?;
    let packing = Packing {
        filter: filter(query)?,
        is_compressed: is_compressed(query)?,
        fails: query
            .choice("errors", &[("skip", false), ("fail", true)])?
            .unwrap_or(false),
        extent: Extent::Files,
        newer_than: query.number("newer_than_ms")?.map(u64::cast_signed),
    };
    Ok(send(call, workspace.pack_archive(&path, packing)?))
}

/// Whether an archive is asked for that is compressed.
pub(super) fn is_compressed(query: &Query) -> Result<bool> {
    let formats = [("tar", false), ("tar.gz", true)];
    Ok(query.choice("format", &formats)?.unwrap_or(false))
}

/// The answer with an archive.
pub(super) fn send(call: &Call<'_, '_>, archive: Archive) -> Response {
    let kind = if archive.is_compressed() {
        "application/gzip"
    } else {
        "application/x-tar"
    };
    let ping_interval = call.ping_interval();
    let body = Body::Stream(Box::new(move |stream: &mut StreamWriter| {
        stream.cover(SENT_BYTES);
        let mut client = StreamClient::new(stream, b"", ping_interval);
        if let Err(why) = archive.send(&mut ToClient(&mut client), &report) {
            if let BrokenOff::Failed(error) = why {
                logging::debug(format_args!("an archive was broken off: {error}"));
            }
            // The head at least: a connection that closes before it looks like one that was not served.
            let _ = stream.flush();
            stream.break_off();
        }
    }));
    Response::new(200, body).with_header("Content-Type", kind)
}

fn filter(query: &Query) -> Result<Filter> {
    Ok(Filter {
        ignore_files: if query.flag("gitignore")? {
            &[".gitignore"]
        } else {
            &[]
        },
        exclude: Matcher::new(query.values("exclude"))?,
        include: Matcher::new(query.values("include"))?,
        ..Filter::default()
    })
}

/// The report in an archive.
fn report(done: &Packed) -> Vec<u8> {
    to_json(&ArchiveDocument::packed(done))
}

/// Sends pieces of an archive.
struct ToClient<'a, 'b>(&'a mut StreamClient<'b>);

impl Sink for ToClient<'_, '_> {
    fn send(&mut self, bytes: &[u8]) -> std::result::Result<(), Disconnected> {
        self.0.push(|out| out.extend_from_slice(bytes));
        send_all_within(self.0, SEND_LIMIT)
    }

    fn look(&mut self) -> std::result::Result<(), Disconnected> {
        check_peer(self.0)?;
        self.0.flush()
    }
}

/// `PUT files/archive`.
pub(super) fn unpack(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let query = &call.query;
    let path = path(query, "path")?;
    let strip = query.number("strip")?.unwrap_or(0);
    let options = Unpacking {
        strip: usize::try_from(strip).unwrap_or(usize::MAX),
        overwrite: query
            .choice("overwrite", &OVERWRITES)?
            .unwrap_or(Overwrite::Replace),
        dry_run: query.flag("dry_run")?,
        kept: if query.flag("owners")? {
            Kept::Owners
        } else {
            Kept::Files
        },
        make_parents: query.optional_flag("mkdir")?.unwrap_or(true),
        max_bytes: query.number("max_bytes")?.unwrap_or(u64::MAX),
        max_files: query.number("max_files")?.unwrap_or(MAX_ARCHIVE_FILES),
    };
    let is_atomic = query.flag("atomic")?;
    let source = &mut call.request.body;
    let done = workspace.unpack_archive(&path, options, is_atomic, source)?;
    Ok(Response::json(&ArchiveDocument::unpacked(&path, &done)))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_client_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut stream = StreamWriter::for_test(listener.accept().unwrap().0);
        let mut client = StreamClient::new(&mut stream, b"", Duration::from_secs(60));
        // More than sockets hold.
        let piece = vec![b'x'; 16 << 20];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut taken = vec![0; piece.len()];
                far.read_exact(&mut taken).unwrap();
            });
            assert_eq!(ToClient(&mut client).send(&piece), Ok(()));
            reader.join().unwrap();
        });
        let mut sent = Ok(());
        for _ in 0..8 {
            sent = sent.and_then(|()| ToClient(&mut client).send(&piece));
        }
        assert_eq!(sent, Err(Disconnected));
    }
}
