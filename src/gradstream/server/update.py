"""What a worker pushes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.memory import Span, Vector
from gradstream.runtime.base import ComputeProgress

__all__ = ["Update", "UpdatePiece"]


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """What is pushed of a chunk, where not all of every chunk is.

    Args:
        num_rows: of so many rows; 0 for the whole chunk.
        payload: as `rows.pack` makes it, or all of the chunk's elements.
    """

    num_rows: int
    payload: Span


@dataclass(slots=True)
class Update:
    """What is pushed.

    Args:
        vector: its elements; nobody may write them until the push is done. None pushes nothing,
            which a synchronous round still has to be told.
        samples: training samples behind it. This, `learning_rate` and `vector` may be filled in until
            anything is `ready`.
        num_gradients: minibatch gradients summed in it.
        learning_rate: to apply it with.
        loss: mean over the samples, NaN where unknown; for rules that weigh by it.
        target: what it is pushed to: "" the parameters, else a state vector of the update rule.
        base_version: by chunk, the version the gradient was computed on.
        round: synchronous: the version it is meant for.
        ready: elements that are final so far; chunks leave as this grows.
        on_done: called once all shards have acknowledged it.
        late: shards have dropped it, an expected outcome: it came behind the update it was meant for.
        sequence: number of the push, once it has begun.
        refs: minibatches whose gradients are in it.
        clock: of this worker once it is in; 0 where it keeps none. `push_soon` fills it in.
        prompt: what `pieces` makes depends on the parameters as they are now, so it is made before the worker
            goes on.
        pieces: makes, by chunk, what is pushed of it, and nothing of the chunks left out; None pushes all of
            `vector`.
    """

    vector: Vector | None
    samples: int
    learning_rate: float
    base_version: Sequence[int]
    num_gradients: int = 1
    round: int = 0
    ready: ComputeProgress | None = None
    on_done: Callable[[], None] | None = None
    assign: bool = False
    late: bool = False
    loss: float = math.nan
    target: str = ""
    sequence: int = 0
    refs: Sequence[BatchRef] = ()
    clock: int = 0
    pieces: Callable[[], Awaitable[Mapping[int, UpdatePiece]]] | None = None
    prompt: bool = False
