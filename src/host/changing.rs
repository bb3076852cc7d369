//! Changes what can change of a sandbox while it lives.

use std::sync::Arc;
use std::time::Duration;

use super::life::By;
use super::{Host, Sandbox, SettingsChange};
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
    pub fn change(&self, id: &str, by: By, mut change: SettingsChange) -> Result<Arc<Sandbox>> {
        if change.limits.processes == Change::Remove {
            change.limits.processes = Change::Set(self.default_max_processes);
        }
        let turn = match self.begin_change(id, by == By::Tenant, &|sandbox| {
            Ok(sandbox.is_changed_by(&change))
        })? {
            Ok(turn) => turn,
            Err(unchanged) => return Ok(unchanged),
        };
        let sandbox = &turn.sandbox;
        let old = sandbox.resource_limits();
        let mut new = old;
        change.limits.apply(&mut new);
        if new != old {
            self.put_in_force(sandbox, new, old)?;
        }
        let before = sandbox.change(change);
        self.write_down(sandbox).inspect_err(|_| {
            sandbox.take_back(before);
            if new != old {
                let _ = self.put_in_force(sandbox, old, new);
            }
        })?;
        Ok(Arc::clone(sandbox))
    }

    /// Ends a sandbox no earlier than after this time from now. One that has no end keeps none.
    ///
    /// # Errors
    /// `NotFound`; `NoSpace` if it cannot be written down: it is not changed then.
    pub fn extend_lifetime(&self, id: &str, least: Duration) -> Result<Arc<Sandbox>> {
        let turn = match self.begin_change(id, false, &|sandbox| Ok(sandbox.ends_before(least)))? {
            Ok(turn) => turn,
            Err(unchanged) => return Ok(unchanged),
        };
        let before = turn.sandbox.set_left(least);
        self.write_down(&turn.sandbox)
            .inspect_err(|_| turn.sandbox.take_back(before))?;
        Ok(Arc::clone(&turn.sandbox))
    }

    /// Has other limits hold than these.
    fn put_in_force(
        &self,
        sandbox: &Sandbox,
        new: ResourceLimits,
        old: ResourceLimits,
    ) -> Result<()> {
        let starters = starters(sandbox.isolation());
        let all = |limits: ResourceLimits| {
            limits
                .processes
                .unwrap_or(u64::MAX)
                .saturating_add(starters)
        };
        let [all_new, all_old] = [new, old].map(all);
        self.limiter
            .change(&sandbox.limits, new.whole, [all_new, all_old])?;
        let of_each = self
            .policy
            .limits(new.processes.unwrap_or(u64::MAX), new.data);
        sandbox.workspace.set_limits(of_each);
        Ok(())
    }
}

/// Processes that a sandbox has besides those of its commands: one in namespaces is started by another, which ends at once.
pub(super) fn starters(isolation: Isolation) -> u64 {
    u64::from(isolation == Isolation::Namespaces)
}
