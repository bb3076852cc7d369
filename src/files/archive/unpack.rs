//! Unpacks an archive beneath a directory, whatever the archive says and whatever happens to the
//! directory meanwhile.
//!
//! One directory is open at a time, that of the last member: archives list a directory's files one
//! after another. The way to the next one goes up by the kernel's `..`, where each directory must be the
//! one that was come from, and down name by name without following links. What is known of each level
//! above takes a few bytes, so descriptors and memory are bounded.
//!
//! A directory gets its mode and time when the way leaves it. Until then its owner may write in it.
//!
//! Here is the walk, and what comes of each member. Elsewhere: which names are allowed (`parts`), what is
//! remembered of names (`known`), how attributes are set (`attributes`), and how what is complete takes its
//! place (`staging`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fstat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, ftruncate, mkfifoat};

use super::attributes::Attributes;
use super::header::Time;
use super::input::Input;
use super::known::Known;
use super::members::{Member, MemberKind, Members};
use super::parts::parts;
use super::staging::{StagedFile, StagingTree};
use super::{MAX_SKIPPED_NAMES, Skipped};
use crate::error::{Detail, Error, Kind, Result, cause};
use crate::fault;
use crate::files::SkipReason;
use crate::files::condition::Turn;
use crate::files::describe::Attribute;
use crate::files::entry::{DIRECTORY, FileKind, Identity};
use crate::files::home::remove_home_while;
use crate::files::name::{FilePath, show};
use crate::files::rename::replace_by;
use crate::files::root::{Files, Missing, Root};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::sys::paths::{fchmodat, fstatat, linkat, mkdirat, openat, symlinkat, unlinkat};
use crate::sys::set_attribute;

/// Longest content of a symbolic link (`PATH_MAX`, with the NUL).
const MAX_LINK_BYTES: usize = 4095;

/// Most symbolic links of an archive that are remembered. Once there are more, no link is written over.
const MAX_KNOWN_LINKS: usize = 1 << 16;

/// Most directories that a dry run remembers.
const MAX_KNOWN_MADE: usize = 1 << 16;

/// Most times of directories that are remembered. Where an archive comes back to one of more, that has the
/// time of the last change in it.
const MAX_KNOWN_TIMES: usize = 1 << 14;

/// What happens to files that exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// They are replaced, each in one step.
    Replace,
    /// They stay.
    Keep,
    /// The first one ends the unpacking.
    Fail,
}

/// What is kept of members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// What the owner of the directory may have.
    Files,
    /// Numeric owners, too. Only root of a machine may.
    Owners,
    /// All of the root of a machine: bits of the mode that give rights, named pipes and extended attributes, too.
    Root,
    /// The same, of a [layer](super::layer) of an image: what is in a member's way is replaced.
    Layer,
}

#[derive(Debug, Clone, Copy)]
pub struct Unpacking {
    /// Leading parts of names that are dropped.
    pub strip: usize,
    /// What happens to files that exist.
    pub overwrite: Overwrite,
    /// Checks without writing.
    pub dry_run: bool,
    /// What is kept besides content, times and permissions.
    pub kept: Kept,
    /// Makes the directory, and those above it.
    pub make_parents: bool,
    /// Most bytes of content: of the files, holes included; and in the archive, even of members that are left out.
    pub max_bytes: u64,
    /// Most files, directories and links.
    pub max_files: u64,
}

#[derive(Debug, Default)]
pub struct Unpacked {
    /// Regular files.
    pub files: u64,
    /// Directories, those included that are only named by what is below them.
    pub directories: u64,
    /// Symbolic and hard links.
    pub links: u64,
    /// Content of the files, holes included.
    pub bytes: u64,
    /// The first members that were left out.
    pub skipped: Vec<Skipped>,
    /// How many there are.
    pub skipped_total: u64,
}

/// How the names of members begin that hide others.
pub(super) const WHITEOUT: &[u8] = b".wh.";

/// What a file, directory or link of a root counts for besides its content and its attributes.
pub(super) const ENTRY_BYTES: u64 = 4096;

/// Takes so many bytes of the room that there is for roots, before they are written.
pub(super) type Take<'r> = dyn Fn(u64) -> Result<()> + 'r;

/// The directory that an archive is unpacked in, and the way from it to the last member.
struct Tree<'f> {
    files: &'f Root,
    options: Unpacking,
    /// What a root takes its room of.
    room: Option<&'f Take<'f>>,
    /// The directory itself; `None` in a dry run if it does not exist.
    base: Option<OwnedFd>,
    /// The last directory of the way that exists.
    current: Option<OwnedFd>,
    /// The way. The first level is the base.
    levels: Vec<Level>,
    /// Whether the base was made for this archive.
    is_new: bool,
    /// What the archive says of the base, if that is new.
    top: Attributes,
    done: Unpacked,
    /// Bytes of content of all members in the archive.
    stored: u64,
    /// The symbolic links that the archive has made.
    links: Known<()>,
    /// The directories that a dry run would have made. Of more than it remembers, it counts one each time
    /// that the way comes to it.
    made: Known<()>,
    /// The times of the directories that the way has left.
    times: Known<Time>,
    /// For the names of what was left out.
    charge: Charge,
}

/// A directory on the way.
struct Level {
    name: Vec<u8>,
    /// `None` in a dry run for a directory that does not exist.
    identity: Option<Identity>,
    /// What it gets when the way leaves it.
    finally: Attributes,
}

impl Files<'_> {
    /// Unpacks the archive that `input` has into the directory at `path`. What was unpacked before an
    /// error stays, and the error says how much that is.
    ///
    /// # Errors
    /// `BadArchive`, `TooLarge`, `Unsupported`, `Exists`, `IsDirectory`, `NotDirectory`, `NoSpace`; the
    /// directory cannot be opened; or `input` fails.
    pub fn unpack(
        &self,
        path: &FilePath,
        options: Unpacking,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Unpacked> {
        let missing = if options.make_parents && !options.dry_run {
            Missing::Make
        } else {
            Missing::Refuse
        };
        let base = match self.directory(path, missing) {
            Err(Errno::ENOENT) if options.make_parents => None,
            other => Some(other.map_err(|errno| self.unpacking_error(path, errno))?),
        };
        let (done, _) = Tree::new(self, base, options, ledger)?.unpack(input, ledger)?;
        Ok(done)
    }

    /// As [`Files::unpack`], but all or nothing: the archive is unpacked beside `path`, which then becomes
    /// exactly what is in the archive.
    ///
    /// # Errors
    /// As [`Files::unpack`]. Nothing is changed then.
    pub fn unpack_atomically(
        &self,
        path: &FilePath,
        options: Unpacking,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Unpacked> {
        let failed = |errno| self.unpacking_error(path, errno);
        let plain = path.without_trailing_slashes();
        let (target, existing) = self.target(&plain, options.make_parents)?;
        if let Some(existing) = &existing {
            if FileKind::of(existing) != FileKind::Directory {
                return Err(failed(Errno::ENOTDIR));
            }
            if options.overwrite == Overwrite::Fail {
                return Err(failed(Errno::EEXIST));
            }
        }
        let names = ledger.charge(Item::Bodies, 0)?;
        let mut staging = StagingTree::make(self, &target, names).map_err(failed)?;
        let base = staging.open().map_err(failed)?;
        let mut tree = Tree::new(self, Some(base), options, ledger)?;
        tree.is_new = true;
        let (done, top) = tree.unpack(input, ledger)?;
        staging.finish(&top, existing.as_ref()).map_err(failed)?;
        Ok(done)
    }

    /// Unpacks the root of a machine, or a layer of it, into this one. What was unpacked before an error stays. All that comes
    /// on the disk is taken of `room`; `max_bytes` are of content in the archive.
    ///
    /// # Errors
    /// As [`Files::unpack`]; `Invalid` if a file belongs to somebody whom a private root cannot have; those of `room`.
    pub fn unpack_root(
        &self,
        kept: Kept,
        max_bytes: u64,
        room: &Take<'_>,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Unpacked> {
        let options = Unpacking {
            strip: 0,
            overwrite: Overwrite::Replace,
            dry_run: false,
            kept,
            make_parents: false,
            max_bytes,
            max_files: max_bytes / ENTRY_BYTES,
        };
        let path = FilePath::new(b"/")?;
        let failed = |errno| self.unpacking_error(&path, errno);
        let open = || self.directory(&path, Missing::Refuse).map_err(failed);
        let mut tree = Tree::new(self, Some(open()?), options, ledger)?;
        tree.is_new = true;
        tree.room = Some(room);
        let (done, mut top) = tree.unpack(input, ledger)?;
        // Many archives of roots do not name the root itself. It is the server's own until then.
        let open = open()?;
        if fstat(&open).map_err(failed)?.st_mode & 0o7777 == 0o700 {
            top.mode.get_or_insert(0o755);
        }
        top.apply_to_directory(&open).map_err(failed)?;
        Ok(done)
    }

    fn unpacking_error(&self, path: &FilePath, errno: Errno) -> Error {
        self.error(format_args!("cannot unpack into {path}"), errno)
    }
}

impl<'f> Tree<'f> {
    fn new(
        files: &'f Files<'_>,
        base: Option<OwnedFd>,
        options: Unpacking,
        ledger: &Arc<Ledger>,
    ) -> Result<Self> {
        let failed = |errno| Error::system("cannot unpack", errno);
        let identity = base
            .as_ref()
            .map(Identity::of_open)
            .transpose()
            .map_err(failed)?;
        let again = |base| openat(base, ".", DIRECTORY, Mode::empty());
        let current = base.as_ref().map(again).transpose().map_err(failed)?;
        Ok(Self {
            files,
            options,
            room: None,
            base,
            current,
            levels: vec![Level {
                name: Vec::new(),
                identity,
                finally: Attributes::default(),
            }],
            is_new: false,
            top: Attributes::default(),
            done: Unpacked::default(),
            stored: 0,
            links: Known::new(MAX_KNOWN_LINKS, ledger)?,
            made: Known::new(MAX_KNOWN_MADE, ledger)?,
            times: Known::new(MAX_KNOWN_TIMES, ledger)?,
            charge: ledger.charge(Item::Bodies, 0)?,
        })
    }

    /// Unpacks everything. Returns what the archive says of the directory itself, too.
    fn unpack(
        mut self,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<(Unpacked, Attributes)> {
        let charge = ledger.charge(Item::Bodies, 0)?;
        let mut members = Members::new(input, self.is_root(), charge)?;
        while let Some(member) = members
            .next()
            .map_err(|error| self.explained(error, None))?
        {
            self.take(&member, &mut members)
                .map_err(|error| self.explained(error, Some(&member)))?;
        }
        self.enter(&[], &mut members)
            .map_err(|error| self.explained(error, None))?;
        Ok((std::mem::take(&mut self.done), self.top))
    }

    /// Adds to an error what a client needs to go on after it.
    fn explained(&self, error: Error, member: Option<&Member>) -> Error {
        let Unpacked { files, bytes, .. } = self.done;
        let error = match member {
            Some(member) => error.with("member", Detail::Text(show(&member.name))),
            None => error,
        };
        error
            .with("files", Detail::Number(files))
            .with("bytes", Detail::Number(bytes))
    }

    fn take(&mut self, member: &Member, members: &mut Members<'_>) -> Result<()> {
        self.stored = self.stored.saturating_add(members.stored());
        self.check_bytes(self.stored)?;
        let Some(parts) = parts(&member.name, self.options.strip).map_err(refused)? else {
            return Ok(());
        };
        if self.is_layer() && parts.iter().any(|part| part.starts_with(WHITEOUT)) {
            return Ok(());
        }
        fault::point("unpack");
        let attributes = self.attributes(member)?;
        let Some((_, way)) = parts.split_last() else {
            return match member.kind {
                MemberKind::Directory => self.take_base(attributes, member, members),
                _ => Err(refused("it has the name of the directory itself")),
            };
        };
        match member.kind {
            MemberKind::Other(SkipReason::Fifo) if self.is_root() => {}
            MemberKind::Other(reason) => {
                self.skip(member, reason);
                return Ok(());
            }
            _ => {}
        }
        if member.kind == MemberKind::Directory {
            return self.take_directory(&parts, attributes, member, members);
        }
        self.count()?;
        self.enter(way, members)?;
        if !self.replaces(member) && !self.has_room(&parts, member, members)? {
            self.skip(member, SkipReason::Exists);
            return Ok(());
        }
        match member.kind {
            MemberKind::Symlink => self.take_link(&parts, member, attributes),
            MemberKind::HardLink => self.take_hard_link(&parts, member, members),
            MemberKind::Other(_) => self.take_pipe(&parts, member, attributes),
            _ => self.take_file(&parts, attributes, member, members),
        }
    }

    /// The attributes that a member's file gets.
    ///
    /// # Errors
    /// `Invalid` if it belongs to somebody whom a private root cannot have.
    fn attributes(&self, member: &Member) -> Result<Attributes> {
        let owner = (self.options.kept != Kept::Files).then(|| {
            let owner = self.files.owner(member.uid, member.gid);
            if owner.is_none() && !self.files.is_whole_machine() {
                let (path, uid, gid) = (show(&member.name), member.uid, member.gid);
                let text = format!(
                    "cannot unpack {path}: it belongs to {uid}:{gid}, and ids go up to 65535 in a private root"
                );
                return Err(Error::invalid(text));
            }
            Ok(owner)
        });
        let owner = owner.transpose()?.flatten();
        Ok(Attributes {
            // Set-user-ID, set-group-ID and sticky are for roots alone.
            mode: Some(member.mode & if self.is_root() { 0o7777 } else { 0o777 }),
            modified: Some(member.modified),
            owner: owner.map(|owner| (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid))),
        })
    }

    fn check_bytes(&self, bytes: u64) -> Result<()> {
        let most = self.options.max_bytes;
        if bytes > most {
            let text = format!("the archive has more than {most} bytes of content");
            return Err(Error::new(Kind::TooLarge, text));
        }
        Ok(())
    }

    /// Takes bytes of the room of a root.
    fn take_room(&self, bytes: u64) -> Result<()> {
        self.room.map_or(Ok(()), |take| take(bytes))
    }

    fn is_root(&self) -> bool {
        matches!(self.options.kept, Kept::Root | Kept::Layer)
    }

    fn is_layer(&self) -> bool {
        self.options.kept == Kept::Layer
    }

    /// Adds one file, directory or link to the count.
    fn count(&self) -> Result<()> {
        let Unpacked {
            files,
            directories,
            links,
            ..
        } = self.done;
        let most = self.options.max_files;
        if files + directories + links >= most {
            let text = format!("the archive has more than {most} files, directories and links");
            return Err(Error::new(Kind::TooLarge, text));
        }
        self.take_room(ENTRY_BYTES)
    }

    /// Counts a directory that a dry run would make, the first time.
    fn count_made(&mut self, parts: &[&[u8]]) -> Result<()> {
        if self.made.get(parts).is_none() {
            self.count()?;
            self.done.directories += 1;
            self.made.add(parts, ());
        }
        Ok(())
    }

    fn skip(&mut self, member: &Member, reason: SkipReason) {
        self.done.skipped_total += 1;
        let bytes = self.charge.bytes() + member.name.len();
        if self.done.skipped.len() < MAX_SKIPPED_NAMES && self.charge.set(bytes).is_ok() {
            self.done.skipped.push(Skipped {
                name: member.name.clone(),
                reason,
            });
        }
    }

    /// What a member says of the directory that the archive is unpacked in. One that was there before
    /// keeps what it has.
    fn take_base(
        &mut self,
        attributes: Attributes,
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        if let (true, Some(base)) = (self.is_new, &self.base) {
            self.top = attributes;
            self.extend_directory(base, member, members)?;
        }
        Ok(())
    }

    /// Gives a file of a root its extended attributes.
    fn extend(
        &self,
        file: BorrowedFd<'_>,
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        for Attribute { name, value } in &member.attributes {
            members.give_way()?;
            self.take_room((name.len() + value.len()) as u64)?;
            set_attribute(file, name, value).map_err(|errno| match errno {
                Errno::ENOSPC | Errno::EDQUOT => self.member_error(member, errno),
                _ => {
                    let cause = cause(errno);
                    refused(&format!("its attribute {name} cannot be set: {cause}"))
                }
            })?;
        }
        Ok(())
    }

    fn extend_directory(
        &self,
        directory: &OwnedFd,
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        if member.attributes.is_empty() {
            return Ok(());
        }
        // A descriptor that only leads to a file takes none.
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let opened = openat(directory, ".", flags, Mode::empty());
        let opened = opened.map_err(|errno| self.member_error(member, errno))?;
        self.extend(opened.as_fd(), member, members)
    }

    fn take_directory(
        &mut self,
        parts: &[&[u8]],
        attributes: Attributes,
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        if self.links.get(parts).is_some() && !self.take_away_link(parts, member, members)? {
            self.skip(member, SkipReason::Exists);
            return Ok(());
        }
        let (before, is_kept) = (
            self.done.directories,
            self.options.overwrite == Overwrite::Keep,
        );
        self.enter(parts, members)?;
        let is_new = self.done.directories > before;
        if !is_new {
            self.count()?;
            self.done.directories += 1;
        }
        if let Some(level) = self.levels.last_mut()
            && (is_new || !is_kept)
        {
            level.finally = attributes;
        }
        match self.directory_to_write() {
            Some(directory) => self.extend_directory(directory, member, members),
            None => Ok(()),
        }
    }

    /// Removes a link that the archive has made, in place of which it has a directory. False if the link stays.
    fn take_away_link(
        &mut self,
        parts: &[&[u8]],
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<bool> {
        let Some((name, way)) = parts.split_last() else {
            return Ok(true);
        };
        self.enter(way, members)?;
        if !self.has_room(parts, member, members)? {
            return Ok(false);
        }
        if let Some(directory) = self.directory_to_write() {
            let failed = |errno| self.member_error(member, errno);
            let _turn = Turn::at(directory, name, show(&member.name))?;
            let existing = status_of(directory, name).map_err(failed)?;
            if existing.is_some_and(|existing| FileKind::of(&existing) == FileKind::Link) {
                unlinkat(directory, *name, UnlinkatFlags::NoRemoveDir).map_err(failed)?;
            }
        }
        self.links.remove(parts);
        Ok(true)
    }

    /// Whether a member is a file that is given its name in any case. What has that name is looked at only
    /// then: mostly nothing has it.
    fn replaces(&self, member: &Member) -> bool {
        let replaces = self.options.overwrite == Overwrite::Replace && !self.options.dry_run;
        replaces && member.kind == MemberKind::File
    }

    fn take_file(
        &mut self,
        parts: &[&[u8]],
        attributes: Attributes,
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        let bytes = self.done.bytes.saturating_add(member.size);
        self.check_bytes(bytes)?;
        self.take_room(member.size)?;
        if let (Some(directory), Some(name)) = (self.directory_to_write(), parts.last()) {
            let failed = |errno| self.member_error(member, errno);
            let mut staged = StagedFile::make(directory).map_err(failed)?;
            let file = &staged.file;
            let mut end = 0;
            let keeps_holes = self.is_root();
            members.read_content(|offset, bytes| {
                // A copy of a root has its holes as zeros, and there may be more of them than the disk has room for.
                if keeps_holes && bytes.iter().all(|byte| *byte == 0) {
                    return Ok(());
                }
                end = offset + bytes.len() as u64;
                file.write_all_at(bytes, offset).map_err(|error| {
                    let name = show(&member.name);
                    Error::io(format_args!("cannot write {name}"), &error)
                })
            })?;
            if end < member.size {
                let size = i64::try_from(member.size).map_err(|_| failed(Errno::EFBIG))?;
                ftruncate(file, size).map_err(failed)?;
            }
            attributes.apply(file).map_err(failed)?;
            // After the owner, with whom the kernel takes them away.
            self.extend(file.as_fd(), member, members)?;
            match staged.take_new_name(name) {
                Err(Errno::EEXIST) if self.replaces(member) => {
                    let _turn = Turn::at(directory, name, show(&member.name))?;
                    self.has_room(parts, member, members)?;
                    staged.take_name(name)
                }
                other => other,
            }
            .map_err(failed)?;
        } else {
            members.read_content(|_, _| Ok(()))?;
        }
        self.links.remove(parts);
        self.done.files += 1;
        self.done.bytes = bytes;
        Ok(())
    }

    fn take_link(
        &mut self,
        parts: &[&[u8]],
        member: &Member,
        attributes: Attributes,
    ) -> Result<()> {
        let target = member.link.as_slice();
        if target.is_empty() || target.len() > MAX_LINK_BYTES || target.contains(&0) {
            return Err(refused("it is a link to a name that no file can have"));
        }
        if let (Some(directory), Some(name)) = (self.directory_to_write(), parts.last()) {
            let make = |name: &[u8]| {
                symlinkat(target, directory, name)?;
                attributes.apply_to_link(directory, name)
            };
            self.place(directory, name, member, make)?;
        }
        self.links.add(parts, ());
        self.done.links += 1;
        Ok(())
    }

    /// Makes a named pipe.
    fn take_pipe(
        &mut self,
        parts: &[&[u8]],
        member: &Member,
        attributes: Attributes,
    ) -> Result<()> {
        if let (Some(directory), Some(name)) = (self.directory_to_write(), parts.last()) {
            let mode = Mode::from_bits_truncate(attributes.mode.unwrap_or_default());
            let make = |name: &[u8]| {
                mkfifoat(directory, name, Mode::empty())?;
                attributes.apply_to_link(directory, name)?;
                fchmodat(directory, name, mode, FchmodatFlags::NoFollowSymlink)
            };
            self.place(directory, name, member, make)?;
        }
        self.links.remove(parts);
        self.done.files += 1;
        Ok(())
    }

    /// Makes a hard link to a file of the tree.
    fn take_hard_link(
        &mut self,
        at: &[&[u8]],
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<()> {
        let Some(name) = at.last() else {
            return Ok(());
        };
        let failed = |errno| self.member_error(member, errno);
        let found = parts(&member.link, self.options.strip).map_err(refused)?;
        let found = found.filter(|parts| !parts.is_empty());
        let found = found.ok_or_else(|| refused("it is a hard link to no file"))?;
        let (Some((target, way)), Some(base)) = (found.split_last(), &self.base) else {
            self.done.links += 1;
            return Ok(());
        };
        if let Some(directory) = self.directory_to_write() {
            let outside = |errno| match errno {
                Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV => {
                    refused("it is a hard link to what is no file of the tree")
                }
                errno => failed(errno),
            };
            let mut above = openat(base, ".", DIRECTORY, Mode::empty()).map_err(failed)?;
            for part in way {
                members.give_way()?;
                let flags = DIRECTORY | OFlag::O_NOFOLLOW;
                above = self
                    .files
                    .resolve_in(&above, part, flags)
                    .map_err(outside)?;
            }
            let status = status_of(&above, target).and_then(|found| found.ok_or(Errno::ENOENT));
            let status = status.map_err(outside)?;
            let kind = FileKind::of(&status);
            let is_pipe = kind == FileKind::Pipe && self.is_root();
            if !is_pipe && !matches!(kind, FileKind::Regular | FileKind::Link) {
                return Err(refused("it is a hard link to what is no file of the tree"));
            }
            let existing = status_of(directory, name).map_err(failed)?;
            let is_same = |existing: FileStat| Identity::of(&existing) == Identity::of(&status);
            // Renaming one name of a file over another does nothing.
            if !existing.is_some_and(is_same) {
                let make = |name: &[u8]| linkat(&above, *target, directory, name, AtFlags::empty());
                self.place(directory, name, member, make)?;
            }
        }
        self.links.remove(at);
        self.done.links += 1;
        Ok(())
    }

    /// Makes a link at a name, in place of a file that may be there.
    fn place(
        &self,
        directory: &OwnedFd,
        name: &[u8],
        member: &Member,
        make: impl Fn(&[u8]) -> nix::Result<()>,
    ) -> Result<()> {
        let failed = |errno| self.member_error(member, errno);
        match make(name) {
            Err(Errno::EEXIST) if self.options.overwrite == Overwrite::Replace => {}
            other => return other.map_err(failed),
        }
        let _turn = Turn::at(directory, name, show(&member.name))?;
        replace_by(directory, name, make).map_err(failed)
    }

    /// Checks what is at a member's place. False if that stays.
    fn has_room(
        &self,
        parts: &[&[u8]],
        member: &Member,
        members: &mut Members<'_>,
    ) -> Result<bool> {
        let existing = match (self.directory(), parts.last()) {
            (Some(directory), Some(name)) => status_of(directory, name),
            _ => Ok(None),
        };
        let existing = existing.map_err(|errno| self.member_error(member, errno))?;
        let kind = existing.as_ref().map(FileKind::of);
        // In a dry run only the archive's own names tell of its links.
        let is_own_link = self.options.dry_run && self.links.get(parts).is_some();
        let kind = kind.or(is_own_link.then_some(FileKind::Link));
        match (kind, self.options.overwrite) {
            (Some(FileKind::Directory), _) if self.is_layer() => {
                if let (Some(directory), Some(name)) = (self.directory(), parts.last()) {
                    remove(directory, name, members)?;
                }
                Ok(true)
            }
            (Some(FileKind::Directory), _) => Err(self.member_error(member, Errno::EISDIR)),
            (None, _) | (_, Overwrite::Replace) => Ok(true),
            (Some(_), Overwrite::Fail) => Err(self.member_error(member, Errno::EEXIST)),
            (Some(_), Overwrite::Keep) => Ok(false),
        }
    }

    fn member_error(&self, member: &Member, errno: Errno) -> Error {
        let name = show(&member.name);
        self.files
            .error(format_args!("cannot unpack {name}"), errno)
    }

    /// Goes to a directory of the tree, and makes what is missing on the way. Gives way at each level: two members may be
    /// hundreds of levels apart.
    fn enter(&mut self, parts: &[&[u8]], members: &mut Members<'_>) -> Result<()> {
        let known = self.levels[1..]
            .iter()
            .zip(parts)
            .take_while(|(level, part)| level.name == **part)
            .count();
        let failed = |errno| {
            let name = if parts.is_empty() {
                &[&b"."[..]]
            } else {
                parts
            };
            let name = show(&name.join(&b'/'));
            Error::system(format_args!("cannot unpack {name}"), errno)
        };
        while self.levels.len() > known + 1 {
            members.give_way()?;
            self.leave().map_err(failed)?;
        }
        for depth in known..parts.len() {
            members.give_way()?;
            self.descend(&parts[..=depth])?;
        }
        Ok(())
    }

    /// Goes one level down, to the last of `parts`.
    fn descend(&mut self, parts: &[&[u8]]) -> Result<()> {
        let shown = || show(&parts.join(&b'/'));
        let failed = |errno| Error::system(format_args!("cannot unpack into {}", shown()), errno);
        let Some((name, _)) = parts.split_last() else {
            return Ok(());
        };
        let mut level = Level {
            name: name.to_vec(),
            identity: None,
            finally: Attributes::default(),
        };
        let is_own_link = self.links.get(parts).is_some();
        let through_link = "its name goes through a link that the archive has made";
        let Some(above) = self.directory() else {
            if is_own_link {
                return Err(refused(through_link));
            }
            self.count_made(parts)?;
            self.levels.push(level);
            return Ok(());
        };
        let flags = DIRECTORY | OFlag::O_NOFOLLOW;
        let mut opened = self.files.resolve_in(above, name, flags);
        if matches!(opened, Err(Errno::EACCES)) && self.open_up(above, name, &mut level) {
            opened = self.files.resolve_in(above, name, flags);
        }
        if matches!(opened, Err(Errno::ENOTDIR | Errno::ELOOP)) && self.is_layer() && !is_own_link {
            unlinkat(above, *name, UnlinkatFlags::NoRemoveDir).map_err(failed)?;
            opened = Err(Errno::ENOENT);
        }
        if let Err(Errno::ENOENT) = opened {
            if self.options.dry_run {
                if is_own_link {
                    return Err(refused(through_link));
                }
                self.count_made(parts)?;
                self.levels.push(level);
                return Ok(());
            }
            self.count()?;
            match mkdirat(above, *name, Mode::from_bits_truncate(0o777)) {
                Ok(()) => self.done.directories += 1,
                // Another process made it.
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(failed(errno)),
            }
            let above = self.current.as_ref().ok_or_else(|| failed(Errno::ENOENT))?;
            opened = self.files.resolve_in(above, name, flags);
        }
        let above = self.current.as_ref().ok_or_else(|| failed(Errno::ENOENT))?;
        let directory = opened.map_err(|errno| match status_of(above, name) {
            Ok(Some(found)) if FileKind::of(&found) == FileKind::Link => {
                if is_own_link {
                    return refused(through_link);
                }
                let text = format!(
                    "cannot unpack into {}: it is a symbolic link, and links are not followed here",
                    shown()
                );
                Error::new(Kind::Forbidden, text)
            }
            _ => self
                .files
                .error(format_args!("cannot unpack into {}", shown()), errno),
        })?;
        let status = fstat(&directory).map_err(failed)?;
        level.identity = Some(Identity::of(&status));
        level.finally.modified = self.times.get(parts);
        if status.st_mode & 0o300 != 0o300 {
            self.open_up(above, name, &mut level);
        }
        self.current = Some(directory);
        self.levels.push(level);
        Ok(())
    }

    /// Lets the owner write in a directory that they have protected, until the way leaves it. Such a
    /// directory may be one that the archive has made and comes back to.
    fn open_up(&self, above: &OwnedFd, name: &[u8], level: &mut Level) -> bool {
        let Ok(Some(status)) = status_of(above, name) else {
            return false;
        };
        let is_own = FileKind::of(&status) == FileKind::Directory && self.files.owns(&status);
        if !is_own || self.options.dry_run {
            return false;
        }
        let (mode, nofollow) = (status.st_mode & 0o7777, FchmodatFlags::NoFollowSymlink);
        level.finally.mode = Some(mode);
        fchmodat(
            above,
            name,
            Mode::from_bits_truncate(mode | 0o700),
            nofollow,
        )
        .is_ok()
    }

    /// Goes one level up.
    fn leave(&mut self) -> nix::Result<()> {
        let Some(left) = self.levels.pop() else {
            return Ok(());
        };
        let (Some(_), Some(directory)) = (left.identity, &self.current) else {
            return Ok(());
        };
        if let Some(modified) = left.finally.modified {
            let way = self
                .levels
                .iter()
                .skip(1)
                .map(|level| level.name.as_slice());
            let parts: Vec<_> = way.chain([left.name.as_slice()]).collect();
            self.times.add(&parts, modified);
        }
        // Before the mode, which may forbid it.
        let above = openat(directory, "..", DIRECTORY, Mode::empty())?;
        if !self.options.dry_run {
            left.finally.apply_to_directory(directory)?;
        }
        let expected = self.levels.last().and_then(|level| level.identity);
        if Some(Identity::of_open(&above)?) != expected {
            // It was moved meanwhile: the directory above is not part of the tree.
            return Err(Errno::EBUSY);
        }
        self.current = Some(above);
        Ok(())
    }

    /// The directory that the way has led to; `None` in a dry run if it does not exist.
    fn directory(&self) -> Option<&OwnedFd> {
        let exists = self.levels.last()?.identity.is_some();
        self.current.as_ref().filter(|_| exists)
    }

    /// The same, if something is to be written.
    fn directory_to_write(&self) -> Option<&OwnedFd> {
        self.directory().filter(|_| !self.options.dry_run)
    }
}

impl Drop for Tree<'_> {
    fn drop(&mut self) {
        // After an error: directories that were opened up must not stay like that.
        while self.levels.len() > 1 && self.leave().is_ok() {}
    }
}

/// The status of a file, not of what it links to; `None` if there is none.
fn status_of(directory: &OwnedFd, name: &[u8]) -> nix::Result<Option<FileStat>> {
    match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Err(Errno::ENOENT) => Ok(None),
        status => status.map(Some),
    }
}

fn refused(why: &str) -> Error {
    Error::new(Kind::BadArchive, format!("cannot unpack a member: {why}"))
}

/// Removes a file, or a directory with all that is in it. Gives way before each name.
pub(super) fn remove(directory: &OwnedFd, name: &[u8], members: &mut Members<'_>) -> Result<()> {
    let mut passed = Ok(());
    remove_home_while(directory, name, &mut || {
        passed = members.give_way();
        passed.is_ok()
    })?;
    passed
}
