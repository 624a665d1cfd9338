"""What the processes of a replica tell each other beside the values of the model: turns, and reports about them.

A turn goes from the worker to its parts; a report comes back from a part. Both are short JSON texts in a vector of
fixed length, so that they travel as tagged tensors do, in order, over any carrier.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch

from gradstream.data.base import BatchRef
from gradstream.errors import InternalError
from gradstream.untrusted import MismatchError, check_record, parse_json

MESSAGE_ELEMS = 128
"""Length of a message, in float64 elements of 8 bytes."""


@dataclass(frozen=True, slots=True)
class PartTurn:
    """What a part does next.

    Args:
        kind: "batch" computes the gradient of a minibatch, by the strategy. "drain": the minibatches so far are done
            before another one begins. "flush" brings all that was computed into the model. "outputs" computes outputs
            of held-out samples. "over": there is no minibatch any more. "buffers" takes them from the worker. "finish"
            fetches the final parameters; "send" sends them. "again" forms the group of this part again.
        ref: name of the minibatch, as (epoch, partition, batch, count).
        newest: outputs are those of the newest parameters, not of the replica's own.
        epoch: membership epoch of the worker's group, for "again": a part that has a newer one does nothing.
        heard: number of the replica's receipts that the coordinator has, for "batch".
    """

    kind: Literal["batch", "drain", "flush", "outputs", "over", "buffers", "finish", "send", "again"]
    ref: tuple[int, ...] = ()
    newest: bool = False
    epoch: int = 0
    heard: int = 0

    @property
    def batch(self) -> BatchRef:
        """The name of the minibatch."""
        return BatchRef(*self.ref)


@dataclass(frozen=True, slots=True)
class PartReport:
    """What a part says to its worker.

    Args:
        kind: "pushed": minibatches are in the model. "done": of a turn. "gradient": what is known of one. "redone":
            the same of a lost replica's, which is computed beside a stream. "vote": whether this part is ready; see
            `Agreement.all_ready`.
        refs: the minibatches.
        squares: sum of the squares of the gradient's elements; 0 if nobody needs it.
        loss: loss of the minibatch, from the part that computes it; None from others.
        refused: why the gradient cannot be used, or the part is not ready; "" if it can, or is.
        epoch: membership epoch of the part's group, for a vote.
    """

    kind: Literal["pushed", "done", "gradient", "redone", "vote"]
    refs: tuple[tuple[int, ...], ...] = ()
    squares: float = 0.0
    loss: float | None = None
    refused: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class PartDecision:
    """What becomes of a gradient, the same in all parts.

    Args:
        scale: factor for each element.
        refused: why it is skipped; "" if it is not.
    """

    scale: float = 1.0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What the votes of all parts have come to.

    Args:
        ready: whether all are.
    """

    ready: bool


@dataclass(frozen=True, slots=True)
class PartGradientTurn:
    """All parts compute one gradient next: that of a minibatch of theirs, or of a lost worker's.

    Args:
        ref: name of the minibatch.
    """

    ref: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartStandsIn:
    """A part computes the minibatch of a lost worker too.

    Args:
        rank: rank of the lost worker.
        round: number of the round.
    """

    rank: int
    round: int


Message: TypeAlias = PartTurn | PartReport | PartDecision | PartOutcome | PartStandsIn | PartGradientTurn
KINDS: Sequence[type[Message]] = get_args(Message)
"""The place of a kind is its tag."""

M = TypeVar("M", bound=Message)


def encode(message: Message) -> torch.Tensor:
    """The message as a vector of `MESSAGE_ELEMS` elements of float64."""
    data = json.dumps(dataclasses.asdict(message), separators=(",", ":")).encode()
    room = MESSAGE_ELEMS * 8
    if len(data) > room:
        raise InternalError(f"a message of {len(data)} bytes between parts: expected at most {room}")
    return torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.float64)


def decode(kind: type[M], vector: torch.Tensor) -> M:
    """The message in a vector. Raises InternalError if there is none of this kind."""
    data = vector.numpy().tobytes().rstrip()
    try:
        record: dict[str, Any] = parse_json(data, max_bytes=MESSAGE_ELEMS * 8)
        if "ref" in record:
            record["ref"] = tuple(record["ref"])
        if "refs" in record:
            record["refs"] = tuple(map(tuple, record["refs"]))
        check_record(kind, record)
        return kind(**record)
    except (ValueError, TypeError, MismatchError) as error:
        raise InternalError(f"a {kind.__name__} between parts that makes no sense: {error}") from error
