//! A workspace, and the lease that keeps it from ending during a request, a stream or a transfer.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Interrupt, Stopped};
use crate::confine::{Confinement, ProcessLimits};
use crate::egress::Report;
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::files::{Files, Root, Turn};
#[cfg(feature = "interpreter")]
use crate::interpreter::Contexts;
use crate::interpreter::ContextsSettings;
use crate::limits::activity::{Activity, IdleBy};
use crate::limits::ledger::Ledger;
use crate::limits::work_clock::WorkClock;
use crate::ports::Ports;
use crate::process::registry::{END_LIMIT, MOST_HELD_RUNS, OpenCounts, Registry, Shared};
use crate::spec::network::NetworkPolicy;
use crate::sys::User;
use crate::threads::priority::{BackgroundTurn, BackgroundWork, run_in_background};
use crate::workspace::watches::Watches;

/// What work in a workspace needs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Its files, and what is known of its processes.
    Files,
    /// That its processes run, and others can start. If need be, it begins to run.
    Processes,
    /// The same, and it runs already.
    Running,
}

/// What a workspace keeps when it is [`renewed`](Workspace::renewed).
struct Lasting {
    root: Arc<Root>,
    watches: Arc<Watches>,
    ledger: Arc<Ledger>,
    open: Arc<OpenCounts>,
    background: Arc<BackgroundWork>,
    activity: Arc<Activity>,
}

/// One place where commands run and files live.
pub struct Workspace {
    this: Weak<Self>,
    pub(super) root: Arc<Root>,
    /// How its commands are started.
    pub(super) confinement: Arc<Confinement>,
    pub processes: Arc<Registry>,
    /// Its interpreters that stay.
    #[cfg(feature = "interpreter")]
    pub contexts: Arc<Contexts>,
    pub ports: Arc<Ports>,
    /// The trees that it watches for clients that poll.
    pub watches: Arc<Watches>,
    /// What is held for its clients and its processes.
    pub ledger: Arc<Ledger>,
    /// What its processes have open, those of former runs included.
    open: Arc<OpenCounts>,
    /// Requests that make its virtual environment.
    pub(super) venv_makers: Arc<AtomicUsize>,
    /// Its threads that read much or watch.
    pub(super) background: Arc<BackgroundWork>,
    activity: Arc<Activity>,
}

impl Workspace {
    /// A workspace with no processes.
    pub fn new(
        root: Root,
        confinement: Confinement,
        ports: Arc<Ports>,
        shared: Arc<Shared>,
        ledger: Arc<Ledger>,
        contexts: ContextsSettings,
    ) -> Arc<Self> {
        let root = Arc::new(root);
        let background = Arc::clone(&ledger.work);
        Self::assemble(
            Lasting {
                watches: Watches::new(&ledger, &background),
                root,
                ledger,
                open: OpenCounts::new(),
                background,
                activity: Arc::new(Activity::new()),
            },
            confinement,
            ports,
            shared,
            contexts,
            1,
        )
    }

    /// The same workspace without its processes, and with other ways to start some. Work on its files goes on: it is the
    /// work of both. Processes are numbered from `first` on.
    #[must_use]
    pub fn renewed(
        &self,
        confinement: Confinement,
        ports: Arc<Ports>,
        shared: Arc<Shared>,
        contexts: ContextsSettings,
        first: u64,
    ) -> Arc<Self> {
        Self::assemble(
            Lasting {
                root: Arc::clone(&self.root),
                watches: Arc::clone(&self.watches),
                ledger: Arc::clone(&self.ledger),
                open: Arc::clone(&self.open),
                background: Arc::clone(&self.background),
                activity: Arc::clone(&self.activity),
            },
            confinement,
            ports,
            shared,
            contexts,
            first,
        )
    }

    fn assemble(
        lasting: Lasting,
        confinement: Confinement,
        ports: Arc<Ports>,
        shared: Arc<Shared>,
        contexts: ContextsSettings,
        first: u64,
    ) -> Arc<Self> {
        #[cfg(not(feature = "interpreter"))]
        let ContextsSettings {} = contexts;
        let Lasting {
            root,
            watches,
            ledger,
            open,
            background,
            activity,
        } = lasting;
        let processes = Registry::new(
            shared,
            Arc::clone(&activity),
            Arc::clone(&ledger),
            Arc::clone(&open),
            first,
        );
        let confinement = Arc::new(confinement);
        #[cfg(feature = "interpreter")]
        let contexts = Contexts::new(
            contexts,
            Arc::clone(&processes),
            Arc::clone(&confinement),
            Arc::clone(&ledger),
            Arc::clone(&activity),
            Arc::clone(&background),
        );
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            watches,
            root,
            confinement,
            processes,
            #[cfg(feature = "interpreter")]
            contexts,
            ports,
            ledger,
            open,
            venv_makers: Arc::default(),
            background,
            activity,
        })
    }

    /// Begins a piece of work, which lasts as long as the lease.
    ///
    /// # Errors
    /// `ShuttingDown` if the workspace is ending.
    pub fn lease(self: &Arc<Self>) -> Result<Lease> {
        if !self.activity.begin_request() {
            return Err(Error::new(Kind::ShuttingDown, "the sandbox is ending"));
        }
        Ok(Lease {
            workspace: Arc::clone(self),
            is_work: true,
        })
    }

    /// A lease that is no work: idle time goes on as if it had not been.
    ///
    /// # Errors
    /// As [`Workspace::lease`].
    pub fn quiet_lease(self: &Arc<Self>) -> Result<Lease> {
        let mut lease = self.lease()?;
        lease.is_work = false;
        Ok(lease)
    }

    /// Another lease, for work that outlives the request's handler. The caller holds one, so the workspace
    /// is there.
    ///
    /// # Errors
    /// `ShuttingDown` if the workspace is ending.
    pub fn share(&self) -> Result<Lease> {
        let ending = || Error::new(Kind::ShuttingDown, "the sandbox is ending");
        self.this.upgrade().ok_or_else(ending)?.lease()
    }

    /// Another lease, whose files are accessed as an account of the sandbox's own root: relative paths begin where commands
    /// of that account start. All else is that of the workspace.
    ///
    /// # Errors
    /// `Invalid` if there is no such account; `ShuttingDown` if the workspace is ending.
    pub fn share_as(&self, user: &str) -> Result<Lease> {
        let Some((owner, is_root, home)) = self.confinement.file_account(user)? else {
            return self.share();
        };
        let root = Arc::new(self.root.for_account(owner, is_root, &home));
        let view = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            root,
            confinement: Arc::clone(&self.confinement),
            processes: Arc::clone(&self.processes),
            #[cfg(feature = "interpreter")]
            contexts: Arc::clone(&self.contexts),
            ports: Arc::clone(&self.ports),
            watches: Arc::clone(&self.watches),
            ledger: Arc::clone(&self.ledger),
            open: Arc::clone(&self.open),
            venv_makers: Arc::clone(&self.venv_makers),
            background: Arc::clone(&self.background),
            activity: Arc::clone(&self.activity),
        });
        view.lease()
    }

    /// Its files, accessed as root of the sandbox's own root, whose ids begin at those of `owner`; relative paths begin at `/`.
    pub fn root_for(&self, owner: User) -> Root {
        self.root.for_account(owner, true, "/")
    }

    /// Its files. Until the value is dropped, this thread acts on files as their owner.
    ///
    /// # Errors
    /// The kernel does not let the server act as the owner.
    pub fn files(&self) -> Result<Files<'_>> {
        self.root.files()
    }

    /// A run begins: where its commands have temporary files of their own, if they have any, and its file systems in memory.
    pub fn begin_run(&self, temporary: Option<OwnedFd>, in_memory: &[OwnedFd]) {
        self.root.begin_run(temporary, in_memory);
    }

    /// The run is over.
    pub fn end_run(&self) {
        self.root.end_run();
    }

    /// Checks that others do not hold up too much of the runs that have ended: pipes of its processes, and temporary files.
    ///
    /// # Errors
    /// `OverLimit`.
    pub fn check_held_runs(&self) -> Result<()> {
        let until = Instant::now() + END_LIMIT;
        self.processes.check_held_runs(END_LIMIT)?;
        while self.root.kept_runs() >= MOST_HELD_RUNS {
            if Instant::now() >= until {
                let text = format!(
                    "cannot start the sandbox: requests, or other processes, hold files of {MOST_HELD_RUNS} former runs of it in its \
                     /tmp or /dev/shm; end them"
                );
                return Err(Error::new(Kind::OverLimit, text));
            }
            thread::sleep(LOOK_PAUSE);
        }
        Ok(())
    }

    /// Gives the processes that start from now on other limits.
    pub fn set_limits(&self, limits: ProcessLimits) {
        self.confinement.set_limits(limits);
    }

    /// The names of the network policies that its commands can have.
    pub fn network_policies(&self) -> Vec<&'static str> {
        self.confinement.network_policies()
    }

    /// What its commands reach over the network, and what those with filters were allowed and refused.
    pub fn network(&self) -> (&NetworkPolicy, Report) {
        (self.confinement.policy(), self.confinement.exits().report())
    }

    /// Its time, which stands still while it is paused.
    pub fn clock(&self) -> &WorkClock {
        self.activity.clock()
    }

    /// How long there has been no lease and, if these count, no running process; `None` while there is one.
    pub fn idle_for(&self, by: IdleBy) -> Option<Duration> {
        self.activity.idle_for(by)
    }

    /// Whether it is ending: its sandbox is being deleted, or the server ends.
    pub fn is_closed(&self) -> bool {
        self.activity.is_closed()
    }

    /// Checks, after files were changed, that the change is still there.
    ///
    /// # Errors
    /// `NotFound` if the workspace has ended meanwhile, and its files with it.
    pub(super) fn check_open(&self) -> Result<()> {
        self.background.check_open()
    }

    /// Waits until no other request replaces one of these files. The end of the workspace ends the wait.
    ///
    /// # Errors
    /// `Changed` if others take too long; or it was interrupted.
    pub(super) fn turn(
        &self,
        paths: &[FilePath],
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Turn, Stopped> {
        self.files()?.turn(paths, &mut self.paced(interrupt))
    }

    /// Asks `interrupt` in work of this thread on much that the tenant has. Others of the tenant and the end of the
    /// workspace come before.
    pub fn paced<'i>(&self, interrupt: &'i mut dyn Interrupt) -> impl Interrupt + use<'i> {
        BackgroundTurn::of_this_thread(&self.background).before(interrupt)
    }

    /// The same, for an answer that this thread makes while its client takes it.
    pub fn paced_later(&self, interrupt: impl Interrupt + 'static) -> Box<dyn Interrupt> {
        Box::new(BackgroundTurn::of_this_thread(&self.background).before(interrupt))
    }

    /// Runs work that reads, as [`Workspace::work`] does if it is more than a thread is worth: it is then called
    /// again.
    ///
    /// # Errors
    /// `NoThreads`; or those of the work.
    pub(super) fn work_if_long(
        &self,
        interrupt: &mut dyn Interrupt,
        work: &mut (dyn FnMut(&mut dyn Interrupt) -> std::result::Result<(), Stopped> + Send),
    ) -> std::result::Result<(), Stopped> {
        match work(&mut FirstSteps(STEPS_IN_PLACE)) {
            Err(Stopped::Due) => self.work(interrupt, work),
            done => done,
        }
    }

    /// Runs work that reads much, as [`run_in_background`] does.
    ///
    /// # Errors
    /// `NoThreads`; or those of the work.
    pub(super) fn work(
        &self,
        interrupt: &mut dyn Interrupt,
        work: &mut (dyn FnMut(&mut dyn Interrupt) -> std::result::Result<(), Stopped> + Send),
    ) -> std::result::Result<(), Stopped> {
        let mut ended = Ok(());
        run_in_background(&self.background, interrupt, &mut |interrupt| {
            ended = work(interrupt);
        })?;
        ended
    }

    /// Starts nothing from here on. Its files stay in use.
    pub fn close_processes(&self) {
        #[cfg(feature = "interpreter")]
        self.contexts.close();
        self.processes.close();
        self.ports.close();
    }

    /// Ends the workspace: it gives no lease and starts nothing from here on.
    pub fn close(&self) {
        self.activity.close();
        self.close_processes();
        self.watches.close();
        self.background.close();
        self.root.close();
    }

    /// Whether a thread of the server still acts as the owner of its files.
    pub fn is_in_use(&self) -> bool {
        self.root.is_in_use()
    }

    /// Ends and lets go of what others keep open of the ended workspace, of which nothing runs any more.
    pub fn release(&self) {
        self.confinement.exits().close();
        self.ports.end_connections();
        self.processes.release();
    }

    /// Ends the workspace if it has been idle for `limit`. True if it has ended.
    pub fn close_if_idle(&self, by: IdleBy, limit: Duration) -> bool {
        self.activity.close_if_idle(by, limit)
    }
}

/// The pause between two looks whether somebody still has temporary files of former runs.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// How many steps of work, of 64 KiB or a little more, are worth less than a thread.
const STEPS_IN_PLACE: u32 = 16;

/// Lets so many steps pass.
struct FirstSteps(u32);

impl Interrupt for FirstSteps {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        self.0 = self.0.checked_sub(1).ok_or(Stopped::Due)?;
        Ok(())
    }
}

/// A workspace in use.
pub struct Lease {
    workspace: Arc<Workspace>,
    /// Whether idle time begins anew after it.
    is_work: bool,
}

impl Deref for Lease {
    type Target = Workspace;

    fn deref(&self) -> &Workspace {
        &self.workspace
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let activity = &self.workspace.activity;
        if self.is_work {
            activity.end_request();
        } else {
            activity.end_quiet_request();
        }
    }
}

#[cfg(test)]
impl Workspace {
    /// The machine, with this working directory.
    pub fn for_test(directory: &std::path::Path) -> Arc<Self> {
        #[cfg(feature = "interpreter")]
        let contexts = ContextsSettings {
            most: 1,
            journal_bytes: 4096,
        };
        #[cfg(not(feature = "interpreter"))]
        let contexts = ContextsSettings {};
        Self::new(
            Root::machine(directory).unwrap(),
            Confinement::for_test(),
            Ports::machine(),
            Shared::new(4096, 4096).unwrap(),
            crate::limits::ledger::Budget::new(1 << 30).whole(),
            contexts,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_lease_ends_when_it_is_dropped_and_no_earlier() {
        let workspace = Workspace::for_test(Path::new("/"));
        assert!(workspace.idle_for(IdleBy::Work).is_some());
        let lease = workspace.lease().unwrap();
        let other = lease.share().unwrap();
        drop(lease);
        assert!(workspace.idle_for(IdleBy::Work).is_none());
        assert!(!workspace.close_if_idle(IdleBy::Work, Duration::ZERO));
        drop(other);
        assert!(workspace.idle_for(IdleBy::Work).is_some());
        assert!(workspace.close_if_idle(IdleBy::Work, Duration::ZERO));
    }

    #[test]
    fn a_workspace_that_ends_gives_no_lease() {
        let workspace = Workspace::for_test(Path::new("/"));
        let lease = workspace.lease().unwrap();
        assert!(lease.check_open().is_ok());
        workspace.close();
        let kinds = [workspace.lease(), lease.share()].map(|lease| lease.err().unwrap().kind());
        assert_eq!(kinds, [Kind::ShuttingDown; 2]);
        assert_eq!(lease.check_open().unwrap_err().kind(), Kind::NotFound);
        drop(lease);
        assert!(workspace.idle_for(IdleBy::Work).is_some());
    }
}
