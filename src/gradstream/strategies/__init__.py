"""One algorithm, one file, readable beside the paper's pseudo-code."""

from gradstream.strategies.allreduce import AllReduce
from gradstream.strategies.base import Strategy, Worker
from gradstream.strategies.downpour import Downpour
from gradstream.strategies.synchronous import Synchronous

__all__ = ["AllReduce", "Downpour", "Strategy", "Synchronous", "Worker"]
