"""One node of a run as a process: `python -m gradstream.run.node --spec nodes.json --name worker-0`.

The spec says where the job is and how it was changed, as JSON; the node reads the job for itself.
Exit status: 0 finished, 1 failed itself, 3 ended because of another node, 75 stopped and resumable.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from gradstream.checkpoint import Resume
from gradstream.checkpoint.elsewhere import ElsewhereStorage
from gradstream.coordinator import RunAbortedError, RunStoppedError
from gradstream.data.lock import machine_lock
from gradstream.errors import RESUMABLE, ConfigError, UserCodeError
from gradstream.job.files import load_job
from gradstream.job.job import Job, build_model, is_script
from gradstream.job.overrides import overrides, with_overrides
from gradstream.job.registry import describe, find_optimizer, find_strategy
from gradstream.run.files import read_record
from gradstream.run.local.machine import SWITCH_INTERVAL_S
from gradstream.run.local.node_log import show_warnings
from gradstream.run.nodes import COORDINATOR, RunPlan
from gradstream.run.plan import cast_of
from gradstream.runtime.base import Runtime
from gradstream.runtime.event_log import RETRY_S, EventLog
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import FailedEvent, FinishedEvent, StartedEvent, StoppedEvent
from gradstream.transport.base import Endpoint
from gradstream.untrusted import DocumentError, MismatchError, check_record, parse_json
from gradstream.wire import v1

__all__ = [
    "EVENTS",
    "LOCK",
    "LOCK_S",
    "SWITCH_INTERVAL_S",
    "NodeSpec",
    "Say",
    "main",
    "play",
    "say_to",
    "take_part",
    "traceback_of",
    "write_rest",
]

OK, FAILED, ABORTED = 0, 1, 3

SHOWN = "worker-0"
"""Whose warnings the launcher shows: all workers have about the same."""

MAX_SPEC_BYTES, MAX_SPEC_DEPTH = 16 << 20, 32


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What all nodes of a run are told, as JSON.

    Args:
        id: of the run; other runs' nodes are refused.
        job: spec of the job (see `jobfile`); "" where it has none, as in a notebook.
        earlier: run directories of the runs that the script made before this one.
        run_dir: where the run is kept.
        plain: the job's fields that are plain values.
        strategy, optimizer: as the registry describes them.
        resume: where the run goes on, as `Resume.as_json` has it; None where it begins.
        data: of arrays in memory, what each node's own are compared with (see `quick_checks`), by name.
        trial: nothing of the run is kept, so no power cut need be feared.
        script: the user's, where its own loop is what the workers are; the other nodes do not run it.
        elsewhere: the nodes are on another machine than the launcher, with a run directory of its own: they
            write and read checkpoints through the coordinator.
        per_machine: how many workers each machine has, where they are a script.
        meeting: host:port at which the script's own torch.distributed meets; "" where others have started it.
    """

    id: str
    job: str
    earlier: tuple[str, ...]
    run_dir: str
    plain: dict[str, Any]
    strategy: dict[str, Any]
    optimizer: dict[str, Any]
    resume: dict[str, Any] | None = None
    script: str = ""
    data: dict[str, str] = field(default_factory=dict)
    trial: bool = False
    elsewhere: bool = False
    per_machine: int = 1
    meeting: str = ""

    @classmethod
    def of(
        cls,
        job: Job,
        cast: RunPlan,
        *,
        run_dir: Path,
        earlier: tuple[Path, ...],
        trial: bool = False,
        per_machine: int = 1,
        meeting: str = "",
    ) -> NodeSpec:
        """The spec of a job. One without a place of its own can be run, but not be read again."""
        return cls(
            id=cast.job,
            job=job.data.job if is_script(job) else job.spec or "",  # type: ignore[attr-defined]
            earlier=tuple(map(str, earlier)),
            run_dir=str(run_dir),
            plain=overrides(job),
            strategy=describe(cast.strategy),
            optimizer=describe(cast.optimizer),
            resume=None if cast.resume is None else cast.resume.as_json(),
            script=job.spec or "" if is_script(job) else "",
            data=dict(getattr(job.data, "quick_checks", {})),
            trial=trial,
            per_machine=per_machine,
            meeting=meeting,
        )

    @classmethod
    def of_text(cls, text: str, where: str) -> NodeSpec:
        """The spec that a document holds. Raises ConfigError where it holds none.

        Args:
            text: JSON.
            where: names the document in the message.
        """
        try:
            record = parse_json(text, max_bytes=MAX_SPEC_BYTES, max_depth=MAX_SPEC_DEPTH)
            check_record(cls, record)
        except (DocumentError, MismatchError) as error:
            raise ConfigError(f"{where}: written by another version of gradstream: {error}") from None
        return cls(**record)

    @classmethod
    def read(cls, path: Path) -> NodeSpec:
        """The spec in a file. Raises ConfigError where it holds none, FileNotFoundError where it is not."""
        record = read_record(path)
        try:
            check_record(cls, record)
        except MismatchError as error:
            raise ConfigError(
                f"{path} is damaged, or another version of gradstream wrote it: {error}; put it back from a "
                "copy, or use the version that run.json names"
            ) from None
        return cls(**record)

    @property
    def argv(self) -> list[str]:
        """The command line under which the user's file is read."""
        return list(self.plain.get("argv") or sys.argv)

    def load(self) -> Job:
        """Reads the job as a node does, in this process. Raises ConfigError where it is not in a file."""
        return self._load(self.job)

    def load_again(self) -> Job:
        """Reads the job as the launcher did, up to `join()` where it is a script. Raises as `load`."""
        return self._load(self.script or self.job)

    def check_data(self, job: Job) -> None:
        """Raises ConfigError where this node has made other data of the job than the launcher."""
        here = getattr(job.data, "quick_checks", {})
        for part in {**self.data, **here}:
            mine, told = here.get(part, "none"), self.data.get(part, "none")
            if mine != told:
                raise ConfigError(
                    f"{part} of the data set {job.data.name!r} are {mine}; those of the launcher {told}. "
                    "Every node runs the job file, and makes the data anew: give the random generator a "
                    "seed, numpy.random.default_rng(0), or keep the data in a file"
                )

    def _load(self, job: str) -> Job:
        if not job:
            raise ConfigError(
                f"{self.run_dir}: the job of this run was not in a file, so it cannot be read again"
            )
        loaded = load_job(job, earlier=[Path(path) for path in self.earlier], argv=self.argv)
        # A class that is defined in the job file has no other name: the file's own object is changed.
        strategy = find_strategy(self.strategy["class"] or loaded.strategy, self.strategy["fields"])
        optimizer = find_optimizer(
            self.optimizer["class"] or loaded.optimizer or strategy.optimizer(), self.optimizer["fields"]
        )
        changed = with_overrides(loaded, self.plain)
        return dataclasses.replace(changed, strategy=strategy, strategy_options={}, optimizer=optimizer)


Say = Callable[..., None]
WhenAsked = Callable[[Callable[[], None]], None]

EVENTS = "events.jsonl"
_ENDS = tuple(
    b'{"event":"%s"' % kind.name.encode() for kind in (StartedEvent, FailedEvent, FinishedEvent, StoppedEvent)
)
"""What the launcher goes by, and has to be told past a disk that stays full."""

LOCK = ".lock"
LOCK_S = 20.0
"""A run directory belongs to one coordinator; that of a killed run may take a moment to die."""


def main(argv: list[str] | None = None) -> int:
    """Runs a node to its end, as this process, and returns its exit status."""
    given = _arguments(argv)
    say = say_to(given.report_fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        spec = NodeSpec.read(given.spec)
        sys.argv = spec.argv  # for good: a function of the user's may look at it later
        job = spec.load()
        spec.check_data(job)
        if given.name == SHOWN:
            show_warnings(SHOWN, say)
        return asyncio.run(_run(spec, job, given, say))
    except Exception as error:
        return _failed(error, given.name, say, sys.stderr)


async def play(
    job: Job, argv: Sequence[str], *, say: Say, log: Path, core: Executor, when_asked: WhenAsked
) -> int:
    """Runs a node to its end on the running loop, beside others, and returns its exit status.

    Args:
        job: the job itself: nothing is read again. The node gets a model of its own.
        argv: as for `main`.
        say: where the launcher wants to be told things.
        log: file for what ended it.
        core: where arithmetic is done.
        when_asked: called with what stops the run, where this is the coordinator.
    """
    given = _arguments(argv)
    try:
        spec = NodeSpec.read(given.spec)
        own = dataclasses.replace(job, model=copy.deepcopy(build_model(job)))
        return await _run(spec, own, given, say, core, when_asked)
    except Exception as error:
        told = io.StringIO()
        status = _failed(error, given.name, say, told)
        try:
            with log.open("a") as file:
                file.write(told.getvalue())
        except OSError:
            pass  # the launcher was told; the disk is full
        return status


async def take_part(job: Job, argv: Sequence[str]) -> None:
    """Runs a worker to its end on the running loop, with the model and data of `job` as they are.

    Raises:
        What ended it early.
    """
    given = _arguments(argv)
    spec = NodeSpec.read(given.spec)
    await _run(spec, job, given, lambda **_: None)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradstream.run.node", description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="file made by the launcher")
    parser.add_argument("--name", required=True, help="coordinator, shard-0, worker-0, ...")
    parser.add_argument("--coordinator", help="its address, for all other nodes")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes a free one")
    parser.add_argument("--credentials", required=True, help="as the launcher hands them out")
    parser.add_argument(
        "--insecure", action="store_true", help="plain text on other interfaces than loopback"
    )
    parser.add_argument("--report-fd", type=int, help="where the launcher wants to be told things")
    return parser.parse_args(argv)


def _failed(error: Exception, name: str, say: Say, log: TextIO) -> int:
    """Says what ended a node, and returns its exit status."""
    if isinstance(error, RunStoppedError):
        return RESUMABLE
    if isinstance(error, RunAbortedError):
        log.write(f"{name}: {error}\n")
        return ABORTED
    text = traceback_of(error)
    log.write(text)
    say(error=type(error).__name__, message=str(error), traceback=text)
    return FAILED


def say_to(descriptor: int | None) -> Say:
    """Tells the launcher things: JSON lines to a file descriptor, or to standard output."""

    def say(**message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        if descriptor is None:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
            return
        while data:
            data = data[os.write(descriptor, data) :]

    return say


def traceback_of(error: BaseException) -> str:
    """The user's own traceback where there is one, else this error's."""
    if isinstance(error, UserCodeError) and error.traceback_text:
        return error.traceback_text
    return "".join(traceback.format_exception(error))


async def _run(
    spec: NodeSpec,
    job: Job,
    given: argparse.Namespace,
    say: Say,
    core: Executor | None = None,
    when_asked: WhenAsked | None = None,
) -> int:
    # gRPC starts threads when it is imported, so not before the fork.
    from gradstream.transport.carriers import make_endpoint, make_memory
    from gradstream.transport.credentials import Credentials
    from gradstream.transport.security import Tls

    resume = None if spec.resume is None else Resume.of_json(spec.resume)
    cast, name = cast_of(job, spec.id, resume=resume), given.name
    root, durable = Path(spec.run_dir), not spec.trial
    memory = make_memory(job.carrier, given.listen)
    runtime = RealRuntime(name, seed=job.seed, root=root, durable=durable, core=core, memory=memory)
    identity = cast.identity(name, int.from_bytes(os.urandom(8), "little"))
    credentials = Credentials.parse(given.credentials)
    identity.secret = credentials.secret
    endpoint = make_endpoint(
        identity,
        runtime,
        "grpc" if name == COORDINATOR else job.carrier,
        listen=given.listen,
        security=Tls.of(credentials),
        insecure=given.insecure,
        connections=job.connections,
        connection_s=job.deadlines.connection_s,
    )
    lateness = runtime.spawn(runtime.lateness.watch(), name=f"{name}-lateness")
    try:
        if name == COORDINATOR:
            with machine_lock(Path(spec.run_dir) / LOCK, doing="running it", wait_s=LOCK_S):
                return await _coordinate(cast, runtime, endpoint, say, when_asked or _on_sigterm)
        if given.coordinator is None:
            raise ConfigError(f"{name} needs --coordinator, the address of the coordinator")
        role, _, rank = name.partition("-")
        model = build_model(job, int(rank))
        await endpoint.start()
        endpoint.know(COORDINATOR, given.coordinator)
        if spec.elsewhere:
            patience_s = job.deadlines.patience_s
            runtime.storage = ElsewhereStorage(root, endpoint, COORDINATOR, silence_s=patience_s)
        say(address=endpoint.address)
        if role == "shard":
            cast = dataclasses.replace(cast, reduction=model.reduction)
            await cast.shard(runtime, endpoint, int(rank), model).run()
        else:
            await cast.worker(runtime, endpoint, int(rank), model, job.data).run()
        return OK
    finally:
        lateness.cancel()
        await endpoint.close()
        runtime.close()


def _on_sigterm(stop: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


async def _coordinate(
    cast: RunPlan, runtime: RealRuntime, endpoint: Endpoint, say: Say, when_asked: WhenAsked
) -> int:
    log = EventLog(
        runtime.storage, EVENTS, node=COORDINATOR, now=runtime.now, tell=lambda text: say(disk=text)
    )
    coordinator = cast.coordinator(runtime, endpoint, log.append)
    when_asked(coordinator.stop)
    await endpoint.start()
    say(address=endpoint.address)
    outcome = await coordinator.run()
    for event in runtime.process_metrics(COORDINATOR):
        coordinator.emit(event)
    await write_rest(log, runtime, cast.deadlines.lease_s, say)
    if outcome.notice.phase == v1.Notice.STOPPED:
        return RESUMABLE
    return OK if outcome.failed is None else ABORTED


async def write_rest(log: EventLog, runtime: Runtime, wait_s: float, say: Say) -> None:
    """Waits for room for the last events; in the end tells the launcher what the file lacks."""
    give_up_ns = runtime.now() + round(wait_s * 1e9)
    while not log.flush():
        if runtime.now() >= give_up_ns:
            say(output=f"{log.why_short()}\n")
            say(unwritten=b"".join(line for line in log.waiting if line.startswith(_ENDS)).decode())
            return
        await runtime.sleep(RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
