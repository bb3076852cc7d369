"""smolagents: code of an agent in E2B, with state between steps, errors, a tool and a final answer."""

from smolagents import CodeAgent, Tool
from smolagents.models import ChatMessage, Model
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import E2BExecutor
from smolagents.utils import AgentError

from parts import main, part


@part("E2BExecutor: code, output, state, variables, errors")
def _():
    executor = E2BExecutor([], AgentLogger(level=LogLevel.ERROR))
    try:
        executor.send_variables({"numbers": [1, 2, 3]})
        done = executor("total = sum(numbers)\nprint('out')\ntotal")
        assert (str(done.output), "out" in done.logs) == ("6", True), done
        assert str(executor("total + 1").output) == "7"
        try:
            executor("total / 0")
            raise AssertionError("it is no error")
        except AgentError as error:
            assert "ZeroDivisionError" in str(error), error
    finally:
        executor.cleanup()


class Double(Tool):
    name = "double"
    description = "Doubles a number."
    inputs = {"number": {"type": "integer", "description": "the number"}}
    output_type = "integer"

    def forward(self, number: int) -> int:
        return number * 2


class Fixed(Model):
    def __init__(self, steps: list[str]):
        super().__init__()
        self.steps = steps

    def generate(self, messages, **words):
        return ChatMessage(role="assistant", content=f"Thought: go on\n<code>\n{self.steps.pop(0)}\n</code>")


@part("an agent: two steps, a tool that runs in the sandbox, the final answer")
def _():
    model = Fixed(["half = double(number=10)\nprint(half)", "final_answer(half + 22)"])
    with CodeAgent(tools=[Double()], model=model, executor_type="e2b", verbosity_level=0) as agent:
        assert agent.run("Answer.") == 42


main("smolagents", "e2b", "e2b-code-interpreter")
