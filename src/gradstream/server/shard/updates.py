"""The arithmetic of updates.

The state machine has chosen the pushes of an update, and the rule gives the weight of each. Each part passes
through the correction, if there is one. Then it is added to the chunk's sum; or it is applied to the parameters,
together with that sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gradstream.errors import NonFiniteError
from gradstream.memory import Span
from gradstream.model.base import length
from gradstream.optim.groups import Piece
from gradstream.runtime.base import Runtime, Work
from gradstream.server.aggregation import (
    AggregationRule,
    CoordinateRule,
    PushHeader,
    RobustRule,
    SenderStates,
    WholeRule,
    add_distances,
    weights_of,
)
from gradstream.server.rows import Part, RowPart, row_sum
from gradstream.server.shard.agreement import TensorSums
from gradstream.server.shard.state import Apply
from gradstream.server.shard.store import ShardStore
from gradstream.telemetry.meters import Contribution, NoiseMeter

SecondPass = Callable[[], torch.Tensor | None]

BRIEF_ELEMS = 1 << 18
"""An update of at most this many elements takes less time than handing it to another thread."""


@dataclass(eq=False)
class Updates:
    """Computes updates on the node's arithmetic thread, one of a chunk at a time.

    Args:
        runtime: runtime of the shard's node.
        store: vectors of the shard.
        rule: weighs pushes.
        senders: state of the correction for each sender; None if there is no correction.
        tensor_sums: adds up sums over whole tensors, where the update rule needs them; else None.
        noise: gets the squares of gradients, where they are measured; else None.
    """

    runtime: Runtime
    store: ShardStore
    rule: AggregationRule
    senders: SenderStates | None
    tensor_sums: TensorSums | None = None
    noise: NoiseMeter | None = None
    _largest: PushHeader | None = None  # of all pushes so far, by its rate times its length

    def changes_nothing(self, due: Apply) -> bool:
        """Whether there is nothing to compute, as for most chunks of a push of some rows."""
        if self.store.changed is None or not due.update or due.summed:
            return False
        return all(held.header.empty for held in due.update)

    async def prepare(self, due: Apply, parts: Sequence[Part]) -> SecondPass | None:
        """The first of two passes over a chunk, for a rule that needs sums over whole tensors.

        It waits for all other chunks. Meanwhile this one is as before, and may be read.

        Args:
            due, parts: as for `compute`.

        Returns:
            The second pass; None if the rule needs no sums.
        """
        sums, chunk, store, robust = self.tensor_sums, due.chunk, self.store, self.rule.robust
        if sums is None or not due.update or due.update[0].assign:
            return None
        present, weights = _present(due), self._usable_weights(due)

        def gather(_: object) -> list[Piece] | None:
            gradients, scales = [self._whole(chunk, part) for part in parts], weights
            if robust is not None:
                total = self._combine(robust, due, present, gradients, weights)
                if total is None:
                    return None
                gradients, scales = [total], [1.0]
            store.gather(chunk, gradients, scales, summed=due.summed > 0)
            return store.partial_sums(chunk, due.step)

        pieces: list[Piece] | None = None
        if parts:  # else nobody has a gradient of this chunk; other chunks may have some
            reads = [store.span(vector, chunk) for vector in (store.parameters, *store.state.values())]
            writes = store.sum_spans(chunk)
            if isinstance(robust, WholeRule) and robust.centred:
                writes += [store.centre_span(chunk)]
            work, none = _priced("apply", len(reads[0]) * len(parts)), list[Piece]()
            pieces = await self.runtime.compute(
                gather, work=work, reads=reads, writes=writes, shape_only=none
            )
        total = await sums.total(chunk, due.step, pieces or ())
        if pieces is None:
            return lambda: None
        return partial(store.update, chunk, (), (), lr=due.lr, step=due.step, summed=True, tensor_sums=total)

    async def finish(self, due: Apply, second: SecondPass) -> None:
        """Carries out the second pass of `prepare`. The caller keeps readers away meanwhile."""
        spans = [*self.store.update_spans(due.chunk), *self.store.sum_spans(due.chunk)]
        square = await self.runtime.compute(
            lambda _: self._square(due, second()),
            work=_priced("apply", len(spans[0])),
            writes=spans,
            shape_only=math.inf,
        )
        self._note_squares(due, square)

    async def compute(self, due: Apply, parts: Sequence[Part]) -> None:
        """Carries an update out, or adds it to the chunk's sum. The caller keeps readers away meanwhile.

        Args:
            due: the update, as the state machine asked for it.
            parts: parts of its pushes; empty pushes have none.

        Raises:
            What the rule, the correction or the update rule raises: the chunk is undefined then.
        """
        for one in _present(due):
            if self._largest is None or _reach(one) > _reach(self._largest):
                self._largest = one
        rows = [part for part in parts if isinstance(part, RowPart)]
        alone = due.completes and not due.summed and self.senders is None
        if due.update and due.update[0].assign:
            await self._assign(due.chunk, self._whole(due.chunk, parts[0]))
        elif rows and len(rows) == len(parts) and alone:
            await self._update_rows(due, rows)
        elif parts or (due.summed and due.completes):
            await self._update(due, [self._whole(due.chunk, part) for part in parts])

    def blamed(self, due: Apply, error: NonFiniteError) -> NonFiniteError:
        """The error of an update that has made an element NaN or infinite, with the pushes that it was made of.

        Its culprit is the worker that asked for a larger rate than all others, or whose own push is more than half of
        the sum; nobody where they are alike, since the model then diverges by itself. Where no push of the update can
        overflow a number or its square, and one before was a thousand times as large, it is the worker of that one:
        what it has left in the parameters or in the optimizer's state is too large for any further update.
        """
        pushes = list(zip(_present(due), self._weights(due), strict=True))
        if not pushes:
            return error
        largest, bound = self._largest, math.sqrt(torch.finfo(self.store.dtype).max)
        reach = max(_reach(one) for one, _ in pushes)
        if (
            largest is not None
            and max(one.length for one, _ in pushes) < bound
            and _reach(largest) > 1000 * reach
        ):
            earlier = f"push {largest.sequence} of {largest.sender} (rate {largest.lr:g}, length {largest.length:g})"
            return NonFiniteError(
                f"{error}. No push of this update is large enough for that: {earlier} was, in an update before",
                error.traceback_text,
                largest.sender,
            )
        sizes = [abs(weight) * one.length for one, weight in pushes]
        rates = sorted(one.lr for one, _ in pushes)
        culprit = ""
        if len(rates) > 1 and rates[-1] > rates[-2]:
            culprit = next(one.sender for one, _ in pushes if one.lr == rates[-1])
        elif max(sizes) > sum(sizes) / 2:
            culprit = pushes[sizes.index(max(sizes))][0].sender
        named = [
            f"push {one.sequence} of {one.sender} (rate {one.lr:g}, length {one.length:g}, weight {weight:g})"
            for (one, weight), _ in sorted(zip(pushes, sizes, strict=True), key=lambda pair: -pair[1])
        ]
        more = f", and {len(named) - 4} more" if len(named) > 4 else ""
        return NonFiniteError(
            f"{error}. It was made of {', '.join(named[:4])}{more}", error.traceback_text, culprit
        )

    def keep_senders(self, names: Collection[str]) -> None:
        """Frees the state of the correction for all other senders."""
        if self.senders is not None:
            self.senders.keep_senders(names)

    async def note_read(self, sender: str, chunk: int, version: int, fetch: tuple[int, int]) -> None:
        """Copies a chunk that a sender reads, where the correction of the sender's next push needs it."""
        place = None if self.senders is None else self.senders.place(sender, chunk, version, fetch)
        if place is None:
            return
        span = self.store.span(self.store.parameters, chunk)
        await self.runtime.compute(
            lambda _: place.tensor.copy_(span.tensor),
            work=_priced("copy", len(span)),
            reads=[span],
            writes=[place],
        )

    async def _assign(self, chunk: int, elements: torch.Tensor) -> None:
        store = self.store
        await self.runtime.compute(
            lambda _: store.parameters_of(chunk).copy_(elements),
            work=_priced("apply", len(elements)),
            writes=store.update_spans(chunk),
        )
        store.headroom.forget(chunk)
        if store.changed is not None:
            store.changed.note(chunk, None, 0)

    async def _update(self, due: Apply, pushed: Sequence[torch.Tensor]) -> None:
        chunk, store, summed = due.chunk, self.store, due.summed > 0
        present, weights = _present(due), self._usable_weights(due)
        vector = present[0].vector if present else ""
        parameters = store.span(store.parameters, chunk)
        # An update that only joins the sum does not change the parameters: peers may read them in place.
        reads, writes = ([], store.update_spans(chunk)) if due.completes else ([parameters], list[Span]())
        if summed or not due.completes:
            writes += store.sum_spans(chunk)
        if self.senders is not None:
            corrected = [one for one in present if not one.redone]
            writes += [span for one in corrected for span in self.senders.spans(one, chunk)]

        robust = self.rule.robust
        if isinstance(robust, WholeRule) and robust.centred:
            writes += [store.centre_span(chunk)]

        def arithmetic(_: object) -> float:
            parts = self._corrected(chunk, present, pushed, parameters.tensor)
            if robust is not None:
                total = self._combine(robust, due, present, parts, weights)
                if total is not None:
                    store.update(chunk, [total], [1.0], lr=due.lr, step=due.step)
                return math.inf
            lengths = [
                math.inf if self.senders else one.length for one in present
            ]  # a correction changes them
            bound = math.fsum(abs(weight) * one for weight, one in zip(weights, lengths, strict=True))
            if not due.completes:
                store.gather(chunk, parts, weights, bound=bound, summed=summed)
                return math.inf
            if vector:
                total = store.replace(vector, chunk, parts, weights, summed=summed)
            else:
                rate, step = due.lr, due.step
                total = store.update(chunk, parts, weights, lr=rate, step=step, bound=bound, summed=summed)
            return self._square(due, total)

        work = _priced("apply", len(parameters) * max(1, len(pushed)))
        square = await self.runtime.compute(
            arithmetic, work=work, reads=reads, writes=writes, shape_only=math.inf
        )
        self._note_squares(due, square)
        if self.senders is not None:
            for one in (one for one in present if not one.redone):
                self.senders.used(one, chunk)
        if store.changed is not None and due.completes:
            store.changed.note(chunk, None, due.step)

    def _square(self, due: Apply, total: torch.Tensor | None) -> float:
        """The square of the gradient of an update that is measured; infinite for another."""
        if total is None or self.noise is None or not self.noise.due(due.step):
            return math.inf
        return length(total) ** 2

    def _note_squares(self, due: Apply, joined: float) -> None:
        """Reports the squares of an update that is measured; those of contributions were found when they arrived."""
        if self.noise is None or not self.noise.due(due.step):
            return
        present, weights = _present(due), self._weights(due)
        here = [
            Contribution(one.samples, weight, one.length**2)
            for one, weight in zip(present, weights, strict=True)
        ]
        self.noise.add(due.step, [one.samples for one in present], here, joined)

    def _combine(
        self,
        robust: RobustRule,
        due: Apply,
        present: Sequence[PushHeader],
        parts: Sequence[torch.Tensor],
        scales: Sequence[float],
    ) -> torch.Tensor | None:
        """The contributions as one, by a robust rule; None if every one is skipped."""
        if isinstance(robust, CoordinateRule):
            return robust.combine(parts, scales)
        assert isinstance(robust, WholeRule)
        shares = weights_of(robust, due.distances, [one.rank for one in present])
        if not any(shares.values()):
            return None
        total = torch.zeros_like(parts[0])
        for one, part, scale in zip(present, parts, scales, strict=True):
            total.add_(part, alpha=shares[one.rank] * scale)
        if robust.centred:
            centre = self.store.centre_span(due.chunk).tensor
            total.add_(centre, alpha=1.0 - math.fsum(shares.values()))
            centre.copy_(total)
        return total

    async def measure(
        self, contributions: Mapping[int, Sequence[tuple[PushHeader, Part | None]]], num_workers: int
    ) -> list[float]:
        """Squared distances of the contributions of a round over this shard's chunks: see `add_distances`."""
        robust, store = self.rule.robust, self.store
        assert isinstance(robust, WholeRule)

        def arithmetic(_: object) -> list[float]:
            table = torch.zeros(1 + num_workers, 1 + num_workers, dtype=torch.float64)
            for chunk, came in contributions.items():
                parts: list[torch.Tensor | None] = [None] * num_workers
                for header, part in reversed(
                    came
                ):  # of several of a worker, the first counts: see `SynchronousRound`
                    if part is not None:
                        (scale,) = self.rule.weights(header.round, [header])
                        parts[header.rank] = self._whole(chunk, part) * scale
                centre = store.centre_span(chunk).tensor if robust.centred else None
                add_distances(table, parts, centre, pairs=robust.pairs)
            numbers: list[float] = table.flatten().tolist()
            return numbers

        passes = num_workers * (num_workers - 1) // 2 if robust.pairs else num_workers
        elems = sum(len(store.parameters_of(chunk)) for chunk in contributions)
        return await self.runtime.compute(
            arithmetic,
            work=Work("reduce", elems=passes * elems),
            reads=[store.centre_span(chunk) for chunk in contributions] if robust.centred else (),
            shape_only=[0.0] * (1 + num_workers) ** 2,
        )

    async def _update_rows(self, due: Apply, parts: Sequence[RowPart]) -> None:
        """Updates only the rows that the pushes contain."""
        store, changed = self.store, self.store.changed
        assert changed is not None
        chunk, rows, weights = due.chunk, changed.rows, self._usable_weights(due)

        def arithmetic(_: object) -> torch.Tensor:
            total = row_sum(rows, chunk, parts, weights)
            elements = rows.elements(chunk, total.numbers)
            store.update_some(chunk, elements, total.values, lr=due.lr, step=due.step)
            return total.numbers

        numbers = await self.runtime.compute(
            arithmetic,
            work=_priced("apply", sum(len(part.values) for part in parts)),
            writes=store.update_spans(chunk),
        )
        changed.note(chunk, numbers, due.step)

    def _whole(self, chunk: int, part: Part) -> torch.Tensor:
        """All elements of a chunk: 0 in rows that were not pushed."""
        if not isinstance(part, RowPart):
            return part
        assert self.store.changed is not None
        start, stop = self.store.chunks.bounds(chunk)
        out = part.values.new_zeros(stop - start)
        out[self.store.changed.rows.elements(chunk, part.numbers)] = part.values
        return out

    def _weights(self, due: Apply) -> list[float]:
        """The weight of each push that is not empty: the rule's, times the push's rate over the rate of the update."""
        headers = [held.header for held in due.update]
        weights = self.rule.weights(due.step - 1, headers) if headers else ()
        scaled = self.store.has_rate and due.lr and self.rule.robust is None  # else all count alike
        return [
            weight * (header.lr / due.lr if scaled else 1.0)
            for weight, header in zip(weights, headers, strict=True)
            if not header.empty
        ]

    def _usable_weights(self, due: Apply) -> list[float]:
        """The weights. Raises NonFiniteError where one is too large for the dtype: rates are too far apart."""
        weights = self._weights(due)
        if not all(abs(weight) <= torch.finfo(self.store.dtype).max for weight in weights):
            raise NonFiniteError(f"update {due.step}, chunk {due.chunk}: the weight of a push has overflowed")
        return weights

    def _corrected(
        self,
        chunk: int,
        present: Sequence[PushHeader],
        pushed: Sequence[torch.Tensor],
        parameters: torch.Tensor,
    ) -> Sequence[torch.Tensor]:
        """The corrected elements of each push. A push that is redone was computed on parameters just fetched."""
        if self.senders is None:
            return pushed
        return [
            elements if one.redone else self.senders.corrected(one, chunk, elements, parameters)
            for one, elements in zip(present, pushed, strict=True)
        ]


def _reach(push: PushHeader) -> float:
    """How far a push can move the parameters: its rate times its length; 0 if one of them is not a number."""
    reach = abs(push.lr) * push.length
    return reach if math.isfinite(reach) else 0.0


def _present(due: Apply) -> list[PushHeader]:
    return [held.header for held in due.update if not held.header.empty]


def _priced(kind: str, elems: int) -> Work:
    return Work(kind, elems=elems, brief=elems <= BRIEF_ELEMS)
