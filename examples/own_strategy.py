"""A strategy of one's own: gradients that others have overtaken count less.

gradstream check examples/own_strategy.py:Damped
gradstream train examples/linear_regression.py --strategy examples/own_strategy.py:Damped
"""

from dataclasses import dataclass

import gradstream as gs
from gradstream.server.aggregation import EveryPush


@dataclass(frozen=True)
class Damping(EveryPush):  # the server: every push is an update of its own
    power: float

    def weights(self, version, update):
        return [(1 + version - one.base_version) ** -self.power for one in update]


@dataclass(frozen=True)
class Damped(gs.strategies.ServerStrategy):  # its workers exchange through servers
    """Asynchronous SGD, w ← w - γ·g / (1 + τ)^power (Zhang, Gupta, Lian, Liu, IJCAI 2016)."""

    power: float = 1.0
    partitioning = "queue"  # each worker takes minibatches as it needs them
    survives_worker_loss = True  # nobody waits for anybody

    def optimizer(self):
        return gs.optim.SGD(lr=0.05)

    async def train(self, worker):  # the client
        async for batch in worker.batches():
            await worker.pull()  # w, and its version
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated())

    def rule(self, num_workers, reduction):
        return Damping(self.power)
