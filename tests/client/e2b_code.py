"""Checks of the E2B SDKs: the code interpreter, from `run_code` to charts."""

import base64
import json
import shutil
import site
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2b_checks import (
    EVERYWHERE,
    HOST,
    PATH,
    Place,
    check,
    eventually,
    fetch,
    need,
    raises,
)

# After the module that prepares for it.
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox


# ---------------------------------------------------------------------------------- code


@check(EVERYWHERE)
def check_code_has_results(at: Place):
    run = at.sbx.run_code
    texts = {"1 + 1": "2", "'a'": "a", "x = 5": None, "None": None, "3;": None, "'☃' * 2": "☃☃"}
    for code, text in texts.items():
        execution = run(code)
        assert execution.text == text and execution.error is None, (code, execution)
        assert [result.is_main_result for result in execution.results] == [True] * (text is not None), code
    assert run("{'a': [1, None], 'b': {'c': 'd'}}").results[0].json == {"a": [1, None], "b": {"c": "d"}}
    assert run("[1, 'two']").results[0].json == [1, "two"]
    counts = [run("1").execution_count for _ in range(2)]
    assert counts[1] == counts[0] + 1, counts
    seen = []
    run("6 * 7", on_result=seen.append)
    assert [result.text for result in seen] == ["42"]


@check(EVERYWHERE)
def check_code_has_output(at: Place):
    out, err, home = [], [], at.home

    def on_stdout(message):
        out.append(message)
        (home / "go").touch()

    code = "import os, sys, time\nprint('first', flush=True)\nprint('oops', file=sys.stderr)\n"
    code += f"while not os.path.exists({str(home / 'go')!r}): time.sleep(0.02)\nprint('last')"
    execution = at.sbx.run_code(code, on_stdout=on_stdout, on_stderr=err.append, timeout=30)
    assert "".join(m.line for m in out) == "".join(execution.logs.stdout) == "first\nlast\n", (out, execution)
    assert "".join(m.line for m in err) == "".join(execution.logs.stderr) == "oops\n", (err, execution)
    assert all(m.timestamp and m.error is False for m in out) and all(m.error is True for m in err)
    # What ends a line for some readers is not the end of an event.
    odd = "a\u2028b\u2029c\x85d\x0ce\x1cf\rg"
    assert "".join(at.sbx.run_code(f"print({odd!r}, end='')").logs.stdout) == odd
    big = at.sbx.run_code("print('x' * 3_000_000)").logs.stdout
    assert "".join(big) == "x" * 3_000_000 + "\n", sum(map(len, big))


@check(EVERYWHERE)
def check_code_has_errors(at: Place):
    errors = []
    execution = at.sbx.run_code("def f():\n    raise ValueError('no ☃')\nf()", on_error=errors.append)
    error = execution.error
    assert (error.name, error.value) == ("ValueError", "no ☃") and errors == [error], error
    assert "f()" in error.traceback and "ValueError: no ☃" in error.traceback, error.traceback
    assert "\x1b" not in error.traceback and isinstance(error.traceback, str), error.traceback
    assert at.sbx.run_code("(").error.name == "SyntaxError"
    assert at.sbx.run_code("1 + 1").text == "2"


@check(EVERYWHERE)
def check_code_keeps_state_in_contexts(at: Place):
    sbx = at.sbx
    sbx.run_code("import math\nx = 1")
    assert sbx.run_code("x + math.floor(1.5)").text == "2"
    assert sbx.run_code("import os; os.getcwd()").text == str(at.home)
    sbx.files.make_dir("work")
    context = sbx.create_code_context(cwd=f"{at.home}/work")
    assert context.id and context.language == "python" and context.cwd == f"{at.home}/work", context
    assert sbx.run_code("import os; os.getcwd()", context=context).text == f"{at.home}/work"
    assert sbx.run_code("x", context=context).error.name == "NameError"
    sbx.run_code("x = 'mine'", context=context)
    assert (sbx.run_code("x", context=context).text, sbx.run_code("x").text) == ("mine", "1")
    assert context.id in [one.id for one in sbx.list_code_contexts()]
    sbx.restart_code_context(context)
    assert sbx.run_code("x", context=context).error.name == "NameError"
    sbx.remove_code_context(context.id)
    assert context.id not in [one.id for one in sbx.list_code_contexts()]
    raises(NotFoundException, sbx.run_code, "1", context=context)
    raises(SandboxException, sbx.remove_code_context, context)
    raises(SandboxException, sbx.restart_code_context, "unknown")


@check(EVERYWHERE)
def check_code_runs_side_by_side_in_contexts(at: Place):
    contexts = [at.sbx.create_code_context() for _ in range(3)]
    code = "import glob, time; open('came.%d', 'w').close()\nwhile len(glob.glob('came.*')) < 3: time.sleep(0.02)\n%d"
    with ThreadPoolExecutor(3) as threads:
        texts = threads.map(lambda n: at.sbx.run_code(code % (n, n), context=contexts[n], timeout=30).text, range(3))
        assert list(texts) == ["0", "1", "2"]
        # In one they come one after the other.
        add = "import time; n = globals().get('n', 0); time.sleep(0.05); n += 1; n"
        texts = threads.map(lambda _: at.sbx.run_code(add, context=contexts[0]).text, range(3))
        assert sorted(texts) == ["1", "2", "3"]


@check(EVERYWHERE)
def check_code_of_other_languages(at: Place):
    sbx = at.sbx
    for language in ("bash", " Bash "):
        assert sbx.run_code("n=${n:-1}; n=$((n+1)); echo $n; echo e >&2", language=language).logs.stderr == ["e\n"]
    assert "".join(sbx.run_code("echo $n", language="bash").logs.stdout) == "3\n"
    for language in ("r", "java", "typescript", "klingon"):
        error = raises(SandboxException, sbx.run_code, "1", language=language, says="python")
        assert "javascript" in str(error) and "bash" in str(error), error
        raises(SandboxException, sbx.create_code_context, language=language)
    need(shutil.which("node", path=PATH), "there is no node")
    for language in ("javascript", "js"):
        execution = sbx.run_code("const x = 20; console.log('out'); x * 2 + 2", language=language)
        assert execution.text == "42" and execution.logs.stdout == ["out\n"], execution
    assert sbx.run_code("({a: [1, 2]})", language="js").results[0].json == {"a": [1, 2]}
    assert sbx.run_code("await Promise.resolve(x)", language="js").text == "20"
    error = sbx.run_code("throw new TypeError('no')", language="js").error
    assert (error.name, error.value) == ("TypeError", "no"), error
    context = sbx.create_code_context(language="javascript")
    assert context.language == "javascript" and sbx.run_code("typeof x", context=context).text == "undefined"


@check(EVERYWHERE)
def check_code_has_variables_for_one_run(at: Place):
    code = "import os; os.environ.get('NAME', 'unset'), os.popen('echo $NAME').read()"
    assert at.sbx.run_code(code, envs={"NAME": "one ☃"}).text == "('one ☃', 'one ☃\\n')"
    assert at.sbx.run_code(code).text == "('unset', '\\n')"


@check(EVERYWHERE)
def check_code_is_interrupted_by_its_timeout(at: Place):
    at.sbx.run_code("x = 'kept'")
    started = time.monotonic()
    raises(TimeoutException, at.sbx.run_code, "import time\nfor _ in range(1000): time.sleep(0.1)", timeout=2)
    assert at.sbx.run_code("x", timeout=15).text == "kept"
    assert time.monotonic() - started < 15


@check(EVERYWHERE)
def check_code_displays(at: Place):
    # Without IPython `display` is a built-in function.
    code = "try:\n    from IPython.display import display\nexcept ImportError:\n    pass\n"
    code += "class Bold:\n    def _repr_html_(self): return '<b>bold</b>'\ndisplay(Bold())\ndisplay({'a': 1})\n7"
    results = at.sbx.run_code(code).results
    assert [result.is_main_result for result in results] == [False, False, True], results
    assert results[0].html == "<b>bold</b>" and results[1].json == {"a": 1} and results[2].text == "7", results
    formats = {"html": "<i>", "markdown": "# m", "svg": "<svg/>", "latex": "$x$", "javascript": "f()"}
    formats |= {name: b"\x89bytes" for name in ("png", "jpeg", "pdf")} | {"json": {"k": [1]}}
    body = "".join(f"    def _repr_{name}_(self): return {value!r}\n" for name, value in formats.items())
    (result,) = at.sbx.run_code(f"class Rich:\n{body}    def __repr__(self): return 'rich'\nRich()").results
    for name, value in formats.items():
        found = result[name]
        assert (base64.b64decode(found) if isinstance(value, bytes) else found) == value, (name, found)
    assert result.text == "rich" and result.extra is None, result
    bundle = {"text/plain": "own", "application/x-own": "data"}
    (result,) = at.sbx.run_code(f"class Own:\n    def _repr_mimebundle_(self, **_): return {bundle!r}\nOwn()").results
    assert result.text == "own" and result.extra == {"application/x-own": "data"}, result
    assert at.sbx.run_code("import asyncio\nawait asyncio.sleep(0.01, 'awaited')").text == "awaited"
    assert "".join(at.sbx.run_code("!echo from a shell").logs.stdout) == "from a shell\n"
    at.sbx.run_code("%cd /")
    assert at.sbx.run_code("import os; os.getcwd()").text == "/"
    assert "".join(at.sbx.run_code("%%bash\necho $((40 + 2))").logs.stdout) == "42\n"


CHARTS = {
    "line": (
        "plt.plot([1, 2, 3], [1, 4, 9], label='squares'); plt.xlabel('time (s)'); plt.title('Moves')",
        lambda c: c.x_unit == "s" and c.x_scale.value == "linear" and c.title == "Moves"
        and c.elements[0].label == "squares" and c.elements[0].points == [(1, 1), (2, 4), (3, 9)],
    ),
    "scatter": ("plt.scatter([1, 2], [3, 4])", lambda c: c.elements[0].points == [(1, 3), (2, 4)]),
    "bar": (
        "plt.bar(['a', 'b'], [3, 5])",
        lambda c: [(one.label, float(one.value)) for one in c.elements] == [("a", 3), ("b", 5)],
    ),
    "pie": (
        "plt.pie([1, 3], labels=['one', 'three'])",
        lambda c: [(one.label, round(one.angle)) for one in c.elements] == [("one", 90), ("three", 270)],
    ),
    # Without boxes of their own, E2B takes them for lines too.
    "box_and_whisker": ("plt.boxplot([[1, 2, 3, 4, 5]], patch_artist=True)", lambda c: c.elements[0].median == 3),
    "superchart": (
        "one, two = plt.subplots(1, 2)[1]; one.plot([1, 2], [3, 4]); two.bar(['x'], [1])",
        lambda c: [one.type.value for one in c.elements] == ["line", "bar"],
    ),
}


@check(EVERYWHERE)
def check_code_draws_charts_and_tables(at: Place):
    modules = Path(site.getsitepackages()[0])
    for name in ("matplotlib", "pandas"):
        need((modules / name).exists(), f"{name} is not installed")
    if at.mode == "host":
        # A sandbox can read its home only. Links are made faster; they cannot lead to another file system.
        lent = at.home / "modules"
        for how in ("-al", "-a"):
            if subprocess.run(["cp", how, modules, lent], stderr=subprocess.DEVNULL).returncode == 0:
                break
        modules = lent
    begin = f"import sys; sys.path.insert(0, {str(modules)!r})\n"
    probe = at.sbx.run_code(f"{begin}import matplotlib.pyplot as plt, pandas as pd")
    need(not probe.error, f"the machine's python3 cannot use them: {probe.error and probe.error.value}")
    for kind, (code, right) in CHARTS.items():
        execution = at.sbx.run_code(f"{code}\nplt.show()")
        assert execution.error is None, execution.error.traceback
        (result,) = execution.results
        assert base64.b64decode(result.png).startswith(b"\x89PNG\r\n"), kind
        assert result.chart and result.chart.type.value == kind, (kind, result.chart and result.chart.to_dict())
        assert right(result.chart), (kind, result.chart.to_dict())
    code = "pd.DataFrame({'n': [1, 2], 's': ['x', 'y'], 't': pd.to_datetime(['2020-01-02', '2020-01-03'])})"
    (result,) = at.sbx.run_code(code).results
    assert "<table" in result.html and "n" in result.text, result
    assert result.data["n"] == [1, 2] and result.data["s"] == ["x", "y"], result.data
    assert [moment[:10] for moment in result.data["t"]] == ["2020-01-02", "2020-01-03"], result.data


@check([("host", "sync"), ("debug", "async")])
def check_code_that_is_quiet_keeps_its_connection(at: Place):
    """12 seconds without output, as the SDK sees them and as they are on the wire."""
    sbx = at.sbx
    code = "import time; time.sleep(12); print('spoke'); 'woke'"
    context = sbx.create_code_context()
    headers = {"Content-Type": "application/json", "E2b-Sandbox-Id": sbx.sandbox_id, "E2b-Sandbox-Port": "49999"}
    if sbx._envd_access_token:
        headers["X-Access-Token"] = sbx._envd_access_token
    body = json.dumps({"code": code, "context_id": context.id, "language": None, "env_vars": None}).encode()
    with ThreadPoolExecutor(1) as threads:
        through_the_sdk = threads.submit(sbx.run_code, code)
        status, answer = fetch(f"{at.server.url}/execute", body, **headers)
        execution = through_the_sdk.result()
    assert status == 200 and execution.text == "woke" and execution.logs.stdout == ["spoke\n"], execution
    types = [json.loads(line)["type"] for line in answer.decode().removesuffix("\n").split("\n")]
    assert types[0] == "number_of_executions" and types[-1] == "end_of_execution", types
    assert 2 <= types.count("keepalive") <= 4 and {"stdout", "result"} <= set(types), types


@check(HOST)
def check_code_after_the_end_raises(at: Place):
    assert at.sbx.run_code("1").text == "1"
    ends = []

    def run():
        try:
            code = "import time; print('runs', flush=True); time.sleep(1000)"
            ends.append(at.sbx.run_code(code, on_stdout=started.append).error)
        except Exception as error:
            ends.append(error)

    started: list = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    eventually("it runs", lambda: started)
    at.sbx.kill()
    thread.join(20)
    # Older releases do not ask whether the sandbox runs.
    asks = hasattr(Sandbox, "_handle_connection_error")
    assert ends and isinstance(ends[0], TimeoutException if asks else Exception), ends
    raises(TimeoutException, at.sbx.run_code, "1", says="not found")
