//! The error of every mechanism: a kind that callers act on, and a text for people.
//!
//! Nothing here knows HTTP: each door has one table from [`Kind`] to its status and code. A text is lower
//! case and says act, object and cause, with the path as the client wrote it.

use std::fmt::{self, Write as _};
use std::io;

use nix::errno::Errno;

/// The kind of a failure; decides the status and the code that a client sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is not valid.
    Invalid,
    /// The object exists, but this access to it is not allowed.
    Forbidden,
    /// The object does not exist.
    NotFound,
    /// A directory where something else is needed.
    IsDirectory,
    /// Something else where a directory is needed.
    NotDirectory,
    /// A directory that still has entries.
    NotEmpty,
    /// A pipe, socket or device where a regular file is needed.
    NotRegular,
    /// Another process holds a lease on the file.
    Leased,
    /// The object exists already.
    Exists,
    /// An archive that is broken, or has what must not be unpacked.
    BadArchive,
    /// A format that this server does not read.
    Unsupported,
    /// The object cannot be moved to another file system.
    CrossDevice,
    /// The process's stdin is closed.
    StdinClosed,
    /// Another request is writing to the process's stdin.
    StdinBusy,
    /// The sandbox is stopped: it has files and no processes.
    Stopped,
    /// The process has no terminal.
    NotPty,
    /// The process has ended.
    NotRunning,
    /// The sandbox is paused, and no process of it may run.
    Paused,
    /// What the sandbox is does not allow this change while it runs.
    NotPossible,
    /// The processes of a sandbox could not be stopped in time.
    Busy,
    /// A client that may only watch a terminal types there.
    ReadOnly,
    /// Something is made of the object, or reads it.
    InUse,
    /// The chosen id belongs to a different command.
    IdInUse,
    /// The program does not exist.
    ProgramNotFound,
    /// The file exists but is not a program.
    ProgramNotExecutable,
    /// The working directory cannot be entered.
    BadDirectory,
    /// The program may not be executed.
    ProgramForbidden,
    /// No process, memory or descriptor is left for the command.
    NoResources,
    /// The file is not what the request expects, or was changed by somebody else meanwhile. Or a path of the machine no
    /// longer leads to what a sandbox was given.
    Changed,
    /// The text to change is not in the file.
    NoMatch,
    /// The text to change is in the file another number of times.
    Ambiguous,
    /// A file is not as a patch expects it.
    PatchFailed,
    /// The file is no text.
    Binary,
    /// More than the operation takes, or the request allows.
    TooLarge,
    /// A long operation has not finished in time; it can be repeated.
    Unfinished,
    /// The disk or quota is full.
    NoSpace,
    /// Nothing accepts connections at the port.
    Unreachable,
    /// This workspace or client holds as much of something as one may; the text names it.
    OverLimit,
    /// The kernel, or the share of a tenant, has no watch left for a directory.
    NoWatches,
    /// The machine has no terminal for the command.
    NoTerminals,
    /// No block of ids is free for a sandbox.
    NoIds,
    /// No interpreter runs this language.
    UnsupportedLanguage,
    /// The command that makes a virtual environment has failed.
    VenvFailed,
    /// The interpreter lacks what the back end needs.
    NoBackend,
    /// The interpreter of a context has ended.
    ContextDead,
    /// No code waits for input.
    NotAsked,
    /// An interpreter was started and is not ready.
    KernelFailed,
    /// A command may reach less than it asks for.
    TooWide,
    /// The machine cannot enforce what is asked for.
    Unavailable,
    /// As many executions wait as may.
    QueueFull,
    /// There are as many contexts as there may be.
    TooManyContexts,
    /// No thread is left for a request that may block.
    NoThreads,
    /// The server or the sandbox is ending.
    ShuttingDown,
    /// A system call failed for a reason that the client did not cause.
    System,
}

/// A value that programs may need of a failure, besides its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Detail {
    /// A count, an offset or the number of a line.
    Number(u64),
    /// A name, or a line of a file.
    Text(String),
    /// Several numbers.
    Numbers(Vec<u64>),
}

/// The details of a failure, by name.
pub type Details = Vec<(&'static str, Detail)>;

/// A failure with its context. It is boxed, because every result has room for one.
#[derive(Debug, Clone)]
pub struct Error(Box<ErrorParts>);

#[derive(Debug, Clone)]
struct ErrorParts {
    kind: Kind,
    text: String,
    details: Details,
}

/// The result of a mechanism.
pub type Result<T> = std::result::Result<T, Error>;

/// Longest text of a failure, in bytes. Some texts quote what the client has sent, which may be megabytes.
pub const MAX_TEXT_BYTES: usize = 16 * 1024;

/// The beginning of what is shown, as the text of a failure. No more than that is formatted, so a caller that quotes
/// passes `format_args!` and no `String`.
#[cold]
#[inline(never)]
pub fn capped(shown: &dyn fmt::Display) -> String {
    let mut text = Capped(String::new());
    // Fails when it is full.
    let _ = write!(text, "{shown}");
    text.0
}

struct Capped(String);

impl fmt::Write for Capped {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let room = MAX_TEXT_BYTES.saturating_sub(self.0.len());
        if more.len() <= room {
            self.0.push_str(more);
            return Ok(());
        }
        let mut ends = (0..=room).rev();
        let end = ends.find(|end| more.is_char_boundary(*end)).unwrap_or(0);
        self.0.push_str(&more[..end]);
        self.0.push('\u{2026}');
        Err(fmt::Error)
    }
}

/// What an error number means, as the cause in a text: `no such file or directory (ENOENT)`.
#[cold]
#[inline(never)]
pub fn cause(errno: Errno) -> String {
    format!("{} ({errno:?})", errno.desc().to_ascii_lowercase())
}

impl Error {
    /// A failure of `kind`; `text` says act, object and cause. It is [`capped`].
    pub fn new(kind: Kind, text: impl fmt::Display) -> Self {
        Self::of(kind, &text)
    }

    // Not generic, and not inlined: there are hundreds of callers.
    #[cold]
    #[inline(never)]
    fn of(kind: Kind, text: &dyn fmt::Display) -> Self {
        Self(Box::new(ErrorParts {
            kind,
            text: capped(text),
            details: Details::new(),
        }))
    }

    #[must_use]
    pub fn with(mut self, name: &'static str, detail: Detail) -> Self {
        self.0.details.push((name, detail));
        self
    }

    /// The details, which are removed.
    pub fn take_details(&mut self) -> Details {
        std::mem::take(&mut self.0.details)
    }

    /// A request that is not valid.
    pub fn invalid(text: impl fmt::Display) -> Self {
        Self::new(Kind::Invalid, text)
    }

    /// Work that the end of its workspace has stopped.
    pub fn deleted() -> Self {
        let text = "the sandbox was deleted before this was done";
        Self::new(Kind::NotFound, text)
    }

    /// A system call that failed while doing `act` (a phrase such as `cannot open /x`).
    pub fn system(act: impl fmt::Display, errno: Errno) -> Self {
        Self::of_errno(&act, errno)
    }

    #[cold]
    #[inline(never)]
    fn of_errno(act: &dyn fmt::Display, errno: Errno) -> Self {
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
        Self::new(kind, format_args!("{act}: {}", cause(errno)))
    }

    /// As [`Error::system`], for an error of the standard library.
    pub fn io(act: impl fmt::Display, error: &io::Error) -> Self {
        Self::of_io(&act, error)
    }

    #[cold]
    #[inline(never)]
    fn of_io(act: &dyn fmt::Display, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) => Self::of_errno(act, Errno::from_raw(code)),
            None => Self::new(Kind::System, format_args!("{act}: {error}")),
        }
    }

    /// The kind of the failure.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.text)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stops_where_it_is_too_long() {
        let quoted = "\u{200b}".repeat(4 << 20);
        let error = Error::invalid(format_args!("x is {quoted:?}; it takes 1"));
        let text = error.to_string();
        assert!(text.starts_with("x is \"\\u{200b}"), "{}", &text[..40]);
        assert!(text.ends_with('\u{2026}'));
        assert!(text.len() <= MAX_TEXT_BYTES + 3, "{}", text.len());
        // Between two characters.
        let text = capped(&quoted);
        assert_eq!(text.len(), MAX_TEXT_BYTES / 3 * 3 + 3);
        assert_eq!(capped(&"short"), "short");
    }
}
