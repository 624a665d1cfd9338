"""`CheckpointWriter`: asks workers for their own state, opens drafts of checkpoints, and commits them.

`snapshot.py` decides when; `checkpoint/folder.py` knows the files. Files are written in threads beside the
event loop, so the coordinator still hears its members.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

from gradstream.checkpoint.draft import DraftSnapshot, VectorPlace
from gradstream.checkpoint.elsewhere import PART_BYTES, send_copy
from gradstream.checkpoint.folder import Policy, prune, sweep
from gradstream.checkpoint.format import TensorSpec, of_spec, spec_of
from gradstream.checkpoint.manifest import JobPhase, Manifest
from gradstream.checkpoint.own_state import (
    EXTRA,
    EXTRA_FILE,
    Kind,
    OwnState,
    ask,
    ask_own,
    averaged,
    digests_of,
    file_of_own,
)
from gradstream.coordinator.assignment import Shares
from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.lead import Emit, Instruction
from gradstream.coordinator.snapshot_rounds import Commit, Discard, Prepare, Snapshot, SnapshotRounds
from gradstream.data.ledger import Ledger
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import DataError, GradstreamError, RefusedError
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.telemetry.events import CheckpointCopyEvent
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.wire.chunks import member_name, part_map_of
from gradstream.wire.frames import itemsize_bytes

# ---- checkpoint writer -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What the checkpoints of a run contain.

    Args:
        template: a manifest with the entries that all checkpoints of the run have in common.
        states: returns the names of the optimizer's state vectors for a registered model.
        policy: which checkpoints are kept.
        pieces: returns, for a model and a number of holders, the ranges [start, stop) of every vector that each
            holder has, in elements.
        averages_gradients: whether the holders have only gradients, which no checkpoint contains; the model then
            comes from a worker.
    """

    template: Manifest
    states: Callable[[v1.ModelSpec], Sequence[str]]
    policy: Policy
    pieces: Callable[[v1.ModelSpec, int], Sequence[Sequence[tuple[int, int]]]]
    averages_gradients: bool = False


@dataclass(slots=True)
class _Open:
    """An open draft, and its contents."""

    draft: DraftSnapshot
    holders: Sequence[str]  # names of the nodes that write into it
    own: Mapping[str, OwnState]  # by worker
    others: Buffers  # averaged buffers, and frozen parameters
    beside: Mapping[str, bytes]  # predictors, remainders and replicas, by name of their file
    rounds: int  # minibatches of each worker
    dealt: str  # see `RunPosition`


class CheckpointWriter:
    """Writes checkpoints for the coordinator: carries out the instructions `Prepare`, `Commit` and `Discard`.

    Args:
        context: see `CoordinatorContext`.
        options: what the checkpoints contain.
    """

    def __init__(self, context: CoordinatorContext, options: CheckpointOptions) -> None:
        self._context = context
        self._runtime = context.runtime
        self._membership = context.membership
        self._rounds = context.membership.lead(SnapshotRounds)
        self._options = options
        self._resume = context.membership.progress.resume
        self._open: dict[int, _Open] = {}  # by number of the snapshot
        self._left_over = False  # whether files of a failed draft may still be there
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._copies = _Copies(context)

    def carry_out(self, instruction: Instruction) -> None:
        """Begins to carry out an instruction; the state machine gets the outcome."""
        assert isinstance(instruction, Prepare | Commit | Discard)
        kind, number = type(instruction).__name__.lower(), instruction.snapshot.number
        task = self._runtime.spawn(self._work(instruction), name=f"{self._runtime.node}-{kind}-{number}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def finish(self) -> None:
        """Waits until all instructions are carried out. A copy that is under way is given up."""
        self._copies.stop()
        await self._runtime.gather(*self._tasks)

    async def _work(self, instruction: Prepare | Commit | Discard) -> None:
        snapshot, rounds, age_s = instruction.snapshot, self._rounds, self._context.age_s
        out: list[Instruction] = []
        try:
            if isinstance(instruction, Prepare):
                places = await self._prepare(snapshot)
                out = rounds.prepared(snapshot, places, age_s())
            elif isinstance(instruction, Commit):
                folder, size_bytes = await self._commit(snapshot)
                self._copies.send(folder)
                out = rounds.committed(snapshot, folder, size_bytes, age_s())
            else:
                await self._discard(snapshot)
                return
        except (OSError, GradstreamError) as error:
            if snapshot is rounds.current:
                out = rounds.fail(self._runtime.node, f"{type(error).__name__}: {error}", age_s())
        self._context.carry_out([*out, *self._membership.life.after_snapshot()])

    @property
    def resumed_from(self) -> str:
        """Folder of the checkpoint that the run was resumed from; "" for a new run."""
        return self._resume.folder if self._resume else ""

    def ranges_of(self, holder: str, path: str) -> list[tuple[int, int]]:
        """Returns the ranges [start, stop) in bytes that a holder writes of a file of an open draft."""
        spec = self._membership.admission.model
        for opened in self._open.values():
            for place in opened.draft.places:
                if spec is not None and place.path == path and holder in opened.holders:
                    pieces = self._options.pieces(spec, len(opened.holders))[opened.holders.index(holder)]
                    begin, size_bytes = place.offset_bytes, itemsize_bytes(spec.dtype)
                    return [(begin + start * size_bytes, begin + stop * size_bytes) for start, stop in pieces]
        return []

    async def sweep(self) -> None:
        """Removes drafts that a killed process or a full disk left half written."""

        def work() -> None:
            try:
                sweep(self._runtime.storage, but={opened.draft.folder for opened in self._open.values()})
            except OSError:
                return  # a read-only disk; tried again before the next draft
            self._left_over = False

        await self._runtime.beside(work, work=Work("write"))

    async def _prepare(self, snapshot: Snapshot) -> tuple[VectorPlace, ...]:
        """Opens a draft, and returns where the vectors go.

        Raises:
            OSError: the folder cannot be made.
            GradstreamError: a worker did not send its own state.
        """
        if self._left_over:
            await self.sweep()
        admission, ledger = self._membership.admission, self._membership.progress.ledger
        endpoint, silence_s = self._context.endpoint, self._context.deadlines.silence_s
        assert admission.model is not None
        buffers, fixed = _specs(admission.buffers), _specs(admission.fixed)
        own: dict[str, OwnState] = {}
        if buffers or isinstance(ledger, OpenLedger):
            asking = (ask(endpoint, who, buffers, silence_s=silence_s) for who in snapshot.workers)
            own = dict(zip(snapshot.workers, await self._runtime.gather(*asking), strict=True))
        frozen: Buffers = {}
        if specs := [spec for spec in fixed if not spec.same_as]:  # the same on all workers
            answer = await ask(endpoint, snapshot.workers[0], specs, fixed=True, silence_s=silence_s)
            frozen = answer.buffers
        template, beside = self._options.template, dict[str, bytes]()
        kept: dict[Kind, str] = {
            "predictors": template.predictors,
            "remainders": template.remainders,
            "replica": template.replicas,
        }
        for kind in (kind for kind, whose in kept.items() if whose):
            nodes = [
                member_name(part, int(who.rpartition("-")[2]))
                for who in snapshot.workers
                for part in range(max(1, len(admission.model.parts)))
            ]
            answers = await self._runtime.gather(
                *(ask_own(endpoint, kind, node, silence_s) for node in nodes)
            )
            beside |= zip([file_of_own(kind, node) for node in nodes], answers, strict=True)
        if isinstance(ledger, OpenLedger):
            first, *later = snapshot.workers
            beside[file_of_own("loop", first)] = file = await ask_own(endpoint, "loop", first, silence_s)
            known = digests_of(file)
            answers = await self._runtime.gather(
                *(ask_own(endpoint, "loop", who, silence_s, known) for who in later)
            )
            beside |= zip([file_of_own("loop", who) for who in later], answers, strict=True)
        averages = averaged(list(own.values()))
        if own:  # a model may have recreated its buffers, in other shapes
            buffers = [spec_of(name, average.shape, average.dtype) for name, average in averages.items()]
        draft = DraftSnapshot(
            self._runtime.storage,
            step=snapshot.step,
            token=f"{endpoint.identity.incarnation:x}-{snapshot.number}",
            tensors=() if self._options.averages_gradients else _specs(admission.tensors),
            others=[*buffers, *fixed],
            states=self._options.states(admission.model),
        )
        before = self._resume.rounds if self._resume else 0
        rounds = before + ledger.num_rounds
        others = {**averages, **frozen}
        self._open[snapshot.number] = _Open(
            draft, snapshot.holders, own, others, beside, rounds, _dealt_by(ledger)
        )
        await self._runtime.beside(draft.open, work=Work("write"))
        return draft.places

    async def _commit(self, snapshot: Snapshot) -> tuple[str, int]:
        """Makes a checkpoint of the files that all holders have written. Returns its folder, and its bytes.

        Raises:
            OSError: the disk is full or broken.
            DataError: the files differ from what the holders had in memory.
        """
        opened, options, storage = self._open.pop(snapshot.number), self._options, self._runtime.storage
        spec = self._membership.admission.model
        assert spec is not None
        num_chunks = -(-spec.elems // spec.chunk_elems)
        pieces = options.pieces(spec, len(snapshot.holders))
        _check_reports(snapshot, _num_chunks(spec, len(snapshot.holders)), [len(piece) for piece in pieces])
        by_holder = [snapshot.versions[who] for who in snapshot.holders]
        if spec.parts:  # the chunks of parts are not those of the whole
            versions = [min(chain.from_iterable(by_holder), default=0)] * num_chunks
        else:
            versions = _dealt(num_chunks, by_holder)
        sums = {
            place.vector: _in_order(
                pieces, [_part(snapshot.sums[who], index, len(snapshot.places)) for who in snapshot.holders]
            )
            for index, place in enumerate(snapshot.places)
        }
        ledger = self._membership.progress.ledger
        if isinstance(ledger, OpenLedger):
            # A loop that has run out still takes part in rounds, so it counts its own steps.
            steps = {who: state.steps for who, state in opened.own.items()}
            before = {} if self._resume is None else self._resume.samples  # including former workers
            samples = {**before, **{who: state.samples for who, state in opened.own.items()}}
            if ledger.finished:  # the loops have ended a phase, and told what lost workers had in it
                for rank, count in enumerate(ledger.contributed):
                    who = f"worker-{rank}"
                    samples[who] = max(samples.get(who, 0), before.get(who, 0) + count)
        else:
            begin = {who: self._resume.step_of(who) if self._resume else 0 for who in snapshot.stop_at}
            before = {} if self._resume is None else self._resume.steps  # including former workers
            steps = {**before, **{who: begin[who] + count for who, count in snapshot.stop_at.items()}}
            samples = {}
        balance = self._membership.lead(Shares).balance
        manifest = replace(
            options.template,
            step=snapshot.step,
            rounds=opened.rounds,
            dealt=opened.dealt,
            steps=steps,
            samples=samples,
            done=snapshot.progress,
            versions=versions,
            procedures=[
                b64encode(procedure).decode()
                for who in snapshot.holders
                for procedure in snapshot.procedures.get(who, ())
            ],
            model={
                "fingerprint": spec.fingerprint,
                "elems": spec.elems,
                "dtype": int(spec.dtype),
                "chunk_elems": spec.chunk_elems,
                "optimizer": spec.optimizer,
            },
            evaluated=self._rounds.evaluated,
            dropped=self._membership.progress.dropped,
            shares=() if balance is None else balance.sizes,
            phase=self._place(last=snapshot.last),
        )
        others = opened.others
        own = {**{who: state.encode() for who, state in opened.own.items()}, **opened.beside}
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
                pass  # tried again after the next checkpoint
            return folder

        elems = len(snapshot.places) * spec.elems
        return await self._runtime.beside(write, work=Work("commit", elems=elems)), opened.draft.size_bytes

    def _place(self, *, last: bool) -> JobPhase:
        """Where the run goes on from a checkpoint."""
        life, present = self._membership.life, self._options.template.phase
        return life.follows or present if last and life.crossing else present

    async def _discard(self, snapshot: Snapshot) -> None:
        """Removes the files of a snapshot."""
        opened = self._open.pop(snapshot.number, None)
        self._left_over = True
        if opened is not None:
            await self._runtime.beside(opened.draft.discard, work=Work("write"))


def _specs(tensors: Sequence[v1.TensorSpec]) -> list[TensorSpec]:
    return [of_spec(tensor) for tensor in tensors]


def _num_chunks(spec: v1.ModelSpec, holders: int) -> list[int]:
    """Number of chunks of each holder: the chunks of each part are dealt to the part's own holders."""
    parts = max(1, len(spec.parts))
    each = holders // parts
    numbers = [-(-part_map_of(spec, part).elems // spec.chunk_elems) for part in range(parts)]
    return [len(range(rank, number, each)) for number in numbers for rank in range(each)]


def _dealt_by(ledger: Ledger | OpenLedger) -> str:
    """What users' own loops have left of their data, as JSON; "" if nothing was dealt out."""
    saved = ledger.saved() if isinstance(ledger, OpenLedger) else []
    return json.dumps(saved, separators=(",", ":")) if saved else ""


def _check_reports(snapshot: Snapshot, num_chunks: Sequence[int], num_pieces: Sequence[int]) -> None:
    """Raises DataError if a holder has reported more or fewer chunks or pieces than it has."""
    for who, its_chunks, its_pieces in zip(snapshot.holders, num_chunks, num_pieces, strict=True):
        got = {"versions": len(snapshot.versions[who]), "checksums": len(snapshot.sums[who])}
        expected = {"versions": its_chunks, "checksums": its_pieces * len(snapshot.places)}
        if got != expected:
            raise DataError(f"{who} has reported {got}; expected {expected}")


def _dealt(num_chunks: int, by_holder: Sequence[Sequence[int]]) -> list[int]:
    """Puts the numbers of all holders in the order of chunks: of S holders, chunk c is on holder c mod S."""
    out = [0] * num_chunks
    for rank, numbers in enumerate(by_holder):
        out[rank :: len(by_holder)] = numbers
    return out


def _in_order(
    pieces: Sequence[Sequence[tuple[int, int]]], sums: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Returns the pieces of all holders with their checksums, in the order of the vector."""
    return sorted(
        (start, stop, crc)
        for its_pieces, numbers in zip(pieces, sums, strict=True)
        for (start, stop), crc in zip(its_pieces, numbers, strict=True)
    )


def _part(numbers: Sequence[int], index: int, count: int) -> Sequence[int]:
    """Returns the index-th of `count` parts of equal length."""
    length = len(numbers) // count
    return numbers[index * length : (index + 1) * length]


# ---- copies ------------------------------------------------------------------------------


class _Copies:
    """Sends each checkpoint to one worker on another machine, if there is any. See `checkpoint/elsewhere.py`."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._newest = ""
        self._task: asyncio.Task[None] | None = None

    def send(self, folder: str) -> None:
        """Begins to send a checkpoint, or does so once the one before is sent."""
        self._newest = folder
        if self._task is None and self._workers():
            self._task = self._context.runtime.spawn(self._send(), name="checkpoint-copies")

    def stop(self) -> None:
        """Gives up what is under way."""
        if self._task is not None:
            self._task.cancel()

    def _workers(self) -> list[str]:
        return [node.name for node in self._context.membership.nodes.workers if node.elsewhere]

    async def _send(self) -> None:
        context, folder = self._context, ""
        runtime, patience_s = (
            context.runtime,
            context.deadlines.patience_s,
        )  # a worker reads the whole copy again
        while folder != self._newest:
            folder = self._newest
            for worker in self._workers():
                begun_ns, size_bytes, fault = runtime.now(), 0, ""
                try:
                    size_bytes = await send_copy(runtime, context.endpoint, folder, worker, patience_s)
                except FileNotFoundError:
                    break  # a newer one has taken its place
                except (OSError, GradstreamError) as error:
                    fault = f"{type(error).__name__}: {error}"
                event = CheckpointCopyEvent(
                    folder=folder,
                    worker=worker,
                    size_bytes=size_bytes,
                    total_s=(runtime.now() - begun_ns) / 1e9,
                    error=fault,
                )
                context.carry_out([Emit(event)])
                if not fault:
                    break
        self._task = None


# ---- checkpoint handler ------------------------------------------------------------------
# Checkpoint files for nodes on other machines, which have no access to the run directory.
#
# The nodes' side is `checkpoint/elsewhere.py`.

WRITE_BYTES = 8 << 20
"""Parts are gathered up to this many bytes, and then written and made durable at once."""

T = TypeVar("T")


class CheckpointHandler:
    """Serves "keep", which writes, and "kept", which reads.

    Args:
        runtime: runtime of the coordinator; its storage is the run directory.
        endpoint: endpoint of the coordinator.
        writer: knows the open drafts, and the checkpoint from which the run was resumed.
    """

    def __init__(self, runtime: Runtime, endpoint: Endpoint, writer: CheckpointWriter) -> None:
        self._runtime = runtime
        self._name = endpoint.identity.name
        self._writer = writer
        endpoint.serve("keep", self._keep, model=False)
        endpoint.serve("kept", self._kept, model=False)

    async def _keep(self, stream: Stream) -> None:
        """Writes the ranges that a holder sends into an open draft."""
        path, who = v1.Keep.FromString(stream.opened.body).path, stream.opened.sender
        ranges, parts = self._writer.ranges_of(who, path), list[tuple[int, bytes]]()
        while (received := await stream.recv()) is not None:
            part = v1.Part.FromString(received.frame.body.data)
            if not lies_in(ranges, part):
                text = f"{who} may not write {len(part.data)} bytes at {part.offset_bytes} of {path[:200]!r}"
                raise RefusedError(
                    self._name,
                    "BAD_REQUEST",
                    f"{text}: expected a range of an open draft that {who} has to write",
                )
            parts.append((part.offset_bytes, part.data))
            if sum(len(data) for _, data in parts) >= WRITE_BYTES:
                await self._write(path, parts)
                parts = []
        if parts:
            await self._write(path, parts)
        await stream.send(v1.Frame(body=v1.Body()))

    async def _write(self, path: str, parts: list[tuple[int, bytes]]) -> None:
        await self._on_disk(lambda: self._runtime.storage.patch(path, parts), "write")

    async def _kept(self, stream: Stream) -> None:
        """Sends bytes of a file of the checkpoint from which the run was resumed."""
        request, storage = v1.Kept.FromString(stream.opened.body), self._runtime.storage
        path = request.path
        folder, _, name = path.rpartition("/")
        if folder != self._writer.resumed_from or not folder or name not in storage.names(folder):
            text = f"{path[:200]!r} is no file of the checkpoint that this run goes on from"
            raise RefusedError(self._name, "BAD_REQUEST", text)
        offset, end = request.offset_bytes, request.offset_bytes + request.size_bytes
        while offset < end:
            size = min(PART_BYTES, end - offset)
            data = await self._on_disk(partial(storage.read_at, path, offset, size), "read")
            if not data:
                return
            await stream.send(v1.Frame(body=v1.Body(data=data)))
            offset += len(data)

    async def _on_disk(self, work: Callable[[], T], kind: str) -> T:
        try:
            return await self._runtime.beside(work, work=Work(kind))
        except OSError as error:
            raise RefusedError(self._name, "INTERNAL", f"{type(error).__name__}: {error}") from error


def lies_in(ranges: Sequence[tuple[int, int]], part: v1.Part) -> bool:
    """Whether a part lies inside one of the ranges [start, stop) of bytes, which are in ascending order."""
    index = bisect_right(ranges, part.offset_bytes, key=lambda start_stop: start_stop[0]) - 1
    return index >= 0 and part.offset_bytes + len(part.data) <= ranges[index][1]
