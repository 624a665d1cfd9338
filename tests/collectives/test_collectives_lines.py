"""Data sockets of groups over TCP. Several ranks in one process, each with its sockets and its thread."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.collectives import socket_driver
from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.communicator import DataSocket, GroupDataSockets
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Group, GroupMembers
from gradstream.collectives.message_group import HierarchicalGroup, MessageGroup
from gradstream.collectives.schedule import DependencyPlan, Operation, PlanProgress, Recv, Schedule, Send
from gradstream.collectives.socket_driver import SocketDriver
from gradstream.errors import ConfigError, DeadlineError, InternalError, PeerLostError
from gradstream.memory import Vector
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity, PeerSocket
from gradstream.transport.socket.tcp import TcpEndpoint
from kit.group_runs import VirtualRanks

WAIT_S = 30.0
DAMAGED: list[int] = []


def endpoint(name: str, **options: Any) -> TcpEndpoint:
    return TcpEndpoint(Identity("job", name, 1, secret=SECRET), RealRuntime(name), **options)


async def closed_all(*endpoints: TcpEndpoint) -> None:
    for own in endpoints:
        await own.close()
        assert isinstance(own.runtime, RealRuntime)
        own.runtime.close()


def together(
    size: int,
    work: Callable[[Group], Awaitable[Any]],
    *,
    how: str = "ring",
    piece_bytes: int = 1 << 12,
    options: Sequence[dict[str, Any]] = (),
    hosts: Sequence[str] = (),
    silence_s: float = WAIT_S,
    prepare: Callable[[TcpEndpoint], None] = lambda own: None,
    authority: CertificateAuthority | None = None,
) -> list[Any]:
    """The results of `work`, or its errors, at all ranks."""
    names = [f"worker-{rank}" if authority else f"rank-{rank}" for rank in range(size)]
    if authority:
        options = [{"security": authority.issue(name)} for name in names]

    async def live(rank: int, endpoints: Sequence[TcpEndpoint]) -> Any:
        own = endpoints[rank]
        host = hosts[rank] if hosts else names[rank]
        group = await form_group(
            own.runtime, own, GroupMembers(names, rank, 1, silence_s), how, piece_bytes=piece_bytes, host=host
        )
        try:
            return await work(group)
        finally:
            await group.close()

    async def main() -> list[Any]:
        endpoints = [endpoint(name, **(options[rank] if options else {})) for rank, name in enumerate(names)]
        for own in endpoints:
            prepare(own)
            await own.start()
        for own in endpoints:
            for other in endpoints:
                own.know(other.identity.name, other.address)
        lives = (live(rank, endpoints) for rank in range(size))
        try:
            async with asyncio.timeout(2 * WAIT_S):
                return await asyncio.gather(*lives, return_exceptions=True)
        finally:
            await closed_all(*endpoints)

    return asyncio.run(main())


def has_data_sockets(group: Group) -> bool:
    assert isinstance(group, MessageGroup)
    return group._communicator.data_sockets is not None


def plain(one: DataSocket | PeerSocket) -> socket.socket:
    assert isinstance(one.socket, socket.socket)
    return one.socket


def vector_of(values: np.ndarray[Any, Any]) -> Vector:
    return Vector("v", torch.from_numpy(values.copy()))


# ---- results -------------------------------------------------------------------------


@pytest.mark.parametrize("authority", [None, CertificateAuthority()], ids=["plain text", "TLS"])
@pytest.mark.parametrize("how", ALGORITHMS)
def test_the_bits_are_those_of_streams(how: str, authority: CertificateAuthority | None) -> None:
    """Numbers whose sum depends on the order; lengths around the number of ranks, and of several pieces."""
    for size in (1, 2, 3, 4, 5, 8):
        lengths = sorted({0, 1, size - 1, size + 1, 5000, 20011})
        rng = np.random.default_rng(size)
        inputs = {elems: rng.standard_normal((size, elems)).astype(np.float32) for elems in lengths}

        async def work(group: Group, inputs: Any = inputs) -> list[bytes]:
            sums = []
            for parts in inputs.values():
                vector = vector_of(parts[group.rank])
                await group.allreduce(vector.all)
                sums.append(vector.tensor.numpy().tobytes())
            return sums

        async def by_sockets(group: Group, work: Any = work) -> Any:
            assert has_data_sockets(group)
            return await work(group)

        expected = VirtualRanks(size).run(work, how=how, piece_bytes=1 << 12)
        assert together(size, by_sockets, how=how, authority=authority) == expected
        assert len(set(map(tuple, expected))) == 1


def test_halves_broadcasts_and_weights() -> None:
    for size, elems in ((2, 9001), (3, 1), (4, 30000), (5, 7)):
        inputs = np.random.default_rng(elems).integers(-1000, 1000, (size, elems)).astype(np.float64)
        total = sum((rank + 1) * part for rank, part in enumerate(inputs))

        async def work(group: Group, inputs: Any = inputs, elems: int = elems) -> Any:
            assert has_data_sockets(group)
            vector, told = vector_of(inputs[group.rank]), vector_of(np.full(elems, float(group.rank)))
            await group.reduce_scatter(vector.all, weight=group.rank + 1.0)
            await group.all_gather(vector.all)
            await group.broadcast(told.all, root=group.size - 1)
            return vector.tensor.numpy(), told.tensor.numpy()

        for summed, told in together(size, work):
            np.testing.assert_array_equal(summed, total)
            np.testing.assert_array_equal(told, np.full(elems, size - 1.0))


def test_operations_follow_each_other_without_waiting_for_all() -> None:
    """Ranks that are ahead send data of the next operation, which others read only then."""

    async def work(group: Group) -> list[float]:
        vectors = [vector_of(np.full(3000, float(turn), np.float32)) for turn in range(20)]
        await asyncio.gather(*(group.allreduce(vector.all) for vector in vectors))
        return [float(vector.tensor.max()) for vector in vectors]

    assert together(4, work, how="direct") == [[4.0 * turn for turn in range(20)]] * 4


def test_inside_hosts_and_between_them() -> None:
    """A hierarchical group has data sockets between hosts, and none inside."""

    async def work(group: Group) -> float:
        assert isinstance(group, HierarchicalGroup)
        sockets, other = group._communicator.data_sockets, (group.rank + 2) % 4
        assert sockets is not None
        assert [rank for rank in range(4) if sockets.reach([rank])] == [other]
        vector = group.allocate(5000, torch.float32, "v")
        vector.tensor.fill_(group.rank + 1.0)
        return float((await group.allreduce(vector.all)).tensor.sum())

    hosts = ["left", "left", "right", "right"]
    assert together(4, work, how="hierarchical", hosts=hosts) == [50000.0] * 4


# ---- ranks that have none ----------------------------------------------------------------------------


def test_where_one_rank_has_none_all_send_by_streams() -> None:

    async def work(group: Group) -> tuple[bool, float]:
        vector = vector_of(np.ones(9000, np.float32))
        await group.allreduce(vector.all)
        return has_data_sockets(group), float(vector.tensor.sum())

    def prepare(own: TcpEndpoint) -> None:
        own.has_data_sockets = own.identity.name != "rank-2"

    assert together(3, work, prepare=prepare) == [(False, 27000.0)] * 3


def test_nobody_gets_a_data_socket_without_the_secret() -> None:
    async def main() -> None:
        server, friend, stranger = endpoint("server"), endpoint("friend"), endpoint("stranger")
        stranger.identity.secret = b"a guess of sixteen bytes"
        await server.start()
        try:
            for caller in (friend, stranger):
                caller.know("server", server.address)
                server.know(caller.identity.name, "127.0.0.1:1")
            dialled = await friend.data_socket("server", "name", dial=True)
            taken = await server.data_socket("friend", "name", dial=False)
            assert dialled is not None and taken is not None
            dialled.socket.close()
            taken.socket.close()
            waiting = asyncio.ensure_future(server.data_socket("stranger", "name", dial=False))
            assert await stranger.data_socket("server", "name", dial=True) is None
            assert not waiting.done()
            waiting.cancel()
        finally:
            await closed_all(server, friend, stranger)

    asyncio.run(main())


def test_a_data_socket_that_nobody_takes_is_closed() -> None:
    """A later one of its name closes it, and so does the endpoint's end; no descriptor is kept."""

    async def main() -> None:
        server, client = endpoint("server"), endpoint("client")
        await server.start()
        client.know("server", server.address)
        server.know("client", "127.0.0.1:1")
        loop = asyncio.get_running_loop()
        try:
            first = await client.data_socket("server", "name", dial=True)
            second = await client.data_socket("server", "name", dial=True)
            assert first is not None and second is not None
            assert await loop.sock_recv(plain(first), 1) == b""
            taken = await server.data_socket("client", "name", dial=False)
            assert taken is not None
            await loop.sock_sendall(plain(taken), b"x")
            assert await loop.sock_recv(plain(second), 1) == b"x"
            third = await client.data_socket("server", "other", dial=True)
            assert third is not None
        finally:
            await server.close()
        assert await loop.sock_recv(plain(third), 1) == b""
        for one in (first, second, third, taken):
            one.socket.close()
        await closed_all(client, server)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- failures --------------------------------------------------------------------------------


def test_ranks_that_do_different_things_are_told() -> None:
    async def work(group: Group) -> None:
        await group.allreduce(vector_of(np.ones(100 + group.rank, np.float32)).all)

    found = together(2, work)
    assert any(isinstance(error, ConfigError) for error in found)
    assert all(isinstance(error, ConfigError | PeerLostError) for error in found)
    assert "allreduce by ring" in str(found[0]) and "same operations in the same order" in str(
        next(error for error in found if isinstance(error, ConfigError))
    )


def test_a_rank_that_leaves_before_the_end_is_named() -> None:
    async def work(group: Group) -> float:
        if group.rank == 1:
            return 0.0  # and closes
        vector = vector_of(np.ones(50000, np.float32))
        await group.allreduce(vector.all)
        return float(vector.tensor.sum())

    first, _, third = together(3, work)
    for error in (first, third):
        assert isinstance(error, PeerLostError) and error.peer == "rank-1", error
        assert "left the group" in str(error)


def test_a_rank_that_gives_up_breaks_the_group_and_gets_its_memory_back() -> None:
    """The others wait within an operation. The cancelled rank gets its vector back, and nothing writes it."""
    done = asyncio.Event()

    async def work(group: Group) -> Any:
        vector = vector_of(np.ones(200_000, np.float32))
        if group.rank == 2:  # never comes to the operation
            await done.wait()
        elif group.rank == 1:
            await group.allreduce(vector.all)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.allreduce(vector.all), 0.3)
            assert not vector.lent
            before = vector.tensor.clone()
            done.set()
            await asyncio.sleep(0.1)
            assert torch.equal(before, vector.tensor)
        return "given up"

    given_up, told, _ = together(3, work)
    assert given_up == "given up"
    assert isinstance(told, PeerLostError) and told.peer == "rank-0"
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread


def test_a_rank_that_says_nothing_is_named_within_the_deadline() -> None:
    """It has the sockets open, and neither beats nor sends."""

    async def work(group: Group) -> None:
        assert isinstance(group, MessageGroup)
        vector = vector_of(np.ones(100_000, np.float32))
        if group.rank == 1:
            heartbeat = group._communicator._heartbeat
            assert heartbeat is not None
            heartbeat.cancel()
            await asyncio.sleep(3.0)
            return
        await group.allreduce(vector.all)

    begun = time.monotonic()
    error = together(2, work, silence_s=1.0)[0]
    assert isinstance(error, DeadlineError) and error.peer == "rank-1"
    assert time.monotonic() - begun < WAIT_S


def test_waiting_costs_nothing() -> None:
    """A rank that waits for another one to come to the operation sleeps."""

    async def work(group: Group) -> float:
        vector = vector_of(np.ones(100_000, np.float32))
        if group.rank == 1:
            await asyncio.sleep(2.0)
        before = time.process_time()
        await group.allreduce(vector.all)
        return time.process_time() - before

    assert together(2, work)[0] < 0.2  # of the one that waits, and of all that its process does meanwhile


# ---- the driver alone ------------------------------------------------------------------------


def driver_of(
    plan: DependencyPlan, tensor: torch.Tensor, operation: Operation, *ends: DataSocket
) -> SocketDriver:
    progress, sockets = PlanProgress(plan, 16, 4), GroupDataSockets("rank", {0: ends})
    return SocketDriver(progress, operation, tensor, {0: ends}, sockets.in_thread, time.monotonic_ns)


def driver(
    schedule: Schedule, elems: int, *ends: DataSocket, number: int = 3
) -> tuple[SocketDriver, torch.Tensor]:
    tensor, operation = torch.ones(elems), Operation(number, 1, "allreduce of ones")
    return driver_of(DependencyPlan.of(schedule), tensor, operation, *ends), tensor


def pair(*, checked: bool = False) -> tuple[DataSocket, DataSocket]:
    left, right = socket.socketpair()
    for one in (left, right):
        one.setblocking(False)
    return (
        DataSocket(PeerSocket(left, checked), "right", DAMAGED.append),
        DataSocket(PeerSocket(right, checked), "left", DAMAGED.append),
    )


def closed(*ends: DataSocket) -> None:
    for end in ends:
        end.socket.close()


def test_another_version_is_not_believed() -> None:
    """A message of the same operation but of another length is refused, and nothing of it is written."""
    left, right = pair()
    sender, _ = driver([Send(0, 0, 5)], 5, left)
    receiver, tensor = driver([Recv(0, 0, 4)], 4, right)
    sender.run_blocking()
    tensor.fill_(7.0)
    with pytest.raises(ConfigError, match="piece 0 of 20 bytes came from left, where this rank expects none"):
        receiver.run_blocking()
    assert tensor.tolist() == [7.0] * 4
    closed(left, right)


def test_steps_that_wait_for_each_other_are_an_error_and_no_hang() -> None:
    """A plan that no schedule makes: each of its steps waits for the other."""
    left, right = pair()
    plan = DependencyPlan([Send(0, 0, 4), Recv(0, 0, 4)], [[1], [0]], {0: [0]}, {0: [1]})
    broken = driver_of(plan, torch.ones(4), Operation(1, 1, "broken"), left)
    with pytest.raises(InternalError, match="broken: its steps wait for each other in a circle"):
        broken.run_blocking()
    closed(left, right)


def test_a_peer_that_reads_slowly_gets_everything_in_order() -> None:
    """The socket's buffer is full time and again, in the middle of headers and pieces."""
    left, right = pair()
    for end in (left, right):
        plain(end).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    steps, elems = 40, 40_000
    cuts = [elems * part // steps for part in range(steps + 1)]
    sends = [Send(0, start, stop) for start, stop in pairwise(cuts)]
    sender, sent = driver(sends, elems, left)
    receiver, got = driver([Recv(0, step.start, step.stop, add=True) for step in sends], elems, right)
    sent.copy_(torch.arange(elems))
    thread = threading.Thread(target=sender.run_blocking)
    thread.start()
    receiver.run_blocking()
    thread.join(WAIT_S)
    assert torch.equal(got, torch.arange(elems) + 1.0)
    closed(left, right)


# ---- damage --------------------------------------------------------------------------------


def sent(schedule: Schedule, elems: int) -> bytes:
    """What a rank sends, with checksums."""
    near, far = pair(checked=True)
    driver(schedule, elems, near)[0].run_blocking()
    data = plain(far).recv(1 << 16)
    closed(near, far)
    return data


def received(data: bytes, schedule: Schedule, elems: int) -> torch.Tensor:
    """What a rank makes of these bytes. Raises what it raises."""
    near, far = pair(checked=True)
    receiver, tensor = driver(schedule, elems, near)
    assert isinstance(far.socket, socket.socket)
    far.socket.sendall(data)
    try:
        if not receiver.run_blocking(0):
            receiver.run_blocking()
    finally:
        closed(near, far)
    return tensor


@pytest.mark.parametrize("add", [False, True])
def test_every_bit_of_a_message_is_guarded(add: bool) -> None:
    """Two steps, of three pieces and one: headers, pieces and checksums."""
    ends = [(0, 40), (40, 44)]
    data = sent([Send(0, *end) for end in ends], 44)
    recvs = [Recv(0, *end, add=add) for end in ends]
    assert received(data, recvs, 44).tolist() == [1.0 + add] * 44
    before = len(DAMAGED)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PeerLostError, match=r"right: allreduce of ones: .* damaged on their way"):
            received(bytes(flipped), recvs, 44)
    assert len(DAMAGED) - before == 8 * len(data) == 8 * (176 + 4 * (24 + 2 * 8))


def test_without_the_check_damage_gets_into_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(sent([Send(0, 0, 4)], 4))
    data[-1] ^= 1
    monkeypatch.setattr(socket_driver, "verify", lambda *data: None)
    assert received(bytes(data), [Recv(0, 0, 4)], 4).tolist() != [1.0] * 4


class Spoilt:
    """A socket that flips a bit of what it sends, once."""

    def __init__(self, sound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sound = sound
        self._monkeypatch = monkeypatch

    def sendmsg(self, buffers: list[memoryview]) -> int:
        self._monkeypatch.undo()
        data = bytearray(b"".join(buffers))
        data[len(data) // 2] ^= 1
        return self._sound.sendmsg([data])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)


@pytest.mark.parametrize("how", ["ring", "halving-doubling"])
def test_damage_ends_an_operation_and_no_rank_has_a_wrong_sum(how: str) -> None:
    """Between three ranks: each has the true sum, or learns whose bytes were damaged."""
    elems, size = 5000, 3
    total = float(sum(range(size)))
    damages: list[tuple[str, int]] = []
    sums: list[bool] = []

    def afar(own: TcpEndpoint) -> None:
        own.leaves_machine = lambda here, there: True
        own.on_damage = lambda peer, size_bytes: damages.append((peer, size_bytes))

    async def work(group: Group) -> None:
        assert has_data_sockets(group)
        assert isinstance(group, MessageGroup)
        vector = vector_of(np.full(elems, group.rank, np.float32))
        await group.allreduce(vector.all)
        sums.append(bool((vector.tensor == total).all()))
        if group.rank == 0:
            sockets = group._communicator.data_sockets
            assert sockets is not None
            for other in (1, 2):
                one = sockets.to(other)[-1]
                monkeypatch.setattr(one, "socket", Spoilt(plain(one), monkeypatch))
        vector.tensor.fill_(group.rank)
        await group.allreduce(vector.all)
        sums.append(bool((vector.tensor == total).all()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        found = together(size, work, how=how, prepare=afar)
    assert [peer for peer, _ in damages] == ["rank-0"]
    errors = [one for one in found if one is not None]
    assert all(isinstance(one, PeerLostError | DeadlineError) for one in errors), found
    assert {one.peer for one in errors} == {"rank-0"} and "damaged on their way" in str(errors[-1])
    assert all(sums) and len(sums) >= size


# ---- several sockets between two ranks -------------------------------------------------------------


def pairs(count: int) -> tuple[list[DataSocket], list[DataSocket]]:
    """The ends of `count` sockets between two ranks, of which the first one leads."""
    lefts, rights = zip(*(pair() for _ in range(count)), strict=True)
    for end in (*lefts[1:], *rights[1:]):
        end.leads = False
    return list(lefts), list(rights)


@pytest.mark.parametrize("how", ["ring", "halving-doubling", "direct"])
def test_several_sockets_give_the_same_bits(how: str) -> None:
    """Three each way, with operations of one piece and of many right behind each other; every one carries some."""
    size, lengths = 3, (1, 20011, 5000, 700)
    inputs = [
        np.random.default_rng(elems).standard_normal((size, elems)).astype(np.float32) for elems in lengths
    ]

    async def work(group: Group) -> list[bytes]:
        vectors = [vector_of(parts[group.rank]) for parts in inputs]
        await asyncio.gather(*(group.allreduce(vector.all) for vector in vectors))
        return [vector.tensor.numpy().tobytes() for vector in vectors]

    async def by_sockets(group: Group) -> list[bytes]:
        assert isinstance(group, MessageGroup)
        sockets = group._communicator.data_sockets
        assert sockets is not None
        for rank in {0, 1, 2} - {group.rank}:
            assert sorted(one.leads for one in sockets.to(rank)) == [False, False, True]
        return await work(group)

    expected = VirtualRanks(size).run(work, how=how, piece_bytes=1 << 12)
    options = [{"connections": count} for count in (3, 4, 3)]  # the smallest number holds
    assert together(size, by_sockets, how=how, options=options) == expected


def test_a_slow_socket_holds_back_only_its_own_pieces() -> None:
    """Its buffer is full after the first piece, and nobody empties it: the others carry the rest, to their places."""
    lefts, rights = pairs(3)
    elems = 16 * 2000  # pieces of 16 elements
    plain(lefts[0]).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sender, sent = driver([Send(0, 0, elems)], elems, *lefts)
    sent.copy_(torch.arange(elems))
    receiver, got = driver([Recv(0, 0, elems, add=True)], elems, *rights)
    stuck, receiver._readers = receiver._readers[0], receiver._readers[1:]
    thread = threading.Thread(target=sender.run_blocking)
    thread.start()
    due, until = receiver._readers[0]._due, time.monotonic() + WAIT_S

    def come() -> bool:
        """The last piece, and all but a 64th: that is what the slow one's buffer can hold."""
        return got[-1].item() == elems and len(due) * 16 * 64 < elems

    while not come() and time.monotonic() < until:
        receiver.run_blocking(20)
    assert come() and got[1] == 1.0 and due, "the others wait for what the slow one has"
    receiver._readers.append(stuck)
    receiver.run_blocking()
    thread.join(WAIT_S)
    assert torch.equal(got, torch.arange(elems) + 1.0)
    closed(*lefts, *rights)


def test_pieces_of_the_next_operation_wait_in_their_socket() -> None:
    """The next operation's second piece has come over the second socket before this one's piece over the first."""
    lefts, rights = pairs(2)
    for number, elems in ((3, 16), (4, 32)):
        sender, sent = driver([Send(0, 0, elems)], elems, *lefts, number=number)
        sent.fill_(number)
        sender.run_blocking()
    first, got = driver([Recv(0, 0, 16)], 16, *rights, number=3)
    first._readers.reverse()
    first._readers[0].move()
    assert first._readers[0].is_done
    first.run_blocking()
    assert got.tolist() == [3.0] * 16
    second, got = driver([Recv(0, 0, 32)], 32, *rights, number=4)
    second.run_blocking()
    assert got.tolist() == [4.0] * 32
    closed(*lefts, *rights)


def test_another_operation_is_found_where_several_sockets_wait() -> None:
    """The leading socket tells: nothing of this rank's operation can come before it."""
    lefts, rights = pairs(2)
    driver([Send(0, 0, 32)], 32, *lefts, number=4)[0].run_blocking()
    receiver, _ = driver([Recv(0, 0, 16)], 16, *rights, number=3)
    with pytest.raises(ConfigError, match="left does another"):
        receiver.run_blocking()
    closed(*lefts, *rights)


def test_an_operation_whose_pieces_are_missing_is_never_done() -> None:
    """The next operation has come over both sockets, so nothing of this one comes any more."""
    lefts, rights = pairs(2)
    for number in (3, 4):
        driver([Send(0, 0, 32)], 32, *lefts, number=number)[0].run_blocking()
    header_and_piece = 24 + 16 * 4
    assert len(plain(rights[1]).recv(header_and_piece)) == header_and_piece  # of the first, which is lost
    receiver, _ = driver([Recv(0, 0, 32)], 32, *rights, number=3)
    with pytest.raises(PeerLostError, match="pieces are missing"):
        receiver.run_blocking()
    closed(*lefts, *rights)


def test_one_lost_socket_of_several_is_a_lost_rank() -> None:
    """As where there is one socket alone: all ranks learn who it is."""

    async def work(group: Group) -> Any:
        assert isinstance(group, MessageGroup)
        sockets = group._communicator.data_sockets
        assert sockets is not None
        if group.rank == 0:
            await group.allreduce(vector_of(np.ones(9000, np.float32)).all)
            sockets.to(1)[-1].socket.shutdown(socket.SHUT_RDWR)
        else:
            await group.allreduce(vector_of(np.ones(9000, np.float32)).all)
        vector = vector_of(np.ones(3_000_000, np.float32))
        await group.allreduce(vector.all)

    found = together(3, work, options=[{"connections": 3}] * 3, piece_bytes=1 << 16)
    assert all(isinstance(error, PeerLostError | DeadlineError) for error in found), found
    assert {error.peer for error in found} <= {"rank-0", "rank-1"}
