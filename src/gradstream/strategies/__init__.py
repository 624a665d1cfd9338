"""One algorithm, one file, readable beside the paper's pseudo-code."""

from gradstream.strategies.base import Strategy, Worker
from gradstream.strategies.downpour import Downpour
from gradstream.strategies.synchronous import Synchronous

__all__ = ["Downpour", "Strategy", "Synchronous", "Worker"]
