"""What the E2B SDKs do in a sandbox with a root of its own: root, `/tmp`, `/workspace`, and git.

The template of these sandboxes is made of programs of this machine. It has no user `user`.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from e2b_checks import LAST_UID, MIDDLE_UID, SCRATCH, Blocking, Place, Server, check, eventually, need, noise, raises, takes

# After the module that prepares for it.
from e2b import AuthenticationException, CommandExitException, SandboxException  # noqa: I001

TEMPLATE = SCRATCH / "tools"
PROGRAMS = "bash cat chmod chown cp dirname git grep head id ls mkdir mv pwd rm sed sh sleep stat touch tr uname wc".split()


def with_libraries(programs: list[str]) -> set[Path]:
    """Files that these programs consist of."""
    files = set(map(Path, programs))
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        files |= {Path(word) for word in listed.split() if word.startswith("/")}
    return files


def make_template() -> None:
    paths = {name: shutil.which(name) for name in PROGRAMS}
    missing = [name for name, path in paths.items() if not path]
    need(not missing, f"no {', '.join(missing)}")
    root = SCRATCH / "tools.part"
    for name in ("etc", "tmp", "proc", "usr"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for source in with_libraries(list(paths.values())):
        # Through the links above, as on this machine.
        target = root / source.parent.resolve().relative_to("/") / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    helpers = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip()
    (root / helpers.lstrip("/")).mkdir(parents=True)
    for name in ("git-upload-pack", "git-receive-pack"):
        (root / helpers.lstrip("/") / name).symlink_to(shutil.which("git"))
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "root").mkdir(mode=0o700)
    root.rename(TEMPLATE)


@contextlib.contextmanager
def roots():
    """A server whose sandboxes have roots of their own."""
    if not TEMPLATE.exists():
        make_template()
    server = Server("host", SBX_TEMPLATES=f"tools={TEMPLATE}", SBX_UID_RANGE=f"{MIDDLE_UID}-{LAST_UID}")
    try:
        server.point_the_sdk_here()
        yield server
    finally:
        server.end()


def in_root(function):
    """A check that gets a sandbox of the template."""

    def run(outer: Place) -> None:
        with roots() as server:
            at = Place(server, "async" if outer.asynchronous else "sync", for_code=False)
            try:
                lack = server.health()["isolation"].get("no_private_root")
                need(lack is None, lack)
                function(at, at.new(template="tools"))
            finally:
                at.leave()

    run.__name__ = function.__name__
    return check([("host", "sync"), ("host", "async")])(run)


@in_root
def check_roots_have_their_users(at: Place, sbx):
    run = sbx.commands.run
    assert run("id -un; pwd; echo $HOME").stdout == "user\n/home/user\n/home/user\n"
    assert run("id -u; pwd; echo $HOME", user="root").stdout == "0\n/root\n/root\n"
    raises(CommandExitException, run, "touch /etc/file")
    run("touch /etc/file && chown user /etc/file", user="root")
    assert run("stat -c %U:%u /etc/file && rm -f /etc/file || echo kept").stdout == "user:1000\nkept\n"
    other = at.new(template="tools")
    run("touch /etc/file", user="root")
    assert "file" not in other.commands.run("ls /etc").stdout.split(), "the neighbour has none of it"


@in_root
def check_roots_have_files_everywhere(at: Place, sbx):
    files, run = sbx.files, sbx.commands.run
    takes(files.write, "user")
    data = noise(100_000)
    for path, user in (("/workspace/a/file", "root"), ("/tmp/file", "user"), ("/tests/x", "root"), ("below", "user")):
        info = files.write(path, data, user=user)
        assert info.path == (path if path.startswith("/") else f"/home/user/{path}"), info
        assert bytes(files.read(path, format="bytes", user=user)) == data
        assert run(f"stat -c %U {info.path}", user="root").stdout == f"{user}\n"
    # What one writes the other one reads, by commands too.
    assert bytes(files.read("/workspace/a/file", format="bytes")) == data
    assert run("wc -c < /workspace/a/file").stdout.strip() == "100000"
    run("echo text > /tmp/of-user; mkdir -p /tmp/dir/below")
    assert files.read("/tmp/of-user", user="root") == "text\n"
    raises(SandboxException, files.write, "/workspace/mine", "x")
    assert not files.exists("/workspace/mine") and files.exists("/workspace/a")
    assert [entry.path for entry in files.list("/workspace")] == ["/workspace/a"]
    assert files.get_info("/tmp").mode & 0o7777 == 0o1777
    assert files.make_dir("/app/logs", user="root") is True
    assert files.rename("/workspace/a", "/app/moved", user="root").path == "/app/moved"
    files.remove("/app/moved", user="root")
    assert run("ls -A /app /workspace").stdout == "/app:\nlogs\n\n/workspace:\n"
    with_events = files.watch_dir("/tmp/dir", **({"on_event": lambda _: None} if at.asynchronous else {}))
    run("touch /tmp/dir/seen")
    if not at.asynchronous:
        names = []
        eventually("the change is seen", lambda: names.extend(e.name for e in with_events.get_new_events()) or names)
        assert "seen" in names, names
    with_events.stop()


@in_root
def check_roots_run_commands_of_root(at: Place, sbx):
    commands = sbx.commands
    error = raises(CommandExitException, commands.run, "echo out; exit 7", user="root", cwd="/tmp")
    assert (error.exit_code, error.stdout) == (7, "out\n"), vars(error)
    handle = commands.run("read line; echo got $line; pwd", background=True, stdin=True, user="root", cwd="/tmp")
    assert handle.pid in [entry.pid for entry in commands.list()]
    commands.send_stdin(handle.pid, "it\n")
    assert handle.wait().stdout == "got it\n/tmp\n"
    handle = commands.run("sleep 1000 & sleep 1000", background=True, user="root")
    assert handle.kill() is True
    eventually("all of it has ended", lambda: "sleep" not in commands.run("cat /proc/[0-9]*/comm", user="root").stdout)
    raises(AuthenticationException, commands.run, "true", user="nobody-here", says="nobody-here")


@in_root
def check_roots_have_git_in_tmp(at: Place, sbx):
    need(hasattr(sbx, "git"), "this SDK has no git")
    git, run = sbx.git, sbx.commands.run
    git.init("/tmp/repository", initial_branch="main")
    sbx.files.write("/tmp/repository/dir/file", "one\n")
    git.add("/tmp/repository")
    assert [entry.name for entry in git.status("/tmp/repository").file_status] == ["dir/file"]
    git.commit("/tmp/repository", "first", author_name="Author", author_email="author@example.org")
    assert git.status("/tmp/repository").is_clean
    git.create_branch("/tmp/repository", "side")
    assert sorted(git.branches("/tmp/repository").branches) == ["main", "side"]
    git.clone("/tmp/repository", "/tmp/clone", branch="main")
    assert sbx.files.read("/tmp/clone/dir/file") == "one\n"
    run("git config --global safe.directory '*'", user="root")
    git.clone("file:///tmp/repository", "/workspace", depth=1, user="root")
    assert run("cat /workspace/dir/file; stat -c %U /workspace/dir").stdout == "one\nroot\n"


def template_of(outer: Place):
    """The class that builds, of the SDK that is checked."""
    import e2b

    need(hasattr(e2b, "Template"), "this SDK builds no templates")
    return e2b.Template, Blocking(e2b.AsyncTemplate) if outer.asynchronous else e2b.Template


@in_root
def check_roots_are_built_by_steps(at: Place, sbx):
    from e2b import BuildException

    Template, builds = template_of(at)
    context = at.server.directory / "context"
    (context / "app/below").mkdir(parents=True)
    (context / "app/main").write_text("main\n")
    (context / "app/below/more").write_text("more\n")
    (context / "app/link").symlink_to("main")
    (context / "one.txt").write_text("one\n")
    (context / ".dockerignore").write_text("app/below/out\n")
    (context / "app/below/out").write_text("ignored")
    template = (
        Template(file_context_path=str(context))
        .from_image("tools:latest")
        .set_envs({"WORD": "text", "LONGER": "$WORD-er"})
        .run_cmd("id -un; pwd; echo $LONGER; echo problem >&2")
        .make_dir("/srv/made", user="root")
        .set_workdir("/work/place")
        .copy("app", "app")
        .copy("one.txt", "/srv/made/renamed", user="root", mode=0o640)
        .copy("*.txt", "globbed/")
        .run_cmd(["touch done", "ls"])
    )
    lines = []
    built = builds.build(template, "built", on_build_logs=lambda entry: lines.append((entry.level, entry.message)))
    texts = [text for _, text in lines]
    for line in ("user", "/home/user", "text-er", "problem"):
        assert line in texts, texts
    assert ("error", "problem") in lines, lines
    assert builds.exists("built") and not builds.exists("never-built")
    for name in ("built", getattr(built, "template_id", "built")):
        other = at.new(template=name)
        run = other.commands.run
        assert run("id -un; pwd; echo $WORD $LONGER $HOME").stdout == "user\n/work/place\ntext text-er /home/user\n"
        assert run("cat app/main app/below/more app/link globbed/one.txt; ls app/below").stdout == "main\nmore\nmain\none\nmore\n"
        assert run("stat -c '%U %a' app/main done /srv/made/renamed").stdout == "user 644\nuser 644\nroot 640\n"
        assert run("id -u; pwd", user="root").stdout == "0\n/work/place\n"
        other.kill()
    # On top of it, with root as the user, and steps that fail.
    above = Template().from_template("built").set_user("root").run_cmd("echo $WORD > /root-file")
    info = builds.build_in_background(above, "above")
    seen = eventually("it is built", lambda: (s := builds.get_build_status(info)).status.value == "ready" and s, 60)
    assert seen.build_id == info.build_id
    other = at.new(template="above")
    assert other.commands.run("id -u; cat /root-file").stdout == "0\ntext\n"
    failing = Template().from_template("built").run_cmd("true").run_cmd("echo reason >&2; exit 4")
    raises(BuildException, builds.build, failing, "failing", says="exit status 4: reason")
    missing = Template().from_image("node:22")
    raises(BuildException, builds.build, missing, "failing", says="/v1/snapshots?name=node-22")
    assert not builds.exists("failing")
    dockerfile = "FROM tools\nENV A=b\nRUN echo $A > /from-file\nWORKDIR /from\n"
    builds.build(Template().from_dockerfile(dockerfile), "filed:v2")
    other = at.new(template="filed:v2")
    assert other.commands.run("cat /from-file; pwd; echo $A").stdout == "b\n/from\nb\n"
