//! Tests of what a watcher does when it cannot see all of its tree.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::watcher::add_watch;
use super::{Ended, EventSink, Settings, TreeChange, TreeEvent, WatchShare, Watcher};
use crate::client::{Interrupt, Stopped};
use crate::files::entry::DIRECTORY;
use crate::files::name::FilePath;
use crate::files::root::{Files, Root};
use crate::files::search::Matcher;
use crate::limits::ledger::Budget;
use crate::sys::User;

const OWNER: User = User {
    uid: 23_456,
    gid: 23_457,
};

/// A directory that is removed on drop.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sbx-watch-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("w/sub")).unwrap();
        Self(path)
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A client that stays.
struct Stays;

impl Interrupt for Stays {
    fn check(&mut self) -> Result<(), Stopped> {
        Ok(())
    }
}

fn watch(files: &Files<'_>) -> Watcher {
    let settings = Settings {
        path: FilePath::new(b"w").unwrap(),
        recursive: true,
        exclude: Matcher::default(),
    };
    let ledger = Budget::new(1 << 30).whole();
    let share = WatchShare::new(true);
    Watcher::new(&settings, files, &share, &ledger, &mut Stays)
        .ok()
        .unwrap()
}

#[test]
fn a_watch_is_charged_for_its_path() {
    let directory = TestDirectory::new("charged");
    let root = Root::machine(&directory.0).unwrap();
    let files = root.files().unwrap();
    let path = [&b"./".repeat(1500)[..], b"w"].concat();
    let settings = Settings {
        path: FilePath::new(&path).unwrap(),
        recursive: false,
        exclude: Matcher::default(),
    };
    // One item may hold half of it.
    for (bytes, is_made) in [(10 * path.len(), true), (6 * path.len(), false)] {
        let ledger = Budget::new(bytes as u64).whole();
        let share = WatchShare::new(true);
        let made = Watcher::new(&settings, &files, &share, &ledger, &mut Stays);
        assert_eq!(made.is_ok(), is_made);
    }
}

/// Keeps the events, until it was asked so often whether to go on.
struct Kept {
    events: Vec<TreeEvent>,
    checks: usize,
}

impl Kept {
    fn until_checked(checks: usize) -> Self {
        let events = Vec::new();
        Self { events, checks }
    }
}

impl EventSink for Kept {
    fn event(&mut self, event: TreeEvent) -> Result<(), Ended> {
        self.events.push(event);
        Ok(())
    }

    fn check(&mut self) -> Result<(), Ended> {
        self.checks -= 1;
        if self.checks == 0 {
            return Err(Ended::Disconnected);
        }
        Ok(())
    }
}

/// What one step tells.
fn told(watcher: &mut Watcher, files: &Files<'_>) -> (Vec<TreeEvent>, Result<(), Ended>) {
    let mut kept = Kept::until_checked(usize::MAX);
    let advanced = watcher.advance(files, &mut kept);
    (kept.events, advanced.map(drop))
}

#[test]
fn a_tree_that_does_not_come_to_rest_is_lost_at_first() {
    let place = TestDirectory::new("restless");
    let root = Root::machine(&place.0).unwrap();
    let files = root.files().unwrap();
    let mut watcher = watch(&files);
    assert_eq!(told(&mut watcher, &files), (Vec::new(), Ok(())));
    watcher
        .begin(&files, Duration::ZERO, &mut Kept::until_checked(1 << 20))
        .unwrap();
    assert_eq!(watcher.directories(), 2);
    let overflow = vec![TreeEvent::overflow()];
    assert_eq!(told(&mut watcher, &files), (overflow, Ok(())));
    assert_eq!(told(&mut watcher, &files), (Vec::new(), Ok(())));
}

#[test]
fn a_client_that_leaves_ends_the_wait_for_what_cannot_be_reached() {
    let place = TestDirectory::new("unreachable");
    fs::create_dir(place.0.join("elsewhere")).unwrap();
    let root = Root::machine(&place.0).unwrap();
    let files = root.files().unwrap();
    let mut watcher = watch(&files);
    let first = watcher.nodes.root();
    let directory = files
        .resolve(&FilePath::new(b"elsewhere").unwrap(), DIRECTORY)
        .unwrap();
    let key = add_watch(&watcher.inotify, &directory, super::watcher::EVENTS).unwrap();
    assert!(watcher.share.directories.take());
    watcher.nodes.put(key, first, b"gone").unwrap();
    watcher.missed.insert((key, b"x".to_vec()));
    let mut kept = Kept::until_checked(8);
    let begun = watcher.begin(&files, Duration::from_secs(10), &mut kept);
    assert_eq!(begun, Err(Ended::Disconnected));
}

#[test]
fn a_directory_that_cannot_be_read_does_not_pass_for_an_empty_one() {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "SKIPPED in CI");
        eprintln!("SKIPPED: giving files to another user needs root");
        return;
    }
    let place = TestDirectory::new("unreadable");
    let own = |path: &str, mode| {
        let path = place.0.join(path);
        chown(&path, Some(OWNER.uid), Some(OWNER.gid)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for path in [".", "w", "w/sub"] {
        own(path, 0o700);
    }
    let home = fs::File::open(&place.0).unwrap();
    let root = Root::home(std::os::fd::OwnedFd::from(home), OWNER);
    let files = root.files().unwrap();
    let mut watcher = watch(&files);
    watcher.is_incomplete = true;
    let overflow = vec![TreeEvent::overflow()];
    assert_eq!(told(&mut watcher, &files), (overflow.clone(), Ok(())));
    drop(files);
    own("w/sub", 0o300);
    let files = root.files().unwrap();
    assert_eq!(told(&mut watcher, &files).1, Ok(()));
    watcher.is_incomplete = true;
    let failed = Err(Ended::Failed(Errno::EACCES));
    assert_eq!(told(&mut watcher, &files), (overflow, failed));
}

#[test]
fn a_directory_stays_open_until_its_step_ends() {
    let place = TestDirectory::new("open");
    fs::create_dir_all(place.0.join("w/sub/a/b/c")).unwrap();
    let root = Root::machine(&place.0).unwrap();
    let files = root.files().unwrap();
    let mut watcher = watch(&files);
    let mut key = watcher.nodes.root();
    let keys = ["sub", "a", "b", "c"].map(|name| {
        key = watcher.nodes.child(key, name.as_bytes()).unwrap();
        key
    });
    let opened = watcher.open_directory(&files, keys[3]).unwrap();
    let again = watcher.open_directory(&files, keys[3]).unwrap();
    assert!(Arc::ptr_eq(&opened, &again));
    // What is in it is found there, and in those beside it, wherever those above have gone meanwhile.
    fs::rename(place.0.join("w/sub"), place.0.join("w/moved")).unwrap();
    for key in [keys[2], keys[3]] {
        assert!(watcher.open_directory(&files, key).is_ok());
    }
    let gone = watcher.open_directory(&files, keys[1]);
    assert_eq!(gone.err(), Some(Errno::ESTALE));
    // But not what the watch has given up.
    watcher.forget(keys[3]);
    let given_up = watcher.open_directory(&files, keys[3]);
    assert_eq!(given_up.err(), Some(Errno::ESTALE));
    assert_eq!(told(&mut watcher, &files).1, Ok(()));
    drop(again);
    assert_eq!(Arc::into_inner(opened).map(drop), Some(()), "it is closed");
}

#[test]
fn a_storm_is_settled_no_longer_than_its_sink_goes_on() {
    let place = TestDirectory::new("storm");
    let root = Root::machine(&place.0).unwrap();
    let files = root.files().unwrap();
    let mut watcher = watch(&files);
    for number in 0..100 {
        fs::create_dir(place.0.join(format!("w/sub/{number}"))).unwrap();
    }
    let mut kept = Kept::until_checked(10);
    let advanced = watcher.advance(&files, &mut kept);
    assert_eq!(advanced, Err(Ended::Disconnected));
    let events = kept.events.len();
    assert!((1..10).contains(&events), "{events}");
    // It looks after its client also while it tells nothing, as after a loss.
    let mut watcher = watch(&files);
    watcher.is_incomplete = true;
    let mut kept = Kept::until_checked(50);
    let advanced = watcher.advance(&files, &mut kept);
    assert_eq!(advanced, Err(Ended::Disconnected));
}

/// Does something as soon as a path is created.
struct Acts<'a> {
    at: &'a [u8],
    act: &'a dyn Fn(),
    told: Vec<(TreeChange, String)>,
}

impl EventSink for Acts<'_> {
    fn event(&mut self, event: TreeEvent) -> Result<(), Ended> {
        if event.path == self.at && event.change == TreeChange::Created {
            (self.act)();
        }
        let path = String::from_utf8(event.path).unwrap();
        self.told.push((event.change, path));
        Ok(())
    }

    fn check(&mut self) -> Result<(), Ended> {
        Ok(())
    }
}

#[test]
fn what_is_found_in_a_directory_is_in_the_one_that_is_watched() {
    let place = TestDirectory::new("replaced");
    let root = Root::machine(&place.0).unwrap();
    let files = root.files().unwrap();
    let at = |name: &str| place.0.join("w").join(name);
    fs::create_dir_all(at("sub/in/deep")).unwrap();
    let mut watcher = watch(&files);
    fs::create_dir_all(at("new/name")).unwrap();
    // Another directory takes the name of one that has just been found.
    let mut sink = Acts {
        at: b"new/name",
        act: &|| fs::rename(at("sub"), at("new/name")).unwrap(),
        told: Vec::new(),
    };
    while watcher.advance(&files, &mut sink).unwrap().is_some() {}
    let expected = [
        (TreeChange::Created, "new"),
        (TreeChange::Created, "new/name"),
        (TreeChange::Moved(b"sub".to_vec()), "new/name"),
    ];
    let expected = expected.map(|(change, path)| (change, path.to_owned()));
    assert_eq!(sink.told, expected);
    assert_eq!(watcher.directories(), 5);
}
