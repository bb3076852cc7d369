"""The unmodified E2B SDKs for Python, `e2b` and `e2b_code_interpreter`, work against real servers.

    python e2b_client.py <sbx-server binary> <e2b version> [word ...]

A check runs in each of its places, with the synchronous SDK or the asynchronous one:

- `host`: a sandbox of its own on a server in host mode, with a token. Needs root.
- `machine`: a dedicated server of its own, with a token.
- `debug`: a dedicated server of its own without a token, as the SDK's debug mode wants it.

A word that names a place, or `sync` or `async`, chooses where checks run; another one chooses the checks that have
it in their names. The SDK is pointed to a server by its own variables, as a user does it. What an older SDK lacks is
skipped, and so is what a missing program would have to do: such a line begins with SKIPPED.

The checks of commands, terminals and files are here, those of lifecycle and access in e2b_sandboxes.py, those of the
code interpreter in e2b_code.py, and those in roots of a sandbox's own in e2b_roots.py.
"""

import base64
import gzip
import hashlib
import io
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from e2b_checks import (
    CONNECT_NAMES,
    EVERYWHERE,
    HOST,
    MIB,
    OF_AUTUMN,
    SCRATCH,
    SLEEP,
    WAIT,
    WITH_TOKEN,
    Place,
    Skipped,
    alive,
    check,
    digest,
    eventually,
    gone,
    main,
    need,
    noise,
    pieces,
    raises,
    takes,
)

# After the module that prepares for it.
import e2b  # noqa: I001
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)

# They add their checks.
import e2b_code  # noqa: F401
import e2b_roots  # noqa: F401
import e2b_sandboxes  # noqa: F401


# ---------------------------------------------------------------------------------- commands


@check(EVERYWHERE)
def check_commands_run(at: Place):
    result = at.sbx.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0), result
    assert not result.error, result
    assert at.sbx.commands.run("cat").stdout == "", "a command has no input that it was not promised"


@check(EVERYWHERE)
def check_commands_exit_codes_raise(at: Place):
    for code in (1, 3, 127, 255):
        error = raises(CommandExitException, at.sbx.commands.run, f"echo out; echo err >&2; exit {code}")
        assert (error.exit_code, error.stdout, error.stderr) == (code, "out\n", "err\n"), vars(error)
        assert str(code) in error.error, error.error
    error = raises(CommandExitException, at.sbx.commands.run, "kill -9 $$")
    assert error.exit_code == -1 and "killed" in error.error, (error.exit_code, error.error)


@check(EVERYWHERE)
def check_commands_have_variables(at: Place):
    envs = {"TEXT": "x y=z ☃ \"'$HOME", "EMPTY": "", "LINES_": "a\nb"}
    result = at.sbx.commands.run('printf %s "$TEXT|${EMPTY-unset}|$LINES_"', envs=envs)
    assert result.stdout == "x y=z ☃ \"'$HOME||a\nb", result
    output = at.sbx.commands.run("echo $HOME; echo ${USER:-none}; env").stdout
    assert output.startswith(f"{at.home}\n") and "none\n" not in output.split("\n", 2)[1], output
    for hidden in ("SBX_TOKEN", "SBX_HOST_MODE", at.server.token or "SBX_"):
        assert hidden not in output, output


@check(HOST)
def check_commands_have_the_variables_of_their_sandbox(at: Place):
    sbx = at.new(envs={"ONE": "sandbox", "TWO": "sandbox ☃"})
    assert sbx.commands.run("echo $ONE $TWO", envs={"ONE": "call"}).stdout == "call sandbox ☃\n"
    assert at.sbx.commands.run("echo $ONE").stdout == "\n", "the neighbour has none of it"


@check(EVERYWHERE)
def check_commands_run_in_a_directory(at: Place):
    at.sbx.commands.run("mkdir -p 'sub dir/below'; echo file > file")
    for cwd, expected in ((None, ""), ("sub dir", "/sub dir"), (f"{at.home}/sub dir/below", "/sub dir/below")):
        assert at.sbx.commands.run("pwd", cwd=cwd).stdout == f"{at.home}{expected}\n", cwd
    for cwd in ("missing", f"{at.home}/missing", "file"):
        raises(InvalidArgumentException, at.sbx.commands.run, "pwd", cwd=cwd, says=cwd)


@check(EVERYWHERE)
def check_commands_output_comes_as_it_is_made(at: Place):
    out, err, home = [], [], at.home

    def on_stdout(text: str):
        out.append(text)
        (home / "go").touch()

    # The command goes on only when its first line has arrived.
    script = f"echo first; echo oops >&2; {WAIT}; [ -e go ] && echo last"
    result = at.sbx.commands.run(script, on_stdout=on_stdout, on_stderr=err.append, timeout=30)
    assert "".join(out) == result.stdout == "first\nlast\n", (out, result)
    assert "".join(err) == result.stderr == "oops\n", (err, result)


@check(EVERYWHERE)
def check_commands_in_the_background_are_waited_for(at: Place):
    handle = at.sbx.commands.run(f"{WAIT}; echo done; exit 4", background=True)
    at.go()
    error = raises(CommandExitException, handle.wait)
    assert (error.exit_code, error.stdout) == (4, "done\n"), vars(error)
    # The end of a process is kept for those who come later.
    late = at.sbx.commands.connect(handle.pid)
    assert raises(CommandExitException, late.wait).exit_code == 4


@check(EVERYWHERE)
def check_commands_in_the_background_are_killed(at: Place):
    handle = at.sbx.commands.run("sleep 1000 & echo $! > child; echo $$ > pid; wait", background=True)
    pids = at.pid("child"), at.pid()
    assert handle.kill() is True
    gone(*pids)
    error = raises(CommandExitException, handle.wait)
    assert error.exit_code == -1 and "killed" in error.error, (error.exit_code, error.error)
    eventually("the second kill finds nothing", lambda: handle.kill() is False)


@check(EVERYWHERE)
def check_commands_outlive_a_disconnect(at: Place):
    handle = at.sbx.commands.run(f"echo before; echo $$ > pid; {WAIT}; echo after; exit 3", background=True)
    pid = at.pid()
    handle.disconnect()
    again = at.sbx.commands.connect(handle.pid)
    assert again.pid == handle.pid and alive(pid)
    at.go()
    error = raises(CommandExitException, again.wait)
    assert (error.exit_code, error.stdout) == (3, "after\n"), vars(error)
    raises(NotFoundException, at.sbx.commands.connect, 4_000_000)


@check(WITH_TOKEN)
def check_commands_outlive_a_client_that_goes_away(at: Place):
    need(CONNECT_NAMES or at.mode != "host", "this SDK names no sandbox that it connects to")
    script = "import sys, e2b; e2b.Sandbox.connect(sys.argv[1]).commands.run(sys.argv[2])"
    command = f"echo $$ > pid; {WAIT}; echo lived > mark"
    client = subprocess.Popen([sys.executable, "-B", "-c", script, at.sbx.sandbox_id, command])
    pid = at.pid()
    client.kill()
    client.wait()
    # The server has seen it go when it has nothing left to send to it.
    (entry,) = [entry for entry in at.sbx.commands.list() if entry.args[-1] == command]
    time.sleep(1)
    assert alive(pid) and entry.pid in [entry.pid for entry in at.sbx.commands.list()]
    at.go()
    eventually("it goes on to its end", (at.home / "mark").exists)


@check(EVERYWHERE)
def check_commands_are_listed(at: Place):
    (at.home / "sub").mkdir()
    os.chmod(at.home / "sub", 0o777)
    handle = at.sbx.commands.run(SLEEP, background=True, envs={"NAME": "value"}, cwd="sub", timeout=0)
    (entry,) = [entry for entry in at.sbx.commands.list() if entry.pid == handle.pid]
    assert entry.cmd.endswith("sh") and entry.args[-2:] == ["-c", SLEEP], entry
    assert entry.envs["NAME"] == "value" and entry.cwd and "sub" in entry.cwd, entry
    assert at.sbx.commands.kill(handle.pid) is True
    eventually("it is listed no more", lambda: all(entry.pid != handle.pid for entry in at.sbx.commands.list()))


@check(EVERYWHERE)
def check_commands_read_input(at: Place):
    commands = at.sbx.commands
    handle = commands.run("read one; read two; echo $one-$two", background=True, stdin=True)
    commands.send_stdin(handle.pid, "one ☃\n")
    commands.send_stdin(handle.pid, "two\n")
    assert handle.wait().stdout == "one ☃-two\n"
    raises(NotFoundException, commands.send_stdin, 4_000_000, "x")
    need(hasattr(commands, "close_stdin"), "this SDK closes no input")
    handle = commands.run("sha256sum", background=True, stdin=True)
    data = noise(300_000)
    handle.send_stdin(data[:200_000])
    handle.send_stdin(data[200_000:])
    handle.close_stdin()
    assert handle.wait().stdout.split()[0] == digest(data)
    handle = commands.run(f"exec 0<&-; {WAIT}", background=True, stdin=True)
    commands.close_stdin(handle.pid)
    commands.close_stdin(handle.pid)
    handle.kill()


@check(EVERYWHERE)
def check_commands_read_streamed_input(at: Place):
    commands = at.sbx.commands
    need(hasattr(commands, "stream_input"), "this SDK streams no input")
    handle = commands.run("while read line; do echo got $line | tee -a seen; done", background=True, stdin=True)

    def lines():
        # Each arrives before the next one is sent.
        for number in range(3):
            yield f"line {number}\n"
            seen = at.home / "seen"
            eventually("the line has arrived", lambda: seen.exists() and f"line {number}" in seen.read_text())

    if at.asynchronous:
        stream = commands.stream_input(handle.pid)
        for line in lines():
            stream.send(line)
        stream.close()
    else:
        commands.stream_input(handle.pid, lines())
    handle.close_stdin()
    assert handle.wait().stdout == "got line 0\ngot line 1\ngot line 2\n"


@check(EVERYWHERE)
def check_commands_are_killed_by_their_timeout(at: Place):
    started = time.monotonic()
    script = "sleep 1000 & echo $! > child; echo $$ > pid; wait"
    # An SDK may be ahead of the server, with an error of its HTTP library.
    kind = TimeoutException if OF_AUTUMN else Exception
    raises(kind, at.sbx.commands.run, script, timeout=2)
    assert time.monotonic() - started < 10
    gone(at.pid("child"), at.pid())
    # The deadline of a connection ends only that.
    handle = at.sbx.commands.run("echo $$ > second; exec sleep 1000", background=True, timeout=0)
    raises(kind, at.sbx.commands.connect(handle.pid, timeout=1).wait)
    assert alive(at.pid("second")) and handle.kill() is True


@check(EVERYWHERE)
def check_commands_output_keeps_its_characters(at: Place):
    result = at.sbx.commands.run(r"printf 'a\377b\000c'; printf '\342\230' >&2")
    assert (result.stdout, result.stderr) == ("a�b\0c", "�"), result
    need(OF_AUTUMN, "this SDK decodes each piece of output alone")
    result = at.sbx.commands.run(r"printf '\342\230'; sleep 0.3; printf '\203 \360\237'; sleep 0.3; printf '\230\200'")
    assert result.stdout == "☃ 😀", result


@check([*HOST, ("machine", "sync")])
def check_commands_output_is_whole(at: Place):
    text = base64.encodebytes(noise(7_500_000)).decode()
    (at.home / "big").write_text(text)
    # Both streams at once.
    result = at.sbx.commands.run("cat big & head -c 1000000 big >&2; wait")
    assert len(text) > 10_000_000 and result.stdout == text, f"{len(result.stdout)} of {len(text)}"
    assert result.stderr == text[:1_000_000], len(result.stderr)


@check(EVERYWHERE)
def check_commands_run_side_by_side(at: Place):
    with ThreadPoolExecutor(16) as threads:
        script = "touch came.{0}; until [ $(ls came.* | wc -l) = 16 ]; do sleep 0.05; done; echo {0}"
        outputs = threads.map(lambda n: at.sbx.commands.run(script.format(n)).stdout, range(16))
        assert list(outputs) == [f"{n}\n" for n in range(16)]


@check(EVERYWHERE)
def check_commands_of_other_users_are_refused(at: Place):
    user = "no-such-user"
    for call in (at.sbx.commands.run, at.sbx.files.list, at.sbx.files.read, at.sbx.files.exists):
        raises(AuthenticationException, call, "x", user=user, says="user")
    raises(AuthenticationException, at.sbx.files.write, "x", "text", user=user)
    assert not (at.home / "x").exists()
    if at.mode == "host":
        own = at.sbx.commands.run("id -u; echo $USER").stdout.split()
        for name in ("user", own[1]):
            assert at.sbx.commands.run("id -u", user=name).stdout == f"{own[0]}\n", name
            at.sbx.files.write("mine", name, user=name)
            assert at.sbx.files.read("mine", user=name) == name
        raises(AuthenticationException, at.sbx.commands.run, "id -u", user="root")
        raises(AuthenticationException, at.sbx.files.read, "mine", user="root")


@check(EVERYWHERE)
def check_commands_that_are_unknown_are_not_killed(at: Place):
    handle = at.sbx.commands.run(SLEEP, background=True)
    for pid in (4_000_000, 0, 1, at.server.process.pid, os.getpid()):
        assert at.sbx.commands.kill(pid) is False, pid
    if at.mode == "host":
        assert at.new().commands.kill(handle.pid) is False, "another sandbox's"
    assert alive(at.pid()) and handle.kill() is True


# ---------------------------------------------------------------------------------- terminals


class Terminal:
    """A terminal of a sandbox, and what it has shown."""

    def __init__(self, at: Place, pid: int | None = None) -> None:
        self.shown, self.pty, words = bytearray(), at.sbx.pty, {}
        if at.asynchronous:
            words["on_data"] = self.shown.extend
        if pid is None:
            self.handle = self.pty.create(e2b.PtySize(rows=24, cols=80), **words)
        else:
            self.handle = self.pty.connect(pid, **words)
        self.pid = self.handle.pid
        self.ended: list = []
        self._reader = threading.Thread(target=self._read, args=(at.asynchronous,), daemon=True)
        self._reader.start()

    def _read(self, asynchronous: bool) -> None:
        try:
            self.ended.append(self.handle.wait(**({} if asynchronous else {"on_pty": self.shown.extend})))
        except Exception as error:
            self.ended.append(error)

    def type(self, text: str, expected: str) -> None:
        self.pty.send_stdin(self.pid, text.encode())
        eventually(f"{expected!r} is shown", lambda: expected in self.shown.decode(errors="replace"))

    def end(self):
        (end,) = eventually("the terminal ends", lambda: self.ended)
        return end


@check(EVERYWHERE)
def check_terminals_work(at: Place):
    terminal = Terminal(at)
    # What is typed is shown too, so that it must differ from what is waited for.
    terminal.type("stty size; echo $TERM-$((40+2))\n", "xterm-256color-42")
    assert "24 80" in terminal.shown.decode(), terminal.shown
    at.sbx.pty.resize(terminal.pid, e2b.PtySize(rows=50, cols=132))
    terminal.type("stty size\n", "50 132")
    assert terminal.pid in [entry.pid for entry in at.sbx.commands.list()]
    # Job control: ^C ends the job and not the shell.
    terminal.type("echo $$ > pid; sh -c 'echo $$ > job; echo runs-$((1+1)); exec sleep 1000'\n", "runs-2")
    job = at.pid("job")
    terminal.type("\x03", "^C")
    gone(job)
    terminal.type("echo still-$((1+2))\n", "still-3")
    second = Terminal(at, terminal.pid)
    second.type("echo both-$((2+2))\n", "both-4")
    eventually("the first reader sees it too", lambda: b"both-4" in terminal.shown)
    assert at.sbx.pty.kill(terminal.pid) is True
    gone(at.pid())
    for one in (terminal, second):
        assert isinstance(one.end(), CommandExitException), one.ended
    eventually("the second kill finds nothing", lambda: at.sbx.pty.kill(terminal.pid) is False)


@check(EVERYWHERE)
def check_terminals_end_with_their_shell(at: Place):
    terminal = Terminal(at)
    at.sbx.pty.send_stdin(terminal.pid, b"exit 6\n")
    assert terminal.end().exit_code == 6, terminal.ended
    raises(NotFoundException, at.sbx.pty.send_stdin, 4_000_000, b"x")
    # Some SDKs let the error of their RPC client through.
    raises(Exception, at.sbx.pty.resize, 4_000_000, e2b.PtySize(rows=5, cols=5))


# ---------------------------------------------------------------------------------- files


@check(EVERYWHERE)
def check_files_of_every_content_go_up_and_down(at: Place):
    files = at.sbx.files
    for text in ("", "plain\n", "\r\n☃ 😀\ttext", "no line end"):
        info = files.write("dir/text", text)
        assert (info.name, info.path) == ("text", f"{at.home}/dir/text"), info
        assert files.read("dir/text") == text == (at.home / "dir/text").read_bytes().decode()
    for data in (b"", bytes(range(256)), noise(100_000), b"--\r\n\r\n--x", noise(3 * MIB + 1)):
        files.write("data", data)
        assert bytes(files.read("data", format="bytes")) == data == (at.home / "data").read_bytes()
        assert b"".join(pieces(files.read("data", format="stream"))) == data
        assert bytes(files.read("data", format="bytes")) == data
    files.write("data", io.BytesIO(b"from a file object"))
    assert files.read("data") == "from a file object"
    (owner,) = {at.home.joinpath(name).stat().st_uid for name in ("data", "dir", "dir/text")}
    assert owner == int(at.sbx.commands.run("id -u").stdout), "what is written belongs to the sandbox"


@check([*HOST, ("machine", "sync")])
def check_files_of_64_mib_go_up_and_down(at: Place):
    data = noise(64 * MIB)
    source = SCRATCH / "big"
    source.write_bytes(data)
    with source.open("rb") as stream:
        at.sbx.files.write("big", stream, request_timeout=0)
    assert at.sbx.commands.run("sha256sum < big").stdout.split()[0] == digest(data)
    assert digest(at.sbx.files.read("big", format="bytes", request_timeout=120)) == digest(data)
    whole = hashlib.sha256()
    for piece in pieces(at.sbx.files.read("big", format="stream", request_timeout=120)):
        whole.update(piece)
    assert whole.hexdigest() == digest(data)


NAMES = ["plain", "a space", "ünï ☃ 😀", "plus+and&", "100%25 #x?y=z;", "it's", 'say "so"']
NAMES += ["~tilde", "$HOME", "new\nline", "-rf"]


@check(EVERYWHERE)
def check_files_go_up_in_batches(at: Place):
    files = at.sbx.files
    paths = [f"batch/{name}/below/{name}.txt" for name in NAMES]
    entries = [{"path": path, "data": f"{path}\r\n".encode()} for path in paths]
    infos = files.write_files(entries)
    assert [info.path for info in infos] == [f"{at.home}/{path}" for path in paths], infos
    assert [info.name for info in infos] == [f"{name}.txt" for name in NAMES], infos
    for path in paths:
        assert (at.home / path).read_bytes() == f"{path}\r\n".encode(), path
        assert files.read(path) == f"{path}\r\n", path
        files.write(path, "alone")
        assert (at.home / path).read_text() == "alone" == files.read(path), path
        assert files.get_info(path).path == f"{at.home}/{path}" and files.exists(path)
    assert sorted(entry.name for entry in files.list("batch")) == sorted(NAMES)
    many = [{"path": f"many/{number}", "data": str(number)} for number in range(300)]
    assert len(files.write_files(many)) == 300
    assert at.sbx.commands.run("cat many/* | wc -c; ls many | wc -l").stdout.split() == ["790", "300"]
    mixed = {"m/1": "text", "m/2": io.BytesIO(b"stream"), "m/3": b""}
    infos = files.write_files([{"path": path, "data": data} for path, data in mixed.items()])
    assert [info.name for info in infos] == ["1", "2", "3"], infos
    assert at.sbx.commands.run("cat m/*").stdout == "textstream"


@check(EVERYWHERE)
def check_files_keep_metadata(at: Place):
    files = at.sbx.files
    takes(files.write, "metadata")
    try:
        (at.home / "probe").touch()
        os.setxattr(at.home / "probe", "user.e2b.probe", b"x")
    except OSError as error:
        raise Skipped(f"the file system keeps no extended attributes: {error}") from None
    data = {"Kind": "report", "x-weird.key~": "a value: with = and ~"}
    expected = {key.lower(): value for key, value in data.items()}
    assert files.write("file", "one", metadata=data).metadata == expected
    assert files.get_info("file").metadata == expected
    assert [entry.metadata for entry in files.list(".") if entry.name == "file"] == [expected]
    assert files.rename("file", "other").metadata == expected
    assert files.write("other", "two", metadata={"new": "1"}).metadata == {"new": "1"}
    assert files.get_info("other").metadata == {"new": "1"}, "an upload replaces them all"
    files.write("other", "three")
    assert files.get_info("other").metadata is None


@check(EVERYWHERE)
def check_files_go_compressed(at: Place):
    files = at.sbx.files
    takes(files.write, "gzip", "use_octet_stream")
    data = noise(1000) * 5000
    for content in (data, b"", io.BytesIO(data)):
        files.write("packed", content, gzip=True)
        plain = content.getvalue() if isinstance(content, io.BytesIO) else content
        assert (at.home / "packed").read_bytes() == plain, "it is stored unpacked"
        assert bytes(files.read("packed", format="bytes", gzip=True)) == plain
        assert b"".join(pieces(files.read("packed", format="stream", gzip=True))) == plain
    files.write("packed", gzip.compress(b"a file that is compressed itself"))
    assert gzip.decompress(files.read("packed", format="bytes", gzip=True)) == b"a file that is compressed itself"
    files.write("plain", "octets", use_octet_stream=True)
    assert files.read("plain") == "octets"


def kind_of(entry) -> str:
    """The type of an entry. Older SDKs tell a link by its target only, if the server gives the type of that."""
    return "symlink" if entry.symlink_target is not None else entry.type.value


@check(EVERYWHERE)
def check_files_are_listed(at: Place):
    run, files = at.sbx.commands.run, at.sbx.files
    run("mkdir -p top/one/two/three; cd top; echo x > file; echo y > one/file; ln -s file link; mkfifo pipe")
    tree = {"file": "file", "one": "dir", "link": "symlink"}
    tree |= {"one/file": "file", "one/two": "dir", "one/two/three": "dir"}
    for depth in (1, 2, 3, 9):
        entries = files.list("top", depth=depth)
        expected = {path: kind for path, kind in tree.items() if path.count("/") < depth}
        found = {entry.path.removeprefix(f"{at.home}/top/"): kind_of(entry) for entry in entries}
        if not hasattr(e2b.FileType, "SYMLINK"):
            # Old SDKs leave out what is of this type.
            found["link"] = "symlink"
        assert found == expected, (depth, found)
        assert len(entries) == len({entry.path for entry in entries}), entries
        for entry in entries:
            assert entry.name == entry.path.split("/")[-1]
            if entry.name != "link":
                assert files.get_info(entry.path) == entry, entry
    assert [entry.name for entry in files.list("top/one/two")] == ["three"]
    assert files.list("top/one/two/three") == []
    raises(InvalidArgumentException, files.list, "top/file")
    raises(NotFoundException, files.list, "missing")


@check(EVERYWHERE)
def check_files_have_information(at: Place):
    files, home = at.sbx.files, at.home
    at.sbx.commands.run("printf 12345 > file; chmod 640 file; ln -s file link; mkdir -m 750 dir")
    info = files.get_info("file")
    assert (info.name, info.path, info.type.value, info.size) == ("file", f"{home}/file", "file", 5), info
    assert info.mode & 0o7777 == 0o640 and info.permissions.endswith("rw-r-----"), info
    assert info.owner and info.group, info
    assert abs(info.modified_time.timestamp() - (home / "file").stat().st_mtime) < 1, info
    assert info.symlink_target is None, info
    info = files.get_info("dir")
    assert (info.type.value, info.mode & 0o7777) == ("dir", 0o750) and "rwxr-x---" in info.permissions, info
    info = files.get_info("link")
    assert info.name == "link" and kind_of(info) == "symlink", info
    assert info.symlink_target in ("file", f"{home}/file"), info
    assert files.get_info(".").path == str(home) == files.get_info("~").path
    for path, exists in {"file": True, "dir": True, "link": True, "missing": False, "file/below": False}.items():
        assert files.exists(path) is exists, path


@check(EVERYWHERE)
def check_files_and_directories_are_made_moved_and_removed(at: Place):
    files, home = at.sbx.files, at.home
    assert files.make_dir("a/b/c") is True and files.make_dir("a/b/c") is False and (home / "a/b/c").is_dir()
    files.write("a/file", "text")
    raises(InvalidArgumentException, files.make_dir, "a/file")
    info = files.rename("a/file", "new/parents/name")
    assert (info.name, info.path, info.type.value) == ("name", f"{home}/new/parents/name", "file"), info
    assert files.read("new/parents/name") == "text" and not files.exists("a/file")
    files.write("other", "replaced")
    files.rename("new/parents/name", "other")
    assert files.read("other") == "text"
    assert files.rename("a", "moved").type.value == "dir" and (home / "moved/b/c").is_dir()
    raises(NotFoundException, files.rename, "missing", "x")
    files.remove("other")
    files.remove("moved")
    files.remove("missing")
    assert not files.exists("other") and not (home / "moved").exists()
    at.sbx.commands.run("mkdir kept; echo kept > kept/file; ln -s kept door")
    files.remove("door")
    assert files.read("kept/file") == "kept\n", "a link is removed, not its target"


@check(EVERYWHERE)
def check_files_that_are_missing_are_not_found(at: Place):
    files = at.sbx.files
    files.make_dir("dir")
    files.write("file", "x")
    for path in ("missing", "dir/missing", "file/below"):
        for form in ("text", "bytes", "stream"):
            kind = SandboxException if path == "file/below" else NotFoundException
            error = raises(kind, files.read, path, format=form)
            assert "{" not in str(error), f"raw JSON: {error}"
        raises(NotFoundException, files.get_info, path)
    raises(InvalidArgumentException, files.read, "dir")
    raises(SandboxException, files.write, "dir", "x")
    raises(SandboxException, files.write, "file/below", "x")
    assert files.read("file") == "x" and (at.home / "dir").is_dir()
    for call in (files.get_info, files.read, files.list, files.make_dir):
        raises(InvalidArgumentException, call, "~root/x")


@check(HOST)
def check_files_outside_the_home_are_refused(at: Place):
    files, other, home = at.sbx.files, at.new(), at.home
    secret = at.home_of(other) / "secret"
    other.files.write("secret", "the neighbour's")
    outside = SCRATCH / "outside"
    outside.write_text("untouched")
    outside.chmod(0o666)
    at.sbx.commands.run(f"ln -s {secret.parent} door; ln -s {secret} link; echo x > mine")
    calls = {
        "read": files.read,
        "write": lambda path: files.write(path, "overwritten"),
        "write_files": lambda path: files.write_files([{"path": "x", "data": "x"}, {"path": path, "data": "x"}]),
        "list": files.list,
        "make_dir": lambda path: files.make_dir(f"{path}/new"),
        "rename": lambda path: files.rename("mine", path),
        "rename from": lambda path: files.rename(path, "theirs"),
        "watch_dir": lambda path: Watch(at, path),
        "get_info": files.get_info,
        "exists": files.exists,
        "remove": files.remove,
    }
    # A link in the home is the sandbox's own: it may be looked at, moved, replaced and removed.
    own = {"write", "write_files", "rename", "rename from", "get_info", "exists", "remove"}
    reached = []
    for path in ("/etc/passwd", str(secret), str(outside), f"{'../' * 20}etc/passwd", "door/secret", "link", "/"):
        for name, call in calls.items():
            try:
                call(path)
            except SandboxException as error:
                # An absolute path is answered with the one that would do.
                why = str(home) if path.startswith("/") else "outside the sandbox" if path[0] == "." else "link"
                if why not in str(error):
                    reached.append(f"{name} of {path} does not say {why}: {error}")
            else:
                if path != "link" or name not in own:
                    reached.append(f"{name} of {path} is not refused")
            at.sbx.commands.run(f"echo x > mine; ln -sfn {secret} link")
    assert not reached, "\n".join(reached)
    assert outside.read_text() == "untouched" and other.files.read("secret") == "the neighbour's"
    assert os.listdir(secret.parent).count("new") == 0


@check(EVERYWHERE)
def check_files_have_relative_paths(at: Place):
    files = at.sbx.files
    spellings = ["dir/file", "./dir/file", "dir//file", "dir/../dir/./file", "~/dir/file", f"{at.home}/dir/file"]
    for number, path in enumerate(spellings):
        # `..` may stand in an answer: only the kernel knows where it leads.
        info = files.write(path, str(number))
        assert os.path.normpath(info.path) == f"{at.home}/dir/file", (path, info)
        assert [files.read(other) for other in spellings] == [str(number)] * len(spellings), path
        assert os.path.normpath(files.get_info(path).path) == f"{at.home}/dir/file", path
    for path in ("dir", "~/dir", "./dir/"):
        assert [entry.path for entry in files.list(path)] == [f"{at.home}/dir/file"], path


# ---------------------------------------------------------------------------------- watches


class Watch:
    """A watched directory, and what was seen there: the synchronous SDK polls, the asynchronous one is told."""

    def __init__(self, at: Place, path: str, **options) -> None:
        self.events, self.exits, watch = [], [], at.sbx.files.watch_dir
        if at.asynchronous:
            self.handle = watch(path, on_event=self.events.append, on_exit=self.exits.append, **options)
            self._poll = list
        else:
            self.handle = watch(path, **options)
            self._poll = self.handle.get_new_events

    def seen(self) -> set[str]:
        self.events += self._poll()
        return {f"{event.type.value} {event.name}" for event in self.events}

    def sees(self, *expected: str) -> None:
        try:
            eventually(f"{expected}", lambda: set(expected) <= self.seen())
        except AssertionError as error:
            raise AssertionError(f"{error}; seen: {sorted(self.seen())}") from None

    def stop(self) -> None:
        self.handle.stop()


@check(EVERYWHERE)
def check_watches_see_changes(at: Place):
    at.sbx.files.make_dir("w/sub")
    watch, run = Watch(at, "w"), at.sbx.commands.run
    run("echo one > w/a")
    watch.sees("create a", "write a")
    run("mv w/a 'w/b ☃'")
    watch.sees("rename a", "create b ☃")
    run("chmod 600 'w/b ☃'; rm 'w/b ☃'; mkdir w/dir; echo hidden > w/sub/hidden")
    watch.sees("chmod b ☃", "remove b ☃", "create dir")
    at.sbx.files.write("w/by the api", "text")
    watch.sees("create by the api")
    names = {name.split(" ", 1)[1] for name in watch.seen()}
    assert names <= {"a", "b ☃", "dir", "by the api", "sub"}, f"not of this directory: {names}"
    watch.stop()
    if at.asynchronous:
        eventually("the exit is told", lambda: watch.exits == [None] or not OF_AUTUMN)
    else:
        raises(SandboxException, watch.seen)
    raises(NotFoundException, Watch, at, "missing")
    at.sbx.files.write("file", "x")
    raises(InvalidArgumentException, Watch, at, "file")


@check(EVERYWHERE)
def check_watches_go_down_the_tree(at: Place):
    at.sbx.files.make_dir("w/sub/deep")
    watch, run = Watch(at, "w", recursive=True), at.sbx.commands.run
    run("echo x > w/sub/deep/file")
    watch.sees("create sub/deep/file")
    run("mkdir -p w/later/below")
    watch.sees("create later")
    # A directory made later is watched soon after it is made.
    eventually("below", lambda: run("date >> w/later/below/file") and "write later/below/file" in watch.seen())
    run("rm -r w/sub")
    watch.sees("remove sub/deep/file", "remove sub")
    watch.stop()


@check(EVERYWHERE)
def check_watches_describe_what_changed(at: Place):
    takes(at.sbx.files.watch_dir, "include_entry")
    at.sbx.files.make_dir("w")
    watch = Watch(at, "w", include_entry=True)
    at.sbx.commands.run("printf 123 > w/file; mkdir w/dir")
    watch.sees("create file", "write file", "create dir")
    entries = {event.name: event.entry for event in watch.events if event.entry}
    assert entries["file"].path == f"{at.home}/w/file" and entries["file"].type.value == "file", entries
    assert entries["dir"].type.value == "dir", entries
    eventually("its size", lambda: watch.seen() and any(e.entry and e.entry.size == 3 for e in watch.events))
    at.sbx.commands.run("rm w/file")
    watch.sees("remove file")
    assert all(event.entry is None for event in watch.events if event.type.value == "remove")
    watch.stop()


if __name__ == "__main__":
    main()
