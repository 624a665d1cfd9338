"""One algorithm, one file, readable beside the paper's pseudo-code. `BUILT_IN` is the registry of all of them.

Each name is imported at its first use: a run without servers imports nothing of `gradstream.server`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstream.strategies.allreduce import AllReduce as AllReduce
    from gradstream.strategies.api import GroupWorker as GroupWorker
    from gradstream.strategies.api import PeerWorker as PeerWorker
    from gradstream.strategies.api import ServerWorker as ServerWorker
    from gradstream.strategies.api import SharedMemoryWorker as SharedMemoryWorker
    from gradstream.strategies.api import Worker as Worker
    from gradstream.strategies.async_diloco import AsyncDiLoCo as AsyncDiLoCo
    from gradstream.strategies.asysg import AsySG as AsySG
    from gradstream.strategies.averaging import ParameterAveraging as ParameterAveraging
    from gradstream.strategies.base import GroupStrategy as GroupStrategy
    from gradstream.strategies.base import PeerStrategy as PeerStrategy
    from gradstream.strategies.base import ServerStrategy as ServerStrategy
    from gradstream.strategies.base import SharedMemoryStrategy as SharedMemoryStrategy
    from gradstream.strategies.base import Strategy as Strategy
    from gradstream.strategies.batch import BatchMethod as BatchMethod
    from gradstream.strategies.conjugate_gradient import ConjugateGradient as ConjugateGradient
    from gradstream.strategies.dc_asgd import DCASGD as DCASGD
    from gradstream.strategies.diloco import DiLoCo as DiLoCo
    from gradstream.strategies.downpour import AsynchronousStrategy as AsynchronousStrategy
    from gradstream.strategies.downpour import Downpour as Downpour
    from gradstream.strategies.elastic import EAMSGD as EAMSGD
    from gradstream.strategies.elastic import ElasticAveraging as ElasticAveraging
    from gradstream.strategies.gossip import Gossip as Gossip
    from gradstream.strategies.gradient_descent import GradientDescent as GradientDescent
    from gradstream.strategies.hogwild import Hogwild as Hogwild
    from gradstream.strategies.lbfgs import LBFGS as LBFGS
    from gradstream.strategies.local_sgd import LocalSGD as LocalSGD
    from gradstream.strategies.noloco import NoLoCo as NoLoCo
    from gradstream.strategies.push_sum import PushSum as PushSum
    from gradstream.strategies.softsync import Softsync as Softsync
    from gradstream.strategies.ssp import SSP as SSP
    from gradstream.strategies.staleness_aware import StalenessAware as StalenessAware
    from gradstream.strategies.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
    from gradstream.strategies.synchronous import Synchronous as Synchronous

BUILT_IN = {
    "synchronous": "synchronous:Synchronous",
    "allreduce": "allreduce:AllReduce",
    "downpour": "downpour:Downpour",
    "asysg": "asysg:AsySG",
    "softsync": "softsync:Softsync",
    "staleness-aware": "staleness_aware:StalenessAware",
    "dc-asgd": "dc_asgd:DCASGD",
    "ssp": "ssp:SSP",
    "elastic-averaging": "elastic:ElasticAveraging",
    "eamsgd": "elastic:EAMSGD",
    "parameter-averaging": "averaging:ParameterAveraging",
    "diloco": "diloco:DiLoCo",
    "async-diloco": "async_diloco:AsyncDiLoCo",
    "streaming-diloco": "streaming_diloco:StreamingDiLoCo",
    "local-sgd": "local_sgd:LocalSGD",
    "gossip": "gossip:Gossip",
    "push-sum": "push_sum:PushSum",
    "noloco": "noloco:NoLoCo",
    "lbfgs": "lbfgs:LBFGS",
    "conjugate-gradient": "conjugate_gradient:ConjugateGradient",
    "gradient-descent": "gradient_descent:GradientDescent",
    "hogwild": "hogwild:Hogwild",
}
"""By name, the module of this package and the class in it. A new strategy is a line here, and one above for editors.

Tables have them in this order."""

_BASES = {
    "api": ("GroupWorker", "PeerWorker", "ServerWorker", "SharedMemoryWorker", "Worker"),
    "base": ("GroupStrategy", "PeerStrategy", "ServerStrategy", "SharedMemoryStrategy", "Strategy"),
    "batch": ("BatchMethod",),
    "downpour": ("AsynchronousStrategy",),
}
_MODULE_OF = {name: module for module, names in _BASES.items() for name in names} | {
    name: module for module, _, name in (place.partition(":") for place in BUILT_IN.values())
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradstream.strategies' has no attribute {name!r}; see its __all__")
    value = globals()[name] = getattr(
        importlib.import_module(f"gradstream.strategies.{_MODULE_OF[name]}"), name
    )
    return value
