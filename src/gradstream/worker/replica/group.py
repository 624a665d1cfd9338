"""A replica that exchanges in a group of workers: it holds all parameters, and updates them itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradstream.collectives.buckets import Buckets
from gradstream.collectives.group import Group
from gradstream.data.base import BatchRef
from gradstream.memory import Vector
from gradstream.model.factors import FactorPairs
from gradstream.telemetry.traffic import Transfer
from gradstream.telemetry.wait_attribution import WaitAttribution
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.replica.base import Replica, ReplicaContext
from gradstream.worker.replica.peers import GroupPeers
from gradstream.worker.replica.sufficient_factors import SufficientFactors
from gradstream.worker.replica.updater import Updater
from gradstream.worker.schedule import Schedule

__all__ = ["GroupReplica"]


class GroupReplica(Replica):
    """Implements `strategies.api.Worker` where there are no servers.

    Parameters and gradient lie in the group's memory, so that it can work in place.

    Args:
        context: what every replica is made of.
        group: the workers of the run.
        buckets: how the vector is exchanged.
        updater: the update rule.
        sharded: each worker updates its slices alone.
        parameters: of this worker, or of all.
        outer: layers that may be exchanged as factors.
        on_transfer: see `GroupPeers`.
    """

    def __init__(
        self,
        context: ReplicaContext,
        group: Group,
        buckets: Buckets,
        updater: Updater,
        sharded: bool,
        parameters: Vector,
        outer: SufficientFactors | None = None,
        on_transfer: Callable[[Transfer], None] | None = None,
    ) -> None:
        attribution = WaitAttribution()
        super().__init__(context, group.allocate, attribution, parameters)
        self._outer = outer
        self._peers = GroupPeers(
            context.runtime, group, buckets, attribution, updater, sharded, self, outer, on_transfer
        )

    @property
    def group(self) -> GroupPeers:
        """See `strategies.api.Worker`."""
        return self._peers

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`: this worker's own, which between two rounds are those of all."""
        return self.parameters.tensor

    def _factors(self, batch: SampleBatch, *, mean: bool) -> FactorPairs | None:
        """See `Replica._factors`; the workers decide for this round."""
        if self._outer is None:
            return None
        said = None if mean else self.planned(batch.ref)
        return self._outer.begin(None if said is None else [samples for samples, _ in said])

    async def _flush(self) -> None:
        """A round is in the model when the strategy has gone on from it."""

    def planned(self, ref: BatchRef) -> Sequence[tuple[int, float]] | None:
        """See `peers.Rounds`."""
        if not isinstance(self._schedule, Schedule):
            return None
        said = []
        for rank in range(self.num_workers):
            other = BatchRef(ref.epoch, rank, ref.batch)
            size = self._schedule.plan.size(other)
            if size is None:
                return None
            said.append((size, self._rate(other)))
        return said

    def in_model(self, gradient: ComputedGradient) -> None:
        """See `peers.Rounds`."""
        self._handed_out(gradient.refs)()
