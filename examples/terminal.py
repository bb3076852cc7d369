"""A shell on the server, at this terminal. The connection may break: the shell goes on, and so does this.

    pip install websockets
    export URL=http://127.0.0.1:49983   # where the server listens
    export TOKEN=...                    # its SBX_TOKEN; scripts/run prints both lines
    python examples/terminal.py

Output comes in binary frames, events in text frames. The offset of the next byte is all that is needed to
return to where the connection broke. The exit status is that of the shell.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import urllib.request

import websockets

URL, TOKEN = os.environ["URL"], os.environ["TOKEN"]
HEADERS = {"X-Sandbox-Token": TOKEN}


def start() -> str:
    """Starts a shell with a terminal of this size and returns its id."""
    columns, rows = shutil.get_terminal_size()
    body = json.dumps({"pty": {"rows": rows, "cols": columns}}).encode()
    request = urllib.request.Request(f"{URL}/v1/processes", body, HEADERS)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["id"]


async def type_into(socket):
    """Sends what is typed here, and the size of this terminal whenever it changes."""
    loop = asyncio.get_running_loop()
    typed = asyncio.Queue()

    def read():
        typed.put_nowait(os.read(0, 4096))

    def resized():
        columns, rows = shutil.get_terminal_size()
        typed.put_nowait(json.dumps({"resize": {"rows": rows, "cols": columns}}))

    loop.add_reader(0, read)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        while message := await typed.get():
            await socket.send(message)
        # The input here has ended.
        loop.remove_reader(0)
        await socket.send(json.dumps({"eof": True}))
        await asyncio.Future()
    finally:
        loop.remove_reader(0)


async def attach(shell: str) -> int:
    """Shows the shell until it ends, however often the connection breaks; returns its exit code."""
    target = URL.replace("http", "ws", 1) + f"/v1/processes/{shell}/attach"
    offset = 0
    while True:
        try:
            async with websockets.connect(
                f"{target}?offset={offset}",
                additional_headers=HEADERS,
                subprotocols=["sbx.pty.v1"],
            ) as socket:
                typing = asyncio.create_task(type_into(socket))
                try:
                    async for message in socket:
                        if isinstance(message, bytes):
                            offset += len(message)
                            sys.stdout.buffer.write(message)
                            sys.stdout.buffer.flush()
                            continue
                        event = json.loads(message)
                        if event["event"] == "dropped":
                            offset += event["bytes"]
                        elif event["event"] == "exit":
                            return event["exit_code"] if event["signal"] is None else 128 + event["signal"]
                finally:
                    typing.cancel()
        except (OSError, websockets.exceptions.ConnectionClosed):
            await asyncio.sleep(1)


def main() -> int:
    shell = start()
    if not sys.stdin.isatty():
        return asyncio.run(attach(shell))
    import termios
    import tty

    settings = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        return asyncio.run(attach(shell))
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


sys.exit(main())
