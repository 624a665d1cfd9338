"""How one worker exchanges in a group, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from gradstream.checkpoint.own_state import CHECK
from gradstream.codec.low_rank import PowerSGD
from gradstream.collectives.group import Buckets, Group, GroupMembers
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime
from gradstream.strategies.base import GroupStrategy
from gradstream.telemetry.events import GROUP, Event
from gradstream.telemetry.meters import Kind, NoiseMeter, Transfer, WaitAttribution
from gradstream.wire import v1
from gradstream.wire.chunks import member_name
from gradstream.worker.assembly import Assembly
from gradstream.worker.group.coded_sums import CodedSums, LowRankSums
from gradstream.worker.group.joint_gradient import JointGradient
from gradstream.worker.schedule import Schedule
from gradstream.worker.unsent_state import encoder_of
from gradstream.worker.updater import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    """How the workers of a run exchange in a group, and who updates which parameters.

    Args:
        group: the workers.
        buckets: division of the flat vector into parts that are exchanged one after the other.
        updater: the update rule, with the state that this worker keeps.
        sharded: each worker updates only its own slice of every bucket.
        parameters: parameters of this worker; if sharded in shared memory, one vector of all workers.
        spare: second vectors for the parameters and each state, into which updates are written so that a death during
            an update is survived although each worker updates its own slices.
        stand_ins: by rank of a lost worker, the rank of the worker that computes its part of each round.
        joint: computes the parts of this worker and of those for which it stands in; None if there are none.
        coded: sums gradients in encoded messages; None if messages are not encoded.
        low_rank: sums matrices as products of thin ones; None if they are summed as they are.
        noise: receives the squares of gradients, if they are measured; else None.
    """

    group: Group
    buckets: Buckets
    updater: Updater
    sharded: bool
    parameters: Vector
    spare: Sequence[Vector] = ()
    stand_ins: Mapping[int, int] = field(default_factory=dict)
    joint: JointGradient | None = None
    noise: NoiseMeter | None = None
    coded: CodedSums | None = None
    low_rank: LowRankSums | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks in the run of the group's members, in the order of their ranks in the group."""
        return [int(name.rpartition("-")[2]) for name in self.group.names]

    @property
    def owned(self) -> Sequence[tuple[int, int]]:
        """[start, stop) of this worker's slices of all buckets."""
        return self.buckets.owned(self.group.rank)


class GroupMeter:
    """Counts a worker's exchanges in its group, and the time that it waits for them.

    Args:
        runtime: runtime of the worker's node.
        attribution: records whom the worker waited for: the group, or its own update.
        on_transfer: called with each exchange of a whole gradient.

    Attributes:
        num_rounds: number of updates.
        exchanged_bytes: bytes that the worker has sent in exchanges.
        whole_bytes: bytes that it would have sent without encoding.
    """

    def __init__(
        self, runtime: Runtime, attribution: WaitAttribution, on_transfer: Callable[[Transfer], None]
    ) -> None:
        self.num_rounds = 0
        self.exchanged_bytes = self.whole_bytes = 0
        self._runtime = runtime
        self._attribution = attribution
        self._on_transfer = on_transfer
        self._exchange_s = 0.0  # in this round

    def waited(self, begun_ns: int) -> None:
        """The worker has waited for the group since `begun_ns`."""
        self._attribution.note(Kind.SHARD, GROUP, begun_ns, self._runtime.now())

    def exchanged(self, sent: Sequence[Span], begun_ns: int, *, whole: int | None = None) -> None:
        """The exchange of spans, begun at `begun_ns`, is done. `whole` is what they stand for, in bytes, if encoded."""
        sent_bytes = sum(span.tensor.nbytes for span in sent)
        self._exchange_s += (self._runtime.now() - begun_ns) / 1e9
        self.waited(begun_ns)
        self.exchanged_bytes += sent_bytes
        self.whole_bytes += sent_bytes if whole is None else whole

    def commanded(self, begun_ns: int) -> None:
        """Commands on the worker's own vectors, which began at `begun_ns`, are done."""
        self._attribution.note(Kind.OWN, self._runtime.node, begun_ns, self._runtime.now())

    def updated(self, parameters: Vector, begun_ns: int) -> None:
        """The round's update, which began at `begun_ns`, is done."""
        self._attribution.note(Kind.OWN, self._runtime.node, begun_ns, self._runtime.now())
        self.num_rounds += 1
        self._on_transfer(Transfer("push", self._exchange_s, parameters.tensor.nbytes))
        self._exchange_s = 0.0


class GroupAssembly:
    """Forms a worker's groups, and makes its setup in each.

    Args:
        strategy: strategy of the run.
        heard: called with events that describe a group.
    """

    def __init__(self, assembly: Assembly, strategy: GroupStrategy, heard: Callable[[Event], None]) -> None:
        self._assembly = assembly
        self._config = assembly.config
        self._context = assembly.context
        self._strategy = strategy
        self._heard = heard

    async def form(self, notice: v1.Notice) -> Group:
        """Forms the group of the present workers."""
        config, context = self._config, self._context
        part = config.part  # a present worker has all its parts
        names = [member_name(part, node.rank) for node in notice.nodes if node.role == "worker"]
        rank = names.index(context.runtime.node)
        members = GroupMembers(names, rank, notice.epoch, config.plan.job.deadlines.silence_s)
        return await config.form_group(
            context.runtime,
            context.endpoint,
            members,
            on_event=self._heard,
        )

    async def setup(self, group: Group, notice: v1.Notice, before: GroupSetup | None = None) -> GroupSetup:
        """How this worker exchanges in the group of a notice. Reuses what it can of the previous setup."""
        config, layout = self._config, self._config.model.layout
        sharded = self._strategy.sharded
        if sharded is None:  # a user's loop may look at all parameters after another worker's death
            alone = config.loop is None and config.plan.parts == 1
            grouped = config.update_rule[1]
            alone = (
                alone and not (grouped is not None and grouped.whole_matrices) and config.plan.codec is None
            )
            sharded = group.shares_memory and alone
        bucket_elems = self._strategy.bucket_elems(layout.dtype.itemsize, config.chunk_elems)
        buckets = Buckets(layout.elems, bucket_elems, group.size)
        spare: Sequence[Vector] = ()
        if before is not None and not (sharded or before.sharded):
            parameters, updater = before.parameters, before.updater
        elif sharded:
            parameters, updater, spare = await self._common(group, buckets)
        else:
            parameters = group.allocate(
                layout.elems, layout.dtype, "parameters", lead_bytes=layout.lead_bytes
            )
            updater = self._updater(self._context.runtime.memory.allocate, [(0, layout.elems)])
        stand_ins = {stand_in.rank: int(stand_in.worker.rpartition("-")[2]) for stand_in in notice.stand_ins}
        return GroupSetup(
            group=group,
            buckets=buckets,
            updater=updater,
            sharded=sharded,
            parameters=parameters,
            spare=spare,
            stand_ins=stand_ins,
            joint=self._joint([lost for lost, rank in stand_ins.items() if rank == config.rank]),
            noise=self._noise(group) if config.plan.job.noise_scale else None,
            coded=self._coded(group, buckets),
            low_rank=self._low_rank(group, buckets),
        )

    def _low_rank(self, group: Group, buckets: Buckets) -> LowRankSums | None:
        config, kept, runtime = self._config, self._assembly.unsent, self._context.runtime
        if kept is None or not isinstance(config.plan.codec, PowerSGD):
            return None
        layout, seed = config.model.layout, config.plan.job.seed
        return LowRankSums(runtime, group, layout, buckets.bounds, config.plan.codec, seed, kept)

    def _coded(self, group: Group, buckets: Buckets) -> CodedSums | None:
        context, unsent, layout = self._context, self._assembly.unsent, self._config.model.layout
        encoder = encoder_of(context, unsent)
        if encoder is None or unsent is None:
            return None
        elems = next((slot.start for slot in layout.slots if slot.name == CHECK), layout.elems)
        return CodedSums(context.runtime, group, buckets.bounds, encoder, unsent, elems)

    def _noise(self, group: Group) -> NoiseMeter:
        parts = self._config.plan.parts
        return NoiseMeter(self._config.rank, group.size * parts, pieces=1, emit=self._context.member.emit)

    async def _common(self, group: Group, buckets: Buckets) -> tuple[Vector, Updater, Sequence[Vector]]:
        """Parameters that all workers share, the rule for this worker's slices of them, and spare vectors.

        If the run survives the loss of a worker, the workers also share the rule's state, and have everything twice.
        """
        config, layout = self._config, self._config.model.layout
        common = partial(group.common, layout.elems, layout.dtype)
        parameters = await common("parameters")
        if not config.losses.stands_in or group.size == 1:
            owned = buckets.owned(group.rank)
            return parameters, self._updater(self._context.runtime.memory.allocate, owned), ()
        names = config.update_rule[0].state_names
        states = {name: await common(name) for name in names}
        spare = [await common(name) for name in ("parameters", *names)]
        return parameters, self._updater(lambda elems, dtype, name: states[name], [(0, layout.elems)]), spare

    def _updater(
        self, allocate: Callable[[int, torch.dtype, str], Vector], ranges: Sequence[tuple[int, int]]
    ) -> Updater:
        return Updater(allocate, *self._config.update_rule, ranges, self._config.model.layout.dtype)

    def _joint(self, lost: Sequence[int]) -> JointGradient | None:
        """The gradients of this worker and of the lost ones for which it stands in."""
        if not lost:
            return None
        config, model = self._config, self._config.model
        assert isinstance(self._assembly.source, Schedule)
        part = self._context.runtime.memory.allocate(model.layout.elems, model.layout.dtype, "part")
        sources = {rank: self._assembly.source_of(rank) for rank in (config.rank, *lost)}
        if self._assembly.place is not None:
            # Not imported by a run without servers.
            from gradstream.worker.parts.joint_gradient import PartJointGradient

            return PartJointGradient(
                self._context.runtime, sources, self._assembly.source, model.reduction, part
            )
        return JointGradient(sources, self._assembly.source, model.reduction, part)
