//! The files of the machine that every sandbox reaches; those that an image lacks do not matter.

use std::path::Path;

/// Directories of programs: read and execute. Everything else is closed: /root, /home, /tmp, /var, /run,
/// /mnt, /srv, other directories that an image or a job adds, and the homes of other sandboxes.
pub const PROGRAMS: [&str; 10] = [
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc", "/opt", "/nix",
];

/// Files that can be read: the kernel's, and the targets of two links in /etc, without which host names
/// and TLS certificates do not work.
pub(super) const READABLE: [&str; 4] = [
    "/proc",
    "/sys",
    "/etc/resolv.conf",
    "/var/lib/ca-certificates",
];

/// Devices that programs expect. Not all of /dev, which has disks.
pub(super) const DEVICES: [&str; 8] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/pts",
];

/// Whether a path is beneath one of the directories of programs, which every sandbox may read.
pub fn is_among_programs(path: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let path = resolved(path);
    PROGRAMS
        .iter()
        .any(|directory| path.starts_with(resolved(Path::new(directory))))
}
