//! Tests of walks, with batches and levels so small that every path through the code is taken.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::unistd::{Gid, Uid};

use super::{Filter, Matcher, Visit};
use crate::files::entry::{DIRECTORY, FileKind};
use crate::files::name::FilePath;
use crate::files::root::Root;
use crate::limits::ledger::{Budget, Ledger};
use crate::sys::User;

/// A directory that is removed on drop.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sbx-walk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn add(&self, path: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        File::create(path).unwrap();
    }

    /// The place as the root of a machine, and as a home by both ways to resolve paths.
    fn roots(&self) -> [Root; 3] {
        use crate::files::beneath::Resolver;
        let open = || nix::fcntl::open(&self.0, DIRECTORY, nix::sys::stat::Mode::empty()).unwrap();
        let owner = User {
            uid: Uid::effective().as_raw(),
            gid: Gid::effective().as_raw(),
        };
        let beneath = |resolver| Root::beneath(open(), owner, resolver);
        let machine = Root::machine(&self.0).unwrap();
        [machine, beneath(Resolver::Kernel), beneath(Resolver::Walk)]
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::process::Command::new("rm")
            .arg("-rf")
            .arg(&self.0)
            .status();
    }
}

fn ledger() -> Arc<Ledger> {
    Budget::new(1 << 30).whole()
}

fn walked(root: &Root, filter: &Filter, after: Option<&[u8]>) -> Vec<String> {
    let path = FilePath::new(b".").unwrap();
    let mut walk = root.walk(&path, filter.clone(), after, &ledger()).unwrap();
    let mut found = Vec::new();
    while let Some(visit) = walk.next().unwrap() {
        found.push(match visit {
            Visit::Entry(entry) => String::from_utf8(entry.path.to_vec()).unwrap(),
            Visit::Passed => continue,
            Visit::Unreadable(path, errno) => format!("{errno:?} {}", path.escape_ascii()),
        });
    }
    found
}

/// The same by recursion.
fn expected(directory: &Path, prefix: &str, into: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names {
        let path = format!("{prefix}{name}");
        into.push(path.clone());
        let inside = directory.join(&name);
        if inside.symlink_metadata().unwrap().is_dir() {
            expected(&inside, &format!("{path}/"), into);
        }
    }
}

#[test]
fn a_walk_tells_every_name_once_in_order_and_continues_anywhere() {
    let place = TestDirectory::new("order");
    for number in 0..100 {
        place.add(&format!("many/{number}"));
    }
    for path in [
        "a.b",
        "a/x",
        "a/y/z/1/2/3/4/5/6",
        "a/y/z.1",
        "many/50x/7/8",
        "b/c",
        ".h/i",
    ] {
        place.add(path);
    }
    fs::create_dir(place.0.join("empty")).unwrap();
    symlink("many", place.0.join("link")).unwrap();
    let mut all = Vec::new();
    expected(&place.0, "", &mut all);
    assert!(all.contains(&"link".to_owned()));
    for root in place.roots() {
        let filter = Filter::default();
        assert_eq!(walked(&root, &filter, None), all);
        for (index, after) in all.iter().enumerate() {
            let rest = walked(&root, &filter, Some(after.as_bytes()));
            assert_eq!(rest, all[index + 1..], "after {after}");
        }
        for (after, next) in [
            ("many/50x/7/8/9", "many/51"),
            ("a/y/z/", "a/y/z/1"),
            ("many/1/2", "many/10"),
            ("a/y/zz", "a.b"),
            ("zz/1", ""),
        ] {
            let rest = walked(&root, &filter, Some(after.as_bytes()));
            let first = rest.first().map_or("", String::as_str);
            assert_eq!(first, next, "after {after}");
        }
    }
}

#[test]
fn filters_leave_out_what_they_say() {
    let place = TestDirectory::new("filters");
    for path in [
        "keep.txt",
        "a.log",
        ".hidden/x",
        "target/x/y",
        "src/a.rs",
        "src/keep.log",
        "src/deep/b.log",
        "vendor/c.rs",
        "other/build/d",
        "build/d",
    ] {
        place.add(path);
    }
    fs::write(
        place.0.join(".gitignore"),
        "*.log\n/build\nvendor/\n!vendor/c.rs\n",
    )
    .unwrap();
    fs::write(place.0.join("src/.gitignore"), "!keep.log\n").unwrap();
    fs::write(place.0.join(".ignore"), "target\n").unwrap();
    let list =
        |patterns: &[&str]| Matcher::new(patterns.iter().map(|text| text.as_bytes())).unwrap();
    for root in place.roots() {
        assert_eq!(
            walked(&root, &Filter::of_search(), None),
            [
                "keep.txt",
                "other",
                "other/build",
                "other/build/d",
                "src",
                "src/a.rs",
                "src/deep",
                "src/keep.log"
            ]
        );
        let filter = Filter {
            include: list(&["src", "*.txt", "!src/deep"]),
            exclude: list(&["*.rs"]),
            ..Filter::default()
        };
        assert_eq!(
            walked(&root, &filter, None),
            [
                ".hidden",
                "build",
                "keep.txt",
                "other",
                "other/build",
                "src",
                "src/.gitignore",
                "src/deep",
                "src/deep/b.log",
                "src/keep.log",
                "target",
                "target/x",
                "vendor"
            ]
        );
    }
}

/// Levels of a tree that no path reaches to the bottom of.
const DEPTH: usize = 3000;

#[test]
fn a_deep_tree_needs_few_descriptors_and_no_stack() {
    let place = TestDirectory::new("deep");
    let mut current = nix::fcntl::open(&place.0, DIRECTORY, nix::sys::stat::Mode::empty()).unwrap();
    for _ in 0..DEPTH {
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o777);
        nix::sys::stat::mkdirat(&current, "d", mode).unwrap();
        nix::sys::stat::mkdirat(&current, "e", mode).unwrap();
        current =
            nix::fcntl::openat(&current, "d", DIRECTORY, nix::sys::stat::Mode::empty()).unwrap();
    }
    for root in place.roots() {
        let path = FilePath::new(b"/").unwrap();
        let path = if root.sizes_links_by_target {
            FilePath::new(b".").unwrap()
        } else {
            path
        };
        let mut walk = root
            .walk(&path, Filter::default(), None, &ledger())
            .unwrap();
        let (mut count, mut deepest) = (0, 0);
        while let Some(visit) = walk.next().unwrap() {
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Passed => continue,
                Visit::Unreadable(..) => panic!("unreadable"),
            };
            assert_eq!(found.kind, FileKind::Directory);
            deepest = deepest.max(found.path.len());
            count += 1;
        }
        assert_eq!((count, deepest), (2 * DEPTH, 2 * DEPTH - 1));
    }
}

#[test]
fn what_is_moved_away_meanwhile_ends_only_itself() {
    let place = TestDirectory::new("moved");
    place.add("a/b/c/d/e/f/g/h/i/j/k");
    place.add("a/b/z");
    place.add("y");
    for root in place.roots() {
        let found = walked_with(&root, |path| {
            if path.ends_with(b"/k") {
                // Above it are open directories, and closed ones that are found by name.
                fs::rename(place.0.join("a/b/c/d/e/f"), place.0.join("f")).unwrap();
                fs::create_dir(place.0.join("a/b/c/d/e/f")).unwrap();
            }
            None
        });
        let is_unreadable = |line: &String| line.contains(' ');
        assert!(!found.iter().any(is_unreadable), "{found:?}");
        assert_eq!(found.last().unwrap(), "y");
        assert!(found.contains(&"a/b/z".to_owned()), "{found:?}");
        fs::remove_dir(place.0.join("a/b/c/d/e/f")).unwrap();
        fs::rename(place.0.join("f"), place.0.join("a/b/c/d/e/f")).unwrap();
    }
}

#[test]
fn an_unreadable_directory_is_told_and_passed() {
    let place = TestDirectory::new("unreadable");
    for path in ["a/x", "b/x", "c/x"] {
        place.add(path);
    }
    fs::set_permissions(place.0.join("b"), fs::Permissions::from_mode(0o000)).unwrap();
    let root = Root::machine(&place.0).unwrap();
    let walk = || walked(&root, &Filter::default(), None);
    let found = if Uid::effective().is_root() {
        let nobody = User {
            uid: 65534,
            gid: 65534,
        };
        let _acting = crate::sys::ActingAs::new(nobody).unwrap();
        walk()
    } else {
        walk()
    };
    assert_eq!(found, ["a", "a/x", "b", "EACCES b", "c", "c/x"]);
}

/// Walks, and does something to the tree or the walk after each entry.
fn walked_with(root: &Root, mut after: impl FnMut(&[u8]) -> Option<Errno>) -> Vec<String> {
    let path = FilePath::new(b".").unwrap();
    let mut walk = root
        .walk(&path, Filter::default(), None, &ledger())
        .unwrap();
    let mut found = Vec::new();
    while let Some(visit) = walk.next().unwrap() {
        let (line, failing) = match visit {
            Visit::Passed => continue,
            Visit::Entry(entry) => (entry.path.escape_ascii().to_string(), after(entry.path)),
            Visit::Unreadable(path, errno) => (format!("{errno:?} {}", path.escape_ascii()), None),
        };
        found.push(line);
        walk.failing = failing.or(walk.failing);
    }
    found
}

#[test]
fn a_directory_that_cannot_be_read_on_is_told() {
    let place = TestDirectory::new("read-on");
    for number in 10..60 {
        place.add(&format!("many/{number}"));
    }
    place.add("z");
    for root in place.roots() {
        let failing = |errno| walked_with(&root, |path| (path == b"many/10").then_some(errno));
        let found = failing(Errno::EIO);
        assert_eq!(found[..2], ["many", "many/10"]);
        assert_eq!(found[found.len() - 2..], ["EIO many", "z"]);
        // It is not there any more.
        let found = failing(Errno::ENOENT);
        assert!(
            found.len() < 50 && found.ends_with(&["z".to_owned()]),
            "{found:?}"
        );
        assert!(!found.iter().any(|line| line.contains(' ')), "{found:?}");
    }
}

#[test]
fn a_deep_directory_that_cannot_be_read_hides_none_beside_it() {
    let place = TestDirectory::new("beside");
    place.add("a/b/c/d/e/f/g/x");
    place.add("a/b/c/d/e/f/h");
    for root in place.roots() {
        let found = walked_with(&root, |path| path.ends_with(b"/g").then_some(Errno::EIO));
        assert_eq!(
            found[found.len() - 3..],
            ["a/b/c/d/e/f/g", "EIO a/b/c/d/e/f/g", "a/b/c/d/e/f/h"]
        );
    }
}

#[test]
fn levels_that_cannot_be_opened_again_are_told() {
    let place = TestDirectory::new("again");
    for path in ["a/b/c/d/e/f/g/h/i", "a/b/c/d/e/z", "a/b/z", "z"] {
        place.add(path);
    }
    let closed = place.0.join("a/b/c/d/e");
    let set = |mode| fs::set_permissions(&closed, fs::Permissions::from_mode(mode)).unwrap();
    let root = Root::machine(&place.0).unwrap();
    let found = {
        let _acting = Uid::effective().is_root().then(|| {
            let owner = User {
                uid: 65534,
                gid: 65534,
            };
            std::os::unix::fs::chown(&closed, Some(owner.uid), Some(owner.gid)).unwrap();
            crate::sys::ActingAs::new(owner).unwrap()
        });
        walked_with(&root, |path| {
            if path.ends_with(b"/i") {
                set(0o000);
            }
            None
        })
    };
    set(0o755);
    let from = found.len() - 4;
    assert_eq!(
        found[from..],
        ["a/b/c/d/e/f/g/h/i", "EACCES a/b/c/d/e", "a/b/z", "z"]
    );
}

#[test]
fn names_are_charged() {
    let place = TestDirectory::new("charged");
    for number in 0..20 {
        place.add(&format!("{number}"));
    }
    let root = Root::machine(&place.0).unwrap();
    let path = FilePath::new(b".").unwrap();
    let poor = Budget::new(16 * 1024).whole();
    let error = root
        .walk(&path, Filter::default(), None, &poor)
        .err()
        .unwrap();
    assert_eq!(error.kind(), crate::error::Kind::OverLimit);
}

#[test]
fn others_come_first_while_names_are_left_out() {
    let place = TestDirectory::new("left-out");
    for number in 0..1000 {
        place.add(&format!(".hidden/{number}"));
        place.add(&format!(".{number}"));
    }
    place.add("z");
    for root in place.roots() {
        let path = FilePath::new(b".").unwrap();
        let mut walk = root
            .walk(&path, Filter::of_search(), None, &ledger())
            .unwrap();
        let mut steps = Vec::new();
        while let Some(visit) = walk.next().unwrap() {
            steps.push(matches!(visit, Visit::Passed));
        }
        assert!(steps.iter().filter(|is_passed| **is_passed).count() >= 3);
        assert_eq!(steps.iter().filter(|is_passed| !**is_passed).count(), 1);
    }
}

#[test]
fn a_name_that_takes_too_long_to_compare_is_not_compared() {
    use nix::fcntl::{OFlag, openat};
    use nix::sys::stat::{Mode, mkdirat};

    let place = TestDirectory::new("long");
    let name = "a".repeat(250);
    let mut directory = nix::fcntl::open(&place.0, DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..80 {
        mkdirat(&directory, name.as_str(), Mode::S_IRWXU).unwrap();
        directory = openat(&directory, name.as_str(), DIRECTORY, Mode::empty()).unwrap();
    }
    openat(&directory, "z", OFlag::O_CREAT, Mode::S_IRUSR).unwrap();
    let found = |root: &Root| {
        let path = FilePath::new(b".").unwrap();
        let filter = Filter::of_search();
        let mut walk = root.walk(&path, filter, None, &ledger()).unwrap();
        let (mut entries, mut lost) = (0, Vec::new());
        while let Some(visit) = walk.next().unwrap() {
            match visit {
                Visit::Entry(_) => entries += 1,
                Visit::Unreadable(path, errno) => lost.push((path.len(), errno)),
                Visit::Passed => {}
            }
        }
        (entries, lost)
    };
    for root in place.roots() {
        assert_eq!(found(&root), (81, Vec::new()));
    }
    let lines = format!("{}\n", "?".repeat(4000)).repeat(4);
    fs::write(place.0.join(".gitignore"), lines).unwrap();
    for root in place.roots() {
        // 16,000 states by 67 names of 251 bytes are more than 2^28.
        assert_eq!(
            found(&root),
            (66, vec![(67 * 251 - 1, Errno::ENAMETOOLONG)])
        );
    }
}
