//! Running commands and dealing with processes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::events::{DocumentWriter, EventWriter};
use super::query::Query;
use super::wire::{self, CommandRequest, ENCODINGS, Encoding, ProcessDocument};
use super::{Answer, MAX_JSON_BYTES, received, require_body};
use crate::command::Input;
use crate::http::request::ClientWatch;
use crate::http::stream::StreamWriter;
use crate::http::{Body, Refusal, Request, Response};
use crate::process::registry::Started;
use crate::process::ring::Cursor;
use crate::process::{Client, Gone, Process};
use crate::sys::Events;
use crate::workspace::Workspace;

/// `POST exec`, and `POST processes`, which is the same in the background.
pub(super) fn exec(
    request: &mut Request<'_>,
    workspace: &Workspace,
    ping: Duration,
    background: bool,
) -> Answer {
    require_body(request)?;
    let body = request.body.read_all(MAX_JSON_BYTES).map_err(received)?;
    let CommandRequest {
        mut spec,
        encoding,
        on_disconnect,
    } = wire::command_request(&body)?;
    drop(body);
    spec.background |= background;
    let background = spec.background;
    if background && spec.input == Input::Empty {
        spec.input = Input::Open;
    }
    let started = workspace.processes.start(spec, &workspace.confinement)?;
    if background {
        let process = match started {
            Started::New(pump) => {
                let process = Arc::clone(pump.process());
                pump.detach();
                process
            }
            Started::Existing(process) => process,
        };
        return Ok(Response::json(&ProcessDocument::of(&process)));
    }
    Ok(match started {
        Started::New(pump) => event_stream(move |stream| {
            let mut events = EventWriter::new(stream, encoding, ping);
            events.start(pump.process(), false);
            pump.attend(&mut events, on_disconnect);
        }),
        Started::Existing(process) => {
            process.join();
            event_stream(move |stream| {
                let mut events = EventWriter::new(stream, encoding, ping);
                events.start(&process, true);
                if process
                    .follow(Cursor::default(), true, &mut events)
                    .is_err()
                {
                    process.leave(on_disconnect);
                }
            })
        }
    })
}

/// `GET processes`.
pub(super) fn list(workspace: &Workspace) -> Response {
    let processes = workspace.processes.list();
    Response::json(
        &processes
            .iter()
            .map(|process| ProcessDocument::of(process))
            .collect::<Vec<_>>(),
    )
}

/// `GET processes/{id}`.
pub(super) fn one(workspace: &Workspace, id: &str) -> Answer {
    Ok(Response::json(&ProcessDocument::of(&*find(workspace, id)?)))
}

/// `DELETE processes/{id}`.
pub(super) fn delete(workspace: &Workspace, id: &str) -> Answer {
    let killed = workspace
        .processes
        .delete(id)?
        .ok_or_else(|| no_process(id))?;
    Ok(Response::json(&json!({ "id": id, "killed": killed })))
}

/// `GET processes/{id}/logs`.
pub(super) fn logs(workspace: &Workspace, id: &str, query: &Query, ping: Duration) -> Answer {
    let live = query.flag("follow")?;
    let stdout = query.number("stdout_offset")?.unwrap_or(0);
    let stderr = query.number("stderr_offset")?.unwrap_or(0);
    let encoding = query
        .choice("encoding", &ENCODINGS)?
        .unwrap_or(Encoding::Utf8);
    let process = find(workspace, id)?;
    Ok(event_stream(move |stream| {
        let mut events = EventWriter::new(stream, encoding, ping);
        let _ = process.follow(Cursor::at(stdout, stderr), live, &mut events);
    }))
}

/// `GET processes/{id}/wait`.
pub(super) fn wait(workspace: &Workspace, id: &str, query: &Query, ping: Duration) -> Answer {
    let limit = query.seconds("timeout")?;
    let process = find(workspace, id)?;
    let body = Body::Stream(Box::new(move |stream: &mut StreamWriter| {
        if process
            .wait_with(&mut DocumentWriter { stream, ping }, limit)
            .is_ok()
        {
            let document = serde_json::to_vec(&ProcessDocument::of(&process)).unwrap_or_default();
            stream.push(|out| out.extend_from_slice(&document));
        }
    }));
    Ok(Response::new(200, body).with_header("Content-Type", "application/json"))
}

/// `POST processes/{id}/kill`.
pub(super) fn kill(request: &mut Request<'_>, workspace: &Workspace, id: &str) -> Answer {
    let body = request.body.read_all(MAX_JSON_BYTES).map_err(received)?;
    let signal = wire::signal_request(&body)?;
    let process = find(workspace, id)?;
    let signaled = process.signal(signal)?;
    Ok(Response::json(
        &json!({ "id": process.id(), "signal": signal, "signaled": signaled }),
    ))
}

/// `PUT processes/{id}/stdin`.
pub(super) fn stdin(
    request: &mut Request<'_>,
    workspace: &Workspace,
    id: &str,
    query: &Query,
) -> Answer {
    require_body(request)?;
    let eof = query.flag("eof")?;
    let mut writer = find(workspace, id)?.stdin()?;
    let mut client = Caller(request.body.watch_client());
    let mut buffer = vec![0; 64 * 1024];
    let mut written = 0;
    loop {
        let count = request.body.read(&mut buffer).map_err(received)?;
        if count == 0 {
            break;
        }
        writer.write(&buffer[..count], &mut client)?;
        written += count as u64;
    }
    if eof {
        writer.close();
    }
    Ok(Response::json(&json!({ "written": written, "eof": eof })))
}

/// The client of a request that is still being answered.
struct Caller(ClientWatch);

impl Client for Caller {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn interest(&self) -> Events {
        self.0.interest()
    }

    fn ready(&mut self, events: Events) -> Result<(), Gone> {
        self.0.ready(events).map_err(|_| Gone)
    }
}

fn find(workspace: &Workspace, id: &str) -> Result<Arc<Process>, Refusal> {
    workspace.processes.find(id).ok_or_else(|| no_process(id))
}

fn no_process(id: &str) -> Refusal {
    let text = format!("there is no process {id}; GET processes lists those that are known");
    Refusal::new(404, "not_found", text)
}

fn event_stream(write: impl FnOnce(&mut StreamWriter) + Send + 'static) -> Response {
    Response::new(200, Body::Stream(Box::new(write)))
        .with_header("Content-Type", "application/x-ndjson")
        .with_header("X-Accel-Buffering", "no")
        .with_header("Cache-Control", "no-store")
}
