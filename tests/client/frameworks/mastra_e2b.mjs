// Mastra: its sandbox for E2B: commands, processes with input, files through them, code mode and the end.

import { E2BSandbox } from '@mastra/e2b'
import { Workspace } from '@mastra/core/workspace'

import { Template } from 'e2b'

import { main, part } from './parts.mjs'
import assert from 'node:assert/strict'

async function withSandbox(options, work) {
  const sandbox = new E2BSandbox(options)
  await sandbox._start()
  try {
    await work(sandbox)
  } finally {
    await sandbox._destroy()
  }
}

part('a named template: commands, processes, ports', () =>
  withSandbox({ template: 'base', env: { WORD: 'x y' }, timeout: 60_000 }, async (sandbox) => {
    const done = await sandbox.executeCommand('sh', ['-c', 'id -un; pwd; echo $WORD; echo oops >&2'])
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['user\n/home/user\nx y\n', 'oops\n', 0])
    // Mastra tells the output of a command that fails twice: as it came, and again from the error.
    assert.equal((await sandbox.executeCommand('sh', ['-c', 'exit 3'])).exitCode, 3)
    const heard = []
    await sandbox.executeCommand('printf', ['%s', 'a b'], { onStdout: (text) => heard.push(text) })
    assert.equal(heard.join(''), 'a b')
    assert.equal((await sandbox.executeCommand('pwd', [], { cwd: '/tmp' })).stdout, '/tmp\n')

    const handle = await sandbox.processes.spawn('read one; echo got $one; exec sleep 1000')
    await handle.sendStdin('line\n')
    while (!handle.stdout.includes('got line')) await new Promise((resolve) => setTimeout(resolve, 20))
    assert.ok((await sandbox.processes.list()).some((process) => process.pid === handle.pid && process.running))
    assert.equal(await handle.kill(), true)
    assert.notEqual((await handle.wait()).exitCode, 0)

    assert.match(await sandbox.networking.getPortUrl(8000), /8000-.*localhost/)
    const info = await sandbox.getInfo()
    assert.equal(info.status, 'running')
  }))

part('two with one id are one sandbox, also after a pause', async () => {
  const options = { id: 'same', template: 'base', timeout: 60_000 }
  const first = new E2BSandbox(options)
  await first._start()
  await first.executeCommand('sh', ['-c', 'echo kept > file'])
  await first._stop()
  const second = new E2BSandbox(options)
  await second._start()
  assert.equal((await second.executeCommand('cat', ['file'])).stdout, 'kept\n')
  await second._destroy()
})

part('a template that it builds', async () => {
  const template = Template().fromTemplate('base').runCmd('echo made > ~/built').setEnvs({ BUILT: 'yes' })
  await withSandbox({ id: 'builder', template }, async (sandbox) => {
    const done = await sandbox.executeCommand('sh', ['-c', 'cat ~/built; echo $BUILT'])
    assert.equal(done.stdout, 'made\nyes\n')
  })
})

part('a workspace with the tools of an agent', () =>
  withSandbox({ template: 'base' }, async (sandbox) => {
    const workspace = new Workspace({ sandbox })
    const done = await workspace.sandbox.executeCommand('python3', ['-c', 'print(6 * 7)'])
    assert.equal(done.stdout, '42\n')
  }))

await main(import.meta, '@mastra/core', '@mastra/e2b', 'e2b')
