"""A loop of one's own on three workers, as `bench/own_loops.py` starts and kills it: gradstream, torchft, torchrun.

Model, data and step are the same. Each function is the loop as its maker writes it, and needs that package alone.

The optimizer counts each use of each sample in a parameter of the model: the loss has the mean of the counters of a
minibatch in it, so the averaged gradient of a counter is how often its sample was used, over the number of samples of
the step. A counter that is 1 for each epoch therefore shows that the model has each sample once.

Each process adds lines to FOLDER/log: "start RANK PID SECONDS", and after each optimizer step "commit RANK PID
BEGUN_S ENDED_S STEP SAMPLES OWN": samples in the averaged gradient, and whether they include this process's own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPLICAS, BATCH, SAMPLES, STEP_S = 3, 8, 4080, 0.02
CHECKPOINT_S = 1.0  # of torchrun, which starts all workers again from a file
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("system")
PARSER.add_argument("folder", type=Path)
ASKED = PARSER.parse_args()
SYSTEM, FOLDER = ASKED.system, ASKED.folder


class Net(nn.Module):
    """85,002 parameters, and a counter for each sample."""

    def __init__(self) -> None:
        super().__init__()
        first, second, last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        self.used = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The loss, after a time in which the processor is idle, as if a device computed."""
        outputs = self.net(inputs)
        time.sleep(STEP_S)
        return nn.functional.cross_entropy(outputs, targets) + self.used[ids].mean()


class CountingSGD(torch.optim.SGD):
    """SGD that adds to each counter how often its sample is in the averaged gradient, and logs the step."""

    def __init__(self, model: Net) -> None:
        super().__init__(model.net.parameters(), lr=0.01)
        self.add_param_group({"params": [model.used], "lr": 1.0, "steps": 0})
        self.used, self.batch, self.begun_s = model.used, torch.empty(0, dtype=torch.long), 0.0

    def step(self, closure: Any = None) -> None:
        """One step."""
        uses = torch.zeros(SAMPLES) if self.used.grad is None else self.used.grad
        if (some := uses[uses > 0]).numel():
            uses.div_(some.min()).round_()
        own, samples = bool(uses[self.batch].any()), int(uses.sum())
        self.used.grad = -uses
        super().step(closure)
        group = self.param_groups[-1]
        group["steps"] += 1
        say("commit", self.begun_s, time.monotonic(), group["steps"], samples, int(own))

    def begins(self, ids: torch.Tensor) -> None:
        """Notes what the next step trains on."""
        self.batch, self.begun_s = ids, time.monotonic()


rank = int(os.environ.get("REPLICA_GROUP_ID", os.environ.get("RANK", "-1")))


def say(kind: str, *values: float) -> None:
    """Adds a line to the log, whole or not at all."""
    line = " ".join([kind, str(rank), str(os.getpid()), *map(repr, values)])
    os.write(LOG, f"{line}\n".encode())


def epochs(numbers: Iterator[int]) -> Iterator[int]:
    """Those numbers, up to the last epoch, which the rig names long before it begins."""
    for epoch in numbers:
        last = FOLDER / "last"
        if last.exists() and epoch > int(last.read_text()):
            return
        say("epoch", epoch)
        yield epoch


def finish(model: Net) -> None:
    """Says how often each sample is in the model."""
    say("end", time.monotonic())
    (FOLDER / f"used-{rank}.json").write_text(json.dumps(model.used.tolist()))


def begin() -> tuple[torch.utils.data.Dataset[Any], Net, CountingSGD]:
    """Data, model and optimizer."""
    say("start", time.monotonic())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,))
    model = Net()
    return torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES)), model, CountingSGD(model)


def gradstream() -> None:
    """The loop, and the five lines."""
    global rank
    import gradstream as gs  # 1

    session = gs.join()  # 2
    rank = session.rank
    data, model, optimizer = begin()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    loader = session.shard(loader)  # 3
    model, optimizer = session.wrap(model, optimizer)  # 4
    for _ in epochs(session.epochs(1_000_000)):
        for inputs, targets, ids in loader:
            optimizer.begins(ids)
            optimizer.zero_grad()
            model(inputs, targets, ids).backward()
            optimizer.step()
    session.close()  # 5
    finish(model)


def torchft() -> None:
    """As torchft's train_ddp.py, which leaves it to the user to keep the place in the data: a file has it here."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    data, model, counting = begin()
    place = FOLDER / f"place-{rank}"
    first, done = json.loads(place.read_text()) if place.exists() else (0, 0)
    sampler = DistributedSampler(
        data, replica_rank=rank, num_replica_groups=REPLICAS, group_rank=0, num_replicas=1, shuffle=True
    )
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: [model.load_state_dict(state[0]), counting.load_state_dict(state[1])],
        state_dict=lambda: [model.state_dict(), counting.state_dict()],
        replica_id=f"own_loop_{rank}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, counting)
    for epoch in epochs(iter(range(first, 1_000_000))):
        sampler.set_epoch(epoch)
        order = list(sampler)[done * BATCH :]
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
        for number, (inputs, targets, ids) in enumerate(loader, done + 1):
            counting.begins(ids)
            optimizer.zero_grad()
            parallel(inputs, targets, ids).backward()
            optimizer.step()
            (new := place.with_suffix(".new")).write_text(json.dumps([epoch, number]))
            new.replace(place)
        done = 0
    finish(model)
    manager.shutdown(wait=False)
    os._exit(0)


def torchrun() -> None:
    """DDP; torchrun ends all workers when one has died, and starts them again from the newest checkpoint."""
    import torch.distributed as dist

    data, model, optimizer = begin()
    dist.init_process_group("gloo")
    kept, first, done = FOLDER / "checkpoint.pt", 0, 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["place"]
    parallel = nn.parallel.DistributedDataParallel(model)
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=True)
    saved_s = time.monotonic()
    for epoch in epochs(iter(range(first, 1_000_000))):
        sampler.set_epoch(epoch)
        order = list(sampler)[done * BATCH :]
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
        for number, (inputs, targets, ids) in enumerate(loader, done + 1):
            optimizer.begins(ids)
            optimizer.zero_grad()
            parallel(inputs, targets, ids).backward()
            optimizer.step()
            if rank == 0 and time.monotonic() - saved_s > CHECKPOINT_S:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "place": [epoch, number]}, new := kept.with_suffix(".new"))
                new.replace(kept)
                saved_s = time.monotonic()
        done = 0
    finish(model)
    dist.destroy_process_group()


LOG = os.open(FOLDER / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
if __name__ == "__main__":
    {"gradstream": gradstream, "torchft": torchft, "torchrun": torchrun}[SYSTEM]()
