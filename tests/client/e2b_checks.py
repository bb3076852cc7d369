"""What the checks of the E2B SDKs share: servers, the two SDKs as one, and a runner.

Importing this module reads the command line of `e2b_client.py`, whose docstring describes it, and clears the
variables that lead an SDK anywhere. So it is imported before `e2b`.
"""

import asyncio
import dataclasses
import enum
import faulthandler
import gc
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

BINARY, VERSION = os.path.abspath(sys.argv[1]), sys.argv[2]
WORDS = set(sys.argv[3:])
PATIENCE_PER_CHECK = 180
MIB = 1024 * 1024

# Where programs are on every machine; the test's own PATH may lead into root's home.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Settings of the caller, such as a proxy for the outside world, must not come between.
for variable in list(os.environ):
    if variable.startswith("E2B_") or variable.lower().endswith("_proxy"):
        del os.environ[variable]

try:
    import e2b
    import e2b_code_interpreter
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

assert importlib.metadata.version("e2b") == VERSION, importlib.metadata.version("e2b")
# Whether the server is told the ids of sandboxes that were connected to.
CONNECT_NAMES = "E2b-Sandbox-Id" in inspect.getsource(e2b.Sandbox._cls_connect_sandbox)
# Whether the code interpreter honours E2B_SANDBOX_URL, or goes to https://49999-ID.DOMAIN all the same.
CODE_GOES = "sandbox_url" in inspect.getsource(e2b_code_interpreter.Sandbox._jupyter_url.fget)
# Older releases, of spring 2026, have some faults of their own.
OF_AUTUMN = tuple(map(int, VERSION.split(".")[:2])) >= (2, 40)
# What tells an SDK of debug mode besides its variable, which 2.20.0 reads only after it has made a sandbox.
DEBUG = {"debug": True} if 'opts.get("debug")' in inspect.getsource(e2b.Sandbox._create) else {}
# That one also logs every status that is not a success.
logging.disable()

SCRATCH = Path(tempfile.mkdtemp(prefix="sbx-e2b-"))
# Sandboxes pass through it to their homes.
SCRATCH.chmod(0o711)


class Skipped(Exception):
    """Why a check has nothing to check here."""


def need(condition, reason: str) -> None:
    if not condition:
        raise Skipped(reason)


def takes(function, *names: str) -> None:
    """Goes on if the SDK's function has these parameters."""
    have = inspect.signature(getattr(function, "target", function)).parameters
    need(have.keys() >= set(names), f"this SDK has no {', '.join(names)}")


# ------------------------------------------------------------------------- the asynchronous SDK

LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def in_loop(function, *args, **words):
    """What an asynchronous function gives in the end."""

    async def call():
        result = function(*args, **words)
        return await result if inspect.isawaitable(result) else result

    return asyncio.run_coroutine_threadsafe(call(), LOOP).result()


class Blocking:
    """An object, class or function of the asynchronous SDK that waits for what it is asked for."""

    def __init__(self, target) -> None:
        self.target = target

    def __getattr__(self, name: str):
        return self.of(getattr(self.target, name))

    def __call__(self, *args, **words):
        return self.of(in_loop(self.target, *args, **words))

    @classmethod
    def of(cls, value):
        kind = value if isinstance(value, type) else type(value)
        known = dataclasses.is_dataclass(kind) or issubclass(kind, (Exception, enum.Enum))
        theirs = kind.__module__.startswith("e2b") and not known
        return cls(value) if theirs or inspect.isroutine(value) else value


def pieces(stream) -> list[bytes]:
    """All of a stream that is read in either way."""
    if not hasattr(getattr(stream, "target", stream), "__aiter__"):
        return list(stream)

    async def collect():
        return [piece async for piece in getattr(stream, "target", stream)]

    return in_loop(collect)


# ---------------------------------------------------------------------------------- servers


# Two hosts may run at a time.
FIRST_UID, LAST_UID = map(int, os.environ.get("SBX_UID_RANGE", "56000-56999").split("-"))
MIDDLE_UID = (FIRST_UID + LAST_UID + 1) // 2


class Server:
    """A running server, and what a client must know of it."""

    running: list["Server"] = []

    def __init__(self, mode: str, **variables: str) -> None:
        self.mode = mode
        self.directory = Path(tempfile.mkdtemp(dir=SCRATCH))
        self.directory.chmod(0o711)
        self.homes = self.directory / "homes"
        home = self.directory / "home"
        home.mkdir()
        environment = {"PATH": PATH, "HOME": str(home), "SBX_PORT": "0", "SBX_BIND": "127.0.0.1"}
        if mode == "host":
            environment |= {"SBX_HOST_MODE": "1", "SBX_KEEP": "0", "SBX_HOMES_DIR": str(self.homes), "SBX_CAPACITY": "150"}
            environment["SBX_UID_RANGE"] = f"{FIRST_UID}-{MIDDLE_UID - 1}"
        environment |= variables
        self.token = None
        if mode != "debug":
            self.token = environment["SBX_TOKEN"] = secrets.token_hex(16)
        self.process = subprocess.Popen(
            [BINARY], env=environment, cwd=home, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.running.append(self)
        self.log: list[str] = []
        while not (ready := re.search(r"listening on 127\.0\.0\.1:(\d+)", self.log[-1] if self.log else "")):
            line = self.process.stderr.readline()
            assert line, f"the server did not start (status {self.process.wait()}): {self.log}"
            self.log.append(line)
        self.url = f"http://127.0.0.1:{ready.group(1)}"
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def point_the_sdk_here(self) -> None:
        for name in ("E2B_API_URL", "E2B_API_KEY", "E2B_DEBUG"):
            os.environ.pop(name, None)
        os.environ["E2B_SANDBOX_URL"] = self.url
        if self.token is None:
            os.environ["E2B_DEBUG"] = "true"
        else:
            os.environ |= {"E2B_API_URL": self.url, "E2B_API_KEY": f"e2b_{self.token}"}

    def health(self) -> dict:
        return json.loads(fetch(f"{self.url}/health")[1])

    def end(self) -> None:
        """Ends it as a scheduler does; it must end well and leave nothing."""
        self.running.remove(self)
        self.process.terminate()
        status = self.process.wait(timeout=30)
        self.reader.join(timeout=30)
        log = "".join(self.log)
        assert status == 0 and "panicked" not in log, f"the server ended with {status}:\n{log[-4000:]}"
        left = list(self.homes.iterdir()) if self.homes.exists() else []
        # Snapshots outlive sandboxes.
        assert not [path for path in left if path.name != ".snapshots"], "homes are left"
        shutil.rmtree(self.directory)


HOST = [("host", "sync"), ("host", "async")]
MACHINE = [("machine", "sync"), ("machine", "async")]
# All three kinds of servers, each SDK on a host and on a dedicated machine.
EVERYWHERE = [*HOST, ("machine", "sync"), ("debug", "async")]
WITH_TOKEN = [("host", "sync"), ("machine", "sync")]
CHECKS = []


def check(places):
    def add(function):
        CHECKS.append((function, places))
        return function

    return add


class Place:
    """Where a check works: a server, one of the two SDKs, and a sandbox that is made when it is first used."""

    def __init__(self, server: Server, flavour: str, for_code: bool) -> None:
        self.server, self.mode, self.asynchronous = server, server.mode, flavour == "async"
        package = e2b_code_interpreter if for_code else e2b
        self.Sandbox = Blocking(package.AsyncSandbox) if self.asynchronous else package.Sandbox
        self.made = []
        self._for_code = for_code

    def new(self, **words):
        """One more sandbox, which ends with the check."""
        need(not self._for_code or CODE_GOES, "this SDK sends its code elsewhere")
        self.made.append(self.Sandbox.create(**words, **(DEBUG if self.mode == "debug" else {})))
        return self.made[-1]

    @functools.cached_property
    def sbx(self):
        return self.new()

    @property
    def home(self) -> Path:
        return self.home_of(self.sbx)

    def home_of(self, sbx) -> Path:
        """Where its files are on this machine."""
        if self.mode == "host":
            return self.server.homes / sbx.sandbox_id
        return self.server.directory / "home"

    def leave(self) -> None:
        for sbx in self.made:
            sbx.kill()

    def pid(self, name: str = "pid") -> int:
        """The process that wrote its number into a file."""
        path = self.home / name
        return int(eventually(f"{name} is written", lambda: path.exists() and path.read_text().strip()))

    def go(self) -> None:
        """Lets commands go on that wait with `WAIT`."""
        (self.home / "go").touch()


# For a command that waits for the check. It gives up in the end, so that no check leaves one.
WAIT = "for n in $(seq 3000); do [ -e go ] && break; sleep 0.02; done"
SLEEP = "echo $$ > pid; exec sleep 1000"


def eventually(what: str, condition, limit: float = 20.0):
    """Polls until `condition()` is true and returns its value."""
    deadline = time.monotonic() + limit
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def gone(*pids: int) -> None:
    eventually(f"the end of {pids}", lambda: not any(map(alive, pids)), 10)


def raises(kind, call, *args, says: str = "", **words):
    """The error of a call that must raise it."""
    try:
        result = call(*args, **words)
    except kind as error:
        assert says.lower() in str(error).lower(), f"no {says!r} in {error!r}"
        return error
    raise AssertionError(f"did not raise, but gave {result!r}")


def fetch(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body, without any SDK."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------- running


def give_up(name: str) -> None:
    """Ends a run that hangs: says where, and leaves no server behind."""
    print(f"FAIL {name}: not over after {PATIENCE_PER_CHECK} s", flush=True)
    faulthandler.dump_traceback(file=sys.stdout)
    for server in Server.running:
        server.process.kill()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os._exit(1)


def run_check(function, server: Server, flavour: str) -> None:
    server.point_the_sdk_here()
    at = Place(server, flavour, function.__name__.startswith("check_code_"))
    try:
        function(at)
    finally:
        server.point_the_sdk_here()
        at.leave()
        gc.collect()


def run_checks() -> int:
    """Runs the checks that the command line chooses; the exit status of the program."""
    choices = ({"host", "machine", "debug"}, {"sync", "async"})
    names = WORDS - choices[0] - choices[1]
    wanted = [
        (function, mode, flavour)
        for function, places in CHECKS
        for mode, flavour in places
        if all(not WORDS & choice or word in WORDS for word, choice in zip((mode, flavour), choices))
        if not names or any(name in function.__name__ for name in names)
    ]
    if os.geteuid() != 0 and any(mode == "host" for _, mode, _ in wanted):
        print("cannot run here: host mode needs root")
        return 77
    host, passed, failures = None, 0, []
    for function, mode, flavour in wanted:
        name = f"{function.__name__.removeprefix('check_')} ({mode}, {flavour})"
        guard = threading.Timer(PATIENCE_PER_CHECK, give_up, [name])
        guard.daemon = True
        guard.start()
        started = time.monotonic()
        try:
            if mode == "host":
                host = host or Server("host")
                run_check(function, host, flavour)
            else:
                server = Server(mode)
                try:
                    run_check(function, server, flavour)
                finally:
                    server.end()
        except Skipped as reason:
            print(f"SKIPPED {name}: {reason}", flush=True)
        except Exception:
            failures.append(name)
            print(f"FAIL {name}", flush=True)
            traceback.print_exc(limit=-8, file=sys.stdout)
        else:
            passed += 1
            print(f"ok   {name} ({time.monotonic() - started:.2f} s)", flush=True)
        guard.cancel()
    if host:
        try:
            host.end()
        except Exception as error:
            failures.append(f"the host ends well: {error}")
    for name in failures:
        print(f"failed: {name}")
    print(f"e2b-{VERSION}: {passed} passed, {len(failures)} failed")
    return 1 if failures or not passed else 0


def main() -> None:
    # httpcore closes a stream that nobody closed when it is collected. If that happens while its pool is locked, the
    # thread waits for itself. So streams are collected between checks.
    gc.disable()
    try:
        status = run_checks()
    finally:
        for server in Server.running:
            server.process.kill()
        shutil.rmtree(SCRATCH, ignore_errors=True)
    # Whatever a failed check left waiting in threads does not keep this program.
    sys.stdout.flush()
    os._exit(status)
