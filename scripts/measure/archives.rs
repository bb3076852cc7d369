//! Folders as one archive, down and up. The floor is `tar` with a loopback socket for its archive.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::bytes::{Expected, PATTERN};
use super::client::{BLOCK, request};
use super::files::check_and_remove;
use super::program::{Program, Scratch, free_port, peak_memory_of};
use super::report::{Figure, Limit, Table, in_turns};
use super::{MIB, Plan};

/// The size of each of many files.
const SMALL_BYTES: usize = 4096;
/// How many of them are in a directory.
const FILES_PER_DIRECTORY: usize = 100;
/// What archives are made of.
const TAR_BLOCK: usize = 512;

/// Files of one size.
#[derive(Clone, Copy)]
struct Folder {
    files: usize,
    size: usize,
}

impl Folder {
    fn bytes(self) -> usize {
        self.files * self.size
    }

    fn names(self) -> impl Iterator<Item = String> {
        (0..self.files).map(|number| {
            let directory = number / FILES_PER_DIRECTORY;
            format!("directory-{directory}/file-{number}")
        })
    }

    fn what(self) -> String {
        match self.size {
            SMALL_BYTES => format!("{} files of 4 KiB", self.files),
            size => format!("{} file of {} MiB", self.files, size / MIB),
        }
    }

    /// Sends it as an archive.
    fn send(self, headers: &[[u8; TAR_BLOCK]], to: &mut impl Write) {
        let padding = vec![0; self.size.next_multiple_of(TAR_BLOCK) - self.size];
        let mut to = std::io::BufWriter::with_capacity(BLOCK, to);
        for header in headers {
            to.write_all(header).unwrap();
            PATTERN.send(&mut to, 0, self.size);
            to.write_all(&padding).unwrap();
        }
        to.write_all(&[0; 2 * TAR_BLOCK]).unwrap();
        to.flush().unwrap();
    }

    /// How long that is.
    fn archive_bytes(self) -> usize {
        let member = TAR_BLOCK + self.size.next_multiple_of(TAR_BLOCK);
        self.files * member + 2 * TAR_BLOCK
    }

    fn headers(self) -> Vec<[u8; TAR_BLOCK]> {
        self.names().map(|name| header(&name, self.size)).collect()
    }

    /// Looks at every byte of what was unpacked, and removes it.
    fn check_and_remove(self, directory: &Path) {
        for name in self.names() {
            check_and_remove(&directory.join(name), self.size);
        }
        fs::remove_dir_all(directory).unwrap();
    }
}

/// The header of a file (POSIX ustar).
fn header(name: &str, size: usize) -> [u8; TAR_BLOCK] {
    let mut block = [0; TAR_BLOCK];
    let mut put =
        |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644");
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{size:011o}"));
    put(136, "14000000000");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\u{0}00");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

/// Takes an archive apart and looks at every byte of the files in it.
struct Members<'a> {
    /// The next header, as far as it has come.
    header: Vec<u8>,
    /// Of the current member; a file's is compared.
    content: usize,
    padding: usize,
    expected: Option<Expected<'a>>,
    files: usize,
    bytes: usize,
}

impl Members<'_> {
    fn new() -> Self {
        Self {
            header: Vec::with_capacity(TAR_BLOCK),
            content: 0,
            padding: 0,
            expected: None,
            files: 0,
            bytes: 0,
        }
    }

    fn take(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let left = match (self.content, self.padding) {
                (0, 0) => TAR_BLOCK - self.header.len(),
                (0, padding) => padding,
                (content, _) => content,
            };
            let (now, rest) = piece.split_at(left.min(piece.len()));
            piece = rest;
            if self.content > 0 {
                if let Some(expected) = &mut self.expected {
                    expected.check(now);
                    self.bytes += now.len();
                }
                self.content -= now.len();
            } else if self.padding > 0 {
                self.padding -= now.len();
            } else {
                self.header.extend_from_slice(now);
                if self.header.len() == TAR_BLOCK {
                    self.begin();
                }
            }
        }
    }

    fn begin(&mut self) {
        let is_file = self.header[156] == b'0';
        let digits = self.header[124..135].trim_ascii();
        let digits = std::str::from_utf8(digits).unwrap();
        // The blocks of zeros at the end have none.
        self.content = usize::from_str_radix(digits, 8).unwrap_or(0);
        self.padding = self.content.next_multiple_of(TAR_BLOCK) - self.content;
        self.expected = is_file.then(|| Expected::new(&PATTERN, 0));
        self.files += usize::from(is_file);
        self.header.clear();
    }

    fn check(&self, folder: Folder) {
        assert_eq!((self.files, self.bytes), (folder.files, folder.bytes()));
    }
}

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let many = Folder {
        files: plan.archive_files,
        size: SMALL_BYTES,
    };
    let large = Folder {
        files: 1,
        size: plan.file_bytes,
    };
    for folder in [many, large] {
        down(plan, folder, scratch, table);
    }
    let server = Program::server(free_port());
    server.connect().health();
    let before = peak_memory_of(server.child.id());
    for folder in [many, large] {
        up(plan, folder, &server, scratch, table);
    }
    let grown = peak_memory_of(server.child.id()) - before;
    let what = "folder up: memory at the most, KiB more than idle";
    table.row(
        what,
        Figure::one(grown as f64),
        None,
        Limit::Below(4096.0),
        "",
    );
}

fn down(plan: &Plan, folder: Folder, scratch: &Scratch, table: &mut Table) {
    let directory = scratch.path("down");
    for name in folder.names() {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        PATTERN.send(&mut fs::File::create(path).unwrap(), 0, folder.size);
    }
    let server = Program::server(free_port());
    let target = format!("/v1/files/archive?path={}", directory.display());
    let [ours, floor] = in_turns(
        plan.rounds,
        |samples| {
            let mut client = server.connect();
            let mut members = Members::new();
            samples.time(|| {
                client.send("GET", &target, 0, b"");
                client.body(|piece| members.take(piece));
            });
            members.check(folder);
        },
        |samples| {
            let mut members = Members::new();
            let mut block = vec![0; BLOCK];
            samples.time(|| {
                let (mut stream, mut child) = tar(&["-cf", "-"], &directory, |command, end| {
                    command.stdout(end);
                });
                loop {
                    match stream.read(&mut block).unwrap() {
                        0 => break,
                        length => members.take(&block[..length]),
                    }
                }
                assert!(child.wait().unwrap().success());
            });
            members.check(folder);
        },
    );
    fs::remove_dir_all(&directory).unwrap();
    let row = format!("folder down: {}, MB/s", folder.what());
    let [ours, floor] = [ours, floor].map(|samples| samples.speeds(folder.bytes()));
    let note = "tar c into a loopback socket";
    table.row(&row, ours, Some(floor), Limit::AtLeast(0.9), note);
}

fn up(plan: &Plan, folder: Folder, server: &Program, scratch: &Scratch, table: &mut Table) {
    let directory = scratch.path("up");
    let headers = folder.headers();
    let target = format!("/v1/files/archive?path={}&mkdir=1", directory.display());
    let [ours, floor] = in_turns(
        plan.rounds,
        |samples| {
            let mut client = server.connect();
            samples.time(|| {
                let head = request("PUT", &target, "", folder.archive_bytes(), b"");
                client.stream.write_all(&head).unwrap();
                folder.send(&headers, &mut client.stream);
                client.body(|_| ());
            });
            folder.check_and_remove(&directory);
        },
        |samples| {
            fs::create_dir(&directory).unwrap();
            samples.time(|| {
                let words = ["--no-same-owner", "-xf", "-"];
                let (mut stream, mut child) = tar(&words, &directory, |command, end| {
                    command.stdin(end);
                });
                folder.send(&headers, &mut stream);
                // It reads to the end.
                drop(stream);
                assert!(child.wait().unwrap().success());
            });
            folder.check_and_remove(&directory);
        },
    );
    let row = format!("folder up: {}, MB/s", folder.what());
    let [ours, floor] = [ours, floor].map(|samples| samples.speeds(folder.bytes()));
    let note = "tar x from a loopback socket";
    table.row(&row, ours, Some(floor), Limit::AtLeast(0.8), note);
}

/// `tar` of a directory with one end of a loopback connection, and the other end.
fn tar(
    words: &[&str],
    directory: &Path,
    give: impl FnOnce(&mut Command, Stdio),
) -> (TcpStream, Child) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    let mut command = Command::new("tar");
    command.arg("-C").arg(directory).args(words);
    if words.contains(&"-cf") {
        command.arg(".");
    }
    give(
        &mut command,
        Stdio::from(std::os::fd::OwnedFd::from(theirs)),
    );
    let child = command.spawn().unwrap();
    // The command still has its end.
    drop(command);
    (ours, child)
}
