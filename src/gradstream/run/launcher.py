"""The launcher of a run: starts the nodes, follows their events, and makes sure that the run ends.

A run ends when it has finished, with an error that names the node at fault, or because the user stopped it.
In each case no process is left.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradstream.coordinator.nodes import COORDINATOR
from gradstream.errors import (
    ConfigError,
    DeadlineError,
    GradstreamError,
    Interrupted,
    PeerLostError,
    UserCodeError,
)
from gradstream.job.job import Job, is_script
from gradstream.job.losses import losses_of_all
from gradstream.job.plan import RunPlan, worker_name
from gradstream.run.failures import EndedNodes, failed_event, how_ended
from gradstream.run.followed_events import Ending, FollowedEvents
from gradstream.run.local import NODE, SCRIPT, Cluster
from gradstream.run.local.environment import StopSignals, stop_signal
from gradstream.run.preparation import LaunchOptions, Preparation
from gradstream.run.records import add_to_run_json
from gradstream.run.reshards import ShardChanges
from gradstream.run.restarts import Comebacks, Succession
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.deadlines import to_wait_longer
from gradstream.runtime.storage import disk_error
from gradstream.transport.proof import Credentials, new_secret
from gradstream.untrusted import pass_on, say, tell

if TYPE_CHECKING:
    from gradstream.run.remote.join_service import MachineRendezvous

POLL_S = 0.2
"""Seconds between two reads of the events file. Messages of nodes are handled at once."""
STATUS_S = 1.0
"""Seconds to wait for the exit status of a process that the coordinator reported lost."""
BOOT_S = 60.0
"""Seconds for a process to load torch and the job file, before its deadline to join begins."""


class Launcher:
    """Starts and follows the nodes of one run.

    Args:
        run_dir: an existing directory.
        options: how to start and follow them.
    """

    def __init__(self, plan: RunPlan, run_dir: Path, options: LaunchOptions) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._options = options
        self._preparation = Preparation(plan, run_dir, options)
        self._signals = options.detached or StopSignals()
        self._credentials = Credentials(new_secret())
        self._shards = ShardChanges(plan.most_servers)
        self._events = FollowedEvents(run_dir, options.on_event, self._note_lost, self._note_reshard)
        self._ended = EndedNodes()
        self._machines: MachineRendezvous | None = None  # the other machines, if there are any
        self._credentials_file: Path | None = None  # for workers that another program starts
        kept = not (options.as_threads or options.is_trial)
        losses = losses_of_all(plan)
        if options.listening is not None:
            options.listening.check_losses(losses.obstacle)
        self._comebacks = Comebacks(losses, plan.job.max_restarts, Succession(kept))
        self._begins_again = False  # whether a resumed script would start over
        elsewhere = [worker_name(rank) for rank in range(plan.most_workers)] if options.on_address else []
        self._others = [name for name in plan.node_names if name not in (COORDINATOR, *elsewhere)]

    def run(self) -> None:
        """Runs the nodes until the run has finished; raises the error that it failed with."""
        made = self._preparation
        with made.lock(self._events.read_bytes), made.held_port():
            self._run(made.cluster())

    def _run(self, made: AbstractContextManager[Cluster]) -> None:
        try:
            with self._signals, made as cluster:
                self._cluster = cluster
                with self._machines_joined():
                    self._start_nodes()
                    self._follow()
                    self._let_leave()
                    self._check_result()
        except GradstreamError as error:
            self._note_failure(error)
            self._explain(error)
            raise
        except KeyboardInterrupt as error:  # the second Ctrl-C
            self._events.read()
            if not self._options.is_trial:
                error.args = error.args or ("\n".join(["interrupted", *self._ending.where]),)
            raise
        finally:
            self._remove_credentials()
            self._events.read()
            self._record_carriers()

    @property
    def _address(self) -> str:
        """The coordinator's address, once it can be asked to stop; "" before."""
        return self._comebacks.coordinator.address

    @property
    def _job(self) -> Job:
        return self._plan.job

    # ---- other machines -----------------------------------------------------------------

    @contextmanager
    def _machines_joined(self) -> Iterator[None]:
        """Waits until all other machines, if any, have joined; reports the end of the run to them."""
        if self._options.listening is None:
            yield
            return
        # gRPC starts threads when it is imported. By now the forkserver is a separate process.
        from gradstream.run.remote.join_service import MachineRendezvous

        spec = dataclasses.asdict(self._preparation.spec(()))
        with MachineRendezvous(
            self._options.listening, self._plan, spec, self._cluster.post, self._events
        ) as machines:
            self._machines = machines
            machines.wait(self._handle_and_read)
            yield

    def _is_here(self, name: str) -> bool:
        """Whether this machine runs a node."""
        return self._machines is None or self._machines.is_here(name)

    def _handle_and_read(self) -> None:
        self._handle_message()
        self._events.read()

    # ---- nodes --------------------------------------------------------------------------

    def _start_nodes(self) -> None:
        absent = [] if self._machines is None else self._machines.absent
        self._start_node(COORDINATOR, *(["--without", ",".join(absent)] if absent else []))
        address = self._address_of_coordinator()
        if self._machines is not None:
            self._machines.join_service.go(int(address.rpartition(":")[2]))
        if self._options.on_address is not None:
            if self._machines is None:
                self._credentials_file = self._credentials.save(self._run_dir)
            self._options.on_address(self._run_dir / "nodes.json", address, self._network(worker_name(0)))
        for name in self._others:
            if not self._shards.is_extra(name) and self._is_here(name):
                self._start_node(name, "--coordinator", address)

    def _start_node(self, name: str, *arguments: str, again: Sequence[str] = ()) -> None:
        spec = ["--spec", str(self._run_dir / "nodes.json"), "--name", name, *arguments, *self._network(name)]
        spec += again
        is_loop = is_script(self._job) and name.startswith("worker")
        self._cluster.start(name, spec, main=SCRIPT if is_loop else NODE)

    def _network(self, name: str) -> list[str]:
        """The network arguments of a node of this machine."""
        if self._machines is None:
            return ["--credentials", str(self._credentials)]
        return self._machines.arguments(name)

    def _remove_credentials(self) -> None:
        """Removes the file of credentials once all workers have read it."""
        if self._credentials_file is not None:
            self._credentials_file.unlink(missing_ok=True)
            self._credentials_file = None

    def _address_of_coordinator(self) -> str:
        deadline_s = self._job.deadlines.join_s + BOOT_S
        waited = 0
        while not self._address:
            waited += self._handle_message() is None
            if self._ended.statuses:
                raise self._error_of(self._ended.first)
            if waited * POLL_S > deadline_s:
                raise DeadlineError(
                    COORDINATOR,
                    f"did not start within {deadline_s:g} s: it imports the job first, which takes longer, or hangs; "
                    f"see {self._run_dir / 'logs'}; {to_wait_longer('join_s')}",
                )
        return self._address

    # ---- while they run -----------------------------------------------------------------

    def _handle_message(self) -> dict[str, Any] | None:
        """Handles Ctrl-C, and the next message of a node or a machine, for which it waits up to POLL_S."""
        self._handle_stop()
        self._restart_nodes()
        self._start_new_shards()
        message = self._cluster.message(POLL_S)
        if message is not None:
            self._take(message)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        """Handles a message of a node or a machine."""
        if "exited" in message:
            self._note_exit(
                message["exited"], message["status"], message.get("at_ns"), message.get("cause", "")
            )
        elif "error" in message:
            self._ended.report(message["from"], message)
        elif self._machines is not None and ("machine" in message or "insecure" in message):
            for node, error in self._machines.note(message).items():
                self._note_machine(node, error)
        elif "zero_ns" in message or "struck" in message:
            self._events.note_time(message)
        elif "begins_again" in message:
            self._begins_again = True
        elif "output" in message:
            tell(message["output"])
        elif "printed" in message:
            pass_on(message["printed"])
        elif message.get("from") == COORDINATOR and "address" in message:
            self._note_coordinator(str(message["address"]))
        elif "disk" in message:
            self._comebacks.coordinator.stored = message.get("stored", self._comebacks.coordinator.stored)
            about = f"state, stored: {message['stored']}" if "stored" in message else ""
            self._events.say_of_disk(message["disk"], about)
        elif "unwritten" in message:
            self._events.take(message["unwritten"].encode().splitlines())

    def _note_exit(self, name: str, status: int, at_ns: int | None, cause: str) -> None:
        """Notes that a node has ended. If it was killed or evicted while others train, it is started again."""
        self._events.read()
        if self._shards.is_extra(name):
            return
        if "started" in self._events.last and not self._is_ending:
            self._events.exited(name, status, at_ns, how_ended(status, cause))
        self._comebacks.ended(name)
        if name == COORDINATOR:
            training = "started" in self._events.last and bool(self._cluster.running or self._machines)
            if self._comebacks.coordinator.may_follow(status, training):
                self._start_node(COORDINATOR, again=["--listen", self._address.split()[0], "--again"])
                return
        self._ended.note(name, status, cause)
        training = "started" in self._events.last and not self._has_ended
        fails = "failed" in self._events.last
        if training and self._ended.was_lost(name):
            self._comebacks.start_soon(name, time.monotonic())
        elif (  # a process that the run had lost before, or that had not rejoined
            (training or (self._has_finished and not fails))
            and self._ended.failed_with(ConfigError, UserCodeError) == name
            and name in self._events.gone
        ):
            say(f"the run {'goes' if training else 'has gone'} on without a process: {self._error_of(name)}")
            self._ended.excuse(name)

    def _note_machine(self, name: str, error: dict[str, str]) -> None:
        """Notes a node that came with its machine or, if there is an error, was lost with it."""
        if not error:
            self._ended.forget(name)
            if name not in self._others:  # the run grows
                self._others.append(name)
            return
        if name not in self._ended.statuses:
            self._comebacks.ended(name)
            self._ended.lose(name, error)
        self._rescue(name)

    def _rescue(self, name: str) -> None:
        """Starts on this machine a shard that was lost with its machine, or stands still there."""
        if self._machines is not None and self._machines.members.rescue(name):
            self._comebacks.start_soon(name, time.monotonic())

    def _note_lost(self, name: str) -> None:
        """Kills an evicted shard that stands still, since everybody waits for a new process of it."""
        if not self._shards.is_extra(name) and self._comebacks.lost(name, time.monotonic()):
            self._cluster.signal(name, signal.SIGKILL)

    def _note_reshard(self, event: Mapping[str, Any]) -> None:
        """Tracks which shards hold the parameters. Shards that were replaced end by themselves."""
        self._shards.take(event)
        if event["state"] == "switched":
            workers = [name for name in self._others if not name.startswith("shard")]
            self._others = [*self._shards.holders, *workers]
            for name in filter(self._shards.is_extra, list(self._ended.statuses)):
                self._ended.forget(name)

    def _note_coordinator(self, address: str) -> None:
        """Notes that a coordinator process serves; a later one may not know that the run is to stop."""
        self._comebacks.coordinator.serves(address)
        if self._comebacks.stopping:
            self._cluster.signal(COORDINATOR, stop_signal())

    def _start_new_shards(self) -> None:
        for name in self._shards.take_due():
            if name not in self._cluster.running and not self._has_ended:
                self._start_late(name)

    def _start_late(self, name: str) -> None:
        """Starts a node of a run that has begun."""
        zero_ns = self._events.zero_ns
        clock = [] if zero_ns is None else ["--clock", str(zero_ns)]
        self._start_node(name, "--coordinator", self._address, *clock)

    def _restart_nodes(self) -> None:
        for name in filter(self._is_here, self._comebacks.stand_still(time.monotonic())):
            self._cluster.signal(name, signal.SIGKILL)
        for name in self._comebacks.unheard(time.monotonic()):
            if not self._is_here(name):
                self._comebacks.ended(name)
                self._rescue(name)
        for name in self._comebacks.due(time.monotonic()):
            here = self._is_here(name)
            if self._has_ended or not (here or (self._machines and self._machines.start_again(name))):
                continue
            self._ended.forget(name)
            if here:
                self._start_late(name)

    @property
    def _is_ending(self) -> bool:
        """Whether the run has ended, or was asked to stop."""
        return self._has_ended or self._comebacks.stopping

    @property
    def _has_ended(self) -> bool:
        ended = {"finished", "failed", "stopped"} & set(self._events.last)
        return bool(ended) or COORDINATOR in self._ended.statuses

    def _handle_stop(self) -> None:
        """Stops the run if Ctrl-C, SIGTERM or `stop` asks for it.

        The coordinator makes a checkpoint first. Before there is a coordinator, nothing can be kept.
        """
        stop = self._options.stop
        asked = self._signals.asked or (stop is not None and stop())
        if self._comebacks.stopping or self._has_finished or not asked:
            return
        self._comebacks.stopping = True
        if not self._address:
            raise self._interrupted()
        if self._signals.asked and not self._options.is_trial:
            say("stopping: a checkpoint is made first; once more to stop at once")
        self._cluster.signal(COORDINATOR, stop_signal())

    def _follow(self) -> None:
        """Follows the run until the coordinator has ended, or cannot be waited for any longer."""
        others_gone = 0
        while COORDINATOR not in self._ended.statuses:
            silent = self._handle_message() is None
            self._events.read()
            if "started" in self._events.last:
                self._remove_credentials()
            if self._ended.statuses and not {"started", "failed", "stopped"} & set(self._events.last):
                raise self._error_of(self._ended.first)
            if silent and len(self._ended.statuses) == len(self._others) and self._options.on_address is None:
                others_gone += 1  # broken connections tell the coordinator, which may be suspended meanwhile
                if others_gone * POLL_S > self._job.deadlines.patience_s:
                    raise PeerLostError(
                        COORDINATOR,
                        f"did not end the run within {self._job.deadlines.patience_s:g} s (deadlines.coordinator_s) "
                        f"after all other nodes had ended; see {self._run_dir / 'logs'}",
                    )
        self._events.read()
        if "stopped" in self._events.last:
            self._let_leave()
            raise self._interrupted()
        if not self._has_finished:
            if is_script(self._job):
                self._let_leave()  # the user's script may have something to save
            error = self._error()
            self._await_end(getattr(error, "peer", ""))
            raise error
        if "failed" in self._events.last:  # finished, but without data of a lost worker
            self._let_leave()
            raise self._error()

    def _await_end(self, name: str) -> None:
        """Waits a moment for the exit status of a lost node: the coordinator may have reported its end sooner."""
        waited = 0
        while name in self._cluster.running and waited * POLL_S < STATUS_S:
            waited += self._handle_message() is None

    def _let_leave(self) -> None:
        """Waits until the other nodes have ended, up to `lease_s`; for scripts, as long as they take."""
        waited, patient = 0, is_script(self._job) and self._has_finished
        for name in set(self._cluster.running).intersection(self._events.gone) if patient else ():
            self._cluster.signal(
                name, signal.SIGKILL
            )  # a new process of a lost worker, which has not come in time
        while self._cluster.running and (patient or waited * POLL_S < self._job.deadlines.lease_s):
            waited += self._handle_message() is None
            patient = patient and not self._signals.asked

    @property
    def _has_finished(self) -> bool:
        return "finished" in self._events.last

    def _check_result(self) -> None:
        """Raises if a script failed after its session, or the final parameters are on another machine.

        The worker of the lowest rank writes them, and all workers of this machine may have been lost.
        """
        if is_script(self._job):
            name = self._ended.failed_with(UserCodeError, ConfigError)
            if name is not None:
                raise self._error_of(name)
        if self._machines is None or (self._run_dir / FINAL_MODEL).is_file():
            return
        raise PeerLostError(
            "worker-0",
            "all workers of this machine were lost. The workers of the other machines have finished the run, so "
            f"the final parameters are there and not in {self._run_dir}: the output of `gradstream join` on those "
            "machines names the file; copy it from one of them",
        )

    # ---- the end ------------------------------------------------------------------------

    def _record_carriers(self) -> None:
        """Adds the carriers that nodes agreed on to run.json. Never raises, since the run has ended."""
        if not self._events.carriers:
            return
        try:
            add_to_run_json(self._run_dir, {"carriers": self._events.carriers})
        except OSError as error:
            self._events.say_of_disk(
                f"run.json does not say by which carrier nodes were reached: {disk_error(error)}"
            )
        except ConfigError as error:
            say(str(error))

    def _interrupted(self) -> Interrupted:
        error = self._ending.interrupted
        if self._signals.asked and not self._options.is_trial:
            say(str(error))
        return error

    @property
    def _ending(self) -> Ending:
        resume = self._plan.resume
        return Ending(
            run_dir=self._run_dir,
            last=self._events.last,
            first="" if resume is None else resume.folder,
            in_file=self._job.spec is not None,
            begins_again=self._begins_again,
        )

    def _error(self) -> GradstreamError:
        """The error that the run failed with, as reported by the coordinator, or by how its process ended."""
        return self._ending.failure or self._error_of(COORDINATOR)

    def _error_of(self, name: str) -> GradstreamError:
        return self._ended.error_of(name, self._cluster.log_tail)

    def _note_failure(self, error: GradstreamError) -> None:
        """Adds a `failed` event if the run's events do not have one yet."""
        self._events.read()
        if "failed" in self._events.last or not self._events.mend():
            return
        self._events.emit(failed_event(error, next(iter(self._ended.statuses), "launcher")))

    def _explain(self, error: GradstreamError) -> None:
        """Adds notes to an error: how its process ended, where it ran, how to resume, the user's traceback."""
        peer = getattr(error, "peer", "")
        if self._ended.statuses.get(peer, 0) < 0 and "its process" not in str(error):
            error.add_note(f"{peer}: its process {self._ended.how(peer)}")
        if place := self._machines.place_of(peer) if self._machines is not None else "":
            error.add_note(f"{peer} was on {place}")
        for note in self._ending.where:
            error.add_note(note)
        if self._events.skipped:
            error.add_note(f"events.jsonl: {self._events.skipped}")
        if isinstance(error, UserCodeError) and error.traceback_text:
            error.add_note(f"where it was raised:\n{error.traceback_text.rstrip()}")
