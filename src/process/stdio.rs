//! The standard streams of a command: what becomes 0, 1 and 2 in the child, and what the server keeps.
//!
//! [`Stdio::pipes`] and [`Stdio::terminal`] make them. Starting and driving a command uses only the two
//! halves of the result and does not know how they are connected: a terminal appears three times in the
//! child's half, its master twice in the server's, and an output that does not exist is `None` there.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::{Error, Kind, Result, cause};
use crate::spec::command::TerminalSize;
use crate::sys;

/// Both halves of a command's standard streams.
pub(super) struct Stdio {
    /// What becomes 0, 1 and 2. The server closes these after the start, because an output ends only
    /// when no process has it open for writing.
    pub(super) child: [Arc<OwnedFd>; 3],
    /// Where the server reads the output of each stream, without blocking.
    pub(super) outputs: Outputs,
    /// Where the server writes the input, without blocking; `None` if the command gets none.
    pub(super) input: Option<Arc<OwnedFd>>,
    /// What the command gets besides; the server closes it after the start too.
    pub(super) passed: Option<OwnedFd>,
}

/// The server's end of each output.
pub(super) type Outputs = [Option<Arc<OwnedFd>>; 2];

impl Stdio {
    /// Two pipes for the output, and one for the input unless the command reads `null`.
    ///
    /// The caller acts as the command's user: pipes belong to the user that makes them, and a command
    /// may open its own again by name, as `/dev/stderr`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn pipes(null: Option<OwnedFd>) -> Result<Self> {
        let (stdout, stdout_write) = pipe()?;
        let (stderr, stderr_write) = pipe()?;
        let (stdin, input) = if let Some(null) = null {
            (Arc::new(null), None)
        } else {
            let (read, write) = pipe()?;
            (Arc::new(read), Some(Arc::new(write)))
        };
        // Applies to the server's ends only: the command may use its own as it likes.
        for end in [&stdout, &stderr].into_iter().chain(input.as_deref()) {
            fcntl(end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(failed)?;
        }
        Ok(Self {
            child: [stdin, Arc::new(stdout_write), Arc::new(stderr_write)],
            outputs: [Some(stdout), Some(stderr)].map(|end| end.map(Arc::new)),
            input,
            passed: None,
        })
    }

    /// A terminal of this size, among those of a directory or of the machine. What it shows is the first output.
    ///
    /// The caller acts as the command's user, for the same reason: nobody else may open the terminal, because
    /// all sandboxes share /dev/pts.
    ///
    /// # Errors
    /// `NoTerminals`.
    pub(super) fn terminal(size: TerminalSize, directory: Option<BorrowedFd<'_>>) -> Result<Self> {
        let failed = |errno: Errno| {
            let text = format!("{NO_TERMINAL}: {}", cause(errno));
            Error::new(Kind::NoTerminals, text)
        };
        let (master, terminal) = sys::open_terminal(directory).map_err(failed)?;
        if sys::is_scarce(terminal.as_fd()) {
            return Err(failed(Errno::EMFILE));
        }
        sys::set_terminal_size(master.as_fd(), size.rows(), size.columns()).map_err(failed)?;
        let (master, terminal) = (Arc::new(master), Arc::new(terminal));
        Ok(Self {
            child: [(); 3].map(|()| Arc::clone(&terminal)),
            outputs: [Some(Arc::clone(&master)), None],
            input: Some(master),
            passed: None,
        })
    }

    /// The child's half, in the order of its descriptors.
    pub(super) fn child(&self) -> [BorrowedFd<'_>; 3] {
        self.child.each_ref().map(|descriptor| descriptor.as_fd())
    }
}

/// `/dev/null`, opened anew: commands that had one description of it in common could talk to each other by its flags,
/// its owner and its locks.
///
/// # Errors
/// No descriptor is left.
pub(super) fn reopen(null: &File) -> Result<OwnedFd> {
    // By the descriptor, because a command of root can give its name to something else.
    let by_descriptor = File::open(format!("/proc/self/fd/{}", null.as_raw_fd()));
    let opened = by_descriptor.or_else(|error| match error.kind() {
        ErrorKind::NotFound => File::open("/dev/null"),
        _ => Err(error),
    });
    let failed = |error| Error::io("cannot open /dev/null for the command", &error);
    opened.map(OwnedFd::from).map_err(failed)
}

/// A file in memory that nobody can change.
///
/// # Errors
/// No descriptor or memory is left.
pub(super) fn sealed_file(content: &[u8]) -> Result<OwnedFd> {
    let failed = |errno| Error::system("cannot keep the code in memory", errno);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Kernels before Linux 6.3 do not know the flag, and some later ones insist on it.
    let no_program = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    let file = memfd_create(c"code", flags | no_program)
        .or_else(|_| memfd_create(c"code", flags))
        .map_err(failed)?;
    if sys::is_scarce(file.as_fd()) {
        return Err(failed(Errno::EMFILE));
    }
    let file = File::from(file);
    // It is read from its beginning: the offset stays there.
    let written = file.write_all_at(content, 0);
    written.map_err(|error| Error::io("cannot keep the code in memory", &error))?;
    let seals = SealFlag::all();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(failed)?;
    Ok(file.into())
}

pub(super) const NO_TERMINAL: &str = "cannot open a terminal for the command";

/// The reading and the writing end of a new pipe.
fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
    if sys::is_scarce(write.as_fd()) {
        return Err(failed(Errno::EMFILE));
    }
    Ok((read, write))
}

fn failed(errno: Errno) -> Error {
    Error::system("cannot make a pipe for the command", errno)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_sealed_file_is_read_from_its_beginning_and_changed_by_nobody() {
        let mut file = File::from(sealed_file(b"code").unwrap());
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS).unwrap();
        assert_eq!(seals & SealFlag::all().bits(), SealFlag::all().bits());
        assert!(file.write_at(b"harm", 0).is_err());
        assert!(file.set_len(0).is_err() && file.set_len(100).is_err());
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "code");
    }
}
