"""Loops that do what scripts do between two steps, held to plain torch on the joined minibatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import gradstream as gs
from gradstream.errors import GradientError, ReplicasDifferError
from gradstream.session.gradient_vector import GradientWriter
from gradstream.session.gradients import GradientReducer
from gradstream.testing.sessions import loop_in_threads
from late_streams import LateStreams

State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
ROUNDS = 6


def batches(session: gs.Session, workers: int, rounds: int = ROUNDS) -> Iterator[Batch]:
    """A worker's part of every round, of sizes that differ; alone, all parts joined."""
    generator = torch.Generator().manual_seed(5)
    for number in range(rounds):
        parts = []
        for rank in range(workers):
            size = 2 + (number + 2 * rank) % 3
            x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
            parts.append((x, torch.randn(size, 2, generator=generator, dtype=torch.float64)))
        if session.world_size == 1:
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        else:
            yield parts[session.rank]


class Branched(nn.Module):
    """A body, a head, a branch that is taken when asked for, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)
        self.branch = nn.Linear(3, 2)
        self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        out: torch.Tensor = self.head(hidden)
        return out + self.branch(hidden) if branch else out


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def made(session: gs.Session) -> Branched:
    """Of other values on each worker: those of worker 0 count."""
    generator = torch.Generator().manual_seed(session.rank)
    model = Branched().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})


Body = Callable[[gs.Session, Branched, Optimizer, Iterator[Batch]], None]


def unfreezes(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        model.body.requires_grad_(number >= 2)
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


def freezes(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        if number == 3:
            model.body.requires_grad_(False)
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


def loads(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    start = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    for number, (x, y) in enumerate(data):
        if number == 2:
            model.load_state_dict(start)
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


def edits(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    average = copy.deepcopy(model)
    for x, y in data:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        with torch.no_grad():
            model.head.weight.clamp_(-0.2, 0.2)
            model.body.weight.div_(model.body.weight.norm(dim=1, keepdim=True))
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)
        model.head.bias.data.mul_(0.5)
    model.load_state_dict(average.state_dict())


def branches(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x, branch=number % 3 == 1), y))
        optimizer.step()


def clips(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()


def accumulates(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        backward(nn.functional.mse_loss(model(x), y) / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 4 == 1)


def by_hand(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    trained = [*model.body.parameters(), *model.head.parameters()]
    for x, y in data:
        optimizer.zero_grad()
        gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def closes(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    for x, y in data:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss)
            return float(loss)

        optimizer.step(closure)


def schedules(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=ROUNDS)
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        cycle.step()
        optimizer.param_groups[0]["weight_decay"] = 0.1 * number
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)


def adds_a_group(session: gs.Session, model: Branched, optimizer: Optimizer, data: Iterator[Batch]) -> None:
    own = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)  # never wrapped
    for number, (x, y) in enumerate(data):
        if number == 2:
            own.add_param_group({"params": list(model.body.parameters()), "lr": 0.02})
        own.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        own.step()


BODIES: list[Body] = [
    unfreezes, freezes, loads, edits, branches, clips, accumulates, by_hand, closes, schedules, adds_a_group,
]  # fmt: skip


def final(session: gs.Session, body: Body, make: Callable[..., torch.optim.Optimizer], workers: int) -> State:
    model = made(session)
    if body is unfreezes:
        model.body.requires_grad_(False)
    wrapped, optimizer = session.wrap(model, make(model))
    assert wrapped is model
    body(session, model, optimizer, batches(session, workers))
    session.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_a_loop_does_between_steps_is_torchs(
    body: Body, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    workers = 2 if body.__name__ < "d" else 3
    run = partial(final, body=body, make=make, workers=workers)
    alone = run(gs.Session())
    for got in loop_in_threads(run, workers):
        for name, value in alone.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    ["Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop", "ASGD", "Adadelta", "Adamax", "RAdam"],
)
def test_any_optimizer_of_torch_makes_the_steps(kind: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters())  # type: ignore[no-any-return]

    alone = final(gs.Session(), branches, make, 2)
    for got in loop_in_threads(lambda session: final(session, branches, make, 2), strategy="allreduce"):
        for name, value in alone.items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10)


def test_a_gan_has_two_models_and_two_optimizers() -> None:
    def loop(session: gs.Session) -> list[torch.Tensor]:
        torch_seed = torch.Generator().manual_seed(session.rank)
        nets = [nn.Linear(4, 4).double(), nn.Linear(4, 1).double()]
        for parameter in (p for net in nets for p in net.parameters()):
            nn.init.normal_(parameter, generator=torch_seed)
        made = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
        (g, d), (opt_g, opt_d) = session.wrap(nets, made)
        for x, _ in batches(session, 2):
            opt_d.zero_grad()
            backward(nn.functional.softplus(-d(x)).mean() + nn.functional.softplus(d(g(x))).mean())
            opt_d.step()
            opt_g.zero_grad()
            backward(nn.functional.softplus(-d(g(x))).mean())
            opt_g.step()
        session.close()
        return [p.detach().clone() for net in (g, d) for p in net.parameters()]

    alone = loop(gs.Session())
    for got in loop_in_threads(loop, strategy="allreduce"):
        torch.testing.assert_close(got, alone, rtol=1e-9, atol=1e-12)


def test_everything_that_the_model_holds_is_made_equal_at_wrap() -> None:
    class Holding(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.trained = nn.Parameter(torch.full((2,), value))
            self.frozen = nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16), requires_grad=False)
            self.register_buffer("kept", torch.full((2,), int(value)))
            self.register_buffer("passing", torch.full((2,), value), persistent=False)

    def loop(session: gs.Session) -> list[float]:
        model = Holding(1.0 + session.rank)
        session.wrap(model, torch.optim.SGD([model.trained], lr=0.1))
        return [float(tensor[0]) for tensor in (*model.parameters(), *model.buffers())]

    assert loop_in_threads(loop) == [[1.0] * 4] * 2


def test_a_wrapped_model_can_be_copied_and_saved_whole(tmp_path: Path) -> None:
    def loop(session: gs.Session) -> bool:
        model = nn.Linear(4, 2)
        _, optimizer = session.wrap(model, torch.optim.Adam(model.parameters()))
        backward(model(torch.ones(3, 4)).sum())
        optimizer.step()
        path = tmp_path / f"{session.rank}.pt"
        torch.save((model, optimizer), path)
        loaded, again = torch.load(path, weights_only=False)
        copied = copy.deepcopy(model)
        assert again.state_dict()["state"][0]["step"] == 1
        return all(torch.equal(one(torch.eye(4)), model(torch.eye(4))) for one in (loaded, copied))

    assert loop_in_threads(loop) == [True, True]


def test_accumulating_without_sync_makes_one_exchange_for_all() -> None:
    seen: list[int] = []

    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Linear(4, 2).double()
        nn.init.ones_(model.weight)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            x = torch.full((3, 4), float(number + session.rank), dtype=torch.float64)
            if number % 3 < 2:
                with session.no_sync():
                    backward(model(x).sum())
            else:
                backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        session.close()
        if session.world_size > 1:
            seen.append(session._connection.bridge.batches)  # type: ignore[attr-defined]
        return model.weight.detach().clone()

    first, second = loop_in_threads(loop)
    assert torch.equal(first, second)
    assert seen == [3, 3]  # one of them is the hello
    gradients = sum(3.0 * (number + 0.5) for number in range(6))
    torch.testing.assert_close(first[0, 0], torch.tensor(1 - 0.1 * gradients).double())


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "compiled"])
def test_parts_of_a_model_may_be_computed_again_or_compiled(how: str) -> None:
    def loop(session: gs.Session) -> State:
        model = made(session)
        model, optimizer = session.wrap(model, sgd(model))
        whole: Callable[[torch.Tensor], torch.Tensor] = model
        if how == "compiled":
            whole = torch.compile(model, backend="aot_eager")
        else:
            whole = partial(checkpoint, model, use_reentrant=how == "reentrant")
        for x, y in batches(session, 2):
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(whole(x.requires_grad_()), y))
            optimizer.step()
        session.close()
        return dict(model.state_dict())

    alone = loop(gs.Session())
    for got in loop_in_threads(loop):
        for name, value in alone.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_a_repeat_that_is_accumulated_adds_nothing(last: bool) -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        session._progress.samples.note(4)  # type: ignore[attr-defined]
        backward(model(torch.ones(4, 1)).mean())
        optimizer.zero_grad()
        passes = [(4 * (session.rank == 0), 1.0 + 99 * session.rank), (4, 2.0)]
        for samples, inputs in reversed(passes) if last else passes:
            session._progress.samples.note(samples)  # type: ignore[attr-defined]
            with nullcontext() if (inputs == 2) != last else session.no_sync():
                backward(model(torch.full((4, 1), inputs)).mean())
        optimizer.step()
        session.close()
        return model.weight.detach().clone()

    first, second = loop_in_threads(loop)
    assert torch.equal(first, second)
    assert first.item() == pytest.approx(1 - (8 * 3.0 + 4 * 2.0) / 12)


def test_replicas_that_drift_apart_are_found_out() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(4, 2).double()
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            optimizer.zero_grad()
            backward(model(torch.ones(3, 4, dtype=torch.float64)).sum())
            optimizer.step()
            if number == 2 and session.rank == 1:
                with torch.no_grad():
                    model.bias.add_(1e-12)

    with pytest.raises(ReplicasDifferError, match=r"'bias' .*is not the same on all workers"):
        loop_in_threads(loop, deadlines=DEADLINES)


def test_what_only_a_worker_without_samples_went_through_counts_nothing() -> None:
    """A repeated minibatch takes a branch that no other does: its gradient is no gradient."""

    def loop(session: gs.Session) -> State:
        model = made(session)
        _, optimizer = session.wrap(model, sgd(model))
        for number in range(4):
            if number != 2:  # there the gradients of the minibatch before are kept
                optimizer.zero_grad()
            if session.world_size > 1:
                session._progress.samples.note(4 - 4 * session.rank)  # type: ignore[attr-defined]
            backward(model(torch.ones(4, 4).double(), branch=session.rank == 1 or number == 1).sum())
            optimizer.step()
        session.close()
        return dict(model.state_dict())

    first, second = loop_in_threads(loop, strategy="allreduce")
    alone = loop(gs.Session())
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value)


def test_gradients_of_a_device_leave_once_their_copy_is_made() -> None:
    """Copies that are made late: whoever reads the vector before sees NaN, which is found."""
    told: list[int] = []
    streams = LateStreams(late=3)
    bounds = [(0, 70000), (70000, 140000), (140000, 140003)]
    writer = GradientWriter(["a", "b", "c"], bounds, told.append, lambda device: streams)
    vector = torch.zeros(140003)
    writer.begin(vector)
    writer.write(0, torch.full((70000,), 2.0))
    writer.write(2, torch.tensor([1.0, float("inf"), 0.0]))
    assert told == []
    writer.write(1, torch.full((2, 35000), 3.0, dtype=torch.float64))
    assert writer.finish() is vector
    assert writer.broken == {2}
    assert vector[:3].tolist() + vector[-4:].tolist() == [2.0, 2.0, 2.0, 3.0, 0.0, 0.0, 0.0]
    assert streams.pinned == {vector.data_ptr()}
    writer.begin(vector)
    for index in range(3):
        writer.write(index, None)
    assert told[-1] == 140000


def test_loops_that_go_different_ways_are_refused() -> None:
    def loop(session: gs.Session) -> None:
        model = nn.Linear(4, 2)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            backward(model(torch.ones(3, 4)).sum())
            if number != 3 or session.rank == 0:
                optimizer.step()

    with pytest.raises(
        ReplicasDifferError,
        match=r"different numbers of backward passes or steps.*\. If the script does the same on every worker",
    ):
        loop_in_threads(loop, deadlines=DEADLINES)


def test_a_scaler_skips_the_step_of_all_where_one_gradient_overflows() -> None:
    def loop(session: gs.Session) -> tuple[float, float, float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        weights = []
        for number in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 1)
            if number == 1 and session.rank == 1:
                x[0, 0] = float("inf")
            backward(scaler.scale(model(x).sum()))
            scaler.step(optimizer)
            scaler.update()
            weights.append(float(model.weight))
        return weights[0], weights[1], scaler.get_scale()

    for first, second, scale in loop_in_threads(loop):
        assert first == pytest.approx(0.8)
        assert (second, scale) == (first, 2.0)


def test_refusals_say_what_to_do() -> None:
    def sparse(session: gs.Session) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        _, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model(torch.tensor([1, 2])).sum())
        optimizer.step()

    with pytest.raises(GradientError, match="sparse=False"):
        loop_in_threads(sparse, deadlines=DEADLINES)


def test_a_gradient_where_torch_has_none_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above can fail: decay where torch has none."""
    given = GradientReducer._round

    def gives_all(self: GradientReducer, *args: Any) -> list[int]:
        found = given(self, *args)
        for parameter in self._wrapped.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    monkeypatch.setattr(GradientReducer, "_round", gives_all)
    alone = final(gs.Session(), branches, sgd, 2)
    (got, _) = loop_in_threads(lambda session: final(session, branches, sgd, 2))
    assert not torch.allclose(got["never.weight"], alone["never.weight"])
