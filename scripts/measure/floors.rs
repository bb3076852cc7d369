//! The floors: programs and steps that do nothing but the work itself.
//!
//! The servers among them are the bench again, started with a mode as its first argument.

use std::ffi::CStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, posix_spawn};
use nix::sys::wait::{WaitStatus, waitpid};

use super::bytes::PATTERN;
use super::client::{BLOCK, find};
use super::program::{Program, Scratch, free_port};

/// `/bin/true`, as the C library starts it.
pub fn spawn_true() {
    let words = [c"/bin/true"];
    let actions = PosixSpawnFileActions::init().unwrap();
    let attributes = PosixSpawnAttr::init().unwrap();
    let pid = posix_spawn(words[0], &actions, &attributes, &words, &[] as &[&CStr]).unwrap();
    assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
}

impl Program {
    pub fn responder(port: u16, reply: &Path) -> Self {
        let reply = reply.to_str().unwrap();
        Self::own(&["respond", &port.to_string(), reply], port)
    }

    /// The bench itself, as a server: the mode, and what it takes.
    pub fn own(words: &[&str], port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::start(port, command.args(words))
    }

    /// Nothing where nginx is not installed.
    pub fn nginx(port: u16, scratch: &Scratch) -> Option<Self> {
        let path = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"];
        let path = path.into_iter().find(|path| Path::new(path).exists())?;
        let directory = scratch.path("");
        let directory = directory.display();
        let user = if nix::unistd::geteuid().is_root() {
            "user root;"
        } else {
            ""
        };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {directory}/{kind};"))
            .concat();
        let configuration = format!(
            "{user} daemon off; worker_processes 2; pid {directory}/nginx.pid; error_log stderr crit;
            events {{ worker_connections 256; }}
            http {{
                access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
                client_max_body_size 0; {temporary}
                server {{
                    listen 127.0.0.1:{port}; root {directory};
                    location = /health {{ return 200 '{{\"status\":\"ok\"}}'; }}
                    location / {{ dav_methods PUT; }}
                }}
            }}"
        );
        let file = scratch.path("nginx.conf");
        fs::write(&file, configuration).unwrap();
        Some(Self::start(port, Command::new(path).arg("-c").arg(file)))
    }
}

impl Scratch {
    /// A reply of the server's to /health, for the floor to send.
    pub fn reply_file(&self) -> PathBuf {
        let path = self.path("reply");
        if !path.exists() {
            let server = Program::server(free_port());
            let mut client = server.connect();
            client.send("GET", "/health", 0, b"");
            client.fill();
            fs::write(&path, client.rest()).unwrap();
        }
        path
    }
}

/// Answers whatever arrives with the same bytes, a thread a connection.
pub fn respond(port: u16, reply: &[u8]) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    thread::scope(|scope| {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            let serve = move || {
                let mut block = [0; 1024];
                while stream.read(&mut block).is_ok_and(|length| length > 0) {
                    if stream.write_all(reply).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn_scoped(scope, serve)
                .unwrap();
        }
    });
}

/// A server for the port proxy: `GET /<size>` is answered with so many bytes, and a body is read to its
/// end.
pub fn serve_bytes(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut block = vec![0; BLOCK];
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut head, mut end) = (Vec::new(), None);
        while end.is_none() {
            let length = stream.read(&mut block).unwrap_or(0);
            if length == 0 {
                break;
            }
            head.extend_from_slice(&block[..length]);
            end = find(&head, b"\r\n\r\n");
        }
        let Some(end) = end else { continue };
        let text = String::from_utf8(head[..end].to_vec()).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let size: usize = words[1][1..].parse().unwrap();
        if words[0] == "GET" {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            PATTERN.send(&mut stream, 0, size);
        } else {
            let left = size - (head.len() - end - 4);
            receive(&mut stream, &mut block, left);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            stream.write_all(answer).unwrap();
        }
    }
}

/// Receives so many bytes and forgets them.
fn receive(from: &mut impl Read, block: &mut [u8], mut left: usize) {
    while left > 0 {
        let most = left.min(block.len());
        match from.read(&mut block[..most]).unwrap() {
            0 => break,
            length => left -= length,
        }
    }
}
