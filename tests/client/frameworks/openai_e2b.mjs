// openai-agents for JavaScript: its sandbox client for E2B, and an agent whose model answers with a fixed tool call.

import assert from 'node:assert/strict'

import { Runner, Usage, setTracingDisabled } from '@openai/agents'
import { Manifest, SandboxAgent } from '@openai/agents/sandbox'
import { E2BSandboxClient } from '@openai/agents-extensions/sandbox/e2b'

import { main, part } from './parts.mjs'

setTracingDisabled(true)

const manifest = () => new Manifest({ entries: { notes: { type: 'dir', children: { 'a.txt': { type: 'file', content: 'text\n' } } } } })

async function withSession(options, work) {
  const session = await new E2BSandboxClient(options).create({ manifest: manifest() })
  try {
    await work(session)
  } finally {
    await session.delete()
  }
}

part('a session with the default root and `onTimeout` kill: manifest, exec, files, a terminal', () =>
  withSession({ onTimeout: 'kill' }, async (session) => {
    const told = await session.execCommand({ cmd: 'id -un; pwd; cat notes/a.txt; exit 3' })
    assert.ok(told.includes(`user\n${session.state.manifest.root}\ntext\n`), told)
    assert.match(told, /code 3/)
    await session.createEditor().createFile({ type: 'create_file', path: 'six.py', diff: '+print(6 * 7)\n' })
    assert.match(await session.execCommand({ cmd: 'python3 six.py' }), /42/)
    assert.equal(await session.pathExists('notes/a.txt'), true)
    assert.equal(new TextDecoder().decode(await session.readFile({ path: 'notes/a.txt' })), 'text\n')
    assert.match(await session.execCommand({ cmd: 'read line; echo got-$line', tty: true }), /session/i)
    const endpoint = await session.resolveExposedPort(8000).catch((error) => error)
    assert.match(JSON.stringify(endpoint) + endpoint, /8000/)
  }))

part('a workspace that is packed, and unpacked into another sandbox', () =>
  withSession({ onTimeout: 'kill' }, (first) =>
    withSession({ onTimeout: 'kill' }, async (second) => {
      await first.execCommand({ cmd: 'echo more > notes/b.txt' })
      await second.hydrateWorkspace(await first.persistWorkspace())
      assert.match(await second.execCommand({ cmd: 'cat notes/b.txt' }), /more/)
    })))

part('a session with the defaults: it is paused when it is closed, and resumed', async () => {
  const client = new E2BSandboxClient({ pauseOnExit: true })
  const session = await client.create({ manifest: manifest() })
  await session.close()
  const state = await client.deserializeSessionState(await client.serializeSessionState(session.state))
  const again = await client.resume(state)
  assert.match(await again.execCommand({ cmd: 'cat notes/a.txt' }), /text/)
  await again.sandbox.kill()
})

/** Asks for one command, and ends. */
class Fixed {
  async getResponse({ input }) {
    const output = this.hasAsked
      ? { type: 'message', role: 'assistant', status: 'completed', content: [{ type: 'output_text', text: JSON.stringify(input.at(-1)) }] }
      : { type: 'function_call', callId: '1', name: 'exec_command', status: 'completed', arguments: JSON.stringify({ cmd: 'echo $((6 * 7))' }) }
    this.hasAsked = true
    return { usage: new Usage(), output: [output] }
  }
}

part('an agent that runs a command', async () => {
  const agent = new SandboxAgent({ name: 'agent', instructions: 'Answer.', model: new Fixed(), defaultManifest: manifest() })
  const sandbox = { client: new E2BSandboxClient({ onTimeout: 'kill' }) }
  const result = await new Runner({ tracingDisabled: true }).run(agent, 'Run it.', { sandbox })
  assert.match(result.finalOutput, /42/)
})

await main(import.meta, '@openai/agents', '@openai/agents-extensions', 'e2b')
