"""An update that a worker pushes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.memory import Span, Vector
from gradstream.runtime.base import ComputeProgress
from gradstream.wire import v1


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """The part of a chunk that a push contains, where it does not contain whole chunks.

    Args:
        num_rows: number of rows; 0 for the whole chunk.
        payload: the rows as `rows.pack` makes them, or all elements of the chunk.
    """

    num_rows: int
    payload: Span


@dataclass(slots=True)
class Update:
    """One push of a worker, to all shards.

    Args:
        vector: the elements; nobody may write them until the push is done. None pushes no elements: the server of
            a synchronous round must be told of that.
        samples: number of training samples that the gradients were computed on. This, `lr` and `vector` may be set
            until the first elements are `ready`.
        lr: learning rate to apply the update with.
        base_version: by chunk, the version that the gradient was computed on.
        num_gradients: number of minibatch gradients that are summed in the vector.
        round: version that the update is meant for; only synchronous strategies set it.
        ready: number of elements that are final so far; chunks leave as it grows. None: all elements are final.
        on_done: called once all shards have acknowledged the push.
        assign: whether the vector has initial parameters.
        late: whether a shard has dropped the push, since it came after the update it was meant for; no error.
        loss: mean loss over the samples, for rules that weigh by it; NaN where unknown.
        target: vector that the shards change: "" for the parameters, else a state vector of the update rule.
        sequence: number of the push, once it has begun.
        refs: minibatches that the gradients were computed on.
        names: the same as shards keep them in case this worker dies; none where nobody would redo the push.
        settled: number of the last push whose receipts the coordinator has.
        behalf: the lost worker in whose name this one pushes; None for an own push.
        stands_for: rank of a lost worker, whose part of a round the update is; None for the worker's own.
        clock: clock of this worker once the update is applied; 0 where workers have none. `push_soon` sets it.
        chunks: the chunks that are pushed; None for all. The server applies nothing to the others.
        pieces: makes the parts to push, by chunk; a chunk left out is not pushed. None pushes all of `vector`.
        sound: number of elements from the front that are pushed, where the gradient turned out not to be finite while
            it left; chunks behind them are pushed as absent. None: all of them.
        portion: number of the portion of a pass (`round`) that the vector has; 0 where there are no passes.
        prompt: whether `pieces` depends on the present parameters, and so must run before the worker continues.
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
    names: Sequence[v1.Receipt] = ()
    settled: int = 0
    behalf: v1.Behalf | None = None
    stands_for: int | None = None
    clock: int = 0
    chunks: Sequence[int] | None = None
    pieces: Callable[[], Awaitable[Mapping[int, UpdatePiece]]] | None = None
    sound: int | None = None
    portion: int = 0
    prompt: bool = False
