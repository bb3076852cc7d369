//! What the documents of sandboxes and of templates have in common: pages, sizes, the version of the agent.

use serde_json::Value;

use super::calls::Call;
use super::errors::E2bError;
use crate::codec::query::Query;
use crate::host::Sandbox;
use crate::http::Response;
use crate::sys::proc::{self, MachineUse};

/// The version of E2B's agent whose features are here.
pub(super) const VERSION: &str = "0.6.13";

/// Items of a page unless the client sets a limit, and the most.
const PAGE: u64 = 100;
const MAX_PAGE: u64 = 1000;

/// How many items a client wants at most, and the token of the page; `None` for the first.
pub(super) fn page(query: &Query) -> Result<(usize, Option<u64>), E2bError> {
    let limit = query.number("limit")?.unwrap_or(PAGE);
    if !(1..=MAX_PAGE).contains(&limit) {
        let text = format!("limit={limit}: not accepted; it takes 1 to {MAX_PAGE}");
        return Err(E2bError::invalid(text));
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    Ok((limit, query.number("nextToken")?))
}

/// A page, with the token of the next one if there is one.
pub(super) fn page_of(documents: &[Value], next: Option<u64>) -> Response {
    let response = Response::json(&documents);
    match next {
        Some(next) => response.with_header("x-next-token", next.to_string()),
        None => response,
    }
}

/// What there is of processors and of memory, in bytes.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) processors: usize,
    pub(super) memory: u64,
}

impl Size {
    pub(super) fn of_machine(whole: &MachineUse) -> Self {
        Self {
            processors: proc::processors(),
            memory: whole.memory_bytes.unwrap_or(0),
        }
    }

    /// What a sandbox may have of it.
    pub(super) fn limited_by(self, sandbox: Option<&Sandbox>) -> Self {
        let asked = sandbox.map(|sandbox| sandbox.limits.asked());
        let time = asked.as_ref().and_then(|asked| asked.cpu);
        let processors =
            time.and_then(|time| usize::try_from(time.as_millis().div_ceil(1000)).ok());
        let memory = asked.as_ref().and_then(|asked| asked.memory);
        Self {
            processors: processors.unwrap_or(self.processors),
            memory: memory.unwrap_or(self.memory),
        }
    }
}

/// Milliseconds since the server has begun.
pub(super) fn uptime_ms(call: &Call<'_, '_>) -> u64 {
    u64::try_from(call.context.machine.uptime().as_millis()).unwrap_or(0)
}
