"""The proxy in front of jobs: HTTPS outside, a job's port inside.

It does what the one of the Hub does and no more: ends TLS; leads each request to the job that its
host name says, if it carries the bearer token of the job's owner; and passes bytes on, both ways, as
they come. Each request of a kept connection is looked at, so one cannot follow another in.
"""

import asyncio
import json
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Callable

PIECE = 65536


class Refused(Exception):
    """An answer of the proxy's own."""

    def __init__(self, status: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode() + body


class Front:
    """Listens on a free port, with a certificate made for this run."""

    def __init__(self, directory: Path, domain: str, token: str) -> None:
        self.certificate = directory / "certificate.pem"
        key = directory / "key.pem"
        words = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={domain} -addext"
        subprocess.run(
            ["openssl", "req", *words.split(), f"subjectAltName=DNS:*.{domain}"]
            + ["-keyout", key, "-out", self.certificate],
            check=True,
            capture_output=True,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        # No session tickets. They arrive after the handshake, and OpenSSL handles them in the read
        # that finds them. If another thread of the client writes meanwhile, as one of
        # `websockets.sync` does, OpenSSL can drop what it writes, and the client waits for ever.
        self._context.num_tickets = 0
        self._bearer = f"Bearer {token}"
        self._jobs: dict[str, tuple[Callable[[], socket.socket], int]] = {}
        # Connections that a job ended, not the client.
        self.ended_by_jobs = 0
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = listener.getsockname()[1]
        threading.Thread(
            target=lambda: asyncio.run(self._listen(listener)), name="front", daemon=True
        ).start()

    def lead(self, name: str, new_socket: Callable[[], socket.socket], port: int) -> str:
        """Leads the host name to this port, as such sockets reach it; returns its URL."""
        self._jobs[name] = (new_socket, port)
        return f"https://{name}:{self.port}"

    async def _listen(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, ssl=self._context)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked, back, answers = None, None, None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                headers = headers_of(head)
                name = self._admit(headers)
                if back is None:
                    asked = name
                    back_reader, back = await self._connect(name)
                    answers = asyncio.create_task(self._answer(back_reader, writer))
                elif name != asked:
                    raise Refused("421 Misdirected Request", "another job's name")
                back.write(head)
                if "upgrade" in headers:
                    await pass_on(reader, back)
                else:
                    await pass_on_body(headers, reader, back)
        except Refused as refused:
            writer.write(refused.answer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            # One side has gone, or never spoke HTTP.
            pass
        finally:
            if back is not None:
                back.close()
            if answers is not None:
                answers.cancel()
            writer.close()

    async def _answer(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes a job's answers on until the job ends the connection, and then ends it too."""
        await pass_on(back, writer)
        self.ended_by_jobs += 1
        writer.close()

    def _admit(self, headers: dict[str, str]) -> str:
        """The job that a request asks for; the request must be its owner's."""
        if headers.get("authorization") != self._bearer:
            raise Refused("401 Unauthorized", "the proxy wants the token of the job's owner")
        name = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        if name not in self._jobs:
            raise Refused("404 Not Found", "no such job")
        return name

    async def _connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        new_socket, port = self._jobs[name]
        try:
            back = new_socket()
            back.setblocking(False)
            await asyncio.get_running_loop().sock_connect(back, ("127.0.0.1", port))
        except OSError as error:
            # Also a machine that is no more.
            raise Refused("502 Bad Gateway", "nothing listens in the job") from error
        return await asyncio.open_connection(sock=back)


def headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.lower(): value.strip() for name, value in pairs}


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes everything on as it comes, until one side ends."""
    try:
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


async def pass_on_body(
    headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Passes a request's body on, and nothing of the next request."""

    async def exactly(size: int) -> None:
        while size > 0:
            data = await reader.readexactly(min(size, PIECE))
            writer.write(data)
            await writer.drain()
            size -= len(data)

    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            writer.write(line)
            size = int(line.split(b";")[0], 16)
            if size == 0:
                break
            await exactly(size + 2)
        while line != b"\r\n":
            line = await reader.readuntil(b"\r\n")
            writer.write(line)
    else:
        await exactly(int(headers.get("content-length", "0")))
    await writer.drain()
