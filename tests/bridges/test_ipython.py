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

    def test_a_figure_that_fails_is_told_once(self):
        title = "import matplotlib.pyplot as plt\nplt.title('$\\\\bad{$')\n"
        for show in "plt.plot([1]);", "plt.plot([1]); plt.show()", "display(plt.gcf())", "plt.gcf()":
            execution = self.run_code(title + show)
            self.assertIsNone(execution.error)
            self.assertEqual(execution.stderr.count("ValueError: "), 1, (show, execution.stderr))
            self.assertIn("bad", execution.stderr)
            frames = execution.frames("display") + execution.frames("result")
            self.assertEqual([set(frame["data"]) for frame in frames], [{"text/plain"}])

    def test_images_are_shown(self):
        execution = self.run_code("from PIL import Image\nfor mode in 'RGB', 'CMYK', 'F', '1': Image.new(mode, (2, 2)).show(title='t')")
        self.assertEqual((execution.stderr, self.shown(execution)), ("", 4))

    def test_tables_pictures_and_bars(self):
        self.assertIn("<table", self.run_code("import pandas as pd; pd.DataFrame({'a': [1]})").result["data"]["text/html"])
        self.assertIn("image/png", self.run_code("from PIL import Image; Image.new('RGB', (2, 2))").result["data"])
        execution = self.run_code("from tqdm import tqdm\nfor i in tqdm(range(3)): pass")
        self.assertIn("100%", execution.stderr)


    values_of = test_python.Results.values_of

    def chart(self, code, values=True):
        """The one figure that the code leaves, which was a picture too."""
        execution = self.run_code("import matplotlib.pyplot as plt\n" + code, values=values)
        self.assertEqual(self.shown(execution), 1)
        return [frame["data"].get("e2b/chart") for frame in execution.frames("display")][0]

    def test_tables_are_columns(self):
        self.run_code("import pandas as pd, numpy as np, datetime as dt")
        table = (
            "pd.DataFrame({'n': [1, 2], 'f': [.5, None], 's': ['a', None], 7: pd.to_datetime(['2024-05-06 07:08', None]),"
            " 'd': [dt.date(2024, 5, 6), 1 << 70], 'i': pd.array([1, None], dtype='Int64'), 'l': [[1, np.nan], np.inf],"
            " 'b': [True, False]})"
        )
        self.assertEqual(self.values_of(table)["e2b/data"], {
            "n": [1, 2], "f": [0.5, None], "s": ["a", None], "7": ["2024-05-06T07:08:00", None],
            "d": ["2024-05-06", float(1 << 70)], "i": [1, None], "l": [[1, None], None], "b": [True, False],
        })
        self.assertEqual(self.values_of("pd.DataFrame()")["e2b/data"], {})
        levels = "pd.DataFrame({'a': [1], 'b': [2]}).set_axis([('x', 1), ('y', 2)], axis=1)"
        self.assertEqual(self.values_of(levels)["e2b/data"], {"('x', 1)": [1], "('y', 2)": [2]})
        self.assertIn("e2b/data", self.run_code("display(pd.DataFrame({'a': [1]}))", values=True).frames("display")[0]["data"])
        for large in "{'a': range(100_001)}", "{'a': ['x' * 100_000] * 50}":
            self.assertEqual(self.values_of("pd.DataFrame(%s)" % large), {})
        self.assertNotIn("e2b/data", self.run_code("pd.DataFrame({'a': [1]})").result["data"])
        hostile = "class F(pd.DataFrame):\n @property\n def iloc(self): 1/0\n __repr__ = lambda self: 'F'\nF({'a': [1]})"
        self.assertEqual(self.values_of(hostile), {})

    def test_lines(self):
        chart = self.chart(
            "plt.plot([1, 2, 4], [4, float('nan'), 6], label='a'); plt.plot([1, 3], [2, 4]); plt.axhline(5)\n"
            "plt.title('T'); plt.xlabel('Time (s)'); plt.ylabel('Way [m]'); plt.xticks([1, 2, 4]); plt.yscale('log'); plt.yticks([1, 10]);"
        )
        labels = chart.pop("y_tick_labels")
        self.assertEqual((len(labels), labels[1]), (2, "$\\mathdefault{10^{1}}$"))
        self.assertEqual(chart, {
            "type": "line", "title": "T", "x_label": "Time (s)", "y_label": "Way [m]", "x_unit": "s", "y_unit": "m",
            "x_ticks": [1, 2, 4], "x_tick_labels": ["1", "2", "4"], "x_scale": "linear", "y_ticks": [1, 10], "y_scale": "log",
            "elements": [
                {"label": "a", "points": [[1, 4], [2, None], [4, 6]]}, {"label": "Line 1", "points": [[1, 2], [3, 4]]},
            ],
        })
        self.assertEqual(self.chart("plt.plot([1, 2, 3], [1, 2, 1]); plt.xticks([]);")["x_ticks"], [])

    def test_dates_and_categories(self):
        chart = self.chart("import datetime as dt\nd = [dt.date(2024, 5, 6), dt.date(2024, 5, 7)]; plt.plot(d, [1, 2]); plt.xticks(d);")
        self.assertEqual((chart["x_scale"], chart["x_label"], chart["x_unit"]), ("datetime", None, None))
        self.assertEqual(chart["x_ticks"], ["2024-05-06T00:00:00+00:00", "2024-05-07T00:00:00+00:00"])
        self.assertEqual(chart["elements"][0]["points"], [["2024-05-06", 1], ["2024-05-07", 2]])
        chart = self.chart("import numpy as np; plt.plot(np.array(['2024-05-06T07:08', 'NaT'], 'M8[ns]'), [1, 2]);")
        self.assertEqual(chart["elements"][0]["points"], [["2024-05-06T07:08:00", 1], [None, 2]])
        chart = self.chart("plt.plot(['u', 'v', 'w'], [1, 3, 2]);")
        self.assertEqual((chart["x_scale"], chart["x_ticks"], chart["x_tick_labels"]), ("categorical", [0, 1, 2], ["u", "v", "w"]))
        self.assertEqual(chart["elements"], [{"label": "Line 0", "points": [["u", 1], ["v", 3], ["w", 2]]}])

    def test_dots(self):
        chart = self.chart("plt.scatter([1, 2], [3, 4], label='s'); plt.axvline(1.5);")
        self.assertEqual((chart["type"], chart["title"], chart["x_scale"]), ("scatter", None, "linear"))
        self.assertEqual(chart["elements"], [{"label": "s", "points": [[1, 3], [2, 4]]}])

    def test_bars(self):
        both = "(['a', 'b'], [3, 1], label='g'); plt.xlabel('X (u)'); plt.ylabel('Y');"
        bars = [{"label": "a", "value": 3, "group": "g"}, {"label": "b", "value": 1, "group": "g"}]
        expected = {"type": "bar", "title": None, "x_label": "X (u)", "x_unit": "u", "y_label": "Y", "y_unit": None, "elements": bars}
        self.assertEqual(self.chart("plt.bar" + both), expected)
        expected.update(x_label="Y", x_unit=None, y_label="X (u)", y_unit="u")
        self.assertEqual(self.chart("plt.barh" + both), expected)
        self.assertEqual(self.chart("plt.bar(['a'], [2]); plt.bar(['a'], [2], bottom=2);")["elements"], [
            {"label": "a", "value": 2, "group": "Group 0"}, {"label": "a", "value": 2, "group": "Group 1"},
        ])

    def test_boxes(self):
        first = {"label": "1", "min": 1, "first_quartile": 3, "median": 5, "third_quartile": 7, "max": 9, "outliers": [20, 30]}
        second = {"label": "2", "min": 2, "first_quartile": 2, "median": 3, "third_quartile": 4, "max": 4, "outliers": []}
        data = "[[1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 9, 20, 30], [2, 2, 3, 4, 4]]"
        for more, labels in ("", ("Way (m)", None)), (", orientation='horizontal'", (None, "Way (m)")):
            chart = self.chart("plt.boxplot(%s, patch_artist=True%s); plt.xlabel('Way (m)');" % (data, more))
            self.assertEqual((chart["type"], chart["x_label"], chart["y_label"]), ("box_and_whisker", *labels))
            self.assertEqual(chart["elements"], [first, second])
        chart = self.chart("plt.boxplot([10000.25, 20000, 30000], patch_artist=True); plt.yticks([]);")
        self.assertEqual([chart["elements"][0][k] for k in ("label", "min", "median", "max")], ["1", 10000, 20000, 30000])
        shape = "from matplotlib.patches import PathPatch, Path\nplt.gca().add_patch(PathPatch(Path([(0, 0), (1, 2)])));"
        self.assertIsNone(self.chart(shape))

    def test_boxes_of_lines(self):
        data = "[[1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 9, 20, 30], [2, 2, 3, 4, 4]]"
        for more in "", ", orientation='horizontal'", ", notch=True, bootstrap=9", ", showcaps=False, showfliers=False", ", showmeans=True":
            drawn = self.chart("import numpy; numpy.random.seed(1); plt.boxplot(%s%s);" % (data, more))
            filled = self.chart("numpy.random.seed(1); plt.boxplot(%s, patch_artist=True%s);" % (data, more))
            self.assertEqual((drawn["type"], len(drawn["elements"])), ("box_and_whisker", 2))
            self.assertEqual(drawn, filled, more)
        self.assertEqual(self.chart("import pandas; pandas.DataFrame({'a': [1, 2, 9]}).boxplot(); plt.axhline(3);")["type"], "box_and_whisker")
        square = "plt.plot([0, 2, 2, 0, 0], [0, 0, 2, 2, 0]); "
        for code in square, square + "plt.plot([0, 2], [1, 1]);", "plt.boxplot([1, 2]); plt.plot([1, 2, 3]);":
            self.assertEqual(self.chart(code)["type"], "line", code)

    def test_pies(self):
        self.assertEqual(self.chart("plt.pie([1, 2], labels=['a', 'b'], radius=1.5, autopct='%d'); plt.title('P');"), {
            "type": "pie", "title": "P",
            "elements": [{"label": "a", "angle": 120, "radius": 1.5}, {"label": "b", "angle": 240, "radius": 1.5}],
        })

    def test_several_axes_and_other_kinds(self):
        chart = self.chart("f, (a, b) = plt.subplots(1, 2); a.imshow([[1]]); b.pie([1]); f.suptitle('S'); a.set_title('I');")
        self.assertEqual((chart["type"], chart["title"]), ("superchart", "S"))
        self.assertEqual(chart["elements"][0], {"type": "unknown", "title": "I", "elements": []})
        self.assertEqual([inner["type"] for inner in chart["elements"]], ["unknown", "pie"])
        for nothing in "plt.subplots();", "plt.figure();", "plt.plot(range(100_000));":
            self.assertIsNone(self.chart(nothing))
        self.assertIsNone(self.chart("f, a = plt.subplots(); a.plot([1, 2]); a.get_title = lambda: 1/0;"))

    def test_charts_wherever_figures_are_shown(self):
        plot = "plt.plot([1, 2, 3]); "
        self.assertIsNone(self.chart(plot, values=False))
        for code in plot, plot + "plt.show()", "%matplotlib inline\n" + plot, "f, a = plt.subplots(); a.plot([1]); display(f)":
            self.assertEqual(self.chart(code)["type"], "line", code)
        execution = self.run_code("f, a = plt.subplots(); a.plot([1, 2]); f", values=True)
        self.assertEqual((self.shown(execution), execution.result["data"]["e2b/chart"]["type"]), (0, "line"))
        self.assertIn("image/png", execution.result["data"])


class FiguresOfIPython(IPythonCase, Figures):
    pass


