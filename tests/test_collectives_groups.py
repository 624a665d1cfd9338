"""Groups on virtual time: every algorithm, every number of ranks, and what is true when a rank is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.forming import form_group
from gradstream.collectives.group import Group, slice_of
from gradstream.memory import Vector
from gradstream.runtime import Link, Network, VirtualCluster, World
from gradstream.transport.base import Identity
from gradstream.transport.memory import MemoryEndpoint, MemoryNetwork

RACK = World(network=Network(bandwidth_bytes_s=1.25e9, link=Link(latency_s=50e-6, jitter_s=20e-6)))
SIZES = [*range(1, 10), 12, 16]


class Fleet:
    """Ranks of a group on a virtual network, each running the same coroutine."""

    def __init__(self, size: int, *, seed: int = 0, world: World = RACK) -> None:
        self.cluster = VirtualCluster(seed, world)
        self.network = MemoryNetwork(self.cluster)
        self.names = [f"worker-{rank}" for rank in range(size)]
        self.endpoints = [
            MemoryEndpoint(Identity("job", name, 1), self.cluster.runtime(name), self.network)
            for name in self.names
        ]
        self.outcomes: list[Any] = [None] * size

    def run(
        self, work: Callable[[Group], Awaitable[Any]], *, how: str = "ring", silence_s: float = 30.0
    ) -> list[Any]:
        """What `work` returned, or raised, at each rank."""

        async def live(rank: int) -> None:
            runtime, endpoint = self.cluster.runtime(self.names[rank]), self.endpoints[rank]
            group = await form_group(runtime, endpoint, self.names, rank, 1, how, silence_s=silence_s)
            try:
                self.outcomes[rank] = await work(group)
            except Exception as error:
                self.outcomes[rank] = error
            finally:
                await group.close()

        async def main() -> None:
            director = self.cluster.runtime("director")
            for endpoint in self.endpoints:
                await endpoint.start()
            for endpoint in self.endpoints:
                for other in self.endpoints:
                    endpoint.know(other.identity.name, other.address)
            await director.gather(*(live(rank) for rank in range(len(self.names))))

        self.cluster.run(main())
        return self.outcomes


def whole(size: int, elems: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(size * 1000 + elems)
    return list(rng.integers(-1000, 1000, (size, elems)).astype(np.float32))


@pytest.mark.parametrize("how", ALGORITHMS)
def test_every_rank_has_the_sum(how: str) -> None:
    for size in SIZES:
        lengths = sorted({0, 1, size - 1, size, size + 1, 1000})
        inputs = {elems: whole(size, elems) for elems in lengths}

        async def work(group: Group, inputs: Any = inputs) -> list[Any]:
            sums = []
            for elems, parts in inputs.items():
                vector = group.allocate(elems, torch.float32, "gradient")
                vector.tensor.copy_(torch.from_numpy(parts[group.rank]))
                sums.append((await group.allreduce(vector.all)).tensor.clone().numpy())
            return sums

        for outcome in Fleet(size).run(work, how=how):
            for parts, got in zip(inputs.values(), outcome, strict=True):
                np.testing.assert_array_equal(got, np.sum(parts, axis=0))


def test_scatter_gather_broadcast_and_weights() -> None:
    for size in (1, 2, 3, 5, 8):
        for elems in (0, 1, 64, 65, 1000):
            inputs = whole(size, elems)
            total = sum((rank + 1) * part for rank, part in enumerate(inputs))

            async def work(group: Group, inputs: Any = inputs, elems: int = elems) -> Any:
                vector = Vector("v", torch.from_numpy(inputs[group.rank].copy()))
                own = await group.reduce_scatter(vector.all, weight=group.rank + 1.0)
                assert (own.start, own.stop) == slice_of(elems, group.rank, group.size)
                await group.all_gather(vector.all)
                told = Vector("w", torch.full((elems,), float(group.rank)))
                await group.broadcast(told.all, root=group.size - 1)
                return vector.tensor.numpy(), told.tensor.numpy()

            for summed, told in Fleet(size).run(work):
                np.testing.assert_array_equal(summed, np.broadcast_to(total, (elems,)))
                np.testing.assert_array_equal(told, np.full(elems, float(size - 1)))
