"""Joint gradients where a loop does what is out of the ordinary. Most of it drawn loops have found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradstream as gs
from gradstream.errors import ConfigError, GradientError
from gradstream.session.agreement import Digest
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)
SAMPLES = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def own(session: gs.Session, samples: torch.Tensor = SAMPLES) -> torch.Tensor:
    """A third of the samples for worker 1, the others for worker 0."""
    if session.world_size == 1:
        return samples
    cut = len(samples) * 2 // 3
    return samples[cut:] if session.rank else samples[:cut]


class Case:
    """A model whose parameters all workers make alike, and its optimizer."""

    def __init__(self, session: gs.Session, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), **{"lr": 0.1, "weight_decay": 0.1, **options}
        )
        self.session = session

    def wrap(self) -> None:
        self.session.wrap(self.model, self.optimizer)

    def loss(self) -> torch.Tensor:
        return self.model(own(self.session)).square().mean()  # type: ignore[no-any-return]

    def set_gradients(self, *, in_place: bool = False) -> None:
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.loss(), parameters), strict=True):
            if in_place and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient

    def parameters(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def alike(loop: Callable[[gs.Session], torch.Tensor]) -> None:
    """Holds the workers' results to those of a process that is alone."""
    for result in loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES):
        torch.testing.assert_close(result, loop(gs.Session()), rtol=1e-9, atol=1e-12)


def test_a_wrapped_model_can_be_copied_and_the_copy_is_of_no_run() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        for _ in range(3):
            teacher = copy.deepcopy(case.model)
            teacher(SAMPLES[: 1 + 5 * session.rank]).sum().backward()
            copy.deepcopy(case.optimizer)
            case.optimizer.zero_grad()
            case.loss().backward()  # type: ignore[no-untyped-call]
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_gradients_that_a_closure_sets_are_joined() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()

        def closure() -> float:
            case.set_gradients()
            return 0.0

        case.optimizer.step(closure)
        case.optimizer.step(closure=closure)
        return case.parameters()

    alike(loop)


def test_gradients_that_are_written_into_those_of_the_step_before_are_joined() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        for _ in range(3):
            case.set_gradients(in_place=True)
            case.optimizer.step()
        return case.parameters()

    alike(loop)


@pytest.mark.parametrize("before", [True, False])
def test_steps_may_be_made_within_backward(before: bool) -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, weight_decay=0.1) for p in case.model.parameters()}

        def used(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for wrapping in (not before, before):
            if wrapping:
                for parameter in case.model.parameters():
                    parameter.register_post_accumulate_grad_hook(used)  # type: ignore[no-untyped-call]
            else:
                session.wrap(case.model, list(optimizers.values()))
        for _ in range(3):
            case.loss().backward()  # type: ignore[no-untyped-call]
        return case.parameters()

    alike(loop)


def test_a_gradient_that_is_thrown_away_stays_none() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        for _ in range(2):
            with session.no_sync():
                case.loss().backward()  # type: ignore[no-untyped-call]
            case.optimizer.zero_grad()
            hidden = case.model[0](own(session)).detach()
            case.model[2](hidden).square().mean().backward()
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_what_is_unfrozen_is_joined_in_backward_though_the_model_is_not_called() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.model[0].requires_grad_(False)
        case.wrap()
        case.model[0].requires_grad_(True)
        for _ in range(2):
            case.optimizer.zero_grad()
            session.samples(len(own(session)))
            case.model[2](case.model[0](own(session))).square().mean().backward()
            nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_a_parameter_that_was_not_wrapped_is_refused() -> None:
    def loop(session: gs.Session) -> None:
        case = Case(session)
        case.wrap()
        case.optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(1, dtype=torch.float64))]})
        (case.loss() * late).sum().backward()  # type: ignore[no-untyped-call]
        case.optimizer.step()

    with pytest.raises(ConfigError, match="make it before wrap"):
        loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)


def test_an_optimizer_that_was_not_wrapped_is_refused_where_its_gradients_are_this_workers_own() -> None:
    def loop(session: gs.Session, *, meant: bool) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        again, other = torch.optim.SGD(case.model.parameters(), lr=0.1), torch.optim.SGD([scale], lr=0.1)
        (case.loss() * scale).sum().backward()  # type: ignore[no-untyped-call]
        case.optimizer.step()
        again.step()  # of gradients that are joint
        if meant:
            with session.no_sync():
                other.step()
        else:
            other.step()
        return case.parameters()

    alike(partial(loop, meant=True))
    with pytest.raises(ConfigError, match="which was not wrapped"):
        loop_in_threads(partial(loop, meant=False), strategy="allreduce", deadlines=DEADLINES)


def test_a_gradient_that_is_clipped_before_it_is_joined_is_refused() -> None:
    def loop(session: gs.Session) -> None:
        case = Case(session)
        case.wrap()
        with session.no_sync():
            case.loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        case.optimizer.step()

    with pytest.raises(ConfigError, match="out of no_sync"):
        loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)


def test_samples_of_a_model_that_is_trained_in_evaluation_mode_count() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.model.eval()
        case.wrap()
        for _ in range(2):
            case.optimizer.zero_grad()
            case.loss().backward()  # type: ignore[no-untyped-call]
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_minibatches_of_a_loader_do_not_count_behind_its_loop() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        dealt = session.shard([SAMPLES[:6], SAMPLES[6:]])  # each worker has as many, and own() is uneven
        for inputs in dealt if session.world_size > 1 else [SAMPLES]:
            case.optimizer.zero_grad()
            case.model(inputs).square().mean().backward()
            case.optimizer.step()
        for _ in range(2):
            case.optimizer.zero_grad()
            case.loss().backward()  # type: ignore[no-untyped-call]
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_a_validation_between_a_minibatch_and_its_pass_does_not_count() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session)
        case.wrap()
        dealt = session.shard([SAMPLES[:8], SAMPLES[8:]])
        for inputs in dealt if session.world_size > 1 else [SAMPLES]:
            case.model.eval()
            for checked in session.shard([SAMPLES[:3]]):  # worker 1 repeats it, which counts none
                case.model(checked)
            case.model.train()
            case.optimizer.zero_grad()
            case.model(inputs).square().mean().backward()
            case.optimizer.step()
        return case.parameters()

    alike(loop)


def test_a_worker_without_samples_changes_nothing_though_it_takes_a_branch_of_its_own() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session, momentum=0.9)
        other = nn.Linear(4, 1).double()
        nn.init.ones_(other.weight)
        nn.init.ones_(other.bias)
        session.wrap([case.model, other], [case.optimizer, second := torch.optim.Adam(other.parameters())])
        for samples in (SAMPLES, SAMPLES[:1]):  # of one, worker 1 has all
            case.optimizer.zero_grad()
            mine = own(session, samples)
            model = case.model if len(mine) else other
            model(mine).square().mean().backward()
            case.optimizer.step()
            second.step()
        return torch.cat([case.parameters(), nn.utils.parameters_to_vector(other.parameters()).detach()])

    alike(loop)


def test_a_worker_without_samples_may_take_a_branch_whose_gradient_was_set_to_zero() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session, momentum=0.9)
        second = copy.deepcopy(case.model)
        session.wrap(
            [case.model, second],
            optimizer := torch.optim.Adam([*case.model.parameters(), *second.parameters()]),
        )
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            mine = own(session, SAMPLES[:1] if step else SAMPLES)  # of one, worker 1 has all
            models = [case.model, second] if step == 0 else [case.model] if len(mine) else [second]
            torch.stack([model(mine).square().mean() for model in models]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return torch.cat([case.parameters(), nn.utils.parameters_to_vector(second.parameters()).detach()])

    alike(loop)


def test_a_layer_may_get_its_gradient_twice_in_one_backward() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        layer = nn.Linear(4, 4).double()
        nn.init.eye_(layer.weight)
        nn.init.ones_(layer.bias)
        _, optimizer = session.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        for number in (12, 9, 6):
            optimizer.zero_grad()
            inputs = own(session, SAMPLES[:number]).clone().requires_grad_()
            layer(torch.tanh(checkpoint(layer, inputs, use_reentrant=True))).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(layer.parameters()).detach()

    alike(loop)


def test_a_fused_optimizer_passes_a_step_over_for_a_grad_scaler() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        case = Case(session, fused=True)
        case.wrap()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for factor in (1.0, torch.inf, 1.0):
            case.optimizer.zero_grad()
            scaler.scale(case.loss() * (factor if session.rank == 0 else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.step(case.optimizer)
            scaler.update()
        return case.parameters()

    alike(loop)


def test_state_that_an_optimizer_is_made_with_lies_as_its_parameters_do() -> None:
    def loop(session: gs.Session) -> torch.Tensor:
        model = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        _, optimizer = session.wrap(model, torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True))
        for _ in range(2):
            optimizer.zero_grad()
            model(own(session).view(-1, 1, 2, 2).expand(-1, 2, -1, -1)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    alike(loop)


def test_a_gradient_that_is_not_finite_is_refused_in_a_closure_as_well() -> None:
    def loop(session: gs.Session) -> None:
        case = Case(session)
        case.wrap()

        def closure() -> torch.Tensor:
            loss = case.loss() * (torch.nan if session.rank else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        case.optimizer.step(closure)

    with pytest.raises(GradientError, match="GradScaler"):
        loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)


def test_small_replicas_are_looked_at_as_a_whole_and_large_ones_in_turn() -> None:
    small = {str(number): torch.full((3,), float(number)) for number in range(4)}
    digest = Digest(small)
    first = digest.next()
    assert digest.next() == first
    assert first[0] == "one of '0' to '3'"
    small["2"][1] += 1
    assert digest.next()[1] != first[1]
    large = Digest({"a": torch.zeros(Digest.PIECE_ELEMS + 5), "b": torch.zeros(Digest.PIECE_ELEMS)})
    assert [large.next()[0] for _ in range(4)] == [
        "parameter 'a'",
        "one of 'a' to 'b'",
        "one of 'b' to 'a'",
        "one of 'a' to 'b'",
    ]
