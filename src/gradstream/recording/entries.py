"""The entries of a recording, and how they are written: a byte for the kind, then numbers as varints.

The *chunk time* of an event says between which updates of a chunk it happened:

    chunk time = 2 · updates done so far (joins of a sum included) + 1 while an update is under way

A shard writes its entries in the order in which it handled the events. Events of different chunks depend on one
another only through the workers, so a replay keeps the order within each chunk and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradstream.data.base import BatchRef
from gradstream.errors import DataError


@dataclass(frozen=True, slots=True)
class Pushed:
    """A shard received a contribution to a chunk.

    Args:
        chunk: number of the chunk.
        rank, sequence: rank of the worker, and number of its push.
        chunk_time: chunk time at which the contribution arrived.
        base_version: version of the chunk that the gradient was computed on.
        version: version of the chunk when the contribution arrived; -1 before its initial parameters.
        assign: whether the contribution has initial parameters.
        absent: whether the worker pushed no elements for this chunk.
    """

    chunk: int
    rank: int
    sequence: int
    chunk_time: int
    base_version: int
    version: int
    assign: bool = False
    absent: bool = False


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """A shard received a fetch that makes the shard apply the pushes of a chunk that it has summed.

    If the shard does so for a snapshot, `number` is 0 and `rank` is the rank of the shard.
    """

    chunk: int
    rank: int
    number: int
    chunk_time: int


@dataclass(frozen=True, slots=True)
class Read:
    """A shard gave a chunk to a fetch.

    Args:
        chunk: number of the chunk.
        rank, number: rank of the worker, and number of its fetch.
        attempt: number of earlier attempts of the same fetch. The worker uses the latest one.
        chunk_time: chunk time at which the fetch read the chunk.
        clock: clock of the slowest worker, as this chunk knew it, which the answer carries.
    """

    chunk: int
    rank: int
    number: int
    attempt: int
    chunk_time: int
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """Workers began or ceased to take part (written by a shard).

    Args:
        kind, ranks, clock, new_clock: see `server.shard.event_schedule.ParticipationChange`.
        chunk_times: pairs (chunk, chunk time), of all chunks of the shard.
    """

    kind: Literal["leave", "enter", "keep"]
    ranks: tuple[int, ...]
    clock: int
    new_clock: int
    chunk_times: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """The CRC-32 of a chunk's parameters after `done` of its updates (written by a shard)."""

    chunk: int
    done: int
    crc: int


@dataclass(frozen=True, slots=True)
class BatchesAssigned:
    """The coordinator assigned minibatches to a worker that had asked for some (written by the worker)."""

    refs: tuple[BatchRef, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class SnapshotReached:
    """A worker paused for a snapshot, with all of its gradients in the model (written by the worker).

    Args:
        begun: number of minibatches that the worker had begun.
        ends: whether the worker began no further minibatch afterwards.
    """

    begun: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """A quorum leader chose the workers whose contributions make the update of a round (written by a shard).

    `chunk_times` are pairs (chunk, chunk time), of all chunks of the shard.
    """

    round: int
    ranks: tuple[int, ...]
    chunk_times: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The run was over. A recording that ends with this entry is complete."""


Entry: TypeAlias = (
    Pushed | FetchAsked | Read | Summed | BatchesAssigned | SnapshotReached | Closed | Changed | Decided
)

PUSHED, ASKED, READ, SUMMED, ASSIGNED, REACHED, CLOSED, CHANGED, DECIDED = range(1, 10)
KINDS: tuple[Literal["leave", "enter", "keep"], ...] = ("leave", "enter", "keep")
MAX_SHIFT = 63
FLAG = 0x10
"""The bit of a kind's byte for `assign`, `complete` and `ends`; the next higher bit is for `absent`."""


def encode(entry: Entry) -> bytes:
    """An entry as bytes, about seven bytes."""
    match entry:
        case Pushed():
            kind = PUSHED | FLAG * entry.assign | 2 * FLAG * entry.absent
            behind = entry.version - entry.base_version
            numbers = (
                entry.chunk,
                entry.rank,
                entry.sequence,
                entry.chunk_time,
                _signed(behind),
                entry.version + 1,
            )
            return _bytes(kind, numbers)
        case FetchAsked():
            return _bytes(ASKED, (entry.chunk, entry.rank, entry.number, entry.chunk_time))
        case Read():
            head = (entry.chunk, entry.rank, entry.number, entry.attempt, entry.chunk_time)
            return _bytes(READ, (*head, entry.clock))
        case Summed():
            return _bytes(SUMMED, (entry.chunk, entry.done, entry.crc))
        case BatchesAssigned():
            flat: list[int] = []
            for ref in entry.refs:
                flat += (ref.epoch, ref.partition, ref.batch, ref.count)
            return _bytes(ASSIGNED | FLAG * entry.complete, (len(entry.refs), *flat))
        case SnapshotReached():
            return _bytes(REACHED | FLAG * entry.ends, (entry.begun,))
        case Closed():
            return _bytes(CLOSED, ())
        case Changed():
            pairs = [number for pair in entry.chunk_times for number in pair]
            head = (KINDS.index(entry.kind), entry.clock, entry.new_clock, len(entry.ranks), len(pairs))
            return _bytes(CHANGED, (*head, *entry.ranks, *pairs))
        case Decided():
            pairs = [number for pair in entry.chunk_times for number in pair]
            return _bytes(DECIDED, (entry.round, len(entry.ranks), len(pairs), *entry.ranks, *pairs))


def decode(data: bytes, name: str = "a recording") -> Iterator[Entry]:
    """The entries in bytes that `encode` has made. Raises DataError for other bytes; `name` says whose they are."""
    at = 0
    try:
        while at < len(data):
            kind, at = data[at], at + 1
            entry, at = _decoded(kind, data, at)
            yield entry
    except (IndexError, ValueError) as error:
        raise DataError(
            f"{name} has no complete entry at byte {at} of a block: {error}; read it with the version of gradstream "
            "that made it, or put it back from a copy"
        ) from error


def _decoded(kind: int, data: bytes, at: int) -> tuple[Entry, int]:
    first, second = bool(kind & FLAG), bool(kind & 2 * FLAG)
    match kind & (FLAG - 1):
        case 1:
            (chunk, rank, sequence, chunk_time, behind, above), at = _numbers(data, at, 6)
            version = above - 1
            base_version = version - _unsigned(behind)
            return Pushed(chunk, rank, sequence, chunk_time, base_version, version, first, second), at
        case 2:
            (chunk, rank, number, chunk_time), at = _numbers(data, at, 4)
            return FetchAsked(chunk, rank, number, chunk_time), at
        case 3:
            (chunk, rank, number, attempt, chunk_time, clock), at = _numbers(data, at, 6)
            return Read(chunk, rank, number, attempt, chunk_time, clock), at
        case 4:
            (chunk, done, crc), at = _numbers(data, at, 3)
            return Summed(chunk, done, crc), at
        case 5:
            (count,), at = _numbers(data, at, 1)
            flat, at = _numbers(data, at, 4 * count)
            refs = tuple(BatchRef(*flat[4 * i : 4 * i + 4]) for i in range(count))
            return BatchesAssigned(refs, first), at
        case 6:
            (begun,), at = _numbers(data, at, 1)
            return SnapshotReached(begun, first), at
        case 7:
            return Closed(), at
        case 8:
            (which, clock, new_clock, num_ranks, num_pairs), at = _numbers(data, at, 5)
            ranks, at = _numbers(data, at, num_ranks)
            flat, at = _numbers(data, at, num_pairs)
            pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
            return Changed(KINDS[which], tuple(ranks), clock, new_clock, pairs), at
        case 9:
            (round_, num_ranks, num_pairs), at = _numbers(data, at, 3)
            ranks, at = _numbers(data, at, num_ranks)
            flat, at = _numbers(data, at, num_pairs)
            return Decided(round_, tuple(ranks), tuple(zip(flat[::2], flat[1::2], strict=True))), at
        case other:
            raise ValueError(f"it is of kind {other}, expected 1 to 9")


def _signed(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _unsigned(number: int) -> int:
    return -(number + 1) // 2 if number & 1 else number // 2


def _bytes(kind: int, numbers: Iterable[int]) -> bytes:
    out = bytearray([kind])
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def _numbers(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    numbers = []
    for _ in range(count):
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > MAX_SHIFT:
                raise ValueError("a number of more than 70 bits")
        numbers.append(number)
    return numbers, at
