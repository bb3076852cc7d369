//! Unified diffs of any number of files, as `diff -u` and `git diff` write them: read, and applied to a text.
//!
//! Text may stand before the first file, as in a mail. After the head of a file, a line that belongs to no hunk is an
//! error, except for those that programs write between files: a change is never left out in silence.
//!
//! There is no fuzz: all of a hunk's old lines must be there. A hunk whose old lines are not where it says
//! is applied elsewhere only if they are there exactly once.

use std::fmt::Display;

use memchr::memmem::Finder;

use super::pace::Pace;
use super::told;
use crate::client::Stopped;
use crate::error::capped;

/// Most files of a patch.
pub const MAX_PATCHED_FILES: usize = 1000;

/// Most hunks of a file.
const MAX_HUNKS: usize = 10_000;

/// What a line takes besides its bytes: so many bytes take as long.
const LINE_WORK: usize = 128;

/// Longest name of a file: the kernel takes none that is longer (`path_resolution(7)`).
const MAX_NAME: usize = 4095;

/// What a patch does to one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch {
    /// The name before, without the parts that were to be stripped; `None` if the file is new.
    pub old: Option<Vec<u8>>,
    /// The name after; `None` if the file is deleted.
    pub new: Option<Vec<u8>>,
    /// Whether the old name stays where the new one differs.
    pub is_copy: bool,
    /// Whether the patch says itself that the file is renamed or copied. Other patches may have two names of
    /// one file.
    pub is_moved: bool,
    /// The permission bits after.
    pub mode: Option<u32>,
    /// The changes, in the order of the patch.
    pub hunks: Vec<Hunk>,
}

/// A change of some lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hunk {
    /// The number of the first old line, from 1; without old lines the number of the line before.
    pub line: u64,
    /// The old lines, and after them the new ones: a patch may have a million of hunks, and each allocation takes a lock
    /// of the whole server.
    text: Box<[u8]>,
    /// Bytes of the old ones.
    old_bytes: usize,
}

impl Hunk {
    fn old_lines(&self) -> &[u8] {
        &self.text[..self.old_bytes]
    }

    fn new_lines(&self) -> &[u8] {
        &self.text[self.old_bytes..]
    }

    /// How many bytes longer it makes a text.
    #[cfg(test)]
    pub(super) fn grown(&self) -> isize {
        self.new_lines().len().cast_signed() - self.old_lines().len().cast_signed()
    }
}

/// Why a patch cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The line of the patch, from 1.
    pub line: u64,
    /// What is wrong.
    pub why: String,
}

/// Why a patch is not read.
#[derive(Debug)]
pub enum Unread {
    /// The first line that cannot be read.
    Unreadable(Unreadable),
    Stopped(Stopped),
}

impl From<Unreadable> for Unread {
    fn from(unreadable: Unreadable) -> Self {
        Self::Unreadable(unreadable)
    }
}

impl From<Stopped> for Unread {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

/// Why a hunk cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// The hunk, from 1.
    pub hunk: usize,
    /// The line of the text, from 1.
    pub line: u64,
    /// How what is there begins; `None` beyond the end.
    pub text: Option<Vec<u8>>,
    /// Whether the old lines are elsewhere, and more than once.
    pub is_ambiguous: bool,
}

/// Why hunks are not applied.
#[derive(Debug)]
pub enum Unapplied {
    /// The first hunk that does not fit.
    Misfit(Misfit),
    Stopped(Stopped),
}

impl From<Stopped> for Unapplied {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

/// Reads a patch, and strips this many parts from the names.
///
/// # Errors
/// The first line that cannot be read, or has a change that is not supported; or it was interrupted.
pub fn parse(patch: &[u8], strip: usize, pace: &mut Pace<'_>) -> Result<Vec<FilePatch>, Unread> {
    let mut lines = Vec::new();
    for line in patch.split_inclusive(|byte| *byte == b'\n') {
        pace.spend(line.len())?;
        lines.push(line);
    }
    let mut parser = Parser {
        lines,
        at: 0,
        strip,
        place: Region::Text,
        old: Vec::new(),
        new: Vec::new(),
    };
    let mut files = Vec::new();
    while let Some(file) = parser.file(pace)? {
        if files.len() == MAX_PATCHED_FILES {
            return Err(parser.error("the patch has more than 1000 files").into());
        }
        files.push(file);
    }
    if files.is_empty() {
        let why = "it has no change of a file".to_owned();
        return Err(Unreadable { line: 1, why }.into());
    }
    Ok(files)
}

struct Parser<'a> {
    lines: Vec<&'a [u8]>,
    at: usize,
    strip: usize,
    place: Region,
    /// The lines of the hunk that is read.
    old: Vec<u8>,
    new: Vec<u8>,
}

/// Where a line stands that is neither part of a file's head nor of a hunk.
#[derive(Clone, Copy)]
enum Region {
    /// Before the first file of a diff: everything is allowed but hunks.
    Text,
    /// After the head of a file or a hunk.
    Diff,
    /// After the signature with which `git format-patch` ends a mail.
    Signature,
}

/// How lines begin that programs write between the files of a diff.
const BETWEEN_FILES: [&[u8]; 5] = [
    b"diff -",
    b"Index: ",
    b"Only in ",
    b"base-commit: ",
    b"prerequisite-patch-id: ",
];

/// What the header of a file says.
#[derive(Default)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a line that git writes or not"
)]
struct Header {
    /// Whether it began with `diff --git`.
    is_git: bool,
    old: Option<Vec<u8>>,
    new: Option<Vec<u8>>,
    is_new: bool,
    is_deleted: bool,
    is_moved: bool,
    is_copy: bool,
    mode: Option<u32>,
}

impl<'a> Parser<'a> {
    fn error(&self, why: impl Display) -> Unreadable {
        Unreadable {
            line: self.at as u64 + 1,
            why: capped(&why),
        }
    }

    /// The current line, without its end.
    fn line(&self) -> Option<&'a [u8]> {
        let line = *self.lines.get(self.at)?;
        Some(line.strip_suffix(b"\n").unwrap_or(line))
    }

    /// The next file; `None` at the end.
    fn file(&mut self, pace: &mut Pace<'_>) -> Result<Option<FilePatch>, Unread> {
        let mut header = Header::default();
        // Up to the first hunk, or to the next file if there is none.
        while let Some(line) = self.line() {
            pace.spend(LINE_WORK + line.len())?;
            if let Some(names) = line.strip_prefix(b"diff --git ") {
                if header.is_git {
                    break;
                }
                header.is_git = true;
                self.place = Region::Diff;
                if let Some(name) = git_name(names) {
                    header.old = Some(self.stripped(&name, self.strip)?);
                    header.new.clone_from(&header.old);
                }
            } else if header.is_git && self.git_header(line, &mut header)? {
            } else if let Some(old) = line.strip_prefix(b"--- ")
                && let Some(new) = self
                    .lines
                    .get(self.at + 1)
                    .and_then(|line| line.strip_prefix(b"+++ "))
            {
                let new = new.strip_suffix(b"\n").unwrap_or(new);
                let (mut old_name, mut new_name) = (header.old.clone(), header.new.clone());
                let is_new = self.name(old, &mut old_name)?;
                let is_deleted = self.name(new, &mut new_name)?;
                // After a header of git without hunks another file may begin that git did not write.
                let is_own_old = old_name == header.old && is_new <= header.is_new;
                let is_own_new = new_name == header.new && is_deleted <= header.is_deleted;
                if header.old.is_some() && !is_own_old && !is_own_new {
                    break;
                }
                (header.old, header.new) = (old_name, new_name);
                header.is_new |= is_new;
                header.is_deleted |= is_deleted;
                self.place = Region::Diff;
                self.at += 2;
                if !self.line().is_some_and(|line| line.starts_with(b"@@")) {
                    return Err(self.error("a hunk must follow the names of a file").into());
                }
                break;
            } else if line.starts_with(b"@@") {
                return Err(self
                    .error("the names of the file are missing before this hunk")
                    .into());
            } else if line.starts_with(b"Binary files ") {
                return Err(self
                    .error("it has a change of a binary file; write that file instead")
                    .into());
            } else {
                self.other_line(line)?;
            }
            self.at += 1;
        }
        if !header.is_git && header.old.is_none() && header.new.is_none() {
            return Ok(None);
        }
        let mut hunks = Vec::new();
        while self.line().is_some_and(|line| line.starts_with(b"@@")) {
            if hunks.len() == MAX_HUNKS {
                return Err(self.error("the file has more than 10000 hunks").into());
            }
            hunks.push(self.hunk(pace)?);
        }
        if header.is_new && header.is_deleted || header.old.is_none() && header.new.is_none() {
            return Err(self.error("the file has no name").into());
        }
        Ok(Some(FilePatch {
            old: header.old.filter(|_| !header.is_new),
            new: header.new.filter(|_| !header.is_deleted),
            is_copy: header.is_copy,
            is_moved: header.is_moved,
            mode: header.mode,
            hunks,
        }))
    }

    /// Passes a line that is neither part of a file's head nor of a hunk, if it may stand here.
    fn other_line(&mut self, line: &[u8]) -> Result<(), Unreadable> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let begins_commit = [&b"commit "[..], b"From "].iter().any(|begin| {
            let hash = line.strip_prefix(*begin).and_then(|rest| rest.get(..40));
            hash.is_some_and(|hash| hash.iter().all(u8::is_ascii_hexdigit))
        });
        let is_rule = !line.is_empty() && line.iter().all(|byte| *byte == b'=');
        match self.place {
            Region::Text => {}
            _ if begins_commit || line == b"# HG changeset patch" => self.place = Region::Text,
            _ if line.is_empty() || matches!(line, b"--" | b"-- ") => {
                if !line.is_empty() {
                    self.place = Region::Signature;
                }
            }
            Region::Diff if is_rule => {}
            Region::Diff if BETWEEN_FILES.iter().any(|begin| line.starts_with(begin)) => {}
            Region::Signature if !matches!(line[0], b'+' | b'-' | b'\\') => {}
            Region::Diff | Region::Signature => {
                return Err(self.error(
                    "this line belongs to no hunk: do the ranges in the head before it fit the lines after it?",
                ));
            }
        }
        Ok(())
    }

    /// Reads a line of git's header; false if it is none.
    fn git_header(&self, line: &[u8], header: &mut Header) -> Result<bool, Unreadable> {
        let value = |prefix: &str| line.strip_prefix(prefix.as_bytes());
        let mode = |value: &[u8]| {
            let text = std::str::from_utf8(value).ok();
            let mode = text.and_then(|text| u32::from_str_radix(text, 8).ok());
            match mode {
                Some(mode) if mode & 0o170_000 == 0o100_000 => Ok(mode & 0o777),
                Some(0o120_000) => {
                    Err(self.error("it changes a symbolic link, which is not supported"))
                }
                Some(0o160_000) => {
                    Err(self.error("it changes a submodule, which is not supported"))
                }
                _ => Err(self.error("the mode cannot be read")),
            }
        };
        if let Some(value) = value("old mode ") {
            mode(value)?;
        } else if let Some(value) = value("new mode ") {
            header.mode = Some(mode(value)?);
        } else if let Some(value) = value("new file mode ") {
            header.is_new = true;
            header.mode = Some(mode(value)?);
        } else if let Some(value) = value("deleted file mode ") {
            mode(value)?;
            header.is_deleted = true;
        } else if let Some((name, is_copy)) = value("rename from ")
            .map(|name| (name, false))
            .or(value("copy from ").map(|name| (name, true)))
        {
            header.is_moved = true;
            header.is_copy = is_copy;
            // These names have no prefix.
            header.old = Some(self.stripped(&unquoted(name).0, self.strip.saturating_sub(1))?);
        } else if let Some(name) = value("rename to ").or(value("copy to ")) {
            header.new = Some(self.stripped(&unquoted(name).0, self.strip.saturating_sub(1))?);
        } else if let Some(value) = value("index ") {
            // The mode of a file whose mode does not change.
            if let Some(kept) = value.splitn(2, |byte| *byte == b' ').nth(1) {
                mode(kept)?;
            }
        } else if line == b"GIT binary patch" {
            return Err(self.error("it has a change of a binary file; write that file instead"));
        } else {
            return Ok(value("similarity index ")
                .or(value("dissimilarity index "))
                .is_some());
        }
        Ok(true)
    }

    /// Reads the name in a `---` or `+++` line. Returns whether it says that there is no file.
    fn name(&self, text: &[u8], into: &mut Option<Vec<u8>>) -> Result<bool, Unreadable> {
        let (name, stamp) = unquoted(text);
        // diff -N writes so of a file that is not there.
        let is_epoch =
            stamp.starts_with(b"1970-01-01 00:00:00") || stamp.starts_with(b"1969-12-31 ");
        if name == b"/dev/null" {
            return Ok(true);
        }
        *into = Some(self.stripped(&name, self.strip)?);
        Ok(is_epoch)
    }

    fn stripped(&self, name: &[u8], strip: usize) -> Result<Vec<u8>, Unreadable> {
        let mut rest = name;
        for _ in 0..strip {
            let slash = rest.iter().position(|byte| *byte == b'/');
            let slash = slash.ok_or_else(|| {
                let name = String::from_utf8_lossy(told(name));
                self.error(format_args!(
                    "the name {name:?} has fewer parts than strip={strip} takes off"
                ))
            })?;
            rest = &rest[slash + 1..];
        }
        if rest.is_empty() || rest.len() > MAX_NAME || rest.contains(&0) {
            return Err(self.error("the file has no name that it could have"));
        }
        Ok(rest.to_vec())
    }

    fn hunk(&mut self, pace: &mut Pace<'_>) -> Result<Hunk, Unread> {
        let head = self.line().unwrap_or_default();
        let ranges = ranges(head)
            .ok_or_else(|| self.error("the head of a hunk must be like @@ -1,3 +1,4 @@"))?;
        let [(line, mut old_left), (_, mut new_left)] = ranges;
        pace.spend(LINE_WORK + head.len())?;
        self.at += 1;
        self.old.clear();
        self.new.clear();
        while old_left > 0 || new_left > 0 {
            let line = *self
                .lines
                .get(self.at)
                .ok_or_else(|| self.error("a hunk is cut off"))?;
            // Some programs remove the blank of an empty line.
            let (mark, mut content) = match line {
                b"\n" => (b' ', line),
                [mark, content @ ..] => (*mark, content),
                [] => return Err(self.error("a hunk is cut off").into()),
            };
            pace.spend(LINE_WORK + line.len())?;
            self.at += 1;
            if self.line().is_some_and(|next| next.starts_with(b"\\")) {
                self.at += 1;
                content = content.strip_suffix(b"\n").unwrap_or(content);
            } else if !content.ends_with(b"\n") {
                return Err(self.error("a hunk is cut off").into());
            }
            let (is_old, is_new) = match mark {
                b' ' => (true, true),
                b'-' => (true, false),
                b'+' => (false, true),
                _ => {
                    self.at -= 1;
                    return Err(self
                        .error("a line of a hunk begins with neither a blank, - nor +")
                        .into());
                }
            };
            for (is_in, left) in [(is_old, &mut old_left), (is_new, &mut new_left)] {
                *left = left
                    .checked_sub(u64::from(is_in))
                    .ok_or_else(|| self.error("a hunk has more lines than its head says"))?;
            }
            for (is_in, text) in [(is_old, &mut self.old), (is_new, &mut self.new)] {
                if is_in {
                    text.extend_from_slice(content);
                }
            }
        }
        Ok(Hunk {
            line,
            text: [&self.old[..], &self.new].concat().into(),
            old_bytes: self.old.len(),
        })
    }
}

/// The two ranges in the head of a hunk: first line and number of lines.
fn ranges(head: &[u8]) -> Option<[(u64, u64); 2]> {
    let rest = head.strip_prefix(b"@@ ")?;
    let text = &rest[..memchr::memmem::find(rest, b" @@")?];
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    let mut range = |mark| {
        let word = words.next()?.strip_prefix(mark)?;
        let (first, count) = word.split_once(',').unwrap_or((word, "1"));
        let number = |text: &str| {
            let is_plain = text.len() < 12 && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| is_plain)
        };
        Some((number(first)?, number(count)?))
    };
    let ranges = [range('-')?, range('+')?];
    words.next().is_none().then_some(ranges)
}

/// The name in `a/NAME b/NAME`, if both are the same, with its first prefix.
fn git_name(text: &[u8]) -> Option<Vec<u8>> {
    if text.starts_with(b"\"") {
        return Some(unquoted(text).0);
    }
    let middle = text.len() / 2;
    let (old, new) = (text.get(..middle)?, text.get(middle + 1..)?);
    let inner = |name: &[u8]| {
        name.iter()
            .position(|byte| *byte == b'/')
            .map(|slash| name[slash..].to_vec())
    };
    (text.get(middle) == Some(&b' ') && inner(old) == inner(new)).then(|| old.to_vec())
}

/// A name, perhaps in quotes as C has them, and what follows it after a tab.
fn unquoted(text: &[u8]) -> (Vec<u8>, &[u8]) {
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    let Some(quoted) = text.strip_prefix(b"\"") else {
        let end = text
            .iter()
            .position(|byte| *byte == b'\t')
            .unwrap_or(text.len());
        return (
            text[..end].to_vec(),
            text.get(end + 1..).unwrap_or_default(),
        );
    };
    let (mut name, mut at) = (Vec::new(), 0);
    while let Some(byte) = quoted.get(at).copied().filter(|byte| *byte != b'"') {
        at += 1;
        if byte != b'\\' {
            name.push(byte);
            continue;
        }
        let escaped = quoted.get(at).copied().unwrap_or(b'\\');
        let octal = quoted
            .get(at..at + 3)
            .filter(|digits| digits.iter().all(|digit| (b'0'..b'8').contains(digit)));
        if let Some(digits) = octal {
            name.push(digits.iter().fold(0_u8, |value, digit| {
                value.wrapping_mul(8).wrapping_add(digit - b'0')
            }));
            at += 3;
            continue;
        }
        at += 1;
        name.push(match escaped {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'a' => 7,
            b'b' => 8,
            b'v' => 11,
            b'f' => 12,
            other => other,
        });
    }
    let rest = quoted.get(at + 1..).unwrap_or_default();
    (name, rest.strip_prefix(b"\t").unwrap_or(rest))
}

/// The memory that [`apply`] takes for the new text.
pub fn room(text: &[u8], hunks: &[Hunk]) -> usize {
    let new: usize = hunks.iter().map(|hunk| hunk.new_lines().len()).sum();
    text.len() + new
}

/// Applies hunks to a text. Returns the new text, and by how many lines each hunk was moved.
///
/// # Errors
/// The first hunk that does not fit; or it was interrupted.
pub fn apply(
    text: &[u8],
    hunks: &[Hunk],
    pace: &mut Pace<'_>,
) -> Result<(Vec<u8>, Vec<i64>), Unapplied> {
    let (mut new, mut moves) = (Vec::with_capacity(room(text, hunks)), Vec::new());
    // The end of what was copied, and a line with the place where it begins.
    let mut done = 0;
    let (mut line, mut at) = (1, 0);
    // How many lines end before a place.
    let (mut ended, mut counted) = (0, 0);
    for (index, hunk) in hunks.iter().enumerate() {
        // A hunk without old lines is after its line.
        let expected = if hunk.old_lines().is_empty() {
            hunk.line + 1
        } else {
            hunk.line.max(1)
        };
        while line < expected && at < text.len() {
            let next = memchr::memchr(b'\n', &text[at..]).map_or(text.len(), |end| at + end + 1);
            pace.spend(LINE_WORK + next - at)?;
            at = next;
            line += 1;
        }
        pace.spend(LINE_WORK + hunk.old_lines().len())?;
        // Without a line end it can only be the end of the text, and so can what replaces it.
        let is_last = [hunk.old_lines(), hunk.new_lines()]
            .iter()
            .any(|part| !part.is_empty() && !part.ends_with(b"\n"));
        let is_there = |start: usize| {
            let is_end = start + hunk.old_lines().len() == text.len();
            let is_line = start == 0 || text[start - 1] == b'\n';
            let is_place = start >= done && is_line && (is_end || !is_last);
            is_place && text[start..].starts_with(hunk.old_lines())
        };
        let misfit = |is_ambiguous| {
            let (line, text) = difference(&text[at..], hunk.old_lines(), line);
            Unapplied::Misfit(Misfit {
                hunk: index + 1,
                line,
                text,
                is_ambiguous,
            })
        };
        let start = if line == expected && is_there(at) {
            at
        } else if hunk.old_lines().is_empty() {
            return Err(misfit(false));
        } else if is_last {
            let last = text.len().checked_sub(hunk.old_lines().len());
            let last = last.filter(|start| is_there(*start));
            last.ok_or_else(|| misfit(false))?
        } else {
            // With the line end before it, a place is always the beginning of a line.
            let whole_lines = [b"\n", hunk.old_lines()].concat();
            let finder = Finder::new(&whole_lines);
            let next = |from: usize, pace: &mut Pace<'_>| {
                let found = pace.find(text, &finder, from)?;
                Ok::<_, Stopped>(found.map(|before| before + 1))
            };
            let first = match Some(done).filter(|start| is_there(*start)) {
                None => next(done, pace)?,
                first => first,
            };
            let first = first.ok_or_else(|| misfit(false))?;
            // Places may overlap.
            if next(first, pace)?.is_some() {
                return Err(misfit(true));
            }
            first
        };
        ended += memchr::memchr_iter(b'\n', &text[counted..start]).count() as u64;
        counted = start;
        moves.push(if start == at {
            0
        } else {
            (ended + 1).cast_signed() - expected.cast_signed()
        });
        new.extend_from_slice(&text[done..start]);
        new.extend_from_slice(hunk.new_lines());
        done = start + hunk.old_lines().len();
    }
    new.extend_from_slice(&text[done..]);
    Ok((new, moves))
}

/// The first line of a text that differs from the old lines of a hunk.
fn difference(text: &[u8], old: &[u8], first: u64) -> (u64, Option<Vec<u8>>) {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n');
    let mut wanted = old.split_inclusive(|byte| *byte == b'\n');
    let mut line = first;
    loop {
        match (lines.next(), wanted.next()) {
            (Some(found), Some(wanted)) if found == wanted => line += 1,
            (found, _) => return (line, found.map(|found| told(found).to_vec())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pace::tests::Steps;
    use super::*;
    use crate::files::condition::Patient;

    fn parse(patch: &[u8], strip: usize) -> Result<Vec<FilePatch>, Unreadable> {
        let parsed = super::parse(patch, strip, &mut Pace::new(&mut Patient));
        parsed.map_err(|unread| match unread {
            Unread::Unreadable(unreadable) => unreadable,
            Unread::Stopped(stopped) => panic!("{stopped:?}"),
        })
    }

    fn one(patch: &str) -> FilePatch {
        parse(patch.as_bytes(), 1).unwrap().remove(0)
    }

    fn applied(text: &str, patch: &str) -> Result<(String, Vec<i64>), Misfit> {
        let applied = apply(
            text.as_bytes(),
            &one(patch).hunks,
            &mut Pace::new(&mut Patient),
        );
        match applied {
            Ok((new, moves)) => Ok((String::from_utf8(new).unwrap(), moves)),
            Err(Unapplied::Misfit(misfit)) => Err(misfit),
            Err(Unapplied::Stopped(stopped)) => panic!("{stopped:?}"),
        }
    }

    const PATCH: &str = "--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@ heading\n b\n-c\n+C\n d\n";

    #[test]
    fn hunks_are_applied_where_they_say_or_where_they_fit_once() {
        let text = |text: &str, moves: &[i64]| Ok((text.to_owned(), moves.to_vec()));
        assert_eq!(applied("a\nb\nc\nd\n", PATCH), text("a\nb\nC\nd\n", &[0]));
        assert_eq!(
            applied("x\ny\na\nb\nc\nd\n", PATCH),
            text("x\ny\na\nb\nC\nd\n", &[2])
        );
        assert_eq!(applied("b\nc\nd\n", PATCH), text("b\nC\nd\n", &[-1]));
        // Where it says counts, even if it fits elsewhere too.
        assert_eq!(
            applied("a\nb\nc\nd\nb\nc\nd\n", PATCH),
            text("a\nb\nC\nd\nb\nc\nd\n", &[0])
        );
        let misfit = |line, text: &str, is_ambiguous| {
            Err(Misfit {
                hunk: 1,
                line,
                text: Some(text.into()),
                is_ambiguous,
            })
        };
        assert_eq!(applied("b\nc\nd\nb\nc\nd\n", PATCH), misfit(2, "c\n", true));
        assert_eq!(applied("a\nb\nx\nd\n", PATCH), misfit(3, "x\n", false));
        assert_eq!(
            applied("a\nb\n", PATCH),
            Err(Misfit {
                hunk: 1,
                line: 3,
                text: None,
                is_ambiguous: false
            })
        );
        assert_eq!(applied("xb\nc\nd\n", PATCH), misfit(2, "c\n", false));
        let insert = "--- a/f\n+++ b/f\n@@ -1,0 +2 @@\n+new\n";
        assert_eq!(applied("a\nb\n", insert), text("a\nnew\nb\n", &[0]));
        let ends = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+b\n";
        assert_eq!(applied("a\nb", ends), text("a\nb\n", &[0]));
        assert!(applied("a\nb\n", ends).is_err());
        let stripped = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n";
        assert_eq!(applied("a\n\nb\n", stripped), text("a\n\nc\n", &[0]));
    }

    #[test]
    fn a_missing_last_line_end_fits_only_at_the_end() {
        let patch = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-x\n+y\n\\ No newline at end of file\n";
        assert_eq!(applied("a\nx\n", patch).unwrap().0, "a\ny");
        assert!(applied("a\nx\nmore\n", patch).is_err());
        let patch = "--- a/f\n+++ b/f\n@@ -1,0 +2 @@\n+new\n";
        assert_eq!(applied("a\n", patch).unwrap().0, "a\nnew\n");
        assert!(applied("a", patch).is_err());
        let patch = "--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n+a\n+new\n";
        assert_eq!(applied("a", patch).unwrap().0, "a\nnew\n");
        assert!(applied("a\n", patch).is_err());
    }

    #[test]
    fn hunks_that_were_moved_are_found_and_counted_one_after_the_other() {
        let text = |old: &str| -> String {
            let lines = (0..3000).map(|number| match number % 100 {
                50 => format!("{old} {number}\n"),
                _ => format!("{number}\n"),
            });
            lines.collect()
        };
        let hunks = (0..30).map(|index| {
            let number = index * 100 + 50;
            format!(
                "@@ -{} +1 @@\n-old {number}\n+new {number}\n",
                number + 1 - 7 * (index % 2)
            )
        });
        let patch = format!("--- a/f\n+++ b/f\n{}", hunks.collect::<String>());
        let moves = (0..30).map(|index| 7 * (index % 2)).collect();
        assert_eq!(applied(&text("old"), &patch), Ok((text("new"), moves)));
    }

    #[test]
    fn a_hunk_for_the_end_takes_no_time_where_its_lines_repeat() {
        let lines = 200_000;
        let text = format!("{}b\n", "a\n".repeat(2 * lines));
        let patch = format!(
            "--- a/f\n+++ b/f\n@@ -9,{lines} +9 @@\n{}+x\n\\ No newline at end of file\n",
            "-a\n".repeat(lines)
        );
        let started = std::time::Instant::now();
        assert!(!applied(&text, &patch).unwrap_err().is_ambiguous);
        assert!(started.elapsed() < std::time::Duration::from_secs(20));
    }

    #[test]
    fn a_patch_stops_when_it_is_interrupted() {
        // Each hunk could be anywhere, and the whole text is looked through.
        let text = "QZ".repeat(4 << 20) + "\n";
        let hunks = "@@ -9 +9 @@\n-QZQZ\n+x\n".repeat(100);
        let patch = one(&format!("--- a/f\n+++ b/f\n{hunks}"));
        let mut steps = Steps(3);
        let applied = apply(text.as_bytes(), &patch.hunks, &mut Pace::new(&mut steps));
        assert!(matches!(
            applied,
            Err(Unapplied::Stopped(Stopped::Disconnected))
        ));
    }

    /// Each of its hunks takes memory of its own.
    #[test]
    fn a_patch_of_many_hunks_stops_when_it_is_interrupted_while_it_is_read() {
        let hunks = "@@ -1 +1 @@\n-\n+x\n".repeat(9000);
        let patch = format!("--- a/f\n+++ b/f\n{hunks}").repeat(4);
        let mut steps = Steps(3);
        let read = super::parse(patch.as_bytes(), 1, &mut Pace::new(&mut steps));
        assert!(matches!(read, Err(Unread::Stopped(Stopped::Disconnected))));
        assert_eq!(parse(patch.as_bytes(), 1).unwrap().len(), 4);
    }

    #[test]
    fn as_much_of_a_long_line_is_told_as_is_needed() {
        let text = "x".repeat(1 << 20);
        let patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-y\n+z\n";
        let misfit = applied(&text, patch).unwrap_err();
        assert_eq!(misfit.text, Some(text[..super::super::MAX_TOLD].into()));
    }

    #[test]
    fn headers_of_git_and_of_diff_are_understood() {
        let name = |text: &str| Some(text.as_bytes().to_vec());
        let new = one(
            "diff --git a/n b/n\nnew file mode 100755\nindex 000..123\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n",
        );
        assert_eq!((new.old, new.new, new.mode), (None, name("n"), Some(0o755)));
        let empty = one("diff --git a/d/e b/d/e\nnew file mode 100644\nindex 0..0\n");
        assert_eq!(
            (empty.old, empty.new, empty.hunks.len()),
            (None, name("d/e"), 0)
        );
        let gone = one(
            "diff --git a/n b/n\ndeleted file mode 100644\n--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
        );
        assert_eq!((gone.old, gone.new), (name("n"), None));
        let moved =
            one("diff --git a/x y b/z\nsimilarity index 100%\nrename from x y\nrename to z\n");
        assert_eq!(
            (moved.old, moved.new, moved.is_moved, moved.is_copy),
            (name("x y"), name("z"), true, false)
        );
        let copied = one("diff --git a/x b/z\ncopy from x\ncopy to z\n");
        assert!(copied.is_copy);
        let mode = one("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n");
        assert_eq!(
            (mode.old, mode.new, mode.mode),
            (name("x"), name("x"), Some(0o755))
        );
        let quoted =
            one("--- \"a/t\\tb\\303\\251\"\n+++ \"b/t\\tb\\303\\251\"\n@@ -1 +1 @@\n-x\n+y\n");
        assert_eq!(quoted.new, name("t\tb\u{e9}"));
        let stamped = one(
            "diff -u a/x b/x\n--- a/x y\t2026-01-01 00:00:00.5 +0000\n+++ b/x y\t2026-01-01 00:00:00.5 +0000\n@@ -1 +1 @@\n-x\n+y\n",
        );
        assert_eq!(stamped.old, name("x y"));
        let absent = one(
            "--- a/x\t1970-01-01 00:00:00.000000000 +0000\n+++ b/x\t2026-01-01 00:00:00.5 +0000\n@@ -0,0 +1 @@\n+y\n",
        );
        assert_eq!((absent.old, absent.new), (None, name("x")));
        let files = parse(
            [
                PATCH,
                "diff --git a/m b/m\nold mode 100644\nnew mode 100755\n",
                PATCH,
            ]
            .concat()
            .as_bytes(),
            1,
        )
        .unwrap();
        assert_eq!(files.len(), 3);
        let both = "diff --git a/x b/z\nrename from x\nrename to z\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+y\n";
        let files = parse(both.as_bytes(), 1).unwrap();
        let names: Vec<_> = files.into_iter().map(|file| (file.old, file.new)).collect();
        assert_eq!(names, [(name("x"), name("z")), (None, name("n"))]);
        assert_eq!(parse(PATCH.as_bytes(), 0).unwrap()[0].old, name("a/f"));
    }

    #[test]
    fn what_is_no_patch_is_refused_with_its_line() {
        for (patch, line) in [
            ("", 1),
            ("hello\n", 1),
            ("--- a/f\n+++ b/f\n", 3),
            ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n", 5),
            ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y", 6),
            ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n*x\n", 4),
            ("--- a/f\n+++ b/f\n@@ -1,x +1 @@\n-x\n", 3),
            ("--- f\n+++ f\n@@ -1 +1 @@\n-x\n+y\n", 1),
            ("@@ -1 +1 @@\n-x\n+y\n", 1),
            (
                "diff --git a/b b/b\nindex 1..2\nGIT binary patch\nliteral 1\n",
                3,
            ),
            (
                "diff --git a/b b/b\nindex 1..2 100644\nBinary files a/b and b/b differ\n",
                3,
            ),
            ("diff --git a/l b/l\nnew file mode 120000\n", 2),
            (&format!("--- a/f\n+++ b/{}\n", "f/".repeat(2048)), 1),
            (&format!("--- {}\n+++ b/f\n", "f".repeat(1 << 20)), 1),
        ] {
            let error = parse(patch.as_bytes(), 1).unwrap_err();
            assert_eq!(error.line, line, "{patch:?}: {}", error.why);
            assert!(error.why.len() < 10_000);
        }
    }

    #[test]
    fn no_hunk_is_left_out_in_silence() {
        const HEAD: &str = "--- a/f\n+++ b/f\n";
        const GOOD: &str = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n";
        const BODY: &str = " l1\n-l2\n+L2\n l3\n";
        for head in [
            "@@ ... @@",
            "@@ @@",
            "@@",
            "@@ def f():",
            "@@ \u{2013}1,3 +1,3 @@",
            "@@ -1,3 \u{2212}1,3 @@",
            "@@ -1,3 @@",
            "@@ -1,3 +1,3",
            "@@ -1,3,+1,3 @@",
            "@@ -1,3 +1,3 +1,3 @@",
            "@@ - +1,3 @@",
            "@@-1,3 +1,3@@",
            "@@@ -1,3 -1,3 +1,3 @@@",
        ] {
            let hunk = format!("{head}\n{BODY}");
            let new = "--- /dev/null\n+++ b/new\n";
            for before in [
                HEAD,
                GOOD,
                "diff --git a/f b/f\nold mode 100644\nnew mode 100755\n",
                new,
            ] {
                for before in [before.to_owned(), format!("{GOOD}{before}")] {
                    let error = parse(format!("{before}{hunk}").as_bytes(), 1).unwrap_err();
                    let line = before.matches('\n').count() as u64 + 1;
                    assert_eq!(error.line, line, "{before}{hunk}: {}", error.why);
                }
            }
            let error = parse(format!("A change.\n{hunk}{GOOD}").as_bytes(), 1).unwrap_err();
            assert_eq!(error.line, 2, "{head}: {}", error.why);
        }
        for (rest, line) in [
            // The head counts too few lines.
            (" l2\n", 6),
            ("+l2\n", 6),
            ("\n+l2\n", 7),
            ("\\ No newline at end of file\n\\ again\n", 7),
            ("hello\n", 6),
            ("--- a/g\n", 6),
            ("+++ b/g\n", 6),
            ("```\n", 6),
            ("diff --git a/g b/g\nhello\n", 7),
            ("diff --git a/g b/g\n-x\n", 7),
            ("-- \n+l2\n", 7),
            ("-- \n2.39.5\n@@ -3 +3 @@\n-x\n", 8),
            ("Index: f\n+l2\n", 7),
            ("From here on\n+l2\n", 6),
        ] {
            let error = parse(format!("{GOOD}{rest}").as_bytes(), 1).unwrap_err();
            assert_eq!(error.line, line, "{rest:?}: {}", error.why);
        }
    }

    #[test]
    fn what_programs_write_around_files_is_passed() {
        const GOOD: &str = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n";
        let hash = "0123456789abcdef0123456789abcdef01234567";
        for between in [
            "\n".to_owned(),
            "\r\n".to_owned(),
            "diff -ru a/f b/f\n".to_owned(),
            "Only in b: g\ndiff -ru a/f b/f\n".to_owned(),
            format!("Index: f\n{}\n", "=".repeat(67)),
            format!(
                "\ncommit {hash}\nAuthor: A <a@example.org>\n\n    A change\n---\n f | 2 +-\n\n"
            ),
            format!("\nbase-commit: {hash}\n-- \n2.39.5\n\n"),
            format!("-- \n2.39.5\n\nFrom {hash} Mon Sep 17 00:00:00 2001\nSubject: b\n\n+1\n---\n"),
            "# HG changeset patch\n# User A\n\ndiff -r 0123 -r 4567 f\n".to_owned(),
        ] {
            let patch =
                format!("Subject: a\n\n+1 for this\n---\n{GOOD}{between}{GOOD}-- \n2.39.5\n\n");
            let files = parse(patch.as_bytes(), 1).unwrap();
            let hunks: Vec<_> = files.iter().map(|file| file.hunks.len()).collect();
            assert_eq!(hunks, [1, 1], "{patch}");
        }
    }
}
