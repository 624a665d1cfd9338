"""One rank of a team of `bench/allreduce.py`: it does what that asks for over a socket, and says how long.

    python bench/allreduce_rank.py SOCKET gradstream|gloo|mpi [RANK SIZE]

Of the peers' environments it needs numpy and mpi4py alone, so it imports what it needs where it needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")  # OpenMPI; MPICH and Intel MPI

Call = Callable[[], None]


class Gloo:
    """`torch.distributed`, in this rank's own memory."""

    def __init__(self, meet: str, rank: int, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.rank, self.size = rank, size
        self._torch = torch
        store = torch.distributed.FileStore(f"{meet}/gloo", size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self._vectors: dict[int, Any] = {}

    async def timed(self, way: str, elems: int, repeats: int) -> float:
        """Seconds of one call, of several in a row; `way` is "call"."""
        distributed = self._torch.distributed
        own = self._vectors.setdefault(elems, self._torch.empty(elems))
        own.fill_(self.rank + 1.0)
        distributed.all_reduce(own)
        check(own, self.size)
        return in_a_row(distributed.barrier, lambda: distributed.all_reduce(own), repeats)

    async def close(self) -> None:
        """Ends the team."""
        self._torch.distributed.destroy_process_group()


class Mpi:
    """Any MPI, through mpi4py, in place."""

    def __init__(self) -> None:
        import numpy
        from mpi4py import MPI

        self._numpy, self._mpi, self._world = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self._vectors: dict[int, Any] = {}

    async def timed(self, way: str, elems: int, repeats: int) -> float:
        """See `Gloo.timed`."""
        if elems not in self._vectors:
            self._vectors[elems] = self._numpy.empty(elems, dtype=self._numpy.float32)
        own = self._vectors[elems]
        own.fill(self.rank + 1.0)
        self._world.Allreduce(self._mpi.IN_PLACE, own)
        check(own, self.size)
        return in_a_row(self._world.Barrier, lambda: self._world.Allreduce(self._mpi.IN_PLACE, own), repeats)

    async def close(self) -> None:
        """See `Gloo.close`."""


class Gradstream:
    """The group that a strategy is given on one host; its core, which blocks; and the bound."""

    def __init__(self, meet: str, rank: int, size: int) -> None:
        import torch

        from gradstream.collectives.shm.group import SharedGroup
        from gradstream.collectives.shm.rendezvous import RendezvousMembers
        from gradstream.run.local.environment import SWITCH_INTERVAL_S
        from gradstream.runtime.real import RealRuntime

        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.rank, self.size = rank, size
        self._torch, self._group = torch, SharedGroup
        self._members = RendezvousMembers(
            f"bench-{Path(meet).name}", [f"rank-{r}" for r in range(size)], rank
        )
        self._runtime = RealRuntime(f"rank-{rank}")
        self._vectors: dict[int, Any] = {}

    async def timed(self, way: str, elems: int, repeats: int) -> float:
        """Seconds of one "call" of a strategy, of the "core", or of a bound: to "read" only, to "move" only.

        With "waits": share of a core.
        """
        if isinstance(self._group, type):
            self._group = await self._group.join(self._runtime, self._members, deadline_s=120)
        group, core = self._group, self._group._core
        if way == "waits":
            return share_of_core(core, elems)
        if elems not in self._vectors:
            own = group.allocate(elems, self._torch.float32, f"gradient of {elems}")
            parts = [await group.common(elems, own.tensor.dtype, f"{r} of {elems}") for r in range(self.size)]
            parts[self.rank].tensor.fill_(1.0)
            self._vectors[elems] = own, parts
        own, parts = self._vectors[elems]
        from gradstream.collectives.shm.barrier import finish

        if way == "read":
            return in_a_row(lambda: finish(core.barrier()), self._only_read(parts, elems), repeats)
        own.tensor.fill_(self.rank + 1.0)
        total = (await group.allreduce(own.all)).tensor
        check(total, self.size)
        if way == "move":
            return in_a_row(lambda: finish(core.barrier()), self._only_move(parts, total), repeats)
        if way == "core":
            return in_a_row(lambda: finish(core.barrier()), lambda: finish(core.allreduce(own.all)), repeats)
        for _ in range(cold(repeats)):
            await group.allreduce(own.all)
        await group.barrier()
        begun = time.perf_counter()
        for _ in range(repeats):
            await group.allreduce(own.all)
        seconds = (time.perf_counter() - begun) / repeats
        await group.barrier()
        return seconds

    def _only_read(self, parts: list[Any], elems: int) -> Call:
        """This rank's part of the vectors of all, two at a time; and the barriers of an allreduce."""
        from gradstream.collectives.group import slice_of
        from gradstream.collectives.shm.barrier import finish

        start, stop = slice_of(elems, self.rank, self.size)
        mine, core = [part.tensor[start:stop] for part in parts], self._group._core

        def read() -> None:
            finish(core.barrier())
            for one, other in zip(mine[::2], mine[1::2], strict=True):
                self._torch.dot(one, other)
            finish(core.barrier())

        return read

    def _only_move(self, parts: list[Any], total: Any) -> Call:
        """As `_only_read`, but the first rank's part is copied to where the sum lies, as the C library copies."""
        from gradstream.collectives.group import slice_of
        from gradstream.collectives.shm.barrier import finish

        start, stop = slice_of(len(total), self.rank, self.size)
        first, *others = [part.tensor[start:stop] for part in parts]
        out, core = total[start:stop], self._group._core
        copied = out.data_ptr(), first.data_ptr(), out.nbytes

        def move() -> None:
            finish(core.barrier())
            ctypes.memmove(*copied)
            for one, other in zip_longest(others[::2], others[1::2]):
                self._torch.dot(one, one if other is None else other)
            finish(core.barrier())

        return move

    async def close(self) -> None:
        """See `Gloo.close`."""
        await self._group.close()
        self._runtime.close()


def share_of_core(core: Any, wait_s: float) -> float:
    """CPU seconds per second of a rank that waits for the last one, which comes late."""
    from gradstream.collectives.shm.barrier import finish

    finish(core.barrier())
    if core.rank == core.size - 1:
        time.sleep(wait_s)
    begun_s = time.process_time()
    finish(core.barrier())
    return (time.process_time() - begun_s) / wait_s


def in_a_row(barrier: Call, call: Any, repeats: int) -> float:
    """Seconds of one call, of several in a row."""
    for _ in range(cold(repeats)):
        call()
    barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - begun) / repeats
    barrier()
    return seconds


def cold(repeats: int) -> int:
    """How many calls before them do not count."""
    return max(1, repeats // 4)


def check(total: Any, size: int) -> None:
    """The sum of what ranks fill in."""
    assert (total == size * (size + 1) / 2).all(), "a wrong sum"


async def serve(path: str, team: str, rank: int, size: int) -> None:
    """Until the bench hangs up."""
    meet = str(Path(path).parent)
    member: Gloo | Mpi | Gradstream = (
        Mpi() if team == "mpi" else (Gloo if team == "gloo" else Gradstream)(meet, rank, size)
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw")
        print(json.dumps(member.rank), file=lines, flush=True)
        for line in lines:
            print(json.dumps(await member.timed(*json.loads(line))), file=lines, flush=True)
    await member.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("socket", metavar="SOCKET")
    parser.add_argument("team", choices=("gradstream", "gloo", "mpi"))
    rank = next((int(os.environ[name]) for name in MPI_RANK if name in os.environ), 0)
    parser.add_argument("rank", metavar="RANK", type=int, nargs="?", default=rank)
    parser.add_argument("size", metavar="SIZE", type=int, nargs="?", default=1)
    given = parser.parse_args()
    asyncio.run(serve(given.socket, given.team, given.rank, given.size))


if __name__ == "__main__":
    main()
