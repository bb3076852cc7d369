//! The promise of watches: the events lead from the tree as it was to the tree as it is, or the watch says
//! that it lost something; and what one costs is bounded.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Place, chmod, expect_error, expect_ok, meanwhile, mkfifo};
use crate::fixture::{
    EventStream, PATIENCE, Random, Server, TempDir, exchange, is_root, may_look_into_processes,
    wait_until,
};
use crate::skip;

/// A stream of a watch whose first event was read.
struct Watch<'a> {
    place: &'a Place<'a>,
    stream: EventStream,
    dirs: u64,
    last: u64,
    sentinels: u32,
}

impl<'a> Watch<'a> {
    fn of(place: &'a Place<'a>, rest: &str) -> Self {
        let target = place.target(&format!("files/watch?{rest}"));
        let mut stream = place.connect().stream("GET", &target, b"");
        let first = stream.next_output().unwrap();
        assert_eq!(first["event"], "watching", "{first}");
        Self {
            place,
            stream,
            dirs: first["dirs"].as_u64().unwrap(),
            last: 0,
            sentinels: 0,
        }
    }

    #[track_caller]
    fn next(&mut self) -> Value {
        let event = self.stream.next_output().expect("the watch goes on");
        self.last += 1;
        assert_eq!(event["seq"], self.last, "numbers have no gaps: {event}");
        event
    }

    /// Everything up to now: makes a directory and waits for its event. Twice, because what was renamed before it
    /// could be looked at is reported when nothing else is.
    #[track_caller]
    fn settled(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        for _ in 0..2 {
            self.sentinels += 1;
            let name = format!("sentinel-{}", self.sentinels);
            fs::create_dir(self.place.path(&name)).unwrap();
            let path = base(&json!(self.place.told(&format!("@{name}"))));
            self.until("created", &path, &mut events);
            fs::remove_dir(self.place.path(&name)).unwrap();
            self.until("deleted", &path, &mut events);
        }
        events
    }

    /// Collects the events before one.
    #[track_caller]
    fn until(&mut self, name: &str, path: &str, events: &mut Vec<Value>) {
        loop {
            let event = self.next();
            if event["event"] == name && base(&event["path"]) == path {
                return;
            }
            events.push(event);
        }
    }
}

/// A path without the `./` that a sandbox's begins with.
fn base(path: &Value) -> String {
    let path = path.as_str().unwrap();
    path.strip_prefix("./").unwrap_or(path).to_owned()
}

/// `event path`, and `event from path`, of each event, with paths relative to the place.
fn brief(place: &Place<'_>, events: &[Value]) -> Vec<String> {
    let relative = |path: &Value| base(path).replace(&place.told("@"), "");
    let line = |event: &Value| {
        let name = event["event"].as_str().unwrap();
        if name == "overflow" {
            return name.to_owned();
        }
        let kind = event["type"].as_str().unwrap();
        let path = relative(&event["path"]);
        match event.get("from") {
            Some(from) => format!("{name} {kind} {} {path}", relative(from)),
            None => format!("{name} {kind} {path}"),
        }
    };
    events.iter().map(line).collect()
}

/// What a client believes that a tree is: the type of each path.
type Tree = BTreeMap<String, String>;

/// The tree as it is.
fn tree_of(directory: &Path) -> Tree {
    fn add(tree: &mut Tree, directory: &Path, base: &str) {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{base}{}", entry.file_name().to_str().unwrap());
            let kind = entry.file_type().unwrap();
            let word = if kind.is_dir() {
                add(tree, &entry.path(), &format!("{path}/"));
                "dir"
            } else {
                "file"
            };
            tree.insert(path, word.to_owned());
        }
    }
    let mut tree = Tree::new();
    add(&mut tree, directory, "");
    tree
}

/// Takes a path and all that is below out of a tree.
fn cut(tree: &mut Tree, path: &str) -> Vec<(String, String)> {
    let below = format!("{path}/");
    let mut taken: Vec<(String, String)> = tree
        .range(below.clone()..)
        .take_while(|(other, _)| other.starts_with(&below))
        .map(|(other, kind)| (other[path.len()..].to_owned(), kind.clone()))
        .collect();
    if let Some(kind) = tree.get(path) {
        taken.push((String::new(), kind.clone()));
    }
    for (rest, _) in &taken {
        tree.remove(&format!("{path}{rest}"));
    }
    taken
}

/// Does to a tree what events say. `read` is what the client sees when it looks anew.
fn follow(place: &Place<'_>, tree: &mut Tree, events: &[Value], read: impl Fn() -> Tree) {
    let relative = |path: &Value| base(path).replace(&place.told("@"), "");
    for event in events {
        let name = event["event"].as_str().unwrap();
        if name == "overflow" {
            *tree = read();
            continue;
        }
        let path = relative(&event["path"]);
        // What is gone when it is reported may be called a file.
        let kind = event["type"].as_str().unwrap().replace("symlink", "file");
        match name {
            "created" => {
                tree.insert(path, kind);
            }
            "deleted" => drop(cut(tree, &path)),
            "moved" => {
                let taken = cut(tree, &relative(&event["from"]));
                cut(tree, &path);
                for (rest, kind) in taken {
                    tree.insert(format!("{path}{rest}"), kind);
                }
                tree.insert(path, kind);
            }
            "modified" | "attributes" => {}
            other => panic!("{other}"),
        }
    }
}

#[track_caller]
fn expect_same_trees(told: &Tree, real: &Tree, events: &[String]) {
    let missing: Vec<_> = real
        .iter()
        .filter(|(path, kind)| told.get(*path) != Some(kind))
        .collect();
    let extra: Vec<_> = told
        .iter()
        .filter(|(path, _)| !real.contains_key(*path))
        .collect();
    if missing.is_empty() && extra.is_empty() {
        return;
    }
    let last = &events[events.len().saturating_sub(200)..];
    panic!("not told: {missing:?}, told and not there: {extra:?}, after {last:#?}");
}

#[test]
fn each_change_is_told_once() {
    Place::each(|place| {
        fs::create_dir_all(place.path("old/sub")).unwrap();
        fs::write(place.path("old/file"), "x").unwrap();
        let mut watch = Watch::of(place, &format!("path={}&recursive=1", root(place)));
        assert!(watch.dirs >= 3, "{}", watch.dirs);
        let mut expect = |what: &str, expected: &[&str]| {
            let mut events = watch.settled();
            // A program that another test is just starting holds the file open a moment longer.
            let late = Instant::now() + PATIENCE;
            while events.len() < expected.len() && Instant::now() < late {
                events.extend(watch.settled());
            }
            assert_eq!(brief(place, &events), expected, "{what}");
        };
        expect("nothing", &[]);
        fs::write(place.path("new"), "content").unwrap();
        expect("write", &["created file new", "modified file new"]);
        fs::write(place.path("old/sub/deep"), "").unwrap();
        expect("touch", &["created file old/sub/deep"]);
        chmod(place.path("new"), 0o600);
        expect("chmod", &["attributes file new"]);
        fs::rename(place.path("new"), place.path("old/newer")).unwrap();
        expect("rename", &["moved file new old/newer"]);
        fs::rename(place.path("old/newer"), place.path("old/file")).unwrap();
        expect("rename over", &["moved file old/newer old/file"]);
        fs::rename(place.path("old/sub"), place.path("moved")).unwrap();
        expect("rename of a directory", &["moved dir old/sub moved"]);
        fs::write(place.path("moved/deep"), "more").unwrap();
        expect("in a renamed directory", &["modified file moved/deep"]);
        fs::rename(place.path("moved"), place.path("away")).unwrap();
        expect("rename", &["moved dir moved away"]);
        fs::rename(place.path("away"), place.path("moved")).unwrap();
        expect("rename back", &["moved dir away moved"]);
        symlink("nowhere", place.path("link")).unwrap();
        expect("link", &["created symlink link"]);
        fs::remove_file(place.path("moved/deep")).unwrap();
        expect("unlink", &["deleted file moved/deep"]);
        fs::remove_dir(place.path("moved")).unwrap();
        expect("rmdir", &["deleted dir moved"]);
        mkfifo(place.path("pipe"));
        expect("mkfifo", &["created file pipe"]);
    });
}

/// The directory as a parameter.
fn root(place: &Place<'_>) -> String {
    let path = place.told("@");
    if path.is_empty() {
        ".".to_owned()
    } else {
        path
    }
}

#[test]
fn what_enters_and_leaves_the_tree_is_created_and_deleted() {
    Place::each(|place| {
        for directory in ["in/side", "out/side/deep"] {
            fs::create_dir_all(place.path(directory)).unwrap();
        }
        fs::write(place.path("out/side/deep/file"), "").unwrap();
        let mut stream = Watch::of(place, "path=@in&recursive=1");
        let mut next = || brief(place, &[stream.next()]).remove(0);
        fs::rename(place.path("out/side"), place.path("in/new")).unwrap();
        assert_eq!(next(), "created dir in/new");
        assert_eq!(next(), "created dir in/new/deep");
        assert_eq!(next(), "created file in/new/deep/file");
        fs::write(place.path("in/new/deep/more"), "").unwrap();
        assert_eq!(next(), "created file in/new/deep/more");
        fs::rename(place.path("in/new/deep"), place.path("out/deep")).unwrap();
        assert_eq!(next(), "deleted dir in/new/deep");
        // It is watched no more.
        fs::write(place.path("out/deep/file"), "changed").unwrap();
        fs::rename(place.path("in/side"), place.path("in/last")).unwrap();
        assert_eq!(next(), "moved dir in/side in/last");
    });
}

#[test]
fn only_what_is_asked_for_is_told() {
    Place::each(|place| {
        for directory in ["w/sub", "w/node_modules/x", "w/build"] {
            fs::create_dir_all(place.path(directory)).unwrap();
        }
        let mut flat = Watch::of(place, "path=@w");
        assert_eq!(flat.dirs, 1);
        let mut deep = Watch::of(
            place,
            "path=@w&recursive=1&exclude=node_modules&exclude=*.log",
        );
        assert_eq!(deep.dirs, 3);
        fs::write(place.path("w/sub/a"), "").unwrap();
        fs::write(place.path("w/node_modules/x/a"), "").unwrap();
        fs::write(place.path("w/sub/a.log"), "").unwrap();
        fs::rename(place.path("w/sub/a"), place.path("w/sub/b.log")).unwrap();
        fs::rename(place.path("w/build"), place.path("w/sub/node_modules")).unwrap();
        fs::write(place.path("w/sub/node_modules/a"), "").unwrap();
        fs::create_dir(place.path("w/end")).unwrap();
        let told = |watch: &mut Watch<'_>| {
            let mut all = Vec::new();
            while all.last().is_none_or(|last| last != "created dir w/end") {
                all.push(brief(place, &[watch.next()]).remove(0));
            }
            all
        };
        assert_eq!(
            told(&mut deep),
            [
                "created file w/sub/a",
                "deleted file w/sub/a",
                "deleted dir w/build",
                "created dir w/end"
            ]
        );
        assert_eq!(
            told(&mut flat),
            ["deleted dir w/build", "created dir w/end"]
        );
    });
}

#[test]
fn a_file_that_stays_open_is_told_all_the_same() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        let mut watch = Watch::of(place, "path=@w");
        let mut file = fs::File::create(place.path("w/log")).unwrap();
        assert_eq!(brief(place, &[watch.next()]), ["created file w/log"]);
        for _ in 0..3 {
            std::io::Write::write_all(&mut file, b"line\n").unwrap();
            assert_eq!(brief(place, &[watch.next()]), ["modified file w/log"]);
        }
    });
}

#[test]
fn directories_that_are_renamed_over_each_other_stay_watched() {
    Place::each(|place| {
        let at = |name: &str| place.path(&format!("w/{name}"));
        for name in ["a/in-a", "b/in-b", "c"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        let mut watch = Watch::of(place, "path=@w&recursive=1");
        let name = |path: PathBuf| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        assert!(exchange(&name(at("a")), &name(at("b"))));
        fs::write(at("a/in-b/1"), "").unwrap();
        fs::write(at("b/in-a/2"), "").unwrap();
        // An empty directory is replaced by one that is not.
        fs::rename(at("a"), at("c")).unwrap();
        fs::write(at("c/in-b/3"), "").unwrap();
        fs::rename(at("b"), at("c/in-b/a")).unwrap();
        fs::write(at("c/in-b/a/in-a/4"), "").unwrap();
        fs::create_dir(at("end")).unwrap();
        let mut tree = Tree::new();
        for path in ["a", "a/in-a", "b", "b/in-b", "c"] {
            tree.insert(format!("w/{path}"), "dir".to_owned());
        }
        let mut events = Vec::new();
        while !tree.contains_key("w/end") {
            let event = watch.next();
            follow(place, &mut tree, std::slice::from_ref(&event), || {
                panic!("{event}")
            });
            events.extend(brief(place, &[event]));
        }
        let mut real = tree_of(&place.path("w"));
        real = real
            .into_iter()
            .map(|(path, kind)| (format!("w/{path}"), kind))
            .collect();
        expect_same_trees(&tree, &real, &events);
    });
}

/// Does something at random to the tree below a directory.
fn change_at_random(random: &mut Random, directory: &Path) {
    let names = ["a", "b", "c", "d"];
    let mut path = || {
        let depth = 1 + random.below(4);
        let parts: Vec<&str> = (0..depth).map(|_| random.of(&names)).collect();
        directory.join(parts.join("/"))
    };
    let (one, other) = (path(), path());
    match random.below(12) {
        0..=2 => drop(fs::create_dir_all(&one)),
        3..=5 => drop(fs::write(&one, "content")),
        6 => drop(fs::remove_file(&one)),
        7 => drop(fs::remove_dir_all(&one)),
        8 | 9 => drop(fs::rename(&one, &other)),
        10 => {
            let name = |path: &Path| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            exchange(&name(&one), &name(&other));
        }
        _ => drop(symlink("a", &one)),
    }
}

/// Changes a tree at random, some changes at a time by each of some threads, and compares the events with the tree
/// as it is.
fn follow_random_changes(counts: &[usize], rounds: usize, threads: u64) {
    Place::each(|place| {
        let directory = place.path("w");
        fs::create_dir(&directory).unwrap();
        for seed in 0..6 {
            let mut random = Random(seed);
            for _ in 0..30 {
                change_at_random(&mut random, &directory);
            }
            let mut tree = tree_of(&place.directory);
            let mut watch = Watch::of(place, &format!("path={}&recursive=1", root(place)));
            let mut told = Vec::new();
            for round in 0..rounds {
                let change = |thread: u64| {
                    let mut random = Random(seed + 1000 * thread + 1_000_000 * round as u64);
                    for _ in 0..counts[round % counts.len()] {
                        change_at_random(&mut random, &directory);
                    }
                };
                std::thread::scope(|scope| {
                    for thread in 0..threads {
                        scope.spawn(move || change(thread));
                    }
                });
                let events = watch.settled();
                let real = tree_of(&place.directory);
                follow(place, &mut tree, &events, || real.clone());
                told.extend(brief(place, &events));
                expect_same_trees(&tree, &real, &told);
            }
        }
    });
}

#[test]
fn what_is_told_of_random_changes_leads_to_the_tree_as_it_is() {
    follow_random_changes(&[1], 30, 1);
}

#[test]
fn what_is_told_of_many_random_changes_at_once_leads_to_the_tree_as_it_is() {
    follow_random_changes(&[3, 30, 100, 300], 4, 1);
}

#[test]
fn what_is_told_of_random_changes_by_several_programs_leads_to_the_tree_as_it_is() {
    follow_random_changes(&[10, 100], 4, 3);
}

/// A move within the tree can change what is excluded.
#[test]
fn what_is_excluded_by_its_path_is_told_when_it_moves_elsewhere() {
    Place::each(|place| {
        fs::create_dir_all(place.path("w/a/hidden/sub")).unwrap();
        let mut watch = Watch::of(place, "path=@w&recursive=1&exclude=a/hidden");
        assert_eq!(watch.dirs, 2);
        fs::rename(place.path("w/a"), place.path("w/b")).unwrap();
        fs::write(place.path("w/b/hidden/sub/file"), "").unwrap();
        fs::create_dir(place.path("w/end")).unwrap();
        let mut events = Vec::new();
        watch.until("created", &base(&json!(place.told("@w/end"))), &mut events);
        assert_eq!(
            brief(place, &events),
            [
                "deleted dir w/a",
                "created dir w/b",
                "created dir w/b/hidden",
                "created dir w/b/hidden/sub",
                "created file w/b/hidden/sub/file"
            ]
        );
    });
}

#[test]
fn of_a_storm_all_is_told_or_that_something_was_lost() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    let place = Place::machine(&server, &dir);
    fs::create_dir(dir.join("w")).unwrap();
    let mut watch = Watch::of(&place, &format!("path={}&recursive=1", root(&place)));
    let mut tree = tree_of(dir.path());
    let script = "cd w; for d in 1 2 3 4 5; do mkdir $d; (cd $d; seq 20000 | xargs touch); done";
    let mut storm = Command::new("sh")
        .args(["-c", script])
        .current_dir(dir.path())
        .spawn()
        .unwrap();
    let mut overflows = 0;
    let mut sentinel = false;
    loop {
        if !sentinel && storm.try_wait().unwrap().is_some() {
            fs::create_dir(dir.join("end")).unwrap();
            sentinel = true;
        }
        let event = watch.next();
        overflows += u32::from(event["event"] == "overflow");
        let is_end = event["event"] == "created" && event["path"] == place.told("@end");
        follow(&place, &mut tree, &[event], || tree_of(dir.path()));
        if is_end || sentinel && overflows > 0 && tree.contains_key("end") {
            break;
        }
    }
    watch.settled();
    eprintln!("{overflows} overflows");
    let real = tree_of(dir.path());
    assert_eq!(
        real.keys().filter(|path| path.starts_with("w/")).count(),
        100_005
    );
    expect_same_trees(&tree, &real, &[]);
    // And the watch is complete again.
    fs::write(dir.join("w/5/after"), "").unwrap();
    let events = brief(&place, &watch.settled());
    assert!(
        events.contains(&"created file w/5/after".to_owned()),
        "{events:?}"
    );
}

#[test]
fn a_watch_begins_while_the_tree_changes_all_the_time() {
    Place::each(|place| {
        for number in 0..300 {
            fs::create_dir_all(place.path(&format!("w/d/{number}"))).unwrap();
        }
        symlink(".", place.path("w/l")).unwrap();
        let name = |name| CString::new(place.path(name).to_str().unwrap()).unwrap();
        let (directory, link) = (name("w/d"), name("w/l"));
        let begun = Instant::now();
        meanwhile(
            || assert!(exchange(&directory, &link)),
            || Watch::of(place, "path=@w&recursive=1"),
        );
        assert!(begun.elapsed() < Duration::from_secs(20));
    });
}

#[test]
fn a_watch_ends_with_its_directory() {
    Place::each(|place| {
        fs::create_dir_all(place.path("w/sub")).unwrap();
        for change in ["delete", "rename"] {
            let mut watch = Watch::of(place, "path=@w&recursive=1");
            if change == "delete" {
                fs::remove_dir_all(place.path("w")).unwrap();
                assert_eq!(brief(place, &[watch.next()]), ["deleted dir w/sub"]);
            } else {
                fs::rename(place.path("w"), place.path("elsewhere")).unwrap();
            }
            let end = watch.stream.next_output().unwrap();
            assert_eq!(
                (&end["event"], &end["reason"]),
                (&json!("end"), &json!("deleted"))
            );
            assert_eq!(watch.stream.next_output(), None, "it is the last");
            fs::create_dir_all(place.path("w")).unwrap();
        }
    });
}

/// The inotify instances that a server has.
fn instances(place: &Place<'_>) -> Option<usize> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", place.pid())).ok()?;
    fs::read_link(format!("/proc/{}/exe", place.pid())).ok()?;
    let is_inotify = |path: PathBuf| {
        fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("inotify"))
    };
    Some(
        descriptors
            .flatten()
            .filter(|entry| is_inotify(entry.path()))
            .count(),
    )
}

/// The threads of a server that read the events of watches.
fn threads(pid: i32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name == "watches\n").count()
}

#[test]
fn a_watch_ends_when_its_client_leaves() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        if instances(place).is_none() {
            skip!("only root can see what the server holds");
        }
        let watch = Watch::of(place, "path=@w");
        assert_eq!(instances(place), Some(1));
        drop(watch);
        let begun = Instant::now();
        wait_until("the watch is gone", PATIENCE, || {
            instances(place) == Some(0)
        });
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn what_cannot_be_watched_is_refused() {
    Place::each(|place| {
        place.make("file", "");
        symlink(&place.directory, place.path("link")).unwrap();
        for (rest, status, code) in [
            ("path=@none", 404, "not_found"),
            ("path=@file", 409, "not_directory"),
            ("recursive=1", 400, "bad_request"),
            ("path=@file&recursive=maybe", 400, "bad_request"),
            ("path=@file&exclude=%5B", 400, "bad_request"),
        ] {
            let reply = place.get(&format!("files/watch?{rest}"));
            expect_error(&reply, status, code);
        }
        let patterns = vec!["**/".repeat(1364) + "x"; 1000];
        let body = json!({"path": "@", "exclude": patterns});
        let reply = place.post("files/watches", &body);
        expect_error(&reply, 400, "bad_request");
        if place.is_sandbox {
            expect_error(&place.get("files/watch?path=link"), 403, "forbidden");
            fs::create_dir(place.path("closed")).unwrap();
            chmod(place.path("closed"), 0o700);
            // It is root's, so the sandbox may not read it; unless it is left out, the watch would be a part only.
            let reply = place.get("files/watch?path=.&recursive=1");
            expect_error(&reply, 403, "forbidden");
            Watch::of(place, "path=.&recursive=1&exclude=closed");
        }
    });
}

#[test]
fn a_new_directory_that_may_not_be_read_is_a_loss_until_it_may() {
    Place::each(|place| {
        if !place.is_sandbox {
            return;
        }
        fs::create_dir(place.path("w")).unwrap();
        let mut watch = Watch::of(place, "path=@w&recursive=1");
        fs::create_dir_all(place.path("outside/in")).unwrap();
        chmod(place.path("outside"), 0o700);
        fs::rename(place.path("outside"), place.path("w/closed")).unwrap();
        let told = brief(place, &[watch.next(), watch.next()]);
        assert_eq!(told, ["created dir w/closed", "overflow"]);
        chmod(place.path("w/closed"), 0o755);
        let told = brief(place, &[watch.next(), watch.next()]);
        assert_eq!(told, ["attributes dir w/closed", "created dir w/closed/in"]);
    });
}

#[test]
fn a_tree_with_more_directories_than_the_kernel_watches_is_refused_with_both_numbers() {
    let limited = "echo 40 > /proc/sys/user/max_inotify_watches && exec \"$0\"";
    let words = ["unshare", "--user", "--map-root-user", "sh", "-c", limited];
    let tried = Command::new(words[0])
        .args(&words[1..])
        .arg("true")
        .status();
    if !tried.is_ok_and(|status| status.success()) {
        skip!("no user namespace with a limit of its own can be made");
    }
    let server = Server::builder().wrapped_in(&words).start();
    let dir = TempDir::new();
    let place = Place::machine(&server, &dir);
    for number in 0..60 {
        fs::create_dir(dir.join(&number.to_string())).unwrap();
    }
    let reply = place.get(&format!("files/watch?path={}&recursive=1", root(&place)));
    expect_error(&reply, 503, "no_watches");
    assert_eq!(
        (&reply.json()["dirs"], &reply.json()["limit"]),
        (&json!(61), &json!(40))
    );
    // What was refused holds nothing.
    for number in 0..40 {
        fs::remove_dir(dir.join(&number.to_string())).unwrap();
    }
    for _ in 0..3 {
        let watch = Watch::of(&place, &format!("path={}&recursive=1", root(&place)));
        assert_eq!(watch.dirs, 21);
        drop(watch);
        wait_until("the watch is gone", PATIENCE, || {
            instances(&place).is_none_or(|count| count == 0)
        });
    }
    // When it happens later, the watch says so and ends.
    let mut watch = Watch::of(&place, &format!("path={}&recursive=1", root(&place)));
    for number in 100..140 {
        fs::create_dir(dir.join(&number.to_string())).unwrap();
    }
    let mut events: Vec<Value> = watch
        .stream
        .by_ref()
        .filter(|event| event["event"] != "ping")
        .collect();
    let end = events.pop().unwrap();
    assert_eq!(
        (&end["event"], &end["reason"]),
        (&json!("end"), &json!("no_watches"))
    );
    assert_eq!(events.pop().unwrap()["event"], "overflow");
}

/// The events of a registered watch.
fn fetch(place: &Place<'_>, id: &str, rest: &str) -> (Vec<Value>, Value) {
    let reply = place.get(&format!("files/watches/{id}/events?{rest}"));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = reply.text();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut events: Vec<Value> = lines.filter(|event| event["event"] != "ping").collect();
    let end = events.pop().unwrap();
    assert_eq!(end["event"], "end", "{text}");
    (events, end)
}

/// A client that waits for the events of a registered watch.
fn reader(place: &Place<'_>, id: &str) -> EventStream {
    let target = place.target(&format!("files/watches/{id}/events?timeout=60"));
    place.connect().stream("GET", &target, b"")
}

#[test]
fn a_watch_that_is_deleted_says_closed_to_who_waits_for_it() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        expect_ok(&place.post("files/watches", &json!({"path": "@w", "id": "mine"})));
        let mut reader = reader(place, "mine");
        expect_ok(&place.request("DELETE", "files/watches/mine", b""));
        let end = reader.find(|event| event["event"] != "ping").unwrap();
        assert_eq!(end, json!({"event": "end", "next": 0, "reason": "closed"}));
        assert_eq!(reader.next_output(), None, "it is the last");
    });
}

#[test]
fn a_client_that_polls_gets_every_event_once() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        let made =
            expect_ok(&place.post("files/watches", &json!({"path": "@w", "recursive": true})));
        assert_eq!(made, json!({"id": "w-1", "dirs": 1}));
        let (events, end) = fetch(place, "w-1", "");
        assert_eq!((events.len(), &end["next"]), (0, &json!(0)));
        fs::create_dir(place.path("w/sub")).unwrap();
        fs::write(place.path("w/sub/a"), "").unwrap();
        let mut told = Vec::new();
        let mut next = 0;
        while told.len() < 2 {
            let (events, end) = fetch(place, "w-1", &format!("after={next}&timeout=20"));
            let (again, _) = fetch(place, "w-1", &format!("after={next}"));
            assert_eq!(
                again[..events.len()],
                events,
                "a lost answer can be asked for again"
            );
            next = end["next"].as_u64().unwrap();
            assert_eq!(events.last().unwrap()["seq"], next);
            told.extend(brief(place, &events));
        }
        assert_eq!(told, ["created dir w/sub", "created file w/sub/a"]);
        let begun = Instant::now();
        let (events, end) = fetch(place, "w-1", &format!("after={next}&timeout=0.5"));
        assert!(begun.elapsed() >= Duration::from_millis(500));
        assert_eq!((events.len(), &end["next"]), (0, &json!(next)));
        fs::remove_dir_all(place.path("w")).unwrap();
        let mut reason = Value::Null;
        while reason.is_null() {
            let (events, end) = fetch(place, "w-1", &format!("after={next}&timeout=20"));
            told.extend(brief(place, &events));
            next = end["next"].as_u64().unwrap();
            reason = end["reason"].clone();
        }
        assert_eq!(reason, "deleted");
        assert_eq!(told[2..], ["deleted file w/sub/a", "deleted dir w/sub"]);
        let deleted = expect_ok(&place.request("DELETE", "files/watches/w-1", b""));
        assert_eq!(deleted, json!({"id": "w-1", "deleted": true}));
        for (method, route) in [
            ("GET", "files/watches/w-1/events"),
            ("DELETE", "files/watches/w-1"),
        ] {
            expect_error(&place.request(method, route, b""), 404, "not_found");
        }
    });
}

#[test]
fn a_ring_that_is_full_says_that_events_were_lost() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        expect_ok(&place.post("files/watches", &json!({"path": "@w", "id": "mine"})));
        let at = |number| place.path(&format!("w/{number}"));
        fs::write(at(0), "").unwrap();
        for number in 0..12_000 {
            fs::rename(at(number), at(number + 1)).unwrap();
        }
        fs::create_dir(place.path("w/end")).unwrap();
        // Asking for all there is forgets nothing.
        let mut told = Vec::new();
        wait_until("the last change is told", PATIENCE, || {
            told = fetch(place, "mine", "after=0&timeout=0").0;
            let last = told.iter().rev();
            let mut paths = last.map(|event| &event["path"]);
            paths.any(|path| *path == place.told("@w/end"))
        });
        assert_eq!(told[0]["event"], "overflow");
        assert!(told.len() <= 10_001, "{} events", told.len());
    });
}

#[test]
fn ids_are_chosen_once_and_there_are_64() {
    Place::each(|place| {
        for name in ["w", "v"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        let one = json!({"path": "@w", "id": "one", "exclude": ["*.log"]});
        for _ in 0..3 {
            let made = expect_ok(&place.post("files/watches", &one));
            assert_eq!(made, json!({"id": "one", "dirs": 1}));
        }
        let other = json!({"path": "@v", "id": "one", "exclude": ["*.log"]});
        expect_error(&place.post("files/watches", &other), 409, "id_in_use");
        for body in [
            json!({}),
            json!({"path": 1}),
            json!({"path": "@w", "recursive": 1}),
            json!({"path": "@w", "exclude": "*.log"}),
            json!({"path": "@w", "exclude": [1]}),
            json!({"path": "@w", "id": "w-7"}),
            json!({"path": "@w", "id": "a/b"}),
        ] {
            expect_error(&place.post("files/watches", &body), 400, "bad_request");
        }
        let body = json!({"path": "@w"});
        let mut ids = vec!["one".to_owned()];
        loop {
            let reply = place.post("files/watches", &body);
            if reply.status != 200 {
                // The kernel may let the server have fewer.
                let is_kernel = reply.code() == "no_watches" && ids.len() > 8;
                assert!(
                    is_kernel || reply.code() == "over_limit" && ids.len() == 64,
                    "{} {}",
                    ids.len(),
                    reply.text()
                );
                break;
            }
            ids.push(reply.json()["id"].as_str().unwrap().to_owned());
        }
        for id in &ids {
            expect_ok(&place.request("DELETE", &format!("files/watches/{id}"), b""));
        }
        if instances(place).is_some() {
            wait_until("the watches are gone", PATIENCE, || {
                instances(place) == Some(0)
            });
        }
        // The kernel counts an instance for a moment after it was closed.
        wait_until("there is room again", PATIENCE, || {
            let reply = place.post("files/watches", &body);
            assert!(
                reply.status == 200 || reply.code() == "no_watches",
                "{}",
                reply.text()
            );
            reply.status == 200
        });
    });
}

#[test]
fn a_registered_watch_is_no_work_and_a_stream_is() {
    let [server, other] = [(); 2].map(|()| Server::builder().env("SBX_IDLE_TIMEOUT", 1).start());
    let dir = TempDir::new();
    fs::create_dir(dir.join("w")).unwrap();
    let place = Place::machine(&server, &dir);
    let mut watch = Watch::of(&place, "path=@w");
    let body = json!({"path": "@w"});
    expect_ok(&place.post("files/watches", &body));
    expect_ok(&Place::machine(&other, &dir).post("files/watches", &body));
    // The one without a stream is idle and ends; the other one has had the same time.
    let mut other = other;
    other.wait_for_exit(PATIENCE);
    fs::create_dir(dir.join("w/a")).unwrap();
    assert_eq!(
        watch.next()["event"],
        "created",
        "the stream keeps the server"
    );
    drop(watch);
    let mut server = server;
    server.wait_for_exit(PATIENCE);
}

#[test]
fn a_sandbox_that_is_deleted_leaves_no_watch_behind() {
    if !is_root() {
        skip!("needs root");
    }
    if !may_look_into_processes() {
        skip!("the server's descriptors cannot be seen without CAP_SYS_PTRACE");
    }
    let server = Server::host().start();
    let threads = || threads(server.inner_pid());
    let sandbox = server.sandbox();
    let place = Place::sandbox(&server, &sandbox);
    fs::create_dir(place.path("w")).unwrap();
    let mut watch = Watch::of(&place, "path=w");
    for _ in 0..3 {
        expect_ok(&place.post("files/watches", &json!({"path": "w"})));
    }
    assert_eq!((instances(&place), threads()), (Some(4), 1));
    let mut reader = reader(&place, "w-1");
    sandbox.delete();
    for stream in [&mut watch.stream, &mut reader] {
        let end = stream.find(|event| event["event"] == "end");
        assert_eq!(end.unwrap()["reason"], "closed");
        assert_eq!(stream.next_output(), None, "it is the last");
    }
    wait_until("the watches are gone", PATIENCE, || {
        (instances(&place), threads()) == (Some(0), 0)
    });
}

#[test]
fn a_client_that_knows_more_than_a_watch_is_told_that_it_lost_something() {
    Place::each(|place| {
        fs::create_dir(place.path("w")).unwrap();
        expect_ok(&place.post("files/watches", &json!({"path": "@w", "id": "mine"})));
        let overflow = |seq: u64| json!({"event": "overflow", "seq": seq});
        let (events, end) = fetch(place, "mine", "after=100&timeout=20");
        assert_eq!((events, &end["next"]), (vec![overflow(0)], &json!(0)));
        for (name, seq) in [("a", 1), ("b", 2)] {
            fs::create_dir(place.path(&format!("w/{name}"))).unwrap();
            let (created, end) = fetch(place, "mine", &format!("after={}&timeout=20", seq - 1));
            assert_eq!(brief(place, &created), [format!("created dir w/{name}")]);
            assert_eq!(end["next"], seq);
            // Nothing is forgotten by it.
            for _ in 0..2 {
                let (events, end) = fetch(place, "mine", "after=100");
                assert_eq!(events, [vec![overflow(seq - 1)], created.clone()].concat());
                assert_eq!(end["next"], seq);
            }
        }
        let (events, end) = fetch(place, "mine", "after=2");
        assert_eq!((events.len(), &end["next"]), (0, &json!(2)));
        let (events, end) = fetch(place, "mine", "after=9223372036854775807");
        assert_eq!((events, &end["next"]), (vec![overflow(2)], &json!(2)));
    });
}

#[test]
fn a_watch_that_ended_is_registered_anew() {
    Place::each(|place| {
        let body = json!({"path": "@w", "id": "mine"});
        for _ in 0..2 {
            fs::create_dir(place.path("w")).unwrap();
            expect_ok(&place.post("files/watches", &body));
            fs::create_dir(place.path("w/a")).unwrap();
            let (events, end) = fetch(place, "mine", "timeout=20");
            assert_eq!(brief(place, &events), ["created dir w/a"]);
            assert_eq!(end, json!({"event": "end", "next": 1}));
            fs::remove_dir_all(place.path("w")).unwrap();
            wait_until("the watch has ended", PATIENCE, || {
                fetch(place, "mine", "").1["reason"] == "deleted"
            });
            // What it told stays if there is nothing to watch.
            expect_error(&place.post("files/watches", &body), 404, "not_found");
            assert_eq!(fetch(place, "mine", "").1["next"], 2);
        }
        // Where there is no more room it takes that of the one that ended. Watches that ended count, and hold none of
        // the inotify instances of which the kernel gives few.
        let ids: Vec<String> = (1..64).map(|number| format!("id-{number}")).collect();
        for batch in ids.chunks(8) {
            fs::create_dir(place.path("w")).unwrap();
            for id in batch {
                expect_ok(&place.post("files/watches", &json!({"path": "@w", "id": id})));
            }
            fs::remove_dir(place.path("w")).unwrap();
            for id in batch {
                let (_, end) = fetch(place, id, "timeout=20");
                assert_eq!(end["reason"], "deleted");
            }
        }
        fs::create_dir(place.path("w")).unwrap();
        let other = json!({"path": "@w", "id": "other"});
        expect_error(&place.post("files/watches", &other), 503, "over_limit");
        expect_ok(&place.post("files/watches", &body));
        expect_error(&place.post("files/watches", &other), 503, "over_limit");
        expect_ok(&place.request("DELETE", "files/watches/id-1", b""));
        expect_ok(&place.post("files/watches", &other));
    });
}

#[test]
fn a_watch_that_ended_has_the_thread_that_removes_it() {
    Place::each(|place| {
        if instances(place).is_none() {
            skip!("only root can see what the server holds");
        }
        for name in ["w", "v"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        expect_ok(&place.post("files/watches", &json!({"path": "@w", "id": "mine"})));
        fs::remove_dir(place.path("w")).unwrap();
        let (_, end) = fetch(place, "mine", "timeout=20");
        assert_eq!(end["reason"], "deleted");
        for _ in 0..10 {
            let other = json!({"path": "@v", "id": "other"});
            expect_ok(&place.post("files/watches", &other));
            wait_until("only the other one is left", PATIENCE, || {
                instances(place) == Some(1)
            });
            expect_ok(&place.request("DELETE", "files/watches/other", b""));
            wait_until("the other one is gone", PATIENCE, || {
                instances(place) == Some(0)
            });
            fetch(place, "mine", "");
            assert_eq!(threads(place.pid()), 1);
        }
        expect_ok(&place.request("DELETE", "files/watches/mine", b""));
        wait_until("the thread is gone", PATIENCE, || threads(place.pid()) == 0);
    });
}
