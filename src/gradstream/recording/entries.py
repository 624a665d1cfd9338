"""The entries of a recording, and how they are written: a byte for the kind, then numbers as varints.

The *chunk time* of an event says between which updates of a chunk it happened:

    chunk time = 2 · updates done so far (joins of a sum included) + 1 while an update is under way

A shard writes its entries in the order in which it handled the events. Events of different chunks depend on one
another only through the workers, so a replay keeps the order within each chunk and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Literal, TypeAlias

from gradstream.data.base import BatchRef
from gradstream.errors import DataError

__all__ = [
    "Assignment",
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "FetchAsked",
    "IntervalBegan",
    "Paused",
    "Pushed",
    "Read",
    "Summed",
    "decode",
    "encode",
]


@dataclass(frozen=True, slots=True)
class Pushed:
    """A shard received a contribution to a chunk.

    Args:
        chunk: number of the chunk.
        rank, sequence: rank of the worker, and number of its push.
        chunk_time: chunk time at which it arrived.
        base_version: version of the chunk that the gradient was computed on.
        version: version of the chunk when the contribution arrived; -1 before its initial parameters.
        assign: whether it brings initial parameters.
        absent: whether it has no elements.
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
    """A shard received a fetch that makes it apply the sum of a chunk.

    `number` is 0 if the shard itself asked, for a snapshot. `rank` is then the rank of the shard.
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
        kind, ranks, clock: see `server.shard.event_schedule.ParticipationChange`.
        start_clock: the clock at which a worker that enters begins.
        chunk_times: pairs (chunk, chunk time), of all chunks of the shard.
    """

    kind: Literal["leave", "enter", "keep"]
    ranks: tuple[int, ...]
    clock: int
    start_clock: int
    chunk_times: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """The CRC-32 of a chunk's parameters after `done` of its updates (written by a shard)."""

    chunk: int
    done: int
    crc: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The coordinator's answer to a worker that asked for minibatches (written by the worker)."""

    refs: tuple[BatchRef, ...]
    complete: bool
    interval: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """A snapshot paused a worker; everything that it had computed was in the model (written by the worker).

    Args:
        begun: number of minibatches that the worker had begun.
        ends: whether the worker began no further one.
    """

    begun: int
    ends: bool


@dataclass(frozen=True, slots=True)
class IntervalBegan:
    """A participation schedule let a worker in, or moved it to another phase (written by the worker).

    Args:
        begun: number of minibatches that the worker had begun.
        number: number of the interval.
        phase: the strategy's name of the phase.
    """

    begun: int
    number: int
    phase: str


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
    """The run was over: no entry of this shard is missing."""


Entry: TypeAlias = (
    Pushed | FetchAsked | Read | Summed | Assignment | Paused | Closed | Changed | IntervalBegan | Decided
)


class _Kind(IntEnum):
    """The lower four bits of an entry's first byte."""

    PUSHED = 1
    FETCH_ASKED = 2
    READ = 3
    SUMMED = 4
    ASSIGNMENT = 5
    PAUSED = 6
    CLOSED = 7
    CHANGED = 8
    INTERVAL_BEGAN = 9
    DECIDED = 10


CHANGES: tuple[Literal["leave", "enter", "keep"], ...] = ("leave", "enter", "keep")
MAX_SHIFT = 63
FLAG = 0x10
"""The bit of the first byte for `assign`, `complete` and `ends`; the next higher bit is for `absent`."""


def encode(entry: Entry) -> bytes:
    """An entry as bytes, about seven of them."""
    match entry:
        case Pushed(chunk, rank, sequence, chunk_time, base_version, version, assign, absent):
            first_byte = _Kind.PUSHED | FLAG * assign | 2 * FLAG * absent
            behind = _signed(version - base_version)
            return _bytes(first_byte, (chunk, rank, sequence, chunk_time, behind, version + 1))
        case FetchAsked(chunk, rank, number, chunk_time):
            return _bytes(_Kind.FETCH_ASKED, (chunk, rank, number, chunk_time))
        case Read(chunk, rank, number, attempt, chunk_time, clock):
            return _bytes(_Kind.READ, (chunk, rank, number, attempt, chunk_time, clock))
        case Summed(chunk, done, crc):
            return _bytes(_Kind.SUMMED, (chunk, done, crc))
        case Assignment(refs, complete, interval):
            flat = [number for ref in refs for number in (ref.epoch, ref.partition, ref.batch, ref.count)]
            return _bytes(_Kind.ASSIGNMENT | FLAG * complete, (interval, len(refs), *flat))
        case Paused(begun, ends):
            return _bytes(_Kind.PAUSED | FLAG * ends, (begun,))
        case Closed():
            return _bytes(_Kind.CLOSED, ())
        case Changed(kind, ranks, clock, start_clock, chunk_times):
            head = (CHANGES.index(kind), clock, start_clock, len(ranks), 2 * len(chunk_times))
            return _bytes(_Kind.CHANGED, (*head, *ranks, *chain(*chunk_times)))
        case Decided(round_, ranks, chunk_times):
            head = (round_, len(ranks), 2 * len(chunk_times))
            return _bytes(_Kind.DECIDED, (*head, *ranks, *chain(*chunk_times)))
        case IntervalBegan(begun, number, phase):
            text = phase.encode()
            return _bytes(_Kind.INTERVAL_BEGAN, (begun, number, len(text))) + text


def decode(data: bytes) -> Iterator[Entry]:
    """The entries in bytes that `encode` has made. Raises DataError for other bytes."""
    reader, begin = _Reader(data), 0
    try:
        while (begin := reader.at) < len(data):
            yield _decoded(reader)
    except (IndexError, ValueError) as error:
        text = f"a recording has no whole entry at byte {begin} of its block: {error}"
        raise DataError(text) from error


def _decoded(reader: _Reader) -> Entry:
    first_byte = reader.take(1)[0]
    first, second = bool(first_byte & FLAG), bool(first_byte & 2 * FLAG)
    match first_byte & (FLAG - 1):
        case _Kind.PUSHED:
            chunk, rank, sequence, chunk_time, behind, above = reader.numbers(6)
            version = above - 1
            base_version = version - _unsigned(behind)
            return Pushed(chunk, rank, sequence, chunk_time, base_version, version, first, second)
        case _Kind.FETCH_ASKED:
            return FetchAsked(*reader.numbers(4))
        case _Kind.READ:
            return Read(*reader.numbers(6))
        case _Kind.SUMMED:
            return Summed(*reader.numbers(3))
        case _Kind.ASSIGNMENT:
            interval, count = reader.numbers(2)
            flat = reader.numbers(4 * count)
            refs = tuple(BatchRef(*flat[4 * i : 4 * i + 4]) for i in range(count))
            return Assignment(refs, first, interval)
        case _Kind.PAUSED:
            return Paused(*reader.numbers(1), first)
        case _Kind.CLOSED:
            return Closed()
        case _Kind.CHANGED:
            which, clock, start_clock, num_ranks, num_times = reader.numbers(5)
            ranks = tuple(reader.numbers(num_ranks))
            return Changed(CHANGES[which], ranks, clock, start_clock, reader.pairs(num_times))
        case _Kind.DECIDED:
            round_, num_ranks, num_times = reader.numbers(3)
            return Decided(round_, tuple(reader.numbers(num_ranks)), reader.pairs(num_times))
        case _Kind.INTERVAL_BEGAN:
            begun, number, size = reader.numbers(3)
            return IntervalBegan(begun, number, reader.take(size).decode())
        case other:
            raise DataError(f"a recording has an entry of kind {other}, which this gradstream does not know")


def _signed(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _unsigned(number: int) -> int:
    return -(number + 1) // 2 if number & 1 else number // 2


def _bytes(first_byte: int, numbers: Iterable[int]) -> bytes:
    out = bytearray([first_byte])
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


class _Reader:
    """Reads numbers from bytes. Raises IndexError at their end."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise IndexError("it ends inside an entry")
        return self._data[begin : self.at]

    def numbers(self, count: int) -> list[int]:
        data, at, found = self._data, self.at, list[int]()
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
            found.append(number)
        self.at = at
        return found

    def pairs(self, count: int) -> tuple[tuple[int, int], ...]:
        flat = self.numbers(count)
        return tuple(zip(flat[::2], flat[1::2], strict=True))
