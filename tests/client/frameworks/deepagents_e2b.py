"""deepagents with langchain-e2b: what its agents' tools call, and an agent whose model answers with fixed tool calls."""

import e2b
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_e2b import AsyncE2BSandbox, E2BSandbox

from parts import main, part


@part("execute, ls, read, write, edit, grep, glob, upload and download")
def _():
    with e2b.Sandbox.create() as sandbox:
        backend = E2BSandbox(sandbox=sandbox)
        done = backend.execute("id -un; pwd; echo oops >&2; exit 3")
        assert (done.output, done.exit_code) == ("user\n/home/user\n\noops\n", 3), done
        assert backend.execute("sleep 60", timeout=1).exit_code == 124
        assert backend.write("/home/user/notes/a.txt", "one ☃\ntwo\n").error is None
        assert backend.write("/home/user/notes/a.txt", "again").error, "it is there"
        read = backend.read("/home/user/notes/a.txt")
        assert "one ☃" in read.file_data["content"], read
        assert backend.edit("/home/user/notes/a.txt", "two", "three").error is None
        assert [hit["line"] for hit in backend.grep("three", path="/home/user").matches] == [2]
        assert [file["path"] for file in backend.glob("**/*.txt", path="/home/user").matches], "none is found"
        assert "/home/user/notes/a.txt" in [entry["path"] for entry in backend.ls("/home/user/notes").entries]
        data = bytes(range(256)) * 1000
        assert backend.upload_files([("/tmp/x/bytes", data), ("relative", b"")])[1].error == "invalid_path"
        found, missing, folder = backend.download_files(["/tmp/x/bytes", "/tmp/none", "/tmp"])
        assert found.content == data and (missing.error, folder.error) == ("file_not_found", "is_directory")


class Model(GenericFakeChatModel):
    def bind_tools(self, *args, **words):
        return self


@part("an agent that writes a file, runs it and reads what it wrote, with the asynchronous SDK")
async def _():
    calls = [
        ("write_file", {"file_path": "/home/user/six.py", "content": "open('out', 'w').write(str(6 * 7))"}),
        ("execute", {"command": "python3 six.py && cat out"}),
        ("read_file", {"file_path": "/home/user/out"}),
    ]
    messages = [AIMessage("", tool_calls=[{"name": name, "args": args, "id": name}]) for name, args in calls]
    async with await e2b.AsyncSandbox.create() as sandbox:
        model = Model(messages=iter([*messages, AIMessage("done")]))
        agent = create_deep_agent(model=model, backend=AsyncE2BSandbox(sandbox=sandbox))
        result = await agent.ainvoke({"messages": [("user", "Run it.")]})
        said = {message.name: message.text for message in result["messages"] if message.type == "tool"}
        assert "42" in said["execute"] and "42" in said["read_file"], said


main("deepagents", "langchain-e2b", "e2b")
