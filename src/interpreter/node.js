// The bridge of JavaScript contexts: evaluates code in V8's REPL mode and speaks PROTOCOL.md with the server on socket fd.
//
// SIGINT ends running code by terminating it, also inside the bridge's own functions that the code called: no `finally`
// runs then. What the bridge keeps between calls must be right at every point; recover() puts the rest right.
(function (fd, require, load) {
  'use strict';
  const { Array, Atomics, Boolean, Buffer, Error, Map, Int32Array, Math, Number, Object, Promise, Reflect } = globalThis;
  const { RegExp, Set, SharedArrayBuffer, String, Symbol, SyntaxError, URL, Uint8Array, process } = globalThis;
  const fs = require('fs');
  const vm = require('vm');
  const net = require('net');
  const { promiseHooks } = require('v8');
  const { createRequire } = require('module');
  const { pathToFileURL } = require('url');
  const util = require('util');
  const { Session } = require('inspector');
  const { Readable, Writable } = require('stream');
  const childProcess = require('child_process');
  const { stringify, parse } = JSON;
  const { writeSync, readSync, readdirSync, readFileSync } = fs;
  const [nextTurn, setTimer, clearTimer] = [setImmediate, setInterval, clearInterval];
  const MAX_BUNDLE = 16 << 20;
  const MAX_TEXT = 64 << 10;
  const MAX_LINES = 300;
  const MAX_TRACEBACK = 512 << 10; // characters of all lines
  const MAX_DEPTH = 100; // the server takes no deeper JSON

  let running = false; // an execution runs: the server answers frames
  let last = 0; // the stream that the server may not have read to its end; 3: either
  let childRan = false; // children may write: each write of ours is ordered after theirs
  let number = 0; // of the last frame that is answered by synced
  let count = 0;
  let shown = 0;

  // Frames

  const nap = new Int32Array(new SharedArrayBuffer(4));
  const retry = (call) => {
    for (let pause = 0; ; pause = Math.min(pause + 0.05, 5)) {
      try {
        return call();
      } catch (error) {
        if (error.code !== 'EAGAIN') throw error;
        if (pause) Atomics.wait(nap, 0, 0, pause);
      }
    }
  };
  const writeAll = (to, data) => {
    for (let at = 0; at < data.length; ) at += retry(() => writeSync(to, data, at));
  };
  // A lone surrogate becomes the text \udXXX: JSON parsers refuse the escape.
  const encode = (frame) => {
    const text = stringify(frame, (key, value) =>
      typeof value === 'bigint' || (typeof value === 'number' && !Number.isFinite(value)) ? String(value) : value);
    if (!text.includes('\\ud')) return text;
    return text.replace(/\\(?:\\|u(d[89a-f][0-9a-f]{2}))/g, (all, hex) => (hex ? '\\\\u' + hex : all));
  };
  const send = (frame) => {
    const body = Buffer.from(encode(frame));
    const head = Buffer.alloc(4);
    head.writeUInt32LE(body.length);
    try {
      writeAll(fd, Buffer.concat([head, body]));
    } catch {
      process.reallyExit(70);
    }
  };
  // The server sends nothing but answers during an execution, each of them in one piece. Zeros mean "not read": so an
  // answer that was read is not lost when the count of its bytes is.
  const inbox = Buffer.alloc(256);
  const readAnswer = () => {
    while (!inbox[0]) {
      const got = retry(() => readSync(fd, inbox, 0, 256, null));
      if (!got) process.reallyExit(70);
    }
    const size = inbox.readUInt32LE();
    const answer = parse(inbox.toString('utf8', 4, 4 + size));
    inbox.copyWithin(0, 4 + size);
    inbox.fill(0, 256 - 4 - size);
    return answer;
  };
  const exchange = (frame) => {
    frame.n = ++number;
    send(frame);
    while (readAnswer().n !== frame.n);
  };
  const settle = () => {
    if (running && (last || childRan)) {
      exchange({ type: 'sync' });
      last = 0;
    }
  };
  const recover = () => exchange({ type: 'sync' });

  // Streams

  const order = (stream) => {
    if (running && (childRan || (last && last !== stream))) exchange({ type: 'sync' });
    last = stream;
  };
  let written = []; // callbacks of writes
  const callBack = () => {
    const calls = written;
    written = [];
    for (const done of calls) {
      try {
        done();
      } catch (error) {
        process.nextTick(() => {
          throw error;
        });
      }
    }
  };
  const makeStream = (stream) => {
    const writable = new Writable({ decodeStrings: false });
    writable.fd = stream;
    writable.isTTY = false;
    writable.write = (chunk, encoding, done) => {
      if (typeof encoding === 'function') [encoding, done] = [undefined, encoding];
      order(stream);
      if (typeof chunk !== 'string') writeAll(stream, chunk);
      else if (chunk.length > 4096) writeAll(stream, Buffer.from(chunk, encoding));
      else retry(() => writeSync(stream, chunk, null, encoding)); // a pipe takes that much in one piece
      // console.log has a callback too: a tick for each line would take as long as its write.
      if (done && written.push(done) === 1) process.nextTick(callBack);
      return true;
    };
    writable.end = writable.destroy = () => writable;
    return writable;
  };
  const streams = { stdout: makeStream(1), stderr: makeStream(2) };
  const setStreams = (stdin) => {
    const input = Readable.from(stdin ? [Buffer.from(stdin)] : [], { objectMode: false });
    input.fd = 0;
    for (const [name, value] of Object.entries({ ...streams, stdin: input })) {
      Object.defineProperty(process, name, { value, configurable: true, enumerable: true, writable: true });
    }
  };
  fs.writeSync = (to, ...rest) => {
    if (to === 1 || to === 2) order(to);
    return writeSync(to, ...rest);
  };
  const beforeChild = (call) =>
    function (...args) {
      settle();
      childRan = true;
      return Reflect.apply(call, this, args);
    };
  for (const name of ['spawnSync', 'execSync', 'execFileSync']) childProcess[name] = beforeChild(childProcess[name]);
  const { ChildProcess } = childProcess;
  ChildProcess.prototype.spawn = beforeChild(ChildProcess.prototype.spawn);
  // While a session is connected, V8's inspector takes the arguments of each call of console's own methods, with a stack,
  // and keeps the last thousand: that takes as long as the write, and what was printed is not collected.
  const { Console } = console;
  for (const [name, method] of Object.entries(new Console(streams))) {
    if (typeof method === 'function') console[name] = method;
  }
  require('module').syncBuiltinESMExports();

  // Bundles

  const showKey = Symbol.for('Jupyter.display');
  const inspect = (value) => util.inspect(value, { colors: false, depth: 4 });
  const isData = (value) => {
    if (typeof value !== 'object' || value === null) return false;
    const prototype = Object.getPrototypeOf(value);
    return Array.isArray(value) || prototype === null || prototype === Object.prototype;
  };
  const makeBundle = (value) => {
    const shows = value !== null && typeof value === 'object' && typeof value[showKey] === 'function';
    if (shows) return value[showKey]();
    const data = { 'text/plain': typeof value === 'string' ? `'${value}'` : inspect(value) };
    try {
      if (isData(value)) data['application/json'] = parse(encode(value));
    } catch {} // circular, or its toJSON throws
    return data;
  };
  const depthOf = (json) => {
    let [depth, most] = [0, 0];
    for (let at = 0; at < json.length; at++) {
      if (json[at] === '"') while (json[++at] !== '"') at += json[at] === '\\';
      else if (json[at] === '[' || json[at] === '{') most = Math.max(most, ++depth);
      else if (json[at] === ']' || json[at] === '}') depth--;
    }
    return most;
  };
  const fit = (bundle) => {
    const [data, sizes, dropped] = [{}, {}, {}];
    for (const [mime, value] of Object.entries(Object(bundle))) {
      const isBytes = value instanceof Uint8Array;
      if (value === undefined || value === null) continue;
      data[mime] = isBytes ? Buffer.from(value).toString('base64')
        : typeof value === 'string' || mime.endsWith('json') ? value : String(value);
      const json = encode(data[mime]) ?? '';
      sizes[mime] = Buffer.byteLength(json);
      if (typeof data[mime] === 'string' || depthOf(json) <= MAX_DEPTH) continue;
      dropped[mime] = sizes[mime];
      delete data[mime];
      delete sizes[mime];
    }
    const total = () => Object.values(sizes).reduce((sum, size) => sum + size, 0);
    const rank = (mime) => (mime === 'text/plain' ? -1 : sizes[mime]);
    for (const mime of Object.keys(sizes).sort((a, b) => rank(b) - rank(a))) {
      if (total() <= MAX_BUNDLE) break;
      dropped[mime] = sizes[mime];
      delete sizes[mime];
      if (mime === 'text/plain') data[mime] = data[mime].slice(0, MAX_BUNDLE / 6);
      else delete data[mime];
    }
    return Object.keys(dropped).length ? { data, dropped } : { data };
  };
  const sendBundle = (type, bundle, options = {}) => {
    const frame = { type, ...fit(bundle), metadata: fit({ json: options.metadata }).data.json };
    if (!isData(frame.metadata)) frame.metadata = {};
    if (options.display_id !== undefined) frame.display_id = String(options.display_id);
    if (options.update) frame.update = true;
    if (!running) return streams.stdout.write(frame.data['text/plain'] + '\n');
    settle();
    exchange(frame);
  };
  const globals = {
    display(value, options = {}) {
      if (options.display_id === true) options = { ...options, display_id: `display-${process.pid}-${++shown}` };
      sendBundle('display', options.raw ? value : makeBundle(value), options);
      const { display_id } = options;
      if (display_id === undefined || options.update) return undefined;
      return { display_id, update: (next, more) => globals.display(next, { ...more, display_id, update: true }) };
    },
    clear_output(wait = false) {
      settle();
      if (running) exchange({ type: 'clear', wait: Boolean(wait) });
    },
  };

  // Errors

  const shorten = (text, most = MAX_TEXT) => (text.length > most ? text.slice(0, most) + '…' : text);
  const describe = (error, details) => {
    const report = { name: 'Error', value: '', traceback: [] };
    try {
      if (util.types.isNativeError(error) || (error && typeof error.stack === 'string')) {
        report.name = String(error.name);
        report.value = shorten(String(error.message));
        let lines = String(error.stack).split('\n');
        const ours = lines.findIndex((line) => /^\s+at .*(node:inspector|sbx-bridge|node:vm)/.test(line));
        if (ours >= 0) lines = lines.slice(0, ours);
        if (error.name === 'SyntaxError' && details && details.lineNumber !== undefined) {
          lines.push(`    at cell-${count}:${details.lineNumber + 1}:${details.columnNumber + 1}`);
        }
        if (lines.length > MAX_LINES) lines.splice(MAX_LINES / 2, lines.length - MAX_LINES, '...');
        const fits = lines.reduce((sum, line) => sum + line.length, 0) <= MAX_TRACEBACK;
        report.traceback = lines.map((line) => shorten(line, fits ? MAX_TEXT : MAX_TRACEBACK / lines.length));
      } else {
        report.name = 'Uncaught';
        report.value = shorten(inspect(error));
        report.traceback = [shorten('Uncaught ' + report.value)];
      }
    } catch {} // the error's own getters threw
    if (!report.traceback.length) report.traceback = [`${report.name}: ${report.value}`];
    return report;
  };
  // process.exit() throws this, as sys.exit() of Python does: it ends the execution, and not the interpreter.
  class Exit {
    constructor(status) {
      this.status = status & 0xff;
    }
  }
  let leave = () => {}; // called with the Exit of the execution
  const exit = (status = process.exitCode) => {
    process.exitCode = undefined;
    const exit = new Exit(Number(status) || 0);
    leave(exit);
    throw exit;
  };
  const interrupted = { name: 'Interrupted', value: 'interrupted by SIGINT', traceback: ['interrupted by SIGINT'] };

  // Code

  const session = new Session();
  session.connect();
  const post = (method, parameters, before = () => {}) =>
    new Promise((resolve, reject) => {
      before();
      session.post(method, parameters, (error, value) => {
        // `process.kill` of a signal to itself has closed the inspector: this interpreter can run nothing more.
        if (error?.message.includes('Cannot find context')) process.reallyExit(70);
        return error ? reject(error) : resolve(value);
      });
    });
  let taken; // what the inspector handed over last
  const takeKey = Symbol.for('sbx.take');
  const callKey = Symbol.for('sbx.call');
  let call = () => {};
  // The inspector gives descriptions of values; this function, called through it, receives the values themselves.
  Object.defineProperty(globalThis, takeKey, { value: (value) => void (taken = value) });
  Object.defineProperty(globalThis, callKey, { value: () => call() });
  const interruptible = new vm.Script('globalThis[Symbol.for("sbx.call")]()', { filename: 'sbx-bridge' });
  // The watchdog thread of `breakOnSigint` stays on, so that SIGINT has its handler at every moment. What arrives while no
  // script runs is pending there.
  const { startSigintWatchdog, stopSigintWatchdog, watchdogHasPendingSigint } = process.binding('contextify');
  const threads = () => {
    try {
      return readdirSync('/proc/self/task');
    } catch {
      return [];
    }
  };
  let watchdog; // the thread's number; undefined: not known
  const startWatchdog = () => {
    const before = new Set(threads());
    startSigintWatchdog();
    const started = threads().filter((thread) => !before.has(thread));
    watchdog = started.length === 1 ? started[0] : undefined; // a worker may start threads too
  };
  // A signal's handler wakes the thread, which then takes the signal: once it sleeps again, none is on its way.
  const awaitWatchdog = () => {
    try {
      while (!/\) S [^)]*$/.test(readFileSync(`/proc/self/task/${watchdog}/stat`, 'latin1'))) Atomics.wait(nap, 0, 0, 0.1);
    } catch {
      Atomics.wait(nap, 0, 0, 20); // enough, unless the machine is very busy
    }
  };
  const dropInterrupt = () => {
    call = () => {};
    interruptible.runInThisContext({ breakOnSigint: true }); // the end of a script forgets the pending one
  };
  const callInterruptibly = (work) => {
    call = () => {
      // What came before the script began is pending, and would not end it.
      if (watchdogHasPendingSigint()) throw Object.assign(new Error(), { code: 'ERR_SCRIPT_EXECUTION_INTERRUPTED' });
      work();
    };
    interruptible.runInThisContext({ breakOnSigint: true });
  };
  const take = async (remote) => {
    if (remote.type === 'undefined') return undefined;
    const { objectId, unserializableValue, value } = remote;
    const argument = objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value };
    await post('Runtime.callFunctionOn', {
      functionDeclaration: 'function (value) { globalThis[Symbol.for("sbx.take")](value) }',
      arguments: [argument],
      executionContextId: contextId,
    });
    if (objectId) session.post('Runtime.releaseObject', { objectId });
    const it = taken;
    taken = undefined;
    return it;
  };
  let contextId;
  session.on('Runtime.executionContextCreated', ({ params }) => (contextId ??= params.context.id));
  session.post('Runtime.enable');
  session.post('Runtime.disable');

  // Modules. V8 gives evaluated code no way to load them, so `import` becomes a call of this function.

  const importKey = Symbol.for('sbx.import');
  const importModule = async (name, options, needed = []) => {
    const base = pathToFileURL(process.cwd() + '/');
    const specifier = /^\.{0,2}\//.test(name) ? new URL(name, base).href : String(name);
    let found;
    try {
      found = await load(specifier, options);
    } catch (error) {
      if (!error || error.code !== 'ERR_MODULE_NOT_FOUND' || specifier.includes(':')) throw error;
      let file; // packages beside the working directory, which may have changed since the start
      try {
        file = createRequire(base).resolve(specifier);
      } catch {
        throw error;
      }
      found = await load(pathToFileURL(file).href, options);
    }
    const missing = needed.find((key) => !(key in found));
    if (missing) throw new SyntaxError(`The requested module '${name}' does not provide an export named '${missing}'`);
    return found;
  };
  Object.defineProperty(globalThis, importKey, { value: importModule });

  const tokens = new RegExp(
    [
      String.raw`(?<space>\s+|\/\/[^\n]*|\/\*[^]*?\*\/)`,
      String.raw`(?<word>[\p{ID_Start}$_#][\p{ID_Continue}$]*)`,
      String.raw`(?<value>\.?\d[\w.]*|'(?:\\[^]|[^'\\\n])*'|"(?:\\[^]|[^"\\\n])*")`,
      String.raw`(?<pattern>\/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^\/\\\[\n])+\/\w*)`,
      String.raw`(?<mark>\.\.\.|\?\.|[^])`,
    ].join('|'),
    'uy',
  );
  const beforePattern = /^(?:return|typeof|case|in|of|delete|void|throw|new|instanceof|do|else|yield|await)$/;
  const declaration = /import\s*(?:([\w$\s{},*\p{ID_Start}]+?)\s*from\s*)?('[^'\n]*'|"[^"\n]*")(?:\s*(?:with|assert)\s*(\{[^}]*\}))?[^\S\n]*;?/uy;
  const declare = (all, clause = '', name, attributes) => {
    const call = `globalThis[Symbol.for("sbx.import")](${name},${attributes ? `{with:${attributes},assert:${attributes}}` : 'undefined'}`;
    const [, main, space, list] = /^\s*([^\s{*,]+)?\s*,?\s*(?:\*\s*as\s+(\S+)|\{([^}]*)\})?\s*$/.exec(clause) || [];
    const names = (list || '').split(',').map((part) => part.trim().split(/\s+as\s+/)).filter(([key]) => key);
    if (main) names.unshift(['default', main]);
    const keys = stringify(names.map(([key]) => key));
    const bindings = `{${names.map(([key, own = key]) => `${key}:${own}`).join()}}`;
    const text = space
      ? `const ${space}=await ${call},${keys})${names.length ? `,${bindings}=${space}` : ''};`
      : names.length ? `const ${bindings}=await ${call},${keys});` : `void await ${call});`;
    return text + all.replace(/[^\n]/g, '');
  };
  const rewriteImports = (code) => {
    if (!/\bimport\b/.test(code)) return code;
    const templates = []; // the depth of braces at each `${` that is open
    let [out, depth, before, isTemplate] = ['', 0, ';', false];
    for (let at = 0; at < code.length; ) {
      if (isTemplate) {
        const [text] = /^(?:\\[^]|\$(?!\{)|[^\\`$])*(?:`|\$\{)?/.exec(code.slice(at));
        if (text.endsWith('${')) templates.push(depth++);
        isTemplate = false;
        [out, at, before] = [out + text, at + text.length, text.endsWith('${') ? '(' : 'x'];
        continue;
      }
      tokens.lastIndex = at;
      const { 0: token, groups } = tokens.exec(code);
      let length = token.length;
      let text = token;
      if (groups.pattern && !/[(,=:[!&|?{};+\-*%<>~^]$/.test(before) && !beforePattern.test(before)) {
        text = '/';
        length = 1;
      } else if (token === '`') isTemplate = true;
      else if ('{(['.includes(token)) depth++;
      else if ('})]'.includes(token) && templates[templates.length - 1] === --depth) {
        templates.pop();
        isTemplate = true;
      } else if (token === 'import' && before !== '.' && before !== '?.') {
        declaration.lastIndex = at;
        const found = depth === 0 && declaration.exec(code);
        if (found) [text, length] = [declare(...found), found[0].length];
        else if (/^\s*\(/.test(code.slice(at + length))) text = 'globalThis[Symbol.for("sbx.import")]';
      }
      if (!groups.space) before = text;
      out += text;
      at += length;
    }
    return out;
  };

  // V8 12 crashes when it collects the promise of a cell that waits for ever, so each is kept until it is settled. It is
  // the first promise that the evaluation makes.
  const unsettled = new Set();
  let [held, stopHolding] = [undefined, () => {}];
  const hold = () => {
    held = undefined;
    stopHolding = promiseHooks.onInit((promise) => {
      if (!held) unsettled.add((held = promise));
      stopHolding();
    });
  };

  // What an interrupted execution waited for may come while another runs: it is nobody's.
  let current = 0;
  let thrown; // the error that ended the code: a promise may be rejected with it too
  // Node's own REPL takes what begins with a brace for an object, if it can be one.
  const asObject = (code) => {
    if (!/^(?:\s|\/\/[^\n]*\n|\/\*[^]*?\*\/)*\{/.test(code)) return code;
    const wrapped = `(${code}\n)`;
    try {
      new vm.Script(`async () => ${wrapped}`);
      return wrapped;
    } catch {
      return code;
    }
  };
  const evaluate = async (code) => {
    const number = current;
    let evaluation;
    callInterruptibly(() => {
      const expression = `${asObject(rewriteImports(code))}\n//# sourceURL=cell-${count}`;
      evaluation = post('Runtime.evaluate', { expression, replMode: true, awaitPromise: true }, hold);
    });
    const own = held;
    const { result, exceptionDetails } = await evaluation;
    unsettled.delete(own);
    if (number !== current) return undefined;
    if (exceptionDetails) {
      thrown = exceptionDetails.exception ? await take(exceptionDetails.exception) : new Error(exceptionDetails.text);
      return thrown instanceof Exit ? thrown : describe(thrown, exceptionDetails);
    }
    const value = await take(result);
    if (number === current && value !== undefined && !code.trimEnd().endsWith(';')) {
      callInterruptibly(() => sendBundle('result', makeBundle(value)));
    }
    return undefined;
  };

  const outcome = (error) => {
    if (!(error instanceof Exit)) return error ? { error } : {};
    const { status } = error;
    if (!status) return { exit_code: 0 };
    const value = String(status);
    return { exit_code: status, error: { name: 'SystemExit', value, traceback: [`SystemExit: ${value}`] } };
  };

  const setEnvironment = (values) => {
    for (const [name, value] of values) {
      if (value === undefined || value === null) delete process.env[name];
      else process.env[name] = value;
    }
  };

  const run = async (request) => {
    count = request.count ?? count + 1;
    const values = Object.entries(request.env ?? {});
    const before = values.map(([name]) => [name, process.env[name]]);
    setEnvironment(values);
    setStreams(request.stdin);
    last = 0;
    if (request.signalled) awaitWatchdog();
    try {
      dropInterrupt();
    } catch {} // it came during the script
    running = true;
    send({ type: 'begun' });
    let watch;
    const interruption = new Promise((resolve) => {
      watch = setTimer(() => watchdogHasPendingSigint() && resolve(interrupted), 10);
    });
    const departure = new Promise((resolve) => (leave = resolve));
    const evaluation = evaluate(request.code).catch((error) => {
      if (error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED') return interrupted;
      return error instanceof Exit ? error : describe(error);
    });
    // A rejection is known when the turn of the event loop ends.
    const turn = evaluation.then((error) => new Promise((resolve) => nextTurn(() => resolve(error))));
    let error = await Promise.race([turn, departure, interruption]);
    leave = () => {};
    current++;
    clearTimer(watch);
    if (error === interrupted) recover();
    setEnvironment(before);
    setStreams(null);
    fixProcess();
    fixSignal();
    for (const rejected of new Set(rejections.values())) {
      if (!error && !(rejected instanceof Exit)) error = describe(rejected);
      else if (rejected !== thrown) onException(rejected);
    }
    rejections.clear();
    thrown = undefined;
    childRan ||= last !== 0;
    settle();
    running = false;
    childRan = false;
    send({ type: 'done', ...outcome(error) });
  };

  // The code's listeners of SIGINT have taken the handler from the watchdog thread.
  const fixSignal = () => {
    if (!process.listenerCount('SIGINT')) return;
    process.removeAllListeners('SIGINT');
    stopSigintWatchdog();
    startWatchdog();
  };
  const onException = (error) => {
    if (error instanceof Exit) return;
    const text = describe(error).traceback.join('\n');
    streams.stderr.write(`${text.startsWith('Uncaught') ? '' : 'Uncaught '}${text}\n`);
  };
  const rejections = new Map(); // promises that were rejected in this execution and are awaited by nobody
  const onRejection = (error, promise) => (running ? rejections.set(promise, error) : onException(error));
  const onHandled = (promise) => rejections.delete(promise);
  const fixProcess = () => {
    process.exit = exit;
    const listeners = { uncaughtException: onException, unhandledRejection: onRejection, rejectionHandled: onHandled };
    for (const [event, listener] of Object.entries(listeners)) {
      if (!process.listeners(event).includes(listener)) process.on(event, listener);
    }
  };

  // Requests

  const start = () => {
    for (const [name, value] of Object.entries(globals)) {
      Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
    }
    setStreams(null);
    fixProcess();
    startWatchdog();
    process.argv.length = 1;
    send({ type: 'ready', backend: 'node', version: process.version.slice(1), pid: process.pid });
  };
  const adopt = ({ cwd, env }) => {
    try {
      setEnvironment(Object.entries(env ?? {}));
      if (cwd) process.chdir(cwd);
      send({ type: 'adopted' });
    } catch (error) {
      send({ type: 'adopted', error: String(error.message) });
    }
  };
  let received = Buffer.alloc(0);
  const handle = (request) => {
    if (request.type === 'init') start();
    else if (request.type === 'adopt') adopt(request);
    else if (request.type === 'run') {
      // Nothing reads the socket but exchange() until the execution has ended.
      socket.pause();
      nextTurn(() => run(request).finally(() => socket.resume()));
    }
  };
  const socket = new net.Socket({
    fd,
    readable: true,
    writable: false,
    allowHalfOpen: true,
    onread: {
      buffer: Buffer.alloc(65536),
      callback(size, buffer) {
        received = Buffer.concat([received, buffer.subarray(0, size)]);
        if (received.length < 4 || received.length < 4 + received.readUInt32LE()) return true;
        const request = parse(received.toString('utf8', 4));
        received = Buffer.alloc(0);
        handle(request);
        return request.type !== 'run';
      },
    },
  });
  const end = () => process.reallyExit(70);
  socket.on('end', end).on('close', end).on('error', end);
  socket.resume();
  setInterval(() => {}, 0x7fffffff); // the event loop must not end while an execution waits for what never comes
})
