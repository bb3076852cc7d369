//! Interpreter contexts: JSON to executions, executions to documents and events.

use std::io::Write;
use std::sync::Arc;

use super::call::{Answer, Call, event_stream};
use super::events::EventWriter;
use super::simple::SimpleWriter;
use crate::api::json::command::{ENCODINGS, Encoding};
use crate::api::json::context::{
    ContextDocument, EndEvent, ExecuteRequest, ExecutionDocument, answer_request, context_request,
    execute_request, interrupt_request,
};
use crate::api::json::list::ListDocument;
use crate::client::{Client, Disconnected};
use crate::codec::object::object;
use crate::codec::{base64, escape};
use crate::error::{self, Error, Kind};
use crate::http::Response;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::interpreter::event::{Bundle, CodeError, Event};
use crate::interpreter::{Context, Execution, ExecutionSubscriber};
use crate::process::ring::Stream;
use crate::spec::language::Language;
use crate::workspace::Workspace;

/// `GET languages`.
pub(super) fn languages(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let documents = Language::ALL.iter().map(|language| {
        let available = workspace.has_program(language.program())?;
        Ok(object! { "language": language.name(), "available": available, "backends": language.backends() })
    });
    Ok(Response::json(
        &documents.collect::<error::Result<Vec<_>>>()?,
    ))
}

/// `POST contexts`.
pub(super) fn create(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let (language, spec) = call.parse_optional(|fields| {
        let (language, mut spec) = context_request(fields)?;
        spec.user = super::commands::user(fields, workspace)?;
        Ok((language, spec))
    })?;
    let mut interrupt = call.interrupt();
    let context = workspace.contexts.create(language, spec, &mut interrupt)?;
    Ok(document(&context))
}

/// `GET contexts`.
pub(super) fn list(_: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let mut contexts = workspace.contexts.list().into_iter();
    let append_next = move |out: &mut Vec<u8>| {
        let Some(context) = contexts.next() else {
            return Ok(false);
        };
        serde_json::to_writer(out, &ContextDocument::of(&context)).map(|()| true)
    };
    Ok(ListDocument::array(append_next).respond())
}

/// `GET contexts/{id}`.
pub(super) fn describe(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    Ok(document(&workspace.contexts.find(id)?))
}

/// `DELETE contexts/{id}`.
pub(super) fn delete(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let deleted = workspace.contexts.delete(id)?;
    Ok(Response::json(&object! { "id": id, "deleted": deleted }))
}

/// `POST contexts/{id}/execute`.
pub(super) fn execute_in(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    call.require_body()?;
    let mut request = call.parse(execute_request)?;
    if request.context.network.is_some() {
        let text = "network is chosen when a context is made, by POST contexts";
        return Err(Error::invalid(text).into());
    }
    // What would choose another one.
    (request.language, request.is_stateless) = (None, false);
    request.context.id = Some(id.to_owned());
    run(call, workspace, request)
}

/// `POST execute`.
pub(super) fn execute(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let request = call.parse(execute_request)?;
    run(call, workspace, request)
}

/// `POST /execute`, outside of `/v1`.
pub(super) fn execute_simply(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let mut request = call.parse(execute_request)?;
    request.is_simple = true;
    run(call, workspace, request)
}

fn run(call: &Call<'_, '_>, workspace: &Workspace, request: ExecuteRequest) -> Answer {
    let (encoding, is_simple) = (request.encoding, request.is_simple);
    let asked = workspace.execute_code(
        request.language,
        request.context,
        request.spec,
        request.is_stateless,
        &mut call.interrupt(),
    )?;
    let ping_interval = call.ping_interval();
    let ignored = call.ignored_member();
    let write = move |stream: &mut StreamWriter| {
        if is_simple {
            let client = StreamClient::new(stream, SimpleWriter::PING, ping_interval);
            asked.follow(&mut SimpleWriter::new(client));
        } else {
            let client = StreamClient::new(stream, EventWriter::PING, ping_interval);
            let mut writer =
                ExecutionWriter::new(client, asked.context(), &asked.execution, encoding);
            writer.ignored = ignored;
            asked.follow(&mut writer);
        }
    };
    Ok(event_stream(Box::new(write)))
}

/// `POST contexts/{id}/interrupt`.
pub(super) fn interrupt(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let (execution, kill_after) = call.parse_optional(interrupt_request)?;
    let context = workspace.contexts.find(id)?;
    let interrupted = context.interrupt(execution.as_deref(), kill_after, &mut call.interrupt())?;
    Ok(Response::json(&object! {
        "interrupted": interrupted.was_sent,
        "execution": interrupted.execution,
        "ended": interrupted.has_ended,
    }))
}

/// `POST contexts/{id}/restart`.
pub(super) fn restart(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let context = workspace.contexts.find(id)?;
    context.restart(&mut call.interrupt())?;
    Ok(document(&context))
}

/// `POST contexts/{id}/input`.
pub(super) fn input(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    call.require_body()?;
    let value = call.parse(answer_request)?;
    workspace.contexts.find(id)?.answer(value)?;
    Ok(Response::json(&object! { "sent": true }))
}

/// `GET contexts/{id}/executions`.
pub(super) fn executions(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let context = workspace.contexts.find(id)?;
    let executions = context.executions();
    let documents = executions
        .iter()
        .map(|execution| ExecutionDocument::of(&context, execution));
    Ok(Response::json(&documents.collect::<Vec<_>>()))
}

/// `GET contexts/{id}/executions/{id}`.
pub(super) fn describe_execution(
    _: &Call<'_, '_>,
    workspace: &Workspace,
    context: &str,
    execution: &str,
) -> Answer {
    let context = workspace.contexts.find(context)?;
    let execution = context.execution(execution)?;
    Ok(Response::json(&ExecutionDocument::of(&context, &execution)))
}

/// `GET contexts/{id}/executions/{id}/events`.
pub(super) fn events(
    call: &Call<'_, '_>,
    workspace: &Workspace,
    context: &str,
    execution: &str,
) -> Answer {
    let query = &call.query;
    let next = query
        .number("after")?
        .map_or(0, |after: u64| after.saturating_add(1));
    let is_live = query.flag("follow")?;
    let encoding = query.choice("encoding", &ENCODINGS)?.unwrap_or_default();
    let context = workspace.contexts.find(context)?;
    let execution = context.execution(execution)?;
    let ping_interval = call.ping_interval();
    let write = move |stream: &mut StreamWriter| {
        let client = StreamClient::new(stream, EventWriter::PING, ping_interval);
        let mut writer = ExecutionWriter::new(client, &context, &execution, encoding);
        // The client that leaves was only looking.
        let _ = execution.follow(next, is_live, false, &mut writer);
    };
    Ok(event_stream(Box::new(write)))
}

/// `GET contexts/{id}/logs`.
pub(super) fn logs(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let context = workspace.contexts.find(id)?;
    let process = context.process().ok_or_else(|| {
        Error::new(
            Kind::NotRunning,
            format!("context {id} has no interpreter yet"),
        )
    })?;
    super::commands::log_stream(call, process)
}

fn document(context: &Arc<Context>) -> Response {
    Response::json(&ContextDocument::of(context))
}

/// Writes what happens in an execution as events.
struct ExecutionWriter<'a> {
    client: StreamClient<'a>,
    context: Arc<Context>,
    execution: Arc<Execution>,
    encoding: Encoding,
    /// The member of the start that tells what of the request was ignored.
    ignored: String,
}

impl<'a> ExecutionWriter<'a> {
    fn new(
        client: StreamClient<'a>,
        context: &Arc<Context>,
        execution: &Arc<Execution>,
        encoding: Encoding,
    ) -> Self {
        Self {
            client,
            context: Arc::clone(context),
            execution: Arc::clone(execution),
            encoding,
            ignored: String::new(),
        }
    }

    /// Adds a line: the name of the event, its number, and what `write` adds after a comma.
    fn line(&mut self, name: &str, number: u64, write: impl FnOnce(&mut Vec<u8>)) {
        self.client.push(|out| {
            raw(out, &format!("{{\"event\":\"{name}\",\"seq\":{number}"));
            write(out);
            raw(out, "}\n");
        });
    }

    fn output(
        &mut self,
        number: u64,
        stream: Stream,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Disconnected> {
        let (name, bytes) = (stream.name(), data.len());
        let head = format!(
            "{{\"event\":\"{name}\",\"seq\":{number},\"offset\":{offset},\"bytes\":{bytes}"
        );
        let client = &mut self.client;
        match self.encoding {
            Encoding::Utf8 => client.push_text(&(head + ",\"data\":\""), data, "\"}\n"),
            Encoding::Base64 => {
                let head = head + ",\"data_b64\":\"";
                client.push_value(&head, data, "\"}\n", false, base64::append)
            }
        }
    }

    fn bundle(&mut self, number: u64, bundle: &Bundle) -> Result<(), Disconnected> {
        let name = if bundle.is_main { "result" } else { "display" };
        let client = &mut self.client;
        client.push(|out| {
            raw(
                out,
                &format!(
                    "{{\"event\":\"{name}\",\"seq\":{number},\"is_main\":{}",
                    bundle.is_main
                ),
            );
            if bundle.is_main {
                raw(
                    out,
                    &format!(",\"execution_count\":{}", self.execution.count()),
                );
            }
        });
        if let Some(id) = &bundle.display_id {
            client.push_text(",\"display_id\":\"", id.as_bytes(), "\"")?;
        }
        if bundle.is_update {
            client.push(|out| raw(out, ",\"update\":true"));
        }
        let mut json = |name: &str, json: &str, after: &str| {
            client.push_value(name, json.as_bytes(), after, true, Vec::extend_from_slice)
        };
        json(",\"data\":", &bundle.data, "")?;
        json(",\"metadata\":", &bundle.metadata, "")?;
        if let Some(dropped) = &bundle.dropped {
            json(",\"dropped\":", dropped, "")?;
        }
        client.push(|out| raw(out, "}\n"));
        Ok(())
    }

    fn error(&mut self, number: u64, error: &CodeError) -> Result<(), Disconnected> {
        let client = &mut self.client;
        let head = format!("{{\"event\":\"error\",\"seq\":{number},\"name\":\"");
        client.push_text(&head, error.name.as_bytes(), "\",\"value\":\"")?;
        client.push_text("", error.value.as_bytes(), "\",\"traceback\":[")?;
        for (index, line) in error.traceback.iter().enumerate() {
            let before = if index == 0 { "\"" } else { ",\"" };
            client.push_text(before, line.as_bytes(), "\"")?;
        }
        client.push(|out| raw(out, "]}\n"));
        Ok(())
    }
}

impl ExecutionSubscriber for ExecutionWriter<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn event(&mut self, number: u64, event: &Event, output: &[u8]) -> Result<(), Disconnected> {
        match event {
            Event::Queued { position } => {
                let (id, position) = (self.execution.id.clone(), *position);
                self.line("queued", number, |out| {
                    text(out, "execution", id.as_bytes());
                    raw(out, &format!(",\"position\":{position}"));
                });
            }
            Event::Start(start) => {
                let (execution, context) = (self.execution.id.clone(), Arc::clone(&self.context));
                let ignored = std::mem::take(&mut self.ignored);
                self.line("start", number, |out| {
                    text(out, "execution", execution.as_bytes());
                    text(out, "context", context.id().as_bytes());
                    let [stdout, stderr] = start.offsets;
                    // Writing to memory does not fail.
                    let _ = write!(
                        out,
                        ",\"execution_count\":{},\"generation\":{},\"fresh\":{},\"pid\":{},\
                         \"stdout_offset\":{stdout},\"stderr_offset\":{stderr}",
                        start.count, start.generation, start.is_fresh, start.pid
                    );
                    raw(out, &ignored);
                });
            }
            Event::Output { stream, offset, .. } => {
                return self.output(number, *stream, *offset, output);
            }
            Event::Bundle(bundle) => return self.bundle(number, bundle),
            Event::Clear { wait } => {
                self.line("clear", number, |out| {
                    raw(out, &format!(",\"wait\":{wait}"));
                });
            }
            Event::Input { prompt, password } => {
                let head = format!("{{\"event\":\"input\",\"seq\":{number},\"prompt\":\"");
                let tail = format!("\",\"password\":{password}}}\n");
                return self.client.push_text(&head, prompt.as_bytes(), &tail);
            }
            Event::Error(error) => return self.error(number, error),
            Event::Dropped { stream, bytes } => self.line("dropped", number, |out| {
                raw(
                    out,
                    &format!(",\"stream\":\"{}\",\"bytes\":{bytes}", stream.name()),
                );
            }),
            Event::End(end) => {
                let event = EndEvent::of(number, end);
                self.client.push(|out| {
                    // Writing to memory does not fail.
                    let _ = serde_json::to_writer(&mut *out, &event);
                    out.push(b'\n');
                });
            }
        }
        Ok(())
    }

    fn dropped(&mut self, first: u64, last: u64) -> Result<(), Disconnected> {
        self.client.push(|out| {
            raw(
                out,
                &format!("{{\"event\":\"dropped\",\"from_seq\":{first},\"to_seq\":{last}}}\n"),
            );
        });
        Ok(())
    }
}

fn raw(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

/// Adds a member with a text.
fn text(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    raw(out, &format!(",\"{name}\":\""));
    escape::append(out, value);
    raw(out, "\"");
}
