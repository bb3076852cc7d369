// Given to `node -e` with a descriptor and arguments: runs the code in that memory file as a CommonJS script named <code>.
{
  const fs = require('fs');
  const path = require('path');
  const Module = require('module');
  const fd = Number(process.argv[1]);
  const source = fs.readFileSync(fd, 'utf8');
  fs.closeSync(fd);
  process.argv[1] = '<code>';
  process.execArgv = [];
  const main = new Module('.', null);
  main.filename = path.join(process.cwd(), '<code>');
  main.paths = Module._nodeModulePaths(process.cwd());
  process.mainModule = main;
  for (const name of ['require', 'module', 'exports', '__filename', '__dirname']) delete globalThis[name];
  main._compile(source, main.filename);
}
