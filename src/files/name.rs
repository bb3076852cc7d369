//! Paths as clients write them, and names as clients are shown them.
//!
//! A file name is any bytes; JSON has only text. Bytes that are not part of valid UTF-8 are shown as
//! characters of a private range, U+EF80 to U+EFFF for the bytes 0x80 to 0xFF, and such characters in a
//! client's path mean those bytes. Characters of that range in a real name are shown byte by byte in
//! the same way, so the mapping is reversible for every name.

use crate::error::{Error, Result};
use crate::spec::isolation::TEMPORARY;

/// U+EF80 stands for byte 0x80.
const RANGE_START: u32 = 0xEF00;

/// Longest path, in bytes. The kernel takes 4096 at a time; what a walk finds may have a longer one.
const MAX_PATH_BYTES: usize = 256 * 1024;

/// The tree of a workspace that a path is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tree {
    /// That of the directory which relative paths begin at.
    Main,
    /// That of [`TEMPORARY`], in a sandbox with one of its own.
    Temporary,
}

/// A path from a client: not empty, without NUL, and not so long that its copies count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePath {
    tree: Tree,
    /// From the beginning of the tree.
    bytes: Vec<u8>,
    shown: String,
}

impl FilePath {
    /// Takes a path as decoded from a request.
    ///
    /// # Errors
    /// `Invalid` if it is empty, too long or has a NUL.
    pub fn new(decoded: &[u8]) -> Result<Self> {
        Self::check_length(decoded)?;
        Self::checked(Tree::Main, read(decoded))
    }

    fn checked(tree: Tree, bytes: Vec<u8>) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::invalid("the path is empty; / is the root"));
        }
        if bytes.contains(&0) {
            return Err(Error::invalid(
                "the path has a NUL character, which no file name can have",
            ));
        }
        Ok(Self::in_tree(tree, bytes))
    }

    /// A path in a tree, which is not empty and has no NUL.
    fn in_tree(tree: Tree, bytes: Vec<u8>) -> Self {
        let shown = match (tree, &bytes[..]) {
            (Tree::Main, bytes) => show(bytes),
            (Tree::Temporary, b".") => TEMPORARY.to_owned(),
            (Tree::Temporary, bytes) => format!("{TEMPORARY}/{}", show(bytes)),
        };
        Self { tree, bytes, shown }
    }

    /// The path of what is `below` the beginning of a tree, or of that beginning if nothing is. The bytes are those of
    /// names in another path.
    pub fn from_start(tree: Tree, below: &[u8]) -> Self {
        let start = below.iter().position(|byte| *byte != b'/');
        let bytes = start.map_or(&b"."[..], |start| &below[start..]);
        Self::in_tree(tree, bytes.to_vec())
    }

    /// Checks the length of a path, before copies are made of it.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check_length(decoded: &[u8]) -> Result<()> {
        if decoded.len() > MAX_PATH_BYTES {
            let text = "the path is longer than 262144 bytes; a file name has 255, and the kernel takes 4096 of a path";
            return Err(Error::invalid(text));
        }
        Ok(())
    }

    /// How many bytes of memory it takes, without the value itself.
    pub fn size(&self) -> usize {
        self.bytes.len() + self.shown.len()
    }

    /// The tree that it is in.
    pub(super) fn tree(&self) -> Tree {
        self.tree
    }

    /// The path as the kernel takes it, from the beginning of its tree.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The same path without slashes at its end; the root stays the root.
    pub fn without_trailing_slashes(&self) -> Self {
        let last = self.bytes.iter().rposition(|byte| *byte != b'/');
        Self::in_tree(self.tree, self.bytes[..=last.unwrap_or(0)].to_vec())
    }

    /// The path of a name, or of a relative path, in this directory. Its bytes are those of the names.
    ///
    /// # Errors
    /// As [`FilePath::new`].
    pub fn child(&self, relative: &[u8]) -> Result<Self> {
        let bytes = match &self.bytes[..] {
            b"." => relative.to_vec(),
            [.., b'/'] => [&self.bytes, relative].concat(),
            _ => [&self.bytes, &b"/"[..], relative].concat(),
        };
        Self::check_length(&bytes)?;
        Self::checked(self.tree, bytes)
    }

    /// The directories on the way to it from the beginning of its tree, the innermost first.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> {
        let mut path = &self.bytes[..];
        std::iter::from_fn(move || {
            let slash = memchr::memrchr(b'/', path).filter(|slash| *slash > 0)?;
            path = &path[..slash];
            Some(Self::in_tree(self.tree, path.to_vec()))
        })
    }

    /// The path of an entry of this directory, as clients are shown it.
    pub fn join(&self, shown_name: &str) -> String {
        let slash = if self.shown.ends_with('/') { "" } else { "/" };
        format!("{}{slash}{shown_name}", self.shown)
    }

    /// The path of something below this directory, as clients are shown it; below `.` without that.
    pub fn below(&self, shown: &str) -> String {
        if self.shown == "." {
            shown.to_owned()
        } else {
            self.join(shown)
        }
    }

    /// The last component without trailing slashes; `/` for the root.
    pub fn name(&self) -> &[u8] {
        let mut components = self.bytes.split(|byte| *byte == b'/').rev();
        components
            .find(|component| !component.is_empty())
            .unwrap_or(b"/")
    }
}

impl std::fmt::Display for FilePath {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.shown)
    }
}

/// The directory of a path and the last name in it; `None` if the path ends in the root, `.` or `..`.
pub(super) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = path.iter().rposition(|byte| *byte != b'/')? + 1;
    let start = path[..end]
        .iter()
        .rposition(|byte| *byte == b'/')
        .map_or(0, |slash| slash + 1);
    let name = &path[start..end];
    if name == b"." || name == b".." {
        return None;
    }
    Some((if start == 0 { b"." } else { &path[..start] }, name))
}

/// A name as clients are shown it.
pub fn show(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if is_stand_in(character) {
                let mut encoded = [0; 4];
                character
                    .encode_utf8(&mut encoded)
                    .bytes()
                    .for_each(|byte| text.push(stand_in(byte)));
            } else {
                text.push(character);
            }
        }
        chunk
            .invalid()
            .iter()
            .for_each(|byte| text.push(stand_in(*byte)));
    }
    text
}

/// The bytes that a name or path from a client stands for.
fn read(shown: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(shown.len());
    for chunk in shown.utf8_chunks() {
        for character in chunk.valid().chars() {
            if is_stand_in(character) {
                bytes.push((u32::from(character) & 0xff) as u8);
            } else {
                bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            }
        }
        bytes.extend_from_slice(chunk.invalid());
    }
    bytes
}

fn stand_in(byte: u8) -> char {
    // Every value of the range is a character.
    char::from_u32(RANGE_START + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn is_stand_in(character: char) -> bool {
    ('\u{EF80}'..='\u{EFFF}').contains(&character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_shown_as_it_is() {
        for name in [
            "plain",
            "a b+c%25&d=e#",
            "\u{2603}\u{1F600}",
            "back\\slash\nnewline",
            "",
        ] {
            assert_eq!(show(name.as_bytes()), name);
            assert_eq!(read(name.as_bytes()), name.as_bytes());
        }
    }

    #[test]
    fn every_name_comes_back_as_it_was() {
        let mut names: Vec<Vec<u8>> = vec![
            b"caf\xe9".to_vec(),
            b"\xff\xfe".to_vec(),
            b"\xe2\x98".to_vec(),
            "\u{EF80}\u{EFFF}".as_bytes().to_vec(),
            b"\xee\xbe".to_vec(),
        ];
        // Every pair of high bytes beside a stand-in.
        for first in 0x80..=0xff_u8 {
            for second in [0x80, 0xa9, 0xbe, 0xbf, 0xc3, 0xee, 0xff_u8] {
                names.push(
                    [
                        &[first, second],
                        "\u{EFEE}".as_bytes(),
                        &[second, b'a', first],
                    ]
                    .concat(),
                );
            }
        }
        for name in names {
            let shown = show(&name);
            assert_eq!(read(shown.as_bytes()), name, "{shown:?}");
        }
    }

    #[test]
    fn splits_off_the_last_name() {
        assert_eq!(split(b"/a/b"), Some((&b"/a/"[..], &b"b"[..])));
        assert_eq!(split(b"/a"), Some((&b"/"[..], &b"a"[..])));
        assert_eq!(split(b"a//"), Some((&b"."[..], &b"a"[..])));
        for path in ["/", "//", ".", "..", "/a/..", "a/./"] {
            assert_eq!(split(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn a_path_is_named_by_its_last_component() {
        for (path, name) in [
            ("/a/b", "b"),
            ("a//", "a"),
            ("/", "/"),
            ("//", "/"),
            (".", "."),
            ("/a/..", ".."),
            ("a/./", "."),
        ] {
            assert_eq!(
                FilePath::new(path.as_bytes()).unwrap().name(),
                name.as_bytes(),
                "{path}"
            );
        }
    }

    #[test]
    fn refuses_what_names_no_file() {
        assert!(FilePath::new(b"").is_err());
        assert!(FilePath::new(b"a\0b").is_err());
    }
}
