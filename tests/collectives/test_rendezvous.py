"""Ranks that know of different groups of the same nodes meet once all know the newest one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gradstream.collectives import rendezvous
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.group import GroupMembers
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity, Stream
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS
from gradstream.transport.socket.tcp import TcpEndpoint

NAMES = ("worker-0", "worker-1")


@pytest.mark.parametrize("carrier", [TcpEndpoint, GrpcEndpoint])
def test_a_rank_of_an_earlier_group_is_asked_until_it_knows_the_later_one(
    carrier: Callable[..., EndpointCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts these refusals against nobody: with a wait of 0.25 s they are 40 in ten seconds."""
    monkeypatch.setattr(rendezvous, "RETRY_S", 1e-3)
    monkeypatch.setattr(rendezvous, "LONGEST_RETRY_S", 1e-3)
    refused = asyncio.Semaphore(0)
    accept = rendezvous.Rendezvous.accept

    async def counted(self: rendezvous.Rendezvous, stream: Stream) -> None:
        refused.release()
        await accept(self, stream)

    monkeypatch.setattr(rendezvous.Rendezvous, "accept", counted)

    async def main() -> None:
        runtimes = [RealRuntime(name) for name in NAMES]
        endpoints = [
            carrier(Identity("job", runtime.node, 1, secret=SECRET), runtime) for runtime in runtimes
        ]

        def member(rank: int, epoch: int) -> Communicator:
            return Communicator(runtimes[rank], endpoints[rank], GroupMembers(NAMES, rank, epoch))

        for endpoint in endpoints:
            await endpoint.start()
        endpoints[0].know(NAMES[1], endpoints[1].address)
        endpoints[1].know(NAMES[0], endpoints[0].address)
        earlier = asyncio.create_task(member(1, epoch=1).meet())
        later = member(0, epoch=2)
        meeting = asyncio.create_task(later.meet())
        for _ in range(LIMITS.refusals + 8):
            done = asyncio.create_task(refused.acquire())
            await asyncio.wait([done, meeting], return_when=asyncio.FIRST_COMPLETED)
            assert done.done(), meeting.exception()
        earlier.cancel()
        await asyncio.wait([earlier])
        follower = member(1, epoch=2)
        await follower.meet()
        await meeting
        await asyncio.gather(later.close(), follower.close())
        for endpoint in endpoints:
            await endpoint.close()
        for runtime in runtimes:
            runtime.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
