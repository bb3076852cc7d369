"""A sandbox by E2B's SDK: commands, files and code. E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY name the server.

pip install e2b-code-interpreter
"""

from e2b_code_interpreter import Sandbox

with Sandbox.create(timeout=120, metadata={"task": "example"}) as sandbox:
    sandbox.files.write("numbers.txt", "1\n2\n3\n")
    result = sandbox.commands.run("wc -l < numbers.txt && echo done >&2", on_stdout=lambda text: print("lines:", text.strip()))
    print("exit code", result.exit_code, "stderr", result.stderr.strip())

    sandbox.run_code("numbers = [int(line) for line in open('numbers.txt')]")
    print("sum", sandbox.run_code("sum(numbers)").text)
    print(sandbox.run_code("numbers[7]").error.name)
