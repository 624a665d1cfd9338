// A machine that joins a run, and its worker as a member of the run. docs/protocol.md describes both.
import { execFileSync } from "node:child_process";
import crypto from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";
import { connect } from "node:tls";
import grpc from "@grpc/grpc-js";
import { Peer, decode, encode, sha256 } from "./carrier.mjs";

const newIncarnation = () => crypto.randomBytes(8).readBigUInt64LE() >> 1n;

// Asks a launcher to let this machine in, with one node.
export async function enrol(address, { token, fingerprint, machine, facts }) {
  const at = address.lastIndexOf(":"), host = address.slice(0, at), port = address.slice(at + 1);
  const shown = await new Promise((done, fail) => {
    const socket = connect({ host: host.replace(/[[\]]/g, ""), port, rejectUnauthorized: false, ALPNProtocols: ["h2"] }, () => {
      done(socket.getPeerX509Certificate());
      socket.destroy();
    }).on("error", fail);
  });
  if (`sha256:${sha256(shown.raw).toString("hex")}` !== fingerprint)
    throw Error(`${address} shows another certificate than the line names: copy the line again that the launcher has printed`);
  const authority = Buffer.from(shown.toString());
  const words = "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout - -subj /CN=worker".split(" ");
  const made = execFileSync("openssl", words, { stdio: ["ignore", "pipe", "ignore"] }); // the key, then the request
  const end = made.indexOf("-----BEGIN CERTIFICATE REQUEST"), key = made.subarray(0, end), request = made.subarray(end);
  const me = { token, job: "enrolment", sender: `machine-${machine}`, incarnation: newIncarnation() };
  const launcher = new Peer("launcher", address, { ...me, tls: grpc.credentials.createSsl(authority) });
  const body = encode("Enrol", { machine, facts, request, cores: 1, address: host });
  const stream = await launcher.open("enrol", body).catch((error) => {
    throw error.refused === "BAD_SECRET" ? Error("the token is not this run's: copy the line again") : error;
  });
  const run = new Run(stream, host);
  const { grant } = await run.order(30);
  if (grant.nodes.length > 1)
    throw Error(`${grant.nodes.map((node) => node.name)} were given to this machine: start the run with --servers-on launcher`);
  const [{ name, certificate }] = grant.nodes, spec = JSON.parse(grant.spec);
  const tls = grpc.credentials.createSsl(authority, key, certificate);
  return Object.assign(run, { grant, spec, me: { token, job: spec.id, sender: name, incarnation: newIncarnation(), tls } });
}

// A run, as a machine of it: `grant` and `spec` as the launcher has sent them, and `me` for the connections of our node.
class Run {
  constructor(stream, host) {
    Object.assign(this, { stream, host });
  }

  async order(silence_s) {
    const bytes = await this.stream.recv(silence_s);
    if (!bytes) throw Error("the launcher has closed the connection");
    return decode("Order", bytes);
  }

  // Waits for the end of the run; orders to start a lost worker again have no effect here.
  async ended() {
    for (let order; (order = await this.order(this.spec.plain.deadlines.coordinator_s)); ) if (order.over) return order.over;
  }

  report(status) {
    this.stream.send({ body: { data: encode("Report", { who: this.me.sender, status }) } });
  }

  async leave() {
    this.stream.end();
    await this.stream.recv(5).catch(() => {}); // whatever it is
  }
}

// The worker's presence: its beats, each of which the coordinator takes once, and the notices that come back.
export class Member {
  constructor(run, port, request) {
    const name = run.me.sender, rank = Number(name.slice("worker-".length));
    Object.assign(this, { run, name, rank, address: `${run.host}:${port}`, deadlines: run.spec.plain.deadlines });
    this.request = encode("Join", { node: { name, role: "worker", rank, incarnation: run.me.incarnation }, ...request });
    Object.assign(this, { said: 0, unheard: [], settling: [], settled: 0, waiters: [], onNotice() {} });
    Object.assign(this, { begun: 0, standing: true, asks: 0, speed: {} });
    setInterval(() => this.line && this.tell({}), 1000 * (this.deadlines.lease_s / 40)).unref();
    this.attending = this.#attend();
  }

  coordinator() {
    return new Peer("coordinator", this.address, this.run.me);
  }

  get over() {
    return !["GATHERING", "TRAINING"].includes(this.notice?.status ?? "GATHERING");
  }

  get isLowest() {
    return this.notice.nodes.find((node) => node.role === "worker")?.name === this.name;
  }

  tell(beat) {
    this.unheard.push({ ...beat, number: ++this.said });
    this.#send(this.unheard.at(-1));
    return this.said;
  }

  // A push whose receipts are in beat `beat`: once that is heard, shards need not keep the push.
  settle(sequence, beat) {
    this.settling.push({ sequence, beat });
  }

  event(name, fields) {
    const time_s = (performance.now() - (this.begunAt_ms ?? performance.now())) / 1000;
    return Buffer.from(JSON.stringify({ event: name, node: this.name, time_s, rank: this.rank, ...fields }) + "\n");
  }

  // Waits for notices until `reached`; raises if the coordinator is lost, or counts this worker as lost.
  async until(reached) {
    while (!reached()) {
      if (this.failure) throw this.failure;
      await new Promise((done) => this.waiters.push(done));
    }
  }

  fail(error) {
    this.failure ??= error;
    this.wake();
  }

  wake() {
    this.waiters.splice(0).forEach((done) => done());
  }

  // Whether a checkpoint lets this worker begin no further minibatch, or the run ends here.
  get isAtLimit() {
    const cut = this.notice.snapshot;
    return Boolean(cut) && (cut.stage !== "WRITE" || cut.last) && this.begun >= Number(cut.stop_at[this.name] ?? this.begun);
  }

  get isEnding() {
    return this.isAtLimit && this.notice.snapshot.ends && this.notice.snapshot.stage !== "PAUSE";
  }

  // `standing`: the model includes all that this worker has begun.
  report() {
    const cut = this.notice.snapshot, reached = this.standing && this.isAtLimit && ["STOP", "SNAPSHOT"].includes(cut.stage);
    const kind = cut?.stage === "PAUSE" ? "BEGUN" : reached ? "REACHED" : "";
    if (!kind || this.reported === kind + cut.number) return;
    this.reported = kind + cut.number;
    this.tell({ reports: [{ snapshot: { number: cut.number, kind, count: this.begun } }] });
  }

  #send(beat) {
    this.line?.send({ body: { data: encode("Beat", beat) } });
  }

  #hear(bytes) {
    const notice = decode("Notice", bytes), heard = Number(notice.heard);
    if (!notice.unchanged) this.notice = notice;
    this.unheard = this.unheard.filter((beat) => beat.number > heard);
    while (this.settling[0]?.beat <= heard) this.settled = this.settling.shift().sequence;
    if (this.notice.status === "TRAINING") this.begunAt_ms ??= performance.now();
    if (!this.over) this.report();
    this.onNotice(this.notice);
    this.wake();
  }

  // Goes on over another connection where one is lost or silent, for as long as the coordinator may be away.
  async #attend() {
    const { lease_s, coordinator_s } = this.deadlines;
    for (let attempt = 0, heard_ms = Date.now(); ; attempt++) {
      const peer = this.coordinator();
      try {
        const stream = await (attempt ? peer.open("resume", encode("Resume", { attempt })) : peer.open("join", this.request));
        for (let bytes; (bytes = await stream.recv(lease_s / 2)); heard_ms = Date.now()) {
          this.#hear(bytes);
          if (this.line !== stream) {
            this.line = stream;
            this.unheard.forEach((beat) => this.#send(beat));
          }
        }
        return;
      } catch (error) {
        this.line = peer.close();
        if (error.isFinal || !this.notice || Date.now() - heard_ms > 1000 * coordinator_s) {
          this.fail(error);
          return;
        }
        await pause(100);
      }
    }
  }

  // Notes how long a minibatch of so many units took: the coordinator gives each worker what it can do.
  took(units, seconds) {
    const { speed } = this, more = { rounds: 1, samples: units, seconds, squares: seconds ** 2 / units };
    Object.keys(more).forEach((key) => { speed[key] = (speed[key] ?? 0) + more[key]; });
  }

  // Asks for minibatches: the answer comes when there are some, or when the run has none any more.
  async assign() {
    const request = encode("Ask", { number: ++this.asks, wait: true, ...this.speed });
    this.speed = {};
    for (const end_ms = Date.now() + 1000 * this.deadlines.coordinator_s; ; await pause(100)) {
      this.requests ??= this.coordinator();
      try {
        const stream = await this.requests.open("assign", request, { epoch: this.notice.epoch });
        return decode("Assigned", await stream.recv(this.deadlines.lease_s));
      } catch (error) {
        this.requests = this.requests.close();
        if (error.isFinal || this.failure || Date.now() > end_ms) throw error;
      }
    }
  }

  // Says goodbye, and waits until the coordinator has heard it, with all beats before.
  async leave() {
    this.line?.end();
    await this.attending;
  }
}
