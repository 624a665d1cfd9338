"""The nodes of a run on this machine: processes forked from one warm process, or threads of this one."""

from gradstream.run.local.cluster import NODE, SCRIPT, Cluster, LocalCluster, ThreadCluster

__all__ = ["NODE", "SCRIPT", "Cluster", "LocalCluster", "ThreadCluster"]
