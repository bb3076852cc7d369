//! The promise of symbolic links on a machine of one's own: they are followed where a program would
//! follow them, described as links, and never taken for their targets by a write or a delete.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

use serde_json::Value;

use super::{
    MIB, begin, chmod, expect_error, expect_refusal, list, mode_of, open_files, read, stat, target,
    wait_for_release, wait_for_upload, write,
};
use crate::fixture::{Server, TempDir, names_in, random_bytes};
use crate::skip;

#[test]
fn the_size_of_a_link_is_that_of_its_target() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir(dir.join("sub")).unwrap();
    fs::write(dir.join("sub/target"), random_bytes(100_000, 1)).unwrap();
    symlink("sub/target", dir.join("link")).unwrap();
    symlink(dir.join("link"), dir.join("chain")).unwrap();
    symlink("sub", dir.join("to-dir")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    symlink("loop-b", dir.join("loop-a")).unwrap();
    symlink("loop-a", dir.join("loop-b")).unwrap();
    let listed: BTreeMap<String, Value> = list(&server, dir.join(""), "")
        .into_iter()
        .map(|entry| (entry["name"].as_str().unwrap().to_owned(), entry))
        .collect();
    for (name, size) in [
        ("link", Some(100_000)),
        ("chain", Some(100_000)),
        ("to-dir", None),
        ("dangling", None),
        ("loop-a", None),
    ] {
        let entry = stat(&server, dir.join(name), "");
        assert_eq!(entry["type"], "symlink", "{name}");
        assert_eq!(entry, listed[name], "{name}");
        if let Some(size) = size {
            assert_eq!(entry["size"], size, "{name}");
            assert_eq!(read(&server, dir.join(name), "").len(), size);
        }
    }
    // Through a link to a directory everything below is reached.
    assert_eq!(list(&server, dir.join("to-dir"), "").len(), 1);
    assert_eq!(read(&server, dir.join("to-dir/target"), "").len(), 100_000);
    assert_eq!(stat(&server, dir.join("to-dir/target"), "")["type"], "file");
    expect_error(
        &server.get(&target("read", dir.join("to-dir"), "")),
        409,
        "is_directory",
    );
    expect_error(
        &server.get(&target("read", dir.join("dangling"), "")),
        404,
        "not_found",
    );
    expect_error(
        &server.get(&target("list", dir.join("dangling"), "")),
        404,
        "not_found",
    );
    // A loop leads nowhere, and says so at once.
    for reply in [
        server.get(&target("read", dir.join("loop-a"), "")),
        server.get(&target("list", dir.join("loop-a"), "")),
        server.get(&target("stat", dir.join("loop-a/below"), "")),
        server.put(&target("write", dir.join("loop-a"), ""), b"x"),
        server.put(&target("write", dir.join("loop-a"), "&offset=0"), b"x"),
        server.put(&target("write", dir.join("loop-a/below"), ""), b"x"),
        server.request("POST", &target("mkdir", dir.join("loop-a/below"), ""), b""),
    ] {
        expect_refusal(&reply);
    }
    assert_eq!(
        names_in(dir.path()),
        [
            "chain", "dangling", "link", "loop-a", "loop-b", "sub", "to-dir"
        ]
    );
}

#[test]
fn writing_through_a_link_writes_its_target() {
    let server = Server::start();
    let dir = TempDir::new();
    for sub in ["sub", "links", "empty"] {
        fs::create_dir(dir.join(sub)).unwrap();
    }
    fs::write(dir.join("sub/target"), "old").unwrap();
    chmod(dir.join("sub/target"), 0o604);
    symlink("../sub/target", dir.join("links/relative")).unwrap();
    symlink(dir.join("sub/target"), dir.join("links/absolute")).unwrap();
    symlink("relative", dir.join("links/chain")).unwrap();
    symlink("../empty/made", dir.join("links/dangling")).unwrap();
    for (name, rest) in [
        ("relative", ""),
        ("absolute", ""),
        ("chain", ""),
        ("relative", "&offset=0&truncate_to=5"),
    ] {
        write(&server, dir.join(&format!("links/{name}")), rest, b"new 1");
        assert_eq!(
            fs::read(dir.join("sub/target")).unwrap(),
            b"new 1",
            "{name}{rest}"
        );
        assert_eq!(mode_of(dir.join("sub/target")), 0o604);
        fs::write(dir.join("sub/target"), "old again").unwrap();
    }
    write(&server, dir.join("links/dangling"), "", b"made");
    assert_eq!(fs::read(dir.join("empty/made")).unwrap(), b"made");
    for name in ["relative", "absolute", "chain", "dangling"] {
        assert!(
            fs::symlink_metadata(dir.join(&format!("links/{name}")))
                .unwrap()
                .is_symlink(),
            "{name}"
        );
    }
    assert_eq!(names_in(dir.join("sub")), ["target"]);
    assert_eq!(
        names_in(dir.join("links")),
        ["absolute", "chain", "dangling", "relative"]
    );
    // A link onto a directory is not replaced by a file either.
    symlink("../sub", dir.join("links/to-dir")).unwrap();
    expect_error(
        &server.put(&target("write", dir.join("links/to-dir"), ""), b"x"),
        409,
        "is_directory",
    );
}

#[test]
fn an_upload_through_a_link_is_as_atomic_as_any() {
    let server = Server::start();
    let dir = TempDir::new();
    if open_files(&server, dir.path()).is_none() {
        skip!("only root can see how far the server has come");
    }
    fs::create_dir(dir.join("sub")).unwrap();
    fs::write(dir.join("sub/target"), "old").unwrap();
    symlink("sub/target", dir.join("link")).unwrap();
    let mut connection = begin(
        &server,
        "PUT",
        &target("write", dir.join("link"), ""),
        4 * MIB,
    );
    connection.send(&random_bytes(3 * MIB, 1));
    wait_for_upload(&server, dir.path(), MIB as u64);
    drop(connection);
    wait_for_release(&server, dir.path());
    assert_eq!(fs::read(dir.join("link")).unwrap(), b"old");
    assert_eq!(names_in(dir.path()), ["link", "sub"]);
    assert_eq!(names_in(dir.join("sub")), ["target"]);
}
