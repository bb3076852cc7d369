//! Archives up: what each kind of member becomes, and what the parameters do.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use serde_json::json;

use super::{BLOCK, Place, Tar, in_both_modes, listing};
use crate::fixture::{is_root, names_in};
use crate::skip;

#[test]
fn members_become_files_with_their_modes_and_times() {
    in_both_modes(|place| {
        let archive = Tar::default()
            .directory("./", 0o755)
            .directory("./closed/", 0o555)
            .pax(&[("mtime", b"1700000000.123456789")])
            .file("./closed/file", "content")
            .link("./link", "nowhere/at all")
            .hard_link("./hard", "./closed/file")
            .file("implied/by/name", "")
            .raw(&Tar::header(b'0', b"program", b"", 0o6755, 0))
            .end();
        let answer = place.unpack("", &archive);
        assert_eq!(
            answer,
            json!({"path": place.shown, "files": 3, "dirs": 3, "links": 2, "bytes": 7,
                   "skipped": [], "skipped_total": 0})
        );
        assert_eq!(place.read("closed/file"), "content");
        let file = fs::metadata(place.path("closed/file")).unwrap();
        assert_eq!(
            (file.mtime(), file.mtime_nsec()),
            (1_700_000_000, 123_456_789)
        );
        assert_eq!(file.ino(), fs::metadata(place.path("hard")).unwrap().ino());
        assert_eq!(
            fs::read_link(place.path("link")).unwrap(),
            Path::new("nowhere/at all")
        );
        assert_eq!(place.mode("closed"), 0o555);
        assert_eq!(place.mode("closed/file"), 0o644);
        assert_eq!(
            place.mode("program"),
            0o755,
            "without set-user-ID and set-group-ID"
        );
        let closed = fs::metadata(place.path("closed")).unwrap();
        assert_eq!(closed.mtime(), 0o14_524_770_000, "after its content");
        // All of it is the workspace's user's.
        let owner = fs::metadata(place.directory.parent().unwrap())
            .unwrap()
            .uid();
        for name in [
            "closed",
            "closed/file",
            "hard",
            "implied/by/name",
            "program",
        ] {
            assert_eq!(
                fs::metadata(place.path(name)).unwrap().uid(),
                owner,
                "{name}"
            );
        }
        place.check_no_litter();
        // The same again, over what is there.
        place.unpack("", &archive);
        assert_eq!(place.mode("closed"), 0o555);
    });
}

#[test]
fn members_in_any_order_come_out_the_same() {
    in_both_modes(|place| {
        // The directory's mode comes before, between and after its files.
        let archive = Tar::default()
            .file("late/one", "1")
            .directory("early/", 0o500)
            .file("early/one", "1")
            .file("other/one", "1")
            .file("early/two", "2")
            .directory("early/below/", 0)
            .file("other/two", "2")
            .file("early/below/deep", "3")
            .directory("late/", 0o711)
            .end();
        place.unpack("", &archive);
        assert_eq!(place.mode("early"), 0o500);
        assert_eq!(place.mode("early/below"), 0);
        assert_eq!(place.mode("late"), 0o711);
        assert_eq!(place.read("early/below/deep"), "3");
        assert_eq!(place.read("early/two"), "2");
    });
}

#[test]
fn what_exists_is_replaced_kept_or_refused() {
    in_both_modes(|place| {
        let old = Tar::default()
            .file("a", "old")
            .file("dir/b", "old")
            .link("l", "a")
            .end();
        let new = Tar::default()
            .file("a", "new")
            .file("dir/b", "new")
            .file("dir/c", "new")
            .file("l", "new")
            .end();
        place.unpack("", &old);
        fs::write(place.path("other"), "other").unwrap();
        let kept = place.unpack("&overwrite=keep", &new);
        assert_eq!(
            (&kept["files"], &kept["skipped_total"]),
            (&json!(1), &json!(3))
        );
        assert_eq!(kept["skipped"][0], json!({"name": "a", "reason": "exists"}));
        assert_eq!(place.read("a") + &place.read("dir/c"), "oldnew");
        let refused = place.refused("&overwrite=fail", &new, 409, "exists");
        assert_eq!(refused["member"], "a");
        assert_eq!(place.read("a"), "old");
        // The link itself is replaced, and not what it leads to.
        place.unpack("", &new);
        assert_eq!(place.read("a") + &place.read("dir/b"), "newnew");
        assert!(!place.path("l").is_symlink());
        assert_eq!(place.read("other"), "other", "other files stay");
        // Links replace files, and themselves.
        let links = Tar::default().link("l", "a").hard_link("dir/b", "a").end();
        for _ in 0..2 {
            place.unpack("", &links);
            assert!(place.path("l").is_symlink());
            assert_eq!(place.read("dir/b"), "new");
        }
        place.check_no_litter();
    });
}

#[test]
fn a_directory_and_a_file_never_replace_each_other() {
    in_both_modes(|place| {
        place.unpack(
            "",
            &Tar::default()
                .file("file", "x")
                .directory("dir", 0o755)
                .end(),
        );
        for (archive, code) in [
            (Tar::default().file("dir", "y"), "is_directory"),
            (Tar::default().link("dir", "y"), "is_directory"),
            (Tar::default().hard_link("dir", "file"), "is_directory"),
            (Tar::default().directory("file", 0o755), "not_directory"),
            (Tar::default().file("file/below", "y"), "not_directory"),
        ] {
            let archive = Tar::default().file("first", "12345").raw(&archive.0);
            for rest in ["", "&dry_run=1"] {
                let error = place.refused(rest, &archive.clone().end(), 409, code);
                assert_eq!((&error["files"], &error["bytes"]), (&json!(1), &json!(5)));
            }
        }
        assert_eq!(place.read("file"), "x");
        assert_eq!(names_in(&place.directory), ["dir", "file", "first"]);
    });
}

#[test]
fn leading_parts_are_stripped_from_names_and_hard_links() {
    in_both_modes(|place| {
        let archive = Tar::default()
            .directory("top/", 0o700)
            .file("alone", "left out")
            .file("top/a/file", "x")
            .hard_link("top/b/hard", "top/a/file")
            .link("top/link", "top/a")
            .end();
        place.unpack("&strip=1", &archive);
        assert_eq!(names_in(&place.directory), ["a", "b", "link"]);
        assert_eq!(place.read("b/hard"), "x");
        assert_eq!(
            fs::read_link(place.path("link")).unwrap(),
            Path::new("top/a")
        );
        let nothing = place.unpack("&strip=4", &archive);
        assert_eq!(nothing["files"], 0);
    });
}

#[test]
fn devices_and_pipes_are_left_out_and_told() {
    in_both_modes(|place| {
        let mut archive = Tar::default();
        for (typeflag, name) in [
            (b'3', "char"),
            (b'4', "block"),
            (b'6', "fifo"),
            (b'Z', "what"),
        ] {
            archive = archive.member(typeflag, name, "");
        }
        for number in 0..200 {
            archive = archive.member(b'6', &format!("fifo-{number}"), "");
        }
        let answer = place.unpack("", &archive.file("file", "x").end());
        assert_eq!(
            (&answer["files"], &answer["skipped_total"]),
            (&json!(1), &json!(204))
        );
        let skipped = answer["skipped"].as_array().unwrap();
        assert_eq!(skipped.len(), 100);
        assert_eq!(skipped[2], json!({"name": "fifo", "reason": "fifo"}));
        assert_eq!(names_in(&place.directory), ["file"]);
    });
}

#[test]
fn limits_end_the_unpacking_before_they_are_passed() {
    in_both_modes(|place| {
        let archive = Tar::default()
            .directory("dir/", 0o755)
            .file("dir/a", "12345")
            .file("dir/b", "12345")
            .end();
        for (rest, files) in [
            ("&max_bytes=9", 1),
            ("&max_bytes=4", 0),
            ("&max_files=2", 1),
            ("&max_files=0", 0),
        ] {
            let error = place.refused(rest, &archive, 413, "too_large");
            assert_eq!(error["files"], files, "{rest}");
            let dry = place.refused(&format!("{rest}&dry_run=1"), &archive, 413, "too_large");
            assert_eq!(dry["files"], files, "{rest}");
        }
        place.unpack("&max_bytes=10&max_files=3", &archive);
        // What is left out has to be decompressed all the same.
        for (rest, archive) in [
            ("&strip=1", Tar::default().file("alone", "12345")),
            ("", Tar::default().member(b'Z', "what", "12345")),
            ("&overwrite=keep", Tar::default().file("dir/a", "12345")),
        ] {
            let archive = archive.file("dir/c", "12345").end();
            let limited = |most| format!("{rest}&max_bytes={most}");
            place.refused(&limited(9), &archive, 413, "too_large");
            place.unpack(&limited(10), &archive);
        }
        let label = "x".repeat(2 << 20);
        let archive = Tar::default().member(b'V', "label", &label).end();
        place.refused("", &archive, 400, "bad_archive");
    });
}

#[test]
fn a_dry_run_checks_and_writes_nothing() {
    in_both_modes(|place| {
        let archive = Tar::default()
            .directory("dir/", 0o500)
            .file("dir/a", "12345")
            .link("link", "dir")
            .hard_link("hard", "dir/a")
            .end();
        let dry = place.unpack("&dry_run=1", &archive);
        assert!(!place.directory.exists());
        assert_eq!(place.unpack("", &archive), dry);
        let before = listing(&place.directory);
        place.unpack(
            "&dry_run=1",
            &Tar::default().file("dir/a", "new").file("x", "").end(),
        );
        assert_eq!(listing(&place.directory), before);
        place.refused("&dry_run=1&overwrite=fail", &archive, 409, "exists");
        let through = Tar::default().link("new", "dir").file("new/x", "").end();
        place.refused("&dry_run=1", &through, 400, "bad_archive");
        let missing = place.put("/none&mkdir=0&dry_run=1", &archive);
        assert_eq!(missing.status, 404, "{}", missing.text());
        assert_eq!(listing(&place.directory), before);
    });
}

#[test]
fn a_dry_run_counts_a_directory_once_however_often_it_comes_back() {
    in_both_modes(|place| {
        let mut archive = Tar::default().directory("d/", 0o555);
        for number in 0..10 {
            archive = archive.file(&format!("d/{}/{number}", number % 2), "");
        }
        let archive = archive.end();
        place.refused("&dry_run=1&max_files=12", &archive, 413, "too_large");
        let dry = place.unpack("&dry_run=1&max_files=13", &archive);
        assert_eq!((&dry["dirs"], &dry["files"]), (&json!(3), &json!(10)));
        assert_eq!(place.unpack("&max_files=13", &archive), dry);
    });
}

#[test]
fn all_or_nothing_takes_the_place_of_the_directory() {
    in_both_modes(|place| {
        let old = Tar::default()
            .directory("kept/", 0o555)
            .file("kept/a", "old")
            .end();
        let new = Tar::default()
            .directory("fresh/", 0o555)
            .file("fresh/b", "new")
            .end();
        place.unpack("&atomic=1", &old);
        assert_eq!(names_in(&place.directory), ["kept"]);
        let mode = place.mode("");
        let broken = Tar::default().file("c", "new").file("../d", "").end();
        place.refused("&atomic=1", &broken, 400, "bad_archive");
        place.refused("&atomic=1", &new[..BLOCK * 3], 400, "bad_archive");
        place.refused("&atomic=1&overwrite=fail", &new, 409, "exists");
        assert_eq!(names_in(&place.directory), ["kept"]);
        place.check_no_litter();
        // Exactly the archive's content, under the old mode.
        place.unpack("&atomic=1", &new);
        assert_eq!(names_in(&place.directory), ["fresh"]);
        assert_eq!((place.mode(""), place.mode("fresh")), (mode, 0o555));
        place.unpack("/&atomic=1", &Tar::default().directory("./", 0o710).end());
        assert_eq!(
            (names_in(&place.directory).len(), place.mode("")),
            (0, 0o710)
        );
        place.check_no_litter();
        // What is no directory is not exchanged.
        fs::write(place.path("file"), "x").unwrap();
        let reply = place.put("/file&atomic=1", &new);
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (409, "not_directory")
        );
        let reply = place.put("/none/deep&atomic=1&mkdir=0", &new);
        assert_eq!((reply.status, reply.code().as_str()), (404, "not_found"));
    });
}

#[test]
fn owners_are_kept_only_by_root_of_a_machine() {
    if !is_root() {
        skip!("needs root");
    }
    let archive = Tar::default()
        .directory("dir/", 0o755)
        .file("dir/file", "x")
        .link("link", "x")
        .end();
    let place = Place::dedicated();
    place.unpack("&owners=1", &archive);
    for name in ["dir", "dir/file", "link"] {
        let status = fs::symlink_metadata(place.path(name)).unwrap();
        assert_eq!((status.uid(), status.gid()), (1000, 1000), "{name}");
    }
    Place::sandbox().refused("&owners=1", &archive, 400, "bad_request");
}

#[test]
fn links_on_the_way_to_the_directory_are_followed_on_a_machine_and_not_in_a_sandbox() {
    let archive = Tar::default().file("file", "x").end();
    in_both_modes(|place| {
        let is_sandbox = place.shown == "tree";
        fs::create_dir(place.directory.with_file_name("real")).unwrap();
        symlink("real", &place.directory).unwrap();
        for rest in ["", "&atomic=1", "/below"] {
            if is_sandbox {
                place.refused(rest, &archive, 403, "forbidden");
            } else {
                place.unpack(rest, &archive);
                assert!(place.directory.is_symlink(), "the link stays");
                let real = place.directory.with_file_name("real");
                assert_eq!(fs::read(real.join("file")).unwrap(), b"x");
            }
        }
    });
}

#[test]
fn extensions_of_pax_and_gnu_tar_are_understood() {
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(140));
    let long_target = "t".repeat(300);
    in_both_modes(|place| {
        let archive = Tar::default()
            .pax(&[("path", long.as_bytes()), ("SCHILY.xattr.user.x", b"\0\n")])
            .file("short", "pax")
            .pax(&[("path", b"caf\xc3\xa9-\xff"), ("mtime", b"-1.5")])
            .file("name", "bytes")
            .member(b'g', "global", "")
            .member(b'L', "././@LongLink", &format!("gnu-{long}\0"))
            .member(b'K', "././@LongLink", &format!("{long_target}\0"))
            .link("cut", "cut")
            .pax(&[("size", b"3")])
            .raw(&Tar::header(b'0', b"sized", b"", 0o644, 0))
            .content(b"abc")
            .member(0, "old-directory/", "")
            .member(b'7', "contiguous", "x")
            .end();
        place.unpack("", &archive);
        assert_eq!(place.read(&long), "pax");
        let link = place.path(&format!("gnu-{long}"));
        assert_eq!(fs::read_link(link).unwrap(), Path::new(&long_target));
        assert_eq!(place.read("sized"), "abc");
        assert!(place.path("old-directory").is_dir());
        assert_eq!(place.read("contiguous"), "x");
        let bytes = fs::read_dir(&place.directory).unwrap().find(|entry| {
            let name = entry.as_ref().unwrap().file_name().into_encoded_bytes();
            name == b"caf\xc3\xa9-\xff"
        });
        let status = bytes.unwrap().unwrap().metadata().unwrap();
        assert_eq!((status.mtime(), status.mtime_nsec()), (-2, 500_000_000));
    });
}

#[test]
fn what_go_and_docker_write_is_unpacked() {
    in_both_modes(|place| {
        // GNU's format as Go's archive/tar has it: numbers in base 256, and times where ustar has a prefix.
        let mut gnu = Tar::header(b'0', b"gnu", b"", 0o644, 3);
        let mut put = |at: usize, bytes: &[u8]| gnu[at..at + bytes.len()].copy_from_slice(bytes);
        put(257, b"ustar  \0");
        put(108, b"\x80\0\0\0\xff\xff\xff\xfe");
        put(124, b"\x80\0\0\0\0\0\0\0\0\0\0\x03");
        put(136, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe");
        put(345, b"14524770000\x0014524770000\0");
        Tar::seal(&mut gnu);
        let archive = Tar::default()
            .raw(&gnu)
            .content(b"abc")
            // Pax as Go has it, and what layers of images add to it.
            .pax(&[
                ("path", "layer/\u{e9}".as_bytes()),
                ("uid", b"4294967294"),
                ("mtime", b"1700000000.5"),
                ("atime", b"1700000000"),
                (
                    "SCHILY.xattr.security.capability",
                    b"\x01\0\0\x02\0\x20\0\0",
                ),
            ])
            .file("layer/", "x")
            // What hides a file of the layer below is a file here.
            .file("layer/.wh.removed", "")
            .file("layer/.wh..wh..opq", "")
            .hard_link("layer/again", "layer/\u{e9}")
            .end();
        let done = place.unpack("", &archive);
        assert_eq!(
            (&done["files"], &done["links"], &done["skipped_total"]),
            (&json!(4), &json!(1), &json!(0))
        );
        assert_eq!(place.read("gnu"), "abc");
        assert_eq!(fs::metadata(place.path("gnu")).unwrap().mtime(), -2);
        assert_eq!(place.read("layer/again"), "x");
        assert_eq!(
            names_in(place.path("layer")),
            [".wh..wh..opq", ".wh.removed", "again", "\u{e9}"]
        );
    });
}

#[test]
fn a_parameter_that_does_not_parse_is_refused() {
    let place = Place::dedicated();
    let archive = Tar::default().file("a", "1").end();
    for rest in [
        "&strip=-1",
        "&strip=x",
        "&overwrite=all",
        "&overwrite=",
        "&atomic=2",
        "&dry_run=yes",
        "&mkdir=maybe",
        "&owners=root",
        "&max_bytes=1k",
        "&max_files=-1",
        "&atomic=1&overwrite=keep",
        "&mode=600",
        "%00",
    ] {
        place.refused(rest, &archive, 400, "bad_request");
    }
    let mut connection = place.connect();
    let reply = connection.request("PUT", "/v1/files/archive", &[], &archive);
    assert_eq!((reply.status, reply.code().as_str()), (400, "bad_request"));
    let head = format!(
        "PUT {} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {}\r\n\r\n",
        place.target(""),
        place.token.as_deref().unwrap()
    );
    connection.send(head.as_bytes());
    assert_eq!(connection.read_reply().status, 411);
    assert!(!place.directory.exists());
}
