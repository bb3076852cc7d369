//! Changes what can change of a sandbox while it lives.

use std::sync::Arc;
use std::time::Duration;

use super::{Host, LimitsChange, Sandbox, SettingsChange, unknown};
use crate::codec::fields::Change;
use crate::error::Result;
use crate::spec::isolation::Isolation;
use crate::spec::sandbox::ResourceLimits;

impl Host {
    /// Changes what can change of a sandbox. A lifetime is counted from now on; limits hold at once for the sandbox as a whole,
    /// and for processes that start from now on. What cannot be written down is not changed.
    ///
    /// # Errors
    /// `NotFound`; `NoSpace` if it cannot be written down; for limits `Unavailable` if they cannot be kept here, and
    /// `NotPossible` if they cannot as long as it runs.
    pub fn change(&self, id: &str, mut change: SettingsChange) -> Result<Arc<Sandbox>> {
        if change.limits != LimitsChange::default() {
            if change.limits.processes == Change::Remove {
                change.limits.processes = Change::Set(self.default_max_processes);
            }
            return self.change_with_limits(id, change);
        }
        // Under the table's lock: one whose time is over is taken out of it under the same.
        let table = self.table();
        let sandbox = table.sandboxes.get(id).ok_or_else(|| unknown(id))?;
        let sandbox = Arc::clone(sandbox);
        if change == SettingsChange::default() {
            return Ok(sandbox);
        }
        let before = sandbox.change(change);
        drop(table);
        self.write_down(&sandbox)
            .inspect_err(|_| sandbox.take_back(before))?;
        Ok(sandbox)
    }

    /// Takes the sandbox for the change: what keeps its limits is another one after each stop and start.
    fn change_with_limits(&self, id: &str, change: SettingsChange) -> Result<Arc<Sandbox>> {
        let turn = match self.begin_change(id, &|_| Ok(true))? {
            Ok(turn) => turn,
            Err(unchanged) => return Ok(unchanged),
        };
        let sandbox = &turn.sandbox;
        let old = sandbox.resource_limits();
        let mut new = old;
        change.limits.apply(&mut new);
        self.put_in_force(sandbox, new)?;
        let before = sandbox.change(change);
        self.write_down(sandbox).inspect_err(|_| {
            sandbox.take_back(before);
            let _ = self.put_in_force(sandbox, old);
        })?;
        Ok(Arc::clone(sandbox))
    }

    fn put_in_force(&self, sandbox: &Sandbox, limits: ResourceLimits) -> Result<()> {
        let processes = limits.processes.unwrap_or(u64::MAX);
        let all = processes.saturating_add(starters(sandbox.isolation()));
        self.limiter.change(&sandbox.limits, limits.whole, all)?;
        let of_each = self.policy.limits(processes, limits.data);
        sandbox.workspace.set_limits(of_each);
        Ok(())
    }

    /// Ends a sandbox no earlier than after this time from now. One that has no end keeps none.
    ///
    /// # Errors
    /// `NotFound`; `NoSpace` if it cannot be written down.
    pub fn extend_lifetime(&self, id: &str, least: Duration) -> Result<Arc<Sandbox>> {
        let table = self.table();
        let sandbox = table.sandboxes.get(id).ok_or_else(|| unknown(id))?;
        let sandbox = Arc::clone(sandbox);
        let is_later = sandbox.extend_lifetime(least);
        drop(table);
        if is_later {
            self.write_down(&sandbox)?;
        }
        Ok(sandbox)
    }
}

/// Processes that a sandbox has besides those of its commands: one in namespaces is started by another, which ends at once.
pub(super) fn starters(isolation: Isolation) -> u64 {
    u64::from(isolation == Isolation::Namespaces)
}
