// Frames, streams and connections. docs/protocol.md describes them.
import crypto from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import proto from "@grpc/proto-loader";
import { xxh3 } from "@node-rs/xxhash";

const PROTOCOL = 1;
const MAY_PASS = ["STALE_EPOCH", "SUPERSEDED"]; // codes of refusals after which another try may succeed
const OPTIONS = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const types = proto.loadSync(fileURLToPath(new URL("../../src/gradstream/wire/v1.proto", import.meta.url)), OPTIONS);
export const encode = (type, value) => Buffer.from(types[`gradstream.v1.${type}`].serialize(value));
export const decode = (type, bytes) => types[`gradstream.v1.${type}`].deserialize(bytes);

export const sha256 = (...parts) =>
  parts.reduce((hash, part) => hash.update(part), crypto.createHash("sha256")).digest();
const u64 = (value) => Buffer.from(BigUint64Array.of(BigInt(value)).buffer);
const u32 = (value) => u64(value).subarray(0, 4);
const hmac = (key, ...parts) => crypto.createHmac("sha256", key).update(Buffer.concat(parts)).digest();

// A message, or a greeting, has its checksum before it: field 13 of a Frame.
const seal = (bytes, seed) => Buffer.concat([Buffer.of(0x69), u64(xxh3.xxh64(bytes, seed)), bytes]);
function unseal(sealed, seed) {
  const bytes = sealed.subarray(9);
  if (sealed[0] !== 0x69 || sealed.readBigUInt64LE(1) !== xxh3.xxh64(bytes, seed)) throw Error("a damaged frame");
  return decode("Frame", bytes);
}

class Stream {
  constructor(call, number) {
    const first = BigInt(number) << 32n; // seeds of the checksums: the place of each message
    call.on("error", () => {}); // whoever reads gets it
    Object.assign(this, { call, frames: call[Symbol.asyncIterator](), credit: 0, early: [], sent: first, received: first });
  }

  send(frame) {
    this.call.write(seal(encode("Frame", frame), this.sent++));
  }

  async next(silence_s) {
    const alarm = setTimeout(() => this.call.cancel(), 1000 * silence_s);
    const { value: sealed } = await this.frames.next().finally(() => clearTimeout(alarm));
    if (!sealed) throw Error("the other side has ended the call");
    const frame = unseal(sealed, this.received++);
    if (frame.refuse) {
      const { code, message } = frame.refuse;
      throw Object.assign(Error(message), { refused: code, isFinal: !MAY_PASS.includes(code) });
    }
    if (frame.cancel) throw Error(`cancelled: ${frame.cancel.reason}`);
    this.credit += (frame.accept?.window ?? 0) + (frame.credit?.frames ?? 0);
    if (frame.chunk || frame.body?.data.length > 65536) this.send({ credit: { frames: 1 } });
    return frame;
  }

  // The next Chunk, with its payload, or the bytes of the next Body; null at the end. Any frame is a sign of life.
  async recv(silence_s) {
    for (;;) {
      const frame = this.early.shift() ?? (await this.next(silence_s));
      if (frame.chunk) return { ...frame.chunk, payload: frame.payload };
      if (frame.body) return frame.body.data;
      if (frame.end) return null;
    }
  }

  async sendChunk(chunk, payload, silence_s) {
    while (!this.credit) this.early.push(await this.next(silence_s));
    this.credit--;
    this.send({ chunk, payload });
  }

  end() {
    this.send({ end: {} });
    this.call.end();
  }
}

// A connection to a node. `me` has the token, the job, this node's name and incarnation, and its TLS credentials.
export class Peer {
  constructor(name, address, me) {
    Object.assign(this, { name, address, me, numStreams: 0 });
  }

  #call(rpc, key, value) {
    const metadata = new grpc.Metadata();
    if (key) metadata.set(`gradstream-${key}-bin`, value);
    const asIs = (bytes) => bytes;
    return this.client.makeBidiStreamRequest(`/gradstream.v1.Peer/${rpc}`, asIs, asIs, metadata);
  }

  // Both sides prove that they know the token, which is not sent.
  async #greet() {
    const { token, job, sender, incarnation, tls } = this.me, nonce = crypto.randomBytes(32);
    this.client = new grpc.Client(this.address, tls, {
      "grpc.ssl_target_name_override": this.name, // certificates have names of nodes, not addresses
      "grpc.use_local_subchannel_pool": 1, // a connection of its own
      "grpc.keepalive_time_ms": 20000,
      "grpc.max_receive_message_length": 34 << 20,
    });
    const { challenge } = await new Stream(this.#call("Challenge"), 0).next(10);
    const greeting = { protocol: PROTOCOL, challenge: challenge.nonce, nonce, sender, incarnation, checked: true };
    const numbers = Buffer.concat([u32(PROTOCOL), u64(incarnation), u64(0), u32(0), u32(0), Buffer.of(1)]);
    const fields = [job, this.name, challenge.nonce, nonce, sender, "", numbers];
    const proof = (side) =>
      hmac(token, ...[side, ...fields].map((field) => Buffer.from(field)).flatMap((field) => [u32(field.length), field]));
    greeting.proof = proof("caller");
    const call = this.#call("Session", "greeting", seal(encode("Greeting", greeting), 0n));
    const { proven } = await new Stream(call, 0).next(10);
    if (!crypto.timingSafeEqual(proven.proof, proof("called"))) throw Error(`${this.name} does not know the token`);
    return { session: proven.session, key: proof("session") };
  }

  async open(method, body, more = {}) {
    const { session, key } = await (this.session ??= this.#greet());
    const number = ++this.numStreams;
    const pass = encode("Pass", { session, number, proof: hmac(key, u64(number)) });
    const stream = new Stream(this.#call("Stream", "pass", pass), number);
    const { job, sender, incarnation } = this.me;
    stream.send({ open: { protocol: PROTOCOL, job, sender, incarnation, method, body, window: 8, ...more } });
    return stream;
  }

  // The next stream takes another connection.
  close() {
    this.client?.close();
    this.client = this.session = undefined;
  }
}
