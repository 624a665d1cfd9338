"""Question: what does a run lose to somebody who floods it, and how much memory does it lose?

Two workers train by Downpour, worker-0 honestly; what worker-1 knows is leaked to a process that floods every
method of every node with Bodies for as long as it is let, without reading anything, as

    stranger    without the run's secret, by gRPC, and by garbage on every other port
    thief       with the secret, as a worker that is no member
    member      with the secret, name and incarnation of worker-1

for `--seconds` each. Steps a second of worker-0 are compared with those while the same process only keeps a
core busy, at the same (low) priority; memory with that before.

    python studies/flood/flood.py

Goals: 32 MB more at most, 0.9 of the steps. Figures are kept with machine, commit and date in
record.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.errors import RESUMABLE, GradstreamError
from gradstream.job.files import load_job
from gradstream.runtime.real import RealRuntime
from gradstream.testing.runs import busy
from gradstream.transport.grpc.connection import METHOD
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import METHODS
from gradstream.transport.offers import CarrierOffer
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from gradstream.wire.frames import encode

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import keep, origin
from kit.insider import Insider, Leak

BODY_BYTES = 1 << 20
NICE = 10
SETTLE_S = 5.0
KINDS = ("spin", "stranger", "thief", "member")


def job(leak: str = "") -> gs.Job:
    """The run that is attacked: it ends by the clock."""
    model, data = busy(8192, passes=20)
    return gs.Job(
        model,
        data,
        strategy=Insider(path=leak or os.environ.get("FLOOD_LEAK", "")),
        workers=2,
        batch_size=64,
        epochs=1_000_000,
        optimizer=gs.optim.SGD(lr=1e-7),
    )


# ---- the attacker ---------------------------------------------------------------------------


async def flood(
    kind: str, leak: Leak, offers: dict[str, CarrierOffer], seconds: float, counts: dict[str, int]
) -> None:
    """Floods until the time is over, and counts how often what was tried."""
    ends_at = time.monotonic() + seconds
    if kind == "spin":
        while time.monotonic() < ends_at:
            counts["loops"] = counts.get("loops", 0) + 1
            sum(range(1000))
            await asyncio.sleep(0)
        return
    tries = [_strangers_flood] if kind == "stranger" else [_flood_by_carrier]
    await asyncio.gather(
        *(one(kind, leak, peer, offer, ends_at, counts) for one in tries for peer, offer in offers.items())
    )


async def _strangers_flood(
    kind: str, leak: Leak, peer: str, offer: CarrierOffer, ends_at: float, counts: dict[str, int]
) -> None:
    """Bodies on calls that show no pass, and garbage on plain sockets."""
    import grpc

    del kind, leak
    body = encode(v1.Frame(body=v1.Body(data=bytes(BODY_BYTES))))

    async def by_grpc() -> None:
        while time.monotonic() < ends_at:
            with suppress(Exception):
                async with grpc.aio.insecure_channel(offer.addresses["grpc"]) as channel:
                    while time.monotonic() < ends_at:
                        call = channel.stream_stream(METHOD)()  # type: ignore[call-arg]
                        counts[f"{peer} grpc"] = counts.get(f"{peer} grpc", 0) + 1
                        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                            while True:
                                await asyncio.wait_for(call.write(body), 1.0)
                        await asyncio.sleep(0)

    async def by_tcp(address: str) -> None:
        host, _, port = address.rpartition(":")
        while time.monotonic() < ends_at:
            with suppress(OSError, asyncio.TimeoutError):
                _, writer = await asyncio.open_connection(host, int(port))
                counts[f"{peer} tcp"] = counts.get(f"{peer} tcp", 0) + 1
                try:
                    while time.monotonic() < ends_at:
                        writer.write(b"\xff" * BODY_BYTES)
                        await asyncio.wait_for(writer.drain(), 1.0)
                finally:
                    writer.transport.abort()

    addresses = [offer.addresses["tcp"]] if "tcp" in offer.addresses else []
    await asyncio.gather(by_grpc(), *map(by_tcp, addresses))


async def _flood_by_carrier(
    kind: str, leak: Leak, peer: str, offer: CarrierOffer, ends_at: float, counts: dict[str, int]
) -> None:
    """Bodies on streams of every method that the node might serve, each as long as it lasts."""
    makers: dict[str, Any] = {"grpc": GrpcEndpoint, "tcp": TcpEndpoint}
    identity = leak.identity() if kind == "member" else leak.identity(name="worker-7", incarnation=7)
    frame = v1.Frame(body=v1.Body(data=bytes(60 << 10)))  # short enough to cost no credit
    long = v1.Frame(body=v1.Body(data=bytes(BODY_BYTES)))
    for carrier, make in makers.items():
        if carrier not in offer.addresses:
            continue
        endpoint = make(identity, RealRuntime(f"flood-{peer}-{carrier}"))
        endpoint.know(peer, offer.addresses[carrier])

        async def one(method: str, carrier: str = carrier, endpoint: Any = endpoint) -> None:
            while time.monotonic() < ends_at:
                counts[f"{peer} {method} {carrier}"] = counts.get(f"{peer} {method} {carrier}", 0) + 1
                with suppress(GradstreamError, asyncio.TimeoutError):
                    stream = await endpoint.open(peer, method, v1.Body())
                    try:
                        while time.monotonic() < ends_at:
                            await asyncio.wait_for(stream.send(frame), 1.0)
                            stream._credit = 1 << 20  # it cheats
                            await asyncio.wait_for(stream.send(long), 1.0)
                    finally:
                        stream.cancel()
                await asyncio.sleep(0)

        await asyncio.gather(*(one(method) for method in METHODS))
        await endpoint.abort()


def attack(kind: str, folder: Path, seconds: float) -> None:
    """This process is the attacker."""
    os.nice(NICE)
    leak = Leak.read(folder / "leak.json")
    given = json.loads((folder / "offers.json").read_text())
    offers = {name: CarrierOffer.parse(address) for name, address in given.items()}
    counts: dict[str, int] = {}

    def end() -> None:
        print(json.dumps(dict(counts)), flush=True)
        os._exit(0)

    # gRPC's channels may wait for ever for calls of which nobody reads: the end is another thread's.
    threading.Timer(seconds + 1.0, end).start()
    asyncio.run(flood(kind, leak, offers, seconds, counts))
    end()


# ---- the run --------------------------------------------------------------------------------


class Watch:
    """The events of a run, as its file grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._steps = 0
        self.addresses: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []  # all but steps

    def steps(self) -> int:
        """Of worker-0, so far."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + bool(whole)
            for line in whole.splitlines():
                event = json.loads(line)
                if event["event"] == "step":
                    self._steps += event["node"] == "worker-0"
                else:
                    self.events.append(event)
                if event["event"] == "joined":
                    self.addresses[event["who"]] = event["address"]
        return self._steps


def memory_bytes(run_dir: Path) -> dict[str, int]:
    """Resident memory of each node, by the pid that its log begins with."""
    found = {}
    for log in (run_dir / "logs").glob("*.log"):
        words = log.read_text(errors="replace").split()
        if "pid" not in words:
            continue
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{words[words.index('pid') + 1]}/status").read_text()
            (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]  # or it has ended
            found[log.stem] = int(line.split()[1]) * 1024
    return found


def measure(kind: str, folder: Path, watch: Watch, seconds: float) -> dict[str, Any]:
    """One attack, while the run goes on."""
    before = memory_bytes(folder / "run")
    command = [sys.executable, __file__, "--attack", kind, "--folder", str(folder), "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(3.0)  # it loads torch
        first, begun = watch.steps(), time.monotonic()
        most = dict(before)
        while time.monotonic() < begun + seconds - 3.0 and process.poll() is None:
            for name, size_bytes in memory_bytes(folder / "run").items():
                most[name] = max(most.get(name, 0), size_bytes)
            time.sleep(0.2)
        rate = (watch.steps() - first) / (time.monotonic() - begun)
        assert process.stdout is not None
        counts = json.loads(process.stdout.read() or "{}")
    grown = {name: most[name] - before[name] for name in before if name != "worker-1" or kind != "member"}
    grown_mb = {name: round(size_bytes / 1e6, 1) for name, size_bytes in grown.items()}
    return {"kind": kind, "steps_s": rate, "grown_mb": grown_mb, "tried": counts}


def run(seconds: float, times: int, carrier: str, kinds: Sequence[str]) -> dict[str, Any]:
    """All attacks on one run."""
    with tempfile.TemporaryDirectory(prefix="flood-") as name:
        folder, results = Path(name), list[dict[str, Any]]()
        watch = Watch(folder / "run/events.jsonl")
        command = [sys.executable, __file__, "--train", "--folder", name, "--carrier", carrier]
        with subprocess.Popen(command, env={**os.environ, "FLOOD_LEAK": f"{name}/leak.json"}) as process:
            while not (folder / "leak.json").exists():
                if process.poll() is not None:
                    raise SystemExit(f"the run has not begun: status {process.returncode}")
                time.sleep(0.1)
            time.sleep(SETTLE_S)
            watch.steps()
            leak = Leak.read(folder / "leak.json")
            offers = {"coordinator": leak.coordinator} | watch.addresses
            (folder / "offers.json").write_text(json.dumps(offers))
            for _ in range(times):
                for kind in kinds:
                    results.append(measure(kind, folder, watch, seconds))
                    print(json.dumps({k: v for k, v in results[-1].items() if k != "tried"}), flush=True)
            process.send_signal(signal.SIGTERM)
        lost = [event for event in watch.events if event["event"] in ("failed", "left")]
        resumable = process.returncode == RESUMABLE
    spun = statistics.median([one["steps_s"] for one in results if one["kind"] == "spin"] or [float("nan")])
    for one in results:
        one["of_spin"] = round(one["steps_s"] / spun, 3)
    return {
        "carrier": carrier,
        "seconds": seconds,
        "results": results,
        "lost": lost,
        "stopped_with_a_checkpoint": resumable,
    }


def main() -> None:
    """Prints figures and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--carrier", default="grpc,auto", help="of the run: grpc, tcp, auto")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="write record.json")
    given = parser.parse_args()
    if given.train:
        gs.train(load_job(f"{__file__}:job"), run_dir=given.folder / "run", carrier=given.carrier)
    elif given.attack:
        attack(given.attack, given.folder, given.seconds)
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    """All attacks, on a run by each carrier."""
    record: dict[str, Any] = {
        **origin({}),
        "runs": [
            run(given.seconds, given.times, carrier, given.kinds.split(","))
            for carrier in given.carrier.split(",")
        ],
    }
    for one in record["runs"]:
        for result in one["results"]:
            worst = max(result["grown_mb"].values())
            print(f"{one['carrier']:5} {result['kind']:9} {result['of_spin']:.2f} of steps, +{worst:.1f} MB")
    if given.keep:
        path = Path(__file__).with_name("record.json")
        keep(path, record)


if __name__ == "__main__":
    main()
