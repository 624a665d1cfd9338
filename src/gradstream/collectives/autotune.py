"""Chooses the algorithm of an allreduce by the length of the vector: the cheapest by its cost formula.

The formulas use the costs of messages and sums that are measured among the ranks of the group.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradstream.collectives.algorithms import ALGORITHMS, PARTS
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.executor import carry_out
from gradstream.collectives.schedule import DependencyPlan, Operation, Recv, Schedule, Send
from gradstream.runtime.base import Work

LARGEST_BYTES = 1 << 40

RING = "ring"
TIE = 0.02
"""The ring is chosen unless another algorithm is cheaper by more than this part. Its ranks talk to only two neighbours,
and hide the latency of all steps but the first behind pieces in transit. So it is the fastest for long vectors among
algorithms that the formulas hardly distinguish."""

SHORT_ELEMS = 1
FIRST_ELEMS = 1 << 14  # 64 KiB: short enough for any network
LONG_ELEMS = 1 << 18  # 1 MiB, or as many as take `PATIENCE_S`
PATIENCE_S = 0.02
TIMES = 8  # even: see `_typical`
FAR_S = 5e-3
"""Messages that take this long are measured less often: processor time is negligible next to their transfer."""
FAR_TIMES = 2
FAR_LENGTH = 3.0
"""A message that takes less than this many times as long as a short one may have waited a round trip for TCP alone."""

_FIGURES = struct.Struct("<4d")
_SECONDS = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of messages and sums among the ranks of a group, as measured.

    Args:
        alpha_s: seconds that a message takes from one rank to another, however short it is (latency α).
        beta_s_byte: seconds for each byte of a message (β).
        gamma_s_byte: seconds to add each byte of a vector to another vector (γ).
        message_s: seconds of a rank's processor for each further message at the same time (LogP's overhead o).
    """

    alpha_s: float
    beta_s_byte: float
    gamma_s_byte: float
    message_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest algorithm for each size, for one group.

    Args:
        size: number of ranks.
        figures: costs, which must be the same at all ranks, or the ranks would choose different algorithms.
    """

    size: int
    figures: MeasuredCosts

    def seconds(self, algorithm: str, num_bytes: int) -> float:
        """Seconds that the formula predicts for an allreduce of `num_bytes`."""
        cost, at = ALGORITHMS[algorithm].cost(self.size), self.figures
        return cost.seconds(num_bytes, at.alpha_s, at.beta_s_byte, at.gamma_s_byte, at.message_s)

    def allreduce(self, num_bytes: int) -> str:
        """Name of the algorithm for vectors of `num_bytes`."""
        return self._cheapest(ALGORITHMS, num_bytes)

    def parts(self, num_bytes: int) -> str:
        """Name of the algorithm for a reduce-scatter or all-gather; `num_bytes` is the length of the whole vector."""
        return self._cheapest([name for name, parts in PARTS.items() if parts.fits(self.size)], num_bytes)

    def _cheapest(self, names: Iterable[str], num_bytes: int) -> str:
        """The ring, unless another one is cheaper by more than `TIE`; the first of others that cost the same."""
        costs = {name: self.seconds(name, num_bytes) for name in names}
        cheapest = min(costs, key=costs.__getitem__)
        return RING if costs.get(RING, math.inf) <= (1 + TIE) * costs[cheapest] else cheapest

    def table(self) -> Mapping[int, str]:
        """The choice for all sizes. A key is the number of bytes from which on its algorithm is chosen."""
        chosen, at = {0: self.allreduce(0)}, 0
        while at < LARGEST_BYTES:
            last, following = chosen[max(chosen)], max(1, 2 * at)
            if self.allreduce(following) != last:
                edge = self._edge(at, following)
                chosen[edge] = self.allreduce(edge)
                at = edge
            else:
                at = following
        return chosen

    def _edge(self, below: int, above: int) -> int:
        """The first number of bytes after `below` for which another algorithm is chosen."""
        name = self.allreduce(below)
        while above - below > 1:
            middle = (below + above) // 2
            if self.allreduce(middle) == name:
                below = middle
            else:
                above = middle
        return above


async def measure(
    communicator: Communicator, long_elems: int | None = None, piece_elems: int | None = None
) -> MeasuredCosts:
    """Measures messages of two sizes round a ring, short messages to all ranks at once, and a sum.

    Every rank gets the same figures: the highest of all ranks, since all wait for the slowest. This takes some tens of
    short messages, and six long ones. Where messages take long it is four short ones, and four of 64 KiB, then of 256
    KiB and 1 MiB until one takes `FAR_LENGTH` times as long as a short one; or four of `long_elems`.

    Args:
        communicator: connected ranks. Messages use the same connections as operations.
        long_elems: float32 elements of a long message; None takes a megabyte, or less on a slow network.
        piece_elems: elements that go at once; None sends the whole message.

    Raises:
        PeerLostError, DeadlineError: names a rank; the group is broken.
    """
    if communicator.size == 1:
        return MeasuredCosts(0.0, 0.0, 0.0, 0.0)
    around = _around(communicator.rank, communicator.size)
    to_all = _to_all(communicator.rank, communicator.size)
    await _exchanges(communicator, to_all, 2)  # the first message takes longer
    alpha_s = await _exchange_s(communicator, around(SHORT_ELEMS), FAR_TIMES)
    longest_s = max(await _all_gather_s(communicator, alpha_s))
    if longest_s > FAR_S:
        elems, long_s = await _far(communicator, around, longest_s, long_elems, piece_elems)
        alpha_s = overhead_s = longest_s
    else:
        alpha_s = await _exchange_s(communicator, around(SHORT_ELEMS), TIMES)
        overhead_s = await _exchange_s(communicator, to_all, TIMES)
        elems, times = (long_elems, 6) if long_elems else await _affordable(communicator, around)
        long_s = await _exchange_s(communicator, around(elems), times, piece_elems)
    own = (
        alpha_s,
        max(0.0, long_s - alpha_s) / (4 * elems),
        await _sum_s(communicator) / (4 * LONG_ELEMS),
        max(0.0, overhead_s - alpha_s) / max(1, communicator.size - 2),
    )
    figures = [_FIGURES.unpack(word) for word in await communicator.all_gather_bytes(_FIGURES.pack(*own))]
    return MeasuredCosts(*(max(column) for column in zip(*figures, strict=True)))


async def _affordable(communicator: Communicator, around: Callable[[int], Schedule]) -> tuple[int, int]:
    """(elements, repetitions) of long messages: fewer where the network is slow, and its bytes count."""
    first_s = max(await _all_gather_s(communicator, await _exchange_s(communicator, around(FIRST_ELEMS), 2)))
    elems = min(LONG_ELEMS, max(FIRST_ELEMS, int(FIRST_ELEMS * PATIENCE_S / max(first_s, 1e-9))))
    return elems, 6 if elems == LONG_ELEMS else 4


async def _far(
    communicator: Communicator,
    around: Callable[[int], Schedule],
    alpha_s: float,
    long_elems: int | None,
    piece_elems: int | None,
) -> tuple[int, float]:
    """(elements, seconds) of a message that takes `FAR_LENGTH` times as long as a short one, or of a megabyte.

    Each size is sent twice before it is measured: in the beginning TCP sends but 14 KB at once, and waits a round trip
    for leave to send twice as much. The seconds are the most of all ranks, as `alpha_s` are: a rank whose neighbours
    are near has its message late where another one's is.
    """
    elems = long_elems or FIRST_ELEMS
    while True:
        await _exchanges(communicator, around(elems), FAR_TIMES)
        own_s = await _exchange_s(communicator, around(elems), FAR_TIMES, piece_elems)
        long_s = max(await _all_gather_s(communicator, own_s))
        if long_elems or elems >= LONG_ELEMS or long_s >= FAR_LENGTH * alpha_s:
            return elems, long_s
        elems *= 4


def _around(rank: int, size: int) -> Callable[[int], Schedule]:
    def schedule(elems: int) -> Schedule:
        return [Send((rank + 1) % size, 0, elems), Recv((rank - 1) % size, elems, 2 * elems)]

    return schedule


def _to_all(rank: int, size: int) -> Schedule:
    others = [(rank + turn) % size for turn in range(1, size)]
    return [
        *(Send(peer, 0, 1) for peer in others),
        *(Recv(peer, 1 + turn, 2 + turn) for turn, peer in enumerate(reversed(others))),
    ]


async def _exchange_s(
    communicator: Communicator, schedule: Schedule, times: int, piece_elems: int | None = None
) -> float:
    return _typical(await _exchanges(communicator, schedule, times, piece_elems))


async def _exchanges(
    communicator: Communicator, schedule: Schedule, times: int, piece_elems: int | None = None
) -> list[float]:
    """Seconds of each of some exchanges, one after the other."""
    plan, everybody = DependencyPlan.of(schedule), range(communicator.size)
    elems = max(step.stop for step in schedule)
    tensor = _zeros(communicator, elems)
    operation = Operation(0, 0, "measuring")

    def once() -> Awaitable[None]:
        return communicator.guarded(
            carry_out(communicator, everybody, operation, plan, tensor, piece_elems or elems)
        )

    return [await _timed_s(communicator, once) for _ in range(times)]


def _typical(took_s: Sequence[float]) -> float:
    """Seconds of one exchange: the median over the means of consecutive pairs.

    One of two ranks may be ahead. It then waits twice as long in every other exchange, and not at all in
    those between; for the other rank it is the other way round.
    """
    pairs = zip(took_s[::2], took_s[1::2], strict=True)
    return statistics.median(map(statistics.mean, pairs))


async def _sum_s(communicator: Communicator) -> float:
    runtime = communicator.runtime
    vector = _zeros(communicator, 2 * LONG_ELEMS)
    into, part = vector[:LONG_ELEMS], vector[LONG_ELEMS:]

    def add(_: object) -> None:
        np.add(into.numpy(), part.numpy(), out=into.numpy())

    work = Work("reduce", elems=LONG_ELEMS)
    return min(
        [
            await _timed_s(communicator, lambda: runtime.compute(add, work=work, lane="exchange"))
            for _ in range(3)
        ]
    )


def _zeros(communicator: Communicator, elems: int) -> torch.Tensor:
    """Allocated outside the node's memory, which counts only what lasts."""
    return torch.zeros(elems, device="meta" if communicator.runtime.memory.shape_only else "cpu")


async def _timed_s(communicator: Communicator, work: Callable[[], Awaitable[object]]) -> float:
    begun_ns = communicator.runtime.now()
    await work()
    return (communicator.runtime.now() - begun_ns) / 1e9


async def _all_gather_s(communicator: Communicator, seconds: float) -> list[float]:
    return [_SECONDS.unpack(word)[0] for word in await communicator.all_gather_bytes(_SECONDS.pack(seconds))]
