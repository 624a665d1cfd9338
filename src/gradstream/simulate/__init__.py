"""The same nodes inside one process, on virtual time."""

from gradstream.simulate.cluster import Script, SimulatedCluster
from gradstream.simulate.simulate import simulate

__all__ = ["Script", "SimulatedCluster", "simulate"]
