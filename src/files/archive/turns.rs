//! Tests of how often what reads archives gives way: by what it does, not only by the bytes that it is sent.

use std::fs::{self, File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use nix::unistd::Uid;

use super::header::Time;
use super::input::CountedInput;
use super::layer::Layer;
use super::members::Members;
use super::unpack::{Kept, Overwrite, Unpacking};
use super::write::{MemberHeader, append_member};
use crate::codec::gzip::{Encoder, Level};
use crate::files::beneath::Resolver;
use crate::files::name::FilePath;
use crate::files::root::Root;
use crate::limits::ledger::{Budget, Item, Ledger};
use crate::sys::User;

/// Appends a member with so much content.
fn append(out: &mut Vec<u8>, path: &str, typeflag: u8, content: &[u8]) {
    let modified = Time {
        seconds: 0,
        nanoseconds: 0,
    };
    let header = MemberHeader {
        path: path.as_bytes(),
        link: b"",
        typeflag,
        mode: 0o755,
        uid: 0,
        gid: 0,
        size: content.len() as u64,
        modified,
        attributes: &[],
    };
    append_member(out, &header);
    out.extend_from_slice(content);
    out.resize(out.len().next_multiple_of(512), 0);
}

/// The archive with its end, compressed into few bytes.
fn compressed(mut archive: Vec<u8>) -> Vec<u8> {
    archive.resize(archive.len() + 1024, 0);
    let mut out = Vec::new();
    let mut encoder = Encoder::new(Level::Best).unwrap();
    encoder.push(&archive, true, &mut out);
    assert!(out.len() < 4096, "{} bytes", out.len());
    out
}

fn ledger() -> Arc<Ledger> {
    Budget::new(1 << 30).whole()
}

/// A root of the test's own, removed with the value.
struct Place {
    path: PathBuf,
    root: Root,
}

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sbx-turns-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let directory = OwnedFd::from(File::open(&path).unwrap());
        let root = Root::beneath(directory, User { uid: 0, gid: 0 }, Resolver::Kernel);
        Self { path, root }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[test]
fn members_that_are_far_apart_give_way_at_each_level() {
    const LEVELS: usize = 100;
    const MEMBERS: usize = 20;
    if !Uid::effective().is_root() {
        return;
    }
    let mut archive = Vec::new();
    for number in 0..MEMBERS {
        let way = ["a/", "b/"][number % 2].repeat(LEVELS);
        append(&mut archive, &way, b'5', b"");
    }
    let archive = compressed(archive);
    let place = Place::new("levels");
    for dry_run in [true, false] {
        let options = Unpacking {
            strip: 0,
            overwrite: Overwrite::Replace,
            dry_run,
            kept: Kept::Files,
            make_parents: false,
            max_bytes: 0,
            max_files: 1000,
        };
        let mut input = CountedInput(&archive[..], 0);
        let files = place.root.files().unwrap();
        let root = FilePath::new(b".").unwrap();
        let done = files.unpack(&root, options, &mut input, &ledger());
        done.unwrap();
        // Up from one, and down to the next.
        let least = (2 * MEMBERS - 1) * LEVELS;
        assert!(input.1 >= least, "{} of {least}", input.1);
    }
}

#[test]
fn parts_of_sparse_files_give_way_each() {
    const PARTS: usize = 1000;
    let map: Vec<_> = (0..PARTS).map(|part| format!("{},1", 2 * part)).collect();
    let map = format!("GNU.sparse.map={}\n", map.join(","));
    let records = format!("{} {map}", map.len() + 5);
    let size = format!("27 GNU.sparse.size={:07}\n", 2 * PARTS);
    let mut archive = Vec::new();
    append(&mut archive, "x", b'x', [size, records].concat().as_bytes());
    append(&mut archive, "file", b'0', &[b'x'; PARTS]);
    let archive = compressed(archive);
    let mut input = CountedInput(&archive[..], 0);
    let charge = ledger().charge(Item::Bodies, 0).unwrap();
    let mut members = Members::new(&mut input, false, charge).unwrap();
    assert_eq!(members.next().unwrap().unwrap().size, 2 * PARTS as u64);
    let mut parts = 0;
    members
        .read_content(|_, _| {
            parts += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(parts, PARTS);
    assert!(input.1 >= PARTS, "{}", input.1);
}

#[test]
fn a_layer_gives_way_by_what_it_does_and_not_by_its_bytes() {
    const MEMBERS: usize = 500;
    if !Uid::effective().is_root() {
        return;
    }
    let place = Place::new("layer");
    let mut archive = Vec::new();
    for number in 0..MEMBERS {
        fs::write(place.path.join(number.to_string()), "").unwrap();
        append(&mut archive, &format!(".wh.{number}"), b'0', b"");
    }
    // What is below one name, too.
    let hidden = place.path.join("hidden");
    fs::create_dir(&hidden).unwrap();
    for number in 0..MEMBERS {
        fs::write(hidden.join(number.to_string()), "").unwrap();
    }
    append(&mut archive, ".wh.hidden", b'0', b"");
    let path = place.path.with_extension("tar");
    fs::write(&path, compressed(archive)).unwrap();
    let mut layer = Layer {
        file: File::open(&path).unwrap(),
        stored: None,
        plain: None,
    };
    fs::remove_file(&path).unwrap();
    let mut turn = CountedInput(&b""[..], 0);
    let files = place.root.files().unwrap();
    let done = files.unpack_layer(&mut layer, 1 << 30, &|_| Ok(()), &mut turn, &ledger());
    done.unwrap();
    assert_eq!(fs::read_dir(&place.path).unwrap().count(), 0);
    // Both times that it is read, and for each name that is hidden.
    assert!(turn.1 >= 3 * MEMBERS, "{}", turn.1);
}
