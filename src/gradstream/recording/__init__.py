"""The recording of a run: the order in which its shards handled events, from which a replay repeats the run."""

from gradstream.recording.entries import (
    BatchesAssigned,
    Changed,
    Closed,
    Decided,
    Entry,
    FetchAsked,
    Pushed,
    Read,
    SnapshotReached,
    Summed,
)
from gradstream.recording.log import (
    FOLDER,
    JOB_FILE,
    Log,
    LogPart,
    LogReader,
    differences,
    origin_of,
    read_log,
)

__all__ = [
    "FOLDER",
    "JOB_FILE",
    "BatchesAssigned",
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "FetchAsked",
    "Log",
    "LogPart",
    "LogReader",
    "Pushed",
    "Read",
    "SnapshotReached",
    "Summed",
    "differences",
    "origin_of",
    "read_log",
]
