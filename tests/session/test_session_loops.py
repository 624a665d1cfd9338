"""Loops of a user's own on real endpoints, in threads of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.run.node_spec import NodeSpec
from gradstream.testing.sessions import loop_in_threads

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randint(-2, 3, (64, 5), generator=GENERATOR).double()
TARGETS = INPUTS @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [3.0]], dtype=torch.float64)
DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)

Parameters = dict[str, torch.Tensor]


def train(
    session: gs.Session,
    *,
    batch_size: int = 8,
    epochs: int = 3,
    accumulate: int = 1,
    optimizer: str = "SGD",
    num_samples: int = 64,
    split: bool = False,
    **options: Any,
) -> Parameters:
    """An ordinary loop, with the five lines of a session in it."""
    model = nn.Linear(5, 1).double()
    if session.rank == 0:
        nn.init.constant_(model.weight, 0.5)  # those of others are not asked for
        nn.init.zeros_(model.bias)
    made = getattr(torch.optim, optimizer)(model.parameters(), **({"lr": 1 / 64} | options))
    data = TensorDataset(INPUTS[:num_samples], TARGETS[:num_samples])
    loader = session.shard(DataLoader(data, batch_size=batch_size), split=split)
    wrapped, made = session.wrap(model, made)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(wrapped(x), y) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            if (number + 1) % accumulate == 0:
                made.step()
                made.zero_grad()
    session.close()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def alone(**options: Any) -> Parameters:
    return train(gs.Session(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "AdamW", "lr": 0.05},
        {"num_samples": 60},  # the last round of an epoch has 8 samples of one and 4 of the other
        {"num_samples": 56},  # ... has samples of one worker only
    ],
)
def test_two_workers_are_one_process_with_the_joined_batch(options: dict[str, Any]) -> None:
    both = loop_in_threads(lambda session: train(session, **options))
    one = alone(**{"batch_size": 16, **options})
    for name, parameter in one.items():
        assert torch.equal(both[0][name], both[1][name])
        torch.testing.assert_close(both[0][name], parameter, rtol=1e-9, atol=1e-12)


def test_split_minibatches_make_the_steps_of_one_process() -> None:
    options = {"batch_size": 9, "momentum": 0.9, "num_samples": 60}  # parts of 5 and 4, the last of 3 and 3
    both = loop_in_threads(lambda session: train(session, split=True, **options))  # type: ignore[arg-type]
    one = alone(**options)
    for name, parameter in one.items():
        torch.testing.assert_close(both[1][name], parameter, rtol=1e-9, atol=1e-12)


def test_one_step_whose_sums_are_exact_is_bit_equal() -> None:
    both = loop_in_threads(lambda session: train(session, batch_size=32, epochs=1))
    one = alone(batch_size=64, epochs=1)
    assert all(torch.equal(both[0][name], one[name]) for name in one)


def test_accumulation_counts_the_samples_of_all_its_forward_passes() -> None:
    seen: list[int] = []

    def loop(session: gs.Session) -> Parameters:
        taken = train(session, batch_size=4, accumulate=2, epochs=2)
        seen.append(session._connection.bridge.samples)  # type: ignore[attr-defined]
        return taken

    both = loop_in_threads(loop)
    assert seen == [64, 64]  # 2 epochs, half of 64 samples each
    one = alone(batch_size=16, epochs=2)
    torch.testing.assert_close(both[0]["weight"], one["weight"], rtol=1e-9, atol=1e-12)


def test_groups_of_parameters_have_options_of_their_own() -> None:
    def loop(session: gs.Session) -> Parameters:
        model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 1)).double()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.05}]
        made: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        loader = session.shard(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16), split=True)
        _, made = session.wrap(model, made)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
        for _ in range(3):
            for x, y in loader:
                made.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                made.step()
            scheduler.step()
        session.close()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    both = loop_in_threads(loop, chunk_elems=64)
    for name, parameter in loop(gs.Session()).items():
        torch.testing.assert_close(both[0][name], parameter, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("servers", [1, 2])
def test_downpour_comes_to_the_same_place_and_ends_the_same_for_all(servers: int) -> None:
    both = loop_in_threads(
        lambda session: train(session, epochs=40), strategy="downpour", servers=servers, chunk_elems=64
    )
    assert torch.equal(both[0]["weight"], both[1]["weight"])
    torch.testing.assert_close(
        both[0]["weight"], torch.tensor([[1.0, -2.0, 0.5, 0.0, 3.0]]).double(), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("strategy", ["allreduce", gs.Downpour(push_every=3, fetch_every=2)])
def test_workers_with_different_numbers_of_steps_end_together(strategy: Any) -> None:
    both = loop_in_threads(
        lambda session: train(session, epochs=1 + 2 * session.rank), workers=3, strategy=strategy
    )
    assert torch.equal(both[0]["weight"], both[2]["weight"])


def test_evaluation_shows_the_servers_parameters_and_goes_back() -> None:
    def loop(session: gs.Session) -> bool:
        model = nn.Linear(2, 1)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            own = model.weight.detach().clone()
            with session.evaluation():
                common = model.weight.detach().clone()
            assert torch.equal(model.weight, own)
            assert session.world_size == 1 or torch.equal(common, own)
        session.close()
        with session.evaluation():
            return bool(torch.isfinite(model.weight).all())

    assert loop_in_threads(loop) == [True, True]


def test_running_means_are_averaged_by_samples_at_the_end() -> None:
    def loop(session: gs.Session) -> tuple[torch.Tensor, int]:
        model = nn.BatchNorm1d(1, momentum=1.0)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0001))
        for _ in range(1 + session.rank):  # 6 samples around 0; 2 x 3 around 1
            size = 6 if session.rank == 0 else 3
            model(session.rank + torch.linspace(-1, 1, size)[:, None]).sum().backward()
            optimizer.step()
        assert float(model.running_mean) == pytest.approx(session.rank, abs=1e-6)  # type: ignore[arg-type]
        session.close()
        assert model.running_mean is not None and model.num_batches_tracked is not None
        return model.running_mean.clone(), int(model.num_batches_tracked)

    both = loop_in_threads(loop)
    assert both[0] == both[1]
    assert float(both[0][0]) == pytest.approx(0.5)
    assert both[0][1] == 2


def test_numpy_arrays_by_exchange() -> None:
    x, y = INPUTS.numpy(), TARGETS.numpy()[:, 0]

    def loop(session: gs.Session, size: int = 8) -> Any:
        w = np.zeros(5)
        for _ in range(3):
            batches = [slice(start, start + size) for start in range(0, 64, size)]
            for batch in session.shard(batches):
                residual = x[batch] @ w - y[batch]
                session.exchange(
                    w, residual @ x[batch] / len(residual), gs.optim.SGD(lr=1 / 16), samples=len(residual)
                )
        session.close()
        return w

    both = loop_in_threads(loop)
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_allclose(both[0], loop(gs.Session(), 16), rtol=1e-9)


def test_a_step_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps once read the run's specification anew, twice each: 4 ms, more than the rest of a small step."""
    reads, read = [0], NodeSpec.read

    def counted(path: Path) -> NodeSpec:
        reads[0] += 1
        return read(path)

    def loop(session: gs.Session) -> list[int]:
        model = nn.Linear(5, 1, dtype=INPUTS.dtype)
        model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        counts = []
        for _ in range(3):
            optimizer.zero_grad()
            model(INPUTS[:8]).square().mean().backward()
            optimizer.step()
            counts.append(reads[0])
        return counts

    monkeypatch.setattr(NodeSpec, "read", counted)
    counts = loop_in_threads(loop, workers=1)[0]
    assert counts[0] > 0
    assert counts[0] == counts[-1]


# ---- failures ---------------------------------------------------------------------------


def test_an_error_in_one_loop_ends_all_and_names_it() -> None:
    heard: list[BaseException] = []

    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for number in range(50):
                if session.rank == 1 and number == 3:
                    raise LookupError("a fault of mine")
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
        except gs.errors.UserCodeError as error:
            heard.append(error)
            raise

    with pytest.raises(LookupError, match="a fault of mine"):
        loop_in_threads(loop, deadlines=DEADLINES)
    (told,) = heard
    assert "worker-1: the script raised LookupError: a fault of mine" in str(told)


def test_a_gradient_that_is_not_finite_is_refused_by_name() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.full((4, 2), float("inf"))).sum().backward()
        optimizer.step()

    with pytest.raises(gs.errors.GradientError, match="clip the gradient"):
        loop_in_threads(loop, deadlines=DEADLINES)


def test_workers_with_different_rules_or_models_are_refused() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 + 0.1 * session.rank))

    with pytest.raises(gs.errors.RefusedError, match="update rule"):
        loop_in_threads(loop, deadlines=gs.Deadlines(join_s=2, lease_s=2))


def test_misuse_is_said() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="expected a torch Module"):
            session.wrap(model.parameters(), optimizer)  # type: ignore[type-var]
        session.wrap(model, optimizer)
        with pytest.raises(ConfigError, match="one run trains one model"):
            session.wrap(model, optimizer)
        with pytest.raises(ConfigError, match="has a PyTorch module"):
            session.exchange(np.zeros(2), np.zeros(2), gs.optim.SGD(lr=0.1))
        with pytest.raises(ConfigError, match="0 or more"):
            session.samples(-1)

    loop_in_threads(loop, deadlines=DEADLINES)
