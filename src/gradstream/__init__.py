"""Distributed SGD over machines that may be slow, far apart, and dying.

What users need is here; it is imported when it is first asked for, so that `import gradstream`
costs nothing. The layers, of which each imports only what is below it:

    cli  testing                       front doors
    session                            a training loop of the user's own
    train  node  registry  run         the only places that name concrete classes
    cluster  simulate                  nodes as processes, or in one process on virtual time
    worker                             the node that runs a strategy
    strategies                         one algorithm, one file
    server  membership                 the parameter server; who is in
    transport                          how nodes talk
    model  data  optim  wire           the user's model and data, update rules, the schema
    runtime  memory  events  errors    time, tasks, compute, randomness and disk
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstream._resume import resume
    from gradstream._simulate import simulate
    from gradstream._train import train
    from gradstream.coordinator.stopping import until
    from gradstream.data import caltech101, fashion_mnist, from_arrays, from_dataset, from_loader, from_stream
    from gradstream.errors import (
        ConfigError,
        DeadlineError,
        DivergedError,
        GradientError,
        GradstreamError,
        Interrupted,
        PeerLostError,
        RefusedError,
        UserCodeError,
    )
    from gradstream.job.job import Deadlines, Job
    from gradstream.model import Batch, Rows, from_functions, from_jax, from_torch
    from gradstream.optim import (
        SGD,
        Adagrad,
        Adam,
        AdamW,
        BackOff,
        Chain,
        Constant,
        Cosine,
        InverseRoot,
        Linear,
        Momentum,
        Nesterov,
        OneCycle,
        StepDecay,
        Warmup,
    )
    from gradstream.replay.replay import replay
    from gradstream.run.result import Run
    from gradstream.runtime.simulation import Cost, Link, Network, World
    from gradstream.session import Session, join
    from gradstream.strategies import (
        DCASGD,
        EAMSGD,
        SSP,
        AllReduce,
        AsySG,
        DiLoCo,
        Downpour,
        ElasticAveraging,
        Hogwild,
        ParameterAveraging,
        Softsync,
        StalenessAware,
        Strategy,
        Synchronous,
    )
    from gradstream.trackers.tensorboard import TensorBoard

__version__ = "0.1.0"

__all__ = [
    "DCASGD",
    "EAMSGD",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "AdamW",
    "AllReduce",
    "AsySG",
    "BackOff",
    "Batch",
    "Chain",
    "ConfigError",
    "Constant",
    "Cosine",
    "Cost",
    "DeadlineError",
    "Deadlines",
    "DiLoCo",
    "DivergedError",
    "Downpour",
    "ElasticAveraging",
    "GradientError",
    "GradstreamError",
    "Hogwild",
    "Interrupted",
    "InverseRoot",
    "Job",
    "Linear",
    "Link",
    "Momentum",
    "Nesterov",
    "Network",
    "OneCycle",
    "ParameterAveraging",
    "PeerLostError",
    "RefusedError",
    "Rows",
    "Run",
    "Session",
    "Softsync",
    "StalenessAware",
    "StepDecay",
    "Strategy",
    "Synchronous",
    "TensorBoard",
    "UserCodeError",
    "Warmup",
    "World",
    "caltech101",
    "fashion_mnist",
    "from_arrays",
    "from_dataset",
    "from_functions",
    "from_jax",
    "from_loader",
    "from_stream",
    "from_torch",
    "join",
    "replay",
    "resume",
    "simulate",
    "train",
    "until",
]

_ROOMS = {
    "gradstream.job.job": ("Deadlines", "Job"),
    "gradstream.data": (
        "caltech101",
        "fashion_mnist",
        "from_arrays",
        "from_dataset",
        "from_loader",
        "from_stream",
    ),
    "gradstream.errors": tuple(name for name in __all__ if name.endswith(("Error", "Interrupted"))),
    "gradstream.coordinator.stopping": ("until",),
    "gradstream.model": ("Batch", "Rows", "from_functions", "from_jax", "from_torch"),
    "gradstream.optim": ("SGD", "Adagrad", "Adam", "AdamW", "Momentum", "Nesterov"),
    "gradstream.optim.schedules": (
        "BackOff",
        "Chain",
        "Constant",
        "Cosine",
        "InverseRoot",
        "Linear",
        "OneCycle",
        "StepDecay",
        "Warmup",
    ),
    "gradstream.replay": ("replay",),
    "gradstream.trackers.tensorboard": ("TensorBoard",),
    "gradstream._resume": ("resume",),
    "gradstream.run.result": ("Run",),
    "gradstream.runtime.simulation": ("Cost", "Link", "Network", "World"),
    "gradstream.session": ("Session", "join"),
    "gradstream._simulate": ("simulate",),
    "gradstream.strategies": (
        "DCASGD",
        "EAMSGD",
        "SSP",
        "AllReduce",
        "AsySG",
        "DiLoCo",
        "Downpour",
        "ElasticAveraging",
        "Hogwild",
        "ParameterAveraging",
        "Softsync",
        "StalenessAware",
        "Strategy",
        "Synchronous",
    ),
    "gradstream._train": ("train",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'gradstream' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Face(ModuleType):
    """Keeps `gradstream.train` and `gradstream.simulate` the functions.

    Importing a submodule sets the attribute of its name; these two have the name of the function
    that users want, and are themselves found by `from gradstream._train import ...`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _ROOM_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
