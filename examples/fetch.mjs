// Drives a dedicated server with fetch: a command with live output, and a file. Node.js 18 or later.
//
//   export URL=http://127.0.0.1:49983   # where the server listens
//   export TOKEN=...                    # its SBX_TOKEN; scripts/run prints both lines
//   node examples/fetch.mjs
//
// In a browser the same code works if the server allows the page's origin: SBX_ALLOWED_ORIGINS.

const { URL: base, TOKEN: token } = process.env;

/** Sends a request and throws the server's own message if it fails. */
async function request(path, options = {}) {
  const headers = { "X-Sandbox-Token": token, ...options.headers };
  const response = await fetch(base + path, { ...options, headers });
  if (!response.ok) {
    const { error, code } = await response.json();
    throw new Error(`${response.status} ${code}: ${error}`);
  }
  return response;
}

/** Yields the events of a command as they arrive. */
async function* run(command) {
  const body = JSON.stringify(command);
  const response = await request("/v1/exec", { method: "POST", body });
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

// A stream without an exit event means that the connection broke.
let exit;
for await (const event of run({ cmd: "for n in 1 2 3; do echo line $n; sleep 0.2; done" })) {
  if (event.event === "stdout") process.stdout.write(event.data);
  if (event.event === "exit") exit = event;
}
if (!exit) throw new Error("the connection broke before the command ended");
console.log("exit code", exit.exit_code);

await request("/v1/files/write?path=hello.txt", { method: "PUT", body: "hello from fetch\n" });
const file = await request("/v1/files/read?path=hello.txt");
process.stdout.write(await file.text());
await request("/v1/files/delete?path=hello.txt", { method: "DELETE" });
