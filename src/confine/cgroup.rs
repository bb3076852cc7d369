//! cgroups of version 2 for sandboxes, where the server may make them (cgroups(7)).
//!
//! The server's own cgroup is the parent of those of its sandboxes. A cgroup that gives controllers to its children
//! can hold no processes, so the server and its init move to a child first, the leaf. Whether all of that works is
//! found out by doing it, once, when a host starts. What fails is undone.
//!
//! Only sandboxes with a limit on the whole of them get a cgroup. This file knows paths and files of cgroups, and
//! nothing of requests.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::error::{Error, Result};
use crate::logging;
use crate::sys::paths::mkdir;
use crate::sys::proc;
use crate::threads::lock::{Mutex, lock};

/// The cgroup of the server itself.
const LEAF: &str = "sbx-server";

/// What the names of the cgroups of sandboxes begin with.
const PREFIX: &str = "sbx-";

/// The value of a setting that limits nothing.
const UNLIMITED: &str = "max";

/// The time in which a sandbox gets its share of the processor: a tenth of a second.
const PERIOD: Duration = Duration::from_millis(100);

/// The cgroup in which the cgroups of sandboxes are made.
pub(super) struct Cgroups {
    path: PathBuf,
    has_cpu: bool,
    /// Guards the cgroups of deleted sandboxes that the kernel has not let go yet.
    leftovers: Mutex<Vec<PathBuf>>,
    /// Held as long as the server lives: another one would take them for stale.
    _lock: Flock<File>,
}

/// What a cgroup limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct CgroupLimits {
    /// Most bytes of memory.
    pub(super) memory: Option<u64>,
    /// Most processor time in each second.
    pub(super) cpu: Option<Duration>,
    /// Most processes and threads.
    pub(super) processes: u64,
}

/// How often the kernel has killed for memory in a cgroup (`memory.events`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kills {
    /// The cgroup was at its own limit, and nothing could be reclaimed.
    pub(super) at_limit: u64,
    /// Processes that were killed.
    pub(super) processes: u64,
}

/// The cgroup of one sandbox, removed on drop.
pub(super) struct Cgroup {
    parent: Arc<Cgroups>,
    path: PathBuf,
    directory: OwnedFd,
}

impl Cgroups {
    /// Prepares the server's cgroup for those of sandboxes.
    ///
    /// # Errors
    /// Why there can be none, as a clause.
    pub(super) fn prepare() -> std::result::Result<Arc<Self>, String> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let own = own_directory(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
            .ok_or("the server is in no mounted cgroup of version 2")?;
        let kind = statfs(&own).map(|system| system.filesystem_type());
        if kind != Ok(CGROUP2_SUPER_MAGIC) {
            return Err("the server is in no mounted cgroup of version 2".to_owned());
        }
        // A server that another program of this kind has started is in its leaf already.
        let parent = own.parent().filter(|_| own.ends_with(LEAF));
        Self::below(parent.unwrap_or(&own))
    }

    fn below(path: &Path) -> std::result::Result<Arc<Self>, String> {
        let failed = |act: &str, error: &io::Error| format!("{act} fails: {error}");
        let controllers = controllers_in(&path.join("cgroup.controllers"));
        for needed in ["memory", "pids"] {
            if !controllers.iter().any(|name| name == needed) {
                return Err(format!("the server's cgroup has no {needed} controller"));
            }
        }
        let directory =
            File::open(path).map_err(|error| failed("opening the server's cgroup", &error))?;
        let lock = Flock::lock(directory, FlockArg::LockExclusiveNonblock);
        let lock = lock.map_err(|_| "another server has its sandboxes in the same cgroup")?;
        let has_cpu = controllers.iter().any(|name| name == "cpu");
        let mut change = Change::new(path);
        let made = change.apply(has_cpu);
        if let Err(why) = made {
            change.undo();
            return Err(why);
        }
        let cgroups = Arc::new(Self {
            path: path.to_owned(),
            has_cpu,
            leftovers: Mutex::default(),
            _lock: lock,
        });
        cgroups.sweep();
        let limits = CgroupLimits {
            memory: Some(1 << 30),
            cpu: has_cpu.then_some(Duration::from_secs(1)),
            processes: 1,
        };
        // Sandboxes have other names.
        if let Err(error) = cgroups.make("try", limits) {
            change.undo();
            return Err(format!("trying a cgroup fails: {error}"));
        }
        Ok(cgroups)
    }

    /// Whether the processor can be limited.
    pub(super) fn has_cpu(&self) -> bool {
        self.has_cpu
    }

    /// Makes the cgroup of a sandbox.
    ///
    /// # Errors
    /// `System`. Nothing is left.
    pub(super) fn make(self: &Arc<Self>, id: &str, limits: CgroupLimits) -> Result<Cgroup> {
        self.remove_leftovers();
        let path = self.path.join(format!("{PREFIX}{id}"));
        let failed = |error: io::Error| Error::io("cannot make a cgroup for the sandbox", &error);
        make_directory(&path).map_err(failed)?;
        let opened = File::open(&path).inspect_err(|_| drop(std::fs::remove_dir(&path)));
        let cgroup = Cgroup {
            parent: Arc::clone(self),
            directory: opened.map_err(failed)?.into(),
            path,
        };
        cgroup.set(limits).map_err(failed)?;
        Ok(cgroup)
    }

    /// Removes the cgroups of deleted sandboxes that the kernel would not let go before.
    pub(super) fn remove_leftovers(&self) {
        let left = std::mem::take(&mut *lock(&self.leftovers));
        for path in left {
            self.remove(path);
        }
    }

    fn remove(&self, path: PathBuf) {
        let removed = std::fs::remove_dir(&path);
        if removed.is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
            let mut leftovers = lock(&self.leftovers);
            if !leftovers.contains(&path) {
                leftovers.push(path);
            }
        }
    }

    /// Ends what a killed server left.
    fn sweep(&self) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten();
        for entry in entries.filter_map(std::result::Result::ok) {
            let name = entry.file_name().into_string().unwrap_or_default();
            if name.starts_with(PREFIX) && name != LEAF {
                let _ = write(&entry.path().join("cgroup.kill"), "1");
                self.remove(entry.path());
            }
        }
    }
}

/// The steps that turn the server's cgroup into a parent, and those taken so far.
struct Change<'a> {
    path: &'a Path,
    /// The processes that were moved to the leaf.
    moved: Vec<u32>,
    has_leaf: bool,
    /// The controllers that children had not got before.
    enabled: Vec<&'static str>,
}

impl<'a> Change<'a> {
    fn new(path: &'a Path) -> Self {
        let (moved, enabled) = (Vec::new(), Vec::new());
        Self {
            path,
            moved,
            has_leaf: false,
            enabled,
        }
    }

    fn apply(&mut self, has_cpu: bool) -> std::result::Result<(), String> {
        let failed = |act: &str| {
            let act = act.to_owned();
            move |error: io::Error| format!("{act} fails: {error}")
        };
        // Only the root has no type, and only the root may have processes beside its children.
        if self.path.join("cgroup.type").exists() {
            let here = std::fs::read_to_string(self.path.join("cgroup.procs"));
            let here = here.map_err(failed("listing the server's cgroup"))?;
            let here: Vec<u32> = here.lines().filter_map(|pid| pid.parse().ok()).collect();
            let own = own_processes();
            if here.iter().any(|pid| !own.contains(pid)) {
                return Err("other programs are in the server's cgroup".to_owned());
            }
            if !here.is_empty() {
                let leaf = self.path.join(LEAF);
                match make_directory(&leaf) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(failed("making a cgroup")(error));
                    }
                    _ => self.has_leaf = true,
                }
                for pid in here {
                    let moved = write(&leaf.join("cgroup.procs"), &pid.to_string());
                    moved.map_err(failed("moving the server to another cgroup"))?;
                    self.moved.push(pid);
                }
            }
        }
        let control = self.path.join("cgroup.subtree_control");
        let given = controllers_in(&control);
        let wanted = ["memory", "pids"]
            .into_iter()
            .chain(has_cpu.then_some("cpu"));
        for name in wanted.filter(|name| !given.iter().any(|given| given == name)) {
            let enabled = write(&control, &format!("+{name}"));
            enabled.map_err(failed("giving controllers to cgroups"))?;
            self.enabled.push(name);
        }
        Ok(())
    }

    fn undo(&self) {
        for name in &self.enabled {
            let control = self.path.join("cgroup.subtree_control");
            let _ = write(&control, &format!("-{name}"));
        }
        for pid in &self.moved {
            let _ = write(&self.path.join("cgroup.procs"), &pid.to_string());
        }
        if self.has_leaf {
            let _ = std::fs::remove_dir(self.path.join(LEAF));
        }
    }
}

impl Cgroup {
    /// Its directory, which a command is started in.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Puts limits in force, at once for what is in it.
    ///
    /// # Errors
    /// Some of them may be in force then.
    pub(super) fn set(&self, limits: CgroupLimits) -> io::Result<()> {
        let set = |name: &str, value: &str| write(&self.path.join(name), value);
        // Not with `memory.oom.group`: the kernel would kill also who shares memory with a command, which the server does
        // until execve. Who notices a kill kills the rest.
        let memory = limits.memory.map(|bytes| bytes.to_string());
        set("memory.max", memory.as_deref().unwrap_or(UNLIMITED))?;
        let swap = if limits.memory.is_some() {
            "0"
        } else {
            UNLIMITED
        };
        match set("memory.swap.max", swap) {
            // Swap is not accounted: harmless if there is none, or no limit.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    && (limits.memory.is_none() || !proc::has_swap()) => {}
            result => result?,
        }
        if self.parent.has_cpu {
            let cpu = limits.cpu.map(cpu_max);
            set("cpu.max", cpu.as_deref().unwrap_or(UNLIMITED))?;
        }
        set("pids.max", &limits.processes.to_string())
    }

    /// The kills in it so far.
    pub(super) fn kills(&self) -> Kills {
        let events = std::fs::read_to_string(self.path.join("memory.events"));
        kills_in(&events.unwrap_or_default())
    }

    /// Bytes of memory that it holds.
    pub(super) fn memory_used(&self) -> Option<u64> {
        proc::number_in(self.path.join("memory.current").to_str()?)
    }

    /// Removes it: nothing runs in it any more. If the kernel does not let it go yet, that is tried again later.
    pub(super) fn remove(&self) {
        self.parent.remove(self.path.clone());
    }

    /// Lets no process in it run, or all again. They stand still once [`Cgroup::is_frozen`].
    ///
    /// # Errors
    /// Kernels before Linux 5.2 do not have this.
    pub(super) fn freeze(&self, freeze: bool) -> io::Result<()> {
        write(
            &self.path.join("cgroup.freeze"),
            if freeze { "1" } else { "0" },
        )
    }

    /// Whether no process in it runs.
    pub(super) fn is_frozen(&self) -> bool {
        let events = std::fs::read_to_string(self.path.join("cgroup.events"));
        events.is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
    }

    /// Kills every process in it, those that are being forked too.
    ///
    /// # Errors
    /// Kernels before Linux 5.14 do not have this.
    pub(super) fn kill(&self) -> io::Result<()> {
        write(&self.path.join("cgroup.kill"), "1")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The server and, if it has one, its init: the parent that bears its name.
fn own_processes() -> Vec<u32> {
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
    let is_init = name(parent).is_some_and(|parent| Some(parent) == name(own));
    [Some(own), is_init.then_some(parent)]
        .into_iter()
        .flatten()
        .collect()
}

/// The directory of the cgroup of version 2 that `/proc/self/cgroup` names, where `/proc/self/mountinfo` shows it.
fn own_directory(groups: &str, mounts: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (fields, kind) = line.split_once(" - ")?;
        if !kind.starts_with("cgroup2 ") {
            return None;
        }
        let mut fields = fields.split(' ').skip(3);
        let (root, mount) = (fields.next()?, fields.next()?);
        // A mount may show a part only, and not the part that the server is in: `/..` in a namespace.
        let below = Path::new(group).strip_prefix(root).ok()?;
        let is_plain = !group.contains("..") && !mount.contains('\\');
        is_plain.then(|| Path::new(mount).join(below))
    })
}

fn controllers_in(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

fn kills_in(events: &str) -> Kills {
    let count = |name: &str| {
        let mut lines = events.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse().ok())
    };
    Kills {
        at_limit: count("oom").unwrap_or(0),
        processes: count("oom_kill").unwrap_or(0),
    }
}

/// The value of `cpu.max` for so much processor time in each second, in microseconds.
fn cpu_max(cpu: Duration) -> String {
    format!("{} {}", (cpu / 10).as_micros(), PERIOD.as_micros())
}

/// Writes a setting, which exists.
fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Says why the limits of a machine are weaker than they could be.
pub(super) fn log_absence(why: &str) {
    logging::debug(format_args!("sandboxes get no cgroups: {why}"));
}

// The standard library's function can make those above too, which is 3 KB of code.
fn make_directory(path: &Path) -> io::Result<()> {
    Ok(mkdir(path, Mode::from_bits_truncate(0o777))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        25 30 0:22 / /proc rw,nosuid - proc proc rw\n\
        31 30 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_own_cgroup_is_found_where_it_is_mounted() {
        let found = |group: &str, mounts: &str| own_directory(group, mounts);
        let own = found("1:cpu:/x\n0::/a/b\n", MOUNTS).unwrap();
        assert_eq!(own, Path::new("/sys/fs/cgroup/a/b"));
        assert_eq!(
            found("0::/\n", MOUNTS).unwrap(),
            Path::new("/sys/fs/cgroup")
        );
        // A container without a namespace for cgroups sees its own part only, under its full name.
        let part = MOUNTS.replace("0:26 / ", "0:26 /docker/1 ");
        let own = found("0::/docker/1/x\n", &part).unwrap();
        assert_eq!(own, Path::new("/sys/fs/cgroup/x"));
        for (group, mounts) in [
            ("0::/docker/2\n", part.as_str()),
            ("0::/../x\n", MOUNTS),
            ("4:memory:/x\n", MOUNTS),
            (
                "0::/\n",
                "31 30 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n",
            ),
            ("0::/\n", "garbage"),
            ("", ""),
        ] {
            assert_eq!(found(group, mounts), None, "{group} {mounts}");
        }
    }

    #[test]
    fn kills_are_told_apart() {
        let events = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 5\noom_group_kill 1\n";
        let expected = Kills {
            at_limit: 2,
            processes: 5,
        };
        assert_eq!(kills_in(events), expected);
        assert_eq!(kills_in(""), Kills::default());
    }

    #[test]
    fn processors_become_a_quota() {
        let max = |milliseconds| cpu_max(Duration::from_millis(milliseconds));
        assert_eq!(max(100), "10000 100000");
        assert_eq!(max(1500), "150000 100000");
        assert_eq!(max(4_096_000), "409600000 100000");
    }

    /// The freezer takes no controller.
    #[test]
    fn what_is_frozen_stands_still_and_can_be_killed() {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let Some(root) = own_directory("0::/\n", &mounts) else {
            return;
        };
        let path = root.join(format!("sbx-freeze-{}", std::process::id()));
        if make_directory(&path).is_err() || !path.join("cgroup.freeze").exists() {
            let _ = std::fs::remove_dir(&path);
            return;
        }
        let lock = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusiveNonblock);
        let cgroup = Cgroup {
            parent: Arc::new(Cgroups {
                path: root,
                has_cpu: false,
                leftovers: Mutex::default(),
                _lock: lock.unwrap(),
            }),
            directory: File::open(&path).unwrap().into(),
            path: path.clone(),
        };
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "while :; do /bin/true; done"])
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        write(&path.join("cgroup.procs"), &pid.to_string()).unwrap();
        assert!(!cgroup.is_frozen());
        let ticks = || proc::stat(pid, &mut Vec::new()).unwrap().ticks;
        for _ in 0..5 {
            cgroup.freeze(true).unwrap();
            while !cgroup.is_frozen() {
                std::thread::yield_now();
            }
            let before = ticks();
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(ticks(), before);
            cgroup.freeze(false).unwrap();
            while cgroup.is_frozen() || ticks() == before {
                std::thread::yield_now();
            }
        }
        cgroup.freeze(true).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // Its last child may be there still.
        cgroup.kill().unwrap();
        while !std::fs::read_to_string(path.join("cgroup.procs"))
            .unwrap()
            .is_empty()
        {
            std::thread::yield_now();
        }
        drop(cgroup);
        assert!(!path.exists());
    }

    #[test]
    fn a_cgroup_without_controllers_is_left_as_it_is() {
        let path = std::env::temp_dir().join(format!("sbx-cgroup-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let why = |controllers: &str| {
            std::fs::write(path.join("cgroup.controllers"), controllers).unwrap();
            Cgroups::below(&path).err().unwrap()
        };
        assert!(why("cpu io\n").contains("memory"));
        assert!(why("cpu memory\n").contains("pids"));
        // As a cgroup that others are in.
        std::fs::write(path.join("cgroup.type"), "domain\n").unwrap();
        std::fs::write(path.join("cgroup.procs"), "1\n2\n").unwrap();
        assert!(why("cpu memory pids\n").contains("other programs"));
        // As one where the kernel does not let the server write.
        std::fs::remove_file(path.join("cgroup.type")).unwrap();
        assert!(why("cpu memory pids\n").contains("controllers"));
        let left = std::fs::read_dir(&path).unwrap().count();
        assert_eq!(left, 2, "the two files");
        std::fs::remove_dir_all(&path).unwrap();
    }
}
