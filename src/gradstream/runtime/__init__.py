"""Time, tasks, compute, randomness and storage behind one `Runtime`, real and virtual."""

from gradstream.runtime.base import Progress, Report, Runtime, Storage, Timer, Work
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.simulation import (
    Constant,
    Cost,
    Exponential,
    Link,
    LogNormal,
    Network,
    Partition,
    Spread,
    Trace,
    World,
)
from gradstream.runtime.virtual import DeadlockError, VirtualCluster, VirtualRuntime

__all__ = [
    "Constant",
    "Cost",
    "DeadlockError",
    "Exponential",
    "Link",
    "LogNormal",
    "Network",
    "Partition",
    "Progress",
    "RealRuntime",
    "Report",
    "Runtime",
    "Spread",
    "Storage",
    "Timer",
    "Trace",
    "VirtualCluster",
    "VirtualRuntime",
    "Work",
    "World",
]
