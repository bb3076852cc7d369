"""openai-agents: its sandbox client for E2B, and an agent whose model answers with a fixed tool call."""

import io
import os
import tempfile
from pathlib import Path

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import Runner, RunConfig  # noqa: E402
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType  # noqa: E402
from agents.items import ModelResponse  # noqa: E402
from agents.models.interface import Model  # noqa: E402
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig  # noqa: E402
from agents.sandbox.entries import Dir, File, LocalDir  # noqa: E402
from agents.usage import Usage  # noqa: E402
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText  # noqa: E402

from parts import main, part, sandboxes  # noqa: E402

HERE = Path(tempfile.mkdtemp(prefix="sbx-agents-"))
(HERE / "given").write_text("of this machine\n")
# Only what is below the working directory may go into a manifest.
os.chdir(HERE)


def options(kind=E2BSandboxType.E2B, **more) -> E2BSandboxClientOptions:
    return E2BSandboxClientOptions(sandbox_type=kind, **more)


def manifest() -> Manifest:
    return Manifest(entries={"notes": Dir(children={"a.txt": File(content=b"text\n")}), "local": LocalDir(src=Path("."))})


async def work(session) -> None:
    async with session:
        root = str(session.state.manifest.root)
        done = await session.exec("id -un; pwd; echo oops >&2; exit 3", shell=True)
        assert (done.stdout, done.stderr, done.exit_code) == (f"user\n{root}\n".encode(), b"oops\n", 3), done
        done = await session.exec("cat", "notes/a.txt", "local/given", shell=False)
        assert done.stdout == b"text\nof this machine\n", done
        await session.write(Path("deep/er/bytes"), io.BytesIO(bytes(range(256))))
        assert (await session.read(Path("deep/er/bytes"))).read() == bytes(range(256))
        await session.mkdir("made/below", parents=True)
        names = [str(entry.path).rpartition("/")[2] for entry in await session.ls(".")]
        assert {"notes", "local", "deep", "made"} <= set(names), names
        await session.rm("made", recursive=True)
        assert await session.running()


@part("a session with the default root and `on_timeout` kill: manifest, exec, files")
async def _():
    client = E2BSandboxClient()
    session = await client.create(options=options(on_timeout="kill"), manifest=manifest())
    try:
        await work(session)
    finally:
        await client.delete(session)


@part("a session with the defaults: it is paused at its timeout; its workspace is saved and resumed")
async def _():
    client = E2BSandboxClient()
    session = await client.create(options=options(E2BSandboxType.CODE_INTERPRETER, pause_on_exit=True), manifest=manifest())
    try:
        await work(session)
        assert sandboxes()[0]["state"] == "paused"
        state = client.deserialize_session_state(client.serialize_session_state(session.state))
        again = await client.resume(state)
        async with again:
            assert (await again.read(Path("deep/er/bytes"))).read() == bytes(range(256))
    finally:
        await client.delete(session)
        import e2b

        for left in sandboxes():
            e2b.Sandbox.kill(left["id"])


@part("a workspace that is packed and unpacked into another sandbox, and a terminal")
async def _():
    client = E2BSandboxClient()
    first = await client.create(options=options(on_timeout="kill"), manifest=manifest())
    second = await client.create(options=options(on_timeout="kill"), manifest=Manifest())
    try:
        async with first, second:
            data = await first.persist_workspace()
            await second.hydrate_workspace(data)
            assert (await second.exec("cat", "notes/a.txt", shell=False)).stdout == b"text\n"
            update = await first.pty_exec_start("read line; echo got-$line; exit 4", shell=True, tty=True, yield_time_s=1)
            update = await first.pty_write_stdin(session_id=update.process_id, chars="word\n", yield_time_s=5)
            assert b"got-word" in update.output, update
    finally:
        await client.delete(first)
        await client.delete(second)


class Fixed(Model):
    """Asks for one command, and ends."""

    def __init__(self):
        self.has_asked = False

    async def get_response(self, *, input, **words):
        if not self.has_asked:
            self.has_asked = True
            call = '{"cmd": "python3 -c \'print(6 * 7)\'"}'
            output = ResponseFunctionToolCall(type="function_call", call_id="1", name="exec_command", arguments=call)
        else:
            text = ResponseOutputText(type="output_text", text=str(input[-1]), annotations=[])
            output = ResponseOutputMessage(id="2", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args, **words):
        raise NotImplementedError


@part("an agent that runs a command")
async def _():
    sandbox = SandboxRunConfig(client=E2BSandboxClient(), options=options(on_timeout="kill"))
    agent = SandboxAgent(name="agent", instructions="Answer.", model=Fixed(), default_manifest=manifest())
    result = await Runner.run(agent, "Run it.", run_config=RunConfig(sandbox=sandbox, tracing_disabled=True))
    assert "42" in result.final_output, result.final_output


main("openai-agents", "e2b", "e2b-code-interpreter")
