"""One sandbox on a machine of its own: a Hugging Face Job, with `huggingface_hub` 1.22 or later.

    pip install huggingface_hub httpx
    hf auth login                # or: export HF_TOKEN=hf_...
    python examples/sandbox.py

There is no sandbox token to copy. The client derives it from your Hugging Face token, and starts the
server with it.
"""

import time

import httpx
from huggingface_hub import Sandbox
from huggingface_hub.errors import SandboxCommandError

with Sandbox.create(image="python:3.12", idle_timeout=600) as sandbox:
    # Output arrives while the command runs, and is in the result as well.
    result = sandbox.run(
        "for n in 1 2 3; do echo line $n; sleep 0.2; done",
        on_stdout=lambda text: print(text, end="", flush=True),
    )
    print("exit code", result.exit_code)

    # A command that fails raises, unless you pass check=False.
    try:
        sandbox.run(["sh", "-c", "echo no such luck >&2; exit 3"])
    except SandboxCommandError as error:
        print("failed:", error.result.stderr.strip())

    # Files. A relative path starts from the working directory of the image.
    sandbox.files.write("site/hello.txt", "hello from huggingface_hub\n")
    print(sandbox.files.read_text("site/hello.txt"), end="")

    # A server in the background, reached through the port proxy.
    server = sandbox.run(["python3", "-m", "http.server", "18182"], cwd="site", background=True)
    url, headers = sandbox.proxy_url_for(18182, "/hello.txt"), sandbox.proxy_headers
    while (response := httpx.get(url, headers=headers)).status_code == 502:
        time.sleep(0.1)  # It does not listen yet.
    print("through the proxy:", response.text, end="")
    server.kill()
    sandbox.files.delete("site", recursive=True)
# Leaving the block ends the machine.
