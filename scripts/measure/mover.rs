//! The floor of files: a server that moves them between the file system and connections and does
//! nothing else, in every way the kernel offers.
//!
//! A request is a line, `<way> get|put <offset> <length> <path>`. `get` is answered with the bytes;
//! `put` is followed by them and answered with a line. A thread a connection.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use nix::fcntl::{FcntlArg, SpliceFFlags, fcntl, splice};
use nix::sys::sendfile::sendfile64;

use super::bytes::{Expected, PATTERN};
use super::client::{BLOCK, Client};

/// How bytes get from one descriptor to another.
#[derive(Clone, Copy)]
pub enum Way {
    /// Large reads and writes.
    Copy,
    /// `sendfile` to the connection, `splice` through a pipe from it.
    Kernel,
}

impl Way {
    fn word(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Kernel => "kernel",
        }
    }
}

impl Client {
    pub fn pull(&mut self, way: Way, path: &Path, offset: usize, length: usize) {
        self.ask(way, "get", path, offset, length);
        let mut expected = Expected::new(&PATTERN, offset);
        self.take(length, |piece| expected.check(piece));
    }

    pub fn push(&mut self, way: Way, path: &Path, offset: usize, length: usize) {
        self.ask(way, "put", path, offset, length);
        PATTERN.send(&mut self.stream, offset, length);
        self.take(5, |_| ());
    }

    fn ask(&mut self, way: Way, what: &str, path: &Path, offset: usize, length: usize) {
        let way = way.word();
        let line = format!("{way} {what} {offset} {length} {}\n", path.display());
        self.stream.write_all(line.as_bytes()).unwrap();
    }
}

pub fn serve(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        stream.set_nodelay(true).unwrap();
        thread::spawn(move || serve_one(stream));
    }
}

fn serve_one(mut stream: TcpStream) {
    let mut block = vec![0; BLOCK];
    let (pipe_read, pipe_write) = nix::unistd::pipe().unwrap();
    // As large as the kernel lets everybody have it.
    fcntl(&pipe_write, FcntlArg::F_SETPIPE_SZ(1 << 20)).unwrap();
    while let Some(line) = read_line(&mut stream) {
        let words: Vec<&str> = line.splitn(5, ' ').collect();
        let [way, what, offset, length, path] = words[..] else {
            panic!("not a request: {line}");
        };
        let offset = offset.parse().unwrap();
        let length = length.parse().unwrap();
        match (what, way) {
            ("get", "copy") => get(
                &File::open(path).unwrap(),
                &mut stream,
                offset,
                length,
                &mut block,
            ),
            ("get", _) => {
                let file = File::open(path).unwrap();
                let mut at = offset;
                let mut left = usize::try_from(length).unwrap();
                while left > 0 {
                    match sendfile64(&stream, &file, Some(&mut at), left) {
                        Ok(0) | Err(_) => return,
                        Ok(sent) => left -= sent,
                    }
                }
            }
            (_, way) => {
                let mut options = OpenOptions::new();
                let file = options
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(path)
                    .unwrap();
                if way == "copy" {
                    put(&mut stream, &file, offset, length, &mut block);
                } else {
                    put_spliced(&stream, &file, offset, length, &pipe_read, &pipe_write);
                }
                stream.write_all(b"done\n").unwrap();
            }
        }
    }
}

/// `None` at the end.
fn read_line(stream: &mut TcpStream) -> Option<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte).ok()?;
        if byte == *b"\n" {
            return Some(String::from_utf8(line).unwrap());
        }
        line.push(byte[0]);
    }
}

fn get(file: &File, stream: &mut TcpStream, mut offset: i64, length: i64, block: &mut [u8]) {
    let end = offset + length;
    while offset < end {
        let most = block.len().min(usize::try_from(end - offset).unwrap());
        let read = file
            .read_at(&mut block[..most], offset.cast_unsigned())
            .unwrap();
        if read == 0 || stream.write_all(&block[..read]).is_err() {
            return;
        }
        offset += i64::try_from(read).unwrap();
    }
}

fn put(stream: &mut TcpStream, file: &File, mut offset: i64, length: i64, block: &mut [u8]) {
    let end = offset + length;
    while offset < end {
        let most = block.len().min(usize::try_from(end - offset).unwrap());
        let read = stream.read(&mut block[..most]).unwrap();
        assert!(read > 0, "the connection ended too soon");
        file.write_all_at(&block[..read], offset.cast_unsigned())
            .unwrap();
        offset += i64::try_from(read).unwrap();
    }
}

fn put_spliced(
    stream: &TcpStream,
    file: &File,
    mut offset: i64,
    length: i64,
    pipe_read: &OwnedFd,
    pipe_write: &OwnedFd,
) {
    let mut left = usize::try_from(length).unwrap();
    let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_MORE;
    while left > 0 {
        let most = left.min(1 << 20);
        let mut held = splice(stream.as_fd(), None, pipe_write, None, most, flags).unwrap();
        assert!(held > 0, "the connection ended too soon");
        left -= held;
        while held > 0 {
            held -= splice(pipe_read, None, file, Some(&mut offset), held, flags).unwrap();
        }
    }
}
