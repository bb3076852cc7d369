//! Changing text files: all or nothing, and only what was read.

use std::fs::File;
use std::io::Read;

use crate::client::{Interrupt, Stopped};
use crate::error::{Detail, Error, Kind, Result};
use crate::fault;
use crate::files::hash::{Digest, Hasher};
use crate::files::name::FilePath;
use crate::files::text::{
    Edit, EditError, MAX_PLACES, Pace, Splice, diff_bytes, is_binary, plan, spliced, told, unified,
};
use crate::files::{FileVersion, Turn};
use crate::limits::ledger::{Charge, Item};
use crate::workspace::lease::Workspace;

/// Largest file that is edited: it is in memory twice.
const MAX_EDITED_BYTES: u64 = 64 << 20;

/// Longest diff in an answer.
const MAX_DIFF_BYTES: usize = 256 * 1024;

/// What a place that is replaced takes, and a line that is compared for the diff.
const PLACE_BYTES: usize = 64;
const LINE_BYTES: usize = 64;

/// Most characters that an error quotes of a file.
const MAX_QUOTED: usize = 2000;

/// A change of one file.
pub struct EditRequest {
    pub path: FilePath,
    /// What to change. At least one.
    pub edits: Vec<Edit>,
    /// What the file must be before.
    pub expected_sha256: Option<Digest>,
    /// Whether to tell what would happen, and change nothing.
    pub is_dry_run: bool,
}

pub struct Edited {
    /// How many places.
    pub replaced: usize,
    /// Bytes of the file.
    pub size: u64,
    /// The digest of the file.
    pub sha256: Digest,
    pub diff: Vec<u8>,
    /// Whether the diff ends before the last change, because it is too long.
    pub diff_is_cut: bool,
}

impl Workspace {
    /// Changes a file in one step: readers see the old or the new content.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, `NotRegular`; `TooLarge`; `Binary`; `NoMatch` or `Ambiguous` with the
    /// number of the edit; `Changed` if the file is not what was expected, or was changed by somebody else
    /// meanwhile; `NoThreads`; or it was interrupted. The file is then as it was.
    pub fn edit_file(
        &self,
        request: &EditRequest,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Edited, Stopped> {
        let turn = self.turn(std::slice::from_ref(&request.path), interrupt)?;
        // Stays so only if there is no thread.
        let mut edited = Err(Stopped::Due);
        self.work(interrupt, &mut |interrupt| {
            edited = self.edit_in_turn(request, &turn, &mut Pace::new(interrupt));
            Ok(())
        })?;
        edited
    }

    fn edit_in_turn(
        &self,
        request: &EditRequest,
        turn: &Turn,
        pace: &mut Pace<'_>,
    ) -> std::result::Result<Edited, Stopped> {
        let path = &request.path;
        let files = self.files()?;
        let (old, version, charge) = match files.open(path, false) {
            Ok(opened) => self.read_text(path, opened.file, false)?,
            Err(error)
                if error.kind() == Kind::NotFound
                    && request.edits.iter().all(Edit::is_for_empty) =>
            {
                let charge = self.ledger.charge(Item::Bodies, 0);
                (Vec::new(), None, charge.map_err(Error::from)?)
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(expected) = &request.expected_sha256
            && sha256(&old, pace)? != *expected
        {
            return Err(changed(path, "its sha256 is not if_sha256; read it again").into());
        }
        let places = PLACE_BYTES * MAX_PLACES.min(old.len());
        let places = self.ledger.charge(Item::Bodies, places);
        let _places = places.map_err(Error::from)?;
        fault::point("edit");
        let splices = plan(&old, &request.edits, pace).map_err(|unfit| refusal(path, unfit))?;
        let new = apply(&old, &splices, charge)?;
        let (name, texts) = (path.to_string(), [&old[..], &new.0]);
        let room = diff_bytes(texts.map(<[u8]>::len), MAX_DIFF_BYTES);
        let room = self.ledger.charge(Item::Bodies, room);
        let _room = room.map_err(Error::from)?;
        let (diff, diff_is_cut) = unified(&name, texts, &splices, MAX_DIFF_BYTES, pace)?;
        let edited = Edited {
            replaced: splices.len(),
            size: new.0.len() as u64,
            sha256: sha256(&new.0, pace)?,
            diff,
            diff_is_cut,
        };
        drop(old);
        if !request.is_dry_run {
            let mut upload = files.upload(path, None, version.is_none())?;
            pace.each_step(&new.0, &mut |mut data| {
                while !data.is_empty() {
                    data = &data[upload.write(data)?..];
                }
                Ok(())
            })?;
            upload.commit_over(turn, version.as_ref())?;
            self.check_open()?;
        }
        Ok(edited)
    }

    /// Reads a file to change it: a text, unless it may be anything.
    pub(super) fn read_text(
        &self,
        path: &FilePath,
        file: File,
        may_be_binary: bool,
    ) -> Result<(Vec<u8>, Option<FileVersion>, Charge)> {
        let failed = |error| Error::io(format_args!("cannot read {path}"), &error);
        let version = FileVersion::of(&file).map_err(|errno| failed(errno.into()))?;
        let too_large = || {
            let why = format!("cannot edit {path}: it is larger than {MAX_EDITED_BYTES} bytes");
            Error::new(Kind::TooLarge, why)
        };
        if version.size > MAX_EDITED_BYTES {
            return Err(too_large());
        }
        // It may grow while it is read.
        let size = usize::try_from(version.size).unwrap_or(usize::MAX) + 64 * 1024;
        let charge = self.ledger.charge(Item::Bodies, size)?;
        let mut text = Vec::with_capacity(size);
        file.take(size as u64)
            .read_to_end(&mut text)
            .map_err(failed)?;
        if text.len() as u64 > MAX_EDITED_BYTES || text.len() == size {
            return Err(too_large());
        }
        if !may_be_binary && is_binary(&text) {
            let why = format!("cannot edit {path}: it has a NUL character, so it is no text");
            return Err(Error::new(Kind::Binary, why));
        }
        Ok((text, Some(version), charge))
    }
}

/// The text after the changes, with room for it and for the old one.
fn apply(old: &[u8], splices: &[Splice], mut charge: Charge) -> Result<(Vec<u8>, Charge)> {
    let added: usize = splices.iter().map(|splice| splice.text.len()).sum();
    charge.set(charge.bytes() + old.len() + added + 2 * MAX_DIFF_BYTES)?;
    let new = spliced(old, splices);
    let count = |text| memchr::memchr_iter(b'\n', text).count();
    let lines = (count(old) + count(&new)).min(2 * MAX_DIFF_BYTES);
    charge.set(charge.bytes() + LINE_BYTES * lines)?;
    Ok((new, charge))
}

/// The digest of some bytes.
fn sha256(bytes: &[u8], pace: &mut Pace<'_>) -> std::result::Result<Digest, Stopped> {
    let mut hasher = Hasher::default();
    pace.each_step(bytes, &mut |step| {
        hasher.feed(step);
        Ok(())
    })?;
    Ok(hasher.finish())
}

/// The beginning of a text that an error quotes.
pub(super) fn quoted(text: &[u8]) -> Detail {
    let text = String::from_utf8_lossy(told(text));
    let text = text.trim_end_matches(['\r', '\n']).chars();
    Detail::Text(text.take(MAX_QUOTED).collect())
}

fn changed(path: &FilePath, why: &str) -> Error {
    Error::new(Kind::Changed, format_args!("cannot edit {path}: {why}"))
}

fn refusal(path: &FilePath, unfit: EditError) -> Stopped {
    let number = |number: usize| Detail::Number(number as u64);
    let error = match unfit {
        EditError::Stopped(stopped) => return stopped,
        EditError::NoMatch {
            edit,
            nearest: None,
        } => {
            let why = format!("cannot edit {path}: the text of edits[{edit}] is not in it");
            Error::new(Kind::NoMatch, why).with("edit", number(edit))
        }
        EditError::NoMatch {
            edit,
            nearest: Some((line, text)),
        } => {
            let why = format!(
                "cannot edit {path}: the text of edits[{edit}] is not in it; line {line} differs only in white space"
            );
            Error::new(Kind::NoMatch, why)
                .with("edit", number(edit))
                .with("line", Detail::Number(line))
                .with("text", quoted(&text))
        }
        EditError::Ambiguous { edit, found, lines } => {
            let why = format!(
                "cannot edit {path}: the text of edits[{edit}] is in it {found} times, not as often as count says; \
                 give more of the text around it, or count"
            );
            Error::new(Kind::Ambiguous, why)
                .with("edit", number(edit))
                .with("found", Detail::Number(found))
                .with("lines", Detail::Numbers(lines))
        }
        EditError::TooMany { edit } => {
            let why = format!(
                "cannot edit {path}: with edits[{edit}] more than {MAX_PLACES} places would be replaced"
            );
            Error::new(Kind::TooLarge, why).with("edit", number(edit))
        }
        EditError::NoLines { edit, lines } => {
            let why = format!(
                "cannot edit {path}: edits[{edit}] names lines beyond the last one, which is {lines}"
            );
            Error::new(Kind::NoMatch, why)
                .with("edit", number(edit))
                .with("line", Detail::Number(lines))
        }
        EditError::Overlap {
            edits: [one, other],
            line,
        } => Error::invalid(format_args!(
            "cannot edit {path}: edits[{one}] and edits[{other}] overlap in line {line}; join them"
        )),
    };
    error.into()
}
