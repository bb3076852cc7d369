//! Moves the bytes that a client sends into a file.
//!
//! [`UploadSource`] hides where the bytes come from, so nothing here knows a protocol. Large uploads
//! are spliced through a pipe, without copies.

use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::client::{Interrupt, Lookout, Peer, Stopped};
use crate::codec::gzip::{DECODER_BYTES, Decoder};
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::files::hash::Hasher;
use crate::files::{Condition, Input, RangedWrite, SplicePipe, Upload};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::priority::{BackgroundTurn, BackgroundWork};
use crate::workspace::lease::Workspace;

/// Bytes that are received at a time.
const READ_BYTES: usize = 256 * 1024;

/// Uploads from this size on are spliced, which costs a pipe; smaller ones are read and written.
const SPLICE_FROM_BYTES: u64 = 256 * 1024;

/// Size of a read for a tenant that holds its share of the server's memory.
const LEAST_READ_BYTES: usize = 8 * 1024;

/// Size of a read before splicing: bytes that arrived in one packet with the head cannot be spliced.
const FIRST_BYTES: usize = 64 * 1024;

/// How long a named pipe may take no data before the upload is given up.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where the bytes of an upload come from.
pub trait UploadSource {
    /// Why the bytes break off. Errors of the destination are turned into one, too.
    type Error: From<Error>;
    /// Bytes still to come, if the client announced them.
    fn remaining(&self) -> Option<u64>;
    /// Reads at least one byte; 0 at the end.
    ///
    /// # Errors
    /// The bytes break off.
    fn read(&mut self, buffer: &mut [u8]) -> std::result::Result<usize, Self::Error>;
    /// Moves at least one byte into an empty pipe without copying. `None` if the next bytes can only
    /// be [read](Self::read), or at the end.
    ///
    /// # Errors
    /// The bytes break off.
    fn splice(&mut self, pipe: BorrowedFd<'_>) -> std::result::Result<Option<usize>, Self::Error>;
    /// The sender, to be polled while the destination takes nothing.
    fn client(&self) -> Box<dyn Peer + Send>;
}

/// What a message has brought, from memory.
pub struct MemorySource<'d> {
    data: &'d [u8],
    watch: &'d dyn Fn() -> Box<dyn Peer + Send>,
}

impl<'d> MemorySource<'d> {
    /// These bytes; `watch` gives their sender.
    pub fn new(data: &'d [u8], watch: &'d dyn Fn() -> Box<dyn Peer + Send>) -> Self {
        Self { data, watch }
    }
}

impl UploadSource for MemorySource<'_> {
    type Error = Error;

    fn remaining(&self) -> Option<u64> {
        Some(self.data.len() as u64)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let (now, later) = self.data.split_at(self.data.len().min(buffer.len()));
        buffer[..now.len()].copy_from_slice(now);
        self.data = later;
        Ok(now.len())
    }

    fn splice(&mut self, _: BorrowedFd<'_>) -> Result<Option<usize>> {
        Ok(None)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        (self.watch)()
    }
}

/// A part of an upload.
enum Part<'a> {
    /// It is in memory.
    Read(&'a [u8]),
    /// This many bytes of it are in a pipe.
    Spliced(&'a mut SplicePipe, usize),
}

/// Receives a whole file and puts it in place if the condition still holds. Returns its size. What is to be
/// hashed is not spliced, so that it need not be read again.
pub(super) fn receive_whole<S: UploadSource>(
    workspace: &Workspace,
    source: &mut S,
    mut upload: Upload<'_>,
    condition: Condition,
    mut hasher: Option<&mut Hasher>,
) -> std::result::Result<u64, S::Error> {
    let mut client = source.client();
    let is_spliced = upload.is_staged() && hasher.is_none();
    each_part(workspace, source, is_spliced, |part| match part {
        Part::Spliced(pipe, count) => upload.splice_from(pipe, count),
        Part::Read(mut bytes) => {
            while !bytes.is_empty() {
                match upload.write(bytes)? {
                    0 => wait_for_room(&upload, &mut *client)?,
                    count => {
                        let (written, rest) = bytes.split_at(count);
                        if let Some(hasher) = &mut hasher {
                            hasher.feed(written);
                        }
                        bytes = rest;
                    }
                }
            }
            Ok(())
        }
    })?;
    fault::point("upload");
    Ok(commit(workspace, upload, condition, client)?)
}

/// Checks the condition again and puts the file in place: once for all sources.
fn commit(
    workspace: &Workspace,
    upload: Upload<'_>,
    condition: Condition,
    client: Box<dyn Peer + Send>,
) -> Result<u64> {
    let mut checked = None;
    if let Condition::Content(digest) = condition {
        let mut check = |interrupt: &mut dyn Interrupt| {
            let _files = workspace.files()?;
            checked = upload.check_again(digest, interrupt)?;
            Ok(())
        };
        workspace
            .work_if_long(&mut WhileConnected::new(client), &mut check)
            .map_err(unless_stopped)?;
    }
    upload.commit_if(condition, checked.as_ref())
}

/// Stops long work when the client disconnects.
pub(super) struct WhileConnected(Box<dyn Peer + Send>, Lookout);

impl WhileConnected {
    pub(super) fn new(client: Box<dyn Peer + Send>) -> Self {
        Self(client, Lookout::new())
    }
}

impl Interrupt for WhileConnected {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        self.1.look(&mut *self.0)?;
        Ok(())
    }
}

/// The error of work that was stopped.
pub(super) fn unless_stopped(stopped: Stopped) -> Error {
    match stopped {
        Stopped::Failed(error) => error,
        Stopped::Disconnected | Stopped::Due => Error::invalid("the client disconnected"),
    }
}

/// Receives a range of a file. Returns the file's size.
pub(super) fn receive_range<S: UploadSource>(
    workspace: &Workspace,
    source: &mut S,
    mut range: RangedWrite<'_>,
) -> std::result::Result<u64, S::Error> {
    each_part(workspace, source, true, |part| match part {
        Part::Spliced(pipe, count) => range.splice_from(pipe, count),
        Part::Read(bytes) => range.write(bytes),
    })?;
    Ok(range.commit()?)
}

fn each_part<S: UploadSource>(
    workspace: &Workspace,
    source: &mut S,
    is_spliced: bool,
    mut take: impl FnMut(Part<'_>) -> Result<()>,
) -> std::result::Result<(), S::Error> {
    let mut pipe = source
        .remaining()
        .filter(|expected| is_spliced && *expected >= SPLICE_FROM_BYTES)
        .and_then(|_| SplicePipe::new());
    let mut buffer = Vec::new();
    let mut charge = None;
    loop {
        workspace.check_open()?;
        if let Some(pipe) = &mut pipe
            && let Some(count) = source.splice(pipe.write_end())?
        {
            take(Part::Spliced(pipe, count))?;
            continue;
        }
        if buffer.is_empty() {
            let expected = source
                .remaining()
                .and_then(|left| usize::try_from(left).ok());
            let most = if pipe.is_some() {
                FIRST_BYTES
            } else {
                READ_BYTES
            };
            let wanted = expected.unwrap_or(most).clamp(1, most);
            let least = wanted.min(LEAST_READ_BYTES);
            let charge = charge.insert(workspace.ledger.charge_up_to(Item::Bodies, wanted, least));
            buffer = vec![0; charge.bytes()];
        }
        match source.read(&mut buffer)? {
            0 => return Ok(()),
            count => take(Part::Read(&buffer[..count]))?,
        }
    }
}

/// Waits until a named pipe takes more, as long as the client is there.
fn wait_for_room(upload: &Upload<'_>, client: &mut dyn Peer) -> Result<()> {
    let mut entries = [
        PollEntry::new(upload.descriptor(), Events::WRITABLE),
        PollEntry::new(client.descriptor(), client.interest()),
    ];
    let is_ready = poll(&mut entries, Some(PIPE_TIMEOUT));
    let found = entries[1].events();
    if is_ready && client.ready(found).is_ok() {
        return Ok(());
    }
    Err(upload.unread())
}

/// What a client sends, as a buffered reader that gives way to others each time that it is asked for bytes, and before the
/// first ones: what becomes of them may cost much. Why the source broke off is kept.
pub struct UploadReader<'s, S: UploadSource> {
    source: &'s mut S,
    turn: BackgroundTurn,
    client: WhileConnected,
    buffer: Vec<u8>,
    unread: Range<usize>,
    _charge: Charge,
    error: Option<S::Error>,
}

impl<'s, S: UploadSource> UploadReader<'s, S> {
    /// What `source` sends, charged to a ledger.
    pub fn new(source: &'s mut S, work: &Arc<BackgroundWork>, ledger: &Arc<Ledger>) -> Self {
        let charge = ledger.charge_up_to(Item::Bodies, READ_BYTES, LEAST_READ_BYTES);
        Self {
            turn: BackgroundTurn::of_this_thread(work).after_others(),
            client: WhileConnected::new(source.client()),
            source,
            buffer: vec![0; charge.bytes()],
            unread: 0..0,
            _charge: charge,
            error: None,
        }
    }

    /// Why the source broke off, if it did.
    pub fn take_error(&mut self) -> Option<S::Error> {
        self.error.take()
    }

    fn break_off(&mut self, error: S::Error) -> io::Error {
        self.error = Some(error);
        io::ErrorKind::ConnectionAborted.into()
    }
}

impl<S: UploadSource> Input for UploadReader<'_, S> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.fill_buf()
    }

    fn used(&mut self, count: usize) {
        self.consume(count);
    }

    fn give_way(&mut self) -> io::Result<()> {
        let passed = self.turn.pass(&mut || self.client.check());
        passed.map_err(|stopped| self.break_off(unless_stopped(stopped).into()))
    }
}

impl<S: UploadSource> BufRead for UploadReader<'_, S> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.give_way()?;
        if self.unread.is_empty() {
            match self.source.read(&mut self.buffer) {
                Ok(count) => self.unread = 0..count,
                Err(error) => return Err(self.break_off(error)),
            }
        }
        Ok(&self.buffer[self.unread.clone()])
    }

    fn consume(&mut self, count: usize) {
        self.unread.start += count;
    }
}

impl<S: UploadSource> Read for UploadReader<'_, S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(into)?;
        self.consume(count);
        Ok(count)
    }
}

/// What a client sends compressed by gzip, in one member or several.
pub struct GunzipSource<'s, S: UploadSource> {
    decoder: Decoder<UploadReader<'s, S>>,
    _charge: Charge,
}

impl<'s, S: UploadSource> GunzipSource<'s, S> {
    /// What `source` sends, decompressed.
    ///
    /// # Errors
    /// `OverLimit`.
    pub fn new(source: &'s mut S, workspace: &Workspace) -> Result<Self> {
        let charge = workspace.ledger.charge(Item::Bodies, DECODER_BYTES)?;
        let reader = UploadReader::new(source, &workspace.background, &workspace.ledger);
        Ok(Self {
            decoder: Decoder::new(reader),
            _charge: charge,
        })
    }
}

impl<S: UploadSource> UploadSource for GunzipSource<'_, S> {
    type Error = S::Error;

    fn remaining(&self) -> Option<u64> {
        None
    }

    fn read(&mut self, buffer: &mut [u8]) -> std::result::Result<usize, S::Error> {
        self.decoder.read(buffer).map_err(|error| {
            let broken_off = self.decoder.input().take_error();
            broken_off.unwrap_or_else(|| {
                let text = match error.kind() {
                    io::ErrorKind::UnexpectedEof => "the gzip data ends too early".to_owned(),
                    _ => error.to_string(),
                };
                Error::new(Kind::BadArchive, text).into()
            })
        })
    }

    fn splice(&mut self, _: BorrowedFd<'_>) -> std::result::Result<Option<usize>, S::Error> {
        Ok(None)
    }

    fn client(&self) -> Box<dyn Peer + Send> {
        self.decoder.input_ref().source.client()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::time::Instant;

    use super::*;
    use crate::client::Disconnected;
    use crate::error::Kind;
    use crate::files::hash::Hasher;
    use crate::files::name::FilePath;
    use crate::limits::ledger::Budget;
    use crate::workspace::{FilePart, FileWrite};

    struct Near(UnixStream);

    impl Peer for Near {
        fn descriptor(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn interest(&self) -> Events {
            Events::PEER_CLOSED
        }

        fn ready(&mut self, events: Events) -> std::result::Result<(), Disconnected> {
            let is_closed = events.has(Events::PEER_CLOSED);
            (!is_closed).then_some(()).ok_or(Disconnected)
        }
    }

    /// A client that does something before it sends its body.
    struct Hooked<'h> {
        body: &'static [u8],
        hook: &'h dyn Fn(),
        near: UnixStream,
    }

    impl UploadSource for Hooked<'_> {
        type Error = Error;

        fn remaining(&self) -> Option<u64> {
            Some(self.body.len() as u64)
        }

        fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
            (self.hook)();
            let body = std::mem::take(&mut self.body);
            buffer[..body.len()].copy_from_slice(body);
            Ok(body.len())
        }

        fn splice(&mut self, _: BorrowedFd<'_>) -> Result<Option<usize>> {
            Ok(None)
        }

        fn client(&self) -> Box<dyn Peer + Send> {
            Box::new(Near(self.near.try_clone().unwrap()))
        }
    }

    /// Writes `body` to `path` while `hook` is done meanwhile.
    fn write_while(
        workspace: &Workspace,
        path: &Path,
        condition: Condition,
        hook: &dyn Fn(),
    ) -> Option<Kind> {
        let (near, _far) = UnixStream::pair().unwrap();
        let how = FileWrite {
            part: FilePart::Whole,
            mode: None,
            makes_parents: false,
            condition,
            is_hashed: false,
            attributes: None,
        };
        let body = b"body";
        let mut source = Hooked { body, hook, near };
        let path = FilePath::new(path.as_os_str().as_bytes()).unwrap();
        let written = workspace.write_file(&path, &how, &mut source);
        written.err().map(|error| error.kind())
    }

    #[test]
    fn a_write_checks_again_when_its_body_is_there() {
        let directory = std::env::temp_dir().join(format!("sbx-upload-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let workspace = Workspace::for_test(&directory);
        let (path, content) = (directory.join("file"), |path: &Path| {
            fs::read(path).unwrap()
        });
        let put = |text: &str| fs::write(&path, text).unwrap();
        let write = |condition, hook: &dyn Fn()| write_while(&workspace, &path, condition, hook);
        let mut hasher = Hasher::default();
        hasher.feed(b"known");
        let known = Condition::Content(hasher.finish());

        put("known");
        assert_eq!(write(known, &|| put("other")), Some(Kind::Changed));
        assert_eq!(content(&path), b"other");
        put("known");
        assert_eq!(write(known, &|| ()), None);
        assert_eq!(content(&path), b"body");

        fs::remove_file(&path).unwrap();
        assert_eq!(
            write(Condition::Absent, &|| put("other")),
            Some(Kind::Exists)
        );
        assert_eq!(content(&path), b"other");

        // A client that learns that its file is there would not send it again.
        let deleted = write(Condition::Always, &|| workspace.close());
        assert_eq!(deleted, Some(Kind::NotFound));
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Reads from memory beside so much work of the tenant: how long a read takes at most, and how it ends.
    fn read(owed: Duration, far_stays: bool) -> (Duration, Result<()>) {
        let (near, far) = UnixStream::pair().unwrap();
        let far = far_stays.then_some(far);
        let watch = || Box::new(Near(near.try_clone().unwrap())) as Box<dyn Peer + Send>;
        let mut source = MemorySource::new(b"bytes", &watch);
        let ledger = Budget::new(1 << 30).whole();
        let begun = Instant::now();
        let mut reader = UploadReader::new(&mut source, &BackgroundWork::owing(owed), &ledger);
        // Not asked at once what was used.
        let (mut longest, mut is_there) = (Duration::ZERO, true);
        while is_there && begun.elapsed() < owed {
            let asked = Instant::now();
            is_there = reader.fill_buf().is_ok();
            longest = longest.max(asked.elapsed());
        }
        drop(far);
        (longest, reader.take_error().map_or(Ok(()), Err))
    }

    #[test]
    fn what_reads_an_upload_gives_way_and_ends_with_the_client() {
        let (took, ended) = read(Duration::from_secs(1), true);
        assert!(
            took >= Duration::from_millis(500) && ended.is_ok(),
            "{took:?}"
        );
        let (took, ended) = read(Duration::from_secs(60), false);
        assert!(took < Duration::from_secs(30), "{took:?}");
        assert!(ended.unwrap_err().to_string().contains("disconnected"));
    }
}
