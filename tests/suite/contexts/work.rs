//! The work that people do in contexts: tables, pictures, tasks, questions, packages, commands.
//!
//! Each test asserts what a client gets. Python's run in both back ends, with packages of the package index; in a
//! sandbox too, where its walls can make a difference.

use std::path::Path;

use serde_json::{Value, json};

use super::{PATH, lend, modules_of, packages};
use crate::fixture::{
    EventStream, PATIENCE, Sandbox, Server, TempDir, decode_base64, is_root, memory_of, output_of,
    wait_until,
};
use crate::programs::python::WHEEL;
use crate::skip;

/// A workspace of either mode.
struct Place<'a> {
    server: &'a Server,
    sandbox: Option<&'a Sandbox<'a>>,
    directory: &'a Path,
}

/// A context of it.
struct Context<'a> {
    place: &'a Place<'a>,
    id: String,
    backend: &'a str,
    /// For Python: the virtual environment whose packages it can import.
    packages: &'a Path,
}

/// The events of an execution.
#[derive(Debug)]
struct Cell(Vec<Value>);

fn on_a_machine(test: impl Fn(&Place<'_>)) {
    let directory = TempDir::new();
    let builder = Server::builder().env("PATH", PATH);
    let mut command = builder.command();
    command.current_dir(directory.path());
    test(&Place {
        server: &builder.start_as(command),
        sandbox: None,
        directory: directory.path(),
    });
}

fn in_a_sandbox(test: impl Fn(&Place<'_>)) {
    if is_root() {
        let server = Server::host().env("PATH", PATH).start();
        let sandbox = server.sandbox();
        test(&Place {
            server: &server,
            sandbox: Some(&sandbox),
            directory: &sandbox.home,
        });
    }
}

/// Runs a test in a context of a language, in both modes.
fn everywhere(language: &str, program: &str, test: impl Fn(&Context<'_>)) {
    let mut paths = PATH.split(':').map(|path| Path::new(path).join(program));
    if !paths.any(|path| path.exists()) {
        skip!("there is no {program}");
    }
    let test = |place: &Place<'_>| {
        let body = json!({ "language": language, "backend": "auto" });
        test(&place.context(&body, "auto", Path::new("")));
    };
    on_a_machine(test);
    in_a_sandbox(test);
}

/// Runs a test in a context of each back end of Python; in both modes if walls can make a difference.
fn in_python(walls: bool, test: impl Fn(&Context<'_>)) {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => skip!("no packages for Python: {reason}"),
    };
    let in_both = |place: &Place<'_>, packages: &Path| {
        for backend in ["plain", "ipython"] {
            test(&place.python(backend, packages));
        }
    };
    on_a_machine(|place| in_both(place, &packages));
    if walls {
        in_a_sandbox(|place| {
            let copy = place.directory.join("packages");
            lend(&packages, &copy);
            in_both(place, &copy);
        });
    }
}

impl<'a> Place<'a> {
    fn target(&self, route: &str) -> String {
        match self.sandbox {
            None => format!("/v1/{route}"),
            Some(sandbox) => sandbox.target(route),
        }
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Value {
        let reply = self.server.post(&self.target(route), body);
        assert_eq!(reply.status, 200, "{route}: {}", reply.text());
        reply.json()
    }

    #[track_caller]
    fn context(&'a self, body: &Value, backend: &'a str, packages: &'a Path) -> Context<'a> {
        let made = self.post("contexts", body);
        Context {
            place: self,
            id: made["id"].as_str().unwrap().to_owned(),
            backend,
            packages,
        }
    }

    #[track_caller]
    fn python(&'a self, backend: &'a str, packages: &'a Path) -> Context<'a> {
        let mut environment = json!({ "PYTHONPATH": modules_of(packages) });
        if self.sandbox.is_none() {
            environment["HOME"] = json!(self.directory);
            environment["MPLCONFIGDIR"] = json!(packages.join("fonts"));
        }
        let body = json!({ "backend": backend, "env": environment });
        self.context(&body, backend, packages)
    }
}

impl Context<'_> {
    #[track_caller]
    fn begin(&self, body: &Value) -> EventStream {
        let target = self.place.target(&format!("contexts/{}/execute", self.id));
        let body = body.to_string();
        self.place.server.stream("POST", &target, body.as_bytes())
    }

    #[track_caller]
    fn execute(&self, body: &Value) -> Cell {
        Cell::of(self.begin(body).collect())
    }

    /// Runs code that ends without an error.
    #[track_caller]
    fn run(&self, code: &str) -> Cell {
        let cell = self.execute(&json!({ "code": code }));
        assert_eq!(cell.end()["reason"], "completed", "{cell:?}");
        cell
    }

    /// Runs code that ends with this error.
    #[track_caller]
    fn fail(&self, code: &str, name: &str) -> Cell {
        let cell = self.execute(&json!({ "code": code }));
        assert_eq!(cell.end()["reason"], "error", "{cell:?}");
        assert_eq!(cell.end()["state"], "kept", "{cell:?}");
        assert_eq!(cell.one("error")["name"], name, "{cell:?}");
        cell
    }

    /// Asserts what code writes to stdout.
    #[track_caller]
    fn prints(&self, code: &str, text: &str) {
        assert_eq!(self.run(code).text("stdout"), text, "{code}");
    }

    /// Asserts the text of the result of code.
    #[track_caller]
    fn gives(&self, code: &str, text: &str) {
        assert_eq!(self.run(code).data("result")["text/plain"], text, "{code}");
    }

    /// Lets code go on that waits for a file `go` and its id, until it has printed this line.
    #[track_caller]
    fn let_go(&self, line: &str) {
        let gate = self.place.directory.join(format!("go-{}", self.id));
        std::fs::write(gate, "").unwrap();
        let target = self.place.target(&format!("contexts/{}/logs", self.id));
        wait_until("the line is in the log", PATIENCE, || {
            let events: Vec<_> = self.place.server.stream("GET", &target, b"").collect();
            let log = String::from_utf8(output_of(&events, "stdout", 0).data).unwrap();
            log.lines().last() == Some(line)
        });
    }
}

impl Cell {
    #[track_caller]
    fn of(mut events: Vec<Value>) -> Self {
        events.retain(|event| event["event"] != "ping");
        assert_eq!(events.last().unwrap()["event"], "end", "{events:?}");
        Self(events)
    }

    fn end(&self) -> &Value {
        self.0.last().unwrap()
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |event| event["event"] == name)
    }

    #[track_caller]
    fn one(&self, name: &str) -> &Value {
        let all: Vec<_> = self.all(name).collect();
        assert_eq!(all.len(), 1, "{name}: {self:?}");
        all[0]
    }

    /// What is shown by the one event of this name.
    #[track_caller]
    fn data(&self, name: &str) -> &Value {
        &self.one(name)["data"]
    }

    /// What was written to a stream.
    fn text(&self, stream: &str) -> String {
        let data = |event: &Value| event["data"].as_str().unwrap().to_owned();
        self.all(stream).map(data).collect()
    }

    /// The names of the events between the first and the last; neighbours of one stream are one.
    fn names(&self) -> Vec<&str> {
        let inner = self.0[1..self.0.len() - 1].iter();
        let names = inner.map(|event| event["event"].as_str().unwrap());
        let mut names: Vec<_> = names.collect();
        names.dedup_by(|next, last| next == last && next.starts_with("std"));
        names
    }

    #[track_caller]
    fn traceback(&self) -> String {
        let lines = self.one("error")["traceback"].as_array().unwrap().iter();
        let lines: Vec<_> = lines.map(|line| line.as_str().unwrap()).collect();
        lines.join("\n")
    }
}

fn is_png(data: &Value) -> bool {
    let picture = data["image/png"].as_str().unwrap_or_default();
    decode_base64(picture).starts_with(b"\x89PNG\r\n\x1a\n")
}

#[test]
fn tables_charts_pictures_and_formulas_are_shown() {
    in_python(false, |context| {
        let cell = context.run(
            "import pandas as pd\ntable = pd.DataFrame({'city': ['Lima', 'Oslo'], 'people': [10, 1]})\nprint('first')\ndisplay(table.head(1))\ntable",
        );
        assert_eq!(cell.names(), ["stdout", "display", "result"]);
        for (name, has_oslo) in [("display", false), ("result", true)] {
            let data = cell.data(name).as_object().unwrap();
            assert!(data.keys().eq(["text/html", "text/plain"]), "{data:?}");
            for shown in data.values() {
                let shown = shown.as_str().unwrap();
                assert!(shown.contains("Lima") && shown.contains("Oslo") == has_oslo);
            }
            assert!(data["text/html"].as_str().unwrap().contains("<table "));
        }
        let chart = "import altair\naltair.Chart(table).mark_bar().encode(x='city', y='people')";
        let html = context.run(chart).data("result")["text/html"].to_string();
        assert!(html.contains("vega-embed"), "{html}");
        context.run("altair.renderers.enable('mimetype');");
        let cell = context.run(chart);
        let mut bundle = cell.data("result").as_object().unwrap().iter();
        let chart = bundle.find(|(mime, _)| mime.starts_with("application/vnd.vegalite."));
        assert_eq!(chart.unwrap().1["mark"]["type"], "bar", "{cell:?}");

        let code = "from PIL import Image\nImage.new('RGB', (4, 3), 'red')";
        assert!(is_png(context.run(code).data("result")));
        let cell = context.run(
            "class Shape:\n    def _repr_svg_(self): return '<svg/>'\n    def _repr_latex_(self): return '$x^2$'\n    def __repr__(self): return 'a shape'\nShape()",
        );
        let shape =
            json!({ "image/svg+xml": "<svg/>", "text/latex": "$x^2$", "text/plain": "a shape" });
        assert_eq!(*cell.data("result"), shape);
        let code =
            "from IPython.display import HTML, Math\ndisplay(Math('x^2'))\nHTML('<b>bold</b>')";
        let cell = context.run(code);
        let formula = &cell.data("display")["text/latex"];
        assert_eq!(*formula, "$\\displaystyle x^2$");
        assert_eq!(cell.data("result")["text/html"], "<b>bold</b>");
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn figures_are_shown_once() {
    in_python(true, |context| {
        let cell = context.run(
            "%matplotlib inline\nimport matplotlib.pyplot as plt\nprint('before')\nplt.figure(figsize=(2, 1)); plt.plot([1, 2])\nplt.figure(figsize=(3, 1)); plt.plot([2, 1])\nplt.show()\nprint('after')\nplt.figure(figsize=(4, 1)); plt.plot([3, 3]);",
        );
        let mut names = cell.names();
        names.retain(|name| *name != "stderr"); // matplotlib says so when it takes long to find fonts
        assert_eq!(names, ["stdout", "display", "display", "stdout", "display"]);
        for (shown, width) in cell.all("display").zip([200, 300, 400]) {
            assert!(is_png(&shown["data"]), "{shown}");
            let text = format!("<Figure size {width}x100 with 1 Axes>");
            assert_eq!(shown["data"]["text/plain"], text);
        }
        let nothing_is_left = || assert_eq!(context.run("1").names(), ["result"]);
        nothing_is_left();
        let figure = "figure, axes = plt.subplots()\naxes.plot([1, 2])\nfigure";
        for code in [figure, "figure"] {
            let cell = context.run(code);
            assert_eq!(cell.names(), ["result"]);
            assert!(is_png(cell.data("result")), "{cell:?}");
        }
        let cell = context.run("import pandas as pd\npd.DataFrame({'a': [1, 2]}).plot()");
        assert_eq!(cell.names(), ["result", "display"]);
        assert!(is_png(cell.data("display")), "{cell:?}");
        let cell = context.run("plt.plot([1])\nplt.savefig('saved.png')\nplt.close()");
        assert!(cell.names().is_empty(), "{cell:?}");
        let cell = context.fail("plt.plot([1, 2])\n1 / 0", "ZeroDivisionError");
        assert_eq!(cell.names(), ["display", "error"]);
        nothing_is_left();
    });
}

#[test]
fn tasks_go_on_between_executions() {
    in_python(false, |context| {
        let cell = context.run(&format!(
            "import asyncio, os\ntold = asyncio.Event()\nasync def talk():\n    while not os.path.exists('go-{}'): await asyncio.sleep(0.01)\n    print('between')\n    await told.wait()\n    print('told')\ntask = asyncio.create_task(talk())\nprint('cell')\nsum(await asyncio.gather(*(asyncio.sleep(0.01, n) for n in range(4))))",
            context.id
        ));
        assert_eq!(cell.data("result")["text/plain"], "6");
        assert_eq!(cell.text("stdout"), "cell\n");
        context.let_go("between");
        let cell = context.run("told.set()\nawait task\nprint('end')");
        assert_eq!(cell.text("stdout"), "told\nend\n");
        assert_eq!(cell.one("start")["stdout_offset"], "cell\nbetween\n".len());
        context.gives("async def main(): return 7\nasyncio.run(main())", "7");
        context.gives("await main()", "7");
    });
}

#[test]
fn threads_and_processes_work() {
    in_python(true, |context| {
        let code = format!(
            "import os, threading, time\nfrom concurrent.futures import ThreadPoolExecutor\nthreads = [threading.Thread(target=print, args=['thread\\n'], kwargs={{'end': ''}}) for _ in range(4)]\nfor thread in threads: thread.start()\nfor thread in threads: thread.join()\nprint(list(ThreadPoolExecutor(4).map(abs, [-1, 2])))\ndef later():\n    while not os.path.exists('go-{}'): time.sleep(0.01)\n    print('later')\nthreading.Thread(target=later).start()",
            context.id
        );
        context.prints(&code, &("thread\n".repeat(4) + "[1, 2]\n"));
        context.let_go("later");
        context.prints("print('next')", "next\n");

        let code = "import multiprocessing\nfork = multiprocessing.get_context('fork')\nours, theirs = fork.Pipe()\ndef child(end):\n    print('child')\n    end.send(sum(range(10)))\nprocess = fork.Process(target=child, args=[theirs])\nprint('parent')\nprocess.start()\nprint(ours.recv())\nprocess.join()";
        context.prints(code, "parent\nchild\n45\n");
        let code = "spawned = multiprocessing.get_context('spawn').Process(target=print, args=['spawned'])\nspawned.start()\nspawned.join()";
        context.prints(code, "spawned\n");
        let code = "with fork.Manager() as manager:\n    queue = manager.Queue()\n    queue.put(5)\n    print(queue.get())";
        context.prints(code, "5\n");
        let code = "with fork.Pool(2) as pool: print(pool.map(abs, [-1, 2]))";
        match context.place.sandbox {
            None => context.prints(code, "[1, 2]\n"),
            // There are no POSIX semaphores.
            Some(_) => drop(context.fail(code, "PermissionError")),
        }
    });
}

#[test]
fn progress_is_written_over_itself_on_stderr() {
    in_python(false, |context| {
        let cell = context.run("from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='load', mininterval=0): pass\nprint('done')");
        assert_eq!(cell.names(), ["stderr", "stdout"]);
        let progress = cell.text("stderr");
        let states: Vec<_> = progress.split('\r').skip(1).collect();
        assert!(states.len() > 3, "{progress:?}");
        assert!(states.iter().all(|state| state.starts_with("load: ")));
        assert!(states.last().unwrap().starts_with("load: 100%"));
        assert!(progress.ends_with('\n'), "{progress:?}");
    });
}

#[test]
fn questions_are_answered() {
    in_python(false, |context| {
        let code =
            "from getpass import getpass\nprint('hello', input('name? '), getpass('word? '))";
        let mut stream = context.begin(&json!({ "code": code, "allow_input": true }));
        for (prompt, password) in [("name? ", false), ("word? ", true)] {
            let asked = stream.find(|event| event["event"] == "input").unwrap();
            assert_eq!(asked["prompt"], prompt);
            assert_eq!(asked["password"], password);
            let (place, route) = (context.place, format!("contexts/{}/input", context.id));
            place.post(&route, &json!({ "value": prompt.trim() }));
        }
        let rest = Cell::of(stream.collect());
        assert_eq!(rest.text("stdout"), "hello name? word?\n");

        let code = "import sys\n(input('first? '), sys.stdin.read())";
        let cell = context.execute(&json!({ "code": code, "stdin": "one\ntwo\nthree" }));
        assert_eq!(cell.text("stdout"), "first? ");
        assert_eq!(cell.data("result")["text/plain"], "('one', 'two\\nthree')");
        context.fail("input('nobody? ')", "EOFError");
    });
}

#[test]
fn tracebacks_have_the_lines_of_the_code() {
    in_python(false, |context| {
        context.run("def half(n):\n    return n / 0  # the divisor");
        for call in ["half(4)", "list(map(half, [4]))"] {
            let cell = context.fail(&format!("print('called')\n{call}"), "ZeroDivisionError");
            assert_eq!(cell.names(), ["stdout", "error"]);
            let traceback = cell.traceback();
            for line in [call, "return n / 0  # the divisor", "division by zero"] {
                assert!(traceback.contains(line), "{line}: {traceback}");
            }
            assert!(!traceback.contains("bridge"), "{traceback}");
        }
        let code = "import pandas as pd\ntable = pd.DataFrame({'a': [1]})\ntable['none']  # asked";
        let traceback = context.fail(code, "KeyError").traceback();
        assert!(traceback.contains("table['none']  # asked"), "{traceback}");
        let cell = context.fail("good = 1\nif good\n    pass", "SyntaxError");
        let traceback = cell.traceback();
        assert!(traceback.contains("    if good\n"), "{traceback}");
        assert!(!traceback.contains("site-packages"), "{traceback}");
    });
}

#[test]
fn all_of_a_very_large_output_arrives() {
    everywhere("python", "python3", |context| {
        let code = "piece = '0123456789' * 100_000\nfor _ in range(100): print(piece, end='')";
        let mut end = 0;
        for event in context.begin(&json!({ "code": code })) {
            if event["event"] == "stdout" {
                assert_eq!(event["offset"], end);
                let data = event["data"].as_str().unwrap();
                let mut bytes = (end..).zip(data.bytes());
                assert!(bytes.all(|(at, byte)| byte == b"0123456789"[at % 10]));
                end += data.len();
            }
        }
        assert_eq!(end, 100_000_000);
        let place = context.place;
        let pid = place
            .sandbox
            .map_or_else(|| place.server.pid(), |_| place.server.inner_pid());
        let peak = memory_of(pid, "VmHWM");
        assert!(peak < 64 << 20, "{peak} bytes");
        context.gives("len(piece)", "1000000");
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn what_is_installed_can_be_imported() {
    in_python(true, |older| {
        let place = older.place;
        older.run(WHEEL);
        let import = "import greeting\ngreeting.main()";
        older.fail(import, "ModuleNotFoundError");
        let made = place.post("venv", &json!({}));
        let pip = ["!pip", "%pip"][usize::from(older.backend == "plain")];
        let uv = format!("!'{}'", older.packages.join("bin/uv").display());
        let installs = [
            format!("{pip} install --no-index"),
            format!("{uv} pip install --offline"),
        ];
        for install in &installs {
            let context = place.python(older.backend, older.packages);
            context.fail(import, "ModuleNotFoundError");
            context.run(&format!("{install} ./greeting-1.0-py3-none-any.whl"));
            let shown = context.run(import).text("stdout");
            let installed = format!("hello from {}/lib/", made["path"].as_str().unwrap());
            assert!(shown.starts_with(&installed), "{shown}");
            // The next one can import what is installed after that.
            context.run("%pip uninstall --yes greeting");
        }
        if made["created"] == true {
            older.gives("import sys\nsys.prefix == sys.base_prefix", "True");
        }
        place.post(&format!("contexts/{}/restart", older.id), &json!({}));
        older.gives("import sys\nsys.prefix == sys.base_prefix", "False");
    });
}

#[test]
fn commands_run_between_lines_of_python() {
    in_python(false, |context| {
        let folder = format!("folder-{}", context.id);
        context.run(&format!("import os\nos.mkdir('{folder}')\n%cd {folder}"));
        let cell = context.run("name = 'a b'\nprint('make')\n!touch one \"{name}\"; echo made >&2\n!ls\nfiles = !ls\nfiles");
        assert_eq!(cell.names(), ["stdout", "stderr", "stdout", "result"]);
        assert_eq!(cell.text("stdout"), "make\na b\none\n");
        assert_eq!(cell.data("result")["text/plain"], "['a b', 'one']");
        let code = "if True:\n    !basename $PWD\n!exit 3\nprint(_exit_code)";
        context.prints(code, &format!("{folder}\n3\n"));
        context.prints("%%bash\nfor n in 1 2; do echo $n; done", "1\n2\n");
    });
}

#[test]
fn javascript_works() {
    everywhere("javascript", "node", |context| {
        let own = context.place.directory.join("own.js");
        std::fs::write(own, "exports.twice = (n) => 2 * n;").unwrap();
        let cell = context.run("const fs = require('fs');\nconst { twice } = require('./own.js');\nconsole.log('out'); console.error('err'); console.log(require('child_process').execSync('echo child').toString().trim());\n({ n: twice(21), has: fs.existsSync('own.js') })");
        assert_eq!(cell.names(), ["stdout", "stderr", "stdout", "result"]);
        assert_eq!(cell.text("stdout"), "out\nchild\n");
        let value = json!({ "n": 42, "has": true });
        assert_eq!(cell.data("result")["application/json"], value);
        let code = format!(
            "const answer = await fetch('http://{}/health');\n[answer.status, typeof (await answer.json())]",
            context.place.server.address
        );
        context.gives(&code, "[ 200, 'object' ]");
        let code = "const fs = 1; const wait = (ms) => new Promise((done) => setTimeout(done, ms, 'waited')); wait(5)";
        context.gives(code, "'waited'");
        context.gives("(await Promise.all([wait(5), fs])).join()", "'waited,1'");

        context
            .run("async function far() {\n  await wait(1);\n  throw new RangeError('too far');\n}");
        let cell = context.fail("console.log('going');\nawait far()", "RangeError");
        assert_eq!(cell.names(), ["stdout", "error"]);
        assert!(cell.traceback().contains("at far (cell-5:3:9)"), "{cell:?}");
        let cell = context.fail("Promise.reject(new Error('nobody cares')); setTimeout(() => { throw new Error('in a timer') }, 1); await wait(50)", "Error");
        assert!(cell.text("stderr").contains("in a timer"), "{cell:?}");
        assert!(cell.traceback().contains("nobody cares"), "{cell:?}");
        context.fail("const x = ;", "SyntaxError");
        context.gives("fs", "1");
    });
}

#[test]
fn bash_works() {
    everywhere("bash", "bash", |context| {
        context.run("greet() { echo \"hello $1\"; }\nnames=(Ada 'Grace H')\ndeclare -A ages=([Ada]=36)\nexport MODE=dark\nmkdir -p sub\ncd sub");
        let cell = context.run("for name in \"${names[@]}\"; do greet \"$name\"; done\nbasename \"$PWD\"; sh -c 'echo $MODE'; echo ${ages[Ada]}\ncat <<END\n$((6 * 7))\nEND\nls nothing");
        assert_eq!(
            cell.text("stdout"),
            "hello Ada\nhello Grace H\nsub\ndark\n36\n42\n"
        );
        assert!(cell.text("stderr").contains("nothing"), "{cell:?}");
        assert_eq!(cell.end()["exit_code"], 2);

        let cell = context.run(
            "set -e\nif false; then :; fi\nfalse || greet or\ngreet before\nfalse\ngreet after",
        );
        assert_eq!(cell.text("stdout"), "hello or\nhello before\n");
        assert_eq!(cell.end()["exit_code"], 1);
        assert_eq!(cell.end()["state"], "kept");
        let cell = context.run("(exit 5)\ngreet after");
        assert_eq!(cell.end()["exit_code"], 5);
        assert!(cell.names().is_empty(), "{cell:?}");
        context.prints("set +e; false; greet now", "hello now\n");
        let body =
            json!({ "code": "read -r line; greet \"$line\"; wc -l", "stdin": "one\ntwo\nthree\n" });
        assert_eq!(context.execute(&body).text("stdout"), "hello one\n2\n");
        let cell = context.run("if true; then");
        assert!(cell.text("stderr").contains("syntax error"), "{cell:?}");
        context.prints("greet ${#names[@]}", "hello 2\n");
    });
}
