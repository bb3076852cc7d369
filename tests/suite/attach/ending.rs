//! The end of a process, of a viewer, of a sandbox: each is noticed at once.

use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use super::{Place, in_both_modes, in_both_modes_with};
use crate::fixture::{
    Connection, Frame, Mark, PATIENCE, Server, WebSocket, best_of, is_root, reset, wait_until,
};
use crate::skip;

/// The promise is 250 ms from the end of the main process. Other tests may be busy meanwhile, so the
/// first attempt that keeps it counts.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "a program and the test compare their clocks"
)]
fn the_exit_is_told_within_a_quarter_of_a_second_whoever_holds_the_terminal() {
    in_both_modes(|place| {
        let measure = |_| {
            let mark = Mark::new();
            // The main process becomes one that tells the time and ends.
            let id = place.terminal(&format!(
                "trap '' HUP; sleep {mark} & echo started; read line; exec date +%s%N"
            ));
            let mut socket = place.attach(&id, "");
            socket.read_until("started");
            mark.wait_for(1);
            socket.type_in("\n");
            let mut output = Vec::new();
            let told_at = loop {
                match socket.next_frame() {
                    Frame::Binary(bytes) => output.extend(bytes),
                    Frame::Text(text) if text.contains("\"exit\"") => break SystemTime::now(),
                    other => assert!(matches!(other, Frame::Text(_)), "{other:?}"),
                }
            };
            let text = String::from_utf8(output).unwrap();
            let ended_at: u64 = text.trim().parse().unwrap();
            let ended_at = SystemTime::UNIX_EPOCH + Duration::from_nanos(ended_at);
            assert_eq!(mark.pids().len(), 1, "the terminal is still held");
            place.delete(&id);
            told_at.duration_since(ended_at).unwrap()
        };
        let mut all = (0..20).map(measure);
        assert!(all.any(|time| time < Duration::from_millis(250)));
    });
}

/// One of the figures about terminals.
fn figure(server: &Server, name: &str) -> u64 {
    let accept = [("Accept", "application/json")];
    let reply = server.connect().request("GET", "/v1/metrics", &accept, b"");
    reply.json()[name].as_u64().unwrap()
}

/// How long the server serves a viewer that is gone, by a reset or by a close; `prepare` brings it into its state.
fn noticed_after(place: &Place<'_>, prepare: impl Fn(&Place<'_>) -> WebSocket) -> Duration {
    let by = |leave: fn(Connection)| {
        best_of(3, || {
            let socket = prepare(place);
            let begun = Instant::now();
            leave(socket.connection);
            wait_until("it is gone", PATIENCE, || {
                figure(place.server, "viewers") == 0
            });
            begun.elapsed()
        })
    };
    by(reset).max(by(drop))
}

/// No ping finds them: the next one is an hour away.
#[test]
fn a_viewer_that_goes_away_is_noticed_within_a_second() {
    in_both_modes_with(&[("SBX_PING_SECS", "3600")], |place| {
        let quiet = place.terminal("stty raw -echo; printf ready; exec sleep 1000");
        let loud = place.terminal("printf ready; exec yes");
        let quickest = [
            noticed_after(place, |place| {
                let mut socket = place.attach(&quiet, "");
                socket.read_until("ready");
                socket
            }),
            noticed_after(place, |place| {
                let mut socket = place.attach_raw(&quiet, "mode=ro");
                socket.read_until("ready");
                socket
            }),
            // It types what nobody reads, so its input is not read either.
            noticed_after(place, |place| {
                let mut socket = place.attach(&quiet, "");
                socket.read_until("ready");
                socket.type_in("x".repeat(256 * 1024));
                socket
            }),
            // It takes nothing of an output without end.
            noticed_after(place, |place| place.attach(&loud, "")),
        ];
        let slowest = quickest.iter().max().unwrap();
        assert!(*slowest < Duration::from_secs(1), "{quickest:?}");
        for id in [quiet, loud] {
            place.delete(&id);
        }
    });
}

/// Proxies on the way end connections that are silent. Its pongs are not read, so none is missed either.
#[test]
fn a_viewer_whose_input_waits_gets_pings() {
    in_both_modes_with(&[("SBX_PING_SECS", "1")], |place| {
        let id = place.terminal("stty raw -echo; printf ready; exec sleep 1000");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        socket.type_in("x".repeat(256 * 1024));
        let mut pings = 0;
        while pings < 4 {
            match socket.read_frame() {
                Frame::Ping(_) => pings += 1,
                Frame::Text(text) => assert!(text.contains("\"live\""), "{text}"),
                other => panic!("{other:?}"),
            }
        }
        place.delete(&id);
        while !matches!(socket.next_frame(), Frame::Close(1000, _)) {}
    });
}

#[test]
fn metrics_count_terminals_and_viewers() {
    in_both_modes(|place| {
        let figures = [
            "terminals",
            "viewers",
            "viewer_sent_bytes",
            "viewer_typed_bytes",
        ];
        let figures = || figures.map(|name| figure(place.server, name));
        assert_eq!(figures(), [0; 4]);
        let id = place.reader("-echo");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready\r\n");
        let watcher = place.attach(&id, "mode=ro&offset=-1");
        assert_eq!(figures(), [1, 2, 7, 0]);
        socket.type_in("text\n");
        socket.read_until("text\r\n");
        watcher.close();
        socket.close();
        wait_until("both are gone", PATIENCE, || figures()[1] == 0);
        // The watcher may have been too late for the text.
        let [terminals, _, sent, typed] = figures();
        assert_eq!((terminals, typed), (1, 5));
        assert!([13, 19].contains(&sent), "{sent}");
        place.delete(&id);
        wait_until("its terminal is closed", PATIENCE, || figures()[0] == 0);
        let reply = place.server.get("/v1/metrics").text();
        for line in [
            "sbx_terminals 0",
            "sbx_viewers 0",
            "sbx_viewer_typed_bytes_total 5",
        ] {
            assert!(reply.lines().any(|found| found == line), "{reply}");
        }
    });
}

#[test]
fn the_end_of_a_sandbox_is_told() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let place = Place::in_sandbox(&server);
    let id = place.reader("sane");
    let (mut socket, mut raw) = (place.attach(&id, ""), place.attach_raw(&id, ""));
    for socket in [&mut socket, &mut raw] {
        socket.read_until("ready");
    }
    let target = place.target("");
    let reply = server.delete(target.trim_end_matches('/'));
    assert_eq!(reply.json()["deleted"], true);
    let (_, events, close) = socket.read_to_end();
    assert_eq!(events.last().unwrap()["event"], "exit");
    assert_eq!(close.0, 1001);
    assert_eq!(raw.read_to_end().2.0, 1001);
}

/// The promise of a minute: what a viewer has pasted is dropped, and it may go on.
#[test]
#[ignore = "takes over a minute"]
fn a_paste_that_nobody_reads_for_a_minute_is_busy() {
    in_both_modes(|place| {
        let id = place.terminal("stty raw -echo; printf ready; exec sleep 1000");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        let begun = Instant::now();
        socket.type_in("x".repeat(256 * 1024));
        // Pings keep the connection, and its output goes on meanwhile.
        let error = loop {
            match socket.read_frame() {
                Frame::Ping(payload) => socket.send_frame(0x8a, &payload),
                // That the replay is over may be told after the output that was waited for.
                Frame::Text(text) if text.contains("\"live\"") => {}
                Frame::Text(text) => break text,
                other => panic!("{other:?}"),
            }
        };
        assert!(error.contains("stdin_busy"), "{error}");
        assert!(begun.elapsed() >= Duration::from_secs(60));
        socket.ask(json!({ "signal": "KILL" }));
        assert_eq!(socket.wait_for_event("exit")["signal"], 9);
    });
}
