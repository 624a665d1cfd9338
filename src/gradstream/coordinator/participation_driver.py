"""`ParticipationDriver`: runs a strategy's `drive` on the coordinator.

A checkpoint contains nothing of the drive. The drive goes by what is in the model: in a resumed run it begins
again, and all waits that were over return at once.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable

from gradstream.coordinator.context import CoordinatorContext
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.coordinator.relay import RunClock
from gradstream.data.ledger import Ledger
from gradstream.errors import ConfigError, GradstreamError, UserCodeError
from gradstream.runtime.tasks import Wakeup


class ParticipationDriver:
    """Runs a strategy's `drive`, which sets how many workers take part. Implements `strategies.api.Participation`.

    Args:
        context: see `CoordinatorContext`, of a run whose strategy has a `drive`.
        drive: the strategy's schedule.
        clock: time of the run.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        drive: Callable[[ParticipationDriver], Awaitable[None]],
        clock: RunClock,
    ) -> None:
        self._context = context
        self._membership = context.membership
        self._participation = context.membership.lead(ParticipationSchedule)
        self._drive = drive
        self._clock = clock
        self._look_s = context.deadlines.notice_s
        self._changed = Wakeup()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the drive."""
        runtime = self._context.runtime
        self._task = runtime.spawn(self._run(), name=f"{runtime.node}-drive")

    def stop(self) -> None:
        """Ends the drive."""
        if self._task is not None:
            self._task.cancel()

    def look(self) -> None:
        """Lets the drive look whether what it waits for has come."""
        self._changed.ring()

    async def _run(self) -> None:
        """Runs the drive to its end. An exception that it raises ends the run."""
        try:
            await self._drive(self)
            self._check_active("drive() is over")
        except Exception as error:
            text = "" if isinstance(error, ConfigError) else traceback.format_exc()
            name, message = type(error).__name__, str(error)
            if not isinstance(error, GradstreamError):
                name, message = "UserCodeError", f"drive() of the strategy raised {name}: {message}"
            if not self._membership.life.over:
                self._context.carry_out(self._membership.life.abort("coordinator", name, message, text))

    # ---- the strategy's view --------------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        """See `Participation`."""
        return self._membership.nodes.worker_names

    @property
    def num_samples(self) -> int:
        """See `Participation`."""
        return self._counted(self._membership.progress.samples_per_epoch)

    @property
    def total_samples(self) -> int:
        """See `Participation`."""
        ledger = self._membership.progress.ledger
        assert isinstance(ledger, Ledger)
        return self._counted(ledger.total_samples) + self._membership.progress.num_samples_before

    @property
    def samples(self) -> int:
        """See `Participation`."""
        return self._counted(self._membership.progress.num_samples)

    async def set_active_workers(self, count: int, phase: str = "") -> None:
        """See `Participation`."""
        if self._membership.life.training:
            self._context.carry_out(self._participation.set_active_workers(count, phase))
        while self._participation.awaited:
            await self._changed.rung(self._context.runtime, self._look_s)

    async def until(self, *, samples: float | None = None, seconds: float | None = None) -> None:
        """See `Participation`."""
        while not self._passed(samples, seconds):
            self._check_active("drive() waits for progress")
            left_s = self._look_s if seconds is None else min(self._look_s, seconds - self._clock.time_s())
            await self._changed.rung(self._context.runtime, max(left_s, 1e-3))

    def _passed(self, samples: float | None, seconds: float | None) -> bool:
        if samples is not None and self.samples >= samples:
            return True
        if seconds is not None:
            return self._clock.time_s() >= seconds
        return samples is None

    def _check_active(self, when: str) -> None:
        if self._participation.wanted < 1:
            raise UserCodeError(
                f"{when}, but no worker takes part: it must call set_active_workers() with at least 1 before",
                "",
            )

    @staticmethod
    def _counted(samples: int | None) -> int:
        if samples is None:
            raise ConfigError(
                "a drive goes by the number of samples in the model, and a stream does not count its samples: "
                "leave out warm starts and waves, or wait for seconds"
            )
        return samples
