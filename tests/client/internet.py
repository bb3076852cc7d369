"""Stands in for the internet: an index of Python packages, a registry of npm, a git server and a web page.

    internet.py DIRECTORY ADDRESS

Serves HTTPS at port 443 and HTTP at port 80 of the address. DIRECTORY has `certificate.pem` and `key.pem`, the wheel
`greeting-1.0-py3-none-any.whl`, the npm package `greeting-1.0.0.tgz`, and the bare repository `greeting.git` with what
git's update-server-info writes. Prints `ready`.
"""

import base64
import hashlib
import http.server
import json
import os
import ssl
import sys
import threading

WHEEL = "greeting-1.0-py3-none-any.whl"
TARBALL = "greeting-1.0.0.tgz"


class Internet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        host = self.headers.get("Host", "").split(":")[0]
        path = self.path.split("?")[0]
        found = self.find(host, path)
        if found is None:
            self.answer(404, "text/plain", b"not here\n")
        else:
            kind, body = found
            self.answer(200, kind, body)

    def find(self, host, path):
        if host == "pypi.org" and path == "/simple/greeting/":
            link = f'<a href="https://files.pythonhosted.org/{WHEEL}">{WHEEL}</a>'
            return "text/html", f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
        if host == "files.pythonhosted.org" and path == f"/{WHEEL}":
            return self.file(WHEEL)
        if host == "registry.npmjs.org" and path == "/greeting":
            return "application/json", self.package()
        if host == "registry.npmjs.org" and path == f"/greeting/-/{TARBALL}":
            return self.file(TARBALL)
        if host == "github.com" and path.startswith("/greeting.git/"):
            return self.file(path[1:])
        if host == "plain.example":
            return "text/plain", b"a page\n"
        return None

    def package(self):
        _, tarball = self.file(TARBALL)
        digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
        dist = {"tarball": f"https://registry.npmjs.org/greeting/-/{TARBALL}", "integrity": f"sha512-{digest}"}
        version = {"name": "greeting", "version": "1.0.0", "dist": dist}
        document = {"name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        return json.dumps(document).encode()

    def file(self, name):
        path = os.path.normpath(os.path.join(DIRECTORY, name))
        if not path.startswith(DIRECTORY + os.sep) or not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return "application/octet-stream", file.read()

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """A client may leave at any time."""


def serve(address, port, context=None):
    server = Server((address, port), Internet)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever).start()


DIRECTORY, ADDRESS = os.path.abspath(sys.argv[1]), sys.argv[2]
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(os.path.join(DIRECTORY, "certificate.pem"), os.path.join(DIRECTORY, "key.pem"))
serve(ADDRESS, 80)
serve(ADDRESS, 443, tls)
print("ready", flush=True)
