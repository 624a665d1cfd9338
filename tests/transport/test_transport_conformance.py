"""Every carrier keeps the promises of transport.base; planted faults are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gradstream.errors import DeadlineError, GradstreamError
from gradstream.memory import Span
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.testing import pieces, refusal_checks, stream_checks
from gradstream.testing.pairs import Run, grpc_pairs, memory_pairs, shm_pairs, tcp_pairs
from gradstream.testing.pieces import Check, ConformanceError, MakePair
from gradstream.testing.suites import CHECKS, run_check
from gradstream.transport import simulated
from gradstream.transport.base import Lent, Stream
from gradstream.transport.endpoint import AccessControl, EndpointCore
from gradstream.transport.simulated import Packet, StreamQueue, _Card, _End, _Pipe
from gradstream.transport.stream import Failure, StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import FrameError

AUTHORITY = CertificateAuthority()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "carrier",
    [
        memory_pairs,
        grpc_pairs,
        partial(grpc_pairs, connections=3),
        tcp_pairs,
        partial(tcp_pairs, 3),
        partial(tcp_pairs, 1, AUTHORITY.issue),
        partial(tcp_pairs, 3, AUTHORITY.issue),
        shm_pairs,
    ],
    ids=[
        "memory",
        "grpc",
        "grpc, 3 connections",
        "tcp",
        "tcp, 3 connections",
        "TLS",
        "TLS, 3 connections",
        "shm",
    ],
)
def test_carrier(carrier: Callable[[], tuple[Run, MakePair]], check: Check) -> None:
    run, make_pair = carrier()
    run(run_check(check, make_pair))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("carrier", [grpc_pairs, partial(tcp_pairs, 3)], ids=["grpc", "tcp, 3 connections"])
def test_carrier_with_checksums(
    carrier: Callable[[], tuple[Run, MakePair]], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndpointCore, "leaves_machine", staticmethod(lambda own, peer: True))
    run, make_pair = carrier()
    run(run_check(check, make_pair))


def _lands_shuffled(stream_queue: StreamQueue) -> None:
    if stream_queue._flying:
        packets = list(stream_queue._flying)
        stream_queue._flying.clear()
        stream_queue._flying.extend(reversed(packets))
        stream_queue._receiving.put(stream_queue, stream_queue._flying.popleft())


class _FirstComeFirstServed(_Card):
    """A card with one queue for everything."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: deque[tuple[StreamQueue, Packet]] = deque()

    def put(self, stream_queue: StreamQueue, packet: Packet) -> None:
        self._waiting.append((stream_queue, packet))
        if not self._busy:
            self._serve_next()

    def _serve_next(self) -> None:
        if self._waiting:
            self._serve(*self._waiting.popleft())


def _twice(stream_queue: StreamQueue, packet: Packet) -> None:
    packet.deliver()
    packet.deliver()


def _kept(end: _End, frame: v1.Frame, payload: torch.Tensor | None) -> None:
    """Neither copies the payload nor waits for it to be sent."""
    assert end.far is not None
    header = v1.Frame()
    header.CopyFrom(frame)
    end.out.send(Packet(64, lambda far=end.far: far.take(header, payload)))  # type: ignore[misc]


def _deaf(stream: StreamCore, error: FrameError) -> None:
    """Lets what breaks the protocol pass."""


def _no_refusal(access: AccessControl, opened: v1.Open, *_: object, **__: object) -> v1.Refuse | None:
    """Serves everybody."""
    known = opened.method in access.services
    return None if known else v1.Refuse(code=v1.UNKNOWN_METHOD, message=f"no {opened.method}")


async def _never(stream: StreamCore, on: list[str]) -> None:
    """Says nothing while waiting."""


async def _keeps(stream: StreamCore, frame: v1.Frame, span: Span, silence_s: float | None = None) -> Lent:
    """Forgets to give back what was lent."""
    span.vector.borrow(span.start, span.stop, write=False, to="the carrier")
    return await _LEND(stream, frame, span, silence_s)


_LEND = StreamCore.lend


def _drops_nothing(stream: StreamCore, failure: Failure, *, drop: bool) -> None:
    _CLOSE(stream, failure, drop=False)


_CLOSE = StreamCore._close

FAULTS: list[tuple[str, Any, str, Any, Check]] = [
    ("reorders", StreamQueue, "_land", _lands_shuffled, stream_checks.order),
    ("duplicates", StreamQueue, "arrive", _twice, stream_checks.order),
    ("ignores credit", StreamCore, "_may_send", lambda stream: True, stream_checks.credit),
    (
        "ignores the caller's window",
        StreamCore,
        "_may_send",
        lambda stream: True,
        stream_checks.callers_window,
    ),
    ("one queue for all", simulated, "_Card", _FirstComeFirstServed, stream_checks.priority),
    ("delivers after a cancel", StreamCore, "_close", _drops_nothing, stream_checks.cancel_by_caller),
    ("takes payloads by reference", _End, "transmit", _kept, pieces.taken_over),
    ("keeps what it was lent", StreamCore, "lend", _keeps, pieces.lending),
    ("does not check chunks", StreamCore, "reject", _deaf, refusal_checks.bad_chunks),
    ("does not check identities", AccessControl, "objection", _no_refusal, refusal_checks.identity),
    ("is silent while waiting", StreamCore, "waiting", _never, stream_checks.waiting_resets),
    ("does not tell of a death", _Pipe, "lose", lambda pipe, node: None, stream_checks.peer_death),
]


@pytest.mark.parametrize(
    ("owner", "name", "fault", "check"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, check: Check
) -> None:
    monkeypatch.setattr(owner, name, fault)
    run, make_pair = memory_pairs()
    with pytest.raises((ConformanceError, GradstreamError)):
        run(run_check(check, make_pair))


def test_writing_late_into_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A carrier that holds on to `into` after a deadline and fills it when the elements come."""

    async def holds_on(endpoint: EndpointCore, peer: str, tag: int, into: Span, silence_s: float) -> None:
        async def fill(stream: Stream) -> None:
            while (received := await stream.recv()) is not None:
                if received.payload is not None:
                    into.tensor[: received.frame.chunk.elems] = received.payload
            await stream.send(v1.Frame(body=v1.Body()))

        endpoint.serve("tensor", fill)
        await endpoint.runtime.sleep(silence_s)
        raise DeadlineError(peer, "silent")

    monkeypatch.setattr(EndpointCore, "recv", holds_on)
    run, make_pair = memory_pairs()
    with pytest.raises(ConformanceError):
        run(run_check(pieces.ownership_after_deadline, make_pair))
