//! Comparing a tree with the files of a client: the answer names what has to be sent.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::stat::Mode;
use serde_json::{Value, json};

use super::{Place, expect_ok};
use crate::fixture::{assert_error, sha256};

impl Place<'_> {
    /// Compares the directory `tree`.
    fn compare(&self, entries: &Value) -> Value {
        let reply = self.post(
            "files/compare",
            &json!({"path": "@tree", "entries": entries}),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }
}

#[test]
fn what_is_missing_and_what_differs_is_told() {
    Place::each(|place| {
        for name in ["tree", "tree/dir", "tree/below", "elsewhere"] {
            fs::create_dir(place.path(name)).unwrap();
            place.give(&place.path(name));
        }
        for name in [
            "same",
            "dir/time",
            "dir/hash",
            "size",
            "below/extra",
            "shut",
        ] {
            place.make(&format!("tree/{name}"), "12345");
        }
        place.make("elsewhere/file", "12345");
        let odd = place.path("tree").join(std::ffi::OsStr::new("caf\u{e9}"));
        fs::write(&odd, "12345").unwrap();
        place.give(&odd);
        symlink("same", place.path("tree/link")).unwrap();
        symlink("../elsewhere", place.path("tree/way")).unwrap();
        nix::unistd::mkfifo(&place.path("tree/pipe"), Mode::S_IRWXU).unwrap();
        place.give(&place.path("tree/pipe"));
        fs::set_permissions(place.path("tree/shut"), Permissions::from_mode(0o000)).unwrap();
        let time = fs::metadata(place.path("tree/dir/time")).unwrap();
        let time = time.mtime() * 1000 + time.mtime_nsec() / 1_000_000;
        let (right, wrong) = (sha256(b"12345"), sha256(b"54321"));
        let found = place.compare(&json!([
            {"path": "same", "size": 5},
            {"path": "./dir//time", "size": 5, "mtime_ms": time, "sha256": right},
            {"path": "dir/hash", "size": 5, "sha256": wrong},
            {"path": "caf\u{e9}", "size": 5, "sha256": right.to_uppercase()},
            {"path": "size", "size": 4},
            {"path": "below", "size": 5},
            {"path": "link", "size": 4},
            {"path": "pipe", "size": 0},
            {"path": "way/file", "size": 5},
            {"path": "none/file", "size": 5, "mtime_ms": null, "unknown": true},
            {"path": "a-first", "size": 5},
        ]));
        assert_eq!(
            found,
            json!({
                "missing": ["a-first", "none/file", "way/file"],
                "different": ["below", "dir/hash", "link", "pipe", "size"],
                // below/extra, shut and way.
                "extra": 3,
                "skipped": [],
                "skipped_total": 0,
                "ignored": ["entries[9].unknown"],
            })
        );
        let found = place.compare(&json!([
            {"path": "dir/time", "size": 5, "mtime_ms": time + 1},
            {"path": "dir/hash", "size": 5, "mtime_ms": -1},
            {"path": "shut", "size": 5, "sha256": right},
        ]));
        // What cannot be read may be anything; root of a machine reads all.
        let different = if place.is_sandbox {
            json!(["dir/hash", "dir/time", "shut"])
        } else {
            json!(["dir/hash", "dir/time"])
        };
        assert_eq!(
            (&found["different"], &found["extra"]),
            (&different, &json!(7))
        );
        assert_eq!(
            place.compare(&json!([])),
            json!({"missing": [], "different": [], "extra": 10, "skipped": [], "skipped_total": 0})
        );
    });
}

#[test]
fn names_that_are_no_text_come_back_as_they_were_sent() {
    use std::os::unix::ffi::OsStrExt;
    Place::each(|place| {
        fs::create_dir(place.path("tree")).unwrap();
        place.give(&place.path("tree"));
        let name = std::ffi::OsStr::from_bytes(b"\xff\xfe");
        fs::write(place.path("tree").join(name), "x").unwrap();
        let found = place.compare(&json!([
            {"path": "\u{efff}\u{effe}", "size": 2}, {"path": "\u{effe}", "size": 2},
        ]));
        let names = (&found["missing"], &found["different"], &found["extra"]);
        let expected = (
            &json!(["\u{effe}"]),
            &json!(["\u{efff}\u{effe}"]),
            &json!(0),
        );
        assert_eq!(names, expected);
    });
}

#[test]
fn what_is_no_comparison_is_refused() {
    Place::each(|place| {
        fs::create_dir(place.path("tree")).unwrap();
        place.give(&place.path("tree"));
        place.make("tree/file", "12345");
        let file = |path: &str| json!([{"path": path, "size": 1}]);
        for (entries, word) in [
            (file("/etc/passwd"), "/etc/passwd"),
            (file("../tree/file"), ".."),
            (file("dir/../file"), ".."),
            (file("."), "."),
            (file(""), "empty"),
            (file("a\0b"), "NUL"),
            (json!({}), "array"),
            (json!(["file"]), "entries[0]"),
            (json!([{"path": "a", "size": 1}, {"size": 1}]), "entries[1]"),
            (json!([{"path": "a"}]), "size"),
            (json!([{"path": "a", "size": -1}]), "size"),
            (
                json!([{"path": "a", "size": 1, "mtime_ms": 1.5}]),
                "mtime_ms",
            ),
            (json!([{"path": "a", "size": 1, "sha256": "12"}]), "sha256"),
            (
                json!([{"path": "./a", "size": 1}, {"path": "a", "size": 2}]),
                "twice",
            ),
            (json!(null), "entries"),
        ] {
            let body = json!({"path": "@tree", "entries": entries});
            let reply = place.post("files/compare", &body);
            assert_error(&reply, 400, "bad_request");
            assert!(reply.text().contains(word), "{word}: {}", reply.text());
        }
        let reply = place.post("files/compare", &json!({"entries": []}));
        assert_error(&reply, 400, "bad_request");
        for (path, status, code) in [
            ("@none", 404, "not_found"),
            ("@tree/file", 409, "not_directory"),
        ] {
            let reply = place.post("files/compare", &json!({"path": path, "entries": []}));
            assert_error(&reply, status, code);
        }
        if place.is_sandbox {
            symlink("tree", place.path("link")).unwrap();
            for path in ["link", "..", "../.."] {
                let reply = place.post("files/compare", &json!({"path": path, "entries": []}));
                assert_error(&reply, 403, "forbidden");
            }
        }
    });
}

#[test]
fn many_files_are_compared_in_one_request_up_to_a_bound() {
    Place::each(|place| {
        fs::create_dir(place.path("tree")).unwrap();
        place.give(&place.path("tree"));
        for number in 0..1000 {
            fs::write(place.path(&format!("tree/{number}")), "12345").unwrap();
        }
        let entries = |count: usize| {
            let entries = (0..count).map(|number| json!({"path": number.to_string(), "size": 5}));
            json!({"path": "@tree", "entries": entries.collect::<Vec<_>>()})
        };
        let reply = place.post("files/compare", &entries(65_536));
        assert_eq!(reply.status, 200, "{}", reply.text());
        let found = reply.json();
        assert_eq!(found["missing"].as_array().unwrap().len(), 64_536);
        assert_eq!(
            (&found["different"], &found["extra"]),
            (&json!([]), &json!(0))
        );
        let reply = place.post("files/compare", &entries(100_000));
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains("65536"), "{}", reply.text());
    });
}

#[test]
fn directories_that_cannot_be_read_are_told() {
    Place::each(|place| {
        fs::create_dir(place.path("shut")).unwrap();
        fs::write(place.path("shut/file"), "x").unwrap();
        fs::set_permissions(place.path("shut"), fs::Permissions::from_mode(0o700)).unwrap();
        let entries = json!([{"path": "shut/file", "size": 1}]);
        let found =
            expect_ok(&place.post("files/compare", &json!({"path": "@.", "entries": entries})));
        if place.is_sandbox {
            assert_eq!(found["missing"], json!(["shut/file"]));
            assert_eq!(
                found["skipped"],
                json!([{"name": "shut", "reason": "permission"}])
            );
            assert_eq!(found["skipped_total"], 1);
        } else {
            assert_eq!(found["missing"], json!([]));
            assert_eq!(
                (&found["skipped"], &found["skipped_total"]),
                (&json!([]), &json!(0))
            );
        }
    });
}

#[test]
fn a_file_that_grows_is_hashed_to_the_size_that_it_had() {
    Place::each(|place| {
        fs::create_dir(place.path("tree")).unwrap();
        place.give(&place.path("tree"));
        let path = place.make("tree/file", vec![b'x'; 1 << 16]);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = File::options().append(true).open(&path).unwrap();
                while !stop.load(Ordering::Relaxed) && file.metadata().unwrap().len() < 1 << 24 {
                    file.write_all(&[b'x'; 64]).unwrap();
                }
            });
            for _ in 0..20 {
                let asked = json!({"paths": [place.told("@tree/file")]});
                let hashed = place.post("files/hash", &asked).json()["files"][0].clone();
                let size = usize::try_from(hashed["size"].as_u64().unwrap()).unwrap();
                assert_eq!(hashed["sha256"], sha256(&vec![b'x'; size]), "{size} bytes");
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}
