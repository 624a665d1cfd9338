"""HOGWILD!: worker processes of one machine update one vector in shared memory, without locks.

    each worker, without waiting for any other:
      sample e of its partition:   read the components of w that e touches, as they are at this moment
                                   g ← ∂f_e(w), on these components alone
      for each touched v:          w_v ← w_v - η·g_v

There is no server, no message, and no consistent read. Where samples are sparse, two workers rarely touch the same
component at the same time. An update that is overwritten, or read half way, is noise that hardly slows convergence
down. `update` says how one component is updated:

    "atomic"             an atomic add: no update is lost. This is the algorithm as the paper analyses it
    "plain"              load, add, store: of two updates at the same time, one may be lost

and, for comparison, four ways in which workers wait for each other, each with plain stores:

    "lock"               one lock of the whole vector, held for the whole step
    "short_lock"         the same lock, taken when it is known which components e touches: held from the first
                         read of w to the last write
    "component_locks"    AIG of the paper: the components of e are locked from read to write
    "round_robin"        RR, the paper's main baseline: workers compute gradients at the same time and write them
                         in a fixed order, each in its turn; the turn of a worker that has left is passed over

With a dense model (a network of torch's) each worker computes the gradient of a minibatch on the shared vector and
adds it. Locks are held during the addition, and turns go round among the workers that have a gradient to add. The
theory does not cover that.

Bytes: none; the cost is traffic of cache lines between cores. A dead worker stops no other, and the others take over
its samples.

Reference: Niu, Recht, Ré, Wright, "HOGWILD!: A lock-free approach to parallelizing stochastic gradient
descent", NIPS 2011; as in its experiments, all components of e are updated, not one at random. RR is of
Langford, Smola, Zinkevich, "Slow learners are fast", NIPS 2009. Different here: samples come in the order of
a permutation of each epoch, not independently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import UnknownNameError
from gradstream.optim import SGD
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import StepDecay
from gradstream.sparse.updates import UPDATES
from gradstream.strategies.api import SharedMemoryWorker
from gradstream.strategies.base import SharedMemoryStrategy


@dataclass(frozen=True, slots=True)
class Hogwild(SharedMemoryStrategy):
    """HOGWILD! (Niu and others, 2011), and four ways with locks or turns for comparison; see the module.

    Args:
        update: how one component is updated: "atomic", "plain", "lock", "short_lock", "component_locks" or
            "round_robin".

    Example:
        >>> strategy = gs.Hogwild(update="plain")
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["servers"]
        (16, 0)
    """

    update: str = "atomic"

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    plain: ClassVar[Mapping[str, object] | None] = {}

    def __post_init__(self) -> None:
        if self.update not in UPDATES:
            raise UnknownNameError("update of Hogwild", self.update, UPDATES)

    def optimizer(self) -> Optimizer:
        """Plain SGD. The rate is multiplied by 0.9 after each epoch, as in the paper's experiments."""
        return SGD(lr=StepDecay(0.1, every=1, factor=0.9))

    async def train(self, worker: SharedMemoryWorker) -> None:
        """Makes each sample an update where the model is sparse; else each minibatch."""
        shared = worker.shared
        async for batch in worker.batches():
            if shared.sparse:
                await shared.sweep(batch, self.update)
            else:
                await shared.add(await worker.gradient(batch), self.update)
