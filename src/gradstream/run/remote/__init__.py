"""Machines: how others enrol for a run, and how to find out why they cannot."""

__all__ = ()
