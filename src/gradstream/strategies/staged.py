"""Warm starts and waves: which workers of an asynchronous strategy train at which time.

    warm start      one worker trains alone until `warm_start` samples are in the model
    waves           the others join in `waves` groups of equal size, `wave_every` samples apart
    finish alone    one worker trains alone again, through the last `finish_alone` samples of the run

Alone, a worker fetches before each gradient and pushes after it, and goes through all of the data in the order of
a run with one node. Where every push is an update, that is plain SGD by the server's update rule. The rule's state
(the sums of Adagrad) is kept from stage to stage.

Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, §4.1, for the warm start, in one
sentence. The paper has neither waves nor an end by one worker.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.server.client.arrival import Arrival
from gradstream.strategies.api import Participation, ServerWorker
from gradstream.strategies.base import ServerStrategy
from gradstream.strategies.checks import check_count

ALONE, TOGETHER = "alone", "together"
"""Phases of a staged run; see `ServerWorker.phase`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStrategy(ServerStrategy):
    """The base of strategies in which no worker waits for another, so that workers can join one after the other.

    A length is a number of samples, or of data epochs ("0.5epochs"); 0 is none.

    Args:
        warm_start: length of the stage in which one worker trains first, alone.
        waves: number of groups in which the others join after it, at least 1.
        wave_every: length between one wave and the next; 0 is the length of the warm start.
        finish_alone: length of the last stage, in which one worker trains alone.
    """

    warm_start: int | str = 0
    waves: int = 1
    wave_every: int | str = 0
    finish_alone: int | str = 0

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_count(name, "waves", self.waves, "waves")
        self._lengths(num_samples=1)
        if self.waves > 1 and not (self.warm_start or self.wave_every):
            raise ConfigError(
                f"{name}(waves={self.waves}): expected wave_every, the number of samples from one wave to the next, "
                "or warm_start, whose length is the default of wave_every"
            )
        if self.waves == 1 and self.wave_every:
            raise ConfigError(
                f"{name}(wave_every={self.wave_every!r}) with one wave, so nothing follows after wave_every; expected "
                "waves=2 or more, or leave wave_every out"
            )

    def _lengths(self, num_samples: int) -> list[float]:
        """Samples of the warm start, between two waves, and of the end; a data epoch has `num_samples`."""
        return [
            _samples(f"{type(self).__name__}.{option}", getattr(self, option), num_samples)
            for option in ("warm_start", "wave_every", "finish_alone")
        ]

    def drives(self) -> bool:
        """See `ServerStrategy.drives`."""
        return bool(self.warm_start or self.finish_alone) or self.waves > 1

    async def drive(self, run: Participation) -> None:
        """Carries out warm start, waves, and the end by one worker."""
        num_workers = len(run.workers)
        warm, between, last = self._lengths(run.num_samples)
        between = between or warm
        if warm + (self.waves - 1) * between + last >= run.total_samples:
            raise ConfigError(
                f"{self}: the stages with few workers at the begin and the end take all {run.total_samples:,} samples "
                "of the run, so nothing is left for all workers together; shorten the stages, or make the run longer"
            )
        if warm:
            await run.set_active_workers(1, ALONE)
            await run.until(samples=warm)
        for wave in range(self.waves):
            await run.until(samples=warm + wave * between)
            await run.set_active_workers(math.ceil(num_workers * (wave + 1) / self.waves), TOGETHER)
        if last:
            await run.until(samples=run.total_samples - last)
            await run.set_active_workers(0, TOGETHER)
            await run.set_active_workers(1, ALONE)

    async def fetch(self, worker: ServerWorker, pending: Arrival | None, *, overlap: bool) -> Arrival | None:
        """Gives a worker the parameters of its next gradients, and returns the fetch that is pending from now on.

        Args:
            worker: the argument of `train`.
            pending: the fetch started a period ago; None if there is none.
            overlap: start the next fetch now, so that it travels while the worker computes. Alone, a worker never
                does: it waits for the newest parameters.
        """
        if pending is not None:
            await worker.swap_in(pending)
        if not overlap or worker.phase == ALONE:
            await worker.pull()
            return None
        if pending is None or (worker.since == 0 and self.drives()):  # it was started in an earlier phase
            await worker.swap_in(worker.server.fetch_soon())
        return worker.server.fetch_soon()


def _samples(option: str, length: int | str, num_samples: int) -> float:
    """A length in samples: 5000, "2epochs", "0.5 epochs" or "epoch"; a data epoch has `num_samples`.

    Raises:
        ConfigError: it is none of these; the message names the option.
    """
    if isinstance(length, int) and not isinstance(length, bool) and length >= 0:
        return float(length)
    if length == "epoch":
        return float(num_samples)
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?epochs?", length) if isinstance(length, str) else None
    if found is not None and math.isfinite(float(found[1])):
        return float(found[1]) * num_samples
    raise ConfigError(
        f"{option}={length!r}: expected a number of samples of at least 0, or of data epochs, such as "
        "'2epochs' or '0.5epochs'"
    )
