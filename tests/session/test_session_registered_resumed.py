"""Loops with objects of their own beside the model that were stopped: they go on with the bytes of one that was not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.result import FINAL_MODEL
from whole_runs import train

SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
import gradstream

session = gradstream.join(STRATEGY, checkpoint_every=5, keep_last=1)
torch.manual_seed(session.rank)


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


loader = session.shard(torch.utils.data.DataLoader(Samples(), batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=MOMENTUM)
model, optimizer = session.wrap(model, optimizer)
each_step = lr_scheduler.CosineAnnealingLR(optimizer, 40)
each_epoch = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
seen = {"samples": 0, "epochs": [], "losses": torch.zeros(())}
session.register(each_step=each_step, average=average, scaler=scaler, seen=seen, rng=True)
session.register(each_epoch=each_epoch)
begun = session.step
for epoch in range(EPOCHS):
    for x, y in loader:
        SKIP
        seen["samples"] += len(x)
        if EPOCHS > 100 and session.step >= 20:
            time.sleep(0.1)  # so that whoever stops it comes in time
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        each_step.step()
        seen["losses"] += loss.detach()
    each_epoch.step()
    seen["epochs"].append((epoch, optimizer.param_groups[0]["lr"]))
session.close()
state = {"average": average.state_dict(), "scaler": scaler.state_dict(), "seen": seen, "rate": each_step.state_dict()}
torch.save({**state, "drawn": torch.rand(3)}, Path(__file__).with_name(f"state-{session.rank}.pt"))
print(f"rank {session.rank}: {begun} to {session.step}")
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One forkserver for all runs: what takes time is to import torch."""
    with LocalCluster(tmp_path_factory.mktemp("logs"), node_environment(2)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _resumes_warm(warm: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gradstream._resume"], "launch", partial(launch, cluster=warm))


def stop_after(script: Path, run_dir: Path, steps: int, cluster: LocalCluster) -> gs.errors.Interrupted:
    """Runs the script, and stops it once worker 0 has made so many steps."""
    made = 0

    def on_event(event: Mapping[str, Any]) -> None:
        nonlocal made
        made += event["event"] == "step" and event["rank"] == 0

    with pytest.raises(gs.errors.Interrupted) as caught:
        train(script, run_dir, cluster, on_event=on_event, stop=lambda: made >= steps)
    return caught.value


def text_of(epochs: int, *, skip: bool, strategy: str = "'allreduce'", momentum: float = 0.9) -> str:
    text = SCRIPT.replace("SKIP", "if session.skip():\n            continue" if skip else "pass")
    return (
        text.replace("EPOCHS", str(epochs)).replace("STRATEGY", strategy).replace("MOMENTUM", str(momentum))
    )


@pytest.mark.limit_s(200)
@pytest.mark.parametrize("skip", [True])
def test_what_is_registered_goes_on_with_the_same_bytes(
    skip: bool, tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "own.py"
    script.write_text(text_of(9, skip=skip))
    train(script, tmp_path / "whole", warm)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("state-*.pt")}
    assert len(whole) == 2
    script.write_text(text_of(1000, skip=skip))
    stopped = stop_after(script, tmp_path / "stopped", 21, warm)
    folder = tmp_path / "stopped" / str(stopped.checkpoint)
    steps = json.loads((folder / "state.json").read_text())["steps"]
    script.write_text(text_of(9, skip=skip))
    gs.resume(tmp_path / "stopped", allow_changed=True)
    log = (warm.logs / "worker-0.log").read_text()
    assert f"rank 0: {steps['worker-0']} to 54" in log
    finals = [(tmp_path / name / FINAL_MODEL).read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]
    for name, state in whole.items():
        assert (tmp_path / name).read_bytes() == state, name
