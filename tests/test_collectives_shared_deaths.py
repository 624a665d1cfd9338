"""A rank of three dies or stops in each phase of an allreduce, as real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gradstream.cluster import LocalCluster
from gradstream.cluster.machine import node_environment
from gradstream.collectives.shared_board import available

pytestmark = pytest.mark.skipif(not available(), reason="no sealed shared memory, or not x86-64")

WAIT_S = 60.0
VICTIM = "rank-2"

RANKS = """
import gc, json, os, signal
import torch
from gradstream.collectives import shared_core
from gradstream.collectives.shared_core import SharedCore
from gradstream.collectives.shared_meeting import Party
from gradstream.errors import GradstreamError

ELEMS = 100_000

def say(**message):
    os.write(3, json.dumps(message).encode() + b"\\n")

def here(*_):
    say(at="here", pid=os.getpid())
    while True:
        signal.pause()

def rank(argv):
    job, number, phase, deadline_s = argv[0], int(argv[1]), argv[2], float(argv[3])
    victim = number == 2
    party = Party(job, ["rank-0", "rank-1", "rank-2"], number)
    with SharedCore(party, deadline_s=deadline_s) as core:
        gradient = core.allocate(1000 if phase == "small" else ELEMS, torch.float32, "gradient")
        sums = [allreduce(core, gradient)]
        if victim and phase == "with a child":
            told, tell = os.pipe()
            if os.fork() == 0:
                child(core, gradient, tell)
            os.read(told, 1)
        if victim and phase in ("before", "small", "with a child"):
            here()
        if victim and phase == "between halves":
            core.all_gather_ = here
        if victim and phase == "between":
            shared_core.weighted_sum = here
        if not victim and phase == "careless":
            careless(core)
        if victim and phase == "careless":
            shared_core.weighted_sum = here
        try:
            sums.append(allreduce(core, gradient, halves=phase == "between halves"))
            if victim:
                here()
            sums.append(allreduce(core, gradient))
        except GradstreamError as error:
            found = dict(error=type(error).__name__, peer=getattr(error, "peer", ""), text=str(error))
    del gradient, core
    gc.collect()
    left = "memfd:gradstream" in open("/proc/self/maps").read()
    say(sums=sums, left=left, **found)

def allreduce(core, gradient, halves=False):
    gradient.tensor.fill_(core.rank + 1)
    if halves:
        core.reduce_scatter_(gradient.all)
        core.all_gather_(gradient.all)
    result = gradient.tensor if halves else core.allreduce_(gradient.all).tensor
    return [float(result.min()), float(result.max())]

def child(core, gradient, tell):
    try:
        allreduce(core, gradient)
    except GradstreamError as error:
        say(child=str(error), pid=os.getpid())
    os.write(tell, b".")
    while True:  # holds what it has inherited
        signal.pause()

def careless(core):
    "A planted fault: the second barrier is left out."
    wait, calls = core._barrier.wait, []
    def first_only(doing):
        calls.append(doing)
        if len(calls) % 2:
            wait(doing)
    core._barrier.wait = first_only
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Forks ranks from one warm process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranks_of_a_host.py").write_text(RANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        with LocalCluster(folder / "logs", node_environment(workers=3)) as cluster:
            yield cluster


def run(
    cluster: LocalCluster, phase: str, number: int = signal.SIGKILL, deadline_s: float = 30.0
) -> tuple[list[dict[str, Any]], list[str]]:
    """What the two survivors say, and the children of the victim."""
    job = f"{os.getpid()}-{phase}-{number}".replace(" ", "-")
    for rank in range(3):
        argv = [job, str(rank), phase, str(deadline_s)]
        cluster.start(f"rank-{rank}", argv, main="ranks_of_a_host:rank")
    said: dict[str, dict[str, Any]] = {}
    children: list[str] = []
    pids: list[int] = []
    running = 3
    while running:
        message = cluster.message(WAIT_S)
        assert message is not None, f"nothing more is heard; so far {said}"
        if message.get("at") == "here":
            os.kill(message["pid"], number)
        elif "child" in message:
            children.append(message["child"])
            pids.append(message["pid"])
        elif "sums" in message:
            said[message["from"]] = message
            if number == signal.SIGSTOP and len(said) == 2:
                cluster.signal(VICTIM, signal.SIGKILL)
        elif "exited" in message:
            running -= 1
            if message["exited"] != VICTIM:
                assert message["status"] == 0, cluster.log_tail(message["exited"])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return [said["rank-0"], said["rank-1"]], children


@pytest.mark.parametrize("phase", ["before", "small", "between", "between halves", "after"])
def test_a_rank_that_is_killed_is_named_and_no_partial_sum_is_returned(
    cluster: LocalCluster, phase: str
) -> None:
    survivors, _ = run(cluster, phase)
    for survivor in survivors:
        assert (survivor["error"], survivor["peer"]) == ("PeerLostError", VICTIM), survivor
        assert survivor["sums"] == [[6.0, 6.0]] * (2 if phase == "after" else 1)
        assert not survivor["left"], "shared memory is still mapped"
        assert "its process ended" in survivor["text"]


def test_a_rank_that_is_stopped_is_named_at_the_deadline(cluster: LocalCluster) -> None:
    survivors, _ = run(cluster, "between", signal.SIGSTOP, deadline_s=1.0)
    for survivor in survivors:
        assert (survivor["error"], survivor["peer"]) == ("DeadlineError", VICTIM), survivor
        assert survivor["sums"] == [[6.0, 6.0]]
        assert not survivor["left"]


def test_a_child_of_a_rank_does_not_make_it_seem_alive(cluster: LocalCluster) -> None:
    survivors, children = run(cluster, "with a child")
    assert [survivor["peer"] for survivor in survivors] == [VICTIM] * 2
    assert len(children) == 1 and "forked" in children[0]


def test_a_barrier_left_out_would_be_noticed(cluster: LocalCluster) -> None:
    survivors, _ = run(cluster, "careless")
    assert any(survivor["sums"] != [[6.0, 6.0]] for survivor in survivors), "a partial sum was returned"
