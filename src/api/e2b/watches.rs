//! Watches of `filesystem.Filesystem`: as a stream, and for clients that poll.

use serde_json::Value;

use super::calls::{Answer, Call, Document, ListAnswer, ListBody};
use super::connect::{self, append_document, push, push_end};
use super::entries::{Documents, METADATA_PREFIX, only_path};
use super::errors::{Code, E2bError};
use super::paths::{ClientPath, Paths};
use crate::client::{Client, Interrupt};
use crate::codec::fields::Fields;
use crate::codec::object::object;
use crate::files::name::{FilePath, show};
use crate::files::search::Matcher;
use crate::files::watch::{Ended, Settings, TreeChange, TreeEvent};
use crate::files::{FileKind, is_temporary};
use crate::http::stream::{StreamClient, StreamWriter};
use crate::workspace::{Lasting, Lease, WatchSubscriber, Workspace};

/// What a client wants to know of a directory.
struct WatchRequest {
    path: ClientPath,
    recursive: bool,
    /// Whether it wants to know what the files are that have changed.
    describes: bool,
}

fn request(
    call: &Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Result<WatchRequest, E2bError> {
    let recursive = fields.boolean("recursive")?.unwrap_or(false);
    let described = fields.boolean("includeEntry")?;
    let described = described.or(fields.boolean("include_entry")?);
    Ok(WatchRequest {
        path: only_path(call, workspace, fields, "path")?,
        recursive,
        describes: described.unwrap_or(false),
    })
}

impl WatchRequest {
    fn settings(&self) -> Settings {
        Settings {
            path: self.path.file.clone(),
            recursive: self.recursive,
            exclude: Matcher::default(),
        }
    }
}

/// `CreateWatcher`.
pub(super) fn create(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    fields: Fields<'_>,
) -> Document {
    let request = request(call, workspace, fields)?;
    let lasting = Lasting {
        describes: request.describes,
    };
    let interrupt = &mut call.interrupt();
    let watch = workspace.register_lasting_watch(&request.settings(), lasting, interrupt);
    let watch = watch
        .map_err(|stopped| E2bError::from(stopped).unless_missing(workspace, &request.path.file))?;
    Ok(object! { "watcherId": watch.id.as_str() })
}

/// `GetWatcherEvents`.
pub(super) fn events(
    call: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> ListAnswer {
    let id = watcher_id(&mut fields)?;
    let watch = workspace.watches.find(&id)?;
    let Some(lasting) = watch.lasting else {
        return Err(E2bError::not_found(format_args!(
            "there is no watcher {id}"
        )));
    };
    workspace.watches.catch_up(&watch);
    let (events, ended, _charge) = watch.take();
    if events
        .iter()
        .any(|event| event.change == TreeChange::Overflow)
    {
        return Err(lost());
    }
    if events.is_empty()
        && let Some(ended) = ended
    {
        return Err(over(ended));
    }
    let mut writer = EventWriter {
        workspace,
        documents: None,
        path: watch.path().clone(),
        describes: lasting.describes,
        events: Vec::new(),
    };
    let mut body = ListBody::new(Some("events"), &workspace.ledger)?;
    let client = &mut call.interrupt();
    let interrupt = &mut workspace.paced(client);
    for event in &events {
        // Each may be described.
        interrupt.check()?;
        writer.write(event);
        for document in writer.events.drain(..) {
            body.push(&document)?;
        }
    }
    Ok(body)
}

/// `RemoveWatcher`.
pub(super) fn remove(
    _: &mut Call<'_, '_>,
    workspace: &Workspace,
    mut fields: Fields<'_>,
) -> Document {
    workspace.watches.remove(&watcher_id(&mut fields)?)?;
    Ok(object! {})
}

fn watcher_id(fields: &mut Fields<'_>) -> Result<String, E2bError> {
    let id = fields.string("watcherId")?;
    let id = id.or(fields.string("watcher_id")?);
    id.ok_or_else(|| E2bError::invalid("watcherId is missing"))
}

/// `WatchDir`.
pub(super) fn watch(call: &mut Call<'_, '_>, workspace: &Workspace, fields: Fields<'_>) -> Answer {
    let request = request(call, workspace, fields)?;
    let deadline = call.deadline()?;
    let keep_alive = call.keep_alive();
    let lease = workspace.share()?;
    let watch = workspace.watch_in_place_of_another(&request.settings(), &mut call.interrupt());
    let watch = watch
        .map_err(|stopped| E2bError::from(stopped).unless_missing(workspace, &request.path.file))?;
    Ok(connect::stream(move |stream: &mut StreamWriter| {
        let client = StreamClient::new(stream, KEEP_ALIVE, keep_alive);
        let mut events = WatchEvents {
            client,
            lease,
            request,
            has_lost: false,
        };
        push(&mut events.client, &object! { "start": object! {} });
        watch.run(deadline, &mut events);
    }))
}

/// What is sent while nothing happens.
const KEEP_ALIVE: &[u8] = b"\0\0\0\0\x10{\"keepalive\":{}}";

/// Writes changes as messages.
struct WatchEvents<'a> {
    client: StreamClient<'a>,
    lease: Lease,
    request: WatchRequest,
    has_lost: bool,
}

impl WatchSubscriber for WatchEvents<'_> {
    fn client(&mut self) -> &mut dyn Client {
        &mut self.client
    }

    fn event(&mut self, _: u64, event: &TreeEvent) {
        self.has_lost |= event.change == TreeChange::Overflow;
        let mut writer = EventWriter {
            workspace: &self.lease,
            documents: None,
            path: self.request.path.file.clone(),
            describes: self.request.describes,
            events: Vec::new(),
        };
        writer.write(event);
        for event in writer.events {
            self.client
                .push(|out| append_document(out, &object! { "filesystem": event }));
        }
    }

    fn end(&mut self, _: u64, ended: Option<Ended>) {
        let failure = match ended {
            _ if self.has_lost => lost(),
            Some(ended) => over(ended),
            None => E2bError::overdue(),
        };
        push_end(&mut self.client, Some(&failure));
    }
}

fn lost() -> E2bError {
    let text = "events were lost, because there were too many; list the directory again";
    E2bError::new(Code::DataLoss, text)
}

fn over(ended: Ended) -> E2bError {
    match ended {
        Ended::Deleted => E2bError::not_found("the directory that was watched is gone"),
        Ended::NoWatches | Ended::OverLimit => {
            let text = "nothing is left to watch a new directory with";
            E2bError::new(Code::ResourceExhausted, text)
        }
        Ended::Closed | Ended::Disconnected => E2bError::new(
            Code::Unavailable,
            "the watch was removed, or its sandbox ends",
        ),
        Ended::Failed(_) => E2bError::new(Code::Internal, "the directory cannot be watched"),
    }
}

/// Collects changes in the form of the clients.
struct EventWriter<'a> {
    workspace: &'a Workspace,
    documents: Option<Documents<'a>>,
    /// The directory that is watched.
    path: FilePath,
    describes: bool,
    events: Vec<Value>,
}

impl EventWriter<'_> {
    fn write(&mut self, event: &TreeEvent) {
        let path = &event.path;
        if is_temporary(path) {
            return;
        }
        match &event.change {
            // An upload that replaces a file.
            TreeChange::Moved(from) if is_temporary(from) => {
                self.add("EVENT_TYPE_WRITE", path, true);
            }
            TreeChange::Created => {
                self.add("EVENT_TYPE_CREATE", path, true);
                // A file that comes with a content was written, too. Clients wait for that.
                if event.kind == FileKind::Regular && self.has_content(path) {
                    self.add("EVENT_TYPE_WRITE", path, true);
                }
            }
            TreeChange::Modified => self.add("EVENT_TYPE_WRITE", path, true),
            TreeChange::Deleted => self.add("EVENT_TYPE_REMOVE", path, false),
            TreeChange::Moved(from) => {
                self.add("EVENT_TYPE_RENAME", from, false);
                self.add("EVENT_TYPE_CREATE", path, true);
            }
            TreeChange::Attributes => self.add("EVENT_TYPE_CHMOD", path, true),
            // Said at the end.
            TreeChange::Overflow => {}
        }
    }

    fn at(&self, relative: &[u8]) -> Option<FilePath> {
        self.path.child(relative).ok()
    }

    fn has_content(&self, relative: &[u8]) -> bool {
        let entry = self
            .at(relative)
            .map(|path| self.workspace.stat_file(&path));
        entry.is_some_and(|entry| entry.is_ok_and(|entry| entry.size > 0))
    }

    fn add(&mut self, kind: &str, relative: &[u8], exists: bool) {
        let mut document = object! { "name": show(relative), "type": kind };
        if self.describes && exists {
            let path = self.at(relative);
            let described =
                path.and_then(|path| self.workspace.describe_file(&path, METADATA_PREFIX).ok());
            if let Some(description) = described {
                let root = Paths::of(self.workspace).read(self.path.to_string().as_bytes());
                let root = root.map_or_else(|_| String::new(), |root| root.shown);
                let shown = Paths::join(&root, relative);
                let make = || Documents::of(self.workspace);
                let documents = self.documents.get_or_insert_with(make);
                document["entry"] = documents.entry(&description, &shown);
            }
        }
        self.events.push(document);
    }
}
