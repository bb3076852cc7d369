"""Promises of interpreter contexts that the plain Python bridge keeps."""
import os
import signal
import time
import unittest

from harness import PythonContext, descendants

ORDER = """
import os, sys, subprocess
for i in range(200):
    print("o%d" % i)
    print("e%d" % i, file=sys.stderr)
    if i % 20 == 0:
        os.write(2, b"raw\\n"); display(i); os.write(1, b"behind\\n")
        os.system("echo child%d; echo cherr%d >&2" % (i, i))
    print("partial", end="")
    sys.stderr.write("x\\n")
    print()
"""


def expected_order():
    parts = []
    for i in range(200):
        parts += [("stdout", "o%d\n" % i), ("stderr", "e%d\n" % i)]
        if i % 20 == 0:
            parts += [("stderr", "raw\n"), ("display", str(i)), ("stdout", "behind\n")]
            parts += [("stdout", "child%d\n" % i), ("stderr", "cherr%d\n" % i)]
        parts += [("stdout", "partial"), ("stderr", "x\n"), ("stdout", "\n")]
    joined = []
    for kind, text in parts:
        if joined and joined[-1][0] == kind != "display":
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined


class Case(unittest.TestCase):
    backend = "plain"

    @classmethod
    def make(cls, **options):
        return PythonContext(cls.backend, **options)

    def setUp(self):
        self.context = self.make()
        self.addCleanup(lambda: self.context.close())

    def run_code(self, code, **fields):
        return self.context.run(code, **fields)

    def value(self, code, **fields):
        execution = self.run_code(code, **fields)
        self.assertIsNone(execution.error, execution.error)
        self.assertIsNone(execution.death)
        return execution.result and execution.result["data"]["text/plain"]

    def assert_kept(self):
        self.assertEqual(self.value("kept"), "'yes'")

    def interrupt_after(self, code, text="go", **fields):
        """Runs code, interrupts it once it has printed `text`, and returns the ended execution."""
        self.value("kept = 'yes'")
        execution = self.context.start(code, **fields)
        deadline = time.monotonic() + 20
        while text not in execution.stdout and time.monotonic() < deadline and not execution.finished.is_set():
            time.sleep(0.005)
        time.sleep(0.05)
        self.assertTrue(self.context.interrupt(execution), (execution.order, execution.done))
        self.assertTrue(execution.finished.wait(20), "the interrupt was not obeyed")
        return execution


class Results(Case):
    def test_state_stays(self):
        self.value("x = 20")
        self.assertEqual(self.value("y = 1; x + y + 21"), "42")

    def test_none_and_semicolon_give_no_result(self):
        for code in ("None", "1;", "(1); # note", "x = 1", "", "# only a comment", "'a;b' ; # c"):
            self.assertIsNone(self.run_code(code).result, code)
        self.assertEqual(self.value("'a;b' # ; no"), "'a;b'")

    def test_reprs_become_a_bundle(self):
        result = self.run_code(
            "class A:\n def _repr_html_(self): return '<b>'\n def _repr_png_(self): return b'\\x89PNG'\n"
            " def _repr_svg_(self): return '<svg/>'\n def _repr_latex_(self): return '$x$'\n"
            " def _repr_json_(self): return {'a': [1, float('nan'), float('inf'), -float('inf')]}\n"
            " def _repr_pdf_(self): 1/0\nA()"
        ).result
        data = result["data"]
        self.assertEqual(data["text/html"], "<b>")
        self.assertEqual(data["image/png"].strip(), "iVBORw==")
        self.assertEqual((data["image/svg+xml"], data["text/latex"]), ("<svg/>", "$x$"))
        self.assertEqual(data["application/json"], {"a": [1, "NaN", "Infinity", "-Infinity"]})
        self.assertNotIn("application/pdf", data)

    def test_mimebundle(self):
        execution = self.run_code(
            "class A:\n def _repr_mimebundle_(self, include=None, exclude=None, **k):\n"
            "  return {'text/plain': 'p', 'text/x': 'y'}, {'text/x': {'w': 1}}\nA()"
        )
        self.assertEqual(execution.result["data"], {"text/plain": "p", "text/x": "y"})
        self.assertEqual(execution.result["metadata"], {"text/x": {"w": 1}})

    def test_pictures_and_documents_are_base64(self):
        data = self.run_code(
            "class A:\n def _repr_pdf_(self): return b'%PDF-1'\n def _repr_jpeg_(self): return b'\\xff\\xd8'\n"
            " def _repr_markdown_(self): return '*m*'\n def _repr_javascript_(self): return 'f()'\nA()"
        ).result["data"]
        self.assertEqual((data["application/pdf"].strip(), data["image/jpeg"].strip()), ("JVBERi0x", "/9g="))
        self.assertEqual((data["text/markdown"], data["application/javascript"]), ("*m*", "f()"))

    def values_of(self, code):
        """What an execution with `values` adds to the bundle of its result."""
        execution = self.run_code(code, values=True)
        self.assertIsNone(execution.error, execution.error)
        data = execution.result["data"]
        added = {mime: value for mime, value in data.items() if mime in ("application/json", "e2b/data", "e2b/chart")}
        self.assertIn("text/plain", data)
        return added

    def test_lists_and_dicts_are_json_too(self):
        for code, value in (
            ("[1, 'a', None, True, 1.5, (2,), {'k': []}]", [1, "a", None, True, 1.5, [2], {"k": []}]),
            ("{'a': 1, 2: 'é', True: [], None: {}, 0.5: '\\ud800'}", {"a": 1, "2": "é", "true": [], "null": {}, "0.5": "\\ud800"}),
            ("[]", []),
            ("{}", {}),
        ):
            self.assertEqual(self.values_of(code), {"application/json": value}, code)
        shown = self.run_code("display([1]); display({'e2b/data': {'a': [1, None]}}, raw=True)", values=True).frames("display")
        self.assertEqual(shown[0]["data"]["application/json"], [1])
        self.assertEqual(shown[1]["data"], {"e2b/data": {"a": [1, None]}})

    def test_what_json_cannot_hold_is_none(self):
        for code in (
            "'text'", "(1, 2)", "[float('nan')]", "[float('inf')]", "[1 << 64]", "[object()]", "{(1, 2): 3}", "[{1, 2}]",
            "a = []; a.append(a); a", "a = []\nfor _ in range(200): a = [a]\na", "[0] * 100_001", "['x' * 5_000_000]",
            "class L(list):\n def __iter__(self): 1/0\n def __repr__(self): return 'L'\nL([1])", "[L([1])]",
        ):
            self.assertEqual(self.values_of(code), {}, code)

    def test_no_values_unless_asked(self):
        self.assertEqual(self.values_of("[1]"), {"application/json": [1]})
        for fields in {}, {"values": False}:
            self.assertEqual(self.run_code("[1]", **fields).result["data"], {"text/plain": "[1]"})
        self.assertIsNone(self.run_code("[1];", values=True).result)

    def test_display_update_clear(self):
        execution = self.run_code(
            "h = display('one', display_id=True)\nh.update('two')\ndisplay('three', display_id='n')\n"
            "update_display('four', display_id='n')\nclear_output(wait=True)\ndisplay({'text/html': '<i>'}, raw=True)"
            if self.backend == "plain"
            else "from IPython.display import *\nh = display('one', display_id=True)\nh.update('two')\n"
            "display('three', display_id='n')\nupdate_display('four', display_id='n')\nclear_output(wait=True)\n"
            "display({'text/html': '<i>'}, raw=True)"
        )
        self.assertIsNone(execution.error)
        shown = execution.frames("display")
        self.assertEqual([f["data"].get("text/plain") for f in shown], ["'one'", "'two'", "'three'", "'four'", None])
        self.assertEqual([f.get("update", False) for f in shown], [False, True, False, True, False])
        self.assertTrue(shown[0]["display_id"] and shown[0]["display_id"] == shown[1]["display_id"])
        self.assertEqual(shown[2]["display_id"], "n")
        self.assertEqual(execution.frames("clear")[0]["wait"], True)

    def test_lone_surrogates_are_text(self):
        execution = self.run_code("print('\\udc80\\u00e9')\n'\\ud800'.__class__.__mro__\ndisplay({'text/plain': '\\ud800x'}, raw=True)")
        self.assertEqual(execution.stdout, "\\udc80é\n")
        self.assertEqual(execution.frames("display")[0]["data"]["text/plain"], "\\ud800x")
        self.assertEqual(self.run_code("raise ValueError('\\ud800')").error["value"], "\\ud800")

    def test_a_bundle_over_16_mib_is_cut(self):
        execution = self.run_code(
            "display({'text/plain': 'p', 'text/html': 'h' * (17 << 20), 'text/x': 'x'}, raw=True)\n"
            "display({'text/plain': '\\x01' * (40 << 20)}, raw=True)"
        )
        first, second = execution.frames("display")
        self.assertEqual(first["data"], {"text/plain": "p", "text/x": "x"})
        self.assertGreaterEqual(first["dropped"]["text/html"], 17 << 20)
        self.assertLessEqual(len(second["data"]["text/plain"]), 16 << 20)
        self.assertIn("text/plain", second["dropped"])

    def test_a_form_that_fails_is_told(self):
        code = (
            "class A:\n def __repr__(self): return 'A'\n def _repr_html_(self): raise ValueError('h')\n"
            " def _repr_png_(self): raise KeyError('p')\n def _repr_svg_(self): raise NotImplementedError\n"
            " def _repr_mimebundle_(self, **k): raise OSError('m')\n"
        )
        for show, kind in (code + "A()", "result"), ("display(A())", "display"):
            execution = self.run_code(show)
            self.assertIsNone(execution.error)
            self.assertEqual(execution.frames(kind)[0]["data"], {"text/plain": "A"})
            for text in "ValueError: h", "KeyError: 'p'", "OSError: m", "_repr_html_":
                self.assertIn(text, execution.stderr)
            self.assertNotIn("\nNotImplementedError", execution.stderr)
            self.assertNotIn("<bridge>", execution.stderr)

    def test_a_broken_repr_is_an_error(self):
        self.assertIn("ZeroDivisionError", str(self.run_code("class A:\n def __repr__(self): 1/0\nA()").error or
                                               self.context.logs["stderr"]))


class Errors(Case):
    def test_the_traceback_has_the_cells_lines_and_no_bridge(self):
        self.run_code("def f():\n    return 1 / 0  # here")
        error = self.run_code("f()").error
        text = "\n".join(error["traceback"])
        self.assertEqual((error["name"], error["value"]), ("ZeroDivisionError", "division by zero"))
        self.assertIn("# here", text)
        self.assertNotIn("<bridge>", text)
        self.assertNotIn("\x1b", text)

    def test_the_cells_own_frame_is_there(self):
        self.assertIn("# there", "\n".join(self.run_code("1 / 0  # there").error["traceback"]))

    def test_causes_have_no_bridge_frames(self):
        text = "\n".join(
            self.run_code("try:\n  display(raw=1, clear=None, *[type('A', (), {'__repr__': lambda s: 1/0})()])\n"
                          "except Exception as e:\n  raise KeyError('k') from e").error["traceback"]
        )
        self.assertNotIn("<bridge>", text)
        self.assertIn("KeyError", text)

    def test_syntax_error(self):
        error = self.run_code("x = 1\ndef (").error
        self.assertEqual(error["name"], "SyntaxError")
        self.assertIn("def (", "\n".join(error["traceback"]))

    def test_recursion_is_short(self):
        self.value("kept = 'yes'")
        for code in ("def f(): f()\nf()", "def a(): b()\ndef b(): a()\na()"):
            error = self.run_code(code).error
            self.assertEqual(error["name"], "RecursionError")
            self.assertLessEqual(len(error["traceback"]), 310)
        self.assert_kept()

    def test_a_large_value_is_cut(self):
        error = self.run_code("raise ValueError('x' * (100 << 20))").error
        self.assertEqual(error["name"], "ValueError")
        self.assertLess(len(error["value"]) + sum(map(len, error["traceback"])), 1 << 20)

    def test_an_error_whose_text_fails(self):
        execution = self.run_code("class E(Exception):\n def __str__(self): raise SystemExit(9)\nraise E")
        self.assertEqual(execution.error["name"], "E")
        self.assertIsNone(execution.death)

    def test_an_error_whose_methods_fail_has_name_text_and_traceback(self):
        for text in "raise RuntimeError('no')", "return 5", "raise GeneratorExit":
            cell = "class E(Exception):\n def __str__(self): %s\n" % text
            error = self.run_code(cell + "def f():\n try: 1/0\n except Exception as e: raise E() from e\nf()").error
            self.assertEqual((error["name"], error["value"]), ("E", "<exception str() failed>"))
            lines = "\n".join(error["traceback"])
            for part in "in f", "raise E() from e", "ZeroDivisionError: division by zero", "direct cause", "E: <exception str() failed>":
                self.assertIn(part, lines)
        error = self.run_code("try: raise E()\nexcept E as e: raise ValueError('v') from e").error
        self.assertEqual((error["name"], error["value"]), ("ValueError", "v"))
        self.assertIn("ValueError: v", "\n".join(error["traceback"]))
        meta = "class M(type):\n __name__ = property(lambda self: 1/0)\nclass E(Exception, metaclass=M): pass\n"
        error = self.run_code(meta + "def f(): raise E('text')\nf()").error
        self.assertEqual((error["name"], error["value"]), ("E", "text"))
        self.assertIn("raise E('text')", "\n".join(error["traceback"]))
        error = self.run_code("e = ValueError('round'); e.__cause__ = e; raise e").error
        self.assertIn("ValueError: round", "\n".join(error["traceback"]))

    def test_system_exit(self):
        for code, status in (("sys.exit()", 0), ("sys.exit(0)", 0), ("exit()", 0)):
            done = self.run_code("import sys; " + code).done
            self.assertEqual((done.get("error"), done.get("exit_code")), (None, status), code)
        done = self.run_code("kept = 'yes'; sys.exit(3)").done
        self.assertEqual((done["error"]["name"], done["exit_code"]), ("SystemExit", 3))
        done = self.run_code("sys.exit('why')").done
        self.assertEqual((done["error"]["value"], done["exit_code"]), ("why", 1))
        self.assert_kept()

    def test_memory_error_keeps_the_state(self):
        self.value("kept = 'yes'")
        self.assertEqual(self.run_code("'x' * (1 << 60)").error["name"], "MemoryError")
        self.value("import resource; _limit = resource.getrlimit(resource.RLIMIT_AS)\n"
                   "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, _limit[1]))")
        self.assertEqual(self.run_code("big = []\nwhile True: big.append(bytes(1 << 20))").error["name"], "MemoryError")
        self.value("del big")
        self.assert_kept()


    def test_no_memory_for_the_code(self):
        self.value("kept = 'yes'")
        self.value("import resource; _limit = resource.getrlimit(resource.RLIMIT_AS)\n"
                   "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, _limit[1]))")
        self.assertEqual(self.run_code("big = []\nwhile True: big.append(bytes(1 << 16))").error["name"], "MemoryError")
        for size in (3 << 20, 10 << 20, 100):
            execution = self.run_code("1 # " + "x" * size)
            self.assertIn((execution.error or {}).get("name"), ("MemoryError", None), size)
        self.value("del big")
        self.assertIsNone(self.run_code("1 # " + "x" * (3 << 20)).error)
        self.assert_kept()

    def test_long_errors(self):
        self.value("kept = 'yes'")
        for character in ("\\x01", "\\U0001F600", "\\ud800", "e"):
            error = self.run_code("raise Exception('\\n'.join(['%s' * 65000] * 290))" % character).error
            self.assertEqual(error["name"], "Exception")
            self.assertLess(sum(map(len, error["traceback"])), 4 << 20)
        self.assert_kept()

    def test_what_the_bridge_itself_needs_is_replaced(self):
        self.value("kept = 'yes'")
        self.value("import io, os, sys; real = os.environ")
        self.run_code("io.TextIOWrapper = io.BytesIO = None; os.environ = None; sys.stdout.close()")
        self.assertIsNone(self.run_code("import builtins; 5", stdin="x", env={"A": "b"}).death)
        self.run_code("os.environ = real")
        self.assert_kept()


class Order(Case):
    def test_streams_children_and_frames(self):
        execution = self.run_code(ORDER)
        self.assertEqual(execution.order, expected_order())

    def test_children_by_subprocess_and_multiprocessing(self):
        execution = self.run_code(
            "import subprocess, sys, os, multiprocessing\n"
            "def work(): print('in child', file=sys.stderr)\n"
            "c = multiprocessing.get_context('fork')\n"
            "for i in range(5):\n"
            "  print('a')\n"
            "  subprocess.run([sys.executable, '-c', 'import os; os.write(2, b\"b\\\\n\")'])\n"
            "  print('c', end='')\n"
            "  p = c.Process(target=work); p.start(); p.join()\n"
            "  print('d')\n"
        )
        self.assertEqual(
            execution.order,
            [("stdout", "a\n"), ("stderr", "b\n"), ("stdout", "c"), ("stderr", "in child\n")]
            + [("stdout", "d\na\n"), ("stderr", "b\n"), ("stdout", "c"), ("stderr", "in child\n")] * 4
            + [("stdout", "d\n")],
        )

    def test_spawned_processes(self):
        self.assertEqual(
            self.value("import multiprocessing as m, math\nwith m.get_context('spawn').Pool(1) as p: r = p.map(math.sqrt, [4])\nr"),
            "[2.0]",
        )

    def test_c_buffers_are_flushed(self):
        execution = self.run_code("import ctypes; n = ctypes.CDLL(None).printf(b'from c\\n')")
        self.assertEqual(execution.stdout, "from c\n")

    def test_result_comes_after_output_and_before_done(self):
        for _ in range(50):
            execution = self.run_code("import os, sys\nprint('a'); os.write(2, b'b'); 7")
            self.assertEqual(execution.order[-1], ("result", "7"))

    def test_threads_print_at_once(self):
        execution = self.run_code(
            "import threading, sys\n"
            "def work(n):\n"
            "  for i in range(300): print(n, i); print(n, i, file=sys.stderr)\n"
            "ts = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
            "[t.start() for t in ts]; [t.join() for t in ts];"
        )
        for text in (execution.stdout, execution.stderr):
            self.assertEqual(len(text.split()), 4 * 300 * 2)

    def test_a_thread_prints_later(self):
        self.value("import threading, time\ndef later():\n  time.sleep(.2); print('late'); display(1)\nthreading.Thread(target=later).start()")
        time.sleep(0.5)
        self.assertIn(b"late\n1\n", self.context.logs["stdout"])
        self.assertEqual(self.value("1 + 1"), "2")

    def test_a_flood_does_not_hold_the_end(self):
        execution = self.run_code("import subprocess; p = subprocess.Popen(['sh', '-c', 'exec yes'])", timeout=10)
        self.assertIsNone(execution.error)
        self.assertEqual(self.value("3"), "3")
        self.value("p.kill(); p.wait();")

    def test_a_destructor_that_prints_in_the_bridge(self):
        self.assertEqual(
            self.value("import gc, sys\nclass D:\n  def __del__(self): print('d'); print('e', file=sys.stderr)\n"
                       "gc.set_threshold(1)\nfor i in range(200):\n  d = D(); d.me = d; del d; print(i); display(i)\n"
                       "gc.set_threshold(700); 5", timeout=30),
            "5",
        )


class Interrupts(Case):
    def assert_interrupted(self, execution):
        self.assertEqual((execution.error or {}).get("name"), "KeyboardInterrupt", execution.done)
        self.assert_kept()

    def test_loop(self):
        self.assert_interrupted(self.interrupt_after("print('go')\nwhile True: pass"))

    def test_sleep(self):
        self.assert_interrupted(self.interrupt_after("import time; print('go'); time.sleep(100)"))

    def test_child(self):
        self.assert_interrupted(self.interrupt_after("import subprocess; print('go'); subprocess.run(['sleep', '100'])"))

    def test_await(self):
        self.assert_interrupted(self.interrupt_after("import asyncio; print('go'); await asyncio.sleep(100)"))
        self.assertEqual(self.value("await asyncio.sleep(0, 5)"), "5")

    def test_asyncio_run(self):
        self.assert_interrupted(self.interrupt_after("import asyncio; print('go'); asyncio.run(asyncio.sleep(100))"))

    def test_lock(self):
        self.assert_interrupted(self.interrupt_after("import threading; print('go'); threading.Event().wait()"))

    def test_finally_runs(self):
        execution = self.interrupt_after("import time\nprint('go')\ntry: time.sleep(100)\nfinally: print('cleaned')")
        self.assertIn("cleaned", execution.stdout)
        self.assert_interrupted(execution)

    def test_in_finally(self):
        self.assert_interrupted(self.interrupt_after("import time\ntry: pass\nfinally:\n  print('go'); time.sleep(100)"))

    def test_caught_by_the_code(self):
        execution = self.interrupt_after("import time\nprint('go')\ntry: time.sleep(100)\nexcept KeyboardInterrupt: print('no')")
        self.assertIsNone(execution.error)
        self.assertIn("no", execution.stdout)

    def test_regular_expression_in_c(self):
        self.assert_interrupted(self.interrupt_after("import re; print('go'); re.match('(a+)+$', 'a' * 40 + 'b')"))

    def test_str_of_an_error(self):
        execution = self.interrupt_after("class E(Exception):\n  def __str__(self):\n    print('go')\n    while True: pass\nraise E")
        self.assertEqual(execution.error["name"], "E")
        self.assert_kept()

    def test_back_pressure(self):
        self.value("kept = 'yes'")
        execution = self.context.start("import sys\nwhile True: print('x' * 1000); print('y', file=sys.stderr)")
        time.sleep(0.1)
        self.context.paused.set()
        time.sleep(0.2)
        self.context.interrupt(execution)
        self.context.paused.clear()
        self.assertTrue(execution.finished.wait(20))
        self.assert_interrupted(execution)

    def test_idle_context_ignores_it(self):
        self.value("kept = 'yes'")
        for _ in range(20):
            self.context.signal_group()
        self.assert_kept()

    def test_never_hits_the_next_execution(self):
        """Interrupts at any moment of short executions; each next one must be untouched."""
        self.value("kept = 'yes'; import sys")
        hits = 0
        for i in range(400):
            execution = self.context.start("for i in range(%d): print(i); print(i, file=sys.stderr); display(i)" % (i % 4))
            time.sleep((i % 40) * 0.0001)
            with self.context.lock:
                self.context.signal_group()  # also when it has just ended
            self.assertTrue(execution.finished.wait(20), i)
            self.assertIsNone(execution.death)
            hits += execution.error is not None
            follow = self.run_code("kept")
            self.assertIsNone(follow.error, i)
            self.assertEqual(follow.result["data"]["text/plain"], "'yes'")
        self.assertGreater(hits, 0)

    def test_never_hits_the_next_execution_beside_a_thread(self):
        """A signal that the main thread blocks goes to the other one, and its handler runs in the main thread at once."""
        self.value("import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()")
        self.test_never_hits_the_next_execution()

    def test_two_interrupts_at_once(self):
        self.value("kept = 'yes'")
        for i in range(50):
            execution = self.context.start("while True: pass")
            time.sleep(0.002)
            self.context.interrupt(execution)
            while self.context.interrupt(execution):
                time.sleep(0.01)
            self.assertTrue(execution.finished.wait(20))
            self.assert_kept()

    def test_code_that_takes_sigint(self):
        self.value("kept = 'yes'; import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)")
        self.context.signal_group()
        self.assert_kept()
        self.value("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]);")
        self.assert_interrupted(self.interrupt_after("print('go')\nwhile True: pass"))

    def test_alarm_that_raises(self):
        self.value("import signal, sys\ndef h(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, h); kept = 'yes'")
        for i in range(60):
            execution = self.run_code(
                "signal.setitimer(signal.ITIMER_REAL, %f)\nfor i in range(6): print(i); print(i, file=sys.stderr)" % (0.0001 + i * 2e-5)
            )
            self.assertIn((execution.error or {}).get("name"), (None, "TimeoutError"))
            self.run_code("signal.setitimer(signal.ITIMER_REAL, 0)")
        self.assert_kept()


class Deaths(Case):
    def assert_dies(self, code, status):
        execution = self.run_code("print('last words')\n" + code)
        self.assertEqual((execution.done, execution.death), (None, status))
        self.assertEqual(execution.stdout, "last words\n")

    def test_os_exit(self):
        self.assert_dies("import os; os._exit(5)", 5)

    def test_sigkill(self):
        self.assert_dies("import os; os.kill(os.getpid(), 9)", -9)

    def test_segfault(self):
        self.assert_dies("import ctypes; ctypes.string_at(0)", -11)

    def test_abort_in_a_child_that_holds_the_socket(self):
        self.assert_dies("import os, time, ctypes\nif ctypes.CDLL(None).fork() == 0: time.sleep(3); os._exit(0)\nos._exit(6)", 6)

    def test_exec(self):
        execution = self.run_code("import os; os.execlp('sleep', 'sleep', '100')", timeout=10)
        self.assertEqual(execution.death, -9)

    def test_thread_that_exits(self):
        self.value("import threading, os, time; threading.Timer(.2, lambda: os._exit(4)).start()")
        self.assertTrue(self.context.dead.wait(5))
        self.assertEqual(self.context.status, 4)


class Attacks(Case):
    """The worst is that the context dies; what follows a survived attack must work."""

    FIND = "import os, socket\nfds = [int(f) for f in os.listdir('/proc/self/fd')]\n" \
           "fd = [f for f in fds if f > 2 and os.path.exists('/proc/self/fd/%d' % f) and 'socket' in os.readlink('/proc/self/fd/%d' % f)][0]\n"

    def survives_or_dies(self, code):
        execution = self.run_code(code, timeout=20)
        if execution.death is None:
            self.assertTrue(self.context.dead.is_set() or self.run_code("1 + 1", timeout=20) is not None)
        return execution

    def test_close_all(self):
        self.survives_or_dies("import os; os.closerange(0, 256)")

    def test_dup2_over_the_socket(self):
        self.survives_or_dies(self.FIND + "os.dup2(1, fd)\nprint(1)\ndisplay(2)")

    def test_garbage(self):
        execution = self.survives_or_dies(self.FIND + "os.write(fd, b'\\xff' * 1000)\ndisplay(1)")
        self.assertEqual(execution.death, -9)

    def test_broken_json(self):
        self.assertEqual(self.survives_or_dies(self.FIND + "os.write(fd, b'\\x04\\0\\0\\0nope'); display(1)").death, -9)

    def test_forged_done_ends_its_own_execution(self):
        execution = self.survives_or_dies(self.FIND + "b = b'{\"type\":\"done\"}'\nos.write(fd, len(b).to_bytes(4, 'little') + b)")
        self.assertEqual(execution.done, {"type": "done"})

    def test_streams_and_modules_that_are_replaced(self):
        self.value("kept = 'yes'")
        for code in (
            "import sys; sys.stdout = None",
            "import sys, io; sys.stdout = io.StringIO(); sys.stderr = 3",
            "import sys; sys.stdout.close(); sys.stderr.close()",
            "import sys; sys.stdout.buffer.close()",
            "import sys; sys.stdout.detach()",
            "import sys; del sys.stdout, sys.stderr, sys.stdin",
            "import json; json.dumps = json.loads = json.JSONEncoder.encode = json.JSONDecoder.decode = None",
            "import os; os_write, os.write, os.read = os.write, None, None",
            "import builtins, sys\n_saved = dict(vars(builtins))\nfor n in ('len', 'isinstance', 'str', 'print', 'input', 'type', 'min'): setattr(builtins, n, None)",
            "builtins.__dict__.update(_saved)",
            "import sys; sys.modules.pop('json', None); sys.modules.pop('os', None)",
            "import sys; sys.excepthook = sys.displayhook = None",
        ):
            if "builtins" in code and self.backend == "ipython":
                continue  # IPython itself cannot run without them
            execution = self.run_code(code)
            self.assertIsNone(execution.death, code)
            self.assert_kept()
            execution = self.run_code("import sys\n_ = sys.stdout.write('out\\n'); _ = sys.stderr.write('err\\n'); 1/0")
            self.assertEqual((execution.stdout, execution.stderr), ("out\n", "err\n"), code)
            self.assertEqual(execution.error["name"], "ZeroDivisionError")

    def test_descriptor_1_is_moved_and_put_back(self):
        execution = self.run_code(
            "import os, tempfile, sys\nwith tempfile.TemporaryFile() as f:\n  s = os.dup(1); os.dup2(f.fileno(), 1)\n"
            "  print('hidden'); print('e', file=sys.stderr); os.dup2(s, 1); os.close(s)\n  f.seek(0); text = f.read()\nprint('shown'); text"
        )
        self.assertEqual(execution.order, [("stderr", "e\n"), ("stdout", "shown\n"), ("result", "b'hidden\\n'")])

    def test_children_have_no_descriptor_of_ours(self):
        code = ("import subprocess, os\nsubprocess.run('ls /proc/self/fd | tr \"\\n\" \" \"', shell=True, close_fds=False)\n"
                "if os.fork() == 0:\n  print([f for f in os.listdir('/proc/self/fd') if 'socket' in str(os.path.exists('/proc/self/fd/' + f) and os.readlink('/proc/self/fd/' + f))])\n"
                "  os._exit(0)\nos.wait();")
        self.assertEqual(self.run_code(code).stdout, "0 1 2 3 []\n")

    def test_forked_child_that_runs_off_the_end(self):
        execution = self.run_code("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')\npid and 1")
        self.assertEqual(execution.stdout, "child\nparent\n")
        self.assertEqual(execution.result["data"]["text/plain"], "1")
        self.assertEqual(list(descendants(self.context.process.pid)), [])

    def test_child_that_c_code_forks(self):
        for _ in range(20):
            execution = self.run_code(
                "import ctypes, os, sys\n"
                "print('before')\n"
                "if ctypes.CDLL(None).fork() == 0:\n"
                "  display(1); print('child', file=sys.stderr); display(2)\n"
                "  os.execvp('true', ['true'])\n"
                "print('after')\ndisplay('own')\nos.wait()[1]"
            )
            self.assertIsNone(execution.death)
            self.assertEqual(sorted(execution.stdout.split()), ["1", "2", "after", "before"])
            self.assertEqual([f["data"]["text/plain"] for f in execution.frames("display")], ["'own'"])
            self.assertEqual(execution.result["data"]["text/plain"], "0")
        self.run_code("if ctypes.CDLL(None).fork() == 0: print('child')\nelse: os.wait(); print('parent')")
        self.assertEqual(self.value("1 + 1"), "2")

    def test_forked_child_that_displays_and_fails(self):
        execution = self.run_code("import os\npid = os.fork()\nif not pid: display(5); 1/0\nos.waitpid(pid, 0)[1] >> 8")
        self.assertEqual(execution.stdout, "5\n")
        self.assertIn("ZeroDivisionError", execution.stderr)
        self.assertEqual(execution.result["data"]["text/plain"], "1")


class Input(Case):
    def test_none(self):
        error = self.run_code("input('?')").error
        self.assertEqual(error["name"], "EOFError")
        self.assertIn("allow_input", error["value"])
        self.assertEqual(self.value("import sys; sys.stdin.read()"), "''")

    def test_stdin(self):
        execution = self.run_code("a = input('? '); import sys; b = sys.stdin.readline(); (a, b, sys.stdin.read())", stdin="one\ntwo\n\n3é")
        self.assertEqual(execution.order, [("stdout", "? "), ("result", "('one', 'two\\n', '\\n3é')")])
        self.assertEqual(self.run_code("input()").error["name"], "EOFError")

    def test_stdin_that_ends(self):
        execution = self.run_code("a = input()\nb = input()", stdin="\nlast")
        self.assertIsNone(execution.error)
        self.assertEqual(self.run_code("input(); input()", stdin="x").error["name"], "EOFError")

    def test_asking(self):
        execution = self.context.start("print('p', end=''); a = input('name? ')\nimport getpass; b = getpass.getpass('pw ')\nimport sys; c = sys.stdin.readline()\n(a, b, c)", ask=True)
        for value in ("ann", "secret", "line"):
            self.context.answer(execution, value)
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(execution.result["data"]["text/plain"], "('ann', 'secret', 'line\\n')")
        self.assertEqual([(f["prompt"], f["password"]) for f in execution.frames("input")], [("name? ", False), ("pw ", True), ("", False)])
        self.assertEqual(execution.order[0], ("stdout", "p"))

    def test_end_of_input(self):
        execution = self.context.start("input()", ask=True)
        self.context.answer(execution, eof=True)
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(execution.error["name"], "EOFError")

    def test_interrupt_and_late_reply(self):
        self.value("kept = 'yes'")
        for _ in range(20):
            execution = self.context.start("input()", ask=True)
            self.assertTrue(execution.asked.wait(20))
            self.context.interrupt(execution)
            self.context.answer(execution, "late")
            self.assertTrue(execution.finished.wait(20))
            self.assertEqual(self.value("kept"), "'yes'")

    def test_threads_print_while_it_asks(self):
        execution = self.context.start(
            "import threading, sys, time\ndef work():\n  for i in range(50): print(i); print(i, file=sys.stderr)\n"
            "t = threading.Thread(target=work); t.start(); x = input(); t.join(); x", ask=True)
        time.sleep(0.5)
        self.context.answer(execution, "v")
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(len(execution.stderr.split()), 50)

    def test_the_codes_own_stdin(self):
        self.assertEqual(self.value("import sys, io; sys.stdin = io.StringIO('mine\\n'); input()"), "'mine'")


class Features(Case):
    def test_top_level_await_and_tasks_that_go_on(self):
        self.value("import asyncio\nn = 0\nasync def count():\n  global n\n  while True: n += 1; await asyncio.sleep(.01)\n"
                   "t = asyncio.create_task(count()); await asyncio.sleep(0)")
        time.sleep(0.4)
        self.assertGreater(int(self.value("n")), 5)
        self.assertEqual(self.value("async with asyncio.Lock(): x = [i async for i in type('A', (), {'__aiter__': lambda s: s, '__anext__': lambda s: stop()})()] if 0 else 3\nx"), "3")

    def test_commands(self):
        execution = self.run_code("x = 1\nif x:\n    !echo \"it's $((1+1))\"\n%cd /tmp\nprint('end')")
        self.assertIn("it's 2\n", execution.stdout)
        self.assertTrue(execution.stdout.endswith("/tmp\nend\n"), execution.stdout)
        self.assertEqual(self.value("import os; os.getcwd()"), "'/tmp'")

    def test_values_in_commands(self):
        execution = self.run_code("v, n = 'a b', [1.5]\n!echo {v} $v {n[0]} {len(v)}")
        self.assertEqual(execution.stdout, "a b a b 1.5 3\n")
        self.assertEqual(self.run_code("def f(inner):\n    !echo {inner}\nf(7)").stdout, "7\n")

    def test_words_of_the_shell(self):
        if self.backend != "plain":
            return  # IPython takes them for its own
        self.assertEqual(self.run_code("!for id in 1 2; do echo $id; done | awk '{print}'; echo ${HOME:+set} $((1+1)) $undefined. {2/4:.2f}").stdout, "1\n2\nset 2 . 0.50\n")

    def test_output_of_commands(self):
        self.assertEqual(self.value("w = 'b'\nx = !echo a $w; echo c\nlist(x)"), "['a b', 'c']")
        execution = self.run_code("if True:\n    y = ! echo only\nz = 3 != 4; (y[0], z)")
        self.assertEqual((execution.stdout, execution.result["data"]["text/plain"]), ("", "('only', True)"))

    def test_commands_that_begin_as_options_do(self):
        for code in "!-x", "!+x", "%%sh\n-x\n", "%%bash\n+x":
            self.assertIn("not found", self.run_code(code).stderr, code)

    def test_what_is_imported_from_the_future_stays(self):
        self.value("'docs'\nfrom __future__ import annotations; x = 1")
        self.assertEqual(self.value("def f(a: Later | None): ...\nf.__annotations__"), "{'a': 'Later | None'}")
        self.assertEqual(self.value("async def g(a: Later): return 5\nawait g(1)"), "5")
        self.assertIsNotNone(self.run_code("from __future__ import nothing").error)
        self.value("from __future__ import barry_as_FLUFL")
        self.assertEqual(self.value("1 <> 2"), "True")

    def test_indented_cells(self):
        self.run_code("async def later(): return 7")
        for code, value in (
            ("    y=3\n    y", "3"),
            ("\n\ty = 4\n\tif y:\n\t\ty += 1\n\n\ty", "5"),
            ("  def f():\n    return 6\n\n  f()", "6"),
            ("  x = await later()\n  x", "7"),
        ):
            self.assertEqual(self.value(code), value, code)
        self.assertEqual(self.run_code("  !echo a\n  x = 1").stdout, "a\n")
        error = self.run_code("    z = 1\n    1/0").error
        self.assertIn("1/0", "\n".join(error["traceback"]))
        for code in "x = 1\n    y = 2", "if x:\ny = 2", "    if x:\n    y":
            self.assertEqual(self.run_code(code).error["name"], "IndentationError", code)

    def test_percent_in_python_is_no_magic(self):
        self.assertEqual(self.value("a, time = 7, 4\nb = (a\n%time)\ns = '''\n!ls\n%cd /\n'''\n(b, s)"), "(3, '\\n!ls\\n%cd /\\n')")

    def test_bash_cell(self):
        self.assertEqual(self.run_code("%%bash\nfor i in 1 2; do echo $i; done").stdout, "1\n2\n")
        self.assertEqual(self.run_code("%%bash\nexit 3").error["name"], "CalledProcessError")

    def test_pip(self):
        self.assertIn("pip", self.run_code("%pip --version").stdout)

    def test_environment_of_one_execution(self):
        code = "import os; (os.environ.get('A_B'), os.environ.get('HOME'))"
        self.assertEqual(self.value(code, env={"A_B": "é", "HOME": "/h"}), "('é', '/h')")
        self.assertIn("(None, ", self.value(code))

    def test_adopt(self):
        self.assertEqual(self.context.adopt("/tmp", {"NEW": "1", "HOME": None}), {"type": "adopted"})
        self.assertEqual(self.value("import os; (os.getcwd(), os.environ['NEW'], os.environ.get('HOME'))"), "('/tmp', '1', None)")

    def test_adopt_a_directory_that_is_not_there(self):
        self.assertIn("nowhere", self.context.adopt("/nowhere")["error"])

    def test_main_module(self):
        self.assertEqual(self.value("import sys, pickle\nclass A: pass\n(__name__, sys.argv, type(pickle.loads(pickle.dumps(A()))) is A)"), "('__main__', [''], True)")
        self.assertEqual(self.value("sorted(n for n in globals() if not n.startswith('_'))"), "['A', 'pickle', 'sys']")

    def test_sources(self):
        self.value("def f():\n    return 'text of f'")
        self.assertIn("text of f", self.value("import inspect; inspect.getsource(f)"))


if __name__ == "__main__":
    unittest.main()


class Display(Case):
    """IPython.display where no IPython is installed."""

    def setUp(self):
        super().setUp()
        self.value("import sys\nsys.path[:] = [path for path in sys.path if 'site-packages' not in path]")

    def data(self, code):
        execution = self.run_code("from IPython.display import *\n" + code)
        self.assertIsNone(execution.error, execution.error)
        self.assertEqual(execution.stderr, "")
        shown = execution.frames("display") + execution.frames("result")
        return [{mime: value for mime, value in frame["data"].items() if mime != "text/plain"} for frame in shown]

    def test_objects(self):
        for code, expected in (
            ("display(HTML('<b>'))", {"text/html": "<b>"}),
            ("HTML(data='<b>')", {"text/html": "<b>"}),
            ("Markdown('*m*')", {"text/markdown": "*m*"}),
            ("Latex('$x$')", {"text/latex": "$x$"}),
            ("Math('x')", {"text/latex": "$\\displaystyle x$"}),
            ("SVG('<?xml?><svg/>')", {"image/svg+xml": "<svg/>"}),
            ("JSON({'a': [1]})", {"application/json": {"a": [1]}}),
            ("JSON('[1]')", {"application/json": [1]}),
            ("Javascript('f()')", {"application/javascript": "f()"}),
            ("Image(b'\\x89PNG', width=5)", {"image/png": "iVBORw=="}),
            ("Image(data=b'\\xff\\xd8')", {"image/jpeg": "/9g="}),
            ("Image(url='http://localhost/a.png', width=5)", {"text/html": '<img src="http://localhost/a.png" width="5">'}),
            ("IFrame('/a', 1, 2)", {"text/html": '<iframe src="/a" width="1" height="2" frameborder="0" allowfullscreen=""></iframe>'}),
            ("Code('a < b')", {"text/html": "<pre>a &lt; b</pre>"}),
            ("Video('/a.mp4', embed=False) if 0 else FileLink('a')", {"text/html": '<a href="a" target="_blank">a</a>'}),
            ("display_html('<i>', raw=True)", {"text/html": "<i>"}),
            ("display_markdown('*m*')", {"text/markdown": "*m*"}),
            ("publish_display_data({'text/x': '1'})", {"text/x": "1"}),
        ):
            self.assertEqual(self.data(code), [expected], code)
        self.assertEqual(self.run_code("from IPython.display import Pretty\nPretty('p')").result["data"], {"text/plain": "p"})
        self.assertEqual(self.run_code("Image(b'\\x89PNG', width=5)").result["metadata"], {"image/png": {"width": 5}})
        self.assertIn("data:audio/wav;base64,UklGR", self.data("Audio([0, .5, -1], rate=8000)")[0]["text/html"])

    def test_files(self):
        self.value("import os, tempfile\nos.chdir(tempfile.mkdtemp())\nopen('a.gif', 'wb').write(b'GIF89a') and open('a.md', 'w').write('# a') and None")
        self.assertEqual(self.data("Image('a.gif'); display(Image(filename='a.gif'))\nMarkdown('a.md')"),
                         [{"image/gif": "R0lGODlh"}, {"text/markdown": "# a"}])
        self.assertEqual(self.run_code("Image('none.png')").error["name"], "FileNotFoundError")

    def test_functions_and_names(self):
        execution = self.run_code("from IPython.display import display, clear_output, update_display\n"
                                  "h = display(1, display_id='d'); h.update(2); clear_output(wait=True)")
        self.assertEqual([kind for kind, _ in execution.events], ["display", "display", "clear"])
        self.assertEqual(self.value("import IPython\nfrom IPython import get_ipython, display as d\nfrom IPython.core.display import HTML as H\n"
                                    "get_ipython(), d is IPython.display, H is d.HTML, IPython.version_info[0]"), "(None, True, True, 9)")
        for code in "import IPython.terminal", "from IPython.core import magic":
            self.assertIn(self.run_code(code).error["name"], ("ImportError", "ModuleNotFoundError"))
