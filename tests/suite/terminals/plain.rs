//! Logs without control sequences, for readers without a screen.

use serde_json::{Value, json};

use super::everywhere;
use crate::fixture::{events_of, output_of};

const COLOURED: &str = r"printf '\033]0;title\007\033[1;31mred\033[0m \033(Bok\r\n10%%\r\033[K20%%\r\n\342\230\203 done\n'";

#[test]
fn plain_logs_have_the_text_and_offsets_of_all_bytes() {
    everywhere(|place| {
        let screen = place.open(&json!({ "cmd": COLOURED, "pty": true }));
        let total = screen.end()["stdout_bytes"].as_u64().unwrap();
        let expected = "red ok\n10%\n20%\n\u{2603} done\n";
        for query in [
            "?plain=1",
            "?plain=1&follow=1",
            "?plain=true&encoding=base64",
        ] {
            let reply = place.get(&screen.route(&format!("/logs{query}")));
            let mut events = events_of(&reply.body);
            let mut text = Vec::new();
            let mut offset = 0;
            assert_eq!(events.pop().unwrap()["event"], "exit");
            for event in &events {
                assert_eq!(event["offset"], offset, "{event}");
                offset += event["bytes"].as_u64().unwrap();
                match event["data_b64"].as_str() {
                    Some(data) => text.extend(crate::fixture::decode_base64(data)),
                    None => text.extend_from_slice(event["data"].as_str().unwrap().as_bytes()),
                }
            }
            assert_eq!(String::from_utf8(text).unwrap(), expected, "{query}");
            assert_eq!(offset, total, "the events count every raw byte");
        }
        for query in ["", "?plain=0"] {
            let reply = place.get(&screen.route(&format!("/logs{query}")));
            let output = output_of(&events_of(&reply.body), "stdout", 0);
            assert!(output.data.starts_with(b"\x1b]0;title\x07"));
        }
    });
}

#[test]
fn a_reader_that_comes_back_is_never_in_the_middle_of_a_sequence() {
    everywhere(|place| {
        let script = r"printf 'one \033[3'; read line; printf '1mtwo\r'; read line; printf '\nthree'; read line";
        let screen = place.open(&json!({ "cmd": format!("stty -echo; {script}"), "pty": true }));
        let mut offset = 0;
        let mut text = String::new();
        for part in ["one ", "two", "\nthree"] {
            crate::fixture::wait_until("the next part", crate::fixture::PATIENCE, || {
                let query = format!("/logs?plain=1&stdout_offset={offset}");
                let events = events_of(&place.get(&screen.route(&query)).body);
                for event in events {
                    if event["event"] == "stdout" {
                        assert_eq!(event["offset"], offset);
                        text.push_str(event["data"].as_str().unwrap());
                    } else if event["event"] == "end" {
                        offset = event["stdout_offset"].as_u64().unwrap();
                    }
                }
                text.ends_with(part)
            });
            screen.press("\n");
        }
        assert_eq!(text, "one two\nthree");
        screen.end();
    });
}

#[test]
fn a_follower_gets_text_as_it_comes() {
    everywhere(|place| {
        let script = r"stty -echo; printf '\033[1mfirst\033[0m'; read line; printf 'second\033['";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        let logs = screen.route("/logs?plain=1&follow=1");
        let mut stream = place.stream("GET", &logs, &Value::Null);
        let first = stream.next_output().unwrap();
        assert_eq!(
            (&first["data"], &first["offset"]),
            (&json!("first"), &json!(0))
        );
        screen.press("\n");
        let second = stream.next_output().unwrap();
        assert_eq!(second["data"], "second");
        let end =
            |event: &Value| event["offset"].as_u64().unwrap() + event["bytes"].as_u64().unwrap();
        assert_eq!(second["offset"], end(&first));
        let rest = stream.next_output().unwrap();
        assert_eq!((&rest["data"], &rest["bytes"]), (&json!(""), &json!(2)));
        assert_eq!(stream.next_output().unwrap()["event"], "exit");
    });
}
