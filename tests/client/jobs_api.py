"""The part of the Hugging Face Hub that starts machines, on this machine.

`huggingface_hub` is not patched: it is pointed here by `HF_ENDPOINT`, which is its own setting. It
asks for a job as it would ask the Hub, and gets one, of one of two kinds:

- `MachineJob` is the whole path: the client's own command, which downloads the server from the
  bucket (that is here too), in a machine of its own (machines.py), with exactly the environment and
  the secrets that the client chose, behind the proxy that jobs have (front.py). Needs root and
  namespaces. `use_machines` chooses it.
- `ServerJob`, the default, is `sbx-server` alone, as a process of this machine, for what does not
  need more: on a free port in place of 49983; as host of a pool with users and a directory for homes
  that no other server has; and without the bootstrap script and the variables that it unsets. A
  dedicated job is reached directly. Hosts of pools are behind the proxy, because clients refuse to
  adopt one that is not.

The client then talks to the job by the host name that it demands, `<job id>--49983.<domain>`. What
a name server would do for that name, a file of host names does, or `resolve_job_hosts` where no file
can be mounted. Everything from the URL on (connections, headers, bodies) is the client's own.

As a program it is a Hub with machines in a process of its own:

    python jobs_api.py <sbx-server binary> <directory>

It prints a line of JSON, {"endpoint": ..., "certificate": ...}, and ends with its standard input. Who
starts it has called `use_machines`.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from front import Front
from machines import MS_BIND, Machine, leave_mounts, mount, refusal

DOMAIN = "sandbox.test"

# What the bootstrap script of the client uses and unsets.
BOOTSTRAP_VARIABLES = {
    "SBX_SERVER_URL",
    "SBX_SERVER_MOUNT",
    "SBX_SERVER_SHA256",
    "SBX_ALLOW_UNVERIFIED_SERVER",
    "SBX_DL_TOKEN",
}

# What the owner of the jobs shows to the proxy in front of them. The Hub knows other people too.
TOKEN = "hf_thetokenofthetester"

SERVER_PORT = 49983

OWNER = {"id": "0" * 24, "name": "tester", "type": "user"}


def resolve_job_hosts() -> None:
    """Makes the host names of jobs lead to this machine."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if isinstance(host, bytes):
            host = host.decode()
        if isinstance(host, str) and host.endswith("." + DOMAIN):
            host = "127.0.0.1"
        return real(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo


class Users:
    """A range of users that no other server of any test running at the same time has.

    The same ranges, and the same name to claim one by, as those of tests/suite/fixture/host.rs.
    """

    COUNT, RANGES = 64, 300

    def __init__(self) -> None:
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        while True:
            first = 20_000 + secrets.randbelow(self.RANGES) * self.COUNT
            try:
                self._claim.bind(f"\0sbx-test-uids-{first}")
            except OSError:
                continue
            self.range = f"{first}-{first + self.COUNT - 1}"
            return

    def release(self) -> None:
        self._claim.close()


class Job:
    """One job: the specification that the client sent, and the process made from it."""

    # Whether its end is to be that of a server that was asked to end.
    ends_well = True

    def __init__(self, hub: "Hub", spec: dict) -> None:
        self.id = secrets.token_hex(12)
        self.name = f"{self.id}--{SERVER_PORT}.{DOMAIN}"
        self.spec = spec
        self.cancelled = False
        self.log: list[str] = []
        self.chosen = {**spec["environment"], **spec.get("secrets", {})}
        # Its end and status are the job's.
        self.process, self.url = self.start(hub)

    def start(self, hub: "Hub") -> tuple[subprocess.Popen, str]:
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Sends a signal to the job's first process."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Ends it at once, and leaves nothing of it."""
        raise NotImplementedError

    def keep_log(self, stream) -> None:
        """Goes on reading what the job says, to its end."""

        def read() -> None:
            for line in stream:
                self.log.append(line)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def whole_log(self) -> str:
        """What a job has said that has ended."""
        self._reader.join(timeout=20)
        return "".join(self.log)

    def stage(self) -> str:
        status = self.process.poll()
        if status is None:
            return "RUNNING"
        if self.cancelled:
            return "CANCELED"
        return "COMPLETED" if status == 0 else "ERROR"

    def cancel(self) -> None:
        """Ends the job as the scheduler does: SIGTERM to its first process, SIGKILL in the end."""
        if self.process.poll() is None:
            self.cancelled = True
            self.signal(signal.SIGTERM)
            last = threading.Timer(10, self.signal, [signal.SIGKILL])
            last.daemon = True
            last.start()

    def info(self) -> dict:
        """The job as the Hub describes it."""
        return {
            "id": self.id,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "dockerImage": self.spec.get("dockerImage"),
            "command": self.spec["command"],
            "arguments": [],
            "environment": self.spec["environment"],
            "flavor": self.spec["flavor"],
            "labels": self.spec.get("labels"),
            "status": {"stage": self.stage(), "message": None, "exposeUrls": [self.url]},
            "owner": OWNER,
            "initiator": {"type": "user", "id": OWNER["id"], "name": OWNER["name"]},
        }


class ServerJob(Job):
    """The server alone, a process of this machine."""

    def start(self, hub: "Hub") -> tuple[subprocess.Popen, str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            **{name: text for name, text in self.chosen.items() if name not in BOOTSTRAP_VARIABLES},
            "SBX_PORT": "0",
            "SBX_BIND": "127.0.0.1",
        }
        self.is_host = self.chosen.get("SBX_HOST_MODE") == "1"
        if self.is_host:
            self.users = Users()
            self.homes = hub.directory / f"homes-{self.id}"
            environment["SBX_UID_RANGE"] = self.users.range
            environment["SBX_HOMES_DIR"] = str(self.homes)
        process = subprocess.Popen(
            [hub.server_binary],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        port = None
        while port is None:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError(f"the server did not start (status {process.wait()}): {self.log}")
            self.log.append(line)
            ready = re.search(r"listening on 127\.0\.0\.1:(\d+)", line)
            port = int(ready.group(1)) if ready else None
        self.keep_log(process.stderr)
        if self.is_host:
            return process, hub.front().lead(self.name, socket.socket, port)
        return process, f"http://{self.name}:{port}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def destroy(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.is_host:
            shutil.rmtree(self.homes, ignore_errors=True)
            self.users.release()


class MachineJob(Job):
    """The client's own command, in a machine of its own."""

    def start(self, hub: "Hub") -> tuple[subprocess.Popen, str]:
        environment = {name: str(value) for name, value in self.chosen.items()}
        self.machine = Machine(self.spec["command"], environment, hub.directory / self.id)
        # The machine's way out: the Hub, at the address that it has outside too.
        self._way_out = self.machine.socket()
        self._way_out.bind(hub.address)
        self._way_out.listen()
        hub.serve_also(self._way_out)
        self.machine.start()
        self.keep_log(line.decode(errors="replace") for line in self.machine.process.stdout)
        with open("/etc/hosts", "a") as names:
            names.write(f"127.0.0.1 {self.name}\n")
        url = hub.front().lead(self.name, self.machine.socket, SERVER_PORT)
        return self.machine.process, url

    def signal(self, number: int) -> None:
        self.machine.signal(number)

    def destroy(self) -> None:
        self.machine.destroy()
        if self._way_out is not None:
            # Closing alone does not wake the thread that waits for connections.
            self._way_out.shutdown(socket.SHUT_RDWR)
            self._way_out.close()
            self._way_out = None


def use_machines() -> None:
    """Makes every job one of the whole path, and their names known to this process and its children.

    To be called while the process has one thread. What is mounted is gone with the processes. Where
    there can be no machines, the process ends with status 77, and says why.
    """
    reason = refusal()
    try:
        leave_mounts()
    except OSError as error:
        reason = reason or str(error)
    if reason:
        print(f"cannot run here: {reason}")
        sys.exit(77)
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("127.0.0.1 localhost\n")
        names.flush()
        os.chmod(names.name, 0o644)
        mount(names.name, "/etc/hosts", None, MS_BIND)
    Hub.job_type = MachineJob


class Hub:
    """A small HTTP server with the routes that a sandbox client uses to have a machine."""

    job_type: type[Job] = ServerJob

    def __init__(self, server_binary: str, directory: Path) -> None:
        self.server_binary = server_binary
        self.directory = directory
        # What the bucket has under the server's names.
        self.program = Path(server_binary).read_bytes()
        self.jobs: dict[str, Job] = {}
        self._front = None
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if re.fullmatch(r"/buckets/[\w/-]+/resolve/sbx-server(-[0-9a-f]{64})?", url.path):
                    return self.send("application/octet-stream", hub.program)
                if not self.is_somebody():
                    return
                if url.path == "/api/whoami-v2":
                    return self.answer(200, {**OWNER, "fullname": "Tester", "orgs": []})
                if url.path == "/api/jobs/tester":
                    return self.answer(200, hub.listing(parse_qsl(url.query)))
                match = re.fullmatch(r"/api/jobs/tester/(\w+)(/logs)?", url.path)
                if not match:
                    return self.answer(404, {"error": f"not simulated: GET {self.path}"})
                job = hub.jobs.get(match.group(1))
                if not job:
                    return self.answer(404, {"error": "no such job"})
                if match.group(2):
                    # What there is; who follows asks again.
                    return self.send("text/event-stream", hub.events(job))
                self.answer(200, job.info())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not self.is_somebody():
                    return
                if self.path == "/api/jobs/tester":
                    job = hub.job_type(hub, json.loads(body))
                    hub.jobs[job.id] = job
                    return self.answer(200, job.info())
                if match := re.fullmatch(r"/api/jobs/tester/(\w+)/cancel", self.path):
                    job = hub.jobs[match.group(1)]
                    job.cancel()
                    return self.answer(200, job.info())
                self.answer(404, {"error": f"not simulated: POST {self.path}"})

            def is_somebody(self) -> bool:
                if self.headers.get("Authorization", "").startswith("Bearer hf_"):
                    return True
                self.answer(401, {"error": "a token is needed"})
                return False

            def answer(self, status: int, body: dict | list) -> None:
                self.send("application/json", json.dumps(body).encode(), status)

            def send(self, kind: str, body: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            # Many jobs are asked for at once.
            request_queue_size = 256

        self._server = Listener(("127.0.0.1", 0), Handler)
        self.address = self._server.server_address
        self.endpoint = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def serve_also(self, listener: socket.socket) -> None:
        """Answers on this socket too, until it is shut down."""

        def accept() -> None:
            while True:
                try:
                    connection, peer = listener.accept()
                except OSError:
                    return
                self._server.process_request(connection, peer)

        threading.Thread(target=accept, daemon=True).start()

    @property
    def is_fronted(self) -> bool:
        """Whether all jobs are reached through the proxy."""
        return self._front is not None

    def front(self) -> Front:
        """What jobs are reached through. Clients are to trust it before they look."""
        with self._lock:
            if self._front is None:
                self._front = Front(self.directory, DOMAIN, TOKEN)
                os.environ["SSL_CERT_FILE"] = str(self._front.certificate)
            return self._front

    def listing(self, query: list[tuple[str, str]]) -> list[dict]:
        """The jobs that are in one of these stages and have all of these labels."""
        stages = [value for name, value in query if name == "stage"]
        labels = [value.split("=", 1) for name, value in query if name == "label"]
        found = (job.info() for job in list(self.jobs.values()))
        return [
            info
            for info in found
            if (not stages or info["status"]["stage"] in stages)
            and all((info["labels"] or {}).get(name) == value for name, value in labels)
        ]

    def events(self, job: Job) -> bytes:
        """What a job has said, as the Hub tells it."""
        if job.process.poll() is not None:
            job.whole_log()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lines = ["===== Job started =====", *(line.rstrip("\n") for line in list(job.log))]
        texts = (json.dumps({"data": line, "timestamp": now}) for line in lines)
        return "".join(f"data: {text}\n\n" for text in texts).encode()

    def kill_jobs(self) -> None:
        """Ends whatever still runs."""
        for job in list(self.jobs.values()):
            job.destroy()

    def close(self) -> None:
        self.kill_jobs()
        self._server.shutdown()


def main() -> None:
    Hub.job_type = MachineJob
    hub = Hub(sys.argv[1], Path(sys.argv[2]))
    certificate = str(hub.front().certificate)
    print(json.dumps({"endpoint": hub.endpoint, "certificate": certificate}), flush=True)
    try:
        sys.stdin.read()
    finally:
        hub.close()


if __name__ == "__main__":
    main()
