"""One rank of a loop of one's own behind slow links: torch over gloo, hivemind, torchft, and gradstream's five lines.

python studies/slow_links/peer.py '{"task": "small", "method": "ddp", "rank": 0, …}'     see `Asked`

Rank 0 adds [seconds, step, accuracy or loss] to the file "curve" when it begins and at each evaluation. All go on until
they are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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

import gradstream as gs
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
        lr: of the (inner) rule.
        period: minibatches between two exchanges, of methods that have a period.
        delay: of torchft's DiLoCo: minibatches behind which an exchange goes on.
        least: of torchft and gradstream: ranks that are there at the beginning.
    """

    task: str
    method: str
    rank: int
    seed: int
    addresses: list[str]
    folder: str
    lr: float
    period: int = 0
    delay: int = 0
    least: int = WORLD


def main() -> None:
    """Trains until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("asked", help="JSON")
    asked = Asked(**json.loads(parser.parse_args().asked))
    task = TASKS[asked.task]
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    data, model = task.data(), task.network()
    optimizer = task.optimizer(model.parameters(), asked.lr)
    with METHODS[asked.method](asked, model, optimizer) as (trained, inner, *own):
        first, *minibatches = own or (asked.rank == 0, strided(data, asked))
        begun = shown = time.perf_counter()
        curve = (Path(asked.folder) / "curve").open("a", buffering=1) if first else None
        print(json.dumps([0.0, 0, math.nan]), file=curve) if curve else None
        for step, (inputs, targets) in enumerate(minibatches[0], 1):
            inner.zero_grad()
            task.loss(trained(inputs), targets).backward()
            inner.step()
            if curve is None or time.perf_counter() - shown < EVERY_S or step % (asked.period or 1):
                continue
            found, shown = score(task, model, data), time.perf_counter()
            print(json.dumps([shown - begun, step, found]), file=curve)


def strided(data: gs.data.Dataset, asked: Asked) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's minibatches of an order that all ranks draw."""
    rng, each = np.random.default_rng(asked.seed), TASKS[asked.task].batch
    while True:
        order = rng.permutation(data.num_samples)
        for first in range(asked.rank * each, len(order) - each * WORLD + 1, each * WORLD):
            batch = data.batch(order[first : first + each])
            yield torch.as_tensor(batch.inputs), torch.as_tensor(batch.targets)


@contextlib.contextmanager
def gradstream(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[Any, ...]]:
    """The five lines, with local SGD and sums of one bit for each element."""
    session = gs.join(
        "local-sgd", strategy_options={"every": asked.period}, codec="one-bit", checkpoint_every=None
    )
    data = TASKS[asked.task].data()
    batch = data.batch(np.arange(data.num_samples))
    pairs = torch.utils.data.TensorDataset(torch.as_tensor(batch.inputs), torch.as_tensor(batch.targets))
    loader = torch.utils.data.DataLoader(pairs, batch_size=TASKS[asked.task].batch, shuffle=True)
    loader = session.shard(loader)
    model, optimizer = session.wrap(model, optimizer)
    yield model, optimizer, session.rank == 0, (batch for _ in session.epochs(1000) for batch in loader)
    session.close()


@contextlib.contextmanager
def gloo(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[Any, ...]]:
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
def hivemind(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[Any, ...]]:
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
    averaged = hm.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=batch,
        target_batch_size=batch * WORLD * asked.period,
        optimizer=optimizer,
        use_local_updates=True,
        delay_state_averaging=True,
        state_averaging_compression=hm.compression.Float16Compression(),
        matchmaking_time=3.0,
        averaging_timeout=60.0 if asked.least == WORLD else 15.0,
    )
    if asked.rank >= asked.least:
        averaged.load_state_from_peers()
    yield model, averaged


@contextlib.contextmanager
def torchft(asked: Asked, model: nn.Module, optimizer: Any) -> Iterator[tuple[Any, ...]]:
    """DiLoCo, with its paper's outer rule, or LocalSGD. The bench has started the lighthouse on the first machine."""
    own = asked.addresses[asked.rank]
    socket.gethostname = lambda: own  # torchft tells the others this name, which they could not look up here
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    parts = {"model": model, "inner": optimizer, "outer": outer}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=WORLD if asked.least == WORLD else asked.least - 1,
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
    every = {"sync_every": asked.period}
    if asked.method == "torchft-local":
        way = LocalSGD(manager, model, optimizer, **every)
    else:
        way = DiLoCo(manager, [model], optimizer, outer, fragment_sync_delay=asked.delay, **every)
    with way:
        yield model, optimizer


METHODS = {
    "gradstream": gradstream,
    **dict.fromkeys(("ddp", "powersgd-1", "powersgd-2", "powersgd-4", "post-local"), gloo),
    "hivemind": hivemind,
    **dict.fromkeys(("torchft", "torchft-local"), torchft),
}

if __name__ == "__main__":
    main()
