//! Pseudoterminals (pty(7), `ioctl_tty(2)`). A terminal has two ends: programs have the terminal itself
//! open, and whoever shows it and types has the master.
//!
//! The master's ioctls act on the terminal: size, foreground group and settings are the same from both
//! ends.

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, fchmod};

use super::paths::{open, openat};
use super::process::Pid;

/// Opens a new terminal, in a directory of terminals (`devpts`) or in that of the machine; returns the master, and
/// the terminal. Its node there belongs to the calling thread's user and is closed to all others.
///
/// # Errors
/// `ENOSPC` if the machine has no more terminals, `ENOENT` if it has none at all, or that of open(2).
pub fn open_terminal(directory: Option<BorrowedFd<'_>>) -> Result<(OwnedFd, OwnedFd), Errno> {
    // Never the server's own controlling terminal.
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let opened = flags | OFlag::O_NONBLOCK;
    let master = match directory {
        None => open("/dev/ptmx", opened, Mode::empty())?,
        Some(directory) => openat(directory, "ptmx", opened, Mode::empty())?,
    };
    let unlocked: c_int = 0;
    // SAFETY: TIOCSPTLCK reads one integer.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) };
    Errno::result(result)?;
    // SAFETY: a plain integer. The descriptor is new and nothing else owns it.
    let terminal = unsafe {
        let peer = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits());
        Errno::result(peer).map(|peer| OwnedFd::from_raw_fd(peer))
    };
    let terminal = match terminal {
        // Kernels before Linux 4.13, and stand-ins for a kernel.
        Err(Errno::EINVAL | Errno::ENOTTY) if directory.is_none() => {
            let path = format!("/dev/pts/{}", number(master.as_fd())?);
            open(path.as_str(), flags, Mode::empty())?
        }
        result => result?,
    };
    // Many machines let the group `tty` write to all terminals (devpts, `mode=620`).
    fchmod(&terminal, Mode::S_IRUSR | Mode::S_IWUSR)?;
    understand_utf8(terminal.as_fd())?;
    Ok((master, terminal))
}

/// N of `/dev/pts/N`.
fn number(master: BorrowedFd<'_>) -> Result<c_uint, Errno> {
    let mut number = 0;
    // SAFETY: TIOCGPTN writes one integer.
    Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) })?;
    Ok(number)
}

fn settings(terminal: BorrowedFd<'_>) -> Result<libc::termios, Errno> {
    let mut settings = MaybeUninit::<libc::termios>::zeroed();
    // SAFETY: tcgetattr fills `settings`, and all zeroes are a value of it.
    unsafe {
        Errno::result(libc::tcgetattr(terminal.as_raw_fd(), settings.as_mut_ptr()))?;
        Ok(settings.assume_init())
    }
}

/// Makes the erase character erase a whole character of several bytes (termios(3), `IUTF8`).
fn understand_utf8(terminal: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut settings = settings(terminal)?;
    settings.c_iflag |= libc::IUTF8;
    // SAFETY: reads one termios.
    let result =
        unsafe { libc::tcsetattr(terminal.as_raw_fd(), libc::TCSANOW, &raw const settings) };
    Errno::result(result).map(drop)
}

/// The character that ends the input of a program that reads lines, usually Ctrl-D; `None` if the
/// terminal has none.
///
/// # Errors
/// The error of ioctl(2).
pub fn end_of_file_character(master: BorrowedFd<'_>) -> Result<Option<u8>, Errno> {
    let character = settings(master)?.c_cc[libc::VEOF];
    // 0 is `_POSIX_VDISABLE`.
    Ok(Some(character).filter(|character| *character != 0))
}

/// Sets the size. If it has changed, the foreground group gets SIGWINCH.
///
/// # Errors
/// The error of ioctl(2).
pub fn set_terminal_size(master: BorrowedFd<'_>, rows: u16, columns: u16) -> Result<(), Errno> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    Errno::result(result).map(drop)
}

/// The foreground process group; `None` if there is none. The group may have ended, and its number be
/// another's by now.
///
/// # Errors
/// The error of ioctl(2).
pub fn foreground_group(master: BorrowedFd<'_>) -> Result<Option<Pid>, Errno> {
    let mut group: Pid = 0;
    // SAFETY: TIOCGPGRP writes one integer.
    Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPGRP, &raw mut group) })?;
    Ok(Some(group).filter(|group| *group > 0))
}

/// Sends SIGINT, SIGQUIT or SIGTSTP to the foreground group, as if its key was pressed: never to another
/// group that has its number by now. Kernels send no other signals this way.
///
/// # Errors
/// `EINVAL` for other signals.
pub fn signal_from_terminal(master: BorrowedFd<'_>, signal: c_int) -> Result<(), Errno> {
    // SAFETY: a plain integer.
    Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSIG, signal) }).map(drop)
}

/// Makes descriptor 0 the controlling terminal of this process, which leads a session without one. By a
/// system call only.
pub(super) fn take_controlling_terminal() -> Result<(), Errno> {
    // SAFETY: plain integers.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0) };
    Errno::result(result).map(drop)
}
