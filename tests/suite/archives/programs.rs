//! Archives that other programs write and read.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use super::{Place, in_both_modes, listing};
use crate::fixture::{TempDir, expect_same};
use crate::skip;

/// Runs a program; its output must be an archive.
#[track_caller]
fn archive_of(program: &str, arguments: &[&str], directory: &Path) -> Vec<u8> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    output.stdout
}

fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// A tree with a bit of everything that all programs keep.
fn tree(long_names: bool) -> TempDir {
    let tree = TempDir::new();
    let path = |name: &str| tree.path().join(name);
    fs::create_dir_all(path("dir/deeper")).unwrap();
    fs::create_dir(path("empty")).unwrap();
    fs::write(path("file"), "content").unwrap();
    fs::write(path("dir/empty-file"), "").unwrap();
    fs::write(path("dir/deeper/large"), vec![7; 300_000]).unwrap();
    fs::write(path("dir/caf\u{e9} with blanks\n"), "name").unwrap();
    fs::hard_link(path("file"), path("dir/hard")).unwrap();
    symlink("../file", path("dir/link")).unwrap();
    symlink("nowhere", path("dangling")).unwrap();
    if long_names {
        let deep = format!("{}/{}", "d".repeat(150), "e".repeat(120));
        fs::create_dir_all(path(&deep)).unwrap();
        fs::write(path(&format!("{deep}/{}", "f".repeat(200))), "far").unwrap();
        symlink("t".repeat(200), path("far-link")).unwrap();
    }
    for (name, mode) in [("file", 0o640), ("dir/empty-file", 0o755), ("empty", 0o700)] {
        fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    tree
}

/// A listing as it is after a format that keeps whole seconds only.
fn in_seconds(listing: Vec<String>) -> Vec<String> {
    let without = |line: String| {
        let mut words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        for word in &mut words {
            let is_time = word.split_once('.').is_some_and(|(seconds, rest)| {
                [seconds, rest]
                    .iter()
                    .all(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
            });
            if is_time {
                word.truncate(word.find('.').unwrap());
            }
        }
        words.join(" ")
    };
    listing.into_iter().map(without).collect()
}

#[test]
fn what_gnu_tar_writes_is_unpacked() {
    in_both_modes(|place| {
        for format in ["gnu", "oldgnu", "pax", "ustar", "v7"] {
            let tree = tree(matches!(format, "gnu" | "oldgnu" | "pax"));
            for more in ["-c", "-cz"] {
                let _ = fs::remove_dir_all(&place.directory);
                let format = format!("--format={format}");
                let archive = archive_of("tar", &[more, &format, "."], tree.path());
                place.unpack("", &archive);
                let (mut expected, mut found) = (listing(tree.path()), listing(&place.directory));
                if format != "--format=pax" {
                    (expected, found) = (in_seconds(expected), in_seconds(found));
                }
                assert_eq!(found, expected, "{format} {more}");
            }
        }
    });
}

#[test]
fn sparse_files_of_every_format_come_out_whole() {
    let tree = TempDir::new();
    let file = |name: &str, size: u64| {
        let file = fs::File::create(tree.path().join(name)).unwrap();
        file.set_len(size).unwrap();
        file
    };
    let sparse = file("sparse", 3_000_000);
    for at in (0..3_000_000 / 65_536).map(|part| part * 65_536) {
        sparse.write_all_at(&[b'x'; 5000], at).unwrap();
    }
    file("hole", 100_000);
    file("tail", 100_010)
        .write_all_at(b"0123456789", 0)
        .unwrap();
    let end = 3_000_000;
    let place = Place::dedicated();
    for options in [
        &["--format=gnu"][..],
        &["--format=oldgnu"],
        &["--format=pax", "--sparse-version=0.0"],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=1.0"],
    ] {
        let _ = fs::remove_dir_all(&place.directory);
        let mut arguments = vec!["-c", "-S"];
        arguments.extend(options);
        arguments.push(".");
        let archive = archive_of("tar", &arguments, tree.path());
        assert!(archive.len() < end, "{options:?}: with holes");
        let answer = place.unpack("", &archive);
        assert_eq!(
            answer["bytes"],
            3_000_000 + 100_000 + 100_010,
            "{options:?}"
        );
        for name in ["sparse", "hole", "tail"] {
            let expected = fs::read(tree.path().join(name)).unwrap();
            expect_same(name, &fs::read(place.path(name)).unwrap(), &expected);
        }
    }
}

#[test]
fn what_bsdtar_writes_is_unpacked() {
    if !exists("bsdtar") {
        skip!("needs bsdtar (libarchive-tools)");
    }
    in_both_modes(|place| {
        for format in ["pax", "ustar", "gnutar", "v7"] {
            let _ = fs::remove_dir_all(&place.directory);
            let tree = tree(matches!(format, "pax" | "gnutar"));
            let archive = archive_of(
                "bsdtar",
                &["-cf", "-", "--format", format, "."],
                tree.path(),
            );
            place.unpack("", &archive);
            let (mut expected, mut found) = (listing(tree.path()), listing(&place.directory));
            if format != "pax" {
                (expected, found) = (in_seconds(expected), in_seconds(found));
            }
            assert_eq!(found, expected, "{format}");
        }
    });
}

#[test]
fn what_python_writes_is_unpacked() {
    let script = "import sys, tarfile\n\
                  format = getattr(tarfile, sys.argv[1] + '_FORMAT')\n\
                  with tarfile.open(fileobj=sys.stdout.buffer, mode=sys.argv[2], format=format) as tar:\n\
                  \x20   tar.add('.')\n";
    in_both_modes(|place| {
        for format in ["PAX", "GNU", "USTAR"] {
            for mode in ["w|", "w|gz"] {
                let _ = fs::remove_dir_all(&place.directory);
                let tree = tree(format != "USTAR");
                let odd = std::ffi::OsStr::from_bytes(b"odd-\xff\xfe");
                fs::write(tree.path().join(odd), "bytes").unwrap();
                let arguments = ["-c", script, format, mode];
                let archive = archive_of("python3", &arguments, tree.path());
                place.unpack("", &archive);
                let found = in_seconds(listing(&place.directory));
                assert_eq!(found, in_seconds(listing(tree.path())), "{format} {mode}");
                let found = fs::read(place.directory.join(odd)).unwrap();
                assert_eq!(found, b"bytes", "{format} {mode}");
            }
        }
    });
}

#[test]
fn python_unpacks_what_was_packed_with_its_filter_of_data() {
    let has_filter = "import sys, tarfile; sys.exit(not hasattr(tarfile, 'data_filter'))";
    let has_filter = Command::new("python3").args(["-c", has_filter]).status();
    if !has_filter.is_ok_and(|status| status.success()) {
        skip!("needs a Python whose tarfile has filters");
    }
    let script = "import os, sys, tarfile\n\
                  os.umask(0o022)\n\
                  with tarfile.open(sys.argv[1]) as tar:\n\
                  \x20   tar.extractall(sys.argv[2], filter='data')\n";
    in_both_modes(|place| {
        let source = tree(true);
        for (name, mode) in [("file", 0o640), ("empty", 0o755)] {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(source.path().join(name), mode).unwrap();
        }
        place.unpack("", &archive_of("tar", &["-c", "."], source.path()));
        // Python sets no times of links.
        let compared = |directory: &Path| {
            let mut lines = in_seconds(listing(directory));
            for line in lines.iter_mut().filter(|line| line.contains(" 120777 ")) {
                let words: Vec<_> = line.split(' ').collect();
                *line = [words[0], words[words.len() - 1]].join(" ");
            }
            lines
        };
        let expected = compared(&place.directory);
        for format in ["tar", "tar.gz"] {
            let target = place.target(&format!("&format={format}"));
            let reply = place.connect().request("GET", &target, &[], b"");
            assert_eq!(reply.status, 200);
            let copy = TempDir::new();
            let archive = copy.join("archive");
            fs::write(&archive, reply.body).unwrap();
            let into = copy.join("into");
            archive_of("python3", &["-c", script, &archive, &into], copy.path());
            assert_eq!(compared(Path::new(&into)), expected, "{format}");
        }
    });
}

#[test]
fn what_busybox_and_git_write_is_unpacked() {
    let place = Place::dedicated();
    if !exists("busybox") || !exists("git") {
        skip!("needs busybox and git");
    }
    let tree = tree(false);
    place.unpack("", &archive_of("busybox", &["tar", "-c", "."], tree.path()));
    let found = in_seconds(listing(&place.directory));
    assert_eq!(found, in_seconds(listing(tree.path())));

    let _ = fs::remove_dir_all(&place.directory);
    for arguments in [
        &["init", "-q"][..],
        &["add", "."],
        &[
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "commit",
            "-qm",
            "all",
        ],
    ] {
        archive_of("git", arguments, tree.path());
    }
    for arguments in [
        &["archive", "--prefix=project-1.0/", "HEAD"][..],
        &[
            "archive",
            "--format=tar.gz",
            "--prefix=project-1.0/",
            "HEAD",
        ],
    ] {
        let archive = archive_of("git", arguments, tree.path());
        place.unpack("&strip=1&atomic=1", &archive);
        assert_eq!(place.read("file"), "content");
        assert_eq!(place.read("dir/link"), "content");
        assert_eq!(
            fs::read(place.path("dir/deeper/large")).unwrap().len(),
            300_000
        );
    }
}
