from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradstream as gs
from gradstream.errors import ClosedError, ConfigError, GradientError, UserCodeError
from gradstream.job.overrides import optimizer_of_text
from gradstream.session.arrays import ArrayBinding
from gradstream.session.binding import ModuleBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart, length_of
from gradstream.session.optimizer import DistributedOptimizer
from gradstream.session.rules import rule_of
from gradstream.worker.loop import Round

Numbers = np.ndarray[Any, Any]


def linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.zero_()
    return model


# ---- update rules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    ],
)
def test_the_servers_rule_does_what_the_optimizer_does(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = nn.Parameter(torch.randn(7, generator=generator))
    ours = theirs.detach().clone()
    optimizer = make([theirs])
    rule, _ = optimizer_of_text(rule_of(optimizer).text([]))  # as it travels
    state = {name: torch.full_like(ours, rule.state_init) for name in rule.state_names}
    for step in range(1, 5):
        optimizer.param_groups[0]["lr"] = 0.1 / step  # as a scheduler would
        theirs.grad = torch.randn(7, generator=generator)
        rule.apply(ours, theirs.grad.clone(), state, lr=0.1 / step, step=step)
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda p: torch.optim.RMSprop(p), "use one of torch.optim.SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay=0.1"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}]),
            "must be the same for all",
        ),
        (lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.0}, {"params": p[1:]}]), "group 0 has lr=0"),
    ],
)
def test_an_optimizer_without_a_rule_is_refused_by_name(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        rule_of(make(list(linear().parameters())))


def test_a_rule_from_a_peer_is_one_of_ours() -> None:
    for text in ('{"class": "os:system", "fields": {}}', "{}", "nonsense"):
        with pytest.raises(ConfigError):
            optimizer_of_text(text)


# ---- the optimizer's face ---------------------------------------------------------------


def wrapped(**options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, DistributedOptimizer, list[float]]:
    model, rates = linear(), list[float]()
    inner = torch.optim.SGD(model.parameters(), lr=0.5, **options)
    optimizer = DistributedOptimizer(inner, rule_of(inner), lambda lr, loss: rates.append(lr))
    return model, inner, optimizer, rates


def test_schedulers_of_either_optimizer_set_the_rate_of_the_next_step(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, inner, optimizer, rates = wrapped()
    del model
    before = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1 / (1 + epoch))
    after = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    before.step()
    optimizer.step()
    after.step()
    optimizer.step()
    assert rates == [0.5, 0.25, 0.125]
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_closure_is_called_and_its_loss_returned() -> None:
    model, _, optimizer, rates = wrapped()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 15.0
    assert rates == [0.5]
    assert model.weight.grad is not None


def test_zero_grad_and_state_dict_are_torchs() -> None:
    model, inner, optimizer, _ = wrapped(momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None] == [0, 0]
    optimizer.zero_grad()
    assert not [p for p in model.parameters() if p.grad is not None]
    saved = optimizer.state_dict()
    assert saved == inner.state_dict()
    optimizer.param_groups[0]["lr"] = 3.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_what_the_servers_could_not_follow_is_refused() -> None:
    model, inner, optimizer, _ = wrapped(momentum=0.9)
    with pytest.raises(ConfigError, match="add all parameters before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ConfigError, match="momentum"):
        optimizer.step()
    model(torch.ones(1, 3)).sum().backward()
    inner.param_groups[0]["momentum"] = 0.9
    inner.step()
    with pytest.raises(ConfigError, match="wrap it before its first step"):
        DistributedOptimizer(inner, rule_of(inner), lambda lr, loss: None)
    with pytest.raises(ConfigError, match="load_state_dict"):
        optimizer.load_state_dict(inner.state_dict())


def test_rates_of_groups_change_together() -> None:
    model = linear()
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "lr": 0.2, "weight_decay": 0.5},
    ]
    inner = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    rule = rule_of(inner)
    assert rule.groups == ({}, {"weight_decay": 0.5, "lr_scale": 2.0})
    rates: list[float] = []
    optimizer = DistributedOptimizer(inner, rule, lambda lr, loss: rates.append(lr))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4)
    for _ in range(3):  # from 0
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0, 0.025, 0.05])
    optimizer.param_groups[1]["lr"] = 0.3
    with pytest.raises(ConfigError, match="scale the rates of all groups"):
        optimizer.step()


# ---- parameters -------------------------------------------------------------------------


def test_a_module_is_pointed_at_the_flat_vector_and_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    binding = ModuleBinding(model, [p for p in model.parameters() if p.requires_grad])
    assert [slot.name for slot in binding.layout.slots] == ["embed.weight"]
    flat = torch.zeros(12)
    binding.init(0, flat)
    torch.testing.assert_close(flat.view(4, 3), model.head.weight.detach())
    other = torch.arange(12.0)
    binding.set_parameters(other)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.data_ptr() == other.data_ptr()
    gradient = torch.ones(12)
    binding.copy_gradient(gradient)
    assert float(gradient.abs().sum()) == 0  # none was computed
    assert binding.tree(other)["embed.weight"].shape == (4, 3)


def test_parameters_of_two_dtypes_or_none_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"torch.float32, torch.float64; expected one dtype"):
        ModuleBinding(model, list(model.parameters()))
    with pytest.raises(ConfigError, match="no parameters"):
        ModuleBinding(model, [])


def test_arrays_are_updated_in_place_and_checked() -> None:
    w, b = np.ones((2, 3)), np.zeros(3)
    binding = ArrayBinding((w, b))
    flat = torch.zeros(9, dtype=torch.float64)
    binding.init(0, flat)
    binding.set_parameters(flat * 2)
    assert (w == 2).all()
    binding.set_gradients((w, b))
    with pytest.raises(GradientError, match=r"gradient of 1: got shape \(2,\)"):
        binding.set_gradients((w, np.zeros(2)))
    with pytest.raises(GradientError, match="expected one for each parameter"):
        binding.set_gradients(w)
    with pytest.raises(ConfigError, match="updated in place"):
        binding.check((w.copy(), b))
    with pytest.raises(ConfigError, match="expected a numpy array"):
        ArrayBinding([1.0])


# ---- whose turn it is -------------------------------------------------------------------


class Recorded(ArrayBinding):
    """Arrays, and the order of what happened to them."""

    def __init__(self) -> None:
        super().__init__(np.zeros(2))
        self.story: list[str] = []

    def set_parameters(self, parameters: torch.Tensor) -> None:
        self.story.append(f"show {float(parameters[0])}")

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        self.story.append("take")
        gradient.fill_(7.0)


def round_of(gradient: torch.Tensor) -> Round:
    return Round(gradient, known=lambda turn: None, report=lambda elems: None)


def test_user_and_worker_take_turns() -> None:
    binding = Recorded()
    bridge = LoopBridge(binding)
    turns = []

    def worker() -> None:
        for number in range(3):
            gradient = torch.zeros(2)
            turn = bridge.turn(torch.full((2,), float(number)), round_of(gradient))
            turns.append((turn, gradient.tolist()))
        bridge.finish(torch.full((2,), 9.0), {})
        bridge.over(None)

    thread = threading.Thread(target=worker)
    thread.start()
    bridge.first()
    bridge.step(8, 0.5, math.nan)
    binding.story.append("between")
    bridge.step(4, 0.25, 1.5)
    bridge.end()
    thread.join()
    assert binding.story == ["show 0.0", "take", "show 1.0", "between", "take", "show 2.0", "show 9.0"]
    assert [(turn.samples, turn.lr, gradient) for turn, gradient in turns] == [
        (8, 0.5, [7.0, 7.0]),
        (4, 0.25, [7.0, 7.0]),
        (0, 0.25, [0.0, 0.0]),
    ]
    assert (bridge.batches, bridge.samples) == (2, 12)
    with pytest.raises(ClosedError, match="closed"):
        bridge.step(1, 0.1, math.nan)


def test_what_ends_one_side_reaches_the_other() -> None:
    bridge = LoopBridge(Recorded())
    bridge.over(gs.errors.PeerLostError("worker-1", "is gone"))
    with pytest.raises(gs.errors.PeerLostError, match="worker-1"):
        bridge.first()
    other = LoopBridge(Recorded())
    other.end(UserCodeError("mine"))
    with pytest.raises(UserCodeError, match="mine"):
        other.turn(torch.zeros(2), round_of(torch.zeros(2)))


# ---- data -------------------------------------------------------------------------------


def note(samples: int | None) -> None:
    pass


def deal(data: Any, *, split: bool = False) -> list[Any]:
    return [part_of(data, LoaderPart(rank, 2, 0, split, note)) for rank in range(2)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_minibatches_of_a_loader_are_dealt_in_the_order_of_one_process(
    shuffle: bool, num_workers: int
) -> None:
    data = TensorDataset(torch.arange(23))
    loader = DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=num_workers)
    parts = deal(loader)
    assert [len(part) for part in parts] == [3, 3]
    first, second = ([list(part) for part in parts] for _ in range(2))
    for epoch in (first, second):
        seen = torch.cat([batch[0] for part in epoch for batch in part])
        assert sorted(seen.tolist()) == list(range(23))
    if shuffle:
        assert first[0][0][0].tolist() != second[0][0][0].tolist()  # another order in each epoch
    else:
        assert first[1][0][0].tolist() == [4, 5, 6, 7]
    assert all(isinstance(part, DataLoader) and part.num_workers == num_workers for part in parts)


def test_other_data_is_dealt_sample_by_sample_or_batch_by_batch() -> None:
    assert [part.tolist() for part in deal(np.arange(5))] == [[0, 2, 4], [1, 3]]
    assert [part.tolist() for part in deal(torch.arange(5))] == [[0, 2, 4], [1, 3]]
    assert [[int(x) for (x,) in part] for part in deal(TensorDataset(torch.arange(5)))] == [[0, 2, 4], [1, 3]]
    assert [list(part) for part in deal(["a", "b", "c"])] == [["a", "c"], ["b"]]

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(6))

    assert [[batch.tolist() for batch in part] for part in deal(DataLoader(Stream(), batch_size=2))] == [
        [[0, 1], [4, 5]],
        [[2, 3]],
    ]
    with pytest.raises(ConfigError, match="IterableDataset"):
        deal(Stream())
    with pytest.raises(ConfigError, match="got int"):
        deal(3)


def test_minibatches_can_be_split_instead() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9)), batch_size=4)
    assert [[batch[0].tolist() for batch in part] for part in deal(loader, split=True)] == [
        [[0, 2], [4, 6], [8]],
        [[1, 3], [5, 7]],  # the last minibatch has one sample
    ]
    trees = [{"x": torch.arange(4), "y": (np.arange(4), torch.tensor(7))}]
    (first,), (second,) = (list(part) for part in deal(trees, split=True))
    assert (first["x"].tolist(), second["y"][0].tolist(), int(second["y"][1])) == ([0, 2], [1, 3], 7)
    assert [[row.tolist() for row in part] for part in deal(np.arange(6).reshape(2, 3), split=True)] == [
        [[0, 2], [3, 5]],
        [[1], [4]],
    ]
    assert [list(part) for part in deal([[1, 2, 3], [4, 5]], split=True)] == [[[1, 3], [4]], [[2], [5]]]


def test_a_loader_that_the_user_has_cut_already_is_left_alone() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1), batch_size=2)
    part = part_of(loader, LoaderPart(1, 2, 0, False, note))
    assert part.sampler is loader.sampler
    assert [batch[0].tolist() for batch in part] == [batch[0].tolist() for batch in loader]


def test_samples_are_counted_by_the_first_tensor() -> None:
    assert length_of((3, {"x": [torch.zeros(()), torch.zeros(5, 2)]})) == 5
    assert length_of("text") is None


# ---- alone, and under torchrun ----------------------------------------------------------


def test_alone_everything_is_given_back_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    model, loader = linear(), [1, 2, 3]
    optimizer = torch.optim.RMSprop(model.parameters())
    with gs.join() as session:
        assert (session.rank, session.world_size, session.is_main) == (0, 1, True)
        assert session.wrap(model, optimizer) == (model, optimizer)
        assert session.shard(loader) is loader
        with session.evaluation():
            session.samples(3)
        w: Numbers = np.ones(3)
        assert session.exchange(w, np.full(3, 0.25), gs.optim.SGD(lr=0.5)) is w
        assert w.tolist() == [0.875] * 3
        session.exchange(w, np.full(3, 0.25), gs.optim.SGD(lr=0.25))
        assert w.tolist() == [0.8125] * 3
