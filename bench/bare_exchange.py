"""One machine of an exchange of plain bytes: what sockets alone take for the traffic of a training run.

Each machine has a connection to each shard on another machine. Over each of them, both sides send and
receive, all at once, as many bytes as a worker pushes and fetches there. Nothing is looked at or computed.

    python bench/bare_exchange.py PLAN      # on each machine; prints one line of JSON when all has passed

PLAN is JSON: `me`, the machine's number; `addresses`, of all machines; `shards`, on which machine each
shard is; `bytes`, that a connection carries each way.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import threading
import time
from typing import Any

from gradstream.transport.socket.tcp import choose_congestion_control

PORT = 7077  # each machine has all ports of its own
PIECE_BYTES = 256 << 10
TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", metavar="PLAN", type=json.loads)
    plan = parser.parse_args().plan
    connections = connected(plan)
    begun_s, threads = time.monotonic(), []
    for connection in connections:
        for work in (send, receive):
            threads.append(threading.Thread(target=work, args=(connection, plan["bytes"])))
            threads[-1].start()
    for thread in threads:
        thread.join()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps({"begun_s": begun_s, "ended_s": time.monotonic(), "cpu_s": used.ru_utime + used.ru_stime})
    )


def connected(plan: dict[str, Any]) -> list[socket.socket]:
    """The connections of this machine's worker, and those of the other workers to its shards."""
    me, addresses, shards = plan["me"], plan["addresses"], plan["shards"]
    listener = socket.create_server((addresses[me], PORT), backlog=64)
    listener.settimeout(TIMEOUT_S)
    made = [dial(addresses[machine]) for machine in shards if machine != me]
    made += [listener.accept()[0] for _ in range(shards.count(me) * (len(addresses) - 1))]
    for connection in made:
        connection.settimeout(TIMEOUT_S)
        choose_congestion_control(connection)
    return made


def dial(address: str) -> socket.socket:
    """A connection to a machine that may not listen yet."""
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def send(connection: socket.socket, size_bytes: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    while size_bytes:
        connection.sendall(piece[:size_bytes])
        size_bytes -= min(size_bytes, PIECE_BYTES)


def receive(connection: socket.socket, size_bytes: int) -> None:
    room = memoryview(bytearray(PIECE_BYTES))
    while size_bytes:
        taken = connection.recv_into(room[: min(size_bytes, PIECE_BYTES)])
        if not taken:
            raise ConnectionError("a connection has ended before its time")
        size_bytes -= taken


if __name__ == "__main__":
    main()
