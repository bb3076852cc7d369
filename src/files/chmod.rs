//! Changes the permission bits of files and trees. Links have none of their own and are left alone.

use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FchmodatFlags, Mode, fstat};

use super::entry::{DIRECTORY, FileKind};
use super::name::FilePath;
use super::root::{Files, Missing};
use super::search::{Filter, Visit};
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind};
use crate::limits::ledger::{Item, Ledger};
use crate::sys::paths::fchmodat;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Files and directories that have the mode now.
    pub changed: u64,
    /// Links, what is another user's, and what cannot be reached.
    pub skipped: u64,
}

impl Files<'_> {
    /// Sets the permission bits of a file or directory, and with `recursive` of all that is in it.
    ///
    /// # Errors
    /// `NotFound`; `Forbidden`; `NotRegular` for a link; `OverLimit`; or it was interrupted.
    pub fn chmod(
        &self,
        path: &FilePath,
        mode: u32,
        recursive: bool,
        ledger: &Arc<Ledger>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Changed, Stopped> {
        let failed = |errno| self.error(format_args!("cannot change the mode of {path}"), errno);
        let file = self
            .resolve(path, OFlag::O_PATH | OFlag::O_NOFOLLOW)
            .map_err(failed)?;
        let kind = FileKind::of(&fstat(&file).map_err(failed)?);
        let bits = Mode::from_bits_truncate(mode);
        let is_link = || {
            let why = "it is a symbolic link, which has no mode of its own; name its target";
            let text = format!("cannot change the mode of {path}: {why}");
            Error::new(Kind::NotRegular, text)
        };
        if kind == FileKind::Link {
            return Err(is_link().into());
        }
        if kind != FileKind::Directory {
            let name = self.name_at(path, Missing::Refuse)?;
            name.set_mode(mode).map_err(|errno| match errno {
                // A link has taken its place meanwhile.
                Errno::EOPNOTSUPP => is_link(),
                errno => failed(errno),
            })?;
            return Ok(Changed {
                changed: 1,
                skipped: 0,
            });
        }
        let set_own = || fchmodat(&file, ".", bits, FchmodatFlags::FollowSymlink).map_err(failed);
        // Who may not list and enter a directory any more cannot change what is in it.
        let closes = mode & 0o500 != 0o500;
        let mut result = Changed::default();
        if !recursive || !closes {
            set_own()?;
            result.changed += 1;
        }
        if !recursive {
            return Ok(result);
        }
        let mut directories: Vec<Vec<u8>> = Vec::new();
        let (mut charge, mut bytes) = (ledger.charge(Item::Responses, 0).map_err(Error::from)?, 0);
        let mut walk = self.walk(path, Filter::default(), None, ledger)?;
        while let Some(visit) = walk.next()? {
            interrupt.check()?;
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Passed => continue,
                Visit::Unreadable(..) => {
                    result.skipped += 1;
                    continue;
                }
            };
            match found.kind {
                FileKind::Link => result.skipped += 1,
                FileKind::Directory if closes => {
                    bytes += found.path.len() + size_of::<Vec<u8>>() + 16;
                    if bytes > charge.bytes() {
                        charge.set(2 * bytes).map_err(Error::from)?;
                    }
                    directories.push(found.path.to_vec());
                }
                _ => {
                    let no_link = FchmodatFlags::NoFollowSymlink;
                    result.count(fchmodat(found.directory, found.name, bits, no_link));
                }
            }
        }
        drop(walk);
        for below in directories.iter().rev() {
            interrupt.check()?;
            let flags = DIRECTORY | OFlag::O_NOFOLLOW;
            let whole = path.child(below).map_err(|_| Errno::ENAMETOOLONG);
            let directory = whole.and_then(|whole| self.resolve(&whole, flags));
            let follow = FchmodatFlags::FollowSymlink;
            result.count(directory.and_then(|opened| fchmodat(&opened, ".", bits, follow)));
        }
        if closes {
            set_own()?;
            result.changed += 1;
        }
        Ok(result)
    }
}

impl Changed {
    fn count(&mut self, changed: nix::Result<()>) {
        match changed {
            Ok(()) => self.changed += 1,
            Err(Errno::ENOENT) => {}
            Err(_) => self.skipped += 1,
        }
    }
}
