"""Ranks that combine their vectors without a server: allreduce and its parts."""

from gradstream.collectives.group import Group, GroupMembers, slice_of
from gradstream.collectives.shm.group import SharedGroup

__all__ = ["Group", "GroupMembers", "SharedGroup", "slice_of"]
