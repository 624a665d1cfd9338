"""Machines that are far apart, and lose packets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradstream.errors import ConfigError
from kit.link_relay import RelaySettings
from kit.machines import Machines, unavailable

ECHO = """
import socket
listener = socket.create_server(("0.0.0.0", 0))
print(listener.getsockname()[1], flush=True)
connected, _ = listener.accept()
while data := connected.recv(1 << 16):
    connected.sendall(data)
"""
ASK = """
import json, random, socket, sys, threading, time
connected = socket.create_connection((sys.argv[1], int(sys.argv[2])))
times = []
for _ in range(5):
    begun = time.perf_counter()
    connected.sendall(b"x")
    connected.recv(1)
    times.append(time.perf_counter() - begun)
data, came = random.Random(0).randbytes(1 << 20), bytearray()
threading.Thread(target=connected.sendall, args=(data,)).start()
while len(came) < len(data):
    came += connected.recv(1 << 16)
print(json.dumps({"rtt_s": min(times), "same": came == data}))
"""


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_packets_come_late_and_some_are_lost(loss: float, tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(2, rate="100mbit", latency_s=0.02, loss=loss) as machines:
        one, two = machines.machines
        server = two.start([sys.executable, "-c", ECHO], cwd=tmp_path, stdout=subprocess.PIPE)
        assert server.stdout is not None
        words = [sys.executable, "-c", ASK, two.address, server.stdout.readline().strip()]
        said, _ = one.start(words, cwd=tmp_path, stdout=subprocess.PIPE).communicate(timeout=60)
    found = json.loads(said)
    assert found["same"]
    assert 0.04 <= found["rtt_s"] < 0.2
    assert machines.num_carried > 50
    assert (machines.num_lost > 0) == (loss > 0)


@pytest.mark.parametrize(("delay_s", "loss"), [(-1.0, 0.0), (60.0, 0.0), (0.0, 1.0), (0.0, -0.1)])
def test_no_link_is_like_that(delay_s: float, loss: float) -> None:
    with pytest.raises(ConfigError, match="expected 0 s or more"):
        RelaySettings(links=[], delay_s=delay_s, loss=loss)


HOLD = f"""
import subprocess, sys
sys.path.append({str(Path(__file__).parents[1])!r})
from kit.machines import Machines
with Machines(2, latency_s=0.01) as machines:
    words = [*sys.argv[2:], "sh", "-c", "echo; exec sleep 1000"]
    sleeper = machines[0].start(words, cwd=sys.argv[1], stdout=subprocess.PIPE)
    sleeper.stdout.readline()
    print(sleeper.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "before", [[], ["nsenter", f"--net=/proc/{os.getpid()}/ns/net"]], ids=["inside", "outside"]
)
def test_machines_go_with_the_process_that_made_them(number: int, before: list[str], tmp_path: Path) -> None:
    """A program that is outside of the namespace stands for one that has yet to enter it."""
    if reason := unavailable():
        pytest.skip(reason)
    words = [sys.executable, "-c", HOLD, str(tmp_path), *before]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        sleeper = int(holder.stdout.readline())
        left = _namespaces(holder.pid)
        assert len(left) == 3
        holder.send_signal(number)
    deadline_s = time.monotonic() + 30
    while (left or _runs(sleeper)) and time.monotonic() < deadline_s:
        left = _namespaces(holder.pid)
    assert left == []
    assert not _runs(sleeper)


def _runs(pid: int) -> bool:
    """Whether a process is there that has not ended: a killed one may still be, for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"gs{pid}-")]
