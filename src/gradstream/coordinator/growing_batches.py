"""`GrowingBatches`: lets a plan go on with more minibatches of a step, when gradients vary too much for so few."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from gradstream.checkpoint.manifest import JobPhase
from gradstream.coordinator.lead import Instruction, Lead
from gradstream.coordinator.lifecycle import Lifecycle
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.progress import SampleProgress
from gradstream.data.ledger import Ledger

# ---- variance test -----------------------------------------------------------------------
# `VarianceTest`: says when the gradients of a run vary so much that its batches have to grow.
#
# A step of W workers, each with k minibatches of b samples, has n = Wkb samples. With V the sum of the variances of
# all elements of one sample's gradient, and G the mean gradient:
#
#     grow if        V · (1/n - 1/N) > θ²·|G|²
#     to             n' = 1 / (θ²·|G|²/V + 1/N)        that is k' = ⌈n' / (W·b)⌉ minibatches, at least k + 1
#
# N is the number of training samples, of which an epoch has each once: so much do means of n of them vary.
#
# V and G come from lengths that each worker has anyway: |gⱼ|² of its k minibatches, and |ḡ|² of their mean. Unbiased
# are
#
#     V    ≈ (mean |gⱼ|² - |ḡ|²) / (1/b - 1/(kb))
#     |G|² ≈ |ḡ|² - V · (1/(kb) - 1/N)
#
# so k is 2 or more. Both are averaged over steps and workers, each by itself, before they are compared: the mean of a
# quotient is not the quotient of the means. Nothing is computed at other samples, and nothing is exchanged.
#
# References: Byrd, Chin, Nocedal and Wu, "Sample size selection in optimization methods for machine learning",
# Mathematical Programming 134, 2012, whose test takes the sample variance of one step; the estimates over small and
# large batches are those of McCandlish and others, "An Empirical Model of Large-Batch Training", 2018, appendix A.

MEMORY = 0.95
"""Weight of the earlier steps in the moving means, for each step of a worker."""

FEWEST = 20
"""Steps, of all workers, before the means count."""


class VarianceTest:
    """Follows the steps of a plan in which each has k minibatches.

    Args:
        theta: θ, in (0, 1) for the test of the paper; 1/√c keeps n at c times the gradient noise scale V/|G|².
        workers: W.
        accumulate: k, at least 2.
        largest: the most minibatches of a step.
        population: N; infinite in a stream.
    """

    KEPT = ("_variance", "_square", "_count")
    """See `durable.state`."""

    def __init__(
        self, theta: float, workers: int, accumulate: int, largest: int, population: float = math.inf
    ) -> None:
        self._theta = theta
        self._workers = workers
        self._accumulate = accumulate
        self._largest = largest
        self._population = population
        self._variance = 0.0
        self._square = 0.0
        self._count = 0

    def event(self, event: Mapping[str, Any]) -> int:
        """Takes an event of any node. Returns k', or 0 while batches are large enough, or as large as they get."""
        parts, whole = event.get("part_squares"), event.get("square")
        samples, k = event.get("samples", 0), self._accumulate
        if event["event"] != "step" or parts is None or whole is None or samples < k:
            return 0
        each = samples / k
        variance = (parts - whole) / (1 / each - 1 / samples)
        square = whole - variance * (1 / samples - 1 / self._population)
        self._count += 1
        weight = (1 - MEMORY) / (1 - MEMORY**self._count)  # unbiased from the first value on
        self._variance += weight * (variance - self._variance)
        self._square += weight * (square - self._square)
        return self._grown(each) if self._count >= FEWEST and k < self._largest else 0

    def _grown(self, each: float) -> int:
        enough, left = self._theta**2 * self._square, 1 / self._population
        if self._variance * (1 / (self._workers * self._accumulate * each) - left) <= enough:
            return 0
        share = max(0.0, enough) / self._variance + left  # 1/n'
        wanted = 1 / share / (self._workers * each) if share else math.inf
        return min(self._largest, max(self._accumulate + 1, math.ceil(min(wanted, self._largest))))


# ---- lead --------------------------------------------------------------------------------

GROWS_BEFORE = 8
"""Steps of each worker that have to be left for a boundary at which batches grow."""


class GrowingBatches(Lead):
    """Ends a plan at a boundary after which the same one goes on with larger batches, if enough of it is left.

    Args:
        test: says when, and how large.
        present: the present plan, as checkpoints name it.
        life: ends the plan.
        progress: what of it is in the model.
        nodes: the members.
    """

    def __init__(
        self,
        test: VarianceTest,
        present: JobPhase,
        life: Lifecycle,
        progress: SampleProgress,
        nodes: Nodes,
    ) -> None:
        self._test = test
        self._present = present
        self._life = life
        self._progress = progress
        self._nodes = nodes

    @override
    def durable(self) -> dict[str, object]:
        return {"variance_test": self._test}

    def on_event(self, event: Mapping[str, Any], at_s: float) -> list[Instruction]:
        """Looks at an event of any node."""
        accumulate, ledger = self._test.event(event), self._progress.ledger
        if not accumulate or not self._life.training or not isinstance(ledger, Ledger):
            return []
        left = ledger.num_planned - ledger.num_receipts
        if ledger.finished or left <= GROWS_BEFORE * self._nodes.num_workers:
            return []
        return self._life.cross(at_s, replace(self._present, over=True, grown=accumulate))
