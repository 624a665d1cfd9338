"""The nodes of a run as processes of this machine, forked from one warm process."""

from gradstream.cluster.local import LocalCluster
from gradstream.cluster.machine import describe_machine, node_environment

__all__ = ["LocalCluster", "describe_machine", "node_environment"]
