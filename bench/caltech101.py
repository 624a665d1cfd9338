"""Question: what does distributing cost on the main job, and where does each CPU second go?

Trains the Caltech-101 models with every strategy of the table, each in the same hour and with the
same allocator settings as its peers: a plain single-process PyTorch loop with all cores, and
as many single-threaded loops side by side that exchange nothing (the physical limit).

    python bench/caltech101.py --model large --epochs 10
    python bench/caltech101.py --model cnn --epochs 10 --only plain downpour-10

Prints a table, and keeps it with machine, commit and date in bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, command_line, keep_part, kept, now, origin
from gradstream.machine.description import git_commit
from gradstream.run.local.environment import node_environment

WORKERS = 2
CHUNK_ELEMS = 1 << 20  # over shared memory a chunk costs more than its elements


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=["large", "small", "cnn"], default="large")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="samples of a minibatch of one worker")
    parser.add_argument("--only", nargs="*", help="rows to measure")
    parser.add_argument("--lr", type=float, help="rate of SGD")
    parser.add_argument("--downpour-lr", type=float, default=0.02, help="rate of Downpour's local steps")
    parser.add_argument("--downpour-momentum", type=float, default=0.9, help="momentum of these")
    parser.add_argument("--carrier", default="auto", help="between workers and servers")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order of samples")
    parser.add_argument("--plain", metavar="THREADS", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain is not None:
        print(json.dumps(plain_loop(given, given.plain)))
        return
    # Local steps at full rate, and the server takes the mean of what the workers bring, not the sum.
    period_1 = {"overlap": False, "local_momentum": given.downpour_momentum}
    period_10 = {**period_1, "push_every": 10, "fetch_every": 10, "local_lr": given.downpour_lr}
    mean_lr = given.downpour_lr / WORKERS
    rows = {
        "plain": lambda: peers(given, [os.cpu_count() or 1]),
        "side-by-side": lambda: peers(given, [1] * WORKERS),
        "synchronous-half": lambda: ours(given, "synchronous", {}, batch=given.batch // WORKERS),
        "synchronous": lambda: ours(given, "synchronous", {}),
        "allreduce-half": lambda: ours(given, "allreduce", {}, batch=given.batch // WORKERS),
        "allreduce": lambda: ours(given, "allreduce", {}),
        "downpour-1-half": lambda: ours(
            given, "downpour", period_1, lr=mean_lr, batch=given.batch // WORKERS
        ),
        "downpour-1": lambda: ours(given, "downpour", period_1, lr=mean_lr),
        "downpour-1-overlap": lambda: ours(given, "downpour", {**period_1, "overlap": True}, lr=mean_lr),
        "downpour-10": lambda: ours(given, "downpour", period_10, lr=mean_lr),
    }
    results: dict[str, Any] = {}
    for name, measure in rows.items():
        if given.only and name not in given.only:
            continue
        results[name] = {**measure(), "date": now(), "commit": git_commit(ROOT)}
        print(name, json.dumps(results[name]), flush=True)
    keep(given, results)


def job(model: str) -> Any:
    from gradstream.job.files import load_job

    return load_job(f"{ROOT / 'examples' / 'caltech101.py'}:{model}")


def peers(given: argparse.Namespace, threads: list[int]) -> dict[str, Any]:
    """Plain loops, one process for each number of threads, at the same time."""
    processes = []
    for count in threads:
        environment = {**os.environ, **node_environment(1), "OMP_NUM_THREADS": str(count)}
        environment["MKL_NUM_THREADS"] = str(count)
        command = [sys.executable, __file__, *sys.argv[1:], "--plain", str(count)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    outputs = [json.loads(process.communicate()[0]) for process in processes]
    first = dict(outputs[0])
    first["samples_per_s"] = sum(output["samples_per_s"] for output in outputs)
    return first


def plain_loop(given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """What anybody would write for one machine."""
    import torch

    torch.set_num_threads(threads)
    sys.path.insert(0, str(ROOT / "examples"))
    import caltech101

    described = job(given.model)
    data = described.data
    torch.manual_seed(given.seed)
    networks = {"large": caltech101.large_network, "small": caltech101.small_network}
    module = networks.get(given.model, caltech101.conv_network)()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=given.lr or described_lr(described), momentum=0.9, weight_decay=1e-4
    )
    generator = torch.Generator().manual_seed(given.seed)
    seconds, samples = 0.0, 0
    module.train()
    for _ in range(given.epochs):
        order = torch.randperm(data.num_samples, generator=generator).numpy()
        begun = time.perf_counter()
        for start in range(0, len(order), given.batch):
            batch = data.batch(order[start : start + given.batch])
            optimizer.zero_grad()
            outputs = module(torch.from_numpy(batch.inputs))
            loss = caltech101.loss(outputs, torch.from_numpy(batch.targets))
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - begun
        samples += len(order)
    module.eval()
    right = 0
    with torch.inference_mode():
        for start in range(0, data.num_test_samples, given.batch):
            stop = min(start + given.batch, data.num_test_samples)
            batch = data.test_batch(torch.arange(start, stop).numpy())
            outputs = module(torch.from_numpy(batch.inputs))
            right += int((outputs.argmax(1) == torch.from_numpy(batch.targets)).sum())
    return {
        "samples_per_s": samples / seconds,
        "train_s": seconds,
        "accuracy": right / data.num_test_samples,
        "peak_mb": {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3},
    }


def described_lr(described: Any) -> float:
    """The rate of the example's SGD."""
    from gradstream.optim import SGD

    return described.optimizer.lr if isinstance(described.optimizer, SGD) else 0.01


def ours(
    given: argparse.Namespace,
    strategy: str,
    options: dict[str, Any],
    batch: int | None = None,
    lr: float | None = None,
) -> dict[str, Any]:
    """The job through gradstream: processes, gRPC, everything."""
    import gradstream as gs
    from gradstream._train import train

    described = job(given.model)
    optimizer: Any = gs.optim.SGD(lr=lr or 0.01, weight_decay=1e-4)
    if strategy != "downpour":
        rate = given.lr or described_lr(described)
        optimizer = gs.optim.SGD(lr=rate, momentum=0.9, weight_decay=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            described,
            strategy=strategy,
            strategy_options=options,
            optimizer=optimizer,
            workers=WORKERS,
            servers=0 if strategy == "allreduce" else 1,
            carrier=given.carrier,
            chunk_elems=CHUNK_ELEMS,
            batch_size=batch or given.batch,
            epochs=given.epochs,
            seed=given.seed,
            run_dir=Path(folder) / "run",
        )
        summary = run.summary
        return {
            "samples_per_s": summary["samples_per_s"],
            "train_s": summary["train_s"],
            "accuracy": run.evaluate().accuracy,
            "optimizer": str(optimizer),
            "carriers": summary["carriers"],
            "options": options,
            "steps": summary["steps"],
            "pushed_gb": summary["pushed_bytes"] / 1e9,
            "fetched_gb": summary["fetched_bytes"] / 1e9,
            "staleness_mean": summary["staleness_mean"],
            "compute_s": summary["compute_s"],
            "wait_s": summary["wait_s"],
            "peak_mb": {name: value / 1e6 for name, value in summary["peak_memory_bytes"].items()},
            "peak_own_mb": {name: value / 1e6 for name, value in summary["peak_own_bytes"].items()},
            "cpu_s": summary["cpu_s"],
            "cpu_work_s": summary["cpu_work_s"],
            "late_max_ms": summary["loop_late_max_ms"],
            "loss": summary["loss"],
        }


def keep(given: argparse.Namespace, results: dict[str, Any]) -> None:
    """Prints the table and writes it down."""
    base = results.get("plain", {}).get("samples_per_s")
    print(f"{'':18s} samples/s  ratio  train s  accuracy  peak MB by process")
    for name, row in results.items():
        ratio = f"{row['samples_per_s'] / base:.2f}" if base else "-"
        peak = ", ".join(f"{who} {mb:.0f}" for who, mb in row["peak_mb"].items())
        print(
            f"{name:18s} {row['samples_per_s']:9.0f}  {ratio:>5s}  {row['train_s']:7.1f}  "
            f"{row['accuracy']:8.3f}  {peak}"
        )
    path, part = RESULTS / "caltech101.json", f"{given.model}, seed {given.seed}"
    if given.only and part in kept(path):  # rows measured before stay, with their own date and commit
        results = {**kept(path)[part]["rows"], **results}
    record = {
        **origin(node_environment(WORKERS)),
        "arguments": vars(given),
        "rows": results,
    }
    keep_part(path, part, record)


if __name__ == "__main__":
    main()
