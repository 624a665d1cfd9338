"""Procedures on the vectors of the shards: batch methods as pure generators of commands.

    state ─▶ iteration ─▶ CommandRound(commands) ─▶ shards, chunk by chunk ─▶ Reply(scalars) ─▶ iteration ─▶ … ─▶ state

A procedure never sees an element of a vector. It yields rounds of commands, gets the scalars of their dot products,
and asks for passes over the data, each of which leaves Σ over all portions in the vectors `SUM` and `LOW`. It is pure:
from the same state and the same replies it yields the same rounds. So every worker may run it at once, and each chunk
carries out a round for the first worker that brings it (`server/shard/executor.py`).

Source: Dean et al. 2012 (DistBelief, section 4.2: a coordinator of L-BFGS that sends commands to the shards).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gradstream.wire import v1

# ---- procedure ---------------------------------------------------------------------------

SUM, LOW = "sum", "low"
"""Vectors of a pass: the sum of the portions' gradients as it is rounded, and the sum of what rounding has lost."""

ACCEPTED = "x"
"""The vector with the last iterate that the method has accepted. The parameters may be those of a trial meanwhile."""

State = dict[str, Any]
"""State of a procedure between two iterations, as JSON values. `done` says why it has ended; "" before."""


@dataclass(frozen=True, slots=True)
class CommandRound:
    """Commands that the shards carry out in one exchange.

    Args:
        commands: the commands, in order; each chunk carries all of them out together.
        evaluate: whether a pass over the data at the new parameters follows. The reply comes after it.
    """

    commands: Sequence[v1.Command] = ()
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of all shards to a round.

    Args:
        scalars: results of the dot products, in the order of the commands.
        loss: after a pass, the mean loss over its samples; infinite if it was not finite for each of them.
        samples: after a pass, number of its samples.
    """

    scalars: Sequence[float] = field(default=())
    loss: float = 0.0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Where all chunks are after a step was sent to them.

    Args:
        number: number of the latest step; above that of the step sent, its sender is behind and has nothing else here.
        note: from which that step is known.
        scalars: the step's results, added up over the chunks in their order, so with the same bits for any number
            of shards.
        pass_number: 1 + number of the pass whose portions the chunks take; 0 before the first.
        portions: number of portions of that pass that every chunk has.
        samples: number of their samples.
        loss: mean loss over these; infinite if one was not finite.
        by: the worker that has brought the latest step.
    """

    number: int
    note: bytes
    scalars: Sequence[float] = ()
    pass_number: int = 0
    portions: int = 0
    samples: int = 0
    loss: float = 0.0
    by: str = ""

    @classmethod
    def of(cls, sent: int, result: v1.CommandResult) -> StepResult:
        """Adds up the results of all chunks."""
        latest = max((chunk.number for chunk in result.chunks), default=sent)
        if latest > sent or not result.chunks:
            return cls(latest, result.note, by=result.by)
        fewest = min(result.chunks, key=lambda one: one.portions[0].first)
        total = fewest.portions[0]
        return cls(
            latest,
            result.note,
            _added([chunk.scalars for chunk in result.chunks]),
            fewest.pass_number,
            total.first,
            total.samples,
            total.loss,
            result.by,
        )


def _added(parts: Sequence[Sequence[float]]) -> Sequence[float]:
    """Sums of the chunks' results; () where a worker's step was another one on some chunks than on others."""
    alike = len({len(part) for part in parts}) == 1
    return [sum(values) for values in zip(*parts, strict=True)] if alike else ()


Steps = Generator[CommandRound, Reply, State]


class Procedure(Protocol):
    """A method as a sequence of iterations. The first one ends when `ACCEPTED` has the initial parameters."""

    def begin(self) -> State:
        """The state before the first iteration."""
        ...

    def iteration(self, state: State) -> Steps:
        """One iteration: yields rounds, gets their replies, and returns the next state. Does not change `state`."""
        ...


class Execution:
    """A procedure between two rounds, where it can be saved and restored.

    Args:
        procedure: the method.
        state: state before the current iteration.
        replies: replies to the rounds of that iteration so far.

    Attributes:
        state, replies: see above.
        round: the round that has no reply yet; None when the procedure has ended.
    """

    def __init__(self, procedure: Procedure, state: State, replies: Sequence[Reply] = ()) -> None:
        self._procedure = procedure
        self._begin(state)
        for reply in replies:
            self.answer(reply)

    def _begin(self, state: State) -> None:
        self.state, self.replies = state, list[Reply]()
        self.round: CommandRound | None = None
        if not state["done"]:
            self._steps = self._procedure.iteration(state)
            self.round = next(self._steps)

    def answer(self, reply: Reply) -> None:
        """Takes the reply to `round`, and moves on to the next round, of the same iteration or another."""
        self.replies.append(reply)
        try:
            self.round = self._steps.send(reply)
        except StopIteration as stop:
            self._begin(stop.value)

    @property
    def accepted(self) -> bool:
        """Whether `ACCEPTED` has an iterate: the first iteration is over."""
        return bool(self.state != self._procedure.begin())

    @property
    def record(self) -> list[Any]:
        """State and replies, as JSON values."""
        return [self.state, [[list(reply.scalars), reply.loss, reply.samples] for reply in self.replies]]

    @classmethod
    def recorded(cls, procedure: Procedure, record: Sequence[Any]) -> Execution:
        """Reads a `record`."""
        state, replies = record
        return cls(
            procedure, state, [Reply(tuple(scalars), loss, samples) for scalars, loss, samples in replies]
        )


def dot(x: str, y: str) -> v1.Command:
    """x·y, summed in float64."""
    return v1.Command(kind=v1.Command.DOT, x=x, y=y)


def add(out: str, alpha: float, x: str) -> v1.Command:
    """Out ← out + alpha·x."""
    return v1.Command(kind=v1.Command.ADD, out=out, alpha=alpha, x=x)


def scale(out: str, alpha: float) -> v1.Command:
    """Out ← alpha·out."""
    return v1.Command(kind=v1.Command.SCALE, out=out, alpha=alpha)


def copy(out: str, x: str) -> v1.Command:
    """Out ← x."""
    return v1.Command(kind=v1.Command.COPY, out=out, x=x)


def multiply(out: str, x: str) -> v1.Command:
    """Out ← out ∘ x, element by element."""
    return v1.Command(kind=v1.Command.MULTIPLY, out=out, x=x)


def zero(out: str) -> v1.Command:
    """Out ← 0, whatever it holds."""
    return v1.Command(kind=v1.Command.ZERO, out=out)


def combine(out: str, terms: Sequence[tuple[float, str]]) -> list[v1.Command]:
    """Out ← Σ alpha·x, where no x is `out`."""
    return [zero(out), *(add(out, alpha, x) for alpha, x in terms)]


def swap_accepted(vectors: dict[str, Any]) -> None:
    """Swaps the parameters "" and `ACCEPTED`, by name: a checkpoint has the accepted iterate as its parameters.

    So a later phase that begins with these parameters does not begin with a trial.
    """
    vectors[""], vectors[ACCEPTED] = vectors[ACCEPTED], vectors[""]


# ---- arithmetic --------------------------------------------------------------------------
# The arithmetic of commands on tensors: on a chunk of a shard, or on the whole vectors of a worker in a group.
#
# Results have the same bits on any processor: workers of a group compute them separately, and must agree on every
# comparison of a line search. So products and sums are rounded individually, never fused, and the order in which a dot
# product is summed does not depend on the width of vector registers.

BLOCK = 1 << 16
"""Elements that are computed at once: copies of this many stay in the processor's cache."""
FEW = 32
"""Elements of a block that are added up in Python."""


def reads_of(command: v1.Command) -> list[str]:
    """Names of the vectors that a command reads."""
    kind = v1.Command
    if command.kind == kind.DOT:
        return [command.x, command.y]
    return [command.x] if command.kind in (kind.COPY, kind.ADD, kind.MULTIPLY) else []


def outs_of(commands: Sequence[v1.Command]) -> list[str]:
    """Names of the vectors that commands change."""
    return list(dict.fromkeys(command.out for command in commands if command.kind != v1.Command.DOT))


def names_of(commands: Sequence[v1.Command]) -> list[str]:
    """Names of all vectors that commands read or change."""
    return list(
        dict.fromkeys([*(name for command in commands for name in reads_of(command)), *outs_of(commands)])
    )


def dots_of(commands: Sequence[v1.Command]) -> int:
    """Number of scalars that commands return."""
    return sum(command.kind == v1.Command.DOT for command in commands)


def perform(commands: Sequence[v1.Command], tensors: Mapping[str, torch.Tensor]) -> list[float]:
    """Carries commands out, one after the other, in place. Returns the dot products, in order."""
    results = [_compute(command, tensors) for command in commands]
    return [result for result in results if result is not None]


def _compute(command: v1.Command, tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Does the arithmetic of a command. Returns a dot product; None for a command that changes a vector."""
    inputs, kind = [tensors[name] for name in reads_of(command)], v1.Command
    if command.kind == kind.DOT:
        return _dot(*inputs)
    out = tensors[command.out]
    match command.kind:
        case kind.ZERO:
            out.zero_()
        case kind.SCALE:
            out.mul_(command.alpha)
        case kind.COPY:
            out.copy_(inputs[0])
        case kind.MULTIPLY:
            out.mul_(inputs[0])
        case _:
            for i in range(0, len(out), BLOCK):
                out[i : i + BLOCK].add_(inputs[0][i : i + BLOCK] * command.alpha)
    return None


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """x·y in float64: products block by block into one block, whose halves are added, and the last few exactly."""
    sums = torch.zeros(min(BLOCK, len(x)), dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        products = x[i : i + BLOCK].double() * y[i : i + BLOCK].double()
        sums[: len(products)].add_(products)
    while len(sums) > FEW:
        half = -(-len(sums) // 2)
        sums[: len(sums) - half].add_(sums[half:])
        sums = sums[:half]
    return math.fsum(sums.tolist())
