"""The unmodified `huggingface_hub` client packs sandboxes onto real servers in host mode.

    python pool_client.py <sbx-server binary> <huggingface_hub version> [part of a check's name ...]

As `real_client.py` does it for dedicated sandboxes, for `SandboxPool` and what it gives out. Needs
root, as host mode does.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checks
from checks import (
    HUB,
    MIB,
    NEW,
    SCRATCH,
    alive,
    check,
    check_in_new_clients,
    eventually,
    failed,
    noise,
    refused,
    run_checks,
)

# Before the client makes its first connection.
HUB.front()

from huggingface_hub import Sandbox, SandboxPool  # noqa: E402
from huggingface_hub.errors import SandboxError  # noqa: E402

# From 2.1 on sandboxes always have a token of their own.
SCOPED = tuple(int(part) for part in checks.VERSION.split(".")[:2]) >= (2, 1)


class Place:
    """Where a check works: the pool that all share, and a sandbox of its own on its first host."""

    def __init__(self, pool: SandboxPool, sbx: Sandbox, directory: Path) -> None:
        self.pool, self.sbx, self.directory = pool, sbx, directory
        self.directory.mkdir()

    def path(self, name: str) -> str:
        """A file on the client's side."""
        return str(self.directory / name)


def job_of(sbx: Sandbox):
    return HUB.jobs[sbx.host_id]


def home_of(sbx: Sandbox) -> Path:
    """Where it is on the machine, which is also the client's here."""
    return job_of(sbx).homes / sbx.id.split(".", 1)[1]


# ---------------------------------------------------------------------------------- pools


@check
def check_a_host_is_started_as_the_contract_says(at: Place):
    job = job_of(at.sbx)
    environment = job.spec["environment"]
    assert environment["SBX_HOST_MODE"] == "1" and environment["SBX_CAPACITY"] == "20", environment
    assert at.sbx.id == f"{job.id}.{home_of(at.sbx).name}"
    assert at.pool.num_hosts == 1 and at.pool.host_ids == [job.id]


@check
def check_several_sandboxes_are_apart(at: Place):
    one, other = at.sbx, at.pool.create()
    third = at.pool.create()
    uids = {sbx.run("id -u").stdout for sbx in (one, other, third)}
    assert len(uids) == 3 and all(int(uid) >= 20_000 for uid in uids), uids
    one.run("echo mine > file; chmod 644 file")
    assert not other.files.exists("file") and not third.files.exists("/file")
    home = one.run("pwd").stdout.strip()
    assert home == str(home_of(one)), home
    for command in (f"cat {home}/file", f"ls {home}", f"echo > {home}/other"):
        assert other.run(command, check=False).exit_code != 0, command
    process = one.run(["sleep", "1000"], background=True)
    assert process.pid in [entry.pid for entry in one.processes()]
    assert process.pid not in [entry.pid for entry in other.processes()]
    assert other.run(f"kill -9 {process.pid}", check=False).exit_code != 0
    assert other.run(f"cat /proc/{process.pid}/environ", check=False).exit_code != 0
    assert alive(process.pid)
    process.kill()
    other.kill()
    third.kill()


@check
def check_the_environment_of_a_sandbox(at: Place):
    values = {"TEXT": "x y=z ☃", "INT": 7, "FLOAT": 1.5, "TRUE": True, "EMPTY": ""}
    sbx = at.pool.create(env=values, forward_hf_token=True)
    shown = "|".join(f"${{{name}-unset}}" for name in values)
    assert sbx.run(f'printf %s "{shown}"').stdout == "x y=z ☃|7|1.5|true|"
    assert sbx.run("echo $INT", env={"INT": 8}).stdout == "8\n"
    output = sbx.run("env").stdout
    home = home_of(sbx)
    for line in (
        f"HF_TOKEN={os.environ['HF_TOKEN']}",
        f"HOME={home}",
        f"TMPDIR={home}/.tmp",
        f"SBX_PROXY_DIR={home}/.sbx/proxy",
        f"SBX_SANDBOX_ID={home.name}",
    ):
        assert line + "\n" in output, output
    assert sbx.run("echo $PATH").stdout.startswith(f"{home}/.local/bin:")
    for hidden in ("SBX_TOKEN", "SBX_HOST_MODE", "SBX_CAPACITY", "SBX_PORT"):
        assert hidden not in output, output
    assert job_of(sbx).spec["secrets"]["SBX_TOKEN"] not in output
    # The neighbour has nothing of it.
    assert at.sbx.run("echo $TEXT$HF_TOKEN").stdout == "\n"
    sbx.kill()


@check
def check_a_full_host_is_followed_by_another(at: Place):
    with SandboxPool(sandboxes_per_host=3) as pool:
        assert pool.num_hosts == 1
        with ThreadPoolExecutor(8) as threads:
            sandboxes = list(threads.map(lambda _: pool.create(), range(7)))
        hosts = [sbx.host_id for sbx in sandboxes]
        assert pool.num_hosts == 3 and len(set(hosts)) == 3, hosts
        assert all(hosts.count(host) <= 3 for host in hosts), hosts
        # The server itself says no, to whoever asks: another process does not know this one's count.
        host = next(host for host in hosts if hosts.count(host) == 3)
        (server,) = [server for server in pool._hosts if server.job_id == host]
        answer = server.request("POST", "/v1/sandboxes", json={"count": 1}).json()
        assert answer["rejected"] == 1 and answer["sandboxes"] == [], answer
        numbers = [sbx.run(f"echo number {n}").stdout for n, sbx in enumerate(sandboxes)]
        assert numbers == [f"number {n}\n" for n in range(7)], numbers
        # A place that became free is used again.
        gone = sandboxes[hosts.index(host)]
        gone.kill()
        assert pool.create().host_id == host and pool.num_hosts == 3
    for host in set(hosts):
        assert HUB.jobs[host].process.wait(timeout=60) == 0, HUB.jobs[host].log


@check
def check_a_cap_on_hosts_is_kept(at: Place):
    with SandboxPool(sandboxes_per_host=1, max_hosts=1) as pool:
        pool.create()
        try:
            pool.create()
        except SandboxError as error:
            assert "max_hosts" in str(error), error
        else:
            raise AssertionError("more than one host")


@check
def check_another_handle_finds_the_pool_and_its_sandboxes(at: Place):
    other = SandboxPool.connect(at.pool.name)
    sbx = other.create()
    assert sbx.host_id == at.sbx.host_id, "the warm host is used"
    sbx.run("echo kept > file")
    again = Sandbox.connect(sbx.id)
    assert again.files.read_text("file") == "kept\n"
    assert again.run("cat file").stdout == "kept\n"
    if SCOPED:
        assert again.proxy_headers["X-Sandbox-Token"] == sbx.proxy_headers["X-Sandbox-Token"]
    again.close()
    other.close()
    assert sbx.id in [f"{sbx.host_id}.{home.name}" for home in job_of(at.sbx).homes.iterdir()]
    Sandbox.kill(sbx.id)
    try:
        Sandbox.connect(sbx.id)
    except SandboxError as error:
        assert "no longer exists" in str(error), error
    else:
        raise AssertionError("connected to a sandbox that is gone")


@check
def check_another_process_adopts_the_host(at: Place):
    # It shares nothing with this one but the Hub: not even the cache of pools.
    script = """
import sys
import urllib.error
import urllib.request
sys.path.insert(0, sys.argv[3])
from jobs_api import resolve_job_hosts
resolve_job_hosts()
from huggingface_hub import Sandbox, SandboxPool
sbx = Sandbox.connect(sys.argv[1])
sbx.run("echo from another process > greeting")
pool = SandboxPool.connect(sys.argv[2])
print(pool.create().id)
"""
    environment = {**os.environ, "HF_HOME": at.path("hf-home"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", script, at.sbx.id, at.pool.name, str(Path(__file__).parent)]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert at.sbx.files.read_text("greeting") == "from another process\n"
    made = result.stdout.strip()
    assert made.split(".")[0] == at.sbx.host_id, made
    Sandbox.kill(made)


@check_in_new_clients
def check_a_sandbox_token_opens_its_sandbox_only(at: Place):
    other = at.pool.create()
    token = at.sbx.proxy_headers["X-Sandbox-Token"]
    server = at.sbx._server
    own, foreign = (f"/v1/sandboxes/{sbx.id.split('.')[1]}" for sbx in (at.sbx, other))
    assert server.request("GET", f"{own}/processes", sandbox_token=token).json() == []
    for method, route in (
        ("GET", f"{foreign}/processes"),
        ("DELETE", foreign),
        ("GET", f"{foreign}/token"),
        ("GET", "/v1/sandboxes"),
        ("POST", "/v1/sandboxes"),
    ):
        refused(lambda: server.request(method, route, sandbox_token=token), 403)  # noqa: B023
    assert other.run("echo unharmed").stdout == "unharmed\n"
    other.kill()


# ---------------------------------------------------------------------------------- ports

# Answers on a socket in the sandbox with what it was asked.
PROXIED = """
import os, socket
os.chdir(os.environ["SBX_PROXY_DIR"])
listener = socket.socket(socket.AF_UNIX)
listener.bind("app.sock")
listener.listen()
while True:
    connection, _ = listener.accept()
    data = b""
    while b"\\r\\n\\r\\n" not in data and (piece := connection.recv(65536)):
        data += piece
    if not data:
        continue  # somebody who only looked whether anybody listens
    head = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(data)
    connection.sendall(head + data)
    connection.close()
"""


@check
def check_a_server_inside_is_reached_through_the_proxy(at: Place):
    process = at.sbx.run(["python3", "-c", PROXIED], background=True)
    url = at.sbx.proxy_url_for("app", "/a%2Fb//c?d=e")
    wait = url.partition("/proxy/")[0] + "/ports/app/wait?timeout=20"

    def get(url: str, headers: dict) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.read()

    assert json.loads(get(wait, at.sbx.proxy_headers)) == {"port": "app", "listening": True}
    seen = get(url, at.sbx.proxy_headers)
    assert seen.startswith(b"GET /a%2Fb//c?d=e HTTP/1.1\r\n"), seen
    for name, secret in at.sbx.proxy_headers.items():
        assert secret.encode() not in seen, f"{name} reached the server: {seen}"
    # A neighbour's headers do not open it, where clients know tokens of sandboxes.
    neighbour = at.pool.create()
    if neighbour.proxy_headers != at.sbx.proxy_headers:
        try:
            get(url, neighbour.proxy_headers)
        except urllib.error.HTTPError as error:
            assert error.code == 403, error
        else:
            raise AssertionError("let in with another sandbox's token")
    neighbour.kill()
    process.kill()


# ---------------------------------------------------------------------------------- commands


@check
def check_commands_run_in_the_home(at: Place):
    sbx = at.sbx
    assert sbx.run("pwd; echo ~").stdout == f"{home_of(sbx)}\n" * 2
    assert sbx.run(["printf", "<%s>", "a b", "$HOME"]).stdout == "<a b><$HOME>"
    result = sbx.run("echo out; echo err >&2; exit 3", check=False)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n"), result
    sbx.files.mkdir("work")
    assert sbx.run("pwd", cwd="work").stdout == f"{home_of(sbx)}/work\n"
    assert sbx.run("cat", stdin="zwölf ☃").stdout == "zwölf ☃"
    error = failed(lambda: sbx.run("sleep 1000", timeout=1))
    assert error.result.timed_out is True
    refused(lambda: sbx.run(["no-such-program-at-all"]), 400)
    for number in range(30):
        assert sbx.run(f"echo {number}; head -c 65000 /dev/zero | tr '\\0' x").stdout == (
            f"{number}\n" + "x" * 65000
        )


@check
def check_many_commands_in_many_sandboxes_at_once(at: Place):
    sandboxes = [at.pool.create() for _ in range(8)]

    def work(number: int) -> str:
        sbx = sandboxes[number % len(sandboxes)]
        return sbx.run(f"echo {number} >> log; sleep 0.2; echo done {number}").stdout

    with ThreadPoolExecutor(32) as threads:
        outputs = list(threads.map(work, range(64)))
    assert outputs == [f"done {number}\n" for number in range(64)], outputs
    for number, sbx in enumerate(sandboxes):
        lines = sorted(map(int, sbx.files.read_text("log").split()))
        assert lines == list(range(number, 64, 8)), lines
        sbx.kill()


@check
def check_background_processes_are_listed_and_killed(at: Place):
    process = at.sbx.run("echo started > mark; exec sleep 1000", background=True)
    eventually("it has started", lambda: at.sbx.files.exists("mark"))
    (entry,) = at.sbx.processes()
    assert (entry.pid, entry.running) == (process.pid, True), entry
    process.kill()
    eventually("the process is gone", lambda: not alive(process.pid), 5)
    assert not any(entry.running for entry in at.sbx.processes())
    if NEW:
        assert process.kill() is False, "the second kill stopped nothing"
        # What it wrote can still be read, though the client has no call for it.
        logs = at.sbx.run("echo to the log; echo end", background=True)
        wanted = f"/processes/{logs.id}/logs?follow=1"
        lines = at.sbx._request("GET", wanted).text.splitlines()
        events = [json.loads(line) for line in lines]
        output = "".join(event["data"] for event in events if event["event"] == "stdout")
        assert output == "to the log\nend\n" and events[-1]["event"] == "exit", events


@check
def check_kill_ends_everything_in_the_sandbox_and_the_host_stays(at: Place):
    sbx = at.pool.create()
    before = at.pool.num_sandboxes
    pids = [sbx.run(["sleep", "1000"], background=True).pid for _ in range(3)]
    sbx.run("setsid sh -c 'trap \"\" TERM HUP; echo $$ > daemon; sleep 1000 & wait' > /dev/null 2>&1 &")
    daemon = int(eventually("the daemon runs", lambda: sbx.files.exists("daemon") and sbx.files.read_text("daemon").strip()))
    home = home_of(sbx)
    assert home.exists() and alive(daemon)
    sbx.kill()
    assert not home.exists() and not any(map(alive, [*pids, daemon]))
    assert at.pool.num_sandboxes == before - 1
    assert at.sbx.run("echo the host stays").stdout == "the host stays\n"
    sbx.kill()


@check
def check_an_idle_sandbox_is_evicted_but_never_under_a_command(at: Place):
    sbx = at.pool.create(idle_timeout=2)
    assert sbx.run("sleep 4; echo lived").stdout == "lived\n"
    sbx.run("sleep 4; echo lived > mark; sleep 0.3", background=True)
    mark, home = home_of(sbx) / "mark", home_of(sbx)
    eventually("the background process ends", mark.exists, 30)
    eventually("the idle sandbox is evicted", lambda: not home.exists(), 30)
    refused(lambda: sbx.run("echo hi"), 404)
    sbx.kill()
    assert at.sbx.run("echo others stay").stdout == "others stay\n"


@check
def check_an_empty_host_ends_by_itself(at: Place):
    # Long enough for a client on a busy machine to make the first sandbox.
    pool = SandboxPool(idle_timeout=8)
    sbx = pool.create()
    job = job_of(sbx)
    assert sbx.run("sleep 10; echo a sandbox keeps the host").stdout == "a sandbox keeps the host\n"
    assert job.stage() == "RUNNING"
    sbx.kill()
    eventually("the empty host ends", lambda: job.process.poll() is not None, 30)
    assert job.stage() == "COMPLETED", (job.stage(), job.log)
    pool.close()


# ---------------------------------------------------------------------------------- files


@check
def check_files_are_the_sandboxs_own(at: Place):
    files = at.sbx.files
    files.write("dir/script", "#!/bin/sh\necho ran\n", mode="755")
    assert at.sbx.run(["dir/script"]).stdout == "ran\n"
    assert at.sbx.run("rm dir/script && echo > dir/other && ls dir").stdout == "other\n"
    at.sbx.run("echo made inside > inside; chmod 600 inside")
    assert files.read_text("inside") == "made inside\n"
    assert files.read_text("/inside") == "made inside\n", "the home is the root"
    entries = {entry.name: entry.type for entry in files.list("/")}
    assert entries["dir"] == "dir" and entries["inside"] == "file", entries
    for entry in files.list("dir"):
        assert files.stat(entry.path) == entry, entry
    assert files.exists("dir") and not files.exists("missing")
    files.delete("dir", recursive=True)
    assert not files.exists("dir")
    refused(lambda: files.read("missing"), 404)
    refused(lambda: files.write("inside/below", "x"), 409)


@check
def check_files_of_every_size_go_up_and_down(at: Place):
    files = at.sbx.files
    for size in (0, 1, 100_000, 5 * MIB, 5 * MIB + 17, 9 * MIB + 1):
        data = noise(size, seed=size)
        Path(at.path("here")).write_bytes(data)
        files.upload(at.path("here"), "there", mode="640")
        assert at.sbx.run("wc -c < there").stdout.strip() == str(size)
        files.download("there", at.path("back"))
        assert Path(at.path("back")).read_bytes() == data, size
        assert files.read("there") == data, size
        # What is written in ranges must not keep the tail of something longer.
        files.delete("there")


@check
def check_many_files(at: Place):
    files = at.sbx.files
    names = [f"{number:04}&+%25 #☃" for number in range(300)]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda name: files.write(f"many/{name}", name), names))
        texts = list(threads.map(lambda name: files.read_text(f"many/{name}"), names))
    assert texts == names
    assert sorted(entry.name for entry in files.list("many")) == names
    assert at.sbx.run("ls many | wc -l").stdout.strip() == "300"


@check
def check_no_file_outside_the_home_is_reached(at: Place):
    files, sbx = at.sbx.files, at.sbx
    other = at.pool.create()
    other.files.write("secret", "the neighbour's")
    theirs = home_of(other)
    Path(at.path("outside")).write_text("the client's")
    sbx.run(f"ln -s {theirs} door; ln -s {theirs}/secret file; ln -s /etc etc; ln -s loop loop")
    for path in ("door/secret", "file", "etc/passwd", "loop"):
        for call in (
            lambda: files.read(path),  # noqa: B023
            lambda: files.write(path, "overwritten"),  # noqa: B023
            lambda: files.download(path, at.path("got")),  # noqa: B023
        ):
            try:
                call()
            except SandboxError as error:
                assert 400 <= error.status_code < 500, error
            else:
                raise AssertionError(f"{path} was reached")
    # `..` ends at the home, wherever it stands.
    depth = "../" * 20
    for path in (f"{depth}etc/passwd", f"door/{depth}etc/passwd", f"{theirs}/secret", "/etc/passwd"):
        try:
            assert files.read(path) != Path("/etc/passwd").read_bytes(), path
        except SandboxError as error:
            assert 400 <= error.status_code < 500, error
    files.delete("door")
    assert other.files.read_text("secret") == "the neighbour's", "a link is deleted, not its target"
    other.kill()


# ---------------------------------------------------------------------------------- command line


@check
def check_the_command_line_client_uses_pooled_sandboxes(at: Place):
    hf = Path(sys.executable).parent / "hf"
    # The same program, in an interpreter that finds the host names of jobs.
    start = f"""
import sys
import urllib.error
import urllib.request
sys.path.insert(0, {str(Path(__file__).parent)!r})
from jobs_api import resolve_job_hosts
resolve_job_hosts()
sys.argv = [{str(hf)!r}, *sys.argv[1:]]
from huggingface_hub.cli.hf import main
main()
"""

    def run(*words: str, code: int = 0) -> str:
        result = subprocess.run(
            [sys.executable, "-c", start, "sandbox", *words],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert result.returncode == code, (words, result.returncode, result.stdout, result.stderr)
        return result.stdout

    before = set(job_of(at.sbx).homes.iterdir())
    run("create", "--pool", at.pool.name)
    (home,) = set(job_of(at.sbx).homes.iterdir()) - before
    name = f"{at.sbx.host_id}.{home.name}"
    assert run("exec", name, "--", "sh", "-c", "echo $HOME") == f"{home}\n"
    run("exec", name, "--", "sh", "-c", "exit 7", code=7)
    Path(at.path("here")).write_bytes(noise(100_000))
    run("cp", at.path("here"), f"{name}:there")
    run("cp", f"{name}:there", at.path("back"))
    assert Path(at.path("back")).read_bytes() == noise(100_000)
    Sandbox.kill(name)
    assert not home.exists()


# ---------------------------------------------------------------------------------- running


def place(pool: SandboxPool, name: str):
    sbx = pool.create()
    at = Place(pool, sbx, SCRATCH / name[:60])
    return at, sbx.kill


def main() -> int:
    pool = SandboxPool(sandboxes_per_host=20)
    return run_checks(lambda name: place(pool, name), pool.close)


if __name__ == "__main__":
    sys.exit(main())
