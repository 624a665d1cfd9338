"""What a run leaves behind so that it can be repeated: in which order its shards took what came."""

from gradstream.recording.entries import (
    Asked,
    Changed,
    Closed,
    Decided,
    Entry,
    Handed,
    Pushed,
    Read,
    Stood,
    Summed,
    Turned,
)
from gradstream.recording.log import FOLDER, JOB_FILE, Log, LogReader, Part, read_log
from gradstream.recording.origin import differences, origin_of

__all__ = [
    "FOLDER",
    "JOB_FILE",
    "Asked",
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "Handed",
    "Log",
    "LogReader",
    "Part",
    "Pushed",
    "Read",
    "Stood",
    "Summed",
    "Turned",
    "differences",
    "origin_of",
    "read_log",
]
