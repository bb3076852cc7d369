//! Paths of the machine that are added to what the commands of a sandbox reach: a model, an environment of the
//! image.
//!
//! A path is opened once, and what counts from then on is the file that was opened, not its name. Permissions and
//! owners hold as ever: a rule of Landlock only takes away. A link that a sandbox has made is not followed.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, readlinkat};
use nix::sys::stat::{Mode, fstat};

use crate::error::{Error, Kind, Result, cause};

/// What no sandbox is given: the kernel's own file systems, devices, and what holds them.
const FORBIDDEN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Most links on the way, as in the kernel.
const MAX_LINKS: usize = 40;

/// A path that commands reach.
pub(super) struct Grant {
    pub(super) file: OwnedFd,
    pub(super) is_writable: bool,
}

/// Paths that commands reach, open until the sandboxes have their rules.
pub struct Grants {
    pub(super) opened: Vec<Grant>,
    /// Where they lead.
    pub paths: Arc<GrantedPaths>,
}

/// Where the paths lead that commands reach.
#[derive(Default)]
pub struct GrantedPaths {
    /// Those that can be read.
    pub read_only: Vec<String>,
    /// Those that can be changed.
    pub read_write: Vec<String>,
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
        }
    }

    /// Opens paths that a client names. Nothing that holds one of the `private` ones, or is in it, is among them, nor what
    /// a link of one of the `users` leads to.
    ///
    /// # Errors
    /// `Invalid` for a path that is not absolute; `NotFound`; `NotRegular` for what is neither a file nor a directory;
    /// `Forbidden` for what must stay closed.
    pub fn open(
        read_only: &[String],
        read_write: &[String],
        private: &[PathBuf],
        users: &RangeInclusive<u32>,
    ) -> Result<Self> {
        let mut opened = Vec::new();
        let mut granted = GrantedPaths::default();
        for (paths, field, is_writable) in [
            (read_only, "read_only_paths", false),
            (read_write, "read_write_paths", true),
        ] {
            for path in paths {
                let refuse =
                    |(kind, why)| Error::new(kind, format_args!("{field} has {path:?}: {why}"));
                let (file, path) = open_path(path, private, users).map_err(refuse)?;
                let list = if is_writable {
                    &mut granted.read_write
                } else {
                    &mut granted.read_only
                };
                list.push(path);
                opened.push(Grant { file, is_writable });
            }
        }
        Ok(Self {
            opened,
            paths: Arc::new(granted),
        })
    }
}

/// Opens a path, and says where it leads; or why not.
fn open_path(
    path: &str,
    private: &[PathBuf],
    users: &RangeInclusive<u32>,
) -> std::result::Result<(OwnedFd, String), (Kind, String)> {
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
    let is_closed = |closed: &Path| real.starts_with(closed) || closed.starts_with(&real);
    let resolved = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut private = private.iter().map(resolved);
    if FORBIDDEN.iter().any(|path| is_closed(Path::new(path)))
        || private.any(|path| is_closed(&path))
    {
        let why = "it is, is in, or holds what stays closed to sandboxes: /proc, /sys, /dev, the homes, the token's file";
        return Err((Kind::Forbidden, why.to_owned()));
    }
    let mode = fstat(&file).map_err(described)?.st_mode & libc::S_IFMT;
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
    Ok((file, real))
}

/// Opens a path step by step, so that nobody can change a step between the look at it and its use. `None` if a link is on
/// the way that one of these users has made, or can have put there.
fn walk(path: &Path, users: &RangeInclusive<u32>) -> nix::Result<Option<OwnedFd>> {
    if path.as_os_str().len() >= usize::try_from(libc::PATH_MAX).unwrap_or(0) {
        return Err(Errno::ENAMETOOLONG);
    }
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    // The last step first.
    let steps = |path: &Path| -> Vec<OsString> {
        let steps = path.components().rev();
        steps.map(|step| step.as_os_str().to_owned()).collect()
    };
    let root = || open("/", flags, Mode::empty());
    let (mut here, mut left, mut links) = (root()?, steps(path), 0);
    while let Some(step) = left.pop() {
        if Path::new(&step).components().next() == Some(Component::RootDir) {
            here = root()?;
            continue;
        }
        let next = openat(&here, &*step, flags, Mode::empty())?;
        let status = fstat(&next)?;
        if status.st_mode & libc::S_IFMT != libc::S_IFLNK {
            here = next;
            continue;
        }
        if [status.st_uid, fstat(&here)?.st_uid]
            .iter()
            .any(|owner| users.contains(owner))
        {
            return Ok(None);
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::ELOOP);
        }
        left.extend(steps(Path::new(&readlinkat(&next, "")?)));
    }
    Ok(Some(here))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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
        let open = |path: &str| Grants::open(&[path.to_owned()], &[], &private, &(1..=1));
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
}
