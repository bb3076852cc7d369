//! Which sandboxes a list has, in which order, and how many of them: the query of `GET /v1/sandboxes`.

use std::sync::Arc;
use std::time::Duration;

use crate::codec::query::Query;
use crate::codec::sort::sort_by;
use crate::error::{Error, Kind, Result};
use crate::host::{Sandbox, SandboxState};
use crate::limits::activity::IdleBy;
use crate::sys::proc;

/// Sandboxes of a page unless the client sets a limit, and the most.
const PAGE: u64 = 100;
const MAX_PAGE: u64 = 1000;

/// What a list is sorted by.
#[derive(Clone, Copy)]
enum Order {
    Created,
    /// The one first that has been idle for longest.
    Idle,
    /// The one first that has most.
    Memory,
}

/// The parameters that select.
pub(super) const PARAMETERS: &[&str] = &["label", "state", "name", "sort", "after", "limit"];

/// What a client wants to see.
pub(super) struct Selection {
    labels: Vec<(String, String)>,
    state: Option<SandboxState>,
    name: Option<String>,
    order: Order,
    after: Option<String>,
    limit: usize,
}

impl Selection {
    /// `None` if the query asks for all.
    ///
    /// # Errors
    /// `Invalid` if a parameter is not what it takes.
    pub(super) fn of(query: &Query) -> Result<Option<Self>> {
        if query.pairs().next().is_none() {
            return Ok(None);
        }
        let text = |name| query.parsed(name, "UTF-8", |text| Some(text.to_owned()));
        let label = |label: &[u8]| {
            let label = std::str::from_utf8(label).ok();
            let pair = label.and_then(|label| label.split_once('='));
            let pair = pair.map(|(name, value)| (name.to_owned(), value.to_owned()));
            pair.ok_or_else(|| Error::invalid("label takes NAME=VALUE"))
        };
        let states = SandboxState::ALL.map(|state| (state.name(), state));
        let orders = [
            ("created", Order::Created),
            ("idle", Order::Idle),
            ("memory", Order::Memory),
        ];
        let limit = query.number("limit")?.unwrap_or(PAGE);
        if !(1..=MAX_PAGE).contains(&limit) {
            let text = format!("limit={limit}: not accepted; it takes 1 to {MAX_PAGE}");
            return Err(Error::invalid(text));
        }
        Ok(Some(Self {
            labels: query.values("label").map(label).collect::<Result<_>>()?,
            state: query.choice("state", &states)?,
            name: text("name")?,
            order: query.choice("sort", &orders)?.unwrap_or(Order::Created),
            after: text("after")?,
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
        }))
    }

    fn has(&self, sandbox: &Sandbox) -> bool {
        let settings = sandbox.settings();
        let mut labels = self.labels.iter();
        labels.all(|(name, value)| settings.labels.get(name) == Some(value))
            && self.state.is_none_or(|state| sandbox.state().0 == state)
            && self
                .name
                .as_ref()
                .is_none_or(|name| settings.name.as_ref() == Some(name))
    }

    /// Selects among all sandboxes, which are in the order of their creation. Returns those of the page, and the id to
    /// go on after if there are more.
    ///
    /// # Errors
    /// `NotFound` if the sandbox to go on after is gone.
    pub(super) fn page(
        &self,
        mut all: Vec<Arc<Sandbox>>,
    ) -> Result<(Vec<Arc<Sandbox>>, Option<String>)> {
        match self.order {
            Order::Created => {}
            Order::Idle => {
                let idle = |sandbox: Arc<Sandbox>| {
                    let idle = sandbox.workspace().idle_for(IdleBy::Work);
                    (idle.unwrap_or(Duration::ZERO), sandbox)
                };
                all = descending(all.into_iter().map(idle).collect());
            }
            Order::Memory => {
                let used = proc::use_by_user();
                let memory = |sandbox: Arc<Sandbox>| {
                    let used = used.get(&sandbox.user.uid);
                    (used.map_or(0, |used| used.memory_bytes), sandbox)
                };
                all = descending(all.into_iter().map(memory).collect());
            }
        }
        let begin = match &self.after {
            None => 0,
            Some(id) => {
                let place = all.iter().position(|sandbox| sandbox.id == *id);
                let gone = || {
                    let text = format!("after={id}: there is no such sandbox any more; list anew");
                    Error::new(Kind::NotFound, text)
                };
                place.ok_or_else(gone)? + 1
            }
        };
        let mut page: Vec<_> = all
            .drain(begin..)
            .filter(|sandbox| self.has(sandbox))
            .collect();
        let has_more = page.len() > self.limit;
        page.truncate(self.limit);
        let last = page.last().filter(|_| has_more);
        let next = last.map(|sandbox| sandbox.id.clone());
        Ok((page, next))
    }
}

/// The greatest first.
fn descending<T: Ord>(mut all: Vec<(T, Arc<Sandbox>)>) -> Vec<Arc<Sandbox>> {
    sort_by(&mut all, |(one, _), (other, _)| other.cmp(one));
    all.into_iter().map(|(_, sandbox)| sandbox).collect()
}
