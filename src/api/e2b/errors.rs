//! The one table from a kind of error to what the clients of this door see.

use std::fmt::Display;

use crate::codec::object::object;
use crate::error::{Error, Kind, capped};
use crate::files::name::FilePath;
use crate::http::request::ReceiveError;
use crate::http::{Body, Refusal, Response};
use crate::workspace::Workspace;

/// The codes of the Connect protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument,
    Unauthenticated,
    PermissionDenied,
    NotFound,
    AlreadyExists,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    DataLoss,
    DeadlineExceeded,
    Unavailable,
}

impl Code {
    /// Its word on the wire.
    pub(super) fn name(self) -> &'static str {
        self.row().0
    }

    fn row(self) -> (&'static str, u16) {
        match self {
            Self::InvalidArgument => ("invalid_argument", 400),
            Self::Unauthenticated => ("unauthenticated", 401),
            Self::PermissionDenied => ("permission_denied", 403),
            Self::NotFound => ("not_found", 404),
            Self::AlreadyExists => ("already_exists", 409),
            Self::ResourceExhausted => ("resource_exhausted", 429),
            Self::FailedPrecondition => ("failed_precondition", 400),
            Self::Unimplemented => ("unimplemented", 501),
            Self::Internal => ("internal", 500),
            Self::DataLoss => ("data_loss", 500),
            Self::DeadlineExceeded => ("deadline_exceeded", 504),
            Self::Unavailable => ("unavailable", 503),
        }
    }
}

/// A refused request.
#[derive(Debug)]
pub(super) struct E2bError {
    pub(super) code: Code,
    pub(super) status: u16,
    /// A sentence for people.
    pub(super) text: String,
    headers: Vec<(&'static str, String)>,
    /// Whether the status tells the client what the code cannot.
    is_by_status: bool,
    /// The sandbox that the host's name names, and its port if that is not open.
    named: Option<(String, Option<u16>)>,
}

/// The form of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// JSON, where `code` is the status.
    Api,
    /// JSON, where `code` is the word of the protocol.
    Rpc,
    /// The text alone.
    Text,
}

impl E2bError {
    /// Its text is [`capped`].
    pub(super) fn new(code: Code, text: impl Display) -> Self {
        Self {
            code,
            status: code.row().1,
            text: capped(&text),
            headers: Vec::new(),
            is_by_status: false,
            named: None,
        }
    }

    pub(super) fn invalid(text: impl Display) -> Self {
        Self::new(Code::InvalidArgument, text)
    }

    pub(super) fn not_found(text: impl Display) -> Self {
        Self::new(Code::NotFound, text)
    }

    pub(super) fn unimplemented(text: impl Display) -> Self {
        Self::new(Code::Unimplemented, text)
    }

    /// There is no sandbox with the id that the request has. Clients know it by the status and the words.
    pub(super) fn gone() -> Self {
        let mut failure =
            Self::new(Code::Unavailable, "The sandbox ID was not found").with_status(502);
        failure.is_by_status = true;
        failure
    }

    /// There is no sandbox with the id that the name of a port has.
    pub(super) fn gone_at(id: &str) -> Self {
        let text = "The sandbox was not found";
        let failure = Self::new(Code::Unavailable, text).with_status(502);
        failure.named(id, None)
    }

    /// Nobody listens on a port of a sandbox that runs.
    pub(super) fn not_open(id: &str, port: u16) -> Self {
        let text = "The sandbox is running but port is not open";
        let failure = Self::new(Code::Unavailable, text).with_status(502);
        failure.named(id, Some(port))
    }

    fn named(mut self, id: &str, port: Option<u16>) -> Self {
        self.named = Some((id.to_owned(), port));
        self
    }

    /// This failure as clients see it at a name of a sandbox.
    #[must_use]
    pub(super) fn at_name(self, id: &str) -> Self {
        match self.code {
            _ if self.named.is_some() => self,
            _ if self.is_by_status => Self::gone_at(id),
            // To a browser a 401 is a question for a password.
            Code::Unauthenticated => Self::new(Code::PermissionDenied, self.text).named(id, None),
            _ => self.named(id, None),
        }
    }

    /// The sandbox ended under a call. Clients that get this ask whether it runs, and know then.
    pub(super) fn ended() -> Self {
        Self::new(
            Code::Unavailable,
            "the sandbox was killed or reached its end of life",
        )
    }

    /// The command or the stream has taken longer than its client allows.
    pub(super) fn overdue() -> Self {
        Self::new(
            Code::DeadlineExceeded,
            "the time that the client allows has passed",
        )
    }

    /// This failure about a path, or that the path leads nowhere if it goes through a file.
    #[must_use]
    pub(super) fn unless_missing(mut self, workspace: &Workspace, path: &FilePath) -> Self {
        let is_wrong_kind = self.code == Code::InvalidArgument;
        if is_wrong_kind
            && let Err(error) = workspace.stat_file(path)
            && matches!(error.kind(), Kind::NotFound | Kind::NotDirectory)
        {
            self = Self::new(Code::NotFound, error.to_string());
        }
        self
    }

    /// This failure, or that the sandbox is gone if it ended meanwhile: then nothing else is worth telling.
    pub(super) fn unless_gone(self, workspace: &Workspace) -> Self {
        if workspace.is_closed() {
            Self::gone()
        } else {
            self
        }
    }

    /// The same at the end of a stream.
    pub(super) fn unless_ended(self, workspace: &Workspace) -> Self {
        if workspace.is_closed() {
            Self::ended()
        } else {
            self
        }
    }

    /// Whether only the operator can repair it.
    pub(super) fn is_for_operator(&self) -> bool {
        self.code == Code::Internal || self.status == 507
    }

    #[must_use]
    pub(super) fn with_status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }

    #[must_use]
    pub(super) fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The answer in the form that the clients of a route read.
    pub(super) fn respond(self, style: Style) -> Response {
        let (body, kind) = match style {
            Style::Rpc if !self.is_by_status => {
                let document = object! { "code": self.code.name(), "message": self.text };
                (document.to_string(), "application/json")
            }
            Style::Api | Style::Rpc => {
                let mut document = object! { "code": self.status, "message": self.text };
                if let Some((id, port)) = self.named {
                    document["sandboxId"] = id.into();
                    if let Some(port) = port {
                        document["port"] = port.into();
                    }
                }
                (document.to_string(), "application/json")
            }
            Style::Text => (self.text, "text/plain; charset=utf-8"),
        };
        let mut response = Response::new(self.status, Body::Bytes(body.into_bytes()))
            .with_header("Content-Type", kind);
        response.headers.extend(self.headers);
        response
    }
}

impl From<Error> for E2bError {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            // To these clients a sandbox that rests is none.
            Kind::Stopped | Kind::Paused => return Self::gone(),
            Kind::Invalid
            | Kind::BadArchive
            | Kind::ProgramNotFound
            | Kind::ProgramNotExecutable
            | Kind::BadDirectory
            | Kind::ProgramForbidden
            | Kind::UnsupportedLanguage
            | Kind::NoBackend
            | Kind::TooWide
            | Kind::IsDirectory
            | Kind::NotDirectory
            | Kind::NotRegular => Code::InvalidArgument,
            Kind::Unavailable | Kind::Unsupported => Code::Unimplemented,
            Kind::Forbidden => Code::PermissionDenied,
            Kind::NotFound => Code::NotFound,
            Kind::Exists => Code::AlreadyExists,
            Kind::NotEmpty
            | Kind::CrossDevice
            | Kind::Leased
            | Kind::StdinClosed
            | Kind::StdinBusy
            | Kind::NotPty
            | Kind::NotRunning
            | Kind::NotPossible
            | Kind::ReadOnly
            | Kind::InUse
            | Kind::IdInUse
            | Kind::ContextDead
            | Kind::NotAsked
            | Kind::Changed
            | Kind::NoMatch
            | Kind::Ambiguous
            | Kind::PatchFailed
            | Kind::Binary
            | Kind::VenvFailed => Code::FailedPrecondition,
            Kind::TooLarge
            | Kind::OverLimit
            | Kind::NoWatches
            | Kind::NoTerminals
            | Kind::NoIds
            | Kind::NoResources
            | Kind::QueueFull
            | Kind::TooManyContexts
            | Kind::NoSpace => Code::ResourceExhausted,
            Kind::NoThreads
            | Kind::Busy
            | Kind::ShuttingDown
            | Kind::Unfinished
            | Kind::Unreachable => Code::Unavailable,
            Kind::KernelFailed | Kind::System => Code::Internal,
        };
        let failure = Self::new(code, error.to_string());
        match error.kind() {
            Kind::NoSpace => failure.with_status(507),
            Kind::TooLarge => failure.with_status(413),
            _ => failure,
        }
    }
}

impl From<ReceiveError> for E2bError {
    fn from(error: ReceiveError) -> Self {
        let Refusal { status, text, .. } = error.into();
        let code = match status {
            413 | 503 => Code::ResourceExhausted,
            408 => Code::DeadlineExceeded,
            _ => Code::InvalidArgument,
        };
        Self::new(code, text).with_status(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(failure: E2bError, style: Style) -> (u16, String) {
        let response = failure.respond(style);
        match response.body {
            Body::Bytes(bytes) => (response.status, String::from_utf8(bytes).unwrap()),
            _ => unreachable!("a refusal is in memory"),
        }
    }

    #[test]
    fn a_refusal_has_the_form_that_its_client_reads() {
        let missing = || E2bError::from(Error::new(Kind::NotFound, "no file"));
        let rpc = body(missing(), Style::Rpc);
        assert_eq!(
            rpc,
            (404, r#"{"code":"not_found","message":"no file"}"#.into())
        );
        let api = body(missing(), Style::Api);
        assert_eq!(api, (404, r#"{"code":404,"message":"no file"}"#.into()));
        assert_eq!(body(missing(), Style::Text), (404, "no file".into()));
        // Clients look for these words, and for the number.
        let gone = r#"{"code":502,"message":"The sandbox ID was not found"}"#;
        assert_eq!(body(E2bError::gone(), Style::Rpc), (502, gone.into()));
        let full = E2bError::from(Error::new(Kind::NoSpace, "full"));
        assert_eq!((full.status, full.code), (507, Code::ResourceExhausted));
    }
}
