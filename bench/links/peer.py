"""One rank of a peer of `bench/slow_links.py`: torch's DDP over gloo, with what torch has against slow links.

python bench/links/peer.py METHOD RANK WORLD ADDRESS SECONDS LR      prints [seconds, step, accuracy] on rank 0
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gradstream as gs
from links.mlp import BATCH, EVERY_S, network

PERIOD = 20
"""Steps between two averages of post-local SGD."""


def main() -> None:
    """Trains until the time is over."""
    method, rank, world, address, seconds, rate = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29500", rank=int(rank), world_size=int(world)
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, model = gs.data.fashion_mnist(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(rate), momentum=0.9)
    average = None
    if method == "post-local":
        average = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
        trained: nn.Module = model
    else:
        trained = ddp = DistributedDataParallel(model)
        if method == "powersgd":
            state = powersgd.PowerSGDState(
                dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2
            )
            ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        elif method == "bf16":
            ddp.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    rng, own = np.random.default_rng(0), slice(int(rank) * BATCH, (int(rank) + 1) * BATCH)
    begun, shown, step, stop = time.perf_counter(), 0.0, 0, torch.zeros(1)
    while True:
        order = rng.permutation(5000)
        for first in range(0, 5000 - BATCH * int(world), BATCH * int(world)):
            batch = data.batch(order[first : first + BATCH * int(world)][own])
            optimizer.zero_grad()
            outputs = trained(torch.as_tensor(batch.inputs))
            nn.functional.cross_entropy(outputs, torch.as_tensor(batch.targets)).backward()
            optimizer.step()
            step += 1
            if average is not None:
                average.average_parameters(model.parameters())
            passed = time.perf_counter() - begun
            if rank == "0" and passed - shown > EVERY_S and (average is None or step % PERIOD == 0):
                shown = passed
                print(json.dumps([passed, step, accuracy(model, data)]), flush=True)
            if average is None or step % PERIOD == 0:
                stop.fill_(float(passed > float(seconds)))
                dist.all_reduce(stop)
                if stop.item():
                    dist.destroy_process_group()
                    return


def accuracy(model: nn.Module, data: gs.data.Dataset) -> float:
    """On the held-back images."""
    test = data.test_batch(np.arange(1000))
    with torch.no_grad():
        right = model(torch.as_tensor(test.inputs)).argmax(1) == torch.as_tensor(test.targets)
    return float(right.float().mean())


if __name__ == "__main__":
    main()
