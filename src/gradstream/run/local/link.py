"""`ForkserverLink`: a launcher's two pipes to its forkserver, a new one or one whose launcher has died."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from gradstream.errors import ConfigError, DeadlineError, InternalError
from gradstream.job.job import Job, is_script
from gradstream.run.remote.address import TOKEN

# ---- control pipe ------------------------------------------------------------------------
# A named pipe in the directory of a detached run, through which another launcher reaches the forkserver.
#
#     launcher  ── orders ──▶ .control ──▶ forkserver       the first launcher, and each later one
#     launcher  ◀── replies ─ pipe ──── forkserver         anonymous for the first; a later one makes .replies-<pid>
#
# Only its user can open it. Opening it for writing shows whether a forkserver reads it, so a pipe that a killed
# forkserver left behind misleads nobody. Nothing listens on a socket.

CONTROL = ".control"


def make_pipe(path: Path) -> None:
    """Makes a named pipe for this user alone; removes a left-over pipe first.

    Raises:
        ConfigError: the file system has no named pipes.
    """
    path.unlink(missing_ok=True)
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}: a named pipe could not be made here ({error.strerror}), and a detached run needs it; put the run "
            "directory on another file system with run_dir=, or --run-dir, or leave out --detach"
        ) from error


def open_reader(path: Path) -> int:
    """Opens the read end, without waiting for a writer. Raises as `open_writer`."""
    return _opened(path, os.O_RDONLY)


def open_writer(path: Path) -> int:
    """Opens the write end.

    Raises:
        OSError: there is no pipe (ENOENT), or nobody reads it (ENXIO).
        ConfigError: this is no pipe of this user.
    """
    return _opened(path, os.O_WRONLY)


def has_reader(path: Path) -> bool:
    """Whether a forkserver reads the pipe. Raises ConfigError as `open_writer`."""
    try:
        os.close(open_writer(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.EACCES):
            return False
        raise
    return True


def _opened(path: Path, flag: int) -> int:
    try:
        pipe = os.open(path, flag | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a link; {_EXPECTED}") from None
    status = os.fstat(pipe)
    if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid():
        os.set_blocking(pipe, True)
        return pipe
    os.close(pipe)
    raise ConfigError(f"{path} is something else; {_EXPECTED}")


_EXPECTED = "expected a named pipe of this user, which gradstream has made: end the run's processes by hand"


# ---- link --------------------------------------------------------------------------------

OF_SERVERS = "gradstream.run.shard", "gradstream.worker.server.exchange"
"""Modules of the nodes of a run with servers."""

OF_PARTS = "gradstream.worker.parts", "gradstream.split.cut", "torch._dynamo"
OF_LOOPS = "gradstream.session", "gradstream.session.node", "torch.utils.data", "torch._dynamo"
"""Modules of the nodes of split models, and of scripts. torch imports the last of them, in 2 to 4 s, to work out
shapes, and with the first optimizer that a process makes."""

ANSWER_S = 30.0
"""Seconds that a forkserver may take to answer. It has one thread, which forks nodes and passes on messages."""


def modules_of(job: Job) -> tuple[str, ...]:
    """What the workers of a job need besides what all nodes need, and would each import by themselves."""
    return (OF_PARTS if job.split > 1 else ()) + (OF_LOOPS if is_script(job) else ())


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Python process that finds this package: our own, with these values of some variables.

    Without the token of runs on several machines: this process has it, and no other process needs it.
    """
    source = str(Path(__file__).resolve().parents[3])  # the folder of the package
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
    return {**inherited, **environment, "PYTHONPATH": path}


def there(cwd: str | None) -> str | None:
    """The working directory for a process; None, for that of this process, if it no longer exists."""
    return cwd if cwd and os.path.isdir(cwd) else None


@dataclass(eq=False)
class ForkserverLink:
    """The pipes to a forkserver.

    Args:
        orders, replies: JSON lines; see `forkserver`.
        pid: the forkserver's process id, for as long as `replies` is not at its end.
        process: the forkserver, if this process started it.
        kept: the state that the previous launcher left; {} if this one started the forkserver.
    """

    orders: BinaryIO
    replies: BinaryIO
    pid: int
    process: subprocess.Popen[bytes] | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def started(
        cls,
        log: Path,
        environment: Mapping[str, str],
        *,
        shards: bool,
        modules: Sequence[str] = (),
        cwd: str | None = None,
        control: Path | None = None,
    ) -> ForkserverLink:
        """Starts a forkserver.

        Args:
            log: file for its output.
            environment: environment variables of the nodes.
            shards: whether it imports the code of servers before it forks nodes.
            modules: what else it imports before; see `modules_of`.
            cwd: working directory of the nodes; None, or a missing directory, means that of this process.
            control: where another launcher may connect later; None if the nodes end with this one.

        Raises:
            ConfigError: the file system has no named pipes for a control pipe.
        """
        ends: tuple[int, int] | None = None
        if control is not None:
            make_pipe(control)
            ends = open_reader(control), open_writer(control)
        # Replies have a pipe of their own: the start-up output of an interpreter would look like a reply.
        replies, their_end = os.pipe()
        try:
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "gradstream.run.local.forkserver", str(their_end)),
                        *(() if control is None else ("--control", str(control))),
                        *(OF_SERVERS if shards else ()),
                        *modules,
                    ],
                    stdin=subprocess.PIPE if ends is None else ends[0],
                    stdout=output,
                    stderr=output,
                    pass_fds=[their_end],
                    cwd=there(cwd),
                    env=python_environment(environment),
                    start_new_session=True,  # Ctrl-C in the terminal signals the launcher only
                )
        except BaseException:
            os.close(replies)
            raise
        finally:
            os.close(their_end)
        orders = process.stdin
        if ends is not None:
            os.close(ends[0])
            orders = os.fdopen(ends[1], "wb", 0)
        return cls(cast("BinaryIO", orders), os.fdopen(replies, "rb"), process.pid, process)

    @classmethod
    def entered(cls, control: Path) -> ForkserverLink | None:
        """Connects a new launcher to the forkserver of a dead one. The caller already holds the launcher's lock.

        Args:
            control: the named pipe on which the forkserver takes orders.

        Returns:
            The link; None if the forkserver has ended.

        Raises:
            DeadlineError: the forkserver did not answer within `ANSWER_S`.
            ConfigError: `control` is not a named pipe, or belongs to another user.
        """
        path = control.with_name(f".replies-{os.getpid()}")
        make_pipe(path)
        try:
            replies, own_end = (
                open_reader(path),
                open_writer(path),
            )  # own_end: no end of file before it connects
            try:
                orders = os.fdopen(open_writer(control), "wb", 0)
                # Terminates an order that the previous launcher may have left unfinished.
                orders.write(b"\n" + json.dumps({"enter": str(path)}).encode() + b"\n")
                answer = select.poll()
                answer.register(replies, select.POLLIN)
                answer.register(orders, 0)  # reports it if the forkserver ends
                ready = dict(answer.poll(1000 * ANSWER_S))
                if not ready:
                    raise DeadlineError(
                        "forkserver",
                        f"did not answer within {ANSWER_S:g} s at {control}: its process is stopped",
                    )
                if replies not in ready:
                    raise OSError(errno.EPIPE, "the forkserver has ended")
            except OSError as error:
                os.close(replies)
                if error.errno in (errno.ENOENT, errno.ENXIO, errno.EPIPE):
                    return None
                raise
            finally:
                os.close(own_end)
        finally:
            path.unlink(missing_ok=True)
        file = os.fdopen(replies, "rb")
        first = json.loads(file.readline() or b"{}")
        if "pid" not in first:
            raise InternalError(f"the forkserver at {control} has ended")
        return cls(orders, file, first["pid"], kept=first["kept"])

    def order(self, **order: Any) -> None:
        """Sends an order. If the forkserver is gone, `replies` shows it."""
        data = json.dumps(order).encode() + b"\n"
        try:
            while data:
                data = data[self.orders.write(data) :]
            self.orders.flush()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """Makes the forkserver kill all nodes and end; `kill` follows if it does not. Idempotent."""
        if self.orders.closed:
            return
        self.order(close=True)
        try:
            self.orders.close()
        except BrokenPipeError:
            pass

    def kill(self) -> None:
        """Kills the forkserver; the kernel kills the nodes with it. Call only while `replies` is not at its end."""
        os.kill(self.pid, signal.SIGKILL)
