//! The endpoint for MCP clients beside the routes of REST, which do the same work. The floor of each row is REST on the
//! same server.

use super::Plan;
use std::io::Write;

use super::client::{Client, request};
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Table, in_turns};

/// Most microseconds that a call of a tool takes more than its request of REST.
const MORE: f64 = 100.0;

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let [mut own, mut rest] = [(); 2].map(|()| server.connect());
    let [ours, floor] = in_turns(
        plan.samples,
        |samples| {
            samples.time(|| {
                call(
                    &mut own,
                    "run",
                    r#"{"cmd":["/bin/true"]}"#,
                    "\"exit_code\":0",
                );
            });
        },
        |samples| samples.time(|| rest.run_true()),
    );
    let (limit, note) = (Limit::AtMost(1.0, MORE), "POST exec, in turn with it");
    table.times("MCP: run, /bin/true", &ours, &floor, limit, note);

    let path = scratch.path("small");
    std::fs::write(&path, "a small file\n").unwrap();
    let path = path.display();
    let arguments = format!(r#"{{"path":"{path}"}}"#);
    let target = format!("/v1/files/read?path={path}");
    let [ours, floor] = in_turns(
        plan.samples,
        |samples| samples.time(|| call(&mut own, "read_file", &arguments, "a small file")),
        |samples| {
            samples.time(|| {
                rest.send("GET", &target, 0, b"");
                assert_eq!(rest.reply(), "a small file\n");
            });
        },
    );
    let (limit, note) = (Limit::AtMost(1.0, MORE), "GET files/read, in turn with it");
    table.times("MCP: read_file", &ours, &floor, limit, note);
}

/// Calls a tool as clients of the present revision do.
fn call(client: &mut Client, tool: &str, arguments: &str, expected: &str) {
    let headers = format!(
        "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
         MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: {tool}\r\n"
    );
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments},"_meta":{{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{{}}}}}}}}"#
    );
    client
        .stream
        .write_all(&request(
            "POST",
            "/mcp",
            &headers,
            body.len(),
            body.as_bytes(),
        ))
        .unwrap();
    let reply = client.reply();
    assert!(reply.contains(expected), "{reply}");
}
