"""The bridge of Python contexts: runs code in this interpreter and speaks PROTOCOL.md with the server on socket FD.

The start waits while this file is compiled, so it holds only what every context needs; the sources of the IPython
back end, of figures and of charts come with `init` and are executed in this file's namespace when they are needed. The
code that a context runs shares this process: the bridge uses a private copy of the builtins (made by start_python.py)
and private references, and it must not depend on anything that the code can replace.
"""
import _ast
import _signal
import _thread
import fcntl
import io
import json
import os
import select
import sys
import termios

MAX_FRAME = 64 << 20
MAX_BUNDLE = 16 << 20
MAX_TEXT = 64 << 10  # characters of an error's value, of a line of its traceback, of a prompt
MAX_LINES = 300  # lines of a traceback
MAX_TRACEBACK = 512 << 10  # characters of all of them
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
COROUTINE = 0x80  # inspect.CO_COROUTINE
FIONREAD, NOTHING = termios.FIONREAD, bytes(4)
BLOCKED = [n for n in (1, 2, 3, 10, 12, 14, 15, 17, 26, 27) if n in range(1, _signal.NSIG)]
# What may start a process or let others write: the pipes are read before, so that their output comes after ours.
YIELDING = frozenset(
    ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.Popen", "time.sleep")
)
NO_TEXT = "<exception str() failed>"  # as the traceback module says it
REPRS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)

MAIN_THREAD = _thread.get_ident()
LOCK = _thread.allocate_lock()  # held from a frame that the server answers until its answer is read
FLUSH = [None, None, None]  # by descriptor: writes what a text stream holds back
IDLE = select.poll()
IDLE.register(FD, select.POLLIN)
main_module = sys.modules["__main__"]
namespace = vars(main_module)
ioctl, os_read, os_write, sigmask, get_ident = fcntl.ioctl, os.read, os.write, _signal.pthread_sigmask, _thread.get_ident
getpid, PID = os.getpid, os.getpid()
KIND_NAME, TRACE = type.__dict__["__name__"].__get__, BaseException.__dict__["__traceback__"].__get__
builtin_input, environ, TextIOWrapper, BytesIO = input, os.environ, io.TextIOWrapper, io.BytesIO


class State:
    running = False  # an execution runs: the server answers frames
    owes = False  # the server waits for `done`
    armed = False  # SIGINT raises KeyboardInterrupt in the main thread
    hold = 0  # the main thread is in an exchange with the server: an interrupt waits
    late = False  # an interrupt that waits
    owner = None  # the thread that holds LOCK
    asking = False  # input() waits for a reply
    asked = 0
    last = 0  # the descriptor of the last write: the server has read the other one
    has_children = False  # any of them may have written to the other one
    child = False  # this is a forked child: it has no server
    count = 0
    future = 0  # flags of the compiler: what the cells have imported from __future__
    values = False  # the execution asks for what objects hold
    shown = 0
    loop = pyplot = None
    stdout = stderr = None
    sources = {}  # file name of a cell -> its source
    modules = {}
    hooks = ()  # called after the code of an execution


S = State()


# Frames


def wide(error):
    """Encodes lone surrogates inside JSON strings as the text \\udXXX: parsers refuse the escape."""
    return "".join("\\\\u%04x" % ord(c) for c in error.object[error.start : error.end]), error.end


__import__("codecs").register_error("bridge", wide)
encode_json = json.encoder.c_make_encoder(
    None, lambda value: str(value), json.encoder.encode_basestring, None, ":", ",", False, True, False
)
decode_json = json.JSONDecoder().scan_once


def encode(value):
    """JSON as bytes; ValueError for a NaN or an infinity."""
    return "".join(encode_json(value, 0)).encode("utf-8", "bridge")


def write_frame(frame):
    data = encode(frame)
    data = memoryview(len(data).to_bytes(4, "little") + data)
    while data:
        data = data[os_write(FD, data) :]


def read_some(most):
    part = os_read(FD, most)
    if not part:
        os._exit(70)  # the server is gone
    return part


def read_exactly(size):
    data = b""
    while len(data) < size:
        data += read_some(size - len(data))
    return data


def read_frame():
    """The next frame; one of the type `lost` if there is no memory for it."""
    left = int.from_bytes(read_exactly(4), "little")
    parts = []
    try:
        while left:
            part = read_some(min(left, 1 << 20))
            left -= len(part)
            parts.append(part)
        return decode_json(b"".join(parts).decode(), 0)[0]
    except MemoryError:
        parts = None
        while left:
            left -= len(read_some(min(left, 512)))
        return {"type": "lost"}


def exchange(frame):
    """Sends a frame and waits until the server has answered `synced`. An interrupt waits as long.

    Does nothing outside an execution, in a forked child, and where this thread is in an exchange already (a destructor
    or a signal handler that prints). Returns whether the frame was sent.
    """
    me = get_ident()
    if is_child() or not S.running or S.owner == me:
        return False
    main = me == MAIN_THREAD
    sent = False
    if main:
        S.hold += 1
    mask = sigmask(_signal.SIG_BLOCK, BLOCKED)
    try:
        while not LOCK.acquire(timeout=0.05):
            if S.asking:
                return False
        S.owner = me
        try:
            if S.running:
                write_frame(frame)
                while read_frame().get("type") not in ("synced", "lost"):
                    pass
                sent = True
        finally:
            S.owner = None
            LOCK.release()
    finally:
        if main:
            S.hold -= 1
        sigmask(_signal.SIG_SETMASK, mask)
        raise_late()
    return sent


def raise_late():
    if S.late and S.armed and not S.hold and get_ident() == MAIN_THREAD:
        S.late = False
        raise KeyboardInterrupt


def unread(fd):
    """Whether the server has not read all of the pipe yet."""
    try:
        return ioctl(fd, FIONREAD, NOTHING) != NOTHING
    except OSError:  # the code closed it, or put something else there
        return False


def settle():
    """Returns when the server has read all that this process wrote."""
    for stream in (S.stdout, S.stderr):
        try:
            stream.flush()
        except (ValueError, OSError):
            pass
    if unread(1) or unread(2):
        exchange({"type": "sync"})


def audit(event, args):
    if event in YIELDING:
        settle()
        S.has_children = S.has_children or event != "time.sleep"


# Streams


class Pipe(io.RawIOBase):
    """Descriptor 1 or 2. Before it is written to, what was written to the other one is with the server."""

    def __init__(self, fd, name):
        self.fd, self.name, self.mode, self.other = fd, name, "wb", 3 - fd

    def fileno(self):
        return self.fd

    def writable(self):
        return True

    def write(self, data):
        try:
            FLUSH[self.other]()
        except (ValueError, OSError):  # the code closed it
            pass
        # A system call for each line would take as long as the write itself.
        if S.last != self.fd or S.has_children:
            if unread(self.other):
                exchange({"type": "sync"})
            S.last = self.fd
        if type(data) is not bytes:
            data = bytes(data)
        written, size = os_write(self.fd, data), len(data)
        while written < size:
            written += os_write(self.fd, memoryview(data)[written:])
        return written


def open_streams():
    """Makes the streams, and puts them back in place after an execution."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(S, name)
        try:
            usable = not (stream.closed or stream.buffer.closed)
        except (AttributeError, ValueError):  # none yet, or detached
            usable = False
        if not usable:
            pipe = Pipe(fd, "<%s>" % name)
            stream = TextIOWrapper(pipe, "utf-8", "backslashreplace", "\n", line_buffering=True)
            stream.mode = "w"
            setattr(S, name, stream)
            FLUSH[fd] = stream.flush
        setattr(sys, name, stream)
        setattr(sys, "__%s__" % name, stream)


class AskingInput(io.TextIOBase):
    """sys.stdin where the execution may ask."""

    encoding, errors, mode, name = "utf-8", "strict", "r", "<stdin>"

    def fileno(self):
        return 0

    def readable(self):
        return True

    def readline(self, size=-1):
        line = ask("", False)
        return "" if line is None else line + "\n"

    def read(self, size=-1):
        return "".join(iter(self.readline, ""))


def open_stdin(text, may_ask):
    S.may_ask = may_ask
    S.has_stdin = text is not None
    if may_ask:
        S.stdin = AskingInput()
    else:
        S.stdin = TextIOWrapper(BytesIO((text or "").encode("utf-8", "surrogatepass")), "utf-8")
    sys.stdin = sys.__stdin__ = S.stdin


def ask(prompt, password):
    """The client's answer, without line end; None at the end of input. It can be interrupted."""
    settle()
    if is_child() or not S.running:
        return None
    S.asking = True
    try:
        with LOCK:
            S.owner = get_ident()
            try:
                S.asked += 1
                mask = sigmask(_signal.SIG_BLOCK, BLOCKED)
                try:
                    write_frame({"type": "input", "k": S.asked, "prompt": prompt[:MAX_TEXT], "password": password})
                finally:
                    sigmask(_signal.SIG_SETMASK, mask)
                while True:
                    IDLE.poll()
                    S.hold += 1
                    mask = sigmask(_signal.SIG_BLOCK, BLOCKED)
                    try:
                        reply = read_frame()
                    finally:
                        S.hold -= 1
                        sigmask(_signal.SIG_SETMASK, mask)
                    raise_late()
                    if reply.get("type") == "lost":
                        raise MemoryError
                    if reply.get("type") == "input_reply" and reply.get("k") == S.asked:
                        return None if reply.get("eof") else str(reply.get("value") or "")
            finally:
                S.owner = None
    finally:
        S.asking = False


def input(prompt=""):
    if sys.stdin is not S.stdin:
        return builtin_input(prompt)
    if S.may_ask and not S.child:
        line = ask(str(prompt), False)
    else:
        if not S.has_stdin:
            raise EOFError("input() has nothing to read: send `stdin` with the code, or set `allow_input`")
        sys.stdout.write(str(prompt))
        line = S.stdin.readline()
        line = line[:-1] if line.endswith("\n") else line or None
    if line is None:
        raise EOFError("EOF when reading a line")
    return line


def getpass(prompt="Password: ", stream=None, **options):
    if S.may_ask and not S.child:
        line = ask(str(prompt), True)
        if line is None:
            raise EOFError("EOF when reading a line")
        return line
    return input(prompt)


# Bundles


def plain_json(value, depth=0):
    """The value as JSON: NaN and infinities as strings, other objects as their text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else {True: "Infinity", False: "-Infinity"}[value > 0] if value == value else "NaN"
    if depth < 100 and isinstance(value, dict):
        return {str(k): plain_json(v, depth + 1) for k, v in value.items()}
    if depth < 100 and isinstance(value, (list, tuple)):
        return [plain_json(v, depth + 1) for v in value]
    return str(value)


def plain_value(mime, value):
    if mime.endswith("json") or mime in ("e2b/data", "e2b/chart"):
        return plain_json(value)
    if isinstance(value, (bytes, bytearray)):
        if mime.startswith("text/") or mime.endswith(("+xml", "javascript")):
            return value.decode("utf-8", "replace")
        return __import__("binascii").b2a_base64(value, newline=False).decode()
    return value if isinstance(value, str) else str(value)


def make_bundle(obj):
    """What the object shows: ({MIME type: value}, metadata)."""
    data, metadata = {"text/plain": repr(obj)}, {}
    kind = type(obj)
    found = [(mime, getattr(kind, name)) for name, mime in REPRS if hasattr(kind, name)]
    found += [(mime, show) for test, mime, show in S.formatters if test(kind)]
    if hasattr(kind, "_repr_mimebundle_"):
        found.append((None, lambda o: o._repr_mimebundle_(include=None, exclude=None)))
    for mime, show in found if kind is not type else ():
        try:
            value = show(obj)
            if isinstance(value, tuple) and len(value) == 2:
                value, extra = value
                metadata.update((extra or {}) if mime is None else {mime: extra} if extra else {})
            if value is not None:
                data.update(value if mime is None else {mime: value})
        except NotImplementedError:  # how an object says that it does not have the type
            pass
        except Exception as error:
            report(error)
    if S.values:
        add_values(obj, data)
    return data, metadata


def report(error):
    """Writes an error that does not end the execution to stderr."""
    told = {"name": KIND_NAME(type(error))}
    describe(error, told)
    S.stderr.write("\n".join(told["traceback"]) + "\n")


def add_values(obj, data):
    """Adds to a bundle what the object holds. charts.py has the function that takes this one's place."""
    if "charts" in S.modules:
        exec(compile(S.modules["charts"], "<bridge>", "exec"), globals())
        add_values(obj, data)


def fit(data, metadata):
    """The parts of a display or result frame: valid JSON, and at most MAX_BUNDLE of it."""
    data = {str(mime): plain_value(str(mime), value) for mime, value in data.items() if value is not None}
    frame = {"data": data, "metadata": plain_json(metadata or {})}
    if not isinstance(frame["metadata"], dict) or len(encode(frame["metadata"])) > 1 << 20:
        frame["metadata"] = {}
    sizes = {mime: len(encode(value)) for mime, value in data.items()}
    dropped = {}
    for mime in sorted(sizes, key=lambda m: (m != "text/plain", sizes[m]), reverse=True):
        if sum(sizes.values()) <= MAX_BUNDLE:
            break
        size = sizes.pop(mime)
        if mime == "text/plain":  # the last one: cut
            text = data[mime].encode("utf-8", "replace")[: MAX_BUNDLE // 6]
            dropped[mime] = size - len(text)
            data[mime] = text.decode("utf-8", "ignore")
        else:
            dropped[mime] = size
            del data[mime]
    if dropped:
        frame["dropped"] = dropped
    return frame


def send_bundle(kind, data, metadata=None, **more):
    """Sends a display or result. Outside an execution its text goes to stdout."""
    frame = dict(fit(data, metadata), type=kind, **more)
    settle()
    if not exchange(frame) and kind == "display":
        S.stdout.write(str(frame["data"].get("text/plain", "")) + "\n")


class DisplayHandle:
    def __init__(self, display_id):
        self.display_id = display_id

    def display(self, obj, **options):
        display(obj, display_id=self.display_id, **options)

    def update(self, obj, **options):
        update_display(obj, display_id=self.display_id, **options)


def display(*objs, metadata=None, display_id=None, raw=False, clear=False, update=False, **ignored):
    """Shows objects as tables, pictures or text, as in a notebook. `display_id` names it for update_display()."""
    if clear:
        clear_output(wait=True)
    more = {}
    if display_id is True:
        S.shown += 1
        display_id = "display-%d-%d" % (os.getpid(), S.shown)
    if display_id is not None:
        more["display_id"] = str(display_id)
    if update:
        more["update"] = True
    for obj in objs:
        data, extra = (obj, {}) if raw else make_bundle(obj)
        send_bundle("display", data, dict(extra, **metadata) if metadata else extra, **more)
    return DisplayHandle(more["display_id"]) if more and not update else None


def update_display(obj, *, display_id, **options):
    display(obj, display_id=display_id, update=True, **options)


def clear_output(wait=False):
    settle()
    exchange({"type": "clear", "wait": bool(wait)})


def find_pictures(name, path=None, target=None):
    """Changes no import but of what opens windows, to which figures.py is added."""
    if name in ("matplotlib.pyplot", "PIL.ImageShow") and "figures" in S.modules:
        exec(compile(S.modules["figures"], "<bridge>", "exec"), globals())
        return pictures_spec(name, path)


def find_display(name, path=None, target=None):
    """Takes display.py for IPython.display where no IPython is installed."""
    if name.partition(".")[0] == "IPython" and "display" in S.modules:
        if "display_spec" not in globals():
            exec(compile(S.modules["display"], "<bridge>", "exec"), globals())
        return display_spec(name)


class PictureFinder:
    find_spec = staticmethod(find_pictures)


class DisplayFinder:
    find_spec = staticmethod(find_display)


# Code


def replace_magic(lines, number):
    """Turns the line that is no Python into a call, if it is `!command` or a `%magic`."""
    line = lines[number]
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    target, sign, command = text.partition("=")
    if sign and target.strip() and command.lstrip()[:1] == "!":
        lines[number] = "%s%s= __import__('builtins').__bridge__('=!', %r)" % (indent, target, command.strip()[1:].strip())
    elif text[:1] == "!":
        lines[number] = "%s__import__('builtins').__bridge__('!', %r)" % (indent, text[1:].strip())
    elif text[:1] == "%" and text[1:2].isalpha():
        name, _, rest = text[1:].strip().partition(" ")
        lines[number] = "%s__import__('builtins').__bridge__(%r, %r)" % (indent, name, rest.strip())
    else:
        return False
    return True


def expand(command, scope):
    """Puts values in place of {expression} and $name, as IPython does. What has none is left to the shell."""
    import re

    def value(match):
        expression = match.group(1) or match.group(2)
        known = scope.f_locals, scope.f_globals
        if not expression or expression.isidentifier() and not any(expression in names for names in known):
            return match.group()
        try:
            return eval("f\"\"\"{%s}\"\"\"" % expression, *known[::-1])
        except Exception:
            return match.group()

    return re.sub("[$]{[^}]*}|[$]{2}|{([^{}]+)}|[$]([^\\W\\d]\\w*)", value, command)


def run_magic(name, rest):
    if name in ("!", "=!", "cd", "pip"):
        rest = expand(rest, sys._getframe(1))
    shell_code = " " + rest  # no option of the shell, whatever it begins with
    if name == "cd":
        os.chdir(os.path.expanduser(rest.strip("'\"") or "~"))
        print(os.getcwd())
    elif name == "=!":
        import subprocess

        shown = subprocess.run(("/bin/sh", "-c", shell_code), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        namespace["_exit_code"] = shown.returncode
        return shown.stdout.decode("utf-8", "replace").splitlines()
    elif name in ("!", "pip", "bash", "sh"):
        import subprocess

        shell = {"!": "/bin/sh", "bash": "bash", "sh": "sh"}
        command = name in shell and [shell[name], "-c", shell_code] or "'%s' -m pip %s" % (sys.executable, rest)
        status = subprocess.run(command, shell=name == "pip", stdin=subprocess.DEVNULL).returncode
        if name == "pip":
            __import__("importlib").invalidate_caches()
        namespace["_exit_code"] = status
        if status and name in ("bash", "sh"):
            raise subprocess.CalledProcessError(status, name)
    elif name != "matplotlib":  # figures are shown without it
        raise NameError("%%%s needs IPython, which this context does not use" % name)


def parse(code, name):
    """The syntax tree and the source that it has positions in."""
    first, _, rest = code.lstrip("\n").partition("\n")
    if first.strip() in ("%%bash", "%%sh"):
        code = "__import__('builtins').__bridge__(%r, %r)" % (first.strip()[2:], rest)
    lines = code.split("\n")
    S.sources[name] = code
    add_source(name)
    indent = indentation(lines)
    while True:
        try:
            return compile("\n".join(lines), name, "exec", ONLY_AST | TOP_LEVEL_AWAIT | S.future, True), lines
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if indent and isinstance(error, IndentationError):
                lines = [line[len(indent) :] if line.startswith(indent) else line for line in lines]
                S.sources[name], indent = "\n".join(lines), ""
                add_source(name)
            elif not (0 <= at < len(lines) and replace_magic(lines, at)):
                raise


def indentation(lines):
    """The white space before the first line of code."""
    for line in lines:
        text = line.lstrip()
        if text and text[0] != "#":
            return line[: len(line) - len(text)]
    return ""


def compile_cell(tree, name):
    """Compiles with the `from __future__` of this and earlier cells."""
    kind = "eval" if type(tree) is _ast.Expression else "exec"
    code = compile(tree, name, kind, TOP_LEVEL_AWAIT | S.future, True)
    if any(type(node) is _ast.ImportFrom and node.module == "__future__" for node in getattr(tree.body, "__iter__", list)()):
        import __future__

        features = [getattr(__future__, feature).compiler_flag for feature in __future__.all_feature_names]
        S.future |= code.co_flags & sum(set(features))
    return code


def add_source(name):
    """Lets tracebacks and inspect find the lines of a cell."""
    if "linecache" in sys.modules:
        code = S.sources[name]
        lines = [line + "\n" for line in code.split("\n")]
        sys.modules["linecache"].cache[name] = (len(code), None, lines, name)


def is_silent(last, lines):
    """Whether a semicolon follows the last expression."""
    rest = [lines[last.end_lineno - 1].encode("utf-8", "replace")[last.end_col_offset :].decode("utf-8", "replace")]
    return any(";" in line.split("#")[0] for line in rest + lines[last.end_lineno :])


async def evaluate_all(codes):
    for code in codes:
        value = eval(code, namespace)
        if code.co_flags & COROUTINE:
            value = await value
    return value


def await_value(coroutine):
    """Runs the coroutine in the context's event loop. After an interrupt the coroutine is cancelled."""
    import asyncio

    if S.loop is None or S.loop.is_closed():
        S.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(S.loop)
    task = S.loop.create_task(coroutine)
    try:
        return S.loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            try:
                S.loop.run_until_complete(task)
            except BaseException:
                pass
        if task.done() and not task.cancelled():
            task.exception()  # it is reported here
        raise


def execute_plain(code):
    name = "<cell %d>" % S.count
    tree, lines = parse(code, name)
    last = tree.body[-1] if tree.body else None
    trees = [tree]
    if type(last) is _ast.Expr and not is_silent(last, lines):
        trees = [_ast.Module(tree.body[:-1], tree.type_ignores), _ast.Expression(last.value)]
    codes = [compile_cell(tree, name) for tree in trees]
    if any(code.co_flags & COROUTINE for code in codes):
        value = await_value(evaluate_all(codes))
    else:
        for code in codes:
            value = eval(code, namespace)
    if value is not None:
        namespace["_"] = value
        data, metadata = make_bundle(value)
        send_bundle("result", data, metadata)


def call(work, *args):
    raise_late()
    work(*args)


def guarded(work, *args):
    """Calls it with interrupts; returns its exception or None. No exception leaves, whenever an interrupt comes."""
    try:
        S.armed = True
        sigmask(_signal.SIG_UNBLOCK, BLOCKED)
        call(work, *args)
    except BaseException as error:
        S.armed = False
        return error
    finally:
        S.armed = S.late = False
        sigmask(_signal.SIG_BLOCK, BLOCKED)


def on_sigint(number, frame):
    if S.armed:
        while frame is not None and frame.f_code in (on_sigint.__code__, audit.__code__):  # one on top of another
            frame = frame.f_back
        if S.hold or frame is not None and frame.f_code is guarded.__code__:
            S.late = True
        else:
            raise KeyboardInterrupt


# Errors


def strip_bridge(summary):
    """Removes the bridge's frames from a traceback and from those it was caused by."""
    while summary is not None:
        summary.stack[:] = [frame for frame in summary.stack if frame.filename != "<bridge>"]
        for inner in getattr(summary, "exceptions", None) or ():
            strip_bridge(inner)
        if summary.__cause__ is not None:
            strip_bridge(summary.__cause__)
        summary = summary.__context__


def shorten(text, most=MAX_TEXT):
    return text if len(text) <= most else text[:most] + "…"


def cut_lines(lines):
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines[half:-half] = ["... %d lines ..." % (len(lines) - 2 * half)]
    fits = sum(map(len, lines)) <= MAX_TRACEBACK
    return [shorten(line, MAX_TEXT if fits else MAX_TRACEBACK // len(lines)) for line in lines]


def text_of(error):
    """Its text, or what the traceback module says where there is none."""
    try:
        return str(error)
    except KeyboardInterrupt:  # it takes too long
        raise
    except BaseException:
        return NO_TEXT


def describe(error, report):
    """Fills in value and traceback, from the safest to the richest: each step can fail."""
    report["value"] = shorten(text_of(error))
    report["traceback"] = ["%s: %s" % (report["name"], report["value"])]
    try:
        lines = S.format_error(error)
    except Exception:  # the error has methods of its own
        traceback = __import__("traceback")
        steps = [step for step in traceback.extract_tb(TRACE(error)) if step.filename != "<bridge>"]
        lines = "".join(traceback.format_list(steps)).split("\n")[:-1] + report["traceback"]
    report["traceback"] = cut_lines(lines)


def format_plain(error):
    import traceback

    trace, depth = error.__traceback__, 0
    step = trace
    while step is not None:
        step, depth = step.tb_next, depth + 1
    if depth > 2000:  # formatting takes time: keep both ends
        step = trace
        for _ in range(MAX_LINES):
            step = step.tb_next
        rest = step
        for _ in range(depth - 2 * MAX_LINES):
            rest = rest.tb_next
        step.tb_next = rest
    for name in S.sources:
        add_source(name)
    summary = traceback.TracebackException(type(error), error, trace)
    strip_bridge(summary)
    return "".join(summary.format()).rstrip("\n").split("\n")


def outcome(error):
    """The fields of `done`."""
    if error is None:
        return {}
    fields = {}
    if isinstance(error, SystemExit):
        code = error.code
        fields["exit_code"] = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        if not fields["exit_code"]:
            return fields
    name = KIND_NAME(type(error))  # whatever its metaclass says
    report = {"name": name, "value": "", "traceback": [name]}
    guarded(describe, error, report)
    return dict(fields, error=report)


# Requests


def set_environment(values):
    for name, value in values.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def flush_code_streams():
    """Flushes what the code put in place of the streams, and C's buffer."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and stream not in (S.stdout, S.stderr):
            stream.flush()
    if S.flush_c is not None:
        S.flush_c()


def run(request):
    S.count = request.get("count") or S.count + 1
    S.values = request.get("values") is True
    values = request.get("env") or {}
    before = {name: environ.get(name) for name in values}
    set_environment(values)
    open_stdin(request.get("stdin"), request.get("ask") is True)
    forget_children()
    S.hold += 1
    try:
        with LOCK:
            S.armed = S.running = True  # an interrupt that comes from now on is held, and raised before the code
            write_frame({"type": "begun"})
    finally:
        S.hold -= 1
    error = guarded(S.execute, request["code"])
    for hook in S.hooks:
        error = guarded(hook) or error
    if is_child():  # the code forked, and the child came to the end
        leave_child(error)
    guarded(flush_code_streams)
    done = outcome(error)
    error = None
    open_streams()
    if _signal.getsignal(_signal.SIGINT) is not on_sigint:
        _signal.signal(_signal.SIGINT, on_sigint)
    if sys.stdin is not S.stdin or S.has_stdin or S.may_ask:
        open_stdin(None, False)
    set_environment(before)
    settle()
    with LOCK:
        S.running = False
        write_frame(dict(done, type="done"))
        S.owes = False


def forget_children():
    try:
        if S.has_children:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # there are none
        S.has_children = False


def leave_child(error):
    status = 0
    if error is not None:
        done = outcome(error)
        status = done.get("exit_code", 1)
        if "error" in done and not isinstance(error, SystemExit):
            S.stderr.write("\n".join(done["error"]["traceback"]) + "\n")
    settle()
    os._exit(status)


def is_child():
    """Whether this is a forked child. C code forks without a word: what its child sends would be taken for ours."""
    if not S.child and getpid() != PID:
        in_child()
    return S.child


def in_child():
    S.child = True
    try:
        os.close(FD)
    except OSError:
        pass


def adopt(request):
    try:
        set_environment(request.get("env") or {})
        if request.get("cwd"):
            os.chdir(request["cwd"])
        write_frame({"type": "adopted"})
    except OSError as error:
        write_frame({"type": "adopted", "error": str(error)})


def warm_up():
    """Imports after `ready` what the first execution would wait for."""
    try:
        import linecache
        import traceback

        __import__("getpass").getpass = getpass
        import ctypes

        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        flush = libc.fflush
        S.flush_c = lambda: flush(stdout)
    except Exception:  # an interpreter without them
        pass


def start(request):
    S.modules = request.get("modules") or {}
    backend = request.get("backend") or "auto"
    version = sys.version.split()[0]
    S.execute, S.format_error, S.make_bundle = execute_plain, format_plain, make_bundle
    S.formatters, S.flush_c = [], None
    namespace.clear()
    namespace.update(__name__="__main__", __doc__=None, __spec__=None, __loader__=None, __package__=None)
    builtins = sys.modules["builtins"]
    namespace["__builtins__"] = builtins
    builtins.input, builtins.__bridge__, sys.argv[:] = input, run_magic, [""]
    open_streams()
    open_stdin(None, False)
    if backend == "auto":
        try:
            import IPython

            backend = "ipython"
        except Exception:
            backend = "plain"
    if backend == "ipython":
        exec(compile(S.modules["ipython"], "<bridge>", "exec"), globals())
        version = start_ipython()
    elif backend.startswith("jupyter:"):
        exec(compile(S.modules["jupyter"], "<bridge>", "exec"), globals())
        version = start_jupyter(backend[len("jupyter:") :])
    else:
        for function in (display, update_display, clear_output):
            setattr(builtins, function.__name__, function)
        sys.meta_path.append(DisplayFinder)
    sys.meta_path.insert(0, PictureFinder)
    os.register_at_fork(after_in_child=in_child)
    sys.addaudithook(audit)
    write_frame({"type": "ready", "backend": backend, "version": version, "pid": os.getpid()})


def wait_for_frame():
    """Waits while nothing runs. Tasks of the event loop go on; what signal handlers of the code raise is dropped."""
    is_there = False
    while not is_there:
        try:
            sigmask(_signal.SIG_UNBLOCK, BLOCKED)
            loop = S.loop
            if loop is not None and not loop.is_closed() and sys.modules["asyncio"].all_tasks(loop):
                loop.add_reader(FD, loop.stop)
                try:
                    loop.run_forever()
                finally:
                    loop.remove_reader(FD)
            IDLE.poll()
            sigmask(_signal.SIG_BLOCK, BLOCKED)
            is_there = True
        except BaseException:
            if S.child:
                os._exit(1)
    try:
        return read_frame()
    except BaseException:  # half of it may be read
        os._exit(70)


def refuse(request):
    raise MemoryError("there is no memory for the code")


def main():
    _signal.signal(_signal.SIGINT, on_sigint)
    sigmask(_signal.SIG_BLOCK, BLOCKED)
    request = read_frame()
    try:
        start(request)
    except BaseException as error:
        text = "cannot start the back end %s: %s: %s" % (request.get("backend"), type(error).__name__, error)
        write_frame({"type": "failed", "error": text})
        os._exit(70)
    warm_up()
    requests = {"run": run, "adopt": adopt, "lost": refuse}
    while True:
        request = wait_for_frame()
        kind = request.get("type")
        S.owes = kind in ("run", "lost")
        if kind not in requests:  # a late input_reply is not for us
            continue
        try:
            requests[kind](request)
        except BaseException as error:  # what the code left behind disturbed the bridge
            if S.child:
                os._exit(1)
            S.armed = S.running = False
            if S.owes:
                name = type(error).__name__
                write_frame({"type": "done", "error": {"name": name, "value": "", "traceback": [name]}})
            try:
                open_streams()
            except BaseException:
                pass


main()
