"""Three ranks as real processes, of which the last one dies or stops: what the two survivors say."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment

WAIT_S = 60.0
VICTIM = "rank-2"

Message = dict[str, Any]

WORDS = """
import gc, json, os, signal

NAMES = ["rank-0", "rank-1", "rank-2"]

def say(**message):
    os.write(3, json.dumps(message).encode() + b"\\n")

def here(*_):
    "Where this rank gets its signal."
    say(at="here", pid=os.getpid())
    while True:
        signal.pause()

def named(error):
    return dict(error=type(error).__name__, peer=getattr(error, "peer", ""), text=str(error))

def fill(tensor, rank, times):
    "Other numbers each time: what is left of an earlier sum is no sum."
    tensor.fill_(times * (rank + 1))

def extent(tensor):
    return [float(tensor.min()), float(tensor.max())]

def still_mapped():
    "What this process maps of shared memory."
    gc.collect()
    return [line for line in open("/proc/self/maps") if "memfd:gradstream" in line]
"""
"""What the code of a rank can use. It ends with `say(sums=..., left=still_mapped(), **named(error))`."""


@contextmanager
def forked(folder: Path, code: str) -> Iterator[LocalCluster]:
    """Forks ranks from one warm process. Their code has a function `rank(argv)`, and may use `WORDS`."""
    (folder / "a_rank.py").write_text(WORDS + code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        with LocalCluster(folder / "logs", node_environment(workers=3)) as cluster:
            yield cluster


def survivors(
    cluster: LocalCluster,
    argv: Sequence[Sequence[str]],
    number: int = signal.SIGKILL,
    main: str = "a_rank:rank",
) -> tuple[list[Message], list[Message]]:
    """What the two survivors say, and what else ranks say. The victim gets this signal where it is `here`."""
    for rank, arguments in enumerate(argv):
        cluster.start(f"rank-{rank}", arguments, main=main)
    said: dict[str, Message] = {}
    others: list[Message] = []
    running = len(argv)
    while running:
        message = cluster.message(WAIT_S)
        assert message is not None, f"nothing more is heard; so far {said}"
        if message.get("at") == "here":
            os.kill(message["pid"], number)
        elif "sums" in message:
            said[message["from"]] = message
            if number == signal.SIGSTOP and len(said) == 2:
                cluster.signal(VICTIM, signal.SIGKILL)
        elif "exited" in message:
            running -= 1
            if message["exited"] != VICTIM:
                assert message["status"] == 0, cluster.log_tail(message["exited"])
        elif "from" in message:
            others.append(message)
    return [said["rank-0"], said["rank-1"]], others


def whole(count: int) -> list[list[float]]:
    """The least and the greatest element of each of so many sums of what ranks `fill` in."""
    return [[times * (1 + 2 + 3.0)] * 2 for times in range(1, count + 1)]


def check_survivor(said: Message, error: str) -> None:
    """It names the victim, was given no partial sum, and has let go of all memory that was shared."""
    assert (said["error"], said["peer"]) == (error, VICTIM), said
    assert said["sums"] == whole(len(said["sums"])), said
    assert not said["left"], f"shared memory is still mapped: {said['left']}"
