//! Thin wrappers around the system calls that nix and std do not wrap, or wrap with much code.
//!
//! This folder is the only one with `unsafe`; each block states why it is sound. A function here does
//! one thing that the kernel offers and returns its errno. Policy stays with the callers: nothing
//! here calls another module of the program.
//!
//! [`spawn()`] is the largest: between clone and execve its child shares the server's memory, so it is
//! one ordered list of raw system calls that may not allocate, lock or unwind (signal-safety(7),
//! vfork(2)).

#![allow(unsafe_code, reason = "this is the folder that holds it")]

mod alloc;
mod attributes;
mod clone;
mod descriptors;
mod diag;
mod identity;
pub mod listen;
#[cfg(target_arch = "x86_64")]
mod memory;
mod mounts;
mod namespaces;
pub mod paths;
mod poll;
pub mod proc;
mod process;
mod pty;
mod rename;
mod seccomp;
mod signals;
mod spawn;
mod system;
#[cfg(test)]
mod testing;
mod thread_name;
mod unwinding;

pub use alloc::MemoryCache;
#[cfg(test)]
pub use alloc::allocated_bytes;
pub use attributes::{
    attribute, attribute_names, attribute_names_of, remove_attribute, set_attribute,
};
pub use descriptors::{
    are_few_left, clone_file, is_getting_scarce, is_scarce, prepare_descriptors,
};
pub use diag::{
    SocketDiag, TcpState, is_delivered_here, is_tcp_listening, socket_cookie, tcp_listener_uid,
    tcp_peer, tcp_peer_uid, tcp_state,
};
pub use identity::{
    ActingAs, User, user_has_processes, withhold_capabilities_from_children,
    withhold_ptrace_from_children,
};
pub use mounts::{
    IDS_OF_SANDBOX, MountError, MountSource, MountStep, UserNamespace, clone_mount, open_inside,
    overlay, read_only_mount,
};
pub use namespaces::{
    Holder, HolderError, HolderPlan, HolderStep, NamespaceSet, Setup, wait_for_end,
};
pub use poll::{
    Events, PollEntry, connect_without_waiting, limit_unsent, poll, readable_bytes, receive_append,
    refuse_descriptors,
};
pub use process::{
    Ending, Pid, ended_child, fork, have_one_address_space, make_thread_nice, pidfd_open,
    pidfd_signal, reap, signal_group, signal_process, signal_thread, signal_user, thread_id, wait,
    wait_any,
};
pub use pty::{
    end_of_file_character, foreground_group, open_terminal, set_terminal_size, signal_from_terminal,
};
pub use rename::{Rename, rename};
pub use seccomp::{CallListener, WaitingCall, has_filters, has_listeners};
pub use signals::{ignore, ignore_reserved_signals, is_ignored, restore_default};
pub use spawn::{ChildPlan, Inside, Restriction, SpawnError, SpawnStep, Spawned, spawn};
pub use system::{
    Resource, birth_time, clock_ticks, landlock_abi, limits, mount_id, page_bytes, random_bytes,
    scrub_environment,
};
#[cfg(all(test, guided))]
pub use testing::execution_counters;
#[cfg(test)]
pub use testing::{exchange_names, hide_system_call};
pub use unwinding::prepare_unwinding;
