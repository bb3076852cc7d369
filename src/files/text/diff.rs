//! Unified diffs of changes that are known.
//!
//! An edit knows what it replaces, so nothing is searched for in the whole file: the diff takes time in
//! proportion to the file, and lines that an edit replaces by themselves are left out of it.

use std::ops::Range;
use std::rc::Rc;

use super::pace::Pace;
use crate::client::Stopped;

/// Lines before and after a change.
const CONTEXT: usize = 3;

/// Largest product of the numbers of lines that are compared with each other for the shortest diff.
const MAX_COMPARED: usize = 250_000;

/// Most places of the table of a comparison: it has a row and a column more than there are lines.
const MAX_TABLE: usize = 2 * (MAX_COMPARED + 1);

/// What a line takes besides its bytes, and the comparison of a line with another: so many bytes take as long.
const LINE_WORK: usize = 64;
const PAIR_WORK: usize = 8;

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

/// Lines that are replaced. Of both kinds only the place is kept: there may be as many as the texts have.
struct Change {
    /// Number of the first old line, from 0.
    line: usize,
    /// How many old lines.
    removed: usize,
    /// How many new lines.
    added: usize,
    /// Where these are in the new text.
    new: Range<usize>,
}

/// At most the bytes that the diff of two texts of these lengths takes, with the table of a comparison, but without what
/// is kept of each line.
pub fn diff_bytes([old, new]: [usize; 2], limit: usize) -> usize {
    let [old, new] = [old, new].map(|length| length.saturating_add(1));
    let pairs = old.saturating_mul(new);
    // A line is longer by its mark, and the buffer has grown by doubling.
    let written = old.saturating_add(new).saturating_mul(4);
    size_of::<u16>() * pairs.min(MAX_TABLE) + written.min(2 * limit)
}

/// The unified diff of the changes, which are in order and do not overlap, and lead from the first text to the second:
/// `---`, `+++` and hunks with three lines of context; empty if nothing changes. It ends with the last hunk that fits
/// into `limit` bytes; the second value is whether it was cut.
///
/// # Errors
/// It was interrupted.
pub fn unified(
    name: &str,
    [old, new]: [&[u8]; 2],
    splices: &[Splice],
    limit: usize,
    pace: &mut Pace<'_>,
) -> Result<(Vec<u8>, bool), Stopped> {
    let is_unended = !old.is_empty() && !old.ends_with(b"\n");
    let line_count = count_ends(old, pace)? + usize::from(is_unended);
    let mut comparison = Comparison {
        old: Lines::of(old),
        new: Lines::of(new),
        common: Vec::new(),
        changes: Vec::new(),
    };
    let is_cut = comparison.compare_places(splices, limit.saturating_mul(2), pace)?;
    let changes = comparison.changes;
    let mut at = 0;
    let mut next_line = |pace: &mut Pace<'_>| {
        let end = memchr::memchr(b'\n', &old[at..]).map_or(old.len(), |end| at + end + 1);
        let line = &old[at..end];
        at = end;
        pace.spend(LINE_WORK + line.len())?;
        Ok::<_, Stopped>(line)
    };
    // How many lines of the old text are behind.
    let mut behind = 0;
    let mut out = Vec::new();
    // How many lines longer the new text is before the hunk.
    let mut shift = 0_isize;
    let mut rest = &changes[..];
    while let Some(first) = rest.first() {
        let mut count = 1;
        let mut end = first.line + first.removed;
        while let Some(next) = rest.get(count)
            && next.line <= end + 2 * CONTEXT
        {
            end = next.line + next.removed;
            count += 1;
        }
        let start = first.line.saturating_sub(CONTEXT);
        let end = (end + CONTEXT).min(line_count);
        let hunk = &rest[..count];
        if is_cut && count == rest.len() {
            // What is left out might belong to this hunk.
            return Ok((out, true));
        }
        let grown: isize = hunk
            .iter()
            .map(|change| signed(change.added) - signed(change.removed))
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
            next_line(pace)?;
        }
        behind = start;
        // The lines after the last change are those before one that changes nothing.
        let last = Change {
            line: end,
            removed: 0,
            added: 0,
            new: 0..0,
        };
        for change in hunk.iter().chain([&last]) {
            let old_lines = change.line + change.removed - behind;
            for number in 0..old_lines {
                let is_kept = number < change.line - behind;
                let line = next_line(pace)?;
                append(&mut out, if is_kept { b' ' } else { b'-' }, line, limit);
            }
            for line in new[change.new.clone()].split_inclusive(|byte| *byte == b'\n') {
                pace.spend(LINE_WORK + line.len())?;
                append(&mut out, b'+', line, limit);
            }
            behind = change.line + change.removed;
        }
        if out.len() > limit {
            out.truncate(before);
            return Ok((out, true));
        }
        shift += grown;
        rest = &rest[count..];
    }
    Ok((out, is_cut))
}

/// How many lines end in a text.
fn count_ends(text: &[u8], pace: &mut Pace<'_>) -> Result<usize, Stopped> {
    let mut count = 0;
    pace.each_step(text, &mut |step| {
        count += memchr::memchr_iter(b'\n', step).count();
        Ok(())
    })?;
    Ok(count)
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

/// Appends a line, but none to what is longer than `limit`.
fn append(out: &mut Vec<u8>, mark: u8, line: &[u8], limit: usize) {
    if out.len() > limit {
        return;
    }
    out.push(mark);
    // One byte more than fits tells that it does not.
    let room = limit.saturating_add(1).saturating_sub(out.len());
    out.extend_from_slice(&line[..line.len().min(room)]);
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

/// Where the lines of a part of a text are.
struct Lines<'t> {
    text: &'t [u8],
    /// Where each begins, and where the last one ends.
    places: Vec<usize>,
}

impl<'t> Lines<'t> {
    /// None of its lines yet.
    fn of(text: &'t [u8]) -> Self {
        let places = Vec::new();
        Self { text, places }
    }

    /// Finds those of a part that begins and ends with whole lines. Returns how many there are.
    fn find(&mut self, part: Range<usize>, pace: &mut Pace<'_>) -> Result<usize, Stopped> {
        self.places.clear();
        self.places.push(part.start);
        let mut at = part.start;
        while at < part.end {
            let end = memchr::memchr(b'\n', &self.text[at..part.end]);
            let end = end.map_or(part.end, |end| at + end + 1);
            pace.spend(LINE_WORK + end - at)?;
            at = end;
            self.places.push(at);
        }
        Ok(self.places.len() - 1)
    }

    /// The place of some of them.
    fn range(&self, lines: Range<usize>) -> Range<usize> {
        self.places[lines.start]..self.places[lines.end]
    }

    fn line(&self, number: usize) -> &'t [u8] {
        &self.text[self.range(number..number + 1)]
    }
}

/// Looks for the lines in which two texts differ. Its memory serves for all places of the texts: there may be as many
/// as they have lines, and all threads of the server share one heap.
struct Comparison<'t> {
    old: Lines<'t>,
    new: Lines<'t>,
    /// The length of the longest common subsequence of each pair of ends of two parts. It is no longer than the shorter
    /// one, which has as many lines as the root of [`MAX_COMPARED`] at most.
    common: Vec<u16>,
    /// What was found.
    changes: Vec<Change>,
}

impl Comparison<'_> {
    /// Finds the changes by whole lines, as few as are found in reasonable time. Those after the first `limit` bytes are
    /// left out; returns whether there are such.
    fn compare_places(
        &mut self,
        splices: &[Splice],
        limit: usize,
        pace: &mut Pace<'_>,
    ) -> Result<bool, Stopped> {
        let mut left = limit;
        let old = self.old.text;
        let line_start = |at: usize| memchr::memrchr(b'\n', &old[..at]).map_or(0, |end| end + 1);
        let line_end =
            |at: usize| memchr::memchr(b'\n', &old[at..]).map_or(old.len(), |end| at + end + 1);
        let (mut counted, mut line) = (0, 0);
        // How many bytes longer the new text is up to here.
        let mut shift = 0_isize;
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
                pace.spend(LINE_WORK)?;
            }
            pace.spend(end - start)?;
            line += count_ends(&old[counted..start], pace)?;
            counted = start;
            let (mut added, mut grown) = (0_usize, 0_isize);
            for splice in &rest[..count] {
                added = added.saturating_add(splice.text.len());
                grown += signed(splice.text.len()) - signed(splice.range.len());
            }
            match left.checked_sub((end - start).saturating_add(added)) {
                Some(rest) => left = rest,
                None => return Ok(true),
            }
            let new_start = start.saturating_add_signed(shift);
            shift += grown;
            let new_end = end.saturating_add_signed(shift);
            self.compare(line, start..end, new_start..new_end, pace)?;
            rest = &rest[count..];
        }
        Ok(false)
    }

    /// Finds the changes between two parts of whole lines, the first of which is line `first`.
    fn compare(
        &mut self,
        first: usize,
        old: Range<usize>,
        new: Range<usize>,
        pace: &mut Pace<'_>,
    ) -> Result<(), Stopped> {
        let new_bytes = new.len();
        let mut old_end = self.old.find(old, pace)?;
        let mut new_end = self.new.find(new, pace)?;
        let (old, new) = (&self.old, &self.new);
        let mut start = 0;
        while start < old_end.min(new_end) && old.line(start) == new.line(start) {
            start += 1;
        }
        while old_end.min(new_end) > start && old.line(old_end - 1) == new.line(new_end - 1) {
            old_end -= 1;
            new_end -= 1;
        }
        let changes = &mut self.changes;
        let mut push = |removed: Range<usize>, added: Range<usize>| {
            changes.push(Change {
                line: first + removed.start,
                removed: removed.len(),
                added: added.len(),
                new: new.range(added),
            });
        };
        let (rows, columns) = (old_end - start, new_end - start);
        if rows == 0 && columns == 0 {
            return Ok(());
        }
        // Without lines on one side there is nothing to compare either.
        if !(1..=MAX_COMPARED).contains(&rows.saturating_mul(columns)) {
            push(start..old_end, start..new_end);
            return Ok(());
        }
        let width = columns + 1;
        let common = &mut self.common;
        common.clear();
        common.resize((rows + 1) * width, 0);
        for row in (0..rows).rev() {
            let line = old.line(start + row);
            // Lines that differ only at their ends are read as a whole.
            let read = columns.saturating_mul(line.len()).min(new_bytes);
            pace.spend(PAIR_WORK * columns + read)?;
            for column in (0..columns).rev() {
                common[row * width + column] = if line == new.line(start + column) {
                    common[(row + 1) * width + column + 1] + 1
                } else {
                    common[(row + 1) * width + column].max(common[row * width + column + 1])
                };
            }
        }
        let differ = |row: usize, column: usize| old.line(start + row) != new.line(start + column);
        let (mut row, mut column) = (0, 0);
        while row < rows || column < columns {
            let (start_row, start_column) = (row, column);
            while row < rows && column < columns && differ(row, column)
                || (row < rows) != (column < columns)
            {
                let is_old = row < rows
                    && (column == columns
                        || common[(row + 1) * width + column] >= common[row * width + column + 1]);
                if is_old { row += 1 } else { column += 1 }
            }
            if (start_row, start_column) != (row, column) {
                push(
                    start + start_row..start + row,
                    start + start_column..start + column,
                );
            }
            while row < rows && column < columns && !differ(row, column) {
                row += 1;
                column += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::pace::tests::Steps;
    use super::*;
    use crate::client::Interrupt;
    use crate::files::condition::Patient;

    fn unified(name: &str, old: &[u8], splices: &[Splice], limit: usize) -> (Vec<u8>, bool) {
        let texts = [old, &spliced(old, splices)];
        super::unified(name, texts, splices, limit, &mut Pace::new(&mut Patient)).unwrap()
    }

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
    fn what_a_diff_takes_is_known_before_it_is_made() {
        for [old, new] in [[500, 500], [1, 200_000], [200_000, 1], [3, 5]] {
            let [old, new] = [("a\n", old), ("b\n", new)].map(|(line, count)| line.repeat(count));
            let (old, new) = (old.as_bytes(), new.as_bytes());
            let mut comparison = Comparison {
                old: Lines::of(old),
                new: Lines::of(new),
                common: Vec::new(),
                changes: Vec::new(),
            };
            comparison
                .compare(0, 0..old.len(), 0..new.len(), &mut Pace::new(&mut Patient))
                .unwrap();
            let table = size_of_val(&comparison.common[..]);
            assert!(table > 0 && table <= diff_bytes([old.len(), new.len()], 0));
        }
        assert!(diff_bytes([usize::MAX; 2], 1000) < 1_100_000);
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

    /// Counts how often it is asked.
    struct Counter(u32);

    impl Interrupt for Counter {
        fn check(&mut self) -> Result<(), Stopped> {
            self.0 += 1;
            Ok(())
        }
    }

    #[test]
    fn a_diff_of_many_lines_stops_when_it_is_interrupted() {
        let place = |range, text: String| Splice {
            range,
            text: text.into_bytes().into(),
        };
        // So many lines that none is compared with another.
        let ends = "\n".repeat(170_000);
        let all = vec![place(0..ends.len(), "b\n".repeat(ends.len()))];
        // Many places, and each has just so few lines that they are compared with each other.
        let (places, lines) = (50, 500);
        let parts: String = (0..places)
            .map(|number| ["\n".repeat(lines), format!("#{number}\n--\n")].concat())
            .collect();
        let parts_replaced = memchr::memchr_iter(b'#', parts.as_bytes())
            .map(|end| place(end - lines..end, "b\n".repeat(lines)))
            .collect();
        // Lines that differ only at their ends.
        let long = |numbers: Range<usize>| -> String {
            let begin = "x".repeat(500);
            numbers
                .map(|number| [&begin, &*number.to_string(), "\n"].concat())
                .collect()
        };
        let (old, new) = (long(100..500), long(500..900));
        let long_replaced = vec![place(0..old.len(), new)];
        for (old, splices, least) in [
            (ends, all, 20),
            (parts, parts_replaced, places),
            (old, long_replaced, 50),
        ] {
            let texts = [old.as_bytes(), &spliced(old.as_bytes(), &splices)];
            let diff = |interrupt: &mut dyn Interrupt| {
                super::unified("x", texts, &splices, 1 << 20, &mut Pace::new(interrupt))
            };
            let mut counter = Counter(0);
            let before = crate::sys::allocated_bytes();
            let (whole, is_cut) = diff(&mut counter).unwrap();
            let allocated = crate::sys::allocated_bytes() - before;
            assert!(!is_cut && whole.len() > old.len());
            assert!(counter.0 as usize >= least, "{} of {least}", counter.0);
            assert!(allocated < 24 << 20, "{allocated}");
            for steps in [0, 1, counter.0 - 1] {
                let stopped = diff(&mut Steps(steps));
                assert!(matches!(stopped, Err(Stopped::Disconnected)));
            }
        }
    }

    /// What `diff` is, written down without care for time and memory: all lines with their marks, then the hunks.
    fn plain(old: &[u8], splices: &[Splice]) -> Vec<u8> {
        let lines_of = |text: &[u8]| -> Vec<Vec<u8>> {
            let lines = text.split_inclusive(|byte| *byte == b'\n');
            lines.map(<[u8]>::to_vec).collect()
        };
        let end_of = |at: usize| {
            let end = old[at..].iter().position(|byte| *byte == b'\n');
            end.map_or(old.len(), |end| at + end + 1)
        };
        let (mut marked, mut at, mut rest) = (Vec::new(), 0, splices);
        while let Some(first) = rest.first() {
            let start = old[..first.range.start]
                .iter()
                .rposition(|byte| *byte == b'\n');
            let start = start.map_or(0, |end| end + 1);
            let (mut end, mut count) = (end_of(first.range.end), 1);
            while rest.get(count).is_some_and(|next| next.range.start <= end) {
                end = end.max(end_of(rest[count].range.end));
                count += 1;
            }
            let moved: Vec<_> = rest[..count]
                .iter()
                .map(|splice| Splice {
                    range: splice.range.start - start..splice.range.end - start,
                    text: splice.text.clone(),
                })
                .collect();
            let kept = lines_of(&old[at..start]).into_iter();
            marked.extend(kept.map(|line| (b' ', line)));
            let new = lines_of(&spliced(&old[start..end], &moved));
            marked.extend(compared(&lines_of(&old[start..end]), &new));
            at = end;
            rest = &rest[count..];
        }
        marked.extend(lines_of(&old[at..]).into_iter().map(|line| (b' ', line)));
        let is_near = |at: usize| {
            let near = &marked[at.saturating_sub(CONTEXT)..(at + CONTEXT + 1).min(marked.len())];
            near.iter().any(|(mark, _)| *mark != b' ')
        };
        let (mut out, mut places, mut at) = (Vec::new(), [0, 0], 0);
        while at < marked.len() {
            let length = (at..marked.len()).take_while(|at| is_near(*at)).count();
            let hunk = &marked[at..at + length.max(1)];
            let counts =
                [b'+', b'-'].map(|other| hunk.iter().filter(|(mark, _)| *mark != other).count());
            if length > 0 {
                let [old, new] = [0, 1].map(|side| position(places[side], signed(counts[side])));
                if out.is_empty() {
                    out.extend_from_slice(b"--- a/x\n+++ b/x\n");
                }
                out.extend_from_slice(format!("@@ -{old} +{new} @@\n").as_bytes());
                for (mark, line) in hunk {
                    append(&mut out, *mark, line, usize::MAX);
                }
            }
            places = [0, 1].map(|side| places[side] + signed(counts[side]));
            at += hunk.len();
        }
        out
    }

    /// The lines of both sides: what both have is one line, and old ones are before new ones.
    fn compared(old: &[Vec<u8>], new: &[Vec<u8>]) -> Vec<(u8, Vec<u8>)> {
        let kept = |line: &Vec<u8>| (b' ', line.clone());
        let (mut old, mut new, mut marked) = (old, new, Vec::new());
        while let ([first, olds @ ..], [other, news @ ..]) = (old, new)
            && first == other
        {
            marked.push(kept(first));
            (old, new) = (olds, news);
        }
        let mut ends = Vec::new();
        while let ([olds @ .., last], [news @ .., other]) = (old, new)
            && last == other
        {
            ends.insert(0, kept(last));
            (old, new) = (olds, news);
        }
        let mut added = Vec::new();
        while !old.is_empty() || !new.is_empty() {
            if !old.is_empty() && old.first() == new.first() {
                marked.append(&mut added);
                marked.push(kept(&old[0]));
                (old, new) = (&old[1..], &new[1..]);
            } else if !old.is_empty()
                && (new.is_empty() || shared(&old[1..], new) >= shared(old, &new[1..]))
            {
                marked.push((b'-', old[0].clone()));
                old = &old[1..];
            } else {
                added.push((b'+', new[0].clone()));
                new = &new[1..];
            }
        }
        marked.append(&mut added);
        marked.append(&mut ends);
        marked
    }

    /// How many lines both can keep.
    fn shared(old: &[Vec<u8>], new: &[Vec<u8>]) -> usize {
        let mut row = vec![0; new.len() + 1];
        for line in old {
            let above = row.clone();
            for (column, other) in new.iter().enumerate() {
                row[column + 1] = if line == other {
                    above[column] + 1
                } else {
                    row[column].max(above[column + 1])
                };
            }
        }
        row[new.len()]
    }

    #[test]
    fn diffs_of_random_texts_are_what_a_plain_reading_gives() {
        let mut random = 1_u32;
        let mut below = |most: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % most
        };
        for _ in 0..3000 {
            let mut text = |most: usize| -> Vec<u8> {
                let length = below(most);
                (0..length).map(|_| b"\n\nab"[below(4)]).collect()
            };
            let old = text(60);
            let texts: Vec<Rc<[u8]>> = (0..4).map(|_| text(12).into()).collect();
            let (mut splices, mut at) = (Vec::new(), 0);
            for text in texts {
                let start = at + below(20);
                let end = start + below(8);
                if end > old.len() {
                    break;
                }
                splices.push(Splice {
                    range: start..end,
                    text,
                });
                // Two are never at the same place.
                at = end + 1;
            }
            let (diff, is_cut) = unified("x", &old, &splices, usize::MAX);
            assert!(!is_cut);
            let show = String::from_utf8_lossy;
            assert_eq!(
                show(&diff),
                show(&plain(&old, &splices)),
                "{splices:?} of {:?}",
                show(&old)
            );
        }
    }
}
