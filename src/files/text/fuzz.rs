//! Fuzz tests of edits and patches: they change what a naive reading says, and diffs lead to the same text.

use super::diff::{Splice, spliced, unified};
use super::edit::{Count, Edit, EditError, EditTarget, plan};
use super::pace::Pace;
use super::patch::{apply, parse};
use crate::files::condition::Patient;
use crate::fuzz::{bounded, check};

#[test]
fn edits_change_what_they_say_and_their_diff_tells_it() {
    let tokens: &[&[u8]] = &[
        b"\n", b"\r\n", b"\0", b"a", b"b", b"ab", b" ", b"\t", b"\x01", b"\x02", b"\xff",
    ];
    check("edit", tokens, |input| {
        let mut parts = input.split(|byte| *byte == 0);
        let text = parts.next().unwrap_or_default();
        let edits: Vec<Edit> = std::iter::from_fn(|| {
            let (place, new) = (parts.next()?, parts.next()?.to_vec());
            let place = match place {
                [1, first, last, ..] => EditTarget::Lines {
                    first: u64::from(*first % 8),
                    last: u64::from(*first % 8 + *last % 4),
                },
                [2, old @ ..] => EditTarget::Text {
                    old: old.to_vec(),
                    count: Count::All,
                },
                old => EditTarget::Text {
                    old: old.to_vec(),
                    count: Count::Exactly(1),
                },
            };
            Some(Edit { place, new })
        })
        .take(8)
        .collect();
        match plan(text, &edits, &mut Pace::new(&mut Patient)) {
            Ok(splices) => {
                let new = spliced(text, &splices);
                let diff = diff_of("x", text, &splices);
                assert_eq!(applied(text, &diff), new, "the diff leads elsewhere");
                if let (
                    [
                        Edit {
                            place: EditTarget::Text { old, count },
                            new: wanted,
                        },
                    ],
                    false,
                ) = (&edits[..], text.contains(&b'\r'))
                {
                    assert_eq!(new, replaced(text, old, wanted), "{count:?}");
                }
            }
            Err(EditError::NoMatch { edit, .. }) => {
                let EditTarget::Text { old, .. } = &edits[edit].place else {
                    panic!("lines")
                };
                if !old.is_empty() && !text.contains(&b'\r') {
                    assert!(!text.windows(old.len()).any(|part| part == old.as_slice()));
                }
            }
            Err(EditError::Ambiguous { edit, found, lines }) => {
                assert!(edit < edits.len() && found > 1 && !lines.is_empty());
            }
            Err(EditError::NoLines { edit, lines }) => {
                let EditTarget::Lines { first, last } = edits[edit].place else {
                    panic!("text")
                };
                assert!(first == 0 || last > lines);
            }
            Err(EditError::TooMany { edit }) => assert!(edit < edits.len()),
            Err(EditError::Overlap {
                edits: [one, other],
                ..
            }) => assert!(one <= other && other < edits.len()),
            Err(EditError::Stopped(_)) => panic!("nothing stops it"),
        }
        let whole = Splice {
            range: 0..text.len(),
            text: input.into(),
        };
        let diff = diff_of("x", text, std::slice::from_ref(&whole));
        assert_eq!(applied(text, &diff), input);
    });
}

/// The whole diff.
fn diff_of(name: &str, text: &[u8], splices: &[Splice]) -> Vec<u8> {
    let new = spliced(text, splices);
    let mut patient = Patient;
    let mut pace = Pace::new(&mut patient);
    let diff = unified(name, [text, &new], splices, usize::MAX, &mut pace);
    let (diff, is_cut) = diff.unwrap();
    assert!(!is_cut);
    diff
}

/// Replaces every occurrence, from the left.
fn replaced(mut text: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    if old.is_empty() {
        return new.to_vec();
    }
    while !text.is_empty() {
        if let Some(rest) = text.strip_prefix(old) {
            out.extend_from_slice(new);
            text = rest;
        } else {
            out.push(text[0]);
            text = &text[1..];
        }
    }
    out
}

/// Applies a diff of this program, trusting nothing but its lines.
fn applied(old: &[u8], diff: &[u8]) -> Vec<u8> {
    let lines: Vec<_> = old.split_inclusive(|byte| *byte == b'\n').collect();
    let (mut at, mut new) = (0, Vec::new());
    let mut rest = diff
        .split_inclusive(|byte| *byte == b'\n')
        .skip(2)
        .peekable();
    while let Some(line) = rest.next() {
        let (mark, mut content) = (line[0], line[1..].to_vec());
        if rest.peek().is_some_and(|next| next.starts_with(b"\\")) {
            content.pop();
        }
        match mark {
            b'@' => {
                let text = std::str::from_utf8(line).unwrap();
                let range = text.split(' ').nth(1).unwrap().trim_start_matches('-');
                let (start, length) = range.split_once(',').unwrap_or((range, "1"));
                let start: usize = start.parse().unwrap();
                let start = if length == "0" { start } else { start - 1 };
                for line in &lines[at..start] {
                    new.extend_from_slice(line);
                }
                at = start;
            }
            b' ' => {
                assert_eq!(lines[at], content);
                new.extend_from_slice(&content);
                at += 1;
            }
            b'-' => {
                assert_eq!(lines[at], content);
                at += 1;
            }
            b'+' => new.extend_from_slice(&content),
            _ => {}
        }
    }
    for line in &lines[at..] {
        new.extend_from_slice(line);
    }
    new
}

#[test]
fn a_patch_is_read_in_bounded_memory_and_changes_what_its_lines_say() {
    let tokens: &[&[u8]] = &[
        b"diff --git a/f b/f\n",
        b"--- a/f\n",
        b"+++ b/f\n",
        b"@@ -1,2 +1,3 @@\n",
        b"@@ -0,0 +1 @@\n",
        b" a\n",
        b"-b\n",
        b"+c\n",
        b"\\ No newline at end of file\n",
        b"new file mode 100644\n",
        b"rename from f\n",
        b"rename to g\n",
        b"\"",
        b"\t",
        b"/dev/null",
        b"GIT binary patch\n",
        b"\n",
        b"\0",
    ];
    check("patch", tokens, |input| {
        let mut parts = input.splitn(2, |byte| *byte == 0);
        let (text, patch) = (
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default(),
        );
        let read = || parse(patch, 1, &mut Pace::new(&mut Patient));
        let Ok(files) = bounded(input, 512, read) else {
            return;
        };
        for file in &files {
            assert!(file.old.is_some() || file.new.is_some());
            let Ok((new, moves)) = apply(text, &file.hunks, &mut Pace::new(&mut Patient)) else {
                continue;
            };
            assert_eq!(moves.len(), file.hunks.len());
            let grown: isize = file.hunks.iter().map(super::patch::Hunk::grown).sum();
            assert_eq!(new.len().cast_signed() - text.len().cast_signed(), grown);
        }
        // What this program writes of a change, it reads, and applies to the same text.
        let splice = Splice {
            range: 0..text.len(),
            text: patch.into(),
        };
        let diff = diff_of("f", text, std::slice::from_ref(&splice));
        if !diff.is_empty() {
            let files = parse(&diff, 1, &mut Pace::new(&mut Patient)).unwrap();
            let applied = apply(text, &files[0].hunks, &mut Pace::new(&mut Patient));
            assert_eq!(applied.unwrap().0, patch);
        }
    });
}
