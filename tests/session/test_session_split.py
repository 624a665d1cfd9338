"""A split model in a user's own loop, beside the same loop of one process."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError, PeerLostError, ReplicasDifferError
from gradstream.job.files import load_job
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
OPTIONS: dict[str, Any] = {"deadlines": DEADLINES, "checkpoint_every": None}
EXAMPLE = torch.zeros(2, 6, dtype=torch.float64)
State = dict[str, torch.Tensor]


class Net(nn.Module):
    """A network with running statistics, tied and frozen weights, a residual connection and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh())
        self.middle = nn.Linear(9, 9)
        self.again = nn.Linear(9, 9)
        self.again.weight = self.middle.weight
        self.fixed = nn.Linear(9, 9).requires_grad_(False)
        self.head, self.side = nn.Linear(9, 4), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        hidden = torch.tanh(self.fixed(hidden + torch.relu(self.middle(hidden))))
        return self.head(self.again(hidden)), self.side(hidden)


def filled(module: nn.Module) -> nn.Module:
    """The module in float64, with values that need no generator: threads share torch's."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.5 * torch.sin(numbers * 1.7 + number)).view(parameter.shape))
    return module


def build() -> nn.Module:
    return filled(Net())


SCRIPT = """
import json, sys
import torch
from torch import nn
import gradstream

session = gradstream.join("allreduce", checkpoint_every=None, run_dir=sys.argv[1] if len(sys.argv) > 1 else None)
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(64, 8).double(), torch.randint(0, 4, (64,)))

def build():
    layers = [nn.Linear(8, 64, bias=False), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 4)).double()

model = session.split(build, torch.zeros(2, 8), into=2)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
for epoch in range(2):
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        session.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
session.close()
if session.is_main:
    print("losses", json.dumps(losses))
"""


def wide() -> nn.Module:
    """A network whose first layer is most of it, so that it is divided."""
    return filled(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2)))


class Spare(nn.Module):
    """A network whose first layer makes one of its outputs, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.body, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        spare = self.spare(x)
        return {"head": self.head(torch.tanh(self.body(x))), "spare": spare}


class Undecided(nn.Module):
    """A network whose control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x) if x.sum() > 0 else x)
        return result


def batches(count: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for number in range(count):
        x = torch.randn(5 + number % 2, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 4, (len(x),), generator=generator)


def trained(session: gs.Session, into: int) -> tuple[State, list[float]]:
    """A loop with accumulation, clipping and evaluation. Returns the part's state, and the figures of the loop."""
    model = session.split(build, EXAMPLE, into=into)
    trainer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for number, (x, y) in enumerate(batches()):
        head, side = model(x)
        loss = nn.functional.cross_entropy(head, y) + (side**2).mean() / 7
        loss.backward()
        if number % 2:
            losses.append(float(session.clip_grad_norm_(model.parameters(), 0.5)))
            trainer.step()
            trainer.zero_grad()
        model.eval()
        losses += [float(loss.detach()), float(model(x)[0].detach().sum())]
        model.train()
    session.close()
    return {name: one.detach().clone() for name, one in model.state_dict().items()}, losses


@pytest.mark.parametrize(("into", "strategy"), [(2, "synchronous"), (3, "allreduce")])
def test_a_loop_of_a_split_model_trains_as_the_loop_of_the_whole(into: int, strategy: str) -> None:
    whole, losses = trained(gs.join(), 1)
    parts = loop_in_threads(lambda session: trained(session, into), into, strategy=strategy, **OPTIONS)
    found: State = {}
    for state, mine in parts:
        assert torch.tensor(mine).sub(torch.tensor(losses)).abs().max() < 1e-12
        found |= state
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (found[name] - tensor).abs().max() < 1e-12, name


QUICK: dict[str, Any] = {"deadlines": gs.Deadlines(join_s=1, silence_s=1, lease_s=1, retry_s=1)}
"""For a loop that is refused before its processes join: the coordinator waits for them."""


def in_two(loop: Callable[[gs.Session], Any], **options: Any) -> list[Any]:
    return loop_in_threads(loop, 2, **{"strategy": "allreduce", **OPTIONS, **options})


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def test_parameters_that_no_loss_uses_have_no_gradient() -> None:
    def loop(session: gs.Session) -> dict[str, bool]:
        model = session.split(lambda: filled(Spare()), EXAMPLE, into=session.world_size)
        backward(model(next(batches())[0])["head"].sum())
        return {name: p.grad is None for name, p in model.named_parameters()}

    one, other = in_two(loop)
    assert {**one, **other} == loop(gs.join())
    assert set(one.values()) | set(other.values()) == {True, False}


def test_a_divided_layer_trains_by_optimizers_that_step_each_element() -> None:
    def loop(session: gs.Session, kind: Any = torch.optim.Adam) -> list[float]:
        model = session.split(wide, EXAMPLE, into=session.world_size)
        trainer, losses = kind(model.parameters(), lr=0.05), []
        for x, y in batches():
            loss = nn.functional.cross_entropy(model(x), y % 2)
            losses.append(float(loss.detach()))
            trainer.zero_grad(set_to_none=False)
            backward(loss)
            trainer.step()
        return losses

    for losses in in_two(loop):
        assert torch.tensor(losses).sub(torch.tensor(loop(gs.join()))).abs().max() < 1e-12
    with pytest.raises(ConfigError, match=r"'0.bias' is divided .* Adafactor may need all of it"):
        in_two(lambda session: loop(session, torch.optim.Adafactor))


def test_activations_of_training_may_travel_in_two_bytes() -> None:
    def loop(session: gs.Session, dtype: str | None) -> list[float]:
        model = session.split(
            lambda: build().float(), EXAMPLE.float(), into=session.world_size, pipeline_dtype=dtype
        )
        trainer, losses = torch.optim.Adam(model.parameters(), lr=0.01), list[float]()
        for x, y in batches(12):
            if not losses:
                losses.append(float(model.eval()(x.float())[0].detach().sum()))
            loss = nn.functional.cross_entropy(model.train()(x.float())[0], y)
            losses.append(float(loss.detach()))
            trainer.zero_grad()
            backward(loss)
            trainer.step()
        return losses

    exact = torch.tensor(loop(gs.join(), None))
    (first, *curve), other = in_two(lambda session: loop(session, "bfloat16"))
    assert [first, *curve] == other
    assert abs(first - exact[0]) < 1e-5, "an evaluation is not rounded"
    assert 1e-5 < (torch.tensor(curve) - exact[1:]).abs().max() < 0.02


def test_activations_that_are_not_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.float64, and only torch\.float32"):
        in_two(lambda session: session.split(build, EXAMPLE, into=2, pipeline_dtype="float16"), **QUICK)


def other_inputs(session: gs.Session, model: Any, x: torch.Tensor) -> None:
    model(x + session.rank)


def other_targets(session: gs.Session, model: Any, x: torch.Tensor) -> None:
    backward(((model(x)[0] - session.rank) ** 2).mean())


def evaluation_in_one(session: gs.Session, model: Any, x: torch.Tensor) -> None:
    if session.is_main:
        model(x)


def backward_in_one(session: gs.Session, model: Any, x: torch.Tensor) -> None:
    loss = model(x)[0].mean()
    if session.is_main:
        backward(loss)
    model(x)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (other_inputs, "different inputs"),
        (other_targets, "different gradients of its output"),
        (evaluation_in_one, "does (forward|close), and part . (forward|close): .*session.is_main"),
        (backward_in_one, "does (forward|backward), and part . (forward|backward)"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_processes_that_differ_are_found(act: Callable[..., None], message: str) -> None:
    def loop(session: gs.Session) -> None:
        act(session, session.split(build, EXAMPLE, into=2), next(batches())[0])
        session.close()

    with pytest.raises(ReplicasDifferError, match=message):
        in_two(loop)


def clipped(model: Any, x: torch.Tensor) -> None:
    trainer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model(x)[0].mean())
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    trainer.step()


def stepped_before(model: Any, x: torch.Tensor) -> None:
    loss = model(x)[0].mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    backward(loss)


def twice(model: Any, x: torch.Tensor) -> None:
    loss = model(x)[0].mean()
    loss.backward(retain_graph=True)
    loss.backward()


def cast(model: Any, x: torch.Tensor) -> None:
    model.float()(x)


def second_order(model: Any, x: torch.Tensor) -> None:
    model(x.requires_grad_())


def searched(model: Any, x: torch.Tensor) -> None:
    trainer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters())
    trainer.step(lambda: float(model(x)[0].mean()))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (clipped, r"session\.clip_grad_norm_"),
        (stepped_before, "changed between a forward pass and its backward"),
        (twice, "for the second time"),
        (cast, "other memory"),
        (second_order, "an input requires a gradient"),
        (searched, "LBFGS"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_parts_cannot_follow_is_refused(act: Callable[..., None], message: str) -> None:
    def loop(session: gs.Session) -> None:
        act(session.split(build, EXAMPLE, into=2), next(batches())[0])

    with pytest.raises(ConfigError, match=message):
        in_two(loop)


@pytest.mark.parametrize(
    ("made", "into", "options", "message"),
    [
        (build, 3, {}, r"into=3\) in a session of 2 processes"),
        (build(), 2, {}, "got a Net; expected a function"),
        (build, 2, {"checkpoint_every": "10min"}, "checkpoint_every=None"),
        (build, 2, {"strategy": "downpour"}, "under Downpour"),
        (lambda: Undecided().double(), 2, {}, r"test_session_split\.py:\d+: .*control flow"),
    ],
)
def test_a_session_that_cannot_split_says_so(made: Any, into: int, options: Any, message: str) -> None:
    def loop(session: gs.Session) -> None:
        session.split(made, EXAMPLE, into=into)

    with pytest.raises(ConfigError, match=message):
        in_two(loop, **{**QUICK, **options})


@pytest.mark.parametrize("by", ["gradstream", "torchrun"])
def test_a_script_trains_in_two_processes_as_in_one(by: str, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    with torch.random.fork_rng():
        whole = runpy.run_path(str(script))
    words = ["-m", "gradstream", "train", str(script), "--workers", "2", "--run-dir", str(run_dir)]
    if by == "torchrun":
        place = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*place, str(script), str(run_dir)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(re.findall(r"losses (\[.*\])", done.stdout + done.stderr)[0])
    assert torch.tensor(losses).sub(torch.tensor(whole["losses"])).abs().max() < 1e-12
    final = load_file(run_dir / "checkpoints" / "final" / "model.safetensors")
    state = whole["model"].state_dict()
    assert final.keys() == state.keys()
    for name, tensor in state.items():
        assert (final[name] - tensor).abs().max() < 1e-12, name


DYING = """
import os, signal, sys
import torch
from torch import nn
import gradstream
session = gradstream.join(checkpoint_every=None, deadlines=gradstream.Deadlines(lease_s=2, retry_s=1))
model = session.split(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), torch.zeros(2, 4), into=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 3 and session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_part_that_is_killed_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    with pytest.raises(PeerLostError) as caught:
        gs.train(load_job(str(tmp_path / "dying.py")))
    assert caught.value.peer == "worker-1"
