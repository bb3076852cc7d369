//! Archives that want out of the directory, more than there is, or to be taken for something else; and
//! what happens to the tree when a client goes away or somebody changes names under an upload.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{BLOCK, Place, Tar, in_both_modes, listing, record};
use crate::files::Mount;
use crate::fixture::{PATIENCE, Reply, Server, filtered, is_root, memory_of, names_in, wait_until};
use crate::skip;

#[test]
fn no_name_leads_out_of_the_directory() {
    in_both_modes(|place| {
        place.unpack("", &Tar::default().end());
        let outside = place.directory.parent().unwrap().to_owned();
        let before = listing(&outside);
        let deep = "d/".repeat(10_000) + "file";
        let levels = "d/".repeat(256) + "file";
        let long = "n".repeat(4097);
        for name in [
            "..",
            "../out",
            "../tree/file",
            "a/../../out",
            "a/..",
            "./../out",
            "/out",
            "//out",
            "/",
            "a\0b",
            &deep,
            &levels,
            &long,
            &"n".repeat(256),
        ] {
            let named = [("path", name.as_bytes())];
            let shown = &name[..name.len().min(30)];
            for archive in [
                Tar::default().pax(&named).file("x", "harm"),
                Tar::default().pax(&named).directory("x/", 0o755),
                Tar::default().pax(&named).link("x", "/tmp"),
                Tar::default().pax(&named).member(b'6', "x", ""),
                Tar::default().file("f", "").pax(&named).hard_link("x", "f"),
                Tar::default()
                    .pax(&[("linkpath", name.as_bytes())])
                    .hard_link("x", "x"),
            ] {
                let error = place.refused("", &archive.clone().end(), 400, "bad_archive");
                assert!(error["member"].is_string(), "{shown}: {error}");
                place.refused("&dry_run=1", &archive.clone().end(), 400, "bad_archive");
                place.refused("&atomic=1", &archive.end(), 400, "bad_archive");
            }
        }
        for empty in [
            Tar::default().file("", "x"),
            Tar::default().link("link", ""),
        ] {
            place.refused("", &empty.end(), 400, "bad_archive");
        }
        let _ = fs::remove_file(place.path("f"));
        assert_eq!(listing(&outside).len(), before.len());
        place.check_no_litter();
    });
}

/// A directory beside that of the archive, in which everybody may write.
fn outside(place: &Place) -> PathBuf {
    let outside = place.directory.with_file_name("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o777)).unwrap();
    outside
}

#[track_caller]
fn assert_untouched(outside: &Path) {
    assert_eq!(names_in(outside), ["secret"]);
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"secret");
}

#[test]
fn no_member_goes_through_a_link() {
    in_both_modes(|place| {
        let outside = outside(place);
        fs::create_dir(place.directory.with_file_name("elsewhere")).unwrap();
        let absolute = outside.to_str().unwrap().to_owned();
        for target in ["../outside", absolute.as_str(), "own", "."] {
            let start = Tar::default().directory("own/", 0o755).link("link", target);
            for archive in [
                start.clone().file("link/new", "harm"),
                start.clone().file("link/secret", "harm"),
                start.clone().directory("link/deep/", 0o777),
                start.clone().link("link/new", "x"),
                start.clone().hard_link("stolen", "link/secret"),
                start.clone().hard_link("link/new", "own"),
                start
                    .clone()
                    .link("link", "../outside")
                    .file("link/new", "harm"),
                start
                    .clone()
                    .link("chain", "link")
                    .file("chain/new", "harm"),
                start
                    .clone()
                    .link("own/up", "../link")
                    .file("own/up/new", "harm"),
            ] {
                let _ = fs::remove_dir_all(&place.directory);
                place.refused("", &archive.clone().end(), 400, "bad_archive");
                let _ = fs::remove_dir_all(&place.directory);
                place.refused("&atomic=1", &archive.end(), 400, "bad_archive");
                assert!(!place.directory.exists());
            }
        }
        // A link that was there before is not followed either.
        let _ = fs::remove_dir_all(&place.directory);
        place.unpack("", &Tar::default().link("before", &absolute).end());
        for archive in [
            Tar::default().file("before/new", "harm"),
            Tar::default().directory("before/", 0o700),
        ] {
            place.refused("", &archive.end(), 403, "forbidden");
        }
        // Hard links to what is no file of the tree.
        for (name, target) in [("a", "nothing"), ("b", "before"), ("c", "."), ("d", "dir")] {
            let archive = Tar::default()
                .directory("dir/", 0o755)
                .hard_link(name, target)
                .end();
            if target == "before" {
                place.unpack("", &archive);
                assert!(place.path("b").is_symlink(), "a second name of the link");
            } else {
                place.refused("", &archive, 400, "bad_archive");
            }
        }
        assert_untouched(&outside);
        place.check_no_litter();
    });
}

/// As in an archive to which `tar -r` has added what was changed.
#[test]
fn the_last_of_several_members_takes_the_name_of_a_link() {
    in_both_modes(|place| {
        let outside = outside(place);
        for target in ["../outside", "../outside/secret", "nothing", "own"] {
            let start = Tar::default().file("own", "own").link("link", target);
            let tars = [
                start.clone().link("link", "another"),
                start.clone().file("link", "file"),
                start.clone().hard_link("link", "own"),
                start
                    .clone()
                    .directory("link/", 0o755)
                    .file("link/new", "new"),
                start.clone().file("link", "file").link("link", "another"),
                start
                    .clone()
                    .directory("link/", 0o755)
                    .directory("link/", 0o700),
            ];
            for (number, tar) in tars.into_iter().enumerate() {
                let archive = tar.end();
                for query in ["", "&atomic=1"] {
                    let _ = fs::remove_dir_all(&place.directory);
                    place.unpack("&dry_run=1", &archive);
                    place.unpack(query, &archive);
                    let link = place.path("link");
                    let kind = fs::symlink_metadata(&link).unwrap().file_type();
                    match number {
                        0 | 4 => assert_eq!(fs::read_link(&link).unwrap().as_os_str(), "another"),
                        1 => assert!(kind.is_file() && place.read("link") == "file"),
                        2 => assert!(kind.is_file() && place.read("link") == "own"),
                        3 => assert!(kind.is_dir() && place.read("link/new") == "new"),
                        _ => assert!(kind.is_dir()),
                    }
                }
            }
            let _ = fs::remove_dir_all(&place.directory);
            let file = start.clone().file("link", "file").file("link/new", "harm");
            place.refused("", &file.end(), 409, "not_directory");
            // With these options what came first is somebody's file like any other.
            let _ = fs::remove_dir_all(&place.directory);
            let twice = start.clone().directory("link/", 0o755).end();
            let report = place.unpack("&overwrite=keep", &twice);
            assert_eq!(report["skipped"][0]["name"], "link/", "{report}");
            assert!(place.path("link").is_symlink());
            for dry_run in ["&dry_run=1", ""] {
                let _ = fs::remove_dir_all(&place.directory);
                place.refused(&format!("&overwrite=fail{dry_run}"), &twice, 409, "exists");
            }
        }
        assert_untouched(&outside);
        place.check_no_litter();
    });
}

#[test]
fn an_archive_that_ends_early_is_refused_wherever_it_ends() {
    let place = Place::dedicated();
    let archive = Tar::default()
        .directory("dir/", 0o755)
        .pax(&[("mtime", b"1.5")])
        .file("dir/a", "12345")
        .file("b", &"x".repeat(700))
        .link("c", "b")
        .end();
    let mut connection = place.connect();
    let mut refuse = |archive: &[u8], what: &str| {
        let reply = connection.request("PUT", &place.target(""), &[], archive);
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (400, "bad_archive"),
            "{what}: {}",
            reply.text()
        );
        assert!(reply.json()["files"].is_u64(), "{what}");
    };
    for end in (0..archive.len()).step_by(BLOCK) {
        refuse(&archive[..end], &format!("cut at {end}"));
    }
    for end in 0..2 * BLOCK {
        refuse(&archive[..end], &format!("cut at {end}"));
    }
    let compressed = gzip(&archive);
    for end in 1..compressed.len() {
        refuse(&compressed[..end], &format!("compressed, cut at {end}"));
    }
    // Whole files stay, and no half of one.
    let _ = fs::remove_dir_all(&place.directory);
    refuse(&archive[..archive.len() - 4 * BLOCK], "in the middle of b");
    assert_eq!(names_in(&place.directory), ["dir"]);
    assert_eq!(place.read("dir/a"), "12345");
    place.check_no_litter();
}

/// Compressed by gzip.
pub(crate) fn gzip(data: &[u8]) -> Vec<u8> {
    filtered("gzip", &["-c"], data)
}

#[test]
fn headers_that_lie_are_refused() {
    in_both_modes(|place| {
        let changed = |at: usize, bytes: &[u8]| {
            let mut block = Tar::header(b'0', b"file", b"", 0o644, 3);
            block[at..at + bytes.len()].copy_from_slice(bytes);
            Tar::seal(&mut block);
            Tar::default().raw(&block).content(b"abc")
        };
        let mut broken = Tar::header(b'0', b"file", b"", 0o644, 0);
        broken[0] ^= 1;
        let sized = |size: &[u8]| Tar::default().pax(&[("size", size)]).file("x", "abc");
        let extension = |size: u64| Tar::default().raw(&Tar::header(b'x', b"x", b"", 0o644, size));
        for (what, archive) in [
            ("checksum", Tar::default().raw(&broken)),
            ("no number", changed(124, b"zzzzzzzzzzz\0")),
            ("negative", changed(124, &[0xff; 12])),
            (
                "base 256",
                changed(124, b"\x80\x7f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
            ),
            (
                "largest",
                changed(124, b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"),
            ),
            ("text", Tar::default().raw(&[b'A'; BLOCK])),
            ("negative in pax", sized(b"-1")),
            ("too large in pax", sized(b"18446744073709551616")),
            ("overflow in pax", sized(b"18446744073709551615")),
            (
                "broken record",
                Tar::default()
                    .member(b'x', "x", "12 path=a\n")
                    .file("x", ""),
            ),
            ("no member", Tar::default().pax(&[("path", b"x")])),
            ("volume", Tar::default().member(b'M', "part", "abc")),
            (
                "2 MiB of pax",
                extension(2 << 20).raw(&vec![b'1'; 2 << 20]).file("x", ""),
            ),
            (
                "a name without end",
                Tar::default().raw(&Tar::header(b'L', b"x", b"", 0, 1 << 40)),
            ),
            (
                "one block of zeros",
                Tar::default().raw(&[0; BLOCK]).file("x", ""),
            ),
            (
                "something after the end",
                Tar::default().raw(&[0; 2 * BLOCK]).file("x", ""),
            ),
        ] {
            let error = place.refused("", &archive.end(), 400, "bad_archive");
            assert_eq!(error["files"], 0, "{what}: {error}");
        }
        // What such a file holds in the map of a sparse one is not written as it is.
        for records in [
            &[("GNU.sparse.size", "10"), ("GNU.sparse.map", "0,4,2,4")][..],
            &[("GNU.sparse.size", "10"), ("GNU.sparse.map", "0,4,9,4")],
            &[("GNU.sparse.size", "10"), ("GNU.sparse.map", "0,3")],
            &[("GNU.sparse.size", "10"), ("GNU.sparse.map", "0,4,9")],
            &[
                ("GNU.sparse.size", "10"),
                ("GNU.sparse.map", "18446744073709551615,8"),
            ],
            &[("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")],
        ] {
            let records: Vec<_> = records
                .iter()
                .map(|(key, value)| (*key, value.as_bytes()))
                .collect();
            let archive = Tar::default().pax(&records).file("sparse", "12345678");
            let error = place.refused("", &archive.end(), 400, "bad_archive");
            assert!(
                error["error"].as_str().unwrap().contains("tar -S"),
                "{error}"
            );
        }
        assert_eq!(names_in(&place.directory), Vec::<String>::new());
    });
}

#[test]
fn what_is_compressed_otherwise_is_named() {
    let place = Place::dedicated();
    for (name, magic) in [
        ("zstd", &b"\x28\xb5\x2f\xfd"[..]),
        ("xz", b"\xfd7zXZ\0\0\x04"),
        ("bzip2", b"BZh91AY&SY"),
        ("zip", b"PK\x03\x04\x14\0"),
        ("zip", b"PK\x05\x06\0\0"),
        ("7z", b"7z\xbc\xaf\x27\x1c"),
        ("rar", b"Rar!\x1a\x07\x01\0"),
        ("lz4", b"\x04\x22\x4d\x18"),
        ("lzip", b"LZIP\x01"),
        ("lzma", b"\x5d\0\0\x80"),
        ("compress", b"\x1f\x9d\x90"),
    ] {
        // One of a few bytes, and one of more than a block.
        for length in [0, 1024] {
            let data = [magic, &vec![0; length]].concat();
            let error = place.refused("", &data, 415, "unsupported");
            let text = error["error"].as_str().unwrap();
            assert!(
                text.contains(name) && text.contains("tar") && text.contains("gzip"),
                "{text}"
            );
        }
    }
    // A member may have a name like that.
    for name in ["BZh9", "LZIP", "]"] {
        place.unpack("", &Tar::default().file(name, "tar").end());
        assert_eq!(place.read(name), "tar");
    }
    let archive = gzip(&Tar::default().file("a", "1").end());
    for broken in [
        [&archive[..], b"something after it"].concat(),
        [&archive[..archive.len() - 8], &[0; 8][..]].concat(),
    ] {
        place.refused("", &broken, 400, "bad_archive");
    }
    // In two parts, and with the zeros of a tape.
    let tar = Tar::default().file("two", "parts").end();
    let (one, other) = tar.split_at(700);
    let parts = [gzip(one), gzip(other), vec![0; 5000]].concat();
    place.unpack("", &parts);
    assert_eq!(place.read("two"), "parts");
}

#[test]
fn a_bomb_costs_what_the_client_allows() {
    in_both_modes(|place| {
        // 64 MiB of zeros in 64 KiB.
        let size: u64 = 64 << 20;
        let mut archive = Tar::default().file("small", "x").0;
        archive.extend_from_slice(&Tar::header(b'0', b"bomb", b"", 0o644, size));
        archive.resize(
            archive.len() + usize::try_from(size).unwrap() + 2 * BLOCK,
            0,
        );
        let bomb = gzip(&archive);
        assert!(bomb.len() < 1 << 20);
        let error = place.refused("&max_bytes=1000000", &bomb, 413, "too_large");
        assert_eq!(
            (&error["member"], &error["files"]),
            (&json!("bomb"), &json!(1))
        );
        assert_eq!(names_in(&place.directory), ["small"]);
        place.refused("&max_bytes=1000000&atomic=1", &bomb, 413, "too_large");
        // More zeros after the end than any program writes.
        let mut padded = Tar::default().end();
        padded.resize(64 << 20, 0);
        place.refused("", &gzip(&padded), 400, "bad_archive");
    });
}

/// An archive whose only member has 4 GiB, in 4 MB. It has no end.
pub(super) fn bomb() -> Vec<u8> {
    let header = Tar::header(b'0', b"zeros", b"", 0o644, 4 << 30);
    let zeros = gzip(&vec![0; 64 << 20]).repeat(64);
    [gzip(&header), zeros].concat()
}

#[test]
fn memory_is_constant_whatever_comes_out_of_an_archive() {
    in_both_modes(|place| {
        let pid = place.files_pid();
        let zeros = |size: usize| {
            let header = Tar::header(b'0', b"zeros", b"", 0o644, size as u64);
            gzip(&Tar::default().raw(&header).raw(&vec![0; size]).end())
        };
        let peak = || memory_of(pid, "VmHWM");
        place.unpack("", &zeros(1 << 20));
        let before = peak();
        let bomb = zeros(64 << 20);
        assert!(bomb.len() < 1 << 20);
        let done = place.unpack("&dry_run=1", &bomb);
        assert_eq!(done["bytes"], 64 << 20);
        let grown = peak().saturating_sub(before);
        assert!(grown <= 4 << 20, "{grown} bytes more at the peak");
    });
}

/// Sends `start`, then 10 GiB of zeros in pieces of 64 MiB, each after `between`; all of it in 10 MB.
fn flood(place: &Place, rest: &str, start: &[u8], between: &[u8]) -> Reply {
    let zeros = gzip(&vec![0; 64 << 20]);
    let (start, between) = (gzip(start), gzip(between));
    let piece = [between, zeros].concat();
    let body = [start, piece.repeat(160), gzip(&[0; 2 * BLOCK])].concat();
    assert!(body.len() < 12 << 20, "{} bytes", body.len());
    let mut connection = place.connect();
    let patience = Some(Duration::from_secs(600));
    connection.stream.set_read_timeout(patience).unwrap();
    connection.request("PUT", &place.target(rest), &[], &body)
}

#[test]
#[ignore = "takes minutes"]
fn ten_gigabytes_of_zeros_cost_no_memory_and_the_limit_tells() {
    in_both_modes(|place| {
        let pid = place.files_pid();
        place.unpack("", &gzip(&Tar::default().file("first", "x").end()));
        let before = memory_of(pid, "VmHWM");
        let member = Tar::header(b'0', b"zeros", b"", 0o644, 64 << 20);
        let reply = flood(place, "&dry_run=1", b"", &member);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["bytes"], 10_u64 << 30);
        assert_eq!(names_in(&place.directory), ["first"]);
        for rest in ["&max_bytes=200000000", "&max_bytes=200000000&atomic=1"] {
            let reply = flood(place, rest, b"", &member);
            let error = reply.json();
            assert_eq!(reply.code(), "too_large", "{error}");
            assert_eq!(error["files"], 2, "{error}");
            assert_eq!(error["bytes"], 128 << 20, "{error}");
            if rest.contains("atomic") {
                assert_eq!(names_in(&place.directory), ["first", "zeros"]);
            }
            place.check_no_litter();
        }
        let grown = memory_of(pid, "VmHWM").saturating_sub(before);
        assert!(grown <= 4 << 20, "{grown} bytes more at the peak");
    });
}

#[test]
fn headers_of_any_size_cost_no_memory() {
    in_both_modes(|place| {
        let pid = place.files_pid();
        let sized = |typeflag: u8, size: u64| Tar::header(typeflag, b"x", b"", 0o644, size);
        let zeros = gzip(&vec![0; 64 << 20]);
        let large = |typeflag: u8| [gzip(&sized(typeflag, 8 << 30)), zeros.repeat(2)].concat();
        // One header that is allowed, again and again for one member.
        let record = record("comment", &vec![b'c'; 900_000]);
        let again = Tar::default()
            .raw(&sized(b'x', record.len() as u64))
            .content(&record);
        let name = Tar::default()
            .raw(&sized(b'L', 900_000))
            .content(&vec![b'n'; 900_000]);
        // Each block of the map has 21 parts and says that another one follows.
        let mut sparse = sized(b'S', 0);
        sparse[257..265].copy_from_slice(b"ustar  \0");
        sparse[386..482].copy_from_slice(&b"00000000000\0".repeat(8));
        sparse[482] = 1;
        Tar::seal(&mut sparse);
        let mut map = b"00000000000\0".repeat(42);
        map.resize(BLOCK, 1);
        let map = [gzip(&sparse), gzip(&map.repeat(1 << 17))].concat();
        let twice = gzip(&gzip(
            &Tar::default().file("x", "x").raw(&vec![0; 64 << 20]).0,
        ));
        place.refused("", &twice, 400, "bad_archive");
        let before = memory_of(pid, "VmHWM");
        for (what, archive) in [
            ("pax", large(b'x')),
            ("global pax", large(b'g')),
            ("name", large(b'L')),
            ("link", large(b'K')),
            ("pax headers", gzip(&again.0.repeat(64))),
            ("names", gzip(&name.0.repeat(64))),
            ("sparse", map),
            ("twice", twice),
        ] {
            let error = place.refused("", &archive, 400, "bad_archive");
            assert_eq!(error["files"], 0, "{what}: {error}");
            let grown = memory_of(pid, "VmHWM").saturating_sub(before);
            assert!(grown <= 8 << 20, "{what}: {grown} bytes more at the peak");
        }
    });
}

#[test]
fn what_is_left_of_an_upload_is_in_nobodys_way() {
    in_both_modes(|place| {
        place.unpack("", &Tar::default().file("old", "old").end());
        // As a server that was killed leaves it.
        let parent = place.directory.parent().unwrap();
        let litter = parent.join(".sbx-upload-1-2-3");
        fs::create_dir(&litter).unwrap();
        fs::write(litter.join("half"), "half").unwrap();
        for rest in ["&atomic=1", ""] {
            place.unpack(rest, &Tar::default().file("new", "new").end());
            assert_eq!(names_in(&place.directory), ["new"], "{rest}");
        }
        assert_eq!(names_in(&litter), ["half"]);
        if place.shown == "tree" {
            let reply = place.server.delete(&place.prefix);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert!(!parent.exists());
        }
    });
}

#[test]
fn a_full_disk_is_told_and_with_atomic_nothing_stays() {
    let place = Place::dedicated();
    fs::create_dir(&place.directory).unwrap();
    let Some(_disk) = Mount::tmpfs(&place.directory, "size=1m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let large = "x".repeat(600_000);
    let archive = Tar::default()
        .file("first", &large)
        .file("second", &large)
        .end();
    let error = place.refused("/below&atomic=1", &archive, 507, "no_space");
    assert_eq!(error["member"], "second");
    assert_eq!(names_in(&place.directory), Vec::<String>::new());
    let error = place.refused("/below", &archive, 507, "no_space");
    assert_eq!(
        (&error["member"], &error["files"], &error["bytes"]),
        (&json!("second"), &json!(1), &json!(600_000))
    );
    assert_eq!(names_in(place.path("below")), ["first"]);
    place.check_no_litter();
}

#[test]
fn a_client_that_goes_away_leaves_no_half_file_and_with_atomic_nothing() {
    in_both_modes(|place| {
        let archive = Tar::default()
            .file("whole", "x")
            .raw(&Tar::header(b'0', b"half", b"", 0o644, 1 << 20))
            .raw(&vec![b'h'; 100_000]);
        for rest in ["", "&atomic=1"] {
            let _ = fs::remove_dir_all(&place.directory);
            let parent = place.directory.parent().unwrap();
            let mut connection = place.connect();
            let announced = [("Content-Length", "10000000")];
            connection.send_request("PUT", &place.target(rest), &announced, &archive.0);
            wait_until("the first file is there", PATIENCE, || {
                let names = names_in(parent);
                place.path("whole").exists()
                    || names.iter().any(|name| {
                        name.starts_with(".sbx-upload") && parent.join(name).join("whole").exists()
                    })
            });
            drop(connection);
            if rest.is_empty() {
                assert_eq!(names_in(&place.directory), ["whole"]);
            } else {
                wait_until("nothing is left", PATIENCE, || {
                    !names_in(parent)
                        .iter()
                        .any(|name| name.starts_with(".sbx-upload"))
                });
                assert!(!place.directory.exists());
            }
        }
    });
}

#[test]
fn names_that_change_under_an_upload_lead_it_nowhere() {
    if !crate::fixture::is_root() {
        skip!("needs root");
    }
    let place = Place::sandbox();
    let outside = crate::fixture::TempDir::new();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(outside.path(), mode).unwrap();
    fs::create_dir(outside.path().join("sub")).unwrap();
    let before = listing(outside.path());
    place.unpack("", &Tar::default().directory("a/sub/", 0o755).end());
    let target = outside.path().to_str().unwrap();
    let script = format!(
        "cd tree; ln -s {target} l; while :; do mv -T a b; mv -T l a; mv -T a l; mv -T b a; \
         mv -T a/sub b; ln -s {target}/sub a/sub; rm -f a/sub; mv -T b a/sub; done 2>/dev/null"
    );
    let mut connection = place.connect();
    let body = json!({"cmd": script, "id": "swap"}).to_string();
    let target = format!("{}/processes", place.prefix);
    let reply = connection.request("POST", &target, &[], body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let mut archive = Tar::default();
    for number in 0..40 {
        archive = archive
            .file(&format!("a/f{number}"), "harm")
            .file(&format!("a/sub/f{number}"), "harm")
            .directory(&format!("a/sub/d{number}/"), 0o700)
            .link(&format!("a/sub/l{number}"), "/");
    }
    let archive = archive.end();
    let mut done = [0, 0];
    for _ in 0..60 {
        let reply = place.put("", &archive);
        let is_refused = reply.status != 200;
        assert!(reply.status < 500, "{}", reply.text());
        done[usize::from(is_refused)] += 1;
        assert_eq!(listing(outside.path()), before, "{}", reply.text());
    }
    eprintln!("done and refused: {done:?}");
    let target = format!("{}/processes/swap", place.prefix);
    connection.request("DELETE", &target, &[], b"");
    assert_eq!(listing(outside.path()), before);
}

#[test]
fn records_are_counted_as_they_are_written() {
    // The test's own records: the length of one counts its digits.
    assert_eq!(record("path", b"a"), b"9 path=a\n");
    assert_eq!(record("path", b"ab"), b"11 path=ab\n");
}

#[test]
fn extended_attributes_that_are_not_kept_are_neither_counted_nor_searched() {
    let names: Vec<_> = (0..30_000)
        .map(|number| format!("SCHILY.xattr.user.{}", number % 2000))
        .collect();
    let records: Vec<_> = names.iter().map(|name| (&name[..], &b""[..])).collect();
    let archive = Tar::default().pax(&records).file("file", "x").end();
    in_both_modes(|place| {
        place.unpack("", &archive);
        place.unpack("", &gzip(&archive));
        assert_eq!(names_in(&place.directory), ["file"]);
    });
}

/// How many threads of a process act on files as this user.
fn threads_as(pid: i32, uid: u32) -> usize {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let acts = |thread: &fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        users.and_then(|users| users.split_whitespace().nth(3)) == Some(&uid.to_string())
    };
    threads
        .filter(|thread| acts(thread.as_ref().unwrap()))
        .count()
}

#[test]
fn archives_end_with_their_sandbox_and_nothing_acts_as_its_user_any_more() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let pid = server.inner_pid();
    let files = (0..60_000).map(|number| format!("m/{}/{number}", number % 50));
    let archive = files
        .fold(Tar::default(), |tar, name| tar.file(&name, ""))
        .end();
    // Clients that send, and receive, as fast as they can; and such that do nothing any more.
    for (round, stalls) in [false, false, true, true].into_iter().enumerate() {
        let sandbox = server.sandbox();
        let mut stalled = Vec::new();
        if stalls {
            sandbox.sh("truncate -s 1G zeros");
            let mut upload = sandbox.connect();
            let length = [("Content-Length", "1000000")];
            let part = &archive[..64 * BLOCK];
            upload.send_request(
                "PUT",
                &sandbox.target("files/archive?path=x0"),
                &length,
                part,
            );
            let mut download = sandbox.connect();
            download.send_request("GET", &sandbox.target("files/archive?path=zeros"), &[], b"");
            assert_eq!(download.read_head().status, 200);
            stalled = vec![upload, download];
        }
        let uploads = if stalls { 1 } else { 8 };
        thread::scope(|scope| {
            for number in stalled.len()..uploads {
                let (mut upload, archive) = (sandbox.connect(), &archive);
                let target = sandbox.target(&format!("files/archive?path=x{number}"));
                scope.spawn(move || upload.send_request("PUT", &target, &[], archive));
            }
            wait_until("all are in the home", PATIENCE, || {
                let has_begun = |number| sandbox.home.join(format!("x{number}/m")).exists();
                (0..uploads).all(has_begun) && threads_as(pid, sandbox.uid) >= uploads
            });
            let target = if round % 2 == 0 {
                sandbox.prefix()
            } else {
                "/v1/sandboxes".to_owned()
            };
            let reply = server.delete(&target);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.json()["removing"], Value::Null, "{}", reply.text());
            assert_eq!(threads_as(pid, sandbox.uid), 0);
            assert!(!sandbox.home.exists());
        });
        drop(stalled);
    }
}
