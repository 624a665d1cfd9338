"""Encoded tensors as carriers send them: whole words of 4 bytes."""

from __future__ import annotations

import torch

from gradstream.codec.base import DTYPE, Codec
from gradstream.errors import ConfigError

WORD = torch.float32
"""The dtype by which carriers know an encoded tensor; its words are no numbers."""


def words_of(codec: Codec, elems: int) -> int:
    """The number of words that so many encoded elements fill."""
    return -(-codec.encoded_bytes(elems) // WORD.itemsize)


def check_dtype(codec: Codec, dtype: torch.dtype) -> None:
    """Raises ConfigError for a model whose elements codecs do not know."""
    if dtype != DTYPE:
        raise ConfigError(
            f"codec={codec}: the model has elements of {dtype}; expected {DTYPE}, the only ones that are encoded: "
            "leave codec out"
        )
