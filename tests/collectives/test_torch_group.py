"""Groups over torch.distributed: what they compute, and how they fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradstream.collectives.group import GroupMembers, slice_of
from gradstream.collectives.torch_backend import group
from gradstream.collectives.torch_backend.engine import Done, Engine, Hold, HostEngine, choose_backend
from gradstream.collectives.torch_backend.group import TorchGroup
from gradstream.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    InternalError,
    LentMemoryError,
    PeerLostError,
)
from gradstream.memory import Vector
from gradstream.runtime import RealRuntime, SimulationConfig, VirtualCluster
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint

Nodes = list[GrpcEndpoint]
Form = Callable[..., Awaitable[list[TorchGroup]]]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@asynccontextmanager
async def nodes(size: int) -> AsyncIterator[Nodes]:
    """Endpoints that know one another."""
    endpoints = []
    for rank in range(size):
        name = f"worker-{rank}"
        endpoints.append(GrpcEndpoint(Identity("job", name, rank + 1, secret=SECRET), RealRuntime(name)))
    for endpoint in endpoints:
        await endpoint.start()
    for one, other in itertools.permutations(endpoints, 2):
        one.know(other.identity.name, other.address)
    try:
        yield endpoints
    finally:
        for endpoint in endpoints:
            await endpoint.close()
            endpoint.runtime.close()  # type: ignore[attr-defined]


def forming(
    endpoint: GrpcEndpoint, names: Sequence[str], epoch: int, silence_s: float = 30.0, **options: Any
) -> Awaitable[TorchGroup]:
    rank = list(names).index(endpoint.identity.name)
    members = GroupMembers(names, rank, epoch, silence_s)
    return TorchGroup.form(endpoint.runtime, endpoint, members, **options)


async def form(endpoints: Nodes, epoch: int = 1, **options: Any) -> list[TorchGroup]:
    names = [endpoint.identity.name for endpoint in endpoints]
    return await asyncio.gather(*(forming(one, names, epoch, **options) for one in endpoints))


@asynccontextmanager
async def groups(size: int, **options: Any) -> AsyncIterator[tuple[Nodes, list[TorchGroup]]]:
    async with nodes(size) as endpoints:
        formed = await form(endpoints, **options)
        try:
            yield endpoints, formed
        finally:
            await asyncio.gather(*(group.close() for group in formed))


def filled(group: TorchGroup, elems: int, value: Callable[[int], float], name: str = "v") -> Vector:
    vector = group.allocate(elems, torch.float32, name)
    vector.tensor.copy_(torch.tensor([value(index) for index in range(elems)]))
    return vector


# ---- what is computed -------------------------------------------------------------------

SIZES = (1, 2, 3, 4)
ELEMS = (0, 1, 63, 128, 129, 200, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_every_operation_on_every_length(size: int) -> None:
    async def main() -> None:
        async with groups(size) as (_, formed):
            for elems in ELEMS:
                await asyncio.gather(*(check(group, elems) for group in formed))

    async def check(group: TorchGroup, elems: int) -> None:
        rank = group.rank
        summed = torch.tensor([sum((r + 1) * (index % 50) for r in range(size)) for index in range(elems)])
        start, stop = slice_of(elems, rank, size)

        vector = filled(group, elems, lambda index: (rank + 1) * (index % 50))
        result = await group.allreduce(vector.all)
        assert torch.equal(result.tensor, summed.float())

        vector = filled(group, elems, lambda index: (rank + 1) * (index % 50))
        mine = await group.reduce_scatter(vector.all, weight=0.5)
        assert (mine.start, mine.stop) == (start, stop)
        assert torch.equal(mine.tensor, summed[start:stop] / 2)

        await group.all_gather(vector.all)
        assert torch.equal(vector.tensor, summed / 2)

        root = size - 1
        vector = filled(group, elems, lambda index: rank * 1000 + index)
        await group.broadcast(vector.all, root=root)
        assert vector.tensor.tolist() == [root * 1000 + index for index in range(elems)]

    run(main())


def test_an_operation_is_over_when_all_of_its_parts_are_and_failed_if_one_is() -> None:
    """Slices of different lengths are gathered by one broadcast each."""

    class InParts(HostEngine):
        def _works(self, verb: Any, tensor: torch.Tensor, root: int) -> Sequence[Any]:
            return [SimpleNamespace(get_future=lambda future=future: future) for future in futures]

    for broken in (None, 0, 2):
        futures: list[Any] = [torch.futures.Future() for _ in range(3)]
        told: list[BaseException | None] = []

        def done(error: BaseException | None, hold: Hold, told: list[Any] = told) -> None:
            told.append(error)

        InParts(None, 0, 3).start("all_gather", torch.zeros(5), 0, done)
        for index in (1, 2, 0):
            assert not told
            if index == broken:
                futures[index].set_exception(RuntimeError("a rank has gone"))
            else:
                futures[index].set_result(None)
        assert [str(error or "") for error in told] == ["" if broken is None else "a rank has gone"]


def test_weights_and_spans_and_the_same_bits_everywhere() -> None:
    async def main() -> None:
        async with groups(3) as (_, formed):
            vectors = [group.allocate(5000, torch.float64, "v") for group in formed]
            for seed, vector in enumerate(vectors):
                vector.tensor.copy_(torch.randn(5000, generator=torch.Generator().manual_seed(seed)))
            before = [vector.tensor.clone() for vector in vectors]
            weights = (0.25, 0.0, 0.75)
            tasks = [
                group.allreduce(vector[100:4001], weight=weight)
                for group, vector, weight in zip(formed, vectors, weights, strict=True)
            ]
            await asyncio.gather(*tasks)
            assert torch.equal(vectors[0].tensor[100:4001], vectors[1].tensor[100:4001])
            assert torch.equal(vectors[0].tensor[100:4001], vectors[2].tensor[100:4001])
            expected = sum(w * b for w, b in zip(weights, before, strict=True))
            torch.testing.assert_close(vectors[0].tensor[100:4001], expected[100:4001])  # type: ignore[index]
            assert torch.equal(vectors[1].tensor[:100], before[1][:100])
            assert torch.equal(vectors[1].tensor[4001:], before[1][4001:])

    run(main())


def test_operations_asked_for_at_once_go_in_order() -> None:
    """Each rank scales other ones first, in a thread."""

    async def main() -> None:
        async with groups(2) as (_, formed):
            vectors = [filled(group, 640, lambda index: float(index // 64)) for group in formed]
            tasks = [
                group.allreduce(
                    vector[start : start + 64], weight=2.0 if start % 128 == group.rank * 64 else 1.0
                )
                for group, vector in zip(formed, vectors, strict=True)
                for start in range(0, 640, 64)
            ]
            await asyncio.gather(*tasks)
            for vector in vectors:
                assert vector.tensor.tolist() == [3.0 * (index // 64) for index in range(640)]

    run(main())


def test_memory_is_lent_while_it_is_exchanged() -> None:
    async def main() -> None:
        async with groups(2) as (_, formed):
            one, other = (filled(group, 10, float) for group in formed)
            first = asyncio.ensure_future(formed[0].allreduce(one.all))
            await asyncio.sleep(0)
            with pytest.raises(LentMemoryError, match="worker-0: allreduce"):
                one.borrow(3, 4, write=False, to="somebody")
            await asyncio.gather(first, formed[1].allreduce(other.all))
            one.give_back(one.borrow(0, 10, write=True, to="somebody"))

    run(main())


def test_many_groups_come_and_go() -> None:
    """No thread of torch waits for itself: each group ends right after an operation."""

    async def main() -> None:
        engines: list[weakref.ref[Engine]] = []
        async with nodes(2) as endpoints:
            for epoch in range(1, 21):
                formed = await form(endpoints, epoch)
                vectors = [filled(group, 100, float) for group in formed]
                await asyncio.gather(*(g.allreduce(v.all) for g, v in zip(formed, vectors, strict=True)))
                engines += [weakref.ref(group._engine) for group in formed if group._engine]
                await asyncio.gather(*(group.close() for group in formed))
        assert len(engines) == 40
        assert not any(engine() for engine in engines)

    run(main())


# ---- how it fails -----------------------------------------------------------------------


def test_a_rank_that_is_lost_is_named_in_the_middle_of_an_operation() -> None:
    """Its connections of torch are still open, so that torch itself would wait."""

    async def main() -> None:
        async with groups(3) as (endpoints, formed):
            vectors = [filled(group, 100, float) for group in formed]
            waiting = [asyncio.ensure_future(formed[rank].allreduce(vectors[rank].all)) for rank in (0, 1)]
            await asyncio.sleep(0)
            await endpoints[2].abort()
            for task in waiting:
                with pytest.raises(PeerLostError, match="worker-2") as caught:
                    await task
                assert caught.value.peer == "worker-2"
            with pytest.raises(PeerLostError, match="worker-2"):
                await formed[0].broadcast(vectors[0].all)
            with pytest.raises(LentMemoryError, match="worker-0: allreduce"):
                vectors[0].borrow(0, 1, write=True, to="somebody")  # torch may still write it

            again = await form(endpoints[:2], epoch=2)  # the group of those who are left
            fresh = [filled(group, 100, float) for group in again]
            await asyncio.gather(*(g.allreduce(v.all) for g, v in zip(again, fresh, strict=True)))
            assert fresh[1].tensor.tolist() == [2.0 * index for index in range(100)]
            await asyncio.gather(*(group.close() for group in again))

    run(main())


def test_who_closes_ends_the_group_for_the_others() -> None:
    async def main() -> None:
        async with groups(2) as (_, formed):
            vector = filled(formed[1], 100, float)
            closing = asyncio.ensure_future(formed[0].close())
            await asyncio.sleep(0)
            with pytest.raises(PeerLostError, match=r"worker-0.*left the group"):
                await formed[1].allreduce(vector.all)
            with pytest.raises(ClosedError):
                await formed[0].allreduce(vector.all)
            await formed[1].close()
            await closing
            await formed[0].close()

    run(main())


def test_an_operation_that_is_given_up_breaks_the_group_for_all() -> None:
    async def main() -> None:
        async with groups(2) as (_, formed):
            vectors = [filled(group, 200, float) for group in formed]
            task = asyncio.ensure_future(formed[0].allreduce(vectors[0][:100]))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await formed[0].close()
            tasks = [formed[1].allreduce(vectors[1][start : start + 100]) for start in (0, 100)]
            _, error = await asyncio.gather(
                *tasks, return_exceptions=True
            )  # torch may do the first, for both
            assert isinstance(error, PeerLostError)
            assert error.peer == "worker-0"  # it is told, or sees that the other has left: which comes first

    run(main())


@pytest.mark.parametrize("at_once", [False, True])
def test_what_torch_refuses_is_an_error_of_ours_and_breaks_the_group(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(verb: str, tensor: torch.Tensor, root: int, done: Done) -> None:
        error = RuntimeError("a fault of torch's")
        if at_once:
            raise error
        done(error, Hold(HostEngine(None, 0, 2)))

    monkeypatch.setattr(group, "BLAME_S", 0.1)

    async def main() -> None:
        async with groups(2) as (_, formed):
            monkeypatch.setattr(formed[0]._engine, "start", refuse)
            vectors = [filled(group, 10, float) for group in formed]
            tasks = [group.allreduce(vector.all) for group, vector in zip(formed, vectors, strict=True)]
            own, other = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(own, InternalError)
            assert "failed in allreduce, though all ranks are there" in str(own)
            assert "a fault of torch's" in str(own)
            assert isinstance(other, PeerLostError)
            assert "worker-0: has given up an operation" in str(other)
            assert vectors[0].lent == at_once  # who knows what has begun

    run(main())


def test_a_rank_that_does_not_come_is_named() -> None:
    async def main() -> None:
        async with nodes(3) as endpoints:
            names = [one.identity.name for one in endpoints]
            tasks = [forming(one, names, 1, silence_s=0.3) for one in endpoints[:2]]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            for error in errors:
                assert isinstance(error, DeadlineError)
                assert error.peer == "worker-2"

    run(main())


def test_what_cannot_be_formed_says_why() -> None:
    async def main() -> None:
        async with nodes(1) as (endpoint,):
            with pytest.raises(ConfigError, match=r"'smoke'.*expected auto, gloo, nccl or mpi"):
                await form([endpoint], backend="smoke")
            if not torch.distributed.is_mpi_available():
                with pytest.raises(ConfigError, match=r"no backend 'mpi' here; it has .*gloo"):
                    await form([endpoint], backend="mpi")
            endpoint.address, endpoint.protected = "10.0.0.1:4000", True
            with pytest.raises(ConfigError, match=r"would listen on 10\.0\.0\.1.*neither encrypted"):
                await form([endpoint])
            virtual = VirtualCluster(0, SimulationConfig()).runtime("worker-0")
            with pytest.raises(ConfigError, match="no virtual time"):
                await TorchGroup.form(virtual, endpoint, GroupMembers(["worker-0"], 0, 1))

    run(main())


# ---- real processes ---------------------------------------------------------------------

NODE = """
import asyncio, os, signal, sys
import torch
from gradstream.collectives.group import GroupMembers
from gradstream.collectives.torch_backend.group import TorchGroup
from gradstream.errors import GradstreamError
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint

async def main(rank, size):
    names = [f"worker-{r}" for r in range(size)]
    identity = Identity("job", names[rank], rank + 1, secret=SECRET)
    endpoint = GrpcEndpoint(identity, RealRuntime(names[rank]))
    await endpoint.start()
    print(endpoint.address, flush=True)
    for name, address in zip(names, sys.stdin.readline().split()):
        if name != names[rank]:
            endpoint.know(name, address)
    for epoch, end in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
        group = await TorchGroup.form(
            endpoint.runtime, endpoint, GroupMembers(names, rank, epoch, 1.0)
        )
        vector = group.allocate(100_000, torch.float32, "v")
        for number in range(1000):
            if number == 3 and names[rank] == names[-1]:
                os.kill(os.getpid(), end)
            try:
                await group.allreduce(vector.all)
            except GradstreamError as error:
                print(type(error).__name__, error.peer, number, flush=True)
                break
        await group.close()
        names.pop()
    await endpoint.close()
    endpoint.runtime.close()

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


def test_processes_that_are_stopped_and_killed_are_named_and_the_rest_go_on_without_them(
    repository: Path,
) -> None:
    size = 3
    started = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(rank), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        addresses = " ".join(process.stdout.readline().strip() for process in started if process.stdout)
        for process in started:
            assert process.stdin
            process.stdin.write(addresses + "\n")
            process.stdin.flush()
        spoken, _ = started[0].communicate(timeout=60)
        assert spoken.splitlines() == ["DeadlineError worker-2 3", "PeerLostError worker-1 3"]
        assert started[0].returncode == 0  # though torch still waits for worker-2
        spoken, _ = started[1].communicate(timeout=60)
        assert spoken.splitlines() == ["DeadlineError worker-2 3"]
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()


# ---- GPUs -------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine")
def test_nccl_sums_on_the_device_and_from_main_memory() -> None:
    device = torch.device("cuda", 0)
    assert choose_backend(device) == "nccl"

    async def main() -> None:
        async with groups(1, device=device) as (_, (group,)):
            for tensor in (torch.arange(1000.0), torch.arange(1000.0, device=device)):
                vector = Vector("v", tensor)
                await group.allreduce(vector.all, weight=0.5)
                await group.all_gather(vector.all)
                assert vector.tensor.tolist() == [index / 2 for index in range(1000)]

    run(main())
