"""One node of a run as a process: `python -m gradstream.run.node --spec nodes.json --name worker-0`.

The file is a `NodeSpec`; from it the node reads the job again and plans the run again.
Exit status: 0 finished, 1 failed itself, 3 ended because of another node, 75 stopped and resumable.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from gradstream.checkpoint.elsewhere import CopyKeeper, ElsewhereStorage
from gradstream.checkpoint.folder import Policy
from gradstream.checkpoint.snapshot import Carried
from gradstream.coordinator import Coordinator, DrainedError, RunAbortedError, RunStoppedError
from gradstream.coordinator.client.member import BoundaryError
from gradstream.coordinator.durable import STORE, TAIL_BYTES, Keeper, StateKeeper, StateStore, Unkept
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.relay import Relay, RunClock
from gradstream.data.download import machine_lock
from gradstream.errors import RESUMABLE, ConfigError, UserCodeError
from gradstream.job.code import run_kept
from gradstream.job.job import Job, build_model
from gradstream.job.losses import losses_of
from gradstream.job.plan import RunPlan
from gradstream.run.launches import copies_folder
from gradstream.run.local.environment import SWITCH_INTERVAL_S, stop_signal
from gradstream.run.local.forkserver import show_warnings
from gradstream.run.node_spec import NodeSpec
from gradstream.run.nodes import build_replica
from gradstream.run.plans import RunLeader, run_plans
from gradstream.run.reshards import follow_requests, take_request
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.storage import RETRY_S, DiskStorage, EventLog
from gradstream.telemetry.events import FailedEvent, FinishedEvent, StartedEvent, StoppedEvent
from gradstream.transport.base import Endpoint
from gradstream.wire import v1

if TYPE_CHECKING:
    from gradstream.transport.carriers import RoutedEndpoint

OK, FAILED, ABORTED = 0, 1, 3

SHOWN = "worker-0"
"""The node whose warnings the launcher shows: those of the other workers are about the same."""

Say = Callable[..., None]
WhenAsked = Callable[[Callable[[], None]], None]

EVENTS = "events.jsonl"
_ENDS = tuple(
    b'{"event":"%s"' % kind.name.encode() for kind in (StartedEvent, FailedEvent, FinishedEvent, StoppedEvent)
)
"""Beginnings of the events that the launcher needs; if the disk stays full, it gets them through its pipe."""

LOCK = ".lock"
LOCK_S = 20.0
"""Seconds to wait for the lock of a run directory: the coordinator of a killed run may take a moment to end."""


def main(argv: list[str] | None = None) -> int:
    """Runs a node to its end, as this process, and returns its exit status."""
    arguments = _arguments(argv)
    say = say_to(arguments.report_fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        spec = NodeSpec.read(arguments.spec)
        sys.argv = spec.argv  # and leave it: the user's code may read it later
        run_kept(Path(spec.run_dir))
        job = spec.load()
        if arguments.name.startswith(("worker", "part")):
            spec.check_data(job)
        if arguments.name == SHOWN:
            show_warnings(SHOWN, say)
        return asyncio.run(_run(spec, spec.plan(job), arguments, say))
    except Exception as error:
        return _failed(error, arguments.name, say, sys.stderr)
    except (SystemExit, KeyboardInterrupt) as error:  # of the user's code: no log would show it
        message = f"{arguments.name}: the code of the job raised {type(error).__name__}: {error}"
        return _failed(UserCodeError(message, traceback_of(error)), arguments.name, say, sys.stderr)


async def run_node(
    plan: RunPlan, argv: Sequence[str], *, say: Say, log: Path, core: Executor, when_asked: WhenAsked
) -> int:
    """Runs a node to its end on the running loop, beside others, and returns its exit status.

    Args:
        plan: plan of the run, so that the job is not read again. The node gets its own copy of the model.
        argv: as for `main`.
        say: sends a message to the launcher.
        log: file for the traceback of an error that ended the node.
        core: executor of arithmetic.
        when_asked: called with a function that stops the run, if this node is the coordinator.
    """
    arguments = _arguments(argv)
    try:
        spec = NodeSpec.read(arguments.spec)
        model = copy.deepcopy(build_model(plan.job))
        return await _run(spec, plan.of_model(model), arguments, say, core, when_asked)
    except Exception as error:
        text = io.StringIO()
        status = _failed(error, arguments.name, say, text)
        try:
            with log.open("a", encoding="utf-8") as file:
                file.write(text.getvalue())
        except OSError:
            pass  # the disk is full, but the launcher has the message
        return status


async def run_worker(job: Job, argv: Sequence[str]) -> None:
    """Runs a worker to its end on the running loop, with the model and data of `job` as they are.

    Raises:
        Exception: any error that ended the worker early.
    """
    arguments = _arguments(argv)
    spec = NodeSpec.read(arguments.spec)
    await _run(spec, spec.plan(job), arguments, lambda **_: None)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradstream.run.node", description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="file made by the launcher")
    parser.add_argument("--name", required=True, help="coordinator, shard-0, worker-0, ...")
    parser.add_argument("--coordinator", help="its address, for all other nodes")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes a free one")
    parser.add_argument("--credentials", required=True, help="as made by the launcher")
    parser.add_argument(
        "--insecure", action="store_true", help="plain text on other interfaces than loopback"
    )
    parser.add_argument(
        "--again", action="store_true", help="of the coordinator: go on where an earlier process died"
    )
    parser.add_argument(
        "--without", default="", help="of the coordinator: nodes with which training does not wait to begin"
    )
    parser.add_argument(
        "--clock", type=int, help="of a node that takes another's place: zero of the run's clock, in ns"
    )
    parser.add_argument("--report-fd", type=int, help="file descriptor for messages to the launcher")
    return parser.parse_args(argv)


def _failed(error: Exception, name: str, say: Say, log: TextIO) -> int:
    """Reports the error that ended a node, and returns the node's exit status."""
    if isinstance(error, RunStoppedError | DrainedError):
        return RESUMABLE
    if isinstance(error, RunAbortedError):
        log.write(f"{name}: {error}\n")
        return ABORTED
    text = traceback_of(error)
    log.write(text)
    say(error=type(error).__name__, message=str(error), traceback=text)
    return FAILED


def say_to(descriptor: int | None) -> Say:
    """Makes a function that sends messages to the launcher: JSON lines to a file descriptor, or to standard output."""

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
    """The traceback inside the user's code, if there is one; else this error's."""
    if isinstance(error, UserCodeError) and error.traceback_text:
        return error.traceback_text
    return "".join(traceback.format_exception(error))


async def _run(
    spec: NodeSpec,
    plan: RunPlan,
    arguments: argparse.Namespace,
    say: Say,
    core: Executor | None = None,
    when_asked: WhenAsked | None = None,
) -> int:
    # Not at the top of this module: it takes 0.05 s, and the launcher does not need it.
    from gradstream.transport.carriers import make_endpoint, make_memory
    from gradstream.transport.proof import Credentials
    from gradstream.transport.security import Tls

    job, name = plan.job, arguments.name
    root, durable = Path(spec.run_dir), not spec.trial
    memory = make_memory(job.carrier, arguments.listen)
    runtime = RealRuntime(name, seed=job.seed, root=root, durable=durable, core=core, memory=memory)
    identity = plan.identity(name, int.from_bytes(os.urandom(8), "little"))
    credentials = Credentials.parse(arguments.credentials)
    identity.secret = credentials.secret
    endpoint = make_endpoint(
        identity,
        runtime,
        "grpc" if name == COORDINATOR else job.carrier,
        listen=arguments.listen,
        security=Tls.of(credentials),
        insecure=arguments.insecure,
        connections=job.connections,
        connection_s=job.deadlines.connection_s,
    )
    lateness = runtime.spawn(runtime.lateness.watch(), name=f"{name}-lateness")
    try:
        if name == COORDINATOR:
            with machine_lock(Path(spec.run_dir) / LOCK, doing="running it", wait_s=LOCK_S):
                kept = _Kept(root, plan.id, arguments.again) if durable and core is None else None
                spread = not _is_local(arguments.listen)
                without = [name for name in arguments.without.split(",") if name]
                return await _coordinate(
                    plan, runtime, endpoint, say, when_asked or _on_sigterm, kept, spread, without
                )
        if arguments.coordinator is None:
            raise ConfigError(f"{name}: --coordinator is missing; expected the address of the coordinator")
        role, _, rank = name.partition("-")
        model = build_model(job, int(rank))
        await endpoint.start()
        if not _is_local(arguments.listen):
            await endpoint.take_detours(job.deadlines.connection_s)
        endpoint.know(COORDINATOR, arguments.coordinator)
        if spec.elsewhere:
            patience_s = job.deadlines.patience_s
            runtime.storage = ElsewhereStorage(root, endpoint, COORDINATOR, silence_s=patience_s)
            if role == "worker":
                copies = DiskStorage(copies_folder(spec.id))
                CopyKeeper(runtime, endpoint, copies, Policy(keep_last=job.keep_last))
        say(address=endpoint.address)

        carried = Carried()

        def build(plan: RunPlan, clock: RunClock) -> Callable[[], Awaitable[None]]:
            if role == "shard":
                from gradstream.run.shard import build_shard  # not imported by a run without servers

                return build_shard(plan, runtime, endpoint, int(rank), model, clock=clock).run
            bind = getattr(plan.job.data, "bind", None)  # of a user's own loop
            own = model if bind is None else bind(plan)
            worker = build_replica(plan, runtime, endpoint, own, clock=clock, carried=carried)
            is_main = threading.current_thread() is threading.main_thread()  # else a user's script has it
            if losses_of(plan).replaces and core is None and is_main:
                return partial(_until_sigterm, worker.run, worker.drain)
            return worker.run

        await run_plans(plan, runtime, endpoint, build, zero_ns=arguments.clock)
        return OK
    finally:
        lateness.cancel()
        await endpoint.close()
        runtime.close()


def _is_local(listen: str) -> bool:
    """Whether all nodes of the run are on this machine."""
    return listen.startswith("127.0.0.1:")


def _on_sigterm(stop: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(stop_signal(), stop)


async def _until_sigterm(run: Callable[[], Awaitable[None]], drain: Callable[[], None]) -> None:
    """Runs a worker through a plan; it drains at SIGTERM. At a boundary it has nothing to hand in, and dies."""
    _on_sigterm(drain)
    try:
        await run()
    except BoundaryError:
        asyncio.get_running_loop().remove_signal_handler(stop_signal())
        raise


class _Kept:
    """The coordinator's files in the run directory.

    Args:
        root: run directory.
        job: id of the run.
        again: whether an earlier process of this run's coordinator died; otherwise stored state belongs to an
            earlier part of the run, which has ended.

    Raises:
        OSError: the disk is full or broken.
        StateError: the store is not this run's.
    """

    def __init__(self, root: Path, job: str, again: bool) -> None:
        self._root = root
        self.again = again
        if not again:
            self.remove()
        self.store = StateStore(root / STORE, job)

    def written(self) -> bytes:
        """The end of the events file, made whole: the half-written line of a killed process is removed."""
        try:
            with open(self._root / EVENTS, "r+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                tail = file.read()
                torn = len(tail) - tail.rfind(b"\n") - 1
                if torn:
                    file.truncate(file.tell() - torn)
                return tail[: len(tail) - torn]
        except OSError:
            return b""

    def remove(self) -> None:
        """Removes the store, since nobody continues from it."""
        for suffix in ("", "-wal", "-shm"):
            (self._root / f"{STORE}{suffix}").unlink(missing_ok=True)


async def _coordinate(
    plan: RunPlan,
    runtime: RealRuntime,
    endpoint: RoutedEndpoint,
    say: Say,
    when_asked: WhenAsked,
    kept: _Kept | None,
    spread: bool,
    without: Sequence[str],
) -> int:
    log = EventLog(
        runtime.storage, EVENTS, node=COORDINATOR, now=runtime.now, tell=lambda text: say(disk=text)
    )
    keeper: Keeper = Unkept(log.append)
    if kept is not None:
        keeper = StateKeeper(
            runtime, kept.store, log.append, kept.written, lambda text, stored: say(disk=text, stored=stored)
        )

    def begins(coordinator: Coordinator) -> None:
        coordinator.on_begin = lambda zero_ns: say(zero_ns=zero_ns)

    leader = RunLeader(plan, runtime, endpoint, keeper, spread=spread, on_coordinator=begins)
    coordinator = leader.coordinator
    coordinator.membership.nodes.gone |= frozenset(without)
    if coordinator.clock.zero_ns is not None:  # set by the process that it continues
        say(zero_ns=coordinator.clock.zero_ns)  # which may have died before it said so
    when_asked(leader.stop)
    await _listen(endpoint, runtime, 0.0 if kept is None or not kept.again else plan.job.deadlines.lease_s)
    say(address=endpoint.address)
    relay: Relay | None = None
    if spread:
        silence_s = plan.job.deadlines.connection_s
        await endpoint.take_detours(silence_s)
        endpoint.know(COORDINATOR, endpoint.address)  # its own detours begin here, like all others
        relay = Relay(runtime, endpoint, lambda event: leader.coordinator.emit(event), silence_s=silence_s)
    if kept is None or not kept.again:
        take_request(runtime.storage)  # left over from an earlier part of the run
    requests = runtime.spawn(follow_requests(runtime, leader.reshard), name="reshards")
    outcome = await leader.run()
    coordinator = leader.coordinator
    requests.cancel()
    if relay is not None:
        relay.report()
    for event in runtime.process_metrics(COORDINATOR):
        coordinator.emit(event)
    await coordinator.close()
    if kept is not None:
        kept.remove()
    await write_rest(log, runtime, plan.job.deadlines.lease_s, say)
    if outcome.notice.status == v1.Notice.STOPPED:
        return RESUMABLE
    return OK if outcome.failed is None else ABORTED


async def _listen(endpoint: Endpoint, runtime: Runtime, wait_s: float) -> None:
    """Begins to listen; waits for the address of an earlier process, whose port another connection may have taken."""
    begun_ns = runtime.now()
    while True:
        try:
            await endpoint.start()
            return
        except ConfigError:
            if runtime.left_s(begun_ns, wait_s) <= 0:
                raise
        await runtime.sleep(RETRY_S)


async def write_rest(log: EventLog, runtime: Runtime, wait_s: float, say: Say) -> None:
    """Waits up to `wait_s` for disk space for the last events; then sends the launcher those that the file lacks."""
    give_up_ns = runtime.now() + round(wait_s * 1e9)
    while not log.flush():
        if runtime.now() >= give_up_ns:
            say(output=f"{log.why_short()}\n")
            say(unwritten=b"".join(line for line in log.waiting if line.startswith(_ENDS)).decode())
            return
        await runtime.sleep(RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
