"""What tests of strategies in pairs have in common: small runs, of which each worker's own parameters are noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import BatchRef
from gradstream.data.plan import RoundPlan
from gradstream.memory import Vector
from gradstream.worker.pairs.replica import PeerReplica

Array = np.ndarray[Any, Any]
LR = 2.0**-5


@dataclass
class Notes:
    """What workers give and have, by round: rank -> vectors.

    Attributes:
        given: what each gave to its partner, or would have.
        own: its parameters after the round.
    """

    given: dict[int, dict[int, list[Array]]] = field(default_factory=dict)
    own: dict[int, dict[int, Array]] = field(default_factory=dict)


def noted(patch: pytest.MonkeyPatch) -> Notes:
    """Notes what all workers of later runs give and have."""
    notes, meet, go_on_from = Notes(), PeerReplica.exchange_with, PeerReplica.go_on_from
    pass_on = PeerReplica.pass_on

    async def meeting(self: PeerReplica, partner: int | None, given: Sequence[Vector]) -> Any:
        copies = [one.tensor.numpy().copy() for one in given]
        notes.given.setdefault(self.version, {})[self.rank] = copies
        return await meet(self, partner, given)

    async def passing(self: PeerReplica, to: int | None, giver: int | None, given: Sequence[Vector]) -> Any:
        notes.given.setdefault(self.version, {})[self.rank] = [one.tensor.numpy().copy() for one in given]
        return await pass_on(self, to, giver, given)

    def going_on(self: PeerReplica, vector: Vector) -> None:
        notes.own.setdefault(self.version, {})[self.rank] = vector.tensor.numpy().copy()
        go_on_from(self, vector)

    patch.setattr(PeerReplica, "exchange_with", meeting)
    patch.setattr(PeerReplica, "pass_on", passing)
    patch.setattr(PeerReplica, "go_on_from", going_on)
    return notes


def inner_steps(data: ArrayDataset, plan: RoundPlan, rank: int, steps: Sequence[int], w: Array) -> Array:
    """Parameters after steps of plain SGD of rate `LR` on the mean gradients of a worker's minibatches."""
    for step in steps:
        batch = data.batch(plan.ids(BatchRef(0, rank, step)))
        x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
        w = w - LR * ((x @ w - y) @ x / len(x))
    return w


def losses(run: gs.Run, data: ArrayDataset) -> float:
    """The mean squared error of the final parameters over all samples."""
    batch = data.batch(np.arange(data.num_samples))
    x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
    return float(np.mean((x @ run.parameters["w"] - y) ** 2))


def bytes_of(run: gs.Run) -> dict[int, tuple[int, int]]:
    """Bytes that each worker has given and taken, by rank."""
    found: dict[int, tuple[int, int]] = {}
    for event in run.events:
        if event["event"] == "exchange":
            given, taken = found.get(event["rank"], (0, 0))
            found[event["rank"]] = given + event["pushed_bytes"], taken + event["fetched_bytes"]
    return found


def alone(run: gs.Run) -> list[Mapping[str, Any]]:
    """The rounds that workers went through without their partner."""
    return [event for event in run.events if event["event"] == "alone"]
