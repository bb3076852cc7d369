"""The part of the Hugging Face Hub that starts machines, on this machine.

`huggingface_hub` is not patched: it is pointed here by `HF_ENDPOINT`, which is its own setting. It
asks for a job as it would ask the Hub, and gets one: a process running `sbx-server` with exactly
the environment and the secrets that the client chose. Only two things differ from a real job, both
because several jobs share one machine here:

- the server gets a free loopback port in place of 49983;
- the bootstrap script, which downloads the server, is skipped (the binary is at hand), and with it
  the variables that the script unsets before it runs the server.

The client then talks to the job by the host name that it demands, `<job id>--49983.<domain>`. What
a name server would do for that name, `resolve_job_hosts` does: it maps the names under `DOMAIN` to
127.0.0.1. Everything from the URL on (connections, headers, bodies) is the client's own.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class Job:
    """One job: the specification that the client sent, and the server process made from it."""

    def __init__(self, server_binary: str, spec: dict) -> None:
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
        self.process = subprocess.Popen(
            [server_binary],
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
        self.url = f"http://{self.id}--49983.{DOMAIN}:{port}"
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

    def __init__(self, server_binary: str) -> None:
        self.jobs: dict[str, Job] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/api/whoami-v2":
                    return self.answer(200, {**OWNER, "fullname": "Tester", "orgs": []})
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
                    job = Job(server_binary, json.loads(body))
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

    def kill_jobs(self) -> None:
        """Ends whatever still runs."""
        for job in list(self.jobs.values()):
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()

    def close(self) -> None:
        self.kill_jobs()
        self._server.shutdown()
