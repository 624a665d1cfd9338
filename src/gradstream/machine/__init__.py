"""This machine: what it is, what is free on it, and whether it can train. Imports nothing that is slow to load."""

__all__ = ()
