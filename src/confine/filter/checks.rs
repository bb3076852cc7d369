//! The code of each [`Denial`]: most are decided by the arguments of a call, which the kernel passes as 64 bits whatever
//! it reads of them.

use libc::{
    EAFNOSUPPORT, EINVAL, ENETUNREACH, ENOENT, ENOPROTOOPT, EOPNOTSUPP, EPERM, EPROTONOSUPPORT,
    ESOCKTNOSUPPORT, SECCOMP_RET_USER_NOTIF, c_int,
};

use super::assembler::{Assembler, IF_ANY_BIT, IF_EQUAL, Label, high_word, low_word};
use super::{Sockets, Subject};

/// When a call is denied, and with which errno.
#[derive(Clone, Copy)]
pub(super) enum Denial {
    /// Always, with this errno.
    Always(c_int),
    /// `EPERM` if one of the [`DENIED_CLONE_FLAGS`] is set.
    CloneFlags,
    /// `EPERM` for everything but [`UNSHARABLE`].
    Unsharing,
    /// All sockets but those that [`Assembler::socket_check`] allows, by [`Sockets`].
    UnusualSockets,
    /// `ENOPROTOOPT` for [`PORT_RANGE`] of `IPPROTO_IP`, `ENOENT` for [`libc::TCP_ULP`] of `IPPROTO_TCP`. Success without
    /// effect for [`libc::SO_LINGER`], [`libc::TCP_USER_TIMEOUT`] and, where the server answers look-ups,
    /// [`libc::IP_RECVERR`]. In sandboxes `ENOPROTOOPT` for the [`SOCKET_OPTIONS`] of `SOL_SOCKET`.
    SocketOptions,
    /// Not denied but left to the server, which answers the call.
    Left,
    /// `EOPNOTSUPP` if the argument with this number, of flags, has `MSG_FASTOPEN`.
    FastOpen(u32),
    /// `EPERM` if the second argument, an `int`, is one of these commands.
    Commands(&'static [c_int]),
    /// `EINVAL` if the first arguments, of which there are at most two, are these.
    Mode(&'static [c_int]),
    /// Success without effect for a change of the limit on core dumps. These are the numbers of the arguments that say which limit
    /// is meant, and where a new value is; without the latter there always is one.
    CoreLimit(u32, Option<u32>),
    /// Success without effect for [`libc::POSIX_FADV_DONTNEED`].
    Forgetting,
}

/// The flags of clone(2) that are denied: those for namespaces, and `CLONE_PARENT`, which would make the
/// new process a child of the server. `CLONE_NEWTIME` is not among them: its bit is part of the exit
/// signal.
const DENIED_CLONE_FLAGS: u32 = (libc::CLONE_PARENT
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET)
    .cast_unsigned();

/// The flags of unshare(2) that make no namespace. An allow-list, unlike that of clone: new flags of
/// unshare take bits that have another meaning in clone (`CLONE_NEWTIME`; `UNSHARE_EMPTY_MNTNS` since
/// Linux 7.1), and ordinary programs use no others.
const UNSHARABLE: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM)
    .cast_unsigned();

/// Options of sockets of any family. The first ones attach a filter, which takes the same memory as those of calls. A
/// socket that is bound to an interface is not found by its addresses alone, so the server would not know whose it is.
const SOCKET_OPTIONS: [c_int; 6] = [
    libc::SO_ATTACH_FILTER,
    libc::SO_ATTACH_BPF,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::SO_ATTACH_REUSEPORT_EBPF,
    libc::SO_BINDTODEVICE,
    SO_BINDTOIFINDEX,
];

/// `SO_BINDTOIFINDEX` of asm-generic/socket.h.
const SO_BINDTOIFINDEX: c_int = 62;

/// `IP_LOCAL_PORT_RANGE` of linux/in.h, since Linux 6.3. The kernel takes it for IPv6 sockets too.
const PORT_RANGE: c_int = 51;

/// `SOCK_TYPE_MASK` of linux/net.h: above it are `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
const SOCKET_TYPE: u32 = 0xf;

/// The allowed protocols of internet sockets: the default of the type (`IPPROTO_IP`), TCP, UDP and echo
/// requests. Landlock's rules for TCP do not cover connections of other protocols (MPTCP, SMC, SCTP,
/// DCCP).
const INTERNET_PROTOCOLS: [c_int; 5] = [
    libc::IPPROTO_IP,
    libc::IPPROTO_TCP,
    libc::IPPROTO_UDP,
    libc::IPPROTO_ICMP,
    libc::IPPROTO_ICMPV6,
];

impl Assembler {
    pub(super) fn denial(
        &mut self,
        denial: Denial,
        subject: Subject,
        sockets: Sockets,
        allow: Label,
    ) -> Label {
        match denial {
            Denial::Always(errno) => self.errno(errno),
            Denial::CloneFlags => {
                // The kernel reads the lower half only. The upper one may not be zero: an `int` with its
                // highest bit set (`CLONE_IO`) is sign-extended.
                let refuse = self.errno(EPERM);
                let flags = self.branch(IF_ANY_BIT, DENIED_CLONE_FLAGS, refuse, allow);
                self.load(low_word(0), flags)
            }
            Denial::Unsharing => {
                // The kernel reads all 64 bits and has no flags in the upper half.
                let refuse = self.errno(EPERM);
                let lower = self.branch(IF_ANY_BIT, !UNSHARABLE, refuse, allow);
                let lower = self.load(low_word(0), lower);
                let upper = self.branch(IF_EQUAL, 0, lower, refuse);
                self.load(high_word(0), upper)
            }
            Denial::UnusualSockets => self.socket_check(subject, sockets, allow),
            Denial::Left => self.answer(SECCOMP_RET_USER_NOTIF),
            Denial::SocketOptions => {
                // The kernel reads the level and the option as `int`.
                let refuse = self.errno(ENOPROTOOPT);
                let pretend = self.errno(0);
                let filters: &[c_int] = match subject {
                    Subject::Sandbox | Subject::Namespaces | Subject::PrivateRoot => {
                        &SOCKET_OPTIONS
                    }
                    Subject::Machine => &[],
                };
                let of_socket = self.any_of(filters, refuse, allow);
                let of_socket = self.any_of(&[libc::SO_LINGER], pretend, of_socket);
                let of_socket = self.load(low_word(2), of_socket);
                let other = if sockets == Sockets::Redirected {
                    // glibc sets it for look-ups, and gives up without it. Unix sockets do not have it.
                    self.any_of(&[libc::IP_RECVERR], pretend, allow)
                } else {
                    allow
                };
                let option = self.any_of(&[PORT_RANGE], refuse, other);
                let option = self.load(low_word(2), option);
                let no_protocol = self.errno(ENOENT);
                let of_tcp = self.any_of(&[libc::TCP_USER_TIMEOUT], pretend, allow);
                let of_tcp = self.any_of(&[libc::TCP_ULP], no_protocol, of_tcp);
                let of_tcp = self.load(low_word(2), of_tcp);
                let level = self.any_of(&[libc::SOL_SOCKET], of_socket, allow);
                let level = self.any_of(&[libc::IPPROTO_TCP], of_tcp, level);
                let level = self.any_of(&[libc::IPPROTO_IP], option, level);
                self.load(low_word(1), level)
            }
            Denial::FastOpen(argument) => {
                // The kernel reads an `unsigned int`.
                let refuse = self.errno(EOPNOTSUPP);
                let fast_open = libc::MSG_FASTOPEN.cast_unsigned();
                let flags = self.branch(IF_ANY_BIT, fast_open, refuse, allow);
                self.load(low_word(argument), flags)
            }
            Denial::Commands(commands) => {
                // The kernel reads an `unsigned int`.
                let refuse = self.errno(EPERM);
                let command = self.any_of(commands, refuse, allow);
                self.load(low_word(1), command)
            }
            Denial::Mode(words) => {
                // The kernel reads an `int`, except for prctl's mode, whose upper half has to be zero.
                let refuse = self.errno(EINVAL);
                let words = [0, 1].into_iter().zip(words);
                words.rev().fold(refuse, |yes, (argument, word)| {
                    let word = self.any_of(&[*word], yes, allow);
                    self.load(low_word(argument), word)
                })
            }
            Denial::CoreLimit(limit, value) => {
                // The kernel reads an `unsigned int`, and a pointer.
                let pretend = self.errno(0);
                let change = value.map_or(pretend, |value| {
                    let lower = self.branch(IF_EQUAL, 0, allow, pretend);
                    let lower = self.load(low_word(value), lower);
                    let upper = self.branch(IF_EQUAL, 0, lower, pretend);
                    self.load(high_word(value), upper)
                });
                let core = libc::RLIMIT_CORE;
                let which = self.any_of(&[core], change, allow);
                self.load(low_word(limit), which)
            }
            Denial::Forgetting => {
                // The kernel reads an `int`.
                let pretend = self.errno(0);
                let advice = self.any_of(&[libc::POSIX_FADV_DONTNEED], pretend, allow);
                self.load(low_word(3), advice)
            }
        }
    }

    /// Allows Unix sockets of every type, `NETLINK_ROUTE`, which C libraries use to list network interfaces, and
    /// internet sockets by [`Sockets`]. All three arguments are an `int`.
    fn socket_check(&mut self, subject: Subject, sockets: Sockets, allow: Label) -> Label {
        let no_family = self.errno(EAFNOSUPPORT);
        let no_protocol = self.errno(EPROTONOSUPPORT);

        let netlink = self.any_of(&[libc::NETLINK_ROUTE], allow, no_protocol);
        let netlink = self.load(low_word(2), netlink);
        let [ipv4, ipv6] = match sockets {
            Sockets::Usual => [self.usual_internet_sockets(allow); 2],
            Sockets::Redirected if subject == Subject::PrivateRoot => {
                // Its network is its own, so that no socket leads out by itself, and echo requests reach only itself.
                let refuse = self.errno(ENETUNREACH);
                let echo = self.any_of(&[libc::IPPROTO_ICMP], allow, refuse);
                let datagram = self.left_protocol(libc::IPPROTO_UDP, echo);
                let stream = self.left_protocol(libc::IPPROTO_TCP, refuse);
                [
                    self.handed_out_sockets(datagram, stream, refuse),
                    self.handed_out_sockets(no_family, stream, no_family),
                ]
            }
            Sockets::HandedOut | Sockets::Redirected => {
                let refuse = self.errno(ENETUNREACH);
                let datagram = if sockets == Sockets::Redirected {
                    self.left_protocol(libc::IPPROTO_UDP, refuse)
                } else {
                    refuse
                };
                let stream = self.left_protocol(libc::IPPROTO_TCP, refuse);
                [self.handed_out_sockets(datagram, stream, refuse), no_family]
            }
            Sockets::None => [self.errno(ENETUNREACH), no_family],
        };

        let family = self.any_of(&[libc::AF_NETLINK], netlink, no_family);
        let family = self.any_of(&[libc::AF_INET6], ipv6, family);
        let family = self.any_of(&[libc::AF_INET], ipv4, family);
        let family = self.any_of(&[libc::AF_UNIX], allow, family);
        self.load(low_word(0), family)
    }

    /// Leaves a protocol to the server, named or as the default of its type. All arguments are in registers, so that it
    /// sees what is checked here.
    fn left_protocol(&mut self, protocol: c_int, otherwise: Label) -> Label {
        let leave = self.answer(SECCOMP_RET_USER_NOTIF);
        let protocol = self.any_of(&[libc::IPPROTO_IP, protocol], leave, otherwise);
        self.load(low_word(2), protocol)
    }

    /// Decides by the type of a socket, which is an `int`.
    fn handed_out_sockets(&mut self, datagram: Label, stream: Label, otherwise: Label) -> Label {
        let kind = self.any_of(&[libc::SOCK_DGRAM], datagram, otherwise);
        let kind = self.any_of(&[libc::SOCK_STREAM], stream, kind);
        let kind = self.mask(SOCKET_TYPE, kind);
        self.load(low_word(1), kind)
    }

    /// Allows streams and datagrams of the [`INTERNET_PROTOCOLS`].
    fn usual_internet_sockets(&mut self, allow: Label) -> Label {
        let no_type = self.errno(ESOCKTNOSUPPORT);
        let no_protocol = self.errno(EPROTONOSUPPORT);
        let refuse = self.errno(EPERM);
        let protocol = self.any_of(&INTERNET_PROTOCOLS, allow, no_protocol);
        let protocol = self.load(low_word(2), protocol);
        let unusual = self.any_of(&[libc::SOCK_RAW], refuse, no_type);
        let internet = self.any_of(&[libc::SOCK_STREAM, libc::SOCK_DGRAM], protocol, unusual);
        let internet = self.mask(SOCKET_TYPE, internet);
        self.load(low_word(1), internet)
    }
}

#[cfg(test)]
mod tests {
    use libc::ENOSYS;

    use super::super::calls::{TERMINAL_COMMANDS, denied};
    use super::super::compile;
    use super::super::simulator::{
        ALL, BOTH, HIGH_GARBAGE, Verdict, Verdict::*, find, int, run, verdict,
    };
    use super::*;

    #[test]
    fn a_child_gets_no_namespace_of_its_own_and_no_other_parent() {
        let thread = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM
            | libc::CLONE_SETTLS
            | libc::CLONE_PARENT_SETTID
            | libc::CLONE_CHILD_CLEARTID;
        let fork = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let spawn = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let other = libc::CLONE_PTRACE | libc::CLONE_IO | libc::CLONE_UNTRACED;
        for flags in [0, thread, fork, spawn, other, 0xff] {
            assert_eq!(verdict("clone", &[int(flags)]), Allowed, "{flags:#x}");
            assert_eq!(verdict("clone", &[HIGH_GARBAGE | int(flags)]), Allowed);
            for denied in [
                libc::CLONE_PARENT,
                libc::CLONE_NEWNS,
                libc::CLONE_NEWCGROUP,
                libc::CLONE_NEWUTS,
                libc::CLONE_NEWIPC,
                libc::CLONE_NEWUSER,
                libc::CLONE_NEWPID,
                libc::CLONE_NEWNET,
            ] {
                let flags = int(flags | denied);
                assert_eq!(verdict("clone", &[flags]), Refused(EPERM), "{flags:#x}");
                assert_eq!(verdict("clone", &[HIGH_GARBAGE | flags]), Refused(EPERM));
            }
        }
        // Only the first argument has flags.
        assert_eq!(
            verdict("clone", &[0, u64::MAX, u64::MAX, u64::MAX]),
            Allowed
        );
    }

    #[test]
    fn the_limit_on_core_dumps_stays_and_can_be_read() {
        let (core, files) = (int(libc::RLIMIT_CORE), int(libc::RLIMIT_NOFILE));
        for garbage in [0, HIGH_GARBAGE] {
            assert_eq!(verdict("setrlimit", &[garbage | core, 1]), Refused(0));
            assert_eq!(verdict("setrlimit", &[garbage | files, 1]), Allowed);
            for value in [1, 1 << 32, u64::MAX] {
                let call = [0, garbage | core, value, 1];
                assert_eq!(verdict("prlimit64", &call), Refused(0), "{value:#x}");
                let call = [0, garbage | files, value, 1];
                assert_eq!(verdict("prlimit64", &call), Allowed);
            }
            assert_eq!(verdict("prlimit64", &[0, garbage | core, 0, 1]), Allowed);
        }
    }

    #[test]
    fn a_process_can_stop_sharing_but_not_leave_its_namespaces() {
        let sharing = [
            libc::CLONE_VM,
            libc::CLONE_FS,
            libc::CLONE_FILES,
            libc::CLONE_SIGHAND,
            libc::CLONE_THREAD,
            libc::CLONE_SYSVSEM,
        ];
        let all = sharing.into_iter().fold(0, |all, flag| all | flag);
        assert_eq!(verdict("unshare", &[0]), Allowed);
        assert_eq!(verdict("unshare", &[int(all)]), Allowed);
        for bit in 0..64 {
            let flag = 1u64 << bit;
            let expected = if sharing.map(int).contains(&flag) {
                Allowed
            } else {
                Refused(EPERM)
            };
            assert_eq!(verdict("unshare", &[flag]), expected, "{flag:#x}");
            assert_eq!(verdict("unshare", &[int(all) | flag]), expected);
        }
        assert_eq!(verdict("unshare", &[u64::MAX]), Refused(EPERM));
    }

    #[test]
    fn only_sockets_that_other_rules_cover_can_be_made() {
        let raw = libc::SOCK_RAW;
        let (stream, datagram, packets) =
            (libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET);
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let mut cases = vec![
            (libc::AF_UNIX, stream, 0, Allowed),
            (libc::AF_UNIX, datagram, 0, Allowed),
            (libc::AF_UNIX, packets, 0, Allowed),
            (libc::AF_UNIX, raw, 1, Allowed),
            (libc::AF_NETLINK, raw, libc::NETLINK_ROUTE, Allowed),
            (libc::AF_NETLINK, datagram, libc::NETLINK_ROUTE, Allowed),
        ];
        for family in [libc::AF_INET, libc::AF_INET6] {
            for protocol in [0, libc::IPPROTO_TCP] {
                cases.push((family, stream, protocol, Allowed));
            }
            for protocol in [
                0,
                libc::IPPROTO_UDP,
                libc::IPPROTO_ICMP,
                libc::IPPROTO_ICMPV6,
            ] {
                cases.push((family, datagram, protocol, Allowed));
            }
            // DCCP, RSVP, SCTP, UDP-Lite, SMC, MPTCP, raw, and what there is not.
            for protocol in [33, 46, 132, 136, 256, 262, 255, -1, 2, 5, 7, 16, 18, 57, 59] {
                for kind in [stream, datagram] {
                    cases.push((family, kind, protocol, Refused(EPROTONOSUPPORT)));
                }
            }
            for protocol in [0, libc::IPPROTO_TCP, libc::IPPROTO_ICMP] {
                cases.push((family, raw, protocol, Refused(EPERM)));
                // Reliable datagrams, SCTP's and DCCP's, the old way to packets, and what there is not.
                for kind in [0, 4, packets, 6, 7, 8, 9, 10, 15] {
                    cases.push((family, kind, protocol, Refused(ESOCKTNOSUPPORT)));
                }
            }
        }
        for protocol in (1..=22).chain([-1]) {
            cases.push((libc::AF_NETLINK, raw, protocol, Refused(EPROTONOSUPPORT)));
        }
        for family in (-1..=64).filter(|family| {
            ![
                libc::AF_UNIX,
                libc::AF_INET,
                libc::AF_INET6,
                libc::AF_NETLINK,
            ]
            .contains(family)
        }) {
            cases.push((family, stream, 0, Refused(EAFNOSUPPORT)));
        }
        for (family, kind, protocol, expected) in cases {
            // Known flags, and one that the kernel is left to complain about.
            for kind in [kind, kind | flags, kind | 0x10] {
                let arguments = [family, kind, protocol].map(int);
                for arguments in [arguments, arguments.map(|word| HIGH_GARBAGE | word)] {
                    for name in ["socket", "socketpair"] {
                        assert_eq!(
                            verdict(name, &arguments),
                            expected,
                            "{name} {family} {kind:#x} {protocol}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_root_of_its_own_listens_at_ipv6_and_pings_itself() {
        let [ipv4, ipv6] = [libc::AF_INET, libc::AF_INET6];
        let [stream, datagram, raw] = [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW];
        for architecture in BOTH {
            let program = compile(architecture, Subject::PrivateRoot, Sockets::Redirected);
            let number = architecture
                .number_of(find("socket"))
                .expect("both have it");
            for (family, kind, protocol, expected) in [
                (ipv4, stream, 0, Left),
                (ipv4, datagram, 0, Left),
                (ipv4, datagram, libc::IPPROTO_UDP, Left),
                (ipv4, datagram, libc::IPPROTO_ICMP, Allowed),
                (ipv4, stream, libc::IPPROTO_ICMP, Refused(ENETUNREACH)),
                (ipv4, raw, libc::IPPROTO_ICMP, Refused(ENETUNREACH)),
                (ipv6, stream, 0, Left),
                (ipv6, stream, libc::IPPROTO_TCP, Left),
                (ipv6, stream, 132, Refused(ENETUNREACH)),
                (ipv6, datagram, 0, Refused(EAFNOSUPPORT)),
                (ipv6, raw, libc::IPPROTO_ICMPV6, Refused(EAFNOSUPPORT)),
            ] {
                let arguments = [int(family), int(kind), int(protocol), 0, 0, 0];
                let found = run(&program, architecture.audit_number(), number, arguments);
                assert_eq!(found.verdict, expected, "{family} {kind} {protocol}");
            }
        }
    }

    #[test]
    fn a_blocked_network_has_sockets_of_the_machine_only() {
        for (architecture, subject) in BOTH.into_iter().flat_map(|architecture| {
            [
                Subject::Sandbox,
                Subject::Namespaces,
                Subject::PrivateRoot,
                Subject::Machine,
            ]
            .map(|subject| (architecture, subject))
        }) {
            let program = compile(architecture, subject, Sockets::None);
            let verdict = |name: &str, arguments: [u64; 6]| {
                let number = architecture.number_of(find(name)).expect("both have it");
                run(&program, architecture.audit_number(), number, arguments).verdict
            };
            for (family, kind, protocol) in
                (-1..=64).flat_map(|family| (0..=15).map(move |kind| (family, kind, kind % 3)))
            {
                let expected = match family {
                    libc::AF_UNIX => Allowed,
                    libc::AF_INET => Refused(ENETUNREACH),
                    libc::AF_NETLINK if protocol == libc::NETLINK_ROUTE => Allowed,
                    libc::AF_NETLINK => Refused(EPROTONOSUPPORT),
                    _ => Refused(EAFNOSUPPORT),
                };
                for upper in [0, HIGH_GARBAGE] {
                    let [family, kind, protocol] =
                        [family, kind, protocol].map(|word| upper | int(word));
                    for name in ["socket", "socketpair"] {
                        let arguments = [family, kind, protocol, 7, 7, 7];
                        assert_eq!(verdict(name, arguments), expected, "{name} {family:#x}");
                    }
                }
            }
            // What bypasses the rules is refused as ever.
            let fast_open = int(libc::MSG_FASTOPEN);
            assert_eq!(verdict("sendto", [fast_open; 6]), Refused(EOPNOTSUPP));
            assert_eq!(verdict("io_uring_setup", [0; 6]), Refused(ENOSYS));
            // The rest is denied to sandboxes only.
            let rest = match subject {
                Subject::Sandbox | Subject::Namespaces | Subject::PrivateRoot => Refused(EPERM),
                Subject::Machine => Allowed,
            };
            assert_eq!(verdict("mount", [0; 6]), rest);
            let shared = match subject {
                Subject::Sandbox => Refused(ENOSYS),
                Subject::Namespaces | Subject::PrivateRoot | Subject::Machine => Allowed,
            };
            for name in ["shmget", "semop", "msgrcv", "mq_open", "mq_unlink"] {
                assert_eq!(verdict(name, [0; 6]), shared, "{name}");
            }
            let other = run(&program, 0x4000_0003, 5, [0; 6]);
            assert_eq!(other.verdict, Killed);
        }
    }

    #[test]
    fn what_leads_a_connection_is_left_to_the_server() {
        let datagram = int(libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
        let (stream, udp, tcp) = (
            int(libc::SOCK_STREAM),
            int(libc::IPPROTO_UDP),
            int(libc::IPPROTO_TCP),
        );
        let (ipv4, ipv6) = (int(libc::AF_INET), int(libc::AF_INET6));
        let cases: [(Sockets, &str, [u64; 3], Verdict); 17] = [
            (Sockets::Redirected, "connect", [0; 3], Left),
            (Sockets::Redirected, "listen", [u64::MAX; 3], Left),
            (Sockets::HandedOut, "connect", [0; 3], Allowed),
            (Sockets::HandedOut, "listen", [0; 3], Allowed),
            (Sockets::Redirected, "socket", [ipv4, stream, 0], Left),
            (Sockets::Redirected, "socket", [ipv4, stream, tcp], Left),
            (Sockets::Redirected, "socket", [ipv4, datagram, 0], Left),
            (Sockets::Redirected, "socket", [ipv4, datagram, udp], Left),
            (
                Sockets::HandedOut,
                "socket",
                [ipv4, datagram, udp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv4, datagram, tcp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv4, stream, udp],
                Refused(ENETUNREACH),
            ),
            (
                Sockets::Redirected,
                "socket",
                [ipv6, stream, tcp],
                Refused(EAFNOSUPPORT),
            ),
            (
                Sockets::Redirected,
                "setsockopt",
                [3, 6, 31],
                Refused(ENOENT),
            ),
            // IP_RECVERR, which Unix sockets do not have.
            (Sockets::Redirected, "setsockopt", [3, 0, 11], Refused(0)),
            (Sockets::Redirected, "setsockopt", [3, 1, 11], Allowed),
            (Sockets::HandedOut, "setsockopt", [3, 0, 11], Allowed),
            (
                Sockets::Redirected,
                "setsockopt",
                [3, 0, 51],
                Refused(ENOPROTOOPT),
            ),
        ];
        for architecture in BOTH {
            for (sockets, name, [a, b, c], expected) in &cases {
                let program = compile(architecture, Subject::Sandbox, *sockets);
                let call = denied(Subject::Sandbox, Sockets::Redirected)
                    .flat_map(|(_, calls)| *calls)
                    .find(|call| call.name == *name);
                let number = architecture.number_of(call.unwrap()).expect("both have it");
                let arguments = [*a, *b, *c, 7, 7, 7];
                let run = run(&program, architecture.audit_number(), number, arguments);
                assert_eq!(run.verdict, *expected, "{sockets:?} {name} {a} {b} {c}");
            }
        }
    }

    #[test]
    fn a_socket_gets_no_port_range_of_its_own() {
        for upper in [0, HIGH_GARBAGE] {
            let option =
                |level: u64, name: u64| verdict("setsockopt", &[3, upper | level, upper | name]);
            assert_eq!(option(0, 51), Refused(ENOPROTOOPT));
            for (level, name) in [(0, 50), (0, 52), (6, 51), (41, 51), (51, 0)] {
                assert_eq!(option(level, name), Allowed, "{level} {name}");
            }
        }
    }

    #[test]
    fn no_socket_lingers() {
        let option = |level: u64, name: u64| {
            verdict(
                "setsockopt",
                &[3, HIGH_GARBAGE | level, HIGH_GARBAGE | name],
            )
        };
        assert_eq!(option(1, 13), Refused(0));
        assert_eq!(option(6, 18), Refused(0));
        for (level, name) in [
            (6, 17),
            (6, 19),
            (0, 18),
            (1, 18),
            (1, 12),
            (1, 14),
            (0, 13),
            (6, 13),
            (41, 13),
            (13, 1),
        ] {
            assert_eq!(option(level, name), Allowed, "{level} {name}");
        }
        assert_eq!((libc::SOL_SOCKET, libc::SO_LINGER), (1, 13));
        assert_eq!((libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), (6, 18));
    }

    /// The arguments of a call that attaches a filter, or binds a socket to an interface, and how that is refused.
    const REFUSED: [(&str, [u64; 3], c_int); 8] = [
        ("seccomp", [1, 0, 0x7777], EINVAL),
        ("prctl", [22, 2, 0x7777], EINVAL),
        ("setsockopt", [3, 1, 26], ENOPROTOOPT),
        ("setsockopt", [3, 1, 50], ENOPROTOOPT),
        ("setsockopt", [3, 1, 51], ENOPROTOOPT),
        ("setsockopt", [3, 1, 52], ENOPROTOOPT),
        ("setsockopt", [3, 1, 25], ENOPROTOOPT),
        ("setsockopt", [3, 1, 62], ENOPROTOOPT),
    ];

    #[test]
    fn a_sandbox_attaches_no_filter_and_binds_to_no_interface() {
        for upper in [0, HIGH_GARBAGE, u64::MAX << 32] {
            for (name, arguments, errno) in REFUSED {
                let arguments = arguments.map(|word| upper | word);
                assert_eq!(verdict(name, &arguments), Refused(errno), "{name}");
            }
            // The strict mode, what the kernel has, and what there is not.
            for operation in [0, 2, 3, 4, u64::from(u32::MAX)] {
                assert_eq!(verdict("seccomp", &[upper | operation, 1]), Allowed);
            }
            // The strict mode, reading the mode, and other options with an operand of 2.
            for arguments in [[22, 0], [22, 1], [22, 3], [21, 2], [23, 2], [1, 2], [2, 22]] {
                let arguments = arguments.map(|word| upper | word);
                assert_eq!(verdict("prctl", &arguments), Allowed, "{arguments:?}");
            }
            // Detaching and locking, neighbours, and the same numbers of other levels.
            for (level, option) in [
                (1, 27),
                (1, 44),
                (1, 68),
                (1, 24),
                (1, 49),
                (1, 53),
                (1, 61),
                (1, 63),
            ]
            .into_iter()
            .chain([0, 6, 17, 41].map(|level| (level, 26)))
            .chain([6, 17, 41].map(|level| (level, 50)))
            {
                let arguments = [3, upper | level, upper | option];
                assert_eq!(verdict("setsockopt", &arguments), Allowed, "{arguments:?}");
            }
        }
        for (architecture, (subject, sockets)) in BOTH
            .into_iter()
            .flat_map(|architecture| ALL.map(|kind| (architecture, kind)))
        {
            let program = compile(architecture, subject, sockets);
            for (name, [a, b, c], errno) in REFUSED {
                let number = architecture.number_of(find(name)).unwrap();
                let arguments = [a, b, c, 7, 7, 7];
                let run = run(&program, architecture.audit_number(), number, arguments);
                let expected = match subject {
                    Subject::Sandbox | Subject::Namespaces | Subject::PrivateRoot => Refused(errno),
                    // Nobody else needs the memory.
                    Subject::Machine => Allowed,
                };
                assert_eq!(run.verdict, expected, "{name} {subject:?} {sockets:?}");
            }
        }
    }

    #[test]
    fn a_tcp_socket_stays_one() {
        for upper in [0, HIGH_GARBAGE] {
            let option =
                |level: u64, name: u64| verdict("setsockopt", &[3, upper | level, upper | name]);
            assert_eq!(option(6, 31), Refused(ENOENT));
            for (level, name) in [(6, 30), (6, 32), (0, 31), (1, 31), (41, 31), (31, 6)] {
                assert_eq!(option(level, name), Allowed, "{level} {name}");
            }
        }
        assert_eq!((libc::IPPROTO_TCP, libc::TCP_ULP), (6, 31));
        for (architecture, (subject, sockets)) in BOTH
            .into_iter()
            .flat_map(|architecture| ALL.map(|kind| (architecture, kind)))
        {
            let program = compile(architecture, subject, sockets);
            let number = architecture.number_of(find("setsockopt")).unwrap();
            let arguments = [3, 6, 31, 7, 7, 7];
            let run = run(&program, architecture.audit_number(), number, arguments);
            assert_eq!(run.verdict, Refused(ENOENT), "{subject:?} {sockets:?}");
        }
    }

    #[test]
    fn no_connection_is_opened_with_its_first_data() {
        for (name, at) in [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)] {
            for upper in [0, HIGH_GARBAGE] {
                for bit in 0..32 {
                    let mut arguments = [u64::MAX; 4];
                    arguments[at] = upper | 1 << bit;
                    let expected = if bit == 29 {
                        Refused(EOPNOTSUPP)
                    } else {
                        Allowed
                    };
                    assert_eq!(verdict(name, &arguments), expected, "{name} {bit}");
                }
            }
        }
        assert_eq!(libc::MSG_FASTOPEN, 1 << 29);
    }

    #[test]
    fn nothing_is_typed_into_a_terminal_and_no_line_discipline_is_loaded() {
        for command in [0x5412, 0x541c, 0x5423] {
            for upper in [0, HIGH_GARBAGE, u64::MAX << 32] {
                assert_eq!(verdict("ioctl", &[0, upper | command]), Refused(EPERM));
            }
            for neighbour in [command - 1, command + 1, command | 0x8000_0000] {
                assert_eq!(verdict("ioctl", &[0, neighbour]), Allowed);
            }
            // Only the second argument is the command.
            assert_eq!(verdict("ioctl", &[command, 0x5413, command]), Allowed);
        }
        for upper in [0, HIGH_GARBAGE] {
            let grow = upper | u64::try_from(libc::F_SETPIPE_SZ).unwrap();
            assert_eq!(verdict("fcntl", &[1, grow, 1 << 20]), Refused(EPERM));
            assert_eq!(verdict("fcntl", &[1, grow + 1]), Allowed);
            assert_eq!(verdict("fcntl", &[1, grow - 1]), Allowed);
            assert_eq!(verdict("fcntl", &[3, upper | 0x402, 1]), Refused(EPERM));
        }
        for advice in 0..8 {
            for upper in [0, HIGH_GARBAGE] {
                let arguments = [4, 4, 4, upper | advice, 4];
                let expected = if advice == 4 { Refused(0) } else { Allowed };
                assert_eq!(verdict("fadvise64", &arguments), expected);
            }
        }
        assert_eq!(TERMINAL_COMMANDS[0], libc::TIOCSTI as c_int);
        assert_eq!(TERMINAL_COMMANDS[1], libc::TIOCLINUX as c_int);
    }
}
