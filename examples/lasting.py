"""Sandboxes that rest when nobody uses them, and are found again. Python alone.

    export URL=http://127.0.0.1:49983 TOKEN=...      # of a host: docs/host-mode.md starts one
    python3 examples/lasting.py
"""

import json
import os
import urllib.request


def call(method, route, body=None):
    """Sends a request to the host."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"X-Sandbox-Token": os.environ["TOKEN"]}
    url = f"{os.environ['URL']}/v1/sandboxes{route}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as response:
        return json.load(response)


def show(sandbox):
    print(sandbox["name"], "is", sandbox["state"])


# One for each task: it is paused when nobody has asked anything of it for a minute, and whatever is asked then has it go on.
made = call("POST", "", {
    "name": "task 7",
    "labels": {"team": "data"},
    "idle_timeout_secs": 60,
    "on_idle": "pause",
    "auto_resume": True,
})
route = "/" + made["sandboxes"][0]["id"]
# It counts as long as it runs. A pause keeps it in memory.
call("POST", f"{route}/processes", {"id": "counter", "cmd": "n=0; while sleep 0.01; do n=$((n+1)); echo $n > count; done"})
show(call("POST", f"{route}/pause", {}))

# Whoever comes later, also after a restart of the host, finds it by what is written on it.
for found in call("GET", "?label=team=data&state=paused")["sandboxes"]:
    show(found)

# This request needs a process, so it resumes the sandbox first.
call("POST", f"{route}/processes", {"cmd": "test -s count"})
show(call("GET", route))

# For the night its files are enough. Nothing runs then, and it takes no memory.
call("PATCH", route, {"expires_in_secs": 7 * 24 * 3600, "labels": {"team": "data", "done": "yes"}})
show(call("POST", f"{route}/pause", {"keep": "files"}))
print("processes:", call("GET", f"{route}/processes"))
print("deleted:", call("DELETE", route)["deleted"])
