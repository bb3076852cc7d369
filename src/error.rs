//! What can go wrong in the mechanisms, as a kind that callers act on and a text that people read.
//!
//! Nothing here knows HTTP: `api::wire` holds the one table from [`Kind`] to a status. A text is
//! lower case and says act, object and cause, with the path as the client wrote it.

use std::fmt;
use std::io;

use nix::errno::Errno;

/// What kind of failure this is; decides the status and the code that a client sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request asks for something that makes no sense.
    Invalid,
    /// The object exists, and this caller may not do that to it.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// A directory where something else is needed.
    IsDirectory,
    /// Something else where a directory is needed.
    NotDirectory,
    /// A directory that still has entries.
    NotEmpty,
    /// A pipe, socket or device where a regular file is needed.
    NotRegular,
    /// A program has the file to itself for now.
    Leased,
    /// The object is there already.
    Exists,
    /// The object cannot be moved to another file system.
    CrossDevice,
    /// The process takes no (more) input.
    StdinClosed,
    /// Another request is writing to the process.
    StdinBusy,
    /// The chosen id belongs to a different command.
    IdInUse,
    /// The program does not exist.
    ProgramNotFound,
    /// The program exists and is no program.
    ProgramNotExecutable,
    /// The working directory cannot be entered.
    BadDirectory,
    /// The program may not be executed.
    ProgramForbidden,
    /// The machine has no process, memory or descriptor left for the command.
    NoResources,
    /// Not done yet, because there is so much to do.
    Unfinished,
    /// The disk or quota is full.
    NoSpace,
    /// Nobody is where a connection was to lead.
    Unreachable,
    /// The server is ending.
    ShuttingDown,
    /// The kernel refused for a reason that is not the caller's.
    System,
}

/// A failure with its context.
#[derive(Debug, Clone)]
pub struct Error {
    kind: Kind,
    text: String,
}

/// The result of every mechanism.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failure of `kind`; `text` says act, object and cause.
    pub fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// Input that makes no sense.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, text)
    }

    /// A system call that failed while doing `act` (a phrase such as `cannot open /x`).
    pub fn system(act: impl fmt::Display, errno: Errno) -> Self {
        let kind = match errno {
            Errno::ENOENT | Errno::ENXIO => Kind::NotFound,
            Errno::ENOTDIR => Kind::NotDirectory,
            Errno::EISDIR => Kind::IsDirectory,
            Errno::ENOTEMPTY => Kind::NotEmpty,
            Errno::EEXIST => Kind::Exists,
            Errno::EXDEV => Kind::CrossDevice,
            Errno::EACCES
            | Errno::EPERM
            | Errno::ELOOP
            | Errno::EROFS
            | Errno::EBUSY
            | Errno::ETXTBSY => Kind::Forbidden,
            Errno::ENAMETOOLONG | Errno::EINVAL | Errno::EFBIG | Errno::ESPIPE => Kind::Invalid,
            Errno::ENOSPC | Errno::EDQUOT => Kind::NoSpace,
            _ => Kind::System,
        };
        Self::new(
            kind,
            format!("{act}: {} ({errno:?})", errno.desc().to_lowercase()),
        )
    }

    /// As [`Error::system`], for an error that came through the standard library.
    pub fn io(act: impl fmt::Display, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) => Self::system(act, Errno::from_raw(code)),
            None => Self::new(Kind::System, format!("{act}: {error}")),
        }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
