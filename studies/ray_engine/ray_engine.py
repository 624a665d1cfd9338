"""Question: what does it cost that Ray places the processes of a run, beside starting the same processes by hand?

Three nodes of a Ray cluster on this machine train Caltech-101 with the small network, over TLS; then the same three
processes are started without Ray, with the variables that `gradstream launch --hosts` sets; by turns. Counts what the
processes of the run, those of Ray and this one use of the machine's cores. In the last run a Ray node is killed with
all its processes. Takes GRADSTREAM_DATA, and `pip install ray`.

    python studies/ray_engine/ray_engine.py  # about ten minutes of two cores; writes record.json
    python studies/ray_engine/ray_engine.py --turns 1 --without-kill --more  # adds turns to the record
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.ext.ray.engine import RayEngine
from gradstream.job.files import load_job

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep_part, kept, origin
from kit.process_faults import process_tree

RECORD = Path(__file__).with_name("record.json")
JOB = ROOT / "examples" / "caltech101.py"
NODES, NODE_MEMORY = 3, 100_000_000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind")
    parser.add_argument("--epochs", type=int, default=10, help="some 50 s on two cores")
    parser.add_argument("--network", default="cnn", help="function of examples/caltech101.py")
    parser.add_argument("--strategy", default="synchronous")
    parser.add_argument(
        "--niceness", type=int, default=15, help="of processes of Ray's workers; 15 is Ray's default"
    )
    parser.add_argument("--without-kill", action="store_true")
    parser.add_argument("--more", action="store_true", help="add to the record, which has the same options")
    given = parser.parse_args()
    os.environ.update({"RAY_worker_niceness": str(given.niceness)})
    options = {"strategy": given.strategy, "epochs": given.epochs, "batch_size": 64}
    from ray.cluster_utils import Cluster

    os.environ["OMP_NUM_THREADS"] = "1"
    part = "nice" if given.niceness else "not nice"
    record: dict[str, Any] = {"network": given.network, **options, "nodes": NODES, "niceness": given.niceness}
    record |= {"ray": [], "by hand": []}
    if given.more and (before := kept(RECORD).get(part)):
        assert all(before[name] == record[name] for name in ("network", "nodes", *options)), "other options"
        record |= before
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": NODE_MEMORY},
    )
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=2, object_store_memory=NODE_MEMORY)
    os.environ["RAY_ADDRESS"] = cluster.address
    spec = f"{JOB}:{given.network}"
    try:
        for _ in range(given.turns):
            record["ray"].append(by_ray(spec, options))
            record["by hand"].append(by_hand(spec, options))
            print(json.dumps({kind: record[kind][-1] for kind in ("ray", "by hand")}), flush=True)
            written(record, part)
        if not given.without_kill:
            record["killed"] = killed(cluster, spec, options)
            print(json.dumps(record["killed"]), flush=True)
            written(record, part)
    finally:
        cluster.shutdown()


def written(record: dict[str, Any], part: str) -> None:
    """Writes the record of processes of one niceness."""
    rates = {kind: [one["samples_per_s"] for one in record[kind]] for kind in ("ray", "by hand")}
    record["ray of by hand"] = statistics.median(rates["ray"]) / statistics.median(rates["by hand"])
    keep_part(RECORD, part, {**record, **origin({})})
    print(f"{part}: with Ray {record['ray of by hand']:.3f} of the samples/s without; {rates}")


class Cores:
    """Counts what the cores do while a run trains: for its own processes, for those of Ray, for this one, for others.

    Looks every second, so what a process uses in its last second is missing.
    """

    def __init__(self) -> None:
        self._used_s: dict[
            tuple[str, int, str], list[float]
        ] = {}  # by kind, process and its start: first and last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            for folder in Path("/proc").iterdir():
                if folder.name.isdigit():
                    self._count(folder)

    def _count(self, folder: Path) -> None:
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            kind = self._kind(folder)
        except OSError:  # it has ended
            return
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        times = self._used_s.setdefault((kind, int(folder.name), fields[19]), [used_s, used_s])
        times[1] = used_s

    def _kind(self, folder: Path) -> str:
        if folder.name == str(os.getpid()):
            return "driver"
        command = (folder / "cmdline").read_bytes()
        if "GRADSTREAM_NODE=" in (folder / "environ").read_text(errors="replace"):
            return "run"
        return "ray" if b"ray" in command else "other"

    def end(self) -> dict[str, float]:
        """Seconds of a core since the beginning, by kind of process."""
        self._over.set()
        self._thread.join()
        sums: dict[str, float] = {}
        for (kind, _, _), (first_s, last_s) in self._used_s.items():
            sums[kind] = round(sums.get(kind, 0.0) + last_s - first_s, 2)
        return sums


def figures(run: gs.Run, begun_s: float, cores: Cores) -> dict[str, Any]:
    """What a record keeps of a run."""
    kept = ("samples_per_s", "train_s", "samples_accounted", "workers_lost", "carriers")
    summary = {name: run.summary[name] for name in kept}
    return {**summary, "whole_s": time.monotonic() - begun_s, "core_s": cores.end()}


def by_ray(spec: str, options: Mapping[str, Any], on_event: Any = None) -> dict[str, Any]:
    """The run with its processes in actors of Ray."""
    with tempfile.TemporaryDirectory() as folder:
        begun_s, cores = time.monotonic(), Cores()
        run = gs.train(
            load_job(spec, argv=["caltech101.py"]),
            engine=RayEngine(),
            workers=NODES,
            run_dir=Path(folder) / "run",
            on_event=on_event,
            **options,
        )
        return figures(run, begun_s, cores)


def by_hand(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run with the same processes, started here."""
    from ray.util import get_node_ip_address

    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        place = {"NODES": NODES, "LEAST": NODES, "HOST": get_node_ip_address(), "PORT": port}
        place["TOKEN"] = secrets.token_hex(16)
        begun_s, cores = time.monotonic(), Cores()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "gradstream", "train", spec, *words, "--run-dir", f"{folder}/{rank}"],
                cwd=folder,
                env={**os.environ, **{f"GRADSTREAM_{k}": str(v) for k, v in {**place, "NODE": rank}.items()}},
                stdout=subprocess.DEVNULL,
                stderr=(Path(folder) / f"log{rank}").open("w"),
            )
            for rank in range(NODES)
        ]
        statuses = [one.wait() for one in processes]
        if any(statuses):
            logs = [(Path(folder) / f"log{rank}").read_text()[-2000:] for rank in range(NODES)]
            raise SystemExit("\n".join(logs))
        return figures(gs.Run.load(Path(folder) / "0"), begun_s, cores)


def killed(cluster: Any, spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run, in which a Ray node without the first node of the run is killed with all its processes."""
    times: dict[str, float] = {}
    steps, victim = 0, ""

    def look(event: Mapping[str, Any]) -> None:
        nonlocal steps, victim
        if event["event"] == "step" and not victim and event["node"] == "worker-1":
            times["killed"] = event["time_s"]
            rank, pids = away_from_the_first(cluster)
            victim = f"worker-{rank}"
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        if event.get("who") == victim and event["event"] == "left":
            times.setdefault("noticed", event["time_s"])
        if event.get("who") == victim and event["event"] == "joined" and "noticed" in times:
            times.setdefault("back", event["time_s"])
        steps += event["event"] == "step" and "noticed" in times and "back" not in times

    return {**by_ray(spec, options, look), "times_s": times, "steps of the others meanwhile": steps}


def away_from_the_first(cluster: Any) -> tuple[int, list[int]]:
    """A node of the run on a Ray node without the first one and without this program, and that Ray node's processes."""
    for node in cluster.worker_nodes:
        there = process_tree(node.all_processes["raylet"][0].process.pid)
        names = {f"GRADSTREAM_NODE={rank}": rank for rank in range(NODES)}
        ranks = {names[one] for pid in there for one in variables(pid) if one in names}
        if ranks and 0 not in ranks:
            return min(ranks), there
    raise AssertionError("all nodes are on the Ray node of the first one")


def variables(pid: int) -> list[str]:
    """The environment of a process."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


if __name__ == "__main__":
    main()
