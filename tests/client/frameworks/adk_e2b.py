"""google-adk: its own environment in E2B, and the tools of E2B's plugin for it."""

from unittest.mock import Mock

from e2b_adk import E2BPlugin
from google.adk.integrations.e2b import E2BEnvironment

from parts import main, part


@part("E2BEnvironment: execute, read_file, write_file, and a new sandbox for one that has ended")
async def _():
    environment = E2BEnvironment(env_vars={"WORD": "x y"})
    await environment.initialize()
    try:
        done = await environment.execute("id -un; pwd; echo $WORD; exit 3")
        assert (done.stdout, done.exit_code) == ("user\n/home/user\nx y\n", 3), done
        assert (await environment.execute("sleep 60", timeout=1)).timed_out
        await environment.write_file("dir/file", "text ☃\n")
        assert await environment.read_file("/home/user/dir/file") == "text ☃\n".encode()
        try:
            await environment.read_file("none")
            raise AssertionError("it is read")
        except FileNotFoundError:
            pass
        await environment._sandbox.kill()
        assert (await environment.execute("ls")).stdout == ""
    finally:
        await environment.close()


@part("the plugin's tools: commands, in the background too, code and files")
async def _():
    plugin = E2BPlugin(timeout=60)
    tools = {tool.name: tool for tool in plugin.get_tools()}

    async def call(name, **args):
        return await tools[name].run_async(args=args, tool_context=Mock())

    try:
        told = await call("run_command", command="id -un")
        assert "user\n" in str(told.get("stdout")), told
        assert "42" in str(await call("run_code", code="6 * 7")), "the value of the last line"
        assert "ZeroDivisionError" in str(await call("run_code", code="1 / 0"))
        await call("write_file", path="/home/user/dir/file", content="text\n")
        told = await call("read_file", path="/home/user/dir/file")
        assert told["content"] == "text\n", told
        assert "file" in str(await call("list_files", path="/home/user/dir"))
        assert "error" not in await call("start_background_command", command="sleep 1000")
    finally:
        await plugin.close()


main("google-adk", "e2b-adk", "e2b", "e2b-code-interpreter")
