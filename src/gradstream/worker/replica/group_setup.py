"""How one worker exchanges in a group, and what it counts of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradstream.collectives.group import Buckets, Group
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime
from gradstream.telemetry.events import GROUP
from gradstream.telemetry.noise_meter import NoiseMeter
from gradstream.telemetry.wait_attribution import Kind, Transfer, WaitAttribution
from gradstream.worker.joint_gradient import JointGradient
from gradstream.worker.replica.coded_sums import CodedSums, LowRankSums
from gradstream.worker.replica.sufficient_factors import SufficientFactors
from gradstream.worker.replica.updater import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    """How the workers of a run exchange in a group, and who updates which parameters.

    Args:
        group: the workers.
        buckets: division of the flat vector into parts that are exchanged one after the other.
        updater: the update rule, with the state that this worker keeps.
        sharded: each worker updates only its own slice of every bucket.
        parameters: parameters of this worker; if sharded in shared memory, one vector of all workers.
        spare: where a death during an update is survived though each worker updates its own slices: a second vector for
            the parameters, and for each state, into which the update is made.
        factors: exchanges layers as factors; None if no layer may be.
        stand_ins: by rank of a lost worker, the rank of the worker that computes its part of each round.
        joint: computes the parts of this worker and of those for which it stands in; None if it does for nobody.
        coded: sums gradients whose parts travel encoded; None where they travel as they are.
        low_rank: sums matrices as products of thin ones; None where they are summed as they are.
        noise: gets the squares of gradients, where they are measured; else None.
    """

    group: Group
    buckets: Buckets
    updater: Updater
    sharded: bool
    parameters: Vector
    spare: Sequence[Vector] = ()
    factors: SufficientFactors | None = None
    stand_ins: Mapping[int, int] = field(default_factory=dict)
    joint: JointGradient | None = None
    noise: NoiseMeter | None = None
    coded: CodedSums | None = None
    low_rank: LowRankSums | None = None

    @property
    def owned(self) -> Sequence[tuple[int, int]]:
        """[start, stop) of this worker's slices of all buckets."""
        return self.buckets.owned(self.group.rank)


class GroupMeter:
    """Counts a worker's exchanges in its group, and the time that it waits for them.

    Args:
        runtime: runtime of the worker's node.
        attribution: takes down for whom the worker waited: for the group, or for its own update.
        on_transfer: called with each exchange of a whole gradient.

    Attributes:
        num_rounds: number of updates.
        exchanged_bytes: bytes that the worker has given to exchanges.
        whole_bytes: bytes that it would have given, had all been summed as it is.
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
        """The exchange of spans, which began at `begun_ns`, is done; they stand for so many bytes, or for their own."""
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
