"""Loops of the user's own that were stopped, in real processes: they go on where they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._train import launch
from gradstream.checkpoint import kept
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.storage import DiskStorage
from gradstream.session.arrays import ArrayBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart
from gradstream.session.node import job as session_job
from gradstream.session.registered import Registered
from gradstream.session.worker_session import WorkerSession
from whole_runs import train

SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn
import gradstream

session = gradstream.join(checkpoint_every=7, keep_last=1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
loader = session.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8), nn.Linear(8, 1))
model[2].weight = model[0].weight  # tied
if not session.resumed:
    model[3].bias.data.fill_(0.5)
model[3].bias.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = session.wrap(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
begun = session.step
try:
    for epoch in range(EPOCHS):
        for x, y in loader:
            if session.skip():
                continue
            if EPOCHS > 100 and session.step >= 20:
                time.sleep(0.1)  # so that whoever stops it comes in time
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    session.close()
    print(f"rank {session.rank}: {begun} to {session.step}")
finally:
    Path(__file__).with_name(f"over-{session.rank}").write_text(str(session.step))
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One forkserver for all runs: what takes time is to import torch."""
    with LocalCluster(tmp_path_factory.mktemp("logs"), node_environment(2)) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _resumes_warm(warm: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gradstream._resume"], "launch", partial(launch, cluster=warm))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(text_of(12))
    return path


def text_of(epochs: int) -> str:
    return SCRIPT.replace("EPOCHS", str(epochs))


def stop_after(script: Path, run_dir: Path, steps: int, cluster: LocalCluster) -> gs.errors.Interrupted:
    """Runs the script, and stops it once worker 0 has made so many steps."""
    made = 0

    def on_event(event: Mapping[str, Any]) -> None:
        nonlocal made
        made += event["event"] == "step" and event["rank"] == 0

    with pytest.raises(gs.errors.Interrupted) as caught:
        train(script, run_dir, cluster, on_event=on_event, stop=lambda: made >= steps)
    return caught.value


@pytest.mark.limit_s(200)
@pytest.mark.parametrize("codec", ["None", "'one-bit'"])
def test_a_loop_that_was_stopped_goes_on_and_ends_with_the_same_bytes(
    script: Path, tmp_path: Path, warm: LocalCluster, codec: str
) -> None:
    def text(epochs: int) -> str:
        return text_of(epochs).replace("join(", f"join(codec={codec}, ")

    script.write_text(text(12))
    whole = train(script, tmp_path / "whole", warm)
    assert whole.summary["samples_accounted"] == 12 * 96
    script.write_text(text(1000))  # it must not be over before it is stopped
    stopped = stop_after(script, tmp_path / "stopped", 20, warm)
    assert stopped.code == 75
    (folder,) = kept(DiskStorage(tmp_path / "stopped"))
    assert folder.folder == stopped.checkpoint
    steps = json.loads((tmp_path / "stopped" / folder.folder / "state.json").read_text())["steps"]
    assert Path("over-0").read_text() == str(steps["worker-0"])  # its `finally` has run

    state = load_file(tmp_path / "stopped" / folder.folder / "model.safetensors")
    assert set(state) == set(whole.parameters)  # frozen and tied ones
    assert state["3.bias"].tolist() == whole.parameters["3.bias"].tolist() == [0.5]

    script.write_text(text(12))
    with pytest.raises(gs.errors.ConfigError, match="resume it with"):
        gs.resume(tmp_path / "stopped", workers=3, allow_changed=True)
    with pytest.raises(gs.errors.ConfigError, match="batch_size=7: this script"):
        gs.resume(tmp_path / "stopped", batch_size=7, allow_changed=True)
    run = gs.resume(tmp_path / "stopped", allow_changed=True)
    assert run.summary["samples_accounted"] == 12 * 96
    finals = [(tmp_path / name / FINAL_MODEL).read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]
    log = (warm.logs / "worker-0.log").read_text()
    assert f"rank 0: {steps['worker-0']} to 72" in log
    assert "lr_scheduler.step() before" not in log


@pytest.mark.limit_s(200)
def test_a_loop_that_trains_locally_goes_on_after_the_steps_of_whole_rounds(
    script: Path, tmp_path: Path, warm: LocalCluster
) -> None:
    def local(epochs: int) -> str:
        text = text_of(epochs).replace("join(", 'join("local-sgd", strategy_options={"every": 3}, ')
        return text.replace("momentum=0.9)", "momentum=0.0)")  # what it keeps is in no checkpoint

    script.write_text(local(12))
    whole = train(script, tmp_path / "whole", warm)
    assert whole.summary["samples_accounted"] == 12 * 96
    script.write_text(local(1000))
    stopped = stop_after(script, tmp_path / "stopped", 8, warm)
    steps = json.loads((tmp_path / "stopped" / str(stopped.checkpoint) / "state.json").read_text())["steps"]
    assert steps["worker-0"] == steps["worker-1"] and steps["worker-0"] % 3 == 0
    script.write_text(local(12))
    run = gs.resume(tmp_path / "stopped", allow_changed=True)
    assert run.summary["samples_accounted"] == 12 * 96
    finals = [(tmp_path / name / FINAL_MODEL).read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]


@dataclass
class Placed:
    """Where a worker stands in a run that goes on from its fifth step."""

    rank: int = 1
    world_size: int = 2
    num_at_first: int = 2

    def steps_before(self) -> int:
        return 5

    def job(self) -> gs.Job:
        return session_job()


def test_a_loop_skips_what_it_has_done_and_one_that_does_not_ask_is_refused() -> None:
    session = WorkerSession(Placed(), seed=0)  # type: ignore[arg-type]
    assert [session.skip() for _ in range(7)] == [True] * 5 + [False] * 2
    assert (session.step, session.resumed) == (5, True)
    silent = WorkerSession(Placed(), seed=0)  # type: ignore[arg-type]
    silent._connection.bridge = LoopBridge(ArrayBinding(np.zeros(1)))
    with pytest.raises(gs.errors.ConfigError, match="was resumed at step 5, but the script begins its loop"):
        silent._step(0.1, 0.0)
    alone = gs.Session()
    assert (alone.step, alone.resumed, alone.skip()) == (0, False, False)


def test_a_registered_loader_continues_by_itself() -> None:
    class Loader:
        taken = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.taken, 9))

        def state_dict(self) -> dict[str, int]:
            return {"taken": self.taken}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.taken = state["taken"]

    before, loader = Registered(), Loader()
    loader.taken = 5
    before.add({"loader": loader})
    session = WorkerSession(Placed(), seed=0)  # type: ignore[arg-type]
    session._registered.load(before.saved())
    session.register(loader=(resumed := Loader()))
    assert (resumed.taken, session.skip()) == (5, False)
    with pytest.raises(gs.errors.ConfigError, match=r"session\.epochs\(n\)"):
        session._progress.use()


def test_the_epoch_of_a_dealt_loader_can_be_named() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
    part = LoaderPart(0, 2, 7, split=False, note=lambda batch: None)
    orders = [[batch[0].tolist() for batch in one] for one in repeat(part_of(loader, part), 3)]
    later = part_of(loader, part)
    later.batch_sampler.set_epoch(2)
    assert [batch[0].tolist() for batch in later] == orders[2] != orders[0]


def test_a_loop_counts_its_epochs_itself(script: Path) -> None:
    with pytest.raises(gs.errors.ConfigError, match="counts its epochs itself"):
        gs.train(load_job(str(script)), checkpoint_every="epoch")
