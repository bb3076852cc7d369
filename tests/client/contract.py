"""Holds a running server against the contract that it serves, by requests that schemathesis makes from it.

    SBX_URL=... SBX_TOKEN=... contract.py

The paths of the server's own mode are driven; in a sandbox made for it, where there are sandboxes. What
commands run is not left to chance: `before_call` puts one of a few harmless ones in the place of every
`cmd`. The file API gets whatever paths come, so a dedicated server has to be one whose machine was
made for this (see tests/suite/contract.rs).

This file is also the module of hooks that schemathesis loads.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

URL, TOKEN = os.environ["SBX_URL"], os.environ["SBX_TOKEN"]

# Each ends within a second, whatever input it is given or denied.
COMMANDS = [
    ["true"],
    "echo out; echo err >&2; exit 3",
    "printf '\\377\\303\\251'",
    ["sleep", "0.3"],
    "(sleep 0.1; kill $$) & exec cat",
    "kill -9 $$",
]

# Few, so that requests meet what others have left.
FILES = ["a", "b", "a", "c/d", "a", "c", "a/e"]

# The same for executions: each is code of every language, if only for its error.
CODES = ["1", "print(1)", "x = 1; x", "'\u00e9\u2028'", "(", "throw"]

# What a network can name.
RULES = ["example.com", "*.example.com:443", "10.0.0.0/8", "@pypi"]

# What is sent where the contract has any bytes: an empty archive, and a patch.
ARCHIVE = bytes(1024)
PATCH = b"--- a/a\n+++ b/a\n@@ -0,0 +1 @@\n+new\n"

# Names as gitignore has them.
PATTERNS = ["**/a", "!b", "{c,d}/*"]

# Parameters that exclude others.
EXCLUSIVE = {
    "lines": ["offset", "length"],
    "offset": ["if_absent", "if_sha256", "hash"],
    "if_absent": ["if_sha256"],
}


def closed(document, schema):
    """The schema without room for what it does not name: whatever the server says, the contract has to
    know. Clients keep that room, for servers to come."""
    if isinstance(schema, list):
        return [closed(document, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and "properties" in schema:
        # Both together are one object, which is closed as a whole.
        *_, name = schema["$ref"].split("/")
        whole = dict(document["components"]["schemas"][name])
        whole["required"] = whole.get("required", []) + schema.get("required", [])
        whole["properties"] = {**whole["properties"], **schema["properties"]}
        schema = whole
    # What is sent to the server may have more than it knows.
    schema = {
        key: value if key == "requestBody" else closed(document, value)
        for key, value in schema.items()
    }
    if schema.get("type") == "object" and "properties" in schema:
        schema["additionalProperties"] = False
    return schema


def driven(document, of_host):
    """The contract as it is for one mode: all paths in full, and without the second name of processes,
    to which the router gives the same handlers."""
    server = document["servers"][1 if of_host else 0]
    inside = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in server.get("variables", {})
    ]
    components = dict(document["components"])
    sent = ("Command", "SandboxRequest", "TerminalRequest", "ContextRequest", "ExecutionRequest")
    components["schemas"] = {
        name: schema if name in sent else closed(document, schema)
        for name, schema in components["schemas"].items()
    }
    components["responses"] = closed(document, components["responses"])
    paths = {}
    for path, item in document["paths"].items():
        if "$ref" in item:
            item = components["pathItems"][item["$ref"].split("/")[-1]]
        item = dict(item)
        servers = [one["url"] for one in item.pop("servers", document["servers"])]
        if server["url"] in servers:
            item["parameters"] = inside + item.get("parameters", [])
            path = server["url"] + path
        # What is behind a port answers as it likes, and may be anything in dedicated mode; what never
        # listens is waited for without end where an odd value takes the place of the timeout; and a
        # watch has no end while its client stays. To attach takes a client of WebSocket.
        left_out = ("/procs", "/proxy", "/ports", "/files/watch", "/attach")
        if not of_host:
            # The interpreters of that machine are none.
            left_out += ("/contexts", "/execute")
        is_left_out = any(f"{part}/" in f"{path}/" for part in left_out)
        if is_left_out or path.startswith(("/v1/sandboxes", "/v1/snapshots")) and not of_host:
            continue
        paths[path] = closed(document, item)
    del components["pathItems"]
    return {**document, "servers": [{"url": "/"}], "paths": paths, "components": components}


def request(method, path, body=None):
    data = json.dumps(body).encode() if body is not None else None
    headers = {"X-Sandbox-Token": TOKEN}
    asked = urllib.request.Request(URL + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        # 400: there is no interpreter.
        if error.code in (400, 404, 409):
            return None
        raise


def main():
    of_host = request("GET", "/health")["mode"] == "host"
    document = driven(request("GET", "/openapi.json"), of_host)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "openapi.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
        command = [sys.executable, "-m", "schemathesis.cli", "run", path]
        command += ["--url", URL, "-H", "X-Sandbox-Token:" + TOKEN]
        command += ["--checks", "all", "--continue-on-failure", "--request-timeout", "20"]
        command += ["--seed", "1", "--no-shrink", "--warnings", "off"]
        # The way to try more, or less: -n 1000, --phases stateful ...
        command += os.environ.get("SBX_SCHEMATHESIS", "-n 5").split()
        environment = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": "contract",
            "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)),
        }
        return subprocess.run(command, env=environment, cwd=directory, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

import schemathesis  # noqa: E402


@schemathesis.deserializer("application/x-ndjson")
def events(_context, response):
    text = response.content.decode()
    # There may be no more events of an execution.
    if not text:
        return []
    assert text.endswith("\n"), text
    return [json.loads(line) for line in text[:-1].split("\n")]


class State:
    calls = 0
    # The sandbox that everything happens in, so that there is something in it to find.
    sandbox = None
    # Whether it may be paused or stopped.
    rests = False


def plain(value):
    """Numbers as a server takes them that tells 1 from 1.0, which JSON Schema does not."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def provide(case, query):
    """Makes what the request asks for."""
    inside = case.path.replace("{sandbox_id}", State.sandbox or "")
    if "{process_id}" in inside:
        started = {"cmd": COMMANDS[State.calls % len(COMMANDS)], "pty": State.calls % 2 == 0}
        process = request("POST", inside.split("/{process_id}")[0], started)
        case.path_parameters["process_id"] = process["id"]
    if "{context_id}" in inside:
        contexts = inside.split("/{context_id}")[0]
        context = request("POST", contexts, {"id": f"made-{State.calls % 3}"})
        if context is not None:
            case.path_parameters["context_id"] = context["id"]
            executions = request("GET", f"{contexts}/{context['id']}/executions")
            if "{execution_id}" in inside and executions:
                case.path_parameters["execution_id"] = executions[-1]["id"]
    for name in ("path", "from", "to"):
        if name in query:
            query[name] = FILES[(State.calls + len(name)) % len(FILES)]
            if "mode" in query:
                query["mode"] = "755"
    # A directory cannot be moved or copied below itself, which the contract says only in words.
    if "to" in query and f"{query['to']}/".startswith(f"{query.get('from')}/"):
        query["to"] = "d"
    if "/files/" in inside and State.calls % 2:
        base = inside.split("/files/")[0] + "/files"
        request("POST", base + "/delete?recursive=1&path=./a")
        request("PUT", base + "/write?path=a", {})


def make_possible(body, is_execution):
    """Makes what the contract says of networks and limits only in words true of a request."""
    network = body.get("network")
    if isinstance(network, dict):
        # It goes with nothing else, which is said only in words.
        network.pop("share", None)
        for name in ("allow", "deny"):
            if network.get(name):
                network[name] = RULES
        if network.get("proxy") is not None:
            network["proxy"] = "http://me:secret@127.0.0.1:9"
            network.pop("socks", None)
        if network.get("socks") is not None:
            network["socks"] = "socks5h://127.0.0.1:9"
    if network not in (None, "open"):
        body.pop("tcp_ports", None)
    if is_execution and not body.get("stateless"):
        # A context keeps what it was made with.
        body.pop("network", None)
    # Not every machine has cgroups.
    body.pop("max_cpu", None)


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Puts something possible where chance would find none, and what the contract says only in words."""
    State.calls += 1
    if State.rests:
        # Else nothing else could be done in it.
        request("POST", f"/v1/sandboxes/{State.sandbox}/resume", {})
    State.rests = case.path.endswith("/pause")
    if "{sandbox_id}/" in case.path and not case.path.endswith("/token"):
        if State.sandbox is None:
            State.sandbox = request("POST", "/v1/sandboxes", {})["sandboxes"][0]["id"]
        case.path_parameters["sandbox_id"] = State.sandbox
    elif case.method == "DELETE" and case.path == "/v1/sandboxes":
        State.sandbox = None
    elif case.method == "DELETE" and case.path == "/v1/sandboxes/{sandbox_id}":
        if case.path_parameters.get("sandbox_id") == State.sandbox:
            State.sandbox = None
    if isinstance(case.body, dict):
        case.body = plain(case.body)
        if isinstance(case.body.get("cmd"), (str, list)):
            command = COMMANDS[State.calls % len(COMMANDS)]
            case.body["cmd"] = command
            if isinstance(case.body.get("shell"), bool):
                case.body["shell"] = isinstance(command, str)
        elif case.body.get("cmd") is case.body.get("code") is None and case.body.get("pty"):
            # Else a shell, which waits for somebody to type.
            case.body["cmd"] = COMMANDS[0]
        if isinstance(case.body.get("code"), str):
            case.body["code"] = CODES[State.calls % len(CODES)]
        if case.meta.generation.mode.is_positive and case.body.get("backend"):
            # That it is one of the language is said only in words.
            case.body["backend"] = "auto"
        if case.meta.generation.mode.is_positive and case.body.get("stateless") is True:
            case.body.pop("context", None)
        if case.meta.generation.mode.is_positive and case.body.get("context"):
            # That it is the one of the context is said only in words.
            case.body.pop("language", None)
        if case.meta.generation.mode.is_positive and "/contexts/" in case.path:
            # That the network is that of the context is said only in words.
            case.body.pop("network", None)
        if isinstance(case.body.get("cwd"), str):
            case.body["cwd"] = "."
        if case.meta.generation.mode.is_positive:
            make_possible(case.body, case.path.endswith("/execute"))
        if case.meta.generation.mode.is_positive and case.path == "/v1/sandboxes":
            # What goes with a root of its own, and which devices and templates there are, is said only in words.
            for name in ("root", "template", "user", "durable", "devices"):
                case.body.pop(name, None)
    query = case.query if isinstance(case.query, dict) else {}
    if State.calls % 3 and case.meta.generation.mode.is_positive:
        provide(case, query)
    if case.path.endswith("/files/read") and case.headers and case.meta.generation.mode.is_positive:
        # A range that begins after the end of the file is 416, which the contract says only in words.
        case.headers.pop("Range", None)
    if case.path.endswith(("/files/read", "/files/write")):
        if "truncate_to" in query:
            query.setdefault("offset", 0)
        for name in ("offset", "truncate_to"):
            if str(query.get(name)).isdecimal():
                # File systems differ in how large a file can be.
                query[name] = int(query[name]) % (1 << 20)
    if "/contexts/" in case.path:
        # What follows the log of an interpreter does so until that ends.
        query.pop("follow", None)
    if case.path.endswith("/events") and case.meta.generation.mode.is_positive:
        query.pop("timeout", None)
    if case.meta.generation.mode.is_positive:
        # What does not go together.
        if "lines" in query:
            query["lines"] = "1-2"
            case.headers = {}
        for name, others in EXCLUSIVE.items():
            for other in others if name in query else ():
                query.pop(other, None)
        # What an answer has to say first.
        if query.get("sort") == "mtime":
            query.pop("after", None)
        # What has a syntax of its own.
        if "pattern" in query:
            query["pattern"] = PATTERNS
        if isinstance(case.body, dict):
            for name in ("glob", "exclude"):
                if case.body.get(name):
                    case.body[name] = PATTERNS
            if "pattern" in case.body:
                case.body["pattern"] = "a|b"
            for edit in case.body.get("edits", []):
                edit.update({"lines": "1"} if edit.get("lines") else {"old": "a"})
        if case.path.endswith("/files/patch"):
            case.body = PATCH
        if case.method == "PUT" and case.path == "/v1/snapshots":
            case.body = ARCHIVE
    if case.path.endswith("/tickets") and case.meta.generation.mode.is_positive:
        # What a port may be depends on the mode, which is said only in words.
        case.body["port"] = 8000
    if case.path.endswith("/files/compare") and case.meta.generation.mode.is_positive:
        # That each path leads into the tree, and is there once, is said only in words.
        for number, entry in enumerate(case.body.get("entries", [])):
            entry["path"] = f"{FILES[number % len(FILES)]}-{number}"
    if case.path.endswith("/files/archive"):
        # That the body is an archive, and that the limits leave room for it, is said only in words.
        if case.method == "PUT" and case.meta.generation.mode.is_positive:
            case.body = ARCHIVE
            for name in ("owners", "max_bytes", "max_files"):
                query.pop(name, None)
            if str(query.get("atomic")) in ("1", "true"):
                query.pop("overwrite", None)
        for name in ("include", "exclude"):
            if name in query and case.meta.generation.mode.is_positive:
                query[name] = PATTERNS
