//! Deletes sandboxes: ends their processes, removes their homes, and gives users and slots back.
//!
//! Every deletion has a result, whatever fails. A sandbox of which something is left keeps its slot and its user, and
//! its deletion is retried.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::records::RecordFile;
use super::sandbox::Lasting;
use super::table::{SandboxTable, Unready};
use super::unfinished::Removal;
use super::{Host, Sandbox, changing, unknown};
use crate::error::{Error, Kind, Result};
use crate::process::Reason;
use crate::threads::Thread;
use crate::threads::lock::lock;
use crate::threads::panics::contain;
use crate::{fault, logging};

/// How long to wait until killed processes are gone.
const EMPTYING_LIMIT: Duration = Duration::from_secs(20);

/// Time between SIGTERM and SIGKILL when the server ends.
const GRACE: Duration = Duration::from_secs(5);

/// Most time before a deletion is answered; clients give up after 60 s. What is left of the home then is removed in the
/// background. In unit tests this is all of it.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 40 });

/// How long to wait for killed processes when the server ends.
const FINAL_EMPTYING_LIMIT: Duration = Duration::from_secs(1);

/// How long waiting for killed processes and removing homes may take together when the server ends.
const REMOVAL_LIMIT: Duration = Duration::from_secs(3);

/// Most time for each sandbox on a background thread that deletes several.
const BACKGROUND_LIMIT: Duration = Duration::from_secs(10);

/// Most time for each sandbox on the maintenance thread, if no background thread could be started.
const INLINE_LIMIT: Duration = Duration::from_secs(1);

/// The result of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Whether this call deleted the sandbox.
    pub is_first_report: bool,
    /// Whether its home is still being removed.
    pub is_removing: bool,
}

/// The result of deleting all sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllEnded {
    /// Number of sandboxes that this call deleted.
    pub count: usize,
    /// Number of homes that are still being removed.
    pub removing: usize,
}

impl Host {
    /// Deletes a sandbox: kills its processes, removes its home, and frees its user and slot. If the home is
    /// too large to be removed in time, or threads of the server are still in it, it is removed in the background; until
    /// then, user and slot stay taken.
    ///
    /// # Errors
    /// `NotFound` for an unknown id. `System` if something cannot be ended or removed: the sandbox is no
    /// longer listed, keeps its slot and user, and the deletion is retried.
    pub fn delete(&self, id: &str) -> Result<Ended> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut table = self.table();
        if table.changing.contains(id) {
            table.doomed.add(id);
            let left = deadline.saturating_duration_since(Instant::now());
            let is_changing = |table: &mut SandboxTable| table.changing.contains(id);
            let (settled, is_settled) = self.changed.wait_while_for(table, left, is_changing);
            table = settled;
            table.doomed.remove(id);
            if !is_settled {
                return Err(changing(id));
            }
        }
        while !table.sandboxes.contains_key(id) {
            let is_ending = table.is_ending(id);
            let left = deadline.saturating_duration_since(Instant::now());
            if table.has_ended(id) || (is_ending && left.is_zero()) {
                return Ok(Ended {
                    is_first_report: false,
                    is_removing: is_ending || table.stuck.contains_key(id),
                });
            }
            if !is_ending {
                break;
            }
            table = self.changed.wait_for(table, Some(left));
        }
        let sandbox = table.take(id);
        let unready = table.take_unready(id);
        drop(table);
        match (sandbox, unready) {
            (Some(sandbox), _) => self.end(&sandbox, "deleted", deadline),
            (None, Some(unready)) => Ok(self.end_unready(&[unready], deadline)),
            (None, None) => Err(unknown(id)),
        }
    }

    /// What follows is the deletion, whatever happens to this server.
    fn note_deletion(&self, file: &RecordFile) {
        if let Some(records) = &self.records
            && let Err(error) = records.begin_deletion(file)
        {
            logging::info(format_args!("{error}"));
        }
    }

    /// Deletes sandboxes that were taken out of the table before they could be taken over: nothing of them runs.
    fn end_unready(&self, all: &[Unready], deadline: Instant) -> Ended {
        for Unready { record, file, .. } in all {
            self.note_deletion(file);
            let (id, uid) = (record.id.clone(), Some(record.uid));
            self.table().put_off(Removal { id, uid });
        }
        self.retry_removals(deadline);
        let is_left = |removal: &Removal| all.iter().any(|one| one.record.id == removal.id);
        Ended {
            is_first_report: true,
            is_removing: self.table().unfinished.iter().any(is_left),
        }
    }

    /// Deletes all sandboxes, and retries deletions that were not completed before.
    ///
    /// # Errors
    /// That of the first deletion that failed; the others were tried nevertheless.
    pub fn delete_all(&self) -> Result<AllEnded> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let mut table = self.table();
        let doomed = table.changing.clone();
        for id in &doomed {
            table.doomed.add(id);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let is_changing = |table: &mut SandboxTable| !table.changing.is_empty();
        let (mut table, _) = self.changed.wait_while_for(table, left, is_changing);
        for id in &doomed {
            table.doomed.remove(id);
        }
        // All are taken before the first is killed: after another request has deleted one, its uid may
        // belong to a new sandbox. What is being changed still has a thread that signals its user.
        let ids = table.sandboxes.keys().chain(table.stuck.keys());
        let (late, ids): (Vec<_>, Vec<_>) =
            ids.cloned().partition(|id| table.changing.contains(id));
        let all: Vec<_> = ids.iter().filter_map(|id| table.take(id)).collect();
        let unready = std::mem::take(&mut table.unready);
        drop(table);
        let mut failure = late.first().map(|id| changing(id));
        let mut count = unready.len();
        self.end_unready(&unready, deadline);
        self.end_all(&all, "deleted", deadline, |result| match result {
            Ok(ended) => count += usize::from(ended.is_first_report),
            Err(error) => failure = failure.take().or(Some(error)),
        });
        // Waits for sandboxes that other requests are deleting.
        let left = deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| !table.ending.is_empty());
        self.retry_removals(deadline);
        if let Some(error) = failure {
            return Err(error);
        }
        let table = self.table();
        let removing = table.ending.len() + table.count_stuck();
        Ok(AllEnded { count, removing })
    }

    /// Deletes a sandbox that was taken out of the table. What is left of its home at the `deadline` is
    /// removed later.
    fn end(&self, sandbox: &Arc<Sandbox>, how: &str, deadline: Instant) -> Result<Ended> {
        let mut ended = Err(unknown(&sandbox.id));
        let report = |result| ended = result;
        self.end_all(std::slice::from_ref(sandbox), how, deadline, report);
        ended
    }

    /// Deletes sandboxes that were taken out of the table, each as soon as none of its processes is left, so that a
    /// sandbox whose processes do not end does not delay the others. Calls `report` with each result.
    fn end_all(
        &self,
        all: &[Arc<Sandbox>],
        how: &str,
        deadline: Instant,
        mut report: impl FnMut(Result<Ended>),
    ) {
        let begun = Instant::now();
        let mut unsettled = Unsettled {
            host: self,
            left: all.iter().map(|one| (one.number, one)).collect(),
        };
        for sandbox in all {
            sandbox.workspace.close();
            lock(&sandbox.is_ending).0 = true;
            self.note_deletion(&sandbox.file);
        }
        let mut shares = Shares::new(all.len(), deadline);
        let emptying_deadline = deadline.min(begun + EMPTYING_LIMIT);
        let done = |sandbox: &Arc<Sandbox>, is_empty: bool| {
            let share = shares.next();
            // A panic for one sandbox must not keep the others from being deleted.
            let result = contain(|| {
                fault::point("deletion");
                sandbox.workspace.release();
                if sandbox.workspace.is_in_use() {
                    return Ok(false);
                }
                if !is_empty {
                    let id = &sandbox.id;
                    let text =
                        format!("cannot end sandbox {id}: a process was killed but has not ended");
                    return Err(Error::new(Kind::System, text));
                }
                sandbox.limits.discard();
                let is_gone = self.homes.remove(&sandbox.id, Some(share))?;
                if let Some(records) = self.records.as_ref().filter(|_| is_gone) {
                    records.end_deletion(&sandbox.file);
                }
                Ok(is_gone)
            });
            let result = result.unwrap_or_else(|_| Err(failed_to_delete()));
            let settled = self.settle(sandbox, result, how, begun.elapsed());
            unsettled.left.remove(&sandbox.number);
            report(settled);
        };
        fault::point("emptying");
        self.signaller
            .empty(all, Reason::Deleted, true, emptying_deadline, done);
    }

    /// Records the result of a deletion: true if nothing is left, false if a part of the home is left.
    fn settle(
        &self,
        sandbox: &Arc<Sandbox>,
        result: Result<bool>,
        how: &str,
        taken: Duration,
    ) -> Result<Ended> {
        let Lasting { id, user, .. } = &***sandbox;
        let outcome = match &result {
            Ok(true) => format!(", in {} us", taken.as_micros()),
            Ok(false) => " stays taken: its home is still being removed".to_owned(),
            Err(error) => format!(" stays taken: something is left: {error}"),
        };
        logging::info(format_args!(
            "sandbox {id} {how}, uid {}{outcome}",
            user.uid
        ));
        let is_first_report = self.table().settle(sandbox, &result);
        self.changed.notify_all();
        result.map(|is_gone| Ended {
            is_first_report,
            is_removing: !is_gone,
        })
    }

    /// Deletes sandboxes on another thread, because removing a large home takes a while. A deletion that
    /// does not end in time is retried later, so that it does not delay the others.
    pub(super) fn end_in_background(
        self: &Arc<Self>,
        leaving: Vec<Arc<Sandbox>>,
        how: &'static str,
    ) {
        if leaving.is_empty() {
            return;
        }
        let leaving = Arc::new(leaving);
        let (host, theirs) = (Arc::clone(self), Arc::clone(&leaving));
        let end_all = move |host: &Self, leaving: &[Arc<Sandbox>], limit: Duration| {
            let count = u32::try_from(leaving.len()).unwrap_or(u32::MAX);
            host.end_all(leaving, how, Instant::now() + limit * count, |_| {});
        };
        let thread = Thread::new("ending").start(move || end_all(&host, &theirs, BACKGROUND_LIMIT));
        if thread.is_err() {
            // A deletion that has panicked is retried later.
            let _ = contain(|| end_all(self, &leaving, INLINE_LIMIT));
        }
    }

    /// Ends the processes of all sandboxes (SIGTERM, then SIGKILL after [`GRACE`]). Removes the homes, unless the next
    /// server has the sandboxes again.
    pub fn shut_down(&self) {
        self.table().closed = true;
        // Sandboxes that are being made are ended with the others.
        self.wait_while(GRACE, |table| {
            table.reserved > 0 || !table.changing.is_empty()
        });
        let mut all = self.list();
        all.extend(self.table().stuck.values().cloned());
        for sandbox in &all {
            sandbox.workspace.close();
        }
        let left = || -> Vec<&Arc<Sandbox>> {
            let runs = |sandbox: &&Arc<Sandbox>| {
                sandbox.workspace.processes.is_starting() || sandbox.has_processes()
            };
            all.iter().filter(runs).collect()
        };
        for sandbox in left() {
            sandbox.workspace.processes.hang_up_terminals();
            sandbox.workspace.processes.expect_signal(libc::SIGTERM);
            self.signaller.signal_sandbox(sandbox, libc::SIGTERM);
            // A stopped process handles SIGTERM only when it continues.
            sandbox.thaw();
            self.signaller.signal_sandbox(sandbox, libc::SIGCONT);
        }
        let deadline = Instant::now() + GRACE;
        while !left().is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let emptying_deadline = Instant::now() + FINAL_EMPTYING_LIMIT;
        let removal_deadline = Instant::now() + REMOVAL_LIMIT;
        let mut shares = Shares::new(all.len(), removal_deadline);
        let mut unfinished = Vec::new();
        // A home is removed even if processes are left: they end with the server.
        let done = |sandbox: &Arc<Sandbox>, _is_empty| {
            sandbox.limits.discard();
            let share = Some(shares.next());
            if self.records.is_none() && !matches!(self.homes.remove(&sandbox.id, share), Ok(true))
            {
                unfinished.push(Arc::clone(sandbox));
            }
        };
        self.signaller
            .empty(&all, Reason::Killed, true, emptying_deadline, done);
        for sandbox in unfinished {
            let _ = self.homes.remove(&sandbox.id, Some(removal_deadline));
        }
        self.retry_removals(removal_deadline);
        let left = removal_deadline.saturating_duration_since(Instant::now());
        self.wait_while(left, |table| {
            !table.ending.is_empty() || !table.retried.is_empty()
        });
        if let Some(records) = &self.records {
            records.note_end();
        }
    }

    /// Waits while the condition is true, at most for `limit`.
    fn wait_while(&self, limit: Duration, condition: impl Fn(&SandboxTable) -> bool) {
        let condition = |table: &mut SandboxTable| condition(table);
        drop(self.changed.wait_while_for(self.table(), limit, condition));
    }
}

/// Divides the time up to a deadline fairly between sandboxes: time that one does not use goes to those after it.
struct Shares {
    left: usize,
    deadline: Instant,
}

impl Shares {
    fn new(count: usize, deadline: Instant) -> Self {
        let left = count;
        Self { left, deadline }
    }

    /// When the next share of the time ends, which begins now.
    fn next(&mut self) -> Instant {
        let now = Instant::now();
        let count = u32::try_from(self.left.max(1)).unwrap_or(u32::MAX);
        self.left = self.left.saturating_sub(1);
        now + self.deadline.saturating_duration_since(now) / count
    }
}

/// The result of a deletion that has panicked.
fn failed_to_delete() -> Error {
    let text = "the server failed to delete the sandbox and will retry; its log says where";
    Error::new(Kind::System, text)
}

/// Sandboxes whose deletion has no result yet. Dropping this, after a panic, records a failure for each of them, so
/// that their deletions are retried.
struct Unsettled<'a> {
    host: &'a Host,
    /// By the sandbox's number.
    left: HashMap<u64, &'a Arc<Sandbox>>,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        for (_, sandbox) in self.left.drain() {
            let failed = Err(failed_to_delete());
            self.host.table().settle(sandbox, &failed);
            self.host.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;
    use std::os::unix::fs::chown;
    use std::os::unix::process::CommandExt;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::config::HostSettings;
    use crate::config::{RootSettings, SnapshotSettings};
    use crate::egress::Egress;
    use crate::host::Shortage;
    use crate::host::unfinished::Unfinished;
    use crate::http::slots::ConnectionSlots;
    use crate::interpreter::ContextsSettings;
    use crate::limits::ledger::Budget;
    use crate::process::registry::Shared;
    use crate::spec::isolation::{DefaultIsolation, Isolation};
    use crate::spec::network::NetworkPolicy;
    use crate::spec::sandbox::SandboxSpec;
    use crate::threads::lock::Mutex;

    /// A host with a reservation for one sandbox, in a directory of its own.
    struct Small {
        host: Arc<Host>,
        homes: PathBuf,
    }

    /// A host with a place for each of these users.
    fn start(homes: &Path, users: RangeInclusive<u32>, keep: bool) -> Arc<Host> {
        let settings = HostSettings {
            paused_limit: None,
            stopped_limit: None,
            capacity: users.clone().count(),
            homes: homes.to_owned(),
            keep,
            max_aside: 0,
            users,
            min_landlock_abi: 0,
            allow_unconfined: true,
            cdi: Vec::new(),
            tcp_ports: None,
            isolation: DefaultIsolation::Fixed(Isolation::Landlock),
            roots: RootSettings::default(),
            snapshots: SnapshotSettings::default(),
            token_file: None,
        };
        let shared = Shared::new(4096, 4096).unwrap();
        let contexts = ContextsSettings::default();
        let budget = Budget::new(1 << 20);
        let egress = Egress::new(ConnectionSlots::new(1, Arc::clone(&budget)));
        Host::new(
            &settings,
            None,
            NetworkPolicy::Open,
            egress,
            shared,
            budget,
            contexts,
        )
        .unwrap()
    }

    impl Small {
        /// A host for `count` sandboxes, which end with it. No other test, of this run or another, has its users. `None`
        /// if only root can make one, and this is somebody else.
        fn new(count: u32) -> Option<Self> {
            Self::keeping(count, false)
        }

        /// A host for `count` sandboxes, which with `keep` outlive it.
        fn keeping(count: u32, keep: bool) -> Option<Self> {
            static TAKEN: AtomicU32 = AtomicU32::new(0);
            if !nix::unistd::geteuid().is_root() {
                assert!(std::env::var_os("CI").is_none(), "needs root");
                return None;
            }
            let own = 64_100 + std::process::id() % 60 * 16;
            let uid = own + TAKEN.fetch_add(count, Ordering::Relaxed);
            let homes = std::env::temp_dir().join(format!("sbx-host-{uid}-{}", std::process::id()));
            let host = start(&homes, uid..=uid + count - 1, keep);
            Some(Self { host, homes })
        }

        /// Ends the host, and leaves its directory.
        fn stop(mut self) -> PathBuf {
            std::mem::take(&mut self.homes)
        }

        /// Has the next creation fail, and what it leaves stay until the value is dropped.
        fn obstruct(&self) -> Obstacle {
            let id = self.host.table().next_id();
            let home = self.homes.join(&id);
            std::fs::create_dir(&home).unwrap();
            chown(&home, Some(*self.host.users.start()), None).unwrap();
            let place = home.join("busy");
            std::fs::create_dir(&place).unwrap();
            let mut mount = std::process::Command::new("mount");
            let mounted = mount.args(["-t", "tmpfs", "none"]).arg(&place).status();
            assert!(mounted.unwrap().success());
            let record = self.homes.join(format!(".sandboxes/{id}.deleting"));
            Obstacle {
                place,
                home,
                record,
            }
        }

        fn create(&self) -> Option<Arc<Sandbox>> {
            let (mut made, _) = self.host.create(1, &SandboxSpec::default()).unwrap();
            made.pop()
        }
    }

    /// A file system in the way of a home: it can neither be made nor removed.
    struct Obstacle {
        place: PathBuf,
        home: PathBuf,
        /// What says that the home is to be removed.
        record: PathBuf,
    }

    impl Drop for Obstacle {
        fn drop(&mut self) {
            let mut unmount = std::process::Command::new("umount");
            let _ = unmount.arg("-l").arg(&self.place).status();
        }
    }

    /// Waits until a sandbox can be made.
    fn wait_for_place(host: &Host) -> u32 {
        let take = |_| {
            thread::sleep(Duration::from_millis(1));
            host.table().reserve(1, |_| true).unwrap().0.pop()
        };
        (0..30_000).find_map(take).unwrap().user.uid
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.homes);
        }
    }

    /// The client gets its answer meanwhile, and no other sandbox gets the user or the slot.
    #[test]
    fn a_home_that_is_not_gone_in_time_keeps_its_place_and_its_user_until_it_is() {
        let Some(small) = Small::new(1) else {
            return;
        };
        let host = &small.host;
        let sandbox = small.create().unwrap();
        std::fs::write(sandbox.home.join("file"), "x").unwrap();
        let id = sandbox.id.clone();
        assert_eq!(host.empty_for(), None);
        let ended = |is_first_report, is_removing| Ended {
            is_first_report,
            is_removing,
        };
        assert_eq!(host.delete(&id).unwrap(), ended(true, true));
        assert!(sandbox.home.join("file").exists());
        assert_eq!(host.find(&id).err().unwrap().kind(), Kind::NotFound);
        assert_eq!(host.count(), 0);
        for _ in 0..2 {
            assert!(small.create().is_none(), "its reservation is taken");
            assert_eq!(host.delete(&id).unwrap(), ended(false, true));
            let all = AllEnded {
                count: 0,
                removing: 1,
            };
            assert_eq!(host.delete_all().unwrap(), all);
        }
        assert!(host.empty_for().is_some(), "a host does not live on for it");
        // This is what the maintenance does.
        let left = host.table().take(&id).unwrap();
        assert!(host.empty_for().is_some());
        assert_eq!(host.delete(&id).unwrap(), ended(false, true));
        assert!(small.create().is_none(), "its reservation is taken");
        assert!(host.empty_for().is_some());
        host.end(&left, "tried again", Instant::now() + BACKGROUND_LIMIT)
            .unwrap();
        assert!(!sandbox.home.exists());
        assert_eq!(host.delete(&id).unwrap(), ended(false, false));
        let next = small.create().unwrap();
        assert_eq!(next.user, sandbox.user);
        assert_eq!(host.empty_for(), None);
    }

    /// Requests wait for the end of a deletion. Their connections have an owner meanwhile.
    #[test]
    fn a_sandbox_holds_what_waits_for_its_end() {
        let Some(small) = Small::new(1) else {
            return;
        };
        let host = &small.host;
        let sandbox = small.create().unwrap();
        let own = Arc::clone(&sandbox.workspace.ledger);
        let is_known = || {
            let known = host.ledger_of(&sandbox.id);
            known.is_some_and(|known| Arc::ptr_eq(&known, &own))
        };
        let taken = host.table().take(&sandbox.id).unwrap();
        assert!(is_known());
        std::fs::write(sandbox.home.join("file"), "x").unwrap();
        assert!(
            host.end(&taken, "deleted", Instant::now())
                .unwrap()
                .is_removing
        );
        assert!(!is_known(), "nobody waits for what was reported");
    }

    /// A tenant that asks for one change after another keeps neither the operator nor a rule from its sandbox.
    #[test]
    fn a_tenants_change_comes_after_all_who_wait() {
        let Some(small) = Small::new(1) else {
            return;
        };
        let host = &small.host;
        let id = small.create().unwrap().id.clone();
        let begin = |yields| host.begin_change(&id, yields, &|_| Ok(true)).unwrap();
        let first = begin(true);
        let order = Mutex::new(Vec::new());
        let change = |yields| {
            let turn = begin(yields);
            lock(&order).push(yields);
            drop(turn);
        };
        thread::scope(|scope| {
            for yields in [true, true, true, true, false, true, true, false] {
                let change = &change;
                scope.spawn(move || change(yields));
            }
            while host.table().expected_count(&id) < 2 {
                thread::yield_now();
            }
            drop(first);
        });
        assert_eq!(lock(&order)[..2], [false; 2]);
    }

    /// A start does not wait for homes that take long.
    #[test]
    fn what_a_start_has_no_time_to_remove_keeps_its_user_until_it_is_gone() {
        let Some(small) = Small::new(1) else {
            return;
        };
        let host = &small.host;
        let sandbox = small.create().unwrap();
        std::fs::write(sandbox.home.join("file"), "x").unwrap();
        let all = || vec![sandbox.id.clone()];
        let none = Duration::ZERO;
        let unfinished = Unfinished::begin(&host.homes, None, all(), none);
        assert_eq!(unfinished.uids(), [sandbox.user.uid]);
        assert!(sandbox.home.join("file").exists());
        // As if it had not been made by this server.
        host.table().sandboxes.clear();
        unfinished.finish(host, Vec::new());
        assert_eq!(wait_for_place(host), sandbox.user.uid);
        assert!(!sandbox.home.exists());
        assert!(
            Unfinished::begin(&host.homes, None, all(), none)
                .uids()
                .is_empty()
        );
    }

    #[test]
    fn what_is_left_of_one_that_cannot_be_made_keeps_its_place_until_it_is_gone() {
        for keep in [true, false] {
            let Some(small) = Small::keeping(1, keep) else {
                return;
            };
            let host = &small.host;
            let obstacle = small.obstruct();
            let (home, record) = (obstacle.home.clone(), obstacle.record.clone());
            host.create(1, &SandboxSpec::default()).err().unwrap();
            for _ in 0..2 {
                assert!(home.exists());
                assert_eq!(record.exists(), keep);
                let (made, shortage) = host.create(1, &SandboxSpec::default()).unwrap();
                assert!(made.is_empty());
                let expected = Shortage::Capacity {
                    capacity: 1,
                    stuck: 1,
                };
                assert_eq!(shortage, Some(expected));
                host.retry_removals(Instant::now() + BACKGROUND_LIMIT);
            }
            drop(obstacle);
            let own = Arc::clone(host);
            thread::spawn(move || own.run_maintenance());
            assert_eq!(wait_for_place(host), *host.users.start());
            assert!(!home.exists() && !record.exists());
        }
    }

    /// Nobody has written down what a server makes to see whether it can.
    #[test]
    fn a_start_removes_the_trial_of_one_that_was_killed() {
        let Some(small) = Small::keeping(1, true) else {
            return;
        };
        let users = small.host.users.clone();
        let homes = small.stop();
        let trial = homes.join(".trial");
        std::fs::create_dir_all(trial.join("deep")).unwrap();
        drop(start(&homes, users, true));
        assert!(!trial.exists());
        let names = std::fs::read_dir(&homes).unwrap();
        let mut left: Vec<_> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.retain(|name| !name.starts_with('.'));
        assert!(left.is_empty(), "{left:?}");
        let _ = std::fs::remove_dir_all(&homes);
    }

    /// Many of them would keep it from starting if they belonged to nobody.
    #[test]
    fn a_start_removes_what_is_left_of_one_that_could_not_be_made() {
        let Some(small) = Small::keeping(1, true) else {
            return;
        };
        let obstacle = small.obstruct();
        let host = &small.host;
        host.create(1, &SandboxSpec::default()).err().unwrap();
        let users = host.users.clone();
        let homes = small.stop();
        let next = start(&homes, users.clone(), true);
        assert_eq!(lock(&next.unfinished).0.uids(), [*users.start()]);
        assert!(next.homes.aside().unwrap().ids().unwrap().is_empty());
        // This start removes it no more, but its maintenance does.
        next.take_over().unwrap();
        let is_left = |_| {
            thread::sleep(Duration::from_millis(1));
            next.table().count_stuck() == 1
        };
        assert!((0..30_000).any(is_left));
        let (home, record) = (obstacle.home.clone(), obstacle.record.clone());
        assert!(home.exists() && record.exists());
        drop(obstacle);
        next.retry_removals(Instant::now() + BACKGROUND_LIMIT);
        assert!(!home.exists() && !record.exists());
        assert_eq!(wait_for_place(&next), *users.start());
        let _ = std::fs::remove_dir_all(&homes);
    }

    /// Removing the home of one may take longer than the deletion of all.
    #[test]
    fn all_are_killed_before_anything_of_one_is_removed() {
        let Some(small) = Small::new(2) else {
            return;
        };
        let (all, _) = small.host.create(2, &SandboxSpec::default()).unwrap();
        let mut command = std::process::Command::new("/bin/sleep");
        let mut sleeper = command.arg("60").uid(all[1].user.uid).spawn().unwrap();
        let mut ended = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        let done = |sandbox: &Arc<Sandbox>, is_empty| {
            let mut has_ended = || {
                thread::sleep(Duration::from_millis(1));
                sleeper.try_wait().unwrap().is_some()
            };
            assert!((0..10_000).any(|_| has_ended()));
            ended.push((sandbox.number, is_empty));
        };
        let signaller = &small.host.signaller;
        signaller.empty(&all, Reason::Deleted, true, deadline, done);
        assert_eq!(ended, [(all[0].number, true), (all[1].number, true)]);
    }
}
