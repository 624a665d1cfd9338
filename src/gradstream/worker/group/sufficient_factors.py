"""Layers whose gradients are sent as factors: every worker forms the product of the joined batch itself.

    ∇W = Σ_r w_r δ_rᵀ x_r      all-gather of (w_r δ_r, x_r) over the workers r, instead of a sum of products

The exchange of a layer follows from the plan and from what all workers have agreed on, so that all call the same
operations. In the first round, the backward pass shows whether a layer's gradient is one product with one row per
sample; if it is not on any worker, the layer's gradient is exchanged whole from then on.

Workers get the same bits if their machines multiply matrices alike: on processors of the same kind, with equal
numbers of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradstream.codec.low_rank import MatrixPlace
from gradstream.collectives.group import Group
from gradstream.errors import GradientError
from gradstream.memory import Span, Vector
from gradstream.model.factors import FactoredLayer, FactorPair, FactorPairs
from gradstream.runtime.base import Runtime, Work
from gradstream.telemetry.events import FactorsEvent

Decide = Callable[[FactoredLayer, int], bool]
"""Whether a layer's gradient is sent as factors, given the rows of a worker. The same on all workers."""

BLOCK_ELEMS = 64  # of `slice_of`


def outside(bucket: tuple[int, int], layers: Sequence[FactoredLayer | MatrixPlace]) -> list[tuple[int, int]]:
    """[start, stop) of a bucket's elements outside these layers, which are in the order of the vector."""
    pieces, done = [], bucket[0]
    for layer in layers:
        if layer.start < bucket[1] and layer.stop > done:
            pieces.append((done, layer.start))
            done = layer.stop
    pieces.append((done, bucket[1]))
    return [(start, stop) for start, stop in pieces if start < stop]


@dataclass(frozen=True, slots=True)
class _Round:
    """The factors of one layer in one round.

    Args:
        layer: the layer.
        sizes: rows of each worker.
        own: this worker's part of `span`.
        span: all workers' factors, of equal parts: δ (K, M), x (K, Q) with K = max(sizes), a rest.
        pair: this worker's factors, which lie in `own`.
    """

    layer: FactoredLayer
    sizes: Sequence[int]
    span: Span
    own: Span
    pair: FactorPair

    @classmethod
    def of(cls, layer: FactoredLayer, sizes: Sequence[int], vector: Vector, rank: int) -> _Round:
        part_elems = part_of(layer, max(sizes))
        span = vector[: part_elems * len(sizes)]
        own = vector[part_elems * rank : part_elems * (rank + 1)]
        return cls(layer, sizes, span, own, FactorPair(layer, *_factors(layer, span.tensor, sizes, rank)))

    def weigh(self, weight: float) -> None:
        """Multiplies this worker's factors by its weight."""
        if self.pair.state == "empty":
            self.pair.clear()
        if math.isnan(weight):
            self.pair.delta.fill_(weight)
        else:
            self.pair.delta.mul_(weight)

    def form(self, gradient: torch.Tensor) -> None:
        """Writes the product of the joined batch into its place of (E,), summed in the order of ranks."""
        place = self.layer.place(gradient)
        first = True
        for rank, rows in enumerate(self.sizes):
            if rows:
                delta, x = _factors(self.layer, self.span.tensor, self.sizes, rank)
                if first:
                    torch.mm(delta.t(), x, out=place)
                else:
                    place.addmm_(delta.t(), x)
                first = False


def part_of(layer: FactoredLayer, rows: int) -> int:
    """Elements of a worker's part: whole blocks, so that `slice_of` cuts at them."""
    return -(-layer.factor_elems(rows) // BLOCK_ELEMS) * BLOCK_ELEMS


def _factors(
    layer: FactoredLayer, flat: torch.Tensor, sizes: Sequence[int], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ (K_r, M) and x (K_r, Q) of a worker, in the factors of all."""
    part = flat[part_of(layer, max(sizes)) * rank :]
    delta_elems, x_elems = sizes[rank] * layer.outputs, sizes[rank] * layer.inputs
    delta = part[:delta_elems].view(sizes[rank], layer.outputs)
    return delta, part[delta_elems : delta_elems + x_elems].view(sizes[rank], layer.inputs)


class SufficientFactors:
    """Exchanges a worker's layers as factors.

    Args:
        group: the workers.
        layers: layers of the model, in the order of the vector.
        decide: chooses layers for a round.
        dtype: dtype of the model.
        on_choice: called once with the choice.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        layers: Sequence[FactoredLayer],
        decide: Decide,
        dtype: torch.dtype,
        on_choice: Callable[[FactorsEvent], None],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._layers = layers
        self._decide = decide
        self._dtype = dtype
        self._on_choice = on_choice
        self._memory: dict[str, Vector] = {}
        self._flags: Vector | None = None
        self._agreed: set[str] = set()
        self._refused: set[str] = set()
        self._round: dict[str, _Round] = {}
        self._shown = False

    @property
    def layers(self) -> Sequence[FactoredLayer]:
        """The layers that are sent as factors in this round, in the order of the vector."""
        return [factored.layer for factored in self._round.values()]

    def begin(self, sizes: Sequence[int] | None) -> FactorPairs | None:
        """Begins a round with these numbers of samples of each worker, or None if they are unknown.

        Returns:
            The memory for this worker's own factors.
        """
        rows = max(sizes or (0,))
        self._round = {
            layer.name: _Round.of(layer, sizes or (), self._memory_of(layer, rows), self._group.rank)
            for layer in (self._layers if rows else ())
            if layer.name not in self._refused and self._decide(layer, rows)
        }
        return {name: factored.pair for name, factored in self._round.items()} or None

    def _memory_of(self, layer: FactoredLayer, rows: int) -> Vector:
        """Memory for a layer's factors. All workers allocate it in the same round, in the same order."""
        elems = part_of(layer, rows) * self._group.size
        memory = self._memory.get(layer.name)
        if memory is None or len(memory) < elems:
            memory = self._memory[layer.name] = self._group.allocate(elems, self._dtype, "factors")
        return memory

    @property
    def agreed(self) -> bool:
        """Whether the workers have agreed already that all layers of this round can be exchanged as factors."""
        return self._shown and self._round.keys() <= self._agreed

    async def agree(self, gradient: Vector, rows: int) -> None:
        """Agrees with the other workers on the layers, after the gradient (E,) and before any exchange of the round.

        Args:
            rows: this worker's samples.
        """
        new = [factored for name, factored in self._round.items() if name not in self._agreed]
        if new:
            refused = await self._asked([rows > 0 and factored.pair.state == "refused" for factored in new])
            for factored, no in zip(new, refused, strict=True):
                if no:
                    await self._give_up(factored, gradient)
                self._agreed.add(factored.layer.name)
        if not self._shown:
            self._shown = True
            self._on_choice(self._choice())

    async def _asked(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any worker has set it."""
        if self._flags is None:
            self._flags = self._group.allocate(len(self._layers), torch.float64, "flags")
        span = self._flags[: len(flags)]
        if not span.tensor.is_meta:
            span.tensor.copy_(torch.tensor(flags, dtype=torch.float64))
        total = await self._group.allreduce(span)
        return (
            [False] * len(flags) if total.tensor.is_meta else [count > 0 for count in total.tensor.tolist()]
        )

    async def _give_up(self, factored: _Round, gradient: Vector) -> None:
        """Exchanges the layer's gradient whole: forms the product that was not formed yet."""
        place = gradient[factored.layer.start : factored.layer.stop]

        def form(_: object) -> None:
            if factored.pair.state == "empty":
                place.tensor.zero_()
            factored.pair.refuse(factored.layer.place(gradient.tensor))

        work = Work("product", elems=len(factored.pair.x) * len(place))
        await self._runtime.compute(form, work=work, writes=[place])
        self._refused.add(factored.layer.name)
        del self._round[factored.layer.name]

    def _choice(self) -> FactorsEvent:
        chosen = self._round
        return FactorsEvent(
            layers={layer.name: "factors" if layer.name in chosen else "gradient" for layer in self._layers},
            factor_elems={name: len(factored.own) for name, factored in chosen.items()},
            gradient_elems={layer.name: layer.elems for layer in self._layers},
        )

    async def exchange(self, layer: FactoredLayer, gradient: Vector, weight: float) -> Span:
        """Gathers a layer's factors and writes their product into its place of the gradient (E,).

        Args:
            layer: the layer.
            gradient: the vector.
            weight: weight of this worker's factors; NaN makes the product NaN for all workers.

        Returns:
            The data that this worker has sent to each other worker.

        Raises:
            GradientError: the layer's gradient is not such a product any more.
            PeerLostError, DeadlineError: naming a worker.
        """
        factored = self._round[layer.name]
        own = factored.own
        if factored.pair.state == "refused":
            raise GradientError(
                f"{layer.name}: its gradient was one product of a row per sample, and is not in this step; "
                "say factors=False"
            )
        await self._runtime.compute(
            lambda _: factored.weigh(weight),
            work=Work("reduce", elems=len(own)),
            writes=[own],
            lane="exchange",
        )
        await self._group.all_gather(factored.span)
        place = gradient[layer.start : layer.stop]
        await self._runtime.compute(
            lambda _: factored.form(gradient.tensor),
            work=Work("product", elems=sum(factored.sizes) * len(place)),
            reads=[factored.span],
            writes=[place],
            lane="exchange",
        )
        return own
