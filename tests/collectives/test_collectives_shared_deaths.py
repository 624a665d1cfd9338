"""A rank of three dies or stops in each phase of an allreduce, as real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from doomed_ranks import VICTIM, Message, check_survivor, forked, survivors, whole
from gradstream.collectives.shm.rendezvous import available
from gradstream.run.local import LocalCluster

pytestmark = pytest.mark.skipif(not available(), reason="no sealed shared memory, or not x86-64")

RANK = """
import asyncio
import torch
from gradstream.collectives.shm.group import SharedGroup
from gradstream.collectives.shm.group import SharedCore
from gradstream.collectives.shm.native import LOOKS, LOOKS_NS
from gradstream.collectives.shm.rendezvous import RendezvousMembers
from gradstream.collectives.shm.barrier import finish
from gradstream.collectives.shm.operations import WeightedSum
from gradstream.errors import GradstreamError
from gradstream.runtime import RealRuntime

ELEMS = 100_000

def rank(argv):
    job, number, phase, deadline_s = argv[0], int(argv[1]), argv[2], float(argv[3])
    victim = number == 2
    members = RendezvousMembers(job, NAMES, number)
    with SharedCore(members, deadline_s=deadline_s) as core:
        gradient = core.allocate(1000 if phase == "small" else ELEMS, torch.float32, "gradient")
        sums = [allreduce(core, gradient, 1)]
        if victim and phase == "with a child":
            told, tell = os.pipe()
            if os.fork() == 0:
                child(core, gradient, tell)
            os.read(told, 1)
        if victim and phase in ("before", "small", "with a child"):
            here()
        if victim and phase == "between halves":
            core.all_gather = lambda span: here()
        if victim and phase == "between":
            WeightedSum.__call__ = here
        if not victim and phase == "careless":
            careless(core)
        if victim and phase == "careless":
            WeightedSum.__call__ = here
        try:
            sums.append(allreduce(core, gradient, 2, halves=phase == "between halves"))
            if victim:
                here()
            sums.append(allreduce(core, gradient, 3))
        except GradstreamError as error:
            found = named(error)
    del gradient, core
    say(sums=sums, left=still_mapped(), **found)

def looking(argv):
    "The victim ends while the others look for it, on their loops."
    members = RendezvousMembers(argv[0], NAMES, int(argv[1]))
    found = asyncio.run(beside_a_loop(members, int(argv[2]), float(argv[3])))
    say(left=still_mapped(), **found)

async def beside_a_loop(members, elems, deadline_s):
    runtime = RealRuntime(members.me)
    group = await SharedGroup.join(runtime, members, deadline_s=deadline_s)
    gradient, sums = group.allocate(elems, torch.float32, "gradient"), []
    for times in (1, 2):
        if times == 2:
            if members.rank == 2:
                here()
            words = group._core._operations.state.words
            words[LOOKS], words[LOOKS_NS] = 1 << 40, 500_000_000
        fill(gradient.tensor, members.rank, times)
        try:
            sums.append(extent((await group.allreduce(gradient.all)).tensor))
        except GradstreamError as error:
            found = named(error)
    await group.close()
    runtime.close()
    group._thread.shutdown()  # it may be about to let go of what it has done
    return dict(sums=sums, **found)

def allreduce(core, gradient, times, halves=False):
    fill(gradient.tensor, core.rank, times)
    if halves:
        finish(core.reduce_scatter(gradient.all))
        finish(core.all_gather(gradient.all))
    return extent(gradient.tensor if halves else finish(core.allreduce(gradient.all)).tensor)

def child(core, gradient, tell):
    try:
        allreduce(core, gradient, 2)
    except GradstreamError as error:
        say(child=str(error), pid=os.getpid())
    os.write(tell, b".")
    while True:  # holds what it has inherited
        signal.pause()

def careless(core):
    "A planted fault: the second barrier is left out."
    wait, calls = core._operations.barrier.wait, []
    def first_only(doing, **_):
        calls.append(doing)
        if len(calls) % 2:
            yield from wait(doing)
    core._operations.barrier.wait = first_only
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with forked(tmp_path_factory.mktemp("ranks"), RANK) as cluster:
        yield cluster


def run(
    cluster: LocalCluster, phase: str, number: int = signal.SIGKILL, deadline_s: float = 30.0
) -> tuple[list[Message], list[str]]:
    """The messages of the two survivors, and of the children of the victim."""
    job = f"{os.getpid()}-{phase}-{number}".replace(" ", "-")
    said, others = survivors(cluster, [[job, str(rank), phase, str(deadline_s)] for rank in range(3)], number)
    for child in others:
        os.kill(child["pid"], signal.SIGKILL)
    return said, [child["child"] for child in others]


@pytest.mark.parametrize("phase", ["before", "small", "between", "between halves", "after"])
def test_a_rank_that_is_killed_is_named_and_no_partial_sum_is_returned(
    cluster: LocalCluster, phase: str
) -> None:
    said, _ = run(cluster, phase)
    for survivor in said:
        check_survivor(survivor, "PeerLostError")
        assert len(survivor["sums"]) == (2 if phase == "after" else 1)
        assert "its process ended" in survivor["text"]


@pytest.mark.parametrize("elems", [1000, 100_000])
def test_a_rank_that_is_killed_while_others_look_for_it_is_named(cluster: LocalCluster, elems: int) -> None:
    job = f"{os.getpid()}-looking-{elems}"
    argv = [[job, str(rank), str(elems), "30"] for rank in range(3)]
    said, _ = survivors(cluster, argv, main="a_rank:looking")
    for survivor in said:
        check_survivor(survivor, "PeerLostError")
        assert len(survivor["sums"]) == 1


def test_a_rank_that_is_stopped_is_named_at_the_deadline(cluster: LocalCluster) -> None:
    said, _ = run(cluster, "between", signal.SIGSTOP, deadline_s=1.0)
    for survivor in said:
        check_survivor(survivor, "DeadlineError")
        assert len(survivor["sums"]) == 1


def test_a_child_of_a_rank_does_not_make_it_seem_alive(cluster: LocalCluster) -> None:
    said, children = run(cluster, "with a child")
    assert [survivor["peer"] for survivor in said] == [VICTIM] * 2
    assert len(children) == 1 and "forked" in children[0]


def test_a_barrier_left_out_would_be_noticed(cluster: LocalCluster) -> None:
    said, _ = run(cluster, "careless")
    assert any(one["sums"] != whole(len(one["sums"])) for one in said), "a partial sum was returned"
