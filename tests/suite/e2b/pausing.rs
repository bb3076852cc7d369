//! Pause, resume, timeouts that pause, and what a client sees of a sandbox meanwhile.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Door, api, on_a_host};
use crate::fixture::{PATIENCE, Reply, Server, is_root, wait_until};

#[track_caller]
fn expect(reply: &Reply, status: u16) -> Value {
    assert_eq!(reply.status, status, "{}", reply.text());
    if reply.body.is_empty() {
        return Value::Null;
    }
    reply.json()
}

impl Door<'_> {
    /// A request of the API about this sandbox.
    #[track_caller]
    fn of_api(&self, method: &str, rest: &str, body: &Value) -> Reply {
        api(
            self.server,
            method,
            &format!("/sandboxes/{}{rest}", self.id),
            body,
        )
    }

    #[track_caller]
    fn info(&self) -> Value {
        expect(&self.of_api("GET", "", &Value::Null), 200)
    }

    #[track_caller]
    fn pause(&self, body: &Value) {
        expect(&self.of_api("POST", "/pause", body), 204);
    }

    #[track_caller]
    fn connect_again(&self, body: &Value, status: u16) {
        let made = expect(&self.of_api("POST", "/connect", body), status);
        assert_eq!(
            (&made["sandboxID"], &made["envdAccessToken"]),
            (&json!(self.id), &json!(self.token))
        );
    }

    fn health(&self) -> u16 {
        self.request("GET", "/health", &[], b"").status
    }

    /// Expects every kind of call to find no sandbox.
    #[track_caller]
    fn is_away(&self) {
        let list = self.call("/process.Process/List", &json!({}));
        let described = self.call("/filesystem.Filesystem/Stat", &json!({"path": "."}));
        let read = self.request("GET", "/files?path=x", &[], b"");
        let body = json!({"process": {"cmd": "true"}});
        let begun = self.call("/process.Process/Start", &body);
        for reply in [list, described, read, begun] {
            assert_eq!(reply.status, 502, "{}", reply.text());
            assert!(reply.text().contains("was not found"), "{}", reply.text());
        }
        assert_eq!(self.health(), 502);
    }
}

#[test]
fn a_paused_sandbox_is_away_until_a_client_connects_and_goes_on_then() {
    on_a_host(|server| {
        let door = Door::open(server);
        door.sh("echo kept > file; setsid sleep 3600 > /dev/null 2>&1 & echo $! > pid");
        let running = door.info();
        assert_eq!(running["state"], "running");
        assert_eq!(
            running["lifecycle"],
            json!({"onTimeout": "kill", "autoResume": false})
        );
        assert!(running["pauseMode"].is_null());
        door.pause(&json!({}));
        expect(&door.of_api("POST", "/pause", &json!({})), 409);
        let paused = door.info();
        assert_eq!(
            (&paused["state"], &paused["pauseMode"]),
            (&json!("paused"), &json!("full"))
        );
        assert_ne!(
            paused["endAt"], running["endAt"],
            "it is the moment of the pause"
        );
        for name in [
            "startedAt",
            "cpuCount",
            "memoryMB",
            "diskSizeMB",
            "envdVersion",
            "clientID",
        ] {
            assert_eq!(paused[name], running[name], "{name}");
        }
        door.is_away();
        let timeout = json!({"timeout": 60});
        expect(&door.of_api("POST", "/timeout", &timeout), 404);
        assert_eq!(
            expect(&door.of_api("GET", "/metrics", &Value::Null), 200),
            json!([])
        );
        door.connect_again(&timeout, 201);
        door.connect_again(&timeout, 200);
        assert_eq!(door.health(), 204);
        assert_eq!(
            door.sh("cat file; kill -0 $(cat pid) && echo alive").text(),
            "kept\nalive\n"
        );
        // Only its files.
        door.pause(&json!({"memory": false}));
        assert_eq!(door.info()["pauseMode"], "filesystem");
        door.is_away();
        door.connect_again(&timeout, 201);
        assert_eq!(
            door.sh("cat file; kill -0 $(cat pid) || echo dead").text(),
            "kept\ndead\n"
        );
        // A second pause gives up nothing of what is kept in memory; a client that connects may.
        door.sh("setsid sleep 3600 > /dev/null 2>&1 & echo $! > pid");
        door.pause(&Value::Null);
        expect(
            &door.of_api("POST", "/pause", &json!({"memory": false})),
            409,
        );
        assert_eq!(door.info()["pauseMode"], "full");
        door.connect_again(&json!({"timeout": 60, "memory": false}), 201);
        assert_eq!(door.sh("kill -0 $(cat pid) || echo dead").text(), "dead\n");
        // The older names of the route.
        door.pause(&json!({}));
        expect(&door.of_api("POST", "/resume", &timeout), 201);
        door.pause(&json!({}));
        expect(&door.of_api("DELETE", "", &Value::Null), 204);
        expect(&door.of_api("POST", "/connect", &timeout), 404);
        expect(&door.of_api("POST", "/pause", &json!({})), 404);
    });
}

#[test]
fn lists_have_paused_sandboxes_unless_a_client_asks_for_others() {
    on_a_host(|server| {
        let [runs, full, files] = [(); 3].map(|()| Door::open(server));
        full.pause(&json!({}));
        files.pause(&json!({"memory": false}));
        let list = |query: &str| -> Vec<(String, String)> {
            let reply = api(
                server,
                "GET",
                &format!("/v2/sandboxes?order=asc{query}"),
                &Value::Null,
            );
            let all = expect(&reply, 200);
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let all = all.as_array().unwrap().iter();
            all.map(|one| (text(&one["sandboxID"]), text(&one["state"])))
                .collect()
        };
        let shown = |door: &Door<'_>, state: &str| (door.id.clone(), state.to_owned());
        let running = [shown(&runs, "running")];
        let paused = [shown(&full, "paused"), shown(&files, "paused")];
        let all = [&running[..], &paused].concat();
        assert_eq!(list(""), all);
        assert_eq!(list("&state=running,paused"), all);
        assert_eq!(list("&state=running&state=paused"), all);
        assert_eq!(list("&state=running"), running);
        assert_eq!(list("&state=paused"), paused);
    });
}

#[test]
fn a_timeout_pauses_what_is_made_that_way() {
    on_a_host(|server| {
        for (more, mode) in [
            (json!({}), "full"),
            (json!({"autoPauseMemory": false}), "filesystem"),
        ] {
            let mut body = json!({"templateID": "base", "timeout": 1, "autoPause": true});
            for (name, value) in more.as_object().unwrap() {
                body[name] = value.clone();
            }
            let door = Door::with(server, &body);
            door.sh("echo kept > file");
            wait_until("it is paused", PATIENCE, || {
                door.info()["state"] == "paused"
            });
            let info = door.info();
            assert_eq!(info["pauseMode"], mode);
            assert_eq!(
                info["lifecycle"],
                json!({"onTimeout": "pause", "autoResume": false})
            );
            door.is_away();
            door.connect_again(&json!({"timeout": 60}), 201);
            assert_eq!(door.sh("cat file").text(), "kept\n");
        }
    });
}

#[test]
fn the_next_call_resumes_what_is_made_that_way() {
    on_a_host(|server| {
        let body = json!({
            "templateID": "base", "timeout": 60, "autoPause": true, "autoResume": {"enabled": true},
        });
        let door = Door::with(server, &body);
        assert_eq!(
            door.info()["lifecycle"],
            json!({"onTimeout": "pause", "autoResume": true})
        );
        for memory in [true, false] {
            door.pause(&json!({ "memory": memory }));
            assert_eq!(door.health(), 502, "a look resumes nothing");
            assert_eq!(door.sh("echo again").text(), "again\n");
            assert_eq!(door.info()["state"], "running");
        }
    });
}

#[test]
fn after_a_restart_sandboxes_are_paused_with_their_files() {
    if !is_root() {
        crate::skip!("host mode needs root");
    }
    let mut server = Server::host().start();
    let (id, token) = {
        let door = Door::open(&server);
        door.sh("echo kept > file");
        (door.id, door.token)
    };
    kill(Pid::from_raw(server.inner_pid()), Signal::SIGKILL).unwrap();
    server.wait_for_exit(PATIENCE);
    let place = server.place.take().unwrap();
    let next = crate::host::in_place_of(&place).start();
    let door = Door {
        server: &next,
        id,
        token,
    };
    let info = door.info();
    assert_eq!(
        (&info["state"], &info["pauseMode"]),
        (&json!("paused"), &json!("filesystem"))
    );
    door.is_away();
    door.connect_again(&json!({}), 201);
    assert_eq!(door.sh("cat file").text(), "kept\n");
}

#[test]
fn a_machine_is_not_paused() {
    let (_home, server) = super::machine();
    let door = Door::open(&server);
    expect(&door.of_api("POST", "/pause", &json!({})), 501);
    let body = json!({"templateID": "base", "autoPause": true});
    expect(&api(&server, "POST", "/v2/sandboxes", &body), 501);
    assert_eq!(door.sh("echo unharmed").text(), "unharmed\n");
}
