//! A host that is killed at any moment of its work, again and again, and what its successors make of it.
//!
//! `SBX_KILLS` is the number of kills; the default is for every day.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{SANDBOXES, homes_in, in_place_of, names_in, needs_root, target};
use crate::fixture::{PATIENCE, Random, Server, TOKEN, wait_until};

const USUAL_KILLS: u32 = 4;

/// Clients at the same time.
const CLIENTS: u64 = 4;

/// Most sandboxes of a client.
const MOST: usize = 8;

/// What a client knows of a sandbox of its own.
struct Known {
    token: String,
    uid: u64,
    /// What it has written: what was answered, and what may have been written.
    written: [u64; 2],
    is_deletion_asked: bool,
    is_deletion_answered: bool,
}

type Sandboxes = HashMap<String, Known>;

/// The status and the body of the answer, if the server lives long enough to give a whole one.
fn ask(
    address: SocketAddr,
    token: &str,
    method: &str,
    target: &str,
    body: &str,
) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.0\r\nX-Sandbox-Token: {token}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "));
    let is_whole = length.is_none_or(|length| length.parse() == Ok(body.len()));
    let status = head.split(' ').nth(1)?.parse().ok()?;
    is_whole.then(|| (status, body.to_owned()))
}

/// Does one thing after the other until the server is gone.
fn work(address: SocketAddr, mut sandboxes: Sandboxes, seed: u64) -> Sandboxes {
    let mut random = Random(seed);
    let own = |method, target: &str, body: &str| ask(address, TOKEN, method, target, body);
    loop {
        let choice = random.next() % 10;
        let living = || {
            sandboxes
                .iter()
                .filter(|(_, known)| !known.is_deletion_asked)
        };
        let count = living().count();
        let at = usize::try_from(random.next() % count.max(1) as u64).unwrap();
        let chosen = living().nth(at).map(|(id, _)| id.clone());
        let Some(id) = chosen.filter(|_| choice > 1 || count >= MOST) else {
            let Some((status, body)) = own("POST", SANDBOXES, r#"{"env":{"A":"b"}}"#) else {
                return sandboxes;
            };
            assert_eq!(status, 200, "{body}");
            let made: Value = serde_json::from_str(&body).unwrap();
            let made = &made["sandboxes"][0];
            let known = Known {
                token: made["token"].as_str().unwrap().to_owned(),
                uid: made["uid"].as_u64().unwrap(),
                written: [0; 2],
                is_deletion_asked: false,
                is_deletion_answered: false,
            };
            sandboxes.insert(made["id"].as_str().unwrap().to_owned(), known);
            continue;
        };
        let known = sandboxes.get_mut(&id).unwrap();
        let answer = match choice {
            0..=4 => {
                known.written[1] += 1;
                let value = known.written[1];
                let target = target(&id, "/files/write?path=value");
                let answer = ask(address, &known.token, "PUT", &target, &value.to_string());
                if matches!(answer, Some((200, _))) {
                    known.written[0] = value;
                }
                answer
            }
            5 => own("POST", &target(&id, "/pause"), r#"{"keep":"files"}"#),
            6 => own("POST", &target(&id, "/pause"), ""),
            7 => own("POST", &target(&id, "/resume"), ""),
            8 => own(
                "POST",
                &target(&id, "/processes"),
                r#"{"cmd":"trap '' TERM; sleep 3600"}"#,
            ),
            _ => {
                known.is_deletion_asked = true;
                let answer = own("DELETE", &target(&id, ""), "");
                known.is_deletion_answered = matches!(answer, Some((200, _)));
                answer
            }
        };
        let Some((status, body)) = answer else {
            return sandboxes;
        };
        // Commands of a paused sandbox, and what needs memory of a stopped one, are refused.
        assert!(
            matches!(status, 200 | 409) || (choice, status) == (6, 503),
            "{choice}: {status} {body}"
        );
    }
}

/// Asserts that a server has what its predecessors have answered.
fn check(server: &Server, sandboxes: &mut Sandboxes) {
    let all = server.get(SANDBOXES).json();
    let mut uids = HashSet::new();
    let mut found = HashMap::new();
    for one in all.as_array().unwrap() {
        assert_eq!(one["state"], "stopped", "{one}");
        assert!(
            uids.insert(one["uid"].as_u64().unwrap()),
            "a uid twice: {all}"
        );
        found.insert(
            one["id"].as_str().unwrap().to_owned(),
            one["uid"].as_u64().unwrap(),
        );
    }
    sandboxes.retain(|id, known| {
        let is_there = found.remove(id);
        assert!(
            !(known.is_deletion_answered && is_there.is_some()),
            "{id} is back"
        );
        let Some(uid) = is_there else {
            assert!(known.is_deletion_asked, "{id} is lost");
            return false;
        };
        assert_eq!(uid, known.uid, "{id}");
        known.is_deletion_asked = false;
        let path = target(id, "/files/read?path=value");
        let (status, text) = ask(server.address, &known.token, "GET", &path, "").unwrap();
        let value = if status == 404 {
            0
        } else {
            text.parse().unwrap()
        };
        let [answered, asked] = known.written;
        assert!(
            (answered..=asked).contains(&value),
            "{id}: {value} of {answered}..={asked}"
        );
        known.written = [value; 2];
        true
    });
    // What was made, and not answered any more.
    for id in found.into_keys() {
        assert_eq!(server.delete(&target(&id, "")).status, 200);
    }
}

#[test]
fn whenever_a_host_is_killed_the_next_one_has_what_was_answered() {
    needs_root!();
    let kills = std::env::var("SBX_KILLS").map_or(USUAL_KILLS, |kills| kills.parse().unwrap());
    let mut server = Server::host().start();
    let place = server.place.take().unwrap();
    let mut shares: Vec<Sandboxes> = (0..CLIENTS).map(|_| Sandboxes::new()).collect();
    for round in 0..kills {
        let (address, inner) = (server.address, server.inner_pid());
        let clients: Vec<_> = (0..CLIENTS)
            .zip(std::mem::take(&mut shares))
            .map(|(number, share)| {
                let seed = u64::from(round) * CLIENTS + number;
                thread::spawn(move || work(address, share, seed))
            })
            .collect();
        // Any moment will do.
        thread::sleep(Duration::from_millis(Random(u64::from(round)).next() % 300));
        kill(Pid::from_raw(inner), Signal::SIGKILL).unwrap();
        assert_ne!(server.wait_for_exit(PATIENCE).code(), Some(0));
        shares = clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect();
        let next = in_place_of(&place).start();
        // What was being started becomes a process of its user a moment later.
        wait_until("nothing of the former life is left", PATIENCE, || {
            place.processes().is_empty()
        });
        let mut all: Sandboxes = shares.iter_mut().flat_map(|share| share.drain()).collect();
        check(&next, &mut all);
        assert_eq!(
            names_in(place.homes().join(".aside")),
            Vec::<String>::new(),
            "{}",
            next.log()
        );
        assert_eq!(homes_in(place.homes()).len(), all.len());
        for (share, (id, known)) in (0..shares.len()).cycle().zip(all) {
            shares[share].insert(id, known);
        }
        server = next;
    }
    let deleted = server.delete(SANDBOXES).json();
    let count: usize = shares.iter().map(HashMap::len).sum();
    assert_eq!(deleted, json!({"deleted": count}));
}
