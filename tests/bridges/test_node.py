"""Promises of interpreter contexts that the Node.js bridge keeps."""
import os
import pathlib
import signal
import tempfile
import time
import unittest

from harness import NodeContext, have, NODE


@unittest.skipUnless(have(NODE), "no Node.js")
class Node(unittest.TestCase):
    def setUp(self):
        self.context = NodeContext()
        self.addCleanup(lambda: self.context.close())

    def run_code(self, code, **fields):
        return self.context.run(code, **fields)

    def value(self, code, **fields):
        execution = self.run_code(code, **fields)
        self.assertIsNone(execution.error)
        self.assertIsNone(execution.death)
        return execution.result and execution.result["data"]["text/plain"]

    def test_state_and_repl_mode(self):
        self.value("const x = 1; let y = 2; function f() { return x + y } class A {}")
        self.assertEqual(self.value("const x = 40; f()"), "42")
        self.assertEqual(self.value("await new Promise(r => setTimeout(() => r(7), 20))"), "7")
        self.assertEqual(self.value("const z = await 5; z"), "5")
        self.assertEqual(self.value("typeof fetch + typeof require('fs').readFileSync + typeof A"), "'functionfunctionfunction'")

    def test_imports(self):
        self.assertEqual(self.value("const os = await import('node:os'); typeof os.cpus"), "'function'")
        self.assertEqual(self.value("(await Promise.all([...[import('fs')], import( /* x */ 'path')])).map(m => typeof m.default)"), "[ 'object', 'object' ]")
        self.assertEqual(self.value("import fs from 'node:fs'\nimport { join as j, sep } from 'path'; import * as all from \"os\"\nimport url, { URL as U } from 'url';"
                                    "[typeof fs.readFileSync, j('a', 'b'), sep, typeof all.cpus, typeof url.parse, typeof U]"),
                         "[ 'function', 'a/b', '/', 'function', 'function', 'function' ]")
        self.assertEqual(self.value("import d, * as n from 'path'\nimport {\n  join,\n  resolve as r,\n} from 'path';\nd === n.default && d.join === join && r === d.resolve"), "true")
        self.assertIsNone(self.value("import 'fs'"))
        self.assertEqual(self.value("function later() { return import('path') }\n(await later()).sep"), "'/'")

    def test_words_that_are_no_imports(self):
        for code, value in (
            ("'import(x)' + \"import y from 'z'\" + `import('q') ${`import('r')` + typeof import('fs')}`", None),
            ("// import('x')\n/* import a from 'b' */ 1", "1"),
            ("({ import: 5 }).import", "5"),
            ("/import('a')/.test(\"import'a'\")", "true"),
            ("let a = 4, g = 2; a / 2 / g + '/import(`'.length", "10"),
            ("`${{ a: 1 }.a} import('x') ${1}`", "'1 import('x') 1'"),
        ):
            execution = self.run_code(code)
            self.assertIsNone(execution.error, code)
            if value is not None:
                self.assertEqual(execution.result["data"]["text/plain"], value, code)

    def test_modules_of_files(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "node_modules", "near")
            package.mkdir(parents=True)
            (package / "package.json").write_text('{"name": "near", "type": "module", "main": "main.js"}')
            (package / "main.js").write_text("export default 'near'")
            pathlib.Path(folder, "own.mjs").write_text("export const a = 7; console.log('loaded')")
            pathlib.Path(folder, "data.json").write_text('{"k": 8}')
            self.value("process.chdir(%r)" % folder)
            execution = self.run_code("import { a } from './own.mjs'\nimport near from 'near'\nconsole.log('then'); a + near")
            self.assertEqual((execution.stdout, execution.result["data"]["text/plain"]), ("loaded\nthen\n", "'7near'"))
            self.assertEqual(self.run_code("import { b } from './own.mjs'").error["name"], "SyntaxError")
            self.assertIn("Cannot find", self.run_code("await import('no-such')").error["value"])
            self.assertEqual(self.value("import data from './data.json' with { type: 'json' }\ndata.k"), "8")
            self.assertEqual(self.value("a"), "7")

    def test_no_result(self):
        for code in ("undefined", "1;", "const a = 1", "", "// c"):
            self.assertIsNone(self.run_code(code).result, code)

    def test_json(self):
        data = self.run_code("({a: [1, NaN, 'x\\ud800'], b: {c: null}, n: 10n})").result["data"]
        self.assertEqual(data["application/json"], {"a": [1, "NaN", "x\\ud800"], "b": {"c": None}, "n": "10"})
        self.assertNotIn("application/json", self.run_code("new Map()").result["data"])
        self.assertIn("Circular", self.value("const o = {}; o.o = o; o"))

    def test_display(self):
        execution = self.run_code(
            "const h = display(1, {display_id: true}); h.update(2); display({'text/html': '<b>', 'image/png': Buffer.from('x')}, {raw: true, metadata: {a: 1}});"
            "clear_output(true); ({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<i>'})})"
        )
        one, two, raw = execution.frames("display")
        self.assertEqual((one["display_id"], two["update"]), (two["display_id"], True))
        self.assertEqual((raw["data"], raw["metadata"]), ({"text/html": "<b>", "image/png": "eA=="}, {"a": 1}))
        self.assertEqual(execution.frames("clear")[0]["wait"], True)
        self.assertEqual(execution.result["data"], {"text/html": "<i>"})

    def test_a_large_bundle_is_cut(self):
        frame = self.run_code("display({'text/plain': 'p', 'text/html': 'h'.repeat(17 << 20)}, {raw: true})").frames("display")[0]
        self.assertEqual((frame["data"], list(frame["dropped"])), ({"text/plain": "p"}, ["text/html"]))

    def test_errors(self):
        error = self.run_code("function f() { null.x }\nf()").error
        self.assertEqual(error["name"], "TypeError")
        self.assertEqual(len(error["traceback"]), 3, error)
        self.assertIn("cell-1:1", error["traceback"][1])
        self.assertEqual(self.run_code("let (").error["name"], "SyntaxError")
        self.assertEqual(self.run_code("throw {a: 1}").error["value"], "{ a: 1 }")
        self.assertEqual(self.run_code("await Promise.reject(new RangeError('r'))").error["name"], "RangeError")
        self.assertEqual(self.run_code("function g() { g() }; g()").error["name"], "RangeError")
        self.assertIsNotNone(self.run_code("throw new Proxy({}, {get() { throw 1 }})").error)

    def test_order(self):
        execution = self.run_code(
            "const cp = require('child_process'), fs = require('fs');\n"
            "for (let i = 0; i < 50; i++) { console.log('a'); console.error('b'); display(i); fs.writeSync(2, 'c'); process.stdout.write('d');\n"
            "cp.execSync('echo e >&2; echo f', {stdio: 'inherit'}); console.error('g'); }"
        )
        text = execution.order
        self.assertEqual(execution.stdout, "a\ndf\n" * 50)
        self.assertEqual(execution.stderr, "b\nce\ng\n" * 50)
        shows = [i for i, (kind, _) in enumerate(text) if kind == "display"]
        self.assertEqual(len(shows), 50)
        for i in shows:
            self.assertTrue(text[i - 1][1].endswith("b\n"))
            self.assertEqual(text[i + 1], ("stderr", "c"))
            self.assertTrue(text[i + 2][1].startswith("d"))

    def test_streams_in_turn(self):
        execution = self.run_code("for (let i = 0; i < 300; i++) { console.log(i); console.error(i) }; 'end'")
        expected = [(k, "%d\n" % i) for i in range(300) for k in ("stdout", "stderr")] + [("result", "'end'")]
        self.assertEqual(execution.order, expected)

    def test_what_is_printed_is_not_kept(self):
        self.value("require('v8').setFlagsFromString('--expose-gc'); var collect = require('vm').runInNewContext('gc');"
                   "var printed = ['log', 'error', 'dir', 'table', 'trace'].map((name) => { const value = { a: [name] };"
                   "console[name](value); return new WeakRef(value) });")
        self.assertEqual(self.value("await new Promise(setImmediate); collect(); printed.filter((it) => it.deref()).length"), "0")

    def test_console(self):
        execution = self.run_code("console.group('g'); console.log('%s-%d', 'a', 1); console.groupEnd(); console.info({ a: { b: { c: { d: 1 } } } });"
                                  "console.count(); console.count(); console.assert(false, 'no'); console.warn('w'); console.trace('t')")
        self.assertEqual(execution.stdout, "g\n  a-1\n{ a: { b: { c: [Object] } } }\ndefault: 1\ndefault: 2\n")
        self.assertRegex(execution.stderr, r"^Assertion failed: no\nw\nTrace: t\n    at cell-1:1:")
        self.assertEqual(self.value("require('console') === console && console.log.name"), "'log'")
        self.assertEqual(self.run_code("import { log } from 'console'; log(1)").stdout, "1\n")

    def test_exit_ends_the_execution_only(self):
        self.value("var kept = 1")
        for code, status in (
            ("console.log('a'); process.exit(3); kept = 2", 3),
            ("require('process').exit('4')", 4),
            ("(await import('node:process')).exit(5)", 5),
            ("setTimeout(() => process.exit(6), 10); await new Promise(() => {})", 6),
            ("Promise.resolve().then(() => process.exit(7)); await new Promise(() => {})", 7),
            ("try { process.exit(8) } catch {}", 8),
            ("process.exitCode = 9; process.exit()", 9),
            ("(async () => process.exit(10))()", 10),
        ):
            execution = self.run_code(code)
            self.assertEqual((execution.done["exit_code"], execution.error["name"], execution.error["value"]), (status, "SystemExit", str(status)), code)
            self.assertEqual(execution.stderr, "")
        for code in "process.exit()", "process.exit(0); 1":
            self.assertEqual(self.run_code(code).done, {"type": "done", "exit_code": 0}, code)
        self.assertEqual(self.value("kept + typeof process.exitCode"), "'1undefined'")
        self.value("setTimeout(() => process.exit(4), 1000)")
        time.sleep(1.5)
        self.assertEqual((self.value("kept"), self.context.logs["stderr"]), ("1", b""))

    def test_rejections_that_nobody_awaits_are_errors(self):
        for code, name, value in (
            ("Promise.reject(new Error('x')); 1", "Error", "x"),
            ("(async () => { throw new TypeError('t') })();", "TypeError", "t"),
            ("setTimeout(() => Promise.reject(new RangeError('r')), 1); await new Promise((done) => setTimeout(done, 50))", "RangeError", "r"),
            ("await Promise.reject(new Error('a'))", "Error", "a"),
            ("var both = Promise.reject(new Error('b')); await both", "Error", "b"),
            ("var e = new Error('same'); Promise.reject(e); throw e", "Error", "same"),
            ("Promise.reject(5);", "Uncaught", "5"),
        ):
            execution = self.run_code(code)
            self.assertEqual((execution.error["name"], execution.error["value"], execution.stderr), (name, value, ""), code)
            self.assertEqual(self.run_code("1").order, [("result", "1")])
        execution = self.run_code("Promise.reject(new Error('first')); Promise.reject(new Error('second')); throw new Error('third')")
        self.assertEqual(execution.error["value"], "third")
        self.assertEqual([execution.stderr.count(word) for word in ("first", "second", "third")], [1, 1, 0])
        late = "const p = Promise.reject(new Error('late')); await new Promise((done) => setTimeout(done, 20)); try { await p } catch { 'caught' }"
        self.assertEqual(self.value(late), "'caught'")

    def test_objects_and_blocks(self):
        self.value("var x = 1")
        for code, value in (
            ("{a:1,b:2}", "{ a: 1, b: 2 }"), ("{a:1}", "{ a: 1 }"), ("{}", "{}"), ("{ x }", "{ x: 1 }"),
            ("// note\n/* more */ {a: [await 5], ...{b: 2}} // end", "{ a: [ 5 ], b: 2 }"), ("{f() { return 3 }}.f()", "3"),
            ("{ let z = 4; z }", "4"), ("{ f(); function f() {} }", None), ("{a:1};", None), ("{ var v = 1 }\nv", "1"),
        ):
            self.assertEqual(self.value(code), value, code)
        self.assertEqual(self.run_code("{ console.log(1) }").stdout, "1\n")
        self.assertEqual(self.run_code("{ broken").error["name"], "SyntaxError")

    def test_late_output_and_rejections(self):
        self.value("setTimeout(() => { console.log('late'); display(5); throw new Error('later') }, 1000); setTimeout(() => Promise.reject(new Error('alone')), 1000); 1")
        until = time.monotonic() + 20
        while not all(text in self.context.logs["stderr"] for text in (b"alone", b"later")) and time.monotonic() < until:
            time.sleep(0.05)
        self.assertEqual(self.context.logs["stdout"], b"late\n5\n")
        self.assertIn(b"alone", self.context.logs["stderr"])
        self.assertIn(b"later", self.context.logs["stderr"])
        self.assertEqual(self.value("2"), "2")

    def test_a_flood_by_a_child_does_not_hold_the_end(self):
        self.assertEqual(self.value("var p = require('child_process').spawn('yes', {stdio: 'inherit'}); 1", timeout=10), "1")
        self.value("p.kill();")

    def test_interrupts(self):
        self.value("var kept = 'yes'")
        for code in (
            "while (true);", "for (;;) { console.log(1); console.error(2) }", "for (;;) display(1)", "await new Promise(() => {})",
            "try { while (true); } finally { 1 }", "require('child_process').execSync('sleep 100')", "/(a+)+$/.test('a'.repeat(40) + 'b')",
        ):
            execution = self.context.start("console.log('go'); " + code)
            while "go" not in execution.stdout and not execution.finished.is_set():
                time.sleep(0.005)
            time.sleep(0.1)
            self.context.interrupt(execution)
            self.assertTrue(execution.finished.wait(10), code)
            self.assertIsNone(execution.death, code)
            self.assertIsNotNone(execution.error, code)
            self.assertEqual(self.value("kept"), "'yes'", code)

    def test_the_result_of_an_interrupted_cell_is_nobodys(self):
        execution = self.context.start("console.log('go'); await new Promise(r => setTimeout(() => r('STALE'), 600))")
        while "go" not in execution.stdout:
            time.sleep(0.005)
        self.context.interrupt(execution)
        self.assertTrue(execution.finished.wait(10))
        execution = self.context.run("await new Promise(r => setTimeout(() => r('NEW'), 1200))")
        self.assertEqual([frame["data"]["text/plain"] for _, frame in execution.events], ["'NEW'"])

    def test_listeners_of_sigint_last_for_their_execution(self):
        self.value("process.on('SIGINT', () => {}); var kept = 'yes'")
        for code in ("while (true);", "await new Promise(() => {})"):
            execution = self.context.start("console.log('go'); " + code)
            while "go" not in execution.stdout:
                time.sleep(0.005)
            time.sleep(0.1)
            self.context.interrupt(execution)
            self.assertTrue(execution.finished.wait(10), code)
            self.assertIsNone(execution.death, code)
            self.assertEqual(self.value("kept"), "'yes'", code)

    def test_deep_values_and_long_errors(self):
        deep = "var deep = {}; for (let i = 0; i < 130; i++) deep = { deep }; "
        execution = self.context.run(deep + "deep")
        self.assertIsNone(execution.death)
        self.assertEqual(list(execution.result["data"]), ["text/plain"])
        self.assertIn("application/json", execution.result["dropped"])
        for code in ("display({ 'application/json': deep }, { raw: true })", "display(1, { metadata: { deep } })"):
            self.assertIsNone(self.context.run(code).death, code)
        self.assertIn("application/json", self.context.run("({ a: ['[', '\\\\\"{'] })").result["data"])
        error = self.context.run("throw new Error(Array(290).fill('\\x01'.repeat(65000)).join('\\n'))").error
        self.assertEqual(error["name"], "Error")
        self.assertLess(sum(map(len, error["traceback"])), 600_000)

    def test_cells_that_wait_for_ever(self):
        for i in range(40):  # until the first of them are collected
            execution = self.context.start("console.log('go'); await new Promise(() => {})")
            while "go" not in execution.stdout and not execution.finished.is_set():
                time.sleep(0.002)
            self.context.interrupt(execution)
            self.assertTrue(execution.finished.wait(10), i)
            self.assertIsNone(execution.death, i)

    def test_an_interrupt_never_hits_the_next_execution(self):
        aborts = 0
        self.value("var kept = 'yes'")
        for i in range(200):
            code = "for (let i = 0; i < %d; i++) { console.log(i); console.error(i); display(i) }" % (i % 4)
            if i % 3 == 0:
                code += "; await null"  # no timer: an interrupt inside Node.js's list of timers breaks the list
            execution = self.context.start(code)
            time.sleep((i % 40) * 0.0001)
            with self.context.lock:
                self.context.signal_group()
            self.assertTrue(execution.finished.wait(10), i)
            if execution.death and "v8::ToLocalChecked" in execution.stderr:
                aborts += 1  # V8 fails so when it hears of SIGINT while it makes the promise of a cell
                self.assertLess(aborts, 3, i)
                self.context.close()
                self.context = NodeContext()
                self.value("var kept = 'yes'")
                continue
            self.assertIsNone(execution.death, i)
            follow = self.run_code("kept")
            self.assertIsNone(follow.error, i)
            self.assertEqual(follow.result["data"]["text/plain"], "'yes'", i)

    def test_an_interrupt_that_is_taken_late_never_hits_the_next_execution(self):
        # Node.js takes SIGINT in a thread. Here that thread gets next to nothing of the processor.
        burner = int(self.value("require('child_process').spawn('sh', ['-c', 'while :; do :; done']).pid"))
        cpu = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(burner, cpu)
        for thread in pathlib.Path("/proc/%d/task" % self.context.process.pid).iterdir():
            blocked = int((thread / "status").read_text().partition("SigBlk:")[2].split()[0], 16)
            if blocked >> (signal.SIGINT - 1) & 1:
                os.sched_setaffinity(int(thread.name), cpu)
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        for i in range(5):
            with self.context.lock:
                self.context.signal_group()
            self.assertEqual(self.value("var s = 0; for (let i = 0; i < 1e8; i++) s += i & 1; s"), "50000000", i)

    def test_deaths(self):
        for code, status in (("process.reallyExit(3)", 3), ("process.kill(process.pid, 'SIGKILL')", -9), ("process.abort()", -6)):
            context = NodeContext()
            try:
                execution = context.run("console.log('last'); " + code)
                self.assertEqual((execution.death, execution.stdout), (status, "last\n"), code)
            finally:
                context.close()
        self.value("setTimeout(() => process.reallyExit(4), 1000)")
        self.assertTrue(self.context.dead.wait(20))
        self.assertEqual(self.context.status, 4)

    def test_replaced_globals(self):
        for code in ("console.log = null", "JSON.stringify = JSON.parse = null", "process.stdout = null", "process.removeAllListeners('SIGINT')",
                     "require('fs').readSync = null", "globalThis.Buffer = 1; globalThis.process2 = process", "delete globalThis.display"):
            self.assertIsNone(self.run_code(code + ";").death, code)
            self.assertEqual(self.value("6 * 7"), "42", code)

    def test_children_have_no_socket(self):
        self.assertIn("0 1 2 3", self.value("require('child_process').execSync('echo $(ls /proc/self/fd)').toString()"))

    def test_environment_stdin_and_adopt(self):
        self.assertEqual(self.value("process.env.A_B", env={"A_B": "é"}), "'é'")
        self.assertIsNone(self.value("process.env.A_B"))
        self.assertEqual(self.value("let t = ''; for await (const c of process.stdin) t += c; t", stdin="line\n2"), "'line\n2'")
        self.assertEqual(self.value("let u = 0; for await (const c of process.stdin) u++; u"), "0")
        self.assertEqual(self.context.adopt("/tmp", {"N": "1"}), {"type": "adopted"})
        self.assertEqual(self.value("process.cwd() + process.env.N"), "'/tmp1'")

    def test_garbage_on_the_socket_kills(self):
        code = "const s = require('fs'); const n = s.readdirSync('/proc/self/fd').filter(f => { try { return s.readlinkSync('/proc/self/fd/' + f).startsWith('socket') } catch {} }); s.writeSync(+n[0], 'garbage!'); await new Promise(() => {})"
        self.assertEqual(self.run_code(code).death, -9)


if __name__ == "__main__":
    unittest.main()
