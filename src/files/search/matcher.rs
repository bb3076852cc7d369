//! Ordered lists of patterns, of which the last that matches decides.

use std::sync::Arc;

use super::pattern::{Pattern, Syntax};
use crate::error::{Error, Result};

/// Most patterns of a list from a client.
const MAX_PATTERNS: usize = 1000;

/// Most memory of such a list. It bounds the time for a path, too.
const MAX_LIST_BYTES: usize = 512 * 1024;

/// What a list says about a path that one of its patterns matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The last pattern that matches is a plain one.
    Matched,
    /// The last pattern that matches begins with `!`.
    Excepted,
}

/// A list of patterns in the order in which they were given. Clones share it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matcher(Arc<Vec<Pattern>>);

impl Matcher {
    /// The patterns of a client, with `{a,b}`. Who keeps them charges their [size](Self::size).
    ///
    /// # Errors
    /// `Invalid`, with the pattern that cannot be read; there are too many.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a [u8]>) -> Result<Self> {
        let (mut list, mut size) = (Vec::new(), 0);
        for text in patterns {
            let pattern = Pattern::new(text, Syntax::Glob).map_err(|why| {
                let text = crate::files::name::show(text);
                Error::invalid(format_args!("the pattern {text:?} cannot be used: {why}"))
            })?;
            size += pattern.size();
            list.push(pattern);
            if list.len() > MAX_PATTERNS || size > MAX_LIST_BYTES {
                let why = format!(
                    "the patterns are more than {MAX_PATTERNS}, or take more than {MAX_LIST_BYTES} bytes"
                );
                return Err(Error::invalid(why));
            }
        }
        Ok(Self(Arc::new(list)))
    }

    /// The patterns in the content of a `.gitignore` file, the first with so many states together.
    pub fn of_file(content: &[u8], mut states: usize) -> Self {
        let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
        let patterns = content.split(|byte| *byte == b'\n').filter_map(|line| {
            let line = without_trailing_blanks(line.strip_suffix(b"\r").unwrap_or(line));
            if line.is_empty() || line.starts_with(b"#") {
                return None;
            }
            Pattern::new(line, Syntax::Gitignore).ok()
        });
        let first = patterns.map_while(|pattern| {
            states = states.checked_sub(pattern.states())?;
            Some(pattern)
        });
        Self(Arc::new(first.collect()))
    }

    /// Whether there are no patterns.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a pattern is compared with whole paths, so that it may say something else of a name that is moved.
    pub fn has_paths(&self) -> bool {
        self.0.iter().any(|pattern| !pattern.is_name)
    }

    /// Whether all patterns begin with `!`: such a list takes out, and picks nothing.
    pub fn only_excepts(&self) -> bool {
        self.0.iter().all(|pattern| pattern.is_negated)
    }

    /// What the list says about a path, which is relative and has no slash at either end; `None` if no
    /// pattern matches it. The directories above are not considered.
    pub fn decide(&self, path: &[u8], is_directory: bool) -> Option<Verdict> {
        let mut patterns = self.0.iter().rev();
        let last = patterns.find(|pattern| pattern.matches(path, is_directory))?;
        Some(if last.is_negated {
            Verdict::Excepted
        } else {
            Verdict::Matched
        })
    }

    /// Whether a path or a directory above it is matched. As in git, nothing below a directory that is
    /// matched can be excepted.
    pub fn covers(&self, path: &[u8], is_directory: bool) -> bool {
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let mut ends: Vec<usize> = slashes.map(|(slash, _)| slash).collect();
        ends.push(path.len());
        // What the last pattern says of each.
        let mut said = vec![None; ends.len()];
        let mut left = said.len();
        for pattern in self.0.iter().rev() {
            pattern.matches_up_to(path, &ends, is_directory, &mut |place| {
                left -= usize::from(said[place].is_none());
                said[place].get_or_insert(!pattern.is_negated);
            });
            if left == 0 {
                break;
            }
        }
        said.contains(&Some(true))
    }

    /// How many states its patterns go through for each byte of a path, at most.
    pub(super) fn states(&self) -> usize {
        self.0.iter().map(Pattern::states).sum()
    }

    /// About how many bytes of memory it takes.
    pub fn size(&self) -> usize {
        self.0.iter().map(Pattern::size).sum()
    }
}

/// A line without the spaces at its end, unless a backslash precedes them.
fn without_trailing_blanks(line: &[u8]) -> &[u8] {
    let (mut end, mut at) = (0, 0);
    while at < line.len() {
        match line[at] {
            b' ' => at += 1,
            b'\\' => {
                at = (at + 2).min(line.len());
                end = at;
            }
            _ => {
                at += 1;
                end = at;
            }
        }
    }
    &line[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_pattern_decides() {
        let list = Matcher::of_file(
            b"\xef\xbb\xbf# all\n*.log\n!keep.log\r\n\n\\#x  \ny\\ \n",
            1000,
        );
        for (path, expected) in [
            ("a/b.log", Some(Verdict::Matched)),
            ("a/keep.log", Some(Verdict::Excepted)),
            ("#x", Some(Verdict::Matched)),
            ("# all", None),
            ("y ", Some(Verdict::Matched)),
            ("y", None),
        ] {
            assert_eq!(list.decide(path.as_bytes(), false), expected, "{path}");
        }
        assert!(!list.only_excepts());
    }

    #[test]
    fn a_file_has_so_many_states_and_no_more() {
        let list = Matcher::of_file(b"a?\n*b*c\n?d\nplain\n", 7);
        let says = |path: &[u8]| list.decide(path, false) == Some(Verdict::Matched);
        // The first two have six states. The third does not fit, and what follows may make exceptions of it.
        let found = [&b"ax"[..], b"xbxc", b"xd", b"plain"].map(says);
        assert_eq!(found, [true, true, false, false]);
        assert_eq!(list.states(), 6);
    }

    #[test]
    fn a_path_below_many_directories_is_covered_as_each_of_them_says() {
        let lists = [
            &["a/*/c", "!a/b/c"][..],
            &["**/d/", "!x", "x/d"],
            &["*"],
            &["a/**", "!a/b"],
            &["b?", "!bd", "a/bd/c/"],
            &["{a,b}/c", "c/*"],
        ];
        let names = ["a", "b", "c", "d", "x", "bd", "bx"];
        let mut paths: Vec<String> = vec![String::new()];
        for _ in 0..3 {
            let longer = |path: &String| names.map(|name| format!("{path}/{name}"));
            paths.extend(paths.iter().flat_map(longer).collect::<Vec<_>>());
        }
        for list in lists {
            let own = Matcher::new(list.iter().map(|text| text.as_bytes())).unwrap();
            for path in paths.iter().filter_map(|path| path.strip_prefix('/')) {
                for is_directory in [false, true] {
                    let slashes = path.match_indices('/').map(|(slash, _)| slash);
                    let mut above = slashes.map(|slash| &path.as_bytes()[..slash]);
                    let matched = Some(Verdict::Matched);
                    let expected = above.any(|path| own.decide(path, true) == matched)
                        || own.decide(path.as_bytes(), is_directory) == matched;
                    let found = own.covers(path.as_bytes(), is_directory);
                    assert_eq!(found, expected, "{list:?} {path} {is_directory}");
                }
            }
        }
    }

    #[test]
    fn a_directory_covers_what_is_in_it() {
        let list = Matcher::new([&b"build/"[..], b"!build/keep"]).unwrap();
        assert!(list.covers(b"build", true) && !list.covers(b"build", false));
        assert!(list.covers(b"a/build/x/y", false) && list.covers(b"build/keep", false));
        assert!(!list.covers(b"a/builds/x", false));
        let error = Matcher::new([&b"a"[..], b"[b"]).unwrap_err();
        assert!(error.to_string().contains("[b"), "{error}");
        assert!(Matcher::new(vec![&b"a"[..]; MAX_PATTERNS]).is_ok());
        assert!(Matcher::new(vec![&b"a"[..]; MAX_PATTERNS + 1]).is_err());
    }

    #[test]
    fn a_list_takes_little_memory_and_shares_it_with_its_clones() {
        let long = "**/".repeat(1364) + "x";
        let error = Matcher::new(vec![long.as_bytes(); 1000]).unwrap_err();
        assert_eq!(error.kind(), crate::error::Kind::Invalid);
        let list = Matcher::new(vec![long.as_bytes(); 4]).unwrap();
        assert!((4 * long.len()..MAX_LIST_BYTES).contains(&list.size()));
        assert!(Arc::ptr_eq(&list.0, &list.clone().0));
    }
}
