"""The `websockets` client against a server behind the port proxy.

    python proxied_websockets.py <ws:// address of the proxied server> <token>

Plain asserts; the exit status is 0 only if all of them held.
"""

import asyncio
import json
import random
import sys

import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus

URL, TOKEN = sys.argv[1], sys.argv[2]
HEADERS = {"X-Sandbox-Token": TOKEN, "Authorization": "Bearer hf_secret"}


def connect(**options):
    return websockets.connect(f"{URL}/ws", additional_headers=HEADERS, max_size=None, **options)


async def told(socket):
    return json.loads(await socket.recv())


async def text_and_binary_come_back():
    async with connect() as socket:
        seen = await told(socket)
        assert "x-sandbox-token" not in seen["headers"], seen
        assert "authorization" not in seen["headers"], seen
        assert seen["host"].startswith("localhost:"), seen
        for message in ["", "hello", "naïve ☃", "x" * 100_000]:
            await socket.send(message)
            assert await socket.recv() == message
        for size in [0, 1, 125, 126, 65_535, 65_536, 5_000_000]:
            data = random.Random(size).randbytes(size)
            await socket.send(data)
            assert await socket.recv() == data
        pong = await socket.ping()
        await asyncio.wait_for(pong, 10)


async def either_side_can_close():
    async with connect() as socket:
        await told(socket)
        await socket.send("please close")
        try:
            await socket.recv()
        except ConnectionClosed as closed:
            assert closed.rcvd.code == 4001, closed
        else:
            raise AssertionError("not closed")
    socket = await connect()
    await told(socket)
    await socket.close(code=4002)
    assert socket.close_code == 4002, socket.close_code


async def many_at_once():
    here = 0
    all_are_here = asyncio.Event()

    async def one(number):
        nonlocal here
        async with connect() as socket:
            await told(socket)
            for round in range(3):
                await socket.send(f"{number} {round}")
                assert await socket.recv() == f"{number} {round}"
            here += 1
            if here == 200:
                all_are_here.set()
            await all_are_here.wait()
            await socket.send("again")
            assert await socket.recv() == "again"

    await asyncio.gather(*(one(number) for number in range(200)))


async def without_the_token_there_is_no_connection():
    try:
        await websockets.connect(f"{URL}/ws")
    except InvalidStatus as error:
        assert error.response.status_code == 403, error
    else:
        raise AssertionError("connected without a token")


async def main():
    await text_and_binary_come_back()
    await either_side_can_close()
    await many_at_once()
    await without_the_token_there_is_no_connection()


asyncio.run(asyncio.wait_for(main(), 120))
