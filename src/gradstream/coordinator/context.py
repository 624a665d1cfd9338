"""`CoordinatorContext`: objects that all parts of the coordinator share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradstream.coordinator.durable import Keeper
from gradstream.coordinator.lead import Instruction
from gradstream.coordinator.membership import Membership
from gradstream.runtime.base import Runtime
from gradstream.runtime.deadlines import Deadlines
from gradstream.transport.base import Endpoint


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """Objects that all parts of the coordinator share.

    Args:
        runtime: time and tasks; its storage is the run directory.
        endpoint: endpoint of the coordinator.
        membership: the state machine.
        carry_out: carries out instructions of the state machine.
        keeper: makes the state durable; everything that leaves the coordinator waits for it.
        age_s: time of the state machine, in seconds. It stops while the coordinator is suspended, so that
            no node is late because of that.
    """

    runtime: Runtime
    endpoint: Endpoint
    membership: Membership
    carry_out: Callable[[Sequence[Instruction]], None]
    age_s: Callable[[], float]
    keeper: Keeper

    @property
    def deadlines(self) -> Deadlines:
        """Bound the silence of nodes."""
        return self.membership.deadlines
