"""The whole path of the unmodified `huggingface_hub` client: from `Sandbox.create` to a job and back.

    python jobs_client.py <sbx-server binary> <huggingface_hub version> [part of a check's name ...]

Each job is a machine of its own that runs the client's own bootstrap command; between the client and
the server are the download, its digest and the proxy with its bearer token. Nothing of the client is
replaced but one constant: the digest of the server that it wants. (Clients before 1.32 want none.)

What commands, files and processes do in detail is `real_client.py` and `pool_client.py`, without a
machine around them. Needs root and namespaces; where there are none it says so, with status 77.
"""

import base64
import json
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from jobs_api import use_machines

use_machines()

from checks import (  # noqa: E402
    HUB,
    MIB,
    NEW,
    SCRATCH,
    SERVER,
    check,
    check_in_new_clients,
    digest_of_file,
    eventually,
    noise,
    run_checks,
)

os.environ["HF_HUB_DISABLE_UPDATE_CHECK"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# For this process, and for those that it starts.
PIN = f"""
import huggingface_hub._sandbox
huggingface_hub._sandbox.SANDBOX_SERVER_SHA256 = {digest_of_file(SERVER)!r}
"""
exec(PIN)

from huggingface_hub import HfApi, Sandbox, SandboxPool  # noqa: E402
from huggingface_hub.errors import SandboxError  # noqa: E402


class Place:
    """Where a check works: a directory of the client's, and what is to be ended after it."""

    def __init__(self, name: str) -> None:
        self.directory = SCRATCH / name[:60]
        self.directory.mkdir()
        self._opened = []

    def sandbox(self, **options) -> Sandbox:
        sbx = Sandbox.create(**options)
        self._opened.append(sbx.kill)
        return sbx

    def pool(self, **options) -> SandboxPool:
        pool = SandboxPool(**options)
        self._opened.append(pool.close)
        return pool

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def leave(self) -> None:
        for close in reversed(self._opened):
            close()
        shutil.rmtree(self.directory, ignore_errors=True)


def in_another_process(code: str, **environment: str) -> str:
    """What a program prints that uses the same client, on another machine so to say."""
    result = subprocess.run(
        [sys.executable, "-c", PIN + "from huggingface_hub import Sandbox, SandboxPool\n" + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def hf(*words: str, code: int = 0) -> str:
    """What `hf sandbox ...` prints, as a program of its own that ends with this status."""
    start = PIN + "import sys; sys.argv[0] = 'hf'\nfrom huggingface_hub.cli.hf import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", start, "sandbox", *words],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == code, (words, result.returncode, result.stdout, result.stderr)
    return result.stdout


def hosts_of(pool: SandboxPool) -> list:
    """The jobs that are hosts of the pool, the oldest first, as the Hub knows them."""
    return [
        job
        for job in HUB.jobs.values()
        if job.spec["labels"].get("hf-sandbox-pool") == pool.name and job.stage() == "RUNNING"
    ]


def count_on(sbx: Sandbox) -> int:
    """How many sandboxes its host has."""
    return len(sbx._server.request("GET", "/v1/sandboxes").json())


def error_of(call) -> Exception:
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"no error: {result!r}")


# ---------------------------------------------------------------------------------- dedicated


@check
def check_a_dedicated_sandbox_from_create_to_kill(at: Place):
    sbx = at.sandbox(env={"FROM_ENV": "one two"}, secrets={"FROM_SECRETS": "three"})
    job = HUB.jobs[sbx.id]
    assert job.spec["command"][:2] == ["/bin/sh", "-c"], job.spec["command"]
    # It is a job: the server is process 1, and root of 65536 users.
    assert sbx.run("cat /proc/1/comm; id -u").stdout == ".sbx-server\n0\n"
    assert sbx.run("cat /proc/self/uid_map").stdout.split()[2] == "65536"
    assert sbx.run("echo $FROM_ENV $FROM_SECRETS; env | grep -c SBX_", check=False).stdout == (
        "one two three\n0\n"
    )
    result = sbx.run("echo out; echo err >&2; exit 3", check=False)
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)

    # A line is here while the command still waits for what follows from it.
    seen = []

    def answer(text: str) -> None:
        seen.append(text)
        if text == "ready\n":
            sbx.files.write("/tmp/go", b"")

    live = "echo ready; until [ -e /tmp/go ]; do sleep 0.01; done; echo done"
    sbx.run(live, on_stdout=answer, timeout=20)
    assert seen == ["ready\n", "done\n"], seen

    data = noise(5 * MIB + 17)
    Path(at.path("here")).write_bytes(data)
    sbx.files.upload(at.path("here"), "/root/there")
    sbx.files.download("/root/there", at.path("back"))
    assert Path(at.path("back")).read_bytes() == data
    assert [entry.name for entry in sbx.files.list("/root")] == ["there"]

    process = sbx.run("echo started; exec sleep 1000", background=True)
    again = Sandbox.connect(sbx.id)
    (listed,) = (entry for entry in again.processes() if entry.running)
    assert listed.pid == process.pid
    listed.kill()
    assert not any(entry.running for entry in again.processes())
    again.close()

    told = in_another_process(
        f"sbx = Sandbox.connect({sbx.id!r}); print(sbx.run('cat /proc/1/comm').stdout, end='')"
    )
    assert told == ".sbx-server\n"

    sbx.kill()
    assert job.process.wait(timeout=20) == 0
    assert HfApi().inspect_job(job_id=sbx.id).status.stage == "CANCELED"
    assert "is not running" in str(error_of(lambda: Sandbox.connect(sbx.id)))


@check
def check_two_machines_have_nothing_in_common(at: Place):
    one, other = at.sandbox(), at.sandbox()
    one.run("echo mine > /tmp/file; sleep 1000 & ")
    assert not other.files.exists("/tmp/file")
    assert other.run("cat /proc/[0-9]*/comm").stdout.count("sleep") == 0
    # The same port, and another server: each knows its own token only.
    ask = urllib.request.Request(
        other.proxy_url_for(1).partition("/proxy/")[0] + "/processes", headers=one.proxy_headers
    )
    assert error_of(lambda: urllib.request.urlopen(ask, timeout=30)).code == 403


@check
def check_the_proxy_lets_only_the_owner_of_the_job_in(at: Place):
    sbx = at.sandbox()
    for headers in ({}, {"Authorization": "Bearer hf_somebodyelse"}):
        headers["X-Sandbox-Token"] = sbx.proxy_headers["X-Sandbox-Token"]
        ask = urllib.request.Request(sbx._server.base_url + "/health", headers=headers)
        refusal = error_of(lambda: urllib.request.urlopen(ask, timeout=30))  # noqa: B023
        assert refusal.code == 401, headers
    ask = urllib.request.Request(sbx._server.base_url + "/health", headers=sbx.proxy_headers)
    assert json.load(urllib.request.urlopen(ask, timeout=30))["mode"] == "dedicated"


@check
def check_a_server_that_does_not_start_is_seen_by_who_created_it(at: Place):
    before = set(HUB.jobs)
    error = error_of(lambda: at.sandbox(env={"SBX_LOG": "loud\nand\x1b[2Jclear"}))
    assert isinstance(error, SandboxError) and "terminated during startup" in str(error), error
    assert "SBX_LOG" in str(error) and "loud" in str(error), error
    assert "\x1b" not in str(error), repr(error)
    (job,) = (HUB.jobs[name] for name in set(HUB.jobs) - before)
    job.ends_well = False
    assert job.process.wait(timeout=20) == 2 and job.stage() == "ERROR", job.stage()
    assert list(HfApi().fetch_job_logs(job_id=job.id))[-1] in str(error)


@check_in_new_clients
def check_another_program_than_the_one_of_the_digest_is_not_run(at: Place):
    before, program = set(HUB.jobs), HUB.program
    HUB.program = b"#!/bin/sh\necho it ran\n"
    try:
        error = error_of(at.sandbox)
    finally:
        HUB.program = program
    assert "digest mismatch" in str(error) and "it ran" not in str(error), error
    for name in set(HUB.jobs) - before:
        HUB.jobs[name].ends_well = False


@check
def check_an_idle_sandbox_ends_by_itself(at: Place):
    sbx = at.sandbox(idle_timeout=1)
    # As long as a command runs it is not idle.
    sbx.run("sleep 1.5")
    assert sbx.run("echo here").stdout == "here\n"
    job = HUB.jobs[sbx.id]
    assert job.process.wait(timeout=30) == 0 and job.stage() == "COMPLETED"
    error_of(lambda: sbx.run("echo"))


# ---------------------------------------------------------------------------------- the port proxy

# Speaks just enough of RFC 6455 to be one side of a conversation: whole messages of one frame each.
ECHO = r"""
import base64, hashlib, os, socket, sys
where = sys.argv[1]
if where.isdigit():
    listener = socket.create_server(("127.0.0.1", int(where)))
else:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(os.environ["SBX_PROXY_DIR"], where))
    listener.listen()
while True:
    connection, _ = listener.accept()
    reader = connection.makefile("rb")
    lines = []
    while (line := reader.readline().strip()):
        lines.append(line.decode())
    headers = dict(line.split(": ", 1) for line in lines[1:])
    headers = {name.lower(): value for name, value in headers.items()}
    if "upgrade" not in headers:
        body = repr((lines[0], sorted(headers))).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        connection.close()
        continue
    key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest())
    connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                       b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while (head := reader.read(2)) and head[0] == 0x82:
        size = head[1] & 0x7f
        if size > 125:
            size = int.from_bytes(reader.read(2 if size == 126 else 8), "big")
        # The mask is zero.
        data = b"echo: " + reader.read(4 + size)[4:]
        connection.sendall(b"\x82\x7f" + len(data).to_bytes(8, "big") + data)
    connection.close()
"""


class WebSocket:
    """A WebSocket over TLS, from the URL and the headers that the client gives out."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        address = urlsplit(url)
        assert address.scheme == "wss", url
        plain = socket.create_connection((address.hostname, address.port), timeout=30)
        context = ssl.create_default_context()
        self._connection = context.wrap_socket(plain, server_hostname=address.hostname)
        key = base64.b64encode(noise(16)).decode()
        lines = [f"GET {address.path} HTTP/1.1", f"Host: {address.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Connection: Upgrade", "Upgrade: websocket"]
        lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", ""]
        self._connection.sendall("\r\n".join(lines).encode())
        self._reader = self._connection.makefile("rb")
        status = self._reader.readline()
        assert status.startswith(b"HTTP/1.1 101 "), status
        while self._reader.readline() != b"\r\n":
            pass

    def send(self, data: bytes) -> None:
        # In the longest form, with a mask that changes nothing.
        self._connection.sendall(b"\x82\xff" + len(data).to_bytes(8, "big") + bytes(4) + data)

    def receive(self) -> bytes:
        head = self._reader.read(10)
        assert head[:2] == b"\x82\x7f", head
        return self._reader.read(int.from_bytes(head[2:], "big"))

    def close(self) -> None:
        self._connection.close()


def talk_to_a_server_inside(sbx: Sandbox, where: str) -> None:
    """`where` it listens: a port, or the name of a socket."""
    server = sbx.run(["/usr/bin/python3", "-c", ECHO, where], background=True)
    port = where.removesuffix(".sock")
    url = sbx.proxy_url_for(port, "/a%2Fb?c=d")
    ask = urllib.request.Request(url, headers=sbx.proxy_headers)

    def answer() -> str | None:
        try:
            return urllib.request.urlopen(ask, timeout=30).read().decode()
        except urllib.error.HTTPError as error:
            assert error.code == 502, error
            return None

    told = eventually("the server inside answers", answer)
    assert "'GET /a%2Fb?c=d HTTP/1.1'" in told, told
    assert "authorization" not in told and "x-sandbox-token" not in told, told
    talk = WebSocket(sbx.proxy_url_for(port, "/ws", scheme="wss://"), sbx.proxy_headers)
    small = [b"%d" % number for number in range(50)]
    for data in [b"one", b"two", noise(MIB), noise(3 * MIB), *small]:
        talk.send(data)
        assert talk.receive() == b"echo: " + data, len(data)
    talk.close()
    server.kill()


@check
def check_a_server_in_a_dedicated_sandbox_is_reached(at: Place):
    talk_to_a_server_inside(at.sandbox(), "8000")


@check
def check_a_server_in_a_pooled_sandbox_is_reached(at: Place):
    talk_to_a_server_inside(at.pool().create(), "8000.sock")


@check
def check_a_client_that_writes_while_it_reads_is_answered(at: Place):
    sbx = at.sandbox()
    address = urlsplit(sbx._server.base_url)
    context = ssl.create_default_context()
    lines = ["GET /health HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in sbx.proxy_headers.items()]
    request = "\r\n".join([*lines, "", ""]).encode()

    def is_answered(_) -> bool:
        plain = socket.create_connection((address.hostname, address.port), timeout=30)
        with context.wrap_socket(plain, server_hostname=address.hostname) as connection:
            connection.settimeout(None)
            answer = []
            reader = threading.Thread(target=lambda: answer.append(connection.recv(65536)))
            reader.start()
            # A session ticket would end this; the reader would handle it during the write.
            select.select([connection], [], [], 0.02)
            connection.sendall(request)
            reader.join(timeout=20)
            if reader.is_alive():
                connection.shutdown(socket.SHUT_RDWR)
                reader.join()
            return bool(answer) and answer[0].startswith(b"HTTP/1.1 200 ")

    with ThreadPoolExecutor(12) as threads:
        answered = list(threads.map(is_answered, range(400)))
    assert all(answered), f"{answered.count(False)} of {len(answered)} requests were lost"


# ---------------------------------------------------------------------------------- pools


@check
def check_a_pool_grows_when_its_hosts_are_full_and_never_packs_more(at: Place):
    pool = at.pool(sandboxes_per_host=3)
    assert pool.num_hosts == 1
    # One after another: a host is filled before the next one is started.
    boxes = [pool.create() for _ in range(4)]
    first, second = pool.host_ids
    assert [sbx.host_id for sbx in boxes] == [first] * 3 + [second]
    # All at once.
    with ThreadPoolExecutor(6) as threads:
        boxes += threads.map(lambda _: pool.create(), range(6))
    assert pool.num_hosts == 4 and pool.num_sandboxes == 10, pool.host_ids
    counts = [sum(sbx.host_id == host for sbx in boxes) for host in pool.host_ids]
    assert sorted(counts) == [1, 3, 3, 3], counts
    asked = {sbx.host_id: count_on(sbx) for sbx in boxes}
    assert [asked[host] for host in pool.host_ids] == counts, asked
    with ThreadPoolExecutor(5) as threads:
        homes = set(threads.map(lambda sbx: sbx.run("echo $HOME@$(id -u)").stdout, boxes))
        assert len({home.split("@")[0] for home in homes}) == 10, homes
        # A place that is free again is used again.
        list(threads.map(lambda sbx: sbx.kill(), boxes[:3]))
    assert pool.create().host_id == first and pool.num_hosts == 4
    jobs = hosts_of(pool)
    pool.close()
    for job in jobs:
        assert job.process.wait(timeout=20) == 0 and job.stage() == "CANCELED"


@check
def check_another_process_adopts_the_hosts_of_a_pool(at: Place):
    pool = at.pool(name="shared", sandboxes_per_host=2)
    mine = pool.create()
    # Another home, so another cache: it finds the host by its labels.
    there = f"""
pool = SandboxPool(name="shared", sandboxes_per_host=2)
sbx = pool.create(env={{"WHOSE": "theirs"}})
assert pool.host_ids == [{mine.host_id!r}], pool.host_ids
# The old client ends all hosts that it knows.
if {NEW}: pool.close()
print(sbx.id)
"""
    theirs = in_another_process(there, HF_HOME=at.path("elsewhere")).strip()
    # The host is not the other's, and goes on.
    assert count_on(mine) == 2
    sbx = Sandbox.connect(theirs)
    assert sbx.run("echo $WHOSE").stdout == "theirs\n"
    # The first process counts one sandbox there; the host says that it is full.
    next_one = pool.create()
    assert next_one.host_id != mine.host_id and pool.num_hosts == 2
    assert count_on(mine) == 2 and count_on(next_one) == 1
    sbx.kill()
    sbx.close()
    assert "no longer exists" in str(error_of(lambda: Sandbox.connect(theirs)))
    assert count_on(mine) == 1


@check
def check_an_idle_host_ends_by_itself(at: Place):
    pool = at.pool(idle_timeout=1)
    (job,) = hosts_of(pool)
    sbx = pool.create()
    time.sleep(1.5)
    assert sbx.run("echo here").stdout == "here\n", "a host with a sandbox is not idle"
    sbx.kill()
    assert job.process.wait(timeout=30) == 0 and job.stage() == "COMPLETED"


@check
def check_a_pool_goes_on_after_a_host_crashed(at: Place):
    pool = at.pool(name="crashing", sandboxes_per_host=2)
    one = pool.create()
    (job,) = hosts_of(pool)
    job.ends_well = False
    broken = []
    started = threading.Event()
    running = threading.Thread(
        target=lambda: broken.append(
            error_of(lambda: one.run("echo up; sleep 1000", on_stdout=lambda _: started.set()))
        )
    )
    running.start()
    assert started.wait(20)
    job.signal(signal.SIGKILL)
    # The command's stream breaks at once, and says so.
    running.join(timeout=20)
    assert broken and not running.is_alive(), "the client still waits"
    job.process.wait(timeout=20)
    assert job.stage() == "ERROR"
    # What this handle has verified it does not give up by itself; it says what is wrong.
    assert isinstance(error_of(lambda: pool.create()), SandboxError)
    assert "is not running" in str(error_of(lambda: Sandbox.connect(one.id)))
    # The pool is more than its handle. The next one knows the dead host from its cache only.
    fresh = at.pool(name="crashing", sandboxes_per_host=2)
    sbx = fresh.create()
    assert sbx.host_id != one.host_id and sbx.run("echo works").stdout == "works\n"


# ---------------------------------------------------------------------------------- command line


def word(output: str, name: str) -> str:
    """A value of what `hf` printed."""
    match = re.search(rf"\b{name}(?:=|: +)(\S+)", output)
    assert match, (name, output)
    return match.group(1)


@check
def check_the_command_line_client_uses_a_dedicated_sandbox(at: Place):
    name = word(hf("create", "--idle-timeout", "5m", "--env", "A=b"), "id")
    said = hf("exec", "-w", "/tmp", "--env", "C=d", name, "--", "sh", "-c", "echo $A $C; pwd")
    assert said == "b d\n/tmp\n"
    hf("exec", name, "--", "sh", "-c", "exit 7", code=7)
    hf("exec", "--timeout", "0.2", name, "--", "sleep", "1000", code=124)
    pid = word(hf("spawn", name, "--", "sleep", "1000"), "pid")
    listed = hf("process", "ls", name)
    assert pid in listed and "running" in listed and "sleep 1000" in listed, listed
    hf("process", "kill", name, pid)
    assert "running" not in hf("process", "ls", name)
    Path(at.path("here")).write_bytes(noise(100_000))
    hf("cp", at.path("here"), f"{name}:/tmp/there")
    hf("cp", f"{name}:/tmp/there", at.path("back"))
    assert Path(at.path("back")).read_bytes() == noise(100_000)
    hf("kill", name)
    job = HUB.jobs[name]
    assert job.process.wait(timeout=20) == 0 and job.stage() == "CANCELED"
    hf("exec", name, "--", "true", code=1)


@check
def check_the_command_line_client_uses_a_pool(at: Place):
    created = hf("pool", "create", "--per-host", "2")
    pool = word(created, "id")
    assert pool in hf("pool", "ls")
    name = word(hf("create", "--pool", pool), "id")
    assert name.split(".")[0] == word(created, "host")
    # Its paths are of the home, which is where its commands are.
    assert hf("exec", name, "--", "sh", "-c", "[ $PWD = $HOME ]; id -u") >= "20000"
    Path(at.path("here")).write_bytes(noise(100_000))
    hf("cp", at.path("here"), f"{name}:/there")
    assert hf("exec", name, "--", "sh", "-c", "wc -c < ~/there").strip() == "100000"
    hf("kill", name)
    hf("exec", name, "--", "true", code=1)
    hf("pool", "delete", "--yes", pool)
    job = HUB.jobs[word(created, "host")]
    assert job.process.wait(timeout=20) == 0


def place(name: str):
    at = Place(name)
    return at, at.leave


def main() -> int:
    def finish() -> None:
        # What a check has left that failed.
        for job in HUB.jobs.values():
            job.cancel()

    return run_checks(place, finish)


if __name__ == "__main__":
    sys.exit(main())
