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

from drawn.loop import BY_HAND, Loop
from drawn.parts import CLIPS, DIM, EDITS, EVENTS, MODELS, Model, make_optimizer, scheduler_of
from gradstream.session.session import Session

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
        step: that it is at.
        kept: the model's state at the beginning.
    """

    model: Model
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, loop: Loop, session: Session) -> None:
        self.loop, self.session = loop, session
        self.dtype: torch.dtype = getattr(torch, loop.dtype)
        self._alone = session.world_size == 1
        self._numbers = torch.Generator().manual_seed(loop.seed)
        self.model = self._made(loop.model)
        for number in loop.frozen:
            layers = self.model.layers()
            layers[number % len(layers)].requires_grad_(False)
        self.optimizers = self.made_optimizers()
        self.kept: State = {}
        self.step = 0
        self._batches = [[[self._piece(n) for n in sizes] for sizes in parts] for parts in loop.sizes]
        if loop.ending == "not a number" and (broken := self._batches[1][0][-1]) is not None:
            broken[0][0] = torch.inf
        self._dealt: Iterator[Piece] | None = None
        self._now: list[tuple[int, Piece]] = []  # what a loss is of: (whose, minibatch)
        self._within = loop.backward == "steps within backward"
        if self._within and loop.seed % 2:
            self._step_within_backward()

    def _made(self, kind: str) -> Model:
        model = MODELS[kind](random.Random(f"model {self.loop.seed}")).to(self.dtype)
        model.complete()
        with torch.no_grad():
            for tensor in model.parameters():
                # wrap makes them those of worker 0
                tensor.copy_(self._drawn(*tensor.shape) * 0.5 + self.session.rank)
        return model

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._numbers, dtype=torch.float64).to(self.dtype)

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
        return [
            make_optimizer(kind, own, options, loop.groups)
            for (kind, options), own in zip(loop.optimizers, dealt, strict=True)
        ]

    # ---- minibatches --------------------------------------------------------------------

    def _piece(self, size: int | None) -> Piece | None:
        return None if size is None else (self._drawn(size, DIM), self._drawn(size, DIM))

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
            return
        piece = pieces[self.session.rank] if self._dealt is None else next(self._dealt)
        assert piece is not None
        self._now = [(self.session.rank, piece)]

    # ---- losses -------------------------------------------------------------------------

    def _loss(self, of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None) -> Any:
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
        reentrant = self.loop.backward == "reentrant"
        return nn.functional.mse_loss(self.model(checkpoint(self.model, inputs, use_reentrant=reentrant)), y)

    def _penalised(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        outputs = self._outputs(inputs, rank)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return nn.functional.mse_loss(outputs, y) + slope.square().sum(1).mean()

    def _curved(self, x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
        """The loss, and its gradient's product with a vector of ones: both are means over samples."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        loss = self._error(x, y, rank)
        found: Sequence[Any] = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        return loss + 0.1 * torch.stack([one.sum() for one in found if one is not None]).sum()

    def _differentiate_again(self) -> None:
        """Goes back through averaged gradients, which have the graph of one worker's samples."""
        known = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        total = torch.stack([gradient.sum() for _, gradient in known]).sum()
        torch.autograd.grad(total, [parameter for parameter, _ in known], allow_unused=True)

    # ---- the loop -----------------------------------------------------------------------

    def train(self) -> State:
        """Goes through the loop; returns everything that it leaves."""
        self.kept = copy.deepcopy(self.model.state_dict())
        if self._within and not self.loop.seed % 2:
            self._step_within_backward()
        schedulers = [scheduler_of(self.loop.scheduler, optimizer) for optimizer in self.optimizers]
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in self._steps():
            event = self.loop.events.get(step, "")
            self._happens(event)
            if not self.loop.zeroing.endswith("last"):
                self.zero()
            self._make_step({"skip": [], "only the first": self.optimizers[:1]}.get(event, self.optimizers))
            with torch.no_grad():
                EDITS[self.loop.edit](self)
            for scheduler in schedulers:
                if scheduler is not None:
                    scheduler.step()
            if self.loop.zeroing.endswith("last"):
                self.zero()
        return self.state()

    def _make_step(self, chosen: list[torch.optim.Optimizer]) -> None:
        kind = self.loop.backward
        if kind == "steps within backward":
            self._loss().backward()
        elif kind == "scaler":
            self._scaled(chosen)
        elif kind.startswith("closure"):
            for optimizer in chosen:
                optimizer.step(self._closure)
        else:
            self._backward(kind)
            CLIPS[self.loop.clip](self)
            self._spoil()
            for optimizer in chosen:
                optimizer.step()

    def _backward(self, kind: str) -> None:
        if kind == "two losses":
            self._loss().backward()
            self._loss(self._other_error).backward()
        elif kind == "sum of losses":
            (self._loss() + self._loss(self._other_error)).backward()
        elif kind == "retained graph":
            loss = self._loss()
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        elif kind == "of some parameters":
            chosen = [p for p in self.model.parameters() if p.requires_grad][::2]
            self._loss().backward(inputs=chosen)
        elif kind in ("accumulate", "accumulate apart", "join by step", "throw away"):
            self._accumulate(kind)
        elif kind.startswith("by hand"):
            self._by_hand(kind)
        elif kind == "penalty":
            self._loss(self._penalised).backward()
        elif kind in ("keeps the graph", "hessian"):
            self._loss().backward(create_graph=True)
            if kind == "hessian":
                self._differentiate_again()
        elif kind == "second derivatives":
            self._loss(self._curved).backward()
        else:
            self._loss(self._checked if kind in ("checkpointed", "reentrant") else None).backward()

    def _accumulate(self, kind: str) -> None:
        parts = len(self._batches[self.step])
        for part in range(parts):
            if part:
                self._take(part)
            if kind == "accumulate" or (part == parts - 1 and kind != "join by step"):
                if kind == "throw away":
                    self.zero(default="none")
                (self._loss() / parts).backward()
            else:
                with self.session.no_sync():
                    (self._loss() / parts).backward()

    def _by_hand(self, kind: str = "") -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients: Sequence[Any] = torch.autograd.grad(self._loss(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if kind.endswith("place") and gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            elif gradient is not None and kind.endswith("detached"):
                parameter.grad = gradient.detach()
            elif gradient is not None and kind.endswith("summed"):
                parameter.grad = torch.zeros_like(gradient).add_(gradient, alpha=0.5).add_(gradient)
            else:
                parameter.grad = gradient

    def _closure(self) -> float:
        self.zero(default="none")
        if self.loop.backward == "closure by hand":
            self._by_hand()
        else:
            self._loss().backward()
        CLIPS[self.loop.clip](self)
        return 0.0

    def _scaled(self, chosen: list[torch.optim.Optimizer]) -> None:
        loss = self._scaler.scale(self._loss())
        if self.loop.seed % 2 and self.step == 1 and 0 in (rank for rank, _ in self._now):
            loss = loss * torch.inf  # one worker's, of a part of all samples
        loss.backward()
        for optimizer in chosen:
            self._scaler.unscale_(optimizer)
        CLIPS[self.loop.clip](self)
        for optimizer in chosen:
            self._scaler.step(optimizer)
        if chosen:
            self._scaler.update()

    def _step_within_backward(self) -> None:
        def used(number: int, _: torch.Tensor) -> None:
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()

        for number, parameter in enumerate(self.model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(used, number))  # type: ignore[no-untyped-call]

    def discard(self) -> None:
        """Throws the gradients of a window away."""
        with self.session.no_sync():
            self._loss().backward()
        self.zero(default="none")

    def zero(self, default: str = "") -> None:
        """Zeroes gradients in the loop's way; one that never does, in the way of `default`."""
        way = default if self.loop.zeroing == "never" else self.loop.zeroing
        if way == "module":
            self.model.zero_grad()
        elif way:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=way.startswith("none"))

    # ---- what happens between steps -----------------------------------------------------

    def _happens(self, event: str) -> None:
        first = self.optimizers[0]
        if self.loop.held_back == self.step:
            known = {id(parameter) for group in first.param_groups for parameter in group["params"]}
            new = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
            if new and not self._within:
                first.add_param_group({"params": new})
        if self.loop.ending == "new parameter" and self.step == 2:
            layer: Any = self.model.layers()[0]
            layer.weight = nn.Parameter(layer.weight.detach() * 2)
            first.add_param_group({"params": [layer.weight]})
        if self.loop.ending == "sync batch norm" and self.step == 2:
            self.model.body[1].train()
        if event in EVENTS:
            EVENTS[event](self)

    @torch.no_grad()
    def _spoil(self) -> None:
        """What a script must not do, on one worker otherwise than on another."""
        group, own = self.optimizers[0].param_groups[0], self.session.rank * (self.step == 1)
        if self.loop.ending == "own rate":
            group["lr"] *= 1 + own
        elif self.loop.ending == "own noise":
            group["params"][0].add_(own)
        elif self.loop.ending == "own gradient":
            group["params"][0].grad.add_(own)

    def state(self) -> State:
        """Parameters, buffers, gradients, and all that optimizers hold."""
        found: State = dict(self.model.state_dict())
        optimizers = list(enumerate(self.optimizers))
        for number, optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(parameters):
                state = optimizer.state.get(parameter, {})
                found |= {f"optimizer {number} {place} {key}": value for key, value in state.items()}
        if self.loop.ending != "uneven":  # workers that have stopped before do not take the rest over
            for number, optimizer in optimizers:
                for place, group in enumerate(optimizer.param_groups):
                    found |= {f"group {number} {place} {k}": v for k, v in group.items() if k != "params"}
            # What is not finite is NaN in all of a joint gradient; what no step was made of is not joined.
            if self.loop.backward == "scaler":
                found["scale"] = self._scaler.get_scale()
            elif self.loop.backward not in BY_HAND:
                found |= {f"gradient {name}": p.grad for name, p in self.model.named_parameters()}
        return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
