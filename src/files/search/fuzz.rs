//! A fuzz test of patterns: they match what git's own rules say, read off the pattern byte by byte.

use std::collections::HashMap;

use super::pattern::{Pattern, Syntax};
use crate::fuzz::{bounded, check};

#[test]
fn a_pattern_matches_what_gits_rules_say() {
    let tokens: &[&[u8]] = &[
        b"*",
        b"**",
        b"**/",
        b"/**",
        b"?",
        b"[",
        b"]",
        b"[a-c]",
        b"[!a]",
        b"[^b]",
        b"[[:alpha:]]",
        b"[:",
        b"\\",
        b"\\*",
        b"!",
        b"/",
        b"a",
        b"b",
        b"{a,b}",
        b"{",
        b",",
        b"}",
        b"\xff",
        b"\n",
        b"-",
    ];
    check("pattern", tokens, |input| {
        let mut parts = input.splitn(2, |byte| *byte == b'\n');
        let (text, path) = (
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default(),
        );
        if path.len() > 512 || text.len() > 512 {
            return;
        }
        for syntax in [Syntax::Gitignore, Syntax::Glob] {
            let Ok(pattern) = bounded(text, 256, || Pattern::new(text, syntax)) else {
                continue;
            };
            let plain = text.strip_prefix(b"!").unwrap_or(text);
            assert_eq!(pattern.is_negated, plain.len() < text.len());
            let braced = syntax == Syntax::Glob && plain.contains(&b'{');
            let is_path = !path.is_empty() && !path.starts_with(b"/") && !path.ends_with(b"/");
            if is_path && !path.contains(&0) && !plain.contains(&0) && !braced {
                for is_directory in [false, true] {
                    let expected = git_matches(plain, path, is_directory);
                    assert_eq!(
                        pattern.matches(path, is_directory),
                        expected,
                        "{is_directory}"
                    );
                }
            }
        }
    });
}

/// As `last_matching_pattern_from_list` of git's dir.c, for a pattern of the topmost directory.
fn git_matches(mut pattern: &[u8], path: &[u8], is_directory: bool) -> bool {
    if let [rest @ .., b'/'] = pattern {
        if !is_directory {
            return false;
        }
        pattern = rest;
    }
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap();
    let text = if pattern.contains(&b'/') { path } else { name };
    let pattern = pattern.strip_prefix(b"/").unwrap_or(pattern);
    Wild {
        pattern,
        text,
        known: HashMap::new(),
    }
    .matches(0, 0)
}

/// As git's wildmatch.c with `WM_PATHNAME`, with a memory of what it has found.
struct Wild<'a> {
    pattern: &'a [u8],
    text: &'a [u8],
    known: HashMap<(usize, usize), bool>,
}

impl Wild<'_> {
    fn matches(&mut self, at: usize, from: usize) -> bool {
        if let Some(known) = self.known.get(&(at, from)) {
            return *known;
        }
        let found = self.find(at, from);
        self.known.insert((at, from), found);
        found
    }

    fn find(&mut self, at: usize, from: usize) -> bool {
        let (pattern, text) = (self.pattern, self.text);
        let Some(&byte) = pattern.get(at) else {
            return from == text.len();
        };
        let next = text.get(from).copied();
        match byte {
            b'*' => {
                let stars = pattern[at..]
                    .iter()
                    .take_while(|byte| **byte == b'*')
                    .count();
                let after = at + stars;
                let is_start = at == 0 || pattern[at - 1] == b'/';
                let rest = &pattern[after..];
                let is_end = rest.is_empty() || rest[0] == b'/' || rest.starts_with(b"\\/");
                let crosses = stars > 1 && is_start && is_end;
                if crosses && rest.first() == Some(&b'/') && self.matches(after + 1, from) {
                    return true;
                }
                let reach = text[from..]
                    .iter()
                    .take_while(|byte| crosses || **byte != b'/');
                (from..=from + reach.count()).any(|end| self.matches(after, end))
            }
            b'?' => next.is_some_and(|next| next != b'/') && self.matches(at + 1, from + 1),
            b'\\' => {
                at + 1 < pattern.len()
                    && next == Some(pattern[at + 1])
                    && self.matches(at + 2, from + 1)
            }
            b'[' => match (class(&pattern[at + 1..], next), next) {
                (Some((true, length)), Some(next)) if next != b'/' => {
                    self.matches(at + 1 + length, from + 1)
                }
                _ => false,
            },
            byte => next == Some(byte) && self.matches(at + 1, from + 1),
        }
    }
}

/// Whether a byte is in a class, and the length of the class with its closing bracket; `None` if the
/// class is broken.
fn class(text: &[u8], byte: Option<u8>) -> Option<(bool, usize)> {
    let byte = byte.unwrap_or(b'/');
    let mut at = 0;
    let negated = matches!(text.first(), Some(b'!' | b'^'));
    at += usize::from(negated);
    let (mut previous, mut matched) = (0, false);
    loop {
        let mut own = *text.get(at)?;
        if own == b'\\' {
            at += 1;
            own = *text.get(at)?;
            matched |= own == byte;
        } else if own == b'-' && previous != 0 && text.get(at + 1).is_some_and(|next| *next != b']')
        {
            at += 1;
            own = *text.get(at)?;
            if own == b'\\' {
                at += 1;
                own = *text.get(at)?;
            }
            matched |= (previous..=own).contains(&byte);
            own = 0;
        } else if own == b'[' && text.get(at + 1) == Some(&b':') {
            let start = at + 2;
            let end = start + text[start..].iter().position(|byte| *byte == b']')?;
            if end > start && text[end - 1] == b':' {
                let character = char::from(byte);
                matched |= match &text[start..end - 1] {
                    b"alnum" => character.is_ascii_alphanumeric(),
                    b"alpha" => character.is_ascii_alphabetic(),
                    b"blank" => b" \t".contains(&byte),
                    b"cntrl" => byte < 32 || byte == 127,
                    b"digit" => character.is_ascii_digit(),
                    b"graph" => (33..127).contains(&byte),
                    b"lower" => character.is_ascii_lowercase(),
                    b"print" => (32..127).contains(&byte),
                    b"punct" => (33..127).contains(&byte) && !character.is_ascii_alphanumeric(),
                    b"space" => b" \t\n\x0b\x0c\r".contains(&byte),
                    b"upper" => character.is_ascii_uppercase(),
                    b"xdigit" => character.is_ascii_hexdigit(),
                    _ => return None,
                };
                at = end;
                own = 0;
            } else {
                matched |= byte == b'[';
            }
        } else {
            matched |= own == byte;
        }
        previous = own;
        at += 1;
        if *text.get(at)? == b']' {
            return Some((matched != negated, at + 1));
        }
    }
}
