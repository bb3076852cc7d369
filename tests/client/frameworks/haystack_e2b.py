"""Haystack: the four tools of its toolset for E2B, and an agent whose generator answers with fixed tool calls."""

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import component  # noqa: E402
from haystack.components.agents import Agent  # noqa: E402
from haystack.dataclasses import ChatMessage, ToolCall  # noqa: E402
from haystack_integrations.tools.e2b import E2BToolset  # noqa: E402

from parts import main, part  # noqa: E402


@part("the tools: bash, write, read and list")
def _():
    toolset = E2BToolset()
    toolset.warm_up()
    try:
        tools = {tool.name: tool for tool in toolset}
        told = tools["run_bash_command"].invoke(command="id -un; pwd; exit 3")
        assert "exit_code: 3" in told and "user\n/home/user\n" in told, told
        tools["write_file"].invoke(path="/home/user/dir/file", content="text ☃\n")
        assert tools["read_file"].invoke(path="/home/user/dir/file") == "text ☃\n"
        assert "file" in tools["list_directory"].invoke(path="/home/user/dir")
    finally:
        toolset.close()


@component
class Generator:
    """Asks for each tool once."""

    def __init__(self, calls):
        self.calls = calls

    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage], tools=None, **words):
        if not self.calls:
            return {"replies": [ChatMessage.from_assistant("done")]}
        name, arguments = self.calls.pop(0)
        return {"replies": [ChatMessage.from_assistant(tool_calls=[ToolCall(name, arguments)])]}


@part("an agent with the toolset")
def _():
    toolset = E2BToolset(sandbox_template="base")
    calls = [
        ("write_file", {"path": "/tmp/six.py", "content": "print(6 * 7)"}),
        ("run_bash_command", {"command": "python3 /tmp/six.py"}),
    ]
    try:
        agent = Agent(chat_generator=Generator(calls), tools=toolset)
        agent.warm_up()
        result = agent.run(messages=[ChatMessage.from_user("Run it.")])
        results = [message.tool_call_result.result for message in result["messages"] if message.tool_call_result]
        assert "42\n" in results[1], results
    finally:
        toolset.close()


main("haystack-ai", "e2b-haystack", "e2b")
