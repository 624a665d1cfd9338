"""Several machines on one: network namespaces with an address, a network card and a memory limit each.

    machine 0 ──eth0──┐
    machine 1 ──eth0──┤ bridge, in its own namespace
    machine 2 ──eth0──┘

They neither change nor reach the real machine's network. Each card sends and receives at `rate` at most, by
`tc tbf`. Where they are to be far apart, or to lose packets, a process (`link_relay`) is in the way of each card. They
need root, `ip` and `tc`; `unavailable` names what is missing. They go with the process that made them, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal, Self

from gradstream.errors import ConfigError, InternalError
from kit import link_relay
from kit.link_relay import RelaySettings

# ---- machines ----------------------------------------------------------------------------

GIGABIT = "1gbit"
BURST = "256kb"  # of a card: more than one packet before the kernel segments it
LATENCY = "50ms"  # of a card's queue

# Classic BPF as `tc` writes it: the number of instructions, then "code jt jf k" of each; 2 drops a packet.
DROP_IP = "4,40 0 0 12,21 0 1 2048,6 0 0 2,6 0 0 0"
DROP_DIAL = (  # IPv4 (2048), TCP (6), and of SYN (2) and ACK (16) the first alone: somebody dials
    "10,40 0 0 12,21 0 7 2048,48 0 0 23,21 0 5 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 1 2,6 0 0 2,6 0 0 0"
)

MARK = "MACHINE_NAMESPACE"
"""Variable of each program on a machine: so the warden finds it before it has entered its namespace, too.

It does not begin with GRADSTREAM_: those are options of the command.
"""

WARDEN = f"""
cat > /dev/null  # until the process that holds the other end of the pipe is gone
for _ in $(seq 100); do
    pids=$(grep -lsz "^{MARK}=$0" /proc/[0-9]*/environ | cut -d / -f 3)
    [ "$pids" ] || break
    kill -9 $pids
    sleep 0.05
done
for space in $(ip netns list | cut -d ' ' -f 1 | grep "^$0"); do
    for pid in $(ip netns pids $space); do kill -9 $pid; done
    ip netns del $space
done
"""

CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),  # version 2
)


def unavailable() -> str:
    """The reason why machines cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program!r} (package iproute2)"
    name = f"gs{os.getpid()}-try"
    try:
        with _alone():
            _ip("netns", "add", name)
            try:
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
                _ip("-n", name, "link", "add", "br0", "type", "bridge")
                _limit(name, "eth0", GIGABIT)
            finally:
                _ip("netns", "del", name)
    except ConfigError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """Locks out other processes that make namespaces, since `ip` mounts them and walks through all."""
    with open("/run/gradstream-machines.lock", "w", encoding="utf-8") as lock:  # root alone can write there
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Machine:
    """One machine.

    Attributes:
        name: "a", "b", ...
        address: its IP address on the bridge.
        memory_limited: whether the memory limit holds for its processes; False if cgroups are read-only.
    """

    def __init__(self, name: str, address: str, namespace: str, group: Path | None) -> None:
        self.name = name
        self.address = address
        self.memory_limited = group is not None
        self._namespace = namespace
        self._group = group

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a program on this machine, and returns the program's process."""
        command = ["ip", "netns", "exec", self._namespace, *argv]
        if self._group is not None:
            into = 'echo $$ > "$1" && shift && exec "$@"'
            command = ["sh", "-c", into, "sh", str(self._group / "cgroup.procs"), *command]
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {}), MARK: self._namespace},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def pids(self) -> list[int]:
        """Numbers of the processes of this machine."""
        return [int(pid) for pid in _ip("netns", "pids", self._namespace).split()]

    def kill(self) -> int:
        """Kills every process of this machine with SIGKILL; returns their number."""
        return self.signal(signal.SIGKILL)

    def signal(self, number: int) -> int:
        """Sends a signal to every process of this machine; returns their number."""
        pids = self.pids()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return len(pids)

    def peak_memory_bytes(self) -> int | None:
        """Peak memory of its processes together, page cache included; None if unknown."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self._group is not None and (self._group / name).is_file():
                return int((self._group / name).read_text())
        return None


class NetworkCut:
    """Drops the packets of one direction without an error. A context manager.

    It drops only IPv4: neighbours go on finding each other's hardware addresses, as beyond a router.

    Args:
        switch: namespace of the bridge.
        port: port of the bridge to which the machine is connected.
        hook: "ingress" for packets from the machine, "egress" for packets to it.
        bytecode: decides which packets are dropped.

    Attributes:
        num_dropped: number of dropped packets, once the context has ended.
    """

    def __init__(
        self, switch: str, port: str, hook: Literal["ingress", "egress"], bytecode: str = DROP_IP
    ) -> None:
        self.num_dropped = 0
        self._switch = switch
        self._port = port
        self._hook = hook
        self._filter = ("bpf", "da", "bytecode", bytecode)

    def __enter__(self) -> Self:
        if "clsact" not in self._count():
            _run("tc", "-n", self._switch, "qdisc", "add", "dev", self._port, "clsact")
        self.num_dropped = -self._dropped()
        _run("tc", "-n", self._switch, "filter", "add", "dev", self._port, self._hook, *self._filter)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _run("tc", "-n", self._switch, "filter", "del", "dev", self._port, self._hook)
        self.num_dropped += self._dropped()
        if kind is None and not self.num_dropped:
            raise AssertionError(
                f"no packet was dropped at {self._port} {self._hook}, so the test has not cut the connection"
            )

    def _count(self) -> str:
        return _run("tc", "-n", self._switch, "-s", "qdisc", "show", "dev", self._port)

    def _dropped(self) -> int:
        """Number of dropped packets at both hooks, only one of which is in use."""
        found = re.search(r"qdisc clsact.*?dropped (\d+)", self._count(), re.DOTALL)
        assert found is not None
        return int(found[1])


class Machines:
    """Machines that exist inside the context. At its end, they and their processes are removed.

    Args:
        count: number of machines, 1 to 250.
        rate: rate of each card in each direction, as `tc` writes it.
        memory_bytes: memory limit of each machine.
        latency_s: seconds that a packet takes from one machine to another, besides the time of sending it.
        loss: probability that a packet from one machine to another is lost. All packets are then small ones, of which
            the relay carries some 10,000 a second.

    Attributes:
        num_carried, num_lost: packets of the relay, once the context has ended.

    Raises:
        ConfigError: they cannot be made; `unavailable` gives the reason beforehand.
    """

    def __init__(
        self,
        count: int,
        *,
        rate: str = GIGABIT,
        memory_bytes: int = 6 << 30,
        latency_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        self.machines: list[Machine] = []
        self.num_carried = self.num_lost = 0
        links = [[f"near{index}", f"far{index}"] for index in range(count)] if latency_s or loss else []
        self._relay = RelaySettings(
            links=links, delay_s=latency_s / 2, loss=loss
        )  # a packet passes two links
        self._count = count
        self._rate = rate
        self._memory_bytes = memory_bytes
        self._prefix = f"gs{os.getpid()}-"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            with _alone():
                _sweep()
                self._start_warden()
                switch = self._namespace("switch")
                _ip("-n", switch, "link", "add", "br0", "type", "bridge")
                _ip("-n", switch, "link", "set", "br0", "up")
                for index in range(self._count):
                    self.machines.append(self._machine(switch, index))
                if self._relay.links:
                    self._start_relay(switch)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Machine:
        return self.machines[index]

    def cut(self, index: int, direction: Literal["from", "to"]) -> NetworkCut:
        """Drops all packets from a machine, or all to it, inside the context."""
        return NetworkCut(
            f"{self._prefix}switch", f"port{index}", "ingress" if direction == "from" else "egress"
        )

    def wall(self, index: int) -> NetworkCut:
        """Lets nobody dial a machine inside the context, as a router (NAT) does. The machine itself can dial others."""
        return NetworkCut(f"{self._prefix}switch", f"port{index}", "egress", DROP_DIAL)

    def _namespace(self, name: str) -> str:
        full = self._prefix + name
        _ip("netns", "add", full)
        self._stack.callback(_remove, full)
        return full

    def _machine(self, switch: str, index: int) -> Machine:
        name, address = chr(ord("a") + index) if index < 26 else f"m{index}", f"10.77.0.{index + 1}"
        group = self._cgroup(name)
        space, port = self._namespace(name), f"port{index}"
        if self._relay.links:
            near, far = self._relay.links[index]
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", near, "netns", switch)
            _ip("link", "add", far, "netns", switch, "type", "veth", "peer", "name", port, "netns", switch)
            for device in (near, far):
                _ip("-n", switch, "link", "set", device, "up")
            if self._relay.loss:
                _ip("-n", space, "link", "set", "eth0", "gso_max_segs", "1")
        else:
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        _limit(space, "eth0", self._rate)
        _limit(switch, port, self._rate)
        return Machine(name, address, space, group)

    def _start_warden(self) -> None:
        """Starts a process that removes the namespaces when this one was killed."""
        warden = subprocess.Popen(
            ["sh", "-c", WARDEN, self._prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._stack.callback(warden.communicate)

    def _start_relay(self, switch: str) -> None:
        """Starts the relay in the bridge's namespace, with which it ends."""
        script, said = link_relay.__file__, json.dumps(asdict(self._relay))
        process = subprocess.Popen(
            ["ip", "netns", "exec", switch, sys.executable, "-P", script, said],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self._end_relay, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise InternalError(f"the relay of the links ended with {process.wait()}")

    def _end_relay(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        said, _ = process.communicate(timeout=20)
        if process.returncode == 0:
            counted = json.loads(said)
            self.num_carried, self.num_lost = counted["carried"], counted["lost"]

    def _cgroup(self, name: str) -> Path | None:
        """A cgroup with the memory limit; None if none can be made."""
        for root, limit in CGROUPS:
            group = root / (self._prefix + name)
            try:
                if not (root / "cgroup.procs").is_file():
                    continue
                group.mkdir()
                self._stack.callback(_remove_group, group)
                (group / limit).write_text(str(self._memory_bytes))
            except OSError:
                continue
            return group
        return None


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _limit(namespace: str, device: str, rate: str) -> None:
    shape = ("rate", rate, "burst", BURST, "latency", LATENCY)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove(namespace: str) -> None:
    """Kills the processes of a namespace and removes it, if it is still there."""
    for _ in range(3):  # a process may have forked just before its death
        pids = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False, timeout=20
        )
        if not pids.stdout.strip():
            break
        for pid in pids.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=20)


def _remove_group(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # killed processes are in it until they have been waited for
            _nap()
        else:
            return


def _nap() -> None:
    subprocess.run(["sleep", "0.05"], check=False)


def _sweep() -> None:
    """Removes what a killed process has left, and its warden has not removed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False, timeout=20)
    for found in re.finditer(r"^(gs(\d+)-\w+)", listed.stdout, re.MULTILINE):
        if not Path(f"/proc/{found[2]}").exists():
            _remove(found[1])
    for root, _ in CGROUPS:
        for group in root.glob("gs*-*"):
            owner = re.match(r"gs(\d+)-", group.name)
            if owner and not Path(f"/proc/{owner[1]}").exists():
                _remove_group(group)


# ---- quota -------------------------------------------------------------------------------
# Limits processes to a part of a core, by a cgroup: for tests and measurements of uneven machines.

PERIOD_US = 10_000
"""Period of the quota, in µs: short, so that it slows down every computation of a process."""


def _root() -> tuple[Path, bool] | None:
    """The folder of cgroups, and whether they are of version 1; None if none can limit CPU time."""
    first = Path("/sys/fs/cgroup/cpu")
    if (first / "cgroup.procs").is_file():
        return first, True
    second = Path("/sys/fs/cgroup")
    control = second / "cgroup.subtree_control"
    return (second, False) if control.is_file() and "cpu" in control.read_text().split() else None


def no_quota() -> str:
    """The reason why `CpuQuota` does not work on this machine; "" if it does."""
    root = _root()
    if root is None:
        return "no cgroups that limit CPU time"
    if not os.access(root[0], os.W_OK):
        return f"{root[0]} is not writable: needs root"
    try:
        with CpuQuota(0.5):
            return ""
    except OSError as error:
        return f"no cgroup can be made: {error}"


class CpuQuota:
    """Limits the CPU time of the processes that `put` adds, together. A context manager.

    Args:
        cores: the limit: 0.5 is half a core; at least 0.1.

    Raises:
        OSError: cgroups cannot be written, see `no_quota`; or `cores` is less than Linux allows.
    """

    def __init__(self, cores: float) -> None:
        found = _root()
        if found is None:
            raise OSError(no_quota())
        self._root, first = found
        self._group = self._root / f"gradstream-{secrets.token_hex(4)}"
        self._group.mkdir()
        quota_us = round(cores * PERIOD_US)
        try:
            if first:
                (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (self._group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError:
            self._group.rmdir()
            raise

    def put(self, pid: int) -> None:
        """Slows a process down, with all of its threads, until the context ends."""
        (self._group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> CpuQuota:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in (self._group / "cgroup.procs").read_text().split():
            try:
                (self._root / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        self._group.rmdir()
