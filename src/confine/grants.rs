//! Paths of the machine that are added to what the commands of a sandbox reach: a model, an environment of the
//! image.
//!
//! A path is opened at each start of a sandbox, and what counts is the file that it led to when the sandbox was made, not its
//! name: one that may change a directory above could lay another file there while the sandbox is stopped. Permissions and
//! owners hold as ever: a rule of Landlock only takes away. A link that a sandbox has made is not followed.

use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::stat::fstat;
use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, fstatfs};

use super::devices::Devices;
use super::given::{Grant, GrantedAccess, GrantedPaths, is_closed, walk};
use crate::error::{Error, Kind, Result, cause};
use crate::sys;

/// Tells a file from all others that its path could lead to. An inode number may be given again once its file is deleted, and
/// nobody chooses when a file is made. The number of a device may be another after each boot, so it is not part of this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    inode: u64,
    /// Nanoseconds since 1970; `None` where it is unknown, or may change.
    born: Option<i64>,
}

impl FileIdentity {
    fn new(file: BorrowedFd<'_>, inode: u64) -> Self {
        // There the birth of a file of the image becomes that of its copy as soon as somebody changes it.
        let kind = fstatfs(file).map(|system| system.filesystem_type());
        let is_overlay = kind == Ok(OVERLAYFS_SUPER_MAGIC);
        let born = if is_overlay {
            None
        } else {
            sys::birth_time(file)
        };
        Self { inode, born }
    }

    /// Reads what its `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        let (inode, born) = match text.split_once(' ') {
            Some((inode, born)) => (inode, Some(born.parse().ok()?)),
            None => (text, None),
        };
        let inode = inode.parse().ok()?;
        Some(Self { inode, born })
    }
}

impl fmt::Display for FileIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.inode)?;
        self.born
            .map_or(Ok(()), |born| write!(formatter, " {born}"))
    }
}

/// Paths that commands reach, open until the sandboxes have their rules.
pub struct Grants {
    pub(super) opened: Vec<Grant>,
    /// Where they lead.
    pub paths: Arc<GrantedPaths>,
    /// What they lead to: the read-only ones first.
    pub identities: Arc<[FileIdentity]>,
    /// What is given besides, by the names of devices.
    pub devices: Devices,
}

impl Grants {
    /// The paths of a sandbox that runs nothing, so that none is open.
    pub fn at_rest(read_only: &[String], read_write: &[String]) -> Self {
        Self {
            opened: Vec::new(),
            paths: Arc::new(GrantedPaths {
                read_only: read_only.to_vec(),
                read_write: read_write.to_vec(),
            }),
            identities: Arc::default(),
            devices: Devices::default(),
        }
    }

    /// Opens paths that a client names. Nothing that holds one of the `private` ones, or is in it, is among them, nor what
    /// a link of one of the `users` leads to. `known` is what they led to when the sandbox was made; `None` for a new one.
    ///
    /// # Errors
    /// `Invalid` for a path that is not absolute; `NotFound`; `NotRegular` for what is neither a file nor a directory;
    /// `Forbidden` for what must stay closed. `Changed` in place of these if something else was known.
    pub fn open(
        read_only: &[String],
        read_write: &[String],
        private: &[PathBuf],
        users: &RangeInclusive<u32>,
        known: Option<&[FileIdentity]>,
    ) -> Result<Self> {
        let mut opened = Vec::new();
        let mut identities = Vec::new();
        let mut granted = GrantedPaths::default();
        for (paths, field, access) in [
            (read_only, "read_only_paths", GrantedAccess::Read),
            (read_write, "read_write_paths", GrantedAccess::Write),
        ] {
            for path in paths {
                let refuse =
                    |(kind, why)| Error::new(kind, format_args!("{field} has {path:?}: {why}"));
                let found = open_path(path, private, users);
                let is_other = known.is_some_and(|known| match &found {
                    Ok((_, _, identity)) => known.get(identities.len()) != Some(identity),
                    Err((kind, _)) => *kind != Kind::System,
                });
                if is_other {
                    let why = "the sandbox cannot start, because the file or directory that it was given is no longer there; \
                               put it back, or make a new sandbox";
                    return Err(refuse((Kind::Changed, why.to_owned())));
                }
                let (file, path, identity) = found.map_err(refuse)?;
                let list = match access {
                    GrantedAccess::Write => &mut granted.read_write,
                    _ => &mut granted.read_only,
                };
                list.push(path);
                identities.push(identity);
                opened.push(Grant { file, access });
            }
        }
        Ok(Self {
            opened,
            paths: Arc::new(granted),
            identities: identities.into(),
            devices: Devices::default(),
        })
    }
}

/// Opens a path, and says where and to what it leads; or why not.
fn open_path(
    path: &str,
    private: &[PathBuf],
    users: &RangeInclusive<u32>,
) -> std::result::Result<(OwnedFd, String, FileIdentity), (Kind, String)> {
    if !path.starts_with('/') || path.contains('\0') {
        return Err((Kind::Invalid, "it takes absolute paths".to_owned()));
    }
    let described = |errno: Errno| {
        let kind = match errno {
            Errno::EACCES | Errno::ELOOP => Kind::Forbidden,
            Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG => Kind::NotFound,
            _ => Kind::System,
        };
        (kind, cause(errno))
    };
    let Some(file) = walk(Path::new(path), users).map_err(described)? else {
        let why = "a link on the way to it was made by a sandbox, or is in a directory of one";
        return Err((Kind::Forbidden, why.to_owned()));
    };
    // After all links: what was opened is what counts.
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let real = std::fs::read_link(link).map_err(|error| (Kind::System, error.to_string()))?;
    if is_closed(&real, private) {
        let why = "it is, is in, or holds what stays closed to sandboxes: /proc, /sys, /dev, the homes, the token's file";
        return Err((Kind::Forbidden, why.to_owned()));
    }
    let status = fstat(&file).map_err(described)?;
    let mode = status.st_mode & libc::S_IFMT;
    if mode != libc::S_IFREG && mode != libc::S_IFDIR {
        let why = "it is neither a file nor a directory";
        return Err((Kind::NotRegular, why.to_owned()));
    }
    let real = real.into_os_string().into_string();
    let not_text = |_| {
        (
            Kind::Forbidden,
            "it leads to a path that is not UTF-8".to_owned(),
        )
    };
    let real = real.map_err(not_text)?;
    let identity = FileIdentity::new(file.as_fd(), status.st_ino);
    Ok((file, real, identity))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;

    use super::*;

    /// A directory that goes with the value.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("sbx-grants-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path).unwrap();
            Self(path.canonicalize().unwrap())
        }

        fn path(&self, name: &str) -> String {
            self.0.join(name).to_str().unwrap().to_owned()
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_opened_counts_and_not_its_name() {
        let directory = Directory::new("names");
        for name in ["homes", "model", "token"] {
            std::fs::create_dir(directory.path(name)).unwrap();
        }
        std::fs::write(directory.path("token/file"), "").unwrap();
        let links = [
            ("to-model", "model"),
            ("to-homes", "homes"),
            ("to-root", "/"),
            ("to-proc", "/proc/self/fd"),
            ("to-itself", "to-itself"),
        ];
        for (link, target) in links {
            symlink(target, directory.path(link)).unwrap();
        }
        let private = [directory.0.join("homes"), directory.0.join("token/file")];
        let open = |path: &str| Grants::open(&[path.to_owned()], &[], &private, &(1..=1), None);
        let (model, file) = (directory.path("model"), directory.path("token"));
        for path in [
            &model,
            &directory.path("to-model"),
            &directory.path("homes/../model"),
        ] {
            let granted = open(path).unwrap().paths;
            assert_eq!(granted.read_only, std::slice::from_ref(&model));
        }
        for path in [
            "/",
            "/proc",
            "/proc/sys",
            "/sys/kernel",
            "/dev",
            "/dev/shm",
            "/dev/null",
            "//dev/../proc",
            "",
            "model",
            "./model",
            "/none",
            "/model\0",
            &directory.path("homes"),
            &directory.path("to-homes"),
            &directory.path("to-root"),
            &directory.path("to-proc"),
            &directory.path(""),
            &file,
            &directory.path("token/file"),
            &directory.path("to-itself"),
            &directory.path("to-model/none"),
            &directory.path("token/file/below"),
        ] {
            assert!(open(path).is_err(), "{path}");
        }
        nix::unistd::mkfifo(directory.path("pipe").as_str(), Mode::S_IRUSR).unwrap();
        assert!(open(&directory.path("pipe")).is_err());
    }

    #[test]
    fn what_is_opened_again_is_what_it_was() {
        let directory = Directory::new("again");
        let paths = ["one", "two"].map(|name| directory.path(name));
        let open = |known: Option<&[FileIdentity]>| {
            let [one, two] = &paths;
            let (one, two) = (std::slice::from_ref(one), std::slice::from_ref(two));
            Grants::open(one, two, &[], &(1..=1), known)
        };
        std::fs::create_dir(&paths[0]).unwrap();
        std::fs::write(&paths[1], "").unwrap();
        let known = open(None).unwrap().identities;
        // Only what they are counts, not what is in them.
        std::fs::create_dir(directory.path("one/below")).unwrap();
        std::fs::write(&paths[1], "changed").unwrap();
        let again = open(Some(&known)).unwrap();
        assert_eq!(again.identities, known);
        let refused = |known: &[FileIdentity]| {
            let error = open(Some(known)).err().unwrap();
            assert_eq!(error.kind(), Kind::Changed);
            error.to_string()
        };
        for known in [&known[..1], &[], &[known[1], known[0]]] {
            refused(known);
        }
        // A number that was given again is not the file that had it.
        let born = known[1].born;
        if let Some(born) = born {
            let mut others = known.to_vec();
            others[1].born = Some(born - 1);
            refused(&others);
        }
        let aside = directory.path("aside");
        std::fs::rename(&paths[1], &aside).unwrap();
        assert!(refused(&known).contains(&format!("{:?}", paths[1])));
        std::fs::write(&paths[1], "").unwrap();
        refused(&known);
        std::fs::remove_file(&paths[1]).unwrap();
        nix::unistd::mkfifo(paths[1].as_str(), Mode::S_IRUSR).unwrap();
        refused(&known);
        std::fs::rename(&aside, &paths[1]).unwrap();
        assert!(open(Some(&known)).is_ok());
    }

    #[test]
    fn identities_are_read_as_they_are_written() {
        for (inode, born) in [(0, None), (u64::MAX, Some(i64::MIN)), (7, Some(0))] {
            let identity = FileIdentity { inode, born };
            assert_eq!(FileIdentity::parse(&identity.to_string()), Some(identity));
        }
        for text in ["", " ", "1 ", " 1", "1 2 3", "-1", "1 x", "x 1"] {
            assert_eq!(FileIdentity::parse(text), None, "{text}");
        }
    }
}
