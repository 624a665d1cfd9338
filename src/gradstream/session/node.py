"""Runs a worker node in a thread beside the user's loop, from joining the run to leaving it."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gradstream.coordinator import RunAbortedError, RunStoppedError
from gradstream.errors import ConfigError, Interrupted, PeerLostError, ReplicasDifferError, UserCodeError
from gradstream.job.job import Job, strategy_of
from gradstream.job.plan import RunPlan
from gradstream.model.base import Reduction
from gradstream.model.buffers import Buffers
from gradstream.run.failures import typed_error
from gradstream.run.local.environment import SWITCH_INTERVAL_S
from gradstream.run.node import run_worker
from gradstream.run.placement import WorkerPlacement, newest_in
from gradstream.session.binding import ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.entry import SessionEntry
from gradstream.session.host import Host
from gradstream.session.log import SessionLog
from gradstream.session.registered import Registered
from gradstream.strategies.base import Strategy
from gradstream.worker.loop import Loop

# ---- job ---------------------------------------------------------------------------------
# The job of a script with a loop of its own, for the coordinator and the shards.
#
# They do not run the script: the first worker sends them the model's sizes and the update rule.


class ScriptModel:
    """Placeholder for a job's model, which the script makes."""

    reduction: Reduction = "mean"

    def gradient(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ConfigError: the script computes its gradients."""
        raise ConfigError(
            "this job has no model: the training loop of its script computes the gradients; start it with gradstream "
            "train script.py"
        )


@dataclass
class OwnLoop:
    """Placeholder for a job's data set, which the script has.

    Args:
        running: the loop of this process; None if it is not a worker.
        optimizer: the update rule that the loop's optimizer asks for, as text.
        averages_gradients: whether only gradients are exchanged, under strategies that return their mean.
        bind: makes the binding of the loop's parameters for a plan of the run, in the node's thread.
    """

    running: Loop | None = None
    optimizer: str = ""
    averages_gradients: bool = True
    bind: Callable[[RunPlan], ParameterBinding] | None = None
    name: str = "the script's own"
    num_samples: int = 0
    num_test_samples: int = 0
    job: str = "gradstream.session.node:job"

    def loop(self, rank: int) -> Loop:
        """The loop of this process."""
        if self.running is None:
            raise ConfigError(
                f"worker-{rank}: this job is a script with a training loop of its own, which this process does not "
                "run: start the job with gradstream train script.py"
            )
        return self.running


STRATEGY = "allreduce"
"""The strategy of a script that names none: the only one without servers that equals one process."""


def job() -> Job:
    """The job without the launcher's settings."""
    return Job(ScriptModel(), OwnLoop(), strategy=STRATEGY)  # type: ignore[arg-type]  # stand in for model and data


# ---- node --------------------------------------------------------------------------------

FAREWELL_S = 15.0
"""How long a failed script waits until the other nodes know of it."""


class RunConnection:
    """Joins a run with a loop's parameters, and leaves it.

    Args:
        place: the rank of this worker, and the place of its run.
        log: figures that the loop logs.
        registered: what the loop has besides its model.
        host: coordinator and servers, if this process runs them for all workers; waited for at the end.

    Attributes:
        job: the job of the run.
        strategy: that of the present plan, once the loop has joined the run.
        bridge: connects the loop to its worker node, which runs in another thread; None before `join`.
        aborted: whether another node has ended the run; it reports the reason.
    """

    def __init__(
        self, place: WorkerPlacement, log: SessionLog, registered: Registered, host: Host | None
    ) -> None:
        self.job = place.job()
        self.strategy: Strategy = strategy_of(self.job)
        self.bridge: LoopBridge | None = None
        self.aborted = False
        self._place = place
        self._log = log
        self._registered = registered
        self._host = host
        self._binding: ParameterBinding | None = None
        self._entry: SessionEntry | None = None
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None

    @property
    def keeps(self) -> bool:
        """Whether the run makes checkpoints, between two phases at least."""
        return self.job.checkpoint_every is not None or bool(self.job.phases)

    def join(
        self,
        bind: Callable[[RunPlan], ParameterBinding],
        rule: str,
        *,
        counts_steps: bool,
        entry: SessionEntry,
    ) -> LoopBridge:
        """Joins the run. Returns when all workers have joined, with the same parameters.

        Args:
            bind: makes the binding of the user's parameters for each plan of the run.
            rule: the update rule that the loop's optimizer asks for, as text.
            counts_steps: see `LoopBridge`.
            entry: the session's own state.

        Raises:
            GradstreamError: the run could not start.
        """
        self._entry = entry
        bridge = self.bridge = entry.bridge = LoopBridge(
            None,
            self._log,
            counts_steps=counts_steps,
            rank=self._place.rank,
            roster=entry.roster,
            registered=self._registered,
        )
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        node = partial(self._live, bind, bridge, rule)
        self._thread = threading.Thread(target=node, name="gradstream", daemon=True)
        self._thread.start()
        bridge.first()
        assert self._binding is not None
        self._buffers = self._binding.buffers() if self._registered.again else {}
        self._log.open()
        return bridge

    def check_unchanged(self, where: str) -> None:
        """Raises ConfigError if the script has changed parameters that the exchange would overwrite."""
        if self._binding is not None and self.bridge is not None and self.bridge.error is None:
            self._binding.check_unchanged(where)

    @contextmanager
    def newest_parameters(self) -> Iterator[None]:
        """Shows the user the newest parameters that all workers share, until the context ends."""
        assert self._binding is not None and self.bridge is not None
        with self._binding.showing(self.bridge.fetch(), self.bridge.visible):
            yield

    def restore_buffers(self) -> None:
        """Sets the buffers with which the loop has joined: it has gone through a minibatch that they know already."""
        assert self._binding is not None
        self._binding.load_buffers(self._buffers)

    def leave(self) -> None:
        """Leaves the run, and waits for its end.

        Raises:
            GradstreamError: the error that ended the run.
        """
        self._log.close()
        if self.bridge is None:
            return
        assert self._binding is not None and self._thread is not None
        self._binding.release()
        self.bridge.end()
        self._thread.join()
        if self._host is not None:
            self._host.join()
        error = self.bridge.error or (self._host.error if self._host is not None else None)
        if error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, with the traceback of the script's error. Never raises."""
        self._log.close()
        if self.bridge is None or self._thread is None:
            return
        if self.bridge.error is None:
            if isinstance(error, ReplicasDifferError) or not isinstance(
                error, UserCodeError | PeerLostError
            ):  # a part of a split module may be lost
                text = "".join(traceback.format_exception(error))
                message = f"worker-{self._place.rank}: the script raised {type(error).__name__}: {error}"
                kind = ReplicasDifferError if isinstance(error, ReplicasDifferError) else UserCodeError
                error = kind(message, text)
            self.bridge.end(error)
            self._thread.join(FAREWELL_S)
        if self._host is not None:
            self._host.join(FAREWELL_S)

    # ---- the worker node, in its thread -------------------------------------------------

    def _live(self, bind: Callable[[RunPlan], ParameterBinding], bridge: LoopBridge, rule: str) -> None:
        def bound(plan: RunPlan) -> ParameterBinding:
            self.strategy = plan.strategy
            before, binding = self._binding, bind(plan)
            if before is not None and before is not binding:
                before.release()
            self._binding = binding
            binding.entry = self._entry
            bridge.bind(binding, averages_gradients=plan.averages_gradients)
            return binding

        try:
            parts: dict[str, Any] = {"data": OwnLoop(bridge, rule, bind=bound)}
            job = dataclasses.replace(self.job, **parts)
            asyncio.run(run_worker(job, self._place.arguments))
        except RunAbortedError as aborted:
            self.aborted = True
            bridge.over(typed_error(aborted.culprit, aborted.error, aborted.reason, ""))
        except RunStoppedError:
            bridge.over(self._interrupted())
        except BaseException as error:
            bridge.over(error)
        else:
            bridge.over(None)

    def _interrupted(self) -> Interrupted:
        spec = self._place.node_spec()
        if spec.elsewhere:
            return Interrupted(None, "its newest checkpoint, on the first machine")
        path = Path(spec.run_dir)
        return Interrupted(path, newest_in(path), f"gradstream resume {shlex.quote(str(path))}")
