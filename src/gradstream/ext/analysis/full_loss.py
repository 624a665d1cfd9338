"""The loss of a model over all training samples, computed by several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from gradstream.checkpoint.format import load_file
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, PeerLostError, UserCodeError
from gradstream.machine.description import interfaces
from gradstream.model.base import Model
from gradstream.model.buffers import buffers_of, load_buffers
from gradstream.run.local.environment import python_environment
from gradstream.run.result import Run, flatten, kept_parameters, reopen
from gradstream.transport.offers import is_loopback

Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

BATCH_SIZE = 256

SILENCE = timedelta(minutes=10)
"""Longest time for which a rank waits for the others' shares of a pass."""


class FullLoss:
    """f(x): the mean of a model's loss over all training samples, and its gradient, at any parameters x.

    It is the loss that a run trains, so layers behave as in training. BatchNorm takes the statistics of batches of
    `batch_size` samples, and dropout draws the same masks at every x: f is a function of x alone. Sums are float64,
    whatever dtype the model has.

    In a process group of torch.distributed each rank computes every size-th batch. Rank 0 calls the object, and the
    others `serve`.

    Args:
        model: the model.
        data: its training samples, which have ids.
        batch_size: samples of one batch.

    Attributes:
        model: the model.

    Raises:
        ConfigError: the data set is a stream, or it is empty.
    """

    def __init__(self, model: Model, data: Dataset, *, batch_size: int = BATCH_SIZE) -> None:
        self._num_samples = data.num_samples or 0
        if not self._num_samples or not hasattr(data, "batch"):
            raise ConfigError(
                f"{data.name} has no samples that can be read again by their ids, and the full loss is over all "
                "samples: give a data set with num_samples and batch(ids)"
            )
        self.model, self._data = model, data
        self._ids = np.array_split(np.arange(self._num_samples), -(-self._num_samples // batch_size))
        self._group = dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if self._group else (0, 1)
        self._parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
        self._gradient = torch.empty_like(self._parameters)
        self._total = torch.empty(model.layout.elems + 1, dtype=torch.float64)  # and the loss
        self._x = torch.empty_like(self._total)  # and whether there is one
        self._buffers = buffers_of(model)

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        """(f(x), ∇f(x)), the gradient as (E,) float64, in new memory.

        Raises:
            UserCodeError: the model or the data set raised.
        """
        self._x[:-1] = torch.from_numpy(x)
        self._x[-1] = 1.0
        if self._group:
            dist.broadcast(self._x, 0)
        self._compute()
        return float(self._total[-1]), self._total[:-1].numpy().copy()

    def serve(self) -> None:
        """Computes this rank's share of every call of rank 0, until rank 0 has closed its object."""
        while True:
            dist.broadcast(self._x, 0)
            if not self._x[-1]:
                return
            self._compute()

    def close(self) -> None:
        """Lets the other ranks return from `serve`."""
        if self._group:
            self._x[-1] = 0.0
            dist.broadcast(self._x, 0)

    def _compute(self) -> None:
        self._parameters.copy_(self._x[:-1])
        self._total.zero_()
        for number in range(self._rank, len(self._ids), self._size):
            ids = self._ids[number]
            try:
                batch = self._data.batch(ids)
                loss = self.model.gradient(
                    self._parameters, batch, self._gradient, seed=number, report=lambda n: None
                )
            except Exception as error:
                raise UserCodeError(f"the full loss, samples {ids[0]} to {ids[-1]}: {error!r}") from error
            weight = batch.num_samples if self.model.reduction == "mean" else 1
            self._total[:-1].add_(self._gradient, alpha=weight)
            self._total[-1] += weight * loss
        if self._buffers:  # running means that the batches have moved
            load_buffers(self.model, self._buffers)
        if self._group:
            dist.all_reduce(self._total)
        self._total /= self._num_samples


# ---- processes ---------------------------------------------------------------------------
# Processes that compute a full loss together, on this machine or under the user's torchrun.


@contextmanager
def full_loss(path: Path, *, checkpoint: str | None = None, workers: int = 1) -> Iterator[FullLoss | None]:
    """The full loss of a run's job, computed by several processes; None on the other ranks, once all is done.

    Under torchrun its processes are the workers. Otherwise `workers` - 1 processes are started on this machine: they
    meet in a folder that only this user can read, and listen on loopback alone.

    Args:
        path: the run directory.
        checkpoint: its parameters name the model's tensors; see `reopen`.
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
                command = [sys.executable, "-P", "-m", "gradstream.ext.analysis.full_loss", str(path)]
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
    """The parameters that a run kept, as (E,) float64 in the places of a model's layout; see `kept_parameters`.

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
        dist.destroy_process_group()  # otherwise its threads would end the process with std::terminate


if __name__ == "__main__":
    main(sys.argv[1:])
