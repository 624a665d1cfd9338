"""Sockets between parts: what is sent arrives in order, no sender waits, and a lost or lying part ends a wait."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from gradstream.errors import PeerLostError
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import PeerSocket
from gradstream.worker.parts.sockets import PartSockets

NAMES = ["worker-0", "part1-0"]
LARGE = 1 << 22
"""Elements that no system holds in a socket's buffer."""

ROOM = 4 * LARGE
"""Bytes of the largest tensor."""


class OneSocket:
    """An endpoint that has one data socket, or none."""

    def __init__(self, connected: socket.socket | None, checked: bool = False) -> None:
        self.asked = False
        self._found = None if connected is None else PeerSocket(connected, checked)

    async def data_socket(self, peer: str, name: str, *, dial: bool, copies: bool) -> PeerSocket | None:
        self.asked = True
        assert copies and dial == (peer == NAMES[1]), "one side dials"
        return self._found


async def agree(mine: bool) -> bool:
    """As if the other part said yes."""
    return mine


def part_sockets(
    part: int, end: socket.socket, checked: bool = False, core: Any = None
) -> tuple[PartSockets, OneSocket]:
    """The sockets of a part, of which this is the end, and its endpoint."""
    runtime, endpoint = RealRuntime(NAMES[part], core=core), OneSocket(end, checked)
    return PartSockets(runtime, endpoint, NAMES, part, lambda tag: ROOM), endpoint  # type: ignore[arg-type]


def make_pair(
    checked: bool = False, core: Any = None, agreed: Callable[[bool], Any] = agree
) -> tuple[list[PartSockets], list[bool], tuple[socket.socket, socket.socket]]:
    """(sockets of two parts, whether they are connected, what they are made of)."""
    ends = socket.socketpair()
    pair = [part_sockets(part, end, checked, core)[0] for part, end in enumerate(ends)]

    async def connect() -> list[bool]:
        return [await one.connect(agreed) for one in pair]

    return pair, asyncio.run(connect()), ends


def check_order() -> None:
    """Sends a large tensor and small ones before anybody reads, which must not block. Raises if any is another."""
    (left, right), _, _ = make_pair()
    sent = [(0, LARGE), (1, 3), (1, 5), (0, 1), (2, 4)]  # (tag, elements)
    tensors = {one: torch.arange(one[1], dtype=torch.float32) + one[0] for one in sent}
    try:
        for tag, elems in sent:
            left.send(1, tag, tensors[tag, elems])
        with right._changed:
            assert right._changed.wait_for(lambda: (0, 2) in right._arrived, timeout=10)
        for tag, elems in sorted(sent, key=lambda one: one[0]):
            came = right.receive(0, tag, 4 * elems, "a tensor").view(torch.float32)
            assert torch.equal(came, tensors[tag, elems])
    finally:
        left.close()
        right.close()


def test_tensors_of_a_tag_come_in_order_and_no_sender_waits() -> None:
    check_order()


def test_tensors_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(self: PartSockets, key: tuple[int, int]) -> torch.Tensor:
        return self._arrived[key].pop()

    monkeypatch.setattr(PartSockets, "_take", newest)
    with pytest.raises(PeerLostError, match="4 bytes came for a tensor, expected 16777216"):
        check_order()


@pytest.mark.parametrize("end", ["the other part closes", "the system breaks it", "this part gives up"])
def test_what_ends_a_wait(end: str) -> None:
    (left, right), _, ends = make_pair()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(right.receive, 0, 7, 12, "a value")
        match end:
            case "the other part closes":
                left.close()
            case "the system breaks it":
                ends[0].shutdown(socket.SHUT_RDWR)
            case _:
                right.close()
        with pytest.raises(
            PeerLostError, match="worker-0: its socket to part1-0 broke: the connection was closed"
        ):
            waiting.result(timeout=10)
    with pytest.raises(PeerLostError):
        right.send(0, 7, torch.ones(LARGE))
    left.close()
    right.close()


def test_what_came_before_the_end_is_there() -> None:
    (left, right), _, _ = make_pair()
    left.send(1, 7, torch.ones(3))
    left.close()
    assert right.receive(0, 7, 12, "a value").view(torch.float32).tolist() == [1, 1, 1]
    with pytest.raises(PeerLostError):
        right.receive(0, 7, 12, "a value")
    right.close()


def test_a_header_that_lies_is_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (left, right), _, ends = make_pair()
    taken, empty = list[int](), torch.empty

    def noted(size: int, **how: Any) -> torch.Tensor:
        taken.append(size)
        return empty(size, **how)

    monkeypatch.setattr(torch, "empty", noted)
    left.send(1, 7, torch.ones(LARGE))
    assert len(right.receive(0, 7, ROOM, "a value")) == ROOM
    ends[0].sendall(struct.pack("<QQ", 7, ROOM + 1))
    text = f"part1-0 broke: it announces {ROOM + 1} bytes under tag 7, expected at most {ROOM}"
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(right.receive, 0, 7, ROOM + 1, "a value")
        try:
            with pytest.raises(PeerLostError, match=text):
                waiting.result(timeout=10)
        finally:
            left.close()
            right.close()
    assert taken == [ROOM]


def test_a_tensor_of_another_size_is_refused() -> None:
    (left, right), _, _ = make_pair()
    left.send(1, 7, torch.ones(2))
    with pytest.raises(PeerLostError, match="part1-0 broke: 8 bytes came for a value, expected 12"):
        right.receive(0, 7, 12, "a value")
    left.close()
    right.close()


def test_no_part_dials_before_all_are_there() -> None:
    ends = socket.socketpair()
    (left, dialling), (right, _) = (part_sockets(part, end) for part, end in enumerate(ends))

    async def connect() -> list[bool]:
        words, asked = [asyncio.Event(), asyncio.Event()], asyncio.Event()

        async def agreed(mine: bool, part: int) -> bool:
            words[part].set()
            asked.set()
            await words[1 - part].wait()
            return mine

        first = asyncio.ensure_future(left.connect(partial(agreed, part=0)))
        await asked.wait()
        assert not dialling.asked
        return [*await asyncio.gather(right.connect(partial(agreed, part=1)), first)]

    assert asyncio.run(connect()) == [True, True]
    assert dialling.asked
    left.close()
    right.close()


def test_the_error_of_a_silent_part_ends_a_wait() -> None:
    (left, right), _, _ = make_pair()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(right.receive, 0, 7, 12, "a value")
        while right.awaited is None:
            threading.Event().wait(0.001)
        assert right.awaited == (0, "a value")
        right.fail(ValueError("silent"))
        with pytest.raises(ValueError, match="silent"):
            waiting.result(timeout=10)
    left.close()
    right.close()


@pytest.mark.parametrize("why", ["leaves the machine", "a shared thread", "the other part has none"])
def test_parts_that_have_no_sockets_say_so(why: str) -> None:
    async def no(mine: bool) -> bool:
        return False

    with ThreadPoolExecutor(1) as core:
        pair, connected, ends = make_pair(
            checked=why == "leaves the machine",
            core=core if why == "a shared thread" else None,
            agreed=no if why == "the other part has none" else agree,
        )
        assert connected == [False, False]
        assert [end.fileno() for end in ends] == [-1, -1]
        for one in pair:
            one.close()
