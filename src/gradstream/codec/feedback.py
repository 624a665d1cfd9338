"""`ErrorFeedback`: adds what a codec drops from one tensor to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradstream.codec.base import NO_STATE, BuiltIn, Codec, SparseCodec, State
from gradstream.codec.low_rank import PowerSGD
from gradstream.errors import ConfigError

RESIDUAL = "residual"


def _check_inner(name: str, codec: object) -> None:
    """Raises ConfigError unless this is a codec without state."""
    kind = type(codec).__name__
    if isinstance(codec, PowerSGD) or getattr(codec, "state_names", None):
        raise ConfigError(f"{name}: {kind} keeps what it leaves out already; use it alone")
    if not hasattr(codec, "encoded_bytes"):
        raise ConfigError(f"{name}: got a {kind}; expected a codec, such as gs.codecs.TopK(0.01)")


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Adds to each tensor what was dropped from earlier ones, and keeps what is dropped from it.

    ::

        p = g + e;   send C(p);   e ← decay · (p - C(p))

    With decay = 1, the sum of all that was sent and the current e is the sum of all g: nothing is lost, only delayed.
    e is computed from what the receiver decodes, so it includes rounding. It is lost with its worker.

    Args:
        codec: C, which keeps no state of its own.
        decay: share of the residual that is kept, in [0, 1].

    Raises:
        ConfigError: a codec with state, or another share.

    Reference:
        Seide, Fu, Droppo, Li, Yu, 1-bit stochastic gradient descent, 2014; Karimireddy, Rebjock, Stich, Jaggi, Error
        feedback fixes signSGD and other gradient compression schemes, 2019.

    Example:
        >>> codec = gs.codecs.ErrorFeedback(gs.codecs.TopK(density=0.5))
        >>> state, into, sent = {"residual": torch.zeros(2)}, torch.empty(8, dtype=torch.uint8), torch.empty(2)
        >>> for _ in range(2):
        ...     codec.encode(torch.tensor([3.0, 2.0]), into, state)
        ...     codec.decode(into, sent)
        >>> sent, state["residual"]
        (tensor([0., 4.]), tensor([3., 0.]))
    """

    unbiased: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL,)  # e

    codec: Codec
    decay: float = 1.0

    def __post_init__(self) -> None:
        _check_inner("ErrorFeedback", self.codec)
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"ErrorFeedback: decay is {self.decay!r}; expected a number in [0, 1]")

    @property
    def dense(self) -> bool:
        """See `Codec`."""
        return bool(getattr(self.codec, "dense", False))

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return self.codec.encoded_bytes(elems)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        residual = state[RESIDUAL].add_(tensor)
        self.codec.encode(residual, into, seed=seed)
        if isinstance(self.codec, SparseCodec):
            places, values = self.codec.entries(into, len(residual))
            residual[places] -= values
        else:
            sent = torch.empty_like(residual)
            self.codec.decode(into, sent)
            residual.sub_(sent)
        if self.decay != 1:
            residual.mul_(self.decay)

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """See `Codec`."""
        self.codec.decode(encoded, into)


def sparse_part(codec: Codec) -> SparseCodec | None:
    """The codec that decodes what this one sends, if it sends few of the elements."""
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    return inner if isinstance(inner, SparseCodec) else None


@dataclass(frozen=True, slots=True)
class EF21(BuiltIn):
    """Sends the change of a gradient since the last one, within the codec's precision.

    ::

        send C(g - h);   h ← h + C(g - h);   receiver: the same h

    Both sides keep h, which the receiver uses as the gradient. If the gradients of workers differ even at the minimum,
    ErrorFeedback stays at a distance from it that grows with the learning rate; this does not.

    Args:
        codec: C, which keeps no state of its own.

    Raises:
        ConfigError: a codec with state.

    Reference:
        Richtárik, Sokolov, Fatkhullin, EF21: a new, simpler, theoretically better, and practically faster error
        feedback, 2021.
    """

    state_names: ClassVar[tuple[str, ...]] = ("estimate",)  # the gradient as the receiver knows it, h

    codec: Codec

    def __post_init__(self) -> None:
        _check_inner("EF21", self.codec)

    def encoded_bytes(self, elems: int) -> int:
        """See `Codec`."""
        return self.codec.encoded_bytes(elems)

    def encode(
        self, tensor: torch.Tensor, into: torch.Tensor, state: State = NO_STATE, *, seed: int = 0
    ) -> None:
        """See `Codec`."""
        estimate = state["estimate"]
        self.codec.encode(tensor - estimate, into, seed=seed)
        estimate.add_(self.change(into, len(tensor)))

    def decode(self, encoded: torch.Tensor, into: torch.Tensor) -> None:
        """Adds the change to `into`, the receiver's h of this sender."""
        into.add_(self.change(encoded, len(into)))

    def change(self, encoded: torch.Tensor, elems: int) -> torch.Tensor:
        """C(g - h), (elems,)."""
        change = torch.empty(elems)
        self.codec.decode(encoded, change)
        return change
