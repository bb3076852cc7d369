//! Whether two processes have one address space, as after vfork(2), so that its memory is counted once.
//!
//! Nothing that a process can choose decides it: what /proc shows of two processes can be made equal, and a thread can
//! be made to wait as in vfork. kcmp(2) tells, but containers often refuse it. Else a property of an address space
//! tells that only the kernel and those who may write to /proc can change: which kinds of mappings a core dump has
//! (`coredump_filter` in core(5)). What is written for one process is read of the other if, and only if, they share it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use crate::sys::{self, Pid};

/// Two bits of the filter that matter to nobody: mappings of files with DAX.
const PROBE_BITS: u32 = 0b1_1000_0000;
const PROBE_SHIFT: u32 = PROBE_BITS.trailing_zeros();

/// Whether two processes have one address space; false if that cannot be known. This thread acts as their user.
pub(super) fn have_one_address_space(one: Pid, other: Pid) -> bool {
    match sys::have_one_address_space(one, other) {
        Ok(is_one) => is_one,
        Err(Errno::ESRCH) => false,
        Err(_) => have_one_filter(one, other).unwrap_or(false),
    }
}

/// The same, by the filter. `None` if it cannot be read or written.
fn have_one_filter(one: Pid, other: Pid) -> Option<bool> {
    let path = |pid| format!("/proc/{pid}/coredump_filter");
    let mut options = OpenOptions::new();
    let written = options.read(true).write(true).open(path(one)).ok()?;
    let read = File::open(path(other)).ok()?;
    let before = filter(&written)?;
    // Many values, which cannot be foreseen: a process that execve has just given an address space of its own has
    // the last one, and without Landlock a process can write to its own.
    let mut values = u32::from_ne_bytes(sys::random_bytes().ok()?);
    let is_one = (0..16).all(|_| {
        let value = before & !PROBE_BITS | values << PROBE_SHIFT & PROBE_BITS;
        values >>= PROBE_BITS.count_ones();
        set_filter(&written, value).is_some() && filter(&read) == Some(value)
    });
    set_filter(&written, before);
    Some(is_one)
}

fn filter(file: &File) -> Option<u32> {
    let mut text = [0; 16];
    let count = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..count]).ok()?;
    u32::from_str_radix(text.trim_end(), 16).ok()
}

fn set_filter(file: &File, value: u32) -> Option<()> {
    file.write_at(format!("{value:#x}").as_bytes(), 0).ok()?;
    Some(())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::thread;

    use super::*;

    fn own_pid() -> Pid {
        Pid::try_from(std::process::id()).unwrap()
    }

    fn sleeper() -> (Child, Pid) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::try_from(child.id()).unwrap();
        (child, pid)
    }

    #[test]
    fn a_process_has_one_address_space_with_itself_alone() {
        let (mut child, other) = sleeper();
        let filter_of = |pid: Pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/coredump_filter"));
            text.unwrap()
        };
        let before = [own_pid(), other].map(filter_of);
        for pid in [own_pid(), other] {
            assert_eq!(have_one_filter(pid, pid), Some(true));
            assert!(have_one_address_space(pid, pid));
        }
        for [one, another] in [[own_pid(), other], [other, own_pid()]] {
            assert_eq!(have_one_filter(one, another), Some(false));
            assert!(!have_one_address_space(one, another));
        }
        assert_eq!([own_pid(), other].map(filter_of), before);
        thread::spawn(move || {
            sys::hide_system_call(libc::SYS_kcmp, Errno::EPERM).unwrap();
            assert!(have_one_address_space(own_pid(), own_pid()));
            assert!(!have_one_address_space(own_pid(), other));
        })
        .join()
        .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(have_one_filter(own_pid(), other), None);
        assert!(!have_one_address_space(own_pid(), other));
    }
}
