"""verifiers: its runtime for E2B, from the start to the end of a sandbox."""

import os
import tempfile

from parts import main, part, refused

os.environ["HOME"] = tempfile.mkdtemp(prefix="sbx-verifiers-")

from verifiers.v1.errors import SandboxError  # noqa: E402
from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime  # noqa: E402


async def started(**options) -> E2BRuntime:
    runtime = E2BRuntime(E2BConfig(**options))
    await runtime.start()
    return runtime


@part("run, run_program, a live process with input, run_background, files")
async def _():
    runtime = await started()
    try:
        done = await runtime.run(["sh", "-c", "id -un; pwd; echo $WORD; echo oops >&2; exit 3"], {"WORD": "x y"})
        assert (done.stdout, done.stderr, done.exit_code) == ("root\n/app\nx y\n", "oops\n", 3), done
        done = await runtime.run_program(["python3", "-c", "print('☃' * 100000)"], {})
        assert (done.exit_code, done.stdout) == (0, "☃" * 100000 + "\n"), done.exit_code
        await runtime.write("sub/bytes", bytes(range(256)))
        assert await runtime.read("/app/sub/bytes") == bytes(range(256))
        try:
            await runtime.read("missing")
            raise AssertionError("it is read")
        except SandboxError:
            pass
        process = await runtime.open_process(["cat"], {})
        await process.write(b"\x00\xff bytes\n")
        async for chunk in process.stdout:
            assert chunk == b"\x00\xff bytes\n", chunk
            break
        await process.kill()
        await process.wait()
        await runtime.run_background(["sh", "-c", "echo ran; sleep 1000"], {}, "/tmp/log")
        done = await runtime.run(["sh", "-c", "until grep ran /tmp/log; do sleep 0.1; done"], {})
        assert done.stdout == "ran\n", done
        assert "localhost" in await runtime.expose(8000)
    finally:
        await runtime.stop()


@refused("an egress policy, which it sets when the sandbox runs", "a sandbox that runs cannot be changed")
async def _():
    runtime = await started(allow=["pypi.org"])
    try:
        await runtime.prepare_execution([])
    finally:
        await runtime.stop()


main("verifiers", "e2b")
