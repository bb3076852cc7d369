"""Plays the server's side of src/interpreter/PROTOCOL.md: starts an interpreter with its bridge, hands out executions,
and records what comes back in the order in which the server would send it.

One thread reads both pipes, the socket and the pidfd. BRIDGE_PYTHON, BRIDGE_NODE and BRIDGE_BASH choose interpreters.
"""
import array
import collections
import ctypes
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import termios
import threading
import time

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "src" / "interpreter"
PYTHON = os.environ.get("BRIDGE_PYTHON", "python3")
NODE = os.environ.get("BRIDGE_NODE", "node")
BASH = os.environ.get("BRIDGE_BASH", "bash")
MAX_FRAME = 64 << 20
WAIT = 20
# The harness adopts what a dead context leaves, as the server does, so that close() can end all of it.
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
# A shell starts what is in the background with SIGINT ignored, and children inherit that. The server undoes it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def source(name):
    return (SOURCES / name).read_text()


def readable_bytes(fd):
    """FIONREAD: how much of the pipe is filled now."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def descendants(pid):
    """Processes of the session that the context leads, and their children."""
    parents = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(fields[1])].append(int(entry))
            if int(fields[3]) == pid and int(entry) != pid:
                yield int(entry)
    pending = [pid]
    while pending:
        for child in parents[pending.pop()]:
            pending.append(child)
            yield child


class Execution:
    """What an execution's stream has: `events` are (kind, value) pairs; `done` is the frame, or `death` the status."""

    def __init__(self):
        self.events = []
        self.finished = threading.Event()
        self.started = time.monotonic()
        self.done = None
        self.death = None
        self.asked = threading.Event()
        self.begun = threading.Event()
        self.duration = None

    def text(self, kind):
        return b"".join(value for k, value in self.events if k == kind).decode("utf-8", "replace")

    @property
    def stdout(self):
        return self.text("stdout")

    @property
    def stderr(self):
        return self.text("stderr")

    def frames(self, kind):
        return [value for k, value in self.events if k == kind]

    @property
    def result(self):
        results = self.frames("result")
        assert len(results) <= 1, "more than one result"
        return results[0] if results else None

    @property
    def error(self):
        return (self.done or {}).get("error")

    @property
    def order(self):
        """The events as text, neighbours of one stream joined."""
        joined = []
        for kind, value in self.events:
            if kind in ("stdout", "stderr"):
                value = value.decode()
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, joined[-1][1] + value)
                    continue
            else:
                value = value.get("data", {}).get("text/plain")
            joined.append((kind, value))
        return joined


class Context:
    language = None

    def __init__(self, command, first_bytes, env=None, cwd=None):
        ours, theirs = socket.socketpair()
        out, out_theirs = os.pipe()
        err, err_theirs = os.pipe()
        self.socket, self.pipes = ours, {out: "stdout", err: "stderr"}
        self.out, self.err = out, err
        os.set_blocking(out, False)  # a sync may have emptied a pipe that poll named
        os.set_blocking(err, False)
        self.lock = threading.Lock()  # signals, and the hand-out and end of executions
        self.current = None
        self.signalled = False  # since the last run was handed out
        self.count = 0
        self.logs = {"stdout": b"", "stderr": b""}
        self.ready = threading.Event()
        self.ready_frame = None
        self.adopted = None
        self.adopted_event = threading.Event()
        self.dead = threading.Event()
        self.status = None
        self.broken = None
        self.buffer = bytearray()
        self.paused = threading.Event()  # set: the server reads nothing (back-pressure)
        self.wake_read, self.wake_write = os.pipe()
        theirs.set_inheritable(True)
        self.process = subprocess.Popen(
            command + [str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=out_theirs,
            stderr=err_theirs,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=env,
            cwd=cwd,
        )
        theirs.close()
        os.close(out_theirs)
        os.close(err_theirs)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.socket.sendall(first_bytes)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    # The reading thread

    def serve(self):
        poll = select.poll()
        watched = [self.socket.fileno(), self.out, self.err, self.pidfd, self.wake_read]
        for fd in watched:
            poll.register(fd, select.POLLIN)
        while True:
            if self.paused.is_set():
                time.sleep(0.01)
                continue
            ready = {fd for fd, _ in poll.poll()}
            if self.wake_read in ready:
                return
            try:
                # Frames first: one that is here was sent when the pipes were empty.
                if self.socket.fileno() in ready and not self.read_socket():
                    poll.unregister(self.socket.fileno())
                    select.select([self.pidfd], [], [], 1)  # a dying process closes it before it has ended
                    if not select.select([self.pidfd], [], [], 0)[0]:
                        self.broken = self.broken or "socket closed"
                        os.kill(self.process.pid, signal.SIGKILL)
                    continue
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                self.broken = "bad frame: %r" % error
                os.kill(self.process.pid, signal.SIGKILL)
                poll.unregister(self.socket.fileno())
                continue
            for fd in (self.out, self.err):
                if fd in ready:
                    try:
                        data = os.read(fd, 65536)
                    except BlockingIOError:
                        continue
                    if data:
                        self.emit_output(self.pipes[fd], data)
                    else:
                        poll.unregister(fd)
            if self.pidfd in ready:
                self.drain()
                self.finish_dead()
                return

    def read_socket(self):
        data = self.socket.recv(65536)
        if not data:
            return False
        self.buffer += data
        self.parse()
        return True

    def parse(self):
        while len(self.buffer) >= 4:
            size = int.from_bytes(self.buffer[:4], "little")
            if size > MAX_FRAME:
                raise ValueError("frame of %d bytes" % size)
            if len(self.buffer) < 4 + size:
                return
            def forbid(constant):
                raise ValueError("not JSON: " + constant)
            text = bytes(self.buffer[4 : 4 + size]).decode()
            frame = json.loads(text, parse_constant=forbid)
            del self.buffer[: 4 + size]
            json.dumps(frame, ensure_ascii=False).encode()  # fails for a lone surrogate
            self.on_frame(frame)

    def drain(self):
        """Reads both pipes as far as they are filled now."""
        for fd in (self.out, self.err):
            left = readable_bytes(fd)
            while left > 0:
                data = os.read(fd, min(left, 65536))
                if not data:
                    break
                left -= len(data)
                self.emit_output(self.pipes[fd], data)

    def emit_output(self, name, data):
        self.logs[name] += data if len(self.logs[name]) < 1 << 20 else b""
        current = self.current
        if current:
            current.events.append((name, data))

    def on_frame(self, frame):
        kind = frame["type"]
        current = self.current
        if kind == "sync":
            self.drain()
            self.send({"type": "synced", "n": frame.get("n")})
        elif kind in ("display", "result", "clear"):
            if kind != "clear":
                assert isinstance(frame["data"], dict) and isinstance(frame["metadata"], dict)
            if current:
                current.events.append((kind, frame))
            self.send({"type": "synced", "n": frame.get("n")})
        elif kind == "input":
            if current:
                current.events.append((kind, frame))
                current.asked.set()
        elif kind == "begun":
            if current:
                current.begun.set()
        elif kind == "done":
            self.finish(frame)
        elif kind in ("ready", "failed"):
            self.ready_frame = frame
            self.ready.set()
        elif kind == "adopted":
            self.adopted = frame
            self.adopted_event.set()
        else:
            raise ValueError("unknown frame %r" % kind)

    def finish(self, frame):
        with self.lock:
            current, self.current = self.current, None
        if current:
            current.begun.set()
            current.done = frame
            current.duration = time.monotonic() - current.started
            current.finished.set()

    def finish_dead(self):
        self.status = self.process.wait()
        with self.lock:
            current, self.current = self.current, None
            self.dead.set()
        self.ready.set()
        if current:
            current.begun.set()
            current.death = self.status
            current.duration = time.monotonic() - current.started
            current.finished.set()

    # Requests

    def encode(self, frame):
        data = json.dumps(frame).encode()
        return len(data).to_bytes(4, "little") + data

    def send(self, frame):
        try:
            self.socket.sendall(self.encode(frame))
        except OSError:
            pass

    def wait_ready(self):
        assert self.ready.wait(WAIT), "not ready"
        frame = self.ready_frame
        assert frame and frame["type"] == "ready", (frame, self.logs)
        return frame

    def start(self, code, **fields):
        """Hands out an execution and returns it while it runs."""
        with self.lock:
            assert self.current is None and not self.dead.is_set()
            self.count += 1
            execution = self.current = Execution()
            signalled, self.signalled = self.signalled, False
            self.send_run(dict(fields, code=code, count=self.count, signalled=signalled))
        return execution

    def send_run(self, fields):
        self.send(dict({"stdin": None, "ask": False, "env": None}, **fields, type="run"))

    def run(self, code, timeout=WAIT, **fields):
        execution = self.start(code, **fields)
        assert execution.finished.wait(timeout), ("no end", code[:200], execution.events[-5:], self.stacks())
        return execution

    def stacks(self):
        try:
            return pathlib.Path("/proc/%d/wchan" % self.process.pid).read_text()
        except OSError:
            return None

    def interrupt(self, execution=None):
        """SIGINT to the process group if the execution (None: any) runs."""
        current = self.current
        if current is not None:
            assert current.begun.wait(WAIT), "has not begun"
        with self.lock:
            if self.current is None or execution not in (None, self.current):
                return False
            self.signal_group()
            return True

    def signal_group(self):
        """SIGINT whatever runs; the caller holds the lock."""
        self.signalled = True
        os.killpg(self.process.pid, signal.SIGINT)

    def answer(self, execution, value=None, eof=False):
        assert execution.asked.wait(WAIT), "did not ask"
        execution.asked.clear()
        k = execution.frames("input")[-1]["k"]
        self.send({"type": "input_reply", "k": k, "value": value, "eof": eof})

    def adopt(self, cwd=None, env=None):
        self.send({"type": "adopt", "cwd": cwd, "env": env})
        assert self.adopted_event.wait(WAIT)
        return self.adopted

    def close(self):
        tree = set(descendants(self.process.pid))
        for pid in tree | {self.process.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        self.dead.wait(5)
        os.write(self.wake_write, b"x")
        self.thread.join(5)
        for pid in tree:
            try:
                os.waitpid(pid, 0)
            except OSError:
                pass
        self.socket.close()
        for fd in (self.out, self.err, self.pidfd, self.wake_read, self.wake_write):
            os.close(fd)


def first_frame(text):
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


class PythonContext(Context):
    def __init__(self, backend="plain", python=None, **options):
        super().__init__([python or PYTHON, "-c", source("start_python.py")], first_frame(source("python.py")), **options)
        modules = {name: source(name + ".py") for name in ("ipython", "figures", "display", "charts", "jupyter") if (SOURCES / (name + ".py")).exists()}
        self.send({"type": "init", "backend": backend, "modules": modules})
        self.wait_ready()


class NodeContext(Context):
    def __init__(self, **options):
        super().__init__([NODE, "-e", source("start_node.js")], first_frame(source("node.js")), **options)
        self.send({"type": "init", "backend": "node"})
        self.wait_ready()


class BashContext(Context):
    def __init__(self, **options):
        super().__init__([BASH, "-c", source("start_bash.sh"), "bash"], source("bash.sh").encode() + b"\0", **options)
        self.wait_ready()

    def parse(self):
        while b"\n" in self.buffer:
            line, _, rest = bytes(self.buffer).partition(b"\n")
            self.buffer[:] = rest
            word, _, value = line.decode().partition(" ")
            if word == "begun":
                self.on_frame({"type": word})
            elif word == "ready":
                self.on_frame({"type": "ready", "version": value})
            elif word in ("done", "int") and value.isdigit():
                self.drain()  # bash cannot ask for it
                self.finish({"type": "done", "exit_code": int(value), "interrupted": word == "int"})
            else:
                raise ValueError("bad line %r" % line)

    def send_run(self, fields):
        env = fields.get("env") or {}
        parts = [str(len(env))] + ["%s=%s" % item for item in env.items()]
        parts += [fields.get("stdin") or "", fields["code"]]
        self.socket.sendall("".join(part + "\0" for part in parts).encode("utf-8", "surrogateescape"))


def have(program):
    return shutil.which(program) is not None
