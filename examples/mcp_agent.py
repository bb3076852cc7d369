"""What an agent does all day, over MCP: write a program and its test, run it, read the failure, edit, run again.

MCP_URL and SBX_TOKEN name the endpoint; on a host the token is that of a sandbox.

pip install "mcp>=2.3"
"""

import asyncio
import os

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

PROGRAM = "def middle(values):\n    return sorted(values)[len(values) // 2 + 1]\n"
TEST = "from stats import middle\nassert middle([3, 1, 2]) == 2, middle([3, 1, 2])\nprint('passed')\n"


async def main():
    headers = {"Authorization": f"Bearer {os.environ['SBX_TOKEN']}"}
    async with httpx2.AsyncClient(headers=headers, timeout=300) as http:
        async with Client(streamable_http_client(os.environ["MCP_URL"], http_client=http)) as sandbox:

            async def call(tool, **arguments):
                result = await sandbox.call_tool(tool, arguments)
                if result.is_error:
                    raise RuntimeError(result.structured_content["error"])
                return result.structured_content

            print("tools:", ", ".join(tool.name for tool in (await sandbox.list_tools()).tools))
            await call("write_file", path="agent/stats.py", content=PROGRAM)
            await call("write_file", path="agent/test_stats.py", content=TEST)
            for attempt in range(1, 4):
                run = await call("run", cmd="python3 test_stats.py", cwd="agent", timeout=60)
                print(f"attempt {attempt}: exit code {run['exit_code']}")
                if run["exit_code"] == 0:
                    print(run["stdout"].strip())
                    break
                # A model would read the failure and the program here, and decide on the edit.
                print(run["stderr"].strip().splitlines()[-1])
                found = await call("grep", pattern="return ", path="agent/stats.py")
                line = found["matches"][0]["line"]
                fixed = "    return sorted(values)[len(values) // 2]\n"
                edited = await call("edit_file", path="agent/stats.py", edits=[{"lines": str(line), "new": fixed}])
                print(edited["diff"].strip())


asyncio.run(main())
