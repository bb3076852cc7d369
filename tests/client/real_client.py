"""The unmodified `huggingface_hub` client does real work on a real server.

    python real_client.py <sbx-server binary> <huggingface_hub version> [part of a check's name ...]

Each `check_...` function is one promise, written with plain asserts and run in the order of this
file; one line is printed for each. With further words only the checks whose names contain one of
them run. The exit status is 0 only if every check passed.

Nothing of the client is replaced. It is led to a machine by a stand-in for the Jobs API
(`jobs_api.py`), through its own setting for the Hub's address.
"""

import hashlib
import io
import json
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checks import (
    HUB,
    MIB,
    NEW,
    SCRATCH,
    alive,
    check,
    check_in_new_clients,
    digest_of_file,
    eventually,
    failed,
    noise,
    refused,
    run_checks,
)
from huggingface_hub import Sandbox
from huggingface_hub.errors import SandboxError


class Place:
    """Where a check works: the sandbox, and a directory of its own inside it."""

    def __init__(self, sbx: Sandbox, name: str) -> None:
        self.sbx = sbx
        self.directory = SCRATCH / name
        self.directory.mkdir()

    def path(self, name: str) -> str:
        return str(self.directory / name)


# ---------------------------------------------------------------------------------- machines


@check
def check_the_job_is_what_the_contract_says(at: Place):
    job = HUB.jobs[at.sbx.id]
    environment = job.spec["environment"]
    assert environment["SBX_PORT"] == "49983", environment
    assert environment["SBX_IDLE_TIMEOUT"] == "600", environment
    assert len(job.spec["secrets"]["SBX_TOKEN"]) == 64
    assert at.sbx.image == "python:3.12", at.sbx.image
    assert at.sbx.host_id is None


@check
def check_the_environment_of_the_job_reaches_commands_and_its_secrets_stay(at: Place):
    output = at.sbx.run("env").stdout
    assert "FROM_ENV=one two\n" in output, output
    assert "FROM_SECRETS=three\n" in output, output
    assert f"HF_TOKEN={os.environ['HF_TOKEN']}\n" in output, output
    assert "SBX_" not in output, output
    assert HUB.jobs[at.sbx.id].spec["secrets"]["SBX_TOKEN"] not in output


@check
def check_another_handle_connects_by_the_id_alone(at: Place):
    process = at.sbx.run("sleep 1000", background=True)
    other = Sandbox.connect(at.sbx.id)
    assert other.run("echo again").stdout == "again\n"
    assert process.pid in [entry.pid for entry in other.processes() if entry.running]
    other.close()
    assert at.sbx.run("echo still here").stdout == "still here\n"
    process.kill()


@check
def check_a_wrong_token_opens_nothing(at: Place):
    path = at.path("kept")
    at.sbx.files.write(path, "kept")
    stranger = Sandbox.connect(at.sbx.id, token="hf_somebodyelse")
    refused(lambda: stranger.run("echo hi"), 403)
    refused(lambda: stranger.run("echo hi", background=True), 403)
    refused(lambda: stranger.processes(), 403)
    refused(lambda: stranger.files.read(path), 403)
    refused(lambda: stranger.files.exists(path), 403)
    refused(lambda: stranger.files.write(path, "overwritten"), 403)
    refused(lambda: stranger.files.delete(path), 403)
    refused(lambda: stranger.files.list(str(at.directory)), 403)
    stranger.close()
    assert at.sbx.files.read_text(path) == "kept"


@check
def check_kill_ends_the_job_with_everything_in_it(at: Place):
    with Sandbox.create(idle_timeout=None) as sbx:
        job = HUB.jobs[sbx.id]
        pid = sbx.run(["sleep", "1000"], background=True).pid
        stubborn = sbx.run("trap '' TERM; while :; do sleep 0.1; done", background=True).pid
        assert alive(pid) and alive(stubborn) and job.stage() == "RUNNING"
    assert job.process.wait(timeout=60) == 0, f"status {job.process.returncode}: {job.log}"
    assert job.stage() == "CANCELED"
    assert not alive(pid) and not alive(stubborn), "a process outlived its sandbox"
    try:
        Sandbox.connect(sbx.id)
    except SandboxError as error:
        assert "is not running" in str(error), error
    else:
        raise AssertionError("connected to a sandbox that is gone")


@check
def check_kill_by_id_needs_no_handle(at: Place):
    sbx = Sandbox.create()
    job = HUB.jobs[sbx.id]
    Sandbox.kill(sbx.id)
    assert job.process.wait(timeout=60) == 0, job.log
    sbx.close()


@check
def check_an_idle_sandbox_ends_by_itself_but_never_under_a_command(at: Place):
    sbx = Sandbox.create(idle_timeout=2)
    job = HUB.jobs[sbx.id]
    # Longer than the timeout in the foreground, then in the background: both are activity.
    assert sbx.run("sleep 4; echo lived").stdout == "lived\n"
    mark = at.path("mark")
    sbx.run(f"sleep 4; echo lived > {mark}", background=True)
    eventually("the idle sandbox ends", lambda: job.process.poll() is not None, 30)
    assert job.stage() == "COMPLETED", (job.stage(), job.log)
    assert Path(mark).read_text() == "lived\n"
    sbx.close()


# ---------------------------------------------------------------------------------- run


@check
def check_a_string_runs_in_the_shell(at: Place):
    result = at.sbx.run("x=$((20 + 22)); echo $x | tr 4 5; echo problem >&2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "52\n", "problem\n"), result
    assert result.ok and result.signal is None and result.timed_out is False
    assert isinstance(result.duration_ms, int)
    assert at.sbx.run("echo said", shell=True).stdout == "said\n"


@check
def check_a_list_runs_as_it_is(at: Place):
    result = at.sbx.run(["printf", "<%s>", "a b", "$HOME", "*", ";", "", "'\""])
    assert result.stdout == "<a b><$HOME><*><;><><'\">", result
    assert at.sbx.run(["echo", "said"], shell=False).stdout == "said\n"


@check
def check_environment_values_of_every_kind(at: Place):
    values = {
        "TEXT": "x y=z",
        "INT": 7,
        "FLOAT": 1.5,
        "TRUE": True,
        "FALSE": False,
        "EMPTY": "",
        "FROM_ENV": None,
        "UNI": "naïve ☃",
    }
    shown = "|".join(f"${{{name}-unset}}" for name in values)
    result = at.sbx.run(f'printf %s "{shown}"', env=values)
    assert result.stdout == "x y=z|7|1.5|true|false||unset|naïve ☃", result
    # The next command has the environment of the job again.
    assert at.sbx.run('printf %s "$FROM_ENV$TEXT"').stdout == "one two"
    assert at.sbx.run(["sh", "-c", "echo $INT"], env={"INT": 8}).stdout == "8\n"


@check
def check_the_working_directory(at: Place):
    assert at.sbx.run("pwd -P", cwd=str(at.directory)).stdout == f"{at.directory.resolve()}\n"
    assert at.sbx.run(["pwd", "-P"], cwd=str(at.directory)).stdout == f"{at.directory.resolve()}\n"
    refused(lambda: at.sbx.run("pwd", cwd=at.path("missing")), 400)


@check
def check_standard_input(at: Place):
    assert at.sbx.run("cat", stdin="line one\nlïne ☃").stdout == "line one\nlïne ☃"
    assert at.sbx.run("cat", stdin="").stdout == ""
    # Without any, a command that reads finds the end at once.
    assert at.sbx.run("cat; echo over").stdout == "over\n"
    assert at.sbx.run(["sort"], stdin="b\na\n").stdout == "a\nb\n"


@check
def check_eight_mebibytes_of_standard_input_come_back(at: Place):
    text = "0123456789 abcdé ☃\n" * (8 * MIB // 22)
    text += "x" * (8 * MIB - len(text.encode()))
    assert len(text.encode()) == 8 * MIB
    result = at.sbx.run("cat", stdin=text)
    assert result.stdout == text, "the output differs from the input"
    # The command's own count, and a command that reads nothing of it.
    assert at.sbx.run("wc -c", stdin=text).stdout.strip() == str(8 * MIB)
    assert at.sbx.run("echo not reading", stdin=text).stdout == "not reading\n"


@check
def check_a_timeout_ends_the_command_and_keeps_its_output(at: Place):
    pids = at.path("pids")
    script = f"echo before; echo $$ > {pids}; sleep 1000 & echo $! >> {pids}; sleep 1000"
    result = at.sbx.run(script, timeout=1.5, check=False)
    assert result.timed_out is True and not result.ok, result
    assert result.stdout == "before\n", result
    for pid in map(int, Path(pids).read_text().split()):
        eventually(f"{pid} is gone", lambda: not alive(pid), 5)
    error = failed(lambda: at.sbx.run("sleep 1000", timeout=1))
    assert "timed out" in str(error), error
    assert error.result.timed_out is True
    result = at.sbx.run("echo in time", timeout=3600)
    assert result.timed_out is False and result.stdout == "in time\n"


@check
def check_check_raises_for_failure_only(at: Place):
    error = failed(lambda: at.sbx.run("echo out; echo err >&2; exit 3"))
    assert error.result.exit_code == 3 and error.result.stdout == "out\n", error.result
    assert "exited with code 3" in str(error) and "err" in str(error), error
    result = at.sbx.run("exit 255", check=False)
    assert result.exit_code == 255 and not result.ok
    assert at.sbx.run("no-such-program-at-all", check=False).exit_code == 127


@check
def check_death_by_a_signal_is_told(at: Place):
    result = at.sbx.run("echo last words; kill -9 $$", check=False)
    assert (result.exit_code, result.signal, result.stdout) == (None, 9, "last words\n"), result
    error = failed(lambda: at.sbx.run("kill -TERM $$"))
    assert "was killed by signal 15" in str(error), error


@check
def check_a_command_that_cannot_start_is_an_error_with_a_status(at: Place):
    refused(lambda: at.sbx.run(["no-such-program-at-all"]), 400)
    refused(lambda: at.sbx.run([str(at.directory)]), 400)
    refused(lambda: at.sbx.run(["no-such-program-at-all"], background=True), 400)


@check
def check_callbacks_are_called_while_the_command_runs(at: Place):
    # The command goes on only when the callback has answered what it printed, so output that is
    # held back until the end would wait for ever (and run into the timeout).
    answers = [at.path(f"answer-{number}") for number in range(4)]
    script = "; ".join(
        f"echo question {number} {'>&2' if number % 2 else ''}; "
        f"until [ -e {answer} ]; do sleep 0.01; done"
        for number, answer in enumerate(answers)
    )
    heard = []

    def answer(text: str, stream: str) -> None:
        heard.append((stream, text))
        at.sbx.files.write(answers[int(text.split()[1])], "yes")

    result = at.sbx.run(
        script,
        timeout=30,
        on_stdout=lambda text: answer(text, "out"),
        on_stderr=lambda text: answer(text, "err"),
    )
    assert heard == [
        ("out", "question 0\n"),
        ("err", "question 1\n"),
        ("out", "question 2\n"),
        ("err", "question 3\n"),
    ], heard
    assert (
        result.stdout == "question 0\nquestion 2\n" and result.stderr == "question 1\nquestion 3\n"
    ), result


@check_in_new_clients
def check_output_can_be_streamed_without_being_kept(at: Place):
    seen = []
    result = at.sbx.run("seq 1 200000", capture_output=False, on_stdout=seen.append)
    assert result.stdout == "" and result.exit_code == 0
    assert "".join(seen) == "".join(f"{number}\n" for number in range(1, 200001))


@check
def check_no_output_is_ever_lost(at: Place):
    for number in range(100):
        result = at.sbx.run(
            f"echo run {number}; head -c 65000 /dev/zero | tr '\\0' x; echo end {number} >&2"
        )
        assert (
            result.stdout == f"run {number}\n" + "x" * 65000
        ), f"run {number}: {len(result.stdout)} characters"
        assert result.stderr == f"end {number}\n", result.stderr


@check
def check_thirty_two_mebibytes_of_output_arrive(at: Place):
    digest = hashlib.sha256()
    result = at.sbx.run(
        "seq 1 4500000 | head -c 33554432", on_stdout=lambda text: digest.update(text.encode())
    )
    expected = "".join(f"{number}\n" for number in range(1, 4500001))[: 32 * MIB]
    assert len(result.stdout) == 32 * MIB, len(result.stdout)
    assert (
        result.stdout == expected
        and digest.hexdigest() == hashlib.sha256(expected.encode()).hexdigest()
    )


@check
def check_text_of_every_kind_arrives_unchanged(at: Place):
    # U+0085, U+2028 and U+2029 end a line for the client's stream reader unless they are escaped,
    # and so do the control characters from VT to RS.
    samples = [
        "next\u0085line, line\u2028separator, paragraph\u2029separator",
        "vt\x0b ff\x0c fs\x1c gs\x1d rs\x1e esc\x1b bel\x07 del\x7f cr\rlf\n tab\t",
        'quote" backslash\\ slash/ {"event":"exit","exit_code":0}',
        "日本語 русский العربية עברית हिन्दी ελληνικά 한국어 ไทย",
        "😀 𝄞 👩‍👩‍👧 e\u0301 \ufeff\u200b\ufffe\uffff\U0010ffff",
        "\u0000".join("nul"),
    ]
    for sample in samples:
        path = at.path("sample")
        at.sbx.files.write(path, sample)
        assert at.sbx.run(["cat", path]).stdout == sample, sample
        assert at.sbx.run(f"cat {path} >&2").stderr == sample, sample
        if "\0" not in sample:
            assert at.sbx.run(["printf", "%s", sample]).stdout == sample, sample
        assert at.sbx.run("cat", stdin=sample).stdout == sample, sample


@check
def check_characters_split_over_writes_are_joined_and_bad_bytes_replaced(at: Place):
    gate = at.path("gate")
    # The second half of the snowman is written only after the text before it has arrived.
    wait = f"until [ -e {gate} ]; do sleep 0.01; done"
    script = f"printf 'a\\342'; {wait}; printf '\\230'; sleep 0.05; printf '\\203b'"
    result = at.sbx.run(script, timeout=30, on_stdout=lambda text: Path(gate).touch())
    assert result.stdout == "a☃b", result
    result = at.sbx.run("printf 'a\\377b\\303'")
    assert result.stdout == "a\ufffdb\ufffd", result


@check
def check_a_child_left_behind_does_not_hold_the_call(at: Place):
    pid = at.path("pid")
    started = time.monotonic()
    result = at.sbx.run(f"sleep 60 & echo $! > {pid}; echo done")
    assert result.stdout == "done\n" and time.monotonic() - started < 10
    assert alive(int(Path(pid).read_text())), "the child must live on"
    at.sbx.run(["kill", Path(pid).read_text().strip()])


@check
def check_many_threads_share_one_handle(at: Place):
    # As many as the client itself uses for a transfer. With more threads than connections its HTTP
    # library now and then closes a connection that another thread is about to use, with any server.
    workers = at.sbx.files.PARALLEL_MAX_WORKERS

    def work(number: int) -> None:
        for turn in range(10):
            path = at.path(f"{number}-{turn}")
            at.sbx.files.write(path, f"{number} {turn}")
            assert at.sbx.run(["cat", path]).stdout == f"{number} {turn}"

    with ThreadPoolExecutor(workers) as pool:
        assert len(list(pool.map(work, range(workers)))) == workers


# ---------------------------------------------------------------------------------- processes


def entry_of(sbx: Sandbox, pid: int):
    """The newest entry with this pid."""
    return [entry for entry in sbx.processes() if entry.pid == pid][-1]


@check
def check_background_processes_are_listed_as_they_were_started(at: Place):
    before = time.time() * 1000
    shell = at.sbx.run("sleep 1000; :", background=True, env={"N": 1}, cwd=str(at.directory))
    argv = at.sbx.run(["sleep", "1000"], background=True)
    assert alive(shell.pid) and alive(argv.pid)
    for started, cmd in ((shell, "sleep 1000; :"), (argv, ["sleep", "1000"])):
        entry = entry_of(at.sbx, started.pid)
        assert entry.cmd == cmd and entry.running is True and entry.exit_code is None, entry
        assert entry.tag is None
        assert before - 1000 <= entry.started_at_ms <= time.time() * 1000 + 1000, entry
        if NEW:
            assert isinstance(started.id, str) and entry.id == started.id, (started, entry)
    assert os.readlink(f"/proc/{shell.pid}/cwd") == str(at.directory.resolve())
    shell.kill()
    argv.kill()


@check
def check_kill_stops_a_process_and_its_children(at: Place):
    child = at.path("child")
    process = at.sbx.run(
        f"sleep 1000 & echo $! > {child}.new; mv {child}.new {child}; wait", background=True
    )
    eventually("the child has started", lambda: Path(child).exists())
    pid = int(Path(child).read_text())
    # 1.22 sends the pid and returns nothing; later clients send the id and say who stopped it.
    result = process.kill()
    assert result is (True if NEW else None), result
    eventually("the process is gone", lambda: not alive(process.pid), 5)
    eventually("its child is gone", lambda: not alive(pid), 5)
    running = [entry.pid for entry in at.sbx.processes() if entry.running]
    assert process.pid not in running, "a process that was killed is listed as running"
    if NEW:
        assert process.kill() is False, "the second kill stopped nothing"


@check
def check_a_listed_process_can_be_killed_by_another_handle(at: Place):
    pid = at.sbx.run(["sleep", "1000"], background=True).pid
    other = Sandbox.connect(at.sbx.id)
    entry_of(other, pid).kill()
    eventually("the process is gone", lambda: not alive(pid), 5)
    other.close()


@check
def check_a_process_that_ended_stays_listed_with_its_status(at: Place):
    process = at.sbx.run("exit 7", background=True)
    entry = eventually(
        "the process ends", lambda: None if (e := entry_of(at.sbx, process.pid)).running else e
    )
    assert entry.exit_code == 7, entry
    if NEW:
        assert process.kill() is False, "it had ended by itself"
    signalled = at.sbx.run("kill -9 $$", background=True)
    entry = eventually(
        "the process ends", lambda: None if (e := entry_of(at.sbx, signalled.pid)).running else e
    )
    assert entry.exit_code is None, entry


@check
def check_a_talkative_background_process_is_not_held_back(at: Place):
    mark = at.path("mark")
    process = at.sbx.run(
        f"head -c 26214400 /dev/zero; head -c 26214400 /dev/zero >&2; echo > {mark}; sleep 1000",
        background=True,
    )
    eventually("all of it is written", lambda: Path(mark).exists())
    process.kill()


@check
def check_an_unknown_process_is_an_error(at: Place):
    process = at.sbx.run("sleep 1000", background=True)
    pid, identifier = process.pid, getattr(process, "id", None)
    process.pid = 4194999
    if NEW:
        process.id = "p-999999999"
    refused(lambda: process.kill(), 404)
    process.pid = pid
    if NEW:
        process.id = identifier
    process.kill()


# ---------------------------------------------------------------------------------- files


@check
def check_files_are_read_as_they_were_written(at: Place):
    files = at.sbx.files
    for name, data in (
        ("bytes", noise(1000)),
        ("empty", b""),
        ("one", b"\0"),
        ("mebibyte", noise(MIB)),
        ("all", bytes(range(256)) * 64),
    ):
        path = at.path(name)
        files.write(path, data)
        assert files.read(path) == data, name
        assert Path(path).read_bytes() == data, name
    files.write(at.path("text"), "zwölf ☃\u2028\n")
    assert files.read_text(at.path("text")) == "zwölf ☃\u2028\n"
    assert files.read_text(at.path("text"), encoding="utf-8") == "zwölf ☃\u2028\n"
    files.write(at.path("stream"), io.BytesIO(b"from a file object"))
    assert files.read(at.path("stream")) == b"from a file object"


@check
def check_sizes_around_the_ranges_of_the_client(at: Place):
    files = at.sbx.files
    threshold, chunk = files.PARALLEL_THRESHOLD, files.PARALLEL_CHUNK_SIZE
    for size in (
        threshold - 1,
        threshold,
        threshold + 1,
        threshold + chunk - 1,
        threshold + chunk,
        threshold + chunk + 1,
    ):
        data = noise(size, seed=size)
        path = at.path(f"size-{size}")
        files.write(path, data)
        assert Path(path).stat().st_size == size
        assert files.read(path) == data, size
        files.download(path, at.path("down"))
        assert Path(at.path("down")).read_bytes() == data, size


@check
def check_writing_again_replaces_everything(at: Place):
    files, path = at.sbx.files, at.path("file")
    files.write(path, "a much longer text than the next")
    files.write(path, "short")
    assert files.read(path) == b"short"


@check_in_new_clients
def check_a_shorter_upload_in_ranges_leaves_no_tail(at: Place):
    # 1.22 does not say the final size, so there the longer file keeps its tail.
    files, path = at.sbx.files, at.path("file")
    files.write(path, noise(12 * MIB))
    data = noise(5 * MIB + 17, seed=2)
    files.write(path, data)
    assert files.read(path) == data


@check
def check_parents_are_made_and_modes_are_set(at: Place):
    files = at.sbx.files
    path = at.path("a/b/c/script")
    files.write(path, "#!/bin/sh\necho ran\n", mode="755")
    assert files.stat(path).mode == "755", files.stat(path)
    assert at.sbx.run([path]).stdout == "ran\n"
    files.write(path, "#!/bin/sh\necho ran again\n")
    assert at.sbx.run([path]).stdout == "ran again\n", "writing again keeps the mode"
    files.write(path, "secret", mode="0600")
    assert Path(path).stat().st_mode & 0o7777 == 0o600
    big = at.path("x/y/big")
    files.write(big, noise(20 * MIB), mode="640")
    assert Path(big).stat().st_mode & 0o7777 == 0o640 and Path(big).stat().st_size == 20 * MIB
    refused(lambda: files.write(path, "x", mode="rwx"), 400)
    assert files.read(path) == b"secret"


@check
def check_two_hundred_mebibytes_go_up_and_down_unchanged(at: Place):
    files = at.sbx.files
    here, there, back = at.path("here"), at.path("there"), at.path("back")
    with open(here, "wb") as file:
        for number in range(25):
            file.write(noise(8 * MIB, seed=number))
        file.write(b"and an odd end")
    expected = digest_of_file(here)
    files.upload(here, there, mode="600")
    assert at.sbx.run(["sha256sum", there]).stdout.split()[0] == expected, "the upload differs"
    assert files.stat(there).size == 200 * MIB + 14 and files.stat(there).mode == "600"
    files.download(there, back)
    assert digest_of_file(back) == expected, "the download differs"
    assert hashlib.sha256(files.read(there)).hexdigest() == expected, "the read differs"
    # Once more over the file that is there.
    files.upload(here, there)
    assert digest_of_file(there) == expected


@check
def check_small_files_go_up_and_down(at: Place):
    files = at.sbx.files
    for size in (0, 1, 5000):
        data = noise(size)
        Path(at.path("here")).write_bytes(data)
        files.upload(at.path("here"), at.path("there"), mode="700")
        files.download(at.path("there"), at.path("back"))
        assert Path(at.path("back")).read_bytes() == data, size
        assert files.stat(at.path("there")).mode == "700"


@check
def check_stat_and_listing_agree(at: Place):
    files = at.sbx.files
    files.mkdir(at.path("dir"))
    files.write(at.path("file"), b"12345", mode="640")
    os.symlink("file", at.path("link"))
    os.symlink("missing", at.path("dangling"))
    os.mkfifo(at.path("fifo"))
    entries = {entry.name: entry for entry in files.list(str(at.directory))}
    assert {name: entry.type for name, entry in entries.items()} == {
        "dir": "dir",
        "file": "file",
        "link": "symlink",
        "dangling": "symlink",
        "fifo": "file",
    }, entries
    for name, entry in entries.items():
        assert entry.path == at.path(name), entry
        assert files.stat(entry.path) == entry, (files.stat(entry.path), entry)
    assert entries["file"].size == 5 and entries["file"].mode == "640"
    assert abs(entries["file"].mtime_ms - Path(at.path("file")).stat().st_mtime * 1000) < 2
    assert files.list(at.path("dir")) == []


@check
def check_a_link_has_the_size_of_its_target(at: Place):
    # The client reads as much as `size` says, so anything else would cut the content short.
    files = at.sbx.files
    for size in (0, 3, 100_000, 9 * MIB):
        data = noise(size, seed=size)
        files.write(at.path("target"), data)
        if not os.path.lexists(at.path("link")):
            os.symlink("target", at.path("link"))
            os.symlink(at.path("link"), at.path("link-to-link"))
        for name in ("link", "link-to-link"):
            entry = files.stat(at.path(name))
            assert (entry.type, entry.size) == ("symlink", size), entry
            assert files.read(at.path(name)) == data, (name, size)
    if os.path.islink("/etc/os-release"):
        assert files.read("/etc/os-release") == Path("/etc/os-release").read_bytes()
    files.write(at.path("link"), b"through the link")
    assert os.path.islink(at.path("link")) and files.read(at.path("target")) == b"through the link"


@check
def check_exists_tells_missing_from_everything_else(at: Place):
    files = at.sbx.files
    files.write(at.path("file"), "")
    os.symlink("nowhere", at.path("dangling"))
    assert files.exists(at.path("file")) and files.exists(str(at.directory)) and files.exists("/")
    assert files.exists(at.path("dangling")), "a dangling link exists"
    assert not files.exists(at.path("missing")) and not files.exists(at.path("missing/below"))


@check
def check_directories_are_made_and_deleted(at: Place):
    files = at.sbx.files
    deep = at.path("a/b/c")
    files.mkdir(deep)
    files.mkdir(deep)
    assert files.stat(deep).type == "dir"
    files.write(at.path("a/b/file"), "x")
    files.write(at.path("outside"), "stays")
    os.symlink(at.path("outside"), at.path("a/link"))
    refused(lambda: files.delete(at.path("a")), 409)
    assert files.exists(at.path("a/b/file")), "a refused delete leaves all in place"
    files.delete(at.path("a/b/c"))
    assert not files.exists(deep)
    files.delete(at.path("a/link"))
    assert files.read(at.path("outside")) == b"stays", "a link is deleted, not its target"
    os.symlink(at.path("outside"), at.path("a/link"))
    files.delete(at.path("a"), recursive=True)
    assert not files.exists(at.path("a")) and files.read(at.path("outside")) == b"stays"
    refused(lambda: files.delete(at.path("a")), 404)
    refused(lambda: files.delete(at.path("a"), recursive=True), 404)


ODD_NAMES = [
    "a&b=c",
    "+",
    "%25",
    "%",
    "#",
    "?",
    "☃",
    "\\",
    "new\nline",
    " ",
    "é",
    "e\u0301",
    "\u2028",
    "-rf",
    "...",
    "'\"",
    "x" * 255,
    "\x7f\x01",
]


@check
def check_odd_names_come_back_as_they_were(at: Place):
    files = at.sbx.files
    for number, name in enumerate(ODD_NAMES):
        files.write(at.path(name), f"content {number}")
        assert os.path.exists(at.path(name)), name
    entries = files.list(str(at.directory))
    assert sorted(entry.name for entry in entries) == sorted(ODD_NAMES), entries
    for entry in entries:
        assert files.read_text(entry.path) == f"content {ODD_NAMES.index(entry.name)}", entry
        files.delete(entry.path)
    assert os.listdir(at.directory) == []


@check
def check_a_name_that_is_not_text_can_be_used_as_it_is_listed(at: Place):
    files = at.sbx.files
    raw = os.fsencode(str(at.directory)) + b"/caf\xe9-\xff"
    Path(os.fsdecode(raw)).write_bytes(b"latin")
    (entry,) = files.list(str(at.directory))
    assert files.read(entry.path) == b"latin", entry
    assert files.stat(entry.path) == entry
    files.delete(entry.path)
    assert os.listdir(at.directory) == []


@check
def check_a_large_directory_is_listed_completely(at: Place):
    # 1.22 reads one page; later clients follow the cursor.
    count = 12_000 if NEW else 5_000
    names = {f"{number:x}&+%25 #{number}" for number in range(count)}
    for name in names:
        open(at.path(name), "w").close()
    listed = [entry.name for entry in at.sbx.files.list(str(at.directory))]
    assert len(listed) == count, len(listed)
    assert set(listed) == names
    at.sbx.files.delete(str(at.directory), recursive=True)
    assert not at.directory.exists()


@check
def check_errors_of_the_file_system_have_their_status(at: Place):
    files = at.sbx.files
    files.write(at.path("file"), "content")
    files.mkdir(at.path("dir"))
    missing = refused(lambda: files.read(at.path("missing")), 404)
    assert "missing" in str(missing), f"the message names the path: {missing}"
    refused(lambda: files.stat(at.path("missing")), 404)
    refused(lambda: files.list(at.path("missing")), 404)
    refused(lambda: files.delete(at.path("missing")), 404)
    refused(lambda: files.read(at.path("dir")), 409)
    refused(lambda: files.write(at.path("dir"), "x"), 409)
    refused(lambda: files.write(at.path("file/below"), "x"), 409)
    refused(lambda: files.mkdir(at.path("file/below")), 409)
    refused(lambda: files.mkdir(at.path("file")), 409)
    refused(lambda: files.list(at.path("file")), 409)
    refused(lambda: files.download(at.path("missing"), at.path("never")), 404)
    assert not os.path.exists(at.path("never"))
    assert files.read(at.path("file")) == b"content"
    # A refused upload in ranges: the client sends all of them before it reads an answer.
    refused(lambda: files.write(at.path("dir"), noise(20 * MIB)), 409)
    assert at.sbx.run("echo still in step").stdout == "still in step\n"


@check
def check_files_of_the_kernel_are_read_to_their_end(at: Place):
    # Their size is 0, which is all that later clients then ask for.
    text = at.sbx.files.read("/proc/version")
    assert text == (b"" if NEW else Path("/proc/version").read_bytes()), text
    at.sbx.files.download("/proc/version", at.path("version"))
    assert Path(at.path("version")).read_bytes() == Path("/proc/version").read_bytes()


# ---------------------------------------------------------------------------------- ports


# Answers with what it was asked, and echoes after an upgrade.
PROXIED = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [self.requestline, *(f"{name}: {value}" for name, value in self.headers.items())]
        answer = "\\n".join(lines).encode() + b"\\n\\n" + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        self.send_response(101)
        self.send_header("Upgrade", "echo")
        self.send_header("Connection", "Upgrade")
        self.end_headers()
        while piece := self.connection.recv(65536):
            self.connection.sendall(piece)
        self.close_connection = True

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@check
def check_a_server_inside_is_reached_through_the_proxy(at: Place):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    process = at.sbx.run(["python3", "-c", PROXIED, str(port)], background=True)
    url = at.sbx.proxy_url_for(port, "/a%2Fb//c?d=e&f", scheme="http://")
    wait = at.sbx.proxy_url_for(port, "/", scheme="http://").replace("/proxy/", "/ports/")
    ask = urllib.request.Request(wait + "wait?timeout=20", headers=at.sbx.proxy_headers)
    with urllib.request.urlopen(ask, timeout=30) as answer:
        assert json.load(answer) == {"port": port, "listening": True}
    body = noise(3 * MIB)
    ask = urllib.request.Request(url, data=body, headers=at.sbx.proxy_headers, method="POST")
    with urllib.request.urlopen(ask, timeout=30) as answer:
        head, _, rest = answer.read().partition(b"\n\n")
    assert rest == body
    assert head.startswith(b"POST /a%2Fb//c?d=e&f HTTP/1.1\n"), head
    for name, secret in at.sbx.proxy_headers.items():
        assert secret.encode() not in head, f"{name} reached the server: {head}"

    # An upgrade, with the same headers.
    address = urllib.parse.urlsplit(at.sbx.proxy_url_for(port, "/ws", scheme="ws://"))
    lines = [f"GET {address.path} HTTP/1.1", f"Host: {address.netloc}"]
    lines += [f"{name}: {value}" for name, value in at.sbx.proxy_headers.items()]
    lines += ["Connection: Upgrade", "Upgrade: echo", "", ""]
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode())
        reader = connection.makefile("rb")
        assert reader.readline().startswith(b"HTTP/1.1 101 ")
        while reader.readline() != b"\r\n":
            pass
        connection.sendall(b"there and back")
        assert reader.read(14) == b"there and back"

    # Without the headers there is no way in.
    try:
        urllib.request.urlopen(urllib.request.Request(url, data=b""), timeout=30)
    except urllib.error.HTTPError as error:
        assert error.code == 403, error
    else:
        raise AssertionError("let in without a token")
    process.kill()


# ---------------------------------------------------------------------------------- running


def place(sbx: Sandbox, name: str):
    at = Place(sbx, name[:60])
    return at, lambda: shutil.rmtree(at.directory, ignore_errors=True)


def main() -> int:
    sbx = Sandbox.create(
        env={"FROM_ENV": "one two"}, secrets={"FROM_SECRETS": "three"}, forward_hf_token=True
    )
    return run_checks(lambda name: place(sbx, name), sbx.kill)


if __name__ == "__main__":
    sys.exit(main())
