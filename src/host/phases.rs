//! Stops and starts sandboxes: the way from one phase of a sandbox's life to the next.
//!
//! A change takes the id for itself, a pause and its end too; requests for that sandbox wait for its end. The new phase is made first and then takes
//! the place of the one before, so that a start which fails leaves the sandbox as it was.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::life::{By, Left, Life, Waker};
use super::records::{LastRun, Record, RecordFile};
use super::sandbox::Lasting;
use super::standing::SandboxState;
use super::table::{SandboxTable, Unready};
use super::{Host, Sandbox, changing, log_of, unknown};
use crate::clock::now_ms;
use crate::confine::{FileView, Grants};
use crate::error::{Error, Kind, Result};
use crate::files::DiskUse;
use crate::process::Reason;
use crate::spec::sandbox::{Phase, StopCause};
use crate::sys::{self, User, proc};
use crate::threads::lock::{Mutex, MutexGuard, lock};
use crate::workspace::{Lease, Needs};
use crate::{fault, logging};

/// How long a request waits for a change of its sandbox.
const CHANGE_LIMIT: Duration = Duration::from_secs(30);

/// How long to wait until the processes of a sandbox are gone.
const STOPPING_LIMIT: Duration = Duration::from_secs(20);

/// How long to wait for what a killed server has left of a root, and the pause between two looks.
const ROOT_LIMIT: Duration = Duration::from_secs(2);
const ROOT_PAUSE: Duration = Duration::from_millis(2);

/// Takes the id of a sandbox for a change, until it is dropped.
pub(super) struct Change<'a> {
    host: &'a Host,
    pub(super) sandbox: Arc<Sandbox>,
    /// The sandbox is not evicted for idleness meanwhile. A change is no work, so what a rule wants stays due.
    _lease: Lease,
}

/// Waits until no process has the ids of a root any more: two overlays must not write to its files. The first process of
/// those that a killed server has left ends all as soon as it notices.
fn await_end_of_ids(uid: u32) {
    let deadline = Instant::now() + ROOT_LIMIT;
    while proc::user_has_living(uid) == Some(true) && Instant::now() < deadline {
        thread::sleep(ROOT_PAUSE);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.host.table().changing.remove(&self.sandbox.id);
        self.host.changed.notify_all();
    }
}

impl Host {
    /// A lease on a sandbox's workspace. One that rests runs again for work that needs processes, if that may have it run.
    ///
    /// # Errors
    /// `NotFound`, even while it is being deleted; `Paused` and `Stopped` if it rests; `ShuttingDown`; those of
    /// [`Host::resume`].
    pub fn lease(&self, id: &str, needs: Needs) -> Result<Lease> {
        loop {
            let (table, sandbox) = self.settled(id, false)?;
            if needs == Needs::Files || sandbox.state().0 == SandboxState::Running {
                // Under the lock: whoever changes the sandbox next sees it in use.
                let lease = sandbox.workspace.lease();
                return lease.map_err(|_| leaving(&table, id));
            }
            drop(table);
            let starts = needs == Needs::Processes;
            self.resume(id, Waker::Request { starts })?;
        }
    }

    /// Stops a sandbox: ends all of its processes, and keeps its files. One that does not run stays as it is, and so does one
    /// of which a rule wants that no longer. Returns whether it was stopped by this.
    ///
    /// # Errors
    /// `NotFound`; `System` if a process does not end: the sandbox takes no commands, and can be stopped again.
    pub fn stop(&self, id: &str, by: By) -> Result<(Arc<Sandbox>, bool)> {
        self.stop_if(id, by, |_| true)
    }

    /// As [`Host::stop`], of a sandbox that is in one of these states when nobody else changes it.
    ///
    /// # Errors
    /// As [`Host::stop`]. `Forbidden` if its own token stops one that the host holds.
    pub fn stop_if(
        &self,
        id: &str,
        by: By,
        is_meant: fn(SandboxState) -> bool,
    ) -> Result<(Arc<Sandbox>, bool)> {
        let is_due = |sandbox: &Sandbox| {
            if by == By::Tenant {
                sandbox.check_not_held()?;
            }
            let runs = sandbox.phase.stopped.is_none();
            let is_change = (runs || sandbox.may_rest_more(by)) && is_meant(sandbox.state().0);
            Ok(is_change && self.is_wanted(sandbox, by))
        };
        let change = match self.begin_change(id, by == By::Tenant, &is_due)? {
            Ok(change) => change,
            Err(unchanged) => return Ok((unchanged, false)),
        };
        let sandbox = &change.sandbox;
        if sandbox.phase.stopped.is_some() {
            self.note_rest(sandbox, by)?;
            return Ok((Arc::clone(sandbox), false));
        }
        // Before anything ends: what is held is written down.
        let before = if by.holds() {
            self.note_rest(sandbox, by)?
        } else {
            None
        };
        let was_paused = sandbox.state().0 == SandboxState::Paused;
        sandbox.workspace.close_processes();
        if !self.end_processes(sandbox) {
            if let Some(before) = before {
                sandbox.take_back(before);
                self.write_down_if_possible(sandbox);
            }
            let text = format!("cannot stop sandbox {id}: a process was killed but has not ended");
            return Err(Error::new(Kind::System, text));
        }
        // Its user may be another sandbox's when somebody still has this value.
        lock(&sandbox.is_ending).0 = true;
        sandbox.workspace.end_run();
        sandbox.workspace.release();
        sandbox.limits.discard();
        if was_paused {
            sandbox.workspace.clock().go_on();
        }
        let cause = by.cause();
        let stopped = self.next_phase(sandbox, sandbox.phase.end(cause, now_ms()))?;
        stopped.begin_rest(by);
        *lock(&stopped.current) = stopped.phase;
        // Else a start of the server finds a sandbox that ran, and nothing of it.
        self.write_down_if_possible(&stopped);
        self.enter_phase(&stopped);
        log_of(id, format_args!("stopped: {}", cause.name()));
        Ok((stopped, true))
    }

    /// Has a sandbox run that is paused or stopped. One that runs stays as it is. Returns whether it runs by this.
    ///
    /// # Errors
    /// `NotFound`, even if it is deleted meanwhile; `Forbidden`, `Paused` and `Stopped` if this one may not;
    /// `ShuttingDown`; `NoSpace` if its record cannot be written; `Changed` if a path that it was given leads to something else, or a device is gone;
    /// those of making a sandbox.
    pub fn resume(&self, id: &str, waker: Waker) -> Result<(Arc<Sandbox>, bool)> {
        let is_due = |sandbox: &Sandbox| {
            let rests = sandbox.state().0 != SandboxState::Running;
            if rests {
                sandbox.check_waker(waker)?;
            }
            Ok(rests)
        };
        let change = match self.begin_change(id, waker == Waker::Tenant, &is_due)? {
            Ok(change) => change,
            Err(unchanged) => return Ok((unchanged, false)),
        };
        let resumed = if change.sandbox.phase.stopped.is_some() {
            self.start(&change, waker)?
        } else {
            self.let_go_on(&change, waker)
        };
        // Somebody wants it, so it is not idle.
        drop(resumed.workspace.lease());
        Ok((resumed, true))
    }

    /// Starts a sandbox that is stopped: what it runs from here on has all of its settings.
    ///
    /// # Errors
    /// `OverLimit` if others hold too much of its former runs; those of [`Host::resume`].
    fn start(&self, change: &Change<'_>, waker: Waker) -> Result<Arc<Sandbox>> {
        let sandbox = &change.sandbox;
        let id = &sandbox.id;
        if self.table().closed {
            return Err(ending(id));
        }
        fault::point("start of a sandbox");
        sandbox.workspace.check_held_runs()?;
        self.clear_user(sandbox)?;
        let started = self.next_phase(sandbox, Phase::begin(sandbox.phase.runs + 1, now_ms()))?;
        *lock(&started.current) = started.phase;
        let before = started.end_rest(waker);
        self.write_down(&started).inspect_err(|_| {
            // The files are those of the sandbox that stays as it was.
            *lock(&sandbox.current) = sandbox.phase;
            sandbox.take_back(before);
            sandbox.workspace.end_run();
        })?;
        self.enter_phase(&started);
        log_of(id, format_args!("started"));
        Ok(started)
    }

    /// Notes that a sandbox rests, while it is being changed. Returns what it was before, if that is another.
    ///
    /// # Errors
    /// `NoSpace` if that it is held cannot be written down: it is not held then. All else holds in any case.
    pub(super) fn note_rest(&self, sandbox: &Sandbox, by: By) -> Result<Option<Life>> {
        let before = sandbox.begin_rest(by);
        let Some(before) = before else {
            return Ok(None);
        };
        if by.holds() {
            self.write_down(sandbox)
                .inspect_err(|_| sandbox.take_back(before.clone()))?;
        } else {
            self.write_down_if_possible(sandbox);
        }
        Ok(Some(before))
    }

    /// Writes down what holds in any case.
    pub(super) fn write_down_if_possible(&self, sandbox: &Sandbox) {
        if let Err(error) = self.write_down(sandbox) {
            logging::info(format_args!("sandbox {}: {error}", sandbox.id));
        }
    }

    /// Ends what has appeared in a stopped sandbox: a command that the server before was starting when it was killed becomes
    /// a process of its user only now.
    pub(super) fn end_late_leftovers(&self, id: &str) {
        let is_due = |sandbox: &Sandbox| Ok(sandbox.phase.stopped.is_some());
        if let Ok(Ok(change)) = self.begin_change(id, false, &is_due) {
            let _ = self.clear_user(&change.sandbox);
        }
    }

    /// Makes sandboxes of records: each is stopped.
    pub(super) fn adopt(
        &self,
        records: Vec<(Record, Arc<RecordFile>)>,
        last_run: LastRun,
    ) -> Result<()> {
        let cause = match last_run {
            LastRun::Ended => StopCause::Restart,
            LastRun::Killed => StopCause::Crash,
            LastRun::MachineEnded => StopCause::Machine,
        };
        let mut adopted = Vec::with_capacity(records.len());
        for (record, file) in records {
            let had_stopped = record.phase.stopped.is_some();
            let sandbox = match self.adopt_one(record.clone(), Arc::clone(&file), cause) {
                // A disk that is full is enough for that, and what one tenant has done must not keep the others from
                // being served. Its uid stays taken.
                Err(error) if record.spec.root.is_some() => {
                    let id = &record.id;
                    logging::info(format_args!(
                        "sandbox {id} cannot be taken over yet, and can be deleted: {error}"
                    ));
                    let unready = Unready {
                        record,
                        file,
                        cause,
                    };
                    self.table().unready.push(unready);
                    continue;
                }
                adopted => adopted?,
            };
            // What cannot be written is found the same way by the next server.
            if !had_stopped {
                self.write_down_if_possible(&sandbox);
            }
            adopted.push(sandbox);
        }
        self.table().insert(&adopted);
        self.changed.notify_all();
        if !adopted.is_empty() {
            logging::info(format_args!(
                "took over {} sandboxes of an earlier server; they are stopped until they are needed",
                adopted.len()
            ));
        }
        Ok(())
    }

    /// Tries again to take over what could not be.
    pub(super) fn retry_adoptions(&self) {
        let all = self.table().unready.clone();
        for Unready {
            record,
            file,
            cause,
        } in all
        {
            let id = record.id.clone();
            let Ok(sandbox) = self.adopt_one(record, file, cause) else {
                continue;
            };
            let mut table = self.table();
            // Unless it was deleted meanwhile.
            if table.take_unready(&id).is_some() {
                table.insert(&[Arc::clone(&sandbox)]);
                drop(table);
                self.changed.notify_all();
                self.write_down_if_possible(&sandbox);
                logging::info(format_args!("took over sandbox {id}"));
            }
        }
    }

    fn adopt_one(
        &self,
        record: Record,
        file: Arc<RecordFile>,
        cause: StopCause,
    ) -> Result<Arc<Sandbox>> {
        let phase = match record.phase.stopped {
            Some(_) => record.phase,
            None => record.phase.end(cause, now_ms()),
        };
        let (uid, spec) = (record.uid, record.spec);
        let user = User { uid, gid: uid };
        let home = self.homes.open_home(&record.id, user)?;
        let isolation = spec.isolation.unwrap_or_default();
        let has_network = spec
            .network
            .as_ref()
            .is_some_and(|network| isolation.owns_network(network));
        let lasting = Arc::new(Lasting {
            home: self.homes.path.join(&record.id),
            id: record.id,
            number: record.number,
            user,
            created_at_ms: record.created_at_ms,
            life: Mutex::new(Life {
                settings: record.settings,
                left: Left::found(record.expires_at_ms, record.left_ms),
                rests: record.rests,
                stands: record.stands,
                is_held: record.is_held,
            }),
            turn: Mutex::default(),
            token: OnceLock::new(),
            ports: if has_network {
                self.tcp_ports.of_own_network(spec.tcp_ports)
            } else {
                self.tcp_ports.take_again(&record.tcp_ports)
            },
            root: OnceLock::new(),
            ledger: self.budget.ledger(),
            disk: DiskUse::default(),
            current: Mutex::new(phase),
            file,
            spec,
            given: record.given,
        });
        if let Some(root) = &lasting.spec.root {
            await_end_of_ids(uid);
            let root = self
                .roots
                .make(root, user, &home, lasting.max_processes())?;
            let _ = lasting.root.set(root);
        }
        let grants = paths_at_rest(&lasting);
        self.assemble(lasting, phase, home, None, &grants)
    }

    /// Waits until no other request changes a sandbox. None does as long as the table is locked. One that `yields` comes
    /// after all who wait at the same time.
    fn settled(
        &self,
        id: &str,
        yields: bool,
    ) -> Result<(MutexGuard<'_, SandboxTable>, Arc<Sandbox>)> {
        let mut table = self.table();
        let is_blocked = |table: &mut SandboxTable| table.is_blocked(id, yields);
        if is_blocked(&mut table) {
            if !yields {
                table.expect(id);
            }
            let (mut settled, is_settled) =
                self.changed.wait_while_for(table, CHANGE_LIMIT, is_blocked);
            if !yields && settled.stop_expecting(id) {
                self.changed.notify_all();
            }
            if !is_settled {
                return Err(changing(id));
            }
            table = settled;
        }
        let found = table.sandboxes.get(id).cloned();
        Ok((table, found.ok_or_else(|| unknown(id))?))
    }

    /// Takes a sandbox for a change; or returns it if `is_due` says, while nobody else changes it, that there is nothing to
    /// change. A tenant's change `yields` to all other requests and rules: a tenant that asks again and again, for what
    /// takes long, keeps nobody from the sandbox.
    ///
    /// # Errors
    /// `NotFound`; `ShuttingDown`; those of `is_due`.
    pub(super) fn begin_change(
        &self,
        id: &str,
        yields: bool,
        is_due: &dyn Fn(&Sandbox) -> Result<bool>,
    ) -> Result<std::result::Result<Change<'_>, Arc<Sandbox>>> {
        let (mut table, sandbox) = self.settled(id, yields)?;
        // A tenant that changes it again and again does not put off its end.
        if table.doomed.contains(id) || sandbox.is_over() {
            return Err(unknown(id));
        }
        if !is_due(&sandbox)? {
            return Ok(Err(sandbox));
        }
        let lease = sandbox.workspace.quiet_lease();
        let lease = lease.map_err(|_| leaving(&table, id))?;
        table.changing.insert(id.to_owned());
        drop(table);
        Ok(Ok(Change {
            host: self,
            sandbox,
            _lease: lease,
        }))
    }

    /// # Errors
    /// `NotFound` or `ShuttingDown` if somebody waits for the end of a change, to delete the sandbox or to end the server.
    pub(super) fn check_not_called_off(&self, id: &str) -> Result<()> {
        let table = self.table();
        if table.doomed.contains(id) {
            return Err(unknown(id));
        }
        if table.closed {
            return Err(ending(id));
        }
        Ok(())
    }

    /// Ends what runs as the user of a stopped sandbox: an earlier server may have left it, where this one has not seen it.
    fn clear_user(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        if !sys::user_has_processes(sandbox.user) || self.end_processes(sandbox) {
            return Ok(());
        }
        let (id, uid) = (&sandbox.id, sandbox.user.uid);
        let text =
            format!("cannot start sandbox {id}: its uid {uid} has a process that does not end");
        Err(Error::new(Kind::System, text))
    }

    /// Ends all processes of a sandbox, whatever the server does with its files. False if one is left.
    fn end_processes(&self, sandbox: &Arc<Sandbox>) -> bool {
        let deadline = Instant::now() + STOPPING_LIMIT;
        let mut is_empty = false;
        let done = |_: &Arc<Sandbox>, is_done| is_empty = is_done;
        self.signaller
            .empty([sandbox], Reason::Killed, false, deadline, done);
        is_empty
    }

    /// Makes the next phase of a sandbox.
    fn next_phase(&self, sandbox: &Sandbox, phase: Phase) -> Result<Arc<Sandbox>> {
        let lasting = Arc::clone(&sandbox.lasting);
        let home = self.homes.open_home(&lasting.id, lasting.user)?;
        let grants = if phase.stopped.is_some() {
            paths_at_rest(&lasting)
        } else {
            // The kernel, or the settings of the server, may be others than when it was made.
            let (isolation, network) = (lasting.isolation(), lasting.network());
            self.policy.check_isolation(isolation)?;
            self.policy.check_network(isolation, network)?;
            self.limiter.check(lasting.resource_limits().whole)?;
            let view = FileView::new(isolation, lasting.spec.root.is_some());
            self.grants(&lasting.spec, view, Some(&lasting.given))?
        };
        self.assemble(lasting, phase, home, Some(sandbox), &grants)
    }

    /// Lists a sandbox in its next phase, unless it is deleted.
    fn enter_phase(&self, sandbox: &Arc<Sandbox>) {
        let mut table = self.table();
        if table.sandboxes.contains_key(&sandbox.id) {
            table.insert(std::slice::from_ref(sandbox));
        }
    }

    /// Writes down what a sandbox is.
    ///
    /// # Errors
    /// `NoSpace`: what was written down before holds.
    pub(super) fn write_down(&self, sandbox: &Sandbox) -> Result<()> {
        let Some(records) = &self.records else {
            return Ok(());
        };
        records.replace(&sandbox.file, || {
            // Not locked while the rest is looked at.
            let phase = *lock(&sandbox.current);
            sandbox.record(phase)
        })
    }
}

fn ending(id: &str) -> Error {
    let text = format!("sandbox {id} stays as it is: the server is ending");
    Error::new(Kind::ShuttingDown, text)
}

/// The error of a sandbox that begins no more work: it is being deleted, or the server ends and the next one has it.
fn leaving(table: &SandboxTable, id: &str) -> Error {
    if table.closed {
        let text = format!("sandbox {id} begins no more work: the server is ending");
        Error::new(Kind::ShuttingDown, text)
    } else {
        unknown(id)
    }
}

fn paths_at_rest(lasting: &Lasting) -> Grants {
    let spec = &lasting.spec;
    Grants::at_rest(&spec.read_only_paths, &spec.read_write_paths)
}
