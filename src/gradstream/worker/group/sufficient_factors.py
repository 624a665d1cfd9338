"""Layers whose gradients travel as factors: every worker forms the product of the joined batch itself.

    ∇W = Σ_r w_r δ_rᵀ x_r      all-gather of (w_r δ_r, x_r) over the workers r, instead of a sum of products

What a layer needs each round follows from the plan and from what all workers have agreed on, so that all
call the same operations. In the first round the backward pass itself determines whether a layer's gradient is
one product of a row per sample; where it is not, on any worker, the layer goes the usual way from there on.

Workers get the same bits where their machines multiply matrices alike: on processors of the same kind, with
as many threads each.
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
"""Whether the gradient of a layer goes as factors, with this many rows a worker; the same at all workers."""

BLOCK_ELEMS = 64  # of `slice_of`


def outside(bucket: tuple[int, int], layers: Sequence[FactoredLayer | MatrixPlace]) -> list[tuple[int, int]]:
    """[start, stop) of what a bucket has besides these layers, which are in the order of the vector."""
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
        """Multiplies this worker's share in."""
        if self.pair.state == "empty":
            self.pair.clear()
        if math.isnan(weight):
            self.pair.delta.fill_(weight)
        else:
            self.pair.delta.mul_(weight)

    def form(self, gradient: torch.Tensor) -> None:
        """The product of the joined batch into its place of (E,), in the order of ranks."""
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
    """What a worker does for the layers that may go as factors.

    Args:
        runtime: of this node.
        group: the workers.
        layers: of the model, in the order of the vector.
        decide: which of them, in a round.
        dtype: of the model.
        on_choice: told once what was chosen.
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
        """Those that go as factors in this round, in the order of the vector."""
        return [one.layer for one in self._round.values()]

    def begin(self, sizes: Sequence[int] | None) -> FactorPairs | None:
        """Begins a round of this many samples at each worker; None if nobody knows.

        Returns:
            Where this worker's own factors land.
        """
        rows = max(sizes or (0,))
        self._round = {
            layer.name: _Round.of(layer, sizes or (), self._memory_of(layer, rows), self._group.rank)
            for layer in (self._layers if rows else ())
            if layer.name not in self._refused and self._decide(layer, rows)
        }
        return {name: one.pair for name, one in self._round.items()} or None

    def _memory_of(self, layer: FactoredLayer, rows: int) -> Vector:
        """As much as it takes; all workers make it in the same round, and in the same order."""
        elems = part_of(layer, rows) * self._group.size
        found = self._memory.get(layer.name)
        if found is None or len(found) < elems:
            found = self._memory[layer.name] = self._group.allocate(elems, self._dtype, "factors")
        return found

    @property
    def agreed(self) -> bool:
        """Whether the workers have agreed already that all layers of this round can be exchanged as factors."""
        return self._shown and self._round.keys() <= self._agreed

    async def agree(self, gradient: Vector, rows: int) -> None:
        """Before anything of a round is exchanged, its gradient (E,) done: the workers determine together.

        Args:
            rows: this worker's samples.
        """
        new = [one for name, one in self._round.items() if name not in self._agreed]
        if new:
            refused = await self._asked([rows > 0 and one.pair.state == "refused" for one in new])
            for one, no in zip(new, refused, strict=True):
                if no:
                    await self._give_up(one, gradient)
                self._agreed.add(one.layer.name)
        if not self._shown:
            self._shown = True
            self._on_choice(self._choice())

    async def _asked(self, flags: Sequence[bool]) -> list[bool]:
        """Whether any worker says so, one by one."""
        if self._flags is None:
            self._flags = self._group.allocate(len(self._layers), torch.float64, "flags")
        span = self._flags[: len(flags)]
        if not span.tensor.is_meta:
            span.tensor.copy_(torch.tensor(flags, dtype=torch.float64))
        total = await self._group.allreduce(span)
        return (
            [False] * len(flags) if total.tensor.is_meta else [count > 0 for count in total.tensor.tolist()]
        )

    async def _give_up(self, one: _Round, gradient: Vector) -> None:
        """The layer goes the usual way: the product that was not formed is formed now."""
        place = gradient[one.layer.start : one.layer.stop]

        def form(_: object) -> None:
            if one.pair.state == "empty":
                place.tensor.zero_()
            one.pair.refuse(one.layer.place(gradient.tensor))

        work = Work("product", elems=len(one.pair.x) * len(place))
        await self._runtime.compute(form, work=work, writes=[place])
        self._refused.add(one.layer.name)
        del self._round[one.layer.name]

    def _choice(self) -> FactorsEvent:
        chosen = self._round
        return FactorsEvent(
            layers={layer.name: "factors" if layer.name in chosen else "gradient" for layer in self._layers},
            factor_elems={name: len(one.own) for name, one in chosen.items()},
            gradient_elems={layer.name: layer.elems for layer in self._layers},
        )

    async def exchange(self, layer: FactoredLayer, gradient: Vector, weight: float) -> Span:
        """Gathers a layer's factors and forms the product, in its place of the gradient vector (E,).

        Args:
            layer: the layer.
            gradient: the vector.
            weight: of this worker's share; NaN makes the product NaN for all workers.

        Returns:
            What this worker has sent to each other one.

        Raises:
            GradientError: its gradient is no product any more.
            PeerLostError, DeadlineError: naming a worker.
        """
        one = self._round[layer.name]
        own = one.own
        if one.pair.state == "refused":
            raise GradientError(
                f"{layer.name}: its gradient was one product of a row per sample, and is not in this step; "
                "say factors=False"
            )
        await self._runtime.compute(
            lambda _: one.weigh(weight), work=Work("reduce", elems=len(own)), writes=[own], lane="exchange"
        )
        await self._group.all_gather(one.span)
        place = gradient[layer.start : layer.stop]
        await self._runtime.compute(
            lambda _: one.form(gradient.tensor),
            work=Work("product", elems=sum(one.sizes) * len(place)),
            reads=[one.span],
            writes=[place],
            lane="exchange",
        )
        return own
