"""The coordinator's hands in a drive: waits for progress, and hands what a strategy says to membership.

Nothing of a drive is kept in a checkpoint. It goes by what is in the model: in a resumed run, where it begins
again, the waits that were over are over at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence

from gradstream.coordinator.instructions import Instruction
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.participation import ParticipationSchedule
from gradstream.data.ledger import Ledger
from gradstream.errors import ConfigError, GradstreamError, UserCodeError
from gradstream.runtime.base import Runtime
from gradstream.runtime.wakeup import Wakeup

__all__ = ["ParticipationDriver"]


class ParticipationDriver:
    """Implements `strategies.api.Participation`.

    Args:
        runtime: time.
        membership: of a run with participation.
        carry_out: carries its instructions out.
        time_s: seconds of training so far, those before the run was resumed included.
        num_samples: of a data epoch; None where nobody counts.
        look_s: how long nothing may have changed before it looks all the same.
    """

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        carry_out: Callable[[Sequence[Instruction]], None],
        *,
        time_s: Callable[[], float],
        num_samples: int | None,
        look_s: float,
    ) -> None:
        assert membership.participation is not None
        self._runtime = runtime
        self._membership = membership
        self._participation: ParticipationSchedule = membership.participation
        self._carry_out = carry_out
        self._time_s = time_s
        self._num_samples = num_samples
        self._look_s = look_s
        self._news = Wakeup()

    async def run(self, drive: Callable[[ParticipationDriver], Awaitable[None]]) -> None:
        """Carries a strategy's drive out to its end; what it raises ends the run."""
        try:
            await drive(self)
            self._check_active("drive() is over")
        except Exception as error:
            text = "" if isinstance(error, ConfigError) else traceback.format_exc()
            name, message = type(error).__name__, str(error)
            if not isinstance(error, GradstreamError):
                name, message = "UserCodeError", f"drive() of the strategy raised {name}: {message}"
            self._carry_out(self._membership.participation_failed(name, message, text))

    def look(self) -> None:
        """Something may have changed."""
        self._news.ring()

    # ---- what a strategy sees -----------------------------------------------------------

    @property
    def workers(self) -> list[str]:
        """See `Participation`."""
        return self._membership.nodes.worker_names

    @property
    def num_samples(self) -> int:
        """See `Participation`."""
        return self._counted(self._num_samples)

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
        self._carry_out(self._membership.set_active_workers(count, phase))
        while self._participation.awaited:
            await self._news.rung(self._runtime, self._look_s)

    async def until(self, *, samples: float | None = None, seconds: float | None = None) -> None:
        """See `Participation`."""
        while not self._passed(samples, seconds):
            self._check_active("drive() waits for progress")
            left_s = self._look_s if seconds is None else min(self._look_s, seconds - self._time_s())
            await self._news.rung(self._runtime, max(left_s, 1e-3))

    def _passed(self, samples: float | None, seconds: float | None) -> bool:
        if samples is not None and self.samples >= samples:
            return True
        return (seconds is not None and self._time_s() >= seconds) or (samples is None and seconds is None)

    def _check_active(self, when: str) -> None:
        if self._participation.wanted < 1:
            raise UserCodeError(f"{when}, but no worker takes part: it must engage() at least one before", "")

    @staticmethod
    def _counted(samples: int | None) -> int:
        if samples is None:
            raise ConfigError(
                "a drive goes by the number of samples in the model, and nobody counts those of a stream: "
                "leave out warm starts and waves, or wait for seconds"
            )
        return samples
