"""Follows the output of a command with plain `httpx`, and resumes it when the connection breaks.

    pip install httpx
    export URL=http://127.0.0.1:49983   # where the server listens
    export TOKEN=...                    # its SBX_TOKEN; scripts/run prints both lines
    python examples/stream_resume.py

The process runs in the background, so a lost connection does not stop it, and the server keeps its
output. Every event names the position of its bytes; a new request continues after the last one.
"""

import json
import os
import time
import uuid

import httpx

client = httpx.Client(
    base_url=os.environ["URL"],
    headers={"X-Sandbox-Token": os.environ["TOKEN"]},
    timeout=30,  # Between bytes. A quiet stream sends a ping every 15 seconds.
)


def start(command: str) -> str:
    """Starts a process in the background and returns its id."""
    # An id of our own makes this request safe to repeat: it never starts a second process.
    body = {"cmd": command, "id": f"job-{uuid.uuid4()}"}
    client.post("/v1/processes", json=body).raise_for_status()
    return body["id"]


def follow(process_id: str):
    """Yields every event of a process from its first byte to its exit, each byte once."""
    received = {"stdout": 0, "stderr": 0}
    while True:
        offsets = {f"{stream}_offset": offset for stream, offset in received.items()}
        path, query = f"/v1/processes/{process_id}/logs", {"follow": 1, **offsets}
        try:
            with client.stream("GET", path, params=query) as response:
                response.raise_for_status()
                for event in map(json.loads, response.iter_lines()):
                    if event["event"] in received:
                        received[event["event"]] = event["offset"] + event["bytes"]
                    yield event
                    if event["event"] == "exit":
                        return
        except httpx.TransportError as error:
            print(f"connection lost ({type(error).__name__}), resuming at {received}", flush=True)
            time.sleep(0.2)


for event in follow(start("for n in $(seq 1 10); do echo line $n; sleep 0.1; done")):
    if event["event"] == "stdout":
        print(event["data"], end="", flush=True)
    elif event["event"] == "exit":
        print("exit code", event["exit_code"])
