"""A worker's exchange in a group, without servers."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from typing_extensions import override

from gradstream.checkpoint.manifest import STATE, Manifest
from gradstream.checkpoint.snapshot import Carried, Pieces, load, unsplit
from gradstream.collectives.group import Group
from gradstream.coordinator.client.member import BoundaryError
from gradstream.coordinator.link_choice import CLEAR, summed_s
from gradstream.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    InternalError,
    PeerLostError,
    UserCodeError,
)
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Storage, Work, awaited_later
from gradstream.runtime.deadlines import to_wait_longer
from gradstream.strategies.base import GroupStrategy
from gradstream.telemetry.events import EnteringEvent, Event, ExchangeEvent, GroupEvent, RehearsedEvent
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap, PartMap, part_map_of, part_of
from gradstream.worker.assembly import Assembly
from gradstream.worker.exchange import Exchange, ExchangeContext, Transfers
from gradstream.worker.group.forming import LOST, GroupForming
from gradstream.worker.group.replica import GroupReplica
from gradstream.worker.group.setup import GroupAssembly, GroupSetup
from gradstream.worker.loop import EntersLaterError, Loop

# ---- first look --------------------------------------------------------------------------
# `FirstLook`: whether a phase that only measures its links has to wait for a sum at all.
#
# The workers measure their links when they form their group, so they know how long a sum takes. If it takes a second
# or more, each computes a gradient that is not used, and reports its time. If a sum takes many times as long, the
# coordinator ends the phase before the first minibatch, and the next phase begins with it. A user's own loop cannot
# compute a gradient that it does not use; it ends the phase after fewer steps.

WORTH_S = 1.0
"""A sum that takes at least this many seconds is worth a first look."""


class FirstLook:
    """The first look of one worker, in every group that it joins. All workers of a group come to the same decision.

    Args:
        runtime: runtime of the worker's node.
        size_bytes: size of the vector that the group sums.
        emit: adds an event to those of the run.
        answer_s: how long the coordinator may take to end the phase.
        loop: the user's own loop, which ends the phase itself; None if there is none.
    """

    def __init__(
        self,
        runtime: Runtime,
        size_bytes: int,
        emit: Callable[[Event], None],
        answer_s: float,
        loop: Loop | None = None,
    ) -> None:
        self._runtime = runtime
        self._loop = loop
        self._answer_s = answer_s
        self._size_bytes = size_bytes
        self._emit = emit
        self._sum_s = 0.0  # unknown

    def heard(self, event: Event) -> None:
        """Reports the event of a new group, which only the worker of rank 0 in it gets."""
        self._sum_s = 0.0
        if isinstance(event, GroupEvent) and event.alpha_s is not None and event.beta_s_byte is not None:
            self._sum_s = summed_s(len(event.ranks), event.alpha_s, event.beta_s_byte, self._size_bytes)
        self._emit(event)

    async def take(self, replica: GroupReplica) -> None:
        """Returns when the worker may train or, if the phase ends here, when its gate is closed.

        Raises:
            PeerLostError, DeadlineError, ClosedError: a worker was lost meanwhile.
            UserCodeError, GradientError, DataError: from the user's code.
        """
        group = replica.group
        sum_s = (await group.tell(self._sum_s))[0][0]
        if self._loop is not None:
            self._loop.is_slow = sum_s >= WORTH_S
        if self._loop is not None or sum_s < WORTH_S:
            return
        seconds = [compute_s for compute_s, _ in await group.tell(await replica.rehearse())]
        if not all(seconds) or sum_s < CLEAR * max(seconds):
            return
        if replica.setup.group.rank == 0:
            by_node = dict(zip(replica.setup.group.names, seconds, strict=True))
            self._emit(RehearsedEvent(rank=replica.rank, compute_s=by_node))
        try:
            await self._runtime.within(self._answer_s, replica.asked_to_stand())
        except DeadlineError:
            raise
        except TimeoutError:
            return  # the coordinator does not know, so all continue with the first minibatch


# ---- group -------------------------------------------------------------------------------

SAY_S = 3.0
"""Seconds after which a newcomer for which the others wait is named."""

NEW = 2
"""What a worker tells that has come late, and has not the state of the others' loops yet."""


async def make(assembly: Assembly) -> GroupExchange:
    """Makes a worker's exchange, once all workers have formed their group.

    Raises:
        ConfigError: the workers cannot form it.
        PeerLostError, DeadlineError: another worker was lost meanwhile.
    """
    config, context, layout = assembly.config, assembly.context, assembly.config.model.layout
    strategy, look, heard = config.plan.strategy, None, context.member.emit
    assert isinstance(strategy, GroupStrategy)
    if config.plan.looks_first:
        size_bytes, answer_s = layout.elems * layout.dtype.itemsize, config.plan.job.deadlines.silence_s
        look = FirstLook(context.runtime, size_bytes, context.member.emit, answer_s, config.loop)
        heard = look.heard
    groups = GroupAssembly(assembly, strategy, heard)
    forming = GroupForming(
        context.runtime,
        context.member,
        groups.form,
        survives=config.losses.regroups_after_loss and not context.runtime.memory.shape_only,
        interrupt=assembly.batch_gate.interrupt,
        agreement=assembly.agreement,
        alone=config.plan.workers == 1,
    )
    first = await forming.through(lambda group: groups.setup(group, forming.notice))
    return GroupExchange(
        context,
        strategy,
        forming,
        groups.setup,
        partial(GroupReplica, assembly.replica_context(), first, whole=forming.whole, delay=strategy.delay),
        (layout.elems, config.chunk_elems),
        None if config.plan.parts == 1 else part_map_of(context.member.notice.model, config.part),
        look,
    )


class GroupExchange(Exchange):
    """Implements `Exchange`.

    A round interrupted by the loss of a worker is repeated: all workers get the newest parameters that any of them has,
    and `train` starts again in a new group. Nobody can be more than one round ahead, since an update needs the
    gradients of all. See `GroupForming`.

    Args:
        context: the worker's place in the run.
        strategy: strategy of the run.
        forming: the group of the worker.
        setup: makes the worker's setup in the group of a notice, and reuses what it can of the previous setup.
        replica: makes the replica, which reports its transfers.
        chunks: number of elements, and elements of a chunk. A checkpoint has a version for each chunk.
        place: the place of this worker's part in a split model; None if the model is not split.
        look: taken before the first minibatch in each group; None in a phase that does more than measure.
    """

    replica: GroupReplica

    def __init__(
        self,
        context: ExchangeContext,
        strategy: GroupStrategy,
        forming: GroupForming,
        setup: Callable[[Group, v1.Notice, GroupSetup | None], Awaitable[GroupSetup]],
        replica: Callable[[Transfers], GroupReplica],
        chunks: tuple[int, int],
        place: PartMap | None = None,
        look: FirstLook | None = None,
    ) -> None:
        super().__init__(context)
        self._look = look
        self._strategy = strategy
        self._forming = forming
        self._setup = setup
        self._transfers = Transfers(context.config.rank, context.member.emit)
        self._accounted = (0, 0, 0)  # rounds and bytes
        self.replica = replica(self._transfers)
        self._place = place
        self._snapshot_source = _GroupSnapshot(context.runtime.node, strategy, self.replica, *chunks, place)
        self._had: Sequence[
            Vector
        ] = ()  # parameters and state of `version`, while those of the replica are incomplete
        self._attending: asyncio.Task[None] | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._is_new = (
            context.late and context.config.loop is not None
        )  # without the state of the others' loops
        self._newcomers: set[int] = set()  # ranks of workers that have come since the loop heard of members
        self._staying_out: set[int] = set()  # and that cannot begin with the present round
        self._in_step = True  # the loops have dealt the same minibatches

    async def begin(self) -> None:
        """See `Exchange`: each worker makes the first parameters, or reads a checkpoint.

        A worker that has joined late gets them from the others.
        """
        try:
            late = self._forming.notice.epoch > self._forming.notice.first_epoch
            (await self._forming.jointly(self._level() if late else self._begin_together()))()
        except LOST as error:
            await self._regroup(error)
        if self.replica.version < 0:
            raise self._nobody_has_them()
        self._keep_snapshots(self._snapshot_source)

    async def _begin_together(self) -> Callable[[], None]:
        replica = self.replica
        if self._context.resume is not None:
            await self._first_parameters()
            if replica.setup.sharded:
                await replica.group.all_gather()
        else:
            await self._make_first()
            replica.version = self._first_version
        return _nothing

    async def _make_first(self) -> None:
        """Initializes the parameters from the seed on every worker, which is faster than sending them over a slow link.

        If a worker got different ones or failed, or workers share memory, all receive those of rank 0.
        """
        replica, group, digest = self.replica, self.replica.setup.group, (0, 0)
        alone = replica.setup.sharded or group.shares_memory
        if group.rank == 0 or not alone:
            try:
                await self._context.init(replica.parameters)
                digest = (0, 0) if alone else await self._digest([replica.parameters])
            except UserCodeError:
                if group.rank == 0:
                    raise
        if alone or len(set(await replica.group.tell(*digest))) > 1:
            await replica.group.broadcast(replica.parameters)

    @property
    def _first_version(self) -> int:
        return self._context.config.first_version

    async def _first_parameters(self, *, whole: bool = False) -> None:
        """Makes the run's first parameters; or reads from its checkpoint what this worker updates, or all."""
        context, source = self._context, self._snapshot_source
        if context.resume is None:
            await context.init(self.replica.parameters)
            return
        folder, storage = context.resume.folder, context.runtime.storage
        work, state = Work("restore", elems=len(self.replica.parameters)), context.config.plan.restores_state
        carried, version = context.carried, context.config.plan.renumbered
        await context.runtime.beside(
            lambda: source.restore(storage, folder, carried, whole=whole, state=state, version=version),
            work=work,
        )
        carried.forget()

    @override
    async def train(self) -> None:
        while True:
            try:
                if (loop := self._context.config.loop) is not None:
                    number = self.replica.step - self._context.config.first_step
                    ranks = [rank for rank in self.replica.setup.ranks if rank not in self._staying_out]
                    loop.members(ranks, number, sorted(self._newcomers), in_step=self._in_step)
                    self._newcomers.clear()
                if self._look is not None:
                    await self._look.take(self.replica)
                await self._strategy.train(self.replica)
                break
            except LOST as error:
                await self.replica.at_rest()
                await self._forming.give_up()
                await self._regroup(error)
                await self.replica.catch_up()
        if self._forming.survives:
            runtime = self._context.runtime
            self._attending = awaited_later(runtime.spawn(self._attend(), name=f"{runtime.node}-attends"))

    async def _attend(self) -> None:
        """Sends this worker's final parameters to workers that lack them after a loss."""
        try:
            while True:
                await self._context.member.heard(lambda: self._forming.outdated)
                await self._regroup(ClosedError("the members of the group have changed"))
        except Exception as error:
            await self._context.failed(error)

    # ---- after a loss ---------------------------------------------------------------------

    def _nobody_has_them(self) -> PeerLostError:
        return PeerLostError(
            self._context.runtime.node,
            "has joined a run of which no worker is left that has the parameters; go on from its newest checkpoint",
        )

    async def _regroup(self, error: Exception) -> None:
        """Goes on in the next group. Raises `error` if the members stay as they are."""
        await self._forming.changed(error, at_once=isinstance(error, EntersLaterError))
        (await self._forming.through(self._enter))()

    async def _enter(self, group: Group) -> Callable[[], None]:
        replica = self.replica
        await replica.at_rest()
        self._had = self._had or replica.give_up()
        replica.regroup(await self._setup(group, self._forming.notice, replica.setup))
        return await self._level()

    async def _level(self) -> Callable[[], None]:
        """Sends the newest parameters and state in the group to all of its workers, and compares digests.

        A worker that is behind receives them into separate memory, and switches to them when they are complete, so a
        second loss leaves nobody with a part. If all workers have joined late, nobody has parameters, and all keep
        version -1.

        Returns:
            A function that switches to them.

        Raises:
            InternalError: the digests differ.
        """
        replica, setup, group = self.replica, self.replica.setup, self.replica.group
        loop = self._context.config.loop
        mark = () if loop is None else (0 if self._is_new else loop.mark,)
        told = await group.tell(replica.version, self._context.late + self._is_new, *mark)
        versions = [round(version) for version, *_ in told]
        newest, rank = max(versions), setup.group.rank
        new = [late == NEW for _, late, *_ in told]
        marks = [rest[0] if rest else 1 for _, _, *rest in told]
        dealt = {abs(mark) for one, mark in zip(versions, marks, strict=True) if one == newest} - {0, 1}
        self._in_step &= len(dealt) < 2
        root = self._root(versions, new, marks)
        came = {one for one, is_new in zip(setup.ranks, new, strict=True) if is_new}
        self._staying_out = came if marks[root] <= 0 else set()
        self._newcomers |= came - self._staying_out
        if newest < 0 and any(late for _, late, *_ in told):
            return _nothing  # the run had parameters: nobody begins it again
        if newest < 0:  # no worker with the initial parameters is left
            newest = self._first_version
            if rank == root:
                await self._first_parameters(whole=True)
                replica.version, self._had = newest, replica.vectors
        vectors = replica.vectors
        if replica.version < newest and not setup.sharded:
            vectors = [self._like(vector) for vector in vectors]
        if rank == root or (replica.version == newest and not setup.sharded):
            await self._copy(self._had or vectors, vectors)
        if setup.sharded or min(versions) < newest:
            for vector in vectors:
                await group.broadcast(vector, root)
        if self._is_new and self._context.enter_loop is not None:
            await self._context.enter_loop(setup.group.names[root])
        note = await group.pass_note(replica.note, root)
        digests = await group.tell(*await self._digest(vectors))
        wrong = [setup.group.names[one] for one, digest in enumerate(digests) if digest != digests[root]]
        if wrong:
            raise InternalError(
                f"after round {newest} {', '.join(wrong)} got other parameters than {setup.group.names[root]} has"
            )
        return partial(self._take, vectors, newest, note)

    def _root(self, versions: Sequence[int], new: Sequence[bool], marks: Sequence[float]) -> int:
        """The worker that has the newest parameters and, of a user's loop, all else that a newcomer needs.

        Args:
            versions: of the workers' parameters, by rank in the group.
            new: they have not the state of the others' loops yet.
            marks: see `Loop.mark`.

        Raises:
            PeerLostError: this newcomer is there without any worker of which it could have them.
            ConfigError: the loops of the others have ended.
            BoundaryError: so they have in this phase, and another one follows.
        """
        newest = max(versions)
        there = [rank for rank, version in enumerate(versions) if version == newest and not new[rank]]
        going = sorted(
            (rank for rank in there if marks[rank]), key=lambda rank: (abs(marks[rank]) == 1, rank)
        )
        if self._is_new and newest >= 0 and not there:
            raise self._nobody_has_them()
        if self._is_new and newest >= 0 and not going:
            plan = self._context.config.plan
            if plan.follows:  # the loops have ended their phase, and this one begins with the next
                raise BoundaryError(plan.phase.boundary + 1)
            raise ConfigError("session.wrap: the run is at its end: the loops of the other workers are over")
        return (going or there or [versions.index(newest)])[0]

    def _take(self, vectors: Sequence[Vector], version: int, note: bytes) -> None:
        self.replica.take(vectors, version, note)
        self._had = ()
        if self._is_new and (loop := self._context.config.loop) is not None:
            self.replica.skip_missed()
            loop.stays_out = self._is_new = self._context.config.rank in self._staying_out
            if not self._is_new:
                runtime = self._context.runtime
                begins = runtime.spawn(self._begin_in_time(), name=f"{runtime.node}-begins")
                self._beginning = awaited_later(begins)

    async def _begin_in_time(self) -> None:
        """Names this newcomer while the others wait for its loop's first gradient, and gives up after `join_s`."""
        runtime, limit_s = self._context.runtime, self._context.config.plan.job.deadlines.join_s
        await runtime.sleep(min(SAY_S, limit_s))
        if not self.replica.has_computed:
            self._context.member.emit(EnteringEvent(limit_s=limit_s))
        await runtime.sleep(max(0.0, limit_s - SAY_S))
        if not self.replica.has_computed:
            late = f"its loop did not compute a gradient within {limit_s:g} s after session.wrap, and the others waited"
            hint = f"prepare the data before session.wrap; {to_wait_longer('join_s')}"
            await self._context.failed(DeadlineError(runtime.node, f"{late}: {hint}"))

    def _like(self, vector: Vector) -> Vector:
        """Memory for a vector that this worker is to receive."""
        memory, tensor = self._context.runtime.memory, vector.tensor
        return memory.allocate(len(vector), tensor.dtype, vector.name, lead_bytes=tensor.data_ptr() % 64)

    async def _copy(self, sources: Sequence[Vector], targets: Sequence[Vector]) -> None:
        pairs = [(one, other) for one, other in zip(sources, targets, strict=True) if one is not other]

        def copy(_: object) -> None:
            for source, target in pairs:
                target.tensor.copy_(source.tensor)

        if pairs:
            await self._context.runtime.compute(
                copy,
                work=Work("copy", elems=sum(len(source) for source, _ in pairs)),
                reads=[source.all for source, _ in pairs],
                writes=[target.all for _, target in pairs],
            )

    async def _digest(self, vectors: Sequence[Vector]) -> tuple[int, int]:
        """96 bits of a hash of these vectors, as two numbers that float64 represents exactly."""

        def digest(_: object) -> tuple[int, int]:
            hasher = blake2b(digest_size=12)
            for vector in vectors:
                hasher.update(vector.tensor.numpy().data.cast("B"))
            return int.from_bytes(hasher.digest()[:6]), int.from_bytes(hasher.digest()[6:])

        return await self._context.runtime.compute(
            digest,
            work=Work("copy", elems=sum(map(len, vectors))),
            reads=[vector.all for vector in vectors],
            shape_only=(0, 0),
        )

    @override
    async def finish(self) -> None:
        await self._strategy.finish(self.replica)

    def report(self) -> Sequence[Event]:
        """See `Exchange`: a round counts as a push and a fetch of the whole gradient."""
        self._transfers.accounted()
        meter, (rounds, size_bytes, whole_bytes) = self.replica.meter, self._accounted
        self._accounted = (meter.num_rounds, meter.exchanged_bytes, meter.whole_bytes)
        return [
            ExchangeEvent(
                rank=self._context.config.rank,
                pushed_bytes=meter.exchanged_bytes - size_bytes,
                fetched_bytes=meter.exchanged_bytes - size_bytes,
                whole_pushed_bytes=meter.whole_bytes - whole_bytes,
                whole_fetched_bytes=meter.whole_bytes - whole_bytes,
                pushes=meter.num_rounds - rounds,
                fetches=meter.num_rounds - rounds,
                retries=0,
            )
        ]

    def carry(self) -> None:
        """See `Exchange`. Does nothing if all workers share one vector in memory."""
        if not self.replica.setup.sharded and self._place is None:
            self._context.carried.keep(self.replica.version, self._snapshot_source.whole())

    async def close(self) -> None:
        """See `Exchange`: leaves the group."""
        await super().close()
        for task in (self._attending, self._beginning):
            if task is not None:
                task.cancel()
        await self._forming.close()


def _nothing() -> None:
    """Does nothing: there are no parameters to switch to."""


class _GroupSnapshot:
    """Implements `checkpoint.snapshot.SnapshotSource`: a piece is this worker's slice of a bucket.

    All workers pause after the same round, with the same parameters, so each writes a part of the vectors.

    Args:
        node: name of this worker's node.
        strategy: strategy of the run.
        replica: this worker.
        elems: number of elements.
        chunk_elems: elements of a chunk; this worker reports the versions of its part of them.
        place: as for `GroupExchange`.
    """

    def __init__(
        self,
        node: str,
        strategy: GroupStrategy,
        replica: GroupReplica,
        elems: int,
        chunk_elems: int,
        place: PartMap | None = None,
    ) -> None:
        self._node = node
        self._strategy = strategy
        self._replica = replica
        self._place = place
        self._elems = elems
        self._chunk_elems = chunk_elems

    def pieces(self, holders: Sequence[str]) -> Mapping[str, Pieces]:
        """See `SnapshotSource`."""
        index, size = self._among(holders)
        return self._pieces(replace(self._replica.setup.buckets, size=size).owned(index))

    def _among(self, holders: Sequence[str]) -> tuple[int, int]:
        """The place of this worker among those that write vectors of its part, and their number."""
        same = [name for name in holders if part_of(name) == part_of(self._node)]
        return same.index(self._node), len(same)

    def whole(self) -> Mapping[str, Pieces]:
        """All that all workers write of a vector, as one piece."""
        return self._pieces([(0, self._elems)])

    def _pieces(self, ranges: Sequence[tuple[int, int]]) -> dict[str, Pieces]:
        """These ranges of the parameters and of the update rule's state."""
        updater, parameters = self._replica.setup.updater, self._replica.parameters.tensor
        pieces: dict[str, Pieces] = {"": [(start, parameters[start:stop]) for start, stop in ranges]}
        for name, vector in updater.state.items():
            pieces[name] = [(start, updater.state_of(vector, start, stop).tensor) for start, stop in ranges]
        if name := self._strategy.checkpointed(self._replica.note):
            pieces[""], pieces[name] = pieces[name], pieces[""]
        if self._place is None:
            return pieces
        return {name: unsplit(those, self._place) for name, those in pieces.items()}

    def versions(self, holders: Sequence[str]) -> Sequence[int]:
        """See `SnapshotSource`: the number of rounds in the model."""
        index, size = self._among(holders)
        chunks = ChunkMap(self._elems, self._chunk_elems, size)
        return [self._replica.version] * len(chunks.chunks_of(index))

    def procedures(self, holders: Sequence[str]) -> Sequence[v1.Procedure]:
        """See `SnapshotSource`: the group's note, from its first worker alone, since all have the same."""
        replica = self._replica
        if not replica.note or self._among(holders)[0]:
            return ()
        return [v1.Procedure(number=replica.version, note=replica.note)]

    def still(self) -> AbstractAsyncContextManager[object]:
        """See `SnapshotSource`: only this worker writes the pieces, and it is paused."""
        return nullcontext()

    def restore(
        self,
        storage: Storage,
        folder: str,
        carried: Carried,
        *,
        whole: bool,
        state: bool = True,
        version: int | None = None,
    ) -> None:
        """Reads the ranges that this worker updates, or all, with their state. Raises what `load` raises.

        Args:
            storage: the run directory.
            folder: folder of the checkpoint.
            carried: what need not be read.
            whole: whether to read all.
            state, version: as for `ChunkCopies.load_checkpoint`.
        """
        setup, manifest = self._replica.setup, Manifest.decode(storage.read(f"{folder}/{STATE}"))
        notes = [v1.Procedure.FromString(b64decode(text)).note for text in manifest.procedures if state]
        self._replica.note = next((note for note in notes if note), b"")
        pieces = self._pieces([(0, self._elems)] if whole or not setup.sharded else setup.owned)
        written = min(manifest.versions, default=0)
        load(storage, folder, carried.fill(written, pieces if state else {"": pieces[""]}))
        self._replica.version = written if version is None else version
