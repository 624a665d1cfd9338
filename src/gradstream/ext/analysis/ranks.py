"""Processes that compute a full loss together, on this machine or under the user's torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradstream.checkpoint.format import load_file
from gradstream.errors import ConfigError, PeerLostError
from gradstream.ext.analysis.full_loss import FullLoss, Vector
from gradstream.machine.description import interfaces
from gradstream.model.base import Model
from gradstream.run.local.link import python_environment
from gradstream.run.result import Run, flatten, kept_parameters, reopen
from gradstream.transport.offers import is_loopback

SILENCE = timedelta(minutes=10)
"""The longest that a rank waits for the others' share of a pass."""


@contextmanager
def full_loss(path: Path, *, checkpoint: str | None = None, workers: int = 1) -> Iterator[FullLoss | None]:
    """The full loss of a run's job, computed by several processes; None on the other ranks, when all is done.

    Under torchrun its processes are the workers. Else `workers` - 1 processes are started on this machine: they meet
    in a folder that only this user can read, and listen on loopback alone.

    Args:
        path: the run directory.
        checkpoint: whose parameters name the model's tensors; see `reopen`.
        workers: number of processes.

    Raises:
        ConfigError: the run cannot be opened, its data is a stream, or there are fewer than 1 worker.
        PeerLostError: a process was lost.
    """
    if workers < 1:
        raise ConfigError(f"workers: 1 or more; got {workers}")
    run, _ = reopen(path, checkpoint=checkpoint)
    with tempfile.TemporaryDirectory(prefix="gradstream-") as folder:
        started: list[subprocess.Popen[bytes]] = []
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo", timeout=SILENCE)
        elif workers > 1:
            for rank in range(1, workers):
                command = [sys.executable, "-P", "-m", "gradstream.ext.analysis.ranks", str(path)]
                command += [checkpoint or "", str(rank), str(workers), folder]
                started.append(subprocess.Popen(command, env=python_environment({})))
            meet(Path(folder), 0, workers)
        try:
            yield from _share(run)
        except RuntimeError as error:
            if not dist.is_initialized():
                raise
            raise PeerLostError("a process of the evaluation", f"{error}; run the command again") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for process in started:
                process.kill()
                process.wait()


def parameters_of(path: Path, model: Model, checkpoint: str | None = None) -> Vector:
    """The parameters that a run has kept, as (E,) float64 in the places of a model's layout; see `kept_parameters`.

    Raises:
        ConfigError: there are none, or they are those of another model.
    """
    flat = flatten(model, load_file(kept_parameters(path, checkpoint)))
    vector: Vector = flat.to(torch.float64).numpy()
    return vector


def _share(run: Run) -> Iterator[FullLoss | None]:
    assert run.model is not None and run.data is not None
    loss = FullLoss(run.model, run.data)
    if dist.is_initialized() and dist.get_rank():
        loss.serve()
        yield None
        return
    yield loss
    loss.close()


def meet(folder: Path, rank: int, size: int) -> None:
    """Makes the process group of `size` processes of this machine, each with its share of the cores."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name, at in interfaces().items() if is_loopback(at))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=SILENCE
    )


def main(argv: list[str]) -> None:
    """One further rank: RUN CHECKPOINT RANK SIZE FOLDER."""
    path, checkpoint, rank, size, folder = argv
    run, _ = reopen(Path(path), checkpoint=checkpoint or None)
    meet(Path(folder), int(rank), int(size))
    try:
        for _ in _share(run):
            pass
    finally:
        dist.destroy_process_group()  # its threads would end the process with std::terminate


if __name__ == "__main__":
    main(sys.argv[1:])
