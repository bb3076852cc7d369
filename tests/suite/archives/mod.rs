//! The promise of archives: a tree comes back as it was, whichever program wrote the archive, and no
//! archive and nobody in the workspace makes the server touch what is outside the directory.
//!
//! Archives are made by the programs that people use, and by hand ([`Tar`]) where no program makes them
//! like that. What was unpacked is judged by the file system.

mod down;
pub(crate) mod hostile;
mod programs;
mod up;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::fixture::{Connection, Reply, Server, TempDir, is_root};

/// The size of a header, and the unit of an archive.
const BLOCK: usize = 512;

/// A directory that a server unpacks into: on a dedicated machine, or in a sandbox.
struct Place {
    server: Server,
    /// The route's prefix and a token.
    prefix: String,
    token: Option<String>,
    /// The directory as a client writes it, and on the disk.
    shown: String,
    directory: PathBuf,
    _temporary: Option<TempDir>,
}

impl Place {
    fn dedicated() -> Self {
        let temporary = TempDir::new();
        let server = Server::start();
        Self {
            prefix: "/v1".to_owned(),
            token: server.token.clone(),
            shown: temporary.join("tree"),
            directory: temporary.path().join("tree"),
            _temporary: Some(temporary),
            server,
        }
    }

    fn sandbox() -> Self {
        let server = Server::host().start();
        let sandbox = server.sandbox();
        let (prefix, token) = (sandbox.target(""), sandbox.token.clone());
        let directory = sandbox.home.join("tree");
        Self {
            prefix: prefix.trim_end_matches('/').to_owned(),
            token: Some(token),
            shown: "tree".to_owned(),
            directory,
            _temporary: None,
            server,
        }
    }

    fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token.clone_from(&self.token);
        connection
    }

    fn target(&self, rest: &str) -> String {
        format!("{}/files/archive?path={}{rest}", self.prefix, self.shown)
    }

    /// All bytes of a request.
    fn request(&self, method: &str, rest: &str, body: &[u8]) -> Vec<u8> {
        let (target, token) = (self.target(rest), self.token.as_deref().unwrap_or_default());
        let length = body.len();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    }

    fn put(&self, rest: &str, archive: &[u8]) -> Reply {
        let mut connection = self.connect();
        connection.request("PUT", &self.target(rest), &[], archive)
    }

    /// Unpacks an archive; that must succeed.
    #[track_caller]
    fn unpack(&self, rest: &str, archive: &[u8]) -> Value {
        let reply = self.put(rest, archive);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Unpacks an archive that must be refused.
    #[track_caller]
    fn refused(&self, rest: &str, archive: &[u8], status: u16, code: &str) -> Value {
        let reply = self.put(rest, archive);
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (status, code),
            "{}",
            reply.text()
        );
        reply.json()
    }

    /// The process that reads archives.
    fn files_pid(&self) -> i32 {
        if self.shown == "tree" {
            self.server.inner_pid()
        } else {
            self.server.pid()
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    #[track_caller]
    fn read(&self, name: &str) -> String {
        let path = self.path(name);
        let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        String::from_utf8(found).unwrap()
    }

    fn mode(&self, name: &str) -> u32 {
        let status = fs::symlink_metadata(self.path(name)).unwrap();
        status.permissions().mode() & 0o7777
    }

    /// Nothing that was made for an upload is left beside the directory or in it.
    #[track_caller]
    fn check_no_litter(&self) {
        for directory in [self.directory.parent().unwrap(), &self.directory] {
            let names = fs::read_dir(directory).into_iter().flatten();
            for name in names.map(|entry| entry.unwrap().file_name()) {
                let name = name.to_string_lossy().into_owned();
                assert!(!name.starts_with(".sbx-upload"), "{name}");
            }
        }
    }
}

/// Runs a test on a dedicated machine and, as root, in a sandbox.
fn in_both_modes(test: impl Fn(&Place)) {
    test(&Place::dedicated());
    if is_root() {
        test(&Place::sandbox());
    }
}

/// An archive that is put together block by block.
#[derive(Default, Clone)]
pub(crate) struct Tar(Vec<u8>);

impl Tar {
    /// A header that can say anything: type, name, content of a link, mode, size.
    pub(crate) fn header(
        typeflag: u8,
        name: &[u8],
        link: &[u8],
        mode: u32,
        size: u64,
    ) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name[..name.len().min(100)]);
        put(100, format!("{mode:07o}\0").as_bytes());
        put(108, b"0001750\x000001750\0");
        put(124, format!("{size:011o}\0").as_bytes());
        put(136, b"14524770000\0");
        put(156, &[typeflag]);
        put(157, &link[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        Self::seal(&mut block);
        block
    }

    /// Sets the checksum.
    pub(crate) fn seal(block: &mut [u8; BLOCK]) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Content, filled up to a whole block.
    pub(crate) fn content(self, bytes: &[u8]) -> Self {
        let padding = bytes.len().next_multiple_of(BLOCK) - bytes.len();
        self.raw(bytes).raw(&vec![0; padding])
    }

    fn member(self, typeflag: u8, name: &str, content: &str) -> Self {
        let size = content.len() as u64;
        self.raw(&Self::header(typeflag, name.as_bytes(), b"", 0o644, size))
            .content(content.as_bytes())
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.member(b'0', name, content)
    }

    fn directory(self, name: &str, mode: u32) -> Self {
        self.raw(&Self::header(b'5', name.as_bytes(), b"", mode, 0))
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.raw(&Self::header(
            b'2',
            name.as_bytes(),
            target.as_bytes(),
            0o777,
            0,
        ))
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.raw(&Self::header(
            b'1',
            name.as_bytes(),
            target.as_bytes(),
            0o644,
            0,
        ))
    }

    /// An extended header with these records.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let data: Vec<u8> = records
            .iter()
            .flat_map(|(key, value)| record(key, value))
            .collect();
        let size = data.len() as u64;
        self.raw(&Self::header(b'x', b"PaxHeaders/x", b"", 0o644, size))
            .content(&data)
    }

    /// The archive, with its end.
    pub(crate) fn end(self) -> Vec<u8> {
        self.raw(&[0; 2 * BLOCK]).0
    }
}

/// A pax record, whose length counts its own digits.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
    let length = (rest.len()..rest.len() + 20)
        .find(|length| length.to_string().len() + rest.len() == *length);
    [length.unwrap().to_string().as_bytes(), &rest].concat()
}

/// What a test compares two trees by: names, kinds, modes, times, contents, link targets.
fn listing(root: &Path) -> Vec<String> {
    use std::os::unix::fs::MetadataExt;
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(path) = pending.pop() {
        let mut names: Vec<_> = fs::read_dir(root.join(&path))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        for name in names {
            let path = path.join(name);
            let status = fs::symlink_metadata(root.join(&path)).unwrap();
            let (mode, seconds, nanoseconds) = (status.mode(), status.mtime(), status.mtime_nsec());
            let content = if status.is_symlink() {
                let target = fs::read_link(root.join(&path)).unwrap();
                target.to_string_lossy().into_owned()
            } else if status.is_dir() {
                pending.push(path.clone());
                String::new()
            } else {
                crate::fixture::sha256(&fs::read(root.join(&path)).unwrap())
            };
            let shown = path.display();
            found.push(format!(
                "{shown} {mode:o} {seconds}.{nanoseconds} {content}"
            ));
        }
    }
    found.sort();
    found
}
