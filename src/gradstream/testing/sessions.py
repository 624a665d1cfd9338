"""Runs a user's own loop on several workers, all of them threads of this process: for tests of loops."""

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
from gradstream.session.node import job as session_job
from gradstream.session.session import Session
from gradstream.session.worker_session import WorkerSession

T = TypeVar("T")


def loop_in_threads(loop: Callable[[Session], T], workers: int = 2, **options: object) -> list[T]:
    """Runs `loop(session)` on each of several workers, and returns the results by rank.

    The threads share torch's global generators, so let each loop draw from its own generator. When a loop returns,
    its session is closed.

    Args:
        loop: the work of a script, with the session that `gradstream.join` would return.
        workers: number of workers.
        options: options of `gradstream.join`: strategy, servers, deadlines, ...

    Raises:
        Exception: the error of the worker that failed first, rather than one that it caused on another worker.
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
        credentials = handed_out(spec)
        places = [WorkerPlacement(rank, workers, spec, coordinator, credentials) for rank in range(workers)]
        loops = [_LoopThread(loop, place) for place in places]
        for worker in loops:
            worker.thread.start()
        for worker in loops:
            worker.thread.join()
        host.join()
    failed = sorted((loop for loop in loops if loop.error is not None), key=lambda loop: loop.session.aborted)
    if failed:
        assert failed[0].error is not None
        raise failed[0].error
    return [loop.result for loop in loops]


class _LoopThread(Generic[T]):
    """One worker's loop, in its thread."""

    def __init__(self, loop: Callable[[Session], T], place: WorkerPlacement) -> None:
        self.session = WorkerSession(place, seed=0)
        self.error: BaseException | None = None
        self.result: T
        self.thread = threading.Thread(target=self._run, args=(loop,), name=f"loop-{place.rank}")

    def _run(self, loop: Callable[[Session], T]) -> None:
        try:
            self.result = loop(self.session)
            self.session.close()
        except BaseException as error:
            self.session.fail(error)
            self.error = error
