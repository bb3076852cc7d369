//! Processes that have uids of this host before it has made a sandbox: what a killed server left is killed, and what
//! belongs to others is left alone.
//!
//! A process of a sandbox is known by the [`Mark`] of its command, even after it has lowered it. A uid that has any other
//! process is not used, and none of its processes is touched: perhaps all of them belong to somebody else.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use super::claims::Other;
use super::signals::Signaller;
use crate::confine::Mark;
use crate::logging;
use crate::sys::proc::{self, ThreadState};
use crate::sys::{self, Pid, User};

/// How long to wait for killed processes to be gone.
const LIMIT: Duration = Duration::from_secs(2);

/// How long to wait for those that have ended to be reaped, which in some containers nobody does.
const REAPING_LIMIT: Duration = Duration::from_secs(1);

const PAUSE: Duration = Duration::from_millis(5);

/// Most uids that a line names.
const NAMED: usize = 16;

/// What the processes of one uid are.
#[derive(Default)]
struct Found {
    living: Vec<Pid>,
    has_others: bool,
    /// Some are in another pid namespace. Those of an earlier server end by themselves with the first process there; those
    /// of a host in a container do not.
    has_nested: bool,
}

/// Kills the processes that sandboxes of an earlier server have left, uid by uid, and logs how many. All processes of the
/// uids in `known`, which records name, are theirs. Another uid that has any other process is logged, and none of its
/// processes is touched; nor is one with an account.
pub(super) fn end(
    users: &RangeInclusive<u32>,
    accounts: &[u32],
    known: &[u32],
    signaller: &Signaller,
) {
    let is_account = |uid: &u32| accounts.contains(uid);
    report(
        "have accounts or groups on this machine",
        users.clone().filter(is_account).collect(),
    );
    let user = |uid: u32| User { uid, gid: uid };
    let is_busy = |uid: &u32| sys::user_has_processes(user(*uid));
    // One quick call for each, which a process that is never there when it is looked at does not escape.
    let mut busy: Vec<u32> = users.clone().filter(|uid| !is_account(uid)).collect();
    busy.retain(is_busy);
    let begun = Instant::now();
    let (mut of_others, mut unreaped) = (Vec::new(), Vec::new());
    let (mut killed, mut emptied) = (Vec::<Pid>::new(), Vec::new());
    // Without a look at a process nobody knows whose it is.
    while !busy.is_empty() && proc::shows_this_namespace() {
        let found = look(&busy);
        busy.retain(|uid| {
            let Some((_, found)) = found.iter().find(|(other, _)| other == uid) else {
                return is_busy(uid);
            };
            if found.has_others && !known.contains(uid) {
                of_others.push(*uid);
                return false;
            }
            if found.has_nested {
                return is_busy(uid);
            }
            let is_new = !emptied.contains(uid);
            if found.living.is_empty() && !is_new && begun.elapsed() >= REAPING_LIMIT {
                unreaped.push(*uid);
                return false;
            }
            for pid in &found.living {
                // It may be there still at the next look.
                if !killed.contains(pid) {
                    killed.push(*pid);
                }
            }
            // Once in any case: what is alive may be too quick to be seen alive.
            if is_new {
                emptied.push(*uid);
            }
            if is_new || !found.living.is_empty() {
                signaller.signal(user(*uid), libc::SIGKILL);
            }
            is_busy(uid)
        });
        if begun.elapsed() >= LIMIT {
            break;
        }
        thread::sleep(PAUSE);
    }
    if !killed.is_empty() {
        logging::info(format_args!(
            "killed {} processes that sandboxes of an earlier server have left, of {} uids",
            killed.len(),
            emptied.len()
        ));
    }
    of_others.extend(busy);
    report("have processes that belong to no sandbox", of_others);
    report("have ended processes that nobody has reaped", unreaped);
}

/// Waits until no process of an earlier server's private roots is left. The first processes of their namespaces ended with
/// that server, and the kernel kills what is inside; until that is done the files are not to be shown to others.
pub(super) fn wait_for_roots(users: &RangeInclusive<u32>) {
    let begun = Instant::now();
    let is_of_root = |pid: &Pid| {
        let user = proc::real_user(*pid);
        user.is_some_and(|user| {
            users.contains(&user)
                && !sys::user_has_processes(User {
                    uid: user,
                    gid: user,
                })
        }) && proc::is_living(*pid)
    };
    while begun.elapsed() < LIMIT {
        let left: Vec<Pid> = proc::processes().filter(is_of_root).collect();
        if left.is_empty() {
            return;
        }
        for pid in left {
            let process = sys::pidfd_open(pid);
            if let Ok(process) = process
                && is_of_root(&pid)
                && Mark::is_of_sandbox(pid) == Some(true)
            {
                let _ = sys::pidfd_signal(process.as_fd(), libc::SIGKILL);
            }
        }
        thread::sleep(PAUSE);
    }
    logging::info(format_args!(
        "processes with ids of SBX_ID_BLOCKS do not end; they may still change files of sandboxes"
    ));
}

/// Ends what keeps a killed host from ending: one of its threads is in a call on a pipe that a process of a sandbox holds
/// up, and until that ends the kernel keeps its port and its lock. Kills the processes of sandboxes of the uids that are
/// both among `users` and among those that the host has locked. False if it was not killed.
pub(super) fn end_of_killed(other: &Other, users: &RangeInclusive<u32>) -> bool {
    let Other { users: theirs, pid } = other;
    let host = pid.cast_signed();
    // Its number may be that of any process, for example if the host is in another container.
    let was_killed = proc::stat(host, &mut Vec::new())
        .is_some_and(|stat| stat.state == ThreadState::Ended)
        && proc::name(host) == proc::name(std::process::id().cast_signed());
    if was_killed {
        let uids = users
            .clone()
            .filter(|uid| theirs.contains(&u64::from(*uid)));
        for (_, found) in look(&uids.collect::<Vec<_>>()) {
            for pid in found.living {
                let process = sys::pidfd_open(pid);
                if let Ok(process) = process
                    && Mark::is_of_sandbox(pid) == Some(true)
                {
                    let _ = sys::pidfd_signal(process.as_fd(), libc::SIGKILL);
                }
            }
        }
    }
    was_killed
}

/// Logs uids that no sandbox is given.
fn report(why: &str, mut uids: Vec<u32>) {
    let count = uids.len();
    if count == 0 {
        return;
    }
    uids.truncate(NAMED);
    let mut names: Vec<String> = uids.iter().map(u32::to_string).collect();
    if count > NAMED {
        names.push(format!("{} more", count - NAMED));
    }
    logging::info(format_args!(
        "uids of SBX_UID_RANGE that no sandbox gets while they {why}: {}",
        names.join(", ")
    ));
}

/// Looks at the processes of these uids, and at those that start meanwhile.
fn look(uids: &[u32]) -> Vec<(u32, Found)> {
    let mut all: Vec<(u32, Found)> = Vec::new();
    let mut meet = |pid: Pid| {
        let uid = proc::real_user(pid).filter(|uid| uids.contains(uid));
        // Asked last: it is known of no process that has ended meanwhile.
        if let Some(uid) = uid
            && let Some(is_ours) = Mark::is_of_sandbox(pid)
        {
            let known = all.iter().position(|(other, _)| *other == uid);
            let place = known.unwrap_or_else(|| {
                all.push((uid, Found::default()));
                all.len() - 1
            });
            let (_, found) = &mut all[place];
            found.has_others |= !is_ours;
            found.has_nested |= proc::is_nested(pid);
            if proc::is_living(pid) {
                found.living.push(pid);
            }
        }
    };
    let mut newest = proc::newest_pid();
    proc::processes().for_each(&mut meet);
    while let (Some(before), Some(now)) = (newest, proc::newest_pid())
        && before < now
    {
        (before + 1..=now).for_each(&mut meet);
        newest = Some(now);
    }
    all
}
