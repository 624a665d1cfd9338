"""`simulate()`: runs the nodes of `train()` in one process, on virtual time."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from gradstream.checkpoint import Resume, to_resume
from gradstream.checkpoint.format import load
from gradstream.coordinator.client.member import RunAbortedError
from gradstream.coordinator.client.presence import EvictedError
from gradstream.errors import (
    ClosedError,
    DeadlineError,
    GradstreamError,
    Interrupted,
    PeerLostError,
    RefusedError,
)
from gradstream.job.callbacks import Callbacks
from gradstream.job.files import Asked, intercept, job_of
from gradstream.job.job import Data, JobOptions, build_model, is_script, make_job, spread_out
from gradstream.job.phase_jobs import measured_first
from gradstream.recording import FOLDER
from gradstream.run.failures import typed_error
from gradstream.run.nodes import check_model
from gradstream.run.planning import metrics_of, plan_run
from gradstream.run.result import Run
from gradstream.run.simulated import Script, SimulatedCluster
from gradstream.runtime.base import Storage
from gradstream.runtime.simulation import SimulationConfig
from gradstream.traits import refuse
from gradstream.wire import v1
from gradstream.worker.final_model import FINAL_MODEL

OnEvent = Callable[[Mapping[str, Any]], None]

_OF_OTHERS = (PeerLostError, DeadlineError, RefusedError, ClosedError, RunAbortedError, EvictedError)
"""Errors that a node raises because another node has failed."""


def simulate(
    model: Asked,
    data: Data | None = None,
    *,
    config: SimulationConfig | None = None,
    on_event: OnEvent | None = None,
    script: Script | None = None,
    storage: Storage | None = None,
    resume: bool = False,
    **options: Unpack[JobOptions],
) -> Run:
    """Runs a job with all of its nodes in this process, on virtual time.

    The nodes are those of `train`; only time, threads and network are simulated. A shape-only simulation computes no
    gradients and holds no parameters, so that large models on many workers fit in little memory; durations and bytes
    are the same as with parameters.

    A running event loop, as in a notebook, is blocked until this returns. Ctrl-C ends the simulation at once,
    with KeyboardInterrupt.

    Args:
        model, data, options: as for `train`.
        config: costs of computing, and the network.
        on_event: called with each event as it happens; `time_s` is virtual.
        script: a coroutine function of the `SimulatedCluster`, which runs beside the nodes: it can sleep in
            virtual time, kill nodes, and stop the run.
        storage: the disk of all nodes, for checkpoints; None makes no checkpoints.
        resume: whether to continue from the newest good checkpoint in `storage`, if there is one.

    Returns:
        The run; nothing of it is on disk.

    Raises:
        Interrupted: the script has stopped the run.
        DataError: the run is to be resumed, and every checkpoint is damaged.
        GradstreamError: as in `train`; the message names the node, and `traceback_text` is the user's traceback.

    Example:
        >>> run = simulate(job, config=SimulationConfig(network=Network(bandwidth_bytes_s=12.5e6)))  # doctest: +SKIP
    """
    job = spread_out(make_job(job_of(model, data), data, **options), "simulate")
    simulation = {"simulation": "simulate()", **({"script": "a script"} if is_script(job) else {})}
    refuse(simulation)
    intercept(job, simulated=True)
    config = config or SimulationConfig()
    events: list[dict[str, Any]] = []
    callbacks = Callbacks(job.callbacks, {"name": job.name, "run_dir": None}, threads=False)
    notify = callbacks.beside(on_event)

    def take(lines: bytes) -> None:
        for line in lines.splitlines():
            event = json.loads(line)
            events.append(event)
            notify(event)

    checkpoint = to_resume(storage, lambda _: None) if storage is not None and resume else None
    job = measured_first(job)
    if job.phases and storage is None:  # each phase continues from a checkpoint
        job = dataclasses.replace(job, checkpoint_every=None)
    plan = plan_run(
        job,
        "simulation",
        resume=None if checkpoint is None else Resume.at(*checkpoint),
        keeps=(storage is not None or bool(job.phases)) and not config.shape_only,
    )
    config.check_names(plan.node_names)
    refuse({**plan.traits, **simulation})
    check_model(plan)
    built = build_model(job)
    cluster = SimulatedCluster(plan, built, config, take, storage)
    outcome = cluster.run(script)
    if outcome is not None and outcome.notice.status == v1.Notice.STOPPED:
        callbacks.end(lambda: Run(events=events))
        raise Interrupted(None, next(e["folder"] for e in reversed(events) if e["event"] == "stopped"))
    if outcome is None or outcome.failed is not None:
        callbacks.end(lambda: Run(events=events))
        raise _error(cluster, events)
    parameters = {}
    if not config.shape_only:
        parameters = load(cluster.virtual.storage.read(FINAL_MODEL))
    info = {"simulated": True, "virtual_s": cluster.virtual.clock.now_ns / 1e9}
    run = Run(
        path=None,
        parameters=parameters,
        events=events,
        info=info,
        model=built,
        data=job.data,
        metrics=metrics_of(job),
        recording=_recording(cluster.virtual.storage, plan.id),
        job=job if job.record else None,
    )
    callbacks.end(lambda: run)
    return run


def _recording(storage: Storage, job: str) -> dict[str, bytes]:
    folder = f"{FOLDER}/{job}"
    return {f"{folder}/{name}": storage.read(f"{folder}/{name}") for name in storage.names(folder)}


def _error(cluster: SimulatedCluster, events: list[dict[str, Any]]) -> GradstreamError:
    failed = next((event for event in events if event["event"] == "failed"), None)
    if not any(event["event"] == "started" for event in events):
        # A node that fails before it has joined cannot report why: the other nodes only notice that it is missing.
        for name, error in cluster.outcomes.items():
            if isinstance(error, Exception) and not isinstance(error, _OF_OTHERS):
                text = getattr(error, "traceback_text", "") or "".join(traceback.format_exception(error))
                return typed_error(name, type(error).__name__, str(error), text)
    if failed is not None:
        return typed_error(failed["culprit"], failed["error"], failed["message"], failed["traceback"])
    return PeerLostError("coordinator", "was killed")
