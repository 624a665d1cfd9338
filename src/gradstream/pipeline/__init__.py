"""Pipelines: the order in which the parts of a split model compute, as data, and its executor."""

from gradstream.pipeline.executor import Stages, TensorChannel, TensorTransfer, run_schedule
from gradstream.pipeline.schedule import FLUSHING, SCHEDULES, Schedule, StagePass, make_schedule

__all__ = [
    "FLUSHING",
    "SCHEDULES",
    "Schedule",
    "StagePass",
    "Stages",
    "TensorChannel",
    "TensorTransfer",
    "make_schedule",
    "run_schedule",
]
