//! The promise of `files/edit`: all edits or none, in one step, exactly what was meant, and a refusal
//! that says what to do.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use nix::sys::stat::Mode;
use serde_json::{Value, json};

use super::{MIB, Site, encode, expect_error, expect_ok, in_both_modes};
use crate::fixture::{Reply, names_in, sha256};

const TEXT: &str = "one\ntwo\nthree\ntwo\nfive\n";

fn edit(site: &Site<'_>, name: &str, edits: &Value) -> Reply {
    site.post("edit", &json!({ "path": site.path(name), "edits": edits }))
}

#[test]
fn edits_are_made_together_and_told() {
    in_both_modes(|site| {
        site.write("f", TEXT);
        let reply = edit(
            site,
            "f",
            &json!([
                {"old": "one", "new": "1"}, {"old": "two", "new": "2", "count": "all"}, {"lines": "5", "new": "5"},
            ]),
        );
        let answer = expect_ok(&reply);
        let expected = "1\n2\nthree\n2\n5\n";
        assert_eq!(site.content("f"), expected);
        assert_eq!(answer["path"], json!(site.path("f")));
        assert_eq!(answer["replaced"], 4);
        assert_eq!(answer["size"], expected.len());
        assert_eq!(answer["sha256"], json!(sha256(expected.as_bytes())));
        let diff = answer["diff"].as_str().unwrap();
        assert!(
            diff.ends_with("@@ -1,5 +1,5 @@\n-one\n-two\n+1\n+2\n three\n-two\n-five\n+2\n+5\n"),
            "{diff}"
        );
        assert!(answer.get("diff_truncated").is_none());
        assert_eq!(
            patched(TEXT, diff),
            expected,
            "patch(1) understands the diff"
        );
    });
}

/// What patch(1) makes of a text.
fn patched(text: &str, diff: &str) -> String {
    let directory = crate::fixture::TempDir::new();
    fs::write(directory.join("f"), text).unwrap();
    fs::write(directory.join("diff"), diff).unwrap();
    let status = Command::new("patch")
        .args(["-s", "-i", "diff", "f"])
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .status();
    assert!(status.expect("patch(1) is needed").success());
    fs::read_to_string(directory.join("f")).unwrap()
}

#[test]
fn mode_and_owner_line_ends_and_the_missing_last_one_stay() {
    in_both_modes(|site| {
        site.write("f", "a\r\nb\r\nc");
        let path = site.root.join("f");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o754)).unwrap();
        let before = fs::metadata(&path).unwrap();
        expect_ok(&edit(
            site,
            "f",
            &json!([{"old": "a\nb", "new": "x\ny"}, {"lines": "3", "new": "z\n"}]),
        ));
        assert_eq!(site.content("f"), "x\r\ny\r\nz");
        let after = fs::metadata(&path).unwrap();
        assert_eq!(
            (after.mode(), after.uid(), after.gid()),
            (before.mode(), before.uid(), before.gid())
        );
        assert_ne!(after.ino(), before.ino(), "it was replaced, not written");
    });
}

#[test]
fn a_refusal_changes_nothing_and_says_what_to_do() {
    in_both_modes(|site| {
        site.write("f", TEXT);
        site.write("binary", "a\0b");
        site.write("empty", "");
        let good = json!({"old": "one", "new": "1"});
        for (name, edits, code, details) in [
            (
                "f",
                json!([good, {"old": "nope", "new": "x"}]),
                "no_match",
                json!({"edit": 1}),
            ),
            (
                "f",
                json!([good, {"old": "\tthree  two", "new": "x"}]),
                "no_match",
                json!({"edit": 1, "line": 3, "text": "three\ntwo"}),
            ),
            (
                "f",
                json!([good, {"old": "two", "new": "x"}]),
                "ambiguous",
                json!({"edit": 1, "found": 2, "lines": [2, 4]}),
            ),
            (
                "f",
                json!([good, {"old": "two", "new": "x", "count": 3}]),
                "ambiguous",
                json!({"edit": 1, "found": 2, "lines": [2, 4]}),
            ),
            (
                "f",
                json!([good, {"lines": "5-6", "new": "x"}]),
                "no_match",
                json!({"edit": 1, "line": 5}),
            ),
            (
                "f",
                json!([{"old": "", "new": "x"}]),
                "no_match",
                json!({"edit": 0}),
            ),
            (
                "empty",
                json!([{"old": "x", "new": "y"}]),
                "no_match",
                json!({"edit": 0}),
            ),
            (
                "binary",
                json!([{"old": "a", "new": "x"}]),
                "binary",
                json!({}),
            ),
        ] {
            let reply = edit(site, name, &edits);
            expect_error(&reply, 409, code);
            let mut document = reply.json();
            let fields = document.as_object_mut().unwrap();
            fields.retain(|name, _| !["error", "code"].contains(&name.as_str()));
            assert_eq!(document, details, "{}", reply.text());
        }
        let reply = edit(site, "f", &json!([good, {"lines": "1-2", "new": "x"}]));
        expect_error(&reply, 400, "bad_request");
        expect_error(&edit(site, "none", &json!([good])), 404, "not_found");
        expect_error(&edit(site, "", &json!([good])), 409, "is_directory");
        assert_eq!(site.content("f"), TEXT);
        fs::remove_file(site.root.join("binary")).unwrap();
    });
}

#[test]
fn an_empty_or_missing_file_takes_a_whole_text() {
    in_both_modes(|site| {
        site.write("empty", "");
        for name in ["empty", "new/deep/file"] {
            let answer = expect_ok(&edit(site, name, &json!([{"old": "", "new": "text\n"}])));
            assert!(
                answer["diff"]
                    .as_str()
                    .unwrap()
                    .ends_with("@@ -0,0 +1 @@\n+text\n")
            );
            assert_eq!(site.content(name), "text\n");
            expect_error(
                &edit(site, name, &json!([{"old": "", "new": "other"}])),
                409,
                "no_match",
            );
        }
    });
}

#[test]
fn an_edit_can_be_tried_and_depend_on_what_was_read() {
    in_both_modes(|site| {
        site.write("f", TEXT);
        let edits = json!([{"old": "one", "new": "1"}]);
        let request = |digest: &str, is_dry: bool| {
            site.post("edit", &json!({"path": site.path("f"), "edits": edits, "if_sha256": digest, "dry_run": is_dry}))
        };
        let old = sha256(TEXT.as_bytes());
        let tried = expect_ok(&request(&old, true));
        assert_eq!(site.content("f"), TEXT);
        assert_eq!(expect_ok(&request(&old, false)), tried);
        assert_eq!(site.content("f"), TEXT.replace("one", "1"));
        expect_error(&request(&old, false), 409, "changed");
        expect_error(&request(&old, true), 409, "changed");
        assert!(
            !names_in(&site.root)
                .iter()
                .any(|name| name.starts_with(".sbx-"))
        );
    });
}

/// Each of many edits, patches and conditional writes at once inserts a line of its own: all that succeed are
/// there in the end.
#[test]
fn no_change_is_lost_beside_others() {
    in_both_modes(|site| {
        site.write("f", "begin\nend\n");
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            for worker in 0..6 {
                let done = &done;
                scope.spawn(move || {
                    for number in 0..10 {
                        let line = format!("{worker}.{number}\n");
                        let reply = match worker % 3 {
                            0 => edit(site, "f", &json!([{"old": "end", "new": line + "end"}])),
                            1 => {
                                let change =
                                    format!("--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n begin\n+{line}");
                                let route = format!("patch?path={}", encode(site.path("")));
                                site.request("POST", &route, change.as_bytes())
                            }
                            _ => {
                                let path = encode(site.path("f"));
                                let text =
                                    site.request("GET", &format!("read?path={path}"), b"").body;
                                let route =
                                    format!("write?path={path}&if_sha256={}", sha256(&text));
                                site.request("PUT", &route, &[&text, line.as_bytes()].concat())
                            }
                        };
                        if reply.status == 200 {
                            done.fetch_add(1, Ordering::Relaxed);
                        } else {
                            expect_error(&reply, 409, "changed");
                        }
                    }
                });
            }
        });
        let content = site.content("f");
        assert_eq!(
            content.lines().count(),
            2 + done.load(Ordering::Relaxed),
            "{content}"
        );
    });
}

#[test]
fn what_is_no_plain_file_is_not_edited() {
    in_both_modes(|site| {
        nix::unistd::mkfifo(&site.root.join("pipe"), Mode::S_IRWXU | Mode::S_IRWXO).unwrap();
        site.write("f", TEXT);
        symlink("f", site.root.join("link")).unwrap();
        let edits = json!([{"old": "one", "new": "1"}]);
        expect_error(&edit(site, "pipe", &edits), 409, "not_regular");
        let reply = edit(site, "link", &edits);
        let link = fs::read_link(site.root.join("link")).unwrap();
        assert_eq!(link.to_str(), Some("f"), "the link stays");
        if site.base.is_empty() {
            // In a sandbox no link is followed.
            expect_error(&reply, 403, "forbidden");
            assert_eq!(site.content("f"), TEXT);
        } else {
            expect_ok(&reply);
            assert_eq!(site.content("f"), TEXT.replace("one", "1"));
        }
    });
}

/// Each place would take a megabyte, and there are millions.
#[test]
fn an_edit_that_grows_a_file_without_bound_is_refused() {
    in_both_modes(|site| {
        site.write("f", "\n".repeat(4 * MIB));
        let new = "x".repeat(MIB);
        for (edits, status, code) in [
            (
                json!([{"old": "\n", "new": new, "count": "all"}]),
                413,
                "too_large",
            ),
            (json!([{"old": "\n", "new": "x"}]), 409, "ambiguous"),
        ] {
            expect_error(&edit(site, "f", &edits), status, code);
        }
        let rewritten = json!([{"lines": format!("1-{}", 4 * MIB), "new": "x\n"}]);
        let answer = expect_ok(&edit(site, "f", &rewritten));
        assert_eq!(answer["diff"], "");
        assert_eq!(answer["diff_truncated"], true);
        assert_eq!(site.content("f"), "x\n");
    });
}
