// Arrays in .npy files, and the order in which all workers go through their samples. See docs/protocol.md.
import { readFileSync } from "node:fs";
import { sha256 } from "./carrier.mjs";

// An array: `said` is its shape and type as the checksum has them.
export function readArray(path) {
  const file = readFileSync(path), start = file.indexOf("\n") + 1;
  const [, kind, shape] = file.toString("latin1", 0, start).match(/'descr': '(.*?)'.*'shape': (\(.*?\))/);
  return { said: `${shape} ${kind}`, length: parseInt(shape.slice(1)), bytes: Uint8Array.from(file.subarray(start)) };
}

export const checksumOf = (arrays) => // of arrays up to 64 MiB
  sha256("('',)", ...arrays.flatMap(({ said, bytes }) => [said, bytes])).toString("hex").slice(0, 32);

// The samples of an epoch in the order that all workers draw: sorted by their words of Philox 4x64-10 under (seed, epoch).
export function orderOf(samples, seed, epoch) {
  const words = [], mask = (1n << 64n) - 1n;
  for (let block = 1n; words.length < samples; block++) {
    let [a, b, c, d, k, l] = [block, 0n, 0n, 0n, BigInt(seed), BigInt(epoch)];
    for (let round = 0; round < 10; round++) {
      const x = a * 0xd2e7470ee14c6c93n, y = c * 0xca5a826395121157n;
      [a, b, c, d] = [(y >> 64n) ^ b ^ k, y & mask, (x >> 64n) ^ d ^ l, x & mask];
      [k, l] = [(k + 0x9e3779b97f4a7c15n) & mask, (l + 0xbb67ae8584caa73bn) & mask];
    }
    words.push(a, b, c, d);
  }
  return [...Array(samples).keys()].sort((i, j) => (words[i] < words[j] ? -1 : words[i] > words[j] ? 1 : i - j));
}

// A file of one array of float32, as the final parameters are kept.
export function safetensors(name, shape, array) {
  const tensor = { dtype: "F32", shape, data_offsets: [0, array.byteLength] };
  const head = Buffer.from(JSON.stringify({ [name]: tensor }).padEnd(128)), length = Buffer.alloc(8);
  length.writeUInt32LE(head.length);
  return Buffer.concat([length, head, Buffer.from(array.buffer)]);
}
