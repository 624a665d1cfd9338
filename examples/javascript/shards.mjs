// The parameter server, as a worker sees it. docs/protocol.md describes it.
import { setTimeout as pause } from "node:timers/promises";
import { Peer, decode, encode } from "./carrier.mjs";

export class Shards {
  constructor(run, member, model) {
    Object.assign(this, { run, member, ...model, ...run.spec.plain.deadlines, peers: {} });
    this.traffic = { pushed_bytes: 0, fetched_bytes: 0, pushes: 0, fetches: 0, retries: 0, staleness: {} };
    this.numChunks = Math.ceil(this.elems / this.chunk_elems);
  }

  // Talks with every shard about its chunks, until none is left. What is sent again has its old number, so each chunk
  // takes it once. Where other shards hold the parameters meanwhile, these are asked for the chunks that are left.
  async #exchange(method, request, talk) {
    const left = new Set(Array(this.numChunks).keys()), end_ms = Date.now() + 1000 * this.retry_s;
    for (let attempt = 0; left.size; attempt++) {
      const { nodes, placement, epoch } = this.member.notice;
      const shardOf = (chunk) => `shard-${placement.first + (chunk % placement.shards)}`;
      const some = async (name) => {
        const mine = [...left].filter((chunk) => shardOf(chunk) === name);
        try {
          const address = nodes.find((node) => node.name === name)?.address.split(" ")[0];
          this.peers[name] ??= new Peer(name, address, this.run.me);
          const more = { fingerprint: this.fingerprint, epoch };
          await talk(await this.peers[name].open(method, request(mine, attempt), more), mine, left);
        } catch (error) {
          this.peers[name] = this.peers[name].close();
          this.traffic.retries++;
          if (error.isFinal || Date.now() > end_ms) throw error;
          await pause(100);
        }
      };
      await Promise.all([...new Set([...left].map(shardOf))].map(some));
    }
  }

  // Fills `into` with the parameters, and returns the version of each chunk.
  async pull(into, terms) {
    const versions = [], request = (chunks, attempt) => encode("Fetch", { ...terms, chunks, attempt });
    await this.#exchange("fetch", request, async (stream, mine, left) => {
      for (let chunk; (chunk = await stream.recv(this.silence_s)); left.delete(chunk.index)) {
        Buffer.from(into.buffer).set(chunk.payload, 4 * this.chunk_elems * chunk.index);
        versions[chunk.index] = chunk.version;
      }
    });
    this.#count("fetch", into);
    return versions;
  }

  // Returns once every chunk has its result.
  async push(vector, versions, header) {
    await this.#exchange("push", () => encode("Push", header), async (stream, mine, left) => {
      for (const index of mine) {
        const part = vector.subarray(index * this.chunk_elems, (index + 1) * this.chunk_elems);
        const version = versions[index] ?? 0, { sequence } = header;
        const chunk = { index, sequence, elems: part.length, dtype: "FLOAT32", version };
        await stream.sendChunk(chunk, Buffer.from(part.buffer, part.byteOffset, part.byteLength), this.silence_s);
      }
      stream.end();
      for (let bytes; (bytes = await stream.recv(this.silence_s)); )
        for (const { chunk, outcome, staleness } of decode("PushResults", bytes).results) {
          left.delete(chunk);
          if (outcome === "APPLIED") this.traffic.staleness[staleness] = (this.traffic.staleness[staleness] ?? 0) + 1;
        }
    });
    this.#count("push", vector);
  }

  #count(kind, vector) {
    this.traffic[kind === "push" ? "pushes" : "fetches"]++;
    this.traffic[`${kind}ed_bytes`] += vector.byteLength;
  }
}
