"""`RayRun`: a run whose processes are on the nodes of a Ray cluster, as the program sees it that has asked for it.

    driver ── placement group, actors, which end with it ──▶ Ray
    actor of node 0 ── gradstream train: coordinator, shards, its workers ──┐  the same variables as under other
    actor of node i ── gradstream train: its workers ───────────────────────┘  engines: see `run/place.py`
    node ◀── tensors, TLS, proof of the token ──▶ node          nothing of this passes through Ray
    driver ◀── events; the files of the finished run ── node 0  in pieces too small for Ray's object store

A node that is lost with its machine is started again by Ray, and joins as a machine does. The others do not wait.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradstream._version import __version__
from gradstream.errors import RESUMABLE, ConfigError, GradstreamError, PeerLostError, UserCodeError
from gradstream.ext.ray.actor import OWN_FOLDER, NodeView, digest_of_file
from gradstream.ext.ray.engine import RayCluster, RayEngine
from gradstream.ext.ssh.run_files import FREE_PART, MAX_FILES
from gradstream.job.settings.sources import OTHER_VARIABLES, PREFIX
from gradstream.machine.resources import free_disk_bytes
from gradstream.run.followed_events import Ending, OnEvent
from gradstream.run.local.environment import StopSignals
from gradstream.run.place import HOST, LEAST, NODE, NODES, PORT
from gradstream.run.records import write_spec
from gradstream.run.result import described
from gradstream.untrusted import escaped, say

# ---- files -------------------------------------------------------------------------------
# Where nodes find the job file; and `RunFiles`, the files of a run on the machine of its first node.

ANSWER_S = 60.0
"""Longest wait for an answer of the first node while it runs."""


def folder_of(job: str) -> Path:
    """The folder that nodes get as their working directory: that of the job file, or of a module the present one."""
    return Path(job.partition(":")[0]).parent if ".py" in job else Path.cwd()


def job_files(job: str) -> tuple[list[str], str, str]:
    """Where nodes may find the job file, its SHA-256, and ":function" after it; no places for a module."""
    place, colon, function = job.partition(":")
    file = Path(place)
    if file.suffix != ".py":
        return [], "", ""
    near = [str(file.relative_to(Path.cwd()))] if file.is_relative_to(Path.cwd()) else []
    return [*near, file.name, str(file)], digest_of_file(file), colon + function


NAME_BYTES = 256
"""Longest name of a file in a message."""


class RunFiles:
    """The files of a run, which come in pieces that are too small for Ray's object store.

    Args:
        actor: the actor of the first node.
        events_bytes: size of the events that the driver does not ask for.
    """

    def __init__(self, cluster: RayCluster, actor: Any, events_bytes: int) -> None:
        self._cluster = cluster
        self._actor = actor
        self._read_bytes = events_bytes
        self._rest = b""

    def events(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; none where the actor is gone: the end of its call tells why.

        Raises:
            DeadlineError: the actor does not answer.
        """
        while True:
            asked = self._actor.events.remote(self._read_bytes)
            try:
                data = self._cluster.answer(asked, "node 0", ANSWER_S)
            except self._cluster.ray.exceptions.RayError:
                return
            if not data:
                return
            self._read_bytes += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def bring(self, run_dir: Path) -> None:
        """Writes all files into a folder here.

        Raises:
            ConfigError: the node names a file that would be elsewhere, or sends more than the disk has room for.
            DeadlineError: the actor does not answer.
        """
        left = int(FREE_PART * free_disk_bytes(run_dir))
        names = self._cluster.answer(self._actor.files.remote(), "node 0", ANSWER_S)
        if len(names) > MAX_FILES:
            raise ConfigError(f"node 0 names {len(names):,} files of its run, expected at most {MAX_FILES:,}")
        for name in names:
            path = (run_dir / name).resolve()
            if not path.is_relative_to(run_dir.resolve()):
                raise ConfigError(f"node 0 names a file outside of its run: {escaped(name, NAME_BYTES)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while data := self._cluster.answer(
                    self._actor.piece.remote(name, file.tell()), "node 0", ANSWER_S
                ):
                    left -= len(data)
                    if left < 0:
                        raise ConfigError(f"node 0 sends a run that fills the disk of {run_dir}: make room")
                    file.write(data)


# ---- driver ------------------------------------------------------------------------------

POLL_S = 0.2
"""Seconds between two looks at the run."""

LEAVE_S = 5.0
"""Longest wait for the other nodes once the run is over; as long again after they were asked to stop."""

GO_S = 60.0
"""Longest wait for a node that was asked to leave; then it is ended, and its worker is lost."""

VAIN_STARTS, VAIN_S, AGAIN_S = 10, 30.0, 2.0
"""A node whose process ends so often, each time within `VAIN_S`, is given up; seconds more before each start."""

TAIL_LINES, ERROR_BYTES = 15, 2048

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(slots=True)
class _Node:
    """A node that Ray runs, and how its process did."""

    actor: Any
    started_s: float = 0.0
    vain: int = 0
    leave_by_s: float | None = None  # it was asked to leave


@dataclass(slots=True, kw_only=True)
class RayRun:
    """One run in a Ray cluster.

    Args:
        engine: what to ask Ray for.
        job: the job: "module:function", or the absolute path of a file, or "file.py:function".
        words: options of `gradstream train`, and arguments of the job file after "--".
        workers: number of workers, or of parts of replicas.
        run_dir: where the finished run is to be. If the first node sees the same disk, it is there from the start.
        on_event: called with each event of the run.
    """

    engine: RayEngine
    job: str
    words: Sequence[str]
    workers: int
    run_dir: Path
    on_event: OnEvent | None = None
    _cluster: RayCluster = field(init=False)
    _view: NodeView = field(init=False)
    _token: str = field(init=False, repr=False)
    _files: RunFiles = field(init=False)
    _place: str = field(init=False, default="")  # of the job, on the nodes
    _nodes: dict[int, _Node] = field(init=False, default_factory=dict)
    _running: dict[Any, int] = field(init=False, default_factory=dict)  # by call of `RayNode.run`
    _last: dict[str, Any] = field(init=False, default_factory=dict)

    def run(self) -> None:
        """Trains to the end; the run is in `run_dir` then, as far as it came.

        Raises:
            ConfigError: there is no Ray, no cluster, or the nodes cannot begin.
            DeadlineError: Ray has no room, or something does not answer in time.
            PeerLostError: the first node was lost with its machine.
            GradstreamError: the run failed, as in `train`.
            Interrupted: Ctrl-C; the run has made a checkpoint.

            After any of these no actor and no process is left.
        """
        most = self.engine.nodes_for(self.workers)
        self._token = secrets.token_hex(16)
        wanted = job_files(self.job)  # Ray may make the working directory of this program anew
        with (
            StopSignals() as signals,
            RayCluster(self.engine.address, folder_of(self.job), self.engine.wait_s) as found,
        ):
            self._cluster = found
            least = most if self.engine.least is None else self.engine.least
            bundles = [self.engine.bundle(rank) for rank in range(least)]
            if not self._cluster.place(bundles, lambda: signals.asked):
                raise Ending(run_dir=self.run_dir, last={}).interrupted
            self._look(wanted)
            status, said = self._follow(signals, most, least)
            self._let_leave(0.0 if status else LEAVE_S)
            self._let_leave(LEAVE_S, ask=True)
            if not self._view.shared:
                self._files.bring(self.run_dir)
            if (self.run_dir / "nodes.json").is_file():  # sealed by another user, maybe
                write_spec(described(self.run_dir), self.run_dir)
            self._clean()
        self._check(status, said)

    # ---- the beginning --------------------------------------------------------------------

    def _look(self, wanted: tuple[list[str], str, str]) -> None:
        """Starts the actor of the first node, and looks at its machine for the job file: see `job_files`."""
        self._nodes[0] = first = _Node(self._cluster.start(0, self.engine.bundle(0)))
        mark = self.run_dir.with_name(f".gradstream-{secrets.token_hex(8)}")
        mark.touch()
        files, digest, function = wanted
        try:
            asked = first.actor.look.remote(files, digest, str(self.run_dir), mark.name)
            self._view = self._cluster.answer(asked, "node 0")
        except self._cluster.ray.exceptions.RayError as error:
            text = escaped(str(error)[-ERROR_BYTES:], 2 * ERROR_BYTES, newlines=True)
            raise ConfigError(f"node 0: Ray cannot start its actor: {text}") from error
        finally:
            mark.unlink(missing_ok=True)
        if self._view.version != __version__:
            raise ConfigError(
                f"node 0 has gradstream {self._view.version}, and this program {__version__}; install the same one"
            )
        if files and not self._view.job:
            raise ConfigError(
                f"node 0 on {self._view.host} has no job file like this one: it has looked for {', '.join(files)}; "
                "expected it in the working directory of this Ray job: start it in the folder of the job file, or name "
                "that as working_dir of its runtime_env"
            )
        self._place = self._view.job + function if files else self.job
        if not self._view.shared and (self.run_dir / "run.json").exists():
            raise ConfigError(
                f"node 0 on {self._view.host} does not see {self.run_dir}, so it cannot go on with that run; expected "
                "a folder on a disk that both machines have"
            )
        self._files = RunFiles(self._cluster, first.actor, self._view.events_bytes)

    def _start(self, rank: int, wait_s: float = 0.0) -> None:
        """Starts the process of a node, and its actor unless that is there."""
        node = self._nodes.get(rank)
        if node is None:
            node = self._nodes[rank] = _Node(self._cluster.start(rank, self.engine.bundle(rank)))
        node.started_s = time.monotonic() + wait_s
        place = {NODES: self.engine.nodes_for(self.workers), NODE: rank, HOST: self._view.host}
        place |= {PORT: self._view.port, LEAST: self.engine.least or place[NODES]}
        cpus = self.engine.bundle(rank).get("CPU", 1)
        threads = str(max(1, int(cpus) // self.engine.workers_per_node))
        environment = dict.fromkeys(THREADS, threads)
        environment |= {name: value for name, value in os.environ.items() if _is_setting(name)}
        environment |= {name: str(value) for name, value in place.items()} | {"GRADSTREAM_TOKEN": self._token}
        options = [
            "--run-dir",
            OWN_FOLDER if rank else self._view.run_dir,
            "--wait-s",
            str(self.engine.wait_s),
        ]
        options += ["--workers-per-machine", str(self.engine.workers_per_node)]
        call = node.actor.run.remote(["train", self._place, *options, *self.words], environment, wait_s)
        self._running[call] = rank

    # ---- while it runs --------------------------------------------------------------------

    def _follow(self, signals: StopSignals, most: int, least: int) -> tuple[int, str]:
        """Follows the run until the process of the first node has ended; returns its status, and what it has said."""
        self._start(0)
        stopping = False
        while True:
            if signals.asked and not stopping:
                stopping = True
                say("stopping: a checkpoint is made first; once more to stop at once")
                self._nodes[0].actor.stop.remote()
            if not stopping:
                begun = "started" in self._last
                self._adjust(max(min(self.engine.wanted or most, most), 1 if begun else least))
            for call in self._cluster.done(list(self._running), POLL_S):
                ended = self._ended(self._running.pop(call), call)
                if ended is not None:
                    self._tell_events()
                    return ended
            self._tell_events()

    def _adjust(self, wanted: int) -> None:
        """Starts and ends nodes until there are as many as wanted; the first one stays."""
        for rank in range(wanted):
            if rank not in self._nodes:
                self._start(rank)
        for rank, node in self._nodes.items():
            if rank >= wanted and node.leave_by_s is None:
                node.leave_by_s = time.monotonic() + GO_S
                node.actor.stop.remote()
        late = {
            rank for rank, node in self._nodes.items() if (node.leave_by_s or math.inf) < time.monotonic()
        }
        for rank in late:  # Ray has not placed it yet, or it hangs
            self._cluster.remove(self._nodes.pop(rank).actor)
        self._running = {call: rank for call, rank in self._running.items() if rank not in late}

    def _ended(self, rank: int, call: Any) -> tuple[int, str] | None:
        """Takes the end of a node's process: the first node's ends the run, others are started again, or go."""
        try:
            status, said = self._cluster.answer(call, f"node {rank}")
        except self._cluster.ray.exceptions.RayError as error:
            if not rank:
                raise PeerLostError(
                    "node 0",
                    f"was lost with its machine, and with it the parameters ({_first_line(error)}). A run directory on "
                    "a disk that all machines have keeps its checkpoints: the same command goes on from there",
                ) from error
            status, said = 1, _first_line(error)
        if not rank:
            return int(status), str(said)
        node = self._nodes[rank]
        if node.leave_by_s is not None:
            self._cluster.remove(self._nodes.pop(rank).actor)
        if node.leave_by_s is not None or status == 0:  # the run has finished
            return None
        node.vain = node.vain + 1 if time.monotonic() - node.started_s < VAIN_S else 0
        text = f"its process ends with status {status}:\n{_tail(said)}"
        if "started" in self._last and node.vain >= VAIN_STARTS:
            say(f"gradstream: node {rank} is given up; {text}")
        elif "started" in self._last or (node.vain < VAIN_STARTS and status != ConfigError.exit_status):
            self._start(rank, AGAIN_S * node.vain)
        elif not self._cluster.done([call for call, rank in self._running.items() if not rank], LEAVE_S):
            raise ConfigError(f"node {rank} cannot join; {text}")  # else the first node says why
        return None

    def _tell_events(self) -> None:
        """Passes new events of the run on."""
        for event in self._files.events():
            self._last[event["event"]] = event
            if self.on_event is not None:
                self.on_event(event)

    # ---- the end --------------------------------------------------------------------------

    def _let_leave(self, wait_s: float, *, ask: bool = False) -> None:
        """Waits until the other nodes have ended, for up to `wait_s`; with `ask`, asks their processes to stop."""
        if ask:
            for rank in self._running.values():
                self._nodes[rank].actor.stop.remote()
        give_up_s = time.monotonic() + wait_s
        while self._running and (left_s := give_up_s - time.monotonic()) > 0:
            for call in self._cluster.done(list(self._running), left_s):
                del self._running[call]

    def _clean(self) -> None:
        """Has the actors remove their folders, for up to `LEAVE_S`."""
        calls = [node.actor.clean.remote() for node in self._nodes.values()]
        give_up_s = time.monotonic() + LEAVE_S
        while calls and (left_s := give_up_s - time.monotonic()) > 0:
            for call in self._cluster.done(calls, left_s):
                calls.remove(call)

    def _check(self, status: int, said: str) -> None:
        """Raises the error with which the run has ended, if it has not finished."""
        ending = Ending(run_dir=self.run_dir, last=self._last)
        if status == RESUMABLE:
            say(f"{ending.interrupted}, on this machine; the same command, with --run-dir, goes on in Ray")
            raise ending.interrupted
        error: GradstreamError | None = ending.failure
        if error is None and status == 0:
            return
        if error is None and status == ConfigError.exit_status:
            error = ConfigError(f"node 0 cannot begin:\n{_tail(said)}")
        elif error is None and status == UserCodeError.exit_status:
            error = UserCodeError(f"node 0: {_tail(said)}", "")
        elif error is None:
            error = PeerLostError("node 0", f"ended with status {status}:\n{_tail(said)}")
        for note in ending.where:
            error.add_note(note)
        raise error


def _is_setting(name: str) -> bool:
    """Whether an environment variable is a setting of gradstream, or names its data."""
    return name == "GRADSTREAM_DATA" or (name.startswith(PREFIX) and name not in OTHER_VARIABLES)


def _tail(said: str) -> str:
    return escaped("\n".join(said.splitlines()[-TAIL_LINES:]), 4096, newlines=True)


def _first_line(error: Exception) -> str:
    return escaped(str(error).strip().partition("\n")[0], 512)
