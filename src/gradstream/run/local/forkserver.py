"""A warm process from which nodes are forked.

    python -P -m gradstream.run.local.forkserver REPLIES [module ...]

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

No process outlives the launcher: when its end of the pipe closes, even by SIGKILL, this process kills all nodes. The
kernel kills them if this process is killed. Nodes import nothing from the folder in which the command was typed.
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
from typing import TYPE_CHECKING, Any, TextIO

from gradstream.machine.resources import MemoryKills
from gradstream.run.local.environment import sigterm_of_nodes
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
    """

    def __init__(self, orders: int, replies: int) -> None:
        self._orders = orders
        self._replies = replies
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
        """Carries out orders until it is told to close, or the launcher is gone; then kills every child."""
        self._selector.register(self._orders, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._reply({"ready": os.getpid()})
        try:
            while not self._closing:
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

    def _take_orders(self) -> None:
        data = os.read(self._orders, 1 << 16)
        if not data:
            self._closing = True
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in filter(None, lines):
            self._carry_out(json.loads(line))

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._start(order)
        elif "signal" in order:
            self._signal(order["signal"], order["number"])
        elif "close" in order:
            self._closing = True

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
        """Sends a message to the launcher."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._replies, data) :]
        except BrokenPipeError:
            self._closing = True


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
    server = _Server(orders, replies)
    for name in (*WARM, *modules):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of these modules
    server.serve()
    sys.stderr.flush()
    os._exit(0)  # the launcher waits, and unloading torch would take 0.2 s


if __name__ == "__main__":
    main()
