"""The launcher's side of a run: starts the nodes, follows their events, and sees to it that it ends.

Finished, or with an error that names who, or because somebody pressed Ctrl-C: nothing is left running.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradstream.errors import (
    ConfigError,
    DeadlineError,
    DiskError,
    GradstreamError,
    Interrupted,
    PeerLostError,
    UserCodeError,
)
from gradstream.job.files import digest_of
from gradstream.job.job import Job, is_script
from gradstream.recording import FOLDER, JOB_FILE
from gradstream.run.effective_settings import effective, to_toml
from gradstream.run.failures import typed_error
from gradstream.run.files import read_record
from gradstream.run.followed_events import FollowedEvents, OnEvent
from gradstream.run.local import (
    NODE,
    SCRIPT,
    Cluster,
    LocalCluster,
    ThreadCluster,
    describe_machine,
    node_environment,
)
from gradstream.run.local.machine import git_commit
from gradstream.run.local.ranks import hold_port
from gradstream.run.local.signals import StopSignals
from gradstream.run.node import NodeSpec, play
from gradstream.run.nodes import COORDINATOR, RunPlan, worker_name
from gradstream.run.remote.address import Address
from gradstream.run.remote.listening import Listening
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.event_log import disk_error
from gradstream.runtime.storage import DiskStorage
from gradstream.telemetry.events import FailedEvent
from gradstream.transport.credentials import Credentials
from gradstream.transport.proof import new_secret
from gradstream.untrusted import escaped, say

if TYPE_CHECKING:
    from gradstream.run.remote.machine_rendezvous import MachineRendezvous

__all__ = ["Launcher", "OnAddress", "OnEvent"]

OnAddress = Callable[[Path, str, Sequence[str]], None]

MESSAGE_BYTES = 1024
"""Of what is shown of a node's message."""

POLL_S = 0.2
"""Between two looks at what has been recorded. What nodes say is heard at once."""
BOOT_S = 60.0
"""For a process to load torch and the job file, before its deadline to join begins."""


class Launcher:
    """One run, as its launcher sees it."""

    def __init__(
        self,
        job: Job,
        plan: RunPlan,
        run_dir: Path,
        earlier: tuple[Path, ...],
        on_event: OnEvent | None,
        as_threads: bool,
        listening: Listening | None = None,
        on_address: OnAddress | None = None,
        cluster: LocalCluster | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._signals = StopSignals()
        self._stopping = False  # the coordinator was asked to stop
        self._reachable = False  # the coordinator can be asked
        self._credentials = Credentials(new_secret())
        self._given_cluster = cluster
        self._stop = stop
        self._is_trial = stop is not None
        self._job = job
        self._plan = plan
        self._run_dir = run_dir
        self._earlier = earlier
        self._as_threads = as_threads
        self._listening = listening
        self._gathering: MachineRendezvous | None = None
        self._on_address = on_address  # where somebody else starts the workers
        self._handed_out: Path | None = None  # the file of credentials that they read
        self._begins_again = False  # the script would not go on where it was
        self._meeting = ""  # where process groups of a script's own meet
        self._events = FollowedEvents(run_dir, on_event)
        self._errors: dict[str, dict[str, Any]] = {}  # what nodes say has happened to them
        self._ended: dict[str, int] = {}
        elsewhere = [worker_name(rank) for rank in range(plan.workers)] if on_address else []
        self._others = [name for name in plan.node_names if name not in (COORDINATOR, *elsewhere)]

    def run(self) -> None:
        """Returns when the run has finished; raises what it failed with. Leaves no process."""
        here = self._per_machine
        environment = {} if self._as_threads else node_environment(here, shards=self._plan.servers > 0)
        with self._held_port():
            self._run(self._prepared(environment))

    def _run(self, made: AbstractContextManager[LocalCluster | ThreadCluster]) -> None:
        try:
            with self._signals, made as cluster:
                self._cluster: Cluster = cluster
                with self._gathered():
                    self._start_nodes()
                    self._follow()
                    self._let_leave()
                    self._check_result()
        except GradstreamError as error:
            self._note_failure(error)
            peer = getattr(error, "peer", "")
            if self._ended.get(peer, 0) < 0 and "its process" not in str(error):
                error.add_note(f"{peer}: its process {_ended_how(self._ended[peer])}")
            if place := self._gathering.place_of(peer) if self._gathering is not None else "":
                error.add_note(f"{peer} was on {place}")
            for note in self._where:
                error.add_note(note)
            if self._events.skipped:
                error.add_note(f"events.jsonl: {self._events.skipped}")
            if isinstance(error, UserCodeError) and error.traceback_text:
                error.add_note(f"where it was raised:\n{error.traceback_text.rstrip()}")
            raise
        except KeyboardInterrupt as error:  # the second Ctrl-C
            self._events.read()
            if not self._is_trial:
                error.args = error.args or ("\n".join(["interrupted", *self._where]),)
            raise
        finally:
            self._take_back()
            self._events.read()
            self._record_carriers()

    def _prepared(
        self, environment: Mapping[str, str]
    ) -> AbstractContextManager[LocalCluster | ThreadCluster]:
        """Writes what nodes read, and gives what starts them. Raises DiskError where there is no room."""
        try:
            self._write_records(environment)
            return self._make_cluster(environment)
        except OSError as error:
            raise DiskError(
                f"the run directory {self._run_dir} cannot be written: {disk_error(error)}; nothing was "
                "started: make room, or name another with run_dir=, or --run-dir"
            ) from error

    def _make_cluster(
        self, environment: Mapping[str, str]
    ) -> AbstractContextManager[LocalCluster | ThreadCluster]:
        logs = self._run_dir / "logs"
        if self._given_cluster is not None:
            return nullcontext(self._given_cluster)
        if self._as_threads:
            return ThreadCluster(logs, partial(play, self._job))
        return LocalCluster(logs, environment)

    def _write_records(self, environment: Mapping[str, str]) -> None:
        spec = self._spec(self._earlier)
        entries = effective(self._job, self._plan.strategy, self._plan.optimizer)
        storage = DiskStorage(self._run_dir)  # atomic: a run can be killed here, and resumed
        storage.write("config.toml", to_toml(self._job, entries).encode())
        if self._job.record:
            told = {"job": spec.job, "sha256": digest_of(spec.job)}
            storage.write(f"{FOLDER}/{spec.id}/{JOB_FILE}", json.dumps(told).encode())
        info = {
            "name": self._job.name,
            "id": spec.id,
            "began_unix_s": datetime.datetime.now(datetime.UTC).timestamp(),
            "nodes": "threads" if self._as_threads else "processes",
        }
        if self._job.record_machine:
            info |= {"git_commit": git_commit(Path.cwd()), **describe_machine(environment)}
        if self._plan.resume is None:
            storage.write("run.json", json.dumps(info, indent=2).encode() + b"\n")
        storage.write("nodes.json", json.dumps(dataclasses.asdict(spec), indent=2).encode() + b"\n")

    def _spec(self, earlier: tuple[Path, ...]) -> NodeSpec:
        return NodeSpec.of(
            self._job,
            self._plan,
            run_dir=self._run_dir,
            earlier=earlier,
            trial=self._is_trial,
            per_machine=self._per_machine,
            meeting=self._meeting,
        )

    @property
    def _per_machine(self) -> int:
        """How many workers this machine has, and each of the others."""
        if self._listening is None or self._on_address is not None:
            return self._job.workers
        return self._listening.workers_per_machine

    @contextmanager
    def _held_port(self) -> Iterator[None]:
        """Keeps a port free for scripts that make a process group of torch.distributed."""
        if not is_script(self._job) or self._on_address is not None:
            yield
            return
        at = Address("127.0.0.1")
        if self._listening is not None:
            at = self._listening.address.at(self._listening.meeting_port(self._plan.servers))
        with hold_port(at.host, at.port) as held:
            self._meeting = str(at.at(held.getsockname()[1]))
            yield

    def _record_carriers(self) -> None:
        """Adds to run.json what nodes have agreed on. Nothing fails because it cannot be written."""
        if not self._events.carriers:
            return
        try:
            info = read_record(self._run_dir / "run.json") | {"carriers": self._events.carriers}
            DiskStorage(self._run_dir).write("run.json", json.dumps(info, indent=2).encode() + b"\n")
        except OSError as error:
            self._events.say_of_disk(
                f"run.json does not say by which carrier nodes were reached: {disk_error(error)}"
            )
        except ConfigError as error:
            say(str(error))

    # ---- other machines -----------------------------------------------------------------

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Begins when all machines are there, where there are others; they are told how it has ended."""
        if self._listening is None:
            yield
            return
        # gRPC starts threads, and the forkserver is a process of its own: it may be imported now.
        from gradstream.run.remote.machine_rendezvous import MachineRendezvous

        spec = dataclasses.asdict(self._spec(()))
        with MachineRendezvous(
            self._listening, self._job, spec, self._plan.servers, self._cluster.post, self._events.emit
        ) as gathering:
            self._gathering = gathering
            gathering.wait(self._hear_and_show)
            yield

    def _hear_and_show(self) -> None:
        self._hear()
        self._events.read()

    # ---- nodes --------------------------------------------------------------------------

    def _start_nodes(self) -> None:
        self._start_node(COORDINATOR)
        address = self._address_of_coordinator()
        if self._gathering is not None:
            self._gathering.enrolment.go(int(address.rpartition(":")[2]))
        if self._on_address is not None:
            if self._gathering is None:
                self._handed_out = self._credentials.save(self._run_dir)
            self._on_address(self._run_dir / "nodes.json", address, self._network(worker_name(0)))
        for name in self._others:
            if self._gathering is None or self._gathering.is_here(name):
                self._start_node(name, "--coordinator", address)

    def _start_node(self, name: str, *arguments: str) -> None:
        spec = ["--spec", str(self._run_dir / "nodes.json"), "--name", name, *arguments, *self._network(name)]
        is_loop = is_script(self._job) and name.startswith("worker")
        self._cluster.start(name, spec, main=SCRIPT if is_loop else NODE)

    def _network(self, name: str) -> list[str]:
        """What a node of this machine is told about its network."""
        if self._gathering is None:
            return ["--credentials", str(self._credentials)]
        return self._gathering.arguments(name)

    def _take_back(self) -> None:
        """Nobody needs the file of credentials any more."""
        if self._handed_out is not None:
            self._handed_out.unlink(missing_ok=True)
            self._handed_out = None

    def _address_of_coordinator(self) -> str:
        deadline_s = self._job.deadlines.join_s + BOOT_S
        waited = 0
        while waited * POLL_S < deadline_s:
            message = self._hear()
            if message is None:
                waited += 1
            elif "address" in message and message.get("from") == COORDINATOR:  # not that of a machine
                self._reachable = True
                return str(message["address"])
            if self._ended:
                raise self._error_of_ended()
        raise DeadlineError(
            COORDINATOR, f"did not start within {deadline_s:g} s; see {self._run_dir / 'logs'}"
        )

    def _heed(self) -> None:
        """Does what Ctrl-C or SIGTERM asks for. Before there is a coordinator, there is nothing to keep."""
        if (
            self._stopping
            or self._has_finished
            or not (self._signals.asked or (self._stop is not None and self._stop()))
        ):
            return
        self._stopping = True
        if not self._reachable:
            raise self._interrupted()
        if self._signals.asked and not self._is_trial:
            say("stopping: a checkpoint is made first; once more to stop at once")
        self._cluster.signal(COORDINATOR, signal.SIGTERM)

    def _interrupted(self) -> Interrupted:
        error = Interrupted(self._run_dir, self._folder, self._command)
        if self._signals.asked and not self._is_trial:  # of a trial nothing is kept
            say(str(error))
        return error

    @property
    def _folder(self) -> str:
        """The newest checkpoint, as far as is known; "" without one."""
        resumed = self._plan.resume
        first = "" if resumed is None else resumed.folder
        last: str = self._events.last.get("checkpoint", {}).get("folder", first)
        return last

    @property
    def _where(self) -> list[str]:
        """What is left of a run that did not finish, and how it goes on from there."""
        more = self._folder and not self._has_finished
        resumes = [f"it resumes from {self._folder}: {self._command}"] if more else []
        return [f"run directory: {self._run_dir}", *resumes]

    @property
    def _command(self) -> str:
        """What resumes the run."""
        if self._begins_again:
            return "once the script goes on where it was, by session.skip() or session.step"
        if self._job.spec is None:  # in nobody's file
            return f"gradstream.resume({str(self._run_dir)!r}, job=the job)"
        return f"gradstream resume {shlex.quote(str(self._run_dir))}"

    def _hear(self) -> dict[str, Any] | None:
        self._heed()
        message = self._cluster.message(POLL_S)
        if message is None:
            return None
        if "exited" in message:
            self._ended[message["exited"]] = message["status"]
        elif "error" in message:
            self._errors[message["from"]] = message
        elif self._gathering is not None and ("machine" in message or "insecure" in message):
            for node, lost in self._gathering.note(message).items():
                self._errors.setdefault(node, lost)
                self._ended.setdefault(node, 1)
        elif "begins_again" in message:
            self._begins_again = True
        elif "output" in message:
            sys.stderr.write(message["output"])
        elif "disk" in message:
            self._events.say_of_disk(message["disk"])
        elif "unwritten" in message:
            self._events.take(message["unwritten"].encode().splitlines())
        return message

    def _follow(self) -> None:
        """Follows the run until the coordinator has ended, or can be waited for no more."""
        others_gone = 0
        while COORDINATOR not in self._ended:
            silent = self._hear() is None
            self._events.read()
            if "started" in self._events.last:
                self._take_back()
            if self._ended and not {"started", "failed", "stopped"} & set(self._events.last):
                raise self._error_of_ended()
            if silent and len(self._ended) == len(self._others) and self._on_address is None:
                others_gone += 1  # it has been told by broken connections; it may be stopped, and wake up
                if others_gone * POLL_S > self._job.deadlines.patience_s:
                    raise PeerLostError(COORDINATOR, "did not react to the end of all other nodes")
        self._events.read()
        if "stopped" in self._events.last:
            self._let_leave()
            raise self._interrupted()
        if not self._has_finished:
            if is_script(self._job):
                self._let_leave()  # scripts of the user's may have something to put away
            raise self._error()
        if "failed" in self._events.last:  # finished, but without data of a lost worker
            self._let_leave()
            raise self._error()

    def _let_leave(self) -> None:
        """Gives nodes that are done the time to say goodbye, and scripts all that they take."""
        waited, patient = 0, is_script(self._job) and self._has_finished
        while self._cluster.running and (patient or waited * POLL_S < self._job.deadlines.lease_s):
            waited += self._hear() is None
            patient = patient and not self._signals.asked

    @property
    def _has_finished(self) -> bool:
        return "finished" in self._events.last

    def _check_result(self) -> None:
        """The worker of the lowest rank keeps the final parameters; that may have become one elsewhere.

        A script may have failed after its session.
        """
        for name, said in self._errors.items():
            if is_script(self._job) and said["error"] in (UserCodeError.__name__, ConfigError.__name__):
                raise self._error_of_ended(name)
        if self._gathering is None or (self._run_dir / FINAL_MODEL).is_file():
            return
        raise PeerLostError(
            "worker-0",
            "was lost with all workers of this machine. The others have finished the run, but the final "
            "parameters are with them: `gradstream join` has said where, copy them from there",
        )

    # ---- events and errors --------------------------------------------------------------

    def _error(self) -> GradstreamError:
        """What the run failed with, by the coordinator's word or by what became of it."""
        failed = self._events.last.get("failed")
        if failed is not None:
            return typed_error(failed["culprit"], failed["error"], failed["message"], failed["traceback"])
        return self._error_of_ended(COORDINATOR)

    def _error_of_ended(self, name: str | None = None) -> GradstreamError:
        """Why a node (the first that ended) is gone."""
        name = name or next(iter(self._ended))
        said = self._errors.get(name)
        if said is not None:
            return typed_error(name, said["error"], said["message"], said["traceback"])
        tail = self._cluster.log_tail(name, 5)
        how = _ended_how(self._ended[name])
        shown = escaped(tail, MESSAGE_BYTES, newlines=True)
        return PeerLostError(name, f"its process {how}; the end of its log:\n{shown}")

    def _note_failure(self, error: GradstreamError) -> None:
        """Makes sure that the run's events say how it ended."""
        self._events.read()
        if "failed" in self._events.last:
            return
        if not self._events.mend():
            return
        culprit = getattr(error, "peer", next(iter(self._ended), "launcher"))
        event = FailedEvent(
            culprit=culprit,
            error=type(error).__name__,
            message=str(error),
            traceback=getattr(error, "traceback_text", ""),
        )
        self._events.emit(event)


def _ended_how(status: int) -> str:
    """What became of a process, by its exit status; of one that a signal has ended, minus its number."""
    if status >= 0:
        return f"ended with status {status}"
    by = " (kill -9, or Linux where memory runs out: see dmesg)" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status}{by}"
