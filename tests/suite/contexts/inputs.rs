//! Code that asks: `input()` and its answers.

use serde_json::{Value, json};

use super::{Place, Ran, everywhere, needs};
use crate::fixture::{EventStream, PATIENCE, assert_error, wait_until};

/// Reads to the next question of the code.
#[track_caller]
fn question(stream: &mut EventStream, seen: &mut Vec<Value>) -> Value {
    loop {
        let event = stream.next_output().expect("it does not ask");
        seen.push(event.clone());
        if event["event"] == "input" {
            return event;
        }
    }
}

#[track_caller]
fn answer(place: Place<'_>, body: &Value) {
    let reply = place.post("contexts/a/input", body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json(), json!({ "sent": true }));
}

#[test]
fn a_question_is_an_event_and_a_request_answers_it() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import getpass\n\
            name = input('name? ')\nsecret = getpass.getpass('secret? ')\n\
            try: input()\nexcept EOFError as error: print('end', name, secret)\n\
            import sys; print(repr(sys.stdin.readline()))";
        let mut stream = place.begin("a", &json!({ "code": code, "allow_input": true }));
        let mut seen = Vec::new();
        let asked = question(&mut stream, &mut seen);
        assert_eq!(
            (&asked["prompt"], &asked["password"]),
            (&json!("name? "), &json!(false))
        );
        answer(place, &json!({ "value": "Ada \u{e9}\u{1f600}" }));
        let asked = question(&mut stream, &mut seen);
        assert_eq!(
            (&asked["prompt"], &asked["password"]),
            (&json!("secret? "), &json!(true))
        );
        answer(place, &json!({ "value": "" }));
        question(&mut stream, &mut seen);
        answer(place, &json!({ "eof": true }));
        question(&mut stream, &mut seen);
        answer(place, &json!({ "value": "line" }));
        seen.extend(stream);
        let ran = Ran::of(seen);
        ran.expect("completed", "kept");
        assert_eq!(ran.text("stdout"), "end Ada \u{e9}\u{1f600} \n'line\\n'\n");
    });
}

#[test]
fn nobody_answers_what_nobody_asks() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let value = json!({ "value": "x" });
        assert_error(&place.post("contexts/a/input", &value), 409, "not_asked");
        for bad in [
            json!({}),
            json!({ "value": 5 }),
            json!({ "value": "x", "eof": true }),
            json!({ "eof": false }),
        ] {
            assert_error(&place.post("contexts/a/input", &bad), 400, "bad_request");
        }
        assert_error(&place.post("contexts/none/input", &value), 404, "not_found");
        // Without stdin and without a client that may be asked.
        let ran = place.run("a", "input('name? ')");
        ran.expect("error", "kept");
        let error = ran.one("error");
        assert_eq!(error["name"], "EOFError");
        assert!(
            error["value"].as_str().unwrap().contains("allow_input"),
            "{error}"
        );
        // An answer is taken once.
        let mut stream = place.begin(
            "a",
            &json!({ "code": "input(); input()", "allow_input": true }),
        );
        let mut seen = Vec::new();
        question(&mut stream, &mut seen);
        answer(place, &value);
        question(&mut stream, &mut seen);
        answer(place, &value);
        seen.extend(stream);
        Ran::of(seen).expect("completed", "kept");
        assert_error(&place.post("contexts/a/input", &value), 409, "not_asked");
        // What is given beforehand is not asked for.
        let body = json!({ "code": "print(input(), input()); input()", "stdin": "one\ntwo" });
        let ran = place.execute("a", &body);
        assert_eq!(ran.text("stdout"), "one two\n");
        assert_eq!(ran.one("error")["name"], "EOFError");
        assert_eq!(ran.all("input").count(), 0);
    });
}

#[test]
fn a_question_can_be_interrupted_and_times_out() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "x = 5");
        let ask = json!({ "code": "input('? ')", "allow_input": true });
        let mut stream = place.begin("a", &ask);
        let mut seen = Vec::new();
        question(&mut stream, &mut seen);
        let done = place.post("contexts/a/interrupt", &json!({})).json();
        assert_eq!(done["ended"], true);
        seen.extend(stream);
        Ran::of(seen).expect("interrupted", "kept");
        assert_error(
            &place.post("contexts/a/input", &json!({ "value": "x" })),
            409,
            "not_asked",
        );
        let body = json!({ "code": "input('? ')", "allow_input": true, "timeout": 0.2 });
        place.execute("a", &body).expect("timeout", "kept");
        // The next question is not answered by an answer to this one.
        let mut stream = place.begin("a", &ask);
        let mut seen = Vec::new();
        question(&mut stream, &mut seen);
        answer(place, &json!({ "value": "mine" }));
        seen.extend(stream);
        assert_eq!(Ran::of(seen).result(), "'mine'");
        assert_eq!(place.value("a", "x"), "5");
        // The client that asked for it leaves.
        let mut stream = place.begin("a", &ask);
        question(&mut stream, &mut Vec::new());
        drop(stream);
        wait_until("it is idle", PATIENCE, || {
            place.context("a")["state"] == "idle"
        });
        assert_eq!(place.value("a", "x"), "5");
    });
}
