//! The store of snapshots: an archive comes in whole or not at all, and goes out as it came; names, pages and bounds.
//!
//! What was unpacked is judged by the file system. Sandboxes that are made of snapshots are tested in `roots`.

mod bounds;
mod hostile;
pub(crate) mod images;
mod kept;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::archives::Tar;
use crate::fixture::{Connection, HostPlace, PATIENCE, Reply, Server, names_in, wait_until};

/// Starts a host that can have snapshots of roots. Skips a test that cannot run here.
macro_rules! needs_store {
    ($server:ident $(, $name:literal = $value:expr)*) => {
        if !cfg!(feature = "file-tools") {
            return;
        }
        if !crate::fixture::is_root() {
            crate::skip!("needs root");
        }
        #[allow(unused_mut)]
        let mut $server = crate::fixture::Server::host()$(.env($name, $value))*.start();
        if let Some(why) = crate::roots::lack(&$server) {
            crate::skip!("{why}");
        }
    };
}
pub(crate) use needs_store;

pub(crate) const SNAPSHOTS: &str = "/v1/snapshots";

/// A member of an archive of a root.
pub(crate) struct Member<'a> {
    pub(crate) typeflag: u8,
    pub(crate) name: &'a str,
    pub(crate) link: &'a str,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) content: &'a [u8],
}

impl Default for Member<'_> {
    fn default() -> Self {
        Self {
            typeflag: b'0',
            name: "file",
            link: "",
            mode: 0o644,
            owner: (0, 0),
            content: b"",
        }
    }
}

/// Appends members to an archive.
pub(crate) fn with(tar: Tar, members: &[Member<'_>]) -> Tar {
    members.iter().fold(tar, |tar, member| {
        let size = member.content.len() as u64;
        let (name, link) = (member.name.as_bytes(), member.link.as_bytes());
        let mut header = Tar::header(member.typeflag, name, link, member.mode, size);
        let (uid, gid) = member.owner;
        header[108..124].copy_from_slice(format!("{uid:07o}\0{gid:07o}\0").as_bytes());
        Tar::seal(&mut header);
        tar.raw(&header).content(member.content)
    })
}

/// An archive of these members.
pub(crate) fn archive(members: &[Member<'_>]) -> Vec<u8> {
    with(Tar::default(), members).end()
}

/// A file in an archive.
pub(crate) fn file<'a>(name: &'a str, content: &'a [u8]) -> Member<'a> {
    Member {
        name,
        content,
        ..Member::default()
    }
}

pub(crate) fn put(server: &Server, name: &str, archive: &[u8]) -> Reply {
    server.put(&format!("{SNAPSHOTS}?name={name}"), archive)
}

/// Sends the beginning of an archive, and announces all of it.
pub(crate) fn send(server: &Server, name: &str, archive: &[u8], end: usize) -> Connection {
    let mut connection = server.connect();
    let token = server.token.as_deref().unwrap();
    let head = format!(
        "PUT {SNAPSHOTS}?name={name} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\nContent-Length: {}\r\n\r\n",
        archive.len()
    );
    connection.send(head.as_bytes());
    connection.send(&archive[..end]);
    connection
}

/// The same, and returns when the server unpacks it.
pub(crate) fn begin(server: &Server, name: &str, archive: &[u8], end: usize) -> Connection {
    let before = names_in(store(server)).len();
    let connection = send(server, name, archive, end);
    wait_until("it has begun", PATIENCE, || {
        names_in(store(server)).len() > before
    });
    connection
}

/// Makes a snapshot.
#[track_caller]
pub(crate) fn made(server: &Server, name: &str, archive: &[u8]) -> Value {
    let reply = put(server, name, archive);
    assert_eq!(reply.status, 201, "{}", reply.text());
    reply.json()
}

/// The id in a document.
pub(crate) fn id_of(document: &Value) -> String {
    document["id"].as_str().unwrap().to_owned()
}

/// What the store lists.
#[track_caller]
pub(crate) fn listed(server: &Server) -> Vec<Value> {
    let reply = server.get(SNAPSHOTS);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let page = reply.json();
    assert_eq!(page["next"], Value::Null);
    page["snapshots"].as_array().unwrap().clone()
}

pub(crate) fn store_of(place: &HostPlace) -> PathBuf {
    place.homes().join(".snapshots")
}

/// Where the machine has the store of a server.
pub(crate) fn store(server: &Server) -> PathBuf {
    store_of(server.place.as_ref().unwrap())
}

/// What a store has of each snapshot, and nothing else.
pub(crate) fn expected_names(ids: &[String]) -> Vec<String> {
    let names = ids
        .iter()
        .flat_map(|id| [id.clone(), format!("{id}.record")]);
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The store has what it lists, and nothing else.
#[track_caller]
pub(crate) fn check_tidy(server: &Server) {
    let ids: Vec<_> = listed(server).iter().map(id_of).collect();
    let (store, expected) = (store(server), expected_names(&ids));
    wait_until("the store has what it lists", PATIENCE, || {
        names_in(&store) == expected
    });
}

/// All that a tree has, as a machine sees it: kind, mode, owner, content, attributes.
pub(crate) fn contents(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![PathBuf::from(".")];
    while let Some(path) = pending.pop() {
        let whole = root.join(&path);
        let status = fs::symlink_metadata(&whole).unwrap();
        let kind = status.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(&whole).unwrap().display().to_string()
        } else if kind.is_dir() {
            let names = fs::read_dir(&whole).unwrap();
            pending.extend(names.map(|entry| path.join(entry.unwrap().file_name())));
            String::new()
        } else if kind.is_fifo() {
            "fifo".to_owned()
        } else {
            crate::fixture::sha256(&fs::read(&whole).unwrap())
        };
        let links = if kind.is_dir() { 0 } else { status.nlink() };
        let (mode, uid, gid) = (status.mode(), status.uid(), status.gid());
        let (seconds, attributes) = (status.mtime(), attributes_of(&whole));
        found.insert(
            path.display().to_string(),
            format!("{mode:o} {uid}:{gid} {links} {seconds} {content} {attributes:?}"),
        );
    }
    found
}

/// The extended attributes of a file, sorted.
#[allow(unsafe_code)]
pub(crate) fn attributes_of(path: &Path) -> Vec<(String, Vec<u8>)> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let mut buffer = vec![0_u8; 1 << 16];
    let read = |length: isize, buffer: &[u8]| {
        let length = usize::try_from(length).unwrap_or(0);
        buffer[..length].to_vec()
    };
    // SAFETY: a string that ends in NUL, and a buffer of this size.
    let length =
        unsafe { libc::llistxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let names = read(length, &buffer);
    let mut all = Vec::new();
    for name in names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let own = std::ffi::CString::new(name).unwrap();
        // SAFETY: as above.
        let length = unsafe {
            libc::lgetxattr(
                path.as_ptr(),
                own.as_ptr(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        all.push((own.into_string().unwrap(), read(length, &buffer)));
    }
    all.sort();
    all
}

/// What tar makes of a directory; `None` without the program.
pub(crate) fn packed(directory: &Path, compressed: bool) -> Option<Vec<u8>> {
    let output = Command::new("tar")
        .arg("-C")
        .arg(directory)
        .args(["--numeric-owner", "--xattrs", "--exclude=./probe"])
        .arg(if compressed { "-czf" } else { "-cf" })
        .args(["-", "."])
        .stderr(Stdio::inherit())
        .output()
        .ok()?;
    assert!(output.status.success());
    Some(output.stdout)
}
