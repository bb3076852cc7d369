"""The part of the Hugging Face Hub that starts machines, on this machine.

`huggingface_hub` is not patched: it is pointed here by `HF_ENDPOINT`, which is its own setting. It
asks for a job as it would ask the Hub, and gets one: a process running `sbx-server` with exactly
the environment and the secrets that the client chose. What differs from a real job does because
several jobs share one machine here:

- the server gets a free loopback port in place of 49983;
- a host of a pool gets users and a directory for homes that no other server has;
- the bootstrap script, which downloads the server, is skipped (the binary is at hand), and with it
  the variables that the script unsets before it runs the server.

The client then talks to the job by the host name that it demands, `<job id>--49983.<domain>`. What
a name server would do for that name, `resolve_job_hosts` does: it maps the names under `DOMAIN` to
127.0.0.1. Everything from the URL on (connections, headers, bodies) is the client's own.

Hosts of pools are behind a proxy that speaks TLS, as jobs are, because clients refuse to adopt one
that is not; `TlsFront` is it. Dedicated jobs are reached directly.
"""

import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

DOMAIN = "sandbox.test"

# What the bootstrap script of the client uses and unsets.
BOOTSTRAP_VARIABLES = {
    "SBX_SERVER_URL",
    "SBX_SERVER_MOUNT",
    "SBX_SERVER_SHA256",
    "SBX_ALLOW_UNVERIFIED_SERVER",
    "SBX_DL_TOKEN",
}

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

    The same ranges, and the same name to claim one by, as those of tests/suite/fixture.rs.
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


class TlsFront:
    """The proxy in front of jobs: ends TLS, and passes the bytes on to the job that is asked for."""

    def __init__(self, directory: Path) -> None:
        self.certificate = directory / "certificate.pem"
        key = directory / "key.pem"
        words = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={DOMAIN} -addext"
        subprocess.run(
            ["openssl", "req", *words.split(), f"subjectAltName=DNS:*.{DOMAIN}"]
            + ["-keyout", key, "-out", self.certificate],
            check=True,
            capture_output=True,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._context.sni_callback = self._note_name
        self._names: dict[int, str] = {}
        self._ports: dict[str, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lead(self, name: str, port: int) -> str:
        """Leads the host name to this port of the machine; returns its URL."""
        self._ports[name] = port
        return f"https://{name}:{self.port}"

    def _note_name(self, connection, name, _context) -> None:
        self._names[id(connection)] = name

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            front = self._context.wrap_socket(connection, server_side=True)
            name = self._names.pop(id(front))
            back = socket.create_connection(("127.0.0.1", self._ports[name]))
        except (OSError, KeyError):
            return connection.close()
        try:
            while True:
                if front.pending() == 0:
                    ready, _, _ = select.select([front, back], [], [])
                if front.pending() or front in ready:
                    data = front.recv(65536)
                    back.sendall(data)
                else:
                    data = back.recv(65536)
                    front.sendall(data)
                if not data:
                    break
        except OSError:
            pass
        # Whoever has not gone yet is to notice that the other has.
        back.close()
        front.close()


class Job:
    """One job: the specification that the client sent, and the server process made from it."""

    def __init__(self, hub: "Hub", spec: dict) -> None:
        self.id = secrets.token_hex(12)
        self.spec = spec
        self.cancelled = False
        chosen = {**spec["environment"], **spec.get("secrets", {})}
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            **{name: value for name, value in chosen.items() if name not in BOOTSTRAP_VARIABLES},
            "SBX_PORT": "0",
            "SBX_BIND": "127.0.0.1",
        }
        self.is_host = chosen.get("SBX_HOST_MODE") == "1"
        if self.is_host:
            self.users = Users()
            self.homes = hub.directory / f"homes-{self.id}"
            environment["SBX_UID_RANGE"] = self.users.range
            environment["SBX_HOMES_DIR"] = str(self.homes)
        self.process = subprocess.Popen(
            [hub.server_binary],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.log: list[str] = []
        port = None
        while port is None:
            line = self.process.stderr.readline()
            if not line:
                raise RuntimeError(
                    f"the server did not start (status {self.process.wait()}): {self.log}"
                )
            self.log.append(line)
            ready = re.search(r"listening on 127\.0\.0\.1:(\d+)", line)
            port = int(ready.group(1)) if ready else None
        name = f"{self.id}--49983.{DOMAIN}"
        self.url = hub.front().lead(name, port) if self.is_host else f"http://{name}:{port}"
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def stage(self) -> str:
        status = self.process.poll()
        if status is None:
            return "RUNNING"
        if self.cancelled:
            return "CANCELED"
        return "COMPLETED" if status == 0 else "ERROR"

    def cancel(self) -> None:
        """Ends the job as the scheduler does: SIGTERM to its first process."""
        self.cancelled = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

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


class Hub:
    """A small HTTP server with the routes that a sandbox client uses to have a machine."""

    def __init__(self, server_binary: str, directory: Path) -> None:
        self.server_binary = server_binary
        self.directory = directory
        self.jobs: dict[str, Job] = {}
        self._front = None
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/api/whoami-v2":
                    return self.answer(200, {**OWNER, "fullname": "Tester", "orgs": []})
                url = urlsplit(self.path)
                if url.path == "/api/jobs/tester":
                    return self.answer(200, hub.listing(parse_qsl(url.query)))
                if match := re.fullmatch(r"/api/jobs/tester/(\w+)", self.path):
                    job = hub.jobs.get(match.group(1))
                    return (
                        self.answer(200, job.info())
                        if job
                        else self.answer(404, {"error": "no such job"})
                    )
                self.answer(404, {"error": f"not simulated: GET {self.path}"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path == "/api/jobs/tester":
                    job = Job(hub, json.loads(body))
                    hub.jobs[job.id] = job
                    return self.answer(200, job.info())
                if match := re.fullmatch(r"/api/jobs/tester/(\w+)/cancel", self.path):
                    job = hub.jobs[match.group(1)]
                    job.cancel()
                    return self.answer(200, job.info())
                self.answer(404, {"error": f"not simulated: POST {self.path}"})

            def answer(self, status: int, body: dict) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def front(self) -> TlsFront:
        """What hosts of pools are reached through. Clients are to trust it before they look."""
        with self._lock:
            if self._front is None:
                self._front = TlsFront(self.directory)
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

    def kill_jobs(self) -> None:
        """Ends whatever still runs."""
        for job in list(self.jobs.values()):
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()
            if job.is_host:
                shutil.rmtree(job.homes, ignore_errors=True)
                job.users.release()

    def close(self) -> None:
        self.kill_jobs()
        self._server.shutdown()
