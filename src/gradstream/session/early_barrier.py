"""`EarlyBarrier`: lets workers wait for one another before they have joined their run, which they do in `wrap`.

    if session.rank == 0: download()
    session.barrier()

They leave files beside the run's specification, so they have to be on one machine.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from gradstream.errors import ConfigError, DeadlineError
from gradstream.run.placement import WorkerPlacement
from gradstream.run.plan import worker_name

POLL_S = 0.05


class EarlyBarrier:
    """The barriers of one worker before `wrap`.

    Args:
        place: the rank of this worker, and the place of its run.
    """

    def __init__(self, place: WorkerPlacement) -> None:
        self._place = place
        self._passed = 0

    def wait(self) -> None:
        """Waits until all workers have called it as often as this one.

        Raises:
            ConfigError: the workers are on several machines.
            DeadlineError: a worker has not called it within `join_s`.
        """
        place, deadlines = self._place, self._place.job().deadlines
        if place.node_spec().elsewhere:
            raise ConfigError(
                f"worker-{place.rank}: session.barrier() before session.wrap: workers on several machines meet in wrap "
                "only; call wrap first, and the barrier after it: wrap needs the model and its optimizer, but no data"
            )
        folder = self._folder()
        folder.mkdir(exist_ok=True)
        (folder / f"{self._passed}-{place.rank}").touch()
        missing, end = set(range(place.world_size)), time.monotonic() + deadlines.join_s
        while missing := {rank for rank in missing if not (folder / f"{self._passed}-{rank}").exists()}:
            if time.monotonic() > end:
                names = ", ".join(map(worker_name, sorted(missing)))
                raise DeadlineError(
                    names,
                    f"did not call session.barrier() within {deadlines.join_s:g} s after worker-{place.rank}; if its "
                    "work there takes longer, join(deadlines=gradstream.Deadlines(join_s=...))",
                )
            time.sleep(POLL_S)
        self._passed += 1

    def over(self) -> None:
        """Removes the files, once all workers have joined."""
        if self._passed and self._place.rank == 0:
            shutil.rmtree(self._folder(), ignore_errors=True)

    def _folder(self) -> Path:
        """A folder of its own for each start of the run: a resumed run must not see the files of the one before."""
        spec = Path(self._place.spec)
        return spec.parent / f"barrier-{spec.stat().st_mtime_ns}"
