"""One algorithm, one file, readable beside the paper's pseudo-code.

Each name is imported at its first use: a run without servers imports nothing of `gradstream.server`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstream.strategies.allreduce import AllReduce
    from gradstream.strategies.api import GroupWorker, PeerWorker, ServerWorker, SharedMemoryWorker, Worker
    from gradstream.strategies.async_diloco import AsyncDiLoCo
    from gradstream.strategies.asysg import AsySG
    from gradstream.strategies.averaging import ParameterAveraging
    from gradstream.strategies.base import (
        GroupStrategy,
        PeerStrategy,
        ServerStrategy,
        SharedMemoryStrategy,
        Strategy,
    )
    from gradstream.strategies.batch import BatchMethod
    from gradstream.strategies.conjugate_gradient import ConjugateGradient
    from gradstream.strategies.dc_asgd import DCASGD
    from gradstream.strategies.diloco import DiLoCo
    from gradstream.strategies.downpour import Downpour, StagedStrategy
    from gradstream.strategies.elastic import EAMSGD, ElasticAveraging
    from gradstream.strategies.gossip import Gossip
    from gradstream.strategies.gradient_descent import GradientDescent
    from gradstream.strategies.hogwild import Hogwild
    from gradstream.strategies.lbfgs import LBFGS
    from gradstream.strategies.local_sgd import LocalSGD
    from gradstream.strategies.noloco import NoLoCo
    from gradstream.strategies.push_sum import PushSum
    from gradstream.strategies.softsync import Softsync
    from gradstream.strategies.ssp import SSP
    from gradstream.strategies.staleness_aware import StalenessAware
    from gradstream.strategies.streaming_diloco import StreamingDiLoCo
    from gradstream.strategies.synchronous import Synchronous

__all__ = [
    "DCASGD",
    "EAMSGD",
    "LBFGS",
    "SSP",
    "AllReduce",
    "AsySG",
    "AsyncDiLoCo",
    "BatchMethod",
    "ConjugateGradient",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Gossip",
    "GradientDescent",
    "GroupStrategy",
    "GroupWorker",
    "Hogwild",
    "LocalSGD",
    "NoLoCo",
    "ParameterAveraging",
    "PeerStrategy",
    "PeerWorker",
    "PushSum",
    "ServerStrategy",
    "ServerWorker",
    "SharedMemoryStrategy",
    "SharedMemoryWorker",
    "Softsync",
    "StagedStrategy",
    "StalenessAware",
    "Strategy",
    "StreamingDiLoCo",
    "Synchronous",
    "Worker",
]

_MODULE_OF = {
    "DCASGD": "dc_asgd",
    "EAMSGD": "elastic",
    "LBFGS": "lbfgs",
    "SSP": "ssp",
    "AllReduce": "allreduce",
    "AsySG": "asysg",
    "AsyncDiLoCo": "async_diloco",
    "BatchMethod": "batch",
    "ConjugateGradient": "conjugate_gradient",
    "DiLoCo": "diloco",
    "LocalSGD": "local_sgd",
    "Downpour": "downpour",
    "ElasticAveraging": "elastic",
    "Gossip": "gossip",
    "GradientDescent": "gradient_descent",
    "GroupStrategy": "base",
    "GroupWorker": "api",
    "Hogwild": "hogwild",
    "NoLoCo": "noloco",
    "ParameterAveraging": "averaging",
    "PeerStrategy": "base",
    "PeerWorker": "api",
    "PushSum": "push_sum",
    "ServerStrategy": "base",
    "ServerWorker": "api",
    "SharedMemoryStrategy": "base",
    "SharedMemoryWorker": "api",
    "Softsync": "softsync",
    "StagedStrategy": "downpour",
    "StalenessAware": "staleness_aware",
    "Strategy": "base",
    "StreamingDiLoCo": "streaming_diloco",
    "Synchronous": "synchronous",
    "Worker": "api",
}
"""The module of this package that defines a name of `__all__`."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradstream.strategies' has no attribute {name!r}; see its __all__")
    value = globals()[name] = getattr(
        importlib.import_module(f"gradstream.strategies.{_MODULE_OF[name]}"), name
    )
    return value
