//! Watches: queries and JSON to settings, changes to events.

use std::time::Duration;

use serde_json::{Value, json};

use super::call::{Answer, Call, event_stream};
use crate::api::json::file::type_word;
use crate::api::json::watch::watch_request;
use crate::client::Client;
use crate::codec::object::object;
use crate::error::Error;
use crate::files::name::{FilePath, show};
use crate::files::search::Matcher;
use crate::files::watch::{Ended, Settings, TreeChange, TreeEvent};
use crate::http::Response;
use crate::http::stream::{StreamClient, StreamWriter};
use crate::workspace::{WatchSubscriber, Workspace};

/// `GET files/watch`.
pub(super) fn watch(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    let query = &call.query;
    let missing = || Error::invalid("the parameter path is missing");
    let settings = Settings {
        path: FilePath::new(query.value("path")?.ok_or_else(missing)?)?,
        recursive: query.flag("recursive")?,
        exclude: Matcher::new(query.values("exclude"))?,
    };
    let path = settings.path.clone();
    let watch = workspace.watch(&settings, &mut call.interrupt())?;
    Ok(watch_stream(call.ping_interval(), path, move |events| {
        events.line(&object! { "event": "watching", "dirs": watch.directories() });
        watch.run(None, events);
    }))
}

/// `POST files/watches`.
pub(super) fn register(call: &mut Call<'_, '_>, workspace: &Workspace) -> Answer {
    call.require_body()?;
    let (settings, id) = call.parse(watch_request)?;
    let watch = workspace.register_watch(&settings, id, &mut call.interrupt())?;
    Ok(Response::json(
        &object! { "id": watch.id.as_str(), "dirs": watch.directories },
    ))
}

/// `GET files/watches/{id}/events`.
pub(super) fn events(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let after = call.query.number("after")?.unwrap_or(0);
    let limit = call.query.seconds("timeout")?.unwrap_or_default();
    let path = workspace.watches.find(id)?.path().clone();
    let tell = workspace.read_watch(id, after, limit)?;
    Ok(watch_stream(call.ping_interval(), path, |events| {
        tell(events);
    }))
}

/// `DELETE files/watches/{id}`.
pub(super) fn remove(_: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    workspace.watches.remove(id)?;
    Ok(Response::json(&object! { "id": id, "deleted": true }))
}

fn watch_stream(
    ping_interval: Duration,
    path: FilePath,
    respond: impl FnOnce(&mut WatchEvents<'_>) + Send + 'static,
) -> Response {
    let write = move |stream: &mut StreamWriter| {
        let client = StreamClient::new(stream, b"{\"event\":\"ping\"}\n", ping_interval);
        respond(&mut WatchEvents { client, path });
    };
    event_stream(Box::new(write))
}

/// Writes changes as events.
struct WatchEvents<'a> {
    client: StreamClient<'a>,
    /// The directory that is watched, as the client named it.
    path: FilePath,
}

impl WatchEvents<'_> {
    fn line(&mut self, event: &Value) {
        self.client.push(|out| {
            // Writing to memory does not fail.
            let _ = serde_json::to_writer(&mut *out, event);
            out.push(b'\n');
        });
    }
}

impl WatchSubscriber for WatchEvents<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn event(&mut self, number: u64, event: &TreeEvent) {
        let name = match &event.change {
            TreeChange::Created => "created",
            TreeChange::Modified => "modified",
            TreeChange::Deleted => "deleted",
            TreeChange::Moved(_) => "moved",
            TreeChange::Attributes => "attributes",
            TreeChange::Overflow => {
                self.line(&object! { "event": "overflow", "seq": number });
                return;
            }
        };
        let path = |relative: &[u8]| self.path.join(&show(relative));
        let mut document = object! {
            "event": name,
            "path": path(&event.path),
            "type": type_word(event.kind),
            "seq": number,
        };
        if let TreeChange::Moved(from) = &event.change {
            document["from"] = json!(path(from));
        }
        self.line(&document);
    }

    fn end(&mut self, last: u64, ended: Option<Ended>) {
        let reason = match ended {
            None => {
                self.line(&object! { "event": "end", "next": last });
                return;
            }
            Some(Ended::Deleted) => "deleted",
            Some(Ended::Closed | Ended::Disconnected) => "closed",
            Some(Ended::NoWatches) => "no_watches",
            Some(Ended::OverLimit) => "over_limit",
            Some(Ended::Failed(_)) => "internal",
        };
        self.line(&object! { "event": "end", "reason": reason, "next": last });
    }
}
