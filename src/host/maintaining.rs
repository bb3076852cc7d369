//! The maintenance of sandboxes: a thread that looks after them as long as the server runs. What their rules want is said
//! in `ruling.rs`.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::pausing::restless;
use super::ruling::Task;
use super::{Host, Sandbox, watchdog};
use crate::confine::{close_unused_trees, have_trees};
use crate::files::forget_ended_trees;
use crate::spec::sandbox::Fate;
use crate::threads::panics::contain;
use crate::{fault, sys};

/// How long the clients of a deleted sandbox may take to read their last answers.
const PARTING_LIMIT: Duration = Duration::from_secs(3);

/// Interval of the maintenance: idle sandboxes, starts that hang, clients of deleted sandboxes.
const ROUND: Duration = Duration::from_secs(1);

/// Maintenance rounds between two retries of stuck deletions.
const STUCK_ROUNDS: u64 = 10;

/// Most time in one of them for homes without a sandbox, of which seldom more than a few directories are left.
const REMOVAL_LIMIT: Duration = Duration::from_secs(1);

/// Maintenance rounds in which what an earlier server has left may still appear.
const LEFTOVER_ROUNDS: u64 = 10;

impl Host {
    /// Runs as long as the server: evicts idle sandboxes, retries stuck deletions, and kills starts that
    /// hang.
    pub fn run_maintenance(self: &Arc<Self>) {
        let mut next_look = Instant::now();
        for round in 0_u64.. {
            let mut table = self.changed.wait_while(self.table(), |table| {
                let is_idle = table.occupied() == 0 && table.parting.is_empty();
                is_idle && !self.has_builds() && !have_trees()
            });
            let has_time = |(since, _): &(Instant, _)| since.elapsed() < PARTING_LIMIT;
            let parting = std::mem::take(&mut table.parting);
            let (parting, late): (Vec<_>, Vec<_>) = parting.into_iter().partition(has_time);
            table.parting = parting;
            let mut all: Vec<_> = table.sandboxes.values().cloned().collect();
            // Rules that take long have the threads of those after them: each is the first one at some time.
            let first = usize::try_from(round).unwrap_or_default() % all.len().max(1);
            all.rotate_left(first);
            let mut retried = Vec::new();
            if round % STUCK_ROUNDS == 0 {
                let stuck: Vec<_> = table.stuck.keys().cloned().collect();
                retried.extend(stuck.iter().filter_map(|id| table.take(id)));
            }
            drop(table);
            fault::point("maintenance");
            if round % STUCK_ROUNDS == 0 {
                let _ = contain(|| self.retry_removals(Instant::now() + REMOVAL_LIMIT));
                let _ = contain(|| self.retry_adoptions());
                let removals = || {
                    let deadline = Instant::now() + REMOVAL_LIMIT;
                    self.roots.store.retry_removals(deadline);
                };
                let _ = contain(removals);
            }
            for (_, ledger) in late {
                ledger.connections.shut_down(true);
            }
            for sandbox in all.iter().filter(|_| round < LEFTOVER_ROUNDS) {
                if sandbox.phase.stopped.is_some() && sys::user_has_processes(sandbox.user) {
                    self.end_late_leftovers(&sandbox.id);
                }
            }
            let mut evicted = Vec::new();
            for sandbox in &all {
                // A sandbox that panics here costs no other one its maintenance.
                let _ = contain(|| {
                    sandbox.report_loss();
                    sandbox.limits.finish_kill();
                    sandbox.workspace.processes.kill_stopped_starts();
                });
                let Some(ruling) = sandbox.due(self.bounds) else {
                    continue;
                };
                if ruling.fate != Fate::Delete {
                    self.do_in_background(sandbox, Task::Rule(ruling));
                    continue;
                }
                let mut table = self.table();
                // Unless a request changes it, or has changed what is due.
                if table.is_settled(sandbox)
                    && sandbox.close_if_due(self.bounds)
                    && let Some(sandbox) = table.take(&sandbox.id)
                {
                    evicted.push(sandbox);
                }
            }
            let begun = Instant::now();
            if begun >= next_look {
                for sandbox in restless(&all) {
                    self.do_in_background(sandbox, Task::KeepStill);
                }
                // It takes a fiftieth of a processor at most.
                next_look = begun + begun.elapsed() * 50;
            }
            self.limiter.tidy();
            #[cfg(all(feature = "e2b", feature = "file-tools"))]
            self.forget_builds();
            forget_ended_trees();
            close_unused_trees();
            if let Some(records) = &self.records {
                records.synchronize();
            }
            let is_watched = |sandbox: &Arc<Sandbox>| {
                sandbox.phase.stopped.is_none() && sandbox.limits.watched().is_some()
            };
            if all.iter().any(is_watched) {
                watchdog::ensure_running(self);
            }
            drop(all);
            // Separately: retries took long before.
            self.end_in_background(retried, "tried again");
            self.end_in_background(evicted, "evicted");
            thread::sleep(ROUND);
        }
    }
}
