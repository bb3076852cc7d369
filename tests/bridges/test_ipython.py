"""The promises of test_python with the IPython back end, magics, and figures in both back ends.

Needs an interpreter (BRIDGE_PYTHON) with IPython; figures need matplotlib, pandas, Pillow and tqdm.
"""
import base64
import subprocess
import unittest

import test_python
from harness import PYTHON


def importable(*modules):
    return not subprocess.run([PYTHON, "-c", "import " + ", ".join(modules)], stderr=subprocess.DEVNULL).returncode


IPYTHON = importable("IPython")
FIGURES = importable("matplotlib", "pandas", "PIL", "tqdm")


@unittest.skipUnless(IPYTHON, "no IPython")
class IPythonCase(test_python.Case):
    backend = "ipython"


class Results(IPythonCase, test_python.Results):
    pass


class Errors(IPythonCase, test_python.Errors):
    pass


class Order(IPythonCase, test_python.Order):
    pass


class Interrupts(IPythonCase, test_python.Interrupts):
    pass


class Deaths(IPythonCase, test_python.Deaths):
    pass


class Attacks(IPythonCase, test_python.Attacks):
    pass


class Input(IPythonCase, test_python.Input):
    pass


class Features(IPythonCase, test_python.Features):
    def test_main_module(self):
        self.assertEqual(self.value("import sys, pickle\nclass A: pass\n(__name__, sys.argv, type(pickle.loads(pickle.dumps(A()))) is A)"), "('__main__', [''], True)")

    def test_bash_cell(self):
        self.assertEqual(self.run_code("%%bash\nfor i in 1 2; do echo $i; done").stdout, "1\n2\n")
        self.assertEqual(self.run_code("%%bash\nexit 3").error["name"], "CalledProcessError")


class Magics(IPythonCase):
    def test_auto_takes_it(self):
        context = test_python.PythonContext("auto")
        self.addCleanup(context.close)
        self.assertEqual(context.ready_frame["backend"], "ipython")

    def test_magics(self):
        self.assertIn("loops", self.run_code("%timeit -n 1 -r 1 1").stdout.replace("loop each", "loops"))
        self.assertEqual(self.value("x = !echo a b\nx[0]"), "'a b'")
        self.assertEqual(self.run_code("v = 'vv'\n!echo {v} $v").stdout, "vv vv\n")
        self.assertEqual(self.run_code("%%capture c\nprint('hidden')").stdout, "")
        self.assertEqual(self.value("c.stdout"), "'hidden\\n'")
        self.assertEqual(self.value("Out[1] if 1 in Out else _"), self.value("_"))

    def test_syntax_error_has_no_frames_of_ipython(self):
        self.assertNotIn("compilerop", "\n".join(self.run_code("if 1\n  pass").error["traceback"]))

    def test_help_is_text(self):
        execution = self.run_code("len?")
        self.assertIsNone(execution.error)


@unittest.skipUnless(FIGURES, "no matplotlib, pandas, Pillow or tqdm")
class Figures(test_python.Case):
    def shown(self, execution):
        self.assertIsNone(execution.error, execution.error)
        pictures = [f["data"]["image/png"] for f in execution.frames("display") if "image/png" in f["data"]]
        for picture in pictures:
            self.assertTrue(base64.b64decode(picture).startswith(b"\x89PNG"))
        return len(pictures)

    def test_figures(self):
        plt = "import matplotlib.pyplot as plt\n"
        self.assertEqual(self.shown(self.run_code(plt + "plt.plot([1, 2]);")), 1)
        self.assertEqual(self.shown(self.run_code("1")), 0)
        execution = self.run_code("plt.plot([1]); print('a'); plt.show(); print('b'); plt.figure(); plt.plot([2]); plt.show(); print('c')")
        self.assertEqual(self.shown(execution), 2)
        self.assertEqual([k for k, _ in execution.order], ["stdout", "display", "stdout", "display", "stdout"])
        self.assertEqual(self.shown(self.run_code("plt.figure(); plt.figure();")), 2)
        self.assertEqual(self.shown(self.run_code("fig = plt.figure(); plt.savefig('/dev/null', format='png'); plt.close()")), 0)
        execution = self.run_code("fig, ax = plt.subplots(); fig")
        self.assertEqual((self.shown(execution), "image/png" in execution.result["data"]), (0, True))
        execution = self.run_code("plt.plot([1]); 1/0")
        self.assertEqual((execution.error["name"], len(execution.frames("display"))), ("ZeroDivisionError", 1))
        self.assertEqual(self.shown(self.run_code("%matplotlib inline\nplt.plot([1]);")), 1)
        for code in "fig, ax = plt.subplots(); fig", "fig":
            execution = self.run_code(code)
            self.assertEqual((self.shown(execution), "image/png" in execution.result["data"]), (0, True))
        self.assertEqual(self.shown(self.run_code("fig, ax = plt.subplots(); display(fig)")), 1)
        execution = self.run_code("print('a'); plt.plot([1])")
        self.assertEqual((self.shown(execution), [k for k, _ in execution.order]), (1, ["stdout", "result", "display"]))

    def test_tables_pictures_and_bars(self):
        self.assertIn("<table", self.run_code("import pandas as pd; pd.DataFrame({'a': [1]})").result["data"]["text/html"])
        self.assertIn("image/png", self.run_code("from PIL import Image; Image.new('RGB', (2, 2))").result["data"])
        execution = self.run_code("from tqdm import tqdm\nfor i in tqdm(range(3)): pass")
        self.assertIn("100%", execution.stderr)


class FiguresOfIPython(IPythonCase, Figures):
    pass


