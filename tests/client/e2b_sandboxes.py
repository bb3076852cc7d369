"""Checks of the E2B SDKs: sandboxes from create to kill, keys, tokens and signed URLs, and what there is not."""

import asyncio
import inspect
import json
import os
import re
import secrets
import threading
import time
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qsl, urlencode, urlsplit

from e2b_checks import (
    CONNECT_NAMES,
    DEBUG,
    HOST,
    MACHINE,
    SLEEP,
    WITH_TOKEN,
    Place,
    alive,
    check,
    eventually,
    fetch,
    gone,
    in_loop,
    need,
    raises,
    takes,
)

# After the module that prepares for it.
import e2b  # noqa: I001
from e2b import AuthenticationException, CommandExitException, NotFoundException, SandboxException, TimeoutException


# ---------------------------------------------------------------------------------- lifecycle


def now() -> datetime:
    return datetime.now(timezone.utc)


def seconds_left(sbx) -> float:
    return (sbx.get_info().end_at - now()).total_seconds()


def listed(at: Place, limit: int | None = None, metadata: dict | None = None, **words) -> list[list]:
    """The pages of a listing."""
    query = e2b.SandboxQuery(metadata=metadata, **words) if metadata or words else None
    pages, paginator = [], at.Sandbox.list(query=query, limit=limit)
    while paginator.has_next:
        pages.append(paginator.next_items())
        assert len(pages) < 300, "no end of pages"
    return pages


def ids(pages) -> list[str]:
    return [entry.sandbox_id for page in pages for entry in page]


@check(HOST)
def check_life_begins_and_ends(at: Place):
    sbx = at.Sandbox.create()
    home = at.home_of(sbx)
    assert home.is_dir() and sbx.is_running() is True and re.fullmatch("[a-z0-9]{1,63}", sbx.sandbox_id)
    sbx.commands.run("setsid sh -c 'echo $$ > daemon; exec sleep 1000' > /dev/null 2>&1 &")
    daemon = int(eventually("it runs", lambda: (home / "daemon").exists() and (home / "daemon").read_text()))
    handle = sbx.commands.run("sleep 1000", background=True)
    assert sbx.kill() is True and not home.exists() and not alive(daemon)
    raises(TimeoutException, handle.wait, says="killed or reached its end of life")
    assert sbx.is_running() is False and sbx.kill() is False and at.Sandbox.kill(sbx.sandbox_id) is False
    assert at.sbx.commands.run("echo others stay").stdout == "others stay\n"


@check([("host", "sync"), ("machine", "sync"), ("debug", "sync")])
def check_life_is_a_context_manager(at: Place):
    with at.Sandbox.create(**(DEBUG if at.mode == "debug" else {})) as sbx:
        assert sbx.commands.run("echo inside").stdout == "inside\n"
    assert sbx.is_running() is (at.mode != "host")


@check(HOST)
def check_life_can_be_connected_to(at: Place):
    at.sbx.files.write("file", "kept")
    again = at.Sandbox.connect(at.sbx.sandbox_id)
    assert again.sandbox_id == at.sbx.sandbox_id
    raises(NotFoundException, at.Sandbox.connect, "0123456789abcdef01234567")
    assert at.sbx.connect().sandbox_id == at.sbx.sandbox_id
    need(CONNECT_NAMES, "this SDK names no sandbox that it connects to")
    assert again.files.read("file") == "kept" and again.commands.run("cat file").stdout == "kept"
    assert again.is_running() is True


@check(HOST)
def check_life_has_a_timeout_whatever_runs(at: Place):
    sbx = at.Sandbox.create(timeout=2)
    home, errors = at.home_of(sbx), []

    def run():
        try:
            sbx.commands.run(SLEEP)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    pid = int(eventually("it runs", lambda: (home / "pid").exists() and (home / "pid").read_text(), 2))
    eventually("the sandbox ends", lambda: not home.exists(), 12)
    gone(pid)
    thread.join(20)
    assert errors and isinstance(errors[0], TimeoutException), errors
    assert "killed or reached its end of life" in str(errors[0]), errors
    assert sbx.is_running() is False
    assert at.sbx.commands.run("echo others stay").stdout == "others stay\n"


@check(HOST)
def check_life_timeouts_are_changed(at: Place):
    assert 270 < seconds_left(at.sbx) <= 301, "the default is 5 minutes"
    at.sbx.set_timeout(1000)
    assert 970 < seconds_left(at.sbx) <= 1001
    at.Sandbox.connect(at.sbx.sandbox_id, timeout=2000)
    assert 1970 < seconds_left(at.sbx) <= 2001
    at.Sandbox.connect(at.sbx.sandbox_id, timeout=5)
    assert 1900 < seconds_left(at.sbx), "connect never shortens"
    at.Sandbox.set_timeout(at.sbx.sandbox_id, 1)
    home = at.home
    eventually("set_timeout shortens", lambda: not home.exists(), 12)
    short = at.new(timeout=3)
    short.set_timeout(300)
    time.sleep(4)
    assert short.commands.run("echo lives").stdout == "lives\n"


@check(HOST)
def check_life_is_described(at: Place):
    metadata = {"name": "x y", "empty": "", "weird & = + % ☃": "a=b&c=d+e%20ü/?#\"'"}
    before = now()
    sbx = at.new(metadata=metadata, timeout=60)
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id and info.metadata == metadata, info
    assert info.template_id in ("base", "code-interpreter-v1") and info.state.value == "running", info
    assert abs((info.started_at - before).total_seconds()) < 5, (info, before)
    assert 55 < (info.end_at - info.started_at).total_seconds() < 65, info
    assert info.cpu_count >= 1 and info.memory_mb >= 1 and info.envd_version, info
    assert at.Sandbox.get_info(sbx.sandbox_id) == info
    (listed_info,) = [entry for page in listed(at, metadata={"name": "x y"}) for entry in page]
    assert (listed_info.metadata, listed_info.started_at) == (metadata, info.started_at), listed_info


@check(HOST)
def check_life_is_listed_by_metadata(at: Place):
    tag = secrets.token_hex(4)
    weird = {"tag": tag, "k=&+% ☃": "a=b&c=d+e%20%2520 ü/?#"}
    one, other = at.new(metadata=weird), at.new(metadata={"tag": tag, "colour": "blue"})
    assert set(ids(listed(at))) >= {one.sandbox_id, other.sandbox_id}
    assert set(ids(listed(at, metadata={"tag": tag}))) == {one.sandbox_id, other.sandbox_id}
    assert ids(listed(at, metadata=weird)) == [one.sandbox_id]
    for metadata in ({"tag": tag, "colour": "red"}, {"k=&+% ☃": "a=b"}, {"colour": "blue", "tag": ""}):
        assert ids(listed(at, metadata=metadata)) == [], metadata
    running, paused = e2b.SandboxState.RUNNING, e2b.SandboxState.PAUSED
    for state, expected in (([running], 2), ([paused], 0), ([running, paused], 2)):
        assert len(ids(listed(at, metadata={"tag": tag}, state=state))) == expected, state
    if "started_after" in inspect.signature(e2b.SandboxQuery).parameters:
        assert ids(listed(at, metadata={"tag": tag}, started_after=now() + timedelta(hours=1))) == []
        assert len(ids(listed(at, metadata={"tag": tag}, started_after=now() - timedelta(hours=1)))) == 2


@check(HOST)
def check_life_is_listed_in_pages(at: Place):
    tag = {"tag": secrets.token_hex(4)}
    made = [at.new(metadata=tag).sandbox_id for _ in range(5)]
    pages = listed(at, limit=2, metadata=tag)
    assert [len(page) for page in pages] == [2, 2, 1] and sorted(ids(pages)) == sorted(made), pages
    first = at.Sandbox.list(query=e2b.SandboxQuery(metadata=tag), limit=3)
    begin = first.next_items()
    rest = at.Sandbox.list(query=e2b.SandboxQuery(metadata=tag), limit=3, next_token=first.next_token)
    assert sorted(ids([begin, rest.next_items()])) == sorted(made) and rest.has_next is False
    takes(at.Sandbox.list, "order")
    for order, expected in (("asc", made), ("desc", made[::-1])):
        paginator = at.Sandbox.list(query=e2b.SandboxQuery(metadata=tag), limit=4, order=order)
        found = ids([paginator.next_items(), paginator.next_items()])
        assert found == expected, (order, found, expected)


@check([*HOST, *MACHINE])
def check_life_is_measured(at: Place):
    at.sbx.commands.run("head -c 1000000 /dev/zero > data")
    metrics = eventually("there are metrics", at.sbx.get_metrics, 30)
    assert metrics == sorted(metrics, key=lambda metric: metric.timestamp), "oldest first"
    for metric in metrics:
        assert metric.cpu_count >= 1 and metric.cpu_used_pct >= 0, metric
        assert 0 <= metric.mem_used <= metric.mem_total > 0 and 0 < metric.disk_used <= metric.disk_total, metric
        assert abs((metric.timestamp - now()).total_seconds()) < 120, metric
    past = now() - timedelta(days=2)
    assert at.sbx.get_metrics(start=past, end=past + timedelta(days=1)) == []


@check(HOST)
def check_life_pauses_and_goes_on(at: Place):
    takes(e2b.Sandbox.pause, "keep_memory")
    sbx = at.new(metadata={"tag": secrets.token_hex(4)})
    metadata = sbx.get_info().metadata
    sbx.files.write("file", "kept")
    sbx.commands.run(SLEEP, background=True)
    pid = int(eventually("it runs", lambda: sbx.files.exists("pid") and sbx.files.read("pid")))
    assert sbx.pause() is True and sbx.pause() is False and alive(pid)
    assert sbx.is_running() is False
    info = sbx.get_info()
    assert info.state.value == "paused" and info.end_at <= now() + timedelta(seconds=5), info
    assert ids(listed(at, metadata=metadata)) == [sbx.sandbox_id]
    assert ids(listed(at, metadata=metadata, state=[e2b.SandboxState.PAUSED])) == [sbx.sandbox_id]
    assert ids(listed(at, metadata=metadata, state=[e2b.SandboxState.RUNNING])) == []
    raises(TimeoutException, sbx.commands.run, "true")
    raises(TimeoutException, sbx.files.read, "file")
    again = sbx.connect(timeout=60)
    assert again.sandbox_id == sbx.sandbox_id and sbx.is_running() is True and alive(pid)
    assert sbx.files.read("file") == "kept" and 50 < seconds_left(sbx) < 65
    assert sbx.pause(keep_memory=False) is True
    gone(pid)
    at.Sandbox.connect(sbx.sandbox_id)
    assert sbx.files.read("file") == "kept" and sbx.get_info().state.value == "running"
    sbx.pause()
    assert sbx.kill() is True and sbx.kill() is False
    raises(NotFoundException, at.Sandbox.connect, sbx.sandbox_id)


@check(HOST)
def check_life_pauses_when_its_timeout_passes(at: Place):
    takes(e2b.Sandbox.create, "lifecycle")
    sbx = at.new(timeout=2, lifecycle={"on_timeout": "pause"})
    sbx.files.write("file", "kept")
    assert sbx.get_info().lifecycle["on_timeout"] in ("pause", {"action": "pause"}), sbx.get_info().lifecycle
    eventually("it is paused", lambda: sbx.get_info().state.value == "paused", 12)
    sbx.connect(timeout=60)
    assert sbx.files.read("file") == "kept"
    sbx = at.new(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})
    eventually("it is paused", lambda: sbx.get_info().state.value == "paused", 12)
    assert sbx.commands.run("echo again").stdout == "again\n"


@check(HOST)
def check_life_after_the_end_raises(at: Place):
    sbx = at.sbx
    sbx.kill()
    calls = [sbx.commands.run, sbx.files.read, sbx.files.list, sbx.files.exists, sbx.files.make_dir]
    calls += [lambda path: sbx.files.write(path, "x"), lambda _: sbx.commands.list(), lambda _: sbx.commands.kill(5)]
    for call in calls:
        error = raises(TimeoutException, call, "x", says="was not found")
        kind = getattr(e2b, "SandboxNotRunningException", TimeoutException)
        assert isinstance(error, kind), error
    for call in (sbx.get_info, sbx.get_metrics, sbx.connect, lambda: sbx.set_timeout(5)):
        error = raises(SandboxException, call)
        assert isinstance(error, NotFoundException) or "404" in str(error), error


@check(MACHINE)
def check_life_of_a_machine(at: Place):
    sbx = at.sbx
    assert at.new().sandbox_id == sbx.sandbox_id == at.Sandbox.connect(sbx.sandbox_id).sandbox_id
    assert ids(listed(at)) == [sbx.sandbox_id] and ids(listed(at, limit=1)) == [sbx.sandbox_id]
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id and info.started_at < now() < info.end_at, info
    raises(SandboxException, sbx.set_timeout, 5)
    raises(NotFoundException, at.Sandbox.connect, "another")
    assert sbx.kill() is False, "it ends with its job"
    assert sbx.is_running() and sbx.commands.run("echo lives").stdout == "lives\n"


@check([("debug", "sync"), ("debug", "async")])
def check_life_in_debug_mode(at: Place):
    assert at.sbx.sandbox_id == "debug_sandbox_id" and at.sbx.is_running() is True
    assert at.sbx.get_host(8080) == "localhost:8080"
    if not DEBUG:
        assert at.Sandbox.connect("any").commands.run("echo any").stdout == "any\n"
    assert at.sbx.kill() is True and at.sbx.commands.run("echo lives").stdout == "lives\n"


@check([("host", "async")])
def check_life_of_a_hundred_sandboxes_at_once(at: Place):
    async def one(number: int):
        sbx = await e2b.AsyncSandbox.create(metadata={"number": str(number)})
        result, info = await asyncio.gather(
            sbx.commands.run(f"echo {number} > by-command; echo from {number}"),
            sbx.files.write("by-api", f"text {number}"),
        )
        texts = await sbx.files.read("by-command"), await sbx.files.read("by-api")
        assert (result.stdout, *texts) == (f"from {number}\n", f"{number}\n", f"text {number}"), (number, result, texts)
        return sbx

    async def all_of_them():
        made = await asyncio.gather(*map(one, range(100)))
        assert len({sbx.sandbox_id for sbx in made}) == 100
        assert all(await asyncio.gather(*(sbx.kill() for sbx in made)))
        return made

    made = in_loop(all_of_them)
    assert not any((at.server.homes / sbx.sandbox_id).exists() for sbx in made)


# ---------------------------------------------------------------------------------- access


@check([*HOST, *MACHINE])
def check_access_by_signed_urls(at: Place):
    at.sbx.files.write("a dir/☃+&.txt", "signed")
    path = "a dir/☃+&.txt"
    for words in ({}, {"use_signature_expiration": 600}, {"user": "user"} if at.mode == "host" else {}):
        url = at.sbx.download_url(path, **words)
        assert fetch(url) == (200, b"signed"), url
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="ignored"\r\n\r\nup\r\n--b--\r\n'
    form = {"Content_Type": "multipart/form-data; boundary=b"}
    upload = at.sbx.upload_url("up ☃", use_signature_expiration=600)
    status, answer = fetch(upload, body, **form)
    assert status == 200 and json.loads(answer)[0]["path"] == f"{at.home}/up ☃", answer
    assert at.sbx.files.read("up ☃") == "up"
    status, _ = fetch(at.sbx.upload_url("raw"), b"octets", Content_Type="application/octet-stream")
    assert status == 200 and at.sbx.files.read("raw") == "octets"

    parts = urlsplit(at.sbx.download_url(path, use_signature_expiration=600))
    query = dict(parse_qsl(parts.query))
    last = int(query["signature_expiration"])
    flipped = query["signature"][:-2] + ("A" if query["signature"][-2] != "A" else "B") + query["signature"][-1]
    changes = [{"path": "up ☃"}, {"signature": flipped}, {"signature": None}, {"signature_expiration": str(last + 1)}]
    changes += [{"signature_expiration": None}, {"username": "user"}, {"signature": "v1_"}]
    for change in changes:
        changed = {name: value for name, value in (query | change).items() if value is not None}
        status, answer = fetch(f"{at.server.url}/files?{urlencode(changed)}")
        assert status == 401 and json.loads(answer)["code"] == 401, (change, status, answer)
    assert fetch(at.sbx.download_url(path, use_signature_expiration=-10))[0] == 401, "it has expired"
    assert fetch(at.sbx.upload_url("late", use_signature_expiration=-10), body, **form)[0] == 401
    assert fetch(parts.geturl(), body, **form)[0] == 401, "a signature to read"
    assert fetch(upload)[0] == 401, "a signature to write"
    assert at.sbx.files.read(path) == "signed" and not at.sbx.files.exists("late")
    if at.mode == "host":
        other = at.new()
        other.files.write(path, "the other's")
        assert fetch(other.download_url(path)) == (200, b"the other's")
        dead = other.download_url(path)
        other.kill()
        assert fetch(dead)[0] == 401


@check([*HOST, *MACHINE])
def check_access_needs_the_right_key(at: Place):
    sbx, listing = at.sbx, at.Sandbox.list
    for key in ("e2b_" + "0" * 32, f"e2b_{at.server.token}00"):
        for call in (
            lambda: at.Sandbox.create(api_key=key),  # noqa: B023
            lambda: listing(api_key=key).next_items(),  # noqa: B023
            lambda: at.Sandbox.connect(sbx.sandbox_id, api_key=key),  # noqa: B023
            lambda: at.Sandbox.kill(sbx.sandbox_id, api_key=key),  # noqa: B023
            lambda: at.Sandbox.get_info(sbx.sandbox_id, api_key=key),  # noqa: B023
        ):
            raises(AuthenticationException, call)
    # The token itself is a key too, in SDKs that do not look at its form.
    os.environ |= {"E2B_API_KEY": at.server.token, "E2B_VALIDATE_API_KEY": "false"}
    try:
        assert at.new().commands.run("echo hi").stdout == "hi\n"
    finally:
        del os.environ["E2B_VALIDATE_API_KEY"]


@check(WITH_TOKEN)
def check_access_needs_the_sandboxs_own_token(at: Place):
    other = at.new()
    other.files.write("secret", "text")
    own, theirs = at.sbx._envd_access_token, other._envd_access_token
    assert own and (at.mode != "host" or own != theirs) and at.server.token not in (own, theirs)

    def imposter(token: str | None):
        headers = {"E2b-Sandbox-Id": other.sandbox_id, "E2b-Sandbox-Port": "49983"}
        config = e2b.ConnectionConfig(extra_sandbox_headers=headers | ({"X-Access-Token": token} if token else {}))
        return type(other)(
            sandbox_id=other.sandbox_id,
            sandbox_domain=None,
            envd_version=other._envd_version,
            envd_access_token=token,
            connection_config=config,
        )

    for token in (None, "0" * len(own), *([own] if at.mode == "host" else [])):
        sbx = imposter(token)
        handle = lambda _: sbx.commands.run("echo hi", background=True)  # noqa: B023, E731
        for call in (sbx.commands.run, handle, sbx.files.read, sbx.files.list, sbx.files.get_info, sbx.files.watch_dir):
            raises(AuthenticationException, call, "secret")
        raises(AuthenticationException, sbx.files.write, "secret", "overwritten")
        assert sbx.is_running() is True, "health needs no token"
        named = {"E2b_Sandbox_Id": other.sandbox_id, "E2b_Sandbox_Port": "49999"}
        for header in ("X_Access_Token", "E2B_Traffic_Access_Token") if token else ():
            headers = named | {header: token}
            assert fetch(f"{at.server.url}/contexts", **headers)[0] == 401, header
            assert fetch(f"{at.server.url}/execute", b'{"code":"1"}', **headers)[0] == 401, header
    assert imposter(theirs).files.read("secret") == "text"


@check(WITH_TOKEN)
def check_access_by_host_names(at: Place):
    host = at.sbx.get_host(3000)
    assert re.fullmatch(rf"3000-{at.sbx.sandbox_id}\.[a-z0-9.:-]+", host), host
    name = f"{at.sbx.sandbox_id}.example.test"
    at.sbx.files.write("file", "by name")
    token = {"X_Access_Token": at.sbx._envd_access_token}
    assert fetch(f"{at.server.url}/health", Host=f"49983-{name}")[0] // 100 == 2
    assert fetch(f"{at.server.url}/files?path=file", Host=f"49983-{name}", **token) == (200, b"by name")
    assert fetch(f"{at.server.url}/files?path=file", Host=f"49983-{name}")[0] == 401
    if at.mode == "machine":
        server = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)"
        server += "; print(s.server_port, file=open('port', 'w'), flush=True); s.serve_forever()"
        at.sbx.commands.run(f'python3 -c "{server}"', background=True, timeout=0)
        name = f"{at.pid('port')}-{name}"
        answer = fetch(f"{at.server.url}/file", Host=name, E2B_Traffic_Access_Token=at.sbx.traffic_access_token)
        assert answer == (200, b"by name"), answer


# ---------------------------------------------------------------------------------- what there is not

NETWORK = {"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]}
TOKENS = {"tokens": {"aws": {"audience": "sts.amazonaws.com", "token_type": "JWT-SVID"}}}
REFUSED = {
    "create_snapshot": lambda at: at.sbx.create_snapshot(),
    "fork": lambda at: at.sbx.fork(),
    "update_network": lambda at: at.sbx.update_network({"deny_out": ["10.0.0.0/8"]}),
    "create(mcp)": lambda at: at.new(mcp={"duckduckgo": {}}, template="base"),
    "create(iam)": lambda at: at.new(iam=TOKENS),
    "create(volume_mounts)": lambda at: at.new(volume_mounts={"/data": "volume"}),
    "create(network)": lambda at: at.new(network={"mask_request_host": "x.example", **NETWORK}),
    "create(template)": lambda at: at.new(template="my-own-template"),
    "Volume.create": lambda at: e2b.Volume.create("name"),
    "Secret.create": lambda at: e2b.Secret.create("name", "value"),
    "Template.build": lambda at: e2b.Template.build(e2b.Template().from_image("debian:12"), alias="mine"),
}


@check(WITH_TOKEN)
def check_refused_is_what_there_is_not(at: Place):
    kinds = [SandboxException, e2b.BuildException]
    kinds += [getattr(e2b, name) for name in ("VolumeException", "SecretException") if hasattr(e2b, name)]
    lacking = []
    for name, call in REFUSED.items():
        owner, _, method = name.rpartition(".")
        method, _, parameter = method.rstrip(")").partition("(")
        function = getattr(getattr(e2b, owner or "Sandbox", None), method, None)
        if function is None or parameter and parameter not in inspect.signature(function).parameters:
            lacking.append(name)
            continue
        started = time.monotonic()
        try:
            error = raises(tuple(kinds), call, at)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
        assert len(str(error).split()) >= 4 and "{" not in str(error), f"{name}: no sentence: {error!r}"
        assert time.monotonic() - started < 3, f"{name}: it was tried again and again"
    assert len(lacking) <= 6, lacking
    assert at.sbx.commands.run("echo unharmed").stdout == "unharmed\n"


@check(WITH_TOKEN)
def check_refused_or_kept_is_a_closed_network(at: Place):
    probe = f"timeout 5 bash -c 'exec 3<>/dev/tcp/127.0.0.1/{urlsplit(at.server.url).port}' && echo open"
    assert at.sbx.commands.run(probe).stdout == "open\n"
    try:
        sbx = at.new(allow_internet_access=False)
    except SandboxException as error:
        assert len(str(error).split()) >= 4, error
        return
    assert at.mode == "host", "a machine's network is not a client's choice"
    raises(CommandExitException, sbx.commands.run, probe)
