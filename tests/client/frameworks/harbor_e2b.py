"""Harbor: a task from its start to its reward by the command line, and the operations of its environment."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parts import main, part, refused

os.environ |= {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "true"}

from harbor.environments.e2b import E2BEnvironment  # noqa: E402
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy  # noqa: E402
from harbor.models.trial.paths import TrialPaths  # noqa: E402

SCRATCH = Path(tempfile.mkdtemp(prefix="sbx-harbor-"))


def environment(name: str, network: NetworkPolicy | None = None, **options) -> E2BEnvironment:
    trial = TrialPaths(trial_dir=SCRATCH / name)
    trial.mkdir()
    directory = SCRATCH / name / "environment"
    directory.mkdir()
    (directory / "Dockerfile").write_text("FROM base\nRUN touch /built\nENV BUILT=yes\n")
    return E2BEnvironment(
        environment_dir=directory,
        environment_name="task",
        session_id=f"{name}__env",
        trial_paths=trial,
        task_env_config=EnvironmentConfig(),
        network_policy=network,
        **options,
    )


@part("`harbor run` of a task with a named template: the agent solves it, the verifier gives the reward")
def _():
    task = SCRATCH / "task"
    for name, text in {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n[environment]\n',
        "instruction.md": "Write hello.\n",
        "environment/Dockerfile": "FROM debian\n",
        "solution/solve.sh": "#!/bin/bash\nmkdir -p /app && echo hello > /app/greeting && id -un > /logs/agent/who\n",
        "tests/test.sh": "#!/bin/bash\ngrep -qx hello /app/greeting && echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    command = [Path(sys.executable).parent / "harbor", "run", "-p", task, "-a", "oracle", "-e", "e2b", "-q", "-y"]
    command += ["--ek", "prebuilt_template_id=base", "-o", SCRATCH / "jobs"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (reward,) = (SCRATCH / "jobs").glob("*/task__*/verifier/reward.txt")
    assert reward.read_text() == "1\n"
    (who,) = (SCRATCH / "jobs").glob("*/task__*/agent/who")
    assert who.read_text() == "root\n"
    (result,) = (SCRATCH / "jobs").glob("*/task__*/result.json")
    assert json.loads(result.read_text())["exception_info"] is None


@part("exec with user, cwd, variables and timeout; upload and download of files and trees")
async def _():
    env = environment("operations", prebuilt_template_id="base")
    await env.start(force_build=False)
    try:
        result = await env.exec("id -un; pwd; echo $WORD; echo oops >&2; exit 3", cwd="/tmp", env={"WORD": "x y"})
        assert (result.stdout, result.stderr, result.return_code) == ("root\n/tmp\nx y\n", "oops\n", 3), result
        assert (await env.exec("id -un", user="user")).stdout == "user\n"
        assert (await env.exec("id -u", user=1000)).stdout == "1000\n"
        try:
            await env.exec("sleep 60", timeout_sec=1)
            raise AssertionError("it is not ended")
        except Exception as error:
            assert "timeout" in type(error).__name__.lower(), repr(error)

        tree = SCRATCH / "tree"
        (tree / "sub" / "empty").mkdir(parents=True)
        (tree / "sub" / "script.sh").write_text("#!/bin/sh\necho ran\n")
        (tree / "sub" / "script.sh").chmod(0o755)
        (tree / "link").symlink_to("sub/script.sh")
        (tree / "bytes").write_bytes(bytes(range(256)) * 4096)
        await env.upload_dir(tree, "/tests")
        assert (await env.exec("./link && test -d sub/empty && stat -c %U:%a bytes", cwd="/tests")).stdout == "ran\nroot:644\n"
        await env.upload_file(tree / "sub" / "script.sh", "/opt/new/script.sh")
        assert (await env.exec("/opt/new/script.sh")).stdout == "ran\n"
        assert await env.is_dir("/tests/sub") and await env.is_file("/tests/bytes") and not await env.is_file("/none")
        await env.download_dir("/tests", SCRATCH / "back")
        assert (SCRATCH / "back/bytes").read_bytes() == (tree / "bytes").read_bytes()
        assert (SCRATCH / "back/link").is_symlink() and (SCRATCH / "back/sub/empty").is_dir()
        await env.download_file("/etc/os-release", SCRATCH / "release")
        assert "Debian" in (SCRATCH / "release").read_text()
    finally:
        await env.stop(delete=True)


CONNECT = "import socket; socket.create_connection(('{}', {}), 5)"


@part("no network, and a list of hosts from the start")
async def _():
    env = environment("none", NetworkPolicy(network_mode=NetworkMode.NO_NETWORK), prebuilt_template_id="base")
    await env.start(force_build=False)
    try:
        assert (await env.exec(f'python3 -c "{CONNECT.format("1.1.1.1", 53)}"')).return_code != 0
    finally:
        await env.stop(delete=True)
    policy = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["pypi.org"])
    env = environment("list", policy, prebuilt_template_id="base")
    await env.start(force_build=False)
    try:
        assert (await env.exec(f'python3 -c "{CONNECT.format("1.1.1.1", 53)}"')).return_code != 0
    finally:
        await env.stop(delete=True)


@refused("another network for a sandbox that runs", "a sandbox that runs cannot be changed")
async def _():
    env = environment("change", prebuilt_template_id="base")
    await env.start(force_build=False)
    try:
        await env._apply_network_policy(NetworkPolicy(network_mode=NetworkMode.NO_NETWORK))
    finally:
        await env.stop(delete=True)


@part("a template that Harbor builds from the Dockerfile, and finds again")
async def _():
    for name, is_forced in (("build", True), ("again", False)):
        env = environment(name)
        await env.start(force_build=is_forced)
        try:
            result = await env.exec("ls /built && echo $BUILT && id -un")
            assert result.stdout == "/built\nyes\nroot\n", result
        finally:
            await env.stop(delete=True)


main("harbor", "e2b")
