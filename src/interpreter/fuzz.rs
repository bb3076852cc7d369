//! Fuzz test of what reads the bridge's frames, which code can forge: what is passed on to clients is one line of valid
//! JSON with the same value, whatever came.

use serde_json::Value;

use super::frame::{Incoming, Wire, announced, parse, whole};
use crate::fuzz::{bounded, check};
use crate::limits::ledger::{Budget, Charge, Item};

#[test]
fn a_frame_is_passed_on_as_one_line_of_json() {
    let tokens: &[&[u8]] = &[
        br#"{"type":"display","data":{"text/plain":"x"},"metadata":{}}"#,
        br#"{"type":"result","data":{"application/json":[1,{"a":null}]},"dropped":{"a":5}}"#,
        br#"{"type":"done","error":{"name":"E","value":"v","traceback":["a","b"]},"exit_code":3}"#,
        br#"{"type":"input","k":5,"prompt":"?","password":true}"#,
        br#""type":"sync","n":7"#,
        br#""display_id":"d","update":true"#,
        br"\ud83d\ude00",
        br"\udc00",
        br"\ud800\u0041",
        "\u{2028}\u{85}".as_bytes(),
        b"\\",
        b"\n",
        b"[[[[[[[[[[[[[[[[",
        b"done 5\n",
        b"int 130\n",
        b"begun\n",
        b"ready 5.2\n",
    ];
    check("frames", tokens, |input| {
        bounded(input, 64, || parse(Wire::Lines, input, &refuse).is_ok());
        arrives(input);
        let length = u32::try_from(input.len()).unwrap();
        let message = [&length.to_le_bytes(), input].concat();
        assert_eq!(
            whole(Wire::Frames, &message).ok(),
            Some(Some(message.len()))
        );
        assert_eq!(announced(Wire::Frames, &message), message.len());
        bounded(input, 64, || parse(Wire::Frames, &message, &refuse).is_ok());
        let ledger = Budget::new(1 << 30).whole();
        let admit = |bytes| ledger.charge(Item::Executions, bytes).ok();
        let Ok(Incoming::Bundle {
            bundle: Some(bundle),
            ..
        }) = parse(Wire::Frames, &message, &admit)
        else {
            return;
        };
        let told: Option<Value> = serde_json::from_slice(input).ok();
        let dropped = bundle.dropped.as_ref();
        for (name, passed_on) in [("data", &bundle.data), ("metadata", &bundle.metadata)]
            .into_iter()
            .chain(dropped.map(|dropped| ("dropped", dropped)))
        {
            let breaks = ['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}'];
            assert!(!passed_on.contains(breaks), "{passed_on:?}");
            let value: Value = serde_json::from_str(passed_on).expect("valid JSON");
            assert!(value.is_object());
            // Where the original is JSON that any parser takes, it is the same.
            let original = told.as_ref().map(|told| &told[name]);
            assert!(original.is_none_or(|original| original.is_null() || *original == value));
        }
    });
}

fn refuse(_: usize) -> Option<Charge> {
    None
}

/// A message is found as soon as its last byte has come, and not before.
fn arrives(input: &[u8]) {
    for wire in [Wire::Frames, Wire::Lines] {
        let Ok(Some(length)) = whole(wire, input) else {
            continue;
        };
        assert!((1..=input.len()).contains(&length));
        assert_eq!(whole(wire, &input[..length]).ok(), Some(Some(length)));
        assert_eq!(whole(wire, &input[..length - 1]).ok(), Some(None));
        let _ = parse(wire, &input[..length], &refuse);
    }
}
