"""An update that a worker pushes."""

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
    """The part of a chunk that is pushed, where not all of every chunk is.

    Args:
        num_rows: number of rows; 0 for the whole chunk.
        payload: rows as `rows.pack` makes them, or all of the chunk's elements.
    """

    num_rows: int
    payload: Span


@dataclass(slots=True)
class Update:
    """One push of a worker, to all shards.

    Args:
        vector: the elements; nobody may write them until the push is done. None pushes nothing, which the
            server of a synchronous round still has to be told.
        samples: number of training samples behind it. This, `lr` and `vector` may be filled in
            until anything is `ready`.
        lr: learning rate to apply it with.
        base_version: by chunk, the version that the gradient was computed on.
        num_gradients: number of minibatch gradients summed in it.
        round: version that it is meant for; only synchronous strategies set it.
        ready: number of elements that are final so far; chunks leave as it grows.
        on_done: called once all shards have acknowledged the push.
        assign: it brings initial parameters.
        late: a shard has dropped it, since it came after the update it was meant for; not an error.
        loss: mean loss over the samples, for rules that weigh by it; NaN where unknown.
        target: vector that is pushed to: "" for the parameters, else a state vector of the update rule.
        sequence: number of the push, once it has begun.
        refs: minibatches whose gradients are in it.
        clock: clock of this worker once it is applied; 0 where workers have none. `push_soon` sets it.
        pieces: makes the parts to push, by chunk; chunks left out push nothing. None pushes all of `vector`.
        prompt: `pieces` depends on the parameters as they are now, so it runs before the worker goes on.
    """

    vector: Vector | None
    samples: int
    lr: float
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
