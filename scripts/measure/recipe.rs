//! The floor of roots of sandboxes' own: the kernel's work alone, by the calls that such a root takes.

use std::ffi::{CStr, CString, c_int};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, clone};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::sys::wait::waitpid;

use super::confined::{Floor, NAMESPACES};
use super::program::Scratch;

/// The first id of the block that the recipe uses.
const FIRST_ID: u32 = 3_000_000_000;

/// What is mounted inside, below a tmpfs: a source, a place, a type and options. What has no type is a device of the machine.
const MOUNTS: [[&CStr; 4]; 11] = [
    [c"tmpfs", c"dev", c"tmpfs", c"mode=755"],
    [c"/dev/null", c"dev/null", c"", c""],
    [c"/dev/zero", c"dev/zero", c"", c""],
    [c"/dev/full", c"dev/full", c"", c""],
    [c"/dev/random", c"dev/random", c"", c""],
    [c"/dev/urandom", c"dev/urandom", c"", c""],
    [c"/dev/tty", c"dev/tty", c"", c""],
    [
        c"devpts",
        c"dev/pts",
        c"devpts",
        c"newinstance,ptmxmode=0666",
    ],
    [c"tmpfs", c"dev/shm", c"tmpfs", c"mode=1777"],
    [c"proc", c"proc", c"proc", c""],
    [c"sysfs", c"sys", c"sysfs", c""],
];

/// What a root takes without a server: a user namespace, an overlay whose layers show its ids, and namespaces with what a
/// machine has, in which the overlay is the root.
pub struct Recipe {
    template: CString,
    own: PathBuf,
}

impl Recipe {
    pub fn new(scratch: &Scratch, template: &Path) -> Self {
        Self {
            template: CString::new(template.as_os_str().as_bytes()).unwrap(),
            own: scratch.path("recipe"),
        }
    }

    #[allow(unsafe_code)]
    pub fn make(&self) {
        for name in ["up", "work"] {
            fs::create_dir_all(self.own.join(name)).unwrap();
        }
        let users = users();
        let own = CString::new(self.own.as_os_str().as_bytes()).unwrap();
        let lower = mapped(&self.template, &users);
        let own = mapped(&own, &users);
        let overlay = overlay(&lower, &own);
        let mut stack = vec![0; 64 << 10];
        // SAFETY: this thread stands still until the new process has ended, which makes system calls only.
        let made = unsafe {
            clone(
                Box::new(|| enter(&overlay)),
                &mut stack,
                NAMESPACES,
                Some(libc::SIGCHLD),
            )
        };
        Floor::wait(made.unwrap());
    }

    /// Removes what it made.
    pub fn clear(&self) {
        fs::remove_dir_all(&self.own).unwrap();
    }
}

/// A user namespace of the block, made by a process that ends.
#[allow(unsafe_code)]
fn users() -> OwnedFd {
    let mut stack = vec![0; 64 << 10];
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_NEWUSER;
    let pause = Box::new(|| {
        // SAFETY: no arguments; a signal ends it.
        unsafe { libc::pause() as isize }
    });
    // SAFETY: the process has ended before its stack goes.
    let first = unsafe { clone(pause, &mut stack, flags, Some(libc::SIGCHLD)) }.unwrap();
    for name in ["uid_map", "gid_map"] {
        let map = format!("0 {FIRST_ID} 65536\n");
        fs::write(format!("/proc/{first}/{name}"), map).unwrap();
    }
    let users = File::open(format!("/proc/{first}/ns/user")).unwrap();
    kill(first, Signal::SIGKILL).unwrap();
    waitpid(first, None).unwrap();
    users.into()
}

/// The descriptor that a system call has answered with.
#[allow(unsafe_code)]
fn owned(result: libc::c_long) -> OwnedFd {
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: new, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(c_int::try_from(result).unwrap()) }
}

/// A mount of a directory, without a place, whose ids are those of the block.
#[allow(unsafe_code)]
fn mapped(directory: &CStr, users: &OwnedFd) -> OwnedFd {
    /// `MOUNT_ATTR_IDMAP` (`mount_setattr(2)`).
    const IDMAP: u64 = 0x0010_0000;
    let attributes = [IDMAP, 0, 0, u64::try_from(users.as_raw_fd()).unwrap()];
    // SAFETY: a C string and an array of the given size that outlive the calls.
    unsafe {
        let (at, flags) = (libc::AT_FDCWD, libc::OPEN_TREE_CLONE);
        let mount = owned(libc::syscall(
            libc::SYS_open_tree,
            at,
            directory.as_ptr(),
            flags,
        ));
        let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
        let result = libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            path,
            flags,
            attributes.as_ptr(),
            size_of_val(&attributes),
        );
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        mount
    }
}

/// An overlay of `up` over a template, without a place.
#[allow(unsafe_code)]
fn overlay(lower: &OwnedFd, own: &OwnedFd) -> OwnedFd {
    /// `FSCONFIG_SET_FD` and `FSCONFIG_CMD_CREATE` of linux/mount.h.
    const SET_FD: c_int = 5;
    const CREATE: c_int = 6;
    /// `SECBIT_NO_SETUID_FIXUP`: who becomes another user keeps its capabilities (capabilities(7)).
    const NO_SETUID_FIXUP: c_int = 4;
    let open = |name| openat(own, name, OFlag::O_PATH, Mode::empty()).unwrap();
    let (up, work) = (open("up"), open("work"));
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: C strings that outlive the calls, and integers.
    unsafe {
        let context = owned(libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), 0));
        let configure = |command: c_int, key: *const libc::c_char, descriptor: c_int| {
            let context = context.as_raw_fd();
            let result = libc::syscall(libc::SYS_fsconfig, context, command, key, none, descriptor);
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        };
        configure(SET_FD, c"lowerdir+".as_ptr(), lower.as_raw_fd());
        configure(SET_FD, c"upperdir".as_ptr(), up.as_raw_fd());
        configure(SET_FD, c"workdir".as_ptr(), work.as_raw_fd());
        // What it makes there belongs to root inside.
        libc::prctl(libc::PR_SET_SECUREBITS, NO_SETUID_FIXUP);
        libc::setfsgid(FIRST_ID);
        libc::setfsuid(FIRST_ID);
        configure(CREATE, none, 0);
        libc::setfsuid(0);
        libc::setfsgid(0);
        libc::prctl(libc::PR_SET_SECUREBITS, 0);
        owned(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 0, 0))
    }
}

/// Mounts everything and makes the overlay its root, by system calls.
#[allow(unsafe_code)]
fn enter(overlay: &OwnedFd) -> isize {
    let none = c"".as_ptr();
    // SAFETY: C strings that outlive the calls, and integers.
    unsafe {
        let private = libc::MS_REC | libc::MS_PRIVATE;
        let tmpfs = c"tmpfs".as_ptr();
        if libc::mount(none, c"/".as_ptr(), none, private, none.cast()) < 0
            || libc::mount(tmpfs, c"/proc".as_ptr(), tmpfs, 0, none.cast()) < 0
            || libc::chdir(c"/proc".as_ptr()) < 0
        {
            return 1;
        }
        for [source, place, kind, options] in MOUNTS {
            let is_bound = kind.is_empty();
            let flags = if is_bound { libc::MS_BIND } else { 0 };
            if is_bound {
                let file = libc::open(place.as_ptr(), libc::O_CREAT | libc::O_CLOEXEC, 0o644);
                libc::close(file);
            } else {
                libc::mkdir(place.as_ptr(), 0o755);
            }
            let (source, place) = (source.as_ptr(), place.as_ptr());
            if libc::mount(source, place, kind.as_ptr(), flags, options.as_ptr().cast()) < 0 {
                return 2;
            }
        }
        libc::mkdir(c"root".as_ptr(), 0o755);
        let (root, at, empty) = (
            overlay.as_raw_fd(),
            libc::AT_FDCWD,
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        );
        let name = c"root".as_ptr();
        if libc::syscall(libc::SYS_move_mount, root, none, at, name, empty) < 0 {
            return 3;
        }
        for name in [c"dev", c"proc", c"sys"] {
            let mut to = [0; 16];
            to[..5].copy_from_slice(b"root/");
            to[5..5 + name.count_bytes()].copy_from_slice(name.to_bytes());
            let to = to.as_ptr();
            if libc::syscall(libc::SYS_move_mount, at, name.as_ptr(), at, to, 0) < 0 {
                return 4;
            }
        }
        let here = c".".as_ptr();
        if libc::chdir(name) < 0
            || libc::syscall(libc::SYS_pivot_root, here, here) < 0
            || libc::umount2(here, libc::MNT_DETACH) < 0
        {
            return 5;
        }
        0
    }
}
