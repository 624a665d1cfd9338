"""Buffers of a loop's own modules, of any kind: carried through `wrap` and `close`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import gradstream as gs
from gradstream.run.result import FINAL_MODEL
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
STRATEGIES = ("allreduce", "downpour", "diloco", "local-sgd", "gossip")

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Sparse", "ignore:ComplexHalf")


def mask() -> torch.Tensor:
    return torch.full((3, 3), float("-inf")).triu(1)


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "mask": mask,
    "half mask": lambda: mask().half(),
    "bfloat16": lambda: torch.ones(3).bfloat16() / 3,
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.polar(torch.ones(3), torch.arange(3.0)),
    "complex, double": lambda: torch.polar(torch.ones(3).double(), torch.arange(3.0).double()),
    "expanded": lambda: torch.tensor(0.1).expand(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "bool": lambda: torch.tensor([True, False]),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.1, 3, torch.qint8),
}


def train(session: gs.Session, model: nn.Module, batches: int = 2) -> None:
    """Of 3 workers, one has no minibatch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(4 * batches, 4, generator=torch.Generator().manual_seed(0))
    loader = session.shard(torch.utils.data.DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    _, optimizer = session.wrap(model, optimizer)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    session.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_constant_buffers_of_every_kind_stay_what_they_are(strategy: str) -> None:
    def loop(session: gs.Session) -> nn.Module:
        model = nn.Linear(4, 1)
        for kind, make in ODD.items():
            for keep in (True, False):
                name = f"{kind.replace(',', '')}, {'kept' if keep else 'not kept'}"
                model.register_buffer(name, make(), persistent=keep)
        train(session, model)
        return model

    for model in loop_in_threads(loop, workers=3, strategy=strategy, deadlines=DEADLINES):
        for name, buffer in model.named_buffers():
            before = next(
                make() for kind, make in ODD.items() if name.startswith(kind.replace(",", "") + ", ")
            )
            assert str(buffer) == str(before), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_of_a_job_stays_what_it_is_where_a_worker_has_no_samples(strategy: str) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 1)
        model.register_buffer("mask", mask())
        model.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        return model

    data = torch.ones(8, 4).numpy(), torch.ones(8, 1).numpy()
    model = gs.from_torch(build, nn.functional.mse_loss)
    run = gs.simulate(model, data, strategy=strategy, workers=3, batch_size=4, epochs=1)
    assert run.parameters["mask"].tolist() == mask().tolist()
    assert run.parameters["turns"].dtype == "complex64"


class Seen(nn.Linear):
    """Keeps what it has seen, and the number of it in a buffer that comes into being on the way."""

    seen: torch.Tensor
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x[:, 0].detach()])
        self.last = x.detach().mean()
        return super().forward(x)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `loop_in_threads` keeps its run."""

    class Kept:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> str:
            return str(tmp_path)

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Kept)
    return tmp_path / "run"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_whose_shapes_differ_are_those_of_the_first_worker(strategy: str, run_dir: Path) -> None:
    def loop(session: gs.Session) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Seen()
        train(session, model, batches=5)  # 3 of one worker and 2 of the other, with a repeat in rounds
        return dict(model.state_dict())

    first, second = loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES, checkpoint_every=1)
    assert first["seen"].shape == (12,)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    kept = load_file(run_dir / FINAL_MODEL)
    assert kept.keys() == first.keys()
    assert all(torch.equal(torch.from_numpy(kept[name]), value) for name, value in first.items())
