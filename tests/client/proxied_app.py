"""An ASGI application for the tests of the port proxy: `uvicorn proxied_app:app`."""

import asyncio
import hashlib
import json


async def app(scope, receive, send):
    if scope["type"] == "http":
        await http(scope, receive, send)
    elif scope["type"] == "websocket":
        await websocket(scope, receive, send)


async def http(scope, receive, send):
    digest, size, more = hashlib.sha256(), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        digest.update(message.get("body", b""))
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/events":
        await events(send)
        return
    document = {
        "method": scope["method"],
        "raw_path": scope["raw_path"].decode("latin-1"),
        "query": scope["query_string"].decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        "size": size,
        "sha256": digest.hexdigest(),
    }
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def events(send):
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(5):
        event = f"data: {number}\n\n".encode()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0.3)
    await send({"type": "http.response.body", "body": b""})


async def websocket(scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    names = [name.decode("latin-1") for name, _ in scope["headers"]]
    host = dict(scope["headers"])[b"host"].decode("latin-1")
    await send({"type": "websocket.send", "text": json.dumps({"host": host, "headers": names})})
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return
        if message.get("text") == "please close":
            await send({"type": "websocket.close", "code": 4001})
            return
        echo = {key: message[key] for key in ("text", "bytes") if message.get(key) is not None}
        await send({"type": "websocket.send", **echo})
