"""The nodes of a run on this machine: processes forked from one warm process, or threads of this one."""

from gradstream.cluster.local import NODE, SCRIPT, LocalCluster
from gradstream.cluster.machine import describe_machine, node_environment
from gradstream.cluster.threads import Cluster, ThreadCluster

__all__ = [
    "NODE",
    "SCRIPT",
    "Cluster",
    "LocalCluster",
    "ThreadCluster",
    "describe_machine",
    "node_environment",
]
