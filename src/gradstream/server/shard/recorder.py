"""Notes the order in which a shard takes what comes, so that it can be repeated."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable

import torch

from gradstream.recording import Changed, Closed, Decided, FetchAsked, Log, Pushed, Read, Summed
from gradstream.server.aggregation import FetchTerms, PushHeader
from gradstream.server.quorum import QuorumDecision
from gradstream.server.shard.event_schedule import ArrivalOrder, Change, Chunks, Fetched, Go, Updating
from gradstream.wire.window import SequenceWindow

__all__ = ["SUM_EVERY", "ShardRecorder", "crc_of"]

SUM_EVERY = 64
"""Updates of a chunk from one CRC-32 of its parameters to the next."""


class ShardRecorder(ArrivalOrder):
    """An `Order` that lets everything happen as it comes, and notes it.

    A second copy of a contribution changes nothing, so only the first is noted.

    Args:
        log: where to.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._done: defaultdict[int, int] = defaultdict(int)  # updates, by chunk
        self._came: defaultdict[tuple[int, int], SequenceWindow] = defaultdict(SequenceWindow)
        self._chunks: Chunks | None = None  # until the model is registered

    def begin(self, chunks: Chunks) -> None:
        """See `Order`."""
        self._chunks = chunks

    def push(self, chunk: int, new: PushHeader, assign: bool, go: Go) -> None:
        """See `Order`."""
        came = self._came[chunk, new.rank]
        if new.sequence not in came:
            came.add(new.sequence)
            assert self._chunks is not None
            moment, version = self._moment(chunk), self._chunks.version(chunk)
            self.log.add(
                Pushed(chunk, new.rank, new.sequence, moment, new.base_version, version, assign, new.empty)
            )
        go()

    def ask(self, chunk: int, fetch: Fetched, terms: FetchTerms, go: Callable[[FetchTerms], None]) -> None:
        """See `Order`."""
        if fetch.acts:
            self.log.add(FetchAsked(chunk, fetch.rank, fetch.number, self._moment(chunk)))
        go(terms)

    def read(self, chunk: int, fetch: Fetched, clock: int) -> int:
        """See `Order`."""
        if fetch.number:
            moment = self._moment(chunk)
            self.log.add(Read(chunk, fetch.rank, fetch.number, fetch.attempt, moment, clock))
        return clock

    def change(self, change: Change, go: Callable[[], int]) -> int:
        """See `Order`."""
        moments = self._moments()
        told = go()
        self.log.add(Changed(change.kind, change.ranks, change.clock, told, moments))
        return told

    def decide(self, verdict: QuorumDecision, go: Go) -> None:
        """See `Order`."""
        self.log.add(Decided(verdict.round, verdict.ranks, self._moments()))
        go()

    def updated(self, updating: Updating) -> None:
        """See `Order`."""
        chunk = updating.due.chunk
        self._done[chunk] += 1
        if self._done[chunk] % SUM_EVERY == 1:  # the first one brings initial parameters
            self._sum(chunk, updating.parameters)

    def close(self, parameters: Callable[[int], torch.Tensor]) -> None:
        """The run is over: sums up every chunk as it is now.

        Args:
            parameters: of a chunk.
        """
        for chunk in sorted(self._done):
            if not self._moment(chunk) & 1:
                self._sum(chunk, parameters(chunk))
        self.log.add(Closed())
        self.log.flush()

    def _sum(self, chunk: int, parameters: torch.Tensor) -> None:
        if not parameters.is_meta:
            self.log.add(Summed(chunk, self._done[chunk], crc_of(parameters)))

    def _moments(self) -> tuple[tuple[int, int], ...]:
        assert self._chunks is not None
        return tuple((chunk, self._moment(chunk)) for chunk in self._chunks.numbers())

    def _moment(self, chunk: int) -> int:
        assert self._chunks is not None
        return 2 * self._done[chunk] + self._chunks.busy(chunk)


def crc_of(elements: torch.Tensor) -> int:
    """CRC-32 of a contiguous vector's bytes."""
    return zlib.crc32(elements.numpy().data.cast("B"))
