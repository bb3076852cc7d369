//! Commands and processes: JSON to command specifications, processes to documents and events.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Answer, Call, event_stream, json_later};
use super::events::EventWriter;
use crate::api::json::command::{
    CommandRequest, ENCODINGS, Encoding, ProcessDocument, WaitDocument, command_request,
    resize_request, signal_request,
};
use crate::api::json::list::ListDocument;
use crate::codec::fields::Fields;
use crate::codec::object::object;
use crate::error::Error;
use crate::http::stream::StreamWriter;
use crate::http::{Refusal, Response};
use crate::limits::ledger::{Charge, Item};
use crate::process::ring::Cursor;
use crate::process::{Extent, Process};
use crate::workspace::Workspace;

/// What a command takes in a response, as a multiple of its size: JSON writes some characters as six.
const USES_OF_COMMAND: usize = 6;

/// `POST exec`.
pub(super) fn exec(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let request = request(call, workspace)?;
    if request.spec.background {
        return started(call, workspace, request);
    }
    let run = workspace.run_foreground(request.spec, request.on_disconnect)?;
    let ignored = call.ignored_member();
    let respond = move |mut events: EventWriter<'_>| {
        events.start(run.process(), run.is_attached(), &ignored);
        run.follow(&mut events, None);
    };
    Ok(process_stream(
        request.encoding,
        call.ping_interval(),
        respond,
    ))
}

/// `POST processes`: `exec` in the background.
pub(super) fn start(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let request = request(call, workspace)?;
    started(call, workspace, request)
}

fn request(call: &mut Call<'_, '_>, workspace: &Workspace) -> Result<CommandRequest, Refusal> {
    call.require_body()?;
    call.parse(|fields| {
        let mut request = command_request(fields)?;
        request.spec.user = user(fields, workspace)?;
        Ok(request)
    })
}

/// Whom a request asks to run as. Where there is one user only, the field is reported as ignored.
pub(super) fn user(
    fields: &mut Fields<'_>,
    workspace: &Workspace,
) -> Result<Option<String>, Error> {
    if workspace.has_own_root() {
        return fields.string("user");
    }
    fields.check_string("user").map(|()| None)
}

fn started(call: &mut Call<'_, '_>, workspace: &Workspace, request: CommandRequest) -> Answer {
    let process = workspace.start_background(request.spec)?;
    Ok(document(call, &process))
}

/// `GET processes`.
pub(super) fn list(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let pace = workspace.paced_later(call.interrupt());
    let processes = Arc::clone(&workspace.processes);
    let mut listed = 0..processes.next_number();
    let append_next = move |out: &mut Vec<u8>| {
        let Some((number, process)) = processes.first_in(listed.clone()) else {
            return Ok(false);
        };
        listed.start = number + 1;
        serde_json::to_writer(out, &ProcessDocument::of(&process, false)).map(|()| true)
    };
    Ok(ListDocument::array(append_next).paced(pace).respond())
}

/// `GET processes/{id}`.
pub(super) fn describe(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let process = workspace.process(id)?;
    Ok(document(call, &process))
}

/// The document of a process: with the whole command if there is room for it.
fn document(call: &Call<'_, '_>, process: &Process) -> Response {
    let room = room_for_command(call, process);
    Response::json(&ProcessDocument::of(process, room.is_some())).charged(room)
}

/// Room for the command of a process in a response that the client may not read.
fn room_for_command(call: &Call<'_, '_>, process: &Process) -> Option<Charge> {
    let bytes = process.command.size() * USES_OF_COMMAND;
    call.request.ledger.charge(Item::Responses, bytes).ok()
}

/// `DELETE processes/{id}`.
pub(super) fn delete(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let killed = workspace.delete_process(id)?;
    Ok(Response::json(&object! { "id": id, "killed": killed }))
}

/// `GET processes/{id}/logs`.
pub(super) fn logs(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    log_stream(call, workspace.process(id)?)
}

/// The log of a process as the query asks for it.
pub(super) fn log_stream(call: &Call<'_, '_>, process: Arc<Process>) -> Answer {
    let query = &call.query;
    let extent = if query.flag("follow")? {
        Extent::Exit
    } else {
        Extent::Held
    };
    let stdout = query.number("stdout_offset")?.unwrap_or(0);
    let stderr = query.number("stderr_offset")?.unwrap_or(0);
    let encoding = query.choice("encoding", &ENCODINGS)?.unwrap_or_default();
    let is_plain = query.flag("plain")?;
    let respond = move |mut events: EventWriter<'_>| {
        if is_plain {
            events = events.plain();
        }
        let _ = process.follow(Cursor::at(stdout, stderr), extent, &mut events);
    };
    Ok(process_stream(encoding, call.ping_interval(), respond))
}

/// `GET processes/{id}/wait`.
pub(super) fn wait(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let limit = call.query.seconds("timeout")?;
    let process = workspace.process(id)?;
    let room = room_for_command(call, &process);
    let is_whole = room.is_some();
    Ok(json_later(call.ping_interval(), move |client| {
        process.wait_with(client, limit).ok()?;
        Some(Response::json(&WaitDocument::of(&process, is_whole)).charged(room))
    }))
}

/// `POST processes/{id}/kill`.
pub(super) fn kill(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let (signal, group) = call.parse_optional(signal_request)?;
    let (process, signaled) = workspace.signal(id, signal, group)?;
    Ok(Response::json(
        &object! { "id": process.id.as_str(), "signal": signal, "signaled": signaled },
    ))
}

/// `POST processes/{id}/resize`.
pub(super) fn resize(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    call.require_body()?;
    let size = call.parse(resize_request)?;
    let process = workspace.resize(id, size)?;
    let (id, rows, columns) = (&process.id, size.rows(), size.columns());
    Ok(Response::json(
        &object! { "id": id.as_str(), "rows": rows, "cols": columns },
    ))
}

/// `PUT processes/{id}/stdin`.
pub(super) fn stdin(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    call.require_body()?;
    let eof = call.query.flag("eof")?;
    let written = workspace.write_stdin(id, &mut call.request.body, eof)?;
    Ok(Response::json(&object! { "written": written, "eof": eof }))
}

fn process_stream(
    encoding: Encoding,
    ping_interval: Duration,
    respond: impl FnOnce(EventWriter<'_>) + Send + 'static,
) -> Response {
    let write = move |stream: &mut StreamWriter| {
        respond(EventWriter::new(stream, encoding, ping_interval));
    };
    event_stream(Box::new(write))
}
