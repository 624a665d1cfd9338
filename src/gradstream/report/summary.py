"""The figures of a run, as pure functions of its events (`gradstream.telemetry.events` is the schema).

An event here is the dict that one line of `events.jsonl` holds: {"event": "step", "node": ...}.
Events of several nodes may come in any order; those of one node are in order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gradstream.report.straggler import straggler_of
from gradstream.telemetry.events import EventDict

__all__ = [
    "EventDict",
    "begin_s",
    "carriers_of",
    "evaluations_of",
    "history_of",
    "staleness_of",
    "summary_of",
]

_ROW = ("step", "epoch", "rank", "samples", "loss", "lr", "gradient_norm", "time_s")
_EVALUATION = ("step", "epoch", "samples", "accuracy", "loss", "metrics", "held_out", "final", "time_s")


def history_of(events: Iterable[EventDict]) -> list[dict[str, Any]]:
    """One row per minibatch, in the order of time.

    Keys: step, epoch, rank, samples, loss, lr, gradient_norm, time_s.
    `time_s` counts from the start of the run; `loss` is None where the model does not say,
    `gradient_norm` (length of the mean gradient before clipping) where it is not clipped by length.
    """
    rows = [{key: event.get(key) for key in _ROW} for event in surviving(events) if event["event"] == "step"]
    return sorted(rows, key=lambda row: (row["time_s"], row["rank"], row["step"]))


def evaluations_of(events: Iterable[EventDict]) -> list[dict[str, Any]]:
    """One row per evaluation, in the order of time.

    Keys: step, epoch, samples (gone through by then), accuracy, loss, metrics, held_out (samples looked
    at), final (of the parameters that the run ended with), time_s.
    """
    rows = [{key: event[key] for key in _EVALUATION} for event in _of(surviving(events), "evaluated")]
    return sorted(rows, key=lambda row: row["time_s"])


def surviving(events: Iterable[EventDict]) -> list[EventDict]:
    """The events without steps and evaluations that came to nothing.

    A resumed run computes the steps after its checkpoint again, or all of them where there was none:
    the first computation of these is left out.
    """
    out: list[EventDict] = []
    kept: list[EventDict] = []
    for event in events:
        if event["event"] == "started":
            kept, out = out, [one for one in out if one["event"] not in ("step", "evaluated", "log")]
        elif event["event"] == "resumed":  # comes right behind "started"
            out = [one for one in kept if _stands(one, event)] + out[-1:]
        out.append(event)
    return out


def _stands(event: EventDict, resumed: EventDict) -> bool:
    if event["event"] == "step":
        return bool(event["step"] < resumed["steps"].get(f"worker-{event['rank']}", 0))
    if event["event"] == "log":
        return bool(event["step"] <= resumed["steps"].get(f"worker-{event['rank']}", 0))
    return event["event"] != "evaluated" or bool(event["step"] <= max(resumed["steps"].values(), default=0))


def staleness_of(events: Iterable[EventDict]) -> dict[int, int]:
    """Histogram over all pushes: staleness τ -> how many chunks had it, by growing τ."""
    counts: Counter[int] = Counter()
    for event in events:
        if event["event"] == "exchange":
            counts.update({int(tau): int(count) for tau, count in event["staleness"].items()})
    return dict(sorted(counts.items()))


def carriers_of(events: Iterable[EventDict]) -> dict[str, str]:
    """By which carrier a node reaches another one, coordinator left out: "worker-0 shard-0" -> "tcp"."""
    return {
        f"{event['node']} {peer}": carrier
        for event in events
        if event["event"] == "carriers"
        for peer, carrier in event["by_peer"].items()
        if peer != "coordinator"
    }


def summary_of(events: Sequence[EventDict]) -> dict[str, Any]:
    """Every figure of a run. A figure that its events do not tell is None, or empty.

    Keys:
        job, strategy, optimizer, workers, servers, num_parameters, num_samples, chunk_elems: as started.
        Of a run that was resumed, these are of the part that came last; all else is of all its parts.
        steps: minibatches over all workers, without those that a resumed run has computed again.
        samples: samples of those, counted with repeats.
        samples_accounted: samples with a receipt, of all data epochs: they are in the model; None if it did
            not finish.
        samples_dropped: samples that updates were made without, where there are backup workers.
        late: by worker, how many of its gradients came too late.
        shares: by worker, its samples of a round at the end, where shares are measured; else empty.
        reason: why it finished before its data was through (`until`), or None.
        samples_reassigned: minibatches that were handed out again: their first taker was lost.
        train_s: from the first gradient to the last receipt. samples_per_s: `samples` over it.
        loss: mean over the samples of the last data epoch seen.
        logged: what loops of the user's own have logged: name -> latest value, NaN where that was not finite.
        logged_dropped: values of further names that they have logged.
        accuracy, held_out_loss: of the last evaluation on held-out samples (`worker.evaluation.Evaluation`).
        compute_s, wait_s: seconds of all workers inside gradients and waiting for the exchange.
        straggler: who, slower, waited_s of the one slow worker that the others waited for, or None: see
            `gradstream.report.straggler`.
        pushed_bytes, fetched_bytes, pushes, fetches, retries: of all workers.
        whole_pushed_bytes, whole_fetched_bytes: what these would be with all of every chunk; 0 in a run
            without servers.
        staleness_mean, staleness_max, staleness: over chunks of gradients; the last is the histogram. The
            first parameters, which a worker hands out, are none. None and empty without servers, which count
            it: under allreduce no gradient is stale, under hogwild nobody knows.
        carriers: how many links between workers and shards go by which carrier; empty on the virtual network.
        group: how workers without servers sum: kind, algorithm, and by size where it was measured; or None.
        updates, duplicates, dropped, refused: of all shards, in chunks.
        peak_memory_bytes: by node, file pages included. peak_own_bytes: by node, without them.
        cpu_s: by role. cpu_work_s: by role, then by kind of work.
        loop_late_max_ms: by role.
        workers_lost: names of workers that went without a goodbye.
        failed: {culprit, error, message}, or None.
    """
    started = next(iter(_of(events, "started")[-1:]), {})
    return {
        **{key: started.get(key) for key in _STARTED},
        **_progress(surviving(events)),
        **_held_out(events),
        **_logged(surviving(events)),
        **_totals(events, "exchange", _EXCHANGED),
        **_staleness(events),
        "carriers": dict(sorted(Counter(carriers_of(events).values()).items())),
        "group": _group(events),
        **_totals(events, "applied", ("updates", "duplicates", "dropped", "refused")),
        **_machines(events),
        "workers_lost": _workers_lost(events),
        "failed": _failed(events),
    }


def _group(events: Sequence[EventDict]) -> str | None:
    """The group in words: "messages: butterfly, from 131,072 bytes on ring; alpha 85 µs, beta 0.4 s/GB"."""
    formed = next(iter(_of(events, "group")[-1:]), None)
    if formed is None:
        return None
    if not formed["choices"] or formed["alpha_s"] is None or formed["beta_s_byte"] is None:
        return f"{formed['kind']}: {formed['algorithm']}"
    (_, first), *later = sorted(formed["choices"].items(), key=lambda item: int(item[0]))
    chosen = ", ".join([first, *(f"from {int(size):,} bytes on {name}" for size, name in later)])
    measured = f"alpha {formed['alpha_s'] * 1e6:.3g} µs, beta {formed['beta_s_byte'] * 1e9:.3g} s/GB"
    return f"{formed['kind']}: {chosen}; {measured}"


_EXCHANGED = (
    "pushed_bytes",
    "fetched_bytes",
    "pushes",
    "fetches",
    "retries",
    "whole_pushed_bytes",
    "whole_fetched_bytes",
)
_STARTED = (
    "job",
    "strategy",
    "optimizer",
    "workers",
    "servers",
    "num_parameters",
    "num_samples",
    "chunk_elems",
)


def _of(events: Iterable[EventDict], name: str) -> list[EventDict]:
    return [event for event in events if event["event"] == name]


def _first(events: Iterable[EventDict], name: str) -> EventDict:
    return next((event for event in events if event["event"] == name), {})


def _totals(events: Sequence[EventDict], name: str, keys: Sequence[str]) -> dict[str, int]:
    chosen = _of(events, name)
    return {key: sum(event.get(key, 0) for event in chosen) for key in keys}


def _progress(events: Sequence[EventDict]) -> dict[str, Any]:
    steps = _of(events, "step")
    finished = next(iter(_of(events, "finished")[-1:]), {})
    samples = sum(step["samples"] for step in steps)
    train_s = finished["train_s"] - begin_s(steps) if finished else _span_s(steps)
    return {
        "steps": len(steps),
        "samples": samples,
        "samples_accounted": finished.get("samples"),
        "samples_dropped": finished.get("dropped", 0),
        "late": _late(steps),
        "shares": _shares(events),
        "reason": finished.get("reason") or None,
        "samples_reassigned": sum(event["reassigned"] for event in _of(events, "ledger")),
        "train_s": train_s,
        "samples_per_s": samples / train_s if train_s else None,
        "loss": _last_epoch_loss(steps),
        "compute_s": math.fsum(step["compute_s"] for step in steps),
        "wait_s": math.fsum(step["wait_s"] for step in steps),
        "straggler": straggler_of(steps, train_s, _absent(events)),
    }


def _held_out(events: Sequence[EventDict]) -> dict[str, Any]:
    last = next(iter(evaluations_of(events)[-1:]), {})
    return {"accuracy": last.get("accuracy"), "held_out_loss": last.get("loss")}


def _logged(events: Iterable[EventDict]) -> dict[str, Any]:
    logs = sorted(_of(events, "log"), key=lambda event: event["time_s"])
    latest = {name: value for event in logs for name, value in event["values"].items()}
    return {
        "logged": {name: math.nan if value is None else value for name, value in latest.items()},
        "logged_dropped": sum(event["dropped"] for event in logs),
    }


def _late(steps: Sequence[EventDict]) -> dict[str, int]:
    counts = Counter(step["node"] for step in steps if step.get("late"))
    return dict(sorted(counts.items()))


def _shares(events: Sequence[EventDict]) -> dict[str, int]:
    measured = _of(events, "shares")
    return {f"worker-{rank}": size for rank, size in enumerate(measured[-1]["samples"])} if measured else {}


def begin_s(steps: Sequence[EventDict]) -> float:
    """When the first of these steps began; 0 if there is none."""
    return max(0.0, min((step["time_s"] - step["compute_s"] - step["wait_s"] for step in steps), default=0.0))


def _span_s(steps: Sequence[EventDict]) -> float | None:
    """Seconds from the begin of the first step to the end of the last, for a run cut short."""
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
    # The counters of a process only grow: its last record is its total.
    last_cpu = {event["node"]: event for event in _of(events, "cpu")}
    cpu: defaultdict[str, float] = defaultdict(float)
    work: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for event in last_cpu.values():
        cpu[event["role"]] += event["user_s"] + event["system_s"]
        work[event["role"]].update(event["compute_s"])
    late: defaultdict[str, float] = defaultdict(float)
    for event in _of(events, "late"):
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
    """Workers that were lost, or paused at the end."""
    held = [name for event in _of(events, "participation")[-1:] for name in event["paused"]]
    return {*_workers_lost(events), *held}


def _failed(events: Sequence[EventDict]) -> dict[str, str] | None:
    """Why the last part of the run failed, if it did."""
    last = max((index for index, event in enumerate(events) if event["event"] == "started"), default=0)
    failed = _first(events[last:], "failed")
    return {key: failed[key] for key in ("culprit", "error", "message")} if failed else None
