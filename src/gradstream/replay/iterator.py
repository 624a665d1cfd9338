"""`replay()` and the iterator that it returns, over the updates of a recorded run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gradstream.errors import DivergedError
from gradstream.job.job import Job
from gradstream.replay.cluster import ReplayCluster
from gradstream.replay.recorded_run import load_recorded_run
from gradstream.replay.update import ReplayedUpdate
from gradstream.run.result import Run


class Replay:
    """An iterator over the updates of a recorded run, which repeats the run as far as it is asked for updates.

    `ended` is "" until the last update, and then says why no more follows. `num_updates` counts the updates so far.

    Args:
        cluster: the nodes of the replay.
    """

    def __init__(self, cluster: ReplayCluster) -> None:
        self._cluster = cluster
        self._final: Mapping[str, np.ndarray[Any, Any]] | None = None
        self.num_updates = 0
        self.ended = ""

    def __iter__(self) -> Iterator[ReplayedUpdate]:
        return self

    def __next__(self) -> ReplayedUpdate:
        """The next update.

        Raises:
            StopIteration: no update is left; `ended` says why.
            DivergedError: the replay differs from the recording; the message says where. No update follows.
        """
        if self.ended:
            raise StopIteration
        update = self._cluster.next()
        if update is not None:
            self.num_updates = update.number
            return update
        self.ended = "diverged"
        try:
            self.ended = self._conclusion()
        finally:
            self._final = self._named()
            self._cluster.close()
        raise StopIteration

    def _conclusion(self) -> str:
        """Why no update follows."""
        cluster = self._cluster
        if cluster.divergence is not None:
            raise cluster.divergence
        complete = cluster.run.is_complete
        if complete and not cluster.stuck:
            return "the run is over"
        if complete and not cluster.failures:
            awaited = "; ".join(cluster.awaited()[:3])
            raise DivergedError(
                f"after {self.num_updates} updates the replay cannot continue: {cluster.num_left} recorded "
                f"pushes did not arrive. It waits for {awaited}: has a module that the job file imports changed?"
            )
        for name, error in cluster.failures.items():
            return f"the recording ends here: {name} could not go on: {type(error).__name__}: {error}"
        cut_off = ", ".join(cluster.run.cut_off)
        return (
            f"the recording ends here: {f'{cut_off} was cut off' if cut_off else 'the run was interrupted'}"
        )

    @property
    def failures(self) -> Mapping[str, BaseException]:
        """Errors of nodes, by the node's name: among them the error that ended the run, if one did."""
        return self._cluster.failures

    @property
    def parameters(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The parameters on the shards now, by their names in the model."""
        return self._named() if self._final is None else self._final

    def _named(self) -> Mapping[str, np.ndarray[Any, Any]]:
        tree = self._cluster.run.model.tree(self._cluster.parameters())
        return {name: np.array(array) for name, array in tree.items()}

    def close(self) -> None:
        """Ends the replay. Idempotent."""
        if not self.ended:
            self.ended = "closed"
            self._final = self._named()
        self._cluster.close()

    def __del__(self) -> None:
        """Closes a replay whose loop was left early."""
        with suppress(Exception):
            self._cluster.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def replay(
    run: str | Path | Run, *, job: Job | None = None, keep: bool = True, anyway: bool = False
) -> Replay:
    """Repeats a recorded run bit for bit, and yields its updates one after the other.

    All nodes run in this process, on virtual time. They run the strategy, the rules and the arithmetic of the run;
    each shard handles its events in the recorded order. Between two updates the caller can look at anything. Of a
    resumed run the replay repeats the part that was recorded last, from its checkpoint on.

    A running event loop, as in a notebook, is blocked while an update is computed. Ctrl-C raises KeyboardInterrupt;
    after it the replay can only be closed.

    Args:
        run: run directory, or result of a run; made with `record=True`.
        job: the job, if the run was not made from a file.
        keep: whether each update keeps the parameters before and after it, two vectors of the model's size.
        anyway: whether to replay although packages or the processor differ from those of the recording. Recorded
            hashes of the parameters show whether that changes results.

    Returns:
        An iterator. Its `parameters` are those of the run so far, and at the end the final ones.

    Raises:
        ConfigError: the run has no recording; or the job file, a package or the processor differs, which the
            message names.
        DataError: the recording was altered.

    Example:
        >>> for update in replay("runs/20261120-101500-net"):  # doctest: +SKIP
        ...     if not update.finite:
        ...         print(update.worker, update.steps, update.samples, update.staleness)
        ...         break
    """
    return Replay(ReplayCluster(load_recorded_run(run, job, anyway=anyway), keep=keep))
