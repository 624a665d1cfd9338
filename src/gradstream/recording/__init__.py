"""The recording of a run: the order in which its shards handled events, from which a replay repeats the run."""

from gradstream.recording.entries import (
    Changed,
    Closed,
    Decided,
    Entry,
    FetchAsked,
    Handed,
    Pushed,
    Read,
    Stood,
    Summed,
    Turned,
)
from gradstream.recording.log import FOLDER, JOB_FILE, Log, LogPart, LogReader, read_log
from gradstream.recording.origin import differences, origin_of

__all__ = [
    "FOLDER",
    "JOB_FILE",
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "FetchAsked",
    "Handed",
    "Log",
    "LogPart",
    "LogReader",
    "Pushed",
    "Read",
    "Stood",
    "Summed",
    "Turned",
    "differences",
    "origin_of",
    "read_log",
]
