"""crewAI: its three tools for E2B, with a sandbox for each call and with one for all."""

import os
import tempfile

os.environ |= {"HOME": tempfile.mkdtemp(prefix="sbx-crewai-"), "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai_tools import E2BExecTool, E2BFileTool, E2BPythonTool  # noqa: E402

from parts import main, part, sandboxes  # noqa: E402


@part("a sandbox for each call")
def _():
    assert "user" in str(E2BExecTool().run(command="id -un"))
    assert "42" in str(E2BPythonTool().run(code="print(6 * 7)"))
    assert not sandboxes()


@part("one sandbox for all calls: commands, files, code")
def _():
    tool = E2BFileTool(persistent=True)
    try:
        tool.run(action="write", path="/home/user/dir/file", content="text ☃\n")
        assert "☃" in str(tool.run(action="read", path="/home/user/dir/file"))
        assert "file" in str(tool.run(action="list", path="/home/user/dir"))
        attached = E2BExecTool(sandbox_id=sandboxes()[0]["id"])
        assert "☃" in str(attached.run(command="cat dir/file"))
    finally:
        tool.close()


main("crewai", "crewai-tools", "e2b", "e2b-code-interpreter")
