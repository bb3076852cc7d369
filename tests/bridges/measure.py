"""Measures the bridges on an otherwise idle machine: `python3 tests/bridges/measure.py [plain|ipython|node|bash]...`

Prints the start to ready against the bare interpreter, the median of `1+1` again, and 10 MB in lines of 100 bytes against
the same program at a pipe, in milliseconds.
"""
import os
import statistics
import subprocess
import sys
import time

from harness import BASH, NODE, PYTHON, BashContext, NodeContext, PythonContext

LINES = {
    "plain": "for i in range(100000): print('x' * 99)",
    "node": "for (let i = 0; i < 100000; i++) console.log('x'.repeat(99))",
    "bash": "x=$(printf %099d 0); for ((i = 0; i < 100000; i++)); do echo $x; done",
}
# Python at a pipe, line by line as at a terminal, which is what a context promises.
BARE_PYTHON = "import sys; sys.stdout.reconfigure(line_buffering=True)\n"


def milliseconds(work):
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def pipe(command):
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    while os.read(child.stdout.fileno(), 65536):
        pass
    child.wait()
    child.stdout.close()


def measure(name):
    make = {"node": NodeContext, "bash": BashContext}.get(name) or (lambda: PythonContext(name))
    lines, one = LINES.get(name, LINES["plain"]), "echo 1" if name == "bash" else "1+1"
    bare = {"node": [NODE, "-e"], "bash": [BASH, "-c"]}.get(name, [PYTHON, "-c"])
    nothing = "import IPython" if name == "ipython" else ""
    starts, bares = [], []
    for _ in range(10):
        bares.append(milliseconds(lambda: pipe(bare + [nothing])))
        contexts = []
        starts.append(milliseconds(lambda: contexts.append(make())))
        contexts[0].close()
    context = make()
    again = [milliseconds(lambda: context.run(one)) for _ in range(500)][50:]
    ours = min(milliseconds(lambda: context.run(lines)) for _ in range(3))
    context.close()
    prefix = BARE_PYTHON if bare[0] == PYTHON else ""
    theirs = min(milliseconds(lambda: pipe(bare + [prefix + lines])) for _ in range(3))
    empty = statistics.median(bares) if nothing == "" else 0
    print(
        "%-8s start %.0f (bare %.0f), 1+1 again %.2f, 10 MB %.0f (bare %.0f)"
        % (name, statistics.median(starts), statistics.median(bares), statistics.median(again), ours, theirs - empty),
        flush=True,
    )


for name in sys.argv[1:] or ["plain", "ipython", "node", "bash"]:
    measure(name)
