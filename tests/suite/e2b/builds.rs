//! Templates that are built: what the steps do, what is refused, and what is left of a build that ends early.

use std::os::unix::fs::symlink;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{Door, api};
use crate::archives::hostile::gzip;
use crate::fixture::{Builder, PATIENCE, Reply, Server, TempDir, homes_in, wait_until};
use crate::host::lasting::end;
use crate::roots::users::{host, lack, template};
use crate::skip;
use crate::snapshots::{Member, archive, check_tidy, file, listed};

/// A template with the programs that steps need; skips a test that cannot run here.
macro_rules! needs_builds {
    () => {{
        if !cfg!(feature = "file-tools") {
            return;
        }
        if let Some(why) = lack() {
            skip!("{why}");
        }
        let template = template();
        for name in ["chmod", "chown", "cp", "dirname", "rm", "yes", "head"] {
            symlink("busybox", template.path().join("bin").join(name)).unwrap();
        }
        template
    }};
}

/// A build that waits.
struct Waiting<'a> {
    server: &'a Server,
    template: String,
    build: String,
}

#[track_caller]
fn begin<'a>(server: &'a Server, name: &str) -> Waiting<'a> {
    let reply = api(server, "POST", "/v3/templates", &json!({ "name": name }));
    assert_eq!(reply.status, 202, "{}", reply.text());
    let made = reply.json();
    let text = |name: &str| made[name].as_str().unwrap().to_owned();
    Waiting {
        server,
        template: text("templateID"),
        build: text("buildID"),
    }
}

impl Waiting<'_> {
    /// The path that files are sent to.
    #[track_caller]
    fn link(&self, hash: &str) -> String {
        let target = format!("/templates/{}/files/{hash}", self.template);
        let reply = api(self.server, "GET", &target, &Value::Null);
        assert_eq!(reply.status, 201, "{}", reply.text());
        let url = reply.json()["url"].as_str().unwrap().to_owned();
        url[url.find("/templates").unwrap()..].to_owned()
    }

    /// Sends files without any credentials but the link.
    fn put(&self, target: &str, content: &[u8]) -> Reply {
        let mut connection = self.server.connect();
        connection.token = None;
        connection.request("PUT", target, &[], content)
    }

    fn start(&self, body: &Value) -> Reply {
        let (template, build) = (&self.template, &self.build);
        let target = format!("/v2/templates/{template}/builds/{build}");
        api(self.server, "POST", &target, body)
    }

    #[track_caller]
    fn status(&self) -> Value {
        let (template, build) = (&self.template, &self.build);
        let target = format!("/templates/{template}/builds/{build}/status");
        let reply = api(self.server, "GET", &target, &Value::Null);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Starts it, and waits for its end.
    #[track_caller]
    fn run(&self, steps: &Value) -> Value {
        let reply = self.start(&json!({ "fromTemplate": "own", "steps": steps }));
        assert_eq!(reply.status, 202, "{}", reply.text());
        wait_until("the build ends", PATIENCE, || {
            self.status()["status"] != "building"
        });
        self.status()
    }

    /// Starts one that does not end by itself.
    fn hang(&self) {
        let steps = json!([{ "type": "RUN", "args": ["echo on; sleep 1000"] }]);
        let reply = self.start(&json!({ "fromTemplate": "own", "steps": steps }));
        assert_eq!(reply.status, 202, "{}", reply.text());
        let says = |text: &str| messages(&self.status()).iter().any(|line| line == text);
        wait_until("it runs", PATIENCE, || says("on"));
    }
}

fn messages(status: &Value) -> Vec<String> {
    let lines = status["logEntries"].as_array().unwrap().iter();
    lines
        .map(|line| line["message"].as_str().unwrap().to_owned())
        .collect()
}

/// Nothing of a build is left: no sandbox and no part of a snapshot.
#[track_caller]
fn expect_nothing_left(server: &Server) {
    wait_until("its sandbox is gone", PATIENCE, || {
        server.get("/v1/sandboxes").json() == json!([])
    });
    let homes = server.place.as_ref().unwrap().homes();
    wait_until("its home is gone", PATIENCE, || homes_in(&homes).is_empty());
    check_tidy(server);
}

fn some_files() -> Vec<u8> {
    let directory = |name| Member {
        typeflag: b'5',
        name,
        mode: 0o755,
        ..Member::default()
    };
    archive(&[
        directory("src"),
        file("src/one", b"1"),
        directory("src/below"),
        file("src/below/two", b"2"),
        Member {
            typeflag: b'2',
            link: "one",
            ..file("src/link", b"")
        },
        file("top.txt", b"top"),
    ])
}

#[test]
fn the_steps_of_a_build_make_a_template() {
    let template = needs_builds!();
    let server = host(&template).start();
    let build = begin(&server, "Team/mine:V1");
    for hash in ["ab", "cd"] {
        let link = build.link(hash);
        assert_eq!(build.put(&link, &some_files()).status, 200);
        let again = api(&server, "GET", &link, &Value::Null);
        assert_eq!(again.json()["present"], true);
    }
    let copy =
        |hash: &str, args: &[&str]| json!({ "type": "COPY", "filesHash": hash, "args": args });
    let status = build.run(&json!([
        { "type": "RUN", "args": ["id -un; pwd; echo two >&2"], "force": false },
        { "type": "ENV", "args": ["A", "one", "B", "$A-\"x\""] },
        { "type": "RUN", "args": ["mkdir /srv && echo $A > /srv/by-root", "root"] },
        { "type": "WORKDIR", "args": ["/work"] },
        { "type": "WORKDIR", "args": ["deep/er"] },
        copy("ab", &["src", "tree", "", ""]),
        copy("ab", &["src/one", "/srv/", "root", "0600"]),
        copy("cd", &["./top.txt", "renamed", "", ""]),
        copy("cd", &["*.txt", ".", "alice:alice", ""]),
        { "type": "RUN", "args": ["cat"] },
        // Which is no image for that.
        { "type": "RUN", "args": ["echo '{\"imageLayoutVersion\":\"1.0.0\"}' > /oci-layout; echo '{}' > /index.json", "root"] },
        { "type": "USER", "args": ["alice:alice"] },
    ]));
    assert_eq!(status["status"], "ready", "{status:#}");
    let text = messages(&status).join("\n");
    let expected = "[1/12] RUN id -un; pwd; echo two >&2\nuser\n/home/user\n";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("\n[2/12] ENV A\n"), "{text}");
    let lines = status["logEntries"].as_array().unwrap();
    let of_error = lines.iter().find(|line| line["message"] == "two").unwrap();
    assert_eq!(
        (&of_error["level"], &of_error["step"]),
        (&json!("error"), &json!("1"))
    );
    // The name is one of the store, and the id that of the snapshot.
    let kept = listed(&server);
    assert_eq!(
        (&kept[0]["name"], &kept[0]["id"]),
        (&json!("team-mine-v1"), &json!(build.template))
    );
    assert_eq!(kept[0]["settings"]["cwd"], "/work/deep/er");
    expect_nothing_left(&server);
    for name in ["Team/mine:V1", "team-mine-v1", &build.template] {
        let alias = format!("/templates/aliases/{}", name.replace('/', "%2F"));
        assert_eq!(
            api(&server, "GET", &alias, &Value::Null).status,
            200,
            "{name}"
        );
        let door = Door::with(&server, &json!({ "templateID": name }));
        let ran = door.sh("id -un; pwd; echo \"$A $B\"; cat tree/one tree/below/two tree/link renamed top.txt /srv/one");
        assert_eq!(
            ran.text(),
            "alice\n/work/deep/er\none one-\"x\"\n121toptop",
            "{ran:?}"
        );
        let ran = door.sh("stat -c '%U %a' tree tree/one renamed top.txt /work/deep /srv/one /srv/by-root; ls /tmp");
        let expected = "user 755\nuser 644\nuser 644\nalice 644\nroot 755\nroot 600\nroot 644\n";
        assert_eq!(ran.text(), expected, "{ran:?}");
        api(
            &server,
            "DELETE",
            &format!("/sandboxes/{}", door.id),
            &Value::Null,
        );
    }
    let one = api(
        &server,
        "GET",
        &format!("/templates/{}", build.template),
        &Value::Null,
    )
    .json();
    assert_eq!(one["builds"][0]["buildID"], build.build, "{one}");
    // A later one of the same name takes it over; the former one keeps its id.
    let later = begin(&server, "team-mine:v1");
    assert_eq!(later.run(&json!([]))["status"], "ready");
    let names: Vec<Value> = listed(&server)
        .iter()
        .map(|one| one["name"].clone())
        .collect();
    assert_eq!(names, [Value::Null, json!("team-mine-v1")]);
    for (key, status) in [
        ("team%2Fmine:v1", 204),
        (&*build.template, 204),
        ("team-mine-v1", 404),
    ] {
        let reply = api(
            &server,
            "DELETE",
            &format!("/templates/{key}"),
            &Value::Null,
        );
        assert_eq!(reply.status, status, "{key}: {}", reply.text());
    }
    check_tidy(&server);
}

#[test]
fn what_fails_says_where_and_leaves_nothing() {
    let template = needs_builds!();
    let server = host(&template).start();
    let link = Member {
        typeflag: b'2',
        link: "/etc",
        ..file("x", b"")
    };
    let hostile = [
        archive(&[file("../out", b"x")]),
        archive(&[link, file("x/passwd", b"root::0:0::/:\n")]),
        b"no archive".to_vec(),
    ];
    let run = |script: &str| json!({ "type": "RUN", "args": [script] });
    let mut failing = vec![
        (run("echo why >&2; exit 3"), "exit status 3: why"),
        (run("kill -9 $$"), "signal 9"),
        (
            json!({ "type": "RUN", "args": ["true", "nobody-here"] }),
            "there is no user",
        ),
        (
            json!({ "type": "USER", "args": ["nobody-here"] }),
            "there is no user",
        ),
        (json!({ "type": "ENV", "args": ["A"] }), "names and values"),
        (json!({ "type": "ENV", "args": ["A=B", "x"] }), "A=B"),
    ];
    let hashes: Vec<String> = (0..hostile.len())
        .map(|number| format!("{number}"))
        .collect();
    for hash in &hashes {
        let copy = json!({ "type": "COPY", "filesHash": hash, "args": ["x", "/srv/x", "", ""] });
        failing.push((copy, ""));
    }
    for (step, why) in failing {
        let build = begin(&server, "bad");
        for (hash, content) in hashes.iter().zip(&hostile) {
            assert_eq!(build.put(&build.link(hash), content).status, 200);
        }
        let status = build.run(&json!([run("true"), step, run("true")]));
        assert_eq!(status["status"], "error", "{step}: {status:#}");
        assert_eq!(status["reason"]["step"], "2", "{step}: {status:#}");
        let text = status["reason"]["message"].as_str().unwrap();
        assert!(text.contains(why), "{step}: {text}");
    }
    assert_eq!(listed(&server), Vec::<Value>::new());
    expect_nothing_left(&server);
}

#[test]
fn what_a_build_cannot_have_is_refused() {
    let template = needs_builds!();
    let server = host(&template)
        .env("SBX_E2B_TEMPLATES", "team/x=own,*=own")
        .start();
    for (body, status) in [
        (json!({}), 400),
        (json!({ "name": "" }), 400),
        (json!({ "name": "a b" }), 400),
        (json!({ "name": "s-0123456789abcdef01234567" }), 400),
        (json!({ "name": "own" }), 409),
        (json!({ "name": "team-x" }), 409),
        (json!({ "name": "Team/X:2" }), 409),
        (json!({ "name": "a", "tags": ["other"] }), 400),
    ] {
        let reply = api(&server, "POST", "/v3/templates", &body);
        assert_eq!(reply.status, status, "{body}: {}", reply.text());
    }
    let build = begin(&server, "mine");
    let step = |step: Value| json!({ "fromTemplate": "own", "steps": [step] });
    for (body, why) in [
        (
            json!({ "fromImage": "node:22" }),
            "docker export $(docker create node:22)",
        ),
        (json!({ "fromImage": "own:2" }), "/v1/snapshots?name=own-2"),
        (json!({ "fromImage": "e2bdev/base" }), "name=e2bdev-base"),
        (json!({}), "fromImage or fromTemplate is missing"),
        (
            json!({ "fromTemplate": "own", "startCmd": "x" }),
            "startCmd",
        ),
        (step(json!({ "type": "ADD", "args": [] })), "type"),
        (step(json!({ "type": "RUN", "args": [1] })), "args"),
        (step(json!({ "args": ["x"] })), "type"),
        (
            step(json!({ "type": "COPY", "filesHash": "ab", "args": ["x", "y"] })),
            "not uploaded",
        ),
        (
            json!({ "fromTemplate": "own", "steps": vec![json!({}); 1001] }),
            "steps",
        ),
    ] {
        let reply = build.start(&body);
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(reply.text().contains(why), "{}", reply.text());
    }
    let link = build.link("ab");
    let (path, signature) = link.split_once('?').unwrap();
    let other = path.replace("/ab", "/cd");
    for target in [
        path.to_owned(),
        format!("{path}?signature="),
        format!("{path}?{}", signature.replace('=', "=0")),
        format!("{other}?{signature}"),
    ] {
        assert_eq!(build.put(&target, b"x").status, 401, "{target}");
    }
    let unknown = build.template.replace("s-", "s-0");
    let target = format!("/templates/{unknown}/files/ab");
    assert_eq!(api(&server, "GET", &target, &Value::Null).status, 404);
    let target = format!("/templates/{}/files/a.b", build.template);
    assert_eq!(api(&server, "GET", &target, &Value::Null).status, 400);
    let (template_id, wrong) = (&build.template, "00000000-0000-0000-0000-000000000000");
    let target = format!("/templates/{template_id}/builds/{wrong}/status");
    assert_eq!(api(&server, "GET", &target, &Value::Null).status, 404);
    assert_eq!(build.run(&json!([]))["status"], "ready");
    assert_eq!(
        build.start(&json!({ "fromTemplate": "own" })).status,
        400,
        "twice"
    );
    assert_eq!(build.put(&link, b"x").status, 400, "it is over");
    let kept = api(&server, "GET", "/templates/tags", &Value::Null);
    assert_eq!(kept.status, 501);
    assert_eq!(
        api(&server, "DELETE", "/templates/mine/tags/x", &Value::Null).status,
        501
    );
    // While a sandbox is made of it, it stays.
    let door = Door::with(&server, &json!({ "templateID": "mine" }));
    let kept = api(&server, "DELETE", "/templates/mine", &Value::Null);
    assert_eq!(kept.status, 400, "{}", kept.text());
    drop(door);
}

/// Frameworks that build keep to the build, whatever becomes of the name.
#[test]
fn a_build_is_a_tag_of_its_template() {
    let template = needs_builds!();
    let server = host(&template).env("SBX_E2B_TEMPLATES", "*").start();
    let tags = |name: &str| {
        let reply = api(
            &server,
            "GET",
            &format!("/templates/{name}/tags"),
            &Value::Null,
        );
        (reply.status, reply.json())
    };
    assert_eq!(tags("mine").0, 404);
    let make = |name: &str, content: &str| {
        let build = begin(&server, name);
        let early = json!({ "templateID": format!("mine:{}", build.build) });
        let reply = api(&server, "POST", "/sandboxes", &early);
        assert_eq!(reply.status, 404, "{}", reply.text());
        assert!(reply.text().contains("does not exist"), "{}", reply.text());
        let step = json!([{ "type": "RUN", "args": [format!("echo {content} > ~/content")] }]);
        assert_eq!(build.run(&step)["status"], "ready");
        (build.template, build.build)
    };
    let [(_, first), (template_id, second), (_, tagged)] =
        [("mine", "1"), ("mine", "2"), ("mine:v1", "3")].map(|(name, content)| make(name, content));
    for (name, expected) in [(&first, "1"), (&second, "2"), (&tagged, "3")] {
        let asked = json!({ "templateID": format!("mine:{name}") });
        let door = Door::with(&server, &asked);
        assert_eq!(
            door.sh("cat ~/content").stdout,
            format!("{expected}\n").as_bytes()
        );
    }
    for name in ["mine", "Mine:default", &template_id] {
        let (status, listed) = tags(name);
        assert_eq!(status, 200);
        let mut listed = listed.as_array().unwrap().clone();
        assert!(listed.iter().all(|tag| tag["createdAt"].is_string()));
        listed.sort_by_key(|tag| tag["tag"].to_string());
        let shown: Vec<_> = listed
            .iter()
            .map(|tag| (&tag["tag"], &tag["buildID"]))
            .collect();
        let expected = [
            (json!("default"), json!(second)),
            (json!("v1"), json!(tagged)),
        ];
        assert_eq!(
            shown,
            expected
                .iter()
                .map(|(tag, id)| (tag, id))
                .collect::<Vec<_>>()
        );
    }
}

#[test]
fn builds_have_bounds() {
    let template = needs_builds!();
    let server = host(&template).env("SBX_SNAPSHOTS_BYTES", 64 << 20).start();
    let build = begin(&server, "mine");
    let large = vec![0; 40 << 20];
    assert_eq!(build.put(&build.link("a"), &large).status, 200);
    assert_eq!(build.put(&build.link("b"), &large).status, 507);
    // What replaces it does not count twice in the end.
    assert_eq!(build.put(&build.link("a"), b"").status, 200);
    assert_eq!(build.put(&build.link("b"), &large).status, 200);
    let more: Vec<_> = (1..16)
        .map(|number| begin(&server, &format!("n{number}")))
        .collect();
    let body = json!({ "name": "one-more" });
    assert_eq!(api(&server, "POST", "/v3/templates", &body).status, 429);
    for other in &more {
        api(
            &server,
            "DELETE",
            &format!("/templates/{}", other.template),
            &Value::Null,
        );
    }
    let status =
        build.run(&json!([{ "type": "RUN", "args": ["yes | head -c 4000000; echo end >&2"] }]));
    assert_eq!(status["status"], "ready", "{status:#}");
    let mut all = Vec::new();
    loop {
        let target = format!(
            "/templates/{}/builds/{}/status?logsOffset={}",
            build.template,
            build.build,
            all.len()
        );
        let page = messages(&api(&server, "GET", &target, &Value::Null).json());
        assert!(page.len() <= 100);
        if page.is_empty() {
            break;
        }
        all.extend(page);
    }
    assert!(all.len() < 5000, "{}", all.len());
    assert!(all.last().unwrap().contains("the log is full"));
    let running: Vec<_> = (0..4)
        .map(|number| begin(&server, &format!("r{number}")))
        .collect();
    for build in &running {
        build.hang();
    }
    let fifth = begin(&server, "fifth");
    assert_eq!(fifth.start(&json!({ "fromTemplate": "own" })).status, 429);
}

#[test]
fn a_template_that_is_deleted_is_built_no_more() {
    let template = needs_builds!();
    let server = host(&template).start();
    let build = begin(&server, "mine");
    build.hang();
    let target = "/templates/mine";
    assert_eq!(api(&server, "DELETE", target, &Value::Null).status, 204);
    wait_until("it is over", PATIENCE, || {
        build.status()["status"] == "error"
    });
    expect_nothing_left(&server);
    assert_eq!(listed(&server), Vec::<Value>::new());
    // The same by its sandbox, which can be seen.
    let build = begin(&server, "mine");
    build.hang();
    let all = server.get("/v1/sandboxes").json();
    assert_eq!(all[0]["labels"]["build"], build.template, "{all}");
    let id = all[0]["id"].as_str().unwrap();
    assert_eq!(server.delete(&format!("/v1/sandboxes/{id}")).status, 200);
    wait_until("it is over", PATIENCE, || {
        build.status()["status"] == "error"
    });
    let status = build.status();
    assert_eq!(status["reason"]["step"], "1", "{status}");
    expect_nothing_left(&server);
}

/// What is copied at the end is all of it or nothing.
#[test]
fn a_sandbox_that_is_deleted_while_it_is_copied_makes_no_template() {
    let template = needs_builds!();
    let server = host(&template).start();
    for changed in ["DELETE", "resume"] {
        let build = begin(&server, "mine");
        let script = "head -c 256000000 /dev/zero > /large";
        let steps = json!([{ "type": "RUN", "args": [script, "root"] }]);
        let reply = build.start(&json!({ "fromTemplate": "own", "steps": steps }));
        assert_eq!(reply.status, 202, "{}", reply.text());
        let mut id = String::new();
        wait_until("it is copied", PATIENCE, || {
            let all = server.get("/v1/sandboxes").json();
            id = all[0]["id"].as_str().unwrap_or_default().to_owned();
            all[0]["state"] == "stopped"
        });
        let target = format!("/v1/sandboxes/{id}");
        let reply = if changed == "DELETE" {
            server.delete(&target)
        } else {
            server.post(&format!("{target}/resume"), &json!({}))
        };
        assert_eq!(reply.status, 200, "{changed}: {}", reply.text());
        wait_until("it is over", PATIENCE, || {
            build.status()["status"] != "building"
        });
        let status = build.status();
        assert_eq!(status["status"], "error", "{changed}: {status}");
        assert_eq!(listed(&server), Vec::<Value>::new());
        expect_nothing_left(&server);
    }
}

/// What a step makes of the template may be hostile to the steps after it.
#[test]
fn what_a_step_holds_has_bounds() {
    let template = needs_builds!();
    let server = host(&template).env("SBX_SNAPSHOTS_BYTES", 64 << 20).start();
    let script = "rm /bin/bash; printf '#!/bin/sh\nexec yes\n' > /bin/bash; chmod 755 /bin/bash";
    let flood = json!({ "type": "RUN", "args": [script, "root"] });
    let large = gzip(&archive(&[file("large", &vec![0; 100 << 20])]));
    for (step, why) in [
        (json!({ "type": "ENV", "args": ["A", "$A"] }), "65536 bytes"),
        (
            json!({ "type": "COPY", "filesHash": "ab", "args": ["large", "/x", "", ""] }),
            "67108864",
        ),
    ] {
        let build = begin(&server, "mine");
        assert_eq!(build.put(&build.link("ab"), &large).status, 200);
        let quiet = json!({ "type": "RUN", "args": ["true"] });
        let first = if step["type"] == "ENV" {
            &flood
        } else {
            &quiet
        };
        let status = build.run(&json!([first, step]));
        assert_eq!(status["reason"]["step"], "2", "{status}");
        let text = status["reason"]["message"].as_str().unwrap();
        assert!(text.contains(why), "{text}");
    }
    expect_nothing_left(&server);
}

#[test]
fn a_build_whose_start_was_refused_gives_way() {
    let template = needs_builds!();
    let server = host(&template).start();
    let all: Vec<_> = (0..16)
        .map(|number| begin(&server, &format!("n{number}")))
        .collect();
    for build in &all[7..9] {
        assert_eq!(build.start(&json!({ "fromImage": "other" })).status, 400);
    }
    // Whoever goes on after that is meant to stay.
    assert_eq!(all[7].put(&all[7].link("ab"), b"x").status, 200);
    begin(&server, "one-more");
    let body = json!({ "name": "too-many" });
    assert_eq!(api(&server, "POST", "/v3/templates", &body).status, 429);
    for (number, build) in all.iter().enumerate() {
        let target = format!("/templates/{}/files/cd", build.template);
        let found = api(&server, "GET", &target, &Value::Null).status;
        assert_eq!(found, if number == 8 { 404 } else { 201 }, "{number}");
    }
}

#[test]
fn a_server_does_not_idle_while_a_template_is_built() {
    let template = needs_builds!();
    let mut server = host(&template).env("SBX_IDLE_TIMEOUT", 2).start();
    begin(&server, "mine");
    let mut witness = Server::builder().env("SBX_IDLE_TIMEOUT", 2).start();
    witness.wait_for_exit(PATIENCE);
    assert!(server.is_running());
    let deleted = api(&server, "DELETE", "/templates/mine", &Value::Null);
    assert_eq!(deleted.status, 204);
    assert_eq!(server.wait_for_exit(PATIENCE).code(), Some(0));
}

/// Where another server was.
fn next(template: &TempDir, place: &crate::fixture::HostPlace) -> Builder {
    let path = template.path().display();
    crate::host::in_place_of(place).env("SBX_TEMPLATES", format!("own={path}"))
}

#[test]
fn the_next_server_finds_nothing_of_a_build() {
    let template = needs_builds!();
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let server = host(&template).start();
        let done = begin(&server, "done");
        assert_eq!(done.run(&json!([]))["status"], "ready");
        let (id, build_id) = (done.template.clone(), done.build.clone());
        let waiting = begin(&server, "waits");
        assert_eq!(
            waiting.put(&waiting.link("ab"), &vec![7; 1 << 20]).status,
            200
        );
        let build = begin(&server, "mine");
        build.hang();
        // A change of it writes no record.
        let all = server.get("/v1/sandboxes").json();
        let target = format!("/sandboxes/{}/timeout", all[0]["id"].as_str().unwrap());
        let changed = api(&server, "POST", &target, &json!({ "timeout": 3000 }));
        assert_eq!(changed.status, 204, "{}", changed.text());
        let place = end(server, signal);
        let mut server = next(&template, &place).start();
        server.place = Some(place);
        expect_nothing_left(&server);
        let names: Vec<Value> = listed(&server)
            .iter()
            .map(|one| one["name"].clone())
            .collect();
        assert_eq!(names, [json!("done")]);
        // What is ready stays so.
        let target = format!("/templates/{id}/builds/{build_id}/status");
        assert_eq!(
            api(&server, "GET", &target, &Value::Null).json()["status"],
            "ready"
        );
    }
}
