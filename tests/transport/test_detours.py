"""Ways to peers that cannot be dialled: back, and through the coordinator. Addresses that refuse are the firewall."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Group, GroupMembers
from gradstream.coordinator import relay as relay_module
from gradstream.coordinator.relay import Relay
from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.telemetry.events import RelayEvent
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import reply_once
from gradstream.transport import detours as detours_module
from gradstream.transport.base import Identity, Priority
from gradstream.transport.carriers import RoutedEndpoint, make_endpoint
from gradstream.transport.detours import PIECE_BYTES, TICKET_BYTES, Detours, dial
from gradstream.transport.endpoint import WINDOW
from gradstream.transport.grpc.connection import GrpcConnection
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS
from gradstream.transport.offers import Choice
from gradstream.wire import v1

NAMES = ("worker-0", "worker-1", "worker-2")
NUMBERS = dict.fromkeys(NAMES, 1)
SILENCE_S = 20.0
ELEMS = 100_003
WALLED = "127.0.0.2"  # nobody listens here


class Cluster:
    """A coordinator with a relay, and workers that believe in addresses of the test's choice."""

    def __init__(self, *, tls: bool = True, carrier: Choice = "grpc") -> None:
        self.carrier: Choice = carrier
        self.authority = CertificateAuthority() if tls else None
        self.events: list[RelayEvent] = []
        self.runtimes: dict[str, RealRuntime] = {}
        self.endpoints: dict[str, RoutedEndpoint] = {}

    def make(self, name: str, secret: bytes = SECRET) -> RoutedEndpoint:
        runtime = self.runtimes[name] = RealRuntime(name)
        security = self.authority.issue(name) if self.authority else None
        identity = Identity("job", name, 1, secret=secret, members=NUMBERS, epoch=1)
        self.endpoints[name] = made = make_endpoint(
            identity, runtime, "grpc" if name == "coordinator" else self.carrier, security=security
        )
        return made

    async def open(self, walled: tuple[str, ...]) -> None:
        """Starts all nodes; each knows the others, and those of `walled` at addresses that refuse."""
        coordinator = self.make("coordinator")
        await coordinator.start()
        await coordinator.take_detours(SILENCE_S)
        coordinator.know("coordinator", coordinator.address)
        runtime = self.runtimes["coordinator"]
        self.relay = Relay(runtime, coordinator, self.events.append, silence_s=SILENCE_S)
        for name in NAMES:
            await self.start(name)
        for name in ("coordinator", *NAMES):
            for other in NAMES:
                if other != name:
                    address = self.endpoints[other].address
                    seen = address.replace("127.0.0.1", WALLED) if other in walled else address
                    self.endpoints[name].know(other, seen)

    async def start(self, name: str, secret: bytes = SECRET) -> RoutedEndpoint:
        made = self.make(name, secret)
        await made.start()
        await made.take_detours(SILENCE_S)
        made.know("coordinator", self.endpoints["coordinator"].address)
        return made

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.close()
        for runtime in self.runtimes.values():
            runtime.close()


@asynccontextmanager
async def cluster(*walled: str, tls: bool = True, carrier: Choice = "grpc") -> AsyncIterator[Cluster]:
    made = Cluster(tls=tls, carrier=carrier)
    try:
        await made.open(walled)
        yield made
    finally:
        await made.close()


async def summed(made: Cluster, during: Callable[[Group], Awaitable[None]] | None = None) -> list[Any]:
    """The sum over all ranks, as each of them has it; or its error."""

    async def live(rank: int) -> Any:
        name = NAMES[rank]
        runtime, endpoint = made.runtimes[name], made.endpoints[name]
        group = await form_group(
            runtime, endpoint, GroupMembers(NAMES, rank, 1, SILENCE_S), "ring", host=name
        )
        try:
            if during is not None:
                await during(group)
            vector = group.allocate(ELEMS, torch.float32, "v")
            vector.tensor.copy_(torch.randn(ELEMS, generator=torch.Generator().manual_seed(rank)))
            return (await group.allreduce(vector.all)).tensor.clone()
        finally:
            await group.close()

    return await asyncio.gather(*map(live, range(len(NAMES))), return_exceptions=True)


@pytest.mark.parametrize("tls", [True, False])
def test_a_relayed_group_has_the_bits_of_a_direct_one(tls: bool) -> None:
    async def main() -> None:
        async with cluster(tls=tls) as made:
            direct = await summed(made)
            assert not made.events
        async with cluster(*NAMES, tls=tls) as made:
            relayed = await summed(made)
            made.relay.report()
            caller = made.endpoints["worker-0"]._main
            assert isinstance(caller, GrpcEndpoint)
            # The entry is on loopback, where nothing has checksums; what goes into it leaves the machine.
            assert caller._connections["worker-1", Priority.BULK, 0].checked is not tls
            pairs = [(0, 1), (0, 2), (1, 2)]  # the lower rank opens the stream
            assert {(e.caller, e.called, e.how) for e in made.events} == {
                (NAMES[low], NAMES[high], "relayed") for low, high in pairs
            }
            assert len(made.events) == 2 * len(pairs)
            # A ring over three ranks sends two thirds of the vector twice from each to the next.
            for event in made.events[len(pairs) :]:
                assert 1.33 * 4 * ELEMS < event.size_bytes < 1.5 * 4 * ELEMS
        for one, other in zip(direct, relayed, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, direct[0])

    asyncio.run(main())


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_firewall_that_leaves_the_port_of_grpc_alone(tls: bool, is_open: bool) -> None:
    async def main() -> None:
        async with cluster(tls=tls, carrier="tcp") as made:
            for name in NAMES if not is_open else ():
                one = made.endpoints[name]
                one.address = one.address.replace("tcp=127.0.0.1", f"tcp={WALLED}")
            for name, other in itertools.permutations(NAMES, 2):
                made.endpoints[name].know(other, made.endpoints[other].address)
            assert all(map(torch.is_tensor, await summed(made)))
            routes = {
                route
                for name in NAMES
                for peer, route in made.endpoints[name].routes.items()
                if peer in NAMES
            }
            assert routes == {"tcp" if is_open else "grpc"}
            assert not made.events  # nobody takes a detour

    asyncio.run(main())


def test_the_connection_that_shows_the_way_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far away a further one would take half a second: TCP, TLS, and the proofs of the secret."""
    begun: list[tuple[str, str]] = []
    begin = GrpcConnection._begin

    async def noted(self: GrpcConnection) -> Any:
        begun.append((self._identity.name, self._peer))
        return await begin(self)

    monkeypatch.setattr(GrpcConnection, "_begin", noted)

    async def main() -> None:
        async with cluster() as made:
            await summed(made)
            caller = made.endpoints["worker-0"]._main
            assert isinstance(caller, GrpcEndpoint)
            assert list(caller._keys_of("worker-1")) == [("worker-1", Priority.BULK, 0)]

    asyncio.run(main())
    among = [pair for pair in begun if "coordinator" not in pair]
    assert sorted(among) == [("worker-0", "worker-1"), ("worker-0", "worker-2"), ("worker-1", "worker-2")]


def test_a_node_that_can_dial_the_caller_dials_back() -> None:
    async def main() -> None:
        async with cluster("worker-1", "worker-2") as made:
            sums = await summed(made)
            assert torch.equal(sums[0], sums[2])
            assert {(e.caller, e.called, e.how) for e in made.events} == {
                ("worker-0", "worker-1", "dialled back"),
                ("worker-0", "worker-2", "dialled back"),
                ("worker-1", "worker-2", "relayed"),
            }
            assert list(made.relay.num_bytes) == [("worker-1", "worker-2")]

    asyncio.run(main())


def test_who_shows_no_ticket_fills_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port for nodes that dial back hangs up on whoever comes while so many others have shown nothing."""
    monkeypatch.setattr(detours_module, "LIMITS", replace(LIMITS, strangers=2))

    async def main() -> None:
        async with cluster("worker-1") as made:
            detours = made.endpoints["worker-0"]._detours
            assert detours is not None
            silent = [await dial("127.0.0.1", detours._back_port) for _ in range(2)]
            await asyncio.sleep(0)
            one_more = await dial("127.0.0.1", detours._back_port)
            assert await asyncio.wait_for(one_more.reader.read(1), 4) == b""
            for line in (*silent, one_more):
                line.writer.close()

    asyncio.run(main())


def test_the_coordinator_reaches_a_node_behind_a_wall_too() -> None:
    async def main() -> None:
        async with cluster(*NAMES) as made:
            made.endpoints["worker-1"].serve("state", reply_once, model=False)
            await made.endpoints["coordinator"].call(
                "worker-1", "state", v1.Body(), v1.Body, silence_s=SILENCE_S
            )
            # The worker dials back: it reaches the coordinator.
            assert [(e.caller, e.how) for e in made.events] == [("coordinator", "dialled back")]

    asyncio.run(main())


def test_another_node_at_the_address_is_not_taken_for_the_peer() -> None:
    async def main() -> None:
        async with cluster() as made:
            caller = made.endpoints["worker-0"]
            made.endpoints["worker-1"].serve("state", reply_once, model=False)
            caller.know("worker-1", made.endpoints["worker-2"].address)
            await caller.call("worker-1", "state", v1.Body(), v1.Body, silence_s=SILENCE_S)
            assert [(e.called, e.how) for e in made.events] == [("worker-1", "dialled back")]

    asyncio.run(main())


def test_who_may_use_the_relay() -> None:
    async def refused(made: Cluster, who: RoutedEndpoint, method: str, **request: Any) -> str:
        asked = v1.Tunnel(**({"peer": "worker-1", "ticket": bytes(TICKET_BYTES)} | request))
        with pytest.raises(RefusedError) as caught:
            await who.call("coordinator", method, asked, v1.Tunnel, silence_s=SILENCE_S)
        return caught.value.code

    async def main() -> None:
        async with cluster(*NAMES) as made:
            stranger = await made.start("worker-7")
            for method in ("post", "tunnel", "answer"):
                assert await refused(made, stranger, method) == "NOT_MEMBER"
            spy = await made.start("worker-8", b"another secret than the run's")
            assert await refused(made, spy, "tunnel") == "BAD_SECRET"
            assert await refused(made, made.endpoints["worker-0"], "tunnel", ticket=b"") == "BAD_REQUEST"
            # A ticket is of use to the called node alone.
            ticket = b"t" * TICKET_BYTES
            calling = await made.endpoints["worker-0"].open(
                "coordinator", "tunnel", v1.Tunnel(peer="worker-9", ticket=ticket)
            )
            await calling.credit(SILENCE_S)
            thief = {"peer": "worker-0", "ticket": ticket}
            assert await refused(made, made.endpoints["worker-2"], "answer", **thief) == "NOT_MEMBER"
            calling.cancel()

    asyncio.run(main())


def test_a_node_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)

    async def main() -> None:
        async with cluster(*NAMES) as made:
            request = v1.Tunnel(peer="worker-9", ticket=bytes(TICKET_BYTES))
            with pytest.raises(
                RefusedError, match=r"worker-9 has not answered a call of worker-0 within 0\.2 s"
            ):
                await made.endpoints["worker-0"].call(
                    "coordinator", "tunnel", request, v1.Tunnel, silence_s=SILENCE_S
                )

    asyncio.run(main())


def test_the_relay_holds_little_for_a_node_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(detours: Detours) -> None:
        """The test hears the calls itself."""

    monkeypatch.setattr(Detours, "_attend", deaf)

    async def main() -> None:
        async with cluster() as made:
            near, far = made.endpoints["worker-0"], made.endpoints["worker-1"]
            post = await far.open("coordinator", "post", v1.Tunnel())
            await post.credit(SILENCE_S)
            ticket = bytes(TICKET_BYTES)
            sending = await near.open("coordinator", "tunnel", v1.Tunnel(peer="worker-1", ticket=ticket))
            called = await post.recv(SILENCE_S)
            assert called is not None
            answer = v1.Tunnel(peer="worker-0", ticket=ticket)
            taking = await far.open("coordinator", "answer", answer)
            assert await sending.recv(SILENCE_S) is not None
            words = torch.zeros(PIECE_BYTES // 4)
            frame = v1.Frame(chunk=v1.Chunk(elems=len(words), dtype=v1.FLOAT32, sequence=PIECE_BYTES))
            num_sent = 0

            async def send_all() -> None:
                nonlocal num_sent
                while True:
                    await sending.send(frame, words, silence_s=1.0)
                    num_sent += 1

            with pytest.raises(DeadlineError, match="coordinator"):
                await send_all()
            # One window waits here, one there, and one Chunk in between.
            assert WINDOW <= num_sent <= 2 * WINDOW + 1
            taking.cancel()

    asyncio.run(main())


def test_the_death_of_the_relay_is_a_lost_peer() -> None:
    async def main() -> None:
        async with cluster(*NAMES) as made:

            async def kill(group: Group) -> None:
                if group.rank == 0:
                    await made.endpoints["coordinator"].abort()

            with contextlib.suppress(TimeoutError):
                outcomes = await asyncio.wait_for(summed(made, kill), 2 * SILENCE_S)
            assert all(isinstance(one, PeerLostError | DeadlineError) for one in outcomes), outcomes
            assert all(str(one).startswith(NAMES) for one in outcomes)

    asyncio.run(main())


def test_a_route_that_was_lost_is_looked_for_again() -> None:
    async def main() -> None:
        async with cluster("worker-1", "worker-2") as made:
            caller = made.endpoints["worker-0"]
            made.endpoints["worker-1"].serve("state", reply_once, model=False)
            await caller.call("worker-1", "state", v1.Body(), v1.Body, silence_s=SILENCE_S)
            assert caller.routes["worker-1"] == "grpc"
            caller.know("worker-1", made.endpoints["worker-1"].address)  # it has moved, and can be dialled
            await caller.call("worker-1", "state", v1.Body(), v1.Body, silence_s=SILENCE_S)
            made.endpoints["coordinator"].members_changed({})
            await caller.call("worker-1", "state", v1.Body(), v1.Body, silence_s=SILENCE_S)
            assert len(made.events) == 1

    asyncio.run(main())
