//! Malformed framing, request lines and chunked bodies are refused, and nothing behind them runs.

use super::{Trap, converse, joined, lossy};
use crate::fixture::{Server, parse_replies};

#[test]
fn every_dangerous_framing_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let lines: &[&[u8]] = &[
        // Content-Length that is not one plain number.
        b"Content-Length: -5",
        b"Content-Length: +5",
        b"Content-Length: zz",
        b"Content-Length: 5zz",
        b"Content-Length: 5 5",
        b"Content-Length: 5, 6",
        b"Content-Length: 6, 5",
        b"Content-Length: 0x5",
        b"Content-Length: 5.0",
        b"Content-Length: 5e0",
        b"Content-Length: 5;",
        b"Content-Length: ",
        b"Content-Length: ,",
        b"Content-Length: \"5\"",
        b"Content-Length: \xd9\xa5",
        b"Content-Length: 5\x0b",
        // Two of them that differ.
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 6\r\nContent-Length: 5",
        b"Content-Length: 5\r\nX: y\r\ncontent-length: 50",
        b"Content-Length: 5\r\nContent-Length: ",
        b"Content-Length: 5\r\nContent-Length: -5",
        // Two framings at once.
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0",
        b"Content-Length: 5\r\nTransfer-Encoding: identity",
        b"Content-Length: 5\r\nTransfer-Encoding: ",
        // Transfer codings that are not chunked, or only look like it.
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, gzip",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunkedx",
        b"Transfer-Encoding: \"chunked\"",
        b"Transfer-Encoding: chunked;a=b",
        b"Transfer-Encoding: chunked\x0b",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding: \xa0chunked",
        b"Transfer-Encoding: ",
        // White space where a name and its colon must touch.
        b"Content-Length : 5",
        b"Content-Length\t: 5",
        b"Transfer-Encoding : chunked",
        b"Content-Length: 5\r\nX : y",
        // Folded lines, even ones that fold nothing.
        b"Content-Length: 5\r\nX: y\r\n z",
        b"Content-Length: 5\r\nX: y\r\n\tz",
        b"Content-Length: 5\r\nX: y\r\n \r\nZ: z",
        b"X: y\r\n Content-Length: 5",
        b" Content-Length: 5",
        // Bare CR and NUL.
        b"Content-Length: 5\r\nX: a\rb",
        b"Content-Length: 5\r\nX: a\r",
        b"Content-Length: 5\r\n\rX: a",
        b"Content-Length: 5\r\nX\r: a",
        b"Content-Length: 5\rX: a",
        b"Content-Length: 5\r",
        b"Content-Length: 5\r\nX: a\0b",
        b"Content-Length: 5\r\nX\0: a",
        b"Content-Length: 5\0",
        // Not a header line at all.
        b"Content-Length: 5\r\nno colon here",
        b"Content-Length: 5\r\n: no name",
        b"Content-Length: 5\r\nX Y: z",
        b"Content-Length: 5\r\nX(Y): z",
        b"Content-Length: 5\r\nX,Y: z",
        b"Content-Length: 5\r\n\"X\": z",
        b"Content-Length: 5\r\n\xc3\xa9: z",
    ];
    for line in lines {
        let request = joined(&[&trap.victim_head(line), b"12345"]);
        trap.expect_refusal(&server, &lossy(line), &request, &[400]);
    }
}

#[test]
fn a_length_beyond_every_number_is_refused() {
    let server = Server::start();
    let trap = Trap::new();
    // 2^64 + 5 is 5 to whoever lets it wrap around.
    for length in [
        "18446744073709551621",
        "99999999999999999999999999999999999999",
    ] {
        let line = format!("Content-Length: {length}");
        let request = joined(&[&trap.victim_head(line.as_bytes()), b"12345"]);
        trap.expect_refusal(&server, &line, &request, &[400, 413]);
    }
}

#[test]
fn every_malformed_request_line_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let lines: &[&[u8]] = &[
        b"GET",
        b"GET ",
        b"GET /health",
        b"GET /health ",
        b"GET  /health HTTP/1.1",
        b"GET /health  HTTP/1.1",
        b" GET /health HTTP/1.1",
        b"\tGET /health HTTP/1.1",
        b"GET\t/health\tHTTP/1.1",
        b"GET /health HTTP/1.1 ",
        b"GET /health HTTP/1.1 x",
        b"GET /hea lth HTTP/1.1",
        b"GET /hea\tlth HTTP/1.1",
        b"GET /hea\0lth HTTP/1.1",
        b"GET /hea\rlth HTTP/1.1",
        b"GET /health\r HTTP/1.1",
        b"GET /health HTTP/1.1\r",
        b"GET /health HTTP/1.1\0",
        b"\0GET /health HTTP/1.1",
        b"GET health HTTP/1.1",
        b"GET ?x HTTP/1.1",
        b"G@T /health HTTP/1.1",
        b"GET, /health HTTP/1.1",
        b"G\xc3\x89T /health HTTP/1.1",
        b"/health HTTP/1.1",
        b"GET /health http/1.1",
        b"GET /health HTTP/1",
        b"GET /health HTTP/1.",
        b"GET /health HTTP/11",
        b"GET /health HTTP/1.1.1",
        b"GET /health HTTP/+1.1",
        b"GET /health HTTP/a.b",
        b"GET /health HTTX/1.1",
        b"GET /health HTTP 1.1",
        b"GET /health HTTP/0.9",
        b"GET /health HTTP/2.0",
        b"PRI * HTTP/2.0",
        b"Host: first",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ];
    for line in lines {
        let request = joined(&[line, b"\r\nHost: sandbox\r\n\r\n"]);
        trap.expect_refusal(&server, &lossy(line), &request, &[400]);
    }
}

#[test]
fn every_malformed_chunked_body_is_refused_and_nothing_behind_it_runs() {
    let server = Server::start();
    let trap = Trap::new();
    let bodies: &[&[u8]] = &[
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5x\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5.\r\nhello\r\n0\r\n\r\n",
        b"5,5\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b";a=b\r\nhello\r\n0\r\n\r\n",
        // Sizes that only fit after wrapping around.
        b"10000000000000005\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        // Lines that end otherwise than by CR LF.
        b"5\nhello\r\n0\r\n\r\n",
        b"5\rhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"5;a\0b\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\r0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"5\r\nhelloX\n0\r\n\r\n",
        b"5\r\nhello\rX0\r\n\r\n",
        b"5\r\nhello world\r\n0\r\n\r\n",
        // Trailers are header lines, and as strict.
        b"5\r\nhello\r\n0\r\nno colon\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX : y\r\n\r\n",
        b"5\r\nhello\r\n0\r\n folded: y\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: y\r\n z\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: a\rb\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX: a\0b\r\n\r\n",
        b"5\r\nhello\r\n0\r\n: y\r\n\r\n",
        // The next request is not a trailer.
        b"5\r\nhello\r\n0\r\n",
    ];
    for body in bodies {
        let head = trap.victim_head(b"Transfer-Encoding: chunked");
        let request = joined(&[&head, body]);
        if body.ends_with(b"0\r\n") && !body.ends_with(b"\r\n\r\n") {
            // Not complete without what follows: the smuggled request line is the bad trailer.
            let received = converse(&server, &joined(&[&request, &trap.smuggled()]));
            trap.check_refusal(&lossy(body), &received, &[400]);
        } else {
            trap.expect_refusal(&server, &lossy(body), &request, &[400]);
        }
    }
}

#[test]
fn endless_chunk_extensions_and_trailers_are_refused() {
    let server = Server::start();
    let trap = Trap::new();
    let head = trap.victim_head(b"Transfer-Encoding: chunked");
    let long = vec![b'a'; 200_000];
    let extension = joined(&[&head, b"5;", &long, b"\r\nhello\r\n0\r\n\r\n"]);
    trap.expect_refusal(&server, "a long extension", &extension, &[400, 431]);
    let trailer = joined(&[&head, b"5\r\nhello\r\n0\r\nX: ", &long, b"\r\n\r\n"]);
    trap.expect_refusal(&server, "a long trailer", &trailer, &[400, 431]);
    let trailers = joined(&[
        &head,
        b"5\r\nhello\r\n0\r\n",
        &b"X: y\r\n".repeat(40_000),
        b"\r\n",
    ]);
    trap.expect_refusal(&server, "many trailers", &trailers, &[400, 431]);
    let digits = joined(&[&head, &vec![b'0'; 200_000], b"5\r\nhello\r\n0\r\n\r\n"]);
    trap.expect_refusal(&server, "a long size", &digits, &[400, 431]);
}

#[test]
fn a_bare_line_feed_never_puts_a_connection_out_of_step() {
    // Whether a bare LF ends a header line is the server's choice, but it is one choice: the
    // bytes behind it are never read both as a header and as a request.
    let server = Server::start();
    let trap = Trap::new();
    for line in [
        "X: a\nContent-Length: 5",
        "X: a\n\nContent-Length: 5",
        "\nContent-Length: 5",
    ] {
        let request = joined(&[
            &trap.victim_head(line.as_bytes()),
            b"12345",
            &trap.smuggled(),
        ]);
        let replies = parse_replies(&converse(&server, &request)).unwrap();
        assert_eq!(replies.len(), 1, "{line:?}: {replies:?}");
        assert_eq!(replies[0].header("connection"), Some("close"), "{line:?}");
        assert!(!trap.has("smuggled"), "{line:?}");
    }
}
