//! The promise of `files/patch`: what diff and git write is applied as they mean it, to all files or to none,
//! and a hunk that does not fit is named with what stands there.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::grepping::nice_values;
use super::{MIB, Mount, Place, Site, encode, expect_error, expect_ok, in_both_modes};
use crate::fixture::{
    Connection, PATIENCE, Random, Reply, Server, TempDir, descriptors_of, is_root,
    may_look_into_processes, memory_of, names_in, wait_until,
};
use crate::skip;

fn patch(site: &Site<'_>, rest: &str, body: impl AsRef<[u8]>) -> Reply {
    let route = format!("patch?path={}{rest}", encode(site.path("")));
    site.request("POST", &route, body.as_ref())
}

/// What a shell command writes in a directory.
fn output(directory: &Path, command: &str) -> Vec<u8> {
    let output = Command::new("sh")
        .args(["-c", command])
        .env("HOME", directory)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("LC_ALL", "C")
        .current_dir(directory)
        .output()
        .unwrap();
    // diff ends with 1 where there is a difference.
    assert!(
        output.status.code() <= Some(1),
        "{command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// The files below a directory with their content and whether they are executable.
fn tree(directory: &Path) -> Vec<(String, Vec<u8>, bool)> {
    let list = output(
        directory,
        "find . -type f -not -path './.git/*' -print0 | LC_ALL=C sort -z",
    );
    let names = list
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty());
    names
        .map(|name| {
            let name = String::from_utf8(name.to_vec()).unwrap();
            let path = directory.join(&name);
            let is_executable = fs::metadata(&path).unwrap().permissions().mode() & 0o100 != 0;
            (name, fs::read(path).unwrap(), is_executable)
        })
        .collect()
}

const BEFORE: &str = "mkdir -p d; seq 1 60 > numbers; printf 'a\\nb' > end; echo gone > gone; seq 1 30 > 'd/old name'; \
    echo run > script; printf 'x\\ty\\n' > 'd/t\u{e9}\"q'; : > empty; seq 1 40 > copied";
const AFTER: &str = "sed -i -e 's/^7$/seven/' -e '/^30$/d' -e 's/^59$/&\\nnew/' numbers; printf 'a\\nb\\n' > end; rm gone; \
    mkdir -p e; mv 'd/old name' 'e/new name'; sed -i 's/^12$/twelve/' 'e/new name'; chmod +x script; \
    echo more >> 'd/t\u{e9}\"q'; rm empty; echo made > e/made; : > e/void; printf '#!/bin/sh' > e/run; chmod +x e/run; \
    cp copied d/copy; sed -i 's/^3$/three/' copied";

#[test]
fn a_patch_of_git_leads_where_git_was() {
    if Command::new("git").arg("--version").output().is_err() {
        skip!("needs git");
    }
    in_both_modes(|site| {
        let dir = TempDir::new();
        let git = "git -c user.name=x -c user.email=x@x";
        output(
            dir.path(),
            &format!("git init -q; {BEFORE}; git add -A; {git} commit -qm one"),
        );
        for (name, content, _) in tree(dir.path()) {
            site.write(&name, content);
        }
        output(
            dir.path(),
            &format!("{AFTER}; git add -A; {git} commit -qm two"),
        );
        let diff = output(dir.path(), "git diff -M -C -C HEAD~1 HEAD");
        let text = String::from_utf8_lossy(&diff);
        for feature in [
            "rename from",
            "copy from",
            "new file mode",
            "deleted file",
            "new mode",
            "No newline",
            "\\303",
        ] {
            assert!(text.contains(feature), "the patch has no {feature}: {text}");
        }
        let before = tree(&site.root);
        let tried = expect_ok(&patch(site, "&dry_run=1", &diff));
        assert_eq!(tree(&site.root), before);
        let done = expect_ok(&patch(site, "", &diff));
        assert_eq!(done, tried);
        assert_eq!(tree(&site.root), tree(dir.path()));
        let change = |name: &str| {
            let files = done["files"].as_array().unwrap();
            let path = json!(site.path(name));
            files
                .iter()
                .find(|file| file["path"] == path)
                .unwrap_or_else(|| panic!("{name}: {done}"))
                .clone()
        };
        assert_eq!(
            change("numbers"),
            json!({"path": site.path("numbers"), "change": "modified", "hunks": 3})
        );
        assert_eq!(change("gone")["change"], "deleted");
        assert_eq!(change("script")["change"], "modified");
        assert_eq!(change("d/copy")["change"], "copied");
        assert_eq!(change("e/new name")["from"], json!(site.path("d/old name")));
        // It cannot be applied again.
        expect_error(&patch(site, "", &diff), 409, "patch_failed");
        assert_eq!(tree(&site.root), tree(dir.path()));
    });
}

#[test]
fn a_patch_of_diff_leads_where_diff_looked() {
    in_both_modes(|site| {
        for seed in 0..8 {
            let dir = TempDir::new();
            let mut random = Random(seed + 1);
            fs::create_dir(dir.join("a")).unwrap();
            for number in 0..4 {
                let count = random.below(60);
                let lines: Vec<_> = (0..count)
                    .map(|_| {
                        format!(
                            "{}
",
                            random.below(6)
                        )
                    })
                    .collect();
                let text = lines.concat();
                fs::write(dir.join(&format!("a/f{number}")), text).unwrap();
            }
            output(
                dir.path(),
                "cp -r a b; rm b/f3; echo new > b/f4; rm -f a/f4",
            );
            for number in 0..3 {
                let path = dir.join(&format!("b/f{number}"));
                let text = fs::read_to_string(&path).unwrap();
                let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
                for _ in 0..4 {
                    let at = random.below(lines.len() + 1);
                    if random.one_in(2) || at == lines.len() {
                        lines.insert(at, format!("new {}", random.below(9)));
                    } else {
                        lines.remove(at);
                    }
                }
                fs::write(path, lines.join("\n")).unwrap();
            }
            let diff = output(dir.path(), "TZ=UTC diff -urN a b");
            output(&site.root, "rm -f f0 f1 f2 f3 f4");
            for (name, content, _) in tree(Path::new(&dir.join("a"))) {
                site.write(&name, content);
            }
            expect_ok(&patch(site, "", &diff));
            assert_eq!(
                tree(&site.root),
                tree(Path::new(&dir.join("b"))),
                "seed {seed}"
            );
        }
    });
}

const CHANGE: &str = "--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n";

#[test]
fn a_hunk_that_does_not_fit_changes_no_file_and_is_told() {
    in_both_modes(|site| {
        site.write("other", "one\n");
        let first = "--- a/other\n+++ b/other\n@@ -1 +1 @@\n-one\n+two\n";
        let both = [
            first,
            "diff --git a/new b/new\nnew file mode 100644\n",
            CHANGE,
        ]
        .concat();
        for (text, details) in [
            (
                "a\nb\nx\nd\n",
                json!({"file": site.path("f"), "hunk": 1, "line": 3, "text": "x"}),
            ),
            (
                "b\nc\nd\nb\nc\nd\n",
                json!({"file": site.path("f"), "hunk": 1, "line": 2, "text": "c"}),
            ),
            (
                "",
                json!({"file": site.path("f"), "hunk": 1, "line": 1, "text": ""}),
            ),
        ] {
            site.write("f", text);
            let reply = patch(site, "", &both);
            expect_error(&reply, 409, "patch_failed");
            let mut document = reply.json();
            document
                .as_object_mut()
                .unwrap()
                .retain(|name, _| !["error", "code"].contains(&name.as_str()));
            if !text.is_empty() {
                assert_eq!(document, details, "{}", reply.text());
            }
            assert_eq!(
                (site.content("other"), site.content("f")),
                ("one\n".to_owned(), text.to_owned())
            );
            assert!(!site.root.join("new").exists());
        }
        site.write("f", "x\ny\na\nb\nc\nd\n");
        let done = expect_ok(&patch(site, "", &both));
        assert_eq!(done["files"][2]["moved"], json!([2]));
        assert_eq!(site.content("f"), "x\ny\na\nb\nC\nd\n");
        let again = patch(site, "", "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n");
        expect_error(&again, 409, "patch_failed");
        let names: Vec<_> = names_in(&site.root)
            .into_iter()
            .filter(|name| !name.starts_with('.'))
            .collect();
        assert_eq!(names, ["f", "new", "other"]);
    });
}

/// The last of many files cannot be made: its name is a directory by then. All that was done is undone.
#[test]
fn a_failure_in_the_middle_is_undone() {
    in_both_modes(|site| {
        let names = ["changed", "gone", "moved", "d/gone"];
        for name in names {
            site.write(name, format!("{name}\n"));
        }
        fs::set_permissions(site.root.join("gone"), fs::Permissions::from_mode(0o751)).unwrap();
        let look = || names.map(|name| fs::metadata(site.root.join(name)).unwrap());
        let before = (tree(&site.root), look());
        let body = [
            "--- a/changed\n+++ b/changed\n@@ -1 +1 @@\n-changed\n+x\n",
            "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n",
            "--- a/d/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-d/gone\n",
            "diff --git a/moved b/gone\nrename from moved\nrename to gone\n",
            "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n",
            "--- /dev/null\n+++ b/m/n/o/new\n@@ -0,0 +1 @@\n+x\n",
            "--- /dev/null\n+++ b/m/p/new\n@@ -0,0 +1 @@\n+x\n",
            "--- /dev/null\n+++ b/bad\n@@ -0,0 +1 @@\n+x\n",
            "--- /dev/null\n+++ b/bad/new\n@@ -0,0 +1 @@\n+x\n",
        ];
        expect_error(&patch(site, "", body.concat()), 409, "changed");
        assert_eq!(tree(&site.root), before.0);
        for (old, new) in before.1.iter().zip(look()) {
            let attributes =
                |status: &fs::Metadata| (status.mode(), status.uid(), status.gid(), status.size());
            assert_eq!(attributes(&new), attributes(old));
        }
        let [_, gone, ..] = look();
        assert_eq!(gone.ino(), before.1[1].ino(), "it is the same file");
        let names = names_in(&site.root);
        for made in ["new", "m", "bad"] {
            assert!(!names.contains(&made.to_owned()), "{names:?}");
        }
        assert!(!names.iter().any(|name| name.starts_with(".sbx-")));
        expect_ok(&patch(site, "", body[..7].concat()));
        assert_eq!(site.content("gone"), "moved\n");
        assert_eq!(site.content("m/p/new"), "x\n");
    });
}

/// A patch that makes these files.
fn making(names: impl IntoIterator<Item = String>) -> String {
    let make = |name| format!("--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+new\n");
    names.into_iter().map(make).collect()
}

/// Sends a patch, and returns the reply and the most descriptors that the server had open meanwhile, beyond those before.
fn watched(site: &Site<'_>, body: &str) -> (Reply, usize) {
    let pid = if site.base.is_empty() {
        site.server.inner_pid()
    } else {
        site.server.pid()
    };
    // Whatever the first patch starts is there from now on.
    let unwritable = making(["y".repeat(300)]);
    expect_error(&patch(site, "", unwritable), 400, "bad_request");
    let before = descriptors_of(pid);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let most = scope.spawn(|| {
            let mut most = 0;
            while !is_done.load(Ordering::Relaxed) {
                most = most.max(descriptors_of(pid));
            }
            most
        });
        let reply = patch(site, "", body);
        is_done.store(true, Ordering::Relaxed);
        (reply, most.join().unwrap().saturating_sub(before))
    })
}

/// Each file that waited had two descriptors of the server, of which all tenants have some together.
#[test]
fn a_patch_of_many_files_holds_few_descriptors() {
    if !may_look_into_processes() {
        skip!("needs CAP_SYS_PTRACE");
    }
    in_both_modes(|site| {
        let old = |number: usize| format!("old/{}/{number}", number % 50);
        let new = |number: usize| format!("new/{}/{number}", number % 50);
        for number in 0..700 {
            site.write(&old(number), "old\n");
        }
        let before = tree(&site.root);
        let gone = |numbers: std::ops::Range<usize>| -> String {
            let remove = |number| {
                format!(
                    "--- a/{}\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n",
                    old(number)
                )
            };
            numbers.map(remove).collect()
        };
        let changed = |numbers: std::ops::Range<usize>| -> String {
            let change = |number| {
                let name = old(number);
                format!("--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-old\n+new\n")
            };
            numbers.map(change).collect()
        };
        let last_has_no_name = making((0..999).map(new).chain(["y".repeat(300)]));
        // A file of which another one makes a directory: it fails when the others have been removed or replaced.
        let last_fails = changed(0..300)
            + &gone(300..700)
            + &making(
                (0..298)
                    .map(new)
                    .chain(["bad".to_owned(), "bad/new".to_owned()]),
            );
        for (body, status) in [(last_has_no_name, 400), (last_fails, 409)] {
            let (reply, most) = watched(site, &body);
            assert_eq!(reply.status, status, "{}", reply.text());
            assert!(most < 50, "{most} more descriptors");
            assert!(tree(&site.root) == before);
            assert!(!site.root.join("new").exists() && !site.root.join("bad").exists());
        }
        let all = changed(0..300) + &gone(300..700) + &making((0..300).map(new));
        let (reply, most) = watched(site, &all);
        expect_ok(&reply);
        assert!(most < 50, "{most} more descriptors");
        let after = tree(&site.root);
        assert_eq!(after.len(), 600);
        assert!(after.iter().all(|(_, content, _)| content == b"new\n"));
    });
}

#[test]
fn a_full_disk_changes_no_file_of_many() {
    let server = Server::start();
    let disk = TempDir::new();
    let Some(_disk) = Mount::tmpfs(disk.path(), "size=4m,nr_inodes=100,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let site = Site {
        server: &server,
        prefix: "/v1".to_owned(),
        base: disk.path().display().to_string(),
        root: disk.path().to_owned(),
    };
    for name in ["changed", "gone"] {
        site.write(name, "old\n");
    }
    let before = tree(&site.root);
    let old = "--- a/changed\n+++ b/changed\n@@ -1 +1 @@\n-old\n+new\n\
               --- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n";
    let body =
        |count: usize| old.to_owned() + &making((0..count).map(|number| format!("d/{number}")));
    expect_error(&patch(&site, "", body(200)), 507, "no_space");
    assert!(tree(&site.root) == before);
    assert_eq!(names_in(&site.root), ["changed", "gone"]);
    expect_ok(&patch(&site, "", body(50)));
    assert_eq!(names_in(&site.root), ["changed", "d"]);
    assert_eq!(names_in(site.root.join("d")).len(), 50);
}

/// A user who is not root may not take the second file out of its directory, so the first one is put back.
#[test]
fn a_directory_that_is_read_only_keeps_all_files() {
    in_both_modes(|site| {
        if !site.base.is_empty() {
            // The server of a machine is root here, whom no mode stops.
            return;
        }
        site.write("a", "a\n");
        site.write("closed/b", "b\n");
        let closed = site.root.join("closed");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
        let gone = |name: &str| {
            format!(
                "--- a/{name}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{}\n",
                &name[name.len() - 1..]
            )
        };
        let reply = patch(site, "", gone("a") + &gone("closed/b"));
        expect_error(&reply, 403, "forbidden");
        assert_eq!(
            (site.content("a"), site.content("closed/b")),
            ("a\n".to_owned(), "b\n".to_owned())
        );
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).unwrap();
    });
}

#[test]
fn hostile_patches_are_refused_and_large_ones_are_not() {
    in_both_modes(|site| {
        let long = "x".repeat(MIB);
        site.write("f", format!("{long}\n"));
        fs::create_dir(site.root.join("d")).unwrap();
        for (body, status) in [
            (
                "--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n".to_owned(),
                400,
            ),
            (
                "--- a/f\n+++ b/f\n@@ -1,99999999999 +1,99999999999 @@\n-x\n".to_owned(),
                400,
            ),
            (
                "--- a/f\n+++ b/f\n@@ -1,18446744073709551616 +1 @@\n-x\n".to_owned(),
                400,
            ),
            (
                "--- a/f\n+++ b/f\n@@ -99999999999 +99999999999 @@\n-y\n+x\n".to_owned(),
                409,
            ),
            ("--- a/\n+++ b/\n@@ -0,0 +1 @@\n+x\n".to_owned(), 400),
            (
                "--- /dev/null\n+++ b/d\n@@ -0,0 +1 @@\n+x\n".to_owned(),
                409,
            ),
            (
                "--- /dev/null\n+++ b/f/below\n@@ -0,0 +1 @@\n+x\n".to_owned(),
                409,
            ),
            (
                format!(
                    "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n",
                    "y/".repeat(3000) + "y"
                ),
                400,
            ),
            (
                format!(
                    "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n",
                    "y".repeat(300)
                ),
                400,
            ),
            ("@@ -1 +1 @@\n".repeat(20_000), 400),
        ] {
            let reply = patch(site, "", &body);
            assert_eq!(reply.status, status, "{body:.80}: {}", reply.text());
        }
        let names: Vec<_> = names_in(&site.root)
            .into_iter()
            .filter(|name| !name.starts_with('.'))
            .collect();
        assert_eq!(names, ["d", "f"]);
        let change = format!("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-{long}\n+{long}y\n");
        expect_ok(&patch(site, "", change));
        assert_eq!(site.content("f").len(), MIB + 2);
    });
}

#[test]
fn what_is_no_patch_is_refused_with_its_line() {
    in_both_modes(|site| {
        for (body, line) in [
            ("nothing\n", 1),
            ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n", 5),
            ("diff --git a/b b/b\nindex 1..2\nGIT binary patch\n", 3),
        ] {
            let reply = patch(site, "", body);
            expect_error(&reply, 400, "bad_request");
            assert_eq!(reply.json()["line"], line, "{}", reply.text());
        }
        expect_error(&patch(site, "&strip=3", CHANGE), 400, "bad_request");
        let twice = [CHANGE, CHANGE].concat();
        site.write("f", "a\nb\nc\nd\n");
        expect_error(&patch(site, "", &twice), 400, "bad_request");
        assert_eq!(site.content("f"), "a\nb\nc\nd\n");
    });
}

/// Models write such heads.
#[test]
fn a_head_without_valid_ranges_changes_no_file() {
    in_both_modes(|site| {
        let good = "--- a/good\n+++ b/good\n@@ -1 +1 @@\n-good\n+better\n";
        let body = " l1\n-l2\n+L2\n l3\n";
        for head in [
            "@@ ... @@",
            "@@ @@",
            "@@ def f():",
            "@@ \u{2013}1,3 +1,3 @@",
            "@@ -1,2 +1,2 @@",
        ] {
            for (text, line) in [
                (format!("--- a/f\n+++ b/f\n{head}\n{body}"), 3),
                (format!("{good}--- a/f\n+++ b/f\n{head}\n{body}"), 8),
                (format!("{good}{head}\n{body}"), 6),
                (format!("{good}--- /dev/null\n+++ b/new\n{head}\n{body}"), 8),
            ] {
                // Ranges that do not fit are seen where the hunk has too many lines.
                let line = line + if head.contains("-1,2") { 4 } else { 0 };
                site.write("f", "l1\nl2\nl3\n");
                site.write("good", "good\n");
                let reply = patch(site, "", &text);
                expect_error(&reply, 400, "bad_request");
                assert_eq!(reply.json()["line"], line, "{text}{}", reply.text());
                assert_eq!(site.content("f"), "l1\nl2\nl3\n");
                assert_eq!(site.content("good"), "good\n");
                assert!(!site.root.join("new").exists());
            }
        }
    });
}

#[test]
fn names_of_a_patch_do_not_lead_out() {
    in_both_modes(|site| {
        let outside = TempDir::new();
        fs::write(outside.join("f"), "a\nb\nc\nd\n").unwrap();
        fs::set_permissions(outside.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let name = outside.join("f");
        for body in [
            CHANGE.replace("/f\n", "/../f\n"),
            CHANGE
                .replace("a/f", &format!("a/{name}"))
                .replace("b/f", &format!("b/{name}")),
            CHANGE.replace("/f\n", "/x/../../f\n"),
            "diff --git a/f b/f\nrename from f\nrename to ../f\n".to_owned(),
        ] {
            let reply = patch(site, "", &body);
            expect_error(&reply, 400, "bad_request");
        }
        symlink(outside.path(), site.root.join("way")).unwrap();
        let through = CHANGE.replace("/f\n", "/way/f\n");
        let reply = patch(site, "", &through);
        if site.base.is_empty() {
            expect_error(&reply, 403, "forbidden");
            assert_eq!(fs::read_to_string(&name).unwrap(), "a\nb\nc\nd\n");
        } else {
            // On a machine links are followed, as by every program.
            expect_ok(&reply);
        }
    });
}

/// A text whose first lines each could be anywhere in it, and a patch that moves all of them: minutes of searching.
fn endless() -> (String, String) {
    let lines = 0..10_000;
    let text = lines.clone().map(|line| format!("line {line}\n"));
    let hunks = lines.map(|line| format!("@@ -{} +1 @@\n-line {line}\n+x\n", line + 2));
    let patch = format!("--- a/f\n+++ b/f\n{}", hunks.collect::<String>());
    (text.collect::<String>() + &"QZ".repeat(24 * MIB), patch)
}

/// Sends a patch that takes minutes, and waits until it is applied by a thread of its own.
fn send_endless(mut connection: Connection, target: &str, pid: i32) -> Connection {
    connection.send_request("POST", target, &[], endless().1.as_bytes());
    let is_working = || nice_values(pid).contains(&10);
    wait_until("a thread works at nice 10", PATIENCE, is_working);
    connection
}

fn wait_until_nobody_works(pid: i32) {
    let limit = PATIENCE.min(Duration::from_secs(20));
    wait_until("the work has ended", limit, || {
        !nice_values(pid).contains(&10)
    });
}

#[test]
fn a_patch_and_who_waits_for_its_files_end_with_their_clients() {
    Place::each(|place| {
        let path = place.make("f", endless().0);
        let target = place.target("files/patch?path=@.");
        let working = send_endless(place.connect(), &target, place.pid());
        let mut waiting = place.connect();
        let edit = place.told(r#"{"path":"@f","edits":[{"lines":"1-1","new":"first"}]}"#);
        waiting.send_request("POST", &place.target("files/edit"), &[], edit.as_bytes());
        drop((working, waiting));
        wait_until_nobody_works(place.pid());
        // Nobody holds the file.
        let changed = place.request("POST", "files/edit", edit.as_bytes());
        expect_ok(&changed);
        assert!(
            fs::read_to_string(path)
                .unwrap()
                .starts_with("first\nline 1\n")
        );
    });
}

#[test]
fn a_patch_ends_with_its_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let reply = sandbox.put("files/write?path=f", endless().0.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    // The connection is the operator's, so it stays.
    let target = sandbox.target("files/patch");
    let mut working = send_endless(server.connect(), &target, server.inner_pid());
    sandbox.delete();
    wait_until_nobody_works(server.inner_pid());
    expect_error(&working.read_reply(), 404, "not_found");
}

#[test]
fn a_refusal_takes_no_more_memory_than_the_file() {
    in_both_modes(|site| {
        let pid = if site.base.is_empty() {
            site.server.inner_pid()
        } else {
            site.server.pid()
        };
        let size = 48 * MIB;
        // One line, and in UTF-8 each byte of it is three.
        site.write("f", vec![0xff; size]);
        let before = memory_of(pid, "VmHWM");
        let reply = patch(site, "", "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n");
        expect_error(&reply, 409, "patch_failed");
        let told = reply.json()["text"].as_str().unwrap().chars().count();
        assert_eq!(told, 2000);
        let edit = json!({"path": site.path("f"), "edits": [{"old": "not there", "new": ""}]});
        expect_error(&site.post("edit", &edit), 409, "no_match");
        let more = memory_of(pid, "VmHWM") - before;
        assert!(more < 2 * size as u64, "{more} bytes more");
    });
}
