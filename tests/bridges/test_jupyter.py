"""Promises of contexts whose code a Jupyter kernel runs.

Needs an interpreter (BRIDGE_PYTHON) with jupyter_client and ipykernel.
"""
import os
import pathlib
import subprocess
import tempfile
import time
import unittest

from harness import PYTHON, PythonContext, descendants

BACKEND = "jupyter:python3"
# Displays so many of these. The kernel itself throws away what a starved thread of it does not send: it may catch up in between.
DISPLAYS = "import time\nfor i in range(%d):\n display(%s)\n if i %% 500 == 499: time.sleep(0.05)"
READY = not subprocess.run([PYTHON, "-c", "import ipykernel, jupyter_client"], stderr=subprocess.DEVNULL).returncode


def is_there(pid):
    try:
        return pathlib.Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@unittest.skipUnless(READY, "no jupyter_client or ipykernel")
class Jupyter(unittest.TestCase):
    def setUp(self):
        self.make()

    def make(self, backend=BACKEND, **options):
        self.context = PythonContext(backend, **options)
        self.addCleanup(self.context.close)

    def run_code(self, code, **fields):
        return self.context.run(code, **fields)

    def value(self, code, **fields):
        execution = self.run_code(code, **fields)
        self.assertIsNone(execution.error)
        self.assertIsNone(execution.death)
        return execution.result and execution.result["data"]["text/plain"]

    def test_state_results_and_await(self):
        self.assertIn("python", self.context.ready_frame["version"])
        self.value("x = 40")
        self.assertEqual(self.value("x + 2"), "42")
        self.assertIsNone(self.value("x;"))
        self.assertEqual(self.value("import asyncio\nawait asyncio.sleep(0, 'awaited')"), "'awaited'")

    def test_order(self):
        execution = self.run_code(
            "import sys\nfor i in range(20):\n print('out', flush=True); print('err', file=sys.stderr, flush=True); display(i)\n'end'"
        )
        expected = [event for i in range(20) for event in (("stdout", "out\n"), ("stderr", "err\n"), ("display", str(i)))]
        self.assertEqual(execution.order, expected + [("result", "'end'")])

    def test_displays(self):
        execution = self.run_code(
            "h = display(1, display_id=True); h.update(2)\nfrom IPython.display import clear_output, HTML, Image\n"
            "clear_output(wait=True); display(HTML('<b>')); display(Image(b'x' * 100, format='png'))"
        )
        one, two, html, image = execution.frames("display")
        self.assertEqual((one["display_id"], two["update"]), (two["display_id"], True))
        self.assertEqual(html["data"]["text/html"], "<b>")
        self.assertNotIn("\n", image["data"]["image/png"])
        self.assertIs(execution.frames("clear")[0]["wait"], True)

    def test_no_message_is_lost(self):
        execution = self.run_code(DISPLAYS % (5000, "i"), timeout=60)
        self.assertEqual([int(f["data"]["text/plain"]) for f in execution.frames("display")], list(range(5000)))

    def test_a_slow_server_loses_nothing(self):
        execution = self.context.start(DISPLAYS % (3000, "{'n': i}") + "\nprint('x' * (1 << 20))")
        while len(execution.frames("display")) < 10:
            time.sleep(0.01)
        self.context.paused.set()
        time.sleep(1)
        self.context.paused.clear()
        self.assertTrue(execution.finished.wait(60))
        self.assertEqual((len(execution.frames("display")), len(execution.stdout)), (3000, (1 << 20) + 1))

    def test_errors(self):
        error = self.run_code("def f(): 1 / 0\nf()").error
        self.assertEqual((error["name"], error["value"]), ("ZeroDivisionError", "division by zero"))
        self.assertFalse([line for line in error["traceback"] if "\x1b" in line or "<bridge>" in line])
        self.assertTrue([line for line in error["traceback"] if "1 / 0" in line])
        self.assertEqual(self.run_code("let (").error["name"], "SyntaxError")
        done = self.run_code("import sys; sys.exit(3)").done
        self.assertEqual((done["error"]["name"], done["exit_code"]), ("SystemExit", 3))
        self.assertEqual(self.value("1"), "1")

    def test_children_write_to_the_streams(self):
        execution = self.run_code("!echo out; echo err >&2\nimport os; os.write(1, b'raw\\n');")
        self.assertIn("out", execution.stdout)

    def test_input(self):
        execution = self.context.start("input('name? ') + 'x'", ask=True)
        self.context.answer(execution, "Ann")
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(execution.frames("input")[0]["prompt"], "name? ")
        self.assertEqual(execution.result["data"]["text/plain"], "'Annx'")
        execution = self.context.start("input()", ask=True)
        self.context.answer(execution, eof=True)
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(execution.error["name"], "EOFError")
        execution = self.context.start("import getpass; getpass.getpass('pw')", ask=True)
        self.context.answer(execution, "secret")
        self.assertTrue(execution.finished.wait(20))
        self.assertIs(execution.frames("input")[0]["password"], True)
        self.assertEqual(self.value("input() + input()", stdin="a\nb"), "'ab'")
        self.assertEqual(self.run_code("input(); input()", stdin="a\n").error["name"], "EOFError")
        self.assertIsNotNone(self.run_code("input()").error)

    def test_an_interrupt_while_asked(self):
        self.value("kept = 1")
        execution = self.context.start("input()", ask=True)
        self.assertTrue(execution.asked.wait(20))
        self.context.interrupt(execution)
        self.assertTrue(execution.finished.wait(20))
        self.assertEqual(execution.error["name"], "KeyboardInterrupt")
        self.assertEqual(self.value("kept"), "1")

    def interrupted(self, code):
        execution = self.context.start("print('go', flush=True)\n" + code)
        while "go" not in execution.stdout and not execution.finished.is_set():
            time.sleep(0.005)
        started = time.monotonic()
        self.context.interrupt(execution)
        self.assertTrue(execution.finished.wait(20), code)
        self.assertIsNone(execution.death, code)
        self.assertEqual(execution.error["name"], "KeyboardInterrupt", code)
        return time.monotonic() - started

    def test_interrupts(self):
        self.value("kept = 'yes'; import time")
        for code in ("while True: pass", "time.sleep(100)", "while True: print(1)", "while True: display(1)"):
            self.interrupted(code)
            self.assertEqual(self.value("kept"), "'yes'", code)
        self.assertLess(min(self.interrupted("time.sleep(100)") for _ in range(3)), 1)

    def test_an_interrupt_never_hits_the_next_execution(self):
        self.value("kept = 'yes'; import time")
        for i in range(60):
            execution = self.context.start("for i in range(%d): print(i, flush=True); display(i)" % (i % 4))
            time.sleep((i % 20) * 0.001)
            self.context.interrupt(execution)
            self.assertTrue(execution.finished.wait(20), i)
            self.assertIsNone(execution.death, i)
            self.assertEqual(self.value("kept"), "'yes'", i)

    def test_a_torn_message_is_passed(self):
        for parts in ("b'', b'<IDS|MSG>', b'bad', b'{}', b'{}', b'{}', b'{}'", "b'', b'<IDS|MSG>', b''", "b'no mark'"):
            torn = "get_ipython().kernel.iopub_socket.send_multipart([%s]); 'sent'" % parts
            self.assertEqual(self.value(torn), "'sent'", parts)
            self.assertEqual(self.value("1 + 1"), "2", parts)

    def test_deaths(self):
        for code, status in (("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("__import__('ctypes').string_at(0)", -11)):
            self.make()
            # ipykernel sends output in a thread, which dies with the kernel.
            execution = self.run_code("import os, time; print('last', flush=True); time.sleep(0.5); " + code)
            self.assertEqual(execution.death, status, code)
            self.assertIn("last", execution.stdout, code)

    def test_death_while_idle(self):
        self.value("import os, threading; threading.Timer(0.2, lambda: os._exit(4)).start()")
        self.assertTrue(self.context.dead.wait(10))
        self.assertEqual(self.context.status, 4)

    def test_nothing_is_left(self):
        with tempfile.TemporaryDirectory() as folder:
            self.make(env=dict(os.environ, TMPDIR=folder))
            pid = int(self.value("import os; os.getpid()"))
            self.assertEqual(os.listdir(folder), [])
            self.assertIn(pid, list(descendants(self.context.process.pid)))
            os.kill(self.context.process.pid, 9)  # the bridge alone
            self.assertTrue(self.context.dead.wait(5))
            deadline = time.monotonic() + 10
            while is_there(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertFalse(is_there(pid), "the kernel outlives the bridge")
            self.assertEqual(os.listdir(folder), [])

    def test_an_unknown_kernel(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaises(AssertionError) as caught:
                PythonContext("jupyter:no-such-kernel", env=dict(os.environ, TMPDIR=folder))
            self.assertIn("cannot start the kernel no-such-kernel: there is no kernel of this name; there is python3", str(caught.exception))
            self.assertEqual(os.listdir(folder), [])

    def test_long_paths(self):
        with tempfile.TemporaryDirectory() as folder:
            deep = pathlib.Path(folder, "d" * (82 - len(folder)))
            deep.mkdir()
            self.make(env=dict(os.environ, TMPDIR=str(deep)))
            self.assertEqual(self.value("1 + 1"), "2")
            deep = pathlib.Path(folder, "e" * 100)
            deep.mkdir()
            with self.assertRaises(AssertionError) as caught:
                PythonContext(BACKEND, env=dict(os.environ, TMPDIR=str(deep)))
            self.assertIn("TMPDIR is too long", str(caught.exception))
            self.assertEqual(os.listdir(deep), [])

    def test_without_jupyter_client(self):
        with self.assertRaises(AssertionError) as caught, tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "zmq.py").write_text("raise ImportError")
            PythonContext(BACKEND, env=dict(os.environ, PYTHONPATH=folder))
        self.assertIn("python3 cannot import jupyter_client", str(caught.exception))

    def test_a_kernel_that_takes_interrupts_as_messages(self):
        with tempfile.TemporaryDirectory() as folder:
            kernel = pathlib.Path(folder, "kernels", "by-message")
            kernel.mkdir(parents=True)
            spec = '{"argv": ["%s", "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "m", "language": "python", "interrupt_mode": "message"}'
            (kernel / "kernel.json").write_text(spec % PYTHON)
            self.make("jupyter:by-message", env=dict(os.environ, JUPYTER_PATH=folder))
            self.value("kept = 5; import time")
            self.interrupted("time.sleep(100)")
            self.assertEqual(self.value("kept"), "5")


if __name__ == "__main__":
    unittest.main()
