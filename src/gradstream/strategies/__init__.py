"""One algorithm, one file, readable beside the paper's pseudo-code."""

from gradstream.strategies.allreduce import AllReduce
from gradstream.strategies.api import GroupWorker, ServerWorker, SharedMemoryWorker, Worker
from gradstream.strategies.asysg import AsySG
from gradstream.strategies.averaging import ParameterAveraging
from gradstream.strategies.base import GroupStrategy, ServerStrategy, SharedMemoryStrategy, Strategy
from gradstream.strategies.dc_asgd import DCASGD
from gradstream.strategies.diloco import DiLoCo
from gradstream.strategies.downpour import Downpour
from gradstream.strategies.elastic import EAMSGD, ElasticAveraging
from gradstream.strategies.hogwild import Hogwild
from gradstream.strategies.softsync import Softsync
from gradstream.strategies.ssp import SSP
from gradstream.strategies.staged import StagedStrategy
from gradstream.strategies.staleness_aware import StalenessAware
from gradstream.strategies.synchronous import Synchronous

__all__ = [
    "DCASGD",
    "EAMSGD",
    "SSP",
    "AllReduce",
    "AsySG",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "GroupStrategy",
    "GroupWorker",
    "Hogwild",
    "ParameterAveraging",
    "ServerStrategy",
    "ServerWorker",
    "SharedMemoryStrategy",
    "SharedMemoryWorker",
    "Softsync",
    "StagedStrategy",
    "StalenessAware",
    "Strategy",
    "Synchronous",
    "Worker",
]
