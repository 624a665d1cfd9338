"""The recording of a run: the order in which its shards handled events, from which a replay repeats the run."""

from gradstream.recording.entries import (
    Assignment,
    Changed,
    Closed,
    Decided,
    Entry,
    FetchAsked,
    IntervalBegan,
    Paused,
    Pushed,
    Read,
    Summed,
)
from gradstream.recording.log import FOLDER, JOB_FILE, Log, LogPart, LogReader, read_log
from gradstream.recording.origin import differences, origin_of

__all__ = [
    "FOLDER",
    "JOB_FILE",
    "Assignment",
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "FetchAsked",
    "IntervalBegan",
    "Log",
    "LogPart",
    "LogReader",
    "Paused",
    "Pushed",
    "Read",
    "Summed",
    "differences",
    "origin_of",
    "read_log",
]
