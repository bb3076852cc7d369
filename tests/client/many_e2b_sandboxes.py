"""A thousand sandboxes over twenty hosts, with the unmodified asynchronous SDK of E2B: what each phase takes.

    python many_e2b_sandboxes.py <sbx-server binary> [sandboxes [hosts]]

The hosts are servers on this machine, each with users of its own. The SDK knows one server, so each call names its own.
Everything that was started ends with this program.
"""

import asyncio
import faulthandler
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machines import end_with_parent
from phases import Clock, below

SERVER = os.path.abspath(sys.argv[1])
SANDBOXES = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
HOSTS = int(sys.argv[3]) if len(sys.argv) > 3 else 20

# As many calls at once as the other measurement has threads.
AT_ONCE = 64

# Whatever hangs, this ends, and everything else with it.
PATIENCE = 900

FIRST_USER, LAST_USER = 20_000, 59_999
KEY = "e2b_0123456789abcdef"
WAY = "AsyncSandbox"

for variable in list(os.environ):
    if variable.startswith("E2B_") or variable.lower().endswith("_proxy"):
        del os.environ[variable]

from e2b import AsyncSandbox  # noqa: E402


class Host:
    """A server in host mode."""

    def __init__(self, number: int, scratch: Path) -> None:
        users = (LAST_USER - FIRST_USER + 1) // HOSTS
        first = FIRST_USER + number * users
        settings = {
            "PATH": os.environ["PATH"],
            "SBX_HOST_MODE": "1",
            "SBX_BIND": "127.0.0.1",
            "SBX_PORT": "0",
            "SBX_TOKEN": KEY,
            "SBX_HOMES_DIR": str(scratch / f"host-{number}"),
            "SBX_UID_RANGE": f"{first}-{first + users - 1}",
        }
        self._log = scratch / f"host-{number}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [SERVER], env=settings, stderr=log, preexec_fn=end_with_parent
            )

    def wait_until_ready(self) -> None:
        for _ in range(1000):
            said = re.search(r"listening on (127\.0\.0\.1:\d+) ", self._log.read_text())
            if said:
                url = f"http://{said[1]}"
                self.options = {"api_url": url, "sandbox_url": url, "api_key": KEY}
                return
            time.sleep(0.01)
        raise RuntimeError("a server does not listen")


def end_all(hosts: list[Host]) -> None:
    for host in hosts:
        host.process.terminate()
    for host in hosts:
        try:
            host.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            host.process.kill()


async def each(act, things) -> list:
    """Does it for all of them, so many at once."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(thing):
        async with turn:
            return await act(thing)

    return await asyncio.gather(*(one(thing) for thing in things))


async def live(clock: Clock, hosts: list[Host]) -> None:
    async def create(number: int) -> AsyncSandbox:
        return await AsyncSandbox.create(timeout=600, **hosts[number % HOSTS].options)

    async def command(sandbox: AsyncSandbox) -> str:
        return (await sandbox.commands.run("echo $HOME")).stdout

    end = clock.begin(WAY, "create")
    sandboxes = await each(create, range(SANDBOXES))
    end()
    assert len({sandbox.sandbox_id for sandbox in sandboxes}) == SANDBOXES
    end = clock.begin(WAY, "command")
    said = await each(command, sandboxes)
    end()
    homes = [text.strip() for text in said]
    assert all(home.endswith(box.sandbox_id) for home, box in zip(homes, sandboxes)), homes[:3]
    end = clock.begin(WAY, "kill")
    killed = await each(AsyncSandbox.kill, sandboxes)
    end()
    assert all(killed) and not any(Path(home).exists() for home in homes)


def main() -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    load, hosts = os.getloadavg()[0], []
    scratch = Path(tempfile.mkdtemp(prefix="sbx-many-"))
    # Sandboxes pass through it to their homes.
    scratch.chmod(0o711)

    def servers() -> list[int]:
        return [pid for host in hosts for pid in [host.process.pid, *below(host.process.pid)]]

    clock = Clock({"client": lambda: [os.getpid()], "servers": servers})
    try:
        end = clock.begin(WAY, "hosts")
        for number in range(HOSTS):
            hosts.append(Host(number, scratch))
        for host in hosts:
            host.wait_until_ready()
        end()
        asyncio.run(live(clock, hosts))
    finally:
        end_all(hosts)
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{SANDBOXES} sandboxes over {HOSTS} hosts on {os.cpu_count()} processors, ", end="")
    print(f"load {load:.1f} before; e2b {importlib.metadata.version('e2b')}")
    clock.show()


main()
