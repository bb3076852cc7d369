"""Has the official MCP client for Python do real work with a server, in the eras that it speaks.

usage: mcp_client.py BINARY VERSION [WORD...]

The last line is "N passed, M failed". Exit status 77 means that it cannot run here.
"""

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

BINARY, VERSION = os.path.abspath(sys.argv[1]), sys.argv[2]
WORDS = set(sys.argv[3:])
TOKEN = "mcp-client-token"

for variable in list(os.environ):
    if variable.lower().endswith("_proxy"):
        del os.environ[variable]

try:
    import mcp
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

IS_NEW = tuple(map(int, VERSION.split("."))) >= (2, 0)
if IS_NEW:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client
else:
    from datetime import timedelta

    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

NAMES = ["run", "start", "output", "input", "stop", "processes", "read_file", "write_file", "edit_file",
         "list_files", "glob", "grep", "ports"]


class Server:
    """A machine that is one sandbox, or a host with a sandbox."""

    def __init__(self, is_host: bool):
        self.scratch = tempfile.TemporaryDirectory(prefix="sbx-mcp-")
        os.chmod(self.scratch.name, 0o711)
        environment = {"PATH": os.environ["PATH"], "SBX_PORT": "0", "SBX_BIND": "127.0.0.1", "SBX_TOKEN": TOKEN}
        if is_host:
            environment |= {"SBX_HOST_MODE": "1", "SBX_HOMES_DIR": self.scratch.name + "/homes",
                            "SBX_UID_RANGE": os.environ["SBX_UID_RANGE"]}
        self.process = subprocess.Popen([BINARY], env=environment, cwd=self.scratch.name, stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        self.url = "http://" + line.split("listening on ")[1].split()[0]
        self.token = TOKEN
        if is_host:
            import json
            import urllib.request
            request = urllib.request.Request(self.url + "/v1/sandboxes", b"", {"X-Sandbox-Token": TOKEN})
            self.token = json.load(urllib.request.urlopen(request))["sandboxes"][0]["token"]

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        self.process.stderr.close()
        self.scratch.cleanup()


class Peer:
    """The two forms of the client as one."""

    def __init__(self, session):
        self.session = session

    async def tools(self):
        return (await self.session.list_tools()).tools

    async def result(self, tool, arguments, progress=None):
        options = {"progress_callback": progress} if progress else {}
        return await self.session.call_tool(tool, arguments, **options)

    @staticmethod
    def is_error(result):
        return result.is_error if IS_NEW else result.isError

    @staticmethod
    def structured(result):
        return result.structured_content if IS_NEW else result.structuredContent

    async def call(self, tool, **arguments):
        result = await self.result(tool, arguments)
        assert not self.is_error(result), result
        return self.structured(result)

    async def fails(self, tool, **arguments):
        result = await self.result(tool, arguments)
        assert self.is_error(result), result
        error = self.structured(result)
        assert result.content[0].text == error["error"], result
        return error["code"]


@contextlib.asynccontextmanager
async def connect(server, mode, token=None):
    headers = {"Authorization": f"Bearer {token or server.token}"}
    if IS_NEW:
        async with httpx2.AsyncClient(headers=headers, timeout=120) as http:
            async with Client(streamable_http_client(server.url + "/mcp", http_client=http), mode=mode) as client:
                yield Peer(client)
        return
    timeout = timedelta(seconds=120)
    async with streamablehttp_client(server.url + "/mcp", headers=headers, timeout=timeout) as (read, write, session_id):
        async with ClientSession(read, write) as session:
            await session.initialize()
            assert session_id() is None, "there are no sessions"
            yield Peer(session)


async def tools_are_listed(peer):
    tools = await peer.tools()
    assert [tool.name for tool in tools] == NAMES
    for tool in tools:
        schemas = (tool.input_schema, tool.output_schema) if IS_NEW else (tool.inputSchema, tool.outputSchema)
        assert all(schema["type"] == "object" for schema in schemas), tool
        assert tool.annotations.title, tool


async def commands_run(peer):
    ran = await peer.call("run", cmd="echo out; echo err >&2; exit 3", env={"A": "b"})
    assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("out\n", "err\n", 3), ran
    ran = await peer.call("run", cmd=["printf", "%s", "caf\u00e9 \U0001f600"])
    assert ran["stdout"] == "caf\u00e9 \U0001f600", ran
    ran = await peer.call("run", cmd="seq 100000")
    assert ran["truncated"] and len(ran["stdout"]) <= 30_000, len(ran["stdout"])
    rest = await peer.call("output", id=ran["id"], stdout_offset=ran["stdout_offset"])
    assert rest["stdout"], rest


async def errors_are_results(peer):
    assert await peer.fails("run", cmd=["/no/such/program"]) == "not_found"
    assert await peer.fails("run", cmd="true", unknown=1) == "bad_request"
    assert await peer.fails("read_file", path="none") == "not_found"
    try:
        await peer.result("no_such_tool", {})
        raise AssertionError("an unknown tool is an error of the protocol")
    except Exception as error:
        assert "no_such_tool" in str(error), repr(error)


async def progress_is_told(peer):
    told = []

    async def progress(amount, total, message):
        told.append((amount, message))

    result = await peer.result("run", {"cmd": "for n in 1 2 3; do echo line $n; sleep 0.2; done"}, progress)
    assert peer.structured(result)["stdout"] == "line 1\nline 2\nline 3\n", result
    assert "".join(message for _, message in told) == "line 1\nline 2\nline 3\n", told
    assert [amount for amount, _ in told] == sorted({amount for amount, _ in told}), told


async def long_calls_stay_open(peer):
    ran = await peer.call("run", cmd="sleep 11; echo late")
    assert ran["stdout"] == "late\n", ran


async def processes_are_driven(peer):
    started = await peer.call("start", cmd="while read line; do echo got $line; done", tag="t")
    await peer.call("input", id=started["id"], text="one\n")
    read = await peer.call("output", id=started["id"], wait=20)
    assert read["stdout"] == "got one\n" and read["running"], read
    listed = await peer.call("processes")
    assert any(entry["id"] == started["id"] and entry["running"] for entry in listed["processes"]), listed
    assert (await peer.call("stop", id=started["id"]))["signaled"]
    read = await peer.call("output", id=started["id"], wait=20)
    assert (read["running"], read["reason"]) == (False, "killed"), read


async def files_are_worked_on(peer):
    text = "def f():\n    return 1\n"
    written = await peer.call("write_file", path="src/f.py", content=text)
    assert written["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    read = await peer.call("read_file", path="src/f.py")
    assert (read["content"], read["sha256"]) == (text, written["sha256"]), read
    edited = await peer.call("edit_file", path="src/f.py", edits=[{"old": "return 1", "new": "return 2"}],
                             if_sha256=read["sha256"])
    assert "+    return 2" in edited["diff"], edited
    assert await peer.fails("edit_file", path="src/f.py", edits=[{"old": "x", "new": "y"}]) == "no_match"
    listed = await peer.call("list_files", path=".", depth=2)
    assert "src/f.py" in [entry["path"].removeprefix("./") for entry in listed["entries"]], listed
    found = await peer.call("glob", path="src", pattern="*.py")
    assert [entry["path"] for entry in found["entries"]] == ["src/f.py"], found
    found = await peer.call("grep", pattern="return [0-9]", path="src")
    assert found["matches"][0]["line"] == 2, found
    await peer.call("run", cmd="printf '\\211PNG\\r\\n\\032\\n\\0\\0\\0\\rIHDR' > p.png")
    result = await peer.result("read_file", {"path": "p.png"})
    assert result.content[1].type == "image", result


async def calls_run_side_by_side(peer):
    begun = time.monotonic()
    ran = await asyncio.gather(*(peer.call("run", cmd=f"sleep 1; echo {n}") for n in range(20)))
    assert [result["stdout"] for result in ran] == [f"{n}\n" for n in range(20)], ran
    assert time.monotonic() - begun < 12


async def ports_are_listed(peer):
    assert isinstance((await peer.call("ports"))["ports"], list)


CHECKS = [tools_are_listed, commands_run, errors_are_results, progress_is_told, processes_are_driven,
          files_are_worked_on, calls_run_side_by_side, ports_are_listed, long_calls_stay_open]


async def a_wrong_token_is_refused(server, mode):
    try:
        async with connect(server, mode, "wrong") as peer:
            await peer.tools()
    except BaseException as error:
        # Neither a login is begun nor another transport tried for ever.
        assert not isinstance(error, KeyboardInterrupt)
        return
    raise AssertionError("a wrong token was accepted")


async def check(server, mode, is_host):
    failed = passed = 0
    for function in CHECKS:
        if function is long_calls_stay_open and is_host:
            continue
        name = f"{function.__name__} ({mode})"
        if WORDS and not any(word in name for word in WORDS):
            continue
        try:
            async with connect(server, mode) as peer:
                await asyncio.wait_for(function(peer), 120)
            passed += 1
            print(f"ok      {name}")
        except BaseException:
            failed += 1
            print(f"FAILED  {name}")
            traceback.print_exc()
    try:
        await asyncio.wait_for(a_wrong_token_is_refused(server, mode), 60)
        passed += 1
    except Exception:
        failed += 1
        print(f"FAILED  a_wrong_token_is_refused ({mode})")
        traceback.print_exc()
    return passed, failed


def main():
    totals = [0, 0]
    for is_host in [False, True] if os.geteuid() == 0 else [False]:
        server = Server(is_host)
        try:
            for mode in ["auto", "legacy"] if IS_NEW else ["legacy"]:
                for index, count in enumerate(asyncio.run(check(server, mode, is_host))):
                    totals[index] += count
        finally:
            server.close()
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(1 if totals[1] else 0)


main()
