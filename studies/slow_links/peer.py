"""One rank of a peer of `slow_links.py`: torch over gloo with what it has against slow links, hivemind, torchft.

python studies/slow_links/peer.py '{"task": "small", "method": "ddp", "rank": 0, …}'     see `Asked`

Rank 0 prints [seconds, step, accuracy or loss] at each evaluation, and ends at the goal or when the time is over. The
others go on until they are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from tasks import TASKS, score

WORLD, EVERY_S, PORT = 4, 4.0, 29500
ONE_BUCKET_MB = 100  # PowerSGD's hook wants all gradients in one


@dataclass(frozen=True)
class Asked:
    """What the bench asks of a rank.

    Args:
        task, method, rank, seed: which.
        addresses: of the machines, by rank.
        folder: a folder that all ranks see.
        seconds: when it ends without the goal.
        lr: of the (inner) rule.
        period: minibatches between two exchanges, of methods that have a period.
        delay: of torchft's DiLoCo: minibatches behind which an exchange goes on.
    """

    task: str
    method: str
    rank: int
    seed: int
    addresses: list[str]
    folder: str
    seconds: float
    lr: float
    period: int = 0
    delay: int = 0


def main() -> None:
    """Trains until the goal is reached or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("asked", help="JSON")
    asked = Asked(**json.loads(parser.parse_args().asked))
    task = TASKS[asked.task]
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    data, model = task.data(), task.network()
    optimizer = task.optimizer(model.parameters(), asked.lr)
    rng, each = np.random.default_rng(asked.seed), task.batch
    with METHODS[asked.method](asked, model, optimizer) as (trained, inner):
        begun = shown = time.perf_counter()
        step = 0
        while True:
            order = rng.permutation(data.num_samples)
            for first in range(asked.rank * each, len(order) - each * WORLD + 1, each * WORLD):
                batch = data.batch(order[first : first + each])
                inner.zero_grad()
                task.loss(trained(torch.as_tensor(batch.inputs)), torch.as_tensor(batch.targets)).backward()
                inner.step()
                step += 1
                if asked.rank or time.perf_counter() - shown < EVERY_S or step % (asked.period or 1):
                    continue
                found, shown = score(task, model, data), time.perf_counter()
                print(json.dumps([shown - begun, step, found]), flush=True)
                if task.reached(found) or shown - begun > asked.seconds:
                    os._exit(0)  # the others are killed: a tidy end would wait for them


@contextlib.contextmanager
def gloo(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[nn.Module, Any]]:
    """DDP, plain or with PowerSGD; or local steps and averages, as post-local SGD has them after its start."""
    url = f"tcp://{asked.addresses[0]}:{PORT}"
    dist.init_process_group("gloo", init_method=url, rank=asked.rank, world_size=WORLD)
    if asked.method == "post-local":
        yield model, _Averaged(optimizer, model, PeriodicModelAverager(period=asked.period, warmup_steps=0))
        return
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if "powersgd" in asked.method else 25)
    if "powersgd" in asked.method:
        rank = int(asked.method.rpartition("-")[2])
        state = powersgd.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    yield ddp, optimizer


class _Averaged:
    """An optimizer after whose steps the models are averaged, if it is time."""

    def __init__(
        self, inner: torch.optim.Optimizer, model: nn.Module, average: PeriodicModelAverager
    ) -> None:
        self.zero_grad = inner.zero_grad
        self._inner, self._model, self._average = inner, model, average

    def step(self) -> None:
        self._inner.step()
        self._average.average_parameters(self._model.parameters())


@contextlib.contextmanager
def hivemind(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Local updates, and averages of the parameters in the background, in 16 bits."""
    import hivemind as hm

    own, known = asked.addresses[asked.rank], Path(asked.folder) / "dht"
    peers: list[str] = []
    if asked.rank:
        while not known.exists():
            time.sleep(0.1)
        peers = known.read_text().split()
    dht = hm.DHT(host_maddrs=[f"/ip4/{own}/tcp/0"], initial_peers=peers, start=True)
    if not asked.rank:
        (written := known.with_suffix(".new")).write_text("\n".join(map(str, dht.get_visible_maddrs())))
        written.rename(known)
    batch = TASKS[asked.task].batch
    yield (
        model,
        hm.Optimizer(
            dht=dht,
            run_id="bench",
            batch_size_per_step=batch,
            target_batch_size=batch * WORLD * asked.period,
            optimizer=optimizer,
            use_local_updates=True,
            delay_state_averaging=True,
            state_averaging_compression=hm.compression.Float16Compression(),
            matchmaking_time=3.0,
            averaging_timeout=60.0,
        ),
    )


@contextlib.contextmanager
def torchft(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[nn.Module, Any]]:
    """DiLoCo, with its paper's outer rule. The bench has started the lighthouse on the first machine."""
    own = asked.addresses[asked.rank]
    socket.gethostname = lambda: own  # torchft tells the others this name, which they could not look up here
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    parts = {"model": model, "inner": optimizer, "outer": outer}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=WORLD,
        use_async_quorum=False,
        load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        replica_id=f"replica-{asked.rank}",
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{asked.addresses[0]}:{PORT + 10}",
        timeout=timedelta(seconds=120),
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=asked.period, fragment_sync_delay=asked.delay):
        yield model, optimizer


METHODS = {
    **dict.fromkeys(("ddp", "powersgd-1", "powersgd-2", "powersgd-4", "post-local"), gloo),
    "hivemind": hivemind,
    "torchft": torchft,
}

if __name__ == "__main__":
    main()
