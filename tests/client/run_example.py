"""Runs one of `examples/` that use the `huggingface_hub` client, unmodified, against this machine.

    python run_example.py <sbx-server binary> <huggingface_hub version> <path of the example>

The stand-in for the Jobs API starts the server for each job that the example asks for. All jobs are
behind the TLS proxy, as real ones are. The exit status is 0 only if the example succeeds and every
server that it started ends with status 0.
"""

import runpy
import socket
import sys
import tempfile
import os

from jobs_api import Hub, ServerJob

EXAMPLE = os.path.abspath(sys.argv.pop(3))


class ProxiedJob(ServerJob):
    """A server behind the TLS proxy. `ServerJob` alone puts only pool hosts there."""

    def start(self, hub: Hub):
        process, url = super().start(hub)
        if not self.is_host:
            url = hub.front().lead(self.name, socket.socket, int(url.rpartition(":")[2]))
        return process, url


Hub.job_type = ProxiedJob

from checks import HUB  # noqa: E402

# The client reads the certificate's path when it makes its first connection.
HUB.front()

with tempfile.TemporaryDirectory() as directory:
    # The servers inherit it as their working directory.
    os.chdir(directory)
    runpy.run_path(EXAMPLE, run_name="__main__")
    for job in HUB.jobs.values():
        status = job.process.wait(timeout=60)
        assert status == 0, f"a server ended with status {status}:\n{job.whole_log()}"
    left = os.listdir(directory)
    assert not left, f"the example left files: {left}"
    os.chdir("/")
assert HUB.jobs, "the example started no job"
