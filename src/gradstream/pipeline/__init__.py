"""Pipelines: the order in which the parts of a split model compute, as data; its executor; parts that train apart."""

from gradstream.pipeline.executor import PipelineExecutor, Stages, TensorChannel, TensorTransfer
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import (
    FLUSHING,
    SCHEDULES,
    STREAMING,
    Schedule,
    StagePass,
    endless_schedule,
    make_schedule,
)
from gradstream.pipeline.synthetic import SyntheticGradients

__all__ = [
    "FLUSHING",
    "SCHEDULES",
    "STREAMING",
    "Hybrid",
    "PipelineExecutor",
    "Schedule",
    "StagePass",
    "Stages",
    "SyntheticGradients",
    "TensorChannel",
    "TensorTransfer",
    "endless_schedule",
    "make_schedule",
]
