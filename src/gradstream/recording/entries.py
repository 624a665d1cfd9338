"""The entries of a recording, and how they are written: a byte for the kind, then numbers as varints.

A *moment* of a chunk says between which of its updates something happened:

    moment = 2 · updates done so far (sums included) + 1 while one is under way

A shard's entries are in the order in which it took them; those of different chunks depend on one another
only through what workers did, so a replay keeps the order of each chunk alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradstream.data.base import BatchRef
from gradstream.errors import DataError

__all__ = [
    "Changed",
    "Closed",
    "Decided",
    "Entry",
    "FetchAsked",
    "Handed",
    "Pushed",
    "Read",
    "Stood",
    "Summed",
    "Turned",
    "decode",
    "encode",
]


@dataclass(frozen=True, slots=True)
class Pushed:
    """A contribution came to a chunk (shard).

    Args:
        chunk: which.
        rank, sequence: whose, and the number of the push.
        moment: when.
        base_version: version of the chunk that it was computed on.
        version: of the chunk then; -1 before its initial parameters.
        assign: it brings initial parameters.
        absent: it has no elements.
    """

    chunk: int
    rank: int
    sequence: int
    moment: int
    base_version: int
    version: int
    assign: bool = False
    absent: bool = False


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """A fetch came that changes something by itself: what a chunk's sum holds is applied (shard).

    `number` is 0 where the shard itself asked: at a cut, and `rank` is its own then.
    """

    chunk: int
    rank: int
    number: int
    moment: int


@dataclass(frozen=True, slots=True)
class Read:
    """A fetch was given a chunk as it was at a moment (shard).

    Args:
        number: of the fetch, of this worker's.
        attempt: tries of it before this one. The latest of them is what the worker has.
        clock: that the worker was told: of the slowest, as this chunk had seen it.
    """

    chunk: int
    rank: int
    number: int
    attempt: int
    moment: int
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """Somebody takes part that did not, or no longer does (shard).

    Args:
        kind, ranks, clock: see `server.shard.event_schedule.ParticipationChange`.
        told: the clock that who enters was told.
        moments: of all chunks of the shard: (chunk, moment).
    """

    kind: Literal["leave", "enter", "keep"]
    ranks: tuple[int, ...]
    clock: int
    told: int
    moments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """The CRC-32 of a chunk's parameters when so many of its updates were done (shard)."""

    chunk: int
    done: int
    crc: int


@dataclass(frozen=True, slots=True)
class Handed:
    """The coordinator's answer to a worker that asked for minibatches (worker)."""

    refs: tuple[BatchRef, ...]
    complete: bool
    interval: int = 0


@dataclass(frozen=True, slots=True)
class Stood:
    """A cut made a worker stand, with all in the model that it had computed (worker).

    Args:
        begun: minibatches that it had begun.
        ends: it began no further one.
    """

    begun: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Turned:
    """A worker was let in by a strategy that drives, or came to another of its phases (worker).

    Args:
        begun: minibatches that it had begun.
        number: of the turn.
        phase: the strategy's word.
    """

    begun: int
    number: int
    phase: str


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict came: these workers' contributions make the update of a round (shard).

    `moments` are those of all chunks of the shard: (chunk, moment).
    """

    round: int
    ranks: tuple[int, ...]
    moments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The run was over: nothing is missing behind this (shard)."""


Entry: TypeAlias = Pushed | FetchAsked | Read | Summed | Handed | Stood | Closed | Changed | Turned | Decided

PUSHED, ASKED, READ, SUMMED, HANDED, STOOD, CLOSED, CHANGED, TURNED, DECIDED = range(1, 11)
KINDS: tuple[Literal["leave", "enter", "keep"], ...] = ("leave", "enter", "keep")
MAX_SHIFT = 63
FLAG = 0x10
"""Of the kind's byte: assign, complete, ends. Twice as much: absent."""


def encode(entry: Entry) -> bytes:
    """An entry as bytes: some seven of them."""
    match entry:
        case Pushed():
            kind = PUSHED | FLAG * entry.assign | 2 * FLAG * entry.absent
            behind = entry.version - entry.base_version
            numbers = (
                entry.chunk,
                entry.rank,
                entry.sequence,
                entry.moment,
                _signed(behind),
                entry.version + 1,
            )
            return _bytes(kind, numbers)
        case FetchAsked():
            return _bytes(ASKED, (entry.chunk, entry.rank, entry.number, entry.moment))
        case Read():
            head = (entry.chunk, entry.rank, entry.number, entry.attempt, entry.moment)
            return _bytes(READ, (*head, entry.clock))
        case Summed():
            return _bytes(SUMMED, (entry.chunk, entry.done, entry.crc))
        case Handed():
            flat: list[int] = []
            for ref in entry.refs:
                flat += (ref.epoch, ref.partition, ref.batch, ref.count)
            return _bytes(HANDED | FLAG * entry.complete, (entry.interval, len(entry.refs), *flat))
        case Stood():
            return _bytes(STOOD | FLAG * entry.ends, (entry.begun,))
        case Closed():
            return _bytes(CLOSED, ())
        case Changed():
            pairs = [number for pair in entry.moments for number in pair]
            head = (KINDS.index(entry.kind), entry.clock, entry.told, len(entry.ranks), len(pairs))
            return _bytes(CHANGED, (*head, *entry.ranks, *pairs))
        case Decided():
            pairs = [number for pair in entry.moments for number in pair]
            return _bytes(DECIDED, (entry.round, len(entry.ranks), len(pairs), *entry.ranks, *pairs))
        case Turned():
            phase = entry.phase.encode()
            return _bytes(TURNED, (entry.begun, entry.number, len(phase))) + phase


def decode(data: bytes) -> Iterator[Entry]:
    """What `encode` has made, one after the other. Raises DataError for anything else."""
    at = 0
    try:
        while at < len(data):
            kind, at = data[at], at + 1
            entry, at = _decoded(kind, data, at)
            yield entry
    except (IndexError, ValueError) as error:
        raise DataError(f"a recording has no whole entry at byte {at} of its block: {error}") from error


def _decoded(kind: int, data: bytes, at: int) -> tuple[Entry, int]:
    first, second = bool(kind & FLAG), bool(kind & 2 * FLAG)
    match kind & (FLAG - 1):
        case 1:
            (chunk, rank, sequence, moment, behind, above), at = _numbers(data, at, 6)
            version = above - 1
            base_version = version - _unsigned(behind)
            return Pushed(chunk, rank, sequence, moment, base_version, version, first, second), at
        case 2:
            (chunk, rank, number, moment), at = _numbers(data, at, 4)
            return FetchAsked(chunk, rank, number, moment), at
        case 3:
            (chunk, rank, number, attempt, moment, clock), at = _numbers(data, at, 6)
            return Read(chunk, rank, number, attempt, moment, clock), at
        case 4:
            (chunk, done, crc), at = _numbers(data, at, 3)
            return Summed(chunk, done, crc), at
        case 5:
            (interval, count), at = _numbers(data, at, 2)
            flat, at = _numbers(data, at, 4 * count)
            refs = tuple(BatchRef(*flat[4 * i : 4 * i + 4]) for i in range(count))
            return Handed(refs, first, interval), at
        case 6:
            (begun,), at = _numbers(data, at, 1)
            return Stood(begun, first), at
        case 7:
            return Closed(), at
        case 8:
            (which, clock, told, num_ranks, num_pairs), at = _numbers(data, at, 5)
            ranks, at = _numbers(data, at, num_ranks)
            flat, at = _numbers(data, at, num_pairs)
            pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
            return Changed(KINDS[which], tuple(ranks), clock, told, pairs), at
        case 10:
            (round_, num_ranks, num_pairs), at = _numbers(data, at, 3)
            ranks, at = _numbers(data, at, num_ranks)
            flat, at = _numbers(data, at, num_pairs)
            return Decided(round_, tuple(ranks), tuple(zip(flat[::2], flat[1::2], strict=True))), at
        case 9:
            (begun, number, size), at = _numbers(data, at, 3)
            if at + size > len(data):
                raise IndexError("it ends inside a phase")
            return Turned(begun, number, data[at : at + size].decode()), at + size
        case other:
            raise DataError(f"a recording has an entry of kind {other}, which this gradstream does not know")


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
    found = []
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
    return found, at
