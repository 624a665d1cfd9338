"""Ranks that combine their vectors without a server: allreduce and its parts."""

from gradstream.collectives.group import Group, slice_of
from gradstream.collectives.shm.group import SharedGroup

__all__ = ["Group", "SharedGroup", "slice_of"]
