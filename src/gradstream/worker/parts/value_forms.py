"""The form in which values of the model travel between parts: which may be encoded, and elements that carriers know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradstream.codec.base import DTYPE, Codec
from gradstream.codec.casts import DTYPES
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.split.plan import DATA, SplitPlan, Value

_AS = {8: torch.float64, 4: torch.float32}  # carriers know these; a view of the same bytes


@dataclass(frozen=True, slots=True)
class TransferForm:
    """How a tensor travels between two parts.

    Args:
        tag: tells it from others.
        shape, dtype: of the tensor.
        codec: encodes it; None sends it as it is.
        what: its name, for messages.
    """

    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None
    what: str

    @property
    def size_bytes(self) -> int:
        """Number of bytes that travel."""
        if self.codec is None:
            return sent_bytes(self.shape, self.dtype)
        return -(-self.codec.encoded_bytes(math.prod(self.shape)) // 4) * 4


def check_encodable(plan: SplitPlan, dtype: str | None) -> None:
    """Raises UnknownNameError or ConfigError if activations of a plan cannot travel in this dtype."""
    if dtype is None:
        return
    if dtype not in DTYPES:
        raise UnknownNameError("pipeline_dtype", str(dtype), [*DTYPES])
    crossing = [value for value, _ in plan.crossings()]
    if not any(map(is_encodable, crossing)):
        kinds = ", ".join(sorted({str(value.dtype) for value in crossing if value.source != DATA}))
        raise ConfigError(
            f"pipeline_dtype={dtype!r}: what parts send each other is {kinds or 'no activations'}, and only "
            f"{DTYPE} is sent in another dtype; leave it out"
        )


def is_encodable(value: Value) -> bool:
    """Whether a value is an activation of the dtype that codecs know."""
    return value.source != DATA and value.per_sample and value.dtype == DTYPE


def sent_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Number of bytes of `as_sent`."""
    return math.prod(shape) * (dtype.itemsize if dtype.itemsize in _AS else 4)


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as carriers know them: a view of the same bytes; as numbers of 4 bytes where they are smaller."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() not in _AS:
        flat = flat.to(_wide(tensor.dtype))
    return flat.view(_AS[flat.element_size()])


def as_it_was(flat: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of which `as_sent` has made these elements."""
    wide = flat.view(dtype if dtype.itemsize in _AS else _wide(dtype))
    return wide.to(dtype).view(shape)


def encoded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """The encoded tensor as elements that carriers know, the last of them filled up with zeros."""
    size = codec.encoded_bytes(tensor.numel())
    result = torch.empty(-(-size // 4), dtype=torch.float32)
    room = result.view(torch.uint8)
    room[size:].zero_()
    codec.encode(tensor.reshape(-1), room[:size])
    return result


def decoded(codec: Codec, came: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of which `encoded` has made these elements."""
    result = torch.empty(shape, dtype=dtype)
    size = codec.encoded_bytes(result.numel())
    codec.decode(came.view(torch.uint8)[:size], result.view(-1))
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype of 4 bytes that holds every number of a smaller one. Raises ConfigError for a larger one."""
    if dtype.itemsize > max(_AS):
        raise ConfigError(f"a value of {dtype} crosses a cut; expected elements of at most {max(_AS)} bytes")
    return torch.float32 if dtype.is_floating_point else torch.int32
