"""A rank of three dies or stops in mid-allreduce by messages, over each carrier, as real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doomed_ranks import Message, check_survivor, forked, survivors
from gradstream.memory.segments import supported
from gradstream.run.local import LocalCluster

RANK = """
import asyncio
from pathlib import Path
import torch
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import GroupMembers
from gradstream.collectives.socket_driver import SocketWriter
from gradstream.collectives.executor import StreamDriver
from gradstream.errors import GradstreamError
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint, make_memory

ELEMS = 3 << 20  # in pieces of 1 MiB: 16 of each rank round a ring, 12 of the last one to whom it pairs with

def rank(argv):
    asyncio.run(live(Path(argv[0]), int(argv[1]), *argv[2:4], int(argv[4]), float(argv[5])))

async def live(folder, number, carrier, how, fatal, silence_s):
    name = NAMES[number]
    runtime = RealRuntime(name, memory=make_memory(carrier, "127.0.0.1:0"))
    endpoint = make_endpoint(Identity(folder.name, name, 1, secret=SECRET), runtime, carrier)
    await endpoint.start()
    (folder / f"{name}.part").write_text(endpoint.address)
    (folder / f"{name}.part").rename(folder / name)
    for other in NAMES:
        while not (folder / other).exists():
            await asyncio.sleep(0.01)
        endpoint.know(other, (folder / other).read_text())
    group = await form_group(runtime, endpoint, GroupMembers(NAMES, number, 1, silence_s), how)
    vector = group.allocate(ELEMS, torch.float32, "gradient")
    sums = []
    try:
        while True:
            sums.append(await allreduce(group, vector, 1 + len(sums)))
            if number == 2 and len(sums) == 1:  # the others may still wait for what it has sent
                doomed(fatal)
    except GradstreamError as error:
        found = named(error)
    carriers = sorted({route for peer, route in endpoint.routes.items() if peer != name})
    await group.close()
    await endpoint.close()
    runtime.close()
    lent = vector.lent
    del group, endpoint, runtime, vector
    say(sums=sums, carriers=carriers, lent=lent, left=still_mapped(), **found)

async def allreduce(group, vector, times):
    fill(vector.tensor, group.rank, times)
    return extent((await group.allreduce(vector.all)).tensor)

def doomed(fatal):
    "This rank comes to a standstill before it sends its `fatal`-th piece from here on."
    pieces = 0
    def counting(send):
        def counted(*given):
            nonlocal pieces
            pieces += 1
            if pieces == fatal:
                here()
            return send(*given)
        return counted
    StreamDriver._frame, SocketWriter.move = counting(StreamDriver._frame), counting(SocketWriter.move)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with forked(tmp_path_factory.mktemp("ranks"), RANK) as cluster:
        yield cluster


def run(
    cluster: LocalCluster,
    folder: Path,
    carrier: str,
    how: str,
    fatal: int,
    *,
    number: int = signal.SIGKILL,
    silence_s: float = 30.0,
) -> list[Message]:
    """The messages of the two survivors, after the third got this signal at its `fatal`-th piece."""
    argv = [[str(folder), str(rank), carrier, how, str(fatal), str(silence_s)] for rank in range(3)]
    said, others = survivors(cluster, argv, number)
    assert not others
    return said


def carriers() -> list[Any]:
    reason = "no sealed shared memory"
    return ["tcp", pytest.param("shm", marks=pytest.mark.skipif(not supported(), reason=reason))]


@pytest.mark.parametrize("carrier", ["grpc", *carriers()])
def test_a_rank_that_is_killed_is_named_and_no_partial_sum_is_returned(
    cluster: LocalCluster, tmp_path: Path, carrier: str
) -> None:
    """At the first piece of an allreduce, late in it (where a ring gathers), and early in the next one."""
    failed_in, how = set(), "butterfly" if carrier == "tcp" else "ring"
    for fatal in (1, 10, 20):
        folder = tmp_path / f"{os.getpid()}-{fatal}"
        folder.mkdir()
        for survivor in run(cluster, folder, carrier, how, fatal):
            check_survivor(survivor, "PeerLostError")
            assert survivor["carriers"] == [carrier]
            assert not survivor["lent"]
            failed_in.add(len(survivor["sums"]))
    assert len(failed_in) > 1  # in different operations


@pytest.mark.parametrize("carrier", carriers())
def test_a_rank_that_is_stopped_is_named_at_the_deadline(
    cluster: LocalCluster, tmp_path: Path, carrier: str
) -> None:
    folder = tmp_path / str(os.getpid())  # names the job, and so the sockets
    folder.mkdir()
    for survivor in run(cluster, folder, carrier, "ring", 3, number=signal.SIGSTOP, silence_s=2.0):
        check_survivor(survivor, "DeadlineError")
