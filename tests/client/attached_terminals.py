"""The `websockets` client at terminals of the server itself.

    python attached_terminals.py <http:// address of the server> <token>

Plain asserts; the exit status is 0 only if all of them held.
"""

import asyncio
import hashlib
import json
import random
import sys
import urllib.request

import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus

URL, TOKEN = sys.argv[1], sys.argv[2]
HEADERS = {"X-Sandbox-Token": TOKEN}


def start(command):
    body = json.dumps({"cmd": command, "pty": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/processes", body, HEADERS)) as reply:
        return json.load(reply)["id"]


def connect(process, query="", **options):
    url = f"{URL.replace('http', 'ws', 1)}/v1/processes/{process}/attach?{query}"
    return websockets.connect(url, additional_headers=HEADERS, subprotocols=["sbx.pty.v1"], **options)


async def a_conversation():
    process = start("read line; echo \"got $line\"; stty size; exit 3")
    async with connect(process, "rows=11&cols=33") as socket:
        assert socket.subprotocol == "sbx.pty.v1"
        attached = json.loads(await socket.recv())
        assert attached == {"event": "attached", "id": process, "offset": 0, "rows": 11, "cols": 33, "mode": "rw"}
        pong = await socket.ping()
        await asyncio.wait_for(pong, 10)
        # In fragments.
        await socket.send([b"some ", b"", b"text", b"\n"])
        output, events = b"", []
        try:
            while True:
                message = await socket.recv()
                if isinstance(message, bytes):
                    output += message
                else:
                    events.append(json.loads(message))
        except ConnectionClosed as closed:
            assert (closed.rcvd.code, closed.rcvd.reason) == (1000, "exit 3"), closed
    assert b"got some text\r\n11 33\r\n" in output, output
    assert [event["event"] for event in events] == ["live", "exit"], events
    assert events[-1]["exit_code"] == 3


async def the_client_closes():
    process = start("read line")
    socket = await connect(process)
    await socket.close(code=4002)
    assert socket.close_code == 4002, socket.close_code


async def large_messages():
    process = start("stty raw -echo; echo ready; head -c 1048576 | sha256sum; read line")
    async with connect(process) as socket:
        data = random.Random(1).randbytes(1 << 20)
        shown = b""
        while b"ready" not in shown:
            message = await socket.recv()
            shown += message if isinstance(message, bytes) else b""
        await socket.send(data)
        expected = hashlib.sha256(data).hexdigest().encode()
        while expected not in shown:
            message = await socket.recv()
            shown += message if isinstance(message, bytes) else b""
        try:
            await socket.send(bytes((1 << 20) + 1))
            while True:
                await socket.recv()
        except ConnectionClosed as closed:
            assert closed.rcvd.code == 1009, closed


async def reconnecting_loses_and_repeats_nothing():
    """5 MB through connections that break off at random places."""
    script = "import hashlib, sys; w = sys.stdout.buffer.write; n = 0\nwhile n < 5_000_000: b = hashlib.sha256(str(n).encode()).hexdigest().encode() * 8; w(b); n += len(b)"
    process = start(["python3", "-c", script])
    chance = random.Random(5)
    offset, output, breaks, exit_event = 0, bytearray(), 0, None
    while exit_event is None:
        most = chance.randrange(1, 400_000)
        try:
            async with connect(process, f"offset={offset}", max_size=None) as socket:
                taken = 0
                async for message in socket:
                    if isinstance(message, str):
                        event = json.loads(message)
                        assert event["event"] != "dropped", event
                        if event["event"] == "attached":
                            assert event["offset"] == offset
                        if event["event"] == "exit":
                            exit_event = event
                        continue
                    output += message
                    offset += len(message)
                    taken += len(message)
                    if taken > most:
                        breaks += 1
                        socket.transport.abort()
                        break
        except ConnectionClosed:
            pass
    expected, number = bytearray(), 0
    while number < 5_000_000:
        block = hashlib.sha256(str(number).encode()).hexdigest().encode() * 8
        expected += block
        number += len(block)
    assert output == expected, (len(output), len(expected))
    assert breaks > 5 and exit_event["exit_code"] == 0, (breaks, exit_event)


async def a_refusal_is_an_answer():
    try:
        await connect("nothing")
    except InvalidStatus as error:
        assert error.response.status_code == 404, error
    else:
        raise AssertionError("connected to no process")


async def main():
    await a_conversation()
    await the_client_closes()
    await large_messages()
    await reconnecting_loses_and_repeats_nothing()
    await a_refusal_is_an_answer()


asyncio.run(asyncio.wait_for(main(), 120))
