"""Question: how near does training without a server come to two processes that exchange nothing?

Two workers of one thread each on two cores, the Caltech-101 models of the examples, the same samples a step
and the same allocator settings for all. Rows:

    side-by-side   two plain PyTorch loops at the same time that exchange nothing: the physical limit
    in-step        the same, waiting for each other after each step: what keeping step alone costs, since one
                   waits for the slower, and both want the memory, or both the arithmetic, at the same time
    allreduce      AllReduce of gradstream as it comes: in shared memory, overlapping backprop
    serial         the same without overlap; whole: every worker updates all parameters
    ddp            torch's DistributedDataParallel over gloo
    loop           the plain loop with the five lines of a session in it, under AllReduce
    plain, one, loop-one
                   one loop alone; AllReduce, and the loop with five lines, with one worker: what they cost

    python bench/data_parallel.py --model large
    python bench/data_parallel.py --model cnn

A round measures every row once, each a window of steps after some that warm up; figures are medians over
rounds of the ratio within a round, since a machine's speed changes by the hour. Prints a table, and keeps
it with machine, commit and date in bench/results/.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, command_line, keep_part, origin
from gradstream.run.local.environment import node_environment

WORKERS, BATCH = 2, 256
STEPS = {"large": 5, "cnn": 8}  # of a window: five seconds and more
WARM = 3
GOALS = {"large": 0.92, "cnn": 0.97}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=list(STEPS), default="large")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a window")
    parser.add_argument("--bucket-mib", type=float, help="of AllReduce; its default otherwise")
    parser.add_argument("--only", nargs="*", help="rows to measure")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.steps = given.steps or STEPS[given.model]
    if given.peer:
        peer(given)
        return
    bucket = {} if given.bucket_mib is None else {"bucket_mib": given.bucket_mib}
    rows: dict[str, Callable[[], float]] = {
        "side-by-side": lambda: peers(given, ["plain"] * WORKERS),
        "in-step": lambda: peers(given, [f"step-{rank}" for rank in range(WORKERS)]),
        "allreduce": lambda: ours(given, WORKERS, bucket),
        "serial": lambda: ours(given, WORKERS, {**bucket, "overlap": False}),
        "whole": lambda: ours(given, WORKERS, {**bucket, "sharded": False}),
        "ddp": lambda: peers(given, [f"ddp-{rank}" for rank in range(WORKERS)]),
        "plain": lambda: peers(given, ["plain"]),
        "one": lambda: ours(given, 1, bucket),
        "loop": lambda: loops(given, WORKERS),
        "loop-one": lambda: loops(given, 1),
    }
    if given.only:
        rows = {name: row for name, row in rows.items() if name in given.only}
    os.environ.update(node_environment(WORKERS))  # the same for every process of every row
    rounds: list[dict[str, float]] = []
    for count in range(given.rounds):
        rounds.append({name: measure() for name, measure in rows.items()})
        print(f"round {count}:", " ".join(f"{k} {v:.0f}" for k, v in rounds[-1].items()), flush=True)
    keep(given, rounds)


# ---- ours ------------------------------------------------------------------------------------------


def described(model: str) -> Any:
    from gradstream.job.files import load_job

    return load_job(f"{ROOT / 'examples' / 'caltech101.py'}:{model}")


def ours(given: argparse.Namespace, workers: int, options: dict[str, Any]) -> float:
    """Samples a second of all workers, over the steps after those that warm up."""
    from gradstream._train import train

    with tempfile.TemporaryDirectory() as folder:
        run = train(
            described(given.model),
            strategy="allreduce",
            strategy_options=options,
            workers=workers,
            batch_size=BATCH,
            epochs=None,
            steps=WARM + given.steps,
            checkpoint_every=None,
            run_dir=Path(folder) / "run",
        )
    ends: dict[int, list[float]] = {}
    for event in run.events:
        if event["event"] == "step":
            ends.setdefault(event["rank"], []).append(event["time_s"])
    return sum(given.steps * BATCH / (times[-1] - times[WARM - 1]) for times in ends.values())


def loops(given: argparse.Namespace, workers: int) -> float:
    """Samples a second of all workers of the plain loop with a session in it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gradstream", "train", __file__, "--workers", str(workers)]
        done = subprocess.run(
            [*command, "--run-dir", f"{folder}/run"],
            env={**os.environ, "LOOP_MODEL": given.model, "LOOP_STEPS": str(given.steps)},
            capture_output=True,
            text=True,
            check=False,
        )
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith("samples/s of a worker:"):
            return workers * float(line.split(":")[1])
    raise RuntimeError(done.stderr)


# ---- peers -----------------------------------------------------------------------------------------


def peers(given: argparse.Namespace, kinds: list[str]) -> float:
    """Samples a second of plain loops, or of DDP's, which begin at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--model", given.model, "--steps", str(given.steps)]
        processes = [
            subprocess.Popen(
                [*command, "--peer", kind, "--store", f"{folder}/store"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind in kinds
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(float(process.communicate()[0]) for process in processes)


def loop_with_session() -> None:
    """`peer` as a script of the user's own, under `gradstream train`."""
    import gradstream

    session = gradstream.join("allreduce", checkpoint_every=None)
    given = argparse.Namespace(
        model=os.environ["LOOP_MODEL"], steps=int(os.environ["LOOP_STEPS"]), peer="loop"
    )
    peer(given, session)
    session.close()


def peer(given: argparse.Namespace, session: Any = None) -> None:
    """What anybody would write, with the fastest update rule that torch has."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    import caltech101

    job = described(given.model)
    data, rule = job.data, job.optimizer
    torch.manual_seed(0)
    module: Any = {"large": caltech101.large_network, "cnn": caltech101.conv_network}[given.model]()
    kind, _, rank = given.peer.partition("-")
    if kind in ("ddp", "step"):
        store = torch.distributed.FileStore(given.store, WORKERS)
        torch.distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=WORKERS)
    if kind == "ddp":
        module = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay, fused=True
    )
    if session is not None:
        module, optimizer = session.wrap(module, optimizer)
    order = torch.randperm(data.num_samples).numpy()
    module.train()

    def step(number: int) -> None:
        start = number * BATCH % (len(order) - BATCH)
        batch = data.batch(order[start : start + BATCH])
        optimizer.zero_grad()
        loss = caltech101.loss(module(torch.from_numpy(batch.inputs)), torch.from_numpy(batch.targets))
        loss.backward()
        optimizer.step()
        if kind == "step":
            torch.distributed.barrier()

    if session is None:
        print("ready", flush=True)
        sys.stdin.readline()
    for number in range(WARM):
        step(number)
    begun = time.perf_counter()
    for number in range(WARM, WARM + given.steps):
        step(number)
    rate = given.steps * BATCH / (time.perf_counter() - begun)
    print(rate if session is None else f"samples/s of a worker: {rate}", flush=True)


# ---- the record ------------------------------------------------------------------------------------


def keep(given: argparse.Namespace, rounds: list[dict[str, float]]) -> None:
    """Prints the table and writes it down."""

    def ratio(name: str, base: str) -> float | None:
        if name not in rounds[0] or base not in rounds[0]:
            return None
        return statistics.median(one[name] / one[base] for one in rounds)

    rows = {}
    print(f"\n{given.model}: {'':6s} samples/s   of side by side   of plain")
    for name in rounds[0]:
        row = {
            "samples_per_s": statistics.median(one[name] for one in rounds),
            "of_side_by_side": ratio(name, "side-by-side"),
            "of_plain": ratio(name, "plain") if name in ("one", "plain", "loop-one") else None,
        }
        rows[name] = row
        shown = [f"{row[key]:.3f}" if row[key] else "-" for key in ("of_side_by_side", "of_plain")]
        print(f"{name:14s} {row['samples_per_s']:9.0f}   {shown[0]:>15s}   {shown[1]:>8s}")
    reached = ratio("allreduce", "side-by-side")
    if reached is not None:
        print(f"goal {GOALS[given.model]:.2f} of side by side: {reached:.3f}")
    record = {
        **origin(node_environment(WORKERS)),
        "arguments": {"batch": BATCH, "warm": WARM, **vars(given)},
        "rows": rows,
        "rounds": rounds,
    }
    if given.only:
        return  # a part of a table is not kept
    keep_part(RESULTS / "data-parallel.json", given.model, record)


if __name__ == "__main__":
    if "LOOP_MODEL" in os.environ:
        loop_with_session()
    else:
        main()
