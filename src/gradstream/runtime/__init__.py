"""Time, tasks, compute, randomness and storage behind one `Runtime`, real and virtual."""

from gradstream.runtime.base import ComputeProgress, Report, Runtime, Storage, Timer, Work
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.simulation import (
    Cost,
    Exponential,
    Jitter,
    Link,
    LogNormal,
    Network,
    NoJitter,
    Partition,
    SimulationConfig,
    Trace,
)
from gradstream.runtime.virtual import DeadlockError, VirtualCluster, VirtualRuntime

__all__ = [
    "ComputeProgress",
    "Cost",
    "DeadlockError",
    "Exponential",
    "Jitter",
    "Link",
    "LogNormal",
    "Network",
    "NoJitter",
    "Partition",
    "RealRuntime",
    "Report",
    "Runtime",
    "SimulationConfig",
    "Storage",
    "Timer",
    "Trace",
    "VirtualCluster",
    "VirtualRuntime",
    "Work",
]
