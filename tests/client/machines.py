"""Machines for jobs: namespaces of this machine, as a job finds them.

Used in two ways. As a program it is the container runtime,

    python machines.py <an empty directory> <descriptor to report to>

It reads one JSON object from its standard input,

    {"command": [...], "environment": {...}, "first_id": n}

and makes the machine, with that directory as its root; when another line comes, it starts the command there as process 1; and it ends
with the command's status. It reports a line when the machine is made, and one with the pid of its
process 1, as this machine sees it. When its standard input ends, so does the machine: whoever
started it is gone.

As a module it gives `Machine`, which runs that program and reaches into the machine's network.

What a job has is what job runners give: root in a user namespace with 65536 users of its own,
process ids, mounts, a network with nothing but a loopback, and the capabilities that Docker leaves.
The image is this machine's own system (/usr and /etc); the rest, /tmp too, is new and in memory. No
two machines share a user, so none can end another's processes, and the port of the server is the
same in all.
"""

import ctypes
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/sockios.h>, <net/if.h>.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUTS = 0x20000000, 0x40000000, 0x04000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 0x2, 0x4, 0x8, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1

# What Docker leaves to root, by number (<linux/capability.h>): chown, dac_override, fowner, fsetid,
# kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, mknod, audit_write, setfcap.
CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31}

USERS = 65536

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "sys")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments) -> int:
    """A function of the C library; an error of it is an OSError."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it has ended, however that ends."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def mount(source: str, target, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else str(word).encode() for word in (source, target, kind, options)]
    _call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def leave_mounts() -> None:
    """Gives this process, and those that it starts, mounts of their own. For one thread only."""
    _call("unshare", CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


# ---------------------------------------------------------------------------------- the runtime


def enter_namespaces(first_id: int) -> None:
    """Makes this process root of new namespaces; its children are in the new process ids."""
    here, there = socket.socketpair()
    parent = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        # Only who stands outside may give it more than one user.
        try:
            there.recv(1)
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{parent}/{kind}").write_text(f"0 {first_id} {USERS}")
            os._exit(0)
        finally:
            os._exit(1)
    every = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC
    _call("unshare", every)
    here.send(b"x")
    _, status = os.waitpid(mapper, 0)
    assert status == 0, "the users could not be mapped"
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def raise_loopback() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def populate(root: Path) -> None:
    """Makes the machine's file system at `root`, all but /proc."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NODEV, "mode=755")
    for name in SYSTEM:
        here, there = Path("/", name), root / name
        if here.is_symlink():
            there.symlink_to(os.readlink(here))
        elif here.is_dir():
            there.mkdir()
            mount(here, there, None, MS_BIND | MS_REC)
    for name in ("proc", "dev", "root", "run", "var", "home"):
        (root / name).mkdir()
    for name in ("tmp", "var/tmp", "dev/shm"):
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    for name in DEVICES:
        (root / "dev" / name).touch()
        mount(f"/dev/{name}", root / "dev" / name, None, MS_BIND)
    (root / "dev/pts").mkdir()
    mount("devpts", root / "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666")
    (root / "dev/ptmx").symlink_to("pts/ptmx")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    (root / "dev/fd").symlink_to("/proc/self/fd")


def become(command: list[str], environment: dict[str, str], root: Path) -> None:
    """Process 1 of the machine: becomes the command."""
    # Its parent, the runtime, has one thread, so it is the process's end that counts.
    end_with_parent()
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chroot(root)
    os.chdir("/")
    os.setsid()
    for capability in range(64):
        if capability not in CAPABILITIES:
            # Numbers that the kernel does not know are refused.
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and who is executed would inherit that.
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 100)
    os.execve(command[0], command, environment)


def run() -> int:
    root, report_to = Path(sys.argv[1]), int(sys.argv[2])
    plan = json.loads(sys.stdin.buffer.raw.readline())
    enter_namespaces(plan["first_id"])
    raise_loopback()
    populate(root)
    os.write(report_to, b"made\n")
    if not sys.stdin.buffer.raw.readline():
        return 1
    first = os.fork()
    if first == 0:
        try:
            become(plan["command"], plan["environment"], root)
        finally:
            os._exit(127)
    os.write(report_to, b"%d\n" % first)
    os.close(report_to)
    ended = os.pidfd_open(first)
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(0, select.POLLIN)
    if ended not in dict(watched.poll()):
        os.kill(first, signal.SIGKILL)
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


# ---------------------------------------------------------------------------------- for the runner


def socket_in(network: int) -> socket.socket:
    """A TCP socket in the network namespace that this descriptor stands for."""
    # A thread's network says where its new sockets are; those that exist stay where they are.
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("setns", network, CLONE_NEWNET)
        try:
            return socket.socket()
        finally:
            _call("setns", own, CLONE_NEWNET)
    finally:
        os.close(own)


class Machine:
    """A machine, and a command that is to be its process 1."""

    def __init__(self, command: list[str], environment: dict[str, str], root: Path) -> None:
        """Makes the machine, and its root directory; `start` starts the command."""
        self._root = root
        # Who is root there comes by as nobody of this machine.
        root.mkdir(mode=0o711)
        plan = {
            "command": command,
            "environment": {"PATH": PATH, "HOME": "/root", **environment},
            # No other machine is likely to have them.
            "first_id": (1 + secrets.randbelow(65_000)) * USERS,
        }
        reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", __file__, root, str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
        )
        os.close(writer)
        self._report = open(reader)
        self._network = None
        self._tell(json.dumps(plan))
        self._network = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)

    def start(self) -> None:
        # Process 1 of the machine, as this machine sees it.
        self.pid = int(self._tell("start"))
        self._report.close()

    def _tell(self, line: str) -> str:
        """Writes a line to the runtime; what it reports."""
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        report = self._report.readline()
        if not report:
            said = self.process.communicate()[0].decode(errors="replace")
            self.destroy()
            raise RuntimeError(f"no machine can be made here: {said}")
        return report

    def socket(self) -> socket.socket:
        """A TCP socket in the machine's network."""
        return socket_in(self._network)

    def signal(self, number: int) -> None:
        """Sends a signal to process 1."""
        # The runtime reaps it at once but ends after it; while that lives, the pid may be old for
        # no longer than this.
        if self.process.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def destroy(self) -> None:
        """Ends the machine, whatever it does, and everything in it."""
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        if self._network is not None:
            os.close(self._network)
            self._network = None
        self._report.close()
        # What was mounted there was only there for the machine.
        if self._root.exists():
            self._root.rmdir()


def refusal() -> str | None:
    """Why no machine can be made here, or None."""
    if os.geteuid() != 0:
        return "machines for jobs need root"
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        try:
            machine = Machine(["/bin/sh", "-c", ":"], {}, Path(directory, "root"))
            machine.start()
        except (OSError, RuntimeError) as error:
            return str(error)
        try:
            status = machine.process.wait(timeout=20)
            said = machine.process.stdout.read().decode(errors="replace")
        finally:
            machine.destroy()
    return None if status == 0 else f"a machine ended with status {status}: {said}"


if __name__ == "__main__":
    sys.exit(run())
