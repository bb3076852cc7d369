"""What the scripts of frameworks share: parts that must work, parts that must be refused, and a runner.

A script takes no arguments. `E2B_API_URL`, `E2B_SANDBOX_URL` and `E2B_API_KEY` lead it to a host whose default template is a
Debian with Python, and nothing else does. What it reports ends with a line of counts.
"""

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request

PARTS = []


def part(name: str):
    """A part of a framework that must work."""

    def add(function):
        PARTS.append((name, function, None))
        return function

    return add


def refused(name: str, says: str):
    """A part that must fail with an error that says this; docs/e2b.md lists it."""

    def add(function):
        PARTS.append((name, function, says))
        return function

    return add


def sandboxes() -> list[dict]:
    """The sandboxes of the server, by its own door."""
    token = os.environ["E2B_API_KEY"].removeprefix("e2b_")
    request = urllib.request.Request(f"{os.environ['E2B_API_URL']}/v1/sandboxes", headers={"X-Sandbox-Token": token})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def chain(error: BaseException) -> str:
    """What an error and those that it came from say."""
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error} {vars(error)}")
        error = error.__cause__ or error.__context__
    return "\n".join(said)


async def run(function) -> None:
    result = function()
    if inspect.isawaitable(result):
        await asyncio.wait_for(result, 120)


async def run_all() -> int:
    failures = 0
    for name, function, says in PARTS:
        started = time.monotonic()
        try:
            await run(function)
            wrong = says and "it is not refused any more"
        except Exception as error:
            wrong = None if says and says in chain(error) else traceback.format_exc(limit=-6)[-4000:]
        if wrong:
            failures += 1
            print(f"FAIL {name}: {wrong}", flush=True)
        else:
            print(f"{'refused' if says else 'ok'} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    return failures


def main(*packages: str) -> None:
    """Runs all parts, and ends the program. Packages are those whose versions are reported."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    failures = asyncio.run(run_all())
    if left := sandboxes():
        failures += 1
        print("FAIL sandboxes are left:", [one["labels"] for one in left])
    print(f"{versions}: {len(PARTS)} parts, {failures} failed", flush=True)
    # Whatever a framework left in threads does not keep this program.
    os._exit(1 if failures else 0)


if __name__ == "__main__":
    sys.exit("this is no script of a framework")
