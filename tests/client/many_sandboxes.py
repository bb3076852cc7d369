"""A thousand sandboxes over twenty hosts, with the unmodified `SandboxPool`: what each phase takes.

    python many_sandboxes.py <sbx-server binary> [sandboxes [hosts]]

The hosts are machines of their own (machines.py) on this one, behind the TLS proxy of jobs; Hub and
proxy are one process, the client is this one. Then the same requests are sent to the same servers
by a client that does nothing but send them, once through the proxy and once to the servers: what is
left of the time there is not the client's. Everything that was started ends with this program.
"""

import faulthandler
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import machines
from jobs_api import SERVER_PORT, TOKEN, use_machines
from phases import Clock, below, children, text_of

SERVER = sys.argv[1]
SANDBOXES = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
HOSTS = int(sys.argv[3]) if len(sys.argv) > 3 else 20
PER_HOST = -(-SANDBOXES // HOSTS)

# What users' programs do at once.
THREADS = 64

# Whatever hangs, this ends, and everything else with it.
PATIENCE = 900

# For this many sandboxes on this many hosts, on real jobs.
PUBLISHED = {(1000, 20): 15.8}


def with_the_client(clock: Clock, finish) -> None:
    """The three phases with `SandboxPool`, then `finish(pool)` with its hosts."""
    way = "SandboxPool"
    pool = clock.measure(
        way, "hosts", lambda: SandboxPool(sandboxes_per_host=PER_HOST, warm_up=HOSTS)
    )
    with pool, ThreadPoolExecutor(THREADS) as threads:

        def each(act, things) -> list:
            return list(threads.map(act, things))

        boxes = clock.measure(
            way, "create", lambda: each(lambda _: pool.create(), range(SANDBOXES))
        )
        assert pool.num_hosts == HOSTS and pool.num_sandboxes == SANDBOXES, pool.num_hosts
        said = clock.measure(
            way, "command", lambda: each(lambda sbx: sbx.run("echo $HOME").stdout, boxes)
        )
        assert all(text.endswith(sbx.id.split(".")[1] + "\n") for text, sbx in zip(said, boxes))
        clock.measure(way, "kill", lambda: each(lambda sbx: sbx.kill(), boxes))
        assert pool.num_sandboxes == 0
        finish(pool)


class Straight:
    """A client that does nothing but send requests, over one kept connection to one host."""

    def __init__(self, host, connection: http.client.HTTPConnection, count: int) -> None:
        self._token, self._connection = host._sandbox_token, connection
        self._count, self._ids = count, []

    def _ask(self, method: str, path: str, body: dict | None = None) -> bytes:
        headers = {"X-Sandbox-Token": self._token, "Authorization": f"Bearer {TOKEN}"}
        data = json.dumps(body) if body is not None else None
        self._connection.request(method, path, body=data, headers=headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return text

    def create(self) -> None:
        wish = {"count": 1, "idle_timeout_secs": 600}
        for _ in range(self._count):
            made = json.loads(self._ask("POST", "/v1/sandboxes", wish))["sandboxes"]
            self._ids.append(made[0]["id"])

    def command(self) -> None:
        for name in self._ids:
            said = self._ask("POST", f"/v1/sandboxes/{name}/exec", {"cmd": "echo $HOME"})
            assert f'{name}\\n"'.encode() in said, said

    def kill(self) -> None:
        for name in self._ids:
            self._ask("DELETE", f"/v1/sandboxes/{name}")


def through_the_proxy(host) -> http.client.HTTPConnection:
    address = urlsplit(host.base_url)
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(address.hostname, address.port, context=context)


def to_the_server(host, hub: int) -> http.client.HTTPConnection:
    # Who holds the machine has the name of its root, which is the job's, in its arguments.
    (runtime,) = (
        pid for pid in children(hub) if host.job_id in text_of(f"/proc/{pid}/cmdline")
    )
    connection = http.client.HTTPConnection("127.0.0.1", SERVER_PORT)
    with open(f"/proc/{runtime}/ns/net") as network:
        connection.sock = machines.socket_in(network.fileno())
    connection.sock.connect(("127.0.0.1", SERVER_PORT))
    return connection


def without_the_client(clock: Clock, hub: int, pool) -> None:
    # As many at once as with the client, and each host its share of them.
    each = max(1, THREADS // HOSTS)
    counts = [PER_HOST // each + (at < PER_HOST % each) for at in range(each)]
    ways = {
        "requests, proxy": through_the_proxy,
        "requests, direct": lambda host: to_the_server(host, hub),
    }
    with ThreadPoolExecutor(each * HOSTS) as threads:
        for way, connect in ways.items():
            clients = [
                Straight(host, connect(host), count) for host in pool._hosts for count in counts
            ]
            for phase, act in (
                ("create", Straight.create),
                ("command", Straight.command),
                ("kill", Straight.kill),
            ):
                clock.measure(way, phase, lambda: list(threads.map(act, clients)))  # noqa: B023


def main() -> int:
    load = os.getloadavg()[0]
    clock = Clock(
        {
            "client": lambda: [os.getpid()],
            "proxy": lambda: [HUB.pid],
            "servers": lambda: below(HUB.pid),
        }
    )
    with_the_client(clock, lambda pool: without_the_client(clock, HUB.pid, pool))
    print(f"{SANDBOXES} sandboxes over {HOSTS} hosts on {os.cpu_count()} processors, ", end="")
    print(f"load {load:.1f} before; huggingface_hub {huggingface_hub.__version__}")
    clock.show()
    ours = clock.together("SandboxPool")
    if (SANDBOXES, HOSTS) in PUBLISHED:
        published = PUBLISHED[SANDBOXES, HOSTS]
        print(f"published for as many on real jobs: {published} s; here: {ours:.2f} s")
    for way in ("requests, proxy", "requests, direct"):
        share = 100 * (1 - clock.together(way) / ours)
        print(f"{share:.0f} % of that is not needed by the same {way}")
    return 0


use_machines()
faulthandler.dump_traceback_later(PATIENCE, exit=True)
SCRATCH = Path(tempfile.mkdtemp(prefix="sbx-many-"))
SCRATCH.chmod(0o711)
HUB = subprocess.Popen(
    [sys.executable, "-B", Path(__file__).parent / "jobs_api.py", SERVER, SCRATCH],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
try:
    where = json.loads(HUB.stdout.readline())
    os.environ["HF_ENDPOINT"] = where["endpoint"]
    os.environ["SSL_CERT_FILE"] = where["certificate"]
    os.environ["HF_HOME"] = str(SCRATCH / "hf-home")
    os.environ["HF_TOKEN"] = TOKEN
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        os.environ.pop(name, None)
        os.environ.pop(name.lower(), None)

    import hashlib

    import huggingface_hub
    import huggingface_hub._sandbox
    from huggingface_hub import SandboxPool

    digest = hashlib.sha256(Path(SERVER).read_bytes()).hexdigest()
    huggingface_hub._sandbox.SANDBOX_SERVER_SHA256 = digest
    status = main()
finally:
    HUB.stdin.close()
    HUB.wait(timeout=60)
    shutil.rmtree(SCRATCH, ignore_errors=True)
sys.exit(status)
