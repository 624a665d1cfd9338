"""Carries out a hybrid: each part computes the data-parallel layers for its own samples, and its pieces of the others.

The n samples of a minibatch are divided evenly among the K parts. They go through the model-parallel layers in turns:

    assemble     one turn of all n samples
    broadcast    K turns: turn t has the samples of part t, which sends them to all others
    slices       K turns: turn t has 1/K of the samples of each part

In each turn (`split.hybrid_model` has the kinds of stages):

    first     each part sends what it has made of the turn's samples to the parts that use it
    pieces    each part computes its columns or rows of a layer, for all samples of the turn
    between   layers behind a divided one are data parallel: in `broadcast` each part has 1/K of the turn's
              samples, in the others its own
    back      the same way: gradients go to the parts that have made the values, and are summed there in their order

Values of turn t + 1 travel while turn t is computed, and no others: a part holds the samples of two turns.

A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: schemes (a), (b), (c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import torch

from gradstream.errors import UnknownNameError
from gradstream.pipeline.executor import TensorChannel, TensorTransfer
from gradstream.runtime.tasks import let_others_run
from gradstream.split.hybrid_model import EVERYWHERE
from gradstream.split.plan import DATA, SplitPlan, Stage, Value

Rows = tuple[int, int]

HYBRIDS = ("assemble", "broadcast", "slices")
"""All turns."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The `pipeline=` of a split model whose parts have all layers but a few, and samples of their own.

    Args:
        turns: in which turns samples go through the model-parallel layers; see the module.
        layers: names of the linear layers and convolutions that are model parallel: divided over all parts. None takes
            the linear layers at the end of the model.

    Raises:
        UnknownNameError: there are no such turns.

    Example:
        >>> gs.pipeline.Hybrid("broadcast")
        Hybrid(turns='broadcast', layers=None)
    """

    turns: Literal["assemble", "broadcast", "slices"] = "assemble"
    layers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.turns not in HYBRIDS:
            raise UnknownNameError("turns of Hybrid", str(self.turns), HYBRIDS)


@dataclass(frozen=True, slots=True)
class HybridTurn:
    """Samples that go through the model-parallel layers together.

    Args:
        samples: [start, stop) of the minibatch's samples, for each part: those that it reads.
        behind: edges among the turn's samples, by which the parts divide the layers behind a divided one.
    """

    samples: tuple[Rows, ...]
    behind: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """Edges among the turn's samples, by which the parts read them."""
        return (0, *accumulate(stop - start for start, stop in self.samples))

    def num_read(self, part: int) -> int:
        """Number of samples that a part reads."""
        return self.first[part + 1] - self.first[part]

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.behind[-1]


def make_turns(turns: str, num_samples: int, parts: int) -> tuple[HybridTurn, ...]:
    """The turns of a minibatch, without empty ones.

    Args:
        turns: one of HYBRIDS.
        num_samples: of the minibatch.
        parts: number of parts, K.
    """
    own = list(pairwise(_edges(0, num_samples, parts)))
    found = []
    for number in range(1 if turns == "assemble" else parts):
        if turns == "assemble":
            rows = own
        elif turns == "broadcast":
            rows = [one if part == number else (one[0], one[0]) for part, one in enumerate(own)]
        else:
            rows = [list(pairwise(_edges(*one, parts)))[number] for one in own]
        turn = HybridTurn(tuple(rows), ())
        behind = _edges(0, turn.first[-1], parts) if turns == "broadcast" else turn.first
        if behind[-1]:
            found.append(HybridTurn(turn.samples, tuple(behind)))
    return tuple(found)


def _edges(start: int, stop: int, parts: int) -> list[int]:
    return [start + (stop - start) * part // parts for part in range(parts + 1)]


class HybridStages(Protocol):
    """What a part computes."""

    async def forward(
        self, stage: int, turn: int, samples: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The outputs of a stage, by name, from its inputs. Keeps what the backward needs."""
        ...

    async def backward(
        self, stage: int, turn: int, samples: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The gradients of all inputs that have one. Adds that of the weights to the part's own."""
        ...


async def run_turns(
    plan: SplitPlan,
    part: int,
    turns: Sequence[HybridTurn],
    stages: HybridStages,
    channel: TensorChannel,
    data: Callable[[str, Rows], torch.Tensor],
    *,
    backward: bool = True,
) -> None:
    """Computes a minibatch on one part. All parts do so at the same time.

    Args:
        plan: from `plan_hybrid`.
        part: number of this part.
        turns: from `make_turns`.
        stages: computes the stages.
        channel: leads to the other parts.
        data: (name, samples) → a value of these samples of the minibatch, which this part reads.
        backward: whether to compute gradients, or outputs alone.

    Raises:
        BaseException: whatever `stages` or `channel` raises.
    """
    works = [_TurnWork(plan, part, number, turn, stages, channel, data) for number, turn in enumerate(turns)]
    before = [work for work in works if await work.read()]
    await works[0].send_first()
    for work, following in zip(works, [*works[1:], None], strict=True):
        if following is not None:
            await following.send_first()
        await work.forward()
        if backward:
            await work.backward()
    for work in before if backward else ():
        await work.backward_first()


class _TurnWork:
    """One part's work on one turn, and the tensors that it holds meanwhile."""

    def __init__(
        self,
        plan: SplitPlan,
        part: int,
        number: int,
        turn: HybridTurn,
        stages: HybridStages,
        channel: TensorChannel,
        data: Callable[[str, Rows], torch.Tensor],
    ) -> None:
        self._plan, self._part, self._number, self._turn = plan, part, number, turn
        self._stages, self._channel, self._data = stages, channel, data
        self._values = {value.name: value for value in plan.values}
        opening = plan.stages[plan.parts]
        self._opening = opening if opening.part == EVERYWHERE else None  # reads, and needs no other part
        own = [stage for stage in plan.stages[plan.parts :] if stage.part in (part, EVERYWHERE)]
        self._own = [one for one in own if one is not self._opening and self._size(one)]
        self._made: dict[str, torch.Tensor] = {}  # by name, for the samples of this part
        self._held: dict[str, torch.Tensor] = {}  # by name, for the samples that this part needs
        self._gradients: dict[str, torch.Tensor] = {}  # of what this part needs
        self._users = {name: [one for one in own if name in one.inputs] for name in self._values}

    # ---- which samples --------------------------------------------------------------------

    def _rows(self, stage: Stage | None, part: int) -> Rows:
        """[start, stop) of the turn's samples for which a part computes a stage, or reads the minibatch (None)."""
        if stage is None or stage is self._opening:
            return self._turn.first[part], self._turn.first[part + 1]
        if stage.part == EVERYWHERE:
            return self._turn.behind[part], self._turn.behind[part + 1]
        return (0, self._turn.size) if stage.part == part else (0, 0)

    def _size(self, stage: Stage) -> int:
        start, stop = self._rows(stage, self._part)
        return stop - start

    def _source(self, value: Value) -> Stage | None:
        return None if value.source == DATA else self._plan.stages[value.source]

    def _needed(self, value: Value, part: int) -> Rows:
        """The samples of a value that the stages of a part use, except the opening one, which makes its own."""
        rows = [
            self._rows(stage, part)
            for stage in self._plan.stages
            if value.name in stage.inputs and stage is not self._opening
        ]
        rows = [row for row in rows if row[0] < row[1]]
        return (min(start for start, _ in rows), max(stop for _, stop in rows)) if rows else (0, 0)

    def _travelling(self, value: Value, source: int, target: int) -> Rows:
        """The samples of a value that one part makes and another, or the same, needs."""
        made, needed = self._rows(self._source(value), source), self._needed(value, target)
        start, stop = max(made[0], needed[0]), min(made[1], needed[1])
        return (start, stop) if start < stop else (0, 0)

    def _transfers(self, value: Value, *, out: bool) -> Iterator[tuple[int, Rows]]:
        """(other part, samples) of a value that leaves this part, or comes to it: the next part first."""
        for step in range(1, self._plan.parts):
            other = (self._part + step) % self._plan.parts  # so that not all send to the same one
            ends = (self._part, other) if out else (other, self._part)
            rows = self._travelling(value, *ends)
            if other != self._part and rows[0] < rows[1]:
                yield other, rows

    # ---- forward --------------------------------------------------------------------------

    async def read(self) -> bool:
        """Computes the stage that needs no other part. Returns whether it has samples here."""
        start, stop = self._rows(None, self._part)
        if start == stop:
            return False
        for value in self._plan.values:
            if value.source == DATA:
                self._made[value.name] = self._data(value.name, self._turn.samples[self._part])
        if self._opening is None:
            return False
        given = {name: self._made[name] for name in self._opening.inputs}
        self._made |= await self._stages.forward(self._opening.number, self._number, stop - start, given)
        return True

    async def send_first(self) -> None:
        """Sends what `read` has made to the parts that use it."""
        for value in self._plan.values:
            if value.name in self._made:
                await self._send(value)

    async def _send(self, value: Value) -> None:
        begin, _ = self._rows(self._source(value), self._part)
        for other, (start, stop) in self._transfers(value, out=True):
            transfer = TensorTransfer(value.name, self._number, self._part, other, False, stop - start)
            await self._channel.send(transfer, self._made[value.name][start - begin : stop - begin])

    async def forward(self) -> None:
        """Computes all other stages, of which this part has samples or a piece."""
        for stage in self._own:
            begin, end = self._rows(stage, self._part)
            given = {}
            for name in stage.inputs:
                start, _ = self._needed(self._values[name], self._part)
                given[name] = (await self._take(self._values[name]))[begin - start : end - start]
            outputs = await self._stages.forward(stage.number, self._number, end - begin, given)
            for name in stage.outputs:
                self._made[name] = outputs[name]
                await self._send(self._values[name])
            await let_others_run()  # sends begin now, also where `stages` computes without ever waiting
        self._held.clear()

    async def _take(self, value: Value) -> torch.Tensor:
        """A value, for all samples that this part needs, from all parts that make it."""
        if value.name not in self._held:
            begin, _ = self._rows(self._source(value), self._part)
            start, stop = self._travelling(value, self._part, self._part)
            pieces = (
                {self._part: self._made[value.name][start - begin : stop - begin]} if start < stop else {}
            )
            for other, (start, stop) in self._transfers(value, out=False):
                transfer = TensorTransfer(value.name, self._number, other, self._part, False, stop - start)
                pieces[other] = await self._channel.receive(transfer)
            ordered = [pieces[part] for part in sorted(pieces)]
            self._held[value.name] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        return self._held[value.name]

    # ---- back -----------------------------------------------------------------------------

    async def backward(self) -> None:
        """The way back through the stages of `forward`."""
        for stage in reversed(self._own):
            returned = await self._stages.backward(
                stage.number, self._number, self._size(stage), await self._gradients_of(stage)
            )
            for value in (self._values[name] for name in stage.inputs):
                if value.has_gradient:
                    await self._return(value, stage, returned[value.name])
            await let_others_run()

    async def backward_first(self) -> None:
        """The same of the stage that `read` has computed."""
        assert self._opening is not None
        gradients = await self._gradients_of(self._opening)
        await self._stages.backward(self._opening.number, self._number, self._size(self._opening), gradients)

    async def _return(self, value: Value, stage: Stage, gradient: torch.Tensor) -> None:
        """Adds the gradient from one of the stages that use a value here; the first of them sends the sum home."""
        begin, end = self._rows(stage, self._part)
        start, stop = self._needed(value, self._part)
        users = [user for user in self._users[value.name] if user in self._own]
        if len(users) > 1:
            into = self._gradients.setdefault(
                value.name, gradient.new_zeros((stop - start, *gradient.shape[1:]))
            )
            into[begin - start : end - start] += gradient
        else:
            self._gradients[value.name] = gradient
        if stage is users[0]:
            total = self._gradients[value.name]
            for other, (first, last) in self._transfers(value, out=False):
                transfer = TensorTransfer(value.name, self._number, self._part, other, True, last - first)
                await self._channel.send(transfer, total[first - start : last - start])

    async def _gradients_of(self, stage: Stage) -> dict[str, torch.Tensor]:
        """The gradients of a stage's outputs: sums over the parts that have used them, in their order."""
        return {
            name: await self._gradient(self._values[name], stage)
            for name in stage.outputs
            if self._values[name].has_gradient
        }

    async def _gradient(self, value: Value, stage: Stage) -> torch.Tensor:
        begin, end = self._rows(stage, self._part)
        pieces = dict(self._transfers(value, out=True))
        own = self._travelling(value, self._part, self._part)
        if own[0] < own[1]:
            pieces[self._part] = own
        total: torch.Tensor | None = None
        for part in sorted(pieces):
            start, stop = pieces[part]
            if part == self._part:
                needed, _ = self._needed(value, part)
                piece = self._gradients[value.name][start - needed : stop - needed]
            else:
                transfer = TensorTransfer(value.name, self._number, part, self._part, True, stop - start)
                piece = await self._channel.receive(transfer)
            if total is None:
                total = torch.zeros((end - begin, *piece.shape[1:]), dtype=piece.dtype)
            total[start - begin : stop - begin] += piece
        assert total is not None
        return total
