"""Gradients that a loop writes itself or differentiates again, and statistics that workers would have to join."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
SAMPLES = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def draw(model: nn.Module) -> None:
    """Draws parameters by a generator of their own: the threads of two workers share torch's."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)


class Case:
    """A model and its optimizer. Worker 0 has two thirds of the samples."""

    def __init__(self, session: gs.Session) -> None:
        self.session = session
        cut = 8 if session.world_size > 1 else 12
        self.samples = SAMPLES[8:] if session.rank else SAMPLES[:cut]
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        draw(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        session.wrap(self.model, self.optimizer)

    def loss(self) -> torch.Tensor:
        return self.model(self.samples).square().mean()  # type: ignore[no-any-return]

    def gradients(self, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.loss(), self.parameters, **options)

    def write(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients(), strict=True):
            parameter.grad = change(gradient)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 0.05)


Step = Callable[[Case], object]


def train(session: gs.Session, step: Step) -> torch.Tensor:
    case = Case(session)
    for _ in range(3):
        case.optimizer.zero_grad()
        step(case)
        case.optimizer.step()
    return nn.utils.parameters_to_vector(case.parameters).detach()


def backward(tensor: torch.Tensor, **options: Any) -> None:
    tensor.backward(**options)  # type: ignore[no-untyped-call]


# ---- refused ----------------------------------------------------------------------------


def clips(case: Case) -> None:
    case.write()
    case.clip()


def clips_detached(case: Case) -> None:
    case.write(torch.Tensor.detach)
    nn.utils.clip_grad_value_(case.parameters, 0.01)


def clips_before_it_sets(case: Case) -> None:
    case.write(lambda gradient: gradient.clamp_(-0.01, 0.01))


def replaces_in_a_window(case: Case) -> None:
    with case.session.no_sync():
        backward(case.loss())
    for parameter in case.parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def multiplies_by_the_hessian(case: Case) -> None:
    backward(case.loss(), create_graph=True)
    gradients = [parameter.grad for parameter in case.parameters]
    ones = [torch.ones_like(parameter) for parameter in case.parameters]
    torch.autograd.grad(gradients, case.parameters, ones)  # type: ignore[arg-type]


def penalises(case: Case) -> None:
    backward(case.loss(), create_graph=True)
    backward(torch.stack([p.grad.square().sum() for p in case.parameters if p.grad is not None]).sum())


REFUSED = [
    (clips, "autograd.grad was changed .* loss.backward"),
    (clips_detached, "autograd.grad was changed"),
    (clips_before_it_sets, "autograd.grad was changed"),
    (replaces_in_a_window, "out of no_sync"),
    (multiplies_by_the_hessian, "differentiated after .*create_graph=True.*backward averages"),
    (penalises, "differentiated after"),
]


@pytest.mark.parametrize(("step", "told"), REFUSED)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_would_be_of_each_worker_alone_is_refused(step: Step, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)step 0: .*{told}"):
        loop_in_threads(partial(train, step=step), strategy="allreduce", deadlines=DEADLINES)


@pytest.mark.parametrize("step", [step for step, _ in REFUSED])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_one_worker_has_all_samples_and_does_as_torch(step: Step) -> None:
    (got,) = loop_in_threads(partial(train, step=step), 1, strategy="allreduce", deadlines=DEADLINES)
    torch.testing.assert_close(got, train(gs.Session(), step), rtol=1e-9, atol=1e-12)


# ---- as torch ---------------------------------------------------------------------------


def writes(case: Case) -> None:
    case.write()


def writes_a_multiple(case: Case) -> None:
    case.write(lambda gradient: gradient * 0.5)


def writes_what_it_has_summed(case: Case) -> None:
    case.write(lambda gradient: torch.zeros_like(gradient).add_(gradient).add_(gradient))


def writes_after_a_window_that_it_throws_away(case: Case) -> None:
    with case.session.no_sync():
        backward(case.loss())
    case.optimizer.zero_grad()
    case.write()


def keeps_the_graph(case: Case) -> None:
    backward(case.loss(), create_graph=True)
    case.clip()


def uses_the_remedy(case: Case) -> None:
    first = case.gradients(create_graph=True)
    backward(torch.stack([gradient.sum() for gradient in first]).sum(), inputs=case.parameters)
    case.clip()


def looks_beside(case: Case) -> None:
    """Changes what it has computed by `autograd.grad`, which is no gradient of the step."""
    backward(case.loss())
    for gradient in case.gradients():
        gradient.zero_()
    case.clip()


def scales_and_adds_noise(case: Case) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backward(scaler.scale(case.loss()))
    scaler.unscale_(case.optimizer)
    for parameter in case.parameters:
        assert parameter.grad is not None
        parameter.grad.add_(0.01)
        with torch.no_grad():
            parameter.add_(0.001)


AS_TORCH = [
    *(writes, writes_a_multiple, writes_what_it_has_summed, writes_after_a_window_that_it_throws_away),
    *(keeps_the_graph, uses_the_remedy, looks_beside, scales_and_adds_noise),
]


@pytest.mark.parametrize("step", AS_TORCH)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_equals_torch_goes_on(step: Step) -> None:
    alone = train(gs.Session(), step)
    for got in loop_in_threads(partial(train, step=step), strategy="allreduce", deadlines=DEADLINES):
        torch.testing.assert_close(got, alone, rtol=1e-9, atol=1e-12)


# ---- SyncBatchNorm ----------------------------------------------------------------------


def normed(session: gs.Session, *, at_wrap: bool, later: bool) -> torch.Tensor:
    """Trains a SyncBatchNorm that is in training mode at `wrap`, and in the steps, or not."""
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3), nn.Linear(3, 1)).double()
    draw(model)
    model[1].train(at_wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.wrap(model, optimizer)
    model[1].train(later)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(SAMPLES if session.world_size == 1 else SAMPLES[session.rank :: 2]).square().mean())
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
@pytest.mark.parametrize("at_wrap", [True, False])
def test_sync_batch_norm_is_refused_where_it_cannot_join_statistics(strategy: str, at_wrap: bool) -> None:
    deadlines = gs.Deadlines(join_s=1 if at_wrap else 60, silence_s=10, lease_s=3, retry_s=5)
    with pytest.raises(
        ConfigError, match=r"'1' is a SyncBatchNorm in training mode.* Use BatchNorm.*GroupNorm"
    ):
        loop_in_threads(partial(normed, at_wrap=at_wrap, later=True), strategy=strategy, deadlines=deadlines)


def test_sync_batch_norm_that_is_not_trained_or_has_all_samples_goes_on() -> None:
    loop = partial(normed, at_wrap=False, later=False)
    for got in loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES):
        torch.testing.assert_close(got, loop(gs.Session()), rtol=1e-9, atol=1e-12)
    loop = partial(normed, at_wrap=True, later=True)
    (got,) = loop_in_threads(loop, 1, strategy="allreduce", deadlines=DEADLINES)
    torch.testing.assert_close(got, loop(gs.Session()), rtol=1e-9, atol=1e-12)
