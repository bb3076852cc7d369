//! Limits of a sandbox as a whole: which can be had on this machine, what keeps them, and whether a process was
//! killed for them.
//!
//! A limit is kept by a cgroup where the server may make one. Memory is else kept by the watchdog of the host, which
//! finds here what it has to watch and notes here what it kills. Processor time is then not limited, and asking for it
//! is refused.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cgroup::{self, Cgroup, CgroupLimits, Cgroups, Kills};
use crate::error::{Error, Kind, Result};
use crate::spec::sandbox::WholeLimits;
use crate::sys::proc;
use crate::threads::lock::{Mutex, lock};

/// Commands and interpreters that have ended for the limit of their sandbox.
static ENDED_COMMANDS: AtomicU64 = AtomicU64::new(0);

/// What this machine can limit.
pub struct Limiter {
    /// Or why there are none, as a clause.
    cgroups: std::result::Result<Arc<Cgroups>, String>,
    has_watchdog: bool,
}

/// The limits in force for one sandbox.
pub struct Limits {
    /// Guards the value alone.
    asked: Mutex<WholeLimits>,
    /// Whether a cgroup keeps whatever limits there are once something runs; else, for now, it is the watchdog.
    will_have_cgroup: bool,
    cgroup: Option<Cgroup>,
    /// How often the watchdog has begun and ended a kill.
    kills: AtomicU64,
    /// Bytes of memory at the watchdog's last look.
    used: AtomicU64,
    /// After how many kills in the cgroup everything was killed last.
    finished: AtomicU64,
}

/// Why a process was killed that nobody else has killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKill {
    /// Its sandbox was above its limit.
    Limit,
    /// The machine, or the server's container, had none left.
    Machine,
}

/// Notices kills for memory in a sandbox from when it was made.
pub struct KillWatch {
    limits: Arc<Limits>,
    before: Kills,
}

impl Limiter {
    /// Finds out what can be limited. This may move the server to another cgroup.
    pub fn new() -> Self {
        let cgroups = Cgroups::prepare().inspect_err(|why| cgroup::log_absence(why));
        Self {
            cgroups,
            has_watchdog: proc::shows_this_namespace(),
        }
    }

    /// The names of what can be limited here, and how.
    pub fn offered(&self) -> Vec<&'static str> {
        match &self.cgroups {
            Ok(cgroups) if cgroups.has_cpu() => vec!["memory_cgroup", "cpu_cgroup"],
            Ok(_) => vec!["memory_cgroup"],
            Err(_) if self.has_watchdog => vec!["memory_watchdog"],
            Err(_) => Vec::new(),
        }
    }

    /// Checks that limits can be kept here.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub fn check(&self, asked: WholeLimits) -> Result<()> {
        let refused = |field: &str, why: &str| {
            let text = format!("{field} cannot be enforced on this machine: {why}");
            Err(Error::new(Kind::Unavailable, text))
        };
        if asked.cpu.is_some() {
            match &self.cgroups {
                Ok(cgroups) if cgroups.has_cpu() => {}
                Ok(_) => return refused("max_cpu", "the server's cgroup has no cpu controller"),
                Err(why) => return refused("max_cpu", why),
            }
        }
        match &self.cgroups {
            Err(why) if asked.memory.is_some() && !self.has_watchdog => {
                let why = format!("{why}, and /proc does not show processes");
                refused("max_total_mem_mb", &why)
            }
            _ => Ok(()),
        }
    }

    /// Puts the limits of a new sandbox in force.
    ///
    /// # Errors
    /// `Unavailable`, as from [`Limiter::check`]; `System` if its cgroup cannot be made.
    pub fn apply(&self, id: &str, asked: WholeLimits, processes: u64) -> Result<Arc<Limits>> {
        self.check(asked)?;
        let cgroup = match &self.cgroups {
            Ok(cgroups) if asked != WholeLimits::default() => {
                let limits = CgroupLimits {
                    memory: asked.memory,
                    cpu: asked.cpu,
                    processes,
                };
                Some(cgroups.make(id, limits)?)
            }
            _ => None,
        };
        Ok(Arc::new(Limits::new(asked, cgroup, false)))
    }

    /// The limits of a sandbox in which nothing runs: none is in force.
    pub fn at_rest(&self, asked: WholeLimits) -> Arc<Limits> {
        Arc::new(Limits::new(asked, None, self.cgroups.is_ok()))
    }

    /// Changes the limits of a sandbox, and that on processes to the first of these from the second. They hold at once for what
    /// runs in it. Call it while nobody else changes them.
    ///
    /// # Errors
    /// `Unavailable`, as from [`Limiter::check`]; `NotPossible` if they need a cgroup, and the sandbox runs without one;
    /// `System` if the kernel refuses. The limits stay what they were.
    pub fn change(&self, limits: &Limits, asked: WholeLimits, processes: [u64; 2]) -> Result<()> {
        self.check(asked)?;
        let before = limits.asked();
        let values = |whole: WholeLimits, processes| CgroupLimits {
            memory: whole.memory,
            cpu: whole.cpu,
            processes,
        };
        if let Some(cgroup) = &limits.cgroup {
            cgroup.set(values(asked, processes[0])).map_err(|error| {
                let _ = cgroup.set(values(before, processes[1]));
                Error::io("cannot change the limits of the cgroup", &error)
            })?;
        } else if self.cgroups.is_ok()
            && !limits.will_have_cgroup
            && asked != WholeLimits::default()
        {
            let text = "a sandbox that was started without max_total_mem_mb and max_cpu gets them while it is stopped: stop \
                        it, change it and start it";
            return Err(Error::new(Kind::NotPossible, text));
        }
        *lock(&limits.asked) = asked;
        Ok(())
    }

    /// Removes what deleted sandboxes have left.
    pub fn tidy(&self) {
        if let Ok(cgroups) = &self.cgroups {
            cgroups.remove_leftovers();
        }
    }
}

impl Limits {
    fn new(asked: WholeLimits, cgroup: Option<Cgroup>, will_have_cgroup: bool) -> Self {
        Self {
            asked: Mutex::new(asked),
            will_have_cgroup,
            cgroup,
            kills: AtomicU64::new(0),
            used: AtomicU64::new(0),
            finished: AtomicU64::new(0),
        }
    }

    /// What was asked for.
    pub fn asked(&self) -> WholeLimits {
        *lock(&self.asked)
    }

    /// Whether a cgroup keeps them.
    fn is_by_cgroup(&self) -> bool {
        let is_asked = || self.asked() != WholeLimits::default();
        self.cgroup.is_some() || (self.will_have_cgroup && is_asked())
    }

    /// What keeps the limit on memory; `None` without one.
    pub fn memory_by(&self) -> Option<&'static str> {
        let by = if self.is_by_cgroup() {
            "cgroup"
        } else {
            "watchdog"
        };
        self.asked().memory.map(|_| by)
    }

    /// What keeps the limit on processor time; `None` without one.
    pub fn cpu_by(&self) -> Option<&'static str> {
        self.asked().cpu.map(|_| "cgroup")
    }

    /// What keeps the limit on processes.
    pub fn processes_by(&self) -> &'static str {
        if self.is_by_cgroup() {
            "cgroup"
        } else {
            "rlimit"
        }
    }

    /// The isolation layers that they add.
    pub fn layers(&self) -> Vec<&'static str> {
        let memory = self.memory_by().map(|by| match by {
            "cgroup" => "memory_cgroup",
            _ => "memory_watchdog",
        });
        let cpu = self.cpu_by().map(|_| "cpu_cgroup");
        memory.into_iter().chain(cpu).collect()
    }

    /// Most bytes of memory, if the watchdog has to keep the limit.
    pub fn watched(&self) -> Option<u64> {
        self.asked().memory.filter(|_| !self.is_by_cgroup())
    }

    /// The directory of the cgroup that commands run in.
    pub(super) fn cgroup(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup.as_ref().map(Cgroup::directory)
    }

    /// Bytes of memory that count for the limit; `None` without one. The watchdog's figure is that of its last look.
    pub fn memory_used(&self) -> Option<u64> {
        self.asked().memory?;
        match &self.cgroup {
            Some(cgroup) => cgroup.memory_used(),
            None => Some(self.used.load(Ordering::Relaxed)),
        }
    }

    /// Notes what the watchdog has found.
    pub fn note_use(&self, bytes: u64) {
        self.used.store(bytes, Ordering::Relaxed);
    }

    /// Notes that the watchdog begins or ends killing all that runs. What starts in between is killed too.
    pub fn note_kill(&self) {
        self.kills.fetch_add(1, Ordering::AcqRel);
    }

    /// Kills all that runs in the cgroup, if there is one. What cannot be killed so is for the caller to find.
    pub fn kill_all(&self) {
        if let Some(cgroup) = &self.cgroup {
            let _ = cgroup.kill();
        }
    }

    /// Begins to freeze what runs in the cgroup. False if there is none, or the kernel cannot.
    pub fn freeze(&self) -> bool {
        let cgroup = self.cgroup.as_ref();
        cgroup.is_some_and(|cgroup| cgroup.freeze(true).is_ok())
    }

    /// Whether all that runs in the cgroup stands still.
    pub fn is_frozen(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::is_frozen)
    }

    /// Lets go on what was frozen.
    pub fn thaw(&self) {
        if let Some(cgroup) = &self.cgroup {
            let _ = cgroup.freeze(false);
        }
    }

    /// Kills what a kill for memory has left in the cgroup: nobody expects half of a program. Call it about once a
    /// second.
    pub fn finish_kill(&self) {
        if self.asked().memory.is_some()
            && let Some(cgroup) = &self.cgroup
        {
            let kills = cgroup.kills().processes;
            if self.finished.fetch_max(kills, Ordering::AcqRel) < kills {
                let _ = cgroup.kill();
            }
        }
    }

    /// Gives back what keeps the limits, once nothing runs in the sandbox any more.
    pub fn discard(&self) {
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
    }

    fn kills(&self) -> Kills {
        if let Some(cgroup) = &self.cgroup {
            return cgroup.kills();
        }
        let kills = self.kills.load(Ordering::Acquire);
        Kills {
            at_limit: kills,
            processes: kills,
        }
    }
}

impl KillWatch {
    /// Begins to watch.
    pub fn begin(limits: &Arc<Limits>) -> Self {
        Self {
            before: limits.kills(),
            limits: Arc::clone(limits),
        }
    }

    /// Whether everything in the sandbox was killed for memory meanwhile, and with it a process that ran since the
    /// beginning and has died of SIGKILL.
    pub fn cause(&self) -> Option<MemoryKill> {
        let cause = cause(self.before, self.limits.kills());
        self.limits.finish_kill();
        if cause == Some(MemoryKill::Limit) {
            ENDED_COMMANDS.fetch_add(1, Ordering::Relaxed);
        }
        cause
    }
}

/// A kill is for the sandbox's limit if that was reached too.
fn cause(before: Kills, after: Kills) -> Option<MemoryKill> {
    (after.processes > before.processes).then_some(if after.at_limit > before.at_limit {
        MemoryKill::Limit
    } else {
        MemoryKill::Machine
    })
}

/// Commands and interpreters that ended because their sandbox was above its limit on memory.
pub fn ended_for_memory() -> u64 {
    ENDED_COMMANDS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn limiter(why: &str, has_watchdog: bool) -> Limiter {
        Limiter {
            cgroups: Err(why.to_owned()),
            has_watchdog,
        }
    }

    fn refusal(limiter: &Limiter, asked: WholeLimits) -> String {
        let error = limiter.check(asked).err().unwrap();
        assert_eq!(error.kind(), Kind::Unavailable);
        error.to_string()
    }

    const MEMORY: WholeLimits = WholeLimits {
        memory: Some(1 << 20),
        cpu: None,
    };
    const CPU: WholeLimits = WholeLimits {
        memory: None,
        cpu: Some(Duration::from_millis(500)),
    };

    #[test]
    fn without_cgroups_memory_is_watched_and_processors_are_refused() {
        let limiter = limiter("the reason", true);
        assert_eq!(limiter.offered(), ["memory_watchdog"]);
        let text = refusal(&limiter, CPU);
        assert!(
            text.contains("max_cpu") && text.contains("the reason"),
            "{text}"
        );
        let limits = limiter.apply("id", MEMORY, 5).unwrap();
        assert_eq!(limits.memory_by(), Some("watchdog"));
        assert_eq!((limits.cpu_by(), limits.processes_by()), (None, "rlimit"));
        assert_eq!(limits.layers(), ["memory_watchdog"]);
        assert_eq!(limits.watched(), Some(1 << 20));
        limits.note_use(77);
        assert_eq!(limits.memory_used(), Some(77));
    }

    #[test]
    fn without_proc_nothing_is_offered() {
        let limiter = limiter("the reason", false);
        assert!(limiter.offered().is_empty());
        assert!(refusal(&limiter, MEMORY).contains("the reason, and /proc"));
        let limits = limiter.apply("id", WholeLimits::default(), 5).unwrap();
        assert_eq!(limits.watched(), None);
        assert_eq!(limits.memory_used(), None);
        assert!(limits.layers().is_empty());
    }

    #[test]
    fn a_kill_explains_only_what_ran_before_it() {
        let limits = limiter("", true).apply("id", MEMORY, 5).unwrap();
        let early = KillWatch::begin(&limits);
        assert_eq!(early.cause(), None);
        limits.note_kill();
        let meanwhile = KillWatch::begin(&limits);
        limits.note_kill();
        let late = KillWatch::begin(&limits);
        assert_eq!(early.cause(), Some(MemoryKill::Limit));
        assert_eq!(meanwhile.cause(), Some(MemoryKill::Limit));
        assert_eq!(late.cause(), None);
        assert!(ended_for_memory() >= 2);
    }

    #[test]
    fn a_kill_below_the_own_limit_is_the_machines() {
        let kills = |at_limit, processes| Kills {
            at_limit,
            processes,
        };
        assert_eq!(cause(kills(1, 1), kills(1, 1)), None);
        assert_eq!(cause(kills(1, 1), kills(2, 1)), None);
        assert_eq!(cause(kills(1, 1), kills(1, 2)), Some(MemoryKill::Machine));
        assert_eq!(cause(kills(1, 1), kills(2, 2)), Some(MemoryKill::Limit));
    }
}
