//! Devices of the machine that are given to a sandbox by name: which of their nodes and files it gets, and where it sees them.
//!
//! The operator writes the files that name them. What would undo the wall between sandbox and machine is refused all the
//! same: block devices, the kernel's file systems, the homes, and places that a sandbox has of its own.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::fstat;

use super::cdi;
use super::given::{Grant, GrantedAccess, GrantedPaths, is_closed, walk};
use super::private::PROXY_DIRECTORY;
use super::system_files::{DEVICES, is_among_programs};
use crate::codec::table::Table;
use crate::error::{Error, Kind, Result, cause};
use crate::spec::isolation::Isolation;
use crate::sys;

/// Most nodes and mounts of a sandbox. Each is a mount of the kernel's, or a rule.
const MAX_FILES: usize = 512;

/// What a sandbox has in /dev of its own besides [`DEVICES`].
const OWN_NODES: [&str; 5] = [
    "/dev/shm",
    "/dev/fd",
    "/dev/stdin",
    "/dev/stdout",
    "/dev/stderr",
];

/// Where nothing of the machine is laid over: the kernel's file systems, and what belongs to the sandbox.
const OWN_DIRECTORIES: [&str; 7] = [
    "/proc",
    "/sys",
    "/dev",
    "/tmp",
    "/home",
    "/root",
    PROXY_DIRECTORY,
];

/// A file of the machine, and where a sandbox sees it.
pub(super) struct Shown {
    /// Its path on the machine, after all links.
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) is_directory: bool,
    /// Its place in [`Devices::opened`].
    opened: usize,
}

/// The devices of a sandbox, open until it has its rules and mounts.
#[derive(Default)]
pub struct Devices {
    pub(super) opened: Vec<Grant>,
    /// Nodes that are shown in a /dev of its own.
    pub(super) nodes: Vec<Shown>,
    /// What is mounted besides.
    pub(super) mounts: Vec<Shown>,
    environment: Vec<(String, String)>,
}

/// How a sandbox sees the files of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileView {
    /// Where the machine has them.
    Machine,
    /// The same, among files of its own.
    Namespaces,
    /// Not at all.
    PrivateRoot,
}

impl FileView {
    pub fn new(isolation: Isolation, has_root: bool) -> Self {
        match isolation {
            _ if has_root => Self::PrivateRoot,
            Isolation::Landlock => Self::Machine,
            Isolation::Namespaces => Self::Namespaces,
        }
    }
}

/// What decides about the devices of a sandbox.
pub struct DeviceRequest<'a> {
    /// Their names.
    pub names: &'a [String],
    /// The directories of the files that have them.
    pub directories: &'a [PathBuf],
    /// Paths of the machine that no sandbox is given.
    pub private: &'a [PathBuf],
    /// The users of all sandboxes.
    pub users: &'a RangeInclusive<u32>,
    /// What the sandbox is given besides.
    pub granted: &'a GrantedPaths,
    pub view: FileView,
}

/// Why a file is not given.
type Refusal = (Kind, String);

fn refused<T>(why: impl Into<String>) -> std::result::Result<T, Refusal> {
    Err((Kind::Invalid, why.into()))
}

/// Whether one of two paths is in the other, or is it.
fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

impl Devices {
    /// Opens what belongs to devices.
    ///
    /// # Errors
    /// `Invalid` if there is no such device, or what belongs to it is missing or must not be given; `System`.
    pub fn open(request: &DeviceRequest<'_>) -> Result<Self> {
        let mut devices = Self::default();
        if request.names.is_empty() {
            return Ok(devices);
        }
        let edits = cdi::find(request.names, request.directories, request.users)?;
        // Of two for one path the later one counts, and directories come before what is in them.
        let (nodes, mounts) = (Table::from(edits.nodes), Table::from(edits.mounts));
        if nodes.len() + mounts.len() > MAX_FILES {
            let text = format!("devices have more than {MAX_FILES} nodes and mounts");
            return Err(Error::invalid(text));
        }
        devices.environment = edits.environment;
        for (list, are_nodes) in [(nodes, true), (mounts, false)] {
            for (target, source) in list.iter() {
                let added = if are_nodes {
                    devices.add_node(request, target, source)
                } else {
                    devices.add_mount(request, target, source)
                };
                added.map_err(|(kind, why)| {
                    let what = if are_nodes { "node" } else { "mount" };
                    let text = format_args!("devices need the {what} {target}, of {source}: {why}");
                    Error::new(kind, text)
                })?;
            }
        }
        Ok(devices)
    }

    /// Variables of commands.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&str, OsString)> {
        let variables = self.environment.iter();
        variables.map(|(name, value)| (name.as_str(), value.into()))
    }

    /// Mounts without a place of what is mounted besides, in that order.
    ///
    /// # Errors
    /// `EPERM` if this process may not mount.
    pub(super) fn detached(&self) -> nix::Result<Vec<OwnedFd>> {
        let files = self.mounts.iter().map(|mount| &self.opened[mount.opened]);
        files
            .map(|grant| sys::read_only_mount(grant.file.as_fd()))
            .collect()
    }

    fn add_node(
        &mut self,
        request: &DeviceRequest<'_>,
        target: &str,
        source: &str,
    ) -> std::result::Result<(), Refusal> {
        let (file, real, mode) = open(source, request.users)?;
        match mode {
            libc::S_IFCHR => {}
            libc::S_IFBLK => {
                return refused("no sandbox is given a block device, which holds files");
            }
            _ => return refused("it is no character device"),
        }
        let path = plain(target)?;
        if request.view == FileView::Machine {
            check_same(target, source)?;
        } else {
            let own = DEVICES.iter().chain(&OWN_NODES).map(Path::new);
            let others = self.nodes.iter().map(|node| &*node.target);
            if !path.starts_with("/dev") || own.chain(others).any(|own| overlap(&path, own)) {
                return refused(
                    "a sandbox has nodes below /dev, and this one is not, or is another there",
                );
            }
            self.nodes.push(Shown {
                source: real,
                target: path,
                is_directory: false,
                opened: self.opened.len(),
            });
        }
        self.opened.push(Grant {
            file,
            access: GrantedAccess::Device,
        });
        Ok(())
    }

    fn add_mount(
        &mut self,
        request: &DeviceRequest<'_>,
        target: &str,
        source: &str,
    ) -> std::result::Result<(), Refusal> {
        let (file, real, mode) = open(source, request.users)?;
        let access = match mode {
            libc::S_IFREG | libc::S_IFDIR => GrantedAccess::Read,
            libc::S_IFSOCK => GrantedAccess::Socket,
            _ => return refused("it is neither a file nor a directory nor a socket"),
        };
        if is_closed(&real, request.private) {
            return refused("it is, is in, or holds what stays closed to sandboxes");
        }
        let mut path = plain(target)?;
        let is_directory = mode == libc::S_IFDIR;
        let is_seen = match request.view {
            FileView::Machine => {
                check_same(target, source)?;
                true
            }
            FileView::Namespaces | FileView::PrivateRoot => {
                let own = OWN_DIRECTORIES.iter().map(Path::new);
                let private = request.private.iter().map(PathBuf::as_path);
                if own.chain(private).any(|own| overlap(&path, own)) {
                    return refused("nothing is mounted over what a sandbox has of its own there");
                }
                self.is_in_another(&path, &real)?
                    || (request.view == FileView::Namespaces
                        && is_seen_already(request, &mut path, &real, is_directory)?)
            }
        };
        if !is_seen {
            self.mounts.push(Shown {
                source: real,
                target: path,
                is_directory,
                opened: self.opened.len(),
            });
        }
        self.opened.push(Grant { file, access });
        Ok(())
    }

    /// Whether a mount shows a file already at a path in it.
    fn is_in_another(&self, path: &Path, real: &Path) -> std::result::Result<bool, Refusal> {
        for other in &self.mounts {
            if let Ok(rest) = path.strip_prefix(&other.target) {
                return if other.source.join(rest) == real {
                    Ok(true)
                } else {
                    refused(format!("it lies in the mount {}", other.target.display()))
                };
            }
        }
        Ok(false)
    }
}

/// Whether a sandbox with namespaces sees a file at a path because the machine has it there. Else the path becomes the one
/// to mount it at.
fn is_seen_already(
    request: &DeviceRequest<'_>,
    path: &mut PathBuf,
    real: &Path,
    is_directory: bool,
) -> std::result::Result<bool, Refusal> {
    let GrantedPaths {
        read_only,
        read_write,
    } = request.granted;
    let mut granted = read_only.iter().chain(read_write).map(Path::new);
    let granted = granted.find(|granted| overlap(path, granted));
    let above = path.ancestors().find(|above| above.exists());
    if granted.is_none() && !above.is_some_and(is_among_programs) {
        return Ok(false);
    }
    let found = path.canonicalize();
    if found.as_ref().is_ok_and(|found| *found == real)
        && granted.is_none_or(|granted| path.starts_with(granted))
    {
        return Ok(true);
    }
    match found {
        // In a directory that a sandbox may change somebody could exchange it.
        Ok(found) if granted.is_none() && !path.is_symlink() && found.is_dir() == is_directory => {
            *path = found;
            Ok(false)
        }
        _ => refused(
            "isolation namespaces shows the directory of the machine, which has no such file to mount it over",
        ),
    }
}

/// Without mounts of its own a sandbox sees files where the machine has them.
fn check_same(target: &str, source: &str) -> std::result::Result<(), Refusal> {
    if target == source {
        return Ok(());
    }
    refused("isolation landlock has no paths of its own; take namespaces")
}

/// An absolute path without `..`.
fn plain(path: &str) -> std::result::Result<PathBuf, Refusal> {
    let mut parts = Path::new(path).components();
    let is_absolute = parts.next() == Some(Component::RootDir);
    let is_plain =
        parts.clone().count() > 0 && parts.all(|part| matches!(part, Component::Normal(_)));
    let is_short = path.len() < usize::try_from(libc::PATH_MAX).unwrap_or(0);
    if !is_absolute || !is_plain || !is_short || path.contains('\0') {
        return refused("it takes absolute paths without ..");
    }
    Ok(Path::new(path).components().collect())
}

/// Opens a file of the machine. Returns it with its path after all links, and its type.
fn open(
    source: &str,
    users: &RangeInclusive<u32>,
) -> std::result::Result<(OwnedFd, PathBuf, libc::mode_t), Refusal> {
    let described = |errno: Errno| {
        let kind = match errno {
            Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EIO => Kind::System,
            _ => Kind::Invalid,
        };
        (kind, cause(errno))
    };
    if !source.starts_with('/') || source.contains('\0') {
        return refused("it takes absolute paths of the machine");
    }
    let Some(file) = walk(Path::new(source), users).map_err(described)? else {
        return refused(
            "a link on the way to it was made by a sandbox, or is in a directory of one",
        );
    };
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let real = std::fs::read_link(link).map_err(|error| (Kind::System, error.to_string()))?;
    let mode = fstat(&file).map_err(described)?.st_mode & libc::S_IFMT;
    Ok((file, real, mode))
}
