// What the scripts of frameworks share, as in parts.py. They run beside their packages, so these are found from there.

import { readFileSync } from 'node:fs'

const PARTS = []

/** A part of a framework that must work. */
export const part = (name, run) => PARTS.push({ name, run })

/** The sandboxes of the server, by its own door. */
export async function sandboxes() {
  const token = process.env.E2B_API_KEY.replace(/^e2b_/, '')
  return (await fetch(`${process.env.E2B_API_URL}/v1/sandboxes`, { headers: { 'x-sandbox-token': token } })).json()
}

function chain(error) {
  const said = []
  for (; error; error = error.cause) said.push(error.stack ?? String(error), JSON.stringify(error))
  return said.join('\n')
}

/** Runs all parts, and ends the program. Packages are those whose versions are reported. */
export async function main(meta, ...packages) {
  const versions = packages.map((name) => {
    const description = readFileSync(new URL(`node_modules/${name}/package.json`, meta.url))
    return `${name} ${JSON.parse(description).version}`
  })
  let failures = 0
  for (const { name, run } of PARTS) {
    const late = new Promise((_, reject) => setTimeout(() => reject(new Error('not over after 120 s')), 120_000).unref())
    try {
      await Promise.race([run(), late])
      console.log(`ok ${name}`)
    } catch (error) {
      failures++
      console.log(`FAIL ${name}: ${chain(error).slice(0, 4000)}`)
    }
  }
  const left = await sandboxes()
  if (left.length) {
    failures++
    console.log('FAIL sandboxes are left:', left.map((one) => one.labels))
  }
  console.log(`${versions.join(', ')}: ${PARTS.length} parts, ${failures} failed`)
  process.exit(failures ? 1 : 0)
}
