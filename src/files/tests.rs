//! The promises of a root that is a home, over both resolvers: every act on every kind of path, with
//! links, modes and mounts in the way and while names are swapped; and homes that resist removal.
//!
//! Everything outside the home is readable and writable for all users, so that only the resolver, and
//! not the identity of the thread, can refuse an access.

use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};

use super::archive::CountedInput;
use super::beneath::Resolver;
use super::condition::Patient;
use super::name::FilePath;
use super::{
    DiskUse, FileKind, Files, Kept, Overwrite, Page, Root, Unpacking, Upload, make_home,
    remove_home,
};
use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind};
use crate::limits::ledger::{Budget, Item, Ledger};
use crate::sys::{self, User, exchange_names, hide_system_call};

const OWNER: User = User {
    uid: 23_456,
    gid: 23_457,
};

const RESOLVERS: [Resolver; 2] = [Resolver::Kernel, Resolver::Walk];

/// Says that a test could not run here; in CI that is a failure.
fn cannot(reason: &str) {
    assert!(
        std::env::var_os("CI").is_none(),
        "SKIPPED in CI, which is a failure: {reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        cannot("giving files to another user needs root");
    }
    is_root
}

/// A directory with a home in it and things beside it, removed with the value.
struct World {
    base: PathBuf,
}

impl World {
    fn empty() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sbx-unit-{}-{count}", std::process::id());
        let base = std::env::temp_dir().join(name);
        fs::create_dir(&base).unwrap();
        let world = Self { base };
        world.make_directory("", 0o755, None);
        world.make_directory("outside", 0o777, None);
        world.make_file("outside/secret", "secret", 0o666, None);
        world.make_file("secret", "secret", 0o666, None);
        world.make_directory("home", 0o700, Some(OWNER));
        world
    }

    /// With one of everything in the home.
    fn populated() -> Self {
        let world = Self::empty();
        let owner = Some(OWNER);
        world.make_file("home/file", "content", 0o644, owner);
        world.make_directory("home/dir", 0o755, owner);
        world.make_file("home/dir/inner", "inner", 0o644, owner);
        let absolute = |path: &str| world.base.join(path).to_str().unwrap().to_owned();
        for (name, target) in [
            ("to-file", "file".to_owned()),
            ("to-dir", "dir".to_owned()),
            ("out-file", "../outside/secret".to_owned()),
            ("out-dir", "../outside".to_owned()),
            ("abs-file", absolute("outside/secret")),
            ("abs-dir", absolute("outside")),
            ("abs-own", absolute("home/dir")),
            ("magic-dir", "/proc/self/cwd".to_owned()),
            ("magic-file", "/proc/self/fd/0".to_owned()),
            ("magic-exe", "/proc/self/exe".to_owned()),
            ("dangling", "nowhere".to_owned()),
            ("loop", "loop".to_owned()),
        ] {
            symlink(target, world.home(name)).unwrap();
        }
        nix::unistd::mkfifo(&world.home("fifo"), Mode::empty()).unwrap();
        world.give("home/fifo", 0o644, owner);
        world.make_directory("home/closed", 0o755, owner);
        world.make_file("home/closed/inner", "inner", 0o644, owner);
        world.chmod("home/closed", 0);
        world.make_file("home/foreign", "foreign", 0o600, None);
        world.make_directory("home/foreign-dir", 0o755, None);
        world.make_file("home/foreign-dir/file", "foreign", 0o644, None);
        world
    }

    fn home(&self, name: &str) -> PathBuf {
        self.base.join("home").join(name)
    }

    fn chmod(&self, path: &str, mode: u32) {
        fs::set_permissions(self.base.join(path), Permissions::from_mode(mode)).unwrap();
    }

    fn give(&self, path: &str, mode: u32, owner: Option<User>) {
        if let Some(User { uid, gid }) = owner {
            chown(self.base.join(path), Some(uid), Some(gid)).unwrap();
        }
        self.chmod(path, mode);
    }

    fn make_directory(&self, path: &str, mode: u32, owner: Option<User>) {
        if !path.is_empty() {
            fs::create_dir(self.base.join(path)).unwrap();
        }
        self.give(path, mode, owner);
    }

    fn make_file(&self, path: &str, content: &str, mode: u32, owner: Option<User>) {
        fs::write(self.base.join(path), content).unwrap();
        self.give(path, mode, owner);
    }

    fn open(&self) -> OwnedFd {
        File::open(&self.base).unwrap().into()
    }

    fn root(&self, resolver: Resolver) -> Root {
        let home = File::open(self.base.join("home")).unwrap();
        Root::beneath(OwnedFd::from(home), OWNER, resolver)
    }

    /// Everything that is outside the home, as far as anybody could change it.
    fn outside(&self) -> Vec<Seen> {
        ["", "secret", "outside", "outside/secret"]
            .iter()
            .map(|path| self.base.join(path))
            .flat_map(|path| {
                let mut found = vec![path.clone()];
                if path.ends_with("outside") {
                    found.extend(
                        fs::read_dir(&path)
                            .unwrap()
                            .map(|entry| entry.unwrap().path()),
                    );
                }
                found
            })
            .map(|path| {
                let status = fs::symlink_metadata(&path).unwrap();
                Seen {
                    mode: status.mode(),
                    uid: status.uid(),
                    inode: status.ino(),
                    changed: (status.ctime(), status.ctime_nsec()),
                    content: status.is_file().then(|| fs::read(&path).unwrap()),
                    path,
                }
            })
            .collect()
    }
}

/// What is noticed about a file.
#[derive(Debug, PartialEq)]
struct Seen {
    path: PathBuf,
    mode: u32,
    uid: u32,
    inode: u64,
    changed: (i64, i64),
    content: Option<Vec<u8>>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.base);
    }
}

fn path(text: &str) -> FilePath {
    FilePath::new(text.as_bytes()).unwrap()
}

type Outcome = Result<(), Error>;

fn failed(stopped: Stopped) -> Error {
    match stopped {
        Stopped::Failed(error) => error,
        stopped => panic!("{stopped:?}"),
    }
}

fn list(files: &Files<'_>, at: &FilePath) -> Result<Page, Error> {
    let page = files.list(at, None, 100, uncharged(), &mut Patient);
    page.map_err(failed)
}

fn rename(files: &Files<'_>, from: &str, to: &str) -> Outcome {
    let renamed = files.rename(&path(from), &path(to), &mut Patient);
    renamed.map_err(failed)
}

fn remove(files: &Files<'_>, at: &FilePath) -> Outcome {
    files.remove(at, true, None, &mut Patient).map_err(failed)
}

fn remove_until(files: &Files<'_>, at: &FilePath, deadline: Instant) -> Outcome {
    let removed = files.remove_until(at, true, deadline, None, &mut Patient);
    removed.map_err(failed)
}

type Act = fn(&Files<'_>, &str) -> Outcome;

/// The acts of the file routes, in the order of the table's columns.
const ACTS: [(&str, Act); 9] = [
    ("stat", |files, at| files.stat(&path(at)).map(drop)),
    ("read", |files, at| {
        let mut content = String::new();
        let mut opened = files.open(&path(at), true)?;
        opened.file.read_to_string(&mut content).unwrap();
        assert_ne!(content, "secret", "read of {at}");
        Ok(())
    }),
    ("write", |files, at| {
        let mut upload = files.upload(&path(at), Some(0o640), true)?;
        assert_eq!(upload.write(b"written")?, 7);
        upload.commit().map(drop)
    }),
    ("range", |files, at| {
        let mut range = files.write_range(&path(at), 2, None, Some(0o640), true)?;
        range.write(b"written")?;
        range.commit().map(drop)
    }),
    ("list", |files, at| {
        let page = list(files, &path(at))?;
        assert!(page.count() != 1 || at != "out-dir", "list of {at}");
        Ok(())
    }),
    ("mkdir", |files, at| {
        files.make_directory(&path(at), Some(0o750))
    }),
    ("delete", |files, at| remove(files, &path(at))),
    ("move from", |files, at| rename(files, at, "moved")),
    ("move to", |files, at| rename(files, "file", at)),
];

fn letter(outcome: &Outcome) -> char {
    match outcome.as_ref().map_err(Error::kind) {
        Ok(()) => '+',
        Err(Kind::Forbidden) => 'F',
        Err(Kind::NotFound) => 'N',
        Err(Kind::IsDirectory) => 'd',
        Err(Kind::NotDirectory) => 'n',
        Err(Kind::NotRegular) => 'p',
        Err(Kind::Invalid) => 'I',
        Err(_) => '?',
    }
}

/// Each path, and what comes of the acts: `+` success, `F` forbidden, `N` not found, `d` is a
/// directory, `n` is no directory, `p` is no regular file, `I` invalid.
#[rustfmt::skip]
const TABLE: &[(&str, &str)] = &[
    //                               stat, read, write, range, list, mkdir, delete, from, to
    ("file",                         "++++nn+++"),
    ("/file",                        "++++nn+++"),
    ("///file",                      "++++nn+++"),
    ("./file",                       "++++nn+++"),
    ("dir/../file",                  "++++nn+++"),
    ("/dir/./../dir//../file",       "++++nn+++"),
    ("dir/inner",                    "++++nn+++"),
    ("dir",                          "+ddd++++d"),
    ("dir/",                         "+ddd++++d"),
    ("file/",                        "Nnddnn+++"),
    ("missing",                      "NN++N+NN+"),
    ("missing/deep",                 "NN++N+NN+"),
    ("file/below",                   "Nnnnnnnnn"),
    ("file/../dir/inner",            "Nnnnnnnnn"),
    ("missing/../file",              "NNNNNNNNN"),
    // The home itself, which is not its owner's to replace.
    ("/",                            "+ddd++FFF"),
    (".",                            "+dFF++FFF"),
    ("dir/..",                       "+dFF++FFF"),
    ("dir/../",                      "+ddd++FFF"),
    // Out of it.
    ("..",                           "FFFFFFFFF"),
    ("/..",                          "FFFFFFFFF"),
    ("dir/../..",                    "FFFFFFFFF"),
    ("../secret",                    "FFFFFFFFF"),
    ("/../secret",                   "FFFFFFFFF"),
    ("../outside/new",               "FFFFFFFFF"),
    ("dir/../../outside/secret",     "FFFFFFFFF"),
    ("../home/file",                 "FFFFFFFFF"),
    ("missing/../../secret",         "NNNNNNNNN"),
    // Links as the last component: the link itself, or nothing.
    ("to-file",                      "+FFFFF+++"),
    ("to-dir",                       "+FFFFF+++"),
    ("out-file",                     "+FFFFF+++"),
    ("out-dir",                      "+FFFFF+++"),
    ("abs-file",                     "+FFFFF+++"),
    ("abs-dir",                      "+FFFFF+++"),
    ("abs-own",                      "+FFFFF+++"),
    ("magic-dir",                    "+FFFFF+++"),
    ("magic-file",                   "+FFFFF+++"),
    ("magic-exe",                    "+FFFFF+++"),
    ("dangling",                     "+FFFFF+++"),
    ("loop",                         "+FFFFF+++"),
    ("out-dir/",                     "FFddFF+++"),
    // Links on the way: nothing.
    ("to-dir/inner",                 "FFFFFFFFF"),
    ("to-dir/new",                   "FFFFFFFFF"),
    ("to-dir/../file",               "FFFFFFFFF"),
    ("to-dir/.",                     "FFFFFFFFF"),
    ("out-dir/secret",               "FFFFFFFFF"),
    ("out-dir/new",                  "FFFFFFFFF"),
    ("out-dir/new/deep",             "FFFFFFFFF"),
    ("abs-dir/secret",               "FFFFFFFFF"),
    ("abs-own/inner",                "FFFFFFFFF"),
    ("magic-dir/x",                  "FFFFFFFFF"),
    ("dangling/x",                   "FFFFFFFFF"),
    ("loop/x",                       "FFFFFFFFF"),
    ("to-file/x",                    "FFFFFFFFF"),
    ("fifo",                         "+pppnn+++"),
    // As closed as to a command of the owner's.
    ("closed",                       "+dddFFF+d"),
    ("closed/inner",                 "FFFFFFFFF"),
    ("closed/../file",               "FFFFFFFFF"),
    ("foreign",                      "+FFFnn+++"),
    ("foreign-dir",                  "+ddd+FF+d"),
    ("foreign-dir/file",             "++FFnnFFF"),
    ("foreign-dir/new",              "NNFFNFNNF"),
];

/// What does not come to what the table says.
fn wrong_outcomes(resolver: Resolver) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut world = World::populated();
    for (at, expected) in TABLE {
        for ((act, run), expected) in ACTS.iter().zip(expected.chars()) {
            let what = format!("{resolver:?}: {act} {at}");
            let outside = world.outside();
            let root = world.root(resolver);
            let outcome = run(&root.files().unwrap(), at);
            if letter(&outcome) != expected {
                wrong.push(format!("{what}: {outcome:?}, not {expected}"));
            }
            assert_eq!(world.outside(), outside, "{what}");
            let litter = fs::read_dir(world.home("."))
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .find(|name| name.as_bytes().starts_with(b".sbx-upload"));
            assert_eq!(litter, None, "{what}");
            if outcome.is_ok() && !["stat", "read", "list"].contains(act) {
                world = World::populated();
            }
        }
    }
    wrong
}

#[test]
fn every_act_on_every_path_comes_to_the_same_with_both_resolvers() {
    if !is_root() {
        return;
    }
    let wrong = RESOLVERS.map(wrong_outcomes).concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn where_openat2_is_hidden_the_walk_is_found_and_does_without_it() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    assert_eq!(Resolver::find(&world.open()), Resolver::Kernel);
    for errno in [Errno::ENOSYS, Errno::EPERM] {
        // A filter is its thread's alone.
        let judge = thread::spawn(move || {
            hide_system_call(libc::SYS_openat2, errno).unwrap();
            let found = Resolver::find(&World::empty().open());
            assert_eq!(found, Resolver::Walk, "{errno}");
            wrong_outcomes(found)
        });
        let wrong = judge.join().unwrap();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn a_refusal_says_whether_a_link_or_the_sandbox_is_the_reason() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    for resolver in RESOLVERS {
        let root = world.root(resolver);
        let files = root.files().unwrap();
        for (act, run) in ACTS {
            for (at, reason) in [
                ("out-dir/secret", "links are not followed"),
                ("../outside/secret", "outside the sandbox"),
            ] {
                let text = run(&files, at).unwrap_err().to_string();
                assert!(text.contains(reason), "{resolver:?}: {act} {at}: {text}");
                assert!(text.contains(at), "{resolver:?}: {act} {at}: {text}");
            }
        }
    }
}

#[test]
fn a_path_that_is_too_long_is_invalid_to_both_resolvers() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    let longest = format!("{}file", "./".repeat(2045));
    assert_eq!(longest.len(), 4094);
    for resolver in RESOLVERS {
        let root = world.root(resolver);
        let files = root.files().unwrap();
        for (act, run) in ACTS {
            for at in ["dir/../".repeat(1000), "x".repeat(256), "a/".repeat(8000)] {
                // What ends in a slash is not for writing, which needs no look at the rest.
                let at = format!("{at}x");
                assert_eq!(letter(&run(&files, &at)), 'I', "{resolver:?}: {act}");
            }
        }
        files.stat(&path(&longest)).unwrap();
        files.stat(&path(&format!("///{longest}"))).unwrap();
    }
}

#[test]
fn a_path_goes_as_deep_as_it_can_with_few_descriptors() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        let root = world.root(resolver);
        let files = root.files().unwrap();
        let deep = "d/".repeat(500);
        files.make_directory(&path(&deep), None).unwrap();
        let mut upload = files
            .upload(&path(&format!("{deep}file")), None, false)
            .unwrap();
        upload.write(b"deep").unwrap();
        upload.commit().unwrap();
        for (up, down, expected) in [(500, 500, '+'), (500, 499, 'N'), (501, 500, 'F')] {
            let (up, down) = ("../".repeat(up), "d/".repeat(down));
            let outcome = files.stat(&path(&format!("{deep}{up}{down}file")));
            assert_eq!(letter(&outcome.map(drop)), expected, "{resolver:?}");
        }
        remove(&files, &path("d")).unwrap();
        assert!(!world.home("d").exists());
    }
}

#[test]
fn a_closed_root_lets_nobody_in_and_is_in_use_until_all_have_left() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    let root = world.root(RESOLVERS[0]);
    let files = root.files().unwrap();
    root.close();
    assert_eq!(root.files().err().unwrap().kind(), Kind::NotFound);
    assert!(root.is_in_use() && files.stat(&path(".")).is_ok());
    drop(files);
    assert!(!root.is_in_use());
}

#[test]
fn a_tree_that_takes_too_long_for_one_request_goes_in_several() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    let root = world.root(RESOLVERS[0]);
    let files = root.files().unwrap();
    for (directory, file) in (0..20).flat_map(|number| (0..50).map(move |file| (number, file))) {
        let path = path(&format!("large/{directory}/deep/er/{file}"));
        files.upload(&path, None, true).unwrap().commit().unwrap();
    }
    let refused = remove_until(&files, &path("large"), Instant::now());
    assert_eq!(refused.unwrap_err().kind(), Kind::Unfinished);
    assert!(world.home("large/7/deep/er/7").exists());
    let mut rounds = 0;
    while let Err(error) = {
        let soon = Instant::now() + Duration::from_micros(500);
        remove_until(&files, &path("large"), soon)
    } {
        assert_eq!(error.kind(), Kind::Unfinished, "{error}");
        rounds += 1;
        assert!(rounds < 10_000, "it goes on where it ended");
    }
    assert!(!world.home("large").exists());
    // A limit says nothing of what takes no time.
    files.make_directory(&path("empty"), None).unwrap();
    let past = Instant::now();
    remove_until(&files, &path("empty"), past).unwrap();
}

/// A budget of so many bytes has one tenant.
fn tenant_of(bytes: u64) -> Arc<Ledger> {
    Budget::new(bytes).whole()
}

/// Counts how often it is asked, and calls something the first time.
struct Looks<F>(usize, F);

impl<F: FnMut() + Send> Interrupt for Looks<F> {
    fn check(&mut self) -> Result<(), Stopped> {
        if self.0 == 0 {
            self.1();
        }
        self.0 += 1;
        Ok(())
    }
}

#[test]
fn a_tree_is_removed_within_the_memory_of_its_tenant() {
    if !is_root() {
        return;
    }
    // Without memory it takes small batches.
    for bytes in [1 << 20, 0] {
        let world = World::populated();
        let root = world.root(RESOLVERS[0]);
        let files = root.files().unwrap();
        for (directory, file) in (0..5).flat_map(|number| (0..90).map(move |file| (number, file))) {
            let path = path(&format!("large/{directory}/deep/{file}"));
            files.upload(&path, None, true).unwrap().commit().unwrap();
        }
        let ledger = tenant_of(bytes);
        let charge = ledger.charge(Item::Responses, 0).unwrap();
        let removed = files.remove(&path("large"), true, Some(charge), &mut Patient);
        assert!(removed.is_ok(), "{bytes}");
        assert!(!world.home("large").exists());
        assert_eq!(Arc::strong_count(&ledger), 1, "all is given back");
    }
}

#[test]
fn the_size_of_a_home_counts_each_file_once() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    let root = world.root(RESOLVERS[0]);
    let files = root.files().unwrap();
    let ledger = tenant_of(1 << 30);
    let size = |ledger: &Arc<Ledger>, interrupt: &mut dyn Interrupt| {
        files.disk_bytes(ledger, interrupt).map(Option::unwrap)
    };
    let before = size(&ledger, &mut Patient).unwrap();
    let content = vec![b'x'; 1 << 20];
    std::fs::create_dir_all(world.home("in")).unwrap();
    std::fs::write(world.home("in/one"), &content).unwrap();
    let after_one = size(&ledger, &mut Patient).unwrap();
    assert!(after_one >= before + (1 << 20), "{before} {after_one}");
    for name in ["two", "in/three"] {
        std::fs::hard_link(world.home("in/one"), world.home(name)).unwrap();
    }
    let mut looks = Looks(0, || ());
    assert_eq!(size(&ledger, &mut looks).unwrap(), after_one);
    assert!(looks.0 > 3, "it is asked at each file: {}", looks.0);
    // It is charged, and ends with its tenant.
    let refused = size(&tenant_of(0), &mut Patient);
    assert!(matches!(refused, Err(Stopped::Failed(error)) if error.kind() == Kind::OverLimit));
}

#[test]
fn who_waits_for_a_figure_shares_it() {
    let figure = DiskUse::default();
    let (walks, have_asked) = (AtomicU64::new(0), AtomicU64::new(0));
    let ask = || {
        let walk = |_: &mut dyn Interrupt| {
            while have_asked.load(Ordering::SeqCst) < 8 {
                thread::yield_now();
            }
            Ok(Some(walks.fetch_add(1, Ordering::SeqCst)))
        };
        let mut looks = Looks(0, || {
            have_asked.fetch_add(1, Ordering::SeqCst);
        });
        figure.share(&mut looks, walk).unwrap()
    };
    thread::scope(|scope| {
        (0..8).for_each(|_| drop(scope.spawn(ask)));
    });
    // The first, and one that began after all had asked.
    assert_eq!(walks.load(Ordering::SeqCst), 2);
    // What was found before is not for who asks now.
    assert_eq!(ask(), Some(2));
}

#[test]
fn what_is_made_is_the_owners_with_the_mode_that_its_commands_would_give_it() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        {
            let root = world.root(resolver);
            let files = root.files().unwrap();
            let mut upload = files.upload(&path("new/deep/whole"), None, true).unwrap();
            upload.write(b"x").unwrap();
            upload.commit().unwrap();
            let mut range = files
                .write_range(&path("other/range"), 0, None, None, true)
                .unwrap();
            range.write(b"x").unwrap();
            range.commit().unwrap();
            files.make_directory(&path("a/b"), None).unwrap();
            rename(&files, "file", "way/there").unwrap();
        }
        // The thread is root again, and so are its files.
        let own = world.base.join("own");
        fs::write(&own, "").unwrap();
        assert_eq!(fs::metadata(&own).unwrap().uid(), 0);
        let directory = own.with_file_name("own-dir");
        fs::create_dir(&directory).unwrap();
        let modes = [&own, &directory].map(|path| fs::metadata(path).unwrap().mode() & 0o777);
        for made in [
            "new",
            "new/deep",
            "new/deep/whole",
            "other",
            "other/range",
            "a",
            "a/b",
            "way",
        ] {
            let status = fs::metadata(world.home(made)).unwrap();
            assert_eq!(
                (status.uid(), status.gid()),
                (OWNER.uid, OWNER.gid),
                "{made}"
            );
            let mode = modes[usize::from(status.is_dir())];
            assert_eq!(status.mode() & 0o777, mode, "{made}");
        }
    }
}

#[test]
fn a_links_size_is_its_own_and_its_target_is_told() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    for resolver in RESOLVERS {
        let root = world.root(resolver);
        let files = root.files().unwrap();
        let listed = list(&files, &path("/")).unwrap();
        let listed = listed.into_iter().find(|entry| entry.name == b"out-file");
        for entry in [files.stat(&path("out-file")).unwrap(), listed.unwrap()] {
            assert_eq!(entry.kind, FileKind::Link);
            assert_eq!(entry.target.as_deref(), Some(&b"../outside/secret"[..]));
            assert_eq!(entry.size, 17);
        }
    }
}

#[test]
fn what_may_be_listed_and_not_entered_shows_names_alone_when_its_page_is_read_later() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    world.chmod("home/dir", 0o400);
    for resolver in RESOLVERS {
        let page = {
            let root = world.root(resolver);
            let files = root.files().unwrap();
            list(&files, &path("dir")).unwrap()
        };
        let entries: Vec<_> = page.collect();
        assert_eq!(entries.len(), 1);
        assert_eq!((&entries[0].name[..], entries[0].size), (&b"inner"[..], 0));
        assert_eq!(entries[0].modified_ms, None, "{resolver:?}");
    }
}

#[test]
fn a_directory_is_not_moved_into_itself_though_nobody_may_look_above_the_home() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        let root = world.root(resolver);
        world.chmod("", 0o700);
        let files = root.files().unwrap();
        let refused = rename(&files, "dir", "dir/new/dir");
        assert_eq!(letter(&refused), 'I', "{resolver:?}: {refused:?}");
        rename(&files, "dir", "new/dir").unwrap();
        drop(files);
        assert!(!world.home("new/dir/new").exists());
        assert!(world.home("new/dir/inner").exists());
    }
}

#[test]
fn an_upload_that_cannot_be_beside_its_target_is_in_the_home() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        world.chmod("home/dir", 0o555);
        let root = world.root(resolver);
        let place = fs::canonicalize(world.home("")).unwrap();
        {
            let files = root.files().unwrap();
            let mut upload = files.upload(&path("dir/inner"), None, false).unwrap();
            upload.write(b"new").unwrap();
            let own = format!("/proc/self/fd/{}", upload.descriptor().as_raw_fd());
            let staged = fs::read_link(own).unwrap();
            assert!(staged.starts_with(&place), "{}", staged.display());
            upload.commit().unwrap();
        }
        assert_eq!(fs::read(world.home("dir/inner")).unwrap(), b"new");
        // Where nothing of the home takes a name, there is no place for it.
        world.chmod("home", 0o555);
        let files = root.files().unwrap();
        let refused = files.upload(&path("dir/inner"), None, false).map(drop);
        assert_eq!(refused.unwrap_err().kind(), Kind::Forbidden);
    }
}

/// A client that goes after so many looks.
struct Goes(usize);

impl Interrupt for Goes {
    fn check(&mut self) -> Result<(), Stopped> {
        self.0 = self.0.checked_sub(1).ok_or(Stopped::Disconnected)?;
        Ok(())
    }
}

#[test]
fn a_move_to_another_file_system_ends_with_its_client() {
    if !is_root() || !Path::new("/dev/shm").is_dir() {
        return;
    }
    let world = World::empty();
    let memory = PathBuf::from(format!("/dev/shm/sbx-move-{}", std::process::id()));
    fs::write(&memory, vec![1; 1 << 20]).unwrap();
    let is_other =
        fs::metadata("/dev/shm").unwrap().dev() != fs::metadata(&world.base).unwrap().dev();
    let target = world.base.join("moved");
    let root = Root::machine(&world.base).unwrap();
    let way = |path: &PathBuf| FilePath::new(path.as_os_str().as_bytes()).unwrap();
    let moved = root
        .files()
        .unwrap()
        .rename(&way(&memory), &way(&target), &mut Goes(2));
    assert_eq!(
        matches!(moved, Err(Stopped::Disconnected)),
        is_other,
        "{moved:?}"
    );
    assert_eq!(memory.exists(), is_other);
    assert_eq!(target.exists(), !is_other);
    let _ = fs::remove_file(memory);
}

/// An archive of one member.
fn archive(typeflag: u8, name: &str, link: &str) -> Vec<u8> {
    let mut block = [0; 1536];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(
        100,
        b"0000644\x000000000\x000000000\x0000000000000\x0000000000000\0        ",
    );
    put(156, &[typeflag]);
    put(157, link.as_bytes());
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block.to_vec()
}

#[test]
fn nobody_replaces_a_file_in_the_turn_of_another_request() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    let root = world.root(Resolver::Kernel);
    let unpack = |archive: Vec<u8>| {
        let options = Unpacking {
            strip: 0,
            overwrite: Overwrite::Replace,
            dry_run: false,
            kept: Kept::Files,
            make_parents: true,
            max_bytes: 1,
            max_files: 9,
        };
        let ledger = crate::limits::ledger::Budget::new(1 << 30).whole();
        let files = root.files()?;
        files
            .unpack(
                &path("."),
                options,
                &mut CountedInput(&archive[..], 0),
                &ledger,
            )
            .map(drop)
    };
    let acts: [(&str, &(dyn Fn() -> Outcome + Sync)); 4] = [
        ("move", &|| rename(&root.files()?, "other", "file")),
        ("unpack", &|| unpack(archive(b'0', "file", ""))),
        ("unpack a link", &|| unpack(archive(b'2', "file", "x"))),
        ("unpack a hard link", &|| {
            unpack(archive(b'1', "file", "other"))
        }),
    ];
    for (act, run) in acts {
        for name in ["home/file", "home/other"] {
            let _ = fs::remove_file(world.base.join(name));
            world.make_file(name, name, 0o644, Some(OWNER));
        }
        let before = fs::symlink_metadata(world.home("file")).unwrap().ino();
        let now = || fs::symlink_metadata(world.home("file")).unwrap().ino();
        let turn = root.files().unwrap().turn(&[path("file")], &mut Patient);
        let turn = turn.unwrap();
        thread::scope(|scope| {
            let running = scope.spawn(run);
            // Without a turn it takes a fraction of that.
            let deadline = Instant::now() + Duration::from_millis(200);
            while Instant::now() < deadline && !running.is_finished() {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(now(), before, "{act}");
            drop(turn);
            running.join().unwrap().unwrap();
        });
        assert_ne!(now(), before, "{act}");
    }
}

/// Mounts something for as long as it lives.
struct Mounted(PathBuf);

impl Mounted {
    fn bind(what: &Path, at: &Path) -> Option<Self> {
        Self::new(&["--bind".as_ref(), what], at)
    }

    fn new(arguments: &[&Path], at: &Path) -> Option<Self> {
        let done = Command::new("mount").args(arguments).arg(at).output();
        if done.is_ok_and(|done| done.status.success()) {
            return Some(Self(at.to_owned()));
        }
        cannot("nothing can be mounted here");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status().unwrap();
        assert!(done.success());
    }
}

#[test]
fn nothing_that_is_mounted_in_a_home_is_part_of_it() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    // Of the same device, which its number does not tell apart.
    world.make_directory("home/mounted", 0o755, Some(OWNER));
    world.make_file("home/mounted-file", "", 0o644, Some(OWNER));
    let Some(_directory) = Mounted::bind(&world.base.join("outside"), &world.home("mounted"))
    else {
        return;
    };
    let file = Mounted::bind(&world.base.join("secret"), &world.home("mounted-file"));
    assert!(file.is_some());
    let outside = world.outside();
    for resolver in RESOLVERS {
        let root = world.root(resolver);
        let files = root.files().unwrap();
        for (act, run) in ACTS {
            for at in ["mounted/secret", "mounted/new", "mounted-file"] {
                let refused = run(&files, at);
                assert_eq!(
                    letter(&refused),
                    'F',
                    "{resolver:?}: {act} {at}: {refused:?}"
                );
            }
        }
        for at in ["mounted", "mounted/", "mounted/.."] {
            let refused = files.stat(&path(at)).map(drop);
            assert_eq!(letter(&refused), 'F', "{resolver:?}: {at}: {refused:?}");
        }
        let refused = remove(&files, &path("mounted"));
        assert_eq!(letter(&refused), 'F', "{resolver:?}: {refused:?}");
    }
    let refused = remove_home(&world.open(), b"home", None).unwrap_err();
    assert!(refused.to_string().contains("EBUSY"), "{refused}");
    assert_eq!(world.outside()[1..], outside[1..]);
}

#[test]
fn another_device_is_noticed_where_the_kernel_does_not_tell_mounts_apart() {
    if !is_root() {
        return;
    }
    let world = World::populated();
    world.make_directory("home/mounted", 0o755, Some(OWNER));
    let kind = ["-t", "tmpfs", "-o", "mode=777", "tmpfs"].map(Path::new);
    let Some(_mounted) = Mounted::new(&kind, &world.home("mounted")) else {
        return;
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            hide_system_call(libc::SYS_statx, Errno::ENOSYS).unwrap();
            assert_eq!(sys::mount_id(world.open().as_fd()), None);
            let root = world.root(Resolver::Walk);
            let files = root.files().unwrap();
            for at in ["mounted", "mounted/new", "mounted/.."] {
                let refused = files.stat(&path(at)).map(drop);
                assert_eq!(letter(&refused), 'F', "{at}: {refused:?}");
            }
            files.stat(&path("dir/../file")).unwrap();
        });
    });
}

/// How much longer a race may take to go both ways, on a machine that has other things to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long names are swapped under each resolver; `SBX_RACE_SECONDS` makes it longer.
fn race_length() -> Duration {
    let seconds = std::env::var("SBX_RACE_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(2.0);
    Duration::from_secs_f64(seconds)
}

/// Two names of a home, which change places without a moment in which either is missing.
struct Swap(CString, CString);

impl Swap {
    fn new(world: &World, one: &str, other: &str) -> Self {
        let name = |name| CString::new(world.home(name).as_os_str().as_bytes()).unwrap();
        Self(name(one), name(other))
    }
}

/// Tells the other threads of a race that it is over, even when its judge panics.
struct Over<'race>(&'race AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Interleavings: a directory is looked up, and is a link to the outside when the next name in it
/// is; or a name is looked at, and is a link when it is opened; or is missing, and is a link when it
/// is to be made.
#[test]
fn a_directory_that_becomes_a_link_in_the_middle_of_an_act_leads_nowhere() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        let owner = Some(OWNER);
        world.make_directory("home/a", 0o755, owner);
        world.make_file("home/a/secret", "own", 0o644, owner);
        symlink("../outside", world.home("b")).unwrap();
        world.make_file("home/f", "own", 0o644, owner);
        symlink("../outside/secret", world.home("l")).unwrap();
        let outside = world.outside();
        let sudden = world.home("sudden");
        let swaps = [Swap::new(&world, "a", "b"), Swap::new(&world, "f", "l")];
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _over = Over(&over);
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    for Swap(one, other) in &swaps {
                        exchange_names(one, other).unwrap();
                        // The lock of the home's directory is the acts' too.
                        thread::yield_now();
                    }
                    let _ = symlink("../outside", &sudden);
                    thread::yield_now();
                    let _ = fs::remove_dir_all(&sudden);
                }
            });
            let acting = [0, 1].map(|start| {
                let world = &world;
                scope.spawn(move || {
                    let root = world.root(resolver);
                    let files = root.files().unwrap();
                    let mut seen = [[0_u64; 3]; ACTS.len()];
                    // A race that only ever went one way has shown nothing.
                    let undecided =
                        |seen: &[[u64; 3]]| seen.iter().any(|seen| seen[0] == 0 || seen[1] == 0);
                    let begin = Instant::now();
                    for turn in start.. {
                        let elapsed = begin.elapsed();
                        if elapsed > race_length() && !undecided(&seen) {
                            return;
                        }
                        assert!(elapsed < race_length() + PATIENCE, "{resolver:?}: {seen:?}");
                        act_in_a_race(&files, turn, &mut seen);
                    }
                })
            });
            for acting in acting {
                acting.join().unwrap();
            }
        });
        assert_eq!(world.outside(), outside, "{resolver:?}");
    }
}

fn act_in_a_race(files: &Files<'_>, turn: usize, seen: &mut [[u64; 3]; ACTS.len()]) {
    let index = turn % ACTS.len();
    let (act, run) = ACTS[index];
    let at = match act {
        "list" => ["a", "a/.", "b"][turn / ACTS.len() % 3],
        "mkdir" => ["a/new", "a/new/deep", "sudden/new"][turn / ACTS.len() % 3],
        // What is deleted or moved away is put there first, so that the others find it too.
        "delete" | "move from" => {
            let _ = ACTS[2].1(files, "a/passing");
            "a/passing"
        }
        "move to" => {
            let _ = ACTS[2].1(files, "file");
            "a/arrived"
        }
        _ => ["a/secret", "f", "b/secret", "l"][turn / ACTS.len() % 4],
    };
    // The short ones have the short moments.
    let times = match act {
        "read" | "range" => 200,
        "list" | "mkdir" => 20,
        _ => 1,
    };
    for _ in 0..times {
        let outcome = run(files, at);
        match letter(&outcome) {
            '+' => seen[index][0] += 1,
            'F' => seen[index][1] += 1,
            'N' => seen[index][2] += 1,
            // A link where a directory was seen a moment ago: told as what it is not.
            'n' if act == "mkdir" || act == "list" => seen[index][1] += 1,
            _ => panic!("{act} {at}: {outcome:?}"),
        }
    }
    if act == "list"
        && let Ok(page) = list(files, &path(at))
    {
        let inode = |entry: super::Entry| (entry.name == b"secret").then_some(entry.uid);
        let owners: Vec<u32> = page.filter_map(inode).collect();
        assert!(owners.iter().all(|uid| *uid == OWNER.uid), "{owners:?}");
    }
}

/// Interleaving: the way leads down into `x/y`, which is moved up to the home, and then up twice,
/// which is now one too many.
#[test]
fn going_up_from_a_directory_that_was_moved_does_not_leave_the_home() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        world.make_directory("home/x", 0o755, Some(OWNER));
        world.make_directory("home/x/y", 0o755, Some(OWNER));
        let (down, up) = (world.home("x/y"), world.home("y"));
        let over = AtomicBool::new(false);
        let mut outcomes = String::new();
        thread::scope(|scope| {
            let _over = Over(&over);
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    fs::rename(&down, &up).unwrap();
                    fs::rename(&up, &down).unwrap();
                }
            });
            let root = world.root(resolver);
            let files = root.files().unwrap();
            let end = Instant::now() + race_length();
            while Instant::now() < end {
                for at in [
                    "x/y/../../secret",
                    "x/y/../../outside/secret",
                    "y/../secret",
                ] {
                    for act in [0, 1] {
                        let outcome = ACTS[act].1(&files, at);
                        let letter = letter(&outcome);
                        assert!(matches!(letter, 'N' | 'F'), "{at}: {outcome:?}");
                        if !outcomes.contains(letter) {
                            outcomes.push(letter);
                        }
                    }
                }
            }
        });
        assert!(outcomes.contains('N'), "{resolver:?}: {outcomes}");
    }
}

#[test]
fn a_home_is_made_private_and_the_owners_or_not_at_all() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    let homes = world.open();
    let home = make_home(&homes, b"new", OWNER).unwrap();
    assert!(File::from(home).metadata().unwrap().is_dir());
    for made in ["new", "new/.tmp", "new/.sbx", "new/.sbx/proxy"] {
        let status = fs::symlink_metadata(world.base.join(made)).unwrap();
        assert_eq!(
            (status.uid(), status.gid()),
            (OWNER.uid, OWNER.gid),
            "{made}"
        );
        assert_eq!(status.mode(), libc::S_IFDIR | 0o700, "{made}");
    }
    // One that is there is left as it is.
    fs::write(world.base.join("new/kept"), "").unwrap();
    let refused = make_home(&homes, b"new", OWNER).unwrap_err();
    assert_eq!(refused.kind(), Kind::Exists);
    assert!(world.base.join("new/kept").exists());
    // An owner that there cannot be.
    let nobody = User {
        uid: u32::MAX,
        gid: u32::MAX,
    };
    make_home(&homes, b"other", nobody).map(drop).unwrap_err();
    assert!(!world.base.join("other").exists());
}

/// Fills a home with what is hard to remove; everything in it belongs to the owner of a home that
/// could have made it.
fn fill(world: &World) {
    let home = world.home(".");
    for (index, target) in [
        "/etc/passwd",
        "/",
        "../outside",
        "../outside/secret",
        "loop",
    ]
    .iter()
    .enumerate()
    {
        symlink(target, home.join(format!("link{index}"))).unwrap();
    }
    fs::hard_link(world.base.join("secret"), home.join("hard")).unwrap();
    nix::unistd::mkfifo(&home.join("fifo"), Mode::from_bits_truncate(0o600)).unwrap();
    drop(UnixListener::bind(home.join("socket")).unwrap());
    let names: [&[u8]; 4] = [b"caf\xe9", b"\xff\xfe", b"new\nline", b" "];
    for name in names {
        fs::create_dir(home.join(std::ffi::OsStr::from_bytes(name))).unwrap();
        let below = home.join(std::ffi::OsStr::from_bytes(name));
        fs::write(below.join(std::ffi::OsStr::from_bytes(name)), "").unwrap();
    }
    world.make_directory("home/closed", 0o755, Some(OWNER));
    world.make_directory("home/closed/closed", 0o755, Some(OWNER));
    world.make_file("home/closed/closed/file", "", 0, Some(OWNER));
    world.chmod("home/closed/closed", 0);
    world.chmod("home/closed", 0);
    let mut directory = File::open(&home).unwrap();
    for _ in 0..2500 {
        let mode = Mode::from_bits_truncate(0o700);
        mkdirat(&directory, "deep", mode).unwrap();
        directory = openat(&directory, "deep", OFlag::O_RDONLY, mode)
            .unwrap()
            .into();
        symlinkat_to_root(&directory);
    }
    fs::create_dir(home.join("wide")).unwrap();
    for index in 0..50_000 {
        fs::hard_link(home.join("fifo"), home.join(format!("wide/{index}"))).unwrap();
    }
}

fn symlinkat_to_root(directory: &impl AsFd) {
    nix::unistd::symlinkat("/etc", directory, "root").unwrap();
}

#[test]
fn a_home_goes_whatever_is_in_it_and_nothing_else_does() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    fill(&world);
    let outside = world.outside();
    let before = [fs::metadata("/etc"), fs::metadata("/")].map(|status| status.unwrap().ctime());
    remove_home(&world.open(), b"home", None).unwrap();
    assert!(fs::symlink_metadata(world.base.join("home")).is_err());
    // A name less changes the times of a file that has hard links, and of the directory.
    let without_times = |seen: Vec<Seen>| -> Vec<Seen> {
        let changed = (0, 0);
        seen.into_iter()
            .map(|seen| Seen { changed, ..seen })
            .collect()
    };
    assert_eq!(without_times(world.outside()), without_times(outside));
    let after = [fs::metadata("/etc"), fs::metadata("/")].map(|status| status.unwrap().ctime());
    assert_eq!(after, before);
    // Removing a missing home is no error.
    remove_home(&world.open(), b"home", None).unwrap();
}

#[test]
fn a_home_that_is_deep_and_wide_goes_though_not_all_its_names_are_held_at_once() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    let mut level = world.home(".");
    let file = world.home("file");
    fs::write(&file, "").unwrap();
    for _ in 0..20 {
        for index in 0..300 {
            fs::hard_link(&file, level.join(format!("{index}"))).unwrap();
        }
        for side in ["one", "other"] {
            fs::create_dir_all(level.join(side).join("full")).unwrap();
        }
        level = level.join("one/full");
    }
    remove_home(&world.open(), b"home", None).unwrap();
    assert!(fs::symlink_metadata(world.base.join("home")).is_err());
}

#[test]
fn what_is_where_a_home_should_be_goes_and_is_not_followed() {
    if !is_root() {
        return;
    }
    let world = World::empty();
    symlink("outside", world.base.join("link")).unwrap();
    let outside = world.outside();
    remove_home(&world.open(), b"link", None).unwrap();
    assert!(fs::symlink_metadata(world.base.join("link")).is_err());
    assert_eq!(world.outside()[1..], outside[1..]);
}

/// For the names of a page.
fn uncharged() -> crate::limits::ledger::Charge {
    let ledger = crate::limits::ledger::Budget::new(1 << 30).whole();
    ledger
        .charge(crate::limits::ledger::Item::Responses, 0)
        .unwrap()
}

/// The names in a directory of the home.
fn names(world: &World, directory: &str) -> Vec<String> {
    let names = fs::read_dir(world.home(directory)).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// What waits has no descriptor, so its place is found again by its path: no other place is written, and nothing is left.
#[test]
fn an_upload_that_was_closed_takes_its_place_or_none() {
    if !is_root() {
        return;
    }
    for resolver in RESOLVERS {
        let world = World::populated();
        let root = world.root(resolver);
        let files = root.files().unwrap();
        for name in ["dir/inner", "dir/new"] {
            let to = path(name);
            let close = || {
                let mut upload = files.upload(&to, None, false).unwrap();
                assert_eq!(upload.write(b"written").unwrap(), 7);
                upload.close(&files, &to).unwrap().unwrap()
            };
            let kind = |reopened: Result<Upload<'_>, Error>| reopened.err().unwrap().kind();
            // Takes its hidden name away from an upload.
            let remove_hidden = || {
                let hidden = names(&world, "dir").into_iter().next().unwrap();
                let hidden = world.home("dir").join(hidden);
                fs::remove_file(&hidden).unwrap();
                hidden
            };
            let before = names(&world, "dir");

            drop(close());
            assert_eq!(names(&world, "dir"), before);

            // The path leads to another directory.
            let closed = close();
            fs::rename(world.home("dir"), world.home("moved-dir")).unwrap();
            world.make_directory("home/dir", 0o755, Some(OWNER));
            assert_eq!(kind(closed.reopen()), Kind::Changed);
            assert!(names(&world, "dir").is_empty());
            fs::remove_dir(world.home("dir")).unwrap();
            assert!(files.upload(&to, None, false).is_err());
            let waiting = names(&world, "moved-dir");
            fs::rename(world.home("moved-dir"), world.home("dir")).unwrap();
            for hidden in waiting.iter().filter(|name| !before.contains(name)) {
                fs::remove_file(world.home("dir").join(hidden)).unwrap();
            }

            // Another file has its hidden name.
            let closed = close();
            fs::hard_link(world.home("file"), remove_hidden()).unwrap();
            assert_eq!(kind(closed.reopen()), Kind::Changed);
            assert_eq!(names(&world, "dir"), before);
            let closed = close();
            symlink("../file", remove_hidden()).unwrap();
            assert!(closed.reopen().is_err());
            assert_eq!(fs::read(world.home("file")).unwrap(), b"content");

            let upload = close().reopen().unwrap();
            assert_eq!(upload.commit().unwrap(), 7);
            assert_eq!(fs::read(world.home(name)).unwrap(), b"written");
            let status = fs::metadata(world.home(name)).unwrap();
            assert_eq!((status.uid(), status.mode() & 0o777), (OWNER.uid, 0o644));
        }
        assert_eq!(names(&world, "dir"), ["inner", "new"]);
        // It could only be copied: its directory takes no names.
        world.chmod("home/dir", 0o555);
        let to = path("dir/inner");
        let upload = files.upload(&to, None, false).unwrap();
        assert!(upload.close(&files, &to).unwrap().is_none());
    }
}

#[test]
fn a_file_that_was_set_aside_goes_back_to_its_place_or_to_none() {
    if !is_root() {
        return;
    }
    for is_closed in [false, true] {
        let world = World::populated();
        let root = world.root(Resolver::Kernel);
        let files = root.files().unwrap();
        let from = path("dir/inner");
        let set_aside = || {
            let mut aside = files.set_aside(&from).unwrap();
            if is_closed {
                aside.close();
            }
            assert!(!names(&world, "dir").contains(&"inner".to_owned()));
            aside
        };
        set_aside().put_back();
        assert_eq!(names(&world, "dir"), ["inner"]);
        let aside = set_aside();
        fs::rename(world.home("dir"), world.home("moved-dir")).unwrap();
        world.make_directory("home/dir", 0o755, Some(OWNER));
        world.make_file("home/dir/inner", "other", 0o644, Some(OWNER));
        aside.put_back();
        assert_eq!(fs::read(world.home("dir/inner")).unwrap(), b"other");
        assert_eq!(names(&world, "moved-dir").len(), 1);
        assert_eq!(world.home("moved-dir/inner").exists(), !is_closed);
        drop(set_aside());
        assert!(names(&world, "dir").is_empty());
    }
}
