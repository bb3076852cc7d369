"""The stubs of runs: code that is read from a memory file by descriptor."""
import os
import subprocess
import unittest

from harness import NODE, PYTHON, have, source


def run(program, flag, stub, code, *args, stdin=""):
    fd = os.memfd_create("code")
    try:
        os.write(fd, code.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        command = [program, flag, source(stub), str(fd), *args]
        return subprocess.run(command, pass_fds=[fd], input=stdin, capture_output=True, text=True, timeout=30)
    finally:
        os.close(fd)


class PythonRuns(unittest.TestCase):
    def run_code(self, code, *args, **options):
        return run(PYTHON, "-c", "run_python.py", code, *args, **options)

    def test_script(self):
        done = self.run_code("import sys, os\nprint(__name__, sys.argv, input(), sorted(n for n in globals() if n[0] != '_'))\n"
                             "print(len(os.listdir('/proc/self/fd')))\nsys.exit(5)", "a", "b", stdin="line\n")
        self.assertEqual(done.stdout, "__main__ ['<code>', 'a', 'b'] line ['os', 'sys']\n4\n")
        self.assertEqual((done.returncode, done.stderr), (5, ""))

    def test_traceback(self):
        done = self.run_code("def f():\n    1 / 0  # here\nf()")
        self.assertEqual(done.returncode, 1)
        self.assertIn("# here", done.stderr)
        self.assertIn('File "<code>", line 3, in <module>', done.stderr)
        self.assertNotIn("<string>", done.stderr)

    def test_sources_are_known_however_they_are_asked_for(self):
        code = "import {0}\ntry:\n    1 / 0  # here\nexcept Exception:\n    {1}\n"
        for module, ask in ("traceback", "traceback.print_exc()"), ("logging", "logging.exception('')"), ("warnings", "warnings.warn('')  # here"):
            done = self.run_code(code.format(module, ask))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("# here", done.stderr, module)
        self.assertEqual(self.run_code("import inspect\ndef f(): pass\nprint(inspect.getsource(f))").stdout, "def f(): pass\n\n")
        self.assertEqual(self.run_code("import linecache, sys\nprint([f for f in sys.meta_path if 'Finder' == getattr(f, '__name__', '')])").stdout, "[]\n")

    def test_syntax_error(self):
        done = self.run_code("x = 1\ndef (\n")
        self.assertEqual(done.returncode, 1)
        self.assertIn("SyntaxError", done.stderr)
        self.assertIn('File "<code>", line 2', done.stderr)
        self.assertIn("def (", done.stderr)
        self.assertNotIn("<string>", done.stderr)

    def test_long_code_and_future(self):
        done = self.run_code("from __future__ import annotations\nx = '" + "y" * 300000 + "'\nprint(len(x))")
        self.assertEqual(done.stdout, "300000\n")

    def test_pickle_and_inspect(self):
        done = self.run_code("import pickle, traceback\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(A.__module__)")
        self.assertEqual(done.stdout, "__main__\n")

    def test_interrupt_is_a_status(self):
        self.assertEqual(self.run_code("import os, signal; os.kill(os.getpid(), signal.SIGINT)").returncode, -2)


@unittest.skipUnless(have(NODE), "no Node.js")
class NodeRuns(unittest.TestCase):
    def run_code(self, code, *args, **options):
        return run(NODE, "-e", "run_node.js", code, *args, **options)

    def test_script(self):
        done = self.run_code("console.log(process.argv.slice(1), require('fs').readFileSync(0, 'utf8'), typeof module, require.main === module)\nprocess.exit(5)", "a", stdin="in")
        self.assertEqual(done.stdout, "[ '<code>', 'a' ] in object true\n")
        self.assertEqual(done.returncode, 5)

    def test_children_and_modules(self):
        done = self.run_code("console.log(process.execArgv)\nimport('fs').then((fs) => console.log(typeof fs.readFileSync))\n"
                             "require('child_process').execFileSync(process.execPath, [...process.execArgv, '-p', '6 * 7'], {stdio: 'inherit'})")
        self.assertEqual((done.stdout, done.stderr), ("[]\n42\nfunction\n", ""))

    def test_what_only_modules_have(self):
        for code, out in (
            ("console.log(await Promise.resolve(3))", "3\n"),
            ("import { sep } from 'path'\nimport fs from 'node:fs'\nconsole.log(sep, await 4, typeof fs.readFileSync)", "/ 4 function\n"),
            ("const path = require('path'); console.log(path.sep, await 5, require.main === module, typeof exports)", "/ 5 true object\n"),
            ("import 'fs'; for await (const x of [1, 2]) console.log(x)", "1\n2\n"),
            ("export const x = 1; console.log(import.meta.url.startsWith('file://'), process.argv.slice(1))", "true [ '<code>' ]\n"),
            ("const f = await (await import('path')).sep; console.log(f)", "/\n"),
        ):
            done = self.run_code(code)
            self.assertEqual((done.stdout, done.stderr, done.returncode), (out, "", 0), code)
        done = self.run_code("console.log(await 1)\nthrow new TypeError('t')")
        self.assertEqual((done.stdout, done.returncode), ("1\n", 1))
        self.assertIn("TypeError: t", done.stderr)
        self.assertEqual(self.run_code("await 1; process.exit(7)").returncode, 7)
        self.assertEqual(self.run_code("await new Promise(() => {})").returncode, 13)
        self.assertEqual(self.run_code("import x from './none.mjs'; await 1").returncode, 1)
        self.assertEqual(self.run_code("let (").returncode, 1)

    def test_error(self):
        done = self.run_code("function f() {\n  null.x\n}\nf()")
        self.assertEqual(done.returncode, 1)
        self.assertIn("<code>:2", done.stderr)
        self.assertEqual(self.run_code("let (").returncode, 1)


if __name__ == "__main__":
    unittest.main()
