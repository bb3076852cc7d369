"""What the checks of the real client share: a client that is led to this machine, and a runner.

Importing this module starts the stand-in for the Jobs API and points `huggingface_hub` at it, by its
own settings; so it is imported before `huggingface_hub`. A program that imports it takes

    <sbx-server binary> <huggingface_hub version> [part of a check's name ...]

and ends with `sys.exit(main())`, where `main` calls `run_checks`.
"""

import atexit
import errno
import faulthandler
import hashlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from jobs_api import TOKEN, Hub, MachineJob, resolve_job_hosts

SERVER, VERSION, ONLY = sys.argv[1], sys.argv[2], sys.argv[3:]

# A check that hangs is a failed check.
PATIENCE_PER_CHECK = 180

SCRATCH = Path(tempfile.mkdtemp(prefix="sbx-client-"))
# Sandboxes pass through it to their homes.
SCRATCH.chmod(0o711)
HUB = Hub(SERVER, SCRATCH)


@atexit.register
def clean_up() -> None:
    HUB.close()
    shutil.rmtree(SCRATCH, ignore_errors=True)


# The client reads these when it is imported.
os.environ["HF_ENDPOINT"] = HUB.endpoint
os.environ["HF_HOME"] = str(SCRATCH / "hf-home")
os.environ["HF_TOKEN"] = TOKEN
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# A proxy for the outside world must not come between the client and this machine.
for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
    os.environ.pop(name, None)
    os.environ.pop(name.lower(), None)
if Hub.job_type is MachineJob:
    # Before the client makes its first connection.
    HUB.front()
else:
    resolve_job_hosts()

import huggingface_hub  # noqa: E402
from huggingface_hub.errors import SandboxCommandError, SandboxError  # noqa: E402

assert huggingface_hub.__version__ == VERSION, huggingface_hub.__version__
# From 1.32 on: processes are killed by id, listings are paged, ranged writes truncate, redirects
# are not followed, the connection is closed after each command, and sandboxes have tokens of their
# own.
NEW = tuple(int(part) for part in VERSION.split(".")[:2]) >= (1, 32)

MIB = 1024 * 1024
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def check_in_new_clients(function):
    """For what the old client does not have."""
    return check(function) if NEW else function


def eventually(what: str, condition, limit: float = 20.0):
    """Polls until `condition()` is true and returns its value."""
    deadline = time.monotonic() + limit
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def refused(call, status: int) -> SandboxError:
    """The error of a call that the server must refuse with `status`."""
    try:
        result = call()
    except SandboxError as error:
        assert error.status_code == status, f"status {error.status_code}, not {status}: {error}"
        assert str(error).startswith(f"Sandbox API error ({status}): "), error
        assert "{" not in str(error), f"raw JSON, so the client found no `error`: {error}"
        return error
    raise AssertionError(f"not refused: {result!r}")


def failed(call) -> SandboxCommandError:
    """The error of a command that must fail."""
    try:
        result = call()
    except SandboxCommandError as error:
        return error
    raise AssertionError(f"did not raise: {result!r}")


def digest_of_file(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def closed_by_the_client(error, ended_by_jobs: int) -> bool:
    """Whether the client has closed a connection of its own that another of its threads was using.

    httpcore does that to a connection that has been idle for its five seconds just when a thread takes it. The thread
    finds its descriptor closed, or another connection behind it, and what it reads there can look like an end. It is no
    such end if no server has ended a connection since the proxy in front had counted `ended_by_jobs` of them.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            return True
        if str(error).startswith("Server disconnected without sending a response"):
            return HUB.is_fronted and HUB.front().ended_by_jobs == ended_by_jobs
        error = error.__cause__ or error.__context__
    return False


def give_up(name: str) -> None:
    """Ends a run that hangs: says where, and leaves no server behind."""
    print(f"FAIL {name}: not over after {PATIENCE_PER_CHECK} s", flush=True)
    faulthandler.dump_traceback(file=sys.stdout)
    HUB.kill_jobs()
    os._exit(1)


def whoever_closes(name: str, act):
    """Does something, once more if the client's own library closed a connection under it."""
    ended_by_jobs = HUB.front().ended_by_jobs if HUB.is_fronted else 0
    try:
        return act()
    except Exception as error:
        if not closed_by_the_client(error, ended_by_jobs):
            raise
        print(f"note {name}: httpcore closed a connection that it was using; once more", flush=True)
        return act()


def run_checks(place, finish) -> int:
    """Runs each check with what `place(name)` gives: where it works, and how that is cleaned up.

    At the end `finish()` ends the machines, and every one of them must have ended well. The result
    is the exit status of the program.
    """
    failures, passed = [], 0
    for function in CHECKS:
        name = function.__name__.removeprefix("check_")
        if ONLY and not any(word in name for word in ONLY):
            continue
        guard = threading.Timer(PATIENCE_PER_CHECK, give_up, [name])
        guard.daemon = True
        guard.start()
        started = time.monotonic()
        at, leave = whoever_closes(name, lambda: place(name))
        try:
            whoever_closes(name, lambda: function(at))
        except Exception:
            failures.append(name)
            print(f"FAIL {name}", flush=True)
            traceback.print_exc(limit=-8, file=sys.stdout)
            for job in HUB.jobs.values():
                print(f"The last that job {job.id} said:\n{''.join(job.log[-20:])}", flush=True)
        else:
            passed += 1
            print(f"ok   {name} ({time.monotonic() - started:.2f} s)", flush=True)
        leave()
        guard.cancel()
    finish()
    for job in HUB.jobs.values():
        status = job.process.wait(timeout=60)
        if (job.ends_well and status != 0) or "panicked" in job.whole_log():
            failures.append(f"the server of job {job.id} ends with status 0")
            print(f"FAIL the server ended with status {status}:\n{''.join(job.log[-40:])}")
    for name in failures:
        print(f"failed: {name}")
    print(f"huggingface_hub {VERSION}: {passed} checks passed, {len(failures)} failed")
    return 1 if failures or not passed else 0
