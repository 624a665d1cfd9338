"""Question: how fast are sums between two machines of which neither can dial the other?

Three machines (network namespaces) with cards of 100 Mbit/s, then of 1 Gbit/s. The second and the third sum 20 MB,
again and again: over TCP, over gRPC, and over gRPC where neither can be dialled, so that the first, which has the
coordinator, passes every byte on. Its card takes and gives the bytes of both directions, twice as many as each of the
others' cards: half of its rate is the bound. In plain text. Takes root, `ip` and `tc`; some two minutes.

    python bench/relayed.py
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from common import RESULTS, ROOT, command_line, keep, origin
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import GroupMembers
from gradstream.coordinator.nodes import COORDINATOR
from gradstream.coordinator.relay import Relay
from gradstream.runtime import RealRuntime
from gradstream.transport.base import Identity
from gradstream.transport.carriers import RoutedEndpoint
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from kit.machines import Machines, unavailable

ELEMS, TIMES, PORT, NET = 5_000_000, 7, 7000, "10.77.0"
NODES = (COORDINATOR, "worker-0", "worker-1")
SECRET = b"the secret of a benchmark"
RATES = {"100mbit": 1e8, "1gbit": 1e9}
WAYS = {"tcp": ("tcp", False), "grpc": ("grpc", False), "relayed": ("grpc", True)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)  # number of the node, carrier
    if role := parser.parse_args().role:
        asyncio.run(live(int(role[0]), role[1]))
        return
    if reason := unavailable():
        sys.exit(reason)
    rows: dict[str, Any] = {}
    for rate, bit_s in RATES.items():
        for way, (carrier, walled) in WAYS.items():
            with Machines(3, rate=rate) as machines, ExitStack() as walls:
                for index in (1, 2) if walled else ():
                    walls.enter_context(machines.wall(index))
                took_s = measured(machines, carrier)
            bound_s = (2 if walled else 1) * 32 * ELEMS / bit_s
            rows[f"{rate} {way}"] = {
                "s": round(took_s, 4),
                "bound_s": bound_s,
                "share": round(bound_s / took_s, 3),
            }
            print(f"{rate:8s} {way:8s} {took_s:6.2f} s, {bound_s / took_s:.2f} of the bound", flush=True)
    record = {"elems": ELEMS, "rows": rows, **origin()}
    keep(RESULTS / "relayed.json", record)


def measured(machines: Machines, carrier: str) -> float:
    """The median time of a sum, in seconds."""
    nodes = list[subprocess.Popen[str]]()
    try:
        for number in (0, 2, 1):  # worker-0 dials worker-1
            words = [sys.executable, __file__, "--role", str(number), carrier]
            node = machines[number].start(words, cwd=ROOT, stdout=subprocess.PIPE)
            nodes.append(node)
            assert node.stdout is not None
            node.stdout.readline()
        return float(node.stdout.readline())
    finally:
        for node in nodes:
            node.kill()
            node.wait()


async def live(number: int, carrier: str) -> None:
    """The coordinator waits; the workers sum, and worker-0 prints the median time."""
    me, runtime = NODES[number], RealRuntime(NODES[number])
    identity, host = Identity("job", me, 1, secret=SECRET), f"{NET}.{number + 1}"
    carriers: dict[str, Any] = {
        "grpc": GrpcEndpoint(identity, runtime, listen=f"{host}:{PORT}", insecure=True),
        "tcp": TcpEndpoint(identity, runtime, listen=f"{host}:{PORT + 1}", insecure=True),
    }
    endpoint = RoutedEndpoint({name: one for name, one in carriers.items() if name in ("grpc", carrier)})
    await endpoint.start()
    endpoint.members_changed(dict.fromkeys(NODES, 1))
    if me == COORDINATOR:
        Relay(runtime, endpoint, lambda event: None, silence_s=30.0)
        print("up", flush=True)
        await asyncio.Event().wait()
    await endpoint.take_detours(30.0)
    for index, node in enumerate(NODES, 1):
        offered = f"{NET}.{index}:{PORT}" + f" tcp={NET}.{index}:{PORT + 1}" * (carrier == "tcp")
        endpoint.know(node, offered)
    print("up", flush=True)
    group = await form_group(runtime, endpoint, GroupMembers(NODES[1:], number - 1, 1, 60.0), "ring")
    vector, times = group.allocate(ELEMS, torch.float32, "v"), list[float]()
    while len(times) < TIMES or me != "worker-0":
        begun = time.monotonic()
        await group.allreduce(vector.all)
        times.append(time.monotonic() - begun)
    print(statistics.median(times), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
