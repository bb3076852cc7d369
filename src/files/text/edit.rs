//! Edits of a text: what they replace, or why they cannot.
//!
//! Every edit is compared with the text as it was before any of them, so their order does not matter and
//! they must not overlap. In a text whose lines all end with CR LF, an edit that has LF alone means CR
//! LF; in any other text the bytes are taken as they are.

use std::ops::Range;
use std::rc::Rc;

use memchr::memmem::Finder;

use super::diff::Splice;
use super::pace::Pace;
use super::told;
use crate::client::Stopped;
use crate::codec::sort::{sort, sort_by};

/// Most line numbers of an ambiguous text that are reported.
const MAX_LINES_TOLD: usize = 100;

/// Most places that the edits of a text replace.
pub const MAX_PLACES: usize = 100_000;

/// The line ends in each so many bytes are counted once for all edits.
const COUNTED_BYTES: usize = 64 * 1024;

/// Most bytes besides white space of a text whose nearest place is reported.
const MAX_NEAREST: usize = 64 * 1024;

/// So many bytes of a text, its white space left out, are searched for that at a time.
const BLACK_BYTES: usize = 4 * MAX_NEAREST;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// What is replaced.
    pub place: EditTarget,
    /// What comes in its place.
    pub new: Vec<u8>,
}

impl Edit {
    /// Whether it takes an empty or missing file only.
    pub fn is_for_empty(&self) -> bool {
        matches!(&self.place, EditTarget::Text { old, .. } if old.is_empty())
    }
}

/// What an edit replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditTarget {
    /// This text, wherever it is.
    Text {
        /// Empty stands for an empty file.
        old: Vec<u8>,
        /// How often it must be there.
        count: Count,
    },
    /// These lines, from 1, both included. The end of the last one stays as it is.
    Lines {
        /// The first one.
        first: u64,
        /// The last one, not before the first.
        last: u64,
    },
}

/// How often a text must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// So often.
    Exactly(u64),
    /// At least once.
    All,
}

/// Why edits cannot be made. Edits are numbered from 0.
#[derive(Debug)]
pub enum EditError {
    /// The text of an edit is not there.
    NoMatch {
        edit: usize,
        /// Where the text differs only in white space: the line, from 1, and how what is there begins.
        nearest: Option<(u64, Vec<u8>)>,
    },
    /// The text is there another number of times.
    Ambiguous {
        edit: usize,
        /// How often it is there; parts that overlap count.
        found: u64,
        /// The lines that it begins in, from 1; the first hundred.
        lines: Vec<u64>,
    },
    /// The edits replace more than [`MAX_PLACES`] places.
    TooMany {
        edit: usize,
    },
    /// There are no such lines.
    NoLines {
        edit: usize,
        /// How many lines the text has.
        lines: u64,
    },
    /// Two edits replace the same bytes, or both insert at the same place.
    Overlap {
        edits: [usize; 2],
        /// The line, from 1.
        line: u64,
    },
    Stopped(Stopped),
}

impl From<Stopped> for EditError {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

/// What the edits replace: in the order of the text, without overlaps.
///
/// # Errors
/// The first edit that does not fit; or it was interrupted.
pub fn plan(text: &[u8], edits: &[Edit], pace: &mut Pace<'_>) -> Result<Vec<Splice>, EditError> {
    let has_crlf = ends_lines_with_crlf(text);
    let mut splices = Vec::new();
    let mut ends = Vec::new();
    for (number, edit) in edits.iter().enumerate() {
        match &edit.place {
            EditTarget::Text { old, count } => {
                let is_plain = |text: &[u8]| memchr::memchr(b'\r', text).is_none();
                let adapts = has_crlf && is_plain(old) && is_plain(&edit.new);
                let [old, new] = [old, &edit.new].map(|text| {
                    if adapts {
                        with_crlf(text)
                    } else {
                        text.clone()
                    }
                });
                let found = occurrences(text, &old, *count, number, pace)?;
                if splices.len() + found.len() > MAX_PLACES {
                    return Err(EditError::TooMany { edit: number });
                }
                let new: Rc<[u8]> = new.into();
                splices.extend(found.into_iter().map(|start| {
                    (
                        number,
                        Splice {
                            range: start..start + old.len(),
                            text: Rc::clone(&new),
                        },
                    )
                }));
            }
            EditTarget::Lines { first, last } => {
                if ends.is_empty() {
                    ends.extend(text.chunks(COUNTED_BYTES).map(count_lines));
                }
                pace.spend(COUNTED_BYTES)?;
                let (start, end) =
                    lines(text, &ends, *first, *last).map_err(|lines| EditError::NoLines {
                        edit: number,
                        lines,
                    })?;
                let splice = Splice {
                    range: start..end,
                    text: lines_in_place_of(&text[start..end], &edit.new, has_crlf).into(),
                };
                splices.push((number, splice));
            }
        }
    }
    let key = |(number, splice): &(usize, Splice)| {
        let Range { start, end } = splice.range;
        (start, end, *number)
    };
    sort_by(&mut splices, |one, other| key(one).cmp(&key(other)));
    for pair in splices.windows(2) {
        let [(one, first), (other, second)] = pair else {
            continue;
        };
        if second.range.start < first.range.end || second.range.start == first.range.start {
            return Err(EditError::Overlap {
                edits: [*one.min(other), *one.max(other)],
                line: line_of(text, second.range.start),
            });
        }
    }
    Ok(splices.into_iter().map(|(_, splice)| splice).collect())
}

/// Where a text begins. It may be there as often as `count` says, and not overlap itself.
fn occurrences(
    text: &[u8],
    old: &[u8],
    count: Count,
    edit: usize,
    pace: &mut Pace<'_>,
) -> Result<Vec<usize>, EditError> {
    if old.is_empty() {
        return if text.is_empty() && count != Count::Exactly(0) {
            Ok(vec![0])
        } else {
            Err(EditError::NoMatch {
                edit,
                nearest: None,
            })
        };
    }
    let finder = Finder::new(old);
    let (mut found, mut total, mut from) = (Vec::new(), 0, 0);
    while let Some(start) = pace.find(text, &finder, from)? {
        total += 1;
        from = start + old.len();
        // One too many tells that there are too many.
        if found.len() <= MAX_PLACES {
            found.push(start);
        } else if count == Count::All {
            break;
        }
    }
    if found.is_empty() {
        let nearest = nearest(text, old, pace)?;
        return Err(EditError::NoMatch { edit, nearest });
    }
    let Count::Exactly(count) = count else {
        return Ok(found);
    };
    let mut all = found.clone();
    for start in &found {
        // Whether another one begins within this one.
        let end = (start + 2 * old.len() - 1).min(text.len());
        all.extend(pace.find(&text[..end], &finder, start + 1)?);
    }
    sort(&mut all);
    all.dedup();
    if all.len() as u64 == count && all == found {
        return Ok(found);
    }
    let mut lines = Vec::new();
    let (mut line, mut counted) = (1, 0);
    for start in all.iter().take(MAX_LINES_TOLD) {
        line += count_lines(&text[counted..*start]) as u64;
        counted = *start;
        lines.push(line);
    }
    let found = if found.len() > MAX_PLACES {
        total
    } else {
        all.len()
    };
    let found = found as u64;
    Err(EditError::Ambiguous { edit, found, lines })
}

/// The first place where the text is `old` but for white space: its line, and how it begins. It is a hint, so a
/// long text is not looked for, and the memory it takes is small.
fn nearest(
    text: &[u8],
    old: &[u8],
    pace: &mut Pace<'_>,
) -> Result<Option<(u64, Vec<u8>)>, Stopped> {
    let old = black_bytes(old, MAX_NEAREST + 1);
    if old.is_empty() || old.len() > MAX_NEAREST {
        return Ok(None);
    }
    let finder = Finder::new(&old);
    let mut from = 0;
    loop {
        let rest = &text[from..];
        let part = black_bytes(rest, BLACK_BYTES);
        pace.spend(part.len())?;
        let found = finder.find(&part);
        // What begins in the last bytes may end after them.
        let next = found.unwrap_or(BLACK_BYTES - old.len() + 1);
        let mut places = black(rest);
        let Some((first, _)) = places.nth(next) else {
            return Ok(None);
        };
        from += first;
        if found.is_some() {
            let after = old.len().checked_sub(2);
            let last = after.and_then(|after| places.nth(after));
            let last = last.map_or(first, |(last, _)| last);
            let there = told(&rest[first..=last]).to_vec();
            return Ok(Some((line_of(text, from), there)));
        }
    }
}

/// The bytes that are no white space, and where they are.
fn black(text: &[u8]) -> impl Iterator<Item = (usize, u8)> + '_ {
    let bytes = text.iter().copied().enumerate();
    bytes.filter(|(_, byte)| !byte.is_ascii_whitespace())
}

/// The first so many of them.
fn black_bytes(text: &[u8], most: usize) -> Vec<u8> {
    black(text).map(|(_, byte)| byte).take(most).collect()
}

/// Where lines begin and end. `ends` has the number of line ends in each [`COUNTED_BYTES`].
///
/// # Errors
/// There are no such lines, only so many.
fn lines(text: &[u8], ends: &[usize], first: u64, last: u64) -> Result<(usize, usize), u64> {
    let count = ends.iter().sum::<usize>() as u64;
    let count = count + u64::from(!text.is_empty() && !text.ends_with(b"\n"));
    if first == 0 || last > count {
        return Err(count);
    }
    // Where so many lines have ended.
    let after = |lines: u64| {
        let mut left = usize::try_from(lines).unwrap_or(usize::MAX);
        let mut start = 0;
        for (part, ends) in text.chunks(COUNTED_BYTES).zip(ends) {
            let Some(before) = left.checked_sub(1) else {
                break;
            };
            if before < *ends {
                let end = memchr::memchr_iter(b'\n', part).nth(before);
                return start + end.map_or(part.len(), |end| end + 1);
            }
            left -= ends;
            start += part.len();
        }
        start
    };
    Ok((after(first - 1), after(last)))
}

/// What comes in place of some lines.
fn lines_in_place_of(old: &[u8], new: &[u8], has_crlf: bool) -> Vec<u8> {
    let mut new = if has_crlf && memchr::memchr(b'\r', new).is_none() {
        with_crlf(new)
    } else {
        new.to_vec()
    };
    if !new.is_empty() {
        new.truncate(new.len() - line_end(&new).len());
        new.extend_from_slice(line_end(old));
    }
    new
}

/// How many lines end in a text.
fn count_lines(text: &[u8]) -> usize {
    memchr::memchr_iter(b'\n', text).count()
}

/// The bytes that end the last line.
fn line_end(text: &[u8]) -> &[u8] {
    let length = match text {
        [.., b'\r', b'\n'] => 2,
        [.., b'\n'] => 1,
        _ => 0,
    };
    &text[text.len() - length..]
}

/// The number of the line that has a byte, from 1.
fn line_of(text: &[u8], at: usize) -> u64 {
    1 + count_lines(&text[..at]) as u64
}

fn ends_lines_with_crlf(text: &[u8]) -> bool {
    let mut ends = memchr::memchr_iter(b'\n', text).peekable();
    ends.peek().is_some() && ends.all(|end| text[..end].ends_with(b"\r"))
}

fn with_crlf(text: &[u8]) -> Vec<u8> {
    let mut lines = text.split(|byte| *byte == b'\n');
    let mut out = lines.next().unwrap_or_default().to_vec();
    for line in lines {
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(line);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::diff::spliced;
    use super::super::pace::tests::Steps;
    use super::*;
    use crate::files::condition::Patient;

    impl PartialEq for EditError {
        fn eq(&self, other: &Self) -> bool {
            format!("{self:?}") == format!("{other:?}")
        }
    }

    fn planned(text: &str, edits: &[Edit]) -> Result<Vec<Splice>, EditError> {
        plan(text.as_bytes(), edits, &mut Pace::new(&mut Patient))
    }

    fn replace(old: &str, new: &str, count: Count) -> Edit {
        let place = EditTarget::Text {
            old: old.into(),
            count,
        };
        Edit {
            place,
            new: new.into(),
        }
    }

    fn once(old: &str, new: &str) -> Edit {
        replace(old, new, Count::Exactly(1))
    }

    fn at(first: u64, last: u64, new: &str) -> Edit {
        Edit {
            place: EditTarget::Lines { first, last },
            new: new.into(),
        }
    }

    fn edited(text: &str, edits: &[Edit]) -> Result<String, EditError> {
        let splices = planned(text, edits)?;
        Ok(String::from_utf8(spliced(text.as_bytes(), &splices)).unwrap())
    }

    #[test]
    fn edits_replace_what_they_say() {
        let text = "one\ntwo\nthree\ntwo\n";
        for (edits, expected) in [
            (vec![once("one", "1")], "1\ntwo\nthree\ntwo\n"),
            (vec![replace("two", "2", Count::All)], "one\n2\nthree\n2\n"),
            (
                vec![replace("two", "2", Count::Exactly(2))],
                "one\n2\nthree\n2\n",
            ),
            (vec![once("three\n", ""), once("one", "1")], "1\ntwo\ntwo\n"),
            (vec![at(2, 3, "x")], "one\nx\ntwo\n"),
            (vec![at(2, 3, "x\ny\n")], "one\nx\ny\ntwo\n"),
            (vec![at(2, 2, ""), at(4, 4, "\n")], "one\nthree\n\n"),
            (vec![at(1, 1, "1"), once("three", "3")], "1\ntwo\n3\ntwo\n"),
        ] {
            assert_eq!(edited(text, &edits).as_deref(), Ok(expected), "{edits:?}");
        }
        assert_eq!(edited("", &[once("", "new")]).as_deref(), Ok("new"));
        assert_eq!(
            edited("a\nb", &[at(2, 2, "c\n")]).as_deref(),
            Ok("a\nc"),
            "no last line end"
        );
    }

    #[test]
    fn line_ends_stay_what_they_are() {
        let text = "one\r\ntwo\r\nthree\r\n";
        for (edit, expected) in [
            (once("one\ntwo", "1\n2"), "1\r\n2\r\nthree\r\n"),
            (once("two", "a\nb"), "one\r\na\r\nb\r\nthree\r\n"),
            (once("one\r\ntwo", "1"), "1\r\nthree\r\n"),
            (at(2, 3, "x\ny"), "one\r\nx\r\ny\r\n"),
        ] {
            assert_eq!(
                edited(text, std::slice::from_ref(&edit)).as_deref(),
                Ok(expected),
                "{edit:?}"
            );
        }
        // With mixed ends the bytes are what they are.
        assert!(edited("a\r\nb\nc", &[once("a\nb", "x")]).is_err());
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let text = "fn a() {\n    x();\n}\nfn b() {\n    x();\n}\n";
        let refused = |edits: &[Edit]| edited(text, edits).unwrap_err();
        assert_eq!(
            refused(&[once("fn a", "f"), once("x();", "y")]),
            EditError::Ambiguous {
                edit: 1,
                found: 2,
                lines: vec![2, 5]
            }
        );
        assert_eq!(
            refused(&[replace("x();", "y", Count::Exactly(3))]),
            EditError::Ambiguous {
                edit: 0,
                found: 2,
                lines: vec![2, 5]
            }
        );
        assert_eq!(
            refused(&[once("fn b() {\n\tx();", "")]),
            EditError::NoMatch {
                edit: 0,
                nearest: Some((4, b"fn b() {\n    x();".to_vec()))
            }
        );
        assert_eq!(
            refused(&[once("nope", "")]),
            EditError::NoMatch {
                edit: 0,
                nearest: None
            }
        );
        assert_eq!(
            refused(&[once("", "x")]),
            EditError::NoMatch {
                edit: 0,
                nearest: None
            }
        );
        assert_eq!(
            refused(&[at(6, 7, "")]),
            EditError::NoLines { edit: 0, lines: 6 }
        );
        assert_eq!(
            refused(&[once("fn a() {\n", ""), at(1, 1, "x")]),
            EditError::Overlap {
                edits: [0, 1],
                line: 1
            }
        );
        assert_eq!(
            edited("aaa", &[once("aa", "b")]).unwrap_err(),
            EditError::Ambiguous {
                edit: 0,
                found: 2,
                lines: vec![1, 1]
            },
            "which of two that overlap is meant is not clear"
        );
        assert_eq!(
            edited("", &[once("", "a"), once("", "b")]).unwrap_err(),
            EditError::Overlap {
                edits: [0, 1],
                line: 1
            }
        );
    }

    #[test]
    fn many_places_share_the_new_text_and_have_a_limit() {
        let text = "a".repeat(MAX_PLACES);
        let new = "x".repeat(1 << 20);
        let edits = [replace("a", &new, Count::All)];
        let splices = planned(&text, &edits).unwrap();
        assert!(Rc::ptr_eq(&splices[0].text, &splices[MAX_PLACES - 1].text));
        let text = text + "a";
        assert_eq!(planned(&text, &edits), Err(EditError::TooMany { edit: 0 }));
    }

    #[test]
    fn lines_are_found_wherever_their_ends_are_counted() {
        let (long, short) = (COUNTED_BYTES - 1, "x\n".repeat(COUNTED_BYTES));
        let text = format!(
            "{}\n{short}{}\nlast",
            "a".repeat(long),
            "b".repeat(3 * long)
        );
        let all: Vec<_> = text.split_inclusive('\n').collect();
        let count = all.len() as u64;
        for (first, last) in [
            (1, 1),
            (1, 2),
            (2, 2),
            (2, 40_000),
            (count - 1, count),
            (1, count),
        ] {
            let (start, end) = (usize::try_from(first - 1), usize::try_from(last));
            let (start, end) = (start.unwrap(), end.unwrap());
            let rest = [&all[..start].concat(), &all[end..].concat()[..]].concat();
            assert!(
                edited(&text, &[at(first, last, "")]).unwrap() == rest,
                "{first}-{last}"
            );
        }
        assert_eq!(
            edited(&text, &[at(1, count + 1, "")]),
            Err(EditError::NoLines {
                edit: 0,
                lines: count
            })
        );
    }

    #[test]
    fn a_text_that_differs_in_white_space_is_found_in_a_long_file() {
        let wanted = "f(a,\tb)";
        let nearest = |text: &str| match edited(text, &[once(wanted, "")]) {
            Err(EditError::NoMatch { nearest, .. }) => nearest,
            other => panic!("{other:?}"),
        };
        for before in [
            0,
            BLACK_BYTES - 8,
            BLACK_BYTES - 3,
            BLACK_BYTES,
            2 * BLACK_BYTES - 9,
        ] {
            let text = format!("{}\n  f(a, b)  \n", "x \t".repeat(before));
            assert_eq!(nearest(&text), Some((2, b"f(a, b)".to_vec())), "{before}");
        }
        assert_eq!(nearest(&"f ( a b".repeat(BLACK_BYTES)), None);
        // However much white space there is, the beginning is reported.
        let (line, told) = nearest(&format!("f(a, {}b)", " ".repeat(1 << 20))).unwrap();
        assert_eq!((line, told.len()), (1, super::super::MAX_TOLD));
    }

    #[test]
    fn edits_stop_when_they_are_interrupted() {
        // Both read the text once at least.
        let text = "ab".repeat(4 << 20);
        for old in ["ab", "c"] {
            let mut steps = Steps(3);
            let result = plan(
                text.as_bytes(),
                &[once(old, "")],
                &mut Pace::new(&mut steps),
            );
            assert!(matches!(
                result,
                Err(EditError::Stopped(Stopped::Disconnected))
            ));
        }
    }

    #[test]
    fn repetitive_text_takes_linear_time() {
        let text = "a".repeat(4 << 20);
        let started = std::time::Instant::now();
        let long = "a".repeat(1 << 20) + "b";
        assert!(matches!(
            edited(&text, &[once(&long, "")]),
            Err(EditError::NoMatch { .. })
        ));
        let long = "a".repeat(1 << 20);
        assert!(matches!(
            edited(&text, &[once(&long, "")]),
            Err(EditError::Ambiguous { .. })
        ));
        assert!(started.elapsed() < std::time::Duration::from_secs(10));
    }
}
