"""The text of drawn loops: the same for every worker, and for plain torch on all minibatches together."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drawn.changes import CLIPS, EDITS, EVENTS, scheduler_of
from drawn.loop import BY_HAND, Loop
from drawn.parts import DIM, MODELS, Model, make_optimizer
from gradstream.session.session import Session

__all__ = ["State", "Text"]

State = dict[str, Any]
"""Tensors and numbers, by name."""

Piece = tuple[torch.Tensor, torch.Tensor]


class Text:
    """A loop as a script would have it. Made before `wrap`; `train` is what comes after it.

    Args:
        loop: what it does.
        session: of a worker, or of a process that is alone: that takes the minibatches of all.

    Attributes:
        model, optimizers: what it trains.
        average: of the parameters, where it keeps one.
        step: that it is at.
        kept: the model's state at the beginning.
    """

    model: Model
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, loop: Loop, session: Session) -> None:
        self.loop, self.session = loop, session
        self._alone = session.world_size == 1
        self._numbers = torch.Generator().manual_seed(loop.seed)
        self.model = self._made(loop.model)
        self.modules: list[nn.Module] = [self.model]
        if loop.backward == "rivals":
            self.rival = self._made("mlp")
            self.modules.append(self.rival)
        for number in loop.frozen:
            self.model.layers()[number].requires_grad_(False)
        self.optimizers = self.made_optimizers()
        self.average: Model | None = None
        self._batches = [[[self._piece(n) for n in sizes] for sizes in parts] for parts in loop.sizes]
        if loop.ending == "not a number" and (broken := self._batches[1][0][-1]) is not None:
            broken[0][0] = torch.inf
        self._dealt: Iterator[Piece] | None = None
        self._now: list[tuple[int, Piece]] = []  # what a loss is of: (whose, minibatch)
        self.step = 0
        self.kept: dict[str, Any] = {}
        self._within = loop.backward == "steps within backward"
        if self._within and loop.seed % 2:
            self._step_within_backward()

    def _made(self, kind: str) -> Model:
        model = MODELS[kind](random.Random(f"model {self.loop.seed}")).double()
        with torch.no_grad():
            for tensor in model.parameters():
                drawn = torch.randn(tensor.shape, generator=self._numbers, dtype=torch.float64) * 0.5
                tensor.copy_(drawn + self.session.rank)  # wrap makes them those of worker 0
        return model

    def made_optimizers(self) -> list[torch.optim.Optimizer]:
        """New ones, as the loop has them at its beginning."""
        loop, parameters = self.loop, list(self.model.parameters())
        if loop.backward == "steps within backward":
            kind, options = loop.optimizers[0]
            return [make_optimizer(kind, [parameter], options, 1) for parameter in parameters]
        if loop.held_back is not None:
            last = {id(parameter) for parameter in self.model.layers()[-1].parameters()}
            parameters = [p for p in parameters if id(p) not in last] or parameters
        dealt = [parameters]
        if len(loop.optimizers) > 1:
            dealt = [parameters[::2], parameters[1::2] or parameters]
        if loop.backward == "rivals":
            dealt = [parameters, list(self.rival.parameters())]
        return [
            make_optimizer(kind, own, options, loop.groups)
            for (kind, options), own in zip(loop.optimizers, dealt, strict=True)
        ]

    # ---- data ---------------------------------------------------------------------------

    def _piece(self, size: int | None) -> Piece | None:
        if size is None:
            return None
        x, y = (torch.randn(size, DIM, generator=self._numbers, dtype=torch.float64) for _ in range(2))
        return x, y

    def _steps(self) -> Iterator[int]:
        if self.loop.counting == "loader" and not self._alone:
            flat = [piece for parts in self._batches for pieces in parts for piece in pieces]
            self._dealt = iter(self.session.shard(flat))
        for step, parts in enumerate(self._batches):
            self.step = step
            if not self._alone and parts[0][self.session.rank] is None:
                return
            self._take(0)
            yield step
        self._dealt = None

    def _take(self, part: int) -> None:
        """Goes on to this part of the step's minibatch."""
        pieces = self._batches[self.step][part]
        if self._alone:
            self._now = [(rank, piece) for rank, piece in enumerate(pieces) if piece and len(piece[0])]
        else:
            rank = self.session.rank
            piece = pieces[rank] if self._dealt is None else next(self._dealt)
            assert piece is not None
            self._now = [(rank, piece)]

    def loss(
        self, of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The mean over samples: of this worker's, or of all workers' where the process is alone."""
        of = of or self._error
        if not self._alone:
            ((rank, (x, y)),) = self._now
            if self.loop.counting == "said":
                self.session.samples(len(x))
            return of(x, y, rank) * self.loop.scale
        if not self.loop.by_rank and self.loop.seed % 3:
            x, y = (torch.cat(tensors) for tensors in zip(*(piece for _, piece in self._now), strict=True))
            return of(x, y, 0) * self.loop.scale
        total = sum(len(x) for _, (x, _) in self._now)
        losses = [of(x, y, rank) * (len(x) / total) for rank, (x, y) in self._now]
        return torch.stack(losses).sum() * self.loop.scale

    def _error(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        return nn.functional.mse_loss(self._outputs(x, rank), y)

    def _other_error(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        return nn.functional.huber_loss(self._outputs(y, rank), x)

    def _outputs(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        call = partial(type(self.model).forward, self.model) if self.loop.direct else self.model
        return call(x, self.step + rank if self.loop.by_rank else self.step)

    def _checked(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        reentrant = self.loop.backward == "checkpointed, reentrant"
        return nn.functional.mse_loss(self.model(checkpoint(self.model, inputs, use_reentrant=reentrant)), y)

    def _penalised(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        outputs = self._outputs(inputs, rank)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return nn.functional.mse_loss(outputs, y) + slope.square().sum(1).mean()

    # ---- the loop -----------------------------------------------------------------------

    def train(self) -> State:
        """Goes through the loop; returns everything that it leaves."""
        self.kept = copy.deepcopy(self.model.state_dict())
        if self._within and not self.loop.seed % 2:
            self._step_within_backward()
        schedulers = [scheduler_of(self.loop, optimizer) for optimizer in self.optimizers]
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in self._steps():
            event = self.loop.events.get(step, "")
            self._happens(event)
            if not self.loop.zeroing.endswith("last"):
                self._zero()
            self._make_step(event)
            with torch.no_grad():
                EDITS[self.loop.edit](self)
            for scheduler in schedulers:
                if scheduler is not None:
                    scheduler.step()
            if self.loop.zeroing.endswith("last"):
                self._zero()
        return self.state()

    def _make_step(self, event: str) -> None:
        kind, chosen = self.loop.backward, self.optimizers
        if event in ("skip", "only the first"):
            chosen = chosen[: event == "only the first"]
        if kind == "rivals":
            self._rivals()
        elif kind == "steps within backward":
            self.loss().backward()  # type: ignore[no-untyped-call]
        elif kind == "scaler":
            self._scaled(chosen)
        elif kind.startswith("closure"):
            for optimizer in chosen:
                optimizer.step(self._closure)
        else:
            self._backward()
            CLIPS[self.loop.clip](self)
            self._spoil()
            for optimizer in chosen:
                optimizer.step()

    def _backward(self) -> None:
        kind, parts = self.loop.backward, len(self._batches[self.step])
        if kind == "two losses":
            self.loss().backward()  # type: ignore[no-untyped-call]
            self.loss(self._other_error).backward()  # type: ignore[no-untyped-call]
        elif kind == "sum of losses":
            (self.loss() + self.loss(self._other_error)).backward()  # type: ignore[no-untyped-call]
        elif kind == "both at once":
            torch.autograd.backward([self.loss(), self.loss(self._other_error)])
        elif kind == "retained graph":
            loss = self.loss()
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            (loss * 0.5).backward()  # type: ignore[no-untyped-call]
        elif kind == "of some parameters":
            chosen = [p for p in self.model.parameters() if p.requires_grad][::2]
            self.loss().backward(inputs=chosen)  # type: ignore[no-untyped-call]
        elif kind.startswith(("accumulate", "apart")):
            self._accumulate(kind, parts)
        elif kind.startswith("by hand"):
            self._by_hand(in_place=kind.endswith("place"))
        else:
            other = {"penalty": self._penalised} | dict.fromkeys(
                ("checkpointed", "checkpointed, reentrant"), self._checked
            )
            self.loss(other.get(kind)).backward()  # type: ignore[no-untyped-call]

    def _accumulate(self, kind: str, parts: int) -> None:
        for part in range(parts):
            if part:
                self._take(part)
            joined = kind == "accumulate" or (part == parts - 1 and not kind.startswith("apart, joined"))
            if joined:
                if kind == "apart and thrown away":
                    self._zero(default="none")
                (self.loss() / parts).backward()  # type: ignore[no-untyped-call]
            else:
                with self.session.no_sync():
                    (self.loss() / parts).backward()  # type: ignore[no-untyped-call]

    def _by_hand(self, *, in_place: bool) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients: Sequence[Any] = torch.autograd.grad(self.loss(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if in_place and gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient

    def _closure(self) -> float:
        self._zero(default="none")
        if self.loop.backward == "closure by hand":
            self._by_hand(in_place=False)
        else:
            self.loss().backward()  # type: ignore[no-untyped-call]
        CLIPS[self.loop.clip](self)
        return 0.0

    def _scaled(self, chosen: list[torch.optim.Optimizer]) -> None:
        loss = self._scaler.scale(self.loss())
        if self.loop.seed % 2 and self.step == 1 and 0 in (rank for rank, _ in self._now):
            loss = loss * torch.inf  # one worker's, of a part of all samples
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in chosen:
            self._scaler.unscale_(optimizer)
        CLIPS[self.loop.clip](self)
        for optimizer in chosen:
            self._scaler.step(optimizer)
        if chosen:
            self._scaler.update()

    def _rivals(self) -> None:
        maker, judge = self.optimizers

        def judged(x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
            made = self.model(x).detach() if self.loop.seed % 5 else self.model(x)
            return _off(self.rival(y), 1) + _off(self.rival(made), 0)

        def made_well(x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
            return _off(self.rival(self.model(x)), 1)

        for optimizer, loss in ((judge, judged), (maker, made_well)):
            optimizer.zero_grad(set_to_none=not self.loop.zeroing.startswith("zeros"))
            self.loss(loss).backward()  # type: ignore[no-untyped-call]
            CLIPS[self.loop.clip](self)
            optimizer.step()

    def _step_within_backward(self) -> None:
        def used(number: int, _: torch.Tensor) -> None:
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()

        for number, parameter in enumerate(self.model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(used, number))  # type: ignore[no-untyped-call]

    def _zero(self, default: str = "") -> None:
        way = default if self.loop.zeroing == "never" else self.loop.zeroing
        if way == "module":
            self.model.zero_grad()
        elif way == "by hand":
            for parameter in self.model.parameters():
                parameter.grad = None
        elif way:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=way.startswith("none"))

    # ---- what happens between steps -----------------------------------------------------

    def _happens(self, event: str) -> None:
        if self.loop.held_back == self.step:
            all_groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
            known = {id(parameter) for group in all_groups for parameter in group["params"]}
            new = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
            if new:
                self.optimizers[0].add_param_group({"params": new})
        if self.loop.ending == "new parameter" and self.step == 2:
            layer: Any = self.model.layers()[0]
            layer.weight = nn.Parameter(layer.weight.detach() * 2)
            self.optimizers[0].add_param_group({"params": [layer.weight]})
        if event in EVENTS:
            EVENTS[event](self)

    @torch.no_grad()
    def _spoil(self) -> None:
        """What a script must not do, on one worker otherwise than on another."""
        if self.step != 1:
            return
        group = self.optimizers[0].param_groups[0]
        if self.loop.ending == "own rate":
            group["lr"] *= 1 + self.session.rank
        elif self.loop.ending == "own noise":
            group["params"][0].add_(self.session.rank)
        elif self.loop.ending == "own gradient":
            group["params"][0].grad.add_(self.session.rank)

    def state(self) -> State:
        """Parameters, buffers, gradients, and all that optimizers hold."""
        loop = self.loop
        found: State = {}
        named = {"average": self.average} if self.average is not None else {}
        for name, module in (
            *((f"model {i}", module) for i, module in enumerate(self.modules)),
            *named.items(),
        ):
            found |= {f"{name} {key}": value.detach().clone() for key, value in module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(parameters):
                state = optimizer.state.get(parameter, {})
                found |= {f"optimizer {number} {place} {key}": _copied(value) for key, value in state.items()}
        if loop.ending == "uneven":
            return found  # the rest is not taken over by workers that have stopped before
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                found |= {f"group {number} {place} {k}": v for k, v in group.items() if k != "params"}
        found["scale"] = self._scaler.get_scale() if loop.backward == "scaler" else None
        # What is not finite is NaN in all of a joint gradient; what no step was made of is not joined.
        if loop.backward != "scaler" and loop.backward not in BY_HAND:
            for number, module in enumerate(self.modules):
                for name, parameter in module.named_parameters():
                    found[f"gradient {number} {name}"] = _copied(parameter.grad)
        return found


def _off(outputs: torch.Tensor, wanted: float) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, torch.full_like(outputs, wanted))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
