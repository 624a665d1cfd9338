"""Starts Python processes of the tests by a fork: to import torch anew takes 2 s of processor time each.

`warm` puts a `Starter` where the module `subprocess` starts processes. The starter asks a warm process, which
has imported torch and gradstream, to fork; all other commands are started as ever. A forked process

- is a child of the process that called `subprocess`, with its own process id, pipes, folder and environment;
- runs the command as `__main__`, and ends as Python ends;
- is in the network namespace and the cgroup in which `kit.machines` starts it;
- has a warm process of its own, so that the forkserver of a run is forked as well.

It differs from a new one in this: its modules are loaded already, its hash seed is the warm process's, and
/proc shows the command line and the environment of the warm process. Tests that look at one of these, or at
what an import does, have the marker `cold`. `pytest --cold` starts every process anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import itertools
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "VECLIB_", "MALLOC_", "KMP_", "GOMP_")
"""Beginnings of the names of variables that Python, libc or torch read once, when they are loaded."""
APPLIED = ("PYTHONPATH",)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNET = 0x40000000
MOST_BYTES = 1 << 17
FLAGS = ("-u", "-P")
MOST_KEPT = 4
"""File descriptors that a command may keep besides the first three."""
FORKSERVER = "gradstream.run.local.forkserver"
COMMON = (
    "gradstream.run.placement", "gradstream.run.remote.join_service", "gradstream.cli.options",
    "gradstream.cli.commands.jobs", "gradstream.session.joining", "gradstream.session.loaders",
    "gradstream.strategies.allreduce", "gradstream.strategies.downpour", "gradstream.strategies.synchronous",
    "gradstream.trackers.tensorboard", "torch.utils.data",
)  # fmt: skip
"""What many programs of the tests import, besides what a forkserver does. The first optimizer imports torch._dynamo."""

Order = dict[str, Any]


def libc(function: str, *arguments: int) -> None:
    """Calls a function of libc that returns 0 where all is well."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}{arguments}")


def on_machine(args: list[str]) -> tuple[list[str], dict[str, str]]:
    """A command of `kit.machines` without its beginning, and where it is to run."""
    machine: dict[str, str] = {}
    if args[:2] == ["sh", "-c"] and len(args) > 5 and args[4].endswith("/cgroup.procs"):
        machine["group"], args = args[4], args[5:]
    if args[:3] == ["ip", "netns", "exec"] and len(args) > 4:
        machine["namespace"], args = args[3], args[4:]
    return args, machine


class Starter:
    """Stands for `subprocess._fork_exec`: has a warm process fork what can be forked.

    Attributes:
        enabled: False where every command is to be started anew.
    """

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self.enabled = True
        self._connection = connection
        self._environment = environment
        self._anew: Callable[..., int] = getattr(subprocess, "_fork_exec")  # noqa: B009  # mypy knows it not
        self._lock = threading.Lock()

    def __call__(self, args: Sequence[Any], *rest: Any) -> int:
        """Starts a process and returns its id; takes what `subprocess` gives to `_fork_exec`."""
        order = self._order([os.fsdecode(arg) for arg in args], *rest) if self.enabled else None
        said = json.dumps(order).encode()
        if order is None or len(said) > MOST_BYTES:
            return self._anew(args, *rest)
        return self._fork(said, rest, order["keep"])

    def _order(
        self,
        args: list[str],
        executables: Any,
        close_fds: bool,
        keep: tuple[int, ...],
        cwd: Any,
        env: list[bytes] | None,
        *rest: Any,
    ) -> Order | None:
        """What the warm process has to know; None where it cannot start this command."""
        *fds, restore, new_session, group, gid, groups, uid, umask, prepare = rest[:16]
        args, machine = on_machine(args)
        flags = list(itertools.takewhile(FLAGS.__contains__, args[1:]))
        args = [args[0], *args[1 + len(flags) :]]
        environment = dict(os.environ)
        if env is not None:
            pairs = (os.fsdecode(pair).partition("=") for pair in env)
            environment = {name: value for name, _, value in pairs}
        if not (
            args[0] == sys.executable
            and len(args) > 1
            and (args[1] in ("-c", "-m") or args[1].endswith(".py"))
            and close_fds
            and restore
            and fds[7] in keep  # the pipe for errors of exec()
            and len(keep) <= 1 + MOST_KEPT
            and [group, gid, groups, uid, umask, prepare] == [-1, None, None, None, -1, None]
            and (cwd is None or os.path.isdir(cwd))
            and all(environment.get(name) == self._environment.get(name) for name in THREADS)
            and all(
                self._environment.get(name) == value
                for name, value in environment.items()
                if name.startswith(AT_START) and name not in APPLIED
            )
        ):
            return None
        limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        return {
            "argv": args[1:],
            "flags": flags,
            "keep": [fd for fd in keep if fd != fds[7]],
            "machine": machine,
            "cwd": os.fsdecode(cwd or os.getcwd()),
            "environment": environment,
            "new_session": bool(new_session),
            "limits": [(limit, resource.getrlimit(limit)) for limit in limits],
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def _fork(self, order: bytes, rest: tuple[Any, ...], keep: list[int]) -> int:
        p2cread, _, _, c2pwrite, _, errwrite = rest[5:11]
        fds = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        fds += keep
        with self._lock:
            # The process that forks it ends at once, and it becomes a child of this one.
            libc("prctl", PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [order], fds)
                pid = self._connection.recv(64)
            except ConnectionError:
                pid = b""
            finally:
                libc("prctl", PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise RuntimeError("the warm process of the tests has ended: see what it has printed; try --cold")
        return int(pid)


@contextmanager
def warm() -> Iterator[Starter]:
    """Has `subprocess` fork its Python processes from a warm one, which ends with the context."""
    from gradstream.run.local.environment import node_environment

    environment = {**os.environ, **node_environment(2, shards=True)}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        code += f"import warm_start; warm_start.main({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    starter = Starter(ours, environment)
    setattr(subprocess, "_fork_exec", starter)  # noqa: B010  # mypy knows it not
    try:
        yield starter
    finally:
        setattr(subprocess, "_fork_exec", starter._anew)  # noqa: B010
        ours.close()
        process.wait()


# ---- the warm process -------------------------------------------------------------------


def main(fd: int) -> None:
    """Loads modules, then forks for each order; returns in the processes that have run a command."""
    forkserver, cluster = map(importlib.import_module, (FORKSERVER, "gradstream.run.local.cluster"))
    compiled = ["gradstream.sparse.sweep"] if importlib.util.find_spec("numba") else []
    for name in (*forkserver.WARM, *cluster.OF_SERVERS, *cluster.OF_PARTS, *COMMON, *compiled):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()
    sys.path.remove(str(Path(__file__).parent))
    connection: socket.socket | None = socket.socket(fileno=fd)
    environment = dict(os.environ)
    while connection is not None:
        order = next_order(connection)
        connection = begin(order, environment)
    run(order["argv"], safe_path="-P" in order["flags"])


def next_order(connection: socket.socket) -> Order:
    """Forks for each order. Returns in the new processes only, each with its order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these are for the programs
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 3 + MOST_KEPT)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.read(wait, 1)  # a program may look at once who its parent is
                order = dict(json.loads(data))
                connection.detach()
                take(fds, [0, 1, 2, *order["keep"]])
                return order
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        os.write(go, b"!")
        connection.send(os.read(read, 64))
        for each in (*fds, read, write, wait, go):
            os.close(each)


def take(fds: list[int], numbers: list[int]) -> None:
    """Gives file descriptors their numbers, and closes all others."""
    beyond = 1 + max(*fds, *numbers)  # a test that has many files open gives high numbers
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, beyond) for fd in fds]
    os.closerange(0, beyond)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
    for fd in above:
        os.close(fd)


def begin(order: Order, environment: dict[str, str]) -> socket.socket | None:
    """Makes this process the one that was ordered, and returns None.

    Also forks a warm process for it: in that one a connection is returned, to where its orders come from.
    """
    if order["new_session"]:
        os.setsid()
    if "group" in order["machine"]:
        Path(order["machine"]["group"]).write_text(str(os.getpid()))
    if "namespace" in order["machine"]:
        with open(f"/run/netns/{order['machine']['namespace']}") as namespace:
            libc("setns", namespace.fileno(), CLONE_NEWNET)
    os.chdir(order["cwd"])
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [entry for entry in order["environment"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = own + [entry for entry in sys.path if entry and entry not in inherited]
    os.environ.clear()
    os.environ.update(order["environment"])
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    for limit, values in order["limits"]:
        resource.setrlimit(limit, values)
    os.sched_setaffinity(0, order["cores"])
    importlib.import_module("numpy").random.seed()  # as Python does with its own
    if FORKSERVER not in order["argv"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.close(null)
            ours.close()
            return theirs
        theirs.close()
        setattr(subprocess, "_fork_exec", Starter(ours, dict(environment)))  # noqa: B010
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if "-u" in order["flags"]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # of this process's start
    return None


def run(argv: list[str], safe_path: bool) -> None:
    """Runs `python ARGV` in this process, up to its end; with a safe path as by -P."""
    names = sys.modules["__main__"].__dict__
    for name in set(names) - {"__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"}:
        del names[name]
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # what the interpreter calls
        return
    if argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec"), names)
        return
    sys.argv[:] = argv
    path = Path(argv[0])
    sys.path.insert(0, str(path.resolve().parent))
    names.update(__file__=argv[0], __loader__=SourceFileLoader("__main__", argv[0]))
    exec(compile(path.read_bytes(), argv[0], "exec"), names)
