"""The coordinator's hands in a snapshot: asks workers for their own state, opens drafts and commits them.

What is decided, `snapshot.py` decides; what is written how, `checkpoint/folder.py`. Files are written
beside the event loop, so members are heard all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gradstream.checkpoint.folder import DraftSnapshot, VectorPlace, prune, sweep
from gradstream.checkpoint.format import TensorSpec, of_spec
from gradstream.checkpoint.manifest import Manifest, Resume
from gradstream.checkpoint.own_state import EXTRA, EXTRA_FILE, OwnState, ask, averaged
from gradstream.checkpoint.policy import Policy
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.snapshot import Snapshot
from gradstream.errors import DataError
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.wire.dtypes import itemsize_bytes

__all__ = ["CheckpointOptions", "CheckpointWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What is kept, and for how long.

    Args:
        template: the manifest of every checkpoint, with what one run's have in common.
        states: names of the state vectors of the update rule that the model has registered.
        open_ended: workers bring data of their own, and say how far they are.
        policy: when, and how many.
        resume: where the run goes on.
        silence_s: how long a worker may take to say what it has of its own.
        pieces: [start, stop) of what each of so many holders has of every vector.
        joint: the holders have gradients alone, which nobody keeps: a worker has the model.
    """

    template: Manifest
    states: Callable[[v1.ModelSpec], Sequence[str]]
    open_ended: bool
    policy: Policy
    resume: Resume | None
    silence_s: float
    pieces: Callable[[v1.ModelSpec, int], Sequence[Sequence[tuple[int, int]]]]
    joint: bool = False


@dataclass(slots=True)
class _Open:
    """A draft, and what belongs into it."""

    draft: DraftSnapshot
    holders: Sequence[str]  # who writes into it
    own: Mapping[str, OwnState]
    frozen: Buffers
    rounds: int


class CheckpointWriter:
    """Carries out `Prepare`, `Commit` and `Discard`.

    Args:
        runtime: of the coordinator; its storage is the run directory.
        endpoint: knows the workers.
        membership: has the model and the ledger.
        options: what is kept.
    """

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, membership: Membership, options: CheckpointOptions
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._membership = membership
        self._options = options
        self._open: dict[int, _Open] = {}  # by number of the snapshot
        self._left_over = False  # a draft has failed, and some of it may still take room

    @property
    def resumed_from(self) -> str:
        """Folder of the checkpoint that the run goes on from; "" where it begins."""
        return self._options.resume.folder if self._options.resume else ""

    def ranges_of(self, holder: str, path: str) -> list[tuple[int, int]]:
        """[start, stop) in bytes of what a holder writes of a file of an open draft; [] where nothing."""
        spec = self._membership.admission.model
        for opened in self._open.values():
            for place in opened.draft.places:
                if spec is not None and place.path == path and holder in opened.holders:
                    pieces = self._options.pieces(spec, len(opened.holders))[opened.holders.index(holder)]
                    begin, size_bytes = place.offset_bytes, itemsize_bytes(spec.dtype)
                    return [(begin + start * size_bytes, begin + stop * size_bytes) for start, stop in pieces]
        return []

    async def sweep(self) -> None:
        """Removes what a process that was killed, or a full disk, has left half written."""

        def work() -> None:
            try:
                sweep(self._runtime.storage, but={opened.draft.folder for opened in self._open.values()})
            except OSError:
                return  # a read-only disk; tried again before the next draft
            self._left_over = False

        await self._runtime.beside(work, work=Work("write"))

    async def prepare(self, snapshot: Snapshot) -> tuple[VectorPlace, ...]:
        """Opens a draft. Returns where vectors go.

        Raises:
            OSError: no folder can be made.
            GradstreamError: a worker did not say what it has.
        """
        if self._left_over:
            await self.sweep()
        membership, admission = self._membership, self._membership.admission
        assert admission.model is not None
        buffers, fixed = _specs(admission.buffers), _specs(admission.fixed)
        own: dict[str, OwnState] = {}
        if buffers or self._options.open_ended:
            replies = await self._runtime.gather(
                *(
                    ask(self._endpoint, who, buffers, silence_s=self._options.silence_s)
                    for who in snapshot.workers
                )
            )
            own = dict(zip(snapshot.workers, replies, strict=True))
        frozen = await self._frozen([spec for spec in fixed if not spec.same_as], snapshot.workers)
        draft = DraftSnapshot(
            self._runtime.storage,
            step=snapshot.step,
            token=f"{self._endpoint.identity.incarnation:x}-{snapshot.number}",
            tensors=() if self._options.joint else _specs(admission.tensors),
            others=[*buffers, *fixed],
            states=self._options.states(admission.model),
        )
        before = self._options.resume.rounds if self._options.resume else 0
        rounds = before + membership.progress.ledger.num_rounds
        self._open[snapshot.number] = _Open(draft, snapshot.shards, own, frozen, rounds)
        await self._runtime.beside(draft.open, work=Work("write"))
        return draft.places

    async def commit(self, snapshot: Snapshot) -> tuple[str, int]:
        """Makes a checkpoint of what all holders have written. Returns its folder, and its size.

        Raises:
            OSError: the disk is full or broken.
            DataError: what is on the disk is not what the shards held.
        """
        opened, options, storage = self._open.pop(snapshot.number), self._options, self._runtime.storage
        spec = self._membership.admission.model
        assert spec is not None
        num_chunks = -(-spec.elems // spec.chunk_elems)
        pieces = options.pieces(spec, len(snapshot.shards))
        _check_reports(snapshot, num_chunks, [len(one) for one in pieces])
        versions = _dealt(num_chunks, [snapshot.versions[shard] for shard in snapshot.shards])
        sums = {
            place.vector: _in_order(
                pieces, [_part(snapshot.sums[s], index, len(snapshot.places)) for s in snapshot.shards]
            )
            for index, place in enumerate(snapshot.places)
        }
        steps = {who: self._base(who) + count for who, count in snapshot.stop_at.items()}
        samples: dict[str, int] = {}
        if options.open_ended:  # a loop that has run out takes part in rounds that are none of its own
            steps = {who: state.steps for who, state in opened.own.items()}
            samples = {who: state.samples for who, state in opened.own.items()}
        manifest = replace(
            options.template,
            step=snapshot.step,
            rounds=opened.rounds,
            steps=steps,
            samples=samples,
            done=snapshot.progress,
            versions=versions,
            model={
                "fingerprint": spec.fingerprint,
                "elems": spec.elems,
                "dtype": int(spec.dtype),
                "chunk_elems": spec.chunk_elems,
                "optimizer": spec.optimizer,
            },
            evaluated=self._membership.snapshots.evaluated,
            dropped=self._membership.progress.dropped,
            shares=self._membership.balance.sizes if self._membership.balance is not None else (),
        )
        others = {**averaged(list(opened.own.values())), **opened.frozen}
        own = {who: state.encode() for who, state in opened.own.items()}
        if extra := {name: array for name, array in others.items() if name.startswith(EXTRA)}:
            own[EXTRA_FILE] = OwnState(0, extra).encode()

        def write() -> str:
            try:
                folder = opened.draft.commit(
                    manifest,
                    others={name: array.tobytes() for name, array in others.items() if name not in extra},
                    own=own,
                    sums=sums,
                    itemsize_bytes=itemsize_bytes(spec.dtype),
                )
            except BaseException:
                self._left_over = True
                opened.draft.discard()
                raise
            try:
                prune(storage, options.policy, fresh=folder)
            except OSError:
                pass  # tried again after the next one
            return folder

        elems = len(snapshot.places) * spec.elems
        return await self._runtime.beside(write, work=Work("commit", elems=elems)), opened.draft.size_bytes

    async def discard(self, snapshot: Snapshot) -> None:
        """Removes what was written of a snapshot."""
        opened = self._open.pop(snapshot.number, None)
        self._left_over = True
        if opened is not None:
            await self._runtime.beside(opened.draft.discard, work=Work("write"))

    async def _frozen(self, specs: Sequence[TensorSpec], workers: Sequence[str]) -> Buffers:
        """Frozen parameters are the same in all workers: one is asked."""
        if not specs:
            return {}
        silence_s = self._options.silence_s
        return (await ask(self._endpoint, workers[0], specs, fixed=True, silence_s=silence_s)).buffers

    def _base(self, worker: str) -> int:
        return self._options.resume.step_of(worker) if self._options.resume else 0


def _specs(tensors: Sequence[v1.TensorSpec]) -> list[TensorSpec]:
    return [of_spec(tensor) for tensor in tensors]


def _check_reports(snapshot: Snapshot, num_chunks: int, num_pieces: Sequence[int]) -> None:
    """Raises DataError where a holder has told of more or fewer chunks or pieces than it has."""
    count = len(snapshot.shards)
    for rank, (who, theirs) in enumerate(zip(snapshot.shards, num_pieces, strict=True)):
        told = {"versions": len(snapshot.versions[who]), "checksums": len(snapshot.sums[who])}
        expected = {
            "versions": len(range(rank, num_chunks, count)),
            "checksums": theirs * len(snapshot.places),
        }
        if told != expected:
            raise DataError(f"{who} has told of {told}; expected {expected}")


def _dealt(num_chunks: int, by_shard: Sequence[Sequence[int]]) -> list[int]:
    """Numbers by chunk, from those of each shard: chunk c lives on shard c mod S."""
    out = [0] * num_chunks
    for rank, numbers in enumerate(by_shard):
        out[rank :: len(by_shard)] = numbers
    return out


def _in_order(
    pieces: Sequence[Sequence[tuple[int, int]]], sums: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Every holder's pieces with their checksums, in the order of the vector."""
    return sorted(
        (start, stop, crc)
        for theirs, numbers in zip(pieces, sums, strict=True)
        for (start, stop), crc in zip(theirs, numbers, strict=True)
    )


def _part(numbers: Sequence[int], index: int, count: int) -> Sequence[int]:
    """The index-th of `count` equally long parts."""
    length = len(numbers) // count
    return numbers[index * length : (index + 1) * length]
