//! Applying patches: all files or none.
//!
//! Everything is read, applied and staged beside its place before the first file is replaced. What follows are
//! renames, which seldom fail; if one does, those before it are undone. Only a server that is killed between two of
//! them leaves some files changed and others not.
//!
//! A request holds few descriptors, however many files it names. The first ones stay open from their staging to their
//! renames, without a name; the others are closed, have hidden names beside their places, and are found again by their
//! paths. A program that moves their directories away meanwhile has the patch fail, and keeps the hidden files.

use std::collections::HashSet;

use super::edit::quoted;
use crate::client::{Interrupt, Stopped};
use crate::error::{Detail, Error, Kind, Result};
use crate::files::name::{FilePath, show};
use crate::files::text::{FilePatch, Pace, Unapplied, Unread, apply, parse, room};
use crate::files::{Aside, ClosedUpload, FileVersion, Files, Patient, Turn, Upload};
use crate::limits::ledger::{Charge, Item};
use crate::workspace::lease::Workspace;
use crate::workspace::upload::unless_stopped;

/// Bytes of the work that each file of a patch makes besides its text.
const FILE_BYTES: usize = 64 * 1024;

/// How many of the files of a patch are open while they wait for the others; and how many of those that are removed.
const MAX_OPEN: usize = 2;

/// What a patch did to a file.
pub struct Patched {
    /// The file, as a request names it. Of a deleted file the name that it had.
    pub path: String,
    /// What happened to it.
    pub change: FileChange,
    /// The name before, of a file that was renamed or copied.
    pub from: Option<String>,
    /// By how many lines each hunk was moved.
    pub moved: Vec<i64>,
}

/// What happens to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileChange {
    /// It is made.
    Created,
    /// Its content or mode is changed.
    Modified,
    /// It is removed.
    Deleted,
    /// It is given another name.
    Renamed,
    /// It is made from another file.
    Copied,
}

/// One file of a patch, applied in memory.
struct Planned {
    patched: Patched,
    /// What is written, and where.
    write: Option<Write>,
    /// What is removed.
    remove: Option<Old>,
}

struct Write {
    path: FilePath,
    content: Vec<u8>,
    mode: Option<u32>,
    /// What is replaced.
    replaced: Option<Old>,
}

/// A file as it was.
struct Old {
    path: FilePath,
    content: Vec<u8>,
    version: FileVersion,
    mode: u32,
}

/// A new content that waits until all are there.
enum Staged<'a> {
    Open(Upload<'a>),
    /// `None` if it cannot wait beside its place: it is written when its turn comes.
    Closed(Option<ClosedUpload<'a>>),
}

/// A step that was done.
enum Done<'a> {
    Written(&'a Write),
    Removed(Aside<'a>),
}

impl Workspace {
    /// Applies a patch to the files beneath a directory.
    ///
    /// # Errors
    /// `Invalid` with the line of the patch that cannot be read; `PatchFailed` with `file`, `hunk`, `line` and
    /// what stands there; `Changed`; `NoThreads`; as for writes; or it was interrupted. No file is changed then.
    pub fn patch_files(
        &self,
        directory: &FilePath,
        patch: &[u8],
        strip: usize,
        is_dry_run: bool,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Vec<Patched>, Stopped> {
        let lines = memchr::memchr_iter(b'\n', patch).count();
        let room = self
            .ledger
            .charge(Item::Bodies, 4 * patch.len() + 32 * lines);
        let mut charge = room.map_err(Error::from)?;
        let mut paced = self.paced(interrupt);
        let patches = parse(patch, strip, &mut Pace::new(&mut paced));
        drop(paced);
        let patches = patches.map_err(|unread| match unread {
            Unread::Stopped(stopped) => stopped,
            Unread::Unreadable(error) => {
                let text = format!("line {} of the patch: {}", error.line, error.why);
                let error = Error::invalid(text).with("line", Detail::Number(error.line));
                error.into()
            }
        })?;
        let mut paths = Vec::new();
        for patch in &patches {
            for name in [&patch.old, &patch.new].into_iter().flatten() {
                paths.push(below(directory, name)?);
            }
        }
        let turn = self.turn(&paths, interrupt)?;
        let mut planned = Vec::new();
        self.work(interrupt, &mut |interrupt| {
            let files = self.files()?;
            let mut pace = Pace::new(interrupt);
            for patch in &patches {
                pace.spend(FILE_BYTES)?;
                planned.push(self.plan_file(&files, directory, patch, &mut charge, &mut pace)?);
            }
            check_targets(&files, &planned)?;
            if !is_dry_run {
                commit(&files, &planned, &turn, &mut pace)?;
                self.check_open()?;
            }
            Ok(())
        })?;
        Ok(planned.into_iter().map(|planned| planned.patched).collect())
    }

    fn plan_file(
        &self,
        files: &Files<'_>,
        directory: &FilePath,
        patch: &FilePatch,
        charge: &mut Charge,
        pace: &mut Pace<'_>,
    ) -> std::result::Result<Planned, Stopped> {
        let resolve = |name: &Option<Vec<u8>>| {
            name.as_deref()
                .map(|name| below(directory, name))
                .transpose()
        };
        let (mut old_path, new_path) = (resolve(&patch.old)?, resolve(&patch.new)?);
        let differ = old_path.is_some() && new_path.is_some() && old_path != new_path;
        // Two names without a rename: the file is the one that is there, the new name first.
        if differ && !patch.is_moved {
            let is_there = |path: &Option<FilePath>| {
                path.as_ref().is_some_and(|path| files.stat(path).is_ok())
            };
            if is_there(&new_path) || !is_there(&old_path) {
                old_path.clone_from(&new_path);
            }
        }
        let target = if patch.is_moved {
            new_path
        } else {
            new_path.and(old_path.clone().or(resolve(&patch.new)?))
        };
        let old = old_path
            .map(|path| self.read_old(files, path, patch.hunks.is_empty(), charge))
            .transpose()?;
        let shown = target
            .as_ref()
            .or(old.as_ref().map(|old| &old.path))
            .map_or_else(String::new, FilePath::to_string);
        let text = old.as_ref().map_or(&[][..], |old| &old.content);
        let charged = charge.set(charge.bytes() + room(text, &patch.hunks));
        charged.map_err(Error::from)?;
        let (content, moved) = apply(text, &patch.hunks, pace).map_err(|unapplied| {
            let misfit = match unapplied {
                Unapplied::Misfit(misfit) => misfit,
                Unapplied::Stopped(stopped) => return stopped,
            };
            let why = if misfit.is_ambiguous {
                "fits at more than one place"
            } else {
                "does not fit"
            };
            let (hunk, line) = (misfit.hunk, misfit.line);
            failed(&shown, &format!("hunk {hunk} {why}; line {line} differs"))
                .with("hunk", Detail::Number(hunk as u64))
                .with("line", Detail::Number(line))
                .with("text", quoted(&misfit.text.unwrap_or_default()))
                .into()
        })?;
        let kind = match (&old, &target) {
            (None, _) => FileChange::Created,
            (Some(_), None) if !content.is_empty() => {
                let end = quoted(&content);
                let error = failed(
                    &shown,
                    "the patch deletes the file, and there is more in it",
                );
                return Err(error.with("text", end).into());
            }
            (Some(_), None) => FileChange::Deleted,
            (Some(_), Some(_)) if patch.is_copy => FileChange::Copied,
            (Some(old), Some(target)) if old.path != *target => FileChange::Renamed,
            _ => FileChange::Modified,
        };
        let is_moved = matches!(kind, FileChange::Renamed | FileChange::Copied);
        let patched = Patched {
            path: shown,
            change: kind,
            from: old
                .as_ref()
                .filter(|_| is_moved)
                .map(|old| old.path.to_string()),
            moved,
        };
        let mode = patch.mode.map(|mode| match &old {
            // A patch knows only whether a file is executable.
            Some(old) if mode & 0o111 == 0 => old.mode & !0o111,
            Some(old) => old.mode | (old.mode & 0o444) >> 2,
            None => mode,
        });
        let mode = mode.or_else(|| old.as_ref().filter(|_| is_moved).map(|old| old.mode));
        let (replaced, remove) = match kind {
            FileChange::Modified => (old, None),
            FileChange::Created | FileChange::Copied => (None, None),
            FileChange::Deleted | FileChange::Renamed => (None, old),
        };
        let write = target.map(|path| Write {
            path,
            content,
            mode,
            replaced,
        });
        Ok(Planned {
            patched,
            write,
            remove,
        })
    }

    fn read_old(
        &self,
        files: &Files<'_>,
        path: FilePath,
        may_be_binary: bool,
        charge: &mut Charge,
    ) -> Result<Old> {
        let opened = files
            .open(&path, false)
            .map_err(|error| match error.kind() {
                Kind::NotFound => failed(&path.to_string(), "there is no such file"),
                _ => error,
            })?;
        let mode = opened.mode;
        let (content, version, own) = self.read_text(&path, opened.file, may_be_binary)?;
        charge.set(charge.bytes() + own.bytes())?;
        let version = version.ok_or_else(|| failed(&path.to_string(), "there is no such file"))?;
        Ok(Old {
            path,
            content,
            version,
            mode,
        })
    }
}

/// The path of a name in a patch. A name leads into the directory, and not out of it.
fn below(directory: &FilePath, name: &[u8]) -> Result<FilePath> {
    if name.starts_with(b"/") || name.split(|byte| *byte == b'/').any(|part| part == b"..") {
        return Err(Error::invalid(format_args!(
            "the patch names {}, which is not beneath the directory",
            show(name)
        )));
    }
    directory.child(name)
}

fn failed(file: &str, why: &str) -> Error {
    let text = format!("cannot patch {file}: {why}; no file is changed");
    Error::new(Kind::PatchFailed, text).with("file", Detail::Text(file.to_owned()))
}

/// Checks that no file is written twice, and that what is to be made is not there, or is removed.
fn check_targets(files: &Files<'_>, planned: &[Planned]) -> Result<()> {
    let removed: HashSet<_> = planned
        .iter()
        .filter_map(|file| Some(files.key(&file.remove.as_ref()?.path)))
        .collect();
    let mut written = HashSet::new();
    for write in planned.iter().filter_map(|file| file.write.as_ref()) {
        let key = files.key(&write.path);
        let is_in_the_way =
            write.replaced.is_none() && !removed.contains(&key) && files.stat(&write.path).is_ok();
        if is_in_the_way {
            return Err(failed(
                &write.path.to_string(),
                "the patch makes this file, and it is there already",
            ));
        }
        if !written.insert(key) {
            return Err(Error::invalid(format_args!(
                "the patch changes {} twice",
                write.path
            )));
        }
    }
    Ok(())
}

/// Writes and removes all of it, or nothing.
fn commit(
    files: &Files<'_>,
    planned: &[Planned],
    turn: &Turn,
    pace: &mut Pace<'_>,
) -> std::result::Result<(), Stopped> {
    let writes: Vec<_> = planned
        .iter()
        .filter_map(|file| file.write.as_ref())
        .collect();
    let missing: Vec<_> = writes
        .iter()
        .map(|write| {
            let is_missing = |path: &FilePath| {
                matches!(files.stat(path), Err(error) if error.kind() == Kind::NotFound)
            };
            write.path.ancestors().take_while(is_missing).count()
        })
        .collect();
    let mut done = Vec::new();
    let result = run(files, planned, &writes, turn, pace, &mut done);
    if result.is_err() {
        for step in done.into_iter().rev() {
            // The first error is the one to report.
            let _ = undo(files, step);
        }
        for (write, missing) in writes.iter().zip(missing) {
            for directory in write.path.ancestors().take(missing) {
                let _ = files.remove_directory(&directory);
            }
        }
    }
    result
}

fn run<'a>(
    files: &'a Files<'_>,
    planned: &'a [Planned],
    writes: &[&'a Write],
    turn: &Turn,
    pace: &mut Pace<'_>,
    done: &mut Vec<Done<'a>>,
) -> std::result::Result<(), Stopped> {
    let mut staged = Vec::new();
    for write in writes {
        pace.spend(FILE_BYTES + write.content.len())?;
        let upload = stage(files, &write.path, &write.content, write.mode)?;
        staged.push(if staged.len() < MAX_OPEN {
            Staged::Open(upload)
        } else {
            Staged::Closed(upload.close(files, &write.path)?)
        });
    }
    // Removed first, so that a file may take the name of another one.
    for old in planned.iter().filter_map(|file| file.remove.as_ref()) {
        let path = &old.path;
        let now = FileVersion::of(files.open(path, false)?.file);
        if now.ok().as_ref() != Some(&old.version) {
            let text = format!("cannot patch {path}: another program changed it meanwhile");
            return Err(Error::new(Kind::Changed, text).into());
        }
        let mut aside = files.set_aside(path)?;
        if done.len() >= MAX_OPEN {
            aside.close();
        }
        done.push(Done::Removed(aside));
    }
    for (write, staged) in writes.iter().zip(staged) {
        let upload = match staged {
            Staged::Open(upload) => upload,
            Staged::Closed(Some(closed)) => closed.reopen()?,
            Staged::Closed(None) => stage(files, &write.path, &write.content, write.mode)?,
        };
        let version = write.replaced.as_ref().map(|old| &old.version);
        upload.commit_over(turn, version)?;
        done.push(Done::Written(write));
    }
    Ok(())
}

fn undo(files: &Files<'_>, step: Done<'_>) -> Result<()> {
    match step {
        Done::Removed(aside) => {
            aside.put_back();
            Ok(())
        }
        Done::Written(Write {
            replaced: None,
            path,
            ..
        }) => files
            .remove(path, false, None, &mut Patient)
            .map_err(unless_stopped),
        Done::Written(Write {
            replaced: Some(old),
            ..
        }) => {
            let upload = stage(files, &old.path, &old.content, Some(old.mode))?;
            upload.commit().map(drop)
        }
    }
}

fn stage<'a>(
    files: &'a Files<'_>,
    path: &FilePath,
    content: &[u8],
    mode: Option<u32>,
) -> Result<Upload<'a>> {
    let mut upload = files.upload(path, mode, true)?;
    let mut data = content;
    while !data.is_empty() {
        data = &data[upload.write(data)?..];
    }
    Ok(upload)
}
