"""A loop of the user's own on several workers, all in threads of this process: for tests of loops."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from gradstream.job.job import Job
from gradstream.run.placement import WorkerPlacement, handed_out
from gradstream.session.host import Host
from gradstream.session.job import job as session_job
from gradstream.session.session import Session
from gradstream.session.worker_session import WorkerSession

__all__ = ["loop_in_threads"]

T = TypeVar("T")


def loop_in_threads(loop: Callable[[Session], T], workers: int = 2, **options: object) -> list[T]:
    """Runs `loop(session)` as each of several workers, and returns what they return, by rank.

    The threads share torch's global generators, so let the loop draw from one of its own. A session
    that the loop has not closed is closed when it returns.

    Args:
        loop: a script's work with the session that `gradstream.join` gives it.
        workers: how many.
        options: of `gradstream.join`: strategy, servers, deadlines, ...

    Raises:
        The first error that a worker raised itself, and did not get from another.
    """
    with tempfile.TemporaryDirectory() as folder:
        job: Job = dataclasses.replace(
            session_job(),
            workers=workers,
            run_dir=Path(folder) / "run",
            **options,  # type: ignore[arg-type]
        )
        host = Host(job, processes=False)
        spec, coordinator = host.start()
        given = handed_out(spec)
        players = [
            _Player(loop, WorkerPlacement(rank, workers, spec, coordinator, given)) for rank in range(workers)
        ]
        for player in players:
            player.thread.start()
        for player in players:
            player.thread.join()
        host.join()
    failed = sorted((p for p in players if p.error is not None), key=lambda p: p.session.aborted)
    if failed:
        assert failed[0].error is not None
        raise failed[0].error
    return [player.result for player in players]


class _Player(Generic[T]):
    """One worker's loop, in its thread."""

    def __init__(self, loop: Callable[[Session], T], place: WorkerPlacement) -> None:
        self.session = WorkerSession(place, seed=0)
        self.error: BaseException | None = None
        self.result: T
        self.thread = threading.Thread(target=self._play, args=(loop,), name=f"loop-{place.rank}")

    def _play(self, loop: Callable[[Session], T]) -> None:
        try:
            self.result = loop(self.session)
            self.session.close()
        except BaseException as error:
            self.session.fail(error)
            self.error = error
