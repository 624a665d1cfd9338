"""Ranks that combine their vectors without a server: allreduce and its parts."""
