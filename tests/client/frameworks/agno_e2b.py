"""agno: the tools of its toolkit for E2B.

Three of them work with no server: `download_file_from_sandbox` writes a text into a binary file, and `watch_directory` and
`list_running_sandboxes` take the SDK for one of an older form.
"""

import os
import tempfile

os.environ["AGNO_TELEMETRY"] = "false"

from agno.tools.e2b import E2BTools  # noqa: E402

from parts import main, part  # noqa: E402


@part("code, files, commands, servers and the sandbox itself")
def _():
    tools = E2BTools(timeout=120)
    try:
        assert "42" in tools.run_python_code("6 * 7"), "the value of the last line"
        assert "ZeroDivisionError" in tools.run_python_code("1 / 0")
        with tempfile.NamedTemporaryFile(suffix=".txt") as file:
            file.write("text ☃\n".encode())
            file.flush()
            path = tools.upload_file(file.name)
        assert path == f"/home/user/{os.path.basename(file.name)}", path
        assert "☃" in tools.read_file_content(path)
        assert "error" not in tools.write_file_content("dir/file", "more\n")
        assert "file" in tools.list_files("/home/user/dir")
        assert "user" in tools.run_command("id -un")
        assert "two" in tools.stream_command("echo one; echo two")
        handle = tools.run_background_command("sleep 1000")
        assert "error" not in str(tools.kill_background_command(handle)).lower()
        assert "localhost" in tools.run_server("python3 -m http.server 8000", 8000)
        assert "localhost" in tools.get_public_url(8000)
        assert "error" not in tools.set_sandbox_timeout(100)
        assert "error" not in tools.get_sandbox_status().lower()
    finally:
        assert "error" not in tools.shutdown_sandbox()


main("agno", "e2b", "e2b-code-interpreter")
