"""Divides a model over the processes of one replica."""

from gradstream.split.plan import DATA, SplitPlan, Stage, Value

__all__ = ["DATA", "SplitPlan", "Stage", "Value"]
