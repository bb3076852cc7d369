//! The one table from a kind of error to the status and the code that clients of this door see.

use crate::error::{Error, Kind};
use crate::http::Refusal;

impl From<Error> for Refusal {
    fn from(mut error: Error) -> Self {
        let (status, code) = match error.kind() {
            Kind::Invalid => (400, "bad_request"),
            Kind::BadArchive => (400, "bad_archive"),
            Kind::ProgramNotFound => (400, "not_found"),
            Kind::ProgramNotExecutable => (400, "not_executable"),
            Kind::BadDirectory => (400, "bad_cwd"),
            Kind::ProgramForbidden => (400, "permission"),
            Kind::UnsupportedLanguage => (400, "unsupported_language"),
            Kind::NoBackend => (400, "no_backend"),
            Kind::TooWide => (400, "too_wide"),
            Kind::Unavailable => (400, "unavailable"),
            Kind::NoResources => (400, "no_resources"),
            Kind::Forbidden => (403, "forbidden"),
            Kind::NotFound => (404, "not_found"),
            Kind::IsDirectory => (409, "is_directory"),
            Kind::NotDirectory => (409, "not_directory"),
            Kind::NotEmpty => (409, "not_empty"),
            Kind::NotRegular => (409, "not_regular"),
            Kind::Leased => (409, "leased"),
            Kind::Exists => (409, "exists"),
            Kind::CrossDevice => (409, "cross_device"),
            Kind::StdinClosed => (409, "stdin_closed"),
            Kind::StdinBusy => (409, "stdin_busy"),
            Kind::Stopped => (409, "stopped"),
            Kind::NotPty => (409, "not_pty"),
            Kind::NotRunning => (409, "not_running"),
            Kind::Paused => (409, "paused"),
            Kind::NotPossible => (409, "not_possible"),
            Kind::ReadOnly => (409, "read_only"),
            Kind::InUse => (409, "in_use"),
            Kind::IdInUse => (409, "id_in_use"),
            Kind::ContextDead => (409, "context_dead"),
            Kind::NotAsked => (409, "not_asked"),
            Kind::Changed => (409, "changed"),
            Kind::NoMatch => (409, "no_match"),
            Kind::Ambiguous => (409, "ambiguous"),
            Kind::VenvFailed => (409, "venv_failed"),
            Kind::PatchFailed => (409, "patch_failed"),
            Kind::Binary => (409, "binary"),
            Kind::TooLarge => (413, "too_large"),
            Kind::Unsupported => (415, "unsupported"),
            Kind::KernelFailed => (500, "kernel_failed"),
            Kind::System => (500, "internal"),
            Kind::Unreachable => (502, "unreachable"),
            Kind::OverLimit => (503, "over_limit"),
            Kind::Busy => (503, "busy"),
            Kind::NoWatches => (503, "no_watches"),
            Kind::NoTerminals => (503, "no_terminals"),
            Kind::NoIds => (503, "no_ids"),
            Kind::QueueFull => (503, "queue_full"),
            Kind::TooManyContexts => (503, "too_many_contexts"),
            Kind::NoThreads => (503, "no_threads"),
            Kind::ShuttingDown => (503, "shutting_down"),
            Kind::Unfinished => (503, "unfinished"),
            Kind::NoSpace => (507, "no_space"),
        };
        let details = error.take_details();
        Self::new(status, code, error).with_details(details)
    }
}
