"""Inspect: all checks that it has for a sandbox, and an evaluation with a model that answers with a fixed tool call."""

import os
import tempfile

from parts import main, part

SCRATCH = tempfile.mkdtemp(prefix="sbx-inspect-")
os.environ |= {"HOME": SCRATCH, "XDG_DATA_HOME": SCRATCH, "INSPECT_DISPLAY": "none"}
os.chdir(SCRATCH)

from inspect_ai import Task, eval_async  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402
from inspect_ai.scorer import Score, accuracy, scorer  # noqa: E402
from inspect_ai.solver import basic_agent  # noqa: E402
from inspect_ai.tool import bash, python  # noqa: E402
from inspect_ai.util import ComposeConfig, sandbox  # noqa: E402
from inspect_ai.util._sandbox import self_check  # noqa: E402
from inspect_sandboxes.e2b._e2b import E2BSandboxEnvironment  # noqa: E402

# What root may do anyway.
OF_ROOT = ["test_read_file_not_allowed", "test_write_binary_file_without_permissions", "test_write_text_file_without_permissions"]
# What the provider passes on as the kernel and the SDK have it: one argument of a shell has 128 KiB at most, a file that is no
# program is an exit code of the shell, a command that ends by a signal has the code -1, an unknown user is an error of the SDK.
OF_THE_PROVIDER = [
    "test_exec_as_nonexistent_user",
    "test_exec_large_command",
    "test_exec_permission_error",
    "test_exec_timeout_not_raised_on_fast_signal_death",
]
NAMED = ComposeConfig.model_validate({"services": {"default": {"image": "base"}}, "x-e2b": {"template": "base"}})


@part("the checks that inspect_ai has for a sandbox")
async def _():
    checks = [name for name in dir(self_check) if name.startswith("test_")]
    assert len(checks) > 35, checks
    await E2BSandboxEnvironment.task_init("checks", NAMED)
    made = await E2BSandboxEnvironment.sample_init("checks", NAMED, {})
    failed = []
    try:
        for name in checks:
            try:
                await getattr(self_check, name)(made["default"])
            except BaseException as error:
                print(f"{name}: {str(error)[:300]}")
                failed.append(name)
    finally:
        await E2BSandboxEnvironment.sample_cleanup("checks", NAMED, made, False)
        await E2BSandboxEnvironment.task_cleanup("checks", NAMED, True)
    assert failed == sorted(OF_ROOT + OF_THE_PROVIDER), failed


@scorer(metrics=[accuracy()])
def made_the_file():
    async def score(state, target):
        text = await sandbox().read_file("/work/answer")
        return Score(value=1 if text == "42\n" else 0, explanation=text)

    return score


@part("an evaluation: tools bash and python, files and a setup of the sample, a scorer that reads from the sandbox")
async def _():
    calls = [
        ModelOutput.for_tool_call("mockllm", "bash", {"command": "cat /work/given > /work/answer; cat /work/setup"}),
        ModelOutput.for_tool_call("mockllm", "python", {"code": "print(6 * 7, file=open('/work/answer', 'w'))"}),
        ModelOutput.for_tool_call("mockllm", "submit", {"answer": "done"}),
    ]
    sample = Sample("Write it.", files={"/work/given": "x\n"}, setup="echo set-up > /work/setup")
    task = Task(
        dataset=[sample],
        solver=basic_agent(tools=[bash(timeout=30), python(timeout=30)], message_limit=20),
        scorer=made_the_file(),
        sandbox=("e2b", NAMED),
    )
    for call in calls:
        # It would ask the internet how many tokens the text has.
        call.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    (log,) = await eval_async(task, model=get_model("mockllm/model", custom_outputs=calls))
    assert log.status == "success", log.error.message
    assert log.results.scores[0].metrics["accuracy"].value == 1, log.samples[0].messages
    assert any("set-up" in message.text for message in log.samples[0].messages if message.role == "tool")


@part("no configuration: the default template")
async def _():
    await E2BSandboxEnvironment.task_init("default", None)
    made = await E2BSandboxEnvironment.sample_init("default", None, {})
    try:
        assert (await made["default"].exec(["id", "-un"])).stdout == "root\n"
        connection = await made["default"].connection()
        assert connection.type == "e2b"
    finally:
        await E2BSandboxEnvironment.sample_cleanup("default", None, made, False)
        await E2BSandboxEnvironment.task_cleanup("default", None, True)


main("inspect-ai", "inspect-sandboxes", "e2b")
