//! The namespaces of a sandbox: what its commands see there, and whether the machine can make them.
//!
//! A sandbox has its own mounts, processes, IPC objects, host name and, unless it shares the machine's, its own
//! network with nothing but a loopback interface. They exist as long as their first process, the holder, which
//! `sys` starts. Here is what it sets up: the directories of programs, read-only; a `/tmp` and a `/dev/shm` of the
//! sandbox's own, in memory; a few devices and terminals of its own; its own `/proc`; the home; and an `/etc/passwd`
//! that knows the sandbox's user. All other rules hold inside as they do outside.
//!
//! Whether they can be made is found out by making some: with the server's capabilities, or else with a
//! namespace of users, in which any process has them. What cannot be made is refused with the reason.

use std::collections::VecDeque;
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{AddressFamily, SockType};
use nix::sys::stat::{Mode, fstat};
use nix::sys::statvfs::fstatvfs;

use super::devices::{Devices, Shown};
use super::given::GrantedPaths;
use super::private::PrivateRoot;
use super::system_files::{DEVICES, PROGRAMS};
use super::{Home, USER_NAME};
use crate::error::{Error, Kind, Result, cause};
use crate::limits::memory;
use crate::spec::isolation::{MACHINE_DIRECTORIES, TEMPORARY};
use crate::sys::paths::{open, openat};
use crate::sys::{
    self, Holder, HolderError, HolderPlan, HolderStep, MountSource, NamespaceSet, Pid, Setup, User,
    UserNamespace, proc,
};
use crate::threads::Thread;
use crate::threads::lock::{Condvar, Mutex, lock};

/// The word that makes this program the holder of namespaces.
pub const HOLDER_ARGUMENT: &str = "hold-namespaces";

/// Where the new root is put together: a directory that every machine has, and that holds nothing which sandboxes
/// get.
const STAGE: &str = "/proc";

/// Of the devices, those that a sandbox has of its own.
const TERMINALS: [&str; 2] = ["/dev/ptmx", "/dev/pts"];

/// The directories in memory that a sandbox has of its own.
pub const IN_MEMORY: [&str; 2] = [TEMPORARY, "/dev/shm"];

/// Most queues of System V messages. Each may hold 16,384 messages without text, which take 1 MiB of the kernel's memory.
const MAX_MESSAGE_QUEUES: u64 = 16;

/// Limits of System V semaphores: in a set, in all sets, operations of a call, sets (proc(5)). Each takes 64 bytes.
const SEMAPHORES: &str = "250 32000 32 128";

/// The unit of the limit on System V shared memory: the smallest page that kernels have.
const PAGE_BYTES: u64 = 4096;

/// Part of the memory that each of them may take, and System V shared memory as well.
const MEMORY_SHARE: u64 = 8;

/// The least that each of them may take.
const LEAST_BYTES: u64 = 16 << 20;

/// Bytes for each file of theirs: the kernel does not count what names and attributes take.
const BYTES_PER_FILE: u64 = 8 << 10;

/// The number of the group `tty` in distributions.
const TERMINAL_GROUP: u32 = 5;

/// Longer account files of an image are not shown to sandboxes.
const MAX_ACCOUNT_BYTES: usize = 1 << 20;

/// `MOUNT_ATTR_*` of linux/mount.h.
const READ_ONLY: u64 = 1;
const NO_SET_USER_ID: u64 = 2;
const NO_DEVICES: u64 = 4;

/// A file system in memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryDisk {
    /// Its number, as files on it have it.
    pub device: libc::dev_t,
    /// What its files hold.
    pub bytes: u64,
}

/// The namespaces of one sandbox. They end with this value.
pub struct Namespaces {
    holder: Holder,
    /// Its directory of terminals.
    terminals: OwnedFd,
    /// The users of commands, where these have a root of their own.
    users: Option<Arc<UserNamespace>>,
    /// Of [`IN_MEMORY`], those that no path of the machine covers.
    own_disks: Vec<&'static str>,
}

/// The pids of all holders.
static HOLDERS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The processes that adopt the orphans of sandboxes with namespaces.
pub fn holders() -> Vec<Pid> {
    lock(&HOLDERS).clone()
}

impl Namespaces {
    fn new(
        holder: Holder,
        granted: &GrantedPaths,
        users: Option<Arc<UserNamespace>>,
    ) -> std::result::Result<Self, Errno> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let terminals = open_inside(&holder, "/dev/pts", flags)?;
        lock(&HOLDERS).push(holder.pid());
        let covers = |path: &str| {
            let mut all = granted.read_only.iter().chain(&granted.read_write);
            all.any(|granted| granted == path)
        };
        // A root of its own has a /tmp like any other directory.
        let has_root = users.is_some();
        let is_there = |path: &&str| !(covers(path) || (has_root && *path == TEMPORARY));
        Ok(Self {
            holder,
            terminals,
            users,
            own_disks: IN_MEMORY.into_iter().filter(is_there).collect(),
        })
    }

    /// The process that holds them, which adopts the orphans inside.
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// Where its terminals are made.
    pub fn terminals(&self) -> BorrowedFd<'_> {
        self.terminals.as_fd()
    }

    /// The users of commands that have a root of their own.
    pub(super) fn users(&self) -> Option<&Arc<UserNamespace>> {
        self.users.as_ref()
    }

    /// Signals all processes inside, of whatever user; with signal 0 none.
    ///
    /// # Errors
    /// `ESRCH` if there is none; those of clone(2).
    pub fn signal_all(&self, signal: i32) -> std::result::Result<(), Errno> {
        self.holder.signal_all(signal)
    }

    /// Whether the network is its own.
    pub fn has_network(&self) -> bool {
        self.holder.set().network
    }

    /// The names of the layers that they add.
    pub fn layers(&self) -> impl Iterator<Item = &'static str> {
        let has_users = self.holder.set().user || self.users.is_some();
        let user = has_users.then_some("user_namespace");
        let root = self.users.is_some().then_some("private_root");
        std::iter::once("namespaces").chain(user).chain(root)
    }

    /// Whether they exist. They end also when something kills the holder.
    pub fn are_alive(&self) -> bool {
        self.holder.is_alive()
    }

    /// Ends them, and with them all processes inside. Returns before all have ended.
    pub fn end(&self) {
        self.holder.kill();
    }

    /// Opens a file of a sandbox by the path that it has inside, to name it in a rule.
    pub(super) fn open(&self, path: &str) -> std::result::Result<OwnedFd, Errno> {
        open_inside(&self.holder, path, OFlag::O_PATH | OFlag::O_CLOEXEC)
    }

    /// Opens the directories in memory that are the sandbox's own.
    ///
    /// # Errors
    /// That of open(2).
    pub fn open_disks(&self) -> std::result::Result<Vec<(&'static str, OwnedFd)>, Errno> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let own = self.own_disks.iter();
        own.map(|path| Ok((*path, open_inside(&self.holder, path, flags)?)))
            .collect()
    }

    /// Makes a socket in the network of these namespaces, which any thread can use.
    ///
    /// # Errors
    /// `ESRCH` if they have ended, or that of socket(2).
    pub fn socket(&self, family: AddressFamily, kind: SockType) -> nix::Result<OwnedFd> {
        self.holder.socket(family as i32, kind as i32)
    }

    /// The file systems in memory that the sandbox can write to.
    pub fn disks(&self) -> impl Iterator<Item = MemoryDisk> {
        self.own_disks.iter().filter_map(|path| {
            let opened = open_inside(&self.holder, path, OFlag::O_PATH).ok()?;
            let used = fstatvfs(&opened).ok()?;
            Some(MemoryDisk {
                device: fstat(&opened).ok()?.st_dev,
                bytes: (used.blocks() - used.blocks_free()) * used.fragment_size(),
            })
        })
    }

    /// Reads a file of `/proc/net` as it is inside.
    ///
    /// # Errors
    /// That of the file; `NotFound` if they have ended.
    pub fn open_network_file(&self, name: &str) -> std::io::Result<fs::File> {
        let file = fs::File::open(format!("/proc/{}/net/{name}", self.holder.pid()));
        // Its number may be another's by now.
        if self.are_alive() {
            file
        } else {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        lock(&HOLDERS).retain(|pid| *pid != self.holder.pid());
    }
}

/// Opens a file by the path that the holder sees. No link is followed: in a root of its own the sandbox may have made one,
/// and it would lead through the machine's.
fn open_inside(holder: &Holder, path: &str, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
    let careful = OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let way = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = format!("/proc/{}/root", holder.pid());
    let mut opened = open(&*root, way, Mode::empty())?;
    // Its number may be another's by now.
    if !holder.is_alive() {
        return Err(Errno::ESRCH);
    }
    let mut names = path.split('/').filter(|name| !name.is_empty()).peekable();
    while let Some(name) = names.next() {
        let flags = if names.peek().is_some() { way } else { flags };
        opened = openat(&opened, name, flags | careful, Mode::empty())?;
    }
    Ok(opened)
}

/// What the namespaces of one sandbox are to have.
pub(super) struct NamespacesSpec<'a> {
    pub(super) user: User,
    /// The home. What is inside has both of its paths.
    pub(super) home: &'a Home,
    pub(super) granted: &'a GrantedPaths,
    pub(super) devices: &'a Devices,
    /// Whether the network is the sandbox's own.
    pub(super) network: bool,
    /// Most bytes of each of its directories in memory, if that is less than usual.
    pub(super) max_memory: Option<u64>,
    /// Most processes of its own ids together, where it has a root of its own.
    pub(super) max_processes: u64,
    /// The root that the commands have of their own.
    pub(super) root: Option<&'a PrivateRoot>,
}

/// Makes namespaces, where the machine lets it.
pub(super) struct NamespaceMaker {
    /// Whether they need a namespace of users, or why there are none. Decided once.
    decided: OnceLock<std::result::Result<NeedsUsers, String>>,
    /// Made with the first sandbox that needs it, and then kept: holders end with their thread.
    means: OnceLock<Means>,
}

type NeedsUsers = bool;

/// Why namespaces could not be made.
struct MakeError {
    text: String,
    /// Whether the machine has run out of something, and may have it later.
    is_passing: bool,
}

impl NamespaceMaker {
    pub(super) fn new() -> Self {
        Self {
            decided: OnceLock::new(),
            means: OnceLock::new(),
        }
    }

    /// Checks that namespaces can be made on this machine, by making some the first time.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub(super) fn check(&self) -> Result<()> {
        self.needs_users().map(drop)
    }

    fn needs_users(&self) -> Result<NeedsUsers> {
        let unavailable = |why: &str| {
            let text = format!("isolation namespaces is unavailable on this machine: {why}");
            Err(Error::new(Kind::Unavailable, text))
        };
        let decided = match self.decided.get() {
            Some(decided) => decided,
            None => match attempt() {
                Ok(needs_users) => self.decided.get_or_init(|| Ok(needs_users)),
                Err(failure) if failure.is_passing => return unavailable(&failure.text),
                Err(failure) => self.decided.get_or_init(|| Err(failure.text)),
            },
        };
        match decided {
            Ok(needs_users) => Ok(*needs_users),
            Err(why) => unavailable(why),
        }
    }

    /// Makes the namespaces of a sandbox.
    ///
    /// # Errors
    /// `Unavailable` if the machine has none; `System` if they cannot be made now.
    pub(super) fn make(&self, spec: &NamespacesSpec<'_>) -> Result<Arc<Namespaces>> {
        // Nothing inside may own what holds a root.
        let users = spec.root.is_none() && self.needs_users()?;
        let means = match self.means.get() {
            Some(means) => Ok(means),
            None => Means::new().map(|means| self.means.get_or_init(|| means)),
        };
        let made = means.and_then(|means| means.start(layout_of(spec), spec, users));
        made.map(Arc::new).map_err(|failure| {
            let text = format!("cannot make the namespaces of a sandbox: {}", failure.text);
            let kind = if failure.is_passing {
                Kind::NoResources
            } else {
                Kind::System
            };
            Error::new(kind, text)
        })
    }
}

/// Makes namespaces in each way until one succeeds.
fn attempt() -> std::result::Result<NeedsUsers, MakeError> {
    if !proc::shows_this_namespace() {
        return Err(MakeError {
            text: "/proc does not show this pid namespace".to_owned(),
            is_passing: false,
        });
    }
    // Not kept: many servers make none.
    let means = Means::new()?;
    let attempt = |users| {
        let spec = NamespacesSpec {
            user: User { uid: 1, gid: 1 },
            home: &Home::same(Path::new("/home/sandbox")),
            granted: &GrantedPaths::default(),
            devices: &Devices::default(),
            network: true,
            max_memory: None,
            max_processes: 16,
            root: None,
        };
        let made = means.start(layout(&spec, false), &spec, users)?;
        let entered = made.socket(AddressFamily::Inet, SockType::Stream);
        entered
            .map(drop)
            .map_err(|errno| failure("enter them", errno))
    };
    let Err(without) = attempt(false) else {
        return Ok(false);
    };
    let Err(with) = attempt(true) else {
        return Ok(true);
    };
    Err(MakeError {
        text: format!("{}; with a namespace of users: {}", without.text, with.text),
        is_passing: without.is_passing || with.is_passing,
    })
}

/// What it takes to start holders.
struct Means {
    starter: Arc<Starter>,
    /// This program, open.
    program: Arc<OwnedFd>,
    /// This process.
    server: Arc<OwnedFd>,
}

impl Means {
    fn new() -> std::result::Result<Self, MakeError> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let program = open("/proc/self/exe", flags, Mode::empty());
        let program = program.map_err(|errno| failure("open this program", errno))?;
        let own = Pid::try_from(std::process::id()).unwrap_or(0);
        let server = sys::pidfd_open(own).map_err(|errno| failure("open this process", errno))?;
        let starter = Arc::new(Starter::default());
        let own = Arc::clone(&starter);
        Thread::new("namespaces")
            .essential()
            .start(move || own.run())
            .map_err(|error| failure("start a thread for them", errno_of(&error)))?;
        Ok(Self {
            starter,
            program: Arc::new(program),
            server: Arc::new(server),
        })
    }

    /// Makes namespaces with a view of the file system.
    fn start(
        &self,
        layout: Layout,
        spec: &NamespacesSpec<'_>,
        users: NeedsUsers,
    ) -> std::result::Result<Namespaces, MakeError> {
        let sockets = users.then(UnixDatagram::pair).transpose();
        let sockets = sockets.map_err(|error| failure("make a socket", errno_of(&error)))?;
        let (own, theirs) = sockets.unzip();
        let set = NamespaceSet {
            user: users,
            network: spec.network,
        };
        let (root, inside, mounts, points) = match spec.root {
            Some(root) => {
                let mounts = spec.devices.detached();
                let mounts = mounts.map_err(|errno| failure("show their devices", errno))?;
                let mount = root.mount();
                let mount = mount.map_err(|errno| failure("show their root", errno))?;
                let points = root.mount_points(mount.as_fd(), &layout.points);
                let points = points.map_err(|errno| failure("make mount points in it", errno))?;
                let users = root.users(spec.max_processes);
                let users = users.map_err(|errno| failure("make a user namespace", errno))?;
                (Some(mount), Some(users), mounts, points)
            }
            None => (None, None, Vec::new(), Vec::new()),
        };
        let order = Arc::new(StartRequest {
            plan: HolderPlan {
                set,
                setup: layout.steps,
                program: Arc::clone(&self.program),
                server: Arc::clone(&self.server),
                arguments: vec![c"sbx-server".to_owned(), c_string(HOLDER_ARGUMENT)],
                root,
                mounts,
                points,
                mapping: theirs,
            },
            started: Mutex::default(),
            is_done: Condvar::new(),
        });
        self.starter.take(Arc::clone(&order));
        if let Some(own) = own {
            map_users(&own, spec.user);
        }
        let is_open = |started: &mut Option<_>| started.is_none();
        let started = order
            .is_done
            .wait_while(lock(&order.started), is_open)
            .take();
        let started = started.unwrap_or(Err(HolderError {
            step: HolderStep::Clone,
            errno: Errno::ESRCH,
        }));
        let holder = started.map_err(|error| describe(error, &order.plan.setup))?;
        Namespaces::new(holder, spec.granted, inside)
            .map_err(|errno| failure("look into them", errno))
    }
}

impl Drop for Means {
    fn drop(&mut self) {
        lock(&self.starter.orders).is_closed = true;
        self.starter.is_wanted.notify_all();
    }
}

/// The thread that starts holders, which end with it.
#[derive(Default)]
struct Starter {
    /// Guards what is to be started.
    orders: Mutex<Orders>,
    is_wanted: Condvar,
}

#[derive(Default)]
struct Orders {
    waiting: VecDeque<Arc<StartRequest>>,
    is_closed: bool,
}

impl Starter {
    fn take(&self, order: Arc<StartRequest>) {
        lock(&self.orders).waiting.push_back(order);
        self.is_wanted.notify_all();
    }

    fn run(&self) {
        loop {
            let is_idle = |orders: &mut Orders| orders.waiting.is_empty() && !orders.is_closed;
            let mut orders = self.is_wanted.wait_while(lock(&self.orders), is_idle);
            let order = orders.waiting.pop_front();
            drop(orders);
            let Some(order) = order else {
                return;
            };
            let started = Holder::start(&order.plan);
            if let Some(mapping) = &order.plan.mapping {
                let _ = mapping.send(DONE);
            }
            *lock(&order.started) = Some(started);
            order.is_done.notify_all();
        }
    }
}

/// A holder to start.
struct StartRequest {
    plan: HolderPlan,
    /// Guards the result.
    started: Mutex<Option<std::result::Result<Holder, HolderError>>>,
    is_done: Condvar,
}

/// Says in place of a pid that no users are to be mapped any more.
const DONE: &[u8] = b"0";

/// Gives the first process its users as soon as it has told its pid: root and the sandbox's, which are the same inside
/// and outside.
fn map_users(channel: &UnixDatagram, user: User) {
    let mut message = [0; 16];
    while let Ok(length) = channel.recv(&mut message) {
        let pid = str::from_utf8(&message[..length]).ok();
        let Some(pid) = pid.and_then(|pid| pid.parse::<Pid>().ok()) else {
            return;
        };
        if pid <= 0 {
            return;
        }
        let map = |id: u32| format!("0 0 1\n{id} {id} 1\n");
        let mapped = fs::write(format!("/proc/{pid}/uid_map"), map(user.uid))
            .and_then(|()| fs::write(format!("/proc/{pid}/gid_map"), map(user.gid)));
        let _ = channel.send(&[u8::from(mapped.is_ok())]);
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EAGAIN))
}

fn failure(act: &str, errno: Errno) -> MakeError {
    let passing = [
        Errno::EAGAIN,
        Errno::ENOMEM,
        Errno::EMFILE,
        Errno::ENFILE,
        Errno::ENOSPC,
    ];
    MakeError {
        text: format!("cannot {act}: {}", cause(errno)),
        is_passing: passing.contains(&errno),
    }
}

/// What the first process could not do.
fn describe(error: HolderError, setup: &[Setup]) -> MakeError {
    let shown = |path: &CString| {
        let path = path.to_string_lossy();
        let path = path.strip_prefix(STAGE).unwrap_or(&path);
        if path.is_empty() {
            "/".to_owned()
        } else {
            path.to_owned()
        }
    };
    let act = match error.step {
        HolderStep::Clone if error.errno == Errno::ENOSPC => {
            "make more than /proc/sys/user allows".to_owned()
        }
        HolderStep::Clone => "make them".to_owned(),
        HolderStep::Users => "map their users".to_owned(),
        HolderStep::Descriptors => "close descriptors there".to_owned(),
        HolderStep::Loopback => "bring the loopback interface up".to_owned(),
        HolderStep::Privileges => "give up privileges there".to_owned(),
        HolderStep::Execute => "execute their first program".to_owned(),
        HolderStep::Setup(index) => match setup.get(index) {
            Some(Setup::Directory(path, _) | Setup::File(path, _) | Setup::Link(_, path)) => {
                format!("make {}", shown(path))
            }
            Some(Setup::Remove(path)) => format!("remove {}", shown(path)),
            Some(Setup::Mount { target, kind, .. }) => {
                let kind = kind.to_string_lossy();
                format!("mount {kind} at {}", shown(target)).replace("  ", " ")
            }
            Some(Setup::Place { path, .. }) => {
                format!("mount something at {}", path.to_string_lossy())
            }
            Some(Setup::Attributes(path, ..)) => format!("protect the mount at {}", shown(path)),
            Some(Setup::Root(_) | Setup::Attach(_) | Setup::Limit(..)) | None => {
                "change the root".to_owned()
            }
        },
    };
    failure(&act, error.errno)
}

fn c_string(bytes: impl AsRef<OsStr>) -> CString {
    // Paths of the kernel and of requests have no NUL: those with one were refused before.
    CString::new(bytes.as_ref().as_bytes()).unwrap_or_default()
}

/// The steps to a view of the file system, below [`STAGE`] until it becomes the root.
#[derive(Default)]
struct Layout {
    steps: Vec<Setup>,
    /// Directories that exist there.
    made: Vec<PathBuf>,
    /// Directories of the machine that are there with all that is in them.
    bound: Vec<PathBuf>,
    /// What is mounted over in a root of the sandbox's own, and whether that is a directory.
    points: Vec<(PathBuf, bool)>,
}

impl Layout {
    /// A path inside, while the root is being put together.
    fn stage(path: &Path) -> CString {
        let mut stage = STAGE.as_bytes().to_vec();
        stage.extend(path.as_os_str().as_bytes());
        CString::new(stage).unwrap_or_default()
    }

    /// A root in memory that nothing is in.
    fn begin() -> Self {
        let mut layout = Self::default();
        layout.steps.push(Setup::Mount {
            source: CString::default(),
            target: c"/".to_owned(),
            kind: CString::default(),
            flags: libc::MS_REC | libc::MS_PRIVATE,
            options: CString::default(),
        });
        let own = "mode=755,size=4m".to_owned();
        layout.mount("tmpfs", "", libc::MS_NOSUID | libc::MS_NODEV, own);
        layout
    }

    /// Devices, those of the sandbox among them, and terminals with these options.
    fn devices(&mut self, spec: &NamespacesSpec<'_>, terminals: &str) {
        let devices = DEVICES.iter().map(Path::new);
        for device in devices
            .filter(|path| path.exists() && !TERMINALS.iter().any(|own| *path == Path::new(own)))
        {
            self.bind(device, false, NO_SET_USER_ID);
        }
        for node in &spec.devices.nodes {
            self.show(node, NO_SET_USER_ID);
        }
        let terminals = format!("newinstance,ptmxmode=0666,max=256,{terminals}");
        let flags = libc::MS_NOSUID | libc::MS_NOEXEC;
        self.mount("devpts", "/dev/pts", flags, terminals);
        for (target, path) in [
            ("pts/ptmx", "/dev/ptmx"),
            ("/proc/self/fd", "/dev/fd"),
            ("/proc/self/fd/0", "/dev/stdin"),
            ("/proc/self/fd/1", "/dev/stdout"),
            ("/proc/self/fd/2", "/dev/stderr"),
        ] {
            let path = Self::stage(Path::new(path));
            self.steps.push(Setup::Link(c_string(target), path));
        }
    }

    /// These directories in memory, `/proc`, and the limits of what is in memory besides.
    fn memory(&mut self, spec: &NamespacesSpec<'_>, directories: &[&str]) {
        let usual = libc::MS_NOSUID | libc::MS_NODEV;
        let share = (memory::limit() / MEMORY_SHARE).max(LEAST_BYTES);
        let bytes = share.min(spec.max_memory.unwrap_or(u64::MAX));
        let files = bytes / BYTES_PER_FILE;
        for path in directories {
            let options = format!("mode=1777,size={bytes},nr_inodes={files}");
            self.mount("tmpfs", path, usual, options);
        }
        self.mount("proc", "/proc", usual | libc::MS_NOEXEC, String::new());
        for (name, value) in [
            ("shmall", (bytes / PAGE_BYTES).to_string()),
            ("sem", SEMAPHORES.to_owned()),
            ("msgmni", MAX_MESSAGE_QUEUES.to_string()),
        ] {
            let path = Self::stage(&Path::new("/proc/sys/kernel").join(name));
            self.steps.push(Setup::Limit(path, value.into_bytes()));
        }
    }

    fn mount(&mut self, kind: &str, path: &str, flags: u64, options: String) {
        self.directory(Path::new(path));
        self.steps.push(Setup::Mount {
            source: c_string(kind),
            target: Self::stage(Path::new(path)),
            kind: c_string(kind),
            flags,
            options: c_string(options),
        });
    }

    fn is_bound(&self, path: &Path) -> bool {
        self.bound.iter().any(|bound| path.starts_with(bound))
    }

    /// Whether a path has to be made. It is asked once for each.
    fn is_new(&mut self, path: &Path) -> bool {
        let is_new = !self.is_bound(path) && !self.made.iter().any(|made| made == path);
        if is_new {
            self.made.push(path.to_owned());
        }
        is_new
    }

    /// Makes a directory, with those above it.
    fn directory(&mut self, path: &Path) {
        let mut above: Vec<_> = path.ancestors().collect();
        above.pop();
        for directory in above.into_iter().rev() {
            if self.is_new(directory) {
                let mode = 0o755;
                self.steps
                    .push(Setup::Directory(Self::stage(directory), mode));
            }
        }
    }

    /// Shows a file or a directory of the machine at its own path, with these attributes.
    fn bind(&mut self, path: &Path, is_directory: bool, attributes: u64) {
        self.bind_from(path, path, is_directory, attributes);
    }

    /// Shows what belongs to a device, with these attributes.
    fn show(&mut self, shown: &Shown, attributes: u64) {
        let (source, target) = (&shown.source, &shown.target);
        self.bind_from(source, target, shown.is_directory, attributes);
    }

    fn bind_from(&mut self, source: &Path, path: &Path, is_directory: bool, attributes: u64) {
        if is_directory {
            self.directory(path);
        } else if let Some(parent) = path.parent() {
            self.directory(parent);
            if self.is_new(path) {
                self.steps.push(Setup::File(Self::stage(path), Vec::new()));
            }
        }
        self.bind_over(&c_string(source), path, attributes);
        if is_directory {
            self.bound.push(path.to_owned());
        }
    }

    fn bind_over(&mut self, source: &CString, path: &Path, attributes: u64) {
        self.steps.push(Setup::Mount {
            source: source.clone(),
            target: Self::stage(path),
            kind: CString::default(),
            // In a namespace of users a mount with others below it comes only with them.
            flags: libc::MS_BIND | libc::MS_REC,
            options: CString::default(),
        });
        if attributes != 0 {
            self.steps
                .push(Setup::Attributes(Self::stage(path), attributes, true));
        }
    }

    /// Shows a directory, or a link to one, as the machine has it.
    fn system_directory(&mut self, path: &Path) {
        let Ok(found) = fs::symlink_metadata(path) else {
            return;
        };
        if found.is_symlink() {
            if let (Ok(target), Some(parent)) = (fs::read_link(path), path.parent()) {
                self.directory(parent);
                self.steps
                    .push(Setup::Link(c_string(target), Self::stage(path)));
            }
        } else if found.is_dir() {
            self.bind(path, true, READ_ONLY | NO_SET_USER_ID);
        }
    }

    /// Shows what a path leads to, after all links, if that is not there yet.
    fn target_of(&mut self, path: &Path) {
        if let Ok(real) = path.canonicalize()
            && !self.is_bound(&real)
        {
            let is_directory = real.is_dir();
            self.bind(&real, is_directory, READ_ONLY | NO_SET_USER_ID);
        }
    }

    /// Shows a file of accounts that names the sandbox's user first.
    fn accounts(&mut self, path: &str, line: &str, name_of: impl Fn(&str) -> bool) {
        let path = Path::new(path);
        // Behind a link it would be another file.
        let is_file = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
        if !is_file || !self.is_bound(path) {
            return;
        }
        let accounts = fs::read_to_string(path).unwrap_or_default();
        let mut text = line.to_owned();
        if accounts.len() <= MAX_ACCOUNT_BYTES {
            let others = accounts.lines().filter(|line| !name_of(line));
            text.extend(others.flat_map(|line| [line, "\n"]));
        }
        let source = Self::stage(Path::new("/.accounts"));
        self.steps
            .push(Setup::File(source.clone(), text.into_bytes()));
        self.bind_over(&source, path, READ_ONLY | NO_SET_USER_ID | NO_DEVICES);
        self.steps.push(Setup::Remove(source));
    }

    /// Moves a mount over a directory or a file of a root of the sandbox's own.
    fn place(&mut self, path: &Path, is_directory: bool, from: MountSource) {
        self.steps.push(Setup::Place {
            point: self.points.len(),
            path: c_string(path),
            from,
        });
        self.points.push((path.to_owned(), is_directory));
    }

    /// The home, by both of its paths.
    fn home(&mut self, home: &Home) {
        let Home {
            on_machine,
            in_sandbox,
        } = home;
        self.bind(on_machine, true, NO_SET_USER_ID | NO_DEVICES);
        if in_sandbox != on_machine {
            self.directory(in_sandbox);
            let source = c_string(on_machine);
            self.bind_over(&source, in_sandbox, NO_SET_USER_ID | NO_DEVICES);
            self.bound.push(in_sandbox.clone());
        }
    }
}

/// Puts together what the commands of a sandbox see.
fn layout_of(spec: &NamespacesSpec<'_>) -> Layout {
    match spec.root {
        Some(root) => layout_over(spec, root),
        None => layout(spec, true),
    }
}

/// Puts together a root of the sandbox's own. What belongs to the machine there is made beside it, where nobody has put a
/// link, and then moved in.
fn layout_over(spec: &NamespacesSpec<'_>, root: &PrivateRoot) -> Layout {
    let User { uid, gid } = root.root();
    let mut layout = Layout::begin();
    let device_files = format!("mode=755,uid={uid},gid={gid},size=1m,nr_inodes=1024");
    layout.mount(
        "tmpfs",
        "/dev",
        libc::MS_NOSUID | libc::MS_NODEV,
        device_files,
    );
    // The group of terminals, as distributions have it.
    let terminals = format!("mode=0620,gid={}", gid + TERMINAL_GROUP);
    layout.devices(spec, &terminals);
    layout.memory(spec, &["/dev/shm"]);
    let of_network = [
        ("ipv4/ip_unprivileged_port_start", "0"),
        ("ipv4/ping_group_range", "0 4294967294"),
    ];
    // Of the machine's network nothing is set.
    for (name, value) in of_network.into_iter().filter(|_| spec.network) {
        let path = Layout::stage(&Path::new("/proc/sys/net").join(name));
        layout.steps.push(Setup::Limit(path, value.into()));
    }
    // The machine's settings, and what the server goes by: who is killed first when memory runs out, and what is in core dumps.
    let processes = Layout::stage(Path::new("/proc"));
    layout
        .steps
        .push(Setup::Attributes(processes, READ_ONLY, true));
    layout.system_directory(Path::new("/sys"));
    layout.directory(Path::new("/root"));
    let path = Layout::stage(Path::new("/root"));
    layout.steps.push(Setup::Attach(path.clone()));
    // Before the machine's directories, which lie over what links of the sandbox lead into.
    for (index, mount) in spec.devices.mounts.iter().enumerate() {
        let from = MountSource::Detached(index);
        layout.place(&mount.target, mount.is_directory, from);
    }
    for name in MACHINE_DIRECTORIES {
        let from = Path::new("/").join(name);
        if layout.made.contains(&from) || layout.is_bound(&from) {
            let staged = MountSource::Path(Layout::stage(&from));
            layout.place(&from, true, staged);
        }
    }
    layout.steps.push(Setup::Root(path));
    layout
}

/// Puts together what a sandbox sees. Without `has_home` it has none, and no paths of its own.
fn layout(spec: &NamespacesSpec<'_>, has_home: bool) -> Layout {
    let mut layout = Layout::begin();
    for path in PROGRAMS.iter().chain(&["/sys"]) {
        layout.system_directory(Path::new(path));
    }
    for path in ["/etc/resolv.conf", "/var/lib/ca-certificates"] {
        layout.target_of(Path::new(path));
    }
    layout.devices(spec, "mode=0600");
    layout.memory(spec, &IN_MEMORY);
    let User { uid, gid } = spec.user;
    if has_home {
        layout.home(spec.home);
        for (paths, attributes) in [
            (
                &spec.granted.read_only,
                READ_ONLY | NO_SET_USER_ID | NO_DEVICES,
            ),
            (&spec.granted.read_write, NO_SET_USER_ID | NO_DEVICES),
        ] {
            for path in paths.iter().map(Path::new) {
                // What is seen already is as it should be, unless it is to be changed.
                if attributes & READ_ONLY == 0 || !layout.is_bound(path) {
                    layout.bind(path, path.is_dir(), attributes);
                }
            }
        }
        for mount in &spec.devices.mounts {
            layout.show(mount, READ_ONLY | NO_SET_USER_ID | NO_DEVICES);
        }
        let shell = ["/bin/bash", "/bin/sh"].into_iter();
        let shell = shell.clone().find(|shell| Path::new(shell).exists());
        let (home, shell) = (spec.home.in_sandbox.display(), shell.unwrap_or("/bin/sh"));
        // The third field is the number.
        let is_own = |line: &str, id: u32| {
            let mut fields = line.split(':');
            fields.next() == Some(USER_NAME) || fields.nth(1) == Some(&id.to_string())
        };
        let line = format!("{USER_NAME}:x:{uid}:{gid}::{home}:{shell}\n");
        layout.accounts("/etc/passwd", &line, |line| is_own(line, uid));
        let line = format!("{USER_NAME}:x:{gid}:\n");
        layout.accounts("/etc/group", &line, |line| is_own(line, gid));
    }
    let path = Path::new("/var/tmp");
    layout.directory(Path::new("/var"));
    if layout.is_new(path) {
        let link = Setup::Link(c_string("../tmp"), Layout::stage(path));
        layout.steps.push(link);
    }
    let root = Layout::stage(Path::new(""));
    let attributes = READ_ONLY | NO_SET_USER_ID | NO_DEVICES;
    layout
        .steps
        .push(Setup::Attributes(root.clone(), attributes, false));
    layout.steps.push(Setup::Root(root));
    layout
}
