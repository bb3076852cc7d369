//! The content of files, in all the forms in which clients send it.

use serde_json::{Value, json};

use super::{Door, everywhere, on_a_host};
use crate::fixture::{Reply, expect_same, random_bytes, sha256};

const STAT: &str = "/filesystem.Filesystem/Stat";

fn post(door: &Door<'_>, query: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    door.request("POST", &format!("/files{query}"), headers, body)
}

fn multipart(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = b"a preamble\r\n".to_vec();
    for (disposition, content) in parts {
        body.extend(format!("--bound\r\nContent-Disposition: form-data; {disposition}\r\nContent-Type: x/y\r\n\r\n").as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--bound--\r\nan epilogue");
    body
}

const FORM: [(&str, &str); 1] = [("content-type", "multipart/form-data; boundary=bound")];
const RAW: [(&str, &str); 1] = [("content-type", "application/octet-stream")];

fn cleaned(door: &Door<'_>) -> String {
    let path = json!({ "path": "e2b-files" });
    door.ok("/filesystem.Filesystem/Remove", &path);
    let made = door.ok("/filesystem.Filesystem/MakeDir", &path);
    made["entry"]["path"].as_str().unwrap().to_owned()
}

#[test]
fn files_are_written_in_each_form() {
    everywhere(|door| {
        let place = cleaned(door);
        let content = random_bytes(3 << 20, 7);
        let whole: Vec<&[u8]> = vec![
            &content,
            b"",
            b"\r\n",
            b"\r\n--boun",
            b"--bound",
            b"\r\n--bounx\r\n",
        ];
        for (number, content) in whole.into_iter().enumerate() {
            let path = format!("e2b-files/new/{number}");
            let query = format!("?path={path}");
            let body = multipart(&[("name=\"file\"; filename=\"ignored\"", content)]);
            let chunked = |body: &[u8]| {
                let mut all = Vec::new();
                for part in body.chunks(40_000) {
                    all.extend(format!("{:x}\r\n", part.len()).as_bytes());
                    all.extend_from_slice(part);
                    all.extend_from_slice(b"\r\n");
                }
                all.extend_from_slice(b"0\r\n\r\n");
                all
            };
            let coded = [FORM[0], ("transfer-encoding", "chunked")];
            for (headers, body) in [
                (&FORM[..], body.clone()),
                (&coded, chunked(&body)),
                (&RAW, content.to_vec()),
            ] {
                let reply = post(door, &query, headers, &body);
                assert_eq!(reply.status, 200, "{}", reply.text());
                let written = json!([{ "name": number.to_string(), "type": "file", "path": format!("{place}/new/{number}") }]);
                assert_eq!(reply.json(), written);
                let read = door.request("GET", &format!("/files{query}"), &[], b"");
                assert_eq!(read.status, 200);
                expect_same("the file", &read.body, content);
                assert_eq!(
                    read.header("content-type"),
                    Some("application/octet-stream")
                );
            }
        }
        let read = door.request(
            "GET",
            "/files?path=e2b-files/new/0",
            &[("range", "bytes=5-9")],
            b"",
        );
        assert_eq!((read.status, &read.body[..]), (206, &content[5..10]));
        let read = door.request(
            "GET",
            "/files?path=e2b-files/new/0",
            &[("range", "bytes=99999999-")],
            b"",
        );
        assert_eq!(read.status, 416);
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files" }),
        );
    });
}

#[test]
fn several_files_have_their_names_in_the_parts() {
    everywhere(|door| {
        let place = cleaned(door);
        let parts: [(&str, &[u8]); 5] = [
            ("name=\"file\"; filename=\"e2b-files/a b/1.txt\"", b"one"),
            ("name=\"other\"; filename=\"e2b-files/not\"", b"no file"),
            ("name=\"file\"; filename=\"~/e2b-files/é%22q.txt\"", b"two"),
            ("name=\"file\"; filename=\"e2b-files/%41+%2B%+5\"", b""),
            (r#"name="file"; filename="e2b-files/back\\slash""#, b"four"),
        ];
        let reply = post(door, "", &FORM, &multipart(&parts));
        assert_eq!(reply.status, 200, "{}", reply.text());
        let names: Vec<String> = reply
            .json()
            .as_array()
            .unwrap()
            .iter()
            .map(|file| file["path"].as_str().unwrap().replace(&place, ""))
            .collect();
        assert_eq!(
            names,
            ["/a b/1.txt", "/é\"q.txt", "/%41+%2B%+5", r"/back\slash"]
        );
        let read = |query: &str| {
            door.request("GET", &format!("/files?path={query}"), &[], b"")
                .text()
        };
        // A space comes in two forms.
        assert_eq!(read("e2b-files/a+b/1.txt"), "one");
        assert_eq!(read("e2b-files/a%20b/1.txt"), "one");
        assert_eq!(read("e2b-files/%C3%A9%22q.txt"), "two");
        assert_eq!(read("e2b-files/%2541%2B%252B%25%2B5"), "");
        assert_eq!(door.sh(&format!("ls {place} | wc -l")).text().trim(), "4");
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files" }),
        );
    });
}

/// One member of gzip with the content stored.
fn gzip(content: &[u8]) -> Vec<u8> {
    let mut out = b"\x1f\x8b\x08\0\0\0\0\0\0\xff".to_vec();
    let mut parts = content.chunks(65_535).peekable();
    if content.is_empty() {
        out.extend_from_slice(b"\x01\0\0\xff\xff");
    }
    while let Some(part) = parts.next() {
        let length = u16::try_from(part.len()).unwrap();
        out.push(u8::from(parts.peek().is_none()));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend_from_slice(part);
    }
    let crc = content.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    });
    out.extend((!crc).to_le_bytes());
    out.extend(u32::try_from(content.len()).unwrap().to_le_bytes());
    out
}

#[test]
fn compressed_uploads_are_written_as_they_were() {
    everywhere(|door| {
        cleaned(door);
        let content = random_bytes(200_000, 3);
        let headers = [RAW[0], ("content-encoding", "gzip")];
        let several = [
            gzip(&content[..70_000]),
            gzip(b""),
            gzip(&content[70_000..]),
        ]
        .concat();
        for body in [gzip(&content), several] {
            let reply = post(door, "?path=e2b-files/g", &headers, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
            let read = door.request(
                "GET",
                "/files?path=e2b-files/g",
                &[("accept-encoding", "gzip")],
                b"",
            );
            assert_eq!(sha256(&read.body), sha256(&content));
        }
        let whole = gzip(&content);
        let mut changed = whole.clone();
        changed[100] ^= 1;
        for body in [
            &whole[..whole.len() - 1],
            &whole[..50_000],
            &changed,
            b"plain",
            b"",
        ] {
            let reply = post(door, "?path=e2b-files/g", &headers, body);
            assert_eq!(reply.status, 400, "{}", reply.text());
            assert_eq!(reply.json()["code"], 400);
        }
        // The old file is still there.
        let read = door.request("GET", "/files?path=e2b-files/g", &[], b"");
        assert_eq!(sha256(&read.body), sha256(&content));
        let reply = post(
            door,
            "?path=e2b-files/g",
            &[RAW[0], ("content-encoding", "br")],
            b"x",
        );
        assert_eq!(reply.status, 415);
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files" }),
        );
    });
}

#[test]
fn metadata_is_kept_with_a_file_and_replaced_with_it() {
    everywhere(|door| {
        cleaned(door);
        let headers = [
            RAW[0],
            ("x-metadata-Author", "me"),
            ("X-Metadata-kind", "a b=c"),
        ];
        let reply = post(door, "?path=e2b-files/m", &headers, b"x");
        if reply.status == 501 {
            crate::skip!(
                "this file system has no extended attributes: {}",
                reply.text()
            );
        }
        let metadata = json!({ "author": "me", "kind": "a b=c" });
        assert_eq!(reply.json()[0]["metadata"], metadata);
        let stat =
            |path: &str| door.ok(STAT, &json!({ "path": path }))["entry"]["metadata"].clone();
        assert_eq!(stat("e2b-files/m"), metadata);
        let listed = door.ok(
            "/filesystem.Filesystem/ListDir",
            &json!({ "path": "e2b-files" }),
        );
        assert_eq!(listed["entries"][0]["metadata"], metadata);
        post(
            door,
            "?path=e2b-files/m",
            &[RAW[0], ("x-metadata-other", "1")],
            b"y",
        );
        assert_eq!(stat("e2b-files/m"), json!({ "other": "1" }));
        post(door, "?path=e2b-files/m", &RAW, b"z");
        assert_eq!(stat("e2b-files/m"), Value::Null);
        let long = "k".repeat(247);
        let large = "v".repeat(4097);
        for (name, value) in [
            (&*format!("x-metadata-{long}"), "v"),
            ("x-metadata-a", &large),
            ("x-metadata-", "v"),
            ("x-metadata-a", "é"),
        ] {
            let reply = post(door, "?path=e2b-files/m", &[RAW[0], (name, value)], b"w");
            assert_eq!(reply.status, 400, "{name}");
        }
        assert_eq!(
            door.request("GET", "/files?path=e2b-files/m", &[], b"")
                .text(),
            "z"
        );
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files" }),
        );
    });
}

#[test]
fn refusals_have_their_status_as_a_number() {
    everywhere(|door| {
        let place = cleaned(door);
        let expect = |reply: &Reply, status: u16| {
            assert_eq!(reply.status, status, "{}", reply.text());
            assert_eq!(reply.json()["code"], status);
            assert!(reply.json()["message"].is_string());
        };
        let get = |query: &str| door.request("GET", &format!("/files{query}"), &[], b"");
        expect(&get("?path=e2b-files/none"), 404);
        expect(&get("?path=e2b-files"), 400);
        post(door, "?path=e2b-files/f", &RAW, b"x");
        expect(&get("?path=e2b-files/f/below"), 404);
        for method in ["ListDir", "CreateWatcher"] {
            let below = json!({ "path": "e2b-files/f/below" });
            door.fails(
                &format!("/filesystem.Filesystem/{method}"),
                &below,
                404,
                "not_found",
            );
        }
        let below = json!({ "source": "e2b-files/f/below", "destination": "e2b-files/g" });
        door.fails("/filesystem.Filesystem/Move", &below, 404, "not_found");
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files/f/below" }),
        );
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files/f" }),
        );
        expect(&get(""), 400);
        expect(&get("?path=e2b-files/none&username=nobody"), 401);
        expect(&post(door, "", &RAW, b"x"), 400);
        expect(&post(door, "?path=e2b-files", &RAW, b"x"), 400);
        let one = multipart(&[("name=\"file\"", b"x")]);
        expect(&post(door, "", &FORM, &one), 400);
        let two = multipart(&[("name=\"file\"", b"x"), ("name=\"file\"", b"y")]);
        expect(&post(door, "?path=e2b-files/two", &FORM, &two), 400);
        // The first one is there: nobody knew then that a second one would come.
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files/two" }),
        );
        // A body that is cut anywhere leaves what was there.
        post(door, "?path=e2b-files/kept", &RAW, b"old");
        let whole = multipart(&[("name=\"file\"; filename=\"x\"", b"a new and longer content")]);
        for end in 0..whole.len() - "--\r\nan epilogue".len() {
            let reply = post(door, "?path=e2b-files/kept", &FORM, &whole[..end]);
            assert_eq!(reply.status, 400, "cut at {end}: {}", reply.text());
        }
        assert_eq!(get("?path=e2b-files/kept").text(), "old");
        let names = door.sh(&format!("ls -A {place}")).text();
        assert_eq!(names, "kept\n", "no litter");
        for header in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "text/plain",
        ] {
            let reply = post(door, "", &[("content-type", header)], b"x");
            expect(&reply, 400);
        }
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-files" }),
        );
    });
}

#[test]
fn uploads_of_a_sandbox_stay_in_its_home() {
    on_a_host(|server| {
        let door = Door::open(server);
        for path in [
            "/etc/e2b-test",
            "../x",
            "/home/user/../../x",
            "/tmp/e2b-test",
        ] {
            let reply = post(&door, &format!("?path={path}"), &RAW, b"x");
            assert_eq!(reply.status, 403, "{path}: {}", reply.text());
            let part = format!("name=\"file\"; filename=\"{path}\"");
            let reply = post(&door, "", &FORM, &multipart(&[(&part, b"x")]));
            assert_eq!(reply.status, 403, "{path}: {}", reply.text());
        }
        assert_eq!(post(&door, "?path=/home/user/in", &RAW, b"x").status, 200);
        assert_eq!(
            door.sh("stat -c %U:%s in; cat in").text(),
            format!("{}:1\nx", door.sh("stat -c %U .").text().trim())
        );
    });
}
