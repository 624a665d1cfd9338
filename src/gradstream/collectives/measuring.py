"""What messages and sums cost among the ranks of a mesh: measured once, and agreed on by all."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from gradstream.collectives.autotune import MeasuredCosts
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.executor import carry_out
from gradstream.collectives.operation import Operation
from gradstream.collectives.plan import DependencyPlan
from gradstream.collectives.schedule import Recv, Schedule, Send
from gradstream.runtime.base import Work

__all__ = ["measure"]

SHORT_ELEMS = 1
FIRST_ELEMS = 1 << 14  # 64 KiB: short enough for any network
LONG_ELEMS = 1 << 18  # 1 MiB, unless the first already takes long
PATIENCE_S = 0.02
TIMES = 8  # even: see `_typical`

_FIGURES = struct.Struct("<4d")
_SECONDS = struct.Struct("<d")


async def measure(
    mesh: Communicator, long_elems: int | None = None, piece_elems: int | None = None
) -> MeasuredCosts:
    """Pings of two sizes round a ring, a short one to everybody at once, and a sum.

    Every rank gets the same figures: those of the rank at which they are highest, since all wait for
    the slowest. Takes some tens of short messages, and six long ones.

    Args:
        mesh: of ranks that have met. Messages go as those of its groups do: by its lines, where it has some.
        long_elems: float32 of a long message; None takes a megabyte, or less where that takes long.
        piece_elems: what goes at once; None is the whole message.

    Raises:
        PeerLostError, DeadlineError: naming a rank; the mesh is broken.
    """
    if mesh.size == 1:
        return MeasuredCosts(0.0, 0.0, 0.0, 0.0)
    around = _around(mesh.rank, mesh.size)
    await _exchange_s(mesh, _everybody(mesh.rank, mesh.size), 2)  # the first message takes longer
    alpha_s = await _exchange_s(mesh, around(SHORT_ELEMS), TIMES)
    crowd_s = await _exchange_s(mesh, _everybody(mesh.rank, mesh.size), TIMES)
    elems, times = (long_elems, 6) if long_elems else await _bearable(mesh, around)
    long_s = await _exchange_s(mesh, around(elems), times, piece_elems)
    own = (
        alpha_s,
        max(0.0, long_s - alpha_s) / (4 * elems),
        await _sum_s(mesh) / (4 * LONG_ELEMS),
        max(0.0, crowd_s - alpha_s) / max(1, mesh.size - 2),
    )
    figures = [_FIGURES.unpack(word) for word in await mesh.swap(_FIGURES.pack(*own))]
    return MeasuredCosts(*(max(column) for column in zip(*figures, strict=True)))


async def _bearable(mesh: Communicator, around: Callable[[int], Schedule]) -> tuple[int, int]:
    """Elements of a long message, and how often: fewer where the network is slow."""
    first_s = max(await _swap_s(mesh, await _exchange_s(mesh, around(FIRST_ELEMS), 2)))
    return (LONG_ELEMS, 6) if first_s < PATIENCE_S else (FIRST_ELEMS, 4)


def _around(rank: int, size: int) -> Callable[[int], Schedule]:
    def schedule(elems: int) -> Schedule:
        return [Send((rank + 1) % size, 0, elems), Recv((rank - 1) % size, elems, 2 * elems)]

    return schedule


def _everybody(rank: int, size: int) -> Schedule:
    others = [(rank + turn) % size for turn in range(1, size)]
    return [
        *(Send(peer, 0, 1) for peer in others),
        *(Recv(peer, 1 + turn, 2 + turn) for turn, peer in enumerate(reversed(others))),
    ]


async def _exchange_s(
    mesh: Communicator, schedule: Schedule, times: int, piece_elems: int | None = None
) -> float:
    plan, everybody = DependencyPlan.of(schedule), range(mesh.size)
    elems = max(step.stop for step in schedule)
    tensor = _zeros(mesh, elems)
    operation = Operation(0, 0, "measuring")

    def once() -> Awaitable[None]:
        return mesh.guarded(carry_out(mesh, everybody, operation, plan, tensor, piece_elems or elems))

    return _typical([await _timed_s(mesh, once) for _ in range(times)])


def _typical(took_s: Sequence[float]) -> float:
    """Seconds of one exchange: the median of the mean of each two that followed one another.

    Of two ranks one may be ahead. It then waits twice as long in every other exchange and not at all
    between, and the other rank the other way round.
    """
    pairs = zip(took_s[::2], took_s[1::2], strict=True)
    return statistics.median(map(statistics.mean, pairs))


async def _sum_s(mesh: Communicator) -> float:
    runtime = mesh.runtime
    vector = _zeros(mesh, 2 * LONG_ELEMS)
    into, part = vector[:LONG_ELEMS], vector[LONG_ELEMS:]

    def add(_: object) -> None:
        np.add(into.numpy(), part.numpy(), out=into.numpy())

    work = Work("reduce", elems=LONG_ELEMS)
    return min(
        [await _timed_s(mesh, lambda: runtime.compute(add, work=work, lane="exchange")) for _ in range(3)]
    )


def _zeros(mesh: Communicator, elems: int) -> torch.Tensor:
    """Not from the node's memory: its bill is of what lasts."""
    return torch.zeros(elems, device="meta" if mesh.runtime.memory.shape_only else "cpu")


async def _timed_s(mesh: Communicator, work: Callable[[], Awaitable[object]]) -> float:
    begun_ns = mesh.runtime.now()
    await work()
    return (mesh.runtime.now() - begun_ns) / 1e9


async def _swap_s(mesh: Communicator, seconds: float) -> list[float]:
    return [_SECONDS.unpack(word)[0] for word in await mesh.swap(_SECONDS.pack(seconds))]
