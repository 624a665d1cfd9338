"""A warm process from which nodes are forked.

    python -P -m gradstream.run.local.forkserver REPLIES [--control PATH] [module ...]

Importing torch takes seconds, and nine processes that do it at once take nine times as long;
forked from a process that has done it, they start in 0.05 s. The modules imported here start no threads. gRPC
starts its threads with its first connection, so only the children make one.

One JSON object per line. In:  {"start": name, "main": "module:function", "argv": [...], "log": path}
                          and  {"signal": name, "number": 9}
                          and  {"close": true}: kill all nodes, and end
Out, to the file descriptor REPLIES:
     {"ready": pid}, {"started": name, "pid": n}, {"exited": name, "status": code or -signal, "at_ns": monotonic,
     "cause": why signal 9 killed it; "" if unknown}, and
each message of a node to its launcher, with {"from": name} added. The forkserver imports the modules of its
command line, besides `WARM`, before it forks.

Without a control pipe, no process outlives the launcher: when its end of the pipe closes, even by SIGKILL, this process
kills all nodes. With a control pipe (see `link.py`), which is then its standard input, nodes go on without a launcher,
and this process ends with the last of them. Nodes import the user's modules from FOLDER, and nothing from the folder
in which the command was typed. Another launcher connects with

    {"keep": {...}}       what a successor has to know
    {"enter": path}       a named pipe for the replies; they begin with {"kept": {...}, "pid": n}, each node's
                          messages since it was started, those of running nodes first, and {"entered": true}

In either case the kernel kills the nodes if this process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import io
import json
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gradstream.machine.resources import MemoryKills
from gradstream.run.local.environment import sigterm_of_nodes
from gradstream.run.local.link import open_writer
from gradstream.untrusted import escaped

if TYPE_CHECKING:
    from typing_extensions import Buffer


# ---- node log ----------------------------------------------------------------------------
# Writes the output of a node to its log file; a full disk loses some of it, but does not end the node.

WARNING_BYTES = 2048
"""Longest warning that the launcher shows."""


def show_warnings(node: str, say: Callable[..., None]) -> None:
    """Makes the launcher show the warnings of this process, each distinct warning once; the log gets all of them.

    Args:
        say: sends a message to the launcher.
    """
    logged, shown = warnings.showwarning, set()

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        logged(message, category, *where, **options)
        text = escaped(str(message), WARNING_BYTES, newlines=True)
        if (category, text) not in shown:
            shown.add((category, text))
            say(output=f"{node}: {category.__name__}: {text}\n")

    warnings.showwarning = show


class _Lossy(io.RawIOBase):
    """Writes to a file descriptor, and counts the bytes that a full disk loses; later it writes their number."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost_bytes = 0
        self._error = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._lost_bytes:
                text = f"\n[{self._lost_bytes} bytes of this log are lost: {self._error}]\n"
                os.write(self._descriptor, text.encode())
                self._lost_bytes = 0
            return os.write(self._descriptor, view)
        except OSError as error:
            self._lost_bytes += len(view)
            self._error = errno.errorcode.get(error.errno or 0, str(error))
            return len(view)


def log_stream(descriptor: int, *, by_line: bool) -> TextIO:
    """A text stream to a log file, for `sys.stdout` and `sys.stderr`: it raises no error of the disk.

    Args:
        descriptor: file descriptor; it stays open.
        by_line: whether each line is written at once, as by `sys.stderr`.
    """
    buffer = io.BufferedWriter(_Lossy(descriptor))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=by_line)


# ---- forkserver --------------------------------------------------------------------------

# Modules that a node needs and that may be imported before a fork.
WARM = (
    "numpy",
    "torch",
    "safetensors.numpy",
    "gradstream.data",
    "gradstream.run.node",
    "gradstream.worker.group.exchange",
    "gradstream.worker.pairs.exchange",
    "gradstream.worker.shared.exchange",
    "gradstream.run.launcher",
    "gradstream.transport.carriers",
)

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NOT_CALLED = 70  # exit status of a node whose main function could not be called

OF_LAUNCHER = "its launcher ended it, since the others could not wait for it"

ORDER_BYTES = 1 << 20
"""Longest order."""

MESSAGES = 64
"""Messages of a node that are kept for another launcher. Few of a node's messages matter: its address, its error."""


@dataclass(slots=True)
class _Child:
    name: str
    pid: int
    pipe: int  # read end of the pipe for its messages
    unread: bytes = b""  # beginning of a message
    struck: bool = False  # whether the launcher had it killed


class _Server:
    """The parent of all nodes. It has a single thread, since it forks.

    Args:
        orders: file descriptor that orders are read from.
        replies: file descriptor that replies are written to.
        control: the named pipe that `orders` reads, by which another launcher may connect; None if all nodes end
            with the launcher.
    """

    def __init__(self, orders: int, replies: int, control: Path | None = None) -> None:
        self._orders = orders
        self._replies = replies  # -1 without a launcher
        self._control = control
        self._own_end = -1  # of the control pipe, without a launcher: it keeps the pipe from reaching its end
        self._history = History()
        self._closing = False
        self._pending = b""
        self._children: dict[int, _Child] = {}
        self._memory_kills = MemoryKills()
        self._selector = selectors.DefaultSelector()
        self._wakeup, write_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only has to wake up the loop
        if sigterm_of_nodes() is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Ctrl-C goes to every process of the terminal; the launcher decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Carries out orders until it is told to close, or there is nobody left to serve; then kills every child."""
        self._selector.register(self._orders, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._reply({"ready": os.getpid()})
        try:
            while not self._closing and (self._replies >= 0 or self._children):
                for key, _ in self._selector.select():
                    if key.fd == self._orders:
                        self._take_orders()
                    elif key.fd == self._wakeup:
                        os.read(self._wakeup, 4096)
                        self._bury()
                    elif isinstance(key.data, _Child):
                        self._hear(key.data)
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
            for child in self._children.values():
                os.waitpid(child.pid, 0)
            if self._control is not None:
                self._control.unlink(missing_ok=True)

    def _take_orders(self) -> None:
        data = os.read(self._orders, 1 << 16)
        if not data:
            self._lose_launcher()
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in filter(None, lines):
            try:
                self._carry_out(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                # A launcher that was killed may have left half an order.
                sys.stderr.write(f"not an order: {type(error).__name__}: {error}\n")
        if len(self._pending) > ORDER_BYTES:
            self._pending = b""

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._start(order)
        elif "signal" in order:
            self._signal(order["signal"], order["number"])
        elif "keep" in order:
            self._history.kept = dict(order["keep"])
        elif "enter" in order:
            self._meet(Path(order["enter"]))
        elif "close" in order:
            self._closing = True

    def _lose_launcher(self) -> None:
        """Handles the loss of the launcher: ends, or waits at the control pipe for another launcher."""
        self._pending = b""
        self._hang_up_replies()
        if self._control is None:
            self._closing = True
        elif self._own_end < 0:
            self._own_end = open_writer(self._control)

    def _meet(self, replies: Path) -> None:
        """Sends another launcher the kept state, and continues with it."""
        try:
            pipe = open_writer(replies)
        except OSError:
            return  # that launcher is already gone
        self._hang_up_replies()
        self._replies = pipe
        if self._own_end >= 0:
            os.close(self._own_end)
            self._own_end = -1
        running = {child.name for child in self._children.values()}
        for message in self._history.told(running):
            self._send(message)

    def _hang_up_replies(self) -> None:
        if self._replies >= 0:
            os.close(self._replies)
        self._replies = -1

    def _signal(self, name: str, number: int) -> None:
        for child in self._children.values():
            if child.name == name:
                child.struck |= number == signal.SIGKILL
                os.kill(child.pid, number)

    def _start(self, order: dict[str, Any]) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(order, parent, write_end)
        os.close(write_end)
        child = self._children[pid] = _Child(order["start"], pid, read_end)
        self._selector.register(read_end, selectors.EVENT_READ, child)
        self._reply({"started": child.name, "pid": pid})

    def _hear(self, child: _Child) -> None:
        """Passes on the messages of a child."""
        while child.pipe >= 0:
            try:
                data = os.read(child.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._hang_up(child)
            *lines, child.unread = (child.unread + data).split(b"\n")
            for line in lines:
                self._reply({"from": child.name, **json.loads(line)})

    def _hang_up(self, child: _Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        child.pipe = -1

    def _bury(self) -> None:
        """Reports children that have ended, after all their messages."""
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            del self._children[pid]
            self._hear(child)
            if child.pipe >= 0:  # a process that the node started still holds the other end
                self._hang_up(child)
            code = os.waitstatus_to_exitcode(status)
            ended: dict[str, Any] = {"exited": child.name, "status": code, "at_ns": time.monotonic_ns()}
            if code == -signal.SIGKILL:
                ended["cause"] = OF_LAUNCHER if child.struck else self._memory_kills.cause()
            self._reply(ended)

    def _reply(self, message: dict[str, Any]) -> None:
        """Sends a message to the launcher; if it is gone, another launcher gets the message later."""
        self._history.note(message)
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data and self._replies >= 0:
                data = data[os.write(self._replies, data) :]
        except BrokenPipeError:
            self._lose_launcher()


class History:
    """The state and messages kept for another launcher.

    Attributes:
        kept: the state that the launcher left for it.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self._of_nodes: dict[str, list[dict[str, Any]]] = {}

    def note(self, message: dict[str, Any]) -> None:
        """Keeps a message, unless it was only meant to be shown."""
        name = message.get("started") or message.get("from") or message.get("exited")
        if name is None or "output" in message or "printed" in message:
            return
        said = self._of_nodes.setdefault(name, [])
        if "started" in message:
            said.clear()
        if len(said) < MESSAGES or "exited" in message:
            said.append(message)

    def told(self, running: set[str]) -> list[dict[str, Any]]:
        """The messages for another launcher, in their order."""
        names = sorted(self._of_nodes, key=lambda name: name not in running)
        said = [message for name in names for message in self._of_nodes[name]]
        return [{"kept": self.kept, "pid": os.getpid()}, *said, {"entered": True}]


def _become(order: dict[str, Any], parent: int, report: int) -> None:
    """Turns a fresh fork into a node. Never returns."""
    status = NOT_CALLED
    try:
        die_with_parent(parent)
        _rename(order["start"])
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, sigterm_of_nodes())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null, log = os.open(os.devnull, os.O_RDONLY), _open_log(order["log"])
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(report, 3)
        os.closerange(4, 1 << 16)
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  # open until the process ends
        os.set_inheritable(3, False)
        # print() must not raise when the disk is full.
        sys.stdout, sys.stderr = log_stream(1, by_line=False), log_stream(2, by_line=True)
        sys.stderr.write(f"{order['start']}: pid {os.getpid()}\n")
        status = _call(order["main"], [*order["argv"], "--report-fd", "3"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit, which would run the parent's exit handlers.
        os._exit(status)


def _call(main: str, argv: list[str]) -> int:
    module, _, function = main.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(argv) or 0)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")  # as Python does
        return 1


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits if that has happened already.

    Without prctl (not on Linux), only closed pipes tell.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(NOT_CALLED)


def _rename(name: str) -> None:
    """Sets the name that ps and top show."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, value: Any) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (AttributeError, OSError):
        pass


def main() -> None:
    """Loads what nodes need, then forks nodes for as long as the launcher listens."""
    replies, *modules = int(sys.argv[1]), *sys.argv[2:]
    os.set_inheritable(replies, False)
    # A process inherits its signal mask, even from a program that starts runs.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
    orders = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    control = None
    if modules[:1] == ["--control"]:
        control, modules = Path(modules[1]), modules[2:]
    server = _Server(orders, replies, control)
    for name in (*WARM, *modules):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of these modules
    server.serve()
    sys.stderr.flush()
    os._exit(0)  # the launcher waits, and unloading torch would take 0.2 s


if __name__ == "__main__":
    main()
