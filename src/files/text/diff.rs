//! Unified diffs of changes that are known.
//!
//! An edit knows what it replaces, so nothing is searched for in the whole file: the diff takes time in
//! proportion to the file, and lines that an edit replaces by themselves are left out of it.

use std::ops::Range;
use std::rc::Rc;

/// Lines before and after a change.
const CONTEXT: usize = 3;

/// Largest product of the numbers of lines that are compared with each other for the shortest diff.
const MAX_COMPARED: usize = 250_000;

/// A part of a text, in bytes, and what comes in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Splice {
    /// What is replaced.
    pub range: Range<usize>,
    /// The replacement; many places may share it.
    pub text: Rc<[u8]>,
}

/// The text after the changes, which are in order and do not overlap.
pub fn spliced(old: &[u8], splices: &[Splice]) -> Vec<u8> {
    let mut new = Vec::with_capacity(
        old.len()
            + splices
                .iter()
                .map(|splice| splice.text.len())
                .sum::<usize>(),
    );
    let mut at = 0;
    for splice in splices {
        new.extend_from_slice(&old[at..splice.range.start]);
        new.extend_from_slice(&splice.text);
        at = splice.range.end;
    }
    new.extend_from_slice(&old[at..]);
    new
}

/// Lines that are replaced.
struct Change {
    /// Number of the first old line, from 0.
    line: usize,
    old: Vec<Vec<u8>>,
    new: Vec<Vec<u8>>,
}

/// The unified diff of the changes, which are in order and do not overlap: `---`, `+++` and hunks with
/// three lines of context; empty if nothing changes. It ends with the last hunk that fits into `limit`
/// bytes; the second value is whether it was cut.
pub fn unified(name: &str, old: &[u8], splices: &[Splice], limit: usize) -> (Vec<u8>, bool) {
    let line_count = old.split_inclusive(|byte| *byte == b'\n').count();
    let (changes, is_cut) = changes(old, splices, limit.saturating_mul(2));
    let mut at = 0;
    let mut next_line = || {
        let end = memchr::memchr(b'\n', &old[at..]).map_or(old.len(), |end| at + end + 1);
        let line = &old[at..end];
        at = end;
        line
    };
    // How many lines of the old text are behind.
    let mut behind = 0;
    let mut out = Vec::new();
    // How many lines longer the new text is before the hunk.
    let mut shift = 0_isize;
    let mut rest = &changes[..];
    while let Some(first) = rest.first() {
        let mut count = 1;
        let mut end = first.line + first.old.len();
        while let Some(next) = rest.get(count)
            && next.line <= end + 2 * CONTEXT
        {
            end = next.line + next.old.len();
            count += 1;
        }
        let start = first.line.saturating_sub(CONTEXT);
        let end = (end + CONTEXT).min(line_count);
        let hunk = &rest[..count];
        if is_cut && count == rest.len() {
            // What is left out might belong to this hunk.
            return (out, true);
        }
        let grown: isize = hunk
            .iter()
            .map(|change| signed(change.new.len()) - signed(change.old.len()))
            .sum();
        let before = out.len();
        if out.is_empty() {
            let name = name.trim_start_matches('/');
            for line in [
                format!("--- {}\n", quoted(&format!("a/{name}"))),
                format!("+++ {}\n", quoted(&format!("b/{name}"))),
            ] {
                out.extend_from_slice(line.as_bytes());
            }
        }
        let length = signed(end - start);
        let head = format!(
            "@@ -{} +{} @@\n",
            position(signed(start), length),
            position(signed(start) + shift, length + grown)
        );
        out.extend_from_slice(head.as_bytes());
        for _ in behind..start {
            next_line();
        }
        behind = start;
        for change in hunk {
            (behind..change.line).for_each(|_| append(&mut out, b' ', next_line()));
            change
                .old
                .iter()
                .for_each(|_| append(&mut out, b'-', next_line()));
            change
                .new
                .iter()
                .for_each(|line| append(&mut out, b'+', line));
            behind = change.line + change.old.len();
        }
        (behind..end).for_each(|_| append(&mut out, b' ', next_line()));
        behind = end;
        if out.len() > limit {
            out.truncate(before);
            return (out, true);
        }
        shift += grown;
        rest = &rest[count..];
    }
    (out, is_cut)
}

fn signed(count: usize) -> isize {
    isize::try_from(count).unwrap_or(isize::MAX)
}

/// The place of a hunk, as diff writes it: an empty one is after a line.
fn position(start: isize, length: isize) -> String {
    match length {
        0 => format!("{start},0"),
        1 => format!("{}", start + 1),
        length => format!("{},{length}", start + 1),
    }
}

fn append(out: &mut Vec<u8>, mark: u8, line: &[u8]) {
    out.push(mark);
    out.extend_from_slice(line);
    if !line.ends_with(b"\n") {
        out.extend_from_slice(b"\n\\ No newline at end of file\n");
    }
}

/// A name as git writes it in a diff: quoted if it has characters that could be mistaken.
fn quoted(name: &str) -> String {
    let is_plain = |byte: u8| byte >= b' ' && byte != 0x7f && byte != b'"' && byte != b'\\';
    if name.bytes().all(is_plain) {
        return name.to_owned();
    }
    let mut text = String::from("\"");
    for character in name.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            '\n' => text += "\\n",
            '\t' => text += "\\t",
            control if control.is_ascii_control() => {
                text.extend(format!("\\{:03o}", u32::from(control)).chars());
            }
            other => text.push(other),
        }
    }
    text + "\""
}

/// The changes by whole lines, as few as are found in reasonable time. Those after the first `limit` bytes are
/// left out; the second value tells it.
fn changes(old: &[u8], splices: &[Splice], limit: usize) -> (Vec<Change>, bool) {
    let mut left = limit;
    let line_start = |at: usize| memchr::memrchr(b'\n', &old[..at]).map_or(0, |end| end + 1);
    let line_end =
        |at: usize| memchr::memchr(b'\n', &old[at..]).map_or(old.len(), |end| at + end + 1);
    let mut changes = Vec::new();
    let (mut counted, mut line) = (0, 0);
    let mut rest = splices;
    while let Some(first) = rest.first() {
        let start = line_start(first.range.start);
        let mut end = line_end(first.range.end);
        let mut count = 1;
        while let Some(next) = rest.get(count)
            && next.range.start <= end
        {
            // Within the last line there is nothing to look for, however long it is.
            if next.range.end >= end {
                end = line_end(next.range.end);
            }
            count += 1;
        }
        let moved: Vec<Splice> = rest[..count]
            .iter()
            .map(|splice| Splice {
                range: splice.range.start - start..splice.range.end - start,
                text: splice.text.clone(),
            })
            .collect();
        line += memchr::memchr_iter(b'\n', &old[counted..start]).count();
        counted = start;
        let block = &old[start..end];
        let added = moved
            .iter()
            .fold(0_usize, |sum, splice| sum.saturating_add(splice.text.len()));
        match left.checked_sub(block.len().saturating_add(added)) {
            Some(rest) => left = rest,
            None => return (changes, true),
        }
        compare(line, block, &spliced(block, &moved), &mut changes);
        rest = &rest[count..];
    }
    (changes, false)
}

/// Adds the changes between two texts of whole lines, the first of which is line `first`.
fn compare(first: usize, old: &[u8], new: &[u8], changes: &mut Vec<Change>) {
    let [mut old, mut new] = [old, new].map(|text| {
        text.split_inclusive(|byte| *byte == b'\n')
            .collect::<Vec<_>>()
    });
    let equal = old
        .iter()
        .zip(&new)
        .take_while(|(old, new)| old == new)
        .count();
    old.drain(..equal);
    new.drain(..equal);
    let first = first + equal;
    let equal = old
        .iter()
        .rev()
        .zip(new.iter().rev())
        .take_while(|(old, new)| old == new)
        .count();
    old.truncate(old.len() - equal);
    new.truncate(new.len() - equal);
    if old.is_empty() && new.is_empty() {
        return;
    }
    let owned = |lines: &[&[u8]]| lines.iter().map(|line| line.to_vec()).collect();
    if old.len().saturating_mul(new.len()) > MAX_COMPARED {
        changes.push(Change {
            line: first,
            old: owned(&old),
            new: owned(&new),
        });
        return;
    }
    // The length of the longest common subsequence of each pair of ends.
    let width = new.len() + 1;
    let mut common = vec![0_u32; (old.len() + 1) * width];
    for row in (0..old.len()).rev() {
        for column in (0..new.len()).rev() {
            common[row * width + column] = if old[row] == new[column] {
                common[(row + 1) * width + column + 1] + 1
            } else {
                common[(row + 1) * width + column].max(common[row * width + column + 1])
            };
        }
    }
    let (mut row, mut column) = (0, 0);
    while row < old.len() || column < new.len() {
        let (start_row, start_column) = (row, column);
        while row < old.len() && column < new.len() && old[row] != new[column]
            || (row < old.len()) != (column < new.len())
        {
            let is_old = row < old.len()
                && (column == new.len()
                    || common[(row + 1) * width + column] >= common[row * width + column + 1]);
            if is_old { row += 1 } else { column += 1 }
        }
        if (start_row, start_column) != (row, column) {
            changes.push(Change {
                line: first + start_row,
                old: owned(&old[start_row..row]),
                new: owned(&new[start_column..column]),
            });
        }
        while row < old.len() && column < new.len() && old[row] == new[column] {
            row += 1;
            column += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(old: &str, splices: &[(Range<usize>, &str)]) -> String {
        let splices: Vec<_> = splices
            .iter()
            .map(|(range, text)| Splice {
                range: range.clone(),
                text: text.as_bytes().into(),
            })
            .collect();
        let (diff, is_cut) = unified("x", old.as_bytes(), &splices, 1 << 20);
        assert!(!is_cut);
        String::from_utf8(diff).unwrap()
    }

    #[test]
    fn a_diff_is_as_diff_writes_it() {
        let old = "1\n2\n3\n4\n5\n6\n7\n8\n9\n";
        assert_eq!(
            diff(old, &[(8..9, "five")]),
            "--- a/x\n+++ b/x\n@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n"
        );
        assert_eq!(
            diff("", &[(0..0, "a")]),
            "--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+a\n\\ No newline at end of file\n"
        );
        assert_eq!(
            diff("a\n", &[(0..2, "")]),
            "--- a/x\n+++ b/x\n@@ -1 +0,0 @@\n-a\n"
        );
        assert_eq!(
            diff("a\nb", &[(2..3, "b\n")]),
            "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+b\n"
        );
        assert_eq!(
            diff("a\nb\n", &[(0..4, "a\nx\nb\n")]),
            "--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n a\n+x\n b\n"
        );
        assert_eq!(diff("a\n", &[(0..1, "a")]), "");
    }

    #[test]
    fn a_diff_ends_with_a_whole_hunk() {
        let old = "x\n".repeat(1000);
        let splices: Vec<_> = (0..100)
            .map(|number| Splice {
                range: number * 20..number * 20 + 1,
                text: b"y"[..].into(),
            })
            .collect();
        let (whole, is_cut) = unified("x", old.as_bytes(), &splices, 1 << 20);
        assert!(!is_cut);
        let (part, is_cut) = unified("x", old.as_bytes(), &splices, whole.len() / 2);
        assert!(is_cut && whole.starts_with(&part) && part.ends_with(b" x\n"));
        assert!(whole[part.len()..].starts_with(b"@@ "));
    }

    #[test]
    fn a_change_that_is_too_long_is_left_out_with_what_follows() {
        let old = "\n".repeat(1 << 20);
        let splice = |range, text: &str| Splice {
            range,
            text: text.as_bytes().into(),
        };
        let all = splice(10..old.len(), "x");
        assert_eq!(
            unified("x", old.as_bytes(), &[all], 1000),
            (Vec::new(), true)
        );
        let few = [splice(0..0, "a"), splice(100..old.len(), "x")];
        let (diff, is_cut) = unified("x", old.as_bytes(), &few, 1000);
        assert_eq!(
            (diff.len(), is_cut),
            (0, true),
            "it may be the context of the next one"
        );
    }

    #[test]
    fn many_changes_of_one_long_line_take_linear_time() {
        let old = "x".repeat(16 << 20);
        let splices: Vec<_> = (0..100_000)
            .map(|number| Splice {
                range: number..number + 1,
                text: b"y"[..].into(),
            })
            .collect();
        let started = std::time::Instant::now();
        let (diff, is_cut) = unified("x", old.as_bytes(), &splices, 1000);
        assert!(diff.is_empty() && is_cut);
        assert!(started.elapsed() < std::time::Duration::from_secs(20));
    }

    #[test]
    fn strange_names_are_quoted() {
        assert_eq!(quoted("a/b c"), "a/b c");
        assert_eq!(quoted("a/\"\n\u{1}\\"), "\"a/\\\"\\n\\001\\\\\"");
    }
}
