// A worker in JavaScript: softmax regression under Downpour, beside workers in Python.
//
//     npm ci && node worker.mjs 10.0.0.1:41873 job.py --token ... --fingerprint sha256:...
//
// The arguments are those of the line that `gradstream train job.py --listen ... --servers-on launcher` prints.
import { readFileSync, writeFileSync } from "node:fs";
import { hostname } from "node:os";
import { basename, dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { sha256 } from "./carrier.mjs";
import { checksumOf, orderOf, readArray, safetensors } from "./data.mjs";
import { Member, enrol } from "./membership.mjs";
import { Shards } from "./shards.mjs";

const text = { type: "string" };
const options = { token: { ...text, default: process.env.GRADSTREAM_TOKEN ?? "" }, fingerprint: text, name: { ...text, default: hostname() } };
const { values: given, positionals: [address, job] } = parseArgs({ allowPositionals: true, options });
const say = (...words) => console.error("worker.mjs:", ...words);
process.on("uncaughtException", (error) => process.exit(say(error.name === "Error" ? error.message : error) ?? 1));

// ---- data and model --------------------------------------------------------------------------------------------------
const names = ["inputs", "targets", "test_inputs", "test_targets"];
const arrays = names.map((name) => readArray(join(dirname(job), `${name}.npy`)));
const samples = arrays[0].length, inputs = new Float32Array(arrays[0].bytes.buffer), targets = arrays[1].bytes;
const features = inputs.length / samples, classes = 10, elems = (features + 1) * classes; // the first row is the bias
const fingerprint = sha256(`(torch.float32, [('weights', (${features + 1}, ${classes}))])`).readBigUInt64LE() | 1n;

function addGradient(sum, weights, ids) { // of the mean loss over these samples, which it returns
  let loss = 0;
  for (const id of ids) {
    const x = [1, ...inputs.subarray(id * features, (id + 1) * features)], z = Array(classes).fill(0);
    x.forEach((value, row) => z.forEach((_, c) => { z[c] += value * weights[row * classes + c]; }));
    const norm = Math.log(z.reduce((all, one) => all + Math.exp(one), 0));
    const error = z.map((one, c) => (Math.exp(one - norm) - (c === targets[id])) / ids.length);
    x.forEach((value, row) => error.forEach((one, c) => { sum[row * classes + c] += value * one; }));
    loss += (norm - z[targets[id]]) / ids.length;
  }
  return loss;
}
const orders = {};
const idsOf = ({ epoch, batch, more }) =>
  (orders[epoch] ??= orderOf(samples, plain.seed, epoch)).slice(batch * unit, (batch + more + 1) * unit);

// ---- joining ---------------------------------------------------------------------------------------------------------
const facts = {
  "job file": `${basename(job)} sha256:${sha256(readFileSync(job)).toString("hex")}`,
  "job function": "",
  "data set": "arrays",
  "data samples": `${samples} and ${arrays[2].length} held out`,
  "data checksum": checksumOf(arrays),
};
const run = await enrol(address, { ...given, machine: given.name, facts });
const { plain, strategy, optimizer, resume } = run.spec, { deadlines, chunk_elems } = plain, { lr } = optimizer.fields;
const unit = [plain.batch_size].flat().reduce(function gcd(a, b) { return b ? gcd(b, a % b) : a; });
const can = { push_every: 1, fetch_every: 1, overlap: false, significance: 0 };
const cannot = Object.keys(can).filter((key) => strategy.fields[key] !== can[key]);
cannot.push(...["codec", "shares", "assignment", "clip_norm", "clip_value"].filter((key) => plain[key] !== null));
if (!strategy.class.endsWith(":Downpour")) cannot.push(strategy.class);
if (typeof lr !== "number") cannot.push("a schedule of rates");
if (plain.phases.length || resume) cannot.push(resume ? "a resumed run" : "phases");
if (cannot.length) throw Error(`this worker cannot do what the job asks for: ${cannot.join(", ")}`);
say(`in as ${run.grant.machine}, with ${run.me.sender}; ${run.grant.waiting}`);
const { go } = await run.order(600);
const tensors = [{ name: "weights", shape: [features + 1, classes], dtype: "F32" }];
const member = new Member(run, go.port, { model: { fingerprint, elems, dtype: "FLOAT32", chunk_elems }, tensors });
const shards = new Shards(run, member, { elems, chunk_elems, fingerprint });

// ---- training --------------------------------------------------------------------------------------------------------
let sequence = 0, pulls = 0, leaving = false, known;
const redone = new Set();
member.onNotice = ({ fenced }) => { // some chunks lack a push of a lost worker: this one redoes it in its name
  for (const { sender, incarnation, redos } of fenced)
    for (const torn of redos.filter(({ substitute }) => substitute === member.name)) {
      const key = `${sender} ${incarnation} ${torn.sequence}`;
      if (!redone.has(key)) redone.add(key) && redo({ sender, incarnation }, torn).catch((error) => member.fail(error));
    }
};
async function redo(behalf, { sequence, batches }) {
  const weights = new Float32Array(elems), sum = new Float32Array(elems), versions = await shards.pull(weights, {});
  batches.forEach((batch) => addGradient(sum, weights, idsOf(batch)));
  const header = { sequence, behalf, lr, loss: NaN, samples: batches.flatMap(idsOf).length, num_gradients: batches.length };
  await shards.push(sum, versions, header);
  member.tell({ reports: [{ redone: { ...behalf, sequence } }] });
}
async function step(batch, number) {
  const weights = new Float32Array(elems), sum = new Float32Array(elems), ids = idsOf(batch), at = performance.now();
  const versions = (known = await shards.pull(weights, { after_sequence: sequence, number: ++pulls }));
  const pulled = performance.now(), loss = addGradient(sum, weights, ids), computed = performance.now();
  const counted = { samples: ids.length, lr, loss };
  const kept = { batches: [batch], settled: member.settled };
  await shards.push(sum, versions, { ...counted, ...kept, sequence: ++sequence, num_gradients: 1 });
  const [compute_s, wait_s] = [(computed - pulled) / 1000, (performance.now() - at - computed + pulled) / 1000];
  const figures = { step: number, epoch: batch.epoch, ...counted, compute_s, wait_s, compute_at_s: (pulled - at) / 1000 };
  const none = { waited_for: {}, gradient_norm: null, part_squares: null, square: null, late: false, read_s: 0 };
  member.settle(sequence, member.tell({ receipts: [batch], events: member.event("step", { ...figures, ...none }) }));
  return compute_s + wait_s;
}
async function train() {
  await member.until(() => member.over || member.notice?.status === "TRAINING");
  const first = () => known || shards.push(new Float32Array(elems), [], { command: "ASSIGN", sequence: ++sequence });
  member.until(() => member.isLowest).then(first, () => {}); // else the worker of the lowest rank does it
  for (let queue = [], steps = 0; ; ) {
    if (!queue.length) queue = (await Promise.race([member.assign(), member.until(() => leaving)]))?.batches ?? [];
    await member.until(() => leaving || member.over || member.isEnding || !member.isAtLimit);
    if (leaving || member.over || member.isEnding || !queue.length) return;
    member.begun++;
    member.standing = false;
    const batch = queue.shift();
    member.took(batch.more + 1, await step(batch, steps++));
    member.standing = true;
    member.report();
  }
}
async function keep() { // the final parameters, since the workers before this one are gone
  const weights = new Float32Array(elems);
  await shards.pull(weights, { after_sequence: sequence, flush: true });
  writeFileSync("model.safetensors", safetensors("weights", [features + 1, classes], weights));
  say("the final parameters are in model.safetensors");
}
process.on("SIGTERM", () => {
  leaving = true;
  member.wake();
});
const ended = run.ended();
ended.catch(() => {}); // awaited at the end
try {
  await train();
  const { pushed_bytes: whole_pushed_bytes, fetched_bytes: whole_fetched_bytes } = shards.traffic;
  member.tell({ events: member.event("exchange", { ...shards.traffic, whole_pushed_bytes, whole_fetched_bytes }) });
  if (!leaving && !member.over && !member.isLowest) member.tell({ finished: true, relies: true });
  await member.until(() => leaving || member.over || member.isLowest);
  if (!leaving && !member.over) member.tell((await keep(), { finished: true }));
  if (leaving) member.tell({ leaves: true });
  else await member.until(() => member.over);
} catch (error) {
  say(error.message);
  if (error === member.failure) process.exit(1); // the coordinator is gone, or counts this worker as lost
  member.tell({ failure: { error: error.name, message: error.message, traceback: error.stack } });
  await member.until(() => member.over);
}
await member.leave();
run.report(leaving ? 75 : 0);
const { status, message } = leaving ? { status: 75, message: "this worker has left the run, which goes on" } : await ended;
say(message);
await run.leave();
process.exit(status);
