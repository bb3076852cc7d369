"""An agent's loop: a model writes code, a context executes it, and what came of it goes back to the model.

    export URL=http://127.0.0.1:49983 TOKEN=...   # scripts/run prints both
    python examples/agent.py

Variables stay from one turn to the next, also after an error: the model repairs only what was wrong.
"""

import json
import os
import urllib.request


def post(path, body, method="POST"):
    headers = {"X-Sandbox-Token": os.environ["TOKEN"], "Content-Type": "application/json"}
    url = os.environ["URL"] + "/v1/" + path
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers, method=method))


def execute(context, code):
    """What the model reads of an execution, and whether its code is right."""
    seen, is_right = [], False
    for line in post(f"contexts/{context}/execute", {"code": code, "timeout": 60}):
        event = json.loads(line)
        if event["event"] in ("stdout", "stderr"):
            seen.append(event["data"])
        elif event["event"] in ("result", "display"):
            seen.append(event["data"].get("text/plain", f"[{', '.join(event['data'])}]") + "\n")
        elif event["event"] == "error":
            seen.append("\n".join(event["traceback"]) + "\n")
        elif event["event"] == "end":
            is_right = event["reason"] == "completed"
            if event["state"] == "lost":
                seen.append("The interpreter was started anew: all variables are gone.\n")
                post(f"contexts/{context}/restart", {})
    return "".join(seen), is_right


def model(messages):
    """Stands for a language model, which would get all messages. None: it is done."""
    answers = ["prices = [3, 5, 8]\nprint(len(prices), 'prices')", "sum(prices) / count", "sum(prices) / len(prices)"]
    turn = sum(message["role"] == "assistant" for message in messages)
    return answers[turn] if turn < len(answers) else None


context = json.load(post("contexts", {"language": "python", "tag": "agent"}))["id"]
messages = [{"role": "user", "content": "What is the average price?"}]
while code := model(messages):
    messages.append({"role": "assistant", "content": code})
    output, is_right = execute(context, code)
    messages.append({"role": "tool", "content": output})
    print(f">>> {code}\n{output}" + ("" if is_right else "It failed: the model sees why.\n"), end="")
post(f"contexts/{context}", {}, "DELETE").close()
