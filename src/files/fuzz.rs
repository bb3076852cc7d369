//! Fuzz tests of names, which must come back as they were shown, and of paths, which must not lead
//! out of a root.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, fstat, fstatat};

use super::beneath::Resolver;
use super::entry::{DIRECTORY, FileKind};
use super::name::{FilePath, show, split};
use crate::fuzz::{bounded, check};

#[test]
fn a_name_comes_back_as_it_was_shown() {
    let tokens: &[&[u8]] = &[
        b"/",
        b"//",
        b".",
        b"..",
        b"/./",
        b"/../",
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xee\xbe\x80",
        b"\xee\xbf\xbf",
        b"\xee\xbd\xbf",
        b"\xef\x80\x80",
        b"\xee\xbe",
        b"\xf0\x9f\x98\x80",
        b"a",
    ];
    check("name", tokens, |input| {
        // The text that the API shows for these bytes.
        let shown = bounded(input, 16, || show(input));
        assert_eq!(shown, shown_by_bytes(input));
        let path = bounded(input, 64, || FilePath::new(input));
        let meant = meant_by(input);
        let Ok(path) = path else {
            assert!(meant.is_empty() || meant.contains(&0));
            return;
        };
        assert!(!meant.is_empty() && !meant.contains(&0));
        assert_eq!(path.bytes(), meant);
        if !input.contains(&0) {
            let again = FilePath::new(shown.as_bytes()).unwrap();
            assert_eq!(again.bytes(), input, "shown and sent back");
        }
        assert_eq!(FilePath::new(path.to_string().as_bytes()).unwrap(), path);
        let inside = FilePath::new(path.join(&show(b"\xff")).as_bytes()).unwrap();
        assert_eq!(inside.name(), b"\xff");

        let components: Vec<_> = meant
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
            .collect();
        let last = components.last().copied().unwrap_or(b"/");
        assert_eq!(path.name(), last);
        match split(&meant) {
            None => assert!([&b"/"[..], b".", b".."].contains(&last)),
            Some((directory, name)) => {
                assert_eq!(name, last);
                assert!(name != b"." && name != b".." && !name.contains(&b'/'));
                let above: Vec<_> = directory
                    .split(|byte| *byte == b'/')
                    .filter(|name| !name.is_empty())
                    .collect();
                let is_here = directory == b"." && components.len() == 1;
                assert!(is_here || above == components[..components.len() - 1]);
                assert_eq!(directory.starts_with(b"/"), meant.starts_with(b"/"));
            }
        }
    });
}

/// The length of the character that begins here, if one does.
fn character(bytes: &[u8]) -> Option<&str> {
    (1..=bytes.len().min(4)).find_map(|length| std::str::from_utf8(&bytes[..length]).ok())
}

fn is_stand_in(character: &str) -> bool {
    ("\u{EF80}"..="\u{EFFF}").contains(&character)
}

fn shown_by_bytes(mut bytes: &[u8]) -> String {
    let mut shown = String::new();
    while let Some(first) = bytes.first() {
        let taken = match character(bytes) {
            Some(whole) if !is_stand_in(whole) => {
                shown += whole;
                whole.len()
            }
            _ => {
                shown.push(char::from_u32(0xEF00 + u32::from(*first)).unwrap());
                1
            }
        };
        bytes = &bytes[taken..];
    }
    shown
}

fn meant_by(mut bytes: &[u8]) -> Vec<u8> {
    let mut meant = Vec::new();
    while !bytes.is_empty() {
        let taken = match character(bytes) {
            Some(stand_in) if is_stand_in(stand_in) => {
                meant.push(
                    u8::try_from(u32::from(stand_in.chars().next().unwrap()) - 0xEF00).unwrap(),
                );
                stand_in.len()
            }
            other => {
                let length = other.map_or(1, str::len);
                meant.extend_from_slice(&bytes[..length]);
                length
            }
        };
        bytes = &bytes[taken..];
    }
    meant
}

/// Device and inode.
type Identity = (u64, u64);

/// A node of the tree.
enum Node {
    Directory(Identity, BTreeMap<Vec<u8>, Node>),
    Other(Identity, FileKind),
}

impl Node {
    fn identity(&self) -> Identity {
        match self {
            Self::Directory(identity, _) | Self::Other(identity, _) => *identity,
        }
    }

    /// Reads the node at `path`, with everything below it.
    fn read(path: &Path) -> Self {
        let status = fstatat(nix::fcntl::AT_FDCWD, path, AtFlags::AT_SYMLINK_NOFOLLOW).unwrap();
        let identity = (status.st_dev, status.st_ino);
        match FileKind::of(&status) {
            FileKind::Directory => {
                let entries = fs::read_dir(path).unwrap().map(|entry| {
                    let entry = entry.unwrap();
                    (
                        entry.file_name().into_encoded_bytes(),
                        Self::read(&entry.path()),
                    )
                });
                Self::Directory(identity, entries.collect())
            }
            kind => Self::Other(identity, kind),
        }
    }
}

/// A tree with nodes of every kind, and a file outside it. Removed when dropped.
struct Tree {
    base: PathBuf,
    directory: OwnedFd,
    node: Node,
}

impl Tree {
    fn new() -> Self {
        let base = std::env::temp_dir().join(format!("sbx-fuzz-{}", std::process::id()));
        fs::create_dir_all(base.join("home/a/b/c")).unwrap();
        fs::create_dir_all(base.join("home/d")).unwrap();
        fs::create_dir_all(base.join("home").join("n".repeat(255))).unwrap();
        fs::create_dir_all(base.join("a/b")).unwrap();
        for file in ["f", "home/f", "home/a/f", "home/a/b/f", "home/d/f", "a/f"] {
            fs::write(base.join(file), file).unwrap();
        }
        for (link, target) in [
            ("l", "a"),
            ("a/l", "../f"),
            ("a/b/l", "../.."),
            ("o", "../a"),
            ("a/o", "../../f"),
            ("d/o", "/"),
            ("d/l", "l"),
            ("d/m", "/proc/self/cwd"),
            ("d/x", "nowhere"),
        ] {
            symlink(target, base.join("home").join(link)).unwrap();
        }
        nix::unistd::mkfifo(&base.join("home/p"), Mode::from_bits_truncate(0o600)).unwrap();
        nix::unistd::mkfifo(&base.join("home/a/p"), Mode::from_bits_truncate(0o600)).unwrap();
        let home = base.join("home");
        Self {
            directory: File::open(&home).unwrap().into(),
            node: Node::read(&home),
            base,
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.base);
    }
}

/// The flags that the file API opens paths with.
const FLAGS: [OFlag; 7] = [
    OFlag::O_PATH,
    OFlag::O_PATH.union(OFlag::O_NOFOLLOW),
    DIRECTORY,
    DIRECTORY.union(OFlag::O_NOFOLLOW),
    OFlag::O_RDONLY
        .union(OFlag::O_NONBLOCK)
        .union(OFlag::O_NOCTTY),
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY),
    OFlag::O_RDONLY
        .union(OFlag::O_DIRECTORY)
        .union(OFlag::O_NOFOLLOW),
];

#[test]
fn a_path_leads_where_its_names_say_and_never_out() {
    let tokens: &[&[u8]] = &[
        b"/",
        b"//",
        b"/.",
        b"/..",
        b"../",
        b"./",
        b"a/",
        b"b/",
        b"c",
        b"d/",
        b"f",
        b"l",
        b"o",
        b"p",
        b"m",
        b"x",
        b"/a/b/c",
        b"/a/l",
        b"/d/m",
        b"/o/",
        b"a/../",
        b"\0",
        b"home",
        b"/../../a/f",
    ];
    thread_local! {
        static TREE: Tree = Tree::new();
    }
    check("beneath", tokens, |input| {
        TREE.with(|tree| {
            let (flags, path) = input.split_first().unwrap_or((&0, &[]));
            let flags = FLAGS[usize::from(*flags) % FLAGS.len()];
            // `FilePath` refuses paths with a NUL.
            if path.contains(&0) {
                return;
            }
            let expected = expected(&tree.node, path, flags);
            for resolver in [Resolver::Kernel, Resolver::Walk] {
                let found = resolver.open(&tree.directory, path, flags).map(|opened| {
                    let status = fstat(&opened).unwrap();
                    (status.st_dev, status.st_ino)
                });
                assert_eq!(found, expected, "{resolver:?} {flags:?}");
            }
        });
    });
}

/// What a path names, computed from the names alone.
fn expected(root: &Node, path: &[u8], flags: OFlag) -> Result<Identity, Errno> {
    let inside = path.iter().skip_while(|byte| **byte == b'/').count();
    if inside >= 4096 {
        return Err(Errno::ENAMETOOLONG);
    }
    let ends_in_slash = path.ends_with(b"/") && inside > 0;
    let mut way = vec![root];
    let mut names = path
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .peekable();
    while let Some(name) = names.next() {
        let Some(Node::Directory(_, entries)) = way.last() else {
            return Err(Errno::ENOTDIR);
        };
        match name {
            b"." => {}
            b".." if way.len() == 1 => return Err(Errno::EXDEV),
            b".." => drop(way.pop()),
            _ if name.len() > 255 => return Err(Errno::ENAMETOOLONG),
            name => way.push(entries.get(name).ok_or(Errno::ENOENT)?),
        }
        if let Some(Node::Other(_, FileKind::Link)) = way.last() {
            let is_end = names.peek().is_none() && !ends_in_slash;
            if !is_end || !flags.contains(OFlag::O_NOFOLLOW) {
                return Err(Errno::ELOOP);
            }
        }
    }
    let last = way[way.len() - 1];
    let is_directory = matches!(last, Node::Directory(..));
    if !is_directory && (ends_in_slash || flags.contains(OFlag::O_DIRECTORY)) {
        return Err(Errno::ENOTDIR);
    }
    Ok(last.identity())
}
