// A tar archive (POSIX.1-2001, pax) of what a person chose or dropped. The contents stay on disk until they are sent:
// the archive is a Blob of headers and files.

const BLOCK = 512;
const encoder = new TextEncoder();

function header({ name, size, mtime, type }) {
  const block = new Uint8Array(BLOCK);
  const put = (offset, text) => block.set(encoder.encode(text), offset);
  const octal = (offset, width, value) => put(offset, value.toString(8).padStart(width - 1, "0"));
  block.set(name.subarray(0, 100), 0);
  octal(100, 8, type === "5" ? 0o755 : 0o644);
  octal(108, 8, 0);
  octal(116, 8, 0);
  octal(124, 12, Math.min(size, 0o77777777777));
  octal(136, 12, Math.max(0, Math.floor(mtime / 1000)));
  put(148, "        ");
  put(156, type);
  put(257, "ustar\u000000");
  put(148, `${block.reduce((sum, byte) => sum + byte, 0).toString(8).padStart(6, "0")}\0 `);
  return block;
}

/** A record of a pax header, whose length counts its own digits. */
function record(key, value) {
  const rest = encoder.encode(` ${key}=${value}\n`).length;
  let length = rest + String(rest).length;
  if (rest + String(length).length !== length) length += 1;
  return `${length} ${key}=${value}\n`;
}

const padding = (size) => new Uint8Array((BLOCK - (size % BLOCK)) % BLOCK);

/** Packs `{ path, file }` entries; one without a file is a folder. */
export async function archive(entries) {
  const parts = [];
  for (const { path, file } of entries) {
    const name = file ? path : `${path}/`;
    const raw = encoder.encode(name);
    const size = file?.size ?? 0;
    const mtime = file?.lastModified ?? Date.now();
    const records = `${raw.length > 100 || raw.length !== name.length ? record("path", name) : ""}${size > 0o77777777777 ? record("size", size) : ""}`;
    if (records) {
      const data = encoder.encode(records);
      parts.push(header({ name: encoder.encode("pax"), size: data.length, mtime, type: "x" }), data, padding(data.length));
    }
    parts.push(header({ name: raw, size, mtime, type: file ? "0" : "5" }));
    if (file) parts.push(file, padding(size));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Blob(parts);
}

async function walk(entry, path, found) {
  if (entry.isFile) {
    found.push({ path, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
    return;
  }
  found.push({ path });
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    for (const child of some) await walk(child, `${path}/${child.name}`, found);
  }
}

/** What a person has dropped or chosen, as entries for `archive`. */
export const dropped = {
  /** Folders are walked; their entries must be taken before the event ends. */
  async fromDrop(transfer) {
    const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const found = [];
    for (const entry of entries) await walk(entry, entry.name, found);
    return found;
  },
  fromInput: async (files) => [...files].map((file) => ({ path: file.name, file })),
};
