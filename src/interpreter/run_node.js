// Given to `node -e` with a descriptor and arguments: runs the code in that memory file as a script named <code>: as CommonJS,
// or as a module with the same names if it has what only modules have.
{
  const fs = require('fs');
  const path = require('path');
  const vm = require('vm');
  const Module = require('module');
  const { pathToFileURL } = require('url');
  const fd = Number(process.argv[1]);
  const source = fs.readFileSync(fd, 'utf8');
  fs.closeSync(fd);
  process.argv[1] = '<code>';
  process.execArgv = [];
  const main = new Module('.', null);
  main.filename = path.join(process.cwd(), '<code>');
  main.paths = Module._nodeModulePaths(process.cwd());
  process.mainModule = main;
  const names = { require, module, exports, __filename, __dirname };
  for (const name of Object.keys(names)) delete globalThis[name];
  const compiles = (parameters) => {
    try {
      vm.compileFunction(source.replace(/^#!/, '//'), parameters);
      return true;
    } catch {
      return false; // what is wrong as a module too is told as such
    }
  };
  if ((Module.registerHooks || Module.register) && !compiles(Object.keys(names))) {
    main.require = Module.createRequire(main.filename);
    main.require.main = main;
    const more = { require: main.require, exports: main.exports, __filename: main.filename, __dirname: process.cwd() };
    for (const [name, value] of Object.entries(more)) {
      Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
    }
    // Node.js puts back its own after this script.
    Object.defineProperty(globalThis, 'module', { get: () => main, set: () => {}, configurable: true });
    const url = pathToFileURL(main.filename).href;
    const found = { format: 'module', source, shortCircuit: true };
    if (Module.registerHooks) {
      Module.registerHooks({
        resolve: (name, context, next) => (name === url ? { url, format: 'module', shortCircuit: true } : next(name, context)),
        load: (name, context, next) => (name === url ? found : next(name, context)),
      });
    } else {
      const hooks = `let own;
        export const initialize = (data) => void (own = data);
        export const resolve = (name, context, next) => name === own.url ? { url: own.url, format: 'module', shortCircuit: true } : next(name, context);
        export const load = (name, context, next) => name === own.url ? own.found : next(name, context);`;
      Module.register(`data:text/javascript,${encodeURIComponent(hooks)}`, { data: { url, found } });
    }
    // As Node.js ends where the module's own `await` never does.
    const stuck = () => (process.exitCode ??= 13);
    process.on('exit', stuck);
    import(url).then(() => process.off('exit', stuck));
  } else main._compile(source, main.filename);
}
