"""The figures of a run as pure functions of its events (`gradstream.telemetry.events` is the schema).

An event is the dict in one line of `events.jsonl`: {"event": "step", "node": ...}. Events of several nodes may come in
any order; events of one node come in their order.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.coordinator.link_choice import Links
from gradstream.report.straggler import straggler_of
from gradstream.telemetry.events import EventDict

# ---- links -------------------------------------------------------------------------------
# Reads the measurements on which `Links` bases its advice: see `coordinator.link_choice`.


def links_of(events: Iterable[Mapping[str, Any]]) -> Links | None:
    """The measurements of an allreduce run; None for other runs, in one machine's memory, or if nothing was measured.

    None too if local SGD, or its codecs, would be refused: for a user's own loop, split models, and numbers other
    than float32; and if a phase of the run has another strategy.
    """
    started: Mapping[str, Any] = {}
    formed: Mapping[str, Any] = {}
    steps = defaultdict[str, list[Mapping[str, Any]]](list)
    whole_bytes, split = 0, False
    for event in events:
        match event["event"]:
            case "started":
                started = event
            case "group":
                formed = event
            case "step":
                steps[event["node"]].append(event)
            case "exchange":
                whole_bytes += event.get("whole_pushed_bytes", 0)  # earlier versions did not record it
            case "part":
                split = True
            case "phase" if event["strategy"] != "allreduce":
                return None
    workers, elems = started.get("workers", 0), started.get("num_parameters", 0)
    if started.get("strategy") != "allreduce" or workers < 2 or not elems:
        return None
    if not formed.get("beta_s_byte") or not steps or split or not started.get("num_samples"):
        return None
    if whole_bytes > 6 * elems * sum(map(len, steps.values())):  # float64
        return None
    medians = [
        tuple(statistics.median(step[key] for step in mine) for key in ("compute_s", "wait_s", "samples"))
        for mine in steps.values()
    ]
    compute_s, wait_s, _ = max(medians)
    return Links(
        workers=workers,
        elems=elems,
        alpha_s=formed["alpha_s"],
        beta_s_byte=formed["beta_s_byte"],
        compute_s=compute_s,
        wait_s=wait_s,
        epoch=int(started["num_samples"] / sum(samples for *_, samples in medians)),
        spread=compute_s / (min(medians)[0] or compute_s),
    )


# ---- summary -----------------------------------------------------------------------------

_ROW = ("step", "epoch", "rank", "samples", "loss", "lr", "gradient_norm", "time_s")
_PHASE = (
    *("number", "label", "strategy", "optimizer", "workers", "servers"),
    *("batch_size", "accumulate", "samples", "time_s", "way", "trains_locally"),
)
_EVALUATION = ("step", "epoch", "samples", "accuracy", "loss", "metrics", "held_out", "final", "time_s")


def history_of(events: Iterable[EventDict]) -> list[dict[str, Any]]:
    """One row per minibatch, in the order of time; none for those that others computed for a lost worker.

    Keys: step, epoch, rank, samples, loss, lr, gradient_norm, time_s. `time_s` counts from the start of the run. `loss`
    is the mean or the sum over the minibatch, as the model's `reduction` says, and None if the model does not return
    it. `gradient_norm`, the length of the mean gradient before clipping, is None if it is not clipped by its length.
    """
    rows = [{key: event.get(key) for key in _ROW} for event in surviving(events) if event["event"] == "step"]
    return sorted(rows, key=lambda row: (row["time_s"], row["rank"], row["step"]))


def evaluations_of(events: Iterable[EventDict]) -> list[dict[str, Any]]:
    """One row per evaluation, in the order of time.

    Keys: step, epoch, samples (number of training samples by then), accuracy, loss, metrics, held_out (number of
    evaluated samples), final (whether the parameters are the final ones), time_s.
    """
    rows = [{key: event[key] for key in _EVALUATION} for event in _of(surviving(events), "evaluated")]
    return sorted(rows, key=lambda row: row["time_s"])


def surviving(events: Iterable[EventDict]) -> list[EventDict]:
    """The events without steps and evaluations whose results were lost.

    A resumed run repeats the steps after its checkpoint, or all steps if there was none. Their first computation is
    dropped, with the squares of their gradients.
    """
    out: list[EventDict] = []
    kept: list[EventDict] = []
    for event in events:
        if event["event"] == "started":
            kept, out = (
                out,
                [event for event in out if event["event"] not in ("step", "evaluated", "log", "noise")],
            )
        elif event["event"] == "resumed":  # comes directly after "started"
            behind: Counter[str] = Counter()
            out = [earlier for earlier in kept if _survives(earlier, event, behind)] + out[-1:]
        out.append(event)
    return out


def _survives(event: EventDict, resumed: EventDict, behind: Counter[str]) -> bool:
    """Whether the checkpoint includes the work of an event. `behind`: by worker, samples of the events before it."""
    if event["event"] == "step" and resumed.get("by_worker"):
        # Such a loop counts its own steps, which may have several minibatches.
        who = f"worker-{event['rank']}"
        behind[who] += event["samples"]
        return behind[who] <= int(resumed["by_worker"].get(who, 0))
    if event["event"] == "step":
        return bool(event["step"] < resumed["steps"].get(f"worker-{event['rank']}", 0))
    if event["event"] == "log":
        return bool(event["step"] <= resumed["steps"].get(f"worker-{event['rank']}", 0))
    rounds = max(resumed["steps"].values(), default=0)
    return event["event"] not in ("evaluated", "noise") or bool(
        event.get("step", event.get("round")) <= rounds
    )


def staleness_of(events: Iterable[EventDict]) -> dict[int, int]:
    """Histogram over all pushes: staleness τ -> number of chunks, by ascending τ."""
    counts: Counter[int] = Counter()
    for event in events:
        if event["event"] == "exchange":
            counts.update({int(tau): int(count) for tau, count in event["staleness"].items()})
    return dict(sorted(counts.items()))


def carriers_of(events: Iterable[EventDict]) -> dict[str, str]:
    """The carrier between each pair of nodes except the coordinator: "worker-0 shard-0" -> "tcp"."""
    return {
        f"{event['node']} {peer}": carrier
        for event in events
        if event["event"] == "carriers"
        for peer, carrier in event["by_peer"].items()
        if peer != "coordinator"
    }


def summary_of(events: Sequence[EventDict]) -> dict[str, Any]:
    """Every figure of a run. A figure that is not in the events is None, or empty.

    Keys:
        job, strategy, optimizer, workers, servers, num_parameters, num_samples, chunk_elems: as started.
            For a resumed run these are of its last part; all other figures are of all its parts.
            In a run with phases, strategy, optimizer, workers and servers are of the last phase.
        way, trains_locally: of the strategy: "servers", "group", "pairs" or "shared memory"; and whether workers make
            steps of their own between two exchanges.
        phases: one row for each phase of the job that has begun: number (from 1), label, strategy, optimizer, workers,
            servers, batch_size, accumulate, samples (in the model at its beginning), time_s, way, trains_locally; []
            without phases.
        steps: number of minibatches of all workers, without those that a resumed run repeated; in a loop of the
            user's own, of its steps, which may have several; under `local-sgd` and strategies of pairs, number of
            rounds of all workers, of up to `every` minibatches each.
        samples: number of samples in them; a sample counts each time. Minibatches that others computed for a lost
            worker, or for an empty place, are in samples_accounted alone.
        samples_accounted: number of samples with a receipt, which are in the model; None if the run did not finish.
        samples_dropped: number of samples that updates skipped: with backup workers, or in refused gradients.
        gradients_refused: by worker, number of gradients that were not finite.
        late: by worker, number of gradients that came too late.
        alone: by worker, number of rounds without the partner of its pair.
        shares: by worker, samples of a round at the end; empty if shares are not measured.
        reason: why the run finished before its data was used up (`until`), or None.
        samples_reassigned: number of minibatches that were assigned again because their first worker was lost.
        train_s: seconds from the first gradient to the last receipt. samples_per_s: the larger of
            `samples` and `samples_accounted`, divided by `train_s`.
        loss: mean over the samples of the last data epoch.
        logged: figures that the user's loop has logged, name -> latest value; NaN if that was not finite.
        logged_dropped: number of logged values that were dropped because there were too many names.
        noise_scale: gradient noise scale tr Σ/|G|² of the last measured rounds, in samples; None if it was not
            measured, or for the reason in noise_scale_missing.
        accuracy, held_out_loss: result of the last evaluation on held-out samples (`worker.evaluation.Evaluation`).
        compute_s, wait_s: seconds that all workers spent in gradients and waiting for the exchange.
        straggler: who, slower and waited_s of the slow worker, or None; see `gradstream.report.straggler`.
        pushed_bytes, fetched_bytes, pushes, fetches, retries: totals of all workers.
            Without servers: what workers contributed to sums, counted once, however often the algorithm sends it.
        whole_pushed_bytes, whole_fetched_bytes: these bytes if everything had been sent whole and without a codec; 0 in
            shared memory.
        staleness_mean, staleness_max, staleness: over chunks of gradients, without the initial parameters; the last
            is the histogram. None and empty without servers, which count it: with allreduce no gradient is
            stale, with hogwild it is unknown.
        carriers: by carrier, number of links between workers and shards; empty on the virtual network.
        relayed: by pair of nodes that could not dial each other, bytes that went through the coordinator, both ways.
        group: how workers without servers sum: kind, algorithm, and by size if it was measured; or None.
        links: for an allreduce run over measured links, how long minibatches wait for their exchange and, if
            that is long, how to exchange instead: see `links_of`.
        updates, duplicates, dropped, refused: totals of all shards, in chunks.
        peak_memory_bytes: by node, with file pages. peak_own_bytes: by node, without them.
        cpu_s: CPU seconds by role. cpu_work_s: by role, then by kind of work.
        loop_late_max_ms: longest delay of an event loop, by role.
        workers_lost: names of workers that disappeared without leaving.
        failed: {culprit, error, message}, or None.
    """
    phases = _phases(events)
    started = {**_last(events, "started"), **(phases[-1] if phases else {})}
    held_out = next(iter(evaluations_of(events)[-1:]), {})
    noise_scale, missing, _ = noise_scale_of(surviving(events))
    return {
        **{key: started.get(key) for key in _STARTED},
        "phases": phases,
        **_progress(surviving(events)),
        "accuracy": held_out.get("accuracy"),
        "held_out_loss": held_out.get("loss"),
        **_logged(surviving(events)),
        "noise_scale": noise_scale,
        "noise_scale_missing": missing,
        **_totals(events, "exchange", _EXCHANGED),
        **_staleness(events),
        "carriers": _sorted_counts(carriers_of(events).values()),
        "relayed": _relayed(events),
        "alone": _sorted_counts(f"worker-{event['rank']}" for event in _of(events, "alone")),
        "group": _group(events),
        "links": None if (links := links_of(events)) is None else links.sentence(),
        **_totals(events, "applied", ("updates", "duplicates", "dropped", "refused")),
        **_machines(events),
        "workers_lost": _workers_lost(events),
        "failed": _failed(events),
    }


def _phases(events: Sequence[EventDict]) -> list[dict[str, Any]]:
    """The phases of the job, in the order in which they first began."""
    rows: dict[int, dict[str, Any]] = {}
    for event in _of(events, "phase"):
        rows.setdefault(event["number"], {key: event[key] for key in _PHASE})
    return [rows[number] for number in sorted(rows)]


def _relayed(events: Sequence[EventDict]) -> dict[str, int]:
    """By pair of nodes, bytes through the coordinator, of all parts of the run: "worker-1 worker-2" -> bytes."""
    sizes: Counter[str] = Counter()
    for event in _of(events, "relay"):
        if event["how"] == "relayed":
            sizes[f"{event['caller']} {event['called']}"] += event["size_bytes"]
    return dict(sorted(sizes.items()))


def _group(events: Sequence[EventDict]) -> str | None:
    """The group in words: "messages: butterfly, from 131,072 bytes on ring; alpha 85 µs, beta 0.4 s/GB"."""
    formed = _last(events, "group")
    if not formed:
        return None
    if not formed["choices"] or formed["alpha_s"] is None or formed["beta_s_byte"] is None:
        return f"{formed['kind']}: {formed['algorithm']}"
    (_, first), *later = sorted(formed["choices"].items(), key=lambda item: int(item[0]))
    chosen = ", ".join([first, *(f"from {int(size):,} bytes on {name}" for size, name in later)])
    measured = f"alpha {formed['alpha_s'] * 1e6:.3g} µs, beta {formed['beta_s_byte'] * 1e9:.3g} s/GB"
    return f"{formed['kind']}: {chosen}; {measured}"


_EXCHANGED = (
    *("pushed_bytes", "fetched_bytes", "pushes", "fetches", "retries"),
    *("whole_pushed_bytes", "whole_fetched_bytes"),
)
_STARTED = (
    *("job", "strategy", "optimizer", "workers", "servers"),
    *("num_parameters", "num_samples", "chunk_elems", "way", "trains_locally"),
)


def _of(events: Iterable[EventDict], name: str) -> list[EventDict]:
    return [event for event in events if event["event"] == name]


def _last(events: Iterable[EventDict], name: str) -> EventDict:
    """The last event of this name; {} if there is none."""
    return next(iter(_of(events, name)[-1:]), {})


def _totals(events: Sequence[EventDict], name: str, keys: Sequence[str]) -> dict[str, int]:
    chosen = _of(events, name)
    return {key: sum(event.get(key, 0) for event in chosen) for key in keys}


def _progress(events: Sequence[EventDict]) -> dict[str, Any]:
    steps = _of(events, "step")
    finished = _last(events, "finished")
    samples = sum(step["samples"] for step in steps)
    train_s = finished["train_s"] - begin_s(steps) if finished else _span_s(steps)
    return {
        "steps": len(steps),
        "samples": samples,
        "samples_accounted": finished.get("samples"),
        "samples_dropped": finished.get("dropped", 0),
        "gradients_refused": _sorted_counts(event["who"] for event in _of(events, "gradient_refused")),
        "late": _sorted_counts(step["node"] for step in steps if step.get("late")),
        "shares": _shares(events),
        "reason": finished.get("reason") or None,
        "samples_reassigned": sum(event["reassigned"] for event in _of(events, "ledger")),
        "train_s": train_s,
        "samples_per_s": max(samples, finished.get("samples") or 0) / train_s if train_s else None,
        "loss": _last_epoch_loss(steps),
        "compute_s": math.fsum(step["compute_s"] for step in steps),
        "wait_s": math.fsum(step["wait_s"] for step in steps),
        "straggler": straggler_of(steps, train_s, _absent(events)),
    }


def _logged(events: Iterable[EventDict]) -> dict[str, Any]:
    logs = sorted(_of(events, "log"), key=lambda event: event["time_s"])
    latest = {name: value for event in logs for name, value in event["values"].items()}
    return {
        "logged": {name: math.nan if value is None else value for name, value in latest.items()},
        "logged_dropped": sum(event["dropped"] for event in logs),
    }


def _sorted_counts(names: Iterable[str]) -> dict[str, int]:
    """How often each name occurs, by name."""
    return dict(sorted(Counter(names).items()))


def _shares(events: Sequence[EventDict]) -> dict[str, int]:
    measured = _of(events, "shares")
    return {f"worker-{rank}": size for rank, size in enumerate(measured[-1]["samples"])} if measured else {}


def begin_s(steps: Sequence[EventDict]) -> float:
    """When the first of these steps began; 0 without steps."""
    return max(0.0, min((step["time_s"] - step["compute_s"] - step["wait_s"] for step in steps), default=0.0))


def _span_s(steps: Sequence[EventDict]) -> float | None:
    """Seconds from the beginning of the first step to the end of the last, for a run that did not finish."""
    return float(max(step["time_s"] for step in steps) - begin_s(steps)) if steps else None


def _last_epoch_loss(steps: Sequence[EventDict]) -> float | None:
    known = [step for step in steps if step["loss"] is not None and step["samples"]]
    last = max((step["epoch"] for step in known), default=0)
    weights = [(step["samples"], step["loss"]) for step in known if step["epoch"] == last]
    samples = sum(weight for weight, _ in weights)
    return math.fsum(weight * loss for weight, loss in weights) / samples if samples else None


def _staleness(events: Sequence[EventDict]) -> dict[str, Any]:
    histogram = staleness_of(events)
    chunks = sum(histogram.values())
    total = sum(tau * count for tau, count in histogram.items())
    return {
        "staleness_mean": total / chunks if chunks else None,
        "staleness_max": max(histogram) if histogram else None,
        "staleness": histogram,
    }


def _machines(events: Sequence[EventDict]) -> dict[str, Any]:
    peak: dict[str, int] = {}
    own: dict[str, int] = {}
    for event in _of(events, "memory"):
        peak[event["node"]] = max(event["peak_bytes"], peak.get(event["node"], 0))
        own[event["node"]] = max(event["peak_own_bytes"], own.get(event["node"], 0))
    # The counters of a process only grow: its last event has the totals.
    last_cpu = {event["node"]: event for event in _of(events, "cpu")}
    cpu: defaultdict[str, float] = defaultdict(float)
    work: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for event in last_cpu.values():
        cpu[event["role"]] += event["user_s"] + event["system_s"]
        work[event["role"]].update(event["compute_s"])
    late: defaultdict[str, float] = defaultdict(float)
    for event in _of(events, "loop_lag"):
        late[event["role"]] = max(late[event["role"]], event["max_ms"])
    return {
        "peak_memory_bytes": dict(sorted(peak.items())),
        "peak_own_bytes": dict(sorted(own.items())),
        "cpu_s": dict(sorted(cpu.items())),
        "cpu_work_s": {role: dict(kinds) for role, kinds in sorted(work.items())},
        "loop_late_max_ms": dict(sorted(late.items())),
    }


def _workers_lost(events: Sequence[EventDict]) -> list[str]:
    return [e["who"] for e in _of(events, "left") if e["lost"] and e["who"].startswith("worker")]


def _absent(events: Sequence[EventDict]) -> set[str]:
    """Workers that were lost and not replaced."""
    there = {e["who"]: e["event"] == "joined" for e in events if e["event"] in ("joined", "left")}
    return {who for who in _workers_lost(events) if not there[who]}


def _failed(events: Sequence[EventDict]) -> dict[str, str] | None:
    """The failure of the last part of the run, if it failed."""
    last = max((index for index, event in enumerate(events) if event["event"] == "started"), default=0)
    failed = next(iter(_of(events[last:], "failed")), {})
    return {key: failed[key] for key in ("culprit", "error", "message")} if failed else None


# ---- noise scale -------------------------------------------------------------------------
# The gradient noise scale B = tr Σ / |G|², from gradients that a run computes anyway.
#
#     S = (s - J) / (m - 1/b)     estimates tr Σ,   s = 1/W·Σᵢ |gᵢ|²,   m = 1/W·Σᵢ 1/bᵢ
#     Q = J - S·(1/b - 1/n)       estimates |G|²,   J = |g|²,           b = Σᵢ bᵢ
#     B = mean S / mean Q         exponential means, each of its own: a mean of quotients would be biased
#
# G is the mean gradient over all data, Σ the covariance of the gradient of one sample. gᵢ is the mean gradient of
# worker i over its bᵢ samples, and g that over the samples of all W workers, all at the same parameters. An epoch has
# each of its n samples once, so minibatches are drawn without replacement, and E|gᵢ|² = |G|² + tr Σ·(1/bᵢ - 1/n) gives
# both lines. With equal bᵢ and infinite n, they are those of the paper, with B_small = bᵢ and B_big = b.
#
# Reference: McCandlish, Kaplan, Amodei and others, "An empirical model of large-batch training", 2018, appendix A.1.

SQUARES = ("contribution_square", "joined_square")

DECAY = 0.95
"""Weight of the mean before a measured round: a mean over about 20 rounds."""


@dataclass(slots=True)
class NoiseScale:
    """Exponential means over measured rounds.

    Args:
        decay: weight of the mean before a round, in [0, 1]. The first rounds count equally, so that no initial value
            biases the mean; with 1 all rounds do.
        population: n, number of training samples, from which minibatches are drawn without replacement; infinite for a
            stream.

    Attributes:
        rounds: number of rounds so far.
        trace: mean estimate of tr Σ.
        square: mean estimate of |G|², which noise may make negative.

    Example:
        >>> estimate = NoiseScale()
        >>> estimate.add(2, 1.0, contribution_square=5.0, joined_square=3.0)
        >>> estimate.trace, estimate.square, estimate.value
        (4.0, 1.0, 4.0)
    """

    decay: float = DECAY
    population: float = math.inf
    rounds: int = 0
    trace: float = 0.0
    square: float = 0.0

    def add(
        self, samples: int, inverse_samples: float, contribution_square: float, joined_square: float
    ) -> None:
        """Adds a round of at least two contributions.

        Args:
            samples: b, number of samples of all contributions.
            inverse_samples: m, mean of 1/bᵢ; above 1/b.
            contribution_square: s, mean square of the contributions' mean gradients.
            joined_square: J, square of the mean gradient over all samples.
        """
        trace = (contribution_square - joined_square) / (inverse_samples - 1 / samples)
        square = joined_square - trace * (1 / samples - 1 / self.population)
        weight = max(1 / (self.rounds + 1), 1 - self.decay)
        self.trace += weight * (trace - self.trace)
        self.square += weight * (square - self.square)
        self.rounds += 1

    @property
    def value(self) -> float | None:
        """B, in samples; None while the estimate of |G|² is not positive."""
        return self.trace / self.square if self.rounds and self.square > 0 else None


def rounds_of(events: Iterable[EventDict]) -> list[EventDict]:
    """One event for each measured round, in order, with the squares of all its nodes.

    A round in which a node was lost, or the number of nodes changed, is skipped.
    """
    by_round: defaultdict[int, dict[str, EventDict]] = defaultdict(dict)
    for event in events:
        if event["event"] == "noise":
            by_round[event["round"]][event["node"]] = event
    rounds: list[EventDict] = []
    for number in sorted(by_round):
        nodes = list(by_round[number].values())
        if {len(nodes)} == {node["nodes"] for node in nodes} and len(
            {node["samples"] for node in nodes}
        ) == 1:
            sums = {key: math.fsum(node[key] for node in nodes) for key in SQUARES}
            rounds.append({**nodes[0], "time_s": max(node["time_s"] for node in nodes), **sums})
    return rounds


def noise_scale_of(events: Iterable[EventDict]) -> tuple[float | None, str, list[tuple[int, float, float]]]:
    """The gradient noise scale of a run: its last value, why there is none, and its values over the run.

    Returns:
        B in samples, or None; the reason, "" if there is a value or it was not measured; (round, time_s, B) of
        each round with a value.
    """
    events = list(events)
    num_samples = next((event.get("num_samples") for event in events if event["event"] == "started"), None)
    estimate, points = NoiseScale(population=num_samples or math.inf), list[tuple[int, float, float]]()
    rounds = rounds_of(events)
    for event in rounds:
        if event["contributions"] > 1:
            estimate.add(event["samples"], event["inverse_samples"], event[SQUARES[0]], event[SQUARES[1]])
            if estimate.value is not None:
                points.append((event["round"], event["time_s"], estimate.value))
    return estimate.value, _why_none(rounds, estimate), points


def _why_none(rounds: Sequence[EventDict], estimate: NoiseScale) -> str:
    if not rounds or estimate.value is not None:
        return ""
    if not estimate.rounds:
        return "none: one worker, and batches of two sizes are needed; take workers=2"
    return f"none: after {estimate.rounds} measured rounds |G|² is not above its noise; take more steps or samples"
