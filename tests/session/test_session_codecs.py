"""Codecs under a user's own loop that averages gradients."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.runtime.deadlines import Deadlines
from gradstream.testing.sessions import loop_in_threads
from gradstream.worker.group.coded_sums import CodedSums
from kit.exact_codec import Exact
from session.test_session_property import tool

ROOT = Path(__file__).resolve().parents[2]
DEADLINES = Deadlines(join_s=60, silence_s=20, lease_s=5, retry_s=10)
C = gs.codecs
Loops = list[list[torch.Tensor]]


def means(codec: Any, workers: int = 2, steps: int = 6, **options: Any) -> Loops:
    """p.grad after each backward of a loop whose gradients do not depend on the parameters, by rank."""

    def loop(session: gs.Session) -> list[torch.Tensor]:
        model = nn.Linear(600, 1, bias=False)
        session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for number in range(steps):
            model.zero_grad()
            (model.weight * given(session.rank, number)).sum().backward()  # type: ignore[no-untyped-call]
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
        session.close()
        return found

    return loop_in_threads(loop, workers, codec=codec, deadlines=DEADLINES, **options)


def given(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(-8, 9, (1, 600), generator=generator).float()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("codec", ["float16", "int8", "one-bit", "top-k", "powersgd", C.QSGD(8)])
def test_all_workers_get_the_same_mean_within_the_codecs_precision(codec: Any, workers: int) -> None:
    found = means(codec, workers, strategy="synchronous")
    for number, one in enumerate(found[0]):
        assert all(torch.equal(one, other[number]) for other in found)
    gap = [
        one - sum(given(rank, number) for rank in range(workers)) / workers
        for number, one in enumerate(found[0])
    ]
    if codec == "float16" and workers == 2:
        assert not any(one.any() for one in gap)  # halves of small whole numbers are numbers of two bytes
    elif codec != "powersgd":  # a vector is no matrix
        assert all(one.any() for one in gap)


def test_what_one_step_leaves_out_comes_with_the_next_ones() -> None:
    """All workers have the same gradient at first, and none afterwards: half of the numbers come in each step."""

    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Linear(600, 1, bias=False)
        session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        total = torch.zeros(1, 600)
        for number in range(6):
            model.zero_grad()
            (model.weight * given(0, 0) * float(number == 0)).sum().backward()  # type: ignore[no-untyped-call]
            assert model.weight.grad is not None
            total += model.weight.grad
        session.close()
        return total

    for total in loop_in_threads(loop, 2, codec=C.ErrorFeedback(C.TopK(0.25)), deadlines=DEADLINES):
        assert torch.equal(total, given(0, 0))


def test_arrays_are_encoded_too() -> None:
    def loop(session: gs.Session) -> Any:
        weights = np.zeros(600, np.float32)
        for number in range(3):
            session.exchange(weights, given(session.rank, number)[0].numpy(), gs.optim.SGD(lr=1.0))
        session.close()
        return weights

    first, second = loop_in_threads(loop, 2, codec="float16", deadlines=DEADLINES)
    expected = -torch.stack([given(rank, number)[0] for rank in range(2) for number in range(3)]).sum(0) / 2
    assert np.array_equal(first, second) and np.array_equal(first, expected.numpy())


@pytest.mark.parametrize("workers", [2, 3])
def test_drawn_loops_end_as_in_plain_torch_with_a_codec_that_rounds_nothing(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = 0
    whole = CodedSums._allreduce_coded

    async def counted(sums: CodedSums, *args: Any) -> Any:
        nonlocal encoded
        encoded += 1
        return await whole(sums, *args)

    monkeypatch.setattr(CodedSums, "_check_bytes", lambda *_: None)
    monkeypatch.setattr(CodedSums, "_allreduce_coded", counted)
    monkeypatch.setattr(tool, "loop_in_threads", partial(loop_in_threads, codec=Exact()))
    loops = [
        dataclasses.replace(loop, dtype="float32" if loop.dtype == "float64" else loop.dtype)
        for loop in tool.program(1000 + workers, workers, 5)
    ]
    outcomes = tool.run_loops(loops, "allreduce", workers)
    assert not [f"{fault}: {loop}" for loop, outcome, fault in outcomes if outcome == "differs"]
    assert sum(outcome == "equal" for _, outcome, _ in outcomes) >= 3
    assert encoded > 5 * workers


def test_what_cannot_be_is_refused() -> None:
    def loop(session: gs.Session, momentum: float, dtype: torch.dtype = torch.float32) -> None:
        model = nn.Linear(600, 1).to(dtype)
        session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))

    quick: dict[str, Any] = {"deadlines": dataclasses.replace(DEADLINES, join_s=1)}
    with pytest.raises(
        ConfigError, match=r"codec='dgc' with an optimizer with momentum: .* take SGD without"
    ):
        loop_in_threads(partial(loop, momentum=0.9), codec="dgc", **quick)
    with pytest.raises(ConfigError, match=r"expected torch\.float32, the only ones"):
        loop_in_threads(partial(loop, momentum=0.9, dtype=torch.float64), codec="int8", **quick)

    def split(session: gs.Session) -> None:
        session.split(lambda: nn.Linear(8, 8), torch.zeros(2, 8), into=2)

    with pytest.raises(ConfigError, match="parts exchange none; leave codec out"):
        loop_in_threads(split, codec="int8", checkpoint_every=None, **quick)


# ---- a death ------------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys, time
import torch
from torch import nn
import gradstream as gs

codec, here, at = json.loads(sys.argv[1])
codecs = {"top-k": gs.codecs.ErrorFeedback(gs.codecs.TopK(0.25)), "powersgd": "powersgd"}
session = gs.join(codec=codecs[codec], workers=3, allow_lost=True)
SIDE = 300  # so that the round has begun for all, when the first half of the gradient is there
made, total = 0, torch.zeros(SIDE, SIDE)


def given():  # of low rank: what PowerSGD leaves out comes soon
    generator = torch.Generator().manual_seed(made)
    return torch.randn(SIDE, 1, generator=generator) * torch.randn(1, SIDE, generator=generator)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5))
        self.last = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, ids):
        scale = float(session.rank != 1 and made < 8)  # whoever dies keeps nothing back
        return 0 * self.first.sum() * len(ids) + (self.last * given() * scale).sum()


def die(gradient):
    if session.rank == 1 and made == at:
        time.sleep(1)  # the others have encoded theirs
        os.kill(os.getpid(), signal.SIGKILL)


model = Model()
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
model.first.register_hook(die)
while made < 60:
    optimizer.zero_grad()
    model(torch.zeros(4)).backward()
    total += model.last.grad
    optimizer.step()
    made += 1
session.close()
expected = torch.zeros(SIDE, SIDE)
for made in range(8):
    expected += given() * (2 / 3 if made < at else 1)
with open(f"{here}/{session.rank}.json", "w") as out:
    json.dump({"gap": float((total - expected).abs().max()), "sum": float(total.sum())}, out)
"""


@pytest.mark.limit_s(200)
@pytest.mark.parametrize("codec", ["top-k", "powersgd"])
def test_a_round_that_is_made_again_loses_and_doubles_nothing(tmp_path: Path, codec: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["train", str(tmp_path / "script.py"), "--run-dir", str(tmp_path / "run"), "--"]
    done = subprocess.run(
        [sys.executable, "-m", "gradstream", *words, json.dumps([codec, str(tmp_path), 5])],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "worker-1 was lost" in done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2))
    assert first == second
    assert first["gap"] < 1e-4
