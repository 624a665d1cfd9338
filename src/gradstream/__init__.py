"""Distributed SGD over machines that may be slow, far apart, and dying.

The names of `__all__` are what most users need. The rest is in public modules: `gs.optim`, `gs.schedules`, `gs.codecs`,
`gs.strategies`, `gs.pipeline`, `gs.data`, `gs.model`, `gs.errors`, `gs.runs`, `gs.checkpoints`, `gs.sim`, `gs.replay`,
`gs.trackers`, `gs.sparse`, `gs.testing`.
Each name is imported when it is first asked for, so that `import gradstream` costs nothing.

Examples in docstrings use these names:

    >>> import random
    >>> import torch
    >>> import gradstream as gs
    >>> model = gs.from_torch(lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
    >>> inputs = torch.linspace(-1.0, 1.0, 192).reshape(64, 3)
    >>> data = gs.from_arrays(inputs.numpy(), inputs.sum(1, keepdim=True).numpy())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradstream._version import __version__ as __version__

if TYPE_CHECKING:
    from gradstream import (
        checkpoints,
        data,
        errors,
        model,
        optim,
        pipeline,
        runs,
        sparse,
        strategies,
        testing,
        trackers,
    )
    from gradstream import codec as codecs
    from gradstream._resume import resume
    from gradstream._simulate import simulate
    from gradstream._train import train
    from gradstream.coordinator.stopping import until
    from gradstream.data import from_arrays, from_dataset, from_loader, from_stream
    from gradstream.ext import replay
    from gradstream.job.job import Job
    from gradstream.job.phases import Phase
    from gradstream.model import from_functions, from_jax, from_torch
    from gradstream.optim import schedules
    from gradstream.run.result import Run
    from gradstream.runtime import simulation as sim
    from gradstream.runtime.deadlines import Deadlines
    from gradstream.session import Session, join
    from gradstream.strategies import (
        LBFGS,
        SSP,
        AllReduce,
        DiLoCo,
        Downpour,
        ElasticAveraging,
        Hogwild,
        LocalSGD,
        ParameterAveraging,
        Softsync,
        Strategy,
        StreamingDiLoCo,
        Synchronous,
    )

__all__ = [
    "LBFGS",
    "SSP",
    "AllReduce",
    "Deadlines",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Hogwild",
    "Job",
    "LocalSGD",
    "ParameterAveraging",
    "Phase",
    "Run",
    "Session",
    "Softsync",
    "Strategy",
    "StreamingDiLoCo",
    "Synchronous",
    "from_arrays",
    "from_dataset",
    "from_functions",
    "from_jax",
    "from_loader",
    "from_stream",
    "from_torch",
    "join",
    "resume",
    "simulate",
    "train",
    "until",
]

_MODULE_OF = {
    "Deadlines": "runtime.deadlines",
    "Job": "job.job",
    "Phase": "job.phases",
    "Run": "run.result",
    "Session": "session",
    "from_functions": "model",
    "from_jax": "model",
    "from_torch": "model",
    "join": "session",
    "resume": "_resume",
    "simulate": "_simulate",
    "train": "_train",
    "until": "coordinator.stopping",
}
"""The module that defines each name of `__all__`: makers of data sets in `data`, everything else in `strategies`."""

_FACES = {
    "checkpoints": "checkpoints",
    "codecs": "codec",
    "data": "data",
    "errors": "errors",
    "model": "model",
    "optim": "optim",
    "pipeline": "pipeline",
    "replay": "ext.replay",
    "runs": "runs",
    "schedules": "optim.schedules",
    "sim": "runtime.simulation",
    "sparse": "sparse",
    "strategies": "strategies",
    "testing": "testing",
    "trackers": "trackers",
}
"""Public modules, by the short name that users write after `gs.`."""


def __getattr__(name: str) -> Any:
    if name in _FACES:
        value: Any = importlib.import_module(f"gradstream.{_FACES[name]}")
    elif name in __all__:
        module = _MODULE_OF.get(name) or ("data" if name.startswith("from_") else "strategies")
        value = getattr(importlib.import_module(f"gradstream.{module}"), name)
    else:
        raise AttributeError(f"module 'gradstream' has no attribute {name!r}; see gradstream.__all__")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_FACES])
