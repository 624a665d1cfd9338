"""`RayRun`: a run whose processes are on the nodes of a Ray cluster, from the point of view of the calling program.

    driver ── placement group, actors, which end with it ──▶ Ray
    actor of node 0 ── gradstream train: coordinator, shards, its workers ──┐  the same variables as under other
    actor of node i ── gradstream train: its workers ───────────────────────┘  engines: see `run/place.py`
    node ◀── tensors, TLS, proof of the token ──▶ node          nothing of this passes through Ray
    driver ◀── events; the files of the finished run ── node 0  in pieces too small for Ray's object store

A node that is lost with its machine is restarted by Ray, and joins as a machine does. The others do not wait.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from gradstream._version import __version__
from gradstream.errors import (
    RESUMABLE,
    ConfigError,
    GradstreamError,
    PeerLostError,
    UserCodeError,
)
from gradstream.ext.ray.actor import OWN_FOLDER, NodeView
from gradstream.ext.ray.cluster import RayCluster, RunFiles, folder_of, job_files
from gradstream.job.settings.layers import OTHER_VARIABLES, PREFIX
from gradstream.run.followed_events import Ending, OnEvent
from gradstream.run.local.environment import StopSignals
from gradstream.run.place import HOST, LEAST, NODE, NODES, PORT
from gradstream.run.records import write_spec
from gradstream.run.result import described
from gradstream.untrusted import escaped, say

# ---- engine ------------------------------------------------------------------------------

FORM = "ray, or ray://HOST:PORT of a Ray Client server, and options: 'ray?cpus=4&least=2'"


@dataclass(slots=True, kw_only=True)
class RayEngine:
    """Makes Ray place the nodes of a run, restart them elsewhere, and change their number.

    A node is a process of gradstream with `workers_per_node` workers, in an actor. The first node also has the
    coordinator
    and all shards.

    Args:
        address: "auto" takes the cluster to which this program is connected, that of RAY_ADDRESS, or that of this
            machine; "ray://host:10001" a cluster that is reached through Ray Client.
        cpus: CPUs that each node asks Ray for, and the number of its arithmetic threads.
        gpus: GPUs of each node.
        memory_gib: memory of each node, in GiB; 0 asks for none.
        first_cpus: CPUs of the first node; None asks for as many as for the others.
        resources: other resources of Ray that each node asks for.
        workers_per_node: workers of each node.
        least: number of nodes with which training begins, and which Ray places together; the others join when Ray has
            room for them. None waits for all.
        wait_s: longest wait for room, and for a process to answer, in seconds.

    Example:
        >>> engine = RayEngine(cpus=4, least=2)
        >>> run = train(job, workers=8, engine=engine)  # doctest: +SKIP
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    first_cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    workers_per_node: int = 1
    least: int | None = None
    wait_s: float = 300.0
    _wanted: int | None = field(default=None, init=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an engine from command-line text: "ray", "ray?cpus=4&least=2", "ray://head:10001?gpus=1".

        Raises:
            ConfigError: it is not an engine, or has an unknown option or a value of a wrong kind.
        """
        place, _, query = text.partition("?")
        if place != "ray" and not re.fullmatch(r"ray://[^:]+:\d+", place):
            raise ConfigError(f"engine {text!r}: expected {FORM}")
        known = {
            entry.name: entry for entry in dataclasses.fields(cls) if entry.init and entry.name != "resources"
        }
        known.pop("address")
        options: dict[str, Any] = {"address": "auto" if place == "ray" else place}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
                raise ConfigError(f"engine {text!r}: there is no option {name!r}; {hint}")
            kind = int if "int" in str(known[name].type) else float
            try:
                options[name] = kind(value)
            except ValueError:
                raise ConfigError(
                    f"engine {text!r}: {name}={value!r}; expected "
                    + ("a whole number" if kind is int else "a number")
                ) from None
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus", "memory_gib", "first_cpus"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"engine: {name}={value}; expected 0 or more")
        if not (self.bundle(0) and self.bundle(1)):
            raise ConfigError(
                "engine: cpus=0: a node has to ask Ray for something; expected cpus, gpus or resources"
            )
        if self.workers_per_node < 1:
            raise ConfigError(f"engine: workers_per_node={self.workers_per_node}; expected at least 1")

    def run(
        self, job: str, words: Sequence[str], *, workers: int, run_dir: Path, on_event: OnEvent | None
    ) -> None:
        """Trains to the end; see `gradstream._train.RunEngine`, and `RayRun.run` for the errors."""
        RayRun(engine=self, job=job, words=words, workers=workers, run_dir=run_dir, on_event=on_event).run()

    @property
    def wanted(self) -> int | None:
        """Number of nodes that the run is to have now; None for all."""
        return self._wanted

    def scale(self, nodes: int) -> None:
        """Changes the number of nodes of the run, while it trains or before. Returns at once.

        The nodes with the highest numbers hand in what they have computed and leave; new ones join when Ray has placed
        them. May be called from any thread, including a callback of the run.

        Args:
            nodes: new number, at least 1. Nodes beyond the number for which the run was planned (`workers` divided by
                `workers_per_node`) are not started.

        Raises:
            ConfigError: it is less than 1.
        """
        if nodes < 1:
            raise ConfigError(f"scale: nodes={nodes}; expected at least 1: the first node has the parameters")
        self._wanted = nodes

    def bundle(self, rank: int) -> dict[str, float]:
        """The resources that a node asks Ray for."""
        cpus = self.cpus if rank or self.first_cpus is None else self.first_cpus
        asked = {"CPU": cpus, "GPU": self.gpus, "memory": self.memory_gib * 2**30, **self.resources}
        return {name: value for name, value in asked.items() if value}

    def nodes_for(self, workers: int) -> int:
        """Number of nodes of a run with so many workers, or parts of replicas. Raises ConfigError."""
        nodes, left = divmod(workers, self.workers_per_node)
        if left:
            raise ConfigError(
                f"workers={workers} do not divide among nodes with workers_per_node={self.workers_per_node} each; "
                f"expected a multiple of {self.workers_per_node}"
            )
        if self.least is not None and not 1 <= self.least <= nodes:
            raise ConfigError(f"engine: least={self.least}; expected 1 to {nodes}, the number of nodes")
        if nodes == 1:
            raise ConfigError(
                "engine: a single node would be a run on one machine; expected workers=2 or more, or a smaller "
                "workers_per_node"
            )
        return nodes


# ---- driver ------------------------------------------------------------------------------

POLL_S = 0.2
"""Seconds between two checks of the run."""

LEAVE_S = 5.0
"""Longest wait for the other nodes once the run is over, and again after they were asked to stop."""

GO_S = 60.0
"""Longest wait for a node that was asked to leave; then it is ended, and its worker is lost."""

VAIN_STARTS, VAIN_S, AGAIN_S = 10, 30.0, 2.0
"""A node whose process ends this often, each time within `VAIN_S`, is given up; seconds more before each start."""

TAIL_LINES, ERROR_BYTES = 15, 2048

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(slots=True)
class _Node:
    """A node that Ray runs, and the history of its process."""

    actor: Any
    started_s: float = 0.0
    vain: int = 0
    leave_by_s: float | None = None  # set once it was asked to leave


@dataclass(slots=True, kw_only=True)
class RayRun:
    """One run in a Ray cluster.

    Args:
        engine: what to ask Ray for.
        job: the job: "module:function", or the absolute path of a file, or "file.py:function".
        words: options of `gradstream train`, and arguments of the job file after "--".
        workers: number of workers, or of parts of replicas.
        run_dir: where to put the finished run. If the first node sees the same disk, the run is there from the start.
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
        """Trains to the end. Afterwards `run_dir` holds the run, as far as it got.

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
        wanted = job_files(self.job)  # first: Ray may replace the working directory of this program
        with (
            StopSignals() as signals,
            RayCluster(self.engine.address, folder_of(self.job), self.engine.wait_s) as cluster,
        ):
            self._cluster = cluster
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
            if (self.run_dir / "nodes.json").is_file():  # possibly sealed by another user
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
        """Starts the process of a node, and its actor if it does not exist."""
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
        """Follows the run until the first node's process has ended; returns its status and its output."""
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
        for rank in late:  # Ray has not placed them yet, or they hang
            self._cluster.remove(self._nodes.pop(rank).actor)
        self._running = {call: rank for call, rank in self._running.items() if rank not in late}

    def _ended(self, rank: int, call: Any) -> tuple[int, str] | None:
        """Handles the end of a node's process: the first node's ends the run, others are restarted, or given up."""
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
            raise ConfigError(f"node {rank} cannot join; {text}")  # otherwise the first node says why
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
        """Makes the actors remove their folders, within `LEAVE_S`."""
        calls = [node.actor.clean.remote() for node in self._nodes.values()]
        give_up_s = time.monotonic() + LEAVE_S
        while calls and (left_s := give_up_s - time.monotonic()) > 0:
            for call in self._cluster.done(calls, left_s):
                calls.remove(call)

    def _check(self, status: int, said: str) -> None:
        """Raises the error with which the run ended, if it has not finished."""
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
