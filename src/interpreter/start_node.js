// Given to `node -e` with the descriptor of the bridge's socket: reads the bridge from it and runs it.
{
  const fs = require('fs');
  const fd = Number(process.argv[1]);
  const read = (size) => {
    const data = Buffer.alloc(size);
    for (let at = 0; at < size; ) {
      const count = fs.readSync(fd, data, at, size - at);
      if (!count) process.reallyExit(70);
      at += count;
    }
    return data;
  };
  const source = read(read(4).readUInt32LE()).toString();
  require('vm').runInThisContext(source, { filename: 'sbx-bridge' })(fd, require, (name, options) => (options ? import(name, options) : import(name)));
}
