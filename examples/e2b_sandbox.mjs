// A sandbox by E2B's SDK: commands, files and code. E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY name the server.
//
// npm install @e2b/code-interpreter

import { Sandbox } from '@e2b/code-interpreter'

const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { task: 'example' } })
try {
  await sandbox.files.write('numbers.txt', '1\n2\n3\n')
  const result = await sandbox.commands.run('wc -l < numbers.txt', { onStdout: (text) => console.log('lines:', text.trim()) })
  console.log('exit code', result.exitCode)

  await sandbox.runCode("numbers = [int(line) for line in open('numbers.txt')]")
  console.log('sum', (await sandbox.runCode('sum(numbers)')).text)
  console.log((await sandbox.runCode('numbers[7]')).error.name)
} finally {
  await sandbox.kill()
}
