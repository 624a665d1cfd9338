"""torchft in the same rig as `bench/recovery.py`: the same model and step, three replicas over gloo, one is killed.

    python -m venv VENV && VENV/bin/pip install "torch==2.13.0" torchft-nightly==2026.10.26 numpy
    python bench/recovery.py --peer torchft --python VENV/bin/python --strikes 20

torchft's lighthouse and its replicas are processes of that environment; a killed one is started again at once, and
loads Python and torch anew (`started_s` is when it has; torchft has no warm process to fork it from). Each says when
it began and committed a step. `SETTINGS` are those of the lighthouse: as torchft's README starts it, where a replica is
lost after 5 s without a heartbeat; with a bound of 1 s; and with the defaults of a lighthouse that is made in Python,
one replica being enough, where the others do not wait for a missing one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

REPLICAS, STEP_S, GAP_S, PATIENCE_S = 3, 0.02, (0.2, 0.6), 120.0
README = {"min_replicas": 2, "quorum_tick_ms": 100, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 5000}
SETTINGS = {
    "as in its README": README,
    "heartbeat 1 s": README | {"heartbeat_timeout_ms": 1000},
    "from Python": {"min_replicas": 1, "heartbeat_timeout_ms": 5000},
}


class Replica:
    """One replica as the rig sees it.

    Attributes:
        started_s: when its process had loaded torch; 0 before.
        commits: begin and end of each step that it has committed since its process began.
        ready: whether it computes in a quorum of all replicas.
    """

    def __init__(self, command: list[str], stack: ExitStack) -> None:
        self.started_s, self.ready = 0.0, False
        self.commits: list[tuple[float, float]] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        stack.callback(self.process.kill)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            kind, *numbers = line.split()
            if kind == "started":
                self.started_s = float(numbers[0])
            elif kind == "commit" and len(numbers) == 3:  # not cut short by the kill
                self.ready = int(numbers[2]) == REPLICAS
                self.commits.append((float(numbers[0]), float(numbers[1])))


def measured_peer(python: str, strikes: int, seed: int, settings: Mapping[str, int]) -> dict[str, Any]:
    """So many kills, and what followed each.

    Args:
        python: interpreter of the environment that has torchft.
        strikes: number of kills.
        seed: draws whom and when.
        settings: of torchft's lighthouse.
    """
    rng, each = random.Random(seed), []
    version = subprocess.run(
        [python, "-c", "from importlib import metadata as m; print(m.version('torchft-nightly'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    with ExitStack() as stack:
        own = [python, __file__]
        lighthouse = subprocess.Popen(
            [*own, "--lighthouse", json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.callback(lighthouse.kill)
        address = (lighthouse.stdout or sys.stdin).readline().strip()
        commands = [[*own, "--replica", f"replica-{rank}", "--at", address] for rank in range(REPLICAS)]
        replicas = [Replica(command, stack) for command in commands]
        wait_for(
            lambda: all(one.ready and one.process.poll() is None for one in replicas), "the first quorum"
        )
        for _ in range(strikes):
            time.sleep(rng.uniform(*GAP_S))
            rank = rng.randrange(REPLICAS)
            others = [one for other, one in enumerate(replicas) if other != rank]
            at_s = time.monotonic()
            replicas[rank].process.send_signal(signal.SIGKILL)
            replicas[rank].process.wait()
            new = replicas[rank] = Replica(commands[rank], stack)
            wait_for(
                lambda others=others, at_s=at_s: all(first_commit_s(one, at_s) for one in others), "a commit"
            )
            wait_for(lambda new=new: bool(new.commits), "the new replica's commit")
            wait_for(lambda: all(one.ready for one in replicas), "a quorum of all")
            found = {
                "started_s": new.started_s,
                "committed_s": max(first_commit_s(one, at_s) for one in others),
            }
            found["back_s"] = new.commits[0][1]
            each.append({"who": f"replica-{rank}", **{key: round(s - at_s, 4) for key, s in found.items()}})
    return {"ended": "", "strikes": len(each), "version": version, "settings": settings, "each": each}


def first_commit_s(replica: Replica, at_s: float) -> float:
    """When the first step that a replica began after an instant was committed; 0 if it has not been."""
    return next((end_s for begun_s, end_s in [*replica.commits] if begun_s >= at_s), 0.0)


def wait_for(holds: Callable[[], bool], what: str) -> None:
    """Waits for something. Raises TimeoutError after `PATIENCE_S`."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"torchft: {what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.002)


def replica(name: str, lighthouse: str) -> None:
    """The process of a replica: trains until it is killed."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import Manager, ProcessGroupGloo

    print("started", time.monotonic(), flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=lambda: model.state_dict(),
        min_replica_size=1,
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    while True:
        begun_s = time.monotonic()
        manager.start_quorum()
        sgd.zero_grad()
        outputs = model(torch.randn(8, 64))
        time.sleep(STEP_S)
        nn.functional.cross_entropy(outputs, torch.randint(0, 10, (8,))).backward()
        flat = torch.cat([one.grad.flatten() for one in model.parameters()])
        manager.allreduce(flat).wait()
        parts = flat.split([one.numel() for one in model.parameters()])
        for one, part in zip(model.parameters(), parts, strict=True):
            one.grad = part.view_as(one)
        if manager.should_commit():
            sgd.step()
            print("commit", begun_s, time.monotonic(), manager.num_participants(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lighthouse", metavar="JSON")
    parser.add_argument("--replica", metavar="NAME")
    parser.add_argument("--at", metavar="ADDRESS")
    given = parser.parse_args()
    if given.replica:
        replica(given.replica, given.at)
    elif given.lighthouse:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="[::]:0", **json.loads(given.lighthouse))
        print(server.address().replace(os.uname().nodename, "localhost"), flush=True)
        threading.Event().wait()
    else:
        parser.error("see bench/recovery.py --peer torchft")


if __name__ == "__main__":
    main()
