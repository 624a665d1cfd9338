"""Runs without servers in real time: processes that are killed and resumed, threads, a user's own loops."""

from __future__ import annotations

import signal
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstream as gs
import gradstream._resume  # the name in the face is the function's
from gradstream._simulate import simulate
from gradstream._train import launch
from gradstream.errors import PeerLostError
from gradstream.job.files import load_job
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.run.result import FINAL_MODEL
from gradstream.strategies import AllReduce
from gradstream.testing.runs import least_squares
from gradstream.testing.sessions import loop_in_threads

resume_module = sys.modules["gradstream._resume"]

JOB = """
import os
import time
from pathlib import Path
import numpy as np
import gradstream as gs

rng = np.random.default_rng(0)
X = rng.standard_normal((120, 300)).astype("float32")
Y = X @ rng.standard_normal(300).astype("float32")

HOLD, calls = Path(__file__).with_name("hold"), 0

def held():
    # One of the workers stands still in its gradient of this number, the other one waits for it in the sum.
    try:
        if calls != int(HOLD.read_text()):
            return False
        os.close(os.open(HOLD.with_suffix(".taken"), os.O_CREAT | os.O_EXCL))
        return True
    except OSError:
        return False

def gradients(p, x, y):
    global calls
    calls += 1
    if held():
        while HOLD.exists():
            time.sleep(0.01)
    error = x @ p["w"] - y
    return float(error @ error) / len(y), {"w": 2 * error @ x / len(y)}

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(300)}, outputs=lambda p, x: x @ p["w"], gradients=gradients
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy="allreduce", workers=2, batch_size=8, steps=STEPS,
        chunk_elems=64, optimizer=gs.optim.Adam(lr=gs.schedules.Cosine(0.05)), checkpoint_every=5,
        deadlines=gs.Deadlines(lease_s=3.0, silence_s=3.0),
    )
"""
STEPS = 50


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "linear.py"
    path.write_text(textwrap.dedent(JOB.replace("STEPS", str(STEPS))))
    return path


class Killer:
    """SIGKILL to some nodes in the middle of a step: a worker stands still in its `step`-th gradient."""

    def __init__(self, cluster: LocalCluster, folder: Path, step: int, victims: list[str]) -> None:
        self._cluster = cluster
        self._hold = folder / "hold"
        self._hold.with_suffix(".taken").unlink(missing_ok=True)
        self._hold.write_text(str(step))
        self._left = 2 * (step - 1)
        self._victims = victims

    def __call__(self, event: Any) -> None:
        self._left -= event["event"] == "step"
        if self._left <= 0 and self._hold.exists():
            for name in self._victims or list(self._cluster.running):
                self._cluster.signal(name, signal.SIGKILL)
            self._hold.unlink()

    def bury(self) -> None:
        """Receives the report of every death, so that the next run does not get it."""
        while self._cluster.message(0.2) is not None or self._cluster.running:
            pass


def test_killed_and_resumed_it_ends_with_the_bytes_of_a_simulation(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node dies at any instant; then a worker alone, whose part the other one computes from then on.

    With two workers a sum has the same bits in either order: shared memory gives those of messages.
    """
    job = load_job(str(job_file))
    expected = simulate(job).parameters["w"].tobytes()
    path = tmp_path / "run"
    path.mkdir()
    with LocalCluster(tmp_path / "logs", node_environment(2)) as warm:
        monkeypatch.setattr(resume_module, "launch", partial(launch, cluster=warm))
        go: Any = partial(launch, plan_run(job, "first"), path, cluster=warm)
        killer = Killer(warm, tmp_path, 17, [])
        with pytest.raises(PeerLostError):
            go(on_event=killer)
        killer.bury()
        go = partial(gs.resume, path)
        killer = Killer(warm, tmp_path, 4, ["worker-0"])
        run = go(on_event=killer)
        killer.bury()
    assert run.parameters["w"].tobytes() == expected
    assert (path / FINAL_MODEL).is_file()
    assert [row["step"] for row in run.history if row["rank"] == 1] == list(range(STEPS))


def test_nodes_as_threads_and_every_way_of_updating_have_the_same_bits(tmp_path: Path) -> None:
    model, data = least_squares(64, 300, whole=False, reduction="mean")
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "steps": 8, "optimizer": gs.optim.Adam(lr=0.01)}
    expected = simulate(model, data, strategy=AllReduce(), **options).parameters["w"].tobytes()
    for sharded in (None, False, True):
        run_dir = tmp_path / str(sharded)
        run = gs.train(
            model, data, strategy=AllReduce(sharded=sharded), run_dir=run_dir, processes=False, **options
        )
        assert run.parameters["w"].tobytes() == expected, sharded


def deep() -> torch.nn.Module:
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(48, 48), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(48, 1))


@pytest.mark.parametrize(("exchange", "accumulate"), [("auto", 2), ("torch", 1)])
def test_buckets_that_leave_during_backprop_change_no_bit(
    exchange: str, accumulate: int, tmp_path: Path
) -> None:
    """About a bucket for each layer, of which each is ready at another time on each worker."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 48, generator=generator).numpy()
    data = gs.from_arrays(x, x.sum(1, keepdims=True))
    found = set()
    for overlap in (True, False):
        run = gs.train(
            gs.from_torch(deep, torch.nn.functional.mse_loss), data, workers=2, batch_size=[20, 12], steps=6,
            strategy=AllReduce(exchange=exchange, overlap=overlap, bucket_mib=0.01), accumulate=accumulate,
            optimizer=gs.optim.Adam(lr=0.01), processes=False, run_dir=tmp_path / str(overlap),
        )  # fmt: skip
        found.add(b"".join(value.tobytes() for value in run.parameters.values()))
    assert len(found) == 1


# ---- loops of a user's own --------------------------------------------------------------------------


def loop(session: gs.Session, *, epochs: int = 3, uneven: int = 0, decay: float = 1.0) -> list[torch.Tensor]:
    """An ordinary loop, with the lines of a session in it. Gives its parameters, and an evaluation's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (64, 5), generator=generator).double()
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [3.0]], dtype=torch.float64)
    module = torch.nn.Linear(5, 1).double()
    if session.rank == 0:
        torch.nn.init.constant_(module.weight, 0.5)  # those of others are not asked for
        torch.nn.init.zeros_(module.bias)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    loader = session.shard(data)
    model, optimizer = session.wrap(module, torch.optim.SGD(module.parameters(), lr=1 / 64, momentum=0.9))
    seen = torch.zeros(0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for _ in range(epochs + uneven * session.rank):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        with session.evaluation():
            seen = module.weight.detach().clone()
    session.close()
    return [module.weight.detach().clone(), module.bias.detach().clone(), seen]


def test_a_loop_of_ones_own_without_servers_is_that_through_a_server() -> None:
    both = loop_in_threads(loop, strategy="allreduce")
    server = loop_in_threads(loop, strategy="synchronous", chunk_elems=64)
    for one, other in zip(both[0], server[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(one, other) for one, other in zip(both[0][:2], both[1][:2], strict=True))
    assert torch.equal(both[0][0], both[0][2])  # an evaluation sees the parameters that all have


def test_loops_that_run_out_at_different_times_end_together() -> None:
    """Those that have no data any more take part without samples, at the rate of those that have.

    The server's weights say what is right.
    """
    uneven = partial(loop, uneven=1, decay=0.5)
    many = loop_in_threads(uneven, workers=3, strategy="allreduce")
    server = loop_in_threads(uneven, workers=3, strategy="synchronous", chunk_elems=64)
    assert torch.equal(many[0][0], many[2][0])
    torch.testing.assert_close(many[0][0], server[0][0], rtol=1e-12, atol=1e-12)
