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


loader = session.shard(torch.utils.data.DataLoader(Samples(), batch_size=8, shuffle=TrueMORE))
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
for epoch in LOOP:
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
print(f"rank {session.rank}: to {session.step}")
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


def text_of(epochs: int, how: str, **replaced: str) -> str:
    replaced = {"STRATEGY": "'allreduce'", "MOMENTUM": "0.9", "MORE": "", **replaced}
    replaced["SKIP"] = "if session.skip():\n            continue" if how == "skip" else "pass"
    replaced["LOOP"] = "session.epochs(EPOCHS)" if how == "epochs" else "range(EPOCHS)"
    text = SCRIPT
    for word, by in {**replaced, "EPOCHS": str(epochs)}.items():
        text = text.replace(word, by)
    return text


LOCAL = {
    "STRATEGY": "'local-sgd', strategy_options={'every': 3}",
    "loss.detach()": "0",  # of the last minibatch, a resumed loop has another one
}
PROCESSES = ", num_workers=1, generator=torch.Generator().manual_seed(7)"


@pytest.mark.limit_s(200)
@pytest.mark.parametrize(
    ("how", "replaced"),
    [
        ("skip", {}),
        ("range", {}),
        ("epochs", {}),
        ("skip", LOCAL),
        ("range", LOCAL),
        ("epochs", LOCAL),
        ("epochs", {"MORE": PROCESSES, "0.1 * torch.randn(8)": "0"}),
    ],
)
def test_what_is_registered_goes_on_with_the_same_bytes(
    how: str, replaced: dict[str, str], tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "own.py"
    script.write_text(text_of(9, how, **replaced))
    train(script, tmp_path / "whole", warm)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("state-*.pt")}
    assert len(whole) == 2
    script.write_text(text_of(1000, how, **replaced))
    stopped = stop_after(script, tmp_path / "stopped", 7 if "every" in str(replaced) else 21, warm)
    folder = tmp_path / "stopped" / str(stopped.checkpoint)
    steps = json.loads((folder / "state.json").read_text())["steps"]
    assert 20 <= steps["worker-0"] < 54
    script.write_text(text_of(9, how, **replaced))
    run = gs.resume(tmp_path / "stopped", allow_changed=True)
    assert run.summary["samples_accounted"] == 9 * 96
    assert "rank 0: to 54" in (warm.logs / "worker-0.log").read_text()
    finals = [(tmp_path / name / FINAL_MODEL).read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]
    for name, state in whole.items():
        assert (tmp_path / name).read_bytes() == state, name


@pytest.mark.limit_s(200)
def test_a_rate_that_begins_anew_is_refused(
    tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "own.py"
    without = {"each_step=each_step, ": "", "session.register(each_epoch=each_epoch)": ""}
    script.write_text(text_of(1000, "range", **without))
    stop_after(script, tmp_path / "stopped", 8, warm)
    with pytest.raises(
        gs.errors.UserCodeError, match=r"its optimizer differs from that step: lr is .*Register"
    ):
        gs.resume(tmp_path / "stopped")
    script.write_text(text_of(9, "range", **without))
    gs.resume(tmp_path / "stopped", allow_changed=True)
    assert "from here on: lr is " in capsys.readouterr().err


SEEN = """
Path(__file__).with_name(f"seen-{session.rank}.txt").open("a").write(f"{epoch} {session.step} {x[:, 0].tolist()}\\n")
"""


@pytest.mark.limit_s(200)
@pytest.mark.parametrize("workers", [3, 1])
def test_another_number_of_workers_uses_each_sample_once_an_epoch(
    workers: int, tmp_path: Path, warm: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "own.py"
    replaced = {"0.1 * torch.randn(8)": "0"}

    def text(epochs: int) -> str:
        seen = SEEN.strip().replace("\\\\", "\\")
        before = 'seen["samples"] += len(x)'
        return text_of(epochs, "range", **replaced).replace(before, f"{seen}\n        {before}")

    script.write_text(text(1000))
    stopped = stop_after(script, tmp_path / "stopped", 21, warm)
    folder = tmp_path / "stopped" / str(stopped.checkpoint)
    steps = json.loads((folder / "state.json").read_text())["steps"]["worker-0"]
    assert steps % 6, "stopped between two epochs"
    before = [
        line.split(" ", 2)
        for rank in range(2)
        for line in (tmp_path / f"seen-{rank}.txt").read_text().splitlines()
    ]
    for path in tmp_path.glob("seen-*.txt"):
        path.unlink()
    script.write_text(text(9))
    gs.resume(tmp_path / "stopped", workers=workers, allow_changed=True)
    after = [
        line.split(" ", 2)
        for rank in range(workers)
        for line in (tmp_path / f"seen-{rank}.txt").read_text().splitlines()
    ]
    used = [(int(epoch), json.loads(x)) for epoch, step, x in before if int(step) < steps]
    used += [(int(epoch), json.loads(x)) for epoch, _, x in after]
    for epoch in range(9):
        numbers = [number for e, x in used if e == epoch for number in x]
        assert len(set(numbers)) == 96, epoch
        # Where workers lack a minibatch for the last round, they repeat one that counts no samples.
        assert 96 <= len(numbers) <= 96 + 8 * 2 * 2, epoch
