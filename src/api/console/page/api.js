// The server, as the page sees it: the token, requests, streams of events. It knows no view.

/** Who is signed in, and where. The token is in this object and in `sessionStorage`, and nowhere else. */
export const session = {
  token: null,
  /** "dedicated" or "host" */
  mode: null,
  /** Whether the token opens the server itself, and not one sandbox of a host only. */
  isOperator: false,
  /** The one sandbox that the token opens. */
  sandbox: null,
};

const STORED = "sbx-token";

/** Takes the token out of the address, where a link may carry it, or from this tab's earlier visit. */
export function recallToken() {
  session.token = sessionStorage.getItem(STORED);
  const given = /^#token=([^&]*)/.exec(location.hash);
  if (!given) return;
  history.replaceState(null, "", location.pathname);
  let token = given[1];
  try {
    token = decodeURIComponent(token);
  } catch {
    // It is not encoded.
  }
  if (session.token === token) return;
  // Any page can link here with a token of its own, and let somebody work in a sandbox that is not theirs.
  const question = session.token === null ? "This link has a token." : "This link has another token than this tab.";
  if (confirm(`${question} Sign in with it?`)) keepToken(token);
}

/** Keeps the token for this tab; null forgets it. */
export function keepToken(token) {
  session.token = token;
  if (token) sessionStorage.setItem(STORED, token);
  else sessionStorage.removeItem(STORED);
}

/** An answer that is an error, with the server's own sentence. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body.error ?? `the server answered ${status}`);
    this.status = status;
    this.code = body.code;
    this.body = body;
  }
}

/** Nothing answered. */
export class OfflineError extends Error {
  isOffline = true;

  constructor() {
    super("the server does not answer");
  }
}

/** Tells whether the server answers: `change` events with `detail` true or false. */
export const connection = new EventTarget();
let isOnline = true;

function noteOnline(now) {
  if (now === isOnline) return;
  isOnline = now;
  connection.dispatchEvent(new CustomEvent("change", { detail: now }));
}

/** A path with a query; `undefined` and `null` leave a parameter out. */
export function at(path, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
  return known.length ? `${path}?${new URLSearchParams(known)}` : path;
}

/** The largest answer that is read as JSON, in bytes. */
const LARGEST_ANSWER = 64 * 1024 * 1024;

/** The headers of every request. */
export function credentials() {
  return session.token ? { "X-Sandbox-Token": session.token } : {};
}

/** Sends a request; throws `ApiError` or `OfflineError`. `json` is a body to encode, `body` one to send as it is. */
export async function send(method, path, { json, body, signal, headers } = {}) {
  const own = { ...credentials(), ...headers };
  if (json !== undefined) {
    own["Content-Type"] = "application/json";
    body = JSON.stringify(json);
  }
  let response;
  try {
    response = await fetch(path, { method, headers: own, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    noteOnline(false);
    throw new OfflineError();
  }
  noteOnline(true);
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => ({})));
  return response;
}

/** Sends a request whose answer is JSON. */
export async function call(method, path, options = {}) {
  const accept = { Accept: "application/json" };
  const response = await send(method, path, { ...options, headers: { ...accept, ...options.headers } });
  if (response.headers.get("Content-Length") > LARGEST_ANSWER) {
    response.body.cancel();
    throw new Error("the answer of the server is too large to show");
  }
  return response.json();
}

/** Gets JSON. */
export const get = (path, signal) => call("GET", path, { signal });
/** Posts JSON, and gets JSON. */
export const post = (path, json = {}, signal) => call("POST", path, { json, signal });

/** How long events are handled before the page gets a turn, in milliseconds. */
const TURN = 30;

/** Lets the browser draw, and answer to the person. Unlike a timer it is not slower in a page that cannot be seen. */
const yieldTurn = () => new Promise((resolve) => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    port1.close();
    resolve();
  };
  port2.postMessage(null);
});

/** The events of a stream, as they arrive. It ends without an error when the connection breaks. */
export async function* events(method, path, options = {}) {
  const response = await send(method, path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  /** The beginning of a line, in the parts in which it came. */
  let begun = [];
  let turn = performance.now();
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (options.signal?.aborted) throw error;
        return;
      }
      if (part.done) return;
      const lines = part.value.split("\n");
      for (const [at, text] of lines.entries()) {
        begun.push(text);
        if (at === lines.length - 1) break;
        const line = begun.join("");
        begun = [];
        if (line.trim()) yield JSON.parse(line);
        if (performance.now() - turn > TURN) {
          await yieldTurn();
          turn = performance.now();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Opens a WebSocket. Browsers cannot set headers there, so the token is one of the subprotocols. */
export function socket(path, protocol) {
  const protocols = [protocol];
  if (session.token) {
    const binary = String.fromCharCode(...new TextEncoder().encode(session.token));
    const encoded = btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    protocols.push(`sbx.bearer.${encoded}`);
  }
  const opened = new WebSocket(new URL(path, location.href.replace(/^http/, "ws")), protocols);
  opened.binaryType = "arraybuffer";
  return opened;
}

/** Uploads a body and tells how much was sent: `fetch` cannot. */
export function upload(path, body, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    for (const [name, value] of Object.entries(credentials())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => onProgress(event.loaded, event.total);
    request.onerror = () => reject(new OfflineError());
    request.onabort = () => reject(new DOMException("left", "AbortError"));
    request.onload = () => {
      let answer = {};
      try {
        answer = JSON.parse(request.responseText);
      } catch {
        // An answer that is no JSON comes from something between the server and this page.
      }
      if (request.status < 400) resolve(answer);
      else reject(new ApiError(request.status, answer));
    };
    signal?.addEventListener("abort", () => request.abort());
    request.send(body);
  });
}

/** Asks what the token opens, and remembers it. False if a token is needed; throws `ApiError` 403 if it opens nothing. */
export async function enter() {
  const access = await get("/v1/access");
  session.mode = access.mode;
  session.isOperator = access.opens === "server";
  session.sandbox = access.sandbox;
  return access.opens !== "nothing";
}
