"""Question: what bounds one stream over a link of 1 Gbit/s and 100 ms there and back, and what lifts the bound?

    python bench/long_link.py    # about three minutes; takes root, `ip` and `tc`

Two machines (network namespaces). One sends chunks of 1 MiB to the other: by one socket without any of ours, by the
carrier `tcp` over 1, 2, 4 and 8 connections, and by gRPC in plain text over 1, 4 and 8, always in eight streams. Then
both sum a vector of 128 MiB as a group of two, again and again, over 1, 2, 4 and 8 connections of `tcp`: each sends
as many bytes as the vector has. The first seconds, in which TCP finds the rate, do not count. The bound is the rate of
the card. Figures go to bench/results/long-link.json.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, ROOT, command_line, keep, now
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import GroupMembers
from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.local.environment import node_environment
from gradstream.runtime import RealRuntime
from gradstream.transport.base import Identity, Stream
from gradstream.transport.carriers import RoutedEndpoint, make_endpoint
from gradstream.transport.limits import METHODS, Method
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from kit.machines import Machines, unavailable

ROUND_TRIP_S = 0.1
RATE_BIT_S = 1e9
WARM_S, COUNTED_S = 4.0, 6.0
MIB = 1 << 20
SECRET = b"the secret of a benchmark"
GROUP_ELEMS, PORT = 32 << 20, 7000  # a machine of its own has all its ports free
ROWS = (
    ("socket", 1),
    *(("tcp", n) for n in (1, 2, 4, 8)),
    *(("grpc", n) for n in (1, 4, 8)),
    *(("group", n) for n in (1, 2, 4, 8)),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--role", nargs=4, help=argparse.SUPPRESS
    )  # send or take, carrier, connections, address
    parser.add_argument("--only", nargs="+", help="measure rows of these carriers; records nothing")
    given = parser.parse_args()
    if given.role:
        role, carrier, count, address = given.role
        if carrier == "socket":
            bare_send(address) if role == "send" else bare_take(address)
        elif carrier == "group":
            asyncio.run(reduce(role, int(count), address))
        else:
            asyncio.run((send if role == "send" else take)(carrier, int(count), address))
        return
    if reason := unavailable():
        sys.exit(reason)
    rows = [row for row in ROWS if row[0] in given.only] if given.only else ROWS
    figures: dict[str, Any] = {"round_trip_s": ROUND_TRIP_S, "rate_mbit_s": RATE_BIT_S / 1e6, "mbit_s": {}}
    with Machines(2, rate="1gbit", latency_s=ROUND_TRIP_S / 2) as machines:
        for carrier, count in rows:
            figures["mbit_s"][f"{carrier} {count}"] = rate = measured(machines, carrier, count)
            print(
                f"{carrier:6s} {count} connection(s): {rate:6.0f} Mbit/s, {rate * 1e6 / RATE_BIT_S:.2f} of the card"
            )
    if given.only:
        return
    for name in ("net/ipv4/tcp_wmem", "net/ipv4/tcp_rmem", "net/ipv4/tcp_congestion_control"):
        figures[name] = Path("/proc/sys", name).read_text().split()
    figures |= {"date": now(), "commit": git_commit(ROOT), **describe_machine(node_environment(2))}
    keep(RESULTS / "long-link.json", figures)


def measured(machines: Machines, carrier: str, count: int) -> float:
    """Mbit/s from the second machine to the first."""
    processes, host = list[subprocess.Popen[str]](), machines[0].address

    def start(index: int, role: str, address: str) -> subprocess.Popen[str]:
        words = [sys.executable, __file__, "--role", role, carrier, str(count), address]
        process = machines[index].start(words, cwd=ROOT, stdout=subprocess.PIPE)
        processes.append(process)
        return process

    try:
        taking = start(0, "take", f"{host}:0")
        assert taking.stdout is not None
        start(1, "send", taking.stdout.readline().strip())
        return float(taking.stdout.readline())
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Counter:
    """Counts bytes, and prints the rate after the seconds that do not count."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._begun_s = self._begun_bytes = 0.0

    def add(self, num_bytes: int) -> None:
        """Notes bytes that have arrived; the first ones start the clock."""
        if not self.num_bytes:
            threading.Timer(WARM_S, self._begin).start()
            threading.Timer(WARM_S + COUNTED_S, self._end).start()
        self.num_bytes += num_bytes

    def _begin(self) -> None:
        self._begun_s, self._begun_bytes = time.monotonic(), self.num_bytes

    def _end(self) -> None:
        rate = 8e-6 * (self.num_bytes - self._begun_bytes) / (time.monotonic() - self._begun_s)
        print(f"{rate:.1f}", flush=True)


def bare_take(address: str) -> None:
    with socket.create_server((address.rpartition(":")[0], 0)) as listener:
        print("{}:{}".format(*listener.getsockname()), flush=True)
        connected, _ = listener.accept()
        counter, room = Counter(), bytearray(MIB)
        while got := connected.recv_into(room):
            counter.add(got)


def bare_send(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connected:
        while True:
            connected.sendall(bytes(MIB))


def endpoint(name: str, carrier: str, count: int, listen: str) -> RoutedEndpoint:
    identity = Identity("job", name, 1, secret=SECRET)
    chosen: Any = carrier
    made = make_endpoint(identity, RealRuntime(name), chosen, listen=listen, insecure=True, connections=count)
    for one in made._carriers.values():
        one.methods = {**METHODS, "flood": Method(callers=frozenset({"near"}), members=False, chunks=True)}
    return made


async def take(carrier: str, count: int, address: str) -> None:
    counter = Counter()

    async def flood(stream: Stream) -> None:
        while (received := await stream.recv()) is not None:
            if received.payload is not None:
                counter.add(received.payload.numel() * 4)

    taking = endpoint("far", carrier, count, address)
    taking.serve("flood", flood, model=False)
    await taking.start()
    print(taking.address, flush=True)
    await asyncio.Event().wait()


async def send(carrier: str, count: int, address: str) -> None:
    own = socket.gethostbyname(address.split(":")[0]).rpartition(".")[0] + ".2:0"
    sending = endpoint("near", carrier, count, own)
    await sending.start()
    sending.know("far", address)

    async def flood() -> None:
        stream, payload = await sending.open("far", "flood", v1.Body()), torch.zeros(MIB // 4)
        while True:
            await stream.send(v1.Frame(chunk=v1.Chunk(elems=MIB // 4, dtype=v1.FLOAT32)), payload)

    await asyncio.gather(*(flood() for _ in range(8)))  # streams take their connections in turn


async def reduce(role: str, count: int, address: str) -> None:
    """Sums a vector with the other machine, as rank 0 if `role` is to send."""
    net, addresses = address.rpartition(".")[0], {}
    for number, name in enumerate(("far", "near"), 1):
        addresses[name] = f"{net}.{number}:{PORT}"
    name = "near" if role == "send" else "far"
    identity, runtime = Identity("job", name, 1, secret=SECRET), RealRuntime(name)
    own = TcpEndpoint(identity, runtime, listen=addresses[name], insecure=True, connections=count)
    await own.start()
    for other, where in addresses.items():
        own.know(other, where)
    if role == "take":
        print(addresses["far"], flush=True)
    members = GroupMembers(["near", "far"], int(role == "take"), 1)  # the lower rank dials
    group = await form_group(runtime, own, members, "ring")
    vector = group.allocate(GROUP_ELEMS, torch.float32, "v")
    ends = [time.monotonic()]
    while True:
        await group.allreduce(vector.all)
        ends.append(time.monotonic())
        begun = next((at for at in ends if at > ends[0] + WARM_S), ends[-1])
        if role == "take" and ends[-1] >= begun + COUNTED_S:
            counted = len(ends) - 1 - ends.index(begun)
            print(f"{8e-6 * counted * vector.tensor.nbytes / (ends[-1] - begun):.1f}", flush=True)


if __name__ == "__main__":
    main()
