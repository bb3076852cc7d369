"""Many sandboxes on few machines, with the `SandboxPool` of `huggingface_hub` 1.22 or later.

    pip install huggingface_hub
    hf auth login                # or: export HF_TOKEN=hf_...
    python examples/sandbox_pool.py

A pool starts Hugging Face Jobs in host mode and places up to `sandboxes_per_host` sandboxes on each.
The client handles the tokens: the host's, which it derives from your Hugging Face token, and one for
each sandbox, which the host hands out and which opens that sandbox only.
"""

from concurrent.futures import ThreadPoolExecutor

from huggingface_hub import SandboxPool

TASK = 'echo "task $TASK: user $(id -u), home $(basename $HOME)" | tee result.txt'


def work(number: int) -> str:
    # A sandbox takes under a millisecond to make on the host, so give every task its own.
    sandbox = pool.create(env={"TASK": number}, idle_timeout=600)
    try:
        sandbox.run(TASK, timeout=60)
        # The home is the root of a pooled sandbox's files.
        return sandbox.files.read_text("result.txt")
    finally:
        sandbox.kill()  # Ends its processes and removes its home.


with SandboxPool(image="python:3.12", sandboxes_per_host=20) as pool:
    with ThreadPoolExecutor(max_workers=8) as threads:
        for line in threads.map(work, range(8)):
            print(line, end="")
    print("machines:", pool.num_hosts)
# Leaving the block ends the machines that the pool started.
