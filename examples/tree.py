"""A folder up, only what has changed up, and the result down, each in one request. Python alone
(3.12, or an older one with the security fixes of June 2023: it needs the filters of tarfile).

    export URL=http://127.0.0.1:49983 TOKEN=...
    python3 examples/tree.py
"""

import json
import os
import pathlib
import tarfile
import tempfile
import urllib.parse
import urllib.request


def call(method, route, data=None, **query):
    """Sends a request to the sandbox; the response is a file to read."""
    url = f"{os.environ['URL']}/v1/{route}?{urllib.parse.urlencode(query)}"
    headers = {"X-Sandbox-Token": os.environ["TOKEN"]}
    return urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method))


def upload(folder, path, names):
    """Sends these files and directories of a folder. A file as the body is sent as it is read."""
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for name in names:
                tar.add(folder / name, name)
        archive.seek(0)
        with call("PUT", "files/archive", archive, path=path) as response:
            return json.load(response)


def changed(folder, path):
    """The files that the sandbox does not have, or not like this."""
    entries = []
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            status = file.stat()
            name = file.relative_to(folder).as_posix()
            time = status.st_mtime_ns // 1_000_000
            entries.append({"path": name, "size": status.st_size, "mtime_ms": time})
    body = json.dumps({"path": path, "entries": entries}).encode()
    with call("POST", "files/compare", body) as response:
        answer = json.load(response)
    return answer["missing"] + answer["different"]


def download(path, folder):
    """Unpacks a directory of the sandbox as it arrives. An archive that breaks off raises an error."""
    with call("GET", "files/archive", path=path, format="tar.gz") as response:
        with tarfile.open(fileobj=response, mode="r|gz") as tar:
            # Whoever controls the sandbox made the names: this filter keeps them in the folder.
            tar.extractall(folder, filter="data")


with tempfile.TemporaryDirectory() as directory:
    project, result = pathlib.Path(directory, "project"), pathlib.Path(directory, "result")
    (project / "src").mkdir(parents=True)
    (project / "src/main.py").write_text("print('hello')\n")
    (project / "notes.txt").write_text("one\n")
    print(upload(project, "project", ["."])["files"], "files up")

    (project / "notes.txt").write_text("one\ntwo\n")
    print("changed:", changed(project, "project"))
    upload(project, "project", changed(project, "project"))
    print("changed:", changed(project, "project"))

    download("project", result)
    print((result / "notes.txt").read_text(), end="")
    call("DELETE", "files/delete", path="project", recursive=1)
