//! Files as tools.

use serde_json::{Value, json};

use super::{Endpoint, everywhere, on_a_host};
use crate::fixture::{Server, decode_base64, encode_base64, is_root, sha256};
use crate::namespaces::can_be_had;

/// The smallest picture there is: one pixel.
const PNG: &[u8] =
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0\x1f\x15\xc4\x89";

#[track_caller]
fn write(endpoint: &Endpoint<'_>, path: &str, content: &str) -> Value {
    endpoint.call("write_file", &json!({ "path": path, "content": content }))
}

/// Makes a file of any bytes.
#[track_caller]
fn make(endpoint: &Endpoint<'_>, path: &str, content: &[u8]) {
    let arguments =
        json!({ "cmd": format!("base64 -d > {path}"), "stdin": encode_base64(content) });
    assert_eq!(endpoint.call("run", &arguments)["exit_code"], 0);
}

#[test]
fn what_is_written_is_read() {
    everywhere(|endpoint| {
        let text = "first\nsecond \u{20ac}\r\nthird";
        let written = write(endpoint, "a/b/c.txt", text);
        let digest = sha256(text.as_bytes());
        assert_eq!(
            written,
            json!({ "path": "a/b/c.txt", "size": text.len(), "sha256": digest })
        );
        let result = endpoint.result("read_file", &json!({ "path": "a/b/c.txt" }));
        assert_eq!(result["content"], json!([{ "type": "text", "text": text }]));
        assert_eq!(
            result["structuredContent"],
            json!({
                "path": "a/b/c.txt", "size": text.len(), "content": text, "lines": "1-3/3", "truncated": false,
                "sha256": digest,
            })
        );
        for (lines, content, shown) in [
            ("2", "second \u{20ac}\r\n", "2-2/3"),
            ("2-", "second \u{20ac}\r\nthird", "2-3/3"),
            ("1-2", "first\nsecond \u{20ac}\r\n", "1-2/3"),
            ("4-9", "", "*/3"),
        ] {
            let read = endpoint.call("read_file", &json!({ "path": "a/b/c.txt", "lines": lines }));
            assert_eq!(
                (&read["content"], &read["lines"]),
                (&json!(content), &json!(shown)),
                "{lines}"
            );
            assert!(read.get("sha256").is_none(), "of a part there is none");
        }
        let empty = write(endpoint, "empty", "");
        assert_eq!(empty["size"], 0);
        let read = endpoint.call("read_file", &json!({ "path": "empty" }));
        assert_eq!(
            (&read["content"], &read["lines"]),
            (&json!(""), &json!("*/0"))
        );

        let arguments = json!({ "path": "run.sh", "content": "echo ran\n", "mode": "755" });
        endpoint.call("write_file", &arguments);
        assert_eq!(
            endpoint.call("run", &json!({ "cmd": "stat -c %a run.sh" }))["stdout"],
            "755\n"
        );
    });
}

#[test]
fn a_file_is_written_only_over_what_was_read() {
    everywhere(|endpoint| {
        let digest = write(endpoint, "f", "one")["sha256"].clone();
        let change =
            |content: &str| json!({ "path": "f", "content": content, "if_sha256": digest });
        endpoint.call("write_file", &change("two"));
        endpoint.fails("write_file", &change("three"), "changed");
        assert_eq!(
            endpoint.call("read_file", &json!({ "path": "f" }))["content"],
            "two"
        );
    });
}

#[test]
fn a_large_file_is_read_in_parts() {
    everywhere(|endpoint| {
        endpoint.call("run", &json!({ "cmd": "seq 1000000 > large" }));
        let read = endpoint.call("read_file", &json!({ "path": "large" }));
        assert_eq!(read["truncated"], true);
        assert!(read.get("sha256").is_none());
        let content = read["content"].as_str().unwrap();
        assert!(content.len() <= 256 * 1024 && content.ends_with('\n'));
        let lines = content.lines().count();
        assert_eq!(read["lines"], format!("1-{lines}/1000000"));
        assert_eq!(content.lines().last().unwrap(), lines.to_string());
        let next = json!({ "path": "large", "lines": format!("{}-", lines + 1) });
        let next = endpoint.call("read_file", &next);
        assert!(
            next["content"]
                .as_str()
                .unwrap()
                .starts_with(&format!("{}\n", lines + 1))
        );
        let few = endpoint.call("read_file", &json!({ "path": "large", "lines": "999999-" }));
        assert_eq!(
            (&few["content"], &few["truncated"]),
            (&json!("999999\n1000000\n"), &json!(false))
        );
        // One line without an end.
        endpoint.call(
            "run",
            &json!({ "cmd": "head -c 1000000 /dev/zero | tr '\\0' x > line" }),
        );
        let read = endpoint.call("read_file", &json!({ "path": "line" }));
        assert_eq!(
            (&read["truncated"], &read["lines"]),
            (&json!(true), &json!("1-1/1"))
        );
        assert_eq!(read["content"].as_str().unwrap().len(), 256 * 1024);
    });
}

#[test]
fn images_are_shown_and_other_binary_files_are_not() {
    everywhere(|endpoint| {
        make(endpoint, "pixel.png", PNG);
        let result = endpoint.result("read_file", &json!({ "path": "pixel.png" }));
        let image = &result["content"][1];
        assert_eq!(
            (&image["type"], &image["mimeType"]),
            (&json!("image"), &json!("image/png"))
        );
        assert_eq!(decode_base64(image["data"].as_str().unwrap()), PNG);
        assert_eq!(
            result["structuredContent"],
            json!({ "path": "pixel.png", "size": PNG.len(), "media_type": "image/png" })
        );
        for (name, start, kind) in [
            ("a.jpg", &b"\xff\xd8\xff\xe0\0"[..], "image/jpeg"),
            ("a.gif", b"GIF89a\0", "image/gif"),
            ("a.webp", b"RIFF\0\0\0\0WEBP", "image/webp"),
        ] {
            make(endpoint, name, start);
            let read = endpoint.call("read_file", &json!({ "path": name }));
            assert_eq!(read["media_type"], kind);
        }
        make(endpoint, "data", b"a\0b");
        let text = endpoint.fails("read_file", &json!({ "path": "data" }), "binary");
        assert!(text.contains("data") && text.contains("xxd"), "{text}");
        endpoint.call(
            "run",
            &json!({ "cmd": "cp pixel.png big.png; truncate -s 6M big.png" }),
        );
        endpoint.fails("read_file", &json!({ "path": "big.png" }), "too_large");
        // What is not UTF-8 is shown, and said to be changed.
        make(endpoint, "latin", b"caf\xe9\n");
        let read = endpoint.call("read_file", &json!({ "path": "latin" }));
        assert_eq!(
            (&read["content"], &read["lossy"]),
            (&json!("caf\u{fffd}\n"), &json!(true))
        );
    });
}

#[test]
fn files_are_edited_all_or_nothing() {
    everywhere(|endpoint| {
        write(endpoint, "code.py", "a = 1\nb = 1\nc = 3\n");
        let edits = json!({ "path": "code.py", "edits": [{ "old": "c = 3", "new": "c = 4" }, { "lines": "1", "new": "a = 2\n" }] });
        let preview = endpoint.call(
            "edit_file",
            &json!({ "path": "code.py", "edits": edits["edits"], "dry_run": true }),
        );
        let result = endpoint.result("edit_file", &edits);
        let edited = &result["structuredContent"];
        assert_eq!(preview["diff"], edited["diff"]);
        assert_eq!(
            (&edited["replaced"], &edited["size"]),
            (&json!(2), &json!(18))
        );
        assert_eq!(result["content"][0]["text"], edited["diff"]);
        assert!(
            edited["diff"]
                .as_str()
                .unwrap()
                .contains("\n-c = 3\n+c = 4\n")
        );
        assert_eq!(
            endpoint.call("read_file", &json!({ "path": "code.py" }))["content"],
            "a = 2\nb = 1\nc = 4\n"
        );
        for (edit, code) in [
            (json!({ "old": "nothing", "new": "" }), "no_match"),
            (json!({ "old": " = ", "new": "" }), "ambiguous"),
            (json!({ "old": "a" }), "bad_request"),
            (json!({ "new": "a" }), "bad_request"),
        ] {
            let both =
                json!({ "path": "code.py", "edits": [{ "old": "a = 2", "new": "never" }, edit] });
            let text = endpoint.fails("edit_file", &both, code);
            assert!(!text.is_empty());
        }
        assert_eq!(
            endpoint.call("read_file", &json!({ "path": "code.py" }))["content"],
            "a = 2\nb = 1\nc = 4\n"
        );
        let of_before =
            json!({ "path": "code.py", "edits": edits["edits"], "if_sha256": sha256(b"other") });
        endpoint.fails("edit_file", &of_before, "changed");
    });
}

#[test]
fn directories_are_listed_to_a_depth() {
    everywhere(|endpoint| {
        endpoint.call("run", &json!({ "cmd": "mkdir -p tree/b/deep/er tree/d && touch tree/a tree/b/x tree/b/deep/y tree/c && ln -s b tree/link" }));
        let list = |arguments: Value| {
            let result = endpoint.result("list_files", &arguments);
            result["content"][0]["text"].as_str().unwrap().to_owned()
        };
        assert_eq!(list(json!({ "path": "tree" })), "a\nb/\nc\nd/\nlink@\n");
        assert_eq!(
            list(json!({ "path": "tree", "depth": 2 })),
            "a\nb/\nb/deep/\nb/x\nc\nd/\nlink@\n"
        );
        assert_eq!(
            list(json!({ "path": "tree", "depth": 32 })),
            "a\nb/\nb/deep/\nb/deep/er/\nb/deep/y\nb/x\nc\nd/\nlink@\n"
        );
        assert_eq!(list(json!({ "path": "tree/d" })), "nothing\n");
        let listed = endpoint.call("list_files", &json!({ "path": "tree", "depth": 2 }));
        assert_eq!(
            (&listed["path"], &listed["truncated"]),
            (&json!("tree"), &json!(false))
        );
        let entry = &listed["entries"][3];
        assert_eq!(
            (&entry["name"], &entry["path"], &entry["type"]),
            (&json!("x"), &json!("tree/b/x"), &json!("file"))
        );
        let link = &listed["entries"][6];
        assert_eq!(link["type"], "symlink");

        endpoint.call(
            "run",
            &json!({ "cmd": "mkdir many && cd many && seq 1500 | xargs touch" }),
        );
        for arguments in [
            json!({ "path": "many" }),
            json!({ "path": ".", "depth": 2 }),
        ] {
            let listed = endpoint.call("list_files", &arguments);
            assert_eq!(listed["entries"].as_array().unwrap().len(), 1000);
            assert_eq!(listed["truncated"], true);
        }
        for (arguments, code) in [
            (json!({ "path": "none" }), "not_found"),
            (json!({ "path": "tree/a" }), "not_directory"),
            (json!({ "path": "tree", "depth": 0 }), "bad_request"),
            (json!({ "path": "tree", "depth": 33 }), "bad_request"),
            (json!({}), "bad_request"),
        ] {
            endpoint.fails("list_files", &arguments, code);
        }
    });
}

#[test]
fn files_are_found_by_name_and_content() {
    everywhere(|endpoint| {
        endpoint.call("run", &json!({ "cmd": "mkdir -p s/in s/.hidden && cd s && echo 'build' > .gitignore && mkdir build && \
            for f in one.py in/two.py build/three.py .hidden/four.py note.txt; do echo \"def name(): # $f\" > $f; done" }));
        let names = |arguments: Value| {
            let found = endpoint.call("glob", &arguments);
            let entries = found["entries"].as_array().unwrap().clone();
            entries
                .iter()
                .map(|entry| entry["path"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(json!({ "path": "s", "pattern": "**/*.py" })),
            ["s/in/two.py", "s/one.py"]
        );
        assert_eq!(
            names(json!({ "path": "s", "pattern": ["**/*.py", "!in"], "type": "file" })),
            ["s/one.py"]
        );
        assert_eq!(
            names(json!({ "path": "s", "pattern": "*.py", "all": true })).len(),
            4
        );
        let first = endpoint.call("glob", &json!({ "path": "s", "type": "file", "limit": 1 }));
        assert_eq!(first["entries"].as_array().unwrap().len(), 1);
        assert_eq!(first["next"], "in/two.py");
        assert_eq!(
            names(json!({ "path": "s", "type": "file", "after": first["next"] })),
            ["s/note.txt", "s/one.py"]
        );
        assert_eq!(
            names(json!({ "path": "s", "sort": "mtime", "type": "file" })).len(),
            3
        );

        let found = endpoint.result(
            "grep",
            &json!({ "pattern": "def (name)\\(", "path": "s", "glob": ["*.py"] }),
        );
        assert_eq!(
            found["content"][0]["text"],
            "s/in/two.py:1:def name(): # in/two.py\ns/one.py:1:def name(): # one.py\n"
        );
        let found = &found["structuredContent"];
        assert_eq!(
            (&found["files"], &found["searched"], &found["truncated"]),
            (&json!(2), &json!(2), &json!(false))
        );
        assert_eq!(found["matches"][1]["path"], "s/one.py");
        assert_eq!(found["matches"][1]["spans"], json!([[0, 9]]));
        let none = endpoint.result("grep", &json!({ "pattern": "absent", "path": "s" }));
        assert_eq!(none["content"][0]["text"], "no match\n");

        // More than a model reads is cut, and said to be.
        endpoint.call("run", &json!({ "cmd": "cd s && for n in $(seq 900); do printf 'match %01000d\\n' $n; done > long" }));
        let many = endpoint.call(
            "grep",
            &json!({ "pattern": "match", "path": "s/long", "per_file": 1000 }),
        );
        let count = many["matches"].as_array().unwrap().len();
        assert!(
            (100..900).contains(&count) && many["truncated"] == true,
            "{count}"
        );
        for (tool, arguments, code) in [
            ("glob", json!({ "path": "none" }), "not_found"),
            ("glob", json!({ "pattern": 1 }), "bad_request"),
            ("glob", json!({ "limit": 1001 }), "bad_request"),
            ("glob", json!({ "sort": "size" }), "bad_request"),
            (
                "glob",
                json!({ "sort": "mtime", "after": "x" }),
                "bad_request",
            ),
            ("grep", json!({ "path": "s" }), "bad_request"),
            ("grep", json!({ "pattern": "(" }), "bad_request"),
            (
                "grep",
                json!({ "pattern": "x", "path": "none" }),
                "not_found",
            ),
        ] {
            endpoint.fails(tool, &arguments, code);
        }
    });
}

#[test]
fn paths_are_those_of_commands() {
    everywhere(|endpoint| {
        let home = endpoint.call("run", &json!({ "cmd": "mkdir -p p/q; pwd" }));
        let home = home["stdout"].as_str().unwrap().trim().to_owned();
        write(endpoint, &format!("{home}/p/q/f"), "needle");
        for path in ["p/q/f", &format!("{home}/p/q/f")] {
            let read = endpoint.call("read_file", &json!({ "path": path }));
            assert_eq!(read["content"], "needle", "{path}");
        }
        let at = json!({ "path": format!("{home}/p"), "pattern": "**/f" });
        assert_eq!(endpoint.call("glob", &at)["entries"][0]["type"], "file");
        let at = json!({ "path": format!("{home}/p"), "pattern": "needle" });
        assert_eq!(endpoint.call("grep", &at)["matches"][0]["line"], 1);
        let at = json!({ "path": format!("{home}/p"), "depth": 2 });
        let listed = endpoint.call("list_files", &at);
        assert_eq!(listed["entries"].as_array().unwrap().len(), 2, "{listed}");
        let edits = json!([{ "old": "needle", "new": "thread" }]);
        let at = json!({ "path": format!("{home}/p/q/f"), "edits": edits });
        endpoint.call("edit_file", &at);
        let read = endpoint.call("run", &json!({ "cmd": "cat p/q/f" }));
        assert_eq!(read["stdout"], "thread");
    });
}

#[test]
fn names_of_any_bytes_are_listed_below() {
    everywhere(|endpoint| {
        // A byte that is no text, and a character that stands for such a byte elsewhere.
        let script = r"d=$(printf 'b/\377\356\276\200'); mkdir -p $d; echo > $d/f";
        endpoint.call("run", &json!({ "cmd": script }));
        let listed = endpoint.call("list_files", &json!({ "path": "b", "depth": 2 }));
        let entries = listed["entries"].as_array().unwrap();
        assert_eq!(entries.len(), 2, "{listed}");
        let path = entries[1]["path"].as_str().unwrap();
        let read = endpoint.call("read_file", &json!({ "path": path }));
        assert_eq!(read["content"], "\n");
    });
}

#[test]
fn the_own_tmp_of_a_sandbox_is_reached() {
    if !is_root() || !can_be_had() {
        crate::skip!("needs root, and the rights to make namespaces");
    }
    let server = Server::host().env("SBX_ISOLATION", "namespaces").start();
    let sandbox = server.sandbox();
    let endpoint = Endpoint::of_sandbox(&server, &sandbox);
    endpoint.call("run", &json!({ "cmd": "mkdir -p /tmp/a/b; echo needle > /tmp/a/b/f; echo ignored > /tmp/a/.gitignore; git init -q /tmp/a; echo > /tmp/a/b/ignored" }));
    let read = endpoint.call("read_file", &json!({ "path": "/tmp/a/b/f" }));
    assert_eq!(
        (&read["path"], &read["content"]),
        (&json!("/tmp/a/b/f"), &json!("needle\n"))
    );
    let listed = endpoint.call("list_files", &json!({ "path": "/tmp/a", "depth": 2 }));
    let listed = listed.to_string();
    assert!(listed.contains("\"/tmp/a/b/f\""), "{listed}");
    // The rules of the repository hold below it, too.
    let found = endpoint.call("glob", &json!({ "path": "/tmp/a/b", "pattern": "*" }));
    let entries = found["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 1, "{found}");
    assert_eq!(entries[0]["path"], "/tmp/a/b/f");
    let found = endpoint.call("grep", &json!({ "path": "/tmp", "pattern": "needle" }));
    assert_eq!(found["matches"][0]["path"], "/tmp/a/b/f");
    let edits = json!([{ "old": "needle", "new": "thread" }]);
    let edited = endpoint.call(
        "edit_file",
        &json!({ "path": "/tmp/a/b/f", "edits": edits }),
    );
    assert_eq!(edited["path"], "/tmp/a/b/f");
    write(&endpoint, "/tmp/new/f", "x");
    let read = endpoint.call("run", &json!({ "cmd": "cat /tmp/a/b/f /tmp/new/f" }));
    assert_eq!(read["stdout"], "thread\nx");
    let text = endpoint.fails("read_file", &json!({ "path": "/etc/passwd" }), "forbidden");
    assert!(text.contains("and /tmp"), "{text}");
}

#[test]
fn no_tool_for_files_leaves_a_home() {
    on_a_host(|server, sandbox| {
        let endpoint = Endpoint::of_sandbox(server, sandbox);
        sandbox.sh(
            "ln -s /etc outside; ln -s /etc/passwd link; mkfifo pipe; mkdir locked; chmod 0 locked",
        );
        for (tool, arguments, code) in [
            ("read_file", json!({ "path": "/etc/passwd" }), "forbidden"),
            ("list_files", json!({ "path": "/" }), "forbidden"),
            ("glob", json!({ "path": "/etc" }), "forbidden"),
            (
                "grep",
                json!({ "path": "/etc", "pattern": "root" }),
                "forbidden",
            ),
            (
                "edit_file",
                json!({ "path": "/etc/passwd", "edits": [{ "old": "root", "new": "x" }] }),
                "forbidden",
            ),
            ("read_file", json!({ "path": "/tmp/x" }), "forbidden"),
            ("read_file", json!({ "path": "link" }), "forbidden"),
            (
                "read_file",
                json!({ "path": "outside/passwd" }),
                "forbidden",
            ),
            (
                "read_file",
                json!({ "path": "../../../etc/passwd" }),
                "forbidden",
            ),
            ("read_file", json!({ "path": "pipe" }), "not_regular"),
            ("read_file", json!({ "path": "." }), "is_directory"),
            ("read_file", json!({ "path": "a\u{0}b" }), "bad_request"),
            (
                "write_file",
                json!({ "path": "outside/x", "content": "x" }),
                "forbidden",
            ),
            (
                "write_file",
                json!({ "path": "../x", "content": "x" }),
                "forbidden",
            ),
            (
                "write_file",
                json!({ "path": "f", "content": "x", "mode": "888" }),
                "bad_request",
            ),
            (
                "write_file",
                json!({ "path": "f", "content": 1 }),
                "bad_request",
            ),
            ("write_file", json!({ "path": "f" }), "bad_request"),
            (
                "edit_file",
                json!({ "path": "link", "edits": [{ "old": "root", "new": "x" }] }),
                "forbidden",
            ),
            ("list_files", json!({ "path": "outside" }), "forbidden"),
            ("list_files", json!({ "path": ".." }), "forbidden"),
            ("glob", json!({ "path": "outside" }), "forbidden"),
            (
                "grep",
                json!({ "pattern": "root", "path": "outside" }),
                "forbidden",
            ),
            (
                "grep",
                json!({ "pattern": "root", "path": "link" }),
                "forbidden",
            ),
        ] {
            endpoint.fails(tool, &arguments, code);
        }
        // What cannot be read below is left out.
        let listed = endpoint.call("list_files", &json!({ "path": ".", "depth": 9 }));
        let listed = listed.to_string();
        assert!(
            listed.contains("locked") && !listed.contains("passwd\""),
            "{listed}"
        );
        let found = endpoint.call("grep", &json!({ "pattern": "root", "all": true }));
        assert_eq!(found["matches"], json!([]));
    });
}
